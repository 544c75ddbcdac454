# A name space belongs to a database and an installation of the extension.  Two
# name spaces never share a lock, a new name space starts empty, and fences
# grow across all name spaces of a database.
#
# What would break it: a cached name space that survives DROP EXTENSION, or
# does not survive its rollback; a sequence that is looked up in its old
# schema; numbers of a new installation that repeat an old installation's.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main');

# uses up every number that is reserved in memory
my $use_up = 'SELECT count(dlock_release_ticket(dlock_acquire(n::text))) '
  . 'FROM generate_series(1, 300000) AS n';

#
# Two databases
#
$node->safe_psql('postgres', 'CREATE DATABASE a');
$node->safe_psql('postgres', 'CREATE DATABASE b');
$node->safe_psql($_, 'CREATE EXTENSION dlock') foreach 'a', 'b';

my $a = session($node, 'a');
my $b = session($node, 'b');
my $a2 = session($node, 'a');

my @a = $a->query("SELECT dlock_try_acquire('lock')");
my @b = $b->query("SELECT dlock_try_acquire('lock')");
like("$a[0] $b[0]", qr/^\d+ \d+$/, 'one name is two locks in two databases');
is($a2->query("SELECT dlock_try_acquire('lock') IS NULL"),
	't', 'in each database, the name is one lock');
is($_->[0]->query('SELECT pid FROM dlock_locks'),
	$_->[1]{pid}, 'each database shows its own lock')
  foreach [ $a2, $a ], [ $b, $b ];
is($b->query("SELECT dlock_force_release($a[0])"),
	$a[0] == $b[0] ? 't' : 'f', 'a database cannot release another database\'s lock');
is($a->query("SELECT dlock_is_held('lock')"), 't', 'still held');

#
# DROP EXTENSION with holders
#
# After its rollback, nothing has changed.
$a2->query('BEGIN; DROP EXTENSION dlock; ROLLBACK');
is($a2->query("SELECT dlock_try_acquire('lock') IS NULL"),
	't', 'the holder keeps its lock if DROP EXTENSION is rolled back');
is($a->query("SELECT dlock_acquire('lock')"), $a[0], 'with its fence');
is($a->query("SELECT dlock_release('lock')"), 't', 'and its count');

# A new installation that is rolled back changes nothing, either.  Locks that
# were acquired in it are not held in the old installation.
$a2->query('BEGIN; DROP EXTENSION dlock; CREATE EXTENSION dlock');
is( $a2->query("SELECT dlock_acquire('lock') > 0, dlock_acquire('another') > 0"),
	't|t', 'a new installation has locks of its own');
$a2->query('ROLLBACK');
is( $a2->query("SELECT dlock_is_held('lock'), dlock_is_held('another')"),
	'f|f', 'the locks of an installation that was rolled back are gone');
is($a2->query("SELECT dlock_try_acquire('lock') IS NULL"),
	't', 'the old holder still holds the lock');
push @a, $a2->query("SELECT dlock_acquire('another')");
grows('fences grow across an installation rolled back', @a);

# A new installation starts empty, and its fences are greater.
$a2->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
is($a2->query('SELECT count(*) FROM dlock_locks'),
	'0', 'a new installation starts empty');
push @a, $a2->query("SELECT dlock_acquire('lock')");
grows('fences grow across DROP and CREATE EXTENSION', @a);
like(
	$a->query("SELECT dlock_release('lock')"),
	qr/WARNING:  55000: this session does not hold.*^f$/ms,
	'an old holder does not hold in the new installation');
is($a->query("SELECT dlock_try_acquire('lock') IS NULL"),
	't', 'an old holder does not get a busy lock');
push @a, $a->query("SELECT dlock_acquire('more')");
grows('an old holder gets a greater fence', @a);

# Again, five times, with a waiter in the queue and locks left over
foreach my $round (1 .. 5)
{
	my $waiter = session($node, 'a');

	push @a, $a->query("SELECT dlock_acquire('round $round')");
	$waiter->start("SELECT dlock_acquire('round $round') > 0");
	$a2->until_waits($waiter);
	$a2->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
	push @a, $a2->query("SELECT dlock_try_acquire('round $round')");
	$a->query('SELECT dlock_release_all()');
	like($waiter->answer, qr/55L01: lock "round $round" is gone/,
		'a waiter of an old installation gets an error');
	$waiter->quit;
}
grows('fences grow across many installations', @a);
$a->quit;
is($a2->query('SELECT string_agg(name, \' \') FROM dlock_locks'),
	'round 5', 'old holders leave nothing when they exit');
$a2->quit;
ok( $node->poll_query_until('a', 'SELECT count(*) = 0 FROM dlock_locks'),
	'new holders leave nothing when they exit');

