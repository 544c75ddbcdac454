/*-------------------------------------------------------------------------
 *
 * blockers.c
 *	  The backends, leases and prepared transactions at the root of the
 *	  waiting, for dlock_blockers.
 *
 * graph.c collects all awaited locks, of this database's space and of
 * PostgreSQL's lock manager.  A root is a vertex that does not wait, and that
 * another one waits for.  For each root the vertices behind it are counted:
 * those that wait for one of its places, for a place of one of these, and so
 * on.  An enqueued ticket counts as a session that waits.
 *
 * A count visits each place once: each lock records, by mode, the first place
 * that was visited.  Roots that have a single place, in the same lock, share
 * their count.  So the time grows with the number of places, unless many roots
 * have several awaited locks.  In a queue of dlock, a holder is in the way of
 * all behind the first request that it blocks.
 *
 * A vertex behind no root is in a cycle or waits for one: a deadlock that is
 * not detected yet.  Of each cycle, the view shows the vertex that began to
 * wait last.  The graph is not a snapshot: a vertex may be a root although it
 * has just begun to wait.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
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

/* Locks to name for a vertex */
#define MAX_HOLDS	16

/* Notes of the counts on a lock */
struct Tally
{
	int			first_exclusive;	/* first not shared; -1: none */
	int			number;			/* of the latest count that came here */
	int			done[MAX_LOCKMODES];	/* by mode: done from here on */

	/* behind a vertex that has only a place here ... */
	LOCKMASK	shared_modes;	/* ... with these modes; 0: none yet */
	int			shared_count;
	bool		shared_is_ours;

	/* its rows by number; NULL: not copied yet */
	const DlockRow **rows;
	int			num_rows;
};

typedef struct Look
{
	DlockGraph *graph;
	int		   *stack;			/* vertices that were counted, to go on with */
	int			depth;
	int			number;			/* of the latest count or walk */
} Look;

static DlockGraphPlace *
place_at(const Look *look, DlockGraphRef ref)
{
	return &look->graph->locks[ref.lock].places[ref.place];
}

static void
begin_tally(DlockGraphLock *lock)
{
	lock->tally = palloc0(sizeof(struct Tally));
	lock->tally->first_exclusive = -1;
	for (int p = lock->holders; p < lock->count; p++)
	{
		if (!lock->heavyweight && lock->places[p].counts &&
			!(lock->places[p].modes & LOCKBIT_ON(DLOCK_SHARED)))
		{
			lock->tally->first_exclusive = p;
			break;
		}
	}
}

static Look *
collect(DlockSpace *space)
{
	Look	   *look = palloc0(sizeof(Look));

	look->graph = dlock_graph_collect_all(space);
	for (int l = 0; l < look->graph->num_locks; l++)
		begin_tally(&look->graph->locks[l]);
	look->stack = MemoryContextAllocHuge(CurrentMemoryContext,
										 (look->graph->num_vertices + 1) *
										 sizeof(int));
	return look;
}

/* Counting the vertices behind another */

/* The first request in a queue that a place is in the way of; -1: none */
static int
first_behind(const DlockGraphLock *lock, int p)
{
	const DlockGraphPlace *place = &lock->places[p];

	if (!lock->heavyweight)
		return !place->granted || lock->holders == lock->count ? -1 :
			place->modes == LOCKBIT_ON(DLOCK_SHARED) ?
			lock->tally->first_exclusive : lock->holders;
	for (int q = Max(lock->holders, p + 1); q < lock->count; q++)
	{
		if ((lock->places[q].conflicts & place->modes) &&
			lock->places[q].vertex != place->vertex)
			return q;
	}
	return -1;
}

/* Count the new vertices that wait at a place of a queue. */
static int
count_place(Look *look, DlockGraphLock *lock, int p, bool *is_ours)
{
	DlockGraphPlace *place = &lock->places[p];
	int			count = 0;

	if (place->tally == look->number || (!lock->heavyweight && !place->counts))
		return 0;
	place->tally = look->number;
	if (place->first_wait < 0)
	{
		/* an enqueued ticket */
		*is_ours = true;
		return 1;
	}
	for (int w = place->first_wait; w >= 0;
		 w = look->graph->waits[w].next_at_place)
	{
		int			n = look->graph->waits[w].vertex;
		DlockVertex *vertex = &look->graph->vertices[n];

		if (vertex->tally == look->number)
			continue;
		vertex->tally = look->number;
		vertex->explained = true;
		*is_ours |= vertex->is_ours;
		look->stack[look->depth++] = n;
		count++;
	}
	return count;
}

