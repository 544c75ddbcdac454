/*-------------------------------------------------------------------------
 *
 * buckets.c
 *	  Buckets of hash tables that grow by one bucket at a time.
 *
 * A table has partitions, each with a lock and buckets.  If there are as many
 * entries as buckets, an insertion divides one bucket (linear hashing).  So
 * the cost of an insertion does not depend on the number of entries.
 *
 * The first buckets are in the partition, the others in segments.  Each new
 * segment doubles the number of buckets.  A backend allocates a segment before
 * it takes the partition's lock.  No segment is ever moved or freed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/buckets.h"

/* Buckets that dlock_buckets_reserve() divides each time it takes the lock */
#define DIVIDED_AT_ONCE		100

/* The memory must be zero. */
void
dlock_buckets_init(DlockBuckets *buckets)
{
	StaticAssertStmt(DLOCK_FIRST_BUCKETS > 1 &&
					 (DLOCK_FIRST_BUCKETS & (DLOCK_FIRST_BUCKETS - 1)) == 0,
					 "DLOCK_FIRST_BUCKETS must be a power of 2");
	buckets->num_buckets = DLOCK_FIRST_BUCKETS;
	buckets->mask = DLOCK_FIRST_BUCKETS - 1;
}

/* Raises 53200.  Called without dlock's locks. */
void
dlock_buckets_add_segment(DlockBuckets *buckets, LWLock *lock, int segment)
{
	dsa_pointer made = dlock_allocate_uncounted(sizeof(dsa_pointer) *
												(DLOCK_FIRST_BUCKETS << segment));
	bool		used;

	LWLockAcquire(lock, LW_EXCLUSIVE);
	used = !DsaPointerIsValid(buckets->segments[segment]);
	if (used)
		buckets->segments[segment] = made;
	LWLockRelease(lock);
	if (!used)
		dsa_free(dlock_area, made);
}

/* Divide a bucket by one more hash bit, if the new bucket's segment exists. */
void
dlock_buckets_divide(DlockBuckets *buckets, DlockNextOf next_of)
{
	uint32		number = buckets->num_buckets;
	uint32		mask = buckets->mask;
	uint32		hash;
	dsa_pointer *from;
	dsa_pointer *to;

	if (number > mask)
		mask = mask * 2 + 1;
	if (dlock_segment_of(number) >= DLOCK_SEGMENTS ||
		!DsaPointerIsValid(buckets->segments[dlock_segment_of(number)]))
		return;
	from = dlock_bucket_at(buckets, number & (mask >> 1));
	to = dlock_bucket_at(buckets, number);
	*to = InvalidDsaPointer;
	while (DsaPointerIsValid(*from))
	{
		dsa_pointer entry = *from;
		dsa_pointer *next = next_of(entry, &hash);

		if ((hash & mask) != number)
		{
			from = next;
			continue;
		}
		*from = *next;
		*next = *to;
		*to = entry;
	}
	buckets->mask = mask;
	buckets->num_buckets = number + 1;
}

/* The caller holds the partition's lock, as for dlock_buckets_delete(). */
void
dlock_buckets_insert(DlockBuckets *buckets, dsa_pointer entry,
					 DlockNextOf next_of)
{
	uint32		hash;
	dsa_pointer *next = next_of(entry, &hash);
	dsa_pointer *bucket;

	if (unlikely(buckets->count >= buckets->num_buckets))
		dlock_buckets_divide(buckets, next_of);
	bucket = dlock_bucket_of(buckets, hash);
	*next = *bucket;
	*bucket = entry;
	buckets->count++;
}

/* The entry must be in the table. */
void
dlock_buckets_delete(DlockBuckets *buckets, dsa_pointer entry,
					 DlockNextOf next_of)
{
	uint32		hash;
	dsa_pointer *next = next_of(entry, &hash);
	dsa_pointer *link = dlock_bucket_of(buckets, hash);

	while (*link != entry)
		link = next_of(*link, &hash);
	*link = *next;
	buckets->count--;
}

/* Add buckets for "more" entries.  Raises 53200.  Called without LWLocks. */
void
dlock_buckets_reserve(DlockBuckets *buckets, LWLock *lock, uint64 more,
					  DlockNextOf next_of)
{
	uint64		wanted = buckets->count + more;

	while (buckets->num_buckets < wanted)
	{
		int			segment = dlock_segment_of(buckets->num_buckets);

		if (segment >= DLOCK_SEGMENTS)
			return;
		if (!DsaPointerIsValid(buckets->segments[segment]))
			dlock_buckets_add_segment(buckets, lock, segment);
		LWLockAcquire(lock, LW_EXCLUSIVE);
		for (int i = 0; i < DIVIDED_AT_ONCE && buckets->num_buckets < wanted; i++)
			dlock_buckets_divide(buckets, next_of);
		LWLockRelease(lock);
	}
}
