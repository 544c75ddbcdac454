/*-------------------------------------------------------------------------
 *
 * shmem.c
 *	  Making, finding and leaving the shared state; name spaces; counters.
 *
 * Nothing is made at server start, so that dlock needs no preloading: the
 * first call in the cluster makes the control structure, in the slack that
 * every PostgreSQL leaves in its main shared memory, and the memory area.
 * After a crash PostgreSQL makes its shared memory anew, and so this begins
 * anew as well.
 *
 * A backend attaches at its first call and stays attached until it exits.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_class.h"
#include "catalog/pg_extension.h"
#include "commands/extension.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "dlock.h"

/* What is valid only once dlock_attach() has returned */
DlockControl *dlock_control = NULL;
dsa_area   *dlock_area = NULL;
dshash_table *dlock_locks = NULL;
dshash_table *dlock_ids = NULL;
DlockBackend *dlock_backends = NULL;
DlockBackend *dlock_my_backend = NULL;

static dshash_table *spaces = NULL;

/* The current database's space, valid until pg_proc changes */
static DlockSpace *current_space = NULL;
static bool current_space_valid = false;

/* Every space this backend is counted in as a user; a list of DlockSpace */
static List *attached_spaces = NIL;

/*
 * Memory that this backend has taken and not yet reported, or given back.
 * Where each lock and each release would report, all backends would fight for
 * that one cache line.  All of them together can be off by a few megabytes.
 */
static int64 unreported_memory = 0;

#define REPORT_MEMORY_EVERY 4096

static int
key_compare(const void *a, const void *b, size_t size, void *arg)
{
	return dlock_key_equal(a, b) ? 0 : 1;
}

static dshash_hash
key_hash(const void *key, size_t size, void *arg)
{
	return ((const DlockKey *) key)->hash;
}

#ifdef COMPAT_DSHASH_HAS_COPY
static void
key_copy(void *to, const void *from, size_t size, void *arg)
{
	dlock_key_copy(to, from);
}
#endif

static void
table_parameters(dshash_parameters *spaces_table,
				 dshash_parameters *locks_table,
				 dshash_parameters *ids_table)
{
	*spaces_table = (dshash_parameters)
	{
		.key_size = sizeof(DlockSpaceKey),
		.entry_size = sizeof(DlockSpaceEntry),
		.compare_function = dshash_memcmp,
		.hash_function = dshash_memhash,
		COMPAT_DSHASH_COPY(dshash_memcpy)
		.tranche_id = dlock_control->table_tranche
	};
	*locks_table = (dshash_parameters)
	{
		.key_size = sizeof(DlockKey),
		.entry_size = sizeof(DlockLock),
		.compare_function = key_compare,
		.hash_function = key_hash,
		COMPAT_DSHASH_COPY(key_copy)
		.tranche_id = dlock_control->table_tranche
	};
	*ids_table = (dshash_parameters)
	{
		.key_size = sizeof(DlockIdKey),
		.entry_size = sizeof(DlockIdEntry),
		.compare_function = dshash_memcmp,
		.hash_function = dshash_memhash,
		COMPAT_DSHASH_COPY(dshash_memcpy)
		.tranche_id = dlock_control->table_tranche
	};
}

/*
 * Find the control structure, or make it.
 *
 * The tranches are made before "initialized" is set and not by the one who
 * found nothing, because making them can fail on PostgreSQL 19: then the next
 * caller goes on with what is there.
 */
static void
find_control(void)
{
	DlockControl *control;
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	control = ShmemInitStruct(DLOCK_CONTROL_NAME, sizeof(DlockControl), &found);
	if (!found)
		memset(control, 0, sizeof(DlockControl));
	if (!control->initialized)
	{
		control->memory_tranche = compat_lwlock_new_tranche("DlockMemory");
		control->table_tranche = compat_lwlock_new_tranche("DlockTable");
		LWLockInitialize(&control->lock, control->memory_tranche);
		control->area = DSM_HANDLE_INVALID;
		pg_atomic_init_u64(&control->last_session, 0);
		pg_atomic_init_u64(&control->memory_used, 0);
		control->initialized = true;
	}
	LWLockRelease(AddinShmemInitLock);

	compat_lwlock_register_tranche(control->memory_tranche, "DlockMemory");
	compat_lwlock_register_tranche(control->table_tranche, "DlockTable");
	dlock_control = control;
}

