/*-------------------------------------------------------------------------
 *
 * lease_end.c
 *	  The end of leases, and of their tickets.
 *
 * To end a lease, its tickets are picked one by one, and each is ended through
 * queue.c with the lease lock released in between: an entry's lock comes
 * before it.
 *
 * What has ended is marked, and stays in its lock until the removal of its row
 * is in the WAL.  Then it is settled, by the worker; or at once, if it never
 * had a row.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/memutils.h"

#include "shared/lease.h"
#include "shared/inner.h"

/*
 * Finishing what is over
 */

/* The first ticket that a lease has, referred to; NULL where there is none. */
static DlockLeaseTicket *
first_ticket(DlockSpace *space, DlockLease *lease)
{
	DlockLeaseTicket *ticket;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	ticket = dlock_lease_first_ticket(lease);
	if (ticket)
		dlock_record_ref(&ticket->record);
	LWLockRelease(&space->lease_lock);
	return ticket;
}

/*
 * End the tickets that a lease has; how many these were.
 */
static int64
end_tickets(DlockSpace *space, DlockLease *lease, uint32 event)
{
	DlockLeaseTicket *ticket;
	int64		count = 0;

	while ((ticket = first_ticket(space, lease)) != NULL)
	{
		if (dlock_queue_end(ticket, event))
			count++;
		dlock_record_unref(&ticket->record);
	}
	return count;
}

/*
 * The same, as far as that is done in time; false where some may be left.
 */
static bool
end_tickets_until(DlockSpace *space, DlockLease *lease, uint32 event,
				  uint64 until)
{
	DlockLeaseTicket *ticket;

	while ((ticket = first_ticket(space, lease)) != NULL)
	{
		(void) dlock_queue_end(ticket, event);
		dlock_record_unref(&ticket->record);
		if (dlock_monotonic_now() >= until)
			return false;
	}
	return true;
}

static void
finish_ticket(DlockSpace *space, DlockLeaseTicket *ticket)
{
	DlockRecord *record = &ticket->record;
	DlockLease *lease = dlock_lease_of(ticket);
	bool		was_listed;

	dlock_queue_finish(ticket);
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	record->finished = true;
	LWLockRelease(&space->lease_lock);
	dlock_id_delete(record);
	dlock_announcement_orphan(&ticket->ticket);
	if (lease->single)
		(void) dlock_lease_unlist(space, lease);

	dlock_lease_begin_change(space);
	was_listed = record->listed;
	dlock_journal_unmark(space, record);
	dlock_lease_end_change(space, lease);
	if (!was_listed)
		return;
	ConditionVariableBroadcast(&record->changed);
	dlock_record_unref(record);
}

/*
 * Nothing in the tables stands for this record any more: forget it.  Raises
 * nothing; called by the worker, or, where there is no row, by the backend
 * that has made the record.
 */
static void
finish(DlockSpace *space, DlockRecord *record)
{
	DlockLease *lease;

	if (!record->is_lease)
	{
		finish_ticket(space, dlock_record_ticket(record));
		return;
	}
	lease = dlock_record_lease(record);
	(void) end_tickets(space, lease, 0);
	if (dlock_lease_unlist(space, lease))
		ConditionVariableBroadcast(&record->changed);
}

/*
 * Is its row to be removed, and all the rest of it then?  What is pinned, and
 * what keeps a lock closed, ends later, and is marked again then.  Called with
 * the lease lock.
 */
bool
dlock_lease_is_over(DlockSpace *space, DlockRecord *record)
{
	DlockLeaseTicket *ticket;
	DlockState	state;

	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (record->is_lease)
	{
		DlockLease *lease = dlock_record_lease(record);

		return pg_atomic_read_u64(&lease->deadline) == 0 && !lease->delayed;
	}
	ticket = dlock_record_ticket(record);
	state = dlock_state_of(ticket);
	/* an ENDING ticket is not pinned anew: pins are read after the state */
	pg_read_barrier();
	return state == DLOCK_GONE || state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && ticket->ticket.pins == 0 &&
		 !ticket->in_closed);
}

/*
 * Finish a record if it is over and has no row; returns whether it is.  The
 * worker does so when it has tried to write, and a backend that takes back
 * what was never written.
 */
bool
dlock_lease_settle(DlockSpace *space, DlockRecord *record)
{
	bool		over;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	over = !record->has_row && !record->in_flight &&
		dlock_lease_is_over(space, record);
	LWLockRelease(&space->lease_lock);
	if (over)
		finish(space, record);
	return over;
}

/*
 * A call could not be brought to its end: end the ticket that it has claimed,
 * unless another call has claimed it, too.  Where it has no row, nothing is
 * left of it, and no worker is needed for that.
 */
void
dlock_lease_ticket_withdraw(DlockLeaseTicket *ticket)
{
	dlock_queue_withdraw(ticket);
	(void) dlock_lease_settle(dlock_space_at(ticket->ticket.space),
							  &ticket->record);
}

