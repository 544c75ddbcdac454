/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  What differs between PostgreSQL versions, newest first, and between
 *	  builds.
 *
 * Every test of PG_VERSION_NUM or USE_ASSERT_CHECKING in dlock stands here,
 * each with what changed.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_COMPAT_H
#define DLOCK_COMPAT_H

#include "catalog/index.h"
#include "executor/executor.h"
#include "lib/dshash.h"
#include "lib/ilist.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "replication/message.h"
#include "replication/origin.h"
#include "replication/syncrep.h"
#include "replication/walsender_private.h"
#include "storage/lock.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/ps_status.h"
/* 16: what looks into a text has a header of its own, which 19 no longer brings */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

#if PG_VERSION_NUM < 150000
#error "dlock needs PostgreSQL 15 or later"
#endif

/*
 * 19: a tranche gets its name in shared memory when its id is made; before,
 * every process that may print the name registers it.
 */
static inline int
compat_lwlock_new_tranche(const char *name)
{
#if PG_VERSION_NUM >= 190000
	return LWLockNewTrancheId(name);
#else
	return LWLockNewTrancheId();
#endif
}

static inline void
compat_lwlock_register_tranche(int tranche, const char *name)
{
#if PG_VERSION_NUM < 190000
	LWLockRegisterTranche(tranche, name);
#endif
}

/*
 * What this process writes from now on is marked as not to be replicated by
 * those who subscribe to what has no origin, as they can from 16 on.
 *
 * A commit with an origin has the time that is said here, in the WAL: that of
 * the commit on the server where it was made, which is this one.
 *
 * 19: the variables became members of a structure
 */
static inline void
compat_do_not_replicate(TimestampTz committed_at)
{
#if PG_VERSION_NUM >= 190000
	replorigin_xact_state.origin = DoNotReplicateId;
	replorigin_xact_state.origin_timestamp = committed_at;
#else
	replorigin_session_origin = DoNotReplicateId;
	replorigin_session_origin_timestamp = committed_at;
#endif
}

/* 18: a library tells its name and version, for pg_get_loaded_modules() */
#if PG_VERSION_NUM >= 180000
#define COMPAT_MODULE_MAGIC(name_, version_) \
	PG_MODULE_MAGIC_EXT(.name = (name_), .version = (version_))
#else
#define COMPAT_MODULE_MAGIC(name_, version_)	PG_MODULE_MAGIC
#endif

/* 18: the hook of ExecutorRun() lost an argument */
#if PG_VERSION_NUM >= 180000
#define COMPAT_EXECUTOR_RUN_PARAMETERS \
	QueryDesc *queryDesc, ScanDirection direction, uint64 count
#define COMPAT_EXECUTOR_RUN_ARGUMENTS	queryDesc, direction, count
#else
#define COMPAT_EXECUTOR_RUN_PARAMETERS \
	QueryDesc *queryDesc, ScanDirection direction, uint64 count, \
	bool execute_once
#define COMPAT_EXECUTOR_RUN_ARGUMENTS	queryDesc, direction, count, execute_once
#endif

/* 19: the hook of parse analysis cannot change this */
#if PG_VERSION_NUM >= 190000
#define COMPAT_JUMBLE_STATE	const JumbleState
#else
#define COMPAT_JUMBLE_STATE	JumbleState
#endif

/* 17: proc numbers and backend ids became one, with a variable of its own */
static inline int
compat_my_procno(void)
{
#if PG_VERSION_NUM >= 170000
	return MyProcNumber;
#else
	return MyProc->pgprocno;
#endif
}

static inline int
compat_procno(PGPROC *proc)
{
#if PG_VERSION_NUM >= 170000
	return GetNumberFromPGProc(proc);
#else
	return proc->pgprocno;
#endif
}

/*
 * Write a record that means nothing to the WAL; returns where it ends.
 *
 * 17: the function can flush, too
 */
