/*
 * run.c
 *		dlock run: the process that keeps the lock.
 *
 * Three processes run: the front (front.c), which the caller sees; the keeper,
 * its child; and the command, the keeper's child.  The keeper talks to the
 * server, and starts and ends the command (command.c).  The following holds,
 * whatever the network, the server, a debugger or an administrator does:
 *
 * 1. The command is dead before its lock can be granted to another client.
 *	  The deadline is one ttl, less a margin, after the keeper began to send
 *	  the last request that got or renewed the lease.  The command gets SIGKILL
 *	  at the deadline, and SIGTERM earlier by --grace.  A timer in the keeper
 *	  sends both, and no other work delays the timer.  Half a margin after the
 *	  deadline, the kernel kills the keeper.
 * 2. The command dies if the keeper does: the kernel sends SIGKILL.  The rest
 *	  of the command's process group, and its other descendants, become
 *	  children of the front, which kills them.
 * 3. The command dies if the front does: the keeper gets a signal, kills the
 *	  command and its descendants, and releases the lock.
 * 4. The keeper is in a process group of its own, so that it continues while
 *	  the job is stopped.  So a stopped job keeps its lock.  If SIGSTOP stops
 *	  the keeper, 1 still holds, because the kernel's timer kills the keeper.
 * 5. The lock is released only after the command has ended.
 *
 * Not covered: a command that dlock cannot signal (sudo), or that hangs in
 * the kernel; a daemon that is not the command's descendant any more; and
 * SIGSTOP or SIGKILL for keeper and front at once, after which the command's
 * own process dies, but its descendants may live.
 *
 * With --session there is no deadline.  When the server notices that the
 * connection is lost, it grants the lock to the next waiter.  When the keeper
 * notices, it kills the command.
 *
 * A waiter queues with a lease and an owner.  So if the connection was lost, a
 * repeated request finds the waiter's place again.
 */
#include "bin/bin.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/string.h"

/* The result of an attempt to get the lock */
typedef enum Outcome
{
	GOT_LOCK,
	GOT_NONE_YET,				/* server_state tells why */
	GOT_BUSY,
	GOT_STOPPED,				/* by a signal, or the front is gone */
	GOT_ERROR
} Outcome;

static int	control;
static pid_t front;

/* the deadline is a ttl, less the margin, after a request was sent */
static int64 margin;
static int64 renew_interval;
static int64 renew_at;

/* "ticket" is 0 if there is none */
static int64 ticket;
static const char *owner;
static const char *info;
static bool is_asking;			/* a request for a ticket has no answer yet */
static bool adopts;				/* the ticket may be of an earlier run */
static int64 granted_at;
static int	not_run;			/* exit code if the command could not be run */

/* when the server stopped answering; FOREVER if it answers */
static int64 silent_since = FOREVER;
static int64 backoff;

/* set by messages of the front */
static int	stop_signal;		/* 0: go on */
static bool suspended;			/* Ctrl-Z while no command ran */
static bool front_gone;

/* Must dlock end as soon as no command runs? */
static bool
is_stopped(void)
{
	return stop_signal != 0 || front_gone;
}

/*
 * Log as pg_log_warning() does.  If writing to stderr would block, drop the
 * message, because renewing the lease is more important.
 */
#define say(level, ...) \
	do { \
		if (stderr_is_ready()) \
			pg_log_generic(level, PG_LOG_PRIMARY, __VA_ARGS__); \
	} while (0)

static bool
stderr_is_ready(void)
{
	struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};

	return poll(&out, 1, 0) > 0;
}

static void
tell_front(char what, int number)
{
	ControlMessage message = {what, number};

	send(control, &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT);
}

/*
 * Pass a signal on to the command.  If no command runs, SIGTSTP and SIGCONT
 * suspend and continue dlock, and other signals end it.
 */
static void
obey_signal(int signo)
{
	if (signo == SIGTSTP && !command_runs())
	{
		suspended = true;
		tell_front('z', signo);
	}
	else if (signo == SIGCONT)
		suspended = false;
	else if (!command_runs())
		stop_signal = signo;
	/* with --every, do not repeat the command */
	if (opt.every > 0 && (signo == SIGINT || signo == SIGTERM ||
						   signo == SIGHUP || signo == SIGQUIT))
		stop_signal = signo;
	command_pass_on(signo);
}

