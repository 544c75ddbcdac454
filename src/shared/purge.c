/*-------------------------------------------------------------------------
 *
 * purge.c
 *	  Removing name spaces that no backend can use again.
 *
 * A process that loads its space looks at a few spaces, so that the spaces of
 * dropped extensions do not add up.  A process that needs memory looks at all.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/inval.h"
#include "utils/syscache.h"

#include "shared/lease.h"

/* How many spaces a process that loads its space looks at */
#define LOOKS_AT_ONCE	64

static uint64 database_changes = 0;

/* Free the objects in the lists of a space without users or locks. */
static void
purge_leases(DlockSpace *space)
{
	DlockLease *lease;

	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	while ((lease = dlock_lease_next(space, NULL)) != NULL)
	{
		DlockLeaseTicket *ticket;

		while ((ticket = dlock_ticket_in_lease(lease->tickets.head)) != NULL ||
			   (ticket = dlock_lease_first_closed(lease)) != NULL)
		{
			dlock_id_delete(&ticket->record);
			dlock_lease_ticket_unlist(lease, ticket);
			dlock_journal_unmark(space, &ticket->record);
			dlock_record_unref(&ticket->record);
		}
		dlock_id_delete(&lease->record);
		if (dlock_lease_unretime(space, lease))
			dlock_record_unref(&lease->record);
		dlock_list_remove(&space->leases, &lease->in_space);
		lease->in_leases = false;
		dlock_journal_unmark(space, &lease->record);
		dlock_record_unref(&lease->record);
	}

	/* the journal still has ended tickets whose rows were not yet removed */
	while (DsaPointerIsValid(space->journal.head))
	{
		DlockRecord *record = dlock_record_at(space->journal.head);

		Assert(!record->is_lease);
		dlock_id_delete(record);
		dlock_journal_unmark(space, record);
		dlock_record_unref(record);
	}
	LWLockRelease(&space->lease_lock);
	dlock_announcement_purge(space);
	dlock_watch_purge(space);
}

/* The keys of spaces without users */
static List *
find_unused(void)
{
	List	   *unused = NIL;
	dshash_seq_status status;
	DlockSpaceEntry *entry;

	dshash_seq_init(&status, dlock_spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL)
	{
		DlockSpaceKey *key;

		if (entry->users > 0 || !OidIsValid(entry->key.extension))
			continue;
		key = palloc(sizeof(DlockSpaceKey));
		*key = entry->key;
		unused = lappend(unused, key);
	}
	dshash_seq_term(&status);
	return unused;
}

/*
 * Remove a useless space.  The entry is unlocked early, so that scans of all
 * spaces do not wait.  After an error, a later call continues (I6).
 */
static void
remove_space(DlockSpaceEntry *entry)
{
	DlockSpaceKey key = entry->key;
	DlockSpace *space = dlock_space_at(entry->space);

	Assert(LWLockHeldByMeInMode(&dlock_control->purge_lock, LW_EXCLUSIVE));
	Assert(entry->users == 0);
	entry->useless = true;
	dshash_release_lock(dlock_spaces, entry);

	/* flush now: the positions in "removed" are lost with the space (I15) */
	dlock_journal_flush_removals(space);
	dlock_queue_purge(&key);
	purge_leases(space);
	dlock_contention_free(space);
	/* after this, no process finds the space */
	(void) dshash_delete_key(dlock_spaces, &key);
	dsa_free(dlock_area, dlock_pointer(space));
}

/* Remove a space without users; if "marked" is set, only a useless space. */
static bool
remove_if_unused(const DlockSpaceKey *key, bool marked)
{
	DlockSpaceEntry *entry = dshash_find(dlock_spaces, key, true);
	bool		unused = entry && (marked ? entry->useless : entry->users == 0);

	if (unused)
		remove_space(entry);
	else if (entry)
		dshash_release_lock(dlock_spaces, entry);
	return unused;
}

/*
 * Can a space be used again?  Returns true for the current space, and for a
 * space of another database that exists.  A wrong "false", as after the
 * rollback of a DROP EXTENSION, costs a block of ticket numbers.
 */
static bool
is_useful(const DlockSpaceKey *key, const DlockSpaceKey *current)
{
	if (key->database == current->database)
		return key->extension == current->extension;
	return SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(key->database));
}

/*
 * Remove useless spaces.  Unless "all" is set, look at only LOOKS_AT_ONCE
 * spaces without users, and stop if another process removes spaces.
 */
void
dlock_remove_unused_spaces(const DlockSpaceKey *current, bool all)
{
	List	   *unused = find_unused();
	int			count = list_length(unused);
	uint32		first = pg_atomic_fetch_add_u32(&dlock_control->looked_at,
												LOOKS_AT_ONCE);
	int			looks = all ? count : Min(count, LOOKS_AT_ONCE);

	for (int i = 0; i < looks; i++)
	{
		const DlockSpaceKey *key = list_nth(unused, (first + i) % count);
		DlockSpaceKey database = {key->database, InvalidOid};

		CHECK_FOR_INTERRUPTS();
		if (is_useful(key, current))
			continue;
		if (all)
			LWLockAcquire(&dlock_control->purge_lock, LW_EXCLUSIVE);
		else if (!LWLockConditionalAcquire(&dlock_control->purge_lock,
										   LW_EXCLUSIVE))
			break;
		if (remove_if_unused(key, false) && key->database != current->database)
			(void) dshash_delete_key(dlock_spaces, &database);
		LWLockRelease(&dlock_control->purge_lock);
	}
	list_free_deep(unused);
}

/* If a space that the caller needs is being removed, complete the removal. */
void
dlock_remove_useless_space(const DlockSpaceKey *key)
{
	DlockSpaceEntry *entry = dshash_find(dlock_spaces, key, false);
	bool		useless = entry && entry->useless;

	if (entry)
		dshash_release_lock(dlock_spaces, entry);
	if (!useless)
		return;
	LWLockAcquire(&dlock_control->purge_lock, LW_EXCLUSIVE);
	(void) remove_if_unused(key, true);
	LWLockRelease(&dlock_control->purge_lock);
}

static void
note_database_change(Datum arg, int cacheid, uint32 hashvalue)
{
	database_changes++;
}

/* Returns how many changes of pg_database this process has seen. */
uint64
dlock_database_changes(void)
{
	static bool registered = false;

	if (!registered)
		CacheRegisterSyscacheCallback(DATABASEOID, note_database_change, 0);
	registered = true;
	return database_changes;
}

/*
 * Raise 53200 if there is no memory for a role's next lock, lease or ticket,
 * even after the removal of all useless spaces.  This can be called often, so
 * it walks through the spaces only if pg_database has changed, or a space has
 * lost its last user, since the last walk.
 */
void
dlock_request_check_memory(DlockSpace *space, Oid role)
{
	static uint64 done = 0;
	uint64		changes;

	if (likely(dlock_memory_suffices(role)))
		return;
	/* read before the walk, so that no change is missed */
	changes = 1 + dlock_database_changes() +
		pg_atomic_read_u64(&dlock_control->spaces_left);
	if (changes != done)
		dlock_remove_unused_spaces(&space->key, true);
	done = changes;
	dlock_check_memory(role);
}
