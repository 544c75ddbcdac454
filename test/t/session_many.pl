# The time of a call does not depend on the number of tickets that a session
# has under one name, on the actions at a transaction's end, or on the number
# of names that others have reserved.
#
# What would break it: a loop over the tickets of a name or of the session,
# over the pending actions of the transaction, or over reservations.  With such
# a loop, each step here would take many times its limit.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $many = 100000;
my $limit = ample(60);
my $node = new_server('main', conf => "max_connections = 20\n");
my $holder = session($node);
my $client = session($node);

$client->query("SELECT dlock_is_held('lock')");
$client->query("SET dlock.max_locks_per_session = " . 2 * $many);
$client->query("SET statement_timeout = '${limit}s'");

sub many
{
	my ($call, $what) = @_;

	is( $client->query(
			"SELECT count($call) FROM generate_series(1, $many) AS n"),
		$many, $what);
	return;
}

# Enqueued tickets are not announced before the commit.
$holder->query("SELECT dlock_acquire('lock')");
$client->query('BEGIN');
many("dlock_enqueue('lock', 'nobody')", 'queued for one lock');
is($client->query("SELECT dlock_is_held('lock')"), 'f', 'and not granted');
$holder->query("SELECT dlock_release('lock')");
many("nullif(dlock_release('lock'), false)", 'granted, and released by name');
is($client->query("SELECT dlock_is_held('lock')"), 'f', 'all of them');
$client->query('COMMIT');

many("dlock_acquire('lock', slots => $many)", 'permits of one session');
like($client->query("SELECT dlock_acquire('lock', slots => $many)"),
	qr/ERROR:  40P01/, 'more permits than slots are refused');
$client->query('BEGIN');
$client->query('CREATE TEMPORARY TABLE mine ON COMMIT DROP AS '
	  . 'SELECT ticket FROM dlock_locks WHERE pid = pg_backend_pid()');
is( $client->query('SELECT count(*) FROM (SELECT dlock_release_at_commit(ticket) '
		  . 'FROM mine OFFSET 0) AS t'),
	$many,
	'each permit will be released at commit');
is($client->query('COMMIT'), '', 'the commit releases all permits');
is( $holder->query('SELECT count(*) FROM dlock_locks'),
	'0', 'no permit is left');

$client->query('BEGIN');
many("dlock_xact_acquire('lock', slots => $many)",
	'permits of one transaction');
is($client->query('COMMIT'), '', 'the commit releases them');
is($client->query('SELECT count(*) FROM dlock_locks'), '0', 'all');

# A table that refuses changes without a guard
$holder->query("SELECT dlock_acquire('guarded')");
$client->query('CREATE TABLE t (n integer); CREATE TRIGGER t BEFORE INSERT ON t '
	  . "FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('lock')");
$client->query('BEGIN');
$client->query("SELECT dlock_guard('lock', dlock_acquire('lock'))");
many("dlock_xact_acquire('a', slots => $many)",
	'many actions at the end of a transaction');
$client->query('DO $$ BEGIN FOR n IN 1 .. 20000 LOOP '
	  . 'INSERT INTO t VALUES (n); END LOOP; END $$');
is($client->query('SELECT count(*) FROM t'), '20000', 'with many guarded statements');
is($client->query('COMMIT'), '', 'is done');

# Watches of a transaction, and subtransactions without watches
$client->query('BEGIN');
many("dlock_watch('watched ' || n, 'nobody')", 'watches');
is( $client->query(
		'DO $$ BEGIN FOR n IN 1 .. 500000 LOOP '
		  . 'BEGIN NULL; EXCEPTION WHEN others THEN NULL; END; END LOOP; END $$'),
	'',
	'with many subtransactions');
is($client->query('COMMIT; SELECT dlock_release_all()'), '1', 'end');

# Names reserved by other roles, beside and within each other
$holder->query('CREATE ROLE tenant');
is( $holder->query(
		q{WITH reserved AS (INSERT INTO dlock_reservations (prefix, owner)
			SELECT 'tenant' || n || repeat('/', n % 200), 'tenant'
			  FROM generate_series(1, } . $many . q{) AS n RETURNING 1)
		SELECT count(*) FROM reserved}),
	$many,
	'reservations');
is( $client->query(
		q{SELECT count(dlock_acquire('tenants')), count(dlock_release('tenants'))
			FROM generate_series(1, } . 5 * $many . ')'),
	5 * $many . '|' . 5 * $many,
	'a name that none of them reserves');

$_->quit foreach $client, $holder;
$node->stop;
done_testing();
