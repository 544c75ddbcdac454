/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The background worker: writes the journal, ends leases that are due, and
 *	  starts the sender and the vacuum process.
 *
 * The worker ends if it has not been needed (is_missed()) for idle_time(), so
 * that it neither blocks DROP DATABASE nor takes a slot from another database.
 * It can die at any time, because its work is in shared memory, and the next
 * worker continues.
 *
 * Heartbeats and expiry must not be late.  So the worker never waits for
 * standbys, waits for locks on tables only for DLOCK_SHORT_LOCK_TIMEOUT,
 * leaves NOTIFY and VACUUM to other processes, and does long tasks in steps.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

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

#include "shared/shared.h"
#include "tables/tables.h"
#include "worker/process.h"
#include "worker/due.h"
#include "worker/worker.h"

#define PATIENCE_MS		1000	/* lock timeouts are logged only after this */
#define LEAVE_MS		1000	/* a terminated worker ends if the journal has
								 * not got shorter for this long */
#define TWICE_MS		100		/* signals within this time count as one */
#define STAY_MS			5000	/* at a shutdown, longest wait for sessions */
#define STAY_LOOK_MS	10		/* between checks for these sessions */
#define LOOK_MS			2000	/* between checks that the extension exists */
#define RETRY_START_MS	100		/* between attempts to start a sender */
#define MISS_MS			10		/* between calls of is_missed() */
#define STEP_US			5000	/* after this, a task lets other tasks run */
#define LAZY_MS			10		/* delay of removals that no process awaits */
#define SOON_MS			5000	/* worker stays if a lease is due this soon */
#define WAY_MS			1000	/* between checks by is_in_the_way() */
#define SURE_MS			100		/* the same, if the database seems locked */
#define SURE_LOOKS		3		/* checks in a row, as some locks are brief */
#define FIRST_PAUSE_MS	100		/* after one early death; doubles with each */
#define MAX_PAUSE_MS	5000
#define YOUNG_MS		10000

#define NEVER			DLOCK_NO_DEADLINE

PGDLLEXPORT void dlock_worker_main(Datum arg);

/* GUC, in milliseconds */
int			dlock_worker_idle_timeout;

static DlockSpace *my_space = NULL;
static bool extension_is_gone = false;
static bool gives_way = false;	/* ends for a library of another layout */
static bool leaves = false;		/* ends because it is not needed */
static bool makes_way = false;	/* ends for DROP DATABASE, for example */

static volatile sig_atomic_t leaving = false;	/* SIGTERM came */

static bool is_wanted(void);

/* Leases that this worker does not know yet, each with a reference */
static DlockLease **unknown = NULL;
static uint64 num_unknown = 0;
static bool knows_all = false;

#define LEARN_AT_ONCE	256		/* leases per step */

/* Drop the collected leases.  The worker then learns of all leases again. */
static void
forget_leases(void)
{
	knows_all = false;
	while (num_unknown > 0)
		dlock_record_unref(&unknown[--num_unknown]->record);
}

/* Drop all references at exit. */
static void
let_go(void)
{
	dlock_writer_let_go();
	forget_leases();
	dlock_grants_let_go();
	dlock_due_let_go();
}

/*
 * Leave the office.  Then start the next worker if there is work, because work
 * may have come just before that (I20).  With makes_way, sessions start it.
 */
