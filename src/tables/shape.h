/*-------------------------------------------------------------------------
 *
 * shape.h
 *	  The columns of the tables of leases, for the files that read or write
 *	  them: shape.c, load.c, write.c, read.c and vacuum.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_SHAPE_H
#define DLOCK_SHAPE_H

#include "nodes/primnodes.h"
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

/* Where the columns of a table are */
typedef struct DlockPlaces
{
	AttrNumber	number[DLOCK_MAX_COLUMNS];
} DlockPlaces;

extern Oid	dlock_shape_find_index(Relation relation, AttrNumber number);
extern Oid dlock_lock_name_index(Relation relation, AttrNumber name);
extern void dlock_shape_raise_changed(Relation relation, const char *detail);
extern void dlock_shape_find(Relation relation, const DlockShape *shape,
							 DlockPlaces *places);
extern void dlock_shape_take_row(Relation relation, const DlockShape *shape,
								 const DlockPlaces *places, HeapTuple tuple,
								 DlockStored *row);
extern void dlock_shape_raise_row(Relation relation, const DlockShape *shape,
								  const DlockStored *row, int column);
extern void dlock_shape_check_row(Relation relation, const DlockShape *shape,
								  const DlockStored *row);
extern bool dlock_shape_is_foreign(const DlockShape *shape,
								   const DlockStored *row);
extern bool dlock_shape_is_other(const DlockShape *shape,
								 const DlockPlaces *places,
								 Form_pg_attribute attribute);
extern Node *dlock_shape_find_default(Relation relation,
									  Form_pg_attribute attribute);

#endif							/* DLOCK_SHAPE_H */
