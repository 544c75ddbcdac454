/*-------------------------------------------------------------------------
 *
 * graph.c
 *	  Collecting the graph of waits.
 *
 * For the deadlock detector, the search starts from this backend and collects
 * each backend that a collected backend waits for.  For dlock_blockers, the
 * search collects all waits.  It reads each lock once, under one LWLock: the
 * entry's or, for a heavyweight lock, the partition's (I26).
 *
 * So the graph is not a snapshot.  The detector relies only on waits that it
 * saw twice, and on the places before those waits.  No process but the worker
 * (below) can begin to block a waiter.  In dlock's queues, no request passes
 * another.  In the lock manager, a request passes a waiter only if the two do
 * not conflict, or if its process already holds a lock that blocks the waiter.
 *
 * proc->waitLock changes under the partition's lock.  Searches read waitLock
 * without a lock to find the partition, and again under the partition's lock.
 * The first read may follow a stale pointer.  That is safe, because a recycled
 * LOCK stays mapped and is still a LOCK.  Fast-path locks need no search: a
 * waiter moves blocking fast-path locks to the main table.
 *
 * After a lease's ticket has ended, the ticket's place stays until dlock's
 * worker removes the row.  So waiters for the lock wait for the worker.  If a
 * process locks a table of leases, the worker sets the space's "blocked_on",
 * and polls.  The graph shows the worker at the end of that table's queue.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/proc.h"
#include "storage/spin.h"

#include "backend/graph.h"

StaticAssertDecl(DLOCK_SLOTS < MAX_LOCKMODES, "modes are bits of a LOCKMASK");

#define ALL_MODES \
	(LOCKBIT_ON(DLOCK_EXCLUSIVE) | LOCKBIT_ON(DLOCK_SHARED) | \
	 LOCKBIT_ON(DLOCK_SLOTS))

/* Read a backend's wait in dlock.  Returns false if there is none. */
bool
dlock_graph_read_wait(int procno, DlockWait *wait)
{
	DlockBackend *backend = &dlock_backends[procno];

	if (pg_atomic_read_u64(&backend->session) == 0)
		return false;
	SpinLockAcquire(&backend->mutex);
	wait->count = backend->wait_count;
	wait->number = backend->wait_ticket;
	wait->mode = backend->wait_mode;
	if (wait->number != 0)
		dlock_key_copy(&wait->key, &backend->wait_key);
	SpinLockRelease(&backend->mutex);
	return wait->number != 0;
}

/* Read a lock with dlock_queue_members().  Returns the number of members. */
int
dlock_graph_read_lock(const DlockKey *key, int max_each, DlockMember **members,
					  int32 *slots)
{
	int			max;
	int			count = 16;

	do
	{
		max = count * 2;
		*members = MemoryContextAllocHuge(CurrentMemoryContext,
										  max * sizeof(DlockMember));
		count = dlock_queue_members(key, max_each, *members, max, slots);
	} while (count > max);
	return count;
}

static void *
grow_array(void *array, int count, int *max, Size size)
{
	if (count < *max)
		return array;
	*max = 2 * *max + 16;
	return array ? repalloc_huge(array, *max * size) : palloc(*max * size);
}

static int
add_vertex(DlockGraph *graph, int procno, int pid)
{
	graph->vertices = grow_array(graph->vertices, graph->num_vertices,
								&graph->max_vertices, sizeof(DlockVertex));
	graph->vertices[graph->num_vertices] = (DlockVertex)
	{
		.procno = procno,
		.pid = pid,
		.first_wait = -1,
		.first_place = {-1, -1}
	};
	return graph->num_vertices++;
}

static int
find_vertex(DlockGraph *graph, int procno, int pid)
{
	if (graph->vertex_of[procno] < 0)
		graph->vertex_of[procno] = add_vertex(graph, procno, pid);
	return graph->vertex_of[procno];
}

/* A vertex that is not a process */
typedef struct OtherVertex
{
	int64		key;			/* hash key, must be first: a lease's number,
								 * or a prepared transaction's proc number,
								 * negated */
	int			vertex;
} OtherVertex;

