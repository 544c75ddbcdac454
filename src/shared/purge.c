/*-------------------------------------------------------------------------
 *
 * purge.c
 *	  Removing the name spaces that nobody can use again.
 *
 * Whenever a space is loaded, whoever loads it looks at some others: so they do
 * not add up if an extension, or databases, are dropped and made again and again.
 * And whoever is short of memory looks at all of them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/inval.h"
#include "utils/syscache.h"

#include "shared/lease.h"
#include "shared/shared.h"

/* Spaces that whoever loads one looks at */
#define LOOKS_AT_ONCE	64

/* Changes of databases that this backend has heard of */
static uint64 database_changes = 0;

/*
 * Free the leases of a space that nobody uses any more.  Their tickets' locks
 * have been removed.
 */
static void
purge_leases(DlockSpace *space)
{
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	while (DsaPointerIsValid(space->leases.head))
	{
		DlockLease *lease = dlock_lease_in_space(space->leases.head);
		DlockLeaseTicket *ticket;

		dlock_record_ref(&lease->record);
		while ((ticket = dlock_lease_first_ticket(lease)) != NULL ||
			   (ticket = dlock_lease_first_closed(lease)) != NULL)
		{
			dlock_lease_ticket_unlist(lease, ticket);
			dlock_id_delete(&ticket->record);
			dlock_journal_unmark(space, &ticket->record);
			dlock_record_unref(&ticket->record);
		}
		/* one that is not listed is where a walk has failed */
		if (lease->in_leases)
			dlock_record_unref(&lease->record);
		else
			space->leases.length++;
		lease->in_leases = false;
		if (dlock_lease_unretime(space, lease))
			dlock_record_unref(&lease->record);
		dlock_list_remove(&space->leases, &lease->in_space);
		dlock_journal_unmark(space, &lease->record);
		dlock_id_delete(&lease->record);
		dlock_record_unref(&lease->record);
	}

	/* what has ended, and whose row was still to be removed */
	while (DsaPointerIsValid(space->journal.head))
	{
		DlockRecord *record = dlock_record_at(space->journal.head);

		dlock_journal_unmark(space, record);
		Assert(!record->is_lease);
		dlock_id_delete(record);
		dlock_record_unref(record);
	}
	LWLockRelease(&space->lease_lock);
	dlock_announcement_purge(space);
	dlock_watch_purge(space);
}

/* The spaces that have no user at this moment */
static DlockSpaceKey *
find_unused(int *count)
{
	int			room = LOOKS_AT_ONCE;
	DlockSpaceKey *unused = palloc(room * sizeof(DlockSpaceKey));
	dshash_seq_status status;
	DlockSpaceEntry *entry;

	*count = 0;
	dshash_seq_init(&status, dlock_spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL)
	{
		if (entry->users > 0 || !OidIsValid(entry->key.extension))
			continue;
		if (*count == room)
			unused = repalloc(unused, (room *= 2) * sizeof(DlockSpaceKey));
		unused[(*count)++] = entry->key;
	}
	dshash_seq_term(&status);
	return unused;
}

/*
 * Remove a space that has no user if nobody can use it again: of a database that
 * is gone, or of an earlier installation in this one.  Should this be wrong, as
 * after the rollback of a DROP EXTENSION, it costs a block of ticket numbers.
 */
static void
remove_if_useless(const DlockSpaceKey *key, const DlockSpaceKey *keep)
{
	DlockSpaceKey database = {key->database, InvalidOid};
	DlockSpaceEntry *entry;

	if (key->database == keep->database ?
		key->extension == keep->extension :
		SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(key->database)))
		return;
	entry = dshash_find(dlock_spaces, key, true);
	if (entry && entry->users == 0)
	{
		/* nobody comes to use it while this entry is locked */
		dlock_queue_purge(key);
		purge_leases(dlock_space_at(entry->space));
		dlock_contention_free(dlock_space_at(entry->space));
		dsa_free(dlock_area, entry->space);
		dshash_delete_entry(dlock_spaces, entry);
		if (key->database != keep->database)
			(void) dshash_delete_key(dlock_spaces, &database);
	}
	else if (entry)
		dshash_release_lock(dlock_spaces, entry);
}

/*
 * A space is loaded: look at a few others, each time at the next ones, and remove
 * those that nobody can use again.
 */
void
dlock_remove_unused_spaces(const DlockSpaceKey *keep)
{
	int			count;
	DlockSpaceKey *unused = find_unused(&count);
	uint32		first = pg_atomic_fetch_add_u32(&dlock_control->looked_at,
												LOOKS_AT_ONCE);

	for (int i = 0; i < Min(count, LOOKS_AT_ONCE); i++)
		remove_if_useless(&unused[(first + i) % count], keep);
	pfree(unused);
}

static void
note_database_change(Datum arg, int cacheid, uint32 hashvalue)
{
	database_changes++;
}

/*
 * Memory is short: remove all spaces that nobody can use again.
 *
 * Whoever goes on asking, as nobody gives anything back, shall not look at all
 * databases each time.  So this does nothing where nothing can have become useless
 * since it was done: no database has gone, and no space was left by its last user.
 */
void
dlock_remove_all_unused_spaces(const DlockSpaceKey *keep)
{
	static bool registered = false;
	static uint64 done = 0;
	uint64		changes;
	DlockSpaceKey *unused;
	int			count;

	if (!registered)
		CacheRegisterSyscacheCallback(DATABASEOID, note_database_change, 0);
	registered = true;
	/* both only grow; taken before: a change meanwhile is not missed */
	changes = 1 + database_changes +
		pg_atomic_read_u64(&dlock_control->spaces_left);
	if (changes == done)
		return;
	unused = find_unused(&count);
	for (int i = 0; i < count; i++)
	{
		CHECK_FOR_INTERRUPTS();
		remove_if_useless(&unused[i], keep);
	}
	pfree(unused);
	done = changes;
}
