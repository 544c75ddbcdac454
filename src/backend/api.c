/*-------------------------------------------------------------------------
 *
 * api.c
 *	  The functions that SQL calls: arguments, rights, results.
 *
 * None is strict: a NULL where a value is needed is an error here, and not a
 * NULL result that reads like "not acquired".
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/parallel.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "common/int.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "tcop/pquery.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/portal.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "backend/backend.h"
#include "shared/shared.h"
#include "tables/tables.h"

/* What nobody means to wait for, in microseconds */
#define LONG_TIMEOUT	(366 * USECS_PER_DAY)

/* The settings */
int			dlock_max_ttl;
int			dlock_session_locks;

/*
 * What every call begins with.  Returns this database's space; what leases keep
 * there may not have been read since the server was started.
 *
 * Enough for what asks about this session, or, behind dlock_get_key(), about one
 * lock.
 */
static DlockSpace *
begin_unloaded(void)
{
	DlockSpace *space;

	if (RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("cannot use locks during recovery"),
				 errdetail("A standby server knows nothing of the locks that its primary grants."),
				 errhint("Connect to the primary server.")));
	if (IsParallelWorker())
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TRANSACTION_STATE),
				 errmsg("cannot use locks in a parallel worker"),
				 errhint("Functions that call dlock must be PARALLEL UNSAFE.")));
	if (unlikely(!dlock_session_attached))
		dlock_session_attach();
	space = dlock_current_space();
	dlock_worker_look(space);
	return space;
}

static void
check_unrestricted(void)
{
	if (InSecurityRestrictedOperation())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("cannot change locks within a security-restricted operation"),
				 errdetail("Here the code of an object's owner runs amid the locks of another role's session.")));
}

/*
 * The door for all that changes anything: tickets, leases, guards, versions,
 * reservations, numbers, what a session waits for or listens on.
 *
 * Not within a security-restricted operation, as it is with LISTEN.  There the
 * code of an object's owner, such as a function in the expression of an index,
 * runs in the session of somebody else, who analyzes the table or refreshes the
 * view: as the owner's role, but amid the locks of that session.
 */
static DlockSpace *
begin_change(void)
{
	check_unrestricted();
	return begin_unloaded();
}

/* The same for what a lease can have to do with: all of them are there. */
static DlockSpace *
begin_lease_change(void)
{
	(void) begin_change();
	return dlock_loaded_space();
}

static void
raise_null(const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
			 errmsg("argument \"%s\" must not be null", name),
			 errhint("Give a value, or leave the argument out if it has a default.")));
}

static inline void
need(FunctionCallInfo fcinfo, int argument, const char *name)
{
	if (unlikely(PG_ARGISNULL(argument)))
		raise_null(name);
}

/* A text argument, which is mostly as it is to be already */
static inline text *
get_text_argument(FunctionCallInfo fcinfo, int argument)
{
	struct varlena *value = (struct varlena *)
		DatumGetPointer(PG_GETARG_DATUM(argument));

	if (likely(!VARATT_IS_COMPRESSED(value) && !VARATT_IS_EXTERNAL(value)))
		return (text *) value;
	return PG_GETARG_TEXT_PP(argument);
}

static void
make_key(DlockKey *key, const DlockSpace *space, text *name)
{
	int			length = VARSIZE_ANY_EXHDR(name);

	if (length == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("lock name must not be empty"),
				 errhint("A name has between 1 and %d bytes.", DLOCK_MAX_NAME)));
	if (length > DLOCK_MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("lock name is too long"),
				 errdetail("It has %d bytes; at most %d are allowed.",
						   length, DLOCK_MAX_NAME),
				 errhint("Use a digest of it, such as md5().")));
	dlock_key_fill(key, space, VARDATA_ANY(name), length);
}

/* The lock name in the first argument, as every function has it. */
void
dlock_get_key(FunctionCallInfo fcinfo, const DlockSpace *space, DlockKey *key)
{
	need(fcinfo, 0, "name");
	make_key(key, space, get_text_argument(fcinfo, 0));
}

/* A call that asks for a lock, and is told what leases have there, too. */
static DlockSpace *
begin_named_call(FunctionCallInfo fcinfo, DlockKey *key)
{
	DlockSpace *space = begin_unloaded();

	dlock_get_key(fcinfo, space, key);
	(void) dlock_load_name(space, key, DLOCK_WAIT_FOREVER, NULL);
	return space;
}

/* For what changes something, and needs a right to a reserved name */
static DlockSpace *
begin_protected_change(FunctionCallInfo fcinfo, DlockKey *key)
{
	DlockSpace *space = begin_change();

	dlock_get_key(fcinfo, space, key);
	dlock_reserve_check(space, key);
	return space;
}

static DlockSpace *
begin_protected_lease_change(FunctionCallInfo fcinfo, DlockKey *key)
{
	(void) begin_protected_change(fcinfo, key);
	return dlock_loaded_space();
}

/*
 * A timeout.  Months count 30 days and days 24 hours, as in every place where
 * PostgreSQL makes a number of an interval.
 *
 * Whoever waits for longer than a year is most likely a program that sent
 * nanoseconds, or milliseconds, as a number, and PostgreSQL reads numbers as
 * seconds.  It is no error, because some write "for ever" like this.
 */
