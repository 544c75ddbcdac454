
=pod

=head1 NAME

Dlock::Power - servers that lose power, for TAP tests

=head1 DESCRIPTION

After a kill, a restarted server finds everything that it has written, because
the kernel keeps it.  A server started by with_power() can also lose its
unsynced writes.  The preloaded test/torture/power.c records these writes.

=over

=item power_is_ours()

Returns false if there is no C compiler, or the system is not Linux.

=item with_power($node, $sub)

Calls the sub, which starts the server.  From then on, the server can lose
power.

=item lose_power($node, $all)

Undoes unsynced writes.  All processes of the server must have ended.  If $all
is true, all unsynced writes are lost.  Otherwise, a random part is lost: each
page of 4,096 bytes has the content after a random number of its writes since
the sync, and each directory after a random number of its changes.  Returns the
number of unsynced writes and names.

=item forget_power($node)

Forgets the writes of a removed server.

=back

=cut

package Dlock::Power;

use strict;
use warnings FATAL => 'all';

use Cwd qw(realpath);
use Dlock::Test;
use Exporter 'import';
use File::Basename qw(dirname);
use File::Path qw(make_path rmtree);
use PostgreSQL::Test::Utils ();

our @EXPORT = qw(power_is_ours with_power lose_power forget_power);

my $page = 4096;
my $library;

sub power_is_ours
{
	my $source = dirname(__FILE__) . '/../../torture/power.c';

	$library //= compile_library('power',
		PostgreSQL::Test::Utils::slurp_file($source));
	return defined $library;
}

sub with_power
{
	my ($node, $sub) = @_;
	# the path as the kernel shows it
	my $data = realpath($node->data_dir);
	local $ENV{LD_PRELOAD} = preloaded($library);
	local $ENV{DLOCK_POWER} = $data;

	make_path("$data.power");
	return $sub->();
}

sub forget_power
{
	my ($node) = @_;

	rmtree($node->data_dir . '.power');
	return;
}

sub lose_power
{
	my ($node, $all) = @_;
	my $data = realpath($node->data_dir);
	my $lost = 0;

	$lost += lose_writes($_, $all) foreach grep { -s } glob "$data.power/f.*[0-9]";
	$lost += lose_names($data, $all);
	rmtree("$data.power");
	return $lost;
}

# Undo the writes to a file, by its records.
sub lose_writes
{
	my ($notes, $all) = @_;
	my $bytes = PostgreSQL::Test::Utils::slurp_file($notes);
	my (@sizes, %pages);
	my $at = 0;

	# the kill may have cut the last record short
	while ($at + 32 <= length $bytes)
	{
		my ($offset, $length, $size, $saved) = unpack 'q4', substr $bytes, $at, 32;
		last if $at + 32 + $saved > length $bytes;
		my $before = substr $bytes, $at + 32, $saved;

		push @sizes, $size;
		$at += 32 + $saved;
		if ($length < 0)
		{
			# if a file shrank, no file system keeps a part of its earlier
			# content
			$all ||= $saved > 0;
			$length = $saved;
		}
		for (my $from = $offset; $from < $offset + $length;)
		{
			my $next = ($from - $from % $page) + $page;
			my $end = $next < $offset + $length ? $next : $offset + $length;
			my $skip = $from - $offset;
			my $text = $skip < $saved ? substr $before, $skip, $end - $from : '';

			$text .= "\0" x ($end - $from - length $text);
			push @{ $pages{ $from - $from % $page } }, [ $from, $text ];
			$from = $end;
		}
	}
	return 0 unless @sizes;

	# the size before one of the changes, or the present size
	open my $file, '+<:raw', "$notes.data" or die "$notes.data: $!";
	my $size = ($all ? @sizes : (@sizes, -s $file))
	  [ $all ? 0 : rand(@sizes + 1) ];
	my $kept = $all ? 0 : (0, 0.5, 1)[ rand 3 ];
	foreach my $writes (map { $pages{$_} } sort { $a <=> $b } keys %pages)
	{
		my $keep = rand() < $kept ? int(rand(@$writes + 1)) : 0;

		foreach my $write (reverse @$writes[ $keep .. $#$writes ])
		{
			sysseek $file, $write->[0], 0 or die "seek: $!";
			syswrite($file, $write->[1]) == length $write->[1] or die "write: $!";
		}
	}
	truncate $file, $size or die "truncate: $!";
	close $file or die "close: $!";
	return scalar @sizes;
}

# Undo the changes of names.
sub lose_names
{
	my ($data, $all) = @_;
	my %changes;    # directory => changes since it was synced
	my $lost = 0;

	return 0 unless -e "$data.power/names";
	foreach my $line (split /\n/,
		PostgreSQL::Test::Utils::slurp_file("$data.power/names"))
	{
		my ($what, $path, $to, $saved) = split /\t/, $line, -1;
		my $dir = dirname($what eq 'rename' ? $to : $path);

		if ($what eq 'directory')
		{
			delete $changes{$path};
		}
		elsif ($what eq 'file')
		{
			@{ $changes{$dir} } =
			  grep { $_->[0] ne 'create' || $_->[1] ne $path }
			  @{ $changes{$dir} // [] };
		}
		else
		{
			push @{ $changes{$dir} }, [ $what, $path, $to, $saved ];
		}
	}
	foreach my $dir (sort keys %changes)
	{
		my @those = @{ $changes{$dir} };

		next unless -d "$data/$dir";
		splice @those, 0, rand(@those + 1) unless $all;
		undo_name($data, @$_) foreach reverse @those;
		$lost += @those;
	}
	return $lost;
}

# The kill may have come between the record and the change.
sub undo_name
{
	my ($data, $what, $path, $to, $saved) = @_;

	if ($what eq 'create')
	{
		unlink "$data/$path" or $!{ENOENT} or die "$path: $!";
		return;
	}
	if ($what eq 'rename')
	{
		return if -e "$data/$path" || !-e "$data/$to";
		rename "$data/$to", "$data/$path" or die "$to: $!";
		$path = $to;
	}
	return if !$saved || -e "$data/$path";
	link $saved, "$data/$path" or die "$path: $!";
	return;
}

1;
