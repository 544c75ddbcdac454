/*-------------------------------------------------------------------------
 *
 * journal.c
 *	  Having changes of leases and their tickets written to the tables, and
 *	  waiting until that is durable.
 *
 * Backends change the shared state and mark what they have changed, in the
 * list that is called the journal; the worker, alone, writes.  It copies what
 * is marked, writes the rows as they are then in one transaction (rows.c), and
 * unmarks what has not changed again meanwhile.  So however often something
 * changes, it is written once; a transaction that fails is simply tried again;
 * and a worker that dies leaves the marks to the next one.
 *
 * The worker's transaction commits asynchronously, so that one batch is
 * flushed while the next is being written.  Whoever needs durability waits
 * until the change is in the WAL, then flushes up to there, and waits for
 * standbys, as its own synchronous_commit says.
 *
 * A lock is handed on by the worker, after the commit that has removed the row
 * of the holder before (dlock_lease_finish).  As what the next holder writes
 * comes later in the WAL, no prefix of the WAL has two holders.  A session
 * that is the next holder writes nothing, so before it, or anybody else, is told
 * of its grant, what is up to there is flushed (dlock_journal_flush_removal):
 * otherwise a crash could bring back a holder whose fence was superseded.
 *
 * Lock order: an entry's lock, then the space's lease lock.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "miscadmin.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "utils/memutils.h"
#include "utils/wait_event.h"

#include "journal.h"
#include "process.h"
#include "tables.h"

/* Rows written in one transaction */
#define BATCH	1000

/* How long, and how often, a waiter trusts that the worker comes */
#define RETRY_MS	1000
#define MAX_RETRIES 10

/*
 * Take note that a record has changed.  Called with the lease lock, after the
 * change.
 */
void
dlock_journal_mark(DlockSpace *space, DlockRecord *record)
{
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (record->finished)
		return;
	if (!record->listed)
		dlock_list_append(&space->journal, &record->link);
	record->listed = true;
	record->marked++;
}

/* Nothing is left to be written.  Called with the lease lock. */
void
dlock_journal_unmark(DlockSpace *space, DlockRecord *record)
{
	if (record->listed)
		dlock_list_remove(&space->journal, &record->link);
	record->listed = false;
}

/*
 * Durability
 */

/* Are there standbys whose answers commits wait for? */
bool
dlock_journal_has_standbys(void)
{
	return max_wal_senders > 0 && compat_sync_standbys_defined();
}

/* Have they acknowledged this position, at this level? */
bool
dlock_journal_is_acknowledged(XLogRecPtr lsn, int durability)
{
	bool		acknowledged;

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		!dlock_journal_has_standbys())
		return true;
	/* under the lock, as those who wait are woken before the setting changes */
	LWLockAcquire(SyncRepLock, LW_SHARED);
	acknowledged = !dlock_journal_has_standbys() ||
		WalSndCtl->lsn[durability - SYNCHRONOUS_COMMIT_REMOTE_WRITE] >= lsn;
	LWLockRelease(SyncRepLock);
	return acknowledged;
}

/*
 * Make the WAL up to here durable at a level; false where the wait for the
 * standbys was cut short.  PostgreSQL itself only warns then, since a commit
 * cannot be taken back; but what we wait for can.
 */
static bool
make_durable(XLogRecPtr lsn)
{
	int			durability = synchronous_commit;

	if (durability == SYNCHRONOUS_COMMIT_OFF)
		return true;
	XLogFlush(lsn);
	if (dlock_journal_is_acknowledged(lsn, durability))
		return true;
#ifdef USE_ASSERT_CHECKING

	/*
	 * All whose changes the worker has written in one transaction wait for the
	 * same position.  PostgreSQL's queue of waiters works so, but asserts that
	 * no two positions are equal: each gets one of its own then.
	 */
	lsn = dlock_journal_heartbeat();
#endif
	HOLD_INTERRUPTS();
	SyncRepWaitForLSN(lsn, true);
	RESUME_INTERRUPTS();
	return dlock_journal_is_acknowledged(lsn, durability);
}

