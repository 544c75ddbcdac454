/*-------------------------------------------------------------------------
 *
 * backend.h
 *	  The functions and settings of src/backend that module.c uses.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_BACKEND_H
#define DLOCK_BACKEND_H

#include "shared/shared.h"

/* arguments.c */
extern int	dlock_max_ttl;		/* seconds */
extern int	dlock_session_locks;

typedef enum DlockSessionLocks
{
	DLOCK_SESSION_LOCKS_ALLOW,
	DLOCK_SESSION_LOCKS_WARN,
	DLOCK_SESSION_LOCKS_ERROR
} DlockSessionLocks;

/* held.c */
extern int	dlock_max_locks_per_session;

/* session.c */
extern int64 dlock_session_release_all(void);

/* lease_open.c */
extern void dlock_lease_detach_all(void);

/* xact.c: state of the outer statement, restored when the inner one ends */
typedef struct DlockStatement
{
	MemoryContext memory;
	int			num_marks;
} DlockStatement;

extern void dlock_xact_begin_statement(DlockStatement *outer,
									   MemoryContext memory);
extern void dlock_xact_end_statement(const DlockStatement *outer);
extern void dlock_xact_fail_statement(const DlockStatement *outer,
									  bool is_canceled);

/* cancel.c */
extern bool dlock_cancel_lost_guards;
extern void dlock_cancel_check(bool may_fail);

/* lone_call.c */
extern Oid	dlock_lone_call;

/* channel.c */
extern void dlock_notify_forget(void);

#endif							/* DLOCK_BACKEND_H */
