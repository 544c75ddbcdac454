/*-------------------------------------------------------------------------
 *
 * noop.c
 *	  What the benchmark needs of C: a function that does nothing, and a clock.
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

/*
 * Whose turn is it?  Among "kinds", each has "length" milliseconds in turn.
 * All sessions see the same clock, and pgbench's log is written by it, too.
 */
PG_FUNCTION_INFO_V1(bench_turn);
Datum
bench_turn(PG_FUNCTION_ARGS)
{
	int32		kinds = PG_GETARG_INT32(0);
	int32		length = PG_GETARG_INT32(1);
	int64		now = GetCurrentTimestamp() + SECS_PER_DAY * USECS_PER_SEC *
		(POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE);

	PG_RETURN_INT32((int32) (now / (length * INT64CONST(1000)) % kinds));
}
