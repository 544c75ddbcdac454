/*-------------------------------------------------------------------------
 *
 * shmem.h
 *	  dlock's memory map: every structure that processes share.
 *
 * A small header lives in the main shared memory segment.  All the rest lives
 * in one segment of dynamic shared memory, which the first backend that needs it
 * makes, and to which each process attaches as a whole.  First come the arrays
 * of fixed size, then a DSA area of dlock.max_memory, which never grows:
 *
 *	DlockHeader			one per server, in the main segment: whose layout it is
 *	pids				pg_atomic_uint32[] by proc number
 *	DlockControl		one per segment
 *	backends			DlockBackend[] by proc number
 *	locks				DlockPartition[]: (space, name) -> DlockLock
 *	ids					DlockIdPartition[]: number -> DlockRecord
 *	requests			DlockIdPartition[]: request -> DlockLeaseTicket
 *	the area:
 *	  spaces			dshash: (database, extension) -> DlockSpaceEntry
 *	  accounts			dshash: role -> DlockAccount
 *	DlockSpace			one per space: its numbers, worker, journal, outbox
 *	DlockTicket			one per holder and per waiter, linked into its lock
 *	  DlockLeaseTicket	... one that belongs to a lease
 *	DlockLease			one per lease, linked into its space
 *	DlockWatched		one per name that is watched, in its partition
 *	DlockWatch			one per session and channel that watch it, linked there
 *
 * A lock exists in the table for as long as it has a holder or a waiter, or
 * slots that were set for it.  The lock of its table partition
 * (dlock_lock_find returns with it held) is "the lock entry's lock" in the
 * comments here and elsewhere; it protects the lock and the links and states
 * of all its tickets.  lock_table.c takes it, for queue*.c alone.
 *
 * src/README has the order of the locks, and the invariants, which are cited
 * by their numbers.
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
 * The number of the layout of all that is below: increased with the first
 * change since a release.  Libraries of different layouts never share an area;
 * see DlockHeader.
 */
#ifndef DLOCK_LAYOUT
#define DLOCK_LAYOUT		1
#endif

#define DLOCK_HEADER_NAME	"dlock"

/* Numbers per reservation: what a restart loses, and how rarely WAL is written */
#define DLOCK_TICKET_BLOCK	(1 << 18)

/*
 * The life of a ticket.  WAITING is in the lock's queue, GRANTED among its
 * holders, GONE in neither.  LEAVING is in the queue still, and does not wait
 * any more; ENDING is among the holders, and does not hold: it goes with its
 * last pin, or, where it belongs to a lease, as all that are LEAVING do, once
 * the removal of its row is in the WAL.
 *
 * The memory of a session's ticket belongs to the backend that made it, which
 * alone frees it, so that its owner may look at the state at any time without
 * a lock.  That of a lease's ticket is counted by references.
 */
typedef enum DlockState
{
	DLOCK_WAITING,
	DLOCK_LEAVING,
	DLOCK_GRANTED,
	DLOCK_ENDING,
	DLOCK_GONE
} DlockState;

/*
 * A doubly linked list through the memory area, of links.
 */
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

/*
 * What makes an announcement of a ticket.  Belongs to the ticket.
 */
typedef struct DlockAnnouncement
{
	DlockLink	link;			/* in DlockSpace.outbox; must be first */

	/* immutable */
	dsa_pointer self;
	char		channel[NAMEDATALEN];
	Size		size;			/* of the whole structure */
	Oid			role;			/* to whom it is counted */

	/* protected by the outbox's lock */
	bool		armed;			/* the LISTEN that belongs to it is in effect */
	uint64		armer;			/* the session whose transaction arms it with
								 * its commit; 0: none does, or has */
	uint64		claim;			/* that session's number for this */
	uint32		events;			/* what is to be announced: DLOCK_EVENT_... */
	uint32		sending;		/* of these, what the sender is sending */
	bool		in_outbox;		/* linked there: armed, and there are events */
	bool		orphaned;		/* its ticket is gone: goes once it was sent */
	int64		number;			/* of the ticket */
	bool		granted;		/* that it was granted is an event, or was one */
	bool		wanted;			/* somebody has begun to wait: an event once
								 * "granted" is set, or was one */

	/* the owner's */
	bool		counted;		/* in DlockSpace.announced */

	/* immutable */
	char		name[FLEXIBLE_ARRAY_MEMBER];	/* as a JSON string, quoted */
} DlockAnnouncement;