static DlockTimeout
get_timeout(FunctionCallInfo fcinfo, int argument)
{
	Interval   *interval;
	int64		days;
	int64		result;

	if (PG_ARGISNULL(argument))
		return DLOCK_WAIT_FOREVER;
	interval = PG_GETARG_INTERVAL_P(argument);
	if (COMPAT_INTERVAL_NOT_FINITE(interval) ||
		(days = (int64) interval->month * DAYS_PER_MONTH + interval->day,
		 pg_mul_s64_overflow(days, USECS_PER_DAY, &result)) ||
		pg_add_s64_overflow(result, interval->time, &result) ||
		result < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("timeout must not be negative or infinite"),
				 errhint("To wait without a limit, use timeout => NULL.")));
	if (result > LONG_TIMEOUT)
		ereport(WARNING,
				(errcode(ERRCODE_WARNING),
				 errmsg("timeout is %lld days long",
						(long long) (result / USECS_PER_DAY)),
				 errhint("A bare number is seconds; a program may have meant milliseconds or nanoseconds. To wait without a limit, use timeout => NULL.")));
	return result;
}

/*
 * The length of time that a lease lives without being renewed, or keeps its
 * locks closed, in microseconds.  A month is no length of time.
 */
static int64
get_length(FunctionCallInfo fcinfo, int argument, const char *name)
{
	Interval   *interval = PG_GETARG_INTERVAL_P(argument);
	int64		result = 0;

	if (COMPAT_INTERVAL_NOT_FINITE(interval) || interval->month != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a fixed length of time", name),
				 errhint("Give it in seconds, minutes, hours or days.")));
	if (pg_mul_s64_overflow(interval->day, USECS_PER_DAY, &result) ||
		pg_add_s64_overflow(result, interval->time, &result) ||
		result < DLOCK_MIN_TTL ||
		result > (int64) dlock_max_ttl * USECS_PER_SEC)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be between 100 ms and dlock.max_ttl", name),
				 errdetail("dlock.max_ttl is %d seconds.", dlock_max_ttl),
				 errhint("Use another %s, or change dlock.max_ttl.", name)));
	return result;
}

/* A text for others to read: "info" or "owner" */
static const char *
get_text(FunctionCallInfo fcinfo, int argument, const char *name)
{
	text	   *value;

	if (PG_ARGISNULL(argument))
		return NULL;
	value = PG_GETARG_TEXT_PP(argument);
	if (VARSIZE_ANY_EXHDR(value) > DLOCK_MAX_INFO)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s is too long", name),
				 errdetail("It has %d bytes; at most %d are allowed.",
						   (int) VARSIZE_ANY_EXHDR(value), DLOCK_MAX_INFO),
				 errhint("Keep what is longer elsewhere, and say where.")));
	return text_to_cstring(value);
}

static const char *
get_info(FunctionCallInfo fcinfo, int argument)
{
	return get_text(fcinfo, argument, "info");
}

/* Mode, slots and permits, from three arguments in a row. */
static void
get_mode(FunctionCallInfo fcinfo, int shared, DlockRequest *request)
{
	int			slots = shared + 1;
	int			permits = shared + 2;

	need(fcinfo, shared, "shared");
	need(fcinfo, permits, "permits");
	request->slots = PG_ARGISNULL(slots) ? 0 : PG_GETARG_INT32(slots);
	request->permits = PG_GETARG_INT32(permits);
	request->mode = PG_GETARG_BOOL(shared) ? DLOCK_SHARED :
		PG_ARGISNULL(slots) ? DLOCK_EXCLUSIVE : DLOCK_SLOTS;

	if (request->mode == DLOCK_SHARED && !PG_ARGISNULL(slots))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"shared\" and \"slots\" cannot be used together"),
				 errhint("A lock with slots is shared by nature: a request takes one permit, or as many as \"permits\" says.")));
	if (!PG_ARGISNULL(slots) && request->slots < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("slots must be 1 or more, not %d", request->slots),
				 errhint("Leave out \"slots\" for a lock that only one can hold.")));
	if (request->permits < 1 ||
		request->permits > (request->mode == DLOCK_SLOTS ? request->slots : 1))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("permits must be between 1 and slots, not %d",
						request->permits),
				 request->mode == DLOCK_SLOTS ?
				 errdetail("The lock has %d slots.", request->slots) :
				 errhint("Only a request with \"slots\" can take more than one permit.")));
}

/* What belongs to a session, and so is unfit where clients take turns in one */
typedef enum SessionUse
{
	USE_LOCK,
	USE_ATTACHED_LEASE,
	USE_CHANNEL,
	USE_WATCH
} SessionUse;

/* As check_session_use(), where the setting says something else than "allow" */
static void
advise_against_use(SessionUse use)
{
	static const char *const uses[] = {
		[USE_LOCK] = "session-scoped lock",
		[USE_ATTACHED_LEASE] = "lease attached to a session",
		[USE_CHANNEL] = "session's own channel",
		[USE_WATCH] = "watch"
	};
	bool		warn = dlock_session_locks == DLOCK_SESSION_LOCKS_WARN;

	ereport(warn ? WARNING : ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("%s requested where dlock.session_locks %s it", uses[use],
					warn ? "advises against" : "forbids"),
			 errdetail("Behind a transaction pooler, a session and what belongs to it outlive the client."),
			 use == USE_LOCK ? errhint("Use transaction or lease scope.") :
			 use == USE_ATTACHED_LEASE ?
			 errhint("Open the lease without \"attach\", and renew it.") :
			 use == USE_WATCH ?
			 errhint("Watch in a session that is not behind a pooler, or ask dlock_locks().") :
			 errhint("Give a channel that somebody listens on over a connection of its own.")));
}

/* Does dlock.session_locks let a client use its session for more than a moment? */
static inline void
check_session_use(SessionUse use)
{
	if (unlikely(dlock_session_locks != DLOCK_SESSION_LOCKS_ALLOW))
		advise_against_use(use);
}

static void
raise_timeout(DlockSpace *space, const DlockRequest *request,
			  DlockTimeout timeout, DlockOutcome outcome)
{
	if (outcome == DLOCK_NOT_LOADED)
		dlock_load_raise_timeout(space, &request->key);
	ereport(ERROR,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("could not acquire lock \"%.*s\" within its timeout",
					request->key.length, request->key.name),
			 errdetail("The timeout was %lld.%03d ms.",
					   (long long) (timeout / 1000), (int) (timeout % 1000)),
			 errhint("The view dlock_locks shows who holds the lock and who waits.")));
}

