/*-------------------------------------------------------------------------
 *
 * xact.c
 *	  What is to be done at the end of a (sub)transaction.
 *
 * Transaction scope follows the nesting of subtransactions, and so do guards,
 * releases at commit, and announcements: "marks" is a stack of what is to be
 * done or undone, each with the level that it belongs to.  Marks are worked
 * off when PostgreSQL has released the transaction's own locks, so that the
 * next holder finds neither a row lock nor a write that it could not see.
 *
 * Resources acquired by an unfinished call are marks, too, so an error releases
 * them one by one (I12).
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

#include "backend/held.h"
#include "tables/tables.h"

typedef enum MarkKind
{
	MARK_UNDO,					/* undo transaction-scoped acquires */
	MARK_RELEASE,				/* at commit: undo session-scoped acquires */
	MARK_ARM,					/* at commit: arm the announcement */
	MARK_GUARD,					/* commit only while the ticket is held */
	MARK_TAKEN,					/* undo what the call under way has got */
	MARK_RESULT,				/* the same, of a call that is complete, if its
								 * statement is canceled or the session ends */
	MARK_REDIRECTED,			/* undo that call's redirection */
	MARK_DROPPED				/* nothing: it is about to leave the stack */
} MarkKind;

/* To be done at the end of the (sub)transaction of this level */
typedef struct Mark
{
	DlockHeld  *held;		/* a ticket of this session's, or ... */
	DlockLeaseTicket *of_lease; /* ... one of a lease's, referred to */
	MarkKind	kind;
	int			level;			/* transaction nesting level */
	uint32		count;			/* how often */
	bool		pinned;			/* MARK_GUARD: the commit is under way */
	uint64		claim;			/* MARK_ARM, MARK_TAKEN: of the announcement */
	int			depth;			/* MARK_TAKEN, MARK_RESULT: session_depth before */
	dsa_pointer redirection;	/* MARK_REDIRECTED: its announcement */
} Mark;

static Mark *marks = NULL;
static int	num_marks = 0;
static int	max_marks = 0;

/* A lock that guards are there for, for those who ask again and again */
typedef struct Guarded
{
	DlockKey	key;			/* hash key, must be first */
	uint32		marks;			/* MARK_GUARDs; the entry goes with the last */
} Guarded;

static HTAB *guarded = NULL;

/* The numbers of the tickets that have a MARK_GUARD: none has two */
static HTAB *guard_numbers = NULL;

/*
 * The memory of the statement that is executed, by which a call is known that
 * stands in it, and not in a function that it calls
 */
static MemoryContext statement = NULL;

/* Tickets whose announcements are armed as soon as the transaction is over */
static dlist_head arming_tickets = DLIST_STATIC_INIT(arming_tickets);

/* ... and those that leases have; each referred to */
typedef struct ArmingOfLease
{
	DlockLeaseTicket *ticket;
	uint64		claim;
} ArmingOfLease;

static ArmingOfLease *arming_of_leases = NULL;
static int	num_arming = 0;
static int	max_arming = 0;

static void at_resource_release(ResourceReleasePhase phase, bool isCommit,
								bool isTopLevel, void *arg);
static void at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
						   SubTransactionId parentSubid, void *arg);
static void at_xact_end(XactEvent event, void *arg);

/* Make sure that a mark can be pushed without allocating. */
void
dlock_xact_prepare(void)
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

static Guarded *
find_guarded(const DlockKey *key)
{
	return guarded == NULL ? NULL :
		hash_search(guarded, key, HASH_FIND, NULL);
}

