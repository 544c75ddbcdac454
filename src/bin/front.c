/*
 * front.c
 *		The process that the caller of "dlock run" sees.
 *
 * The front passes signals on, lends the terminal to the command, stops when
 * the command is stopped, and ends as the command does.  Its child, the keeper
 * (run.c), does the rest.  If the keeper dies, the front becomes the parent of
 * the command's processes, and kills them.
 */
#include "bin/bin.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const int passed_on[] = {
	SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT
};

static int	control = -1;
static int	tty = -1;
static pid_t keeper;
static volatile pid_t command_group;	/* 0: no command runs */
static bool command_ran;
static volatile sig_atomic_t lends_terminal;
static volatile sig_atomic_t interrupted;
static volatile sig_atomic_t continued;

static void
tell_keeper(int signo)
{
	ControlMessage message = {'s', signo};

	send(control, &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void
lend_terminal(void)
{
	if (lends_terminal && command_group > 0 && tcgetpgrp(tty) == getpgrp())
		tcsetpgrp(tty, command_group);
}

/*
 * The keeper sends SIGCONT when the command has gone on.  If this was passed on
 * to the command, it would undo a stop that came meanwhile.
 */
static void
forward_signal(int signo, siginfo_t *info, void *context)
{
	int			save_errno = errno;

	if (signo == SIGCONT)
	{
		continued = true;
		lend_terminal();
	}
	interrupted |= signo == SIGINT;
	if (info->si_pid != keeper)
		tell_keeper(signo);
	errno = save_errno;
}

/* Catch the signals to pass on, unless they were ignored at the start. */
static void
catch_signals(void)
{
	struct sigaction action = {.sa_sigaction = forward_signal};
	struct sigaction old;

	action.sa_flags = SA_RESTART | SA_SIGINFO;
	sigemptyset(&action.sa_mask);
	for (size_t i = 0; i < lengthof(passed_on); i++)
	{
		if (sigaction(passed_on[i], NULL, &old) == 0 &&
			old.sa_handler != SIG_IGN)
			sigaction(passed_on[i], &action, NULL);
	}
}

/*
 * Set how front and keeper handle signals.  Writing a message must neither
 * stop these processes (stty tostop) nor end them (no reader of stderr).
 */
static void
set_own_signals(void)
{
	command_note_signals();
	(void) signal(SIGCHLD, SIG_DFL);
	(void) signal(SIGPIPE, SIG_IGN);
	(void) signal(SIGTTOU, SIG_IGN);
}

/*
 * The keeper gets signals only as messages from the front.  If systemd, for
 * example, signals all processes, the keeper must not end before the command.
 */
static void
leave_signals_to_front(void)
{
	for (size_t i = 0; i < lengthof(passed_on); i++)
	{
		if (passed_on[i] != SIGCONT)
			(void) signal(passed_on[i], SIG_IGN);
	}
}

/*
 * Does the command have the terminal from its start?  It does if this process
 * leads its job and stdout is no pipe, as to a pager that wants the terminal.
 * Otherwise the command gets the terminal after a stop by SIGTTIN or SIGTTOU.
 */
static bool
shall_lend_at_once(void)
{
	struct stat out;

	return tty >= 0 && getpgrp() == getpid() &&
		!(fstat(STDOUT_FILENO, &out) == 0 && S_ISFIFO(out.st_mode));
}

/*
 * Stop this process, or its job (0), as Ctrl-Z does.  The kernel does not stop
 * a job that no shell could continue, as under "ssh -t".  Then the command goes
 * on.
 */
static void
stop(pid_t target)
{
	struct sigaction action = {.sa_handler = SIG_DFL};
	struct sigaction old;

	continued = false;
	sigaction(SIGTSTP, &action, &old);
	kill(target, SIGTSTP);
	sigaction(SIGTSTP, &old, NULL);
	if (!continued)
	{
		lend_terminal();
		tell_keeper(SIGCONT);
	}
}

/*
 * The command was stopped.  If it needs the terminal, lend it.  If it had the
 * terminal, take it back and stop the whole job.  An outer dlock does the same
 * then, and a shell continues.
 */
static void
follow_stop(int signo)
{
	bool		wants_terminal = signo == SIGTTIN || signo == SIGTTOU;
	pid_t		owner = tty >= 0 ? tcgetpgrp(tty) : -1;
	bool		lent = command_group > 0 && owner == command_group;

	lends_terminal |= wants_terminal || lent;
	if (wants_terminal && (lent || owner == getpgrp()))
	{
		lend_terminal();
		tell_keeper(SIGCONT);
	}
	else if (wants_terminal)
		kill(getpid(), SIGTTIN);
	else if (lent)
	{
		tcsetpgrp(tty, getpgrp());
		stop(0);
	}
	else if (signo == SIGTSTP)
		stop(getpid());
}

static void
follow_keeper(void)
{
	ControlMessage message;
	ssize_t		got;

	while ((got = recv(control, &message, sizeof(message), 0)) != 0)
	{
		if (got < 0 && errno != EINTR)
			break;
		if (got == sizeof(message) && message.what == 'g')
		{
			command_group = message.number;
			command_ran = true;
		}
		else if (got == sizeof(message) && message.what == 'z')
			follow_stop(message.number);
	}
}

int
main_run(const char *name, int n, char **operands)
{
	int			ends[2];
	int			status = 0;
	pid_t		front = getpid();

	opt.name = operands[0];
	opt.command = operands + 1;
	if (!server_init())
		return EXIT_DLOCK;
	tty = open("/dev/tty", O_RDWR | O_CLOEXEC | O_NOCTTY);
	lends_terminal = shall_lend_at_once();
	set_own_signals();
	if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 ||
		socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0 ||
		(keeper = fork()) < 0)
	{
		pg_log_error("could not start: %m");
		return EXIT_DLOCK;
	}
	if (keeper == 0)
	{
		close(ends[0]);
		setpgid(0, 0);
		leave_signals_to_front();
		if (command_prepare(front, getpgid(front), tty, lends_terminal))
			exit(keep_lock(ends[1], front));
		pg_log_error("could not start: %m");
		exit(EXIT_DLOCK);
	}
	setpgid(keeper, keeper);
	close(ends[1]);
	control = ends[0];
	catch_signals();
	follow_keeper();
	/* SA_RESTART: no signal interrupts this */
	waitpid(keeper, &status, 0);
	if (WIFSIGNALED(status))
	{
		if (command_group > 0)
			kill(-command_group, SIGKILL);
		while (signal_tree(SIGKILL, 0))
			usleep(1000);
		pg_log_error("the process that kept lock \"%s\" was killed",
					 opt.name);
	}
	if (tty >= 0 && command_group > 0 && tcgetpgrp(tty) == command_group)
		tcsetpgrp(tty, getpgrp());
	if (WIFSIGNALED(status))
		return command_ran ? EXIT_LOST : EXIT_DLOCK;
	/* after Ctrl-C, end by the signal, so that a shell's loop ends, too */
	if ((interrupted || lends_terminal) && WEXITSTATUS(status) == 128 + SIGINT)
	{
		(void) signal(SIGINT, SIG_DFL);
		(void) raise(SIGINT);
	}
	return WEXITSTATUS(status);
}
