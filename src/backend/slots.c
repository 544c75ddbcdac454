/*-------------------------------------------------------------------------
 *
 * slots.c
 *	  The slots that are set for locks, whatever requests say.
 *
 * The numbers are rows of the table dlock_slots.  The copy in the locks'
 * entries counts.  A name is noted here when its row is written, by
 * dlock_set_slots(), COPY, a restore or logical replication.  Right before the
 * commit, the rows of these names are read.  After the commit, before the
 * transaction's locks are released, the copy changes.
 *
 * A constraint notes a name that is about to be written, because a restore can
 * disable triggers, but not constraints.  At the commit, the row's writer
 * shows if it was written.  A trigger notes the old name of a row that was
 * removed or renamed.  A name counts only if this transaction has changed its
 * row, and has not rolled that back: then no other can have written the row
 * since.
 *
 * The entry of a noted lock is kept until the transaction is over, even after
 * a rollback to a savepoint, so the commit finds all that it needs.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/procarray.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "backend/held.h"
#include "tables/tables.h"

/* A lock whose entry is kept until this transaction is over */
typedef struct KeptName
{
	DlockKey	key;			/* hash key, must be first */
	DlockSpace *space;
	DlockLock  *lock;
	struct KeptName *next;		/* in "names" */

	/* at the commit */
	bool		may_be_changed;
	bool		changed;
	int32		slots;			/* as its row says; 0: it has none */
} KeptName;

/* A change, in the order of writing */
typedef struct Change
{
	KeptName   *name;			/* NULL: all rows ... */
	DlockSpace *emptied;		/* ... of this space are gone */
	bool		is_done;		/* false: is about to be written */
	int			level;			/* transaction nesting level */
} Change;

static HTAB *table_of_names = NULL;
static KeptName *names = NULL;
static Change *changes = NULL;
static int	num_changes = 0;
static int	max_changes = 0;

/* Caller of dlock_set_slots(), which writes as the table's owner; or 0 */
static Oid	setter = InvalidOid;

static void slots_at_xact_end(XactEvent event, void *arg);
static void slots_at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
						   SubTransactionId parentSubid, void *arg);

static void
prepare_change(void)
{
	static bool registered = false;
	Size		size = (Size) Max(16, 2 * max_changes) * sizeof(Change);

	if (!registered)
	{
		RegisterXactCallback(slots_at_xact_end, NULL);
		RegisterSubXactCallback(slots_at_subxact_end, NULL);
		registered = true;
	}
	if (table_of_names == NULL)
		table_of_names = dlock_held_make_table("dlock slots", sizeof(KeptName));
	if (num_changes < max_changes)
		return;
	changes = changes == NULL ? MemoryContextAlloc(TopMemoryContext, size) :
		repalloc_huge(changes, size);
	max_changes = size / sizeof(Change);
}

/* Keep a name and its lock's entry from now on. */
static KeptName *
keep_name(DlockSpace *space, const DlockKey *key)
{
	bool		found;
	KeptName   *name = hash_search(table_of_names, key, HASH_FIND, NULL);
	DlockLock  *lock;

	if (name)
		return name;
	lock = dlock_queue_expect_slots(key, OidIsValid(setter) ?
									setter : GetUserId());
	PG_TRY();
	{
		name = hash_search(table_of_names, key, HASH_ENTER, &found);
	}
	PG_CATCH();
	{
		dlock_queue_finish_slots(space, key, lock, false, 0);
		PG_RE_THROW();
	}
	PG_END_TRY();
	name->space = space;
	name->lock = lock;
	name->may_be_changed = name->changed = false;
	name->slots = 0;
	name->next = names;
	names = name;
	return name;
}

/* Show others that this transaction has something to do at its end. */
static void
show_setter(void)
{
	pg_atomic_write_u32(&dlock_my_backend->setter, GetTopTransactionId());
}

/*
 * If this transaction has overwritten rows of other transactions, those have
 * committed, but may not have changed the slots in memory yet.  Nothing blocks
 * them, so this transaction waits for them before its commit, and its change
 * comes last (I27).  A setter that is still in progress has written other
 * rows.
 */
static void
wait_for_setters(void)
{
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		TransactionId xid = pg_atomic_read_u32(&dlock_backends[i].setter);

		if (TransactionIdIsValid(xid) && !TransactionIdIsInProgress(xid))
			XactLockTableWait(xid, NULL, NULL, XLTW_None);
	}
}

/* Note that a row is about to be written, or is gone. */
static void
note_change(DlockSpace *space, const DlockKey *key, bool is_done)
{
	KeptName   *name;

	prepare_change();
	name = keep_name(space, key);
	show_setter();
	changes[num_changes++] = (Change)
	{
		.name = name,
		.is_done = is_done,
		.level = GetCurrentTransactionNestLevel()
	};
}

/* No other writes before this one's locks go, or has since the TRUNCATE. */
static void
note_truncate(DlockSpace *space)
{
	prepare_change();
	show_setter();
	changes[num_changes++] = (Change)
	{
		.emptied = space,
		.level = GetCurrentTransactionNestLevel()
	};
}