static void
resign(int code, Datum arg)
{
	/* a fatal error can leave locks held */
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

static bool begun = false;

/* When to check that the extension exists, if nothing is written */
static uint64 next_look = 0;

/*
 * SIGTERM handler: write the journal and end, so that locks released before a
 * shutdown are free after it.  A second signal ends the worker at once, but is
 * ignored within TWICE_MS, as the postmaster signals a process and its group.
 */
static void
handle_terminate(SIGNAL_ARGS)
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
 * Load the tables if needed, and take over the journal.  Returns true if the
 * load is not complete.  journal_task finds out if dlock was dropped.
 */
static bool
begin_work(void)
{
	bool		loaded = true;

	StartTransactionCommand();
	if (pg_atomic_read_u32(&my_space->loaded) == 0 &&
		get_extension_oid("dlock", true) == my_space->key.extension)
	{
		/* there is no journal yet, so a signal may end the worker at once */
		pqsignal(SIGTERM, die);
		if (leaving)
			ProcDiePending = InterruptPending = true;
		loaded = dlock_load(my_space);
		pqsignal(SIGTERM, handle_terminate);
	}
	if (loaded)
		dlock_writer_begin(my_space);
	CommitTransactionCommand();
	if (!loaded)
		return true;
	begun = true;
	/* short, because from now on other processes wait for the worker */
	dlock_process_lock_timeout(DLOCK_SHORT_LOCK_TIMEOUT);
	return false;
}

/* Collect all leases, each with a reference. */
static void
collect_unknown(void)
{
	DlockLease *lease = NULL;
	/* the worker learns of new leases from the journal */
	uint64		max_unknown = my_space->leases.length + 64;

	if (unknown)
		pfree(unknown);
	unknown = NULL;
	unknown = MemoryContextAllocHuge(TopMemoryContext,
									 max_unknown * sizeof(DlockLease *));
	LWLockAcquire(&my_space->lease_lock, LW_EXCLUSIVE);
	while (num_unknown < max_unknown &&
		   (lease = dlock_lease_next(my_space, lease)) != NULL)
	{
		dlock_record_ref(&lease->record);
		unknown[num_unknown++] = lease;
	}
	LWLockRelease(&my_space->lease_lock);
}

/* Remember the grants of a lease, if they may have to be announced. */
static void
learn_of_grants(DlockLease *lease)
{
	LWLockAcquire(&my_space->lease_lock, LW_SHARED);
	for (DlockLeaseTicket *ticket = dlock_ticket_in_lease(lease->tickets.head);
		 ticket; ticket = dlock_ticket_in_lease(ticket->in_lease.next))
	{
		dlock_grants_remember(ticket,
							  dlock_journal_position(my_space,
													 &ticket->record));
	}
	LWLockRelease(&my_space->lease_lock);
}

/* Learn of the next leases and their grants.  Returns true if any are left. */
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

/* After a failed load, notify the processes that wait for it. */
static void
begin_failed(int code)
{
	/* a session may have loaded the tables, so there may be a journal */
	pqsignal(SIGTERM, handle_terminate);
	dlock_load_failed(my_space);
	dlock_journal_fail(my_space, code);
}

static void
learn_failed(int code)
{
	dlock_journal_fail(my_space, code);
}

/* Delete rows that belong to no lease or ticket. */
static bool
clear_tables(void)
{
	extension_is_gone = !dlock_writer_clear(my_space);
	return false;
}

static DlockTask journal_task;
static XLogRecPtr commit_before;

/* When to look at the journal for removals that no process waits for */
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
	{
		next_lazy = dlock_monotonic_now() + LAZY_MS * 1000;
		/* the next error is a new one, and is logged */
		journal_task.code = 0;
	}
	pg_atomic_fetch_add_u32(&my_space->dead_rows, dead);
	return !extension_is_gone && my_space->journal.length > 0;
}

/* If the error came after the commit, learn of all leases again. */
static void
write_failed(int code)
{
	if (dlock_error_is_lock(code))
		dlock_journal_fail(my_space, code);
	if (XactLastCommitEnd != commit_before)
		forget_leases();
}

/* If no sender can be started, take its office and send from the worker. */
static bool
send_without_sender(void)
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

static DlockTask begin_task = {
	.what = "reading the tables of leases",
	.perform = begin_work,
	.failed = begin_failed
};
static DlockTask learn_task = {
	.what = "looking through leases",
	.perform = learn,
	.failed = learn_failed
};
static DlockTask clear_task = {
	.what = "removing rows that stand for nothing",
	.perform = clear_tables,
	.tell_of_lock = dlock_rows_tell_of_lock,
	.patience_ms = PATIENCE_MS
};
static DlockTask journal_task = {
	.what = "writing the tables of leases",
	.perform = write_journal,
	.failed = write_failed,
	.tell_of_lock = dlock_rows_tell_of_lock,
	.patience_ms = PATIENCE_MS
};
static DlockTask notify_task = {
	.what = "sending notifications",
	.perform = send_without_sender
};

