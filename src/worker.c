/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The background worker: writes what leases change, ends them when they
 *	  are due, and sends announcements.
 *
 * There is at most one per database.  Whoever has something for it wakes it,
 * and asks the postmaster to start one where there is none.  It ends when no
 * lease is left and no ticket that could be announced, so that it does not
 * stand in the way of DROP DATABASE.  It may die at any time: all that it
 * works on is in shared memory, and the next worker goes on with it.
 *
 * Its own memory has, besides, when to look at each lease again.  A lease can
 * only be due later than that, as renewals are not told to the worker.
 *
 * The worker waits for nobody: not for standbys, whose answers it looks at,
 * and for a lock only so long.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "access/xact.h"
#include "access/xlog.h"
#include "lib/pairingheap.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "dlock.h"

#define IDLE_MS			1000	/* a worker without work stays that long */
#define RETRY_MS		100		/* after an error, and then twice as long */
#define MAX_RETRY_MS	2000
#define START_MS		1000	/* that long, a start is waited for */
#define LOCK_TIMEOUT_MS	"1000"	/* for a lock on the tables */
#define NOTIFY_TIMEOUT_MS "20"	/* for the lock that NOTIFY takes */
#define POLL_MS			10		/* standbys owe an answer */
#define LEAVE_MS		1000	/* a worker that is told to go writes that long */
#define LOOK_MS			2000	/* between looks whether the extension is there */

/* The moment when nothing is due, in monotonic microseconds */
#define NEVER			((uint64) PG_INT64_MAX)

PGDLLEXPORT void dlock_worker_main(Datum arg);

/* When a lease is to be looked at again */
typedef struct Watch
{
	dsa_pointer key;			/* the lease; hash key, must be first */
	DlockLease *lease;			/* referred to */
	uint64		due;			/* monotonic microseconds */
	pairingheap_node node;
} Watch;

/* A grant to be announced as soon as it is durable */
typedef struct Grant
{
	DlockLeaseTicket *ticket;	/* referred to */
	XLogRecPtr	lsn;
} Grant;

static DlockSpace *my_space = NULL;
static bool extension_is_gone = false;
static bool gives_way = false;	/* to a library of another layout */

static HTAB *watches = NULL;
static pairingheap *watches_by_due = NULL;

static List *grants = NIL;		/* of Grant */

/* What can fail, and is tried again */
typedef struct Task
{
	bool		(*perform) (void);	/* returns whether there is more to do */
	uint64		next_try;		/* monotonic microseconds; 0: at once */
	long		retry_ms;
} Task;

/*
 * Ask for a worker, unless somebody has just done so.  False where no slot is
 * free; the next one who wakes the worker asks again.
 */
static bool
start(DlockSpace *space)
{
	BackgroundWorker worker = {0};
	uint64		now = dlock_monotonic_now();
	uint64		last = pg_atomic_read_u64(&space->worker_start);

	if ((last != 0 && now - last < START_MS * 1000) ||
		!pg_atomic_compare_exchange_u64(&space->worker_start, &last, now))
		return true;

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
	if (RegisterDynamicBackgroundWorker(&worker, NULL))
		return true;
	pg_atomic_write_u64(&space->worker_start, 0);
	return false;
}

/* Wake the worker; false where there is none. */
static bool
wake(DlockSpace *space)
{
	uint32		worker = pg_atomic_read_u32(&space->worker);

	if (worker != 0)
		SetLatch(&GetPGProcByNumber(worker - 1)->procLatch);
	return worker != 0;
}

/*
 * There is something to do.  False where no worker is there and none can be
 * started.  Raises nothing, as exit callbacks call this, too.
 */
bool
dlock_worker_wake(DlockSpace *space)
{
	return wake(space) || start(space);
}

/* Nothing is left that could have to be announced: the worker may go. */
void
dlock_worker_dismiss(DlockSpace *space)
{
	(void) wake(space);
}

/* Is there something that a worker has to be there for? */
bool
dlock_worker_is_needed(DlockSpace *space)
{
	return space->leases.length > 0 || space->journal.length > 0 ||
		space->outbox.length > 0;
}

/* What the worker refers to is not to be kept by one that is gone. */
static void
let_go(void)
{
	HASH_SEQ_STATUS status;
	Watch	   *watch;
	ListCell   *cell;

	dlock_journal_let_go();
	foreach(cell, grants)
		dlock_record_unref(&((Grant *) lfirst(cell))->ticket->record);
	grants = NIL;
	if (watches == NULL)
		return;
	hash_seq_init(&status, watches);
	while ((watch = hash_seq_search(&status)) != NULL)
		dlock_record_unref(&watch->lease->record);
	watches = NULL;
}

