/*-------------------------------------------------------------------------
 *
 * module.c
 *	  Settings and hooks of the module.
 *
 * A session loads the library at its first call, so the hooks concern only
 * sessions that can hold a lock.  Preloading is possible, but not needed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "nodes/parsenodes.h"
#include "parser/analyze.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/guc.h"

#include "backend/backend.h"
#include "tables/tables.h"
#include "worker/worker.h"

COMPAT_MODULE_MAGIC("dlock", DLOCK_VERSION);

/* from 16 on, fmgr.h declares it */
extern PGDLLEXPORT void _PG_init(void);

static const struct config_enum_entry session_locks_options[] = {
	{"allow", DLOCK_SESSION_LOCKS_ALLOW, false},
	{"warn", DLOCK_SESSION_LOCKS_WARN, false},
	{"error", DLOCK_SESSION_LOCKS_ERROR, false},
	{NULL, 0, false}
};

static ProcessUtility_hook_type previous_process_utility = NULL;
static ExecutorRun_hook_type previous_executor_run = NULL;
static post_parse_analyze_hook_type previous_post_parse_analyze = NULL;

/*
 * If the transaction has lost a guarded lock, all statements except those of
 * transaction control fail.  Do not read "pstmt" after its execution: in a
 * procedure that the extended protocol has called, a ROLLBACK frees "pstmt".
 */
static void
process_utility(PlannedStmt *pstmt, const char *queryString,
				bool readOnlyTree, ProcessUtilityContext context,
				ParamListInfo params, QueryEnvironment *queryEnv,
				DestReceiver *dest, QueryCompletion *qc)
{
	Node	   *statement = pstmt->utilityStmt;
	bool		discards_all = IsA(statement, DiscardStmt) &&
		castNode(DiscardStmt, statement)->target == DISCARD_ALL;

	dlock_lone_call = InvalidOid;
	dlock_cancel_check(!IsA(statement, TransactionStmt));
	(previous_process_utility ? previous_process_utility :
	 standard_ProcessUtility) (pstmt, queryString, readOnlyTree, context,
							   params, queryEnv, dest, qc);
	/* connection pools send DISCARD ALL between two clients */
	if (discards_all)
	{
		(void) dlock_session_release_all();
		dlock_lease_detach_all();
		dlock_notify_forget();
	}
}

static void
executor_run(COMPAT_EXECUTOR_RUN_PARAMETERS)
{
	DlockStatement outer;

	dlock_lone_call = InvalidOid;
	dlock_cancel_check(true);
	dlock_xact_begin_statement(&outer, queryDesc->estate->es_query_cxt);
	PG_TRY();
	{
		(previous_executor_run ? previous_executor_run :
		 standard_ExecutorRun) (COMPAT_EXECUTOR_RUN_ARGUMENTS);
	}
	PG_CATCH();
	{
		dlock_xact_fail_statement(&outer,
								  geterrcode() == ERRCODE_QUERY_CANCELED);
		PG_RE_THROW();
	}
	PG_END_TRY();
	dlock_xact_end_statement(&outer);
}

static void
post_parse_analyze(ParseState *pstate, Query *query,
				   COMPAT_JUMBLE_STATE *jstate)
{
	dlock_owner_check_parsed(pstate->p_sourcetext, query->rtable);
	if (previous_post_parse_analyze)
		previous_post_parse_analyze(pstate, query, jstate);
}

static void
set_hooks(void)
{
	previous_process_utility = ProcessUtility_hook;
	ProcessUtility_hook = process_utility;
	previous_executor_run = ExecutorRun_hook;
	ExecutorRun_hook = executor_run;
	previous_post_parse_analyze = post_parse_analyze_hook;
	post_parse_analyze_hook = post_parse_analyze;
}

static bool
is_defined(const char *setting)
{
	return GetConfigOption(setting, true, false) != NULL &&
		(GetConfigOptionFlags(setting, true) & GUC_CUSTOM_PLACEHOLDER) == 0;
}

/* Define a setting, unless an earlier load has defined it. */
#define DEFINE(type, setting, ...) \
do { \
	if (!(resumed && is_defined(setting))) \
		DefineCustom##type##Variable(setting, __VA_ARGS__); \
} while (0)

/*
 * If a setting has values already, PostgreSQL assigns them when the setting is
 * defined, and may read from the catalog whether the role may set it.  An error
 * there, such as a cancel, loses these values, and ends the load.  The next
 * call loads again.  The process still has the settings and our variables, and
 * no setting can be defined twice.
 */
void
_PG_init(void)
{
	static bool begun = false;
	bool		resumed = begun;

	begun = true;
	DEFINE(Int, "dlock.max_memory",
		   "Sets the size of the memory that the locks of all sessions are in.",
		   "Locks and tickets may have three quarters of it. A new value takes effect when the server starts.",
		   &dlock_max_memory,
		   64 * 1024, DLOCK_MIN_AREA_KB, DLOCK_MAX_AREA_KB,
		   PGC_SIGHUP, GUC_UNIT_KB,
		   NULL, NULL, NULL);
	DEFINE(Int, "dlock.max_memory_per_role",
		   "Sets the memory that the locks of one role may take, in percent of what all locks may take.",
		   "It counts in all databases together, and not for superusers.",
		   &dlock_max_memory_per_role,
		   50, 1, 100,
		   PGC_SUSET, 0,
		   NULL, NULL, NULL);
	DEFINE(Int, "dlock.max_locks_per_session",
		   "Sets how many locks a session may hold and wait for.",
		   NULL,
		   &dlock_max_locks_per_session,
		   100000, 1, INT_MAX,
		   PGC_SUSET, 0,
		   NULL, NULL, NULL);
	DEFINE(Int, "dlock.max_ttl",
		   "Sets the longest time that a lease may live without being renewed.",
		   "It bounds the delay of a lease, too.",
		   &dlock_max_ttl,
		   24 * 60 * 60, 1, INT_MAX,
		   PGC_SUSET, GUC_UNIT_S,
		   NULL, NULL, NULL);
	DEFINE(Int, "dlock.worker_idle_timeout",
		   "Sets how long a background worker stays when there is nothing for it to do.",
		   "It starts again when it is needed. Leases hold their locks without it.",
		   &dlock_worker_idle_timeout,
		   2000, 0, INT_MAX,
		   PGC_SIGHUP, GUC_UNIT_MS,
		   NULL, NULL, NULL);
	DEFINE(Bool, "dlock.log_expirations",
		   "Logs each lease that runs out.",
		   NULL,
		   &dlock_log_expirations,
		   true,
		   PGC_SIGHUP, 0,
		   NULL, NULL, NULL);
	DEFINE(Enum, "dlock.session_locks",
		   "Sets whether session-scoped locks are allowed.",
		   "Behind a transaction pooler they outlive their client.",
		   &dlock_session_locks,
		   DLOCK_SESSION_LOCKS_ALLOW, session_locks_options,
		   PGC_SUSET, 0,
		   NULL, NULL, NULL);
	DEFINE(Bool, "dlock.cancel_lost_guards",
		   "Cancels a guarded transaction that has lost its lock.",
		   "Otherwise it goes on, and its commit fails.",
		   &dlock_cancel_lost_guards,
		   true,
		   PGC_USERSET, 0,
		   NULL, NULL, NULL);
	MarkGUCPrefixReserved("dlock");
	set_hooks();
}

/* The library's version, which may differ from the extension's */
PG_FUNCTION_INFO_V1(dlock_version);
Datum
dlock_version(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text(DLOCK_VERSION));
}