static int
find_other_vertex(DlockGraph *graph, int64 key, int procno)
{
	bool		found;
	OtherVertex *entry = hash_search(graph->others, &key, HASH_ENTER, &found);

	if (!found)
		entry->vertex = add_vertex(graph, procno, 0);
	return entry->vertex;
}

static void
add_wait(DlockGraph *graph, int n, DlockGraphRef at, int procno, uint64 id)
{
	DlockVertex *vertex = &graph->vertices[n];
	DlockGraphPlace *place = dlock_graph_place(graph, at);

	graph->waits = grow_array(graph->waits, graph->num_waits,
							  &graph->max_waits, sizeof(DlockGraphWait));
	graph->waits[graph->num_waits] = (DlockGraphWait)
	{
		.vertex = n,
		.procno = procno,
		.at = at,
		.id = id,
		.next_of_vertex = vertex->first_wait,
		.next_at_place = place->first_wait
	};
	vertex->first_wait = place->first_wait = graph->num_waits++;
	vertex->since = Max(vertex->since, place->since);
}

/*
 * Collect the owners of the places before a waiter's place.  A call for a
 * later waiter of the lock continues where the latest call ended.
 */
static void
expand(DlockGraph *graph, DlockGraphRef at)
{
	DlockGraphLock *lock = &graph->locks[at.lock];

	/* dlock_graph_collect_all() collects all owners itself */
	if (graph->others)
		return;
	for (; lock->expanded < at.place; lock->expanded++)
	{
		DlockGraphPlace *place = &lock->places[lock->expanded];

		if (place->owner >= 0)
			place->vertex = find_vertex(graph, place->owner, place->pid);
	}
}

static int
add_lock(DlockGraph *graph, uint32 hash)
{
	int		   *bucket = &graph->buckets[hash & (DLOCK_GRAPH_BUCKETS - 1)];
	DlockGraphLock *lock;

	graph->locks = grow_array(graph->locks, graph->num_locks,
							 &graph->max_locks, sizeof(DlockGraphLock));
	lock = &graph->locks[graph->num_locks];
	memset(lock, 0, sizeof(DlockGraphLock));
	lock->next = *bucket;
	*bucket = graph->num_locks;
	return graph->num_locks++;
}

/* Locks of dlock */

static void
fill_place(const DlockGraph *graph, DlockGraphPlace *place,
		   const DlockMember *member)
{
	/* a lease's ticket has no owner, because the lease can run out */
	bool		has_owner = member->session != 0 &&
		pg_atomic_read_u64(&dlock_backends[member->procno].session) ==
		member->session;
	/* nothing fits in a closed lock, or passes an ended request (I15) */
	bool		blocks_all = member->closed ||
		(member->leaves && !member->granted);

	memset(place, 0, sizeof(DlockGraphPlace));
	place->procno = member->procno;
	place->owner = has_owner ? member->procno :
		member->leaves ? graph->worker : -1;
	place->pid = member->leaves ? graph->worker_pid : member->pid;
	place->vertex = place->first_wait = -1;
	place->granted = member->granted;
	place->lease = member->lease;
	place->role = member->role;
	place->counts = member->counts;
	place->closed = member->closed;
	place->since = member->granted ? 0 : (uint64) member->enqueued_at;
	place->modes = LOCKBIT_ON(blocks_all ? DLOCK_EXCLUSIVE : member->mode);
	place->conflicts = member->mode == DLOCK_SHARED ?
		ALL_MODES & ~LOCKBIT_ON(DLOCK_SHARED) : ALL_MODES;
	place->number = member->number;
	place->slots = member->slots;
	place->permits = blocks_all ? PG_INT32_MAX : member->permits;
}

