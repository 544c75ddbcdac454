/*-------------------------------------------------------------------------
 *
 * queue.c
 *	  The state machine of a lock: join, grant, hand over, leave.
 *
 * A lock has a list of holders and a queue.  Whoever changes either, under
 * the entry's lock, goes on to grant from the head of the queue for as long
 * as the head fits, and wakes those whom it granted once the entry's lock is
 * free.  So nobody but the head is ever considered, nobody is woken in vain,
 * and these hold whenever the entry's lock is free:
 *
 *	- the head of the queue does not fit beside the holders;
 *	- the queue is in ticket order, and so are the grants;
 *	- an entry has a ticket in one of its lists.
 *
 * A lease's ticket stays in its list, LEAVING or ENDING, until the removal of
 * its row is in the WAL, and nobody is granted the lock past it: otherwise a
 * crash could bring it back, and have it granted after a greater number.
 *
 * Under the entry's lock nothing here sleeps, calls out, or allocates.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/memutils.h"

#include "shared/shared.h"

/* Whom to wake once the entry's lock is free */
typedef struct Wakeups
{
	DlockSpace *space;			/* its worker; or NULL */
	int			count;
	int			procnos[8];		/* few, as every release zeroes them */
} Wakeups;

static inline DlockTicket *
ticket_at(dsa_pointer pointer)
{
	return DsaPointerIsValid(pointer) ?
		dsa_get_address(dlock_area, pointer) : NULL;
}

static inline DlockState
state_of(DlockTicket *ticket)
{
	return (DlockState) pg_atomic_read_u32(&ticket->state);
}

/*
 * Change a ticket's state.  It is read without the lock: by its owner, who
 * frees a session's ticket as soon as it finds it GONE, and by the waiters of
 * a lease's.  So all that was done to the ticket and its links comes before.
 */
static inline void
set_state(DlockTicket *ticket, DlockState state)
{
	pg_write_barrier();
	pg_atomic_write_u32(&ticket->state, state);
}

static inline bool
is_lease_ticket(const DlockTicket *ticket)
{
	return ticket->scope == DLOCK_LEASE && ticket->session == 0;
}

static inline DlockLeaseTicket *
lease_ticket(DlockTicket *ticket)
{
	return (DlockLeaseTicket *) ticket;
}

/* Is it in the queue, and not among the holders? */
static bool
is_queued(DlockTicket *ticket)
{
	DlockState	state = state_of(ticket);

	return state == DLOCK_WAITING || state == DLOCK_LEAVING;
}

/* Does one of the queue wait?  Not where its lease has run out. */
static bool
is_waiting(DlockTicket *ticket)
{
	return state_of(ticket) == DLOCK_WAITING &&
		(!is_lease_ticket(ticket) ||
		 dlock_lease_ticket_is_live(lease_ticket(ticket)));
}

/*
 * Does one of the holders hold?  This is what every question is answered with,
 * and what a guard needs.  Not where it has ended and only a pin keeps it, nor
 * where its lease has run out, though the worker may not have come round to it.
 */
static bool
is_holding(DlockTicket *ticket)
{
	return state_of(ticket) == DLOCK_GRANTED &&
		(!is_lease_ticket(ticket) ||
		 dlock_lease_ticket_is_live(lease_ticket(ticket)));
}

/*
 * Is one of the holders about to leave, so that the next can be granted?  Not
 * while a commit has it pinned, or a delay keeps the lock closed.  Until it has
 * left, nobody is granted the lock beside it: that is what fits() asks, and
 * all holders count there.
 */
static bool
is_leaving(DlockTicket *ticket)
{
	return !is_holding(ticket) && ticket->pins == 0 &&
		!(is_lease_ticket(ticket) &&
		  dlock_lease_ticket_is_delayed(lease_ticket(ticket)));
}

static void
set_latches(Wakeups *wakeups)
{
	for (int i = 0; i < wakeups->count; i++)
		SetLatch(&GetPGProcByNumber(wakeups->procnos[i])->procLatch);
	wakeups->count = 0;
}

static void
wake_all(Wakeups *wakeups)
{
	set_latches(wakeups);
	if (wakeups->space)
		dlock_worker_wake(wakeups->space);
}

/*
 * Note a ticket's backend to be woken, and the worker if the ticket is to be
 * announced.  Where so many shared holders come in at once that the array is
 * full, the latches are set under the entry's lock: that is only slower.
 *
 * For a lease's ticket the worker does all that, when the change is written.
 */
static void
wake_later(Wakeups *wakeups, DlockTicket *ticket, uint32 event)
{
	bool		of_lease = is_lease_ticket(ticket);

	if (of_lease || DsaPointerIsValid(ticket->announcement))
		wakeups->space = dlock_space_at(ticket->space);
	if (DsaPointerIsValid(ticket->announcement) &&
		!(of_lease && event == DLOCK_EVENT_GRANTED))
		dlock_announcement_event(ticket, event);
	if (of_lease)
		return;
	if (wakeups->count == lengthof(wakeups->procnos))
		set_latches(wakeups);
	wakeups->procnos[wakeups->count++] = ticket->procno;
}

/*
 * Could this ticket hold the lock beside the holders that there are?  Not where
 * they have other slots: they are about to leave, and in the way until then.
 */
