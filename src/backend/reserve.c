/*-------------------------------------------------------------------------
 *
 * reserve.c
 *	  Names that are reserved for a role.
 *
 * The longest reserved prefix of a name counts: only roles that have the
 * privileges of the prefix's owner may use the name.  Reservations are rows of
 * a table.  Each backend keeps a copy of the table.  With each change, a
 * trigger sends an invalidation, and the backends read the table again.  If
 * nothing is reserved, a call makes one comparison, otherwise one lookup for
 * each length that a reserved prefix has.
 *
 * A row has the owner's name, and the OID that this name had when the row was
 * written, or 0.  If name and OID do not agree, the role was dropped or
 * renamed.  Then only superusers may use the names until the next reservation.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relation.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "backend/held.h"
#include "tables/tables.h"

typedef struct Reservation
{
	DlockKey	prefix;			/* hash key, must be first */
	NameData	owner;
	Oid			role;			/* 0: no role had that name */
} Reservation;

static HTAB *reservations = NULL;
static int	longest_prefix = 0; /* 0: nothing is reserved */
static bool has_prefix[DLOCK_MAX_NAME + 1]; /* by length of the prefix */
static bool reservations_valid = false;
static Oid	reservations_table = InvalidOid;
static DlockSpace *reservations_space = NULL;

static void
forget_reservations(Datum arg, Oid relation)
{
	if (relation == InvalidOid || relation == reservations_table)
		reservations_valid = false;
}

static void
read_reservation(DlockSpace *space, Relation table, HeapTuple row)
{
	TupleDesc	columns = RelationGetDescr(table);
	text	   *prefix = DatumGetTextPP(dlock_get_column(table, columns, row,
														 "prefix", TEXTOID));
	int			length = VARSIZE_ANY_EXHDR(prefix);
	Datum		owner = dlock_get_column(table, columns, row, "owner", NAMEOID);
	Datum		role = dlock_get_column(table, columns, row, "role", OIDOID);
	DlockKey	key;
	Reservation *reservation;

	if (length == 0 || length > DLOCK_MAX_NAME)
		dlock_raise_named_row(table, "prefix", prefix, "prefix");
	dlock_key_fill(&key, space, VARDATA_ANY(prefix), length);
	reservation = hash_search(reservations, &key, HASH_ENTER, NULL);
	reservation->owner = *DatumGetName(owner);
	reservation->role = DatumGetObjectId(role);
	has_prefix[length] = true;
	longest_prefix = Max(longest_prefix, length);
}

static void
clear_reservations(void)
{
	HTAB	   *old = reservations;

	reservations = NULL;
	if (old)
		hash_destroy(old);
	reservations = dlock_held_make_table("dlock reservations",
										 sizeof(Reservation));
	longest_prefix = 0;
	memset(has_prefix, 0, sizeof(has_prefix));
}

/* Read the table: committed rows, and those of this transaction. */
static void
read_reservations(DlockSpace *space)
{
	static bool registered = false;
	Relation	table;
	Snapshot	snapshot;
	SysScanDesc scan;
	HeapTuple	row;

	if (!registered)
		CacheRegisterRelcacheCallback(forget_reservations, 0);
	registered = true;

	table = dlock_open_relation(space, "dlock_reservations", AccessShareLock);
	reservations_table = RelationGetRelid(table);
	reservations_space = space;
	/* set before the read, so that a change during the read clears it */
	reservations_valid = true;
	PG_TRY();
	{
		clear_reservations();
		dlock_check_permanent(table);
		snapshot = RegisterSnapshot(GetLatestSnapshot());
		scan = systable_beginscan(table, InvalidOid, false, snapshot, 0, NULL);
		while ((row = systable_getnext(scan)) != NULL)
			read_reservation(space, table, row);
		systable_endscan(scan);
		UnregisterSnapshot(snapshot);
	}
	PG_CATCH();
	{
		reservations_valid = false;
		PG_RE_THROW();
	}
	PG_END_TRY();
	relation_close(table, AccessShareLock);
}

/* Returns the reservation that counts for a name, or NULL. */
static const Reservation *
find_reservation(DlockSpace *space, const char *name, int length)
{
	DlockKey	prefix;
	const Reservation *reservation = NULL;

	if (!reservations_valid || space != reservations_space)
		read_reservations(space);
	for (int n = Min(length, longest_prefix); n > 0 && !reservation; n--)
	{
		if (!has_prefix[n])
			continue;
		dlock_key_fill(&prefix, space, name, n);
		reservation = hash_search(reservations, &prefix, HASH_FIND, NULL);
	}
	return reservation;
}

/* Does the role still exist, with the name that the row has? */
static bool
has_owner(const Reservation *reservation)
{
	return OidIsValid(reservation->role) &&
		get_role_oid(NameStr(reservation->owner), true) == reservation->role;
}

static bool
may_use(const Reservation *reservation)
{
	return reservation == NULL || superuser() ||
		(has_owner(reservation) &&
		 has_privs_of_role(GetUserId(), reservation->role));
}

