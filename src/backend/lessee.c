/*-------------------------------------------------------------------------
 *
 * lessee.c
 *	  Getting tickets for leases.
 *
 * A blocking request waits with a session's ticket, which the lease adopts at
 * the grant.  An enqueued ticket is the lease's from the start.  A call either
 * returns a durable ticket or withdraws the ticket that it has made.  Each call
 * inserts its ticket into the table of numbers, where an error withdraws the
 * ticket: the call that made it may fail, or be slow, before it does so.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "backend/held.h"

static void
raise_other_permits(const DlockRequest *request, const DlockTicket *existing)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("the lease has asked for lock \"%.*s\" with other permits",
					request->key.length, request->key.name),
			 errdetail("Its ticket %lld takes permits => %d.",
					   (long long) existing->number, existing->permits),
			 errhint("Give the same permits, or another owner.")));
}

/*
 * Join the lock with a new ticket for request->lease, or find the ticket that
 * an earlier call made.  Returns NULL if the lock is busy and "nowait" is set.
 * *held is set only for a new ticket, and only if "adopt" is false.
 */
static DlockLeaseTicket *
join_for_lease(DlockSpace *space, const DlockRequest *request, bool nowait,
			   bool adopt, DlockHeld **held, bool *created)
{
	DlockLeaseTicket *ticket;
	DlockJoined joined;

	*held = NULL;
	*created = false;
	if (adopt)
		dlock_contention_prepare(space);
	else
		dlock_held_prepare(&request->key);
	(void) dlock_record_begin_uses();
	dlock_request_check_memory(space, request->lease->role);
	ticket = dlock_lease_ticket_make(space, request);
	while (joined = dlock_queue_join_for_lease(space, request, ticket, nowait,
											   adopt),
		   joined.outcome == DLOCK_JOIN_NO_NUMBER)
		dlock_ticket_reserve(space, 0);
	switch (joined.outcome)
	{
		case DLOCK_JOIN_EXISTS:
			ticket = joined.existing;
			dlock_request_check_upgrade(request, &ticket->ticket);
			if (request->permits != ticket->ticket.permits)
				raise_other_permits(request, &ticket->ticket);
			return ticket;
		case DLOCK_JOIN_BUSY:
			return NULL;
		case DLOCK_JOIN_MISMATCH:
			dlock_raise_mismatch(request, joined.slots);
			break;
		case DLOCK_JOIN_LEASE_GONE:
			dlock_raise_lease_gone(request->lease->number);
			break;
		default:
			break;
	}
	*created = true;
	if (!adopt)
	{
		*held = dlock_held_enter(&ticket->ticket, DLOCK_LEASE, joined.lock);
		/* for *held, which keeps the ticket even after an adoption */
		dlock_record_ref(&ticket->record);
	}
	return ticket;
}

/* Let the lease adopt the ticket that this session was granted. */
static void
let_adopt(const DlockRequest *request, DlockHeld *held,
		  DlockLeaseTicket *ticket)
{
	if (!dlock_queue_adopt(ticket))
	{
		int64		number = held->number;
		bool		lost = ticket->heir || dlock_held_is_gone(held);

		dlock_held_settle(held);
		if (lost)
			dlock_raise_lost_place(request, number);
		dlock_raise_lease_gone(request->lease->number);
	}
	dlock_held_forget(held);
}

static void
check_lease_open(const DlockRequest *request)
{
	if (!request->lease->single && !dlock_lease_is_open(request->lease))
		dlock_raise_lease_gone(request->lease->number);
}

/* Wait for the ticket that another call has made, and claim it. */
static DlockOutcome
wait_with_others(const DlockRequest *request, DlockHeldName *name, bool nowait,
				 DlockLeaseTicket *ticket)
{
	DlockOutcome outcome;

	if (pg_atomic_read_u32(&ticket->ticket.state) == DLOCK_WAITING)
	{
		if (nowait)
			return DLOCK_BUSY;
		if (name && dlock_held_blocks(name, request, ticket->ticket.number))
			dlock_raise_self_wait(request);
	}
	/* if the lease holds the lock already, do not wait */
	outcome = dlock_state_of(&ticket->ticket) == DLOCK_GRANTED &&
		ticket->ticket.session == 0 ? DLOCK_ACQUIRED :
		dlock_wait_for_grant(request, &ticket->ticket);
	if (outcome == DLOCK_ACQUIRED && !dlock_queue_claim(ticket, false))
		return DLOCK_LOST;
	return outcome;
}

/*
 * Ask once for a ticket.  Returns DLOCK_ACQUIRED if the ticket is granted and
 * claimed, or DLOCK_LOST if the ticket has ended and the caller must retry.
 */
static DlockOutcome
ask_for_lease(DlockSpace *space, const DlockRequest *request, bool nowait,
			  DlockLeaseTicket **ticket)
{
	DlockHeldName *name = dlock_held_find_name(&request->key);
	bool		blocked = name &&
		dlock_held_blocks(name, request, PG_INT64_MAX);
	DlockHeld  *held;
	DlockOutcome outcome;
	bool		created;

	*ticket = join_for_lease(space, request, nowait || blocked, false, &held,
							 &created);
	if (*ticket == NULL)
	{
		if (!nowait)
			dlock_raise_self_wait(request);
		return DLOCK_BUSY;
	}
	if (held == NULL)
		return wait_with_others(request, name, nowait, *ticket);
	outcome = dlock_request_wait(request, held);
	if (outcome == DLOCK_ACQUIRED)
		let_adopt(request, held, *ticket);
	/* an heir (I17) has ended together with its single lease */
	if (outcome == DLOCK_LOST && request->lease->single && (*ticket)->heir)
		dlock_raise_lost_place(request, (*ticket)->ticket.number);
	return outcome;
}

