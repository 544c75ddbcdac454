/*-------------------------------------------------------------------------
 *
 * journal.c
 *	  The tables dlock_queue and dlock_queue_lease: writing what changes in
 *	  leases and their tickets, and waiting until it is durable.
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

#include "access/genam.h"
#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_control.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "commands/vacuum.h"
#include "executor/executor.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
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
		DlockLease *lease = dlock_lease_of(ticket);

		image->granted = dlock_state_of(ticket) != DLOCK_WAITING;
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

/*
 * A table that is being written.  Rows are written without SQL, as the worker
 * of logical replication does: for the few rows of a batch, starting up
 * statements would cost more than all the rest.
 */
typedef struct Table
{
	Relation	relation;
	Oid			index;			/* of the primary key, the first column */
	EState	   *state;
	ResultRelInfo *info;
	TupleTableSlot *row;		/* as it is to be */
	TupleTableSlot *old_row;	/* as it was */
} Table;

/* The tables, and the owner of both, as long as they are known to be right */
static bool tables_known = false;
static Oid	table_ids[2];		/* dlock_queue, dlock_queue_lease */

static void
forget_tables(Datum arg, Oid relation)
{
	if (relation == InvalidOid || relation == table_ids[0] ||
		relation == table_ids[1])
		tables_known = false;
}

static void
open_table(Table *table, Relation relation)
{
	EState	   *state = CreateExecutorState();
	TupleDesc	descriptor = RelationGetDescr(relation);

	table->relation = relation;
	table->state = state;
	list_free(RelationGetIndexList(relation));
	table->index = relation->rd_pkindex;
	table->info = makeNode(ResultRelInfo);
	InitResultRelInfo(table->info, relation, 0, NULL, 0);
	ExecOpenIndices(table->info, false);
	state->es_opened_result_relations = list_make1(table->info);
	state->es_snapshot = GetActiveSnapshot();
	state->es_output_cid = GetCurrentCommandId(true);
	table->row = ExecInitExtraTupleSlot(state, descriptor, &TTSOpsVirtual);
	table->old_row = ExecInitExtraTupleSlot(state, descriptor,
											&TTSOpsHeapTuple);
	AfterTriggerBeginQuery();
}

static void
close_table(Table *table)
{
	AfterTriggerEndQuery(table->state);
	ExecResetTupleTable(table->state->es_tupleTable, false);
	ExecCloseIndices(table->info);
	FreeExecutorState(table->state);
}

/* Find the row with this number; NULL where there is none. */
static SysScanDesc
find_row(Table *table, int64 number)
{
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(number));
	scan = systable_beginscan(table->relation, table->index,
							  OidIsValid(table->index),
							  table->state->es_snapshot, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		ExecStoreHeapTuple(tuple, table->old_row, false);
		return scan;
	}
	systable_endscan(scan);
	return NULL;
}

static void
remove_row(Table *table, int64 number)
{
	SysScanDesc scan = find_row(table, number);
	EPQState	nobody;

	if (scan == NULL)
		return;
	compat_eval_plan_qual_init(&nobody, table->state);
	ExecSimpleRelationDelete(table->info, table->state, &nobody,
							 table->old_row);
	EvalPlanQualEnd(&nobody);
	ExecClearTuple(table->old_row);
	systable_endscan(scan);
}

/* Write table->row, in the place of the old one where there may be one. */
static void
write_row(Table *table, int64 number, bool had_row)
{
	SysScanDesc scan = had_row ? find_row(table, number) : NULL;
	EPQState	nobody;

	if (scan == NULL)
	{
		ExecSimpleRelationInsert(table->info, table->state, table->row);
		return;
	}
	compat_eval_plan_qual_init(&nobody, table->state);
	ExecSimpleRelationUpdate(table->info, table->state, &nobody,
							 table->old_row, table->row);
	EvalPlanQualEnd(&nobody);
	ExecClearTuple(table->old_row);
	systable_endscan(scan);
}

/* The columns of a row are set in their order. */
static void
set(TupleTableSlot *row, bool is_null, Datum datum)
{
	int			column = row->tts_nvalid++;

	if (column >= row->tts_tupleDescriptor->natts)
		elog(ERROR, "the tables of leases have too few columns");
	row->tts_values[column] = datum;
	row->tts_isnull[column] = is_null;
}

static void
set_text(TupleTableSlot *row, const char *text)
{
	set(row, text == NULL, text ? CStringGetTextDatum(text) : (Datum) 0);
}

