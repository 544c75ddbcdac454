/*-------------------------------------------------------------------------
 *
 * read.c
 *	  Reading the tables dlock_queue and dlock_queue_lease, without SQL.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heaptoast.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/tableam.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_opfamily.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "tables/shape.h"

static int
compare_numbers(const void *a, const void *b)
{
	int64		number_a = DatumGetInt64(((const DlockStored *) a)->values[0]);
	int64		number_b = DatumGetInt64(((const DlockStored *) b)->values[0]);

	return number_a < number_b ? -1 : number_a > number_b ? 1 : 0;
}

/*
 * Open a table to load it.  Until dlock_close_committed(), the snapshot sees
 * only committed rows, because this transaction could be rolled back (I22).
 * Raises 55000 if this transaction has ShareLock or more: it may have changed
 * the table's file, columns or indexes, and would then miss committed rows.
 * If this transaction created the table, there are no committed rows to miss.
 */
Relation
dlock_open_committed(DlockSpace *space, const char *name)
{
	Relation	table = dlock_open_relation(space, name, AccessShareLock);

	if (table->rd_createSubid == InvalidSubTransactionId &&
		CheckRelationLockedByMe(table, ShareLock, true))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot read table \"%s\" in a transaction that has changed or locked it",
						RelationGetRelationName(table)),
				 errdetail("Its rows have not been read since the server was started."),
				 errhint("Commit first, or roll back.")));
	PushActiveSnapshot(GetLatestSnapshot());
	/* hide all commands of this transaction, in our copy of the snapshot */
	GetActiveSnapshot()->curcid = FirstCommandId;
	return table;
}

void
dlock_close_committed(Relation table)
{
	PopActiveSnapshot();
	relation_close(table, AccessShareLock);
}

/* Append a copy of a row, detoasted. */
static void
append_row(Relation relation, const DlockShape *shape, HeapTuple tuple,
		   DlockStoredRows *rows)
{
	DlockStored *row;

	if (rows->count == rows->room)
	{
		rows->room *= 2;
		rows->rows = repalloc_huge(rows->rows,
								   rows->room * sizeof(DlockStored));
	}
	row = &rows->rows[rows->count++];
	tuple = HeapTupleHasExternal(tuple) ?
		toast_flatten_tuple(tuple, RelationGetDescr(relation)) :
		heap_copytuple(tuple);
	dlock_shape_take_row(relation, shape, tuple, row);
	dlock_shape_check_row(shape, row);
}

/* Returns the planner's estimate of a table's rows. */
uint64
dlock_rows_estimate(DlockSpace *space, DlockTable which)
{
	Relation	relation = dlock_open_relation(space, dlock_shapes[which].name,
											   AccessShareLock);
	BlockNumber pages;
	double		rows;
	double		all_visible;

	table_relation_estimate_size(relation, NULL, &pages, &rows, &all_visible);
	relation_close(relation, AccessShareLock);
	return (uint64) rows;
}

/*
 * Set "rows" to the first "max" committed rows with numbers above "behind" or,
 * if "behind" is 0, with any number.  If the primary key is locked, as by
 * REINDEX, "max" is ignored.  Values are in the current memory context.
 * Raises 55000 for a row that dlock cannot have written.
 */
void
dlock_rows_read(DlockSpace *space, DlockTable which, int64 behind, uint64 max,
				DlockStoredRows *rows)
{
	const DlockShape *shape = &dlock_shapes[which];
	Relation	relation = dlock_open_committed(space, shape->name);
	Oid			index;
	ScanKeyData key;
	HeapTuple	tuple;

	dlock_shape_check(relation, shape);
	rows->count = 0;
	rows->complete = true;
	/* include invalid numbers of 0 or less, which must raise an error */
	ScanKeyInit(&key, 1, BTGreaterStrategyNumber, F_INT8GT,
				Int64GetDatum(behind > 0 ? behind : PG_INT64_MIN));
	index = dlock_shape_key_index(relation);
	if (ConditionalLockRelationOid(index, AccessShareLock))
	{
		Relation	by_number = index_open(index, NoLock);
		SysScanDesc scan = systable_beginscan_ordered(relation, by_number,
													  GetActiveSnapshot(), 1,
													  &key);

		while (rows->complete &&
			   (tuple = systable_getnext_ordered(scan, ForwardScanDirection)) != NULL)
		{
			CHECK_FOR_INTERRUPTS();
			append_row(relation, shape, tuple, rows);
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
			append_row(relation, shape, tuple, rows);
		}
		systable_endscan(scan);
		qsort(rows->rows, rows->count, sizeof(DlockStored), compare_numbers);
	}
	dlock_close_committed(relation);
}

/*
 * Find an index on names and lock it (AccessShareLock), or return InvalidOid.
 * Skips indexes that are locked, or whose order could depend on the system.
 */
static Oid
lock_name_index(Relation relation, AttrNumber name)
{
	List	   *indexes = RelationGetIndexList(relation);
	ListCell   *cell;

	foreach(cell, indexes)
	{
		Oid			id = lfirst_oid(cell);
		Relation	index;
		bool		found;

		if (!ConditionalLockRelationOid(id, AccessShareLock))
			continue;
		index = index_open(id, NoLock);
		found = index->rd_rel->relam == BTREE_AM_OID &&
			index->rd_index->indisvalid &&
			index->rd_index->indkey.values[0] == name &&
			index->rd_indcollation[0] == C_COLLATION_OID &&
			index->rd_opfamily[0] == TEXT_BTREE_FAM_OID &&
			heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL);
		index_close(index, found ? NoLock : AccessShareLock);
		if (found)
			return id;
	}
	return InvalidOid;
}

/* Begin a scan for the rows with a lock's name in this column. */
SysScanDesc
dlock_begin_name_scan(Relation relation, AttrNumber column,
					  const DlockKey *key, Snapshot snapshot)
{
	Oid			index = lock_name_index(relation, column);
	ScanKeyData scan_key;
	SysScanDesc scan;

	ScanKeyInit(&scan_key, column, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(cstring_to_text_with_len(key->name,
														 key->length)));
	scan = systable_beginscan(relation, index, OidIsValid(index), snapshot, 1,
							  &scan_key);
	/* the scan has taken its own lock on the index */
	if (OidIsValid(index))
		UnlockRelationOid(index, AccessShareLock);
	return scan;
}

/* Is there a committed row with this name, of this system and database? */
bool
dlock_rows_have_name(DlockSpace *space, const DlockKey *key)
{
	const DlockShape *shape = &dlock_shapes[DLOCK_TABLE_QUEUE];
	Relation	relation = dlock_open_committed(space, shape->name);
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;

	dlock_shape_check(relation, shape);
	scan = dlock_begin_name_scan(relation, DLOCK_QUEUE_NAME + 1, key,
								 GetActiveSnapshot());
	while (!found && (tuple = systable_getnext(scan)) != NULL)
	{
		DlockStored row;

		CHECK_FOR_INTERRUPTS();
		dlock_shape_take_row(relation, shape, tuple, &row);
		found = !row.is_foreign;
	}
	systable_endscan(scan);
	dlock_close_committed(relation);
	return found;
}
