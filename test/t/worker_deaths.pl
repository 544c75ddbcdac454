# A worker that dies soon after its start is followed by another one, which may
# succeed, but after a growing pause, so that the server has time for other
# work.  Once the cause is gone, all is as before.
#
# A cancel is no death: neither the worker nor its current task ends.
#
# A worker that is terminated during its start first writes pending changes.
#
# What would break it: a worker that is started at once after each death; a
# pause that stays, or that follows a terminated worker; a cancel that ends the
# process or a batch.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils qw(slurp_file);
use Test::More;

my $node = new_server('main', conf => "autovacuum = off\n");
my $admin = session($node);
my $client = session($node);

plan skip_all => 'no debugger that can be attached' unless debugger_works($admin);
stop_at_rows($admin, 'INSERT');

my $lease = $client->query("SELECT dlock_lease_open('1h')");
like($lease, qr/^\d+$/, 'a worker works');

my $log = -s $node->logfile;
my $acquire = "SELECT dlock_lease_acquire('lock', $lease)";

sub deaths
{
	return scalar(() = slurp_file($node->logfile, $log) =~
		  /background worker "dlock worker" .*exited/g);
}

# Each worker dies at the first row that it writes.  Only the one before starts
# it.
stop_worker($admin, sub { $client->start($acquire) });
stop_while($admin, $client->{pid},
	"SELECT wait_event_type = 'Extension' FROM pg_stat_activity "
	  . "WHERE pid = $client->{pid}");
foreach my $n (1 .. 5)
{
	my $least = 0.1 * 2**($n - 1);

	worker_dies($admin);
	cmp_ok(next_worker_stops($admin),
		'>=', $least, "a worker dies: another one comes, and waits for $least s");
	is(deaths(), $n, 'which the log tells');
	is($admin->query("SELECT dlock_acquire('other') > 0"),
		't', 'session scope goes on');
}
worker_goes_on($admin);
continue_process($client->{pid});
# a call that took too long got an error
$client->answer;
like($client->query($acquire),
	qr/^\d+$/, 'the reason is gone: the worker works');

# A terminated worker has not died.
my $pid;
foreach (1 .. 10)
{
	$pid = worker($admin);
	$admin->query("SELECT pg_terminate_backend($pid)");
	backends_gone($pid);
}
isnt(worker($admin), $pid, 'workers that are terminated are followed, too');

# A canceled worker continues, whatever it is doing.
sub cancel
{
	my ($process, $at) = @_;

	$log = -s $node->logfile;
	is($admin->query("SELECT pg_cancel_backend($process)"), 't', $at);
	poll("the log tells of the cancel $at",
		sub { slurp_file($node->logfile, $log) =~ /ignores a request to cancel/ });
	return;
}

$pid = worker($admin);
cancel($pid, 'a worker that sleeps is canceled');
$admin->query("SELECT pg_cancel_backend($pid)") foreach 1 .. 20;
is(stop_worker(
		$admin,
		sub { $client->start("SELECT dlock_lease_acquire('canceled', $lease)") }),
	$pid, 'the same worker goes on');
$admin->query("SELECT pg_cancel_backend($pid)");
worker_goes_on($admin);
like($client->answer, qr/^\d+$/, 'and has written what it was writing');
is(worker($admin), $pid, 'it is still the same');

unlike(slurp_file($node->logfile, $log),
	qr/background worker "dlock worker" .*exited/,
	'none has died of a cancel');

# A shutdown while a worker starts: it writes before it goes.
stop_worker($admin,
	sub { $client->start("SELECT dlock_lease_acquire('paused', $lease)") });
stop_while($admin, $client->{pid},
	"SELECT wait_event_type = 'Extension' FROM pg_stat_activity "
	  . "WHERE pid = $client->{pid}");
# the next one is held up as it starts
worker_dies($admin);
like($admin->query("SELECT dlock_lease_close($lease)"),
	qr/^\d+$/, 'a lease is closed while a worker starts');
continue_process($client->{pid});
$admin->quit;
$node->stop('fast');
$node->start;
$admin = session($node);
is($admin->query("SELECT dlock_renew($lease) IS NULL"),
	't', 'and so it stays, after a shutdown at that moment');

$admin->quit;
$node->stop;
done_testing();
