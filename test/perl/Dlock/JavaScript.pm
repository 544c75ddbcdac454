
=pod

=head1 NAME

Dlock::JavaScript - Node.js, for tests of clients

=head1 DESCRIPTION

The environment variable DLOCK_JAVASCRIPT names the directory in which npm has
installed the packages of test/clients/javascript/package.json.  The variable
is not set if Node.js or npm is missing.

=over

=item install_javascript($dir)

Lets programs in this directory import these packages and clients/node.

=back

=cut

package Dlock::JavaScript;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use File::Basename qw(basename);
use File::Copy qw(copy);
use PostgreSQL::Test::RecursiveCopy;

our @EXPORT = qw(install_javascript);

sub install_javascript
{
	my ($dir) = @_;
	my $client =
	  $INC{'Dlock/JavaScript.pm'} =~ s{[^/]*/[^/]*$}{}r . '../../clients/node';
	my $packages = "$dir/node_modules";

	mkdir $packages or die "$packages: $!";
	foreach my $package (glob("$ENV{DLOCK_JAVASCRIPT}/node_modules/*"))
	{
		symlink $package, "$packages/" . basename($package) or die $!;
	}
	mkdir "$packages/dlock-client" or die $!;
	copy("$client/package.json", "$packages/dlock-client") or die $!;
	PostgreSQL::Test::RecursiveCopy::copypath("$client/lib",
		"$packages/dlock-client/lib");
	return;
}

1;
