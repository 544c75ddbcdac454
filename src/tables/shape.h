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

typedef enum DlockNeed
{
	DLOCK_NOT_NULL,
	DLOCK_CAN_BE_NULL
} DlockNeed;

/* A column that a table must have */
typedef struct DlockColumn
{
	const char *name;
	Oid			type;
	DlockNeed	needed;
	bool		(*is_valid) (Datum value);	/* NULL: any value is valid */
} DlockColumn;

/* A table's shape; the first column is the row's number */
typedef struct DlockShape
{
	const char *name;
	const DlockColumn *columns;
	int			num_columns;
	int			system;			/* its column */
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
#define DLOCK_ROWS_AT_ONCE	500 /* per step of a load, a few milliseconds */

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
