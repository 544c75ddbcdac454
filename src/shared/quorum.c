/*-------------------------------------------------------------------------
 *
 * quorum.c
 *	  Heartbeats: WAL records that synchronous standbys must acknowledge to
 *	  keep leases alive.
 *
 * An acknowledged heartbeat proves that no standby had been promoted when the
 * heartbeat was sent.  So what counts is a time read before the write, not the
 * time of the answer (I21).  Any process can send heartbeats and look for
 * answers, so a renewal does not depend on the worker.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "miscadmin.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/latch.h"
#include "utils/wait_event.h"

#include "shared/inner.h"

#define FIRST_RESEND_MS	10		/* first pause between heartbeats; doubles */
#define LAST_RESEND_MS	1000
#define MAX_POLL_MS		10		/* longest pause between looks for answers */

/* Are there standbys that commits wait for? */
bool
dlock_quorum_has_standbys(void)
{
	return max_wal_senders > 0 && compat_sync_standbys_defined();
}

static inline int
quorum_of(int durability)
{
	Assert(durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE);
	return durability - SYNCHRONOUS_COMMIT_REMOTE_WRITE;
}

/* Have standbys acknowledged a position at a level?  True if none need to. */
bool
dlock_quorum_is_acknowledged(XLogRecPtr lsn, int durability)
{
	bool		acknowledged;

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		!dlock_quorum_has_standbys())
		return true;
	/* test again, locked: PostgreSQL wakes waiters, then clears the setting */
	LWLockAcquire(SyncRepLock, LW_SHARED);
	acknowledged = !dlock_quorum_has_standbys() ||
		WalSndCtl->lsn[quorum_of(durability)] >= lsn;
	LWLockRelease(SyncRepLock);
	return acknowledged;
}

/* The time when the latest heartbeat acknowledged at this level was sent */
uint64
dlock_quorum_confirmed(DlockSpace *space, int durability)
{
	return pg_atomic_read_u64(&space->quorum[quorum_of(durability)]);
}

/* Advance the time of the latest acknowledged heartbeat to "moment". */
static void
note_answer(DlockSpace *space, int quorum, uint64 moment)
{
	uint64		before = pg_atomic_read_u64(&space->quorum[quorum]);

	while (before < moment &&
		   !pg_atomic_compare_exchange_u64(&space->quorum[quorum], &before,
										   moment))
		;
}

/* Remove heartbeats up to a position.  Returns the last one's time, or 0. */
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
 * Note answers of standbys.  If no standbys are named, the present moment
 * counts as an answer, so that leases live on if standbys are named later.
 * Raises nothing.  The caller may hold an entry's lock.
 */
void
dlock_quorum_look(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	XLogRecPtr	positions[DLOCK_NUM_QUORUMS];

	if (!dlock_quorum_has_standbys())
	{
		for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
			note_answer(space, q, now);
		return;
	}
	LWLockAcquire(SyncRepLock, LW_SHARED);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		positions[q] = WalSndCtl->lsn[q];
	LWLockRelease(SyncRepLock);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		note_answer(space, q, take_acknowledged(space, q, positions[q]));
}

/* Add a heartbeat.  If the array is full, the latest one is replaced. */
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

/* Send a heartbeat.  "now" is a time that was read before the call. */
void
dlock_quorum_send(DlockSpace *space, uint64 now)
{
	XLogRecPtr	lsn = compat_log_message("dlock");

	/* only flushed WAL is sent to standbys */
	XLogFlush(lsn);
	remember(space, lsn, now);
}

/*
 * Wait until a heartbeat sent at "since" or later is acknowledged at this
 * level; returns false if "until" comes first.  If no such heartbeat was sent,
 * send one.  Later send more, because standbys report replay only with new
 * WAL, and because another process may set last_heartbeat and then not send.
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
