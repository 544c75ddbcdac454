# ALTER EXTENSION dlock UPDATE, from version 1.0, while locks are held: nobody
# notices, and what is there afterwards is what CREATE EXTENSION makes.  What a
# site has granted stays, and is dumped; what default privileges gave goes, with
# what was passed on of it, whoever owns the extension by then.
#
# What would break it: an object that only one of the two ways makes, or makes
# otherwise; a space that is another one after the update; the library of now
# with the objects of then; a GRANT in the script, which takes the site's for the
# extension's own.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');

$node->safe_psql('postgres', "CREATE DATABASE old");
$node->safe_psql('old', q{
	CREATE ROLE app;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO app;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO app;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO app});
$node->safe_psql('old', "CREATE EXTENSION dlock VERSION '1.0'");

# What somebody has made with functions that get an argument more; and what was
# granted.
$node->safe_psql('old', q{
	CREATE ROLE locker;
	REVOKE EXECUTE ON FUNCTION dlock_is_held FROM PUBLIC;
	GRANT EXECUTE ON FUNCTION dlock_is_held TO locker;
	GRANT EXECUTE ON FUNCTION dlock_force_release TO locker;
	GRANT SELECT ON dlock_queue TO locker;
	CREATE TABLE names (name text, held boolean DEFAULT dlock_is_held('default'));
	CREATE VIEW held AS SELECT name, dlock_is_held(name) FROM names;
	CREATE VIEW renewed AS SELECT dlock_renew(max(lease)) FROM dlock_leases;
	CREATE FUNCTION is_held(name text) RETURNS boolean LANGUAGE sql
		BEGIN ATOMIC SELECT dlock_is_held(name); END});

my ($client, $other, $third, $admin) = map { session($node, 'old') } 1 .. 4;

#
# All scopes, and one who waits for each
#
my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $fence = $client->query("SELECT dlock_acquire('of the session')");
my $of_lease =
  $client->query("SELECT dlock_lease_acquire('of the lease', $lease)");
my $of_xact;

$client->query('BEGIN');
$of_xact = $client->query("SELECT dlock_xact_acquire('of the transaction')");
like("$_", qr/^\d+$/, 'version 1.0, with the library of now')
  foreach $fence, $of_lease, $of_xact;
my $queued = $third->query(
	"SELECT dlock_ttl_enqueue('of the lease', '1h', owner => 'third')");
$other->start("SELECT dlock_acquire_all('{of the session, of the transaction}')");
$admin->until_waits($other);

is( $admin->query(
		"SELECT dlock_version_bump('then', 0), dlock_version_bump('both', 0)"),
	'1|1',
	'versions, where nobody notes who bumped');
$admin->query("INSERT INTO names VALUES ('of the session')");
is($client->query('SELECT * FROM held'), 'of the session|t', 'a view, before');
is($admin->query('ALTER EXTENSION dlock UPDATE'), '', 'the update');
is($client->query('SELECT * FROM held'), 'of the session|t', 'and after it');
is($client->query('SELECT * FROM renewed'), '1', 'a view that renews');
is($client->query("SELECT dlock_renew($lease, ttl => '2h')"),
	'1', 'renewed with another ttl');
is($client->query("SELECT ttl FROM dlock_leases WHERE lease = $lease"),
	'02:00:00', 'which it has');
is( $client->query(
		"SELECT is_held('of the session'), "
		  . "dlock_is_held('of the lease', lease => $lease), "
		  . "dlock_is_held('of the session', lease => $lease)"),
	't|t|f',
	'a function of somebody, and the new argument');
is( $admin->query(
		"INSERT INTO names (name) VALUES ('default') RETURNING held"),
	'f', 'a default of a column');
is( $admin->query(
		"SELECT has_function_privilege('locker', "
		  . "'dlock_is_held(text, bigint)', 'EXECUTE'), "
		  . "count(*) FROM pg_proc WHERE proname = 'dlock_is_held' "
		  . "AND proacl::text NOT LIKE '%{=%'"),
	't|1',
	'who may call it');

# who may do what else, here and in a dump that is restored
my $granted = q{
	SELECT string_agg(p.oid::regproc::text, ' ' ORDER BY 1)
	  FROM pg_proc AS p
	 WHERE has_function_privilege('locker', oid, 'EXECUTE')
	   AND NOT has_function_privilege('pg_monitor', oid, 'EXECUTE')
	   AND proname LIKE 'dlock%'
	UNION ALL
	SELECT has_table_privilege('locker', 'dlock_queue', 'SELECT')::text};
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';

