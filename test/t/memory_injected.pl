# An error at one step of a call, of a rollback or of an exit, as when there is no
# memory left: what was begun is not taken for what is there, and all else that
# was to be done is done.
#
# What would break it: an entry in a table of the backend's own that is there before
# what it stands for; a size that is noted before the memory is; a rollback that an
# error ends half way; an exit that gives up at the first thing that fails, so that
# what comes behind it seems to belong to somebody for ever; a call that fails, and
# gives up in the same way what it had got before.
#
# No setting brings such an error at the step that is wanted, so a debugger does.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main',
	conf => "synchronous_commit = local\n"
	  . "wal_level = replica\nmax_wal_senders = 1");
my $admin = session($node);
my $error = qr/ERROR:  55L01/;

plan skip_all => 'no debugger that can be attached'
  unless debugger_works($admin);

# A call that fails in the last of these functions
sub fails
{
	my ($session, $sql, @functions) = @_;
	my $raised = raise_in($session, @functions);

	like($session->query($sql), $error, "$functions[-1]: an error");
	$raised->();
	return;
}

#
# A guard that could not be made
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
		qr/ERROR:  55000/, 'guard: one that failed is none');
	$client->query("BEGIN; $guard; $insert");
	is($client->query('COMMIT'), '', 'guard: and can be made');
	$client->quit;
}

#
# A process that could not attach: its next call starts over
#
{
	foreach my $step ('dlock_lock_table_attach', 'dlock_id_tables_attach')
	{
		my $client = session($node);

		# there is something to attach to, and the library is loaded
		$admin->query('SELECT dlock_release_all()');
		$client->query('SELECT dlock_version()');
		fails($client, "SELECT dlock_acquire('lock')", $step);
		like($client->query("SELECT dlock_acquire('lock')"),
			qr/^\d+$/, "attaching: an error in $step is over");
		$client->quit;
	}
}

#
# A procedure's result that could not be described: nothing is acquired yet
#
{
	my $client = session($node);
	my $call = "CALL dlock_acquire_nosnapshot('lock')";

	fails($client, $call, 'BlessTupleDesc');
	is($client->query('SELECT dlock_release_all()'),
		'0', 'procedure: one that failed has acquired nothing');
	like($client->query($call), qr/^\d+$/, 'procedure: and can be called');
	$client->quit;
}

#
# An announcement that could not be prepared
#
{
	my $client = session($node);
	my $enqueue = "SELECT dlock_ttl_enqueue('lock', '1h', 'nobody')";
	my $ticket;

	# marks have their memory
	$client->query("SELECT dlock_xact_acquire('lock')");
	fails($client, $enqueue, 'dlock_xact_prepare_arming', 'MemoryContextAlloc');
	$ticket = $client->query($enqueue);
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', 'announcement: and can be');
	$client->quit;
}

#
# A watch that could not be entered
#
{
	my $client = session($node);

	$client->query("SELECT dlock_watch('other', 'nobody')");
	fails($client, "SELECT dlock_watch('lock', 'nobody')",
		'dlock_held_check_room', 'hash_search', 'hash_search');
	like($client->query("SELECT dlock_unwatch('lock')"),
		qr/WARNING:  55000.*\bf$/s, 'watch: one that failed is none');
	$client->query("SELECT dlock_watch('lock', 'nobody')");
	is($client->query("SELECT dlock_unwatch('lock')"),
		't', 'watch: and can be made');
	$client->quit;
}

#
# A rollback goes on
#
{
	my $client = session($node);
	my $ticket = $client->query("SELECT dlock_ttl_acquire('lease', '1h')");
	my $warning = qr/WARNING:  55L01: could not finish/;

	foreach my $work (
		[ "dlock_xact_acquire('lock')" => 'dlock_queue_leave' ],
		[ "dlock_set_slots('lock', 2)" => 'dlock_queue_finish_slots' ])
	{
		my ($call, $function) = @$work;
		my $raised;

		$client->query("BEGIN; SELECT $call");
		$raised = raise_in($client, $function);
		like($client->query('ROLLBACK'), $warning, "rollback: $call");
		$raised->();
	}
	$client->query('BEGIN; SAVEPOINT one');
	my $raised =
	  raise_in($client, 'dlock_finish_transaction', 'dlock_record_unref');
	like($client->query("SELECT dlock_guard('other', $ticket)"),
		$warning, 'rollback: of a savepoint');
	$raised->();
	$client->query('ROLLBACK TO one');
	is($client->query('SELECT 1'), '1', 'rollback: and the transaction goes on');
	$client->query('ROLLBACK');
	# what could not be given back
	$client->query('SELECT dlock_release_all()');
	$client->query("SELECT dlock_release_ticket($ticket)");
	$client->quit;
}

