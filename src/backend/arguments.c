/*-------------------------------------------------------------------------
 *
 * arguments.c
 *	  Beginning calls from SQL, and reading their arguments.
 *
 * No function is strict, because the NULL that a strict function returns would
 * mean "not acquired".  If an argument needs a value, a NULL raises an error.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "common/int.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "backend/api.h"
#include "tables/tables.h"

/* In microseconds.  A longer timeout is probably a mistake. */
#define LONG_TIMEOUT	(366 * USECS_PER_DAY)

int			dlock_max_ttl;
int			dlock_session_locks;

/* Begin a call.  Does not wait until the space's leases are loaded. */
DlockSpace *
dlock_begin_call(void)
{
	DlockSpace *space;

	if (RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("cannot use locks during recovery"),
				 errdetail("A standby server knows nothing of the locks that its primary grants."),
				 errhint("Connect to the primary server.")));
	dlock_session_check_parallel();
	if (unlikely(!dlock_session_attached))
		dlock_session_attach();
	space = dlock_current_space();
	dlock_worker_look(space, false);
	return space;
}

void
dlock_check_unrestricted(void)
{
	if (InSecurityRestrictedOperation())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("cannot change locks within a security-restricted operation"),
				 errdetail("Here the code of an object's owner runs amid the locks of another role's session.")));
}

/*
 * Begin a call that changes state.  A wait or a LISTEN is a change, too.
 * Raises an error in a security-restricted operation, for example if ANALYZE
 * calls a function of the table's owner for an index.
 */
DlockSpace *
dlock_begin_change(void)
{
	dlock_check_unrestricted();
	return dlock_begin_call();
}

/* Begin a change that needs all leases loaded. */
DlockSpace *
dlock_begin_lease_change(void)
{
	(void) dlock_begin_change();
	return dlock_loaded_space();
}

void
dlock_raise_null(const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
			 errmsg("argument \"%s\" must not be null", name),
			 errhint("Give a value, or leave the argument out if it has a default.")));
}

/*
 * Raise 22021 if the text is not in the database's encoding.  PostgreSQL does
 * not check the settings that a client sends when it connects.
 */
static void
check_encoding(const text *value)
{
	(void) pg_verifymbstr(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value), false);
}

void
dlock_make_key(DlockKey *key, const DlockSpace *space, text *name)
{
	int			length = VARSIZE_ANY_EXHDR(name);
	uint64		bits = 0;

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
	for (unsigned int w = 0; w < dlock_name_words(length); w++)
		bits |= key->words[w];
	if (unlikely(bits & UINT64CONST(0x8080808080808080)))
		check_encoding(name);
}

/* Make the key of the name, which is always the first argument. */
void
dlock_get_key(FunctionCallInfo fcinfo, const DlockSpace *space, DlockKey *key)
{
	dlock_need(fcinfo, 0, "name");
	dlock_make_key(key, space, dlock_get_varlena(fcinfo, 0));
}

/* Begin a call that asks about a lock.  Loads the lock's rows. */
DlockSpace *
dlock_begin_named_call(FunctionCallInfo fcinfo, DlockKey *key)
{
	DlockSpace *space = dlock_begin_call();

	dlock_get_key(fcinfo, space, key);
	(void) dlock_load_name(space, key, DLOCK_WAIT_FOREVER, NULL);
	return space;
}

/* Begin a change.  Raises 42501 if the name is reserved for another role. */
DlockSpace *
dlock_begin_protected_change(FunctionCallInfo fcinfo, DlockKey *key)
{
	DlockSpace *space = dlock_begin_change();

	dlock_get_key(fcinfo, space, key);
	dlock_reserve_check(space, key);
	return space;
}

/*
 * Returns the microseconds in an interval, or -1 if the interval is negative,
 * too long or infinite.  Months have 30 days, and days 24 hours.
 */
static int64
interval_length(const Interval *interval)
{
	int64		days = (int64) interval->month * DAYS_PER_MONTH + interval->day;
	int64		result;

	if (pg_mul_s64_overflow(days, USECS_PER_DAY, &result) ||
		pg_add_s64_overflow(result, interval->time, &result))
		return -1;
	return Max(result, -1);
}

