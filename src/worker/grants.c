/*-------------------------------------------------------------------------
 *
 * grants.c
 *	  Grants that are to be announced as soon as they are durable.
 *
 * This is the worker's own memory.  Each is in it once, by the level of
 * durability that its enqueuer wants, and by its position in the WAL.
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

#define POLL_MS		10			/* standbys owe an answer */

/* The moment when nothing is due */
#define NEVER		DLOCK_NO_DEADLINE

/* A grant to be announced as soon as it is durable */
typedef struct Grant
{
	dsa_pointer key;			/* the ticket; hash key, must be first */
	DlockLeaseTicket *ticket;	/* referred to */
	int			durability;		/* the level, and so the heap, that it is in */
	XLogRecPtr	lsn;
	uint64		turn;			/* among those of one position */
	pairingheap_node node;
} Grant;

/* each once, and by durability and position */
static HTAB *grants = NULL;
static pairingheap *grants_by_lsn[SYNCHRONOUS_COMMIT_REMOTE_APPLY + 1];

static int
compare_grants(const pairingheap_node *a, const pairingheap_node *b, void *arg)
{
	const Grant *grant_a = pairingheap_const_container(Grant, node, a);
	const Grant *grant_b = pairingheap_const_container(Grant, node, b);

	/* the first is the one that compares as the greatest */
	if (grant_a->lsn != grant_b->lsn)
		return grant_a->lsn < grant_b->lsn ? 1 : -1;
	return grant_a->turn < grant_b->turn ? 1 :
		grant_a->turn > grant_b->turn ? -1 : 0;
}

/* Before anything else */
void
dlock_grants_begin(void)
{
	for (int level = 0; level < (int) lengthof(grants_by_lsn); level++)
		grants_by_lsn[level] = pairingheap_allocate(compare_grants, NULL);
	grants = dlock_due_make_table("dlock grants", sizeof(Grant));
}

/* One that is remembered already may be wanted at another level by now. */
void
dlock_grants_remember(DlockLeaseTicket *ticket, XLogRecPtr lsn)
{
	static uint64 turn = 0;
	Grant	   *grant;
	bool		found;

	if (ticket->announced || !DsaPointerIsValid(ticket->ticket.announcement) ||
		pg_atomic_read_u32(&ticket->ticket.state) != DLOCK_GRANTED)
		return;
	grant = hash_search(grants, &ticket->ticket.self, HASH_ENTER, &found);
	if (found)
		pairingheap_remove(grants_by_lsn[grant->durability], &grant->node);
	else
		dlock_record_ref(&ticket->record);
	grant->ticket = ticket;
	grant->durability = ticket->announce_at;
	grant->lsn = lsn;
	grant->turn = ++turn;
	pairingheap_add(grants_by_lsn[grant->durability], &grant->node);
}

/* Let a grant be announced, and forget it. */
static void
announce(Grant *grant)
{
	DlockLeaseTicket *ticket = grant->ticket;

	dlock_lease_ticket_announce(ticket);
	pairingheap_remove(grants_by_lsn[grant->durability], &grant->node);
	(void) hash_search(grants, &grant->key, HASH_REMOVE, NULL);
	dlock_record_unref(&ticket->record);
}

/*
 * Let those grants be announced that are durable at their enqueuer's level, or
 * as many of them as take so long.  Returns when to come again.
 */
uint64
dlock_grants_announce(uint64 step)
{
	uint64		until = dlock_monotonic_now() + step;

	for (int level = 0; level < (int) lengthof(grants_by_lsn); level++)
	{
		while (!pairingheap_is_empty(grants_by_lsn[level]))
		{
			Grant	   *first = pairingheap_container(Grant, node,
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
	return hash_get_num_entries(grants) == 0 ? NEVER :
		dlock_monotonic_now() + POLL_MS * 1000;
}

bool
dlock_grants_are_left(void)
{
	return hash_get_num_entries(grants) > 0;
}

/* Refer to no ticket any more.  This is the last that is done here. */
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
