/*-------------------------------------------------------------------------
 *
 * heartbeat.c
 *	  When the worker sends heartbeats, for the leases that it looks at.
 *
 * One for each quarter of the least ttl; see shared/quorum.c for what they
 * are.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "port/pg_bitutils.h"

#include "shared/shared.h"
#include "worker/due.h"

/*
 * How many leases the worker looks at for which standbys count, by the
 * logarithm of the ttl, and in which of these there are any
 */
static uint32 counts[64];
static uint64 counted = 0;

static uint64 next_heartbeat = 0;

/*
 * Which heartbeats a lease needs: one for each quarter of two to the power of
 * what is returned; -1: none.  An answer tells what was replayed when the
 * heartbeat before was, so for these it takes twice as many.
 */
static int
class_of(const DlockLease *lease)
{
	int			durability = dlock_lease_durability(lease);

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE)
		return -1;
	return pg_leftmost_one_pos64((uint64) dlock_lease_ttl(lease)) -
		(durability == SYNCHRONOUS_COMMIT_REMOTE_APPLY ? 1 : 0);
}

/*
 * The worker looks at a lease from now on.  Returns what is to be given to
 * dlock_heartbeat_remove(), as the lease can get another ttl.
 */
int
dlock_heartbeat_add(const DlockLease *lease)
{
	int			class = class_of(lease);

	if (class >= 0 && counts[class]++ == 0)
		counted |= UINT64CONST(1) << class;
	return class;
}

/* A lease that the worker has looked at is gone, or has another ttl. */
void
dlock_heartbeat_remove(int class)
{
	Assert(class < 0 || counts[class] > 0);
	if (class >= 0 && --counts[class] == 0)
		counted &= ~(UINT64CONST(1) << class);
}

/*
 * Send a heartbeat if it is time.  Where no standbys are named, none is
 * needed.  Returns when to come again; DLOCK_NO_DEADLINE: not for the leases
 * that there are now.
 *
 * A heartbeat is for all leases.  So where the worker does not know all of them
 * yet, it sends as many as the least ttl of all could need.
 */
uint64
dlock_heartbeat_beat(DlockSpace *space, bool knows_all)
{
	uint64		now = dlock_monotonic_now();
	uint64		classes = counted;
	uint64		interval;

	if (!knows_all && space->leases.length > 0)
		classes |= UINT64CONST(1) << (pg_leftmost_one_pos64(DLOCK_MIN_TTL) - 1);
	if (classes == 0)
		return DLOCK_NO_DEADLINE;
	interval = (UINT64CONST(1) << pg_rightmost_one_pos64(classes)) / 4;
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
