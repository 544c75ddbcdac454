# The search for deadlocks costs other sessions nothing, and the waiter
# little.  A waiter searches at growing intervals, unless a session waits for
# one of its heavyweight locks.  A search reads each lock once, however many
# sessions wait for it, and no lock if no session waits for the waiter.
#
# What would break it: a request to the lock manager for each of its waiters; a
# search by all waiters at every change; log messages of all waiters that each
# list all waiters.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

# Only sessions that set deadlock_timeout look for deadlocks.
my $node = new_server('main',
	conf => "deadlock_timeout = '1h'\nautovacuum = off\n");
my $admin = session($node);
my $looks = "SET deadlock_timeout = '10ms'; SET log_min_messages = debug1";

# Counters of a session's searches: processes, locks and places
sub looks_of
{
	my ($session) = @_;

	my @looks = slurp_file($node->logfile) =~
	  /\[$session->{pid}\].*looked for a deadlock: (\d+ processes, \d+ locks, \d+ places)/g;

	return @looks;
}

sub advisory_waiters
{
	my ($key, $count) = @_;

	return $admin->wait_for("SELECT count(*) = $count FROM pg_locks "
		  . "WHERE locktype = 'advisory' AND objid = $key AND NOT granted");
}

#
# Twelve sessions wait for a lock, and each has a lock that other sessions wait
# for.  The holder is at the end of a long queue in the lock manager.
#
{
	my $depth = 20;
	my $width = 12;
	my @before = map { session($node) } 0 .. $depth;
	my $holder = session($node);
	my @waiters = map { session($node) } 1 .. $width;
	my @behind = map { session($node) } 1 .. $width;
	my ($last, $asker) = map { session($node) } 1 .. 2;
	my $offset = -s $node->logfile;

	$_->start('SELECT pg_advisory_lock(1)') foreach @before;
	advisory_waiters(1, $depth);
	$holder->query("SELECT dlock_acquire('lock')");
	$holder->start('SELECT pg_advisory_lock(1)');
	advisory_waiters(1, $depth + 1);
	foreach my $i (0 .. $width - 1)
	{
		$waiters[$i]->query("$looks; SELECT dlock_acquire('own $i')");
		$behind[$i]->query($looks);
		$behind[$i]->start("SELECT dlock_acquire('own $i')");
		$admin->until_waits($behind[$i]);
		$waiters[$i]->start("SELECT dlock_acquire('lock')");
		$admin->until_waits($waiters[$i]);
	}

	# A session waits for the last of the twelve, but in the lock manager.
	$last->query("SET log_lock_waits = on; $looks; SELECT pg_advisory_lock(2)");
	$asker->start('SELECT pg_advisory_lock(2)');
	advisory_waiters(2, 1);
	$last->start("SELECT dlock_acquire('lock')");
	poll('many looks', sub { looks_of($last) >= 60 });
	pass('a session that could be in a heavyweight cycle looks often');

	my @seen = looks_of($last);
	my %seen;
	my $places = 1 + $width + 1 + 1 + $depth + 1;
	is( join(', ', grep { !$seen{$_}++ } @seen),
		($width + $depth + 3) . " processes, 2 locks, $places places",
		'each lock is read once');
	my @counts = map { scalar(looks_of($_)) } @waiters;
	note "looks: @counts; " . @seen;
	is(scalar(grep { $_ < 1 } @counts), 0, 'the other sessions have looked');
	is(scalar(grep { $_ > 20 } @counts), 0, '... but not as often');
	is(scalar(map { looks_of($_) } @behind),
		0, 'a session that no session waits for does not look');

	# Each waiter's message would otherwise list all waiters.
	my $some = join(', ', map { $_->{pid} } @waiters[ 0 .. 9 ]);
	$node->wait_for_log(
		qr/process $last->{pid} still waiting for .*\n.*DETAIL:  Process holding the lock: $holder->{pid}\. Wait queue: \Q$some\E, \.\.\.\.\n/,
		$offset);
	pass('log_lock_waits names ten processes');

	$admin->query('SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
		  . "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()");
	$_->quit foreach @before, $holder, @waiters, @behind, $last, $asker;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

# A lease has no process.
{
	my $lease = $admin->query("SELECT dlock_ttl_acquire('leased', '1h')");
	my $waiter = session($node);
	my $offset = -s $node->logfile;

	$waiter->query("SET log_lock_waits = on; $looks");
	is( $waiter->query("SELECT dlock_try_acquire('leased', '100ms') IS NULL"),
		't', 'a lease holds the lock');
	$node->wait_for_log(
		qr/Process holding the lock: lease $lease \(role "[^"]+"\)\. Wait queue: $waiter->{pid}\.\n/,
		$offset);
	pass('log_lock_waits names the lease');
	$admin->query("SELECT dlock_release_ticket($lease)");
	$waiter->quit;
}

$admin->quit;
$node->stop;
done_testing();
