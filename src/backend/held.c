/*-------------------------------------------------------------------------
 *
 * held.c
 *	  The tickets with which this backend holds or waits for locks.
 *
 * Each ticket of this backend has a DlockHeld, from joining a lock until the
 * backend forgets the ticket.  A DlockHeld counts the acquires of the session
 * and of the transaction: the ticket ends when both counts are 0.  All memory
 * is allocated before the shared state changes, so nothing fails later (I10).
 *
 * A session can have many tickets under one name, for permits or enqueued
 * requests.  So that no call walks all of them, each name has a list of
 * tickets for each DlockHeldPlace, and counts of the tickets that are not
 * DLOCK_HELD_LOST.  A queue is in the order of numbers, so if a ticket still
 * waits, all later tickets of the name wait, too.  A process that ends another
 * backend's ticket increments that backend's DlockBackend.lost.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "backend/held.h"

int			dlock_max_locks_per_session;

dlist_head	dlock_held_tickets = DLIST_STATIC_INIT(dlock_held_tickets);
static int	num_held = 0;

static HTAB *names = NULL;
static dlist_head names_in_use = DLIST_STATIC_INIT(names_in_use);

/* Number of watches, which count towards dlock.max_locks_per_session, too */
int			dlock_held_watches = 0;

/* DlockBackend.lost at the last look at all tickets */
static uint32 lost_seen = 0;

/* Lists of DlockHeld, by their numbers' low bits, which mostly differ */
static dlist_head *numbers = NULL;
static int	num_buckets = 0;	/* a power of 2, or 0; at least num_held */

/* The DlockHeld for the next ticket, or NULL */
static DlockHeld *prepared_ticket = NULL;

/* The entry of the latest name, or NULL.  Only this one may have no ticket. */
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

/* Make a backend-local table whose entries begin with a DlockKey. */
HTAB *
dlock_held_make_table(const char *title, Size entry_size)
{
	HASHCTL		info = {0};

	info.keysize = sizeof(DlockKey);
	info.entrysize = entry_size;
	info.hcxt = TopMemoryContext;
	info.hash = name_hash;
	info.match = name_compare;
	info.keycopy = name_copy;
	return hash_create(title, 16, &info,
					   HASH_ELEM | HASH_FUNCTION | HASH_COMPARE |
					   HASH_KEYCOPY | HASH_CONTEXT);
}

void
dlock_held_initialize(void)
{
	names = dlock_held_make_table("dlock names", sizeof(DlockHeldName));
}

/* Insert a ticket into a list, latest first; usually it becomes the head. */
static void
insert_by_age(dlist_head *list, DlockHeld *held)
{
	dlist_iter	iter;

	dlist_foreach(iter, list)
	{
		if (dlist_container(DlockHeld, by_name, iter.cur)->number < held->number)
		{
			dlist_insert_before(iter.cur, &held->by_name);
			return;
		}
	}
	dlist_push_tail(list, &held->by_name);
}

/* Add a ticket to the counts of its name (sign 1), or subtract it (-1). */
static void
count_ticket(DlockHeld *held, int sign)
{
	DlockHeldName *name = held->name;

	name->live += sign;
	name->permits += sign * held->ticket->permits;
	if (held->exclusive)
		name->exclusive += sign;
}

/* Correct the counts after an exclusive ticket has become shared. */
void
dlock_held_count_shared(DlockHeld *held)
{
	if (held->place != DLOCK_HELD_LOST)
		held->name->exclusive--;
	held->exclusive = false;
}

static void
move_ticket(DlockHeld *held, DlockHeldPlace place)
{
	if (held->place == place)
		return;
	if (place == DLOCK_HELD_LOST)
		count_ticket(held, -1);
	Assert(held->place != DLOCK_HELD_LOST);
	dlist_delete(&held->by_name);
	held->place = place;
	insert_by_age(&held->name->tickets[place], held);
}

static DlockHeldPlace
granted_place(const DlockHeld *held)
{
	return dlock_held_is_of_session(held) ? DLOCK_HELD_BY_SESSION :
		DLOCK_HELD_BY_XACT;
}

