# If a process cannot open the shared memory, its calls fail until it can.
# Until then, the process does not count as attached, and no other process is
# affected.  A new dlock.max_memory takes effect at a restart, and leases stay.
#
# What would break it: a process that is half attached, and cannot attach
# again; a process that is counted, but not attached; a segment that is
# replaced while the server runs, so that the journal is lost; a segment that
# is left behind; a lease that is lost with its memory.
#
# Segments are files here, which the test makes inaccessible.  A process that
# has mapped a file does not notice.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main',
	conf => "dynamic_shared_memory_type = mmap\ndlock.max_memory = '8MB'\n");
my $directory = $node->data_dir . '/pg_dynshmem';
my $cannot = qr/could not open shared memory segment/;
my $megabyte = 1024 * 1024;
my $limit = 'SELECT memory_limit FROM dlock_stats';

# Segments of dlock, which are larger than PostgreSQL's own
sub segments
{
	return grep { -s $_ > 4 * $megabyte } glob("$directory/mmap.*");
}

sub mode
{
	my ($mode) = @_;

	return chmod($mode, segments()) == 1 || die "chmod: $!";
}

END
{
	chmod(0600, glob("$directory/mmap.*")) if defined $directory;
}

my $outside = session($node);
my $holder = session($node);
my $next = session($node);

is(scalar(segments()), 0, 'no memory before the first call');
my $fence = $holder->query("SELECT dlock_acquire('lock')");
is(scalar(segments()), 1, 'one piece of memory');
cmp_ok(-s (segments())[0], '>', 8 * $megabyte, 'the segment has the size that was set');
is($next->query($limit), 6 * $megabyte, 'locks can use three quarters of the size');

