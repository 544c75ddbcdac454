
=pod

=head1 NAME

Dlock::Lease - what TAP tests of leases and announcements share

=head1 DESCRIPTION

Expected announcements; processes that are stopped for a while; and commits
that wait for a standby that does not exist, so that a test can keep a change
unfinished.

=over

=item announcement($event, $name, $ticket)

The payload.

=item enqueue($session, $name, $arguments)

The ticket of a session; the arguments, with a comma first, follow the name.
On demand.

=item told($session, $test, @announcements)

These have come next, and no others.

=item is_now($session, $sql, $expected, $test)

Repeats the query until the result is as expected; tests the final result.

=item stop_process($pid), continue_process($pid)

By signals.  Once stop_process() has returned, the process does nothing.

=item process_state($pid)

Its letter: "T" if it is stopped.  On demand.

=item stop_while($session, $pid, $sql)

Stops the process when the query's result is "t", and stays so: while it
sleeps, without a lock that others need.

=item commits_hang($node, $hang)

Lets commits wait for a standby from now on, or not any more, if their
synchronous_commit is "on", while the server's is "local".  The server must be
able to have standbys.

=item hangs($node, $session)

Does this session's commit wait for a standby?

=back

=cut

package Dlock::Lease;

use strict;
use warnings FATAL => 'all';

use Dlock::Test;
use Exporter 'import';
use Test::More;

our @EXPORT = qw(announcement told is_now stop_process stop_while
  continue_process commits_hang hangs);
our @EXPORT_OK = qw(enqueue process_state);

my %stopped;

sub announcement
{
	my ($event, $name, $ticket) = @_;

	return qq({"event":"$event","lock":"$name","ticket":$ticket});
}

sub enqueue
{
	my ($session, $name, $arguments) = @_;
	my $ticket = $session->query(
		"SELECT dlock_enqueue('$name'" . ($arguments // '') . ')');

	die "no ticket: $ticket" unless $ticket =~ /^\d+$/;
	return $ticket;
}

sub told
{
	my ($session, $test, @announcements) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is(
		join("\n", $session->announcements(scalar(@announcements))),
		join("\n", @announcements), $test);
}

sub is_now
{
	my ($session, $sql, $expected, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $result;

	eval {
		poll($test,
			sub { ($result = $session->query($sql)) eq $expected });
	};
	return is($result, $expected, $test);
}

# As shown by ps, which may not be installed
sub process_state
{
	my ($pid) = @_;

	if (open(my $stat, '<', "/proc/$pid/stat"))
	{
		return <$stat> =~ /.*\)\s+(\S)/ ? $1 : '';
	}
	return `ps -o state= -p $pid` =~ s/^\s+//r;
}

# A signal takes effect some time later.
sub stop_process
{
	my ($pid) = @_;

	$stopped{$pid} = 1;
	kill('STOP', $pid) == 1 or die "no process $pid";
	# if it was exiting, and its parent is stopped, it stays a zombie
	poll("process $pid is stopped", sub { process_state($pid) =~ /^[TZ]/i });
	return;
}

sub continue_process
{
	my ($pid) = @_;

	kill('CONT', $pid) == 1 or die "no process $pid";
	delete $stopped{$pid};
	return;
}

# It may wake before the signal comes.
sub stop_while
{
	my ($session, $pid, $sql) = @_;

	poll("process $pid is stopped while it sleeps",
		sub {
			$session->wait_for($sql);
			stop_process($pid);
			return 1 if $session->query($sql) eq 't';
			continue_process($pid);
			return 0;
		});
	return;
}

# A server can end only with all its processes.
END
{
	kill('CONT', keys %stopped);
}

sub hangs
{
	my ($node, $session) = @_;

	return $node->safe_psql('postgres',
		    'SELECT count(*) = 1 FROM pg_stat_activity '
		  . "WHERE pid = $session->{pid} AND wait_event = 'SyncRep'") eq 't';
}

# The checkpointer applies it, some time after the setting.
sub commits_hang
{
	my ($node, $hang) = @_;
	my $names = $hang ? 'nobody' : '';
	my $probe = session($node);

	$probe->query("ALTER SYSTEM SET synchronous_standby_names = '$names'");
	$probe->query('SELECT pg_reload_conf()');
	poll(
		"commits: $names",
		sub {
			$probe->start('BEGIN; SET LOCAL synchronous_commit = on; '
				  . "SELECT pg_logical_emit_message(true, 'probe', ''); COMMIT");
			poll('commit', sub { $probe->answered || hangs($node, $probe) });
			my $hung = !$probe->answered && hangs($node, $probe);
			$node->safe_psql('postgres',
				"SELECT pg_cancel_backend($probe->{pid})")
			  if $hung;
			$probe->answer;
			return !$hung == !$hang;
		});
	$probe->quit;
	return;
}

1;
