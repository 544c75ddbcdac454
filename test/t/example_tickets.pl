# examples/tickets.py: one process waits for 5,000 locks over one connection,
# and each job is done once, even if the process is killed.
#
# What would break it: a connection for each lock; a grant that is not noticed;
# a job that is done twice when another instance continues; jobs that are not
# done when their instance has died.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Example;
use Dlock::Lease;
use Dlock::Python;
use Dlock::Test;
use Test::More;

my $python = find_python('import psycopg; import sys; '
	  . 'assert sys.version_info >= (3, 11)');

plan skip_all => 'python3 from 3.11 on with psycopg 3 is not installed'
  unless $python;

my $node = example_server();
my $short = ample(10);
my $long = 600;

sub tickets
{
	my ($title, $ttl, @arguments) = @_;

	return Dlock::Example->new($title, { TTL => $ttl }, $python,
		"$examples/tickets.py", @arguments);
}

tickets('setup', $long, 'setup')->ends(0, 'setup');

my $admin = session($node);
my $holder = session($node);

# All locks are held, so that the first instance waits for all of them.
$holder->query(q{SELECT count(*) FROM unnest(dlock_acquire_all(
	array(SELECT 'job/' || n FROM generate_series(1, 5000) AS n)))});

my $first = tickets('the first', $short);

$first->says(qr/^enqueued 5000/);
is($admin->query('SELECT max(waiting) FROM dlock_leases'),
	'5000', 'one lease waits for 5,000 locks');
is( $admin->query(
		q{SELECT count(*) FROM pg_stat_activity WHERE usename = 'app' }
		  . q{AND application_name = 'dlock'}),
	'2', 'the tickets and the lease have one connection each');
# The first heartbeat comes after a third of the ttl.
is_now($admin,
	q{SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'},
	'4', 'the heartbeat and the work have one connection each');

# The locks of nine in ten jobs are free.
$holder->query(q{SELECT count(dlock_release('job/' || n))
	FROM generate_series(1, 5000) AS n WHERE n % 10 <> 0});
$admin->wait_for('SELECT count(*) = 4500 FROM job WHERE runs > 0');
$admin->wait_for('SELECT count(*) = 500 FROM dlock_locks WHERE lease IS NOT NULL');
is($admin->query('SELECT max(runs) FROM job'), '1', 'each is done once');

# The second instance waits behind the first.
my $second = tickets('the second', $long);

$second->says(qr/^enqueued 500$/);
is($admin->query('SELECT count(*) FROM dlock_leases'), '2', 'two leases');
$first->vanish;
$holder->query('SELECT dlock_release_all()');
$second->says(qr/^done 500/);
$second->ends(0, 'when an instance is killed, the next instance does the rest');
is( $admin->query('SELECT min(runs), max(runs), count(*) FROM job'),
	'1|1|5000', 'each job was done once');
is($admin->query('SELECT count(*) FROM dlock_locks'), '0', 'no lock is left');

# Two instances from the start
$admin->query('UPDATE job SET runs = 0 WHERE id <= 500');

my @both = map { tickets($_, $long) } 'one', 'the other';
my $done = 0;

foreach my $program (@both)
{
	my ($count) = $program->says(qr/^done/) =~ /(\d+)/;

	$done += $count;
	$program->ends(0, 'one of two instances ends');
}
is($done, 500, 'two instances share the jobs');
is($admin->query('SELECT min(runs), max(runs) FROM job'), '1|1',
	'each job was done once again');

$_->quit foreach $admin, $holder;
$node->stop;
done_testing();
