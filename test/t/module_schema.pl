# The extension can be in a schema that is in no search_path, and can move.
# All functions and views work by qualified names.  Leases, locks and queues
# survive ALTER EXTENSION SET SCHEMA, ALTER SCHEMA RENAME and an update.
#
# What would break it: a name in a function, a view, a trigger or an expression
# that is looked up in the caller's search_path; a worker or a cached plan that
# uses a table's old name; a schema that is gone.
#
# The catalog lists the functions, and the server counts their calls: a new
# function fails this test until it is called here.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $timeout = $PostgreSQL::Test::Utils::timeout_default;
my $node = new_server(
	'main',
	install_path => next_version_install(),
	conf => "track_functions = all\nstatement_timeout = '${timeout}s'\n");

# All connections have an empty search_path.
$node->safe_psql(
	'postgres', q{
	DROP EXTENSION dlock;
	CREATE ROLE app LOGIN;
	CREATE DATABASE shop;
	ALTER DATABASE shop SET search_path = ''});
$node->safe_psql(
	'shop', q{
	CREATE SCHEMA dlock;
	GRANT USAGE ON SCHEMA dlock TO PUBLIC;
	CREATE EXTENSION dlock SCHEMA dlock;
	CREATE SCHEMA app AUTHORIZATION app});

my $admin = session($node, 'shop');
my $app = session($node, 'shop', 'user=app');
my $waiter = session($node, 'shop', 'user=app');
my $third = session($node, 'shop', 'user=app');

is($app->query('SHOW search_path'), '""', 'nothing is in the search_path');

# Wait until the view shows that the session waits.
sub until_waits
{
	my ($schema, $session) = @_;

	$admin->wait_for("SELECT count(*) = 1 FROM $schema.dlock_locks "
		  . "WHERE pid = $session->{pid} AND NOT granted");
	return;
}

#
# A holder and a waiter in each scope, while the extension is changed
#
sub survives
{
	my ($from, $change, $to) = @_;
	my $lease = $app->query("SELECT $from.dlock_lease_open('1h')");
	my %fence;
	my $queued;

	$fence{lease} =
	  $app->query("SELECT $from.dlock_lease_acquire('of the lease', $lease)");
	$fence{session} =
	  $app->query("SELECT $from.dlock_acquire('of the session')");
	$app->query("LISTEN told");
	$queued = $app->query(
		"SELECT $from.dlock_ttl_enqueue('of the session', '1h', 'told')");
	$third->query("SELECT $from.dlock_enqueue('of the lease', 'never')");
	$waiter->start("SELECT $from.dlock_acquire('of the lease')");
	until_waits($from, $waiter);
	# The session keeps a plan of this statement.
	my $bump = sub {
		return $app->query(
			"SELECT $_[0].dlock_version_bump('v', $_[0].dlock_version_of('v'))");
	};
	my $version = $bump->($from);

	# The lease of this ticket may expire at any time.
	$third->query("SELECT $from.dlock_ttl_enqueue('runs out', '1s')");

	is($admin->query($change), '', $change);

	is( $app->query(
			"SELECT $to.dlock_fence('of the lease') = $fence{lease}, "
			  . "$to.dlock_check('of the session', $fence{session}), "
			  . "$to.dlock_renew($lease), "
			  . "$to.dlock_is_held('of the session')"),
		't|t|1|t',
		"$to: all is held");
	is($bump->($to), $version + 1, "$to: versions go on");
	is($waiter->answered, '', "$to: the waiter still waits");
	$app->query("BEGIN; SELECT $to.dlock_guard('of the lease', $fence{lease})");
	is($app->query('COMMIT'), '', "$to: the transaction can be guarded");

	# The worker writes, expires and announces.
	$app->query("SELECT $to.dlock_ttl_acquire('written', '1h')");
	is( $admin->query(
			"SELECT count(*) FROM $to.dlock_queue WHERE name = 'written'"),
		'1',
		"$to: rows are written");
	$admin->wait_for("SELECT NOT EXISTS (SELECT FROM $to.dlock_queue "
		  . "WHERE name = 'runs out')");
	is($app->query("SELECT $to.dlock_release('of the session')"),
		't', "$to: released");
	told(
		$app,
		"$to: the next in line is told",
		announcement('granted', 'of the session', $queued));
	is( $admin->query(
			"SELECT granted FROM $to.dlock_queue WHERE ticket = $queued"),
		't',
		"$to: the waiter has the lock");

	is($third->query("SELECT $to.dlock_release_all()"),
		'1', "$to: the first ticket in the queue is released");
	is($app->query("SELECT $to.dlock_lease_close($lease)"),
		'1', "$to: a lease ends");
	like($waiter->answer, qr/^\d+$/, "$to: the next waiter has the lock");
	$waiter->query("SELECT $to.dlock_release_all()");
	$app->query("SELECT $to.dlock_release_ticket(ticket) FROM $to.dlock_locks");
	is($admin->query("SELECT count(*) FROM $to.dlock_locks"),
		'0', "$to: nothing is left");
	return;
}

