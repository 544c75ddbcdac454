/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  The functions behind the views dlock_locks and dlock_stats.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "common/int.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "dlock.h"

static const char *const mode_names[] = {
	[DLOCK_EXCLUSIVE] = "exclusive",
	[DLOCK_SHARED] = "shared",
	[DLOCK_SLOTS] = "slots"
};

StaticAssertDecl(lengthof(mode_names) == DLOCK_SLOTS + 1,
				 "mode_names must match DlockMode");

/*
 * The tickets that stand before a waiting one: the holders beside which it
 * does not fit, and all before it in the queue.  "first" is the first row of
 * its lock.
 */
static Datum
blocked_by(const DlockRow *first, const DlockRow *waiting)
{
	Datum	   *numbers;
	int			count = 0;
	int			max = 0;

	for (const DlockRow *row = first; row != waiting; row = row->next)
		max++;
	numbers = palloc(max * sizeof(Datum));
	for (const DlockRow *row = first; row != waiting; row = row->next)
	{
		if (row->position == 0 &&
			waiting->mode == DLOCK_SHARED && row->mode == DLOCK_SHARED)
			continue;
		numbers[count++] = Int64GetDatum(row->number);
	}
	return PointerGetDatum(construct_array(numbers, count, INT8OID,
										   sizeof(int64), FLOAT8PASSBYVAL,
										   TYPALIGN_DOUBLE));
}

static bool
same_lock(const DlockRow *a, const DlockRow *b)
{
	return a->name_length == b->name_length &&
		memcmp(a->text, b->text, a->name_length) == 0;
}

/*
 * Where the state may be looked at: not on a standby, where there is none.
 */
static DlockSpace *
space_to_show(void)
{
	if (RecoveryInProgress())
		return NULL;
	if (dlock_my_backend == NULL)
		dlock_session_attach();
	return dlock_current_space();
}

static void
show_row(ReturnSetInfo *rsinfo, const DlockRow *row, const DlockRow *first)
{
	bool		granted = row->position == 0;
	Datum		values[20];
	bool		nulls[20] = {0};
	int			i = 0;

	Assert(rsinfo->setDesc->natts == lengthof(values));

	values[i++] = PointerGetDatum(cstring_to_text_with_len(row->text,
														   row->name_length));
	values[i++] = Int64GetDatum(row->number);
	values[i++] = CStringGetTextDatum(mode_names[row->mode]);
	if (row->mode == DLOCK_SLOTS)
		values[i++] = Int32GetDatum(row->slots);
	else
		nulls[i++] = true;
	values[i++] = Int32GetDatum(row->permits);
	values[i++] = BoolGetDatum(granted);
	values[i++] = Int32GetDatum((int32) row->position);
	values[i++] = CStringGetTextDatum(row->scope == DLOCK_SESSION ?
									  "session" : "transaction");
	values[i++] = Int32GetDatum(row->pid);
	nulls[i++] = true;			/* lease */
	values[i++] = ObjectIdGetDatum(row->role);
	nulls[i++] = true;			/* owner */
	if (row->has_info)
		values[i++] = PointerGetDatum(cstring_to_text_with_len(row->text + row->name_length,
															   row->info_length));
	else
		nulls[i++] = true;
	if (row->channel[0] != '\0' && has_privs_of_role(GetUserId(), row->role))
		values[i++] = CStringGetTextDatum(row->channel);
	else
		nulls[i++] = true;
	values[i++] = TimestampTzGetDatum(row->enqueued_at);
	if (granted)
		values[i++] = TimestampTzGetDatum(row->granted_at);
	else
		nulls[i++] = true;
	nulls[i++] = true;			/* remaining */
	values[i++] = Int32GetDatum((int32) (row->session_depth + row->xact_depth));
	values[i++] = BoolGetDatum(row->pinned);
	values[i++] = granted ? PointerGetDatum(construct_empty_array(INT8OID)) :
		blocked_by(first, row);
	Assert(i == lengthof(values));

	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

PG_FUNCTION_INFO_V1(dlock_lock_status);
Datum
dlock_lock_status(PG_FUNCTION_ARGS)
{
	DlockSpace *space = space_to_show();
	const DlockRow *rows = NULL;
	const DlockRow *first = NULL;

	InitMaterializedSRF(fcinfo, 0);
	if (space)
		rows = dlock_queue_rows(&space->key);
	for (const DlockRow *row = rows; row; row = row->next)
	{
		CHECK_FOR_INTERRUPTS();
		if (first == NULL || !same_lock(first, row))
			first = row;
		show_row((ReturnSetInfo *) fcinfo->resultinfo, row, first);
	}
	return (Datum) 0;
}

PG_FUNCTION_INFO_V1(dlock_counters);
Datum
dlock_counters(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	DlockSpace *space = space_to_show();
	uint64		sums[DLOCK_NUM_COUNTERS] = {0};
	Datum		values[DLOCK_NUM_COUNTERS];
	bool		nulls[DLOCK_NUM_COUNTERS] = {0};

	InitMaterializedSRF(fcinfo, 0);
	if (space)
		dlock_sum_counters(space, sums);
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		values[c] = Int64GetDatum((int64) sums[c]);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	return (Datum) 0;
}
