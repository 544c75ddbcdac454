/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  Settings of the background processes.
 *
 * The processes are started by the names of their functions, and woken through
 * shared/launcher.c.
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
