/*-------------------------------------------------------------------------
 *
 * record.c
 *	  Records: leases and leases' tickets, which can have rows.
 *
 * Any backend can find a record by number, so references are counted.  Each
 * use by a backend is one.  A ticket's lock has one to the ticket.  A lease's
 * tickets, and the lists "leases" and "retimed", each have one to the lease.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"

#include "shared/lease.h"

/*
 * The records that this backend uses: a stack, in which levels never fall.
 * The uses of a failed call end with its (sub)transaction.
 */
typedef struct Use
{
	DlockRecord *record;
	int			level;			/* transaction nesting level */
} Use;

static Use *uses = NULL;
static int	num_uses = 0;
static int	max_uses = 0;

/* Initialize a record.  A single lease has only the record's first fields. */
void
dlock_record_init(DlockRecord *record, bool is_lease, bool is_single)
{
	record->is_lease = is_lease;
	pg_atomic_init_u32(&record->references, 0);
	if (is_single)
		return;
	pg_atomic_init_u64(&record->lsn, 0);
	pg_atomic_init_u32(&record->written, 0);
	ConditionVariableInit(&record->changed);
}

/* Copy a record's info; returns "buffer", or NULL if there is no info. */
const char *
dlock_record_copy_info(DlockRecord *record, char *buffer)
{
	DlockSpace *space = dlock_space_at(dlock_record_lease_of(record)->space);
	dsa_pointer info;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	info = record->is_lease ? dlock_record_lease(record)->info :
		dlock_record_ticket(record)->ticket.info;
	if (DsaPointerIsValid(info))
		strlcpy(buffer, dlock_address(info), DLOCK_MAX_INFO + 1);
	LWLockRelease(&space->lease_lock);
	return DsaPointerIsValid(info) ? buffer : NULL;
}

/* Free a lease that has no references and is in no table (I7). */
static void
free_lease(DlockLease *lease)
{
	Assert(lease->tickets.length == 0 && !lease->in_leases &&
		   !lease->record.listed && !lease->record.in_ids);
	if (!lease->single)
		dlock_text_free(lease->role, lease->info);
	if (DsaPointerIsValid(lease->retiming))
		dlock_release_memory(lease->role, dlock_lease_retiming(lease),
							 sizeof(DlockRetiming));
	dlock_release_memory(lease->role, lease, lease->role_name +
						 strlen(dlock_lease_role_name(lease)) + 1);
}

/* Free a ticket without references (I7); drop its reference to its lease. */
static void
free_ticket(DlockLeaseTicket *ticket)
{
	DlockLease *lease = dlock_lease_of(ticket);

	Assert(!ticket->in_tickets && !ticket->in_closed &&
		   !ticket->record.listed && !ticket->record.in_ids);
	dlock_request_delete(ticket);
	dlock_text_free(ticket->ticket.role, ticket->owner);
	dlock_ticket_release_texts(&ticket->ticket);
	/* a ticket that is stored behind its single lease is freed with it */
	if ((char *) ticket != (char *) lease + DLOCK_SINGLE_LEASE_SIZE)
		dlock_release_memory(ticket->ticket.role, ticket,
							 dlock_lease_ticket_size(&ticket->key));
	dlock_record_unref(&lease->record);
}

/* Drop a reference, and free the record if no reference is left. */
void
dlock_record_unref(DlockRecord *record)
{
	if (pg_atomic_sub_fetch_u32(&record->references, 1) > 0)
		return;
	if (record->is_lease)
		free_lease(dlock_record_lease(record));
	else
		free_ticket(dlock_record_ticket(record));
}

static void
at_transaction_end(XactEvent event, void *arg)
{
	if (num_uses == 0)
		return;
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_PREPARE ||
		event == XACT_EVENT_ABORT)
		dlock_record_end_uses(0);
}

/* When a subtransaction commits, its uses become its parent's. */
static void
at_subtransaction_end(SubXactEvent event, SubTransactionId mySubid,
					  SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		while (num_uses > 0 && uses[num_uses - 1].level >= level)
			dlock_record_end_uses(num_uses - 1);
	}
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		for (int i = num_uses - 1; i >= 0 && uses[i].level >= level; i--)
			uses[i].level = level - 1;
	}
}

/* Make room for uses.  The result is for dlock_record_end_uses(). */
int
dlock_record_begin_uses(void)
{
	const int	more = 8;

	if (uses == NULL)
	{
		RegisterXactCallback(at_transaction_end, NULL);
		RegisterSubXactCallback(at_subtransaction_end, NULL);
		uses = MemoryContextAlloc(TopMemoryContext, 32 * sizeof(*uses));
		max_uses = 32;
	}
	else if (num_uses + more > max_uses)
	{
		uses = repalloc_huge(uses, (Size) max_uses * 2 * sizeof(*uses));
		max_uses *= 2;
	}
	return num_uses;
}

/*
 * Use a record until the end of the call or, after an error, the end of the
 * (sub)transaction.  Allocates nothing.
 */
void
dlock_record_use(DlockRecord *record)
{
	dlock_record_ref(record);
	dlock_record_use_found(record);
}

/* Like dlock_record_use(), but take over a reference that the caller has. */
void
dlock_record_use_found(DlockRecord *record)
{
	Assert(num_uses < max_uses);
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

/* Set *lease and *ticket to those with this number, or NULL, and use them. */
void
dlock_id_find(DlockSpace *space, int64 number, DlockLease **lease,
			  DlockLeaseTicket **ticket)
{
	DlockRecord *record = dlock_id_look_up(space, number);

	*lease = NULL;
	*ticket = NULL;
	if (record == NULL)
		return;
	dlock_record_use_found(record);
	if (record->is_lease)
	{
		*lease = dlock_record_lease(record);
		return;
	}
	*ticket = dlock_record_ticket(record);
	if (!dlock_lease_of(*ticket)->single)
		return;
	*lease = dlock_lease_of(*ticket);
	dlock_record_use(&(*lease)->record);
}