static void
set_shared_text(TupleTableSlot *row, dsa_pointer text)
{
	set_text(row, DsaPointerIsValid(text) ?
			 dsa_get_address(dlock_area, text) : NULL);
}

static void
set_interval(TupleTableSlot *row, int64 microseconds)
{
	set(row, microseconds == 0,
		microseconds == 0 ? (Datum) 0 : dlock_interval_datum(microseconds));
}

/*
 * Which system and database a row belongs to: rows of another one came with a
 * copy, and stand for nothing here.
 */
static void
set_origin(TupleTableSlot *row)
{
	set(row, false, Int64GetDatum((int64) GetSystemIdentifier()));
	set(row, false, ObjectIdGetDatum(MyDatabaseId));
}

/* dlock_queue's columns */
static void
fill_ticket(TupleTableSlot *row, const Image *image)
{
	DlockLeaseTicket *ticket = dlock_record_ticket(image->record);
	DlockLease *lease = dlock_lease_of(ticket);
	bool		has_slots = ticket->ticket.mode == DLOCK_SLOTS;

	set(row, false, Int64GetDatum(ticket->ticket.number));
	set(row, false,
		PointerGetDatum(cstring_to_text_with_len(ticket->key.name,
												 ticket->key.length)));
	set(row, false, Int64GetDatum(lease->number));
	set(row, false, BoolGetDatum(image->granted));
	set(row, false, BoolGetDatum(image->delayed));
	set_text(row, dlock_mode_name(ticket->ticket.mode));
	set(row, !has_slots,
		has_slots ? Int32GetDatum(ticket->ticket.slots) : (Datum) 0);
	set(row, false, Int32GetDatum(ticket->ticket.permits));
	set_shared_text(row, ticket->owner);
	set_shared_text(row, ticket->ticket.info);
	set_text(row, image->channel[0] == '\0' ? NULL : image->channel);
	set(row, false, ObjectIdGetDatum(lease->role));
	set(row, false, NameGetDatum(&lease->role_name));
	set(row, false, TimestampTzGetDatum(ticket->ticket.enqueued_at));
	set(row, !image->granted,
		image->granted ? TimestampTzGetDatum(image->granted_at) : (Datum) 0);
	set_interval(row, lease->single ? lease->ttl : 0);
	set_interval(row, lease->single ? lease->delay : 0);
	set(row, false, Int32GetDatum(ticket->durability));
	set_origin(row);
}

/* dlock_queue_lease's columns */
static void
fill_lease(TupleTableSlot *row, const Image *image)
{
	DlockLease *lease = (DlockLease *) image->record;

	set(row, false, Int64GetDatum(lease->number));
	set_interval(row, lease->ttl);
	set_interval(row, lease->delay);
	set(row, false, BoolGetDatum(image->delayed));
	set_shared_text(row, lease->info);
	set(row, false, ObjectIdGetDatum(lease->role));
	set(row, false, NameGetDatum(&lease->role_name));
	set(row, false, TimestampTzGetDatum(lease->opened_at));
	set(row, false, Int32GetDatum(lease->durability));
	set_origin(row);
}

static void
fill_row(TupleTableSlot *row, const Image *image)
{
	ExecClearTuple(row);
	if (image->record->is_lease)
		fill_lease(row, image);
	else
		fill_ticket(row, image);
	/* what somebody has added to the table */
	while (row->tts_nvalid < row->tts_tupleDescriptor->natts)
		set(row, true, (Datum) 0);
	row->tts_nvalid = 0;
	ExecStoreVirtualTuple(row);
}

static void
write_image(Table *table, const Image *image)
{
	int64		number = image->record->is_lease ?
		((DlockLease *) image->record)->number :
		dlock_record_ticket(image->record)->ticket.number;

	if (!image->over)
	{
		fill_row(table->row, image);
		write_row(table, number, image->had_row);
	}
	else if (image->had_row)
		remove_row(table, number);
}

/* Write the rows of one table.  Returns how many rows it leaves dead. */
static int
write_table(Relation relation, bool leases)
{
	Table		table = {.relation = NULL};
	int			dead = 0;

	for (int i = 0; i < num_images; i++)
	{
		MemoryContext old_context;

		if (images[i].record->is_lease != leases ||
			(images[i].over && !images[i].had_row))
			continue;
		if (table.relation == NULL)
			open_table(&table, relation);
		old_context =
			MemoryContextSwitchTo(GetPerTupleMemoryContext(table.state));
		write_image(&table, &images[i]);
		MemoryContextSwitchTo(old_context);
		ResetPerTupleExprContext(table.state);
		if (images[i].had_row)
			dead++;
	}
	if (table.relation)
		close_table(&table);
	return dead;
}

