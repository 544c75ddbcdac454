/*
 * server.c
 *		The connection to the server.
 *
 * Requests wait in server_await(), so that dlock run can do other work at the
 * same time.  Only connecting can block (resolver, Kerberos, files).  If
 * server_await() returns false, the request is given up.  To give up a query,
 * the connection is closed, because it is busy until the answer comes.
 *
 * In non-blocking mode, libpq has no timeout for each of several hosts.  So
 * server_open() tries one host at a time.
 */
#include "bin/bin.h"

#include <poll.h>

#include "common/string.h"

static bool await_plainly(int fd, short events, int64 until);

bool		(*server_await) (int fd, short events, int64 until) = await_plainly;
char		server_problem[1024];
char		server_sqlstate[6];
ServerState server_state;

static PGconn *connection;
static char *extension_schema;
static char *password;
static bool needs_password;

/* Lists of the servers' addresses, separated by commas */
static struct
{
	const char *keyword;
	const char *variable;
	const char *list;
}			places[] = {
	{"host", "PGHOST", NULL}, {"hostaddr", "PGHOSTADDR", NULL}, {"port", "PGPORT", NULL}
};
static int	n_hosts = 1;

static bool
await_plainly(int fd, short events, int64 until)
{
	struct pollfd ready = {.fd = fd, .events = events};
	int64		left = until == FOREVER ? -1 : until - clock_now();
	int			timeout = left < 0 ? -1 : (int) Min(left / MS + 1, INT_MAX);

	if (until != FOREVER && left <= 0)
		return false;
	return poll(&ready, 1, timeout) > 0;
}

/* Returns element i of a list, or the last one if the list is shorter. */
static char *
element(const char *list, int i)
{
	size_t		length;

	if (list == NULL)
		return NULL;
	while (i-- > 0 && strchr(list, ','))
		list = strchr(list, ',') + 1;
	length = strcspn(list, ",");
	return length > 0 ? pnstrdup(list, length) : NULL;
}

/*
 * Find out which hosts there are, and ask for the password.  Returns false if
 * the connection string is malformed.
 */
bool
server_init(void)
{
	PQconninfoOption *options = NULL;
	char	   *problem = NULL;

	if (opt.dbname && (strchr(opt.dbname, '=') || strstr(opt.dbname, "://")))
		options = PQconninfoParse(opt.dbname, &problem);
	if (problem)
	{
		(void) pg_strip_crlf(problem);
		pg_log_error("%s", problem);
		return false;
	}
	places[0].list = opt.host;
	places[2].list = opt.port;
	for (size_t p = 0; p < lengthof(places); p++)
	{
		int			n = 1;

		if (places[p].list == NULL)
			places[p].list = getenv(places[p].variable);
		for (PQconninfoOption *o = options; o && o->keyword; o++)
		{
			if (o->val && strcmp(o->keyword, places[p].keyword) == 0)
				places[p].list = o->val;
		}
		for (const char *c = places[p].list; c && *c; c++)
			n += *c == ',';
		n_hosts = Max(n_hosts, n);
	}
	if (opt.ask_password)
		password = simple_prompt("Password: ", false);
	return true;
}

void
server_close(void)
{
	PQfinish(connection);
	connection = NULL;
}

PGconn *
server_connection(void)
{
	return connection;
}

#define note_problem(...) \
	((void) snprintf(server_problem, sizeof(server_problem), __VA_ARGS__))

/* Begin to connect to a host.  Later parameters override earlier ones. */
static PGconn *
start_connection(int i)
{
	static char *part[lengthof(places)];
	const char *keys[20];
	const char *values[20];
	int			n = 0;

#define ADD(key, value) (keys[n] = (key), values[n++] = (value))
	ADD("fallback_application_name", "dlock");
	if (getenv("PGTARGETSESSIONATTRS") == NULL)
		ADD("target_session_attrs", "read-write");
	ADD("tcp_user_timeout", "15000");
	ADD("keepalives_idle", "10");
	ADD("keepalives_interval", "5");
	ADD("keepalives_count", "3");
	ADD("user", opt.user);
	ADD("password", password);
	ADD("dbname", opt.dbname);
	for (size_t p = 0; p < lengthof(places); p++)
	{
		pg_free(part[p]);
		part[p] = element(places[p].list, i);
		ADD(places[p].keyword, part[p]);
	}
	keys[n] = values[n] = NULL;
#undef ADD
	return PQconnectStartParams(keys, values, true);
}