survives('dlock',
	qq{ALTER EXTENSION dlock UPDATE TO "$Dlock::Test::next_version"}, 'dlock');

#
# Each function is called.  The admin calls functions that others may not call.
#
$app->query($_)
  foreach (
	'CREATE TABLE app.guarded (id integer)',
	q{CREATE TRIGGER guarded BEFORE INSERT OR UPDATE OR DELETE ON app.guarded
		FOR EACH STATEMENT EXECUTE FUNCTION dlock.dlock_require_guard('c')},
	'CREATE TABLE app.fenced (id integer, fence bigint)',
	q{CREATE TRIGGER fenced BEFORE UPDATE ON app.fenced
		FOR EACH ROW EXECUTE FUNCTION dlock.dlock_fence_guard('fence')},
	'CREATE TABLE app.counted (id integer, version bigint)',
	q{CREATE TRIGGER counted BEFORE UPDATE ON app.counted
		FOR EACH ROW EXECUTE FUNCTION dlock.dlock_version_guard()});

# An error or any other unexpected result is fatal.
sub gives
{
	my ($session, @calls) = @_;

	while (my ($sql, $pattern) = splice @calls, 0, 2)
	{
		my $answer = $session->query($sql);

		like("$answer", $pattern, $sql =~ s/\s+/ /gr);
	}
	return;
}

my $lease = $app->query("SELECT dlock.dlock_lease_open('1h')");
my $number = qr/^\d+$/;
my $numbers = qr/^\{\d+,\d+\}$/;
my $yes = qr/^t$/;
my $nothing = qr/^$/;

