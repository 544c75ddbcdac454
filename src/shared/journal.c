/*-------------------------------------------------------------------------
 *
 * journal.c
 *	  What has changed in leases and their tickets, and is to be written to the
 *	  tables.
 *
 * Backends change the shared state and mark what they have changed, in the
 * list that is called the journal; the worker, alone, writes
 * (worker/writer.c).  So however often something changes, it is written once;
 * a transaction that fails is simply tried again; and a worker that dies
 * leaves the marks to the next one.  Whoever needs durability waits for it
 * (backend/durable.c).
 *
 * A lock is handed on by the worker, after the commit that has removed the row
 * of the holder before (lease_end.c).  As what the next holder writes comes
 * later in the WAL, no prefix of the WAL has two holders.  A session that is
 * the next holder writes nothing, so before it, or anybody else, is told of
 * its grant, what is up to there is flushed (dlock_journal_flush_removal):
 * otherwise a crash could bring back a holder whose fence was superseded
 * (I15).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"

#include "shared/inner.h"

/*
 * Note that a record has changed.  Called with the lease lock, after the
 * change (I9).
 */
void
dlock_journal_mark(DlockSpace *space, DlockRecord *record)
{
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (record->finished)
		return;
	if (!record->listed)
	{
		dlock_list_append(&space->journal, &record->link,
						  dlock_record_self(record) +
						  offsetof(DlockRecord, link));
		record->listed_at = dlock_monotonic_now();
	}
	record->listed = true;
	record->marked++;
}

/*
 * For how long the change has waited that is to be written next, in
 * microseconds; 0 where there is none.
 */
int64
dlock_journal_lag(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	uint64		since = now;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	if (DsaPointerIsValid(space->journal.head))
		since = dlock_record_at(space->journal.head)->listed_at;
	LWLockRelease(&space->lease_lock);
	return since < now ? (int64) (now - since) : 0;
}

/* Nothing is left to be written.  Called with the lease lock. */
void
dlock_journal_unmark(DlockSpace *space, DlockRecord *record)
{
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (record->listed)
		dlock_list_remove(&space->journal, &record->link);
	record->listed = false;
}

/*
 * Where in the WAL what is written of a record ends, or behind that.  A row that was
 * put back has not been written by this server since: it was committed before the
 * load was done.
 */
XLogRecPtr
dlock_journal_position(DlockSpace *space, DlockRecord *record)
{
	uint64		written_at = pg_atomic_read_u64(&record->lsn);
	uint64		loaded_at = pg_atomic_read_u64(&space->loaded_at);

	return Max(written_at, loaded_at);
}

/* Where the removal of the row of a lock's last holder is noted */
static pg_atomic_uint64 *
removal(DlockSpace *space, const DlockKey *key)
{
	return &space->removed[key->hash & (DLOCK_REMOVED_BUCKETS - 1)];
}

/* As dlock_journal_removal(), where there was any removal */
XLogRecPtr
dlock_journal_find_removal(DlockSpace *space, const DlockKey *key)
{
	return pg_atomic_read_u64(removal(space, key));
}

/* Flush a removal, if it is one. */
void
dlock_journal_flush(XLogRecPtr removed)
{
	if (removed != InvalidXLogRecPtr)
		XLogFlush(removed);
}

/*
 * Before anybody is told who holds a lock: flush the removal of the row of the
 * holder before, should there have been one.  Nobody is told in any other way:
 * queue.c flushes it with each of its answers, and whoever tells of a session's
 * own ticket, whose state it reads without queue.c, calls this.
 */
void
dlock_journal_flush_removal(DlockSpace *space, const DlockKey *key)
{
	dlock_journal_flush(dlock_journal_removal(space, key));
}

/* The same for all locks, before grants of any are announced. */
void
dlock_journal_flush_removals(DlockSpace *space)
{
	XLogRecPtr	latest = InvalidXLogRecPtr;

	for (int b = 0; b < DLOCK_REMOVED_BUCKETS; b++)
		latest = Max(latest, pg_atomic_read_u64(&space->removed[b]));
	dlock_journal_flush(latest);
}

/*
 * The row of a holder was removed, by a commit that ends there: tell sessions
 * what to flush before they believe in a grant.
 */
void
dlock_journal_note_removal(DlockSpace *space, const DlockKey *key,
						   XLogRecPtr lsn)
{
	pg_atomic_uint64 *noted = removal(space, key);
	uint64		before = pg_atomic_read_u64(noted);

	/* before the grants that this removal makes way for */
	pg_atomic_write_u32(&space->has_removed, 1);
	/* several locks share a place, and none is to lose what it has there */
	while (before < lsn &&
		   !pg_atomic_compare_exchange_u64(noted, &before, lsn))
		;
}

/*
 * Writing has failed, or cannot even begin.  "code" is the SQLSTATE.  Who waits
 * for something to be written sees it at the next look, within a second.
 */
void
dlock_journal_fail(DlockSpace *space, int code)
{
	pg_atomic_write_u32(&space->failure, (uint32) code);
	pg_write_barrier();
	pg_atomic_fetch_add_u32(&space->failures, 1);
}
