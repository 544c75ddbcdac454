/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The background worker: has written what leases change, ends them when
 *	  they are due, and has announcements sent.
 *
 * There is at most one per database.  Whoever has something for it wakes it,
 * and asks the postmaster to start one if there is none (shared/launcher.c).
 * It stays for as long as somebody could notice that it went, see is_missed();
 * otherwise it leaves, so that it does not stand in the way of DROP DATABASE,
 * nor of the workers of other databases.  It may die at any time: all that it
 * works on is in shared memory, and the next worker goes on with it.
 *
 * The worker waits for nobody, so that heartbeats and expiry are never late:
 * not for standbys, whose answers it looks at; for a lock on the tables only so
 * long, between two looks at what is due; and what waits longer by its nature,
 * NOTIFY and VACUUM, other processes do for it.  Nor does it do anything for
 * longer than a step.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/procarray.h"
#include "tcop/tcopprot.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "shared/shared.h"
#include "tables/tables.h"
#include "worker/process.h"
#include "worker/due.h"
#include "worker/worker.h"

#define MAX_RETRY_MS	2000	/* between attempts that fail */
#define PATIENCE_MS		1000	/* for a lock that it does not get */
#define LEAVE_MS		1000	/* a worker that is told to go writes that long */
#define TWICE_MS		100		/* a signal within it is the first one's twin */
#define STAY_MS			5000	/* at a shutdown, it waits for sessions that long */
#define STAY_LOOK_MS	10		/* ... and looks that often whether all have gone */
#define LOOK_MS			2000	/* between looks whether the extension is there */
#define RETRY_START_MS	100		/* of a sender that has not come */
#define MISS_MS			10		/* between looks at all sessions, who would miss
								 * the worker */
#define STEP_US			5000	/* at one thing, while others may be due */
#define LAZY_MS			10		/* a removal that nobody waits for waits so long */
#define SOON_MS			5000	/* a lease that is due then is waited for */
#define WAY_MS			1000	/* between looks whether the database is to be
								 * dropped, ... */
#define SURE_MS			100		/* ... where it seems to be, before it goes */
#define SURE_LOOKS		3		/* so many in a row: whoever has not the right
								 * has it locked for a moment, too */
#define FIRST_PAUSE_MS	100		/* after a worker that died young, and then
								 * twice as long */
#define MAX_PAUSE_MS	5000
#define YOUNG_MS		10000

/* The moment when nothing is due */
#define NEVER			DLOCK_NO_DEADLINE

PGDLLEXPORT void dlock_worker_main(Datum arg);

/* The setting, in milliseconds */
int			dlock_worker_idle_timeout;

static DlockSpace *my_space = NULL;
static bool extension_is_gone = false;
static bool gives_way = false;	/* to a library of another layout */
static bool leaves = false;		/* as nobody could notice */
static bool makes_way = false;	/* to who drops or renames the database */

/* Set by a signal */
static volatile sig_atomic_t leaving = false;

static bool is_wanted(void);

/* The leases that the worker has still to learn of, each referred to */
static DlockLease **unknown = NULL;
static uint64 num_unknown = 0;
static uint64 max_unknown = 0;
static bool knows_all = false;

#define LEARN_AT_ONCE	256		/* leases, between two looks at what is due */

/* Begin to learn again, of all leases. */
static void
forget(void)
{
	knows_all = false;
	while (num_unknown > 0)
		dlock_record_unref(&unknown[--num_unknown]->record);
}

/* What the worker refers to is not to be kept by one that is gone. */
static void
let_go(void)
{
	dlock_writer_let_go();
	forget();
	dlock_grants_let_go();
	dlock_due_let_go();
}

/*
 * Let the next worker come; and see to it that one does, if something is to be
 * done, or was posted while this one still seemed to be there.  Where this one
 * leaves because it is not missed, that is: if it is missed by now (I20).  And
 * if it makes way, not before a session comes to the database again.
 */
