# The worker of a database can fail, stop and die at any moment, and settings
# that were made for others do not concern it.  What a lease call was answered
# for is kept; a call that could not be answered has left nothing behind; and
# session and transaction scope go on without a worker.
#
# What would break it: a mark in the journal that is lost with the worker, or
# by a shutdown; a
# call that waits for a worker that cannot come; a ticket, or a name, that
# stays behind where the wait for its row was cut short; a hand-over before
# the removal of a row is written; a worker that takes on a database's or a
# role's settings, that stays when nothing is left to do, or that looks for
# its tables where they were.

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

# Session and transaction scope, on a name of their own
sub others_go_on
{
	my ($session, $what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is(
		$session->query(
			"SELECT dlock_acquire('other') > 0, dlock_release('other'), "
			  . "dlock_xact_acquire('other') > 0"),
		't|t|t',
		"$what: session and transaction scope go on");
}

# Is the name free, so that session scope gets it at once?
sub is_free
{
	my ($session, $name) = @_;

	return $session->query("SELECT dlock_try_acquire('$name') IS NOT NULL "
		  . "AND dlock_release('$name')") eq 't';
}

#
# The worker ends, and the next one goes on
#
my $lease = $client->query("SELECT dlock_lease_open('10min')");
my $fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
my $next = session($node);
like($fence, qr/^\d+$/, 'a lease holds');

# Nobody waits, and nobody calls dlock before the next worker is there, as
# either would ask for one.
my $first = worker($admin);
is($admin->query("SELECT pg_terminate_backend($first)"),
	't', 'the worker is terminated while idle');
backends_gone($first);
isnt(worker($admin), $first, 'another worker comes by itself');
$next->start("SELECT dlock_acquire('held')");
$admin->until_waits($next);
is($client->query("SELECT dlock_renew($lease)"), '1', 'the lease lives');
is($client->query("SELECT dlock_release_ticket($fence)"), 't', 'is released');
grows('and the waiter is next', $fence, $next->answer);
$next->query('SELECT dlock_release_all()');

# Terminated with a full journal: a release, and calls that wait to be written.
# A stopped worker ends before it writes.
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
	'1', 'nothing was written meanwhile');
others_go_on($admin, 'worker stopped');
ok( !(grep { $_->answered } @sessions, $next),
	'who needs a row waits, and so does who is next');
$admin->query("SELECT pg_terminate_backend($first)");
thaw($first);
backends_gone($first);
like(join(' ', map { $_->answer } @sessions),
	qr/^\d+ \d+ \d+ \d+$/, 'the next worker writes all of it');
like($next->answer, qr/^\d+$/, 'and hands on');
$next->query('SELECT dlock_release_all()');
is( $admin->query(
		q{SELECT string_agg(name, ', ' ORDER BY name) FROM dlock_queue}),
	'full 1, full 2, full 3',
	'as the table says');

# Stopped, and nothing else
$first = freeze($admin);
$sessions[0]->start("SELECT dlock_lease_acquire('stopped', $lease)");
$admin->wait_for(q{SELECT count(*) = 1 FROM dlock_locks
	WHERE name = 'stopped' AND pid IS NULL});
ok(!$sessions[0]->answered, 'a call waits while the worker is stopped');
thaw($first);
like($sessions[0]->answer, qr/^\d+$/, 'and is answered when it goes on');
is(worker($admin), $first, 'it is the same worker');

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
	'and nothing is left of them');
ok(is_free($client, 'new') && is_free($client, 'new 2'),
	'the names are free');
others_go_on($client, 'tables locked');
is($client->query("SELECT dlock_release_ticket($fence)"),
	't', 'a release does not wait');
is($client->query("SELECT dlock_check('held', $fence)"), 'f', 'and counts');
is($client->query("SELECT dlock_try_acquire('held') IS NULL"),
	't', 'but the lock is not handed on before that is written');
ok(!$next->answered, 'not to the next in line either');
$admin->query('ROLLBACK');
grows('it is when the tables can be written again', $fence, $next->answer);
$next->query('SELECT dlock_release_all()');
is($admin->query(q{SELECT count(*) FROM dlock_queue WHERE name LIKE 'new%'}),
	'0', 'nothing was written of what failed');

# Taken back in the middle of being written: the worker has it in its hands.
foreach my $call ("dlock_lease_acquire('new', $lease)",
	"dlock_ttl_acquire('new', '10min')")
{
	my $worker = worker($admin);
	my $answer;

	# The worker gives up after a second, and the call fails then.  Where the
	# cancel comes later than that, it is for another try.
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
# A wait for the row that is cut short takes back what was asked for
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
			'... and the names free');
	}
}
is($admin->query(q{SELECT count(*) FROM dlock_queue WHERE name LIKE 'new%'}),
	'0', 'no row was written');

