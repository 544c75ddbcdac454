/*-------------------------------------------------------------------------
 *
 * queue.c
 *	  The state machine of a lock: join, grant, hand over, leave.
 *
 * After a process has changed the holders or the queue, it grants to the head
 * of the queue as long as the head fits.  After releasing the entry's lock, it
 * wakes the sessions whose tickets have changed.  A lease's ticket that has
 * ended stays in its list, LEAVING or ENDING, until the removal of its row is
 * in the WAL.  Until then the ticket blocks others as before (I15).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "storage/latch.h"
#include "storage/proc.h"

#include "shared/lease.h"
#include "shared/queue.h"

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
	/* without a sender, wake the worker, which starts one */
	else if (unlikely(wakeups->outbox != NULL) &&
			 !dlock_office_wake(wakeups->outbox, DLOCK_SENDER))
		(void) dlock_worker_wake(wakeups->outbox);
	if (unlikely(heir != NULL))
	{
		wakeups->heir = NULL;
		ConditionVariableBroadcast(&heir->record.changed);
		dlock_record_unref(&heir->record);
	}
}

/*
 * A lease's ticket has changed.  Wake the worker, which writes the change
 * before it wakes sessions and announces events.  If an heir (I17) is granted,
 * wake its session instead, because the heir's row may be written already.
 */
static void
wake_for_lease(DlockWakeups *wakeups, DlockLeaseTicket *ticket, uint32 event)
{
	if (event == DLOCK_EVENT_GRANTED && wakeups->heir == NULL && ticket->heir)
	{
		wakeups->heir = ticket;
		dlock_record_ref(&ticket->record);
	}
	else
		wakeups->space = dlock_space_at(ticket->ticket.space);
	if (event != DLOCK_EVENT_GRANTED &&
		DsaPointerIsValid(ticket->ticket.announcement))
		dlock_announcement_event(&ticket->ticket, event);
}

/*
 * Note the processes to wake for a ticket.  If the array overflows, latches
 * are set under the entry's lock, which is slower but correct.
 */
static void
wake_later(DlockWakeups *wakeups, DlockTicket *ticket, uint32 event)
{
	if (is_lease_ticket(ticket))
	{
		wake_for_lease(wakeups, lease_ticket(ticket), event);
		return;
	}
	if (DsaPointerIsValid(ticket->announcement))
	{
		wakeups->outbox = dlock_space_at(ticket->space);
		dlock_announcement_event(ticket, event);
	}
	if (wakeups->count == lengthof(wakeups->procnos))
		set_latches(wakeups);
	wakeups->procnos[wakeups->count++] = ticket->procno;
}

/* Does a ticket fit beside the holders?  It needs the same slots (I1). */
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

static void
hold(DlockLock *lock, DlockTicket *ticket)
{
	if (lock->holders.length == 0)
	{
		lock->holders_slots = slots_for(lock, ticket->slots);
		lock->leased = false;
	}
	dlock_list_append(&lock->holders, &ticket->link);
	lock->permits += ticket->permits;
	if (ticket->mode == DLOCK_EXCLUSIVE)
		lock->exclusive++;
	if (ticket->scope == DLOCK_LEASE)
		lock->leased = true;
}

/*
 * Notify each holder, once, that the lock is wanted (I28).  Notified holders
 * are first in the list.  Set "wanted" before reading the announcement: see
 * dlock_session_enqueue().
 */
static void
notify_holders_wanted(DlockSpace *space, DlockLock *lock, DlockSpace **to_wake)
{
	for (DlockTicket *holder = ticket_at(lock->holders.tail);
		 holder && !holder->wanted; holder = ticket_at(holder->link.prev))
	{
		holder->wanted = true;
		pg_memory_barrier();
		if (!DsaPointerIsValid(holder->announcement) ||
			dlock_state_of(holder) != DLOCK_GRANTED)
			continue;
		dlock_announcement_event(holder, DLOCK_EVENT_WANTED);
		*to_wake = space;
	}
}

/* No session counts the wait of an enqueued ticket, so the granter does. */
static void
count_enqueued_wait(const DlockLock *lock, const DlockTicket *ticket)
{
	if (!is_lease_ticket(ticket) && !DsaPointerIsValid(ticket->announcement))
		return;
	dlock_contention_wait(dlock_space_at(ticket->space), &lock->key,
						  dlock_ticket_waited(ticket, dlock_monotonic_now()),
						  ticket->queue_length, DLOCK_WAIT_GRANTED);
}

