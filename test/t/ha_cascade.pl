# A primary, a standby, and a standby that follows the first standby.  Queries
# on standbys conflict with the worker's removals and vacuums.  Depending on
# the settings, the queries are canceled, or the primary keeps the rows.
# Neither harms leases.  Then the first standby is promoted, and later the
# second: each has all leases and tickets of its primary.
#
# What would break it: views or calls on a standby that read the tables of
# leases, or delay recovery; a worker that stops, or tables that grow, if rows
# cannot be removed; a session that uses its knowledge of a server in recovery
# after the promotion; a second promotion that finds less than the first.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Standby;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $conf = q{
autovacuum = off
wal_receiver_status_interval = 1s
};
my $first = new_server('first', allows_streaming => 1, conf => $conf);

my $no_delay = q{
max_standby_streaming_delay = 0
hot_standby_feedback = off
};

my $middle = new_standby($first, 'middle', conf => $no_delay);
my $last = new_standby($middle, 'last', conf => $no_delay);

# Flush the WAL and wait for its end: a removal does not flush by itself.
sub follows
{
	my ($standby, $upstream, $node) = @_;

	$node->safe_psql('postgres',
		q{SELECT pg_logical_emit_message(true, 'flush', '')});
	$upstream->wait_for_catchup($standby, 'replay', $node->lsn('flush'));
	return;
}

sub caught_up
{
	follows($middle, $first, $first);
	follows($last, $middle, $first);
	return;
}

my $client = session($first);
my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $held = $client->query("SELECT dlock_lease_acquire('kept', $lease)");
my @queue = map {
	$client->query("SELECT dlock_ttl_enqueue('kept', '1h', owner => 'c$_')")
} 1 .. 3;
my @fences = $held;
my $rows = 1 + @queue;

# A larger table must lose more rows before it is vacuumed.
sub until_vacuumed
{
	my $count = q{SELECT vacuum_count FROM pg_stat_user_tables
		WHERE relname = 'dlock_queue'};
	my $before = $client->query($count);

	poll('vacuumed',
		sub { come_and_go($client); $client->query($count) > $before });
	return;
}

sub works
{
	my ($when) = @_;
	my $ticket = $client->query("SELECT dlock_ttl_acquire('$when', '1h')");

	grows("$when: fences grow", $fences[-1], $ticket);
	push @fences, $ticket;
	is( $client->query(
			"SELECT dlock_release_ticket($ticket), dlock_renew($lease), "
			  . "dlock_check('kept', $held)"),
		't|1|t',
		"$when: the worker works, and no lock is lost");
	$client->wait_for("SELECT count(*) = $rows FROM dlock_queue");
	return;
}

sub feedback
{
	my ($setting) = @_;

	foreach my $node ($middle, $last)
	{
		$node->append_conf('postgresql.conf',
			"hot_standby_feedback = $setting");
		$node->reload;
	}
	return;
}

#
# Old snapshots on both standbys: recovery does not wait for them.
#
caught_up();
my @old = map { session($_) } $middle, $last;
my @looks = map { session($_) } $middle, $last;
foreach my $session (@old)
{
	$session->query('BEGIN ISOLATION LEVEL REPEATABLE READ');
	is($session->query('SELECT count(*) FROM dlock_queue'),
		$rows, 'a snapshot on a standby');
}
foreach my $session (@looks)
{
	is( $session->query('SELECT (SELECT count(*) FROM dlock_locks), '
			  . '(SELECT count(*) FROM dlock_leases)'),
		'0|0',
		'the views of a standby are empty');
}
until_vacuumed();
caught_up();
foreach my $node ($middle, $last)
{
	my $name = $node->name;

	$node->poll_query_until('postgres',
		'SELECT confl_snapshot > 0 FROM pg_stat_database_conflicts '
		  . q{WHERE datname = 'postgres'})
	  or die 'no conflict';
	is( $node->safe_psql(
			'postgres', 'SELECT ticket FROM dlock_queue ORDER BY ticket'),
		join("\n", $held, @queue),
		"$name: the rows are there");
}
foreach my $session (@old)
{
	like($session->query('SELECT count(*) FROM dlock_queue'),
		qr/conflict with recovery/, 'the old snapshot was canceled');
	$session->quit;
}
foreach my $session (@looks)
{
	is($session->query('SELECT count(*) FROM dlock_locks'),
		'0', 'a session that read the views was not canceled');
	$session->quit;
}
works('after a conflict');

