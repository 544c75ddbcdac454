/*
 * run_options.c
 *		dlock run: its options and their help.
 */
#include "bin/bin.h"

#include "fe_utils/option_utils.h"
#include "getopt_long.h"

enum
{
	OPT_TTL = 256, OPT_SESSION, OPT_SLOTS, OPT_PERMITS, OPT_INFO, OPT_OWNER,
	OPT_GRACE, OPT_AT_LEAST, OPT_EVERY, OPT_PATIENCE
};

static const struct option run_only[] = {
	{"nonblock", no_argument, NULL, 'n'},
	{"wait", required_argument, NULL, 'w'},
	{"shared", no_argument, NULL, 's'},
	{"conflict-exit-code", required_argument, NULL, 'E'},
	{"ttl", required_argument, NULL, OPT_TTL},
	{"session", no_argument, NULL, OPT_SESSION},
	{"slots", required_argument, NULL, OPT_SLOTS},
	{"permits", required_argument, NULL, OPT_PERMITS},
	{"info", required_argument, NULL, OPT_INFO},
	{"owner", required_argument, NULL, OPT_OWNER},
	{"grace", required_argument, NULL, OPT_GRACE},
	{"at-least", required_argument, NULL, OPT_AT_LEAST},
	{"every", required_argument, NULL, OPT_EVERY},
	{"patience", required_argument, NULL, OPT_PATIENCE},
	{NULL, 0, NULL, 0}
};

static void
print_run_help(void)
{
	printf("dlock run waits for a lock, runs a command while it holds the lock, and\n"
		   "releases it.\n\n"
		   "Usage:\n"
		   "  dlock run [OPTION]... NAME [--] COMMAND [ARGUMENT]...\n"
		   "\nExamples:\n"
		   "  dlock run -d shop report -- ./report           one at a time\n"
		   "  dlock run -d shop -n nightly ./nightly         not if another one runs\n"
		   "  dlock run -d shop -n --at-least 1h nightly ./nightly\n"
		   "                              from cron on many machines: one an hour runs\n"
		   "\nWaiting:\n"
		   "  -n, --nonblock           do not wait if the lock is busy\n"
		   "  -w, --wait=TIME          wait for at most this long\n"
		   "  -E, --conflict-exit-code=N\n"
		   "                           exit code if the lock was busy (default: 1)\n"
		   "      --patience=TIME      look for a server for this long, before the\n"
		   "                           command runs (default: 30s)\n"
		   "\nThe lock:\n"
		   "  -s, --shared             share it with others that say so\n"
		   "      --slots=N            let N run at the same time\n"
		   "      --permits=N          take N of the slots (default: 1)\n"
		   "      --ttl=TIME           a lease of this length, which is renewed while the\n"
		   "                           command runs (default: 30s)\n"
		   "      --session            no lease: the lock ends with the connection\n"
		   "      --at-least=TIME      keep the lock for this long, even if the command\n"
		   "                           ends earlier\n"
		   "      --owner=TEXT         take over a lease of this owner, if there is one\n"
		   "      --info=TEXT          what others see of this holder (default: command,\n"
		   "                           host and process)\n"
		   "\nThe command:\n"
		   "      --every=TIME         run it again and again, this long from start to\n"
		   "                           start, as long as the lock is held\n"
		   "      --grace=TIME         time from SIGTERM to SIGKILL if the lock is about\n"
		   "                           to be lost (default: 5s, or a quarter of the ttl)\n"
		   "\nOther options:\n"
		   "  -q, --quiet              no warnings\n"
		   "  -v, --verbose            tell when the lock is got, or busy\n"
		   "  -?, --help               show this help, then exit\n");
	print_common_help();
	printf("\nTimes are numbers with a unit, as in 500ms, 30s, 5min, 2h; a bare number is\n"
		   "seconds.  The command finds DLOCK_NAME, DLOCK_FENCE, a number that is greater\n"
		   "for each later holder, and DLOCK_LEASE in its environment.\n"
		   "\nExit codes: the command's (128 + N if signal N ended it); 1 if the lock was\n"
		   "busy; 124 if the lock was lost, and the command killed; 125 if dlock failed;\n"
		   "126 if the command could not be run; 127 if it was not found.\n");
}

static bool
take_run_option(RunOptions *o, int c)
{
	switch (c)
	{
		case 'n':
			o->wait = 0;
			return true;
		case 'w':
			o->wait = time_option("--wait", optarg);
			return true;
		case 's':
			o->shared = true;
			return true;
		case 'E':
			if (!option_parse_int(optarg, "--conflict-exit-code", 0, 255, &o->busy_code))
				exit(EXIT_DLOCK);
			return true;
		case OPT_TTL:
			o->ttl = time_option("--ttl", optarg);
			return true;
		case OPT_SESSION:
			o->session = true;
			return true;
		case OPT_SLOTS:
			o->slots = count_option("--slots", optarg);
			return true;
		case OPT_PERMITS:
			o->permits = count_option("--permits", optarg);
			return true;
		case OPT_INFO:
			o->info = optarg;
			return true;
		case OPT_OWNER:
			o->owner = optarg;
			return true;
		case OPT_GRACE:
			o->grace = time_option("--grace", optarg);
			return true;
		case OPT_AT_LEAST:
			o->at_least = time_option("--at-least", optarg);
			return true;
		case OPT_EVERY:
			o->every = Max(time_option("--every", optarg), MS);
			return true;
		case OPT_PATIENCE:
			o->patience = time_option("--patience", optarg);
			return true;
	}
	return false;
}

/* What does not go together; and defaults that depend on others */
static void
check_run_options(RunOptions *o)
{
	if (o->session && (o->ttl >= 0 || o->at_least > 0 || o->owner))
	{
		pg_log_error("option --session cannot be used with --ttl, --at-least or --owner");
		exit(usage_error("run "));
	}
	if (o->ttl < 0)
		o->ttl = 30 * SEC;
	if (o->ttl < 100 * MS)
	{
		pg_log_error("--ttl must be at least 100ms");
		exit(usage_error("run "));
	}
	if (o->grace < 0)
		o->grace = Min(5 * SEC, o->ttl / 4);
	if (!o->session && o->grace > o->ttl / 4 * 3)
	{
		pg_log_error("--grace leaves no time to renew the lease within --ttl");
		pg_log_error_hint("Choose a --ttl of at least twice the --grace.");
		exit(EXIT_DLOCK);
	}
}

int
main_run(int argc, char **argv)
{
	RunOptions	o = {.ttl = -1, .wait = FOREVER, .grace = -1, .busy_code = 1};
	const struct option *options = with_common_options(run_only);
	int			c;

	o.patience = 30 * SEC;
	while ((c = getopt_long(argc, argv, "+nw:sE:?" COMMON_SHORT, options, NULL)) != -1)
	{
		if (asks_for_help(c, argv))
		{
			print_run_help();
			return 0;
		}
		if (!take_run_option(&o, c) && !take_common_option(c))
			return usage_error("run ");
	}
	if (optind < argc)
		o.name = argv[optind++];
	if (optind < argc && strcmp(argv[optind], "--") == 0)
		optind++;
	if (o.name == NULL || optind >= argc)
	{
		pg_log_error(o.name ? "no command specified" : "no lock name specified");
		return usage_error("run ");
	}
	o.command = argv + optind;
	check_run_options(&o);
	return server_init() ? run_in_front(&o) : EXIT_DLOCK;
}
