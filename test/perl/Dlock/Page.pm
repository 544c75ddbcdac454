
=pod

=head1 NAME

Dlock::Page - runs a page of the documentation in steps

=head1 DESCRIPTION

test/pages.md says how pages are written.

=head1 FUNCTIONS

=over

=item parse_page($page)

Returns the steps of a page, whose path is relative to the tree.  A step is a
hash: "do" is its kind, "line" its line, and "output" the expected output, in
the page's lines from "from" up to, but not including, "to".  Dies if the page
is malformed.

=item write_page($page, $file, $like, @steps)

Writes the page into another file, with the real output of each step ("real").
The Dlock::Likeness object $like translates the typed text.

=item lines_of($page)

=back

=cut

package Dlock::Page;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use File::Basename qw(dirname);
use PostgreSQL::Test::Utils;

our @EXPORT = qw(parse_page write_page lines_of);

my $top = dirname(dirname(dirname(dirname(__FILE__))));

my $name = qr/[a-z][a-z0-9_]*/;
my $prompt = qr/^($name)=[*!]?[>#] ?(.*)$/;
my $inside = qr/[-('"\$*^]/;

# the kind of the next block
my $directive = qr/^(?|(run[ ]as)[ ]($name) | (run[ ]with[ ]bash)() |
	(file)[ ](\S+) | (config)() | (server[ ]log)() | (not[ ]run:)[ ](\S.*))$/x;

sub lines_of
{
	my ($page) = @_;
	my $text = slurp_file("$top/$page");

	return split /\n/, $text, -1;
}

sub parse_page
{
	my ($page) = @_;
	my @lines = lines_of($page);
	my @steps;
	my $mark;

	for (my $i = 0; $i < @lines; $i++)
	{
		if ($lines[$i] =~ /^\s*<!-- docs: (.*)$/)
		{
			my ($text, $line) = ($1, $i + 1);

			while ($text !~ /-->/)
			{
				die "$page:$line: a comment without end\n" if ++$i > $#lines;
				$text .= " $lines[$i]";
			}
			$text =~ s/\s*-->.*//;
			if ($text =~ $directive)
			{
				$mark = { do => $1, what => $2, line => $line };
			}
			else
			{
				push @steps, event($page, $line, $text);
			}
		}
		elsif ($lines[$i] =~ /^(\s*)(```+)[^`]*$/)
		{
			my ($indent, $fence) = ($1, $2);
			my $from = ++$i;

			$i++ while $i <= $#lines && $lines[$i] !~ /^\s*$fence\s*$/;
			die "$page:$from: a block without end\n" if $i > $#lines;
			push @steps,
			  parse_block($page, $mark, $from,
				map { s/^$indent//r } @lines[ $from .. $i - 1 ]);
			undef $mark;
		}
		elsif ($mark && $lines[$i] =~ /\S/)
		{
			die "$page:$mark->{line}: \"$mark->{do}\" needs a block behind it\n";
		}
	}
	return @steps;
}

# parse_block($page, $mark, $from, @lines): $from is the first line's index.
sub parse_block
{
	my ($page, $mark, $from, @lines) = @_;
	my $text = join '', map { "$_\n" } @lines;
	my %at = (line => $from + 1);

	if ($mark)
	{
		return if $mark->{do} eq 'not run:';
		return { %$mark, %at, text => $text, output => [@lines] };
	}
	return parse_transcript($page, $from, @lines) if grep { /$prompt/ } @lines;
	return parse_shell($from, @lines) if grep { /^\$ / } @lines;
	die "$page:$from: a block that is not run, and no reason why\n";
}

# Each prompt begins a step, and each event is a step.
sub parse_transcript
{
	my ($page, $from, @lines) = @_;
	my @steps;

	for my $i (0 .. $#lines)
	{
		my $line = $lines[$i];
		my $last = $steps[-1];
		my $at = $from + $i;

		if ($line =~ $prompt)
		{
			push @steps,
			  {
				do => 'statement', session => $1, text => $2,
				line => $at + 1, output => [], from => $at + 1, to => $at + 1
			  };
		}
		elsif ($last && $last->{do} eq 'statement' && !@{ $last->{output} }
			&& $line =~ /^\Q$last->{session}\E(?:$inside)[*!]?[>#] ?(.*)$/)
		{
			$last->{text} .= "\n$1";
			$last->{from} = $last->{to} = $at + 1;
		}
		elsif ($line =~ /^-- (.*)$/)
		{
			push @steps,
			  { %{ event($page, $at + 1, $1) }, from => $at + 1, to => $at + 1 };
		}
		elsif ($last)
		{
			push @{ $last->{output} }, $line;
			$last->{to} = $at + 1;
		}
		elsif ($line =~ /\S/)
		{
			die "$page:$at: a transcript begins with a prompt\n";
		}
	}
	foreach my $step (grep { $_->{do} eq 'statement' } @steps)
	{
		$step->{waits} = $step->{text} =~ s/\s+-- waits$//;
		$step->{text} =~ s/(;|\\g\w*(?: \S+)?)\s+-- .*$/$1/;
	}
	return @steps;
}

sub parse_shell
{
	my ($from, @lines) = @_;
	my @steps;

	for my $i (0 .. $#lines)
	{
		my $at = $from + $i;

		if ($lines[$i] =~ /^\$ (.*)$/)
		{
			push @steps,
			  {
				do => 'shell', text => $1, line => $at + 1, output => [],
				from => $at + 1, to => $at + 1
			  };
		}
		elsif (@steps && !@{ $steps[-1]{output} }
			&& $steps[-1]{text} =~ /\\$/)
		{
			$steps[-1]{text} .= "\n$lines[$i]";
			$steps[-1]{from} = $steps[-1]{to} = $at + 1;
		}
		elsif (@steps)
		{
			push @{ $steps[-1]{output} }, $lines[$i];
			$steps[-1]{to} = $at + 1;
		}
	}
	return @steps;
}

# event($page, $line, $text): returns the step for a directive or a line of a
# transcript.
sub event
{
	my ($page, $line, $text) = @_;
	my %at = (line => $line, output => []);

	return { %at, do => 'start', bare => 1 } if $text eq 'start from scratch';
	return { %at, do => 'start', roles => [ split ' ', $1 ] }
	  if $text =~ /^start((?: $name)+)$/;
	return { %at, do => 'session', session => $1, role => $2 }
	  if $text =~ /^session ($name) role ($name)$/;
	return { %at, do => 'file', what => $1, text => "$2\n" }
	  if $text =~ /^program (\S+): (.*)$/;
	return { %at, do => 'until', query => $1 }
	  if $text =~ /^until (.*?);?$/;
	return { %at, do => 'wait over', session => $1 }
	  if $text =~ /^($name)'s wait is over:?$/;
	return { %at, do => 'notified', session => $1 }
	  if $text =~ /^($name) is notified:?$/;
	return { %at, do => 'end', session => $1 }
	  if $text =~ /^($name)'s session ends$/;
	return { %at, do => 'stop', session => $1 }
	  if $text =~ /^($name) is stopped$/;
	return { %at, do => 'go on', session => $1 }
	  if $text =~ /^($name) goes on$/;
	return { %at, do => 'crash' }
	  if $text eq 'the server crashes and is started again';
	return { %at, do => 'restart' } if $text eq 'the server is restarted';
	return { %at, do => 'nothing' } if $text =~ /^\(.*\)$/;
	die "$page:$line: no such event: $text\n";
}

sub write_page
{
	my ($page, $file, $like, @steps) = @_;
	my @lines = lines_of($page);

	foreach my $step (reverse grep { $_->{real} && defined $_->{from} } @steps)
	{
		my @old = @lines[ $step->{from} .. $step->{to} - 1 ];
		my @blank;

		while (@old && $old[-1] !~ /\S/) { unshift @blank, pop @old; }
		# a blank line separates a result from the next prompt
		@blank = ('')
		  if !@blank
		  && @{ $step->{real} } > 1
		  && $lines[ $step->{to} ] !~ /^\s*```/;
		splice @lines, $step->{from}, $step->{to} - $step->{from},
		  @{ $step->{real} }, @blank;
	}
	open my $out, '>', $file or die "$file: $!\n";
	# The typed text must match the output.
	print $out join "\n", map {
		/$prompt/ || /^\s*<!-- docs: until/ ? $like->to_real($_) : $_
	} @lines;
	close $out;
	return;
}

1;
