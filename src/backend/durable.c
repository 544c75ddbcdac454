/*-------------------------------------------------------------------------
 *
 * durable.c
 *	  Waiting until a session's changes of leases are durable.
 *
 * The worker writes changes in transactions that commit asynchronously, and
 * flushes the WAL only if several callers wait, or have just waited.  A caller
 * waits until its change is in the WAL, flushes, and waits for standbys (I19).
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
#include "tables/tables.h"

/* Interval of checks for a worker, and how many in a row may find none */
#define RETRY_MS	1000
#define MAX_RETRIES 10

/*
 * Make the WAL durable up to "lsn".  Returns false if the wait for standbys
 * was canceled, for which PostgreSQL raises only a warning.
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
	/* get our own LSN, as SyncRepWaitForLSN() asserts that no two are equal */
	if (COMPAT_SYNC_REP_TAKES_NO_EQUALS)
	{
		lsn = compat_log_message("dlock");
		XLogFlush(lsn);
	}
	HOLD_INTERRUPTS();
	SyncRepWaitForLSN(lsn, true);
	RESUME_INTERRUPTS();
	return dlock_quorum_is_acknowledged(lsn, durability);
}

/* Is the change in the WAL?  If so, sets *lsn to the change's position. */
static bool
is_written(DlockSpace *space, DlockRecord *record, uint64 mark,
		   XLogRecPtr *lsn)
{
	/* compare the difference, because marks wrap around */
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

	/* if the tables were altered, this raises an error that says how */
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
 * Wait until a record's changes so far are durable at synchronous_commit.
 * Does not raise the lease's durability.  If the wait fails, "outcome" says in
 * the error's detail what becomes of the changes.
 */
void
dlock_durable_wait_only(DlockSpace *space, DlockRecord *record,
						const char *outcome)
{
	uint32		failures = pg_atomic_read_u32(&space->failures);
	int			alone = 0;		/* checks in a row that found no worker */
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
			/* nothing to flush; the caller checks if the record has ended */
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
		if (dlock_office_holder(space, DLOCK_WORKER) >= 0)
			alone = 0;
		else if (++alone > MAX_RETRIES)
			raise_no_worker("It was asked for several times, and has not come.");
		(void) ConditionVariableTimedSleep(&record->changed, RETRY_MS,
										   PG_WAIT_EXTENSION);
	}
	ConditionVariableCancelSleep();
	durable = make_durable(lsn);
	/* the last chance for a cancel: after this, the request is done */
	CHECK_FOR_INTERRUPTS();
	if (!durable)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("canceled while waiting for synchronous replication"),
				 errdetail("%s", outcome),
				 errhint("Try again when the standbys answer.")));
}

/*
 * Raise the lease's durability to synchronous_commit at least: callers rely on
 * that level.  Wait until the changes of record and lease are durable.
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
	dlock_durable_wait_only(space, record, outcome);
	if (of_lease != record)
		dlock_durable_wait_only(space, of_lease, outcome);
}

/*
 * Wait until a request's record is durable.  If the wait fails, the caller
 * undoes the request.  The durability stays: other callers may rely on it.
 */
void
dlock_durable_wait(DlockSpace *space, DlockRecord *record)
{
	bool		is_raised = synchronous_commit >
		dlock_lease_durability(dlock_record_lease_of(record));

	wait_for_record(space, record, is_raised ?
					_("The request was undone. The lease keeps the higher durability.") :
					_("The request was undone."));
}

/* Wait for durability at the higher of "level" and synchronous_commit. */
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
	/* SyncRepWaitForLSN() reads synchronous_commit; an error restores it */
	nest_level = NewGUCNestLevel();
	(void) set_config_option("synchronous_commit", names[level], PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	wait_for_record(space, record, outcome);
	AtEOXact_GUC(true, nest_level);
}
