# One query finds the root of all waits, in dlock and in PostgreSQL, and counts
# the sessions behind the root.  Afterwards the views have the names with the
# longest waits, even if there were more names than are kept.
#
# What would break it: a wait that is not followed into the other kind of lock;
# a root that is counted twice, or not at all; a lease, a delay, a prepared
# transaction or an enqueued ticket, which have no waiting session; a deadlock,
# which has no root; data that another role must not see; a gauge that is wrong
# after one kind of end of a wait; names that replace each other wrongly.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Test::More;

my $many = 40;
my $node = new_server('main',
	conf => "deadlock_timeout = '1h'\nmax_prepared_transactions = 5\n");
my $admin = session($node);

$admin->query('CREATE TABLE account (id integer PRIMARY KEY, balance integer);'
	  . 'INSERT INTO account VALUES (7, 100), (8, 100);'
	  . 'GRANT ALL ON account TO PUBLIC; CREATE ROLE blind; CREATE ROLE eyes;'
	  . 'GRANT pg_read_all_stats TO eyes; CREATE DATABASE other');

# These columns of each root, in the view's order
sub blockers
{
	my ($columns, $session) = @_;

	return ($session // $admin)->query("SELECT $columns FROM dlock_blockers");
}

# Wait until the session waits for one of PostgreSQL's locks.
sub until_blocked
{
	my ($waiter) = @_;

	return $admin->wait_for('SELECT EXISTS (SELECT FROM pg_locks '
		  . "WHERE pid = $waiter->{pid} AND NOT granted)");
}

sub gauge
{
	my ($gauge) = @_;

	return $admin->query("SELECT $gauge FROM dlock_stats");
}

# Check that dlock_stats agrees with dlock_locks.
sub gauges_are_right
{
	my ($test) = @_;

	return is_now(
		$admin, q{SELECT (s.held, s.waiting) = (l.held, l.waiting)
			FROM dlock_stats AS s, (SELECT count(*) FILTER (WHERE granted) AS held,
				count(*) FILTER (WHERE position > 0) AS waiting
				FROM dlock_locks) AS l}, 't', $test);
}

is(blockers('*'), '', 'nobody waits');

#
# Many sessions wait for a lock.  Its holder waits for a row that another
# session has locked, which is idle in its transaction.
#
{
	my ($idle, $holder) = map { session($node) } 1 .. 2;
	my @waiters = map { session($node) } 1 .. $many;

	$idle->query("SELECT dlock_acquire('not waited for')");
	$idle->query('BEGIN');
	$idle->query('UPDATE account SET balance = 0 WHERE id = 7');
	$holder->query("SELECT dlock_acquire('busy', info => 'node-1')");
	$holder->start('UPDATE account SET balance = 1 WHERE id = 7');
	until_blocked($holder);
	foreach my $n (0 .. $#waiters)
	{
		$waiters[$n]->start("SELECT dlock_acquire('busy')");
		# The first waiters queue in this order.
		$admin->until_waits($waiters[$n]) if $n < 3;
	}
	$admin->until_waits(@waiters);

	is( blockers('pid, lease, ticket, role = current_user, info, state, blocked, query'),
		"$idle->{pid}|||t||idle in transaction|" . ($many + 1)
		  . '|UPDATE account SET balance = 0 WHERE id = 7;',
		'the idle session is the root, and all others are behind it');
	like(blockers('holds'), qr/^\{"ExclusiveLock on transaction \d+"\}$/,
		'its transaction blocks others, and none of its locks does');
	is( blockers(q{since = (SELECT waitstart FROM pg_locks
				WHERE NOT granted AND waitstart IS NOT NULL)}),
		't',
		'the time since which a session waits for it');
	is(gauge('waiting'), $many, 'the gauge counts the waits in dlock');
	is( gauge(q{oldest_wait > '0' AND oldest_wait BETWEEN
			clock_timestamp() - (SELECT min(enqueued_at) FROM dlock_locks
				WHERE position > 0) - interval '1min'
			AND clock_timestamp() - (SELECT min(enqueued_at) FROM dlock_locks
				WHERE position > 0)}),
		't',
		'the first waiter has waited longest');
	gauges_are_right('as dlock_locks has it');
	is( $admin->query("SELECT dlock_blocking_pids($holder->{pid}), "
			  . "dlock_blocking_pids($waiters[1]{pid}), "
			  . "dlock_blocking_pids($idle->{pid})"),
		"{$idle->{pid}}|{$holder->{pid},$waiters[0]{pid}}|{}",
		'dlock_blocking_pids() knows of both kinds of locks');

	# The queries of other roles are hidden.
	my $reader = session($node);
	my $seen = 'pid, state, query, blocked';
	$reader->query('SET ROLE blind');
	is(blockers($seen, $reader),
		"$idle->{pid}||<insufficient privilege>|" . ($many + 1),
		'a role without rights does not see its query');
	$reader->query('SET ROLE eyes');
	like(blockers($seen, $reader), qr/\|idle in transaction\|UPDATE/,
		'a role that may read all statistics sees its query');
	$reader->quit;
	my $elsewhere = session($node, 'other');
	$elsewhere->query('CREATE EXTENSION dlock');
	is(blockers('*', $elsewhere), '', 'another database has no waiter');
	is($elsewhere->query('SELECT waiting, held FROM dlock_stats'),
		'0|0', 'another database has no counts');
	$elsewhere->quit;

	# When the root has released, the next session is the root.
	$idle->query("COMMIT");
	$holder->answer;
	is( blockers('pid, ticket = dlock_fence($$busy$$), info, state, holds, blocked'),
		"$holder->{pid}|t|node-1|idle|{\"exclusive hold of lock \\\"busy\\\"\"}|$many",
		'then the lock\'s holder is the root');
	$admin->query('SELECT dlock_force_release(dlock_fence($$busy$$))');
	$waiters[0]->answer;
	is( blockers('pid, blocked'), "$waiters[0]{pid}|" . ($many - 1),
		'then the next holder is the root');
	gauges_are_right('after a release by force');
	$admin->query("SELECT pg_cancel_backend($waiters[1]{pid})");
	like($waiters[1]->answer, qr/ERROR:  57014/, 'a waiter is canceled');
	$admin->query("SELECT pg_terminate_backend($waiters[0]{pid})");
	$waiters[2]->answer;
	is( blockers('pid, blocked'), "$waiters[2]{pid}|" . ($many - 3),
		'the view shows ends and errors at once');
	gauges_are_right('after an end and a cancel');
	$admin->query('SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
		  . "WHERE pid IN (SELECT pid FROM dlock_locks WHERE name = 'busy')");
	$_->quit foreach $idle, $holder, @waiters;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	gauges_are_right('all are gone');
	is(blockers('*'), '', 'no session waits any more');
}

#
# Several roots: a session that blocks others with a row; holders of permits,
# which all block; readers
#
{
	my ($root, $writer, @others) = map { session($node) } 1 .. 8;

	$root->query('BEGIN; UPDATE account SET balance = 0 WHERE id = 7');
	foreach my $n (0 .. 2)
	{
		# The first waits for the transaction, the others for the first.
		$others[$n]->start("UPDATE account SET balance = $n WHERE id = 7");
		until_blocked($others[$n]);
	}
	$others[3]->query("SELECT dlock_acquire('permits', slots => 3, permits => 2), "
		  . "dlock_acquire('read', shared => true)");
	$others[4]->query("SELECT dlock_acquire('permits', slots => 3)");
	$writer->query("SELECT dlock_acquire('read', shared => true)");
	$others[5]->start("SELECT dlock_acquire('permits', slots => 3, permits => 3)");
	$admin->until_waits($others[5]);
	is( blockers('pid, blocked, holds'),
		join("\n",
			$root->{pid} . '|3|' . $admin->query('SELECT holds FROM dlock_blockers LIMIT 1'),
			"$others[3]{pid}|1|{\"2 permits of lock \\\"permits\\\"\"}",
			"$others[4]{pid}|1|{\"1 permit of lock \\\"permits\\\"\"}"),
		'a row\'s locker, and each holder of permits, are roots');

	# Waiters for a session are behind all sessions that it waits for.
	$others[2]->may_end;
	$admin->query("SELECT pg_terminate_backend($others[2]{pid})");
	backends_gone($others[2]{pid});
	$writer->start('UPDATE account SET balance = 9 WHERE id = 7');
	until_blocked($writer);
	my $last = session($node);
	$last->start("SELECT dlock_acquire('read')");
	$admin->until_waits($last);
	my $reader = session($node);
	$reader->start("SELECT dlock_acquire('read', shared => true)");
	$admin->until_waits($reader);
	is( blockers('pid, blocked'),
		"$root->{pid}|5\n$others[3]{pid}|3\n$others[4]{pid}|1",
		'a shared holder blocks the writer, and the session behind the writer');
	$admin->query('SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
		  . "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()");
	$_->quit foreach $root, $writer, $last, $reader, @others;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

#
# Roots without a process
#
{
	my ($waiter, $other) = map { session($node) } 1 .. 2;
	my $lease = $admin->query("SELECT dlock_lease_open('1h', delay => '1h')");
	my $ticket = $admin->query(
		"SELECT dlock_lease_acquire('leased', $lease, info => 'node-2')");
	my $queued = $admin->query(
		"SELECT dlock_ttl_enqueue('leased', '1h', 'nobody', owner => 'me')");
	$waiter->query("SELECT dlock_acquire('mine')");
	$waiter->start("SELECT dlock_acquire('leased')");
	$admin->until_waits($waiter);
	$other->start("SELECT dlock_wait($queued)");
	is_now($admin, "SELECT dlock_blocking_pids($other->{pid})", '{0}',
		'a lease is 0');

	my $columns = 'pid, lease, ticket, role = current_user, info, state, holds, '
	  . 'blocked, query';
	is( blockers($columns),
		"|$lease|$ticket|t|node-2|lease|{\"exclusive hold of lock \\\"leased\\\"\"}|2|",
		'a lease is the root of a session and of an enqueued ticket');
	gauges_are_right('with leases');
	is(gauge('leases, worker_pid = (SELECT pid FROM pg_stat_activity '
			. "WHERE backend_type = 'dlock worker')"),
		'2|t', 'leases are counted, and their worker is known');
	is_now($admin, 'SELECT journal_lag FROM dlock_stats', '00:00:00',
		'all rows are written');

	# A short lease ends the wait for this lease's expiry.
	my $short = $admin->query(
		"SELECT dlock_lease_open('" . ample(1) . "s', delay => '1h')");
	my $closed = $admin->query("SELECT dlock_lease_acquire('closed', $short)");
	$admin->wait_for("SELECT count(*) = 0 FROM dlock_leases WHERE lease = $short");
	my $behind = session($node);
	$behind->start("SELECT dlock_acquire('closed')");
	$admin->until_waits($behind);
	is( $admin->query("SELECT $columns FROM dlock_blockers WHERE lease = $short"),
		"|$short|$closed|t||delay|{\"delay of lock \\\"closed\\\"\"}|1|",
		'a delay is the root');
	gauges_are_right('a delay holds nothing');
	$admin->query("SELECT dlock_force_release($closed)");
	$behind->answer;
	$behind->quit;

	$admin->query("SELECT dlock_lease_close($lease)");
	$other->answer;
	is( blockers('pid, lease, blocked'), "|$queued|1", 'the next lease is the root');
	$admin->query("SELECT dlock_release_ticket($queued)");
	$waiter->answer;
	$waiter->query("SELECT dlock_acquire('a')");
	$other->query("SELECT dlock_acquire('theirs')");
	$waiter->query("SELECT dlock_enqueue('theirs', 'nobody')");
	is(blockers('pid, blocked'), "$other->{pid}|1", 'an enqueued ticket counts as a waiter');
	my $third = session($node);
	$third->start("SELECT dlock_acquire('a')");
	$admin->until_waits($third);
	is( $admin->query('SELECT pid, blocked FROM dlock_blockers ORDER BY pid = '
			  . $waiter->{pid}),
		"$other->{pid}|1\n$waiter->{pid}|1",
		'the ticket\'s session is the root of its own lock\'s waiters');
	gauges_are_right('with enqueued tickets');
	$waiter->query('SELECT dlock_release_all()');
	$third->answer;

	# A prepared transaction can be the root.
	$other->query("BEGIN; UPDATE account SET balance = 5 WHERE id = 8; "
		  . "PREPARE TRANSACTION 'forgotten'");
	$third->start('UPDATE account SET balance = 6 WHERE id = 8');
	until_blocked($third);
	is( blockers('pid, lease, ticket, role = current_user, info, state, blocked'),
		"|||t|forgotten|prepared|1",
		'a prepared transaction has a name');
	$admin->query("COMMIT PREPARED 'forgotten'");
	$third->answer;
	$_->quit foreach $waiter, $other, $third;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	gauges_are_right('all are gone');
}

#
# A deadlock that no session looks for yet, with a waiter behind it, is shown
# as one row, for the session that began to wait last.
#
{
	my ($a, $b, $c) = map { session($node) } 1 .. 3;

	$a->query("BEGIN; SELECT dlock_acquire('a')");
	$b->query('BEGIN; UPDATE account SET balance = 1 WHERE id = 7');
	$a->start('UPDATE account SET balance = 2 WHERE id = 7');
	until_blocked($a);
	$c->start("SELECT dlock_acquire('a')");
	$admin->until_waits($c);
	is(blockers('pid, blocked'), "$b->{pid}|2", 'before the deadlock');
	$b->start("SELECT dlock_acquire('a')");
	$admin->until_waits($b);
	is_now($admin, 'SELECT pid, state, blocked FROM dlock_blockers',
		"$b->{pid}|active|2", 'a deadlock has one row');
	$admin->query("SELECT pg_cancel_backend($b->{pid})");
	like($b->answer, qr/ERROR:  57014/, 'that session is canceled');
	$b->query('ROLLBACK');
	$a->answer;
	is(blockers('pid, blocked'), "$a->{pid}|1", 'the others go on');
	$a->query('COMMIT; SELECT dlock_release_all()');
	$c->answer;
	$_->quit foreach $a, $b, $c;
}

#
# Names that were waited for
#
sub contention
{
	my ($columns, $names) = @_;

	return $admin->query("SELECT $columns FROM dlock_contention "
		  . ($names ? "WHERE name ~ '$names' " : '') . 'ORDER BY name');
}

my $all_waits = q{SELECT max(waits) = (SELECT waited + timeouts + canceled + deadlocks
		FROM dlock_stats) FROM dlock_wait_histogram};
my @sessions = map { session($node) } 1 .. 5;
my ($holder, $waiter, $late, $third, $fourth) = @sessions;

$holder->query("SELECT dlock_acquire('hot'), dlock_acquire('never waited for')");
my $since = gauge('stats_reset');
$admin->query('SELECT dlock_stats_reset()');
is(gauge("stats_reset > '$since', acquired, waited, wait_time, held"),
	't|0|0|00:00:00|2', 'counters restart, and locks stay held');
is( $admin->query('SELECT count(*), count(le), sum(waits) FROM dlock_wait_histogram'),
	'23|22|0', 'counts of waits restart');
is(contention('*'), '', 'names are forgotten');
$third->query('SET ROLE blind');
like($third->query('SELECT dlock_stats_reset()'),
	qr/ERROR:  42501/, 'a reset needs a privilege');
$third->query('RESET ROLE');

# A wait with each kind of end
foreach my $session ($waiter, $late)
{
	$session->start("SELECT dlock_acquire('hot')");
	$admin->until_waits($session);
}
is($third->query("SELECT dlock_try_acquire('hot', '1ms')"), '', 'a timeout');
like($fourth->query("SET lock_timeout = '1ms'; SELECT dlock_acquire('hot')"),
	qr/ERROR:  55P03/, 'a lock_timeout');
is(gauge('waiting'), 2, 'two sessions still wait');
is($third->query("SELECT dlock_try_acquire('hot')"),
	'', 'a session that does not wait does not count');
$admin->query("SELECT pg_cancel_backend($late->{pid})");
like($late->answer, qr/ERROR:  57014/, 'a cancel');
$holder->query("SELECT dlock_release('hot')");
$waiter->answer;
$waiter->query("SELECT dlock_release('hot')");
is( contention('name, waits, timeouts, deadlocks, expirations, max_queue, '
		  . "max_wait > '0', max_wait < wait_time, "
		  . 'last_wait_at <= clock_timestamp()'),
	'hot|4|2|0|0|3|t|t|t', 'all waits are counted for the name');
is(gauge('waited, timeouts, canceled, deadlocks, busy'),
	'1|1|2|0|1', 'dlock_stats has the same counts, without lock_timeout');
is( $admin->query('SELECT le IS NULL, waits FROM dlock_wait_histogram '
		  . 'WHERE waits = 4 ORDER BY le DESC NULLS FIRST LIMIT 1'),
	't|4', 'waits are counted by length');
is( $admin->query('SELECT bool_and(a.waits <= b.waits) FROM dlock_wait_histogram AS a, '
		  . 'dlock_wait_histogram AS b WHERE a.le < b.le OR b.le IS NULL'),
	't', 'each bound includes shorter waits');

# A deadlock is counted.
$waiter->query("SET deadlock_timeout = '10ms'; SELECT dlock_acquire('dead 1')");
$late->query("SELECT dlock_acquire('dead 2')");
$late->start("SELECT dlock_acquire('dead 1')");
$admin->until_waits($late);
like($waiter->query("SELECT dlock_acquire('dead 2')"),
	qr/ERROR:  40P01/, 'a deadlock');
$waiter->query('SELECT dlock_release_all()');
$late->answer;
is(contention('name, waits, deadlocks', 'dead'),
	"dead 1|1|0\ndead 2|1|1", 'a deadlock is counted for the lock that the victim waited for');

# An expired lease is counted.
$admin->query("SELECT dlock_ttl_acquire('leased', '" . ample(2) . "s')");
$waiter->start("SELECT dlock_acquire('leased')");
is($admin->query("SELECT dlock_ttl_acquire('nobody waits', '100ms') > 0"),
	't', 'another one');
$waiter->answer;
$admin->wait_for("SELECT dlock_fence('nobody waits') IS NULL");
is_now($admin, 'SELECT leases FROM dlock_stats', '0', 'no lease is left');
is(contention('name, expirations', 'leased|nobody'),
	'leased|1', 'an expired lease is counted for a lock with a waiter');

# Tickets without a waiting session are counted.
$holder->query("SELECT dlock_acquire('queue')");
my $of_session = $waiter->query("SELECT dlock_enqueue('queue', 'nobody')");
my $of_lease =
  $third->query("SELECT dlock_ttl_enqueue('queue', '1h', 'nobody')");
$late->start("SELECT dlock_wait($of_lease)");
is_now($admin, "SELECT dlock_blocking_pids($late->{pid})",
	"{$holder->{pid},$waiter->{pid}}", 'an enqueued ticket blocks a session');
$holder->query("SELECT dlock_release('queue')");
is(contention('waits, max_queue', 'queue'), '1|1', 'a session\'s ticket counts');
$waiter->query("SELECT dlock_release_ticket($of_session)");
$late->answer;
is(contention('waits, max_queue', 'queue'),
	'2|2', 'the grant of a lease\'s ticket counts once, even with a waiter');
$third->query("SELECT dlock_release_ticket($of_lease)");
is($admin->query($all_waits), 't', 'the histogram has all waits of sessions');

# In a new database, no session has waited before.
foreach my $enqueue ("dlock_enqueue('first', 'nobody')",
	"dlock_ttl_enqueue('first', '1h', 'nobody')")
{
	my ($database) = $enqueue =~ /^(\w+)/;

	$admin->query("CREATE DATABASE $database");
	$node->safe_psql($database, 'CREATE EXTENSION dlock');
	my ($first, $next) = map { session($node, $database) } 1 .. 2;
	$first->query("SELECT dlock_acquire('first')");
	$next->query("SELECT $enqueue");
	$first->query("SELECT dlock_release('first')");
	is($next->query('SELECT name, waits FROM dlock_contention'),
		'first|1', "$enqueue: the wait counts");
	$_->quit foreach $first, $next;
}

# If there are more names than fit, a name with a long wait stays.
my $noise = 1050;
sub make_noise
{
	return $third->query("SELECT count(dlock_try_acquire('noise ' || n, '1us')) "
		  . "FROM generate_series(1, $noise) AS n");
}
$holder->query("SELECT count(dlock_acquire('noise ' || n)) "
	  . "FROM generate_series(1, $noise) AS n");
$holder->query("SELECT dlock_acquire('long')");
$waiter->start("SELECT dlock_acquire('long')");
$admin->until_waits($waiter);
is(make_noise(), 0, 'many short waits');
is($admin->query('SELECT count(*), count(DISTINCT name) FROM dlock_contention'),
	'1000|1000', 'as many names are kept as fit');
$holder->query("SELECT dlock_release('long')");
$waiter->answer;
is(make_noise(), 0, 'many short waits again');
is(contention('name, waits, wait_time = max_wait', '^long'),
	'long|1|t', 'the long wait is still there');
is( $admin->query('SELECT count(*), count(DISTINCT name), '
		  . "max(waits) FILTER (WHERE name ~ 'noise') <= 2, "
		  . "max(wait_time) FILTER (WHERE name ~ 'noise') < "
		  . "(SELECT wait_time FROM dlock_contention WHERE name = 'long') "
		  . 'FROM dlock_contention'),
	'1000|1000|t|t', 'other names have only their own waits');
is($admin->query('SELECT bool_and(waits > 0) FROM dlock_contention'),
	't', 'no name without a wait is kept');
is($admin->query($all_waits), 't', 'all waits are counted');
$_->quit foreach @sessions;
gauges_are_right('in the end');
is($admin->query('SELECT dlock_stats_reset()'), '', 'once more');
is(contention('*'), '', 'all names are forgotten');

$admin->quit;
$node->stop;
done_testing();
