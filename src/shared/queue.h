/*-------------------------------------------------------------------------
 *
 * queue.h
 *	  What the files of locks share: queue.c, which changes them; queue_change.c
 *	  and queue_slots.c, which build on it; and queue_view.c, which reads them.
 *
 * All of this needs the lock of the ticket's entry, and raises nothing.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_QUEUE_H
#define DLOCK_QUEUE_H

#include "shared/inner.h"

static inline DlockTicket *
ticket_at(dsa_pointer pointer)
{
	return DsaPointerIsValid(pointer) ? dlock_address(pointer) : NULL;
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
static inline bool
is_queued(DlockTicket *ticket)
{
	DlockState	state = state_of(ticket);

	return state == DLOCK_WAITING || state == DLOCK_LEAVING;
}

/* Does one of the queue wait?  Not where its lease has run out. */
static inline bool
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
static inline bool
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
static inline bool
is_leaving(DlockTicket *ticket)
{
	return !is_holding(ticket) && ticket->pins == 0 &&
		!(is_lease_ticket(ticket) &&
		  dlock_lease_ticket_is_delayed(lease_ticket(ticket)));
}

/*
 * The slots of a lock for a request, or a ticket, that gives some: what was set for
 * the lock, if anything was.
 */
static inline int32
slots_for(const DlockLock *lock, int32 slots)
{
	return slots > 0 && lock->set_slots > 0 ? lock->set_slots : slots;
}

/* A ticket by its number.  Both lists are in the order of numbers (I3). */
static inline DlockTicket *
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

/* Whom to wake once the entry's lock is free */
typedef struct DlockWakeups
{
	DlockSpace *space;			/* its worker; or NULL */
	DlockLeaseTicket *heir;		/* who waits for it, and refer to it; or NULL */
	DlockSpace *outbox;			/* its sender; or NULL */
	int			count;
	int			procnos[8];
} DlockWakeups;

/* The holders of a lock change, or what its watchers are told of them. */
static inline void
dlock_queue_note_change(const DlockLock *lock, DlockSpace **to_wake)
{
	DlockSpace *space = dlock_watch_note_change(&lock->key);

	if (unlikely(space != NULL))
		*to_wake = space;
}

/* Is there no reason to keep an entry?  I4. */
static inline bool
dlock_lock_is_unused(const DlockLock *lock)
{
	return lock->holders.length == 0 && lock->queue.length == 0 &&
		lock->set_slots == 0 && lock->setters == 0 && !lock->settled;
}

extern void dlock_wakeups_send(DlockWakeups *wakeups);
extern void dlock_queue_let_go(DlockLock *lock);
extern void dlock_queue_grant_all(DlockSpace *space, DlockLock *lock,
								  DlockWakeups *wakeups);
extern void dlock_queue_end_ticket(DlockLock *lock, DlockTicket *ticket,
								   uint32 event, DlockWakeups *wakeups);

/* A ticket has left, or what fits has changed: grant what fits (I2). */
static inline void
dlock_queue_grant_waiters(DlockSpace *space, DlockLock *lock,
						  DlockWakeups *wakeups)
{
	if (unlikely(DsaPointerIsValid(lock->queue.head)))
		dlock_queue_grant_all(space, lock, wakeups);
}

#endif							/* DLOCK_QUEUE_H */
