
=pod

=head1 NAME

Dlock::Java - Java, for TAP tests of clients

=head1 DESCRIPTION

=over

=item find_java(@jars)

The command that runs Java with these jars of the system, given without .jar,
if there is also a compiler of version 17 or later; otherwise nothing.

=item add_client(\@java, $directory)

Compiles the client, with warnings as errors, into a jar that the command uses
from now on.

=item add_classes(\@java, @files)

Compiles them, so that the command finds them.

=back

=cut

package Dlock::Java;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Utils;

our @EXPORT = qw(find_java add_client add_classes);

# For a run of some seconds, with little memory
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

sub add_client
{
	my ($java, $directory) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir();

	compile($java, "$dir/classes", glob("$directory/src/org/dlock/*.java"));
	system_or_bail('jar', 'cf', "$dir/dlock-client.jar", '-C', "$dir/classes", '.');
	$java->[-1] .= ":$dir/dlock-client.jar";
	return;
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
