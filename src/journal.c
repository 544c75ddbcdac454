/*-------------------------------------------------------------------------
 *
 * journal.c
 *	  The tables dlock_queue and dlock_queue_lease: writing what changes in
 *	  leases and their tickets, waiting until it is durable, and reading it
 *	  back after a restart.
 *
 * Backends change the shared state and mark what they have changed, in the
 * list that is called the journal; the worker, alone, writes.  It copies what
 * is marked, writes the rows as they are then in one transaction, and unmarks
 * what has not changed again meanwhile.  So however often something changes,
 * it is written once; a transaction that fails is simply tried again; and a
 * worker that dies leaves the marks to the next one.
 *
 * The worker's transaction commits asynchronously, so that one batch is
 * flushed while the next is being written.  Whoever needs durability waits
 * until the change is in the WAL, then flushes up to there, and waits for
 * standbys, as its own synchronous_commit says.
 *
 * A lock is handed on by the worker, after the commit that has removed the row
 * of the holder before (dlock_lease_finish).  As what the next holder writes
 * comes later in the WAL, no prefix of the WAL has two holders.  A session
 * that is the next holder writes nothing, so before it believes in its grant it
 * flushes up to there (dlock_journal_flush_removal): otherwise a crash could
 * bring back a holder whose fence its own has superseded.
 *
 * Lock order: an entry's lock, then the space's lease lock.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_control.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "commands/vacuum.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "dlock.h"

/* Rows written in one transaction */
#define BATCH	1000

/* How long, and how often, a waiter trusts that the worker comes */
#define RETRY_MS	1000
#define MAX_RETRIES 10

/* Dead rows after which the worker vacuums, and per page of the table */
#define VACUUM_ROWS	10000
#define VACUUM_ROWS_PER_PAGE	20

/*
 * Take note that a record has changed.  Called with the lease lock, after the
 * change.  Returns what to give to dlock_journal_wait().
 */
uint64
dlock_journal_mark(DlockSpace *space, DlockRecord *record)
{
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (record->finished)
		return record->marked;
	if (!record->listed)
		dlock_list_append(&space->journal, &record->link);
	record->listed = true;
	return ++record->marked;
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
	XLogRecPtr	acknowledged;

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		!dlock_journal_has_standbys())
		return true;
	LWLockAcquire(SyncRepLock, LW_SHARED);
	acknowledged = WalSndCtl->lsn[durability - SYNCHRONOUS_COMMIT_REMOTE_WRITE];
	LWLockRelease(SyncRepLock);
	return acknowledged >= lsn;
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
 * Wait until a change is durable at the level of synchronous_commit.  Raises
 * an error where that fails, or where no worker is there to write it; the
 * change is then the caller's to take back.
 */
void
dlock_journal_wait(DlockSpace *space, DlockRecord *record, uint64 mark)
{
	uint32		failures = pg_atomic_read_u32(&space->failures);
	int			alone = 0;		/* looks at which no worker was there */
	XLogRecPtr	lsn;

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
	if (!make_durable(lsn))
	{
		CHECK_FOR_INTERRUPTS();
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("canceled while waiting for synchronous replication"),
				 errdetail("What was asked for has been taken back."),
				 errhint("Try again when the standbys answer.")));
	}
}

/* The same for all that has happened to a record so far. */
void
dlock_journal_wait_for_all(DlockSpace *space, DlockRecord *record)
{
	uint64		mark;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	mark = record->marked;
	LWLockRelease(&space->lease_lock);
	dlock_journal_wait(space, record, mark);
}

/* Where the removal of the row of a lock's last holder is noted */
static pg_atomic_uint64 *
removal(DlockSpace *space, const DlockKey *key)
{
	return &space->removed[key->hash & (DLOCK_REMOVED_BUCKETS - 1)];
}

/*
 * For a session that was granted a lock: flush the removal of the row of the
 * holder before, should there have been one.
 */
