/*-------------------------------------------------------------------------
 *
 * deadlock.c
 *	  Finding deadlocks, choosing victims, and the reports.
 *
 * A waiter looks for a deadlock after deadlock_timeout, and again at
 * intervals.  A quick check comes first: if no process waits for a lock of
 * this backend, this backend is in no cycle.
 *
 * Otherwise the waiter collects the graph of all that it waits for, directly
 * or not (graph.c), and reduces the graph as Holt did ("Some deadlock
 * properties of computer systems", 1972).  A process that waits for nothing
 * goes on and releases its locks.  Waiters get these locks by the rules of the
 * queue.  A waiter without another wait then goes on, too.  Processes that
 * never go on are *stuck*.  So a wait for permits, or behind shared holders,
 * is a deadlock only if all processes that could end the wait are stuck.
 *
 * A stuck process need not be in a deadlock.  Suppose that a lock has two
 * permits, W and A hold one each, W waits for another, and A is in a deadlock
 * with Z.  W is in a cycle, because its own permit blocks it, but only the end
 * of A or Z helps.  So a deadlock is a set of waiters that stay stuck even if
 * all other processes go on.  A minimal set is strongly connected: if a part
 * waited for none of the rest, that part alone would be a deadlock.
 *
 * find_knot() narrows the stuck processes to the *knot* of this backend.  It
 * repeats two steps until neither removes a process.  The first step keeps the
 * processes that wait for this backend and for which this backend waits,
 * directly or not.  The second keeps those that stay stuck even if all removed
 * processes go on.  Neither removes a member of a minimal set that contains
 * this backend.  So if this backend is removed, it is in no deadlock.
 * Otherwise the knot contains each minimal set that contains this backend.
 * All members of a knot find the same knot.
 *
 * PostgreSQL's detector resolves deadlocks that have no wait in dlock.  In the
 * others, the victim is the member of the knot whose end lets the most other
 * members go on.  Among equals, it is the member with the youngest ticket.  If
 * the victim is another backend, this backend notifies the victim.
 *
 * The graph is not a snapshot, so the victim collects it twice.  A knot in the
 * second graph counts only if each member was in the same wait in the first.
 * Then all members were in these waits at one moment between the collections.
 * If a process blocks a member in the second graph, it did so at that moment,
 * too, because no process can begin to block a waiter (graph.c).  So the knot
 * was stuck then, and stays stuck (I26).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "port/pg_bitutils.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/memutils.h"

#include "backend/graph.h"
#include "backend/held.h"
#include "tables/tables.h"

/* Maximum number of graphs collected in one look, if waits keep changing */
#define MAX_LOOKS		5

/* At most this many members of a knot are tried as victim, youngest first */
#define MAX_CANDIDATES	64

/* Maximum number of processes that a list in a message names */
#define MAX_NAMED		10

static bool
is_stuck(const DlockGraph *graph, const DlockGraphPlace *place)
{
	return place->vertex >= 0 && graph->vertices[place->vertex].stuck;
}

/* End the waits at a place.  Returns true if a stuck vertex now goes on. */
static bool
end_waits(DlockGraph *graph, const DlockGraphPlace *place)
{
	bool		changed = false;

	for (int w = place->first_wait; w >= 0; w = graph->waits[w].next_at_place)
	{
		DlockVertex *vertex = &graph->vertices[graph->waits[w].vertex];
		bool		blocked = false;

		graph->waits[w].blocked = false;
		for (int other = vertex->first_wait; other >= 0;
			 other = graph->waits[other].next_of_vertex)
			blocked |= graph->waits[other].blocked;
		if (!blocked && vertex->stuck)
		{
			vertex->stuck = false;
			changed = true;
		}
	}
	return changed;
}

/*
 * Does a request fit beside the stuck processes before it?  "counts" is the
 * number of these processes by mode, "permits" is the sum of their permits.  A
 * backend's own modes ("own") do not block its request for a heavyweight lock.
 * If a request wants more permits than the lock has slots, it fits, because it
 * waits for dlock_set_slots(), not for a process.
 */
static bool
fits_beside(const DlockGraphLock *lock, const DlockGraphPlace *place,
			const int *counts, LOCKMASK own, int64 permits)
{
	bool		fits = true;

	for (int mode = 0; mode < MAX_LOCKMODES; mode++)
	{
		if ((place->conflicts & LOCKBIT_ON(mode)) &&
			counts[mode] > ((own & LOCKBIT_ON(mode)) ? 1 : 0))
			fits = false;
	}
	if (lock->heavyweight || place->modes != LOCKBIT_ON(DLOCK_SLOTS))
		return fits;
	return place->permits > place->slots ||
		((fits || place->slots == lock->slots) &&
		 permits + place->permits <= place->slots);
}

