# An application that uses an object-relational mapper:
# test/clients/test_sqlalchemy.py says what it does, and what would break it.
# This test gives it a server, and counts each of its tests.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Program;
use Dlock::Python;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

# The first Python in the path may not have the packages.
my $python = find_python('import psycopg2, sqlalchemy');

plan skip_all => 'python3 with sqlalchemy and psycopg2 is not installed'
  unless $python;

my $timeout = $PostgreSQL::Test::Utils::timeout_default;
my $node = new_server('main',
	conf => "deadlock_timeout = '10ms'\nstatement_timeout = '${timeout}s'\n");

name_server($node);
$ENV{PYTHONDONTWRITEBYTECODE} = 1;

run_program('SQLAlchemy', $python,
	"$FindBin::RealBin/../clients/test_sqlalchemy.py");
done_testing();
