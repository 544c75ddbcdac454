/*
 * power.c
 *	  A disk that forgets what was not synced.
 *
 * To be preloaded (LD_PRELOAD) into a server, see test/perl/Dlock/Power.pm.
 * After a kill the kernel still has all that a server has written.  A power
 * loss leaves what was synced, and any part of the rest.  So this library notes
 * what each call replaces, until a sync makes the call durable.  Power.pm then
 * puts back what was replaced.
 *
 * DLOCK_POWER is the data directory.  In the directory beside it, DIR.power:
 *
 *	f.INODE			what was written to this file since its last sync: for
 *					each call a FileChange, and what was there before
 *	f.INODE.data	a link to the file, so that it stays while f.INODE has
 *					something
 *	names			a line for each file that was created, renamed or
 *					removed, and for each fsync of a file or a directory
 *	s.PID.NUMBER	a link to a file that was removed or replaced
 *
 * A file is durable as of its last fsync or fdatasync.  A name is durable as
 * of the last fsync of its directory.  A new name is also durable once its file
 * was fsynced: PostgreSQL relies on that for the files of tables, and Linux's
 * file systems do it.  What happens to directories themselves is durable at
 * once.  sync_file_range is no sync.  Nothing is synced in truth, because the
 * machine does not lose its power.
 *
 * The notes of a file are written under a lock, together with the call itself.
 * stdio is not seen: PostgreSQL writes nothing with it that must be durable.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

typedef struct FileChange
{
	int64_t		offset;			/* where it begins */
	int64_t		length;			/* how much it writes; -1: it sets the size */
	int64_t		size;			/* the size before it */
	int64_t		saved;			/* how much of what was there follows */
} FileChange;

/* A file while a call changes it */
typedef struct
{
	int			notes;			/* f.INODE, locked; -1 if not noted */
	char		data[PATH_MAX];
	struct stat status;
} Target;

