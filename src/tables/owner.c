/*-------------------------------------------------------------------------
 *
 * owner.c
 *	  Acting on a table of the extension as its owner.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "shared/shared.h"
#include "tables/shape.h"
#include "tables/tables.h"

/*
 * The plan for a statement, kept for the session: to make one costs more than
 * to execute it.  Kept is the last one for each statement, by the address of
 * its text, which is a constant; it is made anew where the table has got
 * another name since.
 */
static SPIPlanPtr
find_plan(const char *statement, const char *table_name, int num_values,
		  Oid *types)
{
	static struct
	{
		const char *statement;
		char	   *table_name;
		SPIPlanPtr	plan;
	}			plans[16];
	SPIPlanPtr	plan;
	int			i = 0;

	while (i < (int) lengthof(plans) - 1 && plans[i].statement != NULL &&
		   plans[i].statement != statement)
		i++;
	if (plans[i].statement == statement &&
		strcmp(plans[i].table_name, table_name) == 0)
		return plans[i].plan;

	plan = SPI_prepare(psprintf(statement, table_name), num_values, types);
	if (plan == NULL)
		return NULL;
	if (plans[i].statement != NULL)
	{
		plans[i].statement = NULL;
		SPI_freeplan(plans[i].plan);
		pfree(plans[i].table_name);
	}
	plans[i].table_name = MemoryContextStrdup(TopMemoryContext, table_name);
	SPI_keepplan(plan);
	plans[i].plan = plan;
	plans[i].statement = statement;
	return plan;
}

/*
 * The value that the statement has returned.  Raises 55000 where the table's
 * column is not as it must be.
 */
static int64
take_result(Relation table)
{
	TupleDesc	descriptor = SPI_tuptable->tupdesc;
	bool		is_null;
	Datum		value = SPI_getbinval(SPI_tuptable->vals[0], descriptor, 1,
									  &is_null);

	if (SPI_gettypeid(descriptor, 1) != INT8OID)
		dlock_shape_raise_changed(table,
					  psprintf(_("It has no column \"%s\" of type %s."),
							   SPI_fname(descriptor, 1),
							   format_type_be(INT8OID)));
	if (is_null)
		dlock_shape_raise_changed(table,
					  psprintf(_("A row has a null in column \"%s\"."),
							   SPI_fname(descriptor, 1)));
	return DatumGetInt64(value);
}

/*
 * Run a statement on a table of the extension, as its owner.  "%s" in it
 * stands for the table.  Returns how many rows it has processed; where it is
 * one that returns a value, that goes to *result; otherwise it can be NULL.
 */
uint64
dlock_execute_as_owner(DlockSpace *space, const char *name,
					   const char *statement, int num_values, Oid *types,
					   Datum *values, int64 *result)
{
	Relation	table = relation_open(dlock_relation(space, name),
									  AccessShareLock);
	char	   *table_name =
		quote_qualified_identifier(get_namespace_name(RelationGetNamespace(table)),
								   RelationGetRelationName(table));
	Oid			user;
	int			context;
	uint64		processed;
	SPIPlanPtr	plan;

	dlock_check_permanent(table);
	/* should an error come, PostgreSQL itself changes back */
	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(table->rd_rel->relowner,
						   context | SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_NOFORCE_RLS);
	if (SPI_connect() != SPI_OK_CONNECT ||
		(plan = find_plan(statement, table_name, num_values, types)) == NULL ||
		SPI_execute_plan(plan, values, NULL, false, 1) < 0)
		elog(ERROR, "could not execute a statement on table \"%s\"", name);
	processed = SPI_processed;
	if (result && processed == 1)
		*result = take_result(table);
	SPI_finish();
	SetUserIdAndSecContext(user, context);
	relation_close(table, AccessShareLock);
	return processed;
}
