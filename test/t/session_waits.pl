# A wait for one of dlock's locks is shown wherever PostgreSQL shows a wait for
# its own locks.  CALL dlock_acquire_nosnapshot() has no snapshot while it
# waits, so that it blocks no other session.  Afterwards the session's own
# snapshot is unchanged, however the wait ends.
#
# What would break it: a snapshot that is left over, popped twice, or missing
# afterwards; a message or a title that outlives its wait; a wait for one of
# PostgreSQL's locks during the wait, which uses the same latch and timer.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main',
	conf => "deadlock_timeout = '1h'\nautovacuum = off\n");
my $admin = session($node);
my $holder = session($node);

$node->safe_psql(
	'postgres', q{
	CREATE TABLE t AS SELECT bigint '0' AS n;
	CREATE TABLE other AS SELECT 0 AS n;

	CREATE PROCEDURE in_procedure(name text, timeout interval = NULL)
	LANGUAGE plpgsql AS $$
	DECLARE
		fence bigint;
	BEGIN
		CALL dlock_acquire_nosnapshot(name, timeout, fence => fence);
		INSERT INTO t VALUES (fence);
	END $$;

	CREATE PROCEDURE in_nested(name text, timeout interval = NULL)
	LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO t VALUES (0);
		COMMIT;
		CALL in_procedure(name, timeout);
		COMMIT;
	END $$;

	-- A subtransaction makes the procedure atomic.
	CREATE PROCEDURE in_exception_block() LANGUAGE plpgsql AS $$
	BEGIN
		BEGIN
			INSERT INTO t VALUES (0);
			CALL in_procedure('lock');
		EXCEPTION WHEN active_sql_transaction THEN
			RAISE WARNING 'caught %, and there are % rows', SQLSTATE,
				(SELECT count(*) FROM t);
		END;
		INSERT INTO t VALUES (1);
		COMMIT;
		CALL in_procedure('lock');
	END $$;
});

#
# What other sessions see of a wait
#
sub title_becomes
{
	my ($session, $pattern) = @_;
	my $file = "/proc/$session->{pid}/cmdline";

	# Some systems do not show the title, and valgrind hides it.
	return 1 unless -r $file && slurp_file($file) =~ /^postgres: /;
	return poll("process title: $pattern",
		sub { slurp_file($file) =~ $pattern });
}

{
	my $waiter = session($node);
	my $offset = -s $node->logfile;

	$holder->query("SELECT dlock_acquire('lock')");
	$waiter->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($waiter);
	# The session is in the queue before it sleeps.
	is_now(
		$admin,
		'SELECT state, wait_event_type, wait_event FROM pg_stat_activity '
		  . "WHERE pid = $waiter->{pid}",
		'active|Lock|userlock',
		'wait event');
	ok(title_becomes($waiter, qr/SELECT waiting/), 'process title');
	$holder->query("SELECT dlock_release('lock')");
	$waiter->answer;
	ok(title_becomes($waiter, qr/idle(?!.*waiting)/),
		'process title afterwards');
	$waiter->quit;
	unlike(slurp_file($node->logfile, $offset),
		qr/still waiting/, 'no log message without log_lock_waits');
}

# Many sessions are granted the lock at once, and each is woken.
{
	my @readers = map { session($node) } 1 .. 20;

	$holder->query("SELECT dlock_acquire('lock')");
	$_->start("SELECT dlock_acquire('lock', shared => true) > 0")
	  foreach @readers;
	$admin->until_waits(@readers);
	# Each session sleeps by then.
	$admin->wait_for("SELECT count(*) = 20 FROM pg_stat_activity "
		  . "WHERE wait_event = 'userlock'");
	$holder->query("SELECT dlock_release('lock')");
	is(join('', map { $_->answer } @readers), 't' x 20,
		'twenty readers at one stroke');
	$_->quit foreach @readers;
}

# A waiter's ticket or lock is gone, and the waiter does not know it yet.
{
	my $waiter = session($node);

	$holder->query("SELECT dlock_acquire('lock')");
	$waiter->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($waiter);
	is_now($admin, "SELECT dlock_blocking_pids($waiter->{pid})",
		"{$holder->{pid}}", 'blocked by the holder');
	stop_process($waiter->{pid});
	$admin->query('SELECT dlock_force_release(ticket) FROM dlock_locks '
		  . "WHERE pid = $waiter->{pid}");
	is($admin->query("SELECT dlock_blocking_pids($waiter->{pid})"),
		'{}', 'no session blocks a waiter whose ticket is gone');
	$holder->query("SELECT dlock_release('lock')");
	is($admin->query("SELECT dlock_blocking_pids($waiter->{pid})"),
		'{}', 'no session blocks a waiter whose lock is gone');
	continue_process($waiter->{pid});
	like($waiter->answer, qr/55L01/, 'the waiter gets an error');
	$waiter->quit;
}

