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
 * Under the entry's lock nothing here sleeps, calls out, or allocates, but
 * for dshash's own insertion, which comes before any change.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/memdebug.h"
#include "utils/memutils.h"

#include "dlock.h"

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
 * Does one of the holders count as holding?  Not where its lease has run out,
 * though nobody is granted the lock before the worker has come round to it;
 * but always while a guarded commit is under way.
 */
static bool
is_holding(DlockTicket *ticket)
{
	return !is_lease_ticket(ticket) || ticket->pins > 0 ||
		(state_of(ticket) == DLOCK_GRANTED &&
		 dlock_lease_ticket_is_live(lease_ticket(ticket)));
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
	/* the state may be read without the lock: all before is done */
	pg_write_barrier();
	if (is_lease_ticket(ticket))
		dlock_lease_ticket_granted(lease_ticket(ticket));
	else
		pg_atomic_write_u32(&ticket->state, DLOCK_GRANTED);
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
			pg_atomic_write_u32(&head->state, DLOCK_LEAVING);
			if (!dlock_lease_ticket_ended(lease_ticket(head)))
				break;
			dlock_list_remove(&lock->queue, &head->link);
			pg_atomic_write_u32(&head->state, DLOCK_GONE);
			continue;
		}
		if (now == 0)
			now = GetCurrentTimestamp();
		/* mapped before any change, as that can fail */
		(void) ticket_at(lock->holders.tail);
		dlock_list_remove(&lock->queue, &head->link);
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
		dlock_list_remove(&lock->queue, &ticket->link);
	else
	{
		dlock_list_remove(&lock->holders, &ticket->link);
		lock->permits -= ticket->permits;
		if (ticket->mode == DLOCK_EXCLUSIVE)
			lock->exclusive--;
		if (ticket->scope == DLOCK_LEASE && lease_ticket(ticket)->closes)
			lock->closed--;
		dlock_count(DLOCK_COUNT_RELEASED, 1);
	}
	pg_atomic_write_u32(&ticket->state, DLOCK_GONE);
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
	{
		dshash_delete_entry(dlock_locks, lock);
		dlock_count_memory(-(int64) sizeof(DlockLock));
	}
	else
		dshash_release_lock(dlock_locks, lock);
}

static DlockLock *
find(const DlockKey *key, bool exclusive)
{
	return dshash_find(dlock_locks, key, exclusive);
}

/*
 * A lock as it will be without those that do not hold or wait any more:
 * tickets whose lease has run out, or whose row is just being removed.  For
 * all that anybody was told the lock is that already, and it will be handed on
 * at once.
 */
static DlockLock
without_leaving(DlockLock *lock)
{
	DlockLock	rest = {
		.slots = lock->slots,
		.closed = lock->closed
	};

	for (DlockTicket *ticket = ticket_at(lock->holders.head); ticket;
		 ticket = ticket_at(ticket->link.next))
	{
		if (is_lease_ticket(ticket) && !is_holding(ticket) &&
			!dlock_lease_ticket_is_delayed(lease_ticket(ticket)))
			continue;
		rest.holders.length++;
		rest.permits += ticket->permits;
		if (ticket->mode == DLOCK_EXCLUSIVE)
			rest.exclusive++;
	}
	/* that there is one is enough */
	for (DlockTicket *ticket = ticket_at(lock->queue.head);
		 ticket && rest.queue.length == 0;
		 ticket = ticket_at(ticket->link.next))
	{
		if (is_waiting(ticket))
			rest.queue.length++;
	}
	return rest;
}

static bool
fits_soon(DlockLock *lock, const DlockTicket *ticket)
{
	DlockLock	rest = without_leaving(lock);

	return rest.queue.length == 0 && fits(&rest, ticket);
}

/*
 * Make a lock one with the slots that a request gives; false where somebody
 * uses it with others.
 */
static bool
agree_on_slots(DlockLock *lock, int32 slots)
{
	DlockLock	rest;

	if (likely(lock->slots == slots))
		return true;
	rest = without_leaving(lock);
	if (!is_unused(&rest))
		return false;
	lock->slots = slots;
	return true;
}

/* The entry of a lock, made if need be.  Raises 53200. */
static DlockLock *
find_or_insert(const DlockKey *key, int32 slots)
{
	DlockLock  *lock;
	bool		found;

	lock = dlock_table_insert(dlock_locks, key, &found);
	if (!found)
	{
		/*
		 * What stands behind the name in the request came along.  valgrind
		 * would take these bytes for undefined ever after, as it does not see
		 * what other processes write there.
		 */
		VALGRIND_MAKE_MEM_DEFINED(lock, sizeof(DlockKey));
		memset((char *) lock + sizeof(DlockKey), 0,
			   sizeof(DlockLock) - sizeof(DlockKey));
		lock->slots = slots;
		dlock_count_memory(sizeof(DlockLock));
	}
	return lock;
}

