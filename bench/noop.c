/*-------------------------------------------------------------------------
 *
 * noop.c
 *	  What the benchmarks need of C: a function that does nothing, and a clock.
 *
 * Every call of a function that an extension brings costs its lookup and its
 * arguments, whatever it does then.  So the floor under dlock is a function of
 * the same signature, from a library as well, that only returns.
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

/* Microseconds of the clock that pgbench's log is written by, too */
static int64
read_clock(void)
{
	return GetCurrentTimestamp() + SECS_PER_DAY * USECS_PER_SEC *
		(POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE);
}

/*
 * Whose turn is it?  Among "kinds", each has "length" milliseconds in turn.
 * All sessions see the same clock.
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
 * Microseconds until it is the turn of "kind", for sessions that have no other
 * kind to do; 0 while it is
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
