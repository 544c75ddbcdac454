/*-------------------------------------------------------------------------
 *
 * ticket.c
 *	  Ticket numbers, and the memory of tickets.
 *
 * Numbers are drawn from a block in the space.  Blocks are reserved from the
 * sequence dlock_ticket_seq, whose last_value is the greatest number reserved.
 * A block is used only after the WAL record of its reservation is flushed, so
 * no number is drawn twice, even after a crash.
 *
 * A block starts above three numbers: the sequence's last_value, the time
 * (seconds since 2025-01-01, shifted left by 22), and the greatest number that
 * the database has reserved in this server.  The time makes numbers grow if
 * the sequence has gone back, as after lost WAL, point-in-time recovery or the
 * restore of an old dump.  The third number is for an extension that was
 * dropped and created again.
 *
 * Why not nextval()?  It changes the user's lastval(), locks the sequence to
 * the end of the transaction, and assigns a transaction id.  It fails in a
 * read-only transaction, and cannot start above two other bounds in one step.
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

/* keeps tickets of different backends off each other's cache lines */
#define TICKET_SIZE	TYPEALIGN(PG_CACHE_LINE_SIZE, sizeof(DlockTicket))

/* 2025-01-01 00:00:00 UTC, in seconds since PostgreSQL's epoch */
#define EPOCH_SECONDS	INT64CONST(788918400)
#define TIME_SHIFT		22

/* A ticket for the next request; it stays spare until it has joined a lock */
static DlockTicket *spare = NULL;

/* Make dlock_ticket_draw() draw from a reserved block. */
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
 * The least number for the current time.  It grows faster than numbers are
 * drawn, so a later block is above all numbers drawn before.
 */
static int64
floor_by_time(void)
{
	int64		now = GetCurrentTimestamp() - EPOCH_SECONDS * USECS_PER_SEC;
	int64		seconds = now / USECS_PER_SEC;
	int64		microseconds = now % USECS_PER_SEC;

	/* a clock that is decades off must not use up all numbers */
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
				 errhint("Drop the extension and create it again, which ends all locks of this database.")));
	dlock_check_permanent(sequence);
}

/*
 * Open the sequence, to reserve a block.  Raises 55000 if the sequence has a
 * new file from this transaction: a rollback would undo the reservation.
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

static Form_pg_sequence_data
sequence_data(Page page)
{
	ItemId		item = PageGetItemId(page, FirstOffsetNumber);
	HeapTupleHeader header = (HeapTupleHeader) PageGetItem(page, item);

	return (Form_pg_sequence_data) ((char *) header + header->t_hoff);
}

static int64
last_reserved(Form_pg_sequence_data data)
{
	return data->is_called ? data->last_value : data->last_value - 1;
}

/* Can this number have been drawn?  Returns true if the sequence is locked. */
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

/* Reserve a block at "minimum" or above, and flush its WAL record. */
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
				 errhint("DROP EXTENSION, a restart of the server and CREATE EXTENSION restart the numbers. Afterwards, everything that stores fences must forget them.")));
	data->last_value = reserved + DLOCK_TICKET_BLOCK;
	data->is_called = true;
	data->log_cnt = 0;			/* so that a later nextval() writes WAL */
	lsn = GenericXLogFinish(state);
	UnlockReleaseBuffer(buffer);
	XLogFlush(lsn);
	return reserved + 1;
}

/*
 * The first number above all numbers that were reserved in this server for
 * spaces of this database, including dropped and rolled-back spaces
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
 * A space has reserved the numbers below "limit": make the database's other
 * spaces reserve before they draw again (I23).  The caller has called
 * dlock_first_unreserved() under reserve_lock.
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
			!OidIsValid(entry->key.extension) || entry->space == dlock_pointer(space))
			continue;
		other = dlock_space_at(entry->space);
		SpinLockAcquire(&other->mutex);
		/* a concurrent draw fails, because this changes next_ticket */
		pg_atomic_write_u64(&other->next_ticket,
							pg_atomic_read_u64(&other->ticket_limit));
		SpinLockRelease(&other->mutex);
	}
	dshash_seq_term(&status);
}

/*
 * Reserve a block that starts at "minimum" or above, for later draws (I23).
 * If "minimum" is 0 and another backend has just installed a block, use that
 * block.  Writes and flushes WAL.  The caller holds none of dlock's locks.
 */
void
dlock_ticket_reserve(DlockSpace *space, int64 minimum)
{
	Relation	sequence = open_sequence(space);

	LWLockAcquire(&dlock_control->reserve_lock, LW_EXCLUSIVE);
	if (minimum > 0 || pg_atomic_read_u64(&space->next_ticket) >=
		pg_atomic_read_u64(&space->ticket_limit))
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

/* GetCurrentTimestamp() at a quarter of the cost, some milliseconds late */
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

/* Free the texts of a ticket that is in no lock.  Raises nothing. */
void
dlock_ticket_release_texts(DlockTicket *ticket)
{
	if (DsaPointerIsValid(ticket->info))
		dlock_text_free(ticket->role, ticket->info);
	ticket->info = InvalidDsaPointer;
	if (DsaPointerIsValid(ticket->announcement))
		dlock_announcement_replace(ticket, InvalidDsaPointer, false);
}

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
	ticket->space = dlock_pointer(space);
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
make_spare_ticket(Oid role)
{
	spare = dlock_allocate(role, TICKET_SIZE);
	spare->role = role;
	spare->info = InvalidDsaPointer;
	spare->announcement = InvalidDsaPointer;
	pg_atomic_init_u32(&spare->state, DLOCK_GONE);
	pg_atomic_init_u32(&spare->session_depth, 0);
	pg_atomic_init_u32(&spare->xact_depth, 0);
	fill_for_session(spare);
}

/* Do the spare ticket and entry fit a request, so that none is allocated? */
bool
dlock_spares_fit(const DlockRequest *request, Oid role)
{
	return spare && spare->role == role && request->info == NULL &&
		request->channel == NULL && dlock_lock_is_spare(&request->key, role);
}

/* Make a session's ticket.  Raises 53200.  Does not check the memory limit. */
DlockTicket *
dlock_ticket_make(DlockSpace *space, const DlockRequest *request, Oid role)
{
	DlockTicket *ticket;

	if (unlikely(spare == NULL))
		make_spare_ticket(role);
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

/* Fill a ticket.  After error 53200, it keeps the texts made so far. */
void
dlock_ticket_fill(DlockSpace *space, const DlockRequest *request,
				  DlockTicket *ticket)
{
	fill_for_session(ticket);
	fill_for_request(space, request, ticket);
	ticket->enqueued_at = GetCurrentTimestamp();
}

/* The spare ticket has joined a lock. */
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
		dlock_release_memory(ticket->role, ticket, TICKET_SIZE);
}

/* Free this backend's spare ticket and entry, at exit. */
void
dlock_free_spares(void)
{
	DlockTicket *ticket = spare;

	spare = NULL;
	if (ticket)
	{
		/* of a request that was refused */
		dlock_ticket_release_texts(ticket);
		dlock_release_memory(ticket->role, ticket, TICKET_SIZE);
	}
	dlock_lock_free_spare();
}
