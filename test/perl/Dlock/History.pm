
=pod

=head1 NAME

Dlock::History - the calls of dlock's clients, and the answers

=head1 DESCRIPTION

Each client (Dlock::Client) writes each call before it makes the call, and then
the answer, both with the time.  So the history has everything that a client
can know.  A call with an answer took effect between its two lines.

For each ticket and lease, this class derives facts: the clients that got it,
the time when it was surely held or open, and the calls that may have ended
it.  Dlock::Checker compares servers with these facts.

=cut

package Dlock::History;

use strict;
use warnings FATAL => 'all';

use Dlock::Client qw($ttl);
use Dlock::Load;
use Exporter 'import';
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);

our @EXPORT_OK = qw($infinity closed_until is_durable now);

our $infinity = 9**9**9;

=pod

=head1 METHODS

=over

=item Dlock::History->new($seed)

An empty history.  Random choices depend only on the seed and the server's
answers.  If DLOCK_TEST_HISTORY is set, the clients' lines are kept in a
directory below that one, for docs/pictures/timeline.

=cut

my $histories = 0;

# the directory for the clients' files
sub make_dir
{
	my $kept = $ENV{DLOCK_TEST_HISTORY} or return PostgreSQL::Test::Utils::tempdir();
	my $dir = "$kept/" . ++$histories;

	mkdir $dir or die "mkdir $dir: $!";
	return $dir;
}

sub new
{
	my ($class, $seed) = @_;

	srand($seed);
	note "seed $seed: set DLOCK_TEST_SEED to run with another one";
	return bless {
		seed => $seed,
		dir => make_dir(),
		round => 0,
		clients => 6,
		levels => ['on'],    # of synchronous_commit, to choose from
		calls => {},         # id => call
		tickets => {},       # number => ticket that a client was told of
		leases => {},        # number => lease that a client was told of
		asked => {},         # request => first unanswered call for it
		holds => [],         # what clients were sure to hold
		offsets => {},       # file => position up to which it was read
		problems => [],
		all_problems => 0
	}, $class;
}

=pod

=item $history->load($node, $calls, $end, %options)

Runs clients until $calls calls have been answered, and then calls the sub
$end, which must end their sessions.  With off => $percent, this percentage of
the calls uses synchronous_commit = off.  With after => $calls2, then => $sub,
calls the second sub after $calls2 answers.

=item $history->start_clients($node, $numbers, %options)

load()'s first step: starts the clients, and returns a Dlock::Load.

=item $history->read_calls($load)

load()'s last step: reads the clients' calls and answers since the last call.

=cut

sub load
{
	my ($self, $node, $calls, $end, %options) = @_;
	my $load = $self->start_clients($node, [ 1 .. $self->{clients} ], %options);

	if ($options{after})
	{
		$load->await($options{after});
		$options{then}->();
	}
	$load->await($calls);
	$load->release($end);
	$self->read_calls($load);
	return;
}

sub start_clients
{
	my ($self, $node, $numbers, %options) = @_;

	$self->{round}++;
	return Dlock::Load->new($self, $node, $numbers, %options);
}

# The client with this number, in its own process
sub client
{
	my ($self, $load, $number) = @_;

	return Dlock::Client->new($self, $load, $number);
}

# Returns the client's known tickets and leases at the end of its last session.
sub belongings
{
	my ($self, $client) = @_;
	my @leases = grep { $_->{client} == $client && $_->{live} }
	  values %{ $self->{leases} };
	my @tickets = grep { $_->{client} == $client && $_->{live} }
	  values %{ $self->{tickets} };

	return (
		{ map { $_->{number} => $_->{short} } grep { !$_->{single} } @leases },
		{ map { $_->{number} => $_->{name} } @tickets });
}

# Note that the clients' server is about to be killed.
sub note_end
{
	my ($self, $load) = @_;

	$self->{killed} = now();
	return;
}

# Returns all calls in the order of time.
sub read_calls
{
	my ($self, $load) = @_;
	my @files = glob("$self->{dir}/$load->{round}.*");

	$self->_learn($load, @$_) foreach sort { $a->[1] <=> $b->[1] }
	  map { $self->_new_lines($_) } @files;
	unlink @files if $load->{over} && !$ENV{DLOCK_TEST_HISTORY};
	# the clients' session-scoped holds ended with their sessions
	foreach my $hold (@{ $self->{holds} })
	{
		$hold->{end} //= $self->{killed}
		  if $hold->{ticket}{scope} ne 'lease';
	}
	return;
}

