/*-------------------------------------------------------------------------
 *
 * shmem.h
 *	  dlock's memory map: every structure that processes share.
 *
 * A small header is in the main shared memory segment.  All the rest is in one
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
 *	  DlockLeaseTicket	a DlockTicket of lease scope, with more fields
 *	  DlockLease		one per lease, linked into its space
 *	  DlockWatched		one per watched name, in its partition
 *	  DlockWatch		one per watched name, session and channel
 *
 * The entry of a lock is its DlockLock.  "The entry's lock" is the LWLock of
 * the entry's partition.  It protects the entry, and all links and states of
 * its tickets.  For the lock order and for I1 to I30, see src/README.
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
 * Version of the memory layout.  The first layout change after a release must
 * increase it.  Libraries of different layouts never share a segment.
 */
#ifndef DLOCK_LAYOUT
#define DLOCK_LAYOUT		1
#endif

#define DLOCK_HEADER_NAME	"dlock"

/* Ticket numbers per reservation; a restart loses those not yet drawn */
#define DLOCK_TICKET_BLOCK	(1 << 18)

/*
 * The state of a ticket.  WAITING and LEAVING tickets are in the lock's queue,
 * GRANTED and ENDING ones among its holders, GONE ones in neither.  A LEAVING
 * ticket no longer waits, and an ENDING one no longer holds.  A lease's ticket
 * stays LEAVING or ENDING until the removal of its row is in the WAL.  A pin
 * by a commit, or a delay of the lease, also keeps a ticket ENDING.
 *
 * Only the backend that made a session's ticket frees it.  So this backend can
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

/* A doubly linked list of objects in the area, each with a DlockLink */
typedef struct DlockLink
{
	dsa_pointer prev;			/* the list's lock protects both links */
	dsa_pointer next;
} DlockLink;

typedef struct DlockList
{
	dsa_pointer head;
	dsa_pointer tail;
	uint32		length;
} DlockList;

/* A ticket's events, for NOTIFY; owned by the ticket, unless "orphaned" */
typedef struct DlockAnnouncement
{
	DlockLink	link;			/* in DlockSpace.outbox; must be first */

	/* immutable */
	char		channel[NAMEDATALEN];
	Size		size;			/* of the whole structure */
	Oid			role;			/* its memory counts for this role */

	/* protected by the outbox's lock */
	bool		armed;			/* the session's LISTEN is in effect */
	uint64		armer;			/* session whose commit arms it; 0: none */
	uint64		claim;			/* number of that session's claim */
	uint32		events;			/* DLOCK_EVENT_... still to be sent */
	uint32		sending;		/* the events that the sender is sending */
	bool		in_outbox;		/* in the outbox: armed, with events (I28) */
	bool		orphaned;		/* no ticket owns it; it is freed once sent */
	int64		number;			/* of the ticket */
	bool		granted;		/* the grant is in "events", or was sent */
	bool		wanted;			/* a ticket waits; not told before "granted" */

	/* set once, before another process can free the announcement */
	bool		counted;		/* counted in DlockSpace.announced */

	/* immutable */
	char		name[FLEXIBLE_ARRAY_MEMBER];	/* the lock's name in JSON */
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
	uint64		session;		/* DlockBackend.session; 0: a lease has it */
	int			procno;
	int			pid;
	Oid			role;			/* of the requester or the lease; the ticket's
								 * memory counts for this role */
	uint8		scope;			/* DlockScope of the first request */
	uint8		mode;			/* DlockMode; can become shared, under the
								 * entry's lock */
	bool		wanted;			/* a ticket has waited since the grant (I28);
								 * protected by the entry's lock */
	int32		slots;			/* 0 unless mode is DLOCK_SLOTS */
	int32		permits;		/* 1 unless mode is DLOCK_SLOTS */
	uint32		queue_length;	/* its place when it queued; 0: no wait */
	uint32		pins;			/* commits in progress that pin it (I24);
								 * protected by the entry's lock */
	TimestampTz enqueued_at;

	/* protected by the entry's lock */
	TimestampTz granted_at;		/* below 0: see dlock_ticket_begin_wait() */

	/* same lock; changes to a lease's ticket also need the lease lock (I19) */
	dsa_pointer info;			/* terminated string, or invalid */

	/* protected by the outbox's lock */
	dsa_pointer announcement;	/* DlockAnnouncement, or invalid */

	/* atomic: changed under the entry's lock */
	pg_atomic_uint32 state;		/* DlockState */

	/* atomic: acquires not yet released, written by the ticket's session */
	pg_atomic_uint32 session_depth;
	pg_atomic_uint32 xact_depth;
} DlockTicket;

