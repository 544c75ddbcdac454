/*-------------------------------------------------------------------------
 *
 * writer.c
 *	  Writing the journal to the tables, by the worker alone (I19).
 *
 * src/README has the steps of a batch.  After a batch, the writer passes the
 * written leases and grants on to due.c and grants.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "utils/memutils.h"

#include "shared/shared.h"
#include "tables/tables.h"
#include "worker/process.h"
#include "worker/due.h"

/* Rows per transaction */
#define BATCH	1000

/* How long to flush even for a lone caller, after several callers waited */
#define CROWD_MS	100

static DlockImage *images = NULL;
static int	num_images = 0;

/* Copy a record.  The caller holds the lease lock. */
static void
copy_record(DlockSpace *space, DlockRecord *record, DlockImage *image)
{
	image->record = record;
	image->mark = record->marked;
	image->had_row = record->has_row || record->in_flight;
	image->over = dlock_lease_is_over(space, record);
	image->channel[0] = '\0';
	image->shares = image->inherits = false;
	image->durability = dlock_lease_durability(dlock_record_lease_of(record));

	/*
	 * The lease may need answers of standbys from now on.  Take this moment as
	 * the first: no standby has the row, and heartbeats begin with the write.
	 */
	if (!image->had_row && !image->over &&
		dlock_record_of_lease(record) == record)
		pg_atomic_write_u64(&dlock_record_lease_of(record)->confirmed,
							dlock_monotonic_now());
	if (record->is_lease)
	{
		image->delayed = dlock_record_lease(record)->delayed;
		image->ttl = dlock_lease_row_ttl(dlock_record_lease(record));
	}
	else
	{
		DlockLeaseTicket *ticket = dlock_record_ticket(record);
		DlockLease *lease = dlock_lease_of(ticket);
		DlockState	state = dlock_state_of(&ticket->ticket);

		image->ttl = lease->single ? dlock_lease_row_ttl(lease) : 0;

		image->inherits = ticket->heir && state == DLOCK_WAITING;
		/* the ticket may have become LEAVING since "over" was set */
		image->granted = image->inherits || state == DLOCK_GRANTED ||
			state == DLOCK_ENDING;
		image->mode = ticket->lowers ? DLOCK_SHARED : ticket->ticket.mode;
		image->shares = !image->over && ticket->lowers &&
			ticket->ticket.mode == DLOCK_EXCLUSIVE;
		/* granted_at is written before the state */
		pg_read_barrier();
		image->granted_at = image->inherits ? GetCurrentTimestamp() :
			ticket->ticket.granted_at;
		dlock_lease_ticket_channel(ticket, image->channel);
	}
	record->in_flight = !image->over || image->had_row;
}

/* Copy marked records, the oldest first. */
static void
copy_marked(DlockSpace *space)
{
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	for (dsa_pointer link = space->journal.head;
		 DsaPointerIsValid(link) && num_images < BATCH; num_images++)
	{
		DlockRecord *record = dlock_record_at(link);

		copy_record(space, record, &images[num_images]);
		dlock_record_ref(record);
		link = record->link.next;
	}
	LWLockRelease(&space->lease_lock);
}

/* Record that an heir's row follows the holder's removal in the WAL (I17). */
static void
note_inheritance(const DlockImage *image)
{
	DlockLeaseTicket *ticket = dlock_record_ticket(image->record);

	if (dlock_state_of(&ticket->ticket) != DLOCK_WAITING)
		return;
	ticket->ticket.granted_at = image->granted_at;
	ticket->inherited = true;
}

/*
 * A lone caller flushes for itself.  If several callers wait, the worker
 * flushes before it wakes them.  Otherwise all would wake only to wait for one
 * flush.  For CROWD_MS after that, the worker flushes for lone callers, too.
 */
static void
flush_for_all(XLogRecPtr lsn)
{
	static uint64 crowded_until = 0;
	uint64		now = dlock_monotonic_now();
	int			waiting = 0;

	/* a release does not wait for the flush */
	for (int i = 0; i < num_images; i++)
		waiting += !images[i].over &&
			images[i].durability != SYNCHRONOUS_COMMIT_OFF ? 1 : 0;
	if (waiting > 1)
		crowded_until = now + CROWD_MS * 1000;
	if (waiting > 0 && now < crowded_until)
		XLogFlush(lsn);
}

/*
 * Record where the WAL has the row of a granted ticket.  If no standbys are
 * named now, standbys that are named later need not acknowledge the grant.
 */
static void
note_grant(DlockLeaseTicket *ticket, const DlockImage *image, XLogRecPtr lsn)
{
	if (pg_atomic_read_u64(&ticket->granted_lsn) != InvalidXLogRecPtr)
		return;
	ticket->granted_at_level = dlock_quorum_has_standbys() ?
		image->durability :
		Min(image->durability, SYNCHRONOUS_COMMIT_LOCAL_FLUSH);
	pg_write_barrier();
	pg_atomic_write_u64(&ticket->granted_lsn, lsn);
}

