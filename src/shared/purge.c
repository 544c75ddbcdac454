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
#include "shared/inner.h"

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

		while ((ticket = dlock_lease_first_ticket(lease)) != NULL ||
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

	/* what has ended, and whose row was still to be removed */
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
 * Remove a space that has no user, and that nobody can use again: its entry
 * says so, and is let go of, as whoever looks through the table of spaces, in
 * any database, would have to wait meanwhile.  Where an error breaks this off,
 * the entry is still there, and the next one goes on (I6).  Called with the
 * purge lock.
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

	dlock_queue_purge(&key);
	purge_leases(space);
	dlock_contention_free(space);
	/* whoever has looked at it has let go of its entry by then */
	(void) dshash_delete_key(dlock_spaces, &key);
	dsa_free(dlock_area, space->self);
}

/*
 * Remove a space that has no user if nobody can use it again: of a database that
 * is gone, or of an earlier installation in this one.  Should this be wrong, as
 * after the rollback of a DROP EXTENSION, it costs a block of ticket numbers.
 * Without "wait", this is left to who removes another one at this moment.
 */
static void
remove_if_useless(const DlockSpaceKey *key, const DlockSpaceKey *keep,
				  bool wait)
{
	DlockSpaceKey database = {key->database, InvalidOid};
	DlockSpaceEntry *entry;

	if (key->database == keep->database ?
		key->extension == keep->extension :
		SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(key->database)))
		return;
	if (wait)
		LWLockAcquire(&dlock_control->purge_lock, LW_EXCLUSIVE);
	else if (!LWLockConditionalAcquire(&dlock_control->purge_lock, LW_EXCLUSIVE))
		return;
	entry = dshash_find(dlock_spaces, key, true);
	if (entry && entry->users == 0)
	{
		remove_space(entry);
		if (key->database != keep->database)
			(void) dshash_delete_key(dlock_spaces, &database);
	}
	else if (entry)
		dshash_release_lock(dlock_spaces, entry);
	LWLockRelease(&dlock_control->purge_lock);
}

/*
 * For who needs the space: if it was thought to be useless, wait until it is
 * removed, or do what an error has left of that.
 */
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
	entry = dshash_find(dlock_spaces, key, true);
	if (entry && entry->useless)
		remove_space(entry);
	else if (entry)
		dshash_release_lock(dlock_spaces, entry);
	LWLockRelease(&dlock_control->purge_lock);
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
		remove_if_useless(&unused[(first + i) % count], keep, false);
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
		remove_if_useless(&unused[i], keep, true);
	}
	pfree(unused);
	done = changes;
}
