/*-------------------------------------------------------------------------
 *
 * notify.c
 *	  Sending what is in the outbox, and telling those who watch a lock of its
 *	  holders, through NOTIFY.
 *
 * An announcement stays in the outbox while it is being sent, and leaves it
 * only afterwards: see shared/announcement.c.  And so does the name of a lock in
 * the list of those whose holders have changed: see shared/watch.c.
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
#include "tables/tables.h"
#include "worker/process.h"

/* Announcements sent in one transaction, and then as many channels told */
#define BATCH	1000

/* When a name is to be told that was not due before, in monotonic microseconds */
static uint64 next_due = DLOCK_NO_DEADLINE;

/* What is large, and made once: BATCH of each */
static DlockMessage *messages = NULL;
static DlockTelling *tellings = NULL;
static DlockWatcher *watchers = NULL;

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
 * Announcements
 */

static int
send_announcements(DlockSpace *space)
{
	int			count = dlock_outbox_copy(space, messages, BATCH);

	dlock_journal_flush_removals(space);
	for (int i = 0; i < count; i++)
	{
		notify(&messages[i], DLOCK_EVENT_GRANTED, "granted");
		notify(&messages[i], DLOCK_EVENT_WANTED, "wanted");
		notify(&messages[i], DLOCK_EVENT_EXPIRED, "expired");
		notify(&messages[i], DLOCK_EVENT_RELEASED, "released");
	}
	return count;
}

/*
 * Watches
 */

/*
 * Who has been told in this go, of a name with more watches than a transaction
 * tells: watches that share a channel cost one notification.
 */
static struct
{
	DlockWatched *watched;
	uint64		change;
	HTAB	   *channels;		/* or NULL */
} told = {0};

static void
forget_told(void)
{
	if (told.channels)
		hash_destroy(told.channels);
	told.watched = NULL;
	told.channels = NULL;
}

/*
 * Has nobody with that channel been told?  Who asks anew may have begun to listen
 * there since.
 */
static bool
is_to_be_told(const DlockWatcher *watcher)
{
	bool		found;

	(void) hash_search(told.channels, watcher->channel, HASH_ENTER, &found);
	return !found || watcher->anew;
}

static void
begin_told(const DlockTelling *telling)
{
	HASHCTL		info = {
		.keysize = NAMEDATALEN,
		.entrysize = NAMEDATALEN,
		.hcxt = TopMemoryContext
	};

	if (told.watched == telling->watched && told.change == telling->change)
		return;
	forget_told();
	told.channels = hash_create("dlock channels", 64, &info,
								HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	told.watched = telling->watched;
	told.change = telling->change;
}

static char *
make_payload(const DlockKey *key, DlockHolding holding,
			 const DlockHolder *holder)
{
	char	   *lock = dlock_json_text(key->name, key->length, true);

	if (holding == DLOCK_HELD_BY_NOBODY)
		return psprintf("{\"event\":\"free\",\"lock\":%s}", lock);
	return psprintf("{\"event\":\"held\",\"lock\":%s,\"ticket\":%lld,\"mode\":\"%s\",\"scope\":\"%s\",\"info\":%s}",
					lock, (long long) holder->number,
					dlock_mode_name(holder->mode),
					dlock_scope_name(holder->scope),
					holder->has_info ?
					dlock_json_text(holder->info, (int) strlen(holder->info),
									true) : "null");
}

/*
 * Tell of a name: those of its watches that are behind, or as many as there is
 * room for.  False where there is nothing to tell, or nothing yet.
 */
static bool
tell(DlockSpace *space, DlockTelling *telling, int max)
{
	DlockHolder holder;
	DlockHolding holding;
	char	   *payload;

	if (!dlock_watch_begin_telling(space, telling))
		return false;
	holding = dlock_queue_holder(space, &telling->watched->key, &holder);
	if (holding == DLOCK_HELD_NO_MORE)
		dlock_watch_skip(space, telling);
	if (holding == DLOCK_HELD_NO_MORE || holding == DLOCK_HELD_NOT_YET)
		return false;
	begin_told(telling);
	payload = make_payload(&telling->watched->key, holding, &holder);
	dlock_watch_copy(space, telling, watchers, max);
	for (int i = 0; i < telling->count; i++)
	{
		if (is_to_be_told(&watchers[i]))
			Async_Notify(watchers[i].channel, payload);
	}
	return true;
}

/*
 * Tell of as many names as there is room for.  Returns how many these are: the
 * first "tellings".
 */
static int
tell_watches(DlockSpace *space)
{
	int			taken = dlock_watch_take(space, tellings, BATCH);
	int			room = BATCH;
	int			count = 0;
	int			i;

	for (i = 0; i < taken && room > 0; i++)
	{
		DlockTelling telling = tellings[i];

		if (!tell(space, &telling, room))
			continue;
		room -= telling.count;
		tellings[count++] = telling;
	}
	dlock_watch_put_back(space, &tellings[i], taken - i);
	return count;
}

/* What was told has been. */
static bool
end_tellings(DlockSpace *space, int count)
{
	bool		more = false;

	/* the first one last, so that it is the first again */
	while (--count >= 0)
	{
		if (dlock_watch_end_telling(space, &tellings[count]))
			more = true;
		else if (tellings[count].watched == told.watched)
			forget_told();
	}
	return more;
}

/* When dlock_notify_send() has something to do again, without being woken */
uint64
dlock_notify_next(void)
{
	return next_due;
}

static void
make_room(void)
{
	if (messages == NULL)
		messages = MemoryContextAllocHuge(TopMemoryContext,
										  BATCH * sizeof(DlockMessage));
	if (tellings == NULL)
		tellings = MemoryContextAlloc(TopMemoryContext,
									  BATCH * sizeof(DlockTelling));
	if (watchers == NULL)
		watchers = MemoryContextAlloc(TopMemoryContext,
									  BATCH * sizeof(DlockWatcher));
}

/*
 * Send what is in the outbox, and tell who watches, or a part of it, in a
 * transaction of its own.  Returns whether something was sent.  Raises what
 * NOTIFY raises, with nothing sent and nothing lost.
 *
 * Only one process at a time sends: the one that holds the sender's office.
 */
bool
dlock_notify_send(DlockSpace *space)
{
	static bool failed = false;
	int			sent;
	int			told_of;

	next_due = DLOCK_NO_DEADLINE;
	make_room();
	if (space->outbox.length == 0 &&
		(next_due = dlock_watch_next_due(space)) > dlock_monotonic_now())
		return false;
	next_due = DLOCK_NO_DEADLINE;
	StartTransactionCommand();

	/*
	 * A full queue stays full when it has been read, until somebody moves its
	 * tail; and nobody does so whose NOTIFY fails.  This moves it.
	 */
	if (failed)
	{
		(void) OidFunctionCall0(F_PG_NOTIFICATION_QUEUE_USAGE);
		forget_told();
	}
	failed = true;

	/* before others wait for us; after it, for what has come meanwhile */
	dlock_journal_flush_removals(space);
	wait_for_turn();
	sent = send_announcements(space);
	told_of = tell_watches(space);
	CommitTransactionCommand();
	failed = false;
	StartTransactionCommand();
	dlock_outbox_clear(space);
	if (end_tellings(space, told_of))
		sent++;
	CommitTransactionCommand();
	next_due = dlock_watch_next_due(space);
	return sent > 0;
}
