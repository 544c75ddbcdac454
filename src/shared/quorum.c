/*-------------------------------------------------------------------------
 *
 * quorum.c
 *	  Heartbeats: WAL records that standbys acknowledge, so that the leases
 *	  live on for which standbys count.
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
#include "miscadmin.h"
#include "port/pg_bitutils.h"
#include "storage/latch.h"
#include "utils/wait_event.h"

#include "dlock.h"

#define FIRST_RESEND_MS	10		/* no answer: sent again, then twice as late */
#define LAST_RESEND_MS	1000
#define MAX_POLL_MS		10		/* between looks for an answer */

/*
 * How many leases the worker watches for which standbys count, by the
 * logarithm of the ttl, and in which of these there are any
 */
static uint32 watched[64];
static uint64 watched_mask = 0;

static uint64 next_heartbeat = 0;

static inline int
quorum_of(int durability)
{
	Assert(durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE);
	return durability - SYNCHRONOUS_COMMIT_REMOTE_WRITE;
}

/* When the latest one was sent that is known to be acknowledged at a level */
uint64
dlock_heartbeat_confirmed(DlockSpace *space, int durability)
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
dlock_heartbeat_look(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	XLogRecPtr	positions[DLOCK_NUM_QUORUMS];

	if (!dlock_journal_has_standbys())
	{
		for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
			confirm(space, q, now);
		return;
	}
	dlock_journal_acknowledged(positions);
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
 * Wait until a heartbeat is acknowledged, at this level, that was sent at
 * "since" or later; false where that has not come about at "until".  One is
 * sent if nobody has sent such a one yet, and again from time to time: standbys
 * tell what they have replayed when they get something new, and whoever was
 * about to send one may have been stopped.
 */
bool
dlock_heartbeat_wait(DlockSpace *space, int durability, uint64 since,
					 uint64 until)
{
	long		resend = FIRST_RESEND_MS;
	long		poll = 1;

	for (;;)
	{
		uint64		last = pg_atomic_read_u64(&space->last_heartbeat);
		uint64		now = dlock_monotonic_now();

		dlock_heartbeat_look(space);
		if (dlock_heartbeat_confirmed(space, durability) >= since)
			return true;
		if (now >= until)
			return false;
		if ((last < since || now >= last + resend * 1000) &&
			pg_atomic_compare_exchange_u64(&space->last_heartbeat, &last, now))
		{
			remember(space, dlock_journal_heartbeat(), now);
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

/*
 * For the worker
 */

/*
 * Which heartbeats a lease needs: one for each quarter of two to the power of
 * what is returned; -1: none.  An answer tells what was replayed when the
 * heartbeat before was, so for these it takes twice as many.
 */
static int
class_of(const DlockLease *lease)
{
	if (lease->durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE)
		return -1;
	return pg_leftmost_one_pos64(lease->ttl) -
		(lease->durability == SYNCHRONOUS_COMMIT_REMOTE_APPLY ? 1 : 0);
}

/* The worker has begun to watch a lease. */
void
dlock_heartbeat_watch(const DlockLease *lease)
{
	int			class = class_of(lease);

	if (class >= 0 && watched[class]++ == 0)
		watched_mask |= UINT64CONST(1) << class;
}

/* A lease that the worker has watched is gone. */
void
dlock_heartbeat_unwatch(const DlockLease *lease)
{
	int			class = class_of(lease);

	Assert(class < 0 || watched[class] > 0);
	if (class >= 0 && --watched[class] == 0)
		watched_mask &= ~(UINT64CONST(1) << class);
}

/*
 * Send a heartbeat if it is time.  Where no standbys are named, none is
 * needed.  Returns when to come again; DLOCK_NO_DEADLINE: not for the leases
 * that are watched now.
 */
uint64
dlock_heartbeat_beat(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	uint64		interval;

	if (watched_mask == 0)
		return DLOCK_NO_DEADLINE;
	interval = (UINT64CONST(1) << pg_rightmost_one_pos64(watched_mask)) / 4;
	dlock_heartbeat_look(space);
	next_heartbeat = Min(next_heartbeat, now + interval);
	if (now >= next_heartbeat)
	{
		if (dlock_journal_has_standbys())
		{
			pg_atomic_write_u64(&space->last_heartbeat, now);
			remember(space, dlock_journal_heartbeat(), now);
		}
		next_heartbeat = now + interval;
	}
	return next_heartbeat;
}
