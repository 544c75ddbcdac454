/*-------------------------------------------------------------------------
 *
 * tables.h
 *	  The tables on disk, and statements that run as their owner.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_TABLES_H
#define DLOCK_TABLES_H

#include "access/genam.h"
#include "access/htup.h"
#include "storage/lock.h"
#include "utils/relcache.h"
#include "utils/snapshot.h"

#include "shared/shared.h"

typedef enum DlockTable
{
	DLOCK_TABLE_QUEUE,
	DLOCK_TABLE_LEASES
} DlockTable;

/* Columns by position; see shape.c */
typedef enum DlockQueueColumn
{
	DLOCK_QUEUE_TICKET,
	DLOCK_QUEUE_NAME,
	DLOCK_QUEUE_LEASE,
	DLOCK_QUEUE_GRANTED,
	DLOCK_QUEUE_MODE,
	DLOCK_QUEUE_SLOTS,
	DLOCK_QUEUE_PERMITS,
	DLOCK_QUEUE_OWNER,
	DLOCK_QUEUE_INFO,
	DLOCK_QUEUE_CHANNEL,
	DLOCK_QUEUE_ROLE,
	DLOCK_QUEUE_ROLE_NAME,
	DLOCK_QUEUE_ENQUEUED_AT,
	DLOCK_QUEUE_GRANTED_AT,
	DLOCK_QUEUE_TTL,
	DLOCK_QUEUE_DURABILITY,
	DLOCK_QUEUE_SYSTEM,
	DLOCK_QUEUE_DATABASE,
	DLOCK_QUEUE_NUM_COLUMNS
} DlockQueueColumn;

typedef enum DlockLeaseColumn
{
	DLOCK_LEASE_LEASE,
	DLOCK_LEASE_TTL,
	DLOCK_LEASE_DELAY,
	DLOCK_LEASE_DELAYED,
	DLOCK_LEASE_INFO,
	DLOCK_LEASE_ROLE,
	DLOCK_LEASE_ROLE_NAME,
	DLOCK_LEASE_OPENED_AT,
	DLOCK_LEASE_DURABILITY,
	DLOCK_LEASE_SYSTEM,
	DLOCK_LEASE_DATABASE,
	DLOCK_LEASE_NUM_COLUMNS
} DlockLeaseColumn;

#define DLOCK_MAX_COLUMNS	DLOCK_QUEUE_NUM_COLUMNS

/* A row as read; the value of a null column is 0 */
typedef struct DlockStored
{
	Datum		values[DLOCK_MAX_COLUMNS];
	bool		nulls[DLOCK_MAX_COLUMNS];
	uint64		system;
	Oid			database;
	bool		is_foreign;		/* is it of another system or database? */
} DlockStored;

/* Rows of a table, in the order of their numbers */
typedef struct DlockStoredRows
{
	DlockStored *rows;			/* allocated by the caller */
	uint64		room;			/* rows that fit; doubled as needed */
	uint64		count;
	bool		complete;		/* true if no row follows */
} DlockStoredRows;

/* A row to be written */
typedef struct DlockImage
{
	DlockRecord *record;		/* the image has a reference */
	uint32		mark;
	bool		had_row;
	bool		over;			/* remove the row */
	bool		granted;
	bool		inherits;		/* for an heir that still waits (I17) */
	DlockMode	mode;			/* of a ticket */
	bool		shares;			/* this row makes the ticket shared (I18) */
	bool		delayed;		/* of a lease */
	int64		ttl;			/* of a lease, including a single lease */
	int			durability;		/* of the lease */
	TimestampTz granted_at;
	char		channel[NAMEDATALEN];
} DlockImage;

/* locked.c */
extern char *dlock_describe_holders(const LOCKTAG *tag, LOCKMODE mode);

/* write.c */
extern bool dlock_rows_begin(DlockSpace *space);
extern int	dlock_rows_write(const DlockImage *images, int count);
extern void dlock_rows_remove_dead(void);
extern void dlock_rows_commit(void);
extern Oid	dlock_rows_awaited(void);
extern bool dlock_rows_tell_of_lock(const char *database);

/* read.c */
extern Relation dlock_open_committed(DlockSpace *space, const char *name);
extern void dlock_close_committed(Relation table);
extern uint64 dlock_rows_estimate(DlockSpace *space, DlockTable which);
extern void dlock_rows_read(DlockSpace *space, DlockTable which, int64 behind,
							uint64 max, DlockStoredRows *rows);
extern SysScanDesc dlock_begin_name_scan(Relation relation, AttrNumber column,
										 const DlockKey *key,
										 Snapshot snapshot);
extern bool dlock_rows_have_name(DlockSpace *space, const DlockKey *key);

/* shape.c */
extern int	dlock_find_column(Relation relation, TupleDesc descriptor,
							  const char *name, Oid type);
extern Datum dlock_get_column(Relation relation, TupleDesc descriptor,
							  HeapTuple row, const char *name, Oid type);
extern void dlock_raise_named_row(Relation relation, const char *key,
								  const text *name, const char *column);
extern void dlock_rows_check(DlockSpace *space);

/* vacuum.c */
extern int	dlock_rows_vacuum(DlockSpace *space, void (*begin) (void));

/* slots.c */
extern int32 dlock_slots_take_row(DlockSpace *space, Relation table,
								  HeapTuple row, DlockKey *key);
extern void dlock_slots_for_each(DlockSpace *space, Relation table,
								 struct SnapshotData *snapshot,
								 void (*take) (DlockSpace *space,
											   const DlockKey *key,
											   int32 slots, Oid owner));
extern void dlock_slots_read(DlockSpace *space);
extern Relation dlock_slots_open(DlockSpace *space);
extern int32 dlock_slots_find(DlockSpace *space, Relation table,
							  const DlockKey *key);

/* load.c */
extern bool dlock_load(DlockSpace *space);
extern void dlock_load_failed(DlockSpace *space);
extern void dlock_load_raise_timeout(DlockSpace *space, const DlockKey *key);
extern bool dlock_load_all(DlockSpace *space, DlockTimeout timeout);
extern DlockSpace *dlock_loaded_space(void);
extern bool dlock_load_name(DlockSpace *space, const DlockKey *key,
							DlockTimeout timeout, bool *leased);

/* value.c */
extern const char *dlock_mode_name(DlockMode mode);
extern const char *dlock_scope_name(DlockScope scope);
extern bool dlock_mode_by_name(const char *name, DlockMode *mode);
extern Datum dlock_interval_datum(int64 microseconds);

/* owner.c */
extern void dlock_owner_check_parsed(const char *text,
									 const List *range_table);
extern uint64 dlock_execute_as_owner(DlockSpace *space, const char *name,
									 const char *statement, int num_values,
									 Oid *types, Datum *values, int64 *result);

#endif							/* DLOCK_TABLES_H */
