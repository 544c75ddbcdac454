# An answer about a lease stays true.  If any function has said that a lease is
# gone, the lease never comes back.  A renewal that succeeded gives the full
# ttl, even if the worker is held up.  If standbys count and do not answer, a
# renewal raises an error, which says neither.
#
# What would break it: an answer "gone" that leaves the deadline unchanged; a
# renewal that reads the deadline and moves it later, although "gone" was
# answered in between; a renewal that ignores the standbys; standbys' answers
# that only the worker reads, or heartbeats that only the worker sends;
# heartbeats that need a replay; standbys that count for a lease before its row
# is written; a new worker that sends no heartbeat at once.
#
# The test controls the clock.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Clock;
use Dlock::Lease;
use Dlock::Standby;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

plan skip_all => 'needs Linux and a C compiler' unless clock_is_ours();

my $node = new_server_of_clock('main', 'synchronous_commit = local');
my $client = session($node);
my $other = session($node);
my $admin = session($node);

# Each call that can answer "gone", and its answer, if no other lease holds the
# lock
sub questions
{
	my ($name, $fence, $lease) = @_;

	return (
		renew => [ "SELECT dlock_renew($lease) IS NULL", qr/^t$/ ],
		check => [ "SELECT NOT dlock_check('$name', $fence)", qr/^t$/ ],
		fence => [ "SELECT dlock_fence('$name') IS NULL", qr/^t$/ ],
		locks => [
			"SELECT count(*) = 0 FROM dlock_locks WHERE ticket = $fence",
			qr/^t$/
		],
		leases => [
			"SELECT count(*) = 0 FROM dlock_leases WHERE lease = $lease",
			qr/^t$/
		],
		guard => [ "SELECT dlock_guard('$name', $fence)", qr/55L01/ ],
		wait => [ "SELECT dlock_wait($fence, '0')", qr/55L01/ ],
		release =>
		  [ "SELECT dlock_release_ticket($fence)", qr/WARNING.*^f$/ms ],
		close => [ "SELECT dlock_lease_close($lease)", qr/WARNING/ ],
		acquire => [
			"SELECT dlock_try_lease_acquire('$name 2', $lease)", qr/55L01/
		]);
}

#
# A renewal is stopped at each read of the clock.  Then the lease expires, and
# another session is told so before the worker acts.
#
$admin->query(q{SELECT dlock_lease_open('1h', attach => true)});
my $worker = freeze($admin);
my ($stops, @wrong) = (0);
my %by_number = (1 => 'nothing');
my $last;

# Opens a lease, and makes the worker exit
sub ticket
{
	my ($name, $session, $ttl) = @_;

	thaw($worker);
	my $fence = $session->query("SELECT dlock_ttl_acquire('$name', '$ttl')");
	like($fence, qr/^\d+$/, "$name: acquired") if $fence !~ /^\d+$/;
	$worker = freeze($admin);
	return $fence;
}

foreach my $question (sort { $a cmp $b } keys %{ { questions('', 0, 0) } })
{
	foreach my $reading (1 .. 20)
	{
		my $name = "$question $reading";
		my $fence = ticket($name, $client, '1h');
		my %questions = questions($name, $fence, $fence);
		my ($sql, $gone) = @{ $questions{$question} };

		stop_at_reading($client->{pid}, $reading);
		$client->start("SELECT dlock_renew($fence)");
		if (!stopped_at_reading($client->{pid}, sub { $client->answered }))
		{
			stop_at_reading(0, 0);
			is($client->answer, '1', "$name: the renewal is not stopped");
			last;
		}
		$stops++;
		time_passes(2 * 60 * 60);
		my $told = $other->query($sql) =~ $gone;
		continue_process($client->{pid});
		my $renewed = $client->answer;
		push @wrong, "$name: gone, and then renewed" if $told && $renewed ne '';
		push @wrong, "$name: neither" if !$told && $renewed eq '';
		push @wrong, "$name: alive again"
		  if $told && $other->query("SELECT dlock_check('$name', $fence)") ne 'f';
	}
}
is(join('; ', @wrong), '', 'a renewal that found the lease open fails if the lease is gone');
cmp_ok($stops, '>=', 2 * keys %{ { questions('', 0, 0) } },
	'renewals were stopped');
thaw($worker);

#
# With a standby that counts
#
my $standby = new_standby($node, 'standby');
count_on($node, 'standby');

