/*-------------------------------------------------------------------------
 *
 * session.c
 *	  What this backend holds and waits for, and when it gives that back.
 *
 * A HeldTicket stands here for every ticket of this backend, from the moment
 * it joined a lock until it has left it.  It counts how often the session and
 * the transaction asked: the ticket ends when both counts are zero.  All of
 * this is the backend's own memory.
 *
 * Transaction scope follows the nesting of subtransactions: "marks" is a
 * stack of what is to be undone, each with the level that it belongs to.
 * Marks are worked off when PostgreSQL has released the transaction's own
 * locks, so that the next holder finds neither a row lock nor a write that it
 * could not see.
 *
 * Whatever the shared state and this need is allocated before the shared
 * state changes; afterwards nothing here can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/wait_event.h"

#include "dlock.h"

/*
 * How long a request that must not wait does so for the removal of a row, in
 * microseconds; it takes a fraction of this, if the worker works.
 */
#define HANDOVER_TIMEOUT	1000000

/* A name under which this backend has tickets */
typedef struct HeldName
{
	DlockKey	key;			/* hash key, must be first */
	dlist_head	tickets;		/* HeldTicket.by_name, latest first */
} HeldName;

typedef struct HeldTicket
{
	int64		number;
	HeldName   *name;
	DlockTicket *ticket;
	dlist_node	by_number;		/* in its bucket of "numbers" */
	dlist_node	by_name;		/* in HeldName.tickets */
	dlist_node	by_age;			/* in held_tickets, latest first */
	uint32		session_depth;	/* acquires not yet released */
	uint32		xact_depth;
	uint32		marks;			/* how many marks point here */
	bool		to_arm;			/* a MARK_ARM is among them, or ... */
	bool		arming;			/* ... the transaction with it has committed */
	dlist_node	by_arming;		/* in arming_tickets if arming */
} HeldTicket;

typedef enum MarkKind
{
	MARK_UNDO,					/* undo transaction-scoped acquires */
	MARK_RELEASE,				/* at commit: undo session-scoped acquires */
	MARK_ARM,					/* at commit: arm the announcement */
	MARK_GUARD					/* commit only while the ticket is held */
} MarkKind;

/* To be done at the end of the (sub)transaction of this level */
typedef struct Mark
{
	HeldTicket *held;			/* a ticket of this session's, or ... */
	DlockLeaseTicket *of_lease; /* ... one of a lease's, referred to */
	MarkKind	kind;
	int			level;			/* transaction nesting level */
	uint32		count;			/* how often */
	bool		pinned;			/* MARK_GUARD: the commit is under way */
} Mark;

static HTAB *names = NULL;

/*
 * HeldTicket by number.  A session's numbers mostly follow each other, so the
 * last bits of a number are its hash.
 */
static dlist_head *numbers = NULL;
static int	num_buckets = 0;	/* a power of 2, at least num_held */

static dlist_head held_tickets = DLIST_STATIC_INIT(held_tickets);
static int num_held = 0;

/* Tickets whose announcements are armed as soon as the transaction is over */
static dlist_head arming_tickets = DLIST_STATIC_INIT(arming_tickets);

/* ... and those that leases have; each referred to */
static DlockLeaseTicket **arming_of_leases = NULL;
static int	num_arming = 0;
static int	max_arming = 0;

static Mark *marks = NULL;
static int	num_marks = 0;
static int	max_marks = 0;

/* Memory for the next ticket, or NULL */
static HeldTicket *prepared_ticket = NULL;

/*
 * The name that was acquired last, or NULL.  No other entry is ever without a
 * ticket: this one stays until another takes its place.
 */
static HeldName *latest_name = NULL;

static void at_exit(int code, Datum arg);
static void at_resource_release(ResourceReleasePhase phase, bool isCommit,
								bool isTopLevel, void *arg);
static void at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
						   SubTransactionId parentSubid, void *arg);
static void at_xact_end(XactEvent event, void *arg);

static uint32
name_hash(const void *key, Size size)
{
	return ((const DlockKey *) key)->hash;
}

static int
name_compare(const void *a, const void *b, Size size)
{
	return dlock_key_equal(a, b) ? 0 : 1;
}

static void *
name_copy(void *to, const void *from, Size size)
{
	dlock_key_copy(to, from);
	return to;
}

/* Make the tables and register the callbacks; once per backend. */
static void
initialize(void)
{
	HASHCTL		info = {0};

	info.keysize = sizeof(DlockKey);
	info.entrysize = sizeof(HeldName);
	info.hcxt = TopMemoryContext;
	info.hash = name_hash;
	info.match = name_compare;
	info.keycopy = name_copy;
	if (names == NULL)
		names = hash_create("dlock names", 16, &info,
							HASH_ELEM | HASH_FUNCTION | HASH_COMPARE |
							HASH_KEYCOPY | HASH_CONTEXT);

	before_shmem_exit(at_exit, 0);
}

/*
 * Attach this backend at its first call.  The exit callback is there before
 * anything can be held.
 */
void
dlock_session_attach(void)
{
	static bool initialized = false;

	if (!initialized)
	{
		initialize();
		initialized = true;
	}
	dlock_attach();
}

static inline bool
is_gone(const HeldTicket *held)
{
	return pg_atomic_read_u32(&held->ticket->state) == DLOCK_GONE;
}

static inline bool
is_granted(const HeldTicket *held)
{
	return pg_atomic_read_u32(&held->ticket->state) == DLOCK_GRANTED;
}

static bool
is_forgettable(const HeldTicket *held)
{
	return is_gone(held) && held->session_depth == 0 && held->marks == 0;
}

static void
set_depth(HeldTicket *held, uint32 session_depth, uint32 xact_depth)
{
	held->session_depth = session_depth;
	held->xact_depth = xact_depth;
	pg_atomic_write_u32(&held->ticket->session_depth, session_depth);
	pg_atomic_write_u32(&held->ticket->xact_depth, xact_depth);
}

/* Make a name the latest.  The one before goes if it has no ticket. */
static void
set_latest_name(HeldName *name)
{
	HeldName   *before = latest_name;

	latest_name = name;
	if (before && before != name && dlist_is_empty(&before->tickets))
		hash_search(names, &before->key, HASH_REMOVE, NULL);
}