static void
grant_head(DlockLock *lock, DlockTicket *head, TimestampTz now,
		   DlockWakeups *wakeups)
{
	dlock_queue_note_change(lock, &wakeups->space);
	count_enqueued_wait(lock, head);
	if (is_lease_ticket(head))
		dlock_lease_ticket_granted(lease_ticket(head), now);
	dlock_list_remove(&lock->queue, &head->link);
	hold(lock, head);
	dlock_count_ticket(head, DLOCK_COUNT_ACQUIRED, 1);
	if (!is_lease_ticket(head))
	{
		head->granted_at = now;
		dlock_ticket_set_state(head, DLOCK_GRANTED);
	}
	wake_later(wakeups, head, DLOCK_EVENT_GRANTED);
}

/*
 * After a ticket of "role" has left: if the entry counts for this role, and
 * only tickets keep it, let it count for the role of one that remains.  Raises
 * nothing, because that role has an account, for its ticket.
 */
static void
pass_entry(DlockLock *lock, Oid role)
{
	DlockTicket *first;

	if (lock->role != role || dlock_lock_is_kept(lock))
		return;
	first = ticket_at(DsaPointerIsValid(lock->holders.head) ?
					  lock->holders.head : lock->queue.head);
	if (first == NULL || likely(first->role == role))
		return;
	dlock_pass_memory(role, first->role, lock->size);
	lock->role = first->role;
}

/* While the head fits, grant it or, if its lease has run out, end it. */
void
dlock_queue_grant_all(DlockSpace *space, DlockLock *lock, DlockWakeups *wakeups)
{
	DlockTicket *head;
	TimestampTz now = 0;

	while ((head = ticket_at(lock->queue.head)) != NULL &&
		   dlock_state_of(head) != DLOCK_LEAVING)
	{
		/* the holders that have left may have had other slots */
		if (lock->holders.length == 0)
			lock->slots = slots_for(lock, head->slots);
		if (!fits(lock, head))
			break;
		if (!is_waiting(head))
		{
			Oid			role = head->role;

			wake_later(wakeups, head, DLOCK_EVENT_EXPIRED);
			if (!dlock_lease_ticket_ended(lease_ticket(head), DLOCK_LEAVING))
				break;
			dlock_list_remove(&lock->queue, &head->link);
			dlock_ticket_set_state(head, DLOCK_GONE);
			pass_entry(lock, role);
			continue;
		}
		if (now == 0)
			now = GetCurrentTimestamp();
		grant_head(lock, head, now, wakeups);
	}
	if (head && is_waiting(head))
		notify_holders_wanted(space, lock, &wakeups->space);
}

/* Take a ticket out of the lock, and grant to waiters that fit now. */
static void
leave(DlockLock *lock, DlockTicket *ticket, DlockWakeups *wakeups)
{
	/* read these now: a GONE ticket can be freed at any time */
	DlockSpace *space = dlock_space_at(ticket->space);
	Oid			role = ticket->role;

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
		if (closes_lock(ticket))
			lock->closed--;
		dlock_count_ticket(ticket, DLOCK_COUNT_RELEASED, 1);
		if (unlikely(dlock_state_of(ticket) == DLOCK_ENDING))
			dlock_count_ticket(ticket, DLOCK_COUNT_HELD, 1);
	}
	dlock_ticket_set_state(ticket, DLOCK_GONE);
	pass_entry(lock, role);
	dlock_queue_grant_waiters(space, lock, wakeups);
}

#ifdef COMPAT_CHECKS
/* If a lock has more tickets than this, its lists are not checked. */
#define MAX_CHECKED	64

static void
check_list(const DlockList *list)
{
	uint32		length = 0;
	dsa_pointer prev = InvalidDsaPointer;

	foreach_ticket(ticket, list)
	{
		Assert(ticket->link.prev == prev);
		Assert(prev == InvalidDsaPointer ||
			   ticket_at(prev)->number < ticket->number);
		prev = dlock_pointer(ticket);
		length++;
	}
	Assert(list->tail == prev && list->length == length);
}

