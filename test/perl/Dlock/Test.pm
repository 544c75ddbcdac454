
=pod

=head1 NAME

Dlock::Test - servers and sessions for dlock's TAP tests

=head1 DESCRIPTION

PostgreSQL::Test::Cluster provides servers.  Tests of locks also need sessions
that wait while others continue, or that are killed.  Dlock::Test::Session,
below, provides these sessions.

=cut

package Dlock::Test;

use strict;
use warnings FATAL => 'all';

use Config;
use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(new_server next_version_install start_again kill_server answers
  name_server poll ample fence fails_with grows session backends_gone
  compile_library preloaded);

# A shell lets background processes ignore these signals.  The test's processes
# would inherit that.
$SIG{$_} = 'DEFAULT' foreach 'HUP', 'INT', 'QUIT';

# Most waits have a limit.  This alarm ends waits of a test in t/ that have no
# limit.  Other commands run as long as they are told to.
$SIG{ALRM} = sub { die "the test has not ended\n" };
alarm 5 * $PostgreSQL::Test::Utils::timeout_default if $0 =~ m{\bt/[^/]+$};

# All servers of the tests have the same encoding and locale.  Otherwise initdb
# would use the environment's, or SQL_ASCII if the environment has none.
#
# A server with a template is a copy of that directory, because initdb takes a
# second of a processor.
{
	no warnings 'redefine';
	my $init = PostgreSQL::Test::Cluster->can('init');
	my $run = PostgreSQL::Test::Utils->can('system_or_bail');

	*PostgreSQL::Test::Cluster::init = sub {
		my ($node, %params) = @_;
		my $template = delete $params{template};

		local *PostgreSQL::Test::Utils::system_or_bail = sub {
			return $run->(@_) unless $template && $_[0] eq 'initdb';
			return $run->('cp', '-RPp', $template, $node->data_dir);
		};
		$params{extra} =
		  [ '--encoding=UTF8', '--no-locale', @{ $params{extra} // [] } ];
		return $node->$init(%params);
	};
}

# Returns a running server with dlock in its database "postgres".
#
# test/run names the template.  Its copies have the same system identifier, so
# own_system => 1 calls initdb instead.
sub new_server
{
	my ($name, %params) = @_;
	my $initdb = grep { $params{$_} } 'own_system', 'install_path', 'extra';
	my $node = PostgreSQL::Test::Cluster->new($name,
		$params{install_path} ? (install_path => $params{install_path}) : ());

	$node->init(%params, template => $initdb ? undef : $ENV{DLOCK_TEMPLATE});
	# allows_streaming would set it to ten, and clients that have just exited
	# still use some of them.
	$node->append_conf('postgresql.conf', 'max_connections = 100');
	# Many tests stop the worker, so it must not exit.  A waiter that looks for
	# deadlocks would find a grant that did not wake it.
	$node->append_conf('postgresql.conf',
		"dlock.worker_idle_timeout = 20d\ndeadlock_timeout = 1h");
	# A standby that connects again asks for WAL from a segment's beginning on.
	$node->append_conf('postgresql.conf', 'wal_keep_size = 320MB')
	  if $params{allows_streaming};
	$node->append_conf('postgresql.conf', $params{conf}) if $params{conf};
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION dlock');
	return $node;
}

# next_version_install: returns the directory of another installation, for
# new_server.  It has an invented next version of the extension, $next_version.
#
# PostgreSQL finds its files relative to its programs.  So the programs are
# copied, and everything else is linked.
our $next_version = 'made up';

sub next_version_install
{
	my $top = PostgreSQL::Test::Utils::tempdir;
	my %dir;

	foreach my $which ('bindir', 'sharedir', 'pkglibdir', 'libdir')
	{
		my ($path) = run_command([ 'pg_config', "--$which" ]);
		$dir{$which} = [ split m{/}, $path ];
	}
	# the common part of these paths is the installation's parent
	while (!grep { $_->[0] ne $dir{bindir}[0] } values %dir)
	{
		shift @$_ foreach values %dir;
	}
	foreach my $which (keys %dir)
	{
		my ($path) = run_command([ 'pg_config', "--$which" ]);
		my $copy = join '/', $top, @{ $dir{$which} };

		system_or_bail('mkdir', '-p', $copy);
		next if $which eq 'libdir';
		if ($which eq 'bindir')
		{
			system_or_bail('cp', '-L', '-R', "$path/.", $copy);
			symlink $copy, "$top/bin" or -d "$top/bin" or die "$top/bin: $!";
			next;
		}
		symlink $_, "$copy/" . s{.*/}{}r
		  foreach grep { !m{/extension$} } glob "$path/*";
		next if $which ne 'sharedir';
		mkdir "$copy/extension" or die "$copy/extension: $!";
		symlink $_, "$copy/extension/" . s{.*/}{}r foreach glob "$path/extension/*";

		# The next version adds a function, and rewrites a table.
		my ($control) =
		  slurp_file("$path/extension/dlock.control") =~ /default_version = '(.*?)'/;

		append_to_file("$copy/extension/dlock--$control--$next_version.sql", <<'END');
CREATE FUNCTION dlock_made_up() RETURNS text
AS 'MODULE_PATHNAME', 'dlock_version' LANGUAGE C VOLATILE PARALLEL UNSAFE;
ALTER TABLE dlock_versions ALTER version TYPE bigint
    USING version OPERATOR(pg_catalog.+) 0::bigint;
END
	}
	return $top;
}

# poll($what, $sub): waits until the sub returns true.
#
# After an unexpected error of a session, poll() could wait in vain.  So poll()
# dies if an error was not read, or if the sub causes a new error and returns
# false.
sub poll
{
	my ($what, $sub) = @_;

	Dlock::Test::Error->none_unseen($what);
	for (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
	{
		my $errors = Dlock::Test::Error->count;

		return 1 if $sub->();
		die "$what: " . Dlock::Test::Error->last
		  if Dlock::Test::Error->count > $errors;
		usleep(10_000);
	}
	die "timed out waiting: $what";
}

# name_server($node, $user): sets the environment so that programs find the
# server, and connect as this user, if one is given.
sub name_server
{
	my ($node, $user) = @_;

	$ENV{PGHOST} = $node->host;
	$ENV{PGPORT} = $node->port;
	$ENV{PGDATABASE} = 'postgres';
	$ENV{PGUSER} = $user if defined $user;
	return;
}

# ample($seconds): returns this number, or more if PG_TEST_TIMEOUT_DEFAULT says
# that the machine is slow.  Used for a ttl within which the test must do
# something.
sub ample
{
	my ($seconds) = @_;

	return $seconds * (int($PostgreSQL::Test::Utils::timeout_default / 180) || 1);
}

# Start a killed server, when its last process has ended.
sub start_again
{
	my ($node) = @_;

	poll('killed server can be started',
		sub {
			$node->start(fail_ok => 1) && return 1;
			# makes the node see that there is no postmaster
			$node->stop('fast', fail_ok => 1);
			return 0;
		});
}

# Compiles C for LD_PRELOAD.  Returns the library's file, or undef if there is no
# compiler, or the system is not Linux.
sub compile_library
{
	my ($name, $source) = @_;
	my $compiler = $ENV{CC} || $Config{cc};
	my $stem = PostgreSQL::Test::Utils::tempdir() . "/$name";

	return if $^O ne 'linux';
	append_to_file("$stem.c", $source);
	return system("$compiler -shared -fPIC -o $stem.so $stem.c -ldl >$stem.log 2>&1")
	  == 0 ? "$stem.so" : undef;
}

# Returns LD_PRELOAD with this library, after those that it has already.
sub preloaded
{
	my ($library) = @_;

	return join ' ', grep { $_ } $ENV{LD_PRELOAD}, $library;
}

# Returns the ids of processes for which the sub returns true, given id, parent
# and state.
sub processes
{
	my ($condition) = @_;

	return map { $_->[0] } grep { $condition->(@$_) }
	  map { [ /^\s*(\d+)\s+(\d+)\s+(\S)/ ] } `ps -A -o pid= -o ppid= -o state=`;
}

# Returns the files in which these processes have dynamic shared memory.
sub segments
{
	my %files;

	foreach my $pid (@_)
	{
		open my $maps, '<', "/proc/$pid/maps" or next;
		$files{$_} = 1 foreach map { m{ (/dev/shm/PostgreSQL\.\d+)$} } <$maps>;
	}
	return keys %files;
}

# kill_server($node, $alone): kills all of a server's processes, or its
# postmaster alone, and waits until the last process has ended.  Removes the
# shared memory, because the server may not be started again.
sub kill_server
{
	my ($node, $alone) = @_;
	my $postmaster = $node->{_pid};

	# A stopped postmaster starts no more children.  It stops a moment after
	# the signal, or ends by itself, if the disk is full.
	kill('STOP', $postmaster) == 1 or die "no process $postmaster";
	poll('the postmaster is stopped, or has ended',
		sub { !processes(sub { $_[0] == $postmaster && $_[2] !~ /[TZ]/ }) });
	my @children = processes(sub { $_[1] == $postmaster });
	my @segments = segments(@children);
	kill('KILL', @children) unless $alone;
	if (kill(0, $postmaster)) { $node->kill9; }
	else { undef $node->{_pid}; }
	my %killed = map { $_ => 1 } $postmaster, @children;

	poll('processes are gone',
		sub { !processes(sub { $killed{ $_[0] } && $_[2] ne 'Z' }) });
	my $file = $node->data_dir . '/postmaster.pid';
	my ($segment) =
	  -e $file ? slurp_file($file) =~ /^ *\d+ +(\d+) *$/m : ();

	shmctl($segment, 0, 0) if defined $segment;    # IPC_RMID
	# A starting server would mistake a zombie for a running server.
	unlink @segments, $file,
	  $node->host . '/.s.PGSQL.' . $node->port . '.lock';
	return;
}

# Does the server accept clients?  If not, psql would end before it has read
# its input, and a broken pipe could end the test.
sub answers
{
	my ($node) = @_;

	return IPC::Run::run(
		[
			$node->installed_command('pg_isready'),
			'-d', $node->connstr('postgres')
		],
		'>', \my $out);
}

# Acquire a lock in a new session, and return the fence.
sub fence
{
	my ($node, $dbname, $name) = @_;

	$dbname //= 'postgres';
	$name //= 'lock';
	return $node->safe_psql($dbname, "SELECT dlock_acquire('$name')");
}

# fails_with($node, $dbname, $sql, $pattern, $test): tests that psql's error
# output, with SQLSTATE, matches the pattern.
sub fails_with
{
	my ($node, $dbname, $sql, $pattern, $test) = @_;
	my ($out, $err);
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	$node->psql(
		$dbname, $sql,
		stdout => \$out,
		stderr => \$err,
		extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	return like($err, $pattern, $test);
}

# grows($test, @fences): tests that each fence is greater than the previous.
sub grows
{
	my ($test, @fences) = @_;
	my $grows = @fences > 1 && !grep { !/^\d+$/ } @fences;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	for my $i (1 .. $#fences)
	{
		$grows &&= $fences[$i] > $fences[ $i - 1 ];
	}
	return ok($grows, $test) || diag("fences: @fences");
}

# Wait until these processes have ended.
sub backends_gone
{
	my @pids = @_;

	poll("processes @pids are gone", sub { !kill(0, @pids) });
}

sub session
{
	return Dlock::Test::Session->new(@_);
}

# A session's answer with an error.  It is a string like other answers, but
# poll() knows if the test has read it.
package Dlock::Test::Error;

use Scalar::Util qw(refaddr);

use overload
  '""' => sub { delete unseen()->{ refaddr($_[0]) }; return ${ $_[0] }; },
  fallback => 1;

my %unseen;
my $count = 0;
my $last = '';

sub unseen { return \%unseen; }
sub count { return $count; }
sub last { return $last; }

sub is_in
{
	my ($class, $answer) = @_;

	return $answer =~ /^(?:psql:\S* )?ERROR: /m;
}

sub new
{
	my ($class, $answer) = @_;
	my $self = bless \$answer, $class;

	$count++;
	$last = $unseen{ refaddr($self) } = $answer;
	return $self;
}

sub none_unseen
{
	my ($class, $what) = @_;

	foreach my $answer (values %unseen) { die "before \"$what\": $answer\n"; }
	return;
}

sub DESTROY
{
	my ($self) = @_;

	delete $unseen{ refaddr($self) } if ${^GLOBAL_PHASE} ne 'DESTRUCT';
	return;
}

package Dlock::Test::Session;

use IPC::Run;
use Time::HiRes qw(usleep);

=pod

=head1 SESSIONS

=over

=item session($node, $dbname, $options)

Returns a psql that keeps running.  Its results include error output with
SQLSTATEs.  $options is added to the connection string.

=item $session->may_end

From now on, using the session after its end is no error: the answer is empty.

=item $session->start($sql)

Starts a statement.  Waits only for results of earlier statements.  While the
statement waits, only the awaited event wakes its backend, see quiet().

=item $session->is_next

The backend executes nothing else before the next statement, not even the
statements of quiet().

=item $session->answer

Waits for the result of the last statement started.  If the server has closed
the connection, the result is its last message.  If the caller ignores the
result, an error is fatal.

=item $session->answered

Has the answer arrived, so that answer() would not wait?

=item $session->is_over

Has psql ended, because the server has closed the connection?

=item $session->query($sql)

Starts a statement, and waits for its answer.

=item $session->announcements($count)

Waits until $count notifications have arrived since the last call.  Returns the
payloads of all notifications that have arrived, in order.  Answers do not
contain notifications.

=item $session->{pid}

The backend's pid.

=item $session->wait_for($sql)

Repeats the query until the result is "t".

=item $session->until_waits(@sessions)

Queries until these other sessions wait for a dlock lock.

=item $session->quit

=item $session->vanish

Close the session: normally, or by killing psql.

=back

=cut

sub new
{
	my ($class, $node, $dbname, $options) = @_;
	my $connstr = $node->connstr($dbname // 'postgres');
	my $timeout =
	  IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	my $self = bless { in => '', out => '', timeout => $timeout }, $class;

	$connstr .= " $options" if $options;
	$self->{psql} = IPC::Run::start(
		[
			$node->installed_command('psql'),
			'-XAtq', '-v', 'VERBOSITY=verbose', '-d', $connstr, '-f', '-'
		],
		'<', \$self->{in}, '>', \$self->{out}, '2>&1', $timeout);
	$self->{pid} = $self->query('SELECT pg_backend_pid()');
	die "no connection: $self->{pid}" unless $self->{pid} =~ /^\d+$/;
	return $self;
}

sub may_end
{
	my ($self) = @_;

	$self->{may_end} = 1;
	return;
}

sub start
{
	my ($self, $sql) = @_;

	$self->quiet
	  unless $self->{in_block}
	  || $self->{may_end}
	  || $self->{is_next}
	  || $self->{unanswered};
	$self->_send($sql);
	return;
}

# An idle backend sets a timer of 10 seconds for unreported statistics.  When
# its signal comes, it sets the backend's latch, even if the timeout was
# disabled meanwhile.  That would hide a lost wakeup.  So let the backend
# report its statistics, which disables the timeout.  Then set another timer,
# which expires before the wait begins: a statement_timeout, which must cancel
# this statement and no later one.  Wait for that only a short time, because
# the process may be stopped.
sub quiet
{
	my ($self) = @_;
	my $end = time + 2;

	$self->{timeout}->start;
	# statistics are reported after a message
	$self->{in} .= "SELECT pg_catalog.pg_stat_force_next_flush() \\g /dev/null\n";
	# One message is one transaction, even if the message fails.
	$self->{in} .= "SET LOCAL statement_timeout = '10ms'\\; "
	  . 'DO $$BEGIN PERFORM pg_catalog.pg_stat_force_next_flush(); '
	  . 'PERFORM pg_catalog.pg_sleep(1); '
	  . 'EXCEPTION WHEN query_canceled THEN NULL; END$$ \g /dev/null'
	  . "\n\\echo quiet\n";
	while ($self->{out} !~ /^quiet\n/m && !$self->is_over && time < $end)
	{
		$self->{psql}->pump_nb;
		usleep(1_000);
	}
	return;
}

sub _send
{
	my ($self, $sql) = @_;

	# Answers after the session's end are empty.
	die "the session is over: $sql\n" if $self->is_over && !$self->{may_end};
	delete $self->{is_next};
	$self->{timeout}->start;
	$self->{in} .= "$sql;\n\\echo end of answer\n";
	$self->{unanswered}++;
	$self->_note_blocks($sql);
	$self->{psql}->pump_nb while length $self->{in} && !$self->is_over;
	return;
}

sub is_next
{
	my ($self) = @_;

	$self->{is_next} = 1;
	return;
}

# Note if these statements leave a transaction block open.
sub _note_blocks
{
	my ($self, $sql) = @_;

	$sql =~ s/(\$\w*\$).*?\1|'[^']*'|--[^\n]*//gs;
	foreach my $statement (split /;/, $sql)
	{
		$self->{in_block} = 1
		  if $statement =~ /^\s*(?:BEGIN|START\s+TRANSACTION)\b/i;
		$self->{in_block} = 0
		  if $statement =~
		  /^\s*(?:(?:COMMIT|ROLLBACK|END|ABORT)\b(?!.*\b(?:TO|CHAIN)\b)|PREPARE\s+TRANSACTION\b)/is;
	}
	return;
}

# Returns psql's output up to the end of the answer.
sub read_answer
{
	my ($self) = @_;

	$self->{timeout}->start;
	$self->{psql}->pump
	  while $self->{out} !~ /^end of answer\n/m && !$self->is_over;
	my ($answer, $rest) = split /^end of answer\n/m, $self->{out}, 2;
	$self->{out} = $rest // '';
	$self->{unanswered}-- if $self->{unanswered};
	$answer //= '';
	# Notifications can precede the answer.
	if ($answer =~ s/\A(.*?)^quiet\n//ms)
	{
		$answer = join('', $1 =~ /^Asynchronous notification .*\n/mg) . $answer;
	}
	return $answer;
}

sub answer
{
	my ($self) = @_;
	my $answer = $self->read_answer;

	chomp $answer;
	$answer = $self->_take_notifications($answer);
	return $answer unless Dlock::Test::Error->is_in($answer);
	die "unexpected: $answer\n" unless defined wantarray;
	return Dlock::Test::Error->new($answer);
}

# psql prints notifications after the result with which they arrived.
sub _take_notifications
{
	my ($self, $answer) = @_;
	my @lines;

	return $answer unless $answer =~ /^Asynchronous notification /m;
	foreach my $line (split /\n/, $answer)
	{
		if ($line =~
			/^Asynchronous notification ".*?"(?: with payload "(.*)")? received /)
		{
			push @{ $self->{announcements} }, $1 // '';
		}
		else
		{
			push @lines, $line;
		}
	}
	return join "\n", @lines;
}

sub announcements
{
	my ($self, $count) = @_;
	my $come = $self->{announcements} //= [];

	Dlock::Test::poll("$count announcements",
		sub { $self->query('SELECT 1'); @$come >= $count });
	delete $self->{announcements};
	return @$come;
}

sub answered
{
	my ($self) = @_;

	$self->{timeout}->start;
	$self->{psql}->pump_nb unless $self->is_over;
	return $self->{out} =~ /^end of answer\n/m || $self->is_over;
}

sub is_over
{
	my ($self) = @_;

	return !$self->{psql}->pumpable;
}

sub query
{
	my ($self, $sql) = @_;

	$self->_send($sql);
	return $self->answer;
}

sub wait_for
{
	my ($self, $sql) = @_;

	return Dlock::Test::poll($sql, sub { $self->query($sql) eq 't' });
}

sub until_waits
{
	my ($self, @sessions) = @_;

	foreach my $waiter (@sessions)
	{
		$self->wait_for("SELECT count(*) = 1 FROM dlock_locks "
			  . "WHERE pid = $waiter->{pid} AND NOT granted");
	}
	return;
}

sub quit
{
	my ($self) = @_;

	return if $self->{finished}++;
	$self->{timeout}->start;
	$self->{in} .= "\\q\n";
	# fails if psql has already ended
	eval { $self->{psql}->finish; } or $self->{psql}->kill_kill;
	return;
}

sub vanish
{
	my ($self) = @_;

	$self->{psql}->kill_kill(coup_d_grace => 'KILL');
	$self->{finished} = 1;
	return;
}

1;
