/*-------------------------------------------------------------------------
 *
 * replicated.c
 *	  What becomes of what comes by logical replication.
 *
 * A publication FOR ALL TABLES takes in the tables of an extension, and nothing
 * can keep them out of it.  So a trigger on each of them sees to it that what
 * arrives from another server does no harm:
 *
 *	"live"			The tables of leases say what this server has promised.
 *					Nothing that another one has promised is kept here, and
 *					nothing of this one is removed.
 *	"versions"		Of two versions of a name the greater one counts: who was
 *					behind finds out and repeats, and no version ever falls,
 *					whichever way, and however often, rows go around.
 *	"reservations"	A prefix that is reserved here stays as it is.  Others
 *					follow what comes.
 *	"slots"			The same for locks whose slots are set here.
 *
 * Otherwise two servers that have a row of one name would stop the replication
 * of all tables.
 *
 * A TRUNCATE, which publications send, too, has no effect on any of them.  No
 * trigger can keep it from happening; so one keeps the rows, before it, and one
 * puts them back, behind it.  From before the one until the transaction ends the
 * table is locked so that nobody else reads or writes it.
 *
 * The triggers are for replicas alone: neither this server's
 * own changes nor, as it is a session's, a restore in a session that calls
 * itself a replica is meant.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heaptoast.h"
#include "access/htup_details.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/tuplestore.h"

#include "backend/backend.h"

/* One of our own statements is at work: its rows go in. */
static bool merging = false;

static const char merge_version[] =
	"INSERT INTO %s AS own (name, version, bumped_by, bumped_at) "
	"VALUES ($1, $2, $3, $4) "
	"ON CONFLICT (name) DO UPDATE SET version = excluded.version, "
	"bumped_by = excluded.bumped_by, bumped_at = excluded.bumped_at "
	"WHERE own.version OPERATOR(pg_catalog.<) excluded.version";
static const char merge_slots[] =
	"INSERT INTO %s (name, slots) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING";
static const char merge_reservation[] =
	"INSERT INTO %s (prefix, owner) VALUES ($1, $2) ON CONFLICT (prefix) DO NOTHING";

/*
 * Whoever applies the changes of another server is a background worker.  Our
 * own one is none of them, even if a setting makes it a replica.
 */
static bool
is_applying(void)
{
	return MyBackendType == B_BG_WORKER &&
		strcmp(MyBgworkerEntry->bgw_function_name, "dlock_worker_main") != 0;
}

#define MAX_COLUMNS	4

/* Insert a row with a statement; its first two columns must not be null. */
static void
merge(TriggerData *trigger, HeapTuple row, const char *statement,
	  const char *const columns[], int num_columns)
{
	TupleDesc	descriptor = RelationGetDescr(trigger->tg_relation);
	char	   *table =
		quote_qualified_identifier(get_namespace_name(RelationGetNamespace(trigger->tg_relation)),
								   RelationGetRelationName(trigger->tg_relation));
	Oid			types[MAX_COLUMNS];
	Datum		values[MAX_COLUMNS];
	char		nulls[MAX_COLUMNS];

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "could not connect to SPI");
	Assert(num_columns <= MAX_COLUMNS);
	for (int i = 0; i < num_columns; i++)
	{
		int			column = SPI_fnumber(descriptor, columns[i]);
		bool		is_null;

		if (column <= 0)
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("column \"%s\" of table %s does not exist",
							columns[i], table)));
		types[i] = SPI_gettypeid(descriptor, column);
		values[i] = SPI_getbinval(row, descriptor, column, &is_null);
		nulls[i] = is_null ? 'n' : ' ';
		if (is_null && i < 2)
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("null in column \"%s\" of table %s",
							columns[i], table)));
	}
	merging = true;
	PG_TRY();
	{
		if (SPI_execute_with_args(psprintf(statement, table), num_columns,
								  types, values, nulls, false, 0) != SPI_OK_INSERT)
			elog(ERROR, "could not merge a row into table %s", table);
	}
	PG_FINALLY();
	{
		merging = false;
	}
	PG_END_TRY();
	SPI_finish();
}

/* A table that this transaction truncates, without an effect */
typedef struct KeptTable
{
	Oid			id;
	Tuplestorestate *rows;
	struct KeptTable *next;
} KeptTable;

/* in TopTransactionContext */
static KeptTable *kept_tables = NULL;

static void
forget_kept_tables(void *arg)
{
	kept_tables = NULL;
}

static KeptTable *
find_kept_table(Oid id)
{
	KeptTable  *kept = kept_tables;

	while (kept && kept->id != id)
		kept = kept->next;
	return kept;
}

/* Does this transaction leave the table's rows as they are if it truncates it? */
bool
dlock_replicated_keeps(Oid table)
{
	return find_kept_table(table) != NULL;
}

