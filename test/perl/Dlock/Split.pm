
=pod

=head1 NAME

Dlock::Split - a primary that runs on beside its successor, cut off from it

=head1 DESCRIPTION

A primary is cut off from its standbys for good.  When a standby is about to be
promoted, the old primary's answers no longer count in the history.  But they
must be correct.  If standbys count for a lease, the old primary honours the
lease for at most its ttl and a quarter, and not after its successor has
granted the lock to another client.  It acknowledges nothing that the successor
does not have.

=head1 METHODS

=over

=item Dlock::Split->new($history, $load)

Begins to record answers to the clients of this load.

=item $split->learn($what, $time, $id, $result, %call)

Processes a line that a client has written.

=item $split->learn_ttls

Call this after the old primary's calls before the promotion were read, and
before the new primary's state is learned.

=item $split->found($there)

Sets the new primary's state: tickets (number => row) and leases.

=item $split->check

Checks the old primary's answers, after both loads have ended.

=back

=cut

package Dlock::Split;

use strict;
use warnings FATAL => 'all';

use Dlock::Client qw($ttl);
use Dlock::History qw(is_durable now);
use List::Util qw(max);
use Test::More;

sub new
{
	my ($class, $history, $load) = @_;

	return bless {
		history => $history,
		load => $load,
		promoted => now(),
		calls => {},
		answers => [],
		ttls => {}    # lease => longest ttl that it can have had
	}, $class;
}

sub learn
{
	my ($self, $what, $time, $id, $result, %call) = @_;

	if ($what eq 'asks')
	{
		$self->{calls}{$id} = { %call, id => $id, begin => $time };
	}
	elsif ($what eq 'told')
	{
		my $call = $self->{calls}{$id} // $self->{history}{calls}{$id};

		push @{ $self->{answers} },
		  { %$call, answer => $time, result => $result };
	}
	return;
}