/*
 * Make the memory area and what is in it.  An error on the way leaves
 * nothing behind: the area is pinned last, and goes with the transaction's
 * resource owner until then.
 */
static void
create_area(dsa_area **area, dshash_table **spaces_table,
			dshash_table **locks_table, dshash_table **ids_table)
{
	dshash_parameters spaces_parameters;
	dshash_parameters locks_parameters;
	dshash_parameters ids_parameters;
	DlockBackend *backends;
	int			num_backends = ProcGlobal->allProcCount;
	dsa_pointer backends_pointer;

	table_parameters(&spaces_parameters, &locks_parameters, &ids_parameters);
	*area = dsa_create(dlock_control->memory_tranche);
	*spaces_table = dshash_create(*area, &spaces_parameters, NULL);
	*locks_table = dshash_create(*area, &locks_parameters, NULL);
	*ids_table = dshash_create(*area, &ids_parameters, NULL);
	backends_pointer = dsa_allocate0(*area,
									 num_backends * sizeof(DlockBackend));
	backends = dsa_get_address(*area, backends_pointer);
	for (int i = 0; i < num_backends; i++)
	{
		pg_atomic_init_u64(&backends[i].session, 0);
		SpinLockInit(&backends[i].mutex);
		pg_atomic_init_u32(&backends[i].check_requested, 0);
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
			pg_atomic_init_u64(&backends[i].counters[c], 0);
	}

	dlock_control->spaces = dshash_get_hash_table_handle(*spaces_table);
	dlock_control->locks = dshash_get_hash_table_handle(*locks_table);
	dlock_control->ids = dshash_get_hash_table_handle(*ids_table);
	dlock_control->backends = backends_pointer;
	dlock_control->num_backends = num_backends;
	dsa_pin(*area);
	dlock_control->area = dsa_get_handle(*area);
}

static void
attach_area(dsa_area **area, dshash_table **spaces_table,
			dshash_table **locks_table, dshash_table **ids_table)
{
	dshash_parameters spaces_parameters;
	dshash_parameters locks_parameters;
	dshash_parameters ids_parameters;

	table_parameters(&spaces_parameters, &locks_parameters, &ids_parameters);
	*area = dsa_attach(dlock_control->area);
	*spaces_table = dshash_attach(*area, &spaces_parameters,
								  dlock_control->spaces, NULL);
	*locks_table = dshash_attach(*area, &locks_parameters,
								 dlock_control->locks, NULL);
	*ids_table = dshash_attach(*area, &ids_parameters,
							   dlock_control->ids, NULL);
}

static void
forget_current_space(Datum arg, int cacheid, uint32 hashvalue)
{
	current_space_valid = false;
}

/*
 * Attach this backend to the shared state, making it where there is none.
 * Raises whatever a lack of memory brings; the next call then starts over.
 *
 * The caller registers its exit callback before the backend is entered into
 * its slot, so that nothing is ever held without it.
 */
void
dlock_attach(void)
{
	MemoryContext old_context;
	dsa_area   *area;
	dshash_table *spaces_table;
	dshash_table *locks_table;
	dshash_table *ids_table;
	DlockBackend *backends;
	static bool registered = false;

	Assert(dlock_my_backend == NULL);

	if (dlock_control == NULL)
		find_control();

	old_context = MemoryContextSwitchTo(TopMemoryContext);
	LWLockAcquire(&dlock_control->lock, LW_EXCLUSIVE);
	if (dlock_control->area == DSM_HANDLE_INVALID)
		create_area(&area, &spaces_table, &locks_table, &ids_table);
	else
		attach_area(&area, &spaces_table, &locks_table, &ids_table);
	LWLockRelease(&dlock_control->lock);
	/* before the area is pinned, as it cannot be attached twice */
	backends = dsa_get_address(area, dlock_control->backends);
	dsa_pin_mapping(area);
	MemoryContextSwitchTo(old_context);

	if (!registered)
		CacheRegisterSyscacheCallback(PROCOID, forget_current_space, 0);
	registered = true;

	dlock_area = area;
	spaces = spaces_table;
	dlock_locks = locks_table;
	dlock_ids = ids_table;
	dlock_backends = backends;
	dlock_my_backend = &dlock_backends[compat_my_procno()];
	dlock_my_backend->database = MyDatabaseId;
	dlock_my_backend->wait_ticket = 0;
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_write_u64(&dlock_my_backend->counters[c], 0);
	pg_atomic_write_u64(&dlock_my_backend->session,
						pg_atomic_add_fetch_u64(&dlock_control->last_session, 1));
}

