/*-------------------------------------------------------------------------
 *
 * xact.c
 *	  Actions at the end of a (sub)transaction.
 *
 * "marks" is a stack of pending actions (undoing transaction-scoped acquires,
 * ending guards, releases at commit), each with its nesting level.  They run
 * after PostgreSQL has released the transaction's own locks, so that the next
 * holder sees all writes and waits for no row lock.  Announcements and watches
 * are armed later, because PostgreSQL handles LISTEN after all callbacks of a
 * commit.  Each resource that an unfinished call acquires gets a mark, too, so
 * that an error releases it (I12).
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
	MARK_RELEASE,				/* at commit: undo session-scoped acquires, or
								 * end a lease's ticket */
	MARK_ARM,					/* after the commit: arm an announcement */
	MARK_WATCH,					/* after the commit: arm a watch */
	MARK_GUARD,					/* commit only while the ticket holds */
	MARK_TAKEN,					/* undo an unfinished call's acquire */
	MARK_RESULT,				/* undo a complete call's acquire if its
								 * statement is canceled or the session ends */
	MARK_REDIRECTED,			/* undo an unfinished dlock_xact_redirect() */
	MARK_DROPPED				/* no action; about to leave the stack */
} MarkKind;

typedef struct Mark
{
	DlockHeld  *held;			/* this session's ticket, or ... */
	DlockLeaseTicket *of_lease; /* ... a lease's (has a reference), or ... */
	DlockWatch *watch;			/* ... a watch of this session */
	MarkKind	kind;
	int			level;			/* transaction nesting level; 0: committed */
	uint32		count;			/* number of acquires or calls */
	bool		pinned;			/* MARK_GUARD: has it pinned the ticket? */
	uint64		claim;			/* MARK_ARM, MARK_TAKEN: announcement claim */
	int			depth;			/* MARK_TAKEN, MARK_RESULT: depth before it */
	dsa_pointer redirection;	/* MARK_REDIRECTED: the new announcement */
} Mark;

static Mark *marks = NULL;
static int	num_marks = 0;
static int	max_marks = 0;

/* A guarded lock, for dlock_xact_has_guarded() */
typedef struct Guarded
{
	DlockKey	key;			/* hash key, must be first */
	uint32		marks;			/* number of MARK_GUARDs, at least 1 */
	int64		latest;			/* latest guard's ticket; 0 if rolled back */
} Guarded;

static HTAB *guarded = NULL;

