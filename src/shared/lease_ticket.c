/*-------------------------------------------------------------------------
 *
 * lease_ticket.c
 *	  Tickets of leases.
 *
 * When a ticket is adopted, granted, ended or changed, queue*.c call functions
 * of this file, with the entry's lock held.  These functions raise no error.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"

#include "shared/lease.h"

/*
 * Does the delay of a ticket's lease close the lock, now or soon (I16)?  A
 * delay whose time is over does not, even if the worker has not ended it yet.
 */
bool
dlock_lease_ticket_is_delayed(const DlockLeaseTicket *ticket)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);
	bool		delayed;

	if (lease->single || lease->delay == 0)
		return false;
	/* locked, because the delay can begin between the reads */
	LWLockAcquire(&space->lease_lock, LW_SHARED);
	if (lease->delayed)
		delayed = (ticket->in_closed || ticket->in_tickets) &&
			lease->delay_ends > dlock_monotonic_now();
	else
		delayed = ticket->in_tickets &&
			pg_atomic_read_u64(&lease->deadline) == DLOCK_RAN_OUT;
	LWLockRelease(&space->lease_lock);
	return delayed;
}

static bool
same_text(const char *a, const char *b)
{
	return a == b || (a && b && strcmp(a, b) == 0);
}

/*
 * Unless is_unique() is true, a ticket is in the table of requests until it is
 * freed.  The hash covers the lock, the owner, and the lease or role.  Of all
 * tickets with the same request, at most one waits or holds (I14).
 */

/* Does a ticket wait or hold, and have the same request as "wanted"? */
static bool
is_same(DlockLeaseTicket *ticket, const DlockLeaseTicket *wanted)
{
	DlockLease *lease = dlock_lease_of(ticket);
	const DlockLease *wanted_lease = dlock_lease_of(wanted);

	if (dlock_state_has_ended(dlock_state_of(&ticket->ticket)) ||
		!dlock_key_equal(&ticket->key, &wanted->key) ||
		!same_text(dlock_text_at(ticket->owner), dlock_text_at(wanted->owner)))
		return false;
	if (!wanted_lease->single)
		return ticket->lease == wanted->lease;
	return lease->single && lease->role == wanted_lease->role &&
		strcmp(dlock_lease_role_name(lease),
			   dlock_lease_role_name(wanted_lease)) == 0 &&
		(ticket->ticket.session != 0 || dlock_lease_is_open(lease));
}

/* Without an owner, a request for a single lease is equal to no other. */
static bool
is_unique(const DlockLeaseTicket *ticket)
{
	return dlock_lease_of(ticket)->single && !DsaPointerIsValid(ticket->owner);
}

static uint32
hash_request(const DlockLeaseTicket *ticket)
{
	const DlockLease *lease = dlock_lease_of(ticket);
	uint64		hash = lease->single ? lease->role : ticket->lease;
	const char *owner = dlock_text_at(ticket->owner);

	hash = hash_combine64(hash, ticket->key.hash);
	if (owner)
		hash = hash_bytes_extended((const unsigned char *) owner,
								   strlen(owner), hash);
	return (uint32) murmurhash32((uint32) hash ^ (uint32) (hash >> 32));
}

/*
 * Find the ticket that has the same request as "wanted", and use its record
 * (dlock_record_use()).  Returns NULL if no such ticket waits or holds.
 */
DlockLeaseTicket *
dlock_lease_ticket_find_same(const DlockLeaseTicket *wanted)
{
	DlockLeaseTicket *found = is_unique(wanted) ? NULL :
		dlock_request_find(wanted, is_same);

	if (found)
		dlock_record_use_found(&found->record);
	return found;
}

/* List a ticket in its lease, after the ticket's state was set. */
void
dlock_lease_ticket_list(DlockLease *lease, DlockLeaseTicket *ticket,
						bool closed)
{
	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	dlock_list_append(closed ? &lease->closed : &lease->tickets,
					  &ticket->in_lease);
	ticket->in_closed = closed;
	ticket->in_tickets = !closed;
	if (dlock_state_of(&ticket->ticket) == DLOCK_GRANTED)
		lease->held++;
}

/* Unlist a ticket, if it is listed, before its state changes. */
void
dlock_lease_ticket_unlist(DlockLease *lease, DlockLeaseTicket *ticket)
{
	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	if (ticket->in_tickets)
		dlock_list_remove(&lease->tickets, &ticket->in_lease);
	if (ticket->in_closed)
		dlock_list_remove(&lease->closed, &ticket->in_lease);
	if (ticket->in_tickets && dlock_state_of(&ticket->ticket) == DLOCK_GRANTED)
		lease->held--;
	ticket->in_tickets = ticket->in_closed = false;
}

/*
 * A lease adopts a ticket that is in a lock or about to join it.  The ticket
 * gets the given state, but an heir's row says granted from the start (I17).
 * Returns false if the lease is gone.
 */
