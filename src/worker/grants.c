/*-------------------------------------------------------------------------
 *
 * grants.c
 *	  The worker's private list of grants to announce once they are durable.
 *
 * Each grant is here once, under the level that its announcement needed when
 * the grant was remembered.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "lib/pairingheap.h"
#include "utils/hsearch.h"

#include "shared/shared.h"
#include "worker/due.h"

#define POLL_MS		10			/* between checks for standbys' answers */

typedef struct Grant
{
	DlockLeaseTicket *ticket;	/* with a reference; hash key, must be first */
	int			durability;		/* the level, which selects the heap */
	XLogRecPtr	lsn;
	pairingheap_node node;
} Grant;

/* All grants by ticket, and those of each level by position in the WAL */
static HTAB *grants = NULL;
static pairingheap *grants_by_lsn[SYNCHRONOUS_COMMIT_REMOTE_APPLY + 1];

static int
compare_grants(const pairingheap_node *a, const pairingheap_node *b, void *arg)
{
	const Grant *grant_a = pairingheap_const_container(Grant, node, a);
	const Grant *grant_b = pairingheap_const_container(Grant, node, b);

	/* a pairing heap has the greatest element first */
	if (grant_a->lsn != grant_b->lsn)
		return grant_a->lsn < grant_b->lsn ? 1 : -1;
	return grant_a->ticket->ticket.number < grant_b->ticket->ticket.number ?
		1 : -1;
}

void
dlock_grants_begin(void)
{
	for (int level = 0; level < (int) lengthof(grants_by_lsn); level++)
		grants_by_lsn[level] = pairingheap_allocate(compare_grants, NULL);
	grants = dlock_due_make_table("dlock grants", sizeof(Grant));
}

/*
 * Remember a grant, or move a remembered grant to its present level.  A ticket
 * that was granted after its row was copied is remembered when its next row,
 * which says granted, is written.
 */
void
dlock_grants_remember(DlockLeaseTicket *ticket, XLogRecPtr lsn)
{
	Grant	   *grant;
	bool		found;

	if (ticket->announced || !DsaPointerIsValid(ticket->ticket.announcement) ||
		pg_atomic_read_u32(&ticket->ticket.state) != DLOCK_GRANTED ||
		pg_atomic_read_u64(&ticket->granted_lsn) == InvalidXLogRecPtr)
		return;
	grant = hash_search(grants, &ticket, HASH_ENTER, &found);
	if (found)
		pairingheap_remove(grants_by_lsn[grant->durability], &grant->node);
	else
		dlock_record_ref(&ticket->record);
	grant->durability = ticket->announce_at;
	grant->lsn = lsn;
	pairingheap_add(grants_by_lsn[grant->durability], &grant->node);
}

static void
forget(Grant *grant)
{
	DlockLeaseTicket *ticket = grant->ticket;

	pairingheap_remove(grants_by_lsn[grant->durability], &grant->node);
	(void) hash_search(grants, &ticket, HASH_REMOVE, NULL);
	dlock_record_unref(&ticket->record);
}

/* Forget the grant of a ticket that is over, if it is here. */
void
dlock_grants_forget(DlockLeaseTicket *ticket)
{
	Grant	   *grant = hash_search(grants, &ticket, HASH_FIND, NULL);

	if (grant)
		forget(grant);
}

/*
 * Forget a grant.  Announce it first, if the ticket still holds the lock.  If
 * dlock_lease_ticket_redirect() has changed the level, the journal has the
 * ticket again, and the grant will be remembered at the new level.
 */
static void
announce(Grant *grant)
{
	DlockLeaseTicket *ticket = grant->ticket;
	DlockSpace *space = dlock_space_at(ticket->ticket.space);

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	if (ticket->announce_at == grant->durability && !ticket->announced)
	{
		if (dlock_state_of(&ticket->ticket) == DLOCK_GRANTED)
			dlock_announcement_event(&ticket->ticket, DLOCK_EVENT_GRANTED);
		ticket->announced = true;
	}
	LWLockRelease(&space->lease_lock);
	forget(grant);
}

/* Announce for at most "step" us.  Returns the time of the next call. */
uint64
dlock_grants_announce(uint64 step)
{
	uint64		until = dlock_monotonic_now() + step;

	for (int level = 0; level < (int) lengthof(grants_by_lsn); level++)
	{
		while (!pairingheap_is_empty(grants_by_lsn[level]))
		{
			Grant	   *first =
				pairingheap_container(Grant, node,
									  pairingheap_first(grants_by_lsn[level]));

			if (level != SYNCHRONOUS_COMMIT_OFF)
				XLogFlush(first->lsn);
			if (!dlock_quorum_is_acknowledged(first->lsn, level))
				break;
			announce(first);
			if (dlock_monotonic_now() >= until)
				return 0;
		}
	}
	return hash_get_num_entries(grants) == 0 ? DLOCK_NO_DEADLINE :
		dlock_monotonic_now() + POLL_MS * 1000;
}

bool
dlock_grants_are_left(void)
{
	return hash_get_num_entries(grants) > 0;
}

/* Drop all references.  No function of grants.c may be called after this. */
void
dlock_grants_let_go(void)
{
	HASH_SEQ_STATUS status;
	Grant	   *grant;

	if (grants)
	{
		hash_seq_init(&status, grants);
		while ((grant = hash_seq_search(&status)) != NULL)
			dlock_record_unref(&grant->ticket->record);
	}
	grants = NULL;
}
