# The table of locks grows bucket by bucket, while sessions look up their
# locks, and views read the whole table.  No session misses a lock or finds one
# twice.
#
# What would break it: a bucket that is split wrongly, or looked up by the
# table's former size; a view that loses its position; an entry that is reused
# while it is in a list, or for a name that does not fit.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $many = 100000;
my $kept = 300;
my $node = new_server('main', conf => "dlock.max_memory = '256MB'\n");
my ($keeper, $viewer, $finder, @writers) = map { session($node) } 1 .. 5;

# Names of all lengths.  Some differ only in their last byte.
sub name
{
	my ($writer) = @_;
	return "$writer || ' ' || repeat('x', n % 200) || n";
}

sub acquire
{
	my ($writer, $from) = @_;
	my $name = name($writer);

	return "SELECT count(dlock_acquire($name)) FROM generate_series($from, $many) AS n";
}

$_->query("SET dlock.max_locks_per_session = $many; SET statement_timeout = '"
	  . ample(300) . "s'")
  foreach $keeper, $viewer, $finder, @writers;
is( $keeper->query("SELECT count(dlock_acquire('kept ' || n)) "
		  . "FROM generate_series(1, $kept) AS n"),
	$kept, 'what stays');
$keeper->query("SELECT dlock_acquire('growing')");

# Until the table has grown, count the reads that see too few or too many
# locks, and note if there was a read.
my $looks = q{
	CREATE FUNCTION looks(wrong text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		bad integer := 0;
		is_wrong boolean;
	BEGIN
		LOOP
			EXECUTE wrong INTO is_wrong;
			bad := bad + is_wrong::integer;
			EXIT WHEN dlock_fence('growing') IS NULL;
		END LOOP;
		RETURN bad || ' wrong';
	END $$};
$node->safe_psql('postgres', $looks);
$viewer->start("SELECT looks('SELECT count(*) <> $kept OR count(DISTINCT name) <> $kept "
	  . "FROM dlock_locks WHERE name LIKE ''kept %''')");
$finder->start("SELECT looks('SELECT count(dlock_fence(''kept '' || n)) <> $kept "
	  . "OR count((SELECT ticket FROM dlock_locks(''kept '' || n))) <> $kept "
	  . "FROM generate_series(1, $kept) AS n')");

$writers[$_]->start(acquire($_, 1)) foreach 0, 1;
is($writers[$_]->answer, $many, 'many locks') foreach 0, 1;
is( $writers[0]->query('SELECT count(dlock_release(' . name(0)
		  . ")) FROM generate_series(1, $many / 2) AS n"),
	$many / 2,
	'half of the locks are released');
$keeper->query("SELECT dlock_release('growing')");
is($viewer->answer, '0 wrong', 'views have shown each held lock once');
is($finder->answer, '0 wrong', 'each lock was found by its name');

my $sum = 3 * $many / 2 + $kept;
is( $viewer->query("SELECT count(*) = $sum, count(DISTINCT name) = $sum "
		  . 'FROM dlock_locks'),
	't|t',
	'each lock exists once');
is( $finder->query('SELECT count(dlock_fence(' . name(0)
		  . ")) FROM generate_series(1, $many) AS n"),
	$many / 2,
	'each lock that was not released is found');

# Short names after long names, and the reverse
is( $finder->query(q{SELECT count(*) FROM (
		SELECT dlock_acquire(name) AS fence, dlock_release(name) AS released, name
		  FROM generate_series(1, 20000) AS n,
			   LATERAL (SELECT repeat('y', 1 + n * 7 % 255) AS name) AS x) AS t
		 WHERE fence > 0 AND released}),
	'20000',
	'one lock after the other, of all lengths');

is($writers[0]->query('SELECT dlock_release_all()'), $many / 2, 'released');
$writers[1]->quit;
$node->poll_query_until('postgres', "SELECT count(*) = $kept FROM dlock_locks")
  or die 'locks of an ended session are left';
is( $keeper->query("SELECT count(*), count(dlock_fence(name)) FROM dlock_locks"),
	"$kept|$kept",
	'the held locks are left');

is($writers[0]->query(acquire(0, $many / 2 + 1)), $many / 2, 'and again');
is( $keeper->query('SELECT count(*), count(DISTINCT name) FROM dlock_locks'),
	join('|', ($many / 2 + $kept) x 2),
	'many');

$_->quit foreach $keeper, $viewer, $finder, $writers[0];
$node->stop;
done_testing();
