# A guarded transaction that loses its lock is canceled.  A later transaction,
# or a statement after a rollback to a savepoint before the guard, is not,
# whenever the session notices the loss.  A cancel by a user is never mistaken
# for a cancel by dlock, nor dropped with it.
#
# What would break it: a cancel that is still pending when the guard ends, and
# hits the next statement; a cancel that is dropped although a user has
# canceled, too; a loss that is noticed only if another process reports it,
# although a lease can expire without a worker; a log that looks as if a user
# had canceled; a statement that is not checked, because it follows an error,
# is only parsed, or comes with the COMMIT.
#
# A debugger chooses some moments.  The others are random: sessions guard and
# roll back all the time while another session revokes their locks.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main', conf => "deadlock_timeout = '1h'");
my $admin = session($node);
my $loss =
  qr/ERROR:  57014: canceling statement due to loss of lock "lock"/;
my $by_user = qr/ERROR:  57014: canceling statement due to user request/;

$node->safe_psql(
	'postgres', q{
CREATE TABLE journal (entry text);
CREATE FUNCTION guard_and_lose() RETURNS void LANGUAGE plpgsql
SET dlock.cancel_lost_guards = off AS $$
DECLARE
	fence	bigint := dlock_acquire('lock');
BEGIN
	PERFORM dlock_guard('lock', fence);
	PERFORM dlock_force_release(fence);
END $$;

-- Guard, work, and roll back.  Then work without a guard.  Repeat until guarded
-- work was canceled the given number of times.
CREATE PROCEDURE guard_again_and_again(name text, times integer,
	INOUT lost integer = 0, INOUT refused integer = 0, INOUT kept integer = 0)
LANGUAGE plpgsql AS $$
DECLARE
	n	integer;
BEGIN
	SET client_min_messages = error;
	WHILE lost < times LOOP
		BEGIN
			PERFORM dlock_guard(name, dlock_acquire(name));
			n := random() * 20000;
			WHILE n > 0 LOOP
				n := n - 1;
			END LOOP;
			IF random() < 0.5 THEN
				PERFORM 1;
			END IF;
			RAISE EXCEPTION USING ERRCODE = 'GOBAK';
		EXCEPTION
			WHEN query_canceled THEN
				lost := lost + 1;
			WHEN SQLSTATE '55L01' THEN
				refused := refused + 1;
			WHEN SQLSTATE 'GOBAK' THEN
				kept := kept + 1;
		END;
		n := random() * 2000;
		WHILE n > 0 LOOP
			n := n - 1;
		END LOOP;
		PERFORM dlock_release_all();
		IF random() < 0.5 THEN
			ROLLBACK;
		END IF;
		INSERT INTO journal VALUES (name);
		COMMIT;
	END LOOP;
END $$;

});

#
# A lease runs out while the worker is stopped.
#
{
	my ($keeper, $holder) = map { session($node) } 1, 2;
	my $lease =
	  $keeper->query("SELECT dlock_lease_open('100ms', attach => true)");
	my $fence = $holder->query("SELECT dlock_lease_acquire('lock', $lease)");

	$holder->query("BEGIN; SELECT dlock_guard('lock', $fence)");
	my $worker = freeze($admin);
	$holder->start('SELECT pg_sleep(3600)');
	$keeper->quit;
	like($holder->answer, $loss, 'expiry: canceled');
	is($holder->query('ROLLBACK; SELECT 1'), '1', 'expiry: the session goes on');
	thaw($worker);
	$holder->quit;
	like(
		slurp_file($node->logfile),
		qr/ERROR:  .*loss of lock "lock"\n.*DETAIL:  .*fence $fence, which is not held/,
		'the log says why');
}

#
# The loss is noticed before a statement is executed, after an error, and at
# the COMMIT.
#
{
	my ($holder, $other) = map { session($node) } 1, 2;
	my $fence;

	$admin->query(
		q{CREATE TABLE busy (i integer);
		CREATE TABLE slow (i integer);
		CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM pg_sleep(3600);
			RETURN NULL;
		END $$;
		CREATE CONSTRAINT TRIGGER sleep AFTER INSERT ON slow
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION sleep()}
	);
	$other->query('BEGIN; LOCK TABLE busy');
	foreach my $error ('no error', 'an error')
	{
		$fence = $holder->query("SELECT dlock_acquire('lock')");
		$holder->query("BEGIN; SELECT dlock_guard('lock', $fence); SAVEPOINT a");
		like($holder->query('SELECT 1 / 0'), qr/22012/, 'an error')
		  if $error eq 'an error';
		$holder->query('ROLLBACK TO a');
		$holder->start('SELECT * FROM busy');
		$admin->wait_for(
			"SELECT wait_event_type = 'Lock' FROM pg_stat_activity "
			  . "WHERE pid = $holder->{pid}");
		$admin->query("SELECT dlock_force_release($fence)");
		like($holder->answer, $loss, "before it is executed, after $error");
		$holder->query('ROLLBACK; SET client_min_messages = error; '
			  . 'SELECT dlock_release_all()');
	}
	$other->query('ROLLBACK');

	$fence = $holder->query("SELECT dlock_acquire('lock')");
	$holder->query("BEGIN; SELECT dlock_guard('lock', $fence); "
		  . 'INSERT INTO slow VALUES (1)');
	$holder->start('COMMIT');
	$admin->wait_for("SELECT wait_event = 'PgSleep' FROM pg_stat_activity "
		  . "WHERE pid = $holder->{pid}");
	$admin->query("SELECT dlock_force_release($fence)");
	like($holder->answer, $loss, 'in a deferred trigger');
	is($holder->query('SELECT 1'), '1', 'and the transaction is over');
	$_->quit foreach $holder, $other;
}