/* Forget a ticket that has left its lock, and free it. */
static void
forget(HeldTicket *held)
{
	Assert(held->marks == 0);
	if (held->arming)
		dlist_delete(&held->by_arming);
	/* a lease may have adopted it */
	if (held->ticket->session != 0)
		dlock_ticket_free(held->ticket);
	dlist_delete(&held->by_number);
	dlist_delete(&held->by_name);
	dlist_delete(&held->by_age);
	num_held--;
	if (dlist_is_empty(&held->name->tickets))
		set_latest_name(held->name);
	if (prepared_ticket == NULL)
		prepared_ticket = held;
	else
		pfree(held);
}

static dlist_head *
bucket_of(int64 number)
{
	return &numbers[number & (num_buckets - 1)];
}

static HeldTicket *
find_number(int64 number)
{
	dlist_iter	iter;

	if (numbers == NULL)
		return NULL;
	dlist_foreach(iter, bucket_of(number))
	{
		HeldTicket *held = dlist_container(HeldTicket, by_number, iter.cur);

		if (held->number == number)
			return held;
	}
	return NULL;
}

/* Make sure that there are buckets enough for one more ticket. */
static void
prepare_number(void)
{
	int			wanted = Max(num_buckets * 2, 16);
	dlist_head *before = numbers;
	dlist_iter	iter;

	if (num_held < num_buckets)
		return;
	numbers = MemoryContextAllocHuge(TopMemoryContext,
									 wanted * sizeof(dlist_head));
	num_buckets = wanted;
	for (int i = 0; i < num_buckets; i++)
		dlist_init(&numbers[i]);
	dlist_foreach(iter, &held_tickets)
	{
		HeldTicket *held = dlist_container(HeldTicket, by_age, iter.cur);

		dlist_push_head(bucket_of(held->number), &held->by_number);
	}
	if (before)
		pfree(before);
}

/*
 * End the ticket if nobody asks for it any more, and forget it.  A ticket that
 * was ended by force is remembered until the session has released it as often
 * as it acquired it, so that it hears of its loss.
 */
static void
settle(HeldTicket *held)
{
	if (held->session_depth == 0 && held->xact_depth == 0)
		(void) dlock_queue_leave(&held->name->key, held->ticket);
	if (is_forgettable(held))
		forget(held);
}

/*
 * The name's entry.  What is released was mostly acquired last, and many ask
 * for one name again and again: that takes no search.
 */
static HeldName *
find_entry(const DlockKey *key)
{
	if (latest_name && dlock_key_equal(&latest_name->key, key))
		return latest_name;
	return hash_search(names, key, HASH_FIND, NULL);
}

/* The name's entry if this backend has a ticket under it, NULL if not. */
static HeldName *
find_name(const DlockKey *key)
{
	HeldName   *name = find_entry(key);

	return name && !dlist_is_empty(&name->tickets) ? name : NULL;
}

/* The latest ticket under a name that is granted, in a mode other than slots */
static HeldTicket *
find_reentrant(HeldName *name)
{
	dlist_iter	iter;

	dlist_foreach(iter, &name->tickets)
	{
		HeldTicket *held = dlist_container(HeldTicket, by_name, iter.cur);

		if (is_granted(held) && held->ticket->mode != DLOCK_SLOTS)
			return held;
	}
	return NULL;
}

/*
 * Would a request, if it had to wait, wait for its own backend?  It would
 * behind a ticket of its own beside which it can never hold.  "number" is
 * that of its ticket; the tickets after it do not matter.
 */
static bool
blocks_itself(HeldName *name, const DlockRequest *request, int64 number)
{
	int64		permits = request->permits;
	dlist_iter	iter;

	dlist_foreach(iter, &name->tickets)
	{
		HeldTicket *held = dlist_container(HeldTicket, by_name, iter.cur);

		if (is_gone(held) || held->number >= number)
			continue;
		if (request->mode == DLOCK_EXCLUSIVE ||
			held->ticket->mode == DLOCK_EXCLUSIVE)
			return true;
		permits += held->ticket->permits;
	}
	return request->mode == DLOCK_SLOTS && permits > request->slots;
}

/* Make sure that a mark can be pushed without allocating. */
static void
prepare_mark(void)
{
	static bool registered = false;

	if (!registered)
	{
		RegisterXactCallback(at_xact_end, NULL);
		RegisterSubXactCallback(at_subxact_end, NULL);
		RegisterResourceReleaseCallback(at_resource_release, NULL);
		registered = true;
	}
	if (marks == NULL)
	{
		marks = MemoryContextAlloc(TopMemoryContext, 16 * sizeof(Mark));
		max_marks = 16;
	}
	else if (num_marks == max_marks)
	{
		marks = repalloc_huge(marks, (Size) max_marks * 2 * sizeof(Mark));
		max_marks *= 2;
	}
}

static const DlockKey *
mark_key(const Mark *mark)
{
	return mark->held ? &mark->held->name->key : &mark->of_lease->key;
}

static DlockTicket *
mark_ticket(const Mark *mark)
{
	return mark->held ? mark->held->ticket : &mark->of_lease->ticket;
}

/*
 * Push a mark for a ticket of this session's, or else for one that a lease
 * has.  prepare_mark() has been called.
 */
static void
push_mark(HeldTicket *held, DlockLeaseTicket *of_lease, MarkKind kind)
{
	int			level = GetCurrentTransactionNestLevel();
	Mark	   *top = num_marks > 0 ? &marks[num_marks - 1] : NULL;

	/* a loop that asks again and again needs no more than one */
	if (top && top->held == held && top->of_lease == of_lease &&
		top->level == level && top->kind == kind)
	{
		top->count++;
		return;
	}
	Assert(marks != NULL && num_marks < max_marks);
	marks[num_marks++] = (Mark)
	{
		.held = held,
		.of_lease = of_lease,
		.kind = kind,
		.level = level,
		.count = 1
	};
	if (held)
		held->marks++;
	else
		dlock_record_ref(&of_lease->record);
}

/* Count one more acquire of a ticket.  prepare_mark() has been called. */
static void
deepen(HeldTicket *held, DlockScope scope)
{
	if (scope == DLOCK_TRANSACTION)
	{
		set_depth(held, held->session_depth, held->xact_depth + 1);
		push_mark(held, NULL, MARK_UNDO);
	}
	else
		set_depth(held, held->session_depth + 1, held->xact_depth);
}

