
=pod

=head1 NAME

Dlock::Scenarios - the tests that every client must pass

=head1 DESCRIPTION

clients/scenarios.md has a row for each requirement.  clients/README.md
describes how a client's runner talks to the test.  This module is the test,
for every language.  It starts servers, acts on them when the runner asks, and
checks that the runner tests each row and nothing else.

=over

=item start_servers()

Starts the servers, sets the environment for the runner, and returns the main
server.  run_scenarios() calls this itself.  A test calls it to use the server
for other tests, too.

=item run_scenarios($name, @command)

Runs the runner, and counts each row.  The name is that of a directory below
clients/.  If the environment variable DLOCK_SCENARIOS is set, only the rows
that it names run.

=back

=cut

package Dlock::Scenarios;

use strict;
use warnings FATAL => 'all';

use Dlock::Lease;
use Dlock::Standby;
use Dlock::Test;
use Dlock::WallClock;
use Exporter 'import';
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(run_scenarios start_servers);

my ($main, $other, $standby, $admin);
my @frozen;

# Clients connect over TCP, because some languages support nothing else.
my $conf = "listen_addresses = '127.0.0.1'\ndeadlock_timeout = '10ms'\n";

sub address
{
	my ($node) = @_;

	return '127.0.0.1:' . $node->port;
}

sub start_servers
{
	$main = new_server('main', conf => $conf);
	$other = new_server('other', conf => $conf, allows_streaming => 1);
	foreach my $node ($main, $other)
	{
		$node->safe_psql(
			'postgres', q{
			CREATE ROLE admin SUPERUSER LOGIN;
			CREATE ROLE app LOGIN;
			SELECT dlock_reserve('reserved/', 'admin');
			CREATE TABLE data (n integer);
			GRANT SELECT, INSERT, UPDATE, DELETE ON data TO app;
			CREATE FUNCTION raise(code text, hint text) RETURNS void
			LANGUAGE plpgsql AS $$
			BEGIN
				RAISE 'raised' USING ERRCODE = code, HINT = hint;
			END $$;
			CREATE SCHEMA late;
			CREATE TABLE late.quorum (late boolean);
			INSERT INTO late.quorum VALUES (false);
			CREATE SEQUENCE late.calls;
			CREATE FUNCTION late.dlock_renew(id bigint) RETURNS integer
			LANGUAGE plpgsql AS $$
			BEGIN
				PERFORM nextval('late.calls');
				PERFORM pg_advisory_xact_lock_shared(17);
				IF (SELECT late FROM late.quorum) THEN
					RAISE 'no quorum' USING ERRCODE = '58030';
				END IF;
				RETURN public.dlock_renew(id);
			END $$;
			CREATE FUNCTION late.dlock_lease_open(ttl interval,
				attach boolean = false, delay interval = NULL, info text = NULL)
			RETURNS bigint LANGUAGE plpgsql AS $$
			BEGIN
				PERFORM pg_sleep_for(least(ttl, '1 s'));
				RETURN public.dlock_lease_open(ttl, attach, delay, info);
			END $$;
			CREATE TABLE late.waits (function text);
			CREATE FUNCTION late.wait(function text) RETURNS void
			LANGUAGE plpgsql AS $$
			BEGIN
				IF EXISTS (SELECT FROM late.waits w WHERE w.function = $1) THEN
					PERFORM pg_advisory_xact_lock_shared(18);
				END IF;
			END $$;
			CREATE FUNCTION late.dlock_renew(id bigint, ttl interval)
			RETURNS integer LANGUAGE plpgsql AS $$
			BEGIN
				PERFORM late.wait('dlock_renew');
				RETURN public.dlock_renew(id, ttl);
			END $$;
			CREATE FUNCTION late.dlock_release_ticket(ticket bigint)
			RETURNS boolean LANGUAGE plpgsql AS $$
			BEGIN
				PERFORM late.wait('dlock_release_ticket');
				RETURN public.dlock_release_ticket(ticket);
			END $$;
			CREATE FUNCTION late.dlock_locks(name text)
			RETURNS SETOF public.dlock_locks LANGUAGE plpgsql AS $$
			BEGIN
				PERFORM late.wait('dlock_locks');
				RETURN QUERY SELECT * FROM public.dlock_locks($1);
			END $$;
			GRANT USAGE ON SCHEMA late TO app;
			GRANT SELECT ON late.waits TO app;
			GRANT SELECT ON late.quorum TO app;
			GRANT USAGE ON SEQUENCE late.calls TO app});
	}
	$standby = new_standby($other, 'standby');
	$ENV{DLOCK_MAIN} = address($main);
	$ENV{DLOCK_OTHER} = address($other);
	$ENV{DLOCK_STANDBY} = address($standby);
	$ENV{PG_TEST_TIMEOUT_DEFAULT} = $PostgreSQL::Test::Utils::timeout_default;
	return $main;
}

