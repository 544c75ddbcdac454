# A primary is replaced while it loads its leases.  It honours none of them
# once its successor may grant their locks.  As at any start, the standby has
# acknowledged the primary's writes.  Here it is promoted before the loader
# notices the acknowledgement.
#
# What would break it: leases that count from the time when the loader noticed
# or needed the acknowledgement, instead of a time before the acknowledged rows
# were written.
#
# The test controls the clock.  It stops the loader while the loader waits for
# the acknowledgement, or at one of its next readings of the clock.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Clock;
use Dlock::Lease;
use Dlock::Standby;
use Dlock::Test;
use Test::More;

plan skip_all => 'needs Linux and a C compiler' unless clock_is_ours();

my $primary = new_server_of_clock('primary');

# Connect the standby.  With '', disconnect it, so that it does not acknowledge
# the loader's writes.
sub connect_again
{
	my ($standby, $conninfo) = @_;

	$standby->append_conf('postgresql.conf', "primary_conninfo = '$conninfo'");
	$standby->reload;
	return;
}

foreach my $reading (0 .. 3)
{
	my $when = $reading ? "at reading $reading" : 'before the loader has looked';
	my $standby = new_standby($primary, "standby_$reading",
		start => sub { my ($node) = @_; under_our_clock(sub { $node->start }) });
	my $conninfo =
	  $standby->safe_psql('postgres', 'SHOW primary_conninfo') =~ s/'/''/gr;
	my $client = session($primary);

	count_on($primary, "standby_$reading");
	my $lease = $client->query("SELECT dlock_lease_open('1h')");
	my $fence = $client->query("SELECT dlock_lease_acquire('lock', $lease)");
	like($fence, qr/^\d+$/, "$when: a holder");

	# The primary is restarted, and its standby connects late.
	$client->quit;
	$primary->stop('immediate');
	connect_again($standby, '');
	under_our_clock(sub { $primary->start });
	my $loader = session($primary);
	$loader->start("SELECT dlock_renew($lease)");
	my $admin = session($primary);
	my $pid;
	# The loader waits repeatedly, each time briefly.
	poll(
		'the loader waits',
		sub {
			($pid = $admin->query(q{SELECT pid FROM pg_stat_activity
				 WHERE wait_event = 'SyncRep'})) =~ /^\d+$/;
		});
	my $written = $admin->query('SELECT pg_current_wal_lsn()');
	# Stop the loader while it holds no lock that other processes need.
	stop_while($admin, $pid,
		"SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = $pid");
	connect_again($standby, $conninfo);
	$admin->wait_for("SELECT count(*) = 1 FROM pg_stat_replication "
		  . "WHERE flush_lsn >= '$written' AND sync_state = 'sync'");
	if ($reading)
	{
		stop_at_reading($pid, $reading);
		continue_process($pid);
		my $stopped =
		  stopped_at_reading($pid, sub { $loader->answered });
		stop_at_reading(0, 0);
		ok($stopped, "$when: the loader is stopped") || diag($loader->answer);
	}

	# The primary is replaced.
	connect_again($standby, '');
	$admin->wait_for('SELECT count(*) = 0 FROM pg_stat_replication');
	$standby->promote;
	my $next = session($standby);
	is($next->query("SELECT dlock_check('lock', $fence)"),
		't', "$when: its successor honours the lease");
	time_passes(1.24 * 3600);
	is($next->query("SELECT dlock_check('lock', $fence)"),
		't', '... for its ttl and a quarter');
	time_passes(0.02 * 3600);
	$next->query('SET synchronous_commit = local');
	grows('... and then grants the lock',
		$fence, $next->query("SELECT dlock_ttl_acquire('lock', '10h')"));

	# The loader continues, and a client makes a request.
	continue_process($pid);
	$admin->query(q{SET statement_timeout = '1s'});
	unlike($admin->query("SELECT dlock_check('lock', $fence)"),
		qr/^t$/, "$when: the loader goes on, and the old holder has lost the lock");
	$loader->start(q{SELECT 'end'}) if $loader->answered;
	unlike($admin->query("SELECT dlock_renew($lease)"),
		qr/^\d+$/, '... and cannot renew');
	$admin->query('RESET statement_timeout');
	$admin->query("SELECT pg_cancel_backend($pid)");
	unlike($loader->answer, qr/^\d+$/, '... and the waiting renewal fails, too');

	# The next round begins without that primary.
	$_->quit foreach $next, $loader;
	$standby->stop;
	$admin->query('ALTER SYSTEM RESET synchronous_standby_names');
	$admin->quit;
	$primary->reload;
	my $after = session($primary);
	$after->wait_for(q{SELECT count(*) = 1 FROM pg_settings
		WHERE name = 'synchronous_standby_names' AND setting = ''});
	$after->query("SELECT dlock_lease_close($lease)");
	$after->quit;
}

$primary->stop;
done_testing();
