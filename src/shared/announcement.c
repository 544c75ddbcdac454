/*-------------------------------------------------------------------------
 *
 * announcement.c
 *	  Announcements of grants, and the outbox of those that are to be sent.
 *
 * A ticket that was enqueued carries an announcement.  What happens to the
 * ticket sets an event in it; once it is armed, too, it goes into the outbox
 * of the space, and the sender sends what is there.
 *
 * Arming comes after the commit of the transaction that made the announcement,
 * and after PostgreSQL's own processing of the LISTEN in that commit: earlier,
 * the notification could be sent before it can be received.  So that transaction
 * claims it, and no other one arms it meanwhile, which asks for the ticket or made
 * the announcement before.  A rollback takes the LISTEN back, but not the ticket;
 * such a ticket stays silent until the next call about it.
 *
 * An announcement stays in the outbox while it is being sent, and leaves it
 * only afterwards.  So what the sender could not send, because the queue of
 * NOTIFY is full or the sender is killed, is sent by the next attempt or the
 * next sender; at worst twice, which is harmless, as a notification is a hint.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/inner.h"

/* How many announcements this session has claimed */
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

static DlockSpace *
space_of(DlockTicket *ticket)
{
	return dlock_space_at(ticket->space);
}

/*
 * Copy out the channel of a ticket, empty where it has none.
 */
void
dlock_announcement_channel(DlockTicket *ticket, char *channel)
{
	DlockSpace *space = space_of(ticket);

	channel[0] = '\0';
	/* that one comes later is seen later */
	if (!DsaPointerIsValid(ticket->announcement))
		return;
	LWLockAcquire(&space->outbox_lock, LW_SHARED);
	if (DsaPointerIsValid(ticket->announcement))
		strlcpy(channel, announcement_of(ticket)->channel, NAMEDATALEN);
	LWLockRelease(&space->outbox_lock);
}

/*
 * Make an announcement for a request with a channel, and claim it.  All that can
 * fail, fails here: the names are converted now, and not by the worker.
 */
dsa_pointer
dlock_announcement_make(DlockSpace *space, const DlockRequest *request)
{
	char	   *name = dlock_json_text(request->key.name, request->key.length,
									   false);
	Size		size = offsetof(DlockAnnouncement, name) + strlen(name) + 1;
	Oid			role = dlock_request_role(request);
	dsa_pointer self = dlock_allocate(role, size);
	DlockAnnouncement *announcement = dlock_address(self);

	memset(announcement, 0, size);
	announcement->self = self;
	announcement->size = size;
	announcement->role = role;
	announcement->armer = my_session();
	announcement->claim = ++claims;
	strlcpy(announcement->channel, request->channel, NAMEDATALEN);
	strcpy(announcement->name, name);
	return self;
}

/* Put it into the outbox if it is armed and has something to send (I28). */
static void
post(DlockSpace *space, DlockAnnouncement *announcement)
{
	Assert(LWLockHeldByMeInMode(&space->outbox_lock, LW_EXCLUSIVE));
	if (announcement->armed && announcement->events != 0 &&
		!announcement->in_outbox)
	{
		dlock_list_append(&space->outbox, &announcement->link,
						  announcement->self);
		announcement->in_outbox = true;
	}
}

/* Take it out of the outbox. */
static void
unpost(DlockSpace *space, DlockAnnouncement *announcement)
{
	Assert(LWLockHeldByMeInMode(&space->outbox_lock, LW_EXCLUSIVE));
	if (announcement->in_outbox)
		dlock_list_remove(&space->outbox, &announcement->link);
	announcement->in_outbox = false;
}

/*
 * From now on the worker is needed for this ticket's announcement.  Not
 * before the ticket has joined its lock: what a failed request leaves on the
 * spare ticket must not keep the worker.
 */
void
dlock_announcement_count(DlockTicket *ticket)
{
	announcement_of(ticket)->counted = true;
	pg_atomic_fetch_add_u32(&space_of(ticket)->announced, 1);
}

/* Free an announcement that is in no outbox and no ticket's any more. */
static void
release(DlockSpace *space, DlockAnnouncement *announcement)
{
	bool		counted = announcement->counted;

	dlock_release_memory(announcement->role, announcement->self,
						 announcement->size);
	if (counted && pg_atomic_sub_fetch_u32(&space->announced, 1) == 0)
		dlock_worker_dismiss(space);
}

/*
 * Give a ticket another announcement, or none.  The one before goes; but where
 * "keep" is set and it is about to be sent, only when that is done.
 */
static void
replace(DlockTicket *ticket, dsa_pointer announcement, bool keep)
{
	DlockSpace *space = space_of(ticket);
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
	LWLockRelease(&space->outbox_lock);
	/* one that is orphaned belongs to the worker now */
	if (before && !orphaned)
		release(space, before);
}

/* Free a ticket's announcement, sent or not.  Raises nothing. */
void
dlock_announcement_free(DlockTicket *ticket)
{
	replace(ticket, InvalidDsaPointer, false);
}

/*
 * The ticket goes, and what it has to tell is still told; where the LISTEN is
 * not in effect yet, after that.  Raises nothing.
 */
void
dlock_announcement_orphan(DlockTicket *ticket)
{
	DlockSpace *space = space_of(ticket);
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
		replace(ticket, InvalidDsaPointer, true);
}

/*
 * Give a ticket an announcement, or another one.
 */
