/*-------------------------------------------------------------------------
 *
 * load.c
 *	  Reading the tables of leases back into memory.
 *
 * After a restart, a crash or a promotion every lease is put back with its full
 * ttl, and every ticket in its place.  Until that is done no call goes on that
 * could see a part of it; an error leaves what was put back so far, and the next
 * attempt goes on behind it.
 *
 * A session that asks for a name does not see what is put back under others.
 * While the tables are not loaded nothing is written to them (I22), so if no
 * row has its name there is nothing of it to come, and it goes on at once.
 *
 * The worker does it, so that it goes on when a caller has no time to wait.  The
 * first caller itself does what takes no longer than to start a worker, or
 * where none can be had, or the worker has failed: so he meets the error, or
 * waits for the lock on a table, that it has met, and with his own timeouts.
 *
 * The tables are locked as by any reader, and then an object of PostgreSQL's lock
 * manager, that there is one who loads at a time: so whoever has that waits for no
 * lock any more, and is waited for where deadlocks are found.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "shared/shared.h"
#include "tables/shape.h"
#include "tables/tables.h"

/* So often standbys are asked for an answer, if they take long */
#define MAX_QUORUM_WAITS	3

#define STEP_SIZE			(512 * 1024)	/* bytes that they take, about */
#define SMALL_BLOCKS		32		/* are read while a worker would start */
#define LOOK_MS				1000	/* between looks for a worker that loads */
#define NO_WORKER_MS		3000	/* without any, after which none will come */
#define WORKER_LOCK_MS		1000	/* the worker waits for a lock that long */
#define TELL_MS				1000	/* of a lock on a table, after a wait */
#define SILENCE_MS			60000	/* between two messages about that */
#define MAX_LOCK_POLL_MS	50

/*
 * Wait for the standbys to acknowledge a record written now, if there are
 * leases that they count for: a server that was cut off from them, and
 * replaced, must not honour what it finds in its tables.  False where they have
 * not in the time that there is.  *confirmed is the moment from which on leases
 * count: before the record was written, as this server may be replaced as soon
 * as they have it.
 *
 * An answer that took longer than a quarter of a ttl leaves the leases less than
 * their full ttl, so another one is asked for; but where answers always take so
 * long, there is no sense in that.
 */
static bool
wait_for_quorum(DlockSpace *space, uint64 until, uint64 *confirmed)
{
	int64		ttl;
	int			durability = dlock_lease_greatest_durability(space, &ttl);

	*confirmed = dlock_monotonic_now();
	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE)
		return true;
	InvalidateCatalogSnapshot();
	for (int i = 0; i < MAX_QUORUM_WAITS; i++)
	{
		*confirmed = dlock_monotonic_now();
		if (!dlock_quorum_wait(space, durability, *confirmed, until))
			return false;
		if ((int64) (dlock_monotonic_now() - *confirmed) < ttl / 4)
			break;
	}
	return true;
}

/*
 * From now on leases count.  Where a caller has no time to wait for standbys,
 * the worker does so in its place.
 */
static bool
begin_anew(DlockSpace *space, uint64 until)
{
	volatile bool begun = false;

	PG_TRY();
	{
		uint64		confirmed;

		/* who asks for what was put back waits until that is durable */
		if (space->leases.length > 0)
			pg_atomic_write_u64(&space->loaded_at,
								compat_log_message("dlock"));
		begun = wait_for_quorum(space, until, &confirmed);
		if (begun)
			dlock_lease_begin_anew(space, confirmed);
	}
	PG_CATCH();
	{
		(void) dlock_worker_wake(space);
		PG_RE_THROW();
	}
	PG_END_TRY();
	if (!begun)
		(void) dlock_worker_wake(space);
	return begun;
}

/*
 * Locks on the tables
 */

/*
 * Say who keeps us from reading a table: to the log, or, where that was to be an
 * error, to whoever gets it.
 */
static void
tell_of_lock(int level, const char *name, Oid table)
{
	ereport(level,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("cannot read table \"%s\" of database \"%s\", as it is locked",
					name, get_database_name(MyDatabaseId)),
			 errdetail("Process %d needs it to read the leases from before the start of the server. It is locked by: %s.",
					   MyProcPid,
					   dlock_describe_holders(table, AccessShareLock)),
			 errhint("End that transaction; a prepared one with COMMIT PREPARED or ROLLBACK PREPARED: see the view pg_prepared_xacts.")));
}

