/*-------------------------------------------------------------------------
 *
 * tables.h
 *	  What the tables dlock_queue and dlock_queue_lease look like, for all who
 *	  read or write them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_TABLES_H
#define DLOCK_TABLES_H

#include "access/htup.h"

#include "dlock.h"

typedef enum DlockTable
{
	DLOCK_TABLE_QUEUE,
	DLOCK_TABLE_LEASES
} DlockTable;

#define DLOCK_NUM_TABLES	2

/* Columns of dlock_queue, as rows.c describes them in "shapes" */
typedef enum DlockQueueColumn
{
	DLOCK_QUEUE_TICKET,
	DLOCK_QUEUE_NAME,
	DLOCK_QUEUE_LEASE,
	DLOCK_QUEUE_GRANTED,
	DLOCK_QUEUE_DELAYED,		/* in a table of version 1.0; always false */
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

/* Columns of dlock_queue_lease */
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

/* The columns of a row; where one is null that may be, the value is 0 */
typedef struct DlockStored
{
	Datum		values[DLOCK_MAX_COLUMNS];
	bool		nulls[DLOCK_MAX_COLUMNS];
	bool		is_foreign;		/* of another system or database */
} DlockStored;

/* Rows of a table, in the order of their numbers */
typedef struct DlockStoredRows
{
	DlockStored *rows;
	uint64		count;
	bool		complete;		/* no others come behind them */
} DlockStoredRows;

/* rows.c */
extern void dlock_rows_read(DlockSpace *space, DlockTable which, int64 behind,
							uint64 max, DlockStoredRows *rows);
extern bool dlock_rows_have_name(DlockSpace *space, const DlockKey *key);
extern void dlock_rows_check(DlockSpace *space);

#endif							/* DLOCK_TABLES_H */
