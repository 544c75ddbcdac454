/*-------------------------------------------------------------------------
 *
 * restore.c
 *	  Loading a lease's ticket from its row.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/lease.h"
#include "shared/inner.h"

/* Load a ticket; false if dlock_queue_restore() refuses it. */
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
	/* all that was loaded is durable when it counts */
	if (granted)
		pg_atomic_write_u64(&ticket->granted_lsn, FirstNormalUnloggedLSN);
	dlock_id_insert(&ticket->record);
	PG_TRY();
	{
		fits = dlock_queue_restore(ticket, lease->delayed ? DLOCK_ENDING :
								   granted ? DLOCK_GRANTED : DLOCK_WAITING);
	}
	PG_CATCH();
	{
		dlock_id_delete(&ticket->record);
		PG_RE_THROW();
	}
	PG_END_TRY();
	if (!fits)
	{
		dlock_id_delete(&ticket->record);
		return false;
	}

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