static void
check_holders(const DlockLock *lock)
{
	int64		permits = 0;
	uint32		exclusive = 0;
	uint32		closed = 0;

	foreach_ticket(ticket, &lock->holders)
	{
		Assert(dlock_state_of(ticket) == DLOCK_GRANTED ||
			   dlock_state_of(ticket) == DLOCK_ENDING);
		permits += ticket->permits;
		exclusive += ticket->mode == DLOCK_EXCLUSIVE ? 1 : 0;
		closed += closes_lock(ticket) ? 1 : 0;
	}
	Assert(lock->permits == permits && lock->exclusive == exclusive &&
		   lock->closed == closed);
	/* I1 */
	Assert(exclusive == 0 || (exclusive == 1 && lock->holders.length == 1));
}

/* Check I1 to I4, but I2 only if the head is not a lease's ticket. */
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
		Assert(dlock_state_of(head) == DLOCK_WAITING && !fits(lock, head));
}
#else
#define check_lock(lock)	((void) 0)
#endif

/* Release the entry's lock; remove the entry if it is unused (I4). */
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

static bool
has_waiting(const DlockLock *lock)
{
	foreach_ticket(ticket, &lock->queue)
	{
		if (is_waiting(ticket))
			return true;
	}
	return false;
}

/* Will a ticket fit once the ended tickets of leases have left? */
static bool
fits_soon(const DlockLock *lock, const DlockTicket *ticket)
{
	int64		permits = ticket->permits;

	if (has_waiting(lock) ||
		(ticket->mode == DLOCK_SLOTS && permits > lock->slots))
		return false;
	/* without leases' tickets, skip a walk that can be long */
	if (!lock->leased)
		return fits(lock, ticket);
	if (ticket->mode == DLOCK_SHARED && lock->exclusive == 0 && lock->closed == 0)
		return true;
	foreach_ticket(holder, &lock->holders)
	{
		if (is_leaving(holder))
			continue;
		if (ticket->mode == DLOCK_EXCLUSIVE || holder->mode == DLOCK_EXCLUSIVE ||
			closes_lock(holder))
			return false;
		permits += holder->permits;
		if (ticket->mode == DLOCK_SLOTS && permits > lock->slots)
			return false;
	}
	return true;
}

/* Give a lock these slots; returns false if it is in use with other slots. */
static bool
agree_on_slots(DlockLock *lock, int32 requested)
{
	int32		slots = slots_for(lock, requested);

	if (likely(lock->slots == slots))
		return true;
	foreach_ticket(holder, &lock->holders)
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
 * Draw a ticket's number, and decide whether the ticket is granted or queued;
 * the caller must then call enter().  If "nowait" is set, the ticket is queued
 * only if it will fit once ended tickets have left.
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
	/* the worker may have put off a removal for which no ticket waited */
	if (lock->leased && lock->queue.length == 0 &&
		dlock_worker_comes(space))
		*to_wake = space;
	return DLOCK_JOIN_QUEUED;
}

/* Enter a ticket.  If a lease has adopted it, the state is already set. */
static void
enter(DlockLock *lock, DlockTicket *ticket, DlockJoin outcome)
{
	if (outcome == DLOCK_JOIN_GRANTED)
	{
		hold(lock, ticket);
		dlock_count_ticket(ticket, DLOCK_COUNT_ACQUIRED, 1);
	}
	else
		dlock_list_append(&lock->queue, &ticket->link);
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
 * Join a lock with this session's spare ticket.  If the outcome is neither
 * GRANTED nor QUEUED, or if error 53200 is raised, nothing has changed.
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
	{
		enter(lock, ticket, joined.outcome);
		dlock_ticket_joined(ticket);
	}
	if (joined.outcome == DLOCK_JOIN_GRANTED &&
		DsaPointerIsValid(ticket->announcement))
		dlock_announcement_event(ticket, DLOCK_EVENT_GRANTED);
	joined.lock = lock;
	dlock_queue_let_go(lock);
	if (unlikely(to_wake != NULL))
		(void) dlock_worker_wake(to_wake);
	return joined;
}

/* Will a ticket be granted once the only holder's row is removed (I17)? */
static bool
is_heir(const DlockLock *lock, const DlockTicket *ticket)
{
	DlockTicket *holder = ticket_at(lock->holders.head);

	return ticket->mode == DLOCK_EXCLUSIVE && lock->queue.length == 0 &&
		lock->holders.length == 1 && lock->closed == 0 &&
		is_lease_ticket(holder) && lease_ticket(holder)->leaves;
}

