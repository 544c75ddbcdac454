/*-------------------------------------------------------------------------
 *
 * lock_table.c
 *	  The table of locks: finding, locking and allocating entries.
 *
 * A partition's LWLock is the lock of all its entries.  A function that finds
 * an entry locks it, and the caller must release or remove the entry.  Only
 * queue*.c call this file to lock entries.  For the watched names of a
 * partition, watch.c takes the partition's lock itself.
 *
 * Why not dshash?  It would give each entry room for the longest name, and
 * allocate and free memory for each insertion and deletion.  At a resize, it
 * would lock all partitions while it moves all entries.  Here an entry is as
 * long as its name, and a partition grows by one bucket at a time (buckets.c).
 * A backend keeps one removed entry as its spare.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/buckets.h"

/* Sizes of entries are multiples of this, so that a spare fits more often. */
#define ENTRY_STEP	32

/* This backend's entry for its next insertion, or NULL */
static DlockLock *spare = NULL;

/* The memory must be zero, and unknown to other processes. */
void
dlock_lock_table_init(int tranche)
{
	for (int i = 0; i < DLOCK_PARTITIONS; i++)
	{
		DlockPartition *partition = &dlock_control->locks[i];

		LWLockInitialize(&partition->lock, tranche);
		dlock_buckets_init(&partition->buckets);
		dlock_buckets_init(&partition->watched);
	}
}

static inline DlockLock *
lock_at(dsa_pointer pointer)
{
	return dlock_address(pointer);
}

static DlockLock *
find_in(dsa_pointer *bucket, const DlockKey *key)
{
	dsa_pointer next = *bucket;

	while (DsaPointerIsValid(next))
	{
		DlockLock  *lock = lock_at(next);

		if (dlock_key_equal(&lock->key, key))
			return lock;
		next = lock->next;
	}
	return NULL;
}

/* Find a lock, and lock its entry; returns NULL if there is no such lock. */
DlockLock *
dlock_lock_find(const DlockKey *key)
{
	DlockPartition *partition = dlock_lock_partition(key);
	DlockLock  *lock;

	/* I8 */
	Assert(!LWLockHeldByMe(&partition->lock));
	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	lock = find_in(dlock_bucket_of(&partition->buckets, key->hash), key);
	if (lock == NULL)
		LWLockRelease(&partition->lock);
	return lock;
}

/*
 * Lock the partition of a key, without a search.  The caller's pointer to the
 * entry is valid if the caller's ticket is still in the lock (I7).
 */
void
dlock_lock_enter(const DlockKey *key)
{
	Assert(!LWLockHeldByMe(&dlock_lock_partition(key)->lock));
	LWLockAcquire(&dlock_lock_partition(key)->lock, LW_EXCLUSIVE);
}

/* Undo dlock_lock_enter(), after the caller has found its ticket GONE. */
void
dlock_lock_leave(const DlockKey *key)
{
	LWLockRelease(&dlock_lock_partition(key)->lock);
}

/* The counter of locks with a queue; several databases can share it */
static inline uint32 *
num_queued(DlockPartition *partition, const DlockSpaceKey *space)
{
	return &partition->queued[space->database & (DLOCK_QUEUED_BUCKETS - 1)];
}

/* Before an entry is unlocked, update the counter of locks with a queue. */
static inline void
count_queue(DlockPartition *partition, DlockLock *lock)
{
	bool		queued = lock->queue.length > 0;

	if (likely(queued == lock->queued))
		return;
	Assert(LWLockHeldByMeInMode(&partition->lock, LW_EXCLUSIVE));
	lock->queued = queued;
	*num_queued(partition, &lock->key.space) += queued ? 1 : -1;
}

void
dlock_lock_release(DlockLock *lock)
{
	DlockPartition *partition = dlock_lock_partition(&lock->key);

	Assert(LWLockHeldByMe(&partition->lock));
	count_queue(partition, lock);
	LWLockRelease(&partition->lock);
}

static inline uint32
entry_size(const DlockKey *key)
{
	return TYPEALIGN(ENTRY_STEP, offsetof(DlockLock, key) +
					 dlock_key_size(key));
}

/* Can an insertion use the spare entry as it is? */
bool
dlock_lock_is_spare(const DlockKey *key, Oid role)
{
	return spare && spare->role == role && spare->size == entry_size(key);
}

