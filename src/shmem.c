/*-------------------------------------------------------------------------
 *
 * shmem.c
 *	  Making, finding and leaving the shared state; name spaces; counters.
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

#include <sys/statvfs.h>

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/dependency.h"
#include "catalog/pg_class.h"
#include "catalog/pg_extension.h"
#include "commands/extension.h"
#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/dsm_impl.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/shmem.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "dlock.h"

/* How long a new layout is waited for, and waits for workers to give way */
#define WANTED_US			INT64CONST(10000000)
#define WAIT_FOR_WORKERS_US	INT64CONST(5000000)

#define MAX_PIDS_NAMED	10

/* The least that the area may grow to, in however small a file system */
#define MIN_AREA_SIZE	(2 * 1024 * 1024)

/* What is valid only once dlock_attach() has returned */
DlockControl *dlock_control = NULL;
dsa_area   *dlock_area = NULL;
dshash_table *dlock_locks = NULL;
dshash_table *dlock_ids = NULL;
DlockBackend *dlock_backends = NULL;
DlockBackend *dlock_my_backend = NULL;

static dshash_table *spaces = NULL;

/* Found at the first attempt to attach */
static DlockHeader *header = NULL;

/* This process's entry in the header's list, and what it is counted in */
static pg_atomic_uint32 *my_pid = NULL;
static bool counted = false;
static bool counted_as_worker = false;

/* The current database's space, valid until pg_proc changes */
static DlockSpace *current_space = NULL;
static bool current_space_valid = false;

/* Every space this backend is counted in as a user; a list of DlockSpace */
static List *attached_spaces = NIL;

/*
 * Memory that this backend has taken and not yet reported, or given back.
 * Where each lock and each release would report, all backends would fight for
 * that one cache line.  All of them together can be off by a few megabytes.
 */
static int64 unreported_memory = 0;

#define REPORT_MEMORY_EVERY 4096

static int
key_compare(const void *a, const void *b, size_t size, void *arg)
{
	return dlock_key_equal(a, b) ? 0 : 1;
}

static dshash_hash
key_hash(const void *key, size_t size, void *arg)
{
	return ((const DlockKey *) key)->hash;
}

#ifdef COMPAT_DSHASH_HAS_COPY
static void
key_copy(void *to, const void *from, size_t size, void *arg)
{
	dlock_key_copy(to, from);
}
#endif

static void
table_parameters(dshash_parameters *spaces_table,
				 dshash_parameters *locks_table,
				 dshash_parameters *ids_table)
{
	*spaces_table = (dshash_parameters)
	{
		.key_size = sizeof(DlockSpaceKey),
		.entry_size = sizeof(DlockSpaceEntry),
		.compare_function = dshash_memcmp,
		.hash_function = dshash_memhash,
		COMPAT_DSHASH_COPY(dshash_memcpy)
		.tranche_id = header->table_tranche
	};
	*locks_table = (dshash_parameters)
	{
		.key_size = sizeof(DlockKey),
		.entry_size = sizeof(DlockLock),
		.compare_function = key_compare,
		.hash_function = key_hash,
		COMPAT_DSHASH_COPY(key_copy)
		.tranche_id = header->table_tranche
	};
	*ids_table = (dshash_parameters)
	{
		.key_size = sizeof(DlockIdKey),
		.entry_size = sizeof(DlockIdEntry),
		.compare_function = dshash_memcmp,
		.hash_function = dshash_memhash,
		COMPAT_DSHASH_COPY(dshash_memcpy)
		.tranche_id = header->table_tranche
	};
}

/*
 * Errors of the memory area
 */

/* The directory of dynamic shared memory, where it has one that is known */
static const char *
memory_directory(void)
{
	return dynamic_shared_memory_type == DSM_IMPL_POSIX ? "/dev/shm" :
		dynamic_shared_memory_type == DSM_IMPL_MMAP ? PG_DYNSHMEM_DIR : NULL;
}

/*
 * A file system that is full, as PostgreSQL reports it, is memory that is
 * used up for those who call dlock.
 */
