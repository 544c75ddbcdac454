/*-------------------------------------------------------------------------
 *
 * shape.c
 *	  The shape of the tables of leases.
 *
 * dlock reads and writes the tables by the position of columns, and must not
 * run the owner's code.  So a table must be as the extension's script made it,
 * except for owner, rights, plain indexes and dropped columns at the end.
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

#define MAX_TTL		((int64) INT_MAX * USECS_PER_SEC)	/* longest max_ttl */

/* The least and the greatest value, or length, that dlock can have written */
static const DlockColumn queue_columns[] = {
	[DLOCK_QUEUE_TICKET] = {"ticket", INT8OID, false, 1, DLOCK_MAX_TICKET},
	[DLOCK_QUEUE_NAME] = {"name", TEXTOID, false, 1, DLOCK_MAX_NAME},
	[DLOCK_QUEUE_LEASE] = {"lease", INT8OID, false, 1, DLOCK_MAX_TICKET},
	[DLOCK_QUEUE_GRANTED] = {"granted", BOOLOID, false, 0, 0},
	[DLOCK_QUEUE_MODE] = {"mode", TEXTOID, false, 1, NAMEDATALEN},
	[DLOCK_QUEUE_SLOTS] = {"slots", INT4OID, true, 1, INT_MAX},
	[DLOCK_QUEUE_PERMITS] = {"permits", INT4OID, false, 1, INT_MAX},
	[DLOCK_QUEUE_OWNER] = {"owner", TEXTOID, true, 0, DLOCK_MAX_INFO},
	[DLOCK_QUEUE_INFO] = {"info", TEXTOID, true, 0, DLOCK_MAX_INFO},
	[DLOCK_QUEUE_CHANNEL] = {"channel", TEXTOID, true, 1, NAMEDATALEN - 1},
	[DLOCK_QUEUE_ROLE] = {"role", OIDOID, false, 0, 0},
	[DLOCK_QUEUE_ROLE_NAME] = {"role_name", NAMEOID, false, 0, 0},
	[DLOCK_QUEUE_ENQUEUED_AT] = {"enqueued_at", TIMESTAMPTZOID, false,
		MIN_TIMESTAMP, END_TIMESTAMP},
	[DLOCK_QUEUE_GRANTED_AT] = {"granted_at", TIMESTAMPTZOID, true,
		MIN_TIMESTAMP, END_TIMESTAMP},
	[DLOCK_QUEUE_TTL] = {"ttl", INTERVALOID, true, DLOCK_MIN_TTL, MAX_TTL},
	[DLOCK_QUEUE_DURABILITY] = {"durability", INT4OID, false,
		SYNCHRONOUS_COMMIT_OFF, SYNCHRONOUS_COMMIT_REMOTE_APPLY},
	[DLOCK_QUEUE_SYSTEM] = {"system", INT8OID, false,
		PG_INT64_MIN, PG_INT64_MAX},
	[DLOCK_QUEUE_DATABASE] = {"database", OIDOID, false, 0, 0}
};

static const DlockColumn lease_columns[] = {
	[DLOCK_LEASE_LEASE] = {"lease", INT8OID, false, 1, DLOCK_MAX_TICKET},
	[DLOCK_LEASE_TTL] = {"ttl", INTERVALOID, false, DLOCK_MIN_TTL, MAX_TTL},
	[DLOCK_LEASE_DELAY] = {"delay", INTERVALOID, true, DLOCK_MIN_TTL, MAX_TTL},
	[DLOCK_LEASE_DELAYED] = {"delayed", BOOLOID, false, 0, 0},
	[DLOCK_LEASE_INFO] = {"info", TEXTOID, true, 0, DLOCK_MAX_INFO},
	[DLOCK_LEASE_ROLE] = {"role", OIDOID, false, 0, 0},
	[DLOCK_LEASE_ROLE_NAME] = {"role_name", NAMEOID, false, 0, 0},
	[DLOCK_LEASE_OPENED_AT] = {"opened_at", TIMESTAMPTZOID, false,
		MIN_TIMESTAMP, END_TIMESTAMP},
	[DLOCK_LEASE_DURABILITY] = {"durability", INT4OID, false,
		SYNCHRONOUS_COMMIT_OFF, SYNCHRONOUS_COMMIT_REMOTE_APPLY},
	[DLOCK_LEASE_SYSTEM] = {"system", INT8OID, false,
		PG_INT64_MIN, PG_INT64_MAX},
	[DLOCK_LEASE_DATABASE] = {"database", OIDOID, false, 0, 0}
};