/* The same for a ticket that a lease has. */
static void
pop_mark_of_lease(const Mark *mark, bool is_commit)
{
	Assert(!mark->pinned);
	if (is_commit && mark->kind == MARK_RELEASE)
		(void) dlock_queue_end(mark->of_lease, 0);
	if (is_commit && mark->kind == MARK_ARM)
	{
		Assert(num_arming < max_arming);
		arming_of_leases[num_arming++] = mark->of_lease;
	}
	else
		dlock_record_unref(&mark->of_lease->record);
}

/* Take the top mark off the stack, and do or drop what it says. */
static void
pop_mark(bool is_commit)
{
	Mark		mark = marks[--num_marks];
	HeldTicket *held = mark.held;

	if (held == NULL)
	{
		pop_mark_of_lease(&mark, is_commit);
		return;
	}
	held->marks--;
	switch (mark.kind)
	{
		case MARK_UNDO:
			set_depth(held, held->session_depth,
					  held->xact_depth - mark.count);
			break;
		case MARK_RELEASE:
			if (is_commit)
				set_depth(held, held->session_depth -
						  Min(mark.count, held->session_depth),
						  held->xact_depth);
			break;
		case MARK_GUARD:
			Assert(!mark.pinned);
			break;
		case MARK_ARM:
			held->to_arm = false;
			if (is_commit && !held->arming)
			{
				held->arming = true;
				/* marks come from the top: the first comes last */
				dlist_push_head(&arming_tickets, &held->by_arming);
			}
			break;
	}
	settle(held);
}

/*
 * Allocate all that entering a ticket under this name will need.
 */
static void
prepare(const DlockRequest *request)
{
	HeldName   *name;
	bool		found;

	if (num_held >= dlock_max_locks_per_session)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("too many locks in this session"),
				 errdetail("The session has reached dlock.max_locks_per_session (%d).",
						   dlock_max_locks_per_session),
				 errhint("Release locks that are not needed, or increase dlock.max_locks_per_session.")));

	if (request->scope == DLOCK_TRANSACTION)
		prepare_mark();
	prepare_number();
	if (prepared_ticket == NULL)
		prepared_ticket = MemoryContextAlloc(TopMemoryContext,
											 sizeof(HeldTicket));
	if (latest_name && dlock_key_equal(&latest_name->key, &request->key))
		return;
	name = hash_search(names, &request->key, HASH_ENTER, &found);
	if (!found)
		dlist_init(&name->tickets);
	set_latest_name(name);
}

/* Enter a ticket that has joined its lock.  Cannot fail. */
static HeldTicket *
enter(DlockTicket *ticket)
{
	HeldTicket *held = prepared_ticket;

	held->number = ticket->number;
	held->name = latest_name;
	held->ticket = ticket;
	held->marks = 0;
	held->to_arm = held->arming = false;
	set_depth(held, 0, 0);
	dlist_push_head(bucket_of(held->number), &held->by_number);
	dlist_push_head(&held->name->tickets, &held->by_name);
	dlist_push_head(&held_tickets, &held->by_age);
	num_held++;
	prepared_ticket = NULL;
	return held;
}

static void
raise_self_wait(const DlockRequest *request)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_DEADLOCK_DETECTED),
			 errmsg("deadlock detected"),
			 errdetail("Process %d would wait for lock \"%.*s\" behind a ticket of its own.",
					   MyProcPid, request->key.length, request->key.name),
			 errhint("Release that ticket first, or ask for no more than is left.")));
}

/* The fence is not this backend's any more. */
static void
raise_lost(const DlockKey *key, int64 fence)
{
	int64		newer = dlock_queue_fence(key);

	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("lock \"%.*s\" with fence %lld is not held any more",
					key->length, key->name, (long long) fence),
			 newer > fence ?
			 errdetail("It is held with the newer fence %lld.",
					   (long long) newer) :
			 errdetail("It was released, or lost, or never held by this session."),
			 errhint("Acquire the lock again, and repeat the transaction.")));
}

static void
raise_mismatch(const DlockRequest *request, int32 slots)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("lock \"%.*s\" is in use with other slots",
					request->key.length, request->key.name),
			 slots == 0 ?
			 errdetail("It is held or waited for without slots.") :
			 errdetail("It is held or waited for with slots => %d.", slots),
			 errhint("All holders and waiters of a lock must give the same slots.")));
}

static void
check_upgrade(const DlockRequest *request, const DlockTicket *held)
{
	if (request->mode == DLOCK_EXCLUSIVE && held->mode == DLOCK_SHARED)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot acquire lock \"%.*s\" exclusively while holding it shared",
						request->key.length, request->key.name),
				 errdetail("An upgrade would overtake those who wait."),
				 errhint("Release the shared hold first.")));
}

static void
raise_other_permits(const DlockRequest *request, const DlockTicket *existing)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("the lease has asked for lock \"%.*s\" with other permits",
					request->key.length, request->key.name),
			 errdetail("Its ticket %lld takes permits => %d.",
					   (long long) existing->number, existing->permits),
			 errhint("Give the same permits, or another owner.")));
}

static void
raise_lost_place(const DlockRequest *request, int64 number)
{
	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("lost the place in the queue of lock \"%.*s\"",
					request->key.length, request->key.name),
			 errdetail("Ticket %lld was released by an administrator.",
					   (long long) number),
			 errhint("Acquire the lock again.")));
}

/* What a timeout leaves after some time */
static DlockTimeout
time_left(DlockTimeout timeout, uint64 start)
{
	int64		waited = (int64) (dlock_monotonic_now() - start);

	return timeout <= 0 ? timeout : Max(timeout - waited, 0);
}

/*
 * Wait for a ticket that was queued.  Whatever ends the wait other than the
 * grant ends the ticket: withdrawn, or handed on where the grant came at the
 * same moment.
 */
static bool
wait_or_leave(const DlockRequest *request, HeldTicket *held)
{
	DlockOutcome outcome;

	PG_TRY();
	{
		outcome = dlock_wait_for_grant(request, held->ticket);
		if (outcome == DLOCK_LOST)
			raise_lost_place(request, held->number);
	}
	PG_CATCH();
	{
		settle(held);
		PG_RE_THROW();
	}
	PG_END_TRY();
	if (outcome == DLOCK_TIMED_OUT)
		settle(held);
	return outcome == DLOCK_ACQUIRED;
}