/*
 * Grant a queue's requests as if only stuck processes were left.  In dlock's
 * queues, no request passes a stuck process whose own request does not fit.
 */
static bool
reduce_lock(DlockGraph *graph, const DlockGraphLock *lock)
{
	int			counts[MAX_LOCKMODES] = {0};	/* stuck processes, by mode */
	int64		permits = 0;
	bool		changed = false;

	for (int p = 0; p < lock->count; p++)
	{
		const DlockGraphPlace *place = &lock->places[p];
		DlockVertex *vertex;

		if (!place->granted)
		{
			LOCKMASK	own = 0;

			if (lock->heavyweight && place->first_wait >= 0)
				own = graph->vertices[graph->waits[place->first_wait].vertex].counted;
			if (fits_beside(lock, place, counts, own, permits))
				changed |= end_waits(graph, place);
			else if (!lock->heavyweight)
			{
				if (is_stuck(graph, place))
					break;
				continue;
			}
		}
		if (!is_stuck(graph, place))
			continue;
		vertex = &graph->vertices[place->vertex];
		/* a backend counts once in each mode of a heavyweight lock */
		for (int mode = 0; mode < MAX_LOCKMODES; mode++)
		{
			if (place->modes & ~vertex->counted & LOCKBIT_ON(mode))
				counts[mode]++;
		}
		if (lock->heavyweight)
			vertex->counted |= place->modes;
		permits += place->permits;
	}
	for (int p = 0; p < lock->count && lock->heavyweight; p++)
	{
		if (lock->places[p].vertex >= 0)
			graph->vertices[lock->places[p].vertex].counted = 0;
	}
	return changed;
}

/* Keep "stuck" only for vertices that stay stuck if all others go on. */
static void
reduce(DlockGraph *graph)
{
	bool		changed;

	for (int w = 0; w < graph->num_waits; w++)
		graph->waits[w].blocked = true;
	do
	{
		changed = false;
		for (int l = graph->num_locks - 1; l >= 0; l--)
			changed |= reduce_lock(graph, &graph->locks[l]);
	} while (changed);
}

/* Assume that PostgreSQL resolves deadlocks that have no wait in dlock. */
static void
resolve_heavy(DlockGraph *graph)
{
	for (int n = 0; n < graph->num_vertices; n++)
	{
		DlockVertex *vertex = &graph->vertices[n];

		vertex->mark = vertex->stuck;
		vertex->stuck &= vertex->number == 0;
	}
	reduce(graph);
	for (int n = 0; n < graph->num_vertices; n++)
		graph->vertices[n].stuck = graph->vertices[n].mark &&
			!graph->vertices[n].stuck;
	reduce(graph);
}

/* Spread "reached" from waiters to blockers.  Returns true if it spread. */
static bool
mark_reached(DlockGraph *graph, const DlockGraphLock *lock)
{
	LOCKMASK	wanted = 0;
	bool		changed = false;

	for (int p = lock->count - 1; p >= 0; p--)
	{
		const DlockGraphPlace *place = &lock->places[p];

		if ((place->modes & wanted) && is_stuck(graph, place) &&
			!graph->vertices[place->vertex].reached)
		{
			graph->vertices[place->vertex].reached = true;
			changed = true;
		}
		for (int w = place->first_wait; w >= 0;
			 w = graph->waits[w].next_at_place)
		{
			DlockVertex *waiter = &graph->vertices[graph->waits[w].vertex];

			if (waiter->stuck && waiter->reached)
				wanted |= place->conflicts;
		}
	}
	return changed;
}

/* Spread "reaches" from blockers to waiters.  Returns true if it spread. */
static bool
mark_reaching(DlockGraph *graph, const DlockGraphLock *lock)
{
	LOCKMASK	there = 0;
	bool		changed = false;

	for (int p = 0; p < lock->count; p++)
	{
		const DlockGraphPlace *place = &lock->places[p];

		for (int w = place->first_wait; w >= 0;
			 w = graph->waits[w].next_at_place)
		{
			DlockVertex *waiter = &graph->vertices[graph->waits[w].vertex];

			if (waiter->stuck && !waiter->reaches && (place->conflicts & there))
				waiter->reaches = changed = true;
		}
		if (is_stuck(graph, place) && graph->vertices[place->vertex].reaches)
			there |= place->modes;
	}
	return changed;
}

/*
 * Keep the stuck vertices that wait for this backend and for which this
 * backend waits, directly or not.  Returns true if it removed any vertex.
 */
