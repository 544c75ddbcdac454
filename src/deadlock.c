/*-------------------------------------------------------------------------
 *
 * deadlock.c
 *	  Who waits for whom: deadlocks over dlock's queues and PostgreSQL's
 *	  heavyweight locks together, and the reports about them.
 *
 * A waiter looks for a deadlock when it has waited for deadlock_timeout, and
 * again every two deadlock_timeouts, since a cycle can be closed later by a
 * heavyweight lock whose waiter knows nothing of dlock.  Most looks end at
 * the first question, whether anybody waits for something that this backend
 * has: who has nothing is in no cycle.  That takes no lock for longer than a
 * few instructions, so a thousand waiters may ask it.
 *
 * Otherwise the waiter collects everybody it waits for, directly or not, and
 * reduces that graph as Holt did ("Some deadlock properties of computer
 * systems", 1972): whoever waits for nothing can go on, and will in the end
 * release all; whoever is then granted what it waits for can go on, too;
 * until nothing changes.  Who is left over never goes on.  Granting follows
 * the rules of the queue, so a wait for permits or behind shared holders is a
 * deadlock only where nobody is left who could make it end.
 *
 * Among those left over, the ones that both wait for this backend and are
 * waited for by it, directly or not, form its knot.  The youngest ticket in it
 * is the victim, whoever looks: all see the same knot, because those in it
 * cannot move.  One that finds another to be the victim tells it to look.
 *
 * The graph is not collected at one moment.  So the victim collects it twice,
 * and believes only a knot in which everybody is in the same wait both times:
 * all these waits existed at the moment between the two.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/memutils.h"

#include "dlock.h"

/* What a backend waits for in dlock; the same "count" means the same wait */
typedef struct Wait
{
	uint64		count;
	int64		number;			/* of the ticket waited for */
	DlockMode	mode;
	int32		permits;
	DlockKey	key;			/* of its lock */
} Wait;

/* A lock's holders and queue */
typedef struct Lock
{
	DlockKey	key;
	DlockMember *members;		/* holders, then the queue in its order */
	int			count;
	int32		slots;
	int			expanded;		/* members whose backends are collected */
} Lock;

typedef enum VertexKind
{
	VERTEX_GOES_ON,
	VERTEX_WAITS,					/* for a ticket of dlock */
	VERTEX_WAITS_HEAVYWEIGHT
} VertexKind;

/* A backend */
typedef struct Vertex
{
	int			procno;
	int			pid;
	VertexKind	kind;
	uint64		wait_id;		/* differs between two waits */

	/* VERTEX_WAITS */
	Wait		wait;
	int			lock;			/* index in Graph.locks */
	int			place;			/* index in Lock.members */

	/* VERTEX_WAITS_HEAVYWEIGHT */
	int		   *blockers;		/* indexes in Graph.vertices */
	int			num_blockers;

	bool		goes_on;		/* will, in the end */
	bool		reached;		/* this backend waits for it */
	bool		reaches;		/* it waits for this backend */
} Vertex;

typedef struct Graph
{
	Vertex	   *vertices;			/* this backend's comes first */
	int			num_vertices;
	int			max_vertices;
	Lock	   *locks;
	int			num_locks;
	int			max_locks;
	int		   *vertex_of;		/* by proc number; -1: none */
} Graph;

/*
 * Read what a backend waits for in dlock; false where it does not wait.
 */
static bool
read_wait(int procno, Wait *wait)
{
	DlockBackend *backend = &dlock_backends[procno];

	if (pg_atomic_read_u64(&backend->session) == 0)
		return false;
	SpinLockAcquire(&backend->mutex);
	wait->count = backend->wait_count;
	wait->number = backend->wait_ticket;
	wait->mode = backend->wait_mode;
	wait->permits = backend->wait_permits;
	if (wait->number != 0)
		dlock_key_copy(&wait->key, &backend->wait_key);
	SpinLockRelease(&backend->mutex);
	return wait->number != 0;
}