/* A long timeout raises only a warning: a program may mean "no timeout". */
DlockTimeout
dlock_get_timeout(FunctionCallInfo fcinfo, int argument)
{
	int64		result;

	if (PG_ARGISNULL(argument))
		return DLOCK_WAIT_FOREVER;
	result = interval_length(PG_GETARG_INTERVAL_P(argument));
	if (result < 0)
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

/* Returns a ttl or a delay, in microseconds. */
int64
dlock_get_duration(FunctionCallInfo fcinfo, int argument, const char *name)
{
	Interval   *interval = PG_GETARG_INTERVAL_P(argument);
	int64		result = interval_length(interval);

	if (interval->month != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a fixed length of time", name),
				 errhint("Give it in seconds, minutes, hours or days.")));
	if (result < DLOCK_MIN_TTL ||
		result > (int64) dlock_max_ttl * USECS_PER_SEC)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be between 100 ms and dlock.max_ttl", name),
				 errdetail("dlock.max_ttl is %d seconds.", dlock_max_ttl),
				 errhint("Use another %s, or change dlock.max_ttl.", name)));
	return result;
}

/* Returns an info or an owner, or NULL if the argument is null. */
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
				 errhint("Store a longer text elsewhere, and refer to it.")));
	check_encoding(value);
	return text_to_cstring(value);
}

const char *
dlock_get_info(FunctionCallInfo fcinfo, int argument)
{
	return get_text(fcinfo, argument, "info");
}

/* (..., shared, slots, permits, [owner, only for a lease,] info) */
void
dlock_get_request(FunctionCallInfo fcinfo, int shared, DlockRequest *request)
{
	int			slots = shared + 1;
	int			permits = shared + 2;
	int			next = shared + 3;

	dlock_need(fcinfo, shared, "shared");
	dlock_need(fcinfo, permits, "permits");
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

	if (request->scope == DLOCK_LEASE)
		request->owner = get_text(fcinfo, next++, "owner");
	request->info = dlock_get_info(fcinfo, next);
}

/* Warn against a use of the session, or refuse it (dlock.session_locks). */
void
dlock_advise_against_use(DlockSessionUse use)
{
	static const struct
	{
		const char *name;
		const char *hint;
	}			uses[] = {
		[DLOCK_USE_LOCK] = {"session-scoped lock",
		"Use transaction or lease scope."},
		[DLOCK_USE_ATTACHED_LEASE] = {"lease attached to a session",
		"Open the lease without \"attach\", and renew it."},
		[DLOCK_USE_CHANNEL] = {"session's own channel",
		"Give a channel that a client listens on over a connection of its own."},
		[DLOCK_USE_WATCH] = {"watch",
		"Watch in a session that is not behind a pooler, or ask dlock_locks()."}
	};
	bool		warn = dlock_session_locks == DLOCK_SESSION_LOCKS_WARN;

	ereport(warn ? WARNING : ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("%s requested although dlock.session_locks %s it",
					uses[use].name, warn ? "advises against" : "forbids"),
			 errdetail("Behind a transaction pooler, a session and what belongs to it outlive the client."),
			 errhint("%s", uses[use].hint)));
}

void
dlock_raise_timeout(DlockSpace *space, const DlockRequest *request,
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

/* Find the lease, the second argument, and note a use of the lease. */
DlockLease *
dlock_get_lease(FunctionCallInfo fcinfo, DlockSpace *space)
{
	int64		number = dlock_get_int64(fcinfo, 1, "lease");
	DlockLease *lease = dlock_lease_find(space, number);

	if (lease == NULL)
	{
		dlock_raise_lease_gone(number);
		pg_unreachable();
	}
	if (lease->single)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("lease %lld is a ticket's own", (long long) number),
				 errdetail("It cannot have other tickets."),
				 errhint("For several locks, open a lease with dlock_lease_open().")));
	return lease;
}

/* Returns the given channel or, by default, this session's own. */
const char *
dlock_get_channel(FunctionCallInfo fcinfo, int argument, DlockScope scope)
{
	text	   *channel;

	if (PG_ARGISNULL(argument))
	{
		/* in session scope, the caller has checked dlock.session_locks */
		if (scope == DLOCK_LEASE)
			dlock_check_session_use(DLOCK_USE_CHANNEL);
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
	check_encoding(channel);
	return text_to_cstring(channel);
}
