/*-------------------------------------------------------------------------
 *
 * ticket.c
 *	  Ticket numbers, and the memory of tickets.
 *
 * Numbers are drawn from a block that is kept in the space, in shared memory,
 * and blocks are reserved from the sequence dlock_ticket_seq.  The sequence's
 * last_value is the greatest number ever reserved.  A block is usable only
 * after the record of its reservation has been flushed, and so a number is
 * never drawn twice, whatever crashes.
 *
 * A block starts above everything reserved before, and above the time: the
 * seconds since 2025-01-01 shifted left by 22, as snowflake ids do it.  Where
 * the sequence itself has gone back, as after the promotion of a standby that
 * lacked the last records, point-in-time recovery or the restoring of an old
 * dump, time carries the numbers on; where the clock has gone back, the
 * sequence does.  And in one server it starts above whatever the database has
 * reserved, should the extension have been dropped and made anew meanwhile, and
 * perhaps come back by a rollback.
 *
 * Why not nextval()?  It shows in the user's lastval(), it keeps a lock on
 * the sequence until the end of the transaction, it assigns a transaction id,
 * it refuses in a read-only transaction, and it cannot take the greater of
 * two floors in one step.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <time.h>

#include "access/generic_xlog.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/xlog.h"
#include "catalog/pg_class.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/bufpage.h"
#include "storage/lmgr.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "shared/inner.h"

/* Tickets of different backends shall not share a cache line. */
#define TICKET_SIZE	TYPEALIGN(PG_CACHE_LINE_SIZE, sizeof(DlockTicket))

/* 2025-01-01 00:00:00 UTC, in seconds since PostgreSQL's epoch */
#define EPOCH_SECONDS	INT64CONST(788918400)
#define TIME_SHIFT		22

/*
 * One ticket is kept for the next request, so that most need no allocation.
 * A ticket stays the spare one until it has joined a lock: a request that
 * fails before that leaves nothing to be freed.
 */
static DlockTicket *spare = NULL;

static bool
numbers_left(DlockSpace *space)
{
	return pg_atomic_read_u64(&space->next_ticket) <
		pg_atomic_read_u64(&space->ticket_limit);
}

/* Make a reserved block the one to draw from. */
static void
install_block(DlockSpace *space, uint64 first, uint64 limit)
{
	SpinLockAcquire(&space->mutex);
	pg_atomic_write_u64(&space->next_ticket, first);
	pg_write_barrier();
	pg_atomic_write_u64(&space->ticket_limit, limit);
	SpinLockRelease(&space->mutex);
}

/*
 * The greatest number that the time says may have been used already.  The
 * fraction of the second counts, too: a block that starts there is drawn from
 * more slowly than the time goes on, so a block of a later moment lies above
 * whatever was drawn before it, however soon it follows.
 */
static int64
floor_by_time(void)
{
	int64		now = GetCurrentTimestamp() - EPOCH_SECONDS * USECS_PER_SEC;
	int64		seconds = now / USECS_PER_SEC;
	int64		microseconds = now % USECS_PER_SEC;

	/* a clock that is decades off must not use up the numbers for ever */
	if (now < 0 || seconds >= (DLOCK_MAX_TICKET >> TIME_SHIFT))
		return 0;
	return (seconds << TIME_SHIFT) +
		(microseconds << TIME_SHIFT) / USECS_PER_SEC;
}

static void
check_sequence(Relation sequence)
{
	if (sequence->rd_rel->relkind != RELKIND_SEQUENCE)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("\"%s\" is not a sequence",
						RelationGetRelationName(sequence)),
				 errhint("Drop the extension and create it anew, which ends all locks of this database.")));
	dlock_check_permanent(sequence);
}

/*
 * The sequence, for as long as a block is reserved.
 *
 * An ALTER SEQUENCE of this transaction has given it a new file, which goes if
 * the transaction is rolled back, with the reservation in it.  That of another
 * one is waited for.
 */
