/*-------------------------------------------------------------------------
 *
 * lease.c
 *	  Leases: what keeps tickets beyond a session.
 *
 * A lease is in the list of its space from the moment it can be found until
 * the removal of its row is in the WAL; the worker then finishes it.
 *
 * Whether a lease is open is told by its deadline alone, on a clock of the
 * server that never goes back, nor stands still while the machine sleeps.
 * Renewing moves it, by compare-and-exchange and without a lock.  Whoever finds
 * it passed sets it to DLOCK_RAN_OUT by the same means before he says so; closing
 * sets it to 0.  So of a renewal, a close, and an answer that the lease is gone,
 * none is ever taken back by another one.
 *
 * A lease that ran out has its delay still to come, which begins when
 * DLOCK_RAN_OUT becomes 0, under the lease lock.  The worker does that, or
 * whoever ends a ticket of it before the worker.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "shared/lease.h"
#include "shared/inner.h"

#define MAX_RENEW_MS	10000	/* a renewal waits for standbys that long, or for
								 * a quarter of its ttl */

/*
 * Is a lease open?
 */

/* How long it is honoured after standbys were heard of, and after a load */
static uint64
honoured_for(const DlockLease *lease)
{
	int64		ttl = dlock_lease_ttl(lease);

	return dlock_lease_durability(lease) < SYNCHRONOUS_COMMIT_REMOTE_WRITE ?
		ttl : ttl + ttl / 4;
}

/*
 * When the latest heartbeat was sent that is known to be acknowledged, of a lease
 * for which standbys count
 */
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
 * If a quorum of standbys counts for a lease, it does not live beyond the
 * sending of the last heartbeat that they have acknowledged, plus its ttl and
 * a quarter (I21).
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
		/* nobody may have looked for a while */
		dlock_quorum_look(dlock_space_at(lease->space));
		deadline = dlock_lease_confirmed_at(lease) + honoured_for(lease);
	}
	return deadline;
}

/*
 * When a lease runs out, in monotonic microseconds; 0: it is gone.  The
 * deadline is changed before this is answered, so no later answer differs
 * (I13).  *deadline is what was found there.
 *
 * The deadline is read before the standbys' answers, while a renewal looks at
 * these first and moves the deadline then: one that has succeeded meanwhile
 * makes the exchange fail.
 */
static uint64
look(DlockLease *lease, uint64 *deadline)
{
	*deadline = pg_atomic_read_u64(&lease->deadline);
	while (*deadline > DLOCK_RAN_OUT)
	{
		uint64		by_quorum;
		uint64		due;

		pg_read_barrier();
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

/*
 * When a lease runs out, in monotonic microseconds; DLOCK_NO_DEADLINE where its
 * session keeps it alive.  0: it is gone, and stays so.
 */
uint64
dlock_lease_deadline(DlockLease *lease)
{
	uint64		deadline;

	return look(lease, &deadline);
}

bool
dlock_lease_is_open(DlockLease *lease)
{
	return dlock_lease_deadline(lease) != 0;
}

/*
 * The same, the other way round, for a signal handler: what standbys have to do
 * with it is left to the worker, which is there where they count.
 */
bool
dlock_lease_has_run_out(DlockLease *lease)
{
	uint64		deadline = pg_atomic_read_u64(&lease->deadline);

	while (deadline > DLOCK_RAN_OUT)
	{
		if (dlock_monotonic_now() < deadline)
			return false;
		if (pg_atomic_compare_exchange_u64(&lease->deadline, &deadline,
										   DLOCK_RAN_OUT))
			break;
	}
	return true;
}

/* Does a living session keep it alive, as far as is known? */
bool
dlock_lease_is_attached(const DlockLease *lease)
{
	return pg_atomic_read_u64((pg_atomic_uint64 *) &lease->deadline) >=
		DLOCK_NO_DEADLINE;
}

/*
 * Move the deadline to a full ttl from now; false where the lease is gone.
 * What is found there always changes, so that nobody who has looked at it
 * before can still end the lease for what he knew then.
 */
static bool
move_deadline(DlockLease *lease)
{
	uint64		deadline;
	uint64		next;

	do
	{
		if (look(lease, &deadline) == 0)
			return false;
		next = deadline >= DLOCK_NO_DEADLINE ? 0 :	/* attached */
			dlock_monotonic_now() + dlock_lease_ttl(lease);
		next = Max(next, deadline + 1);
	} while (!pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, next));
	return true;
}

/*
 * Set the deadline to another ttl from now, though it may come sooner by that;
 * false where the lease is gone.  As with a renewal, it always changes.
 */
bool
dlock_lease_set_deadline(DlockLease *lease, int64 ttl)
{
	uint64		deadline;
	uint64		next;

	do
	{
		if (look(lease, &deadline) == 0)
			return false;
		next = deadline >= DLOCK_NO_DEADLINE ? deadline + 1 :	/* attached */
			dlock_monotonic_now() + ttl;
		if (next == deadline)
			next++;
	} while (!pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, next));
	return true;
}