/*
 * Is the change in the WAL?  If so, *lsn is where.
 */
static bool
is_written(DlockRecord *record, uint64 mark, XLogRecPtr *lsn)
{
	if (pg_atomic_read_u64(&record->written) < mark)
		return false;
	pg_read_barrier();
	*lsn = pg_atomic_read_u64(&record->lsn);
	return true;
}

static void
raise_failure(DlockSpace *space)
{
	int			code = (int) pg_atomic_read_u32(&space->failure);

	/* what somebody has made of the tables can be told from here */
	if (code == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE)
		dlock_rows_check(space);
	ereport(ERROR,
			(errcode(code),
			 errmsg("could not write to the tables of leases"),
			 errdetail("The worker of dlock failed to; what was asked for has been taken back."),
			 errhint("See the server log for the reason.")));
}

static void
raise_no_worker(const char *detail)
{
	ConditionVariableCancelSleep();
	ereport(ERROR,
			(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			 errmsg("could not start the worker of dlock"),
			 errdetail("%s", detail),
			 errhint("See the server log, increase max_worker_processes, or use session or transaction scope.")));
}

/*
 * Wait until all that has happened to a record so far is durable at the level
 * of synchronous_commit.  Raises an error where that fails, or where no worker
 * is there to write it; what was asked for is then the caller's to take back.
 */
void
dlock_journal_wait(DlockSpace *space, DlockRecord *record)
{
	uint32		failures = pg_atomic_read_u32(&space->failures);
	int			alone = 0;		/* looks at which no worker was there */
	uint64		mark;
	XLogRecPtr	lsn;
	bool		durable;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	mark = record->marked;
	LWLockRelease(&space->lease_lock);
	while (!is_written(record, mark, &lsn))
	{
		ConditionVariablePrepareToSleep(&record->changed);
		if (is_written(record, mark, &lsn))
			break;
		if (record->finished)
		{
			/* it is over, and was never written: the caller will see */
			lsn = InvalidXLogRecPtr;
			break;
		}
		if (pg_atomic_read_u32(&space->failures) != failures)
		{
			ConditionVariableCancelSleep();
			raise_failure(space);
		}
		if (!dlock_worker_wake(space))
			raise_no_worker("No background worker slot is free, and leases need a worker.");
		if (pg_atomic_read_u32(&space->worker) != 0)
			alone = 0;
		else if (++alone > MAX_RETRIES)
			raise_no_worker("It was asked for several times, and has not come.");
		(void) ConditionVariableTimedSleep(&record->changed, RETRY_MS,
										   PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
	durable = make_durable(lsn);
	/* the last look: a cancel that comes later finds done what was asked for */
	CHECK_FOR_INTERRUPTS();
	if (!durable)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("canceled while waiting for synchronous replication"),
				 errdetail("What was asked for has been taken back."),
				 errhint("Try again when the standbys answer.")));
}

/* Where the removal of the row of a lock's last holder is noted */
static pg_atomic_uint64 *
removal(DlockSpace *space, const DlockKey *key)
{
	return &space->removed[key->hash & (DLOCK_REMOVED_BUCKETS - 1)];
}

/* Where that removal ends in the WAL; mostly there was none. */
XLogRecPtr
dlock_journal_removal(DlockSpace *space, const DlockKey *key)
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
 * Writing
 */

static DlockImage *images = NULL;
static int	num_images = 0;

/*
 * Is its row to be removed, and all the rest of it then?  What is pinned, and
 * what keeps a lock closed, ends later, and is marked again then.  Called with
 * the lease lock.
 */
static bool
is_over(DlockRecord *record)
{
	DlockLeaseTicket *ticket;
	DlockLease *lease = (DlockLease *) record;
	DlockState	state;

	if (record->is_lease)
		return pg_atomic_read_u64(&lease->deadline) == 0 && !lease->delayed;
	ticket = dlock_record_ticket(record);
	state = dlock_state_of(ticket);
	/* an ENDING ticket is not pinned anew: pins are read after the state */
	pg_read_barrier();
	return state == DLOCK_GONE || state == DLOCK_LEAVING ||
		(state == DLOCK_ENDING && ticket->ticket.pins == 0 &&
		 !ticket->in_closed);
}

