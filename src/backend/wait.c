/*-------------------------------------------------------------------------
 *
 * wait.c
 *	  Sleeping until a ticket is granted.
 *
 * A waiter sleeps on its own latch.  The order of writes and reads in I11
 * keeps the waiter from sleeping through its grant.  The latch can be set for
 * other reasons, too.  If its ticket still waits, the waiter sleeps again.
 *
 * Nothing sets a waiter's latch when the extension is dropped, when a slot for
 * a worker becomes free, or when a lease runs out while there is no worker.
 * So a waiter checks for these events once a second (look_around()).
 *
 * If a wait ends without a grant, the caller ends the ticket.  If another
 * process granted the ticket just then, the ticket's end passes the lock on to
 * the next waiter.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "storage/sinval.h"
#include "tcop/pquery.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/wait_event.h"

#include "backend/inner.h"

/* Interval of look_around(), in microseconds */
#define LOOK_US	INT64CONST(1000000)

/* Shown in pg_stat_activity as a wait for a user-defined lock */
#define WAIT_EVENT_DLOCK	(PG_WAIT_LOCK | LOCKTAG_USERLOCK)

static int64
microseconds_since(uint64 start)
{
	return (int64) (dlock_monotonic_now() - start);
}

/* Is the request for a lease of many tickets, which can end before a grant? */
static bool
has_lease(const DlockRequest *request)
{
	return request->lease && !request->lease->single;
}

/* Publish this wait for other processes; the lease's end then wakes us. */
static void
announce_wait(const DlockRequest *request, int64 number)
{
	DlockBackend *me = dlock_my_backend;

	pg_atomic_write_u32(&me->check_requested, 0);
	SpinLockAcquire(&me->mutex);
	me->wait_count++;
	me->wait_ticket = number;
	me->wait_lease = has_lease(request) ?
		dlock_pointer(request->lease) : InvalidDsaPointer;
	me->wait_mode = request->mode;
	dlock_key_copy(&me->wait_key, &request->key);
	SpinLockRelease(&me->mutex);
	if (has_lease(request))
		pg_atomic_fetch_add_u32(&request->lease->waiters, 1);
}

static void
unannounce_wait(const DlockRequest *request)
{
	DlockBackend *me = dlock_my_backend;

	SpinLockAcquire(&me->mutex);
	me->wait_ticket = 0;
	SpinLockRelease(&me->mutex);
	if (has_lease(request))
		pg_atomic_fetch_sub_u32(&request->lease->waiters, 1);
}

/*
 * Is this a lease's ticket, or a ticket of another session?  Changes of such a
 * ticket broadcast its condition variable, but do not set our latch.
 */
static bool
is_foreign(const DlockTicket *ticket)
{
	return ticket->session != pg_atomic_read_u64(&dlock_my_backend->session);
}

/* Has the ticket's lease run out?  If so, the ticket counts as ended. */
static bool
has_run_out(const DlockTicket *ticket)
{
	if (ticket->scope != DLOCK_LEASE || ticket->session != 0)
		return false;
	/* the lease's fields were written before the adoption */
	pg_read_barrier();
	return !dlock_lease_ticket_is_live((const DlockLeaseTicket *) ticket);
}

/* If has_lease(), is the request's lease over?  Otherwise, is the ticket's? */
static bool
lease_is_over(const DlockRequest *request, const DlockTicket *ticket)
{
	return has_lease(request) ? !dlock_lease_is_open(request->lease) :
		has_run_out(ticket);
}

/* Has the ticket ended, so that it neither waits nor holds? */
static bool
is_lost(DlockTicket *ticket)
{
	DlockState	state = (DlockState) pg_atomic_read_u32(&ticket->state);

	return state == DLOCK_GONE || state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && is_foreign(ticket)) || has_run_out(ticket);
}

/* A granted foreign ticket counts as waiting until its lease adopts it. */
static bool
still_waiting(DlockTicket *ticket, bool foreign)
{
	DlockState	state = (DlockState) pg_atomic_read_u32(&ticket->state);

	return state == DLOCK_WAITING ||
		(foreign && state == DLOCK_GRANTED && ticket->session != 0);
}

/*
 * Prepare to be woken by a change of the ticket.  Returns false if the ticket
 * does not wait.  If the ticket is not foreign, there is nothing to prepare,
 * because its change sets our latch.
 *
 * A broadcast removes us from the condition variable's list, so we enter the
 * list again before each look at the state.  A sleep with a timeout of 0 does
 * this, and resets the latch.  ConditionVariablePrepareToSleep() would also
 * pass the broadcast on to another sleeper (before PostgreSQL 16).
 */
static bool
prepare_to_sleep(DlockTicket *ticket)
{
	bool		foreign = is_foreign(ticket);

	if (foreign && still_waiting(ticket, foreign))
		(void)
			ConditionVariableTimedSleep(&((DlockLeaseTicket *) ticket)->record.changed,
										0, WAIT_EVENT_DLOCK);
	return still_waiting(ticket, foreign);
}

