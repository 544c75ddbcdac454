/*-------------------------------------------------------------------------
 *
 * shmem.c
 *	  Making, finding and leaving the shared state.
 *
 * Nothing is made at server start, so that dlock needs no preloading: the
 * first call in the cluster makes the header, in the slack that every
 * PostgreSQL leaves in its main shared memory, and the memory area.  After a
 * crash PostgreSQL makes its shared memory anew, and so this begins anew as
 * well.
 *
 * A backend attaches at its first call and stays attached until it exits.  All
 * of them are of one layout.  After an update, sessions of the new library are
 * refused while one of the old is left; then the first of them frees the old
 * area and makes its own.  Of leases nothing is lost by that: their tables are
 * read again, as after a restart.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/dsm_impl.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/shmem.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "shared/shared.h"

/* How long a new layout is waited for, and waits for workers to give way */
#define WANTED_US			INT64CONST(10000000)
#define WAIT_FOR_WORKERS_US	INT64CONST(5000000)

#define MAX_PIDS_NAMED	10

/* The least that the area may grow to, in however small a file system */
#define MIN_AREA_SIZE	(2 * 1024 * 1024)

/* What is valid only once dlock_attach() has returned */
dshash_table *dlock_spaces = NULL;
DlockBackend *dlock_backends = NULL;
DlockBackend *dlock_my_backend = NULL;

/* Found at the first attempt to attach */
static DlockHeader *header = NULL;

/* This process's entry in the header's list, and what it is counted in */
static pg_atomic_uint32 *my_pid = NULL;
static bool counted = false;
static bool counted_as_worker = false;

static dshash_parameters
parameters_of(Size key_size, Size entry_size)
{
	return (dshash_parameters)
	{
		.key_size = key_size,
		.entry_size = entry_size,
		.compare_function = dshash_memcmp,
		.hash_function = dshash_memhash,
		COMPAT_DSHASH_COPY(dshash_memcpy)
		.tranche_id = header->table_tranche
	};
}

static void
table_parameters(dshash_parameters *spaces_table,
				 dshash_parameters *accounts_table)
{
	*spaces_table = parameters_of(sizeof(DlockSpaceKey),
								  sizeof(DlockSpaceEntry));
	*accounts_table = parameters_of(sizeof(Oid), sizeof(DlockAccount));
}

/*
 * The header, and whose area it is
 */

/* What this process is attached to, before all of it is known to be there */
typedef struct Attachment
{
	dsa_area   *area;
	DlockControl *control;
	dshash_table *spaces;
	dshash_table *accounts;
	DlockBackend *backends;
	pg_atomic_uint32 *pids;
} Attachment;

/*
 * Find the header, or make it.  The caller holds AddinShmemInitLock.
 *
 * The tranches are made before "initialized" is set and not by the one who
 * found nothing, because making them can fail on PostgreSQL 19: then the next
 * caller goes on with what is there.
 */
static void
find_header(void)
{
	DlockHeader *found_header;
	bool		found;

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	found_header = ShmemInitStruct(DLOCK_HEADER_NAME, sizeof(DlockHeader),
								   &found);
	if (!found)
		memset(found_header, 0, sizeof(DlockHeader));
	if (found_header->initialized == 0)
	{
		found_header->memory_tranche = compat_lwlock_new_tranche("DlockMemory");
		found_header->table_tranche = compat_lwlock_new_tranche("DlockTable");
		found_header->area = DSM_HANDLE_INVALID;
		pg_atomic_init_u32(&found_header->attached, 0);
		pg_atomic_init_u32(&found_header->workers, 0);
		pg_atomic_init_u64(&found_header->wanted_until, 0);
		found_header->initialized = 1;
	}
	compat_lwlock_register_tranche(found_header->memory_tranche, "DlockMemory");
	compat_lwlock_register_tranche(found_header->table_tranche, "DlockTable");
	header = found_header;
}

/*
 * The sizes of what processes share, as one number: should the layout have
 * changed and its number have not, this tells most such builds apart.
 */
