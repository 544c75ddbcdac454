#
# The tables of leases stay small, however many tickets come and go: the worker
# vacuums them itself, as autovacuum comes too rarely for that.
#
# Without that, the table would have a dead row for every ticket that there
# ever was.
#

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main', conf => 'autovacuum = off');

# Acquire many locks on a lease, and close it; that leaves so many dead rows.
sub come_and_go
{
	my ($count) = @_;
	is( $node->safe_psql('postgres', qq{
			SELECT dlock_lease_close(lease) FROM (
				SELECT lease, dlock_lease_acquire_all(names, lease)
				FROM dlock_lease_open('1h') AS lease,
					(SELECT array_agg('lock ' || i) AS names
					FROM generate_series(1, $count) AS i) AS n
				OFFSET 0) AS l}),
		$count,
		"$count tickets have come and gone");
	$node->poll_query_until('postgres', 'SELECT count(*) = 0 FROM dlock_queue')
	  or die 'rows stay';
	return;
}

sub vacuums
{
	my ($more_than) = @_;
	return $node->poll_query_until('postgres',
		"SELECT vacuum_count > $more_than FROM pg_stat_user_tables "
		  . "WHERE relname = 'dlock_queue'");
}

come_and_go(12000);
ok(vacuums(0), 'the table was vacuumed');
my $size =
  $node->safe_psql('postgres', "SELECT pg_relation_size('dlock_queue')");
foreach my $round (1 .. 3)
{
	come_and_go(12000);
	ok(vacuums($round), 'and again');
}
cmp_ok($node->safe_psql('postgres', "SELECT pg_relation_size('dlock_queue')"),
	'<', 2 * $size, 'it has not grown by what came and went');

# Where an old snapshot keeps the dead rows, the worker goes on.
my $old = session($node);
$old->query('BEGIN ISOLATION LEVEL REPEATABLE READ');
$old->query('SELECT count(*) FROM dlock_queue');
come_and_go(12000) foreach 1 .. 2;
$old->query('COMMIT');
$old->quit;
come_and_go(12000);

$node->stop;
done_testing();
