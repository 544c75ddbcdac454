/*-------------------------------------------------------------------------
 *
 * shape.c
 *	  The shape of the tables of leases.
 *
 * These tables are read and written as catalogs are: by the position of
 * columns, without running any code of their owner.  So a table must be as the
 * extension's script made it, but for dropped columns behind.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/transam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/dependency.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "tables/shape.h"

/* Values that dlock can have written, in this version or before */

static bool
is_number(Datum value)
{
	return DatumGetInt64(value) >= 1 &&
		DatumGetInt64(value) <= DLOCK_MAX_TICKET;
}

/* Does not detoast the text. */
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

/* dlock.max_ttl may have been greater when it was written */
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

void
dlock_shape_raise_changed(Relation relation, const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" is not what extension \"%s\" has made",
					RelationGetRelationName(relation), "dlock"),
			 errdetail_internal("%s", detail),
			 errhint("Undo what was changed, as with ALTER TABLE or DROP INDEX.")));
}

/* The number of a column; raises 55000 if there is none of this type. */
int
dlock_find_column(Relation relation, const char *name, Oid type)
{
	TupleDesc	descriptor = RelationGetDescr(relation);
	int			column = SPI_fnumber(descriptor, name);

	if (column <= 0 || SPI_gettypeid(descriptor, column) != type)
		dlock_shape_raise_changed(relation,
								  psprintf(_("It has no column \"%s\" of type %s."),
										   name, format_type_be(type)));
	return column;
}

/* The value of a row's column; raises 55000 for a null, too. */
Datum
dlock_get_column(Relation relation, HeapTuple row, const char *name, Oid type)
{
	bool		is_null;
	Datum		datum = heap_getattr(row,
									 dlock_find_column(relation, name, type),
									 RelationGetDescr(relation), &is_null);

	if (is_null)
		dlock_shape_raise_changed(relation,
								  psprintf(_("A row has a null in column \"%s\"."),
										   name));
	return datum;
}

/* Raise 55000 for a row that dlock cannot have written. */
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

static void
check_column(Relation relation, const DlockColumn *column, int place)
{
	TupleDesc	descriptor = RelationGetDescr(relation);
	Form_pg_attribute attribute = place < descriptor->natts ?
		TupleDescAttr(descriptor, place) : NULL;

	if (attribute == NULL || attribute->attisdropped ||
		strcmp(NameStr(attribute->attname), column->name) != 0)
		dlock_shape_raise_changed(relation,
								  psprintf(_("Its column %d is not \"%s\" of type %s."),
										   place + 1, column->name,
										   format_type_be(column->type)));
	if (attribute->atttypid != column->type || attribute->attgenerated != '\0')
		dlock_shape_raise_changed(relation,
								  psprintf(_("Column \"%s\" is of type %s instead of %s, or generated."),
										   column->name,
										   format_type_be(attribute->atttypid),
										   format_type_be(column->type)));
	if (attribute->attnotnull != (column->needed == DLOCK_NOT_NULL))
		dlock_shape_raise_changed(relation,
								  psprintf(attribute->attnotnull ?
										   _("Column \"%s\" must not be null.") :
										   _("Column \"%s\" can be null."),
										   column->name));
	if (attribute->atthasdef || attribute->attidentity != '\0')
		dlock_shape_raise_changed(relation,
								  psprintf(_("Column \"%s\" has a default."),
										   column->name));
}

static void
check_columns(Relation relation, const DlockShape *shape)
{
	TupleDesc	descriptor = RelationGetDescr(relation);

	for (int i = 0; i < shape->num_columns; i++)
		check_column(relation, &shape->columns[i], i);
	for (int a = shape->num_columns; a < descriptor->natts; a++)
	{
		Form_pg_attribute attribute = TupleDescAttr(descriptor, a);

		if (!attribute->attisdropped)
			dlock_shape_raise_changed(relation,
									  psprintf(_("It has a column \"%s\" that was added."),
											   NameStr(attribute->attname)));
	}
	if (descriptor->constr && descriptor->constr->num_check > 0)
		dlock_shape_raise_changed(relation, _("It has a CHECK constraint."));
}

static bool
is_function(Oid function, const char *name)
{
	char	   *found = get_func_name(function);

	return found && strcmp(found, name) == 0;
}

