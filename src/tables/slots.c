/*-------------------------------------------------------------------------
 *
 * slots.c
 *	  Reading the table dlock_slots: how many permits locks have, as is set for
 *	  them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "shared/shared.h"
#include "tables/shape.h"
#include "tables/tables.h"

static int
find_column(Relation table, const char *name, Oid type)
{
	int			column = SPI_fnumber(RelationGetDescr(table), name);

	if (column <= 0 ||
		SPI_gettypeid(RelationGetDescr(table), column) != type)
		dlock_shape_raise_changed(table,
					  psprintf(_("It has no column \"%s\" of type %s."),
							   name, format_type_be(type)));
	return column;
}

/*
 * Find the columns of the table.  Raises 55000 where one is not as it must be, and
 * where the table does not outlive a crash.
 */
void
dlock_slots_find_columns(Relation table, DlockSlotsColumns *columns)
{
	dlock_check_permanent(table);
	columns->name = find_column(table, "name", TEXTOID);
	columns->slots = find_column(table, "slots", INT4OID);
}

/*
 * A row: returns the slots that it sets, for a lock.  Raises 55000 for one that
 * the table's constraints would not let in.
 */
int32
dlock_slots_take_row(DlockSpace *space, Relation table,
					 const DlockSlotsColumns *columns, HeapTuple row,
					 DlockKey *key)
{
	TupleDesc	descriptor = RelationGetDescr(table);
	bool		no_name;
	bool		no_slots;
	Datum		value = heap_getattr(row, columns->name, descriptor, &no_name);
	Datum		slots = heap_getattr(row, columns->slots, descriptor, &no_slots);
	text	   *name = no_name ? NULL : DatumGetTextPP(value);

	if (name == NULL)
		dlock_shape_raise_changed(table, _("A row has a null in column \"name\"."));
	if (VARSIZE_ANY_EXHDR(name) == 0 ||
		VARSIZE_ANY_EXHDR(name) > DLOCK_MAX_NAME)
		dlock_raise_named_row(table, "name", name, "name");
	if (no_slots || DatumGetInt32(slots) < 1)
		dlock_raise_named_row(table, "name", name, "slots");
	dlock_key_fill(key, space, VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name));
	return DatumGetInt32(slots);
}

/*
 * Put what the table says into shared memory.  An error leaves some of it there, as
 * it is right, and the next one reads all.
 */
void
dlock_slots_read(DlockSpace *space)
{
	Relation	table = dlock_open_committed(space, "dlock_slots");
	DlockSlotsColumns columns;
	SysScanDesc scan;
	HeapTuple	row;

	dlock_slots_find_columns(table, &columns);
	scan = systable_beginscan(table, InvalidOid, false, GetActiveSnapshot(), 0,
							  NULL);
	while ((row = systable_getnext(scan)) != NULL)
	{
		DlockKey	key;
		int32		slots = dlock_slots_take_row(space, table, &columns, row,
												 &key);

		CHECK_FOR_INTERRUPTS();
		dlock_queue_load_slots(space, &key, slots, table->rd_rel->relowner);
	}
	systable_endscan(scan);
	dlock_close_committed(table);
}