static void
read_control(void)
{
	ControlMessage message;
	ssize_t		got = recv(control, &message, sizeof(message), MSG_DONTWAIT);

	if (got == sizeof(message))
		obey_signal(message.number);
	else if (got == 0)
	{
		front_gone = true;
		command_kill();
	}
}

/* Check the command.  If it stopped or continued, let the front do so, too. */
static void
look_around(void)
{
	int			signo;

	command_look();
	if ((signo = command_stopped_by()) == SIGCONT)
		kill(front, SIGCONT);
	else if (signo != 0)
		tell_front('z', signo);
}

/*
 * Wait until the descriptor, if any, is ready.  Returns false if "until"
 * passes, if dlock must stop while no command runs, or if the command has
 * ended and "heed_end" is set.
 */
static bool
await_event(int fd, short events, int64 until, bool heed_end)
{
	bool		ran = command_runs();
	bool		stopped = is_stopped();

	for (;;)
	{
		struct pollfd fds[2] = {{.fd = front_gone ? -1 : control,.events = POLLIN},
		{.fd = fd,.events = events}};
		int64		next = Min(until, command_next_step());
		int64		left = Max(next - clock_now(), 0);
		struct timespec timeout = {Min(left / SEC, 86400), left % SEC * 1000};
		int			ready;

		ready = ppoll(fds, 2, &timeout, command_waiting_mask());
		if (ready > 0 && fds[0].revents)
			read_control();
		look_around();
		if (ready > 0 && fds[1].revents)
			return true;
		if (clock_now() >= until || (!ran && !stopped && is_stopped()) ||
			(ran && heed_end && !command_runs()))
			return false;
	}
}

/*
 * Wait for an answer of the server.  If the command ends, give up the answer
 * and the connection.  With --session or --every, continue to wait, or else a
 * session would lose the lock, and short commands could prevent all renewals.
 */
static bool
await_answer(int fd, short events, int64 until)
{
	return await_event(fd, events, until, !opt.session && opt.every == 0);
}

/* Warn once that no server answers.  Pause, or return false past "until". */
static bool
be_patient(int64 until)
{
	int64		now = clock_now();

	if (silent_since == FOREVER)
	{
		silent_since = now;
		backoff = 100 * MS;
		say(PG_LOG_WARNING, "%.*s", (int) strcspn(server_problem, "\n"), server_problem);
	}
	if (now >= until)
		return false;
	await_event(-1, 0, Min(until, now + backoff), true);
	backoff = Min(2 * backoff, SEC);
	return true;
}

/* Returns the longest time to connect, or to wait for an ordinary answer. */
static int64
patience_for_answer(void)
{
	return opt.session ? 10 * SEC : Min(renew_interval, 10 * SEC);
}

/* Set the deadlines.  The ttl counts from "sent", the time of the request. */
static void
set_deadline(int64 sent)
{
	int64		deadline = sent + opt.ttl - margin;

	renew_at = clock_now() + renew_interval;
	if (opt.session)
		command_renew(FOREVER, FOREVER, FOREVER);
	else
		command_renew(deadline - opt.grace, deadline, deadline + margin / 2);
}

/* Returns a text in static memory, which the next call overwrites. */
static const char *
interval(int64 us)
{
	static char text[48];

	snprintf(text, sizeof(text), INT64_FORMAT " microseconds", us);
	return text;
}

/*
 * Returns the first value of the server's answer, or "" if the value is null,
 * in static memory.  After an error or without an answer, returns NULL.
 */
static const char *
ask(int64 until, const char *sql, int n, const char *const *values)
{
	PGresult   *result = server_query(until, sql, n, values);
	static char value[24];

	if (server_state == SERVER_OPEN)
	{
		strlcpy(value, PQgetvalue(result, 0, 0), sizeof(value));
		if (silent_since != FOREVER && opt.patience > 0)
			say(PG_LOG_WARNING, "the server answers again");
		silent_since = FOREVER;
	}
	PQclear(result);
	return server_state == SERVER_OPEN ? value : NULL;
}

/* Call a function with the ticket and, unless that is negative, "length". */
static const char *
ask_of_ticket(int64 until, const char *sql, int64 length)
{
	char		number[24];
	const char *values[] = {number, interval(length)};

	snprintf(number, sizeof(number), INT64_FORMAT, ticket);
	return ask(until, sql, length >= 0 ? 2 : 1, values);
}

