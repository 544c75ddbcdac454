/*-------------------------------------------------------------------------
 *
 * record.c
 *	  Records: what has a row in a table, a lease or a ticket of one.
 *
 * Any backend finds a record, by its number, and uses it.  So no backend frees
 * it: its memory is counted by references, one for being listed, one for each
 * backend that uses it, and a ticket has one on its lease.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"

#include "shared/lease.h"
#include "shared/shared.h"

/*
 * What calls of this transaction use.  A call that fails leaves its uses to the
 * end of the subtransaction that the error ends: one that catches such errors
 * in a loop keeps no more than one call's.  A stack: levels never fall.
 */
typedef struct Use
{
	DlockRecord *record;
	int			level;			/* transaction nesting level */
} Use;

static Use *uses = NULL;
static int	num_uses = 0;
static int	max_uses = 0;

/*
 * References
 */

void
dlock_record_init(DlockRecord *record, dsa_pointer self, bool is_lease)
{
	record->link.self = self;
	record->is_lease = is_lease;
	pg_atomic_init_u64(&record->lsn, 0);
	pg_atomic_init_u64(&record->written, 0);
	pg_atomic_init_u32(&record->references, 0);
	ConditionVariableInit(&record->changed);
}

void
dlock_record_ref(DlockRecord *record)
{
	pg_atomic_fetch_add_u32(&record->references, 1);
}

DlockLeaseTicket *
dlock_record_ticket(DlockRecord *record)
{
	Assert(!record->is_lease);
	return (DlockLeaseTicket *) ((char *) record -
								 offsetof(DlockLeaseTicket, record));
}

/*
 * What a record says of itself, copied to where there is room for it; NULL:
 * nothing.
 */
const char *
dlock_record_copy_info(DlockRecord *record, char *buffer)
{
	DlockLease *lease = record->is_lease ? (DlockLease *) record :
		dlock_lease_of(dlock_record_ticket(record));
	DlockSpace *space = dlock_space_at(lease->space);
	dsa_pointer info;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	info = record->is_lease ? lease->info :
		dlock_record_ticket(record)->ticket.info;
	if (DsaPointerIsValid(info))
		strlcpy(buffer, dsa_get_address(dlock_area, info), DLOCK_MAX_INFO + 1);
	LWLockRelease(&space->lease_lock);
	return DsaPointerIsValid(info) ? buffer : NULL;
}

/*
 * A ticket's memory goes: no request finds it any more, see lease_ticket.c.
 * Raises nothing.
 */
static void
forget_request(DlockLeaseTicket *ticket)
{
	DlockIdKey	key = dlock_request_key(ticket);
	DlockIdEntry *entry;
	dsa_pointer *link;
	Oid			role;

	if (!ticket->in_requests)
		return;
	entry = dshash_find(dlock_ids, &key, true);
	link = &entry->ticket;
	while (*link != ticket->ticket.link.self)
		link = &((DlockLeaseTicket *) dsa_get_address(dlock_area, *link))->next_same;
	*link = ticket->next_same;
	ticket->in_requests = false;
	if (DsaPointerIsValid(entry->ticket))
	{
		dshash_release_lock(dlock_ids, entry);
		return;
	}
	role = entry->role;
	dshash_delete_entry(dlock_ids, entry);
	dlock_count_memory(role, -(int64) sizeof(DlockIdEntry));
}

/* Drop a reference; the last one frees.  Raises nothing. */
void
dlock_record_unref(DlockRecord *record)
{
	if (pg_atomic_sub_fetch_u32(&record->references, 1) > 0)
		return;
	if (record->is_lease)
	{
		DlockLease *lease = (DlockLease *) record;

		Assert(lease->tickets.length == 0 && !lease->in_leases &&
			   !record->listed);
		dlock_text_free(lease->role, lease->info);
		dlock_release_memory(lease->role, record->link.self,
							 sizeof(DlockLease));
	}
	else
	{
		DlockLeaseTicket *ticket = dlock_record_ticket(record);
		DlockLease *lease = dlock_lease_of(ticket);

		Assert(!ticket->in_tickets && !ticket->in_closed && !record->listed);
		forget_request(ticket);
		dlock_text_free(ticket->ticket.role, ticket->owner);
		dlock_ticket_release_texts(&ticket->ticket);
		dlock_release_memory(ticket->ticket.role, ticket->ticket.link.self,
							 dlock_lease_ticket_size(&ticket->key));
		dlock_record_unref(&lease->record);
	}
}

