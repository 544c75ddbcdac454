# The holder of an enqueued ticket is told once that a session or lease waits
# for the lock: when the wait begins, or at the grant if there is already a
# waiter.
#
# What would break it: a holder that is not told, is told twice, or is told
# before its grant; a message to a holder that the wait does not concern; a
# waiter that visits all holders each time.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease qw(:DEFAULT enqueue);
use Dlock::Test;
use Test::More;

my $node = new_server(
	'main',
	allows_streaming => 1,
	conf => q{
synchronous_commit = local
deadlock_timeout = '1h'
});
my $admin = session($node);
my $count = 0;

# No announcement has arrived, and none is on its way
sub not_told
{
	my ($listener, $test, $channel) = @_;
	my $name = 'last ' . ++$count;
	my $sender = $channel ? $admin : $listener;
	my $ticket =
	  enqueue($sender, $name, $channel ? ", '$channel'" : '');
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	told($listener, $test, announcement('granted', $name, $ticket));
	$sender->query("SELECT dlock_release_ticket($ticket)");
	return;
}

sub try_for
{
	my ($session, $more) = @_;

	$session->query("SELECT dlock_try_acquire('lock', '1 ms'"
		  . ($more // '') . ')');
	return;
}

#
# Sessions' tickets
#
{
	my $holder = session($node);
	my $waiter = session($node);
	my $next = session($node);
	my $ticket = enqueue($holder, 'lock');

	told($holder, 'granted', announcement('granted', 'lock', $ticket));
	$waiter->query("SELECT dlock_try_acquire('lock')");
	not_told($holder, 'a session that only tries does not wait');
	try_for($waiter);
	told($holder, 'wanted', announcement('wanted', 'lock', $ticket));
	try_for($waiter);
	try_for($next, ', shared => true');
	not_told($holder, 'once');

	# A ticket is granted while others wait.
	$waiter->query("SELECT dlock_enqueue('lock')");
	$next->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($next);
	$holder->query('SELECT dlock_release_all()');
	my $second = $waiter->query(
		q{SELECT ticket FROM dlock_locks WHERE name = 'lock' AND granted});
	told($waiter, 'with the grant',
		announcement('granted', 'lock', $second),
		announcement('wanted', 'lock', $second));
	$waiter->query('SELECT dlock_release_all()');
	$next->answer;
	not_told($waiter, 'nothing else is announced');

	# The holder of an acquired ticket is told when the ticket has a channel.
	$waiter->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($waiter);
	$ticket = enqueue($next, 'lock');
	told($next, 'enqueued later',
		announcement('granted', 'lock', $ticket),
		announcement('wanted', 'lock', $ticket));
	is(enqueue($next, 'lock'), $ticket, 'enqueued again');
	told($next, 'told again',
		announcement('granted', 'lock', $ticket),
		announcement('wanted', 'lock', $ticket));
	$next->query('SELECT dlock_release_all()');
	$waiter->answer;
	not_told($next, 'gone');
	$waiter->query("SELECT dlock_release('lock')");

	# All holders are told once each, even holders granted between two waiters.
	foreach my $mode (', shared => true', ', slots => 3')
	{
		my @holders = map { session($node) } 0 .. 2;
		my @tickets = map { enqueue($holders[$_], 'lock', $mode) } 0, 1;
		my $wants = $mode =~ /slots/ ? ', slots => 3, permits => 3' : '';

		told($holders[$_], "$mode: granted",
			announcement('granted', 'lock', $tickets[$_]))
		  foreach 0, 1;
		try_for($waiter, $wants);
		told($holders[$_], "$mode: wanted",
			announcement('wanted', 'lock', $tickets[$_]))
		  foreach 0, 1;
		push @tickets, enqueue($holders[2], 'lock', $mode);
		told($holders[2], "$mode: granted later",
			announcement('granted', 'lock', $tickets[2]));
		try_for($waiter, $wants);
		told($holders[2], "$mode: wanted later",
			announcement('wanted', 'lock', $tickets[2]));
		not_told($_, "$mode: once each") foreach @holders;
		$_->quit foreach @holders;
		$admin->wait_for("SELECT count(*) = 0 FROM dlock_locks");
	}
	$_->quit foreach $holder, $waiter, $next;
}

#
# Leases' tickets
#
{
	my $listener = session($node);
	my $waiter = session($node);
	my $client = session($node);
	my $enqueue =
	  "SELECT dlock_ttl_enqueue('lock', '1 h', 'c', owner => 'me')";
	my $ticket;

	$listener->query('LISTEN c; LISTEN d');
	$ticket = $client->query($enqueue);
	told($listener, 'granted', announcement('granted', 'lock', $ticket));
	try_for($waiter);
	told($listener, 'wanted', announcement('wanted', 'lock', $ticket));
	try_for($waiter);
	not_told($listener, 'once', 'c');

	# A session that repeats the request is told, too.
	is($client->query($enqueue =~ s/'c'/'d'/r), $ticket, 'asked again');
	told($listener, 'told again',
		announcement('granted', 'lock', $ticket),
		announcement('wanted', 'lock', $ticket));

	# After a restart, a holder is told at most once more, or at last.
	$client->query($enqueue =~ s/me/other/r);
	$_->quit foreach $listener, $waiter, $client, $admin;
	$node->restart;
	$admin = session($node);
	$listener = session($node);
	$waiter = session($node);
	$listener->query('LISTEN c; LISTEN d');
	try_for($waiter);
	try_for($waiter);
	my @told = grep { /"wanted"/ } map
	{
		$admin->query("SELECT dlock_enqueue('last $_', 'c')");
		$listener->announcements(1)
	} 1 .. 2;
	cmp_ok(scalar(@told), '<=', 1, 'after a restart: at most once more');
	$admin->query('SELECT dlock_release_all()');

	# A holder is not told before its grant is announced, which needs standbys.
	$client = session($node);
	$client->query(q{SELECT dlock_force_release(ticket) FROM dlock_locks
					  ORDER BY ticket DESC});
	$listener->announcements(2);
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	commits_hang($node, 1);
	$client->start("SET synchronous_commit = on; $enqueue");
	$admin->wait_for('SELECT bool_and(granted) FROM dlock_locks');
	try_for($waiter);
	not_told($listener, 'not while the grant is not durable', 'c');
	commits_hang($node, 0);
	$ticket = $client->answer;
	told($listener, 'told when the grant is durable',
		announcement('granted', 'lock', $ticket),
		announcement('wanted', 'lock', $ticket));

	# The same after a LISTEN, with a ticket that waited for its turn.
	$admin->query("SELECT dlock_acquire('turn')");
	$ticket = $client->query("SELECT dlock_ttl_enqueue('turn', '1h', 'c')");
	commits_hang($node, 1);
	$admin->query("SELECT dlock_release('turn')");
	$admin->wait_for(
		"SELECT bool_and(granted) FROM dlock_locks WHERE ticket = $ticket");
	$waiter->query("SELECT dlock_try_acquire('turn', '1 ms')");
	not_told($listener, 'in its turn: not while the grant is not durable', 'c');
	commits_hang($node, 0);
	told($listener, 'in its turn: told when the grant is durable',
		announcement('granted', 'turn', $ticket),
		announcement('wanted', 'turn', $ticket));
}

done_testing();