static KeptTable *
make_kept_table(Oid id)
{
	KeptTable  *kept = MemoryContextAlloc(TopTransactionContext,
										  sizeof(KeptTable));

	if (kept_tables == NULL)
	{
		MemoryContextCallback *callback =
			MemoryContextAllocZero(TopTransactionContext,
								   sizeof(MemoryContextCallback));

		callback->func = forget_kept_tables;
		MemoryContextRegisterResetCallback(TopTransactionContext, callback);
	}
	kept->id = id;
	kept->next = kept_tables;
	kept_tables = kept;
	return kept;
}

/*
 * Before the TRUNCATE: copy the rows, all of each, as what is stored besides the
 * table goes, too.  The snapshot is taken with the table locked, and so misses
 * none.
 */
static void
keep_rows(Relation table)
{
	KeptTable  *kept = find_kept_table(RelationGetRelid(table));
	MemoryContext old_context;
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	SysScanDesc scan;
	HeapTuple	row;

	if (kept == NULL)
		kept = make_kept_table(RelationGetRelid(table));
	old_context = MemoryContextSwitchTo(TopTransactionContext);
	kept->rows = tuplestore_begin_heap(false, false, work_mem);
	MemoryContextSwitchTo(old_context);

	scan = systable_beginscan(table, InvalidOid, false, snapshot, 0, NULL);
	while ((row = systable_getnext(scan)) != NULL)
	{
		HeapTuple	whole = toast_flatten_tuple(row, RelationGetDescr(table));

		CHECK_FOR_INTERRUPTS();
		tuplestore_puttuple(kept->rows, whole);
		heap_freetuple(whole);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
}

/*
 * Behind the TRUNCATE: put them back, as they were.  That runs no triggers and
 * computes no columns anew; and it is told to no subscriber of ours, as the
 * TRUNCATE has no effect there either.  The rows are frozen, so that those who
 * have a snapshot from before see them, too.
 */
static void
put_rows_back(Relation table)
{
	KeptTable  *kept = find_kept_table(RelationGetRelid(table));
	TupleTableSlot *row;

	if (kept == NULL || kept->rows == NULL)
		return;
	row = MakeSingleTupleTableSlot(RelationGetDescr(table),
								   &TTSOpsMinimalTuple);
	while (tuplestore_gettupleslot(kept->rows, true, false, row))
	{
		CHECK_FOR_INTERRUPTS();
		table_tuple_insert(table, row, GetCurrentCommandId(true),
						   TABLE_INSERT_FROZEN | TABLE_INSERT_NO_LOGICAL,
						   NULL);
	}
	ExecDropSingleTupleTableSlot(row);
	tuplestore_end(kept->rows);
	kept->rows = NULL;
	CommandCounterIncrement();
	compat_reindex_relation(RelationGetRelid(table));
}

/*
 * Row trigger, before an insert, an update or a delete; the argument says what
 * kind of table this is.  And statement trigger, before and after a truncate.
 */
PG_FUNCTION_INFO_V1(dlock_replicated);
Datum
dlock_replicated(PG_FUNCTION_ARGS)
{
	static const char *const version_columns[] = {"name", "version", "bumped_by", "bumped_at"};
	static const char *const reservation_columns[] = {"prefix", "owner"};
	static const char *const slots_columns[] = {"name", "slots"};
	TriggerData *trigger = dlock_trigger(fcinfo, "dlock_replicated");
	bool		updated = TRIGGER_FIRED_BY_UPDATE(trigger->tg_event);
	HeapTuple	row = updated ? trigger->tg_newtuple : trigger->tg_trigtuple;
	const char *kind;

	if (TRIGGER_FIRED_BY_TRUNCATE(trigger->tg_event))
	{
		if (!is_applying())
			return PointerGetDatum(NULL);
		if (TRIGGER_FIRED_BEFORE(trigger->tg_event))
			keep_rows(trigger->tg_relation);
		else
			put_rows_back(trigger->tg_relation);
		return PointerGetDatum(NULL);
	}
	if (!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigger->tg_event) ||
		trigger->tg_trigger->tgnargs != 1)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired before a change, for each row, with the kind of the table",
						"dlock_replicated")));

	if (!is_applying() || merging)
		return PointerGetDatum(row);
	kind = trigger->tg_trigger->tgargs[0];
	if (strcmp(kind, "reservations") == 0)
	{
		if (!TRIGGER_FIRED_BY_INSERT(trigger->tg_event))
			return PointerGetDatum(row);
		merge(trigger, row, merge_reservation, reservation_columns,
			  lengthof(reservation_columns));
	}
	else if (strcmp(kind, "slots") == 0)
	{
		if (!TRIGGER_FIRED_BY_INSERT(trigger->tg_event))
			return PointerGetDatum(row);
		merge(trigger, row, merge_slots, slots_columns,
			  lengthof(slots_columns));
	}
	else if (strcmp(kind, "versions") == 0 &&
			 !TRIGGER_FIRED_BY_DELETE(trigger->tg_event))
		merge(trigger, row, merge_version, version_columns,
			  lengthof(version_columns));
	return PointerGetDatum(NULL);
}