bool
dlock_lease_ticket_adopt(DlockLeaseTicket *ticket, DlockState state, bool heir)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);
	bool		open;

	Assert(!heir || (!ticket->record.listed && !ticket->record.has_row));
	if (!lease->single && !dlock_lease_is_open(lease))
		return false;
	dlock_lease_begin_change(space);
	/* the lease may be closed by now */
	open = lease->single ||
		pg_atomic_read_u64(&lease->deadline) > DLOCK_RAN_OUT;
	if (open)
	{
		if (lease->single)
		{
			lease->number = ticket->ticket.number;
			dlock_lease_start(space, lease, heir);
		}
		/* has_run_out() in wait.c reads these fields without a lock */
		pg_write_barrier();
		ticket->ticket.session = 0;
		ticket->ticket.procno = 0;
		ticket->ticket.pid = 0;
		ticket->heir = heir;
		dlock_ticket_set_state(&ticket->ticket, state);
		dlock_lease_ticket_list(lease, ticket, false);
		dlock_journal_mark(space, &ticket->record);
	}
	dlock_lease_end_change(space, lease);
	return open;
}

/*
 * Grant a ticket that waited.  Mark it, unless its row already says granted
 * and it has no announcement.
 */
void
dlock_lease_ticket_granted(DlockLeaseTicket *ticket, TimestampTz now)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);

	/* an heir's ttl begins; the ttl of any other single lease starts over */
	if (lease->single && !dlock_lease_detach(lease))
		(void) dlock_lease_extend(lease);
	dlock_lease_begin_change(space);
	if (!ticket->inherited)
		ticket->ticket.granted_at = now;
	dlock_ticket_set_state(&ticket->ticket, DLOCK_GRANTED);
	if (ticket->in_tickets)
		lease->held++;
	/* the worker learns of announcements from the mark */
	if (!ticket->inherited || DsaPointerIsValid(ticket->ticket.announcement))
		dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, lease);
}

/*
 * A ticket becomes LEAVING or ENDING, or an ENDING one loses its last pin.
 * Returns true if the ticket can leave at once, because it has no row (I15).
 */
bool
dlock_lease_ticket_ended(DlockLeaseTicket *ticket, DlockState state)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);
	bool		at_once = false;
	bool		was_listed;

	dlock_lease_begin_change(space);
	dlock_lease_be_over(lease, lease->single);
	/* a delay keeps no ticket that ended before the lease did */
	was_listed = ticket->in_tickets || ticket->in_closed;
	dlock_lease_ticket_unlist(lease, ticket);
	dlock_ticket_set_state(&ticket->ticket, state);
	if (lease->delayed && was_listed && state == DLOCK_ENDING)
		dlock_lease_ticket_list(lease, ticket, true);
	else
		at_once = !ticket->record.has_row && !ticket->record.in_flight &&
			ticket->ticket.pins == 0;
	ticket->leaves = ticket->ticket.pins == 0;
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, lease);
	return at_once;
}

void
dlock_lease_ticket_exchange_info(DlockLeaseTicket *ticket, dsa_pointer *info)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);

	dlock_lease_begin_change(space);
	dlock_exchange(&ticket->ticket.info, info);
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, dlock_lease_of(ticket));
}

/* Begin a downgrade (I18); returns true if the caller must complete it. */
bool
dlock_lease_ticket_lower(DlockLeaseTicket *ticket)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);
	bool		at_once;

	dlock_lease_begin_change(space);
	ticket->lowers = true;
	at_once = !ticket->record.has_row && !ticket->record.in_flight;
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, dlock_lease_of(ticket));
	return at_once;
}

/*
 * Begin to replace the announcement of another call's ticket.  It is replaced
 * once the row with the new channel is durable and this call cannot fail.
 */
void
dlock_lease_ticket_begin_redirect(DlockLeaseTicket *ticket,
								  dsa_pointer announcement)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);

	dlock_lease_begin_change(space);
	ticket->redirection = announcement;
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, dlock_lease_of(ticket));
}

/* Undo a redirection after an error, and free the announcement if unused. */
void
dlock_lease_ticket_undo_redirect(DlockLeaseTicket *ticket,
								 dsa_pointer announcement)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);
	bool		unused;
	bool		undone;

	dlock_lease_begin_change(space);
	unused = ticket->ticket.announcement != announcement;
	undone = ticket->redirection == announcement;
	if (undone)
	{
		ticket->redirection = InvalidDsaPointer;
		dlock_journal_mark(space, &ticket->record);
	}
	dlock_lease_end_change(space, dlock_lease_of(ticket));
	/* freed only now, because the worker reads it under the lease lock */
	if (unused)
		dlock_announcement_release(space, dlock_address(announcement));
	if (undone)
		(void) dlock_worker_wake(space);
}

/* The channel for a ticket's row, or "".  Needs the lease lock. */
void
dlock_lease_ticket_channel(DlockLeaseTicket *ticket, char *channel)
{
	const DlockAnnouncement *announcement;

	if (!DsaPointerIsValid(ticket->redirection))
	{
		dlock_announcement_channel(&ticket->ticket, channel);
		return;
	}
	announcement = dlock_address(ticket->redirection);
	strlcpy(channel, announcement->channel, NAMEDATALEN);
}

