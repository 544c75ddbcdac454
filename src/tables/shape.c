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

#include "access/detoast.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "rewrite/rewriteHandler.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "tables/shape.h"

/*
 * What a value can be that dlock has written, of this version or of one before.
 * All who use what was put back from a row rely on it.
 */

static bool
is_number(Datum value)
{
	return DatumGetInt64(value) >= 1 &&
		DatumGetInt64(value) <= DLOCK_MAX_TICKET;
}

/* Has a text that many bytes?  Looks at no more than it has to. */
static bool
is_length(Datum text, Size min, Size max)
{
	Size		length = toast_raw_datum_size(text) - VARHDRSZ;

	return length >= min && length <= max;
}

static bool
is_lock_name(Datum value)
{
	return is_length(value, 1, DLOCK_MAX_NAME);
}

static bool
is_info(Datum value)
{
	return is_length(value, 0, DLOCK_MAX_INFO);
}

static bool
is_channel(Datum value)
{
	return is_length(value, 1, NAMEDATALEN - 1);
}

static bool
is_mode(Datum value)
{
	DlockMode	mode;

	return is_length(value, 1, NAMEDATALEN) &&
		dlock_mode_by_name(TextDatumGetCString(value), &mode);
}

/* Not by dlock.max_ttl, which may have been greater when it was written */
static bool
is_ttl(Datum value)
{
	const Interval *ttl = DatumGetIntervalP(value);

	return ttl->month == 0 && ttl->day == 0 && ttl->time >= DLOCK_MIN_TTL &&
		ttl->time <= (int64) INT_MAX * USECS_PER_SEC;
}

static bool
is_time(Datum value)
{
	return !TIMESTAMP_NOT_FINITE(DatumGetTimestampTz(value));
}

static bool
is_durability(Datum value)
{
	return DatumGetInt32(value) >= SYNCHRONOUS_COMMIT_OFF &&
		DatumGetInt32(value) <= SYNCHRONOUS_COMMIT_REMOTE_APPLY;
}

static const DlockColumn queue_columns[] = {
	[DLOCK_QUEUE_TICKET] = {"ticket", INT8OID, DLOCK_NOT_NULL, is_number},
	[DLOCK_QUEUE_NAME] = {"name", TEXTOID, DLOCK_NOT_NULL, is_lock_name},
	[DLOCK_QUEUE_LEASE] = {"lease", INT8OID, DLOCK_NOT_NULL, NULL},
	[DLOCK_QUEUE_GRANTED] = {"granted", BOOLOID, DLOCK_NOT_NULL, NULL},
	[DLOCK_QUEUE_MODE] = {"mode", TEXTOID, DLOCK_NOT_NULL, is_mode},
	[DLOCK_QUEUE_SLOTS] = {"slots", INT4OID, DLOCK_CAN_BE_NULL, NULL},
	[DLOCK_QUEUE_PERMITS] = {"permits", INT4OID, DLOCK_NOT_NULL, NULL},
	[DLOCK_QUEUE_OWNER] = {"owner", TEXTOID, DLOCK_CAN_BE_NULL, is_info},
	[DLOCK_QUEUE_INFO] = {"info", TEXTOID, DLOCK_CAN_BE_NULL, is_info},
	[DLOCK_QUEUE_CHANNEL] = {"channel", TEXTOID,
		DLOCK_CAN_BE_NULL, is_channel},
	[DLOCK_QUEUE_ROLE] = {"role", OIDOID, DLOCK_NOT_NULL, NULL},
	[DLOCK_QUEUE_ROLE_NAME] = {"role_name", NAMEOID, DLOCK_NOT_NULL, NULL},
	[DLOCK_QUEUE_ENQUEUED_AT] = {"enqueued_at", TIMESTAMPTZOID,
		DLOCK_NOT_NULL, is_time},
	[DLOCK_QUEUE_GRANTED_AT] = {"granted_at", TIMESTAMPTZOID,
		DLOCK_CAN_BE_NULL, is_time},
	[DLOCK_QUEUE_TTL] = {"ttl", INTERVALOID, DLOCK_CAN_BE_NULL, is_ttl},
	[DLOCK_QUEUE_DURABILITY] = {"durability", INT4OID,
		DLOCK_NOT_NULL, is_durability},
	[DLOCK_QUEUE_SYSTEM] = {"system", INT8OID, DLOCK_NOT_NULL, NULL},
	[DLOCK_QUEUE_DATABASE] = {"database", OIDOID, DLOCK_NOT_NULL, NULL}
};

