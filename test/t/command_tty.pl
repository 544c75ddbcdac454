# At a terminal, a command under dlock run behaves as if it was typed without
# dlock: Ctrl-C reaches it, Ctrl-Z stops the job, fg continues it, and it may
# read from the terminal.  While the command is stopped, its lock is kept.
# dlock top obeys its keys.
#
# What would break it: a terminal that still belongs to the shell, or to a
# finished command; a dlock that does not stop with its command, so that the
# shell keeps waiting; a keeper that stops with the job.
#
# The shell is bash with job control.  IO::Pty creates the terminal.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

plan skip_all => 'IO::Pty is needed' unless eval { require IO::Pty };
plan skip_all => 'bash is needed' unless -x '/bin/bash';

my $node = new_server('main');
my $client = session($node);
my $dir = PostgreSQL::Test::Utils::tempdir;
my ($in, $out) = ('', '');
my $shell;

sub start_shell
{
	local %ENV = (%ENV, PS1 => '', TERM => 'xterm', PGHOST => $node->host,
		PGPORT => $node->port, PGDATABASE => 'postgres', HISTFILE => '', INPUTRC => '/dev/null');

	($in, $out) = ('', '');
	$shell = IPC::Run::start(
		[ '/bin/bash', '--norc', '--noprofile', '--noediting', '-i' ],
		'<pty<', \$in, '>pty>', \$out,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	type("stty -echo rows 24 cols 80; PS1=; echo rea''dy\n");
	shows(qr/ready/);
	return;
}

sub type
{
	my ($text) = @_;

	$in .= $text;
	$shell->pump_nb while length $in;
	return;
}

# earlier output is discarded
sub shows
{
	my ($pattern, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	eval {
		poll("the terminal shows $pattern",
			sub { $shell->pump_nb; $out =~ $pattern });
	};
	my $shown = $out =~ $pattern;

	ok($shown, $test) || diag("terminal: $out") if defined $test;
	die "$pattern: $out" if !$shown && !defined $test;
	$out = '';
	return;
}

# Type a command line that runs cat, or its like, with lock "a".
sub echoes
{
	my ($line, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	type("$line\n");
	$client->wait_for(q{SELECT count(*) = 1 FROM dlock_locks WHERE granted AND name = 'a'});
	type("one\n");
	return shows(qr/one/, $test);
}

sub locks
{
	return $client->query(q{SELECT count(*) FROM dlock_locks WHERE granted});
}

start_shell();

type("dlock run a cat; echo code \$?\n");
$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE granted');
type("typed\n");
shows(qr/typed/, 'the command reads from the terminal');
type("\cD");
shows(qr/code 0/, 'the shell has the terminal again');

type("dlock run a sh -c 'trap \"echo caught; exit 3\" INT; echo up; while :; do sleep 0.01; done'; echo code \$?\n");
shows(qr/up/);
type("\cC");
shows(qr/caught\s+code 3/, 'Ctrl-C reaches the command, and dlock waits for it');
my $loop = 'for i in 1 2; do dlock run a sleep 1000; echo af""ter; done';

foreach my $line ($loop, "bash -c '$loop'")
{
	type("$line\n");
	$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE granted');
	type("\cC");
	type("echo code \$?\n");
	eval { poll('code', sub { $shell->pump_nb; $out =~ /code \d|after/ }) };
	unlike($out, qr/after/, 'Ctrl-C ends a loop, as it does without dlock');
	shows(qr/code 130/, 'the signal ends the loop');
	is(locks(), '0', 'the lock is free');
}

# Stopped for longer than the ttl
type("dlock run --ttl=1s a cat; echo code \$?\n");
$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE granted');
type("\cZ");
shows(qr/Stopped.*dlock run/, 'Ctrl-Z stops the job');
my $renewed = q{SELECT renewed_at - opened_at > '2s' FROM dlock_leases};

is($client->wait_for($renewed), 1, 'its lock is kept');
type("fg; echo code \$?\n");
shows(qr/dlock run/);
type("again\n");
shows(qr/again/, 'fg lets it go on, with the terminal');
type("\cZ");
shows(qr/Stopped/, 'the job is stopped again');
type("fg; echo code \$?\n");
shows(qr/dlock run/);
type("\cD");
shows(qr/code 0/, 'the command succeeds');

# Ctrl-Z in the moment before the command is executed
SKIP:
{
	my $stop = compile_library('stop', <<~'END');
		#define _GNU_SOURCE
		#include <dlfcn.h>
		#include <signal.h>
		int execvp(const char *file, char *const argv[])
		{
			int (*execute)(const char *, char *const []) = dlsym(RTLD_NEXT, "execvp");

			raise(SIGTSTP);
			return execute(file, argv);
		}
		END

	skip 'a compiler is needed', 3 unless $stop;
	type("LD_PRELOAD='" . preloaded($stop) . "' dlock run --ttl=1s a echo af''ter; echo code \$?\n");
	shows(qr/Stopped.*dlock run/, 'Ctrl-Z stops the job before the command begins');
	is($client->wait_for($renewed), 1, 'its lock is kept');
	type("fg; echo code \$?\n");
	shows(qr/after\s+code 0/, 'fg lets the command begin');
}

# The job gets another signal in the moment after it was continued, when the
# keeper has told the front that the command goes on.
sub signaled_again
{
	my ($signal) = @_;
	my $library = compile_library("again$signal", <<~"END");
		#define _GNU_SOURCE
		#include <dlfcn.h>
		#include <signal.h>
		int kill(pid_t pid, int signo)
		{
			static int (*kill_really)(pid_t, int);
			static pid_t group, stopped;
			int result;

			if (!kill_really)
				kill_really = dlsym(RTLD_NEXT, "kill");
			if (pid < 0)
				group = pid;
			result = kill_really(pid, signo);
			if (pid > 0 && signo == SIGCONT && group != stopped)
				kill_really(stopped = group, $signal);
			return result;
		}
		END

	return $library && "LD_PRELOAD='" . preloaded($library) . q{'};
}

SKIP:
{
	my $again = signaled_again('SIGTSTP') or skip 'a compiler is needed', 3;

	echoes("$again dlock run a cat; echo code \$?");
	type("\cZ");
	shows(qr/Stopped/);
	type("fg\n");
	shows(qr/dlock run.*Stopped/s, 'Ctrl-Z just after fg stops the job again');
	type("fg; echo code \$?\n");
	shows(qr/dlock run/);
	type("\cD");
	shows(qr/code 0/, 'the command succeeds');

	$again = signaled_again('SIGTTIN');
	echoes("$again dlock run a cat | cat", 'a second attempt to read does not stop the job');
	type("\cD");
	$client->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

# Ctrl-Z stops the whole job: a pipeline, or a script.  The command may catch
# SIGTSTP and stop itself, as editors do.
my $cat = 'dlock run a cat';
my $editor = q{dlock run a perl -e '$| = 1; $SIG{TSTP} = sub { kill STOP => $$ }; print while <>'};

foreach my $line ("$cat | cat", "bash -c '$cat; exit'", $editor, "dlock run b $cat", "dlock run b $cat | cat")
{
	echoes("$line; echo code \$?");
	type("\cZ");
	shows(qr/Stopped/, "Ctrl-Z stops $line");
	type("fg; echo code \$?\n");
	shows(qr/dlock run/);
	type("two\n");
	shows(qr/two/, 'fg lets it go on, with the terminal');
	type("\cD");
	shows(qr/code 0/, 'the command succeeds');
}

type("dlock run a sleep 1000\n");
$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE granted');
type("\cZ");
shows(qr/Stopped/);
type("bg; jobs\n");
shows(qr/Running/, 'bg lets it go on without the terminal');
type("kill %1; wait %1; echo code \$?\n");
shows(qr/code 143/, 'a signal ends the command');
is(locks(), '0', 'the lock is free');

# Each run of the command has the terminal.
type("dlock run --every=10ms a sh -c 'echo up; read line; echo got \$line'\n");
shows(qr/up/);
foreach my $line ('one', 'two')
{
	type("$line\n");
	shows(qr/got $line\s+up/, 'the command reads from the terminal, every time');
}
# Just after a command's end, Ctrl-C would still reach its group, and be lost.
type("\cC");
my $bash = $shell->{KIDS}[0]{PID};
poll('the shell has the terminal',
	sub { `ps -o pgid=,tpgid= -p $bash` =~ /^\s*(\d+)\s+\1\s*$/ });
type("echo code \$?\n");
shows(qr/code 130/, 'Ctrl-C ends the command, and dlock');
is(locks(), '0', 'the lock is free');

# Commands that start outside the foreground: behind a pipe, in the background
type("dlock run a sh -c 'echo up >&2; read line; echo got \$line' | cat\n");
shows(qr/up/);
type("line\n");
shows(qr/got line/, 'behind a pipe, the command gets the terminal when it reads');
type("dlock run a sh -c 'echo up; read line; echo got \$line' &\n");
shows(qr/up/);
type("jobs\n") , $shell->pump_nb;
poll('the job is stopped', sub { type("jobs\n"); $shell->pump_nb; $out =~ /Stopped/ });
type("fg\n");
shows(qr/dlock run/);
type("line\n");
shows(qr/got line/, 'a background command that reads is stopped, and fg continues it');

# Ctrl-Z while dlock waits: the command does not start before fg.
$client->query(q{SELECT dlock_acquire('a')});
type("dlock run --ttl=1s a touch '$dir/ran'; echo code \$?\n");
$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE NOT granted');
type("\cZ");
shows(qr/Stopped/, 'Ctrl-Z stops a wait');
$client->query(q{SELECT dlock_release('a')});
$client->wait_for($renewed);
ok(!-e "$dir/ran", 'the command does not run while the job is stopped');
type("fg; echo code \$?\n");
shows(qr/code 0/, 'fg lets the command start');
ok(-e "$dir/ran", 'the command has run');

# dlock top
sub ends_top
{
	type("\cC");
	# The shell omits the rest of a line after SIGINT.  Its echo of this line
	# is not the output.
	type("echo en''ded\n");
	return shows(qr/ended/, 'Ctrl-C ends top');
}

$client->query(q{SELECT dlock_acquire('seen'), dlock_acquire('other')});
type("dlock top --interval=100ms --filter=ee; echo code \$?\n");
shows(qr/seen/, 'top shows the requested lock');
SKIP:
{
	my ($path) = run_command([ 'which', 'dlock' ]);
	my ($libraries) = run_command([ 'ldd', $path ]);

	if ($libraries !~ /ncurses/)
	{
		ends_top();
		skip('dlock was built without ncurses', 5);
	}
	# the terminal echoes the input
	type('f');
	shows(qr/filter:/, 'f asks for a filter');
	type("the\n");
	shows(qr/other/, 'the filter counts');
	type('q');
	shows(qr/code 0/, 'q quits');

	# A line is cut at the screen's width in columns.
	my $wide = "\xc3\xa9" x 60;

	$client->query("SELECT dlock_acquire('$wide')");
	type("LC_ALL=C.UTF-8 dlock top --interval=1h --filter=\xc3\xa9; echo code \$?\n");
	shows(qr/$wide | code \d/, 'a name with wide characters is shown');
	type('q');
	shows(qr/code 0/);
	$client->query("SELECT dlock_release('$wide')");
}
# The end of input is not a key: dlock top does not query the server in a loop.
my $asked = q{FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()};

type("dlock top --interval=1h </dev/null; echo code \$?\n");
shows(qr/other/, 'top without keys');
$client->wait_for("SELECT count(*) = 1 $asked AND state = 'idle'");
my $first = $client->query("SELECT query_start $asked");

$client->query('SELECT count(*) FROM generate_series(1, 100000)') foreach 1 .. 5;
is($client->query("SELECT query_start $asked"), $first, 'pauses');
ends_top();
type("\cC\cDexit\n") if $shell->pumpable;
$shell->kill_kill;

# jobs that no shell can continue, as under ssh -t
foreach my $line ($cat, "dlock run b $cat")
{
	start_shell();
	echoes("exec $line");
	type("\cZ");
	type("two\n");
	shows(qr/two/, "Ctrl-Z does not stop $line without a shell");
	type("\cD");
	$client->wait_for(q{SELECT count(*) = 0 FROM dlock_locks WHERE name IN ('a', 'b')});
	$shell->kill_kill;
}
start_shell();
$client->query(q{SELECT dlock_acquire('a')});
type("exec $cat\n");
$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE NOT granted');
type("\cZ");
$client->query(q{SELECT dlock_release('a')});
$client->wait_for(q{SELECT count(*) = 1 FROM dlock_locks WHERE name = 'a' AND granted});
type("one\n");
shows(qr/one/, 'nor while it waits');
type("\cD");
$client->wait_for(q{SELECT count(*) = 0 FROM dlock_locks WHERE name = 'a'});
$shell->kill_kill;

done_testing();
