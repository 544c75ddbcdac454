/*-------------------------------------------------------------------------
 *
 * cancel.c
 *	  Cancels a transaction that guards with a lock it has lost.
 *
 * Its commit would be refused.  Until then it would go on for nothing, and its
 * row locks would be in the way of whoever has the lock now.
 *
 * Nobody tells it: a lease can run out where nobody notices, and whoever told a
 * backend of its loss could reach it in its next transaction.  So the backend
 * looks for itself, at the tickets that its current transaction guards with:
 * before each statement, and while one goes on ten times a second, in the
 * handler of a timeout.  These are "watched": what a handler looks at needs no
 * lock, is mapped, and stays where it is for as long as it is watched.
 *
 * The handler cancels as pg_cancel_backend() does, but with a value of its own
 * in QueryCancelPending.  So what nobody has heeded by the time the guard
 * goes, at the end of its (sub)transaction, can be taken back, so that it hits
 * nothing later (I25); and it is told from a cancel by another process, which
 * is left alone, whichever came first.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "tcop/pquery.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "backend/inner.h"

/* So often do we look, in milliseconds */
#define LOOK_EVERY	100

/*
 * Before a statement, look at so many guards at most.  A loop of n statements
 * that guard with n locks would take n * n looks otherwise.
 */
#define MAX_LOOKED_AT	64

/* In QueryCancelPending: nobody else has canceled, who would have set 1 */
#define CANCELED_HERE	2

/* A ticket that the current transaction guards with */
typedef struct Watched
{
	const DlockKey *key;
	DlockTicket *ticket;
	DlockLease *lease;			/* that has it; or NULL */
} Watched;

bool		dlock_cancel_lost_guards = true;

/* The latest comes last.  The handler reads all of these. */
static Watched *volatile watched = NULL;
static volatile int num_watched = 0;
static int	max_watched = 0;

/* The handler has canceled, and a guard that is lost is watched since */
static volatile sig_atomic_t canceled = false;

static TimeoutId look_timeout = MAX_TIMEOUTS;	/* not registered */

static void explain_cancel(void *arg);

/* At the bottom of error_context_stack where a statement may be canceled */
static ErrorContextCallback explanation = {.callback = explain_cancel};

/*
 * The first that does not hold any more; NULL if all do.  Raises nothing, takes
 * no lock, and may be called by a signal handler.
 */
static const Watched *
find_lost(void)
{
	for (int i = 0; i < num_watched; i++)
	{
		const Watched *one = &watched[i];

		if (pg_atomic_read_u32(&one->ticket->state) != DLOCK_GRANTED ||
			(one->lease && dlock_lease_has_run_out(one->lease)))
			return one;
	}
	return NULL;
}

/*
 * Put one value in the place of another, which somebody may cancel meanwhile:
 * that sets 1, and stays.  A cancel always comes by SIGINT, but for recovery
 * conflicts, which no session with a guard can have.
 */
static void
exchange_cancel(sig_atomic_t before, sig_atomic_t after)
{
	sigset_t	interrupt;
	sigset_t	unblocked;

	sigemptyset(&interrupt);
	sigaddset(&interrupt, SIGINT);
	sigprocmask(SIG_BLOCK, &interrupt, &unblocked);
	if (QueryCancelPending == before)
		QueryCancelPending = after;
	sigprocmask(SIG_SETMASK, &unblocked, NULL);
}

/*
 * Is there something to cancel?  Whatever is parsed, planned or executed has a
 * snapshot, or waits for a lock.  So has a deferred trigger at COMMIT, and a
 * statement of a background worker.  Statements that end the transaction, or go
 * back to a savepoint, have none: they always work.
 */
static bool
is_cancelable(void)
{
	return !proc_exit_inprogress &&
		(ActiveSnapshotSet() ||
		 MyProc->waitStatus == PROC_WAIT_STATUS_WAITING ||
		 dlock_my_backend->wait_ticket != 0);
}

static void
put_explanation(void)
{
	ErrorContextCallback **place = &error_context_stack;

	while (*place && *place != &explanation)
		place = &(*place)->previous;
	*place = &explanation;
}

/*
 * The same in the handler; false if the explanation cannot be put into place now.
 *
 * A statement that is executed has it.  Before that, the handler can walk the
 * stack in a wait for a lock only: elsewhere an error may be on its way, and what
 * the stack points to freed.
 */
