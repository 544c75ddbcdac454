/*-------------------------------------------------------------------------
 *
 * rows.c
 *	  Writing and reading the tables dlock_queue and dlock_queue_lease.
 *
 * The worker writes, alone, for journal.c.  Rows are written without SQL, as
 * the worker of logical replication writes: for the few rows of a batch,
 * starting up statements would cost more than all the rest.  They are read in
 * the same way, so that what lets one of them go on lets the other: neither
 * asks for rights.  What the tables themselves may run (triggers, defaults,
 * generated columns, constraints, expressions of indexes) is run as the owner of
 * each, restricted; so PostgreSQL refuses triggers that are deferred.
 *
 * Columns are found by name, once for each change of a table, and looked at for
 * their type.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_opfamily.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "commands/vacuum.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "optimizer/optimizer.h"
#include "rewrite/rewriteHandler.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "journal.h"
#include "tables.h"

/* Dead rows per page of the table that are worth a vacuum */
#define VACUUM_ROWS_PER_PAGE	20

/* A column as it must be */
typedef struct Column
{
	const char *name;
	Oid			type;
	bool		can_be_null;
	bool		can_be_missing;
} Column;

static const Column queue_columns[] = {
	[DLOCK_QUEUE_TICKET] = {"ticket", INT8OID, false},
	[DLOCK_QUEUE_NAME] = {"name", TEXTOID, false},
	[DLOCK_QUEUE_LEASE] = {"lease", INT8OID, false},
	[DLOCK_QUEUE_GRANTED] = {"granted", BOOLOID, false},
	[DLOCK_QUEUE_DELAYED] = {"delayed", BOOLOID, false, true},
	[DLOCK_QUEUE_MODE] = {"mode", TEXTOID, false},
	[DLOCK_QUEUE_SLOTS] = {"slots", INT4OID, true},
	[DLOCK_QUEUE_PERMITS] = {"permits", INT4OID, false},
	[DLOCK_QUEUE_OWNER] = {"owner", TEXTOID, true},
	[DLOCK_QUEUE_INFO] = {"info", TEXTOID, true},
	[DLOCK_QUEUE_CHANNEL] = {"channel", TEXTOID, true},
	[DLOCK_QUEUE_ROLE] = {"role", OIDOID, false},
	[DLOCK_QUEUE_ROLE_NAME] = {"role_name", NAMEOID, false},
	[DLOCK_QUEUE_ENQUEUED_AT] = {"enqueued_at", TIMESTAMPTZOID, false},
	[DLOCK_QUEUE_GRANTED_AT] = {"granted_at", TIMESTAMPTZOID, true},
	[DLOCK_QUEUE_TTL] = {"ttl", INTERVALOID, true},
	[DLOCK_QUEUE_DURABILITY] = {"durability", INT4OID, false},
	[DLOCK_QUEUE_SYSTEM] = {"system", INT8OID, false},
	[DLOCK_QUEUE_DATABASE] = {"database", OIDOID, false}
};

static const Column lease_columns[] = {
	[DLOCK_LEASE_LEASE] = {"lease", INT8OID, false},
	[DLOCK_LEASE_TTL] = {"ttl", INTERVALOID, false},
	[DLOCK_LEASE_DELAY] = {"delay", INTERVALOID, true},
	[DLOCK_LEASE_DELAYED] = {"delayed", BOOLOID, false},
	[DLOCK_LEASE_INFO] = {"info", TEXTOID, true},
	[DLOCK_LEASE_ROLE] = {"role", OIDOID, false},
	[DLOCK_LEASE_ROLE_NAME] = {"role_name", NAMEOID, false},
	[DLOCK_LEASE_OPENED_AT] = {"opened_at", TIMESTAMPTZOID, false},
	[DLOCK_LEASE_DURABILITY] = {"durability", INT4OID, false},
	[DLOCK_LEASE_SYSTEM] = {"system", INT8OID, false},
	[DLOCK_LEASE_DATABASE] = {"database", OIDOID, false}
};

