/*-------------------------------------------------------------------------
 *
 * slots.c
 *	  The slots that are set for locks and replace those of requests.
 *
 * The table dlock_slots has a row for each lock whose slots are set.  Requests
 * use a copy in the lock's entry.  A transaction that may change a row notes
 * the row's name and keeps the lock's entry.  Before its commit, the
 * transaction takes a heavyweight lock and reads the rows of the noted names.
 * After the commit it sets the copies to what it has read, then releases the
 * heavyweight lock.  So copies change in the order of commits.
 *
 * A constraint notes the names of rows that are written, because a restore can
 * disable triggers, but not constraints.  Triggers note the names of rows that
 * are removed or renamed.  A name may be noted although its row is unchanged.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xact.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "backend/held.h"
#include "tables/tables.h"

/* A lock whose row may have changed in this transaction */
typedef struct NotedName
{
	DlockKey	key;			/* hash key, must be first */
	DlockSpace *space;
	DlockLock  *lock;			/* the lock's entry, which this name keeps */
	struct NotedName *next;		/* in "names" */
	int			level;			/* transaction nesting level */

	/* set by read_names() */
	bool		is_read;
	int32		slots;			/* as in the name's row; 0: no row */
} NotedName;

static HTAB *table_of_names = NULL;

/* The latest name first, so levels never rise along the list */
static NotedName *names = NULL;

/* Caller of dlock_set_slots(), which writes as the table's owner; 0: none */
static Oid	setter = InvalidOid;

static void slots_at_xact_end(XactEvent event, void *arg);
static void slots_at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
								 SubTransactionId parentSubid, void *arg);

/* Add a name, whose row may change, to "names", and keep the lock's entry. */
void
dlock_slots_note(DlockSpace *space, const DlockKey *key)
{
	static bool registered = false;
	NotedName  *name;
	DlockLock  *lock;

	if (!registered)
	{
		RegisterXactCallback(slots_at_xact_end, NULL);
		RegisterSubXactCallback(slots_at_subxact_end, NULL);
		registered = true;
	}
	if (table_of_names == NULL)
		table_of_names = dlock_held_make_table("dlock slots", sizeof(NotedName));
	if (hash_search(table_of_names, key, HASH_FIND, NULL) != NULL)
		return;
	lock = dlock_queue_expect_slots(key, OidIsValid(setter) ?
									setter : GetUserId());
	PG_TRY();
	{
		name = hash_search(table_of_names, key, HASH_ENTER, NULL);
	}
	PG_CATCH();
	{
		dlock_queue_finish_slots(space, key, lock, false, 0);
		PG_RE_THROW();
	}
	PG_END_TRY();
	name->space = space;
	name->lock = lock;
	name->level = GetCurrentTransactionNestLevel();
	name->is_read = false;
	name->next = names;
	names = name;
}

static void
note_row(DlockSpace *space, const DlockKey *key, int32 slots, Oid owner)
{
	dlock_slots_note(space, key);
}

/* Trigger on dlock_slots, after a change of a row, or before TRUNCATE */
PG_FUNCTION_INFO_V1(dlock_slots_changed);
Datum
dlock_slots_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_own_trigger(fcinfo, "dlock_slots_changed");
	bool		for_row = TRIGGER_FIRED_FOR_ROW(trigger->tg_event);
	DlockSpace *space;
	DlockKey	key;

	if (!dlock_session_attached)
		dlock_session_attach();
	space = dlock_current_space();
	/* refuse any other table, because other roles may write to it */
	if ((for_row && !TRIGGER_FIRED_AFTER(trigger->tg_event)) ||
		RelationGetRelid(trigger->tg_relation) !=
		dlock_find_relation(space, "dlock_slots"))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired after a change of table \"%s\"",
						"dlock_slots_changed", "dlock_slots")));
	if (for_row)
	{
		(void) dlock_slots_take_row(space, trigger->tg_relation,
									trigger->tg_trigtuple, &key);
		dlock_slots_note(space, &key);
	}
	else
		dlock_slots_for_each(space, trigger->tg_relation, NULL, note_row);
	return PointerGetDatum(NULL);
}

