/*-------------------------------------------------------------------------
 *
 * cpu.c
 *	  The processor time of a process.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <time.h>

#include "fmgr.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(bench_process_cpu);

/* bench_process_cpu(pid): in nanoseconds, 0 if there is no such process */
Datum
bench_process_cpu(PG_FUNCTION_ARGS)
{
	clockid_t	clock;
	struct timespec time;

	if (clock_getcpuclockid(PG_GETARG_INT32(0), &clock) != 0 ||
		clock_gettime(clock, &time) != 0)
		PG_RETURN_INT64(0);
	PG_RETURN_INT64(time.tv_sec * INT64CONST(1000000000) + time.tv_nsec);
}
