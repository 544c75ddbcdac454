# After a suspend, the server does not honour leases that expired during it,
# because another server may have granted their locks.
#
# What would break it: an expiry by CLOCK_MONOTONIC, which stops during a
# suspend.
#
# The test advances only CLOCK_BOOTTIME, as a suspend does.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Clock;
use Dlock::Test;
use Test::More;

plan skip_all => 'needs Linux and a C compiler' unless clock_is_ours();

my $node = new_server_of_clock('main');
my $client = session($node);
my $waiter = session($node);
my $attached = session($node);

my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $by_lease = $client->query("SELECT dlock_lease_acquire('a', $lease)");
my $by_ttl = $client->query("SELECT dlock_ttl_acquire('b', '1h')");
my $by_session = $client->query("SELECT dlock_acquire('c')");
my $kept = $attached->query("SELECT dlock_lease_open('1h', attach => true)");
my $long = $client->query("SELECT dlock_lease_open('3h')");

$waiter->start("SELECT dlock_acquire('a')");
$client->until_waits($waiter);
time_passes(30 * 60);
is($client->query("SELECT dlock_renew($lease), dlock_check('b', $by_ttl)"),
	'1|t', 'after half an hour of suspend, all leases exist');
ok(!$waiter->answered, 'no other session has their locks');

# "b" was not renewed.  The other lease was renewed half an hour later.
time_passes(2 * 60 * 60);
is( $client->query(
		"SELECT dlock_check('a', $by_lease), dlock_check('b', $by_ttl), "
		  . "dlock_renew($lease) IS NULL, dlock_renew($by_ttl) IS NULL"),
	'f|f|t|t',
	'after two more hours, a lease with an hour left is gone');
like($client->query("SELECT dlock_guard('a', $by_lease)"),
	qr/55L01/, 'the lost lock guards nothing');
grows('the next in line is granted', $by_lease, $waiter->answer);
is( $client->query(
		"SELECT dlock_check('c', $by_session), "
		  . "dlock_renew($kept), dlock_renew($long)"),
	't|0|0',
	'an attached lease and a lease with time left exist');

# The waiting time is measured by that clock, too.
my $enqueued = $waiter->query(q{SELECT dlock_enqueue('c', 'nobody')});
time_passes(60 * 60);
is( $client->query(
		q{SELECT waiting, oldest_wait >= '1h' AND oldest_wait < '2h' FROM dlock_stats}),
	'1|t', 'an hour of waiting');
$waiter->query("SELECT dlock_release_ticket($enqueued)");

# The ttl of an attached lease begins at the session's end.
$attached->quit;
backends_gone($attached->{pid});
is($client->query("SELECT dlock_renew($kept)"), '0', 'the session ends');
time_passes(60 * 60);
is($client->query("SELECT dlock_renew($kept) IS NULL"),
	't', 'an hour later, the formerly attached lease is gone');

$_->quit foreach $client, $waiter;
done_testing();
