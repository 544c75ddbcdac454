/*-------------------------------------------------------------------------
 *
 * shared.h
 *	  Functions on state that sessions and background processes share.
 *
 * Other directories of src include only this header of shared/ (src/README).
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_SHARED_H
#define DLOCK_SHARED_H

#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lockdefs.h"

#include "shared/shmem.h"

/* clock.c */
extern uint64 dlock_monotonic_now(void);

/* memory.c */
extern int	dlock_max_memory;	/* kilobytes */

/*
 * Bounds of dlock.max_memory.  In a smaller area, pieces of some sizes can
 * leave no room for pieces of other sizes.  DSA cannot address a larger area.
 */
#define DLOCK_MIN_AREA_KB	(4 * 1024)
#define DLOCK_MAX_AREA_KB	(1024 * 1024 * 1024)

extern DlockControl *dlock_control;
extern dsa_area *dlock_area;
extern char *dlock_area_start;

/* Bytes that locks and tickets may take; hash tables and DSA have the rest */
static inline int64
dlock_memory_limit(void)
{
	return (int64) (dlock_control->area_size - dlock_control->area_size / 4);
}

/*
 * The address of an object in the area (I5).  A pointer into a DSA area's
 * first segment is an offset: see DSA_MAKE_POINTER() in dsa.c.
 */
static inline void *
dlock_address(dsa_pointer pointer)
{
	Assert(DsaPointerIsValid(pointer));
	return dlock_area_start + pointer;
}

/* The pointer to an object at an address */
static inline dsa_pointer
dlock_pointer(const void *object)
{
	return (dsa_pointer) ((const char *) object - dlock_area_start);
}

/* The terminated string at a pointer, or NULL if the pointer is invalid */
static inline const char *
dlock_text_at(dsa_pointer text)
{
	return DsaPointerIsValid(text) ? dlock_address(text) : NULL;
}

/* account.c */
extern int	dlock_max_memory_per_role;	/* percent */
extern dshash_table *dlock_accounts;

extern dsa_pointer dlock_text_copy(Oid role, const char *text);
extern void dlock_text_free(Oid role, dsa_pointer text);
extern void dlock_report_memory(void);

/* The role that a request's memory counts for */
static inline Oid
dlock_request_role(const DlockRequest *request)
{
	return request->lease ? request->lease->role : GetUserId();
}

static inline DlockSpace *
dlock_space_at(dsa_pointer pointer)
{
	return dlock_address(pointer);
}

static inline DlockLink *
dlock_link_at(dsa_pointer pointer)
{
	return dlock_address(pointer);
}

/* lock_table.c */
extern void dlock_tables_reserve(uint64 more, bool with_locks);

/* shmem.c */
extern dshash_table *dlock_spaces;
extern DlockBackend *dlock_backends;
extern DlockBackend *dlock_my_backend;

extern void dlock_attach(bool as_worker);
extern void dlock_leave_at_exit(void (*leave) (void));
extern bool dlock_is_replaced(void);

/* counter.c */
static inline void
dlock_count(DlockCounter counter, uint64 amount)
{
	pg_atomic_uint64 *mine = &dlock_my_backend->counters[counter];

	/* only this backend writes it, so no locked instruction is needed */
	pg_atomic_write_u64(mine, pg_atomic_read_u64(mine) + amount);
}

static inline DlockState
dlock_state_of(const DlockTicket *ticket)
{
	return (DlockState)
		pg_atomic_read_u32((pg_atomic_uint32 *) &ticket->state);
}

extern const int64 dlock_wait_bounds[];

extern void dlock_count_wait(uint64 waited);
extern TimestampTz dlock_sum_counters(DlockSpace *space, uint64 *sums);
extern void dlock_reset_counters(DlockSpace *space);

/* contention.c */
typedef enum DlockWaitEnd
{
	DLOCK_WAIT_GRANTED,
	DLOCK_WAIT_TIMED_OUT,		/* by its own timeout, or lock_timeout */
	DLOCK_WAIT_DEADLOCK,
	DLOCK_WAIT_CUT_SHORT
} DlockWaitEnd;

