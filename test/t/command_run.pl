# dlock run does what its --help says.  It waits for its turn, runs the command
# with the lock, releases the lock, and exits with the command's exit code.
# The command inherits the same state as if dlock's caller had started it.
#
# What would break it: exit codes that cannot be told apart; a lock that stays
# behind, or is gone while the command runs; a descriptor, a signal mask or an
# ignored signal that the command inherits from dlock, or that disturbs dlock
# itself; a message that blocks; an owner that two runs share; a place in the
# queue that is lost with the connection.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Command;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');
my $dir = PostgreSQL::Test::Utils::tempdir;
my $client = session($node);

sub code_is
{
	my ($expected, $test, @arguments) = @_;
	my ($code, $out, $err) = dlock($node, @arguments);
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is($code, $expected, $test) or diag("$out$err");
	return wantarray ? ($out, $err) : $err;
}

sub nothing_left
{
	my ($test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is($client->query('SELECT count(*) FROM dlock_locks'), '0', $test);
	return;
}

#
# Exit codes
#
code_is(0, 'a command that succeeds', 'run', 'a', 'true');
code_is(7, 'the exit code of the command', 'run', 'a', 'sh', '-c', 'exit 7');
code_is(143, 'a signal ended it', 'run', 'a', '--', 'sh', '-c', 'kill $$');
like(code_is(127, 'no such command', 'run', 'a', './nothing'),
	qr/^dlock: error: could not run "\.\/nothing": No such file/, 'says so');
like(code_is(126, 'not a program', 'run', 'a', '/'),
	qr/^dlock: error: could not run "\/": Permission denied/, 'says so');
nothing_left('no lock is left');

foreach my $case (
	[ qr/no lock name specified/, 'run' ],
	[ qr/no command specified.*Try "dlock run --help"/s, 'run', 'a', '--' ],
	[ qr/unrecognized option/, 'run', '--nothing', 'a', 'true' ],
	[ qr/invalid time for option --wait: "1 week"/, 'run', '-w', '1 week', 'a', 'true' ],
	[ qr/--grace leaves no time .*at least twice/s, 'run', '--ttl=5', '--grace=5', 'a', 'true' ],
	[ qr/--session cannot be used with/, 'run', '--session', '--ttl=5', 'a', 'true' ],
	[ qr/error: .*lock name/s, 'run', '', 'true' ])
{
	my ($message, @arguments) = @$case;

	like(code_is(125, "dlock @arguments", @arguments), $message, 'says why');
}

$node->safe_psql('postgres', 'CREATE DATABASE bare');
foreach my $case (
	[ 'bare', qr/"dlock" is not installed in database "bare"\nHINT:/ ],
	[ 'nowhere', qr/database "nowhere" does not exist/ ])
{
	my ($dbname, $message) = @$case;
	my ($code, $out, $err) = dlock($node->connstr($dbname), 'run', 'a', 'true');

	is($code, 125, "database $dbname");
	like($err, $message, 'says why');
}
{
	my ($code, $out, $err) =
	  dlock("host=$dir port=1", 'run', '--patience=200ms', 'a', 'true');

	is($code, 125, 'no server');
	like($err, qr/warning: .*No such file.*error: found no server/s, 'says so');
}

{
	my ($code, $out, $err) = dlock("host=$dir no=option", 'run', '--patience=200ms', 'a', 'true');

	is($code, 125, 'a malformed connection string');
	like($err, qr/^dlock: error: invalid connection option "no"$/, 'is not retried');
}
$node->safe_psql('postgres', 'CREATE ROLE bob LOGIN; '
	  . 'REVOKE EXECUTE ON FUNCTION dlock_renew, dlock_release_ticket FROM PUBLIC');
{
	my $bob = $node->connstr('postgres') . ' user=bob';
	my ($code, $out, $err) = dlock($bob, 'run', 'a', 'touch', "$dir/ran");

	is($code, 125, 'the lease cannot be renewed');
	like($err, qr/error: permission denied for function dlock_renew\n.*warning: could not release/,
		'says so, and does not retry');
	ok(!-e "$dir/ran", 'the command does not run');
	$client->query('SELECT dlock_reset()');
	$node->safe_psql('postgres',
		'GRANT EXECUTE ON FUNCTION dlock_renew, dlock_release_ticket TO PUBLIC');
}
like(code_is(125, '--at-least above dlock.max_ttl', 'run', '--at-least=3d', 'a', 'touch', "$dir/ran"),
	qr/^dlock: error: --at-least is longer than dlock.max_ttl$/, 'says why');
ok(!-e "$dir/ran", 'the command does not run');
nothing_left('no lock is left');

#
# The state that the command inherits
#
{
	my ($out) = code_is(0, 'the environment', 'run', '--info=me', 'a b', 'sh', '-c',
		'echo "$DLOCK_NAME,$DLOCK_FENCE,$DLOCK_LEASE,$DLOCK_TICKET"; exec psql -XAtc '
		  . q{"SELECT name, ticket, scope, info FROM dlock_locks" } . '"' . $node->connstr('postgres') . '"');
	my ($name, $fence, $lease, $ticket) = split /[,\n]/, $out;

	is($name, 'a b', 'name');
	like($fence, qr/^\d+$/, 'fence');
	is($lease, $fence, 'DLOCK_LEASE is the ticket');
	is($ticket, '', 'DLOCK_TICKET is not set');
	like($out, qr/\na b\|$fence\|lease\|me\n$/, 'the lock is held while the command runs');
	($out) = code_is(0, 'of a session', 'run', '--session', 'a', 'sh', '-c',
		'echo "$DLOCK_NAME,$DLOCK_LEASE,$((DLOCK_TICKET - DLOCK_FENCE))"');
	is($out, "a,,0\n", 'DLOCK_TICKET is set');
}
{
	my @probe = ($^X, '-e', 'use POSIX; opendir D, "/proc/self/fd"; '
		  . 'my $own = "/proc/$$/fd"; print join(",", sort { $a <=> $b } grep { /\d/ '
		  . '&& readlink("/proc/self/fd/$_") !~ m{^/proc} } readdir D), "\n"; '
		  . 'open S, "/proc/self/status"; print grep { /^Sig[BI]/ } <S>; '
		  . 'print getpgrp == $$ ? "leads\n" : "follows\n"');
	my $dlock = '"dlock", "-d", "' . $node->connstr('postgres') . '", "run", "-v", "a"';

	foreach my $case ([], [qw(CHLD PIPE ALRM TERM TTOU)])
	{
		my @ignore = ($^X, '-e', "\$SIG{\$_} = 'IGNORE' foreach qw(@$case); exec ");
		my ($out) = run_command([ @ignore[0, 1], "$ignore[2] $dlock, \@ARGV", @probe ]);
		my ($plain) = run_command([ @ignore[0, 1], "$ignore[2] \@ARGV", @probe ]);

		$plain =~ s/follows|leads/leads/;
		is($out, $plain, "descriptors and signals (ignored: @$case) are as without dlock; "
			  . 'it leads its process group');
	}
	foreach my $case (
		[ 'with SIGCHLD ignored', '$SIG{CHLD} = "IGNORE"' ],
		[ 'without stderr', 'POSIX::close(2)' ],
		[ 'without a reader of stderr',
			'$SIG{PIPE} = "DEFAULT"; pipe R, W; open STDERR, ">&W"; close R' ])
	{
		my ($how, $code) = @$case;

		is(system($^X, '-MPOSIX', '-e', "$code; exec $dlock, \@ARGV", 'sh', '-c', 'exit 7') >> 8,
			7, "the exit code $how");
		nothing_left('no lock is left');
	}
	ok(!$node->log_contains('invalid (frontend )?message'),
		'no message goes into the connection');
}
$ENV{PATH} .= ":$dir";
append_to_file("$dir/ours", "#!/bin/sh\necho found\n");
chmod 0755, "$dir/ours";
is((code_is(0, 'a program of PATH', 'run', 'a', 'ours'))[0], "found\n", 'runs');
rename "$dir/ours", "$dir/\xfc";
is((code_is(0, 'a name in no encoding of the database', 'run', 'a', "\xfc"))[0],
	"found\n", 'runs');
{
	my ($out, $err) = ('', '');

	IPC::Run::run([ 'dlock', '-d', $node->connstr('postgres'), 'run', 'a', 'cat' ],
		'<', \"in\n", '>', \$out, '2>', \$err);
	is("$out$err", "in\n", 'the command reads dlock\'s input and writes its output');
}

#
# Busy locks, and turns
#
my $held = $client->query(q{SELECT dlock_acquire('busy')});

foreach my $session ([], ['--session'])
{
	is(code_is(1, "busy @$session", 'run', @$session, '-n', 'busy', 'true'),
		'', 'a busy lock is not reported');
	code_is(75, "another code @$session", 'run', @$session, '-n', '-E', '75',
		'busy', 'true');
	code_is(1, "not in time @$session", 'run', @$session, '-w', '50ms', 'busy',
		'true');
}
like(code_is(1, 'with -v', 'run', '-nv', 'busy', 'true'),
	qr/^dlock: lock "busy" is busy$/, 'a busy lock is reported');
is($client->query(q{SELECT count(*) FROM dlock_locks WHERE NOT granted}),
	'0', 'no ticket waits any more');

my @turns;
foreach my $n (1 .. 3)
{
	# the second run has session scope
	push @turns, Dlock::Command->new($node, 'run', $n == 2 ? '--session' : '--ttl=1h',
		'busy', 'sh', '-c', "echo $n >>$dir/turns");
	$client->wait_for(
		"SELECT count(*) = $n FROM dlock_locks WHERE NOT granted");
}
# All connections are cut.  The first and the third keep their places, because
# they have tickets of leases.  The second loses its place and is last.
$client->wait_for(q{SELECT count(*) = 2 FROM pg_stat_activity }
	  . q{WHERE state = 'active' AND query ~ '^SELECT public.dlock_wait'});
my $pids = q{SELECT pid FROM pg_stat_activity WHERE query ~ '^SELECT public.dlock_'};
$client->query("SELECT pg_terminate_backend(pid) FROM ($pids) AS p");
$client->wait_for('SELECT array_agg(scope ORDER BY position) = '
	  . q{'{lease,lease,session}' FROM dlock_locks WHERE NOT granted});
$client->query(q{SELECT dlock_release('busy')});
is($_->exit_code, 0, 'each run has had its turn') foreach @turns;
is(slurp_file("$dir/turns"), "1\n3\n2\n", 'the turns are in order');
nothing_left('no lock is left');

# A waiter that gets a signal to end leaves the queue.
$client->query(q{SELECT dlock_acquire('busy')});
foreach my $signal ('INT', 'TERM')
{
	my $waiter = Dlock::Command->new($node, 'run', '--ttl=1h', 'busy', 'true');

	$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE NOT granted');
	$waiter->signal($signal);
	is($waiter->exit_code, $signal eq 'INT' ? 130 : 143, "SIG$signal ends a wait");
	is($client->query('SELECT count(*) FROM dlock_locks WHERE NOT granted'),
		'0', 'the waiter has left the queue');
}

# The role's timeouts do not end a wait.
{
	my $timeout = $node->pg_version >= 17 ? 'transaction_timeout' : 'statement_timeout';

	$client->query("CREATE ROLE hasty LOGIN; ALTER ROLE hasty SET $timeout = '3s'");
	my $waiter = Dlock::Command->new($node->connstr('postgres') . ' user=hasty', 'run', '--session', 'busy', 'true');
	$client->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE NOT granted');
	my $pid = $client->query('SELECT pid FROM dlock_locks WHERE NOT granted');

	# a wait that began later, and has ended
	my $hasty = session($node, 'postgres', 'user=hasty');
	$hasty->may_end;
	like($hasty->query(q{SELECT dlock_acquire('busy')}), qr/57014|25P04|^$/, "$timeout ends another wait");
	is($client->query('SELECT pid FROM dlock_locks WHERE NOT granted'), $pid, "$timeout does not end the wait");
	$client->query(q{SELECT dlock_release_all()});
	is($waiter->exit_code, 0, 'the waiter has its turn');
	$hasty->quit;
}

#
# Modes
#
{
	my $first = Dlock::Command->new($node, 'run', '-s', 'm', 'sleep', '1000');
	my @slots = map {
		Dlock::Command->new($node, 'run', '--slots=3', '--permits', $_, 'n', 'sleep', '1000')
	} 1, 2;

	$client->wait_for('SELECT count(*) = 3 FROM dlock_locks WHERE granted');
	code_is(0, 'two share', 'run', '-sn', 'm', 'true');
	code_is(1, 'an exclusive request does not', 'run', '-n', 'm', 'true');
	code_is(1, 'three slots are taken', 'run', '-n', '--slots=3', 'n', 'true');
	like(code_is(125, 'another number of slots', 'run', '-n', '--slots=2', 'n', 'true'),
		qr/dlock: error: .*slots/, 'says why');
	$_->signal('TERM') foreach $first, @slots;
	is($_->exit_code, 143, 'a signal is passed on') foreach $first, @slots;
	nothing_left('no lock is left');
}

# SIGTERM to all processes of dlock run, as systemd sends it
{
	my $all = Dlock::Command->new($node, 'run', '--ttl=1h', 'all', 'sh', '-c',
		"trap 'exit 3' TERM; touch $dir/trapped; while :; do sleep 0.01; done");

	poll('the command runs', sub { -e "$dir/trapped" });
	my ($keeper) = children($all->{pid});

	kill('TERM', $keeper, children($keeper), $all->{pid});
	is($all->exit_code, 3, 'SIGTERM for all: the command ends by itself');
	nothing_left('no lock is left');
}

# An owner that returns gets its lease.
my $mine = $client->query(
	q{SELECT dlock_ttl_acquire('own', '1h', owner => 'me', info => 'before')});
is((code_is(0, 'the owner returns', 'run', '--owner=me', '-n', 'own', 'sh', '-c',
		'echo $DLOCK_LEASE'))[0], "$mine\n", 'the owner gets its lease');
$mine = $client->query(q{SELECT dlock_ttl_acquire('own', '1h', owner => 'me')});
is((code_is(0, 'the owner requests another ttl', 'run', '--owner=me', '--ttl=20s', 'own', 'psql',
		'-XAtd', $node->connstr('postgres'), '-c', 'SELECT ttl FROM dlock_leases'))[0],
	"00:00:20\n", 'the lease has the new ttl');

#
# One of five machines runs the job, even if the others try after it is done.
#
{
	my @cron = map {
		Dlock::Command->new($node, 'run', '-n', '--at-least=1h', 'nightly', 'sh',
			'-c', "echo $_ >>$dir/nightly")
	} 1 .. 5;
	my @codes = sort map { $_->exit_code } @cron;

	is("@codes", '0 1 1 1 1', 'five runs start, and one gets the lock');
	code_is(1, 'a later run does not get the lock', 'run', '-n', 'nightly', 'sh', '-c',
		"echo late >>$dir/nightly");
	like(slurp_file("$dir/nightly"), qr/^\d\n$/, 'the job has run once');
	is($client->query('SELECT remaining > \'50 min\' FROM dlock_locks'),
		't', 'the lock is kept');
	$client->query('SELECT dlock_reset()');
}

#
# Repeatedly, as the leader
#
{
	my @leaders = map {
		Dlock::Command->new($node, 'run', '--every=1ms', '--ttl', ample(1), 'lead', 'sh', '-c',
			"echo $_ >>$dir/lead; test -e $dir/failed$_ || { touch $dir/failed$_; exit 3; }")
	} 1, 2;

	poll('three times', sub { -e "$dir/lead" && (() = slurp_file("$dir/lead") =~ /\n/g) > 3 });
	$client->wait_for('SELECT renewed_at - opened_at > 3 * ttl FROM dlock_leases WHERE held = 1');
	my ($first) = slurp_file("$dir/lead") =~ /^(\d)/;
	my ($leads, $follows) = $first == 1 ? @leaders : reverse @leaders;

	like(slurp_file("$dir/lead"), qr/^($first\n)+$/, 'one leads');
	$leads->signal('TERM');
	is($leads->exit_code, 143, 'a signal ends the leader');
	like($leads->err, qr/warning: "sh" has ended with exit code 3/, 'warns');
	unlike($leads->err, qr/lost/, 'the leader did not lose its lock');
	poll('the next one leads', sub { slurp_file("$dir/lead") =~ /\n[^$first]\n/ });
	$follows->signal('INT');
	is($follows->exit_code, 130, 'a signal ends the next leader');
	unlike(slurp_file("$dir/lead"), qr/[^$first]\n$first/, 'not both');
	nothing_left('no lock is left');
}

# The leader's output is not read.
{
	my $turns = "$dir/turns of a mute";

	pipe my $reader, my $writer or die "pipe: $!";
	$writer->blocking(0);
	1 while syswrite $writer, 'x' x 4096;
	$writer->blocking(1);
	my $pid = fork // die "fork: $!";

	if ($pid == 0)
	{
		open STDERR, '>&', $writer or die;
		exec 'dlock', '-d', $node->connstr('postgres'), 'run', '--every=1ms', 'mute',
		  'sh', '-c', "echo >>'$turns'; exit 3";
	}
	eval { poll('the leader goes on', sub { -e $turns && -s $turns > 3 }) };
	cmp_ok(-s $turns, '>', 3, 'a full pipe does not hold up the leader');
	kill('TERM', $pid);
	close $reader;
	waitpid($pid, 0);
	is($? >> 8, 143, 'the leader ends');
	nothing_left('no lock is left');
}

#
# dlock in another schema, with connection options before and after "run"
#
$node->safe_psql('bare', 'CREATE SCHEMA "A b"; CREATE EXTENSION dlock SCHEMA "A b"');
{
	local $ENV{PGHOST} = $node->host;
	local $ENV{PGPORT} = 1;
	my $port = $node->port;

	is(system("dlock -p $port run -d bare a true"), 0, 'options before and after "run"');
	is(system("dlock -d nowhere run --dbname=bare --port $port a true"), 0,
		'the last option counts');
}
program_help_ok('dlock');
program_version_ok('dlock');
program_options_handling_ok('dlock');
{
	my ($out, $err) = run_command([ 'dlock', 'run', '-?' ]);

	like($out, qr/Usage:\n  dlock run .*124 if the lock was lost/s, 'help');
	is($err, '', 'the help is on standard output');
}

done_testing();
