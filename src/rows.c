/*-------------------------------------------------------------------------
 *
 * rows.c
 *	  Writing the tables dlock_queue and dlock_queue_lease.
 *
 * The worker does, alone, for journal.c.  Rows are written without SQL, as the
 * worker of logical replication writes: for the few rows of a batch, starting
 * up statements would cost more than all the rest.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relation.h"
#include "access/xact.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "commands/vacuum.h"
#include "executor/executor.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "journal.h"

/* Dead rows per page of the table that are worth a vacuum */
#define VACUUM_ROWS_PER_PAGE	20

/* dlock_queue and dlock_queue_lease, as long as they are known to be right */
static bool tables_known = false;
static Oid	table_ids[2];

/* The same, opened by the transaction that writes */
static Relation relations[2];

/* A table that is being written */
typedef struct Table
{
	Relation	relation;
	Oid			index;			/* of the primary key, the first column */
	EState	   *state;
	ResultRelInfo *info;
	TupleTableSlot *row;		/* as it is to be */
	TupleTableSlot *old_row;	/* as it was */
} Table;

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
fill_ticket(TupleTableSlot *row, const DlockImage *image)
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
fill_lease(TupleTableSlot *row, const DlockImage *image)
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
fill_row(TupleTableSlot *row, const DlockImage *image)
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
write_image(Table *table, const DlockImage *image)
{
	int64		number = image->record->is_lease ?
		((DlockLease *) image->record)->number :
		dlock_record_ticket(image->record)->ticket.number;

	if (!image->over)
	{
		MemoryContext old_context =
			MemoryContextSwitchTo(GetPerTupleMemoryContext(table->state));

		fill_row(table->row, image);
		MemoryContextSwitchTo(old_context);
		write_row(table, number, image->had_row);
	}
	else if (image->had_row)
		remove_row(table, number);
}

/* Write the rows of one table.  Returns how many rows it leaves dead. */
static int
write_table(Relation relation, const DlockImage *images, int count,
			bool leases)
{
	Table		table = {.relation = NULL};
	int			dead = 0;

	for (int i = 0; i < count; i++)
	{
		MemoryContext old_context;

		if (images[i].record->is_lease != leases ||
			(images[i].over && !images[i].had_row))
			continue;
		if (table.relation == NULL)
			open_table(&table, relation);
		/* what a trigger's function keeps from row to row is put there */
		old_context = MemoryContextSwitchTo(table.state->es_query_cxt);
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
dlock_rows_origin(void)
{
	return psprintf("'%lld'::pg_catalog.int8, '%u'::pg_catalog.oid",
					(long long) GetSystemIdentifier(), MyDatabaseId);
}

/* A table of the space's, quoted */
char *
dlock_rows_table(DlockSpace *space, const char *name)
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
open_tables(DlockSpace *space)
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
 * Begin a transaction as the owner of the tables; false where the extension is
 * not there any more, and there is nothing to write to.
 */
bool
dlock_rows_begin(DlockSpace *space)
{
	GetUserIdAndSecContext(&worker_user, &worker_context);

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	if (!open_tables(space))
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

/*
 * Write the rows of a batch.  Returns how many rows that leaves dead.
 */
int
dlock_rows_write(const DlockImage *images, int count)
{
	return write_table(relations[1], images, count, true) +
		write_table(relations[0], images, count, false);
}

/*
 * Remove rows that stand for nothing: of another system or database, and of
 * leases that are not there.
 */
void
dlock_rows_remove_foreign(DlockSpace *space)
{
	char	   *queue = dlock_rows_table(space, "dlock_queue");
	char	   *leases = dlock_rows_table(space, "dlock_queue_lease");

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "could not connect to SPI");
	run(psprintf("DELETE FROM %s WHERE (system, database) "
				 "OPERATOR(pg_catalog.<>) (%s)", leases, dlock_rows_origin()));
	run(psprintf("DELETE FROM %s AS q WHERE (q.system, q.database) "
				 "OPERATOR(pg_catalog.<>) (%s) OR (q.ttl IS NULL AND NOT EXISTS "
				 "(SELECT FROM %s AS l WHERE l.lease OPERATOR(pg_catalog.=) q.lease "
				 "AND (q.granted OR NOT l.delayed)))",
				 queue, dlock_rows_origin(), leases));
	SPI_finish();
}

/* Commit what dlock_rows_begin() has begun. */
void
dlock_rows_commit(void)
{
	for (int i = 0; i < 2; i++)
		relation_close(relations[i], NoLock);
	SetUserIdAndSecContext(worker_user, worker_context);
	PopActiveSnapshot();
	CommitTransactionCommand();
}

/*
 * Vacuum the tables, so that they stay small however many tickets come and go
 * between two runs of autovacuum.  Returns after how many dead rows to do so
 * again: where an old snapshot keeps them, the tables grow, and this comes more
 * rarely.
 */
int
dlock_rows_vacuum(DlockSpace *space)
{
	static const char *const names[] = {"dlock_queue", "dlock_queue_lease"};
	int			threshold = DLOCK_VACUUM_ROWS;
	static MemoryContext context = NULL;	/* outlives transactions */

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
			break;
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
	return threshold;
}