/*
 * A ticket in a list that answers the same request of a lease's client.  One
 * that another session waits with counts unless it must be "adopted" already.
 */
static DlockLeaseTicket *
find_same(const DlockList *list, const DlockLeaseTicket *wanted, bool adopted)
{
	for (DlockTicket *ticket = ticket_at(list->head); ticket;
		 ticket = ticket_at(ticket->link.next))
	{
		DlockState	state = state_of(ticket);

		if (ticket->scope == DLOCK_LEASE &&
			(state == DLOCK_WAITING || state == DLOCK_GRANTED) &&
			!(adopted && ticket->session != 0) &&
			dlock_lease_ticket_is_same(lease_ticket(ticket), wanted))
			return lease_ticket(ticket);
	}
	return NULL;
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
	DlockLock  *lock = find_or_insert(&request->key, request->slots);
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
			 ((*existing = find_same(&lock->holders, lease_ticket(ticket),
									 adopt)) != NULL ||
			  (*existing = find_same(&lock->queue, lease_ticket(ticket),
									 adopt)) != NULL))
	{
		dlock_record_use(&(*existing)->record);
		result = DLOCK_JOIN_EXISTS;
	}
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
		pg_atomic_write_u32(&ticket->state, DLOCK_WAITING);
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
 * The lease adopts a ticket that this backend has waited for.  False where
 * the ticket or the lease is gone; the ticket is still the backend's then.
 */
bool
dlock_queue_adopt(DlockLeaseTicket *ticket)
{
	DlockLock  *lock = find(&ticket->key, true);
	bool		adopted;

	if (lock == NULL)
		return false;
	adopted = state_of(&ticket->ticket) == DLOCK_GRANTED &&
		dlock_lease_ticket_adopt(ticket);
	dshash_release_lock(dlock_locks, lock);
	return adopted;
}

/*
 * Put a ticket back that was read from the tables, which come in the order of
 * the numbers.  Raises 53200, with nothing changed.
 */
void
dlock_queue_restore(DlockLeaseTicket *ticket, DlockState state)
{
	DlockLock  *lock = find_or_insert(&ticket->key, ticket->ticket.slots);

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
	pg_atomic_write_u32(&ticket->ticket.state, state);
	dshash_release_lock(dlock_locks, lock);
}

