
=pod

=head1 NAME

Dlock::Example - runs the programs of examples/ for tests

=head1 DESCRIPTION

A program is started in the same way as by a user.  The test reads and writes
its lines, and can stop and kill it.

=over

=item example_server()

Returns a running server with dlock.  The environment names the server, and the
programs' role "app", which can create tables.

=item Dlock::Example->new($title, \%env, @command)

Starts a program, with the Python client in its path.  The title is for
messages.

=item $program->says($pattern)

Waits until another line of output matches, and returns the line.  If the
program ends before, that is an error.

=item $program->type($line)

Writes a line of input.

=item $program->ends($code, $test)

Closes the input, waits until the program has ended, tests the exit code, and
returns the output.

=item $program->err

The program's error output.

=item $program->signal($signal)

Sends the signal.  After STOP, the process is stopped when the call returns.

=item $program->vanish

Kills the program.

=back

=cut

package Dlock::Example;

use strict;
use warnings FATAL => 'all';

use Dlock::Lease qw(stop_process continue_process);
use Dlock::Test;
use Exporter 'import';
use File::Basename qw(dirname);
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(example_server $examples);

my $top = dirname(__FILE__) . '/../../..';
our $examples = "$top/examples";

sub example_server
{
	my $node = new_server('main');

	$node->safe_psql('postgres',
		'CREATE ROLE app LOGIN; GRANT CREATE ON SCHEMA public TO app');
	name_server($node);
	# programs must name their connections themselves
	delete $ENV{PGAPPNAME};
	$ENV{PYTHONPATH} = "$top/clients/python";
	$ENV{PYTHONDONTWRITEBYTECODE} = 1;
	return $node;
}

sub new
{
	my ($class, $title, $env, @command) = @_;
	my $self = bless { title => $title, in => '', out => '', err => '' }, $class;
	local @ENV{ 'PGUSER', keys %$env } = ('app', values %$env);

	$self->{timeout} =
	  IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	$self->{run} = IPC::Run::start(\@command, '<', \$self->{in}, '>',
		\$self->{out}, '2>', \$self->{err}, $self->{timeout});
	$self->{pid} = $self->{run}{KIDS}[0]{PID};
	$self->{read} = 0;
	return $self;
}

sub says
{
	my ($self, $pattern) = @_;

	$self->{timeout}->start;
	while (1)
	{
		while (substr($self->{out}, $self->{read}) =~ /^(.*)\n/)
		{
			my $line = $1;

			$self->{read} += length($line) + 1;
			return $line if $line =~ $pattern;
		}
		die "$self->{title} ended, and has not said $pattern:\n"
		  . "$self->{out}\n$self->{err}\n"
		  unless $self->{run}->pumpable;
		$self->{run}->pump;
	}
}

sub type
{
	my ($self, $line) = @_;

	$self->{timeout}->start;
	$self->{in} .= "$line\n";
	$self->{run}->pump_nb while length $self->{in} && $self->{run}->pumpable;
	return;
}

sub ends
{
	my ($self, $code, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	$self->{timeout}->start;
	eval { $self->{run}->finish; 1 } or die "$self->{title} does not end: $@";
	is($self->{run}->full_result >> 8, $code, $test)
	  or diag($self->{out}, $self->{err});
	return $self->{out};
}

sub err
{
	my ($self) = @_;

	return $self->{err};
}

sub signal
{
	my ($self, $signal) = @_;

	stop_process($self->{pid}), return if $signal eq 'STOP';
	continue_process($self->{pid}), return if $signal eq 'CONT';
	kill($signal, $self->{pid}) == 1 or die "no process $self->{pid}";
	return;
}

sub vanish
{
	my ($self) = @_;

	$self->{run}->kill_kill(grace => 0, coup_d_grace => 'KILL');
	return;
}

1;