#define DLOCK_EVENT_GRANTED		0x01
#define DLOCK_EVENT_RELEASED	0x02
#define DLOCK_EVENT_EXPIRED		0x04
#define DLOCK_EVENT_WANTED		0x08

typedef struct DlockTicket
{
	DlockLink	link;			/* in a list of its lock; must be first */

	/* immutable once the ticket has joined a lock */
	dsa_pointer self;
	dsa_pointer space;			/* DlockSpace */
	int64		number;
	uint64		session;		/* DlockBackend.session of the owner; 0: none,
								 * it belongs to a lease (see below); nobody's
								 * where its owner could not give it back */
	int			procno;
	int			pid;
	Oid			role;			/* who asked, or whose lease it is; to whom it is
								 * counted */
	uint8		scope;			/* DlockScope, as first asked; see also the
								 * depths */
	uint8		mode;			/* DlockMode; but exclusive can become shared,
								 * under the lock entry's lock */
	bool		wanted;			/* somebody has waited since it holds: I28;
								 * protected by the lock entry's lock */
	int32		slots;			/* 0 except for slots */
	int32		permits;		/* 1 except for slots */
	uint32		queue_length;	/* with it, as it joined; 0: it did not wait */
	uint32		pins;			/* guarded commits under way; protected by the
								 * lock entry's lock */
	TimestampTz enqueued_at;

	/*
	 * protected by the lock entry's lock; below 0 while it waits, see
	 * dlock_ticket_waited()
	 */
	TimestampTz granted_at;

	/*
	 * protected by the lock entry's lock, and a lease's ticket's by the space's
	 * lease lock as well: either to read it, both to change it
	 */
	dsa_pointer info;			/* terminated string, or invalid */

	/* protected by the outbox's lock; set once */
	dsa_pointer announcement;	/* DlockAnnouncement, or invalid */

	/* atomic: changed under the lock entry's lock, read without */
	pg_atomic_uint32 state;		/* DlockState */

	/* atomic: written by the owner, read by the views; how often acquired */
	pg_atomic_uint32 session_depth;
	pg_atomic_uint32 xact_depth;
} DlockTicket;

/*
 * What has a row in a table: a lease, or a lease's ticket.  Changes are marked
 * here and written by the worker; see journal.c.
 *
 * What stands behind "finished" is not there in a lease that is one ticket's own:
 * that has no row.
 */
typedef struct DlockRecord
{
	/* atomic; the memory goes with the last */
	pg_atomic_uint32 references;

	/* immutable */
	bool		is_lease;		/* a DlockLease's, or a DlockLeaseTicket's */

	/* protected by the lock of its partition of the table of numbers */
	bool		in_ids;			/* it is in there */

	/* protected by the space's lease lock */
	bool		listed;			/* in the journal: marked, and not written */
	bool		in_flight;		/* the worker writes it, or died at it */
	bool		has_row;
	bool		finished;		/* over, and not to be found any more */

	/* the worker broadcasts it after each write, and at the end */
	ConditionVariable changed;

	/* protected by the lock of its partition of the table of numbers */
	dsa_pointer next_id;		/* in the same bucket */

	/* protected by the space's lease lock */
	DlockLink	link;			/* in DlockSpace.journal */
	uint64		listed_at;		/* when it came into the journal, monotonic */
	uint32		marked;			/* number of its latest change */

	/* atomic: written by the worker, the position first */
	pg_atomic_uint32 written;	/* the change that is in the WAL */
	pg_atomic_uint64 lsn;		/* end of the latest write, or of a later one */
} DlockRecord;

/*
 * That the ttl or the durability of a lease is changed, or was: made with the first
 * such change
 */
