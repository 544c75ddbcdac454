/*-------------------------------------------------------------------------
 *
 * dlock.h
 *	  The types that all of dlock shares.
 *
 * Functions are declared by the room that has them: backend/backend.h,
 * worker/worker.h, tables/tables.h, shared/shared.h.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_H
#define DLOCK_H

#include "fmgr.h"

#include "compat.h"

#define DLOCK_MAX_NAME		255 /* bytes in a lock's name */
#define DLOCK_MAX_INFO		1024	/* bytes in a ticket's info */
#define DLOCK_MIN_TTL	INT64CONST(100000)	/* of a lease, in microseconds */
#define DLOCK_MAX_TICKET	((INT64CONST(1) << 53) - 1)

typedef enum DlockMode
{
	DLOCK_EXCLUSIVE,
	DLOCK_SHARED,
	DLOCK_SLOTS
} DlockMode;

/* What a ticket lives and dies with */
typedef enum DlockScope
{
	DLOCK_SESSION,
	DLOCK_TRANSACTION,
	DLOCK_LEASE					/* the ticket is a DlockLeaseTicket's */
} DlockScope;

/*
 * Where a name belongs: one space per database and installation of the
 * extension, so that a re-created extension starts empty.
 */
typedef struct DlockSpaceKey
{
	Oid			database;
	Oid			extension;
} DlockSpaceKey;

/*
 * Key of the lock table.  "name" is not terminated, and the bytes behind
 * "length" mean nothing: keys are compared up to there.
 */
typedef struct DlockKey
{
	DlockSpaceKey space;
	uint32		hash;			/* of all the rest */
	uint16		length;			/* of the name, in bytes, 1 or more */
	char		name[DLOCK_MAX_NAME];
} DlockKey;

static inline bool
dlock_key_equal(const DlockKey *a, const DlockKey *b)
{
	return memcmp(a, b, offsetof(DlockKey, name)) == 0 &&
		memcmp(a->name, b->name, a->length) == 0;
}

static inline void
dlock_key_copy(DlockKey *to, const DlockKey *from)
{
	memcpy(to, from, offsetof(DlockKey, name) + from->length);
}

/* shared/shmem.h */
typedef struct DlockLease DlockLease;
typedef struct DlockSpace DlockSpace;

#define ERRCODE_DLOCK_LOST	MAKE_SQLSTATE('5', '5', 'L', '0', '1')

/* How long to wait, in microseconds */
typedef int64 DlockTimeout;

#define DLOCK_WAIT_FOREVER	((DlockTimeout) -1)
#define DLOCK_NO_WAIT		((DlockTimeout) 0)

/* What a caller asks for */
typedef struct DlockRequest
{
	DlockScope	scope;
	DlockMode	mode;
	int32		slots;			/* 0 unless mode is DLOCK_SLOTS */
	int32		permits;
	const char *info;			/* or NULL */
	const char *channel;		/* announce the grant there, or NULL */
	DlockTimeout timeout;
	bool		without_snapshot;	/* wait without holding a snapshot */
	DlockLease *lease;			/* DLOCK_LEASE: who is to have the ticket */
	const char *owner;			/* ... and for whom, or NULL */
	DlockKey	key;			/* last: only what is before needs zeroing */
} DlockRequest;

typedef enum DlockOutcome
{
	DLOCK_ACQUIRED,
	DLOCK_BUSY,					/* not granted at once, no wait wanted */
	DLOCK_TIMED_OUT,
	DLOCK_LOST					/* somebody has ended the ticket */
} DlockOutcome;

#endif							/* DLOCK_H */
