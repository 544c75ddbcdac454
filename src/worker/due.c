/*-------------------------------------------------------------------------
 *
 * due.c
 *	  When the worker is to look at each lease again.
 *
 * This is the worker's own memory.  A lease can only be due later than it says
 * here, as renewals are not told to the worker; but for those that have got
 * another ttl, of which it is told (dlock_due_update()).
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
#include "worker/due.h"

/* The moment when nothing is due */
#define NEVER			DLOCK_NO_DEADLINE

/* When a lease is to be looked at again */
typedef struct Look
{
	dsa_pointer key;			/* the lease; hash key, must be first */
	DlockLease *lease;			/* referred to */
	uint64		due;			/* monotonic microseconds */
	int			class;			/* of its heartbeats */
	pairingheap_node node;
	bool		attached;		/* in the list of those, by this node */
	dlist_node	attached_node;
} Look;

static HTAB *looks = NULL;
static pairingheap *looks_by_due = NULL;

/*
 * Those that were attached when they were last looked at, and for which standbys
 * could count.  None becomes attached later.
 */
static dlist_head attached_looks = DLIST_STATIC_INIT(attached_looks);

/* A table by where something is in shared memory */
HTAB *
dlock_due_make_table(const char *name, Size size)
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
	uint64		due_a = pairingheap_const_container(Look, node, a)->due;
	uint64		due_b = pairingheap_const_container(Look, node, b)->due;

	/* the first is the one that compares as the greatest */
	return due_a < due_b ? 1 : due_a > due_b ? -1 : 0;
}

/* Before anything else */
void
dlock_due_begin(void)
{
	looks_by_due = pairingheap_allocate(compare_due, NULL);
	looks = dlock_due_make_table("dlock leases", sizeof(Look));
}

/* When to look at a lease */
static uint64
due_of(DlockLease *lease)
{
	uint64		due = dlock_lease_deadline(lease);

	return due == DLOCK_NO_DEADLINE ?
		dlock_monotonic_now() + dlock_lease_ttl(lease) : due;
}

/* A lease may be due earlier than it was. */
static void
look_anew(Look *look)
{
	pairingheap_remove(looks_by_due, &look->node);
	look->due = due_of(look->lease);
	pairingheap_add(looks_by_due, &look->node);
}

/* What there is to do for a lease, as its ttl and durability are now */
static void
classify(Look *look)
{
	look->class = dlock_heartbeat_add(look->lease);
	if (!look->attached && dlock_lease_is_attached(look->lease) &&
		dlock_lease_durability(look->lease) >= SYNCHRONOUS_COMMIT_REMOTE_WRITE)
	{
		look->attached = true;
		dlist_push_head(&attached_looks, &look->attached_node);
	}
}

/* Look at a lease again when it is due, or before. */
void
dlock_due_add(DlockLease *lease)
{
	bool		found;
	Look	   *look = hash_search(looks, &lease->self, HASH_ENTER,
							   &found);

	if (found)
	{
		/* one that is over may have been left so before it was due */
		if (pg_atomic_read_u64(&lease->deadline) == 0)
			look_anew(look);
		return;
	}
	dlock_record_ref(&lease->record);
	look->lease = lease;
	look->due = due_of(lease);
	pairingheap_add(looks_by_due, &look->node);
	look->attached = false;
	classify(look);
}

/* At most so many are looked at anew in one step */
#define UPDATES	256

/*
 * Look at those anew that have got another ttl, or a higher durability.  Returns
 * whether some may be left.
 */
bool
dlock_due_update(DlockSpace *space)
{
	DlockLease *lease;
	int			count = 0;

	while (count < UPDATES && (lease = dlock_lease_next_retimed(space)) != NULL)
	{
		Look	   *look = hash_search(looks, &lease->self,
										HASH_FIND, NULL);

		/* one that is not looked at yet will be, once its row is written */
		if (look)
		{
			look_anew(look);
			dlock_heartbeat_remove(look->class);
			classify(look);
		}
		dlock_record_unref(&lease->record);
		count++;
	}
	return count == UPDATES;
}

/* A lease is gone. */
void
dlock_due_remove(DlockLease *lease)
{
	Look	   *look = looks == NULL ? NULL :
		hash_search(looks, &lease->self, HASH_FIND, NULL);

	if (look == NULL)
		return;
	pairingheap_remove(looks_by_due, &look->node);
	if (look->attached)
		dlist_delete(&look->attached_node);
	dlock_heartbeat_remove(look->class);
	(void) hash_search(looks, &lease->self, HASH_REMOVE, NULL);
	dlock_record_unref(&lease->record);
}

/* When the next lease is due */
uint64
dlock_due_next(void)
{
	return pairingheap_is_empty(looks_by_due) ? NEVER :
		pairingheap_container(Look, node,
							  pairingheap_first(looks_by_due))->due;
}

/* End the leases that are due, or as many of them as take so long. */
void
dlock_due_expire(uint64 step)
{
	static DlockExpiry expiry;
	uint64		until = dlock_monotonic_now() + step;
	uint64		now;

	while (now = dlock_monotonic_now(),
		   now < until && dlock_due_next() <= now)
	{
		Look	   *first = pairingheap_container(Look, node,
											  pairingheap_first(looks_by_due));
		uint64		due = dlock_lease_expire(first->lease, until, &expiry);

		if (expiry.lease != 0)
			dlock_expiry_note(&expiry);
		if (due == 0)
			dlock_due_remove(first->lease);
		else
		{
			pairingheap_remove(looks_by_due, &first->node);
			first->due = due;
			pairingheap_add(looks_by_due, &first->node);
		}
	}
}

/*
 * Is there a lease that a session keeps alive, and standbys could count for?
 * They may be named at any time, and it counts then that they were not before.
 */
bool
dlock_due_has_attached(void)
{
	while (!dlist_is_empty(&attached_looks))
	{
		Look	   *look = dlist_head_element(Look, attached_node,
										  &attached_looks);

		if (dlock_lease_is_attached(look->lease))
			return true;
		look->attached = false;
		dlist_delete(&look->attached_node);
	}
	return false;
}

/* Refer to no lease any more.  This is the last that is done here. */
void
dlock_due_let_go(void)
{
	HASH_SEQ_STATUS status;
	Look	   *look;

	if (looks)
	{
		hash_seq_init(&status, looks);
		while ((look = hash_seq_search(&status)) != NULL)
			dlock_record_unref(&look->lease->record);
	}
	looks = NULL;
}