#
# At random moments: no statement after a guard is canceled in the first two
# sessions.  In the third session, each DO is canceled while it is guarded, is
# refused, or runs to its end.
#
{
	my @sessions = map { session($node) } 1 .. 3;
	my $thief = session($node);
	my (%outcomes, %next);

	$thief->start(
		q{DO $$BEGIN
			LOOP
				PERFORM dlock_force_release(ticket) FROM dlock_locks
				 WHERE random() < 0.3 AND name <> 'stop';
				PERFORM pg_sleep(random() / 500);
				EXIT WHEN dlock_fence('stop') IS NOT NULL;
			END LOOP;
		END $$});
	$sessions[0]->start("CALL guard_again_and_again('a', 20)");
	$sessions[1]->start("CALL guard_again_and_again('b', 20)");
	$sessions[2]->query('SET client_min_messages = error');
	foreach (1 .. 200)
	{
		my $answer = $sessions[2]->query(
			q{DO $$
			DECLARE
				n	integer := random() * 10000;
			BEGIN
				PERFORM dlock_guard('lock', dlock_acquire('lock'));
				WHILE n > 0 LOOP
					n := n - 1;
				END LOOP;
				ROLLBACK;
				WHILE n < 2000 LOOP
					n := n + 1;
				END LOOP;
				INSERT INTO journal VALUES ('lock');
			END $$});

		$outcomes{
			$answer =~ /$loss/ ? 'canceled' :
			  $answer =~ /ERROR:  55L01/ ? 'refused' : $answer || 'went on'
		}++;
		$next{ $sessions[2]->query('SELECT dlock_release_all() < 2') }++;
	}
	like($sessions[$_]->answer, qr/^\d+\|\d+\|\d+$/, 'nothing else was canceled')
	  foreach 0, 1;
	is(join(' ', keys %next), 't', 'no next statement was canceled');
	is(join(' ', grep { !/^(?:canceled|refused|went on)$/ } sort keys %outcomes),
		'', 'the DO commands had no other outcome');
	note join ', ', map { "$_: $outcomes{$_}" } sort keys %outcomes;
	$admin->query("SELECT dlock_acquire('stop')");
	is($thief->answer, '', 'their locks were revoked all the time');
	$admin->query("SELECT dlock_release('stop')");
	$_->quit foreach @sessions, $thief;
}

SKIP:
{
	skip 'no debugger that can be attached', 1 unless debugger_works($admin);

	# A session that guards with the same locks again and again checks each
	# lock once.
	my $again = session($node);

	$again->query('SET client_min_messages = error; SELECT dlock_release_all()');
	my $watched = commands_in($again, 'dlock_cancel_unwatch', 'print num_watched');
	$again->query(
		q{DO $$
		DECLARE
			a	bigint := dlock_acquire('a');
			b	bigint := dlock_acquire('b');
		BEGIN
			FOR i IN 1 .. 100 LOOP
				PERFORM dlock_guard('a', a);
				PERFORM dlock_guard('b', b);
				BEGIN
					PERFORM dlock_guard('a', a), dlock_xact_acquire('c');
				EXCEPTION WHEN OTHERS THEN NULL;
				END;
			END LOOP;
			ROLLBACK;
		END $$});
	like($watched->(), qr/^\$\d+ = 2$/m, 'each lock is watched once');
	is($again->query('SELECT dlock_release_all()'), '2', 'no other lock is held');
	$again->quit;

	# A guard ends in each of these ways.  The rest of the same statement is
	# canceled only if a user has canceled it.
	my %ways = (
		'a savepoint' => q{BEGIN
				PERFORM guard_and_lose();
				PERFORM 1 / 0;
			EXCEPTION WHEN division_by_zero OR query_canceled THEN
				NULL;
			END;},
		'a rollback' => q{PERFORM guard_and_lose();
			ROLLBACK;});
	my @look = ('print ((long (*)()) look_at_guards)()',
		'print {int} &QueryCancelPending');
	my $interrupt = 'print ((long (*)(int)) StatementCancelHandler)(2)';

	foreach my $way (sort keys %ways)
	{
		# a rollback of the whole transaction is never canceled
		my $noticed = $way eq 'a savepoint' ? 2 : 0;
		my %cancels = (
			'noticed' => [ '', $noticed, @look ],
			'noticed, and canceled then' =>
			  [ $by_user, $noticed, @look, $interrupt ],
			'canceled, and noticed then' => [ $by_user, 1, $interrupt, @look ]);

		foreach my $when (sort keys %cancels)
		{
			my ($expected, $pending, @commands) = @{ $cancels{$when} };
			my $session = session($node);
			my $test = "$way: $when";

			$session->query("SET client_min_messages = error; "
				  . 'SET dlock.cancel_lost_guards = off; '
				  . "SELECT dlock_release_all(); TRUNCATE journal");
			my $done = commands_in($session, 'dlock_cancel_unwatch',
				'set {char} &dlock_cancel_lost_guards = 1', @commands);
			$session->start(
				qq{DO \$\$BEGIN
				$ways{$way}
				FOR i IN 1 .. 10 LOOP
					NULL;
				END LOOP;
				INSERT INTO journal VALUES ('behind it');
			END\$\$});
			like($done->(), qr/^\$\d+ = $pending$/m,
				"$test, as the guard ends");
			my $answer = $session->answer;

			if ($expected)
			{
				like($answer, $expected, "$test: the rest is canceled");
			}
			else
			{
				is($answer, '', "$test: the rest goes on");
				is($admin->query('SELECT * FROM journal'),
					'behind it', "$test: the statement runs to its end");
			}
			$session->quit;
		}
	}
}

$admin->quit;
$node->stop;
done_testing();
