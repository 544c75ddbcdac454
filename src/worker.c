/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The background worker: writes what leases change, ends them when they
 *	  are due, and sends announcements.
 *
 * There is at most one per database.  Whoever has something for it wakes it,
 * and asks the postmaster to start one where there is none (launcher.c).  It
 * stays for as long as somebody could notice that it went, see is_missed();
 * otherwise it leaves, so that it does not stand in the way of DROP DATABASE,
 * nor of the workers of other databases.  It may die at any time: all that it
 * works on is in shared memory, and the next worker goes on with it.
 *
 * Its own memory has, besides, when to look at each lease again.  A lease can
 * only be due later than that, as renewals are not told to the worker.
 *
 * The worker waits for nobody, so that heartbeats and expiry are never late:
 * not for standbys, whose answers it looks at; for a lock on the tables only so
 * long, between two looks at what is due; and what waits longer by its nature,
 * NOTIFY and VACUUM, other processes do for it.  Nor does it do anything for
 * longer than a step.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "commands/extension.h"
#include "lib/pairingheap.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/procarray.h"
#include "tcop/tcopprot.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "process.h"

#define MAX_RETRY_MS	2000	/* between attempts that fail */
#define PATIENCE_MS		1000	/* for a lock that it does not get */
#define POLL_MS			10		/* standbys owe an answer */
#define LEAVE_MS		1000	/* a worker that is told to go writes that long */
#define LOOK_MS			2000	/* between looks whether the extension is there */
#define RETRY_START_MS	100		/* of a sender that has not come */
#define STEP_US			5000	/* at one thing, while others may be due */
#define SOON_MS			5000	/* a lease that is due then is waited for */
#define FIRST_PAUSE_MS	100		/* after a worker that died young, and then
								 * twice as long */
#define MAX_PAUSE_MS	5000
#define YOUNG_MS		10000

/* The moment when nothing is due */
#define NEVER			DLOCK_NO_DEADLINE

PGDLLEXPORT void dlock_worker_main(Datum arg);

/* When a lease is to be looked at again */
typedef struct Watch
{
	dsa_pointer key;			/* the lease; hash key, must be first */
	DlockLease *lease;			/* referred to */
	uint64		due;			/* monotonic microseconds */
	pairingheap_node node;
} Watch;

/* A grant to be announced as soon as it is durable */
typedef struct Grant
{
	dsa_pointer key;			/* the ticket; hash key, must be first */
	DlockLeaseTicket *ticket;	/* referred to */
	int			durability;		/* the level, and so the heap, that it is in */
	XLogRecPtr	lsn;
	uint64		turn;			/* among those of one position */
	pairingheap_node node;
} Grant;

static DlockSpace *my_space = NULL;
static bool extension_is_gone = false;
static bool gives_way = false;	/* to a library of another layout */
static bool leaves = false;		/* as nobody could notice */

static HTAB *watches = NULL;
static pairingheap *watches_by_due = NULL;

/* each once, and by durability and position */
static HTAB *grants = NULL;
static pairingheap *grants_by_lsn[SYNCHRONOUS_COMMIT_REMOTE_APPLY + 1];

/* Where learning of leases stands */
static DlockLease *learning_at = NULL;

/* Set by a signal */
static volatile sig_atomic_t leaving = false;

static uint64 next_due(void);
static bool is_wanted(void);

/* What the worker refers to is not to be kept by one that is gone. */
static void
let_go(void)
{
	HASH_SEQ_STATUS status;
	Watch	   *watch;
	Grant	   *grant;

	dlock_journal_let_go();
	dlock_lease_stop_visit(my_space, &learning_at);
	if (grants)
	{
		hash_seq_init(&status, grants);
		while ((grant = hash_seq_search(&status)) != NULL)
			dlock_record_unref(&grant->ticket->record);
	}
	if (watches)
	{
		hash_seq_init(&status, watches);
		while ((watch = hash_seq_search(&status)) != NULL)
			dlock_record_unref(&watch->lease->record);
	}
	grants = watches = NULL;
}

