# After a start, the tables of leases are loaded: few rows by the first call,
# many rows by the worker.  Until then, a call that could see only a part of
# the rows is not answered.  A request for a lock that no lease has is answered
# at once.  Another call or the worker continues an interrupted load.  Invalid
# rows are discarded, and do no harm.
#
# What would break it: a second call that does not wait for the first; a call
# whose timeout ends the load, or is ignored during the load; a lock granted
# before its name was looked up in the tables; a wait that does not report the
# process that has locked the tables; an attempt that begins with the first row
# again; rows from a failed attempt that are loaded twice, or expire before the
# next attempt; a free lock that stays closed after the start; a row to remove
# that does not exist; an uncommitted change of a table by the caller's own
# transaction; a row that dlock cannot have written; a table lock that
# conflicts with VACUUM's.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils;
use Test::More;

# Sessions wait for standbys if they request it.
my $node = new_server('main', allows_streaming => 1,
	conf => "synchronous_commit = local\ndeadlock_timeout = '1h'\n"
	  . "max_prepared_transactions = 2\n");
my ($admin, $client, $other);

sub connect_again
{
	$_->quit foreach grep { defined } $admin, $client, $other;
	$node->restart;
	($admin, $client, $other) = map { session($node) } 1 .. 3;
	return;
}

sub until_waits_for
{
	my ($session, $type) = @_;

	return $admin->wait_for(
			"SELECT wait_event_type ~ '$type' FROM pg_stat_activity "
		  . "WHERE pid = $session->{pid}");
}

($admin, $client, $other) = map { session($node) } 1 .. 3;
my $lease = $client->query("SELECT dlock_lease_open('1h', info => 'lease')");
my $held = $client->query("SELECT dlock_lease_acquire('held', $lease)");
my $queued = $client->query("SELECT dlock_ttl_enqueue('held', '1h', 'nobody')");

my $as_it_was = "held $held t|held $queued f";
my $tickets = q{SELECT string_agg(format('%s %s %s', name, ticket, granted), '|'
	ORDER BY name, ticket) FROM dlock_locks};

#
# Of two first calls at one time, one loads, and the other waits for the load.
#
connect_again();
$admin->query('BEGIN; LOCK TABLE dlock_queue_lease');
$client->start("SELECT dlock_try_acquire('held') IS NULL; $tickets");
$other->start($tickets);
until_waits_for($_, 'Lock') foreach $client, $other;
ok(!$client->answered && !$other->answered, 'two first calls wait');
$admin->query('COMMIT');
is($client->answer, "t\n$as_it_was", 'the first call finds all leases');
is($other->answer, $as_it_was, 'the second call finds all leases');
is( $admin->query(
		q{SELECT held, waiting FROM dlock_leases WHERE info = 'lease'}),
	'1|0', 'each lease and each ticket is loaded once');

#
# A holder's row is gone, and no row has the next grant, as between two commits
# of the worker.  The next ticket is granted once the tables are loaded.  The
# worker tells the ticket's client, even if the loader cannot finish because
# standbys do not answer.
#
$client->query('SET synchronous_commit = on');
my $counts =
  $client->query("SELECT dlock_lease_open('1h', info => 'standbys count')");
$client->query("SELECT dlock_ttl_acquire('another', '1h')");
$admin->query(q{ALTER SYSTEM SET synchronous_standby_names = 'nobody'});
connect_again();
# The checkpointer reads this setting some time after the start.
commits_hang($node, 1);
is($admin->query("DELETE FROM dlock_queue WHERE ticket = $held"),
	'', 'the row of a holder is gone');
my $is_granted = "SELECT granted FROM dlock_locks WHERE ticket = $queued";
$client->query("SET lock_timeout = '100ms'");
like($client->query($is_granted),
	qr/55P03/, 'a call that reads the tables waits for standbys until its timeout');
my $worker = worker($admin);
$admin->wait_for("SELECT wait_event = 'SyncRep' FROM pg_stat_activity "
	  . "WHERE pid = $worker");
is($admin->query("BEGIN; SET LOCAL lock_timeout = '1min'; DROP EXTENSION dlock"),
	'', '... and the waiting worker blocks no change');
$admin->query('ROLLBACK');
connect_again();
commits_hang($node, 1);
$other->query('LISTEN nobody');
my $begin = -s $node->logfile;
$client->start($is_granted);
until_waits_for($client, 'IPC');
$worker = worker($admin);
poll('the worker has logged it',
	sub { slurp_file($node->logfile, $begin) =~ /(?:locked|being read)\n.*\n.*HINT/ });
like(
	slurp_file($node->logfile, $begin) =~ s/\t//gr,
	qr/LOG:  the tables of leases of database "postgres" are still being read
.*DETAIL:  Process $worker waits for: process $client->{pid} \(ExclusiveLock\)\.
.*HINT:  .*SyncRep/,
	'the worker waits for the first call, and logs that');
ok(!$client->answered, 'the first call waits for standbys');
$admin->query("SELECT pg_cancel_backend($client->{pid})");
like($client->answer, qr/57014/, 'the call is canceled');
$admin->wait_for("SELECT wait_event = 'SyncRep' FROM pg_stat_activity "
	  . "WHERE pid = $worker");
pass('the worker continues the load');
$client->start($is_granted);
$other->start("SELECT dlock_check('held', $queued)");
until_waits_for($_, 'Extension') foreach $client, $other;
ok(!$client->answered && !$other->answered, 'other calls wait for the worker');
is( $admin->query(
		q{SELECT dlock_try_acquire('no lease has it') > 0,
			dlock_release('no lease has it')}),
	't|t',
	'a call for a lock that no lease has does not wait');