/*
 * The session that has made a ticket has done with it.  If the lease has
 * adopted it, and this session's claim was the last, and it has no row, then
 * nothing is left of it.
 */
void
dlock_lease_ticket_drop(DlockLeaseTicket *ticket)
{
	if (ticket->ticket.session != 0)
	{
		dlock_lease_ticket_discard(ticket);
		return;
	}
	(void) dlock_lease_settle(dlock_space_at(ticket->ticket.space),
							  &ticket->record);
	dlock_record_unref(&ticket->record);
}

/*
 * Ending
 */

/*
 * A lease is over: wake the sessions that wait to get it a lock, whose tickets
 * are not its own yet.  Who comes to wait later finds it over: he counts himself
 * before he looks, and it was over before this.
 */
static void
wake_waiters(DlockLease *lease)
{
	pg_memory_barrier();
	if (likely(pg_atomic_read_u32(&lease->waiters) == 0))
		return;
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];
		bool		waits;

		if (pg_atomic_read_u64(&backend->session) == 0)
			continue;
		SpinLockAcquire(&backend->mutex);
		waits = backend->wait_ticket != 0 &&
			backend->wait_lease == lease->self;
		SpinLockRelease(&backend->mutex);
		if (waits)
			SetLatch(&GetPGProcByNumber(i)->procLatch);
	}
}

/*
 * A lease is over: end its tickets; how many these were.  Raises nothing.
 */
int64
dlock_lease_end(DlockSpace *space, DlockLease *lease, uint32 event)
{
	int64		count = end_tickets(space, lease, event);

	wake_waiters(lease);
	if (!lease->single)
	{
		dlock_lease_begin_change(space);
		dlock_journal_mark(space, &lease->record);
		dlock_lease_end_change(space, lease);
	}
	dlock_worker_wake(space);
	return count;
}

/*
 * Close a lease: how many tickets it released, -1 where it was gone.
 */
int64
dlock_lease_release(DlockSpace *space, int64 number)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease = dlock_lease_find(space, number);
	int64		count = -1;

	if (lease && dlock_lease_claim(lease))
		count = dlock_lease_end(space, lease, 0);
	dlock_record_end_uses(before);
	return count;
}

/* Tickets that a delay lets go of while the lease lock is held */
#define STEP	256

/*
 * A lease's locks are not kept closed any more, as far as that is done in time;
 * false where some may be left.  Its delay is over by then for whoever looks at
 * it: so where this one does not come to the end, the worker does.
 */
static bool
end_delay(DlockSpace *space, DlockLease *lease, uint64 until)
{
	DlockLeaseTicket *ticket;

	do
	{
		dlock_lease_begin_change(space);
		for (int n = 0; n < STEP &&
			 (ticket = dlock_lease_first_closed(lease)) != NULL; n++)
		{
			dlock_lease_ticket_unlist(lease, ticket);
			dlock_journal_mark(space, &ticket->record);
		}
		ticket = dlock_lease_first_closed(lease);
		if (ticket == NULL && lease->delayed)
		{
			/* last, as it is over only when all of it is done */
			lease->delayed = false;
			dlock_journal_mark(space, &lease->record);
		}
		dlock_lease_end_change(space, lease);
	} while (ticket != NULL && dlock_monotonic_now() < until);
	return ticket == NULL;
}

/* Numbers of leases, with room for so many */
typedef struct Numbers
{
	int64	   *numbers;
	uint64		count;
	uint64		max;
} Numbers;

static bool
take_number(DlockLease *lease, void *arg)
{
	Numbers    *all = arg;

	if (all->count == all->max)
		return false;
	all->numbers[all->count++] = lease->number;
	return true;
}

/*
 * End a lease, or, where it is over, the delay that keeps its locks closed: how
 * many tickets that released, -1 where there is nothing to end.
 */
static int64
force_end(DlockSpace *space, DlockLease *lease, bool *was_open)
{
	int64		count = -1;
	bool		delayed;

	*was_open = dlock_lease_claim(lease);
	if (*was_open)
		return dlock_lease_end(space, lease, DLOCK_EVENT_RELEASED);
	dlock_lease_begin_change(space);
	/* what ran out is not to be delayed by whoever ends its tickets */
	dlock_lease_be_over(lease, false);
	delayed = lease->delayed;
	if (delayed)
	{
		count = (int64) lease->closed.length + (int64) lease->tickets.length;
		lease->delay_ends = 0;
	}
	if (!lease->single)
		dlock_journal_mark(space, &lease->record);
	dlock_lease_end_change(space, lease);
	if (delayed)
		(void) end_delay(space, lease, PG_UINT64_MAX);
	(void) dlock_worker_wake(space);
	return count;
}

/* The same by its number, whoever asks */
int64
dlock_lease_force(DlockSpace *space, int64 number)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *ticket;
	bool		was_open;
	int64		count;

	dlock_id_find(space, number, &lease, &ticket);
	count = lease ? force_end(space, lease, &was_open) : -1;
	dlock_record_end_uses(before);
	return count;
}

/*
 * End all leases that there are at this moment, and the delays of those that
 * are over; how many were open.
 */
