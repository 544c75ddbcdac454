/*-------------------------------------------------------------------------
 *
 * lease_end.c
 *	  The end of leases and of their tickets, and the loading of tickets.
 *
 * An entry's lock must be taken before the lease lock.  So a lease's tickets
 * are picked one by one and ended through queue.c.  A ticket without a row
 * leaves its lock at once.  A ticket with a row is marked for the worker, and
 * stays until the removal of the row is in the WAL (dlock_lease_settle()).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/memutils.h"

#include "shared/lease.h"

/* A lease's first ticket, with a new reference; or NULL */
static DlockLeaseTicket *
first_ticket(DlockSpace *space, DlockLease *lease)
{
	DlockLeaseTicket *ticket;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	ticket = dlock_ticket_in_lease(lease->tickets.head);
	if (ticket)
		dlock_record_ref(&ticket->record);
	LWLockRelease(&space->lease_lock);
	return ticket;
}

/* End all tickets of a lease; returns false if "until" came first. */
static bool
end_tickets(DlockSpace *space, DlockLease *lease, uint32 event, uint64 until)
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

/* Forget a record that is over and has no row.  Raises nothing. */
static void
finish_record(DlockSpace *space, DlockRecord *record)
{
	DlockLease *lease;

	if (!record->is_lease)
	{
		finish_ticket(space, dlock_record_ticket(record));
		return;
	}
	lease = dlock_record_lease(record);
	(void) end_tickets(space, lease, 0, PG_UINT64_MAX);
	if (dlock_lease_unlist(space, lease))
		ConditionVariableBroadcast(&record->changed);
}

/* Is a record over, and does no pin or delay keep its row? */
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
	state = dlock_state_of(&ticket->ticket);
	/* read the pins after the state: an ENDING ticket gets no new pin */
	pg_read_barrier();
	return state == DLOCK_GONE || state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && ticket->ticket.pins == 0 &&
		 !ticket->in_closed);
}

/*
 * If a record is over and has no row, finish it and return true.  The worker
 * calls this after a write, and a backend after it has ended a record.
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
		finish_record(space, record);
	return over;
}

/* End a failed call's ticket, unless another call has claimed the ticket. */
void
dlock_lease_ticket_withdraw(DlockLeaseTicket *ticket)
{
	dlock_queue_withdraw(ticket);
	(void) dlock_lease_settle(dlock_space_at(ticket->ticket.space),
							  &ticket->record);
}

/*
 * A session drops the ticket that it made.  If no lease has adopted the
 * ticket, it is GONE.  If so, wake the other calls for the same request, which
 * wait for a change of the ticket, and drop the lock's reference.
 */
void
dlock_lease_ticket_drop(DlockLeaseTicket *ticket)
{
	if (ticket->ticket.session == 0)
		(void) dlock_lease_settle(dlock_space_at(ticket->ticket.space),
								  &ticket->record);
	else
	{
		ConditionVariableBroadcast(&ticket->record.changed);
		dlock_record_unref(&ticket->record);
	}
	dlock_record_unref(&ticket->record);
}

/*
 * A lease is over: wake the sessions that wait on its behalf.  A session
 * counts itself in "waiters" before it checks whether the lease is open.
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
			backend->wait_lease == dlock_pointer(lease);
		SpinLockRelease(&backend->mutex);
		if (waits)
			SetLatch(&GetPGProcByNumber(i)->procLatch);
	}
}

/* End the tickets of a lease that is over.  Raises nothing. */
static void
end_lease(DlockSpace *space, DlockLease *lease, uint32 event)
{
	(void) end_tickets(space, lease, event, PG_UINT64_MAX);
	wake_waiters(lease);
	if (!lease->single)
	{
		dlock_lease_begin_change(space);
		dlock_journal_mark(space, &lease->record);
		dlock_lease_end_change(space, lease);
	}
	dlock_worker_wake(space);
}

/* The call that opened a lease has failed: end the lease. */
void
dlock_lease_withdraw(DlockLease *lease)
{
	DlockSpace *space = dlock_space_at(lease->space);

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	dlock_lease_be_over(lease, true);
	LWLockRelease(&space->lease_lock);
	end_lease(space, lease, 0);
	(void) dlock_lease_settle(space, &lease->record);
}

/* Close a lease; returns how many tickets this ended, or -1 if it was gone. */
int64
dlock_lease_release(DlockSpace *space, int64 number)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease = dlock_lease_find(space, number);
	int64		count = lease ? dlock_lease_claim(lease) : -1;

	if (count >= 0)
		end_lease(space, lease, 0);
	dlock_record_end_uses(before);
	return count;
}

/* Tickets that end_delay() releases each time it takes the lease lock */
#define STEP	256

/*
 * End a lease's delay, which keeps locks closed; returns false if "until" came
 * first.  Then another process can continue, because delay_ends has passed.
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
			/* clear it last, when the delay keeps no ticket any more */
			lease->delayed = false;
			dlock_journal_mark(space, &lease->record);
		}
		dlock_lease_end_change(space, lease);
	} while (ticket != NULL && dlock_monotonic_now() < until);
	return ticket == NULL;
}