/* Make the tables of what is guarded. */
static void
make_guard_tables(void)
{
	HASHCTL		info = {
		.keysize = sizeof(int64),
		.entrysize = sizeof(int64),
		.hcxt = TopMemoryContext
	};

	if (guarded == NULL)
		guarded = dlock_held_make_table("dlock guards", sizeof(Guarded));
	if (guard_numbers == NULL)
		guard_numbers = hash_create("dlock guarding tickets", 16, &info,
									HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
}

/*
 * Make sure that a MARK_GUARD for this lock and ticket can be pushed.  False if
 * the ticket has one: that stays for as long as a second one would.
 */
static bool
prepare_guarded(const DlockKey *key, int64 number)
{
	Guarded    *entry;
	bool		found;

	make_guard_tables();
	if (hash_search(guard_numbers, &number, HASH_FIND, NULL))
		return false;
	entry = hash_search(guarded, key, HASH_ENTER, &found);
	if (!found)
		entry->marks = 0;
	PG_TRY();
	{
		(void) hash_search(guard_numbers, &number, HASH_ENTER, NULL);
	}
	PG_CATCH();
	{
		if (!found)
			(void) hash_search(guarded, key, HASH_REMOVE, NULL);
		PG_RE_THROW();
	}
	PG_END_TRY();
	return true;
}

/* A MARK_GUARD goes. */
static void
forget_guarded(const DlockKey *key, int64 number)
{
	if (--find_guarded(key)->marks == 0)
		(void) hash_search(guarded, key, HASH_REMOVE, NULL);
	(void) hash_search(guard_numbers, &number, HASH_REMOVE, NULL);
}

/*
 * Push a mark for a ticket of this session's, or else for one that a lease
 * has.  dlock_xact_prepare() has been called.
 */
static void
push_mark(DlockHeld *held, DlockLeaseTicket *of_lease, MarkKind kind)
{
	int			level = GetCurrentTransactionNestLevel();
	Mark	   *top = num_marks > 0 ? &marks[num_marks - 1] : NULL;

	if (held && kind == MARK_RELEASE)
		held->releases++;
	/* a loop that asks again and again needs no more than one */
	if (top && kind != MARK_TAKEN && top->held == held &&
		top->of_lease == of_lease && top->level == level && top->kind == kind)
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
	if (kind == MARK_GUARD)
	{
		Mark	   *mark = &marks[num_marks - 1];

		find_guarded(mark_key(mark))->marks++;
		dlock_cancel_watch(mark_key(mark), mark_ticket(mark),
						   of_lease ? dlock_lease_of(of_lease) : NULL);
	}
}

/*
 * Count one more acquire of a ticket.  For transaction scope,
 * dlock_xact_prepare() has been called.
 */
void
dlock_xact_deepen(DlockHeld *held, DlockScope scope)
{
	if (scope == DLOCK_TRANSACTION)
	{
		dlock_held_set_depth(held, held->session_depth, held->xact_depth + 1);
		push_mark(held, NULL, MARK_UNDO);
	}
	else
		dlock_held_set_depth(held, held->session_depth + 1, held->xact_depth);
}

/*
 * Does a rollback undo what the mark is for?  A complete call keeps it, unless the
 * statement was canceled, which has changed its marks; or the session ends amid the
 * statement, and the client never gets the result.
 */
static bool
is_undone(const Mark *mark)
{
	return mark->kind == MARK_TAKEN ||
		(mark->kind == MARK_RESULT && proc_exit_inprogress);
}

/* Do what a mark was made for, and forget it: of a ticket that a lease has. */
static void
pop_mark_of_lease(const Mark *mark, bool is_commit)
{
	Assert(!mark->pinned);
	if (is_commit && mark->kind == MARK_RELEASE)
		(void) dlock_queue_end(mark->of_lease, 0);
	if (is_commit && mark->kind == MARK_ARM)
	{
		Assert(num_arming < max_arming);
		arming_of_leases[num_arming++] = (ArmingOfLease)
		{
			.ticket = mark->of_lease,
			.claim = mark->claim
		};
		return;
	}
	if (mark->claim != 0)
		dlock_announcement_unclaim(&mark->of_lease->ticket, mark->claim);
	if (is_undone(mark))
		dlock_lease_ticket_withdraw(mark->of_lease);
	if (mark->kind == MARK_REDIRECTED)
		dlock_lease_ticket_undo_redirect(mark->of_lease, mark->redirection);
	dlock_record_unref(&mark->of_lease->record);
}

/*
 * Undo one session-scoped acquire, before which the depth was as given; but not if
 * the statement itself has released it since.
 */
static void
undo_taken(DlockHeld *held, int depth_before)
{
	int			depth = held->session_depth;

	dlock_held_set_depth(held, Max(depth - 1, Min(depth, depth_before)),
						 held->xact_depth);
}

/* Take the top mark off the stack, and do or drop what it says. */
static void
pop_mark(bool is_commit)
{
	Mark		mark = marks[--num_marks];
	DlockHeld  *held = mark.held;

	/* a call that is under way ends before a commit */
	Assert(!is_commit || mark.kind != MARK_TAKEN);
	if (mark.kind == MARK_DROPPED)
		return;
	if (mark.kind == MARK_GUARD)
	{
		dlock_cancel_unwatch();
		forget_guarded(mark_key(&mark), mark_ticket(&mark)->number);
	}
	if (held == NULL)
	{
		pop_mark_of_lease(&mark, is_commit);
		return;
	}
	held->marks--;
	switch (mark.kind)
	{
		case MARK_UNDO:
			dlock_held_set_depth(held, held->session_depth,
								 held->xact_depth - mark.count);
			break;
		case MARK_RELEASE:
			held->releases -= mark.count;
			if (is_commit)
				dlock_held_set_depth(held, held->session_depth -
									 Min(mark.count, held->session_depth),
									 held->xact_depth);
			break;
		case MARK_TAKEN:
		case MARK_RESULT:
			if (is_undone(&mark))
				undo_taken(held, mark.depth);
			break;
		case MARK_REDIRECTED:
		case MARK_DROPPED:
		case MARK_GUARD:
			Assert(!mark.pinned);
			break;
		case MARK_ARM:
			if (!is_commit)
				dlock_announcement_unclaim(held->ticket, mark.claim);
			else if (held->arming == 0)
			{
				/* marks come from the top: the latest of a ticket counts */
				held->arming = mark.claim;
				dlist_push_head(&arming_tickets, &held->by_arming);
			}
			break;
	}
	dlock_held_settle(held);
}

/*
 * The call under way has got a ticket, and undoes that if it fails: it has acquired
 * one of this session's, in session scope; or claimed one that a lease has, and the
 * announcement that it has made for it, if any.  dlock_xact_prepare() has been
 * called.
 */
void
dlock_xact_take(DlockHeld *held, DlockLeaseTicket *of_lease, uint64 claim)
{
	push_mark(held, of_lease, MARK_TAKEN);
	marks[num_marks - 1].claim = claim;
	if (held)
		marks[num_marks - 1].depth = (int) held->session_depth - 1;
}

/* The same for the redirection of a lease's ticket, which is about to begin. */
void
dlock_xact_redirect(DlockLeaseTicket *of_lease, dsa_pointer announcement)
{
	push_mark(NULL, of_lease, MARK_REDIRECTED);
	marks[num_marks - 1].redirection = announcement;
}

/* Keep what a mark would undo, which has been dropped. */
static void
keep_mark(const Mark *mark)
{
	Assert(mark->kind == MARK_TAKEN || mark->kind == MARK_RESULT ||
		   mark->kind == MARK_REDIRECTED);
	if (mark->held)
	{
		mark->held->marks--;
		/* its statement may have released it since */
		dlock_held_settle(mark->held);
	}
	else
		dlock_record_unref(&mark->of_lease->record);
}

/* The call cannot fail any more: it keeps what these marks, the latest, are for. */
void
dlock_xact_keep(int count)
{
	while (count-- > 0)
	{
		Mark		mark = marks[--num_marks];

		keep_mark(&mark);
	}
}

/*
 * The same for a call of this function whose result is complete.  If the call
 * stands in the statement that is executed, the marks stay until that is over:
 * should it be canceled, its client has no result.
 */
void
dlock_xact_keep_result(const FmgrInfo *function, int count)
{
	CHECK_FOR_INTERRUPTS();
	if (function == NULL || function->fn_mcxt != statement)
		dlock_xact_keep(count);
	else
	{
		for (int i = num_marks - count; i < num_marks; i++)
			marks[i].kind = MARK_RESULT;
	}
}

/*
 * A statement begins to be executed.  If it is canceled, what its own calls have
 * got is undone.  Functions that it calls have statements of their own.
 *
 * Either dlock_xact_end_statement() or dlock_xact_fail_statement() must follow,
 * whatever happens: the next statement can have its memory at the same address.
 */
void
dlock_xact_begin_statement(DlockStatement *outer, MemoryContext memory)
{
	outer->memory = statement;
	outer->num_marks = num_marks;
	statement = memory;
}

/* Is a statement being executed?  May be called by a signal handler. */
bool
dlock_xact_has_statement(void)
{
	return statement != NULL;
}

void
dlock_xact_end_statement(const DlockStatement *outer)
{
	int			left = outer->num_marks;

	statement = outer->memory;
	if (likely(num_marks <= left))
		return;
	for (int i = left; i < num_marks; i++)
	{
		Mark		mark = marks[i];

		if (mark.kind != MARK_RESULT)
			continue;
		marks[i].kind = MARK_DROPPED;
		keep_mark(&mark);
	}
	for (int i = left; i < num_marks; i++)
	{
		if (marks[i].kind != MARK_DROPPED)
			marks[left++] = marks[i];
	}
	num_marks = left;
}

/*
 * The same in a PG_CATCH: what is to be undone or kept, the rollback that follows
 * does, as locks may be held here.
 */
void
dlock_xact_fail_statement(const DlockStatement *outer, bool is_canceled)
{
	statement = outer->memory;
	for (int i = outer->num_marks; is_canceled && i < num_marks; i++)
	{
		if (marks[i].kind == MARK_RESULT)
			marks[i].kind = MARK_TAKEN;
	}
}

/*
 * Undo what was acquired last: in transaction scope, or by the call under way.
 */
void
dlock_xact_undo_latest(void)
{
	Mark	   *top = &marks[num_marks - 1];

	Assert(num_marks > 0 &&
		   (top->kind == MARK_UNDO || top->kind == MARK_TAKEN));
	if (top->count == 1)
		pop_mark(false);
	else
	{
		top->count--;
		dlock_held_set_depth(top->held, top->held->session_depth,
							 top->held->xact_depth - 1);
	}
}

/*
 * Undo one session-scoped acquire of this ticket when the transaction has
 * committed, or end it where a lease has it; a rollback, to a savepoint too,
 * forgets about it.
 */
void
dlock_xact_release_at_commit(DlockSpace *space, int64 number)
{
	DlockHeld  *held = dlock_held_find_number(space, number);
	DlockLeaseTicket *ticket;
	int			before;

	dlock_xact_prepare();
	if (held == NULL)
		space = dlock_loaded_space();
	before = dlock_record_begin_uses();
	ticket = held ? NULL : dlock_lease_ticket_find(space, number);
	if (ticket)
	{
		push_mark(NULL, ticket, MARK_RELEASE);
		dlock_record_end_uses(before);
		return;
	}
	if (held == NULL || dlock_held_is_gone(held) ||
		held->session_depth <= held->releases)
		ereport(ERROR,
				(errcode(ERRCODE_DLOCK_LOST),
				 errmsg("neither this session nor a lease holds ticket %lld",
						(long long) number),
				 held && !dlock_held_is_gone(held) ?
				 errdetail("All its session-scoped acquires are released at commit already, or it has none.") :
				 errdetail("It was never there, or has ended.")));
	push_mark(held, NULL, MARK_RELEASE);
}

/*
 * Announcements
 */

static void
arm_announcements(void)
{
	while (!dlist_is_empty(&arming_tickets))
	{
		dlist_node *node = dlist_pop_head_node(&arming_tickets);
		DlockHeld  *held = dlist_container(DlockHeld, by_arming, node);

		uint64		claim = held->arming;

		held->arming = 0;
		dlock_announcement_arm(held->ticket, claim);
	}
	while (num_arming > 0)
	{
		ArmingOfLease arming = arming_of_leases[--num_arming];

		dlock_announcement_arm(&arming.ticket->ticket, arming.claim);
		dlock_record_unref(&arming.ticket->record);
	}
}

/*
 * Arm what committed transactions have enqueued.
 *
 * This is called when the memory of a transaction goes, because that is the
 * one place for an extension behind PostgreSQL's own processing of LISTEN.
 */
static void
at_memory_reset(void *arg)
{
	*(bool *) arg = false;
	arm_announcements();
}

/* Make sure that dlock_xact_arm() cannot fail. */
void
dlock_xact_prepare_arming(void)
{
	static bool registered = false; /* in this transaction */

	dlock_xact_prepare();
	if (num_arming + num_marks >= max_arming)
	{
		int			more = Max(16, 2 * (num_arming + num_marks));

		arming_of_leases = arming_of_leases == NULL ?
			MemoryContextAlloc(TopMemoryContext,
							   more * sizeof(*arming_of_leases)) :
			repalloc_huge(arming_of_leases,
						  (Size) more * sizeof(*arming_of_leases));
		max_arming = more;
	}
	if (!registered)
	{
		MemoryContextCallback *callback =
			MemoryContextAlloc(TopTransactionContext,
							   sizeof(MemoryContextCallback));

		callback->func = at_memory_reset;
		callback->arg = &registered;
		MemoryContextRegisterResetCallback(TopTransactionContext, callback);
		registered = true;
	}
}

/*
 * Have the announcement of a ticket of this session's, or else of one that a lease
 * has, armed after the commit of this transaction, which has this claim of it.
 * dlock_xact_prepare_arming() has been called.
 */
void
dlock_xact_arm(DlockHeld *held, DlockLeaseTicket *of_lease, uint64 claim)
{
	if (claim == 0)
		return;
	push_mark(held, of_lease, MARK_ARM);
	/* where the mark was there, it was for an announcement that is gone */
	marks[num_marks - 1].claim = claim;
}

/*
 * Guards
 */

/*
 * Let the (sub)transaction commit only while the ticket holds: one of this
 * session's, or one that a lease of a role has whose rights this one has.
 */
void
dlock_xact_guard(DlockSpace *space, const DlockKey *key, int64 fence)
{
	DlockHeld  *held = dlock_held_find_number(space, fence);
	DlockLeaseTicket *ticket = NULL;
	int			before = dlock_record_begin_uses();

	if (held && !dlock_key_equal(&held->name->key, key))
		held = NULL;
	if (held == NULL)
	{
		ticket = dlock_lease_ticket_find(space, fence);
		if (ticket && !dlock_key_equal(&ticket->key, key))
			ticket = NULL;
	}
	if (held == NULL && ticket == NULL &&
		dlock_queue_is_fence(space, key, fence))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("lock \"%.*s\" is held by another session",
						key->length, key->name),
				 errhint("Only the session that holds a session- or transaction-scoped lock can guard with it.")));
	if (ticket ? pg_atomic_read_u32(&ticket->ticket.state) != DLOCK_GRANTED :
		held == NULL || !dlock_held_is_granted(held))
		dlock_raise_lost(key, fence);
	dlock_xact_prepare();
	dlock_cancel_prepare();
	/* the last of these, as what it enters stands for a guard */
	if (prepare_guarded(key, fence))
		push_mark(held, ticket, MARK_GUARD);
	dlock_record_end_uses(before);
}

