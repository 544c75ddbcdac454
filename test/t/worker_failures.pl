# The worker of a database can fail, stop and die at any moment.  What an
# answered lease call did is kept; a call without an answer leaves nothing; and
# session and transaction scope are not affected.
#
# What would break it: a mark in the journal that is lost with the worker, or
# by a shutdown; a ticket or a name that stays behind after the wait for its
# row was interrupted; a hand-over before the removal of a row is written; a
# worker that stays without work.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');
my $client = session($node);
my $admin = session($node);

#
# The worker ends, and the next one continues
#
my $lease = $client->query("SELECT dlock_lease_open('10min')");
my $fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
my $next = session($node);
like($fence, qr/^\d+$/, 'a lease holds');

# No session waits or calls dlock before the next worker is there, because both
# would start a worker.
my $first = worker($admin);
is($admin->query("SELECT pg_terminate_backend($first)"),
	't', 'the worker is terminated while idle');
backends_gone($first);
isnt(worker($admin), $first, 'another worker starts by itself');
$next->start("SELECT dlock_acquire('held')");
$admin->until_waits($next);
is($client->query("SELECT dlock_renew($lease)"), '1', 'the lease lives');
is($client->query("SELECT dlock_release_ticket($fence)"), 't', 'is released');
grows('the waiter is next', $fence, $next->answer);
$next->query('SELECT dlock_release_all()');

# Terminated with a full journal: a release, and calls that wait for their
# rows.  A stopped worker ends before it writes.
$fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
$next->start("SELECT dlock_acquire('held')");
$admin->until_waits($next);
$first = freeze($admin);
is($client->query("SELECT dlock_release_ticket($fence)"),
	't', 'a release needs no worker');
my @sessions = map { session($node) } 1 .. 4;
$sessions[0]->start("SELECT dlock_lease_open('10min')");
$sessions[1]->start("SELECT dlock_lease_acquire('full 1', $lease)");
$sessions[2]->start("SELECT dlock_lease_enqueue('full 2', $lease)");
$sessions[3]->start("SELECT dlock_ttl_acquire('full 3', '10min')");
$admin->wait_for(q{SELECT count(*) = 3 FROM dlock_locks
	WHERE name LIKE 'full %' AND granted AND pid IS NULL});
$admin->wait_for('SELECT count(*) = 3 FROM dlock_leases');
is($admin->query('SELECT count(*) FROM dlock_queue'),
	'1', 'the stopped worker has written nothing');
others_go_on($admin, 'worker stopped');
ok( !(grep { $_->answered } @sessions, $next),
	'calls that need a row wait, and so does the next ticket');
$admin->query("SELECT pg_terminate_backend($first)");
thaw($first);
backends_gone($first);
like(join(' ', map { $_->answer } @sessions),
	qr/^\d+ \d+ \d+ \d+$/, 'the next worker writes all rows');
like($next->answer, qr/^\d+$/, 'the next worker hands over');
$next->query('SELECT dlock_release_all()');
is( $admin->query(
		q{SELECT string_agg(name, ', ' ORDER BY name) FROM dlock_queue}),
	'full 1, full 2, full 3',
	'the table has all rows');

# The worker is only stopped, and continued.
$first = freeze($admin);
$sessions[0]->start("SELECT dlock_lease_acquire('stopped', $lease)");
$admin->wait_for(q{SELECT count(*) = 1 FROM dlock_locks
	WHERE name = 'stopped' AND pid IS NULL});
ok(!$sessions[0]->answered, 'a call waits while the worker is stopped');
thaw($first);
like($sessions[0]->answer, qr/^\d+$/, 'the call returns when the worker goes on');
is(worker($admin), $first, 'the worker is the same');

#
# The worker cannot write
#
my $tables = 'dlock_queue, dlock_queue_lease';
$fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
$next->start("SELECT dlock_acquire('held')");
$admin->until_waits($next);
$admin->query("BEGIN; LOCK TABLE $tables");
foreach my $call (
	"dlock_lease_open('10min', info => 'new')",
	"dlock_ttl_acquire('new', '10min')",
	"dlock_lease_acquire_all('{new, new 2}', $lease)")
{
	like(
		$client->query("SELECT $call"),
		qr/55P03: could not write to the tables of leases.*DETAIL.*HINT/s,
		"tables locked: $call fails");
}
is( $client->query(
		q{SELECT (SELECT count(*) FROM dlock_locks WHERE name LIKE 'new%'),
				 (SELECT count(*) FROM dlock_leases WHERE info = 'new')}),
	'0|0',
	'failed calls leave nothing');
ok(is_free($client, 'new') && is_free($client, 'new 2'),
	'the names are free');
others_go_on($client, 'tables locked');
is($client->query("SELECT dlock_release_ticket($fence)"),
	't', 'a release does not wait');
is($client->query("SELECT dlock_check('held', $fence)"), 'f', 'and counts');
is($client->query("SELECT dlock_try_acquire('held') IS NULL"),
	't', 'the lock is not free before the release is written');
