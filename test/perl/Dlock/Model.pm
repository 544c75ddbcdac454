
=pod

=head1 NAME

Dlock::Model - a simple model of dlock's locks

=head1 DESCRIPTION

This model of session- and transaction-scoped locks is written from their
description and not from the code.  A session is a name.  Each operation is
completed at once, including all grants that it causes.

A session's operation leaves its result in the session's {result}: [ 'number',
tickets ], [ 'text', what psql shows ] or [ 'error', SQLSTATE ].  While the
session waits, its {request} is defined.

=cut

package Dlock::Model;

use strict;
use warnings FATAL => 'all';

sub new
{
	my ($class, @sessions) = @_;
	my $self = bless { locks => {}, sessions => {}, tickets => 0 }, $class;

	$self->new_session($_) foreach @sessions;
	return $self;
}

sub new_session
{
	my ($self, $s) = @_;

	# Marks end with a subtransaction: transaction-scoped acquires, and
	# releases that wait for the commit.
	$self->{sessions}{$s} = {
		tickets => [],
		marks => [],
		in_block => 0,
		failed => 0,
		savepoints => 0,
		request => undef,
		result => undef
	};
	return;
}

#
# A lock: holders and a queue
#
sub fits
{
	my ($lock, $mode, $permits) = @_;
	my @holders = @{ $lock->{holders} };

	return !@holders if $mode eq 'exclusive';
	return !grep { $_->{mode} eq 'exclusive' } @holders if $mode eq 'shared';
	$permits += $_->{permits} foreach @holders;
	return $permits <= $lock->{slots};
}

sub leave
{
	my ($self, $ticket) = @_;
	my $lock = $self->{locks}{ $ticket->{name} };
	my $session = $self->{sessions}{ $ticket->{session} };

	foreach my $list ($lock->{holders}, $lock->{queue}, $session->{tickets})
	{
		@$list = grep { $_ != $ticket } @$list;
	}
	$ticket->{state} = 'gone';
	$self->grant($lock);
	delete $self->{locks}{ $ticket->{name} }
	  unless @{ $lock->{holders} } || @{ $lock->{queue} };
	return;
}

# Grants the lock to the head of the queue as long as the request fits.
sub grant
{
	my ($self, $lock) = @_;

	while (my $head = $lock->{queue}[0])
	{
		last unless fits($lock, $head->{mode}, $head->{permits});
		push @{ $lock->{holders} }, shift @{ $lock->{queue} };
		$head->{state} = 'granted';
		$self->go_on($head->{session}, $head);
	}
	return;
}

#
# Transactions
#
sub level
{
	my ($session) = @_;

	return 1 + $session->{savepoints};
}

# End a ticket that no request uses.
sub settle
{
	my ($self, $ticket) = @_;

	$self->leave($ticket)
	  if $ticket->{state} ne 'gone'
	  && $ticket->{session_depth} == 0
	  && $ticket->{xact_depth} == 0;
	return;
}

sub pop_marks
{
	my ($self, $session, $level, $commit) = @_;

	while (@{ $session->{marks} } && $session->{marks}[-1]{level} >= $level)
	{
		my $mark = pop @{ $session->{marks} };
		my $ticket = $mark->{ticket};

		if (!$mark->{at_commit})
		{
			$ticket->{xact_depth}--;
		}
		elsif ($commit && $ticket->{session_depth} > 0)
		{
			$ticket->{session_depth}--;
		}
		$self->settle($ticket);
	}
	return;
}

sub end_transaction
{
	my ($self, $session, $commit) = @_;

	@$session{ 'in_block', 'failed', 'savepoints' } = (0, 0, 0);
	$self->pop_marks($session, 1, $commit);
	return;
}

# Ends a statement.
sub succeed
{
	my ($self, $s, @result) = @_;
	my $session = $self->{sessions}{$s};

	$session->{request} = undef;
	$session->{result} = \@result;
	$self->end_transaction($session, 1) unless $session->{in_block};
	return;
}

sub fail
{
	my ($self, $s, $code) = @_;
	my $session = $self->{sessions}{$s};

	$self->give_up($session) if $session->{request};
	$session->{result} = [ 'error', $code ];
	if ($session->{in_block})
	{
		$session->{failed} = 1;
		$self->pop_marks($session, level($session), 0);
	}
	else
	{
		$self->end_transaction($session, 0);
	}
	return;
}

