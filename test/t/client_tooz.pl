# The driver of dlock for tooz, OpenStack's library for coordination, passes the
# tests that tooz brings for its drivers.
#
# What would break it: a lock that two coordinators hold, or two lock objects of
# one; a release of what is another one's; a member that stays when it has gone,
# or is missing; an election with two winners, or none.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Python;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $python = find_python('import sys, setuptools, wheel, pip, psycopg, '
	  . 'tooz.tests.test_coordination; assert sys.version_info >= (3, 11)');

plan skip_all => 'python3 from 3.11 on with tooz, what its tests need, '
  . 'psycopg 3, pip, setuptools and wheel is not installed'
  unless $python;

my $clients = "$FindBin::RealBin/../../clients";
my $node = new_server('main', conf => "listen_addresses = '127.0.0.1'");
my $port = $node->port;

$node->safe_psql('postgres',
	'CREATE ROLE app LOGIN; GRANT CREATE ON SCHEMA public TO app');
install_packages($python, "$clients/python", "$clients/tooz");
$ENV{TOOZ_TEST_URL} = "dlock://app\@127.0.0.1:$port/postgres";
delete @ENV{ grep { /^PG(?!_)/ } keys %ENV };

my ($out, $err) = run_command(
	[ $python, '-P', '-m', 'unittest', '-v', 'tooz.tests.test_coordination' ]);
my %result = $err =~ /^tooz\.\S+\.(test_\w+) \.\.\. (\w+)/mg;

# later versions have one only for drivers that it names
my $named = 'test_watch_join_group_disappear';
my $skipped = ($result{$named} // '') eq 'skipped' ? ' \(skipped=1\)' : '';

delete $result{$named} if $skipped;
is($result{$_}, 'ok', $_) foreach sort keys %result;
like($err, qr/^OK$skipped$/m, 'all of them, and no other is skipped')
  or diag($err);
cmp_ok(scalar(keys %result), '>', 70, 'they are all that tooz has');
done_testing();
