/*-------------------------------------------------------------------------
 *
 * watch.c
 *	  Watched names, and telling watchers of changed holders.
 *
 * A watched name has an entry in the second hash table of its partition
 * (buckets.c), because a free lock has no entry.  A process that changes the
 * holders counts the change and adds the name to the space's list "changed",
 * with the partition locked.  The sender walks through the list, sends the
 * current holder, and records in each watch how many changes the message
 * covers.  A name leaves the list when every watch is up to date (I29).
 *
 * When the last watch of a name ends, the name is freed or, if it is listed,
 * left to the sender.  Only the sender takes names out of the list, so the
 * sender reads a listed name without a lock.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "shared/buckets.h"

/* Minimum time between two messages about a name, in microseconds */
#define INTERVAL		10000
#define INTERVAL_EACH	5		/* added for each watch */

/* One call looks at no more names of the list than this. */
#define MAX_LOOKS		1000

static inline DlockWatched *
watched_at(dsa_pointer pointer)
{
	return dlock_address(pointer);
}

static inline DlockWatch *
watch_at(dsa_pointer pointer)
{
	return DsaPointerIsValid(pointer) ? dlock_address(pointer) : NULL;
}

/* The table of names */

static dsa_pointer *
next_watched(dsa_pointer entry, uint32 *hash)
{
	DlockWatched *watched = watched_at(entry);

	*hash = watched->key.hash;
	return &watched->next;
}

/* A name's entry, or NULL */
static DlockWatched *
find_watched(DlockPartition *partition, const DlockKey *key)
{
	dsa_pointer next = *dlock_bucket_of(&partition->watched, key->hash);

	while (DsaPointerIsValid(next))
	{
		DlockWatched *watched = watched_at(next);

		if (dlock_key_equal(&watched->key, key))
			return watched;
		next = watched->next;
	}
	return NULL;
}

static Size
watched_size(const DlockKey *key)
{
	return offsetof(DlockWatched, key) + dlock_key_size(key);
}

static DlockWatched *
make_watched(const DlockSpace *space, const DlockKey *key, Oid role)
{
	DlockWatched *watched = dlock_allocate(role, watched_size(key));

	memset(watched, 0, offsetof(DlockWatched, key));
	watched->space = dlock_pointer(space);
	watched->role = role;
	watched->changes = 1;
	dlock_key_copy(&watched->key, key);
	return watched;
}

/* The list */

/* list() and unlist() need the locks of the partition and of the outbox. */
static void
list(DlockSpace *space, DlockWatched *watched)
{
	Assert(LWLockHeldByMe(&dlock_lock_partition(&watched->key)->lock));
	Assert(LWLockHeldByMeInMode(&space->outbox_lock, LW_EXCLUSIVE));
	if (!watched->listed)
		dlock_list_append(&space->changed, &watched->link);
	watched->listed = true;
}

static void
unlist(DlockSpace *space, DlockWatched *watched)
{
	Assert(LWLockHeldByMe(&dlock_lock_partition(&watched->key)->lock));
	Assert(LWLockHeldByMeInMode(&space->outbox_lock, LW_EXCLUSIVE));
	dlock_list_remove(&space->changed, &watched->link);
	watched->listed = false;
}

/* See dlock_queue_note_change().  The name need not be watched. */
void
dlock_watch_count_change(const DlockKey *key, DlockSpace **to_wake)
{
	DlockPartition *partition = dlock_lock_partition(key);
	DlockWatched *watched = find_watched(partition, key);

	Assert(LWLockHeldByMeInMode(&partition->lock, LW_EXCLUSIVE));
	if (watched == NULL)
		return;
	if (!watched->listed)
	{
		DlockSpace *space = dlock_space_at(watched->space);

		LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
		list(space, watched);
		LWLockRelease(&space->outbox_lock);
		*to_wake = space;
	}
	watched->changes++;
}

/* The session's part */

/* Find a name's entry or, if there is none, enter "made"; then add a user. */
static DlockWatched *
use_watched(DlockWatched *made)
{
	DlockPartition *partition = dlock_lock_partition(&made->key);
	DlockWatched *watched;

	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	watched = find_watched(partition, &made->key);
	if (watched == NULL)
	{
		watched = made;
		dlock_buckets_insert(&partition->watched, dlock_pointer(made), next_watched);
	}
	watched->users++;
	LWLockRelease(&partition->lock);
	return watched;
}

/*
 * Make a watch, to which nothing is sent before dlock_watch_arm().  The caller
 * has checked the memory limit.  Raises 53200, with nothing left behind.
 */
