/*-------------------------------------------------------------------------
 *
 * process.h
 *	  The common part of dlock's background processes.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_PROCESS_H
#define DLOCK_PROCESS_H

#include "shared/shared.h"

/* The default lock_timeout */
#define DLOCK_LOCK_TIMEOUT	"1s"

/* lock_timeout of a process for which other processes wait */
#define DLOCK_SHORT_LOCK_TIMEOUT	"20ms"

/* How long a process stays when it has nothing to do */
#define DLOCK_IDLE_MS	1000

/* A task that is retried if it fails */
typedef struct DlockTask
{
	const char *what;			/* for the log, like "sending ..." */
	bool		(*perform) (void);	/* returns true if more is left to do */
	void		(*failed) (int code);	/* gets the SQLSTATE; can be NULL */
	/* logs the processes that lock a table, or returns false; can be NULL */
	bool		(*tell_of_lock) (const char *database);
	long		max_retry_ms;	/* longest pause after an error; 0: default */
	long		patience_ms;	/* how long lock timeouts go unreported */

	/* state */
	uint64		next_try;		/* monotonic microseconds; 0: at once */
	long		retry_ms;		/* next pause; 0: the shortest */
	uint64		patience_ends;	/* 0: no lock timeout yet */
	int			code;			/* SQLSTATE of the last report; 0: none */
	uint32		told;			/* reports with this code in a row */
	uint64		told_at;		/* time of the last report */
} DlockTask;

/* process.c */
extern DlockSpace *dlock_process_begin(DlockOffice office,
									   pqsigfunc terminate);
extern void dlock_process_signals(void);
extern bool dlock_process_gives_way(void);
extern bool dlock_process_is_in_the_way(void);
extern bool dlock_process_server_stops(void);
extern void dlock_process_lock_timeout(const char *timeout);
extern bool dlock_error_is_lock(int code);
extern uint64 dlock_task_perform(DlockTask *task);
extern void dlock_process_sleep(uint64 until);

/* notify.c */
extern bool dlock_notify_send(DlockSpace *space);
extern uint64 dlock_notify_next(void);

#endif							/* DLOCK_PROCESS_H */