static void
explain_growth(void *arg)
{
	const char *type;

	if (geterrcode() != ERRCODE_DISK_FULL &&
		geterrcode() != ERRCODE_OUT_OF_MEMORY)
		return;
	type = GetConfigOption("dynamic_shared_memory_type", true, false);
	errcode(ERRCODE_OUT_OF_MEMORY);
	if (memory_directory())
		errhint("With dynamic_shared_memory_type = %s, locks are kept in the file system of \"%s\": give it more room, or decrease dlock.max_memory.",
				type, memory_directory());
	else
		errhint("Let the operating system give more memory to dynamic_shared_memory_type = %s, or decrease dlock.max_memory.",
				type);
}

/* All that lets the area grow stands between these two. */
static void
begin_growth(ErrorContextCallback *context)
{
	context->callback = explain_growth;
	context->arg = NULL;
	context->previous = error_context_stack;
	error_context_stack = context;
}

static void
end_growth(ErrorContextCallback *context)
{
	error_context_stack = context->previous;
}

/* dshash_find_or_insert(), which raises 53200 where there is no memory */
void *
dlock_table_insert(dshash_table *table, const void *key, bool *found)
{
	ErrorContextCallback context;
	void	   *entry;

	begin_growth(&context);
	entry = dshash_find_or_insert(table, key, found);
	end_growth(&context);
	return entry;
}

/*
 * Size and free space of the file system that the area is in, in bytes; false
 * where it is in none.
 */
static bool
file_system(int64 *size, int64 *left)
{
	struct statvfs info;

	if (memory_directory() == NULL || statvfs(memory_directory(), &info) != 0)
		return false;
	*size = (int64) info.f_blocks * info.f_frsize;
	*left = (int64) info.f_bavail * info.f_frsize;
	return true;
}

/*
 * Write to the log where dlock.max_memory cannot be reached.  The client, who
 * happens to be the first, is not told.
 */
static void
warn_of_file_system(void)
{
	int64		wanted = (int64) dlock_max_memory * 1024;
	int			client_level = client_min_messages;
	int64		size;
	int64		left;

	if (!file_system(&size, &left) ||
		(wanted <= dlock_control->room && wanted <= left))
		return;
	client_min_messages = ERROR;
	ereport(WARNING,
			(errmsg("dlock.max_memory cannot be reached"),
			 errdetail("The file system of \"%s\" has %lld MB, %lld MB of them free, and dlock leaves half of it to others; dlock.max_memory is %d MB.",
					   memory_directory(), (long long) (size >> 20),
					   (long long) (left >> 20), dlock_max_memory / 1024),
			 errhint("Give the file system more room, or decrease dlock.max_memory.")));
	client_min_messages = client_level;
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
	dshash_table *locks;
	dshash_table *ids;
	DlockBackend *backends;
	pg_atomic_uint32 *pids;
} Attachment;

/*
 * The control structure of version 1.0, which has no header.
 */
typedef struct FirstControl
{
	bool		initialized;
	LWLock		lock;
	int			memory_tranche;
	int			table_tranche;
	dsa_handle	area;
	dshash_table_handle tables[3];
	dsa_pointer backends;
	int			num_backends;
	pg_atomic_uint64 counters[2];
} FirstControl;

/* No segment has this handle: to attach there fails. */
#define FIRST_AREA_NONE	((dsa_handle) 1)

/*
 * Keep out version 1.0.  Once it has made its area, nobody can tell whether it
 * is still in use; and where it has not, it finds one to which it cannot
 * attach, should it come later.
 *
 * The caller holds AddinShmemInitLock, as 1.0 does when it makes this.
 */
