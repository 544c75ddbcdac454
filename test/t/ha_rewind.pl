# Two servers alternate as primary, ten times.  The primary grants locks that
# its standby never receives, and dies.  The standby is promoted. pg_rewind
# rewinds the old primary, which becomes the standby and is promoted in turn.
# Locks on the surviving history are held, in the same order and for their full
# ttl.  Grants on the abandoned branch are gone.  The fences of each promoted
# server exceed all fences ever given, including those on the other branch.
#
# What would break it: rows, or a sequence, that pg_rewind leaves in the old
# primary's state; numbers that depend on the sequence alone, and repeat on the
# other branch; server state that survives from one turn to the next.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Standby;
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);

my $ttl = 3600;
my $primary = new_server(
	'one',
	allows_streaming => 1,
	conf => q{
wal_log_hints = on
autovacuum = off
});

my $standby = new_standby($primary, 'two');

# The locks held on the surviving history
my $client = session($primary);
my $lease = $client->query("SELECT dlock_lease_open('$ttl s')");
my $held = $client->query("SELECT dlock_lease_acquire('kept', $lease)");
my @queue = map {
	$client->query(
		"SELECT dlock_ttl_enqueue('kept', '$ttl s', owner => 'c$_')")
} 1 .. 3;
my @fences = ($held, @queue);
my $generation = 0;
$client->quit;

sub now
{
	return clock_gettime(CLOCK_MONOTONIC);
}

sub acquire
{
	my ($session, $name) = @_;
	my $fence = $session->query("SELECT dlock_ttl_acquire('$name', '$ttl s')");

	push @fences, $fence;
	return $fence;
}

# Rewind a server, and let it follow the other server.
sub follow
{
	my ($rewound, $source) = @_;
	my $data = $rewound->data_dir;
	my $conf = PostgreSQL::Test::Utils::tempdir . '/postgresql.conf';

	# pg_rewind also copies the other server's configuration
	PostgreSQL::Test::Utils::system_or_bail('cp', "$data/postgresql.conf",
		$conf);
	# pg_rewind looks for the timeline of the latest checkpoint
	$source->safe_psql('postgres', 'CHECKPOINT');
	$rewound->command_ok(
		[
			'pg_rewind', '--source-server', $source->connstr('postgres'),
			'--target-pgdata', $data, '--no-sync'
		],
		$rewound->name . ' is rewound');
	PostgreSQL::Test::Utils::system_or_bail('cp', $conf,
		"$data/postgresql.conf");
	$rewound->append_conf('postgresql.conf',
		"primary_conninfo = '" . $source->connstr . "'");
	$rewound->set_standby_mode;
	$rewound->start;
	return;
}

