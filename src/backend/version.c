/*-------------------------------------------------------------------------
 *
 * version.c
 *	  Optimistic locking: the versions of names.
 *
 * The versions are rows of an ordinary table, changed in the caller's own
 * transaction, so that they roll back with it, and so that of two who bump at
 * once the second waits for the first and then finds another version.  The
 * table is closed to everybody: it is read and written as its owner.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

#include "backend/inner.h"
#include "tables/tables.h"

/*
 * Run a statement on the table of versions, with the name as $1, a version as
 * $2 and the current role as $3.  Returns how many rows that concerned; the
 * version that comes out of it goes to *result, unless that is NULL.
 */
static uint64
execute(DlockSpace *space, const char *statement, const DlockKey *key,
		int64 version, int64 *result)
{
	Oid			types[] = {TEXTOID, INT8OID, NAMEOID};
	NameData	role;
	Datum		values[3];

	namestrcpy(&role, GetUserNameFromId(GetUserId(), false));
	values[0] = PointerGetDatum(cstring_to_text_with_len(key->name, key->length));
	values[1] = Int64GetDatum(version);
	values[2] = NameGetDatum(&role);
	return dlock_execute_as_owner(space, "dlock_versions", statement, 3, types,
								  values, result);
}

int64
dlock_version_read(DlockSpace *space, const DlockKey *key)
{
	int64		version = 0;

	(void) execute(space,
				   "SELECT version FROM %s WHERE name OPERATOR(pg_catalog.=) $1",
				   key, 0, &version);
	return version;
}

/*
 * Move a version on from the expected one.  Returns the new one, or 0 where
 * another one was found.  Waits for a transaction that has bumped the same
 * name; in REPEATABLE READ and SERIALIZABLE PostgreSQL then raises 40001
 * itself.
 */
int64
dlock_version_increment(DlockSpace *space, const DlockKey *key, int64 expected)
{
	int64		version = 0;

	(void) execute(space, expected == 0 ?
				   "INSERT INTO %s (name, version, bumped_by, bumped_at) "
				   "VALUES ($1, $2 OPERATOR(pg_catalog.+) 1, $3, pg_catalog.clock_timestamp()) "
				   "ON CONFLICT DO NOTHING RETURNING version" :
				   "UPDATE %s SET version = version OPERATOR(pg_catalog.+) 1, "
				   "bumped_by = $3, bumped_at = pg_catalog.clock_timestamp() "
				   "WHERE name OPERATOR(pg_catalog.=) $1 "
				   "AND version OPERATOR(pg_catalog.=) $2 RETURNING version",
				   key, expected, &version);
	return version;
}

/* Forget that a name was ever bumped; false where it was not. */
bool
dlock_version_remove(DlockSpace *space, const DlockKey *key)
{
	return execute(space,
				   "DELETE FROM %s WHERE name OPERATOR(pg_catalog.=) $1",
				   key, 0, NULL) > 0;
}