/*
 * Does a call give no argument but the name?  As most do, what takes arguments
 * apart need not even be looked at then.
 */
static inline bool
gives_name_alone(FunctionCallInfo fcinfo)
{
	const NullableDatum *args = fcinfo->args;

	return args[1].isnull && args[3].isnull && args[5].isnull &&
		!args[2].isnull && !DatumGetBool(args[2].value) &&
		!args[4].isnull && DatumGetInt32(args[4].value) == 1;
}

/*
 * The acquire functions of session and transaction scope:
 * (name, timeout, shared, slots, permits, info).
 */
static inline Datum
acquire(FunctionCallInfo fcinfo, DlockScope scope, bool try)
{
	DlockRequest request;
	DlockSpace *space = begin_protected_change(fcinfo, &request.key);
	DlockOutcome outcome;
	int64		fence;

	memset(&request, 0, offsetof(DlockRequest, key));
	request.scope = scope;
	if (likely(gives_name_alone(fcinfo)))
	{
		request.timeout = DLOCK_WAIT_FOREVER;
		request.mode = DLOCK_EXCLUSIVE;
		request.permits = 1;
	}
	else
	{
		request.timeout = get_timeout(fcinfo, 1);
		get_mode(fcinfo, 2, &request);
		request.info = get_info(fcinfo, 5);
	}
	if (scope == DLOCK_SESSION)
		check_session_use(USE_LOCK);

	fence = dlock_session_acquire(space, &request, &outcome);
	if (outcome == DLOCK_ACQUIRED)
		PG_RETURN_INT64(fence);
	if (!try)
		raise_timeout(space, &request, request.timeout, outcome);
	PG_RETURN_NULL();
}

PG_FUNCTION_INFO_V1(dlock_acquire);
Datum
dlock_acquire(PG_FUNCTION_ARGS)
{
	return acquire(fcinfo, DLOCK_SESSION, false);
}

PG_FUNCTION_INFO_V1(dlock_try_acquire);
Datum
dlock_try_acquire(PG_FUNCTION_ARGS)
{
	return acquire(fcinfo, DLOCK_SESSION, true);
}

PG_FUNCTION_INFO_V1(dlock_xact_acquire);
Datum
dlock_xact_acquire(PG_FUNCTION_ARGS)
{
	return acquire(fcinfo, DLOCK_TRANSACTION, false);
}

PG_FUNCTION_INFO_V1(dlock_try_xact_acquire);
Datum
dlock_try_xact_acquire(PG_FUNCTION_ARGS)
{
	return acquire(fcinfo, DLOCK_TRANSACTION, true);
}

/*
 * The row that a procedure returns, with a bigint that is yet to be filled in.
 * Made before anything is acquired, as looking up the type can fail.
 */
static HeapTuple
make_fence_row(FunctionCallInfo fcinfo)
{
	static const Oid types[] = {INT8OID};
	Datum		value = Int64GetDatum(0);
	bool		is_null = false;

	return heap_form_tuple(dlock_begin_row(fcinfo, types, lengthof(types)),
						   &value, &is_null);
}

/*
 * The procedure (name, timeout, shared, slots, permits, info, INOUT fence):
 * session scope, without a snapshot while it waits.
 */
PG_FUNCTION_INFO_V1(dlock_acquire_nosnapshot);
Datum
dlock_acquire_nosnapshot(PG_FUNCTION_ARGS)
{
	DlockRequest request = {
		.scope = DLOCK_SESSION,
		.without_snapshot = true
	};
	DlockSpace *space = begin_protected_change(fcinfo, &request.key);
	DlockOutcome outcome;
	HeapTuple	row = make_fence_row(fcinfo);
	int64		fence;

	request.timeout = get_timeout(fcinfo, 1);
	get_mode(fcinfo, 2, &request);
	request.info = get_info(fcinfo, 5);
	check_session_use(USE_LOCK);
	if (IsolationUsesXactSnapshot())
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("cannot drop the snapshot of a transaction whose isolation level is REPEATABLE READ or SERIALIZABLE"),
				 errhint("Call dlock_acquire_nosnapshot() in READ COMMITTED, or use dlock_acquire().")));
	if (ActivePortal == NULL || !ActiveSnapshotSet() ||
		ActivePortal->portalSnapshot != GetActiveSnapshot())
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("cannot wait without a snapshot here"),
				 errdetail("A function or an outer query holds a snapshot."),
				 errhint("Use CALL at top level, in a DO block or in a procedure, and where it is nested, outside of transaction and exception blocks; or use dlock_acquire().")));

	fence = dlock_session_acquire(space, &request, &outcome);
	if (outcome != DLOCK_ACQUIRED)
		raise_timeout(space, &request, request.timeout, outcome);
	memcpy((char *) row->t_data + row->t_data->t_hoff, &fence, sizeof(fence));
	PG_RETURN_DATUM(HeapTupleGetDatum(row));
}

static int
compare_keys(const DlockKey *a, const DlockKey *b)
{
	int			result = memcmp(a->name, b->name, Min(a->length, b->length));

	return result != 0 ? result : (int) a->length - (int) b->length;
}

static int
compare_key_pointers(const void *a, const void *b)
{
	return compare_keys(*(DlockKey *const *) a, *(DlockKey *const *) b);
}

/* For sorting: a key for each name may be many, and takes its time. */
static int
compare_interruptibly(const void *a, const void *b)
{
	CHECK_FOR_INTERRUPTS();
	return compare_key_pointers(a, b);
}

