
=pod

=head1 NAME

Dlock::PatroniReport - how long there was no service, and what was kept

=head1 DESCRIPTION

Starts test/ha/clients.py, and notes when faults were.

=head1 METHODS

=over

=item Dlock::PatroniReport->new($dir, $connstr, $asynchronous)

Without synchronous standbys, leases of two servers side by side are told of, and
count as nothing wrong.

=item $report->round_begins($name), fault_begins, fault_ends($is_another), round_ends

=item $report->loaded($leases, $seconds), lost($tickets)

Notes for the report.

=item $report->last_round

What is to be said of it.

=item $report->finish($patroni)

Ends the clients, and returns how much was wrong.

=item $report->lines

=back

=cut

package Dlock::PatroniReport;

use strict;
use warnings FATAL => 'all';

use Dlock::History qw(now);
use Dlock::Test;
use List::Util qw(max min sum);
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;

my @scopes = ('insert', 'session', 'transaction', 'ticket', 'lease', 'renew');

sub new
{
	my ($class, $dir, $connstr, $asynchronous) = @_;
	my $self = bless {
		dir => "$dir/clients",
		asynchronous => $asynchronous,
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
		exec('/usr/bin/python3', "$FindBin::RealBin/clients.py", $self->{dir},
			$connstr)
		  or POSIX::_exit(127);
	}
	$self->{pid} = $pid;
	poll('clients have begun',
		sub { @scopes == grep { -s "$self->{dir}/$_.calls" } @scopes });
	return $self;
}

sub round_begins
{
	my ($self, $name) = @_;

	push @{ $self->{rounds} }, { name => $name, lost => 0, another => 0 };
	return;
}

sub fault_begins { $_[0]{rounds}[-1]{begin} = now(); return; }

sub fault_ends
{
	my ($self, $another) = @_;

	@{ $self->{rounds}[-1] }{ 'another', 'found' } = ($another ? 1 : 0, now());
	return;
}

sub lost { $_[0]{rounds}[-1]{lost} += $_[1]; return; }

sub loaded
{
	my ($self, $leases, $seconds) = @_;

	push @{ $self->{loads} }, $seconds;
	$self->{leases} = $leases;
	return;
}

sub round_ends
{
	my ($self) = @_;
	my $round = $self->{rounds}[-1];

	$round->{end} = now();
	$round->{without} = { map { $_ => $self->_without($_, $round) } @scopes };
	return;
}

# The longest time between two calls of that kind that have succeeded, the second
# of them in that round
sub _without
{
	my ($self, $scope, $round) = @_;
	my ($last, $longest) = ($round->{begin}, 0);

	foreach my $line (split /\n/, slurp_file("$self->{dir}/$scope.calls"))
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
	  . ', without ' . join(', ', map {
		sprintf('%s %.1f s', $_, $round->{without}{$_})
	  } @scopes);
}

sub _percentile
{
	my ($percent, @values) = @_;

	@values = sort { $a <=> $b } @values;
	return $values[ POSIX::ceil($percent / 100 * @values) - 1 ];
}

# Holders' lines, with the round that they were in
sub _holders
{
	my ($self) = @_;
	my @lines;

	foreach my $line (split /\n/, eval { slurp_file("$self->{dir}/holders") } // '')
	{
		my ($time, $number, $lock, $what, $detail) = split /\t/, $line, -1;
		my ($round) = grep {
			$_->{begin} <= $time && $time <= $_->{end} + 25
		} reverse @{ $self->{rounds} };

		push @lines,
		  { time => $time, number => $number, lock => $lock, what => $what,
			detail => $detail, round => $round };
	}
	return @lines;
}

sub finish
{
	my ($self) = @_;
	my $wrong = 0;

	kill('TERM', $self->{pid});
	poll('clients have ended',
		sub { waitpid($self->{pid}, POSIX::WNOHANG) != 0 });
	$self->{holders} = [ $self->_holders ];
	foreach my $line (@{ $self->{holders} })
	{
		my $round = $line->{round};

		if ($line->{what} eq 'refused')
		{
			diag "holder $line->{number} of $line->{lock}, in its time: "
			  . $line->{detail};
			$wrong++;
		}
		elsif ($line->{what} eq 'lost')
		{
			$round->{leases_lost}++ if $round;
			# by its ttl of 20 s, less a third and a margin
			next if $round && max(values %{ $round->{without} }) > 12;
			diag "holder $line->{number} has lost $line->{lock}: "
			  . $line->{detail};
			$wrong++;
		}
	}
	return $self->{asynchronous} ? 0 : $wrong;
}

sub lines
{
	my ($self) = @_;
	my @rounds = @{ $self->{rounds} };
	my @lines = (sprintf('%d rounds, %d failovers', scalar @rounds,
		sum(0, map { $_->{another} } @rounds)));
	my $row = '%-28s %3s' . ' %9s' x @scopes . ' %6s';

	push @lines, 'seconds without service, the median and the 99th percentile:',
	  sprintf($row, '', '', map({ substr($_, 0, 9) } @scopes), 'lost');
	foreach my $name (sort(keys %{ { map { $_->{name} => 1 } @rounds } }), 'all')
	{
		my @these = grep { $name eq 'all' || $_->{name} eq $name } @rounds;

		push @lines, sprintf($row, $name, scalar @these,
			map({
				my $scope = $_;
				my @values = map { $_->{without}{$scope} } @these;
				sprintf('%.1f %4.1f', _percentile(50, @values),
					_percentile(99, @values))
			} @scopes),
			sum(0, map { $_->{leases_lost} // 0 } @these));
	}
	my %what;
	$what{ $_->{what} }++ foreach @{ $self->{holders} };
	push @lines, 'holders with a ttl of 20 s: '
	  . join(', ', map { "$what{$_} $_" } sort keys %what);
	push @lines, sprintf('%d leases that nobody renews: counted after %.2f s '
		  . '(median), %.2f s (at most)',
		$self->{leases}, _percentile(50, @{ $self->{loads} }),
		max(@{ $self->{loads} }));
	push @lines, 'tickets that clients were told of, and are not there: '
	  . sum(0, map { $_->{lost} } @rounds);
	return @lines;
}

1;
