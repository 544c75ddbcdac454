# A failed acquire of several locks keeps none, even if some were revoked
# during the call, or if a cancel comes while it releases the others.
#
# What would break it: a warning while locks are released, because sending a
# warning handles interrupts, and an error there would keep the other locks; a
# loss that is reported for another lock.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main');
my $admin = session($node);
my $many = 4000;

# A client that does not read these many warnings blocks the backend.  So the
# backend can stop only while it sends a warning.
foreach my $how ('acquire_all', 'xact_acquire_all')
{
	my $holder = session($node);
	my $client = session($node);
	my $psql = $client->{psql}{KIDS}[0]{PID};

	$holder->query("SELECT dlock_acquire('z')");
	$client->query('BEGIN');
	$client->start("SELECT dlock_$how('{a}' || array_agg('lock ' || n) || '{z}') "
		  . "FROM generate_series(1, $many) AS n");
	$admin->until_waits($client);
	kill('STOP', $psql) == 1 or die "no process $psql";
	is( $admin->query(
			'SELECT count(*) FROM (SELECT dlock_force_release(ticket) FROM '
			  . "dlock_locks WHERE name LIKE 'lock%' OFFSET 0) AS t"),
		$many,
		"$how: ended by force");
	# The wait fails, and the call must release the other locks.
	$admin->query('SELECT dlock_force_release(ticket) FROM dlock_locks '
		  . "WHERE pid = $client->{pid} AND NOT granted");
	$admin->wait_for("SELECT wait_event = 'ClientWrite' OR state LIKE 'idle%' "
		  . "FROM pg_stat_activity WHERE pid = $client->{pid}");
	$admin->query("SELECT pg_cancel_backend($client->{pid})");
	kill('CONT', $psql);
	like($client->answer, qr/ERROR:  55L01: lost the place in the queue/,
		"$how: the call has failed");
	is( $admin->query(
			"SELECT count(*) FROM dlock_locks WHERE pid = $client->{pid}"),
		'0',
		"$how: the call keeps nothing");
	$client->query('ROLLBACK');
	like($client->query("SELECT dlock_release('a')"),
		qr/WARNING:  55000/, "$how: a lost lock is not held");
	like($client->query("SELECT dlock_release('lock 1')"),
		qr/WARNING:  55000/, "$how: have to be released");
	$_->quit foreach $client, $holder;
}

# Earlier locks stay, even a lock that the session had lost.
{
	my $holder = session($node);
	my $client = session($node);
	my ($first, $ticket);

	$first = $client->query("SELECT dlock_acquire('b')");
	$admin->query("SELECT dlock_force_release($first)");
	$client->query("SELECT dlock_acquire('a')");
	$holder->query("SELECT dlock_acquire('c')");
	$client->start("SELECT dlock_acquire_all('{a, b, c}')");
	$admin->until_waits($client);
	$ticket = $admin->query('SELECT ticket FROM dlock_locks '
		  . "WHERE pid = $client->{pid} AND name = 'b'");
	$admin->query("SELECT dlock_force_release($ticket)");
	$admin->query("SELECT pg_cancel_backend($client->{pid})");
	like($client->answer, qr/ERROR:  57014/, 'canceled');
	is( $client->query('SELECT name, depth FROM dlock_locks WHERE '
			  . "pid = $client->{pid}"),
		'a|1',
		'earlier locks are held');
	like($client->query("SELECT dlock_release_ticket($ticket)"),
		qr/WARNING:  55000/, 'the lock of the failed call is not held');
	like($client->query("SELECT dlock_release('b')"),
		qr/WARNING:  55L01/, 'the earlier loss is reported at its release');
	$_->quit foreach $client, $holder;
}

$admin->quit;
$node->stop;
done_testing();
