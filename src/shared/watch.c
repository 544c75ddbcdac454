/*-------------------------------------------------------------------------
 *
 * watch.c
 *	  Names that are watched, and who is to be told that their holders have
 *	  changed.
 *
 * A name that is watched has an entry of its own, whether or not anybody holds
 * the lock, in a small hash table of its partition; so whoever changes the
 * holders, and has that partition locked, sees at once that nothing is watched
 * there, or finds the name.  He counts the change and puts the name into the list
 * of what is to be told, if it is not there already; and that is all, however many
 * watch it.
 *
 * The sender goes through that list.  It tells what it finds at that moment, and
 * so need not know what has changed, nor how often; and for every watch it is
 * noted after how many changes that was.  A name leaves the list when none of
 * its watches is behind (I29).  So a sender that fails or dies loses nothing.
 *
 * A watch's memory is its session's, which alone frees it.  A name's goes with its
 * last watch, or where it is listed then, with its place in the list, from which
 * only the sender takes it: the sender needs no lock to look at a name there.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "shared/inner.h"

#define FIRST_SIZE		8		/* buckets in a partition, once something is watched */

/*
 * A name is told of no more often than that, in microseconds: who changes it all
 * the time shall not keep the sender, and all who listen, busy.
 */
#define INTERVAL		10000
#define INTERVAL_EACH	5		/* and so much more for each watch */

/* Names that are looked at in one go */
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

/*
 * The table of names
 */

static inline dsa_pointer *
find_bucket(const DlockPartition *partition, uint32 hash)
{
	dsa_pointer *buckets = dlock_address(partition->watched);

	/* the partition is in the first bits */
	return &buckets[hash & (partition->watched_size - 1)];
}

/* Where a name's entry is linked; NULL where there is none. */
static dsa_pointer *
find_link(const DlockPartition *partition, const DlockKey *key)
{
	dsa_pointer *link;

	if (partition->num_watched == 0)
		return NULL;
	link = find_bucket(partition, key->hash);
	while (DsaPointerIsValid(*link))
	{
		DlockWatched *watched = watched_at(*link);

		if (dlock_key_equal(&watched->key, key))
			return link;
		link = &watched->next;
	}
	return NULL;
}

/* Enter the names of a partition into other buckets, which there are more of. */
static void
use_buckets(DlockPartition *partition, dsa_pointer made, uint32 size)
{
	dsa_pointer *buckets = dlock_address(made);
	dsa_pointer *before = partition->watched_size > 0 ?
		dlock_address(partition->watched) : NULL;

	for (uint32 b = 0; b < size; b++)
		buckets[b] = InvalidDsaPointer;
	for (uint32 b = 0; b < partition->watched_size; b++)
	{
		for (dsa_pointer one = before[b]; DsaPointerIsValid(one);)
		{
			DlockWatched *watched = watched_at(one);
			dsa_pointer *bucket = &buckets[watched->key.hash & (size - 1)];
			dsa_pointer next = watched->next;

			watched->next = *bucket;
			*bucket = one;
			one = next;
		}
	}
	partition->watched = made;
	partition->watched_size = size;
}

/*
 * See to it that there are more than twice as many buckets as names, so that most
 * locks of the partition find an empty one.  Raises 53200.  Called without any of
 * dlock's locks.
 */
static void
make_buckets(DlockPartition *partition)
{
	uint32		size = partition->watched_size;
	dsa_pointer to_free;

	if (likely(partition->num_watched * 2 < size))
		return;
	size = Max(FIRST_SIZE, size * 2);
	to_free = dlock_allocate_uncounted(size * sizeof(dsa_pointer));
	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	if (partition->watched_size < size)
	{
		dsa_pointer made = to_free;

		to_free = partition->watched;
		use_buckets(partition, made, size);
	}
	LWLockRelease(&partition->lock);
	if (DsaPointerIsValid(to_free))
		dsa_free(dlock_area, to_free);
}

static Size
watched_size(const DlockKey *key)
{
	return offsetof(DlockWatched, key) + dlock_key_size(key);
}

static DlockWatched *
make_watched(const DlockSpace *space, const DlockKey *key, Oid role)
{
	dsa_pointer self = dlock_allocate(role, watched_size(key));
	DlockWatched *watched = watched_at(self);

	memset(watched, 0, offsetof(DlockWatched, key));
	watched->self = self;
	watched->space = space->self;
	watched->role = role;
	watched->changes = 1;
	dlock_key_copy(&watched->key, key);
	return watched;
}

/*
 * What is to be told
 */

