/*-------------------------------------------------------------------------
 *
 * notify.c
 *	  Sending announcements, and notifying watchers, through NOTIFY.
 *
 * Announcements leave the outbox (shared/announcement.c), and changed names
 * leave their list (shared/watch.c), only after a commit has sent them.
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

/* Maximum number of announcements, and of watches, per transaction */
#define BATCH	1000

/* When the next changed name is due, in monotonic microseconds */
static uint64 next_due = DLOCK_NO_DEADLINE;

/* Arrays of BATCH entries */
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

/* Error context of wait_for_turn() */
static void
tell_of_turn(void *arg)
{
	errcontext("waiting for the lock that each NOTIFY takes, object 0 of class %u",
			   DatabaseRelationId);
}

/*
 * Take the lock of NOTIFY (async.c) before the commit takes it.  Then messages
 * that arrive during the wait are copied, too.
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

static int
notify_of_tickets(DlockSpace *space)
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

/* The name that is being told, and its channels that were already notified */
static struct
{
	DlockWatched *watched;
	uint64		change;
	HTAB	   *channels;
} told = {0};

static void
forget_told(void)
{
	if (told.channels)
		hash_destroy(told.channels);
	told.watched = NULL;
	told.channels = NULL;
}

/* Is the channel still to be notified of this change, or is the watch new? */
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

/* Notify at most "max" watches.  Returns false if there is nothing to tell. */
static bool
tell_of_name(DlockSpace *space, DlockTelling *telling, int max)
{
	DlockHolder holder;
	DlockHolding holding;
	char	   *payload;

	if (!dlock_watch_begin_telling(space, telling))
		return false;
	holding = dlock_queue_holder(space, &telling->watched->key, &holder);
	if (holding == DLOCK_HELD_NO_MORE)
		(void) dlock_watch_end_telling(space, telling, false);
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

/* Notify the watches of changed names.  Returns the number of such names. */
static int
tell_watches(DlockSpace *space)
{
	int			taken = dlock_watch_take(space, tellings, BATCH);
	int			room = BATCH;
	int			count = 0;

	for (int i = 0; i < taken && room > 0; i++)
	{
		DlockTelling telling = tellings[i];

		if (!tell_of_name(space, &telling, room))
			continue;
		room -= telling.count;
		tellings[count++] = telling;
	}
	return count;
}

/* Record what was notified.  Returns true if watches are left to notify. */
static bool
end_tellings(DlockSpace *space, int count)
{
	bool		more = false;

	/* in reverse, so that unfinished names keep their order in the list */
	while (--count >= 0)
	{
		if (dlock_watch_end_telling(space, &tellings[count], true))
			more = true;
		else if (tellings[count].watched == told.watched)
			forget_told();
	}
	return more;
}

/* When to call dlock_notify_send() again, unless this process is woken */
uint64
dlock_notify_next(void)
{
	return next_due;
}

static void
make_arrays(void)
{
	if (messages == NULL)
		messages = MemoryContextAlloc(TopMemoryContext,
									  BATCH * sizeof(DlockMessage));
	if (tellings == NULL)
		tellings = MemoryContextAlloc(TopMemoryContext,
									  BATCH * sizeof(DlockTelling));
	if (watchers == NULL)
		watchers = MemoryContextAlloc(TopMemoryContext,
									  BATCH * sizeof(DlockWatcher));
}

/*
 * Send announcements and notify watchers, at most BATCH of each.  Returns true
 * if more may be left.  If NOTIFY raises an error, no message is lost.
 * Only the holder of the sender's office calls this.
 */
bool
dlock_notify_send(DlockSpace *space)
{
	static bool failed = false;
	int			sent;
	int			told_of;

	next_due = DLOCK_NO_DEADLINE;
	make_arrays();
	if (space->outbox.length == 0 &&
		(next_due = dlock_watch_next_due(space)) > dlock_monotonic_now())
		return false;
	next_due = DLOCK_NO_DEADLINE;
	StartTransactionCommand();

	/* unlike a failed NOTIFY, this advances the tail of a full queue */
	if (failed)
	{
		(void) OidFunctionCall0(F_PG_NOTIFICATION_QUEUE_USAGE);
		forget_told();
	}
	failed = true;

	/* flush most removals now, before other processes wait for our lock */
	dlock_journal_flush_removals(space);
	wait_for_turn();
	sent = notify_of_tickets(space);
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