/*
 * No more than the ttl from now on, if it is not attached, nor gone.  Raises
 * nothing.
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
	if (!move_deadline(lease))
		return false;
	pg_atomic_write_u64(&lease->renewed_at, (uint64) GetCurrentTimestamp());
	return true;
}

/*
 * Take it upon this backend to end a lease; false where that was done before,
 * or where it ran out, and somebody was told so.
 */
bool
dlock_lease_claim(DlockLease *lease)
{
	uint64		deadline = pg_atomic_read_u64(&lease->deadline);

	while (deadline > DLOCK_RAN_OUT &&
		   !pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, 0))
		;
	return deadline > DLOCK_RAN_OUT;
}

/* Its locks are kept closed from now on, where it has a delay for that. */
static void
begin_delay(DlockLease *lease)
{
	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	if (lease->single)
		return;
	lease->delayed = lease->delay > 0 && lease->tickets.length > 0;
	lease->delay_ends = dlock_monotonic_now() + lease->delay;
}

/*
 * A lease that ran out is over, and its delay begins; with "always", one that
 * did not run out is over, too.  Called with the lease lock, before a ticket of
 * the lease is taken from it.
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
		begin_delay(lease);
	}
}

/*
 * How long ago the latest heartbeat was sent that standbys have acknowledged,
 * in microseconds; 0 where none count for the lease.
 */
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
/* So many tickets of a lease are checked at each change */
#define MAX_CHECKED	64

/* Is a ticket in the right list of its lease, with what it counts?  I16. */
static uint32
check_ticket(const DlockLease *lease, const DlockLeaseTicket *ticket,
			 bool closed)
{
	DlockState	state = dlock_state_of(ticket);

	Assert(dlock_lease_of(ticket) == lease && ticket->ticket.session == 0);
	Assert(ticket->in_tickets == !closed && ticket->in_closed == closed);
	Assert(closed ? state == DLOCK_ENDING :
		   state == DLOCK_WAITING || state == DLOCK_GRANTED);
	Assert(ticket->held == (state == DLOCK_GRANTED));
	/* what has changed is in the journal (I9) */
	Assert(ticket->record.listed || ticket->record.has_row);
	return ticket->held ? 1 : 0;
}

/* Check the invariants of a lease: I9, I16, and its counts of tickets. */
void
dlock_check_lease(const DlockLease *lease)
{
	const DlockList *lists[] = {&lease->tickets, &lease->closed};
	uint32		held = 0;

	if (lease->single)
	{
		if (DsaPointerIsValid(lease->own_ticket))
			(void) check_ticket(lease, dlock_address(lease->own_ticket), false);
		return;
	}
	Assert(!lease->delayed ||
		   pg_atomic_read_u64((pg_atomic_uint64 *) &lease->deadline) == 0);
	Assert(lease->closed.length == 0 || lease->delayed);
	if (lease->tickets.length + lease->closed.length > MAX_CHECKED)
		return;
	for (int i = 0; i < (int) lengthof(lists); i++)
	{
		for (dsa_pointer link = lists[i]->head; DsaPointerIsValid(link);
			 link = dlock_link_at(link)->next)
			held += check_ticket(lease, dlock_ticket_in_lease(link), i == 1);
	}
	Assert(lease->held == held);
}
#endif

