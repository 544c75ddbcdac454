/*-------------------------------------------------------------------------
 *
 * lease.h
 *	  What lease*.c, record.c, id_table.c, queue.c, purge.c and others share
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_LEASE_H
#define DLOCK_LEASE_H

#include "shared/inner.h"

static inline Size
dlock_lease_ticket_size(const DlockKey *key)
{
	return offsetof(DlockLeaseTicket, key) + dlock_key_size(key);
}

/* The first ENDING ticket that the lease's delay keeps in its lock, or NULL */
static inline DlockLeaseTicket *
dlock_lease_first_closed(const DlockLease *lease)
{
	return lease->single ? NULL : dlock_ticket_in_lease(lease->closed.head);
}

/* The lease must have a DlockRetiming. */
static inline DlockRetiming *
dlock_lease_retiming(const DlockLease *lease)
{
	return dlock_address(lease->retiming);
}

/* id_table.c */
extern void dlock_id_delete(DlockRecord *record);
extern DlockRecord *dlock_id_look_up(DlockSpace *space, int64 number);
extern void dlock_request_insert(DlockLeaseTicket *ticket);
extern void dlock_request_delete(DlockLeaseTicket *ticket);
extern DlockLeaseTicket *dlock_request_find(const DlockLeaseTicket *wanted,
											bool (*is_wanted)
											(DlockLeaseTicket *ticket,
											 const DlockLeaseTicket *wanted));

/* lease.c */
extern void dlock_lease_restart(DlockSpace *space, DlockLease *lease,
								bool delayed);
extern bool dlock_lease_extend(DlockLease *lease);
extern int64 dlock_lease_claim(DlockLease *lease);
extern uint64 dlock_lease_confirmed_at(DlockLease *lease);
extern uint64 dlock_lease_unconfirmed_for(DlockLease *lease);
extern void dlock_lease_check_rights(const DlockLease *lease);
extern bool dlock_lease_move_deadline(DlockLease *lease, int64 ttl);
extern void dlock_lease_shorten(DlockLease *lease);
extern bool dlock_lease_unretime(DlockSpace *space, DlockLease *lease);
extern bool dlock_lease_unlist(DlockSpace *space, DlockLease *lease);

/* lease_ticket.c */
extern void dlock_lease_ticket_list(DlockLease *lease,
									DlockLeaseTicket *ticket, bool closed);
extern void dlock_lease_ticket_unlist(DlockLease *lease,
									  DlockLeaseTicket *ticket);

#endif							/* DLOCK_LEASE_H */
