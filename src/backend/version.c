/*-------------------------------------------------------------------------
 *
 * version.c
 *	  Optimistic locking: the versions of names.
 *
 * Versions are rows of an ordinary table.  The caller's transaction changes
 * them, so its rollback undoes a bump, and a concurrent bump waits.  No
 * role has privileges on the table: the statements run as the table's owner.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "backend/inner.h"
#include "tables/tables.h"

/*
 * Run a statement whose parameters are the name, a version and the current
 * role.  Returns the number of rows.  Sets *result to the version, if any.
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
 * Increment a name's version if it equals "expected".  Returns the new version
 * or, if the name has another version, 0.
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

/* Remove a name's version.  Returns false if the name has none. */
bool
dlock_version_remove(DlockSpace *space, const DlockKey *key)
{
	return execute(space,
				   "DELETE FROM %s WHERE name OPERATOR(pg_catalog.=) $1",
				   key, 0, NULL) > 0;
}
