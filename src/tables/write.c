/*-------------------------------------------------------------------------
 *
 * write.c
 *	  Writing the tables dlock_queue and dlock_queue_lease.
 *
 * Only the worker (worker/writer.c) writes.  It uses no SQL, because starting
 * statements would cost more than writing a batch's few rows.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/indexing.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "tables/shape.h"

/* The tables, a count of their changes, and the count at the last check */
static bool tables_known = false;
static Oid	table_ids[DLOCK_NUM_TABLES];
static uint64 table_changes = 1;
static uint64 changes_checked = 0;

/* The tables, open in this transaction */
static Relation relations[DLOCK_NUM_TABLES];

/* The table that the transaction waits to lock, or -1 */
static int	awaited = -1;

/* May the tables have rows that came with a copy of a database? */
static bool has_foreign_rows = true;

typedef struct Table
{
	Relation	relation;
	const DlockShape *shape;
	CatalogIndexState indexes;
	MemoryContext row_context;	/* of one row */
	Datum	   *values;			/* of the row to be written */
	bool	   *nulls;
} Table;

static void
forget_tables(Datum arg, Oid relation)
{
	if (relation == InvalidOid || relation == table_ids[0] ||
		relation == table_ids[1])
	{
		tables_known = false;
		table_changes++;
	}
}

/*
 * Raise 55000 if a table's shape is wrong.  Repeat the check if invalidations
 * were processed during the check, as taking any lock does, also on a catalog.
 */
static void
check_shapes(void)
{
	while (changes_checked != table_changes)
	{
		uint64		changes = table_changes;

		for (int i = 0; i < DLOCK_NUM_TABLES; i++)
			dlock_shape_check(relations[i], &dlock_shapes[i]);
		changes_checked = changes;
	}
}

static void
open_table(Table *table, DlockTable which)
{
	int			columns = RelationGetDescr(relations[which])->natts;

	/* process no invalidation from here until the indexes are listed */
	check_shapes();
	table->relation = relations[which];
	table->shape = &dlock_shapes[which];
	table->indexes = CatalogOpenIndexes(table->relation);
	table->row_context = AllocSetContextCreate(CurrentMemoryContext, "dlock row",
											   ALLOCSET_SMALL_SIZES);
	table->values = palloc(columns * sizeof(Datum));
	table->nulls = palloc(columns * sizeof(bool));
}

/* Find the row with this number and leave *scan open, or return NULL. */
static HeapTuple
find_row(Table *table, int64 number, SysScanDesc *scan)
{
	ScanKeyData key;
	HeapTuple	tuple;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(number));
	*scan = systable_beginscan(table->relation,
							   dlock_shape_key_index(table->relation), true,
							   GetActiveSnapshot(), 1, &key);
	tuple = systable_getnext(*scan);
	if (!HeapTupleIsValid(tuple))
		systable_endscan(*scan);
	return tuple;
}

static void
remove_row(Table *table, int64 number)
{
	SysScanDesc scan;
	HeapTuple	tuple = find_row(table, number, &scan);

	if (tuple == NULL)
		return;
	CatalogTupleDelete(table->relation, &tuple->t_self);
	systable_endscan(scan);
}

/* Insert a row, or update the one with this number, maybe a foreign one. */
static void
write_row(Table *table, int64 number, bool had_row)
{
	HeapTuple	row = heap_form_tuple(RelationGetDescr(table->relation),
									  table->values, table->nulls);
	SysScanDesc scan;
	HeapTuple	old_row = had_row || has_foreign_rows ?
		find_row(table, number, &scan) : NULL;

	if (old_row == NULL)
	{
		CatalogTupleInsertWithInfo(table->relation, row, table->indexes);
		return;
	}
	CatalogTupleUpdateWithInfo(table->relation, &old_row->t_self, row,
							   table->indexes);
	systable_endscan(scan);
}

static void
set(Table *table, int column, bool is_null, Datum datum)
{
	table->values[column] = datum;
	table->nulls[column] = is_null;
}

static void
set_text(Table *table, int column, const char *text)
{
	set(table, column, text == NULL,
		text ? CStringGetTextDatum(text) : (Datum) 0);
}

static void
set_name(Table *table, int column, const char *text)
{
	Name		name = palloc0(sizeof(NameData));

	namestrcpy(name, text);
	set(table, column, false, NameGetDatum(name));
}

/* Set the current info.  If it changes later, the record is marked again. */
static void
set_info(Table *table, int column, DlockRecord *record)
{
	char		info[DLOCK_MAX_INFO + 1];

	set_text(table, column, dlock_record_copy_info(record, info));
}

