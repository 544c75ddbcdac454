/*-------------------------------------------------------------------------
 *
 * load.c
 *	  Loading the tables of leases.
 *
 * See "Loading" in src/README.  A caller loads up to DLOCK_ROWS_AT_ONCE rows
 * of each table.  If there are more, the worker loads them, because a caller
 * can run out of time.  If there is no worker, or if it has failed, the caller
 * loads all rows, and meets the worker's error or the locked table itself.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"	/* in 19, get_database_name() */
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/wait_event.h"

#include "tables/shape.h"

/* How many times to ask standbys before the ttls begin, if answers are slow */
#define MAX_QUORUM_WAITS	3

#define STEP_SIZE			(512 * 1024)	/* bytes per step, about */
#define LOOK_MS				1000	/* between checks that there is a worker */
#define NO_WORKER_MS		3000	/* how long callers wait for a worker */
#define WORKER_TURN_MS		1000	/* after this, the worker unlocks tables */
#define TELL_MS				500 /* longer waits for a lock are logged */
#define SILENCE_MS			60000	/* between log messages about such waits */
#define MAX_LOCK_POLL_MS	50

/*
 * Begin the ttls of the loaded leases.  Returns false if "until" passes first.
 *
 * If a lease needs standbys, wait until they acknowledge a record that is
 * written now.  A replaced server gets no answer, and so honours no lease.
 * The ttls count from a time before the write, because this server may be
 * replaced once standbys have the record.  If the answer takes more than a
 * quarter of the least ttl, ask again, so that leases keep most of their ttl.
 */
static bool
begin_ttls(DlockSpace *space, uint64 until)
{
	DlockLease *lease = NULL;
	int			highest = SYNCHRONOUS_COMMIT_OFF;
	int64		least_ttl = PG_INT64_MAX;
	uint64		confirmed = 0;

	/* calls that return a loaded ticket wait until this record is durable */
	if (space->leases.length > 0)
		pg_atomic_write_u64(&space->loaded_at, compat_log_message("dlock"));
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	while ((lease = dlock_lease_next(space, lease)) != NULL)
	{
		int			durability = dlock_lease_durability(lease);

		highest = Max(highest, durability);
		if (durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE)
			least_ttl = Min(least_ttl, dlock_lease_ttl(lease));
	}
	LWLockRelease(&space->lease_lock);
	InvalidateCatalogSnapshot();
	for (int i = 0; i < MAX_QUORUM_WAITS; i++)
	{
		confirmed = dlock_monotonic_now();
		if (highest < SYNCHRONOUS_COMMIT_REMOTE_WRITE)
			break;
		if (!dlock_quorum_wait(space, highest, confirmed, until))
			return false;
		if ((int64) (dlock_monotonic_now() - confirmed) < least_ttl / 4)
			break;
	}
	dlock_lease_begin_anew(space, confirmed);
	return true;
}

static void
tell_of_locked_table(int level, const char *name, const LOCKTAG *tag)
{
	ereport(level,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("cannot read table \"%s\" of database \"%s\", as it is locked",
					name, get_database_name(MyDatabaseId)),
			 errdetail("Process %d needs it to read the leases from before the start of the server. It is locked by: %s.",
					   MyProcPid,
					   dlock_describe_holders(tag, AccessShareLock)),
			 errhint("End that transaction; a prepared one with COMMIT PREPARED or ROLLBACK PREPARED: see the view pg_prepared_xacts.")));
}

static void
tell_of_loader(const LOCKTAG *tag)
{
	ereport(LOG,
			(errmsg("the tables of leases of database \"%s\" are still being read",
					get_database_name(MyDatabaseId)),
			 errdetail("Process %d waits for: %s.", MyProcPid,
					   dlock_describe_holders(tag, ExclusiveLock)),
			 errhint("See its wait_event in pg_stat_activity: if it is SyncRep, the synchronous standbys have to answer first.")));
}

/* Log a wait of take_lock(), at most once in SILENCE_MS for all processes. */
static void
log_lock(DlockSpace *space, const char *name, const LOCKTAG *tag)
{
	uint64		now = dlock_monotonic_now();
	uint64		told_at = pg_atomic_read_u64(&space->lock_told_at);

	if ((told_at != 0 && now - told_at < SILENCE_MS * 1000) ||
		!pg_atomic_compare_exchange_u64(&space->lock_told_at, &told_at, now))
		return;
	if (name)
		tell_of_locked_table(LOG, name, tag);
	else
		tell_of_loader(tag);
}