static bool
fits(const DlockLock *lock, const DlockTicket *ticket)
{
	const DlockTicket *holder = ticket_at(lock->holders.head);

	if (lock->closed > 0 || (holder && holder->slots != ticket->slots))
		return false;
	switch (ticket->mode)
	{
		case DLOCK_EXCLUSIVE:
			return lock->holders.length == 0;
		case DLOCK_SHARED:
			return lock->exclusive == 0;
		case DLOCK_SLOTS:
			return ticket->permits <= lock->slots - lock->permits;
	}
	return false;
}

static void
grant(DlockLock *lock, DlockTicket *ticket, TimestampTz now)
{
	dlock_list_append(&lock->holders, &ticket->link);
	lock->permits += ticket->permits;
	if (ticket->mode == DLOCK_EXCLUSIVE)
		lock->exclusive++;
	ticket->granted_at = now;
	dlock_count(DLOCK_COUNT_ACQUIRED, 1);
	if (is_lease_ticket(ticket))
		dlock_lease_ticket_granted(lease_ticket(ticket));
	else
		set_state(ticket, DLOCK_GRANTED);
}

/*
 * Take a ticket out of a list of its lock.  A view that has copied a part of
 * the list, and would go on with this ticket, goes on with the one behind it.
 */
static void
leave_list(DlockList *list, DlockTicket *ticket)
{
	dsa_pointer next = ticket->link.next;

	dlock_list_remove(list, &ticket->link);
	if (likely(pg_atomic_read_u32(&dlock_control->readers) == 0))
		return;
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		pg_atomic_uint64 *cursor = &dlock_backends[i].cursor;

		if (pg_atomic_read_u64(cursor) == ticket->link.self)
			pg_atomic_write_u64(cursor, next);
	}
}

/*
 * Grant to the head of the queue for as long as it fits.  One whose lease has
 * run out gives way: the worker ends it, or has begun to.
 */
static void
grant_from_queue(DlockLock *lock, Wakeups *wakeups)
{
	DlockTicket *head;
	TimestampTz now = 0;

	while ((head = ticket_at(lock->queue.head)) != NULL &&
		   state_of(head) != DLOCK_LEAVING)
	{
		/* the one before may have been a semaphore of another size */
		if (lock->holders.length == 0)
			lock->slots = head->slots;
		if (!fits(lock, head))
			break;
		if (!is_waiting(head))
		{
			wake_later(wakeups, head, DLOCK_EVENT_EXPIRED);
			set_state(head, DLOCK_LEAVING);
			if (!dlock_lease_ticket_ended(lease_ticket(head)))
				break;
			leave_list(&lock->queue, head);
			set_state(head, DLOCK_GONE);
			continue;
		}
		if (now == 0)
			now = GetCurrentTimestamp();
		/* mapped before any change, as that can fail */
		(void) ticket_at(lock->holders.tail);
		leave_list(&lock->queue, head);
		grant(lock, head, now);
		wake_later(wakeups, head, DLOCK_EVENT_GRANTED);
	}
}

/* Take a ticket out of the lock, and hand on what that frees. */
static void
take_out(DlockLock *lock, DlockTicket *ticket, Wakeups *wakeups)
{
	Assert(ticket->pins == 0);
	if (is_queued(ticket))
		leave_list(&lock->queue, ticket);
	else
	{
		leave_list(&lock->holders, ticket);
		lock->permits -= ticket->permits;
		if (ticket->mode == DLOCK_EXCLUSIVE)
			lock->exclusive--;
		if (ticket->scope == DLOCK_LEASE && lease_ticket(ticket)->closes)
			lock->closed--;
		dlock_count(DLOCK_COUNT_RELEASED, 1);
	}
	set_state(ticket, DLOCK_GONE);
	grant_from_queue(lock, wakeups);
}

static inline bool
is_unused(const DlockLock *lock)
{
	return lock->holders.length == 0 && lock->queue.length == 0;
}

/* Let go of the entry's lock; an entry without a ticket goes. */
static void
let_go(DlockLock *lock)
{
	if (is_unused(lock))
		dlock_lock_remove(lock);
	else
		dlock_lock_release(lock);
}

/*
 * Does anybody wait?  Those do not count whose lease has run out, or whose row
 * is just being removed.
 */
static bool
has_waiting(const DlockLock *lock)
{
	for (DlockTicket *ticket = ticket_at(lock->queue.head); ticket;
		 ticket = ticket_at(ticket->link.next))
	{
		if (is_waiting(ticket))
			return true;
	}
	return false;
}

/*
 * Will a ticket fit as soon as those have left who do not hold any more?  For
 * all that anybody was told the lock is free of them already, and it will be
 * handed on at once.  The answer is there with the first holder that stays and
 * is in the way.
 */
static bool
fits_soon(const DlockLock *lock, const DlockTicket *ticket)
{
	int64		permits = ticket->permits;

	if (lock->closed > 0 || has_waiting(lock))
		return false;
	if (ticket->mode == DLOCK_SHARED && lock->exclusive == 0)
		return true;
	for (DlockTicket *holder = ticket_at(lock->holders.head); holder;
		 holder = ticket_at(holder->link.next))
	{
		if (is_leaving(holder))
			continue;
		if (ticket->mode == DLOCK_EXCLUSIVE || holder->mode == DLOCK_EXCLUSIVE)
			return false;
		permits += holder->permits;
		if (ticket->mode == DLOCK_SLOTS && permits > lock->slots)
			return false;
	}
	return true;
}