# A waiter that checks whether its extension exists may have to wait for the
# catalog.  During that wait, a grant or lock_timeout still wakes it.
{
	my $blocker = session($node);

	foreach my $timeout ('0', ample(3) . 's')
	{
		my ($first, $waiter) = map { session($node) } 1 .. 2;

		$first->query("SELECT dlock_acquire('looks')");
		$waiter->query("SET lock_timeout = '$timeout'");
		$waiter->start("SELECT dlock_acquire('looks') > 0");
		$admin->until_waits($waiter);
		stop_while($admin, $waiter->{pid},
			"SELECT wait_event = 'userlock' FROM pg_stat_activity "
			  . "WHERE pid = $waiter->{pid}");
		# From 18 on, extensions are cached, too.
		$holder->query($_)
		  foreach 'UPDATE pg_extension SET extname = extname',
		  "CREATE OR REPLACE FUNCTION changed() RETURNS integer LANGUAGE sql AS 'SELECT 1'";
		$blocker->query(
			'BEGIN; LOCK TABLE pg_extension IN ACCESS EXCLUSIVE MODE');
		continue_process($waiter->{pid});
		$admin->wait_for("SELECT wait_event IN ('relation', 'ClientRead') "
			  . "FROM pg_stat_activity WHERE pid = $waiter->{pid}");
		if ($timeout eq '0')
		{
			$first->quit;
			backends_gone($first->{pid});
		}
		$blocker->query('COMMIT');
		like(
			$waiter->answer,
			$timeout eq '0' ? qr/^t$/ : qr/ERROR:  55P03: canceling/,
			"a wait for the catalog, with lock_timeout = $timeout");
		$_->quit foreach $first, $waiter;
	}
	$blocker->quit;
}

# log_lock_waits
{
	my $logs =
	  "SET log_lock_waits = on; SET deadlock_timeout = '10ms'";
	my $reader = session($node);
	my @queue = map { session($node) } 1 .. 3;
	my @waits = (
		'exclusive hold of lock "lock"',
		'shared hold of lock "lock"',
		'2 permits of lock "slots"');
	my $offset = -s $node->logfile;

	$_->query("SELECT dlock_acquire('lock', shared => true)")
	  foreach $holder, $reader;
	$holder->query("SELECT dlock_acquire('slots', slots => 2)");

	$queue[0]->query($logs);
	$queue[0]->start("SELECT dlock_acquire('lock')");
	$node->wait_for_log(
		qr/process $queue[0]{pid} still waiting for $waits[0] after \d+\.\d{3} ms\n.*DETAIL:  Processes holding the lock: $holder->{pid}, $reader->{pid}\. Wait queue: $queue[0]{pid}\.\n.*STATEMENT:  SELECT dlock_acquire/,
		$offset);
	pass('log: still waiting, behind two holders');

	$reader->query("SELECT dlock_release('lock')");
	$queue[1]->query($logs);
	$queue[1]->start("SELECT dlock_acquire('lock', shared => true)");
	$node->wait_for_log(
		qr/process $queue[1]{pid} still waiting for $waits[1] after \d+\.\d{3} ms\n.*DETAIL:  Process holding the lock: $holder->{pid}\. Wait queue: $queue[0]{pid}, $queue[1]{pid}\.\n/,
		$offset);
	pass('log: still waiting, behind a waiter');

	$queue[2]->query($logs);
	$queue[2]->start("SELECT dlock_acquire('slots', slots => 2, permits => 2)");
	$node->wait_for_log(
		qr/process $queue[2]{pid} still waiting for $waits[2] after /,
		$offset);
	pass('log: still waiting, for permits');

	$holder->query('SELECT dlock_release_all()');
	foreach my $i (0 .. 2)
	{
		$queue[$i]->answer;
		$queue[$i]->quit;
		$node->wait_for_log(
			qr/process $queue[$i]{pid} acquired $waits[$i] after \d+\.\d{3} ms/,
			$offset);
		pass('log: acquired');
	}
	my $messages = () =
	  slurp_file($node->logfile, $offset) =~ /still waiting/g;
	is($messages, 3, 'log: one message for each wait');
	$reader->quit;
}

