/*-------------------------------------------------------------------------
 *
 * announcement.c
 *	  Announcements of enqueued tickets, and the outbox for sending them.
 *
 * An announcement has the events of one ticket, for NOTIFY.  If it is armed
 * and has events, it is in the space's outbox until it was sent (I28).  So if
 * the sender fails or dies, the next attempt sends it, perhaps again.
 *
 * An announcement is armed once the transaction that made it has committed and
 * the LISTEN is in effect.  Otherwise it could be sent before the session
 * listens.  Until the commit, the transaction has a claim on the announcement,
 * so that no other transaction arms it.  A rollback undoes the LISTEN but not
 * the ticket.  After that, a later call must claim the announcement.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/inner.h"

/* Claims made by this session so far */
static uint64 claims = 0;

static uint64
my_session(void)
{
	return pg_atomic_read_u64(&dlock_my_backend->session);
}

static DlockAnnouncement *
announcement_of(DlockTicket *ticket)
{
	return dlock_address(ticket->announcement);
}

/* Copy a ticket's channel, or "" if the ticket has no announcement. */
void
dlock_announcement_channel(DlockTicket *ticket, char *channel)
{
	DlockSpace *space = dlock_space_at(ticket->space);

	channel[0] = '\0';
	/* this may miss an announcement that another process is setting */
	if (!DsaPointerIsValid(ticket->announcement))
		return;
	LWLockAcquire(&space->outbox_lock, LW_SHARED);
	if (DsaPointerIsValid(ticket->announcement))
		strlcpy(channel, announcement_of(ticket)->channel, NAMEDATALEN);
	LWLockRelease(&space->outbox_lock);
}

/* Make and claim an announcement.  The functions below raise no error. */
dsa_pointer
dlock_announcement_make(DlockSpace *space, const DlockRequest *request)
{
	char	   *name = dlock_json_text(request->key.name, request->key.length,
									   false);
	Size		size = offsetof(DlockAnnouncement, name) + strlen(name) + 1;
	Oid			role = dlock_request_role(request);
	DlockAnnouncement *announcement = dlock_allocate(role, size);

	memset(announcement, 0, size);
	announcement->size = size;
	announcement->role = role;
	announcement->armer = my_session();
	announcement->claim = ++claims;
	strlcpy(announcement->channel, request->channel, NAMEDATALEN);
	strcpy(announcement->name, name);
	return dlock_pointer(announcement);
}

/* Enter an announcement into the outbox if it must be sent (I28). */
static void
post(DlockSpace *space, DlockAnnouncement *announcement)
{
	Assert(LWLockHeldByMeInMode(&space->outbox_lock, LW_EXCLUSIVE));
	if (announcement->armed && announcement->events != 0 &&
		!announcement->in_outbox)
	{
		dlock_list_append(&space->outbox, &announcement->link);
		announcement->in_outbox = true;
	}
}

static void
unpost(DlockSpace *space, DlockAnnouncement *announcement)
{
	Assert(LWLockHeldByMeInMode(&space->outbox_lock, LW_EXCLUSIVE));
	if (announcement->in_outbox)
		dlock_list_remove(&space->outbox, &announcement->link);
	announcement->in_outbox = false;
}

/*
 * Count a ticket's announcement, so that the worker does not exit.  The spare
 * ticket's announcement is not counted before the ticket has joined a lock.
 */
void
dlock_announcement_count(DlockTicket *ticket)
{
	announcement_of(ticket)->counted = true;
	pg_atomic_fetch_add_u32(&dlock_space_at(ticket->space)->announced, 1);
}

/* Free an announcement that has no ticket and is in no outbox. */
void
dlock_announcement_release(DlockSpace *space, DlockAnnouncement *announcement)
{
	bool		counted = announcement->counted;

	dlock_release_memory(announcement->role, announcement, announcement->size);
	if (counted && pg_atomic_sub_fetch_u32(&space->announced, 1) == 0)
		(void) dlock_office_wake(space, DLOCK_WORKER);
}

/*
 * Exchange or remove a ticket's announcement, and free the old one.  If "keep"
 * is set, an old one in the outbox is freed after it is sent.  Raises nothing.
 */
void
dlock_announcement_replace(DlockTicket *ticket, dsa_pointer announcement,
						   bool keep)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	DlockAnnouncement *before = NULL;
	bool		orphaned = false;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	if (DsaPointerIsValid(ticket->announcement))
	{
		before = announcement_of(ticket);
		orphaned = before->orphaned = keep && before->in_outbox;
		if (!orphaned)
			unpost(space, before);
	}
	ticket->announcement = announcement;
	if (DsaPointerIsValid(announcement))
		dlock_announcement_count(ticket);
	LWLockRelease(&space->outbox_lock);
	if (before && !orphaned)
		dlock_announcement_release(space, before);
}

/*
 * Called when a ticket ends.  The ticket's events are still sent, once the
 * announcement is armed.  Raises nothing.
 */
void
dlock_announcement_orphan(DlockTicket *ticket)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	bool		unarmed = false;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	if (DsaPointerIsValid(ticket->announcement))
	{
		DlockAnnouncement *announcement = announcement_of(ticket);

		unarmed = !announcement->armed && announcement->events != 0;
		announcement->orphaned = unarmed;
	}
	LWLockRelease(&space->outbox_lock);
	if (!unarmed)
		dlock_announcement_replace(ticket, InvalidDsaPointer, true);
}

/* Empty the outbox of an unused space, whose tickets are all gone. */
void
dlock_announcement_purge(DlockSpace *space)
{
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	while (DsaPointerIsValid(space->outbox.head))
	{
		DlockAnnouncement *orphan = dlock_address(space->outbox.head);

		unpost(space, orphan);
		dlock_announcement_release(space, orphan);
	}
	LWLockRelease(&space->outbox_lock);
}

