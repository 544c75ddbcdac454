/*-------------------------------------------------------------------------
 *
 * load.c
 *	  Reading the tables of leases back into memory.
 *
 * After a restart, a crash or a promotion every lease is put back with its full
 * ttl, and every ticket in its place.  Until that is done no call goes on, so
 * nobody sees a part of it; an error leaves what was put back so far, and the
 * next attempt goes on from there.
 *
 * The worker does it, so that it goes on when a caller has no time to wait.  The
 * first caller itself does what takes no longer than to start a worker, or
 * where none can be had, or the worker has failed: so he meets the error, or
 * waits for the lock on a table, that it has met, and with his own timeouts.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/condition_variable.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "shared/shared.h"
#include "tables/tables.h"

/* So often standbys are asked for an answer, if they take long */
#define MAX_QUORUM_WAITS	3

#define SMALL_BLOCKS		32		/* are read while a worker would start */
#define LOOK_MS				1000	/* between looks for a worker that loads */
#define NO_WORKER_MS		3000	/* without any, after which none will come */

/* The columns of a row that was read; where null, 0 or NULL */
static int64
get_int64(const DlockStored *row, int column)
{
	return DatumGetInt64(row->values[column]);
}

static int32
get_int32(const DlockStored *row, int column)
{
	return DatumGetInt32(row->values[column]);
}

static bool
get_bool(const DlockStored *row, int column)
{
	return DatumGetBool(row->values[column]);
}

static TimestampTz
get_time(const DlockStored *row, int column)
{
	return row->nulls[column] ? 0 : DatumGetTimestampTz(row->values[column]);
}

static int64
get_interval(const DlockStored *row, int column)
{
	return row->nulls[column] ? 0 :
		DatumGetIntervalP(row->values[column])->time;
}

static char *
get_text(const DlockStored *row, int column)
{
	return row->nulls[column] ? NULL : TextDatumGetCString(row->values[column]);
}

static Oid
get_oid(const DlockStored *row, int column)
{
	return DatumGetObjectId(row->values[column]);
}

/* Rows that came with a copy are left out, and whoever wonders can read why. */
static void
log_foreign(const DlockStoredRows *rows, const char *table)
{
	if (rows->num_foreign == 0)
		return;
	ereport(LOG,
			(errmsg("left out %llu rows of table \"%s\", which belong to another server or database",
					(unsigned long long) rows->num_foreign, table),
			 errdetail("This is database %u of system %llu; the first of them is of database %u of system %llu.",
					   MyDatabaseId, (unsigned long long) GetSystemIdentifier(),
					   rows->foreign_database,
					   (unsigned long long) rows->foreign_system),
			 errhint("Leases do not come along with a copy, or with pg_upgrade: open them again.")));
}

static void
load_leases(DlockSpace *space)
{
	DlockStoredRows rows;

	dlock_rows_read(space, DLOCK_TABLE_LEASES, &rows);
	log_foreign(&rows, "dlock_queue_lease");
	for (uint64 i = 0; i < rows.count; i++)
	{
		const DlockStored *row = &rows.rows[i];
		int			before = dlock_record_prepare();
		DlockLease *lease;

		if (dlock_lease_restored(space, get_int64(row, DLOCK_LEASE_LEASE)) == NULL)
		{
			lease = dlock_lease_make(space, get_interval(row, DLOCK_LEASE_TTL),
									 get_interval(row, DLOCK_LEASE_DELAY), false,
									 get_text(row, DLOCK_LEASE_INFO));
			lease->number = get_int64(row, DLOCK_LEASE_LEASE);
			lease->role = get_oid(row, DLOCK_LEASE_ROLE);
			lease->role_name = *DatumGetName(row->values[DLOCK_LEASE_ROLE_NAME]);
			lease->opened_at = get_time(row, DLOCK_LEASE_OPENED_AT);
			lease->durability = get_int32(row, DLOCK_LEASE_DURABILITY);
			dlock_lease_restore(lease, get_bool(row, DLOCK_LEASE_DELAYED));
		}
		dlock_record_unuse(before);
	}
}

/*
 * Who waits is granted what became free with the last release written.  No
 * time has passed for what was put back, were it by an earlier attempt.
 */
