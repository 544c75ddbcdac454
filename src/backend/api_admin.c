/*-------------------------------------------------------------------------
 *
 * api_admin.c
 *	  The functions that SQL calls, for versions, slots and administrators.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "backend/api.h"

/* (name, slots) */
PG_FUNCTION_INFO_V1(dlock_set_slots);
Datum
dlock_set_slots(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &key);
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

/* (name).  One CHECK constraint calls this; another refuses invalid names. */
PG_FUNCTION_INFO_V1(dlock_note_slots);
Datum
dlock_note_slots(PG_FUNCTION_ARGS)
{
	text	   *name = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	DlockSpace *space = dlock_begin_call();
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

PG_FUNCTION_INFO_V1(dlock_version_of);
Datum
dlock_version_of(PG_FUNCTION_ARGS)
{
	DlockKey	key;
	DlockSpace *space = dlock_begin_call();

	dlock_get_key(fcinfo, space, &key);
	dlock_reserve_check(space, &key);
	PG_RETURN_INT64(dlock_version_read(space, &key));
}

/* (name, expected) */
static Datum
bump_version(FunctionCallInfo fcinfo, bool try)
{
	DlockKey	key;
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &key);
	int64		expected = dlock_get_int64(fcinfo, 1, "expected");
	int64		version;

	if (expected < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("expected version must not be negative, but is %lld",
						(long long) expected),
				 errhint("A name that was never bumped has version 0.")));
	version = dlock_version_increment(space, &key, expected);
	if (version != 0)
		PG_RETURN_INT64(version);
	if (!try)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("version of \"%.*s\" is not %lld",
						key.length, key.name, (long long) expected),
				 errdetail("It is %lld.",
						   (long long) dlock_version_read(space, &key)),
				 errhint("Read the version and the data again, and repeat the transaction.")));
	PG_RETURN_NULL();
}

DLOCK_FUNCTION(dlock_version_bump, bump_version(fcinfo, false));
DLOCK_FUNCTION(dlock_try_version_bump, bump_version(fcinfo, true));

PG_FUNCTION_INFO_V1(dlock_force_release);
Datum
dlock_force_release(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_lease_change();
	int64		number = dlock_get_int64(fcinfo, 0, "ticket");
	DlockForced forced;

	if (!dlock_queue_force(space, number, &forced))
		PG_RETURN_BOOL(false);
	dlock_log_forced_release(space, number, &forced);
	PG_RETURN_BOOL(true);
}

PG_FUNCTION_INFO_V1(dlock_force_close);
Datum
dlock_force_close(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_lease_change();
	int64		number = dlock_get_int64(fcinfo, 0, "lease");
	NameData	role = {{0}};
	bool		was_open;
	int64		count;

	(void) dlock_lease_is_other(space, number, &role);
	count = dlock_lease_force(space, number, &was_open);
	if (count < 0)
		PG_RETURN_NULL();
	dlock_log_forced_close(number, NameStr(role), count);
	PG_RETURN_INT64(count);
}

PG_FUNCTION_INFO_V1(dlock_version_forget);
Datum
dlock_version_forget(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	DlockKey	key;

	dlock_get_key(fcinfo, space, &key);
	PG_RETURN_BOOL(dlock_version_remove(space, &key));
}

/* (prefix, owner) */
PG_FUNCTION_INFO_V1(dlock_reserve);
Datum
dlock_reserve(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();

	dlock_need(fcinfo, 0, "prefix");
	dlock_need(fcinfo, 1, "owner");
	dlock_reserve_add(space, PG_GETARG_TEXT_PP(0), PG_GETARG_OID(1));
	PG_RETURN_VOID();
}

PG_FUNCTION_INFO_V1(dlock_unreserve);
Datum
dlock_unreserve(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();

	dlock_need(fcinfo, 0, "prefix");
	PG_RETURN_BOOL(dlock_reserve_remove(space, PG_GETARG_TEXT_PP(0)));
}

/* For a copy of a server: the copy must not keep the original's leases. */
PG_FUNCTION_INFO_V1(dlock_reset);
Datum
dlock_reset(PG_FUNCTION_ARGS)
{
	int64		count = dlock_lease_end_all(dlock_begin_lease_change());

	ereport(LOG,
			(errmsg("dlock_reset() has ended %lld leases", (long long) count),
			 errdetail_internal("%s", dlock_describe_caller())));
	PG_RETURN_INT64(count);
}

/* Returns the least number that a new ticket can get. */
PG_FUNCTION_INFO_V1(dlock_advance_ticket);
Datum
dlock_advance_ticket(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	int64		minimum = dlock_get_int64(fcinfo, 0, "minimum");

	if (minimum < 1 || minimum > DLOCK_MAX_TICKET - DLOCK_TICKET_BLOCK)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ticket number must be between 1 and %lld, not %lld",
						(long long) (DLOCK_MAX_TICKET - DLOCK_TICKET_BLOCK),
						(long long) minimum),
				 errhint("Numbers that are skipped are never used.")));
	dlock_ticket_reserve(space, minimum);
	PG_RETURN_INT64((int64) pg_atomic_read_u64(&space->next_ticket));
}

PG_FUNCTION_INFO_V1(dlock_stats_reset);
Datum
dlock_stats_reset(PG_FUNCTION_ARGS)
{
	dlock_reset_counters(dlock_begin_change());
	PG_RETURN_VOID();
}
