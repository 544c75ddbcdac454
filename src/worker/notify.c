/*-------------------------------------------------------------------------
 *
 * notify.c
 *	  Sending what is in the outbox, through NOTIFY.
 *
 * An announcement stays in the outbox while it is being sent, and leaves it
 * only afterwards: see shared/announcement.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/async.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"

#include "shared/shared.h"
#include "worker/process.h"

/* Events sent in one transaction */
#define BATCH	1000

static void
notify(const DlockMessage *message, uint32 event, const char *event_name)
{
	if (message->events & event)
		Async_Notify(message->channel,
					 psprintf("{\"event\":\"%s\",\"lock\":%s,\"ticket\":%lld}",
							  event_name, message->name,
							  (long long) message->number));
}

/* For errors */
static void
tell_of_turn(void *arg)
{
	errcontext("waiting for the lock that each NOTIFY takes, object 0 of class %u",
			   DatabaseRelationId);
}

/*
 * Wait for one's turn among all that notify, in any database.  async.c takes
 * this lock before a commit, and waits for it then; whoever has it by that time
 * does not, and so can tell of what has come while it waited.
 */
static void
wait_for_turn(void)
{
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = tell_of_turn
	};

	error_context_stack = &context;
	LockSharedObject(DatabaseRelationId, InvalidOid, 0, AccessExclusiveLock);
	error_context_stack = context.previous;
}

/*
 * Send what is in the outbox, or a part of it, in a transaction of its own.
 * Returns how many announcements were sent.  Raises what NOTIFY raises, with
 * nothing sent and nothing lost.
 *
 * Only one process at a time sends: the one that holds the sender's office.
 */
int
dlock_notify_send(DlockSpace *space)
{
	static DlockMessage *messages = NULL;
	static bool failed = false;
	int			count;

	if (messages == NULL)
		messages = MemoryContextAllocHuge(TopMemoryContext,
										  BATCH * sizeof(DlockMessage));
	if (space->outbox.length == 0)
		return 0;

	/*
	 * In a transaction: before 16, an error while a segment of memory is mapped
	 * leaves something behind otherwise.
	 */
	StartTransactionCommand();

	/*
	 * A full queue stays full when it has been read, until somebody moves its
	 * tail; and nobody does so whose NOTIFY fails.  This moves it.
	 */
	if (failed)
		(void) OidFunctionCall0(F_PG_NOTIFICATION_QUEUE_USAGE);
	failed = true;

	/* before others wait for us; after it, for what has come meanwhile */
	dlock_journal_flush_removals(space);
	wait_for_turn();
	count = dlock_outbox_copy(space, messages, BATCH);
	dlock_journal_flush_removals(space);
	for (int i = 0; i < count; i++)
	{
		notify(&messages[i], DLOCK_EVENT_GRANTED, "granted");
		notify(&messages[i], DLOCK_EVENT_EXPIRED, "expired");
		notify(&messages[i], DLOCK_EVENT_RELEASED, "released");
	}
	CommitTransactionCommand();
	failed = false;
	StartTransactionCommand();
	dlock_outbox_clear(space);
	CommitTransactionCommand();
	return count;
}
