# With track_commit_timestamp, each of the worker's commits has the time of the
# commit: on the primary, on a standby, after a crash, and in decoded WAL.
#
# What would break it: the worker's commits have an origin, and therefore a
# separate time in the WAL, which the worker must set.  On the primary alone, a
# wrong time would not be visible.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Standby;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server(
	'primary',
	allows_streaming => 1,
	conf => q{
track_commit_timestamp = on
wal_level = logical
});

my $standby = new_standby($node, 'standby');

my $client = session($node);
my @commits;	# transaction id, and the times of the request and the answer

sub acquire
{
	my ($name) = @_;
	my $before = $client->query('SELECT clock_timestamp()');
	my $ticket = $client->query("SELECT dlock_ttl_acquire('$name', '1h')");

	push @commits,
	  [
		$client->query("SELECT xmin FROM dlock_queue WHERE ticket = $ticket"),
		$before, $client->query('SELECT clock_timestamp()')
	  ];
	return $ticket;
}

sub times_are_right
{
	my ($server, $where) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	foreach my $commit (@commits)
	{
		my ($xid, $before, $after) = @$commit;
		my $time = $server->safe_psql('postgres',
			"SELECT coalesce(pg_xact_commit_timestamp('$xid'), '-infinity')");

		is( $server->safe_psql(
				'postgres',
				"SELECT '$time'::timestamptz BETWEEN '$before' AND '$after'"),
			't',
			"$where: transaction $xid was committed when it was")
		  || diag("committed at $time, between $before and $after");
	}
	return;
}

# A worker's first commit, and later ones
$client->query(
	q{SELECT pg_create_logical_replication_slot('slot', 'pgoutput')});
$client->query('CREATE PUBLICATION all_tables FOR ALL TABLES');
acquire("lock $_") foreach 1 .. 2;
$client->query(
	'SELECT pg_terminate_backend(' . worker($client) . ', 60000)');
my $ticket = acquire('lock 3');
# Let time pass.  Transactions without rows do not record their time.
$client->query('SELECT pg_sleep(0.1)');
acquire('lock 4');
times_are_right($node, 'primary');

$node->wait_for_catchup($standby);
times_are_right($standby, 'standby');

# Each transaction begins with a message: last position, time and number.
my ($first, $latest) = @commits[ 0, -1 ];
is( $client->query(qq{
		SELECT bool_and(('x' || encode(substr(data, 10, 8), 'hex'))::bit(64)::bigint / 1e6
					>= extract(epoch FROM '$first->[1]'::timestamptz - '2000-01-01Z'))
		  FROM pg_logical_slot_get_binary_changes('slot', NULL, NULL,
			'proto_version', '1', 'publication_names', 'all_tables')
		 WHERE get_byte(data, 0) = ascii('B')}),
	't',
	'decoded WAL has the same times');

$client->quit;
$node->stop('immediate');
$node->start;
times_are_right($node, 'after a crash');
$client = session($node);
is($client->query("SELECT dlock_check('lock 3', $ticket)"),
	't', '... and the lease is there');

$node->stop('immediate');
$standby->promote;
times_are_right($standby, 'promoted');
is( $standby->safe_psql('postgres', "SELECT dlock_check('lock 3', $ticket)"),
	't', '... and the lease is there');

$client->quit;
$standby->stop;
done_testing();
