# One step of a call or of an exit fails, as if memory were used up.  An
# unfinished change does not count as made.  An exit does all its other steps.
#
# What would break it: an entry in a backend's table before the object exists;
# a size that is counted before the memory is allocated; a process that is half
# attached; a segment that a failed process leaves behind; a waiter that stays
# in a queue; an exit that stops at the first failure, so that its other
# tickets seem to have an owner for ever.
#
# No setting causes an error at a chosen step, so a debugger raises it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Test::More;

# With mmap, segments are files that the test can count.
my $node = new_server('main', conf => 'dynamic_shared_memory_type = mmap');
my $admin = session($node);
my $error = qr/ERROR:  55L01/;

plan skip_all => 'no debugger that can be attached'
  unless debugger_works($admin);

# Make a call fail in the last of these functions.
sub fails
{
	my ($session, $sql, @functions) = @_;
	my $raised = raise_in($session, @functions);

	like($session->query($sql), $error, "$functions[-1]: an error");
	$raised->();
	return;
}

#
# A guard that fails
#
{
	my $client = session($node);
	my $fence = $client->query("SELECT dlock_acquire('lock')");
	my $guard = "SELECT dlock_guard('lock', $fence)";
	my $insert = 'INSERT INTO guarded VALUES (1)';

	$node->safe_psql(
		'postgres', q{
		CREATE TABLE guarded (n integer);
		CREATE TRIGGER guard BEFORE INSERT ON guarded
			EXECUTE FUNCTION dlock_require_guard('lock')});
	fails($client, $guard, 'dlock_cancel_prepare', 'MemoryContextAllocHuge');
	fails($client, $guard, 'dlock_cancel_prepare');
	like($client->query($insert),
		qr/ERROR:  55000/, 'guard: a failed guard guards nothing');
	$client->query("BEGIN; $guard; $insert");
	is($client->query('COMMIT'), '', 'guard: a second call succeeds');
	$client->quit;
}

#
# A process fails to attach, or to create the segment.  Its next call starts
# over, and nothing stays behind.
#
sub segments
{
	return scalar(() = glob($node->data_dir . '/pg_dynshmem/mmap.*'));
}

foreach my $steps (
	['dsa_attach_in_place'], ['dshash_attach'],
	[ ('dshash_attach') x 2 ])
{
	my $client = session($node);
	my $name = join ', ', @$steps;
	my $segments = segments();

	# The memory exists, and the session has loaded the library.
	$admin->query('SELECT dlock_release_all()');
	$client->query('SELECT dlock_version()');
	fails($client, "SELECT dlock_acquire('lock')", @$steps) foreach 1 .. 2;
	like($client->query("SELECT dlock_acquire('lock')"),
		qr/^\d+$/, "attaching: an error in $name is over");
	is($admin->query("SELECT dlock_try_acquire('lock') IS NULL"),
		't', "attaching: to the memory of other sessions: $name");
	is(segments(), $segments, "attaching: nothing is left: $name");
	$client->quit;
}

my $create =
  'dsa_create_in_place' . ($node->pg_version >= 17 ? '_ext' : '');
foreach my $steps (
	['dlock_segment_create'], [$create],
	['dshash_create'], [ ('dshash_create') x 2 ])
{
	my $name = join ', ', @$steps;
	my ($client, $segments);

	$admin->quit;
	$node->restart;
	($client, $admin) = map { session($node) } 1 .. 2;
	$segments = segments();
	$client->query('SELECT dlock_version()');
	fails($client, "SELECT dlock_acquire('lock')", @$steps) foreach 1 .. 2;
	is(segments(), $segments, "making: nothing is left: $name");
	like($client->query("SELECT dlock_acquire('lock')"),
		qr/^\d+$/, "making: an error in $name is over");
	is($admin->query("SELECT dlock_try_acquire('lock') IS NULL"),
		't', "making: the memory of other sessions: $name");
	is(segments(), $segments + 1, "making: just one: $name");
	$client->quit;
}

#
# A name space that cannot be created or entered
#
foreach my $steps (1, 2)
{
	my $client;

	$node->safe_psql('postgres', "CREATE DATABASE space$steps");
	$node->safe_psql("space$steps", 'CREATE EXTENSION dlock');
	$client = session($node, "space$steps");
	$client->query('SELECT dlock_version()');
	fails($client, "SELECT dlock_acquire('lock')",
		('dsa_allocate_extended') x $steps);
	like($client->query("SELECT dlock_acquire('lock')"),
		qr/^\d+$/, "name space: a second call succeeds, $steps");
	is($client->query('SELECT count(*) FROM dlock_locks'),
		'1', "name space: there is one, $steps");
	$client->quit;
}

