# When a lease's ticket ends, held or waiting, no ticket behind it is granted
# before the removal of its row is in the WAL.  So no part of the WAL that
# survives a crash has two holders, or a ticket that is granted after a greater
# number.  Here the worker, which writes the removal, is stopped.  Then the
# ended ticket counts as gone at once, but its lock is not handed over, however
# the ticket ends and whatever waits.  After a crash, the old holder holds.
#
# What would break it: a release, a close, a forced release or an expiry that
# removes a ticket with a row from its lock without the worker; a new request
# that gets a lock that waits for the worker, or that fits beside the leaving
# holder because of other slots; a grant that is announced or answered before
# it is written, or before the removal is flushed; a successor's row that is
# not written with that removal, or that stays when the successor has gone.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

# Only sessions that wait for a flush flush the WAL.
my $node = new_server(
	'main',
	conf => q{
deadlock_timeout = 1h
wal_writer_delay = 10s
autovacuum = off
});
my $admin;
my $client;
my $stopped;

sub start_sessions
{
	$admin = session($node);
	$client = session($node);
	return;
}

# A crash also ends these sessions.
sub crash
{
	kill_server($node);
	$_->vanish foreach @_, $client, $admin;
	$node->start;
	start_sessions();
	return;
}

sub rows
{
	my ($name) = @_;

	return $admin->query(
		"SELECT ticket, granted, scope FROM dlock_locks "
		  . "WHERE name = '$name' ORDER BY ticket");
}

sub is_current
{
	my ($name, $ticket) = @_;

	return $admin->query("SELECT dlock_check('$name', $ticket)");
}

sub crash_and_nobody_holds
{
	my ($name, $ticket, @sessions) = @_;

	crash(@sessions);
	is(rows($name), '', "$name: after a crash no ticket holds");
	is(is_current($name, $ticket), 'f', "$name: the fence is not current");
	return;
}

# Let a lease hold a lock.  Return the lease and its ticket.
sub holder
{
	my ($name, @options) = @_;
	my $lease = $client->query("SELECT dlock_lease_open('1 h')");
	my $ticket = $client->query(
		'SELECT dlock_lease_acquire('
		  . join(', ', "'$name'", $lease, @options) . ')');

	die "no ticket: $ticket" unless $ticket =~ /^\d+$/;
	return ($lease, $ticket);
}

# Every way of ending a ticket, and every kind of waiter

my %endings = (
	release => sub { "SELECT dlock_release_ticket($_[1])" },
	'release at commit' =>
	  sub { "BEGIN; SELECT dlock_release_at_commit($_[1]); COMMIT" },
	close => sub { "SELECT dlock_lease_close($_[0]) > 0" },
	'forced release' => sub { "SELECT dlock_force_release($_[1])" });
my %waiters = (
	session => q{SELECT dlock_acquire('%s')},
	transaction => q{BEGIN; SELECT dlock_xact_acquire('%s')},
	ttl => q{SELECT dlock_ttl_acquire('%s', '1 h')},
	'of several' => q{SELECT (dlock_acquire_all('{%s}'))[1]},
	'without snapshot' => q{CALL dlock_acquire_nosnapshot('%s')});

start_sessions();
foreach my $ending (sort keys %endings)
{
	foreach my $kind (sort keys %waiters)
	{
		my $name = "$ending $kind";
		my ($lease, $ticket) = holder($name);
		my $waiter = session($node);

		$waiter->start(sprintf($waiters{$kind}, $name));
		$admin->until_waits($waiter);
		$stopped = freeze($admin);
		my $queue = rows($name);
		$queue =~ s/^$ticket\|t\|lease\n//;
		# a release at commit has one more answer, which is empty
		like($client->query($endings{$ending}->($lease, $ticket)),
			qr/\A(t|)\z/, "$name: done");
		is(is_current($name, $ticket), 'f', "$name: the fence is not current");
		is(rows($name), $queue, "$name: no ticket holds, and the waiter waits");
		is($admin->query("SELECT dlock_try_acquire('$name') IS NULL"),
			't', "$name: no other session gets it");
		is($admin->query("SELECT dlock_fence('$name') IS NULL"),
			't', "$name: there is no fence");
		ok(!$waiter->answered, "$name: no answer");
		thaw($stopped);
		cmp_ok($waiter->answer, '>', $ticket, "$name: granted when the worker goes on");
		$waiter->quit;
		$client->query("SELECT dlock_lease_close($lease)")
		  if $ending ne 'close';
	}
}