/* Count the requests behind a place in its lock that were not counted yet. */
static int
count_behind(Look *look, DlockGraphRef ref, bool *is_ours)
{
	DlockGraphLock *lock = &look->graph->locks[ref.lock];
	const DlockGraphPlace *place = &lock->places[ref.place];
	struct Tally *tally = lock->tally;
	int			count = 0;

	if (tally->number != look->number)
	{
		tally->number = look->number;
		for (int mode = 0; mode < MAX_LOCKMODES; mode++)
			tally->done[mode] = lock->count;
	}
	if (!lock->heavyweight)
	{
		int			from = first_behind(lock, ref.place);

		for (int q = from; q >= 0 && q < tally->done[0]; q++)
			count += count_place(look, lock, q, is_ours);
		if (from >= 0)
			tally->done[0] = Min(tally->done[0], from);
		return count;
	}
	for (int mode = 1; mode < MAX_LOCKMODES; mode++)
	{
		int			from = Max(lock->holders, ref.place + 1);

		if (!(place->modes & LOCKBIT_ON(mode)))
			continue;
		for (int q = from; q < tally->done[mode]; q++)
		{
			if ((lock->places[q].conflicts & LOCKBIT_ON(mode)) &&
				lock->places[q].vertex != place->vertex)
				count += count_place(look, lock, q, is_ours);
		}
		tally->done[mode] = Min(tally->done[mode], from);
	}
	return count;
}

/* Count the vertices behind a root; *is_ours: one is of this database. */
static int
count_all_behind(Look *look, int root, bool *is_ours)
{
	DlockVertex *vertex = &look->graph->vertices[root];
	const DlockGraphPlace *place = place_at(look, vertex->first_place);
	struct Tally *shared = NULL;
	int			count = 0;

	*is_ours = false;
	vertex->explained = true;
	if (place->next_of_vertex.lock < 0 && vertex->first_wait < 0)
	{
		shared = look->graph->locks[vertex->first_place.lock].tally;
		if (shared->shared_modes == place->modes)
		{
			*is_ours = shared->shared_is_ours;
			return shared->shared_count;
		}
	}
	look->number++;
	vertex->tally = look->number;
	look->depth = 0;
	look->stack[look->depth++] = root;
	while (look->depth > 0)
	{
		int			n = look->stack[--look->depth];

		CHECK_FOR_INTERRUPTS();
		for (DlockGraphRef ref = look->graph->vertices[n].first_place;
			 ref.lock >= 0; ref = place_at(look, ref)->next_of_vertex)
			count += count_behind(look, ref, is_ours);
	}
	if (shared)
	{
		shared->shared_modes = place->modes;
		shared->shared_count = count;
		shared->shared_is_ours = *is_ours;
	}
	return count;
}

/* Cycles */

static uint64
waits_since(const DlockGraph *graph, int n)
{
	uint64		since = 0;

	for (int w = graph->vertices[n].first_wait; w >= 0;
		 w = graph->waits[w].next_of_vertex)
	{
		const DlockGraphWait *wait = &graph->waits[w];

		since = Max(since, graph->locks[wait->lock].places[wait->place].since);
	}
	return since;
}

/* A vertex that this one waits for; -1: none that could be seen */
static int
find_blocker(const DlockGraph *graph, int n)
{
	for (int w = graph->vertices[n].first_wait; w >= 0;
		 w = graph->waits[w].next_of_vertex)
	{
		const DlockGraphWait *wait = &graph->waits[w];
		const DlockGraphLock *lock = &graph->locks[wait->lock];
		const DlockGraphPlace *waiting = &lock->places[wait->place];

		for (int p = 0; p < wait->place; p++)
		{
			const DlockGraphPlace *place = &lock->places[p];
			int			behind;

			if (place->vertex < 0 || place->vertex == n)
				continue;
			behind = lock->heavyweight ? -1 : first_behind(lock, p);
			if (lock->heavyweight ? (waiting->conflicts & place->modes) != 0 :
				behind >= 0 && behind <= wait->place)
				return place->vertex;
		}
	}
	return -1;
}