StaticAssertDecl(lengthof(queue_columns) == DLOCK_QUEUE_NUM_COLUMNS,
				 "columns of dlock_queue");
StaticAssertDecl(lengthof(lease_columns) == DLOCK_LEASE_NUM_COLUMNS,
				 "columns of dlock_queue_lease");

/* A table as it must be; its first column is the number of a row */
typedef struct Shape
{
	const char *name;
	const Column *columns;
	int			num_columns;
	int			system;			/* the column */
	int			database;
} Shape;

static const Shape shapes[DLOCK_NUM_TABLES] = {
	[DLOCK_TABLE_QUEUE] = {"dlock_queue", queue_columns,
		DLOCK_QUEUE_NUM_COLUMNS, DLOCK_QUEUE_SYSTEM, DLOCK_QUEUE_DATABASE},
	[DLOCK_TABLE_LEASES] = {"dlock_queue_lease", lease_columns,
		DLOCK_LEASE_NUM_COLUMNS, DLOCK_LEASE_SYSTEM, DLOCK_LEASE_DATABASE}
};

/* Where the columns of a table are; InvalidAttrNumber: one is missing */
typedef struct Places
{
	AttrNumber	number[DLOCK_MAX_COLUMNS];
} Places;

/* The tables, and where their columns are, as long as that is known to be right */
static bool tables_known = false;
static bool places_known = false;
static Oid	table_ids[DLOCK_NUM_TABLES];
static Places table_places[DLOCK_NUM_TABLES];

/* The same, opened by the transaction that writes */
static Relation relations[DLOCK_NUM_TABLES];

/* There may be rows of another system or database, as the space tells. */
static bool has_foreign_rows = true;

/* A table that is being written */
typedef struct Table
{
	Relation	relation;
	const Shape *shape;
	const Places *places;
	Oid			index;			/* of the number of a row, or none */
	EState	   *state;
	ResultRelInfo *info;
	TupleTableSlot *row;		/* as it is to be */
	TupleTableSlot *old_row;	/* as it was */
	int			num_others;		/* columns that somebody has added, ... */
	AttrNumber *others;
	ExprState **defaults;		/* ... and what they get; NULL: a null */
	Oid			user;			/* who the worker is otherwise */
	int			context;
} Table;

static void
forget_tables(Datum arg, Oid relation)
{
	if (relation == InvalidOid || relation == table_ids[0] ||
		relation == table_ids[1])
		tables_known = places_known = false;
}

static void
raise_changed(Relation relation, const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" is not what extension \"%s\" has made",
					RelationGetRelationName(relation), "dlock"),
			 errdetail_internal("%s", detail),
			 errhint("Undo what was changed, with ALTER TABLE.")));
}

/* Find the columns of a table.  Raises 55000 where one is not as it must be. */
static void
find_places(Relation relation, const Shape *shape, Places *places)
{
	TupleDesc	descriptor = RelationGetDescr(relation);

	for (int i = 0; i < shape->num_columns; i++)
	{
		const Column *column = &shape->columns[i];
		Form_pg_attribute found = NULL;

		for (int a = 0; a < descriptor->natts && found == NULL; a++)
		{
			Form_pg_attribute attribute = TupleDescAttr(descriptor, a);

			if (!attribute->attisdropped &&
				strcmp(NameStr(attribute->attname), column->name) == 0)
				found = attribute;
		}
		places->number[i] = InvalidAttrNumber;
		if (found == NULL && column->can_be_missing)
			continue;
		if (found == NULL)
			raise_changed(relation,
						  psprintf(_("It has no column \"%s\" of type %s."),
								   column->name, format_type_be(column->type)));
		if (found->atttypid != column->type || found->attgenerated != '\0')
			raise_changed(relation,
						  psprintf(_("Column \"%s\" is of type %s instead of %s, or generated."),
								   column->name, format_type_be(found->atttypid),
								   format_type_be(column->type)));
		places->number[i] = found->attnum;
	}
}

