# Leases belong to one installation of the extension in one database.  They
# stay if the extension moves to another schema, or if its DROP is rolled
# back.  They end with the extension or the database.  A copy of the database
# honours none of them.
#
# What would break it: a worker that uses the old schema, that stays when its
# tables are gone or about to be dropped, or that still counts as a process of
# the former owner; a waiter that is not woken; a row that counts as a lease in
# a copy; a removal of a dropped space that blocks other sessions, or that an
# error leaves incomplete.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main');
my $client = session($node);
my $admin = session($node);

#
# The extension is dropped, created again, and moved
#
my $lease = $client->query("SELECT dlock_lease_open('10min')");
my $fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
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
	'3', 'the worker writes to its tables');

# When the extension is dropped, its leases end, and no session waits for them.
my $short =
  $client->query("SELECT dlock_ttl_acquire('short', '1s', timeout => '0')");
like($short, qr/^\d+$/, 'a short lease');
my $next = session($node);
$next->query('SET search_path = elsewhere');
$next->start("SELECT dlock_acquire('held') > 0");
$client->wait_for("SELECT count(*) = 1 FROM dlock_locks "
	  . "WHERE pid = $next->{pid} AND NOT granted");
my $worker = worker($admin);
$admin->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
$client->query('RESET search_path');
is( $client->query(
		'SELECT (SELECT count(*) FROM dlock_locks), '
		  . '(SELECT count(*) FROM dlock_leases), '
		  . '(SELECT count(*) FROM dlock_queue)'),
	'0|0|0',
	'DROP and CREATE EXTENSION with leases: the new extension starts empty');
is($client->query("SELECT dlock_renew($lease) IS NULL"),
	't', 'old leases are gone');
grows('fences grow', $fence,
	$client->query("SELECT dlock_ttl_acquire('held', '10min')"));
like($next->answer, qr/55L01: lock "held" is gone/,
	'a session that waited for an old lease gets an error');
backends_gone($worker);
pass('the worker of the dropped extension exits');
$next->quit;

#
# Databases are created and dropped
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
	'0', 'a lease is opened and closed');
$client = session($node, 'a');
no_worker($client);
$client->quit;
is($node->safe_psql('postgres', 'DROP DATABASE a'),
	'', 'without leases, no worker blocks DROP DATABASE');

#
# Leases of others do not block a database's owner without other rights
#
$admin->query('CREATE ROLE landlord LOGIN CREATEDB; CREATE ROLE tenant LOGIN');

# The worker of a database.  Not all roles may see it.
sub worker_of
{
	my ($database) = @_;
	my $pid;

	poll("a worker in $database",
		sub {
			$pid = $admin->query('SELECT pid FROM pg_stat_activity '
				  . "WHERE backend_type = 'dlock worker' AND datname = '$database'");
			return $pid =~ /^\d+$/;
		});
	return $pid;
}

# Runs a command as the owner, while the worker runs for another role's lease
sub as_landlord
{
	my ($database, $command, $test) = @_;
	my $tenant = session($node, $database, 'user=tenant');
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	$fence = $tenant->query(
		"SELECT dlock_ttl_acquire('rented', '1h', owner => 'tenant')");
	like($fence, qr/^\d+$/, 'a lease of a tenant');
	my $pid = worker_of($database);
	$tenant->quit;
	my $landlord = session($node, 'postgres', 'user=landlord');
	is($landlord->query($command), '', $test);
	$landlord->quit;
	backends_gone($pid);
	return;
}

sub let
{
	my ($database) = @_;

	$admin->query("CREATE DATABASE $database OWNER landlord");
	$node->safe_psql($database, 'CREATE EXTENSION dlock');
	return;
}

let('flat');
as_landlord('flat', 'ALTER DATABASE flat RENAME TO house',
	'the owner renames it');
is($node->safe_psql('house', "SELECT dlock_check('rented', $fence)"),
	't', 'the renamed database keeps its leases');
as_landlord('house', 'CREATE DATABASE copied TEMPLATE house',
	'the owner copies it');
is($node->safe_psql('copied', 'SELECT count(*) FROM dlock_locks'),
	'0', 'the copy has no leases');
as_landlord('house', 'DROP DATABASE house', 'the owner drops it');
let('room');
as_landlord('room', 'DROP DATABASE room WITH (FORCE)',
	'the owner drops it by force');

# The owner changes while the worker runs.
let('cottage');
$fence = $node->safe_psql('cottage', "SELECT dlock_ttl_acquire('rented', '1h')");
my $pid = worker_of('cottage');
$admin->query('CREATE ROLE buyer LOGIN; ALTER DATABASE cottage OWNER TO buyer');
poll('the new owner drops it by force',
	sub {
		$node->psql(
			'postgres', 'DROP DATABASE cottage WITH (FORCE)',
			stderr => \my $error,
			extra_params => [ '-U', 'buyer' ]) == 0;
	});