static void
resume_queues(DlockSpace *space, const DlockStoredRows *rows)
{
	dlock_lease_hold_time(space);
	for (uint64 i = 0; i < rows->count; i++)
	{
		DlockKey	key;
		char	   *name = get_text(&rows->rows[i], DLOCK_QUEUE_NAME);

		dlock_key_fill(&key, space, name, strlen(name));
		dlock_queue_resume(&key);
	}
}

static void
load_tickets(DlockSpace *space)
{
	DlockStoredRows rows;

	dlock_rows_read(space, DLOCK_TABLE_QUEUE, &rows);
	log_foreign(&rows, "dlock_queue");
	for (uint64 i = 0; i < rows.count; i++)
	{
		const DlockStored *row = &rows.rows[i];
		int64		number = get_int64(row, DLOCK_QUEUE_TICKET);
		int			before = dlock_record_prepare();
		char	   *name = get_text(row, DLOCK_QUEUE_NAME);
		DlockRequest request;
		bool		single = get_interval(row, DLOCK_QUEUE_TTL) > 0;
		DlockLeaseTicket *ticket;

		memset(&request, 0, offsetof(DlockRequest, key));
		dlock_key_fill(&request.key, space, name, strlen(name));
		request.scope = DLOCK_LEASE;
		request.mode = dlock_mode_by_name(get_text(row, DLOCK_QUEUE_MODE));
		request.slots = get_int32(row, DLOCK_QUEUE_SLOTS);
		request.permits = get_int32(row, DLOCK_QUEUE_PERMITS);
		request.owner = get_text(row, DLOCK_QUEUE_OWNER);
		request.info = get_text(row, DLOCK_QUEUE_INFO);
		request.channel = get_text(row, DLOCK_QUEUE_CHANNEL);
		if (single)
		{
			request.lease = dlock_lease_make(space, get_interval(row, DLOCK_QUEUE_TTL),
											 get_interval(row, DLOCK_QUEUE_DELAY),
											 true, NULL);
			request.lease->number = number;
			request.lease->role = get_oid(row, DLOCK_QUEUE_ROLE);
			request.lease->role_name =
				*DatumGetName(row->values[DLOCK_QUEUE_ROLE_NAME]);
			request.lease->opened_at = get_time(row, DLOCK_QUEUE_ENQUEUED_AT);
			request.lease->durability = get_int32(row, DLOCK_QUEUE_DURABILITY);
		}
		else
			request.lease = dlock_lease_restored(space,
												 get_int64(row, DLOCK_QUEUE_LEASE));

		/* the worker removes the rows of what ended with its lease */
		if (request.lease &&
			(get_bool(row, DLOCK_QUEUE_GRANTED) || !request.lease->delayed) &&
			!dlock_lease_ticket_is_restored(space, number))
		{
			ticket = dlock_lease_ticket_make(space, &request);
			ticket->ticket.number = number;
			ticket->ticket.role = get_oid(row, DLOCK_QUEUE_ROLE);
			ticket->ticket.enqueued_at = get_time(row, DLOCK_QUEUE_ENQUEUED_AT);
			ticket->ticket.granted_at = get_time(row, DLOCK_QUEUE_GRANTED_AT);
			ticket->durability = get_int32(row, DLOCK_QUEUE_DURABILITY);
			dlock_lease_ticket_restore(ticket,
									   get_bool(row, DLOCK_QUEUE_GRANTED),
									   get_bool(row, DLOCK_QUEUE_DELAYED));
		}
		dlock_record_unuse(before);
	}
	resume_queues(space, &rows);
}

/*
 * Wait for the standbys to acknowledge a record written now, if there are
 * leases that they count for: a server that was cut off from them, and
 * replaced, must not honour what it finds in its tables.  Returns the moment
 * from which on they count: before the record was written, as this server may
 * be replaced as soon as they have it.
 *
 * An answer that took longer than a quarter of a ttl leaves the leases less than
 * their full ttl, so another one is asked for; but where answers always take so
 * long, there is no sense in that.
 */
static uint64
wait_for_quorum(DlockSpace *space)
{
	int64		ttl;
	int			durability = dlock_lease_greatest_durability(space, &ttl);
	uint64		start = dlock_monotonic_now();

	if (durability < SYNCHRONOUS_COMMIT_REMOTE_WRITE)
		return start;
	for (int i = 0; i < MAX_QUORUM_WAITS; i++)
	{
		start = dlock_monotonic_now();
		(void) dlock_quorum_wait(space, durability, start,
									DLOCK_NO_DEADLINE);
		if ((int64) (dlock_monotonic_now() - start) < ttl / 4)
			break;
	}
	return start;
}