/* Notice tickets that others ended.  They change "lost" after the state. */
static void
notice_losses(void)
{
	uint32		lost = pg_atomic_read_u32(&dlock_my_backend->lost);
	dlist_iter	iter;

	if (likely(lost == lost_seen))
		return;
	pg_read_barrier();
	/* the oldest first, so each is inserted at the head, without a walk */
	dlist_reverse_foreach(iter, &dlock_held_tickets)
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_age, iter.cur);

		if (dlock_held_is_gone(held))
			move_ticket(held, DLOCK_HELD_LOST);
	}
	lost_seen = lost;
}

/* Move a name's tickets that other processes have granted or ended (I10). */
static void
catch_up(DlockHeldName *name)
{
	dlist_head *waiting = &name->tickets[DLOCK_HELD_WAITING];

	notice_losses();
	while (!dlist_is_empty(waiting))
	{
		DlockHeld  *oldest = dlist_tail_element(DlockHeld, by_name, waiting);

		if (dlock_held_is_gone(oldest))
			move_ticket(oldest, DLOCK_HELD_LOST);
		else if (dlock_held_is_granted(oldest))
			move_ticket(oldest, granted_place(oldest));
		else
			break;
	}
}

/* Returns the latest granted ticket in this place, or NULL. */
static DlockHeld *
find_granted(DlockHeldName *name, DlockHeldPlace place)
{
	dlist_iter	iter;

	dlist_foreach(iter, &name->tickets[place])
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_name, iter.cur);

		/* false if it ended after catch_up(), or if a pin keeps it ENDING */
		if (dlock_held_is_granted(held))
			return held;
	}
	return NULL;
}

void
dlock_held_set_depth(DlockHeld *held, uint32 session_depth,
					 uint32 xact_depth)
{
	held->session_depth = session_depth;
	held->xact_depth = xact_depth;
	pg_atomic_write_u32(&held->ticket->session_depth, session_depth);
	pg_atomic_write_u32(&held->ticket->xact_depth, xact_depth);
	/* if no acquire is left, the ticket is about to end */
	if ((session_depth > 0 || xact_depth > 0) &&
		(held->place == DLOCK_HELD_BY_SESSION ||
		 held->place == DLOCK_HELD_BY_XACT))
		move_ticket(held, granted_place(held));
}

/* Make a name the latest.  Removes the previous one if it has no ticket. */
static void
set_latest_name(DlockHeldName *name)
{
	DlockHeldName *before = latest_name;

	latest_name = name;
	if (before && before != name && before->count == 0)
		hash_search(names, &before->key, HASH_REMOVE, NULL);
}

/* Free a session's ticket, or drop the reference to a lease's ticket. */
void
dlock_held_free_ticket(DlockTicket *ticket)
{
	Assert(pg_atomic_read_u32(&ticket->state) == DLOCK_GONE ||
		   ticket->session == 0);
	if (ticket->scope == DLOCK_LEASE)
		dlock_lease_ticket_drop((DlockLeaseTicket *) ticket);
	else
		dlock_ticket_free(ticket);
}

/* Forget a ticket that has left its lock, or that its lease has adopted. */
void
dlock_held_forget(DlockHeld *held)
{
	DlockTicket *ticket = held->ticket;

	Assert(held->marks == 0);
	if (held->place != DLOCK_HELD_LOST)
		count_ticket(held, -1);
	dlist_delete(&held->by_number);
	dlist_delete(&held->by_name);
	dlist_delete(&held->by_age);
	num_held--;
	if (--held->name->count == 0)
	{
		Assert(held->name->live == 0 && held->name->exclusive == 0 &&
			   held->name->permits == 0);
		dlist_delete(&held->name->link);
		set_latest_name(held->name);
	}
	if (prepared_ticket == NULL)
		prepared_ticket = held;
	else
		pfree(held);
	/* last, so that after an error here nothing is left to do */
	dlock_held_free_ticket(ticket);
}

static dlist_head *
bucket_of_number(int64 number)
{
	return &numbers[number & (num_buckets - 1)];
}

/* Find a ticket by number, in "space" or, if that is NULL, in any space. */
DlockHeld *
dlock_held_find_number(const DlockSpace *space, int64 number)
{
	dlist_iter	iter;

	if (numbers == NULL)
		return NULL;
	dlist_foreach(iter, bucket_of_number(number))
	{
		DlockHeld  *held = dlist_container(DlockHeld, by_number, iter.cur);

		if (held->number == number &&
			(space == NULL || held->ticket->space == dlock_pointer(space)))
			return held;
	}
	return NULL;
}

