/*-------------------------------------------------------------------------
 *
 * process.c
 *	  The common part of dlock's background processes: start, settings, and
 *	  tasks that can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"	/* in 19, get_database_name() */
#include "utils/memutils.h"
#include "utils/pidfile.h"
#include "utils/syscache.h"
#include "utils/timeout.h"
#include "utils/wait_event.h"

#include "shared/shared.h"
#include "worker/process.h"

#define RETRY_MS		100		/* first pause after an error; then doubled */
#define MAX_RETRY_MS	2000	/* longest pause after an error, by default */
#define LOCKED_RETRY_MS	5		/* after a lock timeout, if patience_ms > 0 */
#define LOG_EVERY		60		/* at least each 60th error in a row is
								 * logged */
#define FORGET_MS		10000	/* a later error is the first of a row */
#define OWNER_PATIENCE_MS	1000

/* Set the settings that ALTER DATABASE and ALTER ROLE must not change. */
static void
pin_settings(void)
{
	static const char *const settings[][2] = {
		/* identity */
		{"role", "none"},
		{"search_path", "pg_catalog, pg_temp"},
		{"session_replication_role", "origin"},
		{"row_security", "off"},
		/* transactions; no waits for standbys */
		{"synchronous_commit", "off"},
		{"commit_delay", "0"},
		{"default_transaction_read_only", "off"},
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_deferrable", "off"},
		/* timeouts */
		{"lock_timeout", DLOCK_LOCK_TIMEOUT},
		{"statement_timeout", "0"},
		{"transaction_timeout", "0"},	/* since 17 */
		{"idle_in_transaction_session_timeout", "0"},
		{"idle_session_timeout", "0"},
		/* an error must not end the process */
		{"exit_on_error", "off"},
		{"temp_file_limit", "-1"},
		/* VACUUM must be quick, and not aggressive */
		{"vacuum_cost_delay", "0"},
		{"vacuum_freeze_min_age", "50000000"},
		{"vacuum_freeze_table_age", "150000000"},
		{"vacuum_multixact_freeze_min_age", "5000000"},
		{"vacuum_multixact_freeze_table_age", "150000000"}
	};

	/* looking up a role needs a transaction */
	StartTransactionCommand();
	SetConfigOption("session_authorization",
					GetUserNameFromId(BOOTSTRAP_SUPERUSERID, false),
					PGC_USERSET, PGC_S_SESSION);
	for (int i = 0; i < (int) lengthof(settings); i++)
	{
		if (GetConfigOption(settings[i][0], true, false) != NULL)
			SetConfigOption(settings[i][0], settings[i][1], PGC_SUSET,
							PGC_S_SESSION);
	}
	CommitTransactionCommand();
}

/* Our database, which cannot be renamed while we are connected */
static NameData database_name;

/* Leave the shared state, as the last step of the exit. */
static void
leave_shared_state(void)
{
	if (dlock_my_backend)
		dlock_record_end_uses(0);
	dlock_detach();
	/* PostgreSQL ends a session's locks only at an error in a transaction */
	LockReleaseAll(DEFAULT_LOCKMETHOD, true);
}

/* dlock_database_changes() before the latest look-up of the owner */
static uint64 owner_known_at;

/* Show the owner as our role, so that its DROP DATABASE (FORCE) may end us. */
static void
belong_to_owner(void)
{
	uint64		changes = dlock_database_changes();
	HeapTuple	tuple = SearchSysCache1(DATABASEOID,
										ObjectIdGetDatum(MyDatabaseId));

	if (HeapTupleIsValid(tuple))
	{
		MyProc->roleId = ((Form_pg_database) GETSTRUCT(tuple))->datdba;
		ReleaseSysCache(tuple);
	}
	owner_known_at = changes;
}

static bool
look_for_owner(void)
{
	StartTransactionCommand();
	belong_to_owner();
	CommitTransactionCommand();
	return false;
}

static DlockTask owner_task = {
	.what = "looking for the database's owner",
	.perform = look_for_owner,
	.patience_ms = OWNER_PATIENCE_MS
};

static volatile sig_atomic_t cancel_requested = false;