/*
 * Let the next worker come; and see to it that one does, if something is to
 * be done, or was posted while this one still seemed to be there.  Where this
 * one leaves as nobody could notice, that is: if somebody could by now.
 *
 * Letting go can raise an error, where a segment of memory cannot be mapped.
 * So it comes last: what stays referred to keeps some memory, and no more.
 */
static void
resign(int code, Datum arg)
{
	/* what it may have held as it failed */
	LWLockReleaseAll();
	(void) dlock_office_leave(my_space, DLOCK_SENDER);
	if (leaves || leaving)
		pg_atomic_write_u32(&my_space->worker_deaths, 0);
	pg_atomic_write_u64(&my_space->next_due,
						leaves ? next_due() : 0);
	if (!dlock_office_leave(my_space, DLOCK_WORKER))
		return;
	if (!extension_is_gone && !gives_way &&
		(leaves ? is_wanted() : dlock_worker_is_needed(my_space)))
		(void) dlock_office_start(my_space, DLOCK_WORKER);
	let_go();
}

/*
 * Watching leases
 */

static int
compare_due(const pairingheap_node *a, const pairingheap_node *b, void *arg)
{
	uint64		due_a = pairingheap_const_container(Watch, node, a)->due;
	uint64		due_b = pairingheap_const_container(Watch, node, b)->due;

	/* the first is the one that compares as the greatest */
	return due_a < due_b ? 1 : due_a > due_b ? -1 : 0;
}

static void
watch(DlockLease *lease)
{
	uint64		now;
	uint64		due;
	bool		found;
	Watch	   *watch = hash_search(watches, &lease->record.link.self,
									HASH_ENTER, &found);

	if (found)
		return;
	dlock_record_ref(&lease->record);
	watch->lease = lease;
	now = dlock_monotonic_now();
	due = dlock_lease_deadline(lease);
	watch->due = due == DLOCK_NO_DEADLINE ? now + lease->ttl : due;
	pairingheap_add(watches_by_due, &watch->node);
	dlock_heartbeat_watch(lease);
}

/* A lease is gone. */
void
dlock_worker_unwatch(DlockLease *lease)
{
	Watch	   *watch = watches == NULL ? NULL :
		hash_search(watches, &lease->record.link.self, HASH_FIND, NULL);

	if (watch == NULL)
		return;
	pairingheap_remove(watches_by_due, &watch->node);
	dlock_heartbeat_unwatch(lease);
	(void) hash_search(watches, &lease->record.link.self, HASH_REMOVE, NULL);
	dlock_record_unref(&lease->record);
}

/* When the next lease is due */
static uint64
next_due(void)
{
	return pairingheap_is_empty(watches_by_due) ? NEVER :
		pairingheap_container(Watch, node,
							  pairingheap_first(watches_by_due))->due;
}

/* End the leases that are due, or as many of them as make a step. */
static void
expire(void)
{
	uint64		until = dlock_monotonic_now() + STEP_US;
	uint64		now;

	while (now = dlock_monotonic_now(), now < until && next_due() <= now)
	{
		Watch	   *first = pairingheap_container(Watch, node,
												  pairingheap_first(watches_by_due));
		uint64		due = dlock_lease_expire(first->lease, until);

		if (due == 0)
			dlock_worker_unwatch(first->lease);
		else
		{
			pairingheap_remove(watches_by_due, &first->node);
			first->due = due;
			pairingheap_add(watches_by_due, &first->node);
		}
	}
}

/*
 * Announcing grants
 */

static int
compare_grants(const pairingheap_node *a, const pairingheap_node *b, void *arg)
{
	const Grant *grant_a = pairingheap_const_container(Grant, node, a);
	const Grant *grant_b = pairingheap_const_container(Grant, node, b);

	/* the first is the one that compares as the greatest */
	if (grant_a->lsn != grant_b->lsn)
		return grant_a->lsn < grant_b->lsn ? 1 : -1;
	return grant_a->turn < grant_b->turn ? 1 :
		grant_a->turn > grant_b->turn ? -1 : 0;
}