# Returns the lines written to a file since the last call.
sub _new_lines
{
	my ($self, $file) = @_;

	open my $handle, '<', $file or die "open: $!";
	seek $handle, $self->{offsets}{$file} // 0, 0 or die "seek: $!";
	my @lines = <$handle>;
	close $handle;
	# leave an incomplete line for the next call
	pop @lines if @lines && $lines[-1] !~ /\n\z/;
	$self->{offsets}{$file} += length $_ foreach @lines;
	chomp @lines;
	return map { [ split /\t/, $_, -1 ] } @lines;
}

sub _learn
{
	my ($self, $load, $what, $time, $id, $result, %call) = @_;

	if ($what eq 'asks')
	{
		$self->{calls}{$id} =
		  { %call, id => $id, round => $load->{round}, begin => $time };
		$self->_learn_begin($self->{calls}{$id});
	}
	elsif ($what eq 'told')
	{
		my $call = $self->{calls}{$id};

		$call->{answer} = $time;
		$call->{result} = $result;
		$self->_learn_answer($call);
	}
	elsif ($what eq 'odd')
	{
		$self->problem("client $id: $result");
	}
	return;
}

sub _learn_begin
{
	my ($self, $call) = @_;

	if ($call->{op} eq 'release_ticket' || $call->{op} eq 'release_at_commit')
	{
		$self->_begin_release($self->{tickets}{ $call->{ticket} }, $call);
	}
	elsif ($call->{op} eq 'close')
	{
		my $lease = $self->{leases}{ $call->{lease} };

		$lease->{close} //= $call;
		$self->_begin_release($_, $call)
		  foreach grep { $_->{lease} == $call->{lease} }
		  values %{ $self->{tickets} };
	}
	elsif ($call->{op} eq 'release')
	{
		$self->_begin_release($_, $call)
		  foreach grep {
			$_->{scope} eq 'session' && $_->{name} eq $call->{name} &&
			  $_->{client} == $call->{client}
		  } values %{ $self->{tickets} };
	}
	elsif ($call->{op} eq 'retime')
	{
		$self->_begin_ttl($call);
	}
	elsif ($call->{op} eq 'set_slots')
	{
		push @{ $self->{slots}{ $call->{name} } }, $call;
	}
	elsif ($call->{op} eq 'set_info')
	{
		my $thing = $self->_changed($call);

		push @{ $thing->{infos} }, $call if $thing;
	}
	elsif ($call->{op} eq 'downgrade')
	{
		$self->_begin_downgrade($self->{tickets}{ $call->{ticket} }, $call);
	}
	elsif ($call->{op} =~ /acquire|enqueue/ && $call->{lease})
	{
		$self->{asked}{ _request($call, $_) } //= $call
		  foreach split /,/, $call->{name};
	}
	return;
}

# Returns a key for the request: a repeated request gets the same ticket.
sub _request
{
	my ($call, $name) = @_;

	return join ' ', $call->{lease} // 0, $name, $call->{owner} // '';
}