# The server has exactly the locks of the history.
sub is_history
{
	my ($session, $given_up, $last) = @_;
	my $name = "turn $generation";

	is( $session->query(q{SELECT ticket, granted, position FROM dlock_locks
			WHERE name = 'kept' ORDER BY ticket}),
		join("\n", "$held|t|0", map { "$queue[$_]|f|" . ($_ + 1) } 0 .. $#queue),
		"$name: the holder and the waiters are the same, in order");
	is( $session->query("SELECT dlock_check('kept', $held), "
			  . "dlock_fence('kept') = $held, dlock_wait($queue[0], '0')"),
		't|t|f',
		"$name: ... and functions agree");
	foreach my $gone (@$given_up)
	{
		my ($lock, $fence) = @$gone;

		is( $session->query(
				"SELECT dlock_check('$lock', $fence), "
				  . "dlock_renew($fence) IS NULL, "
				  . "count(*) FROM dlock_locks WHERE ticket = $fence"),
			'f|t|0',
			"$name: an abandoned grant is gone: $lock");
	}
	is($session->query("SELECT dlock_check('last', $last)"),
		't', "$name: the latest grant is there")
	  if $last;
	return;
}

# The standby replaces the primary.  Returns the abandoned grants.
my $last;
sub fail_over
{
	my $old = session($primary);
	my $name = "turn " . ++$generation;
	my @given_up;

	$primary->wait_for_catchup($standby);
	# From now on the standby receives nothing, and the primary does not learn
	# of the promotion.
	$standby->append_conf('postgresql.conf', q{primary_conninfo = ''});
	$standby->reload;
	$standby->poll_query_until('postgres',
		'SELECT count(*) = 0 FROM pg_stat_wal_receiver')
	  or die 'still connected';
	push @given_up, [ $_, acquire($old, $_) ] foreach "lost", "lost too";
	# On this branch, the lock is handed over.  On the other, it keeps its
	# holder.
	is($old->query("SELECT dlock_lease_close($lease)"),
		'1', "$name: a lease is closed on the abandoned branch");
	is($old->query("SELECT dlock_wait($queue[0])"),
		't', "$name: ... and its lock is handed on");
	$old->query('SELECT dlock_release_ticket(dlock_ttl_acquire(' .
		"'other ' || i, '1h')) FROM generate_series(1, 200) AS i");
	push @fences, $old->query("SELECT max(ticket) FROM dlock_queue");
	# After a restart, the primary reserves numbers again.
	$old->quit;
	$primary->restart;
	$old = session($primary);
	push @given_up, [ 'more', acquire($old, 'more') ];
	push @given_up, [ 'session', $old->query("SELECT dlock_acquire('session')") ];
	push @fences, $given_up[-1][1];
	$old->quit;

	if ($generation % 2)
	{
		$primary->stop('immediate');
		$standby->promote;
	}
	else
	{
		$standby->promote;
		$primary->stop;
	}
	my $promoted = now();
	my $new = session($standby);
	my $greatest = (sort { $a <=> $b } @fences)[-1];

	is_history($new, \@given_up, $last);
	my $remaining = $new->query(
		'SELECT extract(epoch FROM min(remaining)) FROM dlock_leases');
	my $passed = now() - $promoted;
	cmp_ok($remaining, '>=', $ttl - $passed, "$name: with the full ttl");
	cmp_ok($remaining, '<=', 1.25 * $ttl,
		"$name: ... and no more than a quarter beyond");
	grows("$name: fences exceed those of the abandoned branch",
		$greatest, acquire($new, 'new'), acquire($new, 'lost'),
		acquire($new, 'more'));
	like($new->query("SELECT dlock_renew($lease)"),
		qr/^1$/, "$name: the lease can be renewed");
	$new->query("SELECT dlock_release_ticket(ticket) FROM dlock_locks "
		  . q{WHERE name IN ('new', 'lost', 'more', 'last')});
	$last = acquire($new, 'last');
	is( $new->query(q{SELECT acquired > 0 FROM dlock_stats}),
		't', "$name: the new primary counts acquisitions");
	$new->quit;

	($primary, $standby) = ($standby, $primary);
	return @given_up;
}

foreach (1 .. 10)
{
	my @given_up = fail_over();

	follow($standby, $primary);
	$primary->wait_for_catchup($standby);
	my $session = session($standby);
	like($session->query(q{SELECT dlock_try_acquire('new')}),
		qr/25006/, "turn $generation: the rewound server refuses");
	is($session->query('SELECT count(*) FROM dlock_locks'),
		'0', "turn $generation: ... and shows nothing");
	is( $session->query('SELECT ticket FROM dlock_queue ORDER BY ticket'),
		join("\n", sort { $a <=> $b } $held, @queue, $last),
		"turn $generation: ... but has the rows");
	$session->quit;
}

# At the end, all waiters are granted in order.
$client = session($primary);
is($client->query("SELECT dlock_lease_close($lease)"), '1', 'the lease is closed');
foreach my $ticket (@queue)
{
	is($client->query("SELECT dlock_wait($ticket)"), 't', 'the next waiter has the lock');
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', '... and releases it');
}
$client->quit;
$standby->stop;
$primary->stop;
done_testing();
