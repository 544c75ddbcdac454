
=pod

=head1 NAME

Dlock::Torture - Dlock::Checker's rules, for clients that are hurt

=head1 DESCRIPTION

The clients are of the class Dlock::TortureClient.  Their sessions can end
before the server does, and their calls can be canceled.  Additional rules:

=over

=item *

If a client was told that it holds a lock, no other client is told later that
it waits for the lock, or holds it exclusively, with a smaller ticket.

=item *

No guarded write becomes visible after a write with a greater fence.  Durably
committed writes are not lost.

=item *

Each grant to a listening session is announced to it, unless the ticket is
released or the session ends before.

=item *

A ticket or lease that has ended does not come back while the server runs.  For
the answers of a primary that was cut off from its standbys, see Dlock::Split.

=item *

At any time, a view of the locks shows holders that may hold together, and
waiters in the order of their tickets behind them.

=item *

Each client gets an answer again, when all stopped processes continue.

=back

=cut

package Dlock::Torture;

use strict;
use warnings FATAL => 'all';

use parent 'Dlock::Checker';

use Dlock::History qw(is_durable now);
use Dlock::Split;
use Dlock::Test;
use Dlock::TortureClient qw(@blocking $ends $most_slots);
use PostgreSQL::Test::Utils;

# A higher level of synchronous_commit waits for more.
my %order =
  (off => 0, local => 1, remote_write => 2, on => 3, remote_apply => 4);

=pod

=head1 METHODS

This is a Dlock::Checker, and has these additional methods:

=over

=item Dlock::Torture->new($seed, $clients)

Fields that can be changed: {levels}, from which clients choose their
synchronous_commit; {shorts}, the seconds after which short leases expire;
{apart}, true if short leases have locks of their own; and {quorum}, true if
standbys count for leases.

=cut

sub new
{
	my ($class, $seed, $clients) = @_;
	my $self = $class->SUPER::new($seed);

	$self->{clients} = $clients;
	$self->{seen} = [];       # tickets that were in a queue, or held
	$self->{forced} = {};     # number => call that may have ended it by force
	$self->{forces} = [];     # these calls
	$self->{writes} = [];     # tickets with guarded writes that were answered
	$self->{shorts} = [0.2];
	$self->{apart} = 0;
	$self->{quorum} = 0;
	$self->{results} = {};
	$self->{heads} = {};      # "lock ticket" that could hold => time since which it is seen
	return $self;
}

sub client
{
	my ($self, $load, $number) = @_;

	return Dlock::TortureClient->new($self, $load, $number);
}

=pod

=item Dlock::Torture::prepare($node)

Creates the table of the guarded writes.

=cut

sub prepare
{
	my ($node) = @_;

	$node->safe_psql('postgres',
		q{CREATE TABLE guarded (name text PRIMARY KEY, fence bigint, stale int);
		  INSERT INTO guarded SELECT name, 0, 0
			FROM unnest('{x1,x2,x3,x7,x8,x9,b1,b2,b3}'::text[]) AS name});
	return;
}

=pod

=item $history->torture($node, $hurt, $end, %options)

Runs the clients.  Calls the sub $hurt repeatedly, with the number of answered
calls so far, until $hurt returns false.  When each client has got another
answer, calls the sub $end, which must end their sessions.  The option "off" is
the same as of load().  Returns the number of answers.

=cut

sub torture
{
	my ($self, $node, $hurt, $end, %options) = @_;
	my $load = $self->start_clients($node, [ 1 .. $self->{clients} ], %options);

	$load->run($hurt);
	$load->release($end);
	$self->read_calls($load);
	return $load->{answers};
}

=pod

=item $history->look($session)

Checks the current holders and queues of all locks.

=cut