/*
 * The same for a request that must not wait, and was queued only because the
 * lock is free already, but not yet for the next.
 */
static bool
wait_for_handover(const DlockRequest *request, HeldTicket *held)
{
	DlockRequest patient = *request;

	patient.timeout = HANDOVER_TIMEOUT;
	return wait_or_leave(&patient, held);
}

static bool
wait_for_turn(const DlockRequest *request, HeldTicket *held)
{
	return is_granted(held) ||
		(request->timeout == DLOCK_NO_WAIT ?
		 wait_for_handover(request, held) : wait_or_leave(request, held));
}

/*
 * Join the lock with a new ticket.  Returns NULL where the lock is busy and
 * the request is not to be queued.
 */
static HeldTicket *
join(DlockSpace *space, const DlockRequest *request, bool nowait)
{
	DlockTicket *ticket;
	HeldTicket *held;
	DlockJoin	outcome;
	int32		slots;

	prepare(request);
	ticket = dlock_ticket_make(space, request);
	while ((outcome = dlock_queue_join(space, request, ticket, nowait, false,
									   &slots, NULL)) == DLOCK_JOIN_NO_NUMBER)
		dlock_ticket_reserve(space, 0);
	if (outcome == DLOCK_JOIN_MISMATCH)
		raise_mismatch(request, slots);
	if (outcome == DLOCK_JOIN_BUSY)
		return NULL;
	held = enter(ticket);
	dlock_ticket_joined(ticket);
	return held;
}

/*
 * Acquire in session or transaction scope: returns the ticket's number, the
 * fence.  Where that was not to be had in the request's time, returns 0 with
 * *outcome set, and nothing is held that was not before.
 */
int64
dlock_session_acquire(DlockSpace *space, const DlockRequest *request,
					  DlockOutcome *outcome)
{
	bool		nowait = request->timeout == DLOCK_NO_WAIT;
	bool		would_block_itself = false;
	HeldName   *name;
	HeldTicket *held;

	/* an interrupt is taken while nothing depends on it */
	CHECK_FOR_INTERRUPTS();

	*outcome = DLOCK_ACQUIRED;
	name = find_name(&request->key);
	if (name)
	{
		held = find_reentrant(name);
		if (held && request->mode != DLOCK_SLOTS)
		{
			check_upgrade(request, held->ticket);
			if (request->scope == DLOCK_TRANSACTION)
				prepare_mark();
			deepen(held, request->scope);
			return held->number;
		}
		would_block_itself = blocks_itself(name, request, PG_INT64_MAX);
	}

	held = join(space, request, nowait || would_block_itself);
	if (held == NULL)
	{
		if (!nowait)
			raise_self_wait(request);
		dlock_count(DLOCK_COUNT_BUSY, 1);
		*outcome = DLOCK_BUSY;
		return 0;
	}
	if (!wait_for_turn(request, held))
	{
		*outcome = DLOCK_TIMED_OUT;
		return 0;
	}
	deepen(held, request->scope);
	dlock_journal_flush_removal(space, &request->key);
	return held->number;
}

/*
 * Arm what committed transactions have enqueued.
 *
 * This is called when the memory of a transaction goes, because that is the
 * one place for an extension behind PostgreSQL's own processing of LISTEN.
 * Raises nothing.
 */
static void
arm_announcements(void *arg)
{
	*(bool *) arg = false;
	while (!dlist_is_empty(&arming_tickets))
	{
		HeldTicket *held = dlist_container(HeldTicket, by_arming,
										   dlist_pop_head_node(&arming_tickets));

		held->arming = false;
		dlock_announcement_arm(held->ticket);
	}
	while (num_arming > 0)
	{
		DlockLeaseTicket *ticket = arming_of_leases[--num_arming];

		dlock_announcement_arm(&ticket->ticket);
		dlock_record_unref(&ticket->record);
	}
}

/* Make sure that arm_at_commit() cannot fail. */
static void
prepare_arming(void)
{
	static bool registered = false; /* in this transaction */

	prepare_mark();
	if (num_arming + num_marks >= max_arming)
	{
		max_arming = Max(16, 2 * (num_arming + num_marks));
		arming_of_leases = arming_of_leases == NULL ?
			MemoryContextAlloc(TopMemoryContext,
							   max_arming * sizeof(*arming_of_leases)) :
			repalloc_huge(arming_of_leases,
						  (Size) max_arming * sizeof(*arming_of_leases));
	}
	if (!registered)
	{
		MemoryContextCallback *callback =
			MemoryContextAlloc(TopTransactionContext,
							   sizeof(MemoryContextCallback));

		callback->func = arm_announcements;
		callback->arg = &registered;
		MemoryContextRegisterResetCallback(TopTransactionContext, callback);
		registered = true;
	}
}

/*
 * Have a ticket's announcement armed after the commit of this transaction.
 * prepare_arming() has been called.
 */
static void
arm_at_commit(HeldTicket *held)
{
	if (held->to_arm || held->arming ||
		dlock_announcement_is_armed(held->ticket))
		return;
	held->to_arm = true;
	push_mark(held, NULL, MARK_ARM);
}

/* The same for a ticket that a lease has. */
static void
arm_of_lease_at_commit(DlockLeaseTicket *ticket)
{
	if (DsaPointerIsValid(ticket->ticket.announcement) &&
		!dlock_announcement_is_armed(&ticket->ticket))
		push_mark(NULL, ticket, MARK_ARM);
}

/*
 * Take a place in the queue in session scope, without waiting, and return the
 * ticket's number.
 */
int64
dlock_session_enqueue(DlockSpace *space, const DlockRequest *request)
{
	HeldName   *name;
	HeldTicket *held;

	CHECK_FOR_INTERRUPTS();
	prepare_arming();
	name = find_name(&request->key);
	held = name && request->mode != DLOCK_SLOTS ? find_reentrant(name) : NULL;
	if (held)
	{
		check_upgrade(request, held->ticket);
		dlock_announcement_set(held->ticket,
							   dlock_announcement_make(space, request));
		dlock_announcement_event(held->ticket, DLOCK_EVENT_GRANTED);
	}
	else
		held = join(space, request, false);
	deepen(held, DLOCK_SESSION);
	arm_at_commit(held);
	if (is_granted(held))
		dlock_journal_flush_removal(space, &request->key);
	return held->number;
}

