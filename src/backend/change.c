/*-------------------------------------------------------------------------
 *
 * change.c
 *	  Changing existing tickets and leases.
 *
 * A call changes a record (a lease or a lease's ticket) in shared memory, and
 * returns once its row is durable.  If the write fails, the call restores the
 * old info or keeps the shorter ttl, but a mode stays changed.  Only one call
 * at a time changes a record (I19).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "storage/condition_variable.h"
#include "storage/ipc.h"

#include "backend/held.h"
#include "tables/tables.h"

typedef struct Change
{
	DlockSpace *space;
	DlockRecord *record;		/* the ticket's or lease's; NULL if gone */
	DlockLeaseTicket *ticket;
	DlockLease *lease;
	Oid			role;			/* the record's memory counts for this role */
	LOCKTAG		tag;			/* of the heavyweight lock on the number */
	int			uses_before;
	dsa_pointer info;			/* new info; after the exchange, old info */
	DlockLease *retimed;		/* the lease that gets another ttl */
} Change;

/*
 * Wait until no other call changes the record with this number, and find the
 * record.  Numbers with the same 48 low bits share the heavyweight lock.
 */
static void
begin_change(Change *change, int64 number)
{
	memset(change, 0, sizeof(Change));
	change->space = dlock_loaded_space();
	SET_LOCKTAG_OBJECT(change->tag, MyDatabaseId,
					   dlock_relation(change->space, "dlock_queue_lease"),
					   (uint32) number, (uint16) (number >> 32));
	(void) LockAcquire(&change->tag, ExclusiveLock, false, false);
	change->uses_before = dlock_record_begin_uses();
	change->ticket = dlock_lease_ticket_find(change->space, number);
	change->lease = change->ticket ? NULL :
		dlock_lease_find(change->space, number);
	if (change->lease && change->lease->single)
	{
		/* the lease's ticket was entered after the first search */
		change->lease = NULL;
		change->ticket = dlock_lease_ticket_find(change->space, number);
	}
	if (change->ticket)
	{
		change->record = &change->ticket->record;
		change->role = change->ticket->ticket.role;
	}
	else if (change->lease)
	{
		change->record = &change->lease->record;
		change->role = change->lease->role;
	}
}

static void
finish_change(Change *change)
{
	dlock_record_end_uses(change->uses_before);
	(void) LockRelease(&change->tag, ExclusiveLock, false);
}

/* Is the record alive?  For a ticket, raises 55L01 after DROP EXTENSION. */
static bool
is_there(const Change *change)
{
	if (change->ticket == NULL)
		return dlock_lease_is_open(change->lease);
	dlock_wait_check_space(change->space, &change->ticket->key);
	return !dlock_state_has_ended(dlock_state_of(&change->ticket->ticket)) &&
		dlock_lease_ticket_is_live(change->ticket);
}

static bool
exchange_info(Change *change)
{
	return change->ticket ?
		dlock_queue_exchange_info(&change->ticket->key, &change->ticket->ticket,
								  &change->info) :
		dlock_lease_exchange_info(change->lease, &change->info);
}

/* Undo a change of info at an error or exit before the change is durable. */
static void
undo_info(int code, Datum arg)
{
	Change	   *change = (Change *) DatumGetPointer(arg);

	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	(void) exchange_info(change);
	dlock_text_free(change->role, change->info);
	(void) dlock_worker_wake(change->space);
}

static bool
change_info_of_lease(int64 number, const char *info)
{
	Change		change;
	bool		changed = false;

	begin_change(&change, number);
	if (change.record)
	{
		if (info)
			dlock_request_check_memory(change.space, change.role);
		change.info = dlock_text_copy(change.role, info);
		changed = exchange_info(&change);
		if (changed)
		{
			PG_ENSURE_ERROR_CLEANUP(undo_info, PointerGetDatum(&change));
			dlock_durable_wait_only(change.space, change.record,
									_("The request was undone."));
			changed = is_there(&change);
			PG_END_ENSURE_ERROR_CLEANUP(undo_info, PointerGetDatum(&change));
		}
		dlock_text_free(change.role, change.info);
	}
	finish_change(&change);
	return changed;
}

