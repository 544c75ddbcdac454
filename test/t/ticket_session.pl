# An enqueued ticket keeps its place, even if its session does not wait, until
# the session ends the ticket or exits.  The grant wakes a session in
# dlock_wait().  An interrupt ends only the wait.
#
# What would break it: a grant among many that is announced twice or not at
# all; an interrupt of dlock_wait() that ends the ticket, or loses a
# simultaneous grant; an exit that keeps a ticket without a waiting call; a
# deadlock in which a queued ticket is overlooked.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease qw(announcement enqueue);
use Dlock::Test;
use Test::More;

# Only sessions that set deadlock_timeout look for deadlocks.
my $node = new_server('main', conf => "deadlock_timeout = '1h'\n");
my $admin = session($node);
my $looks = "SET deadlock_timeout = '10ms'";

$node->safe_psql('postgres', 'CREATE TABLE t AS SELECT 0 AS n');

# Wait until the sessions sleep, because a session is in the queue before it
# waits.
sub until_sleeps
{
	foreach my $waiter (@_)
	{
		$admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
			  . "WHERE pid = $waiter->{pid} AND wait_event = 'userlock'");
	}
	return;
}

sub nothing_left
{
	my ($when) = @_;

	return $admin->wait_for('SELECT count(*) = 0 FROM dlock_locks')
	  && pass("$when: nothing is left");
}

#
# One connection enqueues for ten thousand locks, half of them free.  It gets
# one announcement for each grant, and nothing else wakes it.
#
{
	my $holder = session($node);
	my $many = session($node);
	my %tickets;
	my @announced;

	$holder->query(q{SELECT count(dlock_acquire('lock ' || n))
					   FROM generate_series(1, 10000, 2) AS n});
	%tickets = map { split /\|/ } split /\n/,
	  $many->query(q{SELECT dlock_enqueue('lock ' || n), 'lock ' || n
					   FROM generate_series(1, 10000) AS n});
	is(scalar(keys %tickets), 10_000, '10,000 tickets');
	@announced = $many->announcements(5_000);
	is( $many->query('SELECT count(*) FILTER (WHERE granted), count(*) '
			  . "FROM dlock_locks WHERE pid = $many->{pid}"),
		'5000|10000',
		'half of the tickets are granted');

	$holder->query('SELECT dlock_release_all()');
	push @announced, $many->announcements(5_000);

	# All earlier announcements have arrived.
	$tickets{ enqueue($many, 'the last') } = 'the last';
	push @announced, $many->announcements(1);
	is_deeply(
		[ sort @announced ],
		[ sort map { announcement('granted', $tickets{$_}, $_) } keys %tickets ],
		'each grant is announced once');
	is( $many->query(
			'SELECT count(*) FROM dlock_locks WHERE dlock_wait(ticket)'),
		'10001',
		'and true');
	is($many->query('SELECT dlock_release_all()'),
		'10001', 'all locks are released at once');
	nothing_left('10,000 locks');

	# Sessions queue for the same locks, one behind another.
	my @sessions = map { session($node) } 1 .. 4;
	$_->query(
		q{SELECT count(dlock_enqueue('lock ' || n))
			FROM generate_series(1, 1000) AS n}) foreach @sessions;
	foreach my $n (1 .. 4)
	{
		my $session = shift @sessions;
		my @told = $session->announcements($n < 4 ? 2000 : 1000);

		is(scalar(grep { /"granted"/ } @told),
			1000, 'the next in line has 1,000 locks');
		is(scalar(grep { /"wanted"/ } @told),
			$n < 4 ? 1000 : 0, 'the locks are wanted if a session is behind');
		$session->quit;
	}
	nothing_left('1,000 locks in line');
	$_->quit foreach $holder, $many;
}

