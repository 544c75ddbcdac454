/*-------------------------------------------------------------------------
 *
 * due.h
 *	  The worker's private data: leases, grants, heartbeats.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_DUE_H
#define DLOCK_DUE_H

#include "utils/hsearch.h"

#include "shared/shared.h"

/* due.c */
extern HTAB *dlock_due_make_table(const char *name, Size size);
extern void dlock_due_begin(void);
extern void dlock_due_add(DlockLease *lease);
extern bool dlock_due_update(DlockSpace *space);
extern void dlock_due_remove(DlockLease *lease);
extern uint64 dlock_due_next(void);
extern void dlock_due_expire(uint64 step);
extern bool dlock_due_has_attached(void);
extern void dlock_due_let_go(void);

/* expiry.c */
extern void dlock_expiry_note(const DlockExpiry *expiry);
extern uint64 dlock_expiry_tell(DlockSpace *space, bool at_once);

/* grants.c */
extern void dlock_grants_begin(void);
extern void dlock_grants_remember(DlockLeaseTicket *ticket, XLogRecPtr lsn);
extern void dlock_grants_forget(DlockLeaseTicket *ticket);
extern uint64 dlock_grants_announce(uint64 step);
extern bool dlock_grants_are_left(void);
extern void dlock_grants_let_go(void);

/* heartbeat.c */
extern int	dlock_heartbeat_add(const DlockLease *lease);
extern void dlock_heartbeat_remove(int class);
extern uint64 dlock_heartbeat_beat(DlockSpace *space, bool knows_all);

/* writer.c */
extern void dlock_writer_begin(DlockSpace *space);
extern bool dlock_writer_clear(DlockSpace *space);
extern int	dlock_writer_write(DlockSpace *space, int *dead);
extern void dlock_writer_let_go(void);

#endif							/* DLOCK_DUE_H */