extern void dlock_contention_prepare(DlockSpace *space);
extern void dlock_contention_wait(DlockSpace *space, const DlockKey *key,
								  uint64 waited, uint32 queue_length,
								  DlockWaitEnd how);
extern int	dlock_contention_copy(DlockSpace *space, DlockContended *entries);

/* catalog.c */
extern void dlock_check_permanent(Relation relation);
extern Oid	dlock_find_relation(DlockSpace *space, const char *name);
extern Oid	dlock_relation(DlockSpace *space, const char *name);
extern Relation dlock_open_relation(DlockSpace *space, const char *name,
									LOCKMODE mode);

/* space.c */
extern DlockSpace *dlock_current_space(void);
extern DlockSpace *dlock_known_space(void);
extern DlockSpace *dlock_find_space(const DlockSpaceKey *key);
extern bool dlock_space_is_current(const DlockSpace *space);
extern void dlock_key_fill(DlockKey *key, const DlockSpace *space,
						   const char *name, int length);
extern void dlock_detach(void);

/* purge.c */
extern void dlock_remove_unused_spaces(const DlockSpaceKey *current, bool all);
extern uint64 dlock_database_changes(void);
extern void dlock_request_check_memory(DlockSpace *space, Oid role);

/* ticket.c */

/*
 * Draw a number, under the lock of the entry that the ticket joins (I3).
 * Returns 0 if the block is used up.  Then the caller must release its locks,
 * call dlock_ticket_reserve() and try again.
 *
 * install_block() changes next_ticket before ticket_limit.  So the exchange
 * fails if a process has read the old next_ticket and the new ticket_limit.
 */
static inline int64
dlock_ticket_draw(DlockSpace *space)
{
	uint64		number = pg_atomic_read_u64(&space->next_ticket);

	do
	{
		pg_read_barrier();
		if (number >= pg_atomic_read_u64(&space->ticket_limit))
			return 0;
	} while (!pg_atomic_compare_exchange_u64(&space->next_ticket, &number,
											 number + 1));
	return (int64) number;
}

extern bool dlock_ticket_was_reserved(DlockSpace *space, int64 number);
extern void dlock_ticket_reserve(DlockSpace *space, int64 minimum);
extern bool dlock_spares_fit(const DlockRequest *request, Oid role);
extern DlockTicket *dlock_ticket_make(DlockSpace *space,
									  const DlockRequest *request, Oid role);
extern void dlock_ticket_free(DlockTicket *ticket);
extern void dlock_free_spares(void);

/* report.c */

#define DLOCK_REPORT_TEXT		100 /* bytes of a text in a report */
#define DLOCK_REPORT_TICKETS	10	/* tickets that a report names */

/* A user's text, cut if it is long; "" if there is none */
typedef struct DlockReportText
{
	char		text[DLOCK_REPORT_TEXT + sizeof("...")];
} DlockReportText;

/* A lease that has run out, for the log */
typedef struct DlockExpiry
{
	int64		lease;			/* 0: nothing to log */
	NameData	role;
	DlockReportText info;
	int64		ttl;			/* all times in microseconds */
	int64		renewed;		/* microseconds ago */
	int64		unconfirmed;	/* microseconds since the latest acknowledged
								 * heartbeat; 0: standbys do not count */
	int			attached_pid;	/* PID of the lease's session; 0: none */
	bool		session_ended;	/* the lease's session has ended */
	uint32		held;			/* tickets that hold; some are listed below */
	uint32		waiting;
	int			num_tickets;
	struct
	{
		int64		number;
		int			name_length;
		char		name[DLOCK_MAX_NAME];
		DlockReportText owner;
	}			tickets[DLOCK_REPORT_TICKETS];
} DlockExpiry;

/* The owner of a lease's ticket, for a message */
typedef struct DlockLeaseName
{
	int64		lease;			/* 0: the ticket is gone */
	NameData	role;
	DlockReportText owner;
} DlockLeaseName;