# Returns the prefix of a client's command that gives it another clock.
sub with_our_clock
{
	BAIL_OUT('cannot compile the clock') unless wall_clock_is_ours();
	my %clock = wall_clock();

	return 'env', map { "$_=$clock{$_}" } sort keys %clock;
}

sub processes_of
{
	my ($node) = @_;
	my $postmaster = $node->{_pid};

	return $postmaster, map { $_->[0] } grep { $_->[1] == $postmaster }
	  map { [ /^\s*(\d+)\s+(\d+)/ ] } `ps -A -o pid= -o ppid=`;
}

my %orders = (
	stop => sub {
		my ($pid) = @_;
		my $there = "FROM pg_stat_activity WHERE pid = $pid";

		# a session of the previous test may still be ending
		$admin->wait_for(
			"SELECT count(*) = 0 OR bool_and(state = 'idle') $there");
		# Stop the process while it holds no lock that a new connection needs.
		stop_while($admin, $pid, "SELECT state = 'idle' $there")
		  if $admin->query("SELECT count(*) $there");
	},
	continue => sub {
		continue_process($_[0]) if kill(0, $_[0]) == 1;
	},
	clock => \&set_wall_clock,
	freeze => sub {
		# Stop the postmaster first, so that it starts no more children.
		stop_process($main->{_pid});
		@frozen = processes_of($main);
		stop_process($_) foreach @frozen[ 1 .. $#frozen ];
	},
	thaw => sub {
		continue_process($_) foreach reverse @frozen;
		@frozen = ();
	},
	suspend => sub {
		my ($pid, $sql) = split ' ', $_[0], 2;

		stop_process($pid);
		$admin->wait_for($sql);
		continue_process($pid);
	},
	restart => sub {
		$admin->quit;
		$main->restart;
		$admin = session($main);
	},
	promote => sub {
		$other->wait_for_catchup($standby);
		kill_server($other);
		$standby->promote;
	});

sub obey
{
	my ($order) = @_;
	my ($word, $arguments) = split ' ', $order, 2;

	die "no such order: $order\n" unless $orders{$word};
	$orders{$word}->($arguments);
	return;
}

# Returns the names of the rows, in order.
sub rows
{
	my ($file) = @_;

	return slurp_file($file) =~ /^### (\w+)$/mg;
}

# Runs the runner to its end.  Returns its output without its requests.
sub run_obeying
{
	my (@command) = @_;
	my ($in, $out, $err, @lines) = ('', '', '');
	my $timer =
	  IPC::Run::timeout(2 * $PostgreSQL::Test::Utils::timeout_default);
	my $runner =
	  IPC::Run::start(\@command, '<', \$in, '>', \$out, '2>', \$err, $timer);

	while (1)
	{
		while ($out =~ s/^(.*)\n//)
		{
			my $line = $1;

			$timer->start;
			if ($line =~ /^! (.*)/)
			{
				obey($1);
				$in .= "done\n";
			}
			else
			{
				note($line);
				push @lines, $line;
			}
		}
		last unless $runner->pumpable;
		$runner->pump;
	}
	$runner->finish;
	diag($err) if $err ne '';
	return ($runner->full_result(0), @lines);
}

sub run_scenarios
{
	my ($name, @command) = @_;
	my $clients = $INC{'Dlock/Scenarios.pm'} =~ s{[^/]*/[^/]*$}{}r
	  . '../../clients';
	my @rows = rows("$clients/scenarios.md");
	my @chosen = split ' ', $ENV{DLOCK_SCENARIOS} // '';
	my (%result, @diagnosis);

	start_servers() unless $main;
	$admin = session($main);
	# clients must name their connections themselves
	delete local $ENV{PGAPPNAME};

	my ($status, @lines) = run_obeying(with_our_clock(), @command, @chosen);
	foreach my $line (@lines)
	{
		if ($line =~ /^(not )?ok (\w+)$/)
		{
			fail("$2 is tested once") if exists $result{$2};
			$result{$2} = !$1;
			ok(!$1, $2) or diag(join "\n", @diagnosis);
			@diagnosis = ();
		}
		else
		{
			push @diagnosis, $line;
		}
	}
	diag(join "\n", @diagnosis) if @diagnosis;
	is($status, 0, "exit status of the runner of $name");
	is( join(' ', sort keys %result),
		join(' ', sort(@chosen ? @chosen : @rows)),
		'each row of the table has its test, and each test its row');
	$admin->quit;
	return;
}

1;
