/*
 * options.c
 *		Options that all subcommands have, and the values of options.
 */
#include "bin/bin.h"

#include <time.h>

#include "fe_utils/option_utils.h"
#include "getopt_long.h"

#define OPT_HELP 1000

CommonOptions common;
ShowOptions show = {.pause = 2 * SEC};

static const struct option common_options[] = {
	{"dbname", required_argument, NULL, 'd'},
	{"help", no_argument, NULL, OPT_HELP},
	{"host", required_argument, NULL, 'h'},
	{"port", required_argument, NULL, 'p'},
	{"quiet", no_argument, NULL, 'q'},
	{"username", required_argument, NULL, 'U'},
	{"verbose", no_argument, NULL, 'v'},
	{"password", no_argument, NULL, 'W'},
	{NULL, 0, NULL, 0}
};

/* A subcommand's own long options, and the common ones */
const struct option *
with_common_options(const struct option *own)
{
	struct option *all;
	int			n = 0;

	while (own[n].name)
		n++;
	all = pg_malloc0(n * sizeof(*all) + sizeof(common_options));
	memcpy(all, own, n * sizeof(*all));
	memcpy(all + n, common_options, sizeof(common_options));
	return all;
}

bool
take_common_option(int c)
{
	switch (c)
	{
		case 'd':
			common.dbname = pg_strdup(optarg);
			return true;
		case 'h':
			common.host = pg_strdup(optarg);
			return true;
		case 'p':
			common.port = pg_strdup(optarg);
			return true;
		case 'q':
			common.quiet = true;
			pg_logging_set_level(PG_LOG_ERROR);
			return true;
		case 'U':
			common.user = pg_strdup(optarg);
			return true;
		case 'v':
			common.verbose = true;
			return true;
		case 'W':
			common.ask_password = true;
			return true;
	}
	return false;
}

/* getopt_long() gives '?' for -?, and for what it does not know */
bool
asks_for_help(int c, char **argv)
{
	return c == OPT_HELP || (c == '?' && strcmp(argv[optind - 1], "-?") == 0);
}

void
print_common_help(void)
{
	printf("\nConnection options:\n"
		   "  -h, --host=HOSTNAME      database server hosts or socket directory\n"
		   "  -p, --port=PORT          database server port\n"
		   "  -U, --username=USERNAME  user name to connect as\n"
		   "  -W, --password           ask for a password\n"
		   "  -d, --dbname=DBNAME      database, or a connection string\n"
		   "\nPGHOST, PGDATABASE and the other variables of libpq count, too.\n");
}

/* Returns the exit code */
int
usage_error(const char *subcommand)
{
	pg_log_error_hint("Try \"dlock %s--help\" for more information.",
					  subcommand);
	return strcmp(subcommand, "run ") == 0 ? EXIT_DLOCK : 1;
}

/* "30s", "5min", "500ms", "1.5h"; a bare number is seconds */
int64
time_option(const char *option, const char *value)
{
	static const struct
	{
		const char *name;
		double		length;
	}			units[] = {
		{"", 1e6}, {"s", 1e6}, {"ms", 1e3}, {"us", 1}, {"min", 60e6},
		{"m", 60e6}, {"h", 3600e6}, {"d", 86400e6}
	};
	char	   *end;
	double		number = strtod(value, &end);

	while (end != value && *end == ' ')
		end++;
	for (size_t i = 0; end != value && i < lengthof(units); i++)
	{
		if (strcmp(end, units[i].name) == 0 && number >= 0 &&
			number * units[i].length < 1e15)
			return (int64) (number * units[i].length);
	}
	pg_log_error("invalid time for option %s: \"%s\"", option, value);
	pg_log_error_hint("A time is a number and a unit: us, ms, s, min, h or d; "
					  "a bare number is seconds.");
	exit(EXIT_DLOCK);
}

/* The value as text, once it is known to be a whole number above 0 */
const char *
count_option(const char *option, const char *value)
{
	int			number;

	if (!option_parse_int(value, option, 1, INT_MAX, &number))
		exit(EXIT_DLOCK);
	return psprintf("%d", number);
}

int64
clock_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_BOOTTIME, &ts);
	return ts.tv_sec * SEC + ts.tv_nsec / 1000;
}
