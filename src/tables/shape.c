/*-------------------------------------------------------------------------
 *
 * shape.c
 *	  What the tables of leases look like, as they must be and as they are.
 *
 * Columns are found by name, and looked at for their type.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relation.h"
#include "access/xlog.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "rewrite/rewriteHandler.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "tables/shape.h"

static const DlockColumn queue_columns[] = {
	[DLOCK_QUEUE_TICKET] = {"ticket", INT8OID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_NAME] = {"name", TEXTOID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_LEASE] = {"lease", INT8OID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_GRANTED] = {"granted", BOOLOID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_DELAYED] = {"delayed", BOOLOID, DLOCK_CAN_BE_MISSING},
	[DLOCK_QUEUE_MODE] = {"mode", TEXTOID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_SLOTS] = {"slots", INT4OID, DLOCK_CAN_BE_NULL},
	[DLOCK_QUEUE_PERMITS] = {"permits", INT4OID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_OWNER] = {"owner", TEXTOID, DLOCK_CAN_BE_NULL},
	[DLOCK_QUEUE_INFO] = {"info", TEXTOID, DLOCK_CAN_BE_NULL},
	[DLOCK_QUEUE_CHANNEL] = {"channel", TEXTOID, DLOCK_CAN_BE_NULL},
	[DLOCK_QUEUE_ROLE] = {"role", OIDOID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_ROLE_NAME] = {"role_name", NAMEOID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_ENQUEUED_AT] = {"enqueued_at", TIMESTAMPTZOID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_GRANTED_AT] = {"granted_at", TIMESTAMPTZOID, DLOCK_CAN_BE_NULL},
	[DLOCK_QUEUE_TTL] = {"ttl", INTERVALOID, DLOCK_CAN_BE_NULL},
	[DLOCK_QUEUE_DURABILITY] = {"durability", INT4OID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_SYSTEM] = {"system", INT8OID, DLOCK_NOT_NULL},
	[DLOCK_QUEUE_DATABASE] = {"database", OIDOID, DLOCK_NOT_NULL}
};

static const DlockColumn lease_columns[] = {
	[DLOCK_LEASE_LEASE] = {"lease", INT8OID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_TTL] = {"ttl", INTERVALOID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_DELAY] = {"delay", INTERVALOID, DLOCK_CAN_BE_NULL},
	[DLOCK_LEASE_DELAYED] = {"delayed", BOOLOID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_INFO] = {"info", TEXTOID, DLOCK_CAN_BE_NULL},
	[DLOCK_LEASE_ROLE] = {"role", OIDOID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_ROLE_NAME] = {"role_name", NAMEOID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_OPENED_AT] = {"opened_at", TIMESTAMPTZOID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_DURABILITY] = {"durability", INT4OID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_SYSTEM] = {"system", INT8OID, DLOCK_NOT_NULL},
	[DLOCK_LEASE_DATABASE] = {"database", OIDOID, DLOCK_NOT_NULL}
};

StaticAssertDecl(lengthof(queue_columns) == DLOCK_QUEUE_NUM_COLUMNS,
				 "columns of dlock_queue");
StaticAssertDecl(lengthof(lease_columns) == DLOCK_LEASE_NUM_COLUMNS,
				 "columns of dlock_queue_lease");

const DlockShape dlock_shapes[DLOCK_NUM_TABLES] = {
	[DLOCK_TABLE_QUEUE] = {"dlock_queue", queue_columns,
		DLOCK_QUEUE_NUM_COLUMNS, DLOCK_QUEUE_SYSTEM, DLOCK_QUEUE_DATABASE},
	[DLOCK_TABLE_LEASES] = {"dlock_queue_lease", lease_columns,
		DLOCK_LEASE_NUM_COLUMNS, DLOCK_LEASE_SYSTEM, DLOCK_LEASE_DATABASE}
};

/* The index by which a row is found: the primary key, if it is that one. */
Oid
dlock_shape_find_index(Relation relation, AttrNumber number)
{
	HeapTuple	tuple;
	Form_pg_index index;
	Oid			found = InvalidOid;

	list_free(RelationGetIndexList(relation));
	if (!OidIsValid(relation->rd_pkindex))
		return InvalidOid;
	tuple = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(relation->rd_pkindex));
	if (!HeapTupleIsValid(tuple))
		return InvalidOid;
	index = (Form_pg_index) GETSTRUCT(tuple);
	if (index->indisvalid && index->indkey.values[0] == number)
		found = relation->rd_pkindex;
	ReleaseSysCache(tuple);
	return found;
}

void
dlock_shape_raise_changed(Relation relation, const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" is not what extension \"%s\" has made",
					RelationGetRelationName(relation), "dlock"),
			 errdetail_internal("%s", detail),
			 errhint("Undo what was changed, with ALTER TABLE.")));
}

