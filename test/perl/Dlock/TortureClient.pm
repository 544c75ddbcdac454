
=pod

=head1 NAME

Dlock::TortureClient - a client of dlock that is hurt, and goes on

=head1 DESCRIPTION

A Dlock::Client's session lives until the server dies.  The sessions of this
class also end before, and their calls are canceled.  A client that has lost
its session waits until the backend is gone, connects again, and finds out the
result of its unanswered call.  It records the time when the session surely
existed last: when its last answered call began.

	lost  time  client  that time

In addition to a Dlock::Client's calls, clients hold locks for whole
transactions, wait without a timeout, and therefore sometimes in deadlocks,
enqueue in session scope, make guarded writes, and release tickets of others by
force.  They listen for their grants, for waiters for their locks, and for
changes of locks that they watch.  They downgrade exclusive holds, and repeat
requests for held locks.  One client sets the number of permits of semaphores,
except if servers are cut off from each other.  Leases that may expire
sometimes have a delay.

The test directs clients by files.  "stop.ROUND", or "stop.ROUND.CLIENT", ends
them. "stop.ROUND.alone" tells them that their server is cut off from its
standbys, so that they find out what it still grants.

=cut

package Dlock::TortureClient;

use strict;
use warnings FATAL => 'all';

use parent 'Dlock::Client';

use Dlock::Client qw(choose is_number percent shape);
use Dlock::Test ();
use PostgreSQL::Test::Utils ();
use Time::HiRes qw(clock_gettime usleep CLOCK_MONOTONIC);

our @EXPORT_OK = qw(@blocking $ends $most_slots);

# The greatest number of permits that semaphores are set to
our $most_slots = 5;

# Locks of sessions and transactions only, which may wait without limit
our @blocking = ('b1', 'b2', 'b3');

# Locks of sessions and transactions only, which are downgraded after a while
my @lowered = ('d1', 'd1', 'd2', 's1');

# Calls that end something
our $ends = qr/^(?:release|release_ticket|release_at_commit|close|force)$/;

my %exclusive = (mode => 'exclusive', permits => 1);

sub new
{
	my ($class, $history, $load, $number) = @_;
	my $self = $class->SUPER::new($history, $load, $number);

	$self->{$_} = $history->{$_} foreach 'apart', 'shorts';
	$self->{stop} = $load->{stop};
	$self->{parent} = getppid();
	return $self;
}

# Is the server about to be killed?  Then this file exists, or the test died.
sub is_over
{
	my ($self) = @_;

	return getppid() != $self->{parent} ||
	  -e $self->{stop} || -e "$self->{stop}.$self->{client}";
}

# Is the server cut off from its standbys?  Then this file exists.
sub is_alone
{
	my ($self) = @_;

	return -e "$self->{stop}.alone";
}

sub run
{
	my ($self) = @_;

	until ($self->is_over)
	{
		$self->connect or next;
		if (defined $self->find_out)
		{
			while ($self->step) { }
		}
		$self->{session}->vanish;
		$self->note_down('lost', clock_gettime(CLOCK_MONOTONIC),
			$self->{client}, $self->{last_alive});
		last if $self->is_over;
		Dlock::Test::poll('backend is gone',
			sub { !kill(0, $self->{session}{pid}) || $self->is_over });
	}
	return;
}

sub connect
{
	my ($self) = @_;

	$self->{session_tickets} = {};
	$self->{listens} = {};
	$self->{heard} = {};
	$self->{wanted} = {};
	$self->{watched} = {};
	$self->{infos} = {};
	return 1 if eval { $self->SUPER::connect };
	usleep(50_000);
	return 0;
}