# Who gives back needs no worker.
is( $client->query(
		q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
		   WHERE name = 'full 1'}),
	't',
	'a ticket is released without the worker');
is($client->query("SELECT dlock_lease_close($lease)"),
	'2', 'and a lease closed');
is($client->query("SELECT dlock_renew($lease) IS NULL"), 't', 'it is gone');
is( $client->query(
		q{SELECT string_agg(name, ', ') FROM dlock_locks WHERE lease IS NOT NULL}
	),
	'full 3',
	'nothing but what another lease has is held');
ok(!is_free($client, 'full 1'), 'the name stays closed until the worker comes');
thaw($worker);
poll('the name is free', sub { is_free($client, 'full 1') });
$_->quit foreach @sessions;

#
# The worker goes with the last lease
#
isnt($client->query(
		'SELECT count(dlock_lease_close(lease)) FROM dlock_leases'),
	'0', 'all leases are closed');
no_worker($admin);
is( $admin->query(
		'SELECT (SELECT count(*) FROM dlock_queue), '
		  . '(SELECT count(*) FROM dlock_queue_lease)'),
	'0|0',
	'the worker goes when no lease is left');

# One that fails before it has begun is noticed, too.
$admin->query("BEGIN; LOCK TABLE $tables");
like(
	$client->query("SELECT dlock_lease_open('10min')"),
	qr/55P03: could not write/,
	'a worker that cannot begin makes calls fail');
$admin->query('ROLLBACK');
is($client->query('SELECT count(*) FROM dlock_leases'),
	'0', 'with nothing left');

# New sessions may be refused, but those that there are go on.
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
# Settings of the database and of the role
#
my $superuser = $admin->query('SELECT rolname FROM pg_roles WHERE oid = 10');
$admin->query(q{CREATE ROLE owner; CREATE SCHEMA evil;
	GRANT USAGE ON SCHEMA public TO owner});
foreach my $setting (
	'default_transaction_read_only = on',
	'default_transaction_isolation = serializable',
	'default_transaction_deferrable = on',
	'search_path = evil',
	'synchronous_commit = remote_apply',
	'lock_timeout = 1',
	'statement_timeout = 1',
	'row_security = on',
	'session_replication_role = replica',
	'vacuum_cost_delay = 100',
	'enable_indexscan = off')
{
	$admin->query("ALTER $_ SET $setting")
	  foreach 'DATABASE postgres', "ROLE $superuser",
	  "ROLE $superuser IN DATABASE postgres";
}

# a standby that does not exist, to be waited for; the tables are another
# role's, which their policies let see nothing
$admin->query('SET synchronous_commit = local');
$admin->query('ALTER TABLE dlock_queue OWNER TO owner;'
	  . 'ALTER TABLE dlock_queue_lease OWNER TO owner;'
	  . 'ALTER TABLE dlock_queue ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;'
	  . 'ALTER TABLE dlock_queue_lease ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;'
	  . q{ALTER SYSTEM SET synchronous_standby_names = 'nobody'});
$node->reload;
$admin->wait_for(q{SELECT setting = 'nobody' FROM pg_settings
	WHERE name = 'synchronous_standby_names'});
$client->query('SET synchronous_commit = local');
$lease = $client->query("SELECT dlock_lease_open('10min')");
like($lease, qr/^\d+$/, 'a worker with all these settings opens leases');
grows(
	'grants',
	$client->query("SELECT dlock_lease_acquire('a', $lease)"),
	$client->query("SELECT dlock_ttl_acquire('b', '1s')"),
	$client->query("SELECT dlock_lease_enqueue('b', $lease)"));
$client->wait_for(
	"SELECT count(*) = 2 FROM dlock_queue WHERE granted AND lease = $lease");
pass('expires and hands on');
is($client->query("SELECT dlock_lease_close($lease)"), '2', 'closes');
$client->wait_for('SELECT count(*) = 0 FROM dlock_queue');
pass('and removes');

# the same for the load at a start
$lease = $client->query("SELECT dlock_lease_open('10min')");
$fence = $client->query("SELECT dlock_lease_acquire('a', $lease)");
$_->quit foreach $client, $admin, $next;
$node->restart;
my $free = '-c statement_timeout=0 -c lock_timeout=0 -c search_path=public '
  . '-c synchronous_commit=local';
