# A repeated request, by an acquire or an enqueue, gets the ticket that it
# already has.  This holds with any number of other tickets, before and after a
# crash, and until the ticket has ended.  No other request gets it.  Each of
# two equal calls can fail without harm to the other.  If an enqueue is
# canceled while its ticket is made durable, the announcement is unchanged, and
# a waiting session keeps the ticket.  An enqueue during the grant to a waiting
# session gets that ticket.
#
# What would break it: a request whose hash differs from its repetition's, or
# is not computed again when the tables are loaded; a ticket that is found
# although it has ended, or not found because another has the same request or
# hash; an announcement that goes to the second client before its call has
# succeeded; a ticket that ends with the session that waited for it, although
# another client has the ticket; memory that is freed with that session.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main',
	conf => "synchronous_commit = local\n"
	  . "wal_level = replica\nmax_wal_senders = 1\n"
	  . 'deadlock_timeout = 10min');
my $admin = session($node);

sub locks
{
	return $admin->query('SELECT ticket, granted, channel, pid IS NULL '
		  . "FROM dlock_locks WHERE name = 'lock' AND scope = 'lease' "
		  . 'ORDER BY ticket');
}

# Start a call that waits for a standby, which does not exist.
sub start_hanging
{
	my ($session, $call) = @_;

	commits_hang($node, 1);
	$session->start("SET synchronous_commit = on; SELECT $call");
	poll('the call waits for a standby', sub { hangs($node, $session) });
	return;
}

sub cancel
{
	my ($session) = @_;

	$admin->query("SELECT pg_cancel_backend($session->{pid})");
	like($session->answer, qr/57014/, 'canceled');
	commits_hang($node, 0);
	return;
}

sub finish
{
	$_->quit foreach @_;
	$admin->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	return;
}

#
# An enqueue is repeated for another channel, with and without a cancel.
#
sub enqueue_twice
{
	my ($holder, $first, $second) = map { session($node) } 1 .. 3;
	my $lease = $admin->query("SELECT dlock_lease_open('1h')");
	my $enqueue = "dlock_lease_enqueue('lock', $lease, '%s')";
	my $ticket;

	$first->query('LISTEN c1');
	$second->query('LISTEN c2');
	$holder->query("SELECT dlock_acquire('lock')");
	$ticket = $first->query(sprintf "SELECT $enqueue", 'c1');
	start_hanging($second, sprintf $enqueue, 'c2');
	return ($holder, $first, $second, $ticket);
}

foreach my $canceled (1, 0)
{
	my ($holder, $first, $second, $ticket) = enqueue_twice();

	is(locks(), "$ticket|f|c1|t", 'the channel is unchanged before the call has succeeded');
	if ($canceled)
	{
		cancel($second);
	}
	else
	{
		commits_hang($node, 0);
		is($second->answer, $ticket, 'the same ticket');
	}
	is(locks(), "$ticket|f|" . ($canceled ? 'c1' : 'c2') . '|t',
		'the ticket has one channel');
	$holder->query("SELECT dlock_release('lock')");
	told($canceled ? $first : $second,
		'the grant is announced', announcement('granted', 'lock', $ticket));
	is_now($admin,
		"SELECT channel FROM dlock_queue WHERE ticket = $ticket",
		$canceled ? 'c1' : 'c2',
		'the row has the channel');
	finish($holder, $first, $second);
}

# The call returns when its channel would survive a crash.
{
	my ($holder, $first, $second) = map { session($node) } 1 .. 3;
	my $lease = $admin->query("SELECT dlock_lease_open('1h')");
	my $enqueue = "SELECT dlock_lease_enqueue('lock', $lease, '%s')";
	my ($ticket, $worker);

	$holder->query("SELECT dlock_acquire('lock')");
	$ticket = $first->query(sprintf $enqueue, 'c1');
	$worker = freeze($admin);
	$second->start(sprintf $enqueue, 'c2');
	poll('the call answers or waits',
		sub {
			$second->answered || $admin->query(
				"SELECT wait_event = 'Extension' FROM pg_stat_activity "
				  . "WHERE pid = $second->{pid}") eq 't';
		});
	ok(!$second->answered, 'the call waits for the row');
	thaw($worker);
	is($second->answer, $ticket, 'the call returns when the row is written');
	$node->kill9;
	$_->quit foreach $admin, $holder, $first, $second;
	start_again($node);
	$admin = session($node);
	is(locks(), "$ticket|t|c2|t", 'the channel has survived a crash');
	finish();
}