/* Move what this backend has counted into a space's totals. */
static void
flush_counters(DlockSpace *space)
{
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
	{
		pg_atomic_uint64 *mine = &dlock_my_backend->counters[c];

		pg_atomic_fetch_add_u64(&space->counters[c], pg_atomic_read_u64(mine));
		pg_atomic_write_u64(mine, 0);
	}
}

static void
report_memory(void)
{
	pg_atomic_fetch_add_u64(&dlock_control->memory_used, unreported_memory);
	unreported_memory = 0;
}

/*
 * The last thing an exiting backend does here: free its slot.  Tickets that
 * it could not give back for whatever reason are the waiters' to clear away
 * from now on; see dlock_queue_reap().
 *
 * Raises nothing and allocates nothing.
 */
void
dlock_detach(void)
{
	ListCell   *cell;

	if (dlock_my_backend == NULL)
		return;
	if (current_space)
		flush_counters(current_space);
	report_memory();
	foreach(cell, attached_spaces)
	{
		DlockSpace *space = lfirst(cell);
		DlockSpaceEntry *entry;

		if (space == NULL)
			continue;
		entry = dshash_find(spaces, &space->key, true);
		if (entry)
		{
			entry->users--;
			dshash_release_lock(spaces, entry);
		}
	}
	pg_atomic_write_u64(&dlock_my_backend->session, 0);
	dlock_my_backend = NULL;
}

/*
 * Remove the spaces that nobody can use again: of databases that are gone,
 * and of earlier installations in this database.  Should this be wrong, as
 * after the rollback of a DROP EXTENSION, it costs a block of ticket numbers.
 */
static void
remove_unused_spaces(const DlockSpaceKey *keep)
{
	dshash_seq_status status;
	DlockSpaceEntry *entry;
	DlockSpaceKey *unused;
	int			count = 0;
	const int	max = 64;

	unused = palloc(max * sizeof(DlockSpaceKey));
	dshash_seq_init(&status, spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL && count < max)
	{
		if (entry->users == 0)
			unused[count++] = entry->key;
	}
	dshash_seq_term(&status);

	for (int i = 0; i < count; i++)
	{
		if (unused[i].database == keep->database ?
			unused[i].extension == keep->extension :
			SearchSysCacheExists1(DATABASEOID,
								  ObjectIdGetDatum(unused[i].database)))
			continue;
		entry = dshash_find(spaces, &unused[i], true);
		if (entry && entry->users == 0)
		{
			/* nobody comes to use it while this entry is locked */
			dlock_queue_purge(&unused[i]);
			dlock_lease_purge(dlock_space_at(entry->space));
			dsa_free(dlock_area, entry->space);
			dshash_delete_entry(spaces, entry);
		}
		else if (entry)
			dshash_release_lock(spaces, entry);
	}
	pfree(unused);
}

/*
 * The first ticket number that no space of this database has reserved.  There
 * can be several: an installation that was dropped, or rolled back, is still
 * known here and its sequence is not.
 */
uint64
dlock_first_unreserved(Oid database)
{
	dshash_seq_status status;
	DlockSpaceEntry *entry;
	uint64		result = 0;

	dshash_seq_init(&status, spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL)
	{
		DlockSpace *space = dlock_space_at(entry->space);

		if (entry->key.database == database)
			result = Max(result, pg_atomic_read_u64(&space->ticket_limit));
	}
	dshash_seq_term(&status);
	return result;
}

