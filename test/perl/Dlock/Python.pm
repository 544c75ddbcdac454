
=pod

=head1 NAME

Dlock::Python - Python, for TAP tests of clients

=head1 DESCRIPTION

=over

=item find_python($condition)

Returns a Python in which this statement raises no error, or undef.

=item install_packages($python, @directories)

Builds a wheel of each directory, in a copy, and installs it so that Python
finds it first.  Nothing is downloaded.

=back

=cut

package Dlock::Python;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::RecursiveCopy;
use PostgreSQL::Test::Utils;

our @EXPORT = qw(find_python install_packages);

# The first Python in the path may not have the packages.
sub find_python
{
	my ($condition) = @_;
	my ($python) = grep {
		my $command = [ $_, '-c', $condition ];
		eval { run_command($command); $? == 0 }
	} 'python3', '/usr/bin/python3';

	return $python;
}

sub install_packages
{
	my ($python, @directories) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir();
	my @pip = ($python, '-m', 'pip', '--quiet', '--no-input', '--isolated',
		'--disable-pip-version-check', '--no-cache-dir');

	foreach my $n (0 .. $#directories)
	{
		PostgreSQL::Test::RecursiveCopy::copypath($directories[$n],
			"$dir/source_$n");
		system_or_bail(@pip, 'wheel', '--no-index', '--no-deps',
			'--no-build-isolation', '-w', "$dir/wheels", "$dir/source_$n");
	}
	system_or_bail(@pip, 'install', '--no-index', '--no-deps', '--target',
		"$dir/site", glob("$dir/wheels/*.whl"));
	$ENV{PYTHONPATH} = "$dir/site";
	return;
}

1;
