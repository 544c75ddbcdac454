/*-------------------------------------------------------------------------
 *
 * load.c
 *	  Reading the tables of leases back into memory.
 *
 * The first call after a restart, a crash or a promotion puts back every lease
 * with its full ttl, and every ticket in its place.  Until that is done no
 * other call goes on, so nobody sees a part of it; an error leaves what was put
 * back so far, and the next call goes on from there.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "dlock.h"

/* So often standbys are asked for an answer, if they take long */
#define MAX_QUORUM_WAITS	3

/* The columns of a row that was read */
static Datum
get(HeapTuple row, int column, bool *is_null)
{
	return SPI_getbinval(row, SPI_tuptable->tupdesc, column, is_null);
}

static int64
get_int64(HeapTuple row, int column)
{
	bool		is_null;

	return DatumGetInt64(get(row, column, &is_null));
}

static int32
get_int32(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? 0 : DatumGetInt32(datum);
}

static bool
get_bool(HeapTuple row, int column)
{
	bool		is_null;

	return DatumGetBool(get(row, column, &is_null));
}

static TimestampTz
get_time(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? 0 : DatumGetTimestampTz(datum);
}

static int64
get_interval(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? 0 : DatumGetIntervalP(datum)->time;
}

static char *
get_text(HeapTuple row, int column)
{
	bool		is_null;
	Datum		datum = get(row, column, &is_null);

	return is_null ? NULL : TextDatumGetCString(datum);
}

static Oid
get_oid(HeapTuple row, int column)
{
	bool		is_null;

	return DatumGetObjectId(get(row, column, &is_null));
}

/* Read a table with the latest snapshot there is. */
static void
read_rows(const char *statement)
{
	SPIPlanPtr	plan = SPI_prepare(statement, 0, NULL);
	Snapshot	snapshot;

	if (plan == NULL)
		elog(ERROR, "could not read the tables of leases");
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	if (SPI_execute_snapshot(plan, NULL, NULL, snapshot, InvalidSnapshot,
							 true, false, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read the tables of leases");
	UnregisterSnapshot(snapshot);
}

static void
load_leases(DlockSpace *space)
{
	read_rows(psprintf("SELECT lease, ttl, delay, delayed, info, role, "
					   "role_name::pg_catalog.text, opened_at, durability FROM %s "
					   "WHERE (system, database) OPERATOR(pg_catalog.=) (%s) "
					   "ORDER BY lease",
					   dlock_rows_table(space, "dlock_queue_lease"), dlock_rows_origin()));
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	row = SPI_tuptable->vals[i];
		int			before = dlock_record_prepare();
		DlockLease *lease;

		if (dlock_lease_restored(space, get_int64(row, 1)) == NULL)
		{
			lease = dlock_lease_make(space, get_interval(row, 2),
									 get_interval(row, 3), false,
									 get_text(row, 5));
			lease->number = get_int64(row, 1);
			lease->role = get_oid(row, 6);
			namestrcpy(&lease->role_name, get_text(row, 7));
			lease->opened_at = get_time(row, 8);
			lease->durability = get_int32(row, 9);
			dlock_lease_restore(lease, get_bool(row, 4));
		}
		dlock_record_unuse(before);
	}
}

static void
load_tickets(DlockSpace *space)
{
	read_rows(psprintf("SELECT ticket, name, lease, granted, delayed, mode, slots, "
					   "permits, owner, info, channel, role, "
					   "role_name::pg_catalog.text, enqueued_at, granted_at, ttl, "
					   "delay, durability FROM %s "
					   "WHERE (system, database) OPERATOR(pg_catalog.=) (%s) "
					   "ORDER BY ticket",
					   dlock_rows_table(space, "dlock_queue"), dlock_rows_origin()));
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	row = SPI_tuptable->vals[i];
		int			before = dlock_record_prepare();
		char	   *name = get_text(row, 2);
		DlockRequest request;
		bool		single = get_interval(row, 16) > 0;
		DlockLeaseTicket *ticket;

		memset(&request, 0, offsetof(DlockRequest, key));
		dlock_key_fill(&request.key, space, name, strlen(name));
		request.scope = DLOCK_LEASE;
		request.mode = dlock_mode_by_name(get_text(row, 6));
		request.slots = get_int32(row, 7);
		request.permits = get_int32(row, 8);
		request.owner = get_text(row, 9);
		request.info = get_text(row, 10);
		request.channel = get_text(row, 11);
		if (single)
		{
			request.lease = dlock_lease_make(space, get_interval(row, 16),
											 get_interval(row, 17), true, NULL);
			request.lease->number = get_int64(row, 1);
			request.lease->role = get_oid(row, 12);
			namestrcpy(&request.lease->role_name, get_text(row, 13));
			request.lease->opened_at = get_time(row, 14);
			request.lease->durability = get_int32(row, 18);
		}
		else
			request.lease = dlock_lease_restored(space, get_int64(row, 3));

		/* the worker removes the rows of what ended with its lease */
		if (request.lease && (get_bool(row, 4) || !request.lease->delayed) &&
			!dlock_lease_ticket_is_restored(space, get_int64(row, 1)))
		{
			ticket = dlock_lease_ticket_make(space, &request);
			ticket->ticket.number = get_int64(row, 1);
			ticket->ticket.role = get_oid(row, 12);
			ticket->ticket.enqueued_at = get_time(row, 14);
			ticket->ticket.granted_at = get_time(row, 15);
			ticket->durability = get_int32(row, 18);
			dlock_lease_ticket_restore(ticket, get_bool(row, 4),
									   get_bool(row, 5));
		}
		dlock_record_unuse(before);
	}

	/*
	 * Who waits is granted what became free with the last release written.  No
	 * time has passed for what was put back, were it by an earlier attempt.
	 */
	dlock_lease_hold_time(space);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		DlockKey	key;
		char	   *name = get_text(SPI_tuptable->vals[i], 2);

		dlock_key_fill(&key, space, name, strlen(name));
		dlock_queue_resume(&key);
	}
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
		(void) dlock_heartbeat_wait(space, durability, start,
									DLOCK_NO_DEADLINE);
		if ((int64) (dlock_monotonic_now() - start) < ttl / 4)
			break;
	}
	return start;
}

/*
 * Put back what the tables keep, unless somebody has.
 */
void
dlock_load(DlockSpace *space)
{
	Oid			queue = dlock_relation(space, "dlock_queue");
	Oid			user;
	int			context;

	LockRelationOid(queue, ShareUpdateExclusiveLock);
	if (pg_atomic_read_u32(&space->loaded) != 0)
	{
		UnlockRelationOid(queue, ShareUpdateExclusiveLock);
		return;
	}
	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(dlock_relation_owner(queue),
						   context | SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_RESTRICTED_OPERATION |
						   SECURITY_NOFORCE_RLS);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "could not connect to SPI");
	load_leases(space);
	load_tickets(space);
	SPI_finish();
	SetUserIdAndSecContext(user, context);
	dlock_lease_begin_anew(space, wait_for_quorum(space));
	pg_atomic_write_u32(&space->loaded, 1);
	UnlockRelationOid(queue, ShareUpdateExclusiveLock);
	if (space->leases.length > 0)
		(void) dlock_worker_wake(space);
}

/* The space of this database, with what its tables keep. */
DlockSpace *
dlock_loaded_space(void)
{
	DlockSpace *space = dlock_current_space();

	if (unlikely(pg_atomic_read_u32(&space->loaded) == 0))
		dlock_load(space);
	return space;
}
