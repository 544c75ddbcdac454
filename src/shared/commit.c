/*-------------------------------------------------------------------------
 *
 * commit.c
 *	  What is left to do behind a commit.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "shared/shared.h"

/*
 * Finish something behind a commit, where an error would be a PANIC.  It can
 * only come from a segment of memory that cannot be mapped; it becomes a
 * warning, and the work, which forgets each thing before it does it, goes on.
 * A ticket that could not be given back so is at the session's end.
 */
void
dlock_finish_commit(void (*work) (void))
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	uint32		holdoff = InterruptHoldoffCount;
	volatile bool done = false;

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
