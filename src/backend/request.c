/*-------------------------------------------------------------------------
 *
 * request.c
 *	  Checks and waiting, for all requests of this backend.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/held.h"
#include "tables/tables.h"

/* How long a request with timeout 0 waits for a row's removal, in us */
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

/* Returns the rest of a timeout that began at "start". */
DlockTimeout
dlock_request_time_left(DlockTimeout timeout, uint64 start)
{
	int64		waited = (int64) (dlock_monotonic_now() - start);

	return timeout <= 0 ? timeout : Max(timeout - waited, 0);
}

/*
 * Wait until the rows that the request needs are loaded: in lease scope, all
 * rows; otherwise the name's rows.  Subtracts the wait from the timeout.
 *
 * After the timeout, raises 55P03 even in a try function, because the lock may
 * be free, or the request's own lease may have it.  But if the request is not
 * for a lease and the name has a row, returns false, with *outcome set.
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
 * Wait for the grant of a new ticket.  Without a grant, ends the ticket (I12)
 * and forgets *held.  A request with timeout 0 waits only for a row's removal.
 *
 * Returns DLOCK_LOST if the lease has adopted the ticket for another client
 * and the ticket has ended.  Then the caller must retry.
 */
DlockOutcome
dlock_request_wait(const DlockRequest *request, DlockHeld *held)
{
	DlockRequest patient = *request;
	DlockOutcome outcome;

	if (dlock_held_is_granted(held))
		return DLOCK_ACQUIRED;
	if (patient.timeout == DLOCK_NO_WAIT)
		patient.timeout = HANDOVER_TIMEOUT;
	PG_TRY();
	{
		/* an heir (I17) is shown as its lease's, so calls must find it */
		if (held->ticket->session == 0)
			dlock_id_insert(&((DlockLeaseTicket *) held->ticket)->record);
		outcome = dlock_wait_for_grant(&patient, held->ticket);
		if (outcome == DLOCK_LOST && held->ticket->session != 0)
			dlock_raise_lost_place(request, held->number);
	}
	PG_CATCH();
	{
		/* PostgreSQL can raise an error with LWLocks held */
		LWLockReleaseAll();
		dlock_held_settle(held);
		PG_RE_THROW();
	}
	PG_END_TRY();
	if (outcome != DLOCK_ACQUIRED)
		dlock_held_settle(held);
	return outcome;
}

/* Wait for an enqueued ticket.  An error leaves the ticket queued. */
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
