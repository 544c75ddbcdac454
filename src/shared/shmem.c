/*-------------------------------------------------------------------------
 *
 * shmem.c
 *	  Making, finding and leaving the shared state.
 *
 * dlock needs no preloading.  The first call in the cluster makes the header,
 * in the slack of the main shared memory segment.  For all the rest, it makes
 * one segment of dynamic shared memory.
 *
 * A backend is attached to the whole segment from its first call to its exit.
 * All attached processes have one layout (I5).  After an update, sessions of
 * the new library are refused while a session with the old one is attached.
 * The first new session after that replaces the segment and loads the tables,
 * as after a restart.  An old worker writes the journal before it ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/shmem.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "shared/inner.h"

/* How long a library asks for the segment, and waits for workers to end */
#define WANTED_US			INT64CONST(10000000)
#define WAIT_FOR_WORKERS_US	INT64CONST(5000000)

#define MAX_PIDS_NAMED	10

/* Valid only after dlock_attach() has returned */
dshash_table *dlock_spaces = NULL;
DlockBackend *dlock_backends = NULL;
DlockBackend *dlock_my_backend = NULL;

/* Set by the first attempt to attach */
static DlockHeader *header = NULL;

static pg_atomic_uint32 *pids = NULL;

/* Is this process counted as attached, and as a worker? */
static bool counted = false;
static bool counted_as_worker = false;

/*
 * The PIDs come first in a segment, because libraries of other layouts read
 * them (DlockHeader).  Then come DlockControl, and the area.
 */
static Size
size_of_pids(void)
{
	return CACHELINEALIGN(ProcGlobal->allProcCount * sizeof(pg_atomic_uint32));
}

static Size
size_before_area(void)
{
	return size_of_pids() +
		CACHELINEALIGN(offsetof(DlockControl, backends) +
					   ProcGlobal->allProcCount * sizeof(DlockBackend));
}

/* Set the pointers to the parts of a segment. */
static void
find_parts(char *start)
{
	pids = (pg_atomic_uint32 *) start;
	dlock_control = (DlockControl *) (start + size_of_pids());
	dlock_backends = dlock_control->backends;
	dlock_area_start = start + size_before_area();
}

/* Make or find a hash table in the area. */
static dshash_table *
open_hash_table(Size key_size, Size entry_size, dshash_table_handle *handle,
				bool make)
{
	dshash_parameters parameters = {
		.key_size = key_size,
		.entry_size = entry_size,
		.compare_function = dshash_memcmp,
		.hash_function = dshash_memhash,
		COMPAT_DSHASH_COPY(dshash_memcpy)
		.tranche_id = header->table_tranche
	};
	dshash_table *table;

	if (!make)
		return dshash_attach(dlock_area, &parameters, *handle, NULL);
	table = dshash_create(dlock_area, &parameters, NULL);
	*handle = dshash_get_hash_table_handle(table);
	return table;
}

static void
open_hash_tables(bool make)
{
	dlock_spaces = open_hash_table(sizeof(DlockSpaceKey),
								   sizeof(DlockSpaceEntry),
								   &dlock_control->spaces, make);
	dlock_accounts = open_hash_table(sizeof(Oid), sizeof(DlockAccount),
									 &dlock_control->accounts, make);
}

/*
 * Find or make the header.  "initialized" is set last: if PostgreSQL 19 cannot
 * make a tranche, the next caller starts over.
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
		found_header->segment = DSM_HANDLE_INVALID;
		pg_atomic_init_u32(&found_header->attached, 0);
		pg_atomic_init_u32(&found_header->workers, 0);
		pg_atomic_init_u64(&found_header->wanted_until, 0);
		found_header->initialized = 1;
	}
	compat_lwlock_register_tranche(found_header->memory_tranche, "DlockMemory");
	compat_lwlock_register_tranche(found_header->table_tranche, "DlockTable");
	header = found_header;
}

/* A hash of sizes, to tell builds with the same DLOCK_LAYOUT apart. */
static uint32
layout_sizes(void)
{
	static const Size sizes[] = {
		sizeof(DlockControl), sizeof(DlockBackend), sizeof(DlockSpaceEntry),
		sizeof(DlockSpace), sizeof(DlockLock),
		sizeof(DlockTicket), sizeof(DlockLeaseTicket), sizeof(DlockLease),
		sizeof(DlockAnnouncement), sizeof(DlockAccount),
		sizeof(DlockWatched), sizeof(DlockWatch), sizeof(DlockContention),
		sizeof(DlockContended), sizeof(DlockRetiming)
	};

	return hash_bytes((const unsigned char *) sizes, sizeof(sizes));
}

static bool
is_our_layout(void)
{
	return header->layout == DLOCK_LAYOUT && header->sizes == layout_sizes();
}

static dsm_segment *
map_segment(void)
{
	dsm_segment *segment = dsm_attach(header->segment);

	if (segment == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("could not attach to dlock's shared memory"),
				 errhint("Try again.")));
	return segment;
}