static void
resign(int code, Datum arg)
{
	/* what it may have held as it failed */
	LWLockReleaseAll();
	pg_atomic_write_u32(&my_space->worker_comes, 0);
	pg_atomic_write_u64(&my_space->blocked_on, 0);
	(void) dlock_office_leave(my_space, DLOCK_SENDER);
	if (leaves || leaving || makes_way)
		pg_atomic_write_u32(&my_space->worker_deaths, 0);
	pg_atomic_write_u64(&my_space->next_due,
						leaves ? dlock_due_next() : 0);
	if (!dlock_office_leave(my_space, DLOCK_WORKER))
		return;
	if (!extension_is_gone && !gives_way && !makes_way &&
		(leaves ? is_wanted() : dlock_worker_is_needed(my_space)))
		(void) dlock_office_start(my_space, DLOCK_WORKER);
	let_go();
}

static uint64
sooner(uint64 a, uint64 b)
{
	return a < b ? a : b;
}

/*
 * Tasks that can fail
 */

static bool begun = false;

/* When to look whether the extension is there, if nothing is written */
static uint64 next_look = 0;

/*
 * What was released before a shutdown is released after it: so a worker that
 * is told to go writes the journal first.  One that is told so again does not; but
 * the postmaster sends each signal twice, to the process and to its group.
 */
static void
leave(SIGNAL_ARGS)
{
	static uint64 told_at = 0;
	int			save_errno = errno;
	uint64		now = dlock_monotonic_now();

	if (told_at == 0)
		told_at = now;
	leaving = true;
	if (now - told_at >= TWICE_MS * 1000)
		ProcDiePending = InterruptPending = true;
	SetLatch(MyLatch);
	errno = save_errno;
}

/*
 * What the tables keep, unless that is in memory, and what the worker before has
 * left.  No table is needed for that one, so that who keeps them locked does
 * not keep a new worker from its heartbeats; and before they are read, nothing
 * needs any.  Where the extension has gone, the next task finds that out.
 */
static bool
begin_work(void)
{
	StartTransactionCommand();
	if (pg_atomic_read_u32(&my_space->loaded) == 0 &&
		get_extension_oid("dlock", true) == my_space->key.extension)
		dlock_load(my_space);
	dlock_writer_begin(my_space);
	CommitTransactionCommand();
	begun = true;
	pqsignal(SIGTERM, leave);
	/* from now on, others wait */
	dlock_process_lock_timeout(DLOCK_SHORT_LOCK_TIMEOUT);
	return false;
}

static bool
take_unknown(DlockLease *lease, void *arg)
{
	if (num_unknown == max_unknown)
		return false;
	dlock_record_ref(&lease->record);
	unknown[num_unknown++] = lease;
	return true;
}

/* Take note of all leases that there are. */
static void
collect_unknown(void)
{
	/* some may come meanwhile, and the journal tells of them */
	max_unknown = my_space->leases.length + 64;
	if (unknown)
		pfree(unknown);
	unknown = NULL;
	unknown = MemoryContextAllocHuge(TopMemoryContext,
									 max_unknown * sizeof(DlockLease *));
	dlock_lease_for_each(my_space, LW_SHARED, take_unknown, NULL);
}

/* The grants that a lease's tickets have, and that may have to be announced */
static void
learn_of_grants(DlockLease *lease)
{
	LWLockAcquire(&my_space->lease_lock, LW_SHARED);
	for (DlockLeaseTicket *ticket = dlock_lease_first_ticket(lease); ticket;
		 ticket = dlock_lease_next_ticket(lease, ticket))
	{
		if (ticket->record.has_row && !ticket->record.listed)
			dlock_grants_remember(ticket,
								  dlock_journal_position(my_space,
														 &ticket->record));
	}
	LWLockRelease(&my_space->lease_lock);
}

/* Learn of all the leases and grants that there are, a few at a time. */
static bool
learn(void)
{
	if (num_unknown == 0)
		collect_unknown();
	for (int n = 0; n < LEARN_AT_ONCE && num_unknown > 0; n++)
	{
		DlockLease *lease = unknown[num_unknown - 1];

		dlock_due_add(lease);
		learn_of_grants(lease);
		num_unknown--;
		dlock_record_unref(&lease->record);
	}
	knows_all = num_unknown == 0;
	return !knows_all;
}

/* Those who wait are told. */
static void
begin_failed(int code)
{
	dlock_load_failed(my_space);
	dlock_journal_fail(my_space, code);
}

static void
learn_failed(int code)
{
	dlock_journal_fail(my_space, code);
}

/* Rows that stand for nothing go, and that may wait. */
static bool
clear_tables(void)
{
	extension_is_gone = !dlock_writer_clear(my_space);
	return false;
}

static XLogRecPtr commit_before;

