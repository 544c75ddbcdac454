/*-------------------------------------------------------------------------
 *
 * api_all.c
 *	  The functions that acquire several locks at once, all or none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/array.h"

#include "backend/api.h"

/* Compare two keys by name.  A sort can take long, so process interrupts. */
static int
compare_keys(const void *a, const void *b)
{
	const DlockKey *one = *(DlockKey *const *) a;
	const DlockKey *other = *(DlockKey *const *) b;
	int			result = memcmp(one->name, other->name,
								Min(one->length, other->length));

	CHECK_FOR_INTERRUPTS();
	return result != 0 ? result : (int) one->length - (int) other->length;
}

/*
 * Refuse more names than dlock.max_locks_per_session, because keys are large.
 * With 32-bit pointers, the size of the keys could overflow, too.
 */
static void
check_count(int count)
{
	if (count > dlock_max_locks_per_session ||
		(Size) count > MaxAllocHugeSize / sizeof(DlockKey))
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("too many lock names"),
				 errdetail("The array has %d elements, and dlock.max_locks_per_session is %d.",
						   count, dlock_max_locks_per_session),
				 errhint("Acquire fewer locks at a time, or increase dlock.max_locks_per_session.")));
}

/*
 * Make *keys, of length *count and in the order of "names", and *sorted, which
 * points to the distinct keys in the order of acquires.  Returns their number.
 */
static int
get_keys(DlockSpace *space, ArrayType *names, int *count,
		 DlockKey **keys, DlockKey ***sorted)
{
	Datum	   *elements;
	bool	   *nulls;
	int			unique = 0;

	if (ARR_NDIM(names) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				 errmsg("wrong number of array subscripts"),
				 errdetail("The array of lock names must be one-dimensional.")));
	check_count(ArrayGetNItems(ARR_NDIM(names), ARR_DIMS(names)));
	deconstruct_array(names, TEXTOID, -1, false, TYPALIGN_INT,
					  &elements, &nulls, count);
	*keys = MemoryContextAllocHuge(CurrentMemoryContext,
								   Max(*count, 1) * sizeof(DlockKey));
	*sorted = palloc(Max(*count, 1) * sizeof(DlockKey *));
	for (int i = 0; i < *count; i++)
	{
		CHECK_FOR_INTERRUPTS();
		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("lock name must not be null"),
					 errhint("Remove the null from the array, as with array_remove().")));
		dlock_make_key(&(*keys)[i], space, DatumGetTextPP(elements[i]));
		dlock_reserve_check(space, &(*keys)[i]);
		(*sorted)[i] = &(*keys)[i];
	}
	qsort(*sorted, *count, sizeof(DlockKey *), compare_keys);
	for (int i = 0; i < *count; i++)
	{
		if (unique == 0 ||
			compare_keys(&(*sorted)[unique - 1], &(*sorted)[i]) != 0)
			(*sorted)[unique++] = (*sorted)[i];
	}
	return unique;
}

/* Returns the fences of all names, in the array's order. */
static ArrayType *
make_result(DlockKey *keys, int count, DlockKey **sorted, int unique,
			const int64 *fences)
{
	Datum	   *values = palloc(Max(count, 1) * sizeof(Datum));

	for (int i = 0; i < count; i++)
	{
		DlockKey   *key = &keys[i];
		DlockKey  **found = bsearch(&key, sorted, unique, sizeof(DlockKey *),
									compare_keys);

		values[i] = Int64GetDatum(fences[found - sorted]);
	}
	return construct_array(values, count, INT8OID, sizeof(int64),
						   FLOAT8PASSBYVAL, TYPALIGN_DOUBLE);
}

/* SQL arguments: names[, lease], timeout, shared, info */
static Datum
acquire_names(FunctionCallInfo fcinfo, DlockScope scope, bool try)
{
	int			before = dlock_record_begin_uses();
	int			tail = scope == DLOCK_LEASE ? 2 : 1;
	DlockSpace *space = dlock_begin_change();
	DlockRequest request = {
		.scope = scope,
		.permits = 1,
	};
	DlockTimeout timeout;
	DlockOutcome outcome;
	DlockKey   *keys;
	DlockKey  **sorted;
	int64	   *fences;
	ArrayType  *result;
	int			count;
	int			unique;
	int			failed = 0;
	bool		acquired;

	dlock_need(fcinfo, 0, "names");
	if (scope == DLOCK_LEASE)
		dlock_need(fcinfo, 1, "lease");
	dlock_need(fcinfo, tail + 1, "shared");
	unique = get_keys(space, PG_GETARG_ARRAYTYPE_P(0), &count, &keys, &sorted);
	request.timeout = timeout = dlock_get_timeout(fcinfo, tail);
	request.mode = PG_GETARG_BOOL(tail + 1) ? DLOCK_SHARED : DLOCK_EXCLUSIVE;
	request.info = dlock_get_info(fcinfo, tail + 2);
	if (scope == DLOCK_SESSION)
		dlock_check_session_use(DLOCK_USE_LOCK);

	fences = palloc(Max(unique, 1) * sizeof(int64));
	if (scope == DLOCK_LEASE)
	{
		/* a timeout's error names a lock: without names, wait for the load */
		if (unique == 0)
			request.timeout = DLOCK_WAIT_FOREVER;
		else
			request.key = *sorted[0];
		(void) dlock_request_wait_for_load(space, &request, &outcome);
		request.lease = dlock_get_lease(fcinfo, space);
	}
	acquired = dlock_session_acquire_all(space, &request, sorted, unique,
										 fences, &failed, &outcome);
	dlock_record_end_uses(before);
	if (!acquired)
	{
		request.key = *sorted[failed];
		if (!try)
			dlock_raise_timeout(space, &request, timeout, outcome);
		PG_RETURN_NULL();
	}

	result = make_result(keys, count, sorted, unique, fences);
	/* last, because an error after this would not release the locks */
	if (scope != DLOCK_TRANSACTION)
		dlock_xact_keep_result(fcinfo->flinfo, unique);
	else if (!try)
		dlock_lone_call_note(fcinfo->flinfo);
	PG_RETURN_ARRAYTYPE_P(result);
}

DLOCK_FUNCTION(dlock_acquire_all,
			   acquire_names(fcinfo, DLOCK_SESSION, false));
DLOCK_FUNCTION(dlock_try_acquire_all,
			   acquire_names(fcinfo, DLOCK_SESSION, true));
DLOCK_FUNCTION(dlock_xact_acquire_all,
			   acquire_names(fcinfo, DLOCK_TRANSACTION, false));
DLOCK_FUNCTION(dlock_try_xact_acquire_all,
			   acquire_names(fcinfo, DLOCK_TRANSACTION, true));
DLOCK_FUNCTION(dlock_lease_acquire_all,
			   acquire_names(fcinfo, DLOCK_LEASE, false));
DLOCK_FUNCTION(dlock_try_lease_acquire_all,
			   acquire_names(fcinfo, DLOCK_LEASE, true));
