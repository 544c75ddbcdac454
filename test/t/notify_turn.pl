# Announcements are sent in turn: only sessions that requested NOTIFY's lock
# earlier come before them.
#
# What would break it: a sender that leaves the queue for NOTIFY's lock and
# joins it again later; a sender that sends only the announcements from before
# its wait; a sender that has exited and is not replaced.
#
# A transaction that notifies holds NOTIFY's lock while its commit waits for a
# standby that does not exist.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils qw(slurp_file);
use Test::More;

my $node = new_server(
	'main',
	allows_streaming => 1,
	conf => "synchronous_commit = local\nautovacuum = off\n"
	  . "wal_writer_delay = 10s\n");
my $admin = session($node);
my $waiter = session($node);
my $sender = "FROM pg_stat_activity WHERE backend_type = 'dlock sender'";
my @applications = map { session($node) } 0, 1;
my (%tickets, $pid);

# Start a transaction that notifies, and holds the lock during its commit.
sub start_notifying
{
	my ($application) = @_;

	$application->start('SET synchronous_commit = on; '
		  . 'BEGIN; CREATE TEMP TABLE t () ON COMMIT DROP; NOTIFY application; COMMIT');
	return;
}

sub waits_in_queue
{
	my ($id) = @_;

	return $admin->wait_for(
		"SELECT count(*) = 1 FROM pg_locks WHERE pid = $id AND NOT granted "
		  . "AND locktype = 'object' AND classid = 'pg_database'::regclass");
}

sub enqueue
{
	my ($name, $call) = @_;

	$tickets{$name} =
	  $waiter->query($call // "SELECT dlock_enqueue('$name')");
	return;
}

$waiter->query('SELECT dlock_channel()');
commits_hang($node, 1);
start_notifying($applications[0]);
poll('the lock is held', sub { hangs($node, $applications[0]) });
enqueue('first');
$admin->wait_for("SELECT count(*) = 1 $sender");
$pid = $admin->query("SELECT pid $sender");
waits_in_queue($pid);
start_notifying($applications[1]);
waits_in_queue($applications[1]{pid});
enqueue('second');
enqueue('lease', "SELECT dlock_ttl_enqueue('lease', '1h')");
$admin->wait_for(q{SELECT granted FROM dlock_queue WHERE name = 'lease'});
# The worker has posted the announcement by now.
$admin->wait_for(q{SELECT state = 'idle' FROM pg_stat_activity
	WHERE backend_type = 'dlock worker'});
is(scalar($waiter->announcements(0)), 0, 'nothing is announced before its turn');
# A canceled sender keeps its place.
is($admin->query("SELECT pg_cancel_backend($pid)"), 't', 'it is canceled');

# The sender has its turn, and then the second application gets the lock.
$admin->query("SELECT pg_cancel_backend($applications[0]{pid})");
like($applications[0]->answer, qr/WARNING/, 'the queue moves');
is_deeply(
	[ sort $waiter->announcements(3) ],
	[ sort map { announcement('granted', $_, $tickets{$_}) } keys %tickets ],
	'all tickets granted before the turn are announced');
poll('the second application has the lock', sub { hangs($node, $applications[1]) });
ok(!$applications[1]->answered, 'the second application keeps the lock');
is($admin->query("SELECT pid $sender"), $pid, 'by one sender');
$admin->query("SELECT pg_cancel_backend($applications[1]{pid})");
$applications[1]->answer;
commits_hang($node, 0);
poll('the log has the cancel',
	sub { slurp_file($node->logfile) =~ /sender .*ignores a request to cancel/ });
unlike(slurp_file($node->logfile), qr/canceling statement due to user request/,
	'the cancel has ended no process');
$waiter->query('SELECT dlock_release_all()');
$waiter->query("SELECT dlock_release_ticket($tickets{lease})");

# While the sender waits for its turn, a session is granted a lock that a lease
# has released.  When the grant has been announced, a crash does not restore
# the lease's hold, although no session flushes the WAL.
{
	my $holder = session($node);
	my $ticket = $holder->query("SELECT dlock_ttl_acquire('removed', '1h')");
	my $count;

	commits_hang($node, 1);
	start_notifying($applications[0]);
	poll('the lock is held again', sub { hangs($node, $applications[0]) });
	enqueue('removed');
	enqueue('third');
	$admin->wait_for("SELECT count(*) = 1 $sender");
	waits_in_queue($admin->query("SELECT pid $sender"));
	# A query about the holder would flush.
	$count = $admin->query('SELECT acquired FROM dlock_counters()');
	is($holder->query("SELECT dlock_release_ticket($ticket)"), 't', 'released');
	$admin->wait_for("SELECT acquired > $count FROM dlock_counters()");
	$admin->query("SELECT pg_cancel_backend($applications[0]{pid})");
	is_deeply(
		[ sort $waiter->announcements(2) ],
		[ sort map { announcement('granted', $_, $tickets{$_}) }
			  'removed', 'third' ],
		'announced in the sender\'s turn');
	kill_server($node);
	$_->vanish foreach $admin, $waiter, $holder, @applications;
	start_again($node);
	$admin = session($node);
	is($admin->query("SELECT count(*) FROM dlock_locks('removed')"),
		'0', 'after a crash, the released lock is free');
	$waiter = session($node);
	@applications = map { session($node) } 0, 1;
	$waiter->query('SELECT dlock_channel()');
	commits_hang($node, 0);
}

# The sender exits, and is started again.
$admin->wait_for("SELECT count(*) = 0 $sender");
enqueue('again');
told($waiter, 'a sender starts when there is something to announce',
	announcement('granted', 'again', $tickets{again}));
$waiter->query('SELECT dlock_release_all()');

#
# If no slot is free for a sender, the worker sends.
#
$_->quit foreach $admin, $waiter, @applications;
$node->append_conf('postgresql.conf',
	"max_logical_replication_workers = 0\nmax_worker_processes = 1");
$node->restart;
$admin = session($node);
$waiter = session($node);
{
	my $application = session($node);
	my $lease;

	enqueue('alone');
	told($waiter, 'no slot: announced by the worker',
		announcement('granted', 'alone', $tickets{alone}));
	is($admin->query("SELECT count(*) $sender"), '0', 'no slot: no sender');

	# NOTIFY's lock does not hold up the journal.
	commits_hang($node, 1);
	start_notifying($application);
	poll('the lock is held', sub { hangs($node, $application) });
	enqueue('held up');
	like($admin->query("SELECT dlock_ttl_acquire('lease', '1h')"),
		qr/^\d+$/, 'no slot: the journal goes on');
	is(scalar($waiter->announcements(0)), 0, 'no slot: nothing is announced yet');
	$admin->query("SELECT pg_cancel_backend($application->{pid})");
	$application->answer;
	commits_hang($node, 0);
	told($waiter, 'no slot: announced in the end',
		announcement('granted', 'held up', $tickets{'held up'}));
	$application->quit;
}
$_->quit foreach $admin, $waiter;
$node->stop;
done_testing();
