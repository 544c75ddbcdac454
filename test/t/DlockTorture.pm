
=pod

=head1 NAME

DlockTorture - DlockHistory's clients and rules, for clients that are hurt

=head1 DESCRIPTION

In DlockHistory a client's session lives until the server dies.  Here sessions
also end before, and calls are cancelled.  A client that has lost its session
waits until its backend is gone, connects again, and looks up what became of
the call that it has had no answer to.  In addition to what they do there, the
clients hold locks for whole transactions, wait without a timeout, and so in
deadlocks at times, queue up in session scope, make guarded writes, release
tickets of others by force, and listen for their grants.  Leases that may run
out have a delay at times.

Added to the rules:

=over

=item *

Who is told that he waits, or holds an exclusive lock, is not behind one who
has been told before that he holds with a greater ticket.

=item *

A guarded write is never visible after one with a greater fence, and what was
committed durably is there.

=item *

What was granted to a session that listens is announced to it, once it is
known to hold, unless it is released or the session ends before.

=item *

While standbys count for a lease, nothing is known of how long it lives.  But a
primary that is cut off from them for good does not honour it for
longer than its ttl, and not after its successor has granted the lock to
somebody else, and acknowledges nothing that the successor does not have.

=item *

A view of the locks, at any time, shows holders that may hold together, and
waiters in the order of their tickets behind them.

=item *

Each client gets an answer again, once all stopped processes go on.

=back

=cut

package DlockTorture;

use strict;
use warnings FATAL => 'all';

use DlockHistory;
use DlockTest;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @ISA = ('DlockHistory');

# Locks of sessions and transactions alone, who may wait for them for ever
our @blocking = ('b1', 'b2', 'b3');

=pod

=head1 METHODS

=over

=item DlockTorture->new($seed, $clients)

What is in the object to be changed: {levels}, which clients choose their
synchronous_commit from, {shorts}, the seconds after which leases run out,
{apart}, whether leases that do not have locks of their own, and {quorum},
whether standbys count for leases.

=cut

sub new
{
	my ($class, $seed, $clients) = @_;
	my $self = DlockHistory::new($class, $seed);

	# each history has a directory of its own
	$self->{dir} = PostgreSQL::Test::Utils::tempdir();
	$self->{clients} = $clients;
	$self->{seen} = [];       # tickets that were in a queue, or held
	$self->{forced} = {};     # number => call that was to end it by force
	$self->{forces} = [];     # these calls
	$self->{writes} = [];     # tickets with guarded writes that were answered
	$self->{levels} = ['on'];
	$self->{shorts} = [0.2];
	$self->{quorum} = 0;
	$self->{offsets} = {};
	$self->{results} = {};
	$self->{all_problems} = 0;
	return $self;
}

=pod

=item DlockTorture::prepare($node)

Makes the table of the guarded writes.

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

Runs the clients.  Calls the sub $hurt again and again, with the number of
calls that were answered so far, until it returns false.  Then, once each
client has got an answer once more, calls the sub $end, which has to end their
sessions.  Takes the same option "off" as load().

It is made of these, which are for rounds with two servers:

=over

=item $history->start_clients($node, $numbers, %options)

Returns what stands for the load.

=item $history->run_clients($load, $hurt)

=item $history->release_clients($load, $end, @numbers)

Ends these clients, or all: the sub $end has to end their sessions, and is
called until all are gone where only some are to.

=item $history->read_calls($load)

Takes note of what they have asked and were told, since it was called last.

=back

=cut

sub torture
{
	my ($self, $node, $hurt, $end, %options) = @_;
	my $load = $self->start_clients($node, [ 1 .. $self->{clients} ], %options);

	$self->run_clients($load, $hurt);
	$self->release_clients($load, $end);
	$self->read_calls($load);
	return $load->{answers};
}