#
# An exit goes on: each of its leases runs out.
#
{
	my ($client, $other) = map { session($node) } 1 .. 2;
	my $raised;

	foreach my $name ('lock 1', 'lock 2')
	{
		my $lease = $client->query("SELECT dlock_lease_open('2s', attach => true)");

		$client->query("SELECT dlock_lease_acquire('$name', $lease)");
	}
	$raised = raise_in($client, 'dlock_lease_detach_all', 'dlock_record_unref');
	$admin->query("SELECT pg_terminate_backend($client->{pid})");
	$client->quit;
	backends_gone($client->{pid});
	$raised->();
	like($other->query("SELECT dlock_acquire('$_', timeout => '1min')"),
		qr/^\d+$/, "exit: $_")
	  foreach 'lock 1', 'lock 2';
	$other->quit;
}

# ... and the session has not said that it goes: the worker sees it
{
	my ($client, $other) = map { session($node) } 1 .. 2;
	my $lease = $client->query("SELECT dlock_lease_open('2s', attach => true)");
	my $raised;

	$client->query("SELECT dlock_lease_acquire('lock 3', $lease)");
	$raised = raise_in($client, 'dlock_lease_detach_all', 'dlock_lease_detach');
	$admin->query("SELECT pg_terminate_backend($client->{pid})");
	$client->quit;
	backends_gone($client->{pid});
	$raised->();
	like($other->query("SELECT dlock_acquire('lock 3', timeout => '30s')"),
		qr/^\d+$/, 'exit without a word: lock 3');
	$other->quit;
}