static Relation
open_sequence(DlockSpace *space)
{
	Relation	sequence = dlock_open_relation(space, "dlock_ticket_seq",
											   RowExclusiveLock);

	check_sequence(sequence);
	if (COMPAT_HAS_NEW_FILE(sequence))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot reserve ticket numbers in a transaction that has changed sequence \"%s\"",
						RelationGetRelationName(sequence)),
				 errdetail("A rollback would undo the reservation, too."),
				 errhint("Commit first; or call dlock_advance_ticket() instead of ALTER SEQUENCE.")));
	return sequence;
}

/* What a sequence's page has */
static Form_pg_sequence_data
sequence_data(Page page)
{
	ItemId		item = PageGetItemId(page, FirstOffsetNumber);
	HeapTupleHeader header = (HeapTupleHeader) PageGetItem(page, item);

	return (Form_pg_sequence_data) ((char *) header + header->t_hoff);
}

/* The last number that it says was reserved */
static int64
last_reserved(Form_pg_sequence_data data)
{
	return data->is_called ? data->last_value : data->last_value - 1;
}

/*
 * Can this number have been drawn?  Called by who loads, who waits for no lock:
 * where the sequence is locked, the number may be right.
 */
bool
dlock_ticket_was_reserved(DlockSpace *space, int64 number)
{
	Relation	sequence;
	Buffer		buffer;
	Oid			id;
	bool		result;

	if (number <= floor_by_time())
		return true;
	id = dlock_relation(space, "dlock_ticket_seq");
	if (!ConditionalLockRelationOid(id, AccessShareLock))
		return true;
	sequence = try_relation_open(id, NoLock);
	if (sequence == NULL)
	{
		UnlockRelationOid(id, AccessShareLock);
		return true;
	}
	check_sequence(sequence);
	buffer = ReadBuffer(sequence, 0);
	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	result = number <= last_reserved(sequence_data(BufferGetPage(buffer)));
	UnlockReleaseBuffer(buffer);
	relation_close(sequence, AccessShareLock);
	return result;
}

/*
 * Write into the sequence that a block is reserved, and flush that.  The block
 * starts at "minimum" or later; returns its first number.
 */
static int64
write_reservation(Relation sequence, int64 minimum)
{
	Buffer		buffer = ReadBuffer(sequence, 0);
	GenericXLogState *state;
	Page		page;
	Form_pg_sequence_data data;
	int64		reserved;
	XLogRecPtr	lsn;

	LockBuffer(buffer, BUFFER_LOCK_EXCLUSIVE);
	state = GenericXLogStart(sequence);
	page = GenericXLogRegisterBuffer(state, buffer, 0);
	data = sequence_data(page);
	reserved = last_reserved(data);
	reserved = Max(reserved, floor_by_time());
	reserved = Max(reserved, minimum - 1);
	if (reserved > DLOCK_MAX_TICKET - DLOCK_TICKET_BLOCK)
		ereport(ERROR,
				(errcode(ERRCODE_SEQUENCE_GENERATOR_LIMIT_EXCEEDED),
				 errmsg("out of ticket numbers"),
				 errdetail("Ticket numbers end at %lld.",
						   (long long) DLOCK_MAX_TICKET),
				 errhint("DROP EXTENSION, a restart of the server and CREATE EXTENSION begin the numbers anew. All that stores fences must forget them then.")));
	data->last_value = reserved + DLOCK_TICKET_BLOCK;
	data->is_called = true;
	data->log_cnt = 0;			/* so that nextval() writes WAL, too */
	lsn = GenericXLogFinish(state);
	UnlockReleaseBuffer(buffer);
	XLogFlush(lsn);
	return reserved + 1;
}

/*
 * The first ticket number that no space of this database has reserved since
 * the server was started.  There can be several spaces: an installation that
 * was dropped, or rolled back, may still be in use, or was, and its sequence is
 * not to be seen any more.
 */
