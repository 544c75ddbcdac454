/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  Settings of the background processes.
 *
 * shared/launcher.c starts the processes, by the names of their functions, and
 * wakes them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_WORKER_H
#define DLOCK_WORKER_H

/* expiry.c */
extern bool dlock_log_expirations;

/* worker.c */
extern int	dlock_worker_idle_timeout;	/* milliseconds */

#endif							/* DLOCK_WORKER_H */