/*
 * Find the cycle that a vertex is in or behind, and return its vertex that
 * began to wait last; -1 if a vertex no longer waits.
 */
static int
find_in_cycle(Look *look, int n)
{
	DlockGraph *graph = look->graph;
	int			last;

	look->number++;
	while (n >= 0 && graph->vertices[n].walked != look->number)
	{
		CHECK_FOR_INTERRUPTS();
		graph->vertices[n].walked = look->number;
		n = find_blocker(graph, n);
	}
	if (n < 0)
		return -1;
	last = n;
	for (int next = find_blocker(graph, n); next != n;
		 next = find_blocker(graph, next))
	{
		if (waits_since(graph, next) > waits_since(graph, last))
			last = next;
	}
	return last;
}

/* Showing */

static void
describe_heavy(StringInfo text, const LOCKTAG *tag, LOCKMASK modes)
{
	int			mode = MAX_LOCKMODES - 1;
	const char *relation = NULL;

	while (mode > 1 && !(modes & LOCKBIT_ON(mode)))
		mode--;
	appendStringInfo(text, "%s on ",
					 GetLockmodeName(tag->locktag_lockmethodid, mode));
	DescribeLockTag(text, tag);
	if (tag->locktag_type <= LOCKTAG_TUPLE &&
		tag->locktag_type != LOCKTAG_DATABASE_FROZEN_IDS &&
		tag->locktag_field1 == MyDatabaseId)
		relation = get_rel_name((Oid) tag->locktag_field2);
	if (relation)
		appendStringInfo(text, " (%s)", relation);
}

/* Describe a vertex's place in a lock. */
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
							  place->modes & LOCKBIT_ON(DLOCK_SLOTS) ? DLOCK_SLOTS :
							  place->modes & LOCKBIT_ON(DLOCK_SHARED) ? DLOCK_SHARED :
							  DLOCK_EXCLUSIVE, place->permits, &lock->key);
	return PointerGetDatum(cstring_to_text_with_len(text.data, text.len));
}

/* The part of a vertex's locks that is shown */
typedef struct Summary
{
	const DlockGraphLock *lock; /* dlock's with most waiters, or NULL ... */
	const DlockGraphPlace *place;	/* ... and the ticket's place there */
	int			behind;			/* number of these waiters */
	uint64		since;			/* when the first direct waiter for any of its
								 * locks began to wait */
	Datum		holds[MAX_HOLDS];
	int			num_holds;
} Summary;

