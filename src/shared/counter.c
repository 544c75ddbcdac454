/*-------------------------------------------------------------------------
 *
 * counter.c
 *	  What dlock_stats and dlock_wait_histogram count.
 *
 * Each backend counts for itself, without a lock, for the one space that its
 * DlockBackend names; what it has counted becomes that space's when it exits,
 * or changes to another one.  Whatever concerns another space, as when it gives
 * back what it has in one that was dropped, goes to that one's totals at once.
 *
 * As only the backend writes its counts, a reset does not touch them: it keeps
 * in mind what they add up to.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "shared/inner.h"

/* Upper bounds of the buckets of waits, in microseconds; the last has none. */
static const int64 wait_bounds[] = {
	INT64CONST(100), INT64CONST(250), INT64CONST(500),
	INT64CONST(1000), INT64CONST(2500), INT64CONST(5000),
	INT64CONST(10000), INT64CONST(25000), INT64CONST(50000),
	INT64CONST(100000), INT64CONST(250000), INT64CONST(500000),
	INT64CONST(1000000), INT64CONST(2500000), INT64CONST(5000000),
	INT64CONST(10000000), INT64CONST(30000000), INT64CONST(60000000),
	INT64CONST(300000000), INT64CONST(600000000), INT64CONST(1800000000),
	INT64CONST(3600000000)
};

StaticAssertDecl(lengthof(wait_bounds) + 1 == DLOCK_WAIT_BUCKETS,
				 "wait_bounds must match DLOCK_WAIT_BUCKETS");

/* As dlock_count_ticket(), where this backend counts for another space */
void
dlock_count_elsewhere(const DlockTicket *ticket, DlockCounter counter,
					  int64 amount)
{
	pg_atomic_fetch_add_u64(&dlock_space_at(ticket->space)->counters[counter],
							amount);
}

/* The bound of a bucket of waits, in microseconds; -1: the last one has none */
int64
dlock_wait_bound(int bucket)
{
	return bucket < (int) lengthof(wait_bounds) ? wait_bounds[bucket] : -1;
}

/* A session has waited so long. */
void
dlock_count_wait(uint64 waited)
{
	int			bucket = 0;

	while (bucket < (int) lengthof(wait_bounds) &&
		   waited > (uint64) wait_bounds[bucket])
		bucket++;
	dlock_count(DLOCK_COUNT_WAIT_US, waited);
	dlock_count(DLOCK_COUNT_WAITS + bucket, 1);
}

/*
 * From now on this backend counts for another space, or for none, where that is
 * NULL.  Raises nothing.
 */
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
	pg_atomic_write_u64(counted, space ? space->self : InvalidDsaPointer);
}

/*
 * Add up what was ever counted for a space, by backends gone and those alive.
 * Called with the lock of its counts, so that none is missed or counted twice.
 *
 * A ticket is held from its grant to its release.  Both are counted anyway; what
 * is counted as held is only what differs: one that was put back, and so has had
 * no grant, is one more; one that is ENDING, and still to be released, one less.
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

		if (pg_atomic_read_u64(&backend->space) != space->self)
			continue;
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
			sums[c] += pg_atomic_read_u64(&backend->counters[c]);
	}
	sums[DLOCK_COUNT_HELD] += sums[DLOCK_COUNT_ACQUIRED] -
		sums[DLOCK_COUNT_RELEASED];
}

/* What was counted since the latest reset; returns when that was. */
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

/* Begin to count anew; what there is now stays. */
void
dlock_reset_counters(DlockSpace *space)
{
	LWLockAcquire(&space->counts_lock, LW_EXCLUSIVE);
	add_up(space, space->counted_before);
	space->counted_before[DLOCK_COUNT_HELD] = 0;
	space->counted_since = GetCurrentTimestamp();
	LWLockRelease(&space->counts_lock);
}
