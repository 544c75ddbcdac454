# A process cannot map a segment of shared memory that others have made.  What
# it was about to do then fails, before anything is changed, or is done later by
# somebody else: nobody is lost in a lock, or stays in one that it has left; a
# commit stays one, a rollback comes to its end, and the server goes on; and the
# process does what it could not as soon as it can map the segment.
#
# What would break it: a list that is changed before the neighbour is looked up;
# an error behind a commit, which would be a PANIC, or in a rollback, which is begun
# again then; a ticket that is freed twice; a release that counts below zero as it
# is repeated; a lock of shared memory that is not let go after an error outside of
# a transaction; an area that is attached by
# half, and cannot be attached again; a waiter that nobody hands the lock to.
#
# Segments are files here.  Those that came last cannot be opened while they are
# closed.  Who has them mapped already does not notice.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

# With so many connections, the array of backends has a segment of its own.
my $node = new_server('main',
	allows_streaming => 1,
	conf => "dynamic_shared_memory_type = mmap\nmax_connections = 2500\n"
	  . "synchronous_commit = local\n");

plan skip_all => 'who has failed to map a segment once, cannot map it again'
  if $node->pg_version >= 17;

my $admin = session($node);
my $cannot = qr/could not open shared memory segment/;
my $no_memory = qr/ERROR:  42501: $cannot/;
my (%known, @closed);

sub segments
{
	return glob($node->data_dir . '/pg_dynshmem/mmap.*');
}

sub close_memory
{
	@closed = @_;
	chmod(0, @closed) == @closed or die "chmod: $!";
	return;
}

sub open_memory
{
	chmod(0600, splice @closed);
	return;
}

END
{
	open_memory();
}

# From now on, what a session allocates comes into a segment that it has just
# made: tickets, and all that has the size of a lease, or of an announcement of a
# long name.
sub grow
{
	my ($session) = @_;
	my $take = q{SELECT count(dlock_acquire('other', slots => 100000,
		info => repeat('x', %d))) FROM generate_series(1, %d)};

	%known = map { $_ => 1 } segments();
	$session->query(sprintf $take, 1000, 1000)
	  while !grep { !$known{$_} } segments();
	# what was left in the others is used up now, of 320, 384 and 448 bytes
	$session->query(sprintf $take, $_, 3000) foreach 300, 350, 420;
	return;
}

sub close_new
{
	return close_memory(grep { !$known{$_} } segments());
}

# One that looks soon whether something has gone wrong
sub waiter
{
	return session($node, 'postgres', q{options='-c deadlock_timeout=10ms'});
}

# Stop a waiter while it sleeps, where it has no lock that others need.  Its
# looks would fail, too.
sub stop_sleeper
{
	my ($waiter) = @_;

	$admin->until_waits($waiter);
	stop_while($admin, $waiter->{pid},
		"SELECT wait_event = 'userlock' FROM pg_stat_activity "
		  . "WHERE pid = $waiter->{pid}");
	return;
}

sub holders
{
	my ($name) = @_;

	return $admin->query(
		"SELECT string_agg(pid::text, ' ' ORDER BY ticket) FROM dlock_locks "
		  . "WHERE name = '$name' AND granted");
}

sub tickets
{
	my ($name) = @_;

	return $admin->query(
		"SELECT count(*) FROM dlock_locks WHERE name = '$name'");
}

sub finish
{
	$_->quit foreach @_;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	return;
}

#
# The array of backends, at the first call of a session
#
$admin->query('SELECT count(*) FROM dlock_locks');
{
	my $client = session($node);

	# the first of an area has a megabyte
	close_memory(grep { -s $_ > 1024 * 1024 } segments());
	like($client->query("SELECT dlock_acquire('lock')"),
		$no_memory, "backends: fails, $_")
	  foreach 'once', 'again';
	open_memory();
	like($client->query("SELECT dlock_acquire('lock')"),
		qr/^\d+$/, 'backends: and works in the end');
	finish($client);
}