/* Enter a lease into its space; called with the lease lock. */
static void
list_lease(DlockSpace *space, DlockLease *lease)
{
	Assert(LWLockHeldByMeInMode(&space->lease_lock, LW_EXCLUSIVE));
	dlock_record_ref(&lease->record);
	Assert(!lease->in_leases);
	dlock_list_append(&space->leases, &lease->in_space,
					  lease->self + offsetof(DlockLease, in_space));
	lease->in_leases = true;
}

/*
 * The worker need not look at a lease anew (lease_ttl.c); false where it had not
 * to.  If it had, the list's reference is the caller's.  Called with the lease lock.
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
 * Take a lease out of its space, where nobody finds it any more; false where that
 * was done before.  Whoever calls this refers to it, or to a ticket of it.
 */
bool
dlock_lease_unlist(DlockSpace *space, DlockLease *lease)
{
	bool		was_listed;
	bool		was_retimed;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	lease->record.finished = true;
	LWLockRelease(&space->lease_lock);
	/* while it is referred to; a single one is found by its ticket */
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
 * A lease becomes open, and its time begins to run, unless its session keeps it
 * alive: where it is attached, or the session waits with it, as an heir.  Standbys
 * do not count for it before its row is about to be written.  Called with the
 * lease lock.
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
	list_lease(space, lease);
}

/*
 * The first row of a lease is about to be written: standbys count from this moment
 * on.  No standby can have the row before it, and no heartbeat is sent for the lease
 * before the row is written, however long the tables are locked.  Called with the
 * lease lock.
 */
void
dlock_lease_begin_quorum(DlockLease *lease)
{
	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	pg_atomic_write_u64(&lease->confirmed, dlock_monotonic_now());
}

/*
 * Make a lease, which the caller uses and nobody can find yet, in a piece of memory
 * of that size and its role's name behind it; that is the current user's where it
 * is NULL.  The caller has checked for memory; what is put back is made without
 * that.
 */