/*
 * A shutdown ends sessions, too, and these withdraw requests that are not
 * durable.  To write this, the worker waits for sessions, but at most STAY_MS,
 * because a walsender that has called dlock waits for the worker to end.
 */
static bool
stays_for_sessions(void)
{
	static uint64 until = 0;
	uint64		now = dlock_monotonic_now();

	if (until == 0)
		until = now + (dlock_process_server_stops() ? STAY_MS * 1000 : 0);
	return now < until && dlock_worker_has_company(my_space, false);
}

/*
 * After SIGTERM, work on as long as the journal gets shorter, and then end.
 * Returns the time of the next call.
 */
static uint64
leave_if_told(void)
{
	static uint32 least = PG_UINT32_MAX;
	static uint64 end = 0;
	uint64		now = dlock_monotonic_now();

	if (!leaving)
		return NEVER;
	if (stays_for_sessions())
		return now + STAY_LOOK_MS * 1000;
	if (my_space->journal.length < least)
	{
		least = my_space->journal.length;
		end = now + LEAVE_MS * 1000;
	}
	if (least > 0 && now < end && pg_atomic_read_u32(&my_space->loaded) != 0)
		return end;
	makes_way = dlock_process_is_in_the_way();
	(void) dlock_expiry_tell(my_space, true);
	ProcDiePending = InterruptPending = true;
	return NEVER;
}

/* Let the sender send messages, if any.  Returns the time of the next call. */
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

/* Start a vacuum of dead rows, if due.  Without a slot, autovacuum does it. */
static void
have_tables_vacuumed(void)
{
	if (pg_atomic_read_u32(&my_space->dead_rows) <
		pg_atomic_read_u32(&my_space->vacuum_at) ||
		dlock_office_holder(my_space, DLOCK_VACUUM) >= 0)
		return;
	/* report now: after the vacuum, these dead rows would count as new ones */
	(void) pgstat_report_stat(true);
	(void) dlock_office_start(my_space, DLOCK_VACUUM);
}

/* Is there work, or a session that may post work at any moment? */
static bool
is_wanted(void)
{
	return my_space->journal.length > 0 || dlock_has_messages(my_space) ||
		my_space->retimed.length > 0 ||
		(pg_atomic_read_u32(&my_space->announced) > 0 &&
		 CountDBConnections(MyDatabaseId) > 0) ||
		(my_space->leases.length > 0 &&
		 (pg_atomic_read_u32(&my_space->watches) > 0 ||
		  dlock_worker_has_company(my_space, true)));
}

/*
 * Is a worker needed?  It is needed by waiters behind leases, leases that need
 * heartbeats, sessions that may listen for announcements, and leases due soon.
 * Otherwise, a process that finds a lease due starts the next worker.
 */
static bool
is_missed(uint64 next_beat)
{
	if (!knows_all || is_wanted() || dlock_grants_are_left())
		return true;
	if (my_space->leases.length == 0)
		return false;
	return (next_beat != NEVER && dlock_quorum_has_standbys()) ||
		dlock_due_next() <= dlock_monotonic_now() + SOON_MS * 1000 ||
		dlock_due_has_attached();
}

static void
terminate(DlockOffice office)
{
	int			pid = dlock_office_pid(my_space, office);

	if (pid != 0)
		(void) kill(pid, SIGTERM);
}

/*
 * Does a command that drops, renames or copies the database wait for dlock's
 * processes?  If so, this ends the sender and the vacuum process, and the
 * caller must end, too.  Lowers *next to the time of the next check.
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
	terminate(DLOCK_SENDER);
	terminate(DLOCK_VACUUM);
	return true;
}

static uint64 next_beat = NEVER;

/*
 * Do all work that is due.  Returns the time of the next call.  Heartbeats
 * come before expiry, because there may have been no worker for a while.
 */
