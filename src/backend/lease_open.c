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

/*
 * Remove ended leases from the list.  This is called at each open and close,
 * and walks through the list only once for half as many calls as it is long.
 */
void
dlock_lease_forget_ended(void)
{
	static int	calls = 0;

	if (2 * ++calls < list_length(attached_leases))
		return;
	calls = 0;
	for (int i = list_length(attached_leases) - 1; i >= 0; i--)
	{
		ListCell   *cell = list_nth_cell(attached_leases, i);
		DlockLease *lease = lfirst(cell);

		if (pg_atomic_read_u64(&lease->deadline) > DLOCK_RAN_OUT)
			continue;
		lfirst(cell) = llast(attached_leases);
		attached_leases = list_delete_last(attached_leases);
		dlock_record_unref(&lease->record);
	}
}

static void
attach_to_session(DlockLease *lease)
{
	MemoryContext old_context = MemoryContextSwitchTo(TopMemoryContext);

	dlock_lease_forget_ended();
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