ok(!$next->answered, 'the next in line does not get it, either');
$admin->query('ROLLBACK');
grows('the next gets it when the tables can be written again', $fence, $next->answer);
$next->query('SELECT dlock_release_all()');
is($admin->query(q{SELECT count(*) FROM dlock_queue WHERE name LIKE 'new%'}),
	'0', 'no row was written for failed calls');

# A call is canceled while the worker has its row in a batch.
foreach my $call ("dlock_lease_acquire('new', $lease)",
	"dlock_ttl_acquire('new', '10min')")
{
	my $worker = worker($admin);
	my $answer;

	# The worker gives up after a second, and then the call fails.  A cancel
	# after that second meets another attempt.
	do
	{
		$admin->query("BEGIN; LOCK TABLE $tables");
		$client->start("SELECT $call");
		$admin->wait_for("SELECT wait_event_type = 'Lock' "
			  . "FROM pg_stat_activity WHERE pid = $worker");
		$admin->query("SELECT pg_cancel_backend($client->{pid})");
		$answer = $client->answer;
		$admin->query('ROLLBACK');
	} while ($answer =~ /55P03/);
	like($answer, qr/57014/, "canceled while being written: $call");
	poll('the name is free', sub { is_free($admin, 'new') });
	$admin->wait_for(
		q{SELECT count(*) = 0 FROM dlock_queue WHERE name = 'new'});
}

#
# An interrupted wait for the row undoes the request
#
my %calls = (
	"dlock_lease_open('10min', info => 'new')" => 'open',
	"dlock_lease_open('10min', attach => true, info => 'new')" => 'open',
	"dlock_lease_acquire('new', $lease)" => 'acquire',
	"dlock_lease_enqueue('new', $lease)" => 'acquire',
	"dlock_ttl_acquire('new', '10min')" => 'acquire',
	"dlock_ttl_enqueue('new', '10min')" => 'acquire',
	"dlock_lease_acquire_all('{new, new 2}', $lease)" => 'acquire');
my %ways = (
	'cancel' => [ 'pg_cancel_backend', qr/57014: canceling statement due to user/ ],
	'terminate' => [ 'pg_terminate_backend', qr/57P01/ ],
	'statement_timeout' => [ undef, qr/57014: .*statement timeout/ ]);

my $worker = freeze($admin);
foreach my $way (sort keys %ways)
{
	my ($function, $error) = @{ $ways{$way} };

	foreach my $call (sort keys %calls)
	{
		my $session = session($node);

		$session->query("SET statement_timeout = '300ms'") unless $function;
		$session->start("SELECT $call");
		$admin->wait_for(
			$calls{$call} eq 'open'
			? q{SELECT count(*) = 1 FROM dlock_leases WHERE info = 'new'}
			: q{SELECT count(*) = 1 FROM dlock_locks
				 WHERE name = 'new' AND pid IS NULL}) if $function;
		$admin->query("SELECT $function($session->{pid})") if $function;
		like($session->answer, $error, "$way: $call");
		$session->quit;
		backends_gone($session->{pid});
		is( $admin->query(
				q{SELECT (SELECT count(*) FROM dlock_locks
						   WHERE name LIKE 'new%'),
						 (SELECT count(*) FROM dlock_leases
						   WHERE info = 'new' OR ttl = '10min' AND held = 0)}),
			'0|1',
			'... leaves nothing');
		ok( is_free($admin, 'new') && is_free($admin, 'new 2'),
			'... and the names are free');
	}
}
is($admin->query(q{SELECT count(*) FROM dlock_queue WHERE name LIKE 'new%'}),
	'0', 'no row was written');

# A release needs no worker.
is( $client->query(
		q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
		   WHERE name = 'full 1'}),
	't',
	'a ticket is released without the worker');
is($client->query("SELECT dlock_lease_close($lease)"),
	'2', 'a lease is closed without the worker');
is($client->query("SELECT dlock_renew($lease) IS NULL"), 't', 'it is gone');
is( $client->query(
		q{SELECT string_agg(name, ', ') FROM dlock_locks WHERE lease IS NOT NULL}
	),
	'full 3',
	'only the locks of another lease are held');
ok(!is_free($client, 'full 1'), 'the name stays closed until the worker comes');
thaw($worker);
poll('the name is free', sub { is_free($client, 'full 1') });
$_->quit foreach @sessions;

#
# The worker exits after the last lease
#
isnt($client->query(
		'SELECT count(dlock_lease_close(lease)) FROM dlock_leases'),
	'0', 'all leases are closed');
no_worker($admin);
is( $admin->query(
		'SELECT (SELECT count(*) FROM dlock_queue), '
		  . '(SELECT count(*) FROM dlock_queue_lease)'),
	'0|0',
	'the worker exits when no lease is left');

# A worker that fails during its start is noticed, too.
$admin->query("BEGIN; LOCK TABLE $tables");
like(
	$client->query("SELECT dlock_lease_open('10min')"),
	qr/55P03: could not write/,
	'a worker that cannot begin makes calls fail');
$admin->query('ROLLBACK');
is($client->query('SELECT count(*) FROM dlock_leases'),
	'0', 'these calls leave nothing');

