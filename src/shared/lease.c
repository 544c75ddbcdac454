/*-------------------------------------------------------------------------
 *
 * lease.c
 *	  Leases, which keep tickets beyond a session.
 *
 * A lease is in its space's list while it is open.  After that, a lease with a
 * row stays in the list until the removal of the row is in the WAL.
 *
 * look() tells whether a lease is open (I13, I21).  Renewals move its deadline
 * without a lock.  If a lease runs out, look() sets DLOCK_RAN_OUT before any
 * process treats the lease as gone.  A close sets 0 at once, an expiry later.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/timestamp.h"

#include "shared/lease.h"

#define MAX_RENEW_MS	10000	/* longest wait for standbys in a renewal */

/* How long a lease lives after an acknowledged heartbeat or a load (I21) */
static uint64
honoured_for(const DlockLease *lease)
{
	int64		ttl = dlock_lease_ttl(lease);

	return dlock_lease_durability(lease) < SYNCHRONOUS_COMMIT_REMOTE_WRITE ?
		ttl : ttl + ttl / 4;
}

/* The time h of I21, or DLOCK_NO_DEADLINE before standbys begin to count */
uint64
dlock_lease_confirmed_at(DlockLease *lease)
{
	int			durability = dlock_lease_durability(lease);
	uint64		confirmed = pg_atomic_read_u64(&lease->confirmed);
	uint64		by_space =
		dlock_quorum_confirmed(dlock_space_at(lease->space), durability);

	return Max(confirmed, by_space);
}

/*
 * The time at which a lease runs out if standbys stop answering (h + ttl +
 * ttl/4 of I21), or DLOCK_NO_DEADLINE if no standbys count for the lease
 */
static uint64
quorum_deadline(DlockLease *lease)
{
	uint64		deadline;

	if (dlock_lease_durability(lease) < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		!dlock_quorum_has_standbys())
		return DLOCK_NO_DEADLINE;
	deadline = dlock_lease_confirmed_at(lease) + honoured_for(lease);
	if (deadline <= dlock_monotonic_now())
	{
		/* perhaps no process has looked for answers lately */
		dlock_quorum_look(dlock_space_at(lease->space));
		deadline = dlock_lease_confirmed_at(lease) + honoured_for(lease);
	}
	return deadline;
}

/*
 * Returns the monotonic time when a lease runs out, or 0 if it is gone (I13).
 * Sets *deadline to the deadline that was read.  If "at_standbys" is false,
 * standbys are ignored, and a signal handler can call this.
 */
static uint64
look(DlockLease *lease, bool at_standbys, uint64 *deadline)
{
	*deadline = pg_atomic_read_u64(&lease->deadline);
	while (*deadline > DLOCK_RAN_OUT)
	{
		uint64		by_quorum = DLOCK_NO_DEADLINE;
		uint64		due;

		pg_read_barrier();
		if (at_standbys)
			by_quorum = quorum_deadline(lease);
		due = Min(*deadline, by_quorum);
		if (dlock_monotonic_now() < due)
			return Min(due, DLOCK_NO_DEADLINE);
		if (pg_atomic_compare_exchange_u64(&lease->deadline, deadline,
										   DLOCK_RAN_OUT))
			return 0;
	}
	return 0;
}

/* The time when a lease runs out, 0 if it is gone, or DLOCK_NO_DEADLINE */
uint64
dlock_lease_deadline(DlockLease *lease)
{
	uint64		deadline;

	return look(lease, true, &deadline);
}

/* Is a lease gone?  Ignores standbys.  A signal handler can call this. */
bool
dlock_lease_has_run_out(DlockLease *lease)
{
	uint64		deadline;

	return look(lease, false, &deadline) == 0;
}

/*
 * Move the deadline to now plus "ttl" or, if "ttl" is 0, plus the lease's own
 * ttl, but then not back.  If the ttl does not run, or the deadline would stay
 * the same, add 1 instead (I13).  Returns false if the lease is gone.
 */
