/*-------------------------------------------------------------------------
 *
 * session.c
 *	  Session and transaction scope: acquiring, waiting and releasing.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"

#include "backend/held.h"
#include "tables/tables.h"

static void leave_dlock(void);

/* Can this backend hold locks? */
bool		dlock_session_attached = false;

/* False in dlock's background processes, which detach by themselves */
static bool attached_here = false;

/* A parallel worker must not become a session: raise 25000. */
void
dlock_session_check_parallel(void)
{
	if (IsInParallelMode())
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TRANSACTION_STATE),
				 errmsg("cannot use locks during a parallel operation"),
				 errhint("Functions that call dlock must be PARALLEL UNSAFE.")));
}

/*
 * Make this backend a session of dlock.  A background process of dlock is
 * attached already, but becomes a session if a user's trigger calls dlock.
 */
void
dlock_session_attach(void)
{
	static bool initialized = false;

	dlock_session_check_parallel();
	if (!initialized)
	{
		dlock_held_initialize();
		dlock_leave_at_exit(leave_dlock);
		initialized = true;
	}
	if (dlock_my_backend == NULL)
	{
		/* first: if an interrupt then ends the session, it must detach */
		attached_here = true;
		dlock_attach(false);
	}
	dlock_session_attached = true;
}

/*
 * Join the lock with a new ticket.  Returns NULL if the lock is busy and the
 * request must not queue.  If the session's spare ticket and entry fit the
 * request, nothing is allocated, so the memory limit is not checked.
 */
static DlockHeld *
join(DlockSpace *space, const DlockRequest *request, bool nowait)
{
	Oid			role = GetUserId();
	DlockTicket *ticket;
	DlockJoined joined;

	dlock_held_prepare(&request->key);
	if (request->scope == DLOCK_TRANSACTION)
		dlock_xact_prepare();
	if (unlikely(!dlock_spares_fit(request, role)))
		dlock_request_check_memory(space, role);
	ticket = dlock_ticket_make(space, request, role);
	while (joined = dlock_queue_join(space, request, ticket, nowait),
		   joined.outcome == DLOCK_JOIN_NO_NUMBER)
		dlock_ticket_reserve(space, 0);
	if (joined.outcome == DLOCK_JOIN_MISMATCH)
		dlock_raise_mismatch(request, joined.slots);
	if (joined.outcome == DLOCK_JOIN_BUSY)
		return NULL;
	return dlock_held_enter(ticket, request->scope, joined.lock);
}

/* The rest of confirm_grant(), if there is something to flush */
static void
flush_removal(DlockSpace *space, DlockHeld *held)
{
	PG_TRY();
	{
		dlock_journal_flush_removal(space, &held->name->key);
	}
	PG_CATCH();
	{
		LWLockReleaseAll();
		dlock_held_settle(held);
		PG_RE_THROW();
	}
	PG_END_TRY();
}

/*
 * Before a grant is used, flush the removal of an earlier ticket's row (I15).
 * If the flush fails, end the ticket, unless an earlier acquire holds it.
 */
static inline void
confirm_grant(DlockSpace *space, DlockHeld *held)
{
	if (unlikely(dlock_journal_removal(space, &held->name->key) !=
				 InvalidXLogRecPtr))
		flush_removal(space, held);
}

/*
 * Acquire in session or transaction scope.  Returns the fence, which is the
 * ticket's number.  Without a grant in time, returns 0, with *outcome set.
 */
int64
dlock_session_acquire(DlockSpace *space, const DlockRequest *request,
					  DlockOutcome *outcome)
{
	bool		would_block_itself = false;
	DlockRequest rest;
	DlockHeldName *name;
	DlockHeld  *held;
	bool		nowait;

	/* take interrupts before anything is acquired */
	CHECK_FOR_INTERRUPTS();

	*outcome = DLOCK_ACQUIRED;
	name = dlock_held_find_name(&request->key);
	if (name)
	{
		held = dlock_held_find_reentrant(name);
		if (held && request->mode != DLOCK_SLOTS)
		{
			/* if the ticket was enqueued, its grant can be unconfirmed */
			confirm_grant(space, held);
			dlock_request_check_upgrade(request, held->ticket);
			if (request->scope == DLOCK_TRANSACTION)
				dlock_xact_prepare();
			dlock_xact_deepen(held, request->scope);
			return held->number;
		}
		would_block_itself = dlock_held_blocks(name, request, PG_INT64_MAX);
	}

	if (unlikely(pg_atomic_read_u32(&space->loaded) == 0))
	{
		rest = *request;
		request = &rest;
		if (!dlock_request_wait_for_load(space, &rest, outcome))
			return 0;
	}
	nowait = request->timeout == DLOCK_NO_WAIT;
	held = join(space, request, nowait || would_block_itself);
	if (held == NULL)
	{
		if (!nowait)
			dlock_raise_self_wait(request);
		dlock_count(DLOCK_COUNT_BUSY, 1);
		*outcome = DLOCK_BUSY;
		return 0;
	}
	if (unlikely(!dlock_held_is_granted(held)) &&
		(*outcome = dlock_request_wait(request, held)) != DLOCK_ACQUIRED)
		return 0;
	confirm_grant(space, held);
	/* last, and cannot fail: a call that fails must not acquire anything */
	dlock_xact_deepen(held, request->scope);
	return held->number;
}