/*
 * For leases
 *
 * A blocking request waits with a ticket of this session's, as others do; when
 * it is granted, the lease adopts the ticket.  What is enqueued is the lease's
 * from the start.
 */

/*
 * Join the lock with a new ticket for request->lease, or find the one that
 * the lease has for the same request.  NULL where the lock is busy and the
 * request is not to be queued.  *held is the session's part in a new ticket
 * that is not adopted at once, NULL otherwise.
 */
static DlockLeaseTicket *
join_for_lease(DlockSpace *space, const DlockRequest *request, bool nowait,
			   bool adopt, HeldTicket **held, bool *created)
{
	DlockLeaseTicket *ticket;
	DlockLeaseTicket *existing;
	DlockJoin	outcome;
	int32		slots;

	*held = NULL;
	*created = false;
	if (!adopt)
		prepare(request);
	(void) dlock_record_prepare();
	ticket = dlock_lease_ticket_make(space, request);
	while ((outcome = dlock_queue_join(space, request, &ticket->ticket, nowait,
									   adopt, &slots, &existing)) == DLOCK_JOIN_NO_NUMBER)
		dlock_ticket_reserve(space, 0);
	switch (outcome)
	{
		case DLOCK_JOIN_EXISTS:
			check_upgrade(request, &existing->ticket);
			if (request->permits != existing->ticket.permits)
				raise_other_permits(request, &existing->ticket);
			return existing;
		case DLOCK_JOIN_BUSY:
			return NULL;
		case DLOCK_JOIN_MISMATCH:
			raise_mismatch(request, slots);
			break;
		case DLOCK_JOIN_LEASE_GONE:
			dlock_lease_raise_gone(request->lease->number);
			break;
		default:
			break;
	}
	*created = true;
	if (!adopt)
		*held = enter(&ticket->ticket);
	return ticket;
}

/* Let the lease have the ticket that this session was granted. */
static void
let_adopt(const DlockRequest *request, HeldTicket *held,
		  DlockLeaseTicket *ticket)
{
	PG_TRY();
	{
		dlock_lease_ticket_publish(ticket);
		if (!dlock_queue_adopt(ticket))
		{
			dlock_lease_ticket_unpublish(ticket);
			if (is_gone(held))
				raise_lost_place(request, held->number);
			dlock_lease_raise_gone(request->lease->number);
		}
	}
	PG_CATCH();
	{
		/* dshash raises a lack of memory with a lock of its own held */
		LWLockReleaseAll();
		settle(held);
		PG_RE_THROW();
	}
	PG_END_TRY();
	forget(held);
}

/*
 * Get a ticket for request->lease granted, or find it granted; the caller uses
 * it then, and has claimed it.  NULL where that was not to be had in the
 * request's time.
 */
static DlockLeaseTicket *
acquire_for_lease(DlockSpace *space, DlockRequest *request,
				  DlockOutcome *outcome)
{
	DlockTimeout timeout = request->timeout;
	bool		nowait = timeout == DLOCK_NO_WAIT;
	uint64		start = dlock_monotonic_now();

	for (;;)
	{
		HeldName   *name;
		HeldTicket *held;
		DlockLeaseTicket *ticket;
		bool		created;
		bool		blocked;

		CHECK_FOR_INTERRUPTS();
		request->timeout = time_left(timeout, start);
		name = find_name(&request->key);
		blocked = name && blocks_itself(name, request, PG_INT64_MAX);
		ticket = join_for_lease(space, request, nowait || blocked, false, &held,
								&created);
		*outcome = DLOCK_BUSY;
		if (ticket == NULL)
		{
			if (!nowait)
				raise_self_wait(request);
			dlock_count(DLOCK_COUNT_BUSY, 1);
			return NULL;
		}
		if (held)
		{
			*outcome = DLOCK_TIMED_OUT;
			if (!wait_for_turn(request, held))
				return NULL;
			let_adopt(request, held, ticket);
			*outcome = DLOCK_ACQUIRED;
			return ticket;
		}
		if (pg_atomic_read_u32(&ticket->ticket.state) == DLOCK_WAITING)
		{
			if (nowait)
				return NULL;
			if (name && blocks_itself(name, request, ticket->ticket.number))
				raise_self_wait(request);
		}
		*outcome = dlock_wait_for_grant(request, &ticket->ticket);
		if (*outcome == DLOCK_ACQUIRED && dlock_queue_claim(ticket))
			return ticket;
		if (*outcome == DLOCK_TIMED_OUT)
			return NULL;
		/* gone, so ask anew */
	}
}

/* Tickets for leases that a call has claimed */
typedef struct Taken
{
	DlockLeaseTicket **tickets;
	int			count;
} Taken;

/*
 * A call fails, or the backend exits: nothing stays of what it has claimed,
 * unless another call has, too.
 */
static void
take_back(int code, Datum arg)
{
	Taken	   *taken = (Taken *) DatumGetPointer(arg);

	/* dshash raises a lack of memory with a lock of its own held */
	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	for (int i = 0; i < taken->count; i++)
		dlock_lease_ticket_withdraw(taken->tickets[i]);
}

/*
 * Wait until what is known of a ticket is durable; raises 55L01 where it is
 * gone meanwhile, or is not granted though "granted" is set.
 */
static void
make_durable(DlockSpace *space, DlockLeaseTicket *ticket, bool granted)
{
	DlockState	state;

	dlock_journal_wait_for_all(space, &ticket->record);
	state = (DlockState) pg_atomic_read_u32(&ticket->ticket.state);
	if (!(state == DLOCK_GRANTED || (state == DLOCK_WAITING && !granted)))
		raise_lost(&ticket->key, ticket->ticket.number);
}

/*
 * Acquire for request->lease: returns the ticket's number, durably.  Where
 * that was not to be had in the request's time, returns 0 with *outcome set.
 */