extern void dlock_lease_name_find(DlockSpace *space, int64 number,
							  DlockLeaseName *name);
extern void dlock_lease_name_append(StringInfo buffer,
									const DlockLeaseName *name);

/* queue.c */
typedef enum DlockJoin
{
	DLOCK_JOIN_GRANTED,
	DLOCK_JOIN_QUEUED,
	DLOCK_JOIN_BUSY,			/* a wait is needed, but "nowait" is set */
	DLOCK_JOIN_MISMATCH,		/* the lock is in use with other slots */
	DLOCK_JOIN_NO_NUMBER,		/* ticket numbers must be reserved first */
	DLOCK_JOIN_EXISTS,			/* the request has a ticket already (I14) */
	DLOCK_JOIN_LEASE_GONE
} DlockJoin;

/* The outcome of a request to join a lock */
typedef struct DlockJoined
{
	DlockJoin	outcome;
	int32		slots;			/* of the lock, if MISMATCH */
	DlockLock  *lock;			/* see dlock_queue_leave() */
	DlockLeaseTicket *existing; /* if EXISTS; a use by the caller has begun */
} DlockJoined;

/* A ticket, for the views; the rows of one lock are consecutive */
typedef struct DlockRow
{
	struct DlockRow *next;
	int64		number;
	DlockMode	mode;
	int32		slots;
	int32		permits;
	uint32		position;		/* in the queue; 0: among the holders */
	bool		granted;		/* a holder that has not ended */
	DlockScope	scope;
	uint32		session_depth;
	uint32		xact_depth;
	bool		pinned;
	int			pid;
	Oid			role;
	TimestampTz enqueued_at;
	TimestampTz granted_at;
	int64		lease;			/* 0: none */
	int64		remaining;		/* microseconds left; -1: no end */
	bool		closed;			/* ended; closes the lock until it leaves */
	bool		has_info;
	bool		has_owner;
	uint16		name_length;
	uint16		info_length;
	uint16		owner_length;
	uint16		channel_length; /* 0: none */
	char		text[FLEXIBLE_ARRAY_MEMBER];	/* the texts, in this order */
} DlockRow;

static inline bool
dlock_row_same_lock(const DlockRow *a, const DlockRow *b)
{
	return a->name_length == b->name_length &&
		memcmp(a->text, b->text, a->name_length) == 0;
}

/* A holder or waiter, for the deadlock detector */
typedef struct DlockMember
{
	int64		number;
	int64		lease;			/* of the ticket; or 0 */
	uint64		session;
	int			procno;
	int			pid;
	DlockMode	mode;
	int32		slots;			/* as set for the lock, else as requested */
	int32		permits;
	Oid			role;
	TimestampTz enqueued_at;
	bool		granted;
	bool		leaves;			/* has ended; leaves once its row is removed */
	bool		counts;			/* holds, waits, or a pin or delay keeps it */
	bool		closed;			/* ended; closes the lock until it leaves */
} DlockMember;

extern DlockJoined dlock_queue_join(DlockSpace *space,
									const DlockRequest *request,
									DlockTicket *ticket, bool nowait);
extern DlockJoined dlock_queue_join_for_lease(DlockSpace *space,
											  const DlockRequest *request,
											  DlockLeaseTicket *ticket,
											  bool nowait, bool adopt);
extern bool dlock_queue_adopt(DlockLeaseTicket *ticket);
extern void dlock_queue_resume(DlockSpace *space);
extern bool dlock_queue_end(DlockLeaseTicket *ticket, uint32 event);
extern bool dlock_queue_claim(DlockLeaseTicket *ticket, bool adopt);
extern bool dlock_queue_redirect(DlockLeaseTicket *ticket,
								 dsa_pointer announcement);
extern bool dlock_queue_exchange_info(const DlockKey *key,
									  DlockTicket *ticket, dsa_pointer *info);