# An enqueued ticket is granted and announced when the worker goes on.
{
	my ($lease, $ticket) = holder('enqueued');
	my ($next) = $client->query('LISTEN c; '
		  . "SELECT dlock_ttl_enqueue('enqueued', '1 h', 'c')");

	$stopped = freeze($admin);
	$client->query("SELECT dlock_release_ticket($ticket)");
	is(rows('enqueued'), "$next|f|lease", 'enqueued: waits');
	is($client->query("SELECT dlock_wait($next, '0')"),
		'f', 'enqueued: dlock_wait() says so');
	thaw($stopped);
	is($client->query("SELECT dlock_wait($next)"), 't', 'enqueued: granted');
	is( ($client->announcements(1))[0],
		qq({"event":"granted","lock":"enqueued","ticket":$next}),
		'enqueued: announced');
	$client->query("SELECT dlock_lease_close($_)") foreach $lease, $next;
}

# When a waiter gives up, no ticket behind it is granted before it.
foreach my $ending (sort keys %endings)
{
	my $name = "$ending of a waiter";
	my $holder = session($node);
	my $waiter = session($node);

	$holder->query("SELECT dlock_acquire('$name')");
	my $lease = $client->query("SELECT dlock_lease_open('1 h')");
	my $ticket = $client->query("SELECT dlock_lease_enqueue('$name', $lease)");
	$waiter->start("SELECT dlock_acquire('$name')");
	$admin->until_waits($waiter);
	$stopped = freeze($admin);
	like($client->query($endings{$ending}->($lease, $ticket)),
		qr/\A(t|)\z/, "$name: done");
	like($client->query("SELECT dlock_wait($ticket, '0')"),
		qr/55L01/, "$name: the ticket is gone");
	$holder->query('SELECT dlock_release_all()');
	like(rows($name), qr/\A\d+\|f\|session\z/,
		"$name: the waiter behind it still waits");
	is($admin->query("SELECT dlock_try_acquire('$name') IS NULL"),
		't', "$name: no other session gets it");
	ok(!$waiter->answered, "$name: no answer");
	thaw($stopped);
	cmp_ok($waiter->answer, '>', $ticket, "$name: granted when the worker goes on");
	$_->quit foreach $holder, $waiter;
	$client->query("SELECT dlock_lease_close($lease)") if $ending ne 'close';
}

# The same without a ticket behind the waiter, and without a holder: a later
# request must queue.
{
	my $holder = session($node);
	my $later = session($node);

	$holder->query("SELECT dlock_acquire('alone')");
	my $ticket = $client->query("SELECT dlock_ttl_enqueue('alone', '1 h')");
	$stopped = freeze($admin);
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', 'alone in the queue: released');
	$holder->query('SELECT dlock_release_all()');
	is(rows('alone'), '', 'alone in the queue: no ticket holds or waits');
	is($admin->query("SELECT dlock_try_acquire('alone', '10 ms') IS NULL"),
		't', 'alone in the queue: no session gets the lock');
	$later->start("SELECT dlock_acquire('alone')");
	$admin->wait_for("SELECT count(*) = 1 FROM dlock_locks('alone')");
	like(rows('alone'), qr/\A\d+\|f\|session\z/,
		'alone in the queue: a later request waits');
	thaw($stopped);
	cmp_ok($later->answer, '>', $ticket, 'alone in the queue: granted when the worker goes on');
	$_->quit foreach $holder, $later;
}

