/*-------------------------------------------------------------------------
 *
 * sender.c
 *	  The processes that wait for what the worker must not wait for: the sender
 *	  of announcements, and the one that vacuums the tables.
 *
 * The sender waits in the queue of NOTIFY, as any session that notifies does,
 * and sends all there is by the time that its turn has come.  So as long as
 * that queue moves, an announcement is told no later than by a NOTIFY of the
 * same moment.  It comes with the first announcement, and goes when there has
 * been none for a while.
 *
 * Vacuuming takes its time, too, with announcements to be sent meanwhile.  So
 * that is done by a process of its own, which goes when it has done so.
 *
 * Either can be killed at any time: what was not sent is still in the outbox.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/wait_event.h"

#include "shared/shared.h"
#include "tables/tables.h"
#include "worker/process.h"

/*
 * The longest pause after an error, such as a full queue.  It is no longer than
 * an announcement may be late.
 */
#define MAX_RETRY_MS	100

PGDLLEXPORT void dlock_sender_main(Datum arg);
PGDLLEXPORT void dlock_vacuum_main(Datum arg);

static DlockSpace *my_space = NULL;

/*
 * The worker sees to it that the next one comes, if something is left.  Whoever
 * posts something looks for a sender then, and wakes the worker if there is none:
 * so nothing is forgotten that comes before this process has left, or after it.
 */
static void
resign(int code, Datum arg)
{
	if (dlock_office_leave(my_space, (DlockOffice) DatumGetInt32(arg)) &&
		dlock_has_messages(my_space))
		(void) dlock_worker_wake(my_space);
}

static bool
send_announcements(void)
{
	return dlock_notify_send(my_space);
}

static DlockTask notify_task = {
	.what = "sending notifications",
	.perform = send_announcements,
	.max_retry_ms = MAX_RETRY_MS
};

void
dlock_sender_main(Datum arg)
{
	uint64		sent_at;

	my_space = dlock_process_begin(DLOCK_SENDER);
	if (my_space == NULL)
		return;
	before_shmem_exit(resign, Int32GetDatum(DLOCK_SENDER));
	dlock_process_lock_timeout("0");
	sent_at = dlock_monotonic_now();
	for (;;)
	{
		uint64		now;
		uint64		next;

		/* before anything is looked at, so that no wakeup is missed */
		ResetLatch(MyLatch);
		dlock_process_signals();

		pgstat_report_activity(STATE_RUNNING, NULL);
		next = dlock_task_perform(&notify_task);
		pgstat_report_activity(STATE_IDLE, NULL);
		(void) pgstat_report_stat(false);

		if (dlock_process_gives_way())
			return;
		now = dlock_monotonic_now();
		next = Min(next, dlock_notify_next());
		if (next != DLOCK_NO_DEADLINE)
			sent_at = now;
		else if (now - sent_at >= DLOCK_IDLE_MS * 1000)
			return;
		else
			next = sent_at + DLOCK_IDLE_MS * 1000;
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
						 dlock_milliseconds_until(next), PG_WAIT_EXTENSION);
	}
}

/*
 * What is dead when it begins is vacuumed; should that fail, the next such
 * process comes after as many more dead rows.
 */
void
dlock_vacuum_main(Datum arg)
{
	my_space = dlock_process_begin(DLOCK_VACUUM);
	if (my_space == NULL)
		return;
	before_shmem_exit(resign, Int32GetDatum(DLOCK_VACUUM));
	pg_atomic_write_u32(&my_space->dead_rows, 0);
	pgstat_report_activity(STATE_RUNNING, NULL);
	pg_atomic_write_u32(&my_space->vacuum_at, dlock_rows_vacuum(my_space,
															   dlock_process_signals));
}