void
dlock_journal_flush_removal(DlockSpace *space, const DlockKey *key)
{
	XLogRecPtr	removed = pg_atomic_read_u64(removal(space, key));

	if (removed != InvalidXLogRecPtr)
		XLogFlush(removed);
}

/*
 * Writing
 */

/* A row, as it is to be */
typedef struct Image
{
	DlockRecord *record;		/* referred to */
	uint64		mark;
	bool		had_row;
	bool		over;			/* to be removed, and finished then */
	bool		granted;
	bool		delayed;
	TimestampTz granted_at;
	char		channel[NAMEDATALEN];
} Image;

static Image *images = NULL;
static int	num_images = 0;

static DlockState
state_of(const DlockLeaseTicket *ticket)
{
	return (DlockState)
		pg_atomic_read_u32((pg_atomic_uint32 *) &ticket->ticket.state);
}

static DlockLease *
lease_of(const DlockLeaseTicket *ticket)
{
	return dsa_get_address(dlock_area, ticket->lease);
}

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
	state = state_of(ticket);
	return state == DLOCK_GONE ||
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
copy_record(DlockRecord *record, Image *image)
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
		DlockLease *lease = lease_of(ticket);

		image->granted = state_of(ticket) != DLOCK_WAITING;
		/* written before the state */
		pg_read_barrier();
		image->granted_at = ticket->ticket.granted_at;
		image->delayed = lease->single && lease->delayed;
		dlock_announcement_channel(&ticket->ticket, image->channel);
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

/* An array of each column, with room for all rows of a batch */
typedef struct Columns
{
	Oid			types[20];
	Datum	   *values[20];
	bool	   *nulls[20];
	int			num_columns;
	int			num_rows;
} Columns;

static void
add_column(Columns *columns, Oid type, int max_rows)
{
	int			c = columns->num_columns++;

	Assert(c < (int) lengthof(columns->types));
	columns->types[c] = type;
	columns->values[c] = palloc(max_rows * sizeof(Datum));
	columns->nulls[c] = palloc0(max_rows * sizeof(bool));
}

static Datum
column_array(Columns *columns, int c)
{
	int			dimensions[1] = {columns->num_rows};
	int			bounds[1] = {1};
	int16		length;
	bool		by_value;
	char		alignment;

	get_typlenbyvalalign(columns->types[c], &length, &by_value, &alignment);
	return PointerGetDatum(construct_md_array(columns->values[c],
											  columns->nulls[c], 1,
											  dimensions, bounds,
											  columns->types[c], length,
											  by_value, alignment));
}

static Datum
interval_datum(int64 microseconds)
{
	Interval   *interval = palloc0(sizeof(Interval));

	interval->time = microseconds;
	return IntervalPGetDatum(interval);
}

static Datum
text_datum(dsa_pointer text, bool *is_null)
{
	*is_null = !DsaPointerIsValid(text);
	return *is_null ? (Datum) 0 :
		CStringGetTextDatum((char *) dsa_get_address(dlock_area, text));
}

/* dlock_queue's columns, as the statement below has them */
static const Oid ticket_types[] = {
	INT8OID, TEXTOID, INT8OID, BOOLOID, BOOLOID, TEXTOID, INT4OID, INT4OID,
	TEXTOID, TEXTOID, TEXTOID, OIDOID, TEXTOID, TIMESTAMPTZOID,
	TIMESTAMPTZOID, INTERVALOID, INTERVALOID, INT4OID
};

static const char *const write_tickets =
"INSERT INTO %1$s AS q (ticket, name, lease, granted, delayed, mode, slots, "
" permits, owner, info, channel, role, role_name, enqueued_at, granted_at, "
" ttl, delay, durability, system, database) "
"SELECT r.*, %2$s FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, "
" $12, $13, $14, $15, $16, $17, $18) AS r "
"ON CONFLICT (ticket) DO UPDATE SET granted = excluded.granted, "
" delayed = excluded.delayed, granted_at = excluded.granted_at, "
" channel = excluded.channel";

