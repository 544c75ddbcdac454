# Logical replication of all tables, in both directions, does no harm: it goes
# on, whatever both sides have made under one name; no lease is lost, nor does
# one come; no version falls; what is set of a lock's slots here stays until it
# changes there, and what comes counts at once; what has come back to where it was
# made goes no further; a TRUNCATE empties nothing here.
#
# What would break it: a row of the other server that is taken for, or in the
# place of, one of this server; a foreign row that is removed, and whose removal
# goes back to where it stands for a lease; two rows with one key, at which the
# subscriber stops; or rows that come back behind a TRUNCATE as they were not.
#
# DLOCK_OLD_INSTALL is the directory that has another server's bin and lib, for one
# of the two: test/upgrade --logical has one.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my %nodes = (
	a => new_server(
		'a',
		allows_streaming => 'logical',
		install_path => $ENV{DLOCK_OLD_INSTALL}),
	b => new_server('b', allows_streaming => 'logical'));
my %other = (a => 'b', b => 'a');
my %leases;
my %fences;

sub ask
{
	my ($name, $sql) = @_;

	return $nodes{$name}->safe_psql('postgres', $sql);
}

# All that one has written has arrived at the other.
sub arrived
{
	$nodes{$_}->wait_for_catchup("from_$_") foreach 'a', 'b';
	return;
}

# The same under the same names, on both
foreach my $name ('a', 'b')
{
	ask($name, 'CREATE ROLE shop');
	ask($name,
		"SELECT dlock_version_bump('v', 0), dlock_reserve('shop/', 'shop'), "
		  . "dlock_set_slots('both', " . ($name eq 'a' ? 2 : 3) . ')');
	$leases{$name} = ask($name, "SELECT dlock_lease_open('1h')");
	$fences{$name} =
	  ask($name, "SELECT dlock_lease_acquire('lock', $leases{$name})");
	ask($name, "SELECT dlock_ttl_acquire('own', '1h')");
	ask($name, 'CREATE PUBLICATION everything FOR ALL TABLES');
}
foreach my $name ('a', 'b')
{
	my $connstr = $nodes{ $other{$name} }->connstr . ' dbname=postgres';

	ask($name,
		"CREATE SUBSCRIPTION from_$other{$name} CONNECTION '$connstr' "
		  . 'PUBLICATION everything');
}
$nodes{$_}->wait_for_subscription_sync foreach 'a', 'b';

# Both go on, with names of their own and the same ones.
foreach my $name ('a', 'b')
{
	my $session = session($nodes{$name});

	# where it does not know of the other's yet
	my @told = map { '' . $session->query("SELECT dlock_version_bump('v', $_)") }
	  1 .. ($name eq 'a' ? 4 : 2);
	$session->query("SELECT dlock_version_bump('of $name', 0)");
	$session->query("SELECT dlock_reserve('$name/', 'shop'), "
		  . "dlock_set_slots('of $name', 3), dlock_set_slots('less of $name', 3)");
	$session->query("SELECT dlock_set_slots('less of $name', 1)");
	is( $session->query(
			"SELECT dlock_release_ticket(dlock_ttl_acquire('gone', '1h'))"),
		't', "$name: leases come and go");
	$session->query("SELECT dlock_ttl_enqueue('lock', '1h', 'channel')");
	$session->quit;
}
arrived();
# and what has gone around has arrived
arrived();

