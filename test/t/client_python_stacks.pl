# One application in Python for each driver or framework: see
# test/clients/test_*.py.  This test gives them a server, and counts each of
# their tests.
#
# What would break it: a driver whose class, code or argument differs from
# docs/python.md; a lock that is kept or released at the wrong time.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Program;
use Dlock::Python;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my @stacks = (
	[ psycopg2 => 'psycopg2' ],
	[ psycopg => 'psycopg' ],
	[ asyncpg => 'asyncpg' ],
	[ django => 'django, psycopg2' ]);
my %python = map { $_->[0] => find_python("import $_->[1]") } @stacks;

plan skip_all => 'python3 with any of ' . join(', ', sort keys %python)
  unless grep { $_ } values %python;

my $node = new_server('main', conf => "deadlock_timeout = '10ms'\n");

$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	SELECT dlock_reserve('reserved/', current_user::regrole)});

$ENV{ADMIN} = $node->safe_psql('postgres', 'SELECT current_user');
name_server($node, 'app');
$ENV{PYTHONDONTWRITEBYTECODE} = 1;
$ENV{PG_TEST_TIMEOUT_DEFAULT} = $PostgreSQL::Test::Utils::timeout_default;

foreach my $name (map { $_->[0] } @stacks)
{
	if ($python{$name})
	{
		run_program($name, $python{$name},
			"$FindBin::RealBin/../clients/test_$name.py");
	}
	else
	{
		note("skipped $name, which is not installed");
	}
}
done_testing();