/*
 * The part that leases and their tickets have in common, because both have a
 * row.  A process that changes one marks its record; the worker writes it.
 */
typedef struct DlockRecord
{
	/* atomic; dropping the last reference frees the record */
	pg_atomic_uint32 references;

	/* immutable */
	bool		is_lease;		/* of a DlockLease, not a DlockLeaseTicket */

	/* protected by the lock of a partition of the table of numbers */
	bool		in_ids;			/* it is in that table */

	/* protected by the space's lease lock */
	bool		listed:1;		/* in the journal: marked, not yet written */
	bool		in_flight:1;	/* being written, or was when a worker died */
	bool		has_row:1;
	bool		finished:1;		/* over: no search may find it any more */

	/* the record of a single lease ends here */

	/* broadcast after each write of the row, and after "finished" is set */
	ConditionVariable changed;

	/* protected by the lock of a partition of the table of numbers */
	dsa_pointer next_id;		/* in the same bucket */

	/* protected by the space's lease lock */
	DlockLink	link;			/* in DlockSpace.journal */
	uint64		listed_at;		/* monotonic */
	uint32		marked;			/* number of the latest mark */

	/* atomic: written by the worker, "lsn" first */
	pg_atomic_uint32 written;	/* the latest mark that was written */
	pg_atomic_uint64 lsn;		/* end of that write, or of a later one */
} DlockRecord;

/* Allocated for the first change of a lease's ttl or durability */
typedef struct DlockRetiming
{
	DlockLink	link;			/* in DlockSpace.retimed; must be first */

	/* immutable */
	dsa_pointer lease;			/* DlockLease */

	/* protected by the space's lease lock */
	int64		next_ttl;		/* ttl in the row, in us; 0: the lease's ttl */
	bool		listed;			/* listed, with a reference to the lease */
} DlockRetiming;

/*
 * A lease is open until its deadline, or until standbys fail to answer (I21).
 * Then a process must set DLOCK_RAN_OUT, by compare-and-exchange, before the
 * lease counts as gone.  Before any ticket ends, the deadline becomes 0 under
 * the lease lock, and any delay begins.  A close sets 0.  0 is final (I13).
 *
 * A single lease has no row, delay, session or info, and no fields for these.
 * Its first ticket is stored behind it, at DLOCK_SINGLE_LEASE_SIZE.
 */
struct DlockLease
{
	/* immutable once it has a number */
	dsa_pointer space;			/* DlockSpace */
	int64		number;
	Oid			role;			/* owner; the memory counts for this role */
	uint16		role_name;		/* offset of the owner's name, at the end */
	bool		single;			/* has one ticket, and that ticket's number */

	/* used only by the session that makes the lease */
	bool		has_place;		/* its ticket's memory is not used yet */

	/* protected by the space's lease lock */
	bool		in_leases;		/* in DlockSpace.leases */
	bool		ran_out;		/* has run out; not logged yet */
	bool		delayed;		/* has run out, and its delay is not over */
	uint32		held;			/* how many of "tickets" are GRANTED */

	/* atomic, only raised, under the space's lease lock */
	pg_atomic_uint32 durability;	/* highest synchronous_commit of callers */

	/* atomic */
	pg_atomic_uint32 waiters;	/* sessions that wait on behalf of the lease */

	/* protected by the space's lease lock */
	DlockLink	in_space;		/* in DlockSpace.leases */
	dsa_pointer retiming;		/* DlockRetiming, or invalid */
	DlockList	tickets;		/* WAITING and GRANTED DlockLeaseTickets */

	/* atomic, changed under the space's lease lock */
	pg_atomic_uint64 ttl;		/* in microseconds */

	/* lower bound of dlock_lease_confirmed_at(); DLOCK_NO_DEADLINE: unset */
	pg_atomic_uint64 confirmed;

	/* atomic */
	pg_atomic_uint64 deadline;	/* monotonic; 0: over; or a constant below */
	pg_atomic_uint64 renewed_at;	/* TimestampTz */