/* Make sure that there are enough buckets for one more ticket. */
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

		dlist_push_head(bucket_of_number(held->number), &held->by_number);
	}
	if (before)
		pfree(before);
}

/*
 * End and forget a ticket if no acquires are left.  If others have ended the
 * ticket, it stays until no acquire of the session and no mark is left.
 */
void
dlock_held_settle(DlockHeld *held)
{
	if (held->session_depth == 0 && held->xact_depth == 0)
		dlock_queue_leave(&held->name->key, held->ticket, held->lock);
	/* an adopted ticket belongs to its lease, no longer to this session */
	if ((dlock_held_is_gone(held) || held->ticket->session == 0) &&
		held->session_depth == 0 && held->marks == 0)
		dlock_held_forget(held);
	else if (dlock_held_is_gone(held))
		move_ticket(held, DLOCK_HELD_LOST);
}

/* Returns a name's entry, or NULL if it has no ticket of this backend. */
DlockHeldName *
dlock_held_find_name(const DlockKey *key)
{
	DlockHeldName *name = latest_name;

	/* usually, the latest name is asked for, and no search is needed */
	if (name == NULL || !dlock_key_equal(&name->key, key))
		name = hash_search(names, key, HASH_FIND, NULL);
	return name && name->count > 0 ? name : NULL;
}

/* Returns the latest entry if it has this name, or NULL.  Needs no key. */
DlockHeldName *
dlock_held_find_latest(const DlockSpace *space, const char *name, Size length)
{
	DlockHeldName *latest = latest_name;

	if (latest == NULL || latest->count == 0 || latest->key.length != length ||
		latest->key.space.database != space->key.database ||
		latest->key.space.extension != space->key.extension)
		return NULL;
	for (unsigned int w = 0; w < dlock_name_words(latest->key.length); w++)
	{
		if (latest->key.words[w] != dlock_name_word(name, length, w))
			return NULL;
	}
	return latest;
}

/*
 * Returns the latest granted ticket under a name; NULL if there is none, or if
 * it has slots.  If one of a name's live tickets has slots, all of them do.
 */
DlockHeld *
dlock_held_find_reentrant(DlockHeldName *name)
{
	DlockHeld  *latest;
	DlockHeld  *by_xact;

	catch_up(name);
	latest = find_granted(name, DLOCK_HELD_BY_SESSION);
	by_xact = find_granted(name, DLOCK_HELD_BY_XACT);
	if (latest == NULL || (by_xact && by_xact->number > latest->number))
		latest = by_xact;
	return latest && latest->ticket->mode != DLOCK_SLOTS ? latest : NULL;
}

/* Returns the latest session-scoped hold, or else a lost one to release. */
DlockHeld *
dlock_held_find_session_hold(DlockHeldName *name)
{
	DlockHeld  *held;
	dlist_iter	iter;

	catch_up(name);
	held = find_granted(name, DLOCK_HELD_BY_SESSION);
	if (held)
		return held;
	dlist_foreach(iter, &name->tickets[DLOCK_HELD_LOST])
	{
		held = dlist_container(DlockHeld, by_name, iter.cur);
		if (held->session_depth > 0)
			return held;
	}
	return NULL;
}

bool
dlock_held_is_holding(DlockHeldName *name)
{
	catch_up(name);
	return find_granted(name, DLOCK_HELD_BY_SESSION) != NULL ||
		find_granted(name, DLOCK_HELD_BY_XACT) != NULL;
}

/* Compute the exact answer for dlock_held_blocks(), ticket by ticket. */
static bool
blocks_before(DlockHeldName *name, const DlockRequest *request, int32 slots,
			  int64 number)
{
	int64		permits = request->permits;

	for (int place = 0; place < DLOCK_HELD_LOST; place++)
	{
		dlist_iter	iter;

		/* the oldest first, to end as soon as possible */
		dlist_reverse_foreach(iter, &name->tickets[place])
		{
			DlockHeld  *held = dlist_container(DlockHeld, by_name, iter.cur);

			if (held->number >= number)
				break;
			if (dlock_held_is_gone(held))
				continue;
			permits += held->ticket->permits;
			if (request->mode == DLOCK_EXCLUSIVE ||
				held->ticket->mode == DLOCK_EXCLUSIVE ||
				(request->mode == DLOCK_SLOTS && permits > slots))
				return true;
		}
	}
	return false;
}

