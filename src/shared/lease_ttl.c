/*-------------------------------------------------------------------------
 *
 * lease_ttl.c
 *	  Changes of the ttl, and of the durability, of an open lease.
 *
 * The shorter of the old and new ttl counts until the new ttl is durable, and
 * if the call fails.  The row gets the new ttl at once.  So after a heartbeat,
 * no server honours a lease for longer than a standby's row says (I21).
 *
 * The deadline moves at once to now plus the new ttl.  A later deadline is
 * safe, because standbys' answers limit the lease's life, too.  The lease is
 * listed in the space's "retimed", so that the worker checks the lease again.
 *
 * A higher durability counts in memory at once, so that heartbeats are sent
 * even if the table is locked.  The durability never falls, because a caller
 * that relies on it may have returned.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/timestamp.h"

#include "shared/lease.h"

/* Make the worker check a lease. */
static void
retime(DlockSpace *space, DlockLease *lease)
{
	DlockRetiming *retiming = dlock_lease_retiming(lease);

	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (retiming->listed || !lease->in_leases)
		return;
	dlock_record_ref(&lease->record);
	dlock_list_append(&space->retimed, &retiming->link);
	retiming->listed = true;
}

/* The next lease that the worker must check, with a reference; or NULL */
DlockLease *
dlock_lease_next_retimed(DlockSpace *space)
{
	DlockLease *lease = NULL;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	if (DsaPointerIsValid(space->retimed.head))
	{
		DlockRetiming *retiming = dlock_address(space->retimed.head);

		lease = dlock_address(retiming->lease);
		(void) dlock_lease_unretime(space, lease);
	}
	LWLockRelease(&space->lease_lock);
	return lease;
}

/* The ttl in the lease's row.  The caller holds the lease lock. */
int64
dlock_lease_row_ttl(const DlockLease *lease)
{
	int64		next = 0;

	if (DsaPointerIsValid(lease->retiming))
		next = dlock_lease_retiming(lease)->next_ttl;
	return next != 0 ? next : dlock_lease_ttl(lease);
}

/* Allocate a lease's DlockRetiming, unless it has one.  Raises 53200. */
static void
prepare_retiming(DlockSpace *space, DlockLease *lease)
{
	DlockRetiming *retiming;
	bool		is_first;

	if (DsaPointerIsValid(lease->retiming))
		return;
	retiming = dlock_allocate(lease->role, sizeof(DlockRetiming));
	memset(retiming, 0, sizeof(DlockRetiming));
	retiming->lease = dlock_pointer(lease);
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	is_first = !DsaPointerIsValid(lease->retiming);
	if (is_first)
		lease->retiming = dlock_pointer(retiming);
	LWLockRelease(&space->lease_lock);
	if (!is_first)
		dlock_release_memory(lease->role, retiming, sizeof(DlockRetiming));
}

/*
 * Raise a lease's durability to this level of synchronous_commit.  The caller
 * relies on "record", which is the lease or its ticket, and waits for the row
 * afterwards.  Raises 53200, with nothing changed.
 *
 * If standbys did not count before, they count from now on.  If they counted
 * at a lower level, their answers at that level stay valid.
 */
void
dlock_lease_raise_durability(DlockSpace *space, DlockRecord *record, int level)
{
	DlockLease *lease = dlock_record_lease_of(record);
	int			before;
	uint64		confirmed;

	if (likely(level <= dlock_lease_durability(lease)))
		return;
	prepare_retiming(space, lease);
	dlock_lease_begin_change(space);
	before = dlock_lease_durability(lease);
	if (level > before)
	{
		confirmed = before >= SYNCHRONOUS_COMMIT_REMOTE_WRITE ?
			dlock_lease_confirmed_at(lease) :
			Max(pg_atomic_read_u64(&lease->confirmed), dlock_monotonic_now());
		pg_atomic_write_u64(&lease->confirmed, confirmed);
		/* "confirmed" before the durability: see dlock_lease_durability() */
		pg_write_barrier();
		pg_atomic_write_u32(&lease->durability, (uint32) level);
		dlock_journal_mark(space, dlock_record_of_lease(record));
		retime(space, lease);
	}
	dlock_lease_end_change(space, lease);
}

/*
 * Begin a change of the ttl: mark "record" and move the deadline.  A lease has
 * one such change at a time.  Returns false if the lease is gone.  Raises
 * 53200, with nothing changed.
 */
bool
dlock_lease_begin_ttl(DlockLease *lease, DlockRecord *record, int64 ttl)
{
	DlockSpace *space = dlock_space_at(lease->space);
	bool		open;

	prepare_retiming(space, lease);
	dlock_lease_begin_change(space);
	Assert(dlock_lease_retiming(lease)->next_ttl == 0);
	/* the ttl before the deadline, because renewals read the deadline first */
	if (ttl < dlock_lease_ttl(lease))
		pg_atomic_write_u64(&lease->ttl, (uint64) ttl);
	open = dlock_lease_move_deadline(lease, ttl);
	if (open)
	{
		dlock_lease_retiming(lease)->next_ttl = ttl;
		dlock_journal_mark(space, record);
		retime(space, lease);
	}
	dlock_lease_end_change(space, lease);
	return open;
}

/*
 * Complete a change of the ttl.  The row was written after "start" and is
 * acknowledged.  Returns how many tickets the lease keeps; -1 if it is gone.
 */
int
dlock_lease_finish_ttl(DlockLease *lease, uint64 start)
{
	DlockSpace *space = dlock_space_at(lease->space);
	uint64		confirmed;
	int			result = -1;

	dlock_lease_begin_change(space);
	if (dlock_lease_is_open(lease))
	{
		confirmed = pg_atomic_read_u64(&lease->confirmed);
		pg_atomic_write_u64(&lease->confirmed, Max(confirmed, start));
		pg_atomic_write_u64(&lease->ttl,
							(uint64) dlock_lease_retiming(lease)->next_ttl);
		/* a session that ends now must not set a deadline by the old ttl */
		pg_write_barrier();
		(void) dlock_lease_move_deadline(lease, dlock_lease_ttl(lease));
		pg_atomic_write_u64(&lease->renewed_at,
							(uint64) GetCurrentTimestamp());
		result = (int) lease->tickets.length;
		/* heartbeats may be needed less often */
		retime(space, lease);
	}
	dlock_lease_retiming(lease)->next_ttl = 0;
	dlock_lease_end_change(space, lease);
	return result;
}

/* Undo dlock_lease_begin_ttl(), but keep a shorter ttl.  Raises nothing. */
void
dlock_lease_undo_ttl(DlockLease *lease, DlockRecord *record)
{
	DlockSpace *space = dlock_space_at(lease->space);
	bool		longer;

	dlock_lease_begin_change(space);
	longer = dlock_lease_retiming(lease)->next_ttl > dlock_lease_ttl(lease);
	dlock_lease_retiming(lease)->next_ttl = 0;
	if (longer)
		dlock_lease_shorten(lease);
	/* a row with a longer ttl is harmless until it is overwritten */
	dlock_journal_mark(space, record);
	retime(space, lease);
	dlock_lease_end_change(space, lease);
	(void) dlock_worker_wake(space);
}