# If the ticket is granted between the two requests, both are told.
{
	my ($holder, $first, $second, $ticket) = enqueue_twice();

	$holder->query("SELECT dlock_release('lock')");
	told($first, 'the first is told',
		announcement('granted', 'lock', $ticket));
	commits_hang($node, 0);
	is($second->answer, $ticket, 'the same ticket');
	told($second, 'the second is told', announcement('granted', 'lock', $ticket));
	finish($holder, $first, $second);
}

#
# A session waits with a ttl, and another client enqueues the same request.
#
my $acquire = "dlock_ttl_acquire('lock', '1h', owner => 'me')";
my $enqueue = "dlock_ttl_enqueue('lock', '1h', 'c2', owner => 'me')";

# If the enqueue fails, the session still waits, and is granted the ticket.  If
# the session fails, too, nothing is left.
foreach my $too (0, 1)
{
	my ($holder, $waiter, $client) = map { session($node) } 1 .. 3;
	my $ticket;

	$holder->query("SELECT dlock_acquire('lock')");
	$waiter->start("SELECT $acquire");
	$admin->until_waits($waiter);
	($ticket) = split /\|/, locks();
	start_hanging($client, $enqueue);
	is(locks(), "$ticket|f||t", 'the ticket belongs to the lease');
	cancel($client);
	is(locks(), "$ticket|f||t", 'the ticket stays for the waiting session');
	if ($too)
	{
		$admin->query("SELECT pg_cancel_backend($waiter->{pid})");
		like($waiter->answer, qr/57014/, 'the waiting session is canceled');
		is_now($admin,
			"SELECT (SELECT count(*) FROM dlock_queue), "
			  . "(SELECT count(*) FROM dlock_leases)",
			'0|0',
			'nothing is left of the ticket');
		is($holder->query("SELECT dlock_release('lock')"), 't', 'released');
	}
	else
	{
		is($holder->query("SELECT dlock_release('lock')"), 't', 'released');
		is($waiter->answer, $ticket, 'the session is granted the ticket');
		is($admin->query("SELECT dlock_renew($ticket)"), '1', 'and keeps it');
	}
	$admin->query("SELECT dlock_release_ticket($ticket)") unless $too;
	finish($holder, $waiter, $client);
}

# The enqueue comes when the session is granted the lock, but has not noticed.
# Then the session continues, or is terminated or canceled.
foreach my $end ('', 'pg_terminate_backend', 'pg_cancel_backend')
{
	my ($holder, $waiter, $client) = map { session($node) } 1 .. 3;
	my $ticket;

	$client->query('LISTEN c2');
	$holder->query("SELECT dlock_acquire('lock')");
	$waiter->start("SELECT $acquire");
	$admin->until_waits($waiter);
	stop_while($admin, $waiter->{pid},
		"SELECT wait_event = 'userlock' FROM pg_stat_activity "
		  . "WHERE pid = $waiter->{pid}");
	$holder->query("SELECT dlock_release('lock')");
	$ticket = $client->query("SELECT $enqueue");
	is(locks(), "$ticket|t|c2|t", "stopped $end: the ticket is the lease's");
	is($client->query("SELECT dlock_wait($ticket, '0')"),
		't', "stopped $end: the ticket is granted");
	told($client, "stopped $end: as announced",
		announcement('granted', 'lock', $ticket));
	$admin->query("SELECT $end($waiter->{pid})") if $end;
	continue_process($waiter->{pid});
	if ($end)
	{
		like($waiter->answer, qr/57014|57P01/, "$end: so it ends");
	}
	else
	{
		is($waiter->answer, $ticket, 'the session gets the same ticket');
	}
	$waiter->quit;
	backends_gone($waiter->{pid});
	is($admin->query("SELECT dlock_check('lock', $ticket)"),
		't', "$end: the client has the ticket");
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', "$end: released once");
	finish($holder, $client);
}

# After a crash, the enqueued ticket still waits.
{
	my ($holder, $waiter, $client) = map { session($node) } 1 .. 3;
	my $held = $holder->query("SELECT dlock_ttl_acquire('lock', '1h')");
	my $ticket;

	$waiter->start("SELECT $acquire");
	$admin->until_waits($waiter);
	$ticket = $client->query("SELECT $enqueue");
	# The channel of an existing ticket is written just after the answer.
	$admin->wait_for(
		"SELECT channel = 'c2' FROM dlock_queue WHERE ticket = $ticket");
	# Flush a later commit.
	$admin->query('CREATE TABLE flushed ()');
	kill_server($node);
	$_->vanish foreach $holder, $waiter, $client, $admin;
	$node->start;
	$admin = session($node);
	is(locks(), "$held|t||t\n$ticket|f|c2|t", 'crash: the ticket still waits');
	is($admin->query("SELECT $enqueue"), $ticket, 'crash: the ticket is found again');
	$admin->query("SELECT dlock_release_ticket($held)");
	is($admin->query("SELECT dlock_wait($ticket)"), 't', 'crash: granted');
	is($admin->query("SELECT $acquire"), $ticket, 'crash: the granted ticket is found, too');
	finish();
}