typedef struct DlockRetiming
{
	DlockLink	link;			/* in DlockSpace.retimed; must be first */

	/* immutable */
	dsa_pointer lease;			/* DlockLease, whose it is */

	/* protected by the space's lease lock */
	int64		next_ttl;		/* that its row has, in microseconds; 0: the one
								 * that it has */
	bool		listed;			/* the list refers to the lease then */
} DlockRetiming;

/*
 * A lease.  It is open for as long as its deadline lies ahead: who finds it
 * passed treats the lease as gone, whether or not the worker has come round
 * to it, and makes it DLOCK_RAN_OUT first, by compare-and-exchange.  That
 * becomes 0 under the lease lock, when its delay begins; a close, from any
 * moment, makes it 0 at once.  From both there is no way back.
 *
 * Most leases are one ticket's own, "single".  They have no row, no delay, no
 * session and no info, and so none of the fields for that, and the ticket stands
 * in the same piece of memory, behind DLOCK_SINGLE_LEASE_SIZE bytes.
 */
struct DlockLease
{
	/* immutable once it has a number */
	dsa_pointer self;
	dsa_pointer space;			/* DlockSpace */
	int64		number;
	Oid			role;			/* the owner, by OID and by name; to whom it is
								 * counted */
	uint16		role_name;		/* where in this piece of memory that name is, at
								 * its end */
	bool		single;			/* one ticket's own, with that ticket's number:
								 * the ticket's row stands for both */

	/* the maker's */
	bool		has_place;		/* for a ticket, which was not made yet */

	/* protected by the space's lease lock */
	bool		in_leases;		/* listed there */
	bool		ran_out;		/* and the log is still to be told */
	bool		delayed;		/* ran out, and keeps its locks closed */

	/* atomic, only ever raised, under the space's lease lock */
	pg_atomic_uint32 durability;	/* the highest synchronous_commit of the
									 * callers that count on the lease */

	/* atomic */
	pg_atomic_uint32 waiters;	/* sessions that wait to get it a lock */

	/* protected by the space's lease lock */
	DlockLink	in_space;		/* in DlockSpace.leases */
	dsa_pointer retiming;		/* DlockRetiming, or invalid */
	dsa_pointer own_ticket;		/* if single: DlockLeaseTicket that is WAITING or
								 * GRANTED, or invalid */

	/* atomic, changed under the space's lease lock */
	pg_atomic_uint64 ttl;		/* in microseconds: what it lives by */

	/* atomic */
	pg_atomic_uint64 deadline;	/* monotonic microseconds, or as below; 0: over */
	pg_atomic_uint64 confirmed; /* from then on a quorum counts, monotonic, or
								 * DLOCK_NO_DEADLINE: not yet; changed under the
								 * space's lease lock */
	pg_atomic_uint64 renewed_at;	/* TimestampTz */

	DlockRecord record;

	/* here a single one has ended */

	/* immutable once it has a number */
	int64		delay;			/* in microseconds; 0: none */
	TimestampTz opened_at;
	uint64		session;		/* DlockBackend.session of the backend that
								 * it is attached to; 0: none */
	int			procno;
	int			pid;

	/* protected by the space's lease lock */
	dsa_pointer info;			/* terminated string, or invalid */
	uint64		delay_ends;		/* if delayed, in monotonic microseconds */
	DlockList	tickets;		/* WAITING and GRANTED, of DlockLeaseTicket */
	DlockList	closed;			/* ENDING, once "delayed" is over */
	uint32		held;			/* of "tickets", how many are GRANTED */
};

#define DLOCK_SINGLE_LEASE_SIZE \
	MAXALIGN(offsetof(DlockLease, record) + offsetof(DlockRecord, finished) + \
			 sizeof(bool))

/* The deadline of a lease that ran out, which somebody may have been told */
#define DLOCK_RAN_OUT		((uint64) 1)

/*
 * The deadline of a lease that is attached to a living session, or an heir's own as
 * its session waits; renewals of such a one move it on from there
 */
#define DLOCK_NO_DEADLINE	((uint64) PG_INT64_MAX)

