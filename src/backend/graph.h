/*-------------------------------------------------------------------------
 *
 * graph.h
 *	  Who waits for whom, in dlock's queues and for heavyweight locks:
 *	  collected by graph.c for deadlock.c and blockers.c, in backend-local
 *	  memory.
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
	int64		number;			/* of the ticket waited for */
	DlockMode	mode;
	int32		permits;
	DlockKey	key;			/* of its lock */
} DlockWait;

/* A place: the index of its lock (-1: none), and its own in the lock */
typedef struct DlockGraphRef
{
	int			lock;
	int			place;
} DlockGraphRef;

/* A holder or a waiter; for a heavyweight lock, a process can be both */
typedef struct DlockGraphPlace
{
	int			procno;			/* possibly a parallel worker's */
	int			owner;			/* proc number of the process that leaves this
								 * place if it goes on; -1: it never waits */
	int			pid;			/* the owner's */
	int			vertex;			/* the owner's; -1: not collected */
	int			first_wait;		/* index in DlockGraph.waits; -1: none */
	bool		granted;
	LOCKMASK	modes;			/* held or requested, a bit each */
	LOCKMASK	conflicts;		/* modes that it conflicts with */
	uint64		since;			/* start of the wait; 0: a moment ago */

	/* of a lock of dlock */
	int64		number;			/* of the ticket */
	int64		lease;			/* that has the ticket, or 0 */
	Oid			role;
	int32		slots;			/* as requested, or as set */
	int32		permits;
	bool		counts;			/* holds or waits, and is not about to leave */
	bool		closed;			/* a delay of this ticket closes the lock */

	/* blockers.c's */
	DlockGraphRef next_of_vertex;
	int			counted;		/* number of the latest count that came here */
	const DlockRow *row;		/* of the ticket, if it has an info */
} DlockGraphPlace;

typedef struct DlockGraphLock
{
	bool		heavyweight;
	DlockKey	key;			/* unless heavyweight */
	LOCKTAG		tag;			/* if heavyweight */
	int			next;			/* in the same bucket; -1: none */
	DlockGraphPlace *places;	/* holders, then the queue in its order */
	int			count;
	int			holders;		/* number of holders */
	int32		slots;			/* slots for the holders */
	int			expanded;		/* places whose owners are collected */

	/* blockers.c's */
	int			first;			/* first request that waits in dlock ... */
	int			first_exclusive;	/* ... and is not shared; "count": none */
	int			number;			/* of the latest count that came here */
	int			done[MAX_LOCKMODES];	/* by mode: counted from here on */
	LOCKMASK	shared_modes;	/* only place of a root counted before ... */
	int			shared_count;	/* ... and the count (modes 0: none) */
	bool		shared_is_ours;
	bool		has_infos;		/* the places have their infos */
} DlockGraphLock;

/* A wait of a process at a place */
typedef struct DlockGraphWait
{
	int			vertex;
	int			procno;			/* its backend's, or a parallel worker's */
	DlockGraphRef at;
	uint64		id;				/* differs between two waits; 0: unknown */
	int			next_of_vertex; /* -1: none */
	int			next_at_place;	/* -1: none; several can wait for a lease's */
	bool		blocked;		/* see deadlock.c */
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
	int64		number;			/* of the ticket waited for, or 0 */

	/* deadlock.c's */
	bool		stuck;			/* does not go on, as far as is known */
	bool		in_knot;
	bool		reached;
	bool		reaches;
	bool		mark;
	LOCKMASK	counted;

	/* blockers.c's */
	DlockGraphRef first_place;
	uint64		since;			/* start of its latest wait */
	bool		is_ours;		/* of this database */
	bool		explained;		/* a root, or waits behind one */
	int			visited;		/* number of the latest count or walk */
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
	DlockGraphRef *heavy;		/* by proc number: where it waits in the lock
								 * manager */
	int			buckets[DLOCK_GRAPH_BUCKETS];	/* of locks; -1: none */

	/* the space's worker, if it cannot lock a table */
	int			worker;			/* its proc number; -1: none */
	int			worker_pid;
	uint64		blocked_on;		/* copied from the space; 0: nothing */

	/* blockers.c's */
	int			number;			/* of the latest count or walk */
	int		   *stack;			/* counted vertices to continue with */
	int			depth;
	bool		found_ours;		/* the count has one of this database */
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