int64
dlock_session_acquire_for_lease(DlockSpace *space, DlockRequest *request,
								DlockOutcome *outcome)
{
	DlockLeaseTicket *ticket = acquire_for_lease(space, request, outcome);
	Taken		taken = {&ticket, 1};

	if (ticket == NULL)
		return 0;
	PG_ENSURE_ERROR_CLEANUP(take_back, PointerGetDatum(&taken));
	make_durable(space, ticket, true);
	PG_END_ENSURE_ERROR_CLEANUP(take_back, PointerGetDatum(&taken));
	return ticket->ticket.number;
}

/*
 * The same for several locks, all or none; as dlock_session_acquire_all().
 */
bool
dlock_session_acquire_all_for_lease(DlockSpace *space, DlockRequest *request,
									DlockKey *const *keys, int count,
									int64 *fences, int *failed,
									DlockOutcome *outcome)
{
	DlockTimeout timeout = request->timeout;
	uint64		start = dlock_monotonic_now();
	Taken		taken = {
		.tickets = palloc(Max(count, 1) * sizeof(DlockLeaseTicket *)),
		.count = 0
	};

	PG_ENSURE_ERROR_CLEANUP(take_back, PointerGetDatum(&taken));
	while (taken.count < count)
	{
		int			i = taken.count;

		request->key = *keys[i];
		request->timeout = time_left(timeout, start);
		taken.tickets[i] = acquire_for_lease(space, request, outcome);
		if (taken.tickets[i] == NULL)
			break;
		fences[i] = taken.tickets[i]->ticket.number;
		taken.count++;
	}
	for (int i = 0; i < count && taken.count == count; i++)
		make_durable(space, taken.tickets[i], true);
	PG_END_ENSURE_ERROR_CLEANUP(take_back, PointerGetDatum(&taken));

	if (taken.count == count)
		return true;
	*failed = taken.count;
	take_back(0, PointerGetDatum(&taken));
	return false;
}

/*
 * Take a place in the queue for request->lease, durably and without waiting
 * for the turn, and return the ticket's number.
 */
int64
dlock_session_enqueue_for_lease(DlockSpace *space, const DlockRequest *request)
{
	DlockLeaseTicket *ticket;
	HeldTicket *held;
	bool		created;
	Taken		taken = {&ticket, 1};

	CHECK_FOR_INTERRUPTS();
	prepare_arming();
	do
		ticket = join_for_lease(space, request, false, true, &held, &created);
	while (!created && !dlock_queue_claim(ticket));
	PG_ENSURE_ERROR_CLEANUP(take_back, PointerGetDatum(&taken));
	if (created)
		dlock_lease_ticket_publish(ticket);
	else
		dlock_lease_ticket_redirect(ticket,
									dlock_announcement_make(space, request));
	make_durable(space, ticket, false);
	PG_END_ENSURE_ERROR_CLEANUP(take_back, PointerGetDatum(&taken));
	arm_of_lease_at_commit(ticket);
	return ticket->ticket.number;
}

/*
 * Waiting for a ticket that was enqueued
 */

static void
raise_no_ticket(int64 number)
{
	ereport(ERROR,
			(errcode(ERRCODE_DLOCK_LOST),
			 errmsg("ticket %lld is gone", (long long) number),
			 errdetail("It was released, or lost, or it was never this session's or a lease's."),
			 errhint("Enqueue again.")));
}

/*
 * Wait for a ticket of this session's or of a lease's.  An error ends the wait
 * and leaves the ticket queued.
 */
static bool
wait_for_ticket(DlockTicket *ticket, const DlockKey *key, DlockTimeout timeout)
{
	DlockRequest request;
	HeldName   *name = find_name(key);
	DlockOutcome outcome;

	memset(&request, 0, offsetof(DlockRequest, key));
	dlock_key_copy(&request.key, key);
	request.timeout = timeout;
	request.mode = ticket->mode;
	request.slots = ticket->slots;
	request.permits = ticket->permits;
	if (name && blocks_itself(name, &request, ticket->number))
		raise_self_wait(&request);
	outcome = dlock_wait_for_grant(&request, ticket);
	if (outcome == DLOCK_LOST)
		raise_no_ticket(ticket->number);
	return outcome == DLOCK_ACQUIRED;
}

/*
 * Wait for a lease's ticket.  True only once the grant is durable: it could
 * otherwise be gone after a crash, and another one the holder.
 */
static bool
wait_of_lease(DlockSpace *space, DlockLeaseTicket *ticket,
			  DlockTimeout timeout)
{
	if (DsaPointerIsValid(ticket->ticket.announcement))
	{
		prepare_arming();
		if (dlock_notify_is_mine(&ticket->ticket))
			(void) dlock_notify_listen();
		arm_of_lease_at_commit(ticket);
	}
	if (pg_atomic_read_u32(&ticket->ticket.state) == DLOCK_WAITING &&
		(timeout == DLOCK_NO_WAIT ||
		 !wait_for_ticket(&ticket->ticket, &ticket->key, timeout)))
		return false;
	make_durable(space, ticket, true);
	return true;
}

/*
 * Wait for a ticket that was enqueued.  False where the timeout passed; the
 * ticket stays queued then, and so it does when an error ends the wait.
 * Raises 55L01 where neither this session nor a lease has it (any more).
 */
bool
dlock_session_wait(DlockSpace *space, int64 number, DlockTimeout timeout)
{
	HeldTicket *held = find_number(number);

	CHECK_FOR_INTERRUPTS();
	if (held == NULL)
	{
		DlockLeaseTicket *ticket;

		(void) dlock_record_prepare();
		ticket = dlock_lease_ticket_find(space, number);
		if (ticket == NULL)
			raise_no_ticket(number);
		return wait_of_lease(space, ticket, timeout);
	}
	if (is_gone(held))
		raise_no_ticket(number);
	if (DsaPointerIsValid(held->ticket->announcement))
	{
		prepare_arming();
		if (dlock_notify_is_mine(held->ticket))
			(void) dlock_notify_listen();
		arm_at_commit(held);
	}
	if (!is_granted(held) &&
		(timeout == DLOCK_NO_WAIT ||
		 !wait_for_ticket(held->ticket, &held->name->key, timeout)))
		return false;
	dlock_journal_flush_removal(space, &held->name->key);
	return true;
}

/*
 * Undo the acquire that was made last, under this name and in this scope.
 * Raises nothing.
 */