/* Only the script's two triggers may exist, enabled as it says. */
static void
check_triggers(Relation relation)
{
	static const struct
	{
		const char *name;
		const char *function;
		int16		type;
		char		enabled;
	}			expected[] = {
		{"dlock_replicated", "dlock_drop_replicated",
			TRIGGER_TYPE_ROW | TRIGGER_TYPE_BEFORE | TRIGGER_TYPE_INSERT |
			TRIGGER_TYPE_UPDATE | TRIGGER_TYPE_DELETE,
		TRIGGER_FIRES_ON_REPLICA},
		{"dlock_truncated", "dlock_refuse_truncate",
			TRIGGER_TYPE_BEFORE | TRIGGER_TYPE_TRUNCATE, TRIGGER_FIRES_ALWAYS}
	};
	/* a copy, because a catalog lookup can replace the relation's own */
	const TriggerDesc *triggers = CopyTriggerDesc(relation->trigdesc);
	int			count = triggers ? triggers->numtriggers : 0;
	Oid			extension = getExtensionOfObject(RelationRelationId,
												 RelationGetRelid(relation));

	for (int i = 0; i < count; i++)
	{
		const Trigger *trigger = &triggers->triggers[i];
		bool		is_expected = false;

		for (int e = 0; e < (int) lengthof(expected); e++)
			is_expected |= strcmp(trigger->tgname, expected[e].name) == 0 &&
				trigger->tgtype == expected[e].type &&
				trigger->tgenabled == expected[e].enabled &&
				trigger->tgqual == NULL && trigger->tgnattr == 0 &&
				is_function(trigger->tgfoid, expected[e].function) &&
				getExtensionOfObject(ProcedureRelationId,
									 trigger->tgfoid) == extension;
		if (!is_expected)
			dlock_shape_raise_changed(relation,
									  psprintf(_("Trigger \"%s\" was added, or is enabled in another way."),
											   trigger->tgname));
	}
	if (count != (int) lengthof(expected))
		dlock_shape_raise_changed(relation, _("One of its triggers was dropped."));
}

/*
 * Does maintaining an index run PostgreSQL's code only?  This must not run
 * other code either; RelationGetIndexExpressions() evaluates constants.
 */
static bool
is_plain_index(Relation index)
{
	if (index->rd_rel->relam != BTREE_AM_OID ||
		!heap_attisnull(index->rd_indextuple, Anum_pg_index_indexprs, NULL) ||
		!heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL) ||
		!index->rd_index->indimmediate || index->rd_index->indisexclusion)
		return false;
	for (int i = 0; i < IndexRelationGetNumberOfKeyAttributes(index); i++)
	{
		if (index->rd_opfamily[i] >= FirstNormalObjectId)
			return false;
	}
	return true;
}

/* A relation forgets this index at any invalidation, and so at any lock. */
Oid
dlock_shape_key_index(Relation relation)
{
	list_free(RelationGetIndexList(relation));
	return relation->rd_pkindex;
}

/*
 * The primary key must be valid and on the first column.  No index may be
 * unique on anything else.  The index on names may be missing.
 */
static void
check_indexes(Relation relation)
{
	List	   *indexes = RelationGetIndexList(relation);
	ListCell   *cell;
	bool		found = false;

	foreach(cell, indexes)
	{
		/* without its lock, which REINDEX can hold for long */
		Relation	index = RelationIdGetRelation(lfirst_oid(cell));
		bool		has_key_of_table;
		bool		is_key;
		bool		is_plain;
		char	   *name;

		if (index == NULL)
			continue;
		has_key_of_table = IndexRelationGetNumberOfKeyAttributes(index) == 1 &&
			index->rd_index->indkey.values[0] == 1;
		is_key = index->rd_index->indisprimary &&
			index->rd_index->indisvalid && has_key_of_table;
		/* REINDEX CONCURRENTLY makes a second unique one */
		is_plain = is_plain_index(index) &&
			(has_key_of_table || !index->rd_index->indisunique);
		name = pstrdup(RelationGetRelationName(index));
		RelationClose(index);
		found |= is_key;
		if (!is_plain)
			dlock_shape_raise_changed(relation,
									  psprintf(_("Index \"%s\" was added."),
											   name));
	}
	list_free(indexes);
	if (!found)
		dlock_shape_raise_changed(relation,
								  _("Its primary key is not its first column."));
}