static DlockSpace *
make_space(const DlockSpaceKey *key)
{
	uint64		number = dlock_first_unreserved(key->database);
	dsa_pointer self = dsa_allocate0(dlock_area, sizeof(DlockSpace));
	DlockSpace *space = dsa_get_address(dlock_area, self);

	space->key = *key;
	space->self = self;
	SpinLockInit(&space->mutex);
	pg_atomic_init_u64(&space->next_ticket, number);
	pg_atomic_init_u64(&space->ticket_limit, number);
	LWLockInitialize(&space->lease_lock, dlock_control->memory_tranche);
	LWLockInitialize(&space->outbox_lock, dlock_control->memory_tranche);
	for (int b = 0; b < DLOCK_REMOVED_BUCKETS; b++)
		pg_atomic_init_u64(&space->removed[b], InvalidXLogRecPtr);
	pg_atomic_init_u32(&space->loaded, 0);
	pg_atomic_init_u32(&space->failures, 0);
	pg_atomic_init_u32(&space->failure, 0);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		pg_atomic_init_u64(&space->quorum[q], 0);
	pg_atomic_init_u32(&space->announced, 0);
	pg_atomic_init_u32(&space->worker, 0);
	pg_atomic_init_u64(&space->worker_start, 0);
	pg_atomic_init_u32(&space->worker_deaths, 0);
	pg_atomic_init_u64(&space->next_due, 0);
	pg_atomic_init_u32(&space->sender, 0);
	pg_atomic_init_u64(&space->sender_start, 0);
	pg_atomic_init_u32(&space->vacuum, 0);
	pg_atomic_init_u64(&space->vacuum_start, 0);
	pg_atomic_init_u32(&space->dead_rows, 0);
	pg_atomic_init_u32(&space->vacuum_at, DLOCK_VACUUM_ROWS);
	pg_atomic_init_u32(&space->cleared, 0);
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_init_u64(&space->counters[c], 0);
	return space;
}

/*
 * Count this backend among a space's users; NULL where the space is not there
 * yet.  The caller has a place to note it.
 */
static DlockSpace *
use_space(const DlockSpaceKey *key)
{
	DlockSpaceEntry *entry = dshash_find(spaces, key, true);
	DlockSpace *space;

	if (entry == NULL)
		return NULL;
	space = dlock_space_at(entry->space);
	entry->users++;
	llast(attached_spaces) = space;
	dshash_release_lock(spaces, entry);
	return space;
}

static DlockSpace *
attach_space(const DlockSpaceKey *key)
{
	MemoryContext old_context;
	ListCell   *cell;
	DlockSpace *space;
	DlockSpaceEntry *entry;
	bool		found;

	foreach(cell, attached_spaces)
	{
		space = lfirst(cell);
		if (space && memcmp(&space->key, key, sizeof(DlockSpaceKey)) == 0)
			return space;
	}

	/* a place to note it first; where this fails, it is used next time */
	if (attached_spaces == NIL || llast(attached_spaces) != NULL)
	{
		old_context = MemoryContextSwitchTo(TopMemoryContext);
		attached_spaces = lappend(attached_spaces, NULL);
		MemoryContextSwitchTo(old_context);
	}
	space = use_space(key);
	if (space)
		return space;

	space = make_space(key);
	entry = dshash_find_or_insert(spaces, key, &found);
	if (found)
	{
		/* somebody else was faster */
		dsa_free(dlock_area, space->self);
		space = dlock_space_at(entry->space);
	}
	else
	{
		entry->users = 0;
		entry->space = space->self;
	}
	entry->users++;
	llast(attached_spaces) = space;
	dshash_release_lock(spaces, entry);

	remove_unused_spaces(key);
	return space;
}

/*
 * A space that is there already, for the worker that was started for it; NULL
 * where nobody uses it any more.
 */
DlockSpace *
dlock_find_space(const DlockSpaceKey *key)
{
	MemoryContext old_context = MemoryContextSwitchTo(TopMemoryContext);

	attached_spaces = lappend(attached_spaces, NULL);
	MemoryContextSwitchTo(old_context);
	return use_space(key);
}

/*
 * The space of the extension that is installed in this database now.
 *
 * The catalog is asked once, and again only after pg_proc has changed, as it
 * does when an extension with functions comes or goes.
 */
DlockSpace *
dlock_current_space(void)
{
	DlockSpaceKey key;
	DlockSpace *space;

	if (likely(current_space_valid))
		return current_space;

	/* set before the catalog is read: a change during that is not missed */
	current_space_valid = true;
	PG_TRY();
	{
		key.database = MyDatabaseId;
		key.extension = get_extension_oid("dlock", false);
		space = attach_space(&key);
	}
	PG_CATCH();
	{
		current_space_valid = false;
		PG_RE_THROW();
	}
	PG_END_TRY();

	if (current_space && current_space != space)
		flush_counters(current_space);
	current_space = space;
	return space;
}

/*
 * A relation of the extension: in the extension's schema, wherever that is.
 */
Oid
dlock_relation(DlockSpace *space, const char *name)
{
	Relation	catalog = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			schema = InvalidOid;
	Oid			relation;

	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(space->key.extension));
	scan = systable_beginscan(catalog, ExtensionOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);

	relation = get_relname_relid(name, schema);
	if (!OidIsValid(relation))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation \"%s\" of extension \"%s\" does not exist",
						name, "dlock")));
	return relation;
}

