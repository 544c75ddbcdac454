/*-------------------------------------------------------------------------
 *
 * blockers.c
 *	  Who is at the root of the waiting, over dlock's queues and heavyweight
 *	  locks: the function behind dlock_blockers.
 *
 * All locks that somebody waits for are copied, of this database's space and of
 * PostgreSQL's lock manager, each once; and so is what each session waits for in
 * dlock.  An *actor* is whoever can be in the way: a session with its parallel
 * workers, a lease, a prepared transaction.  It has *places* in locks: those that
 * it holds, or stands in the queue of.  A place in a queue is waited at by a
 * session, or by several, where the ticket is a lease's; or by none, where the
 * ticket was enqueued, which then counts as one that waits.
 *
 * An actor that does not wait itself, and that somebody waits for, is a root.
 * From each, those are counted that are behind it: who waits for a place of its,
 * who waits for a place of one of these, and so on.  Within a count each place is
 * looked at once, as positions that are done with in a lock, by mode, are noted.
 * Roots that have nothing but a place in the same lock share their count, so the
 * whole takes a time that grows with the places, except where many roots have
 * several locks each that others wait for.
 *
 * In a queue of dlock, whoever is in somebody's way is in the way of all behind
 * that one, as nobody overtakes.
 *
 * Who is behind no root is in a cycle, or behind one: a deadlock that has not
 * been found yet.  Of each cycle the one is shown who was the last to wait.
 *
 * Nothing of this is of one moment: somebody may be shown as a root who has just
 * begun to wait.
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
#include "utils/hsearch.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "backend/backend.h"
#include "backend/graph.h"
#include "tables/tables.h"

/* The locks that are named of one who is shown */
#define MAX_HOLDS	16

typedef enum ActorKind
{
	SESSION,					/* by the process id of its leader */
	LEASE,						/* by its number */
	PREPARED					/* by its proc number */
} ActorKind;

typedef struct ActorKey
{
	int64		id;
	int64		kind;			/* ActorKind */
} ActorKey;

typedef struct ActorEntry
{
	ActorKey	key;			/* hash key, must be first */
	int			actor;
} ActorEntry;

typedef struct Actor
{
	ActorKey	key;
	bool		is_ours;		/* of this database */
	bool		explained;		/* a root, or behind one that is shown */
	int			first_place;	/* -1: none */
	int			first_wait;		/* -1: none */
	int			counted;		/* in the count with this number */
	int			walked;			/* on the walk with this number */
} Actor;

/* The waits of sessions at a place */
typedef struct Wait
{
	int			actor;
	int			place;
	int			next_of_actor;	/* -1: none */
	int			next_at_place;	/* -1: none */
} Wait;

typedef struct Place
{
	int			lock;
	int			actor;			/* -1: nobody's that could be in the way */
	int			next_of_actor;	/* -1: none */
	int			first_wait;		/* -1: none */
	int			counted;
	bool		granted;
	LOCKMASK	modes;			/* held, or asked for */
	LOCKMASK	conflicts;		/* asked for: beside which modes it cannot be */
	TimestampTz since;			/* when it began to wait; 0: unknown */
	const DlockRow *row;		/* of a ticket; NULL: the worker's place */
} Place;

/* How many are behind those who have no more than a place in this lock */
typedef struct Shared
{
	LOCKMASK	modes;			/* with these; 0: nobody was counted yet */
	int			count;
	bool		is_ours;
} Shared;

typedef struct Lock
{
	const DlockRow *row;		/* the first of its tickets; or NULL and ... */
	const LOCKTAG *tag;			/* ... a heavyweight lock's */
	int			first;			/* its places: holders, ... */
	int			queue;			/* ... and from here on its queue ... */
	int			end;			/* ... up to here, in order */
	int			first_exclusive;	/* in the queue, not shared; dlock's only */
	int			counted;
	int			done[MAX_LOCKMODES];	/* in this count, by mode: from here on */
	Shared		shared;
} Lock;

