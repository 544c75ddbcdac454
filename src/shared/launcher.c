/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  Starting and waking the background processes of a space.
 *
 * A space has up to three processes, each in an office: see DlockOffice.
 * Sessions start the worker, and the worker starts the others.  The postmaster
 * restarts none of them, because in a dropped database it would never stop.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "postmaster/bgworker.h"
#include "storage/latch.h"
#include "storage/proc.h"

#include "shared/inner.h"

#define START_MS		1000	/* minimum time between two starts */

static const struct
{
	const char *type;			/* as in pg_stat_activity */
	const char *function;
}			kinds[] = {
	[DLOCK_WORKER] = {"dlock worker", "dlock_worker_main"},
	[DLOCK_SENDER] = {"dlock sender", "dlock_sender_main"},
	[DLOCK_VACUUM] = {"dlock vacuum", "dlock_vacuum_main"}
};

StaticAssertDecl(lengthof(kinds) == DLOCK_NUM_OFFICES,
				 "kinds must match DlockOffice");

/* Take an office (I20); returns false if another process holds it. */
bool
dlock_office_take(DlockSpace *space, DlockOffice office)
{
	uint32		nobody = 0;

	return pg_atomic_compare_exchange_u32(&space->offices[office].holder,
										  &nobody, compat_my_procno() + 1);
}

/*
 * Leave an office; returns false if this process does not hold it.  After a
 * success, the caller must look for work: a process that posted work may have
 * found the office still held.  Raises nothing.
 */
bool
dlock_office_leave(DlockSpace *space, DlockOffice office)
{
	if (dlock_office_holder(space, office) != compat_my_procno())
		return false;
	/* clear it first: once the office is vacant, a successor may set it */
	pg_atomic_write_u64(&space->offices[office].asked_at, 0);
	pg_atomic_exchange_u32(&space->offices[office].holder, 0);
	return true;
}

/*
 * Start a process for an office, at most once in START_MS; returns false if no
 * slot is free.  Raises nothing.
 */
bool
dlock_office_start(DlockSpace *space, DlockOffice office)
{
	BackgroundWorker worker = {0};
	pg_atomic_uint64 *asked_at = &space->offices[office].asked_at;
	uint64		last = pg_atomic_read_u64(asked_at);
	uint64		now = dlock_monotonic_now();	/* read after "last" */

	if ((last != 0 && now - last < START_MS * 1000) ||
		!pg_atomic_compare_exchange_u64(asked_at, &last, now))
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
	pg_atomic_write_u64(asked_at, 0);
	return false;
}

/* Wake the holder of an office; returns false if there is none. */
bool
dlock_office_wake(DlockSpace *space, DlockOffice office)
{
	int			procno = dlock_office_holder(space, office);

	if (procno >= 0)
		SetLatch(&GetPGProcByNumber(procno)->procLatch);
	return procno >= 0;
}

/* The PID of an office's holder, or 0 */
int
dlock_office_pid(DlockSpace *space, DlockOffice office)
{
	int			procno = dlock_office_holder(space, office);

	return procno < 0 ? 0 : GetPGProcByNumber(procno)->pid;
}

/* Wake or start the worker; returns false if both fail.  Raises nothing. */
bool
dlock_worker_wake(DlockSpace *space)
{
	/* the sender need not wait until the worker wakes it */
	if (dlock_has_messages(space))
		(void) dlock_office_wake(space, DLOCK_SENDER);
	return dlock_office_wake(space, DLOCK_WORKER) ||
		dlock_office_start(space, DLOCK_WORKER);
}

/* Will the worker, within 10 ms, see a mark made before this call? */
bool
dlock_worker_comes(DlockSpace *space)
{
	pg_memory_barrier();
	return pg_atomic_read_u32(&space->worker_comes) != 0;
}

/*
 * Is another process of the space's database attached?  If "waits" is set,
 * only a process that waits for a lock counts.
 */
bool
dlock_worker_has_company(DlockSpace *space, bool waits)
{
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];
		bool		counts = true;

		if (backend == dlock_my_backend ||
			pg_atomic_read_u64(&backend->session) == 0 ||
			backend->database != space->key.database)
			continue;
		if (waits)
		{
			SpinLockAcquire(&backend->mutex);
			counts = backend->wait_ticket != 0;
			SpinLockRelease(&backend->mutex);
		}
		if (counts)
			return true;
	}
	return false;
}

/*
 * Each call of a session calls this (I20).  If no worker exists, start one if
 * there is work, a lease may be due, or events may have to be announced.  If
 * "waits" is set, the caller has published its wait, and any lease suffices.
 */
void
dlock_worker_look(DlockSpace *space, bool waits)
{
	if (waits)
		pg_memory_barrier();
	if (likely(!dlock_worker_is_needed(space)) ||
		dlock_office_holder(space, DLOCK_WORKER) >= 0)
		return;
	if (waits || dlock_worker_has_work(space) ||
		pg_atomic_read_u32(&space->announced) > 0 ||
		pg_atomic_read_u32(&space->watches) > 0 ||
		dlock_monotonic_now() >= pg_atomic_read_u64(&space->next_due))
		(void) dlock_worker_wake(space);
}
