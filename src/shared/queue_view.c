/*-------------------------------------------------------------------------
 *
 * queue_view.c
 *	  Reading holders and waiters, for functions, deadlock search and views.
 *
 * Nothing here changes a lock.  Before a function reports holders, it flushes
 * the removal of the previous holder's row, with no lock held (I15).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"

#include "shared/queue.h"

/*
 * What must be durable before a process reports a ticket's grant: the removal
 * of the previous holder's row (I15) and, if a lease has the ticket, the
 * ticket's row (I19)
 */
typedef struct Grant
{
	XLogRecPtr	removed;
	XLogRecPtr	lsn;			/* end of the row's write; 0: not in the WAL */
	int			durability;
} Grant;

/* Needs the entry's lock or a pin; otherwise the ticket could be freed. */
static Grant
grant_of(DlockTicket *ticket, const DlockKey *key)
{
	Grant		grant = {
		.removed = dlock_journal_removal(dlock_space_at(ticket->space), key),
		.lsn = FirstNormalUnloggedLSN,
		.durability = SYNCHRONOUS_COMMIT_OFF
	};

	if (is_lease_ticket(ticket))
	{
		grant.lsn = pg_atomic_read_u64(&lease_ticket(ticket)->granted_lsn);
		pg_read_barrier();
		grant.durability = lease_ticket(ticket)->granted_at_level;
	}
	else if (ticket->scope == DLOCK_LEASE)
		grant.lsn = InvalidXLogRecPtr;	/* the lease has not adopted it yet */
	return grant;
}

/*
 * Flush what a grant needs, and return whether a process may report the grant.
 * Until standbys acknowledge a grant, a standby that lacks it can be promoted.
 */
static bool
is_durable(const Grant *grant)
{
	dlock_journal_flush(grant->removed);
	if (grant->lsn == InvalidXLogRecPtr)
		return false;
	if (grant->durability != SYNCHRONOUS_COMMIT_OFF)
		dlock_journal_flush(grant->lsn);
	return dlock_quorum_is_acknowledged(grant->lsn, grant->durability);
}

/* Release "lock".  May "holder" be reported?  Both can be NULL. */
static bool
let_go_of_found(DlockLock *lock, const DlockKey *key, DlockTicket *holder)
{
	Grant		grant;

	if (holder)
		grant = grant_of(holder, key);
	if (lock)
		dlock_lock_release(lock);
	return holder && is_durable(&grant);
}

/* Is the grant of a pinned ticket durable? */
bool
dlock_queue_is_durable(const DlockKey *key, DlockTicket *ticket)
{
	Grant		grant = grant_of(ticket, key);

	return is_durable(&grant);
}

/*
 * The number of the newest holder; 0 if there is none, or if its grant is not
 * durable.  Leases' grants that are not in the WAL yet are skipped.
 */
int64
dlock_queue_fence(const DlockKey *key)
{
	DlockLock  *lock = dlock_lock_find(key);
	DlockTicket *ticket;
	int64		fence;

	if (lock == NULL)
		return 0;
	/* holders are in the order of numbers (I3) */
	ticket = ticket_at(lock->holders.tail);
	while (ticket && !(is_holding(ticket) &&
					   grant_of(ticket, key).lsn != InvalidXLogRecPtr))
		ticket = ticket_at(ticket->link.prev);
	fence = ticket ? ticket->number : 0;
	return let_go_of_found(lock, key, ticket) ? fence : 0;
}

/* The longest scope in which a ticket is held or waits */
static DlockScope
scope_of(DlockTicket *ticket)
{
	return pg_atomic_read_u32(&ticket->session_depth) > 0 ? DLOCK_SESSION :
		pg_atomic_read_u32(&ticket->xact_depth) > 0 ? DLOCK_TRANSACTION :
		(DlockScope) ticket->scope;
}

static void
copy_holder(DlockHolder *holder, DlockTicket *ticket)
{
	holder->number = ticket->number;
	holder->mode = ticket->mode;
	holder->scope = scope_of(ticket);
	holder->has_info = DsaPointerIsValid(ticket->info);
	if (holder->has_info)
		strlcpy(holder->info, dlock_text_at(ticket->info),
				sizeof(holder->info));
}

/*
 * Copy the newest holder of a lock, for watchers; see DlockHolding.  If all
 * holders have ended but not left, the lock is neither held nor free.
 */
