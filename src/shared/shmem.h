/*-------------------------------------------------------------------------
 *
 * shmem.h
 *	  dlock's memory map: every structure that processes share.
 *
 * A small header is in the main shared memory segment, all the rest in one
 * segment of dynamic shared memory:
 *
 *	DlockHeader			one per server, in the main segment
 *	pids				pg_atomic_uint32[] by proc number
 *	DlockControl		one per segment, with these arrays:
 *	  locks				(space, name) -> DlockLock
 *	  ids				number -> DlockRecord
 *	  requests			request -> DlockLeaseTicket
 *	  backends			by proc number
 *	a DSA area of dlock.max_memory, which never grows:
 *	  spaces			dshash: (database, extension) -> DlockSpaceEntry
 *	  accounts			dshash: role -> DlockAccount
 *	  DlockSpace		one per space: its numbers, worker, journal, outbox
 *	  DlockTicket		one per holder and per waiter, linked into its lock
 *	  DlockLeaseTicket	... one of lease scope
 *	  DlockLease		one per lease, linked into its space
 *	  DlockWatched		one per watched name, in its partition
 *	  DlockWatch		one per session and channel that watch it
 *
 * "The lock entry's lock" is the LWLock of its partition of the table.  It
 * protects the lock and the links and states of all its tickets.  src/README
 * has the lock order and the invariants, cited by number.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_SHMEM_H
#define DLOCK_SHMEM_H

#include "access/xlogdefs.h"
#include "datatype/timestamp.h"
#include "lib/dshash.h"
#include "port/atomics.h"
#include "storage/condition_variable.h"
#include "storage/lwlock.h"
#include "storage/spin.h"
#include "utils/dsa.h"

#include "types.h"

/*
 * Number of the memory layout, increased by the first change after a release.
 * Libraries of different layouts never share a segment (DlockHeader).
 */
#ifndef DLOCK_LAYOUT
#define DLOCK_LAYOUT		1
#endif

#define DLOCK_HEADER_NAME	"dlock"

/* Ticket numbers per reservation, of which a restart loses the rest */
#define DLOCK_TICKET_BLOCK	(1 << 18)

/*
 * The state of a ticket.  WAITING and LEAVING tickets are in the lock's queue,
 * GRANTED and ENDING ones among its holders, a GONE one in neither.  A LEAVING
 * ticket waits no more, and an ENDING one holds no more.  Both stay until the
 * last pin is released, and a lease's until the removal of its row is in the
 * WAL.
 *
 * Only the backend that made a session's ticket frees it, so that backend can
 * read the state without a lock.  References to a lease's ticket are counted.
 */
typedef enum DlockState
{
	DLOCK_WAITING,
	DLOCK_LEAVING,
	DLOCK_GRANTED,
	DLOCK_ENDING,
	DLOCK_GONE
} DlockState;

/* A doubly linked list of links in the area */
typedef struct DlockLink
{
	dsa_pointer prev;			/* protected as the list is */
	dsa_pointer next;
} DlockLink;

typedef struct DlockList
{
	dsa_pointer head;
	dsa_pointer tail;
	uint32		length;
} DlockList;

/* The announcement of a ticket, which owns it */
typedef struct DlockAnnouncement
{
	DlockLink	link;			/* in DlockSpace.outbox; must be first */

	/* immutable */
	char		channel[NAMEDATALEN];
	Size		size;			/* of the whole structure */
	Oid			role;			/* its memory counts for this role */

	/* protected by the outbox's lock */
	bool		armed;			/* its LISTEN is in effect */
	uint64		armer;			/* session whose commit arms it; 0: none */
	uint64		claim;			/* that session's number for this */
	uint32		events;			/* DLOCK_EVENT_... still to be announced */
	uint32		sending;		/* of these, the ones being sent */
	bool		in_outbox;		/* linked there: armed, with events (I28) */
	bool		orphaned;		/* its ticket is gone: freed once it is sent */
	int64		number;			/* of the ticket */
	bool		granted;		/* DLOCK_EVENT_GRANTED is or was an event */
	bool		wanted;			/* a ticket waits: an event once "granted" */

	/* the owner's */
	bool		counted;		/* in DlockSpace.announced */

	/* immutable */
	char		name[FLEXIBLE_ARRAY_MEMBER];	/* quoted JSON string */
} DlockAnnouncement;

