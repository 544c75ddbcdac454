# Heartbeats and expiry never wait for a lock on the tables, even if many
# leases are due at once, or a lease has many tickets.
#
# What would break it: a worker that waits for a lock on a table as long as
# other sessions may wait, that only writes once it was told to end, or ends
# leases then; that ends all due leases before it does anything else.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

my $node = new_server(
	'main',
	allows_streaming => 1,
	conf => q{
synchronous_commit = local
deadlock_timeout = 1h
autovacuum = off
});
my $admin = session($node);
my $client = session($node);
my $listener = session($node);

#
# A table is locked, while standbys count
#
{
	my $receiver = IPC::Run::start(
		[
			$node->installed_command('pg_receivewal'),
			'-d', $node->connstr('postgres') . ' application_name=receiver',
			'-D', PostgreSQL::Test::Utils::tempdir(), '--synchronous', '--no-loop'
		],
		'>', \my $out, '2>', \my $err);
	my ($ttl, $lost, $gap, $times);

	$admin->query("ALTER SYSTEM SET synchronous_standby_names = 'receiver'");
	$node->reload;
	$admin->wait_for(q{SELECT count(*) = 1 FROM pg_stat_replication
		WHERE sync_state = 'sync'});
	$client->query('SET synchronous_commit = on');

	# On a slow machine, this is repeated with more time.
	for ($ttl = ample(0.5);; $ttl *= 2)
	{
		my $lease = $client->query("SELECT dlock_lease_open('$ttl s')");
		my $start = time();
		my $sent = $start;

		die "no lease: $lease" unless $lease =~ /^\d+$/;
		$admin->query('BEGIN; LOCK TABLE dlock_queue_lease IN SHARE MODE');
		($lost, $gap, $times) = ('', 0, 0);
		while (time() < $start + 6 * $ttl)
		{
			my $before = time();

			$lost = $client->query("SELECT dlock_renew($lease)");
			last if $lost ne '0';
			$times++;
			$gap = time() - $sent if $gap < time() - $sent;
			$sent = $before;
			usleep(20_000);
		}
		$gap = time() - $sent if $lost ne '0';
		$admin->query('ROLLBACK');
		$client->query("SELECT dlock_lease_close($lease)");
		last if $lost eq '0' || $gap < $ttl / 4;
		note "a ttl of $ttl s is too short here: $lost, after $gap s";
	}
	is($lost, '0', "a table is locked: a lease of $ttl s lives on ($times)");

	# A worker that was told to end waits for the table for a second, longer
	# than the leases live without heartbeats.  A slow machine tries again.
	my ($kept, $ended) = ('0', 1);

	for (my $n = 0; $n < 20 && ($kept ne '1' || $ended); $n++)
	{
		my $lease = $client->query("SELECT dlock_lease_open('400ms', attach => true)");
		my $short = $client->query("SELECT dlock_lease_open('400ms')");
		my $ticket = $listener->query("SELECT dlock_ttl_acquire('written', '1h')");
		my $worker = worker($admin);

		$admin->query('BEGIN; LOCK TABLE dlock_queue IN SHARE MODE');
		$listener->query("SELECT dlock_release_ticket($ticket)");
		$listener->query("SELECT pg_terminate_backend($worker)");
		backends_gone($worker);
		$kept = $listener->query("SELECT count(*) FROM dlock_leases WHERE lease = $lease");
		$ended = slurp_file($node->logfile) =~ /\[$worker\] LOG:  lease $short .* has run out/;
		$admin->query('ROLLBACK');
		$client->query("SELECT dlock_lease_close($lease)");
	}
	is($kept, '1', 'a worker that is about to end keeps attached leases alive');
	ok(!$ended, 'and ends no others, because each end is more to write');

	$client->query('SET synchronous_commit = local');
	$admin->query('ALTER SYSTEM RESET synchronous_standby_names');
	$node->reload;
	$receiver->signal('TERM');
	$receiver->finish;
}

# A new worker needs no table to end due leases, either.  The row is removed
# later, and then the lock is handed over.
{
	my $keeper = session($node);
	my $lease = $keeper->query("SELECT dlock_lease_open('100ms', attach => true)");
	my $ticket = $client->query(
		"SELECT dlock_lease_enqueue('lock', $lease, 'channel')");
	my $next = session($node);
	my $worker;

	$listener->query('LISTEN channel');
	$next->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($next);
	$admin->query('BEGIN; LOCK TABLE dlock_queue, dlock_queue_lease');
	$worker = worker($admin);
	$admin->query("SELECT pg_terminate_backend($worker)");
	backends_gone($worker);
	isnt(worker($client), $worker, 'tables are locked: another worker starts');
	$keeper->quit;
	my @told;
	poll('expired',
		sub {
			push @told, $listener->announcements(0);
			grep { $_ eq announcement('expired', 'lock', $ticket) } @told;
		});
	pass('the new worker ends the due lease');
	ok(!$next->answered, 'the lock is not handed over before the row is removed');
	$admin->query('ROLLBACK');
	grows('the lock is handed over when the row is removed', $ticket, $next->answer);
	$next->quit;
}

