# dlock_locks shows every ticket of a lock with thousands of tickets, in its
# place, blocked only by the holders and the previous request.  So the view's
# size is linear in the number of tickets.
#
# What would break it: a list of all tickets before each waiter, which makes
# the size quadratic; a copy that is truncated.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main');
my $owner = session($node);
my $reader = session($node);

# Each request for slots gets a ticket of its own.
sub enqueue
{
	my ($count, $slots) = @_;

	return $owner->query("SELECT count(DISTINCT dlock_enqueue('lock', 'c', "
		  . "slots => $slots)) FROM generate_series(1, $count)");
}

#
# 5,000 tickets
#
is(enqueue(5000, 1), '5000', 'many tickets');
is( $reader->query(
		q{SELECT count(*), count(DISTINCT ticket), count(*) FILTER (WHERE granted),
				 array_agg(position::bigint) = array_agg(number - 1),
				 sum(cardinality(blocked_by))
			FROM (SELECT *, row_number() OVER (ORDER BY ticket) AS number
					FROM dlock_locks) AS l}),
	'5000|5000|1|t|' . (1 + 2 * 4998),
	'all tickets are there, in order');
is( $reader->query(
		q{SELECT count(*), bool_and(blocked_by = CASE position WHEN 1
					THEN ARRAY[holder] ELSE ARRAY[holder, previous] END)
			FROM (SELECT *, first_value(ticket) OVER w AS holder,
						 lag(ticket) OVER w AS previous
					FROM dlock_locks WINDOW w AS (ORDER BY ticket)) AS l
		   WHERE position > 0}),
	'4999|t',
	'the holder and the previous ticket block each ticket');
is($reader->query('SELECT pg_column_size(array_agg(blocked_by[1:2])) '
		  . "< 5000 * 64 FROM dlock_locks WHERE position > 1"),
	't', 'the view is small');
is($owner->query('SELECT dlock_release_all()'), '5000', 'given back');

# The view names at most 16 blocking holders.
enqueue(22, 20);
is( $reader->query(
		q{SELECT position, cardinality(blocked_by),
				 blocked_by[1:16] = (SELECT array_agg(ticket ORDER BY ticket)
					FROM (SELECT ticket FROM dlock_locks
						   ORDER BY ticket LIMIT 16) AS f)
			FROM dlock_locks WHERE NOT granted ORDER BY position}),
	"1|16|t\n2|17|t",
	'the view does not name all of many holders');
$owner->query('SELECT dlock_release_all()');

$_->quit foreach $owner, $reader;
done_testing();
