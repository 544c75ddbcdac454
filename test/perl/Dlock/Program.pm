
=pod

=head1 NAME

Dlock::Program - programs that test something themselves

=head1 DESCRIPTION

Such a program prints a line for each of its tests, "ok NAME" or "not ok NAME",
and reasons in other lines.

=over

=item run_program($title, @command)

Runs it, and counts its tests, whose names follow the title.

=item works(@command)

Does a command run, or a program that it is given?

=item not_installed($what)

Skips the rest of a block that is labeled SKIP, with a line.

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

# A skipped test is not seen if all tests pass.
sub not_installed
{
	my ($what) = @_;

	diag("skipped: $what is not installed");
	skip("$what is not installed", 1);
	return;
}

1;