/*
 * Make a lock one with the slots that a request gives; false where somebody
 * uses it with others.
 */
static bool
agree_on_slots(DlockLock *lock, int32 slots)
{
	if (likely(lock->slots == slots))
		return true;
	for (DlockTicket *holder = ticket_at(lock->holders.head); holder;
		 holder = ticket_at(holder->link.next))
	{
		if (!is_leaving(holder))
			return false;
	}
	if (has_waiting(lock))
		return false;
	lock->slots = slots;
	return true;
}

/*
 * Enter a ticket: granted at once where nobody waits and it fits, queued
 * otherwise, except that a request that must not wait is queued only where the
 * lock is about to become free for it.  Where "adopt", the lease that the
 * ticket was made for adopts it at once.
 *
 * Where the outcome is not GRANTED or QUEUED, nothing has changed, and the
 * ticket is still the caller's to free; *slots is set for MISMATCH.  For
 * EXISTS, *existing is the ticket that the lease has already, in use by the
 * caller.
 *
 * Raises 53200 where the table cannot grow; nothing has changed then either.
 */
DlockJoin
dlock_queue_join(DlockSpace *space, const DlockRequest *request,
				 DlockTicket *ticket, bool nowait, bool adopt, int32 *slots,
				 DlockLeaseTicket **existing)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = dlock_lock_insert(&request->key, request->slots);
	DlockJoin	result;
	bool		free;

	free = lock->queue.length == 0 && lock->slots == request->slots &&
		fits(lock, ticket);
	if (!agree_on_slots(lock, request->slots))
	{
		*slots = lock->slots;
		result = DLOCK_JOIN_MISMATCH;
	}
	else if (ticket->scope == DLOCK_LEASE &&
			 (*existing = dlock_lease_ticket_find_same(lease_ticket(ticket))) != NULL)
		result = DLOCK_JOIN_EXISTS;
	else if (!free && nowait &&
			 !fits_soon(lock, ticket))
		result = DLOCK_JOIN_BUSY;
	else if ((ticket->number = dlock_ticket_draw(space)) == 0)
		result = DLOCK_JOIN_NO_NUMBER;
	else if (free)
	{
		grant(lock, ticket, ticket->enqueued_at);
		if (DsaPointerIsValid(ticket->announcement) && !adopt)
			dlock_announcement_event(ticket, DLOCK_EVENT_GRANTED);
		result = DLOCK_JOIN_GRANTED;
	}
	else
	{
		dlock_list_append(&lock->queue, &ticket->link);
		set_state(ticket, DLOCK_WAITING);
		result = DLOCK_JOIN_QUEUED;
	}
	if (ticket->scope == DLOCK_LEASE &&
		(result == DLOCK_JOIN_GRANTED || result == DLOCK_JOIN_QUEUED))
	{
		/* as long as it is in a list */
		dlock_record_ref(&lease_ticket(ticket)->record);
		if (adopt && !dlock_lease_ticket_adopt(lease_ticket(ticket)))
		{
			take_out(lock, ticket, &wakeups);
			dlock_record_unref(&lease_ticket(ticket)->record);
			result = DLOCK_JOIN_LEASE_GONE;
		}
	}
	let_go(lock);
	wake_all(&wakeups);
	return result;
}

/*
 * The lease adopts a ticket that this backend has waited for, if it has not done
 * so for another client.  False where the ticket or the lease is gone; what was
 * not adopted is still the backend's then.
 */
bool
dlock_queue_adopt(DlockLeaseTicket *ticket)
{
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	bool		adopted;

	if (lock == NULL)
		return false;
	adopted = state_of(&ticket->ticket) == DLOCK_GRANTED &&
		(is_lease_ticket(&ticket->ticket) || dlock_lease_ticket_adopt(ticket));
	dlock_lock_release(lock);
	return adopted;
}

/*
 * This backend cannot let the lease adopt the ticket that it has waited for: it is
 * not found by its number any more, if the lease has not adopted it for another
 * client, which is told that number.  Raises nothing.
 */
void
dlock_queue_unpublish(DlockLeaseTicket *ticket)
{
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);

	if (!is_lease_ticket(&ticket->ticket))
		dlock_lease_ticket_unpublish(ticket);
	if (lock)
		dlock_lock_release(lock);
}

/*
 * Put a ticket back that was read from the tables, which come in the order of
 * the numbers.  Raises 53200, with nothing changed.
 */
void
dlock_queue_restore(DlockLeaseTicket *ticket, DlockState state)
{
	DlockLock  *lock = dlock_lock_insert(&ticket->key, ticket->ticket.slots);

	if (state == DLOCK_WAITING)
		dlock_list_append(&lock->queue, &ticket->ticket.link);
	else
	{
		dlock_list_append(&lock->holders, &ticket->ticket.link);
		lock->permits += ticket->ticket.permits;
		if (ticket->ticket.mode == DLOCK_EXCLUSIVE)
			lock->exclusive++;
		ticket->closes = state == DLOCK_ENDING;
		if (ticket->closes)
			lock->closed++;
	}
	set_state(&ticket->ticket, state);
	dlock_lock_release(lock);
}