/* May the current user execute the function, not counting PUBLIC's right? */
static bool
is_granted(Oid function)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	bool		is_null;
	bool		result;
	Datum		datum;

	if (!HeapTupleIsValid(tuple))
		return false;
	result = has_privs_of_role(GetUserId(),
							   ((Form_pg_proc) GETSTRUCT(tuple))->proowner);
	datum = SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_proacl, &is_null);
	if (!is_null && !result)
	{
		Acl		   *acl = DatumGetAclPCopy(datum);

		for (int i = 0; i < ACL_NUM(acl) && !result; i++)
		{
			const AclItem *item = &ACL_DAT(acl)[i];

			result = (ACLITEM_GET_PRIVS(*item) & ACL_EXECUTE) != 0 &&
				item->ai_grantee != ACL_ID_PUBLIC &&
				has_privs_of_role(GetUserId(), item->ai_grantee);
		}
	}
	ReleaseSysCache(tuple);
	return result;
}

/* Raise 42501 if the current user may not set the slots of this lock. */
void
dlock_slots_check_right(DlockSpace *space, const DlockKey *key, Oid function)
{
	if (superuser() || dlock_reserve_lets_in(space, key) ||
		is_granted(function))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied to set the slots of lock \"%.*s\"",
					key->length, key->name),
			 errdetail("Role \"%s\" has the privileges neither of a role that the name is reserved for, nor of one that EXECUTE on dlock_set_slots() was granted to.",
					   GetUserNameFromId(GetUserId(), false)),
			 errhint("An administrator can reserve such names, with dlock_reserve(), or grant EXECUTE on the function.")));
}

/* Set a lock's slots from this transaction's commit on; 0 unsets them. */
void
dlock_slots_set(DlockSpace *space, const DlockKey *key, int32 slots)
{
	Oid			types[] = {TEXTOID, INT4OID};
	Datum		values[] = {
		PointerGetDatum(cstring_to_text_with_len(key->name, key->length)),
		Int32GetDatum(slots)
	};

	if (slots > 0)
	{
		/* tickets from before a restart must be loaded */
		(void) dlock_load_name(space, key, DLOCK_WAIT_FOREVER, NULL);
		dlock_request_check_memory(space, GetUserId());
	}
	setter = GetUserId();
	PG_TRY();
	{
		(void) dlock_execute_as_owner(space, "dlock_slots", slots > 0 ?
									  "INSERT INTO %s (name, slots) VALUES ($1, $2) "
									  "ON CONFLICT (name) DO UPDATE SET slots = excluded.slots" :
									  "DELETE FROM %s WHERE name OPERATOR(pg_catalog.=) $1",
									  slots > 0 ? 2 : 1, types, values, NULL);
	}
	PG_FINALLY();
	{
		setter = InvalidOid;
	}
	PG_END_TRY();
}

/* Before the commit: read the rows of the noted names (I27). */
static void
read_names(void)
{
	DlockSpace *space = NULL;
	Relation	table = NULL;

	CommandCounterIncrement();
	for (NotedName *name = names; name; name = name->next)
	{
		CHECK_FOR_INTERRUPTS();
		if (space != name->space)
		{
			if (table)
				relation_close(table, NoLock);
			space = name->space;
			table = dlock_slots_open(space);
		}
		name->is_read = table != NULL;
		if (table)
			name->slots = dlock_slots_find(space, table, &name->key);
	}
	if (table)
		relation_close(table, NoLock);
}

/* Drop names of this level or above and, after a commit, set the copies. */
static void
drop_names(int level, bool is_commit)
{
	while (names && names->level >= level)
	{
		NotedName  *name = names;

		names = name->next;
		dlock_queue_finish_slots(name->space, &name->key, name->lock,
								 is_commit && name->is_read, name->slots);
		(void) hash_search(table_of_names, &name->key, HASH_REMOVE, NULL);
	}
}

static void
slots_at_xact_end(XactEvent event, void *arg)
{
	/* at exit, after an error in the rollback, dlock_detach() may have run */
	if (table_of_names == NULL || dlock_my_backend == NULL)
		return;
	switch (event)
	{
		case XACT_EVENT_PRE_PREPARE:
			if (names)
				ereport(ERROR,
						(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						 errmsg("cannot PREPARE a transaction that has set the slots of locks"),
						 errdetail("They take effect at the commit, which another session could make."),
						 errhint("Use COMMIT.")));
			break;
		case XACT_EVENT_PRE_COMMIT:
			if (names)
				read_names();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_ABORT:
			drop_names(0, event == XACT_EVENT_COMMIT);
			hash_destroy(table_of_names);
			table_of_names = NULL;
			break;
		default:
			break;
	}
}

static void
slots_at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
					 SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (table_of_names == NULL || dlock_my_backend == NULL)
		return;
	if (event == SUBXACT_EVENT_ABORT_SUB)
		drop_names(level, false);
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		for (NotedName *name = names; name && name->level >= level;
			 name = name->next)
			name->level = level - 1;
	}
}
