# Extensions that observe every statement work beside dlock: auto_explain,
# pg_stat_statements and pgaudit, preloaded, with all their output.  They
# observe statements of sessions, of triggers, of dlock itself and of its
# worker.
#
# What would break it: a statement of dlock, or a state of its worker, that an
# observer cannot handle; a hook of dlock that does not call the other hooks,
# or is not called.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils;
use Test::More;

my %settings = (
	auto_explain => q{
auto_explain.log_min_duration = 0
auto_explain.log_nested_statements = on
auto_explain.log_analyze = on
auto_explain.log_buffers = on
auto_explain.log_wal = on
auto_explain.log_timing = on
auto_explain.log_triggers = on
auto_explain.log_verbose = on
auto_explain.log_settings = on
},
	pg_stat_statements => q{
pg_stat_statements.track = all
pg_stat_statements.track_utility = on
pg_stat_statements.track_planning = on
compute_query_id = on
},
	pgaudit => q{
pgaudit.log = all
pgaudit.log_catalog = on
pgaudit.log_parameter = on
pgaudit.log_relation = on
pgaudit.log_rows = on
pgaudit.log_statement = on
});

# The extensions that this server has. pgaudit is a separate package.
my ($libraries) = run_command([ 'pg_config', '--pkglibdir' ]);
my @observers = grep { -e "$libraries/$_.so" } sort keys %settings;
my $node = new_server('main',
		conf => "shared_preload_libraries = '"
	  . join(',', @observers) . "'\n"
	  . join('', @settings{@observers})
	  . "deadlock_timeout = 10ms\nlog_lock_waits = on\nautovacuum = off\n");
my $admin = session($node);

foreach my $observer (sort keys %settings)
{
	# auto_explain is not an extension, only a library
	$admin->query("CREATE EXTENSION $observer")
	  if $observer ne 'auto_explain' && grep { $_ eq $observer } @observers;
}
$admin->query(
	q{
	CREATE ROLE alice LOGIN;
	CREATE TABLE guarded (id integer PRIMARY KEY, fence bigint, version bigint);
	GRANT ALL ON guarded TO alice;
	CREATE TRIGGER a BEFORE INSERT OR UPDATE OR DELETE ON guarded
		EXECUTE FUNCTION dlock_require_guard('guarded');
	CREATE TRIGGER b BEFORE UPDATE ON guarded
		FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence');
	CREATE TRIGGER c BEFORE UPDATE ON guarded
		FOR EACH ROW EXECUTE FUNCTION dlock_version_guard();
	SELECT dlock_reserve('billing/', 'alice')});

my $alice = session($node, 'postgres', 'user=alice');
my $bob = session($node);
my ($fence, $lease, $ticket);

