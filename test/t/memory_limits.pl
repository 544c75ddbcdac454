# Beyond dlock.max_locks_per_session or dlock.max_memory, a request fails.  No
# session loses a lock, and superusers can still lock.  After a release,
# requests succeed again.
#
# What would break it: a request that fails half done; memory that is not
# freed, or not counted as freed; one session's memory that another one needs
# for a release.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main');
$node->safe_psql(
	'postgres', q{
	CREATE ROLE ordinary LOGIN;
	CREATE FUNCTION fill(prefix text, how_many integer) RETURNS integer
	LANGUAGE plpgsql AS $$
	BEGIN
		FOR n IN 1 .. how_many LOOP
			BEGIN
				PERFORM dlock_acquire(prefix || n);
			EXCEPTION WHEN out_of_memory THEN
				RETURN n - 1;
			END;
		END LOOP;
		RETURN how_many;
	END $$});

my $ordinary = session($node, 'postgres', 'user=ordinary');
my $superuser = session($node);

sub held
{
	return $superuser->query('SELECT count(*) FROM dlock_locks');
}

#
# The limit of a session
#
$ordinary->query("SELECT dlock_is_held('lock')");
like(
	$ordinary->query('SET dlock.max_locks_per_session = 10'),
	qr/42501: permission denied/,
	'not every role can set dlock.max_locks_per_session');
$superuser->query('ALTER ROLE ordinary SET dlock.max_locks_per_session = 10');
$ordinary->quit;
$ordinary = session($node, 'postgres', 'user=ordinary');

is($ordinary->query("SELECT fill('lock ', 11)"), '10', 'ten locks, not eleven');
my $too_many = qr/53200: too many locks in this session.*HINT:  \S/s;
foreach my $function ('acquire', 'try_acquire', 'xact_acquire')
{
	like($ordinary->query("SELECT dlock_$function('one more')"),
		$too_many, "error with a hint: dlock_$function()");
}
is(held(), '10', 'all of them are still held');
is($ordinary->query("SELECT dlock_acquire('lock 1') > 0"),
	't', 'a lock that is acquired again counts once');
$ordinary->query('BEGIN');
is($ordinary->query("SELECT dlock_xact_acquire('lock 1') > 0"),
	't', 'a lock that is acquired in the other scope counts once');
$ordinary->query('COMMIT');
is($superuser->query("SELECT dlock_acquire('one more') > 0"),
	't', 'other sessions have their own limit');
$superuser->query('SELECT dlock_release_all()');

$ordinary->query("SELECT dlock_release('lock 2')");
is($ordinary->query("SELECT fill('other ', 2)"),
	'1', 'one release makes room for one lock');
$ordinary->query("SELECT dlock_release('lock 3')");
$ordinary->query("SELECT dlock_release('lock 4')");
like($ordinary->query("SELECT dlock_acquire_all('{a, b, c}')"),
	$too_many, 'three at once do not fit where two do');
is(held(), '8', 'the failed call leaves no lock');
is($ordinary->query("SELECT cardinality(dlock_acquire_all('{a, b}'))"),
	'2', 'two at once fit');
is($ordinary->query('SELECT dlock_release_all()'), '10', 'all released');
is($ordinary->query("SELECT fill('again ', 11)"), '10', 'and ten again');

# A waiter counts like a holder, until its wait ends.
$superuser->query("SELECT dlock_acquire('wanted')");
$ordinary->query("SELECT dlock_release('again 1')");
is( $ordinary->query(
		"SELECT dlock_try_acquire('wanted', '1ms') IS NULL") =~ tr/t//,
	1,
	'a wait that times out');
is($ordinary->query("SELECT fill('more ', 2)"), '1', 'takes no room');
$superuser->query('SELECT dlock_release_all()');
$ordinary->quit;
$superuser->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$superuser->query('ALTER ROLE ordinary RESET ALL');
$superuser->query('ALTER ROLE ordinary SET dlock.max_memory_per_role = 100');

#
# The limit of all sessions together
#
sub restart_with
{
	my ($size) = @_;

	$superuser->query("ALTER SYSTEM SET dlock.max_memory = '$size'");
	$superuser->quit;
	$node->restart;
	$superuser = session($node);
	return;
}

restart_with('4MB');
is($superuser->query('SELECT memory_limit FROM dlock_stats'),
	3 * 1024 * 1024, 'three quarters of the memory are for locks and tickets');
# The first wait allocates the sketch of awaited names.
{
	my $waiter = session($node);

	$superuser->query("SELECT dlock_acquire('wanted')");
	is($waiter->query("SELECT dlock_try_acquire('wanted', '1ms') IS NULL"),
		't', 'a name that was waited for');
	$waiter->quit;
	$superuser->query('SELECT dlock_release_all()');
}
my $too_much = qr/53200: out of memory for locks.*HINT:  \S/s;

