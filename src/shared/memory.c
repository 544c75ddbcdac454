/*-------------------------------------------------------------------------
 *
 * memory.c
 *	  The memory area: its limit, and the errors where it cannot grow.
 *
 * All that processes share is in one dynamic shared memory area, which shmem.c
 * makes or finds.  What can let that area grow stands between
 * dlock_growth_begin() and dlock_growth_end().  Who has taken how much of it is
 * counted in account.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <sys/statvfs.h>

#include "miscadmin.h"
#include "storage/dsm_impl.h"
#include "utils/guc.h"

#include "shared/shared.h"

/* The setting, in kilobytes */
int			dlock_max_memory;

/* What is valid only once dlock_attach() has returned */
DlockControl *dlock_control = NULL;
dsa_area   *dlock_area = NULL;

/* The directory of dynamic shared memory, where it has one that is known */
const char *
dlock_memory_directory(void)
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
	if (dlock_memory_directory())
		errhint("With dynamic_shared_memory_type = %s, locks are kept in the file system of \"%s\": give it more room, or decrease dlock.max_memory.",
				type, dlock_memory_directory());
	else
		errhint("Let the operating system give more memory to dynamic_shared_memory_type = %s, or decrease dlock.max_memory.",
				type);
}

/*
 * All that lets the area grow stands between these two.
 *
 * With mmap, PostgreSQL fills a new file by write(), which sets no error if it
 * writes less than it should, and reports what errno says.  So errno says from
 * the start what that means.
 */
void
dlock_growth_begin(ErrorContextCallback *context)
{
	errno = ENOSPC;
	context->callback = explain_growth;
	context->arg = NULL;
	context->previous = error_context_stack;
	error_context_stack = context;
}

void
dlock_growth_end(ErrorContextCallback *context)
{
	error_context_stack = context->previous;
}

/* dshash_find_or_insert(), which raises 53200 where there is no memory */
void *
dlock_table_insert(dshash_table *table, const void *key, bool *found)
{
	ErrorContextCallback context;
	void	   *entry;

	dlock_growth_begin(&context);
	entry = dshash_find_or_insert(table, key, found);
	dlock_growth_end(&context);
	return entry;
}

/*
 * Size and free space of the file system that the area is in, in bytes; false
 * where it is in none.
 */
bool
dlock_file_system(int64 *size, int64 *left)
{
	struct statvfs info;

	if (dlock_memory_directory() == NULL || statvfs(dlock_memory_directory(), &info) != 0)
		return false;
	*size = (int64) info.f_blocks * info.f_frsize;
	*left = (int64) info.f_bavail * info.f_frsize;
	return true;
}

/*
 * Write to the log where dlock.max_memory cannot be reached.  No client is
 * told, as that would be the one that happens to be the first.
 */
void
dlock_warn_of_file_system(void)
{
	int64		wanted = (int64) dlock_max_memory * 1024;
	int64		size;
	int64		left;

	if (!dlock_file_system(&size, &left) ||
		(wanted <= dlock_control->room && wanted <= left))
		return;
	ereport(LOG,
			(errmsg("dlock.max_memory cannot be reached"),
			 errdetail("The file system of \"%s\" has %lld MB, %lld MB of them free, and dlock leaves half of it to others; dlock.max_memory is %d MB.",
					   dlock_memory_directory(), (long long) (size >> 20),
					   (long long) (left >> 20), dlock_max_memory / 1024),
			 errhint("Give the file system more room, or decrease dlock.max_memory.")));
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

/* Memory that is not counted: it is small beside what is.  Raises 53200. */
dsa_pointer
dlock_allocate_uncounted(Size size)
{
	ErrorContextCallback context;
	dsa_pointer pointer;

	dlock_growth_begin(&context);
	pointer = dsa_allocate(dlock_area, size);
	dlock_growth_end(&context);
	return pointer;
}
