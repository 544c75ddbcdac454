/*-------------------------------------------------------------------------
 *
 * lone_call.c
 *	  Warns if a transaction only set a guard or took a lock for itself.
 *
 * If the transaction does nothing else, the guard protects no write, and the
 * transaction's lock is released at once.  A function cannot know that no
 * statement will follow in its transaction: even outside a transaction block,
 * a client can send several statements in a pipeline.  So dlock notes a call
 * that is alone in its statement, forgets the call at any other statement, and
 * warns at the commit if the call is still noted.
 *
 * If in doubt, dlock does not warn.  It never notes a call of a try function,
 * because the result of such a call is useful by itself.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_proc.h"
#include "executor/execdesc.h"
#include "nodes/nodeFuncs.h"
#include "tcop/pquery.h"
#include "utils/lsyscache.h"
#include "utils/portal.h"

#include "backend/inner.h"

/* The function whose call is all that the transaction has executed, or 0 */
Oid			dlock_lone_call = InvalidOid;

static bool
is_other(Oid function, void *own)
{
	return function != *(Oid *) own &&
		func_volatile(function) != PROVOLATILE_IMMUTABLE;
}

static bool
calls_others(Node *node, void *own)
{
	return node != NULL &&
		(check_functions_in_node(node, is_other, own) ||
		 expression_tree_walker(node, calls_others, own));
}

/* Is the statement SELECT function(...) or SELECT ... FROM function(...)? */
static bool
calls_only(const PlannedStmt *statement, Oid function)
{
	Plan	   *plan = statement->planTree;
	Node	   *source = NULL;

	if (IsA(plan, FunctionScan))
		source = (Node *) castNode(FunctionScan, plan)->functions;
	else if (!IsA(plan, Result) || castNode(Result, plan)->resconstantqual)
		return false;
	return plan->lefttree == NULL && plan->qual == NIL &&
		statement->subplans == NIL && !calls_others(source, &function) &&
		!calls_others((Node *) plan->targetlist, &function);
}

/*
 * Outside a transaction block, note a call if the client's own statement is
 * only that call.
 */
void
dlock_lone_call_note(const FmgrInfo *function)
{
	const QueryDesc *query = ActivePortal ? ActivePortal->queryDesc : NULL;

	/* statements within a function have another receiver or context */
	if (query && !IsTransactionBlock() &&
		(MyXactFlags & XACT_FLAGS_PIPELINING) == 0 &&
		(query->dest->mydest == DestRemote ||
		 query->dest->mydest == DestRemoteExecute) &&
		query->estate->es_query_cxt == function->fn_mcxt &&
		calls_only(query->plannedstmt, function->fn_oid))
		dlock_lone_call = function->fn_oid;
}

/* Forget the noted call.  Before a commit, warn about the call. */
void
dlock_lone_call_end(bool is_commit)
{
	const char *name = is_commit && OidIsValid(dlock_lone_call) ?
		get_func_name(dlock_lone_call) : NULL;

	dlock_lone_call = InvalidOid;
	if (name)
		ereport(WARNING,
				(errcode(ERRCODE_NO_ACTIVE_SQL_TRANSACTION),
				 errmsg("%s() has no effect outside a transaction block", name),
				 errhint("Call it between BEGIN and COMMIT, before the work that it protects.")));
}
