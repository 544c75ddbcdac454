/*-------------------------------------------------------------------------
 *
 * views.c
 *	  The functions behind dlock_locks and dlock_leases, and
 *	  dlock_blocking_pids().
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "backend/inner.h"
#include "backend/graph.h"
#include "tables/tables.h"

/* Maximum number of holders shown as blocking a waiter */
#define MAX_HOLDERS	16

typedef struct Holders
{
	int64		numbers[MAX_HOLDERS];
	int			count;
} Holders;

/* The tickets that block waiters of the lock being shown */
typedef struct Blockers
{
	const DlockRow *first;		/* the first row of the lock */
	Holders		of_shared;		/* holders that block shared waiters */
	Holders		of_others;		/* holders that block other waiters */
	int64		previous;		/* the waiter shown last; 0: none */
} Blockers;

static void
add_holder(Holders *holders, int64 number)
{
	if (holders->count < MAX_HOLDERS)
		holders->numbers[holders->count++] = number;
}

/* Find the holders of the lock whose first row is "first". */
static void
find_holders(Blockers *blockers, const DlockRow *first)
{
	memset(blockers, 0, sizeof(Blockers));
	blockers->first = first;
	for (const DlockRow *row = first;
		 row && row->position == 0 && dlock_row_same_lock(first, row);
		 row = row->next)
	{
		add_holder(&blockers->of_others, row->number);
		if (row->mode != DLOCK_SHARED || row->closed)
			add_holder(&blockers->of_shared, row->number);
	}
}

/*
 * Returns up to MAX_HOLDERS holders with which a waiter conflicts, and the
 * waiter before it.  Listing all earlier waiters would take quadratic time.
 */
static Datum
blocked_by(const Blockers *blockers, const DlockRow *waiting)
{
	const Holders *holders = waiting->mode == DLOCK_SHARED ?
		&blockers->of_shared : &blockers->of_others;
	Datum		numbers[MAX_HOLDERS + 1];
	int			count;

	for (count = 0; count < holders->count; count++)
		numbers[count] = Int64GetDatum(holders->numbers[count]);
	if (blockers->previous != 0)
		numbers[count++] = Int64GetDatum(blockers->previous);
	return PointerGetDatum(construct_array(numbers, count, INT8OID,
										   sizeof(int64), FLOAT8PASSBYVAL,
										   TYPALIGN_DOUBLE));
}

/* Returns the space to show, or NULL on a standby, which has none. */
DlockSpace *
dlock_space_to_show(void)
{
	DlockSpace *space;

	if (RecoveryInProgress())
		return NULL;
	if (!dlock_session_attached)
		dlock_session_attach();
	space = dlock_loaded_space();
	/* let the worker end leases that have run out */
	dlock_worker_look(space, false);
	return space;
}

static const Oid lock_columns[] = {
	TEXTOID, INT8OID, TEXTOID, INT4OID, INT4OID, BOOLOID, INT4OID, TEXTOID,
	INT4OID, INT8OID, NAMEOID, TEXTOID, TEXTOID, TEXTOID, TIMESTAMPTZOID,
	TIMESTAMPTZOID, INTERVALOID, INT4OID, BOOLOID, INT8ARRAYOID
};

/* Take the text at *text, and advance *text to its end. */
static Datum
take_text(const char **text, int length)
{
	const char *start = *text;

	*text += length;
	return PointerGetDatum(cstring_to_text_with_len(start, length));
}