static void
read_lock(const DlockKey *key, Lock *lock)
{
	int			max = 16;

	lock->key = *key;
	lock->expanded = 0;
	for (;;)
	{
		lock->members = palloc(max * sizeof(DlockMember));
		lock->count = dlock_queue_members(key, lock->members, max, &lock->slots);
		if (lock->count <= max)
			return;
		pfree(lock->members);
		max = lock->count + lock->count / 4;
	}
}

static bool
modes_conflict(DlockMode a, DlockMode b)
{
	return a != DLOCK_SHARED || b != DLOCK_SHARED;
}

static int
find_lock(Graph *graph, const DlockKey *key)
{
	for (int i = 0; i < graph->num_locks; i++)
	{
		if (dlock_key_equal(&graph->locks[i].key, key))
			return i;
	}
	if (graph->num_locks == graph->max_locks)
	{
		graph->max_locks *= 2;
		graph->locks = repalloc(graph->locks, graph->max_locks * sizeof(Lock));
	}
	read_lock(key, &graph->locks[graph->num_locks]);
	return graph->num_locks++;
}

static int
find_vertex(Graph *graph, int procno, int pid)
{
	Vertex	   *vertex;

	if (graph->vertex_of[procno] >= 0)
		return graph->vertex_of[procno];
	if (graph->num_vertices == graph->max_vertices)
	{
		graph->max_vertices *= 2;
		graph->vertices = repalloc(graph->vertices, graph->max_vertices * sizeof(Vertex));
	}
	vertex = &graph->vertices[graph->num_vertices];
	memset(vertex, 0, sizeof(Vertex));
	vertex->procno = procno;
	vertex->pid = pid;
	graph->vertex_of[procno] = graph->num_vertices;
	return graph->num_vertices++;
}

/*
 * Is the owner of this ticket the backend that is there now?  A lease's ticket
 * has none: it can always end, with its lease.
 */
static bool
has_owner(const DlockMember *member)
{
	return member->session != 0 &&
		pg_atomic_read_u64(&dlock_backends[member->procno].session) ==
		member->session;
}

/* A waiter's place in a lock; -1 where it waits no more. */
static int
find_place(const Lock *lock, int64 number)
{
	for (int place = 0; place < lock->count; place++)
	{
		if (lock->members[place].number == number)
			return lock->members[place].granted ? -1 : place;
	}
	return -1;
}

/* Collect those who are before a waiter in its lock. */
static bool
expand_wait(Graph *graph, int n)
{
	int			l = find_lock(graph, &graph->vertices[n].wait.key);
	Lock	   *lock = &graph->locks[l];
	int			place = find_place(lock, graph->vertices[n].wait.number);

	if (place < 0)
		return false;
	graph->vertices[n].lock = l;
	graph->vertices[n].place = place;
	for (; lock->expanded <= place; lock->expanded++)
	{
		DlockMember *member = &lock->members[lock->expanded];

		if (has_owner(member))
			(void) find_vertex(graph, member->procno, member->pid);
	}
	return true;
}

/*
 * Collect those who block a backend in the lock manager, or its parallel
 * workers.  A prepared transaction is nobody, as somebody else can end it.
 */
static bool
expand_heavyweight(Graph *graph, int n)
{
	PGPROC	   *proc = GetPGProcByNumber(graph->vertices[n].procno);
	ArrayType  *array;
	int32	   *pids;
	int			count;
	int		   *blockers;
	int			num_blockers = 0;

	/* a look without a lock, to spare most the question */
	if (proc->waitLock == NULL && proc->lockGroupLeader == NULL)
		return false;
	array = DatumGetArrayTypeP(DirectFunctionCall1(pg_blocking_pids,
												   Int32GetDatum(graph->vertices[n].pid)));
	pids = (int32 *) ARR_DATA_PTR(array);
	count = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	blockers = palloc(Max(count, 1) * sizeof(int));
	for (int i = 0; i < count; i++)
	{
		PGPROC	   *blocker = pids[i] == 0 ? NULL : BackendPidGetProc(pids[i]);

		if (blocker)
			blockers[num_blockers++] = find_vertex(graph, compat_procno(blocker),
												 pids[i]);
	}
	graph->vertices[n].blockers = blockers;
	graph->vertices[n].num_blockers = num_blockers;
	return num_blockers > 0;
}