/* Make another single lease to ask again: each begins only once (I14). */
static void
take_another_lease(DlockSpace *space, DlockRequest *request)
{
	DlockLease *lease = request->lease;

	if (!lease->single)
		return;
	dlock_request_check_memory(space, lease->role);
	request->lease = dlock_lease_make_single(space, lease->role,
											 dlock_lease_role_name(lease),
											 dlock_lease_ttl(lease),
											 &request->key);
}

/*
 * Acquire for request->lease.  Returns NULL, with *outcome set, if the lock
 * cannot be acquired in time.  Otherwise returns a granted ticket and pushes a
 * mark.  The caller must make the ticket durable, and then drop the mark.
 */
DlockLeaseTicket *
dlock_lessee_acquire(DlockSpace *space, DlockRequest *request,
					 DlockOutcome *outcome)
{
	DlockTimeout timeout = request->timeout;
	uint64		start = dlock_monotonic_now();
	DlockLeaseTicket *ticket;

	dlock_xact_prepare();
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		check_lease_open(request);
		request->timeout = dlock_request_time_left(timeout, start);
		*outcome = ask_for_lease(space, request, timeout == DLOCK_NO_WAIT,
								 &ticket);
		if (*outcome != DLOCK_LOST)
			break;
		take_another_lease(space, request);
	}
	if (*outcome == DLOCK_BUSY)
		dlock_count(DLOCK_COUNT_BUSY, 1);
	if (*outcome != DLOCK_ACQUIRED)
		return NULL;
	dlock_xact_take(NULL, ticket, 0);
	dlock_id_insert(&ticket->record);
	return ticket;
}

/*
 * Raise 55L01 if the ticket, its lease or the extension is gone, or if
 * "granted" is set and the ticket is not granted.
 */
static void
check_durable(DlockSpace *space, DlockLeaseTicket *ticket, bool granted)
{
	DlockState	state;

	dlock_wait_check_space(space, &ticket->key);
	state = dlock_state_of(&ticket->ticket);
	if ((state == DLOCK_GRANTED || (state == DLOCK_WAITING && !granted)) &&
		dlock_lease_ticket_is_live(ticket))
		return;
	if (granted)
		dlock_raise_lost(&ticket->key, ticket->ticket.number);
	dlock_raise_no_ticket(ticket->ticket.number);
}

/* Wait until the caller's ticket is durable, and check it. */
void
dlock_lessee_make_durable(DlockSpace *space, DlockLeaseTicket *ticket,
						  bool granted)
{
	dlock_durable_wait(space, &ticket->record);
	check_durable(space, ticket, granted);
}

/*
 * Make or find the ticket that an enqueue returns, and claim it.  The lease
 * adopts a session's ticket at once, so that the ticket outlives the session.
 */
static DlockLeaseTicket *
join_or_claim(DlockSpace *space, const DlockRequest *request, bool *created)
{
	DlockLeaseTicket *ticket;
	DlockHeld  *held;

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		check_lease_open(request);
		ticket = join_for_lease(space, request, false, true, &held, created);
		if (*created || dlock_queue_claim(ticket, true))
			return ticket;
	}
}

/*
 * Queue for request->lease, durably and without waiting for the grant, and
 * return the ticket's number.
 *
 * If another call has made the ticket, that call's client gets the
 * announcement until the ticket is durable, and this client after that.  A new
 * ticket is ended if the statement that calls "function" is canceled later.
 */
int64
dlock_lessee_enqueue(DlockSpace *space, const DlockRequest *request,
					 const FmgrInfo *function)
{
	DlockLeaseTicket *ticket;
	dsa_pointer redirection = InvalidDsaPointer;
	bool		created;

	dlock_xact_prepare_arming();
	ticket = join_or_claim(space, request, &created);
	/* if this call fails, no other may arm the new ticket's announcement */
	dlock_xact_take(NULL, ticket, created ?
					dlock_announcement_my_claim(&ticket->ticket) : 0);
	dlock_id_insert(&ticket->record);
	/* prepare the second mark: MARK_REDIRECTED or MARK_ARM */
	dlock_xact_prepare();
	if (!created)
	{
		redirection = dlock_announcement_make(space, request);
		dlock_xact_redirect(ticket, redirection);
		dlock_lease_ticket_begin_redirect(ticket, redirection);
	}
	dlock_lessee_make_durable(space, ticket, false);
	if (!created && !dlock_queue_redirect(ticket, redirection))
		dlock_raise_no_ticket(ticket->ticket.number);
	/* another call's ticket is not withdrawn after a cancel */
	if (created)
		dlock_xact_keep_result(function, 1);
	else
		dlock_xact_keep(2);
	dlock_xact_arm(NULL, ticket,
				   dlock_announcement_my_claim(&ticket->ticket));
	return ticket->ticket.number;
}

/* Wait for a durable grant of a lease's ticket; returns false if timed out. */
bool
dlock_lessee_wait(DlockSpace *space, DlockLeaseTicket *ticket,
				  DlockTimeout timeout)
{
	if (DsaPointerIsValid(ticket->ticket.announcement))
	{
		dlock_xact_prepare_arming();
		if (dlock_notify_is_mine(&ticket->ticket))
			(void) dlock_notify_listen();
		dlock_xact_arm(NULL, ticket,
					   dlock_announcement_claim(&ticket->ticket));
	}
	if (pg_atomic_read_u32(&ticket->ticket.state) == DLOCK_WAITING &&
		(timeout == DLOCK_NO_WAIT ||
		 !dlock_request_wait_again(&ticket->ticket, &ticket->key, timeout)))
		return false;
	dlock_durable_wait_only(space, &ticket->record,
							_("The ticket stays as it is."));
	check_durable(space, ticket, true);
	return true;
}