/* Has this transaction guarded the lock? */
bool
dlock_xact_has_guarded(const DlockKey *key)
{
	return find_guarded(key) != NULL;
}

/*
 * The transaction is about to commit: pin what it has guarded, so that no
 * ticket is granted those locks before the commit is visible (I24).  Raises
 * 55L01 if one was lost; the rollback then takes the pins away that were made
 * before it.
 */
static void
pin_guards(void)
{
	dlock_cancel_stop();
	for (int i = 0; i < num_marks; i++)
	{
		Mark	   *mark = &marks[i];

		if (mark->kind != MARK_GUARD || mark->pinned)
			continue;
		if (!dlock_queue_pin(mark_key(mark), mark_ticket(mark)))
			dlock_raise_lost(mark_key(mark), mark_ticket(mark)->number);
		mark->pinned = true;
	}
}

static void
unpin_guards(void)
{
	for (int i = 0; i < num_marks; i++)
	{
		bool		pinned = marks[i].pinned;

		marks[i].pinned = false;
		if (pinned)
			dlock_queue_unpin(mark_key(&marks[i]), mark_ticket(&marks[i]));
	}
}

/*
 * The end of a transaction
 */

static void
commit_marks(void)
{
	unpin_guards();
	while (num_marks > 0)
		pop_mark(true);
}

