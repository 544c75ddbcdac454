/*-------------------------------------------------------------------------
 *
 * sender.c
 *	  The sender of announcements, and the vacuum process.  These may wait for
 *	  long, but the worker must not.
 *
 * The sender ends after DLOCK_IDLE_MS without messages.  It can die at any
 * time, because unsent announcements stay in the outbox.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "pgstat.h"
#include "storage/ipc.h"
#include "tcop/tcopprot.h"

#include "shared/shared.h"
#include "tables/tables.h"
#include "worker/process.h"

/* Longest pause after an error, in ms; announcements wait until it ends */
#define MAX_RETRY_MS	100

PGDLLEXPORT void dlock_sender_main(Datum arg);
PGDLLEXPORT void dlock_vacuum_main(Datum arg);

static DlockSpace *my_space = NULL;

/* Leave the office.  If messages are left, have the worker start a sender. */
static void
leave_office(int code, Datum arg)
{
	if (dlock_office_leave(my_space, (DlockOffice) DatumGetInt32(arg)) &&
		dlock_has_messages(my_space))
		(void) dlock_worker_wake(my_space);
}

static bool
send_messages(void)
{
	return dlock_notify_send(my_space);
}

static DlockTask notify_task = {
	.what = "sending notifications",
	.perform = send_messages,
	.max_retry_ms = MAX_RETRY_MS
};

void
dlock_sender_main(Datum arg)
{
	uint64		sent_at;

	my_space = dlock_process_begin(DLOCK_SENDER, die);
	if (my_space == NULL)
		return;
	before_shmem_exit(leave_office, Int32GetDatum(DLOCK_SENDER));
	dlock_process_lock_timeout("0");
	sent_at = dlock_monotonic_now();
	for (;;)
	{
		uint64		now;
		uint64		next;

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
		dlock_process_sleep(next);
	}
}

/*
 * Vacuum the rows that are dead now.  Even if this fails, the next vacuum
 * process starts only after vacuum_at new dead rows.
 */
void
dlock_vacuum_main(Datum arg)
{
	my_space = dlock_process_begin(DLOCK_VACUUM, die);
	if (my_space == NULL)
		return;
	before_shmem_exit(leave_office, Int32GetDatum(DLOCK_VACUUM));
	pg_atomic_write_u32(&my_space->dead_rows, 0);
	pgstat_report_activity(STATE_RUNNING, NULL);
	pg_atomic_write_u32(&my_space->vacuum_at, dlock_rows_vacuum(my_space,
															   dlock_process_signals));
}