# An expired lease is gone in every answer, but its lock is not handed over.
# Its ttl begins at the end of a session, when the worker is stopped.
{
	my $keeper = session($node);
	my $lease =
	  $keeper->query("SELECT dlock_lease_open('100 ms', attach => true)");
	my $ticket =
	  $client->query("SELECT dlock_lease_acquire('expired', $lease)");
	my $waiter = session($node);

	$waiter->start("SELECT dlock_acquire('expired')");
	$admin->until_waits($waiter);
	$stopped = freeze($admin);
	$keeper->quit;
	$admin->wait_for("SELECT NOT dlock_check('expired', $ticket)");
	like(rows('expired'), qr/\A\d+\|f\|session\z/, 'expired: the waiter waits');
	is($client->query("SELECT dlock_renew($lease) IS NULL"),
		't', 'expired: cannot be renewed');
	is($admin->query("SELECT dlock_try_acquire('expired') IS NULL"),
		't', 'expired: no other session gets it');
	thaw($stopped);
	cmp_ok($waiter->answer, '>', $ticket, 'expired: granted when the worker goes on');
	$waiter->quit;
}

# While a holder is leaving, the lock already has the slots or the mode of
# later requests.  Still, no ticket is granted beside that holder: neither a
# waiter, when another waiter gives up, nor a later request.
my %other_slots = (
	'exclusive, then slots' => [ 'slots => 5' ],
	'shared, then slots' => [ 'slots => 5', 'shared => true' ],
	'slots, then shared' => [ 'shared => true', 'slots => 3' ],
	'slots, then other slots' => [ 'slots => 5', 'slots => 3' ]);

# Let two sessions wait for a lock, one behind the other.
sub start_two
{
	my ($name, $options) = @_;
	my @waiters = map { session($node) } 1, 2;

	foreach my $waiter (@waiters)
	{
		$waiter->start("SELECT dlock_acquire('$name', $options)");
		$admin->until_waits($waiter);
	}
	return @waiters;
}

sub cancel
{
	my ($waiter) = @_;

	$admin->query("SELECT pg_cancel_backend($waiter->{pid})");
	like($waiter->answer, qr/57014/, 'the first waiter gives up');
	$waiter->quit;
	return;
}

foreach my $name (sort keys %other_slots)
{
	my ($after, @before) = @{ $other_slots{$name} };
	my ($lease, $ticket) = holder($name, @before);

	$stopped = freeze($admin);
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', "$name: released");
	my ($first, $second) = start_two($name, $after);
	cancel($second);
	like(rows($name), qr/\A\d+\|f\|session\z/, "$name: the other one waits");
	cancel($first);
	is( $client->query("SELECT dlock_try_acquire('$name', $after) IS NULL"),
		't', "$name: a later request does not get it");
	thaw($stopped);
	cmp_ok($client->query("SELECT dlock_acquire('$name', $after)"),
		'>', $ticket, "$name: free when the worker goes on");
	$client->query("SELECT dlock_lease_close($lease)");
}

# The same if the old lease has expired.  Its delay, which the worker has not
# begun yet, closes the lock until the lock is opened by force, before or after
# the delay has begun.
foreach my $when ('before', 'later')
{
	my $name = "delayed, opened $when";
	my $keeper = session($node);
	my $lease = $keeper->query(
		"SELECT dlock_lease_open('100 ms', attach => true, delay => '1 h')");
	my $ticket =
	  $client->query("SELECT dlock_lease_acquire('$name', $lease)");
	my $delay_begins = sub {
		thaw($stopped);
		$admin->wait_for("SELECT count(*) = 0 FROM dlock_leases "
			  . "WHERE lease = $lease AND held > 0");
	};

	$stopped = freeze($admin);
	$keeper->quit;
	$admin->wait_for("SELECT NOT dlock_check('$name', $ticket)");
	like($client->query("SELECT dlock_try_acquire('$name', slots => 5)"),
		qr/55000/, "$name: in use");
	my ($first, $second) = start_two($name, 'shared => true');
	cancel($second);
	$delay_begins->() if $when eq 'later';
	is( $admin->query(
			"SELECT remaining > '1 min' FROM dlock_locks WHERE ticket = $ticket"),
		't', "$name: for a while");
	like(rows($name), qr/\A$ticket\|f\|lease\n\d+\|f\|session\z/,
		"$name: closed to all");
	is($admin->query("SELECT dlock_force_release($ticket)"),
		't', "$name: opened");
	$delay_begins->() if $when eq 'before';
	cmp_ok($first->answer, '>', $ticket, "$name: granted when the worker goes on");
	$first->quit;
}

