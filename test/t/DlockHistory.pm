
=pod

=head1 NAME

DlockHistory - a load of dlock's clients, and what its history allows

=head1 DESCRIPTION

Clients, each a process with a session of its own, do all that there is to do
with leases, and with locks of the other scopes beside them, at random.  Each
writes down what it is about to ask, and then what it was told, both with the
time.  So the history is known as well as any client can know it: a call took
effect somewhere between its two lines, if it has both.

The server is killed in the middle of that.  What it has after a restart, or
what another server has that was promoted in its place, is then compared with
the history.  These are the rules:

=over

=item *

The state stands at one point of the WAL.  Whatever was answered before a call
that is seen to be before that point began is before it, too.  The latest
begin of such a call is called the I<horizon> here.  Two kinds of calls are
seen to be there: those that were given a new ticket or lease, durably, and
those that have made one which is found.  A ticket may be older than the call
that it was given to: then an earlier call has asked for it, and was told
nothing.

=item *

A ticket of a lease is there, and holds if it held, if the client was told so
durably or before the horizon, unless somebody has begun to release it, or to
close its lease, or the lease could run out.  A lock that a lease with a delay
had is closed for so long after it has run out.

=item *

A ticket is not there if its release was answered before the horizon; or where
a lock that it would stand in the way of was granted to a greater ticket,
durably or before the horizon; or if no client can have asked for it.

=item *

In each lock who holds may hold together, nobody waits without a reason, and
holders have smaller tickets than waiters.

=item *

From the beginning of the history to its end, through all crashes, no two
clients are sure to hold a lock at one time that excludes one of them, and
tickets grow.

=back

=cut

package DlockHistory;

use strict;
use warnings FATAL => 'all';

use DlockTest;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);

my $infinity = 9**9**9;

# The first letter tells how a lock is used: exclusive, shared, slots.
my @locks = ('x1', 'x2', 'x3', 's1', 'n1', 'n2');
my $slots = 3;

my $ttl = 3600;
my $short_ttl = 0.2;

=pod

=head1 METHODS

=over

=item DlockHistory->new($seed)

A history, with nothing in it.  Whatever is chosen at random depends on the
seed alone, and on what the server answers.

=cut

sub new
{
	my ($class, $seed) = @_;

	srand($seed);
	note "seed $seed: set DLOCK_TEST_SEED to run with another one";
	return bless {
		seed => $seed,
		dir => PostgreSQL::Test::Utils::tempdir,
		round => 0,
		clients => 6,
		calls => {},      # id => call
		tickets => {},    # number => ticket that a client was told of
		leases => {},     # number => lease, the same
		asked => {},      # "lease name" => first call that was told nothing
		holds => [],      # what clients were sure to hold
		problems => []
	}, $class;
}

sub ttl
{
	return $ttl;
}

sub now
{
	return clock_gettime(CLOCK_MONOTONIC);
}

=pod

=item $history->load($node, $calls, $end, %options)

Runs clients until $calls calls have been answered, and then calls the sub
$end, which has to end their sessions.  With off => $percent so many of the
calls are made with synchronous_commit = off.  With after => $calls2, then =>
$sub this sub is called when so many have been answered.

=cut