sub start_clients
{
	my ($self, $node, $numbers, %options) = @_;
	my $round = ++$self->{round};
	my %load = (
		node => $node,
		round => $round,
		stop => "$self->{dir}/stop.$round",
		clients => {},    # pid => number
		answers => 0,
		answered => {});

	pipe($load{reader}, my $writer) or die "pipe: $!";
	foreach my $client (@$numbers)
	{
		my $pid = fork() // die "fork: $!";

		if ($pid == 0)
		{
			close $load{reader};
			my $done = eval {
				my $new = DlockTorture::Client->new($self, $node, $client,
					$writer, $options{off} // 0);

				$new->{stop} = $load{stop};
				$new->run;
				1;
			};
			warn $@ unless $done;
			POSIX::_exit($done ? 0 : 1);
		}
		$load{clients}{$pid} = $client;
	}
	close $writer;
	$load{reader}->blocking(0);
	return \%load;
}

# Read which clients were answered: each byte is one.
sub _count_answers
{
	my ($load) = @_;

	while (sysread($load->{reader}, my $bytes, 4096))
	{
		$load->{answers} += length $bytes;
		$load->{answered}{ ord $_ }++ foreach split //, $bytes;
	}
	return;
}

# Who has not got so many answers since they were counted from 0 on?
sub _unanswered
{
	my ($load, $count) = @_;

	_count_answers($load);
	return grep { ($load->{answered}{$_} // 0) < $count }
	  values %{ $load->{clients} };
}

# Wait until all have, from now on.
sub _await_answers
{
	my ($self, $load, $count) = @_;

	_count_answers($load);
	$load->{answered} = {};
	return if eval {
		poll('clients are answered', sub { !_unanswered($load, $count) });
		1;
	};
	$self->problem('no answer for client '
		  . join(', ', sort { $a <=> $b } _unanswered($load, $count))
		  . ":\n" . _activity($load->{node}));
	return;
}

sub run_clients
{
	my ($self, $load, $hurt) = @_;

	$self->_await_answers($load, 1);
	while ($hurt->($load->{answers}))
	{
		_count_answers($load);
	}
	$self->_await_answers($load, 1);
	return;
}

sub release_clients
{
	my ($self, $load, $end, @numbers) = @_;
	my $all = !@numbers;
	my $clients = $load->{clients};
	my %ends = map { $_ => 1 } $all ? values %$clients : @numbers;

	append_to_file($load->{stop} . ($all ? '' : ".$_"), '') foreach keys %ends;
	# what an old primary says does not count since it was cut off
	$self->{killed} = DlockHistory::now()
	  if $all && !($self->{split} && $self->{split}{load} == $load);
	$end->();
	poll('clients have seen the end', sub {
			_count_answers($load);
			foreach my $pid (grep { $ends{ $clients->{$_} } } keys %$clients)
			{
				next unless waitpid($pid, POSIX::WNOHANG) == $pid;
				$self->problem("client $clients->{$pid} failed") if $? != 0;
				delete $clients->{$pid};
			}
			return 1 if !grep { $ends{$_} } values %$clients;
			$end->() unless $all;
			return 0;
		});
	if ($all)
	{
		close $load->{reader};
		$load->{over} = 1;
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

=pod

=item $history->look($session)

Are holders and queues as they must be, now?

=cut

sub look
{
	my ($self, $session) = @_;
	my $wrong = $session->query(
		q{WITH l AS (SELECT *, lag(ticket) OVER (PARTITION BY name
											ORDER BY "position") AS before,
							max(ticket) FILTER (WHERE granted)
								OVER (PARTITION BY name) AS holder
					   FROM dlock_locks)
		  SELECT 'holders of ' || name || ': ' ||
				 array_agg((ticket, mode, permits, scope))::text
			FROM l WHERE granted GROUP BY name
		  HAVING count(*) > 1 AND bool_or(mode = 'exclusive')
			  OR sum(permits) > max(slots)
		   UNION ALL
		  SELECT 'ticket ' || ticket || ' of ' || name || ' waits behind '
				 || before || ', and ' || holder || ' holds'
			FROM l WHERE "position" > 0 AND NOT granted
			 AND (ticket < before OR ticket < holder)});

	$self->problem($wrong) if $wrong ne '';
	return;
}

# The lines that were written to a file since this was called last
sub _new_lines
{
	my ($self, $file) = @_;

	open my $handle, '<', $file or die "open: $!";
	seek $handle, $self->{offsets}{$file} // 0, 0 or die "seek: $!";
	my @lines = <$handle>;
	close $handle;
	# one that is not complete
	pop @lines if @lines && $lines[-1] !~ /\n\z/;
	$self->{offsets}{$file} += length $_ foreach @lines;
	chomp @lines;
	return map { [ split /\t/, $_, -1 ] } @lines;
}

# In the order of time
sub read_calls
{
	my ($self, $load) = @_;
	my $split = $self->{split};
	my $old = $split && $split->{load} == $load;
	my @files = glob("$self->{dir}/$load->{round}.*");

	foreach my $line (sort { $a->[1] <=> $b->[1] }
		map { $self->_new_lines($_) } @files)
	{
		my ($what, $time, $id, $result, %call) = @$line;

		if ($what eq 'odd')
		{
			$self->problem("client $id: $result");
		}
		elsif ($old && $time > $split->{promoted})
		{
			$self->_learn_of_old(@$line);
		}
		elsif ($what eq 'asks')
		{
			$self->{calls}{$id} =
			  { %call, id => $id, round => $load->{round}, begin => $time };
			$self->_learn_begin($self->{calls}{$id});
		}
		elsif ($what eq 'told')
		{
			my $call = $self->{calls}{$id};

			# found, but nobody was told so
			$call->{level} = $call->{sync};
			$call->{sync} = 'off' if $call{found};
			$call->{answer} = $time;
			$call->{result} = $result;
			$self->_learn_answer($call);
		}
		elsif ($what eq 'lost')
		{
			$self->_end_holds($id, $result, 'session', 'xact');
		}
	}
	unlink @files if $load->{over};
	# with their sessions their holds are over
	foreach my $hold (@{ $self->{holds} })
	{
		$hold->{end} //= $self->{killed}
		  if $hold->{ticket}{scope} ne 'lease';
	}
	return;
}

=pod

=item $history->cut_off($load)

The primary of this load is about to be cut off from its standbys, for good.
Returns once each client has something that standbys count for.

=item $history->fail_over($load)

Now none of them receives anything any more, and one is about to be promoted.
What the clients are told by the old primary after this is not what happened,
but is held against it by check_old().

=cut

sub cut_off
{
	my ($self, $load) = @_;

	append_to_file("$load->{stop}.alone", '');
	$self->_await_answers($load, 4);
	$self->{killed} = DlockHistory::now();
	return;
}

sub fail_over
{
	my ($self, $load) = @_;

	$self->{split} = {
		load => $load,
		promoted => DlockHistory::now(),
		calls => {},
		answers => []
	};
	return;
}

sub _learn_of_old
{
	my ($self, $what, $time, $id, $result, %call) = @_;
	my $split = $self->{split};

	if ($what eq 'asks')
	{
		$split->{calls}{$id} = { %call, id => $id, begin => $time };
	}
	elsif ($what eq 'told')
	{
		my $call = $split->{calls}{$id} // $self->{calls}{$id};

		push @{ $split->{answers} },
		  { %$call, answer => $time, result => $result };
	}
	return;
}

# The guarded writes that were answered are there, too.
sub _check_tables
{
	my ($self, $session) = @_;
	my %written = map { split /\|/ } split /
/,
	  $session->query('SELECT name, fence FROM guarded');

	foreach my $write (splice @{ $self->{writes} })
	{
		my ($ticket, $call) = @$write;

		$self->problem("$call->{id}: the write of $ticket->{number} is missing")
		  if $self->_settled($call) &&
		  $written{ $ticket->{name} } < $ticket->{number};
	}
	return DlockHistory::_check_tables($self, $session);
}

# as in DlockHistory, and keeps what is there for check_old()
sub check
{
	my ($self, @arguments) = @_;
	my $split = $self->{split};

	DlockHistory::check($self, @arguments);
	return if !$split || $split->{there};
	$split->{there} = $self->{there};

	# What was lost there has not been, and has numbers of its own.
	foreach my $number (keys %{ $self->{tickets} })
	{
		my $told = $self->{tickets}{$number}{told};

		delete $self->{tickets}{$number}
		  if $told->{round} == $split->{load}{round} &&
		  !$self->{tickets}{$number}{live} &&
		  ($told->{answer} // 0) > $split->{promoted};
	}
	return;
}

=pod

=item $history->check_old

After the end of both loads: was what the old primary has said beside the new
one true?

=cut

sub check_old
{
	my ($self) = @_;
	my $split = delete $self->{split};
	my $count = 0;

	foreach my $call (grep { $_->{result} !~ /^error|^null|^f$/ }
		@{ $split->{answers} })
	{
		my ($op, $result) = ($call->{op}, $call->{result});
		my $lasting = DlockHistory::is_durable($call->{sync}, 'there');

		next unless $call->{scope} eq 'lease' || $op =~ /^(?:open|renew)$/;
		if ($op eq 'renew')
		{
			$self->_check_honoured($call, $split->{promoted},
				$self->{leases}{ $call->{lease} })
			  if $self->{leases}{ $call->{lease} };
			next;
		}
		foreach my $number (
			$op =~ /^(?:check|guard|wait)$/ ? $call->{ticket} :
			$result =~ /\d+/g)
		{
			my $row = $split->{there}{$number};
			my $ticket = $self->{tickets}{$number};
			my $held = $row && $row->{granted};

			if ($held && $op !~ /enqueue|open/)
			{
				$self->_check_honoured($call, $split->{promoted},
					$self->{leases}{ $row->{lease} }, $ticket);
				$count++;
			}
			elsif ($lasting && $op =~ /acquire|enqueue|open|wait/ &&
				($row ? !$held && $op =~ /acquire|wait/ :
					!$ticket && !$self->{leases}{$number}))
			{
				# what was told before is compared in check()
				$self->problem("$call->{id}: $op gave $number, which the new "
					  . 'primary has ' . ($row ? 'waiting' : 'not'));
			}
		}
	}
	note "the old primary has confirmed holders $count times";
	return;
}

# The old primary has said that it honours the lease, and the ticket.
sub _check_honoured
{
	my ($self, $call, $promoted, $lease, $ticket) = @_;
	my $ttl = $lease->{short} || DlockHistory::ttl();
	my $late = $call->{begin} - $promoted - $ttl;

	return if !$self->_standbys_count($lease);
	$self->problem("$call->{id}: $call->{op} honours lease $lease->{number} "
		  . "$late s after its ttl, which no standby can have prolonged")
	  if $late > 0;
	return if !$ticket || $self->{forced}{ $ticket->{number} };
	foreach my $hold (grep { $_->{round} == $self->{round} }
		@{ $self->{holds} })
	{
		my $other = $hold->{ticket};

		$self->problem("$call->{id}: $call->{op} honours "
			  . $self->_tell($ticket) . ' beside ' . $self->_tell($other))
		  if $other->{name} eq $ticket->{name} &&
		  $other->{number} > $ticket->{number} &&
		  $hold->{from} < $call->{begin} &&
		  ($other->{mode} eq 'exclusive' || $ticket->{mode} eq 'exclusive');
	}
	return;
}

# Do standbys count for this lease?
sub _standbys_count
{
	my ($self, $lease) = @_;
	my $told = $lease->{told};

	return $self->{quorum} &&
	  DlockHistory::is_durable($told->{level} // $told->{sync}, 'there');
}

# It may run out at any moment where standbys count for it.
sub _alive_from
{
	my ($self, $lease, $call) = @_;

	return DlockHistory::_alive_from($self, $lease, $call)
	  unless $self->_standbys_count($lease);
	$lease->{alive_until} = $call->{begin}
	  if $call->{begin} > ($lease->{alive_until} // 0);
	return;
}

# The client holds nothing of these scopes after that time.
sub _end_holds
{
	my ($self, $client, $time, @scopes) = @_;

	foreach my $hold (grep { !defined $_->{end} } @{ $self->{holds} })
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
		DlockHistory::_learn_begin($self, $call);
	}
	return;
}

# Might somebody have ended a ticket of that lock by force during this call?
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
	my $ticket = DlockHistory::_learn_ticket($self, $number, @arguments);

	$self->_begin_release($ticket, $self->{forced}{$number})
	  if $self->{forced}{$number};
	return $ticket;
}

# What is there in spite of it was not ended.
sub _go_on
{
	my ($self, $there, $leases, $durable) = @_;

	delete $self->{forced}{$_} foreach keys %$there;
	$self->{there} = { (map { $_ => {} } keys %$leases), %$there };
	return DlockHistory::_go_on($self, $there, $leases, $durable);
}

my $ends = qr/^(?:release|release_ticket|release_at_commit|close|force)$/;

sub _learn_answer
{
	my ($self, $call) = @_;
	my ($op, $result) = ($call->{op}, $call->{result});
	my $ticket = $self->{tickets}{ $call->{ticket} // 0 };
	my $lease = $self->{leases}{ $call->{lease} || 0 };

	$self->{results}{ $result =~ /^error/ ? $result : $op }++;
	$self->{results}{announced}++ if $call->{announced};
	$self->{slowest} = {%$call}
	  if !$self->{slowest} || $call->{answer} - $call->{begin} >
	  $self->{slowest}{answer} - $self->{slowest}{begin};

	if ($result =~ /^error/ && $call->{block})
	{
		# the transaction has failed
		$self->_end_holds($call->{client}, $call->{begin}, 'xact');
		$self->problem("$call->{id}: the holder's $op gave $result")
		  if $op eq 'write' && $result ne 'error 57014' &&
		  !$self->{forced}{ $call->{ticket} };
	}
	if ($result =~ /^error (57014|53100|58030)/)
	{
		# Nobody knows what a release did, or if it is going on.  What was
		# asked for is not there, as with all other errors.
		delete $call->{answer} if $op !~ /acquire|enqueue|open/;
		return;
	}
	if ($op =~ $ends && $result !~ /^error/)
	{
		# asked again
		my $before = $op eq 'close' ? $lease->{close} :
		  $ticket ? $ticket->{release} : undef;

		$before->{answer} //= $call->{answer} if $before;
	}
	if ($op eq 'wait' && $result eq 'f')
	{
		push @{ $self->{seen} }, [ $ticket, $call ];
		$self->problem("$call->{id}: ticket $ticket->{number} was announced "
			  . 'as granted, and waits')
		  if $call->{announced};
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
	$self->_learn_confirmation($call, $ticket) if $op =~ /^(?:check|guard|wait)$/;
	DlockHistory::_learn_answer($self, $call);
	return;
}

# The fence of a lease's ticket, which the client has got, is current or not.
sub _learn_confirmation
{
	my ($self, $call, $ticket) = @_;
	my $op = $call->{op};

	if ($call->{result} eq 't')
	{
		$self->_alive_from_ticket($ticket, $call);
		push @{ $self->{seen} }, [ $ticket, $call ]
		  if $ticket->{mode} eq 'exclusive';
		push @{ $self->{writes} }, [ $ticket, $call ] if $op eq 'guard';
	}
	elsif ($op eq 'check' && $ticket->{held} &&
		$ticket->{held}{answer} < $call->{begin})
	{
		$self->_gone($call, "fence $ticket->{number}", $ticket);
	}
	return;
}

# Its lease was open, but that does not renew it.
sub _alive_from_ticket
{
	my ($self, $ticket, $call) = @_;
	my $lease = $self->{leases}{ $ticket->{lease} };

	$lease->{alive_until} = $call->{begin}
	  if $call->{begin} > $lease->{alive_until};
	return;
}

# In a transaction block the lock is held until it ends.
sub _hold
{
	my ($self, $ticket, $call) = @_;
	my $count = @{ $self->{holds} };

	DlockHistory::_hold($self, $ticket, $call);
	return if @{ $self->{holds} } == $count;
	my $hold = $self->{holds}[-1];

	delete $hold->{end} if $ticket->{scope} eq 'xact' && $call->{block};
	$hold->{begin} = $call->{begin} // $call->{answer};
	$hold->{round} = $self->{round};
	return;
}

=pod

=item $history->check_round

Looks through the calls of the round.

=cut

sub check_round
{
	my ($self) = @_;
	my %seen;    # lock => what has been seen of its tickets

	foreach my $hold (grep { ($_->{round} // 0) == $self->{round} }
		@{ $self->{holds} })
	{
		my $name = $hold->{ticket}{name};
		my $alone = $hold->{ticket}{mode} eq 'exclusive';

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
				$self->problem($self->_tell($ticket)
					  . ' was overtaken by ' . $self->_tell($greatest))
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
			$self->problem($self->_tell($hold->{ticket}) . ' held beside '
				  . $self->_tell($last->{ticket}))
			  if $last && $last->{end} > $hold->{from};
			$last = $hold;
		}
	}
	return;
}

=pod

=item $history->check_guarded($node)

=cut

sub check_guarded
{
	my ($self, $node) = @_;
	my $stale = $node->safe_psql('postgres',
		'SELECT * FROM guarded WHERE stale > 0');

	$self->problem("stale writes were visible:\n$stale") if $stale ne '';
	return;
}

# as in DlockHistory, with a count, and without a line for what went well
sub report
{
	my ($self, $when) = @_;
	my @problems = splice @{ $self->{problems} };

	$self->{all_problems} += @problems;
	splice @problems, 20, @problems - 20, '...' if @problems > 20;
	ok(!@problems, "$when: all is as it must be") or diag(join "\n", @problems);
	return;
}

=pod

=back

=cut

package DlockTorture::Client;

use DlockTest ();
use Time::HiRes qw(clock_gettime usleep CLOCK_MONOTONIC);

our @ISA = ('DlockHistory::Client');

my %exclusive = (mode => 'exclusive', permits => 1);

sub new
{
	my ($class, $history, $node, $client, $pipe, $off) = @_;
	my ($leases, $tickets) = $history->_belongings($client);
	my $self = bless {
		%$history{ 'apart', 'levels', 'shorts' },
		node => $node,
		parent => getppid(),
		client => $client,
		pipe => $pipe,
		off => $off,
		round => $history->{round},
		calls => 0,
		leases => $leases,
		tickets => $tickets
	}, $class;

	srand($history->{seed} * 100_000 + $self->{round} * 100 + $client);
	open $self->{file}, '>', "$history->{dir}/$self->{round}.$client"
	  or die "open: $!";
	$self->{file}->autoflush(1);
	return $self;
}

# The server is killed once there is this file; or the test has died.
sub is_over
{
	my ($self) = @_;

	return getppid() != $self->{parent} ||
	  -e $self->{stop} || -e "$self->{stop}.$self->{client}";
}

# Its server is cut off from its standbys once there is this file.
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
		if ($self->find_out)
		{
			while ($self->step) { }
		}
		$self->{session}->vanish;
		# what held until the last answer may have been lost since
		$self->note_down('lost', clock_gettime(CLOCK_MONOTONIC),
			$self->{client}, $self->{last_answer});
		last if $self->is_over;
		DlockTest::poll('backend is gone',
			sub { !kill(0, $self->{session}{pid}) || $self->is_over });
	}
	return;
}

sub connect
{
	my ($self) = @_;
	my $session = eval {
		DlockTest::session($self->{node}, 'postgres',
			"application_name=client_$self->{client}");
	};

	if (!$session)
	{
		usleep(50_000);
		return 0;
	}
	$self->{session} = $session;
	$self->{session_holds} = {};
	$self->{session_tickets} = {};
	$self->{listens} = {};
	$self->{heard} = {};
	delete $self->{sync};
	$self->{last_answer} = clock_gettime(CLOCK_MONOTONIC);
	return $self->surely('SET client_min_messages = error');
}

# A statement that does its work although somebody cancels it
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

# What has become of the call whose answer was lost with the session?
sub find_out
{
	my ($self) = @_;
	my $lost = delete $self->{lost} or return 1;
	my ($id, $call) = @$lost;
	my $ticket;

	return 1 if $call->{scope} ne 'lease' && $call->{op} ne 'open';
	if ($call->{op} eq 'lease_acquire_all')
	{
		delete $self->{leases}{ $call->{lease} };
		return
		  defined $self->call('close', "dlock_lease_close($call->{lease})",
			lease => $call->{lease}, scope => 'none');
	}
	return 1 if $call->{op} !~ /acquire|enqueue|open/;
	for (1 .. 20)
	{
		$ticket = $self->{session}->query(
			$call->{op} eq 'open' ?
			  "SELECT lease FROM dlock_leases WHERE info = '$id'" :
			  q{SELECT ticket FROM dlock_locks WHERE scope = 'lease' }
			  . ($call->{op} eq 'enqueue' ? '' : 'AND granted ')
			  . "AND info = '$id'");
		last if $ticket !~ /ERROR:  57014/;
	}
	return 1 if $ticket eq '';
	return 0 if $ticket !~ /^\d+$/;
	$self->note_down('told', clock_gettime(CLOCK_MONOTONIC), $id, $ticket,
		found => 1);
	if ($call->{op} eq 'open')
	{
		$self->{leases}{$ticket} = $call->{short};
	}
	else
	{
		$self->{tickets}{$ticket} = $call->{name};
	}
	return 1;
}

# As the one that it replaces, for sessions that end, and calls that are
# cancelled; "sql" is a whole statement.
sub call
{
	my ($self, $op, $expression, %call) = @_;
	my $again = delete $call{again} // 0;
	my $sql = delete $call{sql};
	my $id = "$self->{round}.$self->{client}." . ++$self->{calls};

	if (!$call{block})
	{
		my $sync = DlockHistory::Client::percent($self->{off}) ? 'off' :
		  choose(@{ $self->{levels} });

		$self->surely("SET synchronous_commit = $sync") or return
		  if $sync ne ($self->{sync} // '');
		$self->{sync} = $sync;
	}
	(my $asked = $expression) =~ s/INFO/info => '$id'/;
	$sql //= "SELECT coalesce(($asked)::text, 'null')";
	$sql =~ s/INFO/info => '$id'/;
	$sql = "BEGIN; $sql; COMMIT" if $op eq 'release_at_commit';
	$self->{lost} = [ $id, \%call ];
	$call{op} = $op;
	$self->note_down('asks', clock_gettime(CLOCK_MONOTONIC), $id, '',
		client => $self->{client}, sync => $self->{sync} // 'on', %call);
	my $answer = $self->{session}->query($sql);

	$answer =~ s/^(t|f)(rue|alse)$/$1/;
	if ($answer =~ /(?:ERROR|FATAL|PANIC):  ([0-9A-Z]{5})/)
	{
		return if $1 =~ /^(57P|08)/;
		$answer = "error $1";
		$self->surely('ROLLBACK') or return if !$call{block};
	}
	elsif ($answer =~ /WARNING:  .*wait(?:ing)? for synchronous replication/)
	{
		# committed here, and who knows where else
		return unless $self->is_alive;
		$answer = 'error 57014';
	}
	elsif ($answer =~ /^\s*$/ && $op =~ /^(?:release_at_commit|guard|write|end_block)$/)
	{
		# its answer is empty; what counts is whether it came
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
	delete $self->{lost};
	$self->{last_answer} = clock_gettime(CLOCK_MONOTONIC);
	$self->note_down('told', $self->{last_answer}, $id, $answer);
	$self->note_listening($answer, %call)
	  if $op eq 'enqueue' && $call{scope} eq 'lease';
	syswrite($self->{pipe}, chr $self->{client}) unless $self->{quiet};

	# who wants to end something does not give up
	return $self->call($op, $expression, %call, again => $again + 1)
	  if $answer eq 'error 57014' && $op =~ $ends && $again < 5;
	return $answer;
}

sub choose
{
	return DlockHistory::Client::choose(@_);
}

sub is_number
{
	return DlockHistory::Client::is_number(@_);
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
	  DlockHistory::Client::step($self);
}

# What a client wants of a server that is cut off is to keep what it has; and
# that is what it must not be told it can.
sub step_alone
{
	my ($self) = @_;
	my $what = rand(100);

	# first, nobody waits for what this session has
	return defined $self->release_all && $self->lapse(2, 0, ['on'])
	  unless $self->{prepared}++;
	# most of what waits for standbys would not end
	$self->{off} = 90;
	usleep(5_000);
	return
	  $what < 80 ? $self->confirm :
	  $what < 90 ? $self->guarded_write :
	  $what < 95 ? defined $self->open_lease :
	  $self->ask_for_lease(choose('x1', 's1', 'n1'),
		choose(sort keys %{ $self->{leases} }));
}

sub short
{
	my ($self) = @_;

	return DlockHistory::Client::percent(@{ $self->{shorts} } > 1 ? 60 : 25) ?
	  choose(@{ $self->{shorts} }) : 0;
}

# Longer than most leases, so that a grant in its time shows
sub delay
{
	return choose(0, 0.7);
}

# x1 for leases that may run out, and x7 for others
sub lock_for
{
	my ($self, $name, $short) = @_;

	$name =~ tr/123/789/ if $self->{apart} && !$short;
	return $name;
}

# The session's own, at times
sub channel
{
	my ($self, $call) = @_;

	return ", channel => 'history'" if choose(0, 1);
	$call->{listens} = 1;
	return '';
}

# Take a lock with a lease that runs out soon, and whose delay begins then.
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

# As clients do, for leases that live long enough for that
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

# Ask something about what the client has, or renew it; once the server is cut
# off, above all what must not last there.
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

# End somebody's ticket.
sub force
{
	my ($self) = @_;
	my ($ticket, $name) = split /\\|/,
	  choose(split /\n/,
		$self->{session}->query('SELECT ticket, name FROM dlock_locks')) // '';

	return 1 unless is_number($ticket) && $name;
	return defined $self->call('force', "dlock_force_release($ticket)",
		ticket => $ticket, name => $name, scope => 'none');
}

# Is the grant of a ticket announced that this session has enqueued?  It may
# take some time, but not for ever.
sub listen
{
	my ($self) = @_;
	my $patience = clock_gettime(CLOCK_MONOTONIC)
	  + $PostgreSQL::Test::Utils::timeout_default / 2;
	my $ticket = choose(sort keys %{ $self->{listens} }) or return 1;
	my $scope = $self->{listens}{$ticket};

	# until then the client has not got its answer
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

# A lease gets the ticket that it has, whose grant is now announced to this
# channel, or, after an error, to who knows which.
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

# What has come before the latest answer
sub has_heard
{
	my ($self, $ticket) = @_;

	foreach my $payload (splice @{ $self->{session}{announcements} // [] })
	{
		$self->{heard}{$1} = 1
		  if $payload =~ /"event":"granted".*"ticket":(\d+)/;
	}
	return $self->{heard}{$ticket};
}

# With the next durable call, so that such calls cannot rely on it
my $flushed_later = 'SET LOCAL synchronous_commit = off; ';

# A lock for a transaction, and then a write, perhaps.  Waits without a
# timeout, so that only deadlock detection gets it out of some waits.
sub block
{
	my ($self) = @_;
	my $count = choose(1, 1, 2);
	my %held;

	$self->surely('BEGIN') or return 0;
	foreach my $name ((sort { rand() <=> 0.5 } @DlockTorture::blocking)
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

# With a lease's ticket, or with one that may be gone
sub guarded_write
{
	my ($self) = @_;
	my @tickets = grep { $self->{tickets}{$_} =~ /^x/ }
	  sort keys %{ $self->{tickets} };
	my $ticket = choose(@tickets) or return 1;

	my $later = choose(0, 1);

	# standbys that are not waited for make a warning
	return defined $self->call('guard', '', scope => 'lease',
		ticket => $ticket, $later ? (sync => 'off') : (),
		sql => 'BEGIN; SET LOCAL client_min_messages = warning; '
		  . ($later ? $flushed_later : '')
		  . write_sql($self->{tickets}{$ticket}, $ticket) . '; COMMIT');
}

sub wait_for_ever
{
	my ($self) = @_;
	my $name = choose(@DlockTorture::blocking);
	my $result;

	if ($self->{session_holds}{$name})
	{
		delete $self->{session_holds}{$name};
		return defined $self->call('release', "dlock_release('$name')",
			name => $name, scope => 'none');
	}
	$result = $self->call('acquire', "dlock_acquire('$name', INFO)",
		%exclusive, name => $name, scope => 'session');
	$self->{session_holds}{$name} = 1 if is_number($result);

	# as it must, after a deadlock
	return defined $self->release_all
	  if ($result // '') eq 'error 40P01';
	return defined $result;
}

# A ticket that is queued would be in the way of a request of the same session.
sub use_session
{
	my ($self, $name) = @_;

	return 1 if %{ $self->{session_tickets} };
	return DlockHistory::Client::use_session($self, $name);
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
		my $name = choose('x1', 'x2', 'x3', 's1', 'n1', 'n2');
		my ($arguments, %call) = DlockHistory::Client::shape($name);

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