/* Raise 55000 if a table is unlogged or its shape differs. */
void
dlock_shape_check(Relation relation, const DlockShape *shape)
{
	dlock_check_permanent(relation);
	if (relation->rd_rel->relam != HEAP_TABLE_AM_OID)
		dlock_shape_raise_changed(relation,
								  _("It has another access method than \"heap\"."));
	check_columns(relation, shape);
	check_triggers(relation);
	check_indexes(relation);
	if (relation->rd_rules != NULL)
		dlock_shape_raise_changed(relation, _("It has a rule."));
	if (relation->rd_rel->relrowsecurity || relation->rd_rel->relforcerowsecurity)
		dlock_shape_raise_changed(relation, _("It has row security."));
	if (relation->rd_rel->relispartition ||
		has_superclass(RelationGetRelid(relation)) ||
		(relation->rd_rel->relhassubclass &&
		 find_inheritance_children(RelationGetRelid(relation), NoLock) != NIL))
		dlock_shape_raise_changed(relation, _("It inherits, or is inherited from."));
}

/* Raises 55000 for a null in a column that must have a value. */
void
dlock_shape_take_row(Relation relation, const DlockShape *shape,
					 HeapTuple tuple, DlockStored *row)
{
	Datum		values[MaxHeapAttributeNumber];
	bool		nulls[MaxHeapAttributeNumber];

	Assert(shape->num_columns >= DLOCK_LEASE_NUM_COLUMNS);
	heap_deform_tuple(tuple, RelationGetDescr(relation), values, nulls);
	for (int i = 0; i < shape->num_columns; i++)
	{
		row->values[i] = nulls[i] ? (Datum) 0 : values[i];
		row->nulls[i] = nulls[i];
		if (nulls[i] && shape->columns[i].needed == DLOCK_NOT_NULL)
			dlock_shape_raise_changed(relation,
									  psprintf(_("A row has a null in column \"%s\"."),
											   shape->columns[i].name));
	}
}

/* Raise 55000 for a row with this name in column "key". */
void
dlock_raise_named_row(Relation relation, const char *key, const text *name,
					  const char *column)
{
	int			length = pg_mbcliplen(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name),
									  DLOCK_MAX_NAME);

	raise_row(relation,
			  psprintf("%s \"%.*s\"", key, length, VARDATA_ANY(name)), column);
}

/* Raise 55000 for a row of a table of leases. */
void
dlock_shape_raise_row(Relation relation, const DlockShape *shape,
					  const DlockStored *row, int column)
{
	raise_row(relation,
			  psprintf("%s %lld", shape->columns[0].name,
					   (long long) DatumGetInt64(row->values[0])),
			  shape->columns[column].name);
}

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
 * A ticket has a ttl if and only if its lease is single, with the same number,
 * and a time of grant if and only if it is granted.
 */
static void
check_ticket_row(Relation relation, const DlockShape *shape,
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

static void
check_lease_row(Relation relation, const DlockShape *shape,
				const DlockStored *row)
{
	if (DatumGetBool(row->values[DLOCK_LEASE_DELAYED]) &&
		row->nulls[DLOCK_LEASE_DELAY])
		dlock_shape_raise_row(relation, shape, row, DLOCK_LEASE_DELAYED);
}

/*
 * Raise 55000 if dlock cannot have written a row that is to be loaded (I22).
 * Of a foreign row, only the number is checked.
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
		check_ticket_row(relation, shape, row);
	else
		check_lease_row(relation, shape, row);
}

bool
dlock_shape_is_foreign(const DlockShape *shape, const DlockStored *row)
{
	return (uint64) DatumGetInt64(row->values[shape->system]) !=
		GetSystemIdentifier() ||
		DatumGetObjectId(row->values[shape->database]) != MyDatabaseId;
}

/* Raise 55000 if a table's shape differs; a locked one is skipped. */
void
dlock_rows_check(DlockSpace *space)
{
	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
	{
		Oid			id = dlock_relation(space, dlock_shapes[i].name);
		Relation	relation;

		if (!ConditionalLockRelationOid(id, AccessShareLock))
			continue;
		relation = try_relation_open(id, NoLock);
		if (relation == NULL)
		{
			UnlockRelationOid(id, AccessShareLock);
			continue;
		}
		dlock_shape_check(relation, &dlock_shapes[i]);
		relation_close(relation, AccessShareLock);
	}
}
