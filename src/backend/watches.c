/*-------------------------------------------------------------------------
 *
 * watches.c
 *	  The locks that this session watches.
 *
 * A watch is of a name and a channel; a name can have several.  Except for the
 * shared part (shared/watch.c), this is backend-local.
 *
 * A watch stays if its transaction is rolled back, as a lock does.  But
 * nothing is told before the commit, because the session listens only then.
 * Until the commit the watch has a "level"; a rollback silences it until the
 * next call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "backend/held.h"
#include "tables/tables.h"

/* A watched name */
typedef struct NameWatched
{
	DlockKey	key;			/* hash key, must be first */
	dlist_head	watches;		/* Watch.by_name */
} NameWatched;

typedef struct WatchKey
{
	NameWatched *name;
	char		channel[NAMEDATALEN];	/* padded with zeros */
} WatchKey;

typedef struct Watch
{
	WatchKey	key;			/* hash key, must be first */
	DlockWatch *shared;
	dlist_node	by_name;
	dlist_node	by_age;			/* in "all" */
	int			level;			/* nesting level of the transaction that
								 * arms it at its commit; 0: none */
	dlist_node	by_level;		/* in "asked" if level > 0 */
} Watch;

static HTAB *names = NULL;
static HTAB *watches = NULL;
static dlist_head all = DLIST_STATIC_INIT(all);

/* Watches with a level, in its order; and if their transaction committed */
static dlist_head asked = DLIST_STATIC_INIT(asked);
static bool committed = false;

static void
initialize(void)
{
	HASHCTL		info = {
		.keysize = sizeof(WatchKey),
		.entrysize = sizeof(Watch),
		.hcxt = TopMemoryContext
	};

	if (names == NULL)
		names = dlock_held_make_table("dlock watched names", sizeof(NameWatched));
	if (watches == NULL)
		watches = hash_create("dlock watches", 64, &info,
							  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
}

/* Arming */

static void
set_level(Watch *watch, int level)
{
	if (watch->level > 0)
		dlist_delete(&watch->by_level);
	watch->level = level;
	if (level > 0)
		dlist_push_tail(&asked, &watch->by_level);
}

/* Drop the levels from this one on: their transactions are rolled back. */
static void
roll_back(int level)
{
	while (!dlist_is_empty(&asked))
	{
		Watch	   *watch = dlist_tail_element(Watch, by_level, &asked);

		if (watch->level < level)
			break;
		set_level(watch, 0);
	}
}

static void
at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
			   SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();
	dlist_iter	iter;

	if (event == SUBXACT_EVENT_ABORT_SUB)
		roll_back(level);
	if (event != SUBXACT_EVENT_COMMIT_SUB)
		return;
	dlist_reverse_foreach(iter, &asked)
	{
		Watch	   *watch = dlist_container(Watch, by_level, iter.cur);

		if (watch->level < level)
			break;
		watch->level = level - 1;
	}
}

static void
at_xact_end(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_COMMIT)
		committed = true;
	if (event == XACT_EVENT_ABORT)
		roll_back(1);
	if (event == XACT_EVENT_PRE_PREPARE && !dlist_is_empty(&asked))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot PREPARE a transaction that has called dlock_watch()"),
				 errdetail("A watch belongs to this session, and begins when the transaction commits."),
				 errhint("Use COMMIT, or call dlock_watch() before the transaction.")));
}

static void
arm_asked(void)
{
	while (!dlist_is_empty(&asked))
	{
		Watch	   *watch = dlist_head_element(Watch, by_level, &asked);

		set_level(watch, 0);
		dlock_watch_arm(watch->shared);
	}
}

/* Armed here, as PostgreSQL handles LISTEN after its commit callbacks */
static void
at_memory_reset(void *arg)
{
	*(bool *) arg = false;
	if (committed)
		arm_asked();
	committed = false;
}

/* Make sure that watches are armed, or silenced, after this transaction. */
static void
prepare_arming(void)
{
	static bool registered = false;
	static bool registered_here = false;	/* in this transaction */

	if (!registered)
	{
		RegisterXactCallback(at_xact_end, NULL);
		RegisterSubXactCallback(at_subxact_end, NULL);
		registered = true;
	}
	if (!registered_here)
	{
		MemoryContextCallback *callback =
			MemoryContextAlloc(TopTransactionContext,
							   sizeof(MemoryContextCallback));

		callback->func = at_memory_reset;
		callback->arg = &registered_here;
		MemoryContextRegisterResetCallback(TopTransactionContext, callback);
		registered_here = true;
		committed = false;
	}
}