static void
lock_out_first_version(const DlockHeader *known)
{
	bool		found;
	bool		in_use = false;
	FirstControl *first = ShmemInitStruct("dlock/1", sizeof(FirstControl),
										  &found);

	if (!found)
		memset(first, 0, sizeof(FirstControl));
	if (!first->initialized)
	{
		first->memory_tranche = known->memory_tranche;
		first->table_tranche = known->table_tranche;
		LWLockInitialize(&first->lock, known->memory_tranche);
		first->area = FIRST_AREA_NONE;
		first->initialized = true;
	}
	else
	{
		LWLockAcquire(&first->lock, LW_EXCLUSIVE);
		if (first->area == DSM_HANDLE_INVALID)
			first->area = FIRST_AREA_NONE;
		in_use = first->area != FIRST_AREA_NONE;
		LWLockRelease(&first->lock);
	}
	if (in_use)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot use dlock %s in a server that has used dlock 1.0",
						DLOCK_VERSION),
				 errdetail("Sessions that still run version 1.0 would not know of the locks of this one."),
				 errhint("Restart the server.")));
}

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
	if (found_header->area == DSM_HANDLE_INVALID)
		lock_out_first_version(found_header);
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
		sizeof(DlockSpace), sizeof(DlockLock), sizeof(DlockTicket),
		sizeof(DlockLeaseTicket), sizeof(DlockLease), sizeof(DlockIdEntry),
		sizeof(DlockAnnouncement)
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

	if (!RecoveryInProgress())
		XLogFlush(compat_log_message("dlock"));
	dsa_unpin(area);
	header->area = DSM_HANDLE_INVALID;
	dsa_detach(area);
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
	dshash_parameters locks_parameters;
	dshash_parameters ids_parameters;
	int			num_backends = ProcGlobal->allProcCount;
	dsa_pointer control;
	dsa_pointer backends;
	dsa_pointer pids;
	int64		size;
	int64		left;

	table_parameters(&spaces_parameters, &locks_parameters, &ids_parameters);
	made->area = dsa_create(header->memory_tranche);
	control = dsa_allocate0(made->area, sizeof(DlockControl));
	made->control = dsa_get_address(made->area, control);
	made->control->room = PG_INT64_MAX;
	if (file_system(&size, &left))
	{
		/* before it grows, as a limit below its size would be none */
		dsa_set_size_limit(made->area, Max(size / 2, MIN_AREA_SIZE));
		made->control->room = Max(size / 2, MIN_AREA_SIZE) / 4 * 3;
	}
	made->spaces = dshash_create(made->area, &spaces_parameters, NULL);
	made->locks = dshash_create(made->area, &locks_parameters, NULL);
	made->ids = dshash_create(made->area, &ids_parameters, NULL);
	backends = dsa_allocate0(made->area, num_backends * sizeof(DlockBackend));
	made->backends = dsa_get_address(made->area, backends);
	pids = dsa_allocate0(made->area, num_backends * sizeof(pg_atomic_uint32));
	made->pids = dsa_get_address(made->area, pids);
	for (int i = 0; i < num_backends; i++)
	{
		DlockBackend *backend = &made->backends[i];

		pg_atomic_init_u64(&backend->session, 0);
		SpinLockInit(&backend->mutex);
		pg_atomic_init_u32(&backend->check_requested, 0);
		pg_atomic_init_u64(&backend->cursor, InvalidDsaPointer);
		pg_atomic_init_u32(&backend->lost, 0);
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
			pg_atomic_init_u64(&backend->counters[c], 0);
		pg_atomic_init_u32(&made->pids[i], 0);
	}

	made->control->memory_tranche = header->memory_tranche;
	made->control->table_tranche = header->table_tranche;
	made->control->spaces = dshash_get_hash_table_handle(made->spaces);
	made->control->locks = dshash_get_hash_table_handle(made->locks);
	made->control->ids = dshash_get_hash_table_handle(made->ids);
	made->control->backends = backends;
	made->control->num_backends = num_backends;
	LWLockInitialize(&made->control->reserve_lock, header->memory_tranche);
	pg_atomic_init_u64(&made->control->last_session, 0);
	pg_atomic_init_u64(&made->control->memory_used, 0);
	pg_atomic_init_u32(&made->control->readers, 0);
	pg_atomic_init_u32(&made->control->lost, 0);

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
	dshash_parameters locks_parameters;
	dshash_parameters ids_parameters;

	table_parameters(&spaces_parameters, &locks_parameters, &ids_parameters);
	found->area = dsa_attach(header->area);
	found->control = dsa_get_address(found->area, header->control);
	found->spaces = dshash_attach(found->area, &spaces_parameters,
								  found->control->spaces, NULL);
	found->locks = dshash_attach(found->area, &locks_parameters,
								 found->control->locks, NULL);
	found->ids = dshash_attach(found->area, &ids_parameters,
							   found->control->ids, NULL);
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
	begin_growth(&context);
	if (header->area != DSM_HANDLE_INVALID && !is_our_layout())
		free_area_of_others();
	make = header->area == DSM_HANDLE_INVALID;
	if (make)
		create_area(attachment);
	else
		attach_area(attachment);
	end_growth(&context);
	MemoryContextSwitchTo(old_context);

	/* last, as nothing can fail any more */
	dsa_pin_mapping(attachment->area);
	pg_atomic_fetch_add_u32(&header->attached, 1);
	counted = true;
	LWLockRelease(AddinShmemInitLock);
	return make;
}