static bool
put_explanation_in_handler(void)
{
	if (MyProc->waitStatus == PROC_WAIT_STATUS_WAITING)
		put_explanation();
	else if (error_context_stack == NULL)
		error_context_stack = &explanation;
	else
		return ActivePortal != NULL || dlock_xact_has_statement();
	return true;
}

/* The timeout's handler; as with any signal, anything can be under way. */
static void
look_at_guards(void)
{
	if (!dlock_cancel_lost_guards || !is_cancelable() || find_lost() == NULL ||
		!put_explanation_in_handler())
		return;
	canceled = true;
	exchange_cancel(false, CANCELED_HERE);
	InterruptPending = true;
}

/*
 * After an error PostgreSQL has disabled all timeouts, even if only a savepoint
 * is lost.  The stack is what it was when the statement is over.
 */
static void
begin_looking(void)
{
	put_explanation();
	if (!get_timeout_active(look_timeout))
		enable_timeout_every(look_timeout,
							 TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
														 LOOK_EVERY),
							 LOOK_EVERY);
}

/* A guard is watched no more.  Raises nothing. */
static void
take_back(void)
{
	if (canceled && find_lost() == NULL)
	{
		canceled = false;
		exchange_cancel(CANCELED_HERE, false);
	}
	if (num_watched == 0 && get_timeout_active(look_timeout))
		disable_timeout(look_timeout, false);
}

/* Make sure that dlock_cancel_watch() cannot fail. */
void
dlock_cancel_prepare(void)
{
	Watched    *before = watched;
	Watched    *larger;
	int			more = Max(16, 2 * max_watched);

	if (look_timeout == MAX_TIMEOUTS)
		look_timeout = RegisterTimeout(USER_TIMEOUT, look_at_guards);
	if (num_watched < max_watched)
		return;
	larger = MemoryContextAllocHuge(TopMemoryContext, more * sizeof(Watched));
	if (before)
		memcpy(larger, before, num_watched * sizeof(Watched));
	watched = larger;
	max_watched = more;
	if (before)
		pfree(before);
}

/*
 * Watch a ticket that the transaction guards with, until the call of
 * dlock_cancel_unwatch() that belongs to this one: the latest goes first.
 */
void
dlock_cancel_watch(const DlockKey *key, DlockTicket *ticket, DlockLease *lease)
{
	Assert(num_watched < max_watched);
	watched[num_watched] = (Watched)
	{
		.key = key,
		.ticket = ticket,
		.lease = lease
	};
	pg_compiler_barrier();
	num_watched++;
	if (dlock_cancel_lost_guards)
		begin_looking();
}

void
dlock_cancel_unwatch(void)
{
	if (num_watched == 0)
		return;					/* dlock_cancel_stop() */
	num_watched--;
	take_back();
}

/* The commit begins, which itself looks at what it is guarded by. */
void
dlock_cancel_stop(void)
{
	if (num_watched == 0)
		return;
	num_watched = 0;
	take_back();
}

/* What goes with either of the messages below */
static int
explain(const Watched *lost)
{
	errdetail("This transaction guards with fence %lld, which is not held any more, so it could not commit.",
			  (long long) lost->ticket->number);
	errhint("Roll back, acquire the lock again, and repeat the transaction.");
	return 0;
}

/*
 * A statement begins: it fails if the transaction could not commit any more.  If
 * many guards are watched, the handler finds the loss.
 */
void
dlock_cancel_check(void)
{
	const Watched *lost;

	if (likely(num_watched == 0) || !dlock_cancel_lost_guards)
		return;
	lost = num_watched <= MAX_LOOKED_AT ? find_lost() : NULL;
	if (lost)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("canceling statement due to loss of lock \"%.*s\"",
						lost->key->length, lost->key->name),
				 explain(lost)));
	begin_looking();
}

/*
 * A statement begins that is never canceled.  If it goes back to a savepoint
 * after an error, what follows has to be looked after again.
 */
void
dlock_cancel_resume(void)
{
	if (unlikely(num_watched > 0) && dlock_cancel_lost_guards)
		begin_looking();
}

/* The handler has canceled: PostgreSQL would say, on request of the user. */
static void
explain_cancel(void *arg)
{
	const Watched *lost;

	if (likely(!canceled) || geterrcode() != ERRCODE_QUERY_CANCELED ||
		(lost = find_lost()) == NULL)
		return;
	errmsg("canceling statement due to loss of lock \"%.*s\"",
		   lost->key->length, lost->key->name);
	explain(lost);
}