bool
dlock_lease_move_deadline(DlockLease *lease, int64 ttl)
{
	uint64		deadline;
	uint64		next;

	do
	{
		if (look(lease, true, &deadline) == 0)
			return false;
		/* read the ttl after the deadline: see dlock_lease_begin_ttl() */
		next = ttl > 0 ? ttl : dlock_lease_ttl(lease);
		next += dlock_monotonic_now();
		if (deadline >= DLOCK_NO_DEADLINE || next == deadline ||
			(ttl == 0 && next < deadline))
			next = deadline + 1;
	} while (!pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, next));
	return true;
}

/*
 * If the deadline is later than now plus the ttl, move it back to that time,
 * unless the lease is attached or gone.  Raises nothing.
 */
void
dlock_lease_shorten(DlockLease *lease)
{
	uint64		deadline = pg_atomic_read_u64(&lease->deadline);
	uint64		latest = dlock_monotonic_now() + dlock_lease_ttl(lease);

	while (deadline > latest && deadline < DLOCK_NO_DEADLINE &&
		   !pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, latest))
		;
}

bool
dlock_lease_extend(DlockLease *lease)
{
	if (!dlock_lease_move_deadline(lease, 0))
		return false;
	pg_atomic_write_u64(&lease->renewed_at, (uint64) GetCurrentTimestamp());
	return true;
}

/*
 * Close a lease.  Returns the number of tickets that this ends, or -1 if the
 * lease was closed before or has run out.
 */
int64
dlock_lease_claim(DlockLease *lease)
{
	DlockSpace *space = dlock_space_at(lease->space);
	uint64		deadline;
	int64		count;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	deadline = pg_atomic_read_u64(&lease->deadline);
	while (deadline > DLOCK_RAN_OUT &&
		   !pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, 0))
		;
	/* count now: once the deadline is 0, the worker ends tickets, too */
	count = deadline > DLOCK_RAN_OUT ? (int64) lease->tickets.length : -1;
	LWLockRelease(&space->lease_lock);
	return count;
}

/*
 * If a lease has run out, make its deadline 0 and begin its delay, which keeps
 * its locks closed.  If "always" is set, make the deadline of an open lease 0,
 * too, without a delay.  Must be called before any ticket leaves the lease.
 */
void
dlock_lease_be_over(DlockLease *lease, bool always)
{
	uint64		ran_out = DLOCK_RAN_OUT;

	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	if (always ?
		pg_atomic_exchange_u64(&lease->deadline, 0) == DLOCK_RAN_OUT :
		pg_atomic_compare_exchange_u64(&lease->deadline, &ran_out, 0))
	{
		lease->ran_out = true;
		if (lease->single)
			return;
		lease->delayed = lease->delay > 0 && lease->tickets.length > 0;
		lease->delay_ends = dlock_monotonic_now() + lease->delay;
	}
}

/* Microseconds since the time h of I21; 0 if no standbys count */
uint64
dlock_lease_unconfirmed_for(DlockLease *lease)
{
	uint64		now = dlock_monotonic_now();
	uint64		confirmed;

	if (dlock_lease_durability(lease) < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		!dlock_quorum_has_standbys())
		return 0;
	confirmed = dlock_lease_confirmed_at(lease);
	return now > confirmed ? now - confirmed : 0;
}

#ifdef COMPAT_CHECKS
/* If a lease has more tickets than this, they are not checked. */
#define MAX_CHECKED	64

/* Check that a ticket is in the right list (I16); returns 1 if GRANTED. */
static uint32
check_lease_ticket(const DlockLease *lease, const DlockLeaseTicket *ticket,
				   bool closed)
{
	DlockState	state = dlock_state_of(&ticket->ticket);

	Assert(dlock_lease_of(ticket) == lease && ticket->ticket.session == 0);
	Assert(ticket->in_tickets == !closed && ticket->in_closed == closed);
	Assert(closed ? state == DLOCK_ENDING :
		   state == DLOCK_WAITING || state == DLOCK_GRANTED);
	/* I9 */
	Assert(ticket->record.listed || ticket->record.has_row);
	return state == DLOCK_GRANTED ? 1 : 0;
}

