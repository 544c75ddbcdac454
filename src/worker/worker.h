/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  The background processes, as the rest of dlock sees them: settings.
 *
 * Nothing calls them: they are started by their functions' names, and woken
 * (shared/launcher.c).
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
