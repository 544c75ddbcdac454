# The Java client, built with nothing but the JDK, passes the table of scenarios,
# clients/scenarios.md.
#
# What would break it: see there.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Java;
use Dlock::Scenarios;
use Test::More;

my @java = find_java('postgresql');

plan skip_all => 'no JDK from 17 on with the JDBC driver is installed'
  unless @java;

my $client = "$FindBin::RealBin/../../clients/java";

add_client(\@java, $client);
add_classes(\@java, "$client/tests/Run.java");
run_scenarios('java', @java, 'Run');
done_testing();
