/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  Settings of the background processes.
 *
 * No room calls them: they are started by their functions' names, and woken
 * through shared/launcher.c.
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
