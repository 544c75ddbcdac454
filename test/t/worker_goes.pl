# A worker stays while a client could notice its absence, and exits otherwise,
# even if leases are left.  So it does not occupy its database and its slot
# while leases live.  A session that waits for a lease starts a worker again.
# A call starts a worker, too, if a lease is due.
#
# What would break it: a worker that stays for a lease that no session uses; a
# worker that exits while a session waits or listens; a call that meets a due
# lease and does not let a worker end it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main',
	conf => "dlock.worker_idle_timeout = 0\ndeadlock_timeout = 1h\n");
my $admin = session($node);

$admin->query("CREATE DATABASE d$_") foreach 1 .. 8;
$node->safe_psql("d$_", 'CREATE EXTENSION dlock') foreach 1 .. 8;

sub workers
{
	my ($condition) = @_;

	return 'FROM pg_stat_activity '
	  . "WHERE backend_type = 'dlock worker' AND $condition";
}

sub no_worker_in
{
	my ($database) = @_;

	return $admin->wait_for(
		'SELECT count(*) = 0 ' . workers("datname = '$database'"));
}

#
# As many databases as there are slots, and one more
#
foreach my $n (1 .. 8)
{
	my $client = session($node, "d$n");
	my $answer;

	# Retry until a slot is free.
	poll("a lease in d$n",
		sub {
			$answer = $client->query("SELECT dlock_ttl_acquire('lock', '1h')");
			return $answer !~ /53400/;
		});
	like($answer, qr/^\d+$/, "a lease in database $n");
	$client->quit;
}
$admin->wait_for('SELECT count(*) = 0 ' . workers('true'));
pass('the workers have exited');
is($admin->query('DROP DATABASE d8'), '', 'a database can be dropped');

my $client = session($node, 'd7');
is($client->query("SELECT count(*) FROM dlock_queue"), '1', 'a row is left');
is($client->query("SELECT dlock_try_acquire('lock') IS NULL"),
	't', 'the lease holds without a worker');
is($admin->query('SELECT count(*) ' . workers('true')),
	'0', 'no worker was started');
is($client->query('SELECT dlock_renew(lease) FROM dlock_leases'),
	'1', 'a renewal needs no worker');
like(
	$client->query(
		'SELECT dlock_release_ticket(ticket) FROM dlock_locks'),
	qr/^t$/, 'released');
ok($client->wait_for('SELECT count(*) = 0 FROM dlock_queue'),
	'the next worker writes the release');
$client->quit;

#
# A lease is due when no session is there, in one database for each kind of
# call that can meet the lease
#
my %meet = (
	d1 => "SELECT dlock_try_acquire('due') IS NOT NULL",
	d2 => 'SELECT count(*) = 1 FROM dlock_leases',
	d3 => 'SELECT count(*) = 1 FROM dlock_locks',
	d4 => "SELECT dlock_is_held('another') IS NOT NULL");
my $ttl = ample(10);
no_worker_in('d7');
$admin->query('CREATE DATABASE d9');
$node->safe_psql('d9', 'CREATE EXTENSION dlock');
my %session = map { $_ => session($node, $_) } sort keys %meet, 'd5', 'd6', 'd7', 'd9';

foreach my $database (sort keys %session)
{
	like(
		$session{$database}->query(
			"SELECT dlock_ttl_acquire('due', '$ttl s', owner => 'o')"),
		qr/^\d+$/, "$database: a lease that will be due");
}

# A waiter starts a worker, and keeps it.
no_worker_in('d5');
$session{d5}->start("SELECT dlock_acquire('due')");
ok( $admin->wait_for(
		'SELECT count(*) = 1 ' . workers("datname = 'd5'")),
	'd5: a waiter starts a worker');
# A worker stays while an announcement may have a listener.
$session{d6}->query("SELECT dlock_ttl_enqueue('due', '1h')");
# A worker stays while a watch exists.
$session{d9}->query("SELECT dlock_watch('due')");
# Each call requests a worker, until a slot is free.
poll('a worker for the watcher',
	sub {
		$session{d9}->query("SELECT dlock_is_held('due')");
		$admin->query('SELECT count(*) ' . workers("datname = 'd9'")) eq '1';
	});
no_worker_in($_) foreach sort keys %meet;
pass('no worker is there for leases without a waiter');
is( $admin->query("SELECT string_agg(datname, ' ' ORDER BY datname) "
		  . workers('true')),
	'd5 d6 d9',
	'workers are there for a waiter, a listener and a watcher');

