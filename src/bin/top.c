/*
 * top.c
 *		dlock top: the locks, again and again.
 */
#include "bin/bin.h"

#include <poll.h>
#include <unistd.h>

#include "getopt_long.h"
#include "bin/screen.h"

static const char footer[] =
"q quit  f filter  s seconds  space now; by w waiters, t time, n name";

static void
print_top_help(void)
{
	printf("dlock top shows holders, waiters and what keeps them waiting, live.\n\n"
		   "Usage:\n"
		   "  dlock top [OPTION]...\n"
		   "\nOptions:\n"
		   "      --filter=TEXT        only what has this text in name, role, owner or info\n"
		   "      --interval=TIME      from one look to the next (default: 2s)\n"
		   "      --once               print it once, then exit\n"
		   "  -?, --help               show this help, then exit\n");
	print_common_help();
	printf("\nKeys: %s.\n", footer);
}

/* Show what print_top() prints; what is wider or longer is cut off. */
static bool
show_page(Sorting sorting, const char *filter)
{
	char	   *page = NULL;
	size_t		length;
	FILE	   *out = open_memstream(&page, &length);
	bool		complete = print_top(out, sorting, filter);
	int			row = 0;

	fclose(out);
	if (complete)
	{
		screen_begin();
		for (char *line = strtok(page, "\n"); line; line = strtok(NULL, "\n"))
		{
			if (row < screen_rows() - 1)
				screen_line(row++, line);
			if (row == 1)
				row++;
		}
		screen_line(screen_rows() - 1, filter ?
					psprintf("[%s]  %s", filter, footer) : footer);
		screen_end();
	}
	free(page);
	return complete;
}

/* The connection may be lost, and come back; the screen waits for it. */
static void
look(Sorting sorting, const char *filter)
{
	ServerState state = SERVER_OPEN;

	if (server_connection() == NULL)
		state = server_open(5 * SEC);
	if (state != SERVER_OPEN || !show_page(sorting, filter))
	{
		server_close();
		screen_begin();
		screen_line(0, server_problem);
		screen_line(screen_rows() - 1, "q quit  space now");
		screen_end();
	}
}

static void
show_until_quit(int64 interval, const char *filter)
{
	Sorting		sorting = BY_WAITERS;
	bool		quit = false;
	char	   *answer;

	screen_open();
	while (!quit)
	{
		look(sorting, filter);
		switch (screen_key((int) (interval / MS)))
		{
			case 'q':
			case SCREEN_CLOSED:
				quit = true;
				break;
			case 'w':
				sorting = BY_WAITERS;
				break;
			case 't':
				sorting = BY_TIME;
				break;
			case 'n':
				sorting = BY_NAME;
				break;
			case 'f':
				answer = screen_ask("filter: ");
				filter = answer[0] ? answer : NULL;
				break;
			case 's':
				answer = screen_ask("seconds: ");
				if (atof(answer) > 0)
					interval = (int64) (Min(atof(answer), 86400) * SEC);
				break;
		}
	}
	screen_close();
}

int
main_top(int argc, char **argv)
{
	static const struct option own[] = {
		{"filter", required_argument, NULL, 'f'},
		{"interval", required_argument, NULL, 'i'},
		{"once", no_argument, NULL, 'o'},
		{NULL, 0, NULL, 0}
	};
	const struct option *options = with_common_options(own);
	const char *filter = NULL;
	int64		interval = 2 * SEC;
	bool		once = false;
	int			c;

	while ((c = getopt_long(argc, argv, "?" COMMON_SHORT, options, NULL)) != -1)
	{
		if (asks_for_help(c, argv))
		{
			print_top_help();
			return 0;
		}
		if (c == 'f')
			filter = optarg;
		else if (c == 'i')
			interval = Min(Max(time_option("--interval", optarg), 100 * MS), 86400 * SEC);
		else if (c == 'o')
			once = true;
		else if (!take_common_option(c))
			usage_error("top ");
	}
	if (optind < argc)
	{
		pg_log_error("too many command-line arguments (first is \"%s\")", argv[optind]);
		usage_error("top ");
	}
	server_open_or_exit();
	if (once || !isatty(STDOUT_FILENO))
	{
		if (print_top(stdout, BY_WAITERS, filter))
			return 0;
		pg_log_error("%s", server_problem);
		return 1;
	}
	show_until_quit(interval, filter);
	return 0;
}