#
# Each way to end a queued ticket or a hold: the next ticket moves up.  Each
# sub gets the session and its ticket.
#
my @ways = (
	'dlock_release_ticket' =>
	  sub { $_[0]->query("SELECT dlock_release_ticket($_[1])") },
	'dlock_release_at_commit' => sub {
		$_[0]->query("BEGIN; SELECT dlock_release_at_commit($_[1]); COMMIT");
	},
	'dlock_release_all' =>
	  sub { $_[0]->query('SELECT dlock_release_all()') },
	'dlock_force_release' =>
	  sub { $admin->query("SELECT dlock_force_release($_[1])") },
	'DISCARD ALL' => sub { $_[0]->query('DISCARD ALL') },
	'session end' => sub { $_[0]->quit },
	'client gone' => sub { $_[0]->vanish },
	'terminate' =>
	  sub { $admin->query("SELECT pg_terminate_backend($_[0]{pid})") },
	'terminate in the transaction that enqueued' => sub {
		$_[0]->query("BEGIN; SELECT dlock_enqueue('another')");
		$admin->query("SELECT pg_terminate_backend($_[0]{pid})");
	},
	'terminate in dlock_wait' => sub {
		$_[0]->start("SELECT dlock_wait($_[1])");
		$admin->query("SELECT pg_terminate_backend($_[0]{pid})");
	});

while (my ($how, $end) = splice(@ways, 0, 2))
{
	foreach my $place (0 .. 2)
	{
		my @sessions = map { session($node) } 0 .. 3;
		my @tickets = map { enqueue($_, 'lock') } @sessions;
		my $where = "$how, place $place";
		my ($gone) = splice(@sessions, $place, 1);
		my ($ticket) = splice(@tickets, $place, 1);

		$end->($gone, $ticket);
		$admin->wait_for("SELECT string_agg(ticket::text, ' ' "
			  . "ORDER BY position) = '@tickets' FROM dlock_locks");
		pass("$where: has left the queue");
		foreach my $i (0 .. 2)
		{
			my @told = map { announcement($_, 'lock', $tickets[$i]) }
			  $i < 2 ? ('granted', 'wanted') : 'granted';

			is(join("\n", $sessions[$i]->announcements(scalar @told)),
				join("\n", @told), "$where: the next is told");
			is($sessions[$i]->query("SELECT dlock_wait($tickets[$i], '0')"),
				't', "$where: the next ticket is granted");
			$sessions[$i]->quit;
		}
		$gone->quit unless $how eq 'client gone';
		nothing_left($where);
	}
}

#
# dlock_wait()
#
# The grants wake waits in the order of the tickets, not of the waits.
{
	my $holder = session($node);
	my @sessions = map { session($node) } 0 .. 2;
	my @tickets;
	my $blocking;

	enqueue($holder, 'lock');
	push @tickets, enqueue($sessions[0], 'lock');
	$sessions[1]->start("SELECT dlock_acquire('lock')");
	until_sleeps($sessions[1]);
	push @tickets, enqueue($sessions[2], 'lock');
	$sessions[2]->start("SELECT dlock_wait($tickets[1])");
	until_sleeps($sessions[2]);
	$sessions[0]->start("SELECT dlock_wait($tickets[0])");
	until_sleeps($sessions[0]);
	is( $admin->query("SELECT dlock_blocking_pids($sessions[2]{pid})"),
		'{' . join(',', map { $_->{pid} } $holder, @sessions[ 0, 1 ]) . '}',
		'dlock_blocking_pids() names all before a ticket');

	$holder->query('SELECT dlock_release_all()');
	is($sessions[0]->answer, 't', 'the first wakes up');
	until_sleeps(@sessions[ 1, 2 ]);
	ok(!$sessions[$_]->answered, 'no other session wakes up') foreach 1, 2;
	$sessions[0]->query("SELECT dlock_release_ticket($tickets[0])");
	like($sessions[1]->answer, qr/^\d+$/, 'then the next wakes up');
	$sessions[1]->quit;
	is($sessions[2]->answer, 't', 'then the last wakes up');
	is(join("\n", $sessions[2]->announcements(1)),
		announcement('granted', 'lock', $tickets[1]), 'the last grant is announced, too');
	$_->quit foreach $holder, @sessions;
	nothing_left('dlock_wait');
}

# Readers are granted together.  Requests for permits are, too.
foreach my $mode ([ ', shared => true', '' ],
	[ ', slots => 3', ', slots => 3, permits => 3' ])
{
	my ($some, $all) = @$mode;
	my $holder = session($node);
	my @sessions = map { session($node) } 0 .. 2;
	my @tickets;

	enqueue($holder, 'lock', $all);
	@tickets = map { enqueue($_, 'lock', $some) } @sessions;
	$sessions[$_]->start("SELECT dlock_wait($tickets[$_])") foreach 0 .. 2;
	until_sleeps(@sessions);
	$holder->quit;
	is($_->answer, 't', "three at a time$some") foreach @sessions;
	$_->quit foreach @sessions;
	nothing_left("three at a time$some");
}

