# The JavaScript client over an application's own connections, and in the
# transactions of its libraries: see clients/node/tests/own.js.  This test
# gives it a server, and counts each of its tests.  It also compiles
# clients/node/tests/types.ts, which uses each type, correctly and incorrectly.
#
# What would break it: a connection that returns to a pool too early, with
# locks or settings left on it, or after an unclear failure; a library with
# other statements or results; types that a module resolution does not find, or
# that accept every option.
#
# For DLOCK_JAVASCRIPT see Dlock::JavaScript.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::JavaScript;
use Dlock::Program;
use Dlock::Test;
use File::Copy qw(copy);
use PostgreSQL::Test::Utils;
use Test::More;

my $installed = $ENV{DLOCK_JAVASCRIPT};

plan skip_all => 'npm, or a package that npm should install, is missing'
  unless $installed;

my $node = new_server('main', conf => "deadlock_timeout = '10ms'\n");
my $tests = "$FindBin::RealBin/../../clients/node/tests";
my $dir = PostgreSQL::Test::Utils::tempdir;

install_javascript($dir);
copy("$tests/own.js", "$dir/own.mjs") or die $!;
copy("$tests/types.ts", "$dir/types.mts") or die $!;
copy("$tests/types.ts", "$dir/types.ts") or die $!;

$node->safe_psql('postgres', 'CREATE ROLE app LOGIN');
$ENV{ADMIN} = $node->safe_psql('postgres', 'SELECT current_user');
name_server($node, 'app');
$ENV{PG_TEST_TIMEOUT_DEFAULT} = $PostgreSQL::Test::Utils::timeout_default;
run_program('JavaScript', 'node', "$dir/own.mjs");

foreach ([ 'es2022', 'node10', 'types.ts' ],
	[ 'es2022', 'bundler', 'types.ts' ],
	[ 'node16', 'node16', 'types.mts' ],
	[ 'nodenext', 'nodenext', 'types.mts' ])
{
	my ($module, $resolution, $file) = @$_;
	my ($out) = run_command(
		[
			'node', "$installed/node_modules/typescript/bin/tsc",
			'--noEmit', '--strict', '--exactOptionalPropertyTypes',
			'--noUncheckedIndexedAccess', '--esModuleInterop',
			'--target', 'es2022', '--lib', 'es2022,esnext.disposable',
			'--typeRoots', "$dir/node_modules/\@types", '--types', 'node',
			'--module', $module, '--moduleResolution', $resolution,
			( $resolution eq 'nodenext' ? () : '--skipLibCheck'),
			"$dir/$file"
		]);

	is($out, '', "types with the module resolution $resolution");
}
$node->stop;
done_testing();
