# If a call fails in a loop that catches the error, the call leaves no memory
# allocated.  Its references are dropped when the subtransaction is rolled
# back, not only at the end of the transaction.  So a loop does not use up the
# memory of other sessions.
#
# What would break it: a reference that is kept until the end of the
# transaction; an allocation that is not freed if the next step fails.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

# enough for some 6,000 leases with tickets, of which one role can have half
my $node = new_server('main', conf => "dlock.max_memory = '4MB'\n");
$node->safe_psql(
	'postgres', q{
	CREATE ROLE ordinary LOGIN;
	-- How often the call fails, and with what
	CREATE FUNCTION fail(call text, how_often integer, OUT n integer,
		OUT states text)
	LANGUAGE plpgsql AS $$
	DECLARE
		found text[];
	BEGIN
		n := 0;
		FOR i IN 1 .. how_often LOOP
			BEGIN
				EXECUTE 'SELECT ' || call;
			EXCEPTION WHEN others THEN
				n := n + 1;
				IF found IS NULL OR sqlstate <> ALL (found) THEN
					found := found || sqlstate;
				END IF;
			END;
		END LOOP;
		states := array_to_string(found, ' ');
	END $$;
	-- The same, in a subtransaction that is kept
	CREATE FUNCTION fail_below(call text, how_often integer)
	RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		RETURN (SELECT f::text FROM fail(call, how_often) AS f);
	EXCEPTION WHEN division_by_zero THEN
		RETURN '';
	END $$});

my $admin = session($node);
my $client = session($node, 'postgres', 'user=ordinary');
my $other = session($node, 'postgres', 'user=ordinary');

my $lease = $client->query("SELECT dlock_lease_open('1h')");
$admin->query("SELECT dlock_acquire('held', slots => 2)");
my $taken = $client->query(
	"SELECT dlock_ttl_enqueue('queue', '1h', 'nobody', slots => 2, owner => 'me')"
);

sub memory_used
{
	return $admin->query('SELECT memory_used FROM dlock_stats');
}

my $often = 4000;
foreach my $call (
	[ "dlock_try_ttl_acquire('held', '1h', slots => 3)", '55000' ],
	[ "dlock_ttl_enqueue('held', '1h', 'nobody', slots => 3)", '55000' ],
	[ "dlock_try_lease_acquire('held', $lease, slots => 3)", '55000' ],
	[ "dlock_try_lease_acquire_all('{a, b, held}', $lease)", '55000' ],
	[
		"dlock_ttl_enqueue('queue', '1h', 'nobody', slots => 2, permits => 2, owner => 'me')",
		'55000'
	],
	[ "dlock_lease_open('1h', attach => true, info => repeat('x', 1025))", '22023' ],
	[ "dlock_guard('other', $taken)", '55L01' ],
	[ "dlock_wait(dlock_ttl_enqueue('held', '1h', 'nobody', slots => 3))", '55000' ])
{
	my ($sql, $state) = @$call;

	$sql =~ s/'/''/g;
	foreach my $function ('fail', 'fail_below')
	{
		my $used = memory_used();

		$client->query('BEGIN');
		is($client->query("SELECT $function('$sql', $often)::text"),
			"($often,$state)", "$function: $call->[0]");
		# checked while the transaction is open
		like($other->query("SELECT dlock_acquire('innocent')"),
			qr/^\d+$/, "$function: others have memory");
		$other->query('SELECT dlock_release_all()');
		# less than 40 bytes remain for each failure
		cmp_ok(memory_used() - $used, '<', 40 * $often,
			"$function: no memory is left behind");
		$client->query('COMMIT');
	}
}

# References that a savepoint keeps can be used until the enclosing savepoint
# or the transaction ends.  Then they are dropped.
$client->query('BEGIN');
$client->query('SAVEPOINT one');
$client->query('SAVEPOINT two');
my $ticket = $client->query("SELECT dlock_ttl_acquire('kept', '1h')");
$client->query("SELECT dlock_guard('kept', $ticket)");
like($client->query("SELECT dlock_try_ttl_acquire('held', '1h', slots => 3)"),
	qr/55000/, 'an error');
$client->query('ROLLBACK TO two');
$client->query('RELEASE two');
$client->query("SELECT dlock_guard('kept', $ticket)");
$client->query('RELEASE one');
is($client->query("SELECT dlock_check('kept', $ticket)"), 't', 'kept');
is($client->query('COMMIT'), '', 'the guarded commit succeeds');
is($client->query("SELECT dlock_release_ticket($ticket)"), 't', 'released');

# A role is dropped while it is connected.
$admin->query('CREATE ROLE gone LOGIN');
my $gone = session($node, 'postgres', 'user=gone');
$gone->query("SELECT dlock_is_held('lock')");
$admin->query('DROP ROLE gone');
is( $gone->query(
		"SELECT fail('dlock_ttl_acquire(''y'', ''1h'')', $often)::text"),
	"($often,42704)",
	'a dropped role gets no lease');
$gone->quit;
backends_gone($gone->{pid});
like($other->query("SELECT dlock_acquire('innocent')"),
	qr/^\d+$/, 'a dropped role keeps no memory');

$_->quit foreach $client, $other, $admin;
$node->stop;
done_testing();