uint64
dlock_first_unreserved(Oid database)
{
	DlockSpaceKey key = {database, InvalidOid};
	DlockSpaceEntry *entry;
	uint64		result;
	bool		found;

	entry = dlock_table_insert(dlock_spaces, &key, &found);
	if (!found)
	{
		entry->users = 0;
		entry->useless = false;
		entry->space = InvalidDsaPointer;
		entry->unreserved = 0;
	}
	result = entry->unreserved;
	dshash_release_lock(dlock_spaces, entry);
	return result;
}

/*
 * A space has reserved the numbers below "limit", and is about to draw from
 * them.  From now on no other space of the database draws a number, because
 * that would be below these (I23); each has to reserve some first.
 *
 * The caller holds the lock under which numbers are reserved, and has called
 * dlock_first_unreserved() under it.
 */
static void
set_unreserved(const DlockSpace *space, uint64 limit)
{
	DlockSpaceKey key = {space->key.database, InvalidOid};
	DlockSpaceEntry *entry;
	dshash_seq_status status;

	Assert(LWLockHeldByMeInMode(&dlock_control->reserve_lock, LW_EXCLUSIVE));
	entry = dshash_find(dlock_spaces, &key, true);
	Assert(entry != NULL);
	entry->unreserved = Max(entry->unreserved, limit);
	dshash_release_lock(dlock_spaces, entry);

	dshash_seq_init(&status, dlock_spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL)
	{
		DlockSpace *other;

		if (entry->key.database != key.database ||
			!OidIsValid(entry->key.extension) || entry->space == space->self)
			continue;
		other = dlock_space_at(entry->space);
		SpinLockAcquire(&other->mutex);
		/* who is just drawing finds the next number changed */
		pg_atomic_write_u64(&other->next_ticket,
							pg_atomic_read_u64(&other->ticket_limit));
		SpinLockRelease(&other->mutex);
	}
	dshash_seq_term(&status);
}

/*
 * Reserve a block that starts at "minimum" or later, and make it the one to
 * draw from.  A minimum of 0 asks for any block, and may find that another
 * backend has just installed one.
 *
 * Blocks are reserved one after the other, whosever they are: so each lies
 * above all that any space of the database has drawn from before it, and none
 * draws from an earlier one afterwards.
 *
 * Writes and flushes WAL; called without any lock of dlock's.
 */
void
dlock_ticket_reserve(DlockSpace *space, int64 minimum)
{
	Relation	sequence = open_sequence(space);

	LWLockAcquire(&dlock_control->reserve_lock, LW_EXCLUSIVE);
	if (minimum > 0 || !numbers_left(space))
	{
		int64		unreserved = (int64) dlock_first_unreserved(space->key.database);
		int64		first = write_reservation(sequence,
											  Max(minimum, unreserved));

		set_unreserved(space, first + DLOCK_TICKET_BLOCK);
		install_block(space, first, first + DLOCK_TICKET_BLOCK);
	}
	LWLockRelease(&dlock_control->reserve_lock);
	relation_close(sequence, RowExclusiveLock);
}

/*
 * The time, to within a few milliseconds, at a quarter of what the exact one
 * costs: as it was at the kernel's latest tick.  It is good for who looks at a
 * view, and never later than the exact one.
 */
static TimestampTz
current_time(void)
{
#ifdef CLOCK_REALTIME_COARSE
	struct timespec now;

	if (likely(clock_gettime(CLOCK_REALTIME_COARSE, &now) == 0))
		return (now.tv_sec - (int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) *
				SECS_PER_DAY) * USECS_PER_SEC + now.tv_nsec / 1000;
#endif
	return GetCurrentTimestamp();
}

/* Release what belongs to a ticket that is in no lock.  Raises nothing. */
void
dlock_ticket_release_texts(DlockTicket *ticket)
{
	dsa_pointer info = ticket->info;

	if (DsaPointerIsValid(info))
	{
		ticket->info = InvalidDsaPointer;
		dlock_text_free(ticket->role, info);
	}
	if (DsaPointerIsValid(ticket->announcement))
		dlock_announcement_free(ticket);
}