#
# A procedure cannot describe its result, and has acquired nothing yet
#
{
	my $client = session($node);
	my $call = "CALL dlock_acquire_nosnapshot('lock')";

	fails($client, $call, 'BlessTupleDesc');
	is($client->query('SELECT dlock_release_all()'),
		'0', 'procedure: a failed call has acquired nothing');
	like($client->query($call), qr/^\d+$/, 'procedure: a second call succeeds');
	$client->quit;
}

#
# A wait cannot begin, because there is no memory for the sketch of names: for
# its account, or for its two pieces
#
{
	my ($holder, $client, $next) = map { session($node, 'space1') } 1 .. 3;

	$holder->query("SELECT dlock_acquire('lock')");
	$client->query('SELECT dlock_version()');
	foreach my $step (1, 2, 2)
	{
		fails($client, "SELECT dlock_acquire('lock')",
			'dlock_contention_prepare', ('dsa_allocate_extended') x $step);
		is($holder->query('SELECT count(*) FROM dlock_locks'),
			'1', 'wait: a failed waiter is not in the queue');
	}
	fails($client, "SELECT dlock_acquire('lock')",
		'dlock_wait_for_grant', 'dlock_worker_look');
	my $shown = commands_in($client, 'dlock_session_acquire',
		'print dlock_my_backend->wait_ticket');
	is($client->query("SELECT dlock_try_acquire('lock') IS NULL"),
		't', 'wait: a wait that could not begin is over');
	like($shown->(), qr/^\$\d+ = 0$/m, 'wait: the failed wait is not shown any more');
	$next->start("SELECT dlock_acquire('lock')");
	$holder->until_waits($next);
	$holder->query("SELECT dlock_release('lock')");
	like($next->answer, qr/^\d+$/, 'wait: the next waiter has its turn');
	is($holder->query('SELECT name FROM dlock_contention'),
		'lock', 'wait: that wait is counted');
	$_->quit foreach $holder, $client, $next;
}

#
# An announcement that cannot be prepared
#
{
	my $client = session($node);
	my $enqueue = "SELECT dlock_ttl_enqueue('lock', '1h', 'nobody')";
	my $ticket;

	# The memory for marks is allocated.
	$client->query("SELECT dlock_xact_acquire('lock')");
	fails($client, $enqueue, 'dlock_xact_prepare_arming', 'MemoryContextAlloc');
	$ticket = $client->query($enqueue);
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', 'announcement: a second attempt succeeds');
	$client->quit;
}

#
# A watch that cannot be entered
#
{
	my $client = session($node);

	$client->query("SELECT dlock_watch('other', 'nobody')");
	foreach my $step ('hash_search', 'dlock_watch_begin')
	{
		fails($client, "SELECT dlock_watch('lock', 'nobody')",
			'dlock_request_check_memory', $step);
		like($client->query("SELECT dlock_unwatch('lock')"),
			qr/WARNING:  55000.*\bf$/s, "watch: a call that failed in $step watches nothing");
	}
	$client->query("SELECT dlock_watch('lock', 'nobody')");
	is($client->query("SELECT dlock_unwatch('lock')"),
		't', 'watch: a second call succeeds');
	$client->quit;
}

#
# The rollback at an exit fails because of another module.  All tickets are
# released, held or waiting, and attached leases expire.
#
{
	my ($client, $first, $second, $holder) = map { session($node) } 1 .. 4;
	my $ttl = ample(2);
	my $raised;

	$holder->query("SELECT dlock_acquire('wanted')");
	foreach my $name ('lease 1', 'lease 2')
	{
		my $lease = $client->query("SELECT dlock_lease_open('$ttl s', attach => true)");

		$client->query("SELECT dlock_lease_acquire('$name', $lease)");
	}
	$client->query(q{SELECT dlock_acquire('session'), dlock_acquire('counts', slots => 2),
		dlock_acquire('counts', slots => 2), dlock_enqueue('wanted', 'nobody'),
		dlock_watch('session', 'nobody')});
	$client->query(q{BEGIN; SELECT dlock_xact_acquire('xact 1');
		SAVEPOINT one; SELECT dlock_xact_acquire('xact 2'), dlock_set_slots('slots', 2)});
	$raised = raise_in($client, 'AbortOutOfAnyTransaction');
	$admin->query("SELECT pg_terminate_backend($client->{pid})");
	$client->quit;
	backends_gone($client->{pid});
	$raised->();
	foreach my $name ('session', 'xact 1', 'xact 2', 'lease 1', 'lease 2')
	{
		like($first->query("SELECT dlock_acquire('$name', timeout => '1min')"),
			qr/^\d+$/, "exit: $name is free");
	}
	# a request for which the slots that were set would be too few
	like(
		$first->query(
			"SELECT dlock_acquire('$_', slots => 3, permits => 3, timeout => '1min')"),
		qr/^\d+$/, "exit: all permits of $_ are free")
	  foreach 'counts', 'slots';
	$second->start("SELECT dlock_acquire('wanted')");
	$admin->until_waits($second);
	$holder->query("SELECT dlock_release('wanted')");
	like($second->answer, qr/^\d+$/, 'exit: no ticket blocks the next request');
	$_->quit foreach $first, $second, $holder;
}

