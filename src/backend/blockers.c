/*-------------------------------------------------------------------------
 *
 * blockers.c
 *	  The backends, leases and prepared transactions at the root of waits,
 *	  for the view dlock_blockers.
 *
 * graph.c collects all awaited locks, of this database's space and of
 * PostgreSQL's lock manager.  The vertices are backends, leases and prepared
 * transactions.  A root is a vertex that another vertex waits for, and that
 * does not wait itself.  For each root, the view counts the vertices behind
 * the root: those that wait for the root, directly or not.  An enqueued ticket
 * counts as a waiting session.
 *
 * A place is a holder or waiter of a lock.  The count for one root visits a
 * place at most once for each lock mode: it has visited the places from the
 * lock's done[mode] to the last.  If several roots have only one place each,
 * in the same lock and modes, they share one count.  So the time grows with
 * the number of places, unless many roots have several awaited locks.
 *
 * A waiting vertex behind no root is in a cycle, or waits for a vertex in a
 * cycle.  Such a cycle is a deadlock that is not detected yet.  Of each cycle,
 * the view shows the vertex that began to wait last.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "port/pg_bitutils.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "backend/inner.h"
#include "backend/graph.h"
#include "tables/tables.h"

/* Maximum number of locks listed for a vertex */
#define MAX_HOLDS	16

/* Returns the first waiting request that a place blocks, or -1. */
static int
first_behind(const DlockGraphLock *lock, int p)
{
	const DlockGraphPlace *place = &lock->places[p];
	int			q;

	if (!lock->heavyweight)
		q = !place->granted ? lock->count :
			place->modes == LOCKBIT_ON(DLOCK_SHARED) ?
			lock->first_exclusive : lock->first;
	else
	{
		q = Max(lock->holders, p + 1);
		while (q < lock->count &&
			   (!(lock->places[q].conflicts & place->modes) ||
				lock->places[q].vertex == place->vertex))
			q++;
	}
	return q < lock->count ? q : -1;
}

/* Count the vertices that wait at a place and are not counted yet. */
static int
count_place(DlockGraph *graph, DlockGraphPlace *place)
{
	int			count = 0;

	if (place->counted == graph->number || !place->counts)
		return 0;
	place->counted = graph->number;
	if (place->first_wait < 0)
	{
		/* an enqueued ticket waits here; it is always of this database */
		graph->found_ours = true;
		return 1;
	}
	for (int w = place->first_wait; w >= 0; w = graph->waits[w].next_at_place)
	{
		int			n = graph->waits[w].vertex;
		DlockVertex *vertex = &graph->vertices[n];

		if (vertex->visited == graph->number)
			continue;
		vertex->visited = graph->number;
		vertex->explained = true;
		graph->found_ours |= vertex->is_ours;
		graph->stack[graph->depth++] = n;
		count++;
	}
	return count;
}

/* Count the vertices that a place blocks and that are not counted yet. */
static int
count_behind(DlockGraph *graph, DlockGraphRef ref)
{
	DlockGraphLock *lock = &graph->locks[ref.lock];
	const DlockGraphPlace *place = &lock->places[ref.place];
	int			first = lock->heavyweight ?
		Max(lock->holders, ref.place + 1) : first_behind(lock, ref.place);
	int			count = 0;

	if (first < 0)
		return 0;
	if (lock->number != graph->number)
	{
		lock->number = graph->number;
		for (int mode = 0; mode < MAX_LOCKMODES; mode++)
			lock->done[mode] = lock->count;
	}
	for (int mode = 0; mode < MAX_LOCKMODES; mode++)
	{
		if (!(place->modes & LOCKBIT_ON(mode)))
			continue;
		for (int q = first; q < lock->done[mode]; q++)
		{
			if (!lock->heavyweight ||
				((lock->places[q].conflicts & LOCKBIT_ON(mode)) &&
				 lock->places[q].vertex != place->vertex))
				count += count_place(graph, &lock->places[q]);
		}
		lock->done[mode] = Min(lock->done[mode], first);
	}
	return count;
}

/* Count the vertices behind a root, and set found_ours. */
static int
count_all_behind(DlockGraph *graph, int root)
{
	DlockVertex *vertex = &graph->vertices[root];
	const DlockGraphPlace *place = dlock_graph_place(graph, vertex->first_place);
	DlockGraphLock *shared = NULL;
	int			count = 0;

	vertex->explained = true;
	if (place->next_of_vertex.lock < 0 && vertex->first_wait < 0)
	{
		shared = &graph->locks[vertex->first_place.lock];
		graph->found_ours = shared->shared_is_ours;
		if (shared->shared_modes == place->modes)
			return shared->shared_count;
	}
	graph->found_ours = false;
	vertex->visited = ++graph->number;
	graph->stack[graph->depth++] = root;
	while (graph->depth > 0)
	{
		int			n = graph->stack[--graph->depth];

		CHECK_FOR_INTERRUPTS();
		for (DlockGraphRef ref = graph->vertices[n].first_place;
			 ref.lock >= 0; ref = dlock_graph_place(graph, ref)->next_of_vertex)
			count += count_behind(graph, ref);
	}
	if (shared)
	{
		shared->shared_modes = place->modes;
		shared->shared_count = count;
		shared->shared_is_ours = graph->found_ours;
	}
	return count;
}