/* Check I9, I16 and the counts of a lease. */
void
dlock_check_lease(const DlockLease *lease)
{
	uint32		closed = lease->single ? 0 : lease->closed.length;
	uint32		held = 0;
	DlockLeaseTicket *ticket;

	Assert(!lease->delayed ||
		   pg_atomic_read_u64((pg_atomic_uint64 *) &lease->deadline) == 0);
	Assert(closed == 0 || lease->delayed);
	if (lease->tickets.length + closed > MAX_CHECKED)
		return;
	for (ticket = dlock_ticket_in_lease(lease->tickets.head); ticket;
		 ticket = dlock_ticket_in_lease(ticket->in_lease.next))
		held += check_lease_ticket(lease, ticket, false);
	for (ticket = dlock_lease_first_closed(lease); ticket;
		 ticket = dlock_ticket_in_lease(ticket->in_lease.next))
		(void) check_lease_ticket(lease, ticket, true);
	Assert(lease->held == held);
}
#endif

/*
 * Remove a lease from "retimed".  Returns true if it was there; the caller
 * must then drop the list's reference.
 */
bool
dlock_lease_unretime(DlockSpace *space, DlockLease *lease)
{
	DlockRetiming *retiming;
	bool		was_listed;

	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	if (!DsaPointerIsValid(lease->retiming))
		return false;
	retiming = dlock_lease_retiming(lease);
	was_listed = retiming->listed;
	if (was_listed)
		dlock_list_remove(&space->retimed, &retiming->link);
	retiming->listed = false;
	return was_listed;
}

/*
 * Take a lease out of all lists and tables; returns false if that was done
 * before.  The caller has a reference to the lease or to a ticket of it.
 */
bool
dlock_lease_unlist(DlockSpace *space, DlockLease *lease)
{
	bool		was_listed;
	bool		was_retimed;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	lease->record.finished = true;
	LWLockRelease(&space->lease_lock);
	/* a single lease is found by its ticket's number (id_table.c) */
	if (!lease->single)
		dlock_id_delete(&lease->record);
	dlock_lease_begin_change(space);
	was_listed = lease->in_leases;
	lease->in_leases = false;
	if (was_listed)
		dlock_list_remove(&space->leases, &lease->in_space);
	dlock_journal_unmark(space, &lease->record);
	was_retimed = dlock_lease_unretime(space, lease);
	dlock_lease_end_change(space, lease);
	if (was_retimed)
		dlock_record_unref(&lease->record);
	if (was_listed)
		dlock_record_unref(&lease->record);
	return was_listed;
}

/*
 * Open a lease, with the lease lock held.  Its ttl starts, unless the lease is
 * attached to a session, or is for an heir (I17), whose grant starts the ttl.
 */
void
dlock_lease_start(DlockSpace *space, DlockLease *lease, bool heir)
{
	bool		kept = lease->single ? heir : lease->session != 0;
	uint64		now = dlock_monotonic_now();

	pg_atomic_write_u64(&lease->confirmed, DLOCK_NO_DEADLINE);
	pg_atomic_write_u64(&lease->renewed_at, (uint64) GetCurrentTimestamp());
	pg_atomic_write_u64(&lease->deadline,
						kept ? DLOCK_NO_DEADLINE :
						now + dlock_lease_ttl(lease));
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	Assert(!lease->in_leases);
	dlock_record_ref(&lease->record);
	dlock_list_append(&space->leases, &lease->in_space);
	lease->in_leases = true;
}

/* Open a lease that is not single.  It has a number, but no row yet. */
void
dlock_lease_enter(DlockLease *lease)
{
	DlockSpace *space = dlock_space_at(lease->space);

	dlock_lease_begin_change(space);
	dlock_lease_start(space, lease, false);
	dlock_journal_mark(space, &lease->record);
	dlock_lease_end_change(space, lease);
}

/*
 * Make a lease, and use its record (dlock_record_use()), but do not enter it
 * into the table of numbers.  The role's name (NULL: the current user's) is
 * stored after "size" bytes.  Does not check the memory limit.
 */
