/*-------------------------------------------------------------------------
 *
 * purge.c
 *	  Removing the name spaces that nobody can use again.
 *
 * That is done whenever a space is loaded, by whoever loads it: so they do not
 * add up if an extension is dropped and made again and again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/syscache.h"

#include "shared/lease.h"
#include "shared/shared.h"

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

/*
 * Remove the spaces that nobody can use again: of databases that are gone,
 * and of earlier installations in this database.  Should this be wrong, as
 * after the rollback of a DROP EXTENSION, it costs a block of ticket numbers.
 */
void
dlock_remove_unused_spaces(const DlockSpaceKey *keep)
{
	dshash_seq_status status;
	DlockSpaceEntry *entry;
	DlockSpaceKey *unused;
	int			count = 0;
	const int	max = 64;

	unused = palloc(max * sizeof(DlockSpaceKey));
	dshash_seq_init(&status, dlock_spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL && count < max)
	{
		if (entry->users == 0 && OidIsValid(entry->key.extension))
			unused[count++] = entry->key;
	}
	dshash_seq_term(&status);

	for (int i = 0; i < count; i++)
	{
		DlockSpaceKey database = {unused[i].database, InvalidOid};

		if (unused[i].database == keep->database ?
			unused[i].extension == keep->extension :
			SearchSysCacheExists1(DATABASEOID,
								  ObjectIdGetDatum(unused[i].database)))
			continue;
		entry = dshash_find(dlock_spaces, &unused[i], true);
		if (entry && entry->users == 0)
		{
			/* nobody comes to use it while this entry is locked */
			dlock_queue_purge(&unused[i]);
			purge_leases(dlock_space_at(entry->space));
			dlock_contention_free(dlock_space_at(entry->space));
			dsa_free(dlock_area, entry->space);
			dshash_delete_entry(dlock_spaces, entry);
			if (unused[i].database != keep->database)
				(void) dshash_delete_key(dlock_spaces, &database);
		}
		else if (entry)
			dshash_release_lock(dlock_spaces, entry);
	}
	pfree(unused);
}