#
# Without a snapshot
#
my $call = "CALL dlock_acquire_nosnapshot('lock')";
my $do = 'DO $$ DECLARE fence bigint; BEGIN '
  . "CALL dlock_acquire_nosnapshot('lock', fence => fence); END \$\$";
my $xmin = 'SELECT backend_xmin IS NULL FROM pg_stat_activity WHERE pid = ';

# Check that the session works, and has neither snapshot nor lock.
sub is_usable
{
	my ($session, $test) = @_;

	$admin->wait_for("$xmin $session->{pid}");
	$session->query('ROLLBACK');
	is( $session->query(
			"SELECT dlock_is_held('lock'), dlock_release_all(), "
			  . '(SELECT n FROM other)'),
		'f|0|0',
		"$test: holds nothing, and is usable");
	return;
}

# Check that the session waits without a snapshot.
sub waits_without
{
	my ($test, @statements) = @_;
	my $waiter = session($node);

	$holder->query("SELECT dlock_acquire('lock')");
	$waiter->start(join '; ', @statements);
	$admin->until_waits($waiter);
	$admin->wait_for("$xmin $waiter->{pid}");
	pass("$test: waits without a snapshot");
	return $waiter;
}

sub released
{
	my ($waiter) = @_;

	$holder->query("SELECT dlock_release('lock')");
	return $waiter->answer;
}

# In contrast, the function's snapshot keeps VACUUM from removing rows.
sub dead_rows
{
	my $out;

	$node->safe_psql('postgres', 'UPDATE other SET n = n');
	$node->psql('postgres', 'VACUUM (VERBOSE) other', stderr => \$out);
	return $out =~ /(\d+) are dead but not yet removable/ ? $1 : $out;
}

{
	my $waiter = session($node);

	$holder->query("SELECT dlock_acquire('lock')");
	$waiter->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($waiter);
	is($admin->query("$xmin $waiter->{pid}"),
		'f', 'function: waits with a snapshot');
	is(dead_rows(), 1, 'function: VACUUM leaves a dead row');
	released($waiter);
	$waiter->quit;
}

# In each of these ways to call, the wait has no snapshot: VACUUM removes dead
# rows, CREATE INDEX CONCURRENTLY finishes, and later statements of the same
# transaction see rows committed during the wait.
my %calls = (
	'CALL' => [ $call, 'SELECT n FROM other' ],
	'CALL in a transaction block' => [
		'BEGIN', 'SELECT count(*) FROM t',
		$call, 'SELECT n FROM other', 'COMMIT'
	],
	'CALL after a savepoint' => [
		'BEGIN', 'SAVEPOINT s', $call, 'SELECT n FROM other',
		'ROLLBACK TO s', 'COMMIT'
	],
	'DO' => [ $do, 'SELECT n FROM other' ],
	'procedure' => [ "CALL in_procedure('lock')", 'SELECT n FROM other' ],
	'nested procedure' => [ "CALL in_nested('lock')", 'SELECT n FROM other' ]);

foreach my $test (sort keys %calls)
{
	my $waiter = waits_without($test, @{ $calls{$test} });
	my $answer;

	is(dead_rows(), 0, "$test: VACUUM removes dead rows");
	$holder->query('CREATE INDEX CONCURRENTLY i ON other (n); DROP INDEX i');
	$holder->query('UPDATE other SET n = 1');
	$answer = released($waiter);
	like($answer, qr/^1$/m, "$test: then sees the holder's write");
	unlike($answer, qr/ERROR|WARNING/, "$test: no error");
	is( $waiter->query("SELECT dlock_release('lock')"),
		't', "$test: holds the lock");
	$admin->query('UPDATE other SET n = 0');
	is_usable($waiter, $test);
	$waiter->quit;
}

# The fence is returned, with or without a wait.
{
	my $waiter = waits_without('fence', $call);
	my $fence = released($waiter);

	is($fence, $admin->query("SELECT dlock_fence('lock')"),
		'fence: the lock\'s fence is returned');
	is($waiter->query($call), $fence, 'fence: the same without a wait');
	$waiter->quit;
}