static const DlockColumn lease_columns[] = {
	[DLOCK_LEASE_LEASE] = {"lease", INT8OID, DLOCK_NOT_NULL, is_number},
	[DLOCK_LEASE_TTL] = {"ttl", INTERVALOID, DLOCK_NOT_NULL, is_ttl},
	[DLOCK_LEASE_DELAY] = {"delay", INTERVALOID, DLOCK_CAN_BE_NULL, is_ttl},
	[DLOCK_LEASE_DELAYED] = {"delayed", BOOLOID, DLOCK_NOT_NULL, NULL},
	[DLOCK_LEASE_INFO] = {"info", TEXTOID, DLOCK_CAN_BE_NULL, is_info},
	[DLOCK_LEASE_ROLE] = {"role", OIDOID, DLOCK_NOT_NULL, NULL},
	[DLOCK_LEASE_ROLE_NAME] = {"role_name", NAMEOID, DLOCK_NOT_NULL, NULL},
	[DLOCK_LEASE_OPENED_AT] = {"opened_at", TIMESTAMPTZOID,
		DLOCK_NOT_NULL, is_time},
	[DLOCK_LEASE_DURABILITY] = {"durability", INT4OID,
		DLOCK_NOT_NULL, is_durability},
	[DLOCK_LEASE_SYSTEM] = {"system", INT8OID, DLOCK_NOT_NULL, NULL},
	[DLOCK_LEASE_DATABASE] = {"database", OIDOID, DLOCK_NOT_NULL, NULL}
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

/* Raise an error for a row that dlock has not written as it is. */
static void
raise_row(Relation relation, const char *row, const char *column)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" has a row that extension \"%s\" has not written",
					RelationGetRelationName(relation), "dlock"),
			 errdetail("Column \"%s\" cannot have the value that it has in the row of %s.",
					   column, row),
			 errhint("Set it right with UPDATE, or DELETE the row, which ends what it stands for.")));
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

		row->values[i] = (Datum) 0;
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

/* The same for a row that is known by a name, in the column "key". */
void
dlock_raise_named_row(Relation relation, const char *key, const text *name,
					  const char *column)
{
	int			length = pg_mbcliplen(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name),
									  DLOCK_MAX_NAME);

	raise_row(relation,
			  psprintf("%s \"%.*s\"", key, length, VARDATA_ANY(name)), column);
}

/* ... and of a table of leases, by its number */
void
dlock_shape_raise_row(Relation relation, const DlockShape *shape,
					  const DlockStored *row, int column)
{
	raise_row(relation,
			  psprintf("%s %lld", shape->columns[0].name,
					   (long long) DatumGetInt64(row->values[0])),
			  shape->columns[column].name);
}

/* A ticket has the slots and the permits that its mode needs. */
static void
check_permits(Relation relation, const DlockShape *shape,
			  const DlockStored *row)
{
	DlockMode	mode;
	bool		has_slots = !row->nulls[DLOCK_QUEUE_SLOTS];
	int32		slots = DatumGetInt32(row->values[DLOCK_QUEUE_SLOTS]);
	int32		permits = DatumGetInt32(row->values[DLOCK_QUEUE_PERMITS]);

	(void) dlock_mode_by_name(TextDatumGetCString(row->values[DLOCK_QUEUE_MODE]),
							  &mode);
	if (has_slots != (mode == DLOCK_SLOTS) || (has_slots && slots < 1))
		dlock_shape_raise_row(relation, shape, row, DLOCK_QUEUE_SLOTS);
	if (permits < 1 || permits > (has_slots ? slots : 1))
		dlock_shape_raise_row(relation, shape, row, DLOCK_QUEUE_PERMITS);
}

/*
 * A ticket has a ttl if its lease is its own, which has its number; and it has the
 * time of its grant if it is granted.
 */
static void
check_ticket(Relation relation, const DlockShape *shape,
			 const DlockStored *row)
{
	bool		is_own = DatumGetInt64(row->values[DLOCK_QUEUE_LEASE]) ==
		DatumGetInt64(row->values[DLOCK_QUEUE_TICKET]);

	if (row->nulls[DLOCK_QUEUE_TTL] == is_own)
		dlock_shape_raise_row(relation, shape, row, DLOCK_QUEUE_TTL);
	if (row->nulls[DLOCK_QUEUE_GRANTED_AT] ==
		DatumGetBool(row->values[DLOCK_QUEUE_GRANTED]))
		dlock_shape_raise_row(relation, shape, row, DLOCK_QUEUE_GRANTED_AT);
	check_permits(relation, shape, row);
}

/* Only a lease that has a delay can be in it. */
static void
check_lease(Relation relation, const DlockShape *shape,
			const DlockStored *row)
{
	if (DatumGetBool(row->values[DLOCK_LEASE_DELAYED]) &&
		row->nulls[DLOCK_LEASE_DELAY])
		dlock_shape_raise_row(relation, shape, row, DLOCK_LEASE_DELAYED);
}

/*
 * What a row says is to be put back.  Raises 55000 where dlock cannot have written
 * that.  Of a row that is another server's only the number matters.
 */
void
dlock_shape_check_row(Relation relation, const DlockShape *shape,
					  const DlockStored *row)
{
	for (int i = 0; i < (row->is_foreign ? 1 : shape->num_columns); i++)
	{
		if (!row->nulls[i] && shape->columns[i].is_valid &&
			!shape->columns[i].is_valid(row->values[i]))
			dlock_shape_raise_row(relation, shape, row, i);
	}
	if (row->is_foreign)
		return;
	if (shape == &dlock_shapes[DLOCK_TABLE_QUEUE])
		check_ticket(relation, shape, row);
	else
		check_lease(relation, shape, row);
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
