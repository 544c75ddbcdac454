/*-------------------------------------------------------------------------
 *
 * heartbeat.c
 *	  Heartbeats: WAL records that standbys acknowledge, so that the leases
 *	  live on for which standbys count.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"

#include "dlock.h"

/* A heartbeat sent to standbys */
typedef struct Heartbeat
{
	XLogRecPtr	lsn;
	uint64		sent;
} Heartbeat;

static Heartbeat heartbeats[8];
static int	num_heartbeats = 0;
static uint64 next_heartbeat = 0;
static int64 quorum_ttl = 0;	/* least ttl of the leases for which standbys
								 * count; 0: to be found out again */

static bool
needs_quorum(const DlockLease *lease)
{
	return lease->durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE;
}

/* The worker has begun to watch a lease. */
void
dlock_heartbeat_watch(const DlockLease *lease)
{
	if (needs_quorum(lease) && lease->ttl < quorum_ttl)
		quorum_ttl = 0;
}

/* A lease that the worker has watched is gone. */
void
dlock_heartbeat_unwatch(const DlockLease *lease)
{
	if (needs_quorum(lease) && lease->ttl == quorum_ttl)
		quorum_ttl = 0;
}

static bool
take_least(DlockLease *lease, void *arg)
{
	if (needs_quorum(lease))
		quorum_ttl = Min(quorum_ttl, lease->ttl);
	return true;
}

static void
find_quorum_ttl(DlockSpace *space)
{
	quorum_ttl = PG_INT64_MAX;
	dlock_lease_for_each(space, take_least, NULL);
}

/* Believe in the quorum from a moment on; the moment only ever moves on. */
static void
confirm(DlockSpace *space, int quorum, uint64 moment)
{
	if (moment > pg_atomic_read_u64(&space->quorum[quorum]))
		pg_atomic_write_u64(&space->quorum[quorum], moment);
}

/* Take note of the heartbeats that standbys have acknowledged. */
static void
take_acknowledgements(DlockSpace *space)
{
	XLogRecPtr	positions[DLOCK_NUM_QUORUMS];
	int			done = 0;

	dlock_journal_acknowledged(positions);
	for (int i = 0; i < num_heartbeats; i++)
	{
		bool		by_all = true;

		for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		{
			if (positions[q] >= heartbeats[i].lsn)
				confirm(space, q, heartbeats[i].sent);
			else
				by_all = false;
		}
		if (by_all)
			done = i + 1;
	}
	num_heartbeats -= done;
	memmove(heartbeats, heartbeats + done, num_heartbeats * sizeof(Heartbeat));
}

/*
 * Send a heartbeat if it is time, which is each quarter of the least ttl.
 * Where no standbys are named, none is needed: but who names some finds all
 * leases confirmed until that moment.  Returns when to come again.
 */
uint64
dlock_heartbeat_beat(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	uint64		interval;

	if (quorum_ttl == 0)
		find_quorum_ttl(space);
	if (quorum_ttl == PG_INT64_MAX)
		return DLOCK_NO_DEADLINE;
	interval = quorum_ttl / 4;
	next_heartbeat = Min(next_heartbeat, now + interval);
	if (!dlock_journal_has_standbys())
	{
		num_heartbeats = 0;
		for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
			confirm(space, q, now);
		return now + interval;
	}
	take_acknowledgements(space);
	if (now >= next_heartbeat)
	{
		/* where nobody answers for so long, only the latest matters */
		if (num_heartbeats == lengthof(heartbeats))
			num_heartbeats--;
		heartbeats[num_heartbeats].lsn = dlock_journal_heartbeat();
		heartbeats[num_heartbeats].sent = now;
		num_heartbeats++;
		next_heartbeat = now + interval;
	}
	return num_heartbeats == 0 ? next_heartbeat :
		Min(next_heartbeat, now + Max(interval / 8, 1000));
}