# After a crash before the removal is written, the old holder is the only
# holder, and no session waits.
{
	my ($lease, $ticket) = holder('crash');
	my $next = $client->query("SELECT dlock_ttl_enqueue('crash', '1 h', 'c')");
	my ($other_lease, $other) = holder('with a session');
	my ($third_lease, $third) = holder('with slots');
	my $waiter = session($node);

	$waiter->start("SELECT dlock_acquire('with a session')");
	$admin->until_waits($waiter);
	$stopped = freeze($admin);
	is($client->query("SELECT dlock_release_ticket($_)"), 't', 'released')
	  foreach $ticket, $other, $third;
	my ($first, $second) = start_two('with slots', 'slots => 5');
	cancel($second);
	ok(!$_->answered, 'crash: no answer') foreach $waiter, $first;
	crash();
	unlike($_->answer, qr/^\d+$/m, 'crash: never granted')
	  foreach $waiter, $first;
	$_->vanish foreach $waiter, $first;

	is(rows('crash'), "$ticket|t|lease\n$next|f|lease",
		'after the crash: the holder holds, and the waiter waits');
	is(rows('with a session'), "$other|t|lease",
		'after the crash: holder and no waiter');
	is(rows('with slots'), "$third|t|lease",
		'after the crash: the same beside other slots');
	is(is_current('crash', $ticket), 't', 'after the crash: fence is current');
	is(is_current('crash', $next), 'f', 'after the crash: no successor');
	is($client->query("SELECT dlock_try_acquire('$_') IS NULL"),
		't', 'after the crash: no other session gets it')
	  foreach 'crash', 'with a session';

	# In reverse: a crash does not undo a grant that the successor knows of.
	$client->query("SELECT dlock_release_ticket($ticket)");
	is($client->query("SELECT dlock_wait($next)"), 't', 'granted');
	crash();
	is(rows('crash'), "$next|t|lease", 'after another crash: successor holds');
	is(is_current('crash', $ticket), 'f',
		'after another crash: the old fence is not current');
}

# When a lease has released, its successor's row and the removal of the
# holder's row are one transaction, and the grant counts when it is written.
my %heirs = (
	'a lease' => sub { "SELECT dlock_lease_acquire('$_[0]', $_[1])" },
	'a ttl' => sub { "SELECT dlock_ttl_acquire('$_[0]', '1 h')" });

# Release a lease's ticket while the worker is stopped, and request another
# ticket then.
sub start_heir
{
	my ($name, $kind) = @_;
	my ($lease, $ticket) = holder($name);
	my $other = $client->query("SELECT dlock_lease_open('1 h')");
	my $heir = session($node);

	$stopped = freeze($admin);
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', "$name: released");
	$heir->start($heirs{$kind}->($name, $other));
	$admin->wait_for("SELECT count(*) = 1 FROM dlock_locks('$name')");
	return ($heir, $ticket, $other);
}

foreach my $kind (sort keys %heirs)
{
	my $name = "heir: $kind";
	my ($heir, $ticket, $other) = start_heir($name, $kind);

	like(rows($name), qr/\A\d+\|f\|lease\z/, "$name: waits, and no ticket holds");
	is($admin->query("SELECT dlock_fence('$name') IS NULL"),
		't', "$name: there is no fence");
	# This waiter is not the successor, because another waits before it.
	my $behind = session($node);
	$behind->start("SELECT dlock_ttl_acquire('$name', '1 h')");
	$admin->wait_for("SELECT count(*) = 2 FROM dlock_locks('$name')");
	my $before = $admin->query('SELECT txid_current()');
	thaw($stopped);
	my $fence = $heir->answer;
	cmp_ok($fence, '>', $ticket, "$name: granted when the worker goes on");
	is( $admin->query("SELECT txid_current() - $before"),
		2, "$name: by one transaction");
	is($admin->query("SELECT count(*) FROM dlock_queue WHERE name = '$name'"),
		'1', "$name: the next request has no row");
	crash($heir, $behind);
	is(rows($name), "$fence|t|lease", "$name: holds after a crash, and alone");
	is(is_current($name, $ticket), 'f', "$name: the old fence is not current");
	is($client->query("SELECT dlock_release_ticket($fence)"),
		't', "$name: released again");
}

