/*
 * command.c
 *		Starting the command of "dlock run", and ending it in time.
 *
 * The keeper of the lock (run.c) is the command's parent, and calls these
 * functions.  Even if the keeper is busy, for example in the resolver, the
 * signal handler of a timer ends the command's process group in time.  Another
 * timer kills the keeper itself, even if SIGSTOP has stopped it.  Then the
 * kernel kills the command, because of its PR_SET_PDEATHSIG.
 *
 * Descendants can have process groups of their own, for example if a script
 * calls timeout(1).  They stay descendants, because the keeper and its parent,
 * the front (front.c), are subreapers.  So signal_tree() finds them.
 */
#include "bin/bin.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* set before there is a command */
static pid_t front_process;
static pid_t front_process_group;
static int	terminal = -1;
static bool takes_terminal;		/* the command takes the terminal at start */
static sigset_t inherited_mask;
static bool ignored[NSIG];
static timer_t step_timer;
static timer_t last_timer;

/* read by the signal handler; changed only while SIGALRM is blocked */
static volatile pid_t group;	/* of the command; 0: none */
static volatile int64 term_deadline = FOREVER;
static volatile int64 kill_deadline = FOREVER;
static volatile int64 last_deadline = FOREVER;
static volatile sig_atomic_t terminated;	/* SIGTERM was sent */
static volatile sig_atomic_t killed;	/* SIGKILL was sent */

static bool tree_terminated;	/* SIGTERM was sent to other groups, too */
static int	report;				/* exec's errno can be read from it */
static int	exec_error;
static int	exit_status;
static int	stop_signal;
static bool reaped;				/* signal_descendants() has reaped a child */

static void
set_timer(timer_t timer, int64 at)
{
	struct itimerspec when = {.it_value = {0}};

	if (at != FOREVER)
	{
		/* 0 would disarm the timer */
		at = Max(at, 1);
		when.it_value.tv_sec = at / SEC;
		when.it_value.tv_nsec = at % SEC * 1000;
	}
	timer_settime(timer, TIMER_ABSTIME, &when, NULL);
}

/*
 * SIGALRM handler: a deadline has passed, or the front has ended.  Continue a
 * stopped command, because SIGTERM cannot end a stopped process.
 */
static void
enforce_deadline(int signo)
{
	int			save_errno = errno;
	int64		now = clock_now();

	if (group > 0 && (now >= kill_deadline || getppid() != front_process))
	{
		killed = true;
		kill(-group, SIGKILL);
	}
	else if (group > 0 && now >= term_deadline && !terminated)
	{
		terminated = true;
		kill(-group, SIGTERM);
		kill(-group, SIGCONT);
		set_timer(step_timer, kill_deadline);
	}
	errno = save_errno;
}

static void
note_child(int signo)
{
	/* only interrupts ppoll() */
}

static void
block_alarm(int how)
{
	sigset_t	alarm;

	sigemptyset(&alarm);
	sigaddset(&alarm, SIGALRM);
	sigprocmask(how, &alarm, NULL);
}

/*
 * Record the signals that are ignored when dlock starts, because the command
 * must ignore them, too.  Call this before dlock changes any disposition.
 */
void
command_note_signals(void)
{
	struct sigaction action;

	for (int i = 1; i < NSIG; i++)
		ignored[i] = sigaction(i, NULL, &action) == 0 &&
			action.sa_handler == SIG_IGN;
}

/*
 * Prepare the keeper, once.  From then on, SIGCHLD is blocked except while the
 * keeper waits.  Returns false, with errno, if it cannot watch a command.
 */