/* One that is remembered already may be wanted at another level by now. */
static void
remember_grant(DlockLeaseTicket *ticket, XLogRecPtr lsn)
{
	static uint64 turn = 0;
	Grant	   *grant;
	bool		found;

	if (ticket->announced || !DsaPointerIsValid(ticket->ticket.announcement) ||
		pg_atomic_read_u32(&ticket->ticket.state) != DLOCK_GRANTED)
		return;
	grant = hash_search(grants, &ticket->ticket.link.self, HASH_ENTER, &found);
	if (found)
		pairingheap_remove(grants_by_lsn[grant->durability], &grant->node);
	else
		dlock_record_ref(&ticket->record);
	grant->ticket = ticket;
	grant->durability = ticket->durability;
	grant->lsn = lsn;
	grant->turn = ++turn;
	pairingheap_add(grants_by_lsn[grant->durability], &grant->node);
}

/* Let a grant be announced, and forget it. */
static void
announce(Grant *grant)
{
	DlockLeaseTicket *ticket = grant->ticket;

	dlock_lease_ticket_announce(ticket);
	pairingheap_remove(grants_by_lsn[grant->durability], &grant->node);
	(void) hash_search(grants, &grant->key, HASH_REMOVE, NULL);
	dlock_record_unref(&ticket->record);
}

/*
 * Let those grants be announced that are durable at their enqueuer's level, or
 * as many of them as make a step.  Returns when to come again.
 */
static uint64
announce_grants(void)
{
	uint64		until = dlock_monotonic_now() + STEP_US;

	for (int level = 0; level < (int) lengthof(grants_by_lsn); level++)
	{
		while (!pairingheap_is_empty(grants_by_lsn[level]))
		{
			Grant	   *first = pairingheap_container(Grant, node,
													  pairingheap_first(grants_by_lsn[level]));

			if (level != SYNCHRONOUS_COMMIT_OFF)
				XLogFlush(first->lsn);
			if (!dlock_journal_is_acknowledged(first->lsn, level))
				break;
			announce(first);
			if (dlock_monotonic_now() >= until)
				return 0;
		}
	}
	return hash_get_num_entries(grants) == 0 ? NEVER :
		dlock_monotonic_now() + POLL_MS * 1000;
}

/*
 * Learning of leases and grants
 */

/* A record was written, or was found written by the worker before. */
static void
at_write(DlockRecord *record, bool over, XLogRecPtr lsn)
{
	DlockLeaseTicket *ticket;
	DlockLease *lease;

	if (over)
		return;
	if (record->is_lease)
	{
		watch((DlockLease *) record);
		return;
	}
	ticket = dlock_record_ticket(record);
	lease = dlock_lease_of(ticket);
	if (lease->single)
		watch(lease);
	remember_grant(ticket, lsn);
}

static void
find_ticket(DlockLeaseTicket *ticket, void *arg)
{
	if (ticket->record.has_row && !ticket->record.listed)
		remember_grant(ticket, pg_atomic_read_u64(&ticket->record.lsn));
}

static bool
find_lease(DlockLease *lease, void *arg)
{
	watch(lease);
	dlock_lease_for_each_ticket(lease, find_ticket, NULL);
	return true;
}

static uint64
sooner(uint64 a, uint64 b)
{
	return a < b ? a : b;
}

/*
 * Tasks that can fail
 */

static bool begun = false;
static bool knows_all = false;

/* When to look whether the extension is there, if nothing is written */
static uint64 next_look = 0;

/*
 * What was released before a shutdown is released after it: so a worker that
 * is told to go writes the journal first.  One that is told so again does not.
 */