# statement($s, $sub): calls the sub unless the transaction has failed
sub statement
{
	my ($self, $s, $sub) = @_;
	my $session = $self->{sessions}{$s};

	return $self->fail($s, '25P02') if $session->{failed};
	return $sub->($session);
}

sub begin
{
	my ($self, $s) = @_;

	return $self->statement(
		$s,
		sub {
			$_[0]{in_block} = 1;
			$self->succeed($s, 'text', '');
		});
}

sub end
{
	my ($self, $s, $commit) = @_;
	my $session = $self->{sessions}{$s};

	$self->end_transaction($session, $commit && !$session->{failed});
	return $self->succeed($s, 'text', '');
}

# Savepoints are numbered from 1.
sub savepoint
{
	my ($self, $s) = @_;

	return $self->statement(
		$s,
		sub {
			$_[0]{savepoints}++;
			$self->succeed($s, 'text', '');
		});
}

sub rollback_to
{
	my ($self, $s, $number) = @_;
	my $session = $self->{sessions}{$s};

	$session->{failed} = 0;
	$session->{savepoints} = $number;
	$self->pop_marks($session, 1 + $number, 0);
	return $self->succeed($s, 'text', '');
}

sub release_savepoint
{
	my ($self, $s, $number) = @_;

	return $self->statement(
		$s,
		sub {
			my ($session) = @_;

			$session->{savepoints} = $number - 1;
			foreach my $mark (@{ $session->{marks} })
			{
				$mark->{level} = $number if $mark->{level} > $number;
			}
			$self->succeed($s, 'text', '');
		});
}

#
# Acquiring
#
# A request has {names}, {scope}, {mode}, {slots} (0: none), {permits}, {all},
# and may have {nowait} or {timeout}.  With {try}, the result of a failure is
# NULL instead of an error.
#
sub acquire
{
	my ($self, $s, %request) = @_;

	return $self->statement(
		$s,
		sub {
			my ($session) = @_;
			my %unique = map { $_ => 1 } @{ $request{names} };

			$session->{request} =
			  { %request, left => [ sort keys %unique ], taken => [] };
			$self->go_on($s);
		});
}

# A DO block that tries to acquire, and rolls back in an exception block
sub acquire_and_raise
{
	my ($self, $s, %request) = @_;

	return $self->statement(
		$s,
		sub {
			my ($session) = @_;
			my $in_block = $session->{in_block};

			$session->{in_block} = 1;
			$session->{savepoints}++;
			$self->acquire($s, %request, nowait => 1, try => 1);
			$self->pop_marks($session, level($session), 0);
			$session->{savepoints}--;
			@$session{ 'in_block', 'failed' } = ($in_block, 0);
			$self->succeed($s, 'text', '');
		});
}

# Continue a request whose ticket may just have been granted.
sub go_on
{
	my ($self, $s, $ticket) = @_;
	my $session = $self->{sessions}{$s};
	my $request = $session->{request};

	$request->{waiting} = undef;
	while (my $name = $request->{left}[0])
	{
		my $code;

		($ticket, $code) = $self->join_lock($s, $request, $name)
		  unless $ticket;
		if ($ticket && $ticket->{state} eq 'waiting')
		{
			$request->{waiting} = $ticket;
			return;
		}
		if (!$ticket)
		{
			return $self->fail($s, $code)
			  unless $code eq '55P03' && $request->{try};
			$self->give_up($session);
			return $self->succeed($s, 'text', '');
		}
		$ticket->{"$request->{scope}_depth"}++;
		push @{ $session->{marks} },
		  { ticket => $ticket, level => level($session), at_commit => 0 }
		  if $request->{scope} eq 'xact';
		push @{ $request->{taken} }, $ticket;
		shift @{ $request->{left} };
		$ticket = undef;
	}

	my %taken = map { $_->{name} => $_ } @{ $request->{taken} };
	return $self->succeed($s, 'number', map { $taken{$_} } @{ $request->{names} });
}

# Release a request's tickets and its place in the queue.
sub give_up
{
	my ($self, $session) = @_;
	my $request = $session->{request};
	my $scope = $request->{scope};

	$session->{request} = undef;
	$self->leave($request->{waiting})
	  if $request->{waiting} && $request->{waiting}{state} eq 'waiting';
	foreach my $ticket (reverse @{ $request->{taken} })
	{
		$ticket->{"${scope}_depth"}--;
		pop @{ $session->{marks} } if $scope eq 'xact';
		$self->settle($ticket);
	}
	return;
}

