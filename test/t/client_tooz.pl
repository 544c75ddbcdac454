# dlock's driver for tooz, OpenStack's library for coordination, passes tooz's
# tests of drivers.
#
# What would break it: a lock that is held by two coordinators, or by two lock
# objects of one coordinator; a release of another coordinator's lock; a member
# that is listed after it has left, or is missing; an election with two
# winners, or with none.  Tooz does not test two more faults: the server is
# down at the release, the holder or leader forgets the lock, and the heartbeat
# keeps it; a coordinator that stops while it changes a group stops the other
# calls of a coordinator that waits for its turn.

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
delete @ENV{ grep { /^PG(?!_)/ } keys %ENV };

# Runs the tests of tooz.  Returns a hash from name to result, and the output.
sub test
{
	my ($url) = @_;
	local $ENV{TOOZ_TEST_URL} = $url;
	my ($out, $err) = run_command(
		[ $python, '-P', '-W', 'ignore', '-m', 'unittest', '-v',
			'tooz.tests.test_coordination' ]);

	return ({ $err =~ /^tooz\.\S+\.(test_\w+) \.\.\. (\w+)/mg }, $err);
}

my ($result, $said) = test("dlock://app\@127.0.0.1:$port/postgres");
my ($of_another) = test('file://' . PostgreSQL::Test::Utils::tempdir());
my ($count) = $said =~ /^Ran (\d+) tests/m;

cmp_ok(keys %$result, '==', $count, 'each test of tooz has a result');
cmp_ok($count, '>', 70, 'no test of tooz is missing');
# Later versions of tooz run this test only for drivers that they name.
delete $result->{test_watch_join_group_disappear}
  if ($result->{test_watch_join_group_disappear} // '') eq 'skipped';
foreach my $name (sort keys %$result)
{
	# The Python version can break a test with tooz's own drivers, too.
	if ($result->{$name} eq 'ERROR' && $of_another->{$name} eq 'ERROR')
	{
		note "$name: an error with the driver for files, too";
		next;
	}
	is($result->{$name}, 'ok', $name) or diag($said);
}

my ($out, $err) = run_command(
	[
		$python, '-P', '-W', 'ignore', '-c', <<'END_OF_PROGRAM',
import sys
import psycopg, tooz
from tooz import coordination

def allow(yes):
    admin.execute(f'ALTER DATABASE postgres ALLOW_CONNECTIONS {yes}')

url, dsn = sys.argv[1:]
admin = psycopg.connect(dsn, autocommit=True)
member = coordination.get_coordinator(url, b'member')
member.start()
member.watch_elected_as_leader(b'group', lambda event: None)
member.run_elect_coordinator()
assert member.get_leader(b'group').get() == b'member'
lock = member.get_lock(b'volume')
assert lock.acquire()
assert admin.execute("SELECT count(*) > 0 FROM pg_stat_activity "
                     "WHERE application_name = 'a b'").fetchone()[0]
allow(False)
admin.execute("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
              "WHERE usename = 'app'")
try:
    print(lock.release())
except tooz.ToozError:
    print('held:', lock.acquired)
try:
    print(member.stand_down_group_leader(b'group'))
except tooz.ToozError:
    pass
allow(True)
print('released:', lock.release(), lock.acquired)
print('led:', member.stand_down_group_leader(b'group'),
      member.get_leader(b'group').get(),
      member.stand_down_group_leader(b'group'))
member.heartbeat()
member.stop()
END_OF_PROGRAM
		"dlock:///postgres?user=app&host=127.0.0.1&port=$port&application_name=a%20b",
		$node->connstr('template1')
	]);

is( $out,
	"held: True\nreleased: True False\nled: True None False",
	'a release that failed while the server was down can be repeated')
  or diag($err);
is( $node->safe_psql(
		'postgres', "SELECT count(*) FROM dlock_locks('tooz/lock/volume')"),
	'0', 'no lock is left');

($out, $err) = run_command(
	[
		$python, '-P', '-W', 'ignore', '-c', <<'END_OF_PROGRAM',
import sys, threading
import psycopg
from tooz import coordination

url, dsn, patience = sys.argv[1:]
admin = psycopg.connect(dsn, autocommit=True)
member = coordination.get_coordinator(url, b'member')
member.start()
lock = member.get_lock(b'volume')
assert lock.acquire()

def other_calls():
    other = member.get_lock(b'other')
    return (other.acquire(blocking=False), lock.is_still_owner(),
            member.get_leader(b'group').get(), other.release())

def call(results, function, *arguments):
    try:
        results.append(function(*arguments))
    except Exception as error:
        results.append(type(error).__name__)

def start(function, *arguments):
    results = []
    thread = threading.Thread(
        target=call, args=(results, function, *arguments), daemon=True)
    thread.start()
    return thread, results

def result(thread, results):
    thread.join(float(patience))
    return results or sys.exit('no answer')

def create():
    return member.create_group(b'group').get()

def while_blocked(title, sql, waiting):
    with psycopg.connect(dsn) as other:
        other.execute(sql)
        creating = start(create)
        while not admin.execute(waiting).fetchone()[0] and not creating[1]:
            pass
        print(f'{title}: {result(*start(other_calls))}, {result(*creating)}')

while_blocked('no answer', 'LOCK TABLE tooz_group', '''
    SELECT count(*) > 0 FROM pg_locks
    WHERE relation = 'tooz_group'::regclass AND NOT granted''')
member._ttl = 2     # of the next turn; the lease exists
while_blocked('no turn', "SELECT dlock_xact_acquire('tooz/turn/group')", '''
    SELECT count(*) > 0 FROM dlock_locks('tooz/turn/group') WHERE NOT granted''')
print(result(*start(create)))
assert lock.release()
member.stop()
END_OF_PROGRAM
		"dlock://app\@127.0.0.1:$port/postgres",
		$node->connstr('postgres'), $PostgreSQL::Test::Utils::timeout_default
	]);

is( $out,
	join("\n",
		"no answer: [(True, True, None, True)], ['ToozConnectionError']",
		"no turn: [(True, True, None, True)], ['OperationTimedOut']",
		'[None]'),
	'a group that cannot be changed stops no other calls') or diag($err);
done_testing();