# A crash before that transaction restores the holder, but not the successor.
{
	my ($heir, $ticket) = start_heir('heir and crash', 'a lease');

	crash($heir);
	unlike($heir->answer, qr/^\d+$/m, 'heir and crash: never granted');
	is( rows('heir and crash'),
		"$ticket|t|lease",
		'heir and crash: the old holder holds, and no session waits');
}

# A successor gives up, or its session or lease ends.  Then no ticket holds the
# lock until the removal is written, and then the next ticket does.
my %ends = (
	'cancel' => sub { "SELECT pg_cancel_backend($_[0]{pid})" },
	'terminate' => sub { "SELECT pg_terminate_backend($_[0]{pid}, 0)" },
	'close' => sub { "SELECT dlock_lease_close($_[1]) = 1" });

foreach my $end (sort keys %ends)
{
	my $name = "heir: $end";
	my ($heir, $ticket, $other) = start_heir($name, 'a lease');

	is($client->query($ends{$end}->($heir, $other)), 't',
		"$name: done");
	$admin->wait_for("SELECT count(*) = 0 FROM dlock_locks('$name')");
	is($admin->query("SELECT dlock_try_acquire('$name') IS NULL"),
		't', "$name: no session gets it yet")
	  if $end eq 'cancel';
	thaw($stopped);
	unlike($heir->answer, qr/^\d+$/m, "$name: not granted");
	$heir->vanish;
	cmp_ok($client->query("SELECT dlock_acquire('$name')"),
		'>', $ticket, "$name: free when the worker goes on");
	$client->query('SELECT dlock_release_all()');
}

# A request whose ticket is ended by force is repeated, except for a lease with
# a single ticket.
foreach my $kind (sort keys %heirs)
{
	my $name = "heir by force: $kind";
	my ($heir, $ticket) = start_heir($name, $kind);

	is( $client->query(
			"SELECT dlock_force_release(ticket) FROM dlock_locks('$name')"),
		't',
		"$name: done");
	if ($kind eq 'a ttl')
	{
		like($heir->answer, qr/55L01/, "$name: lost");
		thaw($stopped);
	}
	else
	{
		# The worker would wake the session, but is stopped.
		$admin->query("SELECT pg_log_backend_memory_contexts($heir->{pid})");
		$admin->wait_for("SELECT count(*) = 1 FROM dlock_locks('$name')");
		thaw($stopped);
		cmp_ok($heir->answer, '>', $ticket + 1, "$name: granted when the worker goes on");
		$client->query(
			"SELECT dlock_force_release(ticket) FROM dlock_locks('$name')");
	}
	cmp_ok($client->query("SELECT dlock_acquire('$name')"),
		'>', $ticket, "$name: free when the worker goes on");
	$client->query('SELECT dlock_release_all()');
	$heir->quit;
}

# A session's grant writes nothing.  Still, a crash does not restore the
# previous holder, even if the session did not wait for its synchronous_commit.
foreach my $kind ('waits', 'comes later')
{
	my ($lease, $ticket) = holder($kind);
	my $successor = session($node);

	$successor->query('SET synchronous_commit = off');
	if ($kind eq 'waits')
	{
		$successor->start("SELECT dlock_acquire('$kind')");
		$admin->until_waits($successor);
	}
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', "$kind: released");
	if ($kind eq 'comes later')
	{
		$successor->start("SELECT dlock_acquire('$kind')");
	}
	cmp_ok($successor->answer, '>', $ticket, "$kind: granted");
	crash_and_nobody_holds($kind, $ticket, $successor);
}