static void
leave(SIGNAL_ARGS)
{
	int			save_errno = errno;

	leaving = true;
	pqsignal(SIGTERM, die);
	SetLatch(MyLatch);
	errno = save_errno;
}

/*
 * What the tables keep, unless that is in memory, and what the worker before has
 * left.  No table is needed for that one, so that who keeps them locked does
 * not keep a new worker from its heartbeats; and before they are read, nothing
 * needs any.  Where the extension has gone, the next task finds that out.
 */
static bool
begin_work(void)
{
	StartTransactionCommand();
	if (pg_atomic_read_u32(&my_space->loaded) == 0 &&
		get_extension_oid("dlock", true) == my_space->key.extension)
		dlock_load(my_space);
	/* in a transaction, for the same reason as in learn() */
	dlock_journal_begin(my_space);
	CommitTransactionCommand();
	begun = true;
	pqsignal(SIGTERM, leave);
	/* from now on, others wait */
	dlock_process_lock_timeout(DLOCK_SHORT_LOCK_TIMEOUT);
	return false;
}

/*
 * Learn of all the leases and grants that there are, a few at a time.  In a
 * transaction: before 16, an error while a segment of memory is mapped leaves
 * something behind otherwise.
 */
static bool
learn(void)
{
	StartTransactionCommand();
	MemoryContextSwitchTo(TopMemoryContext);
	knows_all = !dlock_lease_visit(my_space, &learning_at, find_lease, NULL);
	CommitTransactionCommand();
	return !knows_all;
}

/* Begin to learn again, from the first lease on. */
static void
forget(void)
{
	dlock_lease_stop_visit(my_space, &learning_at);
	knows_all = false;
}

/* Those who wait are told. */
static void
begin_failed(int code)
{
	dlock_load_failed(my_space);
	dlock_journal_fail(my_space, code);
}

static void
learn_failed(int code)
{
	dlock_journal_fail(my_space, code);
	forget();
}

/* Rows that stand for nothing go, and that may wait. */
static bool
clear_tables(void)
{
	extension_is_gone = !dlock_journal_clear(my_space);
	return false;
}

static XLogRecPtr commit_before;

static bool
write_journal(void)
{
	int			dead = 0;

	if (my_space->journal.length == 0 && dlock_monotonic_now() < next_look)
		return false;
	next_look = dlock_monotonic_now() + LOOK_MS * 1000;
	commit_before = XactLastCommitEnd;
	extension_is_gone = dlock_journal_write(my_space, &dead, at_write) < 0;
	pg_atomic_fetch_add_u32(&my_space->dead_rows, dead);
	return !extension_is_gone && my_space->journal.length > 0;
}

/* An error may have come between writing something and learning of it. */
static void
write_failed(int code)
{
	if (dlock_error_is_lock(code))
		dlock_journal_fail(my_space, code);
	if (XactLastCommitEnd != commit_before)
		forget();
}

/*
 * The sender has the outbox for itself.  Where no slot is free for one, the
 * worker sends, as far as that takes no time.
 */
static bool
send_announcements(void)
{
	volatile bool more = false;

	if (!dlock_office_take(my_space, DLOCK_SENDER))
		return false;
	PG_TRY();
	{
		more = dlock_notify_send(my_space) > 0;
	}
	PG_FINALLY();
	{
		(void) dlock_office_leave(my_space, DLOCK_SENDER);
	}
	PG_END_TRY();
	return more;
}

static DlockTask begin_task = {
	.perform = begin_work,
	.failed = begin_failed,
	.max_retry_ms = MAX_RETRY_MS
};
static DlockTask learn_task = {
	.perform = learn,
	.failed = learn_failed,
	.max_retry_ms = MAX_RETRY_MS
};
static DlockTask clear_task = {
	.perform = clear_tables,
	.max_retry_ms = MAX_RETRY_MS,
	.patience_ms = PATIENCE_MS
};
static DlockTask journal_task = {
	.perform = write_journal,
	.failed = write_failed,
	.max_retry_ms = MAX_RETRY_MS,
	.patience_ms = PATIENCE_MS
};
static DlockTask notify_task = {
	.perform = send_announcements,
	.max_retry_ms = MAX_RETRY_MS
};