static void
set_interval(Table *table, int column, int64 microseconds)
{
	set(table, column, microseconds == 0,
		microseconds == 0 ? (Datum) 0 : dlock_interval_datum(microseconds));
}

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
	set_text(table, DLOCK_QUEUE_MODE, dlock_mode_name(image->mode));
	set(table, DLOCK_QUEUE_SLOTS, !has_slots,
		has_slots ? Int32GetDatum(ticket->ticket.slots) : (Datum) 0);
	set(table, DLOCK_QUEUE_PERMITS, false,
		Int32GetDatum(ticket->ticket.permits));
	set_text(table, DLOCK_QUEUE_OWNER, DsaPointerIsValid(ticket->owner) ?
			 dlock_address(ticket->owner) : NULL);
	set_info(table, DLOCK_QUEUE_INFO, image->record);
	set_text(table, DLOCK_QUEUE_CHANNEL,
			 image->channel[0] == '\0' ? NULL : image->channel);
	set(table, DLOCK_QUEUE_ROLE, false, ObjectIdGetDatum(lease->role));
	set_name(table, DLOCK_QUEUE_ROLE_NAME, dlock_lease_role_name(lease));
	set(table, DLOCK_QUEUE_ENQUEUED_AT, false,
		TimestampTzGetDatum(ticket->ticket.enqueued_at));
	set(table, DLOCK_QUEUE_GRANTED_AT, !image->granted,
		image->granted ? TimestampTzGetDatum(image->granted_at) : (Datum) 0);
	set_interval(table, DLOCK_QUEUE_TTL, image->ttl);
	set(table, DLOCK_QUEUE_DURABILITY, false, Int32GetDatum(image->durability));
}

static void
fill_lease(Table *table, const DlockImage *image)
{
	DlockLease *lease = dlock_record_lease(image->record);

	set(table, DLOCK_LEASE_LEASE, false, Int64GetDatum(lease->number));
	set_interval(table, DLOCK_LEASE_TTL, image->ttl);
	set_interval(table, DLOCK_LEASE_DELAY, lease->delay);
	set(table, DLOCK_LEASE_DELAYED, false, BoolGetDatum(image->delayed));
	set_info(table, DLOCK_LEASE_INFO, image->record);
	set(table, DLOCK_LEASE_ROLE, false, ObjectIdGetDatum(lease->role));
	set_name(table, DLOCK_LEASE_ROLE_NAME, dlock_lease_role_name(lease));
	set(table, DLOCK_LEASE_OPENED_AT, false,
		TimestampTzGetDatum(lease->opened_at));
	set(table, DLOCK_LEASE_DURABILITY, false, Int32GetDatum(image->durability));
}

static void
write_image(Table *table, const DlockImage *image)
{
	int64		number = image->record->is_lease ?
		dlock_record_lease(image->record)->number :
		dlock_record_ticket(image->record)->ticket.number;

	if (image->over)
	{
		remove_row(table, number);
		return;
	}
	memset(table->nulls, true,
		   RelationGetDescr(table->relation)->natts * sizeof(bool));
	if (image->record->is_lease)
		fill_lease(table, image);
	else
		fill_ticket(table, image);
	/* these columns show which rows came with a copy of a database */
	set(table, table->shape->num_columns - 2, false,
		Int64GetDatum((int64) GetSystemIdentifier()));
	set(table, table->shape->num_columns - 1, false, ObjectIdGetDatum(MyDatabaseId));
	write_row(table, number, image->had_row);
}

/* Write the images of one table.  Returns how many dead rows this leaves. */
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
			(images[i].over && !images[i].had_row))	/* never written */
			continue;
		if (table.relation == NULL)
			open_table(&table, which);
		old_context = MemoryContextSwitchTo(table.row_context);
		write_image(&table, &images[i]);
		MemoryContextSwitchTo(old_context);
		MemoryContextReset(table.row_context);
		if (images[i].had_row)
			dead++;
	}
	if (table.relation)
	{
		CatalogCloseIndexes(table.indexes);
		MemoryContextDelete(table.row_context);
	}
	return dead;
}

/*
 * Open both tables.  Returns false if the extension was dropped.  Keeps the
 * OIDs, because looking them up would be a good part of a batch's cost.
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
				table_ids[i] = dlock_relation(space, dlock_shapes[i].name);
			tables_known = true;
		}
		for (int i = 0; i < DLOCK_NUM_TABLES; i++)
		{
			awaited = i;
			relations[i] = try_relation_open(table_ids[i], RowExclusiveLock);
		}
		awaited = -1;
		/* taking the locks may have cleared tables_known */
		if (tables_known && relations[0] && relations[1])
			break;
		for (int i = 0; i < DLOCK_NUM_TABLES; i++)
		{
			if (relations[i])
				relation_close(relations[i], RowExclusiveLock);
		}
		tables_known = false;
	}
	return true;
}