/*
 * Nobody can acquire more locks than that; and a key is many times as large as
 * a short name, so this comes before any is made.  Where a pointer has 32 bits,
 * their size could overflow.
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
 * The names of an array as keys: "keys" in the array's order, "sorted"
 * without duplicates in the order of their bytes, which is the one global
 * order of acquiring.  Returns how many "sorted" has.
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
		make_key(&(*keys)[i], space, DatumGetTextPP(elements[i]));
		dlock_reserve_check(space, &(*keys)[i]);
		(*sorted)[i] = &(*keys)[i];
	}
	qsort(*sorted, *count, sizeof(DlockKey *), compare_interruptibly);
	for (int i = 0; i < *count; i++)
	{
		if (unique == 0 ||
			compare_keys((*sorted)[unique - 1], (*sorted)[i]) != 0)
			(*sorted)[unique++] = (*sorted)[i];
	}
	return unique;
}

/*
 * The array to be returned, with room for "count" fences, and which of the
 * sorted keys each is for.  Made before anything is acquired: what comes after
 * that cannot fail, nor be interrupted.
 */
static ArrayType *
make_result(DlockKey *keys, int count, DlockKey **sorted, int unique,
			int **places)
{
	Datum	   *zeros = palloc(Max(count, 1) * sizeof(Datum));
	ArrayType  *result;

	*places = palloc(Max(count, 1) * sizeof(int));
	for (int i = 0; i < count; i++)
	{
		DlockKey   *key = &keys[i];
		DlockKey  **found = bsearch(&key, sorted, unique, sizeof(DlockKey *),
									compare_interruptibly);

		(*places)[i] = (int) (found - sorted);
		zeros[i] = Int64GetDatum(0);
	}
	result = construct_array(zeros, count, INT8OID, sizeof(int64),
							 FLOAT8PASSBYVAL, TYPALIGN_DOUBLE);
	pfree(zeros);
	return result;
}

static DlockLease *
get_lease(FunctionCallInfo fcinfo, DlockSpace *space, int argument)
{
	DlockLease *lease;

	need(fcinfo, argument, "lease");
	lease = dlock_lease_find(space, PG_GETARG_INT64(argument));
	if (lease == NULL)
	{
		dlock_raise_lease_gone(PG_GETARG_INT64(argument));
		pg_unreachable();
	}
	if (lease->single)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("lease %lld is a ticket's own",
						(long long) PG_GETARG_INT64(argument)),
				 errdetail("It keeps that ticket alone."),
				 errhint("For several locks, open a lease with dlock_lease_open().")));
	return lease;
}

/*
 * The functions that acquire many locks at once:
 * (names, timeout, shared, info), or (names, lease, timeout, shared, info).
 */
static Datum
acquire_all(FunctionCallInfo fcinfo, DlockScope scope, bool try)
{
	int			before = dlock_record_begin_uses();
	int			tail = scope == DLOCK_LEASE ? 2 : 1;
	DlockSpace *space = begin_change();
	DlockRequest request = {
		.scope = scope,
		.permits = 1,
	};
	DlockTimeout timeout;
	DlockOutcome outcome;
	DlockKey   *keys;
	DlockKey  **sorted;
	int64	   *fences;
	int		   *places;
	ArrayType  *result;
	int			count;
	int			unique;
	int			failed = 0;
	bool		acquired = false;

	need(fcinfo, 0, "names");
	if (scope == DLOCK_LEASE)
		need(fcinfo, 1, "lease");
	need(fcinfo, tail + 1, "shared");
	unique = get_keys(space, PG_GETARG_ARRAYTYPE_P(0), &count, &keys, &sorted);
	request.timeout = timeout = get_timeout(fcinfo, tail);
	request.mode = PG_GETARG_BOOL(tail + 1) ? DLOCK_SHARED : DLOCK_EXCLUSIVE;
	request.info = get_info(fcinfo, tail + 2);
	if (scope == DLOCK_SESSION)
		check_session_use(USE_LOCK);

	fences = palloc(Max(unique, 1) * sizeof(int64));
	result = make_result(keys, count, sorted, unique, &places);
	if (scope != DLOCK_LEASE)
		acquired = dlock_session_acquire_all(space, &request, sorted, unique,
											 fences, &failed, &outcome);
	else
	{
		/* where there is no lock to be busy, there is no timeout */
		if (unique == 0)
			request.timeout = DLOCK_WAIT_FOREVER;
		else
			request.key = *sorted[0];
		(void) dlock_request_wait_for_load(space, &request, &outcome);
		request.lease = get_lease(fcinfo, space, 1);
		acquired = dlock_lessee_acquire_all(space, &request, sorted, unique,
											fences, &failed, &outcome);
	}
	dlock_record_end_uses(before);
	if (!acquired)
	{
		request.key = *sorted[failed];
		if (!try)
			raise_timeout(space, &request, timeout, outcome);
		PG_RETURN_NULL();
	}

	for (int i = 0; i < count; i++)
		((int64 *) ARR_DATA_PTR(result))[i] = fences[places[i]];
	if (scope != DLOCK_TRANSACTION)
		dlock_xact_keep_result(fcinfo->flinfo, unique);
	PG_RETURN_ARRAYTYPE_P(result);
}

PG_FUNCTION_INFO_V1(dlock_acquire_all);
Datum
dlock_acquire_all(PG_FUNCTION_ARGS)
{
	return acquire_all(fcinfo, DLOCK_SESSION, false);
}

PG_FUNCTION_INFO_V1(dlock_try_acquire_all);
Datum
dlock_try_acquire_all(PG_FUNCTION_ARGS)
{
	return acquire_all(fcinfo, DLOCK_SESSION, true);
}

PG_FUNCTION_INFO_V1(dlock_xact_acquire_all);
Datum
dlock_xact_acquire_all(PG_FUNCTION_ARGS)
{
	return acquire_all(fcinfo, DLOCK_TRANSACTION, false);
}

