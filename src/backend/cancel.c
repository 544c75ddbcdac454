/*-------------------------------------------------------------------------
 *
 * cancel.c
 *	  Cancels a transaction if a lock that it passed to dlock_guard() is lost.
 *
 * Without the cancel, the transaction would work in vain, because its commit
 * is refused.  Meanwhile, its row locks would block the lock's next holder.
 *
 * No other process notifies the backend: a lease can run out unnoticed, and a
 * notification could arrive in the next transaction.  So the backend watches
 * the tickets of its guards: it checks these tickets before each statement
 * and, in a timeout's handler, every 100 ms during a statement.  The handler
 * takes no lock, so a watched ticket must not be freed.
 *
 * The handler cancels as pg_cancel_backend() does, but stores CANCELED_HERE in
 * QueryCancelPending.  If the guard ends before the cancel takes effect, the
 * backend withdraws the cancel, so that no later statement is canceled (I25).
 * A cancel by another process stays.
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

/* Interval of the handler's checks, in milliseconds */
#define LOOK_EVERY	100

/* With more guards than this, statements skip the check: it is too slow */
#define MAX_LOOKED_AT	64

/* QueryCancelPending after a cancel by the handler; other cancels set 1 */
#define CANCELED_HERE	2

/* The ticket of one of the current transaction's guards */
typedef struct Watched
{
	const DlockKey *key;
	DlockTicket *ticket;
	DlockLease *lease;			/* the ticket's lease, or NULL */
} Watched;

bool		dlock_cancel_lost_guards = true;

/* Does a statement run, with "explanation" on error_context_stack? */
volatile bool dlock_cancel_explained = false;

/* The watched tickets, the latest last.  The handler reads this array. */
static Watched *volatile watched = NULL;
static volatile int num_watched = 0;
static int	max_watched = 0;

/*
 * The index of the watched ticket because of which the handler has canceled, or
 * -1.  A ticket that has lost its lock never holds it again.
 */
static volatile sig_atomic_t canceled_for = -1;

static TimeoutId look_timeout = MAX_TIMEOUTS;	/* not registered yet */

static void explain_cancel(void *arg);

/* The last entry of error_context_stack, while a statement may be canceled */
static ErrorContextCallback explanation = {.callback = explain_cancel};

/*
 * Returns the first watched ticket that no longer holds its lock, or NULL.
 * Takes no lock, raises no error, and may be called in a signal handler.
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
 * Change QueryCancelPending from "before" to "after", but keep the 1 that a
 * cancel by another process sets.  Only SIGINT can set 1 here, because a
 * session with a guard has no recovery conflict.
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
 * Is there something to cancel?  While a statement is parsed, planned or
 * executed, it has a snapshot or waits for a lock.  A deferred trigger at
 * COMMIT has a snapshot, too.  ROLLBACK and ROLLBACK TO have no snapshot, and
 * must always work.
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
 * Put the explanation on error_context_stack, in the handler.  Returns false
 * if the stack may hold freed entries.  It holds none in a lock wait.  While a
 * statement is executed, the explanation is on the stack already.
 */
static bool
put_explanation_in_handler(void)
{
	if (MyProc->waitStatus == PROC_WAIT_STATUS_WAITING)
		put_explanation();
	else if (error_context_stack == NULL)
		error_context_stack = &explanation;
	else
		return ActivePortal != NULL || dlock_cancel_explained;
	return true;
}

/* The timeout's handler, which can interrupt any code */
static void
look_at_guards(void)
{
	const Watched *lost;

	if (!dlock_cancel_lost_guards || !is_cancelable() ||
		(lost = find_lost()) == NULL || !put_explanation_in_handler())
		return;
	canceled_for = lost - watched;
	exchange_cancel(false, CANCELED_HERE);
	InterruptPending = true;
}

/*
 * Begin or resume the checks.  Any error, even in a savepoint, disables the
 * timeout, and the end of a statement can take the explanation off the stack.
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

/* Watch a ticket.  Each dlock_cancel_unwatch(false) ends the latest watch. */
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

/*
 * Stop watching the latest ticket.  If "all" is true, end all watches, because
 * pin_guards() checks the tickets next, for a commit.  Raises no error.
 */
void
dlock_cancel_unwatch(bool all)
{
	const Watched *lost;

	if (num_watched == 0)
		return;					/* a commit has ended all watches */
	num_watched = all ? 0 : num_watched - 1;
	if (canceled_for >= num_watched)
	{
		lost = find_lost();
		canceled_for = lost ? lost - watched : -1;
		if (lost == NULL)
			exchange_cancel(CANCELED_HERE, false);
	}
	if (num_watched == 0 && get_timeout_active(look_timeout))
		disable_timeout(look_timeout, false);
}

static int
explain(const Watched *lost)
{
	errdetail("This transaction guards with fence %lld, which is not held any more, so it could not commit.",
			  (long long) lost->ticket->number);
	errhint("Roll back, acquire the lock again, and repeat the transaction.");
	return 0;
}

/*
 * Called before each statement.  Raises an error if a guard is lost, unless
 * "may_fail" is false, as for COMMIT and ROLLBACK.  With more guards than
 * MAX_LOOKED_AT, only the handler checks.
 */
void
dlock_cancel_check(bool may_fail)
{
	const Watched *lost;

	if (likely(num_watched == 0) || !dlock_cancel_lost_guards)
		return;
	lost = may_fail && num_watched <= MAX_LOOKED_AT ? find_lost() : NULL;
	if (lost)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("canceling statement due to loss of lock \"%.*s\"",
						lost->key->length, lost->key->name),
				 explain(lost)));
	begin_looking();
}

/* If the handler has canceled, replace PostgreSQL's error message. */
static void
explain_cancel(void *arg)
{
	const Watched *lost;

	if (likely(canceled_for < 0) || geterrcode() != ERRCODE_QUERY_CANCELED ||
		(lost = find_lost()) == NULL)
		return;
	errmsg("canceling statement due to loss of lock \"%.*s\"",
		   lost->key->length, lost->key->name);
	explain(lost);
}
