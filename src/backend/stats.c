/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  The functions behind dlock_stats, dlock_wait_histogram and
 *	  dlock_contention.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "backend/inner.h"
#include "tables/tables.h"

PG_FUNCTION_INFO_V1(dlock_counters);
Datum
dlock_counters(PG_FUNCTION_ARGS)
{
	Oid			types[DLOCK_NUM_EVENTS];
	ReturnSetInfo *rsinfo;
	DlockSpace *space;
	uint64		sums[DLOCK_NUM_COUNTERS] = {0};
	Datum		values[DLOCK_NUM_EVENTS];
	bool		nulls[DLOCK_NUM_EVENTS] = {0};

	for (int c = 0; c < DLOCK_NUM_EVENTS; c++)
		types[c] = INT8OID;
	rsinfo = dlock_begin_rows(fcinfo, types, DLOCK_NUM_EVENTS);
	space = dlock_space_to_show();
	if (space)
		(void) dlock_sum_counters(space, sums);
	for (int c = 0; c < DLOCK_NUM_EVENTS; c++)
		values[c] = Int64GetDatum((int64) sums[c]);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	return (Datum) 0;
}

/* Returns the age of the journal's oldest change, in microseconds, or 0. */
static int64
journal_lag(DlockSpace *space)
{
	uint64		now = dlock_monotonic_now();
	uint64		since = now;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	if (DsaPointerIsValid(space->journal.head))
		since = dlock_record_at(space->journal.head)->listed_at;
	LWLockRelease(&space->lease_lock);
	return since < now ? (int64) (now - since) : 0;
}

/* Returns the current state, or no row on a standby. */
PG_FUNCTION_INFO_V1(dlock_gauges);
Datum
dlock_gauges(PG_FUNCTION_ARGS)
{
	static const Oid types[] = {
		INT8OID, INTERVALOID, INT8OID, INT8OID, INT8OID, INT8OID, INT4OID,
		INTERVALOID, TIMESTAMPTZOID
	};
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, types, lengthof(types));
	DlockSpace *space = dlock_space_to_show();
	uint64		sums[DLOCK_NUM_COUNTERS];
	TimestampTz counted_since;
	int64		longest_wait;
	Datum		values[lengthof(types)];
	bool		nulls[lengthof(types)] = {0};
	int			pid;
	int			i = 0;

	if (space == NULL)
		return (Datum) 0;
	counted_since = dlock_sum_counters(space, sums);
	values[i++] = Int64GetDatum((int64) dlock_queue_waiting(space,
															&longest_wait));
	values[i++] = dlock_interval_datum(longest_wait);
	values[i++] = Int64GetDatum(Max((int64) sums[DLOCK_COUNT_HELD], 0));
	values[i++] = Int64GetDatum((int64) space->leases.length);
	dlock_report_memory();
	values[i++] =
		Int64GetDatum((int64) pg_atomic_read_u64(&dlock_control->memory_used));
	values[i++] = Int64GetDatum(dlock_memory_limit());
	pid = dlock_office_pid(space, DLOCK_WORKER);
	nulls[i] = pid == 0;
	values[i++] = Int32GetDatum(pid);
	values[i++] = dlock_interval_datum(journal_lag(space));
	values[i++] = TimestampTzGetDatum(counted_since);
	Assert(i == lengthof(values));
	/* the number of held locks may reveal a grant (I15) */
	dlock_journal_flush_removals(space);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	return (Datum) 0;
}

/* Returns the number of waits up to each bound; the last row counts all. */
PG_FUNCTION_INFO_V1(dlock_wait_counts);
Datum
dlock_wait_counts(PG_FUNCTION_ARGS)
{
	static const Oid types[] = {INTERVALOID, INT8OID};
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, types, lengthof(types));
	DlockSpace *space = dlock_space_to_show();
	uint64		sums[DLOCK_NUM_COUNTERS];
	uint64		count = 0;

	if (space == NULL)
		return (Datum) 0;
	(void) dlock_sum_counters(space, sums);
	for (int b = 0; b < DLOCK_WAIT_BUCKETS; b++)
	{
		int64		bound = dlock_wait_bounds[b];
		Datum		values[lengthof(types)];
		bool		nulls[lengthof(types)] = {bound < 0, false};

		count += sums[DLOCK_COUNT_WAITS + b];
		values[0] = dlock_interval_datum(bound);
		values[1] = Int64GetDatum((int64) count);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

static const Oid contention_columns[] = {
	TEXTOID, INT8OID, INTERVALOID, INTERVALOID, INT8OID, INT8OID, INT8OID,
	INT4OID, TIMESTAMPTZOID
};

static void
show_contended(ReturnSetInfo *rsinfo, const DlockContended *entry)
{
	Datum		values[lengthof(contention_columns)];
	bool		nulls[lengthof(contention_columns)] = {0};
	int			i = 0;

	values[i++] = PointerGetDatum(cstring_to_text_with_len(entry->name,
														   entry->length));
	values[i++] = Int64GetDatum((int64) entry->waits);
	values[i++] = dlock_interval_datum((int64) entry->wait_us);
	values[i++] = dlock_interval_datum((int64) entry->max_wait_us);
	values[i++] = Int64GetDatum((int64) entry->timeouts);
	values[i++] = Int64GetDatum((int64) entry->deadlocks);
	values[i++] = Int64GetDatum((int64) entry->expirations);
	values[i++] = Int32GetDatum((int32) entry->max_queue);
	nulls[i] = entry->last_wait_at == 0;
	values[i++] = TimestampTzGetDatum(entry->last_wait_at);
	Assert(i == lengthof(values));
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

PG_FUNCTION_INFO_V1(dlock_contention_status);
Datum
dlock_contention_status(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, contention_columns,
											 lengthof(contention_columns));
	DlockSpace *space = dlock_space_to_show();
	DlockContended *entries;
	int			count;

	if (space == NULL)
		return (Datum) 0;
	entries = palloc(DLOCK_CONTENDED_NAMES * sizeof(DlockContended));
	count = dlock_contention_copy(space, entries);
	for (int e = 0; e < count; e++)
		show_contended(rsinfo, &entries[e]);
	pfree(entries);
	return (Datum) 0;
}