/*
 * Give a ticket another announcement, and set announce_at.  If the ticket
 * holds, its grant is announced again.  The caller must wake the worker.
 */
void
dlock_lease_ticket_redirect(DlockLeaseTicket *ticket, dsa_pointer announcement)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);

	dlock_lease_begin_change(space);
	dlock_announcement_replace(&ticket->ticket, announcement, true);
	if (ticket->redirection == announcement)
		ticket->redirection = InvalidDsaPointer;
	ticket->announced = false;
	ticket->announce_at = synchronous_commit;
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, lease);
}

/* End the delay of one ticket; returns false if no delay keeps the ticket. */
bool
dlock_lease_ticket_undelay(DlockLeaseTicket *ticket)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);
	bool		closed;

	dlock_lease_begin_change(space);
	closed = ticket->in_closed;
	if (closed)
	{
		dlock_lease_ticket_unlist(lease, ticket);
		dlock_journal_mark(space, &ticket->record);
		if (lease->tickets.length == 0 && lease->closed.length == 0)
		{
			/* the delay will keep no other ticket */
			lease->delayed = false;
			dlock_journal_mark(space, &lease->record);
		}
	}
	dlock_lease_end_change(space, lease);
	return closed;
}

/* Fill the lease's part of a view's row. */
void
dlock_lease_ticket_row(DlockLeaseTicket *ticket, DlockRow *row)
{
	DlockLease *lease = dlock_lease_of(ticket);
	uint64		deadline = dlock_lease_deadline(lease);
	uint64		now = dlock_monotonic_now();
	bool		delayed;

	/* a single lease has no number before it adopts its ticket */
	row->lease = lease->single ? row->number : lease->number;
	if (row->pid != 0)
		return;
	delayed = row->position == 0 && !row->granted &&
		dlock_lease_ticket_is_delayed(ticket);
	row->closed = delayed || ticket->closes;
	if (delayed)
		deadline = lease->delayed ? lease->delay_ends : now + lease->delay;
	if (deadline != DLOCK_NO_DEADLINE)
		row->remaining = deadline > now ? (int64) (deadline - now) : 0;
}

/*
 * Make a lease's ticket, and use its record, but do not enter it into the
 * table of numbers.  Does not check the memory limit.
 */
DlockLeaseTicket *
dlock_lease_ticket_make(DlockSpace *space, const DlockRequest *request)
{
	Oid			role = dlock_request_role(request);
	DlockLease *lease = request->lease;
	Size		size = dlock_lease_ticket_size(&request->key);
	DlockLeaseTicket *ticket;

	Assert(!lease->has_place ||
		   lease->role_name == DLOCK_SINGLE_LEASE_SIZE + size);
	/* only a single lease's first ticket is stored behind the lease */
	ticket = lease->has_place ?
		(DlockLeaseTicket *) ((char *) lease + DLOCK_SINGLE_LEASE_SIZE) :
		dlock_allocate(role, size);
	lease->has_place = false;
	memset(ticket, 0, size);
	dlock_record_init(&ticket->record, false, false);
	dlock_record_ref(&lease->record);
	ticket->lease = dlock_pointer(lease);
	dlock_key_copy(&ticket->key, &request->key);
	ticket->announce_at = synchronous_commit;
	pg_atomic_init_u64(&ticket->granted_lsn, InvalidXLogRecPtr);
	pg_atomic_init_u32(&ticket->claims, 1);
	pg_atomic_init_u32(&ticket->ticket.state, DLOCK_GONE);
	pg_atomic_init_u32(&ticket->ticket.session_depth, 0);
	pg_atomic_init_u32(&ticket->ticket.xact_depth, 0);
	dlock_record_use(&ticket->record);
	ticket->ticket.role = role;
	ticket->owner = dlock_text_copy(role, request->owner);
	dlock_ticket_fill(space, request, &ticket->ticket);
	if (DsaPointerIsValid(ticket->ticket.announcement))
		dlock_announcement_count(&ticket->ticket);
	if (!is_unique(ticket))
	{
		ticket->request = hash_request(ticket);
		dlock_request_insert(ticket);
	}
	return ticket;
}

/*
 * Find a lease's ticket by number, and use its record.  Returns NULL if the
 * ticket is gone.  Raises 42501 if the current user may not use the lease.
 */
DlockLeaseTicket *
dlock_lease_ticket_find(DlockSpace *space, int64 number)
{
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	dlock_id_find(space, number, &lease, &ticket);
	if (ticket == NULL || ticket->ticket.session != 0 ||
		dlock_state_has_ended(dlock_state_of(&ticket->ticket)) ||
		!dlock_lease_ticket_is_live(ticket))
		return NULL;
	dlock_lease_check_rights(dlock_lease_of(ticket));
	return ticket;
}