# The locks of one session in many installations at once
{
	my $session = session($node, 'a');
	my @fences;

	foreach (1 .. 20)
	{
		push @fences, $session->query("SELECT dlock_acquire('lock')");
		$session->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
	}
	grows('one session holds in many installations', @a, @fences);
	is($session->query('SELECT dlock_release_all()'),
		'20', 'the session releases all of its locks');
	push @a, @fences, $session->query("SELECT dlock_acquire('lock')");

	# ... even if an administrator requests equal numbers in two installations
	foreach (1 .. 2)
	{
		$session->query('SELECT dlock_advance_ticket((2^50)::bigint)');
		push @a, $session->query("SELECT dlock_acquire('lock $_')");
		is($session->query("SELECT dlock_release_ticket($a[-1])"),
			't', 'the right ticket is released');
		push @a, $session->query("SELECT dlock_acquire('another $_')");
		$session->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
	}
	grows('fences grow if they are ahead of the time', @a);
	$session->quit;
}

# An installation that is rolled back has given numbers, too.  While a session
# holds a number, no other ticket gets the same number.
{
	my $session = session($node, 'postgres');

	$session->query('SELECT dlock_advance_ticket((2^51)::bigint)');
	$session->query('BEGIN; DROP EXTENSION dlock; CREATE EXTENSION dlock');
	like($session->query("SELECT dlock_acquire('lock')"),
		qr/^\d+$/, 'held in an installation that is rolled back');
	$session->query('ROLLBACK');
	is($session->query($use_up), '300000', 'the numbers of that installation are not drawn again');
	$session->quit;
}

#
# Schemas
#
$node->safe_psql('a',
	'CREATE SCHEMA one; CREATE SCHEMA "Two";'
	  . 'DROP EXTENSION dlock; CREATE EXTENSION dlock SCHEMA one');
$a = session($node, 'a');
push @a, $a->query("SELECT one.dlock_acquire('lock')");
grows('fences grow in another schema', @a);
$a2 = session($node, 'a');
$a2->query('ALTER EXTENSION dlock SET SCHEMA "Two"');
like($a->query("SELECT one.dlock_acquire('lock')"),
	qr/42883/, 'after SET SCHEMA, the functions have moved');
is($a->query(q{SELECT "Two".dlock_acquire('lock')}),
	$a[-1], 'the lock is still held');
is($a2->query(q{SELECT "Two".dlock_try_acquire('lock') IS NULL}),
	't', 'other sessions see that the lock is held');
$a->query('SET search_path = "Two"');
is($a->query($use_up), '300000', 'numbers are reserved from the moved sequence');
push @a, $a->query("SELECT dlock_acquire('more')");
grows('fences grow across SET SCHEMA', @a);
$a2->query('ALTER EXTENSION dlock SET SCHEMA public');
$a->quit;
$a2->quit;

#
# Databases that are copied, renamed and dropped
#
$b->quit;
push @b, fence($node, 'b');
$node->safe_psql('postgres', "CREATE DATABASE c TEMPLATE b STRATEGY $_;"
	  . "ALTER DATABASE c RENAME TO $_")
  foreach 'wal_log', 'file_copy';
foreach my $copy ('wal_log', 'file_copy')
{
	is($node->safe_psql($copy, 'SELECT count(*) FROM dlock_locks'),
		'0', "$copy: a copy has no locks");
	grows("$copy: fences grow from the original to the copy",
		@b, fence($node, $copy));
}
push @b, fence($node, 'b');
grows('fences grow in the original', @b);

# ... also if they are ahead of the time
$node->safe_psql('b', 'SELECT dlock_advance_ticket((2^51)::bigint)');
push @b, fence($node, 'b');
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE b');
grows('fences grow from an original ahead of the time',
	@b, fence($node, 'copy'));

$b = session($node, 'copy');
$b->query("SELECT dlock_acquire('lock')");
$node->safe_psql('postgres', 'DROP DATABASE copy WITH (FORCE)');
backends_gone($b->{pid});
$b->quit;
$node->safe_psql('postgres', 'DROP DATABASE wal_log');
$node->safe_psql('postgres', 'CREATE DATABASE wal_log TEMPLATE a');
is($node->safe_psql('wal_log', 'SELECT count(*) FROM dlock_locks'),
	'0', 'a database with the name of a dropped database has no locks');
grows('that database has greater fences', @a, fence($node, 'wal_log'));
is($node->safe_psql('a', 'SELECT count(*) FROM dlock_locks'),
	'0', 'all is released at the end');

# The end of the numbers
$node->safe_psql('postgres', 'CREATE DATABASE last');
$node->safe_psql('last', 'CREATE EXTENSION dlock');
my $last = 2**53 - 1 - 2**18;
$node->safe_psql('last', "SELECT dlock_advance_ticket($last)");
fails_with($node, 'last', $use_up,
	qr/2200H: out of ticket numbers.*DETAIL:  \S.*HINT:  \S/s, 'numbers end at 2^53');
$node->stop;
done_testing();
