/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  Starting the background processes of a space, and waking them.
 *
 * A space has up to three of them, each an office that one process holds at a
 * time: the worker, which writes what leases change and ends those that are
 * due; the sender of its announcements; and one that vacuums its tables and
 * goes.  Sessions ask for the worker alone; the worker sees to the others.
 *
 * None is restarted by the postmaster, which would do so for ever in a
 * database that has been dropped.  Whoever has something for one asks for it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "storage/latch.h"
#include "storage/proc.h"

#include "shared/inner.h"

#define START_MS		1000	/* that long, a start is waited for */

static const struct
{
	const char *type;			/* as pg_stat_activity shows it */
	const char *function;
}			kinds[] = {
	[DLOCK_WORKER] = {"dlock worker", "dlock_worker_main"},
	[DLOCK_SENDER] = {"dlock sender", "dlock_sender_main"},
	[DLOCK_VACUUM] = {"dlock vacuum", "dlock_vacuum_main"}
};

StaticAssertDecl(lengthof(kinds) == DLOCK_VACUUM + 1,
				 "kinds must match DlockOffice");

/* Who holds an office: a proc number, plus 1; or 0 */
static pg_atomic_uint32 *
holder(DlockSpace *space, DlockOffice office)
{
	return office == DLOCK_WORKER ? &space->worker :
		office == DLOCK_SENDER ? &space->sender : &space->vacuum;
}

/* When somebody was last asked for, to hold it */
static pg_atomic_uint64 *
asked_at(DlockSpace *space, DlockOffice office)
{
	return office == DLOCK_WORKER ? &space->worker_start :
		office == DLOCK_SENDER ? &space->sender_start : &space->vacuum_start;
}

/*
 * Become the holder of an office (I20); false if there is one.
 */
bool
dlock_office_take(DlockSpace *space, DlockOffice office)
{
	uint32		nobody = 0;

	return pg_atomic_compare_exchange_u32(holder(space, office), &nobody,
										  compat_my_procno() + 1);
}

/*
 * Let the next one come; false where this process does not hold the office.
 * What the caller looks at next was there before, or whoever brings it finds
 * the office vacant.  Raises nothing.
 */
bool
dlock_office_leave(DlockSpace *space, DlockOffice office)
{
	uint32		me = compat_my_procno() + 1;

	if (pg_atomic_read_u32(holder(space, office)) != me)
		return false;
	/* before it is vacant, as the next one's start is not to be forgotten */
	pg_atomic_write_u64(asked_at(space, office), 0);
	pg_atomic_exchange_u32(holder(space, office), 0);
	return true;
}

bool
dlock_office_is_held(DlockSpace *space, DlockOffice office)
{
	return pg_atomic_read_u32(holder(space, office)) != 0;
}

/*
 * Ask for a process to hold an office, unless somebody has just done so.
 * False where no slot is free; the next one who needs it asks again.  Raises
 * nothing.
 */
bool
dlock_office_start(DlockSpace *space, DlockOffice office)
{
	BackgroundWorker worker = {0};
	uint64		now = dlock_monotonic_now();
	uint64		last = pg_atomic_read_u64(asked_at(space, office));

	if ((last != 0 && now - last < START_MS * 1000) ||
		!pg_atomic_compare_exchange_u64(asked_at(space, office), &last, now))
		return true;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "dlock", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, kinds[office].function,
			sizeof(worker.bgw_function_name));
	snprintf(worker.bgw_name, sizeof(worker.bgw_name), "%s for database %u",
			 kinds[office].type, space->key.database);
	strlcpy(worker.bgw_type, kinds[office].type, sizeof(worker.bgw_type));
	memcpy(worker.bgw_extra, &space->key, sizeof(DlockSpaceKey));
	if (RegisterDynamicBackgroundWorker(&worker, NULL))
		return true;
	pg_atomic_write_u64(asked_at(space, office), 0);
	return false;
}

/* Wake who holds an office; false where nobody does. */
bool
dlock_office_wake(DlockSpace *space, DlockOffice office)
{
	uint32		procno = pg_atomic_read_u32(holder(space, office));

	if (procno != 0)
		SetLatch(&GetPGProcByNumber(procno - 1)->procLatch);
	return procno != 0;
}

