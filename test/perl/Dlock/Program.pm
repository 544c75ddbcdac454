
=pod

=head1 NAME

Dlock::Program - programs that contain tests

=head1 DESCRIPTION

A program that contains tests prints "ok NAME" or "not ok NAME" for each test,
and reasons on other lines.

=over

=item run_program($title, @command)

Runs the program, and counts its tests.  Each test is named by the title and
the program's name for it.

=item works(@command)

Can this command be run without an error?

=item not_installed($what)

Prints a line, and skips the rest of a block labeled SKIP.

=back

=cut

package Dlock::Program;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(run_program works not_installed);

sub run_program
{
	my ($title, @command) = @_;
	my ($out, $err) = run_command(\@command);
	my $status = $?;

	foreach my $line (split /\n/, $out)
	{
		if ($line =~ /^(not )?ok (.*)/)
		{
			ok(!$1, "$title: $2");
		}
		else
		{
			diag($line);
		}
	}
	is($status, 0, "$title: exit status") or diag($err);
	return;
}

sub works
{
	my $command = [@_];

	return eval { run_command($command); $? == 0 };
}

# A skipped test is invisible if all tests pass.
sub not_installed
{
	my ($what) = @_;

	diag("skipped: $what is not installed");
	skip("$what is not installed", 1);
	return;
}

1;
