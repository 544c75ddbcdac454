/*-------------------------------------------------------------------------
 *
 * journal.c
 *	  The journal of a space: changed leases and tickets, to be written.
 *
 * Backends change the shared state and mark the changed records; only the
 * worker writes (worker/writer.c).  If the worker dies, its successor finds
 * the marks.  Callers that need durability wait in backend/durable.c.
 *
 * After the commit that removes the old holder's row, the worker hands on the
 * lock (lease_end.c).  The next holder's row comes later in the WAL, so no
 * prefix of the WAL has two holders.  A session has no row to wait for, so it
 * learns of its grant only after the removal is flushed (I15).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"

#include "shared/inner.h"

/* Mark a record that the caller has changed under the lease lock (I9). */
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

/* A WAL position at or after the end of a record's latest write or load */
XLogRecPtr
dlock_journal_position(DlockSpace *space, DlockRecord *record)
{
	uint64		written_at = pg_atomic_read_u64(&record->lsn);
	uint64		loaded_at = pg_atomic_read_u64(&space->loaded_at);

	return Max(written_at, loaded_at);
}

/* The place for a lock's latest removal of a row; locks can share a place */
static pg_atomic_uint64 *
removal(DlockSpace *space, const DlockKey *key)
{
	return &space->removed[key->hash & (DLOCK_REMOVED_BUCKETS - 1)];
}

/* dlock_journal_removal() calls this if the space has had any removal. */
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
 * Flush the latest removal noted for a lock.  Must be called before a process
 * reports a grant; the functions of queue_view.c call it themselves.
 */
void
dlock_journal_flush_removal(DlockSpace *space, const DlockKey *key)
{
	dlock_journal_flush(dlock_journal_removal(space, key));
}

/* Flush all noted removals, before the grant of any lock is reported. */
void
dlock_journal_flush_removals(DlockSpace *space)
{
	XLogRecPtr	latest = InvalidXLogRecPtr;

	for (int b = 0; b < DLOCK_REMOVED_BUCKETS; b++)
		latest = Max(latest, pg_atomic_read_u64(&space->removed[b]));
	dlock_journal_flush(latest);
}

/* Store "lsn", the end of a commit that removed a row or made it shared. */
void
dlock_journal_note_removal(DlockSpace *space, const DlockKey *key,
						   XLogRecPtr lsn)
{
	pg_atomic_uint64 *noted = removal(space, key);
	uint64		before = pg_atomic_read_u64(noted);

	/* set it before any grant that this removal allows */
	pg_atomic_write_u32(&space->has_removed, 1);
	/* another lock that shares the place may have noted a later removal */
	while (before < lsn &&
		   !pg_atomic_compare_exchange_u64(noted, &before, lsn))
		;
}

/* A write has failed with this SQLSTATE: tell the callers that wait for it. */
void
dlock_journal_fail(DlockSpace *space, int code)
{
	pg_atomic_write_u32(&space->failure, (uint32) code);
	pg_write_barrier();
	pg_atomic_fetch_add_u32(&space->failures, 1);
}
