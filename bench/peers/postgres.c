/*-------------------------------------------------------------------------
 *
 * postgres.c
 *	  Locks in PostgreSQL: dlock's, and others.
 *
 * Connections use the environment's settings.  The statements of a list are
 * sent in one pipeline, with one round trip.
 *
 *-------------------------------------------------------------------------
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "libpq-fe.h"

#define STATEMENTS	4

/* In the statements, $1 is the lock, and $2 the result of setup. */
typedef struct Kind
{
	const char *name;
	const char *setup;
	const char *acquire[2];
	const char *release;
	/* the release takes the result of the acquire instead of the name */
	bool		by_ticket;
	/* the acquire may find the lock busy, and must retry */
	bool		polls;
	/* the work is one transaction, so it can be one round trip */
	bool		pipelined;
} Kind;

typedef struct Session
{
	PGconn	   *connection;
	const Kind *kind;
	char		lease[32];
	char		ticket[32];
	int			parameters[STATEMENTS];
} Session;

/* The prepared statements, and the place of each in Session.parameters */
static const char *const statement_names[STATEMENTS] = {"0", "1", "2", "3"};

#define ACQUIRE		0			/* and 1 */
#define RELEASE		2
#define UPDATE		3

static const Kind kinds[] = {
	{
		.name = "dlock",
		.acquire = {"SELECT dlock_acquire($1)"},
		.release = "SELECT dlock_release($1)"
	},
	{
		.name = "dlock_xact",
		.acquire = {"BEGIN", "SELECT dlock_xact_acquire($1)"},
		.release = "COMMIT",
		.pipelined = true
	},
	{
		.name = "dlock_lease",
		.setup = "SELECT dlock_lease_open('5 s', attach => true)",
		.acquire = {"SELECT dlock_lease_acquire($1, $2)"},
		.release = "SELECT dlock_release_ticket($1)",
		.by_ticket = true
	},
	{
		.name = "advisory",
		.acquire = {"SELECT pg_advisory_lock($1)"},
		.release = "SELECT pg_advisory_unlock($1)"
	},
	{
		.name = "advisory_xact",
		.acquire = {"BEGIN", "SELECT pg_advisory_xact_lock($1)"},
		.release = "COMMIT",
		.pipelined = true
	},
	{
		.name = "row_lock",
		.acquire = {
			"BEGIN",
			"SELECT id FROM row_lock WHERE id = $1 FOR UPDATE"
		},
		.release = "COMMIT",
		.pipelined = true
	},
	{
		.name = "lock_table",
		.acquire = {
			"INSERT INTO lock_table VALUES ($1) ON CONFLICT DO NOTHING"
		},
		.release = "DELETE FROM lock_table WHERE id = $1",
		.polls = true
	},
	/* no lock at all */
	{.name = "plain"},
	{0}
};

static const char *const update =
"UPDATE guarded SET value = value + 1 WHERE id = $1";

static void
send_statement(Session *session, int i, const char *first, const char *second)
{
	const char *const values[] = {first, second};

	if (!PQsendQueryPrepared(session->connection, statement_names[i],
							 session->parameters[i], values, NULL, NULL, 0))
		die("send", PQerrorMessage(session->connection));
}

/*
 * Send the pending statements, and read "count" results.  Returns how many rows
 * the last command changed, and optionally the last value.
 */
static int
receive(Session *session, int count, char *value, size_t size)
{
	PGconn	   *connection = session->connection;
	int			rows = 0;

	if (!PQpipelineSync(connection))
		die("sync", PQerrorMessage(connection));
	while (count >= 0)
	{
		PGresult   *result = PQgetResult(connection);

		switch (PQresultStatus(result))
		{
			case PGRES_TUPLES_OK:
				if (value && PQntuples(result) == 1)
					snprintf(value, size, "%s", PQgetvalue(result, 0, 0));
				break;
			case PGRES_COMMAND_OK:
				rows = atoi(PQcmdTuples(result));
				break;
			case PGRES_PIPELINE_SYNC:
				PQclear(result);
				return rows;
			default:
				die(session->kind->name, PQerrorMessage(connection));
		}
		PQclear(result);
		/* the NULL after each result */
		PQgetResult(connection);
		count--;
	}
	die(session->kind->name, "more results than statements");
	return 0;
}