static DlockLease *
make(DlockSpace *space, Oid role, const char *role_name, int64 ttl, Size size,
	 bool single)
{
	dsa_pointer self;
	DlockLease *lease;

	/* before the allocation, as it raises where the role is gone */
	if (role_name == NULL)
		role_name = GetUserNameFromId(GetUserId(), false);
	dlock_check_committed(space);
	self = dlock_allocate(role, size + strlen(role_name) + 1);
	lease = dlock_address(self);
	memset(lease, 0, size);
	lease->self = self;
	lease->space = space->self;
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

/* Make a lease of many tickets. */
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

/* Make one ticket's own, with a place for that ticket. */
DlockLease *
dlock_lease_make_single(DlockSpace *space, Oid role, const char *role_name,
						int64 ttl, const DlockKey *key)
{
	DlockLease *lease = make(space, role, role_name, ttl,
							 DLOCK_SINGLE_LEASE_SIZE +
							 offsetof(DlockLeaseTicket, key) +
							 dlock_key_size(key), true);

	lease->has_place = true;
	return lease;
}

/* How many of its tickets are GRANTED; called with the lease lock. */
uint32
dlock_lease_count_held(const DlockLease *lease)
{
	DlockLeaseTicket *ticket;

	if (!lease->single)
		return lease->held;
	ticket = dlock_lease_first_ticket(lease);
	return ticket && ticket->held ? 1 : 0;
}

/* The first of its tickets, or NULL; called with the lease lock. */
DlockLeaseTicket *
dlock_lease_first_ticket(const DlockLease *lease)
{
	if (!lease->single)
		return DsaPointerIsValid(lease->tickets.head) ?
			dlock_ticket_in_lease(lease->tickets.head) : NULL;
	return DsaPointerIsValid(lease->own_ticket) ?
		dlock_address(lease->own_ticket) : NULL;
}

DlockLeaseTicket *
dlock_lease_next_ticket(const DlockLease *lease, DlockLeaseTicket *ticket)
{
	dsa_pointer next = lease->single ? InvalidDsaPointer :
		dlock_place_in_lease(ticket)->link.next;

	return DsaPointerIsValid(next) ? dlock_ticket_in_lease(next) : NULL;
}

/* The first of those that a delay keeps in their locks, or NULL; likewise. */
DlockLeaseTicket *
dlock_lease_first_closed(const DlockLease *lease)
{
	return !lease->single && DsaPointerIsValid(lease->closed.head) ?
		dlock_ticket_in_lease(lease->closed.head) : NULL;
}

/* Called with the lease lock. */
TimestampTz
dlock_lease_opened_at(const DlockLease *lease)
{
	DlockLeaseTicket *ticket;

	if (!lease->single)
		return lease->opened_at;
	ticket = dlock_lease_first_ticket(lease);
	return ticket ? ticket->ticket.enqueued_at :
		(TimestampTz) pg_atomic_read_u64((pg_atomic_uint64 *) &lease->renewed_at);
}

/* The session that keeps it alive; 0: none does. */
int
dlock_lease_attached_pid(const DlockLease *lease)
{
	return !lease->single && lease->session != 0 &&
		dlock_lease_is_attached(lease) ? lease->pid : 0;
}

/*
 * Finding, with the rights that it takes
 */

/*
 * May the current user use a lease?  The role that opened it must be the one
 * it was, by name too: after a restore an OID can be somebody else's.
 */
void
dlock_lease_check_rights(const DlockLease *lease)
{
	const char *name;

	if (superuser())
		return;
	name = GetUserNameFromId(lease->role, true);
	if (name == NULL || strcmp(name, dlock_lease_role_name(lease)) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for lease %lld",
						(long long) lease->number),
				 errdetail("It belongs to role \"%s\" with OID %u, but these are not the same role any more.",
						   dlock_lease_role_name(lease), lease->role),
				 errhint("Ask a superuser.")));
	if (!has_privs_of_role(GetUserId(), lease->role))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for lease %lld",
						(long long) lease->number),
				 errdetail("It belongs to role \"%s\".",
						   dlock_lease_role_name(lease)),
				 errhint("Use a role that has the privileges of that role.")));
}

/*
 * The lease with this number, in use by the caller; NULL where it is gone.
 * Raises 42501 where it is not the current user's to use.
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
 * A renewal promises a full ttl from "start" on.  Where standbys count, that
 * takes a heartbeat that they have acknowledged, and that was sent after that,
 * or no longer before than a quarter of the ttl: wait for it, but not for long,
 * as the client must have time to ask again, and stop if that fails, too.
 * False where the lease is gone meanwhile.
 *
 * That the client lives is noted before the wait, or else the lease could run
 * out for want of a renewal while that is waiting.
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
	if (!move_deadline(lease))
		return false;
	until = start + Min(quarter, MAX_RENEW_MS * UINT64CONST(1000));
	if (!dlock_quorum_wait(space, dlock_lease_durability(lease), since,
						   until) &&
		dlock_lease_is_open(lease))
		raise_unconfirmed(lease);
	return true;
}

/*
 * Renew a lease.  Returns how many tickets it keeps, -1 where it is gone.
 * Raises 58030 where standbys count, and do not answer.
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
		result = (int) dlock_lease_count_tickets(lease);
	dlock_record_end_uses(before);
	return result;
}

/*
 * Exchange what a lease says of itself; false where it is gone.  Raises nothing.
 */
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
		dsa_pointer before = lease->info;

		lease->info = *info;
		*info = before;
		dlock_journal_mark(space, &lease->record);
	}
	dlock_lease_end_change(space, lease);
	return is_there;
}