pass('a new owner drops it by force');
backends_gone($pid);

# A connected session blocks DROP DATABASE, and keeps the worker.
let('shop');
my $tenant = session($node, 'shop', 'user=tenant');
$fence = $tenant->query("SELECT dlock_ttl_acquire('rented', '1h')");
my $kept = worker_of('shop');
my $landlord = session($node, 'postgres', 'user=landlord');
like(
	$landlord->query('DROP DATABASE shop'),
	qr/55006: database "shop" is being accessed by other users/,
	'a connected session blocks the DROP');
is(worker_of('shop'), $kept, 'the worker is still the same after the refused DROP');
is($landlord->query("SELECT pg_terminate_backend($kept)"),
	't', 'the owner may end the worker');
backends_gone($kept);
is($tenant->query("SELECT dlock_check('rented', $fence)"),
	't', 'the lease holds, and the worker starts again');
worker_of('shop');
$tenant->quit;
# The owner ends the leases that it must end before a DROP.
my $owner = session($node, 'shop', 'user=landlord');
is( $owner->query(
		'SELECT count(dlock_force_close(lease)) FROM dlock_leases'),
	'1', 'the owner closes leases of others');
is($owner->query('SELECT count(*) FROM dlock_leases'), '0', 'the leases are gone');

# The owner also opens a lock that a delay keeps closed.
my ($ttl, $delayed) = (ample(1));
poll('a lease that lives long enough to acquire',
	sub {
		$ttl *= 2;
		$delayed =
		  $owner->query("SELECT dlock_lease_open('$ttl s', delay => '1h')");
		return $owner->query("SELECT dlock_try_lease_acquire('delayed', $delayed)")
		  !~ /55L01/;
	});
$owner->wait_for("SELECT dlock_try_acquire('delayed') IS NULL "
	  . "AND NOT EXISTS (SELECT FROM dlock_leases WHERE lease = $delayed)");
is($owner->query("SELECT dlock_force_close($delayed)"),
	'1', 'the owner ends a delay by force');
is($owner->query("SELECT dlock_force_close($delayed) IS NULL"), 't', 'the delay is ended once');
like($owner->query("SELECT dlock_acquire('delayed')"),
	qr/^\d+$/, 'the lock is free');
$owner->quit;
is($landlord->query('DROP DATABASE shop'), '', 'dropped without a connected session');
$landlord->quit;

# A worker exits so that its database can be a template.  Here, a copy with
# rows is made before the first call after a restart.
$node->safe_psql('postgres', 'CREATE DATABASE original');
$node->safe_psql('original', 'CREATE EXTENSION dlock');
$fence =
  $node->safe_psql('original', "SELECT dlock_ttl_acquire('lock', '10min')");
$admin->quit;
$node->restart;
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE original');
is($node->safe_psql('copy', 'SELECT count(*) FROM dlock_queue'),
	'1', 'a row is copied with the database');
is( $node->safe_psql('copy', q{SELECT count(*) FROM dlock_locks}),
	'0', 'the copy has no locks');
is($node->safe_psql('copy', "SELECT dlock_check('lock', $fence)"),
	'f', 'the fence is not valid in the copy');
grows('fences grow', $fence,
	$node->safe_psql('copy',
		"SELECT dlock_try_ttl_acquire('lock', '10min')"));
is($node->safe_psql('copy', 'SELECT count(*) FROM dlock_queue'),
	'1', 'the copied row is discarded');
is($node->safe_psql('original', "SELECT dlock_check('lock', $fence)"),
	't', 'the original holds');

#
# Any session removes dropped spaces.  Only sessions that need a space's
# replacement wait for the removal.
#
$admin = session($node);
$admin->query($_)
  foreach 'SELECT dlock_version()',
  'ALTER SYSTEM SET dlock.worker_idle_timeout = 0', 'SELECT pg_reload_conf()';

# A database with a lease and without sessions
sub make_leased
{
	my ($database) = @_;

	$admin->query("CREATE DATABASE $database");
	$node->safe_psql($database, 'CREATE EXTENSION dlock');
	my $tenant = session($node, $database);
	my $ticket = $tenant->query("SELECT dlock_ttl_acquire('leased', '1h')");
	no_worker($tenant);
	$tenant->quit;
	backends_gone($tenant->{pid});
	return $ticket;
}

# A session that has made its first call in a new database
sub first_in
{
	my ($database) = @_;

	$admin->query("CREATE DATABASE $database");
	$node->safe_psql($database, 'CREATE EXTENSION dlock');
	my $first = session($node, $database);
	$first->query('SELECT dlock_version()');
	return $first;
}

