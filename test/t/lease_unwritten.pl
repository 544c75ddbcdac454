# A lease call changes shared memory before the row is written.  In between,
# other sessions can release its ticket, wait for it, or be next in the queue;
# the caller can give up; the worker can die.  No client learns of a change
# that can still be undone.  A call that gave up leaves nothing.
#
# What would break it: a call that waits for a row that is never written; a
# ticket that is undone twice, or that a batch in progress restores; a request
# that returns another request's ticket before the lease has the ticket; an
# expired ticket in the queue that is granted the lock; a worker that exits at
# a shutdown before the sessions have undone their requests.
#
# The worker is stopped while it sleeps, so that it writes nothing, or by a
# debugger at a row, so that it has a batch in progress.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils;
use Test::More;

# Only sessions that set deadlock_timeout look for deadlocks.
my $node = new_server('main',
	allows_streaming => 1,
	conf => "deadlock_timeout = '1h'\nautovacuum = off\n");
my $admin = session($node);
my $client = session($node);
my $other = session($node);
my $lease = $admin->query("SELECT dlock_lease_open('1h', info => 'main')");

# Wait until a lease has the only ticket of a lock, and return its number.
sub ticket_of
{
	my ($name) = @_;
	my $ticket;

	poll("a ticket of $name",
		sub {
			$ticket = $admin->query("SELECT ticket FROM dlock_locks "
				  . "WHERE name = '$name' AND pid IS NULL");
			return $ticket =~ /^\d+$/;
		});
	return $ticket;
}

