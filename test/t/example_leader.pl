# examples/leader.py: only one instance leads at a time, even if it is killed
# or paused, and a late leader writes nothing.
#
# What would break it: a paused leader that writes when it resumes; a leader
# that does not notice its loss, or does not campaign again; no leader after a
# kill or a normal end.

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
# The ttls of the leader to be killed, and of the leader to be paused, whose
# lease must not expire before the pause
my $killed = ample(4);
my $paused = ample(10);
my $long = 600;

sub leader
{
	my ($name, $ttl) = @_;

	return Dlock::Example->new($name, { TTL => $ttl, PAUSE => '0.01' },
		$python, "$examples/leader.py", $name);
}

# Waits for a program to lead, and returns its fence
sub leads
{
	my ($program) = @_;

	return $program->says(qr/^leading \d+/) =~ s/\D//gr;
}

leader('setup', $long)->ends(0, 'setup');

my $admin = session($node);
my $blocker = session($node);
my $one = leader('one', $paused);
my $first = leads($one);

$one->says(qr/wrote/);

my $two = leader('two', $killed);

$admin->wait_for(q{SELECT count(*) = 1 FROM dlock_locks('reading') WHERE NOT granted});
is( $admin->query(
		q{SELECT info FROM dlock_locks('reading') WHERE granted}),
	'one', 'one instance leads');

# The leader is paused while its INSERT waits for the table.
my $waiters = "FROM pg_stat_activity WHERE "
  . "$blocker->{pid} = ANY (pg_blocking_pids(pid)) AND query LIKE 'INSERT%'";

$blocker->query('BEGIN; LOCK TABLE reading IN EXCLUSIVE MODE');
$admin->wait_for("SELECT count(*) = 1 $waiters");

my $inserting = $admin->query("SELECT pid $waiters");

$one->signal('STOP');

my $second = leads($two);

grows('when the leader is paused, the next instance leads, with a greater fence',
	$first, $second);
$admin->wait_for(
	"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $inserting "
	  . "AND wait_event_type = 'Lock')");

my $written = "SELECT count(*) FROM reading WHERE fence = $first";

$blocker->query('COMMIT');
$two->says(qr/wrote/);

my $before = $admin->query($written);

$one->signal('CONT');
$one->says(qr/leads no more/);
$admin->wait_for(
	q{SELECT count(*) = 1 FROM dlock_locks('reading') WHERE NOT granted});
is($admin->query($written), $before, 'the late leader writes nothing');
pass('the late leader campaigns again');

# A killed leader is replaced.
$two->vanish;

my $third = leads($one);

grows('when the leader is killed, the next instance leads', $second, $third);
$one->says(qr/wrote/);

# A deposed leader campaigns again.
my $three = leader('three', $long);

$admin->wait_for(q{SELECT count(*) = 1 FROM dlock_locks('reading') WHERE NOT granted});
$admin->query(
	q{SELECT dlock_force_release(ticket) FROM dlock_locks('reading') WHERE granted});

my $fourth = leads($three);

$one->says(qr/leads no more/);
$admin->wait_for(
	q{SELECT count(*) = 1 FROM dlock_locks('reading') WHERE NOT granted});
$three->says(qr/wrote/);

# The ttl is long, so only the release lets the next instance lead.
$three->signal('TERM');
$three->ends(0, 'the leader ends when it is told to');

my $fifth = leads($one);

grows('the next instance leads at once', $third, $fourth, $fifth);
$one->says(qr/wrote/);
$one->signal('TERM');
$one->ends(0, 'the last leader ends');
is($admin->query('SELECT count(*) FROM dlock_locks'), '0', 'no lock is left');
is( $admin->query(
		'SELECT count(*) FROM (SELECT fence, max(fence) OVER (ORDER BY id) AS '
		  . 'greatest FROM reading) AS r WHERE fence < greatest'),
	'0', 'no leader has written after its successor');
is( $admin->query('SELECT count(DISTINCT fence) FROM reading'),
	'5', 'each leader has written');

$_->quit foreach $admin, $blocker;
$node->stop;
done_testing();
