
=pod

=head1 NAME

Dlock::Likeness - compares a page with the output of a run

=head1 DESCRIPTION

Tickets and process ids differ from run to run.  But equal numbers on the page
must be equal in the run, and a greater number must be greater in the run.  So
each page needs an object of this class, which remembers the run's number for
each number on the page.

=head1 METHODS

=over

=item $like->is_like($shown, $real)

Does this line of the page match this line of the run?

=item $like->add_pid($pid)

Declares a session's process id, for all lines.

=item $like->to_real($text)

Replaces the page's numbers in a statement by the run's numbers.

=back

=cut

package Dlock::Likeness;

use strict;
use warnings FATAL => 'all';

my $token = qr/
	\d{4}-\d\d-\d\d\ \d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d(?::\d\d)?|\ [A-Z]+)? |
	\d\d:\d\d:\d\d(?:\.\d+)? |
	\b\d+\.\d+\ m?s\b |
	dlock_[0-9a-f]{32} |
	\d+
/x;

sub new
{
	my ($class) = @_;

	return bless { real => {}, shown => {}, tickets => [], pids => {} }, $class;
}

sub add_pid
{
	my ($self, $pid) = @_;

	$self->{pids}{$pid} = 1;
	return;
}

# Ignore the layout
sub normal
{
	my ($line) = @_;

	$line =~ s/-{3,}/---/g;
	$line =~ s/\s+/ /g;
	$line =~ s/^ | $//g;
	return $line;
}

# bind($kind, $shown, $real): can $shown stand for $real?
sub bind_pair
{
	my ($self, $kind, $shown, $real) = @_;
	my $known = $self->{real}{"$kind $shown"};

	return $known eq $real if defined $known;
	return 0 if exists $self->{shown}{"$kind $real"};
	if ($kind eq 'ticket')
	{
		foreach my $pair (@{ $self->{tickets} })
		{
			return 0
			  if ($shown <=> $pair->[0]) != ($real <=> $pair->[1]);
		}
		push @{ $self->{tickets} }, [ $shown, $real ];
	}
	$self->{real}{"$kind $shown"} = $real;
	$self->{shown}{"$kind $real"} = $shown;
	return 1;
}

sub is_like
{
	my ($self, $shown, $real) = @_;
	my @shown = split /($token)/, normal($shown);
	my @real = split /($token)/, normal($real);

	return 0 if @shown != @real;
	for my $i (0 .. $#real)
	{
		my ($s, $r) = ($shown[$i], $real[$i]);

		if ($i % 2 == 0)
		{
			return 0 if $s ne $r;
		}
		elsif ($r =~ /^\d{12,}$/)
		{
			return 0 unless $s =~ /^\d{12,}$/;
			return 0 unless $self->bind_pair('ticket', $s, $r);
		}
		elsif ($r =~ /^\d+$/
			&& $real[ $i - 1 ] =~ /\breceived from server process with PID $/)
		{
			# a worker or a sender can be another process each time
			return 0 unless $s =~ /^\d+$/;
		}
		elsif ($r =~ /^\d+$/
			&& ($self->{pids}{$r}
				|| $real[ $i - 1 ] =~ /\b[Pp]rocess(?:es)? $/))
		{
			return 0 unless $s =~ /^\d+$/;
			return 0 unless $self->bind_pair('pid', $s, $r);
		}
		elsif ($r =~ /^dlock_/)
		{
			return 0 unless $s =~ /^dlock_/;
			return 0 unless $self->bind_pair('channel', $s, $r);
		}
		elsif ($r =~ /^\d{4}-/)
		{
			return 0 unless $s =~ /^\d{4}-\d\d-\d\d \d\d:/;
		}
		elsif ($r =~ /( m?s)$/)
		{
			return 0 unless $s =~ /\.\d+$1$/;
		}
		elsif ($r =~ /:.*\./)
		{
			return 0 unless $s =~ /:.*\./;
		}
		else
		{
			return 0 if $s ne $r;
		}
	}
	return 1;
}

# Returns the page's text with the run's numbers.
sub to_real
{
	my ($self, $text) = @_;

	$text =~ s{\b(\d{4,})\b}
		{$self->{real}{"ticket $1"} // $self->{real}{"pid $1"} // $1}ge;
	return $text;
}

1;