# A request is queued after the holder has ended.  For a long time, the removal
# of the holder's row cannot be written.  So the request's row cannot be
# written either, and no heartbeat is sent for it.
{
	my $fence = $admin->query("SELECT dlock_ttl_acquire('next', '20h')");
	my $locker = session($node);

	$locker->query('BEGIN; LOCK TABLE dlock_queue IN SHARE MODE');
	is($admin->query("SELECT dlock_release_ticket($fence)"),
		't', 'a holder releases, and the removal cannot be written');
	$client->query('SET synchronous_commit = on');
	$client->start("SELECT dlock_ttl_acquire('next', '1h')");
	$other->wait_for(
		q{SELECT count(*) = 1 FROM dlock_locks
		   WHERE name = 'next' AND NOT granted AND ticket <> } . $fence);
	foreach (1 .. 3)
	{
		time_passes(2 * 3600);
		is( $other->query(
				q{SELECT count(*) FROM dlock_locks
				   WHERE name = 'next' AND NOT granted AND ticket <> } . $fence
			),
			'1',
			'the next request waits');
	}
	$locker->query('ROLLBACK');
	my $next = $client->answer;
	grows('the next request gets the lock', $fence, $next);
	is($client->query("SELECT dlock_release_ticket($next)"),
		't', '... and holds it');
	$locker->quit;
}

my %lease;
foreach my $level ('on', 'remote_write', 'remote_apply')
{
	$client->query("SET synchronous_commit = $level");
	$lease{$level} = $client->query("SELECT dlock_ttl_acquire('$level', '1h')");
	like($lease{$level}, qr/^\d+$/, "lease at $level");
}
$client->query(q{SET synchronous_commit = local});
my $attached = session($node);
$attached->query('SET synchronous_commit = on');
$lease{attached} =
  $attached->query("SELECT dlock_lease_open('1h', attach => true)");
$attached->query("SELECT dlock_lease_acquire('attached', $lease{attached})");

sub renewed
{
	return join ' ',
	  grep { $client->query("SELECT dlock_renew($lease{$_})") eq '1' }
	  sort keys %lease;
}

my $all = 'attached on remote_apply remote_write';

foreach my $held_up ('the worker is stopped', 'its table is locked')
{
	my $locker = session($node);
	if ($held_up =~ /stopped/)
	{
		$worker = freeze($admin);
	}
	else
	{
		$locker->query('BEGIN; LOCK TABLE dlock_queue');
		$admin->start(
			"SELECT dlock_ttl_acquire('more', '1h', owner => 'me')");
		$locker->wait_for(q{SELECT count(*) = 1 FROM pg_stat_activity
			WHERE backend_type = 'dlock worker' AND wait_event_type = 'Lock'});
	}
	my @answers;
	foreach (1 .. 4)
	{
		push @answers, renewed();
		time_passes(0.3 * 3600);
		push @answers, renewed();
		time_passes(0.99 * 3600);
		push @answers, renewed();
		time_passes(0.99 * 3600);
	}
	is(join(', ', grep { $_ ne $all } @answers),
		'', "$held_up, and each renewal lasts for a ttl");
	is(renewed(), $all, '... up to the last renewal');
	$locker->query('ROLLBACK');
	$locker->quit;
	if ($held_up =~ /stopped/)
	{
		thaw($worker);
	}
	else
	{
		# The lease may expire before its row is written.
		my $told = '' . $admin->answer;
	}
}

#
# Another worker takes over
#
# The new worker has ended its first round when it is idle.
{
	my $before;
	my $next = '';

	$worker = freeze($admin);
	$before = $admin->query('SELECT pg_current_wal_insert_lsn()');
	$admin->query("SELECT pg_terminate_backend($worker)");
	thaw($worker);
	poll(
		'another worker',
		sub {
			$next = $admin->query(
				q{SELECT pid FROM pg_stat_activity
				   WHERE backend_type = 'dlock worker' AND state = 'idle'});
			return $next =~ /^\d+$/ && $next ne $worker;
		});
	isnt($admin->query('SELECT pg_current_wal_insert_lsn()'),
		$before, 'a new worker sends a heartbeat at once');
}

#
# The standby writes, and does not replay
#
$standby->safe_psql('postgres', 'SELECT pg_wal_replay_pause()');
$standby->poll_query_until('postgres',
	q{SELECT pg_get_wal_replay_pause_state() = 'paused'})
  or die 'not paused';
delete $lease{remote_apply};
$all = 'attached on remote_write';
my @answers;
foreach (1 .. 20)
{
	time_passes(0.5 * 3600);
	push @answers, renewed();
}
is(join(', ', grep { $_ ne $all } @answers),
	'', 'leases that need no replay live on');
$standby->safe_psql('postgres', 'SELECT pg_wal_replay_resume()');

#
# The standby does not answer
#
my $receiver = $standby->safe_psql('postgres',
	'SELECT pid FROM pg_stat_wal_receiver');
is(renewed(), $all, 'the standby still answers');