/*
 * Finish a record if it is over and has no row.  The worker does so when it
 * has tried to write, and a backend that takes back what was never written.
 */
void
dlock_journal_settle(DlockSpace *space, DlockRecord *record)
{
	bool		finish;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	finish = !record->has_row && !record->in_flight && is_over(record);
	if (finish)
		dlock_journal_unmark(space, record);
	LWLockRelease(&space->lease_lock);
	if (finish)
		dlock_lease_finish(space, record);
}

/* What a record is now.  Called with the lease lock. */
static void
copy_record(DlockRecord *record, DlockImage *image)
{
	image->record = record;
	image->mark = record->marked;
	image->had_row = record->has_row || record->in_flight;
	image->over = is_over(record);
	image->channel[0] = '\0';
	if (record->is_lease)
		image->delayed = ((DlockLease *) record)->delayed;
	else
	{
		DlockLeaseTicket *ticket = dlock_record_ticket(record);

		image->granted = dlock_state_of(ticket) != DLOCK_WAITING;
		/* written before the state */
		pg_read_barrier();
		image->granted_at = ticket->ticket.granted_at;
		dlock_lease_ticket_channel(ticket, image->channel);
	}
	record->in_flight = !image->over || image->had_row;
}

/*
 * Copy what is marked, or the older part of it.
 */
static void
copy_marked(DlockSpace *space)
{
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	for (dsa_pointer link = space->journal.head;
		 DsaPointerIsValid(link) && num_images < BATCH; num_images++)
	{
		DlockRecord *record = dsa_get_address(dlock_area, link);

		dlock_record_ref(record);
		copy_record(record, &images[num_images]);
		link = record->link.next;
	}
	LWLockRelease(&space->lease_lock);
}

/*
 * After the commit, or after a failure: whose row is there now, and what is
 * still to be written.
 */
static void
unmark(DlockSpace *space, bool committed, XLogRecPtr lsn)
{
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	for (int i = 0; i < num_images; i++)
	{
		DlockRecord *record = images[i].record;

		record->in_flight = false;
		record->has_row = committed ? !images[i].over : images[i].had_row;
		if (!committed)
			continue;
		pg_atomic_write_u64(&record->lsn, lsn);
		pg_write_barrier();
		pg_atomic_write_u64(&record->written, images[i].mark);
		/* what is over stays, until it is finished */
		if (record->marked == images[i].mark && !images[i].over)
			dlock_journal_unmark(space, record);
	}
	LWLockRelease(&space->lease_lock);
}