/* After all were put back: grant what has become free. */
void
dlock_queue_resume(const DlockKey *key)
{
	DlockLock  *lock = find(key, true);
	Wakeups		wakeups = {0};

	if (lock == NULL)
		return;
	grant_from_queue(lock, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
}

/*
 * End a ticket of this backend, held or waiting, and hand over.  False where
 * it was gone already.  The ticket's memory is the caller's again.
 *
 * Raises nothing and allocates nothing: error and exit paths call this.
 */
bool
dlock_queue_leave(const DlockKey *key, DlockTicket *ticket)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock;

	if (state_of(ticket) == DLOCK_GONE)
		return false;
	lock = find(key, true);
	if (lock == NULL)
		return false;
	if (state_of(ticket) == DLOCK_GONE)
	{
		/* ended by force since we looked */
		dshash_release_lock(dlock_locks, lock);
		return false;
	}
	take_out(lock, ticket, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
	return true;
}

/* The greatest number among the holders; 0 where there is none. */
int64
dlock_queue_fence(const DlockKey *key)
{
	DlockLock  *lock = find(key, false);
	int64		fence = 0;

	if (lock == NULL)
		return 0;
	for (DlockTicket *ticket = ticket_at(lock->holders.head); ticket;
		 ticket = ticket_at(ticket->link.next))
	{
		if (is_holding(ticket))
			fence = Max(fence, ticket->number);
	}
	dshash_release_lock(dlock_locks, lock);
	return fence;
}

static DlockTicket *
find_number(const DlockList *list, int64 number)
{
	DlockTicket *ticket = ticket_at(list->head);

	while (ticket && ticket->number != number)
		ticket = ticket_at(ticket->link.next);
	return ticket;
}

/* Is this the number of a holder? */
bool
dlock_queue_is_fence(const DlockKey *key, int64 number)
{
	DlockLock  *lock = find(key, false);
	DlockTicket *ticket;
	bool		result;

	if (lock == NULL)
		return false;
	ticket = find_number(&lock->holders, number);
	result = ticket && is_holding(ticket);
	dshash_release_lock(dlock_locks, lock);
	return result;
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

	if (event != 0 && (of_lease || ticket->pins == 0))
		wake_later(wakeups, ticket, event);
	if (of_lease)
		wakeups->space = dlock_space_at(ticket->space);
	pg_atomic_write_u32(&ticket->state, is_queued(ticket) ?
						DLOCK_LEAVING : DLOCK_ENDING);
	if (of_lease ? dlock_lease_ticket_ended(lease_ticket(ticket)) :
		ticket->pins == 0)
		take_out(lock, ticket, wakeups);
	else if (of_lease && lease_ticket(ticket)->in_closed &&
			 !lease_ticket(ticket)->closes)
	{
		lease_ticket(ticket)->closes = true;
		lock->closed++;
	}
}

/*
 * End a lease's ticket, held or waiting.  False where that was done before.
 * Raises nothing.
 */
bool
dlock_queue_end(DlockLeaseTicket *ticket, uint32 event)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = find(&ticket->key, true);
	DlockState	state;

	if (lock == NULL)
		return false;
	state = state_of(&ticket->ticket);
	if (state == DLOCK_WAITING || state == DLOCK_GRANTED)
		end(lock, &ticket->ticket, event, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
	return state == DLOCK_WAITING || state == DLOCK_GRANTED;
}

/*
 * A call is about to return a ticket that another one has made: from now on it
 * stays, should the other one fail.  False where it is gone already.
 */
bool
dlock_queue_claim(DlockLeaseTicket *ticket)
{
	DlockLock  *lock = find(&ticket->key, true);
	DlockState	state;
	bool		is_there;

	if (lock == NULL)
		return false;
	state = state_of(&ticket->ticket);
	is_there = state == DLOCK_WAITING || state == DLOCK_GRANTED;
	if (is_there)
		ticket->claims++;
	dshash_release_lock(dlock_locks, lock);
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
	DlockLock  *lock = find(&ticket->key, true);
	DlockState	state;

	if (lock == NULL)
		return;
	state = state_of(&ticket->ticket);
	if ((state == DLOCK_WAITING || state == DLOCK_GRANTED) &&
		--ticket->claims == 0)
		end(lock, &ticket->ticket, 0, &wakeups);
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
	DlockLock  *lock = find(&ticket->key, true);
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
	dshash_seq_status status;
	Wakeups		wakeups = {0};
	DlockLock  *lock;
	bool		done = false;

	dshash_seq_init(&status, dlock_locks, true);
	while ((lock = dshash_seq_next(&status)) != NULL)
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
		{
			dshash_delete_current(&status);
			dlock_count_memory(-(int64) sizeof(DlockLock));
		}
		break;
	}
	dshash_seq_term(&status);
	wake_all(&wakeups);
	return done;
}