/*
 * Wake the processes of another layout, so that workers among them call
 * dlock_is_replaced() and end.  Returns the PIDs, at most MAX_PIDS_NAMED.
 */
static char *
rouse_others(void)
{
	StringInfoData names;
	int			count = 0;
	dsm_segment *segment = map_segment();
	pg_atomic_uint32 *others = dsm_segment_address(segment);

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	initStringInfo(&names);
	for (uint32 i = 0; i < header->num_pids; i++)
	{
		uint32		pid = pg_atomic_read_u32(&others[i]);

		if (pid == 0)
			continue;
		SetLatch(&GetPGProcByNumber(i)->procLatch);
		if (count++ < MAX_PIDS_NAMED)
			appendStringInfo(&names, "%s%u", names.len > 0 ? ", " : "", pid);
	}
	dsm_detach(segment);
	if (count > MAX_PIDS_NAMED)
		appendStringInfoString(&names, ", ...");
	return names.data;
}

/*
 * Another layout is in use.  If a session is attached, or if workers stay too
 * long, raise 55000; otherwise wait 10 ms.  Releases AddinShmemInitLock.
 */
static void
wait_for_others(TimestampTz start)
{
	uint32		attached = pg_atomic_read_u32(&header->attached);
	bool		only_workers = pg_atomic_read_u32(&header->workers) >= attached;
	TimestampTz now = GetCurrentTimestamp();
	uint32		layout = header->layout;
	char		version[sizeof(header->version)];
	char	   *names;

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	pg_atomic_write_u64(&header->wanted_until, now + WANTED_US);
	strlcpy(version, header->version, sizeof(version));
	names = rouse_others();
	LWLockRelease(AddinShmemInitLock);
	if (!only_workers || now - start > WAIT_FOR_WORKERS_US)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot use dlock %s while dlock %s is in use",
						DLOCK_VERSION, version),
				 errdetail("Version %s has layout %u of shared memory, and this session's has layout %d. Processes that use the other one: %u (%s).",
						   version, layout, DLOCK_LAYOUT, attached, names),
				 errhint("End those sessions, and let their clients connect again, because they run the library from before an update. Nothing else needs to be done.")));
	pfree(names);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 10, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Free a segment to which no process is attached.  Flush the WAL first,
 * because the positions in "removed" are lost with the segment (I15).  On a
 * standby, dlock_blocking_pids() can attach, but no rows are removed.
 */
static void
free_segment(void)
{
	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	if (!RecoveryInProgress())
		XLogFlush(compat_log_message("dlock"));
	dsm_unpin_segment(header->segment);
	header->segment = DSM_HANDLE_INVALID;
}

