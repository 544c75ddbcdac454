# A holder with a lease checks that it holds the lock, and is then stopped for
# longer than its lease lives.  A successor gets the lock and writes.  Then the
# first holder wakes up and continues to write.
#
# With dlock_guard(), the first holder's write or commit fails, no matter where
# it was stopped, and the successor's data stays.  If it is stopped within the
# commit, no successor gets the lock before the commit is visible.  With
# dlock_check() alone, the stale write wins, no matter how close the check is
# to the write.  The test shows that, too.
#
# What would break it: a guard that is checked at the call but not at the
# commit; an expiry that ignores a pin; a pin that keeps the lock after the
# commit; a lease kept alive by a stopped backend.
#
# Signals stop the processes.  The leases expire by themselves, and the test
# waits for that.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Test::More;

# A commit waits for a standby if its session demands that.
my $node = new_server(
	'main',
	conf => q{
synchronous_commit = local
wal_level = replica
max_wal_senders = 1
deadlock_timeout = '1h'
});
my $admin = session($node);
my $listener = session($node);

$node->safe_psql('postgres',
	q{CREATE TABLE data (writer text); INSERT INTO data VALUES ('nobody')});
$listener->query('LISTEN holder; LISTEN successor');

my ($holder, $fence, $successor, $next);

# Start a holder with a lease of a quarter of a second.  The lease is attached
# to the returned session, so it cannot expire before that session ends.
sub hold
{
	my ($scope) = @_;
	my $keeper = session($node);
	my $lease =
	  $keeper->query("SELECT dlock_lease_open('250ms', attach => true)");

	$admin->query(q{UPDATE data SET writer = 'nobody'});
	$holder = session($node);
	$successor = session($node);
	$fence =
	  $holder->query("SELECT dlock_lease_enqueue('lock', $lease, 'holder')");
	told($listener, 'the holder has the lock',
		announcement('granted', 'lock', $fence));
	$next =
	  $successor->query("SELECT dlock_ttl_enqueue('lock', '1h', 'successor')");
	cmp_ok($next, '>', $fence, 'the successor waits for the lock');
	return $keeper;
}

sub data
{
	return $admin->query('SELECT writer FROM data');
}

# a guarded transaction of the successor
sub successor_writes
{
	return $successor->query("BEGIN; SELECT dlock_guard('lock', $next); "
		  . q{UPDATE data SET writer = 'successor'; COMMIT});
}

sub finish
{
	$admin->query("SELECT dlock_release_ticket($next)");
	is_now($admin, 'SELECT count(*) FROM dlock_locks', '0', 'nothing is left');
	is(scalar($listener->announcements(0)), 0, 'no announcement is left');
	$_->quit foreach $holder, $successor;
	return;
}

#
# Stopped in the middle of a guarded transaction
#
foreach my $when ('before the write', 'after the write', 'in between')
{
	my $keeper = hold();
	my @statements = (
		"SELECT dlock_guard('lock', $fence)",
		q{INSERT INTO data VALUES ('holder')});

	# The holder inserts, because an updated row would block the successor.
	$holder->query('BEGIN');
	$holder->query($statements[0])
	  unless $when eq 'in between';
	is($holder->query("SELECT dlock_check('lock', $fence)"),
		't', "$when: it holds the lock");
	$holder->query($statements[1]) if $when eq 'after the write';
	stop_process($holder->{pid});
	$keeper->quit;
	told(
		$listener,
		"$when: the holder is stopped for too long, and the successor is granted",
		announcement('wanted', 'lock', $fence),
		announcement('expired', 'lock', $fence),
		announcement('granted', 'lock', $next));
	is($successor->query("SELECT dlock_wait($next, '0')"),
		't', "$when: confirmed");
	is(successor_writes(), '', "$when: the successor writes");

	continue_process($holder->{pid});
	if ($when eq 'in between')
	{
		like($holder->query($statements[0]),
			qr/55L01/, "$when: the holder goes on, and is refused");
		like($holder->query($statements[1]),
			qr/25P02/, "$when: it cannot write");
		like($holder->query('COMMIT'), qr/^$/, "$when: it cannot commit");
	}
	else
	{
		like(
			$holder->query($statements[1]),
			qr/57014: canceling statement due to loss of lock "lock"/,
			"$when: the holder goes on, and cannot write")
		  if $when eq 'before the write';
		like(
			$holder->query('COMMIT'),
			$when eq 'before the write' ? qr/^$/ : qr/55L01/,
			"$when: it cannot commit");
	}
	is(data(), 'successor', "$when: the successor's data stands");
	finish();
}