	DlockRecord record;

	/* a single lease ends here */

	/* immutable once it has a number */
	int64		delay;			/* time that its locks stay closed after it
								 * has run out, in us; 0: none */
	TimestampTz opened_at;
	uint64		session;		/* session it is attached to; 0: none */
	int			procno;
	int			pid;

	/* protected by the space's lease lock */
	dsa_pointer info;			/* terminated string, or invalid */
	uint64		delay_ends;		/* if delayed: monotonic microseconds */
	DlockList	closed;			/* ENDING tickets that the delay keeps */
};

#define DLOCK_SINGLE_LEASE_SIZE \
	MAXALIGN(offsetof(DlockLease, record) + offsetof(DlockRecord, changed))

/* Deadline of a lease that ran out */
#define DLOCK_RAN_OUT		((uint64) 1)

/* The deadline while a lease's ttl does not run.  Renewals increment it. */
#define DLOCK_NO_DEADLINE	((uint64) PG_INT64_MAX)

/*
 * A ticket of lease scope.  In an acquire, the ticket is the session's until
 * the lease adopts the ticket.  Then "session" becomes 0.
 */
typedef struct DlockLeaseTicket
{
	DlockTicket ticket;			/* must be first */
	DlockRecord record;

	/* immutable once the ticket has joined a lock */
	dsa_pointer lease;			/* DlockLease; counts as a reference to it */
	dsa_pointer owner;			/* terminated string, or invalid */
	uint32		request;		/* hash of its request */

	/* atomic, increased under the entry's lock */
	pg_atomic_uint32 claims;	/* calls that have returned or may return it */

	/* protected by the lock of a partition of the table of requests */
	dsa_pointer next_request;	/* in the same bucket */
	bool		in_requests;	/* it is in that table */

	/* protected by the entry's lock */
	bool		closes;			/* counted in DlockLock.closed */

	/* protected by the space's lease lock */
	bool		in_tickets;		/* in DlockLease.tickets */
	bool		in_closed;		/* in DlockLease.closed */
	bool		announced;		/* its grant is in the outbox, or was sent */
	bool		inherited;		/* its row was in the WAL before its grant */

	/* changed under both the entry's lock and the lease lock */
	bool		lowers;			/* becomes shared once its row says so (I18) */
	bool		heir;			/* its row says granted from the start (I17) */
	bool		leaves;			/* its end is in the journal or the WAL */

	/* changed under the lease lock; the worker reads it without a lock */
	uint8		announce_at;	/* durability needed to announce its grant */

	/*
	 * The lease's durability when the row first said granted, and that row's
	 * position in the WAL, or 0.  Written in this order, under the lease lock.
	 */
	uint8		granted_at_level;
	pg_atomic_uint64 granted_lsn;

	/* protected by the space's lease lock */
	DlockLink	in_lease;		/* in a list of its lease */
	dsa_pointer redirection;	/* invalid, or replaces ticket.announcement
								 * once the row has the new channel */

	/* immutable; last, because its length depends on the name */
	DlockKey	key;
} DlockLeaseTicket;

/* The entry of a lock that is in use or has slots set (I4) */
typedef struct DlockLock
{
	/* immutable */
	uint32		size;			/* in bytes, with the name */

	/* protected by the entry's lock, down to set_slots */
	Oid			role;			/* its memory counts for this role */
	dsa_pointer next;			/* in the same bucket */
	DlockList	holders;		/* GRANTED and ENDING tickets */
	DlockList	queue;			/* WAITING and LEAVING tickets */
	int32		slots;			/* total permits, requested or set; 0: none */
	int32		holders_slots;	/* slots of the holders, if there are any */
	int32		permits;		/* permits given out */
	uint32		closed;			/* number of tickets with "closes" (I16) */
	uint8		exclusive;		/* exclusive holders: 0 or 1 */
	bool		queued:1;		/* counted in "queued" of its partition */
	bool		leased:1;		/* a lease has held it since it was free */
	bool		settled:1;		/* set_slots changed before dlock_slots was
								 * loaded; this keeps the entry */

	/* the same lock; if not 0, these keep the entry, too */
	uint16		setters;		/* transactions that may change set_slots */
	int32		set_slots;		/* slots in dlock_slots; 0: none */

	/* immutable in the table; last, because its length depends on the name */
	DlockKey	key;
} DlockLock;

