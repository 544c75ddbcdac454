# One connection waits for thousands of locks with tickets of a lease, and is
# told of each grant.  These tickets belong to no session: any connection can
# wait for them, ask about them and release them, and they outlive the
# connection.
#
# What would break it: a limit or a list that fails with thousands of tickets
# of one lease; a grant that is not announced, or is announced and not held; a
# lease's ticket that is bound to a session, or a session's ticket that is not;
# sessions that wait for the same ticket and wake each other.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use JSON::PP qw(decode_json);
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main', conf => "deadlock_timeout = '1h'");
my $admin = session($node);

# Return how often the sessions' backends have gone to sleep.
sub sleeps
{
	my $sum = 0;

	$sum += (slurp_file("/proc/$_->{pid}/status") =~
		  /^voluntary_ctxt_switches:\s+(\d+)/m)[0]
	  foreach @_;
	return $sum;
}

#
# A session holds ten thousand locks, and one lease waits for them.
#
{
	my $count = 10_000;
	my $names = "FROM generate_series(1, $count) AS n";
	my $holder = session($node);
	my $waiter = session($node);
	my $lease = $waiter->query("SELECT dlock_lease_open('1h')");
	my (%tickets, %told);

	is( $holder->query(
			"SELECT count(DISTINCT dlock_acquire('lock ' || n)) $names"
		),
		$count,
		'all held');
	%tickets = map { split /\|/ } split /\n/,
	  $waiter->query(
		"SELECT n, dlock_lease_enqueue('lock ' || n, $lease) $names");
	is(scalar(keys %tickets), $count, 'all tickets are enqueued');
	is( $admin->query(
			'SELECT count(*), count(*) FILTER (WHERE granted), '
			  . 'count(channel) FROM dlock_queue'),
		"$count|0|$count",
		'all tickets are in the table');
	is($admin->query('SELECT lease, held, waiting FROM dlock_leases'),
		"$lease|0|$count", 'all tickets belong to one lease');
	is($waiter->query("SELECT dlock_renew($lease)"),
		$count, 'one heartbeat renews all tickets');
	is(scalar($waiter->announcements(0)), 0, 'nothing is announced');

	is($holder->query('SELECT dlock_release_all()'),
		$count, 'one call releases all locks');
	foreach my $payload ($waiter->announcements($count))
	{
		my $announcement = decode_json($payload);

		$told{ $announcement->{lock} =~ s/^lock //r } .=
		  "$announcement->{event} $announcement->{ticket}";
	}
	is_deeply(\%told, { map { $_ => "granted $tickets{$_}" } keys %tickets },
		'each grant is announced once');
	is( $waiter->query(
			    "SELECT count(*) FROM unnest('{"
			  . join(',', values %tickets)
			  . "}'::bigint[]) AS ticket WHERE dlock_wait(ticket, '0')"),
		$count,
		'dlock_wait() confirms each grant');
	is( $admin->query(
			    'SELECT count(*), bool_and(granted) FROM dlock_locks '
			  . "WHERE lease = $lease"),
		"$count|t",
		'and held');

	# The tickets are not the session's, so the session can end.
	$_->quit foreach $holder, $waiter;
	is( $admin->query(
			"SELECT count(*) FILTER (WHERE dlock_check('lock ' || n, t)) "
			  . 'FROM unnest(\'{'
			  . join(',', map { $tickets{$_} } 1 .. $count)
			  . "}'::bigint[]) WITH ORDINALITY AS a (t, n)"),
		$count,
		'the lease keeps the locks without the session');
	is($admin->query("SELECT dlock_lease_close($lease)"),
		$count, 'any session can close the lease');
	is_now($admin,
		'SELECT (SELECT count(*) FROM dlock_queue), '
		  . '(SELECT count(*) FROM dlock_locks)',
		'0|0', 'nothing is left');
}

#
# A ticket is enqueued in one session, awaited in another, and released in a
# third.  Each session has ended before the next step.
#
foreach my $kind ('lease', 'ttl')
{
	my @sessions = map { session($node) } 0 .. 3;
	my $held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	my ($lease, $ticket, $next);

	$lease = $sessions[0]->query("SELECT dlock_lease_open('1h')");
	$ticket = $sessions[0]->query(
		$kind eq 'lease' ? "SELECT dlock_lease_enqueue('lock', $lease)" :
		  "SELECT dlock_ttl_enqueue('lock', '1h')");
	$sessions[0]->quit;
	backends_gone($sessions[0]->{pid});

	$sessions[1]->start("SELECT dlock_wait($ticket)");
	$admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
		  . "WHERE pid = $sessions[1]->{pid} AND wait_event_type = 'Lock'");
	is($sessions[2]->query("SELECT dlock_wait($ticket, '1ms')"),
		'f', "$kind: another session waits, too");
	$admin->query("SELECT dlock_release_ticket($held)");
	is($sessions[1]->answer, 't', "$kind: waited for by another session");
	is($sessions[2]->query("SELECT dlock_wait($ticket)"),
		't', "$kind: any number of sessions can wait");
	$sessions[1]->vanish;
	$sessions[2]->quit;
	backends_gone($sessions[1]->{pid}, $sessions[2]->{pid});
	is($admin->query("SELECT dlock_check('lock', $ticket)"),
		't', "$kind: held without a session");

	$next = $admin->query("SELECT dlock_enqueue('lock')");
	is($sessions[3]->query("SELECT dlock_release_ticket($ticket)"),
		't', "$kind: released by a third session");
	is($admin->query("SELECT dlock_wait($next)"), 't', "$kind: handed over");
	foreach my $session ($sessions[3], $admin)
	{
		like($session->query("SELECT dlock_wait($ticket, '0')"),
			qr/55L01/, "$kind: gone for all");
		like($session->query("SELECT dlock_release_ticket($ticket)"),
			qr/WARNING.*^f$/ms, "$kind: not released again");
	}
	$admin->query("SELECT dlock_release('lock')");
	$admin->query("SELECT dlock_lease_close($lease)");
	$sessions[3]->quit;
}