# In these calls, a snapshot must stay.
my %refused = (
	'REPEATABLE READ' => [ 'BEGIN ISOLATION LEVEL REPEATABLE READ', $call ],
	'SERIALIZABLE' => [ 'BEGIN ISOLATION LEVEL SERIALIZABLE', $call ],
	'SERIALIZABLE by default' =>
	  [ "SET default_transaction_isolation = 'serializable'", $call ],
	'open cursor' =>
	  [ 'BEGIN', 'DECLARE c CURSOR FOR SELECT * FROM t', $call ],
	'DO in a transaction block' => [ 'BEGIN', $do ],
	'procedure in a transaction block' => [ 'BEGIN', "CALL in_procedure('lock')" ],
	'exception block' => [
		'DO $$ BEGIN CALL in_procedure(\'lock\'); '
		  . 'EXCEPTION WHEN division_by_zero THEN END $$'
	],
	'loop over a query' => [
		'DO $$ DECLARE fence bigint; r record; BEGIN '
		  . 'FOR r IN SELECT * FROM t LOOP '
		  . "CALL dlock_acquire_nosnapshot('lock', fence => fence); "
		  . 'END LOOP; END $$'
	]);

$holder->query("SELECT dlock_acquire('lock')");
foreach my $test (sort keys %refused)
{
	my $waiter = session($node);

	like($waiter->query(join '; ', @{ $refused{$test} }),
		qr/ERROR:  25001/, "$test: refused");
	is_usable($waiter, $test);
	$waiter->quit;
}
$holder->query("SELECT dlock_release('lock')");

# Ways in which the wait fails.  Each sub gets the session.
my %failures = (
	'cancel' => [
		qr/ERROR:  57014/,
		sub { $admin->query("SELECT pg_cancel_backend($_[0]{pid})") }
	],
	'forced release' => [
		qr/ERROR:  55L01/,
		sub {
			$admin->query('SELECT dlock_force_release(ticket) '
				  . "FROM dlock_locks WHERE pid = $_[0]{pid}");
		}
	],
	'lock_timeout' => [ qr/ERROR:  55P03: canceling/ ],
	'timeout' => [ qr/ERROR:  55P03: could not acquire/ ]);

my %failing = (
	'CALL' => [$call],
	'CALL in a transaction block' => [ 'BEGIN', 'SELECT 1', $call ],
	'DO' => [$do],
	'procedure' => ["CALL in_nested('lock')"]);

foreach my $how (sort keys %failing)
{
	foreach my $failure (sort keys %failures)
	{
		my $test = "$how, $failure";
		my ($expected, $cause) = @{ $failures{$failure} };
		my $statements = join '; ', @{ $failing{$how} };
		my $waiter;

		if ($cause)
		{
			$waiter = waits_without($test, $statements);
			$cause->($waiter);
		}
		else
		{
			$waiter = session($node);
			$holder->query("SELECT dlock_acquire('lock')");
			$waiter->query("SET lock_timeout = '10ms'")
			  if $failure eq 'lock_timeout';
			$statements =~ s/'lock'/'lock', timeout => '10ms'/
			  if $failure eq 'timeout';
			$waiter->start($statements);
		}
		like($waiter->answer, $expected, "$test: error");
		$holder->query("SELECT dlock_release('lock')");
		is_usable($waiter, $test);
		$waiter->quit;
	}
}

# A procedure that catches the error continues, and can wait after the block.
{
	my $waiter =
	  waits_without('caught', 'TRUNCATE t', 'CALL in_exception_block()');

	like(released($waiter), qr/caught 25001, and there are 0 rows/,
		'caught: the handler runs');
	is($waiter->query("SELECT dlock_release('lock')"),
		't', 'caught: holds the lock then');
	is_usable($waiter, 'caught');
	$waiter->quit;
}

# Two sessions hand the lock back and forth, in one DO each.
{
	my @players = map { session($node) } 1 .. 2;

	$node->safe_psql('postgres', 'TRUNCATE t');
	$_->start(
		q{DO $$
		DECLARE
			fence bigint;
		BEGIN
			FOR i IN 1 .. 100 LOOP
				CALL dlock_acquire_nosnapshot('lock', fence => fence);
				INSERT INTO t SELECT 1 + count(*) FROM t;
				COMMIT;
				PERFORM dlock_release('lock');
			END LOOP;
		END $$}) foreach @players;
	foreach my $player (@players)
	{
		is($player->answer, '', 'to and fro: no error');
		is_usable($player, 'to and fro');
		$player->quit;
	}
	is( $admin->query('SELECT count(DISTINCT n), max(n) FROM t'),
		'200|200', 'to and fro: each holder sees all earlier writes');
}

is($admin->query('SELECT count(*) FROM dlock_locks'), '0',
	'nothing is left');
$_->quit foreach $admin, $holder;
$node->stop;
done_testing();