static DlockLease *
make(DlockSpace *space, Oid role, const char *role_name, int64 ttl, Size size,
	 bool single)
{
	DlockLease *lease;

	/* before the allocation, because looking up a name can raise an error */
	if (role_name == NULL)
		role_name = GetUserNameFromId(GetUserId(), false);
	dlock_check_committed(space);
	lease = dlock_allocate(role, size + strlen(role_name) + 1);
	memset(lease, 0, size);
	lease->space = dlock_pointer(space);
	lease->role = role;
	lease->role_name = size;
	strcpy((char *) lease + size, role_name);
	lease->single = single;
	pg_atomic_init_u32(&lease->durability, (uint32) synchronous_commit);
	dlock_record_init(&lease->record, true, single);
	pg_atomic_init_u64(&lease->ttl, (uint64) ttl);
	pg_atomic_init_u64(&lease->deadline, 0);
	pg_atomic_init_u64(&lease->confirmed, 0);
	pg_atomic_init_u64(&lease->renewed_at, 0);
	pg_atomic_init_u32(&lease->waiters, 0);
	dlock_record_use(&lease->record);
	return lease;
}

DlockLease *
dlock_lease_make(DlockSpace *space, Oid role, const char *role_name, int64 ttl,
				 int64 delay, const char *info)
{
	DlockLease *lease = make(space, role, role_name, ttl, sizeof(DlockLease),
							 false);

	lease->delay = delay;
	lease->opened_at = GetCurrentTimestamp();
	lease->info = dlock_text_copy(role, info);
	return lease;
}

/* Make a single lease, with memory for its ticket. */
DlockLease *
dlock_lease_make_single(DlockSpace *space, Oid role, const char *role_name,
						int64 ttl, const DlockKey *key)
{
	DlockLease *lease = make(space, role, role_name, ttl,
							 DLOCK_SINGLE_LEASE_SIZE +
							 dlock_lease_ticket_size(key), true);

	lease->has_place = true;
	return lease;
}

/*
 * Raise 42501 if the current user may not use a lease.  The lease's role must
 * still have the stored name: after a restore, another role can have its OID.
 */
void
dlock_lease_check_rights(const DlockLease *lease)
{
	const char *owner = dlock_lease_role_name(lease);
	const char *name;
	bool		same;

	if (superuser())
		return;
	name = GetUserNameFromId(lease->role, true);
	same = name && strcmp(name, owner) == 0;
	if (same && has_privs_of_role(GetUserId(), lease->role))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for lease %lld",
					(long long) lease->number),
			 same ? errdetail("It belongs to role \"%s\".", owner) :
			 errdetail("It belongs to role \"%s\" with OID %u, but these are not the same role any more.",
					   owner, lease->role),
			 same ? errhint("Use a role that has the privileges of that role.") :
			 errhint("Ask a superuser.")));
}

/*
 * Find a lease by number, and use its record.  Returns NULL if the lease is
 * gone.  Raises 42501 if the current user may not use the lease.
 */
DlockLease *
dlock_lease_find(DlockSpace *space, int64 number)
{
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	dlock_id_find(space, number, &lease, &ticket);
	if (lease == NULL || !dlock_lease_is_open(lease))
		return NULL;
	dlock_lease_check_rights(lease);
	return lease;
}

static void
raise_unconfirmed(const DlockLease *lease)
{
	ereport(ERROR,
			(errcode(ERRCODE_IO_ERROR),
			 errmsg("could not renew lease %lld", (long long) lease->number),
			 errdetail("Synchronous standbys have not acknowledged a heartbeat for a quarter of its ttl, so that its full ttl cannot be promised; it is not gone yet."),
			 errhint("Renew again, for as long as the latest renewal that succeeded lasts.")));
}

/*
 * Make sure that a renewal can promise a full ttl from "start" (I21).  If
 * standbys count, wait for their answer, for at most a quarter of the ttl and
 * at most MAX_RENEW_MS.  First move the deadline, so that the lease does not
 * run out during the wait.  Returns false if the lease was gone already.
 */
