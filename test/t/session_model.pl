# Many sessions run random programs over few locks.  Whenever the server is
# idle, it agrees with a simple model (Dlock::Model) about holders, waiters and
# their places, and the result of each statement.
#
# What would break it: almost any error in the queue, in the count of acquires,
# or in the time of releases.  The programs do not test time, deadlocks and
# crashes.  No program closes a cycle.
#
# The same DLOCK_SEED makes the same program of DLOCK_STEPS steps, except for
# the last fifth, in which the server decides the outcome of steps: a release
# that races with a cancel, or with other releases and an exit.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Model;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

my $seed = $ENV{DLOCK_SEED} || time() % 1_000_000;
my $steps = $ENV{DLOCK_STEPS} || 5000;
my @names = qw(S1 S2 S3 S4 S5 S6 S7 S8);
my %slots = (a => 0, b => 0, c => 0, d => 0, p => 2, q => 4);

note "DLOCK_SEED=$seed DLOCK_STEPS=$steps";

my $node = new_server('main',
	conf => "deadlock_timeout = '1h'\nautovacuum = off\n");
my $model = Dlock::Model->new(@names);
my %sessions = map { $_ => session($node) } @names;
my $admin = session($node);
my $killer = session($node);
my %asked;	# sessions that have not answered yet
my %alone;	# sessions whose transaction is a single xact-scoped acquire
my %numbers;	# of the model's tickets, in the order of joining
my %had;	# a ticket that a session has or had
my @program;	# the steps that were taken, for the report
my $step = 0;

#
# Random numbers, from a private generator (xorshift), because other code here
# calls rand().
#
my $random = ($seed * 2654435761) & 0xffffffff || 1;

sub random
{
	my ($n) = @_;

	$random ^= ($random << 13) & 0xffffffff;
	$random ^= $random >> 17;
	$random ^= ($random << 5) & 0xffffffff;
	return $random % $n;
}

sub one_of
{
	return @_ ? $_[ random(scalar @_) ] : undef;
}

sub percent
{
	return random(100) < $_[0];
}

#
# The server's side
#
sub send_sql
{
	my ($s, $sql) = @_;

	push @program, "$step: $s: $sql";
	$asked{$s} = 1;
	$alone{$s} = !in_block($s) && $sql =~ /^SELECT dlock_xact_acquire/;
	# A call that does not wait returns at once.
	$sessions{$s}->is_next unless $sql =~ /acquire|wait/;
	$sessions{$s}->start($sql);
	return;
}

