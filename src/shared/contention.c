/*-------------------------------------------------------------------------
 *
 * contention.c
 *	  The names that were waited for most, in bounded memory.
 *
 * The algorithm is "Space-saving" (A. Metwally, D. Agrawal, A. El Abbadi,
 * "Efficient Computation of Frequent and Top-k Elements in Data Streams", ICDT
 * 2005).  The weight of a name is the time waited for it, in microseconds.  If
 * no entry is free, a new name replaces the name with the least weight, and
 * inherits this weight.  So each name with more than 1/n of the total weight
 * has an entry.  n is DLOCK_CONTENDED_NAMES, or less if memory is short.
 *
 * The view's counters begin at 0 when a name gets its entry, so they are never
 * too great.
 *
 * A search scans all hashes, and a replacement scans all weights.  Both take
 * some microseconds at most.  The entries of a space form a sketch with one
 * lock.  Nothing is allocated under this lock.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "shared/inner.h"

StaticAssertDecl(DLOCK_CONTENDED_NAMES % DLOCK_CONTENDED_CHUNK == 0,
				 "chunks must fill the sketch");

#define CHUNK_SIZE	(DLOCK_CONTENDED_CHUNK * sizeof(DlockContended))

/* A space's sketch, or NULL */
static DlockContention *
sketch_of(DlockSpace *space)
{
	dsa_pointer pointer = pg_atomic_read_u64(&space->contention);

	return DsaPointerIsValid(pointer) ? dlock_address(pointer) : NULL;
}

static DlockContended *
entry_at(const DlockContention *sketch, int e)
{
	DlockContended *chunk =
		dlock_address(sketch->chunks[e / DLOCK_CONTENDED_CHUNK]);

	return &chunk[e % DLOCK_CONTENDED_CHUNK];
}

static DlockContention *
make_sketch(DlockSpace *space)
{
	dsa_pointer self = dlock_allocate_if_free(InvalidOid, sizeof(DlockContention));
	DlockContention *sketch;
	uint64		none = InvalidDsaPointer;

	if (!DsaPointerIsValid(self))
		return NULL;
	sketch = dlock_address(self);

	memset(sketch, 0, sizeof(DlockContention));
	LWLockInitialize(&sketch->lock, dlock_control->memory_tranche);
	if (pg_atomic_compare_exchange_u64(&space->contention, &none, self))
		return sketch;
	/* another process was faster */
	dlock_release_memory(InvalidOid, sketch, sizeof(DlockContention));
	return dlock_address(none);
}

static void
add_chunk(DlockContention *sketch)
{
	dsa_pointer chunk = dlock_allocate_if_free(InvalidOid, CHUNK_SIZE);
	bool		used;

	if (!DsaPointerIsValid(chunk))
		return;

	LWLockAcquire(&sketch->lock, LW_EXCLUSIVE);
	used = sketch->count == sketch->room &&
		sketch->room < DLOCK_CONTENDED_NAMES;
	if (used)
	{
		sketch->chunks[sketch->room / DLOCK_CONTENDED_CHUNK] = chunk;
		sketch->room += DLOCK_CONTENDED_CHUNK;
	}
	LWLockRelease(&sketch->lock);
	if (!used)
		dlock_release_memory(InvalidOid, dlock_address(chunk), CHUNK_SIZE);
}

/*
 * Make room for another name before a wait, if there is memory to spare.
 * Raises 53200.  The caller holds none of dlock's locks.
 */
void
dlock_contention_prepare(DlockSpace *space)
{
	DlockContention *sketch = sketch_of(space);

	/* read without the lock, because a wrong answer is harmless */
	if (likely(sketch && (sketch->count < sketch->room ||
						  sketch->room == DLOCK_CONTENDED_NAMES)))
		return;
	if (!dlock_memory_to_spare(sketch && sketch->room > 0))
		return;
	if (sketch == NULL)
		sketch = make_sketch(space);
	if (sketch)
		add_chunk(sketch);
}

/* Forget all names.  Keep the first chunk, because waiters may need it. */
void
dlock_contention_reset(DlockSpace *space)
{
	DlockContention *sketch = sketch_of(space);
	dsa_pointer chunks[DLOCK_CONTENDED_NAMES / DLOCK_CONTENDED_CHUNK];
	int			room;

	if (sketch == NULL)
		return;
	LWLockAcquire(&sketch->lock, LW_EXCLUSIVE);
	memcpy(chunks, sketch->chunks, sizeof(chunks));
	room = sketch->room;
	sketch->room = Min(room, DLOCK_CONTENDED_CHUNK);
	sketch->count = 0;
	LWLockRelease(&sketch->lock);
	for (int c = 1; c < room / DLOCK_CONTENDED_CHUNK; c++)
		dlock_release_memory(InvalidOid, dlock_address(chunks[c]), CHUNK_SIZE);
}