/* The object whose lock keeps others from loading */
static LOCKTAG
load_tag(DlockSpace *space)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, dlock_relation(space, "dlock_queue"),
					   0, 0);
	return tag;
}

/* Who loads already, and has the lock for that?  0: nobody */
static int
find_loader(DlockSpace *space)
{
	int			loader = (int) pg_atomic_read_u32(&space->loader);
	LOCKTAG		tag;

	if (loader == 0)
		return 0;
	tag = load_tag(space);
	return dlock_is_locked_by(loader, &tag) ? loader : 0;
}

/* It takes a while, and nobody but standbys may have to do anything. */
static void
tell_of_loader(int loader)
{
	ereport(LOG,
			(errmsg("the tables of leases of database \"%s\" are still being read",
					get_database_name(MyDatabaseId)),
			 errdetail("Process %d does so, and process %d waits for it.",
					   loader, MyProcPid),
			 errhint("See its wait_event in pg_stat_activity: if it is SyncRep, the synchronous standbys have to answer first.")));
}

/* Now and then, one of those who wait tells the log. */
static bool
is_time_to_tell(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	uint64		told_at = pg_atomic_read_u64(&space->lock_told_at);

	return (told_at == 0 || now - told_at >= SILENCE_MS * 1000) &&
		pg_atomic_compare_exchange_u64(&space->lock_told_at, &told_at, now);
}

/* A lock on a table is waited for, or with NULL for its name the one to load. */
static void
log_lock(DlockSpace *space, const char *name, const LOCKTAG *tag)
{
	int			loader;

	/* before that, as all locks of the server are copied to find who loads */
	if ((name == NULL && pg_atomic_read_u32(&space->loader) == 0) ||
		!is_time_to_tell(space))
		return;
	loader = find_loader(space);
	if (loader != 0)
		tell_of_loader(loader);
	else if (name)
		tell_of_lock(LOG, name, tag->locktag_field2);
}

/* As where a table's lock is waited for */
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
 * Take a lock, as any statement does: but where a time is set for that, no longer;
 * false then.  Where it takes long, the log is told why.
 *
 * A wait without an end is one in PostgreSQL's queue, after a while: there,
 * deadlocks are found.
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
		/* which would hold vacuum back */
		InvalidateCatalogSnapshot();
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 pause, PG_WAIT_LOCK | tag->locktag_type);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		pause = Min(pause * 2, MAX_LOCK_POLL_MS);
	}
	/* as wherever a relation is locked */
	AcceptInvalidationMessages();
	return true;
}

/* Lock a table, as readers do. */
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

/*
 * Have the slots that are set put into shared memory, before anything is asked of
 * a lock; false where the table could not be locked by then.  Several may do so at
 * one time.
 */
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
 * Loading
 */

/* Until when a step may take, in monotonic microseconds */
typedef struct Patience
{
	uint64		locks;			/* for locks on the tables, */
	uint64		rows;			/* for what is read, but for the first step, */
	uint64		standbys;		/* for their answer */
} Patience;

/* Read the tables, which are locked.  False where the time was too short. */
static bool
load_tables(DlockSpace *space, const Patience *patience)
{
	/* what a step needs is kept for the next one, and not given back meanwhile */
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
			/*
			 * Who waits is granted what became free with the last release
			 * written.
			 */
			dlock_queue_resume(space);
			if (!begin_anew(space, patience->standbys))
				break;
			pg_atomic_write_u32(&space->loaded, 1);
			ConditionVariableBroadcast(&space->load_changed);
			done = true;
		}
		else if (dlock_monotonic_now() >= patience->rows)
			break;
	}
	MemoryContextDelete(context);
	pfree(rows.rows);
	return done;
}

/* The same for tables that others may be about to load, too */
static bool
load_alone(DlockSpace *space, const Patience *patience)
{
	LOCKTAG		tag = load_tag(space);
	volatile bool done = false;

	if (!take_lock(space, NULL, &tag, ExclusiveLock, patience->locks))
		return false;
	dlock_remove_unused_spaces(&space->key);
	pg_atomic_write_u32(&space->loader, (uint32) MyProcPid);
	PG_TRY();
	{
		done = load_tables(space, patience);
	}
	PG_FINALLY();
	{
		pg_atomic_write_u32(&space->loader, 0);
	}
	PG_END_TRY();
	(void) LockRelease(&tag, ExclusiveLock, false);
	return done;
}