/*
 * After all were put back: grant what has become free.  Can be repeated, and
 * does nothing to the locks that sessions have taken meanwhile.
 */
void
dlock_queue_resume(const DlockSpace *space)
{
	DlockLockScan scan;
	Wakeups		wakeups = {0};
	DlockLock  *lock;

	dlock_lock_scan_begin(&scan, true);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		if (memcmp(&lock->key.space, &space->key, sizeof(DlockSpaceKey)) == 0)
			grant_from_queue(lock, &wakeups);
	}
	dlock_lock_scan_end(&scan);
	wake_all(&wakeups);
}

/*
 * End a ticket that is waiting or granted, or is ENDING and has lost its last
 * pin, as far as that can be done now; "event" tells its owner, or is 0.  What
 * is pinned, and what has a row, is taken out later.
 */
static void
end(DlockLock *lock, DlockTicket *ticket, uint32 event, Wakeups *wakeups)
{
	bool		of_lease = is_lease_ticket(ticket);
	int			procno = ticket->procno;

	if (event != 0 && (of_lease || ticket->pins == 0))
		wake_later(wakeups, ticket, event);
	if (!of_lease)
	{
		if (ticket->pins == 0)
			take_out(lock, ticket, wakeups);
		else
			set_state(ticket, DLOCK_ENDING);
		/* after the state, for those who see this then look at the state */
		if (event != 0)
			pg_atomic_fetch_add_u32(&dlock_backends[procno].lost, 1);
		return;
	}
	set_state(ticket, is_queued(ticket) ? DLOCK_LEAVING : DLOCK_ENDING);
	wakeups->space = dlock_space_at(ticket->space);
	if (dlock_lease_ticket_ended(lease_ticket(ticket)))
		take_out(lock, ticket, wakeups);
	else if (lease_ticket(ticket)->in_closed && !lease_ticket(ticket)->closes)
	{
		lease_ticket(ticket)->closes = true;
		lock->closed++;
	}
}

/* A call that has claimed a ticket has failed: the last one ends it. */
static void
withdraw_claim(DlockLock *lock, DlockLeaseTicket *ticket, Wakeups *wakeups)
{
	if (!dlock_state_has_ended(state_of(&ticket->ticket)) &&
		--ticket->claims == 0)
		end(lock, &ticket->ticket, 0, wakeups);
}

/*
 * End a ticket of this backend, held or waiting, and hand over.  False where
 * it was gone already.  The ticket's memory is the caller's again, once it is
 * GONE: a pinned one only becomes ENDING, and goes with its last pin.  One that
 * its lease has adopted meanwhile, for another client, stays that client's.
 *
 * Raises nothing and allocates nothing: error and exit paths call this.
 */
bool
dlock_queue_leave(const DlockKey *key, DlockTicket *ticket)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock;
	bool		was_there;

	if (state_of(ticket) == DLOCK_GONE)
	{
		/* whoever ended it has done with it: see set_state() */
		pg_memory_barrier();
		return false;
	}
	lock = dlock_lock_find(key, true);
	if (lock == NULL)
		return false;
	/* it may have been ended by force since we looked */
	was_there = state_of(ticket) != DLOCK_GONE;
	if (is_lease_ticket(ticket))
		withdraw_claim(lock, lease_ticket(ticket), &wakeups);
	else if (was_there)
		end(lock, ticket, 0, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
	return was_there;
}

/*
 * Let go of a lock that somebody was found to hold.  Whoever is told of a grant
 * is told so after the removal of the row before it is flushed, so all answers
 * end here; or, for what a backend knows of its own tickets, with the same call.
 */
static void
let_go_to_tell(DlockLock *lock, const DlockKey *key, const DlockTicket *holder)
{
	/* the lock can be another space's, which goes once this one has let go */
	XLogRecPtr	removed = dlock_journal_removal(dlock_space_at(holder->space),
												key);

	dlock_lock_release(lock);
	dlock_journal_flush(removed);
}

/* The greatest number among the holders; 0 where there is none. */
int64
dlock_queue_fence(const DlockKey *key)
{
	DlockLock  *lock = dlock_lock_find(key, false);
	DlockTicket *ticket;
	int64		fence;

	if (lock == NULL)
		return 0;
	/* grants go in the order of numbers, so the latest comes last */
	ticket = ticket_at(lock->holders.tail);
	while (ticket && !is_holding(ticket))
		ticket = ticket_at(ticket->link.prev);
	if (ticket == NULL)
	{
		dlock_lock_release(lock);
		return 0;
	}
	fence = ticket->number;
	let_go_to_tell(lock, key, ticket);
	return fence;
}

/* A ticket by its number.  Both lists are in the order of numbers. */
static DlockTicket *
find_number(const DlockList *list, int64 number)
{
	DlockTicket *ticket = ticket_at(list->tail);

	if (ticket == NULL || ticket->number < number)
		return NULL;
	ticket = ticket_at(list->head);
	while (ticket && ticket->number < number)
		ticket = ticket_at(ticket->link.next);
	return ticket && ticket->number == number ? ticket : NULL;
}

