/*
 * screen.h
 *		A screen of lines, and its keys.
 */
#ifndef DLOCK_SCREEN_H
#define DLOCK_SCREEN_H

#define SCREEN_CLOSED (-2)

extern void screen_open(void);
extern void screen_close(void);
extern int	screen_rows(void);
extern void screen_begin(void);
extern void screen_line(int row, const char *text);
extern void screen_end(void);

/* A key, -1 if there was none within this time, or SCREEN_CLOSED */
extern int	screen_key(int milliseconds);

/* What is typed, up to its end of line */
extern char *screen_ask(const char *question);

#endif							/* DLOCK_SCREEN_H */