#define DLOCK_EVENT_GRANTED		0x01
#define DLOCK_EVENT_RELEASED	0x02
#define DLOCK_EVENT_EXPIRED		0x04
#define DLOCK_EVENT_WANTED		0x08

typedef struct DlockTicket
{
	DlockLink	link;			/* in a list of its lock; must be first */

	/* immutable once the ticket has joined a lock */
	dsa_pointer space;			/* DlockSpace */
	int64		number;
	uint64		session;		/* of its backend, maybe gone; 0: a lease's */
	int			procno;
	int			pid;
	Oid			role;			/* the requester's, or the lease's; its memory
								 * counts for this role */
	uint8		scope;			/* DlockScope of the first request */
	uint8		mode;			/* DlockMode; can become shared, under the
								 * lock entry's lock */
	bool		wanted;			/* a ticket has waited since the grant (I28);
								 * protected by the lock entry's lock */
	int32		slots;			/* 0 except for slots */
	int32		permits;		/* 1 except for slots */
	uint32		queue_length;	/* tickets in it after joining; 0: no wait */
	uint32		pins;			/* guarded commits in progress; protected by
								 * the lock entry's lock */
	TimestampTz enqueued_at;

	/* protected by the lock entry's lock */
	TimestampTz granted_at;		/* < 0 in a wait, see dlock_ticket_waited() */

	/* the same; of a lease's ticket changed under the lease lock, too (I19) */
	dsa_pointer info;			/* terminated string, or invalid */

	/* protected by the outbox's lock */
	dsa_pointer announcement;	/* DlockAnnouncement, or invalid */

	/* atomic: changed under the lock entry's lock */
	pg_atomic_uint32 state;		/* DlockState */

	/* atomic: how often acquired, written by the owner */
	pg_atomic_uint32 session_depth;
	pg_atomic_uint32 xact_depth;
} DlockTicket;

/*
 * A lease or a lease's ticket: what can have a row.  Changes are marked here,
 * and the worker writes them (journal.c).
 */
typedef struct DlockRecord
{
	/* atomic; dropping the last reference frees the record */
	pg_atomic_uint32 references;

	/* immutable */
	bool		is_lease;		/* a DlockLease's, not a DlockLeaseTicket's */

	/* protected by the lock of its partition of the table of numbers */
	bool		in_ids;			/* it is in that table */

	/* protected by the space's lease lock */
	bool		listed:1;		/* in the journal: marked, not yet written */
	bool		in_flight:1;	/* being written, or the worker died at it */
	bool		has_row:1;
	bool		finished:1;		/* over, and no longer found */

	/* a single lease's record ends here */

	/* the worker broadcasts after each write, and at the end */
	ConditionVariable changed;

	/* protected by the lock of its partition of the table of numbers */
	dsa_pointer next_id;		/* in the same bucket */

	/* protected by the space's lease lock */
	DlockLink	link;			/* in DlockSpace.journal */
	uint64		listed_at;		/* monotonic */
	uint32		marked;			/* number of its latest mark */

	/* atomic: written by the worker, "lsn" first */
	pg_atomic_uint32 written;	/* the mark that is in the WAL */
	pg_atomic_uint64 lsn;		/* end of that write, or of a later one */
} DlockRecord;

/* Made by the first change of a lease's ttl or durability */
typedef struct DlockRetiming
{
	DlockLink	link;			/* in DlockSpace.retimed; must be first */

	/* immutable */
	dsa_pointer lease;			/* DlockLease */

	/* protected by the space's lease lock */
	int64		next_ttl;		/* of its row, in us; 0: the lease's own */
	bool		listed;			/* the list refers to the lease */
} DlockRetiming;

/*
 * A lease is open while its deadline is in the future.  A process that finds
 * the deadline passed sets it to DLOCK_RAN_OUT, by compare-and-exchange,
 * before it treats the lease as gone.  DLOCK_RAN_OUT becomes 0 under the lease
 * lock, when the delay begins.  A close sets 0 at once.  0 is final (I13).
 *
 * A single lease is one ticket's own.  It has no row, delay, session or info,
 * and no fields for them.  Its ticket is at DLOCK_SINGLE_LEASE_SIZE.
 */
struct DlockLease
{
	/* immutable once it has a number */
	dsa_pointer space;			/* DlockSpace */
	int64		number;
	Oid			role;			/* owner; its memory counts for this role */
	uint16		role_name;		/* offset of the owner's name, at the end */
	bool		single;			/* one ticket's own, with its number */

