# What a client was told of its leases and their tickets is true after a
# crash, whatever the moment: who holds holds, who waits waits in the same
# place with the same ticket, every lease has its full ttl, and what was ended
# and replaced does not come back.  Two clients never hold together, before and
# after; and when all is closed nothing is left.  With synchronous_commit = off
# the latest may be missing, and still all that is there is of one moment.
#
# What would break it: an answer before the row is in the WAL, or flushed; a
# lock handed on before the removal of its holder is in the WAL; a row that is
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

# Nobody but the worker and the clients moves the WAL on, so that a crash
# takes with it all that nobody has waited for.
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

# Several rounds of each kind of crash; clients go on with what they have.
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

# One of the clients', or the worker
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