/* The last work of a worker that was told to go, which it then does. */
static void
write_the_rest(void)
{
	uint64		end = dlock_monotonic_now() + LEAVE_MS * 1000;
	uint64		next;

	while ((next = dlock_task_perform(&journal_task)) != NEVER && next < end)
	{
		if (next != 0)
			(void) WaitLatch(MyLatch, WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
							 dlock_milliseconds_until(next),
							 PG_WAIT_EXTENSION);
		CHECK_FOR_INTERRUPTS();
		if (dlock_monotonic_now() >= end)
			break;
	}
	ProcDiePending = InterruptPending = true;
}

/*
 * See to it that somebody sends what is in the outbox.  Returns when to come
 * again.
 */
static uint64
have_announcements_sent(void)
{
	if (my_space->outbox.length == 0 ||
		dlock_office_wake(my_space, DLOCK_SENDER))
		return NEVER;
	if (!dlock_office_start(my_space, DLOCK_SENDER))
		return sooner(dlock_task_perform(&notify_task),
					  dlock_monotonic_now() + RETRY_START_MS * 1000);
	return dlock_monotonic_now() + RETRY_START_MS * 1000;
}

/* The same for the tables' dead rows; autovacuum comes, too, if nobody does. */
static void
have_tables_vacuumed(void)
{
	if (pg_atomic_read_u32(&my_space->dead_rows) >=
		pg_atomic_read_u32(&my_space->vacuum_at) &&
		!dlock_office_is_held(my_space, DLOCK_VACUUM))
		(void) dlock_office_start(my_space, DLOCK_VACUUM);
}

/* Does somebody need the worker now? */
static bool
is_wanted(void)
{
	return my_space->journal.length > 0 || my_space->outbox.length > 0 ||
		(my_space->leases.length > 0 && dlock_worker_is_awaited(my_space));
}

/*
 * Is there a lease that a session keeps alive, and standbys could count for?
 * They may be named at any time, and it counts then that they were not before.
 */
static bool
has_attached_lease(void)
{
	HASH_SEQ_STATUS status;
	Watch	   *watch;

	hash_seq_init(&status, watches);
	while ((watch = hash_seq_search(&status)) != NULL)
	{
		if (dlock_lease_is_attached(watch->lease) &&
			watch->lease->durability >= SYNCHRONOUS_COMMIT_REMOTE_WRITE)
		{
			hash_seq_term(&status);
			return true;
		}
	}
	return false;
}

/*
 * Could somebody notice if there were no worker?  Who waits for something that
 * a lease has; who renews a lease that lives by heartbeats; a session that may
 * listen for announcements; or whoever looks at a lease that is due soon.
 *
 * Nobody else does: what a lease holds is held without a worker, and its time
 * runs.  Whoever meets it when it is due starts another one.
 */
static bool
is_missed(uint64 next_beat)
{
	if (!knows_all || is_wanted() || hash_get_num_entries(grants) > 0)
		return true;
	if (pg_atomic_read_u32(&my_space->announced) > 0 &&
		CountDBConnections(MyDatabaseId) > 0)
		return true;
	if (my_space->leases.length == 0)
		return false;
	return (next_beat != NEVER && dlock_journal_has_standbys()) ||
		next_due() <= dlock_monotonic_now() + SOON_MS * 1000 ||
		has_attached_lease();
}

static uint64 next_beat = NEVER;

