
=pod

=head1 NAME

Dlock::Clock - control over the clock of leases, for TAP tests

=head1 DESCRIPTION

Leases use CLOCK_BOOTTIME, which runs on while the machine sleeps.  A server
started here reads this clock from a library that is loaded before the C
library.  A test can advance the clock for all processes at once, as a suspend
does, and can stop a process just after a reading of the clock.

=over

=item clock_is_ours()

Returns false if the test cannot do that, because the clock or a C compiler is
missing.

=item under_our_clock($sub)

Calls the sub.  Servers that it starts use this library's clock.

=item new_server_of_clock($name, $conf)

Returns a new server with that clock.  The server can have standbys, and waits
for them without limit if their processes are stopped.

=item time_passes($seconds)

Advances the clock by this time.

=item stop_at_reading($pid, $n)

Stops this process at its nth reading of the clock from now on.  Only the
latest call counts.

=item stopped_at_reading($pid, $sub)

Waits until the process has stopped at that reading, and returns true, or until
the sub returns true.

=back

=cut

package Dlock::Clock;

use strict;
use warnings FATAL => 'all';

use Dlock::Lease qw(process_state);
use Dlock::Test;
use Exporter 'import';
use PostgreSQL::Test::Utils ();

our @EXPORT = qw(clock_is_ours under_our_clock new_server_of_clock time_passes
  stop_at_reading stopped_at_reading);

my $source = <<'END_OF_SOURCE';
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int
clock_gettime(clockid_t clock, struct timespec *now)
{
	static int	(*real) (clockid_t, struct timespec *);
	static int	order_seen,
				readings;
	int			saved_errno = errno;
	int			order = 0,
				pid = 0,
				stop_at = 0;
	long		passed = 0;
	char		text[100] = "";
	int			result,
				file;

	if (!real)
		*(void **) &real = dlsym(RTLD_NEXT, "clock_gettime");
	result = real(clock, now);
	if (clock != CLOCK_BOOTTIME)
		return result;
	file = open(getenv("DLOCK_CLOCK"), O_RDONLY);
	if (file < 0 || read(file, text, sizeof(text) - 1) <= 0)
		abort();
	close(file);
	sscanf(text, "%ld %d %d %d", &passed, &order, &pid, &stop_at);
	now->tv_sec += passed;
	if (order != order_seen)
		readings = 0;
	order_seen = order;
	if (++readings == stop_at && pid == (int) getpid())
		raise(SIGSTOP);
	errno = saved_errno;
	return result;
}
END_OF_SOURCE

my ($dir, $library);
my ($passed, $order, $pid, $stop_at) = (0, 0, 0, 0);

# Rename the new file, so that no process reads a part of the value.
sub set_clock
{
	open(my $file, '>', "$dir/clock.new") or die "cannot write: $!";
	print $file "$passed $order $pid $stop_at\n";
	close($file);
	rename("$dir/clock.new", "$dir/clock") or die "cannot rename: $!";
	return;
}

sub clock_is_ours
{
	$dir = PostgreSQL::Test::Utils::tempdir();
	set_clock();
	$library = compile_library('clock', $source);
	return defined $library;
}

sub under_our_clock
{
	my ($sub) = @_;
	local $ENV{LD_PRELOAD} = preloaded($library);
	local $ENV{DLOCK_CLOCK} = "$dir/clock";

	return $sub->();
}

sub new_server_of_clock
{
	my ($name, $conf) = @_;
	my $patient = "wal_sender_timeout = 0\nwal_receiver_timeout = 0\n";

	return under_our_clock(
		sub {
			new_server($name,
				allows_streaming => 1,
				conf => $patient . ($conf // ''));
		});
}

sub time_passes
{
	my ($seconds) = @_;

	$passed += $seconds;
	set_clock();
	return;
}

sub stop_at_reading
{
	($pid, $stop_at) = @_;
	$order++;
	set_clock();
	return;
}

sub stopped_at_reading
{
	my ($process, $sub) = @_;
	my $stopped;

	poll("process $process is stopped",
		sub { ($stopped = process_state($process) =~ /^T/i) || $sub->() });
	return $stopped;
}

1;