sub server_rows
{
	my %name_of = map { $sessions{$_}{pid} => $_ } @names;
	my (@rows, @tickets);
	my $answer = $admin->query(
		q{SELECT name, "position", pid, mode, slots, permits, scope, depth,
				 array_to_string(CASE WHEN NOT granted
								 THEN dlock_blocking_pids(pid) END, ' '),
				 ticket
			FROM dlock_locks ORDER BY name, "position", ticket});

	foreach my $line (split /\n/, $answer)
	{
		my @row = split /\|/, $line, -1;

		# If the server is gone, this is not a row.
		return ([$line], []) if @row != 10;
		my %blockers = map { ($name_of{$_} // $_) => 1 } split / /, $row[8];

		push @tickets, pop @row;
		$row[2] = $name_of{ $row[2] } // $row[2];
		$row[8] = join(' ', sort keys %blockers);
		push @rows, join('|', @row);
	}
	return (\@rows, \@tickets);
}

# The number of a ticket never changes, and later tickets have greater numbers.
sub learn_number
{
	my ($ticket, $number) = @_;

	$ticket->{number} //= $number;
	disagree("ticket $ticket->{number} has become $number")
	  if $ticket->{number} != $number;
	$numbers{ $ticket->{order} } = $number;
	return;
}

sub check_answer
{
	my ($s, $answer) = @_;
	my ($kind, @result) = @{ $model->{sessions}{$s}{result} };
	my @shown;
	my $right;

	$asked{$s} = 0;
	push @program, "$step: $s = " . ($answer =~ /\A(.*)/)[0];
	if ($kind eq 'error')
	{
		$right = $answer =~ /(ERROR|FATAL):  $result[0]:/;
	}
	else
	{
		# A warning says why the answer is f, or that the lock is free again.
		@shown = grep { /^[^ ]*$/ && !/^LOCATION/ } split /\n/, $answer;
		$right = $answer !~ /(ERROR|FATAL):/
		  && ($alone{$s} ? $answer =~ /WARNING:  25P01:/ :
			$answer !~ /WARNING/ || $answer =~ /^f$/m);
	}
	if ($kind eq 'text')
	{
		$right &&= join('', @shown) eq $result[0];
	}
	elsif ($kind eq 'number')
	{
		my @got = join('', @shown) =~ /(\d+)/g;

		$right &&= @got == @result;
		learn_number($result[$_], $got[$_]) foreach $right ? 0 .. $#got : ();
	}
	disagree("$s was to return: $kind "
		  . join(' ', map { ref $_ ? "of $_->{name}" : $_ } @result)
		  . "\nand has returned: $answer")
	  unless $right;
	return;
}

sub disagree
{
	my ($what) = @_;
	my ($rows) = server_rows();

	note(join("\n", 'the program:', @program));
	diag("DLOCK_SEED=$seed DLOCK_STEPS=$steps, step $step: $what");
	diag(join("\n", 'the end of the program:', @program[ -50 .. -1 ]))
	  if @program > 50;
	diag(join("\n", 'the server:', @$rows));
	diag(join("\n", 'the model:', $model->rows));
	die 'server and model disagree';
}

# Wait until the server agrees with the model.
sub agree
{
	my $until = time() + $PostgreSQL::Test::Utils::timeout_default;
	my @rows = $model->rows;
	my ($server, $tickets);

	foreach my $s (@names)
	{
		next if !$asked{$s} || $model->waits($s);
		my $answer = eval { $sessions{$s}->answer };
		disagree("$s still waits: $@") if $@;
		check_answer($s, $answer);
	}
	while (1)
	{
		($server, $tickets) = server_rows();
		last if "@rows" eq "@$server";
		disagree('other locks') if time() > $until;
		usleep(1000);
	}
	foreach my $ticket ($model->tickets)
	{
		learn_number($ticket, shift @$tickets);
	}
	foreach my $s (@names)
	{
		disagree("$s does not wait: " . $sessions{$s}->answer)
		  if $asked{$s} && $sessions{$s}->answered;
	}
	return;
}

#
# Steps of an idle session.  Each returns false if it is impossible.
#
sub random_request
{
	my $name = one_of(qw(a a a b b c d p p q));
	my $slots = $slots{$name};

	# sometimes slots that conflict with other requests' slots
	$slots = one_of(0, 2, 3) if $name =~ /[apq]/ && percent(6);

	return (
		names => [$name],
		scope => one_of('session', 'xact'),
		slots => $slots,
		mode => $slots ? 'slots' : one_of('exclusive', 'exclusive', 'shared'),
		permits => $slots ? 1 + random($slots) : 1);
}

sub arguments
{
	my (%request) = @_;
	my $arguments = "'$request{names}[0]'";

	if ($request{all})
	{
		$arguments = "'{" . join(',', @{ $request{names} }) . "}'";
	}
	$arguments .= ', shared => true' if $request{mode} eq 'shared';
	$arguments .= ", slots => $request{slots}, permits => $request{permits}"
	  if $request{slots};
	$arguments .= ", timeout => '1ms'" if $request{timeout};
	return $arguments;
}

sub acquire
{
	my ($s, %request) = @_;
	my $patient = !$request{nowait} && !$request{timeout};
	my $function = join '_', 'dlock',
	  $request{try} ? 'try' : (),
	  $request{scope} eq 'xact' ? 'xact' : (),
	  'acquire',
	  $request{all} ? 'all' : ();

	if ($patient && !$model->{sessions}{$s}{failed})
	{
		# Two waiters could continue from lock to lock in either order.
		return 0
		  if $request{all}
		  && grep { ($_->{request} // {})->{all} }
		  values %{ $model->{sessions} };
		return 0
		  if ($request{all}
			|| $model->outlook($s, \%request, $request{names}[0]) eq 'wait')
		  && $model->closes_cycle($s, %request);
	}
	$model->acquire($s, %request);
	send_sql($s, "SELECT $function(" . arguments(%request) . ')');
	return 1;
}

sub acquire_all
{
	my ($s, %how) = @_;
	my %request = random_request();

	# A waiter continues while other sessions are still releasing.  It uses
	# locks without slots, so that the order does not matter.
	my @from = $how{nowait} ? qw(a b c d p) : qw(b c d);
	my @list = map { one_of(@from) } 0 .. random(4);

	return acquire(
		$s, %request, %how,
		all => 1,
		names => \@list,
		slots => 0,
		permits => 1,
		mode => one_of('exclusive', 'shared'));
}

sub in_block
{
	return $model->{sessions}{ $_[0] }{in_block};
}

sub any_savepoint
{
	my ($s) = @_;
	my $savepoints = $model->{sessions}{$s}{savepoints};

	return $savepoints && 1 + random($savepoints);
}

# One of the session's tickets, or, more rarely, a former ticket
sub ticket
{
	my ($s) = @_;
	my @tickets = @{ $model->{sessions}{$s}{tickets} };

	return $had{$s} if $had{$s} && percent(5);
	$had{$s} = one_of(@tickets);
	return $had{$s};
}

sub done
{
	my ($s, $sql) = @_;

	send_sql($s, $sql);
	return 1;
}

sub commit
{
	my ($s) = @_;

	return 0 unless in_block($s);
	$model->end($s, 1);
	return done($s, 'COMMIT');
}

sub rollback
{
	my ($s) = @_;

	return 0 unless in_block($s);
	$model->end($s, 0);
	return done($s, 'ROLLBACK');
}

sub rollback_to
{
	my ($s) = @_;
	my $number = any_savepoint($s) or return 0;

	$model->rollback_to($s, $number);
	return done($s, "ROLLBACK TO s$number");
}

# Each step, and its relative frequency
my @idle_steps = (
	16 => sub { acquire($_[0], random_request()) },
	4 => sub { acquire($_[0], random_request(), nowait => 1, try => 1) },
	2 => sub { acquire($_[0], random_request(), timeout => 1) },
	1 => sub { acquire($_[0], random_request(), timeout => 1, try => 1) },
	3 => sub { acquire_all($_[0]) },
	2 => sub { acquire_all($_[0], nowait => 1, try => 1) },
	2 => sub {
		my ($s) = @_;
		my %request = random_request();

		$model->acquire_and_raise($s, %request);
		done($s,
			'DO $$ BEGIN PERFORM dlock_try_'
			  . ($request{scope} eq 'xact' ? 'xact_' : '')
			  . 'acquire('
			  . arguments(%request)
			  . '); RAISE; EXCEPTION WHEN others THEN END $$');
	},
	8 => sub {
		my ($s) = @_;
		my $ticket = ticket($s) or return 0;

		$model->release($s, $ticket->{name});
		done($s, "SELECT dlock_release('$ticket->{name}')");
	},
	3 => sub {
		my ($s) = @_;
		my $ticket = ticket($s) or return 0;

		$model->release_ticket($s, $ticket);
		done($s, "SELECT dlock_release_ticket($ticket->{number})");
	},
	4 => sub {
		my ($s) = @_;
		my $ticket = ticket($s) or return 0;

		$model->downgrade($s, $ticket);
		done($s, "SELECT dlock_downgrade($ticket->{number})");
	},
	3 => sub {
		my ($s) = @_;
		my $ticket = ticket($s) or return 0;

		$model->release_at_commit($s, $ticket);
		done($s, "SELECT dlock_release_at_commit($ticket->{number})");
	},
	1 => sub {
		$model->release_all($_[0]);
		done($_[0], 'SELECT dlock_release_all()');
	},
	1 => sub {
		my ($s) = @_;

		return 0 if in_block($s);
		$model->release_all($s);
		$model->succeed($s, 'text', '');
		done($s, 'DISCARD ALL');
	},
	8 => sub {
		return 0 if in_block($_[0]);
		$model->begin($_[0]);
		done($_[0], 'BEGIN');
	},
	2 => \&commit,
	2 => \&rollback,
	12 => sub {
		my ($s) = @_;
		my $number = 1 + $model->{sessions}{$s}{savepoints};

		return 0 unless in_block($s);
		$model->savepoint($s);
		done($s, "SAVEPOINT s$number");
	},
	8 => \&rollback_to,
	8 => sub {
		my $number = any_savepoint($_[0]) or return 0;

		$model->release_savepoint($_[0], $number);
		done($_[0], "RELEASE s$number");
	},
	1 => sub {
		my ($s) = @_;

		$model->statement($s, sub { $model->fail($s, '22012') });
		done($s, 'SELECT 1/0');
	},
	2 => sub {
		my ($s) = @_;
		my $name = one_of(sort keys %slots);

		$model->statement(
			$s,
			sub {
				$model->succeed($s, 'text',
					$model->holds($s, $name) ? 't' : 'f');
			});
		done($s, "SELECT dlock_is_held('$name')");
	},
	1 => sub { end_session($_[0]) });

# Steps of a session whose transaction has failed
my @failed_steps = (2 => \&rollback_to, 1 => \&commit, 1 => \&rollback);

# Steps that others take against a waiting session
my @waiting_steps = (
	10 => sub {
		my ($s) = @_;

		push @program, "$step: cancel $s";
		$admin->query("SELECT pg_cancel_backend($sessions{$s}{pid})");
		$model->cancel($s);
		return 1;
	},
	1 => sub { end_session($_[0]) });

sub end_session
{
	my ($s) = @_;
	my $how = one_of('vanish', 'terminate', 'quit');

	# A waiting session would not notice the loss of its client.  The server
	# must not wake waiters to check for that, because this could hide that a
	# grant did not wake one.
	$how = 'terminate' if $asked{$s};
	push @program, "$step: $how $s";
	$admin->query("SELECT pg_terminate_backend($sessions{$s}{pid})")
	  if $how eq 'terminate';
	$how eq 'quit' ? $sessions{$s}->quit : $sessions{$s}->vanish;
	$model->end_session($s);
	$asked{$s} = 0;
	$sessions{$s} = session($node);
	delete $had{$s};
	return 1;
}

sub force
{
	my $ticket = one_of($model->tickets) or return 0;

	push @program, "$step: force $ticket->{name} from $ticket->{session}";
	$admin->query("SELECT dlock_force_release($ticket->{number})");
	$model->force($ticket);
	return 1;
}

#
# Steps whose parts can take effect in any order
#

# A holder's release races with the cancel of a waiter.  The waiter's answer
# tells which came first.
sub race
{
	my $waiter = one_of(
		grep { $_->{state} eq 'waiting' } $model->tickets) or return 0;
	my $holder = one_of(
		grep {
				 $_->{name} eq $waiter->{name}
			  && $_->{session_depth} > 0
			  && !$model->waits($_->{session})
			  && !$model->{sessions}{ $_->{session} }{failed}
		} $model->tickets)
	  or return 0;
	my $s = $waiter->{session};
	my $cancel = "SELECT pg_cancel_backend($sessions{$s}{pid})";
	my $cancel_first = percent(50);
	my ($answer, $late);

	push @program, "$step: cancel $s at the same time";
	$killer->is_next;
	$killer->start($cancel) if $cancel_first;
	send_sql($holder->{session}, "SELECT dlock_release('$holder->{name}')");
	$killer->start($cancel) unless $cancel_first;
	$killer->answer;

	poll("$s to answer", sub { $sessions{$s}->answered });
	# without the error that the timeout of quiet() can raise
	$answer = $sessions{$s}{out} =~ s/\A.*^quiet\n//msr;
	if ($answer =~ /ERROR:  57014/)
	{
		# A cancel that arrives after the last check for interrupts finds all
		# requested locks held, as with advisory locks.
		$late = $waiter->{scope} eq 'session'
		  && $killer->query('SELECT count(*) FROM dlock_locks '
			  . "WHERE ticket = $waiter->{number} AND granted");
		$model->cancel($s) unless $late;
	}
	$model->release($holder->{session}, $holder->{name});
	$model->cancel($s) if $late;
	return 1;
}

# Several sessions release at once.
sub release_together
{
	my @idle = grep { !$model->waits($_) } @names;

	return 0 unless @idle > 1;
	foreach my $s (@idle[ 0 .. $#idle - 1 ])
	{
		send_sql($s, 'SELECT dlock_release_all()');
	}
	end_session($idle[-1]);
	$model->release_all($_) foreach @idle[ 0 .. $#idle - 1 ];
	return 1;
}

#
# The program
#
sub weighted
{
	my @steps = @_;
	my $total = 0;
	my $which;

	$total += $steps[ 2 * $_ ] foreach 0 .. $#steps / 2;
	$which = random($total);
	while (($which -= $steps[0]) >= 0)
	{
		splice @steps, 0, 2;
	}
	return $steps[1];
}

sub random_step
{
	my $s = one_of(@names);

	return force() if percent(1);
	if ($step > 0.8 * $steps)
	{
		return race() if percent(10);
		return release_together() if percent(1);
	}
	return percent(20) && weighted(@waiting_steps)->($s) if $model->waits($s);
	return weighted(@failed_steps)->($s)
	  if $model->{sessions}{$s}{failed} && percent(75);
	return weighted(@idle_steps)->($s);
}

my ($waited, $busiest) = (0, 0);
while (++$step <= $steps)
{
	eval { 1 until random_step(); 1 } or disagree("step failed: $@");
	agree();
	my $waiting = grep { $model->waits($_) } @names;
	$waited++ if $waiting;
	$busiest = $waiting if $waiting > $busiest;
}

pass("server and model agree in $steps steps");
note "somebody waited in $waited of them, at most $busiest at a time";
my @in_order = @numbers{ sort { $a <=> $b } keys %numbers };
grows('numbers of tickets grow', @in_order);

$_->vanish foreach values %sessions;
ok($admin->wait_for('SELECT count(*) = 0 FROM dlock_locks'),
	'nothing is left');
$admin->quit;
$killer->quit;
done_testing();
