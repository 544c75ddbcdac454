/*
 * list.c
 *		dlock ls, dlock blockers and dlock stats: the views as tables.
 *
 * JSON and CSV are for programs, and have all columns of the view.  A table
 * has the columns that fit on a line.
 */
#include "bin/bin.h"

#include "fe_utils/print.h"

/* The time that has passed since "since", in whole seconds */
#define AGE(since) \
	"pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) " since ")"
#define LOCK_COLUMNS \
	"SELECT name, CASE WHEN \"position\" OPERATOR(pg_catalog.>) 0 " \
	"THEN pg_catalog.concat('waits ', \"position\") WHEN granted THEN 'holds' ELSE 'delay' END AS state, " \
	AGE("coalesce(granted_at, enqueued_at)") \
	" AS \"for\", ticket, mode, scope, pid, role, info, " \
	"pg_catalog.date_trunc('second', remaining) AS remaining "
#define BLOCKER_COLUMNS \
	"SELECT blocked, pid, lease, ticket, role, info, state, " AGE("since") " AS \"for\", " \
	"pg_catalog.array_to_string(holds, ', ') AS holds, pg_catalog.left(query, 60) AS query "

static const struct
{
	const char *name;
	const char *table;			/* columns to print as a table */
	const char *source;			/* view and order; %s stands for the schema */
}			lists[] = {
	{"ls", LOCK_COLUMNS, "FROM %s.dlock_locks ORDER BY name, \"position\", ticket"},
	{"blockers", BLOCKER_COLUMNS, "FROM %s.dlock_blockers"},
	{"stats", "SELECT * ", "FROM %s.dlock_stats"},
};

/* dlock ls NAME */
#define ONE_LOCK "FROM %s.dlock_locks($1) ORDER BY \"position\", ticket"

/* For dlock top; the columns to sort by come between FILTERED and LIMITED */
#define FILTERED \
	LOCK_COLUMNS "FROM %s.dlock_locks WHERE $1::pg_catalog.text IS NULL OR " \
	"pg_catalog.strpos(pg_catalog.concat_ws(' ', name, role, owner, info), $1) " \
	"OPERATOR(pg_catalog.>) 0 ORDER BY "
#define LIMITED "name, \"position\", ticket LIMIT 500"

static void
print_table(FILE *out, const PGresult *result, bool expanded)
{
	printQueryOpt how = {.nullPrint = ""};

	how.topt.format = opt.csv ? PRINT_CSV : PRINT_ALIGNED;
	how.topt.csvFieldSep[0] = ',';
	how.topt.border = 1;
	how.topt.expanded = expanded;
	how.topt.start_table = how.topt.stop_table = true;
	how.topt.encoding = PQclientEncoding(server_connection());
	printQuery(result, &how, out, false, NULL);
}

int
main_list(const char *name, int n, char **operands)
{
	int			i = 0;
	const char *lock = n > 0 ? operands[0] : NULL;
	const char *sql;
	PGresult   *result;

	while (strcmp(name, lists[i].name) != 0)
		i++;
	sql = lock ? ONE_LOCK : lists[i].source;
	if (opt.json)
		sql = psprintf("SELECT coalesce(pg_catalog.json_agg(t), '[]') FROM (SELECT * %s) AS t",
					   sql);
	else
		sql = psprintf("%s%s", opt.csv ? "SELECT * " : lists[i].table, sql);
	result = server_query_or_exit(sql, n, &lock);
	if (opt.json)
		printf("%s\n", PQgetvalue(result, 0, 0));
	else
		print_table(stdout, result, !opt.csv && strcmp(name, "stats") == 0);
	PQclear(result);
	return 0;
}

/* Print a page of dlock top.  Returns false if the server does not answer. */
bool
print_top(FILE *out, const char *order)
{
	int64		until = clock_now() + 10 * SEC;
	char	   *sql = psprintf("%s%s%s", FILTERED, order, LIMITED);
	PGresult   *summary;
	PGresult   *blockers = NULL;
	PGresult   *locks = NULL;
	bool		complete = false;

	summary = server_query(until,
						   "SELECT pg_catalog.format('dlock: %%s held, %%s waiting, "
						   "the longest for %%s, %%s leases; %%s', held, waiting, "
						   "pg_catalog.date_trunc('second', oldest_wait), leases, "
						   "pg_catalog.date_trunc('second', pg_catalog.now())) "
						   "FROM %s.dlock_stats", 0, NULL);
	if (server_state == SERVER_OPEN)
		blockers = server_query(until, BLOCKER_COLUMNS "FROM %s.dlock_blockers LIMIT 10",
								0, NULL);
	if (blockers && server_state == SERVER_OPEN)
		locks = server_query(until, sql, 1, &opt.filter);
	if (locks && server_state == SERVER_OPEN)
	{
		complete = true;
		fprintf(out, "%s\n\n", PQgetvalue(summary, 0, 0));
		if (PQntuples(blockers) > 0)
			print_table(out, blockers, false);
		print_table(out, locks, false);
	}
	PQclear(summary);
	PQclear(blockers);
	PQclear(locks);
	pg_free(sql);
	return complete;
}
