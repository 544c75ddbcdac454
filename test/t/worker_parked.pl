# Many leases that count on standbys cost only their heartbeats: the worker
# finds the least ttl without a search.
#
# What would break it: a search for the least ttl whenever a lease with that
# ttl ends; a search although no standby is named; a search for an attached
# lease whenever the worker is idle.
#
# The test measures the worker's CPU time with many and with few leases.  With
# many, it may be a few times as much.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main', conf => 'fsync = off');
my $client = session($node);
my $ticks = '/proc/self/stat';

plan skip_all => 'needs /proc' unless -r $ticks;

# Processor time of the worker, in ticks
sub used
{
	my $pid = worker($client);

	open(my $stat, '<', "/proc/$pid/stat") or die "no worker: $!";
	my @fields = split / /, (<$stat> =~ s/.*\) //r);
	return $fields[11] + $fields[12];
}

# Open and close leases, each with the least ttl.
sub grant_and_release
{
	my ($times) = @_;
	my $before = used();

	$client->query(qq{DO \$\$ BEGIN
		FOR i IN 1..$times LOOP
			PERFORM dlock_release_ticket(dlock_ttl_acquire('lock', '10s'));
		END LOOP;
	END \$\$});
	return used() - $before;
}

$client->query(q{SELECT dlock_lease_open('20h')});
my $few = grant_and_release(3000);
$client->query(
	q{SELECT count(dlock_lease_open('20h')) FROM generate_series(1, 60000)});
is($client->query('SELECT count(*) > 60000 FROM dlock_leases'),
	't', 'many leases');
my $many = grant_and_release(3000);
cmp_ok($many, '<=', 4 * $few + 100, 'many leases do not make the worker slower')
  || diag("$few ticks before");
note("$few and $many ticks");

$client->quit;
$node->stop;
done_testing();