bool
dlock_lease_confirm(DlockSpace *space, DlockLease *lease, int64 ttl,
					uint64 start)
{
	uint64		quarter = ttl / 4;
	uint64		since = start > quarter ? start - quarter : 1;
	uint64		until;

	if (dlock_lease_durability(lease) < SYNCHRONOUS_COMMIT_REMOTE_WRITE ||
		dlock_lease_confirmed_at(lease) >= since)
		return true;
	if (!dlock_lease_move_deadline(lease, 0))
		return false;
	until = start + Min(quarter, MAX_RENEW_MS * UINT64CONST(1000));
	if (!dlock_quorum_wait(space, dlock_lease_durability(lease), since,
						   until) &&
		dlock_lease_is_open(lease))
		raise_unconfirmed(lease);
	return true;
}

/*
 * Renew a lease; returns how many tickets it keeps, or -1 if it is gone.
 * Raises 58030 if standbys count and do not answer in time.
 */
int
dlock_lease_renew(DlockSpace *space, int64 number)
{
	uint64		start = dlock_monotonic_now();
	int			before = dlock_record_begin_uses();
	DlockLease *lease = dlock_lease_find(space, number);
	int			result = -1;

	if (lease &&
		dlock_lease_confirm(space, lease, dlock_lease_ttl(lease), start) &&
		dlock_lease_extend(lease))
		result = (int) lease->tickets.length;
	dlock_record_end_uses(before);
	return result;
}

/* Exchange the info; returns false if the lease is gone.  Raises nothing. */
bool
dlock_lease_exchange_info(DlockLease *lease, dsa_pointer *info)
{
	DlockSpace *space = dlock_space_at(lease->space);
	bool		is_there;

	Assert(!lease->single);
	dlock_lease_begin_change(space);
	is_there = pg_atomic_read_u64(&lease->deadline) > DLOCK_RAN_OUT;
	if (is_there)
	{
		dlock_exchange(&lease->info, info);
		dlock_journal_mark(space, &lease->record);
	}
	dlock_lease_end_change(space, lease);
	return is_there;
}

/* Start the ttl; returns false if it already runs, or if the lease is gone. */
bool
dlock_lease_detach(DlockLease *lease)
{
	uint64		deadline = pg_atomic_read_u64(&lease->deadline);

	while (deadline >= DLOCK_NO_DEADLINE)
	{
		uint64		end;

		/* read the ttl after the deadline: see dlock_lease_begin_ttl() */
		pg_read_barrier();
		end = dlock_monotonic_now() + dlock_lease_ttl(lease);
		if (pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, end))
			return true;
	}
	return false;
}

/* Load a lease.  Its ttl does not run before dlock_lease_begin_anew(). */
void
dlock_lease_restart(DlockSpace *space, DlockLease *lease, bool delayed)
{
	dlock_lease_begin_change(space);
	dlock_lease_start(space, lease, false);
	pg_atomic_write_u64(&lease->deadline, DLOCK_NO_DEADLINE);
	if (delayed)
	{
		pg_atomic_write_u64(&lease->deadline, 0);
		lease->delayed = true;
		lease->delay_ends = dlock_monotonic_now() + lease->delay;
	}
	dlock_lease_end_change(space, lease);
}

/*
 * Load a lease that is not single.  Nothing can fail once the lease is in the
 * table of numbers, so a repeated load can skip the leases in this table.
 */
void
dlock_lease_restore(DlockLease *lease, bool delayed)
{
	DlockSpace *space = dlock_space_at(lease->space);

	lease->record.has_row = true;
	dlock_id_insert(&lease->record);
	dlock_lease_restart(space, lease, delayed);
}

/*
 * Start the ttls of all loaded leases.  If standbys count for a lease, they
 * have acknowledged a record that was sent after the time "confirmed".
 */
void
dlock_lease_begin_anew(DlockSpace *space, uint64 confirmed)
{
	DlockLease *lease = NULL;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	while ((lease = dlock_lease_next(space, lease)) != NULL)
	{
		uint64		now = dlock_monotonic_now();

		pg_atomic_write_u64(&lease->confirmed, confirmed);
		if (lease->delayed)
			lease->delay_ends = now + lease->delay;
		else
			pg_atomic_write_u64(&lease->deadline, now + honoured_for(lease));
	}
	LWLockRelease(&space->lease_lock);
}