my $first = "SELECT dlock_acquire('first') > 0";
my $used = 'SELECT memory_used FROM dlock_stats';
my $anew = "BEGIN; DROP EXTENSION dlock; CREATE EXTENSION dlock; $first";

SKIP:
{
	skip 'no debugger that can be attached', 19 unless debugger_works($admin);

	# A dropped database is removed.
	my $before = $admin->query($used);
	make_leased('gone');
	$admin->query('DROP DATABASE gone');
	my $by = first_in('by');
	my $stopped = stop_behind($by, 'dlock_queue_purge');
	$by->start($first);
	$stopped->();
	my $new = first_in('new');
	$admin->start('SELECT dlock_advance_ticket(1) > 0');
	$new->start($first);
	# If these sessions wait, they wait for the stopped session.
	my ($reserved, $begun) = map {
		my $session = $_;
		eval { poll('an answer', sub { $session->answered }) }
	} $admin, $new;
	$stopped->();
	ok($reserved, 'other databases reserve numbers while one is removed');
	ok($begun, 'a new database can be used while another is removed');
	is($_->answer, 't', 'the calls return') foreach $admin, $new;
	is($by->answer, 't', 'the dropped database is removed');
	$_->quit foreach $by, $new;
	backends_gone($_->{pid}) foreach $by, $new;
	cmp_ok($admin->query($used), '<=', $before, 'its memory is free');

	# ... with an error
	make_leased('gone');
	$admin->query('DROP DATABASE gone');
	$by = first_in('by_error');
	my $raised = raise_in($by, 'dlock_queue_purge', 'dlock_id_delete');
	$by->start($first);
	$raised->();
	like($by->answer, qr/ERROR/, 'an error interrupts the removal');
	$new = first_in('behind_error');
	is($new->query($first), 't', 'the next session completes the removal');
	$_->quit foreach $by, $new;
	backends_gone($_->{pid}) foreach $by, $new;
	cmp_ok($admin->query($used), '<=', $before, 'no memory is left over');

	# An installation is removed whose DROP is then rolled back.
	my $ticket = make_leased('same');
	my $asked = "SELECT dlock_check('leased', $ticket)";
	my $dropper = session($node, 'same');
	my $user = session($node, 'same');
	$dropper->query('SELECT dlock_version()');
	$stopped = stop_behind($dropper, 'dlock_queue_purge');
	$dropper->start($anew);
	$stopped->();
	$user->start($asked);
	$admin->wait_for("SELECT wait_event_type = 'LWLock' "
		  . "FROM pg_stat_activity WHERE pid = $user->{pid}");
	ok(!$user->answered, 'a session that needs the installation waits for the removal');
	$stopped->();
	is($dropper->answer, 't', 'the installation is removed');
	$dropper->query('ROLLBACK');
	is($user->answer, 't', 'the session loads the installation again');
	no_worker($user);
	$_->quit foreach $user, $dropper;
	backends_gone($_->{pid}) foreach $user, $dropper;

	# ... with an error
	$dropper = session($node, 'same');
	$dropper->query('SELECT dlock_version()');
	$raised = raise_in($dropper, 'dlock_queue_purge', 'dlock_id_delete');
	$dropper->start($anew);
	$raised->();
	like($dropper->answer, qr/ERROR/, 'an error interrupts the removal');
	$dropper->query('ROLLBACK');
	is($node->safe_psql('same', $asked), 't', 'the next session completes the removal');
	is( $node->safe_psql('same', "SELECT dlock_try_acquire('leased') IS NULL"),
		't',
		'the lease holds');
	$dropper->quit;
	backends_gone($dropper->{pid});

	# ... while a session begins to use the installation
	($dropper, $user) = map { session($node, 'same') } 1 .. 2;
	no_worker($user);
	$dropper->query('BEGIN; DROP EXTENSION dlock; CREATE EXTENSION dlock');
	$stopped = stop_behind($dropper, 'LWLockConditionalAcquire');
	$dropper->start($first);
	$stopped->();
	is($user->query("SELECT dlock_fence('mine') IS NULL"),
		't', 'a session begins to use an installation about to be removed');
	$stopped->();
	is($dropper->answer, 't', 'the installation is not removed');
	$dropper->query('ROLLBACK');
	is($user->query("SELECT dlock_acquire('mine') > 0"),
		't', 'the session gets a lock in the installation');
	is($node->safe_psql('same', "SELECT dlock_try_acquire('mine') IS NULL"),
		't', 'no other session gets the lock');
	$_->quit foreach $dropper, $user;
}
$admin->quit;

$node->stop;
done_testing();
