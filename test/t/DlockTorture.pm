
=pod

=head1 NAME

DlockTorture - DlockHistory's clients and rules, for clients that are hurt

=head1 DESCRIPTION

In DlockHistory a client's session lives until the server dies.  Here sessions
also end before, and calls are cancelled.  A client that has lost its session
waits until its backend is gone, connects again, and looks up what became of
the call that it has had no answer to.  In addition to what they do there, the
clients hold locks for whole transactions, wait without a timeout, and so in
deadlocks at times, queue up in session scope, and make guarded writes.

Added to the rules:

=over

=item *

Who is told that he waits, or holds an exclusive lock, is not behind one who
has been told before that he holds with a greater ticket.

=item *

A guarded write is never visible after one with a greater fence.

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

=cut

sub new
{
	my ($class, $seed, $clients) = @_;
	my $self = DlockHistory::new($class, $seed);

	# each history has a directory of its own
	$self->{dir} = PostgreSQL::Test::Utils::tempdir();
	$self->{clients} = $clients;
	$self->{waits} = [];
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
			FROM unnest('{x1,x2,x3,b1,b2,b3}'::text[]) AS name});
	return;
}

=pod

=item $history->torture($node, $hurt, $end, %options)

Runs the clients.  Calls the sub $hurt again and again, with the number of
calls that were answered so far, until it returns false.  Then, once each
client has got an answer once more, calls the sub $end, which has to end their
sessions.  Takes the same option "off" as load().

=cut

