# Logical replication of all tables does not harm leases: incoming changes to
# the lease tables are dropped, in both directions, even in the initial copy.
# Versions, reservations and slots replicate like any table, and take effect at
# once.  TRUNCATE of the lease tables is refused.
#
# What would break it: a row of the other server that counts as this server's,
# or replaces this server's row; the removal of a foreign row that is
# replicated back to the server where the row is a lease; a session's cache, or
# the shared cache, that misses a new row.
#
# DLOCK_OLD_INSTALL is a directory with the bin and lib of another
# installation, for one of the two servers: test/upgrade --logical sets it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my %nodes = (
	a => new_server(
		'a',
		allows_streaming => 'logical',
		install_path => $ENV{DLOCK_OLD_INSTALL}),
	b => new_server('b', allows_streaming => 'logical', own_system => 1));
my %other = (a => 'b', b => 'a');
my %leases;
my %fences;

sub ask
{
	my ($name, $sql) = @_;

	return $nodes{$name}->safe_psql('postgres', $sql);
}

# All writes of each server have reached the other one.
sub arrived
{
	$nodes{$_}->wait_for_catchup("from_$_") foreach 'a', 'b';
	return;
}

#
# Server a sends all of its tables, and b its lease tables.  Both already have
# leases of the same names.
#
foreach my $name ('a', 'b')
{
	ask($name, 'CREATE ROLE shop');
	$leases{$name} = ask($name, "SELECT dlock_lease_open('1h')");
	$fences{$name} =
	  ask($name, "SELECT dlock_lease_acquire('lock', $leases{$name})");
	ask($name, "SELECT dlock_ttl_acquire('own', '1h')");
}
ask('a',
	"SELECT dlock_version_bump('v', 0), dlock_reserve('shop/', 'shop'), "
	  . "dlock_set_slots('slots', 2)");
ask('a', 'CREATE PUBLICATION everything FOR ALL TABLES');
ask('b', 'CREATE PUBLICATION everything FOR TABLE dlock_queue, dlock_queue_lease');

# a session that has already read the tables
my $session = session($nodes{b});
$session->query('SET ROLE shop');
$session->query("SELECT dlock_acquire('other/1')");
foreach my $name ('a', 'b')
{
	my $connstr = $nodes{ $other{$name} }->connstr . ' dbname=postgres';

	ask($name,
		"CREATE SUBSCRIPTION from_$other{$name} CONNECTION '$connstr' "
		  . 'PUBLICATION everything');
}
$nodes{$_}->wait_for_subscription_sync foreach 'a', 'b';

# Both servers continue, with different names and with the same ones.
foreach my $name ('a', 'b')
{
	my $client = session($nodes{$name});

	is( $client->query(
			"SELECT dlock_release_ticket(dlock_ttl_acquire('gone', '1h'))"),
		't', "$name: leases come and go");
	$client->query("SELECT dlock_ttl_enqueue('lock', '1h', 'channel')");
	$client->quit;
}
ask('a',
	"SELECT dlock_version_bump('v', 1), dlock_reserve('other/', current_user::regrole), "
	  . "dlock_set_slots('slots', 3), dlock_set_slots('more', 4)");
arrived();
# Changes that a server passes on have arrived, too.
arrived();

foreach my $name ('a', 'b')
{
	is( ask(
			$name, 'SELECT count(*), count(DISTINCT system) FROM dlock_queue'),
		'3|1',
		"$name: only its own tickets");
	is(ask($name, 'SELECT count(*) FROM dlock_queue_lease'),
		'1', "$name: only its own lease");
	is( ask(
			$name,
			'SELECT sum(value::integer) FROM pg_stat_subscription_stats AS s, '
			  . "jsonb_each_text(to_jsonb(s)) WHERE key LIKE '%error_count'"),
		'0',
		"$name: replication has had no error");
}

#
# Tables that replicate like any table, and take effect at once
#
is(ask('b', "SELECT dlock_version_of('v')"), '2', 'versions are replicated');
like($session->query("SELECT dlock_acquire('other/2')"),
	qr/42501/, 'reservations are replicated, and sessions notice them');
is( ask('b', 'SELECT string_agg(prefix, NULL ORDER BY prefix) '
		  . 'FROM dlock_reservations WHERE role <> 0'),
	'other/shop/', 'the role is the one with the same name on this server');
my $permits = q{
	SELECT string_agg(n::text, ' ' ORDER BY name) FROM
		(SELECT name, count(dlock_try_acquire(name, slots => 9)) AS n
		   FROM unnest('{slots,more}'::text[]) AS name, generate_series(1, 9)
		  GROUP BY name) AS t};
is(ask('b', $permits), '4 3', 'slots are replicated, and count');
ask('a', "SELECT dlock_unreserve('other/'), dlock_set_slots('more', NULL); "
	  . "UPDATE dlock_slots SET slots = 1");
arrived();
like($session->query("SELECT dlock_acquire('other/2')"),
	qr/^\d+$/, 'the removal of a reservation is replicated');
