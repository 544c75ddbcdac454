# A synchronous standby is promoted after its primary has died.  The answers
# about leases are then true: acknowledged changes exist, even on the next
# standby in a cascade, and even if the names of the synchronous standbys
# change.  On an asynchronous standby, the latest changes may be missing, but
# its state is that of one moment: no lock has two holders, and fences keep
# growing.  A copied or restored database has no live ticket.
#
# What would break it: an answer that does not wait for the standbys although
# the client's synchronous_commit demands it; a lock that is granted before the
# removal of its last holder is in the WAL; numbers that start again, or depend
# on the replicated state; rows that count as live in every database.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Checker;
use Dlock::History qw(now);
use Dlock::Lease;
use Dlock::Standby;
use Dlock::Test;
use List::Util qw(shuffle);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $history = Dlock::Checker->new($ENV{DLOCK_TEST_SEED} || 20250101);
my $primary = new_server(
	'primary',
	allows_streaming => 1,
	conf => q{
autovacuum = off
log_statement = none
wal_writer_delay = 10s
});

# The primary dies, and the standby takes its place.
sub fail_over
{
	my ($standby, $what, $durable) = @_;
	my $since = now();

	take_over($standby);
	$history->check($standby, $since, $what, $durable);
	$primary = $standby;
	return;
}

# The second standby follows the first, even after the first is promoted.
my $last = $primary;
my @chain = map { $last = new_standby($last, "synchronous_$_") } 1, 2;

foreach my $round (1 .. 2)
{
	my $standby = $chain[ $round - 1 ];

	count_on($primary, "synchronous_$round");
	my $session = session($primary);
	my $sender = $session->query('SELECT pid FROM pg_stat_replication');

	# Shortly before the primary dies, the standby stops receiving.  From then
	# on, no durable answer may be given.
	$history->load(
		$primary,
		200 + int(rand(500)),
		sub {
			my $acquired = $session->query('SELECT acquired FROM dlock_stats');

			# Stop the sender while it holds no lock that others need.
			stop_while($session, $sender,
				"SELECT wait_event = 'WalSenderMain' FROM pg_stat_activity "
				  . "WHERE pid = $sender");
			$session->wait_for(
				"SELECT (SELECT acquired > $acquired + 300 FROM dlock_stats) "
				  . "OR count(*) = $history->{clients} FROM pg_stat_activity "
				  . "WHERE wait_event = 'SyncRep' "
				  . "AND backend_type = 'client backend'");
			kill_server($primary);
			$session->vanish;
		});
	fail_over($standby, "synchronous, round $round", 'there');
}

# The names of the synchronous standbys change under load.  At the end, either
# of two standbys must answer, and one of them receives nothing any more.  The
# more advanced standby has all acknowledged changes.
foreach my $round (1 .. 2)
{
	my @names = ("left_$round", "right_$round");
	my @standbys = map { new_standby($primary, $_) } @names;
	my ($left, $right) = @names;

	count_on($primary, $left);
	my $admin = session($primary);
	my $load = $history->start_clients($primary, [ 1 .. $history->{clients} ]);

	foreach my $list (
		shuffle(
			$left, $right, "ANY 1 ($left, $right)", "ANY 2 ($left, $right)",
			"FIRST 1 ($right, $left)", "FIRST 2 ($left, $right)", 'ANY 1 (*)'),
		"ANY 1 ($left, $right)")
	{
		$admin->query("ALTER SYSTEM SET synchronous_standby_names = '$list'");
		$admin->query('SELECT pg_reload_conf()');
		$load->await($load->{answers} + 50 + int(rand(100)));
	}
	my $late = $admin->query(
		"SELECT pid FROM pg_stat_replication WHERE application_name = '$right'");
	stop_while($admin, $late,
		"SELECT wait_event = 'WalSenderMain' FROM pg_stat_activity "
		  . "WHERE pid = $late");
	$load->await($load->{answers} + 100);
	$load->release(sub { kill_server($primary) });
	$history->read_calls($load);
	$admin->vanish;
	my %received = map {
		$_ => $_->safe_psql('postgres', q{SELECT pg_last_wal_receive_lsn() - '0/0'})
	} @standbys;
	my ($most, $least) =
	  sort { $received{$b} <=> $received{$a} } @standbys;
	$least->stop;
	fail_over($most, "changing names, round $round", 'there');
}