/* Collect all that this backend waits for, directly or not. */
static Graph *
collect(void)
{
	Graph	   *graph = palloc0(sizeof(Graph));

	graph->max_vertices = 16;
	graph->vertices = palloc(graph->max_vertices * sizeof(Vertex));
	graph->max_locks = 4;
	graph->locks = palloc(graph->max_locks * sizeof(Lock));
	graph->vertex_of = palloc(dlock_control->num_backends * sizeof(int));
	memset(graph->vertex_of, -1, dlock_control->num_backends * sizeof(int));

	(void) find_vertex(graph, compat_my_procno(), MyProcPid);
	for (int n = 0; n < graph->num_vertices; n++)
	{
		Vertex	   *vertex = &graph->vertices[n];

		CHECK_FOR_INTERRUPTS();
		if (read_wait(vertex->procno, &vertex->wait))
		{
			vertex->wait_id = vertex->wait.count;
			if (expand_wait(graph, n))
				graph->vertices[n].kind = VERTEX_WAITS;
		}
		else
		{
			PGPROC	   *proc = GetPGProcByNumber(vertex->procno);

			vertex->wait_id = pg_atomic_read_u64(&proc->waitStart);
			if (expand_heavyweight(graph, n))
				graph->vertices[n].kind = VERTEX_WAITS_HEAVYWEIGHT;
		}
		graph->vertices[n].goes_on = graph->vertices[n].kind == VERTEX_GOES_ON;
	}
	return graph;
}

/* The vertex of a ticket's owner; NULL where nobody needs to wait for that. */
static Vertex *
vertex_of(Graph *graph, const DlockMember *member)
{
	int			n = has_owner(member) ? graph->vertex_of[member->procno] : -1;

	return n < 0 ? NULL : &graph->vertices[n];
}

static bool
stays(Graph *graph, const DlockMember *member)
{
	Vertex	   *vertex = vertex_of(graph, member);

	return vertex && !vertex->goes_on;
}

/*
 * A waiting ticket would be granted: those who wait for it go on.  That is its
 * owner; and any number of backends where a lease has it.  Returns whether
 * that found another one.
 */
static bool
let_go_on(Graph *graph, int64 number)
{
	bool		changed = false;

	for (int n = 0; n < graph->num_vertices; n++)
	{
		Vertex	   *vertex = &graph->vertices[n];

		if (!vertex->goes_on && vertex->kind == VERTEX_WAITS &&
			vertex->wait.number == number)
			vertex->goes_on = changed = true;
	}
	return changed;
}

/*
 * Play a lock's queue through, as if all who go on had released their tickets.
 * Whoever is granted what it waits for goes on.  Returns whether that found
 * another one.
 */
static bool
reduce_lock(Graph *graph, const Lock *lock)
{
	int			exclusive = 0;
	int			holders = 0;
	int64		permits = 0;
	bool		changed = false;

	for (int i = 0; i < lock->expanded; i++)
	{
		const DlockMember *member = &lock->members[i];

		if (!member->granted)
		{
			if (member->mode == DLOCK_EXCLUSIVE ? holders > 0 :
				member->mode == DLOCK_SHARED ? exclusive > 0 :
				permits + member->permits > lock->slots)
				break;			/* and nobody overtakes it */
			changed |= let_go_on(graph, member->number);
		}
		if (stays(graph, member))
		{
			holders++;
			permits += member->permits;
			if (member->mode == DLOCK_EXCLUSIVE)
				exclusive++;
		}
	}
	return changed;
}