/*
 * A lease's ticket.  While its request waits for the grant it is a session's
 * ticket like others; then the lease adopts it: "session" becomes 0.
 */
typedef struct DlockLeaseTicket
{
	DlockTicket ticket;			/* must be first */
	DlockRecord record;

	/* immutable once the ticket has joined a lock */
	dsa_pointer lease;			/* DlockLease, which this refers to */
	dsa_pointer owner;			/* terminated string, or invalid */
	uint32		request;		/* hash of its request */

	/* protected by the lock of its partition of the table of requests */
	dsa_pointer next_request;	/* in the same bucket */
	bool		in_requests;	/* it is in there */

	/* protected by the lock entry's lock */
	bool		closes;			/* counted in its lock's "closed" */

	/* atomic, increased under the lock entry's lock */
	pg_atomic_uint32 claims;	/* calls that have returned it, or may do so; 0:
								 * it is to end, under that lock */

	/* protected by the space's lease lock */
	bool		in_tickets;		/* in its lease's "tickets", or its own one */
	bool		held;			/* ... and GRANTED */
	bool		in_closed;		/* in its lease's "closed" */
	bool		announced;		/* its grant has gone to the outbox */
	bool		inherited;		/* an heir, whose row is in the WAL as it waits */

	/* protected by the lock entry's lock and the lease lock: as "info" above */
	bool		lowers;			/* shared, as soon as its row says so in the WAL */
	bool		heir;			/* its row says granted from the start: I17 */
	bool		leaves;			/* its removal is in the journal, or was written */

	/* protected by the space's lease lock */
	dsa_pointer redirection;	/* a call's DlockAnnouncement that is to take the
								 * place of its own once its row says so; or
								 * invalid */

	/* the same, but read by the worker without a lock */
	int			announce_at;	/* the synchronous_commit of who enqueued: its
								 * grant is announced when it is durable so */

	/* immutable; as long as its name, so it is last */
	DlockKey	key;
} DlockLeaseTicket;

/*
 * Behind a ticket of a lease of many: its place in one of that lease's lists;
 * protected by the space's lease lock.
 */
typedef struct DlockInLease
{
	DlockLink	link;			/* must be first */
	dsa_pointer ticket;			/* immutable */
} DlockInLease;

/*
 * A lock that is held or waited for, or whose slots were set.  Whenever the
 * entry's lock is free, I1 to I4 hold.
 */
typedef struct DlockLock
{
	/* immutable */
	dsa_pointer self;
	uint32		size;			/* in bytes, with the name's */
	Oid			role;			/* to whom it is counted; as a spare, its backend's */

	/* protected by the lock entry's lock, as all that is in its partition */
	dsa_pointer next;			/* in the same bucket */
	DlockList	holders;		/* GRANTED and ENDING tickets */
	DlockList	queue;			/* WAITING tickets, in ticket order */
	int32		slots;			/* on which requests have to agree: permits there
								 * are; 0: not a semaphore */
	int32		holders_slots;	/* what counts for the holders, if there are any */
	int32		permits;		/* permits given out */
	uint32		closed;			/* holders that a delay has kept there: nobody
								 * fits beside them */
	uint8		exclusive;		/* exclusive tickets among the holders: 0, 1 */
	bool		queued:1;		/* counted in its partition as having a queue */
	bool		leased:1;		/* a lease has held it since nobody did */
	bool		settled:1;		/* set_slots was changed before dlock_slots was
								 * read; keeps the entry */

	/* the same; they keep the entry as well */
	uint16		setters;		/* transactions that may change set_slots */
	int32		set_slots;		/* what dlock_slots says; 0: nothing */

	/* immutable while it is in the table; as long as its name, so it is last */
	DlockKey	key;
} DlockLock;

#define DLOCK_PARTITION_BITS	7
#define DLOCK_PARTITIONS	(1 << DLOCK_PARTITION_BITS)

/* Buckets that a partition begins with; a power of 2 */
#define DLOCK_FIRST_BUCKETS	16

/* So often can a partition double; no segment has more than 64 MB */
#define DLOCK_SEGMENTS	20