sub load
{
	my ($self, $node, $calls, $end, %options) = @_;
	my %clients;

	$self->{round}++;
	pipe(my $reader, my $writer) or die "pipe: $!";
	foreach my $client (1 .. $self->{clients})
	{
		my $pid = fork() // die "fork: $!";

		if ($pid == 0)
		{
			close $reader;
			my $done = eval {
				DlockHistory::Client->new($self, $node, $client, $writer,
					$options{off} // 0)->run;
				1;
			};
			warn $@ unless $done;
			POSIX::_exit($done ? 0 : 1);
		}
		$clients{$pid} = $client;
	}
	close $writer;
	if ($options{after})
	{
		_await($reader, $options{after});
		$options{then}->();
		$calls -= $options{after};
	}
	_await($reader, $calls);
	$self->{killed} = now();
	$end->();
	poll('clients have seen the end', sub {
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
	return;
}

# Wait for so many answers: each is a byte.
sub _await
{
	my ($reader, $calls) = @_;

	while ($calls > 0)
	{
		my $count = sysread($reader, my $bytes, $calls);

		die 'clients have ended before their time' unless $count;
		$calls -= $count;
	}
	return;
}

# What this client had when its last session ended, as far as is known now
sub _belongings
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

sub problem
{
	my ($self, $what) = @_;

	push @{ $self->{problems} }, "round $self->{round}: $what";
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
		else
		{
			my $call = $self->{calls}{$id};

			$call->{answer} = $time;
			$call->{result} = $result;
			$self->_learn_answer($call);
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
	elsif ($call->{op} =~ /acquire|enqueue/ && $call->{lease})
	{
		$self->{asked}{"$call->{lease} $_"} //= $call
		  foreach split /,/, $call->{name};
	}
	return;
}

sub _begin_release
{
	my ($self, $ticket, $call) = @_;

	return if $ticket->{release};
	$ticket->{release} = $call;
	$_->{end} //= $call->{begin}
	  foreach grep { $_->{ticket} == $ticket } @{ $self->{holds} };
	return;
}

# The lease is sure to be open until then.
sub _alive_until
{
	my ($lease) = @_;

	return $lease->{short} ? $lease->{alive_until} : $infinity;
}

# Its locks are sure not to be granted to others until then, unless somebody
# releases them: a delay begins when the lease has run out.
sub _closed_until
{
	my ($lease) = @_;

	return _alive_until($lease) + $lease->{delay};
}

# The lease was open when this call was made: for how long is it sure to be?
sub _alive_from
{
	my ($self, $lease, $call) = @_;
	my $until = $call->{begin} + $lease->{short};

	$lease->{alive_until} = $until if $until > ($lease->{alive_until} // 0);
	return;
}

# It was told that it is gone: fine, if it has expired, or was released.
sub _gone
{
	my ($self, $call, $what, $thing) = @_;

	return if $thing->{release} || $thing->{close};
	my $lease =
	  exists $thing->{lease} ? $self->{leases}{ $thing->{lease} } : $thing;

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
		  $ticket->{scope} eq 'lease' && !$lease->{close} &&
		  $call->{answer} < _alive_until($lease);
	}
	elsif ($op eq 'wait')
	{
		my $ticket = $self->{tickets}{ $call->{ticket} };

		if ($result eq 't')
		{
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

			$self->_hold($ticket, $call) if $op !~ /enqueue/;
		}
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
	my $asked = delete $self->{asked}{ ($call->{lease} // '') . " $name" };

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

# From this answer on, the ticket is known to hold.
sub _hold
{
	my ($self, $ticket, $call) = @_;

	return if $ticket->{held};
	$ticket->{held} = $call;
	push @{ $self->{holds} },
	  {
		ticket => $ticket,
		from => $call->{answer},
		end => $ticket->{release} ? $ticket->{release}{begin} :
		  $ticket->{scope} eq 'xact' ? $call->{begin} : undef
	  };
	return;
}

=pod

=item is_durable($level, $where)

Does that synchronous_commit make a call's answer durable "here", on the server
that the client used; "there", on a synchronous standby; or "nowhere", on an
asynchronous one?

=cut

sub is_durable
{
	my ($level, $where) = @_;

	return $where eq 'here' ? $level ne 'off' :
	  $where eq 'there' ? $level =~ /^(?:on|remote_write|remote_apply)$/ : 0;
}

=pod

=item $history->check($node, $since, $when, $durable)

Compares what the server has now, before any client is there again, with the
history.  It was not started before the time $since.  $durable says where it
stands, seen from the server that the clients used: see is_durable().

What is there the clients have again in the next round, and what is not there
is forgotten.

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
		  ($call->{scope} eq 'lease' || $call->{op} eq 'open');
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
		# one that a delay keeps closed stands among the holders
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

	# how far what is there reaches
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
	$self->_check_lock($_, $locks{$_}, \%there) foreach sort keys %locks;
	$self->_check_superseded(\%there, $durable);
	$self->_check_fences($session, \%there);
	$self->_check_tables($session);
	$self->_check_growth($session);
	$self->_go_on(\%there, \%leases, $durable);
	$session->quit;
	note "$when: $self->{lost} tickets and $self->{undone} releases are lost";
	$self->report($when);
	return;
}

# Is this known to have happened before what is there?
sub _settled
{
	my ($self, $call) = @_;

	return $call && $call->{answer} &&
	  ($self->{durable}->($call) || $call->{answer} <= $self->{horizon});
}

# The same for a grant.  A session is not told of one before the removal of
# the holder before is flushed.
sub _grant_settled
{
	my ($self, $ticket, $durable) = @_;

	return $self->_settled($ticket->{held}) ||
	  $ticket->{held} && $durable eq 'here' && $ticket->{scope} ne 'lease';
}

# The same for a release, which is never waited for
sub _released
{
	my ($self, $call) = @_;

	return $call && $call->{answer} && $call->{answer} <= $self->{horizon};
}

sub _check_ttl
{
	my ($self, $leases, $elapsed) = @_;

	foreach my $lease (values %$leases)
	{
		my ($number, $full, $remaining, undef, $pid) = @$lease;

		$self->problem("lease $number has $remaining s of $full s, "
			  . "with the server up for $elapsed s at most")
		  if $pid != 0 || $remaining > $full ||
		  $remaining < $full - $elapsed && $full == $ttl;
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
		  if $self->_settled($lease->{told}) && !$lease->{short} &&
		  !$lease->{single} && !$lease->{close};
	}
	foreach my $ticket (values %{ $self->{tickets} })
	{
		my $lease = $self->{leases}{ $ticket->{lease} };
		my $row = $there->{ $ticket->{number} };

		next if !$ticket->{live} || $lease->{short};
		if (!$row)
		{
			$self->problem($self->_tell($ticket) . ' is missing')
			  if $self->_settled($ticket->{told}) && !$ticket->{release} &&
			  !$lease->{close};
			$self->{lost}++ unless $ticket->{release} || $lease->{close};
			next;
		}
		$self->problem($self->_tell($ticket) . ' is ' . join(' ', %$row))
		  if $row->{name} ne $ticket->{name} ||
		  $row->{mode} ne $ticket->{mode} ||
		  $row->{permits} != $ticket->{permits} ||
		  $row->{lease} != $ticket->{lease};
		$self->problem($self->_tell($ticket) . ' waits again')
		  if !$row->{granted} && $self->_settled($ticket->{held});
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
			# what comes after the lease has run out does not end a delay
			$self->problem($self->_tell($ticket) . ' is there again')
			  if !$ticket->{live} || !$row->{closed} &&
			  ($self->_released($ticket->{release}) ||
				$lease && $self->_released($lease->{close}));
			$self->{undone}++ if $ticket->{release} && $ticket->{release}{answer};
		}
		else
		{
			$self->problem("ticket $row->{number} is there, "
				  . "but $row->{info} asked for none, or has got another, "
				  . 'before ' . ($self->{latest} // 'nothing'))
			  if !$call ||
			  $self->_released($call);
		}
		$self->problem("ticket $row->{number} has no lease")
		  unless $leases->{ $row->{lease} } || !$lease || $lease->{short};
	}
	foreach my $row (values %$leases)
	{
		my $lease = $self->{leases}{ $row->[0] };

		$self->problem("lease $row->[0] is there again")
		  if $lease && (!$lease->{live} || $self->_released($lease->{close}));
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
	  $name =~ /^n/ && $permits > $slots;
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

		$self->problem("lock $name: $head->{number} waits for nobody")
		  if grep({ $_->{closed} } @holders) ? 0 :
		  $name =~ /^n/ ? $permits + $head->{permits} <= $slots :
		  $head->{mode} eq 'exclusive' ? !@holders :
		  !$exclusive;
	}
	return;
}

sub _list
{
	return join(', ', map { "$_->{number} ($_->{info})" } @_);
}

# Whom an exclusive grant has shut out, or an exclusive one that another
# grant has, does not come back.
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
			  . 'and was superseded by ' . $self->_tell($by))
		  if $by && $by->{number} > $row->{number};
	}
	return;
}

# The answer of dlock_check() for every ticket that there ever was
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

		# what is there, and short, may expire just now
		$self->problem($self->_tell($ticket)
			  . ($is_current ? ' is current' : ' is not current'))
		  if $is_current && !($row && $row->{granted}) && !$ticket->{live} ||
		  $is_current && $row && $row->{closed} ||
		  $is_current && !$row && !$self->{leases}{ $ticket->{lease} }{short} ||
		  !$is_current && $row && $row->{granted} &&
		  !$self->{leases}{ $ticket->{lease} }{short};
	}
	return;
}

# What is in the tables is what is in memory, once all is written.
sub _check_tables
{
	my ($self, $session) = @_;
	my $tickets = q{SELECT ticket, name, lease, granted, mode, permits, info};

	$session->wait_for(
		qq{WITH
			a AS ($tickets FROM dlock_locks WHERE scope = 'lease'),
			b AS ($tickets FROM dlock_queue),
			c AS (SELECT lease, ttl, info FROM dlock_leases
				   WHERE lease NOT IN (SELECT ticket FROM dlock_locks)),
			d AS (SELECT lease, ttl, info FROM dlock_queue_lease)
		  SELECT NOT EXISTS ((TABLE a EXCEPT TABLE b) UNION ALL
							 (TABLE b EXCEPT TABLE a))
			 AND NOT EXISTS ((TABLE c EXCEPT TABLE d) UNION ALL
							 (TABLE d EXCEPT TABLE c))});
	return;
}

# The next ticket of each lock is greater than all before.
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

# The history goes on with what is there.
sub _go_on
{
	my ($self, $there, $leases, $durable) = @_;

	# what this server knows nothing of has not been
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
		delete $lease->{close} if $lease->{live};
	}
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
			my $end = _closed_until($lease);
			my $row = $there->{ $ticket->{number} };

			# one that waits again has lost its grant
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
	}
	$self->{asked} = {};
	foreach my $row (values %$there)
	{
		my $call = $self->{calls}{ $row->{info} } or next;
		my $ticket = $self->_learn_ticket($row->{number}, $row->{name},
			{ %$call, lease => $row->{lease}, mode => $row->{mode},
				permits => $row->{permits} });

		$ticket->{live} = 1;
		if ($ticket->{release})
		{
			# the release is undone; nobody can tell since when
			delete $ticket->{release};
			delete $ticket->{held};
		}
		# what was found is in the WAL
		$self->_hold($ticket,
			{ id => 'found', op => 'found', sync => 'on', scope => 'lease',
				answer => now() })
		  if $row->{granted} &&
		  !$self->{leases}{ $ticket->{lease} }{short};
	}
	return;
}

sub _tell
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

=item $history->check_past

Looks through the whole history: nobody has held together who must not, and
whoever asked for a ticket later has got a greater one.

=cut

sub check_past
{
	my ($self) = @_;

	my %names = map { $_->{name} => 1 } values %{ $self->{tickets} };

	foreach my $name (grep { /^[xsn]/ } sort keys %names)
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
				my $end = _closed_until($self->{leases}{ $ticket->{lease} });

				$hold->{end} = $end if $end < ($hold->{end} // $infinity);
			}
			next if $hold->{from} >= ($hold->{end} // $infinity);
			@now =
			  grep { ($_->{end} // $infinity) > $hold->{from} } @now;
			foreach my $other (map { $_->{ticket} } @now)
			{
				$self->problem($self->_tell($ticket) . ' held beside '
					  . $self->_tell($other))
				  if $other != $ticket &&
				  ($ticket->{mode} eq 'exclusive' ||
					$other->{mode} eq 'exclusive');
			}
			push @now, $hold;
			$permits += $_->{ticket}{permits} foreach @now;
			$self->problem("$permits permits of $name are taken: "
				  . join(', ', map { $self->_tell($_->{ticket}) } @now))
			  if $ticket->{mode} eq 'slots' && $permits > $slots;
		}

		# in the order of asking, with the answers that had come before
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
			$self->problem($self->_tell($ticket) . ' came later than '
				  . $self->_tell($greatest))
			  if $greatest && $ticket->{number} < $greatest->{number};
		}
	}
	$self->report('in the whole history');
	return;
}

=pod

=item $history->report($when)

One test: no problem was found since the last report.

=cut

sub report
{
	my ($self, $when) = @_;
	my @problems = splice @{ $self->{problems} };
	local $Test::Builder::Level = $Test::Builder::Level + 2;

	note sprintf(
		'%s: %d calls, %d tickets told, %d there; %d leases there',
		$when,
		scalar(keys %{ $self->{calls} }),
		scalar(keys %{ $self->{tickets} }),
		scalar(grep { $_->{live} } values %{ $self->{tickets} }),
		scalar(grep { $_->{live} } values %{ $self->{leases} }));
	splice @problems, 20, @problems - 20, '...' if @problems > 20;
	ok(!@problems, "$when: all is as it must be") or diag(join "\n", @problems);
	return;
}

=pod

=item $history->close_all($node)

Closes every lease.  Nothing must be left then, in memory or in a table.

=cut

sub close_all
{
	my ($self, $node) = @_;
	my $session = session($node);

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

=pod

=back

=head1 FUNCTIONS

=over

=item DlockHistory::kill_server($node)

Kills all of a server's processes, or the postmaster alone with $alone, and
waits until the last one is gone.

=cut

sub processes
{
	my ($condition) = @_;

	return map { $_->[0] } grep { $condition->(@$_) }
	  map { [ /^\s*(\d+)\s+(\d+)\s+(\S)/ ] } `ps -A -o pid= -o ppid= -o state=`;
}

sub kill_server
{
	my ($node, $alone) = @_;
	my $postmaster = $node->{_pid};

	# stopped, it has no more children
	kill('STOP', $postmaster) == 1 or die "no process $postmaster";
	my @children = processes(sub { $_[1] == $postmaster });
	kill('KILL', @children) unless $alone;
	$node->kill9;
	my %killed = map { $_ => 1 } $postmaster, @children;

	poll('processes are gone',
		sub { !processes(sub { $killed{ $_[0] } && $_[2] ne 'Z' }) });
	# who is to start takes a zombie for a server, for as long as it is there
	unlink $node->data_dir . '/postmaster.pid',
	  $node->host . '/.s.PGSQL.' . $node->port . '.lock';
	return;
}

=pod

=back

=cut

package DlockHistory::Client;

use DlockTest ();
use Time::HiRes qw(clock_gettime CLOCK_MONOTONIC);

sub new
{
	my ($class, $history, $node, $client, $pipe, $off) = @_;
	my ($leases, $tickets) = $history->_belongings($client);
	my $self = bless {
		client => $client,
		pipe => $pipe,
		off => $off,
		round => $history->{round},
		calls => 0,
		leases => $leases,      # number => seconds until it runs out, 0: never
		tickets => $tickets,    # number => name
		session_holds => {},    # name => 1
		session => DlockTest::session($node)
	}, $class;

	srand($history->{seed} * 1000 + $self->{round} * 10 + $client);
	open $self->{file}, '>', "$history->{dir}/$self->{round}.$client"
	  or die "open: $!";
	$self->{file}->autoflush(1);
	$self->{session}->query('SET client_min_messages = error');
	return $self;
}

sub run
{
	my ($self) = @_;

	while ($self->step) { }
	$self->{session}->vanish;
	return;
}

sub note_down
{
	my ($self, @fields) = @_;

	print { $self->{file} } join("\t", @fields), "\n" or die "print: $!";
	return;
}

# Ask for something; the answer is a value, "null", or "error" with an SQLSTATE.
# Undefined when the session has ended.
sub call
{
	my ($self, $op, $expression, %call) = @_;
	my $sync = rand(100) < $self->{off} ? 'off' : 'on';
	my $id = "$self->{round}.$self->{client}." . ++$self->{calls};
	my ($before, $after) = ('', '');

	$self->{session}->query("SET synchronous_commit = $sync")
	  if $sync ne ($self->{sync} // '');
	$self->{sync} = $sync;
	($before, $after) = ('BEGIN; ', '; COMMIT')
	  if $op eq 'release_at_commit';
	$expression =~ s/INFO/info => '$id'/;
	$self->note_down('asks', clock_gettime(CLOCK_MONOTONIC), $id, '',
		%call, op => $op, client => $self->{client}, sync => $sync);
	my $answer = $self->{session}
	  ->query("${before}SELECT coalesce(($expression)::text, 'null')$after");

	$answer =~ s/^(t|f)(rue|alse)$/$1/;
	if ($answer =~ /(?:ERROR|FATAL|PANIC):  ([0-9A-Z]{5})/)
	{
		return if $1 =~ /^(57P|08)/;
		$answer = "error $1";
	}
	elsif ($op eq 'release_at_commit')
	{
		# its answer is empty; what counts is whether it came
		return if $answer !~ /^\s*$/;
		return
		  unless $self->{session}->query('SELECT true') eq 't';
		$answer = 't';
	}
	elsif ($answer !~ /^(null|-?\d+|t|f|\{[\d,]+\})$/)
	{
		return;
	}
	$self->note_down('told', clock_gettime(CLOCK_MONOTONIC), $id, $answer);
	syswrite($self->{pipe}, '.');
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

# Arguments that every kind of request has, and what they are
sub shape
{
	my ($name) = @_;
	my $permits = choose(1, 1, 2);

	return $name =~ /^n/ ?
	  (", slots => $slots, permits => $permits", mode => 'slots',
		permits => $permits) :
	  $name =~ /^s/ && percent(70) ?
	  (', shared => true', mode => 'shared', permits => 1) :
	  ('', mode => 'exclusive', permits => 1);
}

sub is_number
{
	return defined $_[0] && $_[0] =~ /^\d+$/;
}

# The argument for the channel of announcements, which may be noted in the call
sub channel
{
	return ", channel => 'history'";
}

# One call.  False when the session has ended.
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
	elsif ($what < 84)
	{
		return $self->ask_for_lease($name, $lease);
	}
	else
	{
		return $self->use_session($name);
	}
	return defined $result;
}

# The seconds after which a lease may run out, or 0 for one that never does
sub short
{
	return percent(25) ? $short_ttl : 0;
}

# The delay of a lease that may run out, in seconds
sub delay
{
	return 0;
}

# The lock to ask for, where $name was chosen, with such a lease
sub lock_for
{
	my ($self, $name, $short) = @_;

	return $name;
}

# Returns its number, or an error; undefined when the session has ended.
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
	# no other client asks with the same
	$arguments .= ", owner => '$self->{client}." . choose(1, 2) . "'"
	  if percent(30) && $function !~ /ttl/;
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
		$self->{session_holds}{$name} = 1 if is_number($result);
	}
	return defined $result;
}

1;
