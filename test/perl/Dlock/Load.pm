
=pod

=head1 NAME

Dlock::Load - clients of dlock, each in a process of its own

=head1 DESCRIPTION

Each client reports its answers over a pipe.  So the test knows the number of
answers, and the clients that have got no answer.

=head1 METHODS

=over

=item Dlock::Load->new($history, $node, $numbers, %options)

Starts these clients.  With off => $percent, this percentage of their calls
uses synchronous_commit = off.

=item $load->{answers}

The number of answers so far.

=item $load->await($count)

Waits for this number of answers.

=item $load->await_each($count)

Waits until each client has this many answers from now on.

=item $load->run($hurt)

Calls the sub $hurt repeatedly, with the number of answers so far, until $hurt
returns false.  Then waits until each client has got another answer.

=item $load->release($end, @numbers)

Ends these clients, or all.  The sub $end must end their sessions.  If clients
are given, $end is called repeatedly until the clients have ended.

=back

=cut

package Dlock::Load;

use strict;
use warnings FATAL => 'all';

use Dlock::Test;
use IO::Select;
use POSIX ();
use PostgreSQL::Test::Utils;

sub new
{
	my ($class, $history, $node, $numbers, %options) = @_;
	my $self = bless {
		history => $history,
		node => $node,
		round => $history->{round},
		off => $options{off} // 0,
		stop => "$history->{dir}/stop.$history->{round}",
		clients => {},     # pid => number
		answers => 0,
		answered => {},    # number => answers since the counters were reset
		over => 0
	}, $class;

	pipe($self->{reader}, $self->{writer}) or die "pipe: $!";
	foreach my $number (@$numbers)
	{
		my $pid = fork() // die "fork: $!";

		if ($pid == 0)
		{
			close $self->{reader};
			my $done = eval { $history->client($self, $number)->run; 1; };
			warn $@ unless $done;
			POSIX::_exit($done ? 0 : 1);
		}
		$self->{clients}{$pid} = $number;
	}
	close delete $self->{writer};
	$self->{reader}->blocking(0);
	return $self;
}

# Reads the clients' bytes, one for each answer.  Returns false if all clients
# have ended.
sub _count
{
	my ($self) = @_;
	my $length;

	while ($length = sysread($self->{reader}, my $bytes, 4096))
	{
		$self->{answers} += $length;
		$self->{answered}{ ord $_ }++ foreach split //, $bytes;
	}
	return !defined $length;
}

sub await
{
	my ($self, $count) = @_;

	while ($self->{answers} < $count)
	{
		IO::Select->new($self->{reader})->can_read;
		$self->_count or $self->{answers} >= $count
		  or die 'clients have ended before their time';
	}
	return;
}

# Returns the clients with fewer answers since the counters were reset.
sub _unanswered
{
	my ($self, $count) = @_;

	$self->_count;
	return grep { ($self->{answered}{$_} // 0) < $count }
	  values %{ $self->{clients} };
}

sub await_each
{
	my ($self, $count) = @_;

	$self->_count;
	$self->{answered} = {};
	return if eval {
		poll('clients are answered', sub { !$self->_unanswered($count) });
		1;
	};
	$self->{history}->problem('no answer for client '
		  . join(', ', sort { $a <=> $b } $self->_unanswered($count))
		  . ":\n" . _activity($self->{node}));
	return;
}

sub run
{
	my ($self, $hurt) = @_;

	$self->await_each(1);
	while ($hurt->($self->{answers}))
	{
		$self->_count;
	}
	$self->await_each(1);
	return;
}

sub release
{
	my ($self, $end, @numbers) = @_;
	my $all = !@numbers;
	my $clients = $self->{clients};
	my %ends = map { $_ => 1 } $all ? values %$clients : @numbers;

	append_to_file($self->{stop} . ($all ? '' : ".$_"), '') foreach keys %ends;
	$self->{history}->note_end($self) if $all;
	$end->();
	poll('clients have seen the end', sub {
			$self->_count;
			foreach my $pid (grep { $ends{ $clients->{$_} } } keys %$clients)
			{
				next unless waitpid($pid, POSIX::WNOHANG) == $pid;
				$self->{history}->problem("client $clients->{$pid} failed")
				  if $? != 0;
				delete $clients->{$pid};
			}
			return 1 if !grep { $ends{$_} } values %$clients;
			$end->() unless $all;
			return 0;
		});
	if ($all)
	{
		close $self->{reader};
		$self->{over} = 1;
	}
	return;
}

sub _activity
{
	my ($node) = @_;
	my $result = eval {
		$node->safe_psql('postgres',
			q{SELECT pid, backend_type, wait_event, state, query
				FROM pg_stat_activity WHERE backend_type ~ 'client|dlock';
			  SELECT name, ticket, mode, granted, "position", scope, pid, lease
				FROM dlock_locks});
	};

	return $result // "no answer: $@";
}

1;
