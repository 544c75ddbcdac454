# DROP EXTENSION while sessions wait: no session gets the answer that it holds
# a lock of a name space that is gone, or continues to wait there, whatever
# holds the lock.
#
# What would break it: a grant in the old space to a waiter that does not check
# if the space is still current, while another session holds the lock in the
# new space; a waiter that no process wakes; an internal error for a session
# that waits for a table of the extension; a ticket that is found by its number
# in another space; a session that mistakes a rollback or another change for a
# DROP.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Test::More;

# No session looks for deadlocks.
my $node = new_server('main', conf => "deadlock_timeout = 10min\n");
my ($holder, $admin) = map { session($node) } 1 .. 2;
my $gone = qr/ERROR:  55L01: lock "lock" is gone.*DETAIL:  Extension "dlock" was dropped.*HINT:  \S/s;
my $again = 'DROP EXTENSION dlock; CREATE EXTENSION dlock';

# Start a session for each of these statements, and return when all wait.
sub waiters
{
	my @calls = @_;
	my @waiters;

	foreach my $call (@calls)
	{
		my $waiter = session($node);

		$waiter->start("SELECT $call");
		$admin->until_waits($waiter);
		push @waiters, $waiter;
	}
	return @waiters;
}

sub finish
{
	$_->quit foreach @_;
	return;
}

#
# The waiters wait for a session, which keeps its lock
#
$holder->query("SELECT dlock_acquire('lock')");
my $lease = $holder->query("SELECT dlock_lease_open('1h')");
my $enqueuer = session($node);
my $ticket = $enqueuer->query("SELECT dlock_enqueue('lock')");
my %waiting = (
	acquire => "dlock_acquire('lock')",
	'try_acquire with a timeout' => "dlock_try_acquire('lock', '1h')",
	xact_acquire => "dlock_xact_acquire('lock')",
	acquire_all => "dlock_acquire_all('{a lock, lock}')",
	lease_acquire => "dlock_lease_acquire('lock', $lease)",
	ttl_acquire => "dlock_ttl_acquire('lock', '1h')");
my @calls = sort keys %waiting;
my @waiters = waiters(map { $waiting{$_} } @calls);
my $caller = session($node);

$enqueuer->start("SELECT dlock_wait($ticket)");
$caller->start("CALL dlock_acquire_nosnapshot('lock')");
$admin->until_waits($caller);
$admin->query($again);
like($waiters[$_]->answer, $gone, "$calls[$_] ends") foreach 0 .. $#calls;
like($enqueuer->answer, $gone, 'wait ends');
like($caller->answer, $gone, 'acquire_nosnapshot ends');
like($waiters[0]->query("SELECT dlock_acquire('lock')"),
	qr/^\d+$/, 'the lock can be acquired again');

# Calls with the number of an old ticket
like($enqueuer->query("SELECT dlock_wait($ticket, '0')"),
	qr/ERROR:  55L01: ticket $ticket is gone/, 'an old ticket is gone');
like($enqueuer->query("SELECT dlock_release_ticket($ticket)"),
	qr/WARNING:  55000: .*^f$/ms, 'an old ticket cannot be released');
finish($enqueuer, $caller, @waiters);

#
# The grant comes while another session has the lock in the new space.
#
foreach my $call ("dlock_acquire('lock')", "dlock_ttl_acquire('lock', '1h')")
{
	my $other = session($node);
	my ($waiter, $fence);

	$admin->query('SELECT dlock_release_all()');
	$holder->query("SELECT dlock_acquire('lock')");
	($waiter) = waiters($call);
	stop_while($admin, $waiter->{pid},
		"SELECT wait_event = 'userlock' FROM pg_stat_activity "
		  . "WHERE pid = $waiter->{pid}");
	$admin->query($again);
	like($other->query("SELECT dlock_acquire('lock')"),
		qr/^\d+$/, 'another session holds the lock in the new space');
	$holder->quit;
	backends_gone($holder->{pid});
	continue_process($waiter->{pid});
	like($waiter->answer, $gone, "$call is granted a ticket that is gone");
	finish($waiter, $other);
	$holder = session($node);
}