static void
fill_ticket(Columns *columns, const Image *image)
{
	DlockLeaseTicket *ticket = dlock_record_ticket(image->record);
	DlockLease *lease = lease_of(ticket);
	int			row = columns->num_rows++;
	int			c = 0;
	bool		is_null;

#define SET(datum) columns->values[c++][row] = (datum)
#define SET_UNLESS(null, datum) \
	(columns->nulls[c][row] = (null), \
	 columns->values[c++][row] = (null) ? (Datum) 0 : (datum))
#define SET_TEXT(text) \
	(columns->values[c][row] = text_datum((text), &is_null), \
	 columns->nulls[c++][row] = is_null)

	SET(Int64GetDatum(ticket->ticket.number));
	SET(PointerGetDatum(cstring_to_text_with_len(ticket->key.name,
												 ticket->key.length)));
	SET(Int64GetDatum(lease->number));
	SET(BoolGetDatum(image->granted));
	SET(BoolGetDatum(image->delayed));
	SET(CStringGetTextDatum(dlock_mode_name(ticket->ticket.mode)));
	SET_UNLESS(ticket->ticket.mode != DLOCK_SLOTS,
			   Int32GetDatum(ticket->ticket.slots));
	SET(Int32GetDatum(ticket->ticket.permits));
	SET_TEXT(ticket->owner);
	SET_TEXT(ticket->ticket.info);
	SET_UNLESS(image->channel[0] == '\0', CStringGetTextDatum(image->channel));
	SET(ObjectIdGetDatum(lease->role));
	SET(CStringGetTextDatum(NameStr(lease->role_name)));
	SET(TimestampTzGetDatum(ticket->ticket.enqueued_at));
	SET_UNLESS(!image->granted, TimestampTzGetDatum(image->granted_at));
	SET_UNLESS(!lease->single, interval_datum(lease->ttl));
	SET_UNLESS(!lease->single || lease->delay == 0,
			   interval_datum(lease->delay));
	SET(Int32GetDatum(ticket->durability));
	Assert(c == columns->num_columns);
}

/* dlock_queue_lease's columns, as the statement below has them */
static const Oid lease_types[] = {
	INT8OID, INTERVALOID, INTERVALOID, BOOLOID, TEXTOID, OIDOID, TEXTOID,
	TIMESTAMPTZOID, INT4OID
};

static const char *const write_leases =
"INSERT INTO %1$s (lease, ttl, delay, delayed, info, role, role_name, "
" opened_at, durability, system, database) "
"SELECT r.*, %2$s FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9) AS r "
"ON CONFLICT (lease) DO UPDATE SET delayed = excluded.delayed";

static void
fill_lease(Columns *columns, const Image *image)
{
	DlockLease *lease = (DlockLease *) image->record;
	int			row = columns->num_rows++;
	int			c = 0;
	bool		is_null;

	SET(Int64GetDatum(lease->number));
	SET(interval_datum(lease->ttl));
	SET_UNLESS(lease->delay == 0, interval_datum(lease->delay));
	SET(BoolGetDatum(image->delayed));
	SET_TEXT(lease->info);
	SET(ObjectIdGetDatum(lease->role));
	SET(CStringGetTextDatum(NameStr(lease->role_name)));
	SET(TimestampTzGetDatum(lease->opened_at));
	SET(Int32GetDatum(lease->durability));
	Assert(c == columns->num_columns);
}

#undef SET
#undef SET_UNLESS
#undef SET_TEXT

/*
 * Which system and database a row belongs to: rows of another one came with a
 * copy, and stand for nothing here.  As two SQL literals.
 */
static char *
origin(void)
{
	return psprintf("'%lld'::pg_catalog.int8, '%u'::pg_catalog.oid",
					(long long) GetSystemIdentifier(), MyDatabaseId);
}