	/* the maker's */
	bool		has_place;		/* for a ticket not yet made */

	/* protected by the space's lease lock */
	bool		in_leases;		/* listed there */
	bool		ran_out;		/* ... which is not logged yet */
	bool		delayed;		/* ran out, and keeps its locks closed */
	uint32		held;			/* how many of "tickets" are GRANTED */

	/* atomic, only raised, under the space's lease lock */
	pg_atomic_uint32 durability;	/* highest synchronous_commit counted on */

	/* atomic */
	pg_atomic_uint32 waiters;	/* sessions waiting for a lock for it */

	/* protected by the space's lease lock */
	DlockLink	in_space;		/* in DlockSpace.leases */
	dsa_pointer retiming;		/* DlockRetiming, or invalid */
	DlockList	tickets;		/* WAITING and GRANTED, of DlockLeaseTicket */

	/* atomic, changed under the space's lease lock */
	pg_atomic_uint64 ttl;		/* in microseconds */

	/* when standbys began to count, monotonic; DLOCK_NO_DEADLINE: not yet */
	pg_atomic_uint64 confirmed;

	/* atomic */
	pg_atomic_uint64 deadline;	/* monotonic, or as below; 0: over */
	pg_atomic_uint64 renewed_at;	/* TimestampTz */

	DlockRecord record;

	/* a single lease ends here */

	/* immutable once it has a number */
	int64		delay;			/* in microseconds; 0: none */
	TimestampTz opened_at;
	uint64		session;		/* that it is attached to; 0: none */
	int			procno;
	int			pid;

	/* protected by the space's lease lock */
	dsa_pointer info;			/* terminated string, or invalid */
	uint64		delay_ends;		/* if delayed: monotonic microseconds */
	DlockList	closed;			/* ENDING tickets, while "delayed" */
};

#define DLOCK_SINGLE_LEASE_SIZE \
	MAXALIGN(offsetof(DlockLease, record) + offsetof(DlockRecord, changed))

/* Deadline of a lease that ran out */
#define DLOCK_RAN_OUT		((uint64) 1)

/* The deadline if a session keeps the lease alive.  Renewals increment it. */
#define DLOCK_NO_DEADLINE	((uint64) PG_INT64_MAX)

/*
 * A ticket of lease scope.  While its request waits, it is a session's ticket
 * like others.  When the lease adopts it, "session" becomes 0.
 */
typedef struct DlockLeaseTicket
{
	DlockTicket ticket;			/* must be first */
	DlockRecord record;

	/* immutable once the ticket has joined a lock */
	dsa_pointer lease;			/* DlockLease, referred to */
	dsa_pointer owner;			/* terminated string, or invalid */
	uint32		request;		/* hash of its request */

	/* atomic, increased under the lock entry's lock */
	pg_atomic_uint32 claims;	/* calls that have returned it, or may; at 0 it
								 * is ended, under that lock */

	/* protected by the lock of its partition of the table of requests */
	dsa_pointer next_request;	/* in the same bucket */
	bool		in_requests;	/* it is in that table */

	/* protected by the lock entry's lock */
	bool		closes;			/* counted in its lock's "closed" */

	/* protected by the space's lease lock */
	bool		in_tickets;		/* in "tickets" of its lease */
	bool		in_closed;		/* in its lease's "closed" */
	bool		announced;		/* its grant is in the outbox, or was sent */
	bool		inherited;		/* an heir's: its row preceded its grant */

	/* changed under both the lock entry's lock and the lease lock */
	bool		lowers;			/* becomes shared once its row is (I18) */
	bool		heir;			/* its row says granted from the start (I17) */
	bool		leaves;			/* its removal is in the journal, or written */

	/* changed under the lease lock, and read by the worker without */
	int8		announce_at;	/* level at which its grant is announced */

	/*
	 * The lease's durability when the row first said granted, and that row's
	 * position in the WAL, or 0.  Written in this order, under the lease lock.
	 */
	int8		granted_at_level;
	pg_atomic_uint64 granted_lsn;

	/* protected by the space's lease lock */
	DlockLink	in_lease;		/* in a list of its lease */
	dsa_pointer redirection;	/* DlockAnnouncement that replaces its own once
								 * the row names it; or invalid */

	/* immutable; last, because as long as its name */
	DlockKey	key;
} DlockLeaseTicket;