/* Called with the name's partition locked, and the outbox. */
static void
list(DlockSpace *space, DlockWatched *watched)
{
	Assert(LWLockHeldByMe(&dlock_lock_partition(&watched->key)->lock));
	Assert(LWLockHeldByMeInMode(&space->outbox_lock, LW_EXCLUSIVE));
	if (!watched->listed)
		dlock_list_append(&space->changed, &watched->link, watched->self);
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

/* As dlock_watch_note_change(), where names are watched in the partition */
DlockSpace *
dlock_watch_count_change(const DlockKey *key)
{
	DlockPartition *partition = dlock_lock_partition(key);
	DlockWatched *watched;
	DlockSpace *space = NULL;
	dsa_pointer *link;

	Assert(LWLockHeldByMeInMode(&partition->lock, LW_EXCLUSIVE));
	link = find_link(partition, key);
	if (link == NULL)
		return NULL;
	watched = watched_at(*link);
	if (!watched->listed)
	{
		space = dlock_space_at(watched->space);
		LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
		list(space, watched);
		LWLockRelease(&space->outbox_lock);
	}
	watched->changes++;
	return space;
}

/*
 * The session's part
 */

/* Find a name, or enter the one that was made for it; it is used once more. */
static DlockWatched *
use_watched(DlockWatched *made)
{
	DlockPartition *partition = dlock_lock_partition(&made->key);
	DlockWatched *watched = made;
	dsa_pointer *link;

	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	link = find_link(partition, &made->key);
	if (link)
		watched = watched_at(*link);
	else
	{
		dsa_pointer *bucket = find_bucket(partition, made->key.hash);

		made->next = *bucket;
		*bucket = made->self;
		partition->num_watched++;
	}
	watched->users++;
	LWLockRelease(&partition->lock);
	return watched;
}

/*
 * Watch a name, without being told before dlock_watch_arm().  Called once there is
 * memory for that, as dlock.max_memory says.  Raises 53200, with nothing left
 * behind.
 */
DlockWatch *
dlock_watch_begin(DlockSpace *space, const DlockKey *key, const char *channel)
{
	Oid			role = GetUserId();
	DlockWatched *made;
	DlockWatched *watched;
	dsa_pointer self;
	DlockWatch *watch;

	make_buckets(dlock_lock_partition(key));
	made = make_watched(space, key, role);
	PG_TRY();
	{
		self = dlock_allocate(role, sizeof(DlockWatch));
	}
	PG_CATCH();
	{
		dlock_release_memory(role, made->self, watched_size(key));
		PG_RE_THROW();
	}
	PG_END_TRY();

	watched = use_watched(made);
	if (watched != made)
		dlock_release_memory(role, made->self, watched_size(key));
	watch = dlock_address(self);
	memset(watch, 0, sizeof(DlockWatch));
	watch->self = self;
	watch->watched = watched->self;
	watch->role = role;
	strlcpy(watch->channel, channel, NAMEDATALEN);
	pg_atomic_fetch_add_u32(&space->watches, 1);
	return watch;
}

/*
 * The session listens now, if it is to: it is told who holds the lock at this
 * moment, also where it has been told before, and of each change.
 */
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
	dlock_list_prepend(&watched->watches, &watch->link, watch->self);
	watch->armed = true;
	watch->told = watch->telling = 0;
	LWLockRelease(&space->outbox_lock);
	LWLockRelease(&partition->lock);
	(void) dlock_worker_wake(space);
}

/* Take a name out of the table, and free it.  Called with the partition's lock. */
static void
forget(DlockPartition *partition, DlockWatched *watched, dsa_pointer *link)
{
	Assert(LWLockHeldByMeInMode(&partition->lock, LW_EXCLUSIVE));
	Assert(watched->users == 0 && !watched->listed);
	*link = watched->next;
	partition->num_watched--;
	dlock_release_memory(watched->role, watched->self,
						 watched_size(&watched->key));
}

/* The session watches no more.  Raises nothing. */
void
dlock_watch_end(DlockWatch *watch)
{
	DlockWatched *watched = watched_at(watch->watched);
	DlockSpace *space = dlock_space_at(watched->space);
	DlockPartition *partition = dlock_lock_partition(&watched->key);
	dsa_pointer *link;

	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	link = find_link(partition, &watched->key);
	if (watch->armed)
	{
		LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
		dlock_list_remove(&watched->watches, &watch->link);
		LWLockRelease(&space->outbox_lock);
	}
	if (--watched->users == 0 && !watched->listed)
		forget(partition, watched, link);
	LWLockRelease(&partition->lock);
	dlock_release_memory(watch->role, watch->self, sizeof(DlockWatch));
	if (pg_atomic_sub_fetch_u32(&space->watches, 1) == 0)
		dlock_worker_dismiss(space);
}

/* Forget the names of a space that nobody uses any more. */
void
dlock_watch_purge(DlockSpace *space)
{
	for (uint32 p = 0; p < DLOCK_PARTITIONS; p++)
	{
		DlockKey	any = {.hash = p << (32 - DLOCK_PARTITION_BITS)};
		DlockPartition *partition = dlock_lock_partition(&any);

		LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
		for (uint32 b = 0; b < partition->watched_size; b++)
		{
			dsa_pointer *link = find_bucket(partition, b);

			while (DsaPointerIsValid(*link))
			{
				DlockWatched *watched = watched_at(*link);

				if (watched->space != space->self)
				{
					link = &watched->next;
					continue;
				}
				for (DlockWatch *watch = watch_at(watched->watches.head), *next;
					 watch; watch = next)
				{
					next = watch_at(watch->link.next);
					dlock_release_memory(watch->role, watch->self,
										 sizeof(DlockWatch));
				}
				/* nobody looks into the space's list any more */
				watched->listed = false;
				watched->users = 0;
				forget(partition, watched, link);
			}
		}
		LWLockRelease(&partition->lock);
	}
}