/* A table of the space's, quoted */
static char *
table_name(DlockSpace *space, const char *name)
{
	Oid			relation = dlock_relation(space, name);

	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relation)),
									  get_rel_name(relation));
}

static void
run(const char *statement, int num_arguments, Oid *types, Datum *values)
{
	int			code = SPI_execute_with_args(statement, num_arguments, types,
											 values, NULL, false, 0);

	if (code < 0)
		elog(ERROR, "could not write to the tables of leases: %s",
			 SPI_result_code_string(code));
}

/*
 * Writing has failed, or cannot even begin: tell all who wait for it.  "code"
 * is the SQLSTATE.
 */
void
dlock_journal_fail(DlockSpace *space, int code)
{
	pg_atomic_write_u32(&space->failure, (uint32) code);
	pg_write_barrier();
	pg_atomic_fetch_add_u32(&space->failures, 1);

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	for (dsa_pointer link = space->journal.head; DsaPointerIsValid(link);)
	{
		DlockRecord *record = dsa_get_address(dlock_area, link);

		link = record->link.next;
		ConditionVariableBroadcast(&record->changed);
	}
	LWLockRelease(&space->lease_lock);
}

/* Write the rows of one table.  Returns how many rows it leaves dead. */
static int
write_table(DlockSpace *space, bool leases)
{
	const char *name = table_name(space, leases ? "dlock_queue_lease" :
								  "dlock_queue");
	const Oid  *types = leases ? lease_types : ticket_types;
	int			num_types = leases ? lengthof(lease_types) :
		lengthof(ticket_types);
	Columns		columns = {.num_columns = 0};
	Datum	   *gone = palloc(num_images * sizeof(Datum));
	int			num_gone = 0;
	int			dead = 0;
	Oid			array_types[20];
	Datum		arrays[20];

	for (int c = 0; c < num_types; c++)
		add_column(&columns, types[c], num_images);
	for (int i = 0; i < num_images; i++)
	{
		if (images[i].record->is_lease != leases)
			continue;
		if (images[i].had_row)
			dead++;
		if (!images[i].over && leases)
			fill_lease(&columns, &images[i]);
		else if (!images[i].over)
			fill_ticket(&columns, &images[i]);
		else if (images[i].had_row)
			gone[num_gone++] =
				Int64GetDatum(leases ?
							  ((DlockLease *) images[i].record)->number :
							  dlock_record_ticket(images[i].record)->ticket.number);
	}
	if (num_gone > 0)
	{
		array_types[0] = INT8ARRAYOID;
		arrays[0] = PointerGetDatum(construct_array(gone, num_gone, INT8OID,
													sizeof(int64),
													FLOAT8PASSBYVAL,
													TYPALIGN_DOUBLE));
		run(psprintf("DELETE FROM %s WHERE %s OPERATOR(pg_catalog.=) ANY ($1)",
					 name, leases ? "lease" : "ticket"),
			1, array_types, arrays);
	}
	if (columns.num_rows > 0)
	{
		for (int c = 0; c < num_types; c++)
		{
			array_types[c] = get_array_type(types[c]);
			arrays[c] = column_array(&columns, c);
		}
		run(psprintf(leases ? write_leases : write_tickets, name, origin()),
			num_types, array_types, arrays);
	}
	return dead;
}

/* Who the worker is, unless it writes */
static Oid	worker_user;
static int	worker_context;

/*
 * Begin a transaction as the owner of the tables; false where the extension is
 * not there any more, and there is nothing to write to.
 */
static bool
begin_writing(DlockSpace *space)
{
	Oid			owner;

	GetUserIdAndSecContext(&worker_user, &worker_context);

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	if (get_extension_oid("dlock", true) != space->key.extension)
	{
		CommitTransactionCommand();
		return false;
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	owner = dlock_relation_owner(dlock_relation(space, "dlock_queue"));
	SetUserIdAndSecContext(owner, SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_RESTRICTED_OPERATION |
						   SECURITY_NOFORCE_RLS);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "could not connect to SPI");
	return true;
}