#
# Ten sessions wait for the same ticket, which changes a few times before it is
# granted.  Only the grant wakes each session.
#
SKIP:
{
	skip 'the system does not count how often a process has slept', 3
	  unless -r "/proc/$$/status";
	my @waiters = map { session($node) } 1 .. 10;
	my $held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	my $lease = $admin->query("SELECT dlock_lease_open('1h')");
	my $ticket = $admin->query("SELECT dlock_lease_enqueue('lock', $lease)");
	my $now = -1;
	my $before;

	$_->start("SELECT dlock_wait($ticket)") foreach @waiters;
	$admin->wait_for('SELECT count(*) = 10 FROM pg_stat_activity '
		  . "WHERE wait_event_type = 'Lock'");
	$before = sleeps(@waiters);
	is( $admin->query(
			'SELECT string_agg(dlock_lease_enqueue('
			  . "'lock', $lease, 'channel_' || n)::text, ' ') "
			  . 'FROM generate_series(1, 5) AS n'),
		join(' ', ($ticket) x 5),
		'it changes');
	poll('all sessions sleep again',
		sub {
			my $last = $now;

			$now = sleeps(@waiters) - $before;
			return $now == $last || $now > 1000;
		});
	cmp_ok($now, '<=', 1000, 'the sessions do not wake each other');
	$admin->query("SELECT dlock_release_ticket($held)");
	is(join(' ', map { $_->answer } @waiters),
		join(' ', ('t') x 10), 'all sessions get the grant');
	$admin->query("SELECT dlock_lease_close($lease)");
	$_->quit foreach @waiters;
}

