/*
 * options.c
 *		The options of all subcommands, their help, and what all files need.
 */
#include "bin/bin.h"

#include <time.h>

#include "fe_utils/option_utils.h"
#include "getopt_long.h"

Options		opt = {
	.ttl = -1, .wait = FOREVER, .grace = -1, .every = -1, .patience = 30 * SEC,
	.busy_code = 1, .pause = 2 * SEC
};

static bool wants_help;
static bool wants_version;

typedef enum Kind
{
	FLAG,
	TEXT,
	TIME,
	NO_TIME,					/* sets a time to 0 */
	COUNT,						/* a whole number above 0, as text */
	CODE						/* an exit code */
} Kind;

/*
 * The options, in the order of the help.  "of" has the letters of the
 * subcommands that take the option.  It is NULL if all do.
 */
static const struct
{
	const char *name;
	char		letter;
	Kind		kind;
	const char *of;
	void	   *value;
	const char *help;
}			table[] = {
	{"nonblock", 'n', NO_TIME, "r", &opt.wait,
		"\nWaiting:\n"
		"  -n, --nonblock           do not wait if the lock is busy\n"},
	{"wait", 'w', TIME, "r", &opt.wait,
		"  -w, --wait=TIME          wait for at most this long\n"},
	{"conflict-exit-code", 'E', CODE, "r", &opt.busy_code,
		"  -E, --conflict-exit-code=N\n"
		"                           exit code if the lock was busy (default: 1)\n"},
	{"patience", 0, TIME, "r", &opt.patience,
		"      --patience=TIME      look for a server for this long, before the\n"
		"                           command runs (default: 30s)\n"},
	{"shared", 's', FLAG, "r", &opt.shared,
		"\nThe lock:\n"
		"  -s, --shared             share it with others that use --shared\n"},
	{"slots", 0, COUNT, "r", &opt.slots,
		"      --slots=N            let N run at the same time\n"},
	{"permits", 0, COUNT, "r", &opt.permits,
		"      --permits=N          take N of the slots (default: 1)\n"},
	{"ttl", 0, TIME, "r", &opt.ttl,
		"      --ttl=TIME           a lease of this length, which is renewed while the\n"
		"                           command runs (default: 30s)\n"},
	{"session", 0, FLAG, "r", &opt.session,
		"      --session            no lease: the lock ends with the connection\n"},
	{"at-least", 0, TIME, "r", &opt.at_least,
		"      --at-least=TIME      keep the lock for this long from its grant, even if\n"
		"                           the command ends earlier, or fails\n"},
	{"owner", 0, TEXT, "r", &opt.owner,
		"      --owner=TEXT         take over a lease of this owner, if there is one;\n"
		"                           not for two runs at a time: one ends the other's\n"},
	{"info", 0, TEXT, "r", &opt.info,
		"      --info=TEXT          what others see of this holder (default: command,\n"
		"                           host and process)\n"},
	{"every", 0, TIME, "r", &opt.every,
		"\nThe command:\n"
		"      --every=TIME         run it again and again, this long from start to\n"
		"                           start, as long as the lock is held\n"},
	{"grace", 0, TIME, "r", &opt.grace,
		"      --grace=TIME         time from SIGTERM to SIGKILL if the lock is about\n"
		"                           to be lost (default: 5s, or a quarter of the ttl)\n"
		"\nOther options:\n"
		"  -q, --quiet              no warnings\n"
		"  -v, --verbose            tell when the lock is acquired, or busy\n"},
	{"csv", 0, FLAG, "l", &opt.csv,
		"      --csv                comma-separated values\n"},
	{"json", 0, FLAG, "lw", &opt.json,
		"      --json               JSON\n"},
	{"filter", 0, TEXT, "t", &opt.filter,
		"      --filter=TEXT        only locks with this text in name, role, owner or info\n"},
	{"interval", 0, TIME, "t", &opt.pause,
		"      --interval=TIME      time between two refreshes (default: 2s)\n"},
	{"once", 0, FLAG, "t", &opt.once,
		"      --once               print it once, then exit\n"},
	{"force", 'f', FLAG, "e", &opt.force,
		"  -f, --force              also if it is another role's; for administrators\n"},
	{"version", 'V', FLAG, "m", &wants_version,
		"\nOther options:\n"
		"  -V, --version            output version information, then exit\n"},
	{"help", 0, FLAG, NULL, &wants_help,
		"  -?, --help               show this help, then exit\n"},
	{"host", 'h', TEXT, NULL, &opt.host,
		"\nConnection options:\n"
		"  -h, --host=HOSTNAME      database server hosts or socket directory\n"},
	{"port", 'p', TEXT, NULL, &opt.port,
		"  -p, --port=PORT          database server port\n"},
	{"username", 'U', TEXT, NULL, &opt.user,
		"  -U, --username=USERNAME  user name to connect as\n"},
	{"password", 'W', FLAG, NULL, &opt.ask_password,
		"  -W, --password           ask for a password\n"},
	{"dbname", 'd', TEXT, NULL, &opt.dbname,
		"  -d, --dbname=DBNAME      database, or a connection string\n"
		"\nPGHOST, PGDATABASE and the other variables of libpq count, too.\n"},
	{"quiet", 'q', FLAG, NULL, &opt.quiet, ""},
	{"verbose", 'v', FLAG, NULL, &opt.verbose, ""},
};