/* Have it go who holds an office, if anybody does. */
void
dlock_office_terminate(DlockSpace *space, DlockOffice office)
{
	uint32		procno = pg_atomic_read_u32(holder(space, office));
	int			pid = procno != 0 ? GetPGProcByNumber(procno - 1)->pid : 0;

	if (pid != 0)
		(void) kill(pid, SIGTERM);
}

/*
 * There is something to do.  False where no worker is there and none can be
 * started.  Raises nothing, as exit callbacks call this, too.
 */
bool
dlock_worker_wake(DlockSpace *space)
{
	/* announcements need not wait for the worker to wake it, if it is there */
	if (dlock_has_messages(space))
		(void) dlock_office_wake(space, DLOCK_SENDER);
	return dlock_office_wake(space, DLOCK_WORKER) ||
		dlock_office_start(space, DLOCK_WORKER);
}

/*
 * Will the worker look at the journal in a moment, by itself?  The caller has
 * marked something there before, so that it finds that.
 */
bool
dlock_worker_comes(DlockSpace *space)
{
	pg_memory_barrier();
	return pg_atomic_read_u32(&space->worker_comes) != 0;
}

/*
 * There is something in the outbox, and nothing else to do.  Where nobody is there
 * to send it, the worker sees to that; a sender that goes asks for it, too, if it
 * leaves something.
 */
void
dlock_sender_wake(DlockSpace *space)
{
	if (!dlock_office_wake(space, DLOCK_SENDER))
		(void) dlock_worker_wake(space);
}

/* Nothing is left that could have to be announced: the worker may go. */
void
dlock_worker_dismiss(DlockSpace *space)
{
	(void) dlock_office_wake(space, DLOCK_WORKER);
}

/* Is there something that is not to be left to whoever comes by? */
static bool
has_work(DlockSpace *space)
{
	return space->journal.length > 0 || dlock_has_messages(space);
}

/* Is there something that a worker has to be there for, now or later? */
bool
dlock_worker_is_needed(DlockSpace *space)
{
	return has_work(space) || space->leases.length > 0;
}

/*
 * Does a session wait for a lock of this space, or watch one?  Whoever has begun
 * to, and found the worker there, is seen here once that has left its office.
 */
bool
dlock_worker_is_awaited(DlockSpace *space)
{
	if (pg_atomic_read_u32(&space->watches) > 0)
		return true;
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];
		bool		waits;

		if (pg_atomic_read_u64(&backend->session) == 0 ||
			backend->database != space->key.database)
			continue;
		SpinLockAcquire(&backend->mutex);
		waits = backend->wait_ticket != 0;
		SpinLockRelease(&backend->mutex);
		if (waits)
			return true;
	}
	return false;
}

/* Is another process of the space's database attached? */
bool
dlock_worker_has_company(DlockSpace *space)
{
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];

		if (backend != dlock_my_backend &&
			pg_atomic_read_u64(&backend->session) != 0 &&
			backend->database == space->key.database)
			return true;
	}
	return false;
}

/*
 * For every call: a worker that died, or had no slot, gets another chance; and
 * one that left, as nobody looked, comes again when a lease is due, or where an
 * announcement could be for the caller, who may listen from now on.
 */
void
dlock_worker_look(DlockSpace *space)
{
	if (likely(!dlock_worker_is_needed(space)) ||
		dlock_office_is_held(space, DLOCK_WORKER))
		return;
	if (has_work(space) ||
		pg_atomic_read_u32(&space->announced) > 0 ||
		pg_atomic_read_u32(&space->watches) > 0 ||
		dlock_monotonic_now() >= pg_atomic_read_u64(&space->next_due))
		(void) dlock_worker_wake(space);
}

/*
 * This session waits for a lock, as others can see, and a worker must be there
 * when a lease runs out (I20).
 */
void
dlock_worker_expect(DlockSpace *space)
{
	pg_memory_barrier();
	if (dlock_worker_is_needed(space) &&
		!dlock_office_is_held(space, DLOCK_WORKER))
		(void) dlock_worker_wake(space);
}
