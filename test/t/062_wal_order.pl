# Nobody is granted a lock after a lease's ticket before the removal of that
# ticket's row is in the WAL, whether the ticket held or still waited.  So
# whatever part of the WAL survives a crash, it never has two holders, nor a
# ticket that is granted after a greater number.  Here the worker, which writes it, is stopped: nothing
# is handed on meanwhile, however the ticket ends and whoever waits, though it
# counts as gone at once; and a crash finds the old holder, and no other.
#
# What would break it: a release, a close, a forced release or an expiry that
# takes a ticket with a row out of its lock by itself; a new request that passes
# by a lock which is only waiting for the worker; a grant that is announced or
# answered before it is written.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib $FindBin::RealBin;
use DlockTest;
use DlockWorker;
use Test::More;

# Nobody but who waits for it flushes the WAL.
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

# A lease that holds a lock, with its ticket
sub holder
{
	my ($name, $options) = @_;
	my $lease =
	  $client->query("SELECT dlock_lease_open('1 h'" . ($options // '') . ')');
	my $ticket =
	  $client->query("SELECT dlock_lease_acquire('$name', $lease)");

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
	transaction => q{SELECT dlock_xact_acquire('%s')},
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
		# a release at commit has an empty answer more
		like($client->query($endings{$ending}->($lease, $ticket)),
			qr/\A(t|)\z/, "$name: done");
		is(is_current($name, $ticket), 'f', "$name: the fence is not current");
		is(rows($name), $queue, "$name: nobody holds, and the waiter waits");
		is($admin->query("SELECT dlock_try_acquire('$name') IS NULL"),
			't', "$name: nobody else gets it");
		is($admin->query("SELECT dlock_fence('$name') IS NULL"),
			't', "$name: there is no fence");
		ok(!$waiter->answered, "$name: no answer");
		thaw($stopped);
		cmp_ok($waiter->answer, '>', $ticket, "$name: granted then");
		$waiter->quit;
		$client->query("SELECT dlock_lease_close($lease)")
		  if $ending ne 'close';
	}
}

# Who is enqueued, and the announcement
{
	my ($lease, $ticket) = holder('enqueued');
	my ($next) = $client->query('LISTEN c; '
		  . "SELECT dlock_ttl_enqueue('enqueued', '1 h', 'c')");

	$stopped = freeze($admin);
	$client->query("SELECT dlock_release_ticket($ticket)");
	is(rows('enqueued'), "$next|f|lease", 'enqueued: waits');
	is($client->query("SELECT dlock_wait($next, '0')"),
		'f', 'enqueued: told so');
	thaw($stopped);
	is($client->query("SELECT dlock_wait($next)"), 't', 'enqueued: granted');
	is( ($client->announcements(1))[0],
		qq({"event":"granted","lock":"enqueued","ticket":$next}),
		'enqueued: announced');
	$client->query("SELECT dlock_lease_close($_)") foreach $lease, $next;
}

# Who waits, and gives up: nobody is granted the lock past that place.
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
		"$name: who waits behind it waits still");
	is($admin->query("SELECT dlock_try_acquire('$name') IS NULL"),
		't', "$name: nobody else gets it");
	ok(!$waiter->answered, "$name: no answer");
	thaw($stopped);
	cmp_ok($waiter->answer, '>', $ticket, "$name: granted then");
	$_->quit foreach $holder, $waiter;
	$client->query("SELECT dlock_lease_close($lease)") if $ending ne 'close';
}

# A lease that runs out: gone for every question, and nothing handed on.  Its ttl
# begins at the end of a session, when the worker is stopped.
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
		't', 'expired: nobody else gets it');
	thaw($stopped);
	cmp_ok($waiter->answer, '>', $ticket, 'expired: granted then');
	$waiter->quit;
}

# A crash while the removal is not written: the old holder holds, nobody else
# does, and no waiter's session is there any more.
{
	my ($lease, $ticket) = holder('crash');
	my $next = $client->query("SELECT dlock_ttl_enqueue('crash', '1 h', 'c')");
	my ($other_lease, $other) = holder('with a session');
	my $waiter = session($node);

	$waiter->start("SELECT dlock_acquire('with a session')");
	$admin->until_waits($waiter);
	$stopped = freeze($admin);
	is($client->query("SELECT dlock_release_ticket($_)"), 't', 'released')
	  foreach $ticket, $other;
	ok(!$waiter->answered, 'crash: no answer');
	kill_server($node);
	unlike($waiter->answer, qr/^\d+$/m, 'crash: never granted');
	$_->vanish foreach $waiter, $client, $admin;
	$node->start;
	start_sessions();

	is(rows('crash'), "$ticket|t|lease\n$next|f|lease",
		'after the crash: who held holds, and who waited waits');
	is(rows('with a session'), "$other|t|lease",
		'after the crash: holder and no waiter');
	is(is_current('crash', $ticket), 't', 'after the crash: fence is current');
	is(is_current('crash', $next), 'f', 'after the crash: no successor');
	is($client->query("SELECT dlock_try_acquire('$_') IS NULL"),
		't', 'after the crash: nobody else gets it')
	  foreach 'crash', 'with a session';

	# And the other way round: once the successor knows, it stays so.
	$client->query("SELECT dlock_release_ticket($ticket)");
	is($client->query("SELECT dlock_wait($next)"), 't', 'granted');
	kill_server($node);
	$_->vanish foreach $client, $admin;
	$node->start;
	start_sessions();
	is(rows('crash'), "$next|t|lease", 'after another crash: successor holds');
	is(is_current('crash', $ticket), 'f',
		'after another crash: the fence before is not current');
}

# A session writes nothing of its grant.  All the same, what it has superseded
# does not come back, even if it did not wait for its synchronous_commit.
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
	kill_server($node);
	$_->vanish foreach $successor, $client, $admin;
	$node->start;
	start_sessions();
	is(rows($kind), '', "$kind: after a crash nobody holds");
	is(is_current($kind, $ticket), 'f', "$kind: nor is the fence current");
}

# The same of a place in the queue that was given up.
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
	kill_server($node);
	$_->vanish foreach $holder, $successor, $client, $admin;
	$node->start;
	start_sessions();
	is(rows('given up'), '', 'given up: after a crash nobody waits');
}

$_->quit foreach $admin, $client;
done_testing();