/*
 * Find the schema of dlock, and change settings: the session runs only dlock's
 * functions, and its waits must end if the client is gone.  Behind a pooler,
 * which reports another PID than the server, change no setting, because the
 * pooler gives the session to other clients, too.
 */
#define SET(name, value) "pg_catalog.set_config('" name "', '" value "', false)"
static ServerState
look_for_extension(int64 until)
{
	char		number[12];
	const char *pid = number;
	PGresult   *result;

	snprintf(number, sizeof(number), "%d", PQbackendPID(connection));
	result = server_query(until,
						  "SELECT pg_catalog.quote_ident(n.nspname), "
						  "CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $1::pg_catalog.int4 "
						  "THEN pg_catalog.concat("
						  SET("statement_timeout", "0") ", "
						  SET("lock_timeout", "0") ", "
						  SET("idle_session_timeout", "0") ", "
						  "(SELECT " SET("transaction_timeout", "0")	/* since 17 */
						  " FROM pg_catalog.pg_settings"
						  " WHERE name OPERATOR(pg_catalog.=) 'transaction_timeout'), "
						  SET("client_connection_check_interval", "1s") ", "
						  SET("tcp_keepalives_idle", "10") ", "
						  SET("tcp_keepalives_interval", "5") ", "
						  SET("tcp_keepalives_count", "3") ", "
						  SET("tcp_user_timeout", "20s") ") END "
						  "FROM pg_catalog.pg_extension AS e "
						  "JOIN pg_catalog.pg_namespace AS n "
						  "ON n.oid OPERATOR(pg_catalog.=) e.extnamespace "
						  "WHERE e.extname OPERATOR(pg_catalog.=) 'dlock'",
						  1, &pid);

	if (server_state == SERVER_OPEN && PQntuples(result) == 0)
	{
		note_problem("extension \"dlock\" is not installed in database \"%s\"\n"
					 "HINT:  Run CREATE EXTENSION dlock there, or name another "
					 "database with -d.", PQdb(connection));
		server_state = SERVER_REFUSES;
	}
	else if (server_state == SERVER_OPEN)
	{
		free(extension_schema);
		extension_schema = pg_strdup(PQgetvalue(result, 0, 0));
	}
	PQclear(result);
	if (server_state != SERVER_OPEN)
		server_close();
	return server_state;
}

/*
 * Does the server refuse the role or the database for good?  While connecting,
 * libpq gives the SQLSTATE only in the text of the error.
 */
static bool
is_refusal(const char *text)
{
	return strstr(text, ":  28") || strstr(text, ":  3D") ||
		strstr(text, ":  42501");
}

static void
note_connection_problem(void)
{
	char	   *location;

	note_problem("%s", PQerrorMessage(connection));
	if ((location = strstr(server_problem, "\nLOCATION:")) != NULL)
		*location = '\0';
	needs_password = PQconnectionNeedsPassword(connection);
	if (needs_password)
		note_problem("the server asks for a password\n"
					 "HINT:  Put it into ~/.pgpass, or use -W.");
}

/* Ignore warnings, because the answer says the same. */
static void
ignore_notice(void *arg, const PGresult *notice)
{
}

static ServerState
open_host(int i, int64 until)
{
	PostgresPollingStatusType step = PGRES_POLLING_WRITING;
	bool		in_time = true;
	bool		refused;

	connection = start_connection(i);
	if (connection == NULL)
	{
		note_problem("out of memory");
		return SERVER_AWAY;
	}
	PQsetErrorVerbosity(connection, PQERRORS_VERBOSE);
	PQsetNoticeReceiver(connection, ignore_notice, NULL);
	while (PQstatus(connection) != CONNECTION_BAD &&
		   step != PGRES_POLLING_OK && step != PGRES_POLLING_FAILED && in_time)
	{
		in_time = server_await(PQsocket(connection),
							   step == PGRES_POLLING_READING ? POLLIN : POLLOUT,
							   until);
		if (in_time)
			step = PQconnectPoll(connection);
	}
	if (step == PGRES_POLLING_OK)
	{
		PQsetErrorVerbosity(connection, PQERRORS_DEFAULT);
		PQsetnonblocking(connection, 1);
		return look_for_extension(until);
	}
	if (in_time)
		note_connection_problem();
	else
		note_problem("no answer from server at \"%s\"",
					 PQhost(connection) ? PQhost(connection) : "");
	refused = (in_time && needs_password) ||
		is_refusal(PQerrorMessage(connection));
	server_close();
	return refused ? SERVER_REFUSES : SERVER_AWAY;
}

