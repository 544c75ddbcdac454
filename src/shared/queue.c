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
 *	- the head of the queue does not fit beside the holders (I2);
 *	- the queue is in ticket order, and so are the grants (I3);
 *	- an entry has a ticket in one of its lists, or set_slots, setters or settled
 *	  (I4).
 *
 * A lease's ticket stays in its list, LEAVING or ENDING, until the removal of
 * its row is in the WAL, and nobody is granted the lock past it: otherwise a
 * crash could bring it back, and have it granted after a greater number.
 *
 * Under the entry's lock nothing here sleeps, calls out, or allocates (I8).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/memutils.h"

#include "shared/lease.h"
#include "shared/queue.h"

static inline void
begin_wakeups(DlockWakeups *wakeups)
{
	wakeups->space = wakeups->outbox = NULL;
	wakeups->heir = NULL;
	wakeups->count = 0;
}

static void
set_latches(DlockWakeups *wakeups)
{
	for (int i = 0; i < wakeups->count; i++)
		SetLatch(&GetPGProcByNumber(wakeups->procnos[i])->procLatch);
	wakeups->count = 0;
}

void
dlock_wakeups_send(DlockWakeups *wakeups)
{
	DlockLeaseTicket *heir = wakeups->heir;

	if (wakeups->count > 0)
		set_latches(wakeups);
	if (unlikely(wakeups->space != NULL))
		(void) dlock_worker_wake(wakeups->space);
	else if (unlikely(wakeups->outbox != NULL))
		dlock_sender_wake(wakeups->outbox);
	if (unlikely(heir != NULL))
	{
		wakeups->heir = NULL;
		ConditionVariableBroadcast(&heir->record.changed);
		dlock_record_unref(&heir->record);
	}
}

/*
 * Note a ticket's backend to be woken, and the sender if the ticket is to be
 * announced.  Where so many shared holders come in at once that the array is
 * full, the latches are set under the entry's lock: that is only slower.
 *
 * For a lease's ticket the worker does all that, when the change is written.  An
 * heir's row may have been written before; its session is woken at once.
 */
