/*-------------------------------------------------------------------------
 *
 * lease.h
 *	  What the files of leases share among themselves: lease.c, lease_end.c,
 *	  lease_ticket.c, restore.c, record.c and purge.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_LEASE_H
#define DLOCK_LEASE_H

#include "shared/shared.h"

static inline DlockLeaseTicket *
dlock_ticket_in_lease(dsa_pointer link)
{
	return (DlockLeaseTicket *) ((char *) dsa_get_address(dlock_area, link) -
								 offsetof(DlockLeaseTicket, in_lease));
}

static inline DlockLease *
dlock_lease_in_space(dsa_pointer link)
{
	return (DlockLease *) ((char *) dsa_get_address(dlock_area, link) -
						   offsetof(DlockLease, in_space));
}

/* Under which a ticket's request is found in the table of numbers */
static inline DlockIdKey
dlock_request_key(const DlockLeaseTicket *ticket)
{
	return (DlockIdKey)
	{
		.space = ticket->key.space,
		.number = ticket->request
	};
}

/* record.c */
extern void dlock_id_delete(DlockSpace *space, int64 number);
extern void dlock_id_find(DlockSpace *space, int64 number, DlockLease **lease,
						  DlockLeaseTicket **ticket);

/* lease.c */
extern void dlock_lease_restart(DlockSpace *space, DlockLease *lease,
								bool delayed);
extern bool dlock_lease_extend(DlockLease *lease);
extern bool dlock_lease_claim(DlockLease *lease);
extern uint64 dlock_lease_unconfirmed_for(DlockLease *lease);
extern void dlock_lease_check_rights(const DlockLease *lease);
extern bool dlock_lease_set_deadline(DlockLease *lease, int64 ttl);
extern void dlock_lease_shorten(DlockLease *lease);
extern bool dlock_lease_unretime(DlockSpace *space, DlockLease *lease);
extern bool dlock_lease_unlist(DlockSpace *space, DlockLease *lease);

/* lease_ticket.c */
extern void dlock_lease_ticket_list(DlockLease *lease,
									DlockLeaseTicket *ticket, bool closed);
extern void dlock_lease_ticket_unlist(DlockLease *lease,
									  DlockLeaseTicket *ticket);

#endif							/* DLOCK_LEASE_H */
