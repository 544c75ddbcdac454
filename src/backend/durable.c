/*-------------------------------------------------------------------------
 *
 * durable.c
 *	  Waiting until what a session has changed in leases is durable.
 *
 * The worker writes it, in a transaction that commits asynchronously, and
 * where several wait, flushes it.  A caller that needs durability waits until
 * the change is in the WAL, flushes the WAL up to there, and waits for
 * standbys, as its own synchronous_commit says (I19).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "miscadmin.h"
#include "replication/syncrep.h"
#include "utils/guc.h"
#include "utils/wait_event.h"

#include "backend/inner.h"
#include "shared/shared.h"
#include "tables/tables.h"

/* How long, and how often, a waiter trusts that the worker comes */
#define RETRY_MS	1000
#define MAX_RETRIES 10

/*
 * Make the WAL up to here durable at a level; false where the wait for the
 * standbys was cut short.  PostgreSQL itself only warns then, since a commit
 * cannot be taken back; but what we wait for can.
 */
static bool
make_durable(XLogRecPtr lsn)
{
	int			durability = synchronous_commit;

	if (durability == SYNCHRONOUS_COMMIT_OFF)
		return true;
	XLogFlush(lsn);
	if (dlock_quorum_is_acknowledged(lsn, durability))
		return true;
	/* all whose changes were written in one transaction have the same one */
	if (COMPAT_SYNC_REP_TAKES_NO_EQUALS)
		lsn = dlock_quorum_log_message();
	HOLD_INTERRUPTS();
	SyncRepWaitForLSN(lsn, true);
	RESUME_INTERRUPTS();
	return dlock_quorum_is_acknowledged(lsn, durability);
}

/*
 * Is the change in the WAL?  If so, *lsn is where.
 */
static bool
is_written(DlockSpace *space, DlockRecord *record, uint64 mark,
		   XLogRecPtr *lsn)
{
	/* the difference, as marks may begin anew */
	if ((int32) (pg_atomic_read_u32(&record->written) - mark) < 0)
		return false;
	pg_read_barrier();
	*lsn = dlock_journal_position(space, record);
	return true;
}

static void
raise_failure(DlockSpace *space, const char *outcome)
{
	int			code = (int) pg_atomic_read_u32(&space->failure);

	/* what somebody has made of the tables can be told from here */
	if (code == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE)
		dlock_rows_check(space);
	ereport(ERROR,
			(errcode(code),
			 errmsg("could not write to the tables of leases"),
			 errdetail("The worker of dlock failed to. %s", outcome),
			 errhint("See the server log for the reason.")));
}

static void
raise_no_worker(const char *detail)
{
	ConditionVariableCancelSleep();
	ereport(ERROR,
			(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			 errmsg("could not start the worker of dlock"),
			 errdetail("%s", detail),
			 errhint("See the server log, increase max_worker_processes, or use session or transaction scope.")));
}

/*
 * Wait until all that has happened to a record so far is durable at the level
 * of synchronous_commit.  Raises an error where that fails, or where no worker
 * is there to write it; "outcome" tells what has become of the change then,
 * which is the caller's to see to.
 */
static void
wait_until_durable(DlockSpace *space, DlockRecord *record, const char *outcome)
{
	uint32		failures = pg_atomic_read_u32(&space->failures);
	int			alone = 0;		/* looks at which no worker was there */
	uint32		mark;
	XLogRecPtr	lsn;
	bool		durable;

	LWLockAcquire(&space->lease_lock, LW_SHARED);
	mark = record->marked;
	LWLockRelease(&space->lease_lock);
	while (!is_written(space, record, mark, &lsn))
	{
		ConditionVariablePrepareToSleep(&record->changed);
		if (is_written(space, record, mark, &lsn))
			break;
		if (record->finished)
		{
			/* it is over, and was never written: the caller will see */
			lsn = InvalidXLogRecPtr;
			break;
		}
		if (pg_atomic_read_u32(&space->failures) != failures)
		{
			ConditionVariableCancelSleep();
			raise_failure(space, outcome);
		}
		if (!dlock_worker_wake(space))
			raise_no_worker("No background worker slot is free, and leases need a worker.");
		if (pg_atomic_read_u32(&space->worker) != 0)
			alone = 0;
		else if (++alone > MAX_RETRIES)
			raise_no_worker("It was asked for several times, and has not come.");
		(void) ConditionVariableTimedSleep(&record->changed, RETRY_MS,
										   PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
	durable = make_durable(lsn);
	/* the last look: a cancel that comes later finds done what was asked for */
	CHECK_FOR_INTERRUPTS();
	if (!durable)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("canceled while waiting for synchronous replication"),
				 errdetail("%s", outcome),
				 errhint("Try again when the standbys answer.")));
}

/*
 * Wait until all that has happened so far to a lease, or to a ticket and its
 * lease, is durable at the level of synchronous_commit.  Each caller that counts
 * on a lease waits here, and so its durability is raised here.
 */
static void
wait_for_record(DlockSpace *space, DlockRecord *record, const char *outcome)
{
	DlockLease *lease = dlock_record_lease_of(record);
	DlockRecord *of_lease = dlock_record_of_lease(record);

	if (synchronous_commit > dlock_lease_durability(lease) &&
		!DsaPointerIsValid(lease->retiming))
		dlock_request_check_memory(space, lease->role);
	dlock_lease_raise_durability(space, record, synchronous_commit);
	wait_until_durable(space, record, outcome);
	if (of_lease != record)
		wait_until_durable(space, of_lease, outcome);
}

/*
 * The same for a caller that asks for a ticket or a lease, and takes it back if
 * this fails.  Standbys count for the lease even then: another caller can have got
 * the same ticket at that level meanwhile.
 */
void
dlock_durable_wait(DlockSpace *space, DlockRecord *record)
{
	bool		is_raised = synchronous_commit >
		dlock_lease_durability(dlock_record_lease_of(record));

	wait_for_record(space, record, is_raised ?
					_("The request was taken back. The lease keeps the higher durability.") :
					_("The request was taken back."));
}

/*
 * The same for a caller that only asks about, or changes, what others count on: the
 * durability stays.
 */
void
dlock_durable_wait_only(DlockSpace *space, DlockRecord *record,
						const char *outcome)
{
	wait_until_durable(space, record, outcome);
}

/*
 * The same at a level that may be higher than that of synchronous_commit, as
 * others count on it.
 */
void
dlock_durable_wait_at(DlockSpace *space, DlockRecord *record, int level,
					  const char *outcome)
{
	static const char *const names[] = {
		[SYNCHRONOUS_COMMIT_OFF] = "off",
		[SYNCHRONOUS_COMMIT_LOCAL_FLUSH] = "local",
		[SYNCHRONOUS_COMMIT_REMOTE_WRITE] = "remote_write",
		[SYNCHRONOUS_COMMIT_REMOTE_FLUSH] = "on",
		[SYNCHRONOUS_COMMIT_REMOTE_APPLY] = "remote_apply"
	};
	int			nest_level;

	StaticAssertStmt(lengthof(names) == SYNCHRONOUS_COMMIT_REMOTE_APPLY + 1,
					 "names must match SyncCommitLevel");
	if (level <= synchronous_commit)
	{
		wait_for_record(space, record, outcome);
		return;
	}
	/* PostgreSQL's wait for standbys knows no other way; an error undoes it */
	nest_level = NewGUCNestLevel();
	(void) set_config_option("synchronous_commit", names[level], PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	wait_for_record(space, record, outcome);
	AtEOXact_GUC(true, nest_level);
}
