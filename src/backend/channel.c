/*-------------------------------------------------------------------------
 *
 * channel.c
 *	  This session's own channel, for announcements of its grants.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "commands/async.h"
#include "miscadmin.h"

#include "backend/inner.h"

static char my_channel[NAMEDATALEN] = "";

/*
 * LISTEN on this session's own channel, from the commit on.  Returns the name
 * of the channel, which no other session can guess.  The caller has checked
 * dlock.session_locks.
 */
const char *
dlock_notify_listen(void)
{
	if (MyBackendType != B_BACKEND)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot listen for grants within a background process"),
				 errhint("Give a channel that another session listens on.")));

	if (my_channel[0] == '\0')
	{
		uint64		random[2];

		if (!pg_strong_random(random, sizeof(random)))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR),
					 errmsg("could not generate a random channel name")));
		snprintf(my_channel, sizeof(my_channel), "dlock_%016llx%016llx",
				 (unsigned long long) random[0],
				 (unsigned long long) random[1]);
	}

	/* each time: UNLISTEN or a rollback may have undone the last LISTEN */
	Async_Listen(my_channel);
	return my_channel;
}

/* Forget the channel, which this session's next client must not know. */
void
dlock_notify_forget(void)
{
	my_channel[0] = '\0';
}

/* Is the ticket announced on this session's own channel? */
bool
dlock_notify_is_mine(DlockTicket *ticket)
{
	char		channel[NAMEDATALEN];

	dlock_announcement_channel(ticket, channel);
	return channel[0] != '\0' && strcmp(channel, my_channel) == 0;
}