/* Tell sessions what to flush before they believe in a grant. */
static void
note_removals(DlockSpace *space, XLogRecPtr lsn)
{
	for (int i = 0; i < num_images; i++)
	{
		if (images[i].over && images[i].had_row && !images[i].record->is_lease)
			pg_atomic_write_u64(removal(space,
										&dlock_record_ticket(images[i].record)->key),
								lsn);
	}
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

/* The worker uses no record of the latest batch any more. */
void
dlock_journal_let_go(void)
{
	while (num_images > 0)
		dlock_record_unref(images[--num_images].record);
}

/*
 * After the attempt to write: what is over and has no row goes, and who waits
 * for a record sees what has become of it.
 */
static void
publish(DlockSpace *space, bool committed)
{
	for (int i = 0; i < num_images; i++)
	{
		DlockRecord *record = images[i].record;

		/* what has become over meanwhile has been marked again */
		if (images[i].over || !committed)
			dlock_journal_settle(space, record);
		ConditionVariableBroadcast(&record->changed);
	}
	dlock_journal_let_go();
}

/*
 * Write what is marked.  Returns how many records that were, -1 where the
 * extension is gone.  Raises what PostgreSQL raises; nothing is written then,
 * and all of it still marked.  Those who wait are told that, unless it was a
 * lock that could not be had: the caller knows for how long.  "written" is
 * called back for every record that was written, and told whether it is over.
 */
int
dlock_journal_write(DlockSpace *space, int *dead,
					void (*written) (DlockRecord *, bool over, XLogRecPtr lsn))
{
	bool		is_there;
	XLogRecPtr	lsn;
	int			count;

	if (images == NULL)
		images = MemoryContextAlloc(TopMemoryContext, BATCH * sizeof(DlockImage));
	dlock_journal_let_go();

	PG_TRY();
	{
		is_there = dlock_rows_begin(space);
		if (is_there)
		{
			copy_marked(space);
			*dead += dlock_rows_write(images, num_images);
			dlock_rows_commit();
		}
	}
	PG_CATCH();
	{
		LWLockReleaseAll();
		unmark(space, false, InvalidXLogRecPtr);
		/* a lock that could not be had in time may be at the next attempt */
		if (!dlock_error_is_lock(geterrcode()))
			dlock_journal_fail(space, geterrcode());
		publish(space, false);
		PG_RE_THROW();
	}
	PG_END_TRY();
	if (!is_there)
	{
		dlock_journal_fail(space, ERRCODE_UNDEFINED_OBJECT);
		return -1;
	}
	lsn = XactLastCommitEnd;
	count = num_images;
	note_removals(space, lsn);
	unmark(space, true, lsn);
	for (int i = 0; i < count; i++)
		written(images[i].record, images[i].over, lsn);
	publish(space, true);
	return count;
}

/*
 * Nothing can be written any more.  What is over goes, the rest is left to
 * those who use it.
 */
void
dlock_journal_abandon(DlockSpace *space)
{
	dlock_journal_fail(space, ERRCODE_UNDEFINED_OBJECT);
	for (;;)
	{
		DlockRecord *record = NULL;

		LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
		if (DsaPointerIsValid(space->journal.head))
		{
			record = dsa_get_address(dlock_area, space->journal.head);
			dlock_record_ref(record);
			record->has_row = record->in_flight = false;
			dlock_journal_unmark(space, record);
		}
		LWLockRelease(&space->lease_lock);
		if (record == NULL)
			break;
		dlock_journal_settle(space, record);
		dlock_record_unref(record);
	}
}

/*
 * What a worker begins with: what the worker before may have written, or not,
 * counts as written.  That was at the head of the journal, and still is.
 */
void
dlock_journal_begin(DlockSpace *space)
{
	dsa_pointer link;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	link = space->journal.head;
	for (int i = 0; i < BATCH && DsaPointerIsValid(link); i++)
	{
		DlockRecord *record = dsa_get_address(dlock_area, link);

		record->has_row |= record->in_flight;
		record->in_flight = false;
		link = record->link.next;
	}
	LWLockRelease(&space->lease_lock);
}

/*
 * Once after each load: rows that stand for nothing go.  False where the
 * extension is gone.
 */
bool
dlock_journal_clear(DlockSpace *space)
{
	bool		left;

	if (pg_atomic_read_u32(&space->cleared) != DLOCK_NOT_CLEARED)
		return true;
	if (!dlock_rows_begin(space))
		return false;
	left = dlock_rows_remove_foreign(space);
	dlock_rows_commit();
	pg_atomic_write_u32(&space->cleared,
						left ? DLOCK_FOREIGN_LEFT : DLOCK_CLEARED);
	return true;
}

/*
 * Heartbeats for standbys
 */

/*
 * Write a record that means nothing, and flush it, as only what is flushed is
 * sent to standbys; where it ends.
 */
XLogRecPtr
dlock_journal_heartbeat(void)
{
	XLogRecPtr	lsn = compat_log_message("dlock");

	XLogFlush(lsn);
	return lsn;
}

/*
 * How far have standbys acknowledged the WAL?  For each level.
 */
void
dlock_journal_acknowledged(XLogRecPtr *positions)
{
	LWLockAcquire(SyncRepLock, LW_SHARED);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		positions[q] = WalSndCtl->lsn[q];
	LWLockRelease(SyncRepLock);
}
