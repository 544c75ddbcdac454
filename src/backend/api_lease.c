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
	int64		number = dlock_get_int64(fcinfo, 0, "lease");
	NameData	role;
	bool		is_other = dlock_lease_is_other(space, number, &role);
	int64		count = dlock_lease_release(space, number);

	dlock_lease_forget_ended();
	if (count >= 0 && is_other)
		dlock_log_forced_close(number, NameStr(role), count);
	if (count >= 0)
		PG_RETURN_INT64(count);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("lease %lld is gone", (long long) number)));
	PG_RETURN_NULL();
}

/* (id, ttl) */
PG_FUNCTION_INFO_V1(dlock_renew);
Datum
dlock_renew(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_lease_change();
	int64		number = dlock_get_int64(fcinfo, 0, "id");
	int			count = PG_ARGISNULL(1) ? dlock_lease_renew(space, number) :
		dlock_change_ttl(number, dlock_get_duration(fcinfo, 1, "ttl"));

	if (count < 0)
		PG_RETURN_NULL();
	PG_RETURN_INT32(count);
}

/*
 * Begin a request (name, lease or ttl, ..., shared, slots, permits, owner,
 * info).  A ttl makes a single lease: a new lease, for one ticket only.  Sets
 * *before, for dlock_record_end_uses().
 */
static DlockSpace *
begin_request(FunctionCallInfo fcinfo, bool ttl, DlockRequest *request,
			  DlockTimeout *timeout, int *before)
{
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &request->key);
	DlockOutcome outcome;

	*before = dlock_record_begin_uses();
	memset(request, 0, offsetof(DlockRequest, key));
	request->scope = DLOCK_LEASE;
	request->timeout = DLOCK_WAIT_FOREVER;
	if (timeout)
		request->timeout = *timeout = dlock_get_timeout(fcinfo, 2);
	dlock_get_request(fcinfo, 3, request);
	(void) dlock_request_wait_for_load(space, request, &outcome);
	if (!ttl)
		request->lease = dlock_get_lease(fcinfo, space);
	else
	{
		dlock_need(fcinfo, 1, "ttl");
		dlock_request_check_memory(space, GetUserId());
		request->lease = dlock_lease_make_single(space, GetUserId(), NULL,
												 dlock_get_duration(fcinfo, 1, "ttl"),
												 &request->key);
	}
	return space;
}

/* The third argument is a timeout. */
static Datum
acquire_for_lease(FunctionCallInfo fcinfo, bool ttl, bool try)
{
	DlockRequest request;
	DlockTimeout timeout;
	int			before;
	DlockSpace *space = begin_request(fcinfo, ttl, &request, &timeout, &before);
	DlockOutcome outcome;
	DlockLeaseTicket *ticket = dlock_lessee_acquire(space, &request, &outcome);
	int64		fence = 0;

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

DLOCK_FUNCTION(dlock_lease_acquire, acquire_for_lease(fcinfo, false, false));
DLOCK_FUNCTION(dlock_try_lease_acquire,
			   acquire_for_lease(fcinfo, false, true));
DLOCK_FUNCTION(dlock_ttl_acquire, acquire_for_lease(fcinfo, true, false));
DLOCK_FUNCTION(dlock_try_ttl_acquire, acquire_for_lease(fcinfo, true, true));

/* The third argument is a channel. */
static Datum
enqueue_for_lease(FunctionCallInfo fcinfo, bool ttl)
{
	DlockRequest request;
	int			before;
	DlockSpace *space = begin_request(fcinfo, ttl, &request, NULL, &before);
	int64		number;

	request.channel = dlock_get_channel(fcinfo, 2, DLOCK_LEASE);
	number = dlock_lessee_enqueue(space, &request, fcinfo->flinfo);
	dlock_record_end_uses(before);
	PG_RETURN_INT64(number);
}

DLOCK_FUNCTION(dlock_lease_enqueue, enqueue_for_lease(fcinfo, false));
DLOCK_FUNCTION(dlock_ttl_enqueue, enqueue_for_lease(fcinfo, true));
