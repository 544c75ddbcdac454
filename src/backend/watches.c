/*-------------------------------------------------------------------------
 *
 * watches.c
 *	  The locks that this session watches.
 *
 * A watch is of a name, and of a channel on which changes are told; a name can
 * have several.  All of this is the backend's own memory, but for the watch as
 * others see it (shared/watch.c).
 *
 * A watch is there from the call on, and stays if its transaction is rolled back,
 * as a lock does.  But nothing is told before the transaction has committed, as the
 * session listens only then: what stands for that is "level", until a rollback
 * makes the watch silent until the next call for it.
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

/* A name that is watched */
typedef struct NameWatched
{
	DlockKey	key;			/* hash key, must be first */
	dlist_head	watches;		/* Watch.by_name */
} NameWatched;

typedef struct WatchKey
{
	NameWatched *name;
	char		channel[NAMEDATALEN];	/* filled up with zeros */
} WatchKey;

typedef struct Watch
{
	WatchKey	key;			/* hash key, must be first */
	DlockWatch *shared;
	dlist_node	by_name;
	dlist_node	by_age;			/* in "all" */
	int			level;			/* it is armed when the transaction of this
								 * nesting level has committed; 0: not asked */
	dlist_node	by_level;		/* in "asked" if level > 0 */
} Watch;

static HTAB *names = NULL;
static HTAB *watches = NULL;
static dlist_head all = DLIST_STATIC_INIT(all);

/*
 * Those with a level, in its order, as nothing has a deeper one than the current;
 * and whether their transaction has committed
 */
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

/*
 * When it is armed
 */

static void
set_level(Watch *watch, int level)
{
	if (watch->level > 0)
		dlist_delete(&watch->by_level);
	watch->level = level;
	if (level > 0)
		dlist_push_tail(&asked, &watch->by_level);
}

/* What was asked for in (sub)transactions of this level, or within, is not. */
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

/*
 * Arm what a committed transaction has asked for.  When its memory goes: there is
 * no other place for an extension behind PostgreSQL's own processing of LISTEN.
 */
static void
at_memory_reset(void *arg)
{
	*(bool *) arg = false;
	if (committed)
		arm_asked();
	committed = false;
}

/* Make sure that what is asked for in this transaction is armed, or is not. */
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

/*
 * Watching
 */

/* A name goes with its last watch. */
static void
forget_name(NameWatched *name)
{
	if (dlist_is_empty(&name->watches))
		(void) hash_search(names, &name->key, HASH_REMOVE, NULL);
}

/* Forget a watch that others do not know any more. */
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

/* End a watch.  It is forgotten first: what fails is not repeated. */
static void
end(Watch *watch)
{
	DlockWatch *shared = watch->shared;

	forget(watch);
	if (shared)
		dlock_watch_end(shared);
}

/* The watch of a name, with a channel; a new one is known to nobody else yet. */
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

/* Let others see a new watch.  Raises 53200, and it is forgotten then. */
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

/*
 * Watch a lock: from the end of the transaction on, who holds it is told on the
 * channel.  Where that is so already, who holds it is told once more.
 */
void
dlock_session_watch(DlockSpace *space, const DlockKey *key,
					const char *channel)
{
	int			level = GetCurrentTransactionNestLevel();
	Watch	   *watch;

	CHECK_FOR_INTERRUPTS();
	initialize();
	prepare_arming();
	/* the sender could not tell of it otherwise */
	pfree(dlock_json_text(key->name, key->length, false));
	(void) dlock_load_name(space, key, DLOCK_WAIT_FOREVER, NULL);
	watch = find_or_enter(key, channel);
	if (watch->shared == NULL)
		begin(space, watch);
	if (watch->level == 0 || watch->level > level)
		set_level(watch, level);
}

/* Watch a lock no more.  False, with a warning, where it was not watched. */
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

/* Watch nothing more.  Raises nothing. */
void
dlock_session_unwatch_all(void)
{
	while (!dlist_is_empty(&all))
		end(dlist_container(Watch, by_age, dlist_head_node(&all)));
}