PG_FUNCTION_INFO_V1(dlock_try_xact_acquire_all);
Datum
dlock_try_xact_acquire_all(PG_FUNCTION_ARGS)
{
	return acquire_all(fcinfo, DLOCK_TRANSACTION, true);
}

/* A channel of somebody else's, or NULL for this session's own. */
static const char *
get_channel(FunctionCallInfo fcinfo, int argument, DlockScope scope)
{
	text	   *channel;

	if (PG_ARGISNULL(argument))
	{
		/* of a session's ticket, that was told already */
		if (scope == DLOCK_LEASE)
			check_session_use(USE_CHANNEL);
		return dlock_notify_listen();
	}
	channel = PG_GETARG_TEXT_PP(argument);
	if (VARSIZE_ANY_EXHDR(channel) == 0 ||
		VARSIZE_ANY_EXHDR(channel) >= NAMEDATALEN)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("channel name must have between 1 and %d bytes, not %d",
						NAMEDATALEN - 1, (int) VARSIZE_ANY_EXHDR(channel)),
				 errhint("Leave out \"channel\" to use this session's own.")));
	return text_to_cstring(channel);
}

/*
 * (name, channel): who holds a lock is for everybody to know, as with dlock_locks,
 * be its name reserved or not.
 */
PG_FUNCTION_INFO_V1(dlock_watch);
Datum
dlock_watch(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();
	DlockKey	key;

	dlock_get_key(fcinfo, space, &key);
	check_session_use(USE_WATCH);
	dlock_session_watch(space, &key, get_channel(fcinfo, 1, DLOCK_SESSION));
	PG_RETURN_VOID();
}

PG_FUNCTION_INFO_V1(dlock_unwatch);
Datum
dlock_unwatch(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();
	DlockKey	key;

	dlock_get_key(fcinfo, space, &key);
	PG_RETURN_BOOL(dlock_session_unwatch(&key));
}

/* (name, channel, shared, slots, permits, info) */
PG_FUNCTION_INFO_V1(dlock_enqueue);
Datum
dlock_enqueue(PG_FUNCTION_ARGS)
{
	DlockRequest request = {
		.scope = DLOCK_SESSION,
		.timeout = DLOCK_WAIT_FOREVER
	};
	DlockSpace *space = begin_protected_change(fcinfo, &request.key);

	get_mode(fcinfo, 2, &request);
	request.info = get_info(fcinfo, 5);
	check_session_use(USE_LOCK);
	request.channel = get_channel(fcinfo, 1, DLOCK_SESSION);
	PG_RETURN_INT64(dlock_session_enqueue(space, &request));
}

PG_FUNCTION_INFO_V1(dlock_lease_acquire_all);
Datum
dlock_lease_acquire_all(PG_FUNCTION_ARGS)
{
	return acquire_all(fcinfo, DLOCK_LEASE, false);
}

PG_FUNCTION_INFO_V1(dlock_try_lease_acquire_all);
Datum
dlock_try_lease_acquire_all(PG_FUNCTION_ARGS)
{
	return acquire_all(fcinfo, DLOCK_LEASE, true);
}

/* (ttl, attach, delay, info) */
PG_FUNCTION_INFO_V1(dlock_lease_open);
Datum
dlock_lease_open(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_lease_change();
	int64		ttl;
	int64		delay = 0;

	need(fcinfo, 0, "ttl");
	need(fcinfo, 1, "attach");
	ttl = get_length(fcinfo, 0, "ttl");
	if (!PG_ARGISNULL(2))
		delay = get_length(fcinfo, 2, "delay");
	if (PG_GETARG_BOOL(1))
		check_session_use(USE_ATTACHED_LEASE);
	PG_RETURN_INT64(dlock_lease_begin(space, ttl, delay, PG_GETARG_BOOL(1),
									  get_info(fcinfo, 3)));
}

PG_FUNCTION_INFO_V1(dlock_lease_close);
Datum
dlock_lease_close(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_lease_change();
	NameData	role;
	bool		is_other;
	int64		count;

	need(fcinfo, 0, "lease");
	is_other = dlock_lease_is_other(space, PG_GETARG_INT64(0), &role);
	count = dlock_lease_release(space, PG_GETARG_INT64(0));
	if (count >= 0 && is_other)
		dlock_log_forced_close(PG_GETARG_INT64(0), NameStr(role), count);
	if (count >= 0)
		PG_RETURN_INT64(count);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("lease %lld is gone", (long long) PG_GETARG_INT64(0))));
	PG_RETURN_NULL();
}

/* (id, ttl) */
PG_FUNCTION_INFO_V1(dlock_renew);
Datum
dlock_renew(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_lease_change();
	int			count;

	need(fcinfo, 0, "id");
	count = !PG_ARGISNULL(1) ?
		dlock_change_ttl(PG_GETARG_INT64(0), get_length(fcinfo, 1, "ttl")) :
		dlock_lease_renew(space, PG_GETARG_INT64(0));
	if (count < 0)
		PG_RETURN_NULL();
	PG_RETURN_INT32(count);
}

/*
 * The second argument of the lease and ttl functions: a lease, or the ttl of
 * one that is made for this request.
 */
static void
get_lease_or_ttl(FunctionCallInfo fcinfo, DlockSpace *space, bool ttl,
				 DlockRequest *request)
{
	if (ttl)
	{
		need(fcinfo, 1, "ttl");
		dlock_request_check_memory(space, GetUserId());
		request->lease = dlock_lease_make_single(space, GetUserId(), NULL,
												 get_length(fcinfo, 1, "ttl"),
												 &request->key);
	}
	else
		request->lease = get_lease(fcinfo, space, 1);
}