/* Is this the number of a holder? */
bool
dlock_queue_is_fence(const DlockKey *key, int64 number)
{
	DlockLock  *lock = dlock_lock_find(key, false);
	DlockTicket *ticket;

	if (lock == NULL)
		return false;
	ticket = find_number(&lock->holders, number);
	if (ticket && is_holding(ticket))
	{
		let_go_to_tell(lock, key, ticket);
		return true;
	}
	dlock_lock_release(lock);
	return false;
}

/*
 * End a lease's ticket, held or waiting.  False where that was done before.
 * Raises nothing.
 */
bool
dlock_queue_end(DlockLeaseTicket *ticket, uint32 event)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(state_of(&ticket->ticket));
	if (is_there)
		end(lock, &ticket->ticket, event, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
	return is_there;
}

/*
 * A call is about to return a ticket that another one has made: from now on it
 * stays, should the other one fail.  Where "adopt", the lease has it then: a
 * session that waits with it is woken, and waits on as for a lease's.  False
 * where the ticket is gone already, or its lease is.
 *
 * The worker is not woken for what is to be written now: whoever claims a ticket
 * waits for that, and wakes it then.  Should he give up before, nobody has been
 * promised anything.
 */
bool
dlock_queue_claim(DlockLeaseTicket *ticket, bool adopt)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(state_of(&ticket->ticket));
	if (is_there && adopt && !is_lease_ticket(&ticket->ticket))
	{
		wake_later(&wakeups, &ticket->ticket, 0);
		is_there = dlock_lease_ticket_adopt(ticket);
	}
	if (is_there)
		ticket->claims++;
	dlock_lock_release(lock);
	wake_all(&wakeups);
	return is_there;
}

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
		dlock_lease_ticket_redirect(ticket, announcement);
	dlock_lock_release(lock);
	if (is_there)
		(void) dlock_worker_wake(dlock_space_at(ticket->ticket.space));
	return is_there;
}

/*
 * A call that has claimed a ticket has failed: end it, if no other call has
 * claimed it.  Raises nothing.
 */
void
dlock_queue_withdraw(DlockLeaseTicket *ticket)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);

	if (lock == NULL)
		return;
	withdraw_claim(lock, ticket, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
}

/*
 * The removal of an ended ticket's row is in the WAL: hand the lock on.
 * Raises nothing.
 */
void
dlock_queue_finish(DlockLeaseTicket *ticket)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	DlockState	state;

	if (lock == NULL)
		return;
	state = state_of(&ticket->ticket);
	if (state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && ticket->ticket.pins == 0))
		take_out(lock, &ticket->ticket, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
}

/*
 * End a ticket of any backend, on an administrator's word.  Its owner finds
 * it GONE, and is woken in case it waits.  False where there is none.
 *
 * Looks through all locks, as nobody but its owner knows a ticket's lock.
 */
bool
dlock_queue_force(const DlockSpaceKey *space, int64 number)
{
	DlockLockScan scan;
	Wakeups		wakeups = {0};
	DlockLock  *lock;
	bool		done = false;

	dlock_lock_scan_begin(&scan, true);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		DlockTicket *ticket;
		DlockState	state;
		bool		ended;

		if (memcmp(&lock->key.space, space, sizeof(DlockSpaceKey)) != 0)
			continue;
		ticket = find_number(&lock->holders, number);
		if (ticket == NULL)
			ticket = find_number(&lock->queue, number);
		if (ticket == NULL)
			continue;
		state = state_of(ticket);
		ended = state == DLOCK_ENDING || state == DLOCK_LEAVING;
		done = !ended || ticket->pins > 0;
		if (!ended)
			end(lock, ticket, DLOCK_EVENT_RELEASED, &wakeups);
		else if (is_lease_ticket(ticket) &&
				 dlock_lease_ticket_undelay(lease_ticket(ticket)))
		{
			wakeups.space = dlock_space_at(ticket->space);
			done = true;
		}
		if (is_unused(lock))
			dlock_lock_scan_remove(&scan);
		break;
	}
	dlock_lock_scan_end(&scan);
	wake_all(&wakeups);
	return done;
}

/*
 * The number of the lease that has a ticket; 0: it is a session's.
 */
static int64
lease_of(DlockTicket *ticket)
{
	DlockLease *lease;

	if (!is_lease_ticket(ticket))
		return 0;
	lease = dsa_get_address(dlock_area, lease_ticket(ticket)->lease);
	return lease->number;
}

/*
 * Copy the first "max_each" of a list, with no number above "up_to", to behind
 * the "count" members that there are.  Returns how many there are then, or
 * more than "max" where that is not room enough.
 */
static int
copy_members(const DlockList *list, int64 up_to, int max_each,
			 DlockMember *members, int count, int max)
{
	for (DlockTicket *ticket = ticket_at(list->head);
		 ticket && max_each-- > 0 && ticket->number <= up_to;
		 ticket = ticket_at(ticket->link.next), count++)
	{
		if (count >= max)
			return max + 1;
		members[count] = (DlockMember)
		{
			.number = ticket->number,
			.lease = lease_of(ticket),
			.session = ticket->session,
			.procno = ticket->procno,
			.pid = ticket->pid,
			.mode = ticket->mode,
			.permits = ticket->permits,
			.granted = !is_queued(ticket)
		};
	}
	return count;
}