/* Watching */

/* A name goes with its last watch. */
static void
forget_name(NameWatched *name)
{
	if (dlist_is_empty(&name->watches))
		(void) hash_search(names, &name->key, HASH_REMOVE, NULL);
}

/* Forget a watch that is not shared any more. */
static void
forget(Watch *watch)
{
	NameWatched *name = watch->key.name;

	set_level(watch, 0);
	dlist_delete(&watch->by_name);
	dlist_delete(&watch->by_age);
	(void) hash_search(watches, &watch->key, HASH_REMOVE, NULL);
	forget_name(name);
	dlock_held_watches--;
}

/* End a watch.  It is forgotten first, so that no failure repeats. */
static void
end(Watch *watch)
{
	DlockWatch *shared = watch->shared;

	forget(watch);
	if (shared)
		dlock_watch_end(shared);
}

/* Find or make the watch of a name with a channel; a new one is not shared. */
static Watch *
find_or_enter(const DlockKey *key, const char *channel)
{
	NameWatched *name = hash_search(names, key, HASH_FIND, NULL);
	WatchKey	watch_key = {.name = name};
	Watch	   *watch;
	bool		found;

	strlcpy(watch_key.channel, channel, NAMEDATALEN);
	watch = name ? hash_search(watches, &watch_key, HASH_FIND, NULL) : NULL;
	if (watch)
		return watch;

	dlock_held_check_room();
	name = hash_search(names, key, HASH_ENTER, &found);
	if (!found)
		dlist_init(&name->watches);
	watch_key.name = name;
	PG_TRY();
	{
		watch = hash_search(watches, &watch_key, HASH_ENTER, NULL);
	}
	PG_CATCH();
	{
		forget_name(name);
		PG_RE_THROW();
	}
	PG_END_TRY();
	watch->shared = NULL;
	watch->level = 0;
	dlist_push_tail(&name->watches, &watch->by_name);
	dlist_push_head(&all, &watch->by_age);
	dlock_held_watches++;
	return watch;
}

/* Share a new watch.  After an error, it is forgotten. */
static void
begin(DlockSpace *space, Watch *watch)
{
	PG_TRY();
	{
		dlock_request_check_memory(space, GetUserId());
		watch->shared = dlock_watch_begin(space, &watch->key.name->key,
										  watch->key.channel);
	}
	PG_CATCH();
	{
		forget(watch);
		PG_RE_THROW();
	}
	PG_END_TRY();
}

/* Watch a lock from the commit on; tell once more if it is watched already. */
void
dlock_session_watch(DlockSpace *space, const DlockKey *key,
					const char *channel)
{
	int			level = GetCurrentTransactionNestLevel();
	Watch	   *watch;

	CHECK_FOR_INTERRUPTS();
	initialize();
	prepare_arming();
	/* raise now if the sender could not tell of it */
	pfree(dlock_json_text(key->name, key->length, false));
	(void) dlock_load_name(space, key, DLOCK_WAIT_FOREVER, NULL);
	watch = find_or_enter(key, channel);
	if (watch->shared == NULL)
		begin(space, watch);
	if (watch->level == 0 || watch->level > level)
		set_level(watch, level);
}

/* Stop watching a lock; false, with a warning, if it was not watched. */
bool
dlock_session_unwatch(const DlockKey *key)
{
	NameWatched *name;
	bool		last;

	initialize();
	name = hash_search(names, key, HASH_FIND, NULL);
	if (name == NULL)
	{
		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this session does not watch lock \"%.*s\"",
						key->length, key->name)));
		return false;
	}
	/* the name goes with the last one */
	do
	{
		last = dlist_head_node(&name->watches) == dlist_tail_node(&name->watches);
		end(dlist_head_element(Watch, by_name, &name->watches));
	} while (!last);
	return true;
}

/* End all watches.  Raises no error. */
void
dlock_session_unwatch_all(void)
{
	while (!dlist_is_empty(&all))
		end(dlist_container(Watch, by_age, dlist_head_node(&all)));
}