/* Change an info.  Returns false if the ticket or lease is gone. */
bool
dlock_change_info(DlockSpace *space, int64 number, const char *info)
{
	DlockHeld  *held = dlock_held_find_number(space, number);
	Oid			role;
	dsa_pointer text;
	bool		changed;

	if (held == NULL)
		return change_info_of_lease(number, info);
	role = held->ticket->role;
	if (info)
		dlock_request_check_memory(space, role);
	text = dlock_text_copy(role, info);
	changed = dlock_queue_exchange_info(&held->name->key, held->ticket, &text);
	dlock_text_free(role, text);
	return changed;
}

static void
undo_ttl(int code, Datum arg)
{
	Change	   *change = (Change *) DatumGetPointer(arg);

	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	dlock_lease_undo_ttl(change->retimed, change->record);
}

/*
 * Renew a lease, or the single lease of a ticket, with another ttl.  Returns
 * how many tickets the lease has, or -1 if the lease is gone.
 *
 * If the lease's durability is higher than synchronous_commit, waits for that
 * durability, because a promoted standby takes the ttl from the row.
 */
int
dlock_change_ttl(int64 number, int64 ttl)
{
	uint64		start = dlock_monotonic_now();
	int			result = -1;
	Change		change;
	DlockLease *lease;

	begin_change(&change, number);
	lease = change.retimed =
		change.ticket ? dlock_lease_of(change.ticket) : change.lease;
	/* the number of a ticket renews only a single lease */
	if (lease && !change.lease && !lease->single)
		lease = NULL;
	/* only the first change of a lease's ttl allocates memory */
	if (lease && !DsaPointerIsValid(lease->retiming))
		dlock_request_check_memory(change.space, lease->role);
	if (lease &&
		dlock_lease_confirm(change.space, lease,
							Min(ttl, dlock_lease_ttl(lease)), start) &&
		dlock_lease_begin_ttl(lease, change.record, ttl))
	{
		PG_ENSURE_ERROR_CLEANUP(undo_ttl, PointerGetDatum(&change));
		dlock_durable_wait_at(change.space, change.record,
							  dlock_lease_durability(lease),
							  _("The lease keeps the shorter of the two ttls."));
		PG_END_ENSURE_ERROR_CLEANUP(undo_ttl, PointerGetDatum(&change));
		result = dlock_lease_finish_ttl(lease, start);
	}
	finish_change(&change);
	return result;
}

static void
raise_slots(const DlockKey *key, int64 number)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("cannot downgrade a hold of lock \"%.*s\", which has slots",
					key->length, key->name),
			 errdetail("Ticket %lld takes permits, and others can hold the lock beside it already.",
					   (long long) number),
			 errhint("Only an exclusive hold can become a shared one.")));
}

/* Downgrade an exclusive hold of this session to a shared one. */
static bool
downgrade_held(DlockHeld *held)
{
	DlockTicket *ticket = held->ticket;
	bool		was_exclusive = ticket->mode == DLOCK_EXCLUSIVE;
	bool		holds;

	if (ticket->mode == DLOCK_SLOTS && !dlock_held_is_gone(held))
		raise_slots(&held->name->key, held->number);
	holds = dlock_queue_downgrade(&held->name->key, ticket);
	if (was_exclusive && ticket->mode == DLOCK_SHARED)
		dlock_held_count_shared(held);
	/* if the ticket was enqueued, its grant can be unconfirmed */
	if (holds)
		dlock_journal_flush_removal(dlock_space_at(ticket->space),
									&held->name->key);
	return holds;
}

/*
 * Downgrade an exclusive hold of a lease to a shared one.  Waiters are granted
 * once the row with the new mode is in the WAL, even if this call fails.
 */
static bool
downgrade_of_lease(int64 number)
{
	Change		change;
	bool		holds = false;

	begin_change(&change, number);
	if (change.ticket)
	{
		if (change.ticket->ticket.mode == DLOCK_SLOTS)
			raise_slots(&change.ticket->key, number);
		holds = dlock_queue_downgrade(&change.ticket->key,
									  &change.ticket->ticket);
	}
	if (holds)
	{
		dlock_durable_wait_only(change.space, change.record,
								_("The hold becomes shared all the same."));
		/* the worker does this, too, but maybe later */
		dlock_queue_share(change.ticket);
		holds = is_there(&change);
	}
	finish_change(&change);
	return holds;
}

/* Downgrade an exclusive hold to shared.  Returns false if it is gone. */
bool
dlock_change_mode(DlockSpace *space, int64 number)
{
	DlockHeld  *held = dlock_held_find_number(space, number);

	return held ? downgrade_held(held) : downgrade_of_lease(number);
}