static void
reduce(Graph *graph)
{
	bool		changed;

	do
	{
		changed = false;
		for (int n = 0; n < graph->num_vertices; n++)
		{
			Vertex	   *vertex = &graph->vertices[n];
			bool		blocked = false;

			if (vertex->goes_on || vertex->kind != VERTEX_WAITS_HEAVYWEIGHT)
				continue;
			for (int b = 0; b < vertex->num_blockers && !blocked; b++)
				blocked = !graph->vertices[vertex->blockers[b]].goes_on;
			if (!blocked)
				vertex->goes_on = changed = true;
		}
		for (int l = 0; l < graph->num_locks; l++)
			changed |= reduce_lock(graph, &graph->locks[l]);
	} while (changed);
}

/*
 * Call back for every one, among those that never go on, that keeps a vertex
 * waiting.
 */
static void
for_each_edge(Graph *graph, const Vertex *vertex,
			  void (*callback) (Vertex *from, Vertex *to, void *arg), void *arg)
{
	if (vertex->kind == VERTEX_WAITS_HEAVYWEIGHT)
	{
		for (int b = 0; b < vertex->num_blockers; b++)
		{
			Vertex	   *blocker = &graph->vertices[vertex->blockers[b]];

			if (!blocker->goes_on)
				callback((Vertex *) vertex, blocker, arg);
		}
	}
	else
	{
		const Lock *lock = &graph->locks[vertex->lock];

		for (int i = 0; i < vertex->place; i++)
		{
			const DlockMember *member = &lock->members[i];
			Vertex	   *blocker = vertex_of(graph, member);

			/* looked up once: its owner may be about to end */
			if (blocker && !blocker->goes_on &&
				modes_conflict(member->mode, lock->members[vertex->place].mode))
				callback((Vertex *) vertex, blocker, arg);
		}
	}
}

static void
mark_reached(Vertex *from, Vertex *to, void *arg)
{
	if (!to->reached)
		*(bool *) arg = to->reached = true;
}

static void
mark_reaching(Vertex *from, Vertex *to, void *arg)
{
	/* "arg" is this backend's vertex, from which the marks spread backwards */
	if (!from->reaches && (to == arg || to->reaches))
		from->reaches = true;
}

static bool
in_knot(const Vertex *vertex)
{
	return !vertex->goes_on && vertex->reached && vertex->reaches;
}

/*
 * Mark the knot that this backend is in, and return its victim: the waiter
 * with the youngest ticket.  NULL where this backend is in no knot.
 */
static Vertex *
find_victim(Graph *graph)
{
	Vertex	   *me = &graph->vertices[0];
	Vertex	   *victim = NULL;
	bool		changed = true;

	reduce(graph);
	if (me->goes_on)
		return NULL;

	for_each_edge(graph, me, mark_reached, &changed);
	while (changed)
	{
		changed = false;
		for (int n = 0; n < graph->num_vertices; n++)
		{
			if (graph->vertices[n].reached && !graph->vertices[n].goes_on)
				for_each_edge(graph, &graph->vertices[n], mark_reached, &changed);
		}
	}
	do
	{
		changed = false;
		for (int n = 0; n < graph->num_vertices; n++)
		{
			Vertex	   *vertex = &graph->vertices[n];

			if (vertex->goes_on || vertex->reaches || !vertex->reached)
				continue;
			for_each_edge(graph, vertex, mark_reaching, me);
			changed |= vertex->reaches;
		}
	} while (changed);

	if (!in_knot(me))
		return NULL;
	for (int n = 0; n < graph->num_vertices; n++)
	{
		Vertex	   *vertex = &graph->vertices[n];

		if (in_knot(vertex) && vertex->kind == VERTEX_WAITS &&
			(victim == NULL || vertex->wait.number > victim->wait.number))
			victim = vertex;
	}
	return victim;
}

/* Is everybody of one graph's knot in the other's, and in the same wait? */
static bool
knot_is_within(const Graph *a, const Graph *b)
{
	for (int n = 0; n < a->num_vertices; n++)
	{
		const Vertex *vertex = &a->vertices[n];
		const Vertex *other;

		if (!in_knot(vertex))
			continue;
		if (b->vertex_of[vertex->procno] < 0)
			return false;
		other = &b->vertices[b->vertex_of[vertex->procno]];
		if (!in_knot(other) || other->kind != vertex->kind ||
			other->wait_id != vertex->wait_id)
			return false;
	}
	return true;
}

