# A library can be compiled with the headers of one minor release of PostgreSQL,
# and run on another.  It sees correctly whether synchronous standbys are named.
#
# What would break it: a field of PostgreSQL's shared memory whose meaning has
# changed in a minor release, and that is read as the headers say, not as the
# running server writes it.

use strict;
use warnings FATAL => 'all';

use Config;
use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');
my $admin = session($node);
my ($headers) = run_command([ 'pg_config', '--includedir-server' ]);
my $field = slurp_file("$headers/replication/walsender_private.h");
my $source = <<'END';
#include "postgres.h"
#include "fmgr.h"
#include "compat.h"

PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(standbys_are_named);

Datum
standbys_are_named(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(compat_sync_standbys_defined());
}
END

# function_with($name, $directory): a function that is compiled with headers of
# this directory, if any, and otherwise with those of the server
sub function_with
{
	my ($name, @directories) = @_;
	local $ENV{CC} = join ' ', $ENV{CC} || $Config{cc},
	  map { "-I$_" } @directories, "$FindBin::RealBin/../../src", $headers;
	my $library = compile_library($name, $source) or die "cannot compile $name";

	$admin->query("CREATE FUNCTION $name() RETURNS boolean LANGUAGE c "
		  . "AS '$library', 'standbys_are_named'");
	return "$name()";
}

plan skip_all => 'there is no compiler' unless compile_library('empty', '');
my @functions = function_with('with_these_headers');

# Before 15.13, 16.9 and 17.5, the flags were a boolean.
die 'the field has another name' unless $field =~ /\bsync_standbys_(status|defined);/;
if ($field =~ s/\b\w+(\s+)sync_standbys_status;/bool$1sync_standbys_defined;/)
{
	my $old = PostgreSQL::Test::Utils::tempdir();

	$field =~ s/^#define SYNC_STANDBY_\w+.*//mg;
	mkdir "$old/replication" or die $!;
	append_to_file("$old/replication/walsender_private.h", $field);
	push @functions, function_with('with_old_headers', $old);
}

foreach my $names ('', '*', '')
{
	$admin->query("ALTER SYSTEM SET synchronous_standby_names = '$names'");
	$admin->query('SELECT pg_reload_conf()');
	# the checkpointer tells all others
	foreach my $function (@functions)
	{
		$admin->wait_for("SELECT $function = " . ($names ? 'true' : 'false'));
		pass("'$names': $function");
	}
}

$admin->quit;
$node->stop;
done_testing();
