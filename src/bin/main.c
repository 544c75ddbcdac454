/*
 * main.c
 *		The command dlock: choosing the subcommand, and its help.
 */
#include "bin/bin.h"

#include <fcntl.h>
#include <locale.h>
#include <unistd.h>

#include "getopt_long.h"

/* The letter selects the options of a subcommand. */
static const struct
{
	const char *name;
	char		letter;
	const char *operands;
	int			least;
	int			most;
	int			(*run) (const char *name, int n, char **operands);
	const char *what;
}			subcommands[] = {
	{"run", 'r', "NAME [--] COMMAND", 2, INT_MAX, main_run, "run a command while holding a lock"},
	{"top", 't', "", 0, 0, main_top, "holders, waiters and blockers, live"},
	{"ls", 'l', "[NAME]", 0, 1, main_list, "holders and waiters of all locks, or of one"},
	{"blockers", 'l', "", 0, 0, main_list, "sessions and leases that keep others waiting"},
	{"stats", 'l', "", 0, 0, main_list, "statistics of the locks of the database"},
	{"watch", 'w', "NAME...", 1, INT_MAX, main_watch, "a line for each change of holder"},
	{"release", 'e', "TICKET", 1, 1, main_end, "end a ticket, held or waiting"},
	{"close", 'e', "LEASE", 1, 1, main_end, "end a lease, with all its tickets"},
};

static void
print_subcommands(void)
{
	printf("dlock runs commands under the locks of a PostgreSQL server, and shows them.\n\n"
		   "Usage:\n"
		   "  dlock [CONNECTION OPTION]... SUBCOMMAND [OPTION]...\n"
		   "\nSubcommands:\n");
	for (size_t i = 0; i < lengthof(subcommands); i++)
		printf("  %-8s %-17s  %s\n", subcommands[i].name, subcommands[i].operands,
			   subcommands[i].what);
	printf("\n\"dlock SUBCOMMAND --help\" shows its options.\n");
	print_options('m');
}

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
		   "  dlock run -d shop -w 1h --at-least 2h nightly ./nightly\n"
		   "                from cron on many machines: one runs, and if it dies, the next\n");
	print_options('r');
	printf("\nTimes are numbers with a unit, as in 500ms, 30s, 5min, 2h; a bare number is\n"
		   "seconds.  The command finds DLOCK_NAME, DLOCK_FENCE, a number that is greater\n"
		   "for each later holder, and DLOCK_LEASE in its environment.\n"
		   "\nExit codes: the command's (128 + N if signal N ended it); 1 if the lock was\n"
		   "busy, without a message; 124 if the lock was lost, and the command killed; 125\n"
		   "if dlock failed; 126 if the command could not be run; 127 if it was not found.\n");
}

static void
print_help(int s)
{
	if (subcommands[s].letter == 'r')
	{
		print_run_help();
		return;
	}
	printf("dlock %s: %s.\n\nUsage:\n  dlock %s [OPTION]...%s%s\n\nOptions:\n",
		   subcommands[s].name, subcommands[s].what, subcommands[s].name,
		   subcommands[s].most > 0 ? " " : "", subcommands[s].operands);
	print_options(subcommands[s].letter);
	printf("\nThe exit code is 0, or 1 after an error.\n");
}

static int
run_subcommand(int s, int argc, char **argv)
{
	const char *name = psprintf("%s ", subcommands[s].name);
	int			n;

	if (!take_options(name, subcommands[s].letter, argc, argv))
	{
		print_help(s);
		return 0;
	}
	/* put the name of the lock in the place of the -- */
	if (subcommands[s].letter == 'r' && argc > optind + 1 &&
		strcmp(argv[optind + 1], "--") == 0)
	{
		argv[optind + 1] = argv[optind];
		optind++;
	}
	n = argc - optind;
	if (n < subcommands[s].least || n > subcommands[s].most)
	{
		if (subcommands[s].letter == 'r')
			pg_log_error(n > 0 ? "no command specified" : "no lock name specified");
		else
			pg_log_error(n < subcommands[s].least ? "too few arguments: %s" :
						 "too many arguments (the last one is \"%s\")",
						 n < subcommands[s].least ? subcommands[s].operands : argv[argc - 1]);
		return usage_error(name);
	}
	if (subcommands[s].letter != 'r')
		server_open_or_exit();
	return finish_output(subcommands[s].run(argv[0], n, argv + optind));
}

/*
 * If dlock is started with a standard descriptor closed, no connection may get
 * that descriptor's number, because output would go to the connection.
 */
static void
occupy_standard_descriptors(void)
{
	int			fd;

	do
		fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	while (fd >= 0 && fd <= STDERR_FILENO);
	close(fd);
}

int
main(int argc, char **argv)
{
	occupy_standard_descriptors();
	pg_logging_init(argv[0]);
	(void) setlocale(LC_CTYPE, "");
	if (!take_options("", 'm', argc, argv))
	{
		print_subcommands();
		return 0;
	}
	argc -= optind;
	argv += optind;
	for (size_t s = 0; argc > 0 && s < lengthof(subcommands); s++)
	{
		if (strcmp(argv[0], subcommands[s].name) == 0)
			return run_subcommand(s, argc, argv);
	}
	if (argc > 0)
		pg_log_error("unknown subcommand \"%s\"", argv[0]);
	else
		pg_log_error("no subcommand specified");
	return usage_error("");
}
