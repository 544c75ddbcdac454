/*-------------------------------------------------------------------------
 *
 * api.c
 *	  The functions that SQL calls, for session and transaction scope.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "funcapi.h"
#include "storage/lmgr.h"
#include "tcop/pquery.h"
#include "utils/builtins.h"
#include "utils/portal.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "backend/api.h"
#include "tables/tables.h"

/* Are all arguments after the name defaults?  If so, none needs parsing. */
static inline bool
gives_name_alone(FunctionCallInfo fcinfo)
{
	const NullableDatum *args = fcinfo->args;

	return args[1].isnull && args[3].isnull && args[5].isnull &&
		!args[2].isnull && !DatumGetBool(args[2].value) &&
		!args[4].isnull && DatumGetInt32(args[4].value) == 1;
}

/* (name, timeout, shared, slots, permits, info) */
static inline Datum
acquire(FunctionCallInfo fcinfo, DlockScope scope, bool try)
{
	DlockRequest request;
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &request.key);
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
		request.timeout = dlock_get_timeout(fcinfo, 1);
		dlock_get_request(fcinfo, 2, &request);
	}
	if (scope == DLOCK_SESSION)
		dlock_check_session_use(DLOCK_USE_LOCK);

	fence = dlock_session_acquire(space, &request, &outcome);
	if (outcome == DLOCK_ACQUIRED)
	{
		if (scope == DLOCK_TRANSACTION && !try)
			dlock_lone_call_note(fcinfo->flinfo);
		PG_RETURN_INT64(fence);
	}
	if (!try)
		dlock_raise_timeout(space, &request, request.timeout, outcome);
	PG_RETURN_NULL();
}

DLOCK_FUNCTION(dlock_acquire, acquire(fcinfo, DLOCK_SESSION, false));
DLOCK_FUNCTION(dlock_try_acquire, acquire(fcinfo, DLOCK_SESSION, true));
DLOCK_FUNCTION(dlock_xact_acquire, acquire(fcinfo, DLOCK_TRANSACTION, false));
DLOCK_FUNCTION(dlock_try_xact_acquire,
			   acquire(fcinfo, DLOCK_TRANSACTION, true));

/* Make the procedure's result row.  Can fail, so call before acquiring. */
static HeapTuple
make_fence_row(FunctionCallInfo fcinfo)
{
	static const Oid types[] = {INT8OID};
	Datum		value = Int64GetDatum(0);
	bool		is_null = false;

	return heap_form_tuple(dlock_begin_row(fcinfo, types, lengthof(types)),
						   &value, &is_null);
}

/* (name, timeout, shared, slots, permits, info, INOUT fence) */
PG_FUNCTION_INFO_V1(dlock_acquire_nosnapshot);
Datum
dlock_acquire_nosnapshot(PG_FUNCTION_ARGS)
{
	DlockRequest request = {
		.scope = DLOCK_SESSION,
		.without_snapshot = true
	};
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &request.key);
	DlockOutcome outcome;
	HeapTuple	row = make_fence_row(fcinfo);
	int64		fence;

	request.timeout = dlock_get_timeout(fcinfo, 1);
	dlock_get_request(fcinfo, 2, &request);
	dlock_check_session_use(DLOCK_USE_LOCK);
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
				 errhint("Use CALL at top level, in a DO block or in a procedure, and if nested, outside of transaction and exception blocks; or use dlock_acquire().")));

	fence = dlock_session_acquire(space, &request, &outcome);
	if (outcome != DLOCK_ACQUIRED)
		dlock_raise_timeout(space, &request, request.timeout, outcome);
	memcpy((char *) row->t_data + row->t_data->t_hoff, &fence, sizeof(fence));
	PG_RETURN_DATUM(HeapTupleGetDatum(row));
}

/* (name, channel).  No right is needed: dlock_locks shows holders anyway. */
PG_FUNCTION_INFO_V1(dlock_watch);
Datum
dlock_watch(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	DlockKey	key;

	dlock_get_key(fcinfo, space, &key);
	dlock_check_session_use(DLOCK_USE_WATCH);
	dlock_session_watch(space, &key, dlock_get_channel(fcinfo, 1, DLOCK_SESSION));
	PG_RETURN_VOID();
}

PG_FUNCTION_INFO_V1(dlock_unwatch);
Datum
dlock_unwatch(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
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
	DlockSpace *space = dlock_begin_protected_change(fcinfo, &request.key);

	dlock_get_request(fcinfo, 2, &request);
	dlock_check_session_use(DLOCK_USE_LOCK);
	request.channel = dlock_get_channel(fcinfo, 1, DLOCK_SESSION);
	PG_RETURN_INT64(dlock_session_enqueue(space, &request));
}

PG_FUNCTION_INFO_V1(dlock_wait);
Datum
dlock_wait(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	int			before = dlock_record_begin_uses();
	bool		granted;

	granted = dlock_session_wait(space, dlock_get_int64(fcinfo, 0, "ticket"),
								 dlock_get_timeout(fcinfo, 1));
	dlock_record_end_uses(before);
	PG_RETURN_BOOL(granted);
}