# A ttl begins at the grant, also for a ticket whose grant waits only for the
# removal of a row.
{
	my $ttl = ample(0.5);
	my $ticket = $client->query("SELECT dlock_ttl_acquire('lock', '1h')");
	my $next = session($node);

	$admin->query('BEGIN; LOCK TABLE dlock_queue IN SHARE MODE');
	$client->query("SELECT dlock_release_ticket($ticket)");
	$next->start("SELECT dlock_ttl_acquire('lock', '$ttl s')");
	$admin->wait_for('SELECT count(*) = 1 FROM dlock_locks '
		  . "WHERE name = 'lock' AND NOT granted");
	$client->query("SELECT pg_sleep(2 * $ttl)");
	ok(!$next->answered, 'a table is locked: a ticket can wait longer than its ttl');
	$admin->query('ROLLBACK');
	grows('the ticket is granted when the row is removed', $ticket, $next->answer);
	is_now($admin, q{SELECT count(*) FROM dlock_locks WHERE name = 'lock'},
		'0', 'the ttl of the ticket runs from the grant');
	$next->quit;
}

#
# Many leases are due at once.  The worker stops at the first row that it
# removes.  No other process must lock its tables, as a VACUUM does to truncate
# them.
#
$admin->query("ALTER TABLE $_ SET (vacuum_truncate = off)")
  foreach 'dlock_queue', 'dlock_queue_lease';

# Ttls that begin at the end of a session end at about the same time.  The
# worker is held up when it ends the first lease, for longer than the time
# after which it must turn to its tables.
sub end_many
{
	my ($what) = @_;
	my $count = 1000;
	my $keeper = session($node);
	my $leases = $what eq 'leases' ? $count : 1;
	my ($stop, $last, @told);

	# The worker must not stop at the end of an earlier lease.
	$admin->wait_for('SELECT count(*) = 0 FROM '
		  . '(SELECT lease FROM dlock_queue UNION ALL SELECT lease FROM dlock_queue_lease) AS l');
	# The grants have no listener.
	$keeper->query('SET synchronous_commit = off; CREATE TEMP TABLE l AS '
		  . "SELECT dlock_lease_open('100ms', attach => true) AS lease "
		  . "FROM generate_series(1, $leases)");
	is( $keeper->query(
			q{SELECT count(dlock_lease_enqueue('lock ' || row_number, lease,
				'channel')) FROM (SELECT row_number() OVER (), lease
				FROM l, generate_series(1, } . $count / $leases . ')) AS l'),
		$count,
		"$what: many");
	# A sender without work exits, and the stopped worker could not start
	# another.
	my $awake = 0;
	my $keep_awake = sub {
		return $client->query(
			"SELECT dlock_enqueue('awake @{[ $awake++ ]}', 'channel')");
	};
	$stop = stop_at_last(worker($admin),
		'dlock_lease_be_over', 0.2, 'simple_heap_delete');
	$listener->announcements($count);
	$keep_awake->();
	$listener->announcements(1);
	$client->query("SELECT pg_terminate_backend($keeper->{pid})");
	backends_gone($keeper->{pid});
	$keep_awake->();
	$stop->();
	$keeper->quit;

	# No earlier announcement arrives after this one.
	$last = $client->query("SELECT dlock_enqueue('last', 'channel')");
	@told = ();
	poll('the last announcement',
		sub {
			push @told, $listener->announcements(0);
			grep { /"ticket":$last\b/ } @told;
		});
	my $ended = grep { /expired/ } @told;
	cmp_ok($ended, '>', 0, "$what: some are ended");
	cmp_ok($ended, '<', $count,
		"$what: and not all, when the worker comes to its tables");
	$stop->();
	my $rest = grep { /expired/ } $listener->announcements($count - $ended);
	is($ended + $rest, $count, "$what: all are in the end");
	$client->query('SELECT dlock_release_all()');
	return;
}

SKIP:
{
	skip 'no debugger that can be attached', 8 unless debugger_works($admin);
	end_many($_) foreach 'leases', 'tickets of one lease';
}
$_->quit foreach $client, $admin, $listener;
$node->stop;
done_testing();