static uint64
work(void)
{
	uint64		next = NEVER;

	if (!begun)
	{
		/* if another process has loaded the tables, end the pause */
		if (pg_atomic_read_u32(&my_space->loaded) != 0)
			begin_task.next_try = 0;
		next = dlock_task_perform(&begin_task);
		/* announcements of session scope need no tables */
		if (!begun)
			return sooner(next, have_announcements_sent());
	}
	if (!knows_all)
		next = sooner(next, dlock_task_perform(&learn_task));
	if (dlock_due_update(my_space))
		next = 0;
	(void) dlock_heartbeat_beat(my_space, knows_all);
	/* tickets can run out faster than a worker that leaves writes them */
	if (!leaving)
		dlock_due_expire(STEP_US);
	if (pg_atomic_read_u32(&my_space->cleared) == 0)
		next = sooner(next, dlock_task_perform(&clear_task));
	if (!extension_is_gone)
		next = sooner(next, dlock_task_perform(&journal_task));
	next = sooner(next, dlock_grants_announce(STEP_US));
	next = sooner(next, have_announcements_sent());
	have_tables_vacuumed();
	next = sooner(next, next_lazy);
	/* after other work, because the log can be slow */
	next = sooner(next, dlock_expiry_tell(my_space, false));
	/* again, because the journal may have brought new leases */
	next_beat = dlock_heartbeat_beat(my_space, knows_all);
	next = sooner(next, next_beat);
	return leaving ? next : sooner(next, dlock_due_next());
}

/* Pause after "deaths" workers in a row have died young. */
static void
pause_before_work(uint32 deaths)
{
	uint64		end = dlock_monotonic_now();

	if (deaths > 0)
		end += Min(FIRST_PAUSE_MS << Min(deaths - 1, 10), MAX_PAUSE_MS) * 1000;
	/* end the pause if a library of another layout waits for us */
	while (dlock_monotonic_now() < end && !leaving && !dlock_is_replaced())
	{
		/* attached leases must not run out during the pause */
		uint64		next = sooner(end, dlock_heartbeat_beat(my_space, false));

		dlock_process_sleep(next);
		dlock_process_signals();
	}
}

static void
begin_worker(void)
{
	my_space = dlock_process_begin(DLOCK_WORKER, handle_terminate);
	if (my_space == NULL)
		proc_exit(0);
	before_shmem_exit(resign, 0);
	dlock_due_begin();
	dlock_grants_begin();
	pause_before_work(pg_atomic_fetch_add_u32(&my_space->worker_deaths, 1));
}

/* How long the worker stays if it is not needed, in microseconds */
static uint64
idle_time(void)
{
	return (uint64) (my_space->leases.length == 0 ? DLOCK_IDLE_MS :
					 dlock_worker_idle_timeout) * 1000;
}

/* Set or clear worker_comes.  Clear it before a look at the journal (I20). */
static void
promise_to_come(bool comes)
{
	pg_atomic_write_u32(&my_space->worker_comes, comes ? 1 : 0);
	pg_memory_barrier();
}

void
dlock_worker_main(Datum arg)
{
	uint64		old_at;
	uint64		missed_at;		/* when the worker was last needed */
	uint64		look_at = 0;	/* when to call is_missed() again */

	begin_worker();
	missed_at = dlock_monotonic_now();
	old_at = missed_at + YOUNG_MS * 1000;
	for (;;)
	{
		uint64		next;
		uint64		now;
		uint64		next_stay;

		promise_to_come(false);
		next_stay = leave_if_told();
		dlock_process_signals();
		/* the segment may be freed after us, so the journal must be empty */
		gives_way = my_space->journal.length == 0 &&
			dlock_process_gives_way();
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
			break;
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
				/* check again: clients can disconnect without a wakeup */
				next = sooner(next, now + DLOCK_IDLE_MS * 1000);
			}
			else
			{
				leaves = now - missed_at >= idle_time();
				if (leaves)
					break;
				next = sooner(next, missed_at + idle_time());
				/* the extension may be dropped during the sleep */
				next = sooner(next, next_look);
			}
		}
		promise_to_come(next_lazy != NEVER);
		dlock_process_sleep(sooner(next, next_stay));
	}
	(void) dlock_expiry_tell(my_space, true);
}
