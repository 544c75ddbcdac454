/*
 * hold.c
 *	  Each session of a program with libpq begins with a lock.
 *
 * To be preloaded (LD_PRELOAD) into psql or isolationtester.  Once the program
 * has connected, its session acquires a lock with a unique name and holds it
 * until the session ends.  For each connection, the file that DLOCK_HOLD names
 * gets one line: "held", or the error, for example if the database has no
 * dlock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <libpq-fe.h>

static void
ignore(void *arg, const char *message)
{
}

/* In one call, because many processes write to the file */
static void
note(const char *text)
{
	const char *file = getenv("DLOCK_HOLD");
	char		line[256];
	int			length,
				fd;

	if (!file || (fd = open(file, O_WRONLY | O_CREAT | O_APPEND, 0666)) < 0)
		return;
	length = snprintf(line, sizeof(line), "%.*s\n",
					  (int) strcspn(text, "\n"), text);
	if (length >= (int) sizeof(line))
	{
		length = sizeof(line) - 1;
		line[length - 1] = '\n';
	}
	if (write(fd, line, length) != length)
		abort();
	close(fd);
}

static PGconn *
hold(PGconn *conn)
{
	PQnoticeProcessor before;
	PGresult   *result;

	if (PQstatus(conn) != CONNECTION_OK)
		return conn;
	before = PQsetNoticeProcessor(conn, ignore, NULL);
	result = PQexec(conn, "SELECT dlock_acquire('session ' || pg_backend_pid())");
	note(PQresultStatus(result) == PGRES_TUPLES_OK ? "held" :
		 PQresultErrorMessage(result));
	PQclear(result);
	PQsetNoticeProcessor(conn, before, NULL);
	return conn;
}

PGconn *
PQconnectdb(const char *conninfo)
{
	PGconn	   *(*connect) (const char *) = dlsym(RTLD_NEXT, "PQconnectdb");

	return hold(connect(conninfo));
}

PGconn *
PQconnectdbParams(const char *const *keywords, const char *const *values,
				  int expand_dbname)
{
	PGconn	   *(*connect) (const char *const *, const char *const *, int) =
		dlsym(RTLD_NEXT, "PQconnectdbParams");

	return hold(connect(keywords, values, expand_dbname));
}