static uint32
layout_sizes(void)
{
	static const Size sizes[] = {
		sizeof(DlockControl), sizeof(DlockBackend), sizeof(DlockSpaceEntry),
		sizeof(DlockSpace), sizeof(DlockPartition), sizeof(DlockLock),
		sizeof(DlockTicket), sizeof(DlockLeaseTicket), sizeof(DlockLease),
		sizeof(DlockIdPartition), sizeof(DlockAnnouncement), sizeof(DlockAccount),
		sizeof(DlockWatched), sizeof(DlockWatch), sizeof(DlockContention),
		sizeof(DlockContended), sizeof(DlockRetiming), sizeof(DlockInLease)
	};

	return hash_bytes((const unsigned char *) sizes, sizeof(sizes));
}

static bool
is_our_layout(void)
{
	return header->layout == DLOCK_LAYOUT && header->sizes == layout_sizes();
}

/*
 * Who is attached to an area of another layout: wake them all, so that the
 * workers among them see that they are in the way, and name some.  The caller
 * holds AddinShmemInitLock.
 */
static char *
rouse_others(void)
{
	StringInfoData names;
	int			count = 0;
	dsa_area   *area = dsa_attach(header->area);
	pg_atomic_uint32 *pids = dsa_get_address(area, header->pids);

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	initStringInfo(&names);
	for (uint32 i = 0; i < header->num_pids; i++)
	{
		uint32		pid = pg_atomic_read_u32(&pids[i]);

		if (pid == 0)
			continue;
		SetLatch(&GetPGProcByNumber(i)->procLatch);
		if (count++ < MAX_PIDS_NAMED)
			appendStringInfo(&names, "%s%u", names.len > 0 ? ", " : "", pid);
	}
	dsa_detach(area);
	if (count > MAX_PIDS_NAMED)
		appendStringInfoString(&names, ", ...");
	return names.data;
}

/*
 * Another layout is in use.  Where only its workers are left, wait for them to
 * go, which they do when they see that they are in the way; otherwise raise an
 * error.  Called with AddinShmemInitLock held, and returns without.
 */
static void
wait_for_others(TimestampTz start)
{
	uint32		attached = pg_atomic_read_u32(&header->attached);
	bool		only_workers = pg_atomic_read_u32(&header->workers) >= attached;
	TimestampTz now = GetCurrentTimestamp();
	uint32		layout = header->layout;
	char		version[sizeof(header->version)];
	char	   *pids;

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	pg_atomic_write_u64(&header->wanted_until, now + WANTED_US);
	strlcpy(version, header->version, sizeof(version));
	pids = rouse_others();
	LWLockRelease(AddinShmemInitLock);
	if (!only_workers || now - start > WAIT_FOR_WORKERS_US)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot use dlock %s while dlock %s is in use",
						DLOCK_VERSION, version),
				 errdetail("Version %s has layout %u of shared memory, and this session's has layout %d. Processes that use the other one: %u (%s).",
						   version, layout, DLOCK_LAYOUT, attached, pids),
				 errhint("End those sessions, and let their clients connect again, as they run the library of before an update. Nothing else needs to be done.")));
	pfree(pids);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 10, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Free the area of another layout, to which nobody is attached.
 *
 * What its worker has written, and what was free for the next because of that,
 * is in the WAL, but perhaps not flushed; and where that is stands in the area.
 * On a standby, where dlock_blocking_pids() alone attaches, there is no worker,
 * and nothing can be written.
 */
static void
free_area_of_others(void)
{
	dsa_area   *area = dsa_attach(header->area);

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	if (!RecoveryInProgress())
		XLogFlush(compat_log_message("dlock"));
	dsa_unpin(area);
	header->area = DSM_HANDLE_INVALID;
	dsa_detach(area);
}

static void
init_backend(DlockBackend *backend)
{
	pg_atomic_init_u64(&backend->session, 0);
	SpinLockInit(&backend->mutex);
	pg_atomic_init_u32(&backend->check_requested, 0);
	pg_atomic_init_u32(&backend->setter, InvalidTransactionId);
	pg_atomic_init_u64(&backend->cursor, InvalidDsaPointer);
	pg_atomic_init_u32(&backend->lost, 0);
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_init_u64(&backend->counters[c], 0);
	pg_atomic_init_u64(&backend->space, InvalidDsaPointer);
}

static void
make_secrets(uint64 *secrets)
{
	if (!pg_strong_random(secrets, 2 * sizeof(uint64)))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate a random hash key")));
	secrets[0] |= 1;
	secrets[1] |= 1;
}

