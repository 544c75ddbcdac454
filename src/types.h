/*-------------------------------------------------------------------------
 *
 * types.h
 *	  Types that all directories of src share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_TYPES_H
#define DLOCK_TYPES_H

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

/* What ends a ticket */
typedef enum DlockScope
{
	DLOCK_SESSION,
	DLOCK_TRANSACTION,
	DLOCK_LEASE					/* the ticket is a DlockLeaseTicket */
} DlockScope;

/* A name space; each installation of the extension gets a new, empty one */
typedef struct DlockSpaceKey
{
	Oid			database;
	Oid			extension;
} DlockSpaceKey;

/*
 * Key of the lock table.  "name" is not terminated.  Keys are hashed, compared
 * and copied by words, so zeros pad the name to whole words.  Bytes behind
 * these words are undefined, and the memory for them may be missing.
 */
typedef struct DlockKey
{
	DlockSpaceKey space;
	uint32		hash;			/* of the other members */
	uint16		length;			/* of the name, in bytes, 1 or more */
	uint16		zero;
	union
	{
		char		name[DLOCK_MAX_NAME + 1];
		uint64		words[(DLOCK_MAX_NAME + 1) / sizeof(uint64)];
	};
} DlockKey;

static inline unsigned int
dlock_name_words(unsigned int length)
{
	return (length + 7) / 8;
}

/*
 * A word of a name, padded as in a key.  It is assembled in a register,
 * because a load of a word stalls if its bytes were just stored.
 */
static inline uint64
dlock_name_word(const char *name, unsigned int length, unsigned int word)
{
	unsigned int rest = length - word * 8;
	uint64		result = 0;

	if (rest >= 8)
		memcpy(&result, name + word * 8, 8);
	else if (length >= 8)
	{
		/* read the last 8 bytes, and shift out the previous word's bytes */
		memcpy(&result, name + length - 8, 8);
#ifdef WORDS_BIGENDIAN
		result <<= (8 - rest) * 8;
#else
		result >>= (8 - rest) * 8;
#endif
	}
	else
	{
		for (unsigned int i = 0; i < rest; i++)
#ifdef WORDS_BIGENDIAN
			result |= (uint64) (unsigned char) name[i] << (7 - i) * 8;
#else
			result |= (uint64) (unsigned char) name[i] << i * 8;
#endif
	}
	return result;
}

/* Size of a key, without the unused end of the name */
static inline Size
dlock_key_size(const DlockKey *key)
{
	return offsetof(DlockKey, name) + dlock_name_words(key->length) * sizeof(uint64);
}

static inline bool
dlock_key_equal(const DlockKey *a, const DlockKey *b)
{
	if (a->hash != b->hash || a->length != b->length ||
		a->space.database != b->space.database ||
		a->space.extension != b->space.extension)
		return false;
	for (unsigned int w = 0; w < dlock_name_words(a->length); w++)
	{
		if (a->words[w] != b->words[w])
			return false;
	}
	return true;
}

static inline void
dlock_key_copy(DlockKey *to, const DlockKey *from)
{
	to->space = from->space;
	to->hash = from->hash;
	to->length = from->length;
	to->zero = 0;
	for (unsigned int w = 0; w < dlock_name_words(from->length); w++)
		to->words[w] = from->words[w];
}

/* shared/shmem.h */
typedef struct DlockLease DlockLease;
typedef struct DlockSpace DlockSpace;

#define ERRCODE_DLOCK_LOST	MAKE_SQLSTATE('5', '5', 'L', '0', '1')

/* Microseconds */
typedef int64 DlockTimeout;

#define DLOCK_WAIT_FOREVER	((DlockTimeout) -1)
#define DLOCK_NO_WAIT		((DlockTimeout) 0)

typedef struct DlockRequest
{
	DlockScope	scope;
	DlockMode	mode;
	int32		slots;			/* 0 unless mode is DLOCK_SLOTS */
	int32		permits;
	const char *info;			/* or NULL */
	const char *channel;		/* for the ticket's announcement; or NULL */
	DlockTimeout timeout;
	bool		without_snapshot;	/* wait without holding a snapshot */
	DlockLease *lease;			/* DLOCK_LEASE: the ticket's lease */
	const char *owner;			/* DLOCK_LEASE: argument "owner", or NULL */
	DlockKey	key;			/* last: callers zero all other members */
} DlockRequest;

typedef enum DlockOutcome
{
	DLOCK_ACQUIRED,
	DLOCK_BUSY,					/* not granted at once, and the timeout is 0 */
	DLOCK_TIMED_OUT,
	DLOCK_NOT_LOADED,			/* a row of the lock's name is not loaded */
	DLOCK_LOST					/* another process has ended the ticket */
} DlockOutcome;

#endif							/* DLOCK_TYPES_H */