/* Note the former name of a row. */
static void
note_old_row(DlockSpace *space, TriggerData *trigger)
{
	DlockKey	key;

	(void) dlock_slots_take_row(space, trigger->tg_relation,
								trigger->tg_trigtuple, &key);
	note_change(space, &key, true);
}

void
dlock_slots_note(DlockSpace *space, const DlockKey *key)
{
	note_change(space, key, false);
}

/* Trigger on dlock_slots, after a change of a row, or of all */
PG_FUNCTION_INFO_V1(dlock_slots_changed);
Datum
dlock_slots_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_own_trigger(fcinfo, "dlock_slots_changed");
	DlockSpace *space;

	if (!dlock_session_attached)
		dlock_session_attach();
	space = dlock_current_space();
	/* not on a table that others can write to */
	if (!TRIGGER_FIRED_AFTER(trigger->tg_event) ||
		RelationGetRelid(trigger->tg_relation) !=
		dlock_find_relation(space, "dlock_slots"))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired after a change of table \"%s\"",
						"dlock_slots_changed", "dlock_slots")));
	if (TRIGGER_FIRED_FOR_ROW(trigger->tg_event))
		note_old_row(space, trigger);
	else if (TRIGGER_FIRED_BY_TRUNCATE(trigger->tg_event))
		note_truncate(space);
	return PointerGetDatum(NULL);
}

/* Was EXECUTE granted to a role of the current user, PUBLIC aside? */
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

/* Raise 42501 without a right to the name's reservation, or the function. */
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

/* Set a lock's slots from this transaction's commit on; 0: none are set. */
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
		/* tickets from before the restart have their memory, too */
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

/* The end of a transaction */

/* Which names have changed, or may have?  A TRUNCATE has changed all. */
static void
mark_changed(void)
{
	for (int i = 0; i < num_changes; i++)
	{
		KeptName   *name = changes[i].name;

		if (name && changes[i].is_done)
			name->changed = true;
		else if (name)
			name->may_be_changed = true;
		for (name = name ? NULL : names; name; name = name->next)
			name->changed |= name->space == changes[i].emptied;
	}
}

/* Read the rows of these names, before the commit. */
static void
read_changed(void)
{
	DlockSpace *space = NULL;
	Relation	table = NULL;
	bool		is_ours;

	mark_changed();
	CommandCounterIncrement();
	for (KeptName *name = names; name; name = name->next)
	{
		CHECK_FOR_INTERRUPTS();
		if (space != name->space)
		{
			if (table)
				relation_close(table, NoLock);
			space = name->space;
			table = dlock_slots_open(space);
		}
		if (table == NULL || !(name->changed || name->may_be_changed))
			continue;
		name->slots = dlock_slots_find(space, table, &name->key, &is_ours);
		name->changed |= is_ours;
	}
	if (table)
		relation_close(table, NoLock);
}

static bool
is_kept(const DlockKey *key)
{
	return table_of_names &&
		hash_search(table_of_names, key, HASH_FIND, NULL) != NULL;
}

static void
finish_changes(void)
{
	/* while names are kept: it leaves them alone */
	while (num_changes > 0)
	{
		DlockSpace *space = changes[--num_changes].emptied;

		if (space)
			dlock_queue_forget_slots(space, is_kept);
	}
	while (names)
	{
		KeptName   *name = names;

		names = name->next;
		dlock_queue_finish_slots(name->space, &name->key, name->lock,
								 name->changed, name->slots);
	}
	if (table_of_names)
		hash_destroy(table_of_names);
	table_of_names = NULL;
	pg_atomic_write_u32(&dlock_my_backend->setter, InvalidTransactionId);
}

static void
slots_at_xact_end(XactEvent event, void *arg)
{
	/* not after dlock_detach(), behind a rollback that was broken off */
	if (table_of_names == NULL || dlock_my_backend == NULL)
		return;
	switch (event)
	{
		case XACT_EVENT_PRE_PREPARE:
			if (num_changes > 0)
				ereport(ERROR,
						(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						 errmsg("cannot PREPARE a transaction that has set the slots of locks"),
						 errdetail("They take effect at the commit, which another session could make."),
						 errhint("Use COMMIT.")));
			break;
		case XACT_EVENT_PRE_COMMIT:
			if (num_changes > 0)
			{
				read_changed();
				wait_for_setters();
			}
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
			finish_changes();
			break;
		case XACT_EVENT_ABORT:
			num_changes = 0;
			for (KeptName *name = names; name; name = name->next)
				name->changed = false;
			finish_changes();
			break;
		default:
			break;
	}
}

/* A rollback to a savepoint forgets the changes since then. */
static void
slots_at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
			   SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		while (num_changes > 0 && changes[num_changes - 1].level >= level)
			num_changes--;
	}
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		for (int i = num_changes - 1; i >= 0 && changes[i].level >= level; i--)
			changes[i].level = level - 1;
	}
}
