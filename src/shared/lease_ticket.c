/*-------------------------------------------------------------------------
 *
 * lease_ticket.c
 *	  The tickets of leases.
 *
 * queue.c tells of everything that happens to one: it is adopted, granted,
 * ended.  It is in a list of its lease until it has ended: in "tickets", or in
 * "closed" where it keeps its lock closed by a delay.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "storage/ipc.h"

#include "shared/lease.h"
#include "shared/inner.h"

/*
 * For queue.c.  All of these raise nothing.
 */

bool
dlock_lease_ticket_is_live(const DlockLeaseTicket *ticket)
{
	return dlock_lease_is_open(dlock_lease_of(ticket));
}

/*
 * Does a delay keep its lock closed?  Or will one, as soon as a process ends
 * the tickets of the lease, which has run out?  Until then the lock is not
 * free (I16).
 */
bool
dlock_lease_ticket_is_delayed(const DlockLeaseTicket *ticket)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);
	bool		delayed;

	if (lease->single || lease->delay == 0)
		return false;
	/* the one becomes the other under this lock */
	LWLockAcquire(&space->lease_lock, LW_SHARED);
	delayed = lease->delayed ||
		pg_atomic_read_u64(&lease->deadline) == DLOCK_RAN_OUT;
	LWLockRelease(&space->lease_lock);
	return delayed;
}

static bool
same_text(dsa_pointer a, dsa_pointer b)
{
	if (!DsaPointerIsValid(a) || !DsaPointerIsValid(b))
		return !DsaPointerIsValid(a) && !DsaPointerIsValid(b);
	return strcmp(dlock_address(a), dlock_address(b)) == 0;
}

/*
 * The tickets of one request
 *
 * A client that asks again is to get the ticket that it has, at the same cost
 * whatever the number of others.  So each ticket is entered, from its making
 * to its end, under the hash of its lock, owner, and lease or role; and who
 * joins looks there, with the lock's entry locked.  As a request has one
 * ticket at a time that waits or holds (I14), there are few under one hash: of
 * the others some call still knows, or the row is being removed.
 */

/*
 * Would a request that "wanted" was made for get this ticket?  With a lease of
 * many tickets, where lease and owner are the same; with a ticket's own lease
 * where the role is and an owner was given.  What is still waited for by
 * another session counts, too.
 */
static bool
is_same(DlockLeaseTicket *ticket, const DlockLeaseTicket *wanted)
{
	DlockLease *lease = dlock_lease_of(ticket);
	const DlockLease *wanted_lease = dlock_lease_of(wanted);

	if (dlock_state_has_ended(dlock_state_of(ticket)) ||
		!dlock_key_equal(&ticket->key, &wanted->key) ||
		!same_text(ticket->owner, wanted->owner))
		return false;
	if (!wanted_lease->single)
		return ticket->lease == wanted->lease;
	return lease->single && lease->role == wanted_lease->role &&
		strcmp(dlock_lease_role_name(lease),
			   dlock_lease_role_name(wanted_lease)) == 0 &&
		(ticket->ticket.session != 0 || dlock_lease_is_open(lease));
}

/* Does no other request get this ticket? */
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
	const char *owner;

	hash = hash_combine64(hash, ticket->key.hash);
	if (DsaPointerIsValid(ticket->owner))
	{
		owner = dlock_address(ticket->owner);
		hash = hash_bytes_extended((const unsigned char *) owner,
								   strlen(owner), hash);
	}
	return (uint32) murmurhash32((uint32) hash ^ (uint32) (hash >> 32));
}

/*
 * The ticket that a request which "wanted" was made for has already, waiting or
 * held, in use by the caller; NULL where there is none.  One that another session
 * waits with counts, too.  Called under the entry's lock, under which alone it
 * could end; raises nothing.
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

/* Count a ticket among those that its lease holds locks with, if it is one. */
static void
count_held(DlockLease *lease, DlockLeaseTicket *ticket)
{
	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	if (!ticket->in_tickets || ticket->held ||
		dlock_state_of(ticket) != DLOCK_GRANTED)
		return;
	ticket->held = true;
	if (!lease->single)
		lease->held++;
}

