# A server made from a base backup honours the original's leases.  After
# dlock_reset() it honours none, and none comes back.  The original continues.
#
# What would break it: a lease, a waiter or a delay that is left; rows that
# stay and are read after a restart; a role without the privilege that may
# reset.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main', allows_streaming => 1);
my $clone = PostgreSQL::Test::Cluster->new('clone');
my $lease = $node->safe_psql('postgres', "SELECT dlock_lease_open('1h')");
my $fence =
  $node->safe_psql('postgres', "SELECT dlock_lease_acquire('lock', $lease)");

# A lease with a delay, a ticket with its own ttl, and a waiting ticket
$node->safe_psql('postgres', "SELECT dlock_ttl_acquire('own', '1h')");
$node->safe_psql('postgres', "SELECT dlock_ttl_enqueue('lock', '1h', 'channel')");
my $ttl = ample(2);
$node->safe_psql('postgres',
	"SELECT dlock_lease_acquire('delayed', dlock_lease_open('$ttl s', delay => '1h'))");
$node->backup('backup');
$clone->init_from_backup($node, 'backup');
$clone->start;

sub ask
{
	my ($sql) = @_;

	return $clone->safe_psql('postgres', $sql);
}

# Add a foreign row before the tables are loaded.
ask('INSERT INTO dlock_queue SELECT (jsonb_populate_record(q, '
	  . q('{"system": 1, "ticket": 7}')
	  . ")).* FROM dlock_queue q WHERE name = 'own'");
is(ask("SELECT dlock_check('lock', $fence)"), 't', 'a clone honours leases');
ask('CREATE ROLE somebody');
fails_with(
	$clone, 'postgres', 'SET ROLE somebody; SELECT dlock_reset()',
	qr/42501: permission denied for function dlock_reset/,
	'a role without the privilege is refused');
$clone->poll_query_until('postgres',
	q{SELECT EXISTS (SELECT FROM dlock_locks WHERE name = 'delayed' AND NOT granted AND position = 0)}
) or die 'no delay';
# The expired lease, whose delay keeps its lock closed, is not counted.
is(ask('SELECT dlock_reset()'), '3', 'all leases end');
is( ask('SELECT dlock_try_acquire(n) IS NOT NULL FROM '
		  . "unnest('{lock,own,delayed}'::text[]) AS n"),
	"t\nt\nt",
	'their locks are free');
is(ask('SELECT count(*) FROM dlock_leases'), '0', 'no lease is there');
is(ask("SELECT dlock_renew($lease) IS NULL"), 't', 'nor can it be renewed');
$clone->poll_query_until('postgres',
	'SELECT NOT EXISTS (SELECT FROM dlock_queue) AND NOT EXISTS (SELECT FROM dlock_queue_lease)')
  or die 'rows are left';
is(ask('SELECT dlock_reset()'), '0', 'a second reset ends nothing');
$clone->restart;
is(ask('SELECT count(*) FROM dlock_locks'), '0', 'nothing comes back');
like(
	slurp_file($clone->logfile),
	qr/LOG:  dlock_reset\(\) has ended \d+ leases/,
	'the log reports the reset');
is($node->safe_psql('postgres', "SELECT dlock_check('lock', $fence)"),
	't', 'the original goes on');

done_testing();