#
# The list of leases, for one that begins with an enqueue
#
{
	my ($client, $other) = map { session($node) } 1 .. 2;

	# what it needs for that is in segments that it has
	$client->query("SELECT dlock_release_ticket(
		dlock_ttl_enqueue('other', '1h', 'nobody'))") foreach 1 .. 3;
	# and nothing is in the new one but leases of many
	%known = map { $_ => 1 } segments();
	$other->query("SELECT count(dlock_lease_open('1h'))
		FROM generate_series(1, 200)")
	  while !grep { !$known{$_} } segments();
	$other->query("SELECT dlock_lease_open('1h')");
	close_new();
	like($client->query("SELECT dlock_ttl_enqueue('lock', '1h', 'nobody')"),
		$no_memory, 'leases: an enqueue fails');
	open_memory();
	is(tickets('lock'), '0', 'leases: and takes nothing');
	$admin->query('SELECT dlock_reset()');
	finish($client, $other);
	no_worker($admin);
}

#
# What the worker has to write, and to watch, when it comes
#
{
	my ($client, $other) = map { session($node) } 1 .. 2;
	my $ttl = ample(2);
	my $log;

	# the worker has nothing mapped yet
	grow($client);
	close_new();
	$log = -s $node->logfile;
	$client->start("SELECT dlock_lease_open('1h')");
	$node->wait_for_log($cannot, $log);
	open_memory();
	# where that has taken too long, this call was told so
	my $told = '' . $client->answer;
	like($client->query("SELECT dlock_lease_open('1h')"),
		qr/^\d+$/, 'worker: comes in the end');

	$client->query("SELECT dlock_ttl_acquire('lock', '$ttl s')");
	$other->start("SELECT dlock_acquire('lock') > 0");
	$admin->until_waits($other);
	close_new();
	$log = -s $node->logfile;
	$admin->query('SELECT pg_terminate_backend(' . worker($admin) . ')');
	$node->wait_for_log($cannot, $log);
	open_memory();
	is($other->answer, 't', 'worker: a lease runs out');

	# one that cannot map it time and again makes room for another one
	close_new();
	$log = -s $node->logfile;
	$admin->query('SELECT pg_terminate_backend(' . worker($admin) . ')');
	# that one, and the one behind it
	ok($node->wait_for_log(
			qr/(worker" \(PID \d+\) exited.*){2}/s, $log),
		'worker: one that cannot map memory ends');
	open_memory();
	like($client->query("SELECT dlock_ttl_acquire('lock 2', '1h')"),
		qr/^\d+$/, 'worker: and the next one can');
	$admin->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
	finish($client, $other);
}

#
# The next in line, or all the locks, at a release and at the end of a session
#
foreach my $how ('release', 'end')
{
	my ($holder, $other) = map { session($node) } 1 .. 2;
	my $waiter = waiter();

	$holder->query("SELECT dlock_acquire('lock')");
	grow($other);
	# the table of locks grows
	$other->query(q{SELECT count(dlock_acquire('other ' || n))
		  FROM generate_series(1, 6000) AS n})
	  if $how eq 'end';
	$waiter->start("SELECT dlock_acquire('lock') > 0");
	stop_sleeper($waiter);
	close_new();
	if ($how eq 'release')
	{
		like($holder->query("SELECT dlock_release('lock')"),
			$no_memory, "$how: fails");
	}
	else
	{
		$admin->query("SELECT pg_terminate_backend($holder->{pid})");
		$holder->quit;
		backends_gone($holder->{pid});
	}
	open_memory();
	continue_process($waiter->{pid});
	is($waiter->answer, 't', "$how: the next in line has the lock");
	is(holders('lock'), $waiter->{pid}, "$how: and nobody else");
	finish($holder, $waiter, $other);
}

#
# A look for deadlocks that cannot see all who wait ends the wait, and hangs
# nobody.
#
{
	my ($holder, $other, $third, $fourth) = map { session($node) } 1 .. 4;
	my $waiter = waiter();
	my $enqueue = "SELECT dlock_enqueue('lock', 'nobody')";
	my $next;

	$waiter->query("SELECT dlock_acquire('mine')");
	# a ticket that they keep for the next time
	$_->query("SELECT dlock_acquire('lock'), dlock_release('lock')")
	  foreach $waiter, $fourth;
	$holder->query("SELECT dlock_acquire('lock')");
	# the head of the queue, which every look looks at
	$next = $other->query($enqueue);
	grow($other);
	$other->query($enqueue);
	# the neighbour, which the waiter needs to join and to leave
	$fourth->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($fourth);
	$waiter->start("SELECT dlock_acquire('lock')");
	stop_sleeper($waiter);
	# only who keeps others waiting looks
	$third->start("SELECT dlock_acquire('mine') > 0");
	$admin->until_waits($third);
	close_new();
	continue_process($waiter->{pid});
	like($waiter->answer, $no_memory, 'look: fails');
	open_memory();
	# in some versions it cannot map again what it has failed to map once
	$waiter->quit;
	is($third->answer, 't', 'look: others go on');
	$holder->query("SELECT dlock_release('lock')");
	is($other->query("SELECT dlock_wait($next)"),
		't', 'look: the lock is handed on');
	$other->quit;
	$fourth->answer;
	finish($holder, $other, $third, $fourth);
}

#
# A neighbour in the list of holders: of one that is granted, and of one that
# leaves.
#
{
	my ($first, $second, $third) = map { session($node) } 1 .. 3;
	my $waiter = waiter();

	# a ticket that it keeps for the next time
	$waiter->query("SELECT dlock_acquire('lock')");
	$waiter->query("SELECT dlock_release('lock')");
	$_->query("SELECT dlock_acquire('lock', slots => 3)")
	  foreach $first, $second;
	grow($third);
	$third->query("SELECT dlock_acquire('lock', slots => 3)");
	$waiter->start("SELECT dlock_acquire('lock', slots => 3) > 0");
	stop_sleeper($waiter);
	close_new();
	like($first->query("SELECT dlock_release('lock')"),
		$no_memory, 'neighbour: it cannot hand on');
	open_memory();
	continue_process($waiter->{pid});
	is($waiter->answer, 't', 'neighbour: the next in line has the lock');

	close_new();
	like($second->query("SELECT dlock_release('lock')"),
		$no_memory, 'neighbour: it cannot leave');
	open_memory();
	is($third->query("SELECT dlock_release('lock')"),
		't', 'neighbour: the neighbour leaves');
	# with the same ticket
	$third->query("SELECT dlock_acquire('lock 2')");
	is( holders('lock'),
		"$second->{pid} $waiter->{pid}",
		'neighbour: and is in the list no more');
	finish($first, $second, $third, $waiter);
}

#
# A release that has failed: its repetition ends the hold, whichever it is.
#
foreach my $again ("SELECT dlock_release('lock')",
	'SELECT dlock_release_ticket(TICKET)',
	'SELECT dlock_release_all() = 1', 'DISCARD ALL')
{
	my ($client, $other) = map { session($node) } 1 .. 2;
	my $ticket = $client->query("SELECT dlock_acquire('lock', slots => 3)");

	grow($other);
	$other->query("SELECT dlock_acquire('lock', slots => 3)");
	close_new();
	like($client->query("SELECT dlock_release('lock')"),
		$no_memory, "$again: it could not leave");
	open_memory();
	like($client->query($again =~ s/TICKET/$ticket/r), qr/^t?$/, $again);
	is(holders('lock'), $other->{pid}, "$again: it has left");
	like($client->query("SELECT dlock_release('lock')"),
		qr/does not hold.*\bf$/s, "$again: and holds it no more");
	finish($client, $other);
}

#
# One that was the last to hold, and could not hand on, holds it no more.
#
{
	my $client = session($node);
	my $other = waiter();
	my $ticket;

	$client->query("SELECT dlock_acquire('lock')");
	grow($other);
	$ticket = $other->query("SELECT dlock_enqueue('lock', 'nobody')");
	close_new();
	like($client->query("SELECT dlock_release('lock')"),
		$no_memory, 'hand-over: fails');
	open_memory();
	is($other->query("SELECT dlock_wait($ticket)"),
		't', 'hand-over: the next in line has the lock');
	like($client->query("SELECT dlock_acquire('lock', timeout => '0.1 s')"),
		qr/ERROR:  55P03/, 'hand-over: who had it waits as others do');
	finish($client, $other);
}

#
# A rollback, and an exit that begins with one, each with more errors than
# PostgreSQL can have at once
#
# what the worker has still referred to goes with it
no_worker($admin);
foreach my $how ('rollback', 'exit')
{
	my $memory = 'SELECT memory_used FROM dlock_stats';
	my $before = $admin->query($memory);
	my $client = session($node);
	my $other = waiter();

	$client->query('BEGIN');
	$client->query(q{SELECT dlock_xact_acquire('lock ' || n)
		FROM generate_series(1, 8) AS n});
	grow($other);
	$other->query(q{CREATE TEMP TABLE next AS
		SELECT dlock_enqueue('lock ' || n, 'nobody') AS ticket
		FROM generate_series(1, 8) AS n});
	close_new();
	if ($how eq 'rollback')
	{
		like($client->query('ROLLBACK'),
			qr/WARNING:  42501: could not finish .*DETAIL:  $cannot/s,
			'rollback: a warning');
		is($client->query('SELECT 1'), '1', 'rollback: it is one');
	}
	else
	{
		$admin->query("SELECT pg_terminate_backend($client->{pid})");
		$client->quit;
		backends_gone($client->{pid});
	}
	open_memory();
	is($other->query('SELECT bool_and(dlock_wait(ticket)) FROM next'),
		't', "$how: the next in line have the locks");
	finish($client, $other);
	is($admin->query($memory), $before, "$how: nothing is freed twice");
}

#
# Behind a commit: the next in line, and the announcement that was posted before
#
{
	my $client = session($node);
	my $other = waiter();
	my $warning = qr/WARNING:  42501: could not finish .*DETAIL:  $cannot/s;
	my $long = 'x' x 200;
	my ($ticket, $lease, $worker, $log);

	$admin->query('CREATE TABLE t (n integer)');
	$client->query('BEGIN; INSERT INTO t VALUES (1)');
	$client->query("SELECT dlock_xact_acquire('$_')")
	  foreach 'lock 1', 'lock', 'lock 2';
	grow($other);
	$ticket = $other->query("SELECT dlock_enqueue('lock', 'nobody')");
	close_new();
	like($client->query('COMMIT'), $warning, 'commit: a warning');
	open_memory();
	is($admin->query('SELECT n FROM t'), '1', 'commit: it is one');
	is( $admin->query(
			q{SELECT count(*) FROM dlock_locks WHERE name LIKE 'lock _'}),
		'0',
		'commit: all else is given back');
	$client->quit;
	is($other->query("SELECT dlock_wait($ticket)"),
		't', 'commit: the next in line has the lock');
	$other->query('SELECT dlock_release_all()');

	# the worker has something to come for, and then it sends nothing
	$client = session($node);
	$lease = $admin->query("SELECT dlock_lease_open('1h')");
	$worker = freeze($admin);
	$admin->wait_for(q{SELECT count(*) = 0 FROM pg_stat_activity
		WHERE backend_type = 'dlock sender'});
	$client->query('BEGIN; INSERT INTO t VALUES (2)');
	$client->query("SELECT dlock_enqueue('lock 1')");
	grow($other);
	# as the name is long, so is what is to be sent
	$ticket = $other->query("SELECT dlock_enqueue('$long')");
	close_new();
	like($client->query('COMMIT'), $warning, 'announcement: a warning');
	is($admin->query('SELECT max(n) FROM t'), '2', 'announcement: a commit');

	$log = -s $node->logfile;
	thaw($worker);
	$node->wait_for_log($cannot, $log);
	open_memory();
	told($other, 'announcement: the other one is told',
		announcement('granted', $long, $ticket));
	$admin->query("SELECT dlock_lease_close($lease)");
	finish($client, $other);
	no_worker($admin);
}

# Each new segment is larger than those before: begin with small ones again.
$admin->quit;
$node->restart;
$admin = session($node);
$admin->query('SELECT count(*) FROM dlock_locks');

#
# The journal, for a ticket that is released, and for one whose lease has run out
#
{
	my ($holder, $other, $waiter) = map { session($node) } 1 .. 3;
	my $ttl = ample(2);
	my ($ticket, $log, $worker);

	$ticket = $holder->query("SELECT dlock_ttl_acquire('lock', '1h')");
	$holder->query("SELECT dlock_ttl_acquire('expiring', '$ttl s')");
	$waiter->start("SELECT dlock_acquire('expiring') > 0");
	$admin->until_waits($waiter);
	$worker = freeze($admin);
	grow($other);
	# the last in the journal
	$other->start("SELECT dlock_ttl_acquire('last', '1h') > 0");
	$admin->wait_for(
		q{SELECT count(*) = 1 FROM dlock_locks WHERE name = 'last' AND pid IS NULL});
	close_new();
	like($holder->query("SELECT dlock_release_ticket($ticket)"),
		$no_memory, 'journal: a release fails');
	$admin->wait_for(q{SELECT count(*) = 0 FROM dlock_locks
		WHERE name = 'expiring' AND granted});
	$log = -s $node->logfile;
	thaw($worker);
	$node->wait_for_log($cannot, $log);
	open_memory();
	is($waiter->answer, 't', 'journal: a lease runs out');
	$other->answer;
	is(tickets('lock'), '1', 'journal: what was not released is held');
	is($holder->query("SELECT dlock_release_ticket($ticket)"),
		't', 'journal: until it is');
	like($other->query("SELECT dlock_acquire('lock', timeout => '1min')"),
		qr/^\d+$/, 'journal: and handed on');
	$admin->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
	finish($holder, $other, $waiter);
	no_worker($admin);
}

#
# What an error breaks off, with nobody there who would look: a grant of what was
# enqueued, by a session or for a lease; the end of a lease; and that of a ticket
# which a guarded commit has kept.  The worker does the rest.
#
{
	my ($holder, $client, $other) = map { session($node) } 1 .. 3;
	my ($ticket, $next, $lease, $worker);

	foreach my $how ('session', 'lease')
	{
		$holder->query("SELECT dlock_acquire('lock')");
		grow($other);
		$ticket = $other->query($how eq 'session' ?
			  "SELECT dlock_enqueue('lock')" :
			  "SELECT dlock_ttl_enqueue('lock', '1h', dlock_channel())");
		close_new();
		like($holder->query("SELECT dlock_release('lock')"),
			$no_memory, "enqueued, $how: a release cannot hand on");
		open_memory();
		told($other, "enqueued, $how: the worker does",
			announcement('granted', 'lock', $ticket));
		$other->query("SELECT dlock_release_ticket($ticket)");
	}

	$lease = $holder->query("SELECT dlock_lease_open('1h')");
	$holder->query("SELECT dlock_lease_acquire('lock', $lease)");
	grow($other);
	$other->query("SELECT dlock_lease_acquire('lock 2', $lease)");
	close_new();
	like($holder->query("SELECT dlock_lease_close($lease)"),
		$no_memory, 'close: it cannot end what the lease has');
	open_memory();
	like($client->query("SELECT dlock_acquire('$_', timeout => '1min')"),
		qr/^\d+$/, "close: the worker does, $_")
	  foreach 'lock', 'lock 2';

	$holder->query('SET synchronous_commit = on');
	$ticket = $holder->query("SELECT dlock_ttl_acquire('kept', '1h')");
	commits_hang($node, 1);
	$holder->query('BEGIN; INSERT INTO t VALUES (3)');
	$holder->query("SELECT dlock_guard('kept', $ticket)");
	$holder->start('COMMIT');
	poll('the commit hangs', sub { hangs($node, $holder) });
	$admin->query("SELECT dlock_release_ticket($ticket)");
	$next = $other->query("SELECT dlock_enqueue('kept')");
	$admin->wait_for("SELECT journal_lag = '0' FROM dlock_stats");
	$worker = freeze($admin);
	grow($other);
	$client->start("SELECT dlock_ttl_acquire('last', '1h') > 0");
	$admin->wait_for(
		q{SELECT count(*) = 1 FROM dlock_locks WHERE name = 'last' AND pid IS NULL});
	close_new();
	commits_hang($node, 0);
	like($holder->answer, qr/WARNING:  42501: could not finish/,
		'pin: a commit cannot end what it has kept');
	open_memory();
	thaw($worker);
	told($other, 'pin: the worker does',
		announcement('granted', 'kept', $next));
	$client->answer;
	$admin->query('SELECT dlock_reset()');
	finish($holder, $client, $other);
	no_worker($admin);
}

$admin->quit;
$node->stop;
done_testing();