/* The columns of a row that was read */
static void
take_row(Relation relation, const Shape *shape, const Places *places,
		 HeapTuple tuple, DlockStored *row)
{
	for (int i = 0; i < shape->num_columns; i++)
	{
		AttrNumber	number = places->number[i];

		row->nulls[i] = number == InvalidAttrNumber;
		row->values[i] = (Datum) 0;
		if (row->nulls[i])
			continue;
		row->values[i] = heap_getattr(tuple, number, RelationGetDescr(relation),
									  &row->nulls[i]);
		if (!row->nulls[i])
			continue;
		if (!shape->columns[i].can_be_null)
			raise_changed(relation,
						  psprintf(_("A row has a null in column \"%s\"."),
								   shape->columns[i].name));
		row->values[i] = (Datum) 0;
	}
}

static bool
is_foreign(const Shape *shape, const DlockStored *row)
{
	return (uint64) DatumGetInt64(row->values[shape->system]) !=
		GetSystemIdentifier() ||
		DatumGetObjectId(row->values[shape->database]) != MyDatabaseId;
}

/* The index by which a row is found: the primary key, if it is that one. */
static Oid
find_index(Relation relation, AttrNumber number)
{
	HeapTuple	tuple;
	Form_pg_index index;
	Oid			found = InvalidOid;

	list_free(RelationGetIndexList(relation));
	if (!OidIsValid(relation->rd_pkindex))
		return InvalidOid;
	tuple = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(relation->rd_pkindex));
	if (!HeapTupleIsValid(tuple))
		return InvalidOid;
	index = (Form_pg_index) GETSTRUCT(tuple);
	if (index->indisvalid && index->indkey.values[0] == number)
		found = relation->rd_pkindex;
	ReleaseSysCache(tuple);
	return found;
}

/* Is this a column that somebody has added, and that can be written? */
static bool
is_other(const Shape *shape, const Places *places, Form_pg_attribute attribute)
{
	for (int i = 0; i < shape->num_columns; i++)
	{
		if (places->number[i] == attribute->attnum)
			return false;
	}
	return !attribute->attisdropped && attribute->attgenerated == '\0';
}

/* What is put into such a column; NULL: a null.  Raises 55000 if it must not be. */
static Node *
find_default(Relation relation, Form_pg_attribute attribute)
{
	Node	   *expression = build_column_default(relation, attribute->attnum);

	if (expression == NULL && attribute->attnotnull)
		raise_changed(relation,
					  psprintf(_("Column \"%s\" must not be null, and has no default."),
							   NameStr(attribute->attname)));
	return expression;
}

static void
find_defaults(Table *table)
{
	TupleDesc	descriptor = RelationGetDescr(table->relation);

	table->num_others = 0;
	table->others = palloc(descriptor->natts * sizeof(AttrNumber));
	table->defaults = palloc(descriptor->natts * sizeof(ExprState *));
	for (int a = 0; a < descriptor->natts; a++)
	{
		Form_pg_attribute attribute = TupleDescAttr(descriptor, a);
		Node	   *expression;

		if (!is_other(table->shape, table->places, attribute))
			continue;
		expression = find_default(table->relation, attribute);
		table->others[table->num_others] = attribute->attnum;
		table->defaults[table->num_others++] = expression == NULL ? NULL :
			ExecInitExpr(expression_planner((Expr *) expression), NULL);
	}
}

static void
open_table(Table *table, DlockTable which)
{
	EState	   *state = CreateExecutorState();
	Relation	relation = relations[which];
	TupleDesc	descriptor = RelationGetDescr(relation);
	MemoryContext old_context = MemoryContextSwitchTo(state->es_query_cxt);

	/* should an error come, PostgreSQL itself changes back */
	GetUserIdAndSecContext(&table->user, &table->context);
	SetUserIdAndSecContext(relation->rd_rel->relowner,
						   SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_RESTRICTED_OPERATION |
						   SECURITY_NOFORCE_RLS);
	table->relation = relation;
	table->shape = &shapes[which];
	table->places = &table_places[which];
	table->state = state;
	table->index = find_index(relation, table->places->number[0]);
	table->info = makeNode(ResultRelInfo);
	InitResultRelInfo(table->info, relation, 0, NULL, 0);
	ExecOpenIndices(table->info, false);
	state->es_opened_result_relations = list_make1(table->info);
	state->es_snapshot = GetActiveSnapshot();
	state->es_output_cid = GetCurrentCommandId(true);
	table->row = ExecInitExtraTupleSlot(state, descriptor, &TTSOpsVirtual);
	table->old_row = ExecInitExtraTupleSlot(state, descriptor,
											&TTSOpsHeapTuple);
	find_defaults(table);
	MemoryContextSwitchTo(old_context);
	AfterTriggerBeginQuery();
}

