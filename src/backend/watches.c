/*-------------------------------------------------------------------------
 *
 * watches.c
 *	  The locks that this session watches.
 *
 * A watch has a name and a channel.  A name can have several watches.  The
 * shared part is in shared/watch.c.
 *
 * Like a session's lock, a watch survives a rollback.  But xact.c arms the
 * watch at the commit, when the session begins to listen.  After a rollback,
 * the watch sends nothing until dlock_watch() is called again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "backend/held.h"
#include "tables/tables.h"

/* A watched name */
typedef struct NameWatched
{
	DlockKey	key;			/* hash key, must be first */
	dlist_head	watches;		/* Watch.by_name: one per channel */
} NameWatched;

typedef struct Watch
{
	NameWatched *name;
	DlockWatch *shared;
	dlist_node	by_name;
	dlist_node	by_age;			/* in "all" */
} Watch;

static HTAB *names = NULL;
static dlist_head all = DLIST_STATIC_INIT(all);

/* Remove a name if it has no watch left. */
static void
forget_name(NameWatched *name)
{
	if (dlist_is_empty(&name->watches))
		(void) hash_search(names, &name->key, HASH_REMOVE, NULL);
}

/* End a watch.  Forgets it first, so that an error does not recur at exit. */
static void
end_watch(Watch *watch)
{
	NameWatched *name = watch->name;
	DlockWatch *shared = watch->shared;

	dlist_delete(&watch->by_name);
	dlist_delete(&watch->by_age);
	pfree(watch);
	forget_name(name);
	dlock_held_watches--;
	dlock_watch_end(shared);
}

/* Returns a name's watch for this channel, or NULL. */
static Watch *
find_watch(const DlockKey *key, const char *channel)
{
	NameWatched *name = hash_search(names, key, HASH_FIND, NULL);
	dlist_iter	iter;

	if (name == NULL)
		return NULL;
	dlist_foreach(iter, &name->watches)
	{
		Watch	   *watch = dlist_container(Watch, by_name, iter.cur);

		if (strcmp(watch->shared->channel, channel) == 0)
			return watch;
	}
	return NULL;
}

/* Begin a watch.  After an error, nothing of the watch is left. */
static Watch *
begin_watch(DlockSpace *space, const DlockKey *key, const char *channel)
{
	Watch	   *watch;
	bool		found;

	dlock_request_check_memory(space, GetUserId());
	dlock_held_check_room();
	watch = MemoryContextAlloc(TopMemoryContext, sizeof(Watch));
	watch->name = NULL;
	PG_TRY();
	{
		watch->name = hash_search(names, key, HASH_ENTER, &found);
		if (!found)
			dlist_init(&watch->name->watches);
		watch->shared = dlock_watch_begin(space, key, channel);
	}
	PG_CATCH();
	{
		if (watch->name)
			forget_name(watch->name);
		pfree(watch);
		PG_RE_THROW();
	}
	PG_END_TRY();
	dlist_push_tail(&watch->name->watches, &watch->by_name);
	dlist_push_head(&all, &watch->by_age);
	dlock_held_watches++;
	return watch;
}

/* Watch a lock from the commit on.  An existing watch repeats its message. */
void
dlock_session_watch(DlockSpace *space, const DlockKey *key,
					const char *channel)
{
	Watch	   *watch;

	CHECK_FOR_INTERRUPTS();
	if (names == NULL)
		names = dlock_held_make_table("dlock watched names", sizeof(NameWatched));
	dlock_xact_prepare_arming();
	/* raise an error now if the sender could not convert the name */
	pfree(dlock_json_text(key->name, key->length, false));
	(void) dlock_load_name(space, key, DLOCK_WAIT_FOREVER, NULL);
	watch = find_watch(key, channel);
	if (watch == NULL)
		watch = begin_watch(space, key, channel);
	dlock_xact_watch(watch->shared);
}

/* Stop watching a lock.  Without a watch, warns and returns false. */
bool
dlock_session_unwatch(const DlockKey *key)
{
	NameWatched *name;
	bool		found = false;

	/* ending the last watch removes the name */
	while (names && (name = hash_search(names, key, HASH_FIND, NULL)) != NULL)
	{
		Watch	   *watch = dlist_head_element(Watch, by_name, &name->watches);

		dlock_xact_unwatch(watch->shared);
		end_watch(watch);
		found = true;
	}
	if (!found)
		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this session does not watch lock \"%.*s\"",
						key->length, key->name)));
	return found;
}

/* End all watches.  Raises no error. */
void
dlock_session_unwatch_all(void)
{
	dlock_xact_unwatch(NULL);
	while (!dlist_is_empty(&all))
		end_watch(dlist_container(Watch, by_age, dlist_head_node(&all)));
}
