/*-------------------------------------------------------------------------
 *
 * driver.h
 *	  The interface between the driver and a peer.
 *
 * A lock is a number as text, which all peers accept.  Each session is used by
 * one thread.  A function that fails ends the driver.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DRIVER_H
#define DRIVER_H

typedef struct Peer
{
	const char *name;
	/* a session for one client; kind is the name above */
	void	   *(*connect) (const char *kind);
	/* returns when the session has the lock */
	void		(*acquire) (void *session, const char *lock);
	void		(*release) (void *session, const char *lock);
	/* acquire, change the row with that id in PostgreSQL, release */
	void		(*work) (void *session, const char *lock, const char *row);
} Peer;

/* each array ends with an entry without a name */
extern const Peer postgres_peers[];
extern const Peer redis_peers[];

extern void die(const char *what, const char *message);

/* The lock is busy: sleep for about POLL_US before the next try. */
extern void pause_before_retry(void);

#endif							/* DRIVER_H */