static bool
keep_connected(DlockGraph *graph)
{
	bool		changed;
	bool		fell_out = false;

	for (int n = 0; n < graph->num_vertices; n++)
		graph->vertices[n].reached = graph->vertices[n].reaches = n == 0;
	do
	{
		changed = false;
		for (int l = 0, last = graph->num_locks - 1; l <= last; l++)
		{
			changed |= mark_reached(graph, &graph->locks[l]);
			changed |= mark_reaching(graph, &graph->locks[last - l]);
		}
	} while (changed);

	for (int n = 0; n < graph->num_vertices; n++)
	{
		DlockVertex *vertex = &graph->vertices[n];

		if (vertex->stuck && !(vertex->reached && vertex->reaches))
		{
			vertex->stuck = false;
			fell_out = true;
		}
	}
	return fell_out;
}

/* Mark this backend's knot.  Returns false if this backend is in no knot. */
static bool
find_knot(DlockGraph *graph)
{
	for (int n = 0; n < graph->num_vertices; n++)
		graph->vertices[n].stuck = graph->vertices[n].first_wait >= 0;
	reduce(graph);
	if (graph->vertices[0].stuck)
		resolve_heavy(graph);
	while (graph->vertices[0].stuck && keep_connected(graph))
		reduce(graph);
	for (int n = 0; n < graph->num_vertices; n++)
		graph->vertices[n].in_knot = graph->vertices[n].stuck;
	return graph->vertices[0].in_knot;
}

/* Count the members of the knot that stay stuck if "ended" goes on. */
static int
count_without(DlockGraph *graph, const DlockVertex *ended)
{
	int			count = 0;

	for (int n = 0; n < graph->num_vertices; n++)
	{
		DlockVertex *vertex = &graph->vertices[n];

		vertex->stuck = vertex->in_knot && vertex != ended;
	}
	reduce(graph);
	for (int n = 0; n < graph->num_vertices; n++)
		count += graph->vertices[n].stuck ? 1 : 0;
	return count;
}

/* Proc numbers break ties: several sessions can wait for one ticket. */
static bool
is_younger(const DlockVertex *a, const DlockVertex *b)
{
	return a->number > b->number ||
		(a->number == b->number && a->procno > b->procno);
}

/* Of the knot's waiters in dlock, find the youngest older than "before". */
static DlockVertex *
next_candidate(DlockGraph *graph, const DlockVertex *before)
{
	DlockVertex *next = NULL;

	for (int n = 0; n < graph->num_vertices; n++)
	{
		DlockVertex *vertex = &graph->vertices[n];

		if (vertex->in_knot && vertex->number != 0 &&
			(before == NULL || is_younger(before, vertex)) &&
			(next == NULL || is_younger(vertex, next)))
			next = vertex;
	}
	return next;
}

/* Returns the victim of this backend's knot, or NULL if there is no knot. */
static DlockVertex *
find_victim(DlockGraph *graph)
{
	DlockVertex *victim = NULL;
	DlockVertex *candidate = NULL;
	int			least = INT_MAX;

	if (!find_knot(graph))
		return NULL;
	for (int i = 0; i < MAX_CANDIDATES && least > 0 &&
		 (candidate = next_candidate(graph, candidate)) != NULL; i++)
	{
		int			count = count_without(graph, candidate);

		CHECK_FOR_INTERRUPTS();
		if (count < least)
		{
			least = count;
			victim = candidate;
		}
	}
	return victim;
}

/* Was the process in the same wait when the graph "before" was collected? */
static bool
was_waiting(const DlockGraph *graph, const DlockGraphWait *wait,
			const DlockGraph *before)
{
	int			n = before->vertex_of[graph->vertices[wait->vertex].procno];
	const DlockGraphLock *lock = &graph->locks[wait->at.lock];

	for (int w = n < 0 ? -1 : before->vertices[n].first_wait; w >= 0;
		 w = before->waits[w].next_of_vertex)
	{
		const DlockGraphWait *other = &before->waits[w];
		const DlockGraphLock *other_lock = &before->locks[other->at.lock];

		if (other->procno == wait->procno && other->id == wait->id &&
			wait->id != 0 && other_lock->heavyweight == lock->heavyweight &&
			memcmp(&other_lock->tag, &lock->tag, sizeof(LOCKTAG)) == 0)
			return true;
	}
	return false;
}

/* Was each member of the knot in the same wait in the graph "before"? */
static bool
knot_was_waiting(const DlockGraph *graph, const DlockGraph *before)
{
	for (int w = 0; w < graph->num_waits; w++)
	{
		if (graph->vertices[graph->waits[w].vertex].in_knot &&
			!was_waiting(graph, &graph->waits[w], before))
			return false;
	}
	return true;
}

