
=pod

=head1 NAME

Dlock::Checker - compares a server's state with the history of dlock's clients

=head1 DESCRIPTION

The server is killed during a load, see Dlock::History.  Then this class
compares its state after a restart, or the state of a promoted server, with the
history.  These are the rules:

=over

=item *

The state is that of one position in the WAL.  If the state includes a call, it
also includes every change that was answered before the call began.  The
I<horizon> is the time when the latest call in the state began.  Two kinds of
calls are known to be in the state: calls that durably returned a new ticket or
lease, and calls that created a ticket or lease found in the state.  A ticket
can be older than the call that returned it, if an earlier request for it was
not answered.

=item *

A lease's ticket exists if the client was told so durably or before the
horizon.  It holds if the client was told so.  Exceptions: a call has begun to
release the ticket or to close its lease, or the lease may have expired.  If an
expired lease has a delay, its locks stay closed for the delay.

=item *

A ticket does not exist in three cases: its release was answered before the
horizon; a lock that it would block was granted to a greater ticket, durably or
before the horizon; or no client can have requested it.

=item *

The ttl of a lease, and the info of a lease or ticket, is the value that was
set last, durably or before the horizon, or a value that a later call has begun
to set.  The same holds for the permits of a semaphore.  A downgraded hold is
shared.

=item *

In each lock the holders may hold together, no ticket waits without a reason,
and holders have smaller tickets than waiters.

=item *

From the beginning of the history to its end, through all crashes, no two
conflicting clients surely hold a lock at the same time.  Tickets grow.

=back

=cut

package Dlock::Checker;

use strict;
use warnings FATAL => 'all';

use parent 'Dlock::History';

use Dlock::Client qw($slots $ttl);
use Dlock::History qw($infinity closed_until is_durable now);
use Dlock::Test;
use Test::More;

=pod

=head1 METHODS

This is a Dlock::History, and has these additional methods:

=over

=item $history->check($node, $since, $when, $durable)

Compares the server's state with the history, before any client connects
again.  The server was not started before the time $since.  $durable is "here",
"there" or "nowhere", which is the server's relation to the clients' server:
see is_durable().

In the next round, clients keep only the tickets and leases found here.

=cut

sub check
{
	my ($self, $node, $since, $when, $durable) = @_;
	my $session = session($node);
	my %there;
	my %locks;
	my $horizon = 0;

	$self->{durable} = sub {
		my ($call) = @_;

		return $call->{answer} && is_durable($call->{sync}, $durable) &&
		  ($call->{scope} eq 'lease' || $call->{op} =~ /^(?:open|set_slots)$/);
	};
	foreach my $line (
		split /\n/,
		$session->query(
			q{SELECT name, ticket, mode, permits, granted::int, "position",
					 scope, lease, info, coalesce(pid, 0)
				FROM dlock_locks ORDER BY name, "position", ticket}))
	{
		my %row;

		@row{qw(name number mode permits granted position scope lease info pid)}
		  = split /\|/, $line, -1;
		die "unexpected answer: $line" unless exists $row{pid} && defined $row{pid};
		# a ticket whose lock is closed by a delay counts as a holder
		$row{closed} = !$row{granted} && $row{position} == 0;
		$row{granted} ||= $row{closed};
		push @{ $locks{ $row{name} } }, \%row;
		$there{ $row{number} } = \%row;
		$self->problem("ticket $row{number} has a session")
		  if $row{scope} ne 'lease' || $row{pid} != 0;
	}
	my %leases = map { my @f = split /\|/, $_, -1; $f[0] => \@f } split /\n/,
	  $session->query(
		q{SELECT lease, extract(epoch FROM ttl), extract(epoch FROM remaining),
				 info, coalesce(attached_pid, 0), held + waiting
			FROM dlock_leases});
	$self->_check_ttl(\%leases, now() - $since);

	# the latest calls in the state
	foreach my $made (values %{ $self->{tickets} }, values %{ $self->{leases} })
	{
		($horizon, $self->{latest}) = ($made->{begin}, $made->{told}{id})
		  if $made->{begin} > $horizon && $self->{durable}->($made->{told});
	}
	foreach my $info ((map { $_->{info} } values %there),
		map { $_->[3] } values %leases)
	{
		my $call = $self->{calls}{$info};

		($horizon, $self->{latest}) = @{$call}{ 'begin', 'id' }
		  if $call && $call->{begin} > $horizon;
	}
	$self->{horizon} = $horizon;

	$self->{lost} = $self->{undone} = 0;
	$self->_check_missing(\%there, \%leases);
	$self->_check_present(\%there, \%leases);
	$self->_check_changes(\%there, \%leases);
	$self->_check_slots($session);
	$self->_check_lock($_, $locks{$_}, \%there) foreach sort keys %locks;
	$self->_check_superseded(\%there, $durable);
	$self->_check_fences($session, \%there);
	$self->_check_tables($session);
	$self->_check_growth($session);
	$self->_go_on(\%there, \%leases, $durable);
	$session->quit;
	note sprintf(
		'%s: %d calls, %d tickets told, %d there; %d leases there; '
		  . '%d tickets and %d releases are lost',
		$when,
		scalar(keys %{ $self->{calls} }),
		scalar(keys %{ $self->{tickets} }),
		scalar(grep { $_->{live} } values %{ $self->{tickets} }),
		scalar(grep { $_->{live} } values %{ $self->{leases} }),
		$self->{lost},
		$self->{undone});
	$self->report($when);
	return;
}

