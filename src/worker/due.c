/*-------------------------------------------------------------------------
 *
 * due.c
 *	  The worker's private list of when it must look at each lease again.
 *
 * A lease can be due later than noted here, because a renewal does not notify
 * the worker.  A changed ttl or durability does (dlock_due_update()).
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

typedef struct Look
{
	DlockLease *lease;			/* with a reference; hash key, must be first */
	uint64		due;			/* monotonic microseconds */
	int			class;			/* from dlock_heartbeat_add() */
	pairingheap_node node;
	bool		attached;		/* is this in attached_looks? */
	dlist_node	attached_node;
} Look;

static HTAB *looks = NULL;
static pairingheap *looks_by_due = NULL;

/* Attached leases that may need heartbeats.  A detached one stays detached. */
static dlist_head attached_looks = DLIST_STATIC_INIT(attached_looks);

/* Make a hash table whose keys are addresses. */
HTAB *
dlock_due_make_table(const char *name, Size size)
{
	HASHCTL		info = {
		.keysize = sizeof(void *),
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

	/* a pairing heap has the greatest element first */
	return due_a < due_b ? 1 : due_a > due_b ? -1 : 0;
}

void
dlock_due_begin(void)
{
	looks_by_due = pairingheap_allocate(compare_due, NULL);
	looks = dlock_due_make_table("dlock leases", sizeof(Look));
}

static uint64
due_of(DlockLease *lease)
{
	uint64		due = dlock_lease_deadline(lease);

	return due == DLOCK_NO_DEADLINE ?
		dlock_monotonic_now() + dlock_lease_ttl(lease) : due;
}

static void
look_at(Look *look, uint64 due)
{
	pairingheap_remove(looks_by_due, &look->node);
	look->due = due;
	pairingheap_add(looks_by_due, &look->node);
}

/* Count a lease for heartbeats, and list it if it is attached. */
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

/* Add a lease.  The worker will look at it when it is due. */
void
dlock_due_add(DlockLease *lease)
{
	bool		found;
	Look	   *look = hash_search(looks, &lease, HASH_ENTER,
							   &found);

	if (found)
		return;
	dlock_record_ref(&lease->record);
	look->due = due_of(lease);
	pairingheap_add(looks_by_due, &look->node);
	look->attached = false;
	classify(look);
}

/* Maximum number of leases to update in one step */
#define UPDATES	256

/* Update up to UPDATES changed leases.  Returns true if more may be left. */
bool
dlock_due_update(DlockSpace *space)
{
	DlockLease *lease;
	int			count = 0;

	while (count < UPDATES && (lease = dlock_lease_next_retimed(space)) != NULL)
	{
		Look	   *look = hash_search(looks, &lease,
										HASH_FIND, NULL);

		/* an unknown lease is added once its row is written */
		if (look)
		{
			look_at(look, due_of(lease));
			dlock_heartbeat_remove(look->class);
			classify(look);
		}
		dlock_record_unref(&lease->record);
		count++;
	}
	return count == UPDATES;
}

void
dlock_due_remove(DlockLease *lease)
{
	Look	   *look = looks == NULL ? NULL :
		hash_search(looks, &lease, HASH_FIND, NULL);

	if (look == NULL)
		return;
	pairingheap_remove(looks_by_due, &look->node);
	if (look->attached)
		dlist_delete(&look->attached_node);
	dlock_heartbeat_remove(look->class);
	(void) hash_search(looks, &lease, HASH_REMOVE, NULL);
	dlock_record_unref(&lease->record);
}

uint64
dlock_due_next(void)
{
	return pairingheap_is_empty(looks_by_due) ? DLOCK_NO_DEADLINE :
		pairingheap_container(Look, node,
							  pairingheap_first(looks_by_due))->due;
}

/* Spend at most "step" microseconds on ending leases that are due. */
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
			look_at(first, due);
	}
}

/*
 * Is there an attached lease that may need heartbeats?  It needs a worker even
 * if no standbys are named: dlock_heartbeat_beat() then notes answers for it.
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

/* Drop all references.  No function of due.c may be called after this. */
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