/* Returns a vertex that vertex n waits for, or -1 if the graph has none. */
static int
find_blocker(const DlockGraph *graph, int n)
{
	for (int w = graph->vertices[n].first_wait; w >= 0;
		 w = graph->waits[w].next_of_vertex)
	{
		DlockGraphRef at = graph->waits[w].at;
		const DlockGraphLock *lock = &graph->locks[at.lock];

		for (int p = 0; p < at.place; p++)
		{
			const DlockGraphPlace *place = &lock->places[p];
			int			first;

			if (place->vertex < 0 || place->vertex == n)
				continue;
			first = lock->heavyweight ? at.place : first_behind(lock, p);
			if (lock->heavyweight ?
				(lock->places[at.place].conflicts & place->modes) != 0 :
				first >= 0 && first <= at.place)
				return place->vertex;
		}
	}
	return -1;
}

/*
 * Find the cycle to which a vertex's waits lead.  Returns the cycle's vertex
 * that began to wait last, or -1 if the graph shows no cycle.
 */
static int
find_in_cycle(DlockGraph *graph, int n)
{
	int			last;

	graph->number++;
	while (n >= 0 && graph->vertices[n].visited != graph->number)
	{
		CHECK_FOR_INTERRUPTS();
		graph->vertices[n].visited = graph->number;
		n = find_blocker(graph, n);
	}
	last = n;
	for (int next = n < 0 ? n : find_blocker(graph, n); next != n;
		 next = find_blocker(graph, next))
	{
		if (graph->vertices[next].since > graph->vertices[last].since)
			last = next;
	}
	return last;
}

static void
describe_heavy(StringInfo text, const LOCKTAG *tag, LOCKMASK modes)
{
	const char *relation = NULL;

	appendStringInfo(text, "%s on ",
					 GetLockmodeName(tag->locktag_lockmethodid,
									 pg_leftmost_one_pos32(modes)));
	DescribeLockTag(text, tag);
	if (tag->locktag_type <= LOCKTAG_TUPLE &&
		tag->locktag_type != LOCKTAG_DATABASE_FROZEN_IDS &&
		tag->locktag_field1 == MyDatabaseId)
		relation = get_rel_name((Oid) tag->locktag_field2);
	if (relation)
		appendStringInfo(text, " (%s)", relation);
}

static Datum
describe_place(const DlockGraphLock *lock, const DlockGraphPlace *place)
{
	StringInfoData text;

	initStringInfo(&text);
	if (lock->heavyweight)
		describe_heavy(&text, &lock->tag, place->modes);
	else if (!place->counts || place->closed)
		appendStringInfo(&text, "%s of lock \"%.*s\"",
						 place->counts ? "delay" : "hand-over",
						 lock->key.length, lock->key.name);
	else
		dlock_describe_ticket(&text,
							  (DlockMode) pg_rightmost_one_pos32(place->modes),
							  place->permits, &lock->key);
	return PointerGetDatum(cstring_to_text_with_len(text.data, text.len));
}

/* What the view shows of a vertex's locks */
typedef struct Summary
{
	DlockGraphLock *lock;		/* the dlock lock with most waiters, or NULL */
	const DlockGraphPlace *place;	/* the vertex's place in that lock */
	int			behind;			/* number of waiters for that lock */
	uint64		since;			/* earliest start of the first wait behind
								 * each place of the vertex */
	Datum		holds[MAX_HOLDS];
	int			num_holds;
} Summary;

static void
summarize(const DlockGraph *graph, const DlockVertex *vertex, Summary *summary)
{
	memset(summary, 0, sizeof(Summary));
	summary->since = (uint64) GetCurrentTimestamp();
	for (DlockGraphRef ref = vertex->first_place; ref.lock >= 0;
		 ref = dlock_graph_place(graph, ref)->next_of_vertex)
	{
		DlockGraphLock *lock = &graph->locks[ref.lock];
		const DlockGraphPlace *place = &lock->places[ref.place];
		int			first = first_behind(lock, ref.place);

		if (!place->granted || first < 0)
			continue;
		if (lock->places[first].since != 0)
			summary->since = Min(summary->since, lock->places[first].since);
		if (!lock->heavyweight && place->counts &&
			lock->count - first > summary->behind)
		{
			summary->lock = lock;
			summary->place = place;
			summary->behind = lock->count - first;
		}
		if (summary->num_holds < MAX_HOLDS)
			summary->holds[summary->num_holds++] = describe_place(lock, place);
	}
}