#
# A session that cannot open the memory
#
{
	my ($client, $gone) = map { session($node) } 1 .. 2;

	mode(0);
	foreach my $call (
		"SELECT dlock_acquire('lock 2')", "SELECT dlock_acquire('lock 2')",
		"SELECT dlock_lease_open('1h')", 'SELECT count(*) FROM dlock_locks')
	{
		like($client->query($call), qr/ERROR:  42501: $cannot/, "fails: $call");
	}
	like($gone->query("SELECT dlock_acquire('lock 2')"),
		qr/ERROR:  42501: $cannot/, 'fails: another session, which then exits');
	$gone->quit;
	backends_gone($gone->{pid});
	$client->query('BEGIN; SAVEPOINT one');
	like($client->query("SELECT dlock_xact_acquire('lock 2')"),
		qr/ERROR:  42501: $cannot/, 'fails: in a subtransaction');
	$client->query('ROLLBACK TO one');

	$next->start("SELECT dlock_acquire('lock')");
	$holder->until_waits($next);
	is($holder->query("SELECT dlock_check('lock', $fence), dlock_release('lock')"),
		't|t', 'others go on: one releases');
	grows('others go on: the next one is granted', $fence, $next->answer);
	is($next->query('SELECT dlock_release_all()'), '1', 'others go on: the next one releases');

	mode(0600);
	like($client->query("SELECT dlock_xact_acquire('lock 2')"),
		qr/^\d+$/, 'works when the file can be opened, in the same transaction');
	is($client->query('COMMIT'), '', 'the transaction commits');
	like($client->query("SELECT dlock_acquire('lock 2')"),
		qr/^\d+$/, 'the session continues to work');
	is($holder->query("SELECT dlock_try_acquire('lock 2') IS NULL"),
		't', 'the session sees the same locks as others');
	$client->quit;
	$holder->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

#
# A worker that cannot open the memory
#
{
	my ($client, $other) = map { session($node) } 1 .. 2;
	my $ttl = ample(2);
	my $log = -s $node->logfile;

	# attach these sessions
	is($_->query("SELECT dlock_is_held('lock')"), 'f', 'worker: a session')
	  foreach $client, $other;
	mode(0);
	$client->start("SELECT dlock_ttl_acquire('first', '1h')");
	ok($node->wait_for_log(qr/(?:$cannot.*worker" \(PID \d+\) exited.*){2}/s, $log),
		'worker: a worker without the memory exits, and another is requested');
	mode(0600);
	# This call got an error if that has taken too long.
	my $told = '' . $client->answer;
	like($client->query("SELECT dlock_ttl_acquire('lock', '$ttl s')"),
		qr/^\d+$/, 'worker: a worker starts in the end');

	$other->start("SELECT dlock_acquire('lock')");
	$holder->until_waits($other);
	$log = -s $node->logfile;
	mode(0);
	$outside->query('SELECT pg_terminate_backend(' . worker($outside) . ')');
	ok($node->wait_for_log($cannot, $log), 'worker: the next worker cannot open the memory');
	mode(0600);
	like($other->answer, qr/^\d+$/, 'worker: a lease expires in the end');
	$client->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
	$_->quit foreach $client, $other;
	$holder->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

#
# Another size
#
sub size_is
{
	my ($megabytes, $test) = @_;
	my $session = session($node);
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is($session->query($limit), $megabytes * $megabyte * 3 / 4, $test);
	$session->quit;
	backends_gone($session->{pid});
	return;
}

sub set
{
	my ($setting, $value) = @_;
	my $loaded = session($node);

	$outside->query("ALTER SYSTEM SET $setting = '$value'");
	$node->reload;
	$loaded->query('SELECT dlock_version()');
	$loaded->wait_for("SELECT current_setting('$setting') = '$value'");
	$loaded->quit;
	return;
}

my $lease = $holder->query("SELECT dlock_lease_open('1h')");
my $ticket = $holder->query("SELECT dlock_lease_acquire('leased', $lease)");
my $other = $next->query("SELECT dlock_ttl_acquire('own', '1h')");
my @before = segments();

set('dlock.max_memory', '16MB');
size_is(8, 'another size: not used while sessions are attached');
$_->quit foreach $holder, $next;
backends_gone($_->{pid}) foreach $holder, $next;
size_is(8, 'another size: not used while the worker is attached');
is(join(' ', segments()), "@before", 'another size: the memory is the same');

# Nor is it used without any process, because changes may still be unwritten.
my $failed = session($node);
mode(0);
like($failed->query("SELECT dlock_acquire('lock')"),
	$cannot, 'another size: a session that could not attach');
mode(0600);
set('dlock.worker_idle_timeout', '0');
no_worker($outside);
my $counted;
foreach my $time ('first', 'second')
{
	size_is(8, "another size: not while the server runs, the $time time");
	is(join(' ', segments()), "@before", '... with the same memory');
	$counted //= $failed->query('SELECT stats_reset FROM dlock_stats');
	is($failed->query('SELECT stats_reset FROM dlock_stats'),
		$counted, '... and counters go on');
	$failed->quit;
	backends_gone($failed->{pid});
	no_worker($outside);
	$failed = session($node);
}
$failed->quit;
$outside->quit;
$node->restart;
$outside = session($node);
size_is(16, 'another size: at a restart');
$failed = session($node);
is(scalar(segments()), 1, 'another size: one piece of memory again');
cmp_ok(-s (segments())[0], '>', 16 * $megabyte, 'another size: the segment has that size');
is( $failed->query("SELECT dlock_check('leased', $ticket), "
		  . "dlock_is_held('leased', $lease), dlock_renew($lease), "
		  . "dlock_check('own', $other)"),
	't|t|1|t',
	'another size: leases still hold their locks');
is($failed->query("SELECT dlock_release_ticket($ticket)"),
	't', 'another size: a lease releases');
grows('another size: the next ticket is granted',
	$ticket, $failed->query("SELECT dlock_lease_acquire('leased', $lease)"));
$failed->quit;

# A smaller size takes effect, too.
set('dlock.max_memory', '12MB');
$outside->quit;
$node->restart;
size_is(12, 'another size: at a restart');

$node->stop;
done_testing();