#
# A request is found by its hash among many tickets.
#
my $depth = 600;
my $lease = $admin->query("SELECT dlock_lease_open('1h')");
my %calls = (
	lease => "dlock_lease_enqueue('%s', $lease, 'c', owner => %s)",
	ttl => "dlock_ttl_enqueue('%s', '1h', 'c', owner => %s)");

# Make all requests at once, and return their tickets.
sub tickets
{
	my ($kind, $name) = @_;

	return $admin->query('SELECT string_agg('
		  . sprintf($calls{$kind}, $name, "'owner ' || n")
		  . "::text, ' ' ORDER BY n) FROM generate_series(1, $depth) AS n");
}

$admin->query('SET synchronous_commit = off');
$admin->query('CREATE ROLE somebody');
my %tickets;
foreach my $kind (sort keys %calls)
{
	$tickets{$kind} = tickets($kind, $kind);
	is(scalar(keys %{ { map { $_ => 1 } split / /, $tickets{$kind} } }),
		$depth, "$kind: a ticket for each");
	is(tickets($kind, $kind), $tickets{$kind}, "$kind: the same again");
	is($admin->query("SELECT count(*) FROM dlock_locks WHERE name = '$kind'"),
		$depth, "$kind: and no more");
	isnt(tickets($kind, "$kind elsewhere"), $tickets{$kind},
		"$kind: others for another lock");
	$admin->query('SELECT count(dlock_release_ticket(ticket)) '
		  . "FROM dlock_locks WHERE name = '$kind elsewhere'");
}

# Requests by another role, or without an owner, get other tickets.
unlike(
	' ' . $admin->query("SET ROLE somebody; SELECT "
		  . sprintf($calls{ttl}, 'ttl', "'owner 300'") . '; RESET ROLE') . ' ',
	qr/\D($tickets{ttl})\D/, 'another role gets another ticket');
isnt(
	$admin->query('SELECT ' . sprintf($calls{ttl}, 'none', 'NULL')),
	$admin->query('SELECT ' . sprintf($calls{ttl}, 'none', 'NULL')),
	'without an owner, each request gets a new ticket');

# A ticket ends, and its neighbours stay.
foreach my $kind (sort keys %calls)
{
	my @all = split / /, $tickets{$kind};

	is($admin->query("SELECT dlock_release_ticket($all[299])"),
		't', "$kind: ended");
	my @again = split / /, tickets($kind, $kind);
	cmp_ok($again[299], '>', $all[-1], "$kind: requested again");
	$all[299] = $again[299];
	is("@again", "@all", "$kind: the others are the same");
	$tickets{$kind} = "@all";
}

# An acquire repeats each request.  The first ticket holds, and the last waits.
foreach my $kind (sort keys %calls)
{
	my @all = split / /, $tickets{$kind};
	my $acquire = $calls{$kind} =~ s/enqueue/acquire/r =~ s/'c'/timeout => '10ms'/r;

	is($admin->query('SELECT ' . sprintf($acquire, $kind, "'owner 1'")),
		$all[0], "$kind: acquired");
	like($admin->query('SELECT ' . sprintf($acquire, $kind, "'owner 200'")),
		qr/55P03/, "$kind: not yet");
	is(tickets($kind, $kind), $tickets{$kind}, "$kind: nothing has changed");
}

# The next synchronous commit flushes all changes.
$admin->query("SET synchronous_commit = on; SELECT dlock_lease_open('1h')");
kill_server($node);
$admin->vanish;
$node->start;
$admin = session($node);
$admin->query('SET synchronous_commit = off');
is(tickets($_, $_), $tickets{$_}, "$_: the same after a crash")
  foreach sort keys %calls;

# Nothing is left.
$admin->query('SELECT count(dlock_lease_close(lease)) FROM dlock_leases');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_queue');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$lease = $admin->query("SELECT dlock_lease_open('1h')");
$calls{lease} =~ s/\d+(?=, 'c')/$lease/;
isnt(tickets($_, $_), $tickets{$_}, "$_: and all requested again")
  foreach sort keys %calls;

$admin->quit;
$node->stop;
done_testing();
