/*
 * main.c
 *		The command dlock: which subcommand is meant.
 */
#include "bin/bin.h"

#include <locale.h>

#include "getopt_long.h"

static const struct
{
	const char *name;
	int			(*run) (int argc, char **argv);
}			subcommands[] = {
	{"run", main_run},
	{"top", main_top},
	{"ls", main_list},
	{"blockers", main_list},
	{"stats", main_list},
	{"watch", main_watch},
	{"release", main_end},
	{"close", main_end},
};

static void
print_subcommands(void)
{
	printf("dlock runs commands under the locks of a PostgreSQL server, and shows them.\n\n"
		   "Usage:\n"
		   "  dlock [CONNECTION OPTION]... SUBCOMMAND [OPTION]...\n"
		   "\nSubcommands:\n"
		   "  run NAME [--] COMMAND    run a command while holding a lock\n"
		   "  top                      holders, waiters and blockers, live\n"
		   "  ls [NAME]                holders and waiters\n"
		   "  blockers                 who keeps others waiting\n"
		   "  stats                    what the locks of the database have seen\n"
		   "  watch NAME...            a line for each change of holder\n"
		   "  release TICKET           end a ticket, held or waiting\n"
		   "  close LEASE              end a lease, with all its tickets\n"
		   "\nOther options:\n"
		   "  -V, --version            output version information, then exit\n"
		   "  -?, --help               show this help, then exit\n"
		   "\n\"dlock SUBCOMMAND --help\" tells of its options.\n");
	print_common_help();
}

int
main(int argc, char **argv)
{
	static const struct option version[] = {
		{"version", no_argument, NULL, 'V'},
		{NULL, 0, NULL, 0}
	};
	const struct option *options = with_common_options(version);
	int			c;

	pg_logging_init(argv[0]);
	setlocale(LC_CTYPE, "");
	while ((c = getopt_long(argc, argv, "+V?" COMMON_SHORT, options, NULL)) != -1)
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
			usage_error("");
	}
	for (size_t i = 0; optind < argc && i < lengthof(subcommands); i++)
	{
		if (strcmp(argv[optind], subcommands[i].name) == 0)
		{
			argc -= optind;
			argv += optind;
			/* begin anew, with the subcommand's options */
			optind = 0;
			return subcommands[i].run(argc, argv);
		}
	}
	if (optind < argc)
		pg_log_error("unknown subcommand \"%s\"", argv[optind]);
	else
		pg_log_error("no subcommand specified");
	usage_error("");
}