static void
undo_last_acquire(const DlockKey *key, DlockScope scope)
{
	if (scope == DLOCK_TRANSACTION)
	{
		Mark	   *top = &marks[num_marks - 1];

		Assert(num_marks > 0 && top->kind == MARK_UNDO);
		if (top->count == 1)
			pop_mark(false);
		else
		{
			top->count--;
			set_depth(top->held, top->held->session_depth,
					  top->held->xact_depth - 1);
		}
	}
	else
		(void) dlock_session_release(key);
}

/*
 * Acquire all of several locks, or none.  The keys come without duplicates,
 * in the order that all callers keep.  Writes a fence for each and returns
 * true; or returns false where one was not to be had in the request's time,
 * its index in *failed; "outcome" says why.
 */
bool
dlock_session_acquire_all(DlockSpace *space, DlockRequest *request,
						  DlockKey *const *keys, int count, int64 *fences,
						  int *failed, DlockOutcome *outcome)
{
	DlockTimeout timeout = request->timeout;
	volatile int taken = 0;
	uint64		start = dlock_monotonic_now();

	PG_TRY();
	{
		while (taken < count)
		{
			request->key = *keys[taken];
			request->timeout = time_left(timeout, start);
			fences[taken] = dlock_session_acquire(space, request, outcome);
			if (*outcome != DLOCK_ACQUIRED)
				break;
			taken++;
		}
	}
	PG_CATCH();
	{
		/* dshash raises a lack of memory with a lock of its own held */
		LWLockReleaseAll();
		while (taken > 0)
			undo_last_acquire(keys[--taken], request->scope);
		PG_RE_THROW();
	}
	PG_END_TRY();

	if (taken == count)
		return true;
	*failed = taken;
	while (taken > 0)
		undo_last_acquire(keys[--taken], request->scope);
	return false;
}

/*
 * The latest ticket under a name that the session, as such, holds; or, if
 * "lost", one that it would hold had it not been ended by force.
 */
static HeldTicket *
find_session_hold(HeldName *name, bool lost)
{
	dlist_iter	iter;

	dlist_foreach(iter, &name->tickets)
	{
		HeldTicket *held = dlist_container(HeldTicket, by_name, iter.cur);

		if (held->session_depth > 0 &&
			(lost ? is_gone(held) : is_granted(held)))
			return held;
	}
	return NULL;
}

/* Undo one acquire; false, with a warning, where the lock was lost before. */
static bool
undo_session_acquire(HeldTicket *held)
{
	bool		lost = is_gone(held);

	if (lost)
		ereport(WARNING,
				(errcode(ERRCODE_DLOCK_LOST),
				 errmsg("lock \"%.*s\" was lost before this session released it",
						held->name->key.length, held->name->key.name),
				 errdetail("Ticket %lld was released by an administrator.",
						   (long long) held->number)));
	set_depth(held, held->session_depth - 1, held->xact_depth);
	settle(held);
	return !lost;
}

/*
 * Undo one session-scoped acquire of this name, the latest.  False, with a
 * warning, where there is none or where it was lost.
 */
bool
dlock_session_release(const DlockKey *key)
{
	HeldName   *name = find_name(key);
	HeldTicket *held = name ? find_session_hold(name, false) : NULL;

	if (name && held == NULL)
		held = find_session_hold(name, true);
	if (held)
		return undo_session_acquire(held);
	ereport(WARNING,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("this session does not hold lock \"%.*s\" in session scope",
					key->length, key->name),
			 name && find_reentrant(name) ?
			 errdetail("A transaction-scoped lock is released when the transaction ends.") : 0));
	return false;
}

/*
 * Undo one session-scoped acquire of the ticket with this number; or end it
 * where a lease has it.
 */
bool
dlock_session_release_ticket(DlockSpace *space, int64 number)
{
	HeldTicket *held = find_number(number);
	DlockLeaseTicket *ticket;
	int			before;
	bool		released;

	if (held && held->session_depth > 0)
		return undo_session_acquire(held);
	before = dlock_record_prepare();
	ticket = held ? NULL : dlock_lease_ticket_find(space, number);
	released = ticket && dlock_queue_end(ticket, 0);
	dlock_record_unuse(before);
	if (!released)
		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("neither this session nor a lease has ticket %lld",
						(long long) number)));
	return released;
}

/*
 * Undo one session-scoped acquire of this ticket when the transaction has
 * committed, or end it where a lease has it; a rollback, to a savepoint too,
 * forgets about it.
 */
void
dlock_session_release_at_commit(DlockSpace *space, int64 number)
{
	HeldTicket *held = find_number(number);
	DlockLeaseTicket *ticket;
	uint32		marked = 0;

	prepare_mark();
	(void) dlock_record_prepare();
	ticket = held ? NULL : dlock_lease_ticket_find(space, number);
	if (ticket)
	{
		push_mark(NULL, ticket, MARK_RELEASE);
		return;
	}
	for (int i = 0; i < num_marks; i++)
	{
		if (held && marks[i].held == held && marks[i].kind == MARK_RELEASE)
			marked += marks[i].count;
	}
	if (held == NULL || is_gone(held) || held->session_depth <= marked)
		ereport(ERROR,
				(errcode(ERRCODE_DLOCK_LOST),
				 errmsg("neither this session nor a lease holds ticket %lld",
						(long long) number),
				 held && !is_gone(held) ?
				 errdetail("All its session-scoped acquires are released at commit already, or it has none.") :
				 errdetail("It was never there, or has ended.")));
	push_mark(held, NULL, MARK_RELEASE);
}

/*
 * Drop every session-scoped hold and queued ticket of this session.  Returns
 * how many tickets these were.
 */
int64
dlock_session_release_all(void)
{
	dlist_node *node;
	dlist_node *next;
	int64		count = 0;

	if (dlist_is_empty(&held_tickets))
		return 0;
	for (node = dlist_head_node(&held_tickets); node; node = next)
	{
		HeldTicket *held = dlist_container(HeldTicket, by_age, node);

		next = dlist_has_next(&held_tickets, node) ?
			dlist_next_node(&held_tickets, node) : NULL;
		if (held->session_depth == 0)
			continue;
		if (!is_gone(held))
			count++;
		set_depth(held, 0, held->xact_depth);
		settle(held);
	}
	return count;
}

