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
#include "utils/builtins.h"

#include "backend/backend.h"
#include "tables/tables.h"

/*
 * Run a statement on the table of versions, with the name as $1 and the
 * version as $2.  Returns the version of the row that comes out of it, or 0.
 */
static int64
execute(DlockSpace *space, const char *statement, const DlockKey *key,
		int64 version)
{
	Oid			types[] = {TEXTOID, INT8OID};
	Datum		values[] = {
		PointerGetDatum(cstring_to_text_with_len(key->name, key->length)),
		Int64GetDatum(version)
	};
	int64		result = 0;

	(void) dlock_execute_as_owner(space, "dlock_versions", statement, 2, types,
								  values, &result);
	return result;
}

int64
dlock_version_read(DlockSpace *space, const DlockKey *key)
{
	return execute(space,
				   "SELECT version FROM %s WHERE name OPERATOR(pg_catalog.=) $1",
				   key, 0);
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
	return execute(space, expected == 0 ?
				   "INSERT INTO %s (name, version) VALUES ($1, $2 OPERATOR(pg_catalog.+) 1) "
				   "ON CONFLICT DO NOTHING RETURNING version" :
				   "UPDATE %s SET version = version OPERATOR(pg_catalog.+) 1 "
				   "WHERE name OPERATOR(pg_catalog.=) $1 "
				   "AND version OPERATOR(pg_catalog.=) $2 RETURNING version",
				   key, expected);
}