# Finds out the result of the unanswered call.  If the call got what it
# requested, records that, and returns true.  Returns undef if the session has
# ended.
sub find_out
{
	my ($self) = @_;
	my ($id, $call) = @{ delete $self->{asked} // [] };
	my $found;

	return 0 unless $id && ($call->{op} eq 'open' ||
		$call->{scope} eq 'lease' && $call->{op} =~ /acquire|enqueue/);
	for (1 .. 20)
	{
		$found = $self->{session}->query(
			$call->{op} eq 'open' ?
			  "SELECT lease FROM dlock_leases WHERE info = '$id'" :
			  # a ticket that keeps a lock closed neither holds nor waits
			  q{SELECT ticket FROM dlock_locks WHERE scope = 'lease' }
			  . "AND (granted OR position > 0) AND info = '$id'");
		last if $found !~ /ERROR:  57014/;
	}
	return 0 if $found eq '';
	return undef if $found !~ /^\d+$/m;
	if ($call->{op} eq 'lease_acquire_all')
	{
		delete $self->{leases}{ $call->{lease} };
		return $self->call('close', "dlock_lease_close($call->{lease})",
			lease => $call->{lease}, scope => 'none');
	}
	$self->note_down('told', clock_gettime(CLOCK_MONOTONIC), $id, $found,
		found => 1);
	if ($call->{op} eq 'open')
	{
		$self->{leases}{$found} = $call->{short};
	}
	else
	{
		$self->{tickets}{$found} = $call->{name};
	}
	return 1;
}

# A cancel may have come after the call had ended a ticket.
sub told
{
	my ($self, $id, $answer, @begin) = @_;
	my $done = $answer eq 'error 57014' ? $self->find_out : 0;

	return undef if !defined $done;
	return $done ? $answer : $self->SUPER::told($id, $answer, @begin);
}

# Overrides the method: repeats a canceled call that ends a ticket or lease.
sub call
{
	my ($self, $op, $expression, %call) = @_;
	my $answer;

	for (1 .. 6)
	{
		$answer = $self->SUPER::call($op, $expression, %call);
		last if ($answer // '') ne 'error 57014' || $op !~ $ends;
	}
	$self->note_listening($answer, %call)
	  if defined $answer && $op eq 'enqueue' && $call{scope} eq 'lease';
	return $answer;
}

sub step
{
	my ($self) = @_;
	my $what = rand(100);

	$self->renew_in_time or return 0;
	return $self->step_alone if $self->is_alone;
	return
	  $what < 6 ? $self->block :
	  $what < 11 ? $self->wait_for_ever :
	  $what < 16 ? $self->queue_up :
	  $what < 19 ? $self->without_snapshot :
	  $what < 22 ? $self->all_at_once :
	  $what < 30 ? $self->guarded_write :
	  $what < 31 ? $self->force :
	  $what < 35 ? $self->confirm :
	  $what < 42 ? $self->listen :
	  $what < 45 ? $self->lapse :
	  $what < 47 ? $self->watch :
	  $what < 51 ? $self->go_down :
	  $what < 53 ? $self->be_wanted :
	  $what < 54 ? $self->set_slots :
	  $what < 57 ? $self->change(choose(sort keys %{ $self->{leases} }),
		choose(sort keys %{ $self->{tickets} })) :
	  $self->SUPER::step;
}

# A client of a server that is cut off tries to keep its locks.  The server
# must not say that the client can.
sub step_alone
{
	my ($self) = @_;
	my $what = rand(100);

	# First release all locks, so that no session waits for this session.
	return defined $self->release_all && $self->lapse(2, 0, ['on'])
	  unless $self->{prepared}++;
	# most waits for standbys would not end
	$self->{off} = 90;
	usleep(5_000);
	return
	  $what < 80 ? $self->confirm :
	  $what < 90 ? $self->guarded_write :
	  $what < 93 ? defined $self->open_lease :
	  $what < 96 ? $self->change_somebodys_ttl :
	  $self->ask_for_lease(choose('x1', 's1', 'n1'),
		choose(sort keys %{ $self->{leases} }));
}

# Opens a lease for which standbys count.
sub change_somebodys_ttl
{
	my ($self) = @_;
	my $leases = $self->{leases};
	my $lease = choose(grep { $leases->{$_} } sort keys %$leases);

	return $lease ? $self->change_ttl($lease) : 1;
}

sub short
{
	my ($self) = @_;

	return percent(@{ $self->{shorts} } > 1 ? 60 : 25) ?
	  choose(@{ $self->{shorts} }) : 0;
}

# A lease with a lock of its own keeps it.
sub another_short
{
	my ($self, $before) = @_;

	return $self->short unless $self->{apart};
	return $before ? choose(@{ $self->{shorts} }) : 0;
}

# Longer than most leases, so that a grant during the delay is noticed.
sub delay
{
	return choose(0, 0.7);
}

# x1 for leases that may expire, and x7 for other leases
sub lock_for
{
	my ($self, $name, $short) = @_;

	$name =~ tr/123/789/ if $self->{apart} && !$short;
	return $name;
}

# Sometimes use the session's own channel.
sub channel
{
	my ($self, $call) = @_;

	return ", channel => 'history'" if choose(0, 1);
	$call->{listens} = 1;
	return '';
}

# Acquire a lock with a lease that expires soon, and whose delay begins then.
sub lapse
{
	my ($self, $short, $delay, $levels) = @_;
	my $name = choose('x1', 'x2', 'x3');
	my $result;

	local $self->{levels} = $levels // $self->{levels};
	local $self->{off} = $levels ? 0 : $self->{off};
	my $lease = $self->open_lease($short // 0.2, $delay // 0.7);

	return defined $lease unless is_number($lease);
	$result = $self->call('acquire',
		"dlock_try_lease_acquire('$name', $lease, '200 ms', INFO)", %exclusive,
		name => $name, lease => $lease, scope => 'lease');
	$self->{tickets}{$result} = $name if is_number($result);
	return defined $result;
}

# Does the same as a Dlock::Client, for leases that live long enough.
sub renew_in_time
{
	my ($self) = @_;
	my $leases = $self->{leases};

	foreach my $lease (grep { $leases->{$_} >= 1 } sort keys %$leases)
	{
		my $now = clock_gettime(CLOCK_MONOTONIC);

		next if $now < ($self->{renewed}{$lease} // 0) + $leases->{$lease} / 4;
		$self->{renewed}{$lease} = $now;
		my $result = $self->call('renew', "dlock_renew($lease)",
			lease => $lease, scope => 'none');
		return 0 if !defined $result;
		delete $leases->{$lease} if $result eq 'null';
	}
	return 1;
}

# Ask about the client's tickets, or renew them.  When the server is cut off,
# mostly choose tickets that must not last on it.
sub confirm
{
	my ($self) = @_;
	my ($leases, $tickets) = @$self{ 'leases', 'tickets' };
	my $all = !$self->is_alone;
	my $lease = choose(grep { $all || $leases->{$_} } sort keys %$leases);
	my $ticket =
	  choose(grep { $all || $tickets->{$_} =~ /[123]/ } sort keys %$tickets);
	my $result;

	if ($lease && choose(0, 1))
	{
		$result = $self->call('renew', "dlock_renew($lease)",
			lease => $lease, scope => 'none');
		delete $leases->{$lease} if ($result // '') eq 'null';
	}
	elsif ($ticket)
	{
		$result = $self->call('check',
			"dlock_check('$tickets->{$ticket}', $ticket)",
			ticket => $ticket, scope => 'lease');
	}
	else
	{
		usleep(10_000);
		return 1;
	}
	return defined $result;
}

# Set a semaphore's number of permits.  With 0, the requests' number counts.
sub set_slots
{
	my ($self) = @_;
	my $name = choose('n1', 'n2');
	my $number = choose(0 .. $most_slots);

	return 1 if $self->{client} != 1 || $self->{apart};
	return defined $self->call('set_slots',
		"dlock_set_slots('$name', nullif($number, 0))",
		name => $name, number => $number, scope => 'none');
}

# End another client's ticket.
sub force
{
	my ($self) = @_;
	my ($ticket, $name) = split /\|/,
	  choose(split /\n/,
		$self->{session}->query('SELECT ticket, name FROM dlock_locks')) // '';

	return 1 unless is_number($ticket) && $name;
	return defined $self->call('force', "dlock_force_release($ticket)",
		ticket => $ticket, name => $name, scope => 'none');
}

# Is the grant of this session's enqueued ticket announced?  The announcement
# may take some time, but must come.
sub listen
{
	my ($self) = @_;
	my $patience = clock_gettime(CLOCK_MONOTONIC)
	  + $PostgreSQL::Test::Utils::timeout_default / 2;
	my $ticket = choose(sort keys %{ $self->{listens} }) or return 1;
	my $scope = $self->{listens}{$ticket};

	# until the announcement, the client does not have its answer
	local $self->{quiet} = 0;
	for (;;)
	{
		my $announced = $self->has_heard($ticket);
		my $result = $self->call('wait', "dlock_wait($ticket, '0')",
			ticket => $ticket, scope => $scope,
			announced => $announced ? 1 : 0);

		return 0 if !defined $result;
		next if $result eq 'error 57014';
		delete $self->{listens}{$ticket} if $announced || $result =~ /^error/;
		$self->{listened}{$ticket} = $scope if $announced && $result eq 't';
		return 1 if $announced || $result ne 't' || $self->is_alone;
		if (clock_gettime(CLOCK_MONOTONIC) > $patience)
		{
			$self->note_down('odd', clock_gettime(CLOCK_MONOTONIC),
				$self->{client}, "ticket $ticket holds, unannounced");
			delete $self->{listens}{$ticket};
			return 1;
		}
		$self->{quiet} = 1;
		usleep(10_000);
	}
}

# A lease gets its existing ticket, whose grant is now announced to this
# channel, or, after an error, to an unknown one.
sub note_listening
{
	my ($self, $answer, %call) = @_;

	delete $self->{listens}{$_}
	  foreach is_number($answer) ? $answer :
	  grep { ($self->{tickets}{$_} // '') eq $call{name} }
	  keys %{ $self->{listens} };
	$self->{listens}{$answer} = 'lease'
	  if $call{listens} && is_number($answer);
	return;
}

# Returns the notifications before the latest answer.
sub has_heard
{
	my ($self, $ticket) = @_;

	foreach my $payload (splice @{ $self->{session}{announcements} // [] })
	{
		$self->{heard}{$1} = 1
		  if $payload =~ /"event":"granted".*"ticket":(\d+)/;
		$self->{wanted}{$1} = 1
		  if $payload =~ /"event":"wanted".*"ticket":(\d+)/;
		$self->hear_of($2, $1, $3)
		  if $payload =~
		  /"event":"(held|free)","lock":"(\w+)"(?:,"ticket":(\d+))?/;
	}
	return $self->{heard}{$ticket};
}

# Processes a message about the holder of a watched lock.  For an exclusive
# hold, the latest message must be about the latest holder.
sub hear_of
{
	my ($self, $name, $event, $ticket) = @_;
	my $watched = $self->{watched}{$name} or return;

	$watched->{heard} = 1;
	return if $event eq 'free';
	$self->note_down('odd', clock_gettime(CLOCK_MONOTONIC), $self->{client},
		"$name is told to be held by $ticket after $watched->{ticket}")
	  if $name =~ /^x/ && ($watched->{ticket} // 0) > $ticket;
	$watched->{ticket} = $ticket;
	return;
}

# While another client waits, is a holder whose grants are announced told that
# its lock is wanted?  That may take some time, too.
sub be_wanted
{
	my ($self) = @_;
	my $ticket = choose(
		grep { $self->has_heard($_) } sort keys %{ $self->{listened} // {} });
	my $patience = clock_gettime(CLOCK_MONOTONIC)
	  + $PostgreSQL::Test::Utils::timeout_default / 2;
	my $seen = $ticket ? $self->{session}->query(
		'SELECT 1 FROM dlock_locks h JOIN dlock_locks w USING (name) '
		  . "WHERE h.ticket = $ticket AND h.granted AND w.\"position\" > 0 "
		  . 'LIMIT 1') : '';

	return 1 if $seen ne '1';
	local $self->{quiet} = 0;
	for (;;)
	{
		my $result = $self->call('wait', "dlock_wait($ticket, '0')",
			ticket => $ticket, scope => $self->{listened}{$ticket});

		return 0 if !defined $result;
		next if $result eq 'error 57014';
		$self->has_heard($ticket);
		return 1 if $result ne 't' || $self->{wanted}{$ticket} || $self->is_alone;
		if (clock_gettime(CLOCK_MONOTONIC) > $patience)
		{
			$self->note_down('odd', clock_gettime(CLOCK_MONOTONIC),
				$self->{client}, "ticket $ticket is wanted, and not told so");
			return 1;
		}
		$self->{quiet} = 1;
		usleep(10_000);
	}
}

# Made durable by the next durable call, so that such calls cannot rely on it.
my $flushed_later = 'SET LOCAL synchronous_commit = off; ';

# A lock for a transaction, and perhaps a write.  Waits without a timeout, so
# that only deadlock detection ends some waits.
sub block
{
	my ($self) = @_;
	my $count = choose(1, 1, 2);
	my %held;

	$self->surely('BEGIN') or return 0;
	foreach my $name ((sort { rand() <=> 0.5 } @blocking)
		[ 0 .. $count - 1 ])
	{
		next if $self->{session_holds}{$name};
		my $fence = $self->call('acquire', "dlock_xact_acquire('$name', INFO)",
			%exclusive, name => $name, scope => 'xact', block => 1);

		return 0 if !defined $fence;
		if (!is_number($fence))
		{
			%held = ();
			last;
		}
		$held{$name} = $fence;
	}
	my ($name) = sort keys %held;

	if ($name && choose(0, 1))
	{
		return 0 if !defined $self->call('write', '', scope => 'none',
			block => 1, ticket => $held{$name},
			sql => $flushed_later . write_sql($name, $held{$name}));
	}
	delete $self->{sync};
	return defined $self->call('end_block', '', scope => 'none', block => 1,
		sql => choose('COMMIT', 'COMMIT', 'ROLLBACK'))
	  && $self->surely('ROLLBACK');
}

sub write_sql
{
	my ($name, $fence) = @_;

	return
	  "DO \$\$BEGIN PERFORM dlock_guard('$name', $fence); END\$\$; "
	  . "UPDATE guarded SET stale = stale + (fence > $fence)::int, "
	  . "fence = greatest(fence, $fence) WHERE name = '$name'";
}

# With a lease's ticket, or a ticket that may be gone
sub guarded_write
{
	my ($self) = @_;
	my @tickets = grep { $self->{tickets}{$_} =~ /^x/ }
	  sort keys %{ $self->{tickets} };
	my $ticket = choose(@tickets) or return 1;

	my $later = choose(0, 1);

	# A skipped wait for standbys causes a warning.
	return defined $self->call('guard', '', scope => 'lease',
		ticket => $ticket, $later ? (sync => 'off') : (),
		sql => 'BEGIN; SET LOCAL client_min_messages = warning; '
		  . ($later ? $flushed_later : '')
		  . write_sql($self->{tickets}{$ticket}, $ticket) . '; COMMIT');
}

sub wait_for_ever
{
	my ($self) = @_;
	my $name = choose(@blocking);
	my $result;

	if ($self->{session_holds}{$name})
	{
		delete $self->{session_holds}{$name};
		return defined $self->call('release', "dlock_release('$name')",
			name => $name, scope => 'none');
	}
	$result = $self->call('acquire', "dlock_acquire('$name', INFO)",
		%exclusive, name => $name, scope => 'session');
	$self->{session_holds}{$name} = $result if is_number($result);

	# after a deadlock, the transaction must have failed
	return defined $self->release_all
	  if ($result // '') eq 'error 40P01';
	return defined $result;
}

# A queued ticket would block a request of the same session.
sub use_session
{
	my ($self, $name) = @_;

	return 1 if %{ $self->{session_tickets} };
	return $self->SUPER::use_session($name);
}

sub release_all
{
	my ($self) = @_;

	delete $self->{listens}{$_} foreach keys %{ $self->{session_tickets} };
	$self->{session_holds} = {};
	$self->{session_tickets} = {};
	return $self->call('release_all', 'dlock_release_all()',
		scope => 'none');
}

# A place in a queue, in session scope
sub queue_up
{
	my ($self) = @_;
	my @tickets = sort keys %{ $self->{session_tickets} };
	my $ticket = choose(@tickets);
	my $result;

	if (!$ticket)
	{
		my $name = choose('x1', 'x2', 'x3', 's1', 'n1', 'n2', 'd1', 'd1', 'd2');
		my ($arguments, %call) = shape($name);

		return 1 if $self->{session_holds}{$name};
		$result = $self->call('enqueue', "dlock_enqueue('$name'$arguments, INFO)",
			%call, name => $name, scope => 'session');
		$self->{session_tickets}{$result} = 1 if is_number($result);
		$self->{listens}{$result} = 'session' if is_number($result);
	}
	elsif (choose(0, 1))
	{
		$result = $self->call('wait', "dlock_wait($ticket, '20 ms')",
			ticket => $ticket, scope => 'session');
	}
	else
	{
		$result =
		  $self->call('release_ticket', "dlock_release_ticket($ticket)",
			ticket => $ticket, scope => 'none');
		delete $self->{session_tickets}{$ticket};
		delete $self->{listens}{$ticket};
	}
	return defined $result;
}

# Watch a lock, or end the watch.  No other client must notice.  A client that
# begins a watch on the session's own channel is told the holder.
sub watch
{
	my ($self) = @_;
	my $name = choose('x1', 'x2', 'x3', 's1', 'n1', 'n2');
	my $call = choose("dlock_watch('$name')", "dlock_watch('$name')",
		"dlock_watch('$name', 'history')", "dlock_unwatch('$name')");
	my $patience = clock_gettime(CLOCK_MONOTONIC)
	  + $PostgreSQL::Test::Utils::timeout_default / 2;

	$self->has_heard(0);
	$self->surely('DO $$BEGIN SET LOCAL client_min_messages = error; '
		  . "PERFORM $call; END\$\$") or return 0;
	delete $self->{watched}{$name};
	return 1 if $call ne "dlock_watch('$name')";
	my $watched = $self->{watched}{$name} = {};

	until ($watched->{heard} || $self->is_alone || $self->is_over)
	{
		# Notifications come with answers.
		$self->surely('SELECT 1 WHERE false') or return 0;
		$self->has_heard(0);
		if (clock_gettime(CLOCK_MONOTONIC) > $patience)
		{
			$self->note_down('odd', clock_gettime(CLOCK_MONOTONIC),
				$self->{client}, "$name is watched, and nothing is told");
			return 1;
		}
		usleep(10_000) unless $watched->{heard};
	}
	return 1;
}

# Hold a lock for a session or a transaction, and later admit shared holders.
sub go_down
{
	my ($self) = @_;
	my $name = choose(@lowered);

	return 1 if %{ $self->{session_tickets} };
	return $self->use_session($name)
	  if $self->{session_holds}{$name} || choose(0, 0, 1);
	return $self->go_down_in_block($name) if choose(0, 1);
	my $fence = $self->call('acquire', "dlock_try_acquire('$name', '20 ms', INFO)",
		%exclusive, name => $name, scope => 'session');
	my $again = choose(0, 1);

	return defined $fence unless is_number($fence);
	$self->{session_holds}{$name} = $fence;
	if ($again)
	{
		return 0 if !defined $self->ask_again($name, $fence, $fence);
	}
	$self->await_waiter($name);
	my $result = $self->downgrade($fence, 'none');

	return 0 if !defined $result;
	$self->look_at_head($name) if $result eq 't' && $name =~ /^d/;
	if ($again && $result eq 't')
	{
		return 0
		  if !defined $self->ask_again($name, $fence, $fence, ', shared => true') ||
		  !defined $self->ask_again($name, $fence, 'error 55000');
	}
	return $again ? defined $self->release_all : 1;
}

# Wait a little, so that another client may queue and be admitted.
sub await_waiter
{
	my ($self, $name) = @_;

	for (1 .. 20)
	{
		return if $self->{session}->query(
			qq{SELECT 1 FROM dlock_locks('$name') WHERE "position" > 0 LIMIT 1})
		  ne '';
		usleep(20_000);
	}
	return;
}

# Check that a shared request is not at the queue's head beside a shared hold.
sub look_at_head
{
	my ($self, $name) = @_;
	my $head = $self->{session}->query(
		"SELECT w.ticket FROM dlock_locks('$name') w "
		  . qq{WHERE w."position" = 1 AND w.mode = 'shared'});

	$self->note_down('odd', clock_gettime(CLOCK_MONOTONIC), $self->{client},
		"ticket $head waits for $name, which is shared")
	  if is_number($head);
	return;
}

# Both scopes use the session's only ticket, as long as it exists.
sub ask_again
{
	my ($self, $name, $fence, $expected, $arguments, %block) = @_;
	my $function = %block ? 'dlock_xact_acquire' :
	  choose('dlock_acquire', 'dlock_xact_acquire');

	# The timeout is for the case that the ticket was ended by force.
	return $self->call('reenter',
		"$function('$name', '20 ms'" . ($arguments // '') . ')',
		ticket => $fence, name => $name, scope => 'none',
		expected => $expected, %block);
}

sub go_down_in_block
{
	my ($self, $name) = @_;
	my %block = (block => 1);
	my @steps = (
		sub {
			my ($fence) = @_;

			$self->call('protect', '', ticket => $fence, scope => 'none', %block,
				sql => "DO \$\$BEGIN PERFORM dlock_guard('$name', $fence); END\$\$");
		},
		sub { $self->downgrade($_[0], 'none', %block) },
		sub {
			$self->ask_again($name, $_[0], $_[0], ', shared => true', %block);
		});

	$self->surely('BEGIN') or return 0;
	my $fence = $self->call('acquire',
		"dlock_try_xact_acquire('$name', '20 ms', INFO)",
		%exclusive, name => $name, scope => 'xact', %block);

	return 0 if !defined $fence;
	shift @steps if choose(0, 1);
	while (is_number($fence) && @steps)
	{
		my $result = (shift @steps)->($fence);

		return 0 if !defined $result;
		last if $result =~ /^(?:error|f$)/;
	}
	delete $self->{sync};
	return defined $self->call('end_block', '', scope => 'none', %block,
		sql => choose('COMMIT', 'COMMIT', 'ROLLBACK'))
	  && $self->surely('ROLLBACK');
}

sub without_snapshot
{
	my ($self) = @_;
	my $name = choose('x1', 'x2', 'x3');

	return 1 if $self->{session_holds}{$name} || %{ $self->{session_tickets} };
	my $result = $self->call('acquire', '', %exclusive,
		name => $name, scope => 'session',
		sql => "CALL dlock_acquire_nosnapshot('$name', '20 ms', INFO)");

	$self->{session_holds}{$name} = 1 if is_number($result);
	return defined $result;
}

sub all_at_once
{
	my ($self) = @_;

	return 1 if %{ $self->{session_tickets} };
	return 0 if %{ $self->{session_holds} } && !defined $self->release_all;
	my $result = $self->call('acquire_all',
		"dlock_try_acquire_all('{x2,b1,x1}', '20 ms', INFO)",
		%exclusive, name => 'x2,b1,x1', scope => 'session');

	$self->{session_holds}{$_} = 1 foreach ($result // '') =~ /^\{/ ?
	  ('x1', 'x2', 'b1') : ();
	return defined $result;
}

1;