/* Returns the index of a lock.  The first call for a lock reads the lock. */
static int
find_lock(DlockGraph *graph, const DlockKey *key)
{
	int			l = graph->buckets[key->hash & (DLOCK_GRAPH_BUCKETS - 1)];
	DlockGraphLock *lock;
	DlockMember *members;

	for (; l >= 0; l = graph->locks[l].next)
	{
		lock = &graph->locks[l];
		if (!lock->heavyweight && dlock_key_equal(&lock->key, key))
			return l;
	}
	l = add_lock(graph, key->hash);
	lock = &graph->locks[l];
	dlock_key_copy(&lock->key, key);
	lock->count = dlock_graph_read_lock(key, INT_MAX, &members, &lock->slots);
	lock->places = MemoryContextAllocHuge(CurrentMemoryContext,
										  (lock->count + 1) *
										  sizeof(DlockGraphPlace));
	for (int p = 0; p < lock->count; p++)
	{
		fill_place(graph, &lock->places[p], &members[p]);
		lock->holders += members[p].granted ? 1 : 0;
	}
	pfree(members);
	return l;
}

/* Returns a waiting ticket's place in a lock, or -1 if the wait is over. */
static int
find_waiting_place(const DlockGraphLock *lock, int64 number)
{
	int			low = lock->holders;
	int			high = lock->count;

	while (low < high)
	{
		int			middle = low + (high - low) / 2;

		if (lock->places[middle].number < number)
			low = middle + 1;
		else
			high = middle;
	}
	return low < lock->count && lock->places[low].number == number ? low : -1;
}

static void
collect_wait(DlockGraph *graph, int n, const DlockWait *wait)
{
	int			l = find_lock(graph, &wait->key);
	DlockGraphRef at = {l, find_waiting_place(&graph->locks[l], wait->number)};

	/* if the ticket has ended, the wait is about to end */
	if (at.place < 0 || !graph->locks[l].places[at.place].counts)
		return;
	graph->vertices[n].number = wait->number;
	add_wait(graph, n, at, graph->vertices[n].procno, wait->count);
	expand(graph, at);
}

/* Heavyweight locks */

/* Fill a place.  The owner is the lock group's leader, if it is a backend. */
static DlockGraphPlace *
fill_heavy_place(DlockGraphPlace *place, PROCLOCK *holder, LOCKMASK modes)
{
	PGPROC	   *owner = holder->groupLeader;
	int			procno = compat_procno(owner);

	memset(place, 0, sizeof(DlockGraphPlace));
	place->procno = compat_procno(holder->tag.myProc);
	place->owner = owner->pid != 0 && procno < dlock_control->num_backends ?
		procno : -1;
	place->pid = owner->pid;
	place->vertex = place->first_wait = -1;
	place->counts = true;
	place->modes = modes;
	return place;
}

/*
 * Copy a lock's holders and queue, and note each waiter's place.  The caller
 * holds the partition's lock.
 */
static void
copy_heavy_places(DlockGraph *graph, int l, LOCK *lock)
{
	DlockGraphLock *copy = &graph->locks[l];
	const LOCKMASK *conflicts = GetLocksMethodTable(lock)->conflictTab;

	for (PROCLOCK *holder = compat_next_of_lock(lock, NULL); holder;
		 holder = compat_next_of_lock(lock, holder))
	{
		if (holder->holdMask != 0)
			fill_heavy_place(&copy->places[copy->holders++], holder,
							 holder->holdMask)->granted = true;
	}
	copy->count = copy->holders;
	for (PGPROC *waiter = compat_next_waiter(lock, NULL); waiter;
		 waiter = compat_next_waiter(lock, waiter))
	{
		DlockGraphPlace *place =
			fill_heavy_place(&copy->places[copy->count], waiter->waitProcLock,
							 LOCKBIT_ON(waiter->waitLockMode));

		place->conflicts = conflicts[waiter->waitLockMode];
		place->since = pg_atomic_read_u64(&waiter->waitStart);
		graph->heavy[place->procno] = (DlockGraphRef) {l, copy->count++};
	}
}

/* Find a lock; NULL if it is not in use.  The caller locked the partition. */
static LOCK *
find_heavy_lock(const LOCKTAG *tag, int partition)
{
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		PGPROC	   *proc = GetPGProcByNumber(i);

		for (PROCLOCK *one = compat_next_of_proc(proc, partition, NULL); one;
			 one = compat_next_of_proc(proc, partition, one))
		{
			if (memcmp(&one->tag.myLock->tag, tag, sizeof(LOCKTAG)) == 0)
				return one->tag.myLock;
		}
	}
	return NULL;
}