/* Returns the info of the ticket at the summary's place, or NULL. */
static text *
find_info(DlockSpace *space, const Summary *summary)
{
	DlockGraphLock *lock = summary->lock;
	const DlockRow *row;

	if (!lock->has_infos)
	{
		/* both the rows and the holders' places are sorted by ticket number */
		row = dlock_queue_rows_of(space, &lock->key);
		for (int p = 0; p < lock->holders; p++)
		{
			while (row && row->number < lock->places[p].number)
				row = row->next;
			if (row && row->number == lock->places[p].number && row->has_info)
				lock->places[p].row = row;
		}
		lock->has_infos = true;
	}
	row = summary->place->row;
	return row ? cstring_to_text_with_len(row->text + row->name_length,
										  row->info_length) : NULL;
}

static const Oid blocker_columns[] = {
	INT4OID, INT8OID, INT8OID, OIDOID, TEXTOID, TEXTOID, XIDOID, TEXTARRAYOID,
	TIMESTAMPTZOID, INT4OID
};

static void
show_vertex(ReturnSetInfo *rsinfo, const DlockGraph *graph, DlockSpace *space,
			const DlockVertex *vertex, int count)
{
	Summary		summary;
	const DlockGraphPlace *place;
	text	   *info;
	bool		is_lease = vertex->procno < 0;
	bool		is_prepared = vertex->procno >= dlock_control->num_backends;
	Datum		values[lengthof(blocker_columns)] = {0};
	bool		nulls[lengthof(blocker_columns)] = {0};
	int			i = 0;

	summarize(graph, vertex, &summary);
	place = summary.place;
	info = place ? find_info(space, &summary) : NULL;
	nulls[i] = is_lease || is_prepared;
	values[i++] = Int32GetDatum(vertex->pid);
	nulls[i] = place == NULL || place->lease == 0;
	values[i++] = Int64GetDatum(place ? place->lease : 0);
	nulls[i] = place == NULL;
	values[i++] = Int64GetDatum(place ? place->number : 0);
	nulls[i] = place == NULL;
	values[i++] = ObjectIdGetDatum(place ? place->role : InvalidOid);
	nulls[i] = info == NULL;
	values[i++] = PointerGetDatum(info);
	nulls[i] = !is_lease && !is_prepared;
	values[i++] = CStringGetTextDatum(is_prepared ? "prepared" :
									  place && place->closed ? "delay" : "lease");
	nulls[i] = !is_prepared;
	if (is_prepared)
		values[i] = TransactionIdGetDatum(GetPGProcByNumber(vertex->procno)->xid);
	i++;
	values[i++] = PointerGetDatum(construct_array(summary.holds,
												  summary.num_holds, TEXTOID,
												  -1, false, TYPALIGN_INT));
	values[i++] = TimestampTzGetDatum((TimestampTz) summary.since);
	values[i++] = Int32GetDatum(count);
	Assert(i == lengthof(values));
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/* Show a vertex if a vertex of this database waits behind it. */
static void
show_if_ours(ReturnSetInfo *rsinfo, DlockGraph *graph, DlockSpace *space,
			 int n)
{
	DlockVertex *vertex = &graph->vertices[n];
	int			count;

	if (vertex->first_place.lock < 0)
		return;
	count = count_all_behind(graph, n);
	if (count > 0 && graph->found_ours)
		show_vertex(rsinfo, graph, space, vertex, count);
}

/* Returns dlock_blockers without the columns of pg_stat_activity. */
PG_FUNCTION_INFO_V1(dlock_blocker_status);
Datum
dlock_blocker_status(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, blocker_columns,
											 lengthof(blocker_columns));
	DlockSpace *space = dlock_space_to_show();
	MemoryContext context;
	MemoryContext old_context;
	DlockGraph *graph;

	if (space == NULL)
		return (Datum) 0;
	context = AllocSetContextCreate(CurrentMemoryContext, "dlock blockers",
									ALLOCSET_DEFAULT_SIZES);
	old_context = MemoryContextSwitchTo(context);
	graph = dlock_graph_collect_all(space);
	graph->stack = MemoryContextAllocHuge(CurrentMemoryContext,
										  (graph->num_vertices + 1) *
										  sizeof(int));
	for (int n = 0; n < graph->num_vertices; n++)
	{
		if (graph->vertices[n].first_wait < 0)
			show_if_ours(rsinfo, graph, space, n);
	}
	for (int n = 0; n < graph->num_vertices; n++)
	{
		int			in_cycle = graph->vertices[n].explained ||
			graph->vertices[n].first_wait < 0 ? -1 : find_in_cycle(graph, n);

		if (in_cycle >= 0 && !graph->vertices[in_cycle].explained)
			show_if_ours(rsinfo, graph, space, in_cycle);
	}
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(context);
	return (Datum) 0;
}
