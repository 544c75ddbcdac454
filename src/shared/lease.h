/*-------------------------------------------------------------------------
 *
 * lease.h
 *	  What the files of leases share: lease.c, lease_ticket.c and record.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_LEASE_H
#define DLOCK_LEASE_H

#include "dlock.h"

/* record.c */
extern void dlock_id_insert(DlockSpace *space, int64 number,
							DlockLease *lease, DlockLeaseTicket *ticket);
extern void dlock_id_delete(DlockSpace *space, int64 number);
extern void dlock_id_find(DlockSpace *space, int64 number, DlockLease **lease,
						  DlockLeaseTicket **ticket);

/* lease.c */
extern void dlock_lease_start(DlockSpace *space, DlockLease *lease);
extern void dlock_lease_restart(DlockSpace *space, DlockLease *lease,
								bool delayed);
extern bool dlock_lease_extend(DlockLease *lease);
extern void dlock_lease_be_over(DlockLease *lease, bool always);
extern void dlock_lease_check_rights(const DlockLease *lease);

/* lease_ticket.c */
extern void dlock_lease_ticket_unlist(DlockLease *lease,
									  DlockLeaseTicket *ticket);

#endif							/* DLOCK_LEASE_H */