/* Begin a transaction.  Returns false if the extension was dropped. */
bool
dlock_rows_begin(DlockSpace *space)
{
	awaited = -1;
	has_foreign_rows = pg_atomic_read_u32(&space->cleared) == 0;
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

/* Find the table that a failed transaction could not lock, or InvalidOid. */
Oid
dlock_rows_awaited(void)
{
	return awaited < 0 ? InvalidOid : table_ids[awaited];
}

/*
 * If a failed transaction waited to lock a table, log the processes that lock
 * the table.  Returns false if the transaction has failed for another reason.
 */
bool
dlock_rows_tell_of_lock(const char *database)
{
	MemoryContext context;
	MemoryContext old_context;
	LOCKTAG		tag;

	if (awaited < 0)
		return false;
	SET_LOCKTAG_RELATION(tag, MyDatabaseId, table_ids[awaited]);
	context = AllocSetContextCreate(CurrentMemoryContext, "dlock locked table",
									ALLOCSET_SMALL_SIZES);
	old_context = MemoryContextSwitchTo(context);
	ereport(LOG,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("cannot write table \"%s\" of database \"%s\", as it is locked",
					dlock_shapes[awaited].name, database),
			 errdetail("Process %d has waited for %s on it. It is locked by: %s.",
					   MyProcPid,
					   GetLockmodeName(DEFAULT_LOCKMETHOD, RowExclusiveLock),
					   dlock_describe_holders(&tag, RowExclusiveLock)),
			 errhint("End that transaction. Until then leases are kept and can run out, but their locks are not granted to waiters, and new leases fail.")));
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(context);
	return true;
}

static void
tell_of_table(void *arg)
{
	errcontext("writing table \"%s\"", ((const DlockShape *) arg)->name);
}

/* Write a batch.  Returns how many dead rows this leaves. */
int
dlock_rows_write(const DlockImage *images, int count)
{
	static const DlockTable tables[] = {DLOCK_TABLE_LEASES, DLOCK_TABLE_QUEUE};
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = tell_of_table
	};
	int			dead = 0;

	check_shapes();
	error_context_stack = &context;
	for (int i = 0; i < (int) lengthof(tables); i++)
	{
		context.arg = unconstify(DlockShape *, &dlock_shapes[tables[i]]);
		dead += write_table(tables[i], images, count);
	}
	error_context_stack = context.previous;
	return dead;
}

/* A lease with a row of this system and database */
typedef struct LeaseSeen
{
	int64		number;			/* hash key, must be first */
	bool		delayed;
} LeaseSeen;

/* Is the row's lease or ticket alive?  Enters leases into "leases". */
static bool
is_alive(DlockTable which, const DlockStored *row, HTAB *leases)
{
	LeaseSeen  *lease;

	if (which == DLOCK_TABLE_LEASES)
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

static void
remove_dead(DlockTable which, HTAB *leases)
{
	Relation	relation = relations[which];
	SysScanDesc scan = systable_beginscan(relation, InvalidOid, false,
										  GetActiveSnapshot(), 0, NULL);
	HeapTuple	tuple;

	while ((tuple = systable_getnext(scan)) != NULL)
	{
		DlockStored row;

		dlock_shape_take_row(relation, &dlock_shapes[which], tuple, &row);
		if (row.is_foreign || !is_alive(which, &row, leases))
			CatalogTupleDelete(relation, &tuple->t_self);
	}
	systable_endscan(scan);
}

/*
 * Delete rows that a database copy brought, and those of tickets that ended
 * with their lease.  Use rows alone: the table of numbers may lack a record.
 */
void
dlock_rows_remove_dead(void)
{
	HASHCTL		info = {
		.keysize = sizeof(int64),
		.entrysize = sizeof(LeaseSeen),
		.hcxt = CurrentMemoryContext
	};
	HTAB	   *leases = hash_create("dlock leases seen", 256, &info,
									 HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);

	check_shapes();
	remove_dead(DLOCK_TABLE_LEASES, leases);
	remove_dead(DLOCK_TABLE_QUEUE, leases);
	hash_destroy(leases);
}

void
dlock_rows_commit(void)
{
	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
		relation_close(relations[i], NoLock);
	PopActiveSnapshot();
	CommitTransactionCommand();
}