/* Connect to the first host that answers within its part of the time. */
ServerState
server_open(int64 time)
{
	bool		refuses = true;

	for (int i = 0; i < n_hosts; i++)
	{
		server_state = open_host(i, clock_now() + time / n_hosts);
		if (server_state == SERVER_OPEN)
			return SERVER_OPEN;
		/* a host that is away may come back */
		refuses &= server_state == SERVER_REFUSES;
	}
	return server_state = refuses ? SERVER_REFUSES : SERVER_AWAY;
}

/*
 * Note an error of the server, without its context.  Asking again can help if
 * the server lacks resources, is about to stop, has become a standby, or waits
 * for a standby.
 */
static void
note_error(const PGresult *result)
{
	const char *code = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	const char *primary = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
	const char *detail = PQresultErrorField(result, PG_DIAG_MESSAGE_DETAIL);
	const char *hint = PQresultErrorField(result, PG_DIAG_MESSAGE_HINT);
	static const char *const classes[] = {"08", "25", "40", "53", "57", "58"};

	note_problem("%s%s%s%s%s", primary ? primary : PQresultErrorMessage(result),
				 detail ? "\nDETAIL:  " : "", detail ? detail : "",
				 hint ? "\nHINT:  " : "", hint ? hint : "");
	strlcpy(server_sqlstate, code ? code : "", sizeof(server_sqlstate));
	server_state = code ? SERVER_REFUSES : SERVER_AWAY;
	for (size_t i = 0; code && i < lengthof(classes); i++)
	{
		if (strncmp(code, classes[i], 2) == 0)
			server_state = SERVER_AWAY;
	}
}

/* Close a connection that is lost. */
void
server_lose(void)
{
	note_problem("%s", PQerrorMessage(connection));
	server_close();
	server_state = SERVER_AWAY;
}

static PGresult *
give_up_query(void)
{
	note_problem("no answer from the server");
	server_close();
	server_state = SERVER_AWAY;
	return NULL;
}

/*
 * Send a query, with dlock's schema for each %s in sql.  Returns the answer,
 * which may be an error, or NULL if the connection is lost or no answer comes
 * in time.  Sets server_state and, after a problem, server_problem.
 */
PGresult *
server_query(int64 until, const char *sql, int n, const char *const *values)
{
	PGresult   *result = NULL;
	PGresult   *next;
	char	   *text = psprintf(sql, extension_schema, extension_schema);
	int			sent = PQsendQueryParams(connection, text, n, NULL, values,
										 NULL, NULL, 0);
	int			left = 1;

	pg_free(text);
	server_sqlstate[0] = '\0';
	while (sent && (left = PQflush(connection)) > 0)
	{
		if (!server_await(PQsocket(connection), POLLIN | POLLOUT, until))
			return give_up_query();
		if (!PQconsumeInput(connection))
			break;
	}
	while (left == 0 && PQstatus(connection) == CONNECTION_OK)
	{
		if (!PQisBusy(connection))
		{
			if ((next = PQgetResult(connection)) == NULL)
				break;
			PQclear(result);
			result = next;
		}
		else if (!server_await(PQsocket(connection), POLLIN, until))
		{
			PQclear(result);
			return give_up_query();
		}
		else if (!PQconsumeInput(connection))
			break;
	}
	if (PQstatus(connection) == CONNECTION_BAD || result == NULL)
	{
		PQclear(result);
		server_lose();
		return NULL;
	}
	server_state = SERVER_OPEN;
	if (PQresultStatus(result) != PGRES_TUPLES_OK)
		note_error(result);
	return result;
}

/* Connect, or exit.  All subcommands except dlock run call this. */
void
server_open_or_exit(void)
{
	ServerState state;

	if (!server_init())
		exit(1);
	state = server_open(10 * SEC);
	if (state == SERVER_REFUSES && needs_password)
	{
		password = simple_prompt("Password: ", false);
		state = server_open(10 * SEC);
	}
	if (state != SERVER_OPEN)
	{
		pg_log_error("%s", server_problem);
		exit(1);
	}
}

PGresult *
server_query_or_exit(const char *sql, int n, const char *const *values)
{
	PGresult   *result = server_query(FOREVER, sql, n, values);

	if (server_state != SERVER_OPEN)
	{
		pg_log_error("%s", server_problem);
		exit(1);
	}
	return result;
}