StaticAssertDecl(lengthof(queue_columns) == DLOCK_QUEUE_NUM_COLUMNS,
				 "columns of dlock_queue");
StaticAssertDecl(lengthof(lease_columns) == DLOCK_LEASE_NUM_COLUMNS,
				 "columns of dlock_queue_lease");

const DlockShape dlock_shapes[DLOCK_NUM_TABLES] = {
	[DLOCK_TABLE_QUEUE] = {"dlock_queue", queue_columns,
		DLOCK_QUEUE_NUM_COLUMNS},
	[DLOCK_TABLE_LEASES] = {"dlock_queue_lease", lease_columns,
		DLOCK_LEASE_NUM_COLUMNS}
};

static void
raise_changed(Relation relation, const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" is not what extension \"%s\" has made",
					RelationGetRelationName(relation), "dlock"),
			 errdetail_internal("%s", detail),
			 errhint("Undo the change, for example with ALTER TABLE or DROP INDEX.")));
}

/* Returns a column's number.  Raises 55000 if none has this name and type. */
int
dlock_find_column(Relation relation, TupleDesc descriptor, const char *name,
				  Oid type)
{
	int			column = SPI_fnumber(descriptor, name);

	if (column <= 0 || SPI_gettypeid(descriptor, column) != type)
		raise_changed(relation,
					  psprintf(_("It has no column \"%s\" of type %s."),
							   name, format_type_be(type)));
	return column;
}

/* Returns a column's value.  Raises 55000 if it is missing or null. */
Datum
dlock_get_column(Relation relation, TupleDesc descriptor, HeapTuple row,
				 const char *name, Oid type)
{
	int			column = dlock_find_column(relation, descriptor, name, type);
	bool		is_null;
	Datum		datum = heap_getattr(row, column, descriptor, &is_null);

	if (is_null)
		raise_changed(relation,
					  psprintf(_("A row has a null in column \"%s\"."),
							   name));
	return datum;
}

/* Raise 55000 for a row that dlock cannot have written. */
static void
raise_row(const char *table, const char *row, const char *column)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"%s\" has a row that extension \"%s\" has not written",
					table, "dlock"),
			 errdetail("Column \"%s\" cannot have the value that it has in the row of %s.",
					   column, row),
			 errhint("Set it right with UPDATE, or DELETE the row, which ends what it stands for.")));
}

static void
check_columns(Relation relation, const DlockShape *shape)
{
	TupleDesc	descriptor = RelationGetDescr(relation);

	for (int i = 0; i < Max(descriptor->natts, shape->num_columns); i++)
	{
		Form_pg_attribute found = i < descriptor->natts ?
			TupleDescAttr(descriptor, i) : NULL;
		const DlockColumn *column = &shape->columns[i];

		if (i >= shape->num_columns)
		{
			if (!found->attisdropped)
				raise_changed(relation,
							  psprintf(_("It has a column \"%s\" that was added."),
									   NameStr(found->attname)));
		}
		else if (found == NULL || found->attisdropped ||
				 strcmp(NameStr(found->attname), column->name) != 0 ||
				 found->atttypid != column->type ||
				 found->attnotnull == column->nullable ||
				 found->atthasdef || found->attidentity != '\0')
			raise_changed(relation,
						  psprintf(_("Its column %d is not \"%s\" of type %s, %s, without a default."),
								   i + 1, column->name,
								   format_type_be(column->type),
								   column->nullable ? "nullable" : "NOT NULL"));
	}
	if (descriptor->constr && descriptor->constr->num_check > 0)
		raise_changed(relation, _("It has a CHECK constraint."));
}

static bool
is_function(Oid function, const char *name)
{
	char	   *found = get_func_name(function);

	return found && strcmp(found, name) == 0;
}

