/*-------------------------------------------------------------------------
 *
 * errors.c
 *	  Errors that several files of src/backend raise.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "backend/held.h"

void
dlock_raise_self_wait(const DlockRequest *request)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_DEADLOCK_DETECTED),
			 errmsg("deadlock detected"),
			 errdetail("Process %d would wait for lock \"%.*s\" behind a ticket of its own.",
					   MyProcPid, request->key.length, request->key.name),
			 errhint("Release that ticket first, or ask for no more than is left.")));
}

void
dlock_raise_mismatch(const DlockRequest *request, int32 slots)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("lock \"%.*s\" is in use with other slots",
					request->key.length, request->key.name),
			 slots == 0 ?
			 errdetail("It is held or waited for without slots.") :
			 errdetail("It is held or waited for with slots => %d.", slots),
			 errhint("All holders and waiters of a lock must give the same slots.")));
}

void
dlock_raise_lost_place(const DlockRequest *request, int64 number)
{
	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("lost the place in the queue of lock \"%.*s\"",
					request->key.length, request->key.name),
			 request->scope == DLOCK_LEASE ?
			 errdetail("Ticket %lld was released by an administrator, or its lease ran out.",
					   (long long) number) :
			 errdetail("Ticket %lld was released by an administrator.",
					   (long long) number),
			 errhint("Acquire the lock again.")));
}

void
dlock_raise_lost(const DlockKey *key, int64 fence)
{
	int64		newer = dlock_queue_fence(key);

	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("lock \"%.*s\" with fence %lld is not held any more",
					key->length, key->name, (long long) fence),
			 newer > fence ?
			 errdetail("It is held with the newer fence %lld.",
					   (long long) newer) :
			 errdetail("It was released, or lost, or never held by this session."),
			 errhint("Acquire the lock again, and repeat the transaction.")));
}

void
dlock_raise_no_ticket(int64 number)
{
	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("ticket %lld is gone", (long long) number),
			 errdetail("It was released or lost, or never belonged to this session or to a lease."),
			 errhint("Enqueue again.")));
}

void
dlock_raise_lease_gone(int64 number)
{
	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("lease %lld is gone", (long long) number),
			 errdetail("It was closed, or ran out, or never existed."),
			 errhint("Open a new lease, and acquire again.")));
}