# A grant without a standby's acknowledgement does not count: a standby may
# have been promoted.
{
	my $successor = session($node);
	my $first = $successor->query(q{SET synchronous_commit = on;
		SELECT dlock_ttl_acquire('handed on', '1h')});
	my $next = $successor->query(
		q{SELECT dlock_ttl_enqueue('handed on', '20h', 'channel')});
	my $holds = "SELECT dlock_check('handed on', $next), "
	  . "dlock_is_held('handed on', $next), dlock_fence('handed on') IS NOT DISTINCT FROM $next";

	stop_process($receiver);
	is($successor->query("SELECT dlock_release_ticket($first)"),
		't', 'a holder releases while the standby does not answer');
	$successor->wait_for(
		"SELECT granted FROM dlock_locks WHERE ticket = $next");
	is($successor->query($holds), 'f|f|f', 'the next ticket does not hold yet');
	$successor->query('SET synchronous_commit = local; CREATE TABLE t (); BEGIN');
	$successor->query("SELECT dlock_guard('handed on', $next)");
	$successor->query('INSERT INTO t DEFAULT VALUES');
	like($successor->query('COMMIT'), qr/55L01/, 'the next ticket cannot guard a commit');
	continue_process($receiver);
	$successor->wait_for($holds =~ s/, d/ AND d/gr);
	is($successor->query("SELECT dlock_check('handed on', $first)"),
		'f', 'when the standby answers, the next ticket holds');
	$successor->query("SELECT dlock_release_ticket($next)");
	$successor->quit;
}

# This call wakes the worker, which sends a heartbeat, because a quarter of the
# ttl has passed since the last.  So no renewal waits, although the standby
# stops.
foreach my $hours (0, 0.27)
{
	time_passes($hours * 3600);
	is($client->query("SELECT dlock_set_info($lease{attached}, '$hours')"),
		't', 'the worker is woken');
}
$admin->wait_for('SELECT bool_and(flush_lsn >= pg_current_wal_flush_lsn()) '
	  . 'FROM pg_stat_replication');
stop_process($receiver);

# A renewal waits only briefly for the standby.
sub renewal_waits
{
	my ($name, $seconds) = @_;

	$client->start("SELECT dlock_renew($lease{$name})");
	$admin->wait_for(q{SELECT count(*) = 1 FROM pg_stat_activity }
		  . "WHERE pid = $client->{pid} AND wait_event = 'SyncRep'");
	time_passes($seconds);
	return $client->answer;
}

time_passes(0.1 * 3600);
is(renewed(), $all,
	'without the standby, its last answer is not a quarter old');
time_passes(0.2 * 3600);
like(
	renewal_waits('on', 20),
	qr/58030: could not renew lease $lease{on}.*HINT:  Renew again/s,
	'later, a renewal neither succeeds nor reports a loss');
$client->query(q{SET statement_timeout = '10ms'});
like($client->query("SELECT dlock_renew($lease{on})"),
	qr/57014/, 'a renewal does not wait beyond statement_timeout');
$client->query('RESET statement_timeout');
continue_process($receiver);
is(renewed(), $all, 'when the standby answers, all leases are renewed');

stop_process($receiver);
$worker = freeze($admin);
time_passes(0.8 * 3600);
like(renewal_waits('on', 20), qr/58030/, 'the standby does not answer again');
time_passes(0.6 * 3600);
is($other->query("SELECT dlock_check('on', $lease{on})"),
	'f', 'after a ttl and a quarter, the lease is reported gone');
continue_process($receiver);
$client->query("SET synchronous_commit = 'on'");
$client->query("SELECT pg_logical_emit_message(true, 'dlock', '')");
is( $client->query(
		"SELECT dlock_renew($lease{on}) IS NULL, dlock_check('on', $lease{on})"
	),
	't|f',
	'the lease stays gone when the standby answers');
thaw($worker);

#
# A renewal in time succeeds although the standby answers late.  It waits for
# at most ten seconds, so the machine must not be slow for that long.
#
my $answer = '';
foreach my $attempt (1 .. 5)
{
	my $fence = $client->query("SELECT dlock_ttl_acquire('late $attempt', '1h')");

	$worker = freeze($admin);
	stop_process($receiver);
	time_passes(3600 - 5);
	$client->start("SELECT dlock_renew($fence)");
	poll('the renewal waits for the standby',
		sub {
			$client->answered
			  || $admin->query(q{SELECT wait_event = 'SyncRep' FROM pg_stat_activity }
				  . "WHERE pid = $client->{pid}") eq 't';
		});
	time_passes(6);
	continue_process($receiver);
	$answer = '' . $client->answer;
	thaw($worker);
	last if $answer eq '1';
}
is($answer, '1', 'a renewal in time succeeds, though the standby answers late');

#
# A new ttl counts from its request, even if the standby answers late.
#
{
	my $fence = $client->query("SELECT dlock_ttl_acquire('ttl', '1h')");

	stop_process($receiver);
	$client->start("SELECT dlock_renew($fence, '1h')");
	$admin->wait_for(q{SELECT count(*) = 1 FROM pg_stat_activity }
		  . "WHERE pid = $client->{pid} AND wait_event = 'SyncRep'");
	$worker = freeze($admin);
	time_passes(0.5 * 3600);
	continue_process($receiver);
	is($client->answer, '1', 'the standby has the new ttl, after a while');
	stop_process($receiver);
	time_passes(0.8 * 3600);
	is($other->query("SELECT dlock_check('ttl', $fence)"),
		'f', 'the new ttl counts from before the answer');
	continue_process($receiver);
	thaw($worker);
}

$_->quit foreach $client, $other, $admin, $attached;
$standby->stop;
$node->stop;
done_testing();
