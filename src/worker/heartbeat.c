/*-------------------------------------------------------------------------
 *
 * heartbeat.c
 *	  Decides when the worker sends heartbeats (shared/quorum.c): it sends one
 *	  in each quarter of the least ttl of the leases that it knows.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "port/pg_bitutils.h"

#include "shared/shared.h"
#include "worker/due.h"

/* Number of known leases that need heartbeats, by class */
static uint32 counts[64];

static uint64 next_heartbeat = 0;

/*
 * Count a lease.  Returns its class, for dlock_heartbeat_remove().
 *
 * A lease of class n needs a heartbeat in each quarter of 2^n us.  A lease of
 * class -1 needs none.  With remote_apply, twice as many are needed, because a
 * standby reports a heartbeat's replay only when the next heartbeat comes.
 */
int
dlock_heartbeat_add(const DlockLease *lease)
{
	int			durability = dlock_lease_durability(lease);
	int			class;

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE)
		return -1;
	class = pg_leftmost_one_pos64((uint64) dlock_lease_ttl(lease)) -
		(durability == SYNCHRONOUS_COMMIT_REMOTE_APPLY ? 1 : 0);
	counts[class]++;
	return class;
}

/* Stop counting a lease that is gone, or whose ttl or durability changed. */
void
dlock_heartbeat_remove(int class)
{
	Assert(class < 0 || counts[class] > 0);
	if (class >= 0)
		counts[class]--;
}

/*
 * Send a heartbeat if it is due and standbys are named.  Returns the time of
 * the next call.  If "knows_all" is false, assumes a lease with DLOCK_MIN_TTL.
 */
uint64
dlock_heartbeat_beat(DlockSpace *space, bool knows_all)
{
	uint64		now = dlock_monotonic_now();
	uint64		interval;
	int			least = 0;

	while (least < (int) lengthof(counts) && counts[least] == 0)
		least++;
	if (!knows_all && space->leases.length > 0)
		least = Min(least, pg_leftmost_one_pos64(DLOCK_MIN_TTL) - 1);
	if (least == lengthof(counts))
		return DLOCK_NO_DEADLINE;
	interval = (UINT64CONST(1) << least) / 4;
	dlock_quorum_look(space);
	next_heartbeat = Min(next_heartbeat, now + interval);
	if (now >= next_heartbeat)
	{
		if (dlock_quorum_has_standbys())
		{
			pg_atomic_write_u64(&space->last_heartbeat, now);
			dlock_quorum_send(space, now);
		}
		next_heartbeat = now + interval;
	}
	return next_heartbeat;
}