/*
 * Read the heavyweight lock with this tag.  The copy is empty if the lock is
 * not in use, or if "waiter" is given and no longer waits for the lock.
 */
static int
read_heavy_lock(DlockGraph *graph, LOCKTAG tag, PGPROC *waiter)
{
	uint32		hash = LockTagHashCode(&tag);
	LWLock	   *partition = LockHashPartitionLock(hash);
	int			l = add_lock(graph, hash);
	DlockGraphLock *copy = &graph->locks[l];
	int			requests = 16;
	int			max;

	copy->heavyweight = true;
	copy->tag = tag;
	do
	{
		LOCK	   *lock;

		/* allocate one more place, for read_lock_of_worker() */
		max = requests * 2;
		copy->places = MemoryContextAllocHuge(CurrentMemoryContext,
											  (max + 1) *
											  sizeof(DlockGraphPlace));
		LWLockAcquire(partition, LW_SHARED);
		lock = waiter ? *(LOCK *volatile *) &waiter->waitLock :
			find_heavy_lock(&tag, LockHashPartition(hash));
		pg_read_barrier();
		if (lock && memcmp(&lock->tag, &tag, sizeof(LOCKTAG)) != 0)
			lock = NULL;
		/* each holder or waiter has made at least one request */
		requests = lock ? lock->nRequested : 0;
		if (lock && requests <= max)
			copy_heavy_places(graph, l, lock);
		LWLockRelease(partition);
	} while (requests > max);
	return l;
}

/* Collect the heavyweight waits of a backend and its parallel workers. */
static void
collect_heavy_waits(DlockGraph *graph, int n)
{
	int			owner = graph->vertices[n].procno;

	for (int i = owner; i >= 0; i = graph->next_in_group[i])
	{
		PGPROC	   *proc = GetPGProcByNumber(i);
		LOCK	   *awaited = *(LOCK *volatile *) &proc->waitLock;
		DlockGraphRef at;

		/* dlock's worker polls; read_lock_of_worker() has noted its wait */
		if (awaited == NULL && i != graph->worker)
			continue;
		if (graph->heavy[i].lock < 0 && awaited != NULL)
			(void) read_heavy_lock(graph, awaited->tag, proc);
		at = graph->heavy[i];
		if (at.lock < 0 || dlock_graph_place(graph, at)->owner != owner)
			continue;
		/* "blocked_on" stays the same during all attempts of the worker */
		add_wait(graph, n, at, i, i == graph->worker ? graph->blocked_on :
				 dlock_graph_place(graph, at)->since);
		expand(graph, at);
	}
}

/*
 * Link waiting parallel workers to their leaders.  This takes no lock, so a
 * link can be out of date, and collect_heavy_waits() checks the place's owner.
 */
static void
link_groups(DlockGraph *graph)
{
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		PGPROC	   *proc = GetPGProcByNumber(i);
		PGPROC	   *leader = *(PGPROC *volatile *) &proc->lockGroupLeader;
		int		   *first;

		if (leader == NULL || leader == proc ||
			*(LOCK *volatile *) &proc->waitLock == NULL)
			continue;
		first = &graph->next_in_group[compat_procno(leader)];
		graph->next_in_group[i] = *first;
		*first = i;
	}
}

/*
 * Read the heavyweight lock on the table that the worker cannot lock.  If the
 * worker is not in the queue, enter it at the end.  Call this before any other
 * lock is read: otherwise the graph could get this lock twice.
 */