foreach my $round (1 .. 2)
{
	my $standby = new_standby($primary, "asynchronous_$round");
	my $sender = $primary->safe_psql('postgres',
		'SELECT pid FROM pg_stat_replication');

	# First with a standby that keeps up.  Then no more WAL is sent, and
	# changes answered after that are lost.
	$history->load(
		$primary,
		300 + int(rand(300)),
		sub { kill_server($primary) },
		after => 150 + int(rand(100)),
		then => sub { kill('STOP', $sender) == 1 or die 'no sender' });
	fail_over($standby, "asynchronous, round $round", 'nowhere');
}
$history->check_past;

# The database is copied while no session uses it.  The copied rows have no
# effect.
$primary->safe_psql('postgres', 'CREATE DATABASE original');
my $session = session($primary, 'original');
$session->query('CREATE EXTENSION dlock');
my $lease = $session->query("SELECT dlock_lease_open('1 h')");
my $held = $session->query("SELECT dlock_lease_acquire('lock', $lease)");
my $waits = $session->query("SELECT dlock_ttl_enqueue('lock', '1 h', 'c')");
my $closed = $session->query("SELECT dlock_ttl_acquire('other', '1 h')");
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';

sub is_original
{
	my ($when) = @_;

	is( $session->query('SELECT ticket, granted FROM dlock_locks ORDER BY 1'),
		"$held|t\n$waits|f\n$closed|t",
		"$when: the original is what it was");
	return;
}

sub is_empty
{
	my ($dbname) = @_;
	my $copy = session($primary, $dbname);
	my $ticket;

	is($copy->query('SELECT count(*) FROM dlock_locks'),
		'0', "$dbname: nothing is held");
	is($copy->query('SELECT count(*) FROM dlock_leases'),
		'0', "$dbname: there is no lease");
	is($copy->query("SELECT dlock_check('lock', $held)"),
		'f', "$dbname: the fence is not current");
	is($copy->query("SELECT dlock_renew($lease) IS NULL"),
		't', "$dbname: the lease cannot be renewed");
	$ticket =
	  $copy->query("SELECT dlock_try_ttl_acquire('lock', '1 h')");
	cmp_ok($ticket, '>', $closed, "$dbname: the lock is free, fences grow");
	ok( $copy->wait_for(
			"SELECT array_agg(ticket) = '{$ticket}' FROM dlock_queue"),
		"$dbname: the rows are gone");
	is($copy->query('SELECT count(*) FROM dlock_queue_lease'),
		'0', "$dbname: the rows of leases are gone");
	$copy->quit;
	return;
}

$primary->command_ok([ 'pg_dump', '-f', $dump, '-d', 'original' ], 'pg_dump');
$session->quit;
$primary->restart;
$primary->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE original');
is( $primary->safe_psql(
		'copy', 'SELECT count(*) FROM dlock_queue WHERE ticket > 0'),
	'3', 'the copy has the rows');
is_empty('copy');
$session = session($primary, 'original');
is_original('after the copy');

$primary->safe_psql('postgres', 'CREATE DATABASE restored');
$primary->command_ok(
	[ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $dump,
		'-d', 'restored' ],
	'restored');
is( $primary->safe_psql('restored', 'SELECT count(*) FROM dlock_queue'),
	'0', 'the dump has no rows');
is_empty('restored');
is_original('after all');
$session->quit;

$history->close_all($primary);
done_testing();