# Returns what a request for this lock would find.
sub outlook
{
	my ($self, $s, $request, $name) = @_;
	my @own = grep { $_->{name} eq $name }
	  @{ $self->{sessions}{$s}{tickets} };
	my ($held) = grep { $_->{mode} ne 'slots' } @own;
	my $mode = $request->{mode};
	my $lock = $self->{locks}{$name};
	my $permits = $request->{permits};

	if ($held && $mode ne 'slots')
	{
		return '55000' if $mode eq 'exclusive' && $held->{mode} eq 'shared';
		return $held;
	}
	return 'free' unless $lock;
	return '55000' if $lock->{slots} != $request->{slots};
	return 'free' if !@{ $lock->{queue} } && fits($lock, $mode, $permits);
	return '55P03' if $request->{nowait};

	# A request would wait for itself if its session's own permits block it.
	$permits += $_->{permits} foreach @own;
	return '40P01' if @own && $permits > $lock->{slots};
	return $request->{timeout} ? '55P03' : 'wait';
}

# Returns a ticket, old or new, or undef and an error code.
sub join_lock
{
	my ($self, $s, $request, $name) = @_;
	my $session = $self->{sessions}{$s};
	my $outlook = $self->outlook($s, $request, $name);

	return $outlook if ref $outlook;
	return (undef, $outlook) unless $outlook =~ /^(free|wait)$/;

	my $lock = $self->{locks}{$name} //=
	  { holders => [], queue => [], slots => $request->{slots} };
	my $ticket = {
		session => $s,
		name => $name,
		mode => $request->{mode},
		permits => $request->{permits},
		scope => $request->{scope},
		session_depth => 0,
		xact_depth => 0,
		state => $outlook eq 'free' ? 'granted' : 'waiting',
		order => ++$self->{tickets}
	};
	push @{ $session->{tickets} }, $ticket;
	push @{ $lock->{ $outlook eq 'free' ? 'holders' : 'queue' } }, $ticket;
	return $ticket;
}

#
# Releasing
#
sub release_one
{
	my ($self, $s, $ticket) = @_;

	if ($ticket && $ticket->{state} ne 'gone' && $ticket->{session_depth} > 0)
	{
		$ticket->{session_depth}--;
		$self->settle($ticket);
		return $self->succeed($s, 'text', 't');
	}
	return $self->succeed($s, 'text', 'f');
}

sub release
{
	my ($self, $s, $name) = @_;

	return $self->statement(
		$s,
		sub {
			my ($session) = @_;
			my @held =
			  grep { $_->{name} eq $name && $_->{session_depth} > 0 }
			  @{ $session->{tickets} };

			$self->release_one($s, $held[-1]);
		});
}

sub release_ticket
{
	my ($self, $s, $ticket) = @_;

	return $self->statement($s, sub { $self->release_one($s, $ticket) });
}

# Changes a hold from exclusive to shared, in place.
sub downgrade
{
	my ($self, $s, $ticket) = @_;

	return $self->statement(
		$s,
		sub {
			return $self->succeed($s, 'text', 'f')
			  if $ticket->{state} ne 'granted';
			return $self->fail($s, '55000') if $ticket->{mode} eq 'slots';
			$self->succeed($s, 'text', 't');
			$ticket->{mode} = 'shared';
			$self->grant($self->{locks}{ $ticket->{name} });
		});
}

sub release_at_commit
{
	my ($self, $s, $ticket) = @_;

	return $self->statement(
		$s,
		sub {
			my ($session) = @_;
			my $marked =
			  grep { $_->{ticket} == $ticket && $_->{at_commit} }
			  @{ $session->{marks} };

			return $self->fail($s, '55L01')
			  if $ticket->{state} eq 'gone'
			  || $ticket->{session_depth} <= $marked;
			push @{ $session->{marks} },
			  { ticket => $ticket, level => level($session), at_commit => 1 };
			$self->succeed($s, 'text', '');
		});
}

sub release_all
{
	my ($self, $s) = @_;

	return $self->statement(
		$s,
		sub {
			my ($session) = @_;
			my @held =
			  grep { $_->{session_depth} > 0 } @{ $session->{tickets} };

			foreach my $ticket (@held)
			{
				$ticket->{session_depth} = 0;
				$self->settle($ticket);
			}
			$self->succeed($s, 'text', scalar(@held));
		});
}

