# A lease that is not renewed expires, never early.  From then on, every answer
# says that it is gone, even if the worker has not ended it yet.  Its locks are
# handed over after the expiry is written, or after the lease's delay.
#
# What would break it: an answer that depends on the worker instead of the
# deadline; a grant before the row is removed; a renewal that succeeds beside
# the expiry, or extends only some locks; a delay that a crash forgets; a lease
# that the worker forgets.
#
# Times are taken before a request is sent and after its answer has come, so a
# slow machine only makes a promise easier to keep.  Steps that must be done
# within a ttl have a long one, or are repeated with a longer one.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;
use Time::HiRes qw(clock_gettime usleep CLOCK_MONOTONIC);

my $node = new_server('main');
my $client = session($node);
my $admin = session($node);

sub now
{
	return clock_gettime(CLOCK_MONOTONIC);
}

#
# While a delay lasts, the worker has no work.
#
{
	my $delayed = $client->query("SELECT dlock_lease_open('1h', delay => '1h')");
	my $row = "SELECT xmin FROM dlock_queue_lease WHERE delayed AND lease = $delayed";
	my $stays = sub {
		my $before = $admin->query($row);

		# the worker writes this after all rows that were to be written
		$admin->query("SELECT dlock_lease_close(dlock_lease_open('1h'))");
		return $before ne '' && $admin->query($row) eq $before;
	};

	$client->query("SELECT dlock_lease_acquire('delayed', $delayed)");
	$client->query("SELECT dlock_renew($delayed, '100ms')");
	poll('the delay is written', $stays);
	is(scalar(grep { !$stays->() } 1 .. 10), 0, 'a row stays as it is during a delay');
	$admin->query("SELECT dlock_force_close($delayed)");
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

#
# A delay that is over keeps the lock closed for no question, even if the worker
# is late.  A request without time then waits for the worker.
#
{
	my $delay = ample(2);
	my $delayed = $client->query("SELECT dlock_lease_open('1h', delay => '$delay s')");
	my $try = session($node);
	my $waits = 0;

	$client->query("SELECT dlock_lease_acquire('late', $delayed)");
	$client->query("SELECT dlock_renew($delayed, '100ms')");
	$admin->wait_for("SELECT count(*) = 1 FROM dlock_queue_lease WHERE delayed AND lease = $delayed");
	my $frozen = freeze($admin);
	is($client->query("SELECT dlock_try_acquire('late') IS NULL, count(*) FROM dlock_locks"),
		't|1', 'a delay closes the lock');
	$client->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	# A wait can end before it is seen.
	for (my $n = 0; $n < 10 && !$waits; $n++)
	{
		$try->answer if $n > 0;
		$try->start("SELECT dlock_try_acquire('late')");
		poll('it waits or has its answer',
			sub {
				$waits = $client->query(
					'SELECT count(*) FROM dlock_locks WHERE NOT granted');
				return $waits || $try->answered;
			});
	}
	is($waits, '1', 'the delay is over: a request waits for the worker');
	thaw($frozen);
	$try->answer;
	$try->quit;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

#
# Expired while the worker is stopped
#
my $ttl = ample(8);
my $waiter = session($node);
my $shared = session($node);
my $guard = session($node);
$guard->query('CREATE TABLE t (n integer)');
my $other = $client->query("SELECT dlock_lease_open('10min')");
my $lease = $client->query("SELECT dlock_lease_open('$ttl s')");
my $by_lease = $client->query("SELECT dlock_lease_acquire('a', $lease)");
my $by_ttl = $client->query("SELECT dlock_ttl_acquire('b', '$ttl s')");
my $by_shared =
  $client->query("SELECT dlock_ttl_acquire('c', '$ttl s', shared => true)");
$client->query("SELECT dlock_ttl_acquire('d', '$ttl s', owner => 'me')");
my $queued = $client->query("SELECT dlock_lease_enqueue('b', $other)");
my $gone = $client->query("SELECT dlock_ttl_enqueue('a', '$ttl s')");
my $gone_too = $client->query("SELECT dlock_lease_enqueue('b', $lease)");
my @waiting = map { session($node) } $gone, $gone_too;

$waiter->start("SELECT dlock_acquire('a')");
$shared->start("SELECT dlock_acquire('c', shared => true), "
	  . "dlock_acquire('c 2')");
$admin->until_waits($waiter);
like($shared->answer, qr/^\d+\|\d+$/, 'shared beside a lease');
my $worker = freeze($admin);
$waiting[0]->start("SELECT dlock_wait($gone)");
$waiting[1]->start("SELECT dlock_wait($gone_too)");
is( $client->query(
		"SELECT dlock_renew($lease), dlock_renew($by_ttl), dlock_renew($by_shared), "
		  . "dlock_renew($gone)"),
	'2|1|1|1',
	'leases live on while the worker is stopped');
$guard->query('BEGIN; INSERT INTO t VALUES (1); '
	  . "SELECT dlock_guard('a', $by_lease)");
is( $admin->query(
		'SELECT count(*), count(*) FILTER (WHERE granted) FROM dlock_locks '
		  . "WHERE ticket IN ($by_lease, $by_ttl, $by_shared, $gone)"),
	'4|3',
	'the leases are in the view');

# The worker cannot end any of them.
$client->wait_for(
	"SELECT count(*) = 0 FROM dlock_locks WHERE ticket = $gone");
foreach (
	[ 'a', $by_lease, $lease ],
	[ 'b', $by_ttl, $by_ttl ],
	[ 'c', $by_shared, $by_shared ])
{
	my ($name, $fence, $id) = @$_;

	$client->wait_for("SELECT NOT dlock_check('$name', $fence)");
	is($client->query("SELECT dlock_renew($id) IS NULL"),
		't', "$name: the lease cannot be renewed");
	like($client->query("SELECT dlock_guard('$name', $fence)"),
		qr/55L01/, "$name: not to guard with");
	like($client->query("SELECT dlock_release_ticket($fence)"),
		qr/WARNING.*^f$/ms, "$name: not to be released");
	is( $client->query("SELECT count(*) FROM dlock_locks WHERE ticket = $fence"),
		'0',
		"$name: not in dlock_locks");
	is($client->query("SELECT count(*) FROM dlock_leases WHERE lease = $id"),
		'0', "$name: not in dlock_leases");
}
like($client->query("SELECT dlock_lease_acquire('more', $lease)"),
	qr/55L01/, 'nothing can be acquired with the lease');
like($client->query("SELECT dlock_wait($gone, '0')"),
	qr/55L01/, 'a place in the queue is gone');
like($_->answer, qr/55L01/, '... also for sessions that wait with it') foreach @waiting;
is($client->query("SELECT dlock_fence('a') IS NULL, dlock_fence('b') IS NULL"),
	't|t', 'nobody holds');
is( $client->query(
		"SELECT dlock_try_acquire('a') IS NULL, "
		  . "dlock_try_acquire('b') IS NULL, "
		  . "dlock_try_lease_acquire('c', $other) IS NULL"),
	't|t|t',
	'no session is granted the locks before the expiry is written');
is($client->query("SELECT dlock_wait($queued, '0')"), 'f', 'not to a ticket');
is($client->query("SELECT dlock_try_ttl_acquire('d', '1h', owner => 'me') IS NULL"),
	't', 'the old owner is not granted its lock again, either');
ok(!$waiter->answered, 'a waiter is not granted a lock, either');
is($admin->query("SELECT count(*) FROM dlock_queue WHERE ticket IN ($by_lease, $by_ttl)"),
	'2', 'the rows still exist');
like($guard->query('COMMIT'), qr/55L01/, 'a guarded commit fails');
is($admin->query('SELECT count(*) FROM t'), '0', 'and is rolled back');

thaw($worker);
grows('the next in line is granted', $by_lease, $waiter->answer);
is( $admin->query("SELECT count(*) FROM dlock_queue WHERE ticket = $by_lease"),
	'0',
	'when the row is gone');
is($client->query("SELECT dlock_wait($queued)"), 't', 'a ticket is, too');
is( $admin->query(
		"SELECT count(*) FROM dlock_queue WHERE ticket IN ($by_lease, $by_ttl, $by_shared, $gone)"),
	'0',
	'no row is left');
is($waiter->query('SELECT dlock_release_all()'), '1', 'and no queue');
is($client->query("SELECT dlock_try_acquire('a') IS NOT NULL"),
	't', 'the lock is free');
$client->query("SELECT dlock_release_all(), dlock_lease_close($other)");
$_->quit foreach $waiter, $shared, $guard, @waiting;

#
# A delay begins when the worker ends the lease.  The lock is closed before,
# too.
#
$lease = $client->query("SELECT dlock_lease_open('$ttl s', delay => '10min')");
my $closing = $client->query("SELECT dlock_lease_acquire('closing', $lease)");
$worker = freeze($admin);
$client->wait_for("SELECT NOT dlock_check('closing', $closing)");
is( $client->query(
		"SELECT granted, position, remaining > '9min' FROM dlock_locks "
		  . "WHERE ticket = $closing"),
	'f|0|t',
	'a delay that has not begun yet keeps the lock closed');
like($client->query("SELECT dlock_try_acquire('closing', slots => 2)"),
	qr/55000/, 'the lock is in use with other slots');
is($client->query("SELECT dlock_try_acquire('closing') IS NULL"),
	't', 'the lock is busy');
thaw($worker);
$admin->wait_for('SELECT count(*) = 1 FROM dlock_queue_lease WHERE delayed');
is( $client->query(
		"SELECT granted, position, remaining > '9min' FROM dlock_locks "
		  . "WHERE ticket = $closing"),
	'f|0|t',
	'a delay that has begun keeps the lock closed');
is($admin->query("SELECT dlock_force_release($closing)"), 't', 'ended');

# An expired lease is closed by force before the worker ends it, so no delay
# begins.  The lease's ttl begins at the end of its session.
{
	my $keeper = session($node);
	my $forced = $keeper->query(
		"SELECT dlock_lease_open('100 ms', attach => true, delay => '1 h')");
	my $ticket = $client->query("SELECT dlock_lease_acquire('forced', $forced)");

	$worker = freeze($admin);
	$keeper->quit;
	$admin->wait_for("SELECT NOT dlock_check('forced', $ticket)");
	is($admin->query("SELECT dlock_force_close($forced)"),
		'1', 'closed by force before the worker ends it');
	thaw($worker);
	$admin->wait_for(
		"SELECT count(*) = 0 FROM dlock_queue_lease WHERE lease = $forced");
	ok(is_free($client, 'forced'), '... and its lock is free');
}

#
# Renewals keep all tickets of a lease.  The answer that a lease is gone is
# right only if its ttl has passed since the last renewal was requested.
#
my $sent;

# Renew a lease for several times its ttl.  Return how many tickets it had at
# the end.
sub keep
{
	my $end = now() + 2.5 * $ttl;
	my $count = $client->query(
		'SELECT count(fence) FROM (SELECT '
		  . "dlock_lease_acquire('exclusive ' || n, $lease) AS fence "
		  . 'FROM generate_series(1, 20) AS n UNION ALL '
		  . "SELECT dlock_lease_acquire('shared', $lease, shared => true) "
		  . 'UNION ALL SELECT '
		  . "dlock_lease_acquire('slots', $lease, slots => 3, permits => 2)) AS a");

	while ($count eq '22' && now() < $end)
	{
		my $before = now();

		$count = $client->query("SELECT dlock_renew($lease)");
		last if $count ne '22';
		$sent = $before;
		usleep(50_000);
	}
	$count = $client->query(
		"SELECT count(*) FROM dlock_locks WHERE lease = $lease AND granted")
	  if $count eq '22';
	return $count;
}

for ($ttl = ample(1);; $ttl *= 2)
{
	$sent = now();
	$lease = $client->query("SELECT dlock_lease_open('$ttl s')");
	my $count = $lease =~ /^\d+$/ ? keep() : $lease;

	if ($count eq '22' || now() < $sent + $ttl)
	{
		is($count, '22', 'all are held after several times the ttl')
		  or diag('lost ' . (now() - $sent) . ' s after a renewal');
		last;
	}
	note "a ttl of $ttl s is too short here";
}
$client->wait_for('SELECT count(*) = 0 FROM dlock_locks');
cmp_ok(now(), '>=', $sent + $ttl, 'all are lost when the lease is not renewed');

#
# Renewals that race with the expiry.  If one succeeded, nothing is lost within
# the ttl; otherwise all is lost for good.
#
my ($kept, $lost) = (0, 0);
my @wrong;
$ttl = ample(0.1);
foreach my $i (1 .. 24)
{
	# the time from the request to the deadline, from early to too late
	my $early =
	  $i % 8 == 0 ? $ttl / 2 : $i % 8 == 4 ? -0.02 : 0.0005 * ($i % 8 - 5);
	my @fences;

	$sent = now();
	$lease = $client->query("SELECT dlock_lease_open('$ttl s')");
	push @fences, $client->query("SELECT dlock_lease_acquire('r $_', $lease)")
	  foreach 1, 2;
	if (now() >= $sent + $ttl / 2)
	{
		$client->query("SELECT dlock_lease_close($lease)");
		$ttl *= 2;
		redo;
	}
	push @wrong, grep { !/^\d+$/ } @fences;
	last if @wrong;

	my $check = "SELECT dlock_check('r 1', $fences[0]) "
	  . "AND dlock_check('r 2', $fences[1])";
	foreach my $try (1 .. 3)
	{
		my ($before, $answer);

		usleep(1000) while now() < $sent + $ttl - $early - 0.001;
		$before = now();
		$answer = $client->query("SELECT dlock_renew($lease)");
		if ($answer eq '2')
		{
			$sent = $before;
			$kept++;
			while (now() < $sent + $ttl - abs($early) - 0.01)
			{
				$answer = $client->query($check);
				push @wrong, "$i: lost after a renewal"
				  if $answer ne 't' && now() < $sent + $ttl;
			}
			next;
		}
		$lost++;
		push @wrong, "$i: answer $answer" if $answer ne '';
		push @wrong, "$i: lost before its time" if now() < $sent + $ttl;
		push @wrong, "$i: held after it was lost"
		  if $client->query($check) ne 'f'
		  || $client->query("SELECT dlock_renew($lease)") ne '';
		last;
	}
	$admin->query("SELECT dlock_acquire('r 1') > 0, dlock_acquire('r 2') > 0");
	push @wrong, "$i: two holders" if $client->query($check) ne 'f';
	push @wrong, "$i: granted before its time" if now() < $sent + $ttl;
	$admin->query('SELECT dlock_release_all()');
}
is(join('; ', @wrong), '', 'no renewal succeeded beside an expiry');
ok($kept > 0 && $lost > 0, 'each of the two came first at times')
  or diag("$kept renewals, $lost losses");

#
# An enqueued ticket's ttl starts over at the grant
#
$ttl = 600;
$client->query("SELECT dlock_acquire('lock')");
my $ticket = $admin->query("SELECT dlock_ttl_enqueue('lock', '$ttl s')");
$admin->wait_for(
	"SELECT remaining < '$ttl s'::interval - '1 s' FROM dlock_locks "
	  . "WHERE ticket = $ticket");
$sent = now();
$client->query("SELECT dlock_release('lock')");
is($admin->query("SELECT dlock_wait($ticket)"), 't', 'a ticket is granted');
my $remaining = $admin->query('SELECT extract(epoch FROM remaining) '
	  . "FROM dlock_locks WHERE ticket = $ticket");
cmp_ok($remaining, '>=', $ttl - (now() - $sent), 'the ttl starts over at the grant');
cmp_ok($remaining, '<=', $ttl, 'the ttl is no longer than before');
$admin->query("SELECT dlock_release_ticket($ticket)");

# A ticket that expires in the queue lets later tickets pass.
$client->query("SELECT dlock_acquire('lock')");
$ticket = $admin->query("SELECT dlock_ttl_enqueue('lock', '1s')");
$waiter = session($node);
$waiter->start("SELECT dlock_acquire('lock')");
$admin->until_waits($waiter);
$admin->wait_for("SELECT count(*) = 0 FROM dlock_queue WHERE ticket = $ticket");
like($admin->query("SELECT dlock_wait($ticket)"),
	qr/55L01/, 'a ticket that expires in the queue is gone');
$client->query("SELECT dlock_release('lock')");
grows('the tickets behind it are granted', $ticket, $waiter->answer);
$waiter->quit;

#
# Attached to a session
#
my %ways = (
	'session ends' => sub { shift->quit },
	'client is killed' => sub { shift->vanish },
	'backend is terminated' => sub {
		$admin->query("SELECT pg_terminate_backend($_[0]->{pid})");
		$_[0]->quit;
	});
foreach my $way (sort keys %ways)
{
	my $session = session($node);
	my $attached = $session->query(
		"SELECT dlock_lease_open('10min', attach => true)");
	my $fence = $session->query("SELECT dlock_lease_acquire('at', $attached)");

	is( $client->query(
			'SELECT attached_pid, remaining IS NULL, held '
			  . "FROM dlock_leases WHERE lease = $attached"),
		"$session->{pid}|t|1",
		"$way: attached before");
	$sent = now();
	$ways{$way}->($session);
	backends_gone($session->{pid});
	my ($pid, $left) = split /\|/,
	  $client->query(
		'SELECT attached_pid IS NULL, extract(epoch FROM remaining) '
		  . "FROM dlock_leases WHERE lease = $attached");
	is($pid, 't', '... and detached then');
	cmp_ok($left, '>=', 600 - (now() - $sent), '... its ttl runs from the end of the session');
	is( $client->query(
			"SELECT dlock_check('at', $fence), dlock_renew($attached), "
			  . "dlock_lease_acquire('at', $attached)"),
		"t|1|$fence",
		'... a client that returns finds the lease unchanged');
	is($client->query("SELECT dlock_lease_close($attached)"),
		'1', '... and can close it');
}

# An attached lease needs no heartbeat, and expires after its session.
{
	my $session = session($node);
	my $attached = $session->query(
		"SELECT dlock_lease_open('200ms', attach => true)");
	my $fence = $session->query("SELECT dlock_lease_acquire('at', $attached)");

	# the expiry of another lease with a longer ttl shows that time has passed
	my $plain = $client->query("SELECT dlock_lease_open('1s')");
	$client->wait_for(
		"SELECT count(*) = 0 FROM dlock_queue_lease WHERE lease = $plain");
	is($client->query("SELECT dlock_check('at', $fence)"),
		't', 'an attached lease needs no heartbeat');
	is($client->query("SELECT dlock_renew($attached)"), '1', 'but may have one');
	$client->start("SELECT dlock_acquire('at')");
	$admin->until_waits($client);
	$sent = now();
	$session->quit;
	grows('the lease is lost a ttl after its session', $fence, $client->answer);
	cmp_ok(now(), '>=', $sent + 0.2, 'not earlier');
	$client->query('SELECT dlock_release_all()');
}

#
# Delay
#
# The ttls of these leases begin at the end of a session.
sub open_delayed
{
	my ($name, $delay) = @_;
	my $keeper = session($node);
	my $lease = $keeper->query(
		"SELECT dlock_lease_open('100ms', attach => true, delay => '$delay')");

	return ($keeper, $lease,
		$keeper->query("SELECT dlock_lease_acquire('$name', $lease)"));
}

# With a long delay, the test can observe the closed locks.
my ($keeper, $fence);
($keeper, $lease, $fence) = open_delayed('delayed', '10min');
$queued = $client->query("SELECT dlock_lease_enqueue('delayed', $lease, "
	  . "owner => 'another')");
$waiter = session($node);
$waiter->start("SELECT dlock_acquire('delayed')");
$admin->until_waits($waiter);
$keeper->quit;
$admin->wait_for('SELECT count(*) = 1 FROM dlock_queue_lease WHERE delayed');
is($client->query("SELECT dlock_check('delayed', $fence)"),
	'f', 'a lease with a delay expires');
is( $client->query(
		'SELECT ticket, granted, position, remaining > \'0\' '
		  . "FROM dlock_locks WHERE name = 'delayed' AND lease IS NOT NULL"),
	"$fence|f|0|t",
	'its lock is closed, and nothing else is left');
is($client->query("SELECT dlock_try_acquire('delayed') IS NULL"),
	't', 'to everyone');
is($client->query("SELECT dlock_renew($lease) IS NULL"),
	't', 'the lease is gone');
ok(!$waiter->answered, 'the next in line does not have the lock');
$admin->query("SELECT dlock_force_release($fence)");
grows('an administrator ends the delay', $fence, $waiter->answer);
$waiter->quit;
ok($admin->wait_for('SELECT count(*) = 0 FROM dlock_queue_lease'),
	'nothing is left of the lease');

# A short delay ends by itself.
($keeper, $lease, $fence) = open_delayed('delayed', '500ms');
$sent = now();
$keeper->quit;
grows('the next is granted after the delay',
	$fence, $client->query("SELECT dlock_acquire('delayed')"));
cmp_ok(now(), '>=', $sent + 0.6, 'not earlier');
$client->query("SELECT dlock_release('delayed')");

# A lease that is closed has no delay.
$lease =
  $client->query("SELECT dlock_lease_open('10min', delay => '10min')");
$client->query("SELECT dlock_lease_acquire('delayed', $lease)");
is($client->query("SELECT dlock_lease_close($lease)"),
	'1', 'a lease with a delay is closed');
like($client->query("SELECT dlock_acquire('delayed')"),
	qr/^\d+$/, 'the lock of a closed lease is free');
$client->query("SELECT dlock_release('delayed')");

# A crash does not shorten a delay.  A commit of another transaction flushes
# the worker's rows.
($keeper, $lease, $fence) = open_delayed('delayed', '10min');
$keeper->quit;
$admin->wait_for(
	"SELECT delayed FROM dlock_queue_lease WHERE lease = $lease");
$admin->query('CREATE TABLE flush ()');
$node->stop('immediate');
$_->quit foreach $client, $admin;
$node->start;
$client = session($node);
# The ttl is short only from the first call on, so that the lease cannot expire
# earlier.
$client->query("UPDATE dlock_queue_lease SET delay = '1s'");
$sent = now();
is( $client->query(
		"SELECT ticket, granted FROM dlock_locks WHERE name = 'delayed'"),
	"$fence|f",
	'after a crash, the lock is still closed');
is($client->query("SELECT dlock_check('delayed', $fence)"),
	'f', 'after a crash, the lease is still gone');
grows('the lock is granted after the delay', $fence,
	$client->query("SELECT dlock_acquire('delayed')"));
cmp_ok(now(), '>=', $sent + 1, 'the delay starts over after a crash');
$client->query('SELECT dlock_release_all()');

#
# Many leases with different ttls; every other one is renewed once
#
my %until;
$ttl = ample(1);
my @sessions = map { session($node) } 1 .. 4;
foreach my $batch (1 .. 8)
{
	# The worker writes the requests of all sessions in one transaction.
	$sent = now();
	$_->start(
		q{SET synchronous_commit = off;
		SELECT string_agg(dlock_ttl_acquire(format('%s %s', pg_backend_pid(), }
		  . ($batch * 100)
		  . " + i), make_interval(secs => $ttl + i / 50.0)) || ' ' || i, ',')"
		  . ' FROM generate_series(1, 100) AS i') foreach @sessions;
	foreach my $answer (map { $_->answer } @sessions)
	{
		# A lease may have expired before its number was returned.
		next if $answer =~ /55L01/ && now() > $sent + $ttl;
		foreach (split /,/, $answer)
		{
			my ($number, $i) = split / /;
			$until{$number} = $sent + $ttl + $i / 50;
		}
	}
}
$_->quit foreach @sessions;
cmp_ok(scalar(keys %until), '>', 1600, 'many leases');
{
	my $n = 0;
	my @some = grep { $n++ % 2 } sort { $a <=> $b } keys %until;
	my $answer;

	$sent = now();
	$answer = $client->query(
		q{SELECT string_agg(lease || ' ' || extract(epoch FROM ttl), ',') }
		  . 'FROM dlock_leases WHERE dlock_renew(lease) = 1 '
		  . "AND lease = ANY ('{" . join(',', @some) . "}')");
	foreach (split /,/, $answer)
	{
		my ($number, $seconds) = split / /;
		$until{$number} = $sent + $seconds;
	}
}
my @early;
poll('all leases are gone',
	sub {
		my %left = map { $_ => 1 }
		  split /,/, $client->query(
			q{SELECT string_agg(ticket::text, ',') FROM dlock_locks});
		my $now = now();

		foreach (keys %until)
		{
			next if $left{$_};
			push @early, $_ if $now < $until{$_};
			delete $until{$_};
		}
		return !%left;
	});
is(scalar(@early), 0, 'no lease expires too early');
is(scalar(keys %until), 0, 'all leases expire');
$client->wait_for('SELECT count(*) = 0 FROM dlock_queue');
pass('the rows of the leases are removed');
no_worker($client);
pass('the worker exits');
$client->quit;
$node->stop;
done_testing();
