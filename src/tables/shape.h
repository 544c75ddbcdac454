/*-------------------------------------------------------------------------
 *
 * shape.h
 *	  The shape of the tables of leases, for the files that read or write them:
 *	  shape.c, load.c, write.c, read.c and vacuum.c.
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
extern void dlock_shape_check(Relation relation, const DlockShape *shape);
extern void dlock_shape_take_row(Relation relation, const DlockShape *shape,
								 HeapTuple tuple, DlockStored *row);
extern void dlock_shape_raise_row(Relation relation, const DlockShape *shape,
								  const DlockStored *row, int column);
extern void dlock_shape_check_row(Relation relation, const DlockShape *shape,
								  const DlockStored *row);
extern bool dlock_shape_is_foreign(const DlockShape *shape,
								   const DlockStored *row);

#endif							/* DLOCK_SHAPE_H */