/* Apply lock_timeout as PostgreSQL does. */
static void
check_lock_timeout(uint64 start, const char *detail)
{
	if (LockTimeout > 0 &&
		dlock_monotonic_now() - start >= (uint64) LockTimeout * 1000)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("canceling statement due to lock timeout"),
				 errdetail_internal("%s", detail)));
}

/*
 * Take a heavyweight lock, a table's or, if "name" is NULL, the loader's.
 * Polls, and returns false if "until" passes.  Without a timeout, joins
 * PostgreSQL's queue after TELL_MS, because deadlocks are found there.
 */
static bool
take_lock(DlockSpace *space, const char *name, const LOCKTAG *tag,
		  LOCKMODE mode, uint64 until)
{
	uint64		start = dlock_monotonic_now();
	long		pause = 1;

	while (LockAcquire(tag, mode, false, true) == LOCKACQUIRE_NOT_AVAIL)
	{
		uint64		now = dlock_monotonic_now();

		if (now >= until)
			return false;
		check_lock_timeout(start, name ?
						   _("A table of dlock is locked by another transaction.") :
						   _("Another process is still reading the tables of leases."));
		if (now - start >= TELL_MS * 1000)
		{
			log_lock(space, name, tag);
			if (until == DLOCK_NO_DEADLINE && LockTimeout == 0)
			{
				(void) LockAcquire(tag, mode, false, false);
				break;
			}
		}
		/* the catalog snapshot would hold vacuum back */
		InvalidateCatalogSnapshot();
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 pause, PG_WAIT_LOCK | tag->locktag_type);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		pause = Min(pause * 2, MAX_LOCK_POLL_MS);
	}
	/* as after any lock on a relation */
	AcceptInvalidationMessages();
	return true;
}

static bool
lock_table(DlockSpace *space, const char *name, uint64 until)
{
	LOCKTAG		tag;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, dlock_relation(space, name));
	return take_lock(space, name, &tag, AccessShareLock, until);
}

static void
unlock_table(DlockSpace *space, const char *name)
{
	UnlockRelationOid(dlock_relation(space, name), AccessShareLock);
}

/* Load dlock_slots, as others may, too.  Returns false if "until" passes. */
static bool
load_slots(DlockSpace *space, uint64 until)
{
	if (likely(pg_atomic_read_u32(&space->slots_loaded) != 0))
		return true;
	if (!lock_table(space, "dlock_slots", until))
		return false;
	dlock_slots_read(space);
	unlock_table(space, "dlock_slots");
	(void) pg_atomic_exchange_u32(&space->slots_loaded, 1);
	dlock_queue_unsettle(space);
	return true;
}

/*
 * Load the tables, which the caller has locked.  Returns false if, after a
 * step, rows are left and "rows_until" has passed, or if standbys have not
 * answered by "standbys_until".
 */
static bool
load_tables(DlockSpace *space, uint64 rows_until, uint64 standbys_until)
{
	/* each step reuses the memory of the step before */
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "dlock load", STEP_SIZE,
												  STEP_SIZE, 2 * STEP_SIZE);
	DlockStoredRows rows = {
		.rows = palloc(DLOCK_ROWS_AT_ONCE * sizeof(DlockStored)),
		.room = DLOCK_ROWS_AT_ONCE
	};
	bool		done = pg_atomic_read_u32(&space->loaded) != 0;

	while (!done)
	{
		MemoryContext old_context = MemoryContextSwitchTo(context);
		int			part = space->loading.part;

		CHECK_FOR_INTERRUPTS();
		if (part != DLOCK_LOAD_GRANTS)
			dlock_load_some(space, part == DLOCK_LOAD_LEASES ?
							DLOCK_TABLE_LEASES : DLOCK_TABLE_QUEUE, &rows);
		MemoryContextSwitchTo(old_context);
		MemoryContextReset(context);
		if (part == DLOCK_LOAD_GRANTS)
		{
			/* make grants that a crash after a row's removal prevented */
			dlock_queue_resume(space);
			/* if this process gives up, the worker waits for standbys */
			if (space->leases.length > 0)
				(void) dlock_worker_wake(space);
			if (!begin_ttls(space, standbys_until))
				break;
			pg_atomic_write_u32(&space->loaded, 1);
			ConditionVariableBroadcast(&space->load_changed);
			done = true;
		}
		else if (!rows.complete && dlock_monotonic_now() >= rows_until)
			break;
	}
	MemoryContextDelete(context);
	pfree(rows.rows);
	return done;
}