/*
 * Put back what the tables keep, unless somebody has.  False where the time was
 * too short: but for locks that could not be had, there is less left to do then.
 */
static bool
load(DlockSpace *space, const Patience *patience)
{
	bool		done = false;

	if (!load_slots(space, patience->locks) ||
		!lock_table(space, "dlock_queue", patience->locks))
		return false;
	if (lock_table(space, "dlock_queue_lease", patience->locks))
	{
		done = load_alone(space, patience);
		unlock_table(space, "dlock_queue_lease");
	}
	unlock_table(space, "dlock_queue");
	if (done && space->leases.length > 0)
		(void) dlock_worker_wake(space);
	return done;
}

/* Raise an error if a table cannot be locked now. */
static void
check_lockable(DlockSpace *space, const char *name)
{
	Oid			table = dlock_find_relation(space, name);

	if (!OidIsValid(table))
		return;
	if (!ConditionalLockRelationOid(table, AccessShareLock))
		tell_of_lock(ERROR, name, table);
	UnlockRelationOid(table, AccessShareLock);
}

/*
 * For the worker: put back what the tables keep.  A lock on them is an error
 * after a while, as callers are to meet it then; but not that of a session that
 * loads, in whose place we go on should it give up.
 */
void
dlock_load(DlockSpace *space)
{
	Patience	patience = {
		.rows = DLOCK_NO_DEADLINE,
		.standbys = DLOCK_NO_DEADLINE
	};

	for (;;)
	{
		int			loader;

		patience.locks = dlock_monotonic_now() + WORKER_LOCK_MS * 1000;
		if (load(space, &patience))
			break;
		loader = find_loader(space);
		if (loader != 0)
		{
			if (is_time_to_tell(space))
				tell_of_loader(loader);
			continue;
		}
		check_lockable(space, "dlock_slots");
		check_lockable(space, "dlock_queue");
		check_lockable(space, "dlock_queue_lease");
	}
}

/*
 * A request's time has passed before all was loaded that it has to do with: say
 * what that waits for.
 */