/*
 * When to look at the journal again, after something was written: whoever releases
 * a lock before, and leaves nobody waiting, does not wake the worker.  So where it
 * is acquired again, the removal and the grant are written together.
 */
static uint64 next_lazy = NEVER;

static bool
write_journal(void)
{
	int			dead = 0;
	int			count;
	uint64		now = dlock_monotonic_now();

	next_lazy = NEVER;
	if (my_space->journal.length == 0 && now < next_look)
		return false;
	next_look = now + LOOK_MS * 1000;
	commit_before = XactLastCommitEnd;
	count = dlock_writer_write(my_space, &dead);
	extension_is_gone = count < 0;
	if (count > 0)
		next_lazy = dlock_monotonic_now() + LAZY_MS * 1000;
	pg_atomic_fetch_add_u32(&my_space->dead_rows, dead);
	return !extension_is_gone && my_space->journal.length > 0;
}

/* An error may have come between writing something and learning of it. */
static void
write_failed(int code)
{
	if (dlock_error_is_lock(code))
		dlock_journal_fail(my_space, code);
	if (XactLastCommitEnd != commit_before)
		forget();
}

/*
 * The sender has the outbox for itself.  Where no slot is free for one, the
 * worker sends, as far as that takes no time.
 */
static bool
send_announcements(void)
{
	volatile bool more = false;

	if (!dlock_office_take(my_space, DLOCK_SENDER))
		return false;
	PG_TRY();
	{
		more = dlock_notify_send(my_space);
	}
	PG_FINALLY();
	{
		(void) dlock_office_leave(my_space, DLOCK_SENDER);
	}
	PG_END_TRY();
	return more;
}

/* Who keeps the worker from its tables? */
static bool
tell_of_lock(void)
{
	return dlock_rows_tell_of_lock(dlock_process_database());
}

static DlockTask begin_task = {
	.what = "reading the tables of leases",
	.perform = begin_work,
	.failed = begin_failed,
	.max_retry_ms = MAX_RETRY_MS
};
static DlockTask learn_task = {
	.what = "looking through leases",
	.perform = learn,
	.failed = learn_failed,
	.max_retry_ms = MAX_RETRY_MS
};
static DlockTask clear_task = {
	.what = "removing rows that stand for nothing",
	.perform = clear_tables,
	.tell_of_lock = tell_of_lock,
	.max_retry_ms = MAX_RETRY_MS,
	.patience_ms = PATIENCE_MS
};
static DlockTask journal_task = {
	.what = "writing the tables of leases",
	.perform = write_journal,
	.failed = write_failed,
	.tell_of_lock = tell_of_lock,
	.max_retry_ms = MAX_RETRY_MS,
	.patience_ms = PATIENCE_MS
};
static DlockTask notify_task = {
	.what = "sending notifications",
	.perform = send_announcements,
	.max_retry_ms = MAX_RETRY_MS
};

/*
 * A shutdown ends the sessions at the same moment as the worker.  A session then
 * takes back what it could not make durable, and the worker has to write that: it
 * stays until no session of the database is left.  PostgreSQL waits for them, too,
 * so that this does not hold up the shutdown.  The limit is for a session that
 * PostgreSQL ends after the worker: a walsender that has called dlock.
 */
static bool
stays_for_sessions(void)
{
	static uint64 until = 0;
	uint64		now = dlock_monotonic_now();

	if (until == 0)
		until = now + (dlock_process_server_stops() ? STAY_MS * 1000 : 0);
	return now < until && dlock_worker_has_company(my_space);
}

/* The last work of a worker that was told to go, which it then does. */
static void
write_the_rest(void)
{
	uint64		end = dlock_monotonic_now() + LEAVE_MS * 1000;
	uint64		next;

	while ((next = dlock_task_perform(&journal_task)) != NEVER && next < end)
	{
		if (next != 0)
			(void) WaitLatch(MyLatch, WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
							 dlock_milliseconds_until(next),
							 PG_WAIT_EXTENSION);
		CHECK_FOR_INTERRUPTS();
		if (dlock_monotonic_now() >= end)
			break;
	}
	makes_way = dlock_process_is_in_the_way();
	(void) dlock_expiry_tell(my_space, true);
	ProcDiePending = InterruptPending = true;
}

