# The worker starts late, or two workers start, or the extension is gone, or no
# slot is free, or the database is dropped.  One worker stays and serves each
# waiter, or the waiter gets an error.  No worker stays without work.
#
# What would break it: a call that waits without limit for a worker; two active
# workers; a waiter that is not granted the lock because no worker could be
# started when the wait began; a worker that tries again and again to write to
# tables that are gone; a release that is lost with the tables.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node =
  new_server('main',
	conf => "max_worker_processes = 30\ndeadlock_timeout = '1h'\n");
my $admin = session($node);
my $client = session($node);
my $other = session($node);

#
# A worker first reads the settings of its database, which is blocked here.
#
$_->query('SELECT count(*) FROM dlock_locks') foreach $client, $other;
$admin->query('BEGIN; LOCK TABLE pg_db_role_setting IN ACCESS EXCLUSIVE MODE');
$client->start("SELECT dlock_lease_open('1h')");
like(
	$client->answer,
	qr/53400: could not start the worker.*DETAIL:  It was asked for several times.*HINT/s,
	'no worker starts: a call fails');
$client->start("SELECT dlock_ttl_acquire('lock', '1h')");
$other->start("SELECT dlock_ttl_acquire('lock 2', '1h')");
$admin->wait_for(q{SELECT count(*) = 2 FROM dlock_locks
	WHERE granted AND pid IS NULL});
$admin->query('ROLLBACK');
like($_->answer, qr/^\d+$/, 'a worker starts late: calls succeed')
  foreach $client, $other;
$admin->wait_for(q{SELECT count(*) = 1 FROM pg_stat_activity
	WHERE backend_type = 'dlock worker'});
pass('one of many workers stays');
my $worker = worker($admin);
is($client->query(q{SELECT dlock_ttl_acquire('lock 3', '1h') > 0}),
	't', 'and works');
is(worker($admin), $worker, 'the worker is the same');
is( $client->query(
		'SELECT count(dlock_release_ticket(ticket)) FROM dlock_locks'),
	'3',
	'all tickets are released');
no_worker($admin);

#
# The extension is dropped while the worker waits for its tables.
#
my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $held = $client->query("SELECT dlock_lease_acquire('held', $lease)");
my $next = session($node);
$next->start("SELECT dlock_acquire('held')");
$admin->until_waits($next);
$worker = worker($admin);
$admin->query('BEGIN; DROP EXTENSION dlock');
is($other->query("SELECT dlock_release_ticket($held)"),
	't', 'a release is not written yet');
$client->start("SELECT dlock_lease_acquire('lock', $lease)");
# The call fails after the worker has waited for a second.
poll('a call waits, or has failed',
	sub {
		$client->answered || $admin->query(
			"SELECT wait_event_type = 'Extension' FROM pg_stat_activity "
			  . "WHERE pid = $client->{pid}") eq 't';
	});
$admin->wait_for("SELECT wait_event_type = 'Lock' FROM pg_stat_activity "
	  . "WHERE pid = $worker");
$admin->query('COMMIT');
like($client->answer, qr/(42704|55P03): could not write to the tables|55L01/,
	'the extension is dropped: a call fails');
backends_gone($worker);
pass('the worker exits');
like($next->answer, qr/55L01: lock "held" is gone/,
	'no session waits for the released lock');
$next->quit;
$admin->query('CREATE EXTENSION dlock');

#
# The extension is gone when the worker starts for an earlier ticket.
#
$client->query("SELECT dlock_acquire('lock')");
my $ticket = $other->query("SELECT dlock_enqueue('lock', 'nobody')");
$admin->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
is($client->query('SELECT dlock_release_all()'),
	'1', 'a lock of an extension that is gone is released');
like($other->query("SELECT dlock_wait($ticket)"),
	qr/55L01: ticket $ticket is gone/, 'the lock is not handed over in the new extension');
no_worker($admin);
pass('no worker stays for the old extension');
$_->quit foreach $client, $other;

#
# The database is dropped before the worker has written the last release.
#
SKIP:
{
	skip 'no debugger that can be attached', 3 unless debugger_works($admin);
	$node->safe_psql('postgres', 'CREATE DATABASE short');
	$node->safe_psql('short', 'CREATE EXTENSION dlock');
	$client = session($node, 'short');
	$lease = $client->query("SELECT dlock_lease_open('1h')");
	my @tickets =
	  map { $client->query("SELECT dlock_lease_acquire('lock $_', $lease)") }
	  1 .. 3;
	stop_at_rows($client, 'DELETE');
	stop_worker(
		$client,
		sub {
			is($client->query("SELECT dlock_release_ticket($tickets[0])"),
				't', 'a release is being written');
		});
	is($client->query('SELECT count(*) FROM dlock_queue'),
		'3', 'the release is not written');
	$other = session($node);
	$other->start('DROP DATABASE short WITH (FORCE)');
	$admin->wait_for(q{SELECT count(*) = 1 FROM pg_locks
		WHERE classid = 'pg_database'::regclass AND granted
			AND mode = 'AccessExclusiveLock'});
	worker_is_lost($client);
	$client->quit;

	# DROP DATABASE waits for at most a few seconds.
	my $answer = $other->answer;
	poll('DROP DATABASE',
		sub { $node->psql('postgres', 'DROP DATABASE short WITH (FORCE)') == 0 })
	  if "$answer" ne '';
	is( $admin->query(
			q{SELECT count(*) FROM pg_database WHERE datname = 'short'}),
		'0',
		'the database is dropped');
	$other->quit;
}

# The next name space removes the rest.
$admin->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
like($admin->query("SELECT dlock_ttl_acquire('lock 1', '1h')"),
	qr/^\d+$/, 'other databases go on');
is($admin->query('SELECT count(*) FROM dlock_locks'), '1', 'with their own');
$admin->quit;
$node->stop;

#
# One slot for two databases
#
$node = new_server('one_slot',
	conf => "max_logical_replication_workers = 0\n");
$node->safe_psql('postgres', 'CREATE DATABASE a');
$node->safe_psql('a', 'CREATE EXTENSION dlock');
my $first =
  $node->safe_psql('postgres', "SELECT dlock_ttl_acquire('lock', '1h')");
my $second = $node->safe_psql('a', "SELECT dlock_ttl_acquire('lock', '1h')");
$node->append_conf('postgresql.conf', 'max_worker_processes = 1');
$node->restart;
# The ttl is short only from the first call on, so that the lease cannot expire
# before.
$node->safe_psql('a', "UPDATE dlock_queue SET ttl = '1s'");
$admin = session($node);
is($admin->query("SELECT dlock_check('lock', $first)"),
	't', 'the lease of one database');
worker($admin);

# Only the waiter itself can start the worker.
$client = session($node, 'a', q{options='-c deadlock_timeout=10ms'});
$client->start("SELECT dlock_acquire('lock')");
$admin->wait_for("SELECT wait_event = 'userlock' FROM pg_stat_activity "
	  . "WHERE pid = $client->{pid}");
ok(!$client->answered, 'a lease has the lock in the other database');
is($admin->query("SELECT dlock_release_ticket($first)"),
	't', 'the first database has no lease any more');
grows('a worker can start in the other database, and hands over',
	$second, $client->answer);
$_->quit foreach $admin, $client;
$node->stop;
done_testing();