static void
close_table(Table *table)
{
	AfterTriggerEndQuery(table->state);
	ExecResetTupleTable(table->state->es_tupleTable, false);
	ExecCloseIndices(table->info);
	FreeExecutorState(table->state);
	SetUserIdAndSecContext(table->user, table->context);
}

/* Find the row with this number; NULL where there is none. */
static SysScanDesc
find_row(Table *table, int64 number)
{
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, table->places->number[0], BTEqualStrategyNumber, F_INT8EQ,
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

/* Remove the row that is in table->old_row. */
static void
remove_found(Table *table)
{
	EPQState	nobody;

	compat_eval_plan_qual_init(&nobody, table->state);
	ExecSimpleRelationDelete(table->info, table->state, &nobody,
							 table->old_row);
	EvalPlanQualEnd(&nobody);
	ExecClearTuple(table->old_row);
}

static void
remove_row(Table *table, int64 number)
{
	SysScanDesc scan = find_row(table, number);

	if (scan == NULL)
		return;
	remove_found(table);
	systable_endscan(scan);
}

/* Columns that somebody has added get their default, or keep what they have. */
static void
fill_others(Table *table, TupleTableSlot *old_row)
{
	ExprContext *context = GetPerTupleExprContext(table->state);

	for (int i = 0; i < table->num_others; i++)
	{
		int			column = table->others[i] - 1;
		Datum	   *value = &table->row->tts_values[column];
		bool	   *is_null = &table->row->tts_isnull[column];

		if (old_row)
			*value = slot_getattr(old_row, column + 1, is_null);
		else if (table->defaults[i])
			*value = ExecEvalExpr(table->defaults[i], context, is_null);
	}
}

/*
 * Write table->row, in the place of the old one where there may be one.  A row
 * of another system can have the same number as a new one here.
 */
static void
write_row(Table *table, int64 number, bool had_row)
{
	SysScanDesc scan = had_row || has_foreign_rows ?
		find_row(table, number) : NULL;
	EPQState	nobody;

	fill_others(table, scan ? table->old_row : NULL);
	ExecStoreVirtualTuple(table->row);
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

static void
set(Table *table, int column, bool is_null, Datum datum)
{
	int			place = table->places->number[column] - 1;

	if (place < 0)
		return;
	table->row->tts_values[place] = datum;
	table->row->tts_isnull[place] = is_null;
}

static void
set_text(Table *table, int column, const char *text)
{
	set(table, column, text == NULL,
		text ? CStringGetTextDatum(text) : (Datum) 0);
}

static void
set_shared_text(Table *table, int column, dsa_pointer text)
{
	set_text(table, column, DsaPointerIsValid(text) ?
			 dsa_get_address(dlock_area, text) : NULL);
}

static void
set_interval(Table *table, int column, int64 microseconds)
{
	set(table, column, microseconds == 0,
		microseconds == 0 ? (Datum) 0 : dlock_interval_datum(microseconds));
}

/* dlock_queue's columns */
static void
fill_ticket(Table *table, const DlockImage *image)
{
	DlockLeaseTicket *ticket = dlock_record_ticket(image->record);
	DlockLease *lease = dlock_lease_of(ticket);
	bool		has_slots = ticket->ticket.mode == DLOCK_SLOTS;

	set(table, DLOCK_QUEUE_TICKET, false, Int64GetDatum(ticket->ticket.number));
	set(table, DLOCK_QUEUE_NAME, false,
		PointerGetDatum(cstring_to_text_with_len(ticket->key.name,
												 ticket->key.length)));
	set(table, DLOCK_QUEUE_LEASE, false, Int64GetDatum(lease->number));
	set(table, DLOCK_QUEUE_GRANTED, false, BoolGetDatum(image->granted));
	set(table, DLOCK_QUEUE_DELAYED, false, BoolGetDatum(false));
	set_text(table, DLOCK_QUEUE_MODE, dlock_mode_name(ticket->ticket.mode));
	set(table, DLOCK_QUEUE_SLOTS, !has_slots,
		has_slots ? Int32GetDatum(ticket->ticket.slots) : (Datum) 0);
	set(table, DLOCK_QUEUE_PERMITS, false,
		Int32GetDatum(ticket->ticket.permits));
	set_shared_text(table, DLOCK_QUEUE_OWNER, ticket->owner);
	set_shared_text(table, DLOCK_QUEUE_INFO, ticket->ticket.info);
	set_text(table, DLOCK_QUEUE_CHANNEL,
			 image->channel[0] == '\0' ? NULL : image->channel);
	set(table, DLOCK_QUEUE_ROLE, false, ObjectIdGetDatum(lease->role));
	set(table, DLOCK_QUEUE_ROLE_NAME, false, NameGetDatum(&lease->role_name));
	set(table, DLOCK_QUEUE_ENQUEUED_AT, false,
		TimestampTzGetDatum(ticket->ticket.enqueued_at));
	set(table, DLOCK_QUEUE_GRANTED_AT, !image->granted,
		image->granted ? TimestampTzGetDatum(image->granted_at) : (Datum) 0);
	set_interval(table, DLOCK_QUEUE_TTL, lease->single ? lease->ttl : 0);
	set(table, DLOCK_QUEUE_DURABILITY, false, Int32GetDatum(ticket->durability));
}

/* dlock_queue_lease's columns */
static void
fill_lease(Table *table, const DlockImage *image)
{
	DlockLease *lease = (DlockLease *) image->record;

	set(table, DLOCK_LEASE_LEASE, false, Int64GetDatum(lease->number));
	set_interval(table, DLOCK_LEASE_TTL, lease->ttl);
	set_interval(table, DLOCK_LEASE_DELAY, lease->delay);
	set(table, DLOCK_LEASE_DELAYED, false, BoolGetDatum(image->delayed));
	set_shared_text(table, DLOCK_LEASE_INFO, lease->info);
	set(table, DLOCK_LEASE_ROLE, false, ObjectIdGetDatum(lease->role));
	set(table, DLOCK_LEASE_ROLE_NAME, false, NameGetDatum(&lease->role_name));
	set(table, DLOCK_LEASE_OPENED_AT, false,
		TimestampTzGetDatum(lease->opened_at));
	set(table, DLOCK_LEASE_DURABILITY, false, Int32GetDatum(lease->durability));
}

/*
 * Make table->row.  Which system and database it belongs to is written, too:
 * rows of another one came with a copy, and stand for nothing here.
 */
static void
fill_row(Table *table, const DlockImage *image)
{
	ExecClearTuple(table->row);
	memset(table->row->tts_isnull, true,
		   RelationGetDescr(table->relation)->natts * sizeof(bool));
	if (image->record->is_lease)
		fill_lease(table, image);
	else
		fill_ticket(table, image);
	set(table, table->shape->system, false,
		Int64GetDatum((int64) GetSystemIdentifier()));
	set(table, table->shape->database, false, ObjectIdGetDatum(MyDatabaseId));
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

		fill_row(table, image);
		MemoryContextSwitchTo(old_context);
		write_row(table, number, image->had_row);
	}
	else if (image->had_row)
		remove_row(table, number);
}

/* Write the rows of one table.  Returns how many rows it leaves dead. */
static int
write_table(DlockTable which, const DlockImage *images, int count)
{
	Table		table = {.relation = NULL};
	bool		leases = which == DLOCK_TABLE_LEASES;
	int			dead = 0;

	for (int i = 0; i < count; i++)
	{
		MemoryContext old_context;

		if (images[i].record->is_lease != leases ||
			(images[i].over && !images[i].had_row))
			continue;
		if (table.relation == NULL)
			open_table(&table, which);
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
			for (int i = 0; i < DLOCK_NUM_TABLES; i++)
				table_ids[i] = dlock_relation(space, shapes[i].name);
			tables_known = true;
		}
		for (int i = 0; i < DLOCK_NUM_TABLES; i++)
			relations[i] = try_relation_open(table_ids[i], RowExclusiveLock);
		/* the locks have let the news in */
		if (tables_known && relations[0] && relations[1])
			break;
		for (int i = 0; i < DLOCK_NUM_TABLES; i++)
		{
			if (relations[i])
				relation_close(relations[i], RowExclusiveLock);
		}
		tables_known = false;
	}
	if (!places_known)
	{
		for (int i = 0; i < DLOCK_NUM_TABLES; i++)
			find_places(relations[i], &shapes[i], &table_places[i]);
		places_known = true;
	}
	return true;
}