# A call that failed may have changed the ttl or not.
sub learn_ttls
{
	my ($self) = @_;

	foreach my $lease (values %{ $self->{history}{leases} })
	{
		my @ttls = $lease->{ttl};

		foreach my $call (@{ $lease->{ttls} // [] })
		{
			@ttls = () if $call->{answer} && $call->{result} =~ /^\d/;
			push @ttls, $call->{ttl};
		}
		$self->{ttls}{ $lease->{number} } = max(@ttls);
	}
	return;
}

sub found
{
	my ($self, $there) = @_;
	my $history = $self->{history};

	return if $self->{there};
	$self->{there} = $there;

	# Lost changes do not count.  Their numbers may be reused.
	foreach my $number (keys %{ $history->{tickets} })
	{
		my $told = $history->{tickets}{$number}{told};

		delete $history->{tickets}{$number}
		  if $told->{round} == $self->{load}{round} &&
		  !$history->{tickets}{$number}{live} &&
		  ($told->{answer} // 0) > $self->{promoted};
	}
	return;
}

sub check
{
	my ($self) = @_;
	my $history = $self->{history};
	my $count = 0;
	my %own;    # ticket that the successor does not have => lease

	foreach my $call (grep { $_->{result} !~ /^error|^null|^f$/ }
		@{ $self->{answers} })
	{
		my ($op, $result) = ($call->{op}, $call->{result});
		my $lasting = is_durable($call->{sync}, 'there');

		next unless $call->{scope} eq 'lease' || $op =~ /^(?:open|renew)$/;
		if ($op eq 'renew')
		{
			my $lease = $history->{leases}{ $call->{lease} };

			$self->_check_honoured($call, $lease) if $lease;
			next;
		}
		if ($op eq 'retime')
		{
			$self->_check_retimed($call, $history->{leases}{ $call->{lease} });
			next;
		}
		foreach my $number (
			$op =~ /^(?:check|guard|wait)$/ ? $call->{ticket} :
			$result =~ /\d+/g)
		{
			my $row = $self->{there}{$number};
			my $ticket = $history->{tickets}{$number};
			my $held = $row && $row->{granted};

			$own{$number} = $call->{lease}
			  if $op =~ /acquire|enqueue/ && !$row &&
			  $call->{begin} > $self->{promoted};
			if ($held && $op !~ /enqueue|open/)
			{
				$self->_check_honoured($call, $history->{leases}{ $row->{lease} },
					$ticket);
				$count++;
			}
			elsif ($op =~ /^(?:check|guard)$/)
			{
				$self->_check_unacknowledged($call,
					$row ? $row->{lease} : $own{$number});
			}
			elsif ($lasting && $op =~ /acquire|enqueue|open|wait/ &&
				($row ? !$held && $op =~ /acquire|wait/ :
					!$ticket && !$history->{leases}{$number}))
			{
				# Dlock::Checker checks the earlier answers
				$history->problem("$call->{id}: $op gave $number, which the new "
					  . 'primary has ' . ($row ? 'waiting' : 'not'));
			}
		}
	}
	note "the old primary has confirmed holders $count times";
	return;
}

# The old primary has answered that a ticket holds.  The successor has the ticket
# waiting or, if its request began later, not at all.
sub _check_unacknowledged
{
	my ($self, $call, $number) = @_;
	my $history = $self->{history};
	my $lease = $history->{leases}{ $number || 0 };

	$history->problem("$call->{id}: $call->{op} confirms ticket $call->{ticket}, "
		  . 'whose grant no standby has')
	  if $lease && $self->{there}{$number} &&
	  $lease->{told}{begin} < $self->{promoted} &&
	  $history->standbys_count($lease, $self->{promoted});
	return;
}

# If standbys count for a change, the successor must have the change.
sub _check_retimed
{
	my ($self, $call, $lease) = @_;
	my $history = $self->{history};

	$history->problem("$call->{id}: retime gave $call->{result}, and began "
		  . 'after the new primary was promoted')
	  if $lease && $history->standbys_count($lease, $self->{promoted}) &&
	  $call->{begin} > $self->{promoted};
	return;
}

# Returns how long a lease may live on the old primary after a standby's last
# answer.  The longest ttl counts: a ttl that it can have had, or a ttl that was
# requested before the promotion, even if the answer came later.
sub _honoured_for
{
	my ($self, $lease) = @_;
	my $longest = $self->{ttls}{ $lease->{number} } // ($lease->{short} || $ttl);

	foreach my $call (
		grep { $_->{op} eq 'retime' && $_->{lease} == $lease->{number} }
		@{ $self->{answers} })
	{
		$longest = $call->{ttl}
		  if $call->{begin} < $self->{promoted} && $call->{ttl} > $longest;
	}
	return 1.25 * $longest;
}

# The old primary has answered that it honours the lease and the ticket.
sub _check_honoured
{
	my ($self, $call, $lease, $ticket) = @_;
	my $history = $self->{history};
	my $late =
	  $call->{begin} - $self->{promoted} - $self->_honoured_for($lease);

	return if !$history->standbys_count($lease, $self->{promoted});
	$history->problem("$call->{id}: $call->{op} honours lease $lease->{number} "
		  . "$late s after its ttl and a quarter, with no standby to prolong it")
	  if $late > 0;
	return if !$ticket || $history->{forced}{ $ticket->{number} };
	foreach my $hold (grep { $_->{round} == $history->{round} }
		@{ $history->{holds} })
	{
		my $other = $hold->{ticket};

		$history->problem("$call->{id}: $call->{op} honours "
			  . $history->tell($ticket) . ' beside ' . $history->tell($other))
		  if $other->{name} eq $ticket->{name} &&
		  $other->{number} > $ticket->{number} &&
		  $hold->{from} < $call->{begin} &&
		  ($hold->{mode} eq 'exclusive' ||
			$ticket->{mode} eq 'exclusive' && !$ticket->{lowered});
	}
	return;
}

1;
