/*-------------------------------------------------------------------------
 *
 * request.c
 *	  What all requests of this backend do alike: waiting for the turn, with
 *	  all its ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/held.h"
#include "tables/tables.h"

/*
 * How long a request that must not wait does so for the removal of a row, in
 * microseconds; it takes a fraction of this, if the worker works.
 */
#define HANDOVER_TIMEOUT	1000000

void
dlock_request_check_upgrade(const DlockRequest *request,
							const DlockTicket *held)
{
	if (request->mode == DLOCK_EXCLUSIVE && dlock_ticket_is_shared(held))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot acquire lock \"%.*s\" exclusively while holding it shared",
						request->key.length, request->key.name),
				 errdetail("An upgrade would overtake the sessions that wait."),
				 errhint("Release the shared hold first.")));
}

/*
 * Is there memory for one more lock, lease or ticket of a role's?  Raises 53200
 * where there is not, nor in name spaces that nobody can use any more, as that of
 * a database that was dropped.
 */
void
dlock_request_check_memory(DlockSpace *space, Oid role)
{
	if (likely(dlock_memory_suffices(role)))
		return;
	dlock_remove_all_unused_spaces(&space->key);
	dlock_check_memory(role);
}

/* What a timeout leaves after some time */
DlockTimeout
dlock_request_time_left(DlockTimeout timeout, uint64 start)
{
	int64		waited = (int64) (dlock_monotonic_now() - start);

	return timeout <= 0 ? timeout : Max(timeout - waited, 0);
}

/*
 * Where the tables of leases have still to be read: wait until what the request
 * has to do with is there, which is all for a lease's, and otherwise what leases
 * have under its name.  request->timeout is what is left of it then.
 *
 * Where its time has passed by then: false, with *outcome set, if a session asks
 * for a name that a lease has.  Otherwise raises 55P03, also for a request that
 * only tries: the lock may be free, or the lease that asks may have it already.
 */
bool
dlock_request_wait_for_load(DlockSpace *space, DlockRequest *request,
							DlockOutcome *outcome)
{
	uint64		start = dlock_monotonic_now();
	bool		leased = false;

	if (request->scope == DLOCK_LEASE ?
		dlock_load_all(space, request->timeout) :
		dlock_load_name(space, &request->key, request->timeout, &leased))
	{
		request->timeout = dlock_request_time_left(request->timeout, start);
		return true;
	}
	dlock_count(request->timeout == DLOCK_NO_WAIT ?
				DLOCK_COUNT_BUSY : DLOCK_COUNT_TIMEOUTS, 1);
	if (!leased)
		dlock_load_raise_timeout(space, &request->key);
	*outcome = DLOCK_NOT_LOADED;
	return false;
}

/*
 * Wait for a ticket that was queued.  Whatever ends the wait other than the
 * grant ends the ticket (I12): withdrawn, or handed on if the grant came at
 * the same moment.
 */
static DlockOutcome
wait_or_leave(const DlockRequest *request, DlockHeld *held)
{
	DlockOutcome outcome;

	PG_TRY();
	{
		outcome = dlock_wait_for_grant(request, held->ticket);
		/* what its lease has adopted meanwhile is asked for anew */
		if (outcome == DLOCK_LOST && held->ticket->session != 0)
			dlock_raise_lost_place(request, held->number);
	}
	PG_CATCH();
	{
		/* a look at others can fail with an entry's lock held */
		LWLockReleaseAll();
		dlock_held_settle(held);
		PG_RE_THROW();
	}
	PG_END_TRY();
	if (outcome != DLOCK_ACQUIRED)
		dlock_held_settle(held);
	return outcome;
}

/*
 * The same for a request that must not wait, and was queued only because the
 * lock is free already, but not yet for the next.
 */
static DlockOutcome
wait_for_handover(const DlockRequest *request, DlockHeld *held)
{
	DlockRequest patient = *request;

	patient.timeout = HANDOVER_TIMEOUT;
	return wait_or_leave(&patient, held);
}

/*
 * Wait for a new ticket of a lease's to be granted.  DLOCK_TIMED_OUT where the
 * request's time has passed, DLOCK_LOST where the lease has adopted the ticket
 * meanwhile, for another client, and it has ended since.  In both cases it is
 * not this session's any more, and *held forgotten.
 */
DlockOutcome
dlock_request_wait_for_lease(const DlockRequest *request, DlockHeld *held)
{
	if (dlock_held_is_granted(held))
		return DLOCK_ACQUIRED;
	return request->timeout == DLOCK_NO_WAIT ?
		wait_for_handover(request, held) : wait_or_leave(request, held);
}

/*
 * Wait for a new ticket to be granted.  False where the request's time has
 * passed; the ticket is gone then, and *held forgotten.
 */
bool
dlock_request_wait(const DlockRequest *request, DlockHeld *held)
{
	return dlock_request_wait_for_lease(request, held) == DLOCK_ACQUIRED;
}

/*
 * Wait for a ticket of this session's or of a lease's.  An error ends the wait
 * and leaves the ticket queued.
 */
bool
dlock_request_wait_again(DlockTicket *ticket, const DlockKey *key,
						 DlockTimeout timeout)
{
	DlockRequest request;
	DlockHeldName *name = dlock_held_find_name(key);
	DlockOutcome outcome;

	memset(&request, 0, offsetof(DlockRequest, key));
	dlock_key_copy(&request.key, key);
	request.timeout = timeout;
	request.mode = ticket->mode;
	request.slots = ticket->slots;
	request.permits = ticket->permits;
	if (name && dlock_held_blocks(name, &request, ticket->number))
		dlock_raise_self_wait(&request);
	outcome = dlock_wait_for_grant(&request, ticket);
	if (outcome == DLOCK_LOST)
		dlock_raise_no_ticket(ticket->number);
	return outcome == DLOCK_ACQUIRED;
}