# No ticket holds or awaits the lock.
sub is_unused
{
	my ($name, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is(
		$admin->query(
			"SELECT (SELECT count(*) FROM dlock_locks WHERE name = '$name'), "
			  . "dlock_try_acquire('$name') IS NOT NULL, dlock_release('$name')"
		),
		'0|t|t',
		$test);
}

sub waits_for
{
	my ($session, $type) = @_;

	return $admin->query(
			"SELECT wait_event_type = '$type' FROM pg_stat_activity "
		  . "WHERE pid = $session->{pid}") eq 't';
}

sub rows
{
	my ($name) = @_;

	return $admin->query(
		"SELECT count(*) FROM dlock_queue WHERE name = '$name'");
}

#
# Another session closes a lease before the call that opens it has returned.
#
{
	my $worker = freeze($admin);

	$client->start("SELECT dlock_lease_open('1h', info => 'new')");
	$admin->wait_for(
		q{SELECT count(*) = 1 FROM dlock_leases WHERE info = 'new'});
	is( $admin->query(
			q{SELECT dlock_lease_close(lease) FROM dlock_leases
			   WHERE info = 'new'}),
		'0',
		'a lease that is not written is closed');
	thaw($worker);
	like($client->answer, qr/55L01: lease \d+ is gone/,
		'its opener gets an error that it is gone');
	is($admin->query(
			q{SELECT count(*) FROM dlock_leases WHERE info = 'new'}),
		'0', 'the lease is gone');
}

#
# Another session releases a ticket before its row is written: the lock is free
# at once.  The caller gives up when there is nothing to undo.
#
{
	my $worker = freeze($admin);
	my $ticket;

	$client->start("SELECT dlock_lease_acquire('lock', $lease)");
	$ticket = ticket_of('lock');
	is($admin->query("SELECT dlock_release_ticket($ticket)"),
		't', 'a ticket that is not written is released');
	is_unused('lock', 'the lock is free without the worker');
	$admin->query("SELECT pg_cancel_backend($client->{pid})");
	like($client->answer, qr/57014/, 'the requesting session gives up');
	is_unused('lock', 'the lock is free');
	thaw($worker);

	# Again, but the caller does not give up.
	$worker = freeze($admin);
	$client->start("SELECT dlock_lease_acquire('lock', $lease)");
	$ticket = ticket_of('lock');
	$admin->query("SELECT dlock_release_ticket($ticket)");
	thaw($worker);
	like($client->answer, qr/55L01/, 'the requesting session gets an error that it is gone');
	is(rows('lock'), '0', 'the ticket has no row');
}

#
# A lease has two holds of a lock, and the row of one is not written, or no
# standby has acknowledged it.
#
foreach my $how ('written', 'acknowledged')
{
	my @waiters = map { session($node) } 1 .. 3;
	my $locker = session($node);

	$client->query("SELECT dlock_acquire('both')");
	$waiters[0]->start("SELECT dlock_lease_acquire('both', $lease, shared => true, owner => 'a')");
	$admin->until_waits($waiters[0]);
	$waiters[1]->start("SELECT dlock_acquire('both', shared => true)");
	$admin->until_waits($waiters[1]);
	$waiters[2]->start("SELECT dlock_acquire('both')");
	$admin->until_waits($waiters[2]);
	$other->query("SELECT dlock_lease_enqueue('both', $lease, 'nobody', shared => true, owner => 'b')");
	$client->query("SELECT dlock_release('both')");
	like($_->answer, qr/^\d+$/, 'granted') foreach @waiters[0, 1];
	if ($how eq 'written')
	{
		$locker->query('BEGIN; LOCK TABLE dlock_queue IN SHARE MODE');
	}
	else
	{
		my $worker = worker($admin);

		commits_hang($node, 1);
		# the next worker has read the setting
		$admin->query("SELECT pg_terminate_backend($worker)");
		backends_gone($worker);
	}
	$admin->query("SELECT pg_cancel_backend($waiters[2]{pid})");
	like($waiters[2]->answer, qr/57014/, 'a waiter leaves, and the last one is granted');
	is( $admin->query(
			q{SELECT count(*) FROM dlock_locks WHERE name = 'both' AND granted}),
		'3', 'three holders');
	$admin->wait_for(q{SELECT count(*) = 2 FROM dlock_queue WHERE name = 'both' AND granted})
	  if $how eq 'acknowledged';
	is($admin->query("SELECT dlock_is_held('both', $lease)"),
		't', "the lease holds the lock while a row is not $how");
	$how eq 'written' ? $locker->query('ROLLBACK') : commits_hang($node, 0);
	$_->quit foreach @waiters, $locker;
	$admin->query("SELECT dlock_release_ticket(ticket) FROM dlock_locks WHERE name = 'both'");
}

#
# Other sessions wait for the row, too, and learn that it will not be written.
#
{
	my $worker = freeze($admin);
	my $ticket;

	$client->start("SELECT dlock_lease_enqueue('lock', $lease, 'nobody')");
	$ticket = ticket_of('lock');
	$other->start("SELECT dlock_wait($ticket)");
	poll('the call waits or is answered',
		sub { $other->answered || waits_for($other, 'Extension') });
	ok(!$other->answered, 'a grant counts when it is written');
	$admin->query("SELECT pg_cancel_backend($client->{pid})");
	like($client->answer, qr/57014/, 'the session that requested the ticket gives up');
	like($other->answer, qr/55L01/,
		'a session that waits for it gets an error, without the worker');
	is_unused('lock', 'the lock is free');
	thaw($worker);
}

#
# The worker dies with a batch in progress.  The next worker assumes that the
# batch was committed, because it cannot know.
#
SKIP:
{
	skip 'no debugger that can be attached', 26 unless debugger_works($admin);
	stop_at_rows($admin, 'INSERT OR DELETE');

	my $worker = stop_worker($admin,
		sub { $client->start("SELECT dlock_lease_acquire('lock', $lease)") });
	worker_dies($admin);
	ok(!$client->answered, 'the worker dies, and a call waits');
	worker_goes_on($admin);
	like($client->answer, qr/^\d+$/, 'the call returns when the next worker has written');
	isnt(worker($admin), $worker, 'the worker has changed');
	is(rows('lock'), '1', 'one row');

	# Again, with a row that the worker must remove.
	my $fence = $admin->query("SELECT dlock_fence('lock')");
	stop_worker($admin,
		sub { $client->query("SELECT dlock_release_ticket($fence)") });
	$other->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($other);
	worker_dies($admin);
	ok(!$other->answered, 'the worker dies at a removal');
	is(rows('lock'), '1', 'the worker has not removed the row');
	worker_goes_on($admin);
	grows('the next worker removes the row, and hands over', $fence, $other->answer);
	is(rows('lock'), '0', 'no row');
	$other->query("SELECT dlock_release('lock')");

	# Again, but the worker dies after its commit, before it has reported that.
	stop_at_rows($admin, 'INSERT', 1);
	stop_worker($admin,
		sub { $client->start("SELECT dlock_lease_acquire('lock', $lease)") });
	is(rows('lock'), '1', 'the worker has committed');
	worker_dies($admin);
	ok(!$client->answered, 'the worker dies');
	worker_goes_on($admin);
	$fence = $client->answer;
	like($fence, qr/^\d+$/, 'the next worker writes the row again');
	is(rows('lock'), '1', 'there is only one row');
	stop_at_rows($admin, 'DELETE', 1);
	stop_worker($admin,
		sub { $client->query("SELECT dlock_release_ticket($fence)") });
	$other->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($other);
	is(rows('lock'), '0', 'the worker has committed a removal');
	worker_dies($admin);
	ok(!$other->answered, 'the worker dies');
	worker_goes_on($admin);
	grows('the next worker hands over', $fence, $other->answer);
	is(rows('lock'), '0', 'the session that has the lock has no row');
	$other->query("SELECT dlock_release('lock')");
	stop_at_rows($admin, 'INSERT OR DELETE');

	# A ticket that is undone at this time may have a row, so its lock stays
	# closed until the row is removed.
	foreach my $end ('goes on', 'dies')
	{
		stop_worker($admin,
			sub { $client->start("SELECT dlock_lease_acquire('lock', $lease)") });
		$admin->query("SELECT pg_cancel_backend($client->{pid})");
		like($client->answer, qr/57014/,
			"who asked gives up, and the worker $end");
		is($client->query("SELECT dlock_fence('lock') IS NULL"),
			't', '... no ticket holds the lock');
		$other->start("SELECT dlock_acquire('lock') > 0");
		$admin->until_waits($other);
		worker_dies($admin) if $end eq 'dies';
		ok(!$other->answered, '... and no ticket is granted it');
		worker_goes_on($admin);
		is($other->answer, 't', '... before its row is gone');
		is(rows('lock'), '0', '... and then the row is gone');
		$other->query("SELECT dlock_release('lock')");
	}
}

#
# The head of the queue is a ticket whose lease has expired.  The ticket leaves
# when its row is removed, or at once if it has no row.  Its ttl begins at the
# end of a session, when the worker is stopped.
#
{
	my $listener = session($node);
	my $is_granted =
	  "SELECT granted FROM dlock_locks WHERE pid = $other->{pid}";
	my $enqueue = "SELECT dlock_lease_enqueue('lock', %s, 'channel')";
	my $open = "SELECT dlock_lease_open('100ms', attach => true)";
	my $keeper = session($node);
	my ($short, $ticket, $worker);

	$listener->query('LISTEN channel');
	$client->query("SELECT dlock_acquire('lock')");
	$short = $keeper->query($open);
	$ticket = $admin->query(sprintf($enqueue, $short));
	$other->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($other);
	$worker = freeze($admin);
	$keeper->quit;
	$admin->wait_for(
		"SELECT count(*) = 0 FROM dlock_locks WHERE ticket = $ticket");
	$client->query("SELECT dlock_release('lock')");
	is($admin->query($is_granted),
		'f', 'the head of the queue has expired, and has a row');
	is($admin->query(q{SELECT dlock_try_acquire('lock', '1ms') IS NULL}),
		't', 'no ticket passes it');
	thaw($worker);
	grows('the next ticket is granted when the row is removed', $ticket, $other->answer);
	is(rows('lock'), '0', 'the row is removed');
	told($listener, 'the expiry is announced', announcement('expired', 'lock', $ticket));
	$other->query("SELECT dlock_release('lock')");
	$listener->quit;

	my $enqueuer = session($node);
	$keeper = session($node);
	$client->query("SELECT dlock_acquire('lock')");
	$short = $keeper->query($open);
	$worker = freeze($admin);
	$enqueuer->start(sprintf($enqueue, $short));
	$ticket = ticket_of('lock');
	$other->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($other);
	$keeper->quit;
	$admin->wait_for(
		"SELECT count(*) = 0 FROM dlock_locks WHERE ticket = $ticket");
	$client->query("SELECT dlock_release('lock')");
	grows('an expired ticket without a row is passed', $ticket, $other->answer);
	thaw($worker);
	like($enqueuer->answer, qr/55L01/, 'the owner of that ticket gets an error');
	is(rows('lock'), '0', 'the ticket never had a row');
	$other->query("SELECT dlock_release('lock')");
	$enqueuer->quit;
}

#
# A semaphore can get another size after its last holder has left, even if the
# holder's row is still there.
#
{
	my $fence =
	  $admin->query("SELECT dlock_lease_acquire('lock', $lease, slots => 2)");
	my $worker = freeze($admin);

	is($admin->query("SELECT dlock_release_ticket($fence)"),
		't', 'a semaphore is released');
	like($admin->query("SELECT dlock_release_ticket($fence)"),
		qr/WARNING.*^f$/ms, 'a second release warns');
	$client->start("SELECT dlock_acquire('lock', slots => 3) > 0");
	$admin->until_waits($client);
	$other->start("SELECT dlock_acquire('lock', slots => 3, permits => 2) > 0");
	$admin->until_waits($other);
	like($admin->query("SELECT dlock_try_acquire('lock', slots => 2)"),
		qr/55000: .*in use with other slots/, 'a size that differs from the waiters\' is refused');
	thaw($worker);
	is($client->answer . $other->answer,
		'tt', 'a semaphore gets another size with its holders');
	is( $admin->query(
			q{SELECT string_agg(slots || ' ' || permits, ', ' ORDER BY ticket)
				FROM dlock_locks WHERE name = 'lock' AND granted}),
		'3 1, 3 2',
		'both holders fit');
	$_->query("SELECT dlock_release('lock')") foreach $client, $other;
}

#
# A ticket is granted and released before its waiter checks.  The waiter has
# lost the ticket, even if its row still exists.
#
{
	my $ticket;

	$client->query("SELECT dlock_acquire('lock')");
	$ticket = $admin->query("SELECT dlock_lease_enqueue('lock', $lease, 'nobody')");
	$other->start("SELECT dlock_wait($ticket)");
	poll('it waits', sub { waits_for($other, 'Lock') });
	stop_process($other->{pid});
	$client->query("SELECT dlock_release('lock')");
	$admin->wait_for("SELECT granted FROM dlock_queue WHERE ticket = $ticket");
	my $worker = freeze($admin);
	is($admin->query("SELECT dlock_release_ticket($ticket)"),
		't', 'granted and released');
	continue_process($other->{pid});
	like($other->answer, qr/55L01: ticket $ticket is gone/,
		'the waiter finds the ticket gone');
	is(rows('lock'), '1', 'the row still exists');
	thaw($worker);
	poll('the lock is free',
		sub {
			$admin->query(
				q{SELECT dlock_try_acquire('lock') IS NOT NULL
					AND dlock_release('lock')}) eq 't';
		});
}

#
# A lease is closed while a request for it waits for more numbers.  The request
# then fails.
#
{
	my $short = $client->query("SELECT dlock_lease_open('1h')");

	$admin->query(
		q{DO $$
		DECLARE
			last bigint = (SELECT last_value FROM dlock_ticket_seq);
			ticket bigint = 0;
		BEGIN
			WHILE ticket < last LOOP
				ticket = dlock_acquire('number');
				PERFORM dlock_release('number');
			END LOOP;
		END $$});
	$admin->query('BEGIN; ALTER SEQUENCE dlock_ticket_seq OWNED BY NONE');
	$client->start("SELECT dlock_lease_enqueue('lock', $short, 'nobody')");
	$other->start("SELECT dlock_lease_acquire('lock 2', $short)");
	poll('both wait', sub { waits_for($client, 'Lock') })
	  && poll('both wait', sub { waits_for($other, 'Lock') });
	is($admin->query("SELECT dlock_lease_close($short)"),
		'0', 'a lease is closed under a request');
	$admin->query('ROLLBACK');
	like($_->answer, qr/55L01: lease $short is gone/, 'the request fails')
	  foreach $client, $other;
	is_unused($_, 'the request leaves nothing') foreach 'lock', 'lock 2';
}

#
# Two sessions make the same request.  The second session does not learn of the
# first session's grant before the lease has the ticket.
#
foreach my $end ('goes on', 'dies')
{
	my $holder = session($node);
	my $first = session($node);

	$holder->query("SELECT dlock_acquire('lock')");
	$first->start("SELECT dlock_lease_acquire('lock', $lease)");
	$admin->until_waits($first);
	stop_process($first->{pid});
	$holder->query("SELECT dlock_release('lock')");
	$admin->wait_for("SELECT granted FROM dlock_locks WHERE pid = $first->{pid}");

	$other->start("SELECT dlock_lease_acquire('lock', $lease)");
	poll('the call waits or is answered',
		sub { $other->answered || waits_for($other, 'Lock') });
	ok(!$other->answered,
		"who asks for the same is not told of the grant: $end");
	$admin->query("SELECT pg_terminate_backend($first->{pid})")
	  if $end eq 'dies';
	continue_process($first->{pid});
	my $fence = $other->answer;
	like($fence, qr/^\d+$/, '... before the lease has it');
	is($first->answer, $fence, '... the same ticket') if $end eq 'goes on';
	is($admin->query("SELECT dlock_check('lock', $fence)"),
		't', '... and then holds it');
	is(rows('lock'), '1', '... with a row');
	$admin->query("SELECT dlock_release_ticket($fence)");
	$_->quit foreach $holder, $first;
}

#
# The next ticket is released before the holder's removal is written.  It loses
# its place in the queue, and never had the lock.
#
{
	my $fence = $admin->query("SELECT dlock_lease_acquire('lock', $lease)");
	my $worker = freeze($admin);
	my $ticket;

	$admin->query("SELECT dlock_release_ticket($fence)");
	$client->start(q{SELECT dlock_ttl_acquire('lock', '1h')});
	poll('the next ticket waits',
		sub {
			$ticket = $admin->query("SELECT ticket FROM dlock_locks "
				  . "WHERE name = 'lock' AND NOT granted AND ticket <> $fence");
			return $ticket =~ /^\d+$/;
		});
	is($admin->query("SELECT dlock_force_release($ticket)"),
		't', 'the next ticket is released');
	like(
		$client->answer,
		qr/55L01: lost the place in the queue of lock "lock"/,
		'... and its waiter has lost its place');
	thaw($worker);
}

#
# A session is terminated together with the worker, at a shutdown, and exits
# later.
#
# The exit of other processes shows that the worker was signaled, too.
{
	my $data_dir = $node->data_dir;
	my (@others, $stopped);

	commits_hang($node, 1);
	$client->wait_for(q{SELECT setting = 'nobody' FROM pg_settings
		WHERE name = 'synchronous_standby_names'});
	$client->start(q{SELECT dlock_ttl_acquire('lock', '1h')});
	$admin->wait_for(q{SELECT wait_event = 'SyncRep' }
		  . "FROM pg_stat_activity WHERE pid = $client->{pid}");
	@others = split /\n/,
	  $admin->query(q{SELECT pid FROM pg_stat_activity WHERE backend_type IN
		('walwriter', 'background writer', 'logical replication launcher')});
	stop_process($client->{pid});
	system_or_bail('pg_ctl', '-D', $data_dir, '-m', 'fast', '--no-wait', 'stop');
	poll('a shutdown has begun',
		sub { !grep { kill 0, $_ } @others });
	continue_process($client->{pid});
	like($client->answer, qr/57P01|closed the connection/,
		'a shutdown interrupts an acquire');
	$_->quit foreach $admin, $client, $other;
	poll('the server has stopped', sub { !-e "$data_dir/postmaster.pid" });
	# Let the node notice that there is no postmaster.
	$node->stop('fast', fail_ok => 1);
	$node->append_conf('postgresql.auto.conf', "synchronous_standby_names = ''");
	$node->start;
	$_ = session($node) foreach $admin, $client, $other;
	is($admin->query(q{SELECT count(*) FROM dlock_locks WHERE name = 'lock'}),
		'0', '... which leaves nothing');
}

$admin->query("SELECT dlock_lease_close($lease)");
no_worker($admin);
is($admin->query('SELECT count(*) FROM dlock_locks'), '0', 'nothing is left');
$_->quit foreach $admin, $client, $other;
$node->stop;
done_testing();