/*
 * A lease's ticket is about to enter: add the lock's reference to the ticket.
 * The lease adopts the ticket if "adopt" is set or the ticket is an heir.
 * Returns false if "adopt" is set and the lease is gone.
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

/* Join for request->lease, unless the request already has a ticket (I14). */
DlockJoined
dlock_queue_join_for_lease(DlockSpace *space, const DlockRequest *request,
						   DlockLeaseTicket *ticket, bool nowait, bool adopt)
{
	DlockJoined joined = {.outcome = DLOCK_JOIN_MISMATCH};
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_insert(&request->key, request->slots,
										 ticket->ticket.role);
	bool		agrees;

	/* a repeated request gets its ticket even if slots were set in between */
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
	dlock_queue_let_go_and_wake(lock, &wakeups);
	return joined;
}

/*
 * After a wait, let the lease adopt this backend's ticket, unless it has been
 * adopted for another client.  Returns false if the ticket or lease is gone.
 */
bool
dlock_queue_adopt(DlockLeaseTicket *ticket)
{
	DlockLock  *lock = dlock_lock_find(&ticket->key);
	bool		adopted;

	if (lock == NULL)
		return false;
	adopted = dlock_state_of(&ticket->ticket) == DLOCK_GRANTED &&
		(is_lease_ticket(&ticket->ticket) ||
		 dlock_lease_ticket_adopt(ticket, DLOCK_GRANTED, false));
	dlock_queue_let_go(lock);
	return adopted;
}

/*
 * Load a ticket, after all older tickets.  Returns false if the ticket would
 * break exclusion, or hold exclusively while an older ticket waits (I22).
 * If this returns false or raises 53200, nothing has changed.
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
		/* wall time, because the monotonic clock restarts at a reboot */
		dlock_ticket_begin_wait(&ticket->ticket,
								Max(GetCurrentTimestamp() -
									ticket->ticket.enqueued_at, 0));
		dlock_list_append(&lock->queue, &ticket->ticket.link);
	}
	else
	{
		if (lock->holders.length == 0)
			lock->slots = slots_for(lock, ticket->ticket.slots);
		hold(lock, &ticket->ticket);
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

/* After all tickets are loaded, grant to heads that fit.  Can be repeated. */
void
dlock_queue_resume(DlockSpace *space)
{
	DlockLockScan scan;
	DlockWakeups wakeups = {0};
	DlockLock  *lock;

	dlock_lock_scan_begin(&scan, &space->key, true);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
		dlock_queue_grant_waiters(space, lock, &wakeups);
	dlock_lock_scan_end(&scan);
	dlock_wakeups_send(&wakeups);
}

/*
 * End a ticket that is WAITING or GRANTED, or ENDING without pins.  Tell the
 * owner "event", unless it is 0.  A ticket with a pin or a row leaves later.
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
			leave(lock, ticket, wakeups);
		else
			dlock_ticket_set_state(ticket, DLOCK_ENDING);
		/* change "lost" after the state: the owner reads "lost" first (I10) */
		if (event != 0)
			pg_atomic_fetch_add_u32(&dlock_backends[procno].lost, 1);
		return;
	}
	at_once = dlock_lease_ticket_ended(lease_ticket(ticket), is_queued(ticket) ?
									   DLOCK_LEAVING : DLOCK_ENDING);
	/* test this after the mark: if the worker comes, it will see the mark */
	if (event != 0 || lock->queue.length > 0 ||
		pg_atomic_read_u32(&space->watches) > 0 || !dlock_worker_comes(space))
		wakeups->space = space;
	if (at_once)
		leave(lock, ticket, wakeups);
	else if (lease_ticket(ticket)->in_closed && !lease_ticket(ticket)->closes)
	{
		lease_ticket(ticket)->closes = true;
		lock->closed++;
	}
}

/* End a ticket, unless it has ended or a call still claims it. */
static void
end_unclaimed(DlockLock *lock, DlockLeaseTicket *ticket, DlockWakeups *wakeups)
{
	if (!dlock_state_has_ended(dlock_state_of(&ticket->ticket)) &&
		pg_atomic_read_u32(&ticket->claims) == 0)
		dlock_queue_end_ticket(lock, &ticket->ticket, 0, wakeups);
}

/*
 * End a ticket of this backend, held or waiting, unless it is gone.  A pinned
 * ticket is ENDING until its last pin is removed.  A ticket stays if its
 * lease has adopted it for another client.  The ticket has joined "lock",
 * whose entry exists as long as the ticket is not GONE (I7).
 *
 * Raises nothing and allocates nothing: error and exit paths call this.
 */
