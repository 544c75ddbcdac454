/*-------------------------------------------------------------------------
 *
 * lease_open.c
 *	  Opening leases, and the leases attached to this session.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/memutils.h"

#include "backend/inner.h"

/* Leases attached to this session; each entry counts as a reference */
static List *attached_leases = NIL;

/* At an error or an exit before a lease is durable, withdraw the lease. */
static void
withdraw_lease(int code, Datum arg)
{
	DlockLease *lease = (DlockLease *) DatumGetPointer(arg);

	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	dlock_lease_withdraw(lease);
}

/* Add a lease to the list, after removing ended leases among the first 2. */
static void
attach_to_session(DlockLease *lease)
{
	MemoryContext old_context = MemoryContextSwitchTo(TopMemoryContext);

	for (int i = 0; i < 2 && attached_leases != NIL; i++)
	{
		DlockLease *first = linitial(attached_leases);

		if (pg_atomic_read_u64(&first->deadline) > DLOCK_RAN_OUT)
			attached_leases = lappend(attached_leases, first);
		else
			dlock_record_unref(&first->record);
		attached_leases = list_delete_first(attached_leases);
	}
	attached_leases = lappend(attached_leases, lease);
	dlock_record_ref(&lease->record);
	MemoryContextSwitchTo(old_context);
}

/* Open a lease, durably. */
int64
dlock_lease_begin(DlockSpace *space, int64 ttl, int64 delay, bool attach,
				  const char *info)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	int64		number;

	dlock_request_check_memory(space, GetUserId());
	lease = dlock_lease_make(space, GetUserId(), NULL, ttl, delay, info);
	if (attach)
	{
		lease->session = pg_atomic_read_u64(&dlock_my_backend->session);
		lease->procno = compat_my_procno();
		lease->pid = MyProcPid;
		attach_to_session(lease);
	}
	while ((lease->number = dlock_ticket_draw(space)) == 0)
		dlock_ticket_reserve(space, 0);
	dlock_lease_enter(lease);

	PG_ENSURE_ERROR_CLEANUP(withdraw_lease, PointerGetDatum(lease));
	{
		/* others find the lease after this, so it must be entered already */
		dlock_id_insert(&lease->record);
		dlock_durable_wait(space, &lease->record);
		if (!dlock_lease_is_open(lease))
			dlock_raise_lease_gone(lease->number);
	}
	PG_END_ENSURE_ERROR_CLEANUP(withdraw_lease, PointerGetDatum(lease));
	number = lease->number;
	dlock_record_end_uses(before);
	return number;
}

/*
 * Begin the ttl of the attached leases, because the session ends or passes to
 * another client.  Raises no error.
 */
void
dlock_lease_detach_all(void)
{
	while (attached_leases != NIL)
	{
		DlockLease *lease = llast(attached_leases);

		attached_leases = list_delete_last(attached_leases);
		if (dlock_lease_detach(lease))
			dlock_worker_wake(dlock_space_at(lease->space));
		dlock_record_unref(&lease->record);
	}
}