#define DLOCK_PARTITION_BITS	7
#define DLOCK_PARTITIONS	(1 << DLOCK_PARTITION_BITS)

/* Buckets of a new partition; a power of 2 */
#define DLOCK_FIRST_BUCKETS	16

/* Limit on doublings of a partition's buckets; the last one takes 64 MB */
#define DLOCK_SEGMENTS	20

/* A partition's buckets, protected by its lock; see buckets.c */
typedef struct DlockBuckets
{
	uint32		count;			/* entries */
	uint32		num_buckets;	/* in use, at least DLOCK_FIRST_BUCKETS */
	uint32		mask;			/* num_buckets - 1, rounded up to 2^n - 1 */
	dsa_pointer first[DLOCK_FIRST_BUCKETS]; /* entries, or invalid */
	dsa_pointer segments[DLOCK_SEGMENTS];	/* the other buckets; set once */
} DlockBuckets;

/* Size of the array "queued", which is indexed by database; a power of 2 */
#define DLOCK_QUEUED_BUCKETS	64

/* A partition of the table of locks; see lock_table.c */
typedef struct DlockPartition
{
	/* protects the fields below, and the partition's entries and tickets */
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
	/* protects the fields below, and the entries' fields for this table */
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
	uint32		users;			/* number of watches */
	uint64		changes;		/* changes of the holders so far, plus 1 */

	/* set under both the partition's and the outbox's lock, read under one */
	bool		listed;			/* in DlockSpace.changed; I29 */

	/* protected by the outbox's lock */
	DlockList	watches;		/* armed watches, in the order of "told" */
	uint64		due;			/* no message before this time; monotonic */
	uint64		round;			/* not 0: the sender is telling the watches
								 * whose "told" is lower than this */

	/* immutable; last, because its length depends on the name */
	DlockKey	key;
} DlockWatched;

/* A session's watch of a name, with the channel for its messages */
typedef struct DlockWatch
{
	DlockLink	link;			/* in DlockWatched.watches; must be first */

	/* immutable */
	dsa_pointer watched;		/* DlockWatched */
	Oid			role;			/* its memory counts for this role */
	char		channel[NAMEDATALEN];

	/* protected by the outbox's lock */
	bool		armed;			/* the session's LISTEN is in effect */
	uint64		told;			/* value of "changes" told last; 0: none yet */
	uint64		telling;		/* DlockTelling.number of its latest copy */
} DlockWatch;

/* Buckets of dlock_wait_histogram; the last has no bound (counter.c) */
#define DLOCK_WAIT_BUCKETS	23

typedef enum DlockCounter
{
	DLOCK_COUNT_ACQUIRED,		/* tickets granted */
	DLOCK_COUNT_WAITED,			/* ... of these, after a wait */
	DLOCK_COUNT_RELEASED,
	DLOCK_COUNT_BUSY,			/* tries that were not granted at once */
	DLOCK_COUNT_TIMEOUTS,		/* waits ended by their timeout */
	DLOCK_COUNT_CANCELED,		/* waits that failed for any other reason */
	DLOCK_COUNT_DEADLOCKS,		/* waits ended as a deadlock's victim */
	DLOCK_COUNT_WAIT_US,		/* time waited, in microseconds */
	DLOCK_NUM_EVENTS,			/* the view shows the counters above */
	DLOCK_COUNT_HELD = DLOCK_NUM_EVENTS,	/* a correction: see add_up() */
	DLOCK_COUNT_WAITS,			/* first bucket of the histogram */
	DLOCK_NUM_COUNTERS = DLOCK_COUNT_WAITS + DLOCK_WAIT_BUCKETS
} DlockCounter;

/*
 * The names of a space that were waited for most (contention.c).  "lock"
 * protects all.  DlockContention itself has the fields that searches read.
 * Its chunks, which are allocated as needed, have the other fields.
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
	TimestampTz last_wait_at;	/* 0: no wait has ended yet */
	uint16		length;			/* of the name */
	char		name[DLOCK_MAX_NAME];
} DlockContended;

typedef struct DlockContention
{
	LWLock		lock;
	int			count;			/* entries in use */
	int			room;			/* entries for which there are chunks */

	/* indexed by entry */
	uint32		hashes[DLOCK_CONTENDED_NAMES];
	uint64		weights[DLOCK_CONTENDED_NAMES];
	dsa_pointer chunks[DLOCK_CONTENDED_NAMES / DLOCK_CONTENDED_CHUNK];
} DlockContention;

