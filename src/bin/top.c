/*
 * top.c
 *		dlock top: the locks, refreshed.  It has keys if it was built with
 *		ncurses.
 */
#include "bin/bin.h"

#include <unistd.h>

#ifdef DLOCK_NCURSES
#include <ncurses.h>
#define KEYS "q quit  f filter  s seconds  space now; by w waiters, t time, n name"
#else
#define KEYS "Ctrl-C quits"
#endif

/* The sort orders that the keys w, t and n select */
#define BY_WAITERS \
	"pg_catalog.count(*) FILTER (WHERE NOT granted) OVER (PARTITION BY name) DESC, "
#define BY_TIME "coalesce(granted_at, enqueued_at), "
#define BY_NAME ""

static const char *order = BY_WAITERS;

/* Returns the output of print_top() or, if that fails, the error. */
static char *
make_page(void)
{
	char	   *page = NULL;
	size_t		length;
	FILE	   *out = open_memstream(&page, &length);

	if ((server_connection() == NULL && server_open(5 * SEC) != SERVER_OPEN) ||
		!print_top(out, order))
	{
		fprintf(out, "%s\n", server_problem);
		server_close();
	}
	(void) fclose(out);
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

/* Show a page.  Whatever does not fit on the screen is cut off. */
static void
show_page(void)
{
	char	   *page = make_page();
	char	   *next = page;
	char	   *line;
	int			row;

	/* clrtobot() also clears the rest of a line that has wrapped */
	for (row = 0; row < LINES - 1 && (line = strsep(&next, "\n")); row++)
	{
		(void) move(row, 0);
		(void) clrtobot();
		(void) addstr(line);
	}
	(void) move(row, 0);
	(void) clrtobot();
	if (opt.filter)
		mvprintw(LINES - 1, 0, "[%s]  ", opt.filter);
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
	int64		next;

	initscr();
	cbreak();
	noecho();
	curs_set(0);
	while (key != 'q')
	{
		show_page();
		timeout((int) (opt.pause / MS));
		next = clock_now() + opt.pause;
		key = getch();
		/* at the end of input, getch() returns at once */
		if (key == ERR && clock_now() < next)
			pg_usleep(next - clock_now());
		if (key == 'w')
			order = BY_WAITERS;
		else if (key == 't')
			order = BY_TIME;
		else if (key == 'n')
			order = BY_NAME;
		else if (key == 'f')
		{
			const char *answer = ask_for("filter: ");

			opt.filter = answer[0] ? pg_strdup(answer) : NULL;
		}
		else if (key == 's')
		{
			double		seconds = strtod(ask_for("seconds: "), NULL);

			if (seconds >= 0.1)
				opt.pause = (int64) (Min(seconds, 86400) * SEC);
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
		(void) fflush(stdout);
		pg_usleep(opt.pause);
	}
}
#endif

int
main_top(const char *name, int n, char **operands)
{
	opt.pause = Min(Max(opt.pause, 100 * MS), 86400 * SEC);
	if (!opt.once && isatty(STDOUT_FILENO))
		show_until_quit();
	else if (!print_top(stdout, order))
	{
		pg_log_error("%s", server_problem);
		return 1;
	}
	return 0;
}
