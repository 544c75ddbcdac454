/*-------------------------------------------------------------------------
 *
 * queue_change.c
 *	  Changes of tickets that are in a lock: another channel, another info, shared
 *	  in place of exclusive, and an end by force.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/lease.h"
#include "shared/queue.h"

/*
 * Announce what becomes of a lease's ticket elsewhere from now on.  False where
 * it has ended, and the announcement is still the caller's.
 */
bool
dlock_queue_redirect(DlockLeaseTicket *ticket, dsa_pointer announcement)
{
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(state_of(&ticket->ticket));
	if (is_there)
	{
		dlock_lease_ticket_redirect(ticket, announcement);
		/* told behind the grant, which is announced anew */
		if (ticket->ticket.wanted)
			dlock_announcement_event(&ticket->ticket, DLOCK_EVENT_WANTED);
	}
	dlock_queue_let_go(lock);
	if (is_there)
		(void) dlock_worker_wake(dlock_space_at(ticket->ticket.space));
	return is_there;
}

/*
 * Exchange what a ticket says of itself: a session's own, or a lease's, which
 * is marked.  False where it has ended.  Raises nothing.
 *
 * Whatever depends on the info of a holder learns of its change here.
 */
bool
dlock_queue_exchange_info(const DlockKey *key, DlockTicket *ticket,
						  dsa_pointer *info)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key, true);
	dsa_pointer before;
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(state_of(ticket));
	if (state_of(ticket) == DLOCK_GRANTED)
		dlock_queue_note_change(lock, &wakeups.space);
	if (is_there && is_lease_ticket(ticket))
		dlock_lease_ticket_exchange_info(lease_ticket(ticket), info);
	else if (is_there)
	{
		before = ticket->info;
		ticket->info = *info;
		*info = before;
	}
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
	return is_there;
}

/* An exclusive hold becomes a shared one, and those come in who fit now. */
static void
share(DlockLock *lock, DlockTicket *ticket, DlockWakeups *wakeups)
{
	Assert(ticket->mode == DLOCK_EXCLUSIVE && lock->exclusive == 1);
	dlock_queue_note_change(lock, &wakeups->space);
	ticket->mode = DLOCK_SHARED;
	lock->exclusive--;
	dlock_queue_grant_waiters(dlock_space_at(ticket->space), lock, wakeups);
}

/*
 * Make an exclusive hold a shared one, if it is not; a lease's with a row only
 * once that says so, see dlock_queue_share().  False where it does not hold.
 */
bool
dlock_queue_downgrade(const DlockKey *key, DlockTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key, true);
	bool		holds;

	if (lock == NULL)
		return false;
	holds = is_holding(ticket);
	if (holds && !dlock_ticket_is_shared(ticket) &&
		(!is_lease_ticket(ticket) ||
		 dlock_lease_ticket_lower(lease_ticket(ticket))))
		share(lock, ticket, &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
	return holds;
}

/*
 * The row of a lease's ticket says in the WAL that it is shared: so it is, if it
 * holds still (I18).
 */
void
dlock_queue_share(DlockLeaseTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);

	if (lock == NULL)
		return;
	if (state_of(&ticket->ticket) == DLOCK_GRANTED &&
		ticket->ticket.mode == DLOCK_EXCLUSIVE)
		share(lock, &ticket->ticket, &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
}

/* What a ticket is, that is about to be ended by force. */
static void
describe_forced(const DlockLock *lock, DlockTicket *ticket,
				DlockForced *forced)
{
	dlock_key_copy(&forced->key, &lock->key);
	forced->held = state_of(ticket) == DLOCK_GRANTED;
	forced->waited = state_of(ticket) == DLOCK_WAITING;
	forced->pid = is_lease_ticket(ticket) ? 0 : ticket->pid;
	forced->role = ticket->role;
	if (forced->pid == 0)
		dlock_lease_name_fill(&forced->lease, lease_ticket(ticket));
}

/*
 * End a ticket, or the delay that keeps its lock closed: also one that begins with
 * that end, as the lease has run out.  False where it has ended already.
 */
static bool
end_by_force(DlockLock *lock, DlockTicket *ticket, DlockWakeups *wakeups)
{
	DlockLeaseTicket *of_lease =
		is_lease_ticket(ticket) ? lease_ticket(ticket) : NULL;
	DlockState	state = state_of(ticket);
	bool		ended = state == DLOCK_ENDING || state == DLOCK_LEAVING;
	bool		done = !ended || ticket->pins > 0;

	/* nobody else may know of it when it has ended */
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

/* The lock that has a ticket with this number, which is looked for in all. */
static bool
find_lock_of(const DlockSpace *space, int64 number, DlockKey *key)
{
	DlockLockScan scan;
	DlockLock  *lock;

	dlock_lock_scan_begin(&scan, false, &space->key, false);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		if (find_number(&lock->holders, number) == NULL &&
			find_number(&lock->queue, number) == NULL)
			continue;
		dlock_key_copy(key, &lock->key);
		break;
	}
	dlock_lock_scan_end(&scan);
	return lock != NULL;
}

/* Force the ticket with this number in a lock, or that one of a lease's. */
static bool
force(const DlockKey *key, int64 number, DlockLeaseTicket *of_lease,
	  DlockForced *forced)
{
	DlockLock  *lock = dlock_lock_find(key, true);
	DlockWakeups wakeups = {0};
	DlockTicket *ticket = of_lease ? &of_lease->ticket : NULL;
	bool		done = false;

	if (lock == NULL)
		return false;
	if (ticket == NULL)
		ticket = find_number(&lock->holders, number);
	if (ticket == NULL)
		ticket = find_number(&lock->queue, number);
	if (ticket && state_of(ticket) != DLOCK_GONE)
	{
		describe_forced(lock, ticket, forced);
		done = end_by_force(lock, ticket, &wakeups);
	}
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
	return done;
}

/*
 * End a ticket of any backend, on an administrator's word.  Its owner finds
 * it GONE, and is woken in case it waits.  False where there is none; otherwise
 * *forced is what it was.
 *
 * The lock of a lease's ticket is found by the number.  One of a session's is
 * looked for, as nobody but its owner knows its lock; with the locks of others
 * shared, as whoever guesses numbers must not keep them from their owners.
 */
bool
dlock_queue_force(DlockSpace *space, int64 number, DlockForced *forced)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *ticket;
	DlockKey	key;
	bool		done = false;

	dlock_id_find(space, number, &lease, &ticket);
	if (ticket)
		done = force(&ticket->key, number, ticket, forced);
	else if (lease == NULL && find_lock_of(space, number, &key))
		done = force(&key, number, NULL, forced);
	dlock_record_end_uses(before);
	return done;
}