/*
 * From now on leases count.  Where a caller has no time to wait for standbys,
 * the worker does so in its place.
 */
static void
begin_anew(DlockSpace *space)
{
	PG_TRY();
	{
		dlock_lease_begin_anew(space, wait_for_quorum(space));
	}
	PG_CATCH();
	{
		(void) dlock_worker_wake(space);
		PG_RE_THROW();
	}
	PG_END_TRY();
}

/*
 * Put back what the tables keep, unless somebody has.
 */
void
dlock_load(DlockSpace *space)
{
	Oid			queue = dlock_relation(space, "dlock_queue");
	MemoryContext context;
	MemoryContext old_context;

	LockRelationOid(queue, ShareUpdateExclusiveLock);
	if (pg_atomic_read_u32(&space->loaded) != 0)
	{
		UnlockRelationOid(queue, ShareUpdateExclusiveLock);
		return;
	}
	dlock_remove_unused_spaces(&space->key);
	context = AllocSetContextCreate(CurrentMemoryContext, "dlock load",
									ALLOCSET_DEFAULT_SIZES);
	old_context = MemoryContextSwitchTo(context);
	PushActiveSnapshot(GetLatestSnapshot());
	load_leases(space);
	load_tickets(space);
	PopActiveSnapshot();
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(context);
	begin_anew(space);
	pg_atomic_write_u32(&space->loaded, 1);
	ConditionVariableBroadcast(&space->load_changed);
	UnlockRelationOid(queue, ShareUpdateExclusiveLock);
	if (space->leases.length > 0)
		(void) dlock_worker_wake(space);
}

/* The worker could not load: who waits for it tries on his own. */
void
dlock_load_failed(DlockSpace *space)
{
	pg_atomic_fetch_add_u32(&space->load_failures, 1);
	ConditionVariableBroadcast(&space->load_changed);
}

/* Are there so few rows that a worker's start would take longer than they? */
static bool
is_small(DlockSpace *space)
{
	static const char *const tables[] = {"dlock_queue_lease", "dlock_queue"};
	BlockNumber blocks = 0;

	for (int i = 0; i < (int) lengthof(tables); i++)
	{
		Relation	table = relation_open(dlock_relation(space, tables[i]),
										  AccessShareLock);

		blocks += RelationGetNumberOfBlocks(table);
		relation_close(table, AccessShareLock);
	}
	return blocks <= SMALL_BLOCKS;
}

/* As where a table's lock is waited for */
static void
check_lock_timeout(uint64 start)
{
	if (LockTimeout > 0 &&
		dlock_monotonic_now() - start >= (uint64) LockTimeout * 1000)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("canceling statement due to lock timeout"),
				 errdetail("The background worker of dlock still reads the tables of leases.")));
}

/*
 * Wait until the worker has loaded.  False where that cannot be waited for: no
 * worker can be had, or it has failed.
 */
static bool
wait_for_worker(DlockSpace *space)
{
	uint32		failures = pg_atomic_read_u32(&space->load_failures);
	uint64		start = dlock_monotonic_now();
	uint64		seen_at = start;	/* when a worker was last there */
	bool		goes_on = true;

	ConditionVariablePrepareToSleep(&space->load_changed);
	while (pg_atomic_read_u32(&space->loaded) == 0)
	{
		uint64		now = dlock_monotonic_now();
		long		pause = LOOK_MS;

		if (dlock_office_is_held(space, DLOCK_WORKER))
			seen_at = now;
		goes_on = dlock_space_is_current(space) && dlock_worker_wake(space) &&
			pg_atomic_read_u32(&space->load_failures) == failures &&
			now - seen_at < NO_WORKER_MS * 1000;
		if (!goes_on)
			break;
		check_lock_timeout(start);
		if (LockTimeout > 0)
			pause = Min(pause, LockTimeout);
		(void) ConditionVariableTimedSleep(&space->load_changed, pause,
										   PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
	return goes_on;
}

/* The space of this database, with what its tables keep. */
DlockSpace *
dlock_loaded_space(void)
{
	DlockSpace *space = dlock_current_space();

	if (unlikely(pg_atomic_read_u32(&space->loaded) == 0) &&
		(is_small(space) || !wait_for_worker(space)))
		dlock_load(space);
	return space;
}