/*
 * Copy out who holds a lock and, behind them, who waits for it, in the order
 * of the queue: of either, at most so many; and of the queue, those up to a
 * number, as who comes behind a waiter does not concern it, and may be many.
 *
 * Returns how many there are: where that is more than "max", the copy is cut
 * short, and the caller comes again with more room.
 */
int
dlock_queue_members(const DlockKey *key, int64 up_to, int max_each,
					DlockMember *members, int max, int32 *slots)
{
	DlockLock  *lock = dlock_lock_find(key, false);
	int			count;

	if (lock == NULL)
		return 0;
	*slots = lock->slots;
	count = copy_members(&lock->holders, DLOCK_MAX_TICKET, max_each, members,
						 0, max);
	if (count <= max)
		count = copy_members(&lock->queue, up_to, max_each, members, count,
							 max);
	if (DsaPointerIsValid(lock->holders.head))
		let_go_to_tell(lock, key, ticket_at(lock->holders.head));
	else
		dlock_lock_release(lock);
	return count;
}

bool
dlock_queue_has_waiters(const DlockKey *key)
{
	DlockLock  *lock = dlock_lock_find(key, false);
	bool		result;

	if (lock == NULL)
		return false;
	result = lock->queue.length > 0;
	dlock_lock_release(lock);
	return result;
}

/*
 * Keep a held ticket from ending, until it is unpinned; false where it is not
 * held any more.
 */
bool
dlock_queue_pin(const DlockKey *key, DlockTicket *ticket)
{
	DlockLock  *lock = dlock_lock_find(key, true);
	bool		granted;

	if (lock == NULL)
		return false;
	granted = is_holding(ticket);
	if (granted)
		ticket->pins++;
	dlock_lock_release(lock);
	return granted;
}

/*
 * What the owner of an ENDING ticket has still to be told: that it was ended
 * by force, where it has not given the ticket back itself.  A lease's was told
 * as it became ENDING.
 */
static uint32
event_of_unpinning(DlockTicket *ticket)
{
	if (is_lease_ticket(ticket) ||
		(pg_atomic_read_u32(&ticket->session_depth) == 0 &&
		 pg_atomic_read_u32(&ticket->xact_depth) == 0))
		return 0;
	return DLOCK_EVENT_RELEASED;
}

/*
 * The pinned commit is visible, or was rolled back: whatever was to end the
 * ticket meanwhile ends it now.  Raises nothing.
 */
void
dlock_queue_unpin(const DlockKey *key, DlockTicket *ticket)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key, true);

	/* a pinned ticket keeps its lock's entry */
	Assert(lock != NULL && ticket->pins > 0);
	if (--ticket->pins == 0 && state_of(ticket) == DLOCK_ENDING)
		end(lock, ticket, event_of_unpinning(ticket), &wakeups);
	let_go(lock);
	wake_all(&wakeups);
}

/*
 * Has a lock been left as it never should be?  Its head fits, where an error
 * has come into a hand-over; or there may be tickets in it without an owner.
 */
static bool
needs_reaping(DlockLock *lock)
{
	DlockTicket *head = ticket_at(lock->queue.head);

	if (pg_atomic_read_u32(&dlock_control->lost) > 0)
		return true;
	return head && state_of(head) != DLOCK_LEAVING &&
		(lock->holders.length == 0 || fits(lock, head));
}

/*
 * Clear away the tickets of a lock whose owners are gone without having given
 * them back, and hand it on.  That takes an error in a backend's exit or in a
 * hand-over, where a segment of memory cannot be mapped, so this is hardly
 * ever seen; but without it such a lock would stay closed until a restart.
 *
 * Every waiter asks for this again and again.  So it looks at the head of the
 * queue only, in shared mode, unless there is a lost ticket anywhere.
 *
 * Their memory is freed here, as its owner is no more.
 */
void
dlock_queue_reap(const DlockKey *key)
{
	DlockLock  *lock = dlock_lock_find(key, false);
	Wakeups		wakeups = {0};
	DlockList	lost = {0};
	DlockTicket *one;
	bool		needed;

	if (lock == NULL)
		return;
	needed = needs_reaping(lock);
	dlock_lock_release(lock);
	if (!needed || (lock = dlock_lock_find(key, true)) == NULL)
		return;
	for (DlockTicket *ticket = ticket_at(lock->holders.head), *next; ticket;
		 ticket = next)
	{
		DlockBackend *owner = &dlock_backends[ticket->procno];

		next = ticket_at(ticket->link.next);
		if (ticket->session == 0 ||
			pg_atomic_read_u64(&owner->session) == ticket->session)
			continue;
		/* a session's is pinned by its owner alone */
		ticket->pins = 0;
		take_out(lock, ticket, &wakeups);
		if (pg_atomic_read_u32(&dlock_control->lost) > 0)
			pg_atomic_fetch_sub_u32(&dlock_control->lost, 1);
		dlock_list_append(&lost, &ticket->link);
	}
	/* an error in a hand-over has left the lock free, and the head waiting */
	grant_from_queue(lock, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
	while ((one = ticket_at(lost.head)) != NULL)
	{
		dlock_list_remove(&lost, &one->link);
		if (one->scope == DLOCK_LEASE)
			dlock_lease_ticket_discard(lease_ticket(one));
		else
			dlock_ticket_free(one);
	}
}

/*
 * Free all that leases have in a space that nobody uses any more.
 */
void
dlock_queue_purge(const DlockSpaceKey *space)
{
	DlockLockScan scan;
	DlockLock  *lock;

	dlock_lock_scan_begin(&scan, true);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		if (memcmp(&lock->key.space, space, sizeof(DlockSpaceKey)) != 0)
			continue;
		dlock_lock_scan_remove(&scan);
	}
	dlock_lock_scan_end(&scan);
}

