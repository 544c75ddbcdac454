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

/* False if the ticket has ended: the caller keeps the announcement. */
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

/* Exchange a ticket's info; false if it has ended.  Raises nothing. */
bool
dlock_queue_exchange_info(const DlockKey *key, DlockTicket *ticket,
						  dsa_pointer *info)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key);
	dsa_pointer before;
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(dlock_state_of(ticket));
	if (dlock_state_of(ticket) == DLOCK_GRANTED)
		dlock_queue_note_change(lock, &wakeups.space);
	if (is_there && is_lease_ticket(ticket))
		dlock_lease_ticket_exchange_info(lease_ticket(ticket), info);
	else if (is_there)
	{
		before = ticket->info;
		ticket->info = *info;
		*info = before;
	}
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
 * Make an exclusive hold shared; a lease's with a row only once the row says
 * so, see dlock_queue_share().  False if the ticket does not hold.
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

/* A ticket's row that says shared is in the WAL: share its hold (I18). */
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
describe_forced(const DlockLock *lock, DlockTicket *ticket,
				DlockForced *forced)
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
 * End a ticket, or the delay that it keeps its lock closed with.  False if the
 * ticket had ended and neither a pin nor a delay keeps it.
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

	/* once ended, it may have no other reference */
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

/* Search all locks for a ticket's number. */
static bool
find_lock_of(const DlockSpace *space, int64 number, DlockKey *key)
{
	DlockLockScan scan;
	DlockLock  *lock;

	dlock_lock_scan_begin(&scan, &space->key, false);
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

static bool
force(const DlockKey *key, int64 number, DlockLeaseTicket *of_lease,
	  DlockForced *forced)
{
	DlockLock  *lock = dlock_lock_find(key);
	DlockWakeups wakeups = {0};
	DlockTicket *ticket = of_lease ? &of_lease->ticket : NULL;
	bool		done = false;

	if (lock == NULL)
		return false;
	if (ticket == NULL)
		ticket = find_number(&lock->holders, number);
	if (ticket == NULL)
		ticket = find_number(&lock->queue, number);
	if (ticket && dlock_state_of(ticket) != DLOCK_GONE)
	{
		describe_forced(lock, ticket, forced);
		done = end_ticket_by_force(lock, ticket, &wakeups);
	}
	dlock_queue_let_go_and_wake(lock, &wakeups);
	return done;
}

/*
 * End a ticket by force; false if there is none.  A session's is searched for
 * in all locks, in shared mode, so that guessed numbers block no owner.
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