/* Raise 55000 unless the triggers are the two of the extension's script. */
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
	/* a copy, because a catalog lookup can replace relation->trigdesc */
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
			raise_changed(relation,
						  psprintf(_("Trigger \"%s\" was added, or is enabled in another way."),
								   trigger->tgname));
	}
	if (count != (int) lengthof(expected))
		raise_changed(relation, _("One of its triggers was dropped."));
}

/*
 * Does updating an index run only PostgreSQL's code?  This function must not
 * run other code either, as RelationGetIndexExpressions() would.
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

/* Returns the primary key.  Sets rd_pkindex, which a lock may have cleared. */
Oid
dlock_shape_key_index(Relation relation)
{
	list_free(RelationGetIndexList(relation));
	return relation->rd_pkindex;
}

/*
 * The primary key must be valid and on the first column.  Indexes on other
 * columns must not be unique.  The index on names may be missing.
 */
static void
check_indexes(Relation relation)
{
	List	   *indexes = RelationGetIndexList(relation);
	ListCell   *cell;
	bool		found = false;

	foreach(cell, indexes)
	{
		/* do not lock the index, because REINDEX can lock it for long */
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
		/* REINDEX CONCURRENTLY adds a unique copy of the primary key */
		is_plain = is_plain_index(index) &&
			(has_key_of_table || !index->rd_index->indisunique);
		name = pstrdup(RelationGetRelationName(index));
		RelationClose(index);
		found |= is_key;
		if (!is_plain)
			raise_changed(relation,
						  psprintf(_("Index \"%s\" was added."),
								   name));
	}
	list_free(indexes);
	if (!found)
		raise_changed(relation, _("Its primary key is not its first column."));
}

/* Raise 55000 if a table is unlogged or does not have this shape. */
void
dlock_shape_check(Relation relation, const DlockShape *shape)
{
	dlock_check_permanent(relation);
	if (relation->rd_rel->relam != HEAP_TABLE_AM_OID)
		raise_changed(relation,
					  _("It has another access method than \"heap\"."));
	check_columns(relation, shape);
	check_triggers(relation);
	check_indexes(relation);
	if (relation->rd_rules != NULL)
		raise_changed(relation, _("It has a rule."));
	if (relation->rd_rel->relrowsecurity || relation->rd_rel->relforcerowsecurity)
		raise_changed(relation, _("It has row security."));
	if (relation->rd_rel->relispartition ||
		has_superclass(RelationGetRelid(relation)) ||
		(relation->rd_rel->relhassubclass &&
		 find_inheritance_children(RelationGetRelid(relation), NoLock) != NIL))
		raise_changed(relation, _("It inherits, or is inherited from."));
}

/* Take a row apart.  The values point into the tuple. */
void
dlock_shape_take_row(Relation relation, const DlockShape *shape,
					 HeapTuple tuple, DlockStored *row)
{
	Datum		values[MaxHeapAttributeNumber];
	bool		nulls[MaxHeapAttributeNumber];

	/* dropped columns may follow */
	heap_deform_tuple(tuple, RelationGetDescr(relation), values, nulls);
	memcpy(row->values, values, shape->num_columns * sizeof(Datum));
	memcpy(row->nulls, nulls, shape->num_columns * sizeof(bool));
	row->system = (uint64) DatumGetInt64(values[shape->num_columns - 2]);
	row->database = DatumGetObjectId(values[shape->num_columns - 1]);
	row->is_foreign = row->system != GetSystemIdentifier() ||
		row->database != MyDatabaseId;
}

/* Raise 55000 for a row with this name in column "key". */
void
dlock_raise_named_row(Relation relation, const char *key, const text *name,
					  const char *column)
{
	int			length = pg_mbcliplen(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name),
									  DLOCK_MAX_NAME);

	raise_row(RelationGetRelationName(relation),
			  psprintf("%s \"%.*s\"", key, length, VARDATA_ANY(name)), column);
}

/* Raise 55000 for a row of a table of leases. */
void
dlock_shape_raise_row(const DlockShape *shape, const DlockStored *row,
					  int column)
{
	raise_row(shape->name,
			  psprintf("%s %lld", shape->columns[0].name,
					   (long long) DatumGetInt64(row->values[0])),
			  shape->columns[column].name);
}

