# A guarded commit pins the lock until it is visible, however long that takes.
# So no write of a stale holder becomes visible after its successor was granted
# the lock.
#
# What would break it: a missing pin, or a pin that is removed before the
# commit is visible, so that a forced release hands the lock over while the
# commit waits for a standby; an unpin that does not hand over, or a commit
# that ends without an unpin, so that the lock stays closed; a pin for a
# transaction that has no guard.
#
# The tested commits wait for a synchronous standby that does not exist.  Other
# commits do not wait.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Test::More;

# Without WAL senders, no commit would wait for a standby.  A waiter must not
# get its lock only because it wakes up to look for deadlocks.
my $node = new_server('main',
	conf => "synchronous_commit = local\n"
	  . "wal_level = replica\nmax_wal_senders = 1\n"
	  . 'deadlock_timeout = 10min');
$node->safe_psql('postgres', 'CREATE TABLE journal (entry text)');
my $admin = session($node);

my ($holder, $next, $fence);

# Let this session wait for the lock, and then read the table "journal" at
# once.
sub queue
{
	my ($session) = @_;

	$session->start("SELECT dlock_acquire('lock') > $fence; "
		  . 'SELECT entry FROM journal ORDER BY entry');
	$admin->until_waits($session);
	return;
}

# Let the holder acquire the lock by this statement, and the next session wait.
sub lock_and_queue
{
	my ($acquire) = @_;

	$admin->query('TRUNCATE journal');
	$holder = session($node);
	$next = session($node);
	$fence = $holder->query($acquire // "SELECT dlock_acquire('lock')");
	like($fence, qr/^\d+$/, 'locked');
	queue($next);
	return;
}

# Begin a transaction with these statements and a write, and leave its commit
# hanging.
sub hang_commit
{
	my ($statements) = @_;

	$holder->query("BEGIN; SET LOCAL synchronous_commit = on; $statements; "
		  . "INSERT INTO journal VALUES ('holder')");
	$holder->start('COMMIT');
	poll('the commit hangs', sub { hangs($node, $holder) });
	return;
}

my $guard = sub { "SELECT dlock_guard('lock', $fence)" };

sub end_by_force
{
	return $admin->query("SELECT dlock_force_release($fence)");
}

# The rows of dlock_locks, with a line for each row
sub locks
{
	my $locks = $admin->query(
		'SELECT pid, granted, pinned FROM dlock_locks ORDER BY ticket');

	$locks =~ s/^$holder->{pid}\b/holder/mg;
	$locks =~ s/^$next->{pid}\b/next/mg;
	return $locks;
}

sub journal
{
	return $admin->query(
		"SELECT string_agg(entry, ' ' ORDER BY entry) FROM journal");
}

sub finish
{
	my ($test) = @_;

	$_->quit foreach $holder, $next;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	pass("$test: nothing is left");
	return;
}

commits_hang($node, 1);

# A session commits, and waits there for a lock of PostgreSQL's.
sub stops_in_commit
{
	my ($session) = @_;

	$session->start('COMMIT');
	$admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
		  . "WHERE pid = $session->{pid} AND wait_event_type = 'Lock'");
	return;
}

#
# The lock is lost while the guarded commit hangs.
#
sub pinned_and_lost
{
	my ($test) = @_;

	is(locks(), "holder|t|t\nnext|f|f", "$test: pinned");
	is(end_by_force(), 't', "$test: released by force");
	is(locks(), "holder|f|t\nnext|f|f", "$test: still pinned");
	is(end_by_force(), 't', "$test: released by force again");
	ok(!$next->answered, "$test: the next still waits");
	is( $admin->query(
			"SELECT dlock_check('lock', $fence), dlock_fence('lock') IS NULL"),
		'f|t',
		"$test: the fence is nobody's any more");
	is( $admin->query(
			q{SELECT dlock_try_acquire('lock', '10ms') IS NULL}),
		't',
		"$test: no other session gets it, either");
	is(journal(), '', "$test: the write is not visible yet");
	return;
}

sub successor_sees_it
{
	my ($test) = @_;

	is($next->answer, "t\nholder",
		"$test: the next has the lock and sees the write");
	is(locks(), 'next|t|f', "$test: nothing is pinned");
	return;
}

