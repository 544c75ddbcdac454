/*-------------------------------------------------------------------------
 *
 * report.c
 *	  Leases and their tickets, in messages.
 *
 * Texts of users and lists of tickets are cut, so that they cannot fill a log.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "shared/lease.h"

/* At most this many tickets of a lease are checked for holding a lock. */
#define MAX_LOOKED_AT	256

/* Copy a text from the area, cut if it is long; "" if there is no text. */
static void
copy_text(DlockReportText *to, dsa_pointer from)
{
	const char *text;
	int			length;
	int			kept;

	to->text[0] = '\0';
	if (!DsaPointerIsValid(from))
		return;
	text = dlock_address(from);
	length = strlen(text);
	kept = pg_mbcliplen(text, length, DLOCK_REPORT_TEXT);
	memcpy(to->text, text, kept);
	strcpy(to->text + kept, kept < length ? "..." : "");
}

static void
add_ticket(DlockExpiry *expiry, const DlockLeaseTicket *ticket)
{
	int			n = expiry->num_tickets++;

	expiry->tickets[n].number = ticket->ticket.number;
	expiry->tickets[n].name_length = ticket->key.length;
	memcpy(expiry->tickets[n].name, ticket->key.name, ticket->key.length);
	copy_text(&expiry->tickets[n].owner, ticket->owner);
}

/*
 * Describe a lease that has run out and still has its tickets.  The info of a
 * single lease is its ticket's.  The caller must hold the lease lock.
 */
void
dlock_expiry_fill(DlockExpiry *expiry, DlockLease *lease)
{
	TimestampTz renewed = (TimestampTz) pg_atomic_read_u64(&lease->renewed_at);
	DlockLeaseTicket *ticket = dlock_ticket_in_lease(lease->tickets.head);

	Assert(LWLockHeldByMeInMode(&dlock_space_at(lease->space)->lease_lock,
								LW_EXCLUSIVE));
	expiry->lease = lease->number;
	namestrcpy(&expiry->role, dlock_lease_role_name(lease));
	copy_text(&expiry->info, lease->single ? InvalidDsaPointer : lease->info);
	expiry->ttl = dlock_lease_ttl(lease);
	expiry->renewed = Max(GetCurrentTimestamp() - renewed, 0);
	expiry->unconfirmed = (int64) dlock_lease_unconfirmed_for(lease);
	expiry->attached_pid = !lease->single && lease->session != 0 ?
		lease->pid : 0;
	expiry->session_ended = expiry->attached_pid != 0 &&
		pg_atomic_read_u64(&dlock_backends[lease->procno].session) !=
		lease->session;
	expiry->held = lease->held;
	expiry->waiting = lease->tickets.length - expiry->held;
	expiry->num_tickets = 0;
	for (int n = 0; n < MAX_LOOKED_AT && ticket &&
		 expiry->num_tickets < DLOCK_REPORT_TICKETS; n++)
	{
		if (lease->single)
			copy_text(&expiry->info, ticket->ticket.info);
		if (dlock_state_of(&ticket->ticket) == DLOCK_GRANTED)
			add_ticket(expiry, ticket);
		ticket = dlock_ticket_in_lease(ticket->in_lease.next);
	}
}

/* Describe a ticket's owner.  Raises nothing and allocates nothing. */
void
dlock_lease_name_fill(DlockLeaseName *name, const DlockLeaseTicket *ticket)
{
	const DlockLease *lease = dlock_lease_of(ticket);

	name->lease = lease->number;
	namestrcpy(&name->role, dlock_lease_role_name(lease));
	copy_text(&name->owner, ticket->owner);
}

/* Find a ticket's owner by number; name->lease is 0 if the ticket is gone. */
void
dlock_lease_name_find(DlockSpace *space, int64 number, DlockLeaseName *name)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *ticket;

	name->lease = 0;
	dlock_id_find(space, number, &lease, &ticket);
	if (ticket)
		dlock_lease_name_fill(name, ticket);
	dlock_record_end_uses(before);
}

/* Append, for example: lease 4711 (role "alice", owner "node-1") */
void
dlock_lease_name_append(StringInfo buffer, const DlockLeaseName *name)
{
	appendStringInfo(buffer, "lease %lld (role \"%s\"",
					 (long long) name->lease, NameStr(name->role));
	if (name->owner.text[0] != '\0')
		appendStringInfo(buffer, ", owner \"%s\"", name->owner.text);
	appendStringInfoChar(buffer, ')');
}
