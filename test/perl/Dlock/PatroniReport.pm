
=pod

=head1 NAME

Dlock::PatroniReport - reports the time without service, and which locks were
kept

=head1 DESCRIPTION

This class starts test/ha/clients.py, and records the times of faults.

=head1 METHODS

=over

=item Dlock::PatroniReport->new($dir, $asynchronous, $path => $connstr, ...)

Clients use these connection strings in turn.  If $asynchronous is true, leases
held on two servers at once are reported but do not count as failures.

=item $report->round_begins($name, $beside), fault_begins, fault_ends($is_another), round_ends

=item $report->loaded($leases, $missing, $seconds), lost($tickets)

Record these events for the report.

=item $report->event($what, $time)

Adds an event to the round's time line, with the given or the present time.
The time line is in clients/round_NUMBER, for docs/pictures/draw.

=item $report->last_round

Returns the report of the last round.

=item $report->finish($patroni)

Ends the clients, and returns the number of failures.

=item $report->lines

=back

=cut

package Dlock::PatroniReport;

use strict;
use warnings FATAL => 'all';

use Cwd qw(abs_path);
use Dlock::History qw(now);
use Dlock::Test;
use File::Basename qw(dirname);
use List::Util qw(max min sum);
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;

my $ha = abs_path(dirname(__FILE__) . '/../../ha');
my @scopes = ('insert', 'session', 'transaction', 'ticket', 'lease', 'renew');
my $ttl = 20;    # of holders, as in clients.py

sub new
{
	my ($class, $dir, $asynchronous, @paths) = @_;
	my %connstr = @paths;
	my $self = bless {
		dir => "$dir/clients",
		asynchronous => $asynchronous,
		paths => [ grep { exists $connstr{$_} } @paths ],
		rounds => [],
		loads => []
	}, $class;

	mkdir $self->{dir} or die "mkdir: $!";
	my $pid = fork() // die "fork: $!";

	if ($pid == 0)
	{
		$ENV{PYTHONPATH} = 'clients/python';
		open STDOUT, '>', "$self->{dir}/log" or die "open: $!";
		open STDERR, '>&', \*STDOUT or die "open: $!";
		exec('/usr/bin/python3', "$ha/clients.py", $self->{dir},
			map { "$_=$connstr{$_}" } @{ $self->{paths} })
		  or POSIX::_exit(127);
	}
	$self->{pid} = $pid;
	poll('clients have begun',
		sub { !grep { !-s "$self->{dir}/$_.calls" } $self->_kinds });
	return $self;
}

# Returns the scope and path of a client's calls.
sub _kinds
{
	my ($self) = @_;

	return map { my $path = $_; map { "$_.$path" } @scopes } @{ $self->{paths} };
}

sub round_begins
{
	my ($self, $name, $beside) = @_;

	push @{ $self->{rounds} },
	  { name => $name, beside => $beside, another => 0, tickets => 0,
		missing => 0, kept => 0, lost => [], events => [] };
	return;
}

sub fault_begins { $_[0]{rounds}[-1]{begin} = now(); return; }

sub fault_ends
{
	my ($self, $another) = @_;

	@{ $self->{rounds}[-1] }{ 'another', 'found' } = ($another ? 1 : 0, now());
	return;
}

sub lost
{
	my ($self, $tickets) = @_;

	$self->{rounds}[-1]{tickets} += $tickets if @{ $self->{rounds} };
	return;
}

sub loaded
{
	my ($self, $leases, $missing, $seconds) = @_;

	push @{ $self->{loads} }, $seconds;
	$self->{leases} = $leases;
	$self->{rounds}[-1]{missing} += $missing if @{ $self->{rounds} };
	return;
}

sub round_ends
{
	my ($self) = @_;
	my $round = $self->{rounds}[-1];

	$round->{end} = now();
	$round->{without} =
	  { map { $_ => $self->_without($_, $round) } $self->_kinds };
	$self->_write_times($round);
	return;
}