/*
 * Renew the lease and the deadline, or check that a session's lock is held.
 * Returns 1 on success, 0 if the lock is lost, and -1 without an answer.
 */
static int
confirm(void)
{
	int64		sent;
	int64		until;
	const char *value;

	if (server_connection() == NULL &&
		(opt.session || server_open(patience_for_answer()) != SERVER_OPEN))
		return -1;
	sent = clock_now();
	until = sent + patience_for_answer();
	value = opt.session ?
		ask(until, "SELECT %s.dlock_is_held($1) OR NULL", 1, &opt.name) :
		adopts ? ask_of_ticket(until, "SELECT %s.dlock_renew($1, $2)", opt.ttl) :
		ask_of_ticket(until, "SELECT %s.dlock_renew($1)", -1);
	if (value == NULL)
	{
		/* use another connection next time */
		server_close();
		return -1;
	}
	if (value[0] == '\0')
		return 0;
	adopts = false;
	set_deadline(sent);
	return 1;
}

/*
 * Getting the lock
 */

/* Request the lock or a queue place.  Returns the ticket, or "" if busy. */
static const char *
request_lock(int64 until)
{
	const char *value;
	const char *values[] = {
		opt.name, interval(opt.ttl), opt.shared ? "true" : "false",
		opt.slots, opt.permits ? opt.permits : "1", info, owner
	};

	if (opt.session && opt.wait == FOREVER)
	{
		values[1] = NULL;
		return ask(FOREVER, "SELECT %s.dlock_acquire($1, $2, $3, $4, $5, $6)", 6, values);
	}
	if (opt.session)
	{
		values[1] = interval(Max(until - clock_now(), 0));
		return ask(until + 10 * SEC,
				   "SELECT %s.dlock_try_acquire($1, $2, $3, $4, $5, $6)", 6, values);
	}
	is_asking = true;
	value = ask(clock_now() + 10 * SEC, opt.wait == 0 ?
				"SELECT %s.dlock_try_ttl_acquire($1, $2, shared => $3, "
				"slots => $4, permits => $5, info => $6, owner => $7)" :
				"SELECT %s.dlock_ttl_enqueue($1, $2, 'dlock_run', shared => $3, "
				"slots => $4, permits => $5, info => $6, owner => $7)",
				7, values);
	/* an error is an answer, too */
	is_asking = server_connection() == NULL;
	return value;
}

/* Can a lease keep the lock for --at-least?  Ask before the command runs. */
static bool
at_least_fits(void)
{
	const char *length = interval(opt.at_least);
	const char *fits = ask(clock_now() + 10 * SEC,
						   "SELECT $1::pg_catalog.interval OPERATOR(pg_catalog.<=) "
						   "pg_catalog.current_setting('dlock.max_ttl')::pg_catalog.interval "
						   "FROM %s.dlock_version()", 1, &length);

	if (fits && fits[0] != 't')
	{
		strlcpy(server_problem, "--at-least is longer than dlock.max_ttl",
				sizeof(server_problem));
		server_state = SERVER_REFUSES;
	}
	return fits && fits[0] == 't';
}

/* Try once, on an open connection.  "until" is the end of the whole wait. */
static Outcome
try_to_get_lock(int64 until)
{
	int64		wait;
	const char *value;

	if (ticket == 0)
	{
		if ((opt.at_least > 0 && !at_least_fits()) ||
			(value = request_lock(until)) == NULL)
			return GOT_NONE_YET;
		if (value[0] == '\0')
			return GOT_BUSY;
		ticket = strtoll(value, NULL, 10);
		adopts = opt.owner != NULL;
		if (opt.session)
		{
			set_deadline(clock_now());
			return GOT_LOCK;
		}
	}
	else if (confirm() == 0)
		ticket = 0;
	if (ticket == 0 || server_state != SERVER_OPEN)
		return GOT_NONE_YET;

	wait = Max(Min(renew_interval, until - clock_now()), 0);
	value = ask_of_ticket(clock_now() + wait + patience_for_answer(),
						  "SELECT %s.dlock_wait($1, $2)", wait);
	if (value == NULL && strcmp(server_sqlstate, "55L01") == 0)
	{
		/* the ticket is gone: queue again */
		ticket = 0;
		server_state = SERVER_OPEN;
	}
	if (value == NULL)
		return GOT_NONE_YET;
	if (value[0] != 't')
		return clock_now() >= until ? GOT_BUSY : GOT_NONE_YET;
	/* renew, because the lease may have begun long ago, with another ttl */
	return confirm() == 1 ? GOT_LOCK : GOT_NONE_YET;
}