DlockHolding
dlock_queue_holder(DlockSpace *space, const DlockKey *key, DlockHolder *holder)
{
	DlockLock  *lock = dlock_lock_find(key);
	DlockHolding result = DLOCK_HELD_BY_NOBODY;
	DlockTicket *ticket = NULL;
	bool		durable;

	if (lock)
	{
		if (lock->holders.length > 0)
			result = DLOCK_HELD_NO_MORE;
		ticket = ticket_at(lock->holders.tail);
		while (ticket && !is_holding(ticket))
			ticket = ticket_at(ticket->link.prev);
	}
	if (ticket)
		copy_holder(holder, ticket);
	durable = let_go_of_found(lock, key, ticket);
	if (ticket)
		return durable ? DLOCK_HELD : DLOCK_HELD_NOT_YET;
	dlock_journal_flush_removal(space, key);
	return result;
}

/*
 * Is this the number of a holder?  Tickets of sessions are found by walking
 * the holders, because a hash table would slow down each acquire.  For its own
 * tickets, a session need not call this.
 */
bool
dlock_queue_is_fence(DlockSpace *space, const DlockKey *key, int64 number)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *of_lease;
	DlockTicket *ticket = NULL;
	DlockLock  *lock;
	bool		holds;

	dlock_id_find(space, number, &lease, &of_lease);
	lock = lease && !of_lease ? NULL : dlock_lock_find(key);
	if (lock && of_lease == NULL)
		ticket = find_number(&lock->holders, number);
	else if (lock && dlock_key_equal(&of_lease->key, key))
		ticket = &of_lease->ticket;
	if (ticket && !is_holding(ticket))
		ticket = NULL;
	holds = let_go_of_found(lock, key, ticket);
	dlock_record_end_uses(before);
	return holds;
}

/* "a", or "b" if that is a holder and was written before "a" (can be NULL) */
static DlockLeaseTicket *
written_first(DlockLeaseTicket *a, DlockLeaseTicket *b)
{
	XLogRecPtr	lsn_a = a ? pg_atomic_read_u64(&a->granted_lsn) : 0;
	XLogRecPtr	lsn_b = pg_atomic_read_u64(&b->granted_lsn);

	return dlock_state_of(&b->ticket) == DLOCK_GRANTED &&
		lsn_b != InvalidXLogRecPtr && (a == NULL || lsn_b < lsn_a) ? b : a;
}

/*
 * The ticket with which an open lease holds a lock, or NULL.  Of several, the
 * one that standbys acknowledge first.  Walks the lease's tickets or the
 * lock's holders, whichever list is shorter.
 */
static DlockTicket *
find_holder_of(DlockSpace *space, const DlockLock *lock,
			   const DlockLease *lease)
{
	DlockLeaseTicket *holder = NULL;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	if (lease->tickets.length < lock->holders.length)
	{
		for (DlockLeaseTicket *own = dlock_ticket_in_lease(lease->tickets.head);
			 own; own = dlock_ticket_in_lease(own->in_lease.next))
		{
			if (dlock_key_equal(&own->key, &lock->key))
				holder = written_first(holder, own);
		}
	}
	else
	{
		for (DlockTicket *any = ticket_at(lock->holders.head);
			 any; any = ticket_at(any->link.next))
		{
			if (is_lease_ticket(any) &&
				dlock_lease_of(lease_ticket(any)) == lease)
				holder = written_first(holder, lease_ticket(any));
		}
	}
	LWLockRelease(&space->lease_lock);
	return holder ? &holder->ticket : NULL;
}

/* Does the lease with this number hold the lock? */
bool
dlock_queue_is_held_by(DlockSpace *space, const DlockKey *key, int64 number)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *of_lease;
	DlockTicket *ticket = NULL;
	DlockLock  *lock;
	bool		holds;

	dlock_id_find(space, number, &lease, &of_lease);
	lock = lease ? dlock_lock_find(key) : NULL;
	if (lock && dlock_lease_is_open(lease))
		ticket = find_holder_of(space, lock, lease);
	holds = let_go_of_found(lock, key, ticket);
	dlock_record_end_uses(before);
	return holds;
}

/* Does a ticket hold or wait, or does a pin or delay keep it?  Sets *holds. */
static bool
is_shown(DlockTicket *ticket, bool *holds)
{
	*holds = !is_queued(ticket) && is_holding(ticket);
	return is_queued(ticket) ? is_waiting(ticket) :
		*holds || !is_leaving(ticket);
}

