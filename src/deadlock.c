/*-------------------------------------------------------------------------
 *
 * deadlock.c
 *	  Who waits for whom.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/array.h"

#include "dlock.h"

/* A growing set of process ids, filled under an entry's lock */
typedef struct PidSet
{
	int			count;
	int			max;
	int		   *pids;
	bool		overflow;
} PidSet;

static void
add_pid(const DlockTicket *ticket, void *arg)
{
	PidSet	   *set = arg;

	for (int i = 0; i < set->count; i++)
	{
		if (set->pids[i] == ticket->pid)
			return;
	}
	if (set->count < set->max)
		set->pids[set->count++] = ticket->pid;
	else
		set->overflow = true;
}

/*
 * What a backend waits for; false where it does not.
 */
bool
dlock_backend_wait(int procno, DlockWait *wait)
{
	DlockBackend *backend = &dlock_backends[procno];

	if (pg_atomic_read_u64(&backend->session) == 0)
		return false;
	SpinLockAcquire(&backend->mutex);
	wait->count = backend->wait_count;
	wait->number = backend->wait_ticket;
	if (wait->number != 0)
		memcpy(&wait->key, &backend->wait_key,
			   offsetof(DlockKey, name) + backend->wait_key.length);
	SpinLockRelease(&backend->mutex);
	return wait->number != 0;
}

PG_FUNCTION_INFO_V1(dlock_blocking_pids);
Datum
dlock_blocking_pids(PG_FUNCTION_ARGS)
{
	PGPROC	   *proc;
	DlockWait	wait;
	PidSet		set = {0};
	Datum	   *result;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", "pid")));
	if (dlock_my_backend == NULL)
		dlock_session_attach();

	proc = BackendPidGetProc(PG_GETARG_INT32(0));
	if (proc && dlock_backend_wait(compat_procno(proc), &wait))
	{
		/* no more backends than these can be in the way */
		set.max = dlock_control->num_backends;
		set.pids = palloc(set.max * sizeof(int));
		(void) dlock_queue_blockers(&wait.key, wait.number, add_pid, &set);
	}

	result = palloc(Max(set.count, 1) * sizeof(Datum));
	for (int i = 0; i < set.count; i++)
		result[i] = Int32GetDatum(set.pids[i]);
	PG_RETURN_ARRAYTYPE_P(construct_array(result, set.count, INT4OID,
										  sizeof(int32), true, TYPALIGN_INT));
}