$admin->query('ALTER SYSTEM RESET synchronous_standby_names');
$admin->query('SELECT pg_reload_conf()');
is($client->answer, 't', 'a call is answered when standbys are no longer needed');
like($other->answer, qr/^[tf]$/, 'the other call is answered, too');
$other->wait_for("SELECT dlock_check('held', $queued)");
is($admin->query($tickets) =~ s/another \d+/another/r,
	"another t|held $queued t", 'the next ticket is the only holder');
told($other, 'the grant is announced', announcement('granted', 'held', $queued));
is_now($admin, "SELECT granted FROM dlock_queue WHERE ticket = $queued",
	't', 'the row of the next ticket says granted');
unlike(slurp_file($node->logfile, $begin),
	qr/cannot read table/, 'the log reports no locked table');
is( $client->query('SELECT count(*) FROM dlock_leases WHERE lease IN '
		  . "($lease, $counts)"),
	'2', 'each lease is loaded once');
$client->query("SELECT dlock_lease_close($counts)");
$client->query(
	q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
	   WHERE name = 'another'});

#
# A first call fails at a row that cannot be read.  The next call is later than
# the ttl of a loaded waiter.  The waiter is granted the free lock, and its ttl
# starts again, because the time in between does not count.
#
$held = $client->query("SELECT dlock_lease_acquire('half', $lease)");
my $second = $client->query("SELECT dlock_ttl_enqueue('half', '1h', 'nobody')");
my $behind = $client->query("SELECT dlock_lease_acquire('behind', $lease)");
connect_again();
my $ttl = ample(1);
$admin->query("DELETE FROM dlock_queue WHERE ticket = $held");
$admin->query(
	"UPDATE dlock_queue SET ttl = '$ttl s' WHERE ticket = $second");
$admin->query("UPDATE dlock_queue SET mode = 'none' WHERE ticket = $behind");
like($client->query("SELECT dlock_check('half', $second)"),
	qr/55000: .*has not written/, 'a first call fails');
my $later = $admin->query("SELECT clock_timestamp() + '$ttl s'");
$admin->wait_for("SELECT clock_timestamp() > '$later'");
$admin->query(
	"UPDATE dlock_queue SET mode = 'exclusive' WHERE ticket = $behind");
# The grant counts when it is durable.
$client->wait_for("SELECT dlock_check('half', $second)");
is($client->query("SELECT dlock_release_ticket($second)"),
	't', 'a waiter is granted the lock, however late the second call comes');
is($client->query("SELECT dlock_release_ticket($behind)"),
	't', 'the ticket behind the waiter is loaded');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_queue '
	  . "WHERE ticket IN ($second, $behind)");

#
# VACUUM, CREATE INDEX and REINDEX block no call, and queues keep their order
# in any order of the rows.
#
my @in_order = map {
	$client->query("SELECT dlock_ttl_enqueue('order', '1h', owner => 'c$_')")
} 1 .. 3;
$admin->query("UPDATE dlock_queue SET info = info WHERE ticket = $_")
  foreach @in_order[ 1, 0 ];
is( $admin->query(q{SELECT array_agg(ticket ORDER BY ctid) FROM dlock_queue
		WHERE name = 'order'}),
	sprintf('{%s}', join ',', reverse @in_order),
	'rows in another order');
connect_again();
$admin->query('BEGIN');
$admin->query("LOCK TABLE $_ IN SHARE UPDATE EXCLUSIVE MODE")
  foreach qw(dlock_queue dlock_queue_lease dlock_slots);
$admin->query("REINDEX INDEX $_")
  foreach qw(dlock_queue_pkey dlock_queue_lease_pkey dlock_queue_name);
$client->query("SET lock_timeout = '10s'");
is( $client->query($tickets),
	"held $queued t|order $in_order[0] t|order $in_order[1] f|order $in_order[2] f",
	'all rows are loaded during a VACUUM and a REINDEX');
is( $client->query(q{SELECT array_agg(ticket ORDER BY "position") FROM dlock_locks
		WHERE name = 'order'}),
	sprintf('{%s}', join ',', @in_order),
	'... in order');
$admin->query('ROLLBACK');
$client->query("SELECT dlock_release_ticket($_)") foreach @in_order;
$client->query('RESET lock_timeout');

#
# A delay closes a lock that its lease held shared to shared requests, too.
#
my $short = $client->query("SELECT dlock_lease_open('$ttl s', delay => '1h')");
my $shut = $client->query("SELECT dlock_lease_acquire('shut', $short, shared => true)");
$admin->wait_for("SELECT delayed FROM dlock_queue_lease WHERE lease = $short");
connect_again();
is($client->query("SELECT dlock_try_acquire('shut', shared => true) IS NULL"),
	't', 'after a load, a delay keeps a shared lock closed');
$admin->query("SELECT dlock_force_release($shut)");
is($client->query("SELECT dlock_acquire('shut', '1min', shared => true) > $shut"),
	't', '... until it ends');
$client->query('SELECT dlock_release_all()');

#
# A transaction's own uncommitted changes of the tables are not loaded, neither
# by a load of all rows nor by a lookup of one name.
#
$client->query("SELECT dlock_lease_acquire('one', $lease)");
my $other_one = $client->query("SELECT dlock_ttl_acquire('other', '1h')");
my $both = qr/^held \d+ t\|one \d+ t\|other \d+ t$/;
like($client->query($tickets), $both, 'two more locks');
my $changed = qr/55000: cannot read table "dlock_queue(_lease)?" in a transaction that has changed or locked it/;
# without the trigger that refuses TRUNCATE
my $free = join '; ',
  map { "ALTER TABLE $_ DISABLE TRIGGER dlock_truncated" }
  'dlock_queue', 'dlock_queue_lease';