/*
 * Release the snapshots of the current CALL, as a COMMIT in a procedure does,
 * so that the wait holds back neither VACUUM nor CREATE INDEX CONCURRENTLY.
 * The portal's snapshot must be the active snapshot.  The CALL returns a plain
 * number, which needs no snapshot.
 */
static void
drop_snapshot(void)
{
	Portal		portal = ActivePortal;

	portal->portalSnapshot = NULL;
	PopActiveSnapshot();
	if (portal->holdSnapshot)
		UnregisterSnapshotFromOwner(portal->holdSnapshot, portal->resowner);
	portal->holdSnapshot = NULL;
	InvalidateCatalogSnapshot();
	if (TransactionIdIsValid(MyProc->xmin))
	{
		EnsurePortalSnapshotExists();
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("cannot wait without a snapshot here"),
				 errdetail("An open cursor or an outer query holds a snapshot."),
				 errhint("Close all cursors first, or use dlock_acquire().")));
	}
}

/* Raise 55L01 if the space is gone, even if only for this transaction (I6). */
void
dlock_wait_check_space(const DlockSpace *space, const DlockKey *key)
{
	if (dlock_space_is_current(space))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("lock \"%.*s\" is gone", key->length, key->name),
			 errdetail("Extension \"%s\" was dropped during the call, with all of its locks and tickets.",
					   "dlock"),
			 errhint("If the extension was created again, acquire the lock again.")));
}

/*
 * Take interrupts, and check our space and its worker.  Returns false if
 * PostgreSQL may have slept meanwhile and reset our latch.
 */
static bool
look_around(const DlockRequest *request, const DlockTicket *ticket)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	uint64		messages = SharedInvalidMessageCounter;
	bool		interrupted = INTERRUPTS_PENDING_CONDITION();

	if (interrupted)
		ProcessInterrupts();
	dlock_wait_check_space(space, &request->key);
	dlock_worker_look(space, true);
	return !interrupted && messages == SharedInvalidMessageCounter &&
		dlock_known_space() == space;
}

/*
 * Sleep until the latch is set, or for "left" microseconds.  Returns early
 * only if look_around() may have reset the latch, or if the lease is over.
 * Other early returns would hide bugs that miss wakeups.
 */
static void
sleep_a_while(const DlockRequest *request, const DlockTicket *ticket,
			  int64 left)
{
	bool		undisturbed;
	int			events;

	do
	{
		int64		piece = Min(left, LOOK_US);

		events = WaitLatch(MyLatch,
						   WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						   (piece + 999) / 1000, WAIT_EVENT_DLOCK);
		/* after a timeout, do not reset a latch that was set just now */
		if (events & WL_LATCH_SET)
			ResetLatch(MyLatch);
		undisturbed = look_around(request, ticket);
		left -= piece;
	} while ((events & WL_LATCH_SET) == 0 && left > 0 && undisturbed &&
			 !lease_is_over(request, ticket));
}

/* Restart lock_timeout if a wait for a heavyweight lock has disabled it. */
static void
keep_lock_timeout(int64 waited)
{
	if (LockTimeout > 0 && !get_timeout_active(LOCK_TIMEOUT) &&
		!get_timeout_indicator(LOCK_TIMEOUT, false))
		enable_timeout_after(LOCK_TIMEOUT,
							 (int) Max(LockTimeout - waited / 1000, 1));
}

/*
 * Times of a waiter's next looks for deadlocks, in us since the wait began.
 * Every two deadlock_timeouts, it looks for cycles that a wait for a
 * heavyweight lock may have closed.  It looks thoroughly at growing intervals.
 */
typedef struct Looks
{
	int64		next;
	int64		next_thorough;
	bool		logged;			/* is the line of log_lock_waits written? */
} Looks;

/* Raises 40P01 if this backend is a deadlock's victim. */
static void
look_for_deadlocks(Looks *looks, DlockSpace *space,
				   const DlockRequest *request, uint64 start)
{
	int64		timeout = (int64) DeadlockTimeout * 1000;
	int64		waited = microseconds_since(start);
	bool		told = pg_atomic_exchange_u32(&dlock_my_backend->check_requested,
											  0) != 0;
	bool		thorough = told || waited >= looks->next_thorough;

	if (!dlock_deadlock_check(space, thorough, told))
		looks->next_thorough = waited;
	else if (waited >= looks->next_thorough)
		looks->next_thorough = waited + Min(waited + timeout, 64 * timeout);
	if (waited >= looks->next && log_lock_waits && !looks->logged)
	{
		dlock_deadlock_log(space, request, waited, false);
		looks->logged = true;
	}
	waited = microseconds_since(start);
	while (looks->next <= waited)
		looks->next += 2 * timeout;
}