/* A lock in use or with set slots.  I1 to I4 hold if its entry is unlocked. */
typedef struct DlockLock
{
	/* immutable */
	uint32		size;			/* in bytes, with the name */
	Oid			role;			/* its memory counts for this role */

	/* protected by the lock entry's lock, to the end */
	dsa_pointer next;			/* in the same bucket */
	DlockList	holders;		/* GRANTED and ENDING tickets */
	DlockList	queue;			/* WAITING and LEAVING tickets */
	int32		slots;			/* permits in all, as requested; or 0 */
	int32		holders_slots;	/* slots of the holders, if there are any */
	int32		permits;		/* permits given out */
	uint32		closed;			/* holders kept by a delay: no ticket fits */
	uint8		exclusive;		/* exclusive holders: 0 or 1 */
	bool		queued:1;		/* counted in "queued" of its partition */
	bool		leased:1;		/* a lease held it since it was last free */
	bool		settled:1;		/* set_slots changed before the table was
								 * read; keeps the entry */

	/* the same; these keep the entry, too */
	uint16		setters;		/* transactions that may change set_slots */
	int32		set_slots;		/* slots in dlock_slots; 0: none */

	/* immutable in the table; last, because as long as its name */
	DlockKey	key;
} DlockLock;

#define DLOCK_PARTITION_BITS	7
#define DLOCK_PARTITIONS	(1 << DLOCK_PARTITION_BITS)

/* Buckets of a new partition; a power of 2 */
#define DLOCK_FIRST_BUCKETS	16

/* Times that a partition can double; no segment has more than 64 MB */
#define DLOCK_SEGMENTS	20

/* A partition's buckets, protected by its lock; see buckets.c */
typedef struct DlockBuckets
{
	uint32		count;			/* entries */
	uint32		num_buckets;	/* in use, DLOCK_FIRST_BUCKETS or more ... */
	uint32		mask;			/* ... at most this plus 1, a power of 2 */
	dsa_pointer first[DLOCK_FIRST_BUCKETS]; /* entries, or invalid */
	dsa_pointer segments[DLOCK_SEGMENTS];	/* of more buckets; set once */
} DlockBuckets;

/* By database; two rarely share one; a power of 2 */
#define DLOCK_QUEUED_BUCKETS	64

/* A partition of the table of locks; see lock_table.c */
typedef struct DlockPartition
{
	/* protects the rest, all entries here, and their locks' tickets */
	LWLock		lock;
	DlockBuckets buckets;		/* of DlockLock */
	uint32		queued[DLOCK_QUEUED_BUCKETS];	/* entries with a queue */
	DlockBuckets watched;		/* of DlockWatched */

	/* keeps the next lock off this cache line */
	char		padding[PG_CACHE_LINE_SIZE];
} DlockPartition;

#define DLOCK_ID_PARTITION_BITS	6
#define DLOCK_ID_PARTITIONS	(1 << DLOCK_ID_PARTITION_BITS)

/* A partition of the table of numbers, or of requests; see id_table.c */
typedef struct DlockIdPartition
{
	/* protects the rest, and the fields of entries that name it */
	LWLock		lock;
	DlockBuckets buckets;		/* of DlockRecord, or DlockLeaseTicket */

	/* keeps the next lock off this cache line */
	char		padding[PG_CACHE_LINE_SIZE];
} DlockIdPartition;

/* A watched name, in the table while it has a watch or is listed (watch.c) */
typedef struct DlockWatched
{
	DlockLink	link;			/* in DlockSpace.changed; must be first */

	/* immutable */
	dsa_pointer space;			/* DlockSpace */
	Oid			role;			/* its memory counts for this role */

	/* protected by the partition's lock */
	dsa_pointer next;			/* in the same bucket */
	uint32		users;			/* watches */
	uint64		changes;		/* changes of the holders so far, plus 1 */

	/* changed under both locks; one of them, exclusive, suffices to read */
	bool		listed;			/* in DlockSpace.changed; I29 */

	/* protected by the outbox's lock */
	DlockList	watches;		/* armed, the one furthest behind first */
	uint64		due;			/* not told before then, monotonic */
	uint64		round;			/* watches are told the holders after at least
								 * so many changes; 0: none is told now */

	/* immutable; last, because as long as its name */
	DlockKey	key;
} DlockWatched;