/* The same as two SQL literals */
char *
dlock_journal_origin(void)
{
	return psprintf("'%lld'::pg_catalog.int8, '%u'::pg_catalog.oid",
					(long long) GetSystemIdentifier(), MyDatabaseId);
}

/* A table of the space's, quoted */
char *
dlock_journal_table(DlockSpace *space, const char *name)
{
	Oid			relation = dlock_relation(space, name);

	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relation)),
									  get_rel_name(relation));
}

static void
run(const char *statement)
{
	int			code = SPI_execute(statement, false, 0);

	if (code < 0)
		elog(ERROR, "could not write to the tables of leases: %s",
			 SPI_result_code_string(code));
}

/* Who the worker is, unless it writes */
static Oid	worker_user;
static int	worker_context;

/*
 * Open both tables; false where the extension is not there any more.  Looking
 * them up anew for each batch would be a good part of its cost.
 */
static bool
open_tables(DlockSpace *space, Relation *relations)
{
	static bool registered = false;

	if (!registered)
		CacheRegisterRelcacheCallback(forget_tables, (Datum) 0);
	registered = true;
	for (;;)
	{
		if (!tables_known)
		{
			if (get_extension_oid("dlock", true) != space->key.extension)
				return false;
			table_ids[0] = dlock_relation(space, "dlock_queue");
			table_ids[1] = dlock_relation(space, "dlock_queue_lease");
			tables_known = true;
		}
		for (int i = 0; i < 2; i++)
			relations[i] = try_relation_open(table_ids[i], RowExclusiveLock);
		/* the locks have let the news in */
		if (tables_known && relations[0] && relations[1])
			return true;
		for (int i = 0; i < 2; i++)
		{
			if (relations[i])
				relation_close(relations[i], RowExclusiveLock);
		}
		tables_known = false;
	}
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

/*
 * Begin a transaction as the owner of the tables; false where the extension is
 * not there any more, and there is nothing to write to.
 */
static bool
begin_writing(DlockSpace *space, Relation *relations)
{
	GetUserIdAndSecContext(&worker_user, &worker_context);

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	if (!open_tables(space, relations))
	{
		CommitTransactionCommand();
		return false;
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	SetUserIdAndSecContext(relations[0]->rd_rel->relowner,
						   SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_RESTRICTED_OPERATION |
						   SECURITY_NOFORCE_RLS);
	return true;
}

static void
end_writing(Relation *relations)
{
	for (int i = 0; i < 2; i++)
		relation_close(relations[i], NoLock);
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
	Relation	relations[2];
	bool		is_there;
	XLogRecPtr	lsn;
	int			count;

	if (images == NULL)
		images = MemoryContextAlloc(TopMemoryContext, BATCH * sizeof(Image));
	dlock_journal_let_go();

	PG_TRY();
	{
		is_there = begin_writing(space, relations);
		if (is_there)
		{
			copy_marked(space);
			*dead += write_table(relations[1], true);
			*dead += write_table(relations[0], false);
			end_writing(relations);
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
	Relation	relations[2];
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

	if (!begin_writing(space, relations))
		return false;
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "could not connect to SPI");
	queue = dlock_journal_table(space, "dlock_queue");
	leases = dlock_journal_table(space, "dlock_queue_lease");
	run(psprintf("DELETE FROM %s WHERE (system, database) "
				 "OPERATOR(pg_catalog.<>) (%s)", leases, dlock_journal_origin()));
	run(psprintf("DELETE FROM %s AS q WHERE (q.system, q.database) "
				 "OPERATOR(pg_catalog.<>) (%s) OR (q.ttl IS NULL AND NOT EXISTS "
				 "(SELECT FROM %s AS l WHERE l.lease OPERATOR(pg_catalog.=) q.lease "
				 "AND (q.granted OR NOT l.delayed)))",
				 queue, dlock_journal_origin(), leases));
	SPI_finish();
	end_writing(relations);
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
	static MemoryContext context = NULL;	/* outlives transactions */

	if (*dead < threshold)
		return;
	*dead = 0;
	threshold = VACUUM_ROWS;
	if (context == NULL)
		context = AllocSetContextCreate(TopMemoryContext, "dlock vacuum",
										ALLOCSET_SMALL_SIZES);
	MemoryContextReset(context);
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
		MemoryContextSwitchTo(context);
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