void
dlock_describe_ticket(StringInfo buffer, DlockMode mode, int32 permits,
					  const DlockKey *key)
{
	if (mode == DLOCK_SLOTS)
		appendStringInfo(buffer, permits == 1 ? "%d permit" : "%d permits",
						 permits);
	else
		appendStringInfo(buffer, "%s hold", dlock_mode_name(mode));
	appendStringInfo(buffer, " of lock \"%.*s\"", key->length, key->name);
}

/* A list of processes for a message, cut short after MAX_NAMED names */
typedef struct NameList
{
	StringInfoData text;
	int			count;
} NameList;

/* Append the separator before a name.  Returns false if the list is full. */
static bool
begin_name(NameList *list)
{
	list->count++;
	if (list->count > 1 && list->count <= MAX_NAMED + 1)
		appendStringInfoString(&list->text, ", ");
	if (list->count == MAX_NAMED + 1)
		appendStringInfoString(&list->text, "...");
	return list->count <= MAX_NAMED;
}

static void
append_process(NameList *list, int pid)
{
	if (begin_name(list))
		appendStringInfo(&list->text, "%d", pid);
}

static void
append_member(NameList *list, DlockSpace *space, const DlockMember *member)
{
	DlockLeaseName name;

	if (member->lease == 0)
		append_process(list, member->pid);
	else if (begin_name(list))
	{
		dlock_lease_name_find(space, member->number, &name);
		if (name.lease != 0)
			dlock_lease_name_append(&list->text, &name);
		else
			appendStringInfo(&list->text, "lease " INT64_FORMAT, member->lease);
	}
}

/* Describe a wait, if a member of the knot blocks it. */
static void
describe_wait(StringInfo buffer, DlockGraph *graph, const DlockGraphWait *wait)
{
	const DlockGraphLock *lock = &graph->locks[wait->at.lock];
	const DlockGraphPlace *place = &lock->places[wait->at.place];
	const DlockVertex *vertex = &graph->vertices[wait->vertex];
	int			mode = pg_rightmost_one_pos32(place->modes);
	NameList	blockers = {.count = 0};

	initStringInfo(&blockers.text);
	for (int n = 0; n < graph->num_vertices; n++)
		graph->vertices[n].mark = false;
	/* a backend's own heavyweight locks do not block it */
	if (lock->heavyweight)
		graph->vertices[wait->vertex].mark = true;
	for (int p = 0; p < wait->at.place; p++)
	{
		DlockVertex *blocker = lock->places[p].vertex < 0 ? NULL :
			&graph->vertices[lock->places[p].vertex];

		if (blocker == NULL || !blocker->in_knot || blocker->mark ||
			!(lock->places[p].modes & place->conflicts))
			continue;
		blocker->mark = true;
		append_process(&blockers, blocker->pid);
	}
	if (blockers.count == 0)
		return;

	if (buffer->len > 0)
		appendStringInfoChar(buffer, '\n');
	appendStringInfo(buffer, "Process %d waits for ", vertex->pid);
	if (!lock->heavyweight)
		dlock_describe_ticket(buffer, (DlockMode) mode, place->permits,
							  &lock->key);
	else if (wait->procno != vertex->procno)
		appendStringInfoString(buffer, "a lock, in a parallel worker");
	else
	{
		appendStringInfo(buffer, "%s on ",
						 GetLockmodeName(lock->tag.locktag_lockmethodid, mode));
		DescribeLockTag(buffer, &lock->tag);
	}
	appendStringInfo(buffer, blockers.count == 1 ?
					 "; blocked by process %s." : "; blocked by processes %s.",
					 blockers.text.data);
}

/* Raise the victim's error, with a line for each wait in the knot. */
static void
report_deadlock(DlockGraph *graph)
{
	StringInfoData waits;
	StringInfoData queries;		/* shown only in the log */

	initStringInfo(&waits);
	initStringInfo(&queries);
	for (int n = 0; n < graph->num_vertices; n++)
	{
		if (!graph->vertices[n].in_knot)
			continue;
		for (int w = graph->vertices[n].first_wait; w >= 0;
			 w = graph->waits[w].next_of_vertex)
			describe_wait(&waits, graph, &graph->waits[w]);
		appendStringInfo(&queries, "\nProcess %d: %s", graph->vertices[n].pid,
						 pgstat_get_backend_current_activity(graph->vertices[n].pid,
															 false));
	}
	pgstat_report_deadlock();
	ereport(ERROR,
			(errcode(ERRCODE_T_R_DEADLOCK_DETECTED),
			 errmsg("deadlock detected"),
			 errdetail_internal("%s", waits.data),
			 errdetail_log("%s%s", waits.data, queries.data),
			 errhint("See server log for query details.")));
}

