/*
 * screen.c
 *		A screen of lines, and its keys, if ncurses was there at build time.
 *		Otherwise lines are printed over those before, and there are no keys.
 *
 * PostgreSQL's headers are not included, as they and ncurses' define the same
 * names.
 */
#include <string.h>

#include "bin/screen.h"

static char answer[256];

#ifdef DLOCK_NCURSES

#include <ncurses.h>

void
screen_open(void)
{
	initscr();
	cbreak();
	noecho();
	curs_set(0);
}

void
screen_close(void)
{
	endwin();
}

int
screen_rows(void)
{
	return LINES;
}

void
screen_begin(void)
{
	erase();
}

void
screen_line(int row, const char *text)
{
	mvaddnstr(row, 0, text, COLS);
}

void
screen_end(void)
{
	refresh();
}

int
screen_key(int milliseconds)
{
	int			key;

	timeout(milliseconds);
	key = getch();
	return key == 3 || key == 4 ? SCREEN_CLOSED : key == ERR ? -1 : key;
}

char *
screen_ask(const char *question)
{
	move(LINES - 1, 0);
	clrtoeol();
	addstr(question);
	timeout(-1);
	echo();
	if (getnstr(answer, sizeof(answer) - 1) == ERR)
		answer[0] = '\0';
	noecho();
	return answer;
}

#else

#include <stdio.h>
#include <unistd.h>

void
screen_open(void)
{
}

void
screen_close(void)
{
}

int
screen_rows(void)
{
	return 1000;
}

void
screen_begin(void)
{
	printf("\033[H\033[J");
}

void
screen_line(int row, const char *text)
{
	if (row < screen_rows() - 1)
		printf("\033[%d;1H%s", row + 1, text);
}

void
screen_end(void)
{
	printf("\n");
	fflush(stdout);
}

int
screen_key(int milliseconds)
{
	usleep(milliseconds * 1000);
	return -1;
}

char *
screen_ask(const char *question)
{
	return answer;
}

#endif