/*
 * Where the worker was told to go, it does so at the next interrupt, or stays for a
 * while.  Returns when to look again: a session that goes wakes nobody.
 */
static uint64
leave_if_told(void)
{
	if (leaving && stays_for_sessions())
		return dlock_monotonic_now() + STAY_LOOK_MS * 1000;
	if (leaving)
		write_the_rest();
	return NEVER;
}

/*
 * See to it that somebody sends what is in the outbox.  Returns when to come
 * again.
 */
static uint64
have_announcements_sent(void)
{
	uint64		next;

	if (!dlock_has_messages(my_space) ||
		dlock_office_wake(my_space, DLOCK_SENDER))
		return NEVER;
	if (dlock_office_start(my_space, DLOCK_SENDER))
		return dlock_monotonic_now() + RETRY_START_MS * 1000;
	next = dlock_task_perform(&notify_task);
	return sooner(sooner(next, dlock_notify_next()),
				  dlock_monotonic_now() + RETRY_START_MS * 1000);
}

/* The same for the tables' dead rows; autovacuum comes, too, if nobody does. */
static void
have_tables_vacuumed(void)
{
	if (pg_atomic_read_u32(&my_space->dead_rows) <
		pg_atomic_read_u32(&my_space->vacuum_at) ||
		dlock_office_is_held(my_space, DLOCK_VACUUM))
		return;
	/* before it, or else the statistics would count as dead what it has removed */
	(void) pgstat_report_stat(true);
	(void) dlock_office_start(my_space, DLOCK_VACUUM);
}

/* Does somebody need the worker now? */
static bool
is_wanted(void)
{
	return my_space->journal.length > 0 || dlock_has_messages(my_space) ||
		my_space->retimed.length > 0 ||
		(my_space->leases.length > 0 && dlock_worker_is_awaited(my_space));
}

/*
 * Could somebody notice if there were no worker?  Who waits for something that
 * a lease has; who renews a lease that lives by heartbeats; a session that may
 * listen for announcements; or whoever looks at a lease that is due soon.
 *
 * Nobody else does: what a lease holds is held without a worker, and its time
 * runs.  Whoever meets it when it is due starts another one.
 */
static bool
is_missed(uint64 next_beat)
{
	if (!knows_all || is_wanted() || dlock_grants_are_left())
		return true;
	if (pg_atomic_read_u32(&my_space->announced) > 0 &&
		CountDBConnections(MyDatabaseId) > 0)
		return true;
	if (my_space->leases.length == 0)
		return false;
	return (next_beat != NEVER && dlock_quorum_has_standbys()) ||
		dlock_due_next() <= dlock_monotonic_now() + SOON_MS * 1000 ||
		dlock_due_has_attached();
}

/*
 * Is the database to be dropped, renamed or copied, with nobody left in it but
 * us?  Then we go, and have the others go.  *next is when to look again.
 */
static bool
is_in_the_way(uint64 now, uint64 *next)
{
	static uint64 look_at = 0;
	static int	looks = 0;

	if (now >= look_at)
	{
		looks = dlock_process_is_in_the_way() ? looks + 1 : 0;
		look_at = now + (looks > 0 ? SURE_MS : WAY_MS) * 1000;
	}
	*next = sooner(*next, look_at);
	if (looks < SURE_LOOKS)
		return false;
	dlock_office_terminate(my_space, DLOCK_SENDER);
	dlock_office_terminate(my_space, DLOCK_VACUUM);
	return true;
}

static uint64 next_beat = NEVER;

/*
 * Do all there is to do.  Returns when to come again.
 *
 * Heartbeats come before expiry, and before whatever can take longer.  The worker
 * that was there before may have been gone for a while.
 */
static uint64
work(void)
{
	uint64		next = NEVER;

	if (!begun)
	{
		next = dlock_task_perform(&begin_task);
		if (!begun)
			return next;
	}
	if (!knows_all)
		next = sooner(next, dlock_task_perform(&learn_task));
	if (dlock_due_update(my_space))
		next = 0;
	(void) dlock_heartbeat_beat(my_space, knows_all);
	dlock_due_expire(STEP_US);
	if (pg_atomic_read_u32(&my_space->cleared) == 0)
		next = sooner(next, dlock_task_perform(&clear_task));
	if (!extension_is_gone)
		next = sooner(next, dlock_task_perform(&journal_task));
	next = sooner(next, dlock_grants_announce(STEP_US));
	next = sooner(next, have_announcements_sent());
	have_tables_vacuumed();
	next = sooner(next, next_lazy);
	/* when all else was done, as the log can be slow */
	next = sooner(next, dlock_expiry_tell(my_space, false));
	/* last, as the journal may have told of new leases */
	next_beat = dlock_heartbeat_beat(my_space, knows_all);
	return sooner(sooner(next, next_beat), dlock_due_next());
}

