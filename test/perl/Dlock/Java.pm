
=pod

=head1 NAME

Dlock::Java - Java, for TAP tests of clients

=head1 DESCRIPTION

=over

=item find_java(@jars)

Returns the command that runs Java with these jars of the system, named without
.jar.  Returns nothing if there is no compiler of version 17 or later.

=item add_jar(\@java, $directory, $name, @stubs)

Compiles the client, or one of its modules, into a jar of this name, with the
manifest and the license.  Warnings are errors.  From now on, the Java command
uses the jar.  Stubs of libraries are compiled, too, but are not in the jar.
Returns the jar's path.

=item add_classes(\@java, @files)

Compiles the files so that the command finds their classes.

=back

=cut

package Dlock::Java;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use File::Find qw(find);
use PostgreSQL::Test::Utils;

our @EXPORT = qw(find_java add_jar add_classes);

# Options for a run of some seconds with little memory
my @quickly = ('-XX:TieredStopAtLevel=1', '-XX:+UseSerialGC', '-Xmx200m');

sub find_java
{
	my @jars = map { "/usr/share/java/$_.jar" } @_;
	my ($version) = eval { run_command([ 'javac', '-version' ]) };

	return unless ($version // '') =~ /^javac (\d+)/ && $1 >= 17;
	return if grep { !-e } @jars;
	return ('java', @quickly, '-cp', join(':', @jars));
}

sub compile
{
	my ($java, $to, @files) = @_;

	system_or_bail('javac', map({ "-J$_" } @quickly),
		'-Xlint:all,-try', '-Werror', '--release', '17', '-encoding', 'UTF-8',
		'-cp', $java->[-1], '-d', $to, @files);
	return;
}

sub sources
{
	my ($directory) = @_;
	my @files;

	find({ no_chdir => 1, wanted => sub { push @files, $_ if /\.java$/ } },
		$directory);
	return sort @files;
}

sub add_jar
{
	my ($java, $directory, $name, @stubs) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir();
	my $jar = "$dir/$name.jar";
	my ($license) = grep { -e } map { "$_/LICENSE" } $directory, "$directory/..";

	add_classes($java, map { sources($_) } @stubs) if @stubs;
	compile($java, "$dir/classes", sources("$directory/src"));
	system_or_bail('mkdir', "$dir/classes/META-INF");
	system_or_bail('cp', $license, "$dir/classes/META-INF");
	system_or_bail('jar', 'cfm', $jar, "$directory/MANIFEST.MF",
		'-C', "$dir/classes", '.');
	$java->[-1] .= ":$jar";
	return $jar;
}

sub add_classes
{
	my ($java, @files) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir();

	compile($java, $dir, @files);
	$java->[-1] .= ":$dir";
	return;
}

1;