# An interrupt does not move the ticket.
{
	my $holder = session($node);
	my $waiter = session($node);
	my $last = session($node);
	my $held = enqueue($holder, 'lock');
	my $ticket = enqueue($waiter, 'lock');
	my $behind = enqueue($last, 'lock');
	my %interruptions = (
		"SELECT dlock_wait($ticket, '10ms')" => qr/^f$/,
		"SELECT dlock_wait($ticket, timeout => '0')" => qr/^f$/,
		"SET lock_timeout = '10ms'; SELECT dlock_wait($ticket)" =>
		  qr/55P03: canceling/,
		# LOCAL, because otherwise the timeout would apply to its own RESET
		"BEGIN; SET LOCAL statement_timeout = '10ms';"
		  . "SELECT dlock_wait($ticket); ROLLBACK" => qr/57014: canceling/,
		"BEGIN; SAVEPOINT s; SET LOCAL lock_timeout = '10ms';"
		  . "SELECT dlock_wait($ticket); ROLLBACK TO s; ROLLBACK" =>
		  qr/55P03: canceling/);

	foreach my $sql (sort keys %interruptions)
	{
		like($waiter->query($sql), $interruptions{$sql},
			$sql =~ s/\d{5,}/N/r);
		$waiter->query('RESET lock_timeout');
		is( $admin->query("SELECT string_agg(ticket::text, ' ' "
				  . 'ORDER BY position) FROM dlock_locks'),
			"$held $ticket $behind",
			'the ticket keeps its place');
	}
	$waiter->start("SELECT dlock_wait($ticket)");
	until_sleeps($waiter);
	$admin->query("SELECT pg_cancel_backend($waiter->{pid})");
	like($waiter->answer, qr/57014: canceling/, 'cancel');
	is( $admin->query("SELECT string_agg(ticket::text, ' ' "
			  . 'ORDER BY position) FROM dlock_locks'),
		"$held $ticket $behind",
		'the ticket keeps its place');

	# A forced release ends the ticket.
	$waiter->start("SELECT dlock_wait($ticket)");
	until_sleeps($waiter);
	$admin->query("SELECT dlock_force_release($ticket)");
	like($waiter->answer, qr/55L01: ticket $ticket is gone/, 'forced release');
	like($waiter->query("SELECT dlock_wait($ticket)"),
		qr/55L01: ticket $ticket is gone/, 'the ticket is gone');
	$ticket = enqueue($waiter, 'lock');
	$holder->quit;
	is($last->query("SELECT dlock_wait($behind)"), 't', 'the next has it');
	$last->quit;
	is($waiter->query("SELECT dlock_wait($ticket)"),
		't', 'a session that enqueued again comes last');
	$waiter->quit;
	nothing_left('interruptions');
}

# Only its own session can wait for a ticket.
{
	my $holder = session($node);
	my $ticket = enqueue($holder, 'lock');

	like($admin->query("SELECT dlock_wait($ticket)"),
		qr/55L01: ticket $ticket is gone/, "another session's ticket");
	like($admin->query("SELECT dlock_release_ticket($ticket)"),
		qr/55000.*^f$/ms, 'another session cannot release it, either');
	$holder->quit;
	nothing_left('two sessions');
}

# A cancel and a grant at the same moment: the grant is not lost.
{
	my $holder = session($node);
	my $waiter = session($node);
	my $lost = 0;
	my $canceled = 0;

	foreach my $round (1 .. 50)
	{
		my $ticket;

		$holder->query("SELECT dlock_acquire('lock')");
		$ticket = enqueue($waiter, 'lock');
		$waiter->start("SELECT dlock_wait($ticket)");
		until_sleeps($waiter);
		$admin->start("SELECT pg_cancel_backend($waiter->{pid})");
		$holder->query("SELECT dlock_release('lock')");
		$admin->answer;
		$canceled++ if $waiter->answer =~ /57014/;
		$lost++ if $waiter->query("SELECT dlock_wait($ticket, '0')") ne 't';
		$waiter->query("SELECT dlock_release_ticket($ticket)");
	}
	is($lost, 0, "cancel and grant together: $canceled of 50 were canceled");
	$_->quit foreach $holder, $waiter;
	nothing_left('cancel and grant together');
}