/* One watch of a name, told on a channel */
typedef struct DlockWatch
{
	DlockLink	link;			/* in DlockWatched.watches; must be first */

	/* immutable */
	dsa_pointer watched;		/* DlockWatched */
	Oid			role;			/* its memory counts for this role */
	char		channel[NAMEDATALEN];

	/* protected by the outbox's lock */
	bool		armed;			/* its LISTEN is in effect */
	uint64		told;			/* informed as of so many changes; or 0 */
	uint64		telling;		/* number of the latest copy of its channel */
} DlockWatch;

/* The bounds of dlock_wait_histogram, and one bucket above; see counter.c */
#define DLOCK_WAIT_BUCKETS	23

typedef enum DlockCounter
{
	DLOCK_COUNT_ACQUIRED,		/* tickets granted */
	DLOCK_COUNT_WAITED,			/* ... of these, after a wait */
	DLOCK_COUNT_RELEASED,
	DLOCK_COUNT_BUSY,			/* try: not granted at once */
	DLOCK_COUNT_TIMEOUTS,		/* waits ended by their timeout */
	DLOCK_COUNT_CANCELED,		/* waits ended by any other error */
	DLOCK_COUNT_DEADLOCKS,		/* waits ended as a deadlock's victim */
	DLOCK_COUNT_WAIT_US,		/* time waited, in microseconds */
	DLOCK_NUM_EVENTS,			/* the view shows those above */
	DLOCK_COUNT_HELD = DLOCK_NUM_EVENTS,	/* a correction: see add_up() */
	DLOCK_COUNT_WAITS,			/* first bucket of waits by their length */
	DLOCK_NUM_COUNTERS = DLOCK_COUNT_WAITS + DLOCK_WAIT_BUCKETS
} DlockCounter;

/*
 * The names of a space that were waited for most, protected by "lock"; see
 * contention.c.  An entry's fields for searches are here, all others in
 * chunks, which are allocated as needed and set once.
 */
#define DLOCK_CONTENDED_NAMES	1000
#define DLOCK_CONTENDED_CHUNK	50

typedef struct DlockContended
{
	uint64		waits;
	uint64		wait_us;
	uint64		max_wait_us;
	uint64		timeouts;
	uint64		deadlocks;
	uint64		expirations;
	uint32		max_queue;
	TimestampTz last_wait_at;	/* 0: none has ended yet */
	uint16		length;			/* of the name */
	char		name[DLOCK_MAX_NAME];
} DlockContended;

typedef struct DlockContention
{
	LWLock		lock;
	int			count;			/* entries in use */
	int			room;			/* entries that chunks exist for */

	/* by entry */
	uint32		hashes[DLOCK_CONTENDED_NAMES];
	uint64		weights[DLOCK_CONTENDED_NAMES];
	dsa_pointer chunks[DLOCK_CONTENDED_NAMES / DLOCK_CONTENDED_CHUNK];
} DlockContention;

/* Large enough that two locks in use rarely share one; a power of 2 */
#define DLOCK_REMOVED_BUCKETS	1024

/* Fewest dead rows after which the tables are vacuumed */
#define DLOCK_VACUUM_ROWS	10000

/* remote_write, remote_flush ("on") and remote_apply */
#define DLOCK_NUM_QUORUMS	3

/* Unacknowledged heartbeats kept for each of these */
#define DLOCK_HEARTBEATS	8

/* A heartbeat that was sent to standbys */
typedef struct DlockHeartbeat
{
	XLogRecPtr	lsn;			/* where it ends */
	uint64		sent;			/* taken before it was written; monotonic */
} DlockHeartbeat;

/* Jobs of a space's background processes; one process for each (I20) */
typedef enum DlockOffice
{
	DLOCK_WORKER,
	DLOCK_SENDER,
	DLOCK_VACUUM,
	DLOCK_NUM_OFFICES
} DlockOffice;

/* How far the tables of leases are loaded; the next attempt continues here */
typedef struct DlockLoading
{
	int			part;			/* DlockLoadPart in progress */
	int64		last;			/* number of the latest row read there */

	/* rows of another system or database: how many, and the first */
	uint64		num_foreign;
	uint64		foreign_system;
	Oid			foreign_database;
} DlockLoading;

/* purge.c removes a space if no backend uses it or can use it again. */
struct DlockSpace
{
	/* immutable */
	DlockSpaceKey key;