is($admin->query($granted), "dlock_force_release dlock_is_held\ntrue",
	'what was granted stays');
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->command_ok([ 'pg_dump', '-f', $dump, 'old' ], 'pg_dump');
$node->command_ok(
	[ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $dump, 'restored' ],
	'restored');
is($node->safe_psql('restored', $granted),
	"dlock_force_release dlock_is_held\ntrue",
	'and is dumped');
$node->safe_psql('postgres', 'DROP DATABASE restored');
is( $admin->query(q{
		SELECT string_agg(acl.what || ': ' || acl.privileges::text, ', ')
		  FROM (SELECT oid::regclass::text, relacl FROM pg_class
				 WHERE relname LIKE 'dlock%'
				 UNION ALL
				SELECT oid::regprocedure::text, proacl FROM pg_proc
				 WHERE proname LIKE 'dlock%'
				   AND NOT has_function_privilege('pg_monitor', oid, 'EXECUTE'))
			AS acl (what, privileges)
		 WHERE what NOT LIKE 'dlock_is_held%' AND privileges::text LIKE '%app=%'}),
	'',
	'what default privileges gave is gone');
is($admin->query('DROP OWNED BY app; DROP ROLE app'),
	'', 'and keeps no role from being dropped');

# as it was before, to be compared
$admin->query('GRANT EXECUTE ON FUNCTION dlock_is_held TO PUBLIC');
$admin->query(
	'REVOKE EXECUTE ON FUNCTION dlock_is_held, dlock_force_release FROM locker');
$admin->query('REVOKE SELECT ON dlock_queue FROM locker');
is( $admin->query(
		"SELECT dlock_version_bump('both', 1), dlock_version_bump('now', 0)"),
	'2|1',
	'versions go on');
is( $admin->query(
		'SELECT string_agg(name, \' \' ORDER BY name) FROM dlock_versions '
		  . 'WHERE bumped_by = current_user AND bumped_at IS NOT NULL'),
	'both now',
	'and say who bumped, from now on');
is( $admin->query(
		'SELECT string_agg(name, \' \') FROM dlock_versions '
		  . 'WHERE bumped_by IS NULL AND bumped_at IS NULL'),
	'then',
	'what was bumped before says nothing');
is( $admin->query(
		"SELECT extversion = dlock_version() FROM pg_extension "
		  . "WHERE extname = 'dlock'"),
	't',
	'it is the version of the library now');

is( $client->query(
		"SELECT dlock_fence('of the session') = $fence, "
		  . "dlock_fence('of the lease') = $of_lease, "
		  . "dlock_fence('of the transaction') = $of_xact, "
		  . "dlock_renew($lease)"),
	't|t|t|1',
	'all is held');
is($client->query("SELECT dlock_release('of the session')"),
	't', 'and can be released');
is($other->answered, '', 'who waits still waits for the transaction');
$client->query('COMMIT');
like($other->answer, qr/^\{\d+,\d+\}$/, 'and is served');
is($third->query("SELECT dlock_wait($queued, '0')"), 'f', 'queued');
is($client->query("SELECT dlock_lease_close($lease)"), '1', 'a lease ends');
is($third->query("SELECT dlock_wait($queued)"), 't', 'and the next one has it');
is($third->query("SELECT dlock_release_ticket($queued)"), 't', 'released');

#
# The catalog, object by object.  Numbers that differ between any two databases
# are left out: of objects, of types and of files.
#
my $objects = q{
	SELECT pg_describe_object(classid, objid, 0) || E'\t' ||
		coalesce(obj_description(objid, classid::regclass::name), '-')
	  FROM pg_depend
	 WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
	   AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
	 ORDER BY 1};
my $functions = q{
	SELECT oid::regprocedure || E'\t' || pg_get_functiondef(oid) ||
		(SELECT string_agg(acl::text, ', ' ORDER BY acl::text)
		   FROM unnest(coalesce(proacl, acldefault('f', proowner))) AS acl)
	  FROM pg_proc WHERE proname LIKE 'dlock%' ORDER BY 1};
my $relations = q{
	SELECT relname || E'\t' || relkind::text || E'\t' || relpersistence::text ||
		coalesce(relacl::text, '-') || coalesce(reloptions::text, '-') ||
		coalesce(pg_get_viewdef(oid), '-') ||
		(SELECT coalesce(string_agg(concat_ws(' ', attname, atttypid::regtype,
				attnotnull, attacl, col_description(attrelid, attnum),
				(SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef
				  WHERE adrelid = attrelid AND adnum = attnum)),
			', ' ORDER BY attnum), '-')
		   FROM pg_attribute WHERE attrelid = c.oid AND NOT attisdropped) ||
		(SELECT coalesce(string_agg(pg_get_constraintdef(oid), ', '
			ORDER BY conname), '-')
		   FROM pg_constraint WHERE conrelid = c.oid) ||
		(SELECT coalesce(string_agg(pg_get_triggerdef(oid), ', '
			ORDER BY tgname), '-')
		   FROM pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal)
	  FROM pg_class AS c
	 WHERE relname LIKE 'dlock%' ORDER BY 1};
