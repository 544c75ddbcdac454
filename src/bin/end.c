/*
 * end.c
 *		dlock release and dlock close: end a ticket, or a lease.
 */
#include "bin/bin.h"

int
main_end(const char *name, int n, char **operands)
{
	const char *id = operands[0];
	bool		is_lease = strcmp(name, "close") == 0;
	PGresult   *result;
	const char *count;

	/* the answer is the number of tickets that the function has ended */
	result = server_query_or_exit(is_lease && opt.force ? "SELECT %s.dlock_force_close($1)" :
								  is_lease ? "SELECT %s.dlock_lease_close($1)" :
								  opt.force ? "SELECT %s.dlock_force_release($1)::pg_catalog.int4" :
								  "SELECT %s.dlock_release_ticket($1)::pg_catalog.int4",
								  1, &id);
	count = PQgetvalue(result, 0, 0);
	if (PQgetisnull(result, 0, 0) || (!is_lease && strcmp(count, "0") == 0))
	{
		pg_log_error("there is no %s %s", is_lease ? "lease" : "ticket", id);
		return 1;
	}
	if (!opt.quiet && is_lease)
		printf("%s\n", count);
	return 0;
}