/* Whose a ticket is: this backend's, for as long as it has it */
static void
fill_for_session(DlockTicket *ticket)
{
	ticket->session = pg_atomic_read_u64(&dlock_my_backend->session);
	ticket->procno = compat_my_procno();
	ticket->pid = MyProcPid;
}

/* Raises 53200. */
static inline void
fill_for_request(DlockSpace *space, const DlockRequest *request,
				 DlockTicket *ticket)
{
	ticket->space = space->self;
	if (unlikely(request->info != NULL))
		ticket->info = dlock_text_copy(ticket->role, request->info);
	if (unlikely(request->channel != NULL))
		ticket->announcement = dlock_announcement_make(space, request);
	ticket->number = 0;
	ticket->scope = request->scope;
	ticket->mode = request->mode;
	ticket->slots = request->slots;
	ticket->permits = request->permits;
	ticket->queue_length = 0;
	ticket->granted_at = 0;
	ticket->pins = 0;
	ticket->wanted = false;
	ticket->link.prev = ticket->link.next = InvalidDsaPointer;
}

static void
make_spare(Oid role)
{
	dsa_pointer self = dlock_allocate(role, TICKET_SIZE);

	spare = dlock_address(self);
	spare->self = self;
	spare->role = role;
	spare->info = InvalidDsaPointer;
	spare->announcement = InvalidDsaPointer;
	pg_atomic_init_u32(&spare->state, DLOCK_GONE);
	pg_atomic_init_u32(&spare->session_depth, 0);
	pg_atomic_init_u32(&spare->xact_depth, 0);
	fill_for_session(spare);
}

/* Would a request's ticket take no more memory than this backend has spare? */
bool
dlock_ticket_is_spare(const DlockRequest *request, Oid role)
{
	return spare && spare->role == role && request->info == NULL &&
		request->channel == NULL;
}

/*
 * Make a ticket for a request, to be entered into the lock's queue.  Raises
 * 53200 where there is no memory; the caller has asked for that before.
 */
DlockTicket *
dlock_ticket_make(DlockSpace *space, const DlockRequest *request, Oid role)
{
	DlockTicket *ticket;

	if (unlikely(spare == NULL))
		make_spare(role);
	ticket = spare;
	dlock_ticket_release_texts(ticket);
	if (unlikely(ticket->role != role))
	{
		dlock_pass_memory(ticket->role, role, TICKET_SIZE);
		ticket->role = role;
	}
	fill_for_request(space, request, ticket);
	ticket->enqueued_at = current_time();
	pg_atomic_write_u32(&ticket->state, DLOCK_GONE);
	pg_atomic_write_u32(&ticket->session_depth, 0);
	pg_atomic_write_u32(&ticket->xact_depth, 0);
	return ticket;
}

/*
 * Fill in a lease's ticket, which has its role, for a request of this session's.
 * Raises 53200 where there is no memory; what belongs to the ticket is its own
 * already then.
 */
void
dlock_ticket_fill(DlockSpace *space, const DlockRequest *request,
				  DlockTicket *ticket)
{
	fill_for_session(ticket);
	fill_for_request(space, request, ticket);
	ticket->enqueued_at = GetCurrentTimestamp();
}

/* The ticket has joined a lock, and is not the spare one any more. */
void
dlock_ticket_joined(DlockTicket *ticket)
{
	Assert(ticket == spare);
	if (DsaPointerIsValid(ticket->announcement))
		dlock_announcement_count(ticket);
	spare = NULL;
}

/* Free a session's ticket that is in no lock.  Raises nothing. */
void
dlock_ticket_free(DlockTicket *ticket)
{
	dlock_ticket_release_texts(ticket);
	if (spare == NULL)
		spare = ticket;
	else
		dlock_release_memory(ticket->role, ticket->self, TICKET_SIZE);
}

/* The spare goes when the backend does. */
void
dlock_ticket_free_spare(void)
{
	DlockTicket *ticket = spare;

	spare = NULL;
	if (ticket)
		dlock_release_memory(ticket->role, ticket->self, TICKET_SIZE);
}