/*
 * The acquire functions of lease scope:
 * (name, lease or ttl, timeout, shared, slots, permits, owner, info).
 */
static Datum
acquire_for_lease(FunctionCallInfo fcinfo, bool ttl, bool try)
{
	DlockRequest request;
	DlockSpace *space = begin_protected_change(fcinfo, &request.key);
	int			before = dlock_record_begin_uses();
	DlockOutcome outcome;
	DlockTimeout timeout;
	int64		fence;

	memset(&request, 0, offsetof(DlockRequest, key));
	request.scope = DLOCK_LEASE;
	request.timeout = timeout = get_timeout(fcinfo, 2);
	get_mode(fcinfo, 3, &request);
	request.owner = get_text(fcinfo, 6, "owner");
	request.info = get_info(fcinfo, 7);
	(void) dlock_request_wait_for_load(space, &request, &outcome);
	get_lease_or_ttl(fcinfo, space, ttl, &request);
	fence = dlock_lessee_acquire(space, &request, &outcome);
	dlock_record_end_uses(before);
	if (outcome == DLOCK_ACQUIRED)
	{
		dlock_xact_keep_result(fcinfo->flinfo, 1);
		PG_RETURN_INT64(fence);
	}
	if (!try)
		raise_timeout(space, &request, timeout, outcome);
	PG_RETURN_NULL();
}

PG_FUNCTION_INFO_V1(dlock_lease_acquire);
Datum
dlock_lease_acquire(PG_FUNCTION_ARGS)
{
	return acquire_for_lease(fcinfo, false, false);
}

PG_FUNCTION_INFO_V1(dlock_try_lease_acquire);
Datum
dlock_try_lease_acquire(PG_FUNCTION_ARGS)
{
	return acquire_for_lease(fcinfo, false, true);
}

PG_FUNCTION_INFO_V1(dlock_ttl_acquire);
Datum
dlock_ttl_acquire(PG_FUNCTION_ARGS)
{
	return acquire_for_lease(fcinfo, true, false);
}

PG_FUNCTION_INFO_V1(dlock_try_ttl_acquire);
Datum
dlock_try_ttl_acquire(PG_FUNCTION_ARGS)
{
	return acquire_for_lease(fcinfo, true, true);
}

/* (name, lease or ttl, channel, shared, slots, permits, owner, info) */
static Datum
enqueue_for_lease(FunctionCallInfo fcinfo, bool ttl)
{
	DlockRequest request;
	DlockSpace *space = begin_protected_lease_change(fcinfo, &request.key);
	int			before = dlock_record_begin_uses();
	int64		number;

	memset(&request, 0, offsetof(DlockRequest, key));
	request.scope = DLOCK_LEASE;
	request.timeout = DLOCK_WAIT_FOREVER;
	get_mode(fcinfo, 3, &request);
	request.owner = get_text(fcinfo, 6, "owner");
	request.info = get_info(fcinfo, 7);
	request.channel = get_channel(fcinfo, 2, DLOCK_LEASE);
	get_lease_or_ttl(fcinfo, space, ttl, &request);
	number = dlock_lessee_enqueue(space, &request, fcinfo->flinfo);
	dlock_record_end_uses(before);
	PG_RETURN_INT64(number);
}

PG_FUNCTION_INFO_V1(dlock_lease_enqueue);
Datum
dlock_lease_enqueue(PG_FUNCTION_ARGS)
{
	return enqueue_for_lease(fcinfo, false);
}

PG_FUNCTION_INFO_V1(dlock_ttl_enqueue);
Datum
dlock_ttl_enqueue(PG_FUNCTION_ARGS)
{
	return enqueue_for_lease(fcinfo, true);
}

PG_FUNCTION_INFO_V1(dlock_wait);
Datum
dlock_wait(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();
	int			before = dlock_record_begin_uses();
	bool		granted;

	need(fcinfo, 0, "ticket");
	granted = dlock_session_wait(space, PG_GETARG_INT64(0),
								 get_timeout(fcinfo, 1));
	dlock_record_end_uses(before);
	PG_RETURN_BOOL(granted);
}

PG_FUNCTION_INFO_V1(dlock_channel);
Datum
dlock_channel(PG_FUNCTION_ARGS)
{
	(void) begin_change();
	check_session_use(USE_CHANNEL);
	PG_RETURN_TEXT_P(cstring_to_text(dlock_notify_listen()));
}

/*
 * What the session has acquired last is released in the space that it knows,
 * without a look at whether that is still the extension's: had that been dropped
 * a moment ago, this would be as good as a release before it.
 */
PG_FUNCTION_INFO_V1(dlock_release);
Datum
dlock_release(PG_FUNCTION_ARGS)
{
	DlockSpace *known = dlock_known_space();
	DlockKey	key;
	bool		released;

	check_unrestricted();
	need(fcinfo, 0, "name");
	if (likely(known != NULL))
	{
		text	   *name = get_text_argument(fcinfo, 0);

		dlock_worker_look(known);
		if (likely(dlock_session_release_latest(known, VARDATA_ANY(name),
												VARSIZE_ANY_EXHDR(name),
												&released)))
			PG_RETURN_BOOL(released);
	}
	dlock_get_key(fcinfo, begin_change(), &key);
	PG_RETURN_BOOL(dlock_session_release(&key));
}

PG_FUNCTION_INFO_V1(dlock_release_ticket);
Datum
dlock_release_ticket(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();

	need(fcinfo, 0, "ticket");
	PG_RETURN_BOOL(dlock_session_release_ticket(space, PG_GETARG_INT64(0)));
}

PG_FUNCTION_INFO_V1(dlock_release_at_commit);
Datum
dlock_release_at_commit(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();

	need(fcinfo, 0, "ticket");
	dlock_xact_release_at_commit(space, PG_GETARG_INT64(0));
	PG_RETURN_VOID();
}

