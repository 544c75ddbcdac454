/*-------------------------------------------------------------------------
 *
 * counter.c
 *	  What the view dlock_stats counts.
 *
 * Each backend counts for itself, without a lock; what it has counted becomes
 * its space's when it exits, or changes to another one.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/shared.h"

void
dlock_count(DlockCounter counter, uint64 amount)
{
	pg_atomic_uint64 *mine = &dlock_my_backend->counters[counter];

	/* nobody else writes here, so this need not be one instruction */
	pg_atomic_write_u64(mine, pg_atomic_read_u64(mine) + amount);
}

/* Move what this backend has counted into a space's totals. */
void
dlock_flush_counters(DlockSpace *space)
{
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
	{
		pg_atomic_uint64 *mine = &dlock_my_backend->counters[c];

		pg_atomic_fetch_add_u64(&space->counters[c], pg_atomic_read_u64(mine));
		pg_atomic_write_u64(mine, 0);
	}
}

/*
 * Add up the counters of a space: those of backends gone and of those alive.
 * A backend that leaves meanwhile may be missed or counted twice.
 */
void
dlock_sum_counters(DlockSpace *space, uint64 *sums)
{
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		sums[c] = pg_atomic_read_u64(&space->counters[c]);
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];

		if (pg_atomic_read_u64(&backend->session) == 0 ||
			backend->database != space->key.database)
			continue;
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
			sums[c] += pg_atomic_read_u64(&backend->counters[c]);
	}
}