static void
forget_current_space(Datum arg, int cacheid, uint32 hashvalue)
{
	current_space_valid = false;
}

/*
 * Attach this backend to the shared state, making it where there is none.
 * Raises whatever a lack of memory brings, and 55000 where another layout is
 * in use; the next call then starts over.
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
	{
		CacheRegisterSyscacheCallback(PROCOID, forget_current_space, 0);
		on_shmem_exit(uncount, 0);
	}
	registered = true;

	made = join_area(&attachment);
	dlock_area = attachment.area;
	dlock_control = attachment.control;
	spaces = attachment.spaces;
	dlock_locks = attachment.locks;
	dlock_ids = attachment.ids;
	dlock_backends = attachment.backends;
	my_pid = &attachment.pids[compat_my_procno()];
	pg_atomic_write_u32(my_pid, MyProcPid);
	dlock_my_backend = &dlock_backends[compat_my_procno()];
	dlock_my_backend->database = MyDatabaseId;
	dlock_my_backend->wait_ticket = 0;
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_write_u64(&dlock_my_backend->counters[c], 0);
	pg_atomic_write_u64(&dlock_my_backend->session,
						pg_atomic_add_fetch_u64(&dlock_control->last_session, 1));
	if (made)
		warn_of_file_system();
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

/* Move what this backend has counted into a space's totals. */
static void
flush_counters(DlockSpace *space)
{
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
	{
		pg_atomic_uint64 *mine = &dlock_my_backend->counters[c];

		pg_atomic_fetch_add_u64(&space->counters[c], pg_atomic_read_u64(mine));
		pg_atomic_write_u64(mine, 0);
	}
}

static void
report_memory(void)
{
	pg_atomic_fetch_add_u64(&dlock_control->memory_used, unreported_memory);
	unreported_memory = 0;
}

/*
 * The last thing an exiting backend does here: free its slot.  Tickets that
 * it could not give back for whatever reason are the waiters' to clear away
 * from now on; see dlock_queue_reap().
 *
 * Raises nothing and allocates nothing.
 */
void
dlock_detach(void)
{
	ListCell   *cell;

	if (dlock_my_backend == NULL)
		return;
	if (current_space)
		flush_counters(current_space);
	report_memory();
	foreach(cell, attached_spaces)
	{
		DlockSpace *space = lfirst(cell);
		DlockSpaceEntry *entry;

		if (space == NULL)
			continue;
		entry = dshash_find(spaces, &space->key, true);
		if (entry)
		{
			entry->users--;
			dshash_release_lock(spaces, entry);
		}
	}
	pg_atomic_write_u64(&dlock_my_backend->session, 0);
	pg_atomic_write_u32(my_pid, 0);
	dlock_my_backend = NULL;
}

/*
 * Remove the spaces that nobody can use again: of databases that are gone,
 * and of earlier installations in this database.  Should this be wrong, as
 * after the rollback of a DROP EXTENSION, it costs a block of ticket numbers.
 */
