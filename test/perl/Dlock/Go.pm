
=pod

=head1 NAME

Dlock::Go - Go, for tests of the Go client

=head1 DESCRIPTION

=over

=item find_go($dir)

Returns the Go command, and the major version of pgx that Go finds, or nothing
if Go or pgx is not installed.  Go finds packages in $dir/src, too.  Nothing is
downloaded.  DLOCK_GO names another Go command.  Go searches DLOCK_GOPATH for
pgx before Debian's packages.

=item install_go($dir, $version, $name, $text)

Creates a file below $dir/src/dlock.org/dlock, for this version of pgx.

=item install_go_client($dir, $version, @directories)

Installs the client, with the files in these directories

=back

=cut

package Dlock::Go;

use strict;
use warnings FATAL => 'all';

use Dlock::Program;
use Exporter 'import';
use File::Basename qw(dirname);
use File::Path qw(make_path);
use PostgreSQL::Test::Utils;

our @EXPORT = qw(find_go install_go install_go_client);

sub find_go
{
	my ($dir) = @_;

	# use Debian's packages, without a network; DLOCK_GOPATH comes before them
	$ENV{GO111MODULE} = 'off';
	$ENV{GOPATH} = join ':', $dir, grep { $_ } $ENV{DLOCK_GOPATH},
	  '/usr/share/gocode';
	$ENV{GOCACHE} //= "$dir/cache";
	$ENV{GOFLAGS} = '';

	my ($go) = grep { works($_, 'version') } $ENV{DLOCK_GO} // (),
	  'go', glob('/usr/lib/go-*/bin/go');
	return unless $go;
	my ($version) =
	  grep { works($go, 'list', "github.com/jackc/pgx/v$_") } 5, 4;
	return $version ? ($go, $version) : ();
}

sub install_go
{
	my ($dir, $version, $name, $text) = @_;
	my $file = "$dir/src/dlock.org/dlock/$name";

	if ($version == 4)
	{
		$text =~ s{jackc/pgx/v5/pgconn"}{jackc/pgconn"};
		$text =~ s{jackc/pgx/v5}{jackc/pgx/v4}g;
		$text =~ s{pgxpool\.NewWithConfig}{pgxpool.ConnectConfig}g;
	}
	make_path(dirname($file));
	append_to_file($file, $text);
	return;
}

sub install_go_client
{
	my ($dir, $version, @directories) = @_;
	my $client =
	  $INC{'Dlock/Go.pm'} =~ s{[^/]*/[^/]*$}{}r . '../../clients/go';

	install_go($dir, $version, $_ =~ s{^\Q$client/}{}r, slurp_file($_))
	  foreach map { glob("$client/$_*.go") } '', map { "$_/" } @directories;
	return;
}

1;
