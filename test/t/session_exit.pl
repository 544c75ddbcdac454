# However a holder or a waiter ends, the next waiter gets the lock, and the
# ended session leaves nothing.
#
# What would break it: an exit that releases locks before it has rolled back
# the transaction; a way out of the wait loop that bypasses the queue; an error
# in the exit callback; a wait that sleeps through the postmaster's death.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main');
$node->safe_psql('postgres', 'CREATE TABLE t AS SELECT 0 AS n');
my $admin = session($node);

my $acquire = "SELECT dlock_acquire('lock') > 0";

# Start one more session that waits for the lock.
sub waiter
{
	my $waiter = session($node);

	$waiter->start($acquire);
	$admin->until_waits($waiter);
	return $waiter;
}

sub nothing_left
{
	my ($when) = @_;

	return $admin->wait_for('SELECT count(*) = 0 FROM dlock_locks')
	  && pass("$when: nothing is left");
}

#
# Ways out of a hold.  Each sub gets the session that holds the lock, and must
# end that hold.
#
my @holders = (
	'release' => sub { $_[0]->query("SELECT dlock_release('lock')") },
	'dlock_release_all' =>
	  sub { $_[0]->query('SELECT dlock_release_all()') },
	'dlock_force_release' => sub {
		$admin->query("SELECT dlock_force_release(dlock_fence('lock'))");
	},
	'DISCARD ALL' => sub { $_[0]->query('DISCARD ALL') },
	'session end' => sub { $_[0]->quit },
	'session end in a transaction' =>
	  sub { $_[0]->query('BEGIN; SELECT 1'); $_[0]->quit },
	'client gone' => sub { $_[0]->vanish },
	'client gone in a transaction' =>
	  sub { $_[0]->query('BEGIN; UPDATE t SET n = 0'); $_[0]->vanish },
	'terminate' =>
	  sub { $admin->query("SELECT pg_terminate_backend($_[0]{pid})") },
	'terminate in a transaction' => sub {
		$_[0]->query('BEGIN; UPDATE t SET n = 0');
		$admin->query("SELECT pg_terminate_backend($_[0]{pid})");
	},
	'terminate in a failed transaction' => sub {
		like($_[0]->query('BEGIN; UPDATE t SET n = 0; SELECT 1/0'),
			qr/22012/, 'failed');
		$admin->query("SELECT pg_terminate_backend($_[0]{pid})");
	},
	'terminate in a query' => sub {
		$_[0]->start('SELECT pg_sleep(1000)');
		$admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
			  . "WHERE pid = $_[0]{pid} AND wait_event = 'PgSleep'");
		$admin->query("SELECT pg_terminate_backend($_[0]{pid})");
	},
	'FATAL in a function' => sub {
		$_[0]->query(
			q{DO $$
			BEGIN
				PERFORM dlock_xact_acquire('lock');
				PERFORM dlock_acquire('another');
				UPDATE t SET n = 0;
				BEGIN
					PERFORM dlock_xact_acquire('a third');
					PERFORM pg_terminate_backend(pg_backend_pid());
					PERFORM pg_sleep(1000);
				EXCEPTION WHEN others THEN
					NULL;
				END;
			END $$});
	},
	'idle_session_timeout' =>
	  sub { $_[0]->query("SET idle_session_timeout = '1ms'") },
	'idle_in_transaction_session_timeout' => sub {
		$_[0]->query(
			"SET idle_in_transaction_session_timeout = '1ms'; BEGIN");
	});

while (my ($how, $end) = splice(@holders, 0, 2))
{
	my $holder = session($node);

	is($holder->query($acquire), 't', "$how: held");
	my $next = waiter();
	my $last = waiter();
	$end->($holder);
	is($next->answer, 't', "$how: the next has the lock");
	$admin->until_waits($last);
	$next->quit;
	is($last->answer, 't', "$how: then the last waiter has the lock");
	$last->quit;
	$holder->quit;
	nothing_left($how);
}

# Transaction scope, held beside session scope
foreach my $end ('COMMIT', 'ROLLBACK', 'ROLLBACK TO s')
{
	my $holder = session($node);
	my $next;

	$holder->query(
		"BEGIN; SAVEPOINT s; SELECT dlock_xact_acquire('lock')");
	$next = waiter();
	$holder->query($end);
	is($next->answer, 't', "$end: the next has the lock");
	$next->quit;
	$holder->quit;
	nothing_left($end);
}

# A canceled holder still holds.
{
	my $holder = session($node);
	my $next;

	$holder->query($acquire);
	$next = waiter();
	$holder->start('SELECT pg_sleep(1000)');
	$admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
		  . "WHERE pid = $holder->{pid} AND wait_event = 'PgSleep'");
	$admin->query("SELECT pg_cancel_backend($holder->{pid})");
	like($holder->answer, qr/57014/, 'cancelled holder: its query failed');
	is($holder->query("SELECT dlock_is_held('lock')"),
		't', 'cancelled holder: still holds');
	$admin->until_waits($next);
	$holder->quit;
	is($next->answer, 't', 'cancelled holder: the next has the lock after the release');
	$next->quit;
	nothing_left('cancelled holder');
}