static int64
end_lease_by_force(DlockSpace *space, DlockLease *lease, bool *was_open)
{
	int64		count = dlock_lease_claim(lease);
	bool		delayed;

	*was_open = count >= 0;
	if (*was_open)
	{
		end_lease(space, lease, DLOCK_EVENT_RELEASED);
		return count;
	}
	dlock_lease_begin_change(space);
	/* begin a delay that is due, so that it is ended here, too */
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

/*
 * End a lease or, if it is over, its delay, without a check of rights.
 * Returns how many tickets this released, or -1 if there was nothing to end.
 */
int64
dlock_lease_force(DlockSpace *space, int64 number, bool *was_open)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *ticket;
	int64		count = -1;

	*was_open = false;
	dlock_id_find(space, number, &lease, &ticket);
	if (lease)
		count = end_lease_by_force(space, lease, was_open);
	dlock_record_end_uses(before);
	return count;
}

/* End all leases and their delays; returns how many leases were open. */
int64
dlock_lease_end_all(DlockSpace *space)
{
	Size		max = space->leases.length + 64;
	int64	   *numbers = MemoryContextAllocHuge(CurrentMemoryContext,
												 max * sizeof(int64));
	DlockLease *lease = NULL;
	Size		found = 0;
	int64		count = 0;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	while (found < max && (lease = dlock_lease_next(space, lease)) != NULL)
		numbers[found++] = lease->number;
	LWLockRelease(&space->lease_lock);
	for (Size i = 0; i < found; i++)
	{
		bool		was_open;

		CHECK_FOR_INTERRUPTS();
		(void) dlock_lease_force(space, numbers[i], &was_open);
		count += was_open ? 1 : 0;
	}
	pfree(numbers);
	return count;
}

/*
 * For the worker: end a lease if it is due, and its delay if delay_ends has
 * passed.  Complete an end that another process has begun.  Returns the
 * monotonic time of the next look: 0 for never, the current time if "until"
 * came first.  If the caller must log that the lease ran out, *expiry
 * describes the lease; otherwise expiry->lease is 0.
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
		/* the session died without detaching the lease */
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
	if (!end_tickets(space, lease, DLOCK_EVENT_EXPIRED, until))
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

/* The first lease of a space, with a new reference; or NULL */
static DlockLease *
first_lease(DlockSpace *space)
{
	DlockLease *lease;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	lease = dlock_lease_next(space, NULL);
	if (lease)
		dlock_record_ref(&lease->record);
	LWLockRelease(&space->lease_lock);
	return lease;
}

/*
 * Empty the journal, because the tables are gone.  Finish the records that are
 * over, and leave the others to the processes that use them.
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
 * The tables were dropped, so end all leases.  Sessions that still wait get
 * the locks.  This is the worker's last action.
 */
void
dlock_lease_abandon(DlockSpace *space)
{
	DlockLease *lease;

	while ((lease = first_lease(space)) != NULL)
	{
		(void) end_delay(space, lease, PG_UINT64_MAX);
		pg_atomic_write_u64(&lease->deadline, 0);
		(void) end_tickets(space, lease, DLOCK_EVENT_EXPIRED, PG_UINT64_MAX);
		(void) dlock_lease_unlist(space, lease);
		dlock_record_unref(&lease->record);
	}
	abandon_journal(space);
}

/* Load a ticket; returns false if dlock_queue_restore() refuses it. */
bool
dlock_lease_ticket_restore(DlockLeaseTicket *ticket, bool granted)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);
	volatile bool fits = false;

	ticket->ticket.session = 0;
	ticket->ticket.procno = 0;
	ticket->ticket.pid = 0;
	ticket->record.has_row = true;
	ticket->announced = granted;
	/* the grant counts as durable; calls that rely on it wait for the row */
	if (granted)
		pg_atomic_write_u64(&ticket->granted_lsn, FirstNormalUnloggedLSN);
	dlock_id_insert(&ticket->record);
	/* other processes can grant a waiter before its lease is restarted */
	if (lease->single && !lease->delayed)
		pg_atomic_write_u64(&lease->deadline, DLOCK_NO_DEADLINE);
	PG_TRY();
	{
		fits = dlock_queue_restore(ticket, lease->delayed ? DLOCK_ENDING :
								   granted ? DLOCK_GRANTED : DLOCK_WAITING);
	}
	PG_FINALLY();
	{
		if (!fits)
			dlock_id_delete(&ticket->record);
	}
	PG_END_TRY();
	if (!fits)
		return false;

	/* nothing fails from here on */
	dlock_record_ref(&ticket->record);
	if (lease->single)
		dlock_lease_restart(space, lease, false);
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	dlock_lease_ticket_list(lease, ticket, lease->delayed);
	LWLockRelease(&space->lease_lock);
	dlock_announcement_restored(&ticket->ticket, granted);
	return true;
}
