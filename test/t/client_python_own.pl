# The Python client, built as a wheel and installed, over an application's own
# connections, and in the transactions of its drivers and frameworks:
# clients/python/tests/own.py says what they do.  This test gives them a
# server, and counts each of their tests.
#
# What would break it: a connection that returns to a pool too early, with
# locks or settings left on it, or after an unclear failure; a driver with
# other arguments or errors.
#
# The drivers are those of test/clients/test_asyncpg.py.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Program;
use Dlock::Python;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $needed = 'import sys, setuptools, wheel, pip, psycopg; '
  . 'assert sys.version_info >= (3, 11); ';
my $all = 'psycopg_pool, psycopg2, asyncpg, sqlalchemy, django';
my $python = find_python("${needed}import $all") || find_python($needed);

plan skip_all =>
  'python3 from 3.11 on with psycopg 3, pip, setuptools and wheel '
  . 'is not installed'
  unless $python;

my $node = new_server('main', conf => "deadlock_timeout = '10ms'\n");
my $top = "$FindBin::RealBin/../..";

$node->safe_psql('postgres', 'CREATE ROLE app LOGIN');
install_packages($python, "$top/clients/python");
$ENV{PYTHONPATH} .= ":$top/test/clients";
$ENV{ADMIN} = $node->safe_psql('postgres', 'SELECT current_user');
name_server($node, 'app');
$ENV{PYTHONDONTWRITEBYTECODE} = 1;
$ENV{PG_TEST_TIMEOUT_DEFAULT} = $PostgreSQL::Test::Utils::timeout_default;

foreach my $module (split /, /, $all)
{
	diag("skipped: $module is not installed")
	  unless find_python("${needed}import $module");
}
run_program('Python', $python, "$top/clients/python/tests/own.py");
done_testing();
