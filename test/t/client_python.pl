# The Python client, built as a wheel and installed, passes the table of
# scenarios, clients/scenarios.md.
#
# What would break it: see there; and a package that lacks a file.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Python;
use Dlock::Scenarios;
use Test::More;

my $python = find_python('import sys, setuptools, wheel, pip, psycopg; '
	  . 'assert sys.version_info >= (3, 11)');

plan skip_all =>
  'python3 from 3.11 on with psycopg 3, pip, setuptools and wheel '
  . 'is not installed'
  unless $python;

my $client = "$FindBin::RealBin/../../clients/python";

install_packages($python, $client);
run_scenarios('python', $python, "$client/tests/run.py");
done_testing();