/* Does this backend hold the lock, in session or transaction scope? */
bool
dlock_session_holds(const DlockKey *key)
{
	HeldName   *name = find_name(key);
	dlist_iter	iter;

	if (name == NULL)
		return false;
	dlist_foreach(iter, &name->tickets)
	{
		if (is_granted(dlist_container(HeldTicket, by_name, iter.cur)))
			return true;
	}
	return false;
}

/*
 * Does anybody wait for a lock under which this backend has a ticket, other
 * than the one given?
 */
bool
dlock_session_blocks_others(int64 except)
{
	dlist_iter	iter;

	dlist_foreach(iter, &held_tickets)
	{
		HeldTicket *held = dlist_container(HeldTicket, by_age, iter.cur);

		if (held->number != except && dlock_queue_has_waiters(&held->name->key))
			return true;
	}
	return false;
}

/*
 * Let the (sub)transaction commit only while the ticket holds: one of this
 * session's, or one that a lease of a role has whose rights this one has.
 */
void
dlock_session_guard(DlockSpace *space, const DlockKey *key, int64 fence)
{
	HeldTicket *held = find_number(fence);
	DlockLeaseTicket *ticket = NULL;

	if (held && !dlock_key_equal(&held->name->key, key))
		held = NULL;
	if (held == NULL)
	{
		(void) dlock_record_prepare();
		ticket = dlock_lease_ticket_find(space, fence);
		if (ticket && !dlock_key_equal(&ticket->key, key))
			ticket = NULL;
	}
	if (held == NULL && ticket == NULL && dlock_queue_is_fence(key, fence))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("lock \"%.*s\" is held by another session",
						key->length, key->name),
				 errhint("Only the session that holds a session- or transaction-scoped lock can guard with it.")));
	if (ticket ? pg_atomic_read_u32(&ticket->ticket.state) != DLOCK_GRANTED :
		held == NULL || !is_granted(held))
		raise_lost(key, fence);
	prepare_mark();
	push_mark(held, ticket, MARK_GUARD);
}

/* Has this transaction guarded the lock? */
bool
dlock_session_has_guarded(const DlockKey *key)
{
	for (int i = 0; i < num_marks; i++)
	{
		if (marks[i].kind == MARK_GUARD &&
			dlock_key_equal(mark_key(&marks[i]), key))
			return true;
	}
	return false;
}

/*
 * The transaction is about to commit: pin what it has guarded, so that nobody
 * gets those locks before the commit is visible.  Raises 55L01 where one was
 * lost; the rollback then takes the pins away that were made before it.
 */
static void
pin_guards(void)
{
	for (int i = 0; i < num_marks; i++)
	{
		Mark	   *mark = &marks[i];

		if (mark->kind != MARK_GUARD)
			continue;
		if (!dlock_queue_pin(mark_key(mark), mark_ticket(mark)))
			raise_lost(mark_key(mark), mark_ticket(mark)->number);
		mark->pinned = true;
	}
}

static void
unpin_guards(void)
{
	for (int i = 0; i < num_marks; i++)
	{
		if (marks[i].pinned)
			dlock_queue_unpin(mark_key(&marks[i]), mark_ticket(&marks[i]));
		marks[i].pinned = false;
	}
}

/*
 * The transaction's end, once PostgreSQL has released the transaction's own
 * locks.  The callback comes for every resource owner; the one that stands
 * for a whole (sub)transaction is told by its being current.
 */
static void
at_resource_release(ResourceReleasePhase phase, bool isCommit,
					bool isTopLevel, void *arg)
{
	int			level;

	if (phase != RESOURCE_RELEASE_AFTER_LOCKS || num_marks == 0)
		return;
	if (isTopLevel)
	{
		if (CurrentResourceOwner != TopTransactionResourceOwner)
			return;
		level = 0;
	}
	else
	{
		/* a subtransaction's commit is at_subxact_end()'s */
		if (isCommit || CurrentResourceOwner != CurTransactionResourceOwner)
			return;
		level = GetCurrentTransactionNestLevel();
	}
	if (isTopLevel)
		unpin_guards();
	while (num_marks > 0 && marks[num_marks - 1].level >= level)
		pop_mark(isCommit);
}

/* A subtransaction's marks become its parent's when it commits. */
static void
at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
			   SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (event != SUBXACT_EVENT_COMMIT_SUB)
		return;
	for (int i = num_marks - 1; i >= 0 && marks[i].level >= level; i--)
		marks[i].level = level - 1;
}

static void
at_xact_end(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_PRE_COMMIT)
		pin_guards();
	if (event == XACT_EVENT_PRE_PREPARE && num_marks > 0)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot PREPARE a transaction with transaction-scoped locks, guards or announcements of dlock"),
				 errdetail("Transaction-scoped locks, guards, releases at commit and announcements belong to this session."),
				 errhint("Use COMMIT, or acquire in session scope before the transaction.")));
}

/*
 * Give everything back when the backend exits, however it exits.
 *
 * The callback was registered after PostgreSQL's own, and so comes first: the
 * open transaction is rolled back here, before any lock is handed on, so that
 * the next holder does not meet its row locks.  That takes the
 * transaction-scoped holds along.
 *
 * Should an error be raised in here, it ends the callback, and PostgreSQL goes
 * on with the ones that are left.  So each step registers this function again
 * and never repeats what has failed; what could not be given back then is
 * cleared away by the waiters, see dlock_queue_reap().
 */
static void
at_exit(int code, Datum arg)
{
	static bool rolled_back = false;

	if (!rolled_back)
	{
		rolled_back = true;
		before_shmem_exit(at_exit, 0);
		AbortOutOfAnyTransaction();
	}
	else if (!dlist_is_empty(&held_tickets))
	{
		before_shmem_exit(at_exit, 0);
		while (!dlist_is_empty(&held_tickets))
		{
			HeldTicket *held = dlist_container(HeldTicket, by_age,
											   dlist_pop_head_node(&held_tickets));

			(void) dlock_queue_leave(&held->name->key, held->ticket);
			dlock_ticket_free(held->ticket);
		}
	}
	else
	{
		dlock_ticket_free_spare();
		if (dlock_my_backend)
		{
			dlock_lease_detach_all();
			dlock_record_unuse(0);
		}
		dlock_detach();
	}
}