/* Where that of a ticket is which has a place in its lease's lists */
static dsa_pointer
place_pointer(DlockLeaseTicket *ticket)
{
	return ticket->ticket.self +
		((char *) dlock_place_in_lease(ticket) - (char *) ticket);
}

void
dlock_lease_ticket_list(DlockLease *lease, DlockLeaseTicket *ticket,
						bool closed)
{
	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	if (lease->single)
	{
		Assert(!closed && !DsaPointerIsValid(lease->own_ticket));
		lease->own_ticket = ticket->ticket.self;
	}
	else
		dlock_list_append(closed ? &lease->closed : &lease->tickets,
						  &dlock_place_in_lease(ticket)->link,
						  place_pointer(ticket));
	ticket->in_closed = closed;
	ticket->in_tickets = !closed;
	count_held(lease, ticket);
}

/* Take a ticket out of its lease's lists; called with the lease lock. */
void
dlock_lease_ticket_unlist(DlockLease *lease, DlockLeaseTicket *ticket)
{
	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	if (!lease->single)
	{
		if (ticket->in_tickets)
			dlock_list_remove(&lease->tickets,
							  &dlock_place_in_lease(ticket)->link);
		if (ticket->in_closed)
			dlock_list_remove(&lease->closed,
							  &dlock_place_in_lease(ticket)->link);
		if (ticket->held)
			lease->held--;
	}
	else if (ticket->in_tickets)
		lease->own_ticket = InvalidDsaPointer;
	ticket->in_tickets = ticket->in_closed = ticket->held = false;
}

/*
 * The lease takes a ticket that has joined its lock, or does so now, held or
 * waiting as "state" says; false where the lease is gone.  Called under the
 * entry's lock.
 *
 * The row of an heir says granted from the start: the one holder has ended, and
 * only the removal of its row is to come.  The heir comes into the journal behind
 * that removal, and so into the same transaction or a later one (I17).
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
	/* it may be closed by now */
	open = lease->single ||
		pg_atomic_read_u64(&lease->deadline) > DLOCK_RAN_OUT;
	if (open)
	{
		if (lease->single)
		{
			lease->number = ticket->ticket.number;
			dlock_lease_start(space, lease, heir);
		}
		/* read without a lock, too: see has_run_out() in wait.c */
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
 * A ticket that waited is granted.  The state changes together with the mark:
 * whoever sees it, and then asks for the mark, waits for the grant to be
 * written.  Where its row says so already, there is nothing to mark.  Called under
 * the entry's lock.
 */
void
dlock_lease_ticket_granted(DlockLeaseTicket *ticket, TimestampTz now)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);

	/* that of an heir's own lease begins to run */
	if (lease->single && !dlock_lease_detach(lease))
		(void) dlock_lease_extend(lease);
	dlock_lease_begin_change(space);
	if (!ticket->inherited)
		ticket->ticket.granted_at = now;
	dlock_ticket_set_state(&ticket->ticket, DLOCK_GRANTED);
	count_held(lease, ticket);
	/* what is to be announced, the worker learns of by the mark */
	if (!ticket->inherited || DsaPointerIsValid(ticket->ticket.announcement))
		dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, lease);
}

/*
 * A ticket becomes LEAVING or ENDING, or an ENDING one has lost its last pin.
 * Returns whether it may be taken out of its lock at once, because it has no
 * row (I15).  Called under the entry's lock.
 */
bool
dlock_lease_ticket_ended(DlockLeaseTicket *ticket, DlockState state)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);
	bool		at_once = false;
	bool		was_listed;

	dlock_lease_begin_change(space);
	dlock_ticket_set_state(&ticket->ticket, state);
	dlock_lease_be_over(lease, lease->single);
	/* what was released before, while pinned, is no matter of a delay */
	was_listed = ticket->in_tickets || ticket->in_closed;
	dlock_lease_ticket_unlist(lease, ticket);
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

/*
 * Exchange what a ticket says of itself.  Called under the entry's lock.
 */