static bool
is_valid(const DlockColumn *column, Datum value)
{
	int64		number;

	switch (column->type)
	{
		case INT4OID:
			number = DatumGetInt32(value);
			break;
		case INT8OID:
			number = DatumGetInt64(value);
			break;
		case TIMESTAMPTZOID:
			number = DatumGetTimestampTz(value);
			break;
		case INTERVALOID:
			number = DatumGetIntervalP(value)->time;
			if (DatumGetIntervalP(value)->month != 0 ||
				DatumGetIntervalP(value)->day != 0)
				return false;
			break;
		case TEXTOID:
			number = toast_raw_datum_size(value) - VARHDRSZ;
			break;
		default:
			return true;
	}
	return number >= column->min && number <= column->max;
}

/*
 * A ticket has a ttl if and only if its lease is single, that is, has the
 * ticket's number.  A ticket has a time of grant if and only if it is granted.
 */
static void
check_ticket_row(const DlockShape *shape, const DlockStored *row)
{
	const Datum *values = row->values;
	const bool *nulls = row->nulls;
	bool		has_slots = !nulls[DLOCK_QUEUE_SLOTS];
	DlockMode	mode;

	if (!dlock_mode_by_name(TextDatumGetCString(values[DLOCK_QUEUE_MODE]),
							&mode))
		dlock_shape_raise_row(shape, row, DLOCK_QUEUE_MODE);
	if (nulls[DLOCK_QUEUE_TTL] ==
		(DatumGetInt64(values[DLOCK_QUEUE_LEASE]) ==
		 DatumGetInt64(values[DLOCK_QUEUE_TICKET])))
		dlock_shape_raise_row(shape, row, DLOCK_QUEUE_TTL);
	if (nulls[DLOCK_QUEUE_GRANTED_AT] ==
		DatumGetBool(values[DLOCK_QUEUE_GRANTED]))
		dlock_shape_raise_row(shape, row, DLOCK_QUEUE_GRANTED_AT);
	if (has_slots != (mode == DLOCK_SLOTS))
		dlock_shape_raise_row(shape, row, DLOCK_QUEUE_SLOTS);
	if (DatumGetInt32(values[DLOCK_QUEUE_PERMITS]) >
		(has_slots ? DatumGetInt32(values[DLOCK_QUEUE_SLOTS]) : 1))
		dlock_shape_raise_row(shape, row, DLOCK_QUEUE_PERMITS);
}

/*
 * Before a row is loaded, raise 55000 if dlock cannot have written it (I22).
 * Of a foreign row, only the number is checked.
 */
void
dlock_shape_check_row(const DlockShape *shape, const DlockStored *row)
{
	for (int i = 0; i < (row->is_foreign ? 1 : shape->num_columns); i++)
	{
		/* PostgreSQL 18 has NOT NULL constraints that rows may violate */
		if (row->nulls[i] ? !shape->columns[i].nullable :
			!is_valid(&shape->columns[i], row->values[i]))
			dlock_shape_raise_row(shape, row, i);
	}
	if (row->is_foreign)
		return;
	if (shape == &dlock_shapes[DLOCK_TABLE_QUEUE])
		check_ticket_row(shape, row);
	else if (DatumGetBool(row->values[DLOCK_LEASE_DELAYED]) &&
			 row->nulls[DLOCK_LEASE_DELAY])
		dlock_shape_raise_row(shape, row, DLOCK_LEASE_DELAYED);
}

/*
 * Raise 55000 if a table's shape is wrong.  A locked table is skipped.  If no
 * error is raised, the caller must raise one, which releases the locks.
 */
void
dlock_rows_check(DlockSpace *space)
{
	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
	{
		Oid			id = dlock_relation(space, dlock_shapes[i].name);
		Relation	relation = ConditionalLockRelationOid(id, AccessShareLock) ?
			try_relation_open(id, NoLock) : NULL;

		if (relation == NULL)
			continue;
		dlock_shape_check(relation, &dlock_shapes[i]);
		relation_close(relation, NoLock);
	}
}
