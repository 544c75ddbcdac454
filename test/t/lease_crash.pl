# What a client was told of its leases and tickets is true after a crash at any
# moment: holders hold, waiters have the same place and ticket, each lease has
# its full ttl, and an ended ticket that was replaced does not come back.  Two
# clients never hold a lock together, before or after the crash.  Nothing is
# left when all leases are closed.  With synchronous_commit = off, the latest
# changes may be missing, but the state is that of one moment.
#
# What would break it: an answer before the row is in the WAL, or flushed; a
# hand-over before the removal of the holder is in the WAL; a row that is
# written, removed or loaded in part; a load that loses the order; numbers
# drawn before their reservation is durable.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Checker;
use Dlock::History qw(now);
use Dlock::Test;
use Test::More;

# Only the worker and the clients flush the WAL, so that a crash loses each
# change for which no client has waited.
my $node = new_server(
	'main',
	conf => q{
restart_after_crash = on
wal_writer_delay = 10s
wal_buffers = 16MB
autovacuum = off
log_statement = none
});
my $history = Dlock::Checker->new($ENV{DLOCK_TEST_SEED} || 20250101);

# Several rounds of each kind of crash; clients keep their leases.
sub rounds
{
	my ($what, $rounds, %options) = @_;

	foreach my $round (1 .. $rounds)
	{
		my $how = ('all processes', 'postmaster', 'a backend')[ $round % 3 ];
		my $calls = 300 + int(rand(1200));
		my $since;

		$history->load(
			$node, $calls,
			sub {
				$since = now();
				if ($how eq 'a backend')
				{
					kill_a_backend();
				}
				else
				{
					kill_server($node, $how eq 'postmaster');
				}
			},
			%options);
		$node->start unless $how eq 'a backend';
		poll('server is back', sub { answers($node) });
		$history->check($node, $since, "$what, round $round, $how killed", 'here');
	}
	return;
}

# A client's backend, or the worker
sub kill_a_backend
{
	my $session = session($node);
	my @pids = split /\n/, $session->query(
		q{SELECT pid FROM pg_stat_activity
		   WHERE backend_type IN ('client backend', 'dlock worker')
			 AND pid <> pg_backend_pid() ORDER BY backend_start});

	kill('KILL', $pids[ int(rand(scalar @pids)) ]) == 1
	  or die "no process of @pids";
	backends_gone($session->{pid});
	$session->vanish;
	return;
}

rounds('durable', 5);
rounds('not durable', 4, off => 90);
$history->check_past;
$history->close_all($node);

done_testing();
