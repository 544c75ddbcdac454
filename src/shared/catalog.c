/*-------------------------------------------------------------------------
 *
 * catalog.c
 *	  The extension's relations, and settings of roles, from the catalogs.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/pg_class.h"
#include "catalog/pg_db_role_setting.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "shared/inner.h"

/*
 * A relation of the extension, or 0.  A relation that the extension does not
 * own is ignored, because other roles may have CREATE on the schema.
 */
Oid
dlock_find_relation(DlockSpace *space, const char *name)
{
	Relation	catalog = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			schema = InvalidOid;
	Oid			relation;

	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(space->key.extension));
	scan = systable_beginscan(catalog, ExtensionOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);

	relation = get_relname_relid(name, schema);
	if (OidIsValid(relation) &&
		getExtensionOfObject(RelationRelationId, relation) != space->key.extension)
		relation = InvalidOid;
	return relation;
}

/* The relation is missing; perhaps the extension was dropped. */
static void
raise_missing(DlockSpace *space, const char *name)
{
	if (get_extension_oid("dlock", true) != space->key.extension)
		ereport(ERROR,
				(errcode(ERRCODE_DLOCK_LOST),
				 errmsg("extension \"%s\" was dropped during the call", "dlock"),
				 errdetail("All of its locks and tickets are gone with it."),
				 errhint("If the extension was created again, repeat the call.")));
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_TABLE),
			 errmsg("relation \"%s\" of extension \"%s\" does not exist",
					name, "dlock"),
			 errhint("Undo the change. Or drop the extension and create it again, which ends all locks of this database.")));
}

/* A relation of the extension; raises an error if there is none */
Oid
dlock_relation(DlockSpace *space, const char *name)
{
	Oid			relation = dlock_find_relation(space, name);

	if (!OidIsValid(relation))
		raise_missing(space, name);
	return relation;
}

/* Raises 55L01 if the extension is dropped during the wait for the lock. */
Relation
dlock_open_relation(DlockSpace *space, const char *name, LOCKMODE mode)
{
	Relation	relation = try_relation_open(dlock_relation(space, name),
											 mode);

	if (relation == NULL)
		raise_missing(space, name);
	return relation;
}

/* Raise 55000 if the relation is unlogged, because a crash would empty it. */
void
dlock_check_permanent(Relation relation)
{
	if (relation->rd_rel->relpersistence == RELPERSISTENCE_PERMANENT)
		return;
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("relation \"%s\" of extension \"%s\" is unlogged",
					RelationGetRelationName(relation), "dlock"),
			 errdetail("A crash would empty it, and standbys do not have its rows."),
			 errhint("Use ALTER %s %s SET LOGGED.",
					 relation->rd_rel->relkind == RELKIND_SEQUENCE ? "SEQUENCE" : "TABLE",
					 RelationGetRelationName(relation))));
}

/*
 * Raise 55000 if this transaction created the extension: leases need the
 * worker, which does not see the extension before the commit.
 */
void
dlock_check_committed(DlockSpace *space)
{
	TransactionId xid = GetTopTransactionIdIfAny();
	static TransactionId checked_xid = InvalidTransactionId;
	static DlockSpace *checked_space = NULL;
	Relation	queue;
	bool		is_new;

	if (likely(!TransactionIdIsValid(xid)) ||
		(xid == checked_xid && space == checked_space))
		return;
	queue = dlock_open_relation(space, "dlock_queue", AccessShareLock);
	is_new = queue->rd_createSubid != InvalidSubTransactionId;
	relation_close(queue, AccessShareLock);
	if (is_new)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot use leases in the transaction that creates extension \"%s\"",
						"dlock"),
				 errdetail("The background worker, which keeps them, does not see the extension before that transaction has committed."),
				 errhint("Commit first.")));
	checked_xid = xid;
	checked_space = space;
}

/* The value of a setting in pg_db_role_setting.setconfig, or NULL */
static char *
find_setting(Datum config, const char *name)
{
	Datum	   *elements;
	int			count;
	Size		length = strlen(name);
	char	   *result = NULL;

	deconstruct_array(DatumGetArrayTypeP(config), TEXTOID, -1, false,
					  TYPALIGN_INT, &elements, NULL, &count);
	for (int i = 0; i < count && result == NULL; i++)
	{
		char	   *element = TextDatumGetCString(elements[i]);

		if (pg_strncasecmp(element, name, length) == 0 &&
			element[length] == '=')
			result = element + length + 1;
	}
	return result;
}

/* A role's setting by ALTER ROLE IN DATABASE or, if none, by ALTER ROLE */
char *
dlock_role_setting(Oid role, const char *name)
{
	Relation	catalog = table_open(DbRoleSettingRelationId, AccessShareLock);
	const Oid	databases[] = {MyDatabaseId, InvalidOid};
	char	   *result = NULL;

	for (int i = 0; i < (int) lengthof(databases) && result == NULL; i++)
	{
		ScanKeyData keys[2];
		SysScanDesc scan;
		HeapTuple	tuple;
		Datum		config = (Datum) 0;
		bool		is_null = true;

		ScanKeyInit(&keys[0], Anum_pg_db_role_setting_setdatabase,
					BTEqualStrategyNumber, F_OIDEQ,
					ObjectIdGetDatum(databases[i]));
		ScanKeyInit(&keys[1], Anum_pg_db_role_setting_setrole,
					BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(role));
		scan = systable_beginscan(catalog, DbRoleSettingDatidRolidIndexId, true,
								  NULL, 2, keys);
		tuple = systable_getnext(scan);
		if (HeapTupleIsValid(tuple))
			config = heap_getattr(tuple, Anum_pg_db_role_setting_setconfig,
								  RelationGetDescr(catalog), &is_null);
		if (!is_null)
			result = find_setting(config, name);
		systable_endscan(scan);
	}
	table_close(catalog, AccessShareLock);
	/* a caller that waits without a snapshot must not get one here */
	InvalidateCatalogSnapshot();
	return result;
}