# Guarded transactions that lose their lock are canceled, one after the other.
# All earlier cancels have taken effect by then.
sub others_are_canceled
{
	my ($test) = @_;
	my $session = session($node);

	foreach my $round (1 .. 2)
	{
		my $ticket = $session->query("SELECT dlock_acquire('other $round')");

		$session->start("BEGIN; SELECT dlock_guard('other $round', $ticket); "
			  . 'SELECT pg_sleep(1000)');
		$admin->wait_for("SELECT wait_event = 'PgSleep' "
			  . "FROM pg_stat_activity WHERE pid = $session->{pid}");
		$admin->query("SELECT dlock_force_release($ticket)");
		like($session->answer, qr/57014/, "$test: another transaction is canceled");
		$session->query('ROLLBACK');
	}
	$session->quit;
	backends_gone($session->{pid});
	return;
}

# The ways in which a hanging commit can go on.  Each sub must end its wait.
my @ways = (
	'standby not needed any more' => sub {
		commits_hang($node, 0);
		is($holder->answer, '', 'the commit is over');
	},
	'cancel' => sub {
		$admin->query("SELECT pg_cancel_backend($holder->{pid})");
		like($holder->answer, qr/canceling wait for synchronous replication/,
			'the commit is over, without the standby');
	},
	'terminate' => sub {
		$admin->query("SELECT pg_terminate_backend($holder->{pid})");
	},
	'client gone, standby not needed any more' => sub {
		$holder->vanish;
		is(locks(), "holder|f|t\nnext|f|f", 'client gone: still pinned');
		commits_hang($node, 0);
	},
	'stopped, standby not needed any more, continued' => sub {
		kill 'STOP', $holder->{pid};
		commits_hang($node, 0);
		is(locks(), "holder|f|t\nnext|f|f", 'stopped: still pinned');
		ok(!$next->answered, 'stopped: the next still waits');
		kill 'CONT', $holder->{pid};
		is($holder->answer, '', 'continued: the commit is over');
	},
	'stopped, terminated, continued' => sub {
		kill 'STOP', $holder->{pid};
		$admin->query("SELECT pg_terminate_backend($holder->{pid})");
		is(locks(), "holder|f|t\nnext|f|f", 'terminated but stopped: still pinned');
		kill 'CONT', $holder->{pid};
	});

while (my ($way, $go_on) = splice(@ways, 0, 2))
{
	note $way;
	commits_hang($node, 1);
	lock_and_queue();
	hang_commit($guard->());
	pinned_and_lost($way);
	$go_on->();
	successor_sees_it($way);
	finish($way);
}