/*
 * Find the columns of a table.  Raises 55000 where one is not as it must be, and
 * where the table does not outlive a crash.
 */
void
dlock_shape_find(Relation relation, const DlockShape *shape,
				 DlockPlaces *places)
{
	TupleDesc	descriptor = RelationGetDescr(relation);

	dlock_check_permanent(relation);
	for (int i = 0; i < shape->num_columns; i++)
	{
		const DlockColumn *column = &shape->columns[i];
		Form_pg_attribute found = NULL;

		for (int a = 0; a < descriptor->natts && found == NULL; a++)
		{
			Form_pg_attribute attribute = TupleDescAttr(descriptor, a);

			if (!attribute->attisdropped &&
				strcmp(NameStr(attribute->attname), column->name) == 0)
				found = attribute;
		}
		places->number[i] = InvalidAttrNumber;
		if (found == NULL && column->needed == DLOCK_CAN_BE_MISSING)
			continue;
		if (found == NULL)
			dlock_shape_raise_changed(relation,
						  psprintf(_("It has no column \"%s\" of type %s."),
								   column->name, format_type_be(column->type)));
		if (found->atttypid != column->type || found->attgenerated != '\0')
			dlock_shape_raise_changed(relation,
						  psprintf(_("Column \"%s\" is of type %s instead of %s, or generated."),
								   column->name, format_type_be(found->atttypid),
								   format_type_be(column->type)));
		places->number[i] = found->attnum;
	}
}

/* The columns of a row that was read */
void
dlock_shape_take_row(Relation relation, const DlockShape *shape,
					 const DlockPlaces *places, HeapTuple tuple,
					 DlockStored *row)
{
	Datum		values[MaxHeapAttributeNumber];
	bool		nulls[MaxHeapAttributeNumber];

	/* the smaller of the two tables has that many */
	Assert(shape->num_columns >= DLOCK_LEASE_NUM_COLUMNS);
	heap_deform_tuple(tuple, RelationGetDescr(relation), values, nulls);
	for (int i = 0; i < shape->num_columns; i++)
	{
		AttrNumber	number = places->number[i];

		row->nulls[i] = number == InvalidAttrNumber;
		row->values[i] = (Datum) 0;
		if (row->nulls[i])
			continue;
		row->nulls[i] = nulls[number - 1];
		if (!row->nulls[i])
		{
			row->values[i] = values[number - 1];
			continue;
		}
		if (shape->columns[i].needed == DLOCK_NOT_NULL)
			dlock_shape_raise_changed(relation,
						  psprintf(_("A row has a null in column \"%s\"."),
								   shape->columns[i].name));
	}
}

bool
dlock_shape_is_foreign(const DlockShape *shape, const DlockStored *row)
{
	return (uint64) DatumGetInt64(row->values[shape->system]) !=
		GetSystemIdentifier() ||
		DatumGetObjectId(row->values[shape->database]) != MyDatabaseId;
}

/* Is this a column that somebody has added, and that can be written? */
bool
dlock_shape_is_other(const DlockShape *shape, const DlockPlaces *places,
					 Form_pg_attribute attribute)
{
	for (int i = 0; i < shape->num_columns; i++)
	{
		if (places->number[i] == attribute->attnum)
			return false;
	}
	return !attribute->attisdropped && attribute->attgenerated == '\0';
}

/* What is put into such a column; NULL: a null.  Raises 55000 if it must not be. */
Node *
dlock_shape_find_default(Relation relation, Form_pg_attribute attribute)
{
	Node	   *expression = build_column_default(relation, attribute->attnum);

	if (expression == NULL && attribute->attnotnull)
		dlock_shape_raise_changed(relation,
					  psprintf(_("Column \"%s\" must not be null, and has no default."),
							   NameStr(attribute->attname)));
	return expression;
}

/*
 * Raise an error where the tables cannot be written as they are; for those who
 * were told that this has failed.  Waits for nobody who changes them now.
 */
void
dlock_rows_check(DlockSpace *space)
{
	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
	{
		Oid			id = dlock_relation(space, dlock_shapes[i].name);
		Relation	relation;
		TupleDesc	descriptor;
		DlockPlaces		places;

		if (!ConditionalLockRelationOid(id, AccessShareLock))
			continue;
		relation = try_relation_open(id, NoLock);
		if (relation == NULL)
		{
			UnlockRelationOid(id, AccessShareLock);
			continue;
		}
		descriptor = RelationGetDescr(relation);
		dlock_shape_find(relation, &dlock_shapes[i], &places);
		for (int a = 0; a < descriptor->natts; a++)
		{
			Form_pg_attribute attribute = TupleDescAttr(descriptor, a);

			if (dlock_shape_is_other(&dlock_shapes[i], &places, attribute))
				(void) dlock_shape_find_default(relation, attribute);
		}
		relation_close(relation, AccessShareLock);
	}
}
