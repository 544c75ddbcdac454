/*-------------------------------------------------------------------------
 *
 * slots.c
 *	  Reading the table dlock_slots.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relation.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "tables/shape.h"

/*
 * Returns the slots in a row.  Raises 55000 if the row violates the table's
 * constraints.
 */
int32
dlock_slots_take_row(DlockSpace *space, Relation table, HeapTuple row,
					 DlockKey *key)
{
	TupleDesc	columns = RelationGetDescr(table);
	text	   *name = DatumGetTextPP(dlock_get_column(table, columns, row,
													   "name", TEXTOID));
	int32		slots = DatumGetInt32(dlock_get_column(table, columns, row,
													   "slots", INT4OID));

	if (VARSIZE_ANY_EXHDR(name) == 0 ||
		VARSIZE_ANY_EXHDR(name) > DLOCK_MAX_NAME)
		dlock_raise_named_row(table, "name", name, "name");
	if (slots < 1)
		dlock_raise_named_row(table, "name", name, "slots");
	dlock_key_fill(key, space, VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name));
	return slots;
}

/*
 * Call take() with each row and the table's owner.  If "snapshot" is NULL, use
 * a new snapshot, which sees this transaction's changes.
 */
void
dlock_slots_for_each(DlockSpace *space, Relation table, Snapshot snapshot,
					 void (*take) (DlockSpace *space, const DlockKey *key,
								   int32 slots, Oid owner))
{
	SysScanDesc scan = systable_beginscan(table, InvalidOid, false, snapshot,
										  0, NULL);
	HeapTuple	row;

	while ((row = systable_getnext(scan)) != NULL)
	{
		DlockKey	key;
		int32		slots = dlock_slots_take_row(space, table, row, &key);

		CHECK_FOR_INTERRUPTS();
		take(space, &key, slots, table->rd_rel->relowner);
	}
	systable_endscan(scan);
}

/*
 * Load all rows.  After an error, the rows loaded before it stay.  This is
 * harmless, because the next call loads all rows again.
 */
void
dlock_slots_read(DlockSpace *space)
{
	Relation	table = dlock_open_committed(space, "dlock_slots");

	dlock_check_permanent(table);
	dlock_slots_for_each(space, table, GetActiveSnapshot(),
						 dlock_queue_load_slots);
	dlock_close_committed(table);
}

/*
 * Open the table for dlock_slots_find(), and block other commits that change
 * it.  Returns NULL if the table was dropped.  A lock on the table itself
 * would wait for VACUUM, and deadlock with CREATE INDEX CONCURRENTLY.
 */
Relation
dlock_slots_open(DlockSpace *space)
{
	Oid			id = dlock_find_relation(space, "dlock_slots");
	Relation	table = OidIsValid(id) ?
		try_relation_open(id, AccessShareLock) : NULL;
	LOCKTAG		tag;

	/* last, so that the holder of this lock waits for no other lock */
	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, id, 0, 0);
	if (table)
		(void) LockAcquire(&tag, ExclusiveLock, false, false);
	return table;
}

/* Returns the slots in a lock's row, or 0 if it has no row. */
int32
dlock_slots_find(DlockSpace *space, Relation table, const DlockKey *key)
{
	int			column = dlock_find_column(table, RelationGetDescr(table),
										   "name", TEXTOID);
	SysScanDesc scan;
	HeapTuple	row;
	DlockKey	found;
	int32		slots = 0;

	dlock_check_permanent(table);
	/* a new snapshot, which sees this transaction's changes */
	scan = dlock_begin_name_scan(table, column, key, NULL);
	row = systable_getnext(scan);
	if (HeapTupleIsValid(row))
		slots = dlock_slots_take_row(space, table, row, &found);
	systable_endscan(scan);
	return slots;
}