static int
copy_members(const DlockList *list, DlockMember *members, int count, int max)
{
	for (DlockTicket *ticket = ticket_at(list->head); ticket;
		 ticket = ticket_at(ticket->link.next), count++)
	{
		if (count < max)
			members[count] = (DlockMember)
		{
			.number = ticket->number,
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
 * of the queue.  Returns how many there are: where that is more than "max",
 * the copy is cut short, and the caller comes again with more room.
 */
int
dlock_queue_members(const DlockKey *key, DlockMember *members, int max,
					int32 *slots)
{
	DlockLock  *lock = find(key, false);
	int			count;

	if (lock == NULL)
		return 0;
	*slots = lock->slots;
	count = copy_members(&lock->holders, members, 0, max);
	count = copy_members(&lock->queue, members, count, max);
	dshash_release_lock(dlock_locks, lock);
	return count;
}

bool
dlock_queue_has_waiters(const DlockKey *key)
{
	DlockLock  *lock = find(key, false);
	bool		result;

	if (lock == NULL)
		return false;
	result = lock->queue.length > 0;
	dshash_release_lock(dlock_locks, lock);
	return result;
}

/*
 * Keep a held ticket from ending, until it is unpinned; false where it is not
 * held any more.
 */
bool
dlock_queue_pin(const DlockKey *key, DlockTicket *ticket)
{
	DlockLock  *lock = find(key, true);
	bool		granted;

	if (lock == NULL)
		return false;
	granted = state_of(ticket) == DLOCK_GRANTED && is_holding(ticket);
	if (granted)
		ticket->pins++;
	dshash_release_lock(dlock_locks, lock);
	return granted;
}

/*
 * The pinned commit is visible, or was rolled back: whatever was to end the
 * ticket meanwhile ends it now.  Raises nothing.
 */
void
dlock_queue_unpin(const DlockKey *key, DlockTicket *ticket)
{
	Wakeups		wakeups = {0};
	DlockLock  *lock = find(key, true);

	/* a pinned ticket keeps its lock's entry */
	Assert(lock != NULL && ticket->pins > 0);
	if (--ticket->pins == 0 && state_of(ticket) == DLOCK_ENDING)
		end(lock, ticket, is_lease_ticket(ticket) ? 0 : DLOCK_EVENT_RELEASED,
			&wakeups);
	let_go(lock);
	wake_all(&wakeups);
}

/*
 * Clear away the tickets of a lock whose owners are gone without having given
 * them back, and hand it on.  That takes an error in a backend's exit or in a
 * hand-over, where a segment of memory cannot be mapped, so this is hardly
 * ever seen; but without it such a lock would stay closed until a restart.
 *
 * Their memory is freed here, as its owner is no more.
 */
void
dlock_queue_reap(const DlockKey *key)
{
	DlockLock  *lock = find(key, true);
	Wakeups		wakeups = {0};
	DlockList	lost = {0};
	DlockTicket *one;

	if (lock == NULL)
		return;
	for (DlockTicket *ticket = ticket_at(lock->holders.head), *next; ticket;
		 ticket = next)
	{
		DlockBackend *owner = &dlock_backends[ticket->procno];

		next = ticket_at(ticket->link.next);
		if (ticket->session == 0 ||
			pg_atomic_read_u64(&owner->session) == ticket->session)
			continue;
		take_out(lock, ticket, &wakeups);
		dlock_list_append(&lost, &ticket->link);
	}
	/* an error in a hand-over has left the lock free, and the head waiting */
	grant_from_queue(lock, &wakeups);
	let_go(lock);
	wake_all(&wakeups);
	while ((one = ticket_at(lost.head)) != NULL)
	{
		dlock_list_remove(&lost, &one->link);
		dlock_ticket_free(one);
	}
}

/*
 * Free all that leases have in a space that nobody uses any more.
 */
void
dlock_queue_purge(const DlockSpaceKey *space)
{
	dshash_seq_status status;
	DlockLock  *lock;

	dshash_seq_init(&status, dlock_locks, true);
	while ((lock = dshash_seq_next(&status)) != NULL)
	{
		if (memcmp(&lock->key.space, space, sizeof(DlockSpaceKey)) != 0)
			continue;
		dshash_delete_current(&status);
		dlock_count_memory(-(int64) sizeof(DlockLock));
	}
	dshash_seq_term(&status);
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

/* A lease's ticket is shown while it counts, or keeps the lock closed. */
static bool
is_shown(DlockTicket *ticket)
{
	return is_queued(ticket) ? is_waiting(ticket) :
		is_holding(ticket) || dlock_lease_ticket_is_delayed(lease_ticket(ticket));
}

/* Append a row for each ticket of a list; false where memory is out. */
static bool
append_rows(DlockRow ***tail, const DlockLock *lock, const DlockList *list,
			bool queued)
{
	uint32		position = 0;

	for (DlockTicket *ticket = ticket_at(list->head); ticket;
		 ticket = ticket_at(ticket->link.next))
	{
		DlockRow   *row;

		if (!is_shown(ticket))
			continue;
		row = make_row(lock, ticket, queued ? ++position : 0);
		if (row == NULL)
			return false;
		row->next = NULL;
		**tail = row;
		*tail = &row->next;
	}
	return true;
}

/*
 * Copy out every ticket of a space, lock by lock, the holders first and then
 * the queue in its order.  Each lock is seen at one moment, different ones at
 * different moments.
 */
DlockRow *
dlock_queue_rows(const DlockSpaceKey *space)
{
	dshash_seq_status status;
	DlockLock  *lock;
	DlockRow   *rows = NULL;
	DlockRow  **tail = &rows;
	bool		complete = true;

	dshash_seq_init(&status, dlock_locks, false);
	while (complete && (lock = dshash_seq_next(&status)) != NULL)
	{
		if (memcmp(&lock->key.space, space, sizeof(DlockSpaceKey)) == 0)
			complete = append_rows(&tail, lock, &lock->holders, false) &&
				append_rows(&tail, lock, &lock->queue, true);
	}
	dshash_seq_term(&status);
	if (!complete)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory"),
				 errdetail("Failed while copying the lock table.")));
	return rows;
}
