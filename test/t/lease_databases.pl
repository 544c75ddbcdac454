# Leases belong to one installation of the extension in one database.  They stay
# where it moves, and where its DROP is rolled back; they go with it, and with
# the database; and a copy of the database honours none of them.
#
# What would break it: a worker that looks for its tables where they were, or
# that stays when they are gone, or are to go, or is still the process of an owner
# from before; a waiter that nobody tells; a row
# that is taken for a lease wherever it is found.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main');
my $client = session($node);
my $admin = session($node);

#
# The extension goes, comes back, and moves
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
	'3', 'and writes there');

# Dropped: the leases are gone, and nobody waits for them any more.
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

#
# A database's owner, who is nobody else: leases of others are not in the way
#
$admin->query('CREATE ROLE landlord LOGIN CREATEDB; CREATE ROLE tenant LOGIN');

# The worker of a database, which is not for all to see
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

# Runs a command as the owner; the worker is there before, for a lease of others
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
	't', 'and its leases stay');
as_landlord('house', 'CREATE DATABASE copied TEMPLATE house',
	'the owner copies it');
is($node->safe_psql('copied', 'SELECT count(*) FROM dlock_locks'),
	'0', 'without its leases');
as_landlord('house', 'DROP DATABASE house', 'the owner drops it');
let('room');
as_landlord('room', 'DROP DATABASE room WITH (FORCE)',
	'the owner drops it by force');

# another owner, while the worker is there
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

# who is connected is in the way, and keeps the worker
let('shop');
my $tenant = session($node, 'shop', 'user=tenant');
$fence = $tenant->query("SELECT dlock_ttl_acquire('rented', '1h')");
my $kept = worker_of('shop');
my $landlord = session($node, 'postgres', 'user=landlord');
like(
	$landlord->query('DROP DATABASE shop'),
	qr/55006: database "shop" is being accessed by other users/,
	'but not while somebody is connected');
is(worker_of('shop'), $kept, 'nor is it left without its worker for that');
is($landlord->query("SELECT pg_terminate_backend($kept)"),
	't', 'the owner may end the worker');
backends_gone($kept);
is($tenant->query("SELECT dlock_check('rented', $fence)"),
	't', 'which comes again');
worker_of('shop');
$tenant->quit;
# what the owner is asked to clear up, is ended
my $owner = session($node, 'shop', 'user=landlord');
is( $owner->query(
		'SELECT count(dlock_force_close(lease)) FROM dlock_leases'),
	'1', 'the owner closes leases of others');
is($owner->query('SELECT count(*) FROM dlock_leases'), '0', 'and they are gone');

# and what a delay keeps closed
my ($ttl, $delayed) = (ample(1));
poll('a lease that lives for long enough',
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
	'1', 'a delay is ended by force');
is($owner->query("SELECT dlock_force_close($delayed) IS NULL"), 't', 'once');
like($owner->query("SELECT dlock_acquire('delayed')"),
	qr/^\d+$/, 'and the lock is free');
$owner->quit;
is($landlord->query('DROP DATABASE shop'), '', 'dropped with nobody connected');
$landlord->quit;

# A template must not be in use, and a worker is a user, if one that makes way:
# a copy with rows is made here before the first call after a restart.
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

$node->stop;
done_testing();
