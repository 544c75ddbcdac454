/*-------------------------------------------------------------------------
 *
 * watch.c
 *	  When the worker is to look at each lease again.
 *
 * This is the worker's own memory.  A lease can only be due later than it says
 * here, as renewals are not told to the worker.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "lib/ilist.h"
#include "lib/pairingheap.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "shared/shared.h"
#include "worker/watch.h"

/* The moment when nothing is due */
#define NEVER			DLOCK_NO_DEADLINE

/* When a lease is to be looked at again */
typedef struct Watch
{
	dsa_pointer key;			/* the lease; hash key, must be first */
	DlockLease *lease;			/* referred to */
	uint64		due;			/* monotonic microseconds */
	pairingheap_node node;
	bool		attached;		/* in the list of those, by this node */
	dlist_node	attached_node;
} Watch;

static HTAB *watches = NULL;
static pairingheap *watches_by_due = NULL;

/*
 * Those that were attached when they were last looked at, and for which standbys
 * could count.  None becomes attached later.
 */
static dlist_head attached_watches = DLIST_STATIC_INIT(attached_watches);

/* A table by where something is in shared memory */
HTAB *
dlock_watch_make_table(const char *name, Size size)
{
	HASHCTL		info = {
		.keysize = sizeof(dsa_pointer),
		.entrysize = size,
		.hcxt = TopMemoryContext
	};

	return hash_create(name, 256, &info, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
}

static int
compare_due(const pairingheap_node *a, const pairingheap_node *b, void *arg)
{
	uint64		due_a = pairingheap_const_container(Watch, node, a)->due;
	uint64		due_b = pairingheap_const_container(Watch, node, b)->due;

	/* the first is the one that compares as the greatest */
	return due_a < due_b ? 1 : due_a > due_b ? -1 : 0;
}

/* Before anything else */
void
dlock_watch_begin(void)
{
	watches_by_due = pairingheap_allocate(compare_due, NULL);
	watches = dlock_watch_make_table("dlock leases", sizeof(Watch));
}

/* Look at a lease again when it is due, or before. */
void
dlock_watch_add(DlockLease *lease)
{
	uint64		now;
	uint64		due;
	bool		found;
	Watch	   *watch = hash_search(watches, &lease->record.link.self,
									HASH_ENTER, &found);

	if (found)
		return;
	dlock_record_ref(&lease->record);
	watch->lease = lease;
	now = dlock_monotonic_now();
	due = dlock_lease_deadline(lease);
	watch->due = due == DLOCK_NO_DEADLINE ? now + lease->ttl : due;
	pairingheap_add(watches_by_due, &watch->node);
	watch->attached = dlock_lease_is_attached(lease) &&
		lease->durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE;
	if (watch->attached)
		dlist_push_head(&attached_watches, &watch->attached_node);
	dlock_heartbeat_watch(lease);
}

/* A lease is gone. */
void
dlock_watch_remove(DlockLease *lease)
{
	Watch	   *watch = watches == NULL ? NULL :
		hash_search(watches, &lease->record.link.self, HASH_FIND, NULL);

	if (watch == NULL)
		return;
	pairingheap_remove(watches_by_due, &watch->node);
	if (watch->attached)
		dlist_delete(&watch->attached_node);
	dlock_heartbeat_unwatch(lease);
	(void) hash_search(watches, &lease->record.link.self, HASH_REMOVE, NULL);
	dlock_record_unref(&lease->record);
}

/* When the next lease is due */
uint64
dlock_watch_next_due(void)
{
	return pairingheap_is_empty(watches_by_due) ? NEVER :
		pairingheap_container(Watch, node,
							  pairingheap_first(watches_by_due))->due;
}

/* End the leases that are due, or as many of them as take so long. */
void
dlock_watch_expire(uint64 step)
{
	static DlockExpiry expiry;
	uint64		until = dlock_monotonic_now() + step;
	uint64		now;

	while (now = dlock_monotonic_now(),
		   now < until && dlock_watch_next_due() <= now)
	{
		Watch	   *first = pairingheap_container(Watch, node,
												  pairingheap_first(watches_by_due));
		uint64		due = dlock_lease_expire(first->lease, until, &expiry);

		if (expiry.lease != 0)
			dlock_expiry_note(&expiry);
		if (due == 0)
			dlock_watch_remove(first->lease);
		else
		{
			pairingheap_remove(watches_by_due, &first->node);
			first->due = due;
			pairingheap_add(watches_by_due, &first->node);
		}
	}
}

/*
 * Is there a lease that a session keeps alive, and standbys could count for?
 * They may be named at any time, and it counts then that they were not before.
 */
bool
dlock_watch_has_attached(void)
{
	while (!dlist_is_empty(&attached_watches))
	{
		Watch	   *watch = dlist_head_element(Watch, attached_node,
											   &attached_watches);

		if (dlock_lease_is_attached(watch->lease))
			return true;
		watch->attached = false;
		dlist_delete(&watch->attached_node);
	}
	return false;
}

/* Refer to no lease any more.  This is the last that is done here. */
void
dlock_watch_let_go(void)
{
	HASH_SEQ_STATUS status;
	Watch	   *watch;

	if (watches)
	{
		hash_seq_init(&status, watches);
		while ((watch = hash_seq_search(&status)) != NULL)
			dlock_record_unref(&watch->lease->record);
	}
	watches = NULL;
}
