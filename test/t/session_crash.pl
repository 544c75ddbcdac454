# If a backend crashes, PostgreSQL creates new shared memory, and so does
# dlock.  Then no session holds a lock, all locks can be acquired, and fences
# continue to grow.
#
# What would break it: shared state that survives, in whole or in part; numbers
# drawn before their reservation is durable; memory that is left behind.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

# With mmap, the test can count the server's segments of shared memory.
my $node = new_server(
	'main',
	conf => q{
restart_after_crash = on
dynamic_shared_memory_type = mmap
});
my @fences = fence($node);

sub segments
{
	return scalar(() = glob($node->data_dir . '/pg_dynshmem/*'));
}

# the number of segments after the first call in a server
my $segments = segments();

# Kill a backend, and wait until the server is back.  All sessions, "witness"
# among them, are disconnected.
sub crash
{
	my ($victim, $witness) = @_;

	kill('KILL', $victim->{pid}) == 1 or die "no process $victim->{pid}";
	backends_gone($witness->{pid});
	poll('server is back', sub { answers($node) });
}

sub begins_anew
{
	my ($what) = @_;

	is($node->safe_psql('postgres', 'SELECT count(*) FROM dlock_locks'),
		'0', "$what: nothing is held");
	is($node->safe_psql('postgres', 'SELECT acquired FROM dlock_stats'),
		'0', "$what: counters begin at zero");
	# The second may have to wait until the first session has ended.
	push @fences,
	  $node->safe_psql('postgres', "SELECT dlock_try_acquire('lock')"),
	  fence($node);
	grows("$what: fences grow", @fences);
	is(segments(), $segments, "$what: no memory is left behind");
}

foreach my $who ('holder', 'waiter', 'bystander')
{
	my %sessions =
	  map { $_ => session($node) } qw(holder waiter next bystander);

	push @fences, $sessions{holder}->query("SELECT dlock_acquire('lock')");
	foreach my $waiter ('waiter', 'next')
	{
		$sessions{$waiter}->start("SELECT dlock_acquire('lock')");
		$sessions{bystander}->until_waits($sessions{$waiter});
	}
	crash($sessions{$who}, $sessions{ $who eq 'next' ? 'waiter' : 'next' });
	like(
		$sessions{next}->answer,
		qr/57P02|closed the connection/,
		"$who killed: the wait ends");
	$_->quit foreach values %sessions;
	begins_anew("$who killed");
}

# A crash while sessions acquire and release locks, names and memory
foreach my $round (1 .. 3)
{
	my @sessions = map { session($node) } 1 .. 4;

	$_->start(
		q{DO $$
		BEGIN
			LOOP
				PERFORM dlock_acquire('lock ' || n, info => repeat('x', n))
				   FROM generate_series(1, 100) AS n;
				PERFORM dlock_release_all();
			END LOOP;
		END $$}) foreach @sessions;
	ok( $node->poll_query_until(
			'postgres',
			'SELECT acquired > 10000 AND waited > 10 FROM dlock_stats'),
		'sessions are at work');
	push @fences,
	  $node->safe_psql('postgres', "SELECT dlock_acquire('one more')");
	crash($sessions[0], $sessions[1]);
	$_->quit foreach @sessions;
	begins_anew("killed at work, round $round");
}

# Without restart_after_crash, the server stops, and can be started.
{
	my $holder = session($node);
	my $victim = session($node);

	$node->safe_psql('postgres',
		'ALTER SYSTEM SET restart_after_crash = off');
	$node->reload;
	ok( $node->poll_query_until(
			'postgres',
			q{SELECT setting = 'off' FROM pg_settings
			   WHERE name = 'restart_after_crash'}),
		'restart_after_crash is off');
	push @fences, $holder->query("SELECT dlock_acquire('lock')");
	push @fences, $victim->query("SELECT dlock_acquire('another')");
	kill('KILL', $victim->{pid}) == 1 or die "no process $victim->{pid}";
	backends_gone($holder->{pid});
	poll('server is down',
		sub { !-e $node->data_dir . '/postmaster.pid' });
	$_->quit foreach $holder, $victim;
	$node->_update_pid(0);
	$node->start;
	begins_anew('restart_after_crash off');
}

done_testing();