/*
 * Acquire several locks, all or none.  The keys have no duplicates, and are in
 * the order in which all calls acquire.  If a lock cannot be acquired in time,
 * returns false, with the lock's index in *failed and the reason in *outcome.
 * After true, except in transaction scope, the caller must drop the acquires'
 * marks with dlock_xact_keep_result().  If an error is raised, the rollback
 * releases the locks, without a warning, because a warning takes interrupts.
 */
bool
dlock_session_acquire_all(DlockSpace *space, DlockRequest *request,
						  DlockKey *const *keys, int count, int64 *fences,
						  int *failed, DlockOutcome *outcome)
{
	DlockTimeout timeout = request->timeout;
	uint64		start = dlock_monotonic_now();
	bool		of_lease = request->scope == DLOCK_LEASE;
	DlockLeaseTicket **tickets = palloc(Max(count, 1) *
										sizeof(DlockLeaseTicket *));

	for (int i = 0; i < count; i++)
	{
		request->key = *keys[i];
		request->timeout = dlock_request_time_left(timeout, start);
		dlock_xact_prepare();
		if (of_lease)
			tickets[i] = dlock_lessee_acquire(space, request, outcome);
		else
			fences[i] = dlock_session_acquire(space, request, outcome);
		if (*outcome != DLOCK_ACQUIRED)
		{
			*failed = i;
			while (i-- > 0)
				dlock_xact_undo_latest();
			return false;
		}
		if (of_lease)
			fences[i] = tickets[i]->ticket.number;
		else if (request->scope == DLOCK_SESSION)
			dlock_xact_take(dlock_held_find_number(space, fences[i]), NULL, 0);
	}
	/* after all grants, so that one flush makes many rows durable */
	for (int i = 0; of_lease && i < count; i++)
		dlock_lessee_make_durable(space, tickets[i], true);
	return true;
}

/* Queue in session scope, without waiting, and return the ticket's number. */
int64
dlock_session_enqueue(DlockSpace *space, const DlockRequest *request)
{
	DlockHeldName *name;
	DlockHeld  *held;

	CHECK_FOR_INTERRUPTS();
	dlock_xact_prepare_arming();
	name = dlock_held_find_name(&request->key);
	held = name && request->mode != DLOCK_SLOTS ?
		dlock_held_find_reentrant(name) : NULL;
	if (held)
	{
		dsa_pointer announcement;

		confirm_grant(space, held);
		dlock_request_check_upgrade(request, held->ticket);
		dlock_request_check_memory(space, dlock_request_role(request));
		announcement = dlock_announcement_make(space, request);
		dlock_announcement_replace(held->ticket, announcement, false);
		/* repeat past events for the new channel, which hears later ones */
		dlock_announcement_event(held->ticket, DLOCK_EVENT_GRANTED |
								 (held->ticket->wanted ? DLOCK_EVENT_WANTED : 0));
	}
	else
	{
		(void) dlock_load_name(space, &request->key, DLOCK_WAIT_FOREVER, NULL);
		dlock_contention_prepare(space);
		held = join(space, request, false);
		if (dlock_held_is_granted(held))
			confirm_grant(space, held);
	}
	/* these come last and cannot fail */
	dlock_xact_deepen(held, DLOCK_SESSION);
	dlock_xact_arm(held, NULL, dlock_announcement_my_claim(held->ticket));
	return held->number;
}

/*
 * Wait for an enqueued ticket.  Returns false after the timeout.  After a
 * timeout or an error, the ticket stays as it is.  Raises 55L01 if it is gone.
 */
bool
dlock_session_wait(DlockSpace *space, int64 number, DlockTimeout timeout)
{
	DlockHeld  *held = dlock_held_find_number(space, number);

	CHECK_FOR_INTERRUPTS();
	if (held == NULL)
	{
		DlockLeaseTicket *ticket;

		(void) dlock_record_begin_uses();
		space = dlock_loaded_space();
		ticket = dlock_lease_ticket_find(space, number);
		if (ticket == NULL)
			dlock_raise_no_ticket(number);
		return dlock_lessee_wait(space, ticket, timeout);
	}
	if (dlock_held_is_gone(held))
		dlock_raise_no_ticket(number);
	if (DsaPointerIsValid(held->ticket->announcement))
	{
		dlock_xact_prepare_arming();
		if (dlock_notify_is_mine(held->ticket))
			(void) dlock_notify_listen();
		dlock_xact_arm(held, NULL, dlock_announcement_claim(held->ticket));
	}
	if (!dlock_held_is_granted(held) &&
		(timeout == DLOCK_NO_WAIT ||
		 !dlock_request_wait_again(held->ticket, &held->name->key, timeout)))
		return false;
	dlock_journal_flush_removal(space, &held->name->key);
	return true;
}