#
# Ways out of a wait, at the head of the queue and in the middle.  Each sub
# gets the session that waits.
#
my @waiters = (
	'cancel' => sub {
		$admin->query("SELECT pg_cancel_backend($_[0]{pid})");
		like($_[0]->answer, qr/57014/, 'cancel: error');
	},
	'terminate' => sub {
		$admin->query("SELECT pg_terminate_backend($_[0]{pid})");
		like($_[0]->answer, qr/57P01/, 'terminate: error');
	},
	'dlock_force_release' => sub {
		$admin->query('SELECT dlock_force_release(ticket) FROM dlock_locks '
			  . "WHERE pid = $_[0]{pid}");
		like($_[0]->answer, qr/55L01/, 'dlock_force_release: error');
	},
	'client gone' => sub { $_[0]->vanish });

while (my ($how, $end) = splice(@waiters, 0, 2))
{
	foreach my $place (0, 1)
	{
		my $holder = session($node);
		my @queue;

		$holder->query($acquire);
		foreach (0 .. 2)
		{
			my $waiter = session($node);

			$waiter->query("SET client_connection_check_interval = '10ms'");
			$waiter->query('BEGIN; UPDATE t SET n = 0') if $_ == $place;
			$waiter->start($acquire);
			$admin->until_waits($waiter);
			push @queue, $waiter;
		}
		my ($gone) = splice(@queue, $place, 1);
		my $where = "$how, place " . ($place + 1);

		$end->($gone);
		$admin->wait_for(
			"SELECT string_agg(pid::text, ' ' ORDER BY position) = "
			  . "'$queue[0]{pid} $queue[1]{pid}' "
			  . 'FROM dlock_locks WHERE NOT granted');
		pass("$where: has left the queue");
		$gone->quit unless $how eq 'client gone';
		$holder->quit;
		is($queue[0]->answer, 't', "$where: the next has the lock");
		$queue[0]->quit;
		is($queue[1]->answer, 't', "$where: then the last waiter has the lock");
		$queue[1]->quit;
		nothing_left($where);
	}
}

# The whole rollback precedes the release of locks, with any number of
# savepoints, even if each savepoint has pending actions of a call.
{
	my $holder = session($node);
	my $gone = session($node);
	my $next = session($node);
	my ($lease, $other) =
	  map { $admin->query("SELECT dlock_lease_open('1h')") } 1 .. 2;
	my $used = 'SELECT memory_used FROM dlock_stats';
	my $before;

	$holder->query("SELECT dlock_lease_acquire('lock', $lease)");
	$gone->query("SELECT dlock_acquire('rows')");
	$before = $admin->query($used);
	$gone->query('BEGIN; UPDATE t SET n = 0; '
		  . q{SELECT count(dlock_set_slots('slots ' || i, 3))
			FROM generate_series(1, 100) AS i; }
		  . join '; ', map { "SAVEPOINT s$_" } 1 .. 30);
	$gone->start("SELECT dlock_lease_acquire('lock', $other)");
	$admin->until_waits($gone);
	$next->start(q{DO $$
		BEGIN
			PERFORM dlock_acquire('rows');
			PERFORM FROM t FOR UPDATE NOWAIT;
		END $$});
	$admin->until_waits($next);
	$admin->query("SELECT pg_terminate_backend($gone->{pid})");
	is($next->answer, '', 'savepoints: the next meets no row lock');
	$next->quit;
	# A session has memory until its process is gone.
	backends_gone($gone->{pid}, $next->{pid});
	cmp_ok($admin->query($used), '<=', $before, 'savepoints: no memory stays');
	$admin->query("SELECT dlock_lease_close($_)") foreach $lease, $other;
	$holder->quit;
	nothing_left('savepoints');
}

# A request that was refused leaves no text behind when its session ends.
{
	my $holder = session($node);
	my @gone = map { session($node) } 1 .. 20;
	my $used = 'SELECT memory_used FROM dlock_stats';
	my $before;

	$holder->query("SELECT dlock_acquire('lock')");
	$before = $admin->query($used);
	foreach my $session (@gone)
	{
		is($session->query(
				q{SELECT dlock_try_acquire('lock', info => repeat('x', 1000)) IS NULL}),
			't', 'busy');
		$session->quit;
	}
	backends_gone(map { $_->{pid} } @gone);
	cmp_ok($admin->query($used), '<', $before + 10000, 'refused: no memory stays');
	$holder->quit;
	nothing_left('refused');
}

