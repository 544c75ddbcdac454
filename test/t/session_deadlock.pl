# A deadlock has exactly one victim, the youngest of its tickets, whose error
# lists every wait in it.  Without a deadlock there is no victim.
#
# What would break it: a check that combines waits which it saw at two moments;
# two waiters that each choose the other, or themselves, as the victim; a cycle
# through a heavyweight lock that no session looks for again.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Dlock::Lease;
use Dlock::Worker;
use PostgreSQL::Test::Utils;
use Test::More;

# Only sessions that set deadlock_timeout look for deadlocks.  A short general
# setting would cancel an autovacuum that blocks a session, with an error.
my $node = new_server('main',
	conf => "deadlock_timeout = '1h'\nautovacuum = off\n");
my $admin = session($node);
my $looks = "SET deadlock_timeout = '10ms'";
my $deadlocks = 0;

$node->safe_psql('postgres', 'CREATE TABLE t AS SELECT 0 AS n');

# Return the detail of a victim's error, sorted, without transaction ids.
sub detail
{
	my ($answer) = @_;
	my ($detail) = $answer =~
	  /ERROR:  40P01: deadlock detected\nDETAIL:  (.*?)\nHINT:  See server log/s
	  or return $answer;

	$detail =~ s/transaction \d+/transaction/g;
	return join "\n", sort split /\n/, $detail;
}

sub edge
{
	my ($waiter, $what, @blockers) = @_;

	return "Process $waiter->{pid} waits for $what; blocked by process"
	  . (@blockers > 1 ? 'es ' : ' ')
	  . join(', ', map { $_->{pid} } @blockers) . '.';
}

sub edges
{
	return join "\n", sort @_;
}

