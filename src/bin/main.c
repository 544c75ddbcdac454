/*
 * main.c
 *		The command dlock: which subcommand is meant, and the options of all but
 *		dlock run.
 */
#include "bin/bin.h"

#include <fcntl.h>
#include <locale.h>
#include <unistd.h>

#include "getopt_long.h"

/* Options, by the letters that subcommands have in "takes" */
static const struct
{
	const char *name;
	int			argument;
	char		letter;
	const char *help;
}			options[] = {
	{"csv", no_argument, 'c', "      --csv                comma-separated values\n"},
	{"json", no_argument, 'j', "      --json               JSON\n"},
	{"filter", required_argument, 'F',
	"      --filter=TEXT        only what has this text in name, role, owner or info\n"},
	{"interval", required_argument, 'i',
	"      --interval=TIME      from one look to the next (default: 2s)\n"},
	{"once", no_argument, 'o', "      --once               print it once, then exit\n"},
	{"force", no_argument, 'f',
	"  -f, --force              also if it is another role's; for administrators\n"},
};

static const struct
{
	const char *name;
	const char *operands;
	int			least;
	int			most;
	const char *takes;
	int			(*run) (const char *name, int n, char **operands);
	const char *what;
}			subcommands[] = {
	{"top", "", 0, 0, "Fio", main_top, "holders, waiters and blockers, live"},
	{"ls", "[NAME]", 0, 1, "cj", main_list, "holders and waiters of all locks, or of one"},
	{"blockers", "", 0, 0, "cj", main_list, "who keeps others waiting"},
	{"stats", "", 0, 0, "cj", main_list, "what the locks of the database have seen"},
	{"watch", "NAME...", 1, INT_MAX, "j", main_watch, "a line for each change of holder"},
	{"release", "TICKET", 1, 1, "f", main_end, "end a ticket, held or waiting"},
	{"close", "LEASE", 1, 1, "f", main_end, "end a lease, with all its tickets"},
};

static void
print_subcommands(void)
{
	printf("dlock runs commands under the locks of a PostgreSQL server, and shows them.\n\n"
		   "Usage:\n"
		   "  dlock [CONNECTION OPTION]... SUBCOMMAND [OPTION]...\n"
		   "\nSubcommands:\n"
		   "  run NAME [--] COMMAND    run a command while holding a lock\n");
	for (size_t i = 0; i < lengthof(subcommands); i++)
		printf("  %-8s %-15s %s\n", subcommands[i].name, subcommands[i].operands,
			   subcommands[i].what);
	printf("\nOther options:\n"
		   "  -V, --version            output version information, then exit\n"
		   "  -?, --help               show this help, then exit\n"
		   "\n\"dlock SUBCOMMAND --help\" tells of its options.\n");
	print_common_help();
}

static void
print_subcommand_help(int s)
{
	printf("dlock %s: %s.\n\nUsage:\n  dlock %s [OPTION]...%s%s\n\nOptions:\n",
		   subcommands[s].name, subcommands[s].what, subcommands[s].name,
		   subcommands[s].most > 0 ? " " : "", subcommands[s].operands);
	for (size_t i = 0; i < lengthof(options); i++)
	{
		if (strchr(subcommands[s].takes, options[i].letter))
			printf("%s", options[i].help);
	}
	printf("  -?, --help               show this help, then exit\n");
	print_common_help();
	printf("\nThe exit code is 0, or 1 after an error.\n");
}

static void
take_option(char letter)
{
	if (letter == 'c' || letter == 'j')
		show.format = letter == 'c' ? AS_CSV : AS_JSON;
	else if (letter == 'F')
		show.filter = optarg;
	else if (letter == 'i')
		show.pause = Min(Max(time_option("--interval", optarg), 100 * MS), 86400 * SEC);
	else if (letter == 'o')
		show.once = true;
	else
		show.force = true;
}

static int
run_subcommand(int s, int argc, char **argv)
{
	struct option own[lengthof(options) + 1] = {{NULL, 0, NULL, 0}};
	const char *takes = subcommands[s].takes;
	const struct option *all;
	int			n = 0;
	int			c;

	for (size_t i = 0; i < lengthof(options); i++)
	{
		if (strchr(takes, options[i].letter))
			own[n++] = (struct option) {options[i].name, options[i].argument, NULL,
			options[i].letter};
	}
	all = with_common_options(own);
	while ((c = getopt_long(argc, argv, strchr(takes, 'f') ? "f?" COMMON_SHORT :
							"?" COMMON_SHORT, all, NULL)) != -1)
	{
		if (asks_for_help(c, argv))
		{
			print_subcommand_help(s);
			return 0;
		}
		if (strchr(takes, c))
			take_option(c);
		else if (!take_common_option(c))
			return usage_error(psprintf("%s ", argv[0]));
	}
	n = argc - optind;
	if (n < subcommands[s].least || n > subcommands[s].most)
	{
		pg_log_error(n < subcommands[s].least ? "too few arguments: %s" :
					 "too many arguments (the last one is \"%s\")",
					 n < subcommands[s].least ? subcommands[s].operands : argv[argc - 1]);
		return usage_error(psprintf("%s ", argv[0]));
	}
	server_open_or_exit();
	return finish_output(subcommands[s].run(argv[0], n, argv + optind));
}

/*
 * A connection must not get the number of a standard descriptor that the caller
 * has closed: what is printed would go there.
 */
static void
occupy_standard_descriptors(void)
{
	int			fd;

	while ((fd = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0 && fd <= STDERR_FILENO)
		continue;
	close(fd);
}

/* 1 if what was printed is not all written; else the code */
int
finish_output(int code)
{
	if (fflush(stdout) == 0 && !ferror(stdout))
		return code;
	pg_log_error("could not write to standard output: %m");
	return 1;
}

int
main(int argc, char **argv)
{
	static const struct option version[] = {
		{"version", no_argument, NULL, 'V'},
		{NULL, 0, NULL, 0}
	};
	const struct option *all = with_common_options(version);
	int			c;

	occupy_standard_descriptors();
	pg_logging_init(argv[0]);
	(void) setlocale(LC_CTYPE, "");
	while ((c = getopt_long(argc, argv, "+V?" COMMON_SHORT, all, NULL)) != -1)
	{
		if (c == 'V')
		{
			printf("dlock %s\n", DLOCK_VERSION);
			return 0;
		}
		if (asks_for_help(c, argv))
		{
			print_subcommands();
			return 0;
		}
		if (!take_common_option(c))
			return usage_error("");
	}
	argc -= optind;
	argv += optind;
	/* begin anew, with the subcommand's options */
	optind = 0;
	if (argc > 0 && strcmp(argv[0], "run") == 0)
		return main_run(argc, argv);
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