/* Sleep until the ticket no longer waits.  Returns false after the timeout. */
static bool
sleep_until_changed(DlockTicket *ticket, const DlockRequest *request,
					Looks *looks, uint64 start)
{
	while (prepare_to_sleep(ticket))
	{
		int64		waited = microseconds_since(start);
		int64		left = looks->next - waited;

		/* stop waiting once the lease has ended */
		if (lease_is_over(request, ticket))
		{
			if (has_lease(request))
				dlock_raise_lease_gone(request->lease->number);
			break;
		}
		keep_lock_timeout(waited);
		if (request->timeout != DLOCK_WAIT_FOREVER)
		{
			if (waited >= request->timeout)
				return false;
			left = Min(left, request->timeout - waited);
		}
		if (waited >= looks->next ||
			pg_atomic_read_u32(&dlock_my_backend->check_requested) != 0)
			look_for_deadlocks(looks, dlock_space_at(ticket->space), request,
							   start);
		else
			sleep_a_while(request, ticket, left);
	}
	return true;
}

/* Sleep until the ticket is granted or lost.  Returns false on a timeout. */
static bool
sleep_until_granted(DlockTicket *ticket, const DlockRequest *request,
					uint64 start)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	int64		timeout = (int64) DeadlockTimeout * 1000;
	Looks		looks = {timeout, timeout, false};

	if (!sleep_until_changed(ticket, request, &looks, start))
		return false;

	/* take interrupts while the grant can still be passed on (I12) */
	CHECK_FOR_INTERRUPTS();
	dlock_wait_check_space(space, &request->key);
	if (looks.logged && !is_lost(ticket))
	{
		/* the log line reveals the grant (I15) */
		dlock_journal_flush_removal(space, &request->key);
		dlock_deadlock_log(space, request, microseconds_since(start), true);
	}
	return true;
}

/* Clean up after a wait, however it has ended, and count the wait. */
static void
end_wait(const DlockRequest *request, const DlockTicket *ticket, uint64 start,
		 char *title, DlockCounter counter, DlockWaitEnd how)
{
	int64		waited = microseconds_since(start);

	/* keep the indicator, so that an expired lock_timeout is still reported */
	disable_timeout(LOCK_TIMEOUT, true);
	compat_ps_suffix_remove(title);
	ConditionVariableCancelSleep();
	unannounce_wait(request);
	dlock_count(counter, 1);
	dlock_count_wait(waited);

	/*
	 * If the ticket was enqueued, or its lease has adopted it, the granter has
	 * counted the wait under the lock's name.
	 */
	if (!is_foreign(ticket) && !DsaPointerIsValid(ticket->announcement))
		dlock_contention_wait(dlock_space_at(ticket->space), &request->key,
							  waited, ticket->queue_length, how);
}

/*
 * Wait until a queued ticket is granted.  Returns DLOCK_TIMED_OUT after the
 * timeout, and DLOCK_LOST if another process has ended the ticket.  Raises
 * 40P01 if this backend is a deadlock's victim, and the errors of interrupts.
 */
DlockOutcome
dlock_wait_for_grant(const DlockRequest *request, DlockTicket *ticket)
{
	uint64		start = dlock_monotonic_now();
	char	   *volatile title;	/* kept by longjmp() */
	volatile bool granted = false;	/* set inside PG_TRY */

	dlock_contention_prepare(dlock_space_at(ticket->space));
	title = compat_ps_suffix_set("waiting");
	announce_wait(request, ticket->number);
	PG_TRY();
	{
		dlock_worker_look(dlock_space_at(ticket->space), true);
		if (request->without_snapshot)
			drop_snapshot();
		granted = sleep_until_granted(ticket, request, start);
		if (request->without_snapshot)
			EnsurePortalSnapshotExists();
	}
	PG_CATCH();
	{
		int			code = geterrcode();

		/* PostgreSQL can raise an error with LWLocks held */
		LWLockReleaseAll();
		if (code == ERRCODE_T_R_DEADLOCK_DETECTED)
			end_wait(request, ticket, start, title, DLOCK_COUNT_DEADLOCKS,
					 DLOCK_WAIT_DEADLOCK);
		else
			end_wait(request, ticket, start, title, DLOCK_COUNT_CANCELED,
					 code == ERRCODE_LOCK_NOT_AVAILABLE ?
					 DLOCK_WAIT_TIMED_OUT : DLOCK_WAIT_CUT_SHORT);
		PG_RE_THROW();
	}
	PG_END_TRY();

	if (is_lost(ticket))
	{
		end_wait(request, ticket, start, title, DLOCK_COUNT_CANCELED,
				 DLOCK_WAIT_CUT_SHORT);
		return DLOCK_LOST;
	}
	if (granted)
		end_wait(request, ticket, start, title, DLOCK_COUNT_WAITED,
				 DLOCK_WAIT_GRANTED);
	else
		end_wait(request, ticket, start, title, DLOCK_COUNT_TIMEOUTS,
				 DLOCK_WAIT_TIMED_OUT);
	return granted ? DLOCK_ACQUIRED : DLOCK_TIMED_OUT;
}