bool
command_prepare(pid_t front, pid_t its_group, int tty, bool takes_tty)
{
	struct sigaction action = {.sa_flags = SA_RESTART};
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL};
	sigset_t	child;

	front_process = front;
	front_process_group = its_group;
	terminal = tty;
	takes_terminal = takes_tty;
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, &inherited_mask);
	sigemptyset(&action.sa_mask);
	action.sa_flags = SA_RESTART;
	action.sa_handler = enforce_deadline;
	sigaction(SIGALRM, &action, NULL);
	action.sa_handler = note_child;
	sigaction(SIGCHLD, &action, NULL);
	block_alarm(SIG_UNBLOCK);

	event.sigev_signo = SIGALRM;
	if (timer_create(CLOCK_BOOTTIME, &event, &step_timer) < 0)
		return false;
	event.sigev_signo = SIGKILL;
	return timer_create(CLOCK_BOOTTIME, &event, &last_timer) == 0 &&
		prctl(PR_SET_CHILD_SUBREAPER, 1) == 0 &&
		prctl(PR_SET_PDEATHSIG, SIGALRM) == 0;
}

const sigset_t *
command_waiting_mask(void)
{
	static sigset_t mask;

	mask = inherited_mask;
	sigdelset(&mask, SIGCHLD);
	sigdelset(&mask, SIGALRM);
	return &mask;
}

/* In the new process, restore the signals that dlock changed; execute argv. */
static void
become_command(char **argv, pid_t keeper, int result)
{
	int			problem;

	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != keeper)
		_exit(EXIT_DLOCK);
	/* take the terminal, if dlock has it */
	if (takes_terminal && tcgetpgrp(terminal) == front_process_group)
		tcsetpgrp(terminal, getpgrp());
	for (int i = 1; i < NSIG; i++)
	{
		if (i != SIGKILL && i != SIGSTOP)
			(void) signal(i, ignored[i] ? SIG_IGN : SIG_DFL);
	}
	sigprocmask(SIG_SETMASK, &inherited_mask, NULL);
	execvp(argv[0], argv);
	problem = errno;
	if (write(result, &problem, sizeof(problem)) < 0)
		problem = EIO;
	_exit(EXIT_NOT_RUN);
}

/* Forget the command, which has ended.  SIGALRM must be blocked. */
static void
forget_command(void)
{
	group = 0;
	set_timer(step_timer, FOREVER);
	set_timer(last_timer, FOREVER);
}

/* Set the timers; a past deadline fires at once.  SIGALRM must be blocked. */
static void
arm_timers(void)
{
	set_timer(step_timer, term_deadline);
	set_timer(last_timer, last_deadline);
}

/*
 * Start the command.  Returns its process group or, with errno set, 0.  Does
 * not wait for exec, because Ctrl-Z can stop the new process before exec.
 */
pid_t
command_start(char **argv)
{
	int			ends[2];
	int			problem;
	pid_t		keeper = getpid();
	pid_t		pid;
	sigset_t	all;
	sigset_t	before;

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
		return 0;
	/* keep signals pending until the new process does not ignore them */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, &before);
	killed = terminated = tree_terminated = false;
	stop_signal = 0;
	if ((pid = fork()) == 0)
		become_command(argv, keeper, ends[1]);
	problem = errno;
	close(ends[1]);
	if (pid > 0)
	{
		setpgid(pid, pid);
		group = pid;
		report = ends[0];
		arm_timers();
	}
	else
		close(ends[0]);
	sigprocmask(SIG_SETMASK, &before, NULL);
	errno = problem;
	return pid > 0 ? pid : 0;
}

bool
command_runs(void)
{
	return group > 0;
}

/* Set later deadlines, unless the running command has lost its lock. */
void
command_renew(int64 term_at, int64 kill_at, int64 die_at)
{
	block_alarm(SIG_BLOCK);
	if (group == 0 || !command_is_lost())
	{
		term_deadline = term_at;
		kill_deadline = kill_at;
		last_deadline = die_at;
		if (group > 0)
			arm_timers();
		else
			killed = terminated = false;
	}
	block_alarm(SIG_UNBLOCK);
}

/* Kill the command, because the lock is lost. */
void
command_kill(void)
{
	block_alarm(SIG_BLOCK);
	kill_deadline = 0;
	enforce_deadline(SIGALRM);
	block_alarm(SIG_UNBLOCK);
	command_look();
}

bool
command_is_lost(void)
{
	return terminated || killed;
}