extern bool dlock_queue_downgrade(const DlockKey *key, DlockTicket *ticket);
extern void dlock_queue_share(DlockLeaseTicket *ticket);
extern DlockLock *dlock_queue_expect_slots(const DlockKey *key, Oid role);
extern void dlock_queue_finish_slots(DlockSpace *space, const DlockKey *key,
									 DlockLock *lock, bool changed,
									 int32 slots);
extern void dlock_queue_load_slots(DlockSpace *space, const DlockKey *key,
								   int32 slots, Oid role);
extern void dlock_queue_unsettle(DlockSpace *space);
extern void dlock_queue_leave(const DlockKey *key, DlockTicket *ticket,
							  DlockLock *lock);

/* A ticket that was ended by force, as it was before its end */
typedef struct DlockForced
{
	DlockKey	key;
	bool		held;
	bool		waited;			/* if neither is set, the ticket had ended */
	int			pid;			/* of its session; 0: a lease has the ticket */
	Oid			role;			/* of the ticket */
	DlockLeaseName lease;
} DlockForced;

extern bool dlock_queue_force(DlockSpace *space, int64 number,
							  DlockForced *forced);
extern bool dlock_queue_pin(const DlockKey *key, DlockTicket *ticket);
extern bool dlock_queue_is_durable(const DlockKey *key, DlockTicket *ticket);
extern void dlock_queue_unpin(const DlockKey *key, DlockTicket *ticket);

/* queue_view.c */
extern int64 dlock_queue_fence(const DlockKey *key);
extern bool dlock_queue_is_fence(DlockSpace *space, const DlockKey *key,
								 int64 number);

/* A lock's state, for watchers */
typedef enum DlockHolding
{
	DLOCK_HELD_BY_NOBODY,
	DLOCK_HELD,
	DLOCK_HELD_NOT_YET,			/* the newest grant is not durable yet */
	DLOCK_HELD_NO_MORE			/* all holders have ended but not left yet */
} DlockHolding;

/* The newest holder */
typedef struct DlockHolder
{
	int64		number;
	DlockMode	mode;
	DlockScope	scope;
	bool		has_info;
	char		info[DLOCK_MAX_INFO + 1];
} DlockHolder;

extern DlockHolding dlock_queue_holder(DlockSpace *space, const DlockKey *key,
									   DlockHolder *holder);
extern bool dlock_queue_is_held_by(DlockSpace *space, const DlockKey *key,
								   int64 number);
extern int	dlock_queue_members(const DlockKey *key, int max_each,
								DlockMember *members, int max, int32 *slots);
extern int32 dlock_queue_slots(const DlockKey *key, int32 slots);
extern bool dlock_queue_has_waiters(const DlockKey *key);
extern uint64 dlock_queue_waiting(const DlockSpace *space, int64 *longest);

extern DlockKey *dlock_queue_waited_for(const DlockSpace *space, int *count);
extern DlockRow *dlock_queue_rows_next(DlockSpace *space, int *partition);
extern DlockRow *dlock_queue_rows_of(DlockSpace *space, const DlockKey *key);

/* record.c */
static inline DlockLease *
dlock_record_lease(DlockRecord *record)
{
	Assert(record->is_lease);
	return (DlockLease *) ((char *) record - offsetof(DlockLease, record));
}

static inline DlockLeaseTicket *
dlock_record_ticket(DlockRecord *record)
{
	Assert(!record->is_lease);
	return (DlockLeaseTicket *) ((char *) record -
								 offsetof(DlockLeaseTicket, record));
}

static inline DlockRecord *
dlock_record_at(dsa_pointer journal_link)
{
	return (DlockRecord *) ((char *) dlock_link_at(journal_link) -
							offsetof(DlockRecord, link));
}

static inline void
dlock_record_ref(DlockRecord *record)
{
	pg_atomic_fetch_add_u32(&record->references, 1);
}

extern void dlock_record_unref(DlockRecord *record);
extern int	dlock_record_begin_uses(void);
extern void dlock_record_end_uses(int before);
extern void dlock_id_find(DlockSpace *space, int64 number, DlockLease **lease,
						  DlockLeaseTicket **ticket);
