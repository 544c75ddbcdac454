/*-------------------------------------------------------------------------
 *
 * counter.c
 *	  Counters for dlock_stats and dlock_wait_histogram.
 *
 * A backend counts for one space in its DlockBackend, without a lock.  For
 * other spaces, it adds to the shared totals at once.  No other process writes
 * a backend's counts, so a reset only stores the sums, to be subtracted later.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "shared/inner.h"

/* Upper bounds of the buckets of waits, in microseconds; -1: none */
const int64 dlock_wait_bounds[] = {
	INT64CONST(100), INT64CONST(250), INT64CONST(500),
	INT64CONST(1000), INT64CONST(2500), INT64CONST(5000),
	INT64CONST(10000), INT64CONST(25000), INT64CONST(50000),
	INT64CONST(100000), INT64CONST(250000), INT64CONST(500000),
	INT64CONST(1000000), INT64CONST(2500000), INT64CONST(5000000),
	INT64CONST(10000000), INT64CONST(30000000), INT64CONST(60000000),
	INT64CONST(300000000), INT64CONST(600000000), INT64CONST(1800000000),
	INT64CONST(3600000000), -1
};

StaticAssertDecl(lengthof(dlock_wait_bounds) == DLOCK_WAIT_BUCKETS,
				 "dlock_wait_bounds must match DLOCK_WAIT_BUCKETS");

void
dlock_count_wait(uint64 waited)
{
	int			bucket = 0;

	/* the last bound, -1, is the greatest as an unsigned number */
	while (waited > (uint64) dlock_wait_bounds[bucket])
		bucket++;
	dlock_count(DLOCK_COUNT_WAIT_US, waited);
	dlock_count(DLOCK_COUNT_WAITS + bucket, 1);
}

/* From now on, count for this space (NULL: for none).  Raises nothing. */
void
dlock_count_for(DlockSpace *space)
{
	pg_atomic_uint64 *counted = &dlock_my_backend->space;
	dsa_pointer before = pg_atomic_read_u64(counted);
	DlockSpace *last;

	if (DsaPointerIsValid(before))
	{
		last = dlock_space_at(before);
		LWLockAcquire(&last->counts_lock, LW_EXCLUSIVE);
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		{
			pg_atomic_uint64 *mine = &dlock_my_backend->counters[c];

			pg_atomic_fetch_add_u64(&last->counters[c],
									pg_atomic_read_u64(mine));
			pg_atomic_write_u64(mine, 0);
		}
		pg_atomic_write_u64(counted, InvalidDsaPointer);
		LWLockRelease(&last->counts_lock);
	}
	pg_atomic_write_u64(counted, space ? dlock_pointer(space) : InvalidDsaPointer);
}

/*
 * All that was ever counted for a space.  The caller holds counts_lock, so no
 * count is missed or added twice.  The number of held tickets is the number of
 * granted tickets, minus the released ones, plus DLOCK_COUNT_HELD.  It has 1
 * for each ticket that was loaded as a holder, and -1 for each ENDING ticket.
 */
static void
add_up(DlockSpace *space, uint64 *sums)
{
	Assert(LWLockHeldByMe(&space->counts_lock));
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		sums[c] = pg_atomic_read_u64(&space->counters[c]);
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];

		if (pg_atomic_read_u64(&backend->space) != dlock_pointer(space))
			continue;
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
			sums[c] += pg_atomic_read_u64(&backend->counters[c]);
	}
	sums[DLOCK_COUNT_HELD] += sums[DLOCK_COUNT_ACQUIRED] -
		sums[DLOCK_COUNT_RELEASED];
}

/* Counts since the latest reset; returns the time of this reset */
TimestampTz
dlock_sum_counters(DlockSpace *space, uint64 *sums)
{
	TimestampTz since;

	LWLockAcquire(&space->counts_lock, LW_SHARED);
	add_up(space, sums);
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		sums[c] -= space->counted_before[c];
	since = space->counted_since;
	LWLockRelease(&space->counts_lock);
	return since;
}

/* Reset the sketch, and all counts except that of the held tickets. */
void
dlock_reset_counters(DlockSpace *space)
{
	LWLockAcquire(&space->counts_lock, LW_EXCLUSIVE);
	add_up(space, space->counted_before);
	space->counted_before[DLOCK_COUNT_HELD] = 0;
	space->counted_since = GetCurrentTimestamp();
	LWLockRelease(&space->counts_lock);
	dlock_contention_reset(space);
}
