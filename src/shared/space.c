/*-------------------------------------------------------------------------
 *
 * space.c
 *	  Name spaces: a database, and the extension in it.
 *
 * A backend looks up its space once, and again only if pg_proc has changed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "commands/extension.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "shared/inner.h"

/* The current database's space */
static DlockSpace *current_space = NULL;
static bool current_space_valid = false;

/* Spaces of which this backend is a user */
static List *attached_spaces = NIL;

static void
forget_current_space(Datum arg, int cacheid, uint32 hashvalue)
{
	current_space_valid = false;
}

static DlockSpace *
make_space(const DlockSpaceKey *key)
{
	uint64		number = dlock_first_unreserved(key->database);
	DlockSpace *space =
		dlock_address(dlock_allocate_uncounted(sizeof(DlockSpace)));

	memset(space, 0, sizeof(DlockSpace));
	space->key = *key;
	SpinLockInit(&space->mutex);
	pg_atomic_init_u64(&space->next_ticket, number);
	pg_atomic_init_u64(&space->ticket_limit, number);
	LWLockInitialize(&space->lease_lock, dlock_control->memory_tranche);
	LWLockInitialize(&space->outbox_lock, dlock_control->memory_tranche);
	for (int b = 0; b < DLOCK_REMOVED_BUCKETS; b++)
		pg_atomic_init_u64(&space->removed[b], InvalidXLogRecPtr);
	pg_atomic_init_u32(&space->loaded, 0);
	pg_atomic_init_u32(&space->has_removed, 0);
	pg_atomic_init_u32(&space->settled, 0);
	pg_atomic_init_u32(&space->slots_loaded, 0);
	pg_atomic_init_u32(&space->load_failures, 0);
	pg_atomic_init_u64(&space->loaded_at, InvalidXLogRecPtr);
	ConditionVariableInit(&space->load_changed);
	pg_atomic_init_u64(&space->lock_told_at, 0);
	pg_atomic_init_u32(&space->failures, 0);
	pg_atomic_init_u32(&space->failure, 0);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		pg_atomic_init_u64(&space->quorum[q], 0);
	SpinLockInit(&space->heartbeat_mutex);
	pg_atomic_init_u64(&space->last_heartbeat, 0);
	pg_atomic_init_u32(&space->announced, 0);
	pg_atomic_init_u32(&space->watches, 0);
	for (int o = 0; o < DLOCK_NUM_OFFICES; o++)
	{
		pg_atomic_init_u32(&space->offices[o].holder, 0);
		pg_atomic_init_u64(&space->offices[o].asked_at, 0);
	}
	pg_atomic_init_u32(&space->worker_comes, 0);
	pg_atomic_init_u32(&space->worker_deaths, 0);
	pg_atomic_init_u64(&space->blocked_on, 0);
	pg_atomic_init_u64(&space->next_due, 0);
	pg_atomic_init_u32(&space->dead_rows, 0);
	pg_atomic_init_u32(&space->vacuum_at, DLOCK_VACUUM_ROWS);
	pg_atomic_init_u32(&space->cleared, 0);
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_init_u64(&space->counters[c], 0);
	LWLockInitialize(&space->counts_lock, dlock_control->memory_tranche);
	space->counted_since = GetCurrentTimestamp();
	pg_atomic_init_u64(&space->contention, InvalidDsaPointer);
	return space;
}

/*
 * Count this backend as a user of a space; returns NULL if the space does not
 * exist or is useless.  The last cell of attached_spaces must be NULL.
 */
static DlockSpace *
use_space(const DlockSpaceKey *key)
{
	DlockSpaceEntry *entry = dshash_find(dlock_spaces, key, true);
	DlockSpace *space = NULL;

	if (entry && !entry->useless)
	{
		space = dlock_space_at(entry->space);
		entry->users++;
		llast(attached_spaces) = space;
	}
	if (entry)
		dshash_release_lock(dlock_spaces, entry);
	return space;
}

/* Make a space, unless another process has made it. */
static void
enter_space(const DlockSpaceKey *key)
{
	DlockSpace *space = make_space(key);
	DlockSpaceEntry *entry = NULL;
	bool		found = true;

	PG_TRY();
	{
		entry = dlock_table_insert(dlock_spaces, key, &found);
	}
	PG_CATCH();
	{
		dsa_free(dlock_area, dlock_pointer(space));
		PG_RE_THROW();
	}
	PG_END_TRY();
	if (!found)
	{
		entry->users = 0;
		entry->useless = false;
		entry->space = dlock_pointer(space);
	}
	dshash_release_lock(dlock_spaces, entry);
	if (found)
		dsa_free(dlock_area, dlock_pointer(space));
}