/* Memory context of the running statement, and fn_mcxt of its own calls */
static MemoryContext statement = NULL;

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
	if (num_marks == max_marks)
	{
		Size		more = Max(16, 2 * max_marks);

		marks = marks ? repalloc_huge(marks, more * sizeof(Mark)) :
			MemoryContextAlloc(TopMemoryContext, more * sizeof(Mark));
		max_marks = more;
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

/*
 * Prepare a MARK_GUARD.  Returns true if the caller must push the mark next,
 * and false if the lock's latest MARK_GUARD already is of this ticket.
 */
static bool
prepare_guarded(const DlockKey *key, int64 number)
{
	Guarded    *entry;
	bool		found;

	if (guarded == NULL)
		guarded = dlock_held_make_table("dlock guards", sizeof(Guarded));
	entry = hash_search(guarded, key, HASH_ENTER, &found);
	if (!found)
		entry->marks = entry->latest = 0;
	return entry->latest != number;
}

static void
forget_guarded(const DlockKey *key, int64 number)
{
	Guarded    *entry = find_guarded(key);

	if (entry->latest == number)
		entry->latest = 0;
	if (--entry->marks == 0)
		(void) hash_search(guarded, key, HASH_REMOVE, NULL);
}

/* Push a mark for a ticket or a watch, after dlock_xact_prepare(). */
static void
push_mark(DlockHeld *held, DlockLeaseTicket *of_lease, DlockWatch *watch,
		  MarkKind kind)
{
	int			level = GetCurrentTransactionNestLevel();
	Mark	   *top = num_marks > 0 ? &marks[num_marks - 1] : NULL;

	if (held && kind == MARK_RELEASE)
		held->releases++;
	/* repeated calls for the same ticket share a mark */
	if (top && kind != MARK_TAKEN && top->held == held &&
		top->of_lease == of_lease && top->watch == watch &&
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
		.watch = watch,
		.kind = kind,
		.level = level,
		.count = 1
	};
	if (held)
		held->marks++;
	else if (of_lease)
		dlock_record_ref(&of_lease->record);
	if (kind == MARK_GUARD)
	{
		Mark	   *mark = &marks[num_marks - 1];
		Guarded    *entry = find_guarded(mark_key(mark));

		entry->marks++;
		entry->latest = mark_ticket(mark)->number;
		dlock_cancel_watch(mark_key(mark), mark_ticket(mark),
						   of_lease ? dlock_lease_of(of_lease) : NULL);
	}
}

/* Count an acquire.  In transaction scope, call dlock_xact_prepare() first. */
void
dlock_xact_deepen(DlockHeld *held, DlockScope scope)
{
	if (scope == DLOCK_TRANSACTION)
	{
		dlock_held_set_depth(held, held->session_depth, held->xact_depth + 1);
		push_mark(held, NULL, NULL, MARK_UNDO);
	}
	else
		dlock_held_set_depth(held, held->session_depth + 1, held->xact_depth);
}

/*
 * Does a rollback undo the mark's acquire?  It undoes a MARK_RESULT only if
 * the session ends.  A cancel has already changed MARK_RESULT to MARK_TAKEN.
 */
static bool
is_undone(const Mark *mark)
{
	return mark->kind == MARK_TAKEN ||
		(mark->kind == MARK_RESULT && proc_exit_inprogress);
}

/* end_mark() for a lease's ticket */
static void
end_mark_of_lease(const Mark *mark, bool is_commit)
{
	if (is_commit && mark->kind == MARK_RELEASE)
		(void) dlock_queue_end(mark->of_lease, 0);
	if (mark->claim != 0)
		dlock_announcement_end_claim(&mark->of_lease->ticket, mark->claim,
									 is_commit && mark->kind == MARK_ARM);
	if (is_undone(mark))
		dlock_lease_ticket_withdraw(mark->of_lease);
	if (mark->kind == MARK_REDIRECTED)
		dlock_lease_ticket_undo_redirect(mark->of_lease, mark->redirection);
	dlock_record_unref(&mark->of_lease->record);
}

/* Undo an acquire, unless its statement has released the ticket since. */
static void
undo_taken(DlockHeld *held, int depth_before)
{
	int			depth = held->session_depth;

	dlock_held_set_depth(held, Max(depth - 1, Min(depth, depth_before)),
						 held->xact_depth);
}

/* Perform a mark's action after a commit; drop or undo it after a rollback. */
static void
end_mark(int number)
{
	Mark		mark = marks[number];
	bool		is_commit = mark.level == 0;
	DlockHeld  *held = mark.held;

	/* guards are unpinned already, and no call is unfinished at a commit */
	Assert(!mark.pinned && (!is_commit || mark.kind != MARK_TAKEN));
	marks[number].kind = MARK_DROPPED;
	if (mark.kind == MARK_GUARD)
	{
		dlock_cancel_unwatch(false);
		forget_guarded(mark_key(&mark), mark_ticket(&mark)->number);
	}
	if (mark.kind == MARK_WATCH && is_commit)
		dlock_watch_arm(mark.watch);
	if (mark.kind == MARK_WATCH || mark.kind == MARK_DROPPED)
		return;
	if (held == NULL)
	{
		end_mark_of_lease(&mark, is_commit);
		return;
	}
	held->marks--;
	if (mark.kind == MARK_UNDO)
		dlock_held_set_depth(held, held->session_depth,
							 held->xact_depth - mark.count);
	if (mark.kind == MARK_RELEASE)
		held->releases -= mark.count;
	if (mark.kind == MARK_RELEASE && is_commit)
		dlock_held_set_depth(held, held->session_depth -
							 Min(mark.count, held->session_depth),
							 held->xact_depth);
	if (is_undone(&mark))
		undo_taken(held, mark.depth);
	/* arm nothing if the session has released the ticket since the call */
	if (mark.kind == MARK_ARM && (!is_commit || held->session_depth > 0))
		dlock_announcement_end_claim(held->ticket, mark.claim, is_commit);
	dlock_held_settle(held);
}

static void
pop_mark(void)
{
	end_mark(num_marks - 1);
	num_marks--;
}

/* Remove the dropped marks at index "from" and above. */
static void
remove_dropped(int from)
{
	int			left = from;

	for (int i = from; i < num_marks; i++)
	{
		if (marks[i].kind != MARK_DROPPED)
			marks[left++] = marks[i];
	}
	num_marks = left;
}

/*
 * Push a mark.  If the unfinished call fails, the mark undoes a session-scoped
 * acquire of this session's ticket, or ends the claims on a lease's ticket and
 * on its announcement.  The caller has called dlock_xact_prepare().
 */
void
dlock_xact_take(DlockHeld *held, DlockLeaseTicket *of_lease, uint64 claim)
{
	push_mark(held, of_lease, NULL, MARK_TAKEN);
	marks[num_marks - 1].claim = claim;
	if (held)
		marks[num_marks - 1].depth = (int) held->session_depth - 1;
}

/* Push a mark, before a lease's ticket gets another announcement. */
void
dlock_xact_redirect(DlockLeaseTicket *of_lease, dsa_pointer announcement)
{
	push_mark(NULL, of_lease, NULL, MARK_REDIRECTED);
	marks[num_marks - 1].redirection = announcement;
}

/* Keep what a dropped mark would have undone.  "mark" is its copy. */
static void
keep_mark(const Mark *mark)
{
	Assert(mark->kind == MARK_TAKEN || mark->kind == MARK_RESULT ||
		   mark->kind == MARK_REDIRECTED);
	if (mark->held)
	{
		mark->held->marks--;
		/* the statement may have released the ticket since */
		dlock_held_settle(mark->held);
	}
	else
		dlock_record_unref(&mark->of_lease->record);
}

/* The call cannot fail any more: drop its marks, which are the latest. */
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
 * A call is complete.  If the executed statement itself made the call, the
 * marks stay until its end, because a cancel before that discards the result.
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
 * Begin a statement.  A cancel undoes the statement's own calls, but not calls
 * in functions, because these have statements of their own.  Each statement
 * must end with dlock_xact_end_statement() or dlock_xact_fail_statement(), as
 * the memory context of another statement can have the same address later.
 */
void
dlock_xact_begin_statement(DlockStatement *outer, MemoryContext memory)
{
	outer->memory = statement;
	outer->num_marks = num_marks;
	statement = memory;
	dlock_cancel_explained = true;
}

void
dlock_xact_end_statement(const DlockStatement *outer)
{
	statement = outer->memory;
	dlock_cancel_explained = statement != NULL;
	if (likely(num_marks <= outer->num_marks))
		return;
	for (int i = outer->num_marks; i < num_marks; i++)
	{
		Mark		mark = marks[i];

		if (mark.kind != MARK_RESULT)
			continue;
		marks[i].kind = MARK_DROPPED;
		keep_mark(&mark);
	}
	remove_dropped(outer->num_marks);
}

/* After an error, leave the undoing to the rollback: LWLocks may be held. */
void
dlock_xact_fail_statement(const DlockStatement *outer, bool is_canceled)
{
	statement = outer->memory;
	dlock_cancel_explained = statement != NULL;
	for (int i = outer->num_marks; is_canceled && i < num_marks; i++)
	{
		if (marks[i].kind == MARK_RESULT)
			marks[i].kind = MARK_TAKEN;
	}
}

/* Undo the acquire of the latest mark, a MARK_UNDO or MARK_TAKEN. */
void
dlock_xact_undo_latest(void)
{
	Mark	   *top = &marks[num_marks - 1];

	Assert(num_marks > 0 &&
		   (top->kind == MARK_UNDO || top->kind == MARK_TAKEN));
	if (top->count == 1)
		pop_mark();
	else
	{
		top->count--;
		dlock_held_set_depth(top->held, top->held->session_depth,
							 top->held->xact_depth - 1);
	}
}

/*
 * Push a mark: after the commit, undo one session-scoped acquire of a ticket,
 * or end a lease's ticket.  A rollback, also to a savepoint, drops the mark.
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
	if (ticket == NULL && (held == NULL || dlock_held_is_gone(held) ||
						   held->session_depth <= held->releases))
		ereport(ERROR,
				(errcode(ERRCODE_DLOCK_LOST),
				 errmsg("neither this session nor a lease holds ticket %lld",
						(long long) number),
				 held && !dlock_held_is_gone(held) ?
				 errdetail("All its session-scoped acquires are released at commit already, or it has none.") :
				 errdetail("It was never there, or has ended.")));
	push_mark(held, ticket, NULL, MARK_RELEASE);
	dlock_record_end_uses(before);
}

/* Run committed MARK_ARMs and MARK_WATCHes, now that LISTEN was handled. */
static void
at_memory_reset(void *arg)
{
	*(bool *) arg = false;
	while (num_marks > 0 && marks[num_marks - 1].level == 0)
		pop_mark();
}

/* Make sure that dlock_xact_arm() and dlock_xact_watch() cannot fail. */
void
dlock_xact_prepare_arming(void)
{
	static bool registered = false; /* in this transaction */

	dlock_xact_prepare();
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
 * After the commit, arm the announcement of this session's ticket or a lease's
 * ticket.  The caller has called dlock_xact_prepare_arming().
 */
void
dlock_xact_arm(DlockHeld *held, DlockLeaseTicket *of_lease, uint64 claim)
{
	if (claim == 0)
		return;
	push_mark(held, of_lease, NULL, MARK_ARM);
	/* if an earlier call pushed this mark, that call's announcement is gone */
	marks[num_marks - 1].claim = claim;
}

/* Arm a watch after the commit.  After a rollback, the watch stays silent. */
void
dlock_xact_watch(DlockWatch *watch)
{
	Mark	   *top = num_marks > 0 ? &marks[num_marks - 1] : NULL;

	/* reuse a dropped mark: a loop of watch and unwatch needs only one */
	if (top && top->kind == MARK_DROPPED &&
		top->level == GetCurrentTransactionNestLevel())
	{
		top->kind = MARK_WATCH;
		top->watch = watch;
		top->held = NULL;
		top->of_lease = NULL;
		top->count = 1;
	}
	else
		push_mark(NULL, NULL, watch, MARK_WATCH);
}

/*
 * Drop the marks of a watch that is about to end, or of all watches.  Dropped
 * marks stay on the stack, because num_marks of a DlockStatement counts them.
 */
void
dlock_xact_unwatch(const DlockWatch *watch)
{
	for (int i = 0; i < num_marks; i++)
	{
		if (marks[i].kind == MARK_WATCH &&
			(watch == NULL || marks[i].watch == watch))
			marks[i].kind = MARK_DROPPED;
	}
}

/*
 * Let the (sub)transaction commit only while this ticket holds.  It must be
 * this session's ticket, or that of a lease that the caller may use.
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
	/* last, because an entry means that there is a guard */
	if (prepare_guarded(key, fence))
		push_mark(held, ticket, NULL, MARK_GUARD);
	dlock_record_end_uses(before);
}

bool
dlock_xact_has_guarded(const DlockKey *key)
{
	return find_guarded(key) != NULL;
}

/*
 * Pin the guards' tickets, so that no next ticket is granted until the commit
 * is visible (I24).  Raises 55L01 if a ticket is lost.  A rollback unpins all.
 */
static void
pin_guards(void)
{
	dlock_cancel_unwatch(true);
	for (int i = 0; i < num_marks; i++)
	{
		Mark	   *mark = &marks[i];

		if (mark->kind != MARK_GUARD || mark->pinned)
			continue;
		mark->pinned = dlock_queue_pin(mark_key(mark), mark_ticket(mark));
		if (!mark->pinned ||
			!dlock_queue_is_durable(mark_key(mark), mark_ticket(mark)))
			dlock_raise_lost(mark_key(mark), mark_ticket(mark)->number);
	}
}

static void
unpin_guards(void)
{
	for (int i = 0; i < num_marks; i++)
	{
		if (!marks[i].pinned)
			continue;
		marks[i].pinned = false;
		dlock_queue_unpin(mark_key(&marks[i]), mark_ticket(&marks[i]));
	}
}

static void
commit_marks(void)
{
	unpin_guards();
	for (int i = num_marks - 1; i >= 0; i--)
	{
		marks[i].level = 0;
		/* at_memory_reset() ends MARK_ARM and MARK_WATCH */
		if (marks[i].kind != MARK_ARM && marks[i].kind != MARK_WATCH)
			end_mark(i);
	}
	remove_dropped(0);
}

static void
roll_back_marks(void)
{
	int			level = GetCurrentTransactionNestLevel();

	if (level <= 1)
		unpin_guards();
	while (num_marks > 0 && marks[num_marks - 1].level >= level)
		pop_mark();
}

/* End the marks that are left after another module's error in a rollback. */
void
dlock_xact_exit(void)
{
	unpin_guards();
	while (num_marks > 0)
		pop_mark();
}

/* Called for each resource owner, but acts only for the transaction's own. */
static void
at_resource_release(ResourceReleasePhase phase, bool isCommit,
					bool isTopLevel, void *arg)
{
	/* at_subxact_end() handles a subtransaction's commit */
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

/* Hand a committed subtransaction's marks to its parent. */
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
	dlock_lone_call_end(event == XACT_EVENT_PRE_COMMIT);
	/* a transaction that PostgreSQL commits during an exit has no guards */
	if (event == XACT_EVENT_PRE_COMMIT && !proc_exit_inprogress)
		pin_guards();
	if (event == XACT_EVENT_PRE_PREPARE)
		remove_dropped(0);
	if (event == XACT_EVENT_PRE_PREPARE && num_marks > 0)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot PREPARE a transaction with transaction-scoped locks, guards, announcements or watches of dlock"),
				 errdetail("Transaction-scoped locks, guards, releases at commit, announcements and watches belong to this session."),
				 errhint("Use COMMIT, or acquire in session scope before the transaction.")));
}