# Waits also end by timeouts.
{
	my $holder = session($node);
	my %timeouts = (
		"SET lock_timeout = '10ms'; $acquire" => qr/55P03: canceling/,
		"SET statement_timeout = '10ms'; $acquire" => qr/57014/,
		"SELECT dlock_acquire('lock', '10ms')" => qr/55P03: could not/,
		"SELECT dlock_try_acquire('lock', '10ms') IS NULL" => qr/^t$/,
		'BEGIN; SAVEPOINT s; '
		  . "SELECT dlock_xact_acquire('lock', '10ms'); ROLLBACK TO s" =>
		  qr/55P03: could not/);

	$holder->query($acquire);
	foreach my $sql (sort keys %timeouts)
	{
		my $waiter = session($node);

		like($waiter->query($sql), $timeouts{$sql}, $sql);
		is($admin->query('SELECT count(*) FROM dlock_locks'),
			'1', 'has left the queue');
		$waiter->quit;
	}
	$holder->quit;
	nothing_left('timeouts');
}

# The holder and the head of the queue end at once.
foreach my $round (1 .. 10)
{
	my $holder = session($node);
	my @queue;

	$holder->query($acquire);
	push @queue, waiter() foreach 1 .. 3;
	$admin->query("SELECT pg_terminate_backend(pid) FROM unnest(ARRAY["
		  . "$holder->{pid}, $queue[0]{pid}, $queue[1]{pid}]) AS pid");
	is($queue[2]->answer, 't', "three at one stroke, round $round");
	$_->quit foreach $holder, @queue;
}
nothing_left('three at one stroke');

# The next holder never meets the last holder's row lock or writes.
my $no_waiting = q{DO $$
	BEGIN
		PERFORM dlock_acquire('lock');
		PERFORM FROM t FOR UPDATE NOWAIT;
		UPDATE t SET n = n + 1;
	END $$};
my $met = 0;
foreach my $round (1 .. 50)
{
	my $scope = $round % 2 ? '' : 'xact_';
	my $holder = session($node);
	my $next = session($node);

	$holder->query(
		"BEGIN; SELECT dlock_${scope}acquire('lock'); UPDATE t SET n = -1");
	$next->start($no_waiting);
	$admin->until_waits($next);
	$admin->query("SELECT pg_terminate_backend($holder->{pid})");
	my $answer = $next->answer;
	if ($answer ne '')
	{
		diag($answer);
		$met++;
	}
	$_->quit foreach $holder, $next;
}
is($met, 0, 'no row lock of a dead holder was met in 50 rounds');
is($admin->query('SELECT n FROM t'), '50', 'and none of its writes');
nothing_left('row locks');

# Nor does it meet those of a holder that ends its transaction normally.
$met = 0;
foreach my $round (1 .. 50)
{
	my $holder = session($node);
	my $next = session($node);

	$holder->query(
		"BEGIN; SELECT dlock_xact_acquire('lock'); UPDATE t SET n = n + 1");
	$next->start($no_waiting);
	$admin->until_waits($next);
	$holder->query('COMMIT');
	$met++ if $next->answer ne '';
	$_->quit foreach $holder, $next;
}
is($met, 0, 'no row lock of an ended transaction was met in 50 rounds');
is($admin->query('SELECT n FROM t'), '150', 'and all of its writes');
nothing_left('transactions');

#
# Each way to stop the server, with a holder and two waiters
#
sub holder_and_waiters
{
	my $holder = session($node);

	$holder->query($acquire);
	return ($holder, waiter(), waiter());
}

sub works_again
{
	my ($how, @sessions) = @_;

	$_->quit foreach @sessions, $admin;
	start_again($node);
	$admin = session($node);
	nothing_left($how);
	is($admin->query("SELECT dlock_try_acquire('lock') IS NOT NULL"),
		't', "$how: can be locked again");
	$admin->query("SELECT dlock_release('lock')");
}

# A smart shutdown waits for the sessions, which wait for each other.
{
	my @sessions = holder_and_waiters();

	$node->command_ok(
		[ 'pg_ctl', '-D', $node->data_dir, '-m', 'smart', '-W', 'stop' ],
		'smart shutdown');
	poll('smart shutdown has begun', sub { !answers($node) });
	$sessions[0]->quit;
	is($sessions[1]->answer, 't', 'smart shutdown: the next has the lock');
	$sessions[1]->query("SELECT dlock_release('lock')");
	is($sessions[2]->answer, 't', 'smart shutdown: then the last waiter has the lock');
	$_->quit foreach @sessions, $admin;
	poll('smart shutdown has ended',
		sub { !-e $node->data_dir . '/postmaster.pid' });
	$node->_update_pid(0);
	works_again('smart shutdown', @sessions);
}

foreach my $mode ('fast', 'immediate')
{
	my @sessions = holder_and_waiters();

	$node->stop($mode);
	like(
		$sessions[1]->answer,
		$mode eq 'fast' ? qr/57P01/ : qr/57P02|closed the connection/,
		"$mode shutdown: the wait ends");
	works_again("$mode shutdown", @sessions);
}

{
	my @sessions = holder_and_waiters();

	$node->kill9;
	backends_gone(map { $_->{pid} } @sessions);
	pass('postmaster death: holder and waiters exit');
	works_again('postmaster death', @sessions);
}

$admin->quit;
done_testing();