static void
wake_later(DlockWakeups *wakeups, DlockTicket *ticket, uint32 event)
{
	bool		of_lease = is_lease_ticket(ticket);

	if (of_lease && event == DLOCK_EVENT_GRANTED && wakeups->heir == NULL &&
		lease_ticket(ticket)->heir)
	{
		wakeups->heir = lease_ticket(ticket);
		dlock_record_ref(&wakeups->heir->record);
	}
	else if (of_lease)
		wakeups->space = dlock_space_at(ticket->space);
	else if (DsaPointerIsValid(ticket->announcement))
		wakeups->outbox = dlock_space_at(ticket->space);
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
 * Could this ticket hold the lock beside the holders that there are (I1)?  If
 * the holders were admitted under different slots, it must wait until they
 * have left.
 */
static bool
fits(const DlockLock *lock, const DlockTicket *ticket)
{
	int32		slots = slots_for(lock, ticket->slots);

	if (lock->closed > 0 ||
		(lock->holders.length > 0 && lock->holders_slots != slots))
		return false;
	switch (ticket->mode)
	{
		case DLOCK_EXCLUSIVE:
			return lock->holders.length == 0;
		case DLOCK_SHARED:
			return lock->exclusive == 0;
		case DLOCK_SLOTS:
			return ticket->permits <= slots - lock->permits;
	}
	return false;
}

/* A ticket joins the holders. */
static void
hold(DlockLock *lock, DlockTicket *ticket)
{
	if (lock->holders.length == 0)
	{
		lock->holders_slots = slots_for(lock, ticket->slots);
		lock->leased = false;
	}
	dlock_list_append(&lock->holders, &ticket->link, ticket->self);
	lock->permits += ticket->permits;
	if (ticket->mode == DLOCK_EXCLUSIVE)
		lock->exclusive++;
	if (ticket->scope == DLOCK_LEASE)
		lock->leased = true;
	dlock_count_ticket(ticket, DLOCK_COUNT_ACQUIRED, 1);
}

/* The first holder that has not been told that the lock is wanted, or NULL */
static DlockTicket *
first_unwanted(const DlockLock *lock)
{
	DlockTicket *first = NULL;

	for (DlockTicket *holder = ticket_at(lock->holders.tail);
		 holder && !holder->wanted; holder = ticket_at(holder->link.prev))
		first = holder;
	return first;
}

/*
 * A ticket waits, or is about to: notify the holders that the lock is wanted, each
 * once in its hold (I28).  Notified holders come first in the list.
 *
 * "wanted" is set before the event: see dlock_session_enqueue().
 */
static void
notify_holders_wanted(DlockSpace *space, DlockLock *lock, DlockSpace **to_wake)
{
	for (DlockTicket *holder = first_unwanted(lock); holder;
		 holder = ticket_at(holder->link.next))
	{
		holder->wanted = true;
		if (!DsaPointerIsValid(holder->announcement) ||
			state_of(holder) != DLOCK_GRANTED)
			continue;
		dlock_announcement_event(holder, DLOCK_EVENT_WANTED);
		*to_wake = space;
	}
}

/*
 * A ticket is about to be granted that nobody waits with: as it was enqueued, its
 * session or lease goes on meanwhile.  So whoever grants counts its wait.
 */
static void
count_wait(const DlockLock *lock, const DlockTicket *ticket)
{
	if (!is_lease_ticket(ticket) && !DsaPointerIsValid(ticket->announcement))
		return;
	dlock_contention_wait(dlock_space_at(ticket->space), &lock->key,
						  dlock_ticket_waited(ticket, dlock_monotonic_now()),
						  ticket->queue_length, DLOCK_WAIT_GRANTED);
}

/* The head of the queue is granted. */
static void
grant_head(DlockLock *lock, DlockTicket *head, TimestampTz now,
		   DlockWakeups *wakeups)
{
	dlock_queue_note_change(lock, &wakeups->space);
	count_wait(lock, head);
	if (is_lease_ticket(head))
		dlock_lease_ticket_granted(lease_ticket(head), now);
	dlock_list_remove(&lock->queue, &head->link);
	hold(lock, head);
	if (!is_lease_ticket(head))
	{
		head->granted_at = now;
		dlock_ticket_set_state(head, DLOCK_GRANTED);
	}
	wake_later(wakeups, head, DLOCK_EVENT_GRANTED);
}

/*
 * Grant to the head of the queue for as long as it fits.  One whose lease has
 * run out gives way: the worker ends it, or has begun to.
 */
void
dlock_queue_grant_all(DlockSpace *space, DlockLock *lock, DlockWakeups *wakeups)
{
	DlockTicket *head;
	TimestampTz now = 0;

	while ((head = ticket_at(lock->queue.head)) != NULL &&
		   state_of(head) != DLOCK_LEAVING)
	{
		/* the one before may have been a semaphore of another size */
		if (lock->holders.length == 0)
			lock->slots = slots_for(lock, head->slots);
		if (!fits(lock, head))
			break;
		if (!is_waiting(head))
		{
			wake_later(wakeups, head, DLOCK_EVENT_EXPIRED);
			if (!dlock_lease_ticket_ended(lease_ticket(head), DLOCK_LEAVING))
				break;
			dlock_list_remove(&lock->queue, &head->link);
			dlock_ticket_set_state(head, DLOCK_GONE);
			continue;
		}
		if (now == 0)
			now = GetCurrentTimestamp();
		grant_head(lock, head, now, wakeups);
	}
	if (head && is_waiting(head))
		notify_holders_wanted(space, lock, &wakeups->space);
}

/* Take a ticket out of the lock.  It is handed on by the caller. */
static void
leave(DlockLock *lock, DlockTicket *ticket, DlockWakeups *wakeups)
{
	Assert(ticket->pins == 0);
	if (is_queued(ticket))
		dlock_list_remove(&lock->queue, &ticket->link);
	else
	{
		dlock_queue_note_change(lock, &wakeups->space);
		dlock_list_remove(&lock->holders, &ticket->link);
		lock->permits -= ticket->permits;
		if (ticket->mode == DLOCK_EXCLUSIVE)
			lock->exclusive--;
		if (ticket->scope == DLOCK_LEASE && lease_ticket(ticket)->closes)
			lock->closed--;
		dlock_count_ticket(ticket, DLOCK_COUNT_RELEASED, 1);
		if (unlikely(state_of(ticket) == DLOCK_ENDING))
			dlock_count_ticket(ticket, DLOCK_COUNT_HELD, 1);
	}
	dlock_ticket_set_state(ticket, DLOCK_GONE);
}

/* The same, and hand on what that frees. */
static void
take_out(DlockLock *lock, DlockTicket *ticket, DlockWakeups *wakeups)
{
	/* before the ticket can be freed; whoever ends one uses its space */
	dsa_pointer space = ticket->space;

	leave(lock, ticket, wakeups);
	dlock_queue_grant_waiters(dlock_space_at(space), lock, wakeups);
}

#ifdef COMPAT_CHECKS
/* So many tickets of a lock are checked */
#define MAX_CHECKED	64

/* Is a list linked in both directions, and in the order of numbers? */
static void
check_list(const DlockList *list)
{
	uint32		length = 0;
	dsa_pointer prev = InvalidDsaPointer;

	for (DlockTicket *ticket = ticket_at(list->head); ticket;
		 ticket = ticket_at(ticket->link.next))
	{
		Assert(ticket->link.prev == prev);
		Assert(prev == InvalidDsaPointer ||
			   ticket_at(prev)->number < ticket->number);
		prev = ticket->self;
		length++;
	}
	Assert(list->tail == prev && list->length == length);
}

/* Compare what a lock counts of its holders to the holders. */
static void
check_holders(const DlockLock *lock)
{
	int64		permits = 0;
	uint32		exclusive = 0;
	uint32		closed = 0;

	for (DlockTicket *ticket = ticket_at(lock->holders.head); ticket;
		 ticket = ticket_at(ticket->link.next))
	{
		Assert(state_of(ticket) == DLOCK_GRANTED ||
			   state_of(ticket) == DLOCK_ENDING);
		permits += ticket->permits;
		exclusive += ticket->mode == DLOCK_EXCLUSIVE ? 1 : 0;
		closed += is_lease_ticket(ticket) && lease_ticket(ticket)->closes ? 1 : 0;
	}
	Assert(lock->permits == permits && lock->exclusive == exclusive &&
		   lock->closed == closed);
	/* I1 */
	Assert(exclusive == 0 || (exclusive == 1 && lock->holders.length == 1));
}

/*
 * Check the invariants of a lock: I1, I3 and I4; and I2, unless the head of the
 * queue is a lease's, which may have run out, or is being loaded.  Long lists are
 * left out.
 */
static void
check_lock(const DlockLock *lock)
{
	DlockTicket *head = ticket_at(lock->queue.head);

	if (lock->holders.length + lock->queue.length <= MAX_CHECKED)
	{
		check_list(&lock->holders);
		check_list(&lock->queue);
		check_holders(lock);
	}
	Assert(!dlock_lock_is_unused(lock));
	if (head && lock->exclusive > 0)
		Assert(ticket_at(lock->holders.tail)->number < head->number);
	if (head && !is_lease_ticket(head))
		Assert(state_of(head) == DLOCK_WAITING && !fits(lock, head));
}
#else
#define check_lock(lock)	((void) 0)
#endif

/*
 * Release the entry's lock, and wake no process yet.  An entry that is not
 * used any more is removed (I4).
 */
void
dlock_queue_let_go(DlockLock *lock)
{
	if (dlock_lock_is_unused(lock))
		dlock_lock_remove(lock);
	else
	{
		check_lock(lock);
		dlock_lock_release(lock);
	}
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
 * handed on at once.  Only what leases have leaves later than it ends; with that,
 * the answer is there with the first holder that stays and is in the way.
 */
static bool
fits_soon(const DlockLock *lock, const DlockTicket *ticket)
{
	int64		permits = ticket->permits;

	if (lock->closed > 0 || has_waiting(lock) ||
		(ticket->mode == DLOCK_SLOTS && permits > lock->slots))
		return false;
	/* so that a full semaphore of many permits is not gone through */
	if (!lock->leased)
		return fits(lock, ticket);
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
 * Make a lock one with the slots that a request gives, or that were set; false
 * where somebody uses it with others.
 */
static bool
agree_on_slots(DlockLock *lock, int32 requested)
{
	int32		slots = slots_for(lock, requested);

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
 * A ticket is about to enter a lock: it gets its number, and is to be granted at
 * once where nobody waits and it fits, and queued otherwise.  One that must not
 * wait is queued only where the lock is about to become free for it.  If it is to
 * enter, enter() follows.
 */
static DlockJoin
prepare_to_enter(DlockSpace *space, DlockLock *lock, DlockTicket *ticket,
				 bool nowait, DlockSpace **to_wake)
{
	bool		free = lock->queue.length == 0 && fits(lock, ticket);

	if (!free && nowait && !fits_soon(lock, ticket))
		return DLOCK_JOIN_BUSY;
	ticket->number = dlock_ticket_draw(space);
	if (ticket->number == 0)
		return DLOCK_JOIN_NO_NUMBER;
	if (free)
	{
		dlock_queue_note_change(lock, to_wake);
		ticket->granted_at = ticket->enqueued_at;
		return DLOCK_JOIN_GRANTED;
	}
	notify_holders_wanted(space, lock, to_wake);
	ticket->queue_length = lock->queue.length + 1;
	dlock_ticket_begin_wait(ticket, 0);
	/* a removal may have been left until somebody waits for it */
	if (lock->leased && lock->queue.length == 0 &&
		dlock_worker_comes(space))
		*to_wake = space;
	return DLOCK_JOIN_QUEUED;
}

/* Enter it; a lease that has it by now has changed its state. */
static void
enter(DlockLock *lock, DlockTicket *ticket, DlockJoin outcome)
{
	if (outcome == DLOCK_JOIN_GRANTED)
		hold(lock, ticket);
	else
		dlock_list_append(&lock->queue, &ticket->link, ticket->self);
	if (!is_lease_ticket(ticket))
		dlock_ticket_set_state(ticket, outcome == DLOCK_JOIN_GRANTED ?
							   DLOCK_GRANTED : DLOCK_WAITING);
}

static inline bool
is_to_enter(DlockJoin outcome)
{
	return outcome == DLOCK_JOIN_GRANTED || outcome == DLOCK_JOIN_QUEUED;
}

/*
 * Join a lock with a ticket of this session's.  Where the outcome is not GRANTED
 * or QUEUED, nothing has changed, and the ticket is still the caller's to free.
 *
 * Raises 53200 where the table cannot grow; nothing has changed then either.
 */
DlockJoined
dlock_queue_join(DlockSpace *space, const DlockRequest *request,
				 DlockTicket *ticket, bool nowait)
{
	DlockJoined joined = {.outcome = DLOCK_JOIN_MISMATCH};
	DlockSpace *to_wake = NULL;
	DlockLock  *lock = dlock_lock_insert(&request->key, request->slots,
										 ticket->role);

	if (agree_on_slots(lock, request->slots))
		joined.outcome = prepare_to_enter(space, lock, ticket, nowait,
										  &to_wake);
	else
		joined.slots = lock->slots;
	if (likely(is_to_enter(joined.outcome)))
		enter(lock, ticket, joined.outcome);
	if (joined.outcome == DLOCK_JOIN_GRANTED &&
		DsaPointerIsValid(ticket->announcement))
		dlock_announcement_event(ticket, DLOCK_EVENT_GRANTED);
	joined.lock = lock;
	dlock_queue_let_go(lock);
	if (unlikely(to_wake != NULL))
		(void) dlock_worker_wake(to_wake);
	return joined;
}

/*
 * Is a ticket that is about to be queued to be granted as soon as the row of
 * the only holder is removed (I17)?  That holder has ended, and its removal is
 * in the journal.
 */
static bool
is_heir(const DlockLock *lock, const DlockTicket *ticket)
{
	DlockTicket *holder = ticket_at(lock->holders.head);

	return ticket->mode == DLOCK_EXCLUSIVE && lock->queue.length == 0 &&
		lock->holders.length == 1 && lock->closed == 0 &&
		is_lease_ticket(holder) && lease_ticket(holder)->leaves;
}

/*
 * A ticket that was made for a lease is about to enter its lock, and is referred to
 * for as long as it is there.  Where "adopt", the lease has it from now on; false
 * where that is gone.  An heir's lease has it in any case, unless that is gone.
 */
static bool
belong_to_lease(DlockLock *lock, DlockLeaseTicket *ticket, DlockJoin outcome,
				bool adopt, DlockWakeups *wakeups)
{
	DlockState	state = outcome == DLOCK_JOIN_GRANTED ? DLOCK_GRANTED :
		DLOCK_WAITING;

	if (adopt && !dlock_lease_ticket_adopt(ticket, state, false))
		return false;
	if (!adopt && state == DLOCK_WAITING &&
		is_heir(lock, &ticket->ticket) &&
		dlock_lease_ticket_adopt(ticket, state, true))
		wakeups->space = dlock_space_at(ticket->ticket.space);
	dlock_record_ref(&ticket->record);
	return true;
}

/*
 * The same with a ticket for request->lease, unless the lease has one for the
 * same request (I14).  "adopt": the ticket is the lease's from the start.
 */
DlockJoined
dlock_queue_join_for_lease(DlockSpace *space, const DlockRequest *request,
						   DlockLeaseTicket *ticket, bool nowait, bool adopt)
{
	DlockJoined joined = {.outcome = DLOCK_JOIN_MISMATCH};
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_insert(&request->key, request->slots,
										 ticket->ticket.role);
	bool		agrees;

	/* what was set since is not for who asks again for what the lease has */
	joined.existing = dlock_lease_ticket_find_same(ticket);
	agrees = (joined.existing &&
			  joined.existing->ticket.slots == request->slots) ||
		agree_on_slots(lock, request->slots);
	if (!agrees)
		joined.slots = lock->slots;
	else if (joined.existing)
		joined.outcome = DLOCK_JOIN_EXISTS;
	else
		joined.outcome = prepare_to_enter(space, lock, &ticket->ticket, nowait,
										  &wakeups.space);
	if (is_to_enter(joined.outcome) &&
		!belong_to_lease(lock, ticket, joined.outcome, adopt, &wakeups))
		joined.outcome = DLOCK_JOIN_LEASE_GONE;
	if (is_to_enter(joined.outcome))
		enter(lock, &ticket->ticket, joined.outcome);
	joined.lock = lock;
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
	return joined;
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
		(is_lease_ticket(&ticket->ticket) ||
		 dlock_lease_ticket_adopt(ticket, DLOCK_GRANTED, false));
	dlock_queue_let_go(lock);
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
		dlock_queue_let_go(lock);
}

/*
 * Put a ticket back that was read from the tables, which come in the order of
 * the numbers.  False, with nothing changed, if it would hold the lock beside
 * an exclusive holder, or exclusively beside others or behind the queue (I22).
 * Raises 53200, with nothing changed.
 */
bool
dlock_queue_restore(DlockLeaseTicket *ticket, DlockState state)
{
	DlockLock  *lock = dlock_lock_insert(&ticket->key, ticket->ticket.slots,
										 ticket->ticket.role);

	if (state != DLOCK_WAITING &&
		(lock->exclusive > 0 ||
		 (ticket->ticket.mode == DLOCK_EXCLUSIVE &&
		  (lock->holders.length > 0 || lock->queue.length > 0))))
	{
		dlock_queue_let_go(lock);
		return false;
	}
	if (state == DLOCK_WAITING)
	{
		/* only the other clock goes on while no server runs */
		dlock_ticket_begin_wait(&ticket->ticket,
								Max(GetCurrentTimestamp() -
									ticket->ticket.enqueued_at, 0));
		dlock_list_append(&lock->queue, &ticket->ticket.link,
						  ticket->ticket.self);
	}
	else
	{
		if (lock->holders.length == 0)
			lock->slots = lock->holders_slots =
				slots_for(lock, ticket->ticket.slots);
		dlock_list_append(&lock->holders, &ticket->ticket.link,
						  ticket->ticket.self);
		lock->permits += ticket->ticket.permits;
		if (ticket->ticket.mode == DLOCK_EXCLUSIVE)
			lock->exclusive++;
		lock->leased = true;
		ticket->closes = state == DLOCK_ENDING;
		if (ticket->closes)
			lock->closed++;
	}
	dlock_ticket_set_state(&ticket->ticket, state);
	if (state == DLOCK_GRANTED)
		dlock_count_ticket(&ticket->ticket, DLOCK_COUNT_HELD, 1);
	dlock_queue_let_go(lock);
	return true;
}

/*
 * After all were put back: grant what has become free.  Can be repeated, and
 * does nothing to the locks that sessions have taken meanwhile.
 *
 * Looks at locks that have a queue, and no others: it holds up all who use a
 * partition, in whatever database, and takes no interrupts.
 */
void
dlock_queue_resume(DlockSpace *space)
{
	DlockLockScan scan;
	DlockWakeups wakeups = {0};
	DlockLock  *lock;

	dlock_lock_scan_begin(&scan, true, &space->key, true);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
		dlock_queue_grant_waiters(space, lock, &wakeups);
	dlock_lock_scan_end(&scan);
	dlock_wakeups_send(&wakeups);
}

/*
 * End a ticket that is waiting or granted, or is ENDING and has lost its last
 * pin, as far as that can be done now; "event" tells its owner, or is 0.  What
 * is pinned, and what has a row, is taken out later.  A removal that nobody waits
 * for can wait for the worker, if that comes by itself.
 */
void
dlock_queue_end_ticket(DlockLock *lock, DlockTicket *ticket, uint32 event,
					   DlockWakeups *wakeups)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	bool		of_lease = is_lease_ticket(ticket);
	int			procno = ticket->procno;
	bool		at_once;

	if (event == DLOCK_EVENT_EXPIRED && !is_queued(ticket))
		dlock_contention_expiration(space, &lock->key,
									lock->queue.length > 0);
	if (event != 0 && (of_lease || ticket->pins == 0))
		wake_later(wakeups, ticket, event);
	if (!of_lease)
	{
		if (ticket->pins == 0)
			take_out(lock, ticket, wakeups);
		else
			dlock_ticket_set_state(ticket, DLOCK_ENDING);
		/* after the state, which its owner reads once it sees this (I10) */
		if (event != 0)
			pg_atomic_fetch_add_u32(&dlock_backends[procno].lost, 1);
		return;
	}
	at_once = dlock_lease_ticket_ended(lease_ticket(ticket), is_queued(ticket) ?
									   DLOCK_LEAVING : DLOCK_ENDING);
	/* once it is in the journal */
	if (event != 0 || lock->queue.length > 0 ||
		pg_atomic_read_u32(&space->watches) > 0 || !dlock_worker_comes(space))
		wakeups->space = space;
	if (at_once)
		take_out(lock, ticket, wakeups);
	else if (lease_ticket(ticket)->in_closed && !lease_ticket(ticket)->closes)
	{
		lease_ticket(ticket)->closes = true;
		lock->closed++;
	}
}

/* A call that had claimed a ticket has failed: the last one ends it. */
static void
end_unclaimed(DlockLock *lock, DlockLeaseTicket *ticket, DlockWakeups *wakeups)
{
	if (!dlock_state_has_ended(state_of(&ticket->ticket)) &&
		pg_atomic_read_u32(&ticket->claims) == 0)
		dlock_queue_end_ticket(lock, &ticket->ticket, 0, wakeups);
}

/*
 * End a ticket of this backend, held or waiting, and hand over.  False where
 * it was gone already.  The ticket's memory is the caller's again, once it is
 * GONE: a pinned one only becomes ENDING, and goes with its last pin.  One that
 * its lease has adopted meanwhile, for another client, stays that client's.
 *
 * "lock" is the lock that it has joined: that stays while the ticket is in it, so
 * it need not be searched for (I7).
 *
 * Raises nothing and allocates nothing: error and exit paths call this.
 */
bool
dlock_queue_leave(const DlockKey *key, DlockTicket *ticket, DlockLock *lock)
{
	DlockWakeups wakeups;

	if (unlikely(state_of(ticket) == DLOCK_GONE))
	{
		/* whoever ended it has done with it: see dlock_ticket_set_state() */
		pg_memory_barrier();
		return false;
	}
	begin_wakeups(&wakeups);
	dlock_lock_enter(key);
	/* it may have been ended by force since we looked */
	if (unlikely(state_of(ticket) == DLOCK_GONE))
	{
		dlock_lock_leave(key);
		return false;
	}
	Assert(dlock_key_equal(&lock->key, key));
	if (unlikely(is_lease_ticket(ticket)))
	{
		pg_atomic_fetch_sub_u32(&lease_ticket(ticket)->claims, 1);
		end_unclaimed(lock, lease_ticket(ticket), &wakeups);
	}
	else
		dlock_queue_end_ticket(lock, ticket, 0, &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
	return true;
}

/*
 * End a lease's ticket, held or waiting.  False where that was done before.
 * Raises nothing.
 */
bool
dlock_queue_end(DlockLeaseTicket *ticket, uint32 event)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(state_of(&ticket->ticket));
	if (is_there)
		dlock_queue_end_ticket(lock, &ticket->ticket, event, &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
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
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(state_of(&ticket->ticket));
	if (is_there && adopt && !is_lease_ticket(&ticket->ticket))
	{
		wake_later(&wakeups, &ticket->ticket, 0);
		is_there = dlock_lease_ticket_adopt(ticket, state_of(&ticket->ticket),
											false);
	}
	if (is_there)
		pg_atomic_fetch_add_u32(&ticket->claims, 1);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
	return is_there;
}

/*
 * A call that has claimed a ticket has failed: end it, if no other call has
 * claimed it.
 */
void
dlock_queue_withdraw(DlockLeaseTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock;

	pg_atomic_fetch_sub_u32(&ticket->claims, 1);
	lock = dlock_lock_find(&ticket->key, true);
	if (lock == NULL)
		return;
	end_unclaimed(lock, ticket, &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
}

/*
 * The removal of an ended ticket's row is in the WAL: hand the lock on.
 * Raises nothing.
 */
void
dlock_queue_finish(DlockLeaseTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key, true);
	DlockState	state;

	if (lock == NULL)
		return;
	state = state_of(&ticket->ticket);
	if (state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && ticket->ticket.pins == 0))
		take_out(lock, &ticket->ticket, &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
}

/*
 * Keep a held ticket from ending, until it is unpinned (I24); false if it is
 * not held any more.
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
	dlock_queue_let_go(lock);
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
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key, true);

	/* a pinned ticket keeps its lock's entry */
	Assert(lock != NULL && ticket->pins > 0);
	if (--ticket->pins == 0 && state_of(ticket) == DLOCK_ENDING)
		dlock_queue_end_ticket(lock, ticket, event_of_unpinning(ticket), &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
}

/*
 * Free all that leases have in a space that nobody uses any more.
 */
void
dlock_queue_purge(const DlockSpaceKey *space)
{
	DlockLockScan scan;

	dlock_lock_scan_begin(&scan, true, space, false);
	while (dlock_lock_scan_next(&scan) != NULL)
		dlock_lock_scan_remove(&scan);
	dlock_lock_scan_end(&scan);
}
