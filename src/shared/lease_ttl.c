/*-------------------------------------------------------------------------
 *
 * lease_ttl.c
 *	  Another ttl for a lease that is there, or a higher durability.
 *
 * Until that is durable, and for ever if it does not become so, the lease lives
 * by the shorter one of the two: that is what its client can count on, whatever
 * becomes of the call.  The row has the new one already.  So on no server is a
 * lease honoured for longer after a heartbeat than its row on a standby says
 * (I21), should that one be promoted.
 *
 * Its own deadline lies a new ttl ahead at once.  A longer one lets it not run
 * out while the row is written; that does no harm, for what standbys count for
 * does not live by its own deadline alone.
 *
 * As a deadline can come sooner by that, the worker is told: in the list
 * "retimed" of the space stand the leases that it is to look at anew.
 *
 * The durability of a lease is the highest synchronous_commit of the callers that
 * count on it.  It never falls, for each of these callers has been told that it is
 * so.  It counts in memory at once, so that heartbeats are sent for the lease
 * however long the tables are locked, and is written then.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/timestamp.h"

#include "shared/lease.h"
#include "shared/inner.h"

/*
 * The worker is to look at this lease anew, whose ttl or durability is changed.
 * Called with the lease lock.
 */
static void
retime(DlockSpace *space, DlockLease *lease)
{
	DlockRetiming *retiming = dlock_lease_retiming(lease);

	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (retiming->listed || !lease->in_leases)
		return;
	dlock_record_ref(&lease->record);
	dlock_list_append(&space->retimed, &retiming->link, lease->retiming);
	retiming->listed = true;
}

/* The next one that is to be looked at anew, referred to; NULL: none is left. */
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

/* The ttl that the row has.  Called with the lease lock. */
int64
dlock_lease_row_ttl(const DlockLease *lease)
{
	int64		next = 0;

	if (DsaPointerIsValid(lease->retiming))
		next = dlock_lease_retiming(lease)->next_ttl;
	return next != 0 ? next : dlock_lease_ttl(lease);
}

/* Memory for a change of a lease.  Once made, it stays.  Raises 53200. */
static void
prepare_retiming(DlockSpace *space, DlockLease *lease)
{
	dsa_pointer self;
	DlockRetiming *retiming;
	bool		is_first;

	if (DsaPointerIsValid(lease->retiming))
		return;
	self = dlock_allocate(lease->role, sizeof(DlockRetiming));
	retiming = dlock_address(self);
	memset(retiming, 0, sizeof(DlockRetiming));
	retiming->lease = lease->self;
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	is_first = !DsaPointerIsValid(lease->retiming);
	if (is_first)
		lease->retiming = self;
	LWLockRelease(&space->lease_lock);
	if (!is_first)
		dlock_release_memory(lease->role, self, sizeof(DlockRetiming));
}

/*
 * A caller at this level of synchronous_commit is to count on a lease, or on a
 * ticket of it, "record": if the lease has a lower durability, that is raised, and
 * its row marked.  The caller then waits for that row.  Raises 53200, with nothing
 * changed.
 *
 * Where standbys begin to count, they do so from now on: the row that says so is
 * not written yet, so none that has it was promoted before.  Where they counted at
 * a lower level, what they have acknowledged at that one stays true.
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
		/* who sees the level sees that, too */
		pg_write_barrier();
		pg_atomic_write_u32(&lease->durability, (uint32) level);
		dlock_journal_mark(space, dlock_record_of_lease(record));
		retime(space, lease);
	}
	dlock_lease_end_change(space, lease);
}

/*
 * Begin to give a lease another ttl: what is written now, "record", says so, and
 * its deadline is that far away.  False where the lease is gone.  Raises 53200,
 * with nothing changed.
 *
 * No two do so at once.
 */
bool
dlock_lease_begin_ttl(DlockLease *lease, DlockRecord *record, int64 ttl)
{
	DlockSpace *space = dlock_space_at(lease->space);
	bool		open;

	prepare_retiming(space, lease);
	dlock_lease_begin_change(space);
	Assert(dlock_lease_retiming(lease)->next_ttl == 0);
	/* the ttl before the deadline: who renews reads them the other way round */
	if (ttl < dlock_lease_ttl(lease))
		pg_atomic_write_u64(&lease->ttl, (uint64) ttl);
	open = dlock_lease_set_deadline(lease, ttl);
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
 * The row is durable, written after "start", and acknowledged by the standbys
 * that count for the lease: it has that ttl from now on.  Returns how many
 * tickets it keeps, -1 where it is gone.
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
		pg_atomic_write_u64(&lease->ttl, (uint64) dlock_lease_retiming(lease)->next_ttl);
		/*
		 * Its session may have ended meanwhile, and left the lease with the ttl
		 * before, or may be about to.
		 */
		pg_write_barrier();
		(void) dlock_lease_set_deadline(lease, dlock_lease_ttl(lease));
		pg_atomic_write_u64(&lease->renewed_at,
							(uint64) GetCurrentTimestamp());
		result = (int) dlock_lease_count_tickets(lease);
		/* heartbeats may be wanted less often */
		retime(space, lease);
	}
	dlock_lease_retiming(lease)->next_ttl = 0;
	dlock_lease_end_change(space, lease);
	return result;
}

/*
 * The row could not be made durable: the shorter ttl stays, and the row is to
 * say so.  Raises nothing.
 */
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
	/* a row with a longer ttl than the lease lives by does no harm */
	dlock_journal_mark(space, record);
	retime(space, lease);
	dlock_lease_end_change(space, lease);
	(void) dlock_worker_wake(space);
}