/*
 * The buckets of a partition of a hash table; see buckets.c.  Protected by the
 * partition's lock.
 */
typedef struct DlockBuckets
{
	uint32		count;			/* entries */
	uint32		num_buckets;	/* in use, DLOCK_FIRST_BUCKETS or more ... */
	uint32		mask;			/* ... and no more than this plus 1, a power of 2 */
	dsa_pointer first[DLOCK_FIRST_BUCKETS]; /* buckets: an entry, or invalid */
	dsa_pointer segments[DLOCK_SEGMENTS];	/* arrays of more buckets, each as
											 * many as there are before it; set
											 * once */
} DlockBuckets;

/* So many that two databases rarely share one; a power of 2 */
#define DLOCK_QUEUED_BUCKETS	64

/*
 * A part of the table of locks; see lock_table.c.
 */
typedef struct DlockPartition
{
	/* protects the rest, all entries here, and their locks' tickets */
	LWLock		lock;
	DlockBuckets buckets;		/* of DlockLock */
	uint32		queued[DLOCK_QUEUED_BUCKETS];	/* entries that have a queue, by
												 * their database */
	uint32		num_watched;	/* names here that are watched ... */
	uint32		watched_size;	/* ... and buckets for them, a power of 2; or 0 */
	dsa_pointer watched;		/* these: DlockWatched, or invalid */

	/* the next one's lock shall not share a cache line with this one's */
	char		padding[PG_CACHE_LINE_SIZE];
} DlockPartition;

#define DLOCK_ID_PARTITION_BITS	6
#define DLOCK_ID_PARTITIONS	(1 << DLOCK_ID_PARTITION_BITS)

/*
 * A part of the table of numbers, or of requests; see id_table.c.
 */
typedef struct DlockIdPartition
{
	/* protects the rest, and what the entries say of their place here */
	LWLock		lock;
	DlockBuckets buckets;		/* of DlockRecord, or DlockLeaseTicket */

	/* the next one's lock shall not share a cache line with this one's */
	char		padding[PG_CACHE_LINE_SIZE];
} DlockIdPartition;

/*
 * A name that is watched.  It is in the table for as long as it has a watch, or
 * is listed: see watch.c.
 */
typedef struct DlockWatched
{
	DlockLink	link;			/* in DlockSpace.changed; must be first */

	/* immutable */
	dsa_pointer self;
	dsa_pointer space;			/* DlockSpace */
	Oid			role;			/* to whom its memory is counted */

	/* protected by the partition's lock, as the entry of its lock is */
	dsa_pointer next;			/* in the same bucket */
	uint32		users;			/* watches */
	uint64		changes;		/* of the lock's holders, and 1 */

	/* changed under both, so that either will do to read it */
	bool		listed;			/* in DlockSpace.changed: some are to be told */

	/* protected by the outbox's lock */
	DlockList	watches;		/* of DlockWatch, those that are armed; who was
								 * told of the least stands first */
	uint64		due;			/* not told before, in monotonic microseconds */
	uint64		round;			/* now, all are told what is true after so many
								 * changes, or more; 0: none is being told */

	/* immutable; as long as its name, so it is last */
	DlockKey	key;
} DlockWatched;

/* That somebody watches a name, and is told on a channel */
typedef struct DlockWatch
{
	DlockLink	link;			/* in DlockWatched.watches; must be first */

	/* immutable */
	dsa_pointer self;
	dsa_pointer watched;		/* DlockWatched */
	Oid			role;			/* whose it is */
	char		channel[NAMEDATALEN];

	/* protected by the outbox's lock */
	bool		armed;			/* the LISTEN that belongs to it is in effect */
	uint64		told;			/* of the holders after so many changes; or 0 */
	uint64		telling;		/* being told, in that one of all tellings */
} DlockWatch;

/* The bounds of dlock_wait_histogram, and what is above the last; counter.c */
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
	DLOCK_NUM_EVENTS,			/* that many of them the view shows */
	DLOCK_COUNT_HELD = DLOCK_NUM_EVENTS,	/* tickets that are GRANTED now, but
											 * for those granted, and released */
	DLOCK_COUNT_WAITS,			/* waits by their length: the first of ... */
	DLOCK_NUM_COUNTERS = DLOCK_COUNT_WAITS + DLOCK_WAIT_BUCKETS
} DlockCounter;