extern const char *dlock_record_copy_info(DlockRecord *record, char *buffer);

/* id_table.c */
extern void dlock_id_insert(DlockRecord *record);

/* lease_ttl.c */
static inline int64
dlock_lease_ttl(const DlockLease *lease)
{
	return (int64) pg_atomic_read_u64((pg_atomic_uint64 *) &lease->ttl);
}

/* The highest synchronous_commit of the callers that rely on a lease */
static inline int
dlock_lease_durability(const DlockLease *lease)
{
	int			level = (int)
		pg_atomic_read_u32((pg_atomic_uint32 *) &lease->durability);

	/* dlock_lease_raise_durability() writes "confirmed" before "durability" */
	pg_read_barrier();
	return level;
}

extern void dlock_lease_raise_durability(DlockSpace *space,
										 DlockRecord *record, int level);
extern int64 dlock_lease_row_ttl(const DlockLease *lease);
extern bool dlock_lease_begin_ttl(DlockLease *lease, DlockRecord *record,
								  int64 ttl);
extern int	dlock_lease_finish_ttl(DlockLease *lease, uint64 start);
extern void dlock_lease_undo_ttl(DlockLease *lease, DlockRecord *record);
extern DlockLease *dlock_lease_next_retimed(DlockSpace *space);

/* lease.c */

/*
 * Returns the lease after the given one, or NULL after the last.  Given NULL,
 * returns the first lease.  Needs lease_lock.
 */
static inline DlockLease *
dlock_lease_next(const DlockSpace *space, const DlockLease *lease)
{
	dsa_pointer link = lease ? lease->in_space.next : space->leases.head;

	return DsaPointerIsValid(link) ? (DlockLease *)
		((char *) dlock_link_at(link) - offsetof(DlockLease, in_space)) : NULL;
}

static inline const char *
dlock_lease_role_name(const DlockLease *lease)
{
	return (const char *) lease + lease->role_name;
}

extern DlockLease *dlock_lease_make(DlockSpace *space, Oid role,
									const char *role_name, int64 ttl,
									int64 delay, const char *info);
extern DlockLease *dlock_lease_make_single(DlockSpace *space, Oid role,
										   const char *role_name, int64 ttl,
										   const DlockKey *key);
extern DlockLease *dlock_lease_find(DlockSpace *space, int64 number);
extern uint64 dlock_lease_deadline(DlockLease *lease);

static inline bool
dlock_lease_is_open(DlockLease *lease)
{
	return dlock_lease_deadline(lease) != 0;
}

static inline bool
dlock_lease_is_attached(const DlockLease *lease)
{
	return pg_atomic_read_u64((pg_atomic_uint64 *) &lease->deadline) >=
		DLOCK_NO_DEADLINE;
}

extern bool dlock_lease_has_run_out(DlockLease *lease);
extern int	dlock_lease_renew(DlockSpace *space, int64 number);
extern bool dlock_lease_confirm(DlockSpace *space, DlockLease *lease,
								int64 ttl, uint64 start);
extern bool dlock_lease_exchange_info(DlockLease *lease, dsa_pointer *info);
extern void dlock_lease_restore(DlockLease *lease, bool delayed);
extern void dlock_lease_begin_anew(DlockSpace *space, uint64 confirmed);
extern void dlock_lease_enter(DlockLease *lease);
extern bool dlock_lease_detach(DlockLease *lease);

/* lease_end.c */
extern bool dlock_lease_ticket_restore(DlockLeaseTicket *ticket, bool granted);
extern bool dlock_lease_is_over(DlockSpace *space, DlockRecord *record);
extern bool dlock_lease_settle(DlockSpace *space, DlockRecord *record);
extern void dlock_lease_ticket_withdraw(DlockLeaseTicket *ticket);
extern void dlock_lease_ticket_drop(DlockLeaseTicket *ticket);
extern void dlock_lease_withdraw(DlockLease *lease);
extern int64 dlock_lease_force(DlockSpace *space, int64 number,
							   bool *was_open);
