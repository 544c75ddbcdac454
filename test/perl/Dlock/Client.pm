
=pod

=head1 NAME

Dlock::Client - a client that makes all kinds of calls of dlock, at random

=head1 DESCRIPTION

A client is a process with its own session.  It makes all kinds of calls with
leases, and acquires locks of the other scopes, until the session ends.  Its
file in the history's directory has one line for each call, written before the
call, and one line for the answer:

	asks  time  id  ''      what is asked: names and values
	told  time  id  result

The result is a value, "null", or "error" with an SQLSTATE.  If the session
lives, any other answer is recorded as "odd".

=head1 METHODS

=over

=item Dlock::Client->new($history, $load, $number)

=item $client->run

Connects, and runs until the session ends.

=item $client->call($op, $expression, %call)

Makes a call, and returns the result, or nothing if the session has ended.
INFO in the expression stands for the argument that identifies the call in
dlock's views. %call is for the history. sql => $sql replaces the whole
statement.  With block => 1, the call is in a transaction block, and the client
rolls the block back if it failed.

=item $client->step

Makes a random step.  Returns false if the session has ended.

=back

=cut

package Dlock::Client;

use strict;
use warnings FATAL => 'all';

use Dlock::Test ();
use Exporter 'import';
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);

our @EXPORT_OK = qw($slots $ttl choose is_number percent shape);

# The first letter of a lock's name is its mode: exclusive, shared, slots.
my @locks = ('x1', 'x2', 'x3', 's1', 'n1', 'n2');
our $slots = 3;

# the locks of leases that do not expire, and of leases that do
our $ttl = 3600;
my $short_ttl = 0.2;

sub new
{
	my ($class, $history, $load, $number) = @_;
	my ($leases, $tickets) = $history->belongings($number);
	my $self = bless {
		client => $number,
		node => $load->{node},
		pipe => $load->{writer},
		off => $load->{off},
		round => $load->{round},
		levels => $history->{levels},
		calls => 0,
		leases => $leases,      # number => seconds until it runs out, 0: never
		tickets => $tickets,    # number => name
		infos => {}             # number => known info
	}, $class;

	srand($history->{seed} * 100_000 + $self->{round} * 100 + $number);
	open $self->{file}, '>', "$history->{dir}/$self->{round}.$number"
	  or die "open: $!";
	$self->{file}->autoflush(1);
	return $self;
}

sub run
{
	my ($self) = @_;

	if ($self->connect)
	{
		while ($self->step) { }
	}
	$self->{session}->vanish;
	return;
}

sub connect
{
	my ($self) = @_;

	$self->{session} = Dlock::Test::session($self->{node}, 'postgres',
		"application_name=client_$self->{client}");
	$self->{session}->may_end;
	$self->{session_holds} = {};    # name => ticket, or 1
	delete $self->{sync};
	$self->{last_alive} = clock_gettime(CLOCK_MONOTONIC);
	return $self->surely('SET client_min_messages = error');
}

# Statements that take effect even if they are canceled
sub surely
{
	my ($self, $sql) = @_;

	for (1 .. 20)
	{
		my $answer = $self->{session}->query($sql);

		return $self->is_alive if $answer eq '';
		return 0 if $answer !~ /ERROR:  57014/;
	}
	return 0;
}

sub is_alive
{
	my ($self) = @_;

	return $self->{session}->query('\\echo alive') =~ /^alive/;
}

sub note_down
{
	my ($self, @fields) = @_;

	print { $self->{file} } join("\t", @fields), "\n" or die "print: $!";
	return;
}

