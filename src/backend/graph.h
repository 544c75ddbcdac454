/*-------------------------------------------------------------------------
 *
 * graph.h
 *	  The graph of waits in dlock's queues and for heavyweight locks.  graph.c
 *	  collects it for deadlock.c and blockers.c, in backend-local memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_GRAPH_H
#define DLOCK_GRAPH_H

#include "storage/lock.h"
#include "utils/hsearch.h"

#include "shared/shared.h"

/* A backend's wait in dlock; the same "count" means the same wait */
typedef struct DlockWait
{
	uint64		count;
	int64		number;			/* of the ticket that waits */
	DlockMode	mode;
	int32		permits;
	DlockKey	key;			/* of the ticket's lock */
} DlockWait;

/* The two indexes of a place: of its lock (-1: none), and within the lock */
typedef struct DlockGraphRef
{
	int			lock;
	int			place;
} DlockGraphRef;

/* A holder or waiter.  A process can be both, for a heavyweight lock. */
typedef struct DlockGraphPlace
{
	int			procno;			/* possibly a parallel worker's */
	int			owner;			/* proc number of the process whose end frees
								 * this place; -1: none that can wait */
	int			pid;			/* the owner's */
	int			vertex;			/* the owner's; -1: not collected */
	int			first_wait;		/* index in DlockGraph.waits; -1: none */
	bool		granted;
	LOCKMASK	modes;			/* held or requested, a bit for each */
	LOCKMASK	conflicts;		/* modes with which a request conflicts */
	uint64		since;			/* start of the wait; 0: held, or just begun */

	/* only for a lock of dlock */
	int64		number;			/* of the ticket */
	int64		lease;			/* number of the ticket's lease, or 0 */
	Oid			role;
	int32		slots;			/* as requested, or as set */
	int32		permits;
	bool		counts;			/* does it hold, wait, or close the lock? */
	bool		closed;			/* does a delay keep the lock closed? */

	/* used by blockers.c */
	DlockGraphRef next_of_vertex;
	int			counted;		/* DlockGraph.number of its latest count */
	const DlockRow *row;		/* the ticket's, if it has an info, or NULL */
} DlockGraphPlace;

typedef struct DlockGraphLock
{
	bool		heavyweight;
	DlockKey	key;			/* unless heavyweight */
	LOCKTAG		tag;			/* if heavyweight */
	int			next;			/* next lock in the bucket; -1: none */
	DlockGraphPlace *places;	/* holders, then the queue in its order */
	int			count;
	int			holders;		/* number of holders */
	int32		slots;			/* slots for the holders */
	int			expanded;		/* number of places with collected owners */

	/* used by blockers.c */
	int			first;			/* first waiting request; "count" if none */
	int			first_exclusive;	/* first waiting one that is not shared */
	int			number;			/* DlockGraph.number of the latest count */
	int			done[MAX_LOCKMODES];	/* by mode, counted from here on */
	LOCKMASK	shared_modes;	/* 0, or modes of a root's only place ... */
	int			shared_count;	/* ... and the result for that root */
	bool		shared_is_ours;
	bool		has_infos;		/* is "row" of each place set? */
} DlockGraphLock;

/* A wait of a process at a place */
typedef struct DlockGraphWait
{
	int			vertex;
	int			procno;			/* its backend's, or a parallel worker's */
	DlockGraphRef at;
	uint64		id;				/* differs between two waits; 0: unknown */
	int			next_of_vertex; /* -1: none */
	int			next_at_place;	/* -1: none; a place can have several waits */
	bool		blocked;		/* used by deadlock.c: not granted yet */
} DlockGraphWait;

/*
 * A backend with its parallel workers.  The whole graph also has prepared
 * transactions and leases, which never wait.
 */
typedef struct DlockVertex
{
	int			procno;			/* -1: a lease */
	int			pid;			/* 0: not a session */
	int			first_wait;		/* index in DlockGraph.waits; -1: none */
	int64		number;			/* of the ticket that waits, or 0 */

	/* used by deadlock.c */
	bool		stuck;			/* not known to go on */
	bool		in_knot;
	bool		reached;		/* it blocks this backend, directly or not */
	bool		reaches;		/* this backend blocks it, directly or not */
	bool		mark;			/* scratch space of several functions */
	LOCKMASK	counted;		/* modes counted by reduce_lock() */

	/* used by blockers.c */
	DlockGraphRef first_place;
	uint64		since;			/* start of its latest wait */
	bool		is_ours;		/* of this database */
	bool		explained;		/* is it a root, or behind a root? */
	int			visited;		/* DlockGraph.number of the latest visit */
} DlockVertex;

#define DLOCK_GRAPH_BUCKETS	256 /* a power of 2 */

typedef struct DlockGraph
{
	DlockVertex *vertices;		/* this backend's comes first */
	int			num_vertices;
	int			max_vertices;
	DlockGraphLock *locks;
	int			num_locks;
	int			max_locks;
	DlockGraphWait *waits;
	int			num_waits;
	int			max_waits;
	int		   *vertex_of;		/* by proc number; -1: none */
	HTAB	   *others;			/* vertices that are not sessions; NULL if this
								 * is not the whole graph */
	int		   *next_in_group;	/* by proc number: links a leader and its
								 * waiting parallel workers; -1: none */
	DlockGraphRef *heavy;		/* by proc number: the place where the process
								 * waits for a heavyweight lock */
	int			buckets[DLOCK_GRAPH_BUCKETS];	/* of locks; -1: none */

	/* the space's worker, if it cannot lock a table */
	int			worker;			/* its proc number; -1: none */
	int			worker_pid;
	uint64		blocked_on;		/* copied from the space; 0: nothing */

	/* used by blockers.c */
	int			number;			/* of the current count or walk, from 1 */
	int		   *stack;			/* counted vertices that must be expanded */
	int			depth;
	bool		found_ours;		/* is a counted vertex of this database? */
} DlockGraph;

static inline DlockGraphPlace *
dlock_graph_place(const DlockGraph *graph, DlockGraphRef ref)
{
	return &graph->locks[ref.lock].places[ref.place];
}

extern bool dlock_graph_read_wait(int procno, DlockWait *wait);
extern int	dlock_graph_read_lock(const DlockKey *key, int max_each,
								  DlockMember **members, int32 *slots);
extern int	dlock_graph_blocked_worker(DlockSpace *space, Datum **pids,
									   int *count);
extern DlockGraph *dlock_graph_collect(DlockSpace *space);
extern DlockGraph *dlock_graph_collect_all(DlockSpace *space);

#endif							/* DLOCK_GRAPH_H */