#
# Events outside of the session's control
#
sub cancel
{
	my ($self, $s) = @_;

	return $self->fail($s, '57014');
}

sub force
{
	my ($self, $ticket) = @_;
	my $s = $ticket->{session};
	my $waits = $ticket->{state} eq 'waiting';

	$self->leave($ticket);
	$self->fail($s, '55L01') if $waits;
	return;
}

sub end_session
{
	my ($self, $s) = @_;
	my $session = $self->{sessions}{$s};

	$self->give_up($session) if $session->{request};
	$self->end_transaction($session, 0);
	while (my $ticket = $session->{tickets}[0])
	{
		$self->leave($ticket);
	}
	$self->new_session($s);
	return;
}

#
# Queries
#
sub waits
{
	my ($self, $s) = @_;

	return defined $self->{sessions}{$s}{request};
}

sub holds
{
	my ($self, $s, $name) = @_;

	return scalar grep { $_->{name} eq $name }
	  @{ $self->{sessions}{$s}{tickets} };
}

# Would this request close a cycle?  Each holder of its locks, and each waiter
# for them, counts as blocking the request.  So this can report too many
# cycles, but never too few.
sub closes_cycle
{
	my ($self, $s, %request) = @_;
	my %seen;
	my @to_visit =
	  map { $self->in_the_way($_) }
	  grep { !ref $self->outlook($s, \%request, $_) } @{ $request{names} };

	while (defined(my $other = shift @to_visit))
	{
		next if $seen{$other}++;
		my $request = $self->{sessions}{$other}{request} or next;
		push @to_visit, map { $self->in_the_way($_) } @{ $request->{left} };
	}

	# a session's own tickets block it only through other sessions
	return grep { $self->waits_behind($_, $s) } grep { $_ ne $s } keys %seen;
}

sub waits_behind
{
	my ($self, $waiter, $s) = @_;
	my $request = $self->{sessions}{$waiter}{request} or return 0;

	return grep { $_ eq $s }
	  map { $self->in_the_way($_) } @{ $request->{left} };
}

sub in_the_way
{
	my ($self, $name) = @_;
	my $lock = $self->{locks}{$name} or return ();

	return map { $_->{session} } @{ $lock->{holders} }, @{ $lock->{queue} };
}

# Returns the sessions that block a waiter.
sub blockers
{
	my ($self, $ticket) = @_;
	my $lock = $self->{locks}{ $ticket->{name} };
	my %blockers;

	foreach my $other (@{ $lock->{holders} })
	{
		$blockers{ $other->{session} } = 1
		  unless $other->{mode} eq 'shared' && $ticket->{mode} eq 'shared';
	}
	foreach my $other (@{ $lock->{queue} })
	{
		last if $other == $ticket;
		$blockers{ $other->{session} } = 1;
	}
	return sort keys %blockers;
}

# Returns all tickets by lock, holders first, as rows of dlock_locks.
sub tickets
{
	my ($self) = @_;

	return
	  map { @{ $self->{locks}{$_}{holders} }, @{ $self->{locks}{$_}{queue} } }
	  sort keys %{ $self->{locks} };
}

sub rows
{
	my ($self) = @_;
	my $name = '';
	my $position = 0;
	my @rows;

	foreach my $ticket ($self->tickets)
	{
		my $waits = $ticket->{state} eq 'waiting';
		my $slots = $self->{locks}{ $ticket->{name} }{slots};
		my $scope =
			$ticket->{session_depth} > 0 ? 'session'
		  : $ticket->{xact_depth} > 0 ? 'xact'
		  : $ticket->{scope};

		$position = 0 if $ticket->{name} ne $name;
		$name = $ticket->{name};
		$position++ if $waits;
		push @rows,
		  join('|',
			$name,
			$waits ? $position : 0,
			$ticket->{session},
			$ticket->{mode},
			$ticket->{mode} eq 'slots' ? $slots : '',
			$ticket->{permits},
			$scope eq 'session' ? 'session' : 'transaction',
			$ticket->{session_depth} + $ticket->{xact_depth},
			$waits ? join(' ', $self->blockers($ticket)) : '');
	}
	return @rows;
}

1;
