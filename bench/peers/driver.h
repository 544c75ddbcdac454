/*-------------------------------------------------------------------------
 *
 * driver.h
 *	  What a peer is to the driver: how its clients take a lock.
 *
 * A lock is a number, as text, since that is what all peers can take.  Each
 * function is called by one thread per session; whatever fails ends the
 * driver.
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

/* each ends with one that has no name */
extern const Peer postgres_peers[];
extern const Peer redis_peers[];

extern void die(const char *what, const char *message);

/* Somebody else has it: wait, for a time of about POLL_US, to ask again. */
extern void pause_before_retry(void);

#endif							/* DRIVER_H */