int64
dlock_lease_end_all(DlockSpace *space)
{
	Numbers		all = {.max = space->leases.length + 64};
	int64		count = 0;

	all.numbers = MemoryContextAllocHuge(CurrentMemoryContext,
										 all.max * sizeof(int64));
	dlock_lease_for_each(space, LW_SHARED, take_number, &all);
	for (uint64 i = 0; i < all.count; i++)
	{
		int			before = dlock_record_begin_uses();
		DlockLease *lease;
		DlockLeaseTicket *ticket;
		bool		was_open;

		CHECK_FOR_INTERRUPTS();
		dlock_id_find(space, all.numbers[i], &lease, &ticket);
		if (lease)
			(void) force_end(space, lease, &was_open);
		if (lease && was_open)
			count++;
		dlock_record_end_uses(before);
	}
	pfree(all.numbers);
	(void) dlock_worker_wake(space);
	return count;
}

/*
 * For the worker: end the lease if it is due, and its delay if that is.
 * Returns when to look again, in monotonic microseconds; 0: never.  At once,
 * where it has so many tickets that they could not all be ended "until" then, or
 * let go of by its delay.
 * Where it has run out, and nobody has said so yet, *expiry is what to say, and
 * its "lease" not 0.
 *
 * A lease that is over is looked through again as well, since whoever ended it
 * may have died in between.
 */
uint64
dlock_lease_expire(DlockLease *lease, uint64 until, DlockExpiry *expiry)
{
	DlockSpace *space = dlock_space_at(lease->space);
	uint64		now = dlock_monotonic_now();
	uint64		due;
	uint64		delay_ends;
	bool		delayed;

	expiry->lease = 0;
	if (!lease->single && dlock_lease_is_attached(lease) &&
		pg_atomic_read_u64(&dlock_backends[lease->procno].session) != lease->session)
		/* its session is gone without having said so */
		(void) dlock_lease_detach(lease);
	due = dlock_lease_deadline(lease);
	if (due != 0)
		return due == DLOCK_NO_DEADLINE ? now + dlock_lease_ttl(lease) : due;
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	dlock_lease_be_over(lease, false);
	if (lease->ran_out)
		dlock_expiry_fill(expiry, lease);
	lease->ran_out = false;
	LWLockRelease(&space->lease_lock);
	wake_waiters(lease);
	if (!end_tickets_until(space, lease, DLOCK_EVENT_EXPIRED, until))
		return now;

	dlock_lease_begin_change(space);
	delayed = lease->delayed;
	delay_ends = delayed && lease->closed.length > 0 ? lease->delay_ends : 0;
	if (!lease->single)
		dlock_journal_mark(space, &lease->record);
	dlock_lease_end_change(space, lease);
	if (delay_ends > now)
		return delay_ends;
	return !delayed || end_delay(space, lease, until) ? 0 : now;
}

static bool
take_first(DlockLease *lease, void *arg)
{
	dlock_record_ref(&lease->record);
	*(DlockLease **) arg = lease;
	return false;
}

/* Whether there is a row does not matter any more. */
static void
forget_row(DlockSpace *space, DlockRecord *record)
{
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	record->has_row = record->in_flight = false;
	LWLockRelease(&space->lease_lock);
}

/*
 * Nothing can be written any more.  What is over goes, the rest is left to
 * those who use it.
 */
static void
abandon_journal(DlockSpace *space)
{
	dlock_journal_fail(space, ERRCODE_UNDEFINED_OBJECT);
	for (;;)
	{
		DlockRecord *record = NULL;

		LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
		if (DsaPointerIsValid(space->journal.head))
		{
			record = dlock_record_at(space->journal.head);
			dlock_record_ref(record);
			record->has_row = record->in_flight = false;
		}
		LWLockRelease(&space->lease_lock);
		if (record == NULL)
			break;
		if (!dlock_lease_settle(space, record))
		{
			LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
			dlock_journal_unmark(space, record);
			LWLockRelease(&space->lease_lock);
		}
		dlock_record_unref(record);
	}
}

/*
 * The tables are gone, and with them all leases: whoever waits for one of
 * their locks, in what is left of this space, is granted it.  Called by the
 * worker, as its last work.
 */
void
dlock_lease_abandon(DlockSpace *space)
{
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	while (lease = NULL,
		   dlock_lease_for_each(space, LW_SHARED, take_first, &lease), lease)
	{
		forget_row(space, &lease->record);
		(void) end_delay(space, lease, PG_UINT64_MAX);
		pg_atomic_write_u64(&lease->deadline, 0);
		while ((ticket = first_ticket(space, lease)) != NULL)
		{
			forget_row(space, &ticket->record);
			(void) dlock_queue_end(ticket, DLOCK_EVENT_EXPIRED);
			(void) dlock_lease_settle(space, &ticket->record);
			dlock_record_unref(&ticket->record);
		}
		(void) dlock_lease_unlist(space, lease);
		dlock_record_unref(&lease->record);
	}
	abandon_journal(space);
}