static void
summarize(const Look *look, const DlockVertex *vertex, Summary *summary)
{
	memset(summary, 0, sizeof(Summary));
	summary->since = (uint64) GetCurrentTimestamp();
	for (DlockGraphRef ref = vertex->first_place; ref.lock >= 0;
		 ref = place_at(look, ref)->next_of_vertex)
	{
		const DlockGraphLock *lock = &look->graph->locks[ref.lock];
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

/* Copy the rows of a lock, once for all of its holders. */
static const DlockRow **
copy_rows(DlockSpace *space, const DlockKey *key, int *num_rows)
{
	DlockRow   *first = dlock_queue_rows_of(space, key);
	const DlockRow **rows;
	int			count = 0;

	for (const DlockRow *row = first; row; row = row->next)
		count++;
	rows = MemoryContextAllocHuge(CurrentMemoryContext,
								  (count + 1) * sizeof(DlockRow *));
	*num_rows = 0;
	for (const DlockRow *row = first; row; row = row->next)
		rows[(*num_rows)++] = row;
	return rows;
}

static int
compare_number(const void *number, const void *row)
{
	int64		a = *(const int64 *) number;
	int64		b = (*(const DlockRow *const *) row)->number;

	return a < b ? -1 : a > b;
}

/* The info of the ticket at a place; NULL: none */
static text *
find_info(DlockSpace *space, const Summary *summary)
{
	struct Tally *tally = summary->lock->tally;
	const DlockRow **found;
	const DlockRow *row;

	if (tally->rows == NULL)
		tally->rows = copy_rows(space, &summary->lock->key, &tally->num_rows);
	found = bsearch(&summary->place->number, tally->rows, tally->num_rows,
					sizeof(DlockRow *), compare_number);
	row = found ? *found : NULL;
	if (row == NULL || !row->has_info)
		return NULL;
	return cstring_to_text_with_len(row->text + row->name_length,
									row->info_length);
}

/* The columns of dlock_blocker_status() */
static const Oid blocker_columns[] = {
	INT4OID, INT8OID, INT8OID, OIDOID, TEXTOID, TEXTOID, XIDOID, TEXTARRAYOID,
	TIMESTAMPTZOID, INT4OID
};

static void
show_vertex(ReturnSetInfo *rsinfo, const Look *look, DlockSpace *space,
			const DlockVertex *vertex, int count)
{
	Summary		summary;
	const DlockGraphPlace *place;
	text	   *info;
	Datum		values[lengthof(blocker_columns)] = {0};
	bool		nulls[lengthof(blocker_columns)] = {0};
	int			i = 0;

	summarize(look, vertex, &summary);
	place = summary.place;
	info = place ? find_info(space, &summary) : NULL;
	nulls[i] = vertex->kind != DLOCK_VERTEX_SESSION;
	values[i++] = Int32GetDatum(vertex->pid);
	nulls[i] = place == NULL || place->lease == 0;
	values[i++] = Int64GetDatum(place ? place->lease : 0);
	nulls[i] = place == NULL;
	values[i++] = Int64GetDatum(place ? place->number : 0);
	nulls[i] = place == NULL;
	values[i++] = ObjectIdGetDatum(place ? place->role : InvalidOid);
	nulls[i] = info == NULL;
	values[i++] = PointerGetDatum(info);
	nulls[i] = vertex->kind == DLOCK_VERTEX_SESSION;
	values[i++] = CStringGetTextDatum(vertex->kind == DLOCK_VERTEX_PREPARED ?
									  "prepared" :
									  place && place->closed ? "delay" : "lease");
	nulls[i] = vertex->kind != DLOCK_VERTEX_PREPARED;
	if (vertex->kind == DLOCK_VERTEX_PREPARED)
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

/* Show a vertex if one of this database is behind it. */
static void
show_if_ours(ReturnSetInfo *rsinfo, Look *look, DlockSpace *space, int n)
{
	DlockVertex *vertex = &look->graph->vertices[n];
	bool		is_ours;
	int			count;

	if (vertex->first_place.lock < 0)
		return;
	count = count_all_behind(look, n, &is_ours);
	if (count > 0 && is_ours)
		show_vertex(rsinfo, look, space, vertex, count);
}

/* dlock_blockers without the columns of pg_stat_activity */
PG_FUNCTION_INFO_V1(dlock_blocker_status);
Datum
dlock_blocker_status(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = dlock_begin_rows(fcinfo, blocker_columns,
											 lengthof(blocker_columns));
	DlockSpace *space = dlock_space_to_show();
	MemoryContext context;
	MemoryContext old_context;
	Look	   *look;

	if (space == NULL)
		return (Datum) 0;
	context = AllocSetContextCreate(CurrentMemoryContext, "dlock blockers",
									ALLOCSET_DEFAULT_SIZES);
	old_context = MemoryContextSwitchTo(context);
	look = collect(space);
	for (int n = 0; n < look->graph->num_vertices; n++)
	{
		if (look->graph->vertices[n].first_wait < 0)
			show_if_ours(rsinfo, look, space, n);
	}
	for (int n = 0; n < look->graph->num_vertices; n++)
	{
		int			in_cycle;

		if (look->graph->vertices[n].explained ||
			look->graph->vertices[n].first_wait < 0)
			continue;
		in_cycle = find_in_cycle(look, n);
		if (in_cycle >= 0 && !look->graph->vertices[in_cycle].explained)
			show_if_ours(rsinfo, look, space, in_cycle);
	}
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(context);
	return (Datum) 0;
}