my $extension = q{
	SELECT extversion, extnamespace::regnamespace, extcondition,
		(SELECT array_agg(oid::regclass ORDER BY i)
		   FROM unnest(extconfig) WITH ORDINALITY AS t (oid, i))
	  FROM pg_extension WHERE extname = 'dlock'};
my $initial = q{
	SELECT pg_describe_object(classoid, objoid, objsubid) || E'\t' ||
		(SELECT string_agg(acl::text, ', ' ORDER BY acl::text)
		   FROM unnest(initprivs) AS acl)
	  FROM pg_init_privs WHERE privtype = 'e' ORDER BY 1};

foreach my $query ($objects, $functions, $relations, $extension, $initial)
{
	my ($fresh, $updated) =
	  map { $node->safe_psql($_, $query) } 'postgres', 'old';
	my ($what) = $query =~ /FROM (pg_\w+)/;

	cmp_ok(length $fresh, '>', 10, "$what has something");
	is($updated, $fresh, "$what is as if it were new");
}

$_->quit foreach $client, $other, $third, $admin;

#
# What default privileges gave, with the right to grant it, has been passed on, and
# the extension has got another owner.  Of it nothing stays but what the owner has
# granted, and what that role has passed on.
#
$node->safe_psql('postgres', q{
	CREATE ROLE dba SUPERUSER LOGIN;
	CREATE ROLE app;
	CREATE ROLE "Passed ""on""/=";
	CREATE ROLE kept;
	CREATE ROLE again;
	CREATE DATABASE passed OWNER dba});
my $dba = session($node, 'passed', 'user=dba');
$dba->query(q{
	ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO app WITH GRANT OPTION;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO app WITH GRANT OPTION;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO app WITH GRANT OPTION;
	CREATE EXTENSION dlock VERSION '1.0';
	GRANT SELECT, UPDATE (info) ON dlock_queue TO kept WITH GRANT OPTION;
	SET ROLE kept;
	GRANT SELECT ON dlock_queue TO again;
	SET ROLE app;
	GRANT SELECT, UPDATE ON dlock_queue TO "Passed ""on""/=" WITH GRANT OPTION;
	GRANT SELECT (info) ON dlock_queue_lease, dlock_queue TO "Passed ""on""/=";
	GRANT EXECUTE ON FUNCTION dlock_advance_ticket TO "Passed ""on""/=";
	SET ROLE "Passed ""on""/=";
	GRANT SELECT ON dlock_queue TO again;
	RESET ROLE});
$dba->quit;
is( $node->safe_psql('passed', q{
		REASSIGN OWNED BY dba TO CURRENT_USER;
		DROP OWNED BY dba;
		ALTER EXTENSION dlock UPDATE;
		SELECT string_agg(concat_ws(' ', what, grantee::regrole, privilege_type,
				is_grantable, nullif(grantor, owner)::regrole), ', '
				ORDER BY what, grantee)
		  FROM (SELECT 'relation', relowner, relacl FROM pg_class
				 WHERE relname LIKE 'dlock%'
				 UNION ALL
				SELECT 'column', relowner, attacl
				  FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
				 WHERE relname LIKE 'dlock%'
				 UNION ALL
				SELECT 'function', proowner, proacl FROM pg_proc
				 WHERE proname = 'dlock_advance_ticket')
			AS object (what, owner, acl),
			LATERAL aclexplode(acl)
		 WHERE grantee NOT IN (0, owner)}),
	'column kept UPDATE t, relation kept SELECT t, relation again SELECT f kept',
	'what was passed on is gone');
$node->command_ok([ 'pg_dump', '-f', $dump, 'passed' ], 'pg_dump');
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->command_ok(
	[ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $dump, 'restored' ],
	'restored');
$node->safe_psql('postgres', 'DROP DATABASE restored');
is( $node->safe_psql('passed', q{
		DROP ROLE "Passed ""on""/=";
		DROP OWNED BY app;
		DROP ROLE app, dba;
		REVOKE ALL ON dlock_queue FROM kept CASCADE;
		DROP ROLE kept, again}),
	'',
	'and keeps no role from being dropped');

$node->stop;
done_testing();