foreach my $change (
	"$free; TRUNCATE dlock_queue",
	"$free; TRUNCATE dlock_queue_lease",
	"SAVEPOINT s; $free; TRUNCATE dlock_queue; RELEASE s",
	"$free; TRUNCATE dlock_queue; SAVEPOINT s; TRUNCATE dlock_queue; ROLLBACK TO s",
	'ALTER TABLE dlock_queue ALTER ttl TYPE interval USING NULL',
	'ALTER TABLE dlock_queue DROP ttl, ADD ttl interval',
	'DELETE FROM dlock_queue; CREATE INDEX ON dlock_queue (name)')
{
	connect_again();
	$client->query("BEGIN; $change; SAVEPOINT before");
	like($client->query($tickets), $changed, "$change: the caller cannot load");
	$client->query('ROLLBACK TO before');
	like($client->query("SELECT dlock_try_acquire('other')"),
		qr/$changed|^$/, 'a call does not return rows that it cannot see');
	$client->query('ROLLBACK');
	like($other->query($tickets), $both, 'all tickets are there');
}
foreach my $change (
	'DELETE FROM dlock_queue; DELETE FROM dlock_queue_lease',
	"SAVEPOINT s; UPDATE dlock_queue SET name = 'none'; RELEASE s",
	'UPDATE dlock_queue SET granted = false',
	'INSERT INTO dlock_queue SELECT ticket + 1000000, $$more$$, lease, granted, mode, slots, '
	. 'permits, owner, info, channel, role, role_name, enqueued_at, granted_at, ttl, '
	. 'durability, system, database FROM dlock_queue',
	"$free; TRUNCATE dlock_queue; ROLLBACK TO first")
{
	connect_again();
	$client->query("BEGIN; SAVEPOINT first; $change");
	is($client->query("SELECT dlock_try_acquire('other') IS NULL"),
		't', "$change: the lock is held");
	like($client->query($tickets), $both, 'its holder is the same as before');
	$client->query('ROLLBACK');
	like($other->query($tickets), $both, 'other sessions see all tickets');
}
connect_again();
$admin->query('BEGIN; LOCK TABLE dlock_queue_lease');
$client->query('BEGIN; DELETE FROM dlock_queue');
is($client->query("SELECT dlock_try_acquire('other') IS NULL"),
	't', 'a lookup of the name finds the lock held, too');
$_->query('ROLLBACK') foreach $client, $admin;

#
# A row that dlock has not written raises an error that names it, in the
# worker, too, and is not loaded.  When it is restored, all rows are loaded.
#
$client->query("SELECT dlock_release_ticket($other_one)");
my $semaphore = $client->query(
	"SELECT dlock_ttl_acquire('semaphore', '1h', slots => 3, permits => 2)");
connect_again();
$admin->query("CREATE TABLE saved AS SELECT * FROM dlock_queue WHERE ticket = $semaphore;"
	. "CREATE TABLE saved_lease AS SELECT * FROM dlock_queue_lease WHERE lease = $lease");

# Set another value in one step, because the worker retries from time to time.
sub is_refused
{
	my ($table, $saved, $key, $number, $column, $value) = @_;
	my $shown = $column eq $key ? qr/-?\d+/ : $number;

	$admin->query("BEGIN; DELETE FROM $table WHERE $key IN (SELECT $key FROM $saved) "
		  . "OR $key < 1 OR $key >= (1::bigint << 53) - 1;"
		  . "INSERT INTO $table SELECT * FROM $saved;"
		  . "UPDATE $table SET $column = $value WHERE $key = $number; COMMIT");
	return like($client->query($tickets) =~ s/\n/ /gr,
		qr/55000: table "$table" has a row .* not written DETAIL:  Column "$column" .* row of $key $shown\./,
		"$table: $column = $value");
}
is_refused('dlock_queue_lease', 'saved_lease', 'lease', $lease, @$_) foreach (
	[ 'lease', '-1' ],
	[ 'lease', '0' ],
	[ 'lease', '1::bigint << 53' ],
	# a number above the sequence
	[ 'lease', '(1::bigint << 53) - 1' ],
	[ 'ttl', q{'1 mon'} ],
	[ 'ttl', q{'1 day'} ],
	[ 'ttl', q{'0'} ],
	[ 'ttl', q{'-1h'} ],
	[ 'ttl', q{'600000000h'} ],
	[ 'delay', q{'1 year'} ],
	[ 'delay', q{'-1s'} ],
	[ 'delayed', 'true' ],
	[ 'info', q{repeat('x', 1025)} ],
	[ 'opened_at', q{'infinity'} ],
	[ 'durability', '-1' ],
	[ 'durability', '99' ]);
$admin->query("BEGIN; DELETE FROM dlock_queue_lease WHERE lease = $lease;"
	. 'INSERT INTO dlock_queue_lease SELECT * FROM saved_lease;'
	. "UPDATE dlock_queue SET name = repeat('x', 256) WHERE ticket = $semaphore; COMMIT");
