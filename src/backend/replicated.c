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
 *	"reservations"	A new one comes if its prefix is not reserved here.  What
 *					changes or removes one does so here, too, whoever has
 *					made the one that is here: that cannot be told.
 *	"slots"			The same for locks and the slots that are set for them.
 *
 * Otherwise two servers that have a row of one name would stop the replication
 * of all tables.  An update that changes nothing here is none: it would go around
 * for ever, where each of two servers sends the other all that it has.
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

#define MAX_COLUMNS	4

/* What becomes of the rows of a kind; the first two columns must not be null. */
typedef struct Merge
{
	const char *kind;
	const char *insert;			/* the statement for a row that comes ... */
	const char *update;			/* ... and for one that has changed */
	bool		can_delete;
	int			num_columns;
	const char *columns[MAX_COLUMNS];
} Merge;

#define MERGE_VERSION \
	"INSERT INTO %s AS own (name, version, bumped_by, bumped_at) " \
	"VALUES ($1, $2, $3, $4) " \
	"ON CONFLICT (name) DO UPDATE SET version = excluded.version, " \
	"bumped_by = excluded.bumped_by, bumped_at = excluded.bumped_at " \
	"WHERE own.version OPERATOR(pg_catalog.<) excluded.version"

static const Merge merges[] = {
	{
		"versions", MERGE_VERSION, MERGE_VERSION, false,
		4, {"name", "version", "bumped_by", "bumped_at"}
	},
	{
		"reservations",
		"INSERT INTO %s (prefix, owner) VALUES ($1, $2) "
		"ON CONFLICT (prefix) DO NOTHING",
		"INSERT INTO %s AS own (prefix, owner) VALUES ($1, $2) "
		"ON CONFLICT (prefix) DO UPDATE SET owner = excluded.owner "
		"WHERE (own.owner, own.role) OPERATOR(pg_catalog.<>) (excluded.owner, excluded.role)",
		true, 2, {"prefix", "owner"}
	},
	{
		"slots",
		"INSERT INTO %s (name, slots) VALUES ($1, $2) "
		"ON CONFLICT (name) DO NOTHING",
		"INSERT INTO %s AS own (name, slots) VALUES ($1, $2) "
		"ON CONFLICT (name) DO UPDATE SET slots = excluded.slots "
		"WHERE own.slots OPERATOR(pg_catalog.<>) excluded.slots",
		true, 2, {"name", "slots"}
	}
};

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

/* The kind that a trigger is for; NULL if nothing of it comes */
static const Merge *
find_merge(const char *kind)
{
	for (int i = 0; i < (int) lengthof(merges); i++)
	{
		if (strcmp(kind, merges[i].kind) == 0)
			return &merges[i];
	}
	return NULL;
}

static void
merge_row(TriggerData *trigger, HeapTuple row, const Merge *merge)
{
	const char *statement = TRIGGER_FIRED_BY_UPDATE(trigger->tg_event) ?
		merge->update : merge->insert;
	TupleDesc	descriptor = RelationGetDescr(trigger->tg_relation);
	char	   *table =
		quote_qualified_identifier(get_namespace_name(RelationGetNamespace(trigger->tg_relation)),
								   RelationGetRelationName(trigger->tg_relation));
	Oid			types[MAX_COLUMNS];
	Datum		values[MAX_COLUMNS];
	char		nulls[MAX_COLUMNS];

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "could not connect to SPI");
	for (int i = 0; i < merge->num_columns; i++)
	{
		int			column = SPI_fnumber(descriptor, merge->columns[i]);
		bool		is_null;

		if (column <= 0)
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("column \"%s\" of table %s does not exist",
							merge->columns[i], table)));
		types[i] = SPI_gettypeid(descriptor, column);
		values[i] = SPI_getbinval(row, descriptor, column, &is_null);
		nulls[i] = is_null ? 'n' : ' ';
		if (is_null && i < 2)
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("null in column \"%s\" of table %s",
							merge->columns[i], table)));
	}
	merging = true;
	PG_TRY();
	{
		if (SPI_execute_with_args(psprintf(statement, table),
								  merge->num_columns, types, values, nulls,
								  false, 0) != SPI_OK_INSERT)
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
	TriggerData *trigger = dlock_trigger(fcinfo, "dlock_replicated");
	bool		updated = TRIGGER_FIRED_BY_UPDATE(trigger->tg_event);
	HeapTuple	row = updated ? trigger->tg_newtuple : trigger->tg_trigtuple;
	const Merge *merge;

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
	merge = find_merge(trigger->tg_trigger->tgargs[0]);
	if (merge && TRIGGER_FIRED_BY_DELETE(trigger->tg_event))
		return PointerGetDatum(merge->can_delete ? row : NULL);
	if (merge)
		merge_row(trigger, row, merge);
	return PointerGetDatum(NULL);
}