# A ticket of a session starts a worker, too, although it has no row.
no_worker_in('d7');
$session{d7}->query("LISTEN news; SELECT dlock_enqueue('due', 'news')");
ok( $admin->wait_for(
		'SELECT count(*) = 1 ' . workers("datname = 'd7'")),
	'd7: an enqueued ticket starts a worker');

like($session{d5}->answer, qr/^\d+$/, 'd5: granted when it is due');
like(join("\n", $session{d7}->announcements(1)),
	qr/"event":"granted","lock":"due"/, 'd7: told when it is due');
like(join("\n", $session{d6}->announcements(1)),
	qr/"event":"granted","lock":"due"/, 'd6: told when it is due');
like(join("\n", $session{d9}->announcements(2)),
	qr/"held","lock":"due".*\n.*"free","lock":"due"/, 'd9: the watcher is told');
foreach my $database (sort keys %meet)
{
	my $met = session($node, $database);

	# Only a worker removes the row.
	ok( poll(
			"$database: ends",
			sub {
				$met->query($meet{$database});
				$met->query(
					q{SELECT count(*) = 0 FROM dlock_queue WHERE name = 'due'}
				) eq 't';
			}),
		"$database: ended by the worker that comes");
	$met->quit;
}
$_->quit foreach values %session;
no_worker_in($_) foreach 'd5', 'd6', 'd7', 'd9';
pass('the worker exits when no client can be told');

#
# A session that begins to wait as the worker exits is not forgotten
#
$client = session($node, 'd1');
my $other = session($node, 'd1');
foreach my $round (1 .. 10)
{
	my $fence = $client->query("SELECT dlock_ttl_acquire('race', '6 s')");

	$other->start("SELECT dlock_acquire('race')");
	$admin->wait_for('SELECT count(*) = 1 ' . workers("datname = 'd1'"));
	$client->query("SELECT dlock_release_ticket($fence)");
	grows("round $round: handed on", $fence, $other->answer);
	$other->query('SELECT dlock_release_all()');
}
$_->quit foreach $client, $other;
no_worker_in('d1');

#
# A client returns for the announcement of its ticket, and has a worker from
# its first call on
#
$client = session($node, 'd1');
my $fence = $client->query("SELECT dlock_ttl_acquire('told', '30 s')");
my $queued = $client->query("SELECT dlock_ttl_enqueue('told', '1h', 'news')");
$client->quit;
no_worker_in('d1');
$client = session($node, 'd1');
$client->query('LISTEN news');
is($client->query("SELECT dlock_check('told', $queued)"), 'f', 'not yet');
ok( $admin->wait_for('SELECT count(*) = 1 ' . workers("datname = 'd1'")),
	'a returning client may be told, and so starts a worker');
$client->query("SELECT dlock_release_ticket($fence), dlock_release_ticket($queued)");
$client->quit;
no_worker_in('d1');

#
# A session that waits while no slot is free requests a worker again, and not
# only when it looks for deadlocks
#
$client = session($node);
$fence = $client->query("SELECT dlock_ttl_acquire('slot', '1h')");
no_worker_in('postgres');
my @others = map { session($node, "d$_") } 1 .. 7;
foreach my $other (@others)
{
	# A slot may not be free yet.
	poll('a lease that other sessions wait for',
		sub {
			$other->query("SELECT dlock_ttl_acquire('keeps', '1h')") !~ /53400/;
		});
}
$_->start("SELECT dlock_acquire('keeps')") foreach @others;
$admin->wait_for('SELECT count(*) = 7 ' . workers('true'));
my $waiter = session($node);
$waiter->start("SELECT dlock_acquire('slot')");
$admin->until_waits($waiter);
like($client->query("SELECT dlock_release_ticket($fence)"),
	qr/^t$/, 'released, with no slot for a worker');
ok(!$waiter->answered, 'not handed over');
$admin->query('SELECT pg_cancel_backend(pid) FROM pg_stat_activity '
	  . "WHERE datname = 'd1' AND wait_event = 'userlock'");
grows('granted when a slot is free', $fence, $waiter->answer);
like($others[0]->answer, qr/57014/, 'another session is canceled to free the slot');
$admin->query('SELECT pg_cancel_backend(pid) FROM pg_stat_activity '
	  . "WHERE wait_event = 'userlock'");
$_->quit foreach @others, $waiter, $client, $admin;
$node->stop;
done_testing();