static void
remove_unused_spaces(const DlockSpaceKey *keep)
{
	dshash_seq_status status;
	DlockSpaceEntry *entry;
	DlockSpaceKey *unused;
	int			count = 0;
	const int	max = 64;

	unused = palloc(max * sizeof(DlockSpaceKey));
	dshash_seq_init(&status, spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL && count < max)
	{
		if (entry->users == 0 && OidIsValid(entry->key.extension))
			unused[count++] = entry->key;
	}
	dshash_seq_term(&status);

	for (int i = 0; i < count; i++)
	{
		DlockSpaceKey database = {unused[i].database, InvalidOid};

		if (unused[i].database == keep->database ?
			unused[i].extension == keep->extension :
			SearchSysCacheExists1(DATABASEOID,
								  ObjectIdGetDatum(unused[i].database)))
			continue;
		entry = dshash_find(spaces, &unused[i], true);
		if (entry && entry->users == 0)
		{
			/* nobody comes to use it while this entry is locked */
			dlock_queue_purge(&unused[i]);
			dlock_lease_purge(dlock_space_at(entry->space));
			dsa_free(dlock_area, entry->space);
			dshash_delete_entry(spaces, entry);
			if (unused[i].database != keep->database)
				(void) dshash_delete_key(spaces, &database);
		}
		else if (entry)
			dshash_release_lock(spaces, entry);
	}
	pfree(unused);
}

/*
 * The first ticket number that no space of this database has reserved since
 * the server was started.  There can be several spaces: an installation that
 * was dropped, or rolled back, may still be in use, or was, and its sequence is
 * not to be seen any more.
 */
uint64
dlock_first_unreserved(Oid database)
{
	DlockSpaceKey key = {database, InvalidOid};
	DlockSpaceEntry *entry;
	uint64		result;
	bool		found;

	entry = dlock_table_insert(spaces, &key, &found);
	if (!found)
	{
		entry->users = 0;
		entry->space = InvalidDsaPointer;
		entry->unreserved = 0;
	}
	result = entry->unreserved;
	dshash_release_lock(spaces, entry);
	return result;
}

/*
 * A space has reserved the numbers below "limit", and is about to draw from
 * them.  From now on no other space of the database draws a number, as that
 * would be below these; each has to reserve some first.
 *
 * The caller holds the lock under which numbers are reserved, and has called
 * dlock_first_unreserved() under it.
 */
void
dlock_set_unreserved(const DlockSpace *space, uint64 limit)
{
	DlockSpaceKey key = {space->key.database, InvalidOid};
	DlockSpaceEntry *entry;
	dshash_seq_status status;

	Assert(LWLockHeldByMeInMode(&dlock_control->reserve_lock, LW_EXCLUSIVE));
	entry = dshash_find(spaces, &key, true);
	Assert(entry != NULL);
	entry->unreserved = Max(entry->unreserved, limit);
	dshash_release_lock(spaces, entry);

	dshash_seq_init(&status, spaces, false);
	while ((entry = dshash_seq_next(&status)) != NULL)
	{
		DlockSpace *other;

		if (entry->key.database != key.database ||
			!OidIsValid(entry->key.extension) || entry->space == space->self)
			continue;
		other = dlock_space_at(entry->space);
		SpinLockAcquire(&other->mutex);
		/* who is just drawing finds the next number changed */
		pg_atomic_write_u64(&other->next_ticket,
							pg_atomic_read_u64(&other->ticket_limit));
		SpinLockRelease(&other->mutex);
	}
	dshash_seq_term(&status);
}