void
dlock_queue_leave(const DlockKey *key, DlockTicket *ticket, DlockLock *lock)
{
	DlockWakeups wakeups = {0};

	if (unlikely(dlock_state_of(ticket) == DLOCK_GONE))
	{
		/* see dlock_ticket_set_state() */
		pg_memory_barrier();
		return;
	}
	dlock_lock_enter(key);
	/* another process may have ended the ticket in between */
	if (unlikely(dlock_state_of(ticket) == DLOCK_GONE))
	{
		dlock_lock_leave(key);
		return;
	}
	Assert(dlock_key_equal(&lock->key, key));
	if (unlikely(is_lease_ticket(ticket)))
	{
		pg_atomic_fetch_sub_u32(&lease_ticket(ticket)->claims, 1);
		end_unclaimed(lock, lease_ticket(ticket), &wakeups);
	}
	else
		dlock_queue_end_ticket(lock, ticket, 0, &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
}

/* End a lease's ticket; returns false if it had ended.  Raises nothing. */
bool
dlock_queue_end(DlockLeaseTicket *ticket, uint32 event)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key);
	bool		is_there;

	if (lock == NULL)
		return false;
	is_there = !dlock_state_has_ended(dlock_state_of(&ticket->ticket));
	if (is_there)
		dlock_queue_end_ticket(lock, &ticket->ticket, event, &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
	return is_there;
}

/*
 * Claim another call's ticket, so that the ticket stays if that call fails.
 * If "adopt" is set, the ticket's lease adopts it.  If a session waits with
 * the ticket, the session then waits as for any lease's ticket.  Returns false
 * if the ticket or its lease is gone.  The caller must wake the worker.
 */
bool
dlock_queue_claim(DlockLeaseTicket *ticket, bool adopt)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key);
	DlockState	state;
	bool		is_there;

	if (lock == NULL)
		return false;
	state = dlock_state_of(&ticket->ticket);
	is_there = !dlock_state_has_ended(state);
	if (is_there && adopt && !is_lease_ticket(&ticket->ticket))
	{
		wake_later(&wakeups, &ticket->ticket, 0);
		is_there = dlock_lease_ticket_adopt(ticket, state, false);
	}
	if (is_there)
		pg_atomic_fetch_add_u32(&ticket->claims, 1);
	dlock_queue_let_go_and_wake(lock, &wakeups);
	return is_there;
}

/* Drop a failed call's claim, and end the ticket if no claim is left. */
void
dlock_queue_withdraw(DlockLeaseTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock;

	pg_atomic_fetch_sub_u32(&ticket->claims, 1);
	lock = dlock_lock_find(&ticket->key);
	if (lock == NULL)
		return;
	end_unclaimed(lock, ticket, &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
}

/* Take an ended ticket out of its lock (I15). */
void
dlock_queue_finish(DlockLeaseTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(&ticket->key);
	DlockState	state;

	if (lock == NULL)
		return;
	state = dlock_state_of(&ticket->ticket);
	if (state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && ticket->ticket.pins == 0))
		leave(lock, &ticket->ticket, &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
}

/* Pin a ticket (I24).  Returns false if the ticket does not hold. */
bool
dlock_queue_pin(const DlockKey *key, DlockTicket *ticket)
{
	DlockLock  *lock = dlock_lock_find(key);
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
 * The event to tell when an ENDING ticket loses its last pin: RELEASED if a
 * session's ticket was ended by force, else 0.  A lease's owner knows already.
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

/* Remove a pin; the last one lets an ENDING ticket end.  Raises nothing. */
void
dlock_queue_unpin(const DlockKey *key, DlockTicket *ticket)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_find(key);

	/* a pinned ticket keeps its lock's entry */
	Assert(lock != NULL && ticket->pins > 0);
	if (--ticket->pins == 0 && dlock_state_of(ticket) == DLOCK_ENDING)
		dlock_queue_end_ticket(lock, ticket, event_of_unpinning(ticket), &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
}

/* Remove the locks of a space without users. */
void
dlock_queue_purge(const DlockSpaceKey *space)
{
	DlockLockScan scan;

	dlock_lock_scan_begin(&scan, space, false);
	while (dlock_lock_scan_next(&scan) != NULL)
		dlock_lock_scan_remove(&scan);
	dlock_lock_scan_end(&scan);
}