static void
show_row(ReturnSetInfo *rsinfo, const DlockRow *row, const Blockers *blockers)
{
	bool		waiter = row->position > 0;
	Datum		values[lengthof(lock_columns)];
	bool		nulls[lengthof(lock_columns)] = {0};
	const char *text = row->text;
	Datum		name = take_text(&text, row->name_length);
	Datum		info = take_text(&text, row->info_length);
	Datum		owner = take_text(&text, row->owner_length);
	int			i = 0;

	values[i++] = name;
	values[i++] = Int64GetDatum(row->number);
	values[i++] = CStringGetTextDatum(dlock_mode_name(row->mode));
	nulls[i] = row->mode != DLOCK_SLOTS;
	values[i++] = Int32GetDatum(row->slots);
	values[i++] = Int32GetDatum(row->permits);
	values[i++] = BoolGetDatum(row->granted);
	values[i++] = Int32GetDatum((int32) row->position);
	values[i++] = CStringGetTextDatum(dlock_scope_name(row->scope));
	nulls[i] = row->pid == 0;
	values[i++] = Int32GetDatum(row->pid);
	nulls[i] = row->lease == 0;
	values[i++] = Int64GetDatum(row->lease);
	values[i++] = DirectFunctionCall1(pg_get_userbyid,
									  ObjectIdGetDatum(row->role));
	nulls[i] = !row->has_owner;
	values[i++] = owner;
	nulls[i] = !row->has_info;
	values[i++] = info;
	nulls[i] = row->channel_length == 0 ||
		!has_privs_of_role(GetUserId(), row->role);
	values[i++] = take_text(&text, row->channel_length);
	values[i++] = TimestampTzGetDatum(row->enqueued_at);
	nulls[i] = waiter;
	values[i++] = TimestampTzGetDatum(row->granted_at);
	nulls[i] = row->remaining < 0;
	values[i++] = dlock_interval_datum(row->remaining);
	values[i++] = Int32GetDatum((int32) (row->session_depth + row->xact_depth));
	values[i++] = BoolGetDatum(row->pinned);
	values[i++] = waiter ? blocked_by(blockers, row) :
		PointerGetDatum(construct_empty_array(INT8OID));
	Assert(i == lengthof(values));

	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

static void
show_rows(ReturnSetInfo *rsinfo, const DlockRow *rows)
{
	Blockers	blockers = {0};
	MemoryContext row_context = AllocSetContextCreate(CurrentMemoryContext,
													  "dlock row",
													  ALLOCSET_SMALL_SIZES);
	MemoryContext old_context = MemoryContextSwitchTo(row_context);

	for (const DlockRow *row = rows; row; row = row->next)
	{
		CHECK_FOR_INTERRUPTS();
		if (blockers.first == NULL || !dlock_row_same_lock(blockers.first, row))
			find_holders(&blockers, row);
		show_row(rsinfo, row, &blockers);
		if (row->position > 0)
			blockers.previous = row->number;
		MemoryContextReset(row_context);
	}
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(row_context);
}

/* Show all locks, a few rows at a time, so that they stay in the CPU cache. */
static void
show_all(ReturnSetInfo *rsinfo, DlockSpace *space)
{
	int			partition = 0;
	MemoryContext rows_context;
	MemoryContext old_context;
	const DlockRow *rows;

	rows_context = AllocSetContextCreate(CurrentMemoryContext, "dlock rows",
										 ALLOCSET_DEFAULT_SIZES);
	old_context = MemoryContextSwitchTo(rows_context);
	while ((rows = dlock_queue_rows_next(space, &partition)) != NULL)
	{
		show_rows(rsinfo, rows);
		MemoryContextReset(rows_context);
	}
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(rows_context);
}

/* The view dlock_locks */
PG_FUNCTION_INFO_V1(dlock_lock_status);
Datum
dlock_lock_status(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, lock_columns,
											 lengthof(lock_columns));
	DlockSpace *space = dlock_space_to_show();

	if (space)
		show_all(rsinfo, space);
	return (Datum) 0;
}

/* The rows of the view dlock_locks for one lock */
PG_FUNCTION_INFO_V1(dlock_locks_of);
Datum
dlock_locks_of(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, lock_columns,
											 lengthof(lock_columns));
	DlockSpace *space = dlock_space_to_show();
	DlockKey	key;

	if (space)
	{
		dlock_get_key(fcinfo, space, &key);
		show_rows(rsinfo, dlock_queue_rows_of(space, &key));
	}
	return (Datum) 0;
}

static const Oid lease_columns[] = {
	INT8OID, INTERVALOID, INTERVALOID, INTERVALOID, INT4OID, OIDOID, TEXTOID,
	TIMESTAMPTZOID, TIMESTAMPTZOID, INT4OID, INT4OID
};

/* A lease as dlock_leases shows it */
typedef struct LeaseRow
{
	struct LeaseRow *next;
	int64		number;
	int64		ttl;
	int64		delay;
	int64		remaining;		/* microseconds; -1: no end */
	int			pid;
	Oid			role;
	TimestampTz opened_at;
	TimestampTz renewed_at;
	int			held;
	int			waiting;
	bool		has_info;
	char		info[FLEXIBLE_ARRAY_MEMBER];
} LeaseRow;

typedef struct LeaseRows
{
	LeaseRow   *first;
	LeaseRow  **tail;
	uint64		now;			/* monotonic */
	bool		complete;
} LeaseRows;

/* The caller must hold the lease lock. */
static TimestampTz
opened_at(const DlockLease *lease)
{
	DlockLeaseTicket *ticket;

	if (!lease->single)
		return lease->opened_at;
	ticket = dlock_ticket_in_lease(lease->tickets.head);
	return ticket ? ticket->ticket.enqueued_at :
		(TimestampTz) pg_atomic_read_u64((pg_atomic_uint64 *) &lease->renewed_at);
}

static void
copy_lease(LeaseRows *rows, DlockLease *lease)
{
	LeaseRow   *row;
	uint64		deadline = dlock_lease_deadline(lease);
	const char *info = !lease->single && DsaPointerIsValid(lease->info) ?
		dlock_address(lease->info) : NULL;

	if (deadline == 0)
		return;
	row = palloc_extended(offsetof(LeaseRow, info) +
						  (info ? strlen(info) : 0) + 1,
						  MCXT_ALLOC_NO_OOM | MCXT_ALLOC_ZERO);
	rows->complete = row != NULL;
	if (row == NULL)
		return;
	row->number = lease->number;
	row->ttl = dlock_lease_ttl(lease);
	row->delay = lease->single ? 0 : lease->delay;
	row->remaining = deadline == DLOCK_NO_DEADLINE ? -1 :
		(int64) (Max(deadline, rows->now) - rows->now);
	row->pid = !lease->single && lease->session != 0 &&
		dlock_lease_is_attached(lease) ? lease->pid : 0;
	row->role = lease->role;
	row->opened_at = opened_at(lease);
	row->renewed_at = (TimestampTz) pg_atomic_read_u64(&lease->renewed_at);
	row->has_info = info != NULL;
	if (info)
		strcpy(row->info, info);
	row->held = (int) lease->held;
	row->waiting = (int) lease->tickets.length - row->held;
	*rows->tail = row;
	rows->tail = &row->next;
}