/* Free the sketch of a space that is removed. */
void
dlock_contention_free(DlockSpace *space)
{
	DlockContention *sketch = sketch_of(space);

	if (sketch == NULL)
		return;
	dlock_contention_reset(space);
	if (sketch->room > 0)
		dlock_release_memory(InvalidOid, dlock_address(sketch->chunks[0]),
							 CHUNK_SIZE);
	dlock_release_memory(InvalidOid, sketch, sizeof(DlockContention));
	pg_atomic_write_u64(&space->contention, InvalidDsaPointer);
}

/* The index of a name's entry, or -1 */
static int
find(DlockContention *sketch, const DlockKey *key)
{
	for (int e = 0; e < sketch->count; e++)
	{
		const DlockContended *entry = entry_at(sketch, e);

		if (sketch->hashes[e] == key->hash && entry->length == key->length &&
			memcmp(entry->name, key->name, key->length) == 0)
			return e;
	}
	return -1;
}

static int
find_least(const DlockContention *sketch)
{
	int			least = 0;

	for (int e = 1; e < sketch->count; e++)
	{
		if (sketch->weights[e] < sketch->weights[least])
			least = e;
	}
	return least;
}

/* Give a name an entry, with index *e; returns NULL if there is no chunk. */
static DlockContended *
take_entry(DlockContention *sketch, const DlockKey *key, int *e)
{
	DlockContended *entry;

	if (sketch->room == 0)
		return NULL;
	if (sketch->count < sketch->room)
	{
		*e = sketch->count++;
		sketch->weights[*e] = 0;
	}
	else
		*e = find_least(sketch);
	entry = entry_at(sketch, *e);
	memset(entry, 0, offsetof(DlockContended, name));
	entry->length = key->length;
	memcpy(entry->name, key->name, key->length);
	sketch->hashes[*e] = key->hash;
	return entry;
}

/* A wait for a lock is over.  "queue_length" includes the waiter itself. */
void
dlock_contention_wait(DlockSpace *space, const DlockKey *key, uint64 waited,
					  uint32 queue_length, DlockWaitEnd how)
{
	DlockContention *sketch = sketch_of(space);
	TimestampTz now = GetCurrentTimestamp();
	DlockContended *entry;
	int			e;

	if (sketch == NULL)
		return;
	LWLockAcquire(&sketch->lock, LW_EXCLUSIVE);
	e = find(sketch, key);
	entry = e >= 0 ? entry_at(sketch, e) : take_entry(sketch, key, &e);
	if (entry)
	{
		entry->waits++;
		entry->wait_us += waited;
		entry->max_wait_us = Max(entry->max_wait_us, waited);
		entry->timeouts += how == DLOCK_WAIT_TIMED_OUT;
		entry->deadlocks += how == DLOCK_WAIT_DEADLOCK;
		entry->max_queue = Max(entry->max_queue, queue_length);
		entry->last_wait_at = now;
		sketch->weights[e] += waited;
	}
	LWLockRelease(&sketch->lock);
}

/* A lease that held a lock has run out. */
void
dlock_contention_expiration(DlockSpace *space, const DlockKey *key,
							bool is_waited_for)
{
	DlockContention *sketch = sketch_of(space);
	DlockContended *entry = NULL;
	int			e;

	if (sketch == NULL)
		return;
	LWLockAcquire(&sketch->lock, LW_EXCLUSIVE);
	e = find(sketch, key);
	if (e >= 0)
		entry = entry_at(sketch, e);
	else if (is_waited_for)
		entry = take_entry(sketch, key, &e);
	if (entry)
		entry->expirations++;
	LWLockRelease(&sketch->lock);
}

/* Copy all entries, DLOCK_CONTENDED_NAMES at most; returns how many. */
int
dlock_contention_copy(DlockSpace *space, DlockContended *entries)
{
	DlockContention *sketch = sketch_of(space);
	int			count;

	if (sketch == NULL)
		return 0;
	LWLockAcquire(&sketch->lock, LW_SHARED);
	count = sketch->count;
	for (int e = 0; e < count; e += DLOCK_CONTENDED_CHUNK)
		memcpy(&entries[e], entry_at(sketch, e),
			   Min(count - e, DLOCK_CONTENDED_CHUNK) * sizeof(DlockContended));
	LWLockRelease(&sketch->lock);
	return count;
}