static void
read_lock_of_worker(DlockGraph *graph)
{
	LOCKTAG		tag;
	int			l;
	int			p;
	DlockGraphLock *lock;
	DlockGraphPlace *place;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, (Oid) (graph->blocked_on >> 32));
	l = read_heavy_lock(graph, tag, NULL);
	lock = &graph->locks[l];
	p = lock->holders;

	while (p < lock->count && lock->places[p].procno != graph->worker)
		p++;
	place = &lock->places[p];
	if (p == lock->count)
	{
		memset(place, 0, sizeof(DlockGraphPlace));
		place->procno = place->owner = graph->worker;
		place->pid = graph->worker_pid;
		place->vertex = place->first_wait = -1;
		place->modes = LOCKBIT_ON(RowExclusiveLock);
		for (int mode = 1; mode < MAX_LOCKMODES; mode++)
		{
			if (DoLockModesConflict(RowExclusiveLock, mode))
				place->conflicts |= LOCKBIT_ON(mode);
		}
		lock->count++;
	}
	graph->heavy[graph->worker] = (DlockGraphRef) {l, p};
}

/* Returns a palloc'd array of -1. */
static void *
make_index(Size size)
{
	return memset(palloc(size), -1, size);
}

/* Make a graph that is empty except for a lock that blocks the worker. */
static DlockGraph *
make_graph(DlockSpace *space)
{
	DlockGraph *graph = palloc0(sizeof(DlockGraph));

	memset(graph->buckets, -1, sizeof(graph->buckets));
	graph->vertex_of = make_index(dlock_control->num_backends * sizeof(int));
	graph->heavy = make_index(dlock_control->num_backends *
							  sizeof(DlockGraphRef));
	graph->blocked_on = pg_atomic_read_u64(&space->blocked_on);
	graph->worker = graph->blocked_on == 0 ? -1 :
		dlock_office_holder(space, DLOCK_WORKER);
	if (graph->worker >= 0)
	{
		graph->worker_pid = GetPGProcByNumber(graph->worker)->pid;
		read_lock_of_worker(graph);
	}
	return graph;
}

/*
 * Returns the PID of the space's worker if it cannot lock a table, or else 0.
 * Sets *pids to the *count PIDs of the processes that block the worker.
 */
int
dlock_graph_blocked_worker(DlockSpace *space, Datum **pids, int *count)
{
	DlockGraph *graph = make_graph(space);
	DlockGraphRef at;
	const DlockGraphPlace *places;

	*count = 0;
	if (graph->worker < 0)
		return 0;
	at = graph->heavy[graph->worker];
	places = graph->locks[at.lock].places;
	*pids = palloc((at.place + 1) * sizeof(Datum));
	for (int p = 0; p < at.place; p++)
	{
		if (places[p].modes & places[at.place].conflicts)
			(*pids)[(*count)++] = Int32GetDatum(places[p].pid);
	}
	return graph->worker_pid;
}

/* The whole graph */

static void
take_place(DlockGraph *graph, int n, int l, int p)
{
	DlockGraphPlace *place = &graph->locks[l].places[p];

	place->vertex = n;
	place->next_of_vertex = graph->vertices[n].first_place;
	graph->vertices[n].first_place = (DlockGraphRef) {l, p};
}

/*
 * Enter a lock's holders.  If a holder blocks a request, it also blocks all
 * requests behind that request.  So the places in the queue need no vertex.
 *
 * If a ticket's delay is over, or no ticket holds the lock, the worker must
 * still remove a row, and counts as the holder.  But if the first request is
 * for more permits than the lock has slots, it waits for no process.
 */
static void
take_places(DlockGraph *graph, int l, DlockSpace *space)
{
	DlockGraphLock *lock = &graph->locks[l];
	int			worker = dlock_office_holder(space, DLOCK_WORKER);
	int			pid = worker < 0 ? 0 : GetPGProcByNumber(worker)->pid;
	int			first;
	bool		is_held = false;

	for (int p = 0; p < lock->holders; p++)
	{
		DlockGraphPlace *place = &lock->places[p];

		if (place->counts)
			take_place(graph, place->owner >= 0 ?
					   find_vertex(graph, place->owner, place->pid) :
					   find_other_vertex(graph, place->lease, -1), l, p);
		else if (place->closed && worker >= 0)
			take_place(graph, find_vertex(graph, worker, pid), l, p);
		else
			continue;
		is_held = true;
	}
	for (first = lock->holders; first < lock->count; first++)
	{
		if (lock->places[first].counts)
			break;
	}
	lock->first = lock->first_exclusive = first;
	while (lock->first_exclusive < lock->count &&
		   (!lock->places[lock->first_exclusive].counts ||
			lock->places[lock->first_exclusive].modes == LOCKBIT_ON(DLOCK_SHARED)))
		lock->first_exclusive++;
	if (is_held || worker < 0 || first == 0 || first == lock->count ||
		(lock->places[first].modes == LOCKBIT_ON(DLOCK_SLOTS) &&
		 lock->places[first].permits > lock->places[first].slots))
		return;
	/* the tickets before the first request are all leaving */
	lock->places[0].granted = true;
	lock->places[0].modes = LOCKBIT_ON(DLOCK_EXCLUSIVE);
	lock->holders = Max(lock->holders, 1);
	take_place(graph, find_vertex(graph, worker, pid), l, 0);
}