/* Free the spare entry, at exit or to make one of another size. */
void
dlock_lock_free_spare(void)
{
	DlockLock  *lock = spare;

	spare = NULL;
	if (lock)
		dlock_release_memory(lock->role, lock, lock->size);
}

static void
make_spare_lock(uint32 size, Oid role)
{
	dlock_lock_free_spare();
	spare = dlock_allocate(role, size);
	spare->size = size;
	spare->role = role;
}

/* Prepare an insertion.  Raises 53200.  Called without dlock's locks. */
static inline void
prepare(DlockPartition *partition, const DlockKey *key, Oid role)
{
	uint32		size = entry_size(key);

	dlock_buckets_prepare(&partition->buckets, &partition->lock);
	if (unlikely(spare == NULL || spare->size != size))
		make_spare_lock(size, role);
	else if (unlikely(spare->role != role))
	{
		dlock_pass_memory(spare->role, role, size);
		spare->role = role;
	}
}

static dsa_pointer *
next_lock(dsa_pointer entry, uint32 *hash)
{
	DlockLock  *lock = lock_at(entry);

	*hash = lock->key.hash;
	return &lock->next;
}

/* Add buckets for "more" numbers and, if with_locks, locks.  Raises 53200. */
void
dlock_tables_reserve(uint64 more, bool with_locks)
{
	dlock_ids_reserve(more);
	if (!with_locks)
		return;
	for (int p = 0; p < DLOCK_PARTITIONS; p++)
		dlock_buckets_reserve(&dlock_control->locks[p].buckets,
							  &dlock_control->locks[p].lock,
							  more / DLOCK_PARTITIONS, next_lock);
}

/*
 * Find or insert a lock, and lock its entry.  A new lock has no ticket, and
 * its memory counts for the role.  Raises 53200, with nothing changed.
 */
DlockLock *
dlock_lock_insert(const DlockKey *key, int32 slots, Oid role)
{
	DlockPartition *partition = dlock_lock_partition(key);
	dsa_pointer *bucket;
	DlockLock  *lock;

	prepare(partition, key, role);
	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	bucket = dlock_bucket_of(&partition->buckets, key->hash);
	lock = find_in(bucket, key);
	if (lock)
		return lock;
	if (unlikely(partition->buckets.count >= partition->buckets.num_buckets))
	{
		dlock_buckets_divide(&partition->buckets, next_lock);
		bucket = dlock_bucket_of(&partition->buckets, key->hash);
	}

	lock = spare;
	spare = NULL;
	dlock_list_init(&lock->holders);
	dlock_list_init(&lock->queue);
	lock->slots = lock->holders_slots = slots;
	lock->permits = 0;
	lock->leased = false;
	lock->closed = 0;
	lock->exclusive = 0;
	lock->queued = false;
	lock->settled = false;
	lock->setters = 0;
	lock->set_slots = 0;
	dlock_key_copy(&lock->key, key);
	lock->next = *bucket;
	*bucket = dlock_pointer(lock);
	partition->buckets.count++;
	return lock;
}

static void
unlink_entry(DlockPartition *partition, DlockLock *lock)
{
	dsa_pointer *link = dlock_bucket_of(&partition->buckets, lock->key.hash);

	Assert(LWLockHeldByMeInMode(&partition->lock, LW_EXCLUSIVE));
	while (*link != dlock_pointer(lock))
		link = &lock_at(*link)->next;
	*link = lock->next;
	partition->buckets.count--;
	if (lock->queued)
		(*num_queued(partition, &lock->key.space))--;
	lock->queued = false;
}

/* Remove and unlock an entry without tickets.  It may become the spare. */
void
dlock_lock_remove(DlockLock *lock)
{
	DlockPartition *partition = dlock_lock_partition(&lock->key);

	unlink_entry(partition, lock);
	LWLockRelease(&partition->lock);
	if (likely(spare == NULL))
		spare = lock;
	else
		dlock_release_memory(lock->role, lock, lock->size);
}

/*
 * Begin a walk through the locks of a space, with one partition locked at a
 * time.  If "queued" is set, it visits only locks with a queue, and skips
 * partitions in which the database has no queue.
 */
void
dlock_lock_scan_begin(DlockLockScan *scan, const DlockSpaceKey *space,
					  bool queued)
{
	dlock_lock_scan_begin_in(scan, 0, space, queued);
	scan->end = DLOCK_PARTITIONS;
}

