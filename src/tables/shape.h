/*-------------------------------------------------------------------------
 *
 * shape.h
 *	  What the files share that read or write the tables of leases: their shape,
 *	  and the parts of a load.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_SHAPE_H
#define DLOCK_SHAPE_H

#include "utils/relcache.h"

#include "tables/tables.h"

#define DLOCK_NUM_TABLES	2

/* What must be there of a column */
typedef enum DlockNeed
{
	DLOCK_NOT_NULL,				/* a value */
	DLOCK_CAN_BE_NULL
} DlockNeed;

/* A column as it must be */
typedef struct DlockColumn
{
	const char *name;
	Oid			type;
	DlockNeed	needed;
	bool		(*is_valid) (Datum value);	/* NULL: any value is */
} DlockColumn;

/* A table as it must be; its first column is the number of a row */
typedef struct DlockShape
{
	const char *name;
	const DlockColumn *columns;
	int			num_columns;
	int			system;			/* the column */
	int			database;
} DlockShape;

extern const DlockShape dlock_shapes[DLOCK_NUM_TABLES];

extern Oid dlock_lock_name_index(Relation relation, AttrNumber name);
extern void dlock_shape_raise_changed(Relation relation, const char *detail);
extern Oid	dlock_shape_key_index(Relation relation);
extern void dlock_shape_check(Relation relation, const DlockShape *shape);
extern void dlock_shape_take_row(Relation relation, const DlockShape *shape,
								 HeapTuple tuple, DlockStored *row);
extern void dlock_shape_raise_row(Relation relation, const DlockShape *shape,
								  const DlockStored *row, int column);
extern void dlock_shape_check_row(Relation relation, const DlockShape *shape,
								  const DlockStored *row);
extern bool dlock_shape_is_foreign(const DlockShape *shape,
								   const DlockStored *row);

/* load_rows.c */
#define DLOCK_ROWS_AT_ONCE	500 /* are read in a step, of a few milliseconds */

/* In this order */
typedef enum DlockLoadPart
{
	DLOCK_LOAD_LEASES,
	DLOCK_LOAD_TICKETS,
	DLOCK_LOAD_GRANTS
} DlockLoadPart;

extern void dlock_load_some(DlockSpace *space, DlockTable which,
							DlockStoredRows *rows);

#endif							/* DLOCK_SHAPE_H */