/* Parse "30s", "5min", "500ms" or "1.5h".  A bare number is seconds. */
static int64
parse_time(const char *option, const char *value)
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

static void
take_option(int i, const char *value)
{
	const char *option = psprintf("--%s", table[i].name);
	int			number;

	switch (table[i].kind)
	{
		case FLAG:
			*(bool *) table[i].value = true;
			break;
		case NO_TIME:
			*(int64 *) table[i].value = 0;
			break;
		case TIME:
			*(int64 *) table[i].value = parse_time(option, value);
			break;
		case CODE:
			if (!option_parse_int(value, option, 0, 255, (int *) table[i].value))
				exit(EXIT_DLOCK);
			break;
		case COUNT:
			if (!option_parse_int(value, option, 1, INT_MAX, &number))
				exit(EXIT_DLOCK);
			*(const char **) table[i].value = value;
			break;
		case TEXT:
			*(const char **) table[i].value = value;
			break;
	}
}

/* Refuse wrong combinations, and set defaults that depend on other options. */
static void
check_run_options(void)
{
	const char *problem = NULL;

	if (opt.session && (opt.ttl >= 0 || opt.at_least > 0 || opt.owner))
		problem = "option --session cannot be used with --ttl, --at-least or --owner";
	if (opt.ttl < 0)
		opt.ttl = 30 * SEC;
	if (opt.grace < 0)
		opt.grace = Min(5 * SEC, opt.ttl / 4);
	if (opt.ttl < 100 * MS)
		problem = "--ttl must be at least 100ms";
	if (problem)
	{
		pg_log_error("%s", problem);
		exit(usage_error("run "));
	}
	if (!opt.session && opt.grace > opt.ttl / 4 * 3)
	{
		pg_log_error("--grace leaves no time to renew the lease within --ttl");
		pg_log_error_hint("Choose a --ttl of at least twice the --grace.");
		exit(EXIT_DLOCK);
	}
	opt.every = opt.every < 0 ? 0 : Max(opt.every, MS);
}

/* Log where to find help.  Returns the exit code for wrong usage. */
int
usage_error(const char *subcommand)
{
	pg_log_error_hint("Try \"dlock %s--help\" for more information.",
					  subcommand);
	return strcmp(subcommand, "run ") == 0 ? EXIT_DLOCK : 1;
}

/*
 * Take the options of a subcommand or, if "name" is empty, of dlock itself.
 * Sets optind to the first operand.  Returns false if help is wanted.
 */
bool
take_options(const char *name, char letter, int argc, char **argv)
{
	struct option longs[lengthof(table) + 1] = {{NULL, 0, NULL, 0}};
	char		shorts[2 * lengthof(table) + 3];
	char	   *next = shorts;
	int			n = 0;
	int			c;

	/* if a command follows, the first operand ends the options */
	if (letter == 'm' || letter == 'r')
		*next++ = '+';
	*next++ = '?';
	for (size_t i = 0; i < lengthof(table); i++)
	{
		bool		has_value = table[i].kind != FLAG && table[i].kind != NO_TIME;

		if (table[i].of && !strchr(table[i].of, letter))
			continue;
		longs[n++] = (struct option) {
			table[i].name, has_value ? required_argument : no_argument, NULL, 256 + i
		};
		if (table[i].letter)
			*next++ = table[i].letter;
		if (table[i].letter && has_value)
			*next++ = ':';
	}
	*next = '\0';

	/* start over: another call took the options before the subcommand */
	optind = 0;
	while ((c = getopt_long(argc, argv, shorts, longs, NULL)) != -1)
	{
		int			i = c - 256;

		/* -?, or an unknown option */
		if (c == '?' && strcmp(argv[optind - 1], "-?") != 0)
			exit(usage_error(name));
		for (size_t j = 0; c < 256 && j < lengthof(table); j++)
		{
			if (table[j].letter == c && (!table[j].of || strchr(table[j].of, letter)))
				i = (int) j;
		}
		if (c == '?')
			wants_help = true;
		else
			take_option(i, optarg);
		if (wants_help)
			return false;
		if (wants_version)
		{
			printf("dlock %s\n", DLOCK_VERSION);
			exit(0);
		}
	}
	if (opt.quiet)
		pg_logging_set_level(PG_LOG_ERROR);
	if (letter == 'r')
		check_run_options();
	return true;
}

void
print_options(char letter)
{
	for (size_t i = 0; i < lengthof(table); i++)
	{
		if (!table[i].of || strchr(table[i].of, letter))
			printf("%s", table[i].help);
	}
}

/* Returns 1 if the output could not be written, otherwise "code". */
int
finish_output(int code)
{
	if (fflush(stdout) == 0 && !ferror(stdout))
		return code;
	pg_log_error("could not write to standard output: %m");
	return 1;
}

int64
clock_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_BOOTTIME, &ts);
	return ts.tv_sec * SEC + ts.tv_nsec / 1000;
}