is(ask('b', $permits), '9 1', 'changes and removals of slots are replicated');
ask('a', 'TRUNCATE dlock_versions, dlock_reservations, dlock_slots');
arrived();
is( ask('b', "SELECT dlock_version_of('v'), "
		  . '(SELECT count(*) FROM dlock_reservations)'),
	'0|0', 'a TRUNCATE is replicated');
is(ask('b', $permits), '9 9', 'a TRUNCATE of slots counts');

#
# Leases: rows from the other server have no effect here, and TRUNCATE is
# refused.
#
ask('b', 'DELETE FROM dlock_queue');
arrived();
is(ask('a', 'SELECT count(*) FROM dlock_queue'), '3', 'a DELETE by b has no effect');
foreach my $table ('dlock_queue', 'dlock_queue_lease')
{
	foreach my $role ('origin', 'replica', 'local')
	{
		fails_with(
			$nodes{a}, 'postgres',
			"SET session_replication_role = $role; TRUNCATE $table",
			qr/ERROR:  55000: cannot truncate table "$table".*HINT:  Call dlock_force_close/s,
			"TRUNCATE of $table is refused, as $role");
	}
}

# Rows arrived while the trigger was disabled.  In that state, calls with
# leases fail.  These rows are not loaded, and the worker removes them.  Here a
# session has locked one of them.  Until the worker can remove it, a new row
# with its number replaces it.  The rows stay on the server that sent them,
# because that server drops the removals sent back.
ask('a', 'ALTER TABLE dlock_queue DISABLE TRIGGER dlock_replicated');
fails_with(
	$nodes{a}, 'postgres', "SELECT dlock_ttl_acquire('x', '1h')",
	qr/55000: .*DETAIL:  Trigger "dlock_replicated" was added, or is enabled in another way/s,
	'without the trigger, nothing is written');
my $next = ask('b', 'SELECT dlock_advance_ticket(1)') + (1 << 30);
ask('b', "SELECT dlock_advance_ticket($next)");
$next = ask('b', "SELECT dlock_ttl_acquire('b only', '1h')");
ask('b', "SELECT dlock_advance_ticket($next + 1000000)");
my $locked = ask('b', "SELECT dlock_ttl_acquire('b locked', '1h')");
$nodes{b}->wait_for_catchup('from_b');
is(ask('a', "SELECT count(*) FROM dlock_queue WHERE name LIKE 'b %'"),
	'2', 'foreign rows arrive');
ask('a', 'ALTER TABLE dlock_queue ENABLE REPLICA TRIGGER dlock_replicated');
$nodes{a}->restart;
my $client = session($nodes{a});
$client->query("BEGIN; SELECT FROM dlock_queue WHERE name = 'b locked' FOR UPDATE");
is(ask('a', "SELECT dlock_fence('b only') IS NULL"),
	't', 'a foreign row is not read');
like(
	slurp_file($nodes{a}->logfile),
	qr/left out 2 rows of table "dlock_queue"/,
	'the log reports the foreign rows');
$nodes{a}->wait_for_log(
	qr/removing rows that stand for nothing|cannot write table "dlock_queue"/);
pass('the worker cannot remove a locked row');

# Start a new worker, which has not scanned the tables yet.
my $admin = session($nodes{a});
my $first = worker($admin);

$admin->query("SELECT pg_terminate_backend($first)");
poll('another worker', sub { worker($admin) != $first });
ask('a', "SELECT dlock_advance_ticket($next)");
my $same = 0;
foreach (1 .. 5)
{
	$same = 1 if ask('a', "SELECT dlock_ttl_acquire('t$_', '1h')") == $next;
}
ok($same, 'a ticket gets the number of a foreign row');
is(ask('a', "SELECT count(*) FROM dlock_queue WHERE name = 'b only'"),
	'0', 'the new row replaces the foreign row');
$client->query('ROLLBACK');
$client->quit;
ok($admin->wait_for('SELECT count(DISTINCT system) = 1 FROM dlock_queue'),
	'foreign rows are removed when they are not locked');
$admin->quit;
arrived();
is( ask('b', "SELECT count(*) FROM dlock_queue WHERE ticket IN ($next, $locked)"),
	'2', 'the rows stay on the server that sent them');

# Then both servers crash, and keep their promises.
arrived();
$session->quit;
foreach my $name ('a', 'b')
{
	my $node = $nodes{$name};

	$node->stop('immediate');
	$node->start;
}
is(ask('a', "SELECT dlock_check('lock', $fences{a})"), 't', 'a: the lease holds');
is(ask('a', 'SELECT held FROM dlock_leases WHERE lease = ' . $leases{a}),
	'1', 'a: the lease has its lock');
is( ask('a', "SELECT dlock_check('t1', $next) OR dlock_check('t2', $next) OR "
		  . "dlock_check('t3', $next) OR dlock_check('t4', $next) OR dlock_check('t5', $next)"),
	't',
	'a: the ticket that replaced a foreign row holds');
is(ask('b', "SELECT dlock_check('b only', $next)"), 't', 'b: the lease holds');

done_testing();
