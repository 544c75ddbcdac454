
=pod

=head1 NAME

Dlock::Debugger - lets TAP tests control processes by a debugger

=head1 DESCRIPTION

Tests stop a process between two steps of its code.

=over

=item debugger_works($session)

Is there a debugger, and can it attach to a server's process?

=item call_in($pid, $function, @arguments)

Makes a process call a function with these integers.

=item stop_behind($session, $function)

Stops the session's process when its next statement has called this function
and the function has returned.  Returns a sub: the first call waits until the
process is stopped, the second call lets it continue.

=item stop_at($pid, @functions)

Stops the process at the beginning of the first of these functions that it
calls.  Returns a sub as stop_behind() does.  The arguments of the sub's second
call are debugger commands, executed before the process continues.

=item stop_at_last($pid, @functions)

Stops the process at the last of these functions, which it calls in this
order.  A number among the functions is a pause in seconds at that point.

=item fail_in($session, $function, $stop)

Makes the session fail instead of calling the function, as if it was canceled
at that point.  The session is stopped at its next call of $stop.  Returns a
sub as stop_behind() does.

=item commands_in($session, $function, @commands)

Executes debugger commands when the session's next statement calls this
function.  Returns a sub that waits for the commands, and returns their output.

=item raise_in($session, @functions)

When the session's next statement calls these functions in this order, it
raises an error instead of the last call.  Returns a sub that waits for the
error.

=back

=cut

package Dlock::Debugger;

use strict;
use warnings FATAL => 'all';

use Dlock::Test;
use Exporter 'import';
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(debugger_works call_in commands_in fail_in raise_in
  stop_at stop_at_last stop_behind);

my $count = 0;

# A place may never be reached: the compiler can move or remove a function.
sub limit
{
	return IPC::Run::timeout(2 * $PostgreSQL::Test::Utils::timeout_default);
}

sub arguments
{
	my ($pid, @commands) = @_;

	return [
		qw(gdb -q -batch -nx -ex), 'set pagination off', '-p', $pid,
		# "all" does not include SIGINT
		map { ('-ex', $_) } 'handle all nostop noprint pass',
		'handle SIGINT nostop noprint pass', @commands
	];
}

sub call_in
{
	my ($pid, $function, @numbers) = @_;
	my $call = sprintf '((long (*)()) %s)(%s)', $function, join ', ', @numbers;
	my $output = '';

	eval {
		IPC::Run::run(
			arguments($pid, "print $call"),
			'<', \undef, '>&', \$output, IPC::Run::timeout(60));
	};
	return 1 if $output =~ /^\$1 = /m;
	diag($output);
	return 0;
}

sub debugger_works
{
	my ($session) = @_;

	return call_in($session->{pid}, 'getpid');
}

# Returns the process to stop in the session's next statement.
sub pid_of_next
{
	my ($session) = @_;

	$session->is_next if ref $session ne 'HASH';
	return $session->{pid};
}

sub stop_behind
{
	my ($session, $function) = @_;

	return stop(pid_of_next($session), [$function], 'finish');
}

sub stop_at
{
	my ($pid, @functions) = @_;

	return stop($pid, [ map { "*$_" } @functions ]);
}

sub stop_at_last
{
	my ($pid, $first, @others) = @_;

	return stop($pid, ["*$first"],
		map { /^[\d.]+$/ ? "shell sleep $_" : ("tbreak *$_", 'continue') }
		  @others);
}

# Stops at the function's first instruction.  This works for any function.
sub fail_in
{
	my ($session, $function, $stop) = @_;

	return stop(
		pid_of_next($session), ["*$function"],
		'set {int} &QueryCancelPending = 1',
		'set {int} &InterruptPending = 1',
		'set $pc = &ProcessInterrupts',
		"break $stop",
		'continue');
}

sub commands_in
{
	my ($session, $function, @commands) = @_;
	my $attached =
	  "$PostgreSQL::Test::Utils::tmp_check/debugger_${$}_" . $count++;
	my $output = '';

	my $debugger = IPC::Run::start(
		arguments(
			pid_of_next($session), "break $function",
			"shell touch $attached", 'continue',
			'delete', @commands,
			'detach'),
		'<', \undef, '>&', \$output, limit());

	poll($attached,
		sub { $debugger->pump_nb if $debugger->pumpable; -e $attached });
	return sub {
		$debugger->finish;
		return $output;
	};
}

# The function called instead raises an error for every argument.
sub raise_in
{
	my ($session, $first, @others) = @_;

	return commands_in(
		$session, "*$first",
		(map { ("tbreak *$_", 'continue') } @others),
		'set $pc = &dlock_raise_no_ticket');
}

# file => debugger that waits for the file, and stops a process now or later
my %waiting;

# Stops at one of the places, then executes these commands.
sub stop
{
	my ($pid, $places, @commands) = @_;
	my $file = "$PostgreSQL::Test::Utils::tmp_check/debugger_${$}_" . $count++;
	my $output = '';
	my $debugger = IPC::Run::start(
		arguments(
			$pid,
			(map { "break $_" } @$places),
			"shell touch $file.attached",
			'continue',
			'delete',
			@commands,
			"shell touch $file.stopped; "
			  . "while [ ! -e $file.go_on ]; do sleep 0.05; done",
			"source $file.go_on",
			'detach'),
		'<', \undef, '>&', \$output, limit());
	my $until = sub {
		my ($file) = @_;

		poll($file, sub { $debugger->pump_nb if $debugger->pumpable; -e $file });
	};
	my $stopped = 0;

	$waiting{"$file.go_on"} = 1;
	$until->("$file.attached");
	return sub {
		my (@last) = @_;

		if (!$stopped++)
		{
			$until->("$file.stopped");
			return;
		}
		PostgreSQL::Test::Utils::append_to_file("$file.last",
			join '', map { "$_\n" } @last);
		rename "$file.last", "$file.go_on" or die "$file: $!";
		delete $waiting{"$file.go_on"};
		$debugger->finish;
		note $output;
		return;
	};
}

# A server can shut down only if none of its processes is stopped.
END
{
	PostgreSQL::Test::Utils::append_to_file($_, '') foreach keys %waiting;
}

1;