#
# Deadlocks
#
# The session that waits with the younger ticket is the victim, but keeps it.
foreach my $looker (0, 1)
{
	my @sessions = map { session($node) } 0, 1;
	my @tickets;

	$sessions[0]->query("SELECT dlock_acquire('x')");
	$sessions[1]->query("SELECT dlock_acquire('y')");
	push @tickets, enqueue($sessions[0], 'y');
	push @tickets, enqueue($sessions[1], 'x');
	$sessions[$looker]->query($looks);
	# The session that begins to wait last looks for deadlocks.
	foreach my $i (1 - $looker, $looker)
	{
		$sessions[$i]->start("SELECT dlock_wait($tickets[$i])");
		until_sleeps($sessions[$i]) if $i != $looker;
	}
	like(
		$sessions[1]->answer,
		qr/40P01: deadlock detected.*blocked by process $sessions[0]{pid}/s,
		'dlock_wait: deadlock');
	is($sessions[1]->query("SELECT dlock_wait($tickets[1], '0')"),
		'f', 'the victim keeps its place');
	ok(!$sessions[0]->answered, 'the other session waits while the victim holds');
	$sessions[1]->query("SELECT dlock_release('y')");
	is($sessions[0]->answer, 't', 'the other session gets the lock after the release');
	$sessions[0]->query('SELECT dlock_release_all()');
	is($sessions[1]->query("SELECT dlock_wait($tickets[1])"),
		't', 'the victim has its turn in the end');
	$_->quit foreach @sessions;
	nothing_left('deadlock');
}

# A deadlock of a dlock_wait() and a wait for a row
{
	my $row = session($node);
	my $waiter = session($node);
	my $ticket;

	$waiter->query("$looks; BEGIN; UPDATE t SET n = n + 1");
	$row->query("SELECT dlock_acquire('x')");
	$ticket = enqueue($waiter, 'x');
	$row->start('UPDATE t SET n = n + 1');
	$admin->wait_for('SELECT count(*) = 1 FROM pg_locks '
		  . "WHERE pid = $row->{pid} AND NOT granted");
	like($waiter->query("SELECT dlock_wait($ticket)"),
		qr/40P01: deadlock detected/, 'deadlock with a row lock');
	$waiter->query('ROLLBACK');
	is($row->answer, '', 'the other session goes on');
	is($waiter->query("SELECT dlock_wait($ticket, '0')"),
		'f', 'the victim keeps its place');
	$_->quit foreach $row, $waiter;
	nothing_left('deadlock with a row lock');
}

# A queued ticket blocks later ones, even if its owner waits for another lock
# and the holder can continue.
{
	my ($holder, $queued, $behind) = map { session($node) } 1 .. 3;

	$holder->query("SELECT dlock_acquire('x')");
	$behind->query("SELECT dlock_acquire('z')");
	enqueue($queued, 'x');
	$queued->start("SELECT dlock_acquire('z')");
	until_sleeps($queued);
	$behind->query($looks);
	like(
		$behind->query("SELECT dlock_acquire('x')"),
		qr/40P01: deadlock detected.*blocked by process $queued->{pid}/s,
		'deadlock over a place in the queue');
	ok(!$queued->answered, 'the other session waits');
	$_->quit foreach $behind, $holder;
	like($queued->answer, qr/^\d+$/, 'the other session goes on');
	$queued->quit;
	nothing_left('deadlock over a place in the queue');
}

# A session that has enqueued but does not wait is in no deadlock.
{
	my ($queued, $waiter) = map { session($node) } 1, 2;
	my $offset = -s $node->logfile;
	my $ticket;

	$queued->query("SELECT dlock_acquire('x')");
	$waiter->query("SELECT dlock_acquire('y')");
	$ticket = enqueue($queued, 'y');
	$waiter->query("$looks; SET log_lock_waits = on");
	$waiter->start("SELECT dlock_acquire('x')");
	# The session logs this after its search.
	$node->wait_for_log(qr/process $waiter->{pid} still waiting for/, $offset);
	until_sleeps($waiter);
	ok(!$waiter->answered, 'no deadlock with a session that does not wait');
	$queued->query("SELECT dlock_release('x')");
	like($waiter->answer, qr/^\d+$/, 'the waiter gets the lock after a release');
	$waiter->quit;
	is($queued->query("SELECT dlock_wait($ticket)"), 't', 'the queued ticket is granted');
	$queued->quit;
	nothing_left('no deadlock');
}

$admin->quit;
done_testing();