static DlockSpace *
make_space(const DlockSpaceKey *key)
{
	uint64		number = dlock_first_unreserved(key->database);
	ErrorContextCallback context;
	dsa_pointer self;
	DlockSpace *space;

	begin_growth(&context);
	self = dsa_allocate0(dlock_area, sizeof(DlockSpace));
	space = dsa_get_address(dlock_area, self);
	end_growth(&context);

	space->key = *key;
	space->self = self;
	SpinLockInit(&space->mutex);
	pg_atomic_init_u64(&space->next_ticket, number);
	pg_atomic_init_u64(&space->ticket_limit, number);
	LWLockInitialize(&space->lease_lock, dlock_control->memory_tranche);
	LWLockInitialize(&space->outbox_lock, dlock_control->memory_tranche);
	for (int b = 0; b < DLOCK_REMOVED_BUCKETS; b++)
		pg_atomic_init_u64(&space->removed[b], InvalidXLogRecPtr);
	pg_atomic_init_u32(&space->loaded, 0);
	pg_atomic_init_u32(&space->load_failures, 0);
	ConditionVariableInit(&space->load_changed);
	pg_atomic_init_u64(&space->lock_told_at, 0);
	pg_atomic_init_u32(&space->failures, 0);
	pg_atomic_init_u32(&space->failure, 0);
	for (int q = 0; q < DLOCK_NUM_QUORUMS; q++)
		pg_atomic_init_u64(&space->quorum[q], 0);
	SpinLockInit(&space->heartbeat_mutex);
	pg_atomic_init_u64(&space->last_heartbeat, 0);
	pg_atomic_init_u32(&space->announced, 0);
	pg_atomic_init_u32(&space->worker, 0);
	pg_atomic_init_u64(&space->worker_start, 0);
	pg_atomic_init_u32(&space->worker_deaths, 0);
	pg_atomic_init_u64(&space->next_due, 0);
	pg_atomic_init_u32(&space->sender, 0);
	pg_atomic_init_u64(&space->sender_start, 0);
	pg_atomic_init_u32(&space->vacuum, 0);
	pg_atomic_init_u64(&space->vacuum_start, 0);
	pg_atomic_init_u32(&space->dead_rows, 0);
	pg_atomic_init_u32(&space->vacuum_at, DLOCK_VACUUM_ROWS);
	pg_atomic_init_u32(&space->cleared, DLOCK_NOT_CLEARED);
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		pg_atomic_init_u64(&space->counters[c], 0);
	return space;
}

/*
 * Count this backend among a space's users; NULL where the space is not there
 * yet.  The caller has a place to note it.
 */
static DlockSpace *
use_space(const DlockSpaceKey *key)
{
	DlockSpaceEntry *entry = dshash_find(spaces, key, true);
	DlockSpace *space;

	if (entry == NULL)
		return NULL;
	space = dlock_space_at(entry->space);
	entry->users++;
	llast(attached_spaces) = space;
	dshash_release_lock(spaces, entry);
	return space;
}

static DlockSpace *
attach_space(const DlockSpaceKey *key)
{
	MemoryContext old_context;
	ListCell   *cell;
	DlockSpace *space;
	DlockSpaceEntry *entry;
	bool		found;

	foreach(cell, attached_spaces)
	{
		space = lfirst(cell);
		if (space && memcmp(&space->key, key, sizeof(DlockSpaceKey)) == 0)
			return space;
	}

	/* a place to note it first; where this fails, it is used next time */
	if (attached_spaces == NIL || llast(attached_spaces) != NULL)
	{
		old_context = MemoryContextSwitchTo(TopMemoryContext);
		attached_spaces = lappend(attached_spaces, NULL);
		MemoryContextSwitchTo(old_context);
	}
	space = use_space(key);
	if (space)
		return space;

	space = make_space(key);
	entry = dlock_table_insert(spaces, key, &found);
	if (found)
	{
		/* somebody else was faster */
		dsa_free(dlock_area, space->self);
		space = dlock_space_at(entry->space);
	}
	else
	{
		entry->users = 0;
		entry->space = space->self;
	}
	entry->users++;
	llast(attached_spaces) = space;
	dshash_release_lock(spaces, entry);

	remove_unused_spaces(key);
	return space;
}

/*
 * A space that is there already, for the worker that was started for it; NULL
 * where nobody uses it any more.
 */
DlockSpace *
dlock_find_space(const DlockSpaceKey *key)
{
	MemoryContext old_context = MemoryContextSwitchTo(TopMemoryContext);

	attached_spaces = lappend(attached_spaces, NULL);
	MemoryContextSwitchTo(old_context);
	return use_space(key);
}

/*
 * The space of the extension that is installed in this database now.
 *
 * The catalog is asked once, and again only after pg_proc has changed, as it
 * does when an extension with functions comes or goes.
 */