static inline XLogRecPtr
compat_log_message(const char *prefix)
{
#if PG_VERSION_NUM >= 170000
	return LogLogicalMessage(prefix, "", 0, false, false);
#else
	return LogLogicalMessage(prefix, "", 0, false);
#endif
}

/*
 * Are there standbys whose answers commits wait for?  As SyncRepWaitForLSN()
 * sees it: in shared memory, once it is there.
 *
 * 18, and minor releases before: the flag got a companion that tells so
 */
static inline bool
compat_sync_standbys_defined(void)
{
#ifdef SYNC_STANDBY_DEFINED
	if (WalSndCtl->sync_standbys_status & SYNC_STANDBY_INIT)
		return (WalSndCtl->sync_standbys_status & SYNC_STANDBY_DEFINED) != 0;
	return SyncRepStandbyNames != NULL && SyncRepStandbyNames[0] != '\0';
#else
	return WalSndCtl->sync_standbys_defined;
#endif
}

/* 17: dshash takes a function that copies keys */
#if PG_VERSION_NUM >= 170000
#define COMPAT_DSHASH_HAS_COPY
#define COMPAT_DSHASH_COPY(function)	.copy_function = (function),
#else
#define COMPAT_DSHASH_COPY(function)
#endif

/* 17: intervals can be infinite */
#if PG_VERSION_NUM >= 170000
#define COMPAT_INTERVAL_NOT_FINITE(interval)	INTERVAL_NOT_FINITE(interval)
#else
#define COMPAT_INTERVAL_NOT_FINITE(interval)	false
#endif

/*
 * Has this transaction given a relation a new file?  By the first one, which
 * PostgreSQL keeps in mind also where a later one is rolled back to a savepoint.
 *
 * 16: files are told apart by numbers of their own, and locators
 */
#if PG_VERSION_NUM >= 160000
#define COMPAT_HAS_NEW_FILE(relation) \
	((relation)->rd_firstRelfilelocatorSubid != InvalidSubTransactionId)
#else
#define COMPAT_HAS_NEW_FILE(relation) \
	((relation)->rd_firstRelfilenodeSubid != InvalidSubTransactionId)
#endif

/*
 * Heavyweight locks, as the lock manager links them.  Each of these gives the
 * first element, or the one after another one, or NULL behind the last; the
 * caller holds the lock of the partition.
 *
 * 16: shared-memory queues became doubly linked lists
 */
#if PG_VERSION_NUM >= 160000
static inline dlist_node *
compat_dlist_next(dlist_head *list, dlist_node *node)
{
	if (node == NULL)
		return dlist_is_empty(list) ? NULL : dlist_head_node(list);
	return dlist_has_next(list, node) ? dlist_next_node(list, node) : NULL;
}
#endif

/* Who holds a lock, or waits for it */
static inline PROCLOCK *
compat_next_of_lock(LOCK *lock, PROCLOCK *before)
{
#if PG_VERSION_NUM >= 160000
	dlist_node *node = compat_dlist_next(&lock->procLocks,
										 before ? &before->lockLink : NULL);

	return node ? dlist_container(PROCLOCK, lockLink, node) : NULL;
#else
	return (PROCLOCK *) SHMQueueNext(&lock->procLocks,
									 before ? &before->lockLink :
									 &lock->procLocks,
									 offsetof(PROCLOCK, lockLink));
#endif
}

/*
 * Who waits for a lock, in the order of its queue
 *
 * 19: a process is in a lock's queue by a link of its own
 */
#if PG_VERSION_NUM >= 190000
#define COMPAT_WAIT_LINK	waitLink
#else
#define COMPAT_WAIT_LINK	links
#endif

