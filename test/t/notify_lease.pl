# Changes of leases' enqueued tickets are announced: a grant when it is durable
# at the requested level, an expiry, a forced release.  Announcements arrive on
# the channel of the latest request, after its transaction has committed, and
# even if NOTIFY or the worker is blocked for some time.  They block no lock,
# no journal and no expiry.  A client that calls dlock_wait() after a crash
# misses nothing.
#
# What would break it: an announcement of a grant that a crash can still undo;
# an announcement before its LISTEN, or after a rollback; a ticket that ends
# before its announcement is sent, so that the announcement is lost; a grant
# that only one worker's memory has; a notification that the journal waits for;
# a channel that is forgotten in a restart.
#
# To show that nothing was announced, the test waits for a later announcement.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use JSON::PP qw(decode_json);
use PostgreSQL::Test::Utils qw(slurp_file);
use Test::More;

# Sessions wait for standbys if they request it.
my $conf = q{
synchronous_commit = local
deadlock_timeout = '1h'
};
my $small_queue = 'max_notify_queue_pages';
my $node = new_server('main', allows_streaming => 1, conf => $conf);
my $admin = session($node);
my $listener = session($node);

$node->safe_psql('postgres', 'CREATE TABLE t (n integer)');
$listener->query('LISTEN shared');

sub open_lease
{
	my ($session) = @_;

	return $session->query("SELECT dlock_lease_open('1h')");
}