gives(
	$app,
	"SELECT dlock.dlock_acquire('a')" => $number,
	"SELECT dlock.dlock_try_acquire('b')" => $number,
	"CALL dlock.dlock_acquire_nosnapshot('c')" => $number,
	"SELECT dlock.dlock_acquire_all('{d,e}')" => $numbers,
	"SELECT dlock.dlock_try_acquire_all('{f,g}')" => $numbers,
	"SELECT dlock.dlock_is_held('a')" => $yes,
	"SELECT dlock.dlock_check('a', dlock.dlock_fence('a'))" => $yes,
	"SELECT dlock.dlock_release('a')" => $yes,
	"SELECT dlock.dlock_set_info(dlock.dlock_fence('b'), 'x')" => $yes,
	"SELECT dlock.dlock_downgrade(dlock.dlock_fence('b'))" => $yes,
	"SELECT dlock.dlock_release_ticket(dlock.dlock_fence('b'))" => $yes,
	"SELECT dlock.dlock_set_slots('a', 2)" => qr/ERROR:  42501/,

	"SELECT dlock.dlock_wait(dlock.dlock_enqueue('h'))" => $yes,
	'SELECT dlock.dlock_channel()' => qr/^dlock_\w+$/,
	"SELECT dlock.dlock_watch('h', 'never')" => $nothing,
	"SELECT dlock.dlock_unwatch('h')" => $yes,

	'BEGIN' => $nothing,
	"SELECT dlock.dlock_xact_acquire('i')" => $number,
	"SELECT dlock.dlock_try_xact_acquire('j')" => $number,
	"SELECT dlock.dlock_xact_acquire_all('{k,l}')" => $numbers,
	"SELECT dlock.dlock_try_xact_acquire_all('{m,n}')" => $numbers,
	"SELECT dlock.dlock_release_at_commit(dlock.dlock_fence('d'))" => $nothing,
	"SELECT dlock.dlock_guard('c', dlock.dlock_fence('c'))" => $nothing,
	'INSERT INTO app.guarded VALUES (1)' => $nothing,
	'COMMIT' => $nothing,
	'INSERT INTO app.guarded VALUES (1)' => qr/without a guard of lock "c"/,
	'INSERT INTO app.fenced VALUES (1, 7)' => $nothing,
	'UPDATE app.fenced SET fence = 6' => qr/ERROR:  55L01/,
	'INSERT INTO app.counted VALUES (1, 1)' => $nothing,
	'UPDATE app.counted SET version = 1 RETURNING version' => qr/^2$/,
	'SELECT dlock.dlock_release_all()' => $number,

	"SELECT dlock.dlock_lease_acquire('o', $lease)" => $number,
	"SELECT dlock.dlock_try_lease_acquire('p', $lease)" => $number,
	"SELECT dlock.dlock_lease_acquire_all('{q,r}', $lease)" => $numbers,
	"SELECT dlock.dlock_try_lease_acquire_all('{s,t}', $lease)" => $numbers,
	"SELECT dlock.dlock_lease_enqueue('u', $lease)" => $number,
	"SELECT dlock.dlock_renew($lease)" => qr/^7$/,
	"SELECT dlock.dlock_ttl_acquire('v', '1h')" => $number,
	"SELECT dlock.dlock_try_ttl_acquire('w', '1h')" => $number,
	"SELECT dlock.dlock_ttl_enqueue('x', '1h')" => $number,
	"SELECT dlock.dlock_lease_close($lease)" => qr/^7$/,

	"SELECT dlock.dlock_version_bump('x', 0)" => qr/^1$/,
	"SELECT dlock.dlock_try_version_bump('x', 1)" => qr/^2$/,
	"SELECT dlock.dlock_version_of('x')" => qr/^2$/,

	"SELECT granted FROM dlock.dlock_locks('v')" => $yes,
	'SELECT dlock.dlock_blocking_pids(pg_backend_pid())' => qr/^\{\}$/,
	'SELECT dlock.dlock_version()' => qr/^\d/,);
gives(
	$admin,
	"SELECT dlock.dlock_reserve('app/', 'app')" => $nothing,
	'SELECT prefix, owner, role = owner::regrole FROM dlock.dlock_reservations' =>
	  qr/^app\/\|app\|t$/,
	"SELECT dlock.dlock_unreserve('app/')" => $yes,
	"SELECT dlock.dlock_set_slots('s', 2)" => $nothing,
	"SELECT dlock.dlock_set_slots('s', 3)" => $nothing,
	"SELECT dlock.dlock_set_slots('t', 3), dlock.dlock_set_slots('t', NULL)" =>
	  qr/^\|$/,
	'SELECT name, slots FROM dlock.dlock_slots' => qr/^s\|3$/,
	"SELECT dlock.dlock_force_release(ticket) FROM dlock.dlock_locks('v')" =>
	  $yes,
	"SELECT dlock.dlock_force_close(ticket) FROM dlock.dlock_locks('w')" =>
	  qr/^1$/,
	"SELECT dlock.dlock_version_bump('z', 0)" => qr/^1$/,
	"SELECT dlock.dlock_version_forget('z')" => $yes,
	'SELECT dlock.dlock_stats_reset()' => $nothing,
	'SELECT dlock.dlock_advance_ticket((2^40)::bigint)' => $number,
	'SELECT dlock.dlock_reset()' => qr/^1$/,
	# write a row as logical replication would
	'SET session_replication_role = replica' => $nothing,
	"INSERT INTO dlock.dlock_versions VALUES ('y', 1)" => $nothing,
	"INSERT INTO dlock.dlock_reservations VALUES ('r/', 'app')" => $nothing,
	"INSERT INTO dlock.dlock_slots VALUES ('r', 1)" => $nothing,
	'INSERT INTO dlock.dlock_queue (ticket) VALUES (1)' => $nothing,
	'RESET session_replication_role' => $nothing,
	'SELECT count(*) FROM dlock.dlock_queue WHERE ticket = 1' => qr/^0$/,
	'SELECT name, version FROM dlock.dlock_versions ORDER BY 1' =>
	  qr/^v\|2\nx\|2\ny\|1$/,
	"SELECT dlock.dlock_unreserve('r/')" => $yes,);

