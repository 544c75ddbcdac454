# Read and apply the tables of mutants.  "run" calls this.
#
#   mutants.pl list            prints a line for each mutant: name, key, tests,
#                              the reason why it may survive, and what it
#                              breaks, separated by tabs
#   mutants.pl apply NAME DIR  changes the one place under DIR/src or DIR/sql
#                              that the mutant fits, and prints the file
#
# A table is a file ROOM.mutants beside this script.  Each of its mutants is
# called ROOM/NAME, and has these lines:
#
#	= NAME
#	breaks: The promise, in a sentence.
#	tests: the tests to try first, in this order
#	survives: why no test can fail (optional)
#	in: src/worker/*.c (optional: the files to search)
#	 a line that stays
#	-a line that is removed
#	+a line that is added
#
# The lines that stay or are removed must be in exactly one place, one after
# another, with any white space and comments between them.  A line "..."
# separates the places of a mutant.  Mutants have no line numbers, so changes
# around them do not matter.
#
# The key changes with the lines.  A result is valid while the key is the same.
# The exit status of apply is 3 if the mutant fits no place, or more than one.

use strict;
use warnings FATAL => 'all';

use Digest::MD5 qw(md5_hex);
use File::Basename qw(basename dirname);
use File::Find qw(find);

my @mutants;
my %by_name;

sub fail
{
	printf STDERR "mutants.pl: %s\n", $_[0];
	exit($_[1] // 1);
}

sub read_table
{
	my ($file) = @_;
	my $room = basename($file, '.mutants');
	my $mutant;

	open my $in, '<', $file or fail("$file: $!");
	while (my $line = <$in>)
	{
		chomp $line;
		if ($line =~ /^= ([a-z0-9-]+)$/)
		{
			$mutant = { name => "$room/$1", places => [ [] ] };
			fail("$file:$.: $1 is there twice") if $by_name{ $mutant->{name} };
			$by_name{ $mutant->{name} } = $mutant;
			push @mutants, $mutant;
		}
		elsif ($line =~ /^(?:#|$)/)
		{
			next;
		}
		elsif (!$mutant)
		{
			fail("$file:$.: of which mutant?");
		}
		elsif ($line =~ /^(breaks|tests|survives|in): (.+)$/)
		{
			fail("$file:$.: $1 is there twice") if $mutant->{$1};
			$mutant->{$1} = $2;
		}
		elsif ($line eq '...')
		{
			push @{ $mutant->{places} }, [];
		}
		elsif ($line =~ /^([ +-])(.*)$/)
		{
			push @{ $mutant->{places}[-1] }, [ $1, $2 ];
		}
		else
		{
			fail("$file:$.: cannot read \"$line\"");
		}
	}
	close $in;
	return;
}

# A pattern of the lines before the change, with any white space and comments
# between their tokens
sub pattern
{
	my $comment = qr{/\*(?:[^*]|\*(?!/))*\*/};
	my $text = join "\n", map { $_->[0] eq '+' ? () : $_->[1] } @_;
	my @tokens = ($text =~ s/$comment/ /gr) =~ /(\w+|[^\w\s])/g;

	fail('a mutant that fits everywhere') unless @tokens;
	return join "(?:\\s|$comment)*+",
	  map { /^\w/ ? "\\b$_\\b" : quotemeta } @tokens;
}

sub files
{
	my ($dir, $in) = @_;
	my @files;

	return grep { -f } glob "$dir/$in" if $in;
	find(sub { push @files, $File::Find::name if /\.(?:c|h|sql)$/ },
		"$dir/src", "$dir/sql");
	return sort @files;
}

sub slurp
{
	my ($file) = @_;

	open my $in, '<', $file or fail("$file: $!");
	local $/ = undef;
	return scalar <$in>;
}

sub apply
{
	my ($mutant, $dir) = @_;
	my %changed;

	foreach my $place (@{ $mutant->{places} })
	{
		my $pattern = pattern(@$place);
		my $new = join "\n", map { $_->[0] eq '-' ? () : $_->[1] } @$place;
		my @found;

		foreach my $file (files($dir, $mutant->{in}))
		{
			my $text = $changed{$file} // slurp($file);

			push @found, [ $file, $text, $-[0], $+[0] ]
			  while $text =~ /$pattern/g;
		}
		fail(@found ? 'fits ' . @found . ' places' : 'fits nothing', 3)
		  if @found != 1;
		my ($file, $text, $start, $end) = @{ $found[0] };
		substr($text, $start, $end - $start) = $new;
		$changed{$file} = $text;
	}
	foreach my $file (sort keys %changed)
	{
		open my $out, '>', $file or fail("$file: $!");
		print $out $changed{$file};
		close $out or fail("$file: $!");
		print "$file\n";
	}
	return;
}

read_table($_) foreach sort glob dirname($0) . '/*.mutants';
foreach my $mutant (@mutants)
{
	foreach my $field ('breaks', 'tests')
	{
		fail("$mutant->{name}: no \"$field\"") unless $mutant->{$field};
	}
	foreach my $place (@{ $mutant->{places} })
	{
		fail("$mutant->{name} changes nothing")
		  unless grep { $_->[0] ne ' ' } @$place;
	}
}

my ($command, $name, $dir) = @ARGV;

if (($command // '') eq 'list')
{
	foreach my $mutant (@mutants)
	{
		my $key = md5_hex(join "\n",
			map { map { @$_ } @$_, [ '.', '' ] } @{ $mutant->{places} });

		printf "%s\n", join "\t", $mutant->{name}, substr($key, 0, 8),
		  $mutant->{tests}, $mutant->{survives} // '-', $mutant->{breaks};
	}
}
elsif (($command // '') eq 'apply' && $dir && $by_name{$name})
{
	apply($by_name{$name}, $dir);
}
else
{
	fail('usage: mutants.pl list | apply NAME DIR', 2);
}