/*
 * SIGINT handler: ignore a cancel, because the work would only be repeated.
 * But if lock_timeout sent the signal, raise the error of the timeout.
 */
static void
handle_cancel(SIGNAL_ARGS)
{
	int			save_errno = errno;

	if (!get_timeout_indicator(LOCK_TIMEOUT, false))
		cancel_requested = true;
	else if (!proc_exit_inprogress)
		InterruptPending = QueryCancelPending = true;
	SetLatch(MyLatch);
	errno = save_errno;
}

static void
log_cancel(void)
{
	cancel_requested = false;
	ereport(LOG,
			(errmsg("%s in database \"%s\" ignores a request to cancel",
					MyBgworkerEntry->bgw_type, NameStr(database_name)),
			 errhint("pg_terminate_backend() ends it; another one is started when there is work.")));
}

/* Begin a process.  Returns NULL if the office is taken or the space gone. */
DlockSpace *
dlock_process_begin(DlockOffice office, pqsigfunc terminate)
{
	DlockSpaceKey key;
	DlockSpace *space;

	memcpy(&key, MyBgworkerEntry->bgw_extra, sizeof(DlockSpaceKey));
	pqsignal(SIGTERM, terminate);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	/* a VACUUM may be canceled, because another VACUUM will follow */
	if (office != DLOCK_VACUUM)
		pqsignal(SIGINT, handle_cancel);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(key.database, InvalidOid,
											  BGWORKER_BYPASS_ALLOWCONN);
	pin_settings();

	/* before this process takes anything that the callback must release */
	dlock_leave_at_exit(leave_shared_state);
	StartTransactionCommand();
	belong_to_owner();
	namestrcpy(&database_name, get_database_name(MyDatabaseId));
	dlock_attach(true);
	space = dlock_find_space(&key);
	CommitTransactionCommand();
	MemoryContextSwitchTo(TopMemoryContext);
	return space && dlock_office_take(space, office) ? space : NULL;
}

/* Call this at the start of each round of work. */
void
dlock_process_signals(void)
{
	CHECK_FOR_INTERRUPTS();
	if (cancel_requested)
		log_cancel();
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
	AcceptInvalidationMessages();
	if (owner_known_at != dlock_database_changes())
		(void) dlock_task_perform(&owner_task);
}

/* Does a library of another layout wait for background processes to end? */
bool
dlock_process_gives_way(void)
{
	if (!dlock_is_replaced())
		return false;
	ereport(LOG,
			(errmsg("%s gives way to another version of dlock",
					MyBgworkerEntry->bgw_type),
			 errdetail("Leases are read again from their tables, by the first call.")));
	return true;
}

/*
 * Has a process locked the database, to drop, rename or copy it, while no
 * session is left?  Then that process waits only for background processes.
 */
bool
dlock_process_is_in_the_way(void)
{
	LOCKTAG		tag;
	int			holders;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	/* unlike LockAcquire(), this works while the lock table is full */
	pfree(GetLockConflicts(&tag, RowExclusiveLock, &holders));
	return holders > 0 && CountDBConnections(MyDatabaseId) == 0;
}

/* Is a shutdown under way?  postmaster.pid says so before signals are sent. */
bool
dlock_process_server_stops(void)
{
	FILE	   *file = AllocateFile("postmaster.pid", "r");
	char		line[MAXPGPATH];
	int			n = 0;

	if (file == NULL)
		return false;
	while (n < LOCK_FILE_LINE_PM_STATUS && fgets(line, sizeof(line), file))
		n++;
	FreeFile(file);
	return n == LOCK_FILE_LINE_PM_STATUS &&
		strncmp(line, PM_STATUS_STOPPING, strlen(PM_STATUS_STOPPING)) == 0;
}

/* Set lock_timeout; "0" means no timeout. */
void
dlock_process_lock_timeout(const char *timeout)
{
	SetConfigOption("lock_timeout", timeout, PGC_SUSET, PGC_S_SESSION);
}

/* Was the error a lock timeout, or a deadlock? */
bool
dlock_error_is_lock(int code)
{
	return code == ERRCODE_LOCK_NOT_AVAILABLE ||
		code == ERRCODE_T_R_DEADLOCK_DETECTED;
}