	/* every acquire writes these: kept apart from fields that are only read */
	char		padding1[PG_CACHE_LINE_SIZE];

	/* changed under mutex or by dlock_ticket_draw() */
	slock_t		mutex;
	pg_atomic_uint64 next_ticket;	/* next number to give out */
	pg_atomic_uint64 ticket_limit;	/* first number not reserved */

	char		padding2[PG_CACHE_LINE_SIZE];

	/* every call reads the fields from here down to "changed" */

	/* protected by lease_lock */
	LWLock		lease_lock;
	DlockList	leases;			/* of DlockLease */
	DlockList	journal;		/* of DlockRecord, the oldest mark first */

	/* atomic */
	pg_atomic_uint32 loaded;	/* the tables are in memory */
	pg_atomic_uint32 has_removed;	/* "removed" has a position */

	/* protected by outbox_lock */
	LWLock		outbox_lock;
	DlockList	outbox;			/* of DlockAnnouncement */
	DlockList	changed;		/* of DlockWatched */
	uint64		tellings;		/* copies of channels so far */

	/* protected by lease_lock */
	DlockList	retimed;		/* of DlockRetiming, for the worker */

	/* protected by heartbeat_mutex: not yet acknowledged */
	slock_t		heartbeat_mutex;
	int			num_heartbeats[DLOCK_NUM_QUORUMS];
	DlockHeartbeat heartbeats[DLOCK_NUM_QUORUMS][DLOCK_HEARTBEATS];

	/* protected by the loader's heavyweight lock */
	DlockLoading loading;

	/* atomic, down to counts_lock */
	pg_atomic_uint32 settled;	/* at least as many as settled entries */
	pg_atomic_uint32 slots_loaded;	/* dlock_slots is; set before "loaded" */
	pg_atomic_uint32 load_failures; /* failed loads by the worker */
	ConditionVariable load_changed; /* broadcast if a load ends or fails */
	pg_atomic_uint64 loaded_at; /* loaded rows precede this in the WAL */
	pg_atomic_uint64 lock_told_at;	/* latest log line of a lock; monotonic */
	pg_atomic_uint32 failures;	/* failed writes of the journal */
	pg_atomic_uint32 failure;	/* SQLSTATE of the latest */

	/* when the latest acknowledged heartbeat was sent; monotonic */
	pg_atomic_uint64 quorum[DLOCK_NUM_QUORUMS];

	/* when a process last began to send one; monotonic */
	pg_atomic_uint64 last_heartbeat;
	pg_atomic_uint32 announced; /* tickets with an announcement */
	pg_atomic_uint32 watches;	/* DlockWatches */
	struct
	{
		pg_atomic_uint32 holder;	/* proc number, plus 1; or 0 */
		pg_atomic_uint64 asked_at;	/* when last asked for; monotonic */
	}			offices[DLOCK_NUM_OFFICES];
	pg_atomic_uint32 worker_comes;	/* will see the journal within 10 ms */
	pg_atomic_uint32 worker_deaths; /* workers in a row that died early */

	/*
	 * The OID of a table that the worker could not lock in time, and in the
	 * lower half since when, monotonic modulo 2^32; 0: none.
	 */
	pg_atomic_uint64 blocked_on;
	pg_atomic_uint64 next_due;	/* of leases left by a worker; monotonic */
	pg_atomic_uint32 dead_rows; /* in the tables, about */
	pg_atomic_uint32 vacuum_at; /* vacuum starts at this number */
	pg_atomic_uint32 cleared;	/* dead rows were removed after the load */

	/* end of the latest commit that removed a holder's row, by hash; or 0 */
	pg_atomic_uint64 removed[DLOCK_REMOVED_BUCKETS];

	/* counts of backends that have left */
	pg_atomic_uint64 counters[DLOCK_NUM_COUNTERS];

	/* exclusive to move a backend's counts there, shared to add all up */
	LWLock		counts_lock;
	uint64		counted_before[DLOCK_NUM_COUNTERS]; /* at the latest reset */
	TimestampTz counted_since;

	/* atomic: DlockContention, or invalid; set once */
	pg_atomic_uint64 contention;
};

