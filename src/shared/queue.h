/*-------------------------------------------------------------------------
 *
 * queue.h
 *	  For the files that change or read locks: queue*.c.
 *
 * Functions need the entry's lock, except dlock_wakeups_send().  None fails.
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

/* Does the lock count the ticket as one that closes it (I16)? */
static inline bool
closes_lock(DlockTicket *ticket)
{
	return is_lease_ticket(ticket) && lease_ticket(ticket)->closes;
}

#define foreach_ticket(ticket, list) \
	for (DlockTicket *ticket = ticket_at((list)->head); ticket; \
		 ticket = ticket_at(ticket->link.next))

static inline bool
is_queued(DlockTicket *ticket)
{
	DlockState	state = dlock_state_of(ticket);

	return state == DLOCK_WAITING || state == DLOCK_LEAVING;
}

/* Is a ticket in this state, and is its lease, if any, open? */
static inline bool
counts_as(DlockTicket *ticket, DlockState state)
{
	return dlock_state_of(ticket) == state &&
		(!is_lease_ticket(ticket) ||
		 dlock_lease_ticket_is_live(lease_ticket(ticket)));
}

static inline bool
is_waiting(DlockTicket *ticket)
{
	return counts_as(ticket, DLOCK_WAITING);
}

/* A ticket that only a pin or a delay keeps does not hold. */
static inline bool
is_holding(DlockTicket *ticket)
{
	return counts_as(ticket, DLOCK_GRANTED);
}

/*
 * Is a holder about to leave?  A holder that a pin or a delay keeps is not.
 * Until a holder has left, fits() counts it.
 */
static inline bool
is_leaving(DlockTicket *ticket)
{
	return !is_holding(ticket) && ticket->pins == 0 &&
		!(is_lease_ticket(ticket) &&
		  dlock_lease_ticket_is_delayed(lease_ticket(ticket)));
}

/* The slots set in dlock_slots or, if none are set, those requested */
static inline int32
slots_for(const DlockLock *lock, int32 slots)
{
	return slots > 0 && lock->set_slots > 0 ? lock->set_slots : slots;
}

/* The ticket with this number, or NULL.  Lists are sorted by number (I3). */
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

/* Processes to wake after releasing the entry's lock; NULL: none */
typedef struct DlockWakeups
{
	DlockSpace *space;			/* whose worker to wake */
	DlockLeaseTicket *heir;		/* whose session to wake; with a reference */
	DlockSpace *outbox;			/* whose sender to wake */
	int			count;
	int			procnos[8];
} DlockWakeups;

/*
 * Count a change of a lock's holders for watchers, before the change.  Sets
 * *to_wake to the space if the space's worker must be woken.
 */
static inline void
dlock_queue_note_change(const DlockLock *lock, DlockSpace **to_wake)
{
	if (unlikely(dlock_lock_partition(&lock->key)->watched.count > 0))
		dlock_watch_count_change(&lock->key, to_wake);
}

/* Does something other than tickets keep the entry (I4)? */
static inline bool
dlock_lock_is_kept(const DlockLock *lock)
{
	return lock->set_slots != 0 || lock->setters != 0 || lock->settled;
}

/* Can the entry be removed (I4)? */
static inline bool
dlock_lock_is_unused(const DlockLock *lock)
{
	return lock->holders.length == 0 && lock->queue.length == 0 &&
		!dlock_lock_is_kept(lock);
}

extern void dlock_wakeups_send(DlockWakeups *wakeups);
extern void dlock_queue_let_go(DlockLock *lock);
extern void dlock_queue_grant_all(DlockSpace *space, DlockLock *lock,
								  DlockWakeups *wakeups);
extern void dlock_queue_end_ticket(DlockLock *lock, DlockTicket *ticket,
								   uint32 event, DlockWakeups *wakeups);

static inline void
dlock_queue_let_go_and_wake(DlockLock *lock, DlockWakeups *wakeups)
{
	dlock_queue_let_go(lock);
	dlock_wakeups_send(wakeups);
}

/* Called after each change that may let a waiting ticket fit (I2) */
static inline void
dlock_queue_grant_waiters(DlockSpace *space, DlockLock *lock,
						  DlockWakeups *wakeups)
{
	if (unlikely(DsaPointerIsValid(lock->queue.head)))
		dlock_queue_grant_all(space, lock, wakeups);
}

#endif							/* DLOCK_QUEUE_H */