#
# With feedback, the rows stay on the primary until no standby needs them.
#
feedback('on');
my $old = session($last);
caught_up();
$old->query('BEGIN ISOLATION LEVEL REPEATABLE READ');
is($old->query('SELECT count(*) FROM dlock_queue'), $rows, 'a snapshot');
$client->wait_for(
	'SELECT count(*) = 1 FROM pg_stat_replication WHERE backend_xmin::text::bigint <= '
	  . $old->query('SELECT pg_snapshot_xmin(pg_current_snapshot())'));
come_and_go($client) foreach 1 .. 2;
caught_up();
works('with rows that stay');
is($old->query('SELECT count(*) FROM dlock_queue'),
	$rows, 'the snapshot is still good');
$old->query('COMMIT');
$old->quit;
feedback('off');
$client->wait_for('SELECT count(*) = 1 FROM pg_stat_replication '
	  . 'WHERE backend_xmin IS NULL');
until_vacuumed() foreach 1 .. 2;
my $size = $client->query("SELECT pg_relation_size('dlock_queue')");
until_vacuumed() foreach 1 .. 2;
cmp_ok($client->query("SELECT pg_relation_size('dlock_queue')"),
	'<', 2 * $size, 'without the snapshot, the table stops growing');
works('without them');

#
# The standby in the middle is promoted while a transaction is open on it.  The
# last standby follows it.
#
sub has_all
{
	my ($session, $when) = @_;

	is( $session->query(
			"SELECT dlock_check('kept', $held), dlock_fence('kept') = $held, "
			  . "dlock_renew($lease), dlock_wait($queue[0], '0')"),
		't|t|1|f',
		"$when: the holder still holds");
	is( $session->query(q{SELECT ticket, granted FROM dlock_locks
			WHERE name = 'kept' ORDER BY ticket}),
		join("\n", "$held|t", map { "$_|f" } @queue),
		"$when: the waiters still wait, in order");
	is( $session->query(
			q{SELECT min(remaining) > '59 min', count(*) FROM dlock_leases}),
		't|' . (1 + @queue),
		"$when: with their full ttl");
	return;
}

caught_up();
my $begun = session($middle);
my $quiet = session($last);
$begun->query('BEGIN ISOLATION LEVEL REPEATABLE READ');
is($begun->query('SELECT count(*) FROM dlock_queue'), $rows,
	'a transaction that begins in recovery');
like($quiet->query("SELECT dlock_try_acquire('kept')"),
	qr/25006/, 'the last server refuses');
caught_up();
$client->quit;
$first->stop('immediate');
$middle->promote;
push @fences, $begun->query("SELECT dlock_acquire('session')");
grows('a transaction that has begun in recovery gets a lock', @fences);
is($begun->query('COMMIT'), '', '... and commits');
is($begun->query("SELECT dlock_release('session')"), 't', '... and releases it');
$client = session($middle);
has_all($client, 'promoted');
works('promoted');
like($quiet->query("SELECT dlock_try_acquire('kept')"),
	qr/25006/, 'the last server still refuses');
is($quiet->query('SELECT count(*) FROM dlock_locks'), '0', '... and shows nothing');

#
# On the new timeline, the first holder releases.
#
is($client->query("SELECT dlock_lease_close($lease)"), '1', 'the lease is closed');
is($client->query("SELECT dlock_wait($queue[0])"), 't', 'the next waiter has the lock');
$lease = $held = shift @queue;
$rows--;
$client->wait_for("SELECT count(*) = $rows FROM dlock_queue");
until_vacuumed();
works('on the new timeline');
follows($last, $middle, $middle);
$_->quit foreach $client, $begun;
$middle->stop('immediate');
$last->promote;
push @fences, $quiet->query("SELECT dlock_acquire('session')");
grows('the last server grants, with greater fences', @fences);
$client = session($last);
has_all($client, 'promoted again');
works('promoted again');
foreach my $ticket ($held, @queue)
{
	is($client->query("SELECT dlock_wait($ticket)"), 't', 'granted in order');
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', '... and released');
}

$_->quit foreach $client, $quiet;
$last->stop;
done_testing();