/*
 * The names of a space that were waited for most; see contention.c.  All is
 * protected by "lock", but for what its chunks are: set once.
 *
 * An entry is known by its number.  What belongs to looking one up, and to
 * finding the one to be displaced, is here, by number; the rest in chunks, of
 * which there are as many as have been needed.
 */
#define DLOCK_CONTENDED_NAMES	1000
#define DLOCK_CONTENDED_CHUNK	50
#define DLOCK_CONTENDED_BUCKETS 1024	/* a power of 2 */

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
	int			room;			/* entries that chunks are there for */
	int16		buckets[DLOCK_CONTENDED_BUCKETS];	/* entries by hash; -1: none */

	/* by entry */
	uint32		hashes[DLOCK_CONTENDED_NAMES];
	uint64		weights[DLOCK_CONTENDED_NAMES];
	int16		next[DLOCK_CONTENDED_NAMES];	/* in its bucket; -1: none */
	int16		places[DLOCK_CONTENDED_NAMES];	/* in the heap */

	int16		heap[DLOCK_CONTENDED_NAMES];	/* the least weight comes first */
	dsa_pointer chunks[DLOCK_CONTENDED_NAMES / DLOCK_CONTENDED_CHUNK];
} DlockContention;

/* So many that two locks in use rarely share one; a power of 2 */
#define DLOCK_REMOVED_BUCKETS	1024

/* Dead rows in the tables after which they are vacuumed, at the least */
#define DLOCK_VACUUM_ROWS	10000

/* remote_write, remote_flush ("on") and remote_apply */
#define DLOCK_NUM_QUORUMS	3

/* Heartbeats that are known at a time, for each of these */
#define DLOCK_HEARTBEATS	8

/* One that was sent to standbys */
typedef struct DlockHeartbeat
{
	XLogRecPtr	lsn;			/* where it ends */
	uint64		sent;			/* before it was written; monotonic */
} DlockHeartbeat;

/*
 * How far the tables of leases have been read: an attempt that fails, or has no
 * more time, leaves it to the next one.
 */
typedef struct DlockLoading
{
	int			part;			/* what is being put back: a DlockLoadPart */
	int64		last;			/* number of the latest row that was read there */

	/* of its rows, those of another system or database: how many, and the first */
	uint64		num_foreign;
	uint64		foreign_system;
	Oid			foreign_database;
} DlockLoading;

/*
 * A name space: one per database and extension.  Kept while a backend uses
 * it; see purge.c for what happens to it then.
 */
struct DlockSpace
{
	/* immutable */
	DlockSpaceKey key;
	dsa_pointer self;

	/* written by every acquire, and so kept apart from what all only read */
	char		padding1[PG_CACHE_LINE_SIZE];

	/* changed under mutex; see ticket.c for how they are read without */
	slock_t		mutex;
	pg_atomic_uint64 next_ticket;	/* next number to give out */
	pg_atomic_uint64 ticket_limit;	/* first number not reserved */

	char		padding2[PG_CACHE_LINE_SIZE];

	/* what every call looks at stands together, down to "changed" */

	/* protected by lease_lock */
	LWLock		lease_lock;
	DlockList	leases;			/* of DlockLease */
	DlockList	journal;		/* of DlockRecord, the oldest mark first */

	/* atomic */
	pg_atomic_uint32 loaded;	/* what the tables keep is in memory */
	pg_atomic_uint32 has_removed;	/* there is something in "removed" */

	/* protected by outbox_lock */
	LWLock		outbox_lock;
	DlockList	outbox;			/* of DlockAnnouncement */
	DlockList	changed;		/* of DlockWatched that are listed */
	uint64		tellings;		/* so often was something taken from there */

	/* protected by lease_lock */
	DlockList	retimed;		/* of DlockRetiming: the worker is to look at
								 * these leases anew */