PG_FUNCTION_INFO_V1(dlock_channel);
Datum
dlock_channel(PG_FUNCTION_ARGS)
{
	(void) dlock_begin_change();
	dlock_check_session_use(DLOCK_USE_CHANNEL);
	PG_RETURN_TEXT_P(cstring_to_text(dlock_notify_listen()));
}

/* Usually reads no catalog, so it can miss a concurrent DROP EXTENSION. */
PG_FUNCTION_INFO_V1(dlock_release);
Datum
dlock_release(PG_FUNCTION_ARGS)
{
	DlockSpace *known = dlock_known_space();
	DlockKey	key;
	bool		released;

	dlock_check_unrestricted();
	dlock_need(fcinfo, 0, "name");
	if (likely(known != NULL))
	{
		text	   *name = dlock_get_varlena(fcinfo, 0);

		dlock_worker_look(known, false);
		if (likely(dlock_session_release_latest(known, VARDATA_ANY(name),
												VARSIZE_ANY_EXHDR(name),
												&released)))
			PG_RETURN_BOOL(released);
	}
	dlock_get_key(fcinfo, dlock_begin_change(), &key);
	PG_RETURN_BOOL(dlock_session_release(&key));
}

PG_FUNCTION_INFO_V1(dlock_release_ticket);
Datum
dlock_release_ticket(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	int64		number = dlock_get_int64(fcinfo, 0, "ticket");

	PG_RETURN_BOOL(dlock_session_release_ticket(space, number));
}

PG_FUNCTION_INFO_V1(dlock_release_at_commit);
Datum
dlock_release_at_commit(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();

	dlock_xact_release_at_commit(space, dlock_get_int64(fcinfo, 0, "ticket"));
	PG_RETURN_VOID();
}

/* (id, info) */
PG_FUNCTION_INFO_V1(dlock_set_info);
Datum
dlock_set_info(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	int64		number = dlock_get_int64(fcinfo, 0, "id");

	if (dlock_change_info(space, number, dlock_get_info(fcinfo, 1)))
		PG_RETURN_BOOL(true);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("ticket or lease %lld is gone", (long long) number),
			 errdetail("It was released or lost, or never belonged to this session or to a lease.")));
	PG_RETURN_BOOL(false);
}

PG_FUNCTION_INFO_V1(dlock_downgrade);
Datum
dlock_downgrade(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	int64		number = dlock_get_int64(fcinfo, 0, "ticket");

	if (dlock_change_mode(space, number))
		PG_RETURN_BOOL(true);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("neither this session nor a lease holds ticket %lld",
					(long long) number)));
	PG_RETURN_BOOL(false);
}

PG_FUNCTION_INFO_V1(dlock_release_all);
Datum
dlock_release_all(PG_FUNCTION_ARGS)
{
	(void) dlock_begin_change();
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
		space = dlock_begin_named_call(fcinfo, &key);
		PG_RETURN_BOOL(dlock_queue_is_held_by(space, &key,
											  PG_GETARG_INT64(1)));
	}
	space = dlock_begin_call();
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

	(void) dlock_begin_named_call(fcinfo, &key);
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
	DlockSpace *space = dlock_begin_named_call(fcinfo, &key);
	int64		fence = dlock_get_int64(fcinfo, 1, "fence");

	PG_RETURN_BOOL(dlock_session_check(space, &key, fence));
}

PG_FUNCTION_INFO_V1(dlock_guard);
Datum
dlock_guard(PG_FUNCTION_ARGS)
{
	DlockSpace *space = dlock_begin_change();
	DlockKey	key;
	int64		fence;

	/* prevent DROP EXTENSION until the commit: a drop would free all locks */
	LockDatabaseObject(ExtensionRelationId, space->key.extension, 0,
					   AccessShareLock);
	space = dlock_begin_protected_change(fcinfo, &key);
	fence = dlock_get_int64(fcinfo, 1, "fence");
	(void) dlock_load_name(space, &key, DLOCK_WAIT_FOREVER, NULL);
	dlock_xact_guard(space, &key, fence);
	dlock_lone_call_note(fcinfo->flinfo);
	/* enqueued tickets can be granted before a removal is flushed (I15) */
	dlock_journal_flush_removal(space, &key);
	PG_RETURN_VOID();
}

/* Statement trigger: its argument names a lock that must be guarded. */
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
	dlock_make_key(&key, dlock_begin_call(),
				   cstring_to_text(trigger->tg_trigger->tgargs[0]));
	if (!dlock_xact_has_guarded(&key))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot change table \"%s\" without a guard of lock \"%.*s\"",
						RelationGetRelationName(trigger->tg_relation),
						key.length, key.name),
				 errhint("Acquire the lock and call dlock_guard() in this transaction first.")));
	return PointerGetDatum(NULL);
}