#
# A worker is gone when it has committed, and before it has noted that: the row is
# there for the next one.
#
{
	my $client = session($node);
	my $worker = $admin->query(
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'dlock worker'");
	my $gone = commands_in(
		{ pid => $worker }, 'CommitTransactionCommand',
		'finish', 'call (void) proc_exit(1)');

	$client->start("SELECT dlock_ttl_acquire('committed', '1h')");
	$gone->();
	my $ticket = $client->answer;
	like($ticket, qr/^\d+$/, 'worker gone behind its commit: acquired');
	isnt(
		$admin->query(
			"SELECT pid FROM pg_stat_activity WHERE backend_type = 'dlock worker'"),
		$worker,
		'worker gone behind its commit: there is another');
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', 'worker gone behind its commit: released');
	$admin->wait_for("SELECT count(*) = 0 FROM dlock_queue WHERE ticket = $ticket");
	$client->quit;
}

#
# What an exit could not give back goes, though nobody waits behind it who looks:
# held, or waiting.
#
foreach my $holds (1, 0)
{
	my ($holder, $client, $other) = map { session($node) } 1 .. 3;
	my $raised;

	$holder->query("SELECT dlock_acquire('lock')") unless $holds;
	$client->query("SELECT dlock_enqueue('lock')");
	$other->query("SELECT dlock_enqueue('lock')");
	$raised = raise_in($client, 'dlock_queue_leave');
	$admin->query("SELECT pg_terminate_backend($client->{pid})");
	$client->quit;
	backends_gone($client->{pid});
	$raised->();
	$holder->query("SELECT dlock_release('lock')") unless $holds;
	is_now(
		$admin,
		'SELECT string_agg(pid::text, \' \') FROM dlock_locks WHERE granted',
		$other->{pid},
		'exit: nobody is in the way');
	$_->quit foreach $holder, $other;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

#
# One of several locks cannot be had, and one that was got cannot be given back:
# the others are, and that one is the session's to release.
#
sub fails_at_the_last
{
	my ($client, $call, @functions) = @_;
	my $other = session($node);
	my $raised;

	$other->query("SELECT dlock_acquire('lock 3')");
	$raised = raise_in($client, @functions);
	like($client->query("SELECT $call"), $error, "all: $call");
	$raised->();
	$other->quit;
	return;
}

{
	my $client = session($node);
	my $names = "ARRAY['lock 1', 'lock 2', 'lock 3']";
	my $lease = $client->query("SELECT dlock_lease_open('1h')");
	my $locks = 'SELECT name FROM dlock_locks';

	foreach my $call ('dlock_acquire_all', 'dlock_xact_acquire_all')
	{
		# its first call gives up the place in the queue
		fails_at_the_last($client, "$call($names, timeout => '10ms')",
			('dlock_queue_leave') x 2);
		is_now($admin, $locks, 'lock 2', "all: $call, the others are free");
		$client->query('SELECT dlock_release_all()');
	}
	fails_at_the_last($client,
		"dlock_lease_acquire_all($names, $lease, timeout => '10ms')",
		'dlock_lease_ticket_withdraw', 'dlock_lock_find');
	is_now($admin, $locks, '', 'all: the worker ends it for the lease');
	$client->query("SELECT dlock_lease_close($lease)");
	$client->quit;
}

# A lease's ticket that cannot be made durable, and not be taken back: the worker does.
{
	my ($client, $other) = map { session($node) } 1 .. 2;
	my $call = "dlock_ttl_acquire('lock', '1h')";
	my $raised;

	commits_hang($node, 1);
	$client->start("SET synchronous_commit = on; SELECT $call");
	poll('the call waits for a standby', sub { hangs($node, $client) });
	$raised = raise_in($client, 'dlock_lease_ticket_withdraw', 'dlock_lock_find');
	$admin->query("SELECT pg_cancel_backend($client->{pid})");
	like($client->answer, qr/WARNING:  55L01/, "durable: $call");
	$raised->();
	commits_hang($node, 0);
	like($other->query("SELECT dlock_acquire('lock', timeout => '1min')"),
		qr/^\d+$/, 'durable: the worker ends it');
	$_->quit foreach $client, $other;
}

#
# A redirection that has failed, and cannot be undone: the worker does, and who had
# the ticket before has it as it was.
#
{
	my ($holder, $first, $second) = map { session($node) } 1 .. 3;
	my $lease = $admin->query("SELECT dlock_lease_open('1h')");
	my $enqueue = "dlock_lease_enqueue('lock', $lease, '%s')";
	my $channel = 'SELECT channel FROM dlock_queue WHERE ticket = %s';
	my ($ticket, $raised);

	$holder->query("SELECT dlock_acquire('lock')");
	$ticket = $first->query('SELECT ' . sprintf $enqueue, 'c1');
	commits_hang($node, 1);
	$second->start('SET synchronous_commit = on; SELECT '
		  . sprintf $enqueue, 'c2');
	poll('the call waits for a standby', sub { hangs($node, $second) });
	is($admin->query(sprintf $channel, $ticket),
		'c2', 'redirection: is in the row');
	$raised = raise_in($second, 'dlock_lease_ticket_undo_redirect', 'dlock_lease_map');
	$admin->query("SELECT pg_cancel_backend($second->{pid})");
	like($second->answer, qr/WARNING:  55L01/, 'redirection: fails');
	$raised->();
	commits_hang($node, 0);
	is_now($admin, sprintf($channel, $ticket), 'c1', 'redirection: is undone');
	is($admin->query("SELECT dlock_release_ticket($ticket)"),
		't', 'redirection: the ticket is there');
	$_->quit foreach $holder, $first, $second;
	$admin->query("SELECT dlock_lease_close($lease)");
}

#
# The last pin of a hold that has ended, and no entry in the journal yet: who comes
# next waits as everybody does, and writes nothing before that hold is removed.
#
{
	my ($guard, $next) = map { session($node) } 1 .. 2;
	my ($lease, $other) =
	  map { $admin->query("SELECT dlock_lease_open('1h')") } 1 .. 2;
	my $fence = $admin->query("SELECT dlock_lease_acquire('lock', $lease)");
	my ($raised, $worker);

	$guard->query('SET synchronous_commit = on; '
		  . "BEGIN; SELECT dlock_guard('lock', $fence); "
		  . 'INSERT INTO guarded VALUES (2)');
	commits_hang($node, 1);
	$guard->start('COMMIT');
	poll('the commit waits for a standby', sub { hangs($node, $guard) });
	is($admin->query("SELECT dlock_release_ticket($fence)"),
		't', 'unpinning: released meanwhile');
	$raised = raise_in($guard, 'dlock_queue_unpin', 'dlock_lease_begin_change');
	$worker = freeze($admin);
	commits_hang($node, 0);
	like($guard->answer, qr/WARNING:  55L01/, 'unpinning: fails');
	$raised->();
	$next->start("SELECT dlock_lease_acquire('lock', $other)");
	$admin->until_waits($next);
	thaw($worker);
	grows('unpinning: the worker does it', $fence, $next->answer);
	$_->quit foreach $guard, $next;
	$admin->query("SELECT dlock_lease_close($_)") foreach $lease, $other;
}

#
# A delay that is ended by force, which fails half way: the worker goes on.
#
{
	my ($keeper, $other) = map { session($node) } 1 .. 2;
	my $lease = $keeper->query(
		"SELECT dlock_lease_open('100ms', attach => true, delay => '1h')");
	my $raised;

	$keeper->query("SELECT dlock_lease_acquire('lock', $lease)");
	$keeper->quit;
	$admin->wait_for('SELECT count(*) = 1 FROM dlock_queue_lease WHERE delayed');
	# the library is to be known to the debugger
	$other->query('SELECT dlock_version()');
	$raised = raise_in($other, 'dlock_lease_force', ('dlock_lease_map') x 2);
	like($other->query("SELECT dlock_force_close($lease)"), $error, 'delay: fails');
	$raised->();
	like($other->query("SELECT dlock_acquire('lock', timeout => '1min')"),
		qr/^\d+$/, 'delay: and ends');
	$other->quit;
}

$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$admin->quit;
$node->stop;
done_testing();