#
# The waiters wait for a lease, which ends with the extension
#
$holder->query("SELECT dlock_ttl_acquire('lock', '1h')");
@waiters = waiters("dlock_acquire('lock')",
	"dlock_ttl_acquire('lock', '1h', owner => 'another')");
$admin->query($again);
like($_->answer, $gone, 'behind a lease') foreach @waiters;
finish(@waiters);

#
# A change of pg_proc, or a DROP that is rolled back, does not affect waiters.
#
$holder->query("SELECT dlock_acquire('lock')");
my ($first, $second) = waiters("dlock_acquire('lock') > 0",
	"dlock_acquire('lock') > 0");
$admin->query('BEGIN');
$admin->query('DROP EXTENSION dlock');
$admin->query('CREATE EXTENSION dlock');
$admin->query("SELECT dlock_acquire('lock')");
$admin->query('ROLLBACK');
$admin->query('CREATE FUNCTION f() RETURNS integer LANGUAGE sql RETURN 1');
is($holder->query("SELECT dlock_release('lock')"), 't', 'released');
is($first->answer, 't', 'the next waiter has the lock, in the same space');
is($first->query("SELECT dlock_release('lock')"), 't', 'released');
is($second->answer, 't', 'then the last waiter has the lock');
finish($first, $second);

#
# A transaction that uses no table notices a DROP, too.
#
$holder->query("PREPARE p AS SELECT dlock_acquire('lock') > 0");
$holder->query('BEGIN');
$holder->query('EXECUTE p');
$admin->query($again);
is($admin->query("SELECT dlock_acquire('lock') > 0"), 't', 'held again');
$holder->start('EXECUTE p');
$admin->until_waits($holder);
$admin->query("SELECT dlock_release('lock')");
is($holder->answer, 't', 'the session waits for the holder in the new space');

finish($holder);

#
# Calls wait for a table, or for the sequence, while the extension is dropped:
# the first calls after a start, which load the lease tables, and other calls.
#
$gone = qr/ERROR:  55L01: extension "dlock" was dropped during the call.*HINT:  \S/s;
sub wait_for_drop
{
	my ($what, @statements) = @_;
	my @sessions = map { session($node) } @statements;

	$admin->query('BEGIN');
	$admin->query('DROP EXTENSION dlock');
	$sessions[$_]->start($statements[$_]) foreach 0 .. $#statements;
	my $pids = join(', ', map { $_->{pid} } @sessions);
	poll("$what wait", sub {
		$node->safe_psql('postgres', 'SELECT count(*) FROM pg_stat_activity '
			  . "WHERE wait_event_type = 'Lock' AND pid IN ($pids)") == @sessions });
	$admin->query('COMMIT');
	like($sessions[$_]->answer, $gone, "$what: $statements[$_]") foreach 0 .. $#statements;
	$admin->query('CREATE EXTENSION dlock');
	finish(@sessions);
	return;
}
$admin->quit;
$node->restart;
$admin = session($node);
wait_for_drop('the first calls',
	"SELECT dlock_acquire('lock')",
	"SELECT dlock_ttl_acquire('lock', '1s')",
	"SELECT dlock_fence('lock')",
	'SELECT * FROM dlock_lock_status()');
like($admin->query("SELECT dlock_lease_open('1h')"), qr/^\d+$/, 'all is loaded');
wait_for_drop('others',
	"SELECT dlock_version_bump('name', 0)",
	"SELECT dlock_version_of('name')",
	"SELECT dlock_set_slots('lock', 2)",
	"SELECT dlock_reserve('lock', current_user::regrole)",
	'SELECT dlock_advance_ticket(1)');

finish($admin);
$node->stop;
done_testing();