static void
show_lease(ReturnSetInfo *rsinfo, const LeaseRow *row)
{
	Datum		values[lengthof(lease_columns)];
	bool		nulls[lengthof(lease_columns)] = {0};
	int			i = 0;

	values[i++] = Int64GetDatum(row->number);
	values[i++] = dlock_interval_datum(row->ttl);
	nulls[i] = row->delay == 0;
	values[i++] = dlock_interval_datum(row->delay);
	nulls[i] = row->remaining < 0;
	values[i++] = dlock_interval_datum(row->remaining);
	nulls[i] = row->pid == 0;
	values[i++] = Int32GetDatum(row->pid);
	values[i++] = ObjectIdGetDatum(row->role);
	nulls[i] = !row->has_info;
	values[i++] = CStringGetTextDatum(row->info);
	values[i++] = TimestampTzGetDatum(row->opened_at);
	values[i++] = TimestampTzGetDatum(row->renewed_at);
	values[i++] = Int32GetDatum(row->held);
	values[i++] = Int32GetDatum(row->waiting);
	Assert(i == lengthof(values));
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

PG_FUNCTION_INFO_V1(dlock_lease_status);
Datum
dlock_lease_status(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, lease_columns,
											 lengthof(lease_columns));
	DlockSpace *space = dlock_space_to_show();
	LeaseRows	rows = {.complete = true};
	DlockLease *lease = NULL;

	if (space == NULL)
		return (Datum) 0;
	rows.tail = &rows.first;
	rows.now = dlock_monotonic_now();
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	while (rows.complete && (lease = dlock_lease_next(space, lease)) != NULL)
		copy_lease(&rows, lease);
	LWLockRelease(&space->lease_lock);
	if (!rows.complete)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory"),
				 errdetail("Failed while copying the leases.")));
	/* the counts of held tickets may reveal a grant (I15) */
	dlock_journal_flush_removals(space);
	for (const LeaseRow *row = rows.first; row; row = row->next)
		show_lease(rsinfo, row);
	return (Datum) 0;
}

/*
 * Returns the processes that block a process in the lock manager or in dlock.
 * In dlock, these are conflicting holders and all earlier waiters.  The worker
 * stands for an ended ticket, if it cannot remove the row of that ticket.
 */
PG_FUNCTION_INFO_V1(dlock_blocking_pids);
Datum
dlock_blocking_pids(PG_FUNCTION_ARGS)
{
	PGPROC	   *proc;
	DlockWait	wait;
	DlockMember *members = NULL;
	int32		slots;
	Datum	   *heavyweight;
	Datum	   *pids;
	DlockSpace *space;
	int			worker = 0;
	int			more = 0;
	int			count = 0;
	int			place = 0;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", "pid"),
				 errhint("Give the process id of a session, as in pg_stat_activity.")));
	if (!dlock_session_attached)
		dlock_session_attach();

	/* no session waits in dlock on a standby */
	space = RecoveryInProgress() ? NULL : dlock_current_space();
	if (space)
		worker = dlock_graph_blocked_worker(space, &heavyweight, &more);
	/* pg_blocking_pids() covers parallel workers of the process, too */
	if (worker == 0 || worker != PG_GETARG_INT32(0))
		deconstruct_array(DatumGetArrayTypeP(DirectFunctionCall1(pg_blocking_pids,
																 PG_GETARG_DATUM(0))),
						  INT4OID, sizeof(int32), true, TYPALIGN_INT,
						  &heavyweight, NULL, &more);
	proc = BackendPidGetProc(PG_GETARG_INT32(0));
	if (proc && dlock_graph_read_wait(compat_procno(proc), &wait))
	{
		place = dlock_graph_read_lock(&wait.key, INT_MAX, &members, &slots);
		/* if the process has left the queue, nothing blocks it */
		while (place > 0 && (members[place - 1].granted ||
							 members[place - 1].number != wait.number))
			place--;
		place = Max(place - 1, 0);
	}
	pids = palloc(Max(place + more, 1) * sizeof(Datum));
	for (int i = 0; i < place; i++)
	{
		if (!members[i].granted || members[i].closed ||
			members[i].mode != DLOCK_SHARED || wait.mode != DLOCK_SHARED)
			pids[count++] = Int32GetDatum(members[i].leaves ? worker :
										  members[i].pid);
	}
	for (int i = 0; i < more; i++)
		pids[count++] = heavyweight[i];
	PG_RETURN_ARRAYTYPE_P(construct_array(pids, count, INT4OID, sizeof(int32),
										  true, TYPALIGN_INT));
}