sub look
{
	my ($self, $session) = @_;

	$self->_look_at_heads($session);
	my $wrong = $session->query(
		qq{WITH l AS (SELECT *, lag(ticket) OVER (PARTITION BY name
											ORDER BY "position") AS before,
							max(ticket) FILTER (WHERE granted)
								OVER (PARTITION BY name) AS holder
					   FROM dlock_locks)
		  SELECT 'holders of ' || name || ': ' ||
				 array_agg((ticket, mode, permits, scope))::text
			FROM l WHERE granted GROUP BY name
		  HAVING count(*) > 1 AND bool_or(mode = 'exclusive')
			  OR max(slots) > 0 AND sum(permits) > greatest(max(slots), $most_slots)
		   UNION ALL
		  SELECT 'ticket ' || ticket || ' of ' || name || ' waits behind '
				 || before || ', and ' || holder || ' holds'
			FROM l WHERE "position" > 0 AND NOT granted
			 AND (ticket < before OR ticket < holder)});

	# the message of a server that shuts down is no problem
	$self->problem($wrong) if $wrong ne '' && !$session->is_over;
	return;
}

# Checks that the head of a queue does not fit beside the holders.  A lease's
# ended ticket may block the head until the worker has written the end, and is
# not shown.  So with leases, a fitting head is an error only if nothing is
# left to be written, for longer than any process is stopped.
sub _look_at_heads
{
	my ($self, $session) = @_;
	my $now = now();
	my ($lag, @heads) = split /\n/, $session->query(
		q{SELECT extract(epoch FROM journal_lag)::text FROM dlock_stats
		   UNION ALL
		  SELECT name || ' ' || min(ticket) FILTER (WHERE "position" = 1)
			FROM dlock_locks GROUP BY name
		  HAVING bool_and(CASE "position" WHEN 0 THEN granted ELSE true END)
			 AND CASE WHEN count(*) FILTER (WHERE granted) > 0
				 THEN NOT bool_or(mode = 'exclusive' AND "position" < 2)
				 ELSE name ~ '^[bd]' END
			 AND count(*) FILTER (WHERE "position" = 1) > 0
			 AND sum(permits) FILTER (WHERE "position" < 2) <=
				 coalesce(max(slots), 2147483647)});
	my %heads = map { $_ => 1 } @heads;

	# an error in the query itself would repeat for ever
	$self->problem($lag) if ($lag // '') =~ /^ERROR:  42/;
	$self->problem("$_ waits, and would fit beside the holders")
	  foreach grep { /^[bd]/ } @heads;
	return if ($lag // '') !~ /^[\d.]+$/ || $lag > 0;
	delete $self->{heads}{$_}
	  foreach grep { !$heads{$_} } keys %{ $self->{heads} };
	foreach my $head (grep { !/^[bd]/ } @heads)
	{
		$self->{heads}{$head} //= $now;
		next if $now - $self->{heads}{$head} < 3;
		$self->problem("$head waits, and would fit beside the holders");
		$self->{heads}{$head} = $now + 3600;
	}
	return;
}

=pod

=item $history->cut_off($load)

Call this before the primary of this load is cut off from its standbys for
good.  Returns when each client has a lease or ticket for which standbys count.

=item $history->fail_over($load)

Call this when no standby receives from the primary any more, before a standby
is promoted.  Later answers of the old primary do not count in the history, but
check_old() checks them.

=item $history->check_old

Checks the answers that the old primary gave beside the new primary, after the
end of both loads.

=cut

sub cut_off
{
	my ($self, $load) = @_;

	append_to_file("$load->{stop}.alone", '');
	$load->await_each(4);
	$self->{killed} = now();
	return;
}

sub fail_over
{
	my ($self, $load) = @_;

	$self->{split} = Dlock::Split->new($self, $load);
	return;
}

sub check_old
{
	my ($self) = @_;

	return (delete $self->{split})->check;
}

# Is this the old primary's load?
sub _is_old
{
	my ($self, $load) = @_;

	return $self->{split} && $self->{split}{load} == $load;
}

# Answers of an old primary do not count after it was cut off.
sub note_end
{
	my ($self, $load) = @_;

	$self->SUPER::note_end($load) unless $self->_is_old($load);
	return;
}

sub _learn
{
	my ($self, $load, $what, $time, $id, $result, %call) = @_;
	my @line = ($what, $time, $id, $result, %call);

	if ($what ne 'odd' && $self->_is_old($load) &&
		$time > $self->{split}{promoted})
	{
		return $self->{split}->learn(@line);
	}
	elsif ($what eq 'told')
	{
		my $call = $self->{calls}{$id};

		# the ticket is found, but no client was told
		$call->{level} = $call->{sync};
		$call->{sync} = 'off' if $call{found};
		$self->{results}{found}++ if $call{found};
	}
	elsif ($what eq 'lost')
	{
		$self->_end_holds($id, $result, 'session', 'xact');
	}
	return $self->SUPER::_learn($load, @line);
}

# Checks that the answered guarded writes are there, too.
sub _check_tables
{
	my ($self, $session) = @_;
	my %written = map { split /\|/ } split /\n/,
	  $session->query('SELECT name, fence FROM guarded');

	foreach my $write (splice @{ $self->{writes} })
	{
		my ($ticket, $call) = @$write;

		$self->problem("$call->{id}: the write of $ticket->{number} is missing")
		  if $self->_settled($call) &&
		  $written{ $ticket->{name} } < $ticket->{number};
	}
	return $self->SUPER::_check_tables($session);
}

# keeps the state for check_old()
sub check
{
	my ($self, @arguments) = @_;

	$self->{split}->learn_ttls if $self->{split} && !$self->{split}{there};
	$self->SUPER::check(@arguments);
	$self->{split}->found($self->{there}) if $self->{split};
	return;
}

# The level at which the lease was opened
sub _level
{
	my ($lease) = @_;
	my $told = $lease->{told};

	return $told->{level} // $told->{sync};
}

# Did standbys count for this lease at that time?  A call that got a ticket has
# raised the level.
sub standbys_count
{
	my ($self, $lease, $time) = @_;

	return $self->{quorum} && (is_durable(_level($lease), 'there') ||
		($lease->{counted} // $time) < $time);
}

# A call at a level for which standbys answer raises the level of its lease,
# even if the call fails, and even if no standbys are named yet.
sub _begin_level
{
	my ($self, $call) = @_;

	return unless is_durable($call->{sync}, 'there') &&
	  $call->{op} =~ /acquire|enqueue|retime/;
	my @leases =
	  $call->{lease} ? $call->{lease} :
	  map { $_->{lease} } grep {
		$_->{lease} && $_->{client} == $call->{client} &&
		  $_->{name} eq $call->{name}
	  } values %{ $self->{tickets} };

	$_->{raised}{ $call->{sync} } = 1
	  foreach grep { $_ } map { $self->{leases}{$_} } @leases;
	return;
}

# After that time, the client surely holds nothing of these scopes, even if the
# client did not know that, and requested an end later.
sub _end_holds
{
	my ($self, $client, $time, @scopes) = @_;

	foreach my $hold (grep { !defined $_->{end} || $_->{end} > $time }
		@{ $self->{holds} })
	{
		my $ticket = $hold->{ticket};

		$hold->{end} = $time
		  if $ticket->{client} == $client &&
		  grep { $_ eq $ticket->{scope} } @scopes;
	}
	return;
}

sub _learn_begin
{
	my ($self, $call) = @_;

	$self->_begin_level($call);
	if ($call->{op} eq 'end_block')
	{
		$self->_end_holds($call->{client}, $call->{begin}, 'xact');
	}
	elsif ($call->{op} eq 'release_all')
	{
		$self->_begin_release($_, $call)
		  foreach grep {
			$_->{scope} eq 'session' && $_->{client} == $call->{client}
		  } values %{ $self->{tickets} };
	}
	elsif ($call->{op} eq 'force')
	{
		my $number = $call->{ticket};

		push @{ $self->{forces} }, $call;
		$self->{forced}{$number} //= $call;
		$self->_begin_release($self->{tickets}{$number}, $call)
		  if $self->{tickets}{$number};
	}
	else
	{
		$self->SUPER::_learn_begin($call);
	}
	return;
}

# Can a forced release have ended a ticket of that lock during this call?
sub _is_forced
{
	my ($self, $call) = @_;
	my %names = map { $_ => 1 } split /,/, $call->{name};

	return grep {
		$names{ $_->{name} } &&
		  $_->{begin} < $call->{answer} &&
		  ($_->{answer} // $call->{answer}) >= $call->{begin}
	} @{ $self->{forces} };
}

sub _learn_ticket
{
	my ($self, $number, @arguments) = @_;
	my $ticket = $self->SUPER::_learn_ticket($number, @arguments);

	$self->_begin_release($ticket, $self->{forced}{$number})
	  if $self->{forced}{$number};
	return $ticket;
}

# A ticket that is still there was not ended.
sub _go_on
{
	my ($self, $there, $leases, $durable) = @_;

	delete $self->{forced}{$_} foreach keys %$there;
	$self->{there} = { (map { $_ => {} } keys %$leases), %$there };
	return $self->SUPER::_go_on($there, $leases, $durable);
}

sub _learn_answer
{
	my ($self, $call) = @_;
	my ($op, $result) = ($call->{op}, $call->{result});
	my $ticket = $self->{tickets}{ $call->{ticket} // 0 };
	my $lease = $self->{leases}{ $call->{lease} || 0 };

	# an empty answer is not a success
	$self->{results}{
		$result =~ /^error/ ? $result :
		  $result =~ /^(?:null|f)$/ ? "$op in vain" : $op
	}++;
	$self->{results}{announced}++ if $call->{announced};
	$self->{slowest} = {%$call}
	  if !$self->{slowest} || $call->{answer} - $call->{begin} >
	  $self->{slowest}{answer} - $self->{slowest}{begin};

	if ($result =~ /^error/ && $call->{block})
	{
		# the transaction has failed
		$self->_end_holds($call->{client}, $call->{begin}, 'xact');
		$self->problem("$call->{id}: the holder's $op gave $result")
		  if $op =~ /^(?:write|protect|downgrade)$/ && $result ne 'error 57014' &&
		  !$self->{forced}{ $call->{ticket} };
	}
	if ($result =~ /^error (57014|53100|58030)/)
	{
		# The effect of a release is unknown, or it is still running.  After
		# other errors, the requested tickets are not there.
		delete $call->{answer} if $op !~ /acquire|enqueue|open/;
		return;
	}
	if ($op =~ $ends && $result !~ /^error/)
	{
		# repeated
		my $before = $op eq 'close' ? $lease->{close} :
		  $ticket ? $ticket->{release} : undef;

		if ($before && !defined $before->{answer})
		{
			# The end of a ticket does not tell whether the others have ended.
			$before = $ticket->{release} = {%$before}
			  if $op ne 'close' && !$before->{ticket};
			@$before{ 'answer', 'result' } = @$call{ 'answer', 'result' };
		}
	}
	if ($op eq 'reenter')
	{
		$self->problem("$call->{id}: asked again for ticket $call->{ticket}, "
			  . "and was told $result")
		  if $result ne $call->{expected} && !$self->{forced}{ $call->{ticket} };
		return;
	}
	if ($op eq 'wait' && $result eq 'f')
	{
		push @{ $self->{seen} }, [ $ticket, $call ];
		$self->problem("$call->{id}: ticket $ticket->{number} was announced "
			  . 'or told as granted, and waits')
		  if $call->{announced} ||
		  $ticket->{held} && $ticket->{held}{answer} < $call->{begin};
	}
	elsif ($op eq 'wait' && $ticket->{scope} ne 'lease')
	{
		$self->_hold($ticket, $call) if $result eq 't';
		$self->problem("$call->{id}: ticket $ticket->{number} is $result")
		  if $result =~ /^error/ && $result ne 'error 40P01' &&
		  !$self->{forced}{ $ticket->{number} };
		return;
	}
	elsif ($op =~ /acquire|enqueue/ && $lease && $result eq 'error 55L01')
	{
		$self->_gone($call, "lease $call->{lease}", $lease)
		  unless $self->_is_forced($call);
	}
	# a forced release by another client, after this call had begun
	return
	  if $op eq 'release_ticket' && $result eq 'f' &&
	  $self->{forced}{ $ticket->{number} };
	$lease->{counted} //= $call->{answer}
	  if $lease && $op =~ /acquire|enqueue/ && $result =~ /^[\d{]/ &&
	  is_durable($call->{sync}, 'there');
	$self->_learn_confirmation($call, $ticket) if $op =~ /^(?:check|guard|wait)$/;
	$self->SUPER::_learn_answer($call);
	return;
}

# Are standbys still to acknowledge the grant?  A grant has the level of its
# lease.  A call at a lower level that tells the client about the grant does not
# wait for it.  dlock_check returns false until then.
sub _awaits_standbys
{
	my ($self, $ticket, $call) = @_;
	my ($held, $lease) = ($ticket->{held}, $self->{leases}{ $ticket->{lease} });

	return 0
	  unless $self->{quorum} && $lease &&
	  ($held->{round} // 0) == $call->{round};
	return scalar grep {
		is_durable($_, 'there') && $order{$_} > $order{ $held->{sync} }
	} _level($lease), keys %{ $lease->{raised} // {} };
}

# Notes if the fence of a lease's ticket was current.
sub _learn_confirmation
{
	my ($self, $call, $ticket) = @_;
	my $op = $call->{op};

	if ($call->{result} eq 't')
	{
		$self->_alive_from_ticket($ticket, $call);
		push @{ $self->{seen} }, [ $ticket, $call ]
		  if $ticket->{mode} eq 'exclusive' && !$ticket->{lowered};
		push @{ $self->{writes} }, [ $ticket, $call ] if $op eq 'guard';
	}
	elsif (
		($op eq 'check' || $op eq 'guard' && $call->{result} eq 'error 55L01') &&
		$ticket->{held} && $ticket->{held}{answer} < $call->{begin} &&
		!$self->_awaits_standbys($ticket, $call))
	{
		$self->_gone($call, "fence $ticket->{number}", $ticket);
	}
	return;
}

# Notes that the ticket's lease was open.  The call does not renew it.
sub _alive_from_ticket
{
	my ($self, $ticket, $call) = @_;
	my $lease = $self->{leases}{ $ticket->{lease} };

	$lease->{alive_until} = $call->{begin}
	  if $call->{begin} > $lease->{alive_until};
	return;
}

# In a transaction block, the lock is held until the block ends.
sub _hold
{
	my ($self, $ticket, $call) = @_;
	my $count = @{ $self->{holds} };

	$self->SUPER::_hold($ticket, $call);
	return if @{ $self->{holds} } == $count;
	my $hold = $self->{holds}[-1];

	delete $hold->{end}
	  if $ticket->{scope} eq 'xact' && $call->{block} && !$ticket->{release};
	$hold->{begin} = $call->{begin} // $call->{answer};
	$hold->{round} = $self->{round};
	return;
}

=pod

=item $history->check_round

Checks the calls of the round.

=cut

sub check_round
{
	my ($self) = @_;
	my %seen;    # lock => what has been seen of its tickets

	foreach my $hold (grep { ($_->{round} // 0) == $self->{round} }
		@{ $self->{holds} })
	{
		my $name = $hold->{ticket}{name};
		my $alone = $hold->{mode} eq 'exclusive';

		push @{ $seen{$name} }, [ $hold->{from}, $hold->{ticket}, 1 ];
		push @{ $seen{$name} }, [ $hold->{begin}, $hold->{ticket}, 0 ]
		  if $alone;
	}
	push @{ $seen{ $_->[0]{name} } }, [ $_->[1]{begin}, $_->[0], 0 ]
	  foreach splice @{ $self->{seen} };
	foreach my $name (sort keys %seen)
	{
		my $greatest;

		foreach my $event (sort { $a->[0] <=> $b->[0] || $a->[2] <=> $b->[2] }
			@{ $seen{$name} })
		{
			my ($time, $ticket, $holds) = @$event;

			if ($greatest && $ticket->{number} < $greatest->{number})
			{
				$self->problem($self->tell($ticket)
					  . ' was overtaken by ' . $self->tell($greatest))
				  if !$holds;
			}
			elsif ($holds)
			{
				$greatest = $ticket;
			}
		}
	}
	foreach my $name (@blocking)
	{
		my $last;

		foreach my $hold (sort { $a->{from} <=> $b->{from} }
			grep { $_->{ticket}{name} eq $name && $_->{round} == $self->{round} }
			@{ $self->{holds} })
		{
			next if $hold->{from} >= $hold->{end};
			$self->problem($self->tell($hold->{ticket}) . ' held beside '
				  . $self->tell($last->{ticket}))
			  if $last && $last->{end} > $hold->{from};
			$last = $hold;
		}
	}
	return;
}

=pod

=item $history->check_guarded($node)

Checks that no stale write was ever visible.

=back

=cut

sub check_guarded
{
	my ($self, $node) = @_;
	my $stale = $node->safe_psql('postgres',
		'SELECT * FROM guarded WHERE stale > 0');

	$self->problem("stale writes were visible:\n$stale") if $stale ne '';
	return;
}

1;