foreach my $name ('a', 'b')
{
	is(ask($name, "SELECT dlock_version_of('v')"),
		'5', "$name: the greater version counts");
	is(ask($name, "SELECT dlock_version_of('of $other{$name}')"),
		'1', "$name: a new version comes");
	is( ask($name, 'SELECT string_agg(prefix, NULL ORDER BY prefix) '
			  . 'FROM dlock_reservations WHERE role <> 0'),
		'a/b/shop/',
		"$name: reservations come");
	is( ask($name, 'SELECT string_agg(slots::text, NULL ORDER BY name) '
			  . 'FROM dlock_slots'),
		($name eq 'a' ? 2 : 3) . '1133',
		"$name: slots come");
	is( ask(
			$name,
			'SELECT string_agg(n::text, NULL ORDER BY name) FROM '
			  . '(SELECT name, count(dlock_try_acquire(name, slots => 5)) AS n '
			  . 'FROM dlock_slots, generate_series(1, 5) GROUP BY name) AS t'),
		($name eq 'a' ? 2 : 3) . '1133',
		"$name: and count");
	is( ask(
			$name, 'SELECT count(*), count(DISTINCT system) FROM dlock_queue'),
		'3|1',
		"$name: tickets of its own alone");
	is(ask($name, 'SELECT count(*) FROM dlock_queue_lease'),
		'1', "$name: a lease of its own alone");
	is( ask(
			$name,
			'SELECT sum(value::integer) FROM pg_stat_subscription_stats AS s, '
			  . "jsonb_each_text(to_jsonb(s)) WHERE key LIKE '%error_count'"),
		'0',
		"$name: replication has met no error");
}

# What has changed on one side has gone around once, and no more.
my $written = q{
	SELECT string_agg(concat_ws(' ', what, xmin), ', ' ORDER BY what)
	  FROM (SELECT name, xmin FROM dlock_slots
			 UNION ALL
			SELECT prefix, xmin FROM dlock_reservations) AS t (what, xmin)};
ask($_, "SELECT dlock_reserve('$_/', current_user::regrole)") foreach 'a', 'b';
arrived();
arrived();
my %before = map { $_ => ask($_, $written) } 'a', 'b';
arrived();
arrived();
is(ask($_, $written), $before{$_}, "$_: nothing goes around")
  foreach 'a', 'b';

# A version that is forgotten, or a table emptied by hand, there stays here.
ask('b', "DELETE FROM dlock_versions WHERE name = 'v'; DELETE FROM dlock_queue");
arrived();
is(ask('a', "SELECT dlock_version_of('v')"), '5', 'no version falls');
is(ask('a', 'SELECT count(*) FROM dlock_queue'), '3', 'no ticket goes');

# Rows that came before there were triggers, as with version 1.0: a worker that
# begins anew does not read them, and does not remove them either; and they are
# not in the way of new ones.
ask('a', 'ALTER TABLE dlock_queue DISABLE TRIGGER dlock_replicated');
my $next = ask('b', 'SELECT dlock_advance_ticket(1)') + (1 << 30);
ask('b', "SELECT dlock_advance_ticket($next)");
$next = ask('b', "SELECT dlock_ttl_acquire('b only', '1h')");
$nodes{b}->wait_for_catchup('from_b');
is(ask('a', "SELECT count(*) FROM dlock_queue WHERE name = 'b only'"),
	'1', 'without a trigger rows come');
ask('a', 'ALTER TABLE dlock_queue ENABLE REPLICA TRIGGER dlock_replicated');
$nodes{a}->restart;
is(ask('a', "SELECT dlock_fence('b only') IS NULL"),
	't', 'a foreign row is not read');
like(
	slurp_file($nodes{a}->logfile),
	qr/left out 1 rows of table "dlock_queue"/,
	'which the log tells');
# the worker has begun when it has written something
ask('a', "SELECT dlock_ttl_acquire('another', '1h')");
arrived();
is(ask('b', "SELECT count(*) FROM dlock_queue WHERE ticket = $next"),
	'1', 'what is foreign there is not removed');
# one that comes later has not looked through the tables itself
my $session = session($nodes{a});
my $first = worker($session);

$session->query("SELECT pg_terminate_backend($first)");
poll('another worker', sub { worker($session) != $first });
$session->quit;
ask('a', "SELECT dlock_advance_ticket($next)");
my $same = 0;
foreach (1 .. 5)
{
	$same = 1 if ask('a', "SELECT dlock_ttl_acquire('t$_', '1h')") == $next;
}
ok($same, 'a ticket gets the number of a foreign row');