/* Warn that a ticket was ended by force, while it held the lock or waited. */
static void
warn_of_loss(const DlockHeld *held)
{
	const DlockKey *key = &held->name->key;

	ereport(WARNING,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("%s \"%.*s\" was lost before this session released it",
					held->ticket->granted_at >= 0 ? "lock" :
					"the place in the queue of lock", key->length, key->name),
			 errdetail("Ticket %lld was released by an administrator.",
					   (long long) held->number)));
}

/* Undo an acquire.  Returns false, with a warning, if the ticket is gone. */
static bool
undo_session_acquire(DlockHeld *held)
{
	bool		lost = dlock_held_is_gone(held);

	if (lost)
		warn_of_loss(held);
	dlock_held_set_depth(held, held->session_depth - Min(held->session_depth, 1),
						 held->xact_depth);
	dlock_held_settle(held);
	return !lost;
}

/*
 * If this name was used last, and is held in session scope, release it like
 * dlock_session_release(), with the result in *released, and return true.
 */
bool
dlock_session_release_latest(const DlockSpace *space, const char *name,
							 Size length, bool *released)
{
	DlockHeldName *latest = dlock_held_find_latest(space, name, length);
	DlockHeld  *held = latest ? dlock_held_find_session_hold(latest) : NULL;

	if (held == NULL)
		return false;
	*released = undo_session_acquire(held);
	return true;
}

/* Undo a name's latest session-scoped acquire, or warn and return false. */
bool
dlock_session_release(const DlockKey *key)
{
	DlockHeldName *name = dlock_held_find_name(key);
	DlockHeld  *held = name ? dlock_held_find_session_hold(name) : NULL;

	if (held)
		return undo_session_acquire(held);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("this session does not hold lock \"%.*s\" in session scope",
					key->length, key->name),
			 name && dlock_held_find_reentrant(name) ?
			 errdetail("A transaction-scoped lock is released when the transaction ends.") :
			 errhint("The view dlock_locks shows its tickets. If a lease holds it, use dlock_release_ticket().")));
	return false;
}

/* Undo one session-scoped acquire of a ticket, or end a lease's ticket. */
bool
dlock_session_release_ticket(DlockSpace *space, int64 number)
{
	DlockHeld  *held = dlock_held_find_number(space, number);
	DlockLeaseTicket *ticket;
	int			before;
	bool		released;

	if (held && (held->session_depth > 0 ||
				 (held->xact_depth == 0 && !dlock_held_is_gone(held))))
		return undo_session_acquire(held);
	space = dlock_loaded_space();
	before = dlock_record_begin_uses();
	ticket = held ? NULL : dlock_lease_ticket_find(space, number);
	released = ticket && dlock_queue_end(ticket, 0);
	dlock_record_end_uses(before);
	if (!released)
		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("neither this session nor a lease has ticket %lld",
						(long long) number)));
	return released;
}

/* End session-scoped tickets, and watches.  Returns the number of tickets. */
int64
dlock_session_release_all(void)
{
	dlist_mutable_iter iter;
	int64		count = 0;

	dlist_foreach_modify(iter, &dlock_held_tickets)
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_age, iter.cur);

		if (!dlock_held_is_of_session(held))
			continue;
		if (!dlock_held_is_gone(held))
			count++;
		dlock_held_set_depth(held, 0, held->xact_depth);
		dlock_held_settle(held);
	}
	dlock_session_unwatch_all();
	return count;
}

bool
dlock_session_holds(const DlockKey *key)
{
	DlockHeldName *name = dlock_held_find_name(key);

	return name && dlock_held_is_holding(name);
}

/* Is this the number of a holder, of this session or any other? */
bool
dlock_session_check(DlockSpace *space, const DlockKey *key, int64 number)
{
	DlockHeld  *held = dlock_held_find_number(space, number);

	if (held == NULL || held->ticket->scope == DLOCK_LEASE ||
		!dlock_key_equal(&held->name->key, key))
		return dlock_queue_is_fence(space, key, number);
	if (!dlock_held_is_granted(held))
		return false;
	dlock_journal_flush_removal(space, key);
	return true;
}

/* Give everything back at exit, after the open transaction's rollback. */
static void
leave_dlock(void)
{
	/* first, because the marks point to tickets, which end below */
	dlock_xact_exit();
	while (!dlist_is_empty(&dlock_held_tickets))
	{
		dlist_node *node = dlist_pop_head_node(&dlock_held_tickets);
		DlockHeld  *held = dlist_container(DlockHeld, by_age, node);

		dlock_queue_leave(&held->name->key, held->ticket, held->lock);
		dlock_held_free_ticket(held->ticket);
	}
	dlock_session_unwatch_all();
	dlock_lease_detach_all();
	dlock_record_end_uses(0);
	dlock_free_spares();
	dlock_session_attached = false;
	if (attached_here)
		dlock_detach();
}