static inline PGPROC *
compat_next_waiter(LOCK *lock, PGPROC *before)
{
#if PG_VERSION_NUM >= 160000
	dlist_node *node = compat_dlist_next(&lock->waitProcs.dlist,
										 before ? &before->COMPAT_WAIT_LINK : NULL);

	return node ? dlist_container(PGPROC, COMPAT_WAIT_LINK, node) : NULL;
#else
	return (PGPROC *) SHMQueueNext(&lock->waitProcs.links,
								   before ? &before->links :
								   &lock->waitProcs.links,
								   offsetof(PGPROC, links));
#endif
}

/* What a process holds or waits for in a partition */
static inline PROCLOCK *
compat_next_of_proc(PGPROC *proc, int partition, PROCLOCK *before)
{
#if PG_VERSION_NUM >= 160000
	dlist_node *node = compat_dlist_next(&proc->myProcLocks[partition],
										 before ? &before->procLink : NULL);

	return node ? dlist_container(PROCLOCK, procLink, node) : NULL;
#else
	return (PROCLOCK *) SHMQueueNext(&proc->myProcLocks[partition],
									 before ? &before->procLink :
									 &proc->myProcLocks[partition],
									 offsetof(PROCLOCK, procLink));
#endif
}

/*
 * Does this backend have nothing there?  That may be asked without the lock of
 * the partition, and be out of date then.
 */
static inline bool
compat_has_none_in_partition(int partition)
{
#if PG_VERSION_NUM >= 160000
	return dlist_is_empty(&MyProc->myProcLocks[partition]);
#else
	return SHMQueueEmpty(&MyProc->myProcLocks[partition]);
#endif
}

/*
 * 16: the process title can be given a suffix, and loses it again.  Before,
 * lock.c copied and restored the whole title, and so does this.
 */
typedef struct CompatPsSuffix
{
#if PG_VERSION_NUM >= 160000
	bool		set;
#else
	char	   *title;			/* what to restore, or NULL */
#endif
} CompatPsSuffix;

static inline void
compat_ps_suffix_set(CompatPsSuffix *saved, const char *suffix)
{
#if PG_VERSION_NUM >= 160000
	saved->set = true;
	set_ps_display_suffix(suffix);
#else
	saved->title = NULL;
	if (update_process_title)
	{
		int			length;
		const char *title = get_ps_display(&length);
		char	   *waiting = palloc(length + strlen(suffix) + 2);

		saved->title = pnstrdup(title, length);
		sprintf(waiting, "%s %s", saved->title, suffix);
		set_ps_display(waiting);
		pfree(waiting);
	}
#endif
}

static inline void
compat_ps_suffix_remove(CompatPsSuffix *saved)
{
#if PG_VERSION_NUM >= 160000
	if (saved->set)
		set_ps_display_remove_suffix();
	saved->set = false;
#else
	if (saved->title)
	{
		set_ps_display(saved->title);
		pfree(saved->title);
		saved->title = NULL;
	}
#endif
}

/*
 * SyncRepWaitForLSN() works for several who wait for the same position, but
 * asserts that there are none: where assertions count, each needs one of its
 * own.
 */
#ifdef USE_ASSERT_CHECKING
#define COMPAT_SYNC_REP_TAKES_NO_EQUALS	true
#else
#define COMPAT_SYNC_REP_TAKES_NO_EQUALS	false
#endif

/*
 * What is between these two raises no error, so that what it changes is never
 * left half changed: where assertions count, an error there is a PANIC.
 */
#ifdef USE_ASSERT_CHECKING
#define COMPAT_CHECKS			/* functions that check invariants */
#define COMPAT_NO_ERROR_BEGIN()	START_CRIT_SECTION()
#define COMPAT_NO_ERROR_END()	END_CRIT_SECTION()
#else
#define COMPAT_NO_ERROR_BEGIN()	((void) 0)
#define COMPAT_NO_ERROR_END()	((void) 0)
#endif

/* Ask for memory that will be read soon, where the compiler knows how */
#ifdef __GNUC__
#define compat_prefetch(address)	__builtin_prefetch(address)
#else
#define compat_prefetch(address)	((void) (address))
#endif

#endif							/* DLOCK_COMPAT_H */