static void
describe_request(StringInfo buffer, DlockMode mode, int32 permits,
				 const DlockKey *key)
{
	switch (mode)
	{
		case DLOCK_EXCLUSIVE:
			appendStringInfoString(buffer, "exclusive hold");
			break;
		case DLOCK_SHARED:
			appendStringInfoString(buffer, "shared hold");
			break;
		case DLOCK_SLOTS:
			appendStringInfo(buffer, permits == 1 ? "%d permit" : "%d permits",
							 permits);
			break;
	}
	appendStringInfo(buffer, " of lock \"%.*s\"", key->length, key->name);
}

/* Who keeps a vertex waiting, as a list for a message */
typedef struct BlockerText
{
	StringInfoData pids;
	int			count;
} BlockerText;

static void
append_pid(BlockerText *text, int pid)
{
	appendStringInfo(&text->pids, text->count++ == 0 ? "%d" : ", %d", pid);
}

static void
append_blocker(Vertex *from, Vertex *to, void *arg)
{
	if (in_knot(to))
		append_pid(arg, to->pid);
}

static void
describe_wait(StringInfo buffer, Graph *graph, const Vertex *vertex)
{
	BlockerText blockers = {.count = 0};

	initStringInfo(&blockers.pids);
	for_each_edge(graph, vertex, append_blocker, &blockers);
	if (buffer->len > 0)
		appendStringInfoChar(buffer, '\n');
	appendStringInfo(buffer, "Process %d waits for ", vertex->pid);
	if (vertex->kind == VERTEX_WAITS)
		describe_request(buffer, vertex->wait.mode, vertex->wait.permits,
						 &vertex->wait.key);
	else
	{
		PGPROC	   *proc = GetPGProcByNumber(vertex->procno);
		LOCK	   *lock = proc->waitLock;

		/* it cannot end its wait, so the lock stays; but it may be a worker's */
		if (lock)
		{
			LOCKTAG		tag = lock->tag;

			appendStringInfo(buffer, "%s on ",
							 GetLockmodeName(tag.locktag_lockmethodid,
											 proc->waitLockMode));
			DescribeLockTag(buffer, &tag);
		}
		else
			appendStringInfoString(buffer, "a lock, in a parallel worker");
	}
	appendStringInfo(buffer, blockers.count == 1 ?
					 "; blocked by process %s." : "; blocked by processes %s.",
					 blockers.pids.data);
}

/*
 * Raise the error in the victim: a line for every wait in the knot.
 */
static void
report(Graph *graph)
{
	StringInfoData client;
	StringInfoData server;

	initStringInfo(&client);
	initStringInfo(&server);
	for (int n = 0; n < graph->num_vertices; n++)
	{
		if (in_knot(&graph->vertices[n]))
			describe_wait(&client, graph, &graph->vertices[n]);
	}
	appendStringInfoString(&server, client.data);
	for (int n = 0; n < graph->num_vertices; n++)
	{
		if (in_knot(&graph->vertices[n]))
			appendStringInfo(&server, "\nProcess %d: %s", graph->vertices[n].pid,
							 pgstat_get_backend_current_activity(graph->vertices[n].pid,
																 false));
	}
	pgstat_report_deadlock();
	ereport(ERROR,
			(errcode(ERRCODE_T_R_DEADLOCK_DETECTED),
			 errmsg("deadlock detected"),
			 errdetail_internal("%s", client.data),
			 errdetail_log("%s", server.data),
			 errhint("See server log for query details.")));
}

/* Does anybody wait for a heavyweight lock that this backend holds? */
static bool
blocks_heavyweight(void)
{
	bool		result = false;

	for (int i = 0; i < NUM_LOCK_PARTITIONS && !result; i++)
	{
		LWLockAcquire(LockHashPartitionLockByIndex(i), LW_SHARED);
		result = compat_lock_partition_has_waiters(i);
		LWLockRelease(LockHashPartitionLockByIndex(i));
	}
	return result;
}

