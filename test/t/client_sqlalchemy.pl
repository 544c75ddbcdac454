# An application that uses an object-relational mapper: what it does, and what
# would break it, stands in test/clients/test_sqlalchemy.py.  Here it gets a
# server, and each of its tests is counted.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

# The first in the path may be another one than that of the packages.
my ($python) = grep {
	my $command = [ $_, '-c', 'import psycopg2, sqlalchemy' ];
	eval { run_command($command); $? == 0 }
} 'python3', '/usr/bin/python3';

plan skip_all => 'python3 with sqlalchemy and psycopg2 is not installed'
  unless $python;

my $timeout = $PostgreSQL::Test::Utils::timeout_default;
my $node = new_server('main',
	conf => "deadlock_timeout = '10ms'\nstatement_timeout = '${timeout}s'\n");

$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGDATABASE} = 'postgres';
$ENV{PYTHONDONTWRITEBYTECODE} = 1;

my ($out, $err) =
  run_command([ $python, "$FindBin::RealBin/../clients/test_sqlalchemy.py" ]);
my $status = $?;

foreach my $line (split /\n/, $out)
{
	if ($line =~ /^(not )?ok (.*)/)
	{
		ok(!$1, $2);
	}
	else
	{
		diag($line);
	}
}
is($status, 0, 'exit status') or diag($err);
done_testing();
