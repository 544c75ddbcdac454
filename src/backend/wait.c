/*-------------------------------------------------------------------------
 *
 * wait.c
 *	  Sleeping until a ticket is granted.
 *
 * A waiter sleeps on its own latch.  The one who grants changes the ticket's
 * state first and sets the latch then; the waiter resets the latch first and
 * looks at the state then.  So a grant is never slept through (I11).  The
 * latch is set for other reasons too, and by others' late wakeups: a waiter
 * that finds its ticket still waiting sleeps again.
 *
 * Nobody sets our latch when the extension is dropped, and the locks of its
 * space end: a waiter that sleeps looks once a second.  Nor when a slot is free
 * for a worker that had none, and may have to hand on to us; nor when a lease
 * runs out whose worker does not come.
 *
 * Everything that ends a wait but a grant raises an error or returns false,
 * with the ticket still in the lock: the caller withdraws it, and where it
 * was granted at the same moment, that hands it on.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "storage/sinval.h"
#include "tcop/pquery.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "backend/inner.h"
#include "shared/shared.h"

/*
 * A waiter looks so often, in microseconds, whether its extension is still
 * there, the worker, and the lease.
 */
#define LOOK_US	INT64CONST(1000000)

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

/* Is the lock for a lease that was there before, and can be over meanwhile? */
static bool
has_lease(const DlockRequest *request)
{
	return request->lease && !request->lease->single;
}

/*
 * Let others see, and unsee, what this backend waits for.  Whoever ends a lease
 * wakes those who wait with it.
 */
static void
announce_wait(const DlockRequest *request, int64 number)
{
	DlockBackend *me = dlock_my_backend;

	pg_atomic_write_u32(&me->check_requested, 0);
	SpinLockAcquire(&me->mutex);
	me->wait_count++;
	me->wait_ticket = number;
	me->wait_lease = has_lease(request) ?
		request->lease->self : InvalidDsaPointer;
	me->wait_mode = request->mode;
	me->wait_permits = request->permits;
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
 * Is the ticket somebody else's: a lease's, or that of a session whose lease
 * will have it?  Nobody sets our latch for that, but its condition variable is
 * broadcast.
 */
static bool
is_foreign(const DlockTicket *ticket)
{
	return ticket->session != pg_atomic_read_u64(&dlock_my_backend->session);
}

/*
 * Is it the ticket of a lease that has run out?  Then it is gone for whoever asks,
 * whether or not the worker has come to end it.
 */
static bool
has_run_out(const DlockTicket *ticket)
{
	if (ticket->scope != DLOCK_LEASE || ticket->session != 0)
		return false;
	/* a lease begins before it adopts */
	pg_read_barrier();
	return !dlock_lease_ticket_is_live((const DlockLeaseTicket *) ticket);
}

/* Is there no lease any more that the lock is for? */
static bool
lease_is_over(const DlockRequest *request, const DlockTicket *ticket)
{
	return has_lease(request) ? !dlock_lease_is_open(request->lease) :
		has_run_out(ticket);
}

/* Is there nothing to wait for, or to hold? */
static bool
is_lost(DlockTicket *ticket)
{
	DlockState	state = (DlockState) pg_atomic_read_u32(&ticket->state);

	return state == DLOCK_GONE || state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && is_foreign(ticket)) || has_run_out(ticket);
}

/* A foreign ticket counts as granted once its lease has adopted it. */
static bool
still_waiting(DlockTicket *ticket, bool foreign)
{
	DlockState	state = (DlockState) pg_atomic_read_u32(&ticket->state);

	return state == DLOCK_WAITING ||
		(foreign && state == DLOCK_GRANTED && ticket->session != 0);
}

/*
 * Be woken by a change of the ticket, if it is a foreign one, or becomes one where
 * its lease adopts it, which sets our latch.  False where there is nothing to wait
 * for any more.
 *
 * The condition variable forgets us with every broadcast, so we let it know us
 * before the look at the state after which we sleep.
 *
 * Not ConditionVariablePrepareToSleep(): before 16, where we are forgotten
 * already, that takes it for a signal and passes it on to the next who waits,
 * who would do the same.  A sleep of no time only puts us back, and resets the
 * latch.
 */
static bool
prepare_to_sleep(DlockTicket *ticket)
{
	bool		foreign = is_foreign(ticket);

	if (foreign && still_waiting(ticket, foreign))
		(void) ConditionVariableTimedSleep(&((DlockLeaseTicket *) ticket)->record.changed,
										   0, WAIT_EVENT_DLOCK);
	return still_waiting(ticket, foreign);
}