static DlockRow *
make_row(const DlockLock *lock, DlockTicket *ticket, uint32 position)
{
	const char *info = NULL;
	Size		info_length = 0;
	const char *owner = NULL;
	Size		owner_length = 0;
	DlockRow   *row;

	if (DsaPointerIsValid(ticket->info))
	{
		info = dsa_get_address(dlock_area, ticket->info);
		info_length = strlen(info);
	}
	if (ticket->scope == DLOCK_LEASE &&
		DsaPointerIsValid(lease_ticket(ticket)->owner))
	{
		owner = dsa_get_address(dlock_area, lease_ticket(ticket)->owner);
		owner_length = strlen(owner);
	}
	row = palloc_extended(offsetof(DlockRow, text) + lock->key.length +
						  info_length + owner_length, MCXT_ALLOC_NO_OOM);
	if (row == NULL)
		return NULL;
	row->number = ticket->number;
	row->mode = ticket->mode;
	row->slots = ticket->slots;
	row->permits = ticket->permits;
	row->position = position;
	row->granted = position == 0 && is_holding(ticket);
	row->session_depth = pg_atomic_read_u32(&ticket->session_depth);
	row->xact_depth = pg_atomic_read_u32(&ticket->xact_depth);
	row->scope = row->session_depth > 0 ? DLOCK_SESSION :
		row->xact_depth > 0 ? DLOCK_TRANSACTION : ticket->scope;
	row->pinned = ticket->pins > 0;
	row->pid = ticket->pid;
	row->role = ticket->role;
	row->enqueued_at = ticket->enqueued_at;
	row->granted_at = ticket->granted_at;
	dlock_announcement_channel(ticket, row->channel);
	row->name_length = lock->key.length;
	row->info_length = info_length;
	row->has_info = info != NULL;
	row->owner_length = owner_length;
	row->has_owner = owner != NULL;
	memcpy(row->text, lock->key.name, row->name_length);
	if (info)
		memcpy(row->text + row->name_length, info, info_length);
	if (owner)
		memcpy(row->text + row->name_length + info_length, owner, owner_length);
	row->lease = 0;
	row->remaining = -1;
	row->closed = false;
	if (ticket->scope == DLOCK_LEASE)
		dlock_lease_ticket_row(lease_ticket(ticket), row);
	return row;
}

/* A ticket is shown while it counts, or keeps the lock closed. */
static bool
is_shown(DlockTicket *ticket)
{
	return is_queued(ticket) ? is_waiting(ticket) : !is_leaving(ticket);
}

/*
 * What the views copy
 *
 * Nobody waits long for a view: an entry's lock is held for so many tickets at
 * a time.  A lock that has no more is copied at one moment.  Of one with more,
 * the queue is copied first and the holders then, part by part; whoever is
 * granted the lock meanwhile changes from the one list to the other, and is
 * found there.  In between, the backend's "cursor" keeps the place: it is the
 * ticket to go on with, and moves on when that one leaves its list.
 */
#define ROWS_AT_ONCE	256

typedef struct Rows
{
	DlockRow   *first;
	DlockRow  **tail;
	bool		complete;		/* false: memory is out */
	int64		latest;			/* the greatest number seen, shown or not */
} Rows;

/* A lock that is copied by itself, after the others */
typedef struct LongLock
{
	struct LongLock *next;
	DlockKey	key;
} LongLock;

static void
make_empty(Rows *rows)
{
	rows->first = NULL;
	rows->tail = &rows->first;
	rows->complete = true;
	rows->latest = 0;
}

static void
append(Rows *rows, DlockRow *row)
{
	row->next = NULL;
	*rows->tail = row;
	rows->tail = &row->next;
}

/*
 * Append a row for each ticket from this one on, or for so many of them.
 * Returns the first that is left, or invalid.
 */
static dsa_pointer
copy_some(Rows *rows, const DlockLock *lock, DlockTicket *ticket, bool queued,
		  uint32 position)
{
	int			count = 0;

	for (; ticket && count < ROWS_AT_ONCE; ticket = ticket_at(ticket->link.next))
	{
		DlockRow   *row;

		count++;
		rows->latest = Max(rows->latest, ticket->number);
		if (!is_shown(ticket))
			continue;
		row = make_row(lock, ticket, queued ? ++position : 0);
		rows->complete = row != NULL;
		if (row == NULL)
			return InvalidDsaPointer;
		append(rows, row);
	}
	return ticket ? ticket->link.self : InvalidDsaPointer;
}

