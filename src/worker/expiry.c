/*-------------------------------------------------------------------------
 *
 * expiry.c
 *	  The worker's log lines about leases that have run out.
 *
 * In each interval, the worker logs at most MAX_LINES leases with a line each,
 * after all other due work.  When the interval is over, it logs the number of
 * other leases.  So if 100,000 leases run out at once, they neither fill the
 * disk nor hold up the worker.  If the worker dies, lines can be lost.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/shared.h"
#include "worker/process.h"
#include "worker/due.h"
#include "worker/worker.h"

#define MAX_LINES		100		/* per interval */
#define INTERVAL_US		UINT64CONST(1000000)

/* GUC */
bool		dlock_log_expirations;

static DlockSpace *my_space = NULL;

/* The first leases that ran out in this interval, and the number of others */
static DlockExpiry lines[MAX_LINES];
static int	num_lines = 0;
static int	num_logged = 0;
static uint64 num_others = 0;
static uint64 interval_ends;

/* Note a lease that has run out.  Raises no error. */
void
dlock_expiry_note(const DlockExpiry *expiry)
{
	if (!dlock_log_expirations)
		return;
	if (num_lines == 0)
		interval_ends = dlock_monotonic_now() + INTERVAL_US;
	if (num_lines < MAX_LINES)
		lines[num_lines++] = *expiry;
	else
		num_others++;
}

static void
append_seconds(StringInfo buffer, uint64 microseconds)
{
	appendStringInfo(buffer, "%llu.%03d s",
					 (unsigned long long) (microseconds / 1000000),
					 (int) (microseconds / 1000 % 1000));
}

/* Append the lease's tickets: some with their locks' names, others counted. */
static void
append_tickets(StringInfo buffer, const DlockExpiry *expiry)
{
	uint32		others = expiry->held - expiry->num_tickets;

	for (int i = 0; i < expiry->num_tickets; i++)
	{
		appendStringInfo(buffer, "%s lock \"%.*s\" (ticket %lld",
						 i == 0 ? " It held" :
						 i == expiry->num_tickets - 1 && others == 0 ? " and" :
						 ",", expiry->tickets[i].name_length,
						 expiry->tickets[i].name,
						 (long long) expiry->tickets[i].number);
		if (expiry->tickets[i].owner.text[0] != '\0')
			appendStringInfo(buffer, ", owner \"%s\"",
							 expiry->tickets[i].owner.text);
		appendStringInfoChar(buffer, ')');
	}
	if (expiry->held == 0)
		appendStringInfoString(buffer, " It held nothing");
	else if (expiry->num_tickets == 0)
		appendStringInfo(buffer, " It held %u locks", expiry->held);
	else if (others > 0)
		appendStringInfo(buffer, " and %u more", others);
	if (expiry->waiting > 0)
		appendStringInfo(buffer, ", and waited for %u", expiry->waiting);
	appendStringInfoChar(buffer, '.');
}

static void
append_reason(StringInfo buffer, const DlockExpiry *expiry)
{
	if (expiry->attached_pid != 0)
		appendStringInfo(buffer, "It was attached to process %d%s; its last renewal was ",
						 expiry->attached_pid,
						 expiry->session_ended ? ", which has ended" : "");
	else
		appendStringInfoString(buffer, "Its last renewal was ");
	append_seconds(buffer, expiry->renewed);
	appendStringInfoString(buffer, " ago, its ttl is ");
	append_seconds(buffer, expiry->ttl);
	appendStringInfoChar(buffer, '.');
	if (expiry->unconfirmed < expiry->ttl)
		return;
	appendStringInfoString(buffer, " Synchronous standbys have acknowledged nothing for ");
	append_seconds(buffer, expiry->unconfirmed);
	appendStringInfoChar(buffer, '.');
}

static void
log_expiry(const DlockExpiry *expiry)
{
	StringInfoData detail;

	initStringInfo(&detail);
	append_reason(&detail, expiry);
	append_tickets(&detail, expiry);
	if (expiry->info.text[0] != '\0')
		appendStringInfo(&detail, " Its info is \"%s\".", expiry->info.text);
	ereport(LOG,
			(errmsg("lease %lld of role \"%s\" has run out",
					(long long) expiry->lease, NameStr(expiry->role)),
			 errdetail_internal("%s", detail.data),
			 errhidecontext(true)));
	pfree(detail.data);
}

/* Log the noted leases.  Flush removals first: lines report grants (I15). */
static bool
tell_all(void)
{
	dlock_journal_flush_removals(my_space);
	while (num_logged < num_lines)
	{
		log_expiry(&lines[num_logged]);
		num_logged++;
	}
	return false;
}

/* If the interval is over or "at_once" is set, log the number of others. */
static uint64
end_interval(bool at_once)
{
	if (num_lines == 0 || num_logged < num_lines)
		return DLOCK_NO_DEADLINE;
	if (!at_once && dlock_monotonic_now() < interval_ends)
		return interval_ends;
	if (num_others > 0)
		ereport(LOG,
				(errmsg("further leases that have run out: %llu",
						(unsigned long long) num_others),
				 errdetail("Of those that run out within a second, no more than %d are logged one by one.",
						   MAX_LINES)));
	num_lines = num_logged = 0;
	num_others = 0;
	return DLOCK_NO_DEADLINE;
}

static DlockTask tell_task = {
	.what = "logging leases that have run out",
	.perform = tell_all
};

/*
 * Log the noted leases.  At the end of the interval, or if "at_once" is set,
 * also log the number of other leases.  Returns the time of the next call.
 */
uint64
dlock_expiry_tell(DlockSpace *space, bool at_once)
{
	uint64		next = DLOCK_NO_DEADLINE;
	uint64		end;

	my_space = space;
	if (num_logged < num_lines)
		next = dlock_task_perform(&tell_task);
	end = end_interval(at_once);
	return Min(next, end);
}
