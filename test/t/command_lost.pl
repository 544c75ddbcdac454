# Under dlock run, the whole command is dead before its lock can be granted
# again: all its processes, including those in sessions of their own, and those
# that ignore SIGTERM.  This holds if the server stops, if the connection is
# silent or cut, and if dlock itself is stopped or killed.  If a renewal
# succeeds in time, even after a failover, the command runs on.
#
# What would break it: a call that delays the check of the deadline; a deadline
# counted from an answer; a search for processes only by process group or
# parent; a keeper that dies or hangs unnoticed.
#
# The next holder records its start by the same clock as the command.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Command;
use Dlock::Lease qw(:DEFAULT process_state);
use Dlock::Test;
use IO::Select;
use IO::Socket::INET;
use IO::Socket::UNIX;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main', allows_streaming => 1,
	conf => "listen_addresses = '127.0.0.1'\n");
my $ttl = ample(4);	# a twentieth of it allows for a busy machine
my $round = 0;

#
# A proxy: one process for each connection, and one that accepts connections.
# If these processes are stopped, the proxy is silent.  If they are killed, all
# connections are cut.
#
my $proxy;

sub start_proxy
{
	my $listener = IO::Socket::INET->new(
		Listen => 9, LocalAddr => '127.0.0.1') or die "listen: $!";
	my $socket = $node->host . '/.s.PGSQL.' . $node->port;

	$proxy->{port} = $listener->sockport;
	$proxy->{pid} = fork // die "fork: $!";
	return "host=127.0.0.1 port=$proxy->{port} dbname=postgres" if $proxy->{pid};
	setpgrp;
	$SIG{CHLD} = 'IGNORE';
	while (my $client = $listener->accept)
	{
		my $server = IO::Socket::UNIX->new($socket) or next;

		copy_bytes($client, $server) if !fork;
	}
	POSIX::_exit(0);
}

sub copy_bytes
{
	my ($client, $server) = @_;
	my $select = IO::Select->new($client, $server);

	while (1)
	{
		foreach my $from ($select->can_read)
		{
			my $to = $from == $client ? $server : $client;
			my $bytes;

			POSIX::_exit(0)
			  if !sysread($from, $bytes, 65536) || !syswrite($to, $bytes);
		}
	}
}

END { kill('KILL', -$proxy->{pid}) if $proxy->{pid}; }

# All processes of the server
sub signal_server
{
	my ($signal) = @_;
	my $postmaster = $node->{_pid};

	kill($signal, $postmaster, children($postmaster));
	return;
}

# start($conninfo, @options): starts a holder, and returns it and its worker
sub start
{
	my ($where, @options) = @_;
	my $worker = worker('lost' . ++$round);
	my $holder = Dlock::Command->new($where, 'run', "--ttl=$ttl", '--grace=500ms',
		@options, "lost$round", @{ $worker->{argv} });

	$worker->started;
	return ($holder, $worker);
}

# Check that the next holder starts after the last sign of life of this one.
sub next_is_later
{
	my ($worker, $test) = @_;
	my ($code, $out) = dlock($node, 'run', '-w', 60 * $ttl, "lost$round", $^X,
		'-MTime::HiRes=clock_gettime', '-e', 'print clock_gettime(7)');
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is($code, 0, "$test: the next one has the lock");
	cmp_ok($worker->last, '<', $out || 0, "$test: the previous command is dead by then");
	is($worker->runs, 0, "$test: with all that it has started");
	return;
}

sub all_gone
{
	my ($worker) = @_;

	return poll('no process is left', sub { $worker->runs == 0 });
}

sub keeper_of
{
	my ($holder) = @_;

	return (children($holder->{pid}))[0];
}

#
# The server stops.
#
{
	my ($holder, $worker) = start($node);

	signal_server('STOP');
	is($holder->exit_code, 124, 'the server stops: the lock is lost');
	is($worker->runs, 0, 'the command is dead while the server is stopped');
	signal_server('CONT');
	next_is_later($worker, 'the server stops');
	like($holder->err, qr/error: lost lock "lost1"/, 'the loss is reported');
}

#
# The connection is silent.  Then it is cut, and no new connection is possible.
#
my $by_proxy = start_proxy();

foreach my $how ('STOP', 'KILL')
{
	my ($holder, $worker) = start($by_proxy);

	kill($how, -$proxy->{pid});
	next_is_later($worker, "proxy, SIG$how");
	is($holder->exit_code, 124, 'the lock is lost');
	kill('KILL', -$proxy->{pid});
	waitpid($proxy->{pid}, 0);
	$by_proxy = start_proxy();
}

