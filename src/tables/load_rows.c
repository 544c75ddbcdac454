/*-------------------------------------------------------------------------
 *
 * load_rows.c
 *	  Loading rows of the tables of leases.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "tables/shape.h"

#define ROW_MEMORY			512		/* bytes of a loaded row, about */

/* Returns the value of a row's column.  If it is null, returns 0 or NULL. */
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

static void
log_foreign(const DlockLoading *loading, const char *table)
{
	if (loading->num_foreign == 0)
		return;
	ereport(LOG,
			(errmsg("left out %llu rows of table \"%s\", which belong to another server or database",
					(unsigned long long) loading->num_foreign, table),
			 errdetail("This is database %u of system %llu; the first of them is of database %u of system %llu.",
					   MyDatabaseId, (unsigned long long) GetSystemIdentifier(),
					   loading->foreign_database,
					   (unsigned long long) loading->foreign_system),
			 errhint("Leases do not come along with a copy, or with pg_upgrade: open them again.")));
}

/*
 * Raise 55000 for a number that was never drawn, because it could be drawn
 * later.  Check only the greatest, which the last row that is not foreign has.
 */
static void
check_numbers(DlockSpace *space, DlockTable which, const DlockStoredRows *rows)
{
	for (uint64 i = rows->count; i > 0; i--)
	{
		const DlockStored *row = &rows->rows[i - 1];

		if (row->is_foreign)
			continue;
		if (!dlock_ticket_was_reserved(space, DatumGetInt64(row->values[0])))
			dlock_shape_raise_row(&dlock_shapes[which], row, 0);
		break;
	}
}

/* Load a lease, unless an interrupted attempt has loaded it. */
static void
load_lease(DlockSpace *space, const DlockStored *row)
{
	const Datum *values = row->values;
	int64		number = DatumGetInt64(values[DLOCK_LEASE_LEASE]);
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	dlock_id_find(space, number, &lease, &ticket);
	if (lease == NULL)
	{
		lease = dlock_lease_make(space, DatumGetObjectId(values[DLOCK_LEASE_ROLE]),
								 NameStr(*DatumGetName(values[DLOCK_LEASE_ROLE_NAME])),
								 get_interval(row, DLOCK_LEASE_TTL),
								 get_interval(row, DLOCK_LEASE_DELAY),
								 get_text(row, DLOCK_LEASE_INFO));
		lease->number = number;
		lease->opened_at = get_time(row, DLOCK_LEASE_OPENED_AT);
		pg_atomic_write_u32(&lease->durability,
							(uint32) DatumGetInt32(values[DLOCK_LEASE_DURABILITY]));
		dlock_lease_restore(lease, DatumGetBool(values[DLOCK_LEASE_DELAYED]));
	}
	dlock_record_end_uses(before);
}

static void
load_ticket(DlockSpace *space, const DlockStored *row)
{
	const DlockShape *shape = &dlock_shapes[DLOCK_TABLE_QUEUE];
	const Datum *values = row->values;
	const char *name = get_text(row, DLOCK_QUEUE_NAME);
	int64		number = DatumGetInt64(values[DLOCK_QUEUE_TICKET]);
	int			before = dlock_record_begin_uses();
	DlockRequest request;
	bool		single = !row->nulls[DLOCK_QUEUE_TTL];
	bool		granted = DatumGetBool(values[DLOCK_QUEUE_GRANTED]);
	DlockLeaseTicket *ticket;
	DlockLeaseTicket *loaded;
	DlockLease *namesake;

	dlock_id_find(space, number, &namesake, &loaded);
	if (namesake && !namesake->single)
		dlock_shape_raise_row(shape, row, DLOCK_QUEUE_TICKET);
	memset(&request, 0, offsetof(DlockRequest, key));
	dlock_key_fill(&request.key, space, name, strlen(name));
	request.scope = DLOCK_LEASE;
	(void) dlock_mode_by_name(get_text(row, DLOCK_QUEUE_MODE), &request.mode);
	request.slots = DatumGetInt32(values[DLOCK_QUEUE_SLOTS]);
	request.permits = DatumGetInt32(values[DLOCK_QUEUE_PERMITS]);
	request.owner = get_text(row, DLOCK_QUEUE_OWNER);
	request.info = get_text(row, DLOCK_QUEUE_INFO);
	request.channel = get_text(row, DLOCK_QUEUE_CHANNEL);
	if (single)
	{
		request.lease =
			dlock_lease_make_single(space, DatumGetObjectId(values[DLOCK_QUEUE_ROLE]),
									NameStr(*DatumGetName(values[DLOCK_QUEUE_ROLE_NAME])),
									get_interval(row, DLOCK_QUEUE_TTL),
									&request.key);
		request.lease->number = number;
		pg_atomic_write_u32(&request.lease->durability,
							(uint32) DatumGetInt32(values[DLOCK_QUEUE_DURABILITY]));
	}
	else
	{
		dlock_id_find(space, DatumGetInt64(values[DLOCK_QUEUE_LEASE]),
					  &request.lease, &ticket);
		if (request.lease && request.lease->single)
			dlock_shape_raise_row(shape, row, DLOCK_QUEUE_LEASE);
	}

	/* skip tickets that ended with their lease: the worker deletes the rows */
	if (loaded == NULL && request.lease &&
		(granted || !request.lease->delayed))
	{
		ticket = dlock_lease_ticket_make(space, &request);
		ticket->ticket.number = number;
		ticket->ticket.enqueued_at = get_time(row, DLOCK_QUEUE_ENQUEUED_AT);
		ticket->ticket.granted_at = get_time(row, DLOCK_QUEUE_GRANTED_AT);
		ticket->announce_at = dlock_lease_durability(request.lease);
		if (!dlock_lease_ticket_restore(ticket, granted))
			dlock_shape_raise_row(shape, row, DLOCK_QUEUE_GRANTED);
	}
	dlock_record_end_uses(before);
}

/* Load the rows of one step, which follow the last loaded row. */
void
dlock_load_some(DlockSpace *space, DlockTable which, DlockStoredRows *rows)
{
	DlockLoading *loading = &space->loading;
	const DlockShape *shape = &dlock_shapes[which];
	bool		is_queue = which == DLOCK_TABLE_QUEUE;

	/* the estimate may be too high, so bound it by the memory */
	if (loading->last == 0)
		dlock_tables_reserve(Min(dlock_rows_estimate(space, which),
								 (uint64) dlock_memory_limit() / ROW_MEMORY),
							 is_queue);
	dlock_rows_read(space, which, loading->last, DLOCK_ROWS_AT_ONCE, rows);
	check_numbers(space, which, rows);
	for (uint64 i = 0; i < rows->count; i++)
	{
		const DlockStored *row = &rows->rows[i];
		int64		number = DatumGetInt64(row->values[0]);

		CHECK_FOR_INTERRUPTS();
		if (row->is_foreign && loading->num_foreign++ == 0)
		{
			loading->foreign_system = row->system;
			loading->foreign_database = row->database;
		}
		if (!row->is_foreign)
		{
			/* if this row fails, the next attempt begins with it */
			loading->last = number - 1;
			if (is_queue)
				load_ticket(space, row);
			else
				load_lease(space, row);
		}
		loading->last = number;
	}
	if (rows->complete)
	{
		log_foreign(loading, shape->name);
		*loading = (DlockLoading)
		{
			.part = is_queue ? DLOCK_LOAD_GRANTS : DLOCK_LOAD_TICKETS
		};
	}
}
