/*-------------------------------------------------------------------------
 *
 * locked.c
 *	  Finding the holders of a heavyweight lock, for messages.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lock.h"

#include "tables/tables.h"

#define MAX_HOLDERS		5		/* named in a message */

/* Find the strongest mode in "held" that conflicts with "mode", or NoLock. */
static LOCKMODE
find_conflict(LOCKMASK held, LOCKMODE mode)
{
	for (LOCKMODE other = MaxLockMode; other > 0; other--)
	{
		if ((held & LOCKBIT_ON(other)) && DoLockModesConflict(other, mode))
			return other;
	}
	return NoLock;
}

/*
 * List processes that hold this lock, or wait for it, in a mode that conflicts
 * with "mode".  Reads no catalog, so it works in a failed transaction.
 */
char *
dlock_describe_holders(const LOCKTAG *tag, LOCKMODE mode)
{
	LockData   *locks = GetLockStatusData();
	StringInfoData text;
	int			count = 0;

	initStringInfo(&text);
	for (int i = 0; i < locks->nelements; i++)
	{
		const LockInstanceData *lock = &locks->locks[i];
		LOCKMODE	conflict;

		if (memcmp(&lock->locktag, tag, sizeof(LOCKTAG)) != 0 ||
			lock->pid == MyProcPid)
			continue;
		conflict = find_conflict(lock->holdMask |
								 LOCKBIT_ON(lock->waitLockMode), mode);
		if (conflict == NoLock)
			continue;
		if (++count > MAX_HOLDERS)
			break;
		appendStringInfoString(&text, count > 1 ? ", " : "");
		if (lock->pid == 0)
			appendStringInfoString(&text, _("a prepared transaction"));
		else
			appendStringInfo(&text, _("process %d"), lock->pid);
		appendStringInfo(&text, " (%s)",
						 GetLockmodeName(DEFAULT_LOCKMETHOD, conflict));
	}
	if (count == 0)
		appendStringInfoString(&text, _("no process any more"));
	else if (count > MAX_HOLDERS)
		appendStringInfoString(&text, ", ...");
	return text.data;
}
