/*-------------------------------------------------------------------------
 *
 * shape.h
 *	  The shape of the tables of leases, and the parts of a load.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_SHAPE_H
#define DLOCK_SHAPE_H

#include "utils/relcache.h"

#include "tables/tables.h"

#define DLOCK_NUM_TABLES	2

/* A column that a table must have */
typedef struct DlockColumn
{
	const char *name;
	Oid			type;
	bool		nullable;
	int64		min;			/* least number, time or length of a text */
	int64		max;
} DlockColumn;

/* A table's shape; the last two columns are the row's system and database */
typedef struct DlockShape
{
	const char *name;
	const DlockColumn *columns; /* the first is the row's number */
	int			num_columns;
} DlockShape;

extern const DlockShape dlock_shapes[DLOCK_NUM_TABLES];

extern Oid	dlock_shape_key_index(Relation relation);
extern void dlock_shape_check(Relation relation, const DlockShape *shape);
extern void dlock_shape_take_row(Relation relation, const DlockShape *shape,
								 HeapTuple tuple, DlockStored *row);
extern void dlock_shape_raise_row(const DlockShape *shape,
								  const DlockStored *row, int column);
extern void dlock_shape_check_row(const DlockShape *shape,
								  const DlockStored *row);

/* load_rows.c */
#define DLOCK_ROWS_AT_ONCE	500 /* loads faster than a worker starts up */

/* Parts of a load, in their order */
typedef enum DlockLoadPart
{
	DLOCK_LOAD_LEASES,
	DLOCK_LOAD_TICKETS,
	DLOCK_LOAD_GRANTS
} DlockLoadPart;

extern void dlock_load_some(DlockSpace *space, DlockTable which,
							DlockStoredRows *rows);

#endif							/* DLOCK_SHAPE_H */