$client = session($node, 'postgres', "options='$free'");
$admin = session($node, 'postgres',
	"options='$free -c default_transaction_read_only=off'");
is($client->query("SELECT dlock_check('a', $fence)"),
	't', 'a session with all these settings loads the tables');
is($client->query("SELECT dlock_lease_close($lease)"), '1', 'and closes');
$admin->query("ALTER $_ RESET ALL")
  foreach 'DATABASE postgres', "ROLE $superuser",
  "ROLE $superuser IN DATABASE postgres";
$admin->query("ALTER TABLE $_ OWNER TO \"$superuser\"; "
	  . "ALTER TABLE $_ DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY")
  foreach 'dlock_queue', 'dlock_queue_lease';
$admin->query('ALTER SYSTEM RESET synchronous_standby_names');
$node->reload;
no_worker($admin);
$_->quit foreach $client, $admin;
$client = session($node);
$admin = session($node);

#
# The extension goes, comes back, and moves
#
$lease = $client->query("SELECT dlock_lease_open('10min')");
$fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
$admin->query('BEGIN; DROP EXTENSION dlock; ROLLBACK');
is($client->query("SELECT dlock_check('held', $fence), dlock_renew($lease)"),
	't|1', 'a DROP EXTENSION that is rolled back changes nothing');
like($client->query("SELECT dlock_lease_acquire('more', $lease)"),
	qr/^\d+$/, 'the worker goes on');

$admin->query('CREATE SCHEMA elsewhere; '
	  . 'ALTER EXTENSION dlock SET SCHEMA elsewhere');
$client->query('SET search_path = elsewhere');
is($client->query("SELECT dlock_check('held', $fence), dlock_renew($lease)"),
	't|2', 'leases stay where the extension moves');
like($client->query("SELECT dlock_lease_acquire('moved', $lease)"),
	qr/^\d+$/, 'the worker finds its tables');
is( $client->query('SELECT count(*) FROM elsewhere.dlock_queue'),
	'3', 'and writes there');

# Dropped: the leases are gone, and nobody waits for them any more.
my $short =
  $client->query("SELECT dlock_ttl_acquire('short', '1s', timeout => '0')");
like($short, qr/^\d+$/, 'a short lease');
$next = session($node);
$next->query('SET search_path = elsewhere');
$next->start("SELECT dlock_acquire('held') > 0");
$client->wait_for("SELECT count(*) = 1 FROM dlock_locks "
	  . "WHERE pid = $next->{pid} AND NOT granted");
$worker = worker($admin);
$admin->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
$client->query('RESET search_path');
is( $client->query(
		'SELECT (SELECT count(*) FROM dlock_locks), '
		  . '(SELECT count(*) FROM dlock_leases), '
		  . '(SELECT count(*) FROM dlock_queue)'),
	'0|0|0',
	'DROP and CREATE EXTENSION with leases: a new one starts empty');
is($client->query("SELECT dlock_renew($lease) IS NULL"),
	't', 'old leases are gone');
grows('fences grow', $fence,
	$client->query("SELECT dlock_ttl_acquire('held', '10min')"));
like($next->answer, qr/55L01: lock "held" is gone/,
	'who waited for an old lease waits no more');
backends_gone($worker);
pass('its worker goes');
$next->quit;

#
# Databases come and go
#
$client->quit;
$node->safe_psql('postgres', 'CREATE DATABASE a');
$node->safe_psql('a', 'CREATE EXTENSION dlock');
$fence = $node->safe_psql('a', "SELECT dlock_ttl_acquire('lock', '10min')");
is($node->safe_psql('postgres', 'DROP DATABASE a WITH (FORCE)'),
	'', 'DROP DATABASE WITH (FORCE) takes leases along');
$node->safe_psql('postgres', 'CREATE DATABASE a');
$node->safe_psql('a', 'CREATE EXTENSION dlock');
is($node->safe_psql('a', 'SELECT count(*) FROM dlock_locks'),
	'0', 'a database of the same name has none');
is($node->safe_psql('a', "SELECT dlock_lease_close(dlock_lease_open('10min'))"),
	'0', 'a lease comes and goes');
$client = session($node, 'a');
no_worker($client);
$client->quit;
is($node->safe_psql('postgres', 'DROP DATABASE a'),
	'', 'without a lease the worker is not in the way of DROP DATABASE');