void
dlock_load_raise_timeout(DlockSpace *space, const DlockKey *key)
{
	bool		is_read = space->loading.part == DLOCK_LOAD_GRANTS;

	check_lockable(space, "dlock_slots");
	check_lockable(space, "dlock_queue");
	check_lockable(space, "dlock_queue_lease");
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

/* The worker could not load: who waits for it tries on his own. */
void
dlock_load_failed(DlockSpace *space)
{
	pg_atomic_fetch_add_u32(&space->load_failures, 1);
	ConditionVariableBroadcast(&space->load_changed);
}

/*
 * Are there so few rows that a worker's start would take longer than they?  Who
 * cannot even look, for a lock, has not.
 */
static bool
is_small(DlockSpace *space)
{
	static const char *const tables[] = {"dlock_queue_lease", "dlock_queue"};
	BlockNumber blocks = 0;

	for (int i = 0; i < (int) lengthof(tables); i++)
	{
		Oid			id = dlock_relation(space, tables[i]);
		Relation	table;

		if (!ConditionalLockRelationOid(id, AccessShareLock))
			return false;
		table = try_relation_open(id, NoLock);
		if (table == NULL)
		{
			/* dropped meanwhile, as who waits for it finds out */
			UnlockRelationOid(id, AccessShareLock);
			return false;
		}
		blocks += RelationGetNumberOfBlocks(table);
		relation_close(table, AccessShareLock);
	}
	return blocks <= SMALL_BLOCKS;
}

typedef enum WorkerLoad
{
	WORKER_HAS_LOADED,
	WORKER_TAKES_LONGER,
	WORKER_DOES_NOT				/* none can be had, or it has failed */
} WorkerLoad;

/*
 * Wait until the worker has loaded, or until then.
 */
static WorkerLoad
wait_for_worker(DlockSpace *space, uint64 until)
{
	uint32		failures = pg_atomic_read_u32(&space->load_failures);
	uint64		start = dlock_monotonic_now();
	uint64		seen_at = start;	/* when a worker was last there */
	WorkerLoad	result = WORKER_HAS_LOADED;

	ConditionVariablePrepareToSleep(&space->load_changed);
	while (pg_atomic_read_u32(&space->loaded) == 0)
	{
		uint64		now = dlock_monotonic_now();
		long		pause = LOOK_MS;

		if (dlock_office_is_held(space, DLOCK_WORKER))
			seen_at = now;
		if (!dlock_space_is_current(space) || !dlock_worker_wake(space) ||
			pg_atomic_read_u32(&space->load_failures) != failures ||
			now - seen_at >= NO_WORKER_MS * 1000)
		{
			result = WORKER_DOES_NOT;
			break;
		}
		if (now >= until)
		{
			result = WORKER_TAKES_LONGER;
			break;
		}
		check_lock_timeout(start, _("The background worker of dlock is still reading the tables of leases."));
		if (LockTimeout > 0)
			pause = Min(pause, LockTimeout);
		pause = (long) Min((uint64) pause, (until - now + 999) / 1000);
		(void) ConditionVariableTimedSleep(&space->load_changed, pause,
										   PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
	return result;
}

/*
 * Wait until what the tables keep is in memory; false where it is not by then.
 * Who comes with no time at all, and without a worker, does a step of it.
 */
static bool
wait_for_load(DlockSpace *space, uint64 until)
{
	Patience	patience = {
		.locks = until,
		.rows = until,
		.standbys = until
	};

	switch (wait_for_worker(space, until))
	{
		case WORKER_HAS_LOADED:
			return true;
		case WORKER_TAKES_LONGER:
			return false;
		case WORKER_DOES_NOT:
			break;
	}
	return load(space, &patience);
}

static uint64
deadline_of(DlockTimeout timeout)
{
	return timeout == DLOCK_WAIT_FOREVER ? DLOCK_NO_DEADLINE :
		Min(dlock_monotonic_now() + (uint64) timeout, DLOCK_NO_DEADLINE);
}

/*
 * Wait until all is there that the tables keep, or read them, but no longer than
 * this; false where that was too short.
 */
bool
dlock_load_all(DlockSpace *space, DlockTimeout timeout)
{
	Patience	patience = {.rows = DLOCK_NO_DEADLINE};

	if (likely(pg_atomic_read_u32(&space->loaded) != 0))
		return true;
	patience.locks = patience.standbys = deadline_of(timeout);
	return is_small(space) ? load(space, &patience) :
		wait_for_load(space, patience.locks);
}

/*
 * The space of this database, with what its tables keep: for leases, and for
 * whoever asks for all there is.
 */
DlockSpace *
dlock_loaded_space(void)
{
	DlockSpace *space = dlock_current_space();

	(void) dlock_load_all(space, DLOCK_WAIT_FOREVER);
	return space;
}

/* Does a lease have something under this name?  *has tells; false: no time */
static bool
look_for_name(DlockSpace *space, const DlockKey *key, uint64 until, bool *has)
{
	if (!lock_table(space, "dlock_queue", until))
		return false;
	*has = dlock_rows_have_name(space, key);
	unlock_table(space, "dlock_queue");
	return true;
}

/*
 * What a session does with one name goes on as soon as what leases have under
 * that name is in memory: at once, where no row has it, as none comes before all
 * are read.  Otherwise it waits as long as it has time.  False where that has
 * passed; *leased, unless that is NULL, tells whether a row is known to have it.
 *
 * The worker loads meanwhile, as ever; what is small, and can be had without
 * any wait, the first caller reads.  What was set for locks is there in any case.
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
	now = dlock_monotonic_now();
	until = deadline_of(timeout);
	if (is_small(space))
	{
		Patience	small = {
			.locks = now,
			.rows = DLOCK_NO_DEADLINE,
			.standbys = now
		};

		if (load(space, &small))
			return true;
	}
	(void) dlock_worker_wake(space);
	if (!look_for_name(space, key, until, &has))
		return pg_atomic_read_u32(&space->loaded) != 0;
	if (leased)
		*leased = has;
	return has ? wait_for_load(space, until) : load_slots(space, until);
}