/* Copy up to "max_each" tickets to members[count]; returns the new count. */
static int
copy_members(const DlockLock *lock, const DlockList *list, int max_each,
			 DlockMember *members, int count)
{
	for (DlockTicket *ticket = ticket_at(list->head);
		 ticket && max_each-- > 0; ticket = ticket_at(ticket->link.next))
	{
		bool		holds;
		bool		counts = is_shown(ticket, &holds);

		members[count++] = (DlockMember)
		{
			.number = ticket->number,
			.lease = is_lease_ticket(ticket) ?
				dlock_lease_of(lease_ticket(ticket))->number : 0,
			.session = ticket->session,
			.procno = ticket->procno,
			.pid = ticket->pid,
			.mode = ticket->mode,
			.slots = slots_for(lock, ticket->slots),
			.permits = ticket->permits,
			.role = ticket->role,
			.enqueued_at = ticket->enqueued_at,
			.counts = counts,
			.closed = !holds && !is_queued(ticket) &&
				is_lease_ticket(ticket) &&
				(lease_ticket(ticket)->closes ||
				 dlock_lease_ticket_is_delayed(lease_ticket(ticket))),
			.granted = !is_queued(ticket),
			.leaves = is_lease_ticket(ticket) && is_leaving(ticket) &&
				dlock_state_has_ended(dlock_state_of(ticket))
		};
	}
	return count;
}

/*
 * Copy the holders of a lock and then its queue, at most "max_each" of each.
 * Sets *slots to the holders' slots.  Returns the number of members.  If the
 * number exceeds "max", nothing is copied; the caller must try with more room.
 */
int
dlock_queue_members(const DlockKey *key, int max_each, DlockMember *members,
					int max, int32 *slots)
{
	DlockLock  *lock = dlock_lock_find(key);
	int			count;

	if (lock == NULL)
		return 0;
	*slots = lock->holders_slots;
	count = Min((int) lock->holders.length, max_each) +
		Min((int) lock->queue.length, max_each);
	if (count <= max)
	{
		int			holders = copy_members(lock, &lock->holders, max_each,
										   members, 0);

		(void) copy_members(lock, &lock->queue, max_each, members, holders);
	}
	(void) let_go_of_found(lock, key, ticket_at(lock->holders.head));
	return count;
}

bool
dlock_queue_has_waiters(const DlockKey *key)
{
	DlockLock  *lock = dlock_lock_find(key);
	bool		result;

	if (lock == NULL)
		return false;
	result = lock->queue.length > 0;
	dlock_lock_release(lock);
	return result;
}

/* The number of slots in force for a request with "slots" slots */
int32
dlock_queue_slots(const DlockKey *key, int32 slots)
{
	DlockLock  *lock = dlock_lock_find(key);

	if (lock == NULL)
		return slots;
	slots = slots_for(lock, slots);
	dlock_lock_release(lock);
	return slots;
}

static char *
append_text(char *to, const char *from, Size length)
{
	if (length > 0)
		memcpy(to, from, length);
	return to + length;
}

static DlockRow *
make_row(const DlockLock *lock, DlockTicket *ticket, uint32 position,
		 bool holds)
{
	const char *info = dlock_text_at(ticket->info);
	Size		info_length = info ? strlen(info) : 0;
	const char *owner = ticket->scope == DLOCK_LEASE ?
		dlock_text_at(lease_ticket(ticket)->owner) : NULL;
	Size		owner_length = owner ? strlen(owner) : 0;
	char		channel[NAMEDATALEN];
	Size		channel_length;
	char	   *text;
	DlockRow   *row;

	dlock_announcement_channel(ticket, channel);
	channel_length = strlen(channel);
	row = palloc_extended(offsetof(DlockRow, text) + lock->key.length +
						  info_length + owner_length + channel_length,
						  MCXT_ALLOC_NO_OOM);
	if (row == NULL)
		return NULL;
	row->number = ticket->number;
	row->mode = ticket->mode;
	row->slots = position == 0 ? lock->holders_slots :
		slots_for(lock, ticket->slots);
	row->permits = ticket->permits;
	row->position = position;
	row->granted = holds;
	row->session_depth = pg_atomic_read_u32(&ticket->session_depth);
	row->xact_depth = pg_atomic_read_u32(&ticket->xact_depth);
	row->scope = scope_of(ticket);
	row->pinned = ticket->pins > 0;
	row->pid = ticket->pid;
	row->role = ticket->role;
	row->enqueued_at = ticket->enqueued_at;
	row->granted_at = ticket->granted_at;
	row->name_length = lock->key.length;
	row->info_length = info_length;
	row->has_info = info != NULL;
	row->owner_length = owner_length;
	row->has_owner = owner != NULL;
	row->channel_length = channel_length;
	text = append_text(row->text, lock->key.name, row->name_length);
	text = append_text(text, info, info_length);
	text = append_text(text, owner, owner_length);
	(void) append_text(text, channel, channel_length);
	row->lease = 0;
	row->remaining = -1;
	row->closed = false;
	if (ticket->scope == DLOCK_LEASE)
		dlock_lease_ticket_row(lease_ticket(ticket), row);
	return row;
}