is_refused('dlock_queue', 'saved', 'ticket', $semaphore, @$_) foreach (
	[ 'ticket', '(1::bigint << 53) - 1, lease = (1::bigint << 53) - 1' ],
	[ 'name', q{repeat('x', 256)} ],
	[ 'name', q{repeat('x', 100000)} ],
	[ 'name', q{''} ],
	[ 'mode', q{'none'} ],
	[ 'mode', q{repeat('x', 1000000)} ],
	[ 'slots', 'NULL' ],
	[ 'slots', '0' ],
	[ 'permits', '0' ],
	[ 'permits', '4' ],
	[ 'owner', q{repeat('x', 1025)} ],
	[ 'info', q{repeat('x', 1025)} ],
	[ 'channel', q{''} ],
	[ 'channel', q{repeat('x', 64)} ],
	[ 'enqueued_at', q{'-infinity'} ],
	[ 'granted_at', q{'infinity'} ],
	[ 'granted_at', 'NULL' ],
	[ 'granted_at', 'granted_at, granted = false' ],
	[ 'ttl', q{'1 mon'} ],
	[ 'ttl', q{'0'} ],
	[ 'ttl', 'NULL' ],
	[ 'ttl', qq{'1h', lease = $lease} ],
	[ 'durability', '5' ]);
$begin = -s $node->logfile;
$admin->query('BEGIN; LOCK TABLE dlock_queue_lease');
$client->start($tickets);
$worker = worker($other);
$admin->query('COMMIT');
like($client->answer, qr/has not written/, 'a session that waits for the worker gets the error');
poll(
	'the worker has logged it',
	sub {
		slurp_file($node->logfile, $begin) =~ /\[$worker\] ERROR:  table "dlock_queue" has a row .*\n.*DETAIL.*\n.*HINT.*\n.*CONTEXT:  reading the tables of leases/;
	});
is(worker($other), $worker, 'the worker goes on');
unlike(slurp_file($node->logfile), qr/terminated by signal/, 'no process crashed');

# Two tickets that exclude each other
my $columns = $admin->query(q{SELECT string_agg(attname, ', ' ORDER BY attnum)
	FROM pg_attribute WHERE attrelid = 'dlock_queue'::regclass AND attnum > 0
		AND NOT attisdropped AND attname <> 'ticket'});
sub twice
{
	my ($set, $first) = @_;

	$first //= 'granted = true';
	return $admin->query("BEGIN; DELETE FROM dlock_queue WHERE ticket >= $semaphore;"
		  . 'INSERT INTO dlock_queue SELECT * FROM saved;'
		  . "UPDATE dlock_queue SET mode = 'exclusive', slots = NULL, permits = 1 "
		  . "WHERE ticket = $semaphore;"
		  . "INSERT INTO dlock_queue (ticket, $columns) SELECT ticket + 1, $columns "
		  . "FROM dlock_queue WHERE ticket = $semaphore;"
		  . "UPDATE dlock_queue SET lease = ticket WHERE ticket = $semaphore + 1;"
		  . "UPDATE dlock_queue SET $first WHERE ticket = $semaphore;"
		  . "UPDATE dlock_queue SET $set WHERE ticket = $semaphore + 1; COMMIT");
}
foreach my $mode (q{mode = 'exclusive'}, q{mode = 'shared'},
	q{mode = 'slots', slots = 2})
{
	twice($mode);
	like($client->query($tickets) =~ s/\n/ /gr,
		qr/55000: .*Column "granted" .* row of ticket ${\($semaphore + 1)}\./,
		"two hold it, one of them by $mode");
}
twice('granted = true', 'granted = false, granted_at = NULL');
like($client->query($tickets) =~ s/\n/ /gr,
	qr/55000: .*Column "granted" .* row of ticket ${\($semaphore + 1)}\./,
	'an exclusive holder, and a waiter that has waited for longer');