static void
end_writing(void)
{
	SPI_finish();
	SetUserIdAndSecContext(worker_user, worker_context);
	PopActiveSnapshot();
	CommitTransactionCommand();
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
 * and all of it still marked.  For every row that was written, and is still
 * there, "written" is called back.
 */
int
dlock_journal_write(DlockSpace *space, int *dead,
					void (*written) (DlockRecord *, bool over, XLogRecPtr lsn))
{
	bool		is_there;
	XLogRecPtr	lsn;
	int			count;

	if (images == NULL)
		images = MemoryContextAlloc(TopMemoryContext, BATCH * sizeof(Image));
	dlock_journal_let_go();

	PG_TRY();
	{
		is_there = begin_writing(space);
		if (is_there)
		{
			copy_marked(space);
			*dead += write_table(space, true);
			*dead += write_table(space, false);
			end_writing();
		}
	}
	PG_CATCH();
	{
		LWLockReleaseAll();
		unmark(space, false, InvalidXLogRecPtr);
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
 * What a worker begins with: rows that stand for nothing go.  And what the
 * worker before may have written, or not, counts as written.
 */
bool
dlock_journal_begin(DlockSpace *space)
{
	char	   *queue;
	char	   *leases;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	for (dsa_pointer link = space->journal.head; DsaPointerIsValid(link);)
	{
		DlockRecord *record = dsa_get_address(dlock_area, link);

		record->has_row |= record->in_flight;
		record->in_flight = false;
		link = record->link.next;
	}
	LWLockRelease(&space->lease_lock);

	if (!begin_writing(space))
		return false;
	queue = table_name(space, "dlock_queue");
	leases = table_name(space, "dlock_queue_lease");
	run(psprintf("DELETE FROM %s WHERE (system, database) "
				 "OPERATOR(pg_catalog.<>) (%s)", leases, origin()),
		0, NULL, NULL);
	run(psprintf("DELETE FROM %s AS q WHERE (q.system, q.database) "
				 "OPERATOR(pg_catalog.<>) (%s) OR (q.ttl IS NULL AND NOT EXISTS "
				 "(SELECT FROM %s AS l WHERE l.lease OPERATOR(pg_catalog.=) q.lease "
				 "AND (q.granted OR NOT l.delayed)))",
				 queue, origin(), leases),
		0, NULL, NULL);
	end_writing();
	return true;
}

/*
 * Vacuum the tables once they have got many dead rows, so that they stay small
 * however many tickets come and go between two runs of autovacuum.  Where an
 * old snapshot keeps the dead rows, the tables grow, and this comes more
 * rarely.
 */
void
dlock_journal_vacuum(DlockSpace *space, int *dead)
{
	static const char *const names[] = {"dlock_queue", "dlock_queue_lease"};
	static int	threshold = VACUUM_ROWS;

	if (*dead < threshold)
		return;
	*dead = 0;
	threshold = VACUUM_ROWS;
	for (int i = 0; i < (int) lengthof(names); i++)
	{
		VacuumStmt *statement;
		Relation	table;
		RangeVar   *name;

		StartTransactionCommand();
		if (get_extension_oid("dlock", true) != space->key.extension)
		{
			CommitTransactionCommand();
			return;
		}
		table = relation_open(dlock_relation(space, names[i]), AccessShareLock);
		threshold = Max(threshold, (int) RelationGetNumberOfBlocks(table) *
						VACUUM_ROWS_PER_PAGE);
		MemoryContextSwitchTo(TopMemoryContext);
		name = makeRangeVar(get_namespace_name(RelationGetNamespace(table)),
							pstrdup(RelationGetRelationName(table)), -1);
		relation_close(table, AccessShareLock);
		statement = makeNode(VacuumStmt);
		statement->is_vacuumcmd = true;
		statement->rels = list_make1(makeVacuumRelation(name, InvalidOid, NIL));
		statement->options =
			list_make2(makeDefElem("skip_locked", NULL, -1),
					   makeDefElem("truncate", (Node *) makeString("off"), -1));
		CommitTransactionCommand();

		StartTransactionCommand();
		ExecVacuum(make_parsestate(NULL), statement, true);
		CommitTransactionCommand();
	}
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

/*
 * Reading
 */

/* The columns of a row that was read */
static Datum
get(HeapTuple row, int column, bool *is_null)
{
	return SPI_getbinval(row, SPI_tuptable->tupdesc, column, is_null);
}

static int64
get_int64(HeapTuple row, int column)
{
	bool		is_null;

	return DatumGetInt64(get(row, column, &is_null));
}

static int32
get_int32(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? 0 : DatumGetInt32(datum);
}

static bool
get_bool(HeapTuple row, int column)
{
	bool		is_null;

	return DatumGetBool(get(row, column, &is_null));
}

static TimestampTz
get_time(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? 0 : DatumGetTimestampTz(datum);
}

static int64
get_interval(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? 0 : DatumGetIntervalP(datum)->time;
}

static char *
get_text(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? NULL : TextDatumGetCString(datum);
}

static Oid
get_oid(HeapTuple row, int column)
{
	bool		is_null;

	return DatumGetObjectId(get(row, column, &is_null));
}

/* Read a table with the latest snapshot there is. */
static void
read_rows(const char *statement)
{
	SPIPlanPtr	plan = SPI_prepare(statement, 0, NULL);
	Snapshot	snapshot;

	if (plan == NULL)
		elog(ERROR, "could not read the tables of leases");
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	if (SPI_execute_snapshot(plan, NULL, NULL, snapshot, InvalidSnapshot,
							 true, false, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read the tables of leases");
	UnregisterSnapshot(snapshot);
}

static void
load_leases(DlockSpace *space)
{
	read_rows(psprintf("SELECT lease, ttl, delay, delayed, info, role, "
					   "role_name::pg_catalog.text, opened_at, durability FROM %s "
					   "WHERE (system, database) OPERATOR(pg_catalog.=) (%s) "
					   "ORDER BY lease",
					   table_name(space, "dlock_queue_lease"), origin()));
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	row = SPI_tuptable->vals[i];
		int			before = dlock_record_prepare();
		DlockLease *lease;

		if (dlock_lease_restored(space, get_int64(row, 1)) == NULL)
		{
			lease = dlock_lease_make(space, get_interval(row, 2),
									 get_interval(row, 3), false,
									 get_text(row, 5));
			lease->number = get_int64(row, 1);
			lease->role = get_oid(row, 6);
			namestrcpy(&lease->role_name, get_text(row, 7));
			lease->opened_at = get_time(row, 8);
			lease->durability = get_int32(row, 9);
			dlock_lease_restore(lease, get_bool(row, 4));
		}
		dlock_record_unuse(before);
	}
}

static void
load_tickets(DlockSpace *space)
{
	read_rows(psprintf("SELECT ticket, name, lease, granted, delayed, mode, slots, "
					   "permits, owner, info, channel, role, "
					   "role_name::pg_catalog.text, enqueued_at, granted_at, ttl, "
					   "delay, durability FROM %s "
					   "WHERE (system, database) OPERATOR(pg_catalog.=) (%s) "
					   "ORDER BY ticket",
					   table_name(space, "dlock_queue"), origin()));
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	row = SPI_tuptable->vals[i];
		int			before = dlock_record_prepare();
		char	   *name = get_text(row, 2);
		DlockRequest request;
		bool		single = get_interval(row, 16) > 0;
		DlockLeaseTicket *ticket;

		memset(&request, 0, offsetof(DlockRequest, key));
		dlock_key_fill(&request.key, space, name, strlen(name));
		request.scope = DLOCK_LEASE;
		request.mode = dlock_mode_by_name(get_text(row, 6));
		request.slots = get_int32(row, 7);
		request.permits = get_int32(row, 8);
		request.owner = get_text(row, 9);
		request.info = get_text(row, 10);
		request.channel = get_text(row, 11);
		if (single)
		{
			request.lease = dlock_lease_make(space, get_interval(row, 16),
											 get_interval(row, 17), true, NULL);
			request.lease->number = get_int64(row, 1);
			request.lease->role = get_oid(row, 12);
			namestrcpy(&request.lease->role_name, get_text(row, 13));
			request.lease->opened_at = get_time(row, 14);
			request.lease->durability = get_int32(row, 18);
		}
		else
			request.lease = dlock_lease_restored(space, get_int64(row, 3));
		if (request.lease &&
			!dlock_lease_ticket_is_restored(space, get_int64(row, 1)))
		{
			ticket = dlock_lease_ticket_make(space, &request);
			ticket->ticket.number = get_int64(row, 1);
			ticket->ticket.role = get_oid(row, 12);
			ticket->ticket.enqueued_at = get_time(row, 14);
			ticket->ticket.granted_at = get_time(row, 15);
			ticket->durability = get_int32(row, 18);
			dlock_lease_ticket_restore(ticket, get_bool(row, 4),
									   get_bool(row, 5));
		}
		dlock_record_unuse(before);
	}

	/* who waits is granted what became free with the last release written */
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		DlockKey	key;
		char	   *name = get_text(SPI_tuptable->vals[i], 2);

		dlock_key_fill(&key, space, name, strlen(name));
		dlock_queue_resume(&key);
	}
}

/*
 * Wait for the standbys to acknowledge a record written now, if there are
 * leases that they count for: a server that was cut off from them, and
 * replaced, must not honour what it finds in its tables.
 */
static void
wait_for_quorum(DlockSpace *space)
{
	int			durability = dlock_lease_greatest_durability(space);
	XLogRecPtr	lsn;

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		!dlock_journal_has_standbys())
		return;
	lsn = dlock_journal_heartbeat();
	while (!dlock_journal_is_acknowledged(lsn, durability))
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT |
						 WL_EXIT_ON_PM_DEATH, 10, WAIT_EVENT_SYNC_REP);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

/*
 * Put back what the tables keep, at the first call after a restart, a crash or
 * a promotion: every lease with its full ttl, every ticket in its place.  Until
 * that is done no other call goes on.  An error leaves what was put back so
 * far, which nobody sees, and the next call goes on from there.
 */
void
dlock_journal_load(DlockSpace *space)
{
	Oid			queue = dlock_relation(space, "dlock_queue");
	Oid			user;
	int			context;

	LockRelationOid(queue, ShareUpdateExclusiveLock);
	if (pg_atomic_read_u32(&space->loaded) != 0)
	{
		UnlockRelationOid(queue, ShareUpdateExclusiveLock);
		return;
	}
	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(dlock_relation_owner(queue),
						   context | SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_RESTRICTED_OPERATION |
						   SECURITY_NOFORCE_RLS);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "could not connect to SPI");
	load_leases(space);
	load_tickets(space);
	SPI_finish();
	SetUserIdAndSecContext(user, context);
	wait_for_quorum(space);
	dlock_lease_begin_anew(space);
	pg_atomic_write_u32(&space->loaded, 1);
	UnlockRelationOid(queue, ShareUpdateExclusiveLock);
	if (space->leases.length > 0)
		(void) dlock_worker_wake(space);
}

/* The space of this database, with what its tables keep. */
DlockSpace *
dlock_loaded_space(void)
{
	DlockSpace *space = dlock_current_space();

	if (unlikely(pg_atomic_read_u32(&space->loaded) == 0))
		dlock_journal_load(space);
	return space;
}