	/* protected by heartbeat_mutex: what standbys have not acknowledged yet */
	slock_t		heartbeat_mutex;
	int			num_heartbeats[DLOCK_NUM_QUORUMS];
	DlockHeartbeat heartbeats[DLOCK_NUM_QUORUMS][DLOCK_HEARTBEATS];

	/* protected by a lock on dlock_queue that excludes itself */
	DlockLoading loading;

	/* atomic */
	pg_atomic_uint32 settled;	/* locks that were, at least, since all of them were
								 * looked through */
	pg_atomic_uint32 slots_loaded;	/* what dlock_slots has is in memory; it is, too,
									 * where "loaded" is set */
	pg_atomic_uint32 load_failures; /* attempts of the worker at that */
	ConditionVariable load_changed; /* broadcast when either changes */
	pg_atomic_uint64 loaded_at; /* all rows that were put back were committed
								 * before this position in the WAL */
	pg_atomic_uint32 loader;	/* PID of who loads, with that lock; one that has
								 * ended by a FATAL error stays, without it */
	pg_atomic_uint64 lock_told_at;	/* when somebody last logged that a table is
									 * locked, and cannot be read; monotonic */
	pg_atomic_uint32 failures;	/* attempts to write the journal that failed */
	pg_atomic_uint32 failure;	/* SQLSTATE of the latest */
	pg_atomic_uint64 quorum[DLOCK_NUM_QUORUMS]; /* when the last heartbeat was
												 * sent that standbys have
												 * acknowledged; monotonic */
	pg_atomic_uint64 last_heartbeat;	/* when somebody last began to send
										 * one; monotonic */
	pg_atomic_uint32 announced; /* tickets with an announcement */
	pg_atomic_uint32 watches;	/* DlockWatches */
	pg_atomic_uint32 worker;	/* proc number of the worker, plus 1; or 0 */
	pg_atomic_uint64 worker_start;	/* when one was last asked for, monotonic
									 * microseconds */
	pg_atomic_uint32 worker_comes;	/* it looks at the journal in a moment,
									 * without being woken */
	pg_atomic_uint32 worker_deaths; /* workers in a row that died young */

	/*
	 * The worker's: the OID of a table that it could not lock in time, and in
	 * the lower half since when, in whatever unit; 0: none.
	 */
	pg_atomic_uint64 blocked_on;
	pg_atomic_uint64 next_due;	/* when a lease is due that a worker has left
								 * alone, at the earliest; monotonic */
	pg_atomic_uint32 sender;	/* as "worker", and so on, for the others */
	pg_atomic_uint64 sender_start;
	pg_atomic_uint32 vacuum;
	pg_atomic_uint64 vacuum_start;
	pg_atomic_uint32 dead_rows; /* in the tables, about */
	pg_atomic_uint32 vacuum_at; /* so many are vacuumed away */
	pg_atomic_uint32 cleared;	/* the rows that stand for nothing are gone */

	/*
	 * atomic: where in the WAL the latest commit ends that has removed a
	 * holder's row, by the hash of the lock's name; or 0
	 */
	pg_atomic_uint64 removed[DLOCK_REMOVED_BUCKETS];

	/* atomic: what backends that are gone have counted */
	pg_atomic_uint64 counters[DLOCK_NUM_COUNTERS];

	/* exclusive for who moves a backend's counts there, shared to add all up */
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
	bool		useless;		/* is being removed, or is to be: nobody comes to
								 * use it any more */
	dsa_pointer space;

	/*
	 * Where the key has no extension, the entry stands for the database, and
	 * has nothing but the first number that no space there has ever reserved.
	 */
	uint64		unreserved;
} DlockSpaceEntry;

/*
 * What others need to know about a backend.  "session" tells one backend
 * from the next one in the same slot: a ticket whose session is not its
 * slot's any more has lost its owner.
 */