void
dlock_lease_ticket_exchange_info(DlockLeaseTicket *ticket, dsa_pointer *info)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);
	dsa_pointer before;

	dlock_lease_begin_change(space);
	before = ticket->ticket.info;
	ticket->ticket.info = *info;
	*info = before;
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, dlock_lease_of(ticket));
}

/*
 * An exclusive hold is to become a shared one (I18).  Returns whether it may
 * at once, because it has no row.  Called under the entry's lock.
 */
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
 * A grant is durable: let it be announced, if the ticket still holds.
 */
void
dlock_lease_ticket_announce(DlockLeaseTicket *ticket)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	if (dlock_state_of(ticket) == DLOCK_GRANTED && !ticket->announced)
		dlock_announcement_event(&ticket->ticket, DLOCK_EVENT_GRANTED);
	ticket->announced = true;
	LWLockRelease(&space->lease_lock);
}

/*
 * Redirecting the announcement of a ticket, for a call that gets one which another
 * has made.  The row comes first, and names the new channel; once that is durable
 * and the call cannot fail any more, the announcement itself is exchanged.  Until
 * then the other client is told as before.  Where several calls are at it, the row
 * is the latest one's.
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

/* Have a ticket's row written once more. */
static void
rewrite_row(DlockLeaseTicket *ticket)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);

	dlock_lease_begin_change(space);
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, dlock_lease_of(ticket));
}

/*
 * The call has failed: the row is to say what it said before.  The announcement
 * goes, unless it is the ticket's, as an error has come behind that.
 */
void
dlock_lease_ticket_undo_redirect(DlockLeaseTicket *ticket,
								 dsa_pointer announcement)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);
	bool		unused;
	bool		undone;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	unused = ticket->ticket.announcement != announcement;
	undone = ticket->redirection == announcement;
	/* first, as it is about to be freed */
	if (undone)
		ticket->redirection = InvalidDsaPointer;
	LWLockRelease(&space->lease_lock);
	if (unused)
		dlock_announcement_discard(space, announcement);
	if (undone)
	{
		rewrite_row(ticket);
		(void) dlock_worker_wake(space);
	}
}

/* The channel for its row, or an empty one.  Called with the lease lock. */
void
dlock_lease_ticket_channel(DlockLeaseTicket *ticket, char *channel)
{
	DlockAnnouncement *announcement;

	if (!DsaPointerIsValid(ticket->redirection))
	{
		dlock_announcement_channel(&ticket->ticket, channel);
		return;
	}
	announcement = dlock_address(ticket->redirection);
	strlcpy(channel, announcement->channel, NAMEDATALEN);
}

/*
 * The announcement of a ticket goes to another channel from now on, at the level of
 * this call; if it holds already, the grant is announced there.
 * Called under the entry's lock; the caller wakes the worker.
 */
void
dlock_lease_ticket_redirect(DlockLeaseTicket *ticket, dsa_pointer announcement)
{
	DlockLease *lease = dlock_lease_of(ticket);
	DlockSpace *space = dlock_space_at(lease->space);

	dlock_lease_begin_change(space);
	dlock_announcement_redirect(&ticket->ticket, announcement);
	if (ticket->redirection == announcement)
		ticket->redirection = InvalidDsaPointer;
	ticket->announced = false;
	ticket->announce_at = synchronous_commit;
	dlock_journal_mark(space, &ticket->record);
	dlock_lease_end_change(space, lease);
}

/*
 * End the delay that keeps a lock closed, for this ticket; false where there is
 * none.  Called under the entry's lock.
 */
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
		if (dlock_lease_count_tickets(lease) == 0 && lease->closed.length == 0)
		{
			/* it keeps nothing closed any more */
			lease->delayed = false;
			dlock_journal_mark(space, &lease->record);
		}
	}
	dlock_lease_end_change(space, lease);
	return closed;
}

/*
 * Is a ticket's row as the ticket is?  Where that ends in the WAL, it may still
 * have to become durable.  Called under the entry's lock.
 */
bool
dlock_lease_ticket_is_written(DlockLeaseTicket *ticket, XLogRecPtr *lsn)
{
	DlockSpace *space = dlock_space_at(ticket->ticket.space);
	bool		written;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	written = ticket->record.has_row && !ticket->record.listed;
	*lsn = dlock_journal_position(space, &ticket->record);
	LWLockRelease(&space->lease_lock);
	return written;
}