/* The time when command_look() must be called, even without a signal */
int64
command_next_step(void)
{
	return group == 0 ? FOREVER :
		killed || terminated != tree_terminated ? 0 :
		terminated ? kill_deadline : term_deadline;
}

/* Is there time left before a command would get SIGTERM? */
bool
command_has_time(void)
{
	return clock_now() < term_deadline;
}

void
command_pass_on(int signo)
{
	if (group > 0)
		kill(-group, signo);
}

/* Take the latest signal that stopped or continued the command; 0: none. */
int
command_stopped_by(void)
{
	int			signo = stop_signal;

	stop_signal = 0;
	return signo;
}

/* Returns the errno of exec if the ended command was never executed, or 0. */
int
command_exec_error(void)
{
	return exec_error;
}

/* Returns the command's exit code; if signal n has ended it, 128 + n. */
int
command_exit_code(void)
{
	return WIFSIGNALED(exit_status) ? 128 + WTERMSIG(exit_status) :
		WEXITSTATUS(exit_status);
}

/*
 * Send a signal to the descendants of a process, except to the process group
 * "except", which has received it already.  Reap children of this process,
 * except the command.  Returns true if any other descendant is left.
 */
static bool
signal_descendants(pid_t parent, int signo, pid_t except)
{
	char		path[64];
	char	   *line = NULL;
	char	   *next;
	size_t		size = 0;
	FILE	   *children;
	bool		any = false;
	pid_t		pid;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children",
			 (int) parent, (int) parent);
	if ((children = fopen(path, "re")) == NULL)
		return false;
	if (getline(&line, &size, children) > 0)
	{
		for (next = line; (pid = (pid_t) strtol(next, &next, 10)) > 0;)
		{
			any |= signal_descendants(pid, signo, except);
			if (parent == getpid() && pid != group &&
				waitpid(pid, NULL, WNOHANG) == pid)
			{
				reaped = true;
				continue;
			}
			any |= pid != group;
			if (signo != 0 && getpgid(pid) != except)
				kill(pid, signo);
		}
	}
	free(line);
	(void) fclose(children);
	return any;
}

bool
signal_tree(int signo, pid_t except)
{
	bool		any = false;

	/* children of a reaped process become children of this process */
	do
	{
		reaped = false;
		any = signal_descendants(getpid(), signo, except);
	} while (reaped);
	return any;
}

/* Has the command's own process ended?  Does not reap the process. */
static bool
has_ended(void)
{
	siginfo_t	info = {0};

	return waitid(P_PID, group, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
		info.si_pid == group;
}

/*
 * Check the state of the command, after any signal.  If the lock is lost, the
 * command counts as ended once all of its descendants have ended.  Until then
 * its own process is not reaped, so that no other group gets the same number.
 */
void
command_look(void)
{
	siginfo_t	info = {0};
	bool		ended;
	bool		others;
	bool		ends_tree;

	if (group == 0)
		return;
	while (waitid(P_PID, group, &info, WSTOPPED | WCONTINUED | WNOHANG) == 0 &&
		   info.si_pid == group)
	{
		stop_signal = info.si_code == CLD_CONTINUED ? SIGCONT : info.si_status;
		info.si_pid = 0;
	}
	/* has_ended() first: then signal_tree() finds all that the command left */
	for (;;)
	{
		ended = has_ended();
		ends_tree = terminated;
		others = signal_tree(killed ? SIGKILL :
							 ends_tree && !tree_terminated ? SIGTERM : 0, group);
		if (!killed || (ended && !others))
			break;
		usleep(1000);
	}
	tree_terminated = ends_tree;
	if (ended && !(terminated && others))
	{
		/* do this before another group can get this group's number */
		if (terminal >= 0 && tcgetpgrp(terminal) == group)
			tcsetpgrp(terminal, front_process_group);
		block_alarm(SIG_BLOCK);
		waitpid(group, &exit_status, 0);
		forget_command();
		block_alarm(SIG_UNBLOCK);
		if (read(report, &exec_error, sizeof(exec_error)) <= 0)
			exec_error = 0;
		close(report);
	}
}