/* A call copies whole partitions until it has this many rows. */
#define ROWS_IN_A_GO	1000

typedef struct Rows
{
	DlockRow   *first;
	DlockRow  **tail;
	uint64		count;
	bool		complete;		/* false: out of memory */
} Rows;

static void
copy_list(Rows *rows, const DlockLock *lock, const DlockList *list,
		  bool queued)
{
	uint32		position = 0;

	foreach_ticket(ticket, list)
	{
		DlockRow   *row;
		bool		holds;

		if (!is_shown(ticket, &holds))
			continue;
		row = make_row(lock, ticket, queued ? ++position : 0, holds);
		rows->complete = row != NULL;
		if (row == NULL)
			return;
		row->next = NULL;
		*rows->tail = row;
		rows->tail = &row->next;
		rows->count++;
	}
}

static void
copy_lock(Rows *rows, const DlockLock *lock)
{
	copy_list(rows, lock, &lock->holders, false);
	if (rows->complete)
		copy_list(rows, lock, &lock->queue, true);
}

static void
check_complete(const Rows *rows)
{
	if (!rows->complete)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory"),
				 errdetail("Failed while copying the lock table.")));
}

/* Count queued tickets; set *longest to the longest wait, in microseconds. */
uint64
dlock_queue_waiting(const DlockSpace *space, int64 *longest)
{
	DlockLockScan scan;
	DlockLock  *lock;
	uint64		count = 0;
	uint64		now = dlock_monotonic_now();

	*longest = 0;
	dlock_lock_scan_begin(&scan, &space->key, true);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		const DlockTicket *head = ticket_at(lock->queue.head);

		count += lock->queue.length;
		*longest = Max(*longest, dlock_ticket_waited(head, now));
	}
	dlock_lock_scan_end(&scan);
	return count;
}

/* The keys of a space's locks that have a queue; sets *count. */
DlockKey *
dlock_queue_waited_for(const DlockSpace *space, int *count)
{
	int			max = 64;
	DlockKey   *keys = palloc(max * sizeof(DlockKey));
	DlockLockScan scan;
	DlockLock  *lock;

	*count = 0;
	for (int p = 0; p < DLOCK_PARTITIONS; p++)
	{
		int			before = *count;

		dlock_lock_scan_begin_in(&scan, p, &space->key, true);
		while ((lock = dlock_lock_scan_next(&scan)) != NULL)
		{
			if (*count < max)
				dlock_key_copy(&keys[*count], &lock->key);
			(*count)++;
		}
		dlock_lock_scan_end(&scan);
		if (*count <= max)
			continue;
		/* visit this partition again, with more room */
		max = *count * 2;
		keys = repalloc_huge(keys, (Size) max * sizeof(DlockKey));
		*count = before;
		p--;
	}
	return keys;
}

/*
 * Returns the next rows, palloc'd; NULL: the end.  *partition must be 0 at the
 * first call; each call advances it.  Each lock is copied at one moment.
 */
DlockRow *
dlock_queue_rows_next(DlockSpace *space, int *partition)
{
	Rows		rows = {.tail = &rows.first, .complete = true};
	DlockLockScan locks;
	DlockLock  *lock;

	while (rows.complete && rows.count < ROWS_IN_A_GO &&
		   *partition < DLOCK_PARTITIONS)
	{
		dlock_lock_scan_begin_in(&locks, (*partition)++, &space->key, false);
		while (rows.complete && (lock = dlock_lock_scan_next(&locks)) != NULL)
			copy_lock(&rows, lock);
		dlock_lock_scan_end(&locks);
	}
	check_complete(&rows);
	/* one flush for all locks, in place of one for each lock (I15) */
	if (rows.first)
		dlock_journal_flush_removals(space);
	return rows.first;
}

/* The rows of one lock; NULL if there are none */
DlockRow *
dlock_queue_rows_of(DlockSpace *space, const DlockKey *key)
{
	DlockLock  *lock = dlock_lock_find(key);
	Rows		rows = {.tail = &rows.first, .complete = true};

	if (lock == NULL)
		return NULL;
	copy_lock(&rows, lock);
	dlock_lock_release(lock);
	check_complete(&rows);
	dlock_journal_flush_removal(space, key);
	return rows.first;
}
