# What programs do with the drivers and libraries of Go and Ruby, as
# docs/applications.md advises, works; and each trap that the page warns of is one.
#
# What would break it stands in the programs, test/clients/go and
# test/clients/test_activerecord.rb.  Here they get a server, and each of their
# tests is counted.  What is not installed is left out.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = "$FindBin::RealBin/../clients";
my $dir = PostgreSQL::Test::Utils::tempdir;
my $timeout = $PostgreSQL::Test::Utils::timeout_default;
my $node = new_server('main',
	conf => "deadlock_timeout = '10ms'\nstatement_timeout = '${timeout}s'\n");

# the programs' role, and names that are kept from it
$node->safe_psql('postgres', 'CREATE ROLE app LOGIN');
$node->safe_psql('postgres',
	q{SELECT dlock_reserve('reserved/', current_user::regrole)});
$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGUSER} = $node->safe_psql('postgres', 'SELECT current_user');
$ENV{PGDATABASE} = 'postgres';

# skip() is not seen where tests pass.
sub not_installed
{
	my ($what) = @_;

	diag("skipped: $what is not installed");
	skip("$what is not installed", 1);
	return;
}

# Does a command, or a program that is given to one, run?
sub works
{
	my $command = [@_];

	return eval { run_command($command); $? == 0 };
}

# run_program($name, @command): whose tests are subtests
sub run_program
{
	my ($name, @command) = @_;

	subtest $name => sub {
		my ($out, $err) = run_command(\@command);
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
	};
	return;
}

SKIP:
{
	# as Debian has them, and without a network
	local $ENV{GO111MODULE} = 'off';
	local $ENV{GOPATH} = '/usr/share/gocode';
	local $ENV{GOCACHE} = "$dir/cache";
	local $ENV{GOFLAGS} = '';
	my ($go) = grep { works($_, 'version') } 'go', glob('/usr/lib/go-*/bin/go');

	not_installed('Go')
	  unless $go
	  && works($go, 'list', 'github.com/lib/pq', 'github.com/jackc/pgx/v4');
	system_or_bail('sh', '-c', "cd '$clients/go' && $go build -o '$dir/stacks' .");
	run_program('Go', "$dir/stacks");
}

SKIP:
{
	not_installed('ActiveRecord')
	  unless works('ruby', '-e', 'require "active_record"; require "pg"');
	run_program('ActiveRecord', 'ruby', "$clients/test_activerecord.rb");
}

$node->stop;
done_testing();