static Outcome
get_lock(void)
{
	int64		until = opt.wait == FOREVER ? FOREVER : clock_now() + opt.wait;

	for (;;)
	{
		Outcome		outcome = GOT_NONE_YET;

		if (server_connection() || server_open(10 * SEC) == SERVER_OPEN)
			outcome = try_to_get_lock(until);
		if (is_stopped())
			return GOT_STOPPED;
		if (outcome != GOT_NONE_YET)
			return outcome;
		if (server_state == SERVER_REFUSES)
		{
			say(PG_LOG_ERROR, "%s", server_problem);
			return GOT_ERROR;
		}
		if (server_state == SERVER_OPEN)
			continue;
		server_close();
		if (!be_patient(silent_since == FOREVER ? FOREVER :
						silent_since + opt.patience))
		{
			say(PG_LOG_ERROR, "found no server within the time of --patience");
			return GOT_ERROR;
		}
	}
}

/*
 * Giving back the lock
 */

/* Returns "t", or "" if the lock was lost, or NULL without an answer. */
static const char *
release_lock(int64 until)
{
	return ask_of_ticket(until, "SELECT %s.dlock_release_ticket($1) OR NULL", -1);
}

/*
 * Release the lock, or keep it for the rest of --at-least.  Returns false if
 * the lock had been lost or, with --session, may have been.  After "until",
 * gives up: the ttl, or the session's end, ends the lock.
 */
static bool
give_back(int64 until)
{
	int64		rest = granted_at + opt.at_least - clock_now();
	bool		keep = granted_at != 0 && rest > 0;
	bool		asked = false;
	const char *value = NULL;

	if (opt.session)
	{
		/* not by the session's end, which can come after ours */
		if (granted_at != 0 && server_connection() != NULL)
			value = release_lock(clock_now() + patience_for_answer());
		server_close();
		ticket = 0;
		return value && value[0] != '\0';
	}
	while (value == NULL && (ticket != 0 || is_asking))
	{
		if (server_connection() == NULL)
			server_open(patience_for_answer());
		if (server_connection() != NULL && ticket == 0)
		{
			/* a repeated request finds the ticket that the first has made */
			const char *found = request_lock(until);

			ticket = found ? strtoll(found, NULL, 10) : 0;
			if (found)
				continue;
		}
		else if (server_connection() != NULL && keep)
			value = ask_of_ticket(until, "SELECT %s.dlock_renew($1, $2)",
								  Max(rest, 100 * MS));
		else if (server_connection() != NULL)
		{
			value = release_lock(until);
			/* an earlier request, without an answer, may have released it */
			if (value && value[0] == '\0' && asked)
				value = "t";
			asked = true;
		}
		if (value == NULL && (server_state == SERVER_REFUSES || !be_patient(until)))
		{
			say(PG_LOG_WARNING, "could not %s lock \"%s\": it ends by itself",
				keep ? "keep" : "release", opt.name);
			break;
		}
	}
	ticket = 0;
	return value == NULL || value[0] != '\0';
}

/*
 * With the lock
 */

static void
set_environment(void)
{
	char		number[24];

	snprintf(number, sizeof(number), INT64_FORMAT, ticket);
	setenv("DLOCK_NAME", opt.name, 1);
	setenv("DLOCK_FENCE", number, 1);
	unsetenv("DLOCK_LEASE");
	unsetenv("DLOCK_TICKET");
	setenv(opt.session ? "DLOCK_TICKET" : "DLOCK_LEASE", number, 1);
}

/* Is the connection lost?  Called if it has input while no request runs. */
static bool
connection_is_lost(void)
{
	PGconn	   *conn = server_connection();

	return conn && (!PQconsumeInput(conn) || PQstatus(conn) == CONNECTION_BAD);
}

/*
 * Keep the lock until the command has ended or, if none runs, until "until".
 * Returns false if the lock is lost; then the command has been killed.
 */
