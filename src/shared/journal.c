/*-------------------------------------------------------------------------
 *
 * journal.c
 *	  The journal of a space: changed leases and tickets, to be written.
 *
 * Backends change the shared state and mark the changed records; only the
 * worker writes (worker/writer.c).  So a record that changes often is written
 * once, and a failed transaction is retried.  If the worker dies, its
 * successor finds the marks.  Callers that need durability wait in
 * backend/durable.c.
 *
 * The worker hands a lock on after the commit that removes the old holder's
 * row (lease_end.c).  The next holder's row comes later in the WAL, so no
 * prefix of the WAL has two holders.  A session writes no row.  So its grant
 * is told only after the WAL was flushed up to that removal: otherwise a crash
 * could bring back a holder whose fence was superseded (I15).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"

#include "shared/inner.h"

/*
 * Mark a changed record, with the lease lock held since before the change
 * (I9).
 */
void
dlock_journal_mark(DlockSpace *space, DlockRecord *record)
{
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (record->finished)
		return;
	if (!record->listed)
	{
		dlock_list_append(&space->journal, &record->link);
		record->listed_at = dlock_monotonic_now();
	}
	record->listed = true;
	record->marked++;
}

/* Remove a record from the journal.  The caller holds the lease lock. */
void
dlock_journal_unmark(DlockSpace *space, DlockRecord *record)
{
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (record->listed)
		dlock_list_remove(&space->journal, &record->link);
	record->listed = false;
}

/*
 * The end of a record's latest write in the WAL, or a later position.  A
 * loaded row that was not written since was committed before the load ended.
 */
XLogRecPtr
dlock_journal_position(DlockSpace *space, DlockRecord *record)
{
	uint64		written_at = pg_atomic_read_u64(&record->lsn);
	uint64		loaded_at = pg_atomic_read_u64(&space->loaded_at);

	return Max(written_at, loaded_at);
}

/* The place that notes removals for a lock */
static pg_atomic_uint64 *
removal(DlockSpace *space, const DlockKey *key)
{
	return &space->removed[key->hash & (DLOCK_REMOVED_BUCKETS - 1)];
}

/* As dlock_journal_removal(), if anything was removed in the space */
XLogRecPtr
dlock_journal_find_removal(DlockSpace *space, const DlockKey *key)
{
	return pg_atomic_read_u64(removal(space, key));
}

void
dlock_journal_flush(XLogRecPtr removed)
{
	if (removed != InvalidXLogRecPtr)
		XLogFlush(removed);
}

/*
 * Flush the removal of a lock's previous holder, if there was one, before any
 * process tells who holds it. queue.c does so with each answer.  A session
 * that reads its own ticket's state without queue.c must call this.
 */
void
dlock_journal_flush_removal(DlockSpace *space, const DlockKey *key)
{
	dlock_journal_flush(dlock_journal_removal(space, key));
}

/* The same for all locks, before grants are announced */
void
dlock_journal_flush_removals(DlockSpace *space)
{
	XLogRecPtr	latest = InvalidXLogRecPtr;

	for (int b = 0; b < DLOCK_REMOVED_BUCKETS; b++)
		latest = Max(latest, pg_atomic_read_u64(&space->removed[b]));
	dlock_journal_flush(latest);
}

/* Note that a commit ending at "lsn" has removed a holder's row. */
void
dlock_journal_note_removal(DlockSpace *space, const DlockKey *key,
						   XLogRecPtr lsn)
{
	pg_atomic_uint64 *noted = removal(space, key);
	uint64		before = pg_atomic_read_u64(noted);

	/* before any grant that this removal allows */
	pg_atomic_write_u32(&space->has_removed, 1);
	/* several locks share a place: keep the latest */
	while (before < lsn &&
		   !pg_atomic_compare_exchange_u64(noted, &before, lsn))
		;
}

/*
 * Note that writing has failed, with this SQLSTATE.  Callers that wait for a
 * write see it within a second.
 */
void
dlock_journal_fail(DlockSpace *space, int code)
{
	pg_atomic_write_u32(&space->failure, (uint32) code);
	pg_write_barrier();
	pg_atomic_fetch_add_u32(&space->failures, 1);
}