/* (id, info) */
PG_FUNCTION_INFO_V1(dlock_set_info);
Datum
dlock_set_info(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();

	need(fcinfo, 0, "id");
	if (dlock_change_info(space, PG_GETARG_INT64(0), get_info(fcinfo, 1)))
		PG_RETURN_BOOL(true);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("ticket or lease %lld is gone",
					(long long) PG_GETARG_INT64(0)),
			 errdetail("It was released, or lost, or it was never this session's or a lease's.")));
	PG_RETURN_BOOL(false);
}

PG_FUNCTION_INFO_V1(dlock_downgrade);
Datum
dlock_downgrade(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();

	need(fcinfo, 0, "ticket");
	if (dlock_change_mode(space, PG_GETARG_INT64(0)))
		PG_RETURN_BOOL(true);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("neither this session nor a lease holds ticket %lld",
					(long long) PG_GETARG_INT64(0))));
	PG_RETURN_BOOL(false);
}

/* (name, slots) */
PG_FUNCTION_INFO_V1(dlock_set_slots);
Datum
dlock_set_slots(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space = begin_protected_change(fcinfo, &key);
	int32		slots = PG_ARGISNULL(1) ? 0 : PG_GETARG_INT32(1);

	if (!PG_ARGISNULL(1) && slots < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("slots must be 1 or more, not %d", slots),
				 errhint("To have requests say how many there are, use slots => NULL.")));
	dlock_slots_check_right(space, &key, fcinfo->flinfo->fn_oid);
	dlock_slots_set(space, &key, slots);
	PG_RETURN_VOID();
}

/*
 * (name), in a constraint of dlock_slots: a row with this name is about to be
 * written.  Names that cannot be are left to another constraint.
 */
PG_FUNCTION_INFO_V1(dlock_note_slots);
Datum
dlock_note_slots(PG_FUNCTION_ARGS)
{
	text	   *name = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	DlockSpace *space = begin_unloaded();
	DlockKey	key;

	if (name && VARSIZE_ANY_EXHDR(name) > 0 &&
		VARSIZE_ANY_EXHDR(name) <= DLOCK_MAX_NAME)
	{
		dlock_key_fill(&key, space, VARDATA_ANY(name),
					   VARSIZE_ANY_EXHDR(name));
		dlock_slots_note(space, &key);
	}
	PG_RETURN_BOOL(true);
}

PG_FUNCTION_INFO_V1(dlock_release_all);
Datum
dlock_release_all(PG_FUNCTION_ARGS)
{
	(void) begin_change();
	PG_RETURN_INT64(dlock_session_release_all());
}

/* (name, lease) */
PG_FUNCTION_INFO_V1(dlock_is_held);
Datum
dlock_is_held(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space;
	bool		held;

	if (!PG_ARGISNULL(1))
	{
		space = begin_named_call(fcinfo, &key);
		PG_RETURN_BOOL(dlock_queue_is_held_by(space, &key,
											  PG_GETARG_INT64(1)));
	}
	space = begin_unloaded();
	dlock_get_key(fcinfo, space, &key);
	held = dlock_session_holds(&key);
	if (held)
		dlock_journal_flush_removal(space, &key);
	PG_RETURN_BOOL(held);
}

PG_FUNCTION_INFO_V1(dlock_fence);
Datum
dlock_fence(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	int64		fence;

	(void) begin_named_call(fcinfo, &key);
	fence = dlock_queue_fence(&key);
	if (fence == 0)
		PG_RETURN_NULL();
	PG_RETURN_INT64(fence);
}

PG_FUNCTION_INFO_V1(dlock_check);
Datum
dlock_check(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space = begin_named_call(fcinfo, &key);

	need(fcinfo, 1, "fence");
	PG_RETURN_BOOL(dlock_session_check(space, &key, PG_GETARG_INT64(1)));
}

PG_FUNCTION_INFO_V1(dlock_guard);
Datum
dlock_guard(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();
	DlockKey	key;

	/*
	 * The extension is not dropped, and made anew with everything free, before
	 * the guarded transaction is over.  Should that have happened while we
	 * waited for this, the fence is not found in what is there now.
	 */
	LockDatabaseObject(ExtensionRelationId, space->key.extension, 0,
					   AccessShareLock);
	space = begin_protected_change(fcinfo, &key);
	need(fcinfo, 1, "fence");
	(void) dlock_load_name(space, &key, DLOCK_WAIT_FOREVER, NULL);
	dlock_xact_guard(space, &key, PG_GETARG_INT64(1));
	/* it may have been enqueued, and granted since */
	dlock_journal_flush_removal(space, &key);
	PG_RETURN_VOID();
}

PG_FUNCTION_INFO_V1(dlock_version_of);
Datum
dlock_version_of(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space = begin_unloaded();

	dlock_get_key(fcinfo, space, &key);
	dlock_reserve_check(space, &key);
	PG_RETURN_INT64(dlock_version_read(space, &key));
}

/* (name, expected); returns 0 where the version is another one. */
static int64
bump_version(FunctionCallInfo fcinfo, DlockKey *key, DlockSpace **space)
{
	int64		expected;

	*space = begin_protected_change(fcinfo, key);
	need(fcinfo, 1, "expected");
	expected = PG_GETARG_INT64(1);
	if (expected < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("expected version must not be negative, but is %lld",
						(long long) expected),
				 errhint("The version of a name never bumped is 0.")));
	return dlock_version_increment(*space, key, expected);
}

PG_FUNCTION_INFO_V1(dlock_version_bump);
Datum
dlock_version_bump(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space;
	int64		version = bump_version(fcinfo, &key, &space);

	if (version == 0)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("version of \"%.*s\" is not %lld any more",
						key.length, key.name,
						(long long) PG_GETARG_INT64(1)),
				 errdetail("It is %lld.",
						   (long long) dlock_version_read(space, &key)),
				 errhint("Read the version and the data again, and repeat the transaction.")));
	PG_RETURN_INT64(version);
}

