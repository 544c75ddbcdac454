
=pod

=head1 NAME

Dlock::Lease - functions shared by TAP tests of leases and announcements

=head1 DESCRIPTION

These functions check announcements, stop processes for a while, and let
commits wait for a missing standby, so that a test can keep a change
unfinished.

=over

=item announcement($event, $name, $ticket)

Returns the payload of the announcement.

=item enqueue($session, $name, $arguments)

Enqueues, and returns the ticket.  The arguments follow the name and begin with
a comma.  Exported only on request.

=item told($session, $test, @announcements)

Tests that the session has received exactly these announcements since the last
call.

=item is_now($session, $sql, $expected, $test)

Repeats the query until it returns the expected result, and tests the final
result.

=item stop_process($pid), continue_process($pid)

Stop and continue the process by signals.  Once stop_process() has returned,
the process does nothing.

=item process_state($pid)

The state as a letter: "T" if the process is stopped.  Exported only on
request.

=item stop_while($session, $pid, $sql)

Stops the process while it sleeps and holds no lock that others need.  The
query must return "t" before and after the stop, to show that.

=item commits_hang($node, $hang)

If $hang is true, commits with synchronous_commit "on" wait for a standby from
now on.  Otherwise they do not.  The server's own synchronous_commit must be
"local".  The server must allow standbys.

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

# Returns the state as shown by ps, which may not be installed.
sub process_state
{
	my ($pid) = @_;

	if (open(my $stat, '<', "/proc/$pid/stat"))
	{
		return <$stat> =~ /.*\)\s+(\S)/ ? $1 : '';
	}
	return `ps -o state= -p $pid` =~ s/^\s+//r;
}

# A signal takes effect with a delay.
sub stop_process
{
	my ($pid) = @_;

	$stopped{$pid} = 1;
	kill('STOP', $pid) == 1 or die "no process $pid";
	# an exiting process whose parent is stopped stays a zombie
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

# The process may wake before the signal arrives.
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

# A server can shut down only if none of its processes is stopped.
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

# The checkpointer applies the setting, with a delay.
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
