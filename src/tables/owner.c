/*-------------------------------------------------------------------------
 *
 * owner.c
 *	  Running statements on a table of the extension as the table's owner.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "tables/shape.h"

typedef struct OwnersStatement
{
	const char *text;
	Oid			table;
} OwnersStatement;

/* The innermost statement that runs; its text is NULL if none runs */
static OwnersStatement current = {NULL, InvalidOid};

/*
 * Raise 55000 if the current statement, as parsed, uses a table other than the
 * table that dlock has opened.
 *
 * The owner of the schema can put another table in this table's place.  The
 * other table's triggers and defaults would run as this table's owner.  So
 * compare the OIDs at each parse, before rewriting and planning can run code.
 */
void
dlock_owner_check_parsed(const char *text, const List *range_table)
{
	ListCell   *cell;

	if (likely(current.text == NULL) || text == NULL ||
		strcmp(text, current.text) != 0)
		return;
	foreach(cell, range_table)
	{
		const RangeTblEntry *entry = lfirst_node(RangeTblEntry, cell);

		if (entry->rtekind == RTE_RELATION && entry->relid != current.table)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("table \"%s\" is not the one of extension \"%s\"",
							get_rel_name(entry->relid), "dlock"),
					 errdetail("The extension's table, or its schema, has just been renamed."),
					 errhint("Try again.")));
	}
}

/*
 * Returns the plan of the current statement.  Keeps the last plan of each
 * "format", because planning costs more than executing.  Formats are compared
 * by address.  Nested statements are planned anew, so no plan in use is freed.
 */
static SPIPlanPtr
find_plan(const char *format, bool is_nested, int num_values, Oid *types)
{
	static struct
	{
		const char *format;
		char	   *text;
		SPIPlanPtr	plan;
	}			plans[16];
	SPIPlanPtr	plan;
	int			i = 0;

	if (is_nested)
		return SPI_prepare(current.text, num_values, types);
	while (i < (int) lengthof(plans) - 1 && plans[i].format != NULL &&
		   plans[i].format != format)
		i++;
	if (plans[i].format == format && strcmp(plans[i].text, current.text) == 0)
		return plans[i].plan;

	plan = SPI_prepare(current.text, num_values, types);
	if (plan == NULL)
		return NULL;
	if (plans[i].format != NULL)
	{
		plans[i].format = NULL;
		SPI_freeplan(plans[i].plan);
		pfree(plans[i].text);
	}
	plans[i].text = MemoryContextStrdup(TopMemoryContext, current.text);
	SPI_keepplan(plan);
	plans[i].plan = plan;
	plans[i].format = format;
	return plan;
}

/*
 * Run a statement on a table of the extension as the table's owner.  "%s"
 * stands for the table.  Returns the number of rows processed.  If the
 * statement returns a value, sets *result to the value.
 *
 * The statement may run triggers, rules and expressions of the owner, whom the
 * caller need not trust.  So it is a security-restricted operation, which can
 * neither change this session's locks nor leave deferred triggers.  Changed
 * settings are reset.  A fixed search path protects the owner from the caller.
 */
uint64
dlock_execute_as_owner(DlockSpace *space, const char *name,
					   const char *statement, int num_values, Oid *types,
					   Datum *values, int64 *result)
{
	OwnersStatement outer = current;
	Relation	table = dlock_open_relation(space, name, AccessShareLock);
	char	   *table_name =
		quote_qualified_identifier(get_namespace_name(RelationGetNamespace(table)),
								   RelationGetRelationName(table));
	Oid			user;
	int			context;
	int			settings;
	uint64		processed = 0;
	SPIPlanPtr	plan;

	dlock_check_permanent(table);
	/* after an error, PostgreSQL restores user and context */
	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(table->rd_rel->relowner,
						   context | SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_RESTRICTED_OPERATION |
						   SECURITY_NOFORCE_RLS);
	settings = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);
	PG_TRY();
	{
		current.text = psprintf(statement, table_name);
		current.table = RelationGetRelid(table);
		if (SPI_connect() != SPI_OK_CONNECT ||
			(plan = find_plan(statement, outer.text != NULL, num_values,
							  types)) == NULL ||
			SPI_execute_plan(plan, values, NULL, false, 0) < 0)
			elog(ERROR, "could not execute a statement on table \"%s\"", name);
		processed = SPI_processed;
		if (result && processed > 0)
			*result = DatumGetInt64(dlock_get_column(table,
													 SPI_tuptable->tupdesc,
													 SPI_tuptable->vals[0],
													 SPI_fname(SPI_tuptable->tupdesc, 1),
													 INT8OID));
		SPI_finish();
	}
	PG_FINALLY();
	{
		current = outer;
	}
	PG_END_TRY();
	AtEOXact_GUC(false, settings);
	SetUserIdAndSecContext(user, context);
	relation_close(table, AccessShareLock);
	return processed;
}