PG_FUNCTION_INFO_V1(dlock_try_version_bump);
Datum
dlock_try_version_bump(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space;
	int64		version = bump_version(fcinfo, &key, &space);

	if (version == 0)
		PG_RETURN_NULL();
	PG_RETURN_INT64(version);
}

/*
 * Statement trigger: the transaction must have guarded the lock that the
 * trigger's argument names.
 */
PG_FUNCTION_INFO_V1(dlock_require_guard);
Datum
dlock_require_guard(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_trigger(fcinfo, "dlock_require_guard");
	DlockKey	key;

	if (!TRIGGER_FIRED_FOR_STATEMENT(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired for each statement",
						"dlock_require_guard")));
	if (trigger->tg_trigger->tgnargs != 1)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" needs the name of a lock as its only argument",
						"dlock_require_guard")));
	make_key(&key, begin_unloaded(), cstring_to_text(trigger->tg_trigger->tgargs[0]));
	if (!dlock_xact_has_guarded(&key))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot change table \"%s\" without a guard of lock \"%.*s\"",
						RelationGetRelationName(trigger->tg_relation),
						key.length, key.name),
				 errhint("Acquire the lock and call dlock_guard() in this transaction first.")));
	return PointerGetDatum(NULL);
}

PG_FUNCTION_INFO_V1(dlock_force_release);
Datum
dlock_force_release(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_lease_change();
	DlockForced forced;

	need(fcinfo, 0, "ticket");
	if (!dlock_queue_force(space, PG_GETARG_INT64(0), &forced))
		PG_RETURN_BOOL(false);
	dlock_log_forced_release(space, PG_GETARG_INT64(0), &forced);
	PG_RETURN_BOOL(true);
}

PG_FUNCTION_INFO_V1(dlock_force_close);
Datum
dlock_force_close(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_lease_change();
	NameData	role;
	int64		count;

	need(fcinfo, 0, "lease");
	(void) dlock_lease_is_other(space, PG_GETARG_INT64(0), &role);
	count = dlock_lease_force(space, PG_GETARG_INT64(0));
	if (count < 0)
		PG_RETURN_NULL();
	dlock_log_forced_close(PG_GETARG_INT64(0), NameStr(role), count);
	PG_RETURN_INT64(count);
}

PG_FUNCTION_INFO_V1(dlock_version_forget);
Datum
dlock_version_forget(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();
	DlockKey	key;

	dlock_get_key(fcinfo, space, &key);
	PG_RETURN_BOOL(dlock_version_remove(space, &key));
}

/* (prefix, owner) */
PG_FUNCTION_INFO_V1(dlock_reserve);
Datum
dlock_reserve(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();

	need(fcinfo, 0, "prefix");
	need(fcinfo, 1, "owner");
	dlock_reserve_add(space, PG_GETARG_TEXT_PP(0), PG_GETARG_OID(1));
	PG_RETURN_VOID();
}

PG_FUNCTION_INFO_V1(dlock_unreserve);
Datum
dlock_unreserve(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();

	need(fcinfo, 0, "prefix");
	PG_RETURN_BOOL(dlock_reserve_remove(space, PG_GETARG_TEXT_PP(0)));
}

/*
 * For a copy of the server that takes itself for the original: end all leases.
 * Rows of other systems go as well, wherever that is told.
 */
PG_FUNCTION_INFO_V1(dlock_reset);
Datum
dlock_reset(PG_FUNCTION_ARGS)
{
	static const char *const tables[] = {"dlock_queue", "dlock_queue_lease"};
	DlockSpace *space = begin_lease_change();
	Oid			types[] = {INT8OID, OIDOID};
	Datum		values[] = {
		Int64GetDatum((int64) GetSystemIdentifier()),
		ObjectIdGetDatum(MyDatabaseId)
	};
	int64		count;

	for (int i = 0; i < (int) lengthof(tables); i++)
		(void) dlock_execute_as_owner(space, tables[i],
									  "DELETE FROM %s WHERE system OPERATOR(pg_catalog.<>) $1 "
									  "OR database OPERATOR(pg_catalog.<>) $2",
									  2, types, values, NULL);
	count = dlock_lease_end_all(space);
	ereport(LOG,
			(errmsg("dlock_reset() has ended %lld leases", (long long) count),
			 errdetail_internal("%s", dlock_describe_caller())));
	PG_RETURN_INT64(count);
}

/*
 * Returns the least number that a ticket can have from now on.
 */
PG_FUNCTION_INFO_V1(dlock_advance_ticket);
Datum
dlock_advance_ticket(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();
	int64		minimum;

	need(fcinfo, 0, "minimum");
	minimum = PG_GETARG_INT64(0);
	if (minimum < 1 || minimum > DLOCK_MAX_TICKET - DLOCK_TICKET_BLOCK)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ticket number must be between 1 and %lld, not %lld",
						(long long) (DLOCK_MAX_TICKET - DLOCK_TICKET_BLOCK),
						(long long) minimum),
				 errhint("Numbers that were passed over never come back.")));
	dlock_ticket_reserve(space, minimum);
	PG_RETURN_INT64((int64) pg_atomic_read_u64(&space->next_ticket));
}

/*
 * The counters of dlock_stats and dlock_wait_histogram begin anew, and so does
 * dlock_contention.
 */
PG_FUNCTION_INFO_V1(dlock_stats_reset);
Datum
dlock_stats_reset(PG_FUNCTION_ARGS)
{
	DlockSpace *space = begin_change();

	dlock_reset_counters(space);
	dlock_contention_reset(space);
	PG_RETURN_VOID();
}