sub event
{
	my ($self, $what, $time) = @_;

	push @{ $self->{rounds}[-1]{events} }, [ $time // now(), $what ];
	return;
}

# From 3 seconds before the fault until the end of the round: events, times of
# uninterrupted calls by kind, and the holders by their leases
sub _write_times
{
	my ($self, $round) = @_;
	my $zero = $round->{begin};
	my ($from, $to) = ($zero - 3, min($round->{end}, now()));
	my @lines = ("# $round->{name}");
	my $add = sub {
		my ($what, $row, @times) = @_;

		push @lines, join("\t", $what, $row,
			map { sprintf('%.2f', max($from, min($to, $_)) - $zero) } @times);
	};

	$add->('event', $_->[1], $_->[0])
	  foreach sort { $a->[0] <=> $b->[0] } @{ $round->{events} };
	foreach my $kind ($self->_kinds)
	{
		my ($since, $last);

		foreach my $line (split /\n/, slurp_file("$self->{dir}/$kind.calls"))
		{
			my ($begin, $end, $error) = split /\t/, $line, -1;

			next if !defined $error || $error ne '' || $end < $from;
			last if $begin > $to;
			$add->('served', $kind, $since, $last)
			  if defined $last && $end - $last > 0.3;
			$since = $end if !defined $last || $end - $last > 0.3;
			$last = $end;
		}
		$add->('served', $kind, $since, $last) if defined $last;
	}
	my %since;
	foreach my $line (
		grep { $_->{time} <= $to && $_->{what} ne 'error' } $self->_read_holders)
	{
		my $row = "holder $line->{number} of $line->{lock}";
		my $then = delete $since{$row};

		$add->('held', $row, $then, $line->{time})
		  if $then && $line->{time} > $from;
		$since{$row} = $line->{time} if $line->{what} eq 'holds';
	}
	$add->('held', $_, $since{$_}, $to) foreach sort keys %since;
	append_to_file("$self->{dir}/round_" . @{ $self->{rounds} },
		join("\n", @lines) . "\n");
	return;
}

# Returns the longest time between two successful calls of this kind, if the
# second call is in this round.
sub _without
{
	my ($self, $kind, $round) = @_;
	my ($last, $longest) = ($round->{begin}, 0);

	foreach my $line (split /\n/, slurp_file("$self->{dir}/$kind.calls"))
	{
		my ($begin, $end, $error) = split /\t/, $line, -1;

		next if !defined $error || $error ne '' || $end < $round->{begin};
		last if $begin > $round->{end};
		$longest = max($longest, $end - $last);
		$last = $end;
	}
	return max($longest, min($round->{end}, now()) - $last);
}

sub last_round
{
	my ($self) = @_;
	my $round = $self->{rounds}[-1];

	return ($round->{another} ? 'another primary' : 'the same primary')
	  . join('', map {
		my $path = $_;
		"; by $path without " . join(', ',
			map { sprintf('%s %.1f s', $_, $round->{without}{"$_.$path"}) } @scopes)
	  } @{ $self->{paths} });
}

sub _percentile
{
	my ($percent, @values) = @_;

	@values = sort { $a <=> $b } @values;
	return $values[ POSIX::ceil($percent / 100 * @values) - 1 ];
}

# Returns the holders' lines about their locks.
sub _read_holders
{
	my ($self) = @_;
	my @lines;

	foreach my $line (split /\n/, eval { slurp_file("$self->{dir}/holders") } // '')
	{
		my ($time, $number, $lock, $what, $detail) = split /\t/, $line, -1;

		push @lines,
		  { time => $time, number => $number, lock => $lock, what => $what,
			detail => $detail };
	}
	return sort { $a->{time} <=> $b->{time} } @lines;
}

# Returns an event's round.  A loss is noticed up to a ttl later.
sub _round_of
{
	my ($self, $time) = @_;
	my ($round) = grep {
		$_->{begin} <= $time && $time <= $_->{end} + $ttl + 5
	} reverse @{ $self->{rounds} };

	return $round;
}

# Returns a round's holders at its begin, and those that kept their locks.
sub _count_kept
{
	my ($self, @holders) = @_;

	foreach my $round (@{ $self->{rounds} })
	{
		my %held;

		foreach my $line (grep { $_->{time} <= $round->{begin} } @holders)
		{
			$held{ $line->{number} } = $line->{what} eq 'holds';
		}
		delete $held{ $_->{number} } foreach @{ $round->{lost} };
		$round->{kept} = grep { $_ } values %held;
	}
	return;
}

# Returns the reason why a lease was lost, or undef if the loss was avoidable.
# The service may be interrupted before or after a round, too.
sub _reason
{
	my ($self, $round, $line) = @_;
	my %before = (begin => $line->{time} - $ttl, end => $line->{time});
	my $longest = max(values %{ $round->{without} },
		map { $self->_without($_, \%before) } $self->_kinds);
	my $path = $self->{paths}[ $line->{number} % @{ $self->{paths} } ];

	# a lease can expire: its ttl, less the renewal interval and a margin
	return sprintf('no service for %.1f s', $longest) if $longest > 0.6 * $ttl;
	# the old primary still accepted writes, and is first among the hosts
	return 'its client came back to the old primary'
	  if $round->{beside} && $path eq 'hosts';
	return 'it, or its last change, was not on the new primary'
	  if $self->{asynchronous} && $round->{another};
	return undef;
}

sub finish
{
	my ($self) = @_;
	my $wrong = 0;

	kill('TERM', $self->{pid});
	poll('clients have ended',
		sub { waitpid($self->{pid}, POSIX::WNOHANG) != 0 });
	my @holders = $self->_read_holders;

	foreach my $line (@holders)
	{
		my $round = $self->_round_of($line->{time});

		$self->{what}{ $line->{what} }++;
		if ($line->{what} eq 'refused')
		{
			diag "holder $line->{number} of $line->{lock}, in its time: "
			  . $line->{detail};
			$wrong++;
		}
		elsif ($line->{what} eq 'lost')
		{
			my $reason = $self->_reason($round // { without => {} }, $line);

			push @{ $round->{lost} },
			  { %$line, reason => $reason // 'for no good reason' }
			  if $round;
			next if defined $reason;
			diag "holder $line->{number} has lost $line->{lock}: "
			  . $line->{detail};
			$wrong++;
		}
	}
	$self->_count_kept(@holders);
	return $self->{asynchronous} ? 0 : $wrong;
}

# Reports the rounds with each fault, and all rounds.
sub _by_fault
{
	my ($self) = @_;
	my @rounds = @{ $self->{rounds} };
	my %names = map { $_->{name} => 1 } @rounds;

	return ((map {
			my $name = $_;
			[ $name, grep { $_->{name} eq $name } @rounds ]
		} sort keys %names), [ 'all', @rounds ]);
}

sub _lines_without
{
	my ($self, $path) = @_;
	my $row = '%-28s %3s' . ' %11s' x @scopes;
	my @lines = ("by $path:", sprintf($row, '', '', @scopes));

	foreach my $fault ($self->_by_fault)
	{
		my ($name, @rounds) = @$fault;

		push @lines, sprintf($row, $name, scalar @rounds,
			map {
				my $kind = "$_.$path";
				my @values = map { $_->{without}{$kind} } @rounds;

				sprintf('%.1f %4.1f', _percentile(50, @values),
					_percentile(99, @values))
			} @scopes);
	}
	return @lines;
}

sub _lines_of_leases
{
	my ($self) = @_;
	my $row = '%-28s %9s %5s %5s %8s %8s';
	my @lines = (
		sprintf($row, '', 'failovers', 'kept', 'lost', 'unwatched', 'tickets'));

	foreach my $fault ($self->_by_fault)
	{
		my ($name, @rounds) = @$fault;
		my %reasons;

		$reasons{ $_->{reason} }++ foreach map { @{ $_->{lost} } } @rounds;
		push @lines, sprintf($row, $name,
			map({
				my $key = $_;
				sum(0, map { ref $_->{$key} ? scalar @{ $_->{$key} } : $_->{$key} }
					@rounds)
			} 'another', 'kept', 'lost', 'missing', 'tickets'))
		  . ($name eq 'all' ? '' :
			join(',', map { "  $reasons{$_}: $_" } sort keys %reasons));
	}
	return @lines;
}

# Reports successful and failed calls of all kinds.
sub _operations
{
	my ($self) = @_;

	return map {
		my $kind = $_;
		my ($good, $bad) = (0, 0);

		foreach my $line (split /\n/, slurp_file("$self->{dir}/$kind.calls"))
		{
			$line =~ /\t$/ ? $good++ : $bad++;
		}
		"$kind $good ($bad)";
	} $self->_kinds;
}

sub lines
{
	my ($self) = @_;
	my @rounds = @{ $self->{rounds} };

	return (
		sprintf('%d rounds, %d failovers', scalar @rounds,
			sum(0, map { $_->{another} } @rounds)),
		'calls that succeeded (and failed): ' . join(', ', $self->_operations),
		'seconds without service, the median and the 99th percentile,',
		map({ $self->_lines_without($_) } @{ $self->{paths} }),
		"leases with a ttl of $ttl s that were held and renewed, kept and lost;"
		  . ' leases that nobody',
		'renews ("unwatched") and tickets that clients were told of, lost:',
		$self->_lines_of_leases,
		'what happened to holders: '
		  . join(', ', map { "$_ $self->{what}{$_}" } sort keys %{ $self->{what} }),
		sprintf('%d leases that nobody renews: counted after %.2f s '
			  . '(median), %.2f s (at most)',
			$self->{leases}, _percentile(50, @{ $self->{loads} }),
			max(@{ $self->{loads} })));
}

1;
