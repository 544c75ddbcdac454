# ALTER EXTENSION dlock UPDATE to a fictitious next version, with holders and
# waiters in each scope.  Sessions do not notice the update.  Privileges stay,
# and are dumped.
#
# What would break it: a space that changes with the update; memory or a waiter
# that is lost with the catalog's old rows.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $next = $Dlock::Test::next_version;
my $node = new_server('main', install_path => next_version_install());

$node->safe_psql('postgres', q{
	CREATE ROLE locker;
	REVOKE EXECUTE ON FUNCTION dlock_is_held FROM PUBLIC;
	GRANT EXECUTE ON FUNCTION dlock_is_held, dlock_force_release TO locker;
	GRANT SELECT ON dlock_queue TO locker;
	CREATE VIEW renewed AS SELECT dlock_renew(max(lease)) FROM dlock_leases});

my ($client, $other, $third, $admin) = map { session($node) } 1 .. 4;

#
# All scopes, and a waiter for each
#
my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $fence = $client->query("SELECT dlock_acquire('of the session')");
my $of_lease =
  $client->query("SELECT dlock_lease_acquire('of the lease', $lease)");

$client->query('BEGIN');
my $of_xact = $client->query("SELECT dlock_xact_acquire('of the transaction')");
my $queued = $third->query(
	"SELECT dlock_ttl_enqueue('of the lease', '1h', owner => 'third')");
$other->start("SELECT dlock_acquire_all('{of the session, of the transaction}')");
$admin->until_waits($other);
$admin->query("SELECT dlock_version_bump('v', 0)");

is($admin->query(qq{ALTER EXTENSION dlock UPDATE TO "$next"}), '', 'the update');
is( $admin->query(
		"SELECT extversion, dlock_made_up() = dlock_version() FROM pg_extension "
		  . "WHERE extname = 'dlock'"),
	"$next|t",
	'the extension has the next version');

is($client->query('SELECT * FROM renewed'), '1', 'a view that renews');
is( $client->query(
		"SELECT dlock_fence('of the session') = $fence, "
		  . "dlock_fence('of the lease') = $of_lease, "
		  . "dlock_fence('of the transaction') = $of_xact, "
		  . "dlock_renew($lease)"),
	't|t|t|1',
	'all locks are held');
is($client->query("SELECT dlock_release('of the session')"),
	't', 'the locks can be released');
is($other->answered, '', 'a waiter still waits for the transaction');
$client->query('COMMIT');
like($other->answer, qr/^\{\d+,\d+\}$/, 'the waiter gets its locks');
is($third->query("SELECT dlock_wait($queued, '0')"), 'f', 'queued');
is($client->query("SELECT dlock_lease_close($lease)"), '1', 'a lease ends');
is($third->query("SELECT dlock_wait($queued)"), 't', 'and the next one has it');
is($third->query("SELECT dlock_release_ticket($queued)"), 't', 'released');
is($admin->query("SELECT dlock_version_bump('v', 1)"), '2', 'versions go on');

#
# Privileges stay, also in a dump that is restored.
#
my $granted = q{
	SELECT string_agg(p.oid::regproc::text, ' ' ORDER BY 1)
	  FROM pg_proc AS p
	 WHERE has_function_privilege('locker', oid, 'EXECUTE')
	   AND NOT has_function_privilege('pg_monitor', oid, 'EXECUTE')
	   AND proname LIKE 'dlock%'
	UNION ALL
	SELECT has_table_privilege('locker', 'dlock_queue', 'SELECT')::text};
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';
my $expected = "dlock_force_release dlock_is_held\ntrue";

is($admin->query($granted), $expected, 'grants stay');
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->command_ok([ 'pg_dump', '-f', $dump, 'postgres' ], 'pg_dump');
$node->command_ok(
	[ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $dump, 'restored' ],
	'restored');
is($node->safe_psql('restored', $granted), $expected, 'privileges are dumped');

$_->quit foreach $client, $other, $third, $admin;
$node->stop;
done_testing();