# Nor does a crash restore the holder if a successor was enqueued, and a
# session has learned of the grant in any way but by waiting.  In a
# transaction, no announcement arrives.  A counter does not show the holder.
my %tells = (
	view => sub { "SELECT granted FROM dlock_locks WHERE ticket = $_[1]" },
	guard => sub { "SELECT 't' FROM dlock_guard('$_[0]', $_[1])" },
	'error' => sub { "SELECT dlock_guard('$_[0]', 1)" },
	'blocking pids' => sub { "SELECT dlock_blocking_pids($_[2]) > '{0}'" },
	acquire => sub { "SELECT dlock_acquire('$_[0]') = $_[1]" },
	wait => sub { "SELECT dlock_wait($_[1], '0')" },
	check => sub { "SELECT dlock_check('$_[0]', $_[1])" },
	fence => sub { "SELECT dlock_fence('$_[0]') = $_[1]" },
	'is held' => sub { "SELECT dlock_is_held('$_[0]')" },
	'enqueue again' => sub { "SELECT dlock_enqueue('$_[0]') = $_[1]" },
	downgrade => sub { "SELECT dlock_downgrade($_[1])" },
	announcement => undef);

# Release a ticket, and wait until the lock is granted, without a query about
# the holder.  A try waits at most for the grant in progress.  The view
# dlock_stats is not read, because reading it flushes.
sub hand_over
{
	my ($name, $ticket) = @_;
	my $count = $admin->query('SELECT acquired FROM dlock_counters()');

	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', "$name: released");
	$admin->wait_for("SELECT acquired > $count FROM dlock_counters()");
	is($admin->query("SELECT dlock_try_acquire('$name') IS NULL"),
		't', "$name: the lock is not free");
	return;
}

foreach my $name (sort keys %tells)
{
	my ($lease, $ticket) = holder($name);
	my $successor = session($node);
	my $waiter = session($node);
	my $next;

	$successor->query('BEGIN') if $tells{$name};
	$next = $successor->query("SELECT dlock_enqueue('$name')");
	$waiter->start("SELECT dlock_acquire('$name')");
	$admin->until_waits($waiter);
	hand_over($name, $ticket);
	if ($tells{$name})
	{
		my $expected = $name eq 'error' ? qr/newer fence $next\./ : qr/^t$/;

		like(
			$successor->query($tells{$name}->($name, $next, $waiter->{pid})),
			$expected, "$name: tells");
	}
	else
	{
		is( ($successor->announcements(1))[0],
			qq({"event":"granted","lock":"$name","ticket":$next}),
			"$name: tells");
	}
	crash_and_nobody_holds($name, $ticket, $successor, $waiter);
}

# Nor does a crash restore the holder if dlock_leases has shown the next
# holder, whose lease's row is in the WAL before, but maybe not its grant.
{
	my ($lease, $ticket) = holder('leases');
	my $successor = session($node);
	my $other = $client->query("SELECT dlock_lease_open('1 h')");
	my $next;

	$successor->query('SET synchronous_commit = off; BEGIN');
	$next =
	  $successor->query("SELECT dlock_lease_enqueue('leases', $other, 'c')");
	$client->query("SELECT dlock_lease_open('1 h')");
	hand_over('leases', $ticket);
	is($admin->query("SELECT held FROM dlock_leases WHERE lease = $other"),
		'1', 'leases: the view shows the holder');
	crash($successor);
	is(rows('leases'), "$next|t|lease", 'leases: the successor is the only holder');
	is(is_current('leases', $ticket), 'f', 'leases: the old fence is not current');
}

# Nor does a crash restore an abandoned place in the queue.
{
	my $holder = session($node);
	my $successor = session($node);

	$holder->query("SELECT dlock_acquire('given up')");
	my $ticket = $client->query("SELECT dlock_ttl_enqueue('given up', '1 h')");
	$successor->start("SELECT dlock_acquire('given up')");
	$admin->until_waits($successor);
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', 'given up: released');
	$holder->query('SELECT dlock_release_all()');
	cmp_ok($successor->answer, '>', $ticket, 'given up: granted');
	crash($holder, $successor);
	is(rows('given up'), '', 'given up: after a crash no session waits');
}

$_->quit foreach $admin, $client;
done_testing();