/* Is a lock timeout to be reported?  At most one in patience_ms is. */
static bool
is_out_of_patience(DlockTask *task)
{
	uint64		now = dlock_monotonic_now();
	uint64		patience = (uint64) task->patience_ms * 1000;

	if (task->patience_ends == 0)
		task->patience_ends = now + patience;
	if (now < task->patience_ends)
		return false;
	task->patience_ends = now + patience;
	return true;
}

/* Count a report.  Is it the 1st, 3rd, 7th, ... in a row, or a LOG_EVERYth? */
static bool
is_to_be_logged(DlockTask *task, int code)
{
	uint64		now = dlock_monotonic_now();
	bool		again = task->code == code &&
		now < task->told_at + FORGET_MS * 1000;

	task->told = again ? task->told + 1 : 1;
	task->code = code;
	task->told_at = now;
	return (task->told & (task->told + 1)) == 0 || task->told % LOG_EVERY == 0;
}

/* Clean up after an error in a task.  Returns the time of the next attempt. */
static uint64
recover(DlockTask *task)
{
	ErrorData  *error;
	bool		is_lock;
	bool		is_told;
	long		pause = LOCKED_RETRY_MS;

	HOLD_INTERRUPTS();
	/* outside a transaction, AbortCurrentTransaction() does not do this */
	LWLockReleaseAll();
	MemoryContextSwitchTo(TopMemoryContext);
	error = CopyErrorData();
	is_lock = dlock_error_is_lock(error->sqlerrcode);
	is_told = !is_lock || is_out_of_patience(task);
	if (!is_lock || task->patience_ms == 0)
	{
		pause = task->retry_ms > 0 ? task->retry_ms : RETRY_MS;
		task->retry_ms = Min(pause * 2, task->max_retry_ms > 0 ?
							 task->max_retry_ms : MAX_RETRY_MS);
	}
	if (!is_lock)
		task->patience_ends = 0;
	if (is_told && is_to_be_logged(task, error->sqlerrcode) &&
		!(is_lock && task->tell_of_lock &&
		  task->tell_of_lock(NameStr(database_name))))
		EmitErrorReport();
	if (is_told && task->failed)
		task->failed(error->sqlerrcode);
	AbortCurrentTransaction();
	FlushErrorState();
	RESUME_INTERRUPTS();
	FreeErrorData(error);
	return dlock_monotonic_now() + pause * 1000;
}

/* Error context of dlock_task_perform() */
static void
tell_of_task(void *arg)
{
	errcontext("%s, in database \"%s\"", ((const DlockTask *) arg)->what,
			   NameStr(database_name));
}

/* Perform a task, or log its error.  Returns the time of the next call. */
uint64
dlock_task_perform(DlockTask *task)
{
	volatile bool more = false;
	volatile bool failed = false;
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = tell_of_task,
		.arg = task
	};

	if (dlock_monotonic_now() < task->next_try)
		return task->next_try;
	PG_TRY();
	{
		error_context_stack = &context;
		more = task->perform();
		error_context_stack = context.previous;
	}
	PG_CATCH();
	{
		task->next_try = recover(task);
		failed = true;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(TopMemoryContext);
	/* if lock_timeout fired after the wait for the lock, ignore the timeout */
	if (get_timeout_indicator(LOCK_TIMEOUT, true))
		QueryCancelPending = false;
	if (failed)
		return task->next_try;
	task->next_try = 0;
	task->retry_ms = 0;
	task->patience_ends = 0;
	return more ? 0 : DLOCK_NO_DEADLINE;
}

/* Sleep until the time "until", or until this process is woken. */
void
dlock_process_sleep(uint64 until)
{
	uint64		now = dlock_monotonic_now();
	long		timeout = until <= now ? 0 :
		(long) Min((until - now + 999) / 1000, PG_INT32_MAX);

	(void) WaitLatch(MyLatch,
					 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
					 timeout, PG_WAIT_EXTENSION);
	/* reset the latch before any look for work, so that no wakeup is missed */
	ResetLatch(MyLatch);
}