/* The tag of the loader's lock, heavyweight so that deadlocks are detected */
static LOCKTAG
load_tag(DlockSpace *space)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, dlock_relation(space, "dlock_queue"),
					   0, 0);
	return tag;
}

/*
 * Load, unless another process has loaded.  "until" limits the waits for locks
 * and the reading of rows, and "standbys_until" limits the wait for standbys.
 */
static bool
load(DlockSpace *space, uint64 until, uint64 standbys_until)
{
	LOCKTAG		tag = load_tag(space);
	bool		done = false;

	if (!load_slots(space, until) || !lock_table(space, "dlock_queue", until))
		return false;
	if (lock_table(space, "dlock_queue_lease", until))
	{
		if (take_lock(space, NULL, &tag, ExclusiveLock, until))
		{
			dlock_remove_unused_spaces(&space->key, false);
			done = load_tables(space, until, standbys_until);
			(void) LockRelease(&tag, ExclusiveLock, false);
		}
		unlock_table(space, "dlock_queue_lease");
	}
	unlock_table(space, "dlock_queue");
	return done;
}

/* Raise 55P03 if a table cannot be locked now. */
static void
check_lockable(DlockSpace *space)
{
	static const char *const tables[] = {
		"dlock_slots", "dlock_queue", "dlock_queue_lease"
	};

	for (int i = 0; i < (int) lengthof(tables); i++)
	{
		LOCKTAG		tag;

		SET_LOCKTAG_RELATION(tag, MyDatabaseId,
							 dlock_relation(space, tables[i]));
		if (LockAcquire(&tag, AccessShareLock, false,
						true) == LOCKACQUIRE_NOT_AVAIL)
			tell_of_locked_table(ERROR, tables[i], &tag);
		(void) LockRelease(&tag, AccessShareLock, false);
	}
}

/*
 * Load in the worker.  Returns false if the worker must call again.  Raises
 * 55P03 if a table is still locked after WORKER_TURN_MS.  Between calls the
 * tables are unlocked, so that DROP EXTENSION need not wait until standbys
 * answer.  But the worker keeps the loader's lock.
 */
bool
dlock_load(DlockSpace *space)
{
	uint64		until = dlock_monotonic_now() + WORKER_TURN_MS * 1000;
	LOCKTAG		tag = load_tag(space);
	LockAcquireResult kept = LockAcquire(&tag, ExclusiveLock, true, true);
	volatile bool done = false;
	volatile bool failed = true;

	if (kept > LOCKACQUIRE_OK)	/* since the last call */
		(void) LockRelease(&tag, ExclusiveLock, true);
	PG_TRY();
	{
		done = load(space, until, until);
		if (!done)
			check_lockable(space);
		failed = false;
	}
	PG_FINALLY();
	{
		if (kept != LOCKACQUIRE_NOT_AVAIL && (done || failed))
			(void) LockRelease(&tag, ExclusiveLock, true);
	}
	PG_END_TRY();
	return done;
}

/* Raise 55P03 for a timeout that passed before the rows were loaded. */
void
dlock_load_raise_timeout(DlockSpace *space, const DlockKey *key)
{
	bool		is_read = space->loading.part == DLOCK_LOAD_GRANTS;

	check_lockable(space);
	ereport(ERROR,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("could not acquire lock \"%.*s\" within its timeout",
					key->length, key->name),
			 is_read ?
			 errdetail("The leases have been read since the server was started. They take effect once the synchronous standbys have answered, and these have not.") :
			 errdetail("The tables of leases are still being read, since the server was started."),
			 is_read ?
			 errhint("See synchronous_standby_names, and pg_stat_replication for the standbys that are there.") :
			 errhint("It is not known yet whether the lock is free. Try again, or with a longer timeout.")));
}

/* After the worker has failed to load, make waiting callers load. */
void
dlock_load_failed(DlockSpace *space)
{
	pg_atomic_fetch_add_u32(&space->load_failures, 1);
	ConditionVariableBroadcast(&space->load_changed);
}