/* real_FUNCTION: the C library's function */
#define REAL(function) \
	static __typeof__(function) *real_##function; \
	if (!real_##function) \
		*(void **) &real_##function = dlsym(RTLD_NEXT, #function)

#define CHECK(condition) \
	do { if (!(condition)) fail(#condition, __LINE__); } while (0)

static void
fail(const char *what, int line)
{
	fprintf(stderr, "power.c:%d: %s: %m\n", line, what);
	abort();
}

/* The calls that change a file come here again, so not by way of them */
static ssize_t
write_all(int fd, const void *bytes, size_t length)
{
	REAL(write);

	return real_write(fd, bytes, length);
}

static int
open_file(const char *path, int flags)
{
	static int	(*real) (const char *, int, ...);

	if (!real)
		*(void **) &real = dlsym(RTLD_NEXT, "open");
	return real(path, flags | O_CLOEXEC, 0600);
}

/* A copy, because PostgreSQL writes its titles over the environment */
static const char *
top(void)
{
	static char dir[PATH_MAX - 64];
	const char *given;

	if (!dir[0] && (given = getenv("DLOCK_POWER")))
		CHECK(snprintf(dir, sizeof(dir), "%s", given) < (int) sizeof(dir));
	return dir[0] ? dir : NULL;
}

/* The path below the data directory; NULL if it is somewhere else */
static const char *
below_top(const char *path)
{
	size_t		length;
	char		cwd[PATH_MAX];

	if (!top())
		return NULL;
	length = strlen(top());
	if (path[0] != '/')
	{
		if (!getcwd(cwd, sizeof(cwd)) || strcmp(cwd, top()) != 0)
			return NULL;
		while (strncmp(path, "./", 2) == 0)
			path += 2;
		return path;
	}
	if (strncmp(path, top(), length) != 0 || path[length] != '/')
		return NULL;
	return path + length + 1;
}

/* The same for an open file; NULL if it was removed */
static const char *
path_of(int fd, char *path)
{
	char		name[64];
	ssize_t		length;

	if (!top())
		return NULL;
	snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	length = readlink(name, path, PATH_MAX - 1);
	if (length <= 0)
		return NULL;
	path[length] = '\0';
	if (strcmp(path, top()) == 0)
		return ".";
	if (length > 10 && strcmp(path + length - 10, " (deleted)") == 0)
		return NULL;
	return below_top(path);
}

/*
 * Names
 */

static void
note_name(const char *what, const char *path, const char *second,
		  const char *saved)
{
	char		line[3 * PATH_MAX];
	int			length,
				fd;

	snprintf(line, sizeof(line), "%s.power/names", top());
	fd = open_file(line, O_WRONLY | O_CREAT | O_APPEND);
	CHECK(fd >= 0);
	length = snprintf(line, sizeof(line), "%s\t%s\t%s\t%s\n", what, path,
					  second, saved);
	CHECK(write_all(fd, line, length) == length);
	close(fd);
}

/* Keep a file that is about to lose this name.  Returns its link, or "". */
static const char *
keep(const char *path)
{
	static char saved[PATH_MAX];
	static int	number;
	struct stat status;
	REAL(link);

	if (lstat(path, &status) != 0 || !S_ISREG(status.st_mode))
		return "";
	snprintf(saved, sizeof(saved), "%s.power/s.%d.%d", top(), (int) getpid(),
			 ++number);
	CHECK(real_link(path, saved) == 0);
	return saved;
}

static int
is_file(const char *path)
{
	struct stat status;

	return lstat(path, &status) == 0 && S_ISREG(status.st_mode);
}

int
rename(const char *from, const char *to)
{
	const char *ours = below_top(from);
	const char *saved = "";
	int			result;
	REAL(rename);

	if (!ours || !below_top(to) || !is_file(from))
		return real_rename(from, to);
	saved = keep(to);
	/* Note it before the call: a note of a call that failed is recognized. */
	note_name("rename", ours, below_top(to), saved);
	result = real_rename(from, to);
	CHECK(result == 0);
	return result;
}

int
unlink(const char *path)
{
	const char *ours = below_top(path);
	REAL(unlink);

	if (ours && is_file(path))
		note_name("unlink", ours, "", keep(path));
	return real_unlink(path);
}

int
link(const char *from, const char *to)
{
	const char *ours = below_top(to);
	REAL(link);

	if (ours && access(to, F_OK) != 0)
		note_name("create", ours, "", "");
	return real_link(from, to);
}

int
open(const char *path, int flags,...)
{
	static int	(*real) (const char *, int, ...);
	const char *ours = below_top(path);
	mode_t		mode = 0;
	int			fd;

	if (!real)
		*(void **) &real = dlsym(RTLD_NEXT, "open");
	if (flags & O_CREAT)
	{
		va_list		arguments;

		va_start(arguments, flags);
		mode = va_arg(arguments, mode_t);
		va_end(arguments);
	}
	if (!ours)
		return real(path, flags, mode);
	if ((flags & O_CREAT) && access(path, F_OK) != 0)
		note_name("create", ours, "", "");
	fd = real(path, flags & ~O_TRUNC, mode);
	if (fd >= 0 && (flags & O_TRUNC))
		CHECK(ftruncate(fd, 0) == 0);
	return fd;
}

/*
 * Files
 */

/* Begin a change, or a sync, of an open file. */
static void
begin(Target *target, int fd)
{
	char		path[PATH_MAX];
	char		notes[PATH_MAX];
	int			saved_errno = errno;

	target->notes = -1;
	if (!path_of(fd, path) || fstat(fd, &target->status) != 0 ||
		!S_ISREG(target->status.st_mode))
	{
		errno = saved_errno;
		return;
	}
	snprintf(notes, sizeof(notes), "%s.power/f.%lu", top(),
			 (unsigned long) target->status.st_ino);
	snprintf(target->data, sizeof(target->data), "%s.power/f.%lu.data", top(),
			 (unsigned long) target->status.st_ino);
	target->notes = open_file(notes, O_RDWR | O_CREAT | O_APPEND);
	CHECK(target->notes >= 0);
	while (flock(target->notes, LOCK_EX) != 0)
		CHECK(errno == EINTR);
	/* Another process may have changed the file since then. */
	CHECK(fstat(fd, &target->status) == 0);
	errno = saved_errno;
}

/*
 * Note what a change of an open file will replace.  A length of -1 is a new
 * size, which replaces everything behind it.
 */
static void
note(Target *target, int fd, off_t offset, int64_t length)
{
	FileChange	change = {offset, length, target->status.st_size, 0};
	char		path[PATH_MAX];
	char	   *before = NULL;
	struct iovec parts[2];
	int			data;
	REAL(link);
	REAL(writev);

	if (target->notes < 0)
		return;
	if (lseek(target->notes, 0, SEEK_END) == 0)
	{
		unlink(target->data);
		/* If the file has just been removed, its content is not needed. */
		if (!path_of(fd, path) || real_link(path, target->data) != 0)
			return;
	}
	if (offset < change.size)
	{
		change.saved = change.size - offset;
		if (length >= 0 && change.saved > length)
			change.saved = length;
		CHECK((before = malloc(change.saved)) != NULL);
		data = open_file(target->data, O_RDONLY);
		CHECK(data >= 0);
		CHECK(pread(data, before, change.saved, offset) == change.saved);
		close(data);
	}
	parts[0] = (struct iovec) {&change, sizeof(change)};
	parts[1] = (struct iovec) {before, change.saved};
	CHECK(real_writev(target->notes, parts, 2) ==
		  (ssize_t) (sizeof(change) + change.saved));
	free(before);
}

static void
end(Target *target)
{
	int			saved_errno = errno;

	if (target->notes >= 0)
		close(target->notes);
	errno = saved_errno;
}

ssize_t
write(int fd, const void *bytes, size_t length)
{
	Target		target;
	ssize_t		result;
	REAL(write);

	begin(&target, fd);
	if (target.notes >= 0)
		note(&target, fd,
			 fcntl(fd, F_GETFL) & O_APPEND ? target.status.st_size :
			 lseek(fd, 0, SEEK_CUR), length);
	result = real_write(fd, bytes, length);
	end(&target);
	return result;
}

ssize_t
pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
	Target		target;
	ssize_t		result;
	REAL(pwrite);

	begin(&target, fd);
	note(&target, fd, offset, length);
	result = real_pwrite(fd, bytes, length, offset);
	end(&target);
	return result;
}

ssize_t
pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
	Target		target;
	ssize_t		result;
	int64_t		length = 0;
	REAL(pwritev);

	for (int i = 0; i < count; i++)
		length += parts[i].iov_len;
	begin(&target, fd);
	note(&target, fd, offset, length);
	result = real_pwritev(fd, parts, count, offset);
	end(&target);
	return result;
}

int
posix_fallocate(int fd, off_t offset, off_t length)
{
	Target		target;
	int			result;
	REAL(posix_fallocate);

	begin(&target, fd);
	if (target.notes >= 0)
		note(&target, fd, target.status.st_size, -1);
	result = real_posix_fallocate(fd, offset, length);
	end(&target);
	return result;
}

int
ftruncate(int fd, off_t size)
{
	Target		target;
	int			result;
	REAL(ftruncate);

	begin(&target, fd);
	note(&target, fd, size, -1);
	result = real_ftruncate(fd, size);
	end(&target);
	return result;
}

int
truncate(const char *path, off_t size)
{
	int			fd;
	int			result;
	REAL(truncate);

	if (!below_top(path))
		return real_truncate(path, size);
	if ((fd = open_file(path, O_RDWR)) < 0)
		return -1;
	result = ftruncate(fd, size);
	close(fd);
	return result;
}

/* True if the file is in the data directory */
static int
is_synced(int fd, int with_name)
{
	Target		target;
	char		path[PATH_MAX];
	const char *ours = path_of(fd, path);

	if (!ours)
		return 0;
	begin(&target, fd);
	if (target.notes < 0)
		note_name("directory", ours, "", "");
	else
	{
		REAL(ftruncate);

		CHECK(real_ftruncate(target.notes, 0) == 0);
		unlink(target.data);
		if (with_name)
			note_name("file", ours, "", "");
		end(&target);
	}
	return 1;
}

int
fsync(int fd)
{
	REAL(fsync);

	return is_synced(fd, 1) ? 0 : real_fsync(fd);
}

int
fdatasync(int fd)
{
	REAL(fdatasync);

	return is_synced(fd, 0) ? 0 : real_fdatasync(fd);
}
