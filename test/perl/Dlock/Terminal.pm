
=pod

=head1 NAME

Dlock::Terminal - psql, as if at a terminal

=head1 DESCRIPTION

This is a psql that keeps running, and prints tables, command tags, errors and
notifications as a user sees them.  The output of Dlock::Test::Session is
easier to compare.

=head1 METHODS

=over

=item $psql->say($text)

Types the text, without waiting for the answer.

=item $psql->answered

Has the answer arrived, so that answer() would not wait?

=item $psql->answer

Waits for the output, and returns it without notifications, which are in @{
$psql->{notes} }.

=item $psql->is_up

=item $psql->end

is_up() tells if psql is running.  end() kills psql.

=item $psql->{pid}

The backend's pid.

=back

=cut

package Dlock::Terminal;

use strict;
use warnings FATAL => 'all';

# Dlock::Test::Session reads the answers
use parent -norequire, 'Dlock::Test::Session';

use Dlock::Test ();
use IPC::Run;
use PostgreSQL::Test::Utils;

sub new
{
	my ($class, $connstr) = @_;
	my $timeout =
	  IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	my $self = bless
	  { in => '', out => '', notes => [], timeout => $timeout }, $class;

	$self->{psql} = IPC::Run::start(
		[ 'psql', '-X', '-d', $connstr ],
		'<', \$self->{in}, '>', \$self->{out}, '2>&1', $timeout);
	$self->say("SELECT pg_backend_pid() AS pid \\gset\n"
		  . "\\echo :pid\n\\unset pid");
	($self->{pid}) = $self->answer =~ /^(\d+)$/m
	  or die "no connection for $connstr\n";
	return $self;
}

sub is_up
{
	my ($self) = @_;

	return $self->{psql}->pumpable;
}

sub say
{
	my ($self, $text) = @_;

	$self->{timeout}->start;
	$self->{in} .= "$text\n\\echo end of answer\n";
	$self->{psql}->pump_nb
	  while length $self->{in} && $self->{psql}->pumpable;
	return;
}

# Notifications are removed and kept separately
sub answer
{
	my ($self) = @_;
	my $answer = $self->read_answer;

	push @{ $self->{notes} }, $1
	  while $answer =~ s/^(Asynchronous notification "[^\n]*)\n//m;
	return $answer;
}

sub end
{
	my ($self) = @_;

	$self->{psql}->kill_kill(coup_d_grace => 'KILL');
	return;
}

1;
