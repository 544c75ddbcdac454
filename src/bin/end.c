/*
 * end.c
 *		dlock release and dlock close: end a ticket, or a lease.
 */
#include "bin/bin.h"

#include "getopt_long.h"

static void
print_end_help(const char *what, const char *id)
{
	printf("dlock %s ends a %s.\n\n"
		   "Usage:\n"
		   "  dlock %s [OPTION]... %s\n"
		   "\nOptions:\n"
		   "  -f, --force              also if it is another role's; for administrators\n"
		   "  -q, --quiet              print nothing\n"
		   "  -?, --help               show this help, then exit\n",
		   what, strcmp(what, "release") == 0 ?
		   "ticket, held or waiting" : "lease, with all its tickets", what, id);
	print_common_help();
	printf("\nThe exit code is 0 if it was there, and 1 if it was not.\n");
}

int
main_end(int argc, char **argv)
{
	static const struct option own[] = {
		{"force", no_argument, NULL, 'f'},
		{NULL, 0, NULL, 0}
	};
	const struct option *options = with_common_options(own);
	const char *what = argv[0];
	bool		is_lease = strcmp(what, "close") == 0;
	const char *id;
	const char *sql;
	bool		force = false;
	PGresult   *result;
	const char *count;
	int			c;

	while ((c = getopt_long(argc, argv, "f?" COMMON_SHORT, options, NULL)) != -1)
	{
		if (asks_for_help(c, argv))
		{
			print_end_help(what, is_lease ? "LEASE" : "TICKET");
			return 0;
		}
		if (c == 'f')
			force = true;
		else if (!take_common_option(c))
			usage_error(psprintf("%s ", what));
	}
	if (optind != argc - 1)
	{
		pg_log_error("one number is needed: a %s", is_lease ? "lease" : "ticket");
		usage_error(psprintf("%s ", what));
	}
	id = argv[optind];
	server_open_or_exit();
	/* how many tickets; of a ticket, 1 or 0 */
	sql = is_lease && force ? "SELECT %s.dlock_force_close($1)" :
		is_lease ? "SELECT %s.dlock_lease_close($1)" :
		force ? "SELECT %s.dlock_force_release($1)::pg_catalog.int4" :
		"SELECT %s.dlock_release_ticket($1)::pg_catalog.int4";
	result = server_query_or_exit(sql, 1, &id);
	count = PQgetvalue(result, 0, 0);
	if (PQgetisnull(result, 0, 0) || (!is_lease && strcmp(count, "0") == 0))
	{
		pg_log_error("there is no %s %s", is_lease ? "lease" : "ticket", id);
		return 1;
	}
	if (!common.quiet && is_lease)
		printf("%s\n", count);
	return 0;
}