/*
 * Let the next worker come; and see to it that one does, if something is to
 * be done, or was posted while this one still seemed to be there.
 */
static void
resign(int code, Datum arg)
{
	uint32		me = compat_my_procno() + 1;

	/* what it may have held as it failed */
	LWLockReleaseAll();
	let_go();
	if (!pg_atomic_compare_exchange_u32(&my_space->worker, &me, 0))
		return;
	pg_atomic_write_u64(&my_space->worker_start, 0);
	if (!extension_is_gone && !gives_way && dlock_worker_is_needed(my_space))
		(void) start(my_space);
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
	dlock_count_as_worker();
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
 * Watching leases
 */

static int
compare_due(const pairingheap_node *a, const pairingheap_node *b, void *arg)
{
	uint64		due_a = pairingheap_const_container(Watch, node, a)->due;
	uint64		due_b = pairingheap_const_container(Watch, node, b)->due;

	/* the first is the one that compares as the greatest */
	return due_a < due_b ? 1 : due_a > due_b ? -1 : 0;
}

static void
watch(DlockLease *lease)
{
	uint64		now;
	uint64		due;
	bool		found;
	Watch	   *watch = hash_search(watches, &lease->record.link.self,
									HASH_ENTER, &found);

	if (found)
		return;
	dlock_record_ref(&lease->record);
	watch->lease = lease;
	now = dlock_monotonic_now();
	due = dlock_lease_deadline(lease);
	watch->due = due == DLOCK_NO_DEADLINE ? now + lease->ttl : due;
	pairingheap_add(watches_by_due, &watch->node);
	dlock_heartbeat_watch(lease);
}

/* A lease is gone. */
void
dlock_worker_unwatch(DlockLease *lease)
{
	Watch	   *watch = watches == NULL ? NULL :
		hash_search(watches, &lease->record.link.self, HASH_FIND, NULL);

	if (watch == NULL)
		return;
	pairingheap_remove(watches_by_due, &watch->node);
	dlock_heartbeat_unwatch(lease);
	(void) hash_search(watches, &lease->record.link.self, HASH_REMOVE, NULL);
	dlock_record_unref(&lease->record);
}

/* When the next lease is due */
static uint64
next_due(void)
{
	return pairingheap_is_empty(watches_by_due) ? NEVER :
		pairingheap_container(Watch, node,
							  pairingheap_first(watches_by_due))->due;
}

/* End the leases that are due. */
static void
expire(void)
{
	while (next_due() <= dlock_monotonic_now())
	{
		Watch	   *first = pairingheap_container(Watch, node,
												  pairingheap_first(watches_by_due));
		uint64		due = dlock_lease_expire(first->lease);

		if (due == 0)
			dlock_worker_unwatch(first->lease);
		else
		{
			pairingheap_remove(watches_by_due, &first->node);
			first->due = due;
			pairingheap_add(watches_by_due, &first->node);
		}
	}
}

/*
 * Announcing grants
 */

static void
remember_grant(DlockLeaseTicket *ticket, XLogRecPtr lsn)
{
	MemoryContext old_context;
	Grant	   *grant;

	if (ticket->announced || !DsaPointerIsValid(ticket->ticket.announcement) ||
		pg_atomic_read_u32(&ticket->ticket.state) != DLOCK_GRANTED)
		return;
	old_context = MemoryContextSwitchTo(TopMemoryContext);
	grant = palloc(sizeof(Grant));
	grant->ticket = ticket;
	grant->lsn = lsn;
	grants = lappend(grants, grant);
	MemoryContextSwitchTo(old_context);
	dlock_record_ref(&ticket->record);
}

/*
 * Let those grants be announced that are durable at their enqueuer's level.
 * Returns whether some have still to wait for standbys.
 */
static bool
announce_grants(void)
{
	ListCell   *cell;

	foreach(cell, grants)
	{
		Grant	   *grant = lfirst(cell);
		DlockLeaseTicket *ticket = grant->ticket;

		if (ticket->durability != SYNCHRONOUS_COMMIT_OFF)
			XLogFlush(grant->lsn);
		if (!dlock_journal_is_acknowledged(grant->lsn, ticket->durability))
			continue;
		dlock_lease_ticket_announce(ticket);
		dlock_record_unref(&ticket->record);
		pfree(grant);
		grants = foreach_delete_current(grants, cell);
	}
	return grants != NIL;
}

/*
 * Learning of leases and grants
 */

/* A record was written, or was found written by the worker before. */
static void
at_write(DlockRecord *record, bool over, XLogRecPtr lsn)
{
	DlockLeaseTicket *ticket;
	DlockLease *lease;

	if (over)
		return;
	if (record->is_lease)
	{
		watch((DlockLease *) record);
		return;
	}
	ticket = dlock_record_ticket(record);
	lease = dlock_lease_of(ticket);
	if (lease->single)
		watch(lease);
	remember_grant(ticket, lsn);
}

static void
find_ticket(DlockLeaseTicket *ticket, void *arg)
{
	if (ticket->record.has_row && !ticket->record.listed)
		remember_grant(ticket, pg_atomic_read_u64(&ticket->record.lsn));
}

static bool
find_lease(DlockLease *lease, void *arg)
{
	watch(lease);
	dlock_lease_for_each_ticket(lease, find_ticket, NULL);
	return true;
}

/*
 * Tasks that can fail
 */

static bool begun = false;
static bool knows_all = false;
static volatile sig_atomic_t leaving = false;
static int	dead_rows = 0;

/* When to look whether the extension is there, if nothing is written */
static uint64 next_look = 0;

/*
 * What was released before a shutdown is released after it: so a worker that
 * is told to go writes the journal first.  One that is told so again does not.
 */
static void
leave(SIGNAL_ARGS)
{
	int			save_errno = errno;

	leaving = true;
	pqsignal(SIGTERM, die);
	SetLatch(MyLatch);
	errno = save_errno;
}

/*
 * All that a worker learns from the one before, and what it clears up.
 */
static bool
begin_work(void)
{
	StartTransactionCommand();
	if (pg_atomic_read_u32(&my_space->loaded) == 0)
		dlock_load(my_space);
	CommitTransactionCommand();
	extension_is_gone = !dlock_journal_begin(my_space);
	begun = !extension_is_gone;
	if (begun)
		pqsignal(SIGTERM, leave);
	return false;
}

/*
 * Learn of all the leases and grants that there are.  In a transaction: before
 * 16, an error while a segment of memory is mapped leaves something behind
 * otherwise.
 */
static bool
learn(void)
{
	StartTransactionCommand();
	MemoryContextSwitchTo(TopMemoryContext);
	dlock_lease_for_each(my_space, find_lease, NULL);
	CommitTransactionCommand();
	knows_all = true;
	return false;
}

static bool
write_journal(void)
{
	if (my_space->journal.length == 0 && dlock_monotonic_now() < next_look)
		return false;
	next_look = dlock_monotonic_now() + LOOK_MS * 1000;
	/* an error can come between writing something and learning of it */
	knows_all = false;
	extension_is_gone =
		dlock_journal_write(my_space, &dead_rows, at_write) < 0;
	knows_all = true;
	return !extension_is_gone && my_space->journal.length > 0;
}

static bool
send_announcements(void)
{
	bool		more;

	/* whoever sits on the lock of NOTIFY delays announcements, and no more */
	SetConfigOption("lock_timeout", NOTIFY_TIMEOUT_MS, PGC_SUSET, PGC_S_SESSION);
	more = dlock_notify_send(my_space) > 0;
	SetConfigOption("lock_timeout", LOCK_TIMEOUT_MS, PGC_SUSET, PGC_S_SESSION);
	return more;
}

static bool
vacuum_tables(void)
{
	dlock_rows_vacuum(my_space, &dead_rows);
	return false;
}

static Task begin_task = {begin_work, 0, RETRY_MS};
static Task learn_task = {learn, 0, RETRY_MS};
static Task journal_task = {write_journal, 0, RETRY_MS};
static Task notify_task = {send_announcements, 0, RETRY_MS};
static Task vacuum_task = {vacuum_tables, 0, RETRY_MS};

/*
 * Perform a task, unless it has failed a moment ago.  Where it fails, the
 * error is logged.  Returns when to come again.
 */
static uint64
perform(Task *task)
{
	volatile bool more = false;
	volatile bool failed = false;

	if (dlock_monotonic_now() < task->next_try)
		return task->next_try;
	PG_TRY();
	{
		more = task->perform();
	}
	PG_CATCH();
	{
		HOLD_INTERRUPTS();
		/* outside of a transaction, PostgreSQL does not do so below */
		LWLockReleaseAll();
		EmitErrorReport();
		if (task == &begin_task || task == &learn_task)
			dlock_journal_fail(my_space, geterrcode());
		AbortCurrentTransaction();
		FlushErrorState();
		SetConfigOption("lock_timeout", LOCK_TIMEOUT_MS, PGC_SUSET,
						PGC_S_SESSION);
		RESUME_INTERRUPTS();
		failed = true;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(TopMemoryContext);
	if (!failed)
	{
		task->next_try = 0;
		task->retry_ms = RETRY_MS;
		return more ? 0 : NEVER;
	}
	task->next_try = dlock_monotonic_now() + task->retry_ms * 1000;
	task->retry_ms = Min(task->retry_ms * 2, MAX_RETRY_MS);
	return task->next_try;
}

/* The last work of a worker that was told to go, which it then does. */
static void
write_the_rest(void)
{
	uint64		end = dlock_monotonic_now() + LEAVE_MS * 1000;

	while (perform(&journal_task) == 0 && dlock_monotonic_now() < end)
		;
	ProcDiePending = InterruptPending = true;
}

/*
 * What a database's or a role's settings must not change.
 */
static void
pin_settings(void)
{
	static const char *const settings[][2] = {
		{"search_path", "pg_catalog, pg_temp"},
		{"synchronous_commit", "off"},
		{"lock_timeout", LOCK_TIMEOUT_MS},
		{"default_transaction_read_only", "off"},
		{"default_transaction_isolation", "read committed"},
		{"row_security", "off"},
		{"vacuum_cost_delay", "0"},
		{"transaction_timeout", "0"}	/* since 17 */
	};

	for (int i = 0; i < (int) lengthof(settings); i++)
	{
		if (GetConfigOption(settings[i][0], true, false) != NULL)
			SetConfigOption(settings[i][0], settings[i][1], PGC_SUSET,
							PGC_S_SESSION);
	}
}

static uint64
sooner(uint64 a, uint64 b)
{
	return a < b ? a : b;
}

/* Do all there is to do.  Returns when to come again. */
static uint64
work(void)
{
	uint64		next = NEVER;

	if (!begun)
	{
		next = perform(&begin_task);
		if (!begun)
			return next;
	}
	expire();
	if (!knows_all)
		next = perform(&learn_task);
	if (knows_all)
		next = perform(&journal_task);
	if (my_space->leases.length > 0)
		next = sooner(next, next_look);
	next = sooner(next, dlock_heartbeat_beat(my_space));
	if (announce_grants())
		next = sooner(next, dlock_monotonic_now() + POLL_MS * 1000);
	next = sooner(next, perform(&notify_task));
	next = sooner(next, perform(&vacuum_task));
	/* last, as the journal may have told of new leases */
	return sooner(next, next_due());
}

void
dlock_worker_main(Datum arg)
{
	DlockSpaceKey key;
	HASHCTL		info = {
		.keysize = sizeof(dsa_pointer),
		.entrysize = sizeof(Watch),
		.hcxt = TopMemoryContext
	};
	uint64		idle_since = 0; /* 0: not idle */

	memcpy(&key, MyBgworkerEntry->bgw_extra, sizeof(DlockSpaceKey));
	pqsignal(SIGTERM, die);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(key.database, InvalidOid,
											  BGWORKER_BYPASS_ALLOWCONN);
	pin_settings();
	MemoryContextSwitchTo(TopMemoryContext);
	if (!take_office(&key))
		return;
	watches_by_due = pairingheap_allocate(compare_due, NULL);
	watches = hash_create("dlock leases", 256, &info,
						  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);

	for (;;)
	{
		uint64		next;
		uint64		now;

		/* before anything is looked at, so that no wakeup is missed */
		ResetLatch(MyLatch);
		if (leaving)
			write_the_rest();
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}

		pgstat_report_activity(STATE_RUNNING, NULL);
		next = work();
		if (extension_is_gone)
		{
			dlock_lease_abandon(my_space);
			return;
		}
		gives_way = dlock_is_replaced();
		if (gives_way)
		{
			ereport(LOG,
					(errmsg("dlock worker gives way to another version of dlock"),
					 errdetail("Leases are read again from their tables, by the first call.")));
			return;
		}
		pgstat_report_activity(STATE_IDLE, NULL);
		(void) pgstat_report_stat(false);

		now = dlock_monotonic_now();
		if (dlock_worker_is_needed(my_space) ||
			pg_atomic_read_u32(&my_space->announced) > 0)
			idle_since = 0;
		else if (idle_since == 0)
			idle_since = now;
		else if (now - idle_since >= IDLE_MS * 1000)
			return;
		if (idle_since != 0)
			next = Min(next, idle_since + IDLE_MS * 1000);
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
						 next <= now ? 0 : (long) Min((next - now + 999) / 1000, INT_MAX),
						 PG_WAIT_EXTENSION);
	}
}
