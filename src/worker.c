/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The background worker of a space, which sends what sessions cannot.
 *
 * There is at most one per database.  Whoever has something for it wakes it,
 * and asks the postmaster to start one where there is none.  It ends when no
 * ticket is left that could be announced, so that it does not stand in the
 * way of DROP DATABASE; and it may die at any time, as the outbox is in shared
 * memory and the next worker goes on with it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "dlock.h"

#define IDLE_MS			1000	/* a worker without work stays that long */
#define RETRY_MS		100		/* after an error, and then twice as long */
#define MAX_RETRY_MS	2000
#define START_MS		1000	/* that long, a start is waited for */
#define LOCK_TIMEOUT_MS	"500"	/* for the lock that NOTIFY takes */

PGDLLEXPORT void dlock_worker_main(Datum arg);

static DlockSpace *my_space = NULL;

static uint64
now_ms(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (uint64) INSTR_TIME_GET_MILLISEC(now);
}

/*
 * Ask for a worker, unless somebody has just done so.  Where no slot is free,
 * the next one who wakes the worker asks again.
 */
static void
start(DlockSpace *space)
{
	BackgroundWorker worker = {0};
	uint64		now = now_ms();
	uint64		last = pg_atomic_read_u64(&space->worker_start);

	if ((last != 0 && now - last < START_MS) ||
		!pg_atomic_compare_exchange_u64(&space->worker_start, &last, now))
		return;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION | COMPAT_BGWORKER_INTERRUPTIBLE;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "dlock", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "dlock_worker_main",
			sizeof(worker.bgw_function_name));
	snprintf(worker.bgw_name, sizeof(worker.bgw_name),
			 "dlock worker for database %u", space->key.database);
	strlcpy(worker.bgw_type, "dlock worker", sizeof(worker.bgw_type));
	memcpy(worker.bgw_extra, &space->key, sizeof(DlockSpaceKey));
	(void) RegisterDynamicBackgroundWorker(&worker, NULL);
}

/*
 * There is something in the outbox.  Raises nothing, as exit callbacks call
 * this, too.
 */
void
dlock_worker_wake(DlockSpace *space)
{
	uint32		worker = pg_atomic_read_u32(&space->worker);

	if (worker != 0)
		SetLatch(&GetPGProcByNumber(worker - 1)->procLatch);
	else
		start(space);
}

/* Nothing is left that could have to be announced: the worker may go. */
void
dlock_worker_dismiss(DlockSpace *space)
{
	uint32		worker = pg_atomic_read_u32(&space->worker);

	if (worker != 0)
		SetLatch(&GetPGProcByNumber(worker - 1)->procLatch);
}

/*
 * Let the next worker come; and see to it that one does, if something was
 * posted while this one still seemed to be there.
 */
static void
resign(int code, Datum arg)
{
	uint32		me = compat_my_procno() + 1;

	if (!pg_atomic_compare_exchange_u32(&my_space->worker, &me, 0))
		return;
	pg_atomic_write_u64(&my_space->worker_start, 0);
	if (my_space->outbox.length > 0)
		start(my_space);
}

/*
 * Become the worker of a space; false where there is one already, or where
 * the extension is not there any more.
 */
static bool
take_office(const DlockSpaceKey *key)
{
	uint32		nobody = 0;

	StartTransactionCommand();
	dlock_session_attach();
	my_space = dlock_find_space(key);
	CommitTransactionCommand();

	if (my_space == NULL ||
		!pg_atomic_compare_exchange_u32(&my_space->worker, &nobody,
										compat_my_procno() + 1))
		return false;
	before_shmem_exit(resign, 0);
	return true;
}

/*
 * Send all that is in the outbox.  Returns false where that failed: the error
 * has been logged, and the outbox is as it was.
 */
static bool
send_all(void)
{
	MemoryContext context = CurrentMemoryContext;
	volatile bool sent = true;

	PG_TRY();
	{
		while (dlock_notify_send(my_space) > 0)
			CHECK_FOR_INTERRUPTS();
	}
	PG_CATCH();
	{
		HOLD_INTERRUPTS();
		EmitErrorReport();
		AbortCurrentTransaction();
		MemoryContextSwitchTo(context);
		FlushErrorState();
		RESUME_INTERRUPTS();
		sent = false;
	}
	PG_END_TRY();
	return sent;
}

void
dlock_worker_main(Datum arg)
{
	DlockSpaceKey key;
	uint64		idle_since = 0; /* 0: not idle */
	long		retry = RETRY_MS;

	memcpy(&key, MyBgworkerEntry->bgw_extra, sizeof(DlockSpaceKey));
	pqsignal(SIGTERM, die);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(key.database, InvalidOid, 0);

	/* whoever sits on the lock of NOTIFY delays announcements, and no more */
	SetConfigOption("lock_timeout", LOCK_TIMEOUT_MS, PGC_SUSET, PGC_S_SESSION);
	if (!take_office(&key))
		return;

	for (;;)
	{
		long		timeout = -1;
		bool		sent;

		/* before the outbox is looked at, so that no wakeup is missed */
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}

		pgstat_report_activity(STATE_RUNNING, NULL);
		sent = send_all();
		pgstat_report_activity(STATE_IDLE, NULL);

		if (!sent)
		{
			timeout = retry;
			retry = Min(retry * 2, MAX_RETRY_MS);
		}
		else
			retry = RETRY_MS;
		if (pg_atomic_read_u32(&my_space->announced) > 0)
			idle_since = 0;
		else if (idle_since == 0)
			idle_since = now_ms();
		else if (now_ms() - idle_since >= IDLE_MS)
			return;
		if (idle_since != 0 && sent)
			timeout = IDLE_MS;
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH |
						 (timeout >= 0 ? WL_TIMEOUT : 0),
						 timeout, PG_WAIT_EXTENSION);
	}
}