/* After a commit or an error, update has_row, and unmark written records. */
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
		if (!record->is_lease && images[i].granted && !images[i].over)
			note_grant(dlock_record_ticket(record), &images[i], lsn);
		if (images[i].inherits)
			note_inheritance(&images[i]);
		pg_atomic_write_u64(&record->lsn, lsn);
		pg_write_barrier();
		pg_atomic_write_u32(&record->written, images[i].mark);
		/* publish() unmarks records that are over or become shared */
		if (record->marked == images[i].mark && !images[i].over &&
			!images[i].shares)
			dlock_journal_unmark(space, record);
	}
	LWLockRelease(&space->lease_lock);
}

static void
note_removals(DlockSpace *space, XLogRecPtr lsn)
{
	for (int i = 0; i < num_images; i++)
	{
		DlockRecord *record = images[i].record;

		if ((images[i].over && images[i].had_row && !record->is_lease) ||
			images[i].shares)
			dlock_journal_note_removal(space,
									   &dlock_record_ticket(record)->key, lsn);
	}
}

/* Drop the references to the records of the latest batch. */
void
dlock_writer_let_go(void)
{
	while (num_images > 0)
		dlock_record_unref(images[--num_images].record);
}

/* Finish a record that is over and has no row. */
static void
settle_record(DlockSpace *space, DlockRecord *record)
{
	if (!dlock_lease_settle(space, record))
		return;
	if (dlock_record_of_lease(record) == record)
		dlock_due_remove(dlock_record_lease_of(record));
	if (!record->is_lease)
		dlock_grants_forget(dlock_record_ticket(record));
}

/* The row says shared, so the holder can become shared. */
static void
share_ticket(DlockSpace *space, const DlockImage *image)
{
	DlockRecord *record = image->record;

	dlock_queue_share(dlock_record_ticket(record));
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	if (record->marked == image->mark)
		dlock_journal_unmark(space, record);
	LWLockRelease(&space->lease_lock);
}

/* After a write or an error, finish ended records, and wake callers. */
static void
publish(DlockSpace *space, bool committed)
{
	for (int i = 0; i < num_images; i++)
	{
		DlockRecord *record = images[i].record;

		/* a record that ended after it was copied stays for the next batch */
		if (images[i].over || !committed)
			settle_record(space, record);
		if (images[i].shares && committed)
			share_ticket(space, &images[i]);
		ConditionVariableBroadcast(&record->changed);
	}
	dlock_writer_let_go();
}

/* Pass a written record to due.c and grants.c, unless it is over. */
static void
learn_of(DlockRecord *record, bool over, XLogRecPtr lsn)
{
	if (over)
		return;
	if (dlock_record_of_lease(record) == record)
		dlock_due_add(dlock_record_lease_of(record));
	if (!record->is_lease)
		dlock_grants_remember(dlock_record_ticket(record), lsn);
}

/* Publish the table that the worker cannot lock, for the deadlock detector. */
static void
tell_blocked_on(DlockSpace *space, Oid table)
{
	uint64		before = pg_atomic_read_u64(&space->blocked_on);
	uint32		now = (uint32) dlock_monotonic_now();

	if (table != (Oid) (before >> 32))
		pg_atomic_write_u64(&space->blocked_on, OidIsValid(table) ?
							(uint64) table << 32 | now : 0);
}

/*
 * Write one batch.  Returns the number of records, or -1 if the extension is
 * gone.  After an error, nothing is written and all records stay marked.
 * Waiting callers get an error at once, but a lock timeout once a second only.
 */
int
dlock_writer_write(DlockSpace *space, int *dead)
{
	bool		is_there;
	XLogRecPtr	lsn;
	int			count;

	if (images == NULL)
		images = MemoryContextAlloc(TopMemoryContext, BATCH * sizeof(DlockImage));
	dlock_writer_let_go();

	PG_TRY();
	{
		is_there = dlock_rows_begin(space);
		tell_blocked_on(space, InvalidOid);
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
		/* after a lock timeout, the next attempt may get the lock */
		if (!dlock_error_is_lock(geterrcode()))
			dlock_journal_fail(space, geterrcode());
		else
			tell_blocked_on(space, dlock_rows_awaited());
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
	flush_for_all(lsn);
	note_removals(space, lsn);
	unmark(space, true, lsn);
	for (int i = 0; i < count; i++)
		learn_of(images[i].record, images[i].over, lsn);
	publish(space, true);
	return count;
}

/* If a worker died, count the rows that it had in flight as written. */
void
dlock_writer_begin(DlockSpace *space)
{
	dsa_pointer link;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	link = space->journal.head;
	for (int i = 0; i < BATCH && DsaPointerIsValid(link); i++)
	{
		DlockRecord *record = dlock_record_at(link);

		record->has_row |= record->in_flight;
		record->in_flight = false;
		link = record->link.next;
	}
	LWLockRelease(&space->lease_lock);
}

/* Delete rows without a record.  Returns false if the extension is gone. */
bool
dlock_writer_clear(DlockSpace *space)
{
	if (pg_atomic_read_u32(&space->cleared) != 0)
		return true;
	if (!dlock_rows_begin(space))
		return false;
	dlock_rows_remove_dead();
	dlock_rows_commit();
	pg_atomic_write_u32(&space->cleared, 1);
	return true;
}
