# examples/nightly.py: each account gets its interest exactly once, even if the
# working machine is killed and the next one is paused.
#
# What would break it: a step that is repeated or skipped when another machine
# continues; a paused machine that writes when it resumes; two machines that
# work at once.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Example;
use Dlock::Python;
use Dlock::Test;
use Test::More;

my $python = find_python('import psycopg; import sys; '
	  . 'assert sys.version_info >= (3, 11)');

plan skip_all => 'python3 from 3.11 on with psycopg 3 is not installed'
  unless $python;

my $node = example_server();
# The ttls of the instance to be killed, and of the instance to be paused,
# whose lease must not expire before the pause
my $killed = ample(4);
my $paused = ample(10);
my $long = 600;

sub nightly
{
	my ($title, $ttl, @arguments) = @_;

	return Dlock::Example->new($title, { TTL => $ttl }, $python,
		"$examples/nightly.py", @arguments);
}

nightly('setup', $long, 'setup')->ends(0, 'setup');

my $admin = session($node);
my $blocker = session($node);
my @night = '2026-06-01';

# The third account's row is locked, so that an instance pauses in the middle.
$blocker->query('BEGIN; SELECT FROM account WHERE id = 3 FOR UPDATE');

# The backend of the latest instance, once it waits for the row.  Backends of
# earlier instances may still wait.
my @blocked;

sub latest_is_blocked
{
	my $others = sprintf q{pid <> ALL ('{%s}')}, join ',', @blocked;
	my $is_blocked = "FROM pg_stat_activity WHERE $others AND "
	  . "$blocker->{pid} = ANY (pg_blocking_pids(pid)) "
	  . "AND query LIKE 'UPDATE account%'";

	$admin->wait_for("SELECT count(*) = 1 $is_blocked");
	push @blocked, $admin->query("SELECT pid $is_blocked");
	return;
}

my $first = nightly('the first', $killed, @night);

$first->says(qr/account 2/);
latest_is_blocked();

my $second = nightly('the second', $paused, @night);

$admin->wait_for(q{SELECT count(*) = 1 FROM dlock_locks('nightly') WHERE NOT granted});

my $third = nightly('the third', $long, @night);

$admin->wait_for(q{SELECT count(*) = 2 FROM dlock_locks('nightly') WHERE NOT granted});
is($admin->query('SELECT max(account) FROM interest'), '2', 'one works');

# The dead instance's connection remains for a while, and waits for the row.
# Then the lock is lost, and the guard stops the connection.
$first->vanish;
$second->says(qr/working/);
latest_is_blocked();
pass('when an instance is killed, the next instance goes on');

$second->signal('STOP');
$third->says(qr/working/);
latest_is_blocked();
$blocker->query('COMMIT');
$third->says(qr/done/);
$third->ends(0, 'when an instance is paused, the next instance finishes');

my $all = q{SELECT string_agg(account || ':' || cents, ' ' ORDER BY account)
	FROM interest WHERE night = '2026-06-01'};
my $expected = '1:10 2:20 3:30 4:40 5:50 6:60';

is($admin->query($all), $expected, 'each account got its interest once');
$second->signal('CONT');
$second->ends(1, 'the paused instance has lost');
like($second->err, qr/another instance goes on/, 'it says so');
is($admin->query($all), $expected, 'the paused instance writes nothing');

unlike(nightly('the fourth', $long, @night)->ends(0, 'a late machine'),
	qr/account/, 'it finds nothing to do');
is($admin->query($all), $expected, 'it writes nothing');
is($admin->query('SELECT sum(cents) FROM account'), '21210', 'the sum');

nightly('the fifth', $long, '2026-06-02')->ends(0, 'the next night');
is($admin->query('SELECT count(*) FROM interest'), '12', 'each account again');
is($admin->query('SELECT count(*) FROM dlock_locks'), '0', 'no lock is left');

$_->quit foreach $admin, $blocker;
$node->stop;
done_testing();
