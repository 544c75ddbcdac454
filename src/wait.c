/*-------------------------------------------------------------------------
 *
 * wait.c
 *	  Sleeping until a ticket is granted.
 *
 * A waiter sleeps on its own latch.  The one who grants changes the ticket's
 * state first and sets the latch then; the waiter resets the latch first and
 * looks at the state then.  So a grant is never slept through.  The latch is
 * set for other reasons too, and by others' late wakeups: a waiter that finds
 * its ticket still waiting sleeps again.
 *
 * Everything that ends a wait but a grant raises an error or returns false,
 * with the ticket still in the lock: the caller withdraws it, and where it
 * was granted at the same moment, that hands it on.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "dlock.h"

/* Show in pg_stat_activity what a wait for a user-defined lock shows */
#define WAIT_EVENT_DLOCK	(PG_WAIT_LOCK | LOCKTAG_USERLOCK)

static int64
microseconds_since(instr_time start)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	INSTR_TIME_SUBTRACT(now, start);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

/* Let others see, and unsee, what this backend waits for. */
static void
announce_wait(const DlockKey *key, int64 number, TimestampTz since)
{
	DlockBackend *me = dlock_my_backend;

	SpinLockAcquire(&me->mutex);
	me->wait_count++;
	me->wait_ticket = number;
	me->wait_start = since;
	memcpy(&me->wait_key, key, offsetof(DlockKey, name) + key->length);
	SpinLockRelease(&me->mutex);
}

static void
unannounce_wait(void)
{
	DlockBackend *me = dlock_my_backend;

	SpinLockAcquire(&me->mutex);
	me->wait_ticket = 0;
	SpinLockRelease(&me->mutex);
}

static bool
still_waiting(DlockTicket *ticket)
{
	return pg_atomic_read_u32(&ticket->state) == DLOCK_WAITING;
}

/*
 * Sleep until the ticket is not waiting any more: true; or until the timeout
 * has passed: false.
 */
static bool
sleep_until_granted(DlockTicket *ticket, const DlockRequest *request,
					instr_time start)
{
	while (still_waiting(ticket))
	{
		int			events = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH;
		long		milliseconds = -1;

		if (request->timeout != DLOCK_WAIT_FOREVER)
		{
			int64		left = request->timeout - microseconds_since(start);

			if (left <= 0)
				return false;
			milliseconds = Min((left + 999) / 1000, INT_MAX);
			events |= WL_TIMEOUT;
		}
		(void) WaitLatch(MyLatch, events, milliseconds, WAIT_EVENT_DLOCK);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}

	/*
	 * An interrupt that came together with the grant is taken now, while the
	 * caller can still hand the lock on: whoever gets an error has no lock.
	 */
	CHECK_FOR_INTERRUPTS();
	return true;
}

/*
 * Wait until a queued ticket is granted.  Returns false where the request's
 * timeout passed.  Raises 55L01 where the ticket was ended by force, and
 * whatever interrupts bring.
 */
bool
dlock_wait(const DlockRequest *request, DlockTicket *ticket)
{
	instr_time	start;
	volatile bool granted = false;	/* set inside PG_TRY */
	bool		has_lock_timeout = LockTimeout > 0;

	INSTR_TIME_SET_CURRENT(start);
	announce_wait(&request->key, ticket->number, GetCurrentTimestamp());
	if (has_lock_timeout)
		enable_timeout_after(LOCK_TIMEOUT, LockTimeout);
	PG_TRY();
	{
		granted = sleep_until_granted(ticket, request, start);
	}
	PG_FINALLY();
	{
		/* keep the indicator: a timeout on its way stays a lock timeout */
		if (has_lock_timeout)
			disable_timeout(LOCK_TIMEOUT, true);
		unannounce_wait();
		dlock_count(DLOCK_COUNT_WAIT_US, microseconds_since(start));
	}
	PG_END_TRY();

	if (pg_atomic_read_u32(&ticket->state) == DLOCK_GONE)
		ereport(ERROR,
				(errcode(ERRCODE_DLOCK_LOST),
				 errmsg("lost the place in the queue of lock \"%.*s\"",
						request->key.length, request->key.name),
				 errdetail("Ticket %lld was released by an administrator.",
						   (long long) ticket->number),
				 errhint("Acquire the lock again.")));
	return granted;
}