/*
 * Does a process wait for a heavyweight lock of this backend?  While a waiter
 * moves a lock out of the fast path, this function can miss the waiter.
 */
static bool
blocks_heavyweight(void)
{
	bool		result = false;

	for (int i = 0; i < NUM_LOCK_PARTITIONS && !result; i++)
	{
		/* without the partition's lock, this may read an outdated list */
		if (compat_next_of_proc(MyProc, i, NULL) == NULL)
			continue;
		LWLockAcquire(LockHashPartitionLockByIndex(i), LW_SHARED);
		for (PROCLOCK *mine = compat_next_of_proc(MyProc, i, NULL);
			 mine && !result; mine = compat_next_of_proc(MyProc, i, mine))
			result = mine->tag.myLock->nRequested > mine->tag.myLock->nGranted;
		LWLockRelease(LockHashPartitionLockByIndex(i));
	}
	return result;
}

/*
 * Look for a deadlock.  Raises 40P01 if this backend is the victim.  Returns
 * false if the waits changed in each attempt: the caller must try again.
 *
 * If "thorough" is false, look only if a process waits for a heavyweight lock
 * of this backend.  In a cycle with waits of both kinds, a heavyweight wait is
 * for a lock of a backend that waits in dlock.  In a cycle with waits in dlock
 * only, the backend whose wait began last looks thoroughly.
 *
 * If "told" is true, another backend has chosen this backend as the victim.
 * Look in any case: maybe only this backend's place in a queue blocks others.
 */
bool
dlock_deadlock_check(DlockSpace *space, bool thorough, bool told)
{
	MemoryContext context;
	MemoryContext old_context;
	DlockGraph *previous = NULL;
	int			looks = 0;

	if (!told && !blocks_heavyweight() &&
		!(thorough && dlock_held_blocks_others(dlock_my_backend->wait_ticket)))
		return true;

	context = AllocSetContextCreate(CurrentMemoryContext, "dlock deadlock check",
									ALLOCSET_DEFAULT_SIZES);
	old_context = MemoryContextSwitchTo(context);
	for (; looks < MAX_LOOKS; looks++)
	{
		DlockGraph *graph = dlock_graph_collect(space);
		DlockVertex *victim = find_victim(graph);

		if (victim == NULL)
			break;
		if (victim != &graph->vertices[0])
		{
			pg_atomic_write_u32(&dlock_backends[victim->procno].check_requested, 1);
			SetLatch(&GetPGProcByNumber(victim->procno)->procLatch);
			break;
		}
		if (previous && knot_was_waiting(graph, previous))
		{
			/* the report outlives the graph's context */
			MemoryContextSwitchTo(old_context);
			report_deadlock(graph);
		}
		previous = graph;
	}
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(context);
	return looks < MAX_LOOKS;
}

/*
 * Write the line of log_lock_waits, as PostgreSQL's lock manager does, but
 * name at most MAX_NAMED holders and MAX_NAMED waiters.  "waited" is in us.
 */
void
dlock_deadlock_log(DlockSpace *space, const DlockRequest *request, int64 waited,
				   bool granted)
{
	StringInfoData what;		/* the wait and its time */
	NameList	holders = {.count = 0};
	NameList	queue = {.count = 0};
	DlockMember *members;
	int32		slots;
	int			count;

	initStringInfo(&what);
	dlock_describe_ticket(&what, request->mode, request->permits,
						  &request->key);
	appendStringInfo(&what, " after %lld.%03d ms", (long long) (waited / 1000),
					 (int) (waited % 1000));
	if (granted)
	{
		ereport(LOG, (errmsg("process %d acquired %s", MyProcPid, what.data)));
		return;
	}

	initStringInfo(&holders.text);
	initStringInfo(&queue.text);
	count = dlock_graph_read_lock(&request->key, MAX_NAMED + 1, &members,
								  &slots);
	for (int i = 0; i < count; i++)
		append_member(members[i].granted ? &holders : &queue, space,
					  &members[i]);
	ereport(LOG,
			(errmsg("process %d still waiting for %s", MyProcPid, what.data),
			 errdetail_log_plural("Process holding the lock: %s. Wait queue: %s.",
								  "Processes holding the lock: %s. Wait queue: %s.",
								  holders.count, holders.text.data,
								  queue.text.data)));
}