#
# An exit fails before it has detached the leases of the session.  The leases
# expire when another process has taken the session's place.
#
{
	my $client = session($node);
	my $ttl = ample(2);
	my $lease = $client->query("SELECT dlock_lease_open('$ttl s', attach => true)");
	my $raised;

	$client->query("SELECT dlock_lease_acquire('attached', $lease)");
	$raised = raise_in($client, 'dlock_lease_detach_all');
	$admin->query("SELECT pg_terminate_backend($client->{pid})");
	$client->quit;
	backends_gone($client->{pid});
	$raised->();
	# The next process may get any free place, so take them all in turn.
	ok( poll(
			'the attached lease expires',
			sub {
				my $next = session($node);
				my $fence = $next->query("SELECT dlock_try_acquire('attached')");

				$next->quit;
				return $fence =~ /^\d+$/;
			}),
		'exit that fails: the attached lease expires');
}

#
# The rollback at an exit fails during a commit that has pinned its guarded
# locks.
#
{
	my ($client, $next) = map { session($node) } 1, 2;
	my $fence = $client->query("SELECT dlock_acquire('pinned')");
	my $raised;

	$client->query("BEGIN; SELECT dlock_guard('pinned', $fence)");
	$raised = commands_in(
		$client, '*PreCommit_Notify',
		'set {int} &ProcDiePending = 1',
		'set {int} &InterruptPending = 1',
		'tbreak *AbortOutOfAnyTransaction',
		'set $pc = &ProcessInterrupts',
		'continue',
		'set $pc = &dlock_raise_no_ticket');
	$client->may_end;
	$client->start('COMMIT');
	$raised->();
	like($client->answer, qr/FATAL:  57P01/, 'exit amid a commit: terminated');
	$client->quit;
	backends_gone($client->{pid});
	like($next->query("SELECT dlock_acquire('pinned', timeout => '1min')"),
		qr/^\d+$/, 'exit amid a commit: the lock is free');
	$next->quit;
}

#
# A worker exits after it has committed a row, before it has noted that.  The
# next worker finds the row.  The server has just started, so that the worker
# has nothing else to write, and no other reason to exit.
#
$admin->quit;
$node->append_conf('postgresql.conf', q{dlock.worker_idle_timeout = '1h'});
$node->restart;
$admin = session($node);
{
	my $client = session($node);
	my $before = $client->query("SELECT dlock_ttl_acquire('before', '1h')");

	# a lease for which a worker stays
	my $kept = $admin->query("SELECT dlock_ttl_acquire('kept', '2h')");
	$client->query("SELECT dlock_release_ticket($before)");
	$admin->wait_for(q{SELECT journal_lag = '0' AND
		(SELECT array_agg(name) = '{kept}' FROM dlock_queue) AND
		NOT EXISTS (SELECT FROM dlock_queue_lease) FROM dlock_stats});
	my $worker = $admin->query(
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'dlock worker'");
	my $gone = commands_in(
		{ pid => $worker }, 'dlock_rows_commit',
		'finish', 'call (void) proc_exit(1)');

	$client->start("SELECT dlock_ttl_acquire('committed', '1h')");
	like($gone->(), qr/exited with code 01/,
		'worker gone behind its commit');
	my $ticket = $client->answer;
	like($ticket, qr/^\d+$/, 'worker gone behind its commit: acquired');
	isnt(
		$admin->query(
			"SELECT pid FROM pg_stat_activity WHERE backend_type = 'dlock worker'"),
		$worker,
		'worker gone behind its commit: there is another worker');
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', 'worker gone behind its commit: released');
	$admin->wait_for("SELECT count(*) = 0 FROM dlock_queue WHERE ticket = $ticket");
	$client->quit;
	$admin->query("SELECT dlock_release_ticket($kept)");
}

$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$admin->quit;
$node->stop;
done_testing();
