/*
 * bin.h
 *		The command "dlock": what its files share.
 *
 * The command is a client.  It uses no other directory of src, and learns of
 * the server only by SQL.  All times are microseconds of CLOCK_BOOTTIME, which
 * runs while the machine sleeps.
 */
#ifndef DLOCK_BIN_H
#define DLOCK_BIN_H

#include "postgres_fe.h"

#include <limits.h>

#include "common/logging.h"
#include "libpq-fe.h"

#define MS	INT64CONST(1000)
#define SEC	INT64CONST(1000000)
#define FOREVER	PG_INT64_MAX

/* Exit codes of dlock itself; dlock run also has those of its command */
#define EXIT_LOST		124
#define EXIT_DLOCK		125
#define EXIT_NOT_RUN	126
#define EXIT_NOT_FOUND	127

/* The options of all subcommands */
typedef struct Options
{
	/* connection, and messages */
	const char *host;
	const char *port;
	const char *user;
	const char *dbname;
	bool		ask_password;
	bool		quiet;
	bool		verbose;

	/* of dlock run */
	const char *name;
	char	  **command;
	int64		ttl;
	int64		wait;			/* FOREVER: as long as it takes */
	int64		grace;
	int64		at_least;
	int64		every;			/* 0: once */
	int64		patience;
	bool		session;
	bool		shared;
	const char *slots;			/* NULL if not given, like the next three */
	const char *permits;
	const char *owner;
	const char *info;
	int			busy_code;

	/* of the other subcommands */
	bool		csv;
	bool		json;
	const char *filter;
	int64		pause;
	bool		once;
	bool		force;
} Options;

extern Options opt;

/* options.c */
extern bool take_options(const char *name, char letter, int argc, char **argv);
extern void print_options(char letter);
extern int	usage_error(const char *subcommand);
extern int	finish_output(int code);
extern int64 clock_now(void);

/* server.c */
typedef enum ServerState
{
	SERVER_OPEN,
	SERVER_AWAY,				/* asking again can help */
	SERVER_REFUSES				/* asking again cannot help */
} ServerState;

extern bool (*server_await) (int fd, short events, int64 until);
extern char server_problem[1024];
extern char server_sqlstate[6];
extern ServerState server_state;	/* after the latest request */
extern bool server_init(void);
extern ServerState server_open(int64 time);
extern void server_close(void);
extern void server_lose(void);
extern PGconn *server_connection(void);
extern PGresult *server_query(int64 until, const char *sql, int n,
							  const char *const *values);
extern void server_open_or_exit(void);
extern PGresult *server_query_or_exit(const char *sql, int n,
									  const char *const *values);

/* command.c */
extern void command_note_signals(void);
extern bool command_prepare(pid_t front, pid_t front_group, int tty,
							bool takes_tty);
extern pid_t command_start(char **argv);
extern bool command_has_time(void);
extern bool command_runs(void);
extern void command_renew(int64 term_at, int64 kill_at, int64 die_at);
extern void command_kill(void);
extern bool command_is_lost(void);
extern void command_pass_on(int signo);
extern int64 command_next_step(void);
extern int	command_stopped_by(void);
extern void command_look(void);
extern int	command_exec_error(void);
extern int	command_exit_code(void);
extern bool signal_tree(int signo, pid_t except);
extern const sigset_t *command_waiting_mask(void);

/* front.c and run.c: the front and the keeper of dlock run */
typedef struct ControlMessage
{
	char		what;			/* 's': signal, 'g': group, 'z': stopped */
	int			number;
} ControlMessage;

extern int	keep_lock(int control, pid_t front);

/* list.c */
extern bool print_top(FILE *out, const char *order);

/* subcommands */
extern int	main_run(const char *name, int n, char **operands);
extern int	main_list(const char *name, int n, char **operands);
extern int	main_top(const char *name, int n, char **operands);
extern int	main_watch(const char *name, int n, char **operands);
extern int	main_end(const char *name, int n, char **operands);

#endif							/* DLOCK_BIN_H */