static void
unuse_all(void)
{
	dlock_record_end_uses(0);
}

static void
at_transaction_end(XactEvent event, void *arg)
{
	if (num_uses == 0)
		return;
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_PREPARE)
		dlock_finish_commit(unuse_all);
	else if (event == XACT_EVENT_ABORT)
		unuse_all();
}

/*
 * What is used in a subtransaction becomes its parent's when it commits, and is
 * let go of when it is rolled back.
 */
static void
at_subtransaction_end(SubXactEvent event, SubTransactionId mySubid,
					  SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();
	int			before = num_uses;

	while (before > 0 && uses[before - 1].level >= level)
		before--;
	if (event == SUBXACT_EVENT_ABORT_SUB)
		dlock_record_end_uses(before);
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		for (int i = before; i < num_uses; i++)
			uses[i].level = level - 1;
	}
}

/*
 * Make sure that a call can use a few records more, and return how many are
 * in use, to be given to dlock_record_end_uses() at the end of the call.
 */
int
dlock_record_begin_uses(void)
{
	const int	more = 8;

	if (uses == NULL)
	{
		uses = MemoryContextAlloc(TopMemoryContext, 32 * sizeof(*uses));
		max_uses = 32;
		RegisterXactCallback(at_transaction_end, NULL);
		RegisterSubXactCallback(at_subtransaction_end, NULL);
	}
	else if (num_uses + more > max_uses)
	{
		uses = repalloc_huge(uses, (Size) max_uses * 2 * sizeof(*uses));
		max_uses *= 2;
	}
	return num_uses;
}

/*
 * Keep a record's memory until the call's end; after an error, until that of
 * the (sub)transaction.  Allocates nothing, so that this works under a lock.
 */
void
dlock_record_use(DlockRecord *record)
{
	Assert(num_uses < max_uses);
	dlock_record_ref(record);
	uses[num_uses++] = (Use)
	{
		.record = record,
		.level = GetCurrentTransactionNestLevel()
	};
}

void
dlock_record_end_uses(int before)
{
	while (num_uses > before)
		dlock_record_unref(uses[--num_uses].record);
}

/*
 * Numbers
 */

static DlockIdKey
id_key(const DlockSpace *space, int64 number)
{
	return (DlockIdKey)
	{
		.space = space->key,
		.number = number
	};
}

/* Let a lease, or a ticket, or both, be found by a number.  Raises 53200. */
void
dlock_id_insert(DlockSpace *space, int64 number, DlockLease *lease,
				DlockLeaseTicket *ticket)
{
	DlockIdKey	key = id_key(space, number);
	DlockIdEntry *entry;
	bool		found;

	entry = dlock_table_insert(dlock_ids, &key, &found);
	entry->lease = lease ? lease->record.link.self : InvalidDsaPointer;
	entry->ticket = ticket ? ticket->ticket.link.self : InvalidDsaPointer;
	dshash_release_lock(dlock_ids, entry);
}

void
dlock_id_delete(DlockSpace *space, int64 number)
{
	DlockIdKey	key = id_key(space, number);

	(void) dshash_delete_key(dlock_ids, &key);
}

/*
 * Find what a number stands for, and use it.  Either can be NULL afterwards.
 */
void
dlock_id_find(DlockSpace *space, int64 number, DlockLease **lease,
			  DlockLeaseTicket **ticket)
{
	DlockIdKey	key = id_key(space, number);
	DlockIdEntry *entry;

	*lease = NULL;
	*ticket = NULL;
	entry = dshash_find(dlock_ids, &key, false);
	if (entry == NULL)
		return;
	if (DsaPointerIsValid(entry->lease))
	{
		*lease = dsa_get_address(dlock_area, entry->lease);
		dlock_record_use(&(*lease)->record);
	}
	if (DsaPointerIsValid(entry->ticket))
	{
		*ticket = dsa_get_address(dlock_area, entry->ticket);
		dlock_record_use(&(*ticket)->record);
	}
	dshash_release_lock(dlock_ids, entry);
}
