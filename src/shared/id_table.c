/*-------------------------------------------------------------------------
 *
 * id_table.c
 *	  The tables of numbers and of requests.
 *
 * An entry of the table of numbers is a DlockRecord itself.  An entry of the
 * table of requests is a DlockLeaseTicket.  Both tables use buckets.c.
 *
 * A single lease is found by its ticket's number.  Requests are hashed and
 * compared in lease_ticket.c.  Before a search releases the partition's lock,
 * it takes a reference to the entry that it found (I7).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "port/pg_bitutils.h"

#include "shared/buckets.h"
#include "shared/lease.h"

/* The memory must be zero, and unknown to other processes. */
void
dlock_id_table_init(DlockIdPartition *partitions, int tranche)
{
	for (int i = 0; i < DLOCK_ID_PARTITIONS; i++)
	{
		LWLockInitialize(&partitions[i].lock, tranche);
		dlock_buckets_init(&partitions[i].buckets);
	}
}

/* The partition of a hash; the last bits of the hash choose the bucket */
static inline DlockIdPartition *
partition_of(DlockIdPartition *table, uint32 hash)
{
	return &table[hash >> (32 - DLOCK_ID_PARTITION_BITS)];
}

/*
 * Consecutive numbers have different partitions and neighbouring buckets, so
 * insertions and deletions in order hit the cache.  Higher bits are hashed in,
 * because otherwise numbers at regular distances would share a few partitions.
 */
static inline uint32
hash_number(int64 number)
{
	uint64		hash = (uint64) number;

	hash ^= hash >> 9;
	hash ^= hash >> 18;
	hash ^= hash >> 36;
	return pg_rotate_right32((uint32) hash, DLOCK_ID_PARTITION_BITS);
}

static int64
number_of(DlockRecord *record)
{
	return record->is_lease ? dlock_record_lease(record)->number :
		dlock_record_ticket(record)->ticket.number;
}

static dsa_pointer *
next_number(dsa_pointer entry, uint32 *hash)
{
	DlockRecord *record = dlock_address(entry);

	*hash = hash_number(number_of(record));
	return &record->next_id;
}

/* Add buckets for "more" numbers, to be inserted later.  Raises 53200. */
void
dlock_ids_reserve(uint64 more)
{
	for (int p = 0; p < DLOCK_ID_PARTITIONS; p++)
		dlock_buckets_reserve(&dlock_control->ids[p].buckets,
							  &dlock_control->ids[p].lock,
							  more / DLOCK_ID_PARTITIONS, next_number);
}

/*
 * Insert a record, unless it is finished.  A record that ends is finished and
 * then deleted from the table, so it is never inserted again.  Raises 53200.
 */
void
dlock_id_insert(DlockRecord *record)
{
	DlockIdPartition *partition = partition_of(dlock_control->ids,
											   hash_number(number_of(record)));

	dlock_buckets_prepare(&partition->buckets, &partition->lock);
	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	if (!record->in_ids && !record->finished)
	{
		dlock_buckets_insert(&partition->buckets, dlock_pointer(record),
							 next_number);
		record->in_ids = true;
	}
	LWLockRelease(&partition->lock);
}

/* The record need not be in the table. */
void
dlock_id_delete(DlockRecord *record)
{
	DlockIdPartition *partition = partition_of(dlock_control->ids,
											   hash_number(number_of(record)));

	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	if (record->in_ids)
		dlock_buckets_delete(&partition->buckets, dlock_pointer(record),
							 next_number);
	record->in_ids = false;
	LWLockRelease(&partition->lock);
}

/* The record with this number, with a new reference; or NULL */
DlockRecord *
dlock_id_look_up(DlockSpace *space, int64 number)
{
	uint32		hash = hash_number(number);
	DlockIdPartition *partition = partition_of(dlock_control->ids, hash);
	DlockRecord *found = NULL;
	dsa_pointer next;

	LWLockAcquire(&partition->lock, LW_SHARED);
	next = *dlock_bucket_of(&partition->buckets, hash);
	while (DsaPointerIsValid(next) && found == NULL)
	{
		DlockRecord *record = dlock_address(next);

		next = record->next_id;
		if (number_of(record) == number &&
			dlock_record_lease_of(record)->space == dlock_pointer(space))
			found = record;
	}
	if (found)
		dlock_record_ref(found);
	LWLockRelease(&partition->lock);
	return found;
}

static dsa_pointer *
next_request(dsa_pointer entry, uint32 *hash)
{
	DlockLeaseTicket *ticket = dlock_address(entry);

	*hash = ticket->request;
	return &ticket->next_request;
}

/* Raises 53200, with nothing changed. */
void
dlock_request_insert(DlockLeaseTicket *ticket)
{
	DlockIdPartition *partition = partition_of(dlock_control->requests,
											   ticket->request);

	dlock_buckets_prepare(&partition->buckets, &partition->lock);
	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	dlock_buckets_insert(&partition->buckets, dlock_pointer(ticket),
						 next_request);
	ticket->in_requests = true;
	LWLockRelease(&partition->lock);
}

/* Called when the ticket's memory is freed.  Raises nothing. */
void
dlock_request_delete(DlockLeaseTicket *ticket)
{
	DlockIdPartition *partition = partition_of(dlock_control->requests,
											   ticket->request);

	if (!ticket->in_requests)
		return;
	LWLockAcquire(&partition->lock, LW_EXCLUSIVE);
	dlock_buckets_delete(&partition->buckets, dlock_pointer(ticket),
						 next_request);
	ticket->in_requests = false;
	LWLockRelease(&partition->lock);
}

/*
 * Find a ticket that has the hash of "wanted" and that is_wanted() accepts.
 * Returns it with a new reference, or NULL.  is_wanted() runs under an LWLock.
 */
DlockLeaseTicket *
dlock_request_find(const DlockLeaseTicket *wanted,
				   bool (*is_wanted) (DlockLeaseTicket *ticket,
									  const DlockLeaseTicket *wanted))
{
	DlockIdPartition *partition = partition_of(dlock_control->requests,
											   wanted->request);
	DlockLeaseTicket *found = NULL;
	dsa_pointer next;

	LWLockAcquire(&partition->lock, LW_SHARED);
	next = *dlock_bucket_of(&partition->buckets, wanted->request);
	while (DsaPointerIsValid(next) && found == NULL)
	{
		DlockLeaseTicket *ticket = dlock_address(next);

		next = ticket->next_request;
		if (ticket->request == wanted->request && is_wanted(ticket, wanted))
			found = ticket;
	}
	if (found)
		dlock_record_ref(&found->record);
	LWLockRelease(&partition->lock);
	return found;
}
