/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  What differs between PostgreSQL versions, and between builds.
 *
 * Only this file tests PG_VERSION_NUM and USE_ASSERT_CHECKING.
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
#include "replication/syncrep.h"
#include "replication/walsender_private.h"
#include "storage/lock.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/guc.h"
#include "utils/ps_status.h"
/* 16: varatt.h is new; from 19 on, no header above includes it */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

#if PG_VERSION_NUM < 150000
#error "dlock needs PostgreSQL 15 or later"
#endif

/* 19: a tranche's name is shared; before 19, each process registers it */
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

/* 18: pg_get_loaded_modules() shows the library's name and version */
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

/* 19: the hook of parse analysis must not change the JumbleState */
#if PG_VERSION_NUM >= 190000
#define COMPAT_JUMBLE_STATE	const JumbleState
#else
#define COMPAT_JUMBLE_STATE	JumbleState
#endif

/* 17: proc numbers replaced backend IDs; MyProcNumber is new */
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

/* 17: LogLogicalMessage() has one more argument, to flush the record */
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
 * 18, and 15.13, 16.9 and 17.5: two flags replaced a boolean, in the same byte.
 * A library can run on another minor release than the one whose headers it was
 * compiled with, so the running server decides, not the headers.
 */
#ifdef SYNC_STANDBY_DEFINED
#define COMPAT_SYNC_STANDBYS	sync_standbys_status
#else
#define COMPAT_SYNC_STANDBYS	sync_standbys_defined
#endif

static inline bool
compat_server_has_flags(void)
{
	static int	server = 0;

	if (server == 0)
		server = atoi(GetConfigOption("server_version_num", false, false));
	return server >= 180000 ||
		server % 10000 >= (server < 160000 ? 13 : server < 170000 ? 9 : 5);
}

static inline bool
compat_sync_standbys_defined(void)
{
	const uint8 init = 1 << 0;
	const uint8 defined = 1 << 1;
	uint8		status = *(volatile uint8 *) &WalSndCtl->COMPAT_SYNC_STANDBYS;

	if (!compat_server_has_flags())
		return status != 0;
	if (status & init)
		return (status & defined) != 0;
	return SyncRepStandbyNames != NULL && SyncRepStandbyNames[0] != '\0';
}

/* 17: dshash takes a function that copies keys */
#if PG_VERSION_NUM >= 170000
#define COMPAT_DSHASH_COPY(function)	.copy_function = (function),
#else
#define COMPAT_DSHASH_COPY(function)
#endif

/*
 * Has this transaction given a relation a new file?  This stays true if a
 * rollback to a savepoint undoes a later change of the file.
 *
 * 16: relfilenodes became relfilenumbers and locators
 */
#if PG_VERSION_NUM >= 160000
#define COMPAT_HAS_NEW_FILE(relation) \
	((relation)->rd_firstRelfilelocatorSubid != InvalidSubTransactionId)
#else
#define COMPAT_HAS_NEW_FILE(relation) \
	((relation)->rd_firstRelfilenodeSubid != InvalidSubTransactionId)
#endif

/* 16: shared-memory queues became doubly linked lists */
#if PG_VERSION_NUM >= 160000
#define COMPAT_QUEUE			dlist_head
#define COMPAT_QUEUE_LINK		dlist_node
#define COMPAT_WAITERS(lock)	(&(lock)->waitProcs.dlist)
#else
#define COMPAT_QUEUE			SHM_QUEUE
#define COMPAT_QUEUE_LINK		SHM_QUEUE
#define COMPAT_WAITERS(lock)	(&(lock)->waitProcs.links)
#endif

/*
 * Returns the element of a lock manager's list after "link", or, if "link" is
 * NULL, the first.  At the end, returns NULL.  The partition must be locked.
 */
static inline void *
compat_queue_next(COMPAT_QUEUE *list, COMPAT_QUEUE_LINK *link, Size offset)
{
#if PG_VERSION_NUM >= 160000
	dlist_node *next = link ? link->next : list->head.next;

	return next == NULL || next == &list->head ? NULL : (char *) next - offset;
#else
	return SHMQueueNext(list, link ? link : list, offset);
#endif
}

/* The next holder or waiter of a lock */
static inline PROCLOCK *
compat_next_of_lock(LOCK *lock, PROCLOCK *before)
{
	return compat_queue_next(&lock->procLocks,
							 before ? &before->lockLink : NULL,
							 offsetof(PROCLOCK, lockLink));
}

/* 19: a process has a separate link for a lock's queue */
#if PG_VERSION_NUM >= 190000
#define COMPAT_WAIT_LINK	waitLink
#else
#define COMPAT_WAIT_LINK	links
#endif

static inline PGPROC *
compat_next_waiter(LOCK *lock, PGPROC *before)
{
	return compat_queue_next(COMPAT_WAITERS(lock),
							 before ? &before->COMPAT_WAIT_LINK : NULL,
							 offsetof(PGPROC, COMPAT_WAIT_LINK));
}

/* The next lock that a process holds or waits for, in one partition */
static inline PROCLOCK *
compat_next_of_proc(PGPROC *proc, int partition, PROCLOCK *before)
{
	return compat_queue_next(&proc->myProcLocks[partition],
							 before ? &before->procLink : NULL,
							 offsetof(PROCLOCK, procLink));
}

/*
 * Add a suffix to the process title.  The caller must give the result to
 * compat_ps_suffix_remove().  Before 16, titles are copied, as in lock.c.
 */
static inline char *
compat_ps_suffix_set(const char *suffix)
{
	char	   *title = NULL;

#if PG_VERSION_NUM >= 160000
	set_ps_display_suffix(suffix);
#else
	if (update_process_title)
	{
		int			length;
		const char *shown = get_ps_display(&length);
		char	   *longer = psprintf("%.*s %s", length, shown, suffix);

		title = pnstrdup(longer, length);
		set_ps_display(longer);
		pfree(longer);
	}
#endif
	return title;
}

static inline void
compat_ps_suffix_remove(char *title)
{
#if PG_VERSION_NUM >= 160000
	set_ps_display_remove_suffix();
#else
	if (title)
	{
		set_ps_display(title);
		pfree(title);
	}
#endif
}

/* SyncRepWaitForLSN() asserts that processes wait for different positions. */
#ifdef USE_ASSERT_CHECKING
#define COMPAT_SYNC_REP_TAKES_NO_EQUALS	true
#else
#define COMPAT_SYNC_REP_TAKES_NO_EQUALS	false
#endif

/* Make an error between BEGIN and END a PANIC: a change would be half done. */
#ifdef USE_ASSERT_CHECKING
#define COMPAT_CHECKS			/* compile the checks of invariants */
#define COMPAT_NO_ERROR_BEGIN()	START_CRIT_SECTION()
#define COMPAT_NO_ERROR_END()	END_CRIT_SECTION()
#else
#define COMPAT_NO_ERROR_BEGIN()	((void) 0)
#define COMPAT_NO_ERROR_END()	((void) 0)
#endif

/* Prefetch memory that will be read soon, if the compiler can. */
#ifdef __GNUC__
#define compat_prefetch(address)	__builtin_prefetch(address)
#else
#define compat_prefetch(address)	((void) (address))
#endif

#endif							/* DLOCK_COMPAT_H */
