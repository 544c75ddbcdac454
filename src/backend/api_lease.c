/*-------------------------------------------------------------------------
 *
 * api_lease.c
 *	  The functions that SQL calls, for lease scope.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "backend/api.h"

/* (ttl, attach, delay, info) */
PG_FUNCTION_INFO_V1(dlock_lease_open);
Datum
dlock_lease_open(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_lease_change();
	int64		ttl;
	int64		delay = 0;

	dlock_need(fcinfo, 0, "ttl");
	dlock_need(fcinfo, 1, "attach");
	ttl = dlock_get_duration(fcinfo, 0, "ttl");
	if (!PG_ARGISNULL(2))
		delay = dlock_get_duration(fcinfo, 2, "delay");
	if (PG_GETARG_BOOL(1))
		dlock_check_session_use(DLOCK_USE_ATTACHED_LEASE);
	PG_RETURN_INT64(dlock_lease_begin(space, ttl, delay, PG_GETARG_BOOL(1),
									  dlock_get_info(fcinfo, 3)));
}

PG_FUNCTION_INFO_V1(dlock_lease_close);
Datum
dlock_lease_close(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_lease_change();
	NameData	role;
	bool		is_other;
	int64		count;

	dlock_need(fcinfo, 0, "lease");
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
	DlockSpace *space = dlock_begin_lease_change();
	int			count;

	dlock_need(fcinfo, 0, "id");
	count = !PG_ARGISNULL(1) ?
		dlock_change_ttl(PG_GETARG_INT64(0), dlock_get_duration(fcinfo, 1, "ttl")) :
		dlock_lease_renew(space, PG_GETARG_INT64(0));
	if (count < 0)
		PG_RETURN_NULL();
	PG_RETURN_INT32(count);
}

/* The second argument: a lease, or the ttl of one made for this request */
static void
get_lease_or_ttl(FunctionCallInfo fcinfo, DlockSpace *space, bool ttl,
				 DlockRequest *request)
{
	if (ttl)
	{
		dlock_need(fcinfo, 1, "ttl");
		dlock_request_check_memory(space, GetUserId());
		request->lease = dlock_lease_make_single(space, GetUserId(), NULL,
												 dlock_get_duration(fcinfo, 1, "ttl"),
												 &request->key);
	}
	else
		request->lease = dlock_get_lease(fcinfo, space, 1);
}

/* (name, lease or ttl, timeout, shared, slots, permits, owner, info) */
static Datum
acquire_for_lease(FunctionCallInfo fcinfo, bool ttl, bool try)
{
	DlockRequest request;
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &request.key);
	int			before = dlock_record_begin_uses();
	DlockOutcome outcome;
	DlockTimeout timeout;
	DlockLeaseTicket *ticket;
	int64		fence = 0;

	memset(&request, 0, offsetof(DlockRequest, key));
	request.scope = DLOCK_LEASE;
	request.timeout = timeout = dlock_get_timeout(fcinfo, 2);
	dlock_get_mode(fcinfo, 3, &request);
	request.owner = dlock_get_text(fcinfo, 6, "owner");
	request.info = dlock_get_info(fcinfo, 7);
	(void) dlock_request_wait_for_load(space, &request, &outcome);
	get_lease_or_ttl(fcinfo, space, ttl, &request);
	ticket = dlock_lessee_acquire(space, &request, &outcome);
	if (ticket)
	{
		dlock_lessee_make_durable(space, ticket, true);
		fence = ticket->ticket.number;
	}
	dlock_record_end_uses(before);
	if (ticket)
	{
		dlock_xact_keep_result(fcinfo->flinfo, 1);
		PG_RETURN_INT64(fence);
	}
	if (!try)
		dlock_raise_timeout(space, &request, timeout, outcome);
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
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &request.key);
	int			before = dlock_record_begin_uses();
	DlockOutcome outcome;
	int64		number;

	memset(&request, 0, offsetof(DlockRequest, key));
	request.scope = DLOCK_LEASE;
	request.timeout = DLOCK_WAIT_FOREVER;
	dlock_get_mode(fcinfo, 3, &request);
	request.owner = dlock_get_text(fcinfo, 6, "owner");
	request.info = dlock_get_info(fcinfo, 7);
	request.channel = dlock_get_channel(fcinfo, 2, DLOCK_LEASE);
	(void) dlock_request_wait_for_load(space, &request, &outcome);
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
