# The JavaScript client, packed by npm and installed, passes
# clients/scenarios.md.
#
# What would break it: see that page's table; a package that lacks a file.
#
# For DLOCK_JAVASCRIPT see Dlock::JavaScript.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Scenarios;
use File::Copy qw(copy);
use PostgreSQL::Test::Utils;
use Test::More;

my $installed = $ENV{DLOCK_JAVASCRIPT};

plan skip_all => 'npm, or a package that npm should install, is missing'
  unless $installed;

my $client = "$FindBin::RealBin/../../clients/node";
my $dir = PostgreSQL::Test::Utils::tempdir;
my @npm = ('npm', '--loglevel=error', "--cache=$dir/cache", '--offline');

# installs only the packed files, without a network
system_or_bail(@npm, 'pack', '--silent', "--pack-destination=$dir", $client);
my ($package) = glob("$dir/*.tgz");

system_or_bail(@npm, 'install', "--prefix=$dir/site", '--legacy-peer-deps',
	'--no-audit', '--no-fund', '--no-save', '--no-package-lock', $package);
ok(-s "$dir/site/node_modules/dlock-client/$_", "the package has $_")
  foreach ('LICENSE', 'README.md', 'lib/index.d.ts');
symlink "$installed/node_modules/pg", "$dir/site/node_modules/pg" or die $!;
copy("$client/tests/run.js", "$dir/site/run.mjs") or die $!;
run_scenarios('node', 'node', "$dir/site/run.mjs");
done_testing();