/* Set the detail and hint of an error about names of another role. */
static int
explain_owner(const Reservation *reservation, const char *hint)
{
	const char *owner = NameStr(reservation->owner);

	if (has_owner(reservation))
	{
		errdetail("Names that begin with \"%.*s\" are reserved for role \"%s\".",
				  reservation->prefix.length, reservation->prefix.name, owner);
		return errhint("%s", hint);
	}
	if (OidIsValid(get_role_oid(owner, true)))
		errdetail("Names that begin with \"%.*s\" are reserved for an earlier role \"%s\", not for the role that has this name now.",
				  reservation->prefix.length, reservation->prefix.name, owner);
	else
		errdetail("Names that begin with \"%.*s\" are reserved for role \"%s\", which does not exist.",
				  reservation->prefix.length, reservation->prefix.name, owner);
	return errhint("Until a superuser has reserved them again, with dlock_reserve(), only superusers can use them.");
}

/* Raise 42501 if the current user may not use this name. */
void
dlock_reserve_check(DlockSpace *space, const DlockKey *key)
{
	const Reservation *reservation;

	if (likely(reservations_valid && longest_prefix == 0 &&
			   space == reservations_space))
		return;
	reservation = find_reservation(space, key->name, key->length);
	if (may_use(reservation))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for lock \"%.*s\"",
					key->length, key->name),
			 explain_owner(reservation,
						   "Use another name, or a role that has the privileges of that role.")));
}

/* Is the name reserved, and may the current user use it? */
bool
dlock_reserve_lets_in(DlockSpace *space, const DlockKey *key)
{
	const Reservation *reservation = find_reservation(space, key->name,
													  key->length);

	return reservation && may_use(reservation);
}

static void
check_prefix(const text *prefix)
{
	int			length = VARSIZE_ANY_EXHDR(prefix);

	if (length < 1 || length > DLOCK_MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("prefix must have between 1 and %d bytes, not %d",
						DLOCK_MAX_NAME, length),
				 errhint("It is compared with the beginning of names, byte by byte.")));
	/* as the encoding of names */
	(void) pg_verifymbstr(VARDATA_ANY(prefix), length, false);
}

/* Raise 42501 if the current user may not use names with this prefix. */
static void
check_owner(DlockSpace *space, const text *prefix)
{
	const Reservation *reservation = find_reservation(space,
													  VARDATA_ANY(prefix),
													  VARSIZE_ANY_EXHDR(prefix));

	if (!may_use(reservation))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for prefix \"%s\"",
						text_to_cstring(prefix)),
				 explain_owner(reservation,
							   "Use a role that has the privileges of that role.")));
}

/* Lock a prefix's row, before check_owner().  Returns false if it has none. */
static bool
lock_row(DlockSpace *space, text *prefix)
{
	Oid			types[] = {TEXTOID};
	Datum		values[] = {PointerGetDatum(prefix)};
	uint64		found;

	found = dlock_execute_as_owner(space, "dlock_reservations",
								   "SELECT FROM %s "
								   "WHERE prefix OPERATOR(pg_catalog.=) $1 FOR UPDATE",
								   1, types, values, NULL);
	AcceptInvalidationMessages();
	return found > 0;
}

/* Trigger: after the commit of a change, all backends read the table again. */
PG_FUNCTION_INFO_V1(dlock_reservations_changed);
Datum
dlock_reservations_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = dlock_own_trigger(fcinfo,
											 "dlock_reservations_changed");

	CacheInvalidateRelcache(trigger->tg_relation);
	return PointerGetDatum(NULL);
}

/* Returns the OID of the role with this name, or 0, for a generated column. */
PG_FUNCTION_INFO_V1(dlock_role_oid);
Datum
dlock_role_oid(PG_FUNCTION_ARGS)
{
	PG_RETURN_OID(PG_ARGISNULL(0) ? InvalidOid :
				  get_role_oid(NameStr(*PG_GETARG_NAME(0)), true));
}

/* Reserve the names with a prefix for an owner.  Replaces the old owner. */
void
dlock_reserve_add(DlockSpace *space, text *prefix, Oid owner)
{
	NameData	name;
	Oid			types[] = {TEXTOID, NAMEOID};
	Datum		values[] = {PointerGetDatum(prefix), (Datum) 0};
	bool		is_there;

	check_prefix(prefix);
	if (!SearchSysCacheExists1(AUTHOID, ObjectIdGetDatum(owner)))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role with OID %u does not exist", owner),
				 errhint("Give the name of a role.")));
	if (!has_privs_of_role(GetUserId(), owner))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied to reserve names for role \"%s\"",
						GetUserNameFromId(owner, false)),
				 errhint("Use a role that has the privileges of that role.")));
	namestrcpy(&name, GetUserNameFromId(owner, false));
	values[1] = NameGetDatum(&name);
	do
	{
		is_there = lock_row(space, prefix);
		check_owner(space, prefix);
		/* if another call has inserted a row, check the owner in that row */
	} while (dlock_execute_as_owner(space, "dlock_reservations", is_there ?
									"UPDATE %s SET owner = $2 "
									"WHERE prefix OPERATOR(pg_catalog.=) $1" :
									"INSERT INTO %s (prefix, owner) VALUES ($1, $2) "
									"ON CONFLICT (prefix) DO NOTHING",
									2, types, values, NULL) == 0 && !is_there);
}

/* End a reservation.  Returns false if the prefix was not reserved. */
bool
dlock_reserve_remove(DlockSpace *space, text *prefix)
{
	Oid			types[] = {TEXTOID};
	Datum		values[] = {PointerGetDatum(prefix)};

	check_prefix(prefix);
	(void) lock_row(space, prefix);
	check_owner(space, prefix);
	return dlock_execute_as_owner(space, "dlock_reservations",
								  "DELETE FROM %s WHERE prefix OPERATOR(pg_catalog.=) $1",
								  1, types, values, NULL) > 0;
}