/* Do all there is to do.  Returns when to come again. */
static uint64
work(void)
{
	uint64		next = NEVER;

	if (!begun)
	{
		next = dlock_task_perform(&begin_task);
		if (!begun)
			return next;
	}
	expire();
	next_beat = dlock_heartbeat_beat(my_space);
	next = sooner(next, next_beat);
	if (!knows_all)
		next = sooner(next, dlock_task_perform(&learn_task));
	if (pg_atomic_read_u32(&my_space->cleared) == DLOCK_NOT_CLEARED)
		next = sooner(next, dlock_task_perform(&clear_task));
	if (!extension_is_gone)
		next = sooner(next, dlock_task_perform(&journal_task));
	next = sooner(next, announce_grants());
	next = sooner(next, have_announcements_sent());
	have_tables_vacuumed();
	/* last, as the journal may have told of new leases */
	return sooner(next, next_due());
}

/*
 * Those before this one died young, so many of them: the next shall not do so
 * at once.
 */
static void
pause_before_work(uint32 deaths)
{
	uint64		end = dlock_monotonic_now();

	if (deaths > 0)
		end += Min(FIRST_PAUSE_MS << Min(deaths - 1, 10), MAX_PAUSE_MS) * 1000;
	/* nor is it to be waited for by a library that wants its place */
	while (dlock_monotonic_now() < end && !dlock_is_replaced())
	{
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
						 dlock_milliseconds_until(end), PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		dlock_process_signals();
	}
}

static HTAB *
make_table(const char *name, Size size)
{
	HASHCTL		info = {
		.keysize = sizeof(dsa_pointer),
		.entrysize = size,
		.hcxt = TopMemoryContext
	};

	return hash_create(name, 256, &info, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
}

static void
begin(void)
{
	my_space = dlock_process_begin(DLOCK_WORKER);
	if (my_space == NULL)
		proc_exit(0);
	before_shmem_exit(resign, 0);
	watches_by_due = pairingheap_allocate(compare_due, NULL);
	watches = make_table("dlock leases", sizeof(Watch));
	for (int level = 0; level < (int) lengthof(grants_by_lsn); level++)
		grants_by_lsn[level] = pairingheap_allocate(compare_grants, NULL);
	grants = make_table("dlock grants", sizeof(Grant));
	pause_before_work(pg_atomic_fetch_add_u32(&my_space->worker_deaths, 1));
}

/*
 * How long a worker stays that nobody would miss, in microseconds: a moment
 * where nothing is left, and some more where leases are.
 */
static uint64
idle_time(void)
{
	return (uint64) (my_space->leases.length == 0 ? DLOCK_IDLE_MS :
					 dlock_worker_idle_timeout) * 1000;
}

void
dlock_worker_main(Datum arg)
{
	uint64		old_at;
	uint64		missed_at;		/* when somebody last would have missed it */

	begin();
	missed_at = dlock_monotonic_now();
	old_at = missed_at + YOUNG_MS * 1000;
	for (;;)
	{
		uint64		next;
		uint64		now;

		/* before anything is looked at, so that no wakeup is missed */
		ResetLatch(MyLatch);
		if (leaving)
			write_the_rest();
		dlock_process_signals();
		gives_way = dlock_process_gives_way();
		if (gives_way)
			return;

		pgstat_report_activity(STATE_RUNNING, NULL);
		next = work();
		if (extension_is_gone)
		{
			dlock_lease_abandon(my_space);
			return;
		}
		pgstat_report_activity(STATE_IDLE, NULL);
		(void) pgstat_report_stat(false);

		now = dlock_monotonic_now();
		if (now >= old_at)
			pg_atomic_write_u32(&my_space->worker_deaths, 0);
		if (next <= now)
			missed_at = now;
		else if (begun && is_missed(next_beat))
		{
			missed_at = now;
			/* who would miss it may go without a word */
			next = sooner(next, now + DLOCK_IDLE_MS * 1000);
		}
		else if (begun)
		{
			leaves = now - missed_at >= idle_time();
			if (leaves)
				return;
			next = sooner(next, missed_at + idle_time());
			/* the extension may go meanwhile */
			next = sooner(next, next_look);
		}
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | WL_TIMEOUT,
						 dlock_milliseconds_until(next), PG_WAIT_EXTENSION);
	}
}