extern int64 dlock_lease_end_all(DlockSpace *space);
extern int64 dlock_lease_release(DlockSpace *space, int64 number);
extern uint64 dlock_lease_expire(DlockLease *lease, uint64 until,
								 DlockExpiry *expiry);
extern void dlock_lease_abandon(DlockSpace *space);

/* lease_ticket.c */

/* The ticket whose in_lease is at "link", or NULL if "link" is invalid */
static inline DlockLeaseTicket *
dlock_ticket_in_lease(dsa_pointer link)
{
	return DsaPointerIsValid(link) ? (DlockLeaseTicket *)
		((char *) dlock_link_at(link) - offsetof(DlockLeaseTicket, in_lease)) :
		NULL;
}

static inline DlockLease *
dlock_lease_of(const DlockLeaseTicket *ticket)
{
	return dlock_address(ticket->lease);
}

static inline bool
dlock_lease_ticket_is_live(const DlockLeaseTicket *ticket)
{
	return dlock_lease_is_open(dlock_lease_of(ticket));
}

/* The lease that has this record, or whose ticket has the record */
static inline DlockLease *
dlock_record_lease_of(DlockRecord *record)
{
	return record->is_lease ? dlock_record_lease(record) :
		dlock_lease_of(dlock_record_ticket(record));
}

/* The record whose row has the lease's fields */
static inline DlockRecord *
dlock_record_of_lease(DlockRecord *record)
{
	DlockLease *lease = dlock_record_lease_of(record);

	return lease->single ? record : &lease->record;
}

static inline bool
dlock_state_has_ended(DlockState state)
{
	return state != DLOCK_WAITING && state != DLOCK_GRANTED;
}

/* Is a ticket shared, or about to be?  Needs no lock. */
static inline bool
dlock_ticket_is_shared(const DlockTicket *ticket)
{
	return ticket->mode == DLOCK_SHARED ||
		(ticket->scope == DLOCK_LEASE &&
		 ((const DlockLeaseTicket *) ticket)->lowers);
}

extern DlockLeaseTicket *dlock_lease_ticket_make(DlockSpace *space,
												 const DlockRequest *request);
extern DlockLeaseTicket *dlock_lease_ticket_find(DlockSpace *space,
												 int64 number);
extern void dlock_lease_ticket_begin_redirect(DlockLeaseTicket *ticket,
											  dsa_pointer announcement);
extern void dlock_lease_ticket_undo_redirect(DlockLeaseTicket *ticket,
											 dsa_pointer announcement);
extern void dlock_lease_ticket_channel(DlockLeaseTicket *ticket,
									   char *channel);

/* journal.c */
extern void dlock_journal_unmark(DlockSpace *space, DlockRecord *record);
extern XLogRecPtr dlock_journal_position(DlockSpace *space,
										 DlockRecord *record);
extern XLogRecPtr dlock_journal_find_removal(DlockSpace *space,
											 const DlockKey *key);

/*
 * A WAL position after the latest commit that removed a row of this lock's
 * tickets, or made one shared; 0 only if there was no such commit.  A process
 * that sees a grant also sees the removals noted before the grant.
 */
static inline XLogRecPtr
dlock_journal_removal(DlockSpace *space, const DlockKey *key)
{
	pg_read_barrier();
	if (likely(pg_atomic_read_u32(&space->has_removed) == 0))
		return InvalidXLogRecPtr;
	return dlock_journal_find_removal(space, key);
}

extern void dlock_journal_flush_removal(DlockSpace *space,
										const DlockKey *key);
extern void dlock_journal_flush_removals(DlockSpace *space);
extern void dlock_journal_fail(DlockSpace *space, int code);
extern void dlock_journal_note_removal(DlockSpace *space, const DlockKey *key,
									   XLogRecPtr lsn);

/* quorum.c */
extern bool dlock_quorum_has_standbys(void);
extern bool dlock_quorum_is_acknowledged(XLogRecPtr lsn, int durability);
extern void dlock_quorum_look(DlockSpace *space);
extern bool dlock_quorum_wait(DlockSpace *space, int durability,
								 uint64 since, uint64 until);
