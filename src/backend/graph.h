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

/* A backend's wait in dlock.  "count" tells the backend's waits apart. */
typedef struct DlockWait
{
	uint64		count;
	int64		number;			/* of the waiting ticket */
	DlockMode	mode;
	DlockKey	key;			/* of the ticket's lock */
} DlockWait;

/* Refers to a place by two indexes */
typedef struct DlockGraphRef
{
	int			lock;			/* in DlockGraph.locks; -1: none */
	int			place;			/* in the lock's "places" */
} DlockGraphRef;

/* A holder or waiter.  A process can have several places in a lock. */
typedef struct DlockGraphPlace
{
	int			procno;			/* of the process, maybe a parallel worker */
	int			owner;			/* proc number of the process that frees this
								 * place; -1: none, or one that never waits */
	int			pid;			/* the owner's */
	int			vertex;			/* the owner's; -1: not collected */
	int			first_wait;		/* index in DlockGraph.waits; -1: none */
	bool		granted;
	LOCKMASK	modes;			/* held or requested modes, one bit each */
	LOCKMASK	conflicts;		/* modes that conflict with the request */
	uint64		since;			/* wait's start, or 0 if not known */

	/* only for a lock of dlock; "counts" is set for any lock */
	int64		number;			/* of the ticket */
	int64		lease;			/* number of the ticket's lease, or 0 */
	Oid			role;
	int32		slots;			/* set for the lock, or else as requested */
	int32		permits;
	bool		counts;			/* holds, waits, or is kept by pin or delay */
	bool		closed;			/* ended; closes the lock until it leaves */

	/* used by blockers.c */
	DlockGraphRef next_of_vertex;
	int			counted;		/* DlockGraph.number of the latest count */
	const DlockRow *row;		/* row of the ticket; NULL if without info */
} DlockGraphPlace;

typedef struct DlockGraphLock
{
	bool		heavyweight;
	DlockKey	key;			/* unless heavyweight */
	LOCKTAG		tag;			/* if heavyweight */
	int			next;			/* next lock in the bucket; -1: none */
	DlockGraphPlace *places;	/* holders, then waiters in queue order */
	int			count;
	int			holders;		/* number of holders */
	int32		slots;			/* the holders' slots */
	int			expanded;		/* owners of this many places are collected */

	/* used by blockers.c */
	int			first;			/* first waiting request, or "count" */
	int			first_exclusive;	/* first non-shared request, or "count" */
	int			number;			/* DlockGraph.number of the latest count */
	int			done[MAX_LOCKMODES];	/* by mode: visited from here on */
	LOCKMASK	shared_modes;	/* 0, or modes of a root with one place */
	int			shared_count;	/* number of vertices behind that root */
	bool		shared_is_ours; /* is any of these of this database? */
	bool		has_infos;		/* were the holders' rows looked up? */
} DlockGraphLock;

/* A wait of a process at a place */
typedef struct DlockGraphWait
{
	int			vertex;
	int			procno;			/* the backend's, or a parallel worker's */
	DlockGraphRef at;
	uint64		id;				/* tells a process's waits apart; 0: unknown */
	int			next_of_vertex; /* the vertex's next wait; -1: none */
	int			next_at_place;	/* next wait at the same place; -1: none */
	bool		blocked;		/* used by deadlock.c: not granted yet */
} DlockGraphWait;

/*
 * A backend with its parallel workers or, in blockers.c's graph, a prepared
 * transaction or a lease.  Only backends can wait.
 */
typedef struct DlockVertex
{
	int			procno;			/* -1: a lease */
	int			pid;			/* 0: not a process */
	int			first_wait;		/* index in DlockGraph.waits; -1: none */
	int64		number;			/* of the waiting ticket; 0: none */

	/* used by deadlock.c */
	bool		stuck;			/* true until reduce() finds that it goes on */
	bool		in_knot;
	bool		reached;		/* blocks this backend, directly or not */
	bool		reaches;		/* waits for this backend, directly or not */
	bool		mark;			/* scratch space of several functions */
	LOCKMASK	counted;		/* modes counted by reduce_lock() */

	/* used by blockers.c */
	DlockGraphRef first_place;
	uint64		since;			/* start of the latest wait */
	bool		is_ours;		/* is it of this database? */
	bool		explained;		/* is it a root, or behind a root? */
	int			visited;		/* DlockGraph.number of the latest visit */
} DlockVertex;

#define DLOCK_GRAPH_BUCKETS	256 /* a power of 2 */

typedef struct DlockGraph
{
	DlockVertex *vertices;		/* in deadlock.c, the first is this backend */
	int			num_vertices;
	int			max_vertices;
	DlockGraphLock *locks;
	int			num_locks;
	int			max_locks;
	DlockGraphWait *waits;
	int			num_waits;
	int			max_waits;
	int		   *vertex_of;		/* by proc number; -1: none */
	HTAB	   *others;			/* leases and prepared transactions; NULL in
								 * deadlock.c's graph */
	int		   *next_in_group;	/* by proc number: links a leader and its
								 * waiting parallel workers; -1: none */
	DlockGraphRef *heavy;		/* by proc number: the place where the process
								 * waits for a heavyweight lock */
	int			buckets[DLOCK_GRAPH_BUCKETS];	/* first lock; -1: none */

	/* the space's worker, if it cannot lock a table */
	int			worker;			/* its proc number; -1: none */
	int			worker_pid;
	uint64		blocked_on;		/* copied from the space; 0: nothing */

	/* used by blockers.c */
	int			number;			/* number of counts and walks begun so far */
	int		   *stack;			/* vertices whose places must be visited */
	int			depth;
	bool		found_ours;		/* is any counted vertex of this database? */
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