/* Enter all places of a heavyweight lock, including those in its queue. */
static void
take_heavy_places(DlockGraph *graph, int l)
{
	DlockGraphLock *lock = &graph->locks[l];

	for (int p = 0; p < lock->count; p++)
	{
		DlockGraphPlace *place = &lock->places[p];
		PGPROC	   *proc = GetPGProcByNumber(place->procno);
		int			n = place->owner >= 0 ?
			find_vertex(graph, place->owner, place->pid) :
			find_other_vertex(graph, -(int64) place->procno, place->procno);

		graph->vertices[n].is_ours |= proc->databaseId == MyDatabaseId;
		take_place(graph, n, l, p);
		if (!place->granted)
			add_wait(graph, n, (DlockGraphRef) {l, p}, place->procno,
					 place->since);
	}
}

/* Collect the awaited locks of the space and all awaited heavyweight locks. */
DlockGraph *
dlock_graph_collect_all(DlockSpace *space)
{
	DlockGraph *graph = make_graph(space);
	HASHCTL		info = {
		.keysize = sizeof(int64),
		.entrysize = sizeof(OtherVertex),
		.hcxt = CurrentMemoryContext
	};
	int			count;
	DlockKey   *keys = dlock_queue_waited_for(space, &count);

	graph->others = hash_create("dlock leases in the way", 64, &info,
								HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	for (int k = 0; k < count; k++)
	{
		CHECK_FOR_INTERRUPTS();
		take_places(graph, find_lock(graph, &keys[k]), space);
	}
	pfree(keys);
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		PGPROC	   *proc = GetPGProcByNumber(i);
		LOCK	   *awaited = *(LOCK *volatile *) &proc->waitLock;
		DlockWait	wait;

		CHECK_FOR_INTERRUPTS();
		if (awaited != NULL && graph->heavy[i].lock < 0)
			(void) read_heavy_lock(graph, awaited->tag, proc);
		if (dlock_backends[i].database == MyDatabaseId &&
			dlock_graph_read_wait(i, &wait))
		{
			int			n = find_vertex(graph, i, proc->pid);

			graph->vertices[n].is_ours = true;
			collect_wait(graph, n, &wait);
		}
	}
	for (int l = 0; l < graph->num_locks; l++)
	{
		if (graph->locks[l].heavyweight)
			take_heavy_places(graph, l);
	}
	return graph;
}

/* Collect all that this backend waits for, directly or not. */
DlockGraph *
dlock_graph_collect(DlockSpace *space)
{
	DlockGraph *graph = make_graph(space);
	int			places = 0;

	graph->next_in_group = make_index(dlock_control->num_backends * sizeof(int));
	link_groups(graph);
	(void) find_vertex(graph, compat_my_procno(), MyProcPid);
	for (int n = 0; n < graph->num_vertices; n++)
	{
		DlockWait	wait;

		CHECK_FOR_INTERRUPTS();
		if (dlock_graph_read_wait(graph->vertices[n].procno, &wait))
			collect_wait(graph, n, &wait);
		else
			collect_heavy_waits(graph, n);
	}
	for (int l = 0; l < graph->num_locks; l++)
		places += graph->locks[l].count;
	ereport(DEBUG1,
			(errmsg_internal("looked for a deadlock: %d processes, %d locks, %d places",
							 graph->num_vertices, graph->num_locks, places)));
	return graph;
}
