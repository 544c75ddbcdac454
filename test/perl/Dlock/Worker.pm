
=pod

=head1 NAME

Dlock::Worker - the worker of dlock, found and stopped by TAP tests

=head1 DESCRIPTION

Tests stop the worker at a point of its work for as long as they need.

=over

=item worker($session)

Waits for the worker of the session's database, and returns its process id.

=item no_worker($session)

Waits until that database has no worker.

=item freeze($session)

Stops the worker while it sleeps, and returns its process id.  The stopped
worker holds no lock that others need.

=item thaw($pid)

Lets the worker continue.  A worker that is still stopped at the end of the
test continues then.

=item stop_at_rows($session, $events, $committed)

From now on, stop_worker($session, $sub) stops the worker at the next row that
the worker writes or removes, which the sub must cause.  stop_worker() passes
the worker's process id to the sub, and returns it when the worker has stopped.
worker_goes_on($session) lets the worker continue.  The events are those of a
trigger: "INSERT OR DELETE".  With $committed, there must be a single event,
and the worker stops after it has committed the row, before it has told any
process.  This needs a debugger, see debugger_works(), which halts the process:
the process handles signals when it continues.

=item worker_dies($session)

Lets the stopped worker die at that row, of an error that cannot be caught.
The next worker starts by itself, and is stopped before it has begun, until
worker_goes_on($session).  The server must have no autovacuum.

=item next_worker_stops($session)

Call this after worker_dies().  The next worker begins, and stops at a row,
too.  Returns for how many seconds the worker has worked until then.  No other
session may have requested a worker meanwhile, by a wait for a lease or a call
of dlock.

=item worker_is_lost($session)

Lets the stopped worker die as worker_dies() does, but does not stop the next
worker.

=item come_and_go($session)

Acquires and releases so many tickets that the worker vacuums their table.
Returns when the tickets are gone.

=item others_go_on($session, $what)

Tests that locks in session and transaction scope still work, on a separate
name.

=item is_free($session, $name)

Is the name free, so that session scope acquires it at once?

=back

=cut

package Dlock::Worker;

use strict;
use warnings FATAL => 'all';

use Dlock::Debugger;
use Dlock::Lease qw(stop_while continue_process);
use Dlock::Test;
use Exporter 'import';
use Test::More;
use Time::HiRes qw(time);

our @EXPORT = qw(worker no_worker freeze thaw stop_at_rows stop_worker
  worker_goes_on worker_dies next_worker_stops worker_is_lost come_and_go
  others_go_on is_free);

my $workers = q{FROM pg_stat_activity WHERE backend_type = 'dlock worker'
	 AND datname = current_database()};

sub worker
{
	my ($session) = @_;
	my $pid;

	poll('a worker',
		sub { ($pid = $session->query("SELECT pid $workers")) =~ /^\d+$/ });
	return $pid;
}

sub no_worker
{
	my ($session) = @_;

	return $session->wait_for("SELECT count(*) = 0 $workers");
}

sub freeze
{
	my ($session) = @_;
	my $pid = worker($session);

	stop_while($session, $pid,
		"SELECT count(*) = 1 $workers AND pid = $pid "
		  . q{AND state = 'idle' AND wait_event_type = 'Extension'});
	return $pid;
}

sub thaw
{
	my ($pid) = @_;

	return continue_process($pid);
}

# By session: how to stop a worker, the debugger of the stopped worker, and
# whether the session keeps the next worker from beginning
my (%stop, %stopped, %holds_up);

sub stop_at_rows
{
	my ($session, $events, $committed) = @_;
	my @functions = map { 'simple_heap_' . lc } split / OR /, $events;

	# the first function that the worker calls after the commit
	push @functions, 'dlock_rows_commit', 'dlock_monotonic_now' if $committed;
	$stop{$session} = sub {
		my ($pid) = @_;

		return $committed ? stop_at_last($pid, @functions) : stop_at($pid, @functions);
	};
	return;
}

sub stop_worker
{
	my ($session, $sub) = @_;
	my $worker = worker($session);

	$stopped{$session} = $stop{$session}->($worker);
	$sub->($worker);
	$stopped{$session}->();
	return $worker;
}

sub worker_goes_on
{
	my ($session) = @_;
	my $stopped = delete $stopped{$session};

	$stopped->() if $stopped;
	$session->query('ROLLBACK') if delete $holds_up{$session};
	return;
}

sub worker_is_lost
{
	my ($session) = @_;
	my $stopped = delete $stopped{$session};

	$stopped->(
		'set {int} &ProcDiePending = 1',
		'set {int} &InterruptPending = 1',
		'set $pc = &ProcessInterrupts');
	return;
}

# A process reads the settings of its database before it begins.
my $held_up = q{FROM pg_locks
	WHERE relation = 'pg_db_role_setting'::regclass AND NOT granted};

sub worker_dies
{
	my ($session) = @_;

	$session->query(
		'BEGIN; LOCK TABLE pg_db_role_setting IN ACCESS EXCLUSIVE MODE');
	$holds_up{$session} = 1;
	worker_is_lost($session);
	$session->wait_for("SELECT count(*) > 0 $held_up");
	return;
}

sub next_worker_stops
{
	my ($session) = @_;
	my $next = $session->query("SELECT pid $held_up");

	die "not one that could be next: $next" unless $next =~ /^\d+$/;
	my $stopped = $stop{$session}->($next);
	my $start = time();

	worker_goes_on($session);
	$stopped->();
	$stopped{$session} = $stopped;
	return time() - $start;
}

sub come_and_go
{
	my ($session) = @_;
	my $rows = $session->query('SELECT count(*) FROM dlock_queue');
	my $gone = $session->query(q{
		SELECT dlock_lease_close(lease) FROM (
			SELECT lease, dlock_lease_acquire_all(names, lease)
			FROM dlock_lease_open('1h') AS lease,
				(SELECT array_agg('come and go ' || i) AS names
				FROM generate_series(1, 12000) AS i) AS n
			OFFSET 0) AS l});

	die "not 12000 tickets: $gone" if $gone ne '12000';
	return $session->wait_for("SELECT count(*) = $rows FROM dlock_queue");
}

sub others_go_on
{
	my ($session, $what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is(
		$session->query(
			"SELECT dlock_acquire('other') > 0, dlock_release('other'), "
			  . "dlock_xact_acquire('other') > 0"),
		't|t|t',
		"$what: session and transaction scope go on");
}

sub is_free
{
	my ($session, $name) = @_;

	return $session->query("SELECT dlock_try_acquire('$name') IS NOT NULL "
		  . "AND dlock_release('$name')") eq 't';
}

1;