void
dlock_announcement_set(DlockTicket *ticket, dsa_pointer announcement)
{
	DlockAnnouncement *made = dlock_address(announcement);

	made->counted = true;
	pg_atomic_fetch_add_u32(&space_of(ticket)->announced, 1);
	replace(ticket, announcement, false);
}

/*
 * The ticket's announcement goes to another client from now on.  What the one
 * before has still to be told is sent nevertheless.
 */
void
dlock_announcement_redirect(DlockTicket *ticket, dsa_pointer announcement)
{
	DlockAnnouncement *made = dlock_address(announcement);

	made->counted = true;
	pg_atomic_fetch_add_u32(&space_of(ticket)->announced, 1);
	replace(ticket, announcement, true);
}

/* Free an announcement that has become no ticket's. */
void
dlock_announcement_discard(DlockSpace *space, dsa_pointer announcement)
{
	release(space, dlock_address(announcement));
}

/*
 * Free what is still to be told in a space that nobody uses any more.  All its
 * tickets are gone.
 */
void
dlock_announcement_purge(DlockSpace *space)
{
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	while (DsaPointerIsValid(space->outbox.head))
	{
		DlockAnnouncement *orphan = dlock_address(space->outbox.head);

		unpost(space, orphan);
		release(space, orphan);
	}
	LWLockRelease(&space->outbox_lock);
}

/*
 * Which of these events are to be told now?  That the lock is wanted is told
 * once, and behind the grant: where that one is still to become durable, with it.
 */
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

/*
 * Something has happened to a ticket that may have an announcement.  The
 * caller wakes the worker later.
 */
void
dlock_announcement_event(DlockTicket *ticket, uint32 events)
{
	DlockSpace *space = space_of(ticket);

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

/*
 * It may be sent from now on.  That of a ticket that is gone already is then the
 * outbox's alone.
 */
static void
arm(DlockTicket *ticket, DlockAnnouncement *announcement)
{
	announcement->armed = true;
	announcement->armer = 0;
	post(space_of(ticket), announcement);
	if (announcement->orphaned)
		ticket->announcement = InvalidDsaPointer;
}

/*
 * A ticket's announcement, if this session has claimed it, by this claim or, where
 * that is 0, by any; NULL otherwise.
 */
static DlockAnnouncement *
claimed(DlockTicket *ticket, uint64 claim)
{
	DlockAnnouncement *announcement;

	Assert(LWLockHeldByMe(&space_of(ticket)->outbox_lock));
	if (!DsaPointerIsValid(ticket->announcement))
		return NULL;
	announcement = announcement_of(ticket);
	return announcement->armer == my_session() &&
		(claim == 0 || announcement->claim == claim) ? announcement : NULL;
}

/*
 * The transaction with this claim has committed, and the session listens now, if
 * it is to: what has happened may be sent.
 */
void
dlock_announcement_arm(DlockTicket *ticket, uint64 claim)
{
	DlockSpace *space = space_of(ticket);
	DlockAnnouncement *announcement;
	bool		posted = false;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	announcement = claimed(ticket, claim);
	if (announcement)
	{
		arm(ticket, announcement);
		posted = announcement->in_outbox;
	}
	LWLockRelease(&space->outbox_lock);
	/* the worker, too: from now on one is there while somebody is to be told */
	if (posted)
		(void) dlock_worker_wake(space);
}

/* The (sub)transaction with this claim was rolled back. */
void
dlock_announcement_unclaim(DlockTicket *ticket, uint64 claim)
{
	DlockSpace *space = space_of(ticket);
	DlockAnnouncement *announcement;

	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	announcement = claimed(ticket, claim);
	if (announcement)
		announcement->armer = 0;
	LWLockRelease(&space->outbox_lock);
}

/*
 * Claim a ticket's announcement that is silent, as what made it was rolled back.
 * Returns the claim; 0 where there is no such announcement.
 */
uint64
dlock_announcement_claim(DlockTicket *ticket)
{
	DlockSpace *space = space_of(ticket);
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

/* This session's claim of a ticket's announcement; 0: it has none. */
uint64
dlock_announcement_my_claim(DlockTicket *ticket)
{
	DlockSpace *space = space_of(ticket);
	DlockAnnouncement *announcement;
	uint64		claim;

	LWLockAcquire(&space->outbox_lock, LW_SHARED);
	announcement = claimed(ticket, 0);
	claim = announcement ? announcement->claim : 0;
	LWLockRelease(&space->outbox_lock);
	return claim;
}

/*
 * A ticket was put back.  Where it holds, its grant was told before the restart.
 */
void
dlock_announcement_restored(DlockTicket *ticket, bool granted)
{
	DlockSpace *space = space_of(ticket);

	if (!DsaPointerIsValid(ticket->announcement))
		return;
	LWLockAcquire(&space->outbox_lock, LW_EXCLUSIVE);
	announcement_of(ticket)->granted = granted;
	arm(ticket, announcement_of(ticket));
	LWLockRelease(&space->outbox_lock);
}

/*
 * Copy what is to be sent, and mark it as being sent; returns how many these
 * are, at most "max".
 */
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

/*
 * Take what was sent out of the outbox: what is marked as being sent, at the
 * head of the outbox.  A ticket's number would not do to find it, as the
 * ticket may have got another announcement meanwhile.
 */
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
			release(space, announcement);
	}
	LWLockRelease(&space->outbox_lock);
}