# Rows that were loaded before the error stay, because they are valid.
connect_again();
twice("name = 'another', ttl = NULL, lease = $semaphore");
like($client->query($tickets) =~ s/\n/ /gr,
	qr/55000: .*Column "lease" .* row of ticket ${\($semaphore + 1)}\./,
	q{a ticket of another one's own lease});
$admin->query("DELETE FROM dlock_queue WHERE ticket = $semaphore + 1");

# One number for a ticket and a lease
connect_again();
$admin->query("CREATE TABLE numbers AS SELECT * FROM saved_lease; UPDATE numbers SET lease = $semaphore;"
	. 'INSERT INTO dlock_queue_lease SELECT * FROM numbers');
like($client->query($tickets) =~ s/\n/ /gr,
	qr/55000: .*Column "ticket" .* row of ticket $semaphore\./, q{a lease has a ticket's number});
$admin->query("DELETE FROM dlock_queue_lease WHERE lease = $semaphore; DROP TABLE numbers");

# Without the primary key, rows could be duplicates, so nothing is loaded.
foreach (['dlock_queue', 'ticket', $semaphore], ['dlock_queue_lease', 'lease', $lease])
{
	my ($table, $column, $number) = @$_;

	connect_again();
	$admin->query("ALTER TABLE $table DROP CONSTRAINT ${table}_pkey;"
		  . "INSERT INTO $table SELECT * FROM $table WHERE $column = $number");
	foreach my $again ('', ', at each attempt')
	{
		like($client->query($tickets) =~ s/\n/ /gr,
			qr/55000: table "$table" is not what .*DETAIL:  Its primary key is not its first column\./,
			"$table: a row is there twice$again");
	}
	$admin->query("DELETE FROM $table a USING $table b "
		  . "WHERE a.$column = b.$column AND a.ctid > b.ctid;"
		  . "ALTER TABLE $table ADD CONSTRAINT ${table}_pkey PRIMARY KEY ($column)");
}
like(
	$client->query($tickets),
	qr/^held $queued t\|one \d+ t\|semaphore $semaphore t$/,
	'all tickets are loaded when these changes are undone');
$client->query(q{SELECT dlock_release_ticket(ticket)
	FROM dlock_locks WHERE name IN ('one', 'semaphore')});
is_now($admin, "SELECT count(*) FROM dlock_queue WHERE ticket <> $queued",
	'0', 'all tickets can be released');
$admin->query('DROP TABLE saved, saved_lease');

#
# Without the row of a lease, its tickets are gone, too.
#
$held = $client->query("SELECT dlock_lease_acquire('free', $lease)");
connect_again();
$admin->query("DELETE FROM dlock_queue_lease WHERE lease = $lease");
is($client->query($tickets), "held $queued t",
	'a ticket without its lease is not loaded');
like($client->query("SELECT dlock_try_acquire('free')"),
	qr/^\d+$/, 'its lock is free');
is($client->query("SELECT dlock_renew($lease) IS NULL"),
	't', 'the lease is gone');
is_now($admin, "SELECT count(*) FROM dlock_queue WHERE ticket = $held",
	'0', 'the worker removes the row of the ticket');

#
# Rows disappear, and a column is added and dropped, while there are leases.
#
$lease = $client->query("SELECT dlock_lease_open('1h')");
$held = $client->query("SELECT dlock_lease_acquire('lock', $lease)");
my $next = $other->query("SELECT dlock_ttl_enqueue('lock', '1h', 'nobody')");
$admin->query('DELETE FROM dlock_queue; DELETE FROM dlock_queue_lease');
is($client->query("SELECT dlock_check('lock', $held)"),
	't', 'rows disappear, and a lease holds');
is($client->query("SELECT dlock_release_ticket($held)"), 't', 'releases');
is($other->query("SELECT dlock_wait($next)"), 't', 'and hands on');
is( $admin->query('SELECT ticket, granted FROM dlock_queue'),
	"$next|t", 'a rewritten ticket has a row');
is($client->query("SELECT dlock_lease_close($lease)"), '0', 'it is closed');

$lease = $client->query("SELECT dlock_lease_open('1h')");
$held = $client->query("SELECT dlock_lease_acquire('more', $lease)");
my $add = q{ALTER TABLE dlock_queue ADD COLUMN more text DEFAULT 'more';
	ALTER TABLE dlock_queue_lease ADD COLUMN more text DEFAULT 'more'};
my $drop = 'ALTER TABLE dlock_queue DROP COLUMN more;'
  . 'ALTER TABLE dlock_queue_lease DROP COLUMN more';
$admin->query($add);
like($client->query("SELECT dlock_lease_acquire('less', $lease)"),
	qr/55000: .*a column "more" that was added/s, 'with an added column, nothing is written');
is($client->query("SELECT dlock_check('more', $held), dlock_renew($lease)"),
	't|1', 'with an added column, the lease holds its lock');
$admin->query($drop);
is($client->query("SELECT dlock_lease_acquire('less', $lease) > 0"),
	't', 'after the column is dropped, rows are written');
connect_again();
is($client->query("SELECT dlock_check('more', $held), dlock_renew($lease)"),
	't|2', 'after the column is dropped, rows are loaded');

#
# The worker continues a load that takes longer than starting a worker.  A call
# without time to wait leaves the load to the worker.  Other calls wait, with
# their own timeouts.  If a table lock blocks the worker, they wait for it,
# too.
#
my $few = $client->query("SELECT dlock_lease_open('1h')");
is( $client->query(
		q{SELECT cardinality(dlock_lease_acquire_all(
				(SELECT array_agg('many ' || n)
				   FROM generate_series(1, 2250) AS n), }
		  . "$few, info => repeat('x', 1000)))"),
	'2250',
	'many tickets hold locks');
my $all = "SELECT dlock_renew($few), count(*) FROM dlock_locks "
  . "WHERE name LIKE 'many %'";
connect_again();
$admin->query('BEGIN; LOCK TABLE dlock_queue_lease');
$client->query("SET statement_timeout = '500ms'");
like($client->query("SELECT dlock_renew($few)"),
	qr/57014/, 'a first call has no time to wait');
$worker = worker($other);
stop_while($other, $worker,
	"SELECT wait_event_type = 'Lock' FROM pg_stat_activity "
	  . "WHERE pid = $worker");
$admin->query('COMMIT');
like($client->query("SELECT dlock_renew($few)"),
	qr/57014/, 'the next call has no time, either, while the worker loads');
$client->query("SET statement_timeout = 0; SET lock_timeout = '100ms'");
like($client->query($all),
	qr/55P03: canceling statement due to lock timeout/,
	'a call with lock_timeout has no time, either');
like($client->query("SELECT $_"),
	qr/55P03: could not acquire lock "free" within its timeout.*DETAIL:  The tables of leases are still being read.*HINT:  \S/s,
	"a try gets an error that says so: $_")
  foreach "dlock_try_lease_acquire('free', $few)",
  q{dlock_try_ttl_acquire('free', '1h', '10ms')},
  "dlock_try_lease_acquire_all(ARRAY['free'], $few, '10ms')",
  "dlock_lease_acquire('free', $few, '10ms')";
like(
	$client->query(
		"SELECT dlock_lease_acquire('free', $few, timeout => '10ms')"),
	qr/55P03: could not acquire lock "free" within its timeout/,
	'a call with a timeout argument has no time, either');
$client->query('SET lock_timeout = 0');
$client->start($all);
$other->start("SELECT dlock_acquire('many 1')");
until_waits_for($_, 'Extension') foreach $client, $other;
ok(!$client->answered && !$other->answered, 'other calls wait for the worker');
$admin->query("SELECT pg_cancel_backend($other->{pid})");
like($other->answer, qr/57014/, 'a waiting call can be canceled');
continue_process($worker);
is($client->answer, '2250|2250', 'all tickets are there when the worker has gone on');
is(worker($admin), $worker, 'the worker is the same');

connect_again();
$admin->query('BEGIN; LOCK TABLE dlock_queue_lease');
$client->start($all);
until_waits_for($client, 'Lock');
$admin->query('COMMIT');
is($client->answer, '2250|2250', 'a call waits until the table lock is released');

#
# While the load is blocked, a session can acquire a lock that no lease has,
# and no other lock.
#
connect_again();
$admin->query('BEGIN; LOCK TABLE dlock_queue_lease');
my $fence = $client->query("SELECT dlock_try_acquire('free')");
like($fence, qr/^\d+$/, 'a lock that no lease has is acquired at once');
is( $client->query(
		"SELECT dlock_check('free', $fence), dlock_fence('free') = $fence, "
		  . q{dlock_is_held('free'), dlock_fence('free 2') IS NULL,
			cardinality(dlock_acquire_all(ARRAY['free 2', 'free 3'])),
			dlock_release('free 2'), dlock_acquire('free 2') > 0,
			dlock_release_ticket(dlock_enqueue('free 4')),
			dlock_xact_acquire('free 5') > 0}),
	't|t|t|t|2|t|t|t|t',
	'all calls about that lock work');
is( $client->query(
		"BEGIN; SELECT dlock_guard('free', $fence); COMMIT"),
	'', 'a guard, too');
is($client->query('SELECT dlock_wait(dlock_enqueue($$free 3$$))'),
	't', 'a session can wait for a ticket of a session');
$other->query("LISTEN told; SELECT dlock_enqueue('free 7', 'told')");
like(join("\n", $other->announcements(1)),
	qr/"event":"granted","lock":"free 7"/, 'its announcement arrives');
$other->query("UNLISTEN told; SELECT dlock_release('free 7')");
$other->start("SELECT dlock_acquire('free')");
until_waits_for($other, 'Lock');
is($client->query("SELECT dlock_try_acquire('many 1') IS NULL"),
	't', 'a lock that a lease has is busy');
is($client->query("SELECT dlock_try_acquire('many 1', '10ms') IS NULL"),
	't', 'the lock is busy until the timeout');
like(
	$client->query("SELECT dlock_acquire('many 1', '10ms')"),
	qr/55P03: cannot read table "dlock_queue_lease".*DETAIL:  .*locked by: process/s,
	'the error says what the call has waited for');
like(
	$client->query("SELECT dlock_acquire_all(ARRAY['free 6', 'many 1'], '10ms')"),
	qr/55P03: cannot read table "dlock_queue_lease"/,
	'the lock is also busy as one of several');
is($client->query("SELECT dlock_fence('free 6') IS NULL"),
	't', 'none of the several is held then');
$client->start("SELECT dlock_fence('many 1') IS NULL");
until_waits_for($client, 'Extension|Lock');
ok(!$client->answered, 'a call about a lock that a lease has waits for the load');
$admin->query('COMMIT');
is($client->answer, 'f', 'the call says that the lock is not free');
is($client->query($all), '2250|2250', 'all tickets are there');
my $behind_it = $admin->query("SELECT dlock_ttl_enqueue('free', '1h', 'nobody')");
is($client->query("SELECT dlock_check('free', $fence)"),
	't', 'the lock granted during the load is held');
is($client->query("SELECT dlock_release('free')"), 't', 'until it is released');
grows('the lock is handed over in the order of the queue',
	$fence, $other->answer, $behind_it);
is($other->query("SELECT dlock_release('free')"), 't', 'to sessions');
is($admin->query("SELECT dlock_wait($behind_it)"), 't', 'and to a lease');
$admin->query("SELECT dlock_release_ticket($behind_it)");
is_now($admin, "SELECT count(*) FROM dlock_queue WHERE name = 'free'",
	'0', 'no row is left');

#
# If even the lookup of a name is blocked, by a table lock that survives the
# start, calls wait until their timeouts, and the log has the reason.
#
$admin->query(q{BEGIN; LOCK TABLE dlock_queue; PREPARE TRANSACTION 'prepared'});
connect_again();
my $locked = qr/55P03: cannot read table "dlock_queue".*DETAIL:  .*locked by: a prepared transaction/s;
like($client->query("SELECT dlock_try_acquire('free')"),
	$locked, 'a table is locked: a call without time does not wait');
like($client->query("SELECT dlock_acquire('free', '10ms')"),
	$locked, 'a call with a timeout waits until the timeout');
my $offset = -s $node->logfile;
$client->query("SET lock_timeout = '10ms'");
like($client->query("SELECT dlock_acquire('free')"),
	qr/55P03: canceling statement due to lock timeout/, 'a call waits until lock_timeout');
$client->query("SET lock_timeout = 0; SET statement_timeout = '10ms'");
like($client->query("SELECT dlock_acquire('free')"), qr/57014/, 'or that');
$client->query('SET statement_timeout = 0');
$client->start("SELECT dlock_acquire('free')");
$admin->wait_for(
	q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted
		AND relation = 'dlock_queue'::regclass AND pid = } . $client->{pid});
my $said = qr/cannot read table "dlock_queue" of database "postgres", as it is locked
.*DETAIL:  Process \d+ .* is locked by: a prepared transaction \(AccessExclusiveLock\)\.
.*HINT:  .*pg_prepared_xacts/;
like(slurp_file($node->logfile, $offset) =~ s/\t//gr,
	qr/LOG:  $said/, 'a call without timeout waits, and the log says why');
poll('the worker has logged it',
	sub { slurp_file($node->logfile, $offset) =~ /ERROR:  $said/ });
poll('the worker has logged it again',
	sub { (() = slurp_file($node->logfile, $offset) =~ /ERROR:  $said/g) > 1 });
my @told = slurp_file($node->logfile, $offset) =~ /LOG:  $said/g;
is(scalar(@told), 1, 'once');
@told = slurp_file($node->logfile, $offset) =~
  /:(\d\d)(\.\d+) .*ERROR:  $said/g;
my $pause = ($told[2] + $told[3] - $told[0] - $told[1]) % 60;
cmp_ok($pause, '>=', 1.9, "while the worker tells rarely ($pause)");
ok(!$client->answered, 'the call waits for the table lock');
$admin->query("SELECT pg_cancel_backend($client->{pid})");
like($client->answer, qr/57014/, 'that wait can be canceled');
SKIP:
{
	skip 'no debugger that can be attached', 2 unless debugger_works($admin);
	my $patient = session($node);

	# A waiter with a timeout tries to get the table lock again and again.
	$patient->query("SET lock_timeout = '1h'");
	$patient->start("SELECT dlock_acquire('free')");
	until_waits_for($patient, 'Lock');
	my $asked = commands_in(
		$patient, 'LockAcquire',
		'break GetLockStatusData', 'ignore 2 1000',
		'break LockAcquire', 'ignore 3 100',
		'continue', 'info breakpoints');
	my ($copies) =
	  $asked->() =~ /GetLockStatusData.*\n\s+breakpoint already hit (\d+)/;
	cmp_ok($copies // 0, '<=', 2,
		'a waiter does not read all locks of the server at each try');
	$admin->query("SELECT pg_cancel_backend($patient->{pid})");
	like($patient->answer, qr/57014/, 'the call is canceled');
	$patient->quit;
}
$client->start("SELECT dlock_acquire('free')");
until_waits_for($client, 'Lock');
$admin->query(q{COMMIT PREPARED 'prepared'});
like($client->answer, qr/^\d+$/, 'the table is unlocked: the call acquires its lock');
is($client->query("SELECT dlock_release('free')"), 't', 'and is released');
is($client->query($all), '2250|2250', 'all other tickets are there');

# The worker dies while it loads.
connect_again();
$admin->query('BEGIN; LOCK TABLE dlock_queue_lease');
$client->start($all);
$worker = worker($other);
stop_process($worker);
$admin->query("SELECT pg_terminate_backend($worker)");
continue_process($worker);
backends_gone($worker);
$admin->query('COMMIT');
is($client->answer, '2250|2250', 'a waiting call goes on with another worker');

# There is no worker.  The calling session loads both tables.
$admin->query('ALTER SYSTEM SET max_worker_processes = 0');
connect_again();
is($client->query($all), '2250|2250', 'no worker is needed');

# Each attempt continues the previous attempt.
connect_again();
my @numbers = split /\n/,
  $admin->query(q{SELECT ticket FROM dlock_queue WHERE name LIKE 'many %'
	ORDER BY ticket});
sub spoil
{
	my ($index, $mode) = @_;

	return $admin->query(
		"UPDATE dlock_queue SET mode = '$mode' WHERE ticket = $numbers[$index]");
}
spoil(1000, 'none');
like($client->query($all), qr/55000: .*has not written/, 'an attempt fails');
spoil(500, 'none');
like($client->query($all), qr/55000: .*has not written/, 'the next attempt fails');
spoil(1000, 'exclusive');
is($client->query($all), '2250|2250',
	'the next attempt does not read loaded rows again');
spoil(500, 'exclusive');

# A call with timeout 0 does one step.
connect_again();
is( $client->query(
		q{SELECT dlock_try_acquire('many 1') IS NULL AND
			dlock_try_acquire('free') IS NOT NULL AND dlock_release('free')}),
	't',
	'a lease has it')
  foreach 1 .. 10;
$admin->query('BEGIN; LOCK TABLE dlock_queue');
is($client->query($all), '2250|2250', 'all rows are loaded in the end');
$admin->query('COMMIT');
$admin->query('ALTER SYSTEM RESET max_worker_processes');
connect_again();

# The extension is dropped before anything was loaded, and the worker exits.
$client->query('CREATE DATABASE gone');
{
	my ($one, $two) = map { session($node, 'gone') } 1 .. 2;

	$one->query('CREATE EXTENSION dlock');
	my $open = $one->query("SELECT dlock_lease_open('1h')");
	$one->query(
		q{SELECT dlock_lease_acquire_all(
			(SELECT array_agg('many ' || n) FROM generate_series(1, 500) AS n), }
		  . "$open, info => repeat('x', 1000))");
	$_->quit foreach $one, $two;
	connect_again();
	($one, $two, my $three) = map { session($node, 'gone') } 1 .. 3;
	$one->query('BEGIN; LOCK TABLE dlock_queue_lease');
	$three->start("SELECT dlock_renew($open)");
	$worker = worker($two);
	$two->query("SELECT pg_cancel_backend($three->{pid})");
	like($three->answer, qr/57014/, 'the load has begun');
	$one->query('DROP EXTENSION dlock; COMMIT');
	backends_gone($worker);
	pass('the worker exits when the extension is dropped');
	no_worker($two);
	$_->quit foreach $one, $two, $three;
}

#
# If the memory is too small for the rows, calls with leases fail until it is
# larger, and nothing is lost.  If only the limit is too small, because some
# rows use the quarter that is for other uses, all rows are loaded and can be
# released.  Calls that need memory fail until then.
#
is($client->query($all), '2250|2250', 'all tickets are there');
my $too_many = $client->query("SELECT dlock_lease_open('1h')");
is( $client->query(
		q{SELECT cardinality(dlock_lease_acquire_all(
				(SELECT array_agg('more ' || n)
				   FROM generate_series(1, 1000) AS n), }
		  . "$too_many, info => repeat('x', 1000)))"),
	'1000',
	'more locks are acquired');
$client->query(q{ALTER SYSTEM SET dlock.max_memory = '4MB'});
connect_again();
like($client->query("SELECT $_"),
	qr/ERROR:  53200: out of memory for locks.*DETAIL:  No piece of \d+ bytes is free\..*HINT:  .*increase dlock\.max_memory and restart the server\./s,
	"it does not fit into the memory: $_")
  foreach "dlock_renew($few)", 'count(*) FROM dlock_locks',
  "dlock_lease_close($too_many)";
$client->query(q{ALTER SYSTEM SET dlock.max_memory = '8MB'});
connect_again();
is($client->query($all), '2250|2250', 'with more memory, all is there');
is($client->query("SELECT dlock_lease_close($too_many)"), '1000', 'and closed');
$admin->wait_for(
	q{SELECT count(*) = 0 FROM dlock_queue WHERE name LIKE 'more %'});

$client->query(q{ALTER SYSTEM SET dlock.max_memory = '4MB'});
connect_again();
is($client->query($all), '2250|2250',
	'more rows are loaded than the limit allows');
foreach my $call ("dlock_acquire('new')",
	"dlock_lease_acquire('new', $few)",
	"dlock_renew($few, '2h')",
	"dlock_set_info($few, 'new')",
	"dlock_lease_open('1h')",
	"dlock_ttl_acquire('new', '1h')")
{
	like($client->query("SELECT $call"), qr/53200/, "there is no room: $call");
}
is( $client->query(
		"SELECT dlock_renew($few), ttl FROM dlock_leases WHERE lease = $few"),
	'2250|01:00:00', 'calls that need no memory work');
is($client->query("SELECT dlock_lease_close($few)"), '2250', 'it is closed');
$admin->wait_for(
	q{SELECT count(*) = 0 FROM dlock_queue WHERE name LIKE 'many %'});
like($client->query("SELECT dlock_lease_acquire('new', $lease)"),
	qr/^\d+$/, 'there is memory again');

#
# Memory is reserved for the number of rows in the table's statistics, up to
# the number that fits.
#
$client->query(q{UPDATE pg_class SET reltuples = 1e9, relpages = 1
	WHERE relname IN ('dlock_queue', 'dlock_queue_lease')});
connect_again();
is( $client->query("SELECT count(*) FROM dlock_leases WHERE lease = $lease"),
	'1', 'all rows are loaded');
is( $client->query(
		q{SELECT count(dlock_acquire('lock ' || n)), dlock_release_all()
			FROM generate_series(1, 9000) AS n}),
	'9000|9000',
	'memory is not reserved for a billion rows');
$client->query('ALTER SYSTEM RESET dlock.max_memory');

#
# While standbys do not answer, no call says that a lock is busy.
#
$client->query('SET synchronous_commit = on');
$lease = $client->query("SELECT dlock_lease_open('1h')");
$held = $client->query("SELECT dlock_lease_acquire('mine', $lease)");
$admin->query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
connect_again();
like($client->query("SELECT dlock_try_lease_acquire('mine', $lease)"),
	qr/55P03: could not acquire lock "mine" within its timeout/, 'a first call');
$admin->wait_for(q{SELECT count(*) = 1 FROM pg_stat_activity
	WHERE backend_type = 'dlock worker' AND wait_event = 'SyncRep'});
like($client->query("SELECT $_"),
	qr/55P03: could not acquire lock "(mine|free)" within its timeout.*DETAIL:  .*the synchronous standbys.*HINT:  See synchronous_standby_names/s,
	"standbys are missing: $_")
  foreach "dlock_try_lease_acquire('mine', $lease)",
  "dlock_try_lease_acquire_all(ARRAY['mine'], $lease)",
  q{dlock_try_ttl_acquire('free', '1h')},
  "dlock_lease_acquire('mine', $lease, '10ms')",
  q{dlock_acquire('mine', '10ms')};
is($client->query("SELECT dlock_try_acquire('mine') IS NULL"),
	't', 'for a session, a lock that a lease has is busy');

# The worker gives way to a rename between two attempts to load.
$_->quit foreach $admin, $client, $other;
$admin = session($node, 'template1');
$admin->query('SET synchronous_commit = local');
poll('the database is renamed',
	sub { $admin->query('ALTER DATABASE postgres RENAME TO renamed') eq '' });
is($admin->query(q{SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
		WHERE datname = 'renamed'}),
	'0', 'the worker that has ended has left no lock behind');
$admin->query('ALTER DATABASE renamed RENAME TO postgres');
$client = session($node);
$admin->query('ALTER SYSTEM RESET synchronous_standby_names');
$admin->query('SELECT pg_reload_conf()');
is($client->query("SELECT dlock_lease_acquire('mine', $lease)"),
	$held, 'when standbys are not needed, the lease has its ticket');

$_->quit foreach $admin, $client;
$node->stop;
done_testing();