# A template must not be in use, and a worker is a user: so a copy with rows
# is one made before the first call after a restart.
$node->safe_psql('postgres', 'CREATE DATABASE original');
$node->safe_psql('original', 'CREATE EXTENSION dlock');
$fence =
  $node->safe_psql('original', "SELECT dlock_ttl_acquire('lock', '10min')");
$admin->quit;
$node->restart;
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE original');
is($node->safe_psql('copy', 'SELECT count(*) FROM dlock_queue'),
	'1', 'a row came with the copy of a database');
is( $node->safe_psql('copy', q{SELECT count(*) FROM dlock_locks}),
	'0', 'which has no locks');
is($node->safe_psql('copy', "SELECT dlock_check('lock', $fence)"),
	'f', 'the fence is not one here');
grows('fences grow', $fence,
	$node->safe_psql('copy',
		"SELECT dlock_try_ttl_acquire('lock', '10min')"));
is($node->safe_psql('copy', 'SELECT count(*) FROM dlock_queue'),
	'1', 'the row that came with it is discarded');
is($node->safe_psql('original', "SELECT dlock_check('lock', $fence)"),
	't', 'the original holds');

#
# A shutdown that comes before the worker has written: it writes then, and a
# release is not undone.
#
$client = session($node, 'original');
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
is( $node->safe_psql('original',
		"SELECT dlock_check('lock', $fence), dlock_check('released', $released)"),
	't|f',
	'shutdown: and stays so');

#
# No slot for a worker
#
$client = session($node, 'original');
$lease = $client->query("SELECT dlock_lease_open('10min')");
$fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
$short = $client->query("SELECT dlock_ttl_acquire('short', '10min')");
$client->quit;
$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
$node->restart;
$client = session($node, 'original');
# It is short from the first call on, so that it cannot run out before.
$client->query("UPDATE dlock_queue SET ttl = '1s' WHERE ticket = $short");
is($client->query("SELECT dlock_try_acquire('held') IS NULL"),
	't', 'no worker slot: a name that a lease holds is closed');
is( $client->query(
		"SELECT dlock_check('held', $fence), dlock_renew($lease)"),
	't|1',
	'and the lease has it');
foreach my $call (
	"dlock_lease_open('10min', info => 'new')",
	"dlock_lease_open('10min', attach => true, info => 'new')",
	"dlock_lease_acquire('new', $lease)",
	"dlock_lease_enqueue('new', $lease)",
	"dlock_ttl_acquire('new', '10min')",
	"dlock_try_ttl_acquire('new', '10min')",
	"dlock_ttl_enqueue('new', '10min')",
	"dlock_lease_acquire_all('{new, new 2}', $lease)")
{
	like(
		$client->query("SELECT $call"),
		qr/53400: could not start the worker.*DETAIL: .*HINT: /s,
		"no worker slot: $call fails");
	is( $client->query(
			q{SELECT (SELECT count(*) FROM dlock_locks WHERE name LIKE 'new%'),
					 (SELECT count(*) FROM dlock_leases WHERE info = 'new')}),
		'0|0',
		'... leaves nothing');
	ok(is_free($client, 'new') && is_free($client, 'new 2'),
		'... and the names free');
}
is($client->query("SELECT dlock_lease_acquire('held', $lease)"),
	$fence, 'what the lease has already needs no worker');
others_go_on($client, 'no worker slot');
$client->wait_for("SELECT NOT dlock_check('short', $short)");
is($client->query("SELECT dlock_try_acquire('short') IS NULL"),
	't', 'a name stays closed where nobody can write that its lease ran out');
$client->quit;

#
# Disk full.  A limit on the size of files does what a full disk does, and
# spares the WAL if its files are small.
#
$node->stop;
$node = PostgreSQL::Test::Cluster->new('full');
$node->init(extra => ['--wal-segsize=1']);
$node->append_conf('postgresql.conf', "min_dynamic_shared_memory = '64MB'\n"
	  . "min_wal_size = 2MB\nlog_statement = none\n");
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
cmp_ok($rows, '>', 100, 'after others did not');
is($client->query('SELECT count(*) FROM dlock_locks'),
	$rows, 'what was written is held, and nothing else');
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
pass('and handed on');
$client->quit;
$node->restart;
is($node->safe_psql('postgres', 'SELECT count(*) FROM dlock_locks'),
	$rows - 2, 'what was acknowledged is there after a restart');
is( $node->safe_psql('postgres',
		"SELECT dlock_lease_acquire('room', $lease) > 0"),
	't',
	'and with room on the disk calls succeed');

$node->stop;
done_testing();
