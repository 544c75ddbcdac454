# A process that cannot open the shared memory fails at its first call, and at
# each later one until it can.  Until then it does not count as attached, and
# no other process is affected.  A new dlock.max_memory takes effect at a
# restart; leases stay.
#
# What would break it: a process that is half attached, and cannot attach
# again; one that is counted, and is not attached; a segment that is replaced
# while the server runs, so that the journal is lost; one that is left behind;
# a lease that is lost with its memory.
#
# Segments are files here, and a file can be closed.  A process that has mapped
# it does not notice.

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

# Segments of dlock; PostgreSQL has small ones
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
cmp_ok(-s (segments())[0], '>', 8 * $megabyte, 'of all the size that was set');
is($next->query($limit), 6 * $megabyte, 'locks may have three quarters of that');

#
# A session that cannot open it
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
		qr/ERROR:  42501: $cannot/, 'fails: another session, which ends then');
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
	is($next->query('SELECT dlock_release_all()'), '1', 'others go on: and releases');

	mode(0600);
	like($client->query("SELECT dlock_xact_acquire('lock 2')"),
		qr/^\d+$/, 'works as soon as it can, in the same transaction');
	is($client->query('COMMIT'), '', 'which commits');
	like($client->query("SELECT dlock_acquire('lock 2')"),
		qr/^\d+$/, 'and works on');
	is($holder->query("SELECT dlock_try_acquire('lock 2') IS NULL"),
		't', 'with the locks that all have');
	$client->quit;
	$holder->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

#
# A worker that cannot
#
{
	my ($client, $other) = map { session($node) } 1 .. 2;
	my $ttl = ample(2);
	my $log = -s $node->logfile;

	# so that they are attached
	is($_->query("SELECT dlock_is_held('lock')"), 'f', 'worker: a session')
	  foreach $client, $other;
	mode(0);
	$client->start("SELECT dlock_ttl_acquire('first', '1h')");
	ok($node->wait_for_log(qr/(?:$cannot.*worker" \(PID \d+\) exited.*){2}/s, $log),
		'worker: one that cannot open the memory ends, and another one is asked for');
	mode(0600);
	# if that has taken too long, this call was told so
	my $told = '' . $client->answer;
	like($client->query("SELECT dlock_ttl_acquire('lock', '$ttl s')"),
		qr/^\d+$/, 'worker: comes in the end');

	$other->start("SELECT dlock_acquire('lock')");
	$holder->until_waits($other);
	$log = -s $node->logfile;
	mode(0);
	$outside->query('SELECT pg_terminate_backend(' . worker($outside) . ')');
	ok($node->wait_for_log($cannot, $log), 'worker: its successor cannot');
	mode(0600);
	like($other->answer, qr/^\d+$/, 'worker: a lease runs out in the end');
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
size_is(8, 'another size: not while sessions are attached');
$_->quit foreach $holder, $next;
backends_gone($_->{pid}) foreach $holder, $next;
size_is(8, 'another size: nor while the worker is');
is(join(' ', segments()), "@before", 'another size: the memory is what it was');

# nor without any process: the worker may have left something to be written
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
cmp_ok(-s (segments())[0], '>', 16 * $megabyte, 'another size: of that size');
is( $failed->query("SELECT dlock_check('leased', $ticket), "
		  . "dlock_is_held('leased', $lease), dlock_renew($lease), "
		  . "dlock_check('own', $other)"),
	't|t|1|t',
	'another size: leases hold what they held');
is($failed->query("SELECT dlock_release_ticket($ticket)"),
	't', 'another size: and release');
grows('another size: to the next one',
	$ticket, $failed->query("SELECT dlock_lease_acquire('leased', $lease)"));
$failed->quit;

# a smaller one
set('dlock.max_memory', '12MB');
$outside->quit;
$node->restart;
size_is(12, 'another size: at a restart');

$node->stop;
done_testing();
