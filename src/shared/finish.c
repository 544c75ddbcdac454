/*-------------------------------------------------------------------------
 *
 * finish.c
 *	  What is left to do at the end of a transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "shared/shared.h"

/*
 * Do some work in an exit, as a callback there.  An error cannot be caught then:
 * it ends the callback, and PostgreSQL goes on with those that are left, of which
 * this is one again.  So the work, which forgets each thing before it does it, is
 * begun anew until it comes to its end.
 */
static void
finish_in_exit(int code, Datum work)
{
	/* what it may have held as it failed */
	LWLockReleaseAll();
	before_shmem_exit(finish_in_exit, work);
	((void (*) (void)) work) ();
	cancel_before_shmem_exit(finish_in_exit, work);
}

static void
roll_back(int code, Datum arg)
{
	/* what a callback before may have held as it failed */
	LWLockReleaseAll();
	AbortOutOfAnyTransaction();
}

/*
 * Have this process leave dlock when it exits, however it exits: behind the
 * rollback of the open transaction, which is done before PostgreSQL itself would,
 * as these callbacks are registered after PostgreSQL's own.
 */
void
dlock_finish_at_exit(void (*leave) (void))
{
	/* the one that is registered last comes first */
	before_shmem_exit(finish_in_exit, (Datum) leave);
	before_shmem_exit(roll_back, 0);
}

/*
 * Finish something at the end of a transaction.  Behind a commit an error would be
 * a PANIC; a rollback would be begun again, and that is one when it has failed a
 * few times.  It can only come from a segment of memory that cannot be mapped; it
 * becomes a warning, and the work, as in an exit, goes on.  A ticket that could
 * not be given back so is as the session releases all it has, or ends.
 *
 * In an exit, so that no error stops the rollback half way, the work is done right
 * behind the callback that rolls back.  That has few places for callbacks: nothing
 * is to be finished there for each subtransaction.
 */
void
dlock_finish_transaction(void (*work) (void))
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	uint32		holdoff = InterruptHoldoffCount;
	volatile bool done = false;

	if (proc_exit_inprogress)
	{
		before_shmem_exit(finish_in_exit, (Datum) work);
		return;
	}
	while (!done)
	{
		PG_TRY();
		{
			/* the transaction's own takes nothing any more */
			CurrentResourceOwner = NULL;
			work();
			done = true;
		}
		PG_CATCH();
		{
			ErrorData  *error;

			LWLockReleaseAll();
			InterruptHoldoffCount = holdoff;
			MemoryContextSwitchTo(context);
			error = CopyErrorData();
			FlushErrorState();
			ereport(WARNING,
					(errcode(error->sqlerrcode),
					 errmsg("could not finish what was to be done at the end of the transaction"),
					 errdetail_internal("%s", error->message)));
			FreeErrorData(error);
		}
		PG_END_TRY();
	}
	CurrentResourceOwner = owner;
}
