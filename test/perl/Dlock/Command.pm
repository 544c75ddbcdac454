
=pod

=head1 NAME

Dlock::Command - runs the command dlock for tests

=head1 METHODS

=over

=item Dlock::Command->new($node, @arguments)

Starts the command with the node's connection string.  The first argument can
be a string instead of a node.

=item $command->exit_code

Waits until the command has ended.  A signal that ended it counts as 128 + n.

=item $command->out, err

The command's output, or its error output.

=item $command->signal($signal)

Sends the signal to the process that was started.

=item dlock($node, @arguments)

Runs the command.  Returns exit code, output, and error output.

=item worker($name, $how)

A program for dlock run.  It ignores SIGTERM, and starts two copies of itself,
one of them in a session of its own.  Each of the three processes notes the
time repeatedly.  With $how "ends", SIGTERM ends the program.

=item $worker->{argv}

=item $worker->runs

The number of the program's processes, without zombies.

=item $worker->first, last

The first and the last time noted, by CLOCK_BOOTTIME.

=item children($pid)

The child processes of this process.

=back

=cut

package Dlock::Command;

use strict;
use warnings FATAL => 'all';

use Dlock::Lease qw(process_state);
use Dlock::Test;
use Exporter 'import';
use IPC::Run;
use PostgreSQL::Test::Utils;

our @EXPORT = qw(dlock worker children);

sub new
{
	my ($class, $node, @arguments) = @_;
	my $self = bless { out => '', err => '' }, $class;

	$node = $node->connstr('postgres') if ref $node;
	$self->{timeout} =
	  IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	$self->{run} = IPC::Run::start([ 'dlock', '-d', $node, @arguments ],
		'<', \undef, '>', \$self->{out}, '2>', \$self->{err}, $self->{timeout});
	$self->{pid} = $self->{run}{KIDS}[0]{PID};
	return $self;
}

sub exit_code
{
	my ($self) = @_;

	$self->{run}->finish;
	my $status = $self->{run}->full_result;

	return $status & 127 ? 128 + ($status & 127) : $status >> 8;
}

sub out
{
	my ($self) = @_;

	$self->{run}->pump_nb if $self->{run}->pumpable;
	return $self->{out};
}

sub err
{
	my ($self) = @_;

	$self->{run}->pump_nb if $self->{run}->pumpable;
	return $self->{err};
}

sub signal
{
	my ($self, $signal) = @_;

	return kill($signal, $self->{pid});
}

sub dlock
{
	my $self = Dlock::Command->new(@_);
	my $code = $self->exit_code;

	return ($code, $self->{out}, $self->{err});
}

sub children
{
	my ($pid) = @_;

	return map { split ' ', slurp_file($_) } glob "/proc/$pid/task/*/children";
}

my $program = <<'END';
use POSIX ();
use Time::HiRes qw(clock_gettime);
my ($file, $how) = @ARGV;
$SIG{TERM} = 'IGNORE' unless $how eq 'ends';
fork or POSIX::setsid if fork;
open my $notes, '>>', $file;
$notes->autoflush(1);
while (1)
{
	syswrite $notes, $$ . ' ' . clock_gettime(7) . "\n";
	select undef, undef, undef, 0.005;
}
END

sub worker
{
	my ($name, $how) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir . "/$name";

	append_to_file($file, '');
	return bless {
		file => $file,
		argv => [ $^X, '-MIO::Handle', '-e', $program, $file, $how // 'stays' ]
	  },
	  'Dlock::Command::Worker';
}

package Dlock::Command::Worker;

sub notes
{
	my ($self) = @_;

	return map { [split] } grep { /^\d+ \d+\.\d+$/ } split /\n/,
	  PostgreSQL::Test::Utils::slurp_file($self->{file});
}

sub runs
{
	my ($self) = @_;
	my %pids = map { $_->[0] => 1 } $self->notes;

	return scalar grep { Dlock::Lease::process_state($_) =~ /^[^ZX]/ } keys %pids;
}

# Wait until all three processes run.
sub started
{
	my ($self) = @_;

	return Dlock::Test::poll("$self->{file} runs", sub { $self->runs == 3 });
}

sub first
{
	my ($self) = @_;
	my ($first) = sort { $a <=> $b } map { $_->[1] } $self->notes;

	return $first;
}

sub last
{
	my ($self) = @_;
	my ($last) = sort { $b <=> $a } map { $_->[1] } $self->notes;

	return $last;
}

1;