typedef struct Look
{
	HTAB	   *index;			/* of actors */
	Actor	   *actors;
	int			num_actors;
	int			max_actors;
	Place	   *places;
	int			num_places;
	int			max_places;
	Lock	   *locks;
	int			num_locks;
	int			max_locks;
	Wait	   *waits;
	int			num_waits;
	int			max_waits;
	int		   *stack;			/* actors that were counted, to go on with */
	int			depth;
	int			number;			/* of the latest count or walk */
} Look;

/*
 * Making the graph
 */

static void *
make_room(void *array, int count, int *max, Size size)
{
	if (count < *max)
		return array;
	*max = Max(*max * 2, 64);
	if (array)
		return repalloc_huge(array, *max * size);
	return MemoryContextAllocHuge(CurrentMemoryContext, *max * size);
}

static int
find_actor(Look *look, ActorKind kind, int64 id)
{
	ActorKey	key = {id, kind};
	ActorEntry *entry;
	bool		found;

	entry = hash_search(look->index, &key, HASH_ENTER, &found);
	if (!found)
	{
		look->actors = make_room(look->actors, look->num_actors,
								 &look->max_actors, sizeof(Actor));
		entry->actor = look->num_actors++;
		look->actors[entry->actor] = (Actor)
		{
			.key = key,
			.first_place = -1,
			.first_wait = -1
		};
	}
	return entry->actor;
}

static void
add_wait(Look *look, int a, int p)
{
	Wait	   *wait;

	look->waits = make_room(look->waits, look->num_waits, &look->max_waits,
							sizeof(Wait));
	wait = &look->waits[look->num_waits];
	wait->actor = a;
	wait->place = p;
	wait->next_of_actor = look->actors[a].first_wait;
	wait->next_at_place = look->places[p].first_wait;
	look->actors[a].first_wait = look->places[p].first_wait = look->num_waits++;
}

/* A new place in the latest lock; "a" is -1 where nobody is in the way there. */
static Place *
add_place(Look *look, int a)
{
	Place	   *place;

	look->places = make_room(look->places, look->num_places,
							 &look->max_places, sizeof(Place));
	place = &look->places[look->num_places];
	memset(place, 0, sizeof(Place));
	place->lock = look->num_locks - 1;
	place->actor = a;
	place->first_wait = place->next_of_actor = -1;
	if (a >= 0)
	{
		place->next_of_actor = look->actors[a].first_place;
		look->actors[a].first_place = look->num_places;
	}
	look->num_places++;
	look->locks[look->num_locks - 1].end = look->num_places;
	return place;
}

static Lock *
add_lock(Look *look)
{
	Lock	   *lock;

	look->locks = make_room(look->locks, look->num_locks, &look->max_locks,
							sizeof(Lock));
	lock = &look->locks[look->num_locks++];
	memset(lock, 0, sizeof(Lock));
	lock->first = lock->queue = lock->end = look->num_places;
	lock->first_exclusive = -1;
	return lock;
}

/*
 * A holder.  A delay is in everybody's way.
 */
static void
add_holder(Look *look, const DlockRow *row)
{
	int			a = row->pid != 0 ? find_actor(look, SESSION, row->pid) :
		find_actor(look, LEASE, row->lease);
	Place	   *place = add_place(look, a);

	place->granted = true;
	place->row = row;
	place->modes = LOCKBIT_ON(row->closed ? DLOCK_EXCLUSIVE : row->mode);
}

/*
 * A lock has a queue, and nobody that holds it: the last one's row has still to
 * be removed, by the worker.  Unless the first of them asks for more permits than
 * are set: then nobody is in its way.
 */
static void
add_worker(Look *look, DlockSpace *space)
{
	uint32		worker = pg_atomic_read_u32(&space->worker);
	Place	   *place;

	if (worker == 0)
		return;
	place = add_place(look, find_actor(look, SESSION,
									   GetPGProcByNumber(worker - 1)->pid));
	place->granted = true;
	place->modes = LOCKBIT_ON(DLOCK_EXCLUSIVE);
}