DlockSpace *
dlock_current_space(void)
{
	DlockSpaceKey key;
	DlockSpace *space;

	/* a transaction that touches no table would not hear of a DROP */
	AcceptInvalidationMessages();
	if (likely(current_space_valid))
		return current_space;

	/* set before the catalog is read: a change during that is not missed */
	current_space_valid = true;
	PG_TRY();
	{
		key.database = MyDatabaseId;
		key.extension = get_extension_oid("dlock", false);
		space = attach_space(&key);
	}
	PG_CATCH();
	{
		current_space_valid = false;
		PG_RE_THROW();
	}
	PG_END_TRY();

	if (current_space && current_space != space)
		flush_counters(current_space);
	current_space = space;
	return space;
}

/*
 * Is this still the space of the extension that is installed here, as this
 * transaction sees it?  Raises only what reading the catalog can.
 */
bool
dlock_space_is_current(const DlockSpace *space)
{
	bool		is_current;

	AcceptInvalidationMessages();
	if (likely(current_space_valid && current_space == space))
		return true;
	is_current = get_extension_oid("dlock", true) == space->key.extension;
	/* who waits without a snapshot shall not have got one by this */
	InvalidateCatalogSnapshot();
	return is_current;
}

/*
 * Leases need the worker, which does not see an extension whose creation has
 * not been committed.  Raises 55000 where that is so.
 */
void
dlock_check_committed(DlockSpace *space)
{
	TransactionId xid = GetTopTransactionIdIfAny();
	static TransactionId checked_xid = InvalidTransactionId;
	static DlockSpace *checked_space = NULL;
	Relation	queue;
	bool		is_new;

	if (likely(!TransactionIdIsValid(xid)) ||
		(xid == checked_xid && space == checked_space))
		return;
	queue = table_open(dlock_relation(space, "dlock_queue"), AccessShareLock);
	is_new = queue->rd_createSubid != InvalidSubTransactionId;
	table_close(queue, AccessShareLock);
	if (is_new)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot use leases in the transaction that creates extension \"%s\"",
						"dlock"),
				 errdetail("The background worker, which keeps them, does not see the extension before that transaction has committed."),
				 errhint("Commit first.")));
	checked_xid = xid;
	checked_space = space;
}

/*
 * A relation of the extension: in the extension's schema, wherever that is.
 * One of that name which is not the extension's own is not meant: whoever may
 * create there could have made it, before an update that does.
 */
Oid
dlock_relation(DlockSpace *space, const char *name)
{
	Relation	catalog = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			schema = InvalidOid;
	Oid			relation;

	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(space->key.extension));
	scan = systable_beginscan(catalog, ExtensionOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);

	relation = get_relname_relid(name, schema);
	if (!OidIsValid(relation) ||
		getExtensionOfObject(RelationRelationId, relation) != space->key.extension)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation \"%s\" of extension \"%s\" does not exist",
						name, "dlock")));
	return relation;
}

/* Fill in the key of a lock, from a valid name. */
void
dlock_key_fill(DlockKey *key, const DlockSpace *space, const char *name,
			   int length)
{
	key->space = space->key;
	key->length = length;
	memcpy(key->name, name, length);
	key->hash = hash_bytes_extended((const unsigned char *) name, length,
									(uint64) key->space.database << 32 |
									key->space.extension);
}

/*
 * What the locks and tickets of all sessions may take, in bytes: the lesser of
 * dlock.max_memory and what the file system leaves.
 */
int64
dlock_memory_limit(void)
{
	return Min((int64) dlock_max_memory * 1024, dlock_control->room);
}

static void
raise_out_of_memory(void)
{
	bool		by_setting = dlock_memory_limit() < dlock_control->room;

	ereport(ERROR,
			(errcode(ERRCODE_OUT_OF_MEMORY),
			 errmsg("out of memory for locks"),
			 by_setting ?
			 errdetail("The locks and tickets of all sessions have reached dlock.max_memory.") :
			 errdetail("The locks and tickets of all sessions have reached their part of the file system of \"%s\", which is less than dlock.max_memory.",
					   memory_directory()),
			 by_setting ?
			 errhint("Release locks that are not needed, or increase dlock.max_memory.") :
			 errhint("Release locks that are not needed; or give the file system more room, and restart the server.")));
}