Oid
dlock_relation_owner(Oid relation)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relation));
	Oid			owner;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for relation %u", relation);
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);
	return owner;
}

/* Fill in the key of a lock, from a valid name. */
void
dlock_key_fill(DlockKey *key, const DlockSpace *space, const char *name,
			   int length)
{
	key->space = space->key;
	key->length = length;
	memcpy(key->name, name, length);
	key->hash = hash_bytes_extended((const unsigned char *) name, length,
									(uint64) key->space.database << 32 |
									key->space.extension);
}

/*
 * Is there memory for one more lock?  Raises 53200 where there is not.
 *
 * An eighth is kept for superusers, so that one who is to clear up can still
 * lock.  The area's own limit stands behind this one; it is reached first
 * only where the area has become very fragmented.
 */
void
dlock_check_memory(void)
{
	int64		limit = (int64) dlock_max_memory * 1024;
	int64		used = (int64) pg_atomic_read_u64(&dlock_control->memory_used);

	if (likely(used < limit - limit / 8))
		return;
	if (used >= limit || !superuser())
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory for locks"),
				 errdetail("The locks and tickets of all sessions have reached dlock.max_memory."),
				 errhint("Release locks that are not needed, or increase dlock.max_memory.")));
}

/*
 * Memory of tickets, which is counted.
 */
dsa_pointer
dlock_allocate(Size size)
{
	dsa_pointer pointer = dsa_allocate(dlock_area, size);

	dlock_count_memory(size);
	return pointer;
}

void
dlock_release_memory(dsa_pointer pointer, Size size)
{
	dsa_free(dlock_area, pointer);
	dlock_count_memory(-(int64) size);
}

/* A text in shared memory, or none for NULL.  Raises 53200. */
dsa_pointer
dlock_text_copy(const char *text)
{
	dsa_pointer copy;

	if (text == NULL)
		return InvalidDsaPointer;
	copy = dlock_allocate(strlen(text) + 1);
	strcpy(dsa_get_address(dlock_area, copy), text);
	return copy;
}

void
dlock_text_free(dsa_pointer text)
{
	if (DsaPointerIsValid(text))
		dlock_release_memory(text,
							 strlen(dsa_get_address(dlock_area, text)) + 1);
}

static DlockLink *
link_at(dsa_pointer pointer)
{
	return dsa_get_address(dlock_area, pointer);
}

void
dlock_list_append(DlockList *list, DlockLink *link)
{
	link->prev = list->tail;
	link->next = InvalidDsaPointer;
	if (DsaPointerIsValid(list->tail))
		link_at(list->tail)->next = link->self;
	else
		list->head = link->self;
	list->tail = link->self;
	list->length++;
}

void
dlock_list_remove(DlockList *list, DlockLink *link)
{
	/* before any change, as to map a segment of memory can fail */
	DlockLink  *prev = DsaPointerIsValid(link->prev) ? link_at(link->prev) : NULL;
	DlockLink  *next = DsaPointerIsValid(link->next) ? link_at(link->next) : NULL;

	if (prev)
		prev->next = link->next;
	else
		list->head = link->next;
	if (next)
		next->prev = link->prev;
	else
		list->tail = link->prev;
	link->prev = link->next = InvalidDsaPointer;
	list->length--;
}

/* Take note of shared memory taken, or, where negative, given back. */
void
dlock_count_memory(int64 change)
{
	unreported_memory += change;
	if (unreported_memory > REPORT_MEMORY_EVERY ||
		unreported_memory < -REPORT_MEMORY_EVERY)
		report_memory();
}

void
dlock_count(DlockCounter counter, uint64 amount)
{
	pg_atomic_uint64 *mine = &dlock_my_backend->counters[counter];

	/* nobody else writes here, so this need not be one instruction */
	pg_atomic_write_u64(mine, pg_atomic_read_u64(mine) + amount);
}

/*
 * Add up the counters of a space: those of backends gone and of those alive.
 * A backend that leaves meanwhile may be missed or counted twice.
 */
void
dlock_sum_counters(DlockSpace *space, uint64 *sums)
{
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		sums[c] = pg_atomic_read_u64(&space->counters[c]);
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];

		if (pg_atomic_read_u64(&backend->session) == 0 ||
			backend->database != space->key.database)
			continue;
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
			sums[c] += pg_atomic_read_u64(&backend->counters[c]);
	}
}