/* Size of DlockSpace.removed; a power of 2 */
#define DLOCK_REMOVED_BUCKETS	1024

/* Least number of dead rows for which the tables of leases are vacuumed */
#define DLOCK_VACUUM_ROWS	10000

/* Levels with standbys: remote_write, remote_flush ("on") and remote_apply */
#define DLOCK_NUM_QUORUMS	3

/* Unacknowledged heartbeats kept for each of these levels */
#define DLOCK_HEARTBEATS	8

/* A heartbeat that was sent to standbys */
typedef struct DlockHeartbeat
{
	XLogRecPtr	lsn;			/* where it ends */
	uint64		sent;			/* time read before the write; monotonic */
} DlockHeartbeat;

/* Jobs of a space's background processes; each has at most one holder (I20) */
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
	int64		last;			/* number of the latest row read in "part" */

	/* rows of other systems or databases: how many; origin of the first */
	uint64		num_foreign;
	uint64		foreign_system;
	Oid			foreign_database;
} DlockLoading;

/* purge.c removes a space once no backend uses it or can use it again. */
struct DlockSpace
{
	/* immutable */
	DlockSpaceKey key;

	/* every acquire writes next_ticket: keep the rest off its cache line */
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
	DlockList	journal;		/* of DlockRecord, the first marked first */

	/* atomic */
	pg_atomic_uint32 loaded;	/* the tables of leases are in memory */
	pg_atomic_uint32 has_removed;	/* some place of "removed" is not 0 */

	/* protected by outbox_lock */
	LWLock		outbox_lock;
	DlockList	outbox;			/* of DlockAnnouncement */
	DlockList	changed;		/* of DlockWatched */
	uint64		tellings;		/* calls of dlock_watch_copy() so far */

	/* protected by lease_lock */
	DlockList	retimed;		/* of DlockRetiming, for the worker */

	/* protected by heartbeat_mutex: heartbeats not yet acknowledged */
	slock_t		heartbeat_mutex;
	int			num_heartbeats[DLOCK_NUM_QUORUMS];
	DlockHeartbeat heartbeats[DLOCK_NUM_QUORUMS][DLOCK_HEARTBEATS];

	/* protected by the loader's heavyweight lock */
	DlockLoading loading;

	/* atomic, or a ConditionVariable, down to counts_lock */
	pg_atomic_uint32 settled;	/* at most so many entries are "settled" */
	pg_atomic_uint32 slots_loaded;	/* dlock_slots is in memory */
	pg_atomic_uint32 load_failures; /* failed loads by the worker */
	ConditionVariable load_changed; /* broadcast if a load ends or fails */
	pg_atomic_uint64 loaded_at; /* loaded rows precede this in the WAL */
	pg_atomic_uint64 lock_told_at;	/* when a load last logged a lock wait */
	pg_atomic_uint32 failures;	/* failed writes of the journal */
	pg_atomic_uint32 failure;	/* SQLSTATE of the latest failed write */

	/* by level: when the latest acknowledged heartbeat was sent; monotonic */
	pg_atomic_uint64 quorum[DLOCK_NUM_QUORUMS];

	/* when a process last began to send a heartbeat; monotonic */
	pg_atomic_uint64 last_heartbeat;
	pg_atomic_uint32 announced; /* announcements that are "counted" */
	pg_atomic_uint32 watches;	/* DlockWatches */
	struct
	{
		pg_atomic_uint32 holder;	/* proc number, plus 1; or 0 */
		pg_atomic_uint64 asked_at;	/* last request for a holder; monotonic */
	}			offices[DLOCK_NUM_OFFICES];
	pg_atomic_uint32 worker_comes;	/* worker will see marks within 10 ms */
	pg_atomic_uint32 worker_deaths; /* workers in a row that died early */

	/*
	 * Upper half: the OID of a table that the worker could not lock in time.
	 * Lower half: time of the first failure, modulo 2^32.  0: no such table.
	 */
	pg_atomic_uint64 blocked_on;
	pg_atomic_uint64 next_due;	/* when the next lease is due; see resign() */
	pg_atomic_uint32 dead_rows; /* estimate, for the tables of leases */
	pg_atomic_uint32 vacuum_at; /* dead_rows at which a vacuum starts */
	pg_atomic_uint32 cleared;	/* dead rows were removed after the load */

