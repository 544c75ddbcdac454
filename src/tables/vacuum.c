/*-------------------------------------------------------------------------
 *
 * vacuum.c
 *	  Vacuuming the tables of leases.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xact.h"
#include "commands/extension.h"
#include "commands/vacuum.h"
#include "nodes/makefuncs.h"
#include "storage/bufmgr.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "tables/shape.h"

/* Dead rows per page that are worth a vacuum */
#define VACUUM_ROWS_PER_PAGE	20

/*
 * Vacuum the tables, so that they stay small between runs of autovacuum.
 * Calls begin() before each table.  Returns how many dead rows are worth the
 * next run.  A large table, which an old snapshot may keep large, needs more.
 */
int
dlock_rows_vacuum(DlockSpace *space, void (*begin) (void))
{
	int			threshold = DLOCK_VACUUM_ROWS;

	for (int i = 0; i < DLOCK_NUM_TABLES; i++)
	{
		VacuumStmt *statement;
		Relation	table;
		Oid			id;

		begin();
		StartTransactionCommand();
		if (get_extension_oid("dlock", true) != space->key.extension)
		{
			CommitTransactionCommand();
			break;
		}
		table = dlock_open_relation(space, dlock_shapes[i].name,
									AccessShareLock);
		id = RelationGetRelid(table);
		threshold = Max(threshold, (int) RelationGetNumberOfBlocks(table) *
						VACUUM_ROWS_PER_PAGE);
		relation_close(table, AccessShareLock);
		/* VACUUM needs "statement" after it has committed the transaction */
		MemoryContextSwitchTo(TopMemoryContext);
		statement = makeNode(VacuumStmt);
		statement->is_vacuumcmd = true;
		statement->rels = list_make1(makeVacuumRelation(NULL, id, NIL));
		/* not parallel: workers would use settings of the role and database */
		statement->options =
			list_make3(makeDefElem("skip_locked", NULL, -1),
					   makeDefElem("truncate", (Node *) makeString("off"), -1),
					   makeDefElem("parallel", (Node *) makeInteger(0), -1));
		ExecVacuum(make_parsestate(NULL), statement, true);
		CommitTransactionCommand();
	}
	return threshold;
}