DlockWatch *
dlock_watch_begin(DlockSpace *space, const DlockKey *key, const char *channel)
{
	Oid			role = GetUserId();
	DlockPartition *partition = dlock_lock_partition(key);
	DlockWatched *made;
	DlockWatched *watched;
	DlockWatch *watch;

	dlock_buckets_prepare(&partition->watched, &partition->lock);
	made = make_watched(space, key, role);
	PG_TRY();
	{
		watch = dlock_allocate(role, sizeof(DlockWatch));
	}
	PG_CATCH();
	{
		dlock_release_memory(role, made, watched_size(key));
		PG_RE_THROW();
	}
	PG_END_TRY();

	watched = use_watched(made);
	if (watched != made)
		dlock_release_memory(role, made, watched_size(key));
	memset(watch, 0, sizeof(DlockWatch));
	watch->watched = dlock_pointer(watched);
	watch->role = role;
	strlcpy(watch->channel, channel, NAMEDATALEN);
	pg_atomic_fetch_add_u32(&space->watches, 1);
	return watch;
}

/* The session listens now.  Have it told the holder, even a second time. */
void
dlock_watch_arm(DlockWatch *watch)
{
	DlockWatched *watched = watched_at(watch->watched);
	DlockSpace *space = dlock_space_at(watched->space);
	DlockPartition *partition = dlock_lock_partition(&watched->key);

	LWLockAcquire(&partition->lock, LW_SHARED);
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	list(space, watched);
	if (watch->armed)
		dlock_list_remove(&watched->watches, &watch->link);
	dlock_list_prepend(&watched->watches, &watch->link);
	watch->armed = true;
	watch->told = watch->telling = 0;
	LWLockRelease(&space->outbox_lock);
	LWLockRelease(&partition->lock);
	(void) dlock_worker_wake(space);
}

/* Remove and free a name, with its partition locked. */
static void
free_watched(DlockPartition *partition, DlockWatched *watched)
{
	Assert(LWLockHeldByMeInMode(&partition->lock, LW_EXCLUSIVE));
	Assert(watched->users == 0 && !watched->listed);
	dlock_buckets_delete(&partition->watched, dlock_pointer(watched), next_watched);
	dlock_release_memory(watched->role, watched, watched_size(&watched->key));
}

/* End a watch of this session.  Raises nothing. */
void
dlock_watch_end(DlockWatch *watch)
{
	DlockWatched *watched = watched_at(watch->watched);
	DlockSpace *space = dlock_space_at(watched->space);
	DlockPartition *partition = dlock_lock_partition(&watched->key);

	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	if (watch->armed)
	{
		LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
		dlock_list_remove(&watched->watches, &watch->link);
		LWLockRelease(&space->outbox_lock);
	}
	if (--watched->users == 0 && !watched->listed)
		free_watched(partition, watched);
	LWLockRelease(&partition->lock);
	dlock_release_memory(watch->role, watch, sizeof(DlockWatch));
	if (pg_atomic_sub_fetch_u32(&space->watches, 1) == 0)
		(void) dlock_office_wake(space, DLOCK_WORKER);
}

/* Free a name of a useless space.  The name's partition must be locked. */
static void
purge_watched(DlockPartition *partition, DlockWatched *watched)
{
	DlockWatch *next;

	for (DlockWatch *watch = watch_at(watched->watches.head); watch;
		 watch = next)
	{
		next = watch_at(watch->link.next);
		dlock_release_memory(watch->role, watch, sizeof(DlockWatch));
	}
	/* no process reads the space's list any more */
	watched->listed = false;
	watched->users = 0;
	free_watched(partition, watched);
}

/* Free the names of a useless space. */
void
dlock_watch_purge(DlockSpace *space)
{
	for (int p = 0; p < DLOCK_PARTITIONS; p++)
	{
		DlockPartition *partition = &dlock_control->locks[p];

		LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
		for (uint32 b = 0; b < partition->watched.num_buckets; b++)
		{
			dsa_pointer next = *dlock_bucket_at(&partition->watched, b);

			while (DsaPointerIsValid(next))
			{
				DlockWatched *watched = watched_at(next);

				next = watched->next;
				if (watched->space == dlock_pointer(space))
					purge_watched(partition, watched);
			}
		}
		LWLockRelease(&partition->lock);
	}
}

/* The sender's part.  Only the holder of the sender's office calls these. */

/* When the next listed name is due, monotonic; DLOCK_NO_DEADLINE: none */
uint64
dlock_watch_next_due(DlockSpace *space)
{
	uint64		next = DLOCK_NO_DEADLINE;
	int			looks = 0;

	LWLockAcquire(&space->outbox_lock, LW_SHARED);
	for (dsa_pointer pointer = space->changed.head;
		 DsaPointerIsValid(pointer) && looks++ < MAX_LOOKS;
		 pointer = watched_at(pointer)->link.next)
		next = Min(next, watched_at(pointer)->due);
	LWLockRelease(&space->outbox_lock);
	return next;
}

