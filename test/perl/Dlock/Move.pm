
=pod

=head1 NAME

Dlock::Move - clients that change from one server to another

=head1 DESCRIPTION

Each client connects repeatedly to the server in its service file, and acquires
locks of one kind.  The client records the time when it surely held each lock:
from the answer until it begins to release the lock, or until the begin of its
last answered call.  The time of a lease ends at the client's own deadline, or
when the client was told that the lease is lost.  While a client holds a lock,
it makes guarded writes into a row that compares fences.

	hold     lock  fence  from  until  client
	done     lock  fence
	version  number  from  until
	gone     what
	odd      what

Two recorded times of a lock must not overlap, and fences must not decrease,
whatever the server answers.

A Dlock::Load starts the clients, with an object of this class as its history.

=head1 METHODS

=over

=item Dlock::Move->new($node)

Creates the service file, which names this node's database "shop".

=item $move->go_to($node)

Changes the node in the service file.

=item $move->lines($what)

Returns a reference to the fields of each of the clients' lines so far.

=item $move->check

Reports the problems and returns them.

=back

=cut

package Dlock::Move;

use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Utils;

our @kinds = ('session', 'transaction', 'lease', 'ticket', 'version');

# ttl of leases, in seconds
our $ttl = 3;

sub new
{
	my ($class, $node) = @_;
	my $self = bless {
		dir => PostgreSQL::Test::Utils::tempdir(),
		round => 1,
		problems => []
	}, $class;

	$ENV{PGSERVICEFILE} = "$self->{dir}/pg_service.conf";
	$self->{psql} = $node->installed_command('psql');
	$self->go_to($node);
	return $self;
}

sub go_to
{
	my ($self, $node) = @_;
	my $new = "$ENV{PGSERVICEFILE}.new";

	append_to_file($new,
		sprintf "[shop]\nhost=%s\nport=%s\ndbname=shop\nuser=app\n",
		$node->host, $node->port);
	rename $new, $ENV{PGSERVICEFILE} or die "rename: $!";
	return;
}

# session() uses these methods, as of a PostgreSQL::Test::Cluster.
sub connstr { return 'service=shop'; }
sub installed_command { return $_[0]{psql}; }

# A Dlock::Load uses these methods, as of a Dlock::History.
sub client
{
	my ($self, $load, $number) = @_;

	return Dlock::MoveClient->new($self, $load, $number);
}

sub note_end { return; }

sub problem
{
	my ($self, $what) = @_;

	push @{ $self->{problems} }, $what;
	return;
}

sub lines
{
	my ($self, $what) = @_;

	return grep { $_->[0] eq $what }
	  map { [ split /\t/ ] } map { split /\n/, slurp_file($_) }
	  glob("$self->{dir}/client.*");
}

sub check
{
	my ($self) = @_;
	my %last;

	$self->problem($_->[1]) foreach $self->lines('odd');
	foreach my $hold (sort { $a->[3] <=> $b->[3] } $self->lines('hold'))
	{
		my (undef, $lock, $fence, $from, $until) = @$hold;
		my $last = $last{$lock};

		next if $from >= $until;
		$self->problem(sprintf '%s: %s was held until %f, and %s from %f on',
			$lock, @{$last}[ 2, 4 ], $fence, $from)
		  if $last && $last->[4] > $from;
		$self->problem("$lock: $fence came after $last->[2]")
		  if $last && ($last->[2] > $fence ||
			$last->[2] == $fence && $last->[5] != $hold->[5]);
		$last{$lock} = $hold if !$last || $last->[4] < $until;
	}
	$self->_check_versions;
	return @{ $self->{problems} };
}