/*
 * The time of a lease begins to run that a session has kept alive; false where it
 * did before.
 */
bool
dlock_lease_detach(DlockLease *lease)
{
	uint64		deadline = pg_atomic_read_u64(&lease->deadline);

	while (deadline >= DLOCK_NO_DEADLINE)
	{
		uint64		end;

		/* the ttl behind the deadline: another ttl moves that, too */
		pg_read_barrier();
		end = dlock_monotonic_now() + dlock_lease_ttl(lease);
		if (pg_atomic_compare_exchange_u64(&lease->deadline, &deadline, end))
			return true;
	}
	return false;
}

/*
 * Call back for every lease of a space, until the callback returns false, with the
 * lease lock held in this mode.
 */
void
dlock_lease_for_each(DlockSpace *space, LWLockMode mode,
					 bool (*callback) (DlockLease *, void *), void *arg)
{
	bool		more = true;

	LWLockAcquire(&space->lease_lock, mode);
	for (dsa_pointer link = space->leases.head;
		 more && DsaPointerIsValid(link);)
	{
		DlockLease *lease = dlock_lease_in_space(link);

		link = lease->in_space.next;
		more = callback(lease, arg);
	}
	LWLockRelease(&space->lease_lock);
}

/*
 * After a restart
 */

/* The lease that was put back with this number, in use; NULL: none. */
DlockLease *
dlock_lease_restored(DlockSpace *space, int64 number)
{
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	dlock_id_find(space, number, &lease, &ticket);
	return lease;
}

/*
 * A lease is put back.  No time passes for it before all are, however many
 * attempts that takes: see dlock_lease_begin_anew().
 */
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
 * Put back a lease that was read from its table.  It is found by its number, and
 * so not put back again, once nothing can fail any more.
 */
void
dlock_lease_restore(DlockLease *lease, bool delayed)
{
	DlockSpace *space = dlock_space_at(lease->space);

	dlock_id_insert(&lease->record);
	lease->record.has_row = true;
	dlock_lease_restart(space, lease, delayed);
}

typedef struct Demand
{
	int			durability;
	int64		ttl;
} Demand;

static bool
take_demand(DlockLease *lease, void *arg)
{
	Demand	   *demand = arg;
	int			durability = dlock_lease_durability(lease);

	demand->durability = Max(demand->durability, durability);
	if (durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE)
		demand->ttl = Min(demand->ttl, dlock_lease_ttl(lease));
	return true;
}

/*
 * The greatest synchronous_commit that a lease was opened with; and the least
 * ttl of those for which standbys count, PG_INT64_MAX where there are none.
 */
int
dlock_lease_greatest_durability(DlockSpace *space, int64 *least_ttl)
{
	Demand		demand = {SYNCHRONOUS_COMMIT_OFF, PG_INT64_MAX};

	dlock_lease_for_each(space, LW_SHARED, take_demand, &demand);
	*least_ttl = demand.ttl;
	return demand.durability;
}

static bool
begin_anew(DlockLease *lease, void *arg)
{
	uint64		now = dlock_monotonic_now();

	pg_atomic_write_u64(&lease->confirmed, *(uint64 *) arg);
	if (lease->delayed)
		lease->delay_ends = now + lease->delay;
	else
		pg_atomic_write_u64(&lease->deadline, now + honoured_for(lease));
	return true;
}

/*
 * From now on leases count that were put back: their time begins now.  The
 * standbys that count for them were last heard of by an answer to what was
 * sent at "confirmed".
 */
void
dlock_lease_begin_anew(DlockSpace *space, uint64 confirmed)
{
	dlock_lease_for_each(space, LW_EXCLUSIVE, begin_anew, &confirmed);
}
