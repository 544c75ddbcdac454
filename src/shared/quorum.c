/*-------------------------------------------------------------------------
 *
 * quorum.c
 *	  What synchronous standbys have acknowledged, and heartbeats: WAL records
 *	  that they acknowledge, so that the leases live on for which they count.
 *
 * A heartbeat that a quorum has acknowledged says that no standby had been
 * promoted without it when it was sent; so what counts is the time before it
 * was written, and never that of the answer.
 *
 * The worker sends one for each quarter of the least ttl.  But anybody may
 * send one, and anybody may take note of what was acknowledged, as all that
 * takes is in shared memory: so who renews a lease, or asks for one, does not
 * depend on a worker that is held up.
 *
 * What was sent is kept for each level of synchronous_commit apart, until it
 * is acknowledged at that level: where standbys write and do not replay, the
 * leases at the lower levels live on.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "miscadmin.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/latch.h"
#include "utils/wait_event.h"

#include "shared/inner.h"

#define FIRST_RESEND_MS	10		/* no answer: sent again, then twice as late */
#define LAST_RESEND_MS	1000
#define MAX_POLL_MS		10		/* between looks for an answer */

/* Are there standbys whose answers commits wait for? */
bool
dlock_quorum_has_standbys(void)
{
	return max_wal_senders > 0 && compat_sync_standbys_defined();
}

/* Have they acknowledged this position, at this level? */
bool
dlock_quorum_is_acknowledged(XLogRecPtr lsn, int durability)
{
	bool		acknowledged;

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		!dlock_quorum_has_standbys())
		return true;
	/* under the lock, as those who wait are woken before the setting changes */
	LWLockAcquire(SyncRepLock, LW_SHARED);
	acknowledged = !dlock_quorum_has_standbys() ||
		WalSndCtl->lsn[durability - SYNCHRONOUS_COMMIT_REMOTE_WRITE] >= lsn;
	LWLockRelease(SyncRepLock);
	return acknowledged;
}

/*
 * How far have standbys acknowledged the WAL?  For each level.
 */
static void
read_acknowledged(XLogRecPtr *positions)
{
	LWLockAcquire(SyncRepLock, LW_SHARED);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		positions[q] = WalSndCtl->lsn[q];
	LWLockRelease(SyncRepLock);
}

static inline int
quorum_of(int durability)
{
	Assert(durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE);
	return durability - SYNCHRONOUS_COMMIT_REMOTE_WRITE;
}

/* When the latest one was sent that is known to be acknowledged at a level */
uint64
dlock_quorum_confirmed(DlockSpace *space, int durability)
{
	return pg_atomic_read_u64(&space->quorum[quorum_of(durability)]);
}

/* Believe in a quorum from a moment on; the moment only ever moves on. */
static void
confirm(DlockSpace *space, int quorum, uint64 moment)
{
	uint64		before = pg_atomic_read_u64(&space->quorum[quorum]);

	while (before < moment &&
		   !pg_atomic_compare_exchange_u64(&space->quorum[quorum], &before,
										   moment))
		;
}

/*
 * Take those out that are acknowledged up to here; when the latest of them was
 * sent, or 0.  Several senders may have entered theirs in any order.
 */
static uint64
take_acknowledged(DlockSpace *space, int quorum, XLogRecPtr position)
{
	DlockHeartbeat *heartbeats = space->heartbeats[quorum];
	uint64		latest = 0;
	int			left = 0;

	SpinLockAcquire(&space->heartbeat_mutex);
	for (int i = 0; i < space->num_heartbeats[quorum]; i++)
	{
		if (heartbeats[i].lsn <= position)
			latest = Max(latest, heartbeats[i].sent);
		else
			heartbeats[left++] = heartbeats[i];
	}
	space->num_heartbeats[quorum] = left;
	SpinLockRelease(&space->heartbeat_mutex);
	return latest;
}

/*
 * Take note of what standbys have acknowledged.  Where none are named, this
 * moment is as good: whoever names some finds all leases confirmed until then.
 * Raises nothing, and may be called with an entry's lock.
 */
void
dlock_quorum_look(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	XLogRecPtr	positions[DLOCK_NUM_QUORUMS];

	if (!dlock_quorum_has_standbys())
	{
		for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
			confirm(space, q, now);
		return;
	}
	read_acknowledged(positions);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		confirm(space, q, take_acknowledged(space, q, positions[q]));
}

/* Where nobody answers for so long, the newest takes the place of the last. */
static void
remember(DlockSpace *space, XLogRecPtr lsn, uint64 sent)
{
	SpinLockAcquire(&space->heartbeat_mutex);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
	{
		int			i = Min(space->num_heartbeats[q], DLOCK_HEARTBEATS - 1);

		space->heartbeats[q][i].lsn = lsn;
		space->heartbeats[q][i].sent = sent;
		space->num_heartbeats[q] = i + 1;
	}
	SpinLockRelease(&space->heartbeat_mutex);
}

/*
 * Write a record that means nothing, and flush it, as only what is flushed is
 * sent to standbys; where it ends.
 */
XLogRecPtr
dlock_quorum_log_message(void)
{
	XLogRecPtr	lsn = compat_log_message("dlock");

	XLogFlush(lsn);
	return lsn;
}

/* Send a heartbeat, at this moment. */
void
dlock_quorum_send(DlockSpace *space, uint64 now)
{
	remember(space, dlock_quorum_log_message(), now);
}

/*
 * Wait until a heartbeat is acknowledged, at this level, that was sent at
 * "since" or later; false where that has not come about at "until".  One is
 * sent if nobody has sent such a one yet, and again from time to time: standbys
 * tell what they have replayed when they get something new, and whoever was
 * about to send one may have been stopped.
 */
bool
dlock_quorum_wait(DlockSpace *space, int durability, uint64 since,
					 uint64 until)
{
	long		resend = FIRST_RESEND_MS;
	long		poll = 1;

	for (;;)
	{
		uint64		last = pg_atomic_read_u64(&space->last_heartbeat);
		uint64		now = dlock_monotonic_now();

		dlock_quorum_look(space);
		if (dlock_quorum_confirmed(space, durability) >= since)
			return true;
		if (now >= until)
			return false;
		if ((last < since || now >= last + resend * 1000) &&
			pg_atomic_compare_exchange_u64(&space->last_heartbeat, &last, now))
		{
			dlock_quorum_send(space, now);
			if (last >= since)
				resend = Min(resend * 2, LAST_RESEND_MS);
			continue;
		}
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT |
						 WL_EXIT_ON_PM_DEATH, poll, WAIT_EVENT_SYNC_REP);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		poll = Min(poll * 2, MAX_POLL_MS);
	}
}