# A bump that began after the answer to another bump has a greater version.
sub _check_versions
{
	my ($self) = @_;
	my @bumps = sort { $a->[2] <=> $b->[2] } $self->lines('version');
	my @answers = sort { $a->[3] <=> $b->[3] } @bumps;
	my ($greatest, %seen) = (0);

	foreach my $bump (@bumps)
	{
		my (undef, $version, $from) = @$bump;

		while (@answers && $answers[0][3] < $from)
		{
			my $before = (shift @answers)->[1];

			$greatest = $before if $before > $greatest;
		}
		$self->problem("version $version came after $greatest")
		  if $version <= $greatest || $seen{$version}++;
	}
	return;
}

package Dlock::MoveClient;

use Dlock::Test ();
use Time::HiRes qw(clock_gettime usleep CLOCK_MONOTONIC);

sub now { return clock_gettime(CLOCK_MONOTONIC); }

sub new
{
	my ($class, $move, $load, $number) = @_;
	my $self = bless {
		move => $move,
		number => $number,
		kind => $kinds[ $number % @kinds ],
		pipe => $load->{writer},
		stop => $load->{stop},
		parent => getppid()
	}, $class;

	open $self->{file}, '>>', "$move->{dir}/client.$number" or die "open: $!";
	$self->{file}->autoflush(1);
	return $self;
}

sub note_down
{
	my ($self, @fields) = @_;

	print { $self->{file} } join("\t", @fields), "\n" or die "print: $!";
	return;
}

sub is_over
{
	my ($self) = @_;

	return -e $self->{stop} || getppid() != $self->{parent};
}

sub run
{
	my ($self) = @_;
	my $step = $self->can("step_$self->{kind}");

	until ($self->is_over)
	{
		$self->connect or next;
		while (!$self->is_over && $self->$step)
		{
			syswrite($self->{pipe}, chr $self->{number});
			usleep(5_000);
		}
		$self->{session}->vanish;
	}
	return;
}

sub connect
{
	my ($self) = @_;

	if (eval { $self->{session} = Dlock::Test::session($self->{move}); 1 })
	{
		$self->{session}->may_end;
		return 1;
	}
	usleep(20_000);
	return 0;
}

# Returns the answer, or undef if the session has ended.
sub ask
{
	my ($self, $sql) = @_;
	# psql ends with the session
	my $answer = '' . $self->{session}->query("$sql;\n\\echo answered\n");

	return $answer =~ s/\n?answered\z// ? $answer : undef;
}

# Returns the number that the call returns, or undef.
sub ask_for_number
{
	my ($self, $sql) = @_;
	my $answer = $self->ask($sql) // return;

	return $answer if $answer =~ /^\d+\z/;
	$self->odd("$sql: $answer");
	return;
}

