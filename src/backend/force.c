/*-------------------------------------------------------------------------
 *
 * force.c
 *	  Log lines about tickets and leases that were ended by force.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"

#include "backend/inner.h"

/* Returns a role's name, or its OID if the role is gone. */
static const char *
role_name(Oid role)
{
	const char *name = GetUserNameFromId(role, true);

	return name ? name : psprintf("%u", role);
}

/* Returns a sentence about the caller. */
char *
dlock_describe_caller(void)
{
	Oid			session = GetSessionUserId();

	if (session == GetUserId())
		return psprintf("By process %d of role \"%s\".", MyProcPid,
						role_name(session));
	return psprintf("By process %d of role \"%s\", acting as \"%s\".", MyProcPid,
					role_name(session), role_name(GetUserId()));
}

/* Does the caller lack the lease's role?  Sets *role to that role's name. */
bool
dlock_lease_is_other(DlockSpace *space, int64 number, NameData *role)
{
	int			before = dlock_record_begin_uses();
	DlockLease *lease;
	DlockLeaseTicket *ticket;
	bool		is_other;

	dlock_id_find(space, number, &lease, &ticket);
	if (lease)
		namestrcpy(role, dlock_lease_role_name(lease));
	is_other = lease && !is_member_of_role_nosuper(GetUserId(), lease->role);
	dlock_record_end_uses(before);
	return is_other;
}

void
dlock_log_forced_release(DlockSpace *space, int64 number,
						 const DlockForced *forced)
{
	StringInfoData detail;

	/* the log line may reveal the next grant (I15) */
	dlock_journal_flush_removal(space, &forced->key);
	initStringInfo(&detail);
	appendStringInfo(&detail, "%s %s ", dlock_describe_caller(),
					 forced->held ? "It was held by" :
					 forced->waited ? "It was a place in the queue, of" :
					 "It had ended before, and kept the lock closed, of");
	if (forced->pid != 0)
		appendStringInfo(&detail, "process %d of role \"%s\"", forced->pid,
						 role_name(forced->role));
	else
		dlock_lease_name_append(&detail, &forced->lease);
	appendStringInfoChar(&detail, '.');
	ereport(LOG,
			(errmsg("ticket %lld of lock \"%.*s\" was released by force",
					(long long) number, forced->key.length, forced->key.name),
			 errdetail_internal("%s", detail.data)));
}

void
dlock_log_forced_close(int64 number, const char *role, int64 tickets)
{
	ereport(LOG,
			(errmsg("lease %lld of role \"%s\" was closed by force",
					(long long) number, role),
			 errdetail("%s It had %lld tickets.", dlock_describe_caller(),
					   (long long) tickets)));
}
