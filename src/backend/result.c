/*-------------------------------------------------------------------------
 *
 * result.c
 *	  The columns of the rows that functions return.
 *
 * CREATE OR REPLACE VIEW can add columns to the row type of a function.  So
 * each function checks its row type before it fills in a row.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/regproc.h"

#include "backend/inner.h"

static void
raise_columns(FunctionCallInfo fcinfo, const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("function %s does not return the columns that extension \"%s\" has given it",
					format_procedure(fcinfo->flinfo->fn_oid), "dlock"),
			 errdetail_internal("%s", detail),
			 errhint("Add columns to a view of your own. To get the extension's view back, use DROP EXTENSION and CREATE EXTENSION, which end all locks of this database.")));
}

/* Raise 55000 if the columns have not exactly these types. */
static void
check_result_columns(FunctionCallInfo fcinfo, TupleDesc descriptor,
					 const Oid *types, int num_columns)
{
	if (descriptor->natts != num_columns)
		raise_columns(fcinfo,
					  psprintf(_("It returns %d columns instead of %d."),
							   descriptor->natts, num_columns));
	for (int i = 0; i < num_columns; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(descriptor, i);

		if (attribute->atttypid != types[i])
			raise_columns(fcinfo,
						  psprintf(_("Column \"%s\" is of type %s instead of %s."),
								   NameStr(attribute->attname),
								   format_type_be(attribute->atttypid),
								   format_type_be(types[i])));
	}
}

/* Begin a set of rows with columns of these types. */
ReturnSetInfo *
dlock_begin_rows(FunctionCallInfo fcinfo, const Oid *types, int num_columns)
{
	ReturnSetInfo *rsinfo;

	InitMaterializedSRF(fcinfo, 0);
	rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	check_result_columns(fcinfo, rsinfo->setDesc, types, num_columns);
	return rsinfo;
}

/* Returns the descriptor of a single row with columns of these types. */
TupleDesc
dlock_begin_row(FunctionCallInfo fcinfo, const Oid *types, int num_columns)
{
	TupleDesc	descriptor;

	if (get_call_result_type(fcinfo, NULL, &descriptor) != TYPEFUNC_COMPOSITE)
		raise_columns(fcinfo, _("It returns no row."));
	check_result_columns(fcinfo, descriptor, types, num_columns);
	return BlessTupleDesc(descriptor);
}