static void
roll_back_marks(void)
{
	int			level = GetCurrentTransactionNestLevel();

	if (level <= 1)
		unpin_guards();
	while (num_marks > 0 && marks[num_marks - 1].level >= level)
		pop_mark(false);
}

/*
 * The backend exits, and has rolled back.  Marks are left if a callback of another
 * module has broken off the rollback.
 */
void
dlock_xact_exit(void)
{
	unpin_guards();
	while (num_marks > 0)
		pop_mark(false);
	arm_announcements();
}

/*
 * What is done once PostgreSQL has released the transaction's own
 * locks.  The callback comes for every resource owner; the one that stands
 * for a whole (sub)transaction is told by its being current.
 */
static void
at_resource_release(ResourceReleasePhase phase, bool isCommit,
					bool isTopLevel, void *arg)
{
	/* a subtransaction's commit is at_subxact_end()'s */
	if (phase != RESOURCE_RELEASE_AFTER_LOCKS || num_marks == 0 ||
		CurrentResourceOwner != (isTopLevel ? TopTransactionResourceOwner :
								 CurTransactionResourceOwner) ||
		(isCommit && !isTopLevel))
		return;
	if (isCommit)
		commit_marks();
	else
		roll_back_marks();
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
	/* in an exit, it is not the transaction that has guarded */
	if (event == XACT_EVENT_PRE_COMMIT && !proc_exit_inprogress)
		pin_guards();
	if (event == XACT_EVENT_PRE_PREPARE && num_marks > 0)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot PREPARE a transaction with transaction-scoped locks, guards or announcements of dlock"),
				 errdetail("Transaction-scoped locks, guards, releases at commit and announcements belong to this session."),
				 errhint("Use COMMIT, or acquire in session scope before the transaction.")));
}