static bool
keep_until(int64 until)
{
	bool		ran = command_runs();
	int			confirmed;

	while (ran ? command_runs() : clock_now() < until || suspended)
	{
		if (!ran && is_stopped())
			break;
		if (await_event(server_connection() ? PQsocket(server_connection()) : -1, POLLIN,
						command_is_lost() ? FOREVER :
						suspended ? renew_at : Min(renew_at, until), true) &&
			connection_is_lost())
		{
			server_lose();
			renew_at = 0;
		}
		if (clock_now() < renew_at || (ran && (!command_runs() || command_is_lost())))
			continue;
		confirmed = confirm();
		if (confirmed == 0 || (confirmed < 0 && opt.session))
		{
			if (ran)
				command_kill();
			return false;
		}
		if (confirmed < 0 && command_runs() == ran)
			be_patient(FOREVER);
	}
	return !command_is_lost();
}

/* Run the command once.  Returns the exit code, or -1 if the lock was lost. */
static int
run_command(void)
{
	pid_t		group;
	bool		kept;

	set_environment();
	if (!command_has_time())
		return -1;
	if ((group = command_start(opt.command)) != 0)
	{
		tell_front('g', group);
		kept = keep_until(FOREVER);
		tell_front('g', 0);
		if (!kept)
			return -1;
		errno = command_exec_error();
	}
	if (errno == 0)
		return command_exit_code();
	not_run = errno == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_RUN;
	say(PG_LOG_ERROR, "could not run \"%s\": %m", opt.command[0]);
	return not_run;
}

/* Run the command once, or as --every says.  Returns as run_command() does. */
static int
run_with_lock(void)
{
	int			code;
	int64		start = clock_now();

	while (keep_until(start))
	{
		if (is_stopped())
			return 128 + stop_signal;
		start = clock_now();
		code = run_command();
		/* after Ctrl-C, which only the command gets, do not run it again */
		if (code < 0 || opt.every == 0 || not_run || code == 128 + SIGINT)
			return code;
		if (code != 0)
			say(PG_LOG_WARNING, "\"%s\" has ended with exit code %d",
				opt.command[0], code);
		start += opt.every;
	}
	return -1;
}

/* Get the lock, use it, and give it back.  Returns as run_command() does. */
static int
take_turn(void)
{
	Outcome		outcome = get_lock();
	bool		kept;
	int			code = outcome == GOT_BUSY ? opt.busy_code :
		outcome == GOT_STOPPED ? 128 + stop_signal : EXIT_DLOCK;

	if (outcome == GOT_LOCK)
	{
		granted_at = clock_now();
		if (opt.verbose)
			say(PG_LOG_INFO, "got lock \"%s\", fence " INT64_FORMAT, opt.name, ticket);
		code = run_with_lock();
	}
	else if (outcome == GOT_BUSY && opt.verbose)
		say(PG_LOG_INFO, "lock \"%s\" is busy", opt.name);
	kept = give_back(clock_now() +
					 (outcome != GOT_LOCK || code < 0 ? SEC : patience_for_answer()));
	granted_at = 0;
	return outcome == GOT_LOCK && !kept ? -1 : code;
}

/* Make a text ASCII: a file name's encoding can differ from the database's. */
static char *
ascii(char *text)
{
	for (char *c = text; *c; c++)
	{
		if (IS_HIGHBIT_SET(*c))
			*c = '?';
	}
	return text;
}

/* Set owner and info.  The default owner is unique to this run. */
static void
name_holder(void)
{
	char		host[256] = "";
	uint64		number;

	gethostname(host, sizeof(host) - 1);
	if (getentropy(&number, sizeof(number)) < 0)
		number = clock_now();
	owner = opt.owner ? opt.owner :
		psprintf("%s/%d/" UINT64_FORMAT, host, (int) front, number);
	info = opt.info ? opt.info :
		ascii(psprintf("%.500s on %s, pid %d", opt.command[0], host, (int) front));
}

int
keep_lock(int to_front, pid_t front_pid)
{
	int			code;
	int64		usable;

	control = to_front;
	front = front_pid;
	margin = Min(SEC, opt.ttl / 20);
	usable = opt.ttl - margin - opt.grace;
	renew_interval = opt.session ? 3 * SEC : Min(usable / 3, 30 * SEC);
	name_holder();
	server_await = await_answer;
	do
	{
		if ((code = take_turn()) < 0)
			say(PG_LOG_ERROR, front_gone ? "dlock was killed while it kept lock \"%s\"" :
				"lost lock \"%s\"", opt.name);
	} while (code < 0 && opt.every > 0 && !is_stopped());
	server_close();
	return code < 0 ? EXIT_LOST : code;
}