/*
 * Does a ticket of this backend block a request of this backend?  "number" is
 * the request's own ticket; only tickets before it matter.  PG_INT64_MAX means
 * that the request has no ticket yet.  Then only the counts are checked.  They
 * can be too high, never too low, so the answer true may be wrong.
 *
 * If the request's own slots suffice, the slots set for the lock are not read.
 * So if these are fewer, the answer false may be wrong.  If a request is for
 * more permits than the lock has slots, it waits for more slots to be set, not
 * for a ticket.
 */
bool
dlock_held_blocks(DlockHeldName *name, const DlockRequest *request,
				  int64 number)
{
	int32		slots = request->slots;

	catch_up(name);
	if (name->live == 0 ||
		(request->mode != DLOCK_EXCLUSIVE && name->exclusive == 0 &&
		 (request->mode != DLOCK_SLOTS ||
		  name->permits + request->permits <= slots)))
	{
		Assert(name->count > 50 ||
			   !blocks_before(name, request, slots, number));
		return false;
	}
	if (request->mode == DLOCK_SLOTS && name->exclusive == 0)
	{
		slots = dlock_queue_slots(&name->key, slots);
		if (request->permits > slots ||
			name->permits + request->permits <= slots)
			return false;
	}
	return number == PG_INT64_MAX ||
		blocks_before(name, request, slots, number);
}

/* Does any lock with a queue have a ticket of ours other than "except"? */
bool
dlock_held_blocks_others(int64 except)
{
	DlockHeld  *excepted = dlock_held_find_number(NULL, except);
	dlist_iter	iter;

	notice_losses();
	dlist_foreach(iter, &names_in_use)
	{
		DlockHeldName *name = dlist_container(DlockHeldName, link, iter.cur);
		uint32		live = name->live;

		if (excepted && excepted->name == name &&
			excepted->place != DLOCK_HELD_LOST)
			live--;
		if (live > 0 && dlock_queue_has_waiters(&name->key))
			return true;
	}
	return false;
}

/* Raise 53200 if the session has reached its limit of locks. */
void
dlock_held_check_room(void)
{
	if (unlikely(num_held + dlock_held_watches >= dlock_max_locks_per_session))
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("too many locks in this session"),
				 errdetail("The session has reached dlock.max_locks_per_session (%d).",
						   dlock_max_locks_per_session),
				 errhint("Release locks that are not needed, or increase dlock.max_locks_per_session.")));
}

/* Allocate all memory that dlock_held_enter() will need under this name. */
void
dlock_held_prepare(const DlockKey *key)
{
	DlockHeldName *name;
	bool		found;

	dlock_held_check_room();
	prepare_number();
	if (prepared_ticket == NULL)
		prepared_ticket = MemoryContextAlloc(TopMemoryContext,
											 sizeof(DlockHeld));
	if (latest_name && dlock_key_equal(&latest_name->key, key))
		return;
	name = hash_search(names, key, HASH_ENTER, &found);
	if (!found)
	{
		for (int place = 0; place < DLOCK_NUM_HELD_PLACES; place++)
			dlist_init(&name->tickets[place]);
		name->count = name->live = name->exclusive = 0;
		name->permits = 0;
	}
	set_latest_name(name);
}

/* Enter a ticket that has joined a lock.  Its depths are 0.  Cannot fail. */
DlockHeld *
dlock_held_enter(DlockTicket *ticket, DlockScope scope, DlockLock *lock)
{
	DlockHeld  *held = prepared_ticket;

	held->number = ticket->number;
	held->name = latest_name;
	held->ticket = ticket;
	held->lock = lock;
	held->place = !dlock_held_is_granted(held) ? DLOCK_HELD_WAITING :
		scope == DLOCK_SESSION ? DLOCK_HELD_BY_SESSION : DLOCK_HELD_BY_XACT;
	held->session_depth = held->xact_depth = 0;
	held->marks = held->releases = 0;
	held->exclusive = ticket->mode == DLOCK_EXCLUSIVE;
	dlist_push_head(bucket_of_number(held->number), &held->by_number);
	dlist_push_head(&held->name->tickets[held->place], &held->by_name);
	if (held->name->count++ == 0)
		dlist_push_head(&names_in_use, &held->name->link);
	count_ticket(held, 1);
	dlist_push_head(&dlock_held_tickets, &held->by_age);
	num_held++;
	prepared_ticket = NULL;
	return held;
}
