/*-------------------------------------------------------------------------
 *
 * process.h
 *	  What the background processes of dlock have in common.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_PROCESS_H
#define DLOCK_PROCESS_H

#include "shared/shared.h"

/* How long a lock is waited for where nothing else is said */
#define DLOCK_LOCK_TIMEOUT	"1s"

/* The same where others wait for this process meanwhile */
#define DLOCK_SHORT_LOCK_TIMEOUT	"20ms"

/* How long a process stays when nothing is left to do */
#define DLOCK_IDLE_MS	1000

/* What can fail, and is tried again */
typedef struct DlockTask
{
	const char *what;			/* that it does: for the log */
	bool		(*perform) (void);	/* returns whether there is more to do */
	void		(*failed) (int code);	/* told of the SQLSTATE, or NULL */
	bool		(*tell_of_lock) (void); /* in place of the error of a lock that
										 * could not be had, to the log: false
										 * where it has nothing to say; or NULL */
	long		max_retry_ms;	/* the longest pause after an error */
	long		patience_ms;	/* so long, a lock that cannot be had in time is
								 * no error; 0: it is like others */

	/* where it stands */
	uint64		next_try;		/* monotonic microseconds; 0: at once */
	long		retry_ms;		/* the next pause; 0: the first one */
	uint64		locked_since;	/* since it cannot have a lock, or since that was
								 * logged; 0: it can */
	uint64		told_at;
	long		silence_ms;
} DlockTask;

/* process.c */
extern const char *dlock_process_database(void);
extern DlockSpace *dlock_process_begin(DlockOffice office);
extern void dlock_process_signals(void);
extern bool dlock_process_gives_way(void);
extern bool dlock_process_is_in_the_way(void);
extern bool dlock_process_server_stops(void);
extern void dlock_process_lock_timeout(const char *timeout);
extern bool dlock_error_is_lock(int code);
extern uint64 dlock_task_perform(DlockTask *task);
extern long dlock_milliseconds_until(uint64 moment);

/* notify.c */
extern bool dlock_notify_send(DlockSpace *space);
extern uint64 dlock_notify_next(void);

#endif							/* DLOCK_PROCESS_H */