/* What does not lead to anything else in the area */
static void
init_control(DlockControl *control)
{
	make_secrets(control->secrets);
	control->memory_tranche = header->memory_tranche;
	control->table_tranche = header->table_tranche;
	LWLockInitialize(&control->reserve_lock, header->memory_tranche);
	LWLockInitialize(&control->purge_lock, header->memory_tranche);
	pg_atomic_init_u64(&control->last_session, 0);
	pg_atomic_init_u64(&control->memory_used, 0);
	pg_atomic_init_u32(&control->readers, 0);
	pg_atomic_init_u32(&control->lost, 0);
	pg_atomic_init_u64(&control->spaces_left, 0);
	pg_atomic_init_u32(&control->looked_at, 0);
}

/*
 * Make the memory area and what is in it.  An error on the way leaves nothing
 * behind: the area is pinned last, and goes with the transaction's resource
 * owner until then.
 */
static void
create_area(Attachment *made)
{
	dshash_parameters spaces_parameters;
	dshash_parameters accounts_parameters;
	int			num_backends = ProcGlobal->allProcCount;
	dsa_pointer control;
	dsa_pointer locks;
	dsa_pointer ids;
	dsa_pointer requests;
	dsa_pointer backends;
	dsa_pointer pids;
	int64		size;
	int64		left;

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	table_parameters(&spaces_parameters, &accounts_parameters);
	made->area = dsa_create(header->memory_tranche);
	control = dsa_allocate0(made->area, sizeof(DlockControl));
	made->control = dsa_get_address(made->area, control);
	made->control->room = PG_INT64_MAX;
	if (dlock_file_system(&size, &left))
	{
		/* before it grows, as a limit below its size would be none */
		dsa_set_size_limit(made->area, Max(size / 2, MIN_AREA_SIZE));
		made->control->room = Max(size / 2, MIN_AREA_SIZE) / 4 * 3;
	}
	made->spaces = dshash_create(made->area, &spaces_parameters, NULL);
	made->accounts = dshash_create(made->area, &accounts_parameters, NULL);
	locks = dlock_lock_table_create(made->area, header->table_tranche);
	ids = dlock_id_table_create(made->area, header->table_tranche);
	requests = dlock_id_table_create(made->area, header->table_tranche);
	backends = dsa_allocate0(made->area, num_backends * sizeof(DlockBackend));
	made->backends = dsa_get_address(made->area, backends);
	pids = dsa_allocate0(made->area, num_backends * sizeof(pg_atomic_uint32));
	made->pids = dsa_get_address(made->area, pids);
	for (int i = 0; i < num_backends; i++)
	{
		init_backend(&made->backends[i]);
		pg_atomic_init_u32(&made->pids[i], 0);
	}

	init_control(made->control);
	made->control->spaces = dshash_get_hash_table_handle(made->spaces);
	made->control->locks = locks;
	made->control->ids = ids;
	made->control->requests = requests;
	made->control->accounts = dshash_get_hash_table_handle(made->accounts);
	made->control->backends = backends;
	made->control->num_backends = num_backends;

	dsa_pin(made->area);
	header->area = dsa_get_handle(made->area);
	header->control = control;
	header->pids = pids;
	header->num_pids = num_backends;
	header->layout = DLOCK_LAYOUT;
	header->sizes = layout_sizes();
	strlcpy(header->version, DLOCK_VERSION, sizeof(header->version));
	pg_atomic_write_u64(&header->wanted_until, 0);
}

static void
attach_area(Attachment *found)
{
	dshash_parameters spaces_parameters;
	dshash_parameters accounts_parameters;

	table_parameters(&spaces_parameters, &accounts_parameters);
	found->area = dsa_attach(header->area);
	found->control = dsa_get_address(found->area, header->control);
	found->spaces = dshash_attach(found->area, &spaces_parameters,
								  found->control->spaces, NULL);
	found->accounts = dshash_attach(found->area, &accounts_parameters,
									found->control->accounts, NULL);
	found->backends = dsa_get_address(found->area, found->control->backends);
	found->pids = dsa_get_address(found->area, header->pids);
}

/*
 * This process has let go of its memory, and so does not count any more.  The
 * callback comes behind the one that detaches from all dynamic shared memory,
 * and is the only place where the count decreases: a backend that fails at
 * anything else at its end is not forgotten.
 *
 * A worker counts among the workers for longer, so that it is never taken for
 * a session as it goes.
 */
