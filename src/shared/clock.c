/*-------------------------------------------------------------------------
 *
 * clock.c
 *	  The clock of leases.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <time.h>

#include "shared/inner.h"

/*
 * A time in microseconds, which never goes back.  It advances even while the
 * machine sleeps.  Otherwise, after a sleep, a server would honour leases that
 * ran out elsewhere.  Without CLOCK_BOOTTIME the machine must not sleep.
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
