/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  Settings of the background processes.
 *
 * shared/launcher.c wakes the processes, and starts them by the names of their
 * main functions.
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
