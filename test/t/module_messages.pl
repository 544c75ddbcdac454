# docs/troubleshooting.md has every message of dlock with its code, and no
# other message, so that a reader finds each message.
#
# What would break it: a message that is added, reworded or given another code
# only in the source; a message that the source no longer has.
#
# The page's tables have the message, in backquotes, and the code, or the level
# of a log message, in the first two columns.  "..." stands for variable parts.
# Details are in italics.  A row that begins with "PostgreSQL's" is about a
# message of the server.

use strict;
use warnings FATAL => 'all';

use FindBin;
use PostgreSQL::Test::Utils;
use Test::More;

my $top = "$FindBin::RealBin/../..";
my $literal = qr/"(?:[^"\\]|\\.)*"/;

# Codes by their names in the source
sub codes
{
	my %result;
	my ($dir, $errors) = run_command([ 'pg_config', '--includedir-server' ]);

	die $errors unless -e "$dir/utils/errcodes.h";
	foreach my $file ("$dir/utils/errcodes.h",
		glob("$top/src/*.h $top/src/*/*.h"))
	{
		my $text = slurp_file($file);
		while ($text =~ /^#define (ERRCODE_\w+)\s+MAKE_SQLSTATE\((.*?)\)/mg)
		{
			my ($name, $letters) = ($1, $2);
			$result{$name} = join('', $letters =~ /'(.)'/g);
		}
	}
	return %result;
}

# Joins adjacent string literals, as C does
sub value_of
{
	my $value = join('', map { substr($_, 1, -1) } $_[0] =~ /$literal/g);
	$value =~ s/\\(.)/$1 eq 'n' ? "\n" : $1/ge;
	return $value;
}

# The texts that a format can produce
sub pattern
{
	return join('.+?',
		map { quotemeta } split(/%[-.*0-9]*l*[a-z]/, $_[0], -1));
}

# Returns all messages, with their code or level if that is constant, and all
# literals, because some of them are details.
sub read_sources
{
	my %codes = codes();
	my (@messages, @literals);

	foreach my $file (glob("$top/src/*.[ch] $top/src/*/*.[ch]"))
	{
		my $text = slurp_file($file);
		$text =~ s{/\*.*?\*/}{}gs;
		push @literals, map { value_of($_) } $text =~ /($literal(?:\s*$literal)*)/g;
		while ($text =~ /\b(ereport|elog)\(\s*([^,"]+),\s*(.*?)\);/gs)
		{
			my ($macro, $level, $body) = ($1, $2, $3);
			my ($name) = $body =~ /\berrcode\((ERRCODE_\w+)\)/;
			my ($format) =
			  $macro eq 'elog'
			  ? $body =~ /^($literal(?:\s*$literal)*)/
			  : $body =~ /\berrmsg(?:_internal)?\(\s*($literal(?:\s*$literal)*)/;

			next if $level =~ /^DEBUG/;
			die "$file: $body" unless defined $format;
			die "$file: $name" if $name && !$codes{$name};
			push @messages,
			  {
				text => value_of($format),
				code => $macro eq 'elog' ? 'XX000'
				: $name ? $codes{$name}
				: $body =~ /\berrcode\(/ ? undef
				: $level
			  };
		}
	}
	return (\@messages, \@literals);
}

# Returns the first two columns of the page's tables of messages.
sub read_page
{
	my $is_table;
	my @rows;

	foreach my $line (split(/\n/, slurp_file("$top/docs/troubleshooting.md")))
	{
		my ($first, $second) = $line =~ /^\| (.*?) \| (.*?) \|/;
		if (!defined $first)
		{
			$is_table = 0 if $line !~ /^\|/;
		}
		elsif ($first eq 'Message')
		{
			$is_table = 1;
		}
		elsif ($is_table && $first !~ /^-+$/)
		{
			my ($details) = $first =~ /<br>(.*)/;
			push @rows,
			  {
				first => $first,
				code => $second,
				is_ours => $first !~ /^PostgreSQL's /,
				messages => [ $first =~ /`(.*?)`/g ],
				details => [ ($details // '') =~ /\*(.*?)\*/g ]
			  };
		}
	}
	return @rows;
}

my ($messages, $literals) = read_sources();
my @rows = grep { $_->{is_ours} } read_page();

cmp_ok(scalar @$messages, '>', 80, 'messages were found in the sources');
cmp_ok(scalar @rows, '>', 60, 'messages were found in the page');

# Each message of the source is on the page.
{
	my (@missing, @others);

	foreach my $message (@$messages)
	{
		my $pattern = pattern($message->{text});
		my @found =
		  grep { grep { /^$pattern$/ } @{ $_->{messages} } } @rows;

		push @missing, $message->{text} unless @found;
		push @others, "$message->{code}: $message->{text}"
		  if @found
		  && defined $message->{code}
		  && !grep { $_->{code} =~ /\b\Q$message->{code}\E\b/ } @found;
	}
	is(join("\n", @missing), '', 'each message of the sources is on the page');
	is(join("\n", @others), '', 'each message has its code on the page');
}

# Each message on the page is in the source.
{
	my @patterns = map { pattern($_->{text}) } @$messages;
	my @formats = map { pattern($_) } grep { length > 10 } @$literals;
	my (@no_messages, @no_details);

	foreach my $row (@rows)
	{
		foreach my $message (@{ $row->{messages} })
		{
			push @no_messages, $message
			  unless grep { $message =~ /^$_$/ } @patterns;
		}
		foreach my $detail (@{ $row->{details} })
		{
			push @no_details, $detail
			  unless grep { $detail =~ /^$_$/ } @formats;
		}
	}
	is(join("\n", @no_messages),
		'', 'each message of the page is in the sources');
	is(join("\n", @no_details), '', 'each detail of the page is in the sources');
}

done_testing();
