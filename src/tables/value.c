/*-------------------------------------------------------------------------
 *
 * value.c
 *	  Names of modes and scopes, and intervals.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "tables/tables.h"

static const char *const mode_names[] = {
	[DLOCK_EXCLUSIVE] = "exclusive",
	[DLOCK_SHARED] = "shared",
	[DLOCK_SLOTS] = "slots"
};

StaticAssertDecl(lengthof(mode_names) == DLOCK_SLOTS + 1,
				 "mode_names must match DlockMode");

static const char *const scope_names[] = {
	[DLOCK_SESSION] = "session",
	[DLOCK_TRANSACTION] = "transaction",
	[DLOCK_LEASE] = "lease"
};

StaticAssertDecl(lengthof(scope_names) == DLOCK_LEASE + 1,
				 "scope_names must match DlockScope");

const char *
dlock_mode_name(DlockMode mode)
{
	return mode_names[mode];
}

const char *
dlock_scope_name(DlockScope scope)
{
	return scope_names[scope];
}

/* Set *mode to the mode with this name.  Returns false if there is none. */
bool
dlock_mode_by_name(const char *name, DlockMode *mode)
{
	for (int i = 0; i < (int) lengthof(mode_names); i++)
	{
		*mode = (DlockMode) i;
		if (strcmp(mode_names[i], name) == 0)
			return true;
	}
	return false;
}

Datum
dlock_interval_datum(int64 microseconds)
{
	Interval   *interval = palloc0(sizeof(Interval));

	interval->time = microseconds;
	return IntervalPGetDatum(interval);
}
