/*-------------------------------------------------------------------------
 *
 * triggers.c
 *	  Triggers: for users' tables with a column of versions or fences, and
 *	  for dlock's own tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/dependency.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "utils/builtins.h"
#include "utils/rel.h"

#include "backend/inner.h"

/* Returns the data of the trigger that called "function". */
TriggerData *
dlock_trigger(FunctionCallInfo fcinfo, const char *function)
{
	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by trigger manager",
						function)));
	return (TriggerData *) fcinfo->context;
}

/* Like dlock_trigger(), but raises an error if the table is not dlock's own */
TriggerData *
dlock_own_trigger(FunctionCallInfo fcinfo, const char *function)
{
	TriggerData *trigger = dlock_trigger(fcinfo, function);
	Oid			table = RelationGetRelid(trigger->tg_relation);
	Oid			extension = get_extension_oid("dlock", true);

	if (!OidIsValid(extension) ||
		getExtensionOfObject(RelationRelationId, table) != extension)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" cannot be a trigger of table \"%s\"",
						function, RelationGetRelationName(trigger->tg_relation)),
				 errhint("It is for the tables of extension \"%s\".", "dlock")));
	return trigger;
}

/* Row trigger: drop replicated rows, which are another server's leases */
PG_FUNCTION_INFO_V1(dlock_drop_replicated);
Datum
dlock_drop_replicated(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_own_trigger(fcinfo, "dlock_drop_replicated");

	if (!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired before a change, for each row",
						"dlock_drop_replicated")));
	return PointerGetDatum(NULL);
}

/* Statement trigger: refuse TRUNCATE, which would not end leases in memory. */
PG_FUNCTION_INFO_V1(dlock_refuse_truncate);
Datum
dlock_refuse_truncate(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_own_trigger(fcinfo, "dlock_refuse_truncate");

	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("cannot truncate table \"%s\"",
					RelationGetRelationName(trigger->tg_relation)),
			 errdetail("Its rows are the leases of this database."),
			 errhint("Call dlock_force_close() to end a lease, or dlock_reset() to end all leases.")));
	return PointerGetDatum(NULL);	/* keep compiler quiet */
}

/* A column that a row trigger checks, in the old and the new row */
typedef struct Column
{
	const char *table;
	const char *name;
	int			number;
	Oid			type;
	int64		old_value;
	bool		old_null;
	int64		new_value;
	bool		new_null;
} Column;

static int64
get_integer(Datum value, Oid type)
{
	switch (type)
	{
		case INT2OID:
			return DatumGetInt16(value);
		case INT4OID:
			return DatumGetInt32(value);
		default:
			return DatumGetInt64(value);
	}
}

/* Read the column whose name is the trigger's argument or "default_name". */
static void
read_column(TriggerData *trigger, const char *function,
			const char *default_name, Column *column)
{
	TupleDesc	descriptor = RelationGetDescr(trigger->tg_relation);
	Datum		value;

	if (!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigger->tg_event) ||
		!TRIGGER_FIRED_BY_UPDATE(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired before an update, for each row",
						function)));
	if (trigger->tg_trigger->tgnargs > 1 ||
		(trigger->tg_trigger->tgnargs == 0 && default_name == NULL))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" needs the name of a column as its only argument",
						function)));
	column->table = RelationGetRelationName(trigger->tg_relation);
	column->name = trigger->tg_trigger->tgnargs == 0 ? default_name :
		trigger->tg_trigger->tgargs[0];
	column->number = SPI_fnumber(descriptor, column->name);
	if (column->number <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("column \"%s\" of table \"%s\" does not exist",
						column->name, column->table)));
	column->type = SPI_gettypeid(descriptor, column->number);
	if (column->type != INT8OID &&
		(default_name == NULL ||
		 (column->type != INT4OID && column->type != INT2OID)))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" of table \"%s\" must be of type %s",
						column->name, column->table, default_name == NULL ? "bigint" :
						"bigint, integer or smallint")));

	value = SPI_getbinval(trigger->tg_trigtuple, descriptor, column->number,
						  &column->old_null);
	column->old_value = column->old_null ? 0 : get_integer(value, column->type);
	value = SPI_getbinval(trigger->tg_newtuple, descriptor, column->number,
						  &column->new_null);
	column->new_value = column->new_null ? 0 : get_integer(value, column->type);
}

/* Row trigger: a row's fence never decreases. */
PG_FUNCTION_INFO_V1(dlock_fence_guard);
Datum
dlock_fence_guard(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_trigger(fcinfo, "dlock_fence_guard");
	Column		column;

	read_column(trigger, "dlock_fence_guard", NULL, &column);
	if (column.old_null)
		return PointerGetDatum(trigger->tg_newtuple);
	if (column.new_null)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("fence in column \"%s\" of table \"%s\" cannot become null",
						column.name, column.table),
				 errdetail("The row has fence %lld.",
						   (long long) column.old_value),
				 errhint("Write the fence of the lock's holder.")));
	if (column.new_value < column.old_value)
		ereport(ERROR,
				(errcode(ERRCODE_DLOCK_LOST),
				 errmsg("fence %lld in column \"%s\" of table \"%s\" is stale",
						(long long) column.new_value, column.name,
						column.table),
				 errdetail("The row has fence %lld.",
						   (long long) column.old_value),
				 errhint("The lock was lost. Acquire it again, and write with the new fence.")));
	return PointerGetDatum(trigger->tg_newtuple);
}

static Datum
make_integer(int64 value, const Column *column)
{
	if (value == PG_INT64_MIN ||	/* wrapped around */
		(column->type == INT4OID && value > PG_INT32_MAX) ||
		(column->type == INT2OID && value > PG_INT16_MAX))
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("version in column \"%s\" is out of range",
						column->name)));
	switch (column->type)
	{
		case INT2OID:
			return Int16GetDatum((int16) value);
		case INT4OID:
			return Int32GetDatum((int32) value);
		default:
			return Int64GetDatum(value);
	}
}

/*
 * Row trigger: each update increments the version.  The new row may come with
 * the old version or its successor; any other is stale.  NULL counts as 0.
 */
PG_FUNCTION_INFO_V1(dlock_version_guard);
Datum
dlock_version_guard(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_trigger(fcinfo, "dlock_version_guard");
	Column		column;
	Datum		next;
	bool		is_null = false;

	read_column(trigger, "dlock_version_guard", "version", &column);
	if (!column.new_null && column.old_value < PG_INT64_MAX &&
		column.new_value == column.old_value + 1)
		return PointerGetDatum(trigger->tg_newtuple);
	if (column.new_value != column.old_value)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("version in column \"%s\" of table \"%s\" is stale",
						column.name, column.table),
				 errdetail("The update comes with version %lld, but the row has %lld.",
						   (long long) column.new_value,
						   (long long) column.old_value),
				 errhint("Read the row again, and repeat the transaction.")));
	next = make_integer(column.old_value + 1, &column);
	return
		PointerGetDatum(heap_modify_tuple_by_cols(trigger->tg_newtuple,
												RelationGetDescr(trigger->tg_relation),
												1, &column.number, &next,
												&is_null));
}