static void
init_backend(DlockBackend *backend)
{
	pg_atomic_init_u64(&backend->session, 0);
	SpinLockInit(&backend->mutex);
	pg_atomic_init_u32(&backend->check_requested, 0);
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

/* Initialize all that precedes the area.  The memory must be zero. */
static void
init_arrays(Size area_size)
{
	make_secrets(dlock_control->secrets);
	dlock_control->memory_tranche = header->memory_tranche;
	dlock_control->num_backends = ProcGlobal->allProcCount;
	dlock_control->area_size = area_size;
	dlock_control->area_is_small = area_size <
		TYPEALIGN_DOWN(BLCKSZ, (Size) dlock_max_memory * 1024);
	LWLockInitialize(&dlock_control->reserve_lock, header->memory_tranche);
	LWLockInitialize(&dlock_control->purge_lock, header->memory_tranche);
	pg_atomic_init_u64(&dlock_control->last_session, 0);
	pg_atomic_init_u64(&dlock_control->memory_used, 0);
	pg_atomic_init_u64(&dlock_control->spaces_left, 0);
	pg_atomic_init_u32(&dlock_control->looked_at, 0);
	for (uint32 i = 0; i < ProcGlobal->allProcCount; i++)
	{
		pg_atomic_init_u32(&pids[i], 0);
		init_backend(&dlock_backends[i]);
	}
	dlock_lock_table_init(header->table_tranche);
	dlock_id_table_init(dlock_control->ids, header->table_tranche);
	dlock_id_table_init(dlock_control->requests, header->table_tranche);
}

/* The segment is pinned last, so an error leaves nothing behind. */
static dsm_segment *
create_segment(void)
{
	Size		area_size = dlock_area_size();
	dsm_segment *segment = dlock_segment_create(size_before_area() + area_size);
	char	   *start = dsm_segment_address(segment);

	Assert(LWLockHeldByMeInMode(AddinShmemInitLock, LW_EXCLUSIVE));
	memset(start, 0, size_before_area());
	find_parts(start);
	init_arrays(area_size);
	dlock_area = dsa_create_in_place(dlock_area_start, area_size,
									 header->memory_tranche, segment);
	/* do not let it grow: the area must stay one piece (I5) */
	dsa_set_size_limit(dlock_area, area_size);
	open_hash_tables(true);
	Assert(dsa_get_address(dlock_area, dlock_control->accounts) ==
		   dlock_area_start + dlock_control->accounts);

	dsa_pin(dlock_area);
	dsm_pin_segment(segment);
	header->segment = dsm_segment_handle(segment);
	header->num_pids = ProcGlobal->allProcCount;
	header->layout = DLOCK_LAYOUT;
	header->sizes = layout_sizes();
	strlcpy(header->version, DLOCK_VERSION, sizeof(header->version));
	pg_atomic_write_u64(&header->wanted_until, 0);
	return segment;
}

static dsm_segment *
attach_segment(void)
{
	dsm_segment *segment = map_segment();

	find_parts(dsm_segment_address(segment));
	dlock_area = dsa_attach_in_place(dlock_area_start, segment);
	open_hash_tables(false);
	return segment;
}

/*
 * Exit callback.  It runs after PostgreSQL has detached all dynamic shared
 * memory, so the count is right even if another callback fails.  "attached" is
 * decremented first, because otherwise a worker would count as a session.
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

/* Join the segment; returns true if this process had to make it. */
static bool
join_segment(bool as_worker)
{
	TimestampTz start = GetCurrentTimestamp();
	MemoryContext old_context;
	dsm_segment *segment;
	bool		make;

	for (;;)
	{
		LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
		find_header();
		if (header->segment == DSM_HANDLE_INVALID || is_our_layout() ||
			pg_atomic_read_u32(&header->attached) == 0)
			break;
		wait_for_others(start);
	}

	old_context = MemoryContextSwitchTo(TopMemoryContext);
	if (header->segment != DSM_HANDLE_INVALID && !is_our_layout())
		free_segment();
	make = header->segment == DSM_HANDLE_INVALID;
	segment = make ? create_segment() : attach_segment();
	MemoryContextSwitchTo(old_context);

	/* nothing fails from here on */
	dsa_pin_mapping(dlock_area);
	dsm_pin_mapping(segment);
	if (as_worker)
		pg_atomic_fetch_add_u32(&header->workers, 1);
	pg_atomic_fetch_add_u32(&header->attached, 1);
	counted_as_worker = as_worker;
	counted = true;
	LWLockRelease(AddinShmemInitLock);
	return make;
}

/*
 * Attach this process to the shared state, or make the state.  If "as_worker"
 * is set, a library of another layout waits for this process to end.
 *
 * Raises 53200, and 55000 if another layout is in use.  After an error, the
 * resource owner detaches the segment, and the next call starts over.  The
 * caller must have registered its exit callback.
 */
void
dlock_attach(bool as_worker)
{
	bool		made;
	static bool registered = false;

	Assert(dlock_my_backend == NULL && CurrentResourceOwner != NULL);

	if (!registered)
		on_shmem_exit(uncount, 0);
	registered = true;

	made = join_segment(as_worker);
	pg_atomic_write_u32(&pids[compat_my_procno()], MyProcPid);
	dlock_my_backend = &dlock_backends[compat_my_procno()];
	dlock_my_backend->database = MyDatabaseId;
	dlock_my_backend->wait_ticket = 0;
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_write_u64(&dlock_my_backend->counters[c], 0);
	pg_atomic_write_u64(&dlock_my_backend->space, InvalidDsaPointer);
	pg_atomic_write_u64(&dlock_my_backend->session,
						pg_atomic_add_fetch_u64(&dlock_control->last_session, 1));
	if (made && dlock_control->area_is_small)
		dlock_log_small_area();
}

/* Does a library of another layout wait only for workers to end? */
bool
dlock_is_replaced(void)
{
	uint64		wanted_until = pg_atomic_read_u64(&header->wanted_until);

	return wanted_until != 0 &&
		GetCurrentTimestamp() <= (TimestampTz) wanted_until &&
		pg_atomic_read_u32(&header->attached) <=
		pg_atomic_read_u32(&header->workers);
}

/* dlock_detach() calls this last. */
void
dlock_leave_slot(void)
{
	dlock_close_accounts();
	pg_atomic_write_u64(&dlock_my_backend->session, 0);
	pg_atomic_write_u32(&pids[compat_my_procno()], 0);
	dlock_my_backend = NULL;
}

static void
call_at_exit(int code, Datum leave)
{
	((void (*) (void)) leave) ();
}

static void
roll_back_at_exit(int code, Datum arg)
{
	AbortOutOfAnyTransaction();
}

/*
 * Arrange that leave() is called at any exit, after the rollback of the open
 * transaction.  Callbacks run in reverse order; if one fails, the other still
 * runs.  PostgreSQL's own rollback at exit would come too late, after both.
 */
void
dlock_leave_at_exit(void (*leave) (void))
{
	before_shmem_exit(call_at_exit, (Datum) leave);
	before_shmem_exit(roll_back_at_exit, 0);
}
