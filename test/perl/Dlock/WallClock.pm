
=pod

=head1 NAME

Dlock::WallClock - a wall clock that a test can set

=head1 DESCRIPTION

Processes started with the environment of wall_clock() read CLOCK_REALTIME from
a library that is loaded before the C library.  Monotonic clocks stay right.
PostgreSQL reads the clock in signal handlers, so the library only uses
functions that are safe there: libfaketime allocates memory, which corrupts the
heap if the signal has interrupted an allocation.

=over

=item wall_clock_is_ours()

Returns false if there is no C compiler, or the system is not Linux.

=item wall_clock()

Returns the environment as a hash.  Preloads the library after those that
LD_PRELOAD names already.

=item set_wall_clock($seconds)

Sets all these clocks ahead of the true time; behind it if negative.

=back

=cut

package Dlock::WallClock;

use strict;
use warnings FATAL => 'all';

use Dlock::Test;
use Exporter 'import';
use PostgreSQL::Test::Utils;

our @EXPORT = qw(wall_clock_is_ours wall_clock set_wall_clock);

my $source = <<'END_OF_SOURCE';
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long
ahead(void)
{
	int			saved_errno = errno;
	char		text[30] = "";
	int			file = open(getenv("DLOCK_WALL_CLOCK"), O_RDONLY | O_CLOEXEC);

	if (file >= 0)
	{
		if (read(file, text, sizeof(text) - 1) < 0)
			text[0] = '\0';
		close(file);
	}
	errno = saved_errno;
	return atol(text);
}

int
clock_gettime(clockid_t clock, struct timespec *now)
{
	static int	(*real) (clockid_t, struct timespec *);
	int			result;

	if (!real)
		*(void **) &real = dlsym(RTLD_NEXT, "clock_gettime");
	result = real(clock, now);
	if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
		now->tv_sec += ahead();
	return result;
}

int
gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec precise;
	int			result = clock_gettime(CLOCK_REALTIME, &precise);

	(void) zone;
	now->tv_sec = precise.tv_sec;
	now->tv_usec = precise.tv_nsec / 1000;
	return result;
}

time_t
time(time_t *result)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (result)
		*result = now.tv_sec;
	return now.tv_sec;
}
END_OF_SOURCE

my ($dir, $library);

sub wall_clock_is_ours
{
	$dir = PostgreSQL::Test::Utils::tempdir();
	set_wall_clock(0);
	$library = compile_library('wall', $source);
	return defined $library;
}

sub wall_clock
{
	return
	  LD_PRELOAD => preloaded($library),
	  DLOCK_WALL_CLOCK => "$dir/wall";
}

# Rename the new file, so that no process reads a part of the value.
sub set_wall_clock
{
	my ($seconds) = @_;

	append_to_file("$dir/wall.new", $seconds);
	rename("$dir/wall.new", "$dir/wall") or die "cannot rename: $!";
	return;
}

1;