/*
 * Those before this one died young, so many of them: the next shall not do so
 * at once.
 */
static void
pause_before_work(uint32 deaths)
{
	uint64		end = dlock_monotonic_now();

	if (deaths > 0)
		end += Min(FIRST_PAUSE_MS << Min(deaths - 1, 10), MAX_PAUSE_MS) * 1000;
	/* nor is it to be waited for by a library that wants its place */
	while (dlock_monotonic_now() < end && !dlock_is_replaced())
	{
		/* leases that sessions keep alive are not to run out meanwhile */
		uint64		next = sooner(end, dlock_heartbeat_beat(my_space, false));

		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
						 dlock_milliseconds_until(next), PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		dlock_process_signals();
	}
}

static void
begin(void)
{
	my_space = dlock_process_begin(DLOCK_WORKER);
	if (my_space == NULL)
		proc_exit(0);
	before_shmem_exit(resign, 0);
	dlock_due_begin();
	dlock_grants_begin();
	pause_before_work(pg_atomic_fetch_add_u32(&my_space->worker_deaths, 1));
}

/*
 * How long a worker stays that nobody would miss, in microseconds: a moment
 * where nothing is left, and some more where leases are.
 */
static uint64
idle_time(void)
{
	return (uint64) (my_space->leases.length == 0 ? DLOCK_IDLE_MS :
					 dlock_worker_idle_timeout) * 1000;
}

/*
 * Does the worker look at the journal in a moment, by itself?  It takes that
 * back before it looks, so it sees all that was marked before (I20).
 */
static void
promise_to_come(bool comes)
{
	pg_atomic_write_u32(&my_space->worker_comes, comes ? 1 : 0);
	pg_memory_barrier();
}

/* Or until somebody wakes the worker */
static void
sleep_until(uint64 next)
{
	promise_to_come(next_lazy != NEVER);
	(void) WaitLatch(MyLatch,
					 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
					 dlock_milliseconds_until(next), PG_WAIT_EXTENSION);
}

void
dlock_worker_main(Datum arg)
{
	uint64		old_at;
	uint64		missed_at;		/* when somebody last would have missed it */
	uint64		look_at = 0;	/* when to look next whether somebody would */

	begin();
	missed_at = dlock_monotonic_now();
	old_at = missed_at + YOUNG_MS * 1000;
	for (;;)
	{
		uint64		next;
		uint64		now;
		uint64		next_stay;

		/* before anything is looked at, so that no wakeup is missed */
		ResetLatch(MyLatch);
		promise_to_come(false);
		next_stay = leave_if_told();
		dlock_process_signals();
		gives_way = dlock_process_gives_way();
		if (gives_way)
			break;

		pgstat_report_activity(STATE_RUNNING, NULL);
		next = work();
		if (extension_is_gone)
		{
			dlock_lease_abandon(my_space);
			break;
		}
		pgstat_report_activity(STATE_IDLE, NULL);
		(void) pgstat_report_stat(false);

		now = dlock_monotonic_now();
		if (now >= old_at)
			pg_atomic_write_u32(&my_space->worker_deaths, 0);
		makes_way = is_in_the_way(now, &next);
		if (makes_way)
			return;
		if (next <= now)
			missed_at = now;
		else if (begun && now < look_at)
			next = sooner(next, look_at);
		else if (begun)
		{
			look_at = now + MISS_MS * 1000;
			if (is_missed(next_beat))
			{
				missed_at = now;
				/* who would miss it may go without a word */
				next = sooner(next, now + DLOCK_IDLE_MS * 1000);
			}
			else
			{
				leaves = now - missed_at >= idle_time();
				if (leaves)
					break;
				next = sooner(next, missed_at + idle_time());
				/* the extension may go meanwhile */
				next = sooner(next, next_look);
			}
		}
		sleep_until(sooner(next, next_stay));
	}
	(void) dlock_expiry_tell(my_space, true);
}