# dlock_blocking_pids() shows a wait shortly after it is in the queue.
sub waits_for
{
	my ($waiter, $blocker, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is_now($admin, "SELECT dlock_blocking_pids($waiter->{pid})",
		"{$blocker->{pid}}", $test);
}

# Check that no lock is left, and that there was only one more victim.
sub is_over
{
	my ($test, @sessions) = @_;

	$deadlocks++;
	$_->quit foreach @sessions;
	ok($admin->wait_for('SELECT count(*) = 0 FROM dlock_locks'),
		"$test: nothing is left");
	$admin->wait_for("SELECT deadlocks = $deadlocks FROM pg_stat_database "
		  . "WHERE datname = 'postgres'");
	is($admin->query('SELECT deadlocks FROM dlock_stats'),
		$deadlocks, "$test: one more deadlock is counted");
	return;
}

#
# Rings, in which each session waits for the next session's lock.  The first
# session, the last, one in the middle, or all of them look for deadlocks.
#
foreach my $size (2, 3, 10)
{
	foreach my $looker (0, int($size / 2), $size - 1, 'everybody')
	{
		my $test = "ring of $size, $looker looks";
		my @ring = map { session($node) } 1 .. $size;
		my $last = $size - 1;

		$ring[$_]->query("SELECT dlock_acquire('$_')") foreach 0 .. $last;
		$_->query($looks)
		  foreach $looker eq 'everybody' ? @ring : $ring[$looker];
		foreach my $i (0 .. $last - 1)
		{
			$ring[$i]->start("SELECT dlock_acquire('" . ($i + 1) . "') > 0");
			$admin->until_waits($ring[$i]);
			waits_for($ring[$i], $ring[ $i + 1 ], "$test: $i waits for the next");
		}
		is( detail($ring[$last]->query("SELECT dlock_acquire('0')")),
			edges(
				map {
					my $next = ($_ + 1) % $size;
					edge($ring[$_], "exclusive hold of lock \"$next\"",
						$ring[$next]);
				} 0 .. $last),
			"$test: the youngest is told all edges");

		# The other sessions continue, one after another.
		$ring[$last]->query('SELECT dlock_release_all()');
		foreach my $i (reverse 0 .. $last - 1)
		{
			is($ring[$i]->answer, 't', "$test: $i goes on");
			$ring[$i]->query('SELECT dlock_release_all()');
		}
		is_over($test, @ring);
	}
}

#
# Every kind of wait in one ring, closed by a session that waits for a
# heavyweight lock, unknown to dlock.  The victim is the youngest ticket, of
# the session that looks, or of another session, which the first session wakes.
#
foreach my $looker (0, 1)
{
	my $test = "mixed ring, $looker looks";
	my ($a, $b, $c, $d, $e) = map { session($node) } 1 .. 5;

	($a, $b)[$looker]->query($looks);
	$a->query('BEGIN; UPDATE t SET n = n + 1');
	$b->query("SELECT dlock_acquire('shared', shared => true)");
	$c->query("SELECT dlock_acquire('slots', slots => 3, permits => 2)");
	$d->query('SELECT pg_advisory_lock(1)');
	$e->query('BEGIN; LOCK TABLE t IN ROW SHARE MODE; SELECT pg_advisory_lock(2)');

	$a->start("SELECT dlock_acquire('shared')");
	$admin->until_waits($a);
	$b->start("SELECT dlock_acquire('slots', slots => 3, permits => 2)");
	$admin->until_waits($b);
	waits_for($a, $b, "$test: a waits for b");
	waits_for($b, $c, "$test: b waits for c");
	$c->start('SELECT pg_advisory_lock(1)');
	$d->start('SELECT pg_advisory_lock(2)');
	foreach my $waiter ($c, $d)
	{
		$admin->wait_for(
			"SELECT cardinality(pg_blocking_pids($waiter->{pid})) = 1");
		is( $admin->query("SELECT dlock_blocking_pids($waiter->{pid}) = "
				  . "pg_blocking_pids($waiter->{pid})"),
			't', "$test: the last wait is not in dlock");
	}
	$e->start('UPDATE t SET n = n + 1');

	is( detail($b->answer),
		edges(
			edge($a, 'exclusive hold of lock "shared"', $b),
			edge($b, '2 permits of lock "slots"', $c),
			edge($c, 'ExclusiveLock on advisory lock ['
				  . $admin->query("SELECT oid FROM pg_database "
					  . "WHERE datname = 'postgres'")
				  . ',0,1,1]', $d),
			edge($d, 'ExclusiveLock on advisory lock ['
				  . $admin->query("SELECT oid FROM pg_database "
					  . "WHERE datname = 'postgres'")
				  . ',0,2,1]', $e),
			edge($e, 'ShareLock on transaction', $a)),
		"$test: the youngest ticket is told all edges");
	$b->quit;
	like($a->answer, qr/^\d+$/, "$test: a goes on");
	$a->query('ROLLBACK');
	is($e->answer, '', "$test: e goes on");
	is_over($test, $a, $b, $e, $d, $c);
}

# The log's additions to the victim's message
like(
	slurp_file($node->logfile),
	qr/DETAIL:  Process (\d+) waits for .*\n(\t.*\n)*\tProcess \1: SELECT dlock_acquire\('/,
	"the server's log has the queries");

# A knot: two holders of permits wait for the writer, which waits for both.
{
	my @holders = map { session($node) } 1 .. 2;
	my $writer = session($node);
	my $bystander = session($node);

	$writer->query("SELECT dlock_acquire('x')");
	foreach my $holder (@holders)
	{
		$holder->query("SELECT dlock_acquire('two', slots => 2)");
		$holder->start("SELECT dlock_acquire('x') > 0");
		$admin->until_waits($holder);
	}

	# This session waits for the knot with the youngest ticket, but no session
	# waits for it.
	$writer->query($looks);
	$writer->start("SELECT dlock_acquire('two', slots => 2)");
	$bystander->query($looks);
	$bystander->start("SELECT dlock_acquire('x') > 0");
	is( detail($writer->answer),
		edges(
			edge($writer, '1 permit of lock "two"', @holders),
			edge($holders[0], 'exclusive hold of lock "x"', $writer),
			edge($holders[1], 'exclusive hold of lock "x"',
				$writer, $holders[0])),
		'knot: the victim\'s error lists all waits');
	$writer->quit;
	foreach my $session (@holders, $bystander)
	{
		is($session->answer, 't', 'knot: the others go on');
		$session->quit;
	}
	is_over('knot');
}

#
# Storms.  Clients hold and wait briefly, and look for deadlocks after a
# millisecond, so that the waits change during a look.
#
$node->append_conf('postgresql.conf',
	"deadlock_timeout = '1ms'\nlog_lock_waits = on\n");
$node->reload;
$admin->wait_for("SELECT current_setting('deadlock_timeout') = '1ms'");
$node->safe_psql('postgres',
	'CREATE TABLE rows AS SELECT id, 0 AS n FROM generate_series(1, 9) AS id');

# storm($seconds, @scripts): runs the scripts with 20 clients.  Returns the
# number of transactions, and the number of failed transactions.
sub storm
{
	my ($seconds, @scripts) = @_;
	my ($out, $err) = ('', '');
	my $number = 0;
	my @files;

	foreach my $script (@scripts)
	{
		my $file = "$PostgreSQL::Test::Utils::tmp_check/storm." . $number++;

		unlink $file;
		append_to_file($file, $script);
		push @files, '-f', $file;
	}
	IPC::Run::run(
		[
			$node->installed_command('pgbench'),
			'-n', '-c', 20, '-j', 2, '-T', $seconds, @files,
			$node->connstr('postgres')
		],
		'>', \$out, '2>', \$err,
		IPC::Run::timeout(
			$seconds + $PostgreSQL::Test::Utils::timeout_default));
	is($?, 0, 'storm: ends') or diag($err);
	my ($done) = $out =~ /transactions actually processed: (\d+)/;
	my ($failed) = $out =~ /failed transactions: (\d+)/;
	return ($done, $failed);
}

# If all clients lock rows and names in one order, there is no cycle or victim.
# The last two scripts look like a cycle: the waiter for the lock holds a row,
# and the lock's former holder waits for the row just after its release.
my $offset = -s $node->logfile;
my ($done, $failed) = storm(
	ample(10),
	q{
\set a random(1, 3)
\set b random(:a + 1, 4)
\set reads random(0, 1)
BEGIN;
SELECT dlock_xact_acquire('lock ' || :a, shared => :reads = 1);
SELECT dlock_xact_acquire('lock ' || :b);
UPDATE rows SET n = n + 1 WHERE id = :b;
COMMIT;
}, q{
\set a random(1, 3)
\set b random(:a + 1, 4)
\set permits random(1, 3)
BEGIN;
SELECT dlock_xact_acquire('lock ' || :a);
UPDATE rows SET n = n + 1 WHERE id = :a;
SELECT dlock_xact_acquire('slots ' || :a, slots => 3, permits => :permits);
UPDATE rows SET n = n + 1 WHERE id = 4 + :a;
COMMIT;
}, q{
\set a random(1, 3)
\set b random(:a + 1, 4)
SELECT cardinality(dlock_acquire_all(ARRAY['lock ' || :b, 'lock ' || :a]));
SELECT dlock_release_all();
}, q{
BEGIN;
UPDATE rows SET n = n + 1 WHERE id = 9;
SELECT dlock_xact_acquire('last');
COMMIT;
}, q{
DO $$
BEGIN
	FOR i IN 1 .. 20 LOOP
		PERFORM dlock_acquire('last', shared => true);
		PERFORM pg_sleep(0.002);
		PERFORM dlock_release('last');
		UPDATE rows SET n = n + 1 WHERE id = 9;
		COMMIT;
	END LOOP;
END $$;
});
my $log = slurp_file($node->logfile, $offset);
my $looked = () = $log =~ /still waiting for/g;
note "$done transactions, $looked looks";
cmp_ok($looked, '>', 100, 'order: clients looked for deadlocks');
is($failed, 0, 'order: there is no victim');
unlike($log, qr/ERROR/, 'order: there is no other error');
is($admin->query('SELECT deadlocks FROM dlock_stats'),
	$deadlocks, 'order: no deadlock is counted');
ok($admin->wait_for('SELECT count(*) = 0 FROM dlock_locks'),
	'order: nothing is left');

# A revoked lock is not held: a waiter for it waits for the next holder.
{
	my ($loser, $holder, $waiter) = map { session($node) } 1 .. 3;

	$loser->query("SELECT dlock_acquire('lost')");
	$admin->query("SELECT dlock_force_release(dlock_fence('lost'))");
	$holder->query("SELECT dlock_acquire('lock'), dlock_acquire('lost')");
	$loser->query($looks);
	is($loser->query("SELECT dlock_try_acquire('lock', '100ms') IS NULL"),
		't', 'lost: another session holds the lock');
	$waiter->start("SELECT dlock_acquire('lost') > 0");
	$admin->until_waits($waiter);
	is($loser->query("SELECT dlock_try_acquire('lock', '100ms') IS NULL"),
		't', 'lost: a session waits for the lock');
	$holder->query("SELECT dlock_release('lost')");
	is($waiter->answer, 't', 'lost: the waiter gets the lock');
	$waiter->query("SELECT dlock_release('lost')");
	is($loser->query("SELECT dlock_try_acquire('lock', '100ms') IS NULL"),
		't', 'lost: no session has the lock');
	$_->quit foreach $loser, $holder, $waiter;
}

# The victim may have only a place in the queue: two cycles contain the place,
# and only its end lets all other sessions continue.
{
	my ($head, @holders) = map { session($node) } 1 .. 3;
	my @behind = map { session($node) } 1 .. 2;

	$_->query("SET deadlock_timeout = '1h'")
	  foreach $head, @holders, @behind;
	$_->query("SELECT dlock_acquire('head', shared => true)") foreach @holders;
	foreach my $n (0, 1)
	{
		$behind[$n]->query("SELECT dlock_acquire('behind $n')");
	}
	$head->start("SELECT dlock_acquire('head')");
	$admin->until_waits($head);
	foreach my $n (0, 1)
	{
		$behind[$n]->start("SELECT dlock_acquire('head', shared => true) > 0");
		$admin->until_waits($behind[$n]);
	}
	$holders[0]->start("SELECT dlock_acquire('behind 0') > 0");
	$admin->until_waits($holders[0]);
	$holders[1]->query($looks);
	$holders[1]->start("SELECT dlock_acquire('behind 1') > 0");
	like($head->answer, qr/40P01/, 'head: the session with only a place is the victim');
	foreach my $n (0, 1)
	{
		is($behind[$n]->answer, 't', "head: the next waiter goes on, $n");
		$behind[$n]->query('SELECT dlock_release_all()');
		is($holders[$n]->answer, 't', "head: a session that waited for that waiter goes on");
	}
	$deadlocks++;
	$_->quit foreach $head, @holders, @behind;
}

# A cycle through a parallel worker, which waits for a heavyweight lock
{
	my ($leader, $victim) = map { session($node) } 1 .. 2;

	$admin->query(
		q{CREATE FUNCTION wait_in_parallel() RETURNS integer
		LANGUAGE plpgsql PARALLEL SAFE AS $$
		BEGIN
			PERFORM pg_advisory_xact_lock(7);
			RETURN 1;
		END $$});
	$leader->query("SELECT dlock_acquire('parallel')");
	$leader->query(
		q{SELECT set_config(name, 'on', false) FROM pg_settings
		   WHERE name IN ('force_parallel_mode', 'debug_parallel_query')});
	$victim->query("SELECT pg_advisory_lock(7); $looks");
	$leader->start('SELECT wait_in_parallel()');
	$admin->wait_for(q{SELECT count(*) = 1 FROM pg_stat_activity
		WHERE backend_type = 'parallel worker' AND wait_event = 'advisory'});
	is( detail($victim->query("SELECT dlock_acquire('parallel')")),
		edges(
			edge($leader, 'a lock, in a parallel worker', $victim),
			edge($victim, 'exclusive hold of lock "parallel"', $leader)),
		'parallel: the error lists all waits');
	$victim->query('SELECT pg_advisory_unlock(7)');
	is($leader->answer, '1', 'parallel: the other session goes on');
	$deadlocks++;
	$_->quit foreach $leader, $victim;
}

# A cycle through the worker: a lease's ended ticket keeps the lock until the
# worker has removed its row, and a session has locked the table.  Each case
# has what the victim waits for, the arguments of its request, and a function
# that makes the ticket and returns a function that ends it.
$admin->query('CREATE TABLE in_the_way (n integer)');
my $other_holder = session($node);

# The lease has run out, and its delay is over for this lock, but not for another
# one: the lock stays closed to shared requests, even if another session holds
# it shared, and to small ones.
my $delayed = sub {
	my ($mode) = @_;
	my $keeper = session($node);
	my $lease = $keeper->query(
		"SELECT dlock_lease_open('100 ms', attach => true, delay => '1 h')");
	my $fence = $keeper->query("SELECT dlock_lease_acquire('leased', $lease$mode)");

	$keeper->query("SELECT dlock_lease_acquire('kept', $lease)");
	return sub {
		$keeper->quit;
		$admin->wait_for("SELECT NOT dlock_check('leased', $fence)");
		$admin->query("SELECT dlock_force_release($fence)");
	};
};

foreach (
	[
		'exclusive hold', '',
		sub {
			my $fence = $admin->query("SELECT dlock_ttl_acquire('leased', '1h')");

			return sub { $admin->query("SELECT dlock_release_ticket($fence)") };
		}
	],
	[
		'shared hold',
		', shared => true',
		sub {
			my $end = $delayed->(', shared => true');

			$other_holder->query("SELECT dlock_acquire('leased', shared => true)");
			return $end;
		}
	],
	[ '1 permit', ', slots => 2', sub { $delayed->(', slots => 2') } ],
	# a place in the queue
	[
		'shared hold',
		', shared => true',
		sub {
			$other_holder->query("SELECT dlock_acquire('leased')");
			my $ticket = $admin->query(
				"SELECT dlock_ttl_enqueue('leased', '1h', 'nobody', shared => true)");

			return sub {
				$admin->query("SELECT dlock_release_ticket($ticket)");
				$other_holder->query("SELECT dlock_release('leased')");
			};
		}
	])
{
	my ($what, $mode, $make) = @$_;
	my ($victim, $other) = map { session($node) } 1, 2;
	my ($worker, $detail);
	my $begin = sub {
		my $end = $make->();

		$worker = worker($admin);
		$victim->query('BEGIN; LOCK TABLE in_the_way IN ROW EXCLUSIVE MODE');
		$other->query('BEGIN; LOCK TABLE dlock_queue');
		$end->();
	};
	my $goes_on = sub {
		$victim->query('ROLLBACK');
		is($other->answer, '', "worker, $what: the other session goes on");
		$other->query('ROLLBACK');
		$other_holder->query('SELECT dlock_release_all()');
		$admin->query("SELECT dlock_force_release(ticket) FROM dlock_locks
			WHERE name = 'kept'");
	};

	$begin->();

	# The views show the cycle before any session looks for a deadlock.
	$victim->query("SET deadlock_timeout = '1h'");
	$other->query("SET deadlock_timeout = '1h'");
	$victim->start("SELECT dlock_xact_acquire('leased'$mode)");
	$admin->wait_for("SELECT dlock_blocking_pids($victim->{pid}) = '{$worker}'");
	# The worker may be between two attempts.
	ok( $admin->wait_for("SELECT dlock_blocking_pids($worker) = '{$other->{pid}}'"),
		"worker, $what: the session that blocks the worker");
	$admin->wait_for(qq{SELECT pid = $other->{pid} AND since > now() - interval '1h'
		FROM dlock_blockers});
	$other->start('LOCK TABLE in_the_way');
	$admin->wait_for("SELECT pg_blocking_pids($other->{pid}) = '{$victim->{pid}}'");
	ok( $admin->wait_for(
			'SELECT count(*) = 1 AND max(blocked) = 2 FROM dlock_blockers'),
		"worker, $what: dlock_blockers has the cycle");
	$admin->query("SELECT pg_cancel_backend($victim->{pid})");
	like($victim->answer, qr/ERROR:  57014/,
		"worker, $what: no deadlock was looked for");
	$goes_on->();

	$begin->();
	$victim->query($looks);
	$other->start('LOCK TABLE in_the_way');
	$admin->wait_for("SELECT pg_blocking_pids($other->{pid}) = '{$victim->{pid}}'");
	$detail = detail($victim->query("SELECT dlock_xact_acquire('leased'$mode)"));
	like(
		$detail,
		qr/Process $victim->{pid} waits for $what of lock "leased"; blocked by process $worker\./,
		"worker, $what: the wait for the worker");
	like(
		$detail,
		qr/Process $worker waits for RowExclusiveLock on relation \d+ of database \d+; blocked by process $other->{pid}\./,
		"worker, $what: the wait of the worker");
	$goes_on->();
	$deadlocks++;
	like($victim->query("SELECT dlock_acquire('leased'$mode)"),
		qr/^\d+$/, "worker, $what: the lock is handed over");
	$_->quit foreach $victim, $other;
}
$other_holder->quit;

# If clients lock in any order, each deadlock is resolved, by one victim.
$offset = -s $node->logfile;
($done, $failed) = storm(
	ample(5),
	q{
\set a random(1, 4)
\set b random(1, 4)
\set reads random(0, 1)
BEGIN;
SELECT dlock_xact_acquire('lock ' || :a, shared => :reads = 1);
UPDATE rows SET n = n + 1 WHERE id = :b;
SELECT dlock_xact_acquire('other ' || :b);
COMMIT;
}, q{
\set a random(1, 4)
\set b random(1, 4)
SELECT dlock_release_all();
SELECT dlock_acquire('other ' || :a);
SELECT dlock_acquire('lock ' || :b);
SELECT dlock_release_all();
});
$log = slurp_file($node->logfile, $offset);
my $victims = () = $log =~ /ERROR:  deadlock detected/g;
note "$done transactions, $victims victims";
cmp_ok($done, '>', 0, 'disorder: transactions are done');
cmp_ok($victims, '>', 0, 'disorder: there are victims');
unlike($log, qr/ERROR:  (?!deadlock)/, 'disorder: there are no other errors');
$deadlocks += $victims;
$admin->wait_for("SELECT deadlocks = $deadlocks FROM pg_stat_database "
	  . "WHERE datname = 'postgres'");
is($admin->query('SELECT deadlocks FROM dlock_stats'),
	$deadlocks, 'disorder: all deadlocks are counted');
ok($admin->wait_for('SELECT count(*) = 0 FROM dlock_locks'),
	'disorder: nothing is left');

# A session sees a cycle twice, but in between another member of the cycle has
# given up its wait, and begun another.  That is no deadlock.
SKIP:
{
	skip 'no debugger that can be attached', 3 unless debugger_works($admin);
	my ($looker, $other) = map { session($node) } 1 .. 2;
	my $first_look = PostgreSQL::Test::Utils::tempdir . '/looked';
	my $waits_for_row = sub {
		$other->start('SELECT FROM t FOR UPDATE');
		$admin->wait_for("SELECT wait_event_type = 'Lock' "
			  . "FROM pg_stat_activity WHERE pid = $other->{pid}");
	};
	my $gives_up = sub {
		$admin->query("SELECT pg_cancel_backend($other->{pid})");
		$other->answer eq '' and die 'it does not wait';
	};

	$other->query("SELECT dlock_acquire('looked at')");
	$looker->query("$looks; SELECT dlock_version(); BEGIN");
	$looker->query('SELECT FROM t FOR UPDATE');
	$waits_for_row->();
	my $second_look = Dlock::Debugger::stop(
		$looker->{pid}, ['dlock_graph_collect'], 'finish',
		"shell touch $first_look; while [ -e $first_look ]; do sleep 0.05; done",
		'tbreak dlock_graph_collect', 'continue', 'finish');
	$looker->start("SELECT dlock_acquire('looked at') > 0");
	poll('it has looked once', sub { -e $first_look });
	$gives_up->();
	$waits_for_row->();
	unlink $first_look;
	$second_look->();
	$gives_up->();
	$second_look->();
	ok(!$looker->answered, 'another wait each time: no deadlock');
	$other->query("SELECT dlock_release('looked at')");
	is($looker->answer, 't', 'another wait each time: it gets the lock');
	$looker->query('ROLLBACK');
	$_->quit foreach $looker, $other;
	is($admin->query('SELECT deadlocks FROM dlock_stats'),
		$deadlocks, 'another wait each time: no victim');
}

$admin->quit;
$node->stop;
done_testing();
