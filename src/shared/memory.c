/*-------------------------------------------------------------------------
 *
 * memory.c
 *	  The memory area: its size, and the errors if it is full.
 *
 * The segment never grows, and each process attaches to all of it.  So only an
 * allocation can fail, and callers allocate before they take a lock (I5).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <sys/statvfs.h>

#include "storage/dsm_impl.h"
#include "utils/guc.h"

#include "shared/inner.h"

/* The setting, in kilobytes */
int			dlock_max_memory;

/* Valid only after dlock_attach() has returned */
DlockControl *dlock_control = NULL;
dsa_area   *dlock_area = NULL;
char	   *dlock_area_start = NULL;

/* The directory of dynamic shared memory; NULL if that has no directory */
const char *
dlock_memory_directory(void)
{
	return dynamic_shared_memory_type == DSM_IMPL_POSIX ? "/dev/shm" :
		dynamic_shared_memory_type == DSM_IMPL_MMAP ? PG_DYNSHMEM_DIR : NULL;
}

/*
 * The area's size in bytes: dlock.max_memory, but at most half of the file
 * system's free space (parallel queries use it, too), and at least the minimum.
 */
Size
dlock_area_size(void)
{
	const char *directory = dlock_memory_directory();
	Size		size = (Size) dlock_max_memory * 1024;
	struct statvfs info;

	if (directory && statvfs(directory, &info) == 0)
		size = Min(size, (Size) info.f_bavail * info.f_frsize / 2);
	return TYPEALIGN_DOWN(BLCKSZ, Max(size, DLOCK_MIN_AREA_KB * (Size) 1024));
}

/* For the log only, because any client's call can make the area. */
void
dlock_log_small_area(void)
{
	ereport(LOG,
			(errmsg("dlock.max_memory cannot be reached"),
			 errdetail("dlock uses %d MB, which is half of the free space in the file system of \"%s\". dlock.max_memory is %d MB.",
					   (int) (dlock_control->area_size >> 20),
					   dlock_memory_directory(), dlock_max_memory / 1024),
			 errhint("Give the file system more room, and restart the server; or decrease dlock.max_memory.")));
}

/* Report a full file system as 53200, with dlock's hint. */
static void
explain_full_file_system(void *arg)
{
	const char *type;

	if (geterrcode() != ERRCODE_DISK_FULL &&
		geterrcode() != ERRCODE_OUT_OF_MEMORY)
		return;
	type = GetConfigOption("dynamic_shared_memory_type", true, false);
	errcode(ERRCODE_OUT_OF_MEMORY);
	if (dlock_memory_directory())
		errhint("With dynamic_shared_memory_type = %s, locks are kept in the file system of \"%s\": give it more room, or decrease dlock.max_memory.",
				type, dlock_memory_directory());
	else
		errhint("Let the operating system give more memory to dynamic_shared_memory_type = %s, or decrease dlock.max_memory.",
				type);
}

/*
 * Raises 53200.  With mmap, PostgreSQL fills a new file by write(), and a
 * short write sets no errno, so errno is set to ENOSPC first.
 */
dsm_segment *
dlock_segment_create(Size size)
{
	ErrorContextCallback context = {
		.callback = explain_full_file_system,
		.previous = error_context_stack
	};
	dsm_segment *segment;

	error_context_stack = &context;
	errno = ENOSPC;
	segment = dsm_create(size, 0);
	error_context_stack = context.previous;
	return segment;
}

static void
explain_full_area(void *arg)
{
	if (geterrcode() == ERRCODE_OUT_OF_MEMORY)
		errhint(DLOCK_HINT_FULL);
}

/* dshash_find_or_insert(), with a hint for error 53200 if the area is full */
void *
dlock_table_insert(dshash_table *table, const void *key, bool *found)
{
	ErrorContextCallback context = {
		.callback = explain_full_area,
		.previous = error_context_stack
	};
	void	   *entry;

	error_context_stack = &context;
	entry = dshash_find_or_insert(table, key, found);
	error_context_stack = context.previous;
	return entry;
}

/* Allocate memory that no role's account counts.  Raises 53200. */
dsa_pointer
dlock_allocate_uncounted(Size size)
{
	dsa_pointer pointer = dsa_allocate_extended(dlock_area, size,
												DSA_ALLOC_NO_OOM);

	if (unlikely(!DsaPointerIsValid(pointer)))
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("out of memory for locks"),
				 errdetail("No piece of %zu bytes is free.", size),
				 errhint(DLOCK_HINT_FULL)));
	return pointer;
}