extern void dlock_quorum_send(DlockSpace *space, uint64 now);

/* announcement.c */
extern dsa_pointer dlock_announcement_make(DlockSpace *space,
										   const DlockRequest *request);
extern void dlock_announcement_replace(DlockTicket *ticket,
									   dsa_pointer announcement, bool keep);
extern void dlock_announcement_event(DlockTicket *ticket, uint32 events);
extern void dlock_announcement_end_claim(DlockTicket *ticket, uint64 claim,
										 bool committed);
extern uint64 dlock_announcement_claim(DlockTicket *ticket);
extern uint64 dlock_announcement_my_claim(DlockTicket *ticket);
extern void dlock_announcement_channel(DlockTicket *ticket, char *channel);

/* Copy of an announcement in the outbox */
typedef struct DlockMessage
{
	int64		number;
	uint32		events;
	char		channel[NAMEDATALEN];
	char		name[6 * DLOCK_MAX_NAME + 3];	/* quoted; a byte can
												 * become \uXXXX */
} DlockMessage;

extern int	dlock_outbox_copy(DlockSpace *space, DlockMessage *messages,
							  int max);
extern void dlock_outbox_clear(DlockSpace *space);

/* watch.c */

/* A name whose watches are being told */
typedef struct DlockTelling
{
	DlockWatched *watched;
	uint64		change;			/* value of "changes" when the telling began */
	uint64		number;			/* of the latest dlock_watch_copy() */
	int			count;			/* watches that this call copied */
} DlockTelling;

/* A watch to be told */
typedef struct DlockWatcher
{
	char		channel[NAMEDATALEN];
	bool		anew;			/* not told since it was armed */
} DlockWatcher;

extern DlockWatch *dlock_watch_begin(DlockSpace *space, const DlockKey *key,
									 const char *channel);
extern void dlock_watch_arm(DlockWatch *watch);
extern void dlock_watch_end(DlockWatch *watch);
extern uint64 dlock_watch_next_due(DlockSpace *space);
extern int	dlock_watch_take(DlockSpace *space, DlockTelling *tellings,
							 int max);
extern bool dlock_watch_begin_telling(DlockSpace *space,
									  DlockTelling *telling);
extern void dlock_watch_copy(DlockSpace *space, DlockTelling *telling,
							 DlockWatcher *watchers, int max);
extern bool dlock_watch_end_telling(DlockSpace *space,
									const DlockTelling *telling, bool told);

/* json.c */
extern char *dlock_json_text(const char *text, int length, bool replace);

/* launcher.c */

/* The proc number of an office's holder, or -1 */
static inline int
dlock_office_holder(DlockSpace *space, DlockOffice office)
{
	return (int) pg_atomic_read_u32(&space->offices[office].holder) - 1;
}

/* Are there messages for the sender to send? */
static inline bool
dlock_has_messages(const DlockSpace *space)
{
	return space->outbox.length > 0 || space->changed.length > 0;
}

/* Is there work for the worker or the sender now? */
static inline bool
dlock_worker_has_work(const DlockSpace *space)
{
	return space->journal.length > 0 || dlock_has_messages(space);
}

/* Is there work, or a lease that will be due at some time? */
static inline bool
dlock_worker_is_needed(const DlockSpace *space)
{
	return dlock_worker_has_work(space) || space->leases.length > 0;
}

extern bool dlock_office_take(DlockSpace *space, DlockOffice office);
extern bool dlock_office_leave(DlockSpace *space, DlockOffice office);
extern bool dlock_office_start(DlockSpace *space, DlockOffice office);
extern bool dlock_office_wake(DlockSpace *space, DlockOffice office);
extern int	dlock_office_pid(DlockSpace *space, DlockOffice office);
extern bool dlock_worker_wake(DlockSpace *space);
extern bool dlock_worker_has_company(DlockSpace *space, bool waits);
extern void dlock_worker_look(DlockSpace *space, bool waits);

#endif							/* DLOCK_SHARED_H */