# succeeds($session, $sql, $expected, $test), in which $expected is a pattern
sub succeeds
{
	my ($session, $sql, $expected, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return like($session->query($sql), qr/^$expected$/s, $test);
}

# Sessions
foreach my $call (
	"dlock_acquire('a')", "dlock_try_acquire('a', shared => true)",
	"dlock_enqueue('b')", 'dlock_release_ticket(dlock_acquire(\'c\'))')
{
	succeeds($alice, "SELECT $call", '\d+|t', $call);
}
succeeds($alice, "SELECT dlock_acquire_all(ARRAY['x', 'y'])",
	'\{\d+,\d+\}', 'several');
succeeds($alice, "CALL dlock_acquire_nosnapshot('nosnapshot')",
	'\d+', 'the procedure');
succeeds($alice, "SELECT dlock_release('a')", 't', 'a release');
$bob->start("SELECT dlock_acquire('a')");
$admin->until_waits($bob);
succeeds(
	$alice,
	'SELECT count(*) > 5, count(*) FILTER (WHERE position > 0) '
	  . 'FROM dlock_locks',
	't\|1',
	'the view');
$alice->query('DISCARD ALL');
grows('DISCARD ALL releases', 1, $bob->answer);
succeeds($bob, 'SELECT dlock_release_all()', '1', 'nothing else is held');

# In a function, and in a transaction that is rolled back
succeeds(
	$alice, q{DO $$ BEGIN
	PERFORM dlock_xact_acquire('a');
	BEGIN
		PERFORM dlock_acquire('b', timeout => '-1');
	EXCEPTION WHEN OTHERS THEN NULL;
	END;
END $$}, '', 'in a block');
succeeds(
	$alice,
	'EXPLAIN (ANALYZE, COSTS off, TIMING off, SUMMARY off) '
	  . "SELECT dlock_try_acquire('a'), dlock_release('a')",
	'Result .*',
	'in EXPLAIN ANALYZE');
succeeds($alice, 'SELECT count(*) FROM dlock_locks',
	'0', 'no lock is left');

# Guards, triggers, versions
$fence = $alice->query("SELECT dlock_acquire('guarded')");
like(
	$alice->query("INSERT INTO guarded VALUES (1, $fence, 1)"),
	qr/55000.*without a guard/s,
	'without a guard, nothing is written');
succeeds(
	$alice,
	"BEGIN; SELECT dlock_guard('guarded', $fence); "
	  . "INSERT INTO guarded VALUES (1, $fence, 1); "
	  . 'UPDATE guarded SET id = 2; COMMIT; TABLE guarded',
	"\\s*2\\|$fence\\|2",
	'with one, it is');
succeeds(
	$alice,
	"SELECT dlock_version_bump('document', 0), "
	  . "dlock_version_of('document')",
	'1\|1',
	'a version');
succeeds($alice, "SELECT dlock_acquire('billing/1')",
	'\d+', 'a reserved name');

# Leases, and the worker's statements for them
$lease = $alice->query("SELECT dlock_lease_open('1h', info => 'node-1')");
$ticket = $alice->query("SELECT dlock_lease_acquire('leased', $lease)");
succeeds($alice, "SELECT dlock_renew($lease)", '1', 'a lease');
succeeds($alice, "SELECT dlock_ttl_acquire('ttl', '1h', owner => 'o')",
	'\d+', 'a ticket of its own');
$bob->query('LISTEN c');
succeeds($bob, "SELECT dlock_ttl_enqueue('leased', '1h', 'c')",
	'\d+', 'a place in the queue');
succeeds($alice, "SELECT dlock_release_ticket($ticket)", 't', 'its end');
like(join('', $bob->announcements(1)), qr/"granted"/, 'the grant is announced');
succeeds($alice, "SELECT dlock_lease_close($lease)",
	'0', 'the end of the lease');
{
	my $keeper = session($node);

	$lease = $keeper->query("SELECT dlock_lease_open('100ms', true)");
	$keeper->query("SELECT dlock_lease_acquire('expires', $lease)");
	$keeper->quit;
	is_now($admin, "SELECT count(*) FROM dlock_queue WHERE name = 'expires'",
		'0', 'a lease expires');
}

# A deadlock has one victim, and a waiter can be canceled.
$alice->query("SELECT dlock_acquire('d 1')");
$bob->query("SELECT dlock_acquire('d 2')");
$alice->start("SELECT dlock_acquire('d 2')");
$admin->until_waits($alice);
like($bob->query("SELECT dlock_acquire('d 1')"), qr/40P01/, 'a deadlock');
$admin->query("SELECT pg_cancel_backend($alice->{pid})");
like($alice->answer, qr/57014/, 'a cancelled wait');

# After a restart, leases are loaded.
$_->quit foreach $alice, $bob, $admin;
$node->restart;
$admin = session($node);
succeeds(
	$admin, "SELECT count(*) FROM dlock_locks WHERE scope = 'lease'",
	'2', 'the tickets of leases exist after a restart');
succeeds($admin, 'SELECT dlock_reset()', '2', 'and is ended');
is_now($admin, 'SELECT count(*) FROM dlock_queue', '0', 'in the tables, too');

# What the extensions have recorded. dlock writes the lease tables without
# statements.
SKIP:
{
	skip 'no pg_stat_statements', 2 unless grep { /statements/ } @observers;
	is( $admin->query(
			q{SELECT count(*) > 0 FROM pg_stat_statements
			WHERE query LIKE '%dlock_versions%' AND NOT toplevel}),
		't',
		'pg_stat_statements has dlock\'s statements on its tables');
	is( $admin->query(
			q{SELECT count(*) FROM pg_stat_statements
			WHERE query ~ '^(INSERT|UPDATE|DELETE).*dlock_queue'
			AND query !~ 'OPERATOR'}),
		'0',
		'pg_stat_statements has no statement of the worker');
}
my $log = slurp_file($node->logfile);
my $worker_errors = join "\n",
  grep { /(?:ERROR|FATAL|PANIC):/ && !/module_observers\.pl/ } split /\n/,
  $log;
is($worker_errors =~ s/^.*due to administrator command$//mgr =~ s/\s+//gr,
	'', 'no background process has had an error');
SKIP:
{
	skip 'no auto_explain', 1 unless grep { /explain/ } @observers;
	like($log, qr/LOG:  duration: .* plan:/, 'auto_explain talks');
}
SKIP:
{
	skip 'pgaudit is not installed', 1 unless grep { /pgaudit/ } @observers;
	like($log, qr/AUDIT: SESSION,.*dlock_acquire/, 'pgaudit talks');
}
$admin->quit;
$node->stop;
done_testing();
