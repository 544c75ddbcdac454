# What dlock_locks shows of a lock with thousands of tickets: every one of them,
# in its place, with no more than the holders in its way and the one request
# before it; so all of it grows with the number of tickets, and no faster.  It is
# copied in parts, and others get on with the lock in between: what leaves it
# or changes from waiting to holding meanwhile is shown once, or not at all.
#
# What would break it: a list of all that stand before a waiter, which is the
# square of the queue's length; a copy that goes on with a ticket that has left
# the list, and whose memory is somebody else's by then; a ticket that is
# shown as a waiter and as a holder, or as neither.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Test::More;

my $node = new_server('main');
my $owner = session($node);
my $reader = session($node);

# A ticket of slots is never another one's, whoever asks.
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
	'all are there, in their order');
is( $reader->query(
		q{SELECT count(*), bool_and(blocked_by = CASE position WHEN 1
					THEN ARRAY[holder] ELSE ARRAY[holder, previous] END)
			FROM (SELECT *, first_value(ticket) OVER w AS holder,
						 lag(ticket) OVER w AS previous
					FROM dlock_locks WINDOW w AS (ORDER BY ticket)) AS l
		   WHERE position > 0}),
	'4999|t',
	'each after the holder and the one before it');
is($reader->query('SELECT pg_column_size(array_agg(blocked_by[1:2])) '
		  . "< 5000 * 64 FROM dlock_locks WHERE position > 1"),
	't', 'so all of it is small');
is($owner->query('SELECT dlock_release_all()'), '5000', 'given back');

# Holders: the first 16
enqueue(22, 20);
is( $reader->query(
		q{SELECT position, cardinality(blocked_by),
				 blocked_by[1:16] = (SELECT array_agg(ticket ORDER BY ticket)
					FROM (SELECT ticket FROM dlock_locks
						   ORDER BY ticket LIMIT 16) AS f)
			FROM dlock_locks WHERE NOT granted ORDER BY position}),
	"1|16|t\n2|17|t",
	'not all of many holders');
$owner->query('SELECT dlock_release_all()');

#
# What happens between two parts
#
my $works = debugger_works($reader);
SKIP:
{
	skip 'no debugger that can be attached', 1 unless $works;

	# what is there by its place in the queue, which begins with 0, the holder
	my $places = q{SELECT array_agg(ticket ORDER BY ticket) FROM dlock_locks};
	my %meanwhile = (
		'nothing' => [ [], [ 0 .. 999 ] ],
		'the next to be copied leave' => [ [ 257 .. 299 ], [ 0 .. 256, 300 .. 999 ] ],
		'the last ones leave' => [ [ 257 .. 999 ], [ 0 .. 256 ] ],
		'one that was copied is granted' => [ [0], [ 1 .. 999 ] ],
		'one that was not is granted' => [ [ 0 .. 299 ], [ 300 .. 999 ] ],
		'some are granted, the next leave' =>
		  [ [ 257 .. 270, 0 .. 9 ], [ 10 .. 256, 271 .. 999 ] ],
		'all leave' => [ [ 0 .. 999 ], [] ]);

	foreach my $what (sort keys %meanwhile)
	{
		my ($leave, $rest) = @{ $meanwhile{$what} };

		enqueue(1000, 1);
		my @tickets = split /,/, $reader->query($places) =~ tr/{}//dr;
		my %place = map { $tickets[$_] => $_ } 0 .. $#tickets;
		my $stop = stop_behind($reader, 'dlock_lock_release');

		$reader->start('SELECT ticket, granted, position FROM dlock_locks');
		$stop->();
		$owner->query('SELECT '
			  . join(', ', map { "dlock_release_ticket($tickets[$_])" } @$leave))
		  if @$leave;
		# what they had is used by others
		$owner->query("SELECT count(dlock_acquire('other', slots => 2000)) "
			  . 'FROM generate_series(1, 100)');
		$owner->query("SELECT count(dlock_release('other')) "
			  . 'FROM generate_series(1, 100)');
		$stop->();
		is( join(
				' ',
				map { join('|', $place{ (split /\|/)[0] } // '?', (split /\|/)[1, 2]) }
				  split /\n/, $reader->answer),
			join(' ', map { "$rest->[$_]|" . ($_ ? 'f' : 't') . "|$_" } 0 .. $#$rest),
			"meanwhile $what");
		$owner->query('SELECT dlock_release_all()');
	}
}

$_->quit foreach $owner, $reader;
done_testing();