/* The events to send now.  "Wanted" is sent once, with or after "granted". */
static uint32
events_to_tell(DlockAnnouncement *announcement, uint32 events)
{
	bool		told = announcement->granted && announcement->wanted;

	if (events & DLOCK_EVENT_GRANTED)
		announcement->granted = true;
	if (events & DLOCK_EVENT_WANTED)
		announcement->wanted = true;
	events &= ~DLOCK_EVENT_WANTED;
	if (!told && announcement->granted && announcement->wanted)
		events |= DLOCK_EVENT_WANTED;
	return events;
}

/* Add events to a ticket's announcement.  The caller must wake the sender. */
void
dlock_announcement_event(DlockTicket *ticket, uint32 events)
{
	DlockSpace *space = dlock_space_at(ticket->space);

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	if (DsaPointerIsValid(ticket->announcement))
	{
		DlockAnnouncement *announcement = announcement_of(ticket);

		announcement->number = ticket->number;
		announcement->events |= events_to_tell(announcement, events);
		post(space, announcement);
	}
	LWLockRelease(&space->outbox_lock);
}

/* Arm an announcement.  If it is orphaned, the outbox then owns it. */
static void
arm(DlockTicket *ticket, DlockAnnouncement *announcement)
{
	announcement->armed = true;
	announcement->armer = 0;
	post(dlock_space_at(ticket->space), announcement);
	if (announcement->orphaned)
		ticket->announcement = InvalidDsaPointer;
}

/* The ticket's announcement if this session has this claim (0: any) on it */
static DlockAnnouncement *
claimed(DlockTicket *ticket, uint64 claim)
{
	DlockAnnouncement *announcement;

	Assert(LWLockHeldByMe(&dlock_space_at(ticket->space)->outbox_lock));
	if (!DsaPointerIsValid(ticket->announcement))
		return NULL;
	announcement = announcement_of(ticket);
	return announcement->armer == my_session() &&
		(claim == 0 || announcement->claim == claim) ? announcement : NULL;
}

/* The (sub)transaction with this claim has committed, or was rolled back. */
void
dlock_announcement_end_claim(DlockTicket *ticket, uint64 claim, bool committed)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	DlockAnnouncement *announcement;
	bool		posted = false;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	announcement = claimed(ticket, claim);
	if (announcement && committed)
	{
		arm(ticket, announcement);
		posted = announcement->in_outbox;
	}
	else if (announcement)
		announcement->armer = 0;
	LWLockRelease(&space->outbox_lock);
	/* the worker must exist while there are announcements (I20) */
	if (posted)
		(void) dlock_worker_wake(space);
	else
		dlock_worker_look(space, false);
}

/* Claim the announcement if a rollback left it unarmed, else return 0. */
uint64
dlock_announcement_claim(DlockTicket *ticket)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	uint64		claim = 0;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	if (DsaPointerIsValid(ticket->announcement))
	{
		DlockAnnouncement *announcement = announcement_of(ticket);

		if (!announcement->armed && announcement->armer == 0)
		{
			announcement->armer = my_session();
			announcement->claim = claim = ++claims;
		}
	}
	LWLockRelease(&space->outbox_lock);
	return claim;
}

/* This session's claim on a ticket's announcement, or 0 */
uint64
dlock_announcement_my_claim(DlockTicket *ticket)
{
	DlockSpace *space = dlock_space_at(ticket->space);
	DlockAnnouncement *announcement;
	uint64		claim;

	LWLockAcquire(&space->outbox_lock, LW_SHARED);
	announcement = claimed(ticket, 0);
	claim = announcement ? announcement->claim : 0;
	LWLockRelease(&space->outbox_lock);
	return claim;
}

/* A ticket was loaded.  If "granted" is set, its grant counts as announced. */
void
dlock_announcement_restored(DlockTicket *ticket, bool granted)
{
	DlockSpace *space = dlock_space_at(ticket->space);

	if (!DsaPointerIsValid(ticket->announcement))
		return;
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	announcement_of(ticket)->granted = granted;
	arm(ticket, announcement_of(ticket));
	LWLockRelease(&space->outbox_lock);
}

/* Copy up to "max" messages, and mark them as being sent; returns how many. */
int
dlock_outbox_copy(DlockSpace *space, DlockMessage *messages, int max)
{
	int			count = 0;
	dsa_pointer pointer;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	for (pointer = space->outbox.head;
		 DsaPointerIsValid(pointer) && count < max; count++)
	{
		DlockAnnouncement *announcement = dlock_address(pointer);
		DlockMessage *message = &messages[count];

		announcement->sending = announcement->events;
		message->number = announcement->number;
		message->events = announcement->events;
		strlcpy(message->channel, announcement->channel, NAMEDATALEN);
		strlcpy(message->name, announcement->name, sizeof(message->name));
		pointer = announcement->link.next;
	}
	LWLockRelease(&space->outbox_lock);
	return count;
}

/* After the messages were sent, remove their events from the outbox. */
void
dlock_outbox_clear(DlockSpace *space)
{
	dsa_pointer pointer;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	for (pointer = space->outbox.head; DsaPointerIsValid(pointer);)
	{
		DlockAnnouncement *announcement = dlock_address(pointer);

		pointer = announcement->link.next;
		if (announcement->sending == 0)
			break;
		announcement->events &= ~announcement->sending;
		announcement->sending = 0;
		if (announcement->events != 0)
			continue;
		unpost(space, announcement);
		if (announcement->orphaned)
			dlock_announcement_release(space, announcement);
	}
	LWLockRelease(&space->outbox_lock);
}