static void
add_waiter(Look *look, const DlockRow *row)
{
	Lock	   *lock = &look->locks[look->num_locks - 1];
	Place	   *place = add_place(look, -1);

	place->row = row;
	place->since = row->enqueued_at;
	place->modes = LOCKBIT_ON(row->mode);
	if (row->mode != DLOCK_SHARED && lock->first_exclusive < 0)
		lock->first_exclusive = look->num_places - 1;
}

/* Enter a lock of dlock; returns the first row of the next one. */
static const DlockRow *
add_dlock(Look *look, DlockSpace *space, const DlockRow *row)
{
	const DlockRow *first = row;
	Lock	   *lock = add_lock(look);

	lock->row = row;
	for (; row && dlock_row_same_lock(first, row) && row->position == 0;
		 row = row->next)
		add_holder(look, row);
	if (lock->end == lock->first && row && dlock_row_same_lock(first, row) &&
		!(row->mode == DLOCK_SLOTS && row->permits > row->slots))
		add_worker(look, space);
	lock->queue = look->num_places;
	for (; row && dlock_row_same_lock(first, row); row = row->next)
		add_waiter(look, row);
	return row;
}

/* Where a ticket waits, to be found by its number */
typedef struct TicketPlace
{
	int64		number;
	int			place;
} TicketPlace;

static int
compare_tickets(const void *a, const void *b)
{
	int64		x = ((const TicketPlace *) a)->number;
	int64		y = ((const TicketPlace *) b)->number;

	return x < y ? -1 : x > y;
}

/* Enter what sessions of this database wait for in dlock. */
static void
add_dlock_waits(Look *look)
{
	TicketPlace *tickets;
	int			count = 0;

	tickets = MemoryContextAllocHuge(CurrentMemoryContext,
									 (look->num_places + 1) * sizeof(TicketPlace));
	for (int p = 0; p < look->num_places; p++)
	{
		if (!look->places[p].granted)
			tickets[count++] = (TicketPlace)
			{
				look->places[p].row->number, p
			};
	}
	qsort(tickets, count, sizeof(TicketPlace), compare_tickets);
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockWait	wait;
		TicketPlace key = {0};
		const TicketPlace *found;
		int			a;

		if (dlock_backends[i].database != MyDatabaseId ||
			!dlock_graph_read_wait(i, &wait))
			continue;
		key.number = wait.number;
		found = bsearch(&key, tickets, count, sizeof(TicketPlace),
						compare_tickets);
		if (found == NULL)
			continue;
		a = find_actor(look, SESSION, GetPGProcByNumber(i)->pid);
		look->actors[a].is_ours = true;
		add_wait(look, a, found->place);
	}
	pfree(tickets);
}

/* Enter a heavyweight lock: its holders, and who waits for it. */
static void
add_heavyweight(Look *look, const DlockGraphLock *read)
{
	Lock	   *lock = add_lock(look);

	lock->tag = &read->tag;
	for (int p = 0; p < read->count; p++)
	{
		const DlockGraphPlace *from = &read->places[p];
		PGPROC	   *proc = GetPGProcByNumber(from->procno);
		int			a = from->owner >= 0 ?
			find_actor(look, SESSION, from->pid) :
			find_actor(look, PREPARED, from->procno);
		Place	   *place = add_place(look, a);

		if (p == read->holders)
			lock->queue = look->num_places - 1;
		look->actors[a].is_ours |= proc->databaseId == MyDatabaseId;
		place->granted = from->granted;
		place->modes = from->modes;
		place->conflicts = from->conflicts;
		place->since = (TimestampTz) from->since;
		if (!from->granted)
			add_wait(look, a, look->num_places - 1);
	}
	if (read->holders == read->count)
		lock->queue = lock->end;
}