/*
 * The sender's part.  Only who holds the sender's office calls these.
 */

/*
 * When the next name is to be told, in monotonic microseconds: 0 at once,
 * DLOCK_NO_DEADLINE never.
 */
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

/*
 * Take names that are due, at most "max", to be told one after the other.  They
 * stay in the list, at its end, and are not due for a while.
 */
int
dlock_watch_take(DlockSpace *space, DlockTelling *tellings, int max)
{
	uint64		now = dlock_monotonic_now();
	int			count = 0;
	int			looks = 0;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	for (dsa_pointer pointer = space->changed.head;
		 DsaPointerIsValid(pointer) && count < max && looks++ < MAX_LOOKS;
		 pointer = watched_at(pointer)->link.next)
	{
		if (watched_at(pointer)->due <= now)
			tellings[count++] = (DlockTelling)
		{
			.watched = watched_at(pointer)
		};
	}
	for (int i = 0; i < count; i++)
	{
		DlockWatched *watched = tellings[i].watched;

		watched->due = now + INTERVAL + watched->watches.length * INTERVAL_EACH;
		dlock_list_remove(&space->changed, &watched->link);
		dlock_list_append(&space->changed, &watched->link, watched->self);
	}
	LWLockRelease(&space->outbox_lock);
	return count;
}

/* Of these, nothing could be told for want of room: they are due at once. */
void
dlock_watch_put_back(DlockSpace *space, DlockTelling *tellings, int count)
{
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	for (int i = 0; i < count; i++)
		tellings[i].watched->due = 0;
	LWLockRelease(&space->outbox_lock);
}

/*
 * Begin to tell of a name: what the caller finds out about its holders next is
 * the truth after so many changes, or more (I29).  False if no watch is left,
 * and the name is gone.
 */
bool
dlock_watch_begin_telling(DlockSpace *space, DlockTelling *telling)
{
	DlockWatched *watched = telling->watched;
	DlockPartition *partition = dlock_lock_partition(&watched->key);
	bool		used;

	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	telling->change = watched->changes;
	used = watched->users > 0;
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	if (!used)
		unlist(space, watched);
	else if (watched->round == 0)
		watched->round = watched->changes;
	LWLockRelease(&space->outbox_lock);
	if (!used)
		forget(partition, watched, find_link(partition, &watched->key));
	LWLockRelease(&partition->lock);
	return used;
}

/*
 * Copy those who have not been told in this round, at most "max"; telling->count
 * is how many these are.
 */
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

/*
 * Those whose channels were copied have been told.  They are among the first: before
 * them are only those who have come since.
 */
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
		dlock_list_append(&watched->watches, &watch->link, watch->self);
		watch->told = telling->change;
		left--;
	}
	LWLockRelease(&space->outbox_lock);
}

/*
 * Take a name out of the list that has nothing to tell any more.  One that nobody
 * watches stays there: it is to be freed, see dlock_watch_begin_telling().
 */
static void
unlist_if_used(DlockSpace *space, DlockWatched *watched)
{
	if (watched->users > 0)
		unlist(space, watched);
}

/*
 * The channels that were copied last have been told, if there were any.  The round
 * ends when all have; the name leaves the list then, unless the holders have
 * changed meanwhile.  Returns whether there are more to be told at once.
 */
bool
dlock_watch_end_telling(DlockSpace *space, const DlockTelling *telling)
{
	DlockWatched *watched = telling->watched;
	DlockPartition *partition = dlock_lock_partition(&watched->key);
	DlockWatch *first;
	bool		more;

	note_told(space, telling);
	LWLockAcquire(&partition->lock, LW_SHARED);
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	first = watch_at(watched->watches.head);
	more = first && first->told < watched->round;
	if (!more)
		watched->round = 0;
	if (more)
	{
		/* the first again, so that they are told in one go */
		dlock_list_remove(&space->changed, &watched->link);
		dlock_list_prepend(&space->changed, &watched->link, watched->self);
		watched->due = 0;
	}
	else if (first == NULL || first->told == watched->changes)
		unlist_if_used(space, watched);
	LWLockRelease(&space->outbox_lock);
	LWLockRelease(&partition->lock);
	return more;
}

/*
 * There is nothing to be told of a name, before its holders change again: they
 * have ended, and are about to leave.
 */
void
dlock_watch_skip(DlockSpace *space, const DlockTelling *telling)
{
	DlockWatched *watched = telling->watched;
	DlockPartition *partition = dlock_lock_partition(&watched->key);

	LWLockAcquire(&partition->lock, LW_SHARED);
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	watched->round = 0;
	if (watched->changes == telling->change)
		unlist_if_used(space, watched);
	LWLockRelease(&space->outbox_lock);
	LWLockRelease(&partition->lock);
}
