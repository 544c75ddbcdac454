/*-------------------------------------------------------------------------
 *
 * clock.c
 *	  The clock by which leases live.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <time.h>

#include "shared/inner.h"

/*
 * Microseconds that never go back, and pass while the machine sleeps: a server
 * that wakes up must not honour what has run out elsewhere meanwhile.  Where
 * there is no such clock, the machine had better not sleep.  The clock of
 * instr_time is not always one that all processes share.
 */
uint64
dlock_monotonic_now(void)
{
#ifdef CLOCK_BOOTTIME
	const clockid_t clock = CLOCK_BOOTTIME;
#else
	const clockid_t clock = CLOCK_MONOTONIC;
#endif
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64) now.tv_sec * USECS_PER_SEC + now.tv_nsec / 1000;
}