/*
 * Look for a deadlock, in a backend that waits; raises 40P01 where there is
 * one and this backend is its victim.
 */
void
dlock_deadlock_check(void)
{
	MemoryContext context;
	MemoryContext old_context;
	Graph	   *previous = NULL;

	dlock_queue_reap(&dlock_my_backend->wait_key);
	if (!dlock_held_blocks_others(dlock_my_backend->wait_ticket) &&
		!blocks_heavyweight())
		return;

	context = AllocSetContextCreate(CurrentMemoryContext, "dlock deadlock check",
									ALLOCSET_DEFAULT_SIZES);
	old_context = MemoryContextSwitchTo(context);
	for (;;)
	{
		Graph	   *graph = collect();
		Vertex	   *victim = find_victim(graph);

		if (victim == NULL)
			break;
		if (victim != &graph->vertices[0])
		{
			pg_atomic_write_u32(&dlock_backends[victim->procno].check_requested, 1);
			SetLatch(&GetPGProcByNumber(victim->procno)->procLatch);
			break;
		}
		if (previous && knot_is_within(previous, graph) &&
			knot_is_within(graph, previous))
		{
			/* the report outlives the context that the graph is in */
			MemoryContextSwitchTo(old_context);
			report(graph);
		}
		previous = graph;
	}
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(context);
}

/*
 * What log_lock_waits asks for, in the words of PostgreSQL's lock manager.
 * "waited" is in microseconds.
 */
void
dlock_deadlock_log(const DlockRequest *request, int64 number, int64 waited,
				   bool granted)
{
	StringInfoData what;
	BlockerText holders = {.count = 0};
	BlockerText queue = {.count = 0};
	Lock		lock;

	initStringInfo(&what);
	describe_request(&what, request->mode, request->permits, &request->key);
	if (granted)
	{
		ereport(LOG,
				(errmsg("process %d acquired %s after %lld.%03d ms",
						MyProcPid, what.data,
						(long long) (waited / 1000), (int) (waited % 1000))));
		return;
	}

	initStringInfo(&holders.pids);
	initStringInfo(&queue.pids);
	read_lock(&request->key, &lock);
	for (int i = 0; i < lock.count; i++)
		append_pid(lock.members[i].granted ? &holders : &queue,
				   lock.members[i].pid);
	ereport(LOG,
			(errmsg("process %d still waiting for %s after %lld.%03d ms",
					MyProcPid, what.data,
					(long long) (waited / 1000), (int) (waited % 1000)),
			 errdetail_log_plural("Process holding the lock: %s. Wait queue: %s.",
								  "Processes holding the lock: %s. Wait queue: %s.",
								  holders.count, holders.pids.data,
								  queue.pids.data)));
}

/*
 * Who keeps a process waiting: the holders beside which it does not fit, and
 * all before it in the queue.
 */
PG_FUNCTION_INFO_V1(dlock_blocking_pids);
Datum
dlock_blocking_pids(PG_FUNCTION_ARGS)
{
	PGPROC	   *proc;
	Wait		wait;
	Lock		lock = {0};
	Datum	   *pids;
	int			count = 0;
	int			place = 0;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", "pid"),
				 errhint("Give the process id of a session, as in pg_stat_activity.")));
	if (dlock_my_backend == NULL)
		dlock_session_attach();

	proc = BackendPidGetProc(PG_GETARG_INT32(0));
	if (proc && read_wait(compat_procno(proc), &wait))
	{
		read_lock(&wait.key, &lock);
		place = Max(find_place(&lock, wait.number), 0);
	}
	pids = palloc(Max(place, 1) * sizeof(Datum));
	for (int i = 0; i < place; i++)
	{
		if (!lock.members[i].granted ||
			modes_conflict(lock.members[i].mode, wait.mode))
			pids[count++] = Int32GetDatum(lock.members[i].pid);
	}
	PG_RETURN_ARRAYTYPE_P(construct_array(pids, count, INT4OID, sizeof(int32),
										  true, TYPALIGN_INT));
}
