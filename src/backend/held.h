/*-------------------------------------------------------------------------
 *
 * held.h
 *	  This backend's tickets, by name and by number, in its own memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_HELD_H
#define DLOCK_HELD_H

#include "lib/ilist.h"

#include "backend/inner.h"

/* A ticket's state when last checked.  A name has a list for each state. */
typedef enum DlockHeldPlace
{
	DLOCK_HELD_WAITING,
	DLOCK_HELD_BY_SESSION,		/* granted; the session must release it */
	DLOCK_HELD_BY_XACT,			/* granted; only the transaction holds it */
	DLOCK_HELD_LOST,			/* GONE, but not forgotten yet */
	DLOCK_NUM_HELD_PLACES
} DlockHeldPlace;

/* A name under which this backend has tickets */
typedef struct DlockHeldName
{
	DlockKey	key;			/* hash key, must be first */
	dlist_head	tickets[DLOCK_NUM_HELD_PLACES]; /* DlockHeld.by_name, latest
												 * first */
	dlist_node	link;			/* in names_in_use, if count > 0 */
	uint32		count;			/* number of tickets */

	/* tickets that are not DLOCK_HELD_LOST: */
	uint32		live;			/* number of these tickets */
	uint32		exclusive;		/* number of exclusive tickets */
	int64		permits;		/* sum of their permits */
} DlockHeldName;

typedef struct DlockHeld
{
	int64		number;
	DlockHeldName *name;
	DlockTicket *ticket;
	DlockLock  *lock;			/* valid only until the ticket is GONE (I7) */
	dlist_node	by_number;		/* in a bucket of "numbers" */
	dlist_node	by_name;		/* in DlockHeldName.tickets[place] */
	DlockHeldPlace place;
	dlist_node	by_age;			/* in dlock_held_tickets, latest first */
	uint32		session_depth;	/* acquires not yet released, by scope */
	uint32		xact_depth;
	uint32		marks;			/* number of xact.c's marks that point here */
	uint32		releases;		/* acquires to be released at commit */
	bool		exclusive;		/* does it count in name->exclusive? */
} DlockHeld;

static inline bool
dlock_held_is_gone(const DlockHeld *held)
{
	return pg_atomic_read_u32(&held->ticket->state) == DLOCK_GONE;
}

static inline bool
dlock_held_is_granted(const DlockHeld *held)
{
	return pg_atomic_read_u32(&held->ticket->state) == DLOCK_GRANTED;
}

/*
 * Must the session release the ticket?  If no acquires are left, an error kept
 * the ticket from ending.  The answer is true then, too, so a release ends it.
 */
static inline bool
dlock_held_is_of_session(const DlockHeld *held)
{
	return held->session_depth > 0 || held->xact_depth == 0;
}

/* held.c */
extern dlist_head dlock_held_tickets;
extern int	dlock_held_watches;

extern void dlock_held_initialize(void);
extern struct HTAB *dlock_held_make_table(const char *title, Size entry_size);
extern void dlock_held_check_room(void);
extern void dlock_held_prepare(const DlockKey *key);
extern DlockHeld *dlock_held_enter(DlockTicket *ticket, DlockScope scope,
								   DlockLock *lock);
extern void dlock_held_set_depth(DlockHeld *held, uint32 session_depth,
								 uint32 xact_depth);
extern void dlock_held_count_shared(DlockHeld *held);
extern void dlock_held_settle(DlockHeld *held);
extern void dlock_held_free_ticket(DlockTicket *ticket);
extern void dlock_held_forget(DlockHeld *held);
extern DlockHeld *dlock_held_find_number(const DlockSpace *space,
										 int64 number);
extern DlockHeldName *dlock_held_find_name(const DlockKey *key);
extern DlockHeldName *dlock_held_find_latest(const DlockSpace *space,
											 const char *name, Size length);
extern DlockHeld *dlock_held_find_reentrant(DlockHeldName *name);
extern DlockHeld *dlock_held_find_session_hold(DlockHeldName *name);
extern bool dlock_held_blocks_others(int64 except);
extern bool dlock_held_is_holding(DlockHeldName *name);
extern bool dlock_held_blocks(DlockHeldName *name, const DlockRequest *request,
							  int64 number);

/* xact.c */
extern void dlock_xact_prepare(void);
extern void dlock_xact_deepen(DlockHeld *held, DlockScope scope);
extern void dlock_xact_take(DlockHeld *held, DlockLeaseTicket *of_lease,
						   uint64 claim);
extern void dlock_xact_redirect(DlockLeaseTicket *of_lease,
								dsa_pointer announcement);
extern void dlock_xact_keep(int count);
extern void dlock_xact_undo_latest(void);
extern void dlock_xact_prepare_arming(void);
extern void dlock_xact_exit(void);
extern void dlock_xact_arm(DlockHeld *held, DlockLeaseTicket *of_lease,
						   uint64 claim);
extern void dlock_xact_watch(DlockWatch *watch);
extern void dlock_xact_unwatch(const DlockWatch *watch);

/* request.c */
extern DlockTimeout dlock_request_time_left(DlockTimeout timeout,
											uint64 start);
extern DlockOutcome dlock_request_wait(const DlockRequest *request,
									   DlockHeld *held);
extern bool dlock_request_wait_again(DlockTicket *ticket, const DlockKey *key,
									 DlockTimeout timeout);
extern void dlock_request_check_upgrade(const DlockRequest *request,
										const DlockTicket *held);

/* errors.c */
extern void dlock_raise_self_wait(const DlockRequest *request);
extern void dlock_raise_mismatch(const DlockRequest *request, int32 slots);
extern void dlock_raise_lost_place(const DlockRequest *request, int64 number);
extern void dlock_raise_lost(const DlockKey *key, int64 fence);
extern void dlock_raise_no_ticket(int64 number);

#endif							/* DLOCK_HELD_H */
