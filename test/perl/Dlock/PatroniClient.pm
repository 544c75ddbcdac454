
=pod

=head1 NAME

Dlock::PatroniHistory - the history of clients while Patroni starts their
server

=head1 DESCRIPTION

This is a Dlock::Torture with clients of the class Dlock::PatroniClient.  A
client runs during one start of its server.  Patroni may restart the server at
any time, perhaps as a standby.  Then the test compares the server's state with
the history before the clients continue.

If the file "stop.ROUND.end.CLIENT" exists, the client ends.

The option "is_there" of start_clients() is a sub that tells if the server
still exists.  If it does not, the load, a Dlock::PatroniLoad, does not wait for
answers.

=cut

package Dlock::PatroniHistory;

use strict;
use warnings FATAL => 'all';

use parent 'Dlock::Torture';

sub client
{
	my ($self, $load, $number) = @_;

	return Dlock::PatroniClient->new($self, $load, $number);
}

sub start_clients
{
	my ($self, $node, $numbers, %options) = @_;

	$options{life} = $node->safe_psql('postgres',
		'SELECT pg_postmaster_start_time()');
	$self->{life} = $options{life};
	my $load = $self->SUPER::start_clients($node, $numbers, %options);
	$load->{is_there} = $options{is_there};
	return bless $load, 'Dlock::PatroniLoad';
}

package Dlock::PatroniClient;

use parent -norequire, 'Dlock::TortureClient';

use Dlock::TortureClient;
use Time::HiRes qw(usleep);

sub new
{
	my ($class, $history, $load, $number) = @_;
	my $self = $class->SUPER::new($history, $load, $number);

	$self->{life} = $history->{life};
	return $self;
}

sub connect
{
	my ($self) = @_;

	$self->SUPER::connect or return 0;
	my $is_the_same = $self->{session}->query('SELECT NOT pg_is_in_recovery() '
		  . "AND pg_postmaster_start_time() = '$self->{life}'");

	return 1 if $is_the_same eq 't';
	$self->{session}->vanish;
	usleep(100_000);
	return 0;
}

sub step
{
	my ($self) = @_;

	return 0 if -e "$self->{stop}.end.$self->{client}";
	return $self->SUPER::step;
}

package Dlock::PatroniLoad;

use parent -norequire, 'Dlock::Load';

# After its end, the server owes no answers.
sub _unanswered
{
	my ($self, $count) = @_;
	my @numbers = $self->SUPER::_unanswered($count);

	return @numbers && $self->{is_there}->() ? @numbers : ();
}

1;