/* A transaction's time is that of its commit, also where it waited before. */
static void
set_commit_time(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_PRE_COMMIT)
		compat_do_not_replicate(GetCurrentTimestamp());
}

/*
 * What this process writes is not for subscribers that ask for what was written
 * here alone.  PostgreSQL leaves the time of such commits to who marks them so,
 * and takes its own on this server only: standbys, a restart after a crash and
 * subscribers have what is in the WAL.
 */
static void
mark_origin(void)
{
	static bool registered = false;

	if (!registered)
		RegisterXactCallback(set_commit_time, NULL);
	registered = true;
	compat_do_not_replicate(GetCurrentTimestamp());
}

/*
 * Begin a transaction that writes; false where the extension is not there any
 * more, and there is nothing to write to.
 */
bool
dlock_rows_begin(DlockSpace *space)
{
	mark_origin();
	has_foreign_rows =
		pg_atomic_read_u32(&space->cleared) != DLOCK_CLEARED;
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	if (!open_tables(space))
	{
		CommitTransactionCommand();
		return false;
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	return true;
}

/*
 * Write the rows of a batch.  Returns how many rows that leaves dead.
 */
int
dlock_rows_write(const DlockImage *images, int count)
{
	return write_table(DLOCK_TABLE_LEASES, images, count) +
		write_table(DLOCK_TABLE_QUEUE, images, count);
}

/* A lease of this system and database, by its row */
typedef struct LeaseSeen
{
	int64		number;			/* key */
	bool		delayed;
} LeaseSeen;

/* Does a row stand for something?  Takes note of leases. */
static bool
is_alive(const Table *table, const DlockStored *row, HTAB *leases)
{
	LeaseSeen  *lease;

	if (table->shape == &shapes[DLOCK_TABLE_LEASES])
	{
		lease = hash_search(leases, &row->values[DLOCK_LEASE_LEASE],
							HASH_ENTER, NULL);
		lease->delayed = DatumGetBool(row->values[DLOCK_LEASE_DELAYED]);
		return true;
	}
	if (!row->nulls[DLOCK_QUEUE_TTL])
		return true;
	lease = hash_search(leases, &row->values[DLOCK_QUEUE_LEASE],
						HASH_FIND, NULL);
	return lease && (DatumGetBool(row->values[DLOCK_QUEUE_GRANTED]) ||
					 !lease->delayed);
}

/* Returns whether there are rows of others that have to stay. */
static bool
remove_dead(DlockTable which, HTAB *leases)
{
	Table		table;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		left = false;

	open_table(&table, which);
	scan = systable_beginscan(table.relation, InvalidOid, false,
							  table.state->es_snapshot, 0, NULL);
	while ((tuple = systable_getnext(scan)) != NULL)
	{
		DlockStored row;

		take_row(table.relation, table.shape, table.places, tuple, &row);
		if (is_foreign(table.shape, &row))
		{
			if (XLogLogicalInfoActive())
			{
				left = true;
				continue;
			}
		}
		else if (is_alive(&table, &row, leases))
			continue;
		ExecStoreHeapTuple(tuple, table.old_row, false);
		remove_found(&table);
	}
	systable_endscan(scan);
	close_table(&table);
	return left;
}

/*
 * Remove rows that stand for nothing: of another system or database, and of
 * leases that are not there.
 *
 * A foreign row may have come by logical replication, from where it stands for
 * something; and its removal may go back there.  So where that is possible it
 * stays.  It is not read, and what is written here takes its place if it has
 * the same number.  Returns whether there is any.
 */
bool
dlock_rows_remove_foreign(DlockSpace *space)
{
	HASHCTL		info = {
		.keysize = sizeof(int64),
		.entrysize = sizeof(LeaseSeen),
		.hcxt = CurrentMemoryContext
	};
	HTAB	   *leases = hash_create("dlock leases seen", 256, &info,
									 HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	bool		left = remove_dead(DLOCK_TABLE_LEASES, leases);

	left |= remove_dead(DLOCK_TABLE_QUEUE, leases);
	hash_destroy(leases);
	return left;
}

static int
compare_numbers(const void *a, const void *b)
{
	int64		number_a = DatumGetInt64(((const DlockStored *) a)->values[0]);
	int64		number_b = DatumGetInt64(((const DlockStored *) b)->values[0]);

	return number_a < number_b ? -1 : number_a > number_b ? 1 : 0;
}

/* Make room for one more row, and take it. */
static void
append_row(Relation relation, const Shape *shape, const Places *places,
		   HeapTuple tuple, DlockStoredRows *rows, uint64 *room)
{
	DlockStored *row;

	if (rows->count == *room)
	{
		*room *= 2;
		rows->rows = repalloc_huge(rows->rows, *room * sizeof(DlockStored));
	}
	row = &rows->rows[rows->count++];
	take_row(relation, shape, places, heap_copytuple(tuple), row);
	row->is_foreign = is_foreign(shape, row);
}

/*
 * Read rows of a table, with the active snapshot: those that come behind a
 * number, and not many more than "max" of them.  Where there is no index for
 * that, they are all that are left.  All is in the current memory context.
 */
void
dlock_rows_read(DlockSpace *space, DlockTable which, int64 behind, uint64 max,
				DlockStoredRows *rows)
{
	const Shape *shape = &shapes[which];
	Relation	relation = relation_open(dlock_relation(space, shape->name),
										 AccessShareLock);
	Places		places;
	Oid			index;
	ScanKeyData key;
	HeapTuple	tuple;
	uint64		room = 64;

	find_places(relation, shape, &places);
	index = find_index(relation, places.number[0]);
	memset(rows, 0, sizeof(DlockStoredRows));
	rows->rows = palloc(room * sizeof(DlockStored));
	rows->complete = true;
	ScanKeyInit(&key, places.number[0], BTGreaterStrategyNumber, F_INT8GT,
				Int64GetDatum(behind));
	if (OidIsValid(index))
	{
		Relation	by_number = index_open(index, AccessShareLock);
		SysScanDesc scan = systable_beginscan_ordered(relation, by_number,
													  GetActiveSnapshot(), 1,
													  &key);

		while (rows->complete &&
			   (tuple = systable_getnext_ordered(scan, ForwardScanDirection)) != NULL)
		{
			CHECK_FOR_INTERRUPTS();
			append_row(relation, shape, &places, tuple, rows, &room);
			rows->complete = rows->count < max;
		}
		systable_endscan_ordered(scan);
		index_close(by_number, AccessShareLock);
	}
	else
	{
		SysScanDesc scan = systable_beginscan(relation, InvalidOid, false,
											  GetActiveSnapshot(), 1, &key);

		while ((tuple = systable_getnext(scan)) != NULL)
		{
			CHECK_FOR_INTERRUPTS();
			append_row(relation, shape, &places, tuple, rows, &room);
		}
		systable_endscan(scan);
		qsort(rows->rows, rows->count, sizeof(DlockStored), compare_numbers);
	}
	relation_close(relation, AccessShareLock);
}

/*
 * An index by which a lock's name is found, and which nobody has locked, as
 * somebody may who makes it anew.  Names are compared as in C, whatever a library
 * of the operating system says; InvalidOid where no index does so.
 */
static Oid
lock_name_index(Relation relation, AttrNumber name)
{
	List	   *indexes = RelationGetIndexList(relation);
	ListCell   *cell;
	Oid			found = InvalidOid;

	foreach(cell, indexes)
	{
		Oid			id = lfirst_oid(cell);
		Relation	index;

		if (!ConditionalLockRelationOid(id, AccessShareLock))
			continue;
		index = index_open(id, NoLock);
		if (index->rd_rel->relam == BTREE_AM_OID &&
			index->rd_index->indisvalid &&
			index->rd_index->indkey.values[0] == name &&
			index->rd_indcollation[0] == C_COLLATION_OID &&
			index->rd_opfamily[0] == TEXT_BTREE_FAM_OID &&
			RelationGetIndexPredicate(index) == NIL)
			found = id;
		index_close(index, OidIsValid(found) ? NoLock : AccessShareLock);
		if (OidIsValid(found))
			break;
	}
	list_free(indexes);
	return found;
}

/*
 * Does a lease of this system and database have something under this name, by
 * the active snapshot?
 */
bool
dlock_rows_have_name(DlockSpace *space, const DlockKey *key)
{
	const Shape *shape = &shapes[DLOCK_TABLE_QUEUE];
	Relation	relation = relation_open(dlock_relation(space, shape->name),
										 AccessShareLock);
	Places		places;
	Oid			index;
	ScanKeyData scan_key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;

	find_places(relation, shape, &places);
	index = lock_name_index(relation, places.number[DLOCK_QUEUE_NAME]);
	ScanKeyInit(&scan_key, places.number[DLOCK_QUEUE_NAME],
				BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(cstring_to_text_with_len(key->name,
														 key->length)));
	scan = systable_beginscan(relation, index, OidIsValid(index),
							  GetActiveSnapshot(), 1, &scan_key);
	while (!found && (tuple = systable_getnext(scan)) != NULL)
	{
		DlockStored row;

		CHECK_FOR_INTERRUPTS();
		take_row(relation, shape, &places, tuple, &row);
		found = !is_foreign(shape, &row);
	}
	systable_endscan(scan);
	if (OidIsValid(index))
		UnlockRelationOid(index, AccessShareLock);
	relation_close(relation, AccessShareLock);
	return found;
}

/*
 * Raise an error where the tables cannot be written as they are; for those who
 * were told that this has failed.  Waits for nobody who changes them now.
 */
void
dlock_rows_check(DlockSpace *space)
{
	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
	{
		Oid			id = dlock_relation(space, shapes[i].name);
		Relation	relation;
		TupleDesc	descriptor;
		Places		places;

		if (!ConditionalLockRelationOid(id, AccessShareLock))
			continue;
		relation = try_relation_open(id, NoLock);
		if (relation == NULL)
		{
			UnlockRelationOid(id, AccessShareLock);
			continue;
		}
		descriptor = RelationGetDescr(relation);
		find_places(relation, &shapes[i], &places);
		for (int a = 0; a < descriptor->natts; a++)
		{
			if (is_other(&shapes[i], &places, TupleDescAttr(descriptor, a)))
				(void) find_default(relation, TupleDescAttr(descriptor, a));
		}
		relation_close(relation, AccessShareLock);
	}
}

/* Commit what dlock_rows_begin() has begun. */
void
dlock_rows_commit(void)
{
	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
		relation_close(relations[i], NoLock);
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
	int			threshold = DLOCK_VACUUM_ROWS;
	static MemoryContext context = NULL;	/* outlives transactions */

	if (context == NULL)
		context = AllocSetContextCreate(TopMemoryContext, "dlock vacuum",
										ALLOCSET_SMALL_SIZES);
	MemoryContextReset(context);
	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
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
		table = relation_open(dlock_relation(space, shapes[i].name), AccessShareLock);
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