/*
 * Wait for the worker to load, at most until "until".  Returns false if the
 * worker does not come or has failed.  Raises 55P03 after lock_timeout.
 */
static bool
wait_for_worker(DlockSpace *space, uint64 until)
{
	uint32		failures = pg_atomic_read_u32(&space->load_failures);
	uint64		start = dlock_monotonic_now();
	uint64		seen_at = start;	/* when a worker was last seen */
	bool		comes = true;

	ConditionVariablePrepareToSleep(&space->load_changed);
	while (pg_atomic_read_u32(&space->loaded) == 0)
	{
		uint64		now = dlock_monotonic_now();
		long		pause = LOOK_MS;

		if (dlock_office_holder(space, DLOCK_WORKER) >= 0)
			seen_at = now;
		if (!dlock_space_is_current(space) || !dlock_worker_wake(space) ||
			pg_atomic_read_u32(&space->load_failures) != failures ||
			now - seen_at >= NO_WORKER_MS * 1000)
			comes = false;
		if (!comes || now >= until)
			break;
		check_lock_timeout(start, _("The background worker of dlock is still reading the tables of leases."));
		if (LockTimeout > 0)
			pause = Min(pause, LockTimeout);
		pause = (long) Min((uint64) pause, (until - now + 999) / 1000);
		(void) ConditionVariableTimedSleep(&space->load_changed, pause,
										   PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
	return comes;
}

/* Load in a caller.  lock_timeout limits the wait for standbys, too. */
static bool
load_as_caller(DlockSpace *space, uint64 until, uint64 standbys_until)
{
	uint64		start = dlock_monotonic_now();

	if (LockTimeout > 0)
		standbys_until = Min(standbys_until,
							 start + (uint64) LockTimeout * 1000);
	if (load(space, until, standbys_until))
		return true;
	check_lock_timeout(start, _("The tables of leases are still being read, or the synchronous standbys have not answered."));
	return false;
}

/* Wait for the worker, or load here.  Returns false if "until" passes. */
static bool
wait_for_load(DlockSpace *space, uint64 until)
{
	if (wait_for_worker(space, until))
		return pg_atomic_read_u32(&space->loaded) != 0;
	return load_as_caller(space, until, until);
}

static uint64
deadline_of(DlockTimeout timeout)
{
	return timeout == DLOCK_WAIT_FOREVER ? DLOCK_NO_DEADLINE :
		Min(dlock_monotonic_now() + (uint64) timeout, DLOCK_NO_DEADLINE);
}

/* Load, or wait for the worker to load.  Returns false after the timeout. */
bool
dlock_load_all(DlockSpace *space, DlockTimeout timeout)
{
	uint64		until;

	if (likely(pg_atomic_read_u32(&space->loaded) != 0))
		return true;
	until = deadline_of(timeout);
	return load_as_caller(space, dlock_monotonic_now(), until) ||
		wait_for_load(space, until);
}

/* Load and return this database's space, for calls on leases or all locks. */
DlockSpace *
dlock_loaded_space(void)
{
	DlockSpace *space = dlock_current_space();

	(void) dlock_load_all(space, DLOCK_WAIT_FOREVER);
	return space;
}

/*
 * Load the rows that a session's request for a name needs.  If no row has the
 * name, the request needs no row, because no row is added before all rows are
 * loaded (I22).  Returns false after the timeout.  If rows were searched for
 * the name, sets *leased (if not NULL) to the result.
 *
 * This process loads if a step of each table is enough and all locks are free;
 * otherwise the worker loads.  dlock_slots is loaded in any case.
 */
bool
dlock_load_name(DlockSpace *space, const DlockKey *key, DlockTimeout timeout,
				bool *leased)
{
	uint64		now;
	uint64		until;
	bool		has;

	if (likely(pg_atomic_read_u32(&space->loaded) != 0))
		return true;
	until = deadline_of(timeout);
	now = dlock_monotonic_now();
	if (load(space, now, now))
		return true;
	(void) dlock_worker_wake(space);
	if (!lock_table(space, "dlock_queue", until))
		return pg_atomic_read_u32(&space->loaded) != 0;
	has = dlock_rows_have_name(space, key);
	unlock_table(space, "dlock_queue");
	if (leased)
		*leased = has;
	return has ? wait_for_load(space, until) : load_slots(space, until);
}