sub call
{
	my ($self, $op, $expression, %call) = @_;
	my $sql = delete $call{sql}
	  // "SELECT coalesce(($expression)::text, 'null')";
	my $id = "$self->{round}.$self->{client}." . ++$self->{calls};
	my $begin;

	if (!$call{block})
	{
		my $sync = percent($self->{off}) ? 'off' : choose(@{ $self->{levels} });

		$self->surely("SET synchronous_commit = $sync") or return
		  if $sync ne ($self->{sync} // '');
		$self->{sync} = $sync;
	}
	$sql =~ s/INFO/info => '$id'/;
	$sql = "BEGIN; $sql; COMMIT" if $op eq 'release_at_commit';
	# the call that is not answered yet
	$self->{asked} = [ $id, \%call ];
	$call{op} = $op;
	$begin = clock_gettime(CLOCK_MONOTONIC);
	$self->note_down('asks', $begin, $id, '', client => $self->{client},
		sync => $self->{sync} // 'on', %call);
	my $answer = $self->{session}->query($sql);

	$answer =~ s/^(t|f)(rue|alse)$/$1/;
	if ($answer =~ /(?:ERROR|FATAL|PANIC):  ([0-9A-Z]{5})/)
	{
		return if $1 =~ /^(57P|08)/;
		# dlock has canceled the statement because the guarded lock is lost
		$answer = $answer =~ /57014: canceling statement due to loss of lock/ ?
		  'error 55L01' : "error $1";
		$self->surely('ROLLBACK') or return if !$call{block};
	}
	elsif ($answer =~ /WARNING:  .*wait(?:ing)? for synchronous replication/)
	{
		# the call is committed here, but the standbys may not have it
		return unless $self->is_alive;
		$answer = 'error 57014';
	}
	elsif ($answer =~ /^\s*$/ &&
		$op =~ /^(?:release_at_commit|guard|write|protect|end_block|set_slots)$/)
	{
		# the call returns no value: only the arrival of the answer counts
		return unless $self->is_alive;
		$answer = 't';
	}
	elsif ($answer !~ /^(null|-?\d+|t|f|\{[\d,]+\})$/)
	{
		$self->note_down('odd', clock_gettime(CLOCK_MONOTONIC),
			$self->{client}, "$id, $op: " . $answer =~ s/[\n\t]/ /gr)
		  if $answer ne '' &&
		  $answer !~ /server closed the connection|connection to server/;
		return;
	}
	return $self->told($id, $answer, $begin);
}

# Note that the call that began at this time has been answered.
sub told
{
	my ($self, $id, $answer, $begin) = @_;

	delete $self->{asked};
	# the answer may have been sent before the session ended, and read later
	$self->{last_alive} = $begin;
	$self->note_down('told', clock_gettime(CLOCK_MONOTONIC), $id, $answer);
	syswrite($self->{pipe}, chr $self->{client}) unless $self->{quiet};
	return $answer;
}

sub choose
{
	return $_[ int(rand(scalar @_)) ];
}

sub percent
{
	return rand(100) < $_[0];
}

# Returns the arguments of every kind of request, and their values.
sub shape
{
	my ($name) = @_;
	my $permits = choose(1, 1, 2);

	return $name =~ /^n/ ?
	  (", slots => $slots, permits => $permits", mode => 'slots',
		permits => $permits) :
	  $name =~ /^[sd]/ && percent(70) ?
	  (', shared => true', mode => 'shared', permits => 1) :
	  ('', mode => 'exclusive', permits => 1);
}

sub is_number
{
	return defined $_[0] && $_[0] =~ /^\d+$/;
}

# Returns the argument for a channel of announcements.  %$call may record it.
sub channel
{
	return ", channel => 'history'";
}

# Makes one call.  Returns false if the session has ended.
sub step
{
	my ($self) = @_;
	my @leases = sort keys %{ $self->{leases} };
	my @tickets = sort keys %{ $self->{tickets} };
	my $name = choose(@locks);
	my $what = rand(100);
	my $lease = choose(@leases);
	my $ticket = choose(@tickets);
	my $result;

	if (@leases < 2 && $what < 50)
	{
		return defined $self->open_lease;
	}
	elsif (@tickets > 6 || $ticket && $what < 25)
	{
		return $self->release($ticket);
	}
	elsif ($lease && $what < 30)
	{
		$result = $self->call('close', "dlock_lease_close($lease)",
			lease => $lease, scope => 'none');
		delete $self->{leases}{$lease};
	}
	elsif ($lease && $what < 36)
	{
		$result = $self->call('renew', "dlock_renew($lease)",
			lease => $lease, scope => 'none');
		delete $self->{leases}{$lease} if ($result // '') eq 'null';
	}
	elsif ($ticket && $what < 50)
	{
		$result = $self->call('wait', "dlock_wait($ticket, '20 ms')",
			ticket => $ticket, scope => 'lease');
		delete $self->{tickets}{$ticket} if ($result // '') eq 'error 55L01';
	}
	elsif ($lease && $what < 53)
	{
		my $other = choose(grep { /^x/ && $_ ne $name } @locks);

		$name = 'x1' if $name !~ /^x/;
		$name = 'x2' if $name eq $other;
		$_ = $self->lock_for($_, $self->{leases}{$lease}) foreach $name, $other;
		$result = $self->call(
			'lease_acquire_all',
			"dlock_try_lease_acquire_all('{$name,$other}', $lease, "
			  . "'20 ms', INFO)",
			name => "$name,$other", lease => $lease, scope => 'lease',
			mode => 'exclusive', permits => 1);
		my ($first, $second) = ($result // '') =~ /^\{(\d+),(\d+)\}$/;
		$self->{tickets}{$first} = $name if $first;
		$self->{tickets}{$second} = $other if $second;
	}
	elsif ($what < 80)
	{
		return $self->ask_for_lease($name, $lease);
	}
	elsif ($what < 86)
	{
		return $self->change($lease, $ticket);
	}
	else
	{
		return $self->use_session($name);
	}
	return defined $result;
}

# The seconds after which a lease may expire, or 0 if it never does
sub short
{
	return percent(25) ? $short_ttl : 0;
}

# The delay of a lease that may expire, in seconds
sub delay
{
	return 0;
}

# The lock to request with a lease that may expire, if $name was chosen
sub lock_for
{
	my ($self, $name, $short) = @_;

	return $name;
}

# Returns the lease's number or an error, or undef if the session has ended.
sub open_lease
{
	my ($self, $short, $delay) = @_;

	$short //= $self->short;
	$delay //= $short ? $self->delay : 0;
	my $result = $self->call(
		'open',
		"dlock_lease_open('" . ($short || $ttl) . " s', "
		  . 'attach => ' . (!$short && percent(20) ? 'true' : 'false')
		  . ($delay ? ", delay => '$delay s'" : '')
		  . ', INFO)',
		short => $short, delay => $delay, scope => 'none');

	$self->{leases}{$result} = $short if is_number($result);
	return $result;
}

sub release
{
	my ($self, $ticket) = @_;
	my $result =
	  percent(80) ?
	  $self->call('release_ticket', "dlock_release_ticket($ticket)",
		ticket => $ticket, scope => 'none') :
	  $self->call('release_at_commit', "dlock_release_at_commit($ticket)",
		ticket => $ticket, scope => 'none');

	delete $self->{tickets}{$ticket};
	return defined $result;
}

sub ask_for_lease
{
	my ($self, $name, $lease) = @_;
	my ($arguments, %call) = shape($name);
	my $kind = choose('acquire', 'try', 'enqueue', 'enqueue');
	my $function = $kind eq 'try' ? 'dlock_try_' : 'dlock_';
	my $second = $lease;
	my $short;
	my $result;

	$function .= $lease && percent(50) ? 'lease_' : 'ttl_';
	if ($function =~ /ttl/)
	{
		$short = $self->short;
		$second = "'" . ($short || $ttl) . " s'";
		$call{short} = $short;
		$call{lease} = 0;
	}
	else
	{
		$short = $self->{leases}{$lease};
		$call{lease} = $lease;
	}
	$name = $self->lock_for($name, $short);
	$function .= $kind eq 'enqueue' ? 'enqueue' : 'acquire';
	$arguments .=
	  $kind ne 'enqueue' ? ", timeout => '20 ms'" : $self->channel(\%call);
	if (percent(30) && $function !~ /ttl/)
	{
		# no other client can make the same request
		$call{owner} = "$self->{client}." . choose(1, 2);
		$arguments .= ", owner => '$call{owner}'";
	}
	$result = $self->call($kind eq 'enqueue' ? 'enqueue' : 'acquire',
		"$function('$name', $second$arguments, INFO)",
		%call, name => $name, scope => 'lease');
	$self->{tickets}{$result} = $name if is_number($result);
	return defined $result;
}

# Session scope, and transaction scope
sub use_session
{
	my ($self, $name) = @_;
	my ($arguments, %call) = shape($name);
	my $result;

	if ($self->{session_holds}{$name})
	{
		$result = $self->call('release', "dlock_release('$name')",
			name => $name, scope => 'none');
		delete $self->{session_holds}{$name};
	}
	elsif (percent(50))
	{
		$result = $self->call(
			'acquire',
			"dlock_xact_acquire('$name', '20 ms'$arguments, INFO)",
			%call, name => $name, scope => 'xact');
	}
	else
	{
		$result = $self->call(
			'acquire',
			"dlock_try_acquire('$name', '20 ms'$arguments, INFO)",
			%call, name => $name, scope => 'session');
		$self->{session_holds}{$name} = $result if is_number($result);
	}
	return defined $result;
}

# Change a lease or a ticket
sub change
{
	my ($self, $lease, $ticket) = @_;
	my $holds = $self->{session_holds};
	my $hold = choose(map { $holds->{$_} }
		  grep { /^[xsd]/ && is_number($holds->{$_}) && $holds->{$_} > 1 }
		  sort keys %$holds);
	my $tickets = $self->{tickets};
	my $exclusive = choose(grep { $tickets->{$_} =~ /^[xs]/ } sort keys %$tickets);
	my $what = choose('ttl', 'info', 'info', 'mode', 'mode');

	if ($what eq 'ttl')
	{
		# a ticket with its own lease, or none
		my $id = $ticket && percent(30) ? $ticket : $lease;

		return $id ? $self->change_ttl($id) : 1;
	}
	elsif ($what eq 'info')
	{
		return $self->change_info($hold, scope => 'none') if $hold && percent(20);
		return $self->change_info($lease, lease => $lease, scope => 'lease')
		  if $lease && percent(30);
		return $ticket ? $self->change_info($ticket, scope => 'lease') : 1;
	}
	return defined $self->downgrade($hold, 'none') if $hold && percent(30);
	return $exclusive ? defined $self->downgrade($exclusive, 'lease') : 1;
}

# Returns the same as short(), for an existing lease.
sub another_short
{
	my ($self) = @_;

	return $self->short;
}

# Until the call is answered, the shorter ttl counts.
sub change_ttl
{
	my ($self, $id) = @_;
	my $leases = $self->{leases};
	my $before = $leases->{$id};
	my $short = $self->another_short($before);
	my $seconds = $short || $ttl * choose(1, 2);
	my $result = $self->call('retime', "dlock_renew($id, '$seconds s')",
		lease => $id, short => $short, ttl => $seconds, scope => 'lease');

	return defined $result if !defined $before;
	if (($result // '') eq 'null')
	{
		delete $leases->{$id};
	}
	elsif (is_number($result) || $short && (!$before || $short < $before))
	{
		$leases->{$id} = $short;
	}
	return defined $result;
}

# Also compares the info in the view
sub change_info
{
	my ($self, $id, %call) = @_;
	my $known = $self->{infos}{$id};
	my $result = $self->call('set_info', "dlock_set_info($id, INFO)",
		ticket => $id, %call);
	my $new = "$self->{round}.$self->{client}.$self->{calls}";

	delete $self->{infos}{$id};
	return 0 if !defined $result;
	return 1 if $result eq 'f';
	my $seen = $self->{session}->query(
		$call{lease} ?
		  "SELECT info FROM dlock_leases WHERE lease = $id" :
		  "SELECT info FROM dlock_locks WHERE ticket = $id");

	return 1 if $seen !~ /^[\d.]+$/;
	$self->{infos}{$id} = $seen;
	$self->note_down('odd', clock_gettime(CLOCK_MONOTONIC), $self->{client},
		"$id says $seen, and not $new" . ($known ? ", nor $known" : ''))
	  if $seen ne $new && ($result eq 't' || $known && $seen ne $known);
	return 1;
}

sub downgrade
{
	my ($self, $ticket, $scope, %call) = @_;

	return $self->call('downgrade', "dlock_downgrade($ticket)",
		ticket => $ticket, scope => $scope, %call);
}

1;