typedef struct DlockBackend
{
	pg_atomic_uint64 session;	/* 0: slot unused */
	Oid			database;

	/* protected by mutex */
	slock_t		mutex;
	uint64		wait_count;		/* waits begun; tells one from the next */
	int64		wait_ticket;	/* ticket waited for; 0: not waiting */
	dsa_pointer wait_lease;		/* a lease that is to have it; or invalid */
	DlockMode	wait_mode;		/* what it asks for */
	int32		wait_permits;
	DlockKey	wait_key;		/* its lock */

	/* atomic: set by another waiter that has found a deadlock */
	pg_atomic_uint32 check_requested;

	/*
	 * atomic: the transaction that has changed dlock_slots, until what it has left
	 * there is in memory; or invalid
	 */
	pg_atomic_uint32 setter;

	/*
	 * atomic: counts the tickets of this backend that were ended by force; only
	 * its changes mean anything
	 */
	pg_atomic_uint32 lost;

	/*
	 * atomic: written by the backend alone, so without a locked instruction; what
	 * "space" is changes under the lock of that space's counts
	 */
	pg_atomic_uint64 counters[DLOCK_NUM_COUNTERS];
	pg_atomic_uint64 space;		/* DlockSpace that they are for, or invalid */

	/* the next backend's shall not share a cache line with this one's */
	char		padding[PG_CACHE_LINE_SIZE];
} DlockBackend;

/*
 * What a role has taken of the area, in all databases; see account.c.
 */
typedef struct DlockAccount
{
	Oid			role;			/* hash key, must be first */

	/* protected by the partition lock of the table */
	uint32		users;			/* backends that have it open */

	/* atomic */
	pg_atomic_uint32 sponsor;	/* the session user who last took memory for the
								 * role while it was scarce; 0: none, or itself */
	pg_atomic_uint64 used;		/* bytes, as far as they were reported */
} DlockAccount;

typedef struct DlockControl
{
	/* immutable */
	int			memory_tranche;
	int			table_tranche;
	dshash_table_handle spaces;
	dshash_table_handle accounts;
	int			num_backends;
	Size		area_size;		/* in bytes */
	uint64		secrets[2];		/* random and odd: the hash of names has them */

	LWLock		reserve_lock;	/* held while ticket numbers are reserved */
	LWLock		purge_lock;		/* held while a useless space is removed */

	/* atomic */
	pg_atomic_uint64 last_session;	/* source of DlockBackend.session */
	pg_atomic_uint64 memory_used;	/* bytes of locks and tickets, about */
	pg_atomic_uint64 spaces_left;	/* times that a space has lost its last user */
	pg_atomic_uint32 looked_at; /* spaces, see purge.c */
} DlockControl;

/*
 * What libraries of all layouts find under one name, and agree about: this
 * structure and what is said of it never change.
 *
 * A segment is used by libraries of its own layout alone.  Each process that is
 * attached to it counts itself, until it has let go of its memory.  Once no process
 * is attached, another layout's library may free the segment and make its own, and
 * so does this one's if dlock.max_memory has changed.
 */
typedef struct DlockHeader
{
	/* protected by AddinShmemInitLock, as is the choice of the segment */
	uint32		initialized;	/* the tranches are made */
	int32		memory_tranche;
	int32		table_tranche;
	uint32		layout;			/* DLOCK_LAYOUT of the segment's library, ... */
	uint32		sizes;			/* ... of which builds may differ ... */
	char		version[64];	/* ... and its version */
	int32		max_memory;		/* dlock.max_memory that it was made with */
	dsm_handle	segment;		/* pinned; or DSM_HANDLE_INVALID.  It begins with
								 * the PIDs of the processes attached, by proc
								 * number: pg_atomic_uint32, 0 for none */
	uint32		num_pids;

	/* atomic; increased under the lock */
	pg_atomic_uint32 attached;	/* processes attached to the segment */
	pg_atomic_uint32 workers;	/* ... of these, background workers of dlock */

	/*
	 * atomic: until then, in microseconds as TimestampTz, somebody with another
	 * layout wants to have the place.  Workers go where only they are left.
	 */
	pg_atomic_uint64 wanted_until;

	char		unused[64];		/* zero */
} DlockHeader;

#endif							/* DLOCK_SHMEM_H */