	/* by lock's hash: end of the latest commit that removed a row; I15, I18 */
	pg_atomic_uint64 removed[DLOCK_REMOVED_BUCKETS];

	/* totals, without the counts still in DlockBackends (counter.c) */
	pg_atomic_uint64 counters[DLOCK_NUM_COUNTERS];

	/* exclusive: to move a backend's counts into "counters"; shared: to sum */
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

	/* the same lock; used only in a database's entry, whose extension is 0 */
	uint64		unreserved;		/* first number not yet reserved */
} DlockSpaceEntry;

/* Entry of a proc number.  "session" tells its successive backends apart. */
typedef struct DlockBackend
{
	pg_atomic_uint64 session;	/* 0: no backend */
	Oid			database;

	/* protected by mutex */
	slock_t		mutex;
	uint64		wait_count;		/* number of the latest wait, from 1 on */
	int64		wait_ticket;	/* ticket waited for; 0: not waiting */
	dsa_pointer wait_lease;		/* lease that the ticket is for; or invalid */
	DlockMode	wait_mode;		/* requested mode */
	DlockKey	wait_key;		/* lock waited for */

	/* atomic, as all below; set if this backend is a deadlock's victim */
	pg_atomic_uint32 check_requested;

	/* incremented when a ticket of this backend is ended by force */
	pg_atomic_uint32 lost;

	/* only this backend writes them, so no locked instruction is needed */
	pg_atomic_uint64 counters[DLOCK_NUM_COUNTERS];
	pg_atomic_uint64 space;		/* see dlock_count_for() */

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
	pg_atomic_uint32 sponsor;	/* session user for whom the account counts,
								 * too; 0: none, or the role itself */
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
	bool		area_is_small;	/* was less than dlock.max_memory free? */
	uint64		secrets[2];		/* odd numbers, keys of the hash of names */

	LWLock		reserve_lock;	/* held while ticket numbers are reserved */
	LWLock		purge_lock;		/* held while a useless space is removed */

	/* atomic */
	pg_atomic_uint64 last_session;	/* source of DlockBackend.session */
	pg_atomic_uint64 memory_used;	/* estimated bytes of locks and tickets */
	pg_atomic_uint64 spaces_left;	/* how often a space lost its last user */
	pg_atomic_uint32 looked_at; /* spaces looked at; see purge.c */

	/* keeps the first partition's lock off this cache line */
	char		padding[PG_CACHE_LINE_SIZE];

	DlockPartition locks[DLOCK_PARTITIONS];
	DlockIdPartition ids[DLOCK_ID_PARTITIONS];
	DlockIdPartition requests[DLOCK_ID_PARTITIONS];
	DlockBackend backends[FLEXIBLE_ARRAY_MEMBER];
} DlockControl;

/*
 * Libraries of all layouts find this header under one name, so its layout and
 * rules never change.  Only libraries with the segment's layout use the
 * segment.  A process is attached until it has detached the segment.  If no
 * process is attached, a library of another layout may replace the segment.
 */
typedef struct DlockHeader
{
	/* protected by AddinShmemInitLock */
	uint32		initialized;	/* the tranches are made */
	int32		memory_tranche;
	int32		table_tranche;
	uint32		layout;			/* DLOCK_LAYOUT of the segment */
	uint32		sizes;			/* its layout_sizes(): builds may differ */
	char		version[64];	/* of the library that made the segment */
	dsm_handle	segment;		/* pinned; or DSM_HANDLE_INVALID */
	uint32		num_pids;		/* PIDs at the start of the segment, each a
								 * pg_atomic_uint32 */

	/* atomic; increased under the lock */
	pg_atomic_uint32 attached;	/* processes attached to the segment */
	pg_atomic_uint32 workers;	/* ... of these, background workers of dlock */

	/*
	 * atomic: a TimestampTz.  Until this time, a library of another layout
	 * wants to replace the segment.  If only workers are attached, they end.
	 */
	pg_atomic_uint64 wanted_until;

	char		unused[64];		/* zero */
} DlockHeader;

#endif							/* DLOCK_SHMEM_H */