# Then both crash, and still have what they had promised.
arrived();
foreach my $name ('a', 'b')
{
	my $node = $nodes{$name};

	$node->stop('immediate');
	$node->start;
}
is(ask('a', "SELECT dlock_check('lock', $fences{a})"), 't', 'a: the lease holds');
is(ask('a', 'SELECT held FROM dlock_leases WHERE lease = ' . $leases{a}),
	'1', 'a: as before');
is( ask('a', "SELECT dlock_check('t1', $next) OR dlock_check('t2', $next) OR "
		  . "dlock_check('t3', $next) OR dlock_check('t4', $next) OR dlock_check('t5', $next)"),
	't',
	'a: the ticket that took the place of a foreign row, too');
is(ask('b', "SELECT dlock_check('b only', $next)"), 't', 'b: the lease holds');

# A TRUNCATE there, and two in one transaction: all here stays as it is, in the
# tables and in memory, and for who has a snapshot from before.  In one direction,
# as PostgreSQL sends a TRUNCATE back to where it has come from.
my @tables =
  map { "dlock_$_" } 'queue', 'queue_lease', 'versions', 'reservations', 'slots';
my $rows = join ' UNION ALL ',
  map { "SELECT '$_: ' || md5(t::text) FROM $_ AS t" } @tables;

ask('b', 'DROP SUBSCRIPTION from_a');
# First, what changes there, and goes, does so here, though this is one's own.
my $own = q{
	SELECT (SELECT owner FROM dlock_reservations WHERE prefix = 'shop/'),
		(SELECT slots FROM dlock_slots WHERE name = 'both')};

is(ask('a', $own), 'shop|2', "one's own");
ask($_, 'CREATE ROLE clerk') foreach 'a', 'b';
ask('b', "SELECT dlock_reserve('shop/', 'clerk'), dlock_set_slots('both', 4)");
$nodes{b}->wait_for_catchup('from_b');
is(ask('a', $own), 'clerk|4', 'changed');
ask('b', "SELECT dlock_unreserve('shop/'), dlock_set_slots('both', NULL)");
$nodes{b}->wait_for_catchup('from_b');
is(ask('a', $own), '|', 'gone');
ask('a', "SELECT dlock_set_slots('both', 2)");

# what would be otherwise if it were written anew, and what is not in the row
ask('a', q{
	CREATE ROLE gone;
	SELECT dlock_reserve('gone/', 'gone');
	DROP ROLE gone;
	CREATE ROLE gone;
	ALTER TABLE dlock_versions ADD note text DEFAULT 'none';
	UPDATE dlock_versions SET note =
			(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 2000) AS i)
	 WHERE name = 'v'});
my $before = ask('a', "$rows ORDER BY 1");
my $errors = 'SELECT sum(apply_error_count) FROM pg_stat_subscription_stats';
my $errors_before = ask('a', $errors);
my $watching = session($nodes{a});

$watching->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
ask('b',
	'TRUNCATE ' . join(', ', @tables) . ' RESTART IDENTITY; '
	  . 'BEGIN; TRUNCATE dlock_versions; TRUNCATE dlock_versions; COMMIT');
$nodes{b}->wait_for_catchup('from_b');
is($watching->query("SELECT dlock_version_of('v')"),
	'5', 'no version falls in a snapshot');
$watching->quit;
is(ask('a', "$rows ORDER BY 1"), $before, 'a TRUNCATE empties nothing');
is(ask('a', $errors), $errors_before, 'nor stops replication');
is( ask(
		'a', "SELECT count(dlock_try_acquire('both', slots => 5)) "
		  . 'FROM generate_series(1, 5)'),
	'2',
	'slots count as before');
$nodes{a}->stop('immediate');
$nodes{a}->start;
is( ask(
		'a', "SELECT dlock_check('lock', $fences{a}), "
		  . "dlock_try_version_bump('v', 5), dlock_try_version_bump('v', 5) IS NULL"),
	't|6|t',
	'and all goes on behind a crash');

done_testing();