static void
prepare(Session *session, int i, const char *statement)
{
	PGresult   *result;

	if (statement == NULL)
		return;
	if (strstr(statement, "$2"))
		session->parameters[i] = 2;
	else if (strstr(statement, "$1"))
		session->parameters[i] = 1;
	result = PQprepare(session->connection, statement_names[i], statement, 0,
					   NULL);
	if (PQresultStatus(result) != PGRES_COMMAND_OK)
		die(statement, PQerrorMessage(session->connection));
	PQclear(result);
}

static void
set_up(Session *session)
{
	PGresult   *result;

	if (session->kind->setup == NULL)
		return;
	result = PQexec(session->connection, session->kind->setup);
	if (PQresultStatus(result) != PGRES_TUPLES_OK)
		die(session->kind->setup, PQerrorMessage(session->connection));
	snprintf(session->lease, sizeof(session->lease), "%s",
			 PQgetvalue(result, 0, 0));
	PQclear(result);
}

static void *
connect_session(const char *name)
{
	Session    *session = calloc(1, sizeof(Session));
	const Kind *kind = kinds;

	while (strcmp(kind->name, name) != 0)
		kind++;
	session->kind = kind;
	session->connection = PQconnectdb("");
	if (PQstatus(session->connection) != CONNECTION_OK)
		die("connect", PQerrorMessage(session->connection));
	set_up(session);
	prepare(session, ACQUIRE, kind->acquire[0]);
	prepare(session, ACQUIRE + 1, kind->acquire[1]);
	prepare(session, RELEASE, kind->release);
	prepare(session, UPDATE, update);
	PQenterPipelineMode(session->connection);
	return session;
}

static int
send_acquire(Session *session, const char *lock)
{
	int			count = 0;

	for (int i = 0; i < 2 && session->kind->acquire[i]; i++, count++)
		send_statement(session, ACQUIRE + i,
					   session->parameters[ACQUIRE + i] > 0 ? lock : NULL,
					   session->lease);
	return count;
}

static void
acquire(void *opaque, const char *lock)
{
	Session    *session = opaque;

	for (;;)
	{
		int			sent = send_acquire(session, lock);
		int			rows = receive(session, sent, session->ticket,
								   sizeof(session->ticket));

		if (rows == 1 || !session->kind->polls)
			return;
		pause_before_retry();
	}
}

static void
release(void *opaque, const char *lock)
{
	Session    *session = opaque;

	send_statement(session, RELEASE,
				   session->kind->by_ticket ? session->ticket : lock, NULL);
	receive(session, 1, NULL, 0);
}

static void
work(void *opaque, const char *lock, const char *row)
{
	Session    *session = opaque;
	const Kind *kind = session->kind;
	int			sent = 0;

	/* statements before a sync are one transaction, without BEGIN and COMMIT */
	if (kind->pipelined)
	{
		send_statement(session, ACQUIRE + 1, lock, NULL);
		sent++;
	}
	else if (kind->release)
		acquire(session, lock);
	send_statement(session, UPDATE, row, NULL);
	sent++;
	receive(session, sent, NULL, 0);
	if (kind->release && !kind->pipelined)
		release(session, lock);
}

#define PEER(name) {name, connect_session, acquire, release, work}

const Peer	postgres_peers[] = {
	PEER("dlock"), PEER("dlock_xact"), PEER("dlock_lease"), PEER("advisory"),
	PEER("advisory_xact"), PEER("row_lock"), PEER("lock_table"), PEER("plain"),
	{0}
};