# Did this call surely take effect in the state?
sub _settled
{
	my ($self, $call) = @_;

	return $call && $call->{answer} &&
	  ($self->{durable}->($call) || $call->{answer} <= $self->{horizon});
}

# Was the client told of the ticket, in a call that is surely in the state?  A
# repeated call may have waited for more than the first one.
sub _told_settled
{
	my ($self, $ticket) = @_;

	return grep { $self->_settled($_) } $ticket->{told},
	  @{ $ticket->{again} // [] };
}

# The same for a grant
sub _held_settled
{
	my ($self, $ticket) = @_;

	return grep { $self->_settled($_) } $ticket->{held},
	  grep { $_->{op} !~ /enqueue/ } @{ $ticket->{again} // [] };
}

# Is this grant surely in the state?  A session learns of a grant only after
# the removal of the previous holder is flushed.
sub _grant_settled
{
	my ($self, $ticket, $durable) = @_;

	return $self->_held_settled($ticket) ||
	  $ticket->{held} && $durable eq 'here' && $ticket->{scope} ne 'lease';
}

# Was this call answered before the horizon?
sub _is_over
{
	my ($self, $call) = @_;

	return $call->{answer} && $call->{answer} <= $self->{horizon};
}

# Is this release, or close, surely in the state?  No client waits for a
# release's flush.  A canceled release may have had no effect.  Until a guarded
# commit is visible, its ticket stays, even if it has been released.  The
# tickets in question are those whose field $key, "number" or "lease", is $of.
sub _released
{
	my ($self, $call, $key, $of) = @_;

	return 0
	  if !$call || !$self->_is_over($call) || $call->{result} =~ /^error/;
	return !grep {
		my $ticket = $_->{op} eq 'guard' && $self->{tickets}{ $_->{ticket} };

		$ticket && $ticket->{$key} == $of && $_->{begin} < $call->{answer} &&
		  !$self->_is_over($_)
	} values %{ $self->{calls} };
}

# The ttl, plus a quarter of the ttl if standbys may count
sub _check_ttl
{
	my ($self, $leases, $elapsed) = @_;

	foreach my $lease (values %$leases)
	{
		my ($number, $full, $remaining, undef, $pid) = @$lease;

		$self->problem("lease $number has $remaining s of $full s, "
			  . "with the server up for $elapsed s at most")
		  if $pid != 0 || $remaining > 1.25 * $full ||
		  $remaining < $full - $elapsed && $full >= $ttl;
	}
	return;
}

sub _check_missing
{
	my ($self, $there, $leases) = @_;

	foreach my $lease (values %{ $self->{leases} })
	{
		next if !$lease->{live} || $leases->{ $lease->{number} };
		$self->problem("lease $lease->{number} is missing")
		  if $self->_settled($lease->{told}) && !$self->_may_run_out($lease) &&
		  !$lease->{single} && !$lease->{close};
	}
	foreach my $ticket (values %{ $self->{tickets} })
	{
		my $lease = $self->{leases}{ $ticket->{lease} };
		my $row = $there->{ $ticket->{number} };

		next if !$ticket->{live} || $self->_may_run_out($lease);
		if (!$row)
		{
			$self->problem($self->tell($ticket) . ' is missing')
			  if $self->_told_settled($ticket) && !$ticket->{release} &&
			  !$lease->{close};
			$self->{lost}++ unless $ticket->{release} || $lease->{close};
			next;
		}
		$self->problem($self->tell($ticket) . ' is ' . join(' ', %$row))
		  if $row->{name} ne $ticket->{name} ||
		  !$self->_may_have_mode($ticket, $row->{mode}) ||
		  $row->{permits} != $ticket->{permits} ||
		  $row->{lease} != $ticket->{lease};
		$self->problem($self->tell($ticket) . ' waits again')
		  if !$row->{granted} && $self->_held_settled($ticket);
	}
	return;
}

sub _check_present
{
	my ($self, $there, $leases) = @_;

	foreach my $row (values %$there)
	{
		my $ticket = $self->{tickets}{ $row->{number} };
		my $call = $self->{calls}{ $row->{info} };
		my $lease = $self->{leases}{ $row->{lease} };

		if ($ticket)
		{
			# a call after the lease's expiry does not end a delay
			$self->problem($self->tell($ticket) . ' is there again')
			  if !$ticket->{live} || !$row->{closed} &&
			  ($self->_released($ticket->{release}, number => $row->{number}) ||
				$lease &&
				$self->_released($lease->{close}, number => $row->{number}));
			$self->{undone}++ if $ticket->{release} && $ticket->{release}{answer};
		}
		else
		{
			# the lease may have expired before the client got its tickets
			$self->problem("ticket $row->{number} is there, "
				  . "but $row->{info} asked for none, or has got another or an "
				  . 'error, before ' . ($self->{latest} // 'nothing'))
			  if !$call || !$row->{closed} && $self->_is_over($call);
		}
		$self->problem("ticket $row->{number} has no lease")
		  unless $leases->{ $row->{lease} } || !$lease ||
		  $self->_may_run_out($lease);
	}
	foreach my $row (values %$leases)
	{
		my $lease = $self->{leases}{ $row->[0] };
		my $call = $self->{calls}{ $row->[3] };

		$self->problem("lease $row->[0] is there, but $row->[3] has got none")
		  if !$lease && !$there->{ $row->[0] } &&
		  (!$call || $self->_is_over($call));
		$self->problem("lease $row->[0] is there again"
			  . ($lease->{live} ? ", which $lease->{close}{id} has closed" : ''))
		  if $lease &&
		  (!$lease->{live} ||
			$self->_released($lease->{close}, lease => $row->[0]));
	}
	return;
}

sub _check_lock
{
	my ($self, $name, $rows) = @_;
	my @holders = grep { $_->{granted} } @$rows;
	my @waiters = grep { !$_->{granted} } @$rows;
	my $exclusive = grep { $_->{mode} eq 'exclusive' } @holders;
	my $permits = 0;
	my @queue = map { $_->{number} } @waiters;

	$permits += $_->{permits} foreach @holders;
	$self->problem("lock $name has holders " . _list(@holders))
	  if $exclusive && @holders > 1 ||
	  $name =~ /^n/ && $permits > $self->_most_slots($name, 0, now());
	$self->problem("lock $name has waiters @queue")
	  if "@queue" ne join(' ', sort { $a <=> $b } @queue);
	foreach my $holder (@holders)
	{
		$self->problem("lock $name: ticket $holder->{number} has overtaken "
			  . _list(@waiters))
		  if @waiters && $holder->{number} > $waiters[0]{number};
	}
	if (@waiters)
	{
		my $head = $waiters[0];

		$self->problem("lock $name: $head->{number} waits for nobody, beside "
			  . _list(@holders))
		  if grep({ $_->{closed} } @holders) ? 0 :
		  $name =~ /^n/ ? $permits + $head->{permits} <= $self->_slots($name) :
		  $head->{mode} eq 'exclusive' ? !@holders :
		  !$exclusive;
	}
	return;
}

sub _list
{
	return join(', ', map { "$_->{number} ($_->{info})" } @_);
}

# A hold is no longer exclusive if the downgrade is surely in the state.
sub _may_have_mode
{
	my ($self, $ticket, $mode) = @_;
	my $call = $ticket->{lowered};

	return $mode eq $ticket->{mode} unless $call;
	return $mode eq 'shared' ||
	  !($self->_settled($call) && $call->{result} eq 't');
}

# Of successive calls that changed one value, return those that may have set
# its present value.  $before is included if no call surely took effect.
sub _may_say
{
	my ($self, $field, $before, @calls) = @_;
	my @values;

	foreach my $call (reverse @calls)
	{
		push @values, $call->{$field};
		return @values
		  if $self->_settled($call) && $call->{result} =~ /^(?:t|\d+)$/;
	}
	return defined $before ? (@values, $before) : ();
}

# Can the lease have expired on this server?  A longer ttl may be lost.
sub _may_run_out
{
	my ($self, $lease) = @_;
	my @ttls = $self->_may_say('ttl', $lease->{ttl}, @{ $lease->{ttls} // [] });

	return $lease->{short} || grep { $_ < $ttl } @ttls;
}

# Check the values that were set for existing tickets and leases.
sub _check_changes
{
	my ($self, $there, $leases) = @_;

	foreach my $row (values %$leases)
	{
		my ($number, $full, undef, $info) = @$row;
		my $lease = $self->{leases}{$number} or next;
		my @ttls =
		  $self->_may_say('ttl', $lease->{ttl}, @{ $lease->{ttls} // [] });

		$self->problem("lease $number has a ttl of $full s, and not @ttls")
		  unless grep { $_ == $full } @ttls;
		$self->_check_info("lease $number", $lease, $info)
		  unless $there->{$number};
	}
	foreach my $row (values %$there)
	{
		my $ticket = $self->{tickets}{ $row->{number} } or next;

		$self->_check_info($self->tell($ticket), $ticket, $row->{info});
	}
	return;
}

sub _check_info
{
	my ($self, $what, $thing, $info) = @_;
	my @infos = $self->_may_say('id', $thing->{info}, @{ $thing->{infos} // [] });

	$self->problem("$what says $info, and not @infos")
	  if @infos && !grep { $_ eq $info } @infos;
	return;
}

# Only one client sets a semaphore's permits.  The last call that is surely in
# the state counts, or a call begun later.
sub _check_slots
{
	my ($self, $session) = @_;
	my %found = map { split /\|/ } split /\n/,
	  $session->query('SELECT name, slots FROM dlock_slots');

	foreach my $name (sort keys %{ $self->{slots} })
	{
		my $calls = $self->{slots}{$name};
		my $is = $found{$name} // 0;
		my @may = (0);

		foreach my $call (@$calls)
		{
			@may = () if $self->_is_set($call) && ($call->{op} eq 'found' ||
				$self->_settled($call));
			push @may, $call->{number};
		}
		$self->problem("$name is set to $is permits, and not @may")
		  unless grep { $_ == $is } @may;
		push @$calls,
		  { op => 'found', number => $is, begin => now(), answer => now() };
	}
	return;
}

# Was the call answered without an error?
sub _is_set
{
	my ($self, $call) = @_;

	return $call->{answer} &&
	  ($call->{op} eq 'found' || $call->{result} eq 't');
}

# The present number of permits
sub _slots
{
	my ($self, $name) = @_;
	my $calls = $self->{slots}{$name};

	return $calls && $calls->[-1]{number} || $slots;
}

# The greatest number of permits between these two times
sub _most_slots
{
	my ($self, $name, $from, $to) = @_;
	my $most = $slots;

	foreach my $call (grep { $_->{begin} <= $to } @{ $self->{slots}{$name} // [] })
	{
		my $number = $call->{number} || $slots;

		$most = $number
		  if $number > $most ||
		  $self->_is_set($call) && $call->{answer} <= $from;
	}
	return $most;
}

# A ticket that conflicts with a later grant does not reappear.
sub _check_superseded
{
	my ($self, $there, $durable) = @_;
	my (%greatest, %greatest_exclusive);

	foreach my $ticket (values %{ $self->{tickets} })
	{
		my $name = $ticket->{name};

		next if $name =~ /^n/ || !$self->_grant_settled($ticket, $durable);
		foreach my $greatest (\%greatest,
			$ticket->{mode} eq 'exclusive' ? \%greatest_exclusive : ())
		{
			$greatest->{$name} = $ticket
			  if !$greatest->{$name} ||
			  $greatest->{$name}{number} < $ticket->{number};
		}
	}
	foreach my $row (values %$there)
	{
		my $by = $row->{mode} eq 'exclusive' ? $greatest{ $row->{name} } :
		  $greatest_exclusive{ $row->{name} };

		$self->problem("ticket $row->{number} of $row->{info} is there, "
			  . 'and was superseded by ' . $self->tell($by))
		  if $by && $by->{number} > $row->{number};
	}
	return;
}

# A lease's granted ticket is current once its grant is durable.  With
# synchronous standbys, that is when they answer, and they may be down.
sub _becomes_current
{
	my ($self, $session, $ticket) = @_;

	return 0 unless $ticket->{lease};
	return 1
	  if $session->query('SHOW synchronous_standby_names') ne '';
	return eval {
		$session->wait_for(
			"SELECT dlock_check('$ticket->{name}', $ticket->{number})");
		1;
	};
}

# Check dlock_check()'s answer for every ticket of the history.
sub _check_fences
{
	my ($self, $session, $there) = @_;
	my @tickets = values %{ $self->{tickets} };
	my $answer = $session->query(
		sprintf(
			q{SELECT number FROM unnest('{%s}'::text[], '{%s}'::bigint[])
				AS t (name, number) WHERE dlock_check(name, number)},
			join(',', map { $_->{name} } @tickets),
			join(',', map { $_->{number} } @tickets)));
	my %current = map { $_ => 1 } split /\n/, $answer;

	foreach my $ticket (@tickets)
	{
		my $row = $there->{ $ticket->{number} };
		my $is_current = $current{ $ticket->{number} };
		my $lease = $self->{leases}{ $ticket->{lease} };
		my $lasts = !$lease || !$self->_may_run_out($lease);

		next
		  if $lasts && !$is_current && $row && $row->{granted} &&
		  $self->_becomes_current($session, $ticket);
		# an existing short lease may expire at this moment
		$self->problem($self->tell($ticket)
			  . ($is_current ? ' is current' : ' is not current'))
		  if $is_current ? !$row || $row->{closed} :
		  $lasts && $row && $row->{granted};
	}
	return;
}

# Check that the tables and the memory agree when everything is written.
sub _check_tables
{
	my ($self, $session) = @_;
	my $tickets = q{SELECT ticket, name, lease, granted, mode, permits, info};
	my $is_written = qq{WITH
		a AS ($tickets FROM dlock_locks WHERE scope = 'lease'),
		b AS ($tickets FROM dlock_queue),
		c AS (SELECT lease, ttl, info FROM dlock_leases
			   WHERE lease NOT IN (SELECT ticket FROM dlock_locks)),
		d AS (SELECT lease, ttl, info FROM dlock_queue_lease)
	  SELECT NOT EXISTS ((TABLE a EXCEPT TABLE b) UNION ALL
						 (TABLE b EXCEPT TABLE a))
		 AND NOT EXISTS ((TABLE c EXCEPT TABLE d) UNION ALL
						 (TABLE d EXCEPT TABLE c))};

	# report the problems found before, instead of exiting here
	$self->problem('the tables are not what is in memory')
	  unless eval { $session->wait_for($is_written) };
	return;
}

# Check that the next ticket of each lock is greater than all earlier tickets.
sub _check_growth
{
	my ($self, $session) = @_;
	my %greatest;

	foreach my $ticket (values %{ $self->{tickets} })
	{
		my $name = $ticket->{name};

		$greatest{$name} = $ticket->{number}
		  if $ticket->{number} > ($greatest{$name} // 0);
	}
	foreach my $name (sort keys %greatest)
	{
		my $number = $session->query(
			"SELECT dlock_enqueue('$name', 'history'"
			  . ($name =~ /^n/ ? ", slots => $slots" : '')
			  . ')');

		$self->problem("lock $name gave $greatest{$name}, and $number then")
		  if $number !~ /^\d+$/ || $number <= $greatest{$name};
		$session->query("SELECT dlock_release_ticket($number)");
	}
	return;
}

# Continue with the tickets and leases found.  What clients knew before does
# not count any more.
sub _go_on_as_changed
{
	my ($self, $there, $leases) = @_;

	foreach my $row (values %$leases)
	{
		my ($number, $full, undef, $info) = @$row;
		my $lease = $self->{leases}{$number} or next;

		$self->_end_holds_of($lease);
		$lease->{ttl} = $full + 0;
		$lease->{short} = $full < $ttl ? $full + 0 : 0;
		$lease->{info} = $info;
		delete @$lease{ 'ttls', 'infos' };
	}
	foreach my $row (values %$there)
	{
		my $ticket = $self->{tickets}{ $row->{number} } or next;

		$ticket->{info} = $row->{info};
		delete $ticket->{infos};
		next if !$ticket->{lowered} || $row->{mode} eq 'shared';
		# the hold is exclusive again, from an unknown time on
		$_->{end} //= $self->{killed}
		  foreach grep { $_->{ticket} == $ticket } @{ $self->{holds} };
		delete @$ticket{ 'lowered', 'held' };
		$self->{undone}++;
	}
	return;
}

# From now on, the lease has another ttl.  If it could expire before, other
# clients may have held its locks since then, and lost them again.
sub _end_holds_of
{
	my ($self, $lease) = @_;
	my $end = closed_until($lease);

	foreach my $hold (grep { $_->{ticket}{lease} == $lease->{number} }
		@{ $self->{holds} })
	{
		next if $end >= ($hold->{end} // $infinity);
		$hold->{end} = $end;
		delete $hold->{ticket}{held};
	}
	return;
}

# Continue the history with the state found.
sub _go_on
{
	my ($self, $there, $leases, $durable) = @_;

	# changes unknown to this server did not happen
	foreach my $ticket (values %{ $self->{tickets} })
	{
		delete $ticket->{held}
		  unless $there->{ $ticket->{number} } ||
		  $self->_grant_settled($ticket, $durable);
	}
	foreach my $lease (values %{ $self->{leases} })
	{
		$lease->{alive_until} = $self->{killed}
		  if $lease->{alive_until} > $self->{killed};
		$lease->{live} = $leases->{ $lease->{number} } ? 1 : 0;
		delete @$lease{ 'close', 'gone' } if $lease->{live};
	}
	$self->_go_on_as_changed($there, $leases);
	foreach my $number (keys %$leases)
	{
		my $call = $self->{calls}{ $leases->{$number}[3] };

		$self->_learn_lease($number, $call, $call->{op} ne 'open')
		  if !$self->{leases}{$number} && $call;
	}
	foreach my $hold (@{ $self->{holds} })
	{
		my $ticket = $hold->{ticket};

		if ($ticket->{lease})
		{
			my $lease = $self->{leases}{ $ticket->{lease} };
			my $end = closed_until($lease);
			my $row = $there->{ $ticket->{number} };

			# a ticket that waits again has lost its grant
			$end = $self->{killed}
			  if !($row && $row->{granted}) && $end > $self->{killed};
			delete $ticket->{held} if $row && !$row->{granted};
			$hold->{end} = $end
			  if $end < ($hold->{end} // $infinity);
		}
	}
	foreach my $ticket (values %{ $self->{tickets} })
	{
		$ticket->{live} = 0;
		delete $ticket->{again};
	}
	$self->{asked} = {};
	foreach my $row (values %$there)
	{
		my $call = $self->{calls}{ $row->{info} } or next;

		$call = $self->{tickets}{ $row->{number} }{told}
		  if $call->{op} eq 'set_info';
		my $ticket = $self->_learn_ticket($row->{number}, $row->{name},
			{ %$call, lease => $row->{lease}, mode => $row->{mode},
				permits => $row->{permits} });

		$ticket->{live} = 1;
		delete $ticket->{gone};
		if ($ticket->{release})
		{
			# the release is undone, from an unknown time on
			delete $ticket->{release};
			delete $ticket->{held};
		}
		# the state found is in the WAL
		$self->_hold($ticket,
			{ id => 'found', op => 'found', sync => 'on', scope => 'lease',
				answer => now() })
		  if $row->{granted} &&
		  !$self->{leases}{ $ticket->{lease} }{short};
	}
	return;
}

=pod

=item $history->check_past

Checks the whole history: conflicting clients have never held together, and a
later request has a greater ticket.

=cut

sub check_past
{
	my ($self) = @_;

	my %names = map { $_->{name} => 1 } values %{ $self->{tickets} };

	foreach my $name (grep { /^[xsnd]/ } sort keys %names)
	{
		my @tickets =
		  grep { $_->{name} eq $name } values %{ $self->{tickets} };
		my @holds =
		  grep { $_->{ticket}{name} eq $name } @{ $self->{holds} };
		my @now;

		foreach my $hold (sort { $a->{from} <=> $b->{from} } @holds)
		{
			my $ticket = $hold->{ticket};
			my $permits = 0;

			if ($ticket->{lease})
			{
				my $end = closed_until($self->{leases}{ $ticket->{lease} });

				$hold->{end} = $end if $end < ($hold->{end} // $infinity);
			}
			next if $hold->{from} >= ($hold->{end} // $infinity);
			@now =
			  grep { ($_->{end} // $infinity) > $hold->{from} } @now;
			foreach my $other (@now)
			{
				$self->problem($self->tell($ticket) . ' held beside '
					  . $self->tell($other->{ticket}))
				  if $other->{ticket} != $ticket &&
				  ($hold->{mode} eq 'exclusive' ||
					$other->{mode} eq 'exclusive');
			}
			push @now, $hold;
			$permits += $_->{ticket}{permits} foreach @now;
			$self->problem("$permits permits of $name are taken: "
				  . join(', ', map { $self->tell($_->{ticket}) } @now))
			  if $ticket->{mode} eq 'slots' && $permits >
			  $self->_most_slots($name, $ticket->{told}{begin}, $hold->{from});
		}

		# in the order of requests, with earlier answers before each request
		my @by_begin = sort { $a->{told}{begin} <=> $b->{told}{begin} }
		  grep { $_->{told}{answer} } @tickets;
		my @by_answer =
		  sort { $a->{told}{answer} <=> $b->{told}{answer} } @by_begin;
		my $greatest;

		foreach my $ticket (@by_begin)
		{
			while (@by_answer &&
				$by_answer[0]{told}{answer} < $ticket->{told}{begin})
			{
				my $before = shift @by_answer;

				$greatest = $before
				  if !$greatest || $before->{number} > $greatest->{number};
			}
			$self->problem($self->tell($ticket) . ' came later than '
				  . $self->tell($greatest))
			  if $greatest && $ticket->{number} < $greatest->{number};
		}
	}
	$self->report('in the whole history');
	return;
}

=pod

=item $history->close_all($node)

Closes every lease.  Then checks that no ticket or lease is left, in memory or
in a table.

=back

=cut

sub close_all
{
	my ($self, $node) = @_;
	my $session = session($node);

	# another history can follow on this server
	$session->query('SELECT dlock_set_slots(name, NULL) FROM dlock_slots');
	$session->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
	ok( $session->wait_for(
			q{SELECT NOT EXISTS (SELECT FROM dlock_locks)
				AND NOT EXISTS (SELECT FROM dlock_leases)
				AND NOT EXISTS (SELECT FROM dlock_queue)
				AND NOT EXISTS (SELECT FROM dlock_queue_lease)}),
		'nothing is left behind');
	$session->quit;
	return;
}

1;
