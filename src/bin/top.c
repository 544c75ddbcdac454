/*
 * top.c
 *		dlock top: the locks, again and again; with keys, if ncurses was there
 *		when this was built.
 */
#include "bin/bin.h"

#include <unistd.h>

#include "getopt_long.h"

#ifdef DLOCK_NCURSES
#include <ncurses.h>
#define KEYS "q quit  f filter  s seconds  space now; by w waiters, t time, n name"
#else
#define KEYS "Ctrl-C quits"
#endif

static Sorting sorting = BY_WAITERS;
static const char *shown_only;
static int64 pause_time = 2 * SEC;

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
	printf("\nKeys: %s.\n", KEYS);
}

/* What print_top() prints, or why it cannot: the connection may come back. */
static char *
make_page(void)
{
	char	   *page = NULL;
	size_t		length;
	FILE	   *out = open_memstream(&page, &length);

	if ((server_connection() == NULL && server_open(5 * SEC) != SERVER_OPEN) ||
		!print_top(out, sorting, shown_only))
	{
		fprintf(out, "%s\n", server_problem);
		server_close();
	}
	fclose(out);
	return page;
}

#ifdef DLOCK_NCURSES
static const char *
ask_for(const char *what)
{
	static char answer[256];

	move(LINES - 1, 0);
	clrtoeol();
	addstr(what);
	timeout(-1);
	echo();
	if (getnstr(answer, sizeof(answer) - 1) == ERR)
		answer[0] = '\0';
	noecho();
	return answer;
}

/* What is wider or longer than the screen is cut off. */
static void
show_page(void)
{
	char	   *page = make_page();
	char	   *next = page;
	char	   *line;

	erase();
	for (int row = 0; row < LINES - 1 && (line = strsep(&next, "\n")); row++)
		mvaddnstr(row, 0, line, COLS);
	if (shown_only)
		mvprintw(LINES - 1, 0, "[%s]  ", shown_only);
	else
		move(LINES - 1, 0);
	addnstr(KEYS, COLS - getcurx(stdscr));
	refresh();
	free(page);
}

static void
show_until_quit(void)
{
	int			key = 0;

	initscr();
	cbreak();
	noecho();
	curs_set(0);
	while (key != 'q')
	{
		show_page();
		timeout((int) (pause_time / MS));
		key = getch();
		if (key == 'w')
			sorting = BY_WAITERS;
		else if (key == 't')
			sorting = BY_TIME;
		else if (key == 'n')
			sorting = BY_NAME;
		else if (key == 'f')
		{
			const char *answer = ask_for("filter: ");

			shown_only = answer[0] ? pg_strdup(answer) : NULL;
		}
		else if (key == 's')
		{
			double		seconds = atof(ask_for("seconds: "));

			if (seconds >= 0.1)
				pause_time = (int64) (Min(seconds, 86400) * SEC);
		}
	}
	endwin();
}
#else
static void
show_until_quit(void)
{
	for (;;)
	{
		/* home, and clear */
		printf("\033[H\033[J%s%s\n", make_page(), KEYS);
		fflush(stdout);
		pg_usleep(pause_time);
	}
}
#endif

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
			shown_only = optarg;
		else if (c == 'i')
			pause_time = Min(Max(time_option("--interval", optarg), 100 * MS), 86400 * SEC);
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
		if (print_top(stdout, BY_WAITERS, shown_only))
			return 0;
		pg_log_error("%s", server_problem);
		return 1;
	}
	show_until_quit();
	return 0;
}