#
# A session's tickets end with it.  Leases' tickets stay, in order.
#
foreach my $way ('quit', 'vanish', 'terminate')
{
	my $session = session($node);
	my $other = session($node);
	my $lease = $admin->query("SELECT dlock_lease_open('1h')");
	my %tickets;

	$admin->query("SELECT dlock_acquire('queue')");
	foreach my $lock ('free', 'queue')
	{
		my %calls = (
			session => 'dlock_enqueue(%s)',
			lease => "dlock_lease_enqueue(%s, $lease)",
			ttl => "dlock_ttl_enqueue(%s, '1h')");

		foreach my $scope ('session', 'lease', 'ttl')
		{
			my $name = $lock eq 'queue' ? $lock : "$lock $scope";

			$tickets{"$lock $scope"} = $session->query(
				'SELECT ' . sprintf($calls{$scope}, "'$name'"));
		}
	}
	like($other->query("SELECT dlock_wait($tickets{'queue session'}, '0')"),
		qr/55L01/, "$way: no other session has a session's ticket");
	is( $admin->query(
			q{SELECT string_agg(scope || ' ' || granted, ', ' ORDER BY name, ticket)
				FROM dlock_locks}),
		'lease true, session true, lease true, '
		  . 'session true, session false, lease false, lease false',
		"$way: before");

	$session->quit if $way eq 'quit';
	$session->vanish if $way eq 'vanish';
	$admin->query("SELECT pg_terminate_backend($session->{pid})")
	  if $way eq 'terminate';
	backends_gone($session->{pid});
	is( $admin->query(
			q{SELECT string_agg(ticket || ' ' || granted, ', ' ORDER BY name, ticket)
				FROM dlock_locks WHERE scope = 'lease'}),
		"$tickets{'free lease'} true, $tickets{'free ttl'} true, "
		  . "$tickets{'queue lease'} false, $tickets{'queue ttl'} false",
		"$way: those of leases stay");
	is( $admin->query(
			q{SELECT count(*) FROM dlock_locks
			   WHERE scope = 'session' AND pid <> pg_backend_pid()}),
		'0',
		"$way: the session's have left");

	$admin->query("SELECT dlock_release('queue')");
	is($other->query("SELECT dlock_wait($tickets{'queue lease'})"),
		't', "$way: the first ticket is granted");
	is($other->query("SELECT dlock_wait($tickets{'queue ttl'}, '0')"),
		'f', "$way: the second ticket waits");
	is($other->query("SELECT dlock_lease_close($lease)"),
		'2', "$way: the lease had two tickets");
	is($other->query("SELECT dlock_wait($tickets{'queue ttl'})"),
		't', "$way: the second ticket is granted");
	$other->query("SELECT dlock_release_ticket($tickets{$_})")
	  foreach 'queue ttl', 'free ttl';
	is_now($admin, 'SELECT count(*) FROM dlock_locks', '0',
		"$way: nothing is left");
	$session->quit;
	$other->quit;
}

#
# If a lease ends during a request, however it ends, the request fails at
# once.  It does not wait for its turn, or for a search for deadlocks.
#
# Otherwise only its lock_timeout could wake the request: there is no
# deadlock_timeout, and PostgreSQL's timer for statistics comes after 10 s.
#
foreach my $way ('is closed', 'runs out')
{
	my ($client, $keeper, $session) = map { session($node) } 1 .. 3;
	my $lease =
	  $keeper->query("SELECT dlock_lease_open('100ms', attach => true)");

	$client->query("SELECT dlock_acquire('lock')");
	$session->query("SET lock_timeout = '8s'");
	$session->start("SELECT dlock_lease_acquire('lock', $lease)");
	$admin->until_waits($session);
	$admin->query("SELECT dlock_lease_close($lease)") if $way eq 'is closed';
	$keeper->quit;
	like($session->answer, qr/55L01: lease $lease is gone/,
		"a request fails when its lease $way");
	is($client->query("SELECT dlock_release('lock')"),
		't', 'the lock is still held');
	$_->quit foreach $client, $session;
}

$admin->quit;
done_testing();