typedef struct DlockSpaceEntry
{
	DlockSpaceKey key;			/* hash key, must be first */

	/* protected by the partition lock of the spaces' table */
	uint32		users;			/* backends attached */
	bool		useless;		/* being removed: gets no user (I6) */
	dsa_pointer space;

	/* the same; only in a database's entry, which has no extension */
	uint64		unreserved;		/* first number never reserved there */
} DlockSpaceEntry;

/* A backend.  A ticket's owner is gone if the slot has another session. */
typedef struct DlockBackend
{
	pg_atomic_uint64 session;	/* 0: slot unused */
	Oid			database;

	/* protected by mutex */
	slock_t		mutex;
	uint64		wait_count;		/* waits begun; tells one from the next */
	int64		wait_ticket;	/* ticket waited for; 0: not waiting */
	dsa_pointer wait_lease;		/* lease that the ticket is for; or invalid */
	DlockMode	wait_mode;		/* requested mode */
	int32		wait_permits;
	DlockKey	wait_key;		/* its lock */

	/* atomic, to the end: set by a waiter that has found a deadlock */
	pg_atomic_uint32 check_requested;

	/* incremented if a ticket of this backend is ended by force */
	pg_atomic_uint32 lost;

	/* written by this backend only, so without a locked instruction */
	pg_atomic_uint64 counters[DLOCK_NUM_COUNTERS];
	pg_atomic_uint64 space;		/* counted for; cleared under counts_lock */

	/* keeps the next backend off this cache line */
	char		padding[PG_CACHE_LINE_SIZE];
} DlockBackend;

/* Memory of a role in the area, in all databases; see account.c */
typedef struct DlockAccount
{
	Oid			role;			/* hash key, must be first */

	/* protected by the partition lock of the table */
	uint32		users;			/* backends that have it open */

	/* atomic */
	pg_atomic_uint32 sponsor;	/* session user that it counts for, too; 0:
								 * none, or the role itself */
	pg_atomic_uint64 used;		/* bytes reported by backends */
} DlockAccount;

typedef struct DlockControl
{
	/* immutable */
	int			memory_tranche;
	dshash_table_handle spaces;
	dshash_table_handle accounts;
	int			num_backends;
	Size		area_size;		/* in bytes */
	uint64		secrets[2];		/* keys of the hash of names; odd */

	LWLock		reserve_lock;	/* held while ticket numbers are reserved */
	LWLock		purge_lock;		/* held while a useless space is removed */

	/* atomic */
	pg_atomic_uint64 last_session;	/* source of DlockBackend.session */
	pg_atomic_uint64 memory_used;	/* bytes of locks and tickets, about */
	pg_atomic_uint64 spaces_left;	/* times that a space lost its last user */
	pg_atomic_uint32 looked_at; /* spaces looked at; see purge.c */

	/* keeps the first partition's lock off this cache line */
	char		padding[PG_CACHE_LINE_SIZE];

	DlockPartition locks[DLOCK_PARTITIONS];
	DlockIdPartition ids[DLOCK_ID_PARTITIONS];
	DlockIdPartition requests[DLOCK_ID_PARTITIONS];
	DlockBackend backends[FLEXIBLE_ARRAY_MEMBER];
} DlockControl;

/*
 * Libraries of all layouts find this under one name, so its layout and rules
 * never change.  Only libraries of its own layout use a segment.  Each process
 * counts as attached until it has detached its memory.  When none is attached,
 * a library of another layout may free the segment and make its own.
 */
typedef struct DlockHeader
{
	/* protected by AddinShmemInitLock */
	uint32		initialized;	/* the tranches are made */
	int32		memory_tranche;
	int32		table_tranche;
	uint32		layout;			/* the segment's DLOCK_LAYOUT, ... */
	uint32		sizes;			/* ... of which builds may differ ... */
	char		version[64];	/* ... and its version */
	dsm_handle	segment;		/* pinned; or DSM_HANDLE_INVALID */
	uint32		num_pids;		/* pg_atomic_uint32 at its start, by proc
								 * number; 0: no attached process */

	/* atomic; increased under the lock */
	pg_atomic_uint32 attached;	/* processes attached to the segment */
	pg_atomic_uint32 workers;	/* ... of these, background workers of dlock */

	/*
	 * atomic: a TimestampTz, until which a library of another layout asks for
	 * the place.  Workers end if only workers are attached.
	 */
	pg_atomic_uint64 wanted_until;

	char		unused[64];		/* zero */
} DlockHeader;

#endif							/* DLOCK_SHMEM_H */
