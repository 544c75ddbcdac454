# The Python client, built as a wheel and installed, passes
# clients/scenarios.md.
#
# What would break it: see that page's table; a package that lacks a file;
# wrong types, which mypy finds if it is installed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Python;
use Dlock::Scenarios;
use PostgreSQL::Test::Utils;
use Test::More;

my $python = find_python('import sys, setuptools, wheel, pip, psycopg; '
	  . 'assert sys.version_info >= (3, 11)');

plan skip_all =>
  'python3 from 3.11 on with psycopg 3, pip, setuptools and wheel '
  . 'is not installed'
  unless $python;

my $client = "$FindBin::RealBin/../../clients/python";

SKIP:
{
	my @mypy = ($python, '-m', 'mypy', '--strict', '--cache-dir=/dev/null');

	run_command([ @mypy, '--version' ]);
	skip('mypy is not installed', 1) if $?;
	local $ENV{MYPYPATH} = $client;
	my ($out) =
	  run_command([ @mypy, "$client/dlock", "$client/tests/typed.py" ]);
	is($?, 0, 'mypy accepts the types, and reports each mistake') or diag($out);
}

install_packages($python, $client);
my $info = slurp_file(glob("$ENV{PYTHONPATH}/dlock_client-*.dist-info/RECORD"));
like($info, qr/^dlock_client\S+\/LICENSE,/m, 'the wheel has its license');
like($info, qr/^dlock\/py\.typed,/m, 'the wheel says that it has types');
run_scenarios('python', $python, "$client/tests/run.py");
done_testing();