# If new sessions are refused, existing sessions continue.
no_worker($admin);
$node->safe_psql('postgres', 'CREATE DATABASE closed');
$node->safe_psql('closed', 'CREATE EXTENSION dlock');
{
	my $session = session($node, 'closed');

	$admin->query('ALTER DATABASE closed ALLOW_CONNECTIONS false');
	like($session->query("SELECT dlock_ttl_acquire('lock', '10min')"),
		qr/^\d+$/, 'a database that is closed to new sessions has a worker');
	$session->quit;
}

#
# If a shutdown comes before the worker has written, the worker still writes,
# and a release is not undone.
#
$lease = $client->query("SELECT dlock_lease_open('10min')");
$fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
$_->quit foreach $admin, $next;
my $released = $client->query("SELECT dlock_ttl_acquire('released', '10min')");
$worker = freeze($client);
is($client->query("SELECT dlock_release_ticket($released)"),
	't', 'shutdown: released');
my $log = -s $node->logfile;
my $shutdown = IPC::Run::start(
	[ 'pg_ctl', '-D', $node->data_dir, '-m', 'fast', '-w', '-s', 'stop' ]);
$node->wait_for_log(qr/received fast shutdown request/, $log);
thaw($worker);
$shutdown->finish;
$client->vanish;
$node->_update_pid(0);
$node->start;
is( $node->safe_psql('postgres',
		"SELECT dlock_check('held', $fence), dlock_check('released', $released)"),
	't|f',
	'shutdown: still released after the restart');

#
# PostgreSQL's table of locks is full
#
$admin = session($node);
$admin->query("SELECT dlock_ttl_acquire('needs a worker', '10min')");
$first = worker($admin);
my $full = session($node);
like($full->query('SELECT pg_advisory_lock(n) FROM generate_series(1, 10000000) AS n'),
	qr/53200/, 'the table of locks is full');
my $filled = $admin->query('SELECT clock_timestamp()');
# By then, the worker has done twice what it does each second.  The view would
# lock shared tables.
$admin->wait_for(qq{SELECT bool_and(state_change > '$filled'::timestamptz + '2 s') IS NOT FALSE
	FROM pg_stat_get_activity($first)});
is($admin->query("SELECT count(*) FROM pg_stat_get_activity($first)"),
	'1', 'the worker goes on, with its heartbeats');
$_->quit foreach $full, $admin;

#
# The disk is full.  A limit on the size of files has the same effect, but
# spares the WAL if its files are small, and shared memory if it is not a file.
#
$node->stop;
$node = PostgreSQL::Test::Cluster->new('full');
$node->init(extra => ['--wal-segsize=1']);
$node->append_conf('postgresql.conf', "min_dynamic_shared_memory = '64MB'\n"
	  . "min_wal_size = 2MB\nlog_statement = none\ndlock.max_memory = 4MB\n");
system_or_bail('sh', '-c',
	'ulimit -f 2600 && exec "$@"', 'sh', 'pg_ctl', '-w', '-s',
	'-D', $node->data_dir, '-l', $node->logfile, '-o',
	'--cluster-name=full', 'start');
$node->_update_pid(1);
$node->safe_psql('postgres', 'CREATE EXTENSION dlock');
$client = session($node);
$lease = $client->query("SELECT dlock_lease_open('10min')");
my $fill = sub {
	my ($n) = @_;
	return $client->query(
		"SELECT count(dlock_lease_enqueue(format('lock %s', i), $lease, "
		  . "info => repeat('x', 1024))) "
		  . 'FROM generate_series(' . (100 * $n + 1) . ', '
		  . (100 * $n + 100) . ') AS i');
};
my $answer = '';
my $round = 0;
$answer = $fill->($round++) while $round < 40 && $answer !~ /ERROR/;
like($answer, qr/could not write to the tables of leases/,
	'disk full: a call fails');
my $rows = $client->query('SELECT count(*) FROM dlock_queue');
cmp_ok($rows, '>', 100, 'earlier calls did not fail');
is($client->query('SELECT count(*) FROM dlock_locks'),
	$rows, 'only the written tickets hold locks');
is($client->query("SELECT dlock_renew($lease)"), $rows, 'with its lease');
ok(is_free($client, "lock ${round}00"), 'the other names are free');
others_go_on($client, 'disk full');
is( $client->query(
		q{SELECT count(dlock_release_ticket(ticket)) FROM dlock_locks
		   WHERE name IN ('lock 1', 'lock 2')}),
	'2',
	'locks are released');
poll('handed on',
	sub { is_free($client, 'lock 1') && is_free($client, 'lock 2') });
pass('the lock is handed over');
$client->quit;
$node->restart;
is($node->safe_psql('postgres', 'SELECT count(*) FROM dlock_locks'),
	$rows - 2, 'acknowledged tickets are there after a restart');
is( $node->safe_psql('postgres',
		"SELECT dlock_lease_acquire('room', $lease) > 0"),
	't',
	'with room on the disk, calls succeed');

$node->stop;
done_testing();
