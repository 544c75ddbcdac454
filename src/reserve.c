/*-------------------------------------------------------------------------
 *
 * reserve.c
 *	  Names that are kept for a role.
 *
 * A reservation keeps all names that begin with its prefix for the roles that
 * have the privileges of its owner; of several that fit, the longest counts.
 * They are rows of a table.  Each backend keeps a copy, and reads the table
 * again after an invalidation of the table's entry in the relation cache,
 * which every change of a reservation sends along with its transaction.  So
 * where nothing is reserved a call pays for one comparison.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "dlock.h"

typedef struct Reservation
{
	Oid			owner;
	int			length;			/* of the prefix, in bytes */
	char		prefix[DLOCK_MAX_NAME];
} Reservation;

static Reservation *reservations = NULL;
static int	num_reservations = 0;
static int	max_reservations = 0;
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
read_reservation(Relation table, HeapTuple row, Reservation *reservation)
{
	TupleDesc	columns = RelationGetDescr(table);
	bool		is_null;
	text	   *prefix = DatumGetTextPP(heap_getattr(row, 1, columns, &is_null));

	reservation->length = Min(VARSIZE_ANY_EXHDR(prefix), DLOCK_MAX_NAME);
	memcpy(reservation->prefix, VARDATA_ANY(prefix), reservation->length);
	reservation->owner = DatumGetObjectId(heap_getattr(row, 2, columns, &is_null));
}

static void
make_room(void)
{
	int			max = Max(8, 2 * max_reservations);
	Size		size = (Size) max * sizeof(Reservation);

	if (num_reservations < max_reservations)
		return;
	reservations = reservations == NULL ?
		MemoryContextAlloc(TopMemoryContext, size) :
		repalloc_huge(reservations, size);
	max_reservations = max;
}

/* Read the table, with what is committed now and what this transaction did. */
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

	table = table_open(dlock_relation(space, "dlock_reservations"),
					   AccessShareLock);
	reservations_table = RelationGetRelid(table);
	reservations_space = space;
	num_reservations = 0;
	/* set before the table is read: a change during that is not missed */
	reservations_valid = true;
	PG_TRY();
	{
		snapshot = RegisterSnapshot(GetLatestSnapshot());
		scan = systable_beginscan(table, InvalidOid, false, snapshot, 0, NULL);
		while ((row = systable_getnext(scan)) != NULL)
		{
			make_room();
			read_reservation(table, row, &reservations[num_reservations++]);
		}
		systable_endscan(scan);
		UnregisterSnapshot(snapshot);
	}
	PG_CATCH();
	{
		reservations_valid = false;
		PG_RE_THROW();
	}
	PG_END_TRY();
	table_close(table, AccessShareLock);
}

/* The reservation that counts for a name; NULL where it is free for all. */
static const Reservation *
find_reservation(DlockSpace *space, const char *name, int length)
{
	const Reservation *longest = NULL;

	if (!reservations_valid || space != reservations_space)
		read_reservations(space);
	for (int i = 0; i < num_reservations; i++)
	{
		const Reservation *reservation = &reservations[i];

		if (reservation->length <= length &&
			memcmp(reservation->prefix, name, reservation->length) == 0 &&
			(longest == NULL || reservation->length > longest->length))
			longest = reservation;
	}
	return longest;
}

static bool
may_use(const Reservation *reservation)
{
	return reservation == NULL ||
		has_privs_of_role(GetUserId(), reservation->owner);
}

/*
 * May the current user use this name?  Raises 42501 if not.
 */
void
dlock_reserve_check(DlockSpace *space, const DlockKey *key)
{
	const Reservation *reservation;

	if (likely(reservations_valid && num_reservations == 0 &&
			   space == reservations_space))
		return;
	reservation = find_reservation(space, key->name, key->length);
	if (may_use(reservation))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("permission denied for lock \"%.*s\"",
					key->length, key->name),
			 errdetail("Names that begin with \"%.*s\" are reserved for role \"%s\".",
					   reservation->length, reservation->prefix,
					   GetUserNameFromId(reservation->owner, true)),
			 errhint("Use another name, or a role that has the privileges of that role.")));
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
}

/* Only those who may use a name already may change whose it is. */
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
				 errdetail("Names that begin with \"%.*s\" are reserved for role \"%s\".",
						   reservation->length, reservation->prefix,
						   GetUserNameFromId(reservation->owner, true)),
				 errhint("Use a role that has the privileges of that role.")));
}

/* Let all backends read the table again once this transaction has committed. */
static void
invalidate(void)
{
	CacheInvalidateRelcacheByRelid(reservations_table);
}

/*
 * Keep the names with a prefix for an owner, instead of the one they may be
 * kept for by now.
 */
void
dlock_reserve_add(DlockSpace *space, text *prefix, Oid owner)
{
	Oid			types[] = {TEXTOID, OIDOID};
	Datum		values[] = {PointerGetDatum(prefix), ObjectIdGetDatum(owner)};

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
	check_owner(space, prefix);
	(void) dlock_execute_as_owner(space, "dlock_reservations",
								  "INSERT INTO %s (prefix, owner) VALUES ($1, $2) "
								  "ON CONFLICT (prefix) DO UPDATE SET owner = excluded.owner",
								  2, types, values, NULL);
	invalidate();
}

/* Give the names with a prefix free; false where they were not reserved. */
bool
dlock_reserve_remove(DlockSpace *space, text *prefix)
{
	Oid			types[] = {TEXTOID};
	Datum		values[] = {PointerGetDatum(prefix)};
	uint64		removed;

	check_prefix(prefix);
	check_owner(space, prefix);
	removed = dlock_execute_as_owner(space, "dlock_reservations",
									 "DELETE FROM %s WHERE prefix OPERATOR(pg_catalog.=) $1",
									 1, types, values, NULL);
	invalidate();
	return removed > 0;
}