/* Begin a walk through one partition. */
void
dlock_lock_scan_begin_in(DlockLockScan *scan, int partition,
						 const DlockSpaceKey *space, bool queued)
{
	scan->locked = false;
	scan->partition = partition - 1;
	scan->end = partition + 1;
	scan->bucket = scan->num_buckets = 0;
	scan->head = scan->count = 0;
	scan->current = NULL;
	scan->space = space;
	scan->queued = queued;
}

static void
begin_partition(DlockLockScan *scan, DlockPartition *partition)
{
	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	scan->locked = true;
	scan->bucket = 0;
	scan->num_buckets =
		scan->queued && *num_queued(partition, scan->space) == 0 ? 0 :
		partition->buckets.num_buckets;
}

/*
 * For each entry, a walk reads the entry, its first holder and the holder's
 * lease, which can be three cache misses.  So the next entries, in a ring, are
 * prefetched in stages (software pipelining, as in Chen et al., ICDE 2004).
 */
static DlockLock *
get_ahead(const DlockLockScan *scan, uint32 place)
{
	return place >= scan->count ? NULL :
		scan->ahead[(scan->head + place) % DLOCK_SCAN_AHEAD];
}

static void
add_ahead(DlockLockScan *scan, dsa_pointer entry)
{
	DlockLock  *lock;

	if (!DsaPointerIsValid(entry))
		return;
	lock = lock_at(entry);
	compat_prefetch(lock);
	scan->ahead[(scan->head + scan->count++) % DLOCK_SCAN_AHEAD] = lock;
}

static void
prefetch_ahead(const DlockLockScan *scan)
{
	DlockLock  *lock;
	DlockLeaseTicket *ticket;

	lock = get_ahead(scan, DLOCK_SCAN_AHEAD / 2);
	if (lock && DsaPointerIsValid(lock->holders.head))
	{
		ticket = dlock_address(lock->holders.head);
		compat_prefetch(ticket);
		compat_prefetch(&ticket->lease);
	}
	lock = get_ahead(scan, DLOCK_SCAN_AHEAD / 4);
	if (lock && DsaPointerIsValid(lock->holders.head))
	{
		ticket = dlock_address(lock->holders.head);
		if (ticket->ticket.scope == DLOCK_LEASE)
			compat_prefetch(dlock_address(ticket->lease));
	}
}

/* Take the first entry from the ring, and add its bucket's next entry. */
static DlockLock *
take_ahead(DlockLockScan *scan)
{
	DlockLock  *lock;

	while (scan->count < DLOCK_SCAN_AHEAD && scan->bucket < scan->num_buckets)
		add_ahead(scan,
				  *dlock_bucket_at(&dlock_control->locks[scan->partition].buckets,
								   scan->bucket++));
	if (scan->count == 0)
		return NULL;
	prefetch_ahead(scan);
	lock = get_ahead(scan, 0);
	scan->head++;
	scan->count--;
	add_ahead(scan, lock->next);
	return lock;
}

static inline bool
is_sought(const DlockLockScan *scan, const DlockLock *lock)
{
	return (!scan->queued || lock->queue.length > 0) &&
		memcmp(&lock->key.space, scan->space, sizeof(DlockSpaceKey)) == 0;
}

/* Returns the next entry, locked, or NULL after the last one. */
DlockLock *
dlock_lock_scan_next(DlockLockScan *scan)
{
	if (scan->current)
		count_queue(&dlock_control->locks[scan->partition], scan->current);
	do
	{
		while ((scan->current = take_ahead(scan)) == NULL)
		{
			dlock_lock_scan_end(scan);
			if (scan->partition + 1 == scan->end)
				return NULL;
			begin_partition(scan, &dlock_control->locks[++scan->partition]);
		}
	} while (!is_sought(scan, scan->current));
	return scan->current;
}

/* Remove and free the entry that dlock_lock_scan_next() has returned. */
void
dlock_lock_scan_remove(DlockLockScan *scan)
{
	DlockLock  *lock = scan->current;

	scan->current = NULL;
	unlink_entry(&dlock_control->locks[scan->partition], lock);
	dlock_release_memory(lock->role, lock, lock->size);
}

/* End a walk, at any point; releases the partition's lock if it is held. */
void
dlock_lock_scan_end(DlockLockScan *scan)
{
	if (scan->locked && scan->current)
		count_queue(&dlock_control->locks[scan->partition], scan->current);
	scan->current = NULL;
	if (scan->locked)
		LWLockRelease(&dlock_control->locks[scan->partition].lock);
	scan->locked = false;
}