/*
 * Let go of the snapshots of the CALL that this backend is in, as a COMMIT in
 * a procedure does, so that the wait holds back neither VACUUM nor CREATE
 * INDEX CONCURRENTLY.  The caller has checked that the portal's is active.
 *
 * A portal that returns a row also keeps the snapshot for what the row may
 * point to; this one's row is a plain number.
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

/*
 * No wait succeeds in a space that is gone (I6).  A space that this
 * transaction alone has dropped is gone for it alone.
 */
void
dlock_wait_check_space(const DlockSpace *space, const DlockKey *key)
{
	if (dlock_space_is_current(space))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("lock \"%.*s\" is gone", key->length, key->name),
			 errdetail("Extension \"%s\" was dropped meanwhile, and all of its locks and tickets with it.",
					   "dlock"),
			 errhint("Acquire the lock again, if the extension was created anew.")));
}

/*
 * Take interrupts, and look for our space and its worker.  False where that may
 * have slept in PostgreSQL: as it read the catalog, for a lock or a page, or wrote
 * to the client.  Such a sleep takes what has set our latch, and our place at the
 * condition variable.
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
	dlock_worker_expect(space);
	return !interrupted && messages == SharedInvalidMessageCounter &&
		dlock_known_space() == space;
}

/*
 * Sleep until the latch is set, or for so many microseconds, in pieces between
 * which we look around.  Such a look is no reason to look at the ticket, too,
 * unless it may have slept: that would only hide a wakeup that was missed.
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
		/* not where it may have been set since */
		if (events & WL_LATCH_SET)
			ResetLatch(MyLatch);
		undisturbed = look_around(request, ticket);
		left -= piece;
	} while ((events & WL_LATCH_SET) == 0 && left > 0 && undisturbed &&
			 !lease_is_over(request, ticket));
}

/*
 * A sleep for a lock of PostgreSQL's has a lock_timeout of its own, and leaves none
 * behind.  One that has just fired stays as it is.
 */
static void
keep_lock_timeout(int64 waited)
{
	if (LockTimeout > 0 && !get_timeout_active(LOCK_TIMEOUT) &&
		!get_timeout_indicator(LOCK_TIMEOUT, false))
		enable_timeout_after(LOCK_TIMEOUT,
							 (int) Max(LockTimeout - waited / 1000, 1));
}

/*
 * When a waiter looks for deadlocks: after deadlock_timeout, at growing intervals
 * from then on, and when another waiter asks for it; for those that a heavyweight
 * lock can have closed meanwhile, every two deadlock_timeouts.
 *
 * All in microseconds since the wait began.
 */
typedef struct Looks
{
	int64		next;
	int64		next_thorough;
	bool		logged;			/* log_lock_waits: once for each wait */
} Looks;

/* Every time after twice as long as before, up to 64 deadlock_timeouts */
static int64
next_thorough_look(int64 waited)
{
	int64		timeout = (int64) DeadlockTimeout * 1000;

	return waited + Min(waited + timeout, 64 * timeout);
}

static bool
is_time_to_look(const Looks *looks, int64 waited)
{
	return waited >= looks->next ||
		pg_atomic_read_u32(&dlock_my_backend->check_requested) != 0;
}

/* Raises 40P01 where this backend is a deadlock's victim. */
static void
look_for_deadlocks(Looks *looks, DlockSpace *space,
				   const DlockRequest *request, instr_time start)
{
	int64		waited = microseconds_since(start);
	bool		told = pg_atomic_exchange_u32(&dlock_my_backend->check_requested,
											  0) != 0;
	bool		thorough = told || waited >= looks->next_thorough;

	if (!dlock_deadlock_check(space, thorough, told))
		looks->next_thorough = waited;
	else if (waited >= looks->next_thorough)
		looks->next_thorough = next_thorough_look(waited);
	if (waited >= looks->next && log_lock_waits && !looks->logged)
	{
		dlock_deadlock_log(space, request, waited, false);
		looks->logged = true;
	}
	waited = microseconds_since(start);
	while (looks->next <= waited)
		looks->next += (int64) DeadlockTimeout * 2000;
}

/*
 * Sleep until the ticket is not waiting any more: true; or until the timeout
 * has passed: false.
 */
static bool
sleep_until_changed(DlockTicket *ticket, const DlockRequest *request,
					Looks *looks, instr_time start)
{
	while (prepare_to_sleep(ticket))
	{
		int64		waited = microseconds_since(start);
		int64		left = looks->next - waited;

		/* no request need wait for a lease that is over by now */
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
		if (is_time_to_look(looks, waited))
			look_for_deadlocks(looks, dlock_space_at(ticket->space), request,
							   start);
		else
			sleep_a_while(request, ticket, left);
	}
	return true;
}

