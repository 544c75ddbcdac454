/*-------------------------------------------------------------------------
 *
 * buckets.h
 *	  Buckets of hash tables that grow by one bucket at a time (buckets.c).
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_BUCKETS_H
#define DLOCK_BUCKETS_H

#include "port/pg_bitutils.h"

#include "shared/inner.h"

/* Returns an entry's link to the next one; sets *hash to the entry's hash */
typedef dsa_pointer *(*DlockNextOf) (dsa_pointer entry, uint32 *hash);

/* The segment of a bucket that is not one of the first DLOCK_FIRST_BUCKETS */
static inline int
dlock_segment_of(uint32 bucket)
{
	return pg_leftmost_one_pos32(bucket / DLOCK_FIRST_BUCKETS);
}

static inline dsa_pointer *
dlock_bucket_at(DlockBuckets *buckets, uint32 bucket)
{
	int			s;

	if (likely(bucket < DLOCK_FIRST_BUCKETS))
		return &buckets->first[bucket];
	s = dlock_segment_of(bucket);
	return (dsa_pointer *) dlock_address(buckets->segments[s]) +
		(bucket - (DLOCK_FIRST_BUCKETS << s));
}

static inline dsa_pointer *
dlock_bucket_of(DlockBuckets *buckets, uint32 hash)
{
	uint32		bucket = hash & buckets->mask;

	/* until a bucket is in use, its entries are in the bucket to be divided */
	if (bucket >= buckets->num_buckets)
		bucket &= buckets->mask >> 1;
	return dlock_bucket_at(buckets, bucket);
}

extern void dlock_buckets_init(DlockBuckets *buckets);
extern void dlock_buckets_add_segment(DlockBuckets *buckets, LWLock *lock,
									  int segment);
extern void dlock_buckets_divide(DlockBuckets *buckets, DlockNextOf next_of);
extern void dlock_buckets_insert(DlockBuckets *buckets, dsa_pointer entry,
								 DlockNextOf next_of);
extern void dlock_buckets_delete(DlockBuckets *buckets, dsa_pointer entry,
								 DlockNextOf next_of);
extern void dlock_buckets_reserve(DlockBuckets *buckets, LWLock *lock,
								  uint64 more, DlockNextOf next_of);

/*
 * Prepare an insertion: add the segment that the next division needs, if it is
 * missing.  Raises 53200.  Called without dlock's locks.
 */
static inline void
dlock_buckets_prepare(DlockBuckets *buckets, LWLock *lock)
{
	uint32		next = buckets->num_buckets;
	int			segment;

	if (likely(buckets->count < next || (next & (next - 1)) != 0))
		return;
	segment = dlock_segment_of(next);
	if (segment < DLOCK_SEGMENTS &&
		!DsaPointerIsValid(buckets->segments[segment]))
		dlock_buckets_add_segment(buckets, lock, segment);
}

#endif							/* DLOCK_BUCKETS_H */