/* What the view shows of a ticket.  Called under the entry's lock. */
void
dlock_lease_ticket_row(DlockLeaseTicket *ticket, DlockRow *row)
{
	DlockLease *lease = dlock_lease_of(ticket);
	uint64		deadline = dlock_lease_deadline(lease);
	uint64		now = dlock_monotonic_now();

	/* a ticket's own lease has no number before the grant */
	row->lease = lease->single ? row->number : lease->number;
	if (row->pid != 0)
		return;
	row->closed = row->position == 0 && !row->granted &&
		dlock_lease_ticket_is_delayed(ticket);
	if (row->closed)
		deadline = lease->delayed ? lease->delay_ends : now + lease->delay;
	if (deadline != DLOCK_NO_DEADLINE)
		row->remaining = deadline > now ? (int64) (deadline - now) : 0;
}

/*
 * Making, finding, putting back
 */

/*
 * Make a ticket for a lease, which the caller uses and nobody can find yet.
 * The caller has checked for memory, as with a lease.
 */
DlockLeaseTicket *
dlock_lease_ticket_make(DlockSpace *space, const DlockRequest *request)
{
	Oid			role = dlock_request_role(request);
	DlockLease *lease = request->lease;
	Size		size = dlock_lease_ticket_size(lease, &request->key);
	DlockLeaseTicket *ticket;
	dsa_pointer self;

	Assert(!lease->has_place ||
		   lease->role_name == DLOCK_SINGLE_LEASE_SIZE + size);
	/* who asks anew for what was lost meanwhile makes a second one */
	self = lease->has_place ? lease->self + DLOCK_SINGLE_LEASE_SIZE :
		dlock_allocate(role, size);
	lease->has_place = false;
	ticket = dlock_address(self);
	memset(ticket, 0, size);
	ticket->ticket.self = self;
	dlock_record_init(&ticket->record, false, false);
	dlock_record_ref(&lease->record);
	ticket->lease = lease->self;
	dlock_key_copy(&ticket->key, &request->key);
	if (!lease->single)
		dlock_place_in_lease(ticket)->ticket = self;
	ticket->announce_at = synchronous_commit;
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
 * Let an adopted ticket be found by its number, or one that is about to be
 * adopted.  Should it have been finished before that, it is not found.
 * Raises 53200.
 */
void
dlock_lease_ticket_publish(DlockLeaseTicket *ticket)
{
	dlock_id_insert(&ticket->record);
}

/* Called under the entry's lock, as the lease could adopt it otherwise. */
void
dlock_lease_ticket_unpublish(DlockLeaseTicket *ticket)
{
	dlock_id_delete(&ticket->record);
}

/*
 * The ticket with this number, in use by the caller; NULL where there is none
 * that a lease has.  Raises 42501 if the role may not act for its owner.
 */
DlockLeaseTicket *
dlock_lease_ticket_find(DlockSpace *space, int64 number)
{
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	dlock_id_find(space, number, &lease, &ticket);
	if (ticket == NULL || ticket->ticket.session != 0 ||
		dlock_state_has_ended(dlock_state_of(ticket)))
		return NULL;
	if (!dlock_lease_ticket_is_live(ticket))
		return NULL;
	dlock_lease_check_rights(dlock_lease_of(ticket));
	return ticket;
}

/*
 * A session's ticket is GONE before its lease could adopt it, and its session
 * has done with it.  Others may wait for it, as a request of their own would
 * have got it.
 */
void
dlock_lease_ticket_discard(DlockLeaseTicket *ticket)
{
	ConditionVariableBroadcast(&ticket->record.changed);
	dlock_record_unref(&ticket->record);
	/* for as long as it was noted as the session's */
	dlock_record_unref(&ticket->record);
}

/* Has this ticket been put back, by an attempt that failed later? */
bool
dlock_lease_ticket_is_restored(DlockSpace *space, int64 number)
{
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	dlock_id_find(space, number, &lease, &ticket);
	return ticket != NULL;
}