/* The same, as long as the extension is there and no interrupt comes. */
static bool
sleep_until_granted(DlockTicket *ticket, const DlockRequest *request,
					instr_time start)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	int64		timeout = (int64) DeadlockTimeout * 1000;
	Looks		looks = {timeout, timeout, false};

	if (!sleep_until_changed(ticket, request, &looks, start))
		return false;

	/*
	 * An interrupt that came together with the grant is taken now, while the
	 * caller can still hand the lock on: a call that fails has no lock (I12).
	 */
	CHECK_FOR_INTERRUPTS();
	dlock_wait_check_space(space, &request->key);
	if (looks.logged && !is_lost(ticket))
	{
		/* the log tells of the grant, too */
		dlock_journal_flush_removal(space, &request->key);
		dlock_deadlock_log(space, request, microseconds_since(start), true);
	}
	return true;
}

/*
 * Count a wait that is over.  That of an enqueued ticket, and of one that its
 * lease has adopted meanwhile, whoever grants it has counted for the lock's name.
 */
static void
count_wait(const DlockRequest *request, const DlockTicket *ticket,
		   uint64 waited, DlockWaitEnd how)
{
	dlock_count_wait(waited);
	if (!is_foreign(ticket) && !DsaPointerIsValid(ticket->announcement))
		dlock_contention_wait(dlock_space_at(ticket->space), &request->key,
							  waited, ticket->queue_length, how);
}

/* What was begun for a wait ends with it, however it ends. */
static void
end_wait(const DlockRequest *request, bool has_lock_timeout,
		 CompatPsSuffix *title)
{
	/* keep the indicator: a timeout on its way stays a lock timeout */
	if (has_lock_timeout)
		disable_timeout(LOCK_TIMEOUT, true);
	compat_ps_suffix_remove(title);
	ConditionVariableCancelSleep();
	unannounce_wait(request);
}

/* How did a wait end that an error has ended? */
static DlockWaitEnd
end_by_error(int code)
{
	return code == ERRCODE_T_R_DEADLOCK_DETECTED ? DLOCK_WAIT_DEADLOCK :
		code == ERRCODE_LOCK_NOT_AVAILABLE ? DLOCK_WAIT_TIMED_OUT :
		DLOCK_WAIT_CUT_SHORT;
}

/*
 * Wait until a queued ticket is granted.  DLOCK_TIMED_OUT where the request's
 * timeout passed, DLOCK_LOST where somebody has ended the ticket.  Raises
 * 40P01 where it is a deadlock's victim, and whatever interrupts bring.
 */
DlockOutcome
dlock_wait_for_grant(const DlockRequest *request, DlockTicket *ticket)
{
	instr_time	start;
	CompatPsSuffix title;
	volatile bool granted = false;	/* set inside PG_TRY */
	bool		has_lock_timeout = LockTimeout > 0;
	DlockWaitEnd how;

	dlock_contention_prepare(dlock_space_at(ticket->space));
	INSTR_TIME_SET_CURRENT(start);
	announce_wait(request, ticket->number);
	dlock_worker_expect(dlock_space_at(ticket->space));
	compat_ps_suffix_set(&title, "waiting");
	if (has_lock_timeout)
		enable_timeout_after(LOCK_TIMEOUT, LockTimeout);
	PG_TRY();
	{
		if (request->without_snapshot)
			drop_snapshot();
		granted = sleep_until_granted(ticket, request, start);
		if (request->without_snapshot)
			EnsurePortalSnapshotExists();
	}
	PG_CATCH();
	{
		/* a look at others can fail with an entry's lock held */
		LWLockReleaseAll();
		end_wait(request, has_lock_timeout, &title);
		how = end_by_error(geterrcode());
		dlock_count(how == DLOCK_WAIT_DEADLOCK ?
					DLOCK_COUNT_DEADLOCKS : DLOCK_COUNT_CANCELED, 1);
		count_wait(request, ticket, microseconds_since(start), how);
		PG_RE_THROW();
	}
	PG_END_TRY();
	end_wait(request, has_lock_timeout, &title);

	if (is_lost(ticket))
	{
		dlock_count(DLOCK_COUNT_CANCELED, 1);
		count_wait(request, ticket, microseconds_since(start),
				   DLOCK_WAIT_CUT_SHORT);
		return DLOCK_LOST;
	}
	dlock_count(granted ? DLOCK_COUNT_WAITED : DLOCK_COUNT_TIMEOUTS, 1);
	count_wait(request, ticket, microseconds_since(start),
			   granted ? DLOCK_WAIT_GRANTED : DLOCK_WAIT_TIMED_OUT);
	return granted ? DLOCK_ACQUIRED : DLOCK_TIMED_OUT;
}
