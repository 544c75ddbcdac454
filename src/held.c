/*-------------------------------------------------------------------------
 *
 * held.c
 *	  What this backend holds and waits for.
 *
 * A DlockHeld stands here for every ticket of this backend, from the
 * moment it joined a lock until it has left it.  It counts how often the
 * session and the transaction asked: the ticket ends when both counts are
 * zero.
 *
 * Whatever the shared state and this need is allocated before the shared
 * state changes; afterwards nothing here can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "held.h"

dlist_head	dlock_held_tickets = DLIST_STATIC_INIT(dlock_held_tickets);
static int	num_held = 0;

static HTAB *names = NULL;

/*
 * DlockHeld by number.  A session's numbers mostly follow each other, so
 * the last bits of a number are its hash.
 */
static dlist_head *numbers = NULL;
static int	num_buckets = 0;	/* a power of 2, at least num_held */

/* Memory for the next ticket, or NULL */
static DlockHeld *prepared_ticket = NULL;

/*
 * The name that was acquired last, or NULL.  No other entry is ever without a
 * ticket: this one stays until another takes its place.
 */
static DlockHeldName *latest_name = NULL;

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

/* Make the table of names; once per backend. */
void
dlock_held_initialize(void)
{
	HASHCTL		info = {0};

	info.keysize = sizeof(DlockKey);
	info.entrysize = sizeof(DlockHeldName);
	info.hcxt = TopMemoryContext;
	info.hash = name_hash;
	info.match = name_compare;
	info.keycopy = name_copy;
	names = hash_create("dlock names", 16, &info,
						HASH_ELEM | HASH_FUNCTION | HASH_COMPARE |
						HASH_KEYCOPY | HASH_CONTEXT);
}

static bool
is_forgettable(const DlockHeld *held)
{
	return dlock_held_is_gone(held) && held->session_depth == 0 &&
		held->marks == 0;
}

void
dlock_held_set_depth(DlockHeld *held, uint32 session_depth,
					 uint32 xact_depth)
{
	held->session_depth = session_depth;
	held->xact_depth = xact_depth;
	pg_atomic_write_u32(&held->ticket->session_depth, session_depth);
	pg_atomic_write_u32(&held->ticket->xact_depth, xact_depth);
}

/* Make a name the latest.  The one before goes if it has no ticket. */
static void
set_latest_name(DlockHeldName *name)
{
	DlockHeldName *before = latest_name;

	latest_name = name;
	if (before && before != name && dlist_is_empty(&before->tickets))
		hash_search(names, &before->key, HASH_REMOVE, NULL);
}

/* Forget a ticket that has left its lock, and free it. */
void
dlock_held_forget(DlockHeld *held)
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

/*
 * The ticket with this number; NULL where this backend has none in this space.
 * It may still have some from before the extension was dropped.
 */
DlockHeld *
dlock_held_find_number(const DlockSpace *space, int64 number)
{
	dlist_iter	iter;

	if (numbers == NULL)
		return NULL;
	dlist_foreach(iter, bucket_of(number))
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_number, iter.cur);

		if (held->number == number && held->ticket->space == space->self)
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
	dlist_foreach(iter, &dlock_held_tickets)
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_age, iter.cur);

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
void
dlock_held_settle(DlockHeld *held)
{
	if (held->session_depth == 0 && held->xact_depth == 0)
		(void) dlock_queue_leave(&held->name->key, held->ticket);
	if (is_forgettable(held))
		dlock_held_forget(held);
}

/*
 * The name's entry.  What is released was mostly acquired last, and many ask
 * for one name again and again: that takes no search.
 */
static DlockHeldName *
find_entry(const DlockKey *key)
{
	if (latest_name && dlock_key_equal(&latest_name->key, key))
		return latest_name;
	return hash_search(names, key, HASH_FIND, NULL);
}

/* The name's entry if this backend has a ticket under it, NULL if not. */
DlockHeldName *
dlock_held_find_name(const DlockKey *key)
{
	DlockHeldName *name = find_entry(key);

	return name && !dlist_is_empty(&name->tickets) ? name : NULL;
}

/* The latest granted ticket under a name, in a mode other than slots */
DlockHeld *
dlock_held_find_reentrant(DlockHeldName *name)
{
	dlist_iter	iter;

	dlist_foreach(iter, &name->tickets)
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_name, iter.cur);

		if (dlock_held_is_granted(held) && held->ticket->mode != DLOCK_SLOTS)
			return held;
	}
	return NULL;
}

/*
 * Would a request, if it had to wait, wait for its own backend?  It would
 * behind a ticket of its own beside which it can never hold.  "number" is
 * that of its ticket; the tickets after it do not matter.
 */
bool
dlock_held_blocks(DlockHeldName *name, const DlockRequest *request,
				  int64 number)
{
	int64		permits = request->permits;
	dlist_iter	iter;

	dlist_foreach(iter, &name->tickets)
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_name, iter.cur);

		if (dlock_held_is_gone(held) || held->number >= number)
			continue;
		if (request->mode == DLOCK_EXCLUSIVE ||
			held->ticket->mode == DLOCK_EXCLUSIVE)
			return true;
		permits += held->ticket->permits;
	}
	return request->mode == DLOCK_SLOTS && permits > request->slots;
}

/*
 * Does anybody wait for a lock under which this backend has a ticket, other
 * than the one given?
 */
bool
dlock_held_blocks_others(int64 except)
{
	dlist_iter	iter;

	dlist_foreach(iter, &dlock_held_tickets)
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_age, iter.cur);

		if (held->number != except &&
			dlock_queue_has_waiters(&held->name->key))
			return true;
	}
	return false;
}

/*
 * Allocate all that entering a ticket under this name will need.
 */
void
dlock_held_prepare(const DlockRequest *request)
{
	DlockHeldName *name;
	bool		found;

	if (num_held >= dlock_max_locks_per_session)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("too many locks in this session"),
				 errdetail("The session has reached dlock.max_locks_per_session (%d).",
						   dlock_max_locks_per_session),
				 errhint("Release locks that are not needed, or increase dlock.max_locks_per_session.")));

	prepare_number();
	if (prepared_ticket == NULL)
		prepared_ticket = MemoryContextAlloc(TopMemoryContext,
											 sizeof(DlockHeld));
	if (latest_name && dlock_key_equal(&latest_name->key, &request->key))
		return;
	name = hash_search(names, &request->key, HASH_ENTER, &found);
	if (!found)
		dlist_init(&name->tickets);
	set_latest_name(name);
}

/* Enter a ticket that has joined its lock.  Cannot fail. */
DlockHeld *
dlock_held_enter(DlockTicket *ticket)
{
	DlockHeld  *held = prepared_ticket;

	held->number = ticket->number;
	held->name = latest_name;
	held->ticket = ticket;
	held->marks = 0;
	held->to_arm = held->arming = false;
	dlock_held_set_depth(held, 0, 0);
	dlist_push_head(bucket_of(held->number), &held->by_number);
	dlist_push_head(&held->name->tickets, &held->by_name);
	dlist_push_head(&dlock_held_tickets, &held->by_age);
	num_held++;
	prepared_ticket = NULL;
	return held;
}