/* Use a space.  If there is none, make it if "make" is set, or return NULL. */
static DlockSpace *
attach_space(const DlockSpaceKey *key, bool make)
{
	MemoryContext old_context;
	ListCell   *cell;
	DlockSpace *space;

	foreach(cell, attached_spaces)
	{
		space = lfirst(cell);
		if (space && memcmp(&space->key, key, sizeof(DlockSpaceKey)) == 0)
			return space;
	}

	/* make a cell first; if a later step fails, the next call uses it */
	if (attached_spaces == NIL || llast(attached_spaces) != NULL)
	{
		old_context = MemoryContextSwitchTo(TopMemoryContext);
		attached_spaces = lappend(attached_spaces, NULL);
		MemoryContextSwitchTo(old_context);
	}
	while ((space = use_space(key)) == NULL && make)
	{
		dlock_remove_useless_space(key);
		enter_space(key);
	}
	return space;
}

/* The space for which this process was started; NULL if it is gone */
DlockSpace *
dlock_find_space(const DlockSpaceKey *key)
{
	DlockSpace *space = attach_space(key, false);

	if (space)
		dlock_count_for(space);
	return space;
}

/*
 * The space of the extension that is installed in this database now.  The
 * catalog is read again only if pg_proc has changed, because creating or
 * dropping an extension with functions changes pg_proc.
 */
DlockSpace *
dlock_current_space(void)
{
	static bool registered = false;
	DlockSpaceKey key;
	DlockSpace *space;

	/* otherwise, a transaction that opens no table would miss a DROP */
	AcceptInvalidationMessages();
	if (likely(current_space_valid))
		return current_space;

	if (!registered)
		CacheRegisterSyscacheCallback(PROCOID, forget_current_space, 0);
	registered = true;
	/* set before the catalog is read, so that no change is missed */
	current_space_valid = true;
	PG_TRY();
	{
		key.database = MyDatabaseId;
		key.extension = get_extension_oid("dlock", false);
		space = attach_space(&key, true);
	}
	PG_CATCH();
	{
		current_space_valid = false;
		PG_RE_THROW();
	}
	PG_END_TRY();

	if (current_space != space)
		dlock_count_for(space);
	current_space = space;
	return space;
}

/* The current space; NULL if it is not known without reading the catalog */
DlockSpace *
dlock_known_space(void)
{
	return current_space_valid ? current_space : NULL;
}

/* Is this still the current space?  Raises only errors of catalog reads. */
bool
dlock_space_is_current(const DlockSpace *space)
{
	bool		is_current;

	AcceptInvalidationMessages();
	if (likely(current_space_valid && current_space == space))
		return true;
	is_current = get_extension_oid("dlock", true) == space->key.extension;
	/* a caller that waits without a snapshot must not get one here */
	InvalidateCatalogSnapshot();
	return is_current;
}

/* The XOR of the halves of a product of 128 bits */
static inline uint64
fold_product(uint64 a, uint64 b)
{
#ifdef HAVE_INT128
	uint128		product = (uint128) a * b;

	return (uint64) product ^ (uint64) (product >> 64);
#else
	return hash_bytes_uint32_extended((uint32) a, b) ^
		hash_bytes_uint32_extended((uint32) (a >> 32), ~b);
#endif
}

/*
 * Fill in the key of a lock, from a valid name.  "Folded multiplication" (as
 * in aHash and foldhash) is much cheaper than hash_bytes() for short names.
 * Secret keys keep users from choosing many names with one hash.
 */
void
dlock_key_fill(DlockKey *key, const DlockSpace *space, const char *name,
			   int length)
{
	const uint64 *secrets = dlock_control->secrets;
	uint64		hash = (uint64) space->key.database << 32 | space->key.extension;
	unsigned int words = dlock_name_words(length);

	key->space = space->key;
	key->length = length;
	key->zero = 0;
	hash = fold_product(hash ^ secrets[0], secrets[1] ^ length);
	for (unsigned int w = 0; w < words; w++)
	{
		uint64		word = dlock_name_word(name, length, w);

		key->words[w] = word;
		hash = fold_product(hash ^ word, secrets[1]);
	}
	key->hash = (uint32) fold_product(hash, secrets[0]);
}

/* Leave all spaces and the shared state, at exit.  Raises nothing. */
void
dlock_detach(void)
{
	if (dlock_my_backend == NULL)
		return;
	dlock_count_for(NULL);
	while (attached_spaces != NIL)
	{
		DlockSpace *space = llast(attached_spaces);
		DlockSpaceEntry *entry;

		attached_spaces = list_delete_last(attached_spaces);
		if (space == NULL)
			continue;
		entry = dshash_find(dlock_spaces, &space->key, true);
		if (entry)
		{
			if (--entry->users == 0)
				pg_atomic_fetch_add_u64(&dlock_control->spaces_left, 1);
			dshash_release_lock(dlock_spaces, entry);
		}
	}
	dlock_leave_slot();
}