# Makes a guarded write into a row that compares fences.  Returns false if the
# write was refused.
sub write
{
	my ($self, $fence) = @_;
	my $lock = $self->{kind};
	my $answer = $self->ask("BEGIN; DO \$\$BEGIN "
		  . "PERFORM dlock_guard('$lock', $fence); "
		  . "UPDATE resource SET fence = $fence WHERE name = '$lock'; "
		  . "INSERT INTO done (name, fence) VALUES ('$lock', $fence); "
		  . "END\$\$; COMMIT");

	$self->note_down('done', $lock, $fence) if ($answer // 'none') eq '';
	return $answer;
}

sub hold
{
	my ($self, $fence, $from, $until) = @_;

	$self->note_down('hold', $self->{kind}, $fence, $from, $until,
		$self->{number});
	return;
}

sub odd
{
	my ($self, $what) = @_;

	$self->note_down('odd', $what =~ s/\s+/ /gr);
	return;
}

# Writes while the client holds its lock, releases the lock, and records the
# time of the hold.  Returns true if the session still exists.
sub use_lock
{
	my ($self, $fence, $end) = @_;
	my $from = now();
	my $until = $from;
	my $alive = 1;

	foreach my $statement (undef, undef, $end)
	{
		my $begin = now();
		my $answer = $statement ? $self->ask($statement) : $self->write($fence);

		$alive = defined $answer;
		last unless $alive;
		$self->odd("$self->{kind} $fence: $answer") if $answer =~ /ERROR/;
		$until = $begin;
	}
	$self->hold($fence, $from, $until);
	return $alive;
}

sub step_session
{
	my ($self) = @_;
	my $fence = $self->ask_for_number("SELECT dlock_acquire('session')") // return 0;

	return $self->use_lock($fence, "SELECT dlock_release('session')");
}

sub step_transaction
{
	my ($self) = @_;
	my $fence = $self->ask_for_number("BEGIN; SELECT dlock_xact_acquire('transaction')")
	  // return 0;
	my $from = now();
	my $begin = now();
	my $end = $self->ask("DO \$\$BEGIN "
		  . "PERFORM dlock_guard('transaction', $fence); "
		  . "UPDATE resource SET fence = $fence WHERE name = 'transaction'; "
		  . "INSERT INTO done (name, fence) VALUES ('transaction', $fence); "
		  . 'END$$');

	if (defined $end)
	{
		$self->odd("transaction $fence: $end") if $end ne '';
		$begin = now();
		$end = $self->ask('COMMIT');
		$self->note_down('done', 'transaction', $fence)
		  if defined $end && $end eq '';
	}
	$self->hold($fence, $from, $begin);
	return defined $end;
}

# Uses a lease over any connection, until the lease's deadline.
sub step_lease
{
	my ($self) = @_;
	my $owner = "client $self->{number}";
	my $asked = now();
	my $fence = $self->ask_for_number(
		"SELECT dlock_ttl_acquire('lease', '$ttl s', owner => '$owner')")
	  // return 0;
	my $from = now();
	my $deadline = $asked + $ttl;
	my $until;

	# The request may have waited, so only a renewal makes the deadline known.
	for (my $i = 0; !defined $until; $i++)
	{
		my $begin = now();
		my $answer;

		if ($i >= 4 || $self->is_over)
		{
			$until = $begin < $deadline ? $begin : $deadline;
			$self->ask("SELECT dlock_release_ticket($fence)");
			last;
		}
		$answer = $self->ask("SELECT coalesce(dlock_renew($fence), 0)");
		if (!defined $answer)
		{
			$self->{session}->vanish;
			until ($self->connect || now() > $deadline || $self->is_over) { }
		}
		elsif ($answer eq '0')
		{
			my $told = now();

			$until = $told < $deadline ? $told : $deadline;
			$self->note_down('gone', 'lease');
		}
		elsif ($answer !~ /^\d+$/)
		{
			$self->odd("renewal of $fence: $answer");
			$until = $from;
		}
		else
		{
			$from = now() if $begin > $deadline;
			$deadline = $begin + $ttl;
			$self->write($fence);
		}
		$until //= $deadline if now() > $deadline;
	}
	$self->hold($fence, $from, $until);
	return 1;
}

sub step_ticket
{
	my ($self) = @_;
	my $ticket = $self->{ticket} //=
	  $self->ask_for_number("SELECT dlock_enqueue('ticket', 'nobody')") // return 0;
	my $answer;

	do
	{
		$answer = $self->ask("SELECT dlock_wait($ticket, '1 s')") // return 0;
	} while ($answer eq 'f');
	delete $self->{ticket};
	if ($answer =~ /ERROR:  55L01/)
	{
		$self->note_down('gone', 'ticket');
		return 1;
	}
	return $self->use_lock($ticket, "SELECT dlock_release_ticket($ticket)");
}

# If there was no answer, the version may have been bumped.
sub step_version
{
	my ($self) = @_;
	my $version = $self->ask_for_number("SELECT dlock_version_of('plan')") // return 0;
	my $begin = now();
	my $answer = $self->ask("SELECT dlock_version_bump('plan', $version)")
	  // return 0;

	$self->note_down('version', $answer, $begin, now()) if $answer =~ /^\d+$/;
	$self->odd("version: $answer") if $answer !~ /^\d+$|ERROR:  40001/;
	return 1;
}

1;