sub _begin_release
{
	my ($self, $ticket, $call) = @_;

	return if $ticket->{release};
	$ticket->{release} = $call;
	# also a hold that would end later, with the delay of its lease
	$_->{end} = $call->{begin}
	  foreach grep { $_->{ticket} == $ticket && ($_->{end} // $infinity) > $call->{begin} }
	  @{ $self->{holds} };
	return;
}

# Records a requested change.
sub _changed
{
	my ($self, $call) = @_;

	return $call->{lease} ? $self->{leases}{ $call->{lease} } :
	  $self->{tickets}{ $call->{ticket} };
}

# Until the answer, the shorter ttl counts.  Only single leases are known here.
sub _begin_ttl
{
	my ($self, $call) = @_;
	my $lease = $self->{leases}{ $call->{lease} } or return;
	my $before = _alive_until($lease);

	push @{ $lease->{ttls} }, $call;
	return
	  if !$call->{short} || $lease->{short} && $lease->{short} <= $call->{short};
	$lease->{short} = $call->{short};
	$lease->{alive_until} = 0;
	$self->_alive_from($lease, $call);
	$lease->{alive_until} = $before if $before < $lease->{alive_until};
	return;
}

# An exclusive hold may have become shared.
sub _begin_downgrade
{
	my ($self, $ticket, $call) = @_;

	return if !$ticket || $ticket->{lowered} || $ticket->{mode} ne 'exclusive';
	$ticket->{lowered} = $call;
	foreach my $hold (grep { $_->{ticket} == $ticket && !defined $_->{end} }
		@{ $self->{holds} })
	{
		push @{ $self->{holds} },
		  { %$hold, mode => 'shared', from => $call->{begin} };
		$hold->{end} = $call->{begin};
	}
	return;
}

# Returns the mode that a ticket surely has.
sub _mode
{
	my ($ticket) = @_;

	return $ticket->{lowered} ? 'shared' : $ticket->{mode};
}

# Returns the time until which the lease is surely open.
sub _alive_until
{
	my ($lease) = @_;

	return $lease->{short} ? $lease->{alive_until} : $infinity;
}

# Returns the time until which the lease's locks are surely not granted to
# others, unless they are released.  A delay begins when the lease has expired.
sub closed_until
{
	my ($lease) = @_;

	return _alive_until($lease) + $lease->{delay};
}

# The lease was open at this call.  Compute how long it is surely open.
sub _alive_from
{
	my ($self, $lease, $call) = @_;
	my $until = $call->{begin} + $lease->{short};

	$lease->{alive_until} = $until if $until > ($lease->{alive_until} // 0);
	return;
}

# The client was told that the lease or ticket is gone.  This answer is correct
# if the lease has expired, or the ticket was released.
sub _gone
{
	my ($self, $call, $what, $thing) = @_;

	my $lease =
	  exists $thing->{lease} ? $self->{leases}{ $thing->{lease} } : $thing;
	my $is_final = $call->{result} =~ /^(?:null|f|error 55L01)$/;

	$thing->{gone} //= $call if $is_final;
	return if $thing->{release} || $thing->{close};
	# nothing but the end of its lease can have ended the ticket
	$lease->{gone} //= $call if $is_final;

	$self->problem("$call->{id}: $what is gone, and nobody has ended it")
	  unless $lease->{close} || $call->{answer} > _alive_until($lease);
	return;
}

sub _learn_answer
{
	my ($self, $call) = @_;
	my $op = $call->{op};
	my $result = $call->{result};
	my $is_error = $result =~ /^error/;

	if ($result =~ /^error (XX|53|22|42)/)
	{
		$self->problem("$call->{id}: $op gave $result");
	}
	elsif ($op eq 'open')
	{
		$self->_learn_lease($result, $call, 0) if !$is_error;
	}
	elsif ($op =~ /^(?:renew|retime)$/ && $result eq 'error 58030')
	{
		# standbys do not answer: the lease may exist
	}
	elsif ($op eq 'renew')
	{
		my $lease = $self->{leases}{ $call->{lease} };

		if ($result eq 'null' || $is_error)
		{
			$self->_gone($call, "lease $call->{lease}", $lease);
		}
		else
		{
			$self->_alive_from($lease, $call);
		}
	}
	elsif ($op eq 'retime')
	{
		$self->_learn_ttl($call);
	}
	elsif ($op eq 'downgrade')
	{
		$self->_learn_downgrade($call);
	}
	elsif ($op eq 'set_info')
	{
		$self->_gone($call, "what is to say $call->{id}", $self->_changed($call))
		  if $result ne 't' && $self->_changed($call);
	}
	elsif ($op eq 'close')
	{
		$self->_gone($call, "lease $call->{lease}",
			$self->{leases}{ $call->{lease} })
		  if $result eq 'null' && $self->{leases}{ $call->{lease} }{close} != $call;
	}
	elsif ($op eq 'release_ticket')
	{
		my $ticket = $self->{tickets}{ $call->{ticket} };
		my $lease = $self->{leases}{ $ticket->{lease} };

		$self->problem("$call->{id}: ticket $call->{ticket} is gone")
		  if $result ne 't' && $ticket->{release} == $call &&
		  (!$lease || !$lease->{close} &&
			$call->{answer} < _alive_until($lease));
	}
	elsif ($op eq 'release' && $result eq 'f')
	{
		# only a session that has ended, or force, ends a hold before
		foreach my $hold (grep { ($_->{end} // 0) == $call->{begin} }
			@{ $self->{holds} })
		{
			my $ticket = $hold->{ticket};

			$self->problem("$call->{id}: ticket $ticket->{number} is gone")
			  if ($ticket->{release} // 0) == $call &&
			  !$self->{forced}{ $ticket->{number} };
		}
	}
	elsif ($op eq 'wait')
	{
		my $ticket = $self->{tickets}{ $call->{ticket} };

		if ($result eq 't')
		{
			push @{ $ticket->{again} }, $call;
			$self->_hold($ticket, $call);
		}
		elsif ($result eq 'error 55L01')
		{
			$self->_gone($call, "ticket $call->{ticket}", $ticket);
		}
	}
	elsif ($op =~ /acquire|enqueue/ && !$is_error && $result ne 'null')
	{
		my @names = split /,/, $call->{name};

		foreach my $number ($result =~ /\d+/g)
		{
			my $ticket =
			  $self->_learn_ticket($number, shift @names, $call);

			push @{ $ticket->{again} }, $call;
			$self->_hold($ticket, $call) if $op !~ /enqueue/;
		}
	}
	$self->_check_present_still($call);
	return;
}

# A ticket or lease that has ended does not come back while the server runs.
sub _check_present_still
{
	my ($self, $call) = @_;
	my ($op, $result) = ($call->{op}, $call->{result});
	my $gets = $op =~ /acquire|enqueue/;

	return
	  if $result !~ /^(?:t|\d+|\{.*\})$/ && "$op $result" ne 'wait f' ||
	  !$gets && $op !~
	  /^(?:check|guard|wait|downgrade|set_info|release_ticket|renew|retime|close)$/;
	my @tickets = grep { $_ && $_->{lease} }
	  map { $self->{tickets}{$_} } $call->{ticket} // 0,
	  $gets ? $result =~ /\d+/g : ();
	my %leases = map { $_ => 1 } $call->{lease} || 0,
	  map { $_->{lease} } @tickets;

	foreach my $thing (@tickets,
		grep { $_ } map { $self->{leases}{$_} } keys %leases)
	{
		my ($end) = grep { $_ && ($_->{answer} // $infinity) < $call->{begin} }
		  $thing->{gone}, grep {
			$_ && "$_->{op} " . ($_->{result} // '') !~ / error|^force f/
		  } @$thing{ 'release', 'close' };

		$self->problem("$call->{id}: $op gave $result, but $thing->{number} "
			  . "ended with $end->{id}")
		  if $end;
	}
	return;
}

sub _learn_ttl
{
	my ($self, $call) = @_;
	my $lease = $self->{leases}{ $call->{lease} } or return;

	if ($call->{result} =~ /^\d/)
	{
		$lease->{short} = $call->{short};
		$self->_alive_from($lease, $call);
	}
	else
	{
		$self->_gone($call, "lease $call->{lease}",
			$self->{tickets}{ $call->{lease} } // $lease);
	}
	return;
}

sub _learn_downgrade
{
	my ($self, $call) = @_;
	my $ticket = $self->{tickets}{ $call->{ticket} };

	if ($call->{result} eq 't')
	{
		$self->_hold($ticket, $call);
	}
	elsif ($call->{result} eq 'f' || $call->{result} eq 'error 55L01')
	{
		delete $ticket->{lowered}
		  if $ticket->{lowered} && $ticket->{lowered} == $call;
		$self->_gone($call, "ticket $call->{ticket}", $ticket)
		  if $ticket->{held} && $ticket->{held}{answer} < $call->{begin};
	}
	else
	{
		$self->problem("$call->{id}: downgrade gave $call->{result}");
	}
	return;
}

sub _learn_lease
{
	my ($self, $number, $call, $single) = @_;

	my $lease = $self->{leases}{$number} //= {
		number => $number,
		client => $call->{client},
		short => $call->{short} // 0,
		ttl => $call->{short} || $ttl,
		delay => $call->{delay} // 0,
		single => $single,
		told => $call,
		begin => $call->{begin},
		live => 1
	};

	$self->_alive_from($lease, $call) if !defined $lease->{alive_until};
	return $lease;
}

sub _learn_ticket
{
	my ($self, $number, $name, $call) = @_;
	my $ticket = $self->{tickets}{$number};
	my $lease = 0;
	my $asked = delete $self->{asked}{ _request($call, $name) };

	if ($ticket)
	{
		$self->problem("$call->{id}: was given ticket $number, "
			  . "which is of $ticket->{name} and client $ticket->{client}")
		  if $ticket->{name} ne $name ||
		  $ticket->{client} != $call->{client} || $ticket->{scope} ne 'lease';
		return $ticket;
	}
	if ($call->{scope} eq 'lease')
	{
		$lease = $call->{lease} || $number;
		$self->_learn_lease($number, $call, 1) if $lease == $number;
	}
	return $self->{tickets}{$number} = {
		number => $number,
		name => $name,
		client => $call->{client},
		mode => $call->{mode},
		permits => $call->{permits},
		scope => $call->{scope},
		lease => $lease,
		told => $call,
		begin => ($asked // $call)->{begin},
		live => $lease ? 1 : 0
	};
}

# After this answer, the ticket surely holds.
sub _hold
{
	my ($self, $ticket, $call) = @_;

	return if $ticket->{held};
	$ticket->{held} = $call;
	push @{ $self->{holds} },
	  {
		ticket => $ticket,
		mode => _mode($ticket),
		from => $call->{answer},
		end => $ticket->{release} ? $ticket->{release}{begin} :
		  $ticket->{scope} eq 'xact' ? $call->{begin} : undef
	  };
	return;
}

=pod

=item $history->problem($what)

Records a problem, with the calls so far that name its tickets or their leases.

=item $history->report($when)

Makes one test: no problem was recorded since the last report.

=cut

sub problem
{
	my ($self, $what) = @_;

	my %numbers = map { $_ => 1 } $what =~ /\b\d{12,}\b/g;

	$numbers{$_} = 1
	  foreach grep { $_ } map { $self->{tickets}{$_}{lease} }
	  grep { $self->{tickets}{$_} } keys %numbers;
	# report() shows no more than 20
	my @calls = %numbers && @{ $self->{problems} } < 20 ?
	  grep { grep { $numbers{$_} } map { /\d{12,}/g } grep { defined } values %$_ }
	  values %{ $self->{calls} } : ();
	push @{ $self->{problems} }, join "\n", "round $self->{round}: $what",
	  map { _line($_) } sort { $a->{begin} <=> $b->{begin} } @calls;
	return;
}

# Describes a call in a line.
sub _line
{
	my ($call) = @_;

	return sprintf '    %.3f-%s %s', $call->{begin},
	  defined $call->{answer} ? sprintf('%.3f', $call->{answer}) : '',
	  join ' ', map { "$_=" . ($call->{$_} // '') }
	  grep { !/^(?:begin|answer|client|round)$/ } sort keys %$call;
}

sub report
{
	my ($self, $when) = @_;
	my @problems = splice @{ $self->{problems} };
	local $Test::Builder::Level = $Test::Builder::Level + 2;

	$self->{all_problems} += @problems;
	splice @problems, 20, @problems - 20, '...' if @problems > 20;
	ok(!@problems, "$when: all is as it must be") or diag(join "\n", @problems);
	return;
}

sub tell
{
	my ($self, $ticket) = @_;
	my $told = $ticket->{told};
	my $text = "ticket $ticket->{number} of $ticket->{name} "
	  . "($ticket->{mode}, $ticket->{scope}, lease $ticket->{lease}; "
	  . "$told->{op} $told->{id}";

	$text .= ", held $ticket->{held}{id}"
	  if $ticket->{held} && $ticket->{held}{id};
	$text .= ", released $ticket->{release}{id}" if $ticket->{release};
	return "$text)";
}

=pod

=back

=head1 FUNCTIONS

=over

=item now()

Returns the time in the history's format.

=item is_durable($level, $where)

Does this synchronous_commit make a call's answer durable "here" (on the
client's server), "there" (on a synchronous standby), or "nowhere" (on an
asynchronous standby)?

=back

=cut

sub now
{
	return clock_gettime(CLOCK_MONOTONIC);
}

sub is_durable
{
	my ($level, $where) = @_;

	return $where eq 'here' ? $level ne 'off' :
	  $where eq 'there' ? $level =~ /^(?:on|remote_write|remote_apply)$/ : 0;
}

1;