/* Find at most "max" names that are due; returns how many. */
int
dlock_watch_take(DlockSpace *space, DlockTelling *tellings, int max)
{
	uint64		now = dlock_monotonic_now();
	int			count = 0;
	int			looks = 0;

	LWLockAcquire(&space->outbox_lock, LW_SHARED);
	for (dsa_pointer pointer = space->changed.head;
		 DsaPointerIsValid(pointer) && count < max && looks++ < MAX_LOOKS;
		 pointer = watched_at(pointer)->link.next)
	{
		if (watched_at(pointer)->due <= now)
			tellings[count++].watched = watched_at(pointer);
	}
	LWLockRelease(&space->outbox_lock);
	return count;
}

/*
 * Begin or continue a round, which tells all watches of a name.  The caller
 * must read the holder after this call has set telling->change (I29).  The
 * name goes to the end of the list and, unless the round goes on, is not due
 * for INTERVAL.  If no watch is left, frees the name and returns false.
 */
bool
dlock_watch_begin_telling(DlockSpace *space, DlockTelling *telling)
{
	DlockWatched *watched = telling->watched;
	DlockPartition *partition = dlock_lock_partition(&watched->key);
	uint64		now = dlock_monotonic_now();
	bool		used;

	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	telling->change = watched->changes;
	used = watched->users > 0;
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	unlist(space, watched);
	if (used)
	{
		list(space, watched);
		watched->due = now + INTERVAL + watched->watches.length * INTERVAL_EACH;
		if (watched->round == 0)
			watched->round = watched->changes;
	}
	LWLockRelease(&space->outbox_lock);
	if (!used)
		free_watched(partition, watched);
	LWLockRelease(&partition->lock);
	return used;
}

/* Copy up to "max" watches to be told in this round; sets telling->count. */
void
dlock_watch_copy(DlockSpace *space, DlockTelling *telling,
				 DlockWatcher *watchers, int max)
{
	DlockWatch *watch;
	int			count = 0;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	telling->number = ++space->tellings;
	for (watch = watch_at(telling->watched->watches.head);
		 watch && watch->told < telling->watched->round && count < max;
		 watch = watch_at(watch->link.next), count++)
	{
		watch->telling = telling->number;
		watchers[count].anew = watch->told == 0;
		strlcpy(watchers[count].channel, watch->channel, NAMEDATALEN);
	}
	telling->count = count;
	LWLockRelease(&space->outbox_lock);
}

/* Record that the copied watches were told.  Skip watches armed since. */
static void
note_told(DlockSpace *space, const DlockTelling *telling)
{
	DlockWatched *watched = telling->watched;
	int			left = telling->count;
	DlockWatch *watch;
	DlockWatch *next;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	for (watch = watch_at(watched->watches.head);
		 watch && watch->told < telling->change && left > 0; watch = next)
	{
		next = watch_at(watch->link.next);
		if (watch->telling != telling->number)
			continue;
		dlock_list_remove(&watched->watches, &watch->link);
		dlock_list_append(&watched->watches, &watch->link);
		watch->told = telling->change;
		left--;
	}
	LWLockRelease(&space->outbox_lock);
}

/*
 * If "told" is set, the watches copied last have been told.  Otherwise nothing
 * was told, because all holders have ended.  When they leave the lock, that
 * change is told.  Returns true if the round goes on.  When it ends, the name
 * leaves the list, unless the holders changed again or the name has no users.
 */
bool
dlock_watch_end_telling(DlockSpace *space, const DlockTelling *telling,
						bool told)
{
	DlockWatched *watched = telling->watched;
	DlockPartition *partition = dlock_lock_partition(&watched->key);
	DlockWatch *first;
	bool		more;

	if (told)
		note_told(space, telling);
	LWLockAcquire(&partition->lock, LW_SHARED);
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	first = watch_at(watched->watches.head);
	more = told && first && first->told < watched->round;
	if (more)
	{
		/* move the name to the head: its other watches are told next */
		dlock_list_remove(&space->changed, &watched->link);
		dlock_list_prepend(&space->changed, &watched->link);
		watched->due = 0;
	}
	else
	{
		uint64		done = !told ? telling->change :
			first ? first->told : watched->changes;

		watched->round = 0;
		if (watched->users > 0 && watched->changes == done)
			unlist(space, watched);
	}
	LWLockRelease(&space->outbox_lock);
	LWLockRelease(&partition->lock);
	return more;
}