#
# The same with a check instead of the guard.  The check's answer was true when
# it was given.
#
{
	my $keeper = hold();

	is($holder->query("SELECT dlock_check('lock', $fence)"),
		't', 'check: it holds the lock');
	stop_process($holder->{pid});
	$keeper->quit;
	told(
		$listener,
		'check: the holder is stopped for too long, and the successor is granted',
		announcement('wanted', 'lock', $fence),
		announcement('expired', 'lock', $fence),
		announcement('granted', 'lock', $next));
	is(successor_writes(), '', 'check: the successor writes');
	is(data(), 'successor', q{check: the successor's data is there});

	continue_process($holder->{pid});
	is($holder->query(q{UPDATE data SET writer = 'holder'}),
		'', 'check: the holder goes on, and writes');
	is(data(), 'holder', q{check: the successor's data is lost});
	is($holder->query("SELECT dlock_check('lock', $fence)"),
		'f', 'check: a second check would have failed');
	finish();
}

#
# Stopped within the commit, which waits for a standby.  The holder then keeps
# the lock until the commit is visible.
#
{
	my $keeper = hold();

	commits_hang($node, 1);
	$holder->query('BEGIN; SET LOCAL synchronous_commit = on; '
		  . "SELECT dlock_guard('lock', $fence); "
		  . q{UPDATE data SET writer = 'holder'});
	$holder->start('COMMIT');
	poll('the commit waits', sub { hangs($node, $holder) });
	stop_process($holder->{pid});
	$keeper->quit;
	told($listener, 'commit: the holder is stopped for too long',
		announcement('wanted', 'lock', $fence),
		announcement('expired', 'lock', $fence));

	is( $admin->query(
			'SELECT ticket, granted, pinned FROM dlock_locks ORDER BY ticket'),
		"$fence|f|t\n$next|f|f",
		'commit: the lock is pinned');
	is($successor->query("SELECT dlock_wait($next, '300ms')"),
		'f', 'commit: the successor does not get the lock');
	is( $admin->query(
			q{SELECT dlock_try_ttl_acquire('lock', '1h', timeout => '10ms') IS NULL}
		),
		't',
		'commit: no other client gets the lock');
	is($admin->query("SELECT dlock_check('lock', $fence)"),
		'f', 'commit: the fence is not valid any more');
	like($admin->query(
			"BEGIN; SELECT dlock_guard('lock', $next); COMMIT"),
		qr/55L01/, q{commit: the successor's fence is not valid yet});
	is(data(), 'nobody', q{commit: the holder's write is not visible});

	# the successor reads as soon as it has the lock
	$successor->start(
		"SELECT dlock_wait($next); SELECT writer FROM data");
	$admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
		  . "WHERE pid = $successor->{pid} AND wait_event_type = 'Lock'");

	# The standby is no longer needed, but the commit is still stopped.
	commits_hang($node, 0);
	ok(!$successor->answered, 'commit: the successor still waits');
	is($admin->query("SELECT granted FROM dlock_locks WHERE ticket = $next"),
		'f', q{commit: the successor's ticket is not granted});
	continue_process($holder->{pid});
	is($holder->answer, '', 'commit: the holder goes on, and commits');
	is($successor->answer, "t\nholder",
		'commit: the successor gets the lock, and sees the write');
	told($listener, q{commit: the successor's grant is announced},
		announcement('granted', 'lock', $next));
	is(successor_writes(), '', 'commit: the successor writes');
	is(data(), 'successor', q{commit: the successor's data stands});
	finish();
}

$_->quit foreach $admin, $listener;
done_testing();