static Look *
collect(DlockSpace *space)
{
	Look	   *look = palloc0(sizeof(Look));
	HASHCTL		info = {
		.keysize = sizeof(ActorKey),
		.entrysize = sizeof(ActorEntry),
		.hcxt = CurrentMemoryContext
	};
	DlockRowScan scan;
	const DlockRow *row;
	const DlockGraph *graph;

	look->index = hash_create("dlock blockers", 256, &info,
							  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	dlock_queue_rows_begin(&scan, space, true);
	while ((row = dlock_queue_rows_next(&scan)) != NULL)
	{
		while (row)
		{
			CHECK_FOR_INTERRUPTS();
			row = add_dlock(look, space, row);
		}
	}
	add_dlock_waits(look);
	graph = dlock_graph_collect_heavyweight(space);
	for (int l = 0; l < graph->num_locks; l++)
		add_heavyweight(look, &graph->locks[l]);
	look->stack = MemoryContextAllocHuge(CurrentMemoryContext,
										 (look->num_actors + 1) * sizeof(int));
	return look;
}

/*
 * Counting who is behind somebody
 */

/* The first of those in a queue that a place is in the way of; -1: nobody */
static int
first_behind(const Look *look, const Place *place)
{
	const Lock *lock = &look->locks[place->lock];

	if (lock->row)
		return !place->granted || lock->queue == lock->end ? -1 :
			place->modes == LOCKBIT_ON(DLOCK_SHARED) ? lock->first_exclusive :
			lock->queue;
	for (int p = Max(lock->queue, (int) (place - look->places) + 1);
		 p < lock->end; p++)
	{
		if ((look->places[p].conflicts & place->modes) &&
			look->places[p].actor != place->actor)
			return p;
	}
	return -1;
}

/* Count those who wait at a place of a queue; returns how many are new. */
static int
count_place(Look *look, int p, bool *is_ours)
{
	Place	   *place = &look->places[p];
	int			count = 0;

	if (place->counted == look->number)
		return 0;
	place->counted = look->number;
	if (place->first_wait < 0)
	{
		/* an enqueued ticket */
		*is_ours = true;
		return 1;
	}
	for (int w = place->first_wait; w >= 0; w = look->waits[w].next_at_place)
	{
		Actor	   *actor = &look->actors[look->waits[w].actor];

		if (actor->counted == look->number)
			continue;
		actor->counted = look->number;
		actor->explained = true;
		*is_ours |= actor->is_ours;
		look->stack[look->depth++] = look->waits[w].actor;
		count++;
	}
	return count;
}

/* Count who is behind a place in its lock, as far as that was not done yet. */
static int
count_behind(Look *look, int p, bool *is_ours)
{
	const Place *place = &look->places[p];
	Lock	   *lock = &look->locks[place->lock];
	int			count = 0;

	if (lock->counted != look->number)
	{
		lock->counted = look->number;
		for (int mode = 0; mode < MAX_LOCKMODES; mode++)
			lock->done[mode] = lock->end;
	}
	if (lock->row)
	{
		int			from = first_behind(look, place);

		for (int q = from; q >= 0 && q < lock->done[0]; q++)
			count += count_place(look, q, is_ours);
		if (from >= 0)
			lock->done[0] = Min(lock->done[0], from);
		return count;
	}
	for (int mode = 1; mode < MAX_LOCKMODES; mode++)
	{
		int			from = Max(lock->queue, p + 1);

		if (!(place->modes & LOCKBIT_ON(mode)))
			continue;
		for (int q = from; q < lock->done[mode]; q++)
		{
			if ((look->places[q].conflicts & LOCKBIT_ON(mode)) &&
				look->places[q].actor != place->actor)
				count += count_place(look, q, is_ours);
		}
		lock->done[mode] = Min(lock->done[mode], from);
	}
	return count;
}

/*
 * How many are behind an actor, directly or not, itself not counted?  They are
 * explained by that.  *is_ours tells whether one of them is of this database.
 */
static int
count_all_behind(Look *look, int root, bool *is_ours)
{
	const Place *place = &look->places[look->actors[root].first_place];
	Shared	   *shared = NULL;
	int			count = 0;

	*is_ours = false;
	look->actors[root].explained = true;
	if (place->next_of_actor < 0 && look->actors[root].first_wait < 0)
	{
		shared = &look->locks[place->lock].shared;
		if (shared->modes == place->modes)
		{
			*is_ours = shared->is_ours;
			return shared->count;
		}
	}
	look->number++;
	look->actors[root].counted = look->number;
	look->depth = 0;
	look->stack[look->depth++] = root;
	while (look->depth > 0)
	{
		int			a = look->stack[--look->depth];

		CHECK_FOR_INTERRUPTS();
		for (int p = look->actors[a].first_place; p >= 0;
			 p = look->places[p].next_of_actor)
			count += count_behind(look, p, is_ours);
	}
	if (shared)
		*shared = (Shared)
	{
		place->modes, count, *is_ours
	};
	return count;
}

/*
 * Cycles
 */

/* Since when does an actor wait? */
static TimestampTz
waits_since(const Look *look, int a)
{
	TimestampTz since = 0;

	for (int w = look->actors[a].first_wait; w >= 0;
		 w = look->waits[w].next_of_actor)
		since = Max(since, look->places[look->waits[w].place].since);
	return since;
}

/* One that somebody waits for; -1: nobody who could be seen */
static int
find_blocker(const Look *look, int a)
{
	for (int w = look->actors[a].first_wait; w >= 0;
		 w = look->waits[w].next_of_actor)
	{
		const Place *waiting = &look->places[look->waits[w].place];
		const Lock *lock = &look->locks[waiting->lock];

		for (int p = lock->first; p < look->waits[w].place; p++)
		{
			const Place *place = &look->places[p];
			int			behind;

			if (place->actor < 0 || place->actor == a)
				continue;
			behind = lock->row ? first_behind(look, place) : -1;
			if (lock->row ? behind >= 0 && behind <= look->waits[w].place :
				(waiting->conflicts & place->modes) != 0)
				return place->actor;
		}
	}
	return -1;
}

/*
 * Nobody who does not wait keeps this one waiting.  Find the cycle that it is in
 * or behind, and of that the one who was the last to begin to wait; -1 where
 * there is none, as somebody has gone on meanwhile.
 */
static int
find_in_cycle(Look *look, int a)
{
	int			last;

	look->number++;
	while (a >= 0 && look->actors[a].walked != look->number)
	{
		CHECK_FOR_INTERRUPTS();
		look->actors[a].walked = look->number;
		a = find_blocker(look, a);
	}
	if (a < 0)
		return -1;
	last = a;
	for (int next = find_blocker(look, a); next != a;
		 next = find_blocker(look, next))
	{
		if (waits_since(look, next) > waits_since(look, last))
			last = next;
	}
	return last;
}

/*
 * Showing
 */

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

/* What somebody has at a place */
static Datum
describe_place(const Look *look, const Place *place)
{
	const Lock *lock = &look->locks[place->lock];
	const DlockRow *row = place->row;
	StringInfoData text;

	initStringInfo(&text);
	if (lock->row == NULL)
	{
		describe_heavy(&text, lock->tag, place->modes);
		return PointerGetDatum(cstring_to_text_with_len(text.data, text.len));
	}
	if (row == NULL)
		appendStringInfoString(&text, "hand-over");
	else if (row->closed)
		appendStringInfoString(&text, "delay");
	else if (row->mode == DLOCK_SLOTS)
		appendStringInfo(&text, row->permits == 1 ? "%d permit" : "%d permits",
						 row->permits);
	else
		appendStringInfo(&text, "%s hold", dlock_mode_name(row->mode));
	appendStringInfo(&text, " of lock \"%.*s\"", lock->row->name_length,
					 lock->row->text);
	return PointerGetDatum(cstring_to_text_with_len(text.data, text.len));
}

/* Of all that somebody has, what is shown */
typedef struct Summary
{
	const DlockRow *row;		/* the ticket that most wait for; or NULL */
	int			behind;			/* how many that are */
	TimestampTz since;			/* when the first of those began to wait who wait
								 * for any of it directly */
	Datum		holds[MAX_HOLDS];
	int			num_holds;
} Summary;

static void
summarize(const Look *look, const Actor *actor, Summary *summary)
{
	TimestampTz now = GetCurrentTimestamp();

	memset(summary, 0, sizeof(Summary));
	summary->since = now;
	for (int p = actor->first_place; p >= 0; p = look->places[p].next_of_actor)
	{
		const Place *place = &look->places[p];
		int			first = first_behind(look, place);
		int			behind = look->locks[place->lock].end - first;

		if (!place->granted || first < 0)
			continue;
		if (look->places[first].since != 0)
			summary->since = Min(summary->since, look->places[first].since);
		if (place->row && behind > summary->behind)
		{
			summary->row = place->row;
			summary->behind = behind;
		}
		if (summary->num_holds < MAX_HOLDS)
			summary->holds[summary->num_holds++] = describe_place(look, place);
	}
}

/* The columns of dlock_blocker_status() */
static const Oid blocker_columns[] = {
	INT4OID, INT8OID, INT8OID, OIDOID, TEXTOID, TEXTOID, XIDOID, TEXTARRAYOID,
	TIMESTAMPTZOID, INT4OID
};

static void
show_actor(ReturnSetInfo *rsinfo, const Look *look, const Actor *actor,
		   int count)
{
	Summary		summary;
	const DlockRow *row;
	Datum		values[lengthof(blocker_columns)] = {0};
	bool		nulls[lengthof(blocker_columns)];
	int			i = 0;

	summarize(look, actor, &summary);
	row = summary.row;
	nulls[i] = actor->key.kind != SESSION;
	values[i++] = Int32GetDatum((int32) actor->key.id);
	nulls[i] = row == NULL || row->lease == 0;
	values[i++] = Int64GetDatum(row ? row->lease : 0);
	nulls[i] = row == NULL;
	values[i++] = Int64GetDatum(row ? row->number : 0);
	nulls[i] = row == NULL;
	values[i++] = ObjectIdGetDatum(row ? row->role : InvalidOid);
	nulls[i] = row == NULL || !row->has_info;
	if (row)
		values[i] = PointerGetDatum(cstring_to_text_with_len(row->text + row->name_length,
															 row->info_length));
	i++;
	nulls[i] = actor->key.kind == SESSION;
	values[i++] = CStringGetTextDatum(actor->key.kind == PREPARED ? "prepared" :
									  row && row->closed ? "delay" : "lease");
	nulls[i] = actor->key.kind != PREPARED;
	if (actor->key.kind == PREPARED)
		values[i] = TransactionIdGetDatum(GetPGProcByNumber(actor->key.id)->xid);
	i++;
	nulls[i] = false;
	values[i++] = PointerGetDatum(construct_array(summary.holds,
												  summary.num_holds, TEXTOID,
												  -1, false, TYPALIGN_INT));
	nulls[i] = false;
	values[i++] = TimestampTzGetDatum(summary.since);
	nulls[i] = false;
	values[i++] = Int32GetDatum(count);
	Assert(i == lengthof(values));
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/* Show somebody, if one of this database is behind him. */
static void
show_if_ours(ReturnSetInfo *rsinfo, Look *look, int a)
{
	bool		is_ours;
	int			count;

	if (look->actors[a].first_place < 0)
		return;
	count = count_all_behind(look, a, &is_ours);
	if (count > 0 && is_ours)
		show_actor(rsinfo, look, &look->actors[a], count);
}

/* What the view dlock_blockers is made of, without what pg_stat_activity has */
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
	for (int a = 0; a < look->num_actors; a++)
	{
		if (look->actors[a].first_wait < 0)
			show_if_ours(rsinfo, look, a);
	}
	for (int a = 0; a < look->num_actors; a++)
	{
		int			in_cycle;

		if (look->actors[a].explained || look->actors[a].first_wait < 0)
			continue;
		in_cycle = find_in_cycle(look, a);
		if (in_cycle >= 0 && !look->actors[in_cycle].explained)
			show_if_ours(rsinfo, look, in_cycle);
	}
	MemoryContextSwitchTo(old_context);
	MemoryContextDelete(context);
	return (Datum) 0;
}