# A procedure commits in the middle of its CALL.  The loss of a guarded lock
# cancels a statement, but not once the commit has pinned the lock.  Other
# transactions that lose their locks are still canceled then.
{
	$admin->query('CREATE PROCEDURE guarded(fence bigint) LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM dlock_guard(\'lock\', fence);
			INSERT INTO journal VALUES (\'holder\');
			COMMIT;
		END $$');
	commits_hang($node, 1);
	lock_and_queue();
	$holder->query('SET synchronous_commit = on');
	$holder->start("CALL guarded($fence)");
	poll('the procedure commits', sub { hangs($node, $holder) });
	pinned_and_lost('in a procedure');
	others_are_canceled('in a procedure');
	ok(hangs($node, $holder), 'in a procedure: the commit still waits');
	commits_hang($node, 0);
	is($holder->answer, '', 'in a procedure: the commit is over');
	successor_sees_it('in a procedure');
	finish('in a procedure');
}

# The holder learns of the loss at its release.
commits_hang($node, 1);
lock_and_queue();
hang_commit($guard->());
end_by_force();
$admin->query("SELECT pg_cancel_backend($holder->{pid})");
$holder->answer;
like(
	$holder->query("SELECT dlock_release('lock')"),
	qr/WARNING:  55L01: lock "lock" was lost.*^f$/ms,
	'the holder hears of the loss');
is($next->answer, "t\nholder", 'the next session has the lock');
finish('told');

# A lock that is not lost stays with the session, or ends with the transaction.
lock_and_queue();
hang_commit($guard->());
commits_hang($node, 0);
is($holder->answer, '', 'session scope: committed');
is(locks(), "holder|t|f\nnext|f|f", 'session scope: held, not pinned any more');
is($holder->query("SELECT dlock_release('lock')"),
	't', 'session scope: released');
successor_sees_it('session scope');
finish('session scope');

commits_hang($node, 1);
lock_and_queue("BEGIN; SELECT dlock_xact_acquire('lock')");
hang_commit($guard->());
pinned_and_lost('transaction scope, lost');
commits_hang($node, 0);
successor_sees_it('transaction scope, lost');
finish('transaction scope, lost');

commits_hang($node, 1);
lock_and_queue();
hang_commit($guard->() . "; SELECT dlock_release_at_commit($fence)");
is(locks(), "holder|t|t\nnext|f|f", 'release at commit: pinned');
commits_hang($node, 0);
successor_sees_it('release at commit');
finish('release at commit');

# A lease's lock is pinned like any other.  The ticket's row stays as long as
# the pin, while the worker writes the ends of later tickets.
commits_hang($node, 1);
lock_and_queue("SELECT dlock_ttl_acquire('lock', '1h')");
hang_commit($guard->());
is(end_by_force(), 't', 'of a lease: released by force');
is( $admin->query(
		"SELECT dlock_release_ticket(dlock_ttl_acquire('behind', '1h'))"),
	't',
	'of a lease: the worker has written');
$admin->wait_for("SELECT count(*) = 0 FROM dlock_queue WHERE name = 'behind'");
is($admin->query("SELECT count(*) FROM dlock_queue WHERE ticket = $fence"),
	'1', 'of a lease: its row is there');
is(end_by_force(), 't', 'of a lease: released once more');
ok(!$next->answered, 'of a lease: the next still waits');
commits_hang($node, 0);
is($holder->answer, '', 'of a lease: the commit is over');
successor_sees_it('of a lease');
finish('of a lease');

# While the pin lasts, no row says that the next ticket is granted: the removal
# of the holder's row grants it.
commits_hang($node, 1);
lock_and_queue("SELECT dlock_ttl_acquire('lock', '1h')");
$admin->query("SELECT pg_cancel_backend($next->{pid})");
like($next->answer, qr/57014/, 'of a lease, and a lease: the next gives up');
hang_commit($guard->());
is(end_by_force(), 't', 'of a lease, and a lease: released by force');
$next->start("SELECT dlock_ttl_acquire('lock', '1h') > $fence");
$admin->wait_for("SELECT count(*) = 2 FROM dlock_locks('lock')");
is( $admin->query(
		"SELECT dlock_release_ticket(dlock_ttl_acquire('behind', '1h'))"),
	't',
	'of a lease, and a lease: the worker has written');
is($admin->query("SELECT count(*) FROM dlock_queue WHERE name = 'lock'"),
	'1', 'of a lease, and a lease: one row');
commits_hang($node, 0);
is($holder->answer, '', 'of a lease, and a lease: the commit is over');
is($next->answer, 't', 'of a lease, and a lease: the next has the lock');
$admin->query(
	"SELECT dlock_force_release(ticket) FROM dlock_locks('lock')");
finish('of a lease, and a lease');

# If one of several holders is pinned, the others can leave.
commits_hang($node, 1);
lock_and_queue("SELECT dlock_acquire('lock', shared => true)");
my $reader = session($node);
$admin->query("SELECT pg_cancel_backend($next->{pid})");
like($next->answer, qr/57014/, 'shared: the next gives up');
$reader->query("SELECT dlock_acquire('lock', shared => true)");
queue($next);
hang_commit($guard->());
is(end_by_force(), 't', 'shared: released by force');
$reader->quit;
$admin->wait_for(
	"SELECT count(*) = 0 FROM dlock_locks WHERE pid = $reader->{pid}");
is(locks(), "holder|f|t\nnext|f|f", 'shared: the other holder is gone, and this one is pinned');
commits_hang($node, 0);
successor_sees_it('shared');
finish('shared');

#
# Without a guard, nothing is pinned.  A check is not enough: the holder's
# write becomes visible after its successor's.
#
my $in_transaction = "BEGIN; SELECT dlock_xact_acquire('lock')";
my %unguarded = (
	'check' => [ undef, sub { "SELECT dlock_check('lock', $fence)" } ],
	'check in transaction scope' =>
	  [ $in_transaction, sub { "SELECT dlock_check('lock', $fence)" } ],
	'release at commit' =>
	  [ undef, sub { "SELECT dlock_release_at_commit($fence)" } ],
	'guard rolled back' =>
	  [ undef, sub { 'SAVEPOINT s; ' . $guard->() . '; ROLLBACK TO s' } ],
	'guard of another transaction' => [
		undef,
		sub {
			$holder->query($guard->());
			return 'SELECT 1';
		}
	]);

foreach my $test (sort keys %unguarded)
{
	my ($acquire, $statements) = @{ $unguarded{$test} };

	commits_hang($node, 1);
	lock_and_queue($acquire);
	hang_commit($statements->());
	is(locks(), "holder|t|f\nnext|f|f", "$test: not pinned");
	is(end_by_force(), 't', "$test: released by force");
	is($next->answer, 't', "$test: the next has the lock and sees nothing");
	is(locks(), 'next|t|f', "$test: the next is the only holder");
	$next->query("INSERT INTO journal VALUES ('successor')");
	is(journal(), 'successor', "$test: what the successor wrote is visible");
	commits_hang($node, 0);
	is($holder->answer, '', "$test: the holder's commit is over");
	is(journal(), 'holder successor', "$test: the stale write came later");
	finish($test);
}

#
# A holder is stopped before its commit, and its successor is granted the lock.
#
foreach my $test ('guard', 'check')
{
	lock_and_queue();
	$holder->query('BEGIN; '
		  . ($test eq 'guard' ? $guard->() : "SELECT dlock_check('lock', $fence)")
		  . "; INSERT INTO journal VALUES ('holder')");
	kill 'STOP', $holder->{pid};
	$holder->start('COMMIT');
	is(locks(), "holder|t|f\nnext|f|f", "stopped after a $test: not pinned");
	is(end_by_force(), 't', "stopped after a $test: released by force");
	is($next->answer, 't', "stopped after a $test: the next has the lock");
	my $newer = $admin->query("SELECT dlock_fence('lock')");
	$next->query("INSERT INTO journal VALUES ('successor')");
	is(journal(), 'successor', "stopped after a $test: the successor writes");
	kill 'CONT', $holder->{pid};
	if ($test eq 'guard')
	{
		like(
			$holder->answer,
			qr/ERROR:  55L01: lock "lock" with fence $fence is not held any more
DETAIL:  It is held with the newer fence $newer\.
HINT:  \S/m,
			'the stale commit fails');
		is(journal(), 'successor', 'the stale write was discarded');
	}
	else
	{
		is($holder->answer, '', 'the unguarded commit does not fail');
		is(journal(), 'holder successor', 'the stale write came later');
	}
	finish("stopped after a $test");
}

#
# A commit fails after it has pinned its locks, because it cannot get NOTIFY's
# lock.  Locks that were lost are handed over nevertheless.
#
my %failures = (
	'cancel' => sub {
		$admin->query("SELECT pg_cancel_backend($holder->{pid})");
		like($holder->answer, qr/57014: canceling statement/, 'canceled');
	},
	'terminate' =>
	  sub { $admin->query("SELECT pg_terminate_backend($holder->{pid})") },
	'terminate, client gone' => sub {
		$holder->vanish;
		$admin->query("SELECT pg_terminate_backend($holder->{pid})");
	});

commits_hang($node, 1);
my $notifier = session($node);
$notifier->start('BEGIN; SET LOCAL synchronous_commit = on; NOTIFY other; '
	  . "SELECT pg_logical_emit_message(true, 'waits for a standby', ''); COMMIT");
poll('NOTIFY hangs', sub { hangs($node, $notifier) });
foreach my $test (sort keys %failures)
{
	lock_and_queue();
	$holder->query('BEGIN; ' . $guard->()
		  . "; INSERT INTO journal VALUES ('holder'); NOTIFY mine");
	stops_in_commit($holder);
	pinned_and_lost("$test in the commit");
	$failures{$test}->();
	is($next->answer, 't', "$test in the commit: the next has the lock");
	is(locks(), 'next|t|f', "$test in the commit: nothing is pinned");
	is(journal(), '', "$test in the commit: nothing was written");
	finish("$test in the commit");
}

# The same with a lease's lock: the session that exits removes its pin, and the
# lease keeps the lock until it is released.
{
	my $committer = session($node);

	lock_and_queue("SELECT dlock_ttl_acquire('lock', '1h')");
	$committer->query('BEGIN; ' . $guard->() . '; NOTIFY mine');
	stops_in_commit($committer);
	is($admin->query("SELECT pinned FROM dlock_locks WHERE ticket = $fence"),
		't', 'of a lease, terminated: pinned');
	$committer->may_end;
	$admin->query("SELECT pg_terminate_backend($committer->{pid})");
	backends_gone($committer->{pid});
	$committer->quit;
	is($admin->query("SELECT pinned FROM dlock_locks WHERE ticket = $fence"),
		'f', 'of a lease, terminated: not pinned any more');
	is(end_by_force(), 't', 'of a lease, terminated: released by force');
	is($next->answer, 't', 'of a lease, terminated: the next has the lock');
	finish('of a lease, terminated');
}

# A commit that has pinned its lock is not canceled when other locks are lost.
lock_and_queue();
$holder->query('BEGIN; ' . $guard->()
	  . "; INSERT INTO journal VALUES ('holder'); NOTIFY mine");
stops_in_commit($holder);
pinned_and_lost('lost in the commit');
others_are_canceled('lost in the commit');
ok(!$holder->answered, 'lost in the commit: it still waits for NOTIFY\'s lock');
$admin->query("SELECT pg_cancel_backend($notifier->{pid})");
like($notifier->answer, qr/canceling wait for synchronous replication/,
	'lost in the commit: NOTIFY\'s lock is free');
is($holder->answer, '', 'lost in the commit: the commit is over');
successor_sees_it('lost in the commit');
finish('lost in the commit');
$notifier->start('BEGIN; SET LOCAL synchronous_commit = on; NOTIFY other; '
	  . "SELECT pg_logical_emit_message(true, 'waits for a standby', ''); COMMIT");
poll('NOTIFY hangs again', sub { hangs($node, $notifier) });

# A commit fails after it has pinned its lock.  The holder keeps the lock.
lock_and_queue();
$holder->query('BEGIN; ' . $guard->() . '; NOTIFY mine');
$holder->start('COMMIT');
$admin->wait_for(
	"SELECT pinned FROM dlock_locks WHERE pid = $holder->{pid}");
$admin->query("SELECT pg_cancel_backend($holder->{pid})");
like($holder->answer, qr/57014: canceling statement/, 'canceled, not lost');
is(locks(), "holder|t|f\nnext|f|f", 'canceled, not lost: not pinned any more');
is(end_by_force(), 't', 'canceled, not lost: released by force');
is($next->answer, 't', 'canceled, not lost: the next has the lock at once');
finish('canceled, not lost');
commits_hang($node, 0);
like($notifier->answer, qr/^[0-9A-F]+\/[0-9A-F]+$/, 'NOTIFY is over');
$notifier->quit;

#
# A crash while the lock is pinned: locks are gone, and the commit, which was
# in the WAL, is visible before any session can lock.
#
commits_hang($node, 1);
lock_and_queue();
hang_commit($guard->());
end_by_force();
$node->stop('immediate');
$_->quit foreach $admin, $holder, $next;
start_again($node);
$admin = session($node);
is($admin->query('SELECT count(*) FROM dlock_locks'), '0', 'crash: no locks');
is($admin->query("SELECT dlock_acquire('lock') > $fence"),
	't', 'crash: a newer fence');
is(journal(), 'holder', 'crash: the write is visible');
$admin->quit;

$node->stop;
done_testing();