# The connection is cut briefly: the command runs on.
{
	my ($holder, $worker) = start($by_proxy);
	my $ticket = $node->safe_psql('postgres',
		"SELECT ticket FROM dlock_locks WHERE name = 'lost$round'");
	my $renewed = "SELECT renewed_at FROM dlock_leases WHERE lease = $ticket";
	my $backends =
	  q{SELECT pid FROM pg_stat_activity WHERE query ~ '^SELECT public.dlock_'};

	foreach (1 .. 3)
	{
		my $last = $node->safe_psql('postgres', $renewed);

		$node->safe_psql('postgres',
			"SELECT pg_terminate_backend(pid) FROM ($backends) AS b");
		$node->poll_query_until('postgres', "SELECT ($renewed) > '$last'")
		  or die 'the lease is not renewed';
	}
	is($worker->runs, 3, 'the connection is cut three times: the command goes on');
	$node->safe_psql('postgres', "SELECT dlock_force_release($ticket)");
	is($holder->exit_code, 124, 'released by force: the lock is lost');
	is($worker->runs, 0, 'the command is dead');
}

#
# The connection of a session-scoped lock is silent.
#
{
	my ($holder, $worker) = (undef, worker('session'));
	my $pid = 'SELECT pid FROM dlock_locks';

	$holder = Dlock::Command->new($node, 'run', '--session', 'session',
		@{ $worker->{argv} });
	$worker->started;
	$node->safe_psql('postgres', "SELECT pg_terminate_backend(pid) FROM ($pid) AS p");
	is($holder->exit_code, 124, 'a session ends: the lock is lost');
	is($worker->runs, 0, 'the command is dead');
}

#
# dlock is stopped: its front process, its keeper, or both.
#
{
	my ($holder, $worker) = start($node);

	stop_process($holder->{pid});
	signal_server('STOP');
	all_gone($worker);
	signal_server('CONT');
	next_is_later($worker, 'the front and the server are stopped');
	continue_process($holder->{pid});
	is($holder->exit_code, 124, 'the lock is lost');
}
{
	my ($holder, $worker) = start($node);

	stop_process(keeper_of($holder));
	next_is_later($worker, 'the keeper is stopped');
	is($holder->exit_code, 124, 'the lock is lost');
}
{
	my ($holder, $worker) = start($node);
	my ($keeper) = keeper_of($holder);
	my ($command) = children($keeper);

	stop_process($holder->{pid});
	stop_process($keeper);
	poll('the command is dead', sub { process_state($command) =~ /^(Z|$)/ });
	continue_process($holder->{pid});
	is($holder->exit_code, 124, 'both are stopped: the lock is lost');
	is($worker->runs, 0, 'the other processes are dead when the front has gone on');
}

#
# dlock is killed: its front process, or its keeper.
#
{
	my ($holder, $worker) = start($node, '--ttl=1h');

	$holder->signal('KILL');
	is($holder->exit_code, 137, 'dlock is killed');
	like($holder->err, qr/error: dlock was killed while it kept lock "lost$round"/,
		'its keeper says so');
	next_is_later($worker, 'the front is killed');
}
{
	my ($holder, $worker) = start($node);

	kill('KILL', keeper_of($holder));
	is($holder->exit_code, 124, 'the keeper is killed: the lock is lost');
	next_is_later($worker, 'the keeper is killed');
}

#
# The command gets the grace period, and can end normally within it.
#
{
	my $dir = PostgreSQL::Test::Utils::tempdir;
	my $holder = Dlock::Command->new($node, 'run', "--ttl=$ttl", 'grace', 'sh',
		'-c', "trap 'echo cleaned up >$dir/grace; exit 0' TERM; echo up >$dir/up; "
		  . 'while :; do sleep 0.01; done');

	poll('the command is up', sub { -s "$dir/up" });
	signal_server('STOP');
	is($holder->exit_code, 124, 'the command ends by itself: the lock is lost');
	is(slurp_file("$dir/grace"), "cleaned up\n", 'the command got SIGTERM before');
	signal_server('CONT');
}

#
# Another server takes over, and the job runs on.
#
{
	my $standby = PostgreSQL::Test::Cluster->new('standby');

	$node->backup('backup');
	$standby->init_from_backup($node, 'backup', has_streaming => 1);
	$standby->start;

	my @nodes = ($node, $standby);
	my $both = join ' ', 'dbname=postgres',
	  map { my $what = $_; "$what=" . join ',', map { $_->$what } @nodes } 'host', 'port';

	$ttl = ample(20);
	my ($holder, $worker) = start($both);
	my $held = "SELECT count(*) FROM dlock_locks WHERE name = 'lost$round' AND granted";

	$node->wait_for_catchup($standby);
	kill_server($node);
	$standby->promote;
	poll('renewed there',
		sub {
			$standby->safe_psql('postgres',
				    q{SELECT count(*) > 0 FROM pg_stat_activity WHERE }
				  . q{query ~ '^SELECT public.dlock_renew'}) eq 't';
		});
	is($worker->runs, 3, 'failover: the job runs on');
	is($standby->safe_psql('postgres', $held), '1', 'the job still has its lock');
	$holder->signal('KILL');
	is($holder->exit_code, 137, 'dlock is killed after the failover');
	poll('the lock becomes free', sub { $standby->safe_psql('postgres', $held) eq '0' });
	is($worker->runs, 0, 'the command was dead before the lock was free');
}

done_testing();