/* Copy one list of a lock, part by part. */
static void
copy_list(Rows *rows, const DlockKey *key, bool queued)
{
	pg_atomic_uint64 *cursor = &dlock_my_backend->cursor;
	bool		begun = false;

	do
	{
		DlockLock  *lock;
		const DlockList *list;

		CHECK_FOR_INTERRUPTS();
		lock = dlock_lock_find(key, false);
		if (lock == NULL)
		{
			/* all of them are gone */
			rows->latest = DLOCK_MAX_TICKET;
			break;
		}
		list = queued ? &lock->queue : &lock->holders;
		if (!begun)
			pg_atomic_write_u64(cursor, list->head);
		begun = true;
		pg_atomic_write_u64(cursor,
							copy_some(rows, lock,
									  ticket_at(pg_atomic_read_u64(cursor)),
									  queued, 0));
		dlock_lock_release(lock);
	} while (DsaPointerIsValid(pg_atomic_read_u64(cursor)));
	pg_atomic_write_u64(cursor, InvalidDsaPointer);
}

/*
 * Copy a lock with many tickets.  Grants go in the order of numbers: so of
 * those who were in the queue, all up to the latest holder wait no more.
 */
static void
copy_long_lock(Rows *rows, const DlockKey *key)
{
	Rows		queue;
	Rows		holders;
	uint32		position = 0;

	make_empty(&queue);
	make_empty(&holders);
	copy_list(&queue, key, true);
	copy_list(&holders, key, false);
	rows->complete = queue.complete && holders.complete;
	if (holders.first)
	{
		*rows->tail = holders.first;
		rows->tail = holders.tail;
	}
	for (DlockRow *row = queue.first, *next; row; row = next)
	{
		next = row->next;
		if (row->number <= holders.latest)
		{
			pfree(row);
			continue;
		}
		row->position = ++position;
		append(rows, row);
	}
}

/* Copy a lock that has few tickets; false where it has more. */
static bool
copy_short_lock(Rows *rows, const DlockLock *lock)
{
	if (lock->holders.length + lock->queue.length > ROWS_AT_ONCE)
		return false;
	(void) copy_some(rows, lock, ticket_at(lock->holders.head), false, 0);
	if (rows->complete)
		(void) copy_some(rows, lock, ticket_at(lock->queue.head), true, 0);
	return true;
}

/* Copy the locks that have few tickets, and take note of the others. */
static LongLock *
copy_short_locks(Rows *rows, const DlockSpaceKey *space)
{
	DlockLockScan scan;
	DlockLock  *lock;
	LongLock   *long_locks = NULL;

	dlock_lock_scan_begin(&scan, false);
	while (rows->complete && (lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		LongLock   *long_lock;

		if (memcmp(&lock->key.space, space, sizeof(DlockSpaceKey)) != 0)
			continue;
		if (copy_short_lock(rows, lock))
			continue;
		long_lock = palloc_extended(sizeof(LongLock), MCXT_ALLOC_NO_OOM);
		rows->complete = long_lock != NULL;
		if (long_lock == NULL)
			break;
		dlock_key_copy(&long_lock->key, &lock->key);
		long_lock->next = long_locks;
		long_locks = long_lock;
	}
	dlock_lock_scan_end(&scan);
	return long_locks;
}

static void
stop_reading(int code, Datum arg)
{
	pg_atomic_write_u64(&dlock_my_backend->cursor, InvalidDsaPointer);
	pg_atomic_fetch_sub_u32(&dlock_control->readers, 1);
}

static void
copy_long_locks(Rows *rows, const LongLock *long_locks)
{
	pg_atomic_fetch_add_u32(&dlock_control->readers, 1);
	PG_ENSURE_ERROR_CLEANUP(stop_reading, 0);
	for (const LongLock *one = long_locks; one && rows->complete; one = one->next)
		copy_long_lock(rows, &one->key);
	PG_END_ENSURE_ERROR_CLEANUP(stop_reading, 0);
	stop_reading(0, 0);
}

static void
check_complete(const Rows *rows)
{
	if (!rows->complete)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory"),
				 errdetail("Failed while copying the lock table.")));
}

/*
 * Copy out every ticket of a space, lock by lock, the holders first and then
 * the queue in its order.  Different locks are seen at different moments; and
 * so are the parts of one with many tickets: a ticket that is there all the
 * time is in there once, and who is a holder at the end of it is no waiter.
 */
DlockRow *
dlock_queue_rows(DlockSpace *space)
{
	Rows		rows;
	LongLock   *long_locks;

	make_empty(&rows);
	long_locks = copy_short_locks(&rows, &space->key);
	if (long_locks && rows.complete)
		copy_long_locks(&rows, long_locks);
	check_complete(&rows);
	/* as let_go_to_tell(), for all of them */
	dlock_journal_flush_removals(space);
	return rows.first;
}

/* The same for one lock; no other is looked at. */
DlockRow *
dlock_queue_rows_of(DlockSpace *space, const DlockKey *key)
{
	DlockLock  *lock = dlock_lock_find(key, false);
	LongLock	long_lock = {0};
	bool		copied;
	Rows		rows;

	if (lock == NULL)
		return NULL;
	make_empty(&rows);
	copied = copy_short_lock(&rows, lock);
	dlock_lock_release(lock);
	if (!copied)
	{
		dlock_key_copy(&long_lock.key, key);
		copy_long_locks(&rows, &long_lock);
	}
	check_complete(&rows);
	dlock_journal_flush_removal(space, key);
	return rows.first;
}
