/*-------------------------------------------------------------------------
 *
 * queue_change.c
 *	  Changes of tickets that are in a lock: channel, info, downgrade, forced
 *	  release.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/queue.h"

/* Give a ticket an announcement; returns false if the ticket has ended. */
bool
dlock_queue_redirect(DlockLeaseTicket *ticket, dsa_pointer announcement)
{
	DlockLock  *lock = dlock_lock_find(&ticket->key);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(dlock_state_of(&ticket->ticket));
	if (is_there)
	{
		dlock_lease_ticket_redirect(ticket, announcement);
		/* the grant is announced again, and WANTED follows it */
		if (ticket->ticket.wanted)
			dlock_announcement_event(&ticket->ticket, DLOCK_EVENT_WANTED);
	}
	dlock_queue_let_go(lock);
	if (is_there)
		(void) dlock_worker_wake(dlock_space_at(ticket->ticket.space));
	return is_there;
}

/* Exchange an info; returns false if the ticket has ended.  Raises nothing. */
bool
dlock_queue_exchange_info(const DlockKey *key, DlockTicket *ticket,
						  dsa_pointer *info)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(dlock_state_of(ticket));
	if (dlock_state_of(ticket) == DLOCK_GRANTED)
		dlock_queue_note_change(lock, &wakeups.space);
	if (is_there && is_lease_ticket(ticket))
		dlock_lease_ticket_exchange_info(lease_ticket(ticket), info);
	else if (is_there)
		dlock_exchange(&ticket->info, info);
	dlock_queue_let_go_and_wake(lock, &wakeups);
	return is_there;
}

/* Make an exclusive hold shared, and grant tickets that fit now. */
static void
share_hold(DlockLock *lock, DlockTicket *ticket, DlockWakeups *wakeups)
{
	Assert(ticket->mode == DLOCK_EXCLUSIVE && lock->exclusive == 1);
	dlock_queue_note_change(lock, &wakeups->space);
	ticket->mode = DLOCK_SHARED;
	lock->exclusive--;
	dlock_queue_grant_waiters(dlock_space_at(ticket->space), lock, wakeups);
}

/*
 * Make an exclusive hold shared.  If the ticket has a row, dlock_queue_share()
 * completes this (I18).  Returns false if the ticket does not hold.
 */
bool
dlock_queue_downgrade(const DlockKey *key, DlockTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key);
	bool		holds;

	if (lock == NULL)
		return false;
	holds = is_holding(ticket);
	if (holds && !dlock_ticket_is_shared(ticket) &&
		(!is_lease_ticket(ticket) ||
		 dlock_lease_ticket_lower(lease_ticket(ticket))))
		share_hold(lock, ticket, &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
	return holds;
}

/* Complete a downgrade.  The row with the new mode is in the WAL (I18). */
void
dlock_queue_share(DlockLeaseTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key);

	if (lock == NULL)
		return;
	if (dlock_state_of(&ticket->ticket) == DLOCK_GRANTED &&
		ticket->ticket.mode == DLOCK_EXCLUSIVE)
		share_hold(lock, &ticket->ticket, &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
}

static void
describe_forced(DlockForced *forced, const DlockLock *lock, DlockTicket *ticket)
{
	dlock_key_copy(&forced->key, &lock->key);
	forced->held = dlock_state_of(ticket) == DLOCK_GRANTED;
	forced->waited = dlock_state_of(ticket) == DLOCK_WAITING;
	forced->pid = is_lease_ticket(ticket) ? 0 : ticket->pid;
	forced->role = ticket->role;
	if (forced->pid == 0)
		dlock_lease_name_fill(&forced->lease, lease_ticket(ticket));
}

/*
 * End a ticket, and the delay, if any, that keeps its lock closed.  Returns
 * false if the ticket had ended before, and neither a pin nor a delay kept it.
 */
static bool
end_ticket_by_force(DlockLock *lock, DlockTicket *ticket,
					DlockWakeups *wakeups)
{
	DlockLeaseTicket *of_lease =
		is_lease_ticket(ticket) ? lease_ticket(ticket) : NULL;
	DlockState	state = dlock_state_of(ticket);
	bool		ended = state == DLOCK_ENDING || state == DLOCK_LEAVING;
	bool		done = !ended || ticket->pins > 0;

	/* keep the ticket: its end may drop all other references to it */
	if (of_lease)
		dlock_record_ref(&of_lease->record);
	if (!ended)
		dlock_queue_end_ticket(lock, ticket, DLOCK_EVENT_RELEASED, wakeups);
	if (of_lease && dlock_lease_ticket_undelay(of_lease))
	{
		wakeups->space = dlock_space_at(of_lease->ticket.space);
		done = true;
	}
	if (of_lease)
		dlock_record_unref(&of_lease->record);
	return done;
}

static bool
force_lease_ticket(DlockLeaseTicket *ticket, DlockForced *forced,
				   DlockWakeups *wakeups)
{
	DlockLock  *lock = dlock_lock_find(&ticket->key);
	bool		done = false;

	if (lock == NULL)
		return false;
	if (dlock_state_of(&ticket->ticket) != DLOCK_GONE)
	{
		describe_forced(forced, lock, &ticket->ticket);
		done = end_ticket_by_force(lock, &ticket->ticket, wakeups);
	}
	dlock_queue_let_go(lock);
	return done;
}

/* Search all locks for a session's ticket, and end it by force. */
static bool
force_session_ticket(const DlockSpace *space, int64 number,
					 DlockForced *forced, DlockWakeups *wakeups)
{
	DlockLockScan scan;
	DlockLock  *lock;
	DlockTicket *ticket = NULL;
	bool		done = false;

	dlock_lock_scan_begin(&scan, &space->key, false);
	while (ticket == NULL && (lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		ticket = find_number(&lock->holders, number);
		if (ticket == NULL)
			ticket = find_number(&lock->queue, number);
		if (ticket == NULL)
			continue;
		describe_forced(forced, lock, ticket);
		done = end_ticket_by_force(lock, ticket, wakeups);
		if (dlock_lock_is_unused(lock))
			dlock_lock_scan_remove(&scan);
	}
	dlock_lock_scan_end(&scan);
	return done;
}

/* End the ticket with this number, as end_ticket_by_force() does. */
bool
dlock_queue_force(DlockSpace *space, int64 number, DlockForced *forced)
{
	int			before = dlock_record_begin_uses();
	DlockWakeups wakeups = {0};
	DlockLease *lease;
	DlockLeaseTicket *ticket;
	bool		done = false;

	dlock_id_find(space, number, &lease, &ticket);
	if (ticket)
		done = force_lease_ticket(ticket, forced, &wakeups);
	else if (lease == NULL)
		done = force_session_ticket(space, number, forced, &wakeups);
	dlock_wakeups_send(&wakeups);
	dlock_record_end_uses(before);
	return done;
}
