/*-------------------------------------------------------------------------
 *
 * noop.c
 *	  C functions for the benchmarks: one that does nothing, and a clock.
 *
 * A call of an extension's function costs its lookup and its arguments, even
 * if the function does nothing.  The peer "noop" measures this cost.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/timestamp.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(bench_noop);
Datum
bench_noop(PG_FUNCTION_ARGS)
{
	PG_RETURN_INT64(1);
}

/* Microseconds since 1970, by the clock of pgbench's log */
static int64
read_clock(void)
{
	return GetCurrentTimestamp() + SECS_PER_DAY * USECS_PER_SEC *
		(POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE);
}

/*
 * The number of the kind whose turn it is.  Each of "kinds" kinds has "length"
 * milliseconds in turn.  All sessions read the same clock.
 */
PG_FUNCTION_INFO_V1(bench_turn);
Datum
bench_turn(PG_FUNCTION_ARGS)
{
	int32		kinds = PG_GETARG_INT32(0);
	int32		length = PG_GETARG_INT32(1);

	PG_RETURN_INT32((int32) (read_clock() / (length * INT64CONST(1000)) % kinds));
}

/*
 * Microseconds until the turn of "kind" begins, or 0 during its turn.  For
 * sessions that have only this kind.
 */
PG_FUNCTION_INFO_V1(bench_until_turn);
Datum
bench_until_turn(PG_FUNCTION_ARGS)
{
	int32		kind = PG_GETARG_INT32(0);
	int32		kinds = PG_GETARG_INT32(1);
	int64		length = PG_GETARG_INT32(2) * INT64CONST(1000);
	int64		into = read_clock() % (kinds * length);
	int64		begins = kind * length;

	if (into >= begins && into < begins + length)
		PG_RETURN_INT32(0);
	PG_RETURN_INT32((int32) ((begins - into + kinds * length) % (kinds * length)));
}