sub torture
{
	my ($self, $node, $hurt, $end, %options) = @_;
	my %clients;
	my $answers = 0;
	my @answered;

	$self->{round}++;
	my $stop = "$self->{dir}/stop.$self->{round}";
	pipe(my $reader, my $writer) or die "pipe: $!";
	foreach my $client (1 .. $self->{clients})
	{
		my $pid = fork() // die "fork: $!";

		if ($pid == 0)
		{
			close $reader;
			my $done = eval {
				my $new = DlockTorture::Client->new($self, $node, $client,
					$writer, $options{off} // 0);

				$new->{stop} = $stop;
				$new->run;
				1;
			};
			warn $@ unless $done;
			POSIX::_exit($done ? 0 : 1);
		}
		$clients{$pid} = $client;
	}
	close $writer;
	$reader->blocking(0);

	my $read = sub {
		while (sysread($reader, my $bytes, 4096))
		{
			$answers += length $bytes;
			$answered[ ord $_ ] = 1 foreach split //, $bytes;
		}
	};

	# each has begun
	my $all = sub {
		$read->();
		return !grep { !$answered[$_] } 1 .. $self->{clients};
	};
	my $is_well = eval { poll('clients are there', $all); 1 };
	while ($is_well && $hurt->($answers))
	{
		$read->();
	}
	if ($is_well)
	{
		@answered = ();
		$is_well = eval { poll('clients are answered', $all); 1 };
	}
	$self->problem('no answer for client '
		  . join(', ', grep { !$answered[$_] } 1 .. $self->{clients})
		  . ":\n" . _activity($node))
	  unless $is_well;

	append_to_file($stop, '');
	$self->{killed} = DlockHistory::now();
	$end->();
	poll('clients have seen the end', sub {
			$read->();
			foreach my $pid (keys %clients)
			{
				next unless waitpid($pid, POSIX::WNOHANG) == $pid;
				$self->problem("client $clients{$pid} failed") if $? != 0;
				delete $clients{$pid};
			}
			return !%clients;
		});
	close $reader;
	$self->_read;
	return $answers;
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

# Read what the clients have written in this round, in the order of time.
sub _read
{
	my ($self) = @_;
	my @lines;

	foreach my $file (glob("$self->{dir}/$self->{round}.*"))
	{
		push @lines, map { [ split /\t/, $_, -1 ] } split /\n/,
		  slurp_file($file);
		unlink $file;
	}
	foreach my $line (sort { $a->[1] <=> $b->[1] } @lines)
	{
		my ($what, $time, $id, $result, %call) = @$line;

		if ($what eq 'asks')
		{
			$self->{calls}{$id} =
			  { %call, id => $id, round => $self->{round}, begin => $time };
			$self->_learn_begin($self->{calls}{$id});
		}
		elsif ($what eq 'told')
		{
			my $call = $self->{calls}{$id};

			# found, but nobody was told so
			$call->{sync} = 'off' if $call{found};
			$call->{answer} = $time;
			$call->{result} = $result;
			$self->_learn_answer($call);
		}
		elsif ($what eq 'lost')
		{
			$self->_end_holds($id, $result, 'session', 'xact');
		}
		else
		{
			$self->problem("client $id: $result");
		}
	}
	# with their sessions their holds are over
	foreach my $hold (@{ $self->{holds} })
	{
		$hold->{end} //= $self->{killed}
		  if $hold->{ticket}{scope} ne 'lease';
	}
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
	else
	{
		DlockHistory::_learn_begin($self, $call);
	}
	return;
}

my $ends = qr/^(?:release|release_ticket|release_at_commit|close)$/;

sub _learn_answer
{
	my ($self, $call) = @_;
	my ($op, $result) = ($call->{op}, $call->{result});
	my $ticket = $self->{tickets}{ $call->{ticket} // 0 };
	my $lease = $self->{leases}{ $call->{lease} || 0 };

	$self->{results}{ $result =~ /^error/ ? $result : $op }++;
	$self->{slowest} = $call
	  if !$self->{slowest} || $call->{answer} - $call->{begin} >
	  $self->{slowest}{answer} - $self->{slowest}{begin};

	if ($result =~ /^error/ && $call->{block})
	{
		# the transaction has failed
		$self->_end_holds($call->{client}, $call->{begin}, 'xact');
		$self->problem("$call->{id}: the holder's $op gave $result")
		  if $op eq 'write' && $result ne 'error 57014';
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
		push @{ $self->{waits} }, [ $ticket, $call ];
	}
	elsif ($op eq 'wait' && $ticket->{scope} ne 'lease')
	{
		$self->_hold($ticket, $call) if $result eq 't';
		$self->problem("$call->{id}: ticket $ticket->{number} is $result")
		  if $result =~ /^error/ && $result ne 'error 40P01';
		return;
	}
	elsif ($op =~ /acquire|enqueue/ && $lease && $result eq 'error 55L01')
	{
		$self->_gone($call, "lease $call->{lease}", $lease);
	}
	DlockHistory::_learn_answer($self, $call);
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
	  foreach splice @{ $self->{waits} };
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

sub new
{
	my ($class, $history, $node, $client, $pipe, $off) = @_;
	my ($leases, $tickets) = $history->_belongings($client);
	my $self = bless {
		node => $node,
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

# The server is killed once there is this file.
sub is_over
{
	my ($self) = @_;

	return -e $self->{stop};
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
	my $session = eval { DlockTest::session($self->{node}) };

	if (!$session)
	{
		usleep(50_000);
		return 0;
	}
	$self->{session} = $session;
	$self->{session_holds} = {};
	$self->{session_tickets} = {};
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
		$self->{leases}{$ticket} = 1;
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
		my $sync = DlockHistory::Client::percent($self->{off}) ? 'off' : 'on';

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
		%call, client => $self->{client}, sync => $self->{sync} // 'on');
	my $answer = $self->{session}->query($sql);

	$answer =~ s/^(t|f)(rue|alse)$/$1/;
	if ($answer =~ /(?:ERROR|FATAL|PANIC):  ([0-9A-Z]{5})/)
	{
		return if $1 =~ /^(57P|08)/;
		$answer = "error $1";
		$self->surely('ROLLBACK') or return if !$call{block};
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
	syswrite($self->{pipe}, chr $self->{client});

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

	return
	  $what < 6 ? $self->block :
	  $what < 11 ? $self->wait_for_ever :
	  $what < 16 ? $self->queue_up :
	  $what < 19 ? $self->without_snapshot :
	  $what < 22 ? $self->all_at_once :
	  $what < 30 ? $self->guarded_write :
	  DlockHistory::Client::step($self);
}

my %exclusive = (mode => 'exclusive', permits => 1);

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
			block => 1, sql => write_sql($name, $held{$name}));
	}
	delete $self->{sync};
	return defined $self->call('end_block', '', scope => 'none', block => 1,
		sql => choose('COMMIT', 'COMMIT', 'ROLLBACK'))
	  && $self->surely('ROLLBACK');
}

# Flushed with the next durable call, so that such calls cannot rely on it
sub write_sql
{
	my ($name, $fence) = @_;

	return
	  "SET LOCAL synchronous_commit = off; DO \$\$BEGIN PERFORM dlock_guard('$name', $fence); END\$\$; "
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

	return defined $self->call('guard', '', scope => 'none',
		sql => 'BEGIN; '
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
