/*-------------------------------------------------------------------------
 *
 * notify.c
 *	  Measure how long a notification takes between two sessions.
 *
 *	  notify session|lease COUNT
 *
 * There are two connections, by the environment's settings.  The first one
 * alternately calls pg_notify(), and releases a lock for which the second one
 * is enqueued, in session scope or on a lease.  The time runs from before the
 * call is sent until the second one has the notification.
 *
 * A grant on a lease is announced when it is durable, but a transaction that
 * only notifies does not wait for the disk.  So, with a lease, the transaction
 * also inserts a row.
 *
 * Prints percentiles 50 and 99, in microseconds: first of the grants, then of
 * the plain notifications.
 *
 *-------------------------------------------------------------------------
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "libpq-fe.h"

/* The first ones do not count, because the server's caches fill. */
#define WARM_UP		50

/* the longest time that a notification may take */
#define LIMIT_MS	10000

static PGconn *giver;
static PGconn *listener;

static void
die(const char *what, PGconn *connection)
{
	fprintf(stderr, "notify: %s: %s\n", what,
			connection ? PQerrorMessage(connection) : "");
	exit(1);
}

static PGconn *
connect_to_server(void)
{
	PGconn	   *connection = PQconnectdb("");

	if (PQstatus(connection) != CONNECTION_OK)
		die("could not connect", connection);
	return connection;
}

static void
finish(PGconn *connection, const char *query, char *value, size_t size)
{
	PGresult   *result;

	while ((result = PQgetResult(connection)) != NULL)
	{
		if (PQresultStatus(result) != PGRES_TUPLES_OK &&
			PQresultStatus(result) != PGRES_COMMAND_OK)
			die(query, connection);
		if (value && PQntuples(result) == 1)
			snprintf(value, size, "%s", PQgetvalue(result, 0, 0));
		PQclear(result);
	}
}

static void
start(PGconn *connection, const char *query)
{
	if (!PQsendQuery(connection, query))
		die(query, connection);
}

/* Execute a query, and return its only value if it has one. */
static void
execute(PGconn *connection, const char *query, char *value, size_t size)
{
	start(connection, query);
	finish(connection, query, value, size);
}

static double
now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

/* Wait for the listener's next notification. */
static void
receive(void)
{
	PGnotify   *notification;

	while ((notification = PQnotifies(listener)) == NULL)
	{
		struct pollfd ready = {.fd = PQsocket(listener), .events = POLLIN};

		if (poll(&ready, 1, LIMIT_MS) != 1)
			die("no notification has come", NULL);
		if (!PQconsumeInput(listener))
			die("could not read", listener);
	}
	PQfreemem(notification);
}

/* The time from before the giver's query until the notification */
static double
measure(const char *query)
{
	double		began = now();
	double		ended;

	start(giver, query);
	receive();
	ended = now();
	finish(giver, query, NULL, 0);
	return ended - began;
}

static double
measure_plain(const char *lease)
{
	if (lease)
		return measure("WITH row AS (INSERT INTO notified DEFAULT VALUES RETURNING id) "
					   "SELECT pg_notify('bench', '') FROM row");
	return measure("SELECT pg_notify('bench', '')");
}

static double
measure_grant(const char *lease)
{
	char		query[200];
	char		held[32];
	char		queued[32];
	double		result;

	if (lease)
		snprintf(query, sizeof(query),
				 "SELECT dlock_lease_acquire('notify', %s, owner => 'giver')",
				 lease);
	else
		snprintf(query, sizeof(query), "SELECT dlock_acquire('notify')");
	execute(giver, query, held, sizeof(held));
	if (lease)
		snprintf(query, sizeof(query),
				 "SELECT dlock_lease_enqueue('notify', %s, channel => 'bench', owner => 'listener')",
				 lease);
	else
		snprintf(query, sizeof(query),
				 "SELECT dlock_enqueue('notify', channel => 'bench')");
	execute(listener, query, queued, sizeof(queued));

	snprintf(query, sizeof(query), "SELECT dlock_release_ticket(%s)", held);
	result = measure(query);
	snprintf(query, sizeof(query), "SELECT dlock_release_ticket(%s)", queued);
	execute(listener, query, NULL, 0);
	return result;
}

static int
compare(const void *a, const void *b)
{
	double		x = *(const double *) a;
	double		y = *(const double *) b;

	return x < y ? -1 : x > y;
}

static void
print_percentiles(double *times, int count)
{
	qsort(times, count, sizeof(double), compare);
	printf("%.0f %.0f\n", times[count / 2], times[count * 99 / 100]);
}

int
main(int argc, char **argv)
{
	int			count = argc == 3 ? atoi(argv[2]) : 0;
	double	   *plain = malloc(count * sizeof(double));
	double	   *grants = malloc(count * sizeof(double));
	char		number[32];
	const char *lease = NULL;

	if (count <= 0 || plain == NULL || grants == NULL ||
		(strcmp(argv[1], "session") != 0 && strcmp(argv[1], "lease") != 0))
	{
		fprintf(stderr, "usage: notify session|lease COUNT\n");
		return 1;
	}
	giver = connect_to_server();
	listener = connect_to_server();
	execute(listener, "LISTEN bench", NULL, 0);
	if (strcmp(argv[1], "lease") == 0)
	{
		execute(giver, "SELECT dlock_lease_open('1 s', attach => true)",
				number, sizeof(number));
		lease = number;
	}

	for (int i = -WARM_UP; i < count; i++)
	{
		double		plain_time = measure_plain(lease);
		double		grant_time = measure_grant(lease);

		if (i < 0)
			continue;
		plain[i] = plain_time;
		grants[i] = grant_time;
	}
	print_percentiles(grants, count);
	print_percentiles(plain, count);
	PQfinish(giver);
	PQfinish(listener);
	return 0;
}
