# If there is no slot for a worker, leases keep their locks and can be renewed.
# A call that needs a row gets an error and leaves nothing.  Session and
# transaction scope are not affected.
#
# What would break it: a call that waits for a worker that cannot start; a lock
# that is handed over although no process can write the lease's expiry; a
# ticket or a name that a failed call leaves behind.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main');
my $client = session($node);

my $lease = $client->query("SELECT dlock_lease_open('10min')");
my $fence = $client->query("SELECT dlock_lease_acquire('held', $lease)");
my $short = $client->query("SELECT dlock_ttl_acquire('short', '10min')");
$client->quit;
$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
$node->restart;
$client = session($node);
# The ttl is short only from the first call on, so that the lease cannot expire
# before.
$client->query("UPDATE dlock_queue SET ttl = '1s' WHERE ticket = $short");
is($client->query("SELECT dlock_try_acquire('held') IS NULL"),
	't', 'a name that a lease holds is closed');
is( $client->query(
		"SELECT dlock_check('held', $fence), dlock_renew($lease)"),
	't|1',
	'the lease has the name');
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
		"$call fails");
	is( $client->query(
			q{SELECT (SELECT count(*) FROM dlock_locks WHERE name LIKE 'new%'),
					 (SELECT count(*) FROM dlock_leases WHERE info = 'new')}),
		'0|0',
		'... leaves nothing');
	ok(is_free($client, 'new') && is_free($client, 'new 2'),
		'... and the names are free');
}
is($client->query("SELECT dlock_lease_acquire('held', $lease)"),
	$fence, 'a repeated request of the lease needs no worker');
others_go_on($client, 'no worker');
$client->wait_for("SELECT NOT dlock_check('short', $short)");
is($client->query("SELECT dlock_try_acquire('short') IS NULL"),
	't', 'a name stays closed if no worker can write the lease\'s expiry');
$client->quit;

$node->stop;
done_testing();