my @counts;
foreach my $how ('release', 'end', 'terminate')
{
	$ordinary = session($node, 'postgres', 'user=ordinary');
	my $other = session($node, 'postgres', 'user=ordinary');
	my $count = $ordinary->query("SELECT fill('lock ', 100000)");

	cmp_ok($count, '>', 4000, "$count locks of an ordinary role");
	push @counts, $count;
	like($_->query("SELECT dlock_acquire('one more')"),
		$too_much, 'a request beyond the limit fails with a hint')
	  foreach $ordinary, $other;
	like($other->query("SELECT dlock_acquire('lock 1')"),
		$too_much, 'no memory to wait with, either');
	is(held(), $count, 'all of them are still held');
	is($ordinary->query("SELECT dlock_acquire('lock 1') > 0"),
		't', 'acquiring a held lock again needs no memory');
	$ordinary->query("SELECT dlock_release('lock 1')");
	$ordinary->query("SELECT dlock_release('lock 1')");
	is($ordinary->query("SELECT dlock_acquire('lock 1') > 0"),
		't', 'a session can reuse what it has released');

	# The reserve of superusers
	is($superuser->query("SELECT dlock_try_acquire('one more') > 0"),
		't', 'a superuser still gets a lock');
	is($superuser->query("SELECT dlock_try_acquire('lock 1', '1ms') IS NULL"),
		't', 'a superuser can wait');
	my $reserve = $superuser->query("SELECT fill('super ', 100000)");
	cmp_ok($reserve, '>', $count / 4, "$reserve locks in the reserve");
	cmp_ok($reserve, '<', $count / 2, 'the reserve is bounded, too');
	like($superuser->query("SELECT dlock_acquire('still one')"),
		$too_much, 'error for a superuser');
	is(held(), $count + $reserve + 1, 'nothing is lost');
	is($superuser->query('SELECT dlock_release_all()'),
		$reserve + 1, 'the reserve is released');

	# Release by name and count, to show that each lock was held to the end.
	if ($how eq 'release')
	{
		is( $ordinary->query(
				"SELECT count(*) FROM generate_series(1, $count) AS n "
				  . "WHERE dlock_release('lock ' || n)"),
			$count,
			'all released');
		is(held(), '0', 'none is left');
		is($other->query("SELECT dlock_acquire('one more') > 0"),
			't', 'there is memory again');
	}
	elsif ($how eq 'end')
	{
		$ordinary->quit;
	}
	else
	{
		$superuser->query("SELECT pg_terminate_backend($ordinary->{pid})");
	}
	$_->quit foreach $ordinary, $other;
	# a session's spare memory is freed after its locks
	backends_gone($_->{pid}) foreach $ordinary, $other;
	is(held(), '0', 'nothing is left');
}

# Sessions report memory in steps of 4 kB, which is a few locks each.
my $few = 24;
cmp_ok(abs($counts[$_] - $counts[0]),
	'<=', $few, 'the same memory was available each time')
  foreach 1, 2;

# An info takes memory, too.
$ordinary = session($node, 'postgres', 'user=ordinary');
like(
	$ordinary->query(
		q{SELECT dlock_acquire('lock ' || n, info => repeat('x', 1024))
			FROM generate_series(1, 4000) AS n}),
	$too_much,
	'memory for info is bounded');
is($ordinary->query('SELECT dlock_release_all() > 1500'), 't', 'released');
cmp_ok(abs($ordinary->query("SELECT fill('lock ', 100000)") - $counts[0]),
	'<=', $few, 'the memory for info is freed');
$ordinary->quit;
restart_with('64MB');

#
# Many locks of one session, released at its end
#
foreach my $scope ('', 'xact_')
{
	foreach my $how ('end', 'terminate')
	{
		my $many = session($node, 'postgres', 'user=ordinary');

		$many->query('BEGIN') if $scope;
		is( $many->query(
				"SELECT count(dlock_${scope}acquire('lock ' || n)) "
				  . 'FROM generate_series(1, 20000) AS n'),
			'20000',
			"dlock_${scope}acquire() 20,000 times");
		my $waiter = session($node);
		$waiter->start("SELECT dlock_acquire('lock 20000') > 0");
		$superuser->until_waits($waiter);
		$superuser->query("SELECT pg_terminate_backend($many->{pid})")
		  if $how eq 'terminate';
		$many->quit;
		is($waiter->answer, 't', "$how: the next has its lock");
		$waiter->quit;
		$superuser->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	}
}

#
# Leases that were attached to a session, and closed
#
{
	my $many = session($node, 'postgres', 'user=ordinary');
	my $used = 'SELECT memory_used FROM dlock_stats';
	my $before = $superuser->query($used);
	my $open = "count(dlock_lease_open('1h', attach => true, info => repeat('x', 1000)))";

	is($many->query("SELECT $open FROM generate_series(1, 100)"),
		'100', '100 leases are attached');
	cmp_ok($superuser->query($used), '>', $before + 100_000, 'they need memory');
	is($many->query('SELECT count(dlock_lease_close(lease)) FROM dlock_leases'),
		'100', 'and closed');
	ok($superuser->wait_for("SELECT ($used) < $before + 20000"), 'their memory is free');
	$many->quit;
}

$superuser->quit;
done_testing();
