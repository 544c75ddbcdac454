/*-------------------------------------------------------------------------
 *
 * read.c
 *	  Reading the tables dlock_queue and dlock_queue_lease.
 *
 * Without SQL, as they are written; see write.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "shared/shared.h"
#include "tables/shape.h"
#include "tables/tables.h"

static int
compare_numbers(const void *a, const void *b)
{
	int64		number_a = DatumGetInt64(((const DlockStored *) a)->values[0]);
	int64		number_b = DatumGetInt64(((const DlockStored *) b)->values[0]);

	return number_a < number_b ? -1 : number_a > number_b ? 1 : 0;
}

/*
 * Read a table, with the active snapshot.  All is in the current memory
 * context.
 */
void
dlock_rows_read(DlockSpace *space, DlockTable which, DlockStoredRows *rows)
{
	const DlockShape *shape = &dlock_shapes[which];
	Relation	relation = relation_open(dlock_relation(space, shape->name),
										 AccessShareLock);
	DlockPlaces		places;
	SysScanDesc scan;
	HeapTuple	tuple;
	uint64		max = 64;

	dlock_shape_find(relation, shape, &places);
	memset(rows, 0, sizeof(DlockStoredRows));
	rows->rows = palloc(max * sizeof(DlockStored));
	scan = systable_beginscan(relation, InvalidOid, false, GetActiveSnapshot(),
							  0, NULL);
	while ((tuple = systable_getnext(scan)) != NULL)
	{
		DlockStored *row;

		CHECK_FOR_INTERRUPTS();
		if (rows->count == max)
		{
			max *= 2;
			rows->rows = repalloc_huge(rows->rows, max * sizeof(DlockStored));
		}
		row = &rows->rows[rows->count];
		dlock_shape_take_row(relation, shape, &places, heap_copytuple(tuple),
							 row);
		if (!dlock_shape_is_foreign(shape, row))
			rows->count++;
		else if (rows->num_foreign++ == 0)
		{
			rows->foreign_system =
				(uint64) DatumGetInt64(row->values[shape->system]);
			rows->foreign_database =
				DatumGetObjectId(row->values[shape->database]);
		}
	}
	systable_endscan(scan);
	relation_close(relation, AccessShareLock);
	qsort(rows->rows, rows->count, sizeof(DlockStored), compare_numbers);
}
