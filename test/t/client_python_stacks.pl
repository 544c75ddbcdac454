# Applications in Python, each over another driver or framework: what they do
# stands in test/clients/test_*.py, one program each.  Here they get a server,
# and each of their tests is counted.
#
# What would break it: a class, a code or an argument of a driver's that is not
# what docs/python.md says; a lock that stays where it must not, or goes
# where it must not.

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
$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGDATABASE} = 'postgres';
$ENV{PGUSER} = 'app';
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