# enqueue($session, $name, $lease, $more), in which $lease can be a ttl
sub enqueue
{
	my ($session, $name, $lease, $more) = @_;
	my $call =
	  $lease =~ /^\d+$/ ? "dlock_lease_enqueue('$name', $lease" :
	  "dlock_ttl_enqueue('$name', '$lease'";
	my $ticket = $session->query("SELECT $call" . ($more // '') . ')');

	die "no ticket: $ticket" unless $ticket =~ /^\d+$/;
	return $ticket;
}

# No announcement has arrived, and none is on its way.
my $last = 0;

sub not_told
{
	my ($session, $test, $channel) = @_;
	my $name = 'last ' . ++$last;
	my $ticket = enqueue($channel ? $admin : $session, $name, '1h',
		$channel ? ", '$channel'" : '');
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	told($session, $test, announcement('granted', $name, $ticket));
	$admin->query("SELECT dlock_release_ticket($ticket)");
	return;
}

# Release a ticket, from any session.
sub release
{
	my (@tickets) = @_;

	foreach (@tickets)
	{
		$admin->query("SELECT dlock_release_ticket($_)") eq 't'
		  or die "ticket $_ is not there";
	}
	return;
}

sub ask
{
	my ($session, $ticket) = @_;

	return $session->query("SELECT dlock_wait($ticket, '0')");
}

sub terminate_worker
{
	my $pid = worker($admin);

	$admin->query("SELECT pg_terminate_backend($pid)");
	backends_gone($pid);
	return;
}

# Does this session wait for the journal?
sub waits_for_journal
{
	my ($session) = @_;

	return $admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
		  . "WHERE pid = $session->{pid} AND state = 'active' "
		  . "AND wait_event_type = 'Extension'");
}

#
# Only the commit of the transaction that made an announcement sends it
#
{
	my ($one, $other) = (session($node), session($node));
	my $ticket;

	$_->query('BEGIN') foreach $one, $other;
	$ticket = enqueue($one, 'same', '1h', ", owner => 'a'");
	is(enqueue($other, 'same', '1h', ", owner => 'a'"),
		$ticket, 'two transactions make the same request');
	$one->query('COMMIT');
	not_told($listener, 'the first has committed', 'shared');
	$other->query('COMMIT');
	told($other, 'the second session is told', announcement('granted', 'same', $ticket));
	not_told($one, 'the first session gets none');
	release($ticket);

	$one->query('BEGIN');
	$ticket = enqueue($one, 'asked for', '1h');
	is(ask($other, $ticket), 't', 'another session asks for the ticket');
	not_told($listener, 'before the commit', 'shared');
	$one->query('COMMIT');
	told($one, 'with the commit', announcement('granted', 'asked for', $ticket));
	release($ticket);

	foreach my $call ("dlock_enqueue('back'",
		"dlock_ttl_enqueue('and forth', '1h', owner => 'a'")
	{
		my ($name) = $call =~ /'(.*?)'/;

		$one->query('BEGIN');
		$ticket = $one->query("SELECT $call, channel => 'shared')");
		$one->query('SAVEPOINT one');
		is($one->query("SELECT $call)"), $ticket, "$call): again, elsewhere");
		$one->query('ROLLBACK TO one');
		$one->query('COMMIT');
		not_told($listener, "$call): it was rolled back", 'shared');
		is(ask($one, $ticket), 't', "$call): dlock_wait() answers");
		told($one, "$call): then it is announced", announcement('granted', $name, $ticket));
		$one->query("SELECT dlock_release_ticket($ticket), dlock_release_all()");
	}
}

#
# Grants, expiries and releases are announced on the session's own channel,
# without a LISTEN by the client, and on a given channel
#
foreach my $channel (undef, 'shared')
{
	my $where = $channel ? 'given channel' : 'own channel';
	my $more = $channel ? ", '$channel'" : '';
	my $waiter = session($node);
	my $listener = $channel ? $listener : $waiter;
	my ($lease, $held, $ticket);

	foreach my $kind ('lease', 'ttl')
	{
		my $what = "$where, $kind";

		$lease = $kind eq 'lease' ? open_lease($waiter) : '1h';
		$ticket = enqueue($waiter, 'free', $lease, $more);
		told($listener, "$what: a lock that is free",
			announcement('granted', 'free', $ticket));
		is(ask($waiter, $ticket), 't', "$what: confirmed");
		release($ticket);

		$held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
		$ticket = enqueue($waiter, 'lock', $lease, $more);
		not_told($listener, "$what: a lock that is held", $channel);
		is(ask($waiter, $ticket), 'f', "$what: it is not granted");
		release($held);
		told($listener, "$what: a lock that was held",
			announcement('granted', 'lock', $ticket));
		is(ask($waiter, $ticket), 't', "$what: confirmed");

		# release by force, also a waiting ticket
		$held = $ticket;
		$ticket =
		  enqueue($waiter, 'lock', $lease, ($more || ', NULL') . ", owner => 'b'");
		$admin->query("SELECT dlock_force_release($ticket)");
		told($listener, "$what: a waiter's forced release",
			announcement('wanted', 'lock', $held),
			announcement('released', 'lock', $ticket));
		like(ask($waiter, $ticket), qr/55L01/, "$what: confirmed");
		$admin->query("SELECT dlock_force_release($held)");
		told($listener, "$what: a holder's forced release",
			announcement('released', 'lock', $held));
		like(ask($waiter, $held), qr/55L01/, "$what: confirmed");

		# A session gets no announcement of its own release.
		$ticket = enqueue($waiter, 'lock', $lease, $more);
		told($listener, "$what: granted again",
			announcement('granted', 'lock', $ticket));
		$waiter->query($kind eq 'lease' ? "SELECT dlock_lease_close($lease)" :
				"SELECT dlock_release_ticket($ticket)");
		not_told($listener, "$what: given back", $channel);
	}

	# An expiry.  The ttls of these leases begin at the end of a session.
	my $keeper = session($node);
	my $next;

	$lease = $keeper->query("SELECT dlock_lease_open('100ms', attach => true)");
	$held = enqueue($waiter, 'lock', $lease, $more);
	told($listener, "$where: granted for a while",
		announcement('granted', 'lock', $held));
	$next = $admin->query("SELECT dlock_ttl_enqueue('lock', '1h', 'nowhere')");
	$admin->query("SELECT dlock_acquire('another')");
	$ticket = enqueue($waiter, 'another', $lease, $more);
	$keeper->quit;
	is_deeply(
		[ sort $listener->announcements(3) ],
		[ sort(announcement('wanted', 'lock', $held),
				announcement('expired', 'lock', $held),
				announcement('expired', 'another', $ticket)) ],
		"$where: expired, held and waiting");
	like(ask($waiter, $held), qr/55L01/, "$where: confirmed");
	is_now($admin, "SELECT dlock_wait($next, '0')", 't',
		"$where: the next has it");
	$admin->query("SELECT dlock_release('another')");
	release($next);

	# The ttl of a single lease may be over when "granted" is sent.
	$ticket = enqueue($waiter, 'lock', '1s', $more);
	my @told;
	poll('expired',
		sub {
			push @told, $listener->announcements(0);
			return grep { /expired/ } @told;
		});
	is($told[-1], announcement('expired', 'lock', $ticket),
		"$where: own lease expired");
	is($told[0], announcement('granted', 'lock', $ticket),
		"$where: after it was granted")
	  if @told > 1;
	not_told($listener, "$where: once each", $channel);
	$waiter->quit;
}

#
# The name is encoded as JSON.
#
{
	my $name = qq(a"\\b'c \x{e9}\x{1f512}\n);
	my $ticket = $admin->query(
		q{SELECT dlock_ttl_enqueue(E'a"\\\\b''c \u00e9\U0001f512\n', '1h', 'shared')}
	);
	my ($payload) = $listener->announcements(1);

	is( $payload,
		qq({"event":"granted","lock":"a\\"\\\\b'c \\u00e9\\ud83d\\udd12\\n","ticket":$ticket}),
		'exactly');
	is_deeply(
		decode_json($payload),
		{ event => 'granted', lock => $name, ticket => $ticket },
		'the payload is JSON');
	release($ticket);
}

#
# No announcement comes before the commit, or after a rollback before a call
#
foreach my $state ('free', 'held')
{
	my $waiter = session($node);
	my $lease = open_lease($waiter);
	my ($held, $ticket);
	my $hold = sub {
		$held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')")
		  if $state eq 'held';
	};
	my $is_granted = sub {
		release($held) if $state eq 'held';
		is_now(
			$admin,
			q{SELECT bool_and(granted) FROM dlock_locks WHERE name = 'lock'},
			't',
			"$state: granted");
	};

	$hold->();
	$waiter->query('BEGIN');
	$ticket = enqueue($waiter, 'lock', $lease, ", 'shared'");
	$is_granted->();
	is($waiter->query("SELECT dlock_wait($ticket)"), 't', "$state: granted");
	not_told($listener, "$state: not before the commit", 'shared');
	$waiter->query('COMMIT');
	told($listener, "$state: after the commit",
		announcement('granted', 'lock', $ticket));
	release($ticket);

	$hold->();
	$waiter->query('BEGIN');
	$ticket = enqueue($waiter, 'lock', $lease, ", 'shared'");
	$waiter->query('ROLLBACK');
	is($admin->query("SELECT count(*) FROM dlock_queue WHERE ticket = $ticket"),
		'1', "$state: a rollback leaves the ticket");
	$is_granted->();
	not_told($listener, "$state: not after a rollback", 'shared');
	$waiter->query("BEGIN; SELECT dlock_wait($ticket, '0'); ROLLBACK");
	not_told($listener, "$state: not after another rollback", 'shared');
	$waiter->query("BEGIN; SAVEPOINT s; SELECT dlock_wait($ticket, '0'); "
		  . 'ROLLBACK TO s; COMMIT');
	not_told($listener, "$state: not after a rollback to a savepoint", 'shared');
	is(ask($admin, $ticket), 't', "$state: any session can ask");
	told($listener, "$state: announced after that",
		announcement('granted', 'lock', $ticket));
	release($ticket);

	# On the session's own channel, nothing arrives before the commit.
	$hold->();
	$waiter->query('BEGIN');
	$ticket = enqueue($waiter, 'lock', $lease);
	$is_granted->();
	not_told($listener, "$state: the worker has nothing left", 'shared');
	$waiter->query('COMMIT');
	told($waiter, "$state: own channel: after the commit",
		announcement('granted', 'lock', $ticket));
	release($ticket);

	$hold->();
	$waiter->query('UNLISTEN *; BEGIN');
	$ticket = enqueue($waiter, 'lock', $lease);
	$waiter->query('ROLLBACK');
	is($waiter->query('SELECT count(*) FROM pg_listening_channels()'),
		'0', "$state: a rollback takes the LISTEN back");
	$is_granted->();
	is(ask($waiter, $ticket), 't', "$state: asked");
	told($waiter, "$state: own channel: announced after that",
		announcement('granted', 'lock', $ticket));
	$waiter->query("SELECT dlock_lease_close($lease)");
	$waiter->quit;
}

# A ticket that ends before the commit is announced nevertheless.
foreach my $channel (undef, 'shared')
{
	my $where = $channel ? 'given channel' : 'own channel';
	my $more = $channel ? ", '$channel'" : '';
	my $waiter = session($node);
	my $listener = $channel ? $listener : $waiter;
	my ($ticket, @told);

	$waiter->query('BEGIN');
	$ticket = enqueue($waiter, 'lock', '1h', $more);
	$admin->query("SELECT dlock_force_release($ticket)");
	is_now($admin, "SELECT count(*) FROM dlock_queue WHERE ticket = $ticket",
		'0', "$where: released before the commit");
	not_told($listener, "$where: not announced before it", 'shared') if $channel;
	$waiter->query('COMMIT');
	push @told, $listener->announcements(1);
	is($told[-1], announcement('released', 'lock', $ticket),
		"$where: announced after it");

	$waiter->query('BEGIN');
	$ticket = enqueue($waiter, 'lock', '1s', $more);
	is_now($admin, "SELECT count(*) FROM dlock_queue WHERE ticket = $ticket",
		'0', "$where: expired before the commit");
	$waiter->query('COMMIT');
	@told = $listener->announcements(1);
	is($told[-1], announcement('expired', 'lock', $ticket),
		"$where: announced after it");
	not_told($listener, "$where: nothing else", $channel);
	$waiter->quit;
}

#
# UNLISTEN is obeyed until the next call.
#
{
	my $waiter = session($node);
	my $held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	my $ticket = enqueue($waiter, 'lock', '1h');

	$waiter->query('UNLISTEN *');
	is(ask($waiter, $ticket), 'f', 'UNLISTEN, then asked');
	release($held);
	told($waiter, 'dlock_wait() listens again',
		announcement('granted', 'lock', $ticket));
	release($ticket);

	# Without another call, the session is not told, but can ask.
	$held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	$ticket = enqueue($waiter, 'lock', '1h');
	$waiter->query('UNLISTEN *');
	release($held);
	is($admin->query("SELECT dlock_wait($ticket)"), 't', 'UNLISTEN: granted');
	not_told($listener, 'UNLISTEN: the worker has nothing left', 'shared');
	is(ask($waiter, $ticket), 't', 'UNLISTEN: a session that asks gets the answer');
	not_told($waiter, 'UNLISTEN: nothing is announced');
	release($ticket);
	$waiter->quit;
}

#
# A repeated request in another session changes the channel.
#
{
	my @sessions = map { session($node) } 0 .. 2;
	my $lease = open_lease($admin);
	my $held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	my $ticket = enqueue($sessions[0], 'lock', $lease);

	is(enqueue($sessions[1], 'lock', $lease), $ticket, 'the same ticket');
	$sessions[0]->quit;
	is_now(
		$sessions[1],
		"SELECT channel = dlock_channel() FROM dlock_queue WHERE ticket = $ticket",
		't',
		'the table has the channel');
	is( $sessions[1]->query(
			"SELECT channel = dlock_channel() FROM dlock_locks WHERE ticket = $ticket"
		),
		't',
		'the view has the channel');
	release($held);
	told($sessions[1], 'announced to the last requester',
		announcement('granted', 'lock', $ticket));

	# The channel also changes if the ticket is granted already.
	is(enqueue($sessions[2], 'lock', $lease), $ticket, 'once more');
	told($sessions[2], 'granted already: announced to the last requester',
		announcement('granted', 'lock', $ticket));
	not_told($sessions[1], 'not announced on the old channel');
	is(enqueue($admin, 'lock', $lease, ", 'shared'"), $ticket, 'a given one');
	told($listener, 'announced on the given channel',
		announcement('granted', 'lock', $ticket));
	$admin->query("SELECT dlock_force_release($ticket)");
	told($listener, 'later events are announced there, too',
		announcement('released', 'lock', $ticket));
	not_told($sessions[2], 'not announced on the old channel');

	# The same with a ttl, and an owner that identifies the caller
	$held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	$ticket = enqueue($sessions[1], 'lock', '1h', ", owner => 'me'");
	is(enqueue($sessions[2], 'lock', '1h', ", owner => 'me'"),
		$ticket, 'ttl: the same ticket');
	release($held);
	told($sessions[2], 'ttl: announced to the last requester',
		announcement('granted', 'lock', $ticket));
	not_told($sessions[1], 'ttl: not announced to the first requester');
	release($ticket);
	$admin->query("SELECT dlock_lease_close($lease)");
	$_->quit foreach @sessions[ 1, 2 ];
}

#
# While the worker is stopped, no grant is written or announced.
#
{
	my $waiter = session($node);
	my $asker = session($node);
	my ($ticket, $pid, $name);

	$admin->query("SELECT dlock_acquire('lock')");
	$ticket = enqueue($waiter, 'lock', '1h', ", 'shared'");
	$pid = freeze($admin);
	$admin->query("SELECT dlock_release('lock')");
	is( $admin->query(
			"SELECT l.granted, q.granted FROM dlock_locks AS l "
			  . "JOIN dlock_queue AS q USING (ticket) WHERE ticket = $ticket"),
		't|f',
		'worker stopped: granted, but not in the table');
	$asker->start("SELECT dlock_wait($ticket, '0')");
	waits_for_journal($asker);
	$waiter->start("SELECT dlock_ttl_enqueue('another', '1h', 'shared')");
	waits_for_journal($waiter);
	ok(!$asker->answered, 'worker stopped: not confirmed');

	# Tickets of failed calls are gone, and never announced.
	$admin->query("SELECT pg_cancel_backend($waiter->{pid})");
	like($waiter->answer, qr/57014/, 'worker stopped: canceled');
	is( $admin->query("SELECT count(*) FROM dlock_locks WHERE name = 'another'"),
		'0',
		'worker stopped: nothing is enqueued then');
	is(scalar($listener->announcements(0)), 0, 'worker stopped: nothing is announced');
	thaw($pid);
	is($asker->answer, 't', 'worker goes on: confirmed');
	told($listener, 'worker goes on: announced',
		announcement('granted', 'lock', $ticket));
	release($ticket);
	not_told($listener, 'nothing else is announced', 'shared');
	$_->quit foreach $waiter, $asker;
}

#
# A grant is not announced before it is durable at the requested level.  The
# named standby does not exist.  A session that does not wait for standbys is
# told at once.  The same holds for a later worker.
#
foreach my $when ('grant written', 'worker terminated')
{
	my %sessions;
	my %tickets;
	my $asker = session($node);

	foreach my $level ('on', 'remote_apply', 'local', 'off')
	{
		my $me = ", 'shared', owner => 'me'";
		my $other = $level =~ /on|remote/ ? 'local' : 'on';

		$sessions{$level} = session($node);
		$admin->query("SELECT dlock_acquire('$level')");
		# the level of the latest request counts
		foreach my $asked ($other, $level)
		{
			$sessions{$level}->query("SET synchronous_commit = $asked");
			$tickets{$level} = enqueue($sessions{$level}, $level, '1h', $me);
		}
	}
	commits_hang($node, 1);
	# a worker that has read the setting
	terminate_worker();
	worker($admin);

	foreach my $level ('on', 'remote_apply')
	{
		$admin->query("SELECT dlock_release('$level')");
		is_now($admin,
			"SELECT granted FROM dlock_queue WHERE ticket = $tickets{$level}",
			't', "$when: $level: granted, and written");
	}
	terminate_worker() if $when eq 'worker terminated';
	foreach my $level ('local', 'off')
	{
		$admin->query("SELECT dlock_release('$level')");
		told($listener, "$when: $level: announced, and nothing before it",
			announcement('granted', $level, $tickets{$level}));
	}
	not_told($listener, "$when: nothing else", 'shared');
	$asker->query('SET synchronous_commit = on');
	$asker->start("SELECT dlock_wait($tickets{on}, '0')");
	poll('waits for the standby', sub { hangs($node, $asker) });
	ok(!$asker->answered, "$when: the grant is not confirmed");

	commits_hang($node, 0);
	is_deeply(
		[ sort $listener->announcements(2) ],
		[ map { announcement('granted', $_, $tickets{$_}) } 'on', 'remote_apply' ],
		"$when: announced when no standby is needed");
	is($asker->answer, 't', "$when: confirmed");
	release(values %tickets);
	not_told($listener, "$when: once each", 'shared');
	$_->quit foreach $asker, values %sessions;
}

#
# A lock is granted between the copy of the waiter's row and its commit, and then
# the table is locked.
#
SKIP:
{
	skip 'needs a debugger' if !debugger_works($admin);

	my ($holder, $waiter, $locker) = map { session($node) } 1 .. 3;
	my $log = -s $node->logfile;
	my ($copied, $ticket, $other);

	$holder->query("SELECT dlock_acquire('lock'), dlock_acquire('kept')");
	# A worker that is here stays while it may have to announce something.
	$waiter->query("SELECT dlock_enqueue('kept', 'nobody')");
	release($admin->query("SELECT dlock_ttl_acquire('ready', '1h')"));
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_queue');
	$copied = stop_at(worker($admin), 'dlock_rows_write if count > 0');
	$waiter->start("SELECT dlock_ttl_enqueue('lock', '1h', 'shared')");
	$copied->();
	$holder->query("SELECT dlock_release('lock')");
	$locker->start('BEGIN; LOCK TABLE dlock_queue IN SHARE MODE');
	$admin->wait_for(q{SELECT wait_event_type = 'Lock' }
		  . "FROM pg_stat_activity WHERE pid = $locker->{pid}");
	$copied->();
	is($locker->answer, '', 'granted after the copy: the row is written, and the table locked');
	$ticket = $waiter->answer;
	poll('the next row cannot be written',
		sub { slurp_file($node->logfile, $log) =~ /cannot write table "dlock_queue"/ });
	$other = $admin->query("SELECT dlock_enqueue('other', 'shared')");
	told($listener, 'granted after the copy: not announced while the row says waiting',
		announcement('granted', 'other', $other));
	is( $admin->query("SELECT granted, dlock_check('lock', $ticket) "
			  . "FROM dlock_queue WHERE ticket = $ticket"),
		'f|f', 'granted after the copy: not confirmed either');
	$locker->query('ROLLBACK');
	told($listener, 'granted after the copy: announced when the row says so',
		announcement('granted', 'lock', $ticket));
	release($ticket, $other);
	$_->quit foreach $holder, $waiter, $locker;
}

#
# The latest request is at a higher level.  Its channel is set between the write
# of the grant and the announcement.
#
SKIP:
{
	skip 'needs a debugger' if !debugger_works($admin);

	my $waiter = session($node);
	my $again = session($node);
	my $me = ", 'shared', owner => 'me'";
	my $held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	my $ticket = enqueue($waiter, 'lock', '1h', $me);
	my ($request, $worker);

	$again->query('SET synchronous_commit = on');
	is(ask($again, $ticket), 'f', 'raised level: the lock is held');
	$request = stop_at($again->{pid}, 'dlock_queue_redirect');
	$again->start("SELECT dlock_ttl_enqueue('lock', '1h'$me)");
	$request->();
	commits_hang($node, 1);
	# a worker that has read the setting
	terminate_worker();
	# a worker that has remembered earlier grants
	release($admin->query("SELECT dlock_ttl_acquire('ready', '1h')"));
	$worker =
	  stop_at_last(worker($admin), 'dlock_grants_remember', 'dlock_grants_announce');
	release($held);
	$worker->();
	is($admin->query("SELECT granted FROM dlock_queue WHERE ticket = $ticket"),
		't', 'raised level: granted, and written');
	$request->();
	is($again->answer, $ticket, 'raised level: the same ticket');
	$worker->();
	not_told($listener, 'raised level: not announced at the previous one', 'shared');
	commits_hang($node, 0);
	told($listener, 'raised level: announced when no standby is needed',
		announcement('granted', 'lock', $ticket));
	release($ticket);
	not_told($listener, 'raised level: once', 'shared');
	$_->quit foreach $waiter, $again;
}

#
# Nothing can be announced, and all else goes on.  Either a session holds
# NOTIFY's lock: a transaction that notifies and writes holds the lock during
# its commit, which waits for a standby here.  Or NOTIFY's queue is full,
# because a session listens and stays in a transaction.
#
my %nuisances = (
	'lock of NOTIFY' => sub {
		my ($application) = @_;

		commits_hang($node, 1);
		$application->query('SET synchronous_commit = on');
		$application->start(
			'BEGIN; INSERT INTO t VALUES (1); NOTIFY application; COMMIT');
		poll('the application holds the lock',
			sub { hangs($node, $application) });
		return sub {
			commits_hang($node, 0);
			$application->answer;
		};
	},
	'queue of NOTIFY' => sub {
		my ($application) = @_;
		my $full = qr/54000.*too many notifications in the NOTIFY queue/;

		$application->query('LISTEN application');
		$application->query('BEGIN; SELECT 1');
		# Notify on the channel of the session that does not read: some
		# versions queue nothing for a channel without listeners in the
		# database.  Use many transactions, because commits signal listeners to
		# read.
		like(
			$admin->query(
				q{DO $$
				BEGIN
					FOR n IN 1 .. 1000 LOOP
						PERFORM pg_notify('application', n || repeat('x', 7000));
						COMMIT;
					END LOOP;
				END $$}),
			$full,
			'the queue of NOTIFY is full');
		like($admin->query('NOTIFY application'), $full, 'for everybody');
		return sub { $application->query('COMMIT'); };
	});

sub nuisance
{
	my ($what) = @_;
	my $application = session($node);
	my $waiter = session($node);
	my $keeper = session($node);
	my $log = -s $node->logfile;
	my (%tickets, $lease, $pid);

	$lease = $keeper->query("SELECT dlock_lease_open('100ms', attach => true)");
	$tickets{expiring} = enqueue($admin, 'expiring', $lease, ", 'shared'");
	$admin->query("SELECT dlock_acquire('lock')");
	$tickets{lock} = enqueue($admin, 'lock', '1h', ", 'shared'");
	told($listener, "$what: before",
		announcement('granted', 'expiring', $tickets{expiring}));
	$pid = worker($admin);

	my $end = $nuisances{$what}->($application);

	# The journal goes on.
	$tickets{free} = enqueue($waiter, 'free', '1h', ", 'shared'");
	poll('cannot be announced',
		sub {
			slurp_file($node->logfile, $log) =~
			  /too many notifications in the NOTIFY queue/
			  || $admin->query(
				q{SELECT count(*) = 1 FROM pg_stat_activity
				   WHERE backend_type = 'dlock sender'
					 AND wait_event_type = 'Lock'}) eq 't';
		});
	$admin->query("SELECT dlock_release('lock')");
	is($waiter->query("SELECT dlock_wait($tickets{lock})"),
		't', "$what: granted, and written");
	$tickets{$_} = enqueue($waiter, "more $_", '1h', ", 'shared'")
	  foreach 1 .. 3;
	is_now($admin, 'SELECT count(*) FROM dlock_queue WHERE granted',
		'6', "$what: the journal goes on");

	# Expiry and hand-over go on.
	$waiter->start("SELECT dlock_ttl_acquire('expiring', '1h')");
	$admin->until_waits($waiter);
	$keeper->quit;
	$tickets{next} = $waiter->answer;
	like($tickets{next}, qr/^\d+$/, "$what: an expiry hands on");
	is( $admin->query(
			"SELECT dlock_check('expiring', $tickets{expiring}), "
			  . "dlock_check('expiring', $tickets{next})"),
		'f|t',
		"$what: to the next");
	is(scalar($listener->announcements(0)), 0, "$what: nothing is announced");
	is(worker($admin), $pid, "$what: the worker lives on");

	# A worker that exits loses nothing.
	terminate_worker();
	is($waiter->query("SELECT dlock_ttl_acquire('by the next', '1h') > 0"),
		't', "$what: another worker goes on");
	is(scalar($listener->announcements(0)), 0, "$what: announcements are held up, too");

	$end->();
	is_deeply(
		[ sort $listener->announcements(7) ],
		[
			sort(announcement('granted', 'free', $tickets{free}),
				announcement('granted', 'lock', $tickets{lock}),
				announcement('wanted', 'expiring', $tickets{expiring}),
				announcement('expired', 'expiring', $tickets{expiring}),
				map { announcement('granted', "more $_", $tickets{$_}) } 1 .. 3)
		],
		"$what: then all is announced");
	is(ask($waiter, $tickets{$_}), 't', "$what: $_: confirmed")
	  foreach 'free', 'lock', 1 .. 3;
	$admin->query('SELECT dlock_release_ticket(ticket) FROM dlock_locks');
	not_told($listener, "$what: nothing else is announced", 'shared');
	$_->quit foreach $application, $waiter;
	return;
}

nuisance('lock of NOTIFY');

SKIP:
{
	skip "no setting $small_queue: the queue is too large to be filled"
	  if $admin->query(
		"SELECT count(*) FROM pg_settings WHERE name = '$small_queue'") eq '0';

	$_->quit foreach $admin, $listener;
	$node->append_conf('postgresql.conf', "$small_queue = 64");
	$node->restart;
	$admin = session($node);
	$listener = session($node);
	$listener->query('LISTEN shared');
	nuisance('queue of NOTIFY');
}

#
# Grants that no standby acknowledges, of tickets that have ended
#
{
	my $used = 'SELECT memory_used FROM dlock_stats';
	my $lease = open_lease($admin);
	my ($before, $rows);

	$listener->query("SELECT dlock_acquire('outage')");
	$before = $admin->query($used);
	$admin->query('SET synchronous_commit = on; '
		  . "SELECT count(dlock_lease_enqueue('outage', $lease, 'other', "
		  . 'shared => true, owner => n::text)) FROM generate_series(1, 400) AS n; '
		  . 'SET synchronous_commit = local');
	commits_hang($node, 1);
	$listener->query("SELECT dlock_release('outage')");
	$rows = "FROM dlock_queue WHERE lease = $lease AND granted";
	ok($admin->wait_for("SELECT count(*) = 400 $rows"), 'outage: the grants are written');
	is($admin->query("SELECT dlock_lease_close($lease)"), '400', 'outage: all end');
	ok($admin->wait_for("SELECT count(*) = 0 $rows"), 'outage: the rows are removed');
	ok( $admin->wait_for("SELECT ($used) < $before + 40000"),
		'outage: their memory is free before a standby acknowledges them');
	commits_hang($node, 0);
}

#
# A crash of the server with pending announcements
#
{
	my $application = session($node);
	my $waiter = session($node);
	my $lease = open_lease($admin);
	my ($held, $given, $own, $freed, $untold, $unasked);

	$admin->query("SELECT dlock_acquire('freed')");
	$admin->query("SELECT dlock_lease_acquire('unasked', $lease)");
	$held = $admin->query("SELECT dlock_ttl_acquire('lock', '1h')");
	$given = enqueue($waiter, 'lock', '1h', ", 'shared'");
	$own = enqueue($waiter, 'lock', '1h');
	$freed = enqueue($waiter, 'freed', '1h', ", 'other'");
	$unasked = enqueue($waiter, 'unasked', '1h', ", 'shared'");
	$nuisances{'lock of NOTIFY'}->($application);
	$untold = enqueue($waiter, 'untold', '1h', ", 'shared'");
	$node->kill9;
	backends_gone($admin->{pid}, $waiter->{pid}, $listener->{pid});
	$_->quit foreach $application, $waiter, $admin, $listener;
	$node->append_conf('postgresql.auto.conf', "synchronous_standby_names = ''");
	start_again($node);

	# This is the first call after the crash.
	$listener = session($node);
	$listener->query('LISTEN shared');
	is(ask($listener, $untold), 't', 'crash: granted, and never announced');
	is(ask($listener, $given), 'f', 'crash: still waiting');
	is(ask($listener, $own), 'f', 'crash: still waiting, own channel');
	is($listener->query("SELECT dlock_check('lock', $held)"),
		't', 'crash: still held');

	# This lock's holder was a session.  If the grant was written before the
	# crash, it is not announced again.
	is($listener->query("SELECT dlock_wait($freed)"),
		't', 'crash: granted by the crash');

	$admin = session($node);
	release($held);
	told($listener, 'crash: the next is announced as well',
		announcement('granted', 'lock', $given),
		announcement('wanted', 'lock', $given));
	is(ask($listener, $given), 't', 'crash: confirmed');
	is($admin->query("SELECT dlock_lease_close($lease)"),
		'1', 'crash: the lease is there, too');
	told($listener, 'crash: announced without a call',
		announcement('granted', 'unasked', $unasked));

	# An ended session's channel has no listener, but dlock_wait() answers.
	release($given);
	is($listener->query("SELECT dlock_wait($own)"),
		't', 'crash: own channel: dlock_wait() answers');
	not_told($listener, 'crash: nothing else', 'shared');
	$listener->quit;
}

$admin->quit;
done_testing();
