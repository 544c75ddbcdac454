/*
 * watch.c
 *		dlock watch: a line for each change of a lock's holder.
 *
 * The server sends the current state at once, and then each change.  After a
 * reconnect, the server sends the current state again.  Only a new state is
 * printed.
 */
#include "bin/bin.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

typedef struct Watched
{
	const char *name;
	char	   *last;			/* the state printed last, or NULL */
} Watched;

static Watched *watched;
static int	n_watched;

/* Replace control characters, which could break the line or the screen. */
static char *
plain_line(char *text)
{
	int			encoding = PQclientEncoding(server_connection());
	int			length;

	for (char *c = text; *c; c += length)
	{
		length = PQmblenBounded(c, encoding);
		if (PQdsplen(c, encoding) < 0)
			memset(c, '?', length);
	}
	return text;
}

/* Print a change if it is new.  Returns false if the connection is lost. */
static bool
print_change(const char *payload)
{
	char		at[32];
	time_t		now = time(NULL);
	PGresult   *fields;
	Watched    *its = NULL;

	fields = server_query(clock_now() + 10 * SEC,
						  "SELECT lock, event, pg_catalog.concat_ws(' ', '', lock, '', "
						  "event, ticket, mode, scope, info) "
						  "FROM pg_catalog.json_to_record($1::pg_catalog.json) AS j "
						  "(lock pg_catalog.text, event pg_catalog.text, "
						  "ticket pg_catalog.text, mode pg_catalog.text, "
						  "scope pg_catalog.text, info pg_catalog.text)", 1, &payload);
	if (server_state != SERVER_OPEN)
	{
		PQclear(fields);
		if (server_connection() == NULL)
			return false;
		pg_log_warning("a change cannot be shown: %s", server_problem);
		return true;
	}
	for (int i = 0; i < n_watched; i++)
	{
		if (strcmp(watched[i].name, PQgetvalue(fields, 0, 0)) == 0)
			its = &watched[i];
	}
	if (its && (its->last == NULL || strcmp(its->last, payload) != 0) &&
		(strcmp(PQgetvalue(fields, 0, 1), "held") == 0 ||
		 strcmp(PQgetvalue(fields, 0, 1), "free") == 0))
	{
		free(its->last);
		its->last = pg_strdup(payload);
		(void) strftime(at, sizeof(at), "%Y-%m-%d %H:%M:%S", localtime(&now));
		if (opt.json)
			printf("%s\n", payload);
		else
			printf("%s %s\n", at, plain_line(PQgetvalue(fields, 0, 2)));
		if (finish_output(0) != 0)
			exit(1);
	}
	PQclear(fields);
	return true;
}

/*
 * Does the server answer, with the same extension as at the last call?  A new
 * extension has no watches.
 */
static bool
extension_stays(void)
{
	static char extension[16];
	char		before[sizeof(extension)];
	PGresult   *result = server_query(clock_now() + 10 * SEC,
									  "SELECT pg_catalog.max(oid::pg_catalog.text) "
									  "FROM pg_catalog.pg_extension "
									  "WHERE extname OPERATOR(pg_catalog.=) 'dlock'", 0, NULL);

	strlcpy(before, extension, sizeof(before));
	if (server_state == SERVER_OPEN)
	{
		strlcpy(extension, PQgetvalue(result, 0, 0), sizeof(extension));
		strlcpy(server_problem, "extension \"dlock\" was dropped", sizeof(server_problem));
	}
	PQclear(result);
	return server_state == SERVER_OPEN && strcmp(before, extension) == 0;
}

/* Connect and watch.  Returns false if the server does not answer. */
static bool
begin_watching(void)
{
	server_state = SERVER_OPEN;
	if (server_connection() == NULL)
		server_open(10 * SEC);
	if (server_state == SERVER_OPEN)
		(void) extension_stays();
	for (int i = 0; i < n_watched && server_state == SERVER_OPEN; i++)
		PQclear(server_query(clock_now() + 10 * SEC, "SELECT %s.dlock_watch($1)",
							 1, &watched[i].name));
	if (server_state == SERVER_REFUSES)
	{
		pg_log_error("%s", server_problem);
		exit(1);
	}
	return server_state == SERVER_OPEN;
}

/* Print changes until the connection is lost.  Checks a silent connection. */
static void
print_changes(void)
{
	PGnotify   *notify;

	for (;;)
	{
		while ((notify = PQnotifies(server_connection())) != NULL)
		{
			bool		lost = !print_change(notify->extra);

			PQfreemem(notify);
			if (lost)
				return;
		}
		if (!server_await(PQsocket(server_connection()), POLLIN,
						  clock_now() + 5 * SEC) && !extension_stays())
		{
			server_close();
			return;
		}
		if (!PQconsumeInput(server_connection()))
		{
			server_lose();
			return;
		}
	}
}

int
main_watch(const char *name, int n, char **operands)
{
	bool		warned = false;

	n_watched = n;
	watched = pg_malloc0(n * sizeof(Watched));
	for (int i = 0; i < n; i++)
		watched[i].name = operands[i];
	for (;;)
	{
		bool		begun = begin_watching();

		if (begun)
			print_changes();
		else
			server_close();
		/* warn once, until the server answers again */
		if (begun || !warned)
			pg_log_warning("%.*s", (int) strcspn(server_problem, "\n"), server_problem);
		warned = true;
		sleep(1);
	}
}