# Views and tables that can be read
foreach my $relation (
	split /\n/,
	$admin->query(
		q{SELECT c.oid::regclass FROM pg_class c JOIN pg_depend d ON d.objid = c.oid
		  WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
			AND d.deptype = 'e' AND c.relkind IN ('r', 'v', 'S') ORDER BY 1}))
{
	like($relation, qr/^dlock\./, "$relation has a schema");
	unlike($admin->query("SELECT * FROM $relation"),
		qr/ERROR/, "$relation can be read");
}

#
# Other sessions see a session's counts when it ends, or is idle.
#
my $uncalled = q{
	SELECT string_agg(p.oid::regprocedure::text, ', ' ORDER BY 1)
	  FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid
	 WHERE d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
	   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
	   AND p.oid NOT IN (SELECT funcid FROM pg_stat_user_functions)
	   -- a call that fails is not counted; and what the made-up version adds
	   AND p.proname NOT IN ('dlock_refuse_truncate', 'dlock_made_up')};

$_->quit foreach $app, $admin;
$admin = session($node, 'shop');
$app = session($node, 'shop', 'user=app');
is($admin->query($uncalled), '', 'each function has been called');

# All objects in the extension's schema belong to it or to one of its objects,
# so that tools can tell them from the application's.
is( $admin->query(
		q{SELECT string_agg(pg_describe_object(classid, objid, 0), ', ')
		  FROM (SELECT 'pg_class'::regclass, oid FROM pg_class
				 WHERE relnamespace = 'dlock'::regnamespace AND relkind <> 'i'
				UNION ALL
				SELECT 'pg_proc'::regclass, oid FROM pg_proc
				 WHERE pronamespace = 'dlock'::regnamespace) AS o (classid, objid)
		 WHERE NOT EXISTS (SELECT FROM pg_depend d
			 WHERE d.classid = o.classid AND d.objid = o.objid AND d.deptype = 'e')}),
	'',
	'all objects in the schema belong to the extension');

#
# The extension is moved
#
$admin->query('CREATE SCHEMA elsewhere; GRANT USAGE ON SCHEMA elsewhere TO PUBLIC');
survives('dlock', 'ALTER EXTENSION dlock SET SCHEMA elsewhere', 'elsewhere');
is($admin->query('DROP SCHEMA dlock'), '', 'the old schema can be dropped');
survives('elsewhere', 'ALTER SCHEMA elsewhere RENAME TO "D lock"', '"D lock"');

# Triggers of tables have moved, too, even if a session has plans of them.
$app->query("SELECT \"D lock\".dlock_acquire('c')");
$app->query('BEGIN; SELECT "D lock".dlock_guard(\'c\', "D lock".dlock_fence(\'c\')); '
	  . 'UPDATE app.guarded SET id = 2');
is($app->query('COMMIT'), '', 'a trigger works as before');
like($app->query('UPDATE app.guarded SET id = 3'),
	qr/without a guard of lock "c"/, 'the guard trigger refuses');

# All rows that were written under these names are loaded.
$lease = $app->query("SELECT \"D lock\".dlock_lease_open('1h')");
my $fence =
  $app->query("SELECT \"D lock\".dlock_lease_acquire('stays', $lease)");

$_->quit foreach $admin, $app, $waiter, $third;
$node->restart;
is( $node->safe_psql(
		'shop',
		"SELECT \"D lock\".dlock_check('stays', $fence), \"D lock\".dlock_renew($lease)"
	),
	't|1',
	'after a restart, the lease is there');
unlike(
	slurp_file($node->logfile),
	qr/\] (ERROR|WARNING|PANIC):/,
	'the log has no error of the worker');
$node->stop;
done_testing();