static void
uncount(int code, Datum arg)
{
	if (counted)
		pg_atomic_fetch_sub_u32(&header->attached, 1);
	if (counted_as_worker)
		pg_atomic_fetch_sub_u32(&header->workers, 1);
	counted = counted_as_worker = false;
}

/*
 * Find the area, or make it, and count this process as attached.  Returns
 * whether it was made.
 */
static bool
join_area(Attachment *attachment)
{
	TimestampTz start = GetCurrentTimestamp();
	ErrorContextCallback context;
	MemoryContext old_context;
	bool		make;

	for (;;)
	{
		LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
		find_header();
		if (header->area == DSM_HANDLE_INVALID || is_our_layout() ||
			pg_atomic_read_u32(&header->attached) == 0)
			break;
		wait_for_others(start);
	}

	old_context = MemoryContextSwitchTo(TopMemoryContext);
	dlock_growth_begin(&context);
	if (header->area != DSM_HANDLE_INVALID && !is_our_layout())
		free_area_of_others();
	make = header->area == DSM_HANDLE_INVALID;
	if (make)
		create_area(attachment);
	else
		attach_area(attachment);
	/* each of these may map a segment */
	dlock_lock_table_attach(attachment->area, attachment->control->locks);
	dlock_id_tables_attach(attachment->area, attachment->control);
	dlock_growth_end(&context);
	MemoryContextSwitchTo(old_context);

	/* last, as nothing can fail any more */
	dsa_pin_mapping(attachment->area);
	pg_atomic_fetch_add_u32(&header->attached, 1);
	counted = true;
	LWLockRelease(AddinShmemInitLock);
	return make;
}

/*
 * Attach this backend to the shared state, making it where there is none.
 * Raises whatever a lack of memory brings, and 55000 where another layout is
 * in use; the next call then starts over.  Nothing can fail behind join_area(),
 * which keeps what it has mapped: a process cannot map that a second time.  But
 * the warning at the end may take an interrupt.
 *
 * The caller registers its exit callback before the backend is entered into
 * its slot, so that nothing is ever held without it.
 */
void
dlock_attach(void)
{
	Attachment	attachment;
	bool		made;
	static bool registered = false;

	Assert(dlock_my_backend == NULL);

	if (!registered)
		on_shmem_exit(uncount, 0);
	registered = true;

	made = join_area(&attachment);
	dlock_area = attachment.area;
	dlock_control = attachment.control;
	dlock_spaces = attachment.spaces;
	dlock_accounts = attachment.accounts;
	dlock_backends = attachment.backends;
	my_pid = &attachment.pids[compat_my_procno()];
	pg_atomic_write_u32(my_pid, MyProcPid);
	dlock_my_backend = &dlock_backends[compat_my_procno()];
	dlock_my_backend->database = MyDatabaseId;
	dlock_my_backend->wait_ticket = 0;
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_write_u64(&dlock_my_backend->counters[c], 0);
	pg_atomic_write_u64(&dlock_my_backend->space, InvalidDsaPointer);
	pg_atomic_write_u64(&dlock_my_backend->session,
						pg_atomic_add_fetch_u64(&dlock_control->last_session, 1));
	if (made)
		dlock_warn_of_file_system();
}

/* This process, which is attached, is a worker, and gives way to others. */
void
dlock_count_as_worker(void)
{
	pg_atomic_fetch_add_u32(&header->workers, 1);
	counted_as_worker = true;
}

/*
 * Is somebody waiting who has another layout, and are only workers in the way?
 */
bool
dlock_is_replaced(void)
{
	uint64		wanted_until = pg_atomic_read_u64(&header->wanted_until);

	return wanted_until != 0 &&
		GetCurrentTimestamp() <= (TimestampTz) wanted_until &&
		pg_atomic_read_u32(&header->attached) <=
		pg_atomic_read_u32(&header->workers);
}

/*
 * The last thing an exiting backend does here, behind dlock_space_leave_all():
 * free its slot.  Tickets that it could not give back for whatever reason are
 * the waiters' and the worker's to clear away; see dlock_queue_reap().
 *
 * Raises nothing and allocates nothing.
 */
void
dlock_detach(void)
{
	if (dlock_my_backend == NULL)
		return;
	dlock_report_memory();
	pg_atomic_write_u64(&dlock_my_backend->session, 0);
	pg_atomic_write_u32(my_pid, 0);
	dlock_my_backend = NULL;
	dlock_close_accounts();
}
