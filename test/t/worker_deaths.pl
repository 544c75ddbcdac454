# If a worker dies soon after its start, another worker follows after a growing
# pause, so that the server has time for other work.  When the cause is gone,
# workers start without a pause.
#
# A cancel ends neither the worker nor its current task.
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

# Each worker dies at the first row that it writes.  Only its death starts the
# next worker.
stop_worker($admin, sub { $client->start($acquire) });
stop_while($admin, $client->{pid},
	"SELECT wait_event_type = 'Extension' FROM pg_stat_activity "
	  . "WHERE pid = $client->{pid}");
foreach my $n (1 .. 5)
{
	my $least = 0.1 * 2**($n - 1);

	worker_dies($admin);
	cmp_ok(next_worker_stops($admin),
		'>=', $least, "a worker dies: the next comes after $least s");
	is(deaths(), $n, 'the log has the deaths');
	is($admin->query("SELECT dlock_acquire('other') > 0"),
		't', 'session scope goes on');
}
worker_goes_on($admin);
continue_process($client->{pid});
# A call that took too long has got an error.
$client->answer;
like($client->query($acquire),
	qr/^\d+$/, 'when the cause is gone, the worker works');

# A terminated worker does not count as dead.
my $pid;
foreach (1 .. 10)
{
	$pid = worker($admin);
	$admin->query("SELECT pg_terminate_backend($pid)");
	backends_gone($pid);
}
isnt(worker($admin), $pid, 'another worker follows a terminated worker');

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
like($client->answer, qr/^\d+$/, 'the canceled worker has written its batch');
is(worker($admin), $pid, 'the worker is still the same');

unlike(slurp_file($node->logfile, $log),
	qr/background worker "dlock worker" .*exited/,
	'no worker has died of a cancel');

# At a shutdown, a worker that is starting writes before it exits.
stop_worker($admin,
	sub { $client->start("SELECT dlock_lease_acquire('paused', $lease)") });
stop_while($admin, $client->{pid},
	"SELECT wait_event_type = 'Extension' FROM pg_stat_activity "
	  . "WHERE pid = $client->{pid}");
# The next worker is held up as it starts.
worker_dies($admin);
like($admin->query("SELECT dlock_lease_close($lease)"),
	qr/^\d+$/, 'a lease is closed while a worker starts');
continue_process($client->{pid});
$admin->quit;
$node->stop('fast');
$node->start;
$admin = session($node);
is($admin->query("SELECT dlock_renew($lease) IS NULL"),
	't', 'the lease stays closed after a shutdown at that moment');

$admin->quit;
$node->stop;
done_testing();