/*
 * Is there memory for one more lock?  Raises 53200 where there is not.
 *
 * An eighth is kept for superusers, so that one who is to clear up can still
 * lock.  The area's own limit stands behind this one; it is reached first
 * only where the area has become very fragmented.
 */
void
dlock_check_memory(void)
{
	int64		limit = dlock_memory_limit();
	int64		used = (int64) pg_atomic_read_u64(&dlock_control->memory_used);

	if (likely(used < limit - limit / 8))
		return;
	if (used >= limit || !superuser())
		raise_out_of_memory();
}

/*
 * Memory of tickets, which is counted.
 */
dsa_pointer
dlock_allocate(Size size)
{
	ErrorContextCallback context;
	dsa_pointer pointer;

	begin_growth(&context);
	pointer = dsa_allocate(dlock_area, size);
	end_growth(&context);
	dlock_count_memory(size);
	return pointer;
}

void
dlock_release_memory(dsa_pointer pointer, Size size)
{
	dsa_free(dlock_area, pointer);
	dlock_count_memory(-(int64) size);
}

/* A text in shared memory, or none for NULL.  Raises 53200. */
dsa_pointer
dlock_text_copy(const char *text)
{
	dsa_pointer copy;

	if (text == NULL)
		return InvalidDsaPointer;
	copy = dlock_allocate(strlen(text) + 1);
	strcpy(dsa_get_address(dlock_area, copy), text);
	return copy;
}

void
dlock_text_free(dsa_pointer text)
{
	if (DsaPointerIsValid(text))
		dlock_release_memory(text,
							 strlen(dsa_get_address(dlock_area, text)) + 1);
}

static DlockLink *
link_at(dsa_pointer pointer)
{
	return dsa_get_address(dlock_area, pointer);
}

void
dlock_list_append(DlockList *list, DlockLink *link)
{
	link->prev = list->tail;
	link->next = InvalidDsaPointer;
	if (DsaPointerIsValid(list->tail))
		link_at(list->tail)->next = link->self;
	else
		list->head = link->self;
	list->tail = link->self;
	list->length++;
}

void
dlock_list_remove(DlockList *list, DlockLink *link)
{
	/* before any change, as to map a segment of memory can fail */
	DlockLink  *prev = DsaPointerIsValid(link->prev) ? link_at(link->prev) : NULL;
	DlockLink  *next = DsaPointerIsValid(link->next) ? link_at(link->next) : NULL;

	if (prev)
		prev->next = link->next;
	else
		list->head = link->next;
	if (next)
		next->prev = link->prev;
	else
		list->tail = link->prev;
	link->prev = link->next = InvalidDsaPointer;
	list->length--;
}

/* Take note of shared memory taken, or, where negative, given back. */
void
dlock_count_memory(int64 change)
{
	unreported_memory += change;
	if (unreported_memory > REPORT_MEMORY_EVERY ||
		unreported_memory < -REPORT_MEMORY_EVERY)
		report_memory();
}

void
dlock_count(DlockCounter counter, uint64 amount)
{
	pg_atomic_uint64 *mine = &dlock_my_backend->counters[counter];

	/* nobody else writes here, so this need not be one instruction */
	pg_atomic_write_u64(mine, pg_atomic_read_u64(mine) + amount);
}

/*
 * Add up the counters of a space: those of backends gone and of those alive.
 * A backend that leaves meanwhile may be missed or counted twice.
 */
void
dlock_sum_counters(DlockSpace *space, uint64 *sums)
{
	for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
		sums[c] = pg_atomic_read_u64(&space->counters[c]);
	for (int i = 0; i < dlock_control->num_backends; i++)
	{
		DlockBackend *backend = &dlock_backends[i];

		if (pg_atomic_read_u64(&backend->session) == 0 ||
			backend->database != space->key.database)
			continue;
		for (int c = 0; c < DLOCK_NUM_COUNTERS; c++)
			sums[c] += pg_atomic_read_u64(&backend->counters[c]);
	}
}
