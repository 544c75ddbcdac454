# Every grant of an enqueued ticket is announced: as JSON, on the channel that
# was requested, after the enqueuing transaction has committed, and even if
# NOTIFY or the worker is blocked for some time.  That blocks no lock.
#
# What would break it: an announcement before its LISTEN, or of a transaction
# that was rolled back; an announcement that is forgotten if it could not be
# sent, or if no process could send it; a worker that waits for other sessions,
# or that does not exit.
#
# To show that nothing was announced, the test waits for a later announcement.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease qw(stop_process continue_process);
use Dlock::Lease qw(:DEFAULT enqueue);
use Dlock::Test;
use Encode qw(encode);
use JSON::PP qw(decode_json);
use Test::More;

# Streaming is allowed, so that a commit can wait for a standby.
my $node = new_server(
	'main',
	allows_streaming => 1,
	conf => q{
deadlock_timeout = '1h'
restart_after_crash = on
});
my $admin = session($node);

$node->safe_psql('postgres', 'CREATE TABLE t (n integer)');

# No announcement has arrived, and none is on its way: the sender announces a
# ticket that the test enqueues, on the channel of the listener.
my $last = 0;

sub not_told
{
	my ($listener, $sender, $test, $channel) = @_;
	my $name = 'last ' . ++$last;
	my $ticket =
	  enqueue($sender, $name, $channel ? ", '$channel'" : '');
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	told($listener, $test, announcement('granted', $name, $ticket));
	$sender->query("SELECT dlock_release_ticket($ticket)");
	return;
}

my $worker = "FROM pg_stat_activity WHERE backend_type = 'dlock worker'";
my $sender = "FROM pg_stat_activity WHERE backend_type = 'dlock sender'";
my $sender_waits = "SELECT count(*) = 1 $sender AND wait_event_type = 'Lock'";

sub worker_gone
{
	my ($when) = @_;

	return $admin->wait_for("SELECT count(*) = 0 $worker")
	  && $admin->wait_for("SELECT count(*) = 0 $sender")
	  && pass("$when: the worker has ended, and the sender");
}

#
# Announcements on the session's own channel, without a LISTEN by the client
#
{
	my $holder = session($node);
	my $waiter = session($node);
	my $ticket;

	$ticket = enqueue($waiter, 'free');
	told($waiter, 'a lock that is free',
		announcement('granted', 'free', $ticket));
	is( $waiter->query('SELECT channel = dlock_channel() FROM dlock_locks'),
		't',
		'dlock_locks shows the channel');
	$waiter->query("SELECT dlock_release('free')");

	$holder->query("SELECT dlock_acquire('lock')");
	$ticket = enqueue($waiter, 'lock');
	not_told($waiter, $waiter, 'a lock that is held');
	$holder->query("SELECT dlock_release('lock')");
	told($waiter, 'a lock that was held',
		announcement('granted', 'lock', $ticket));

	# A ticket that is enqueued again is announced again, each time.
	is(enqueue($waiter, 'lock'), $ticket, 'enqueued again');
	told($waiter, 'enqueued again: announced again',
		announcement('granted', 'lock', $ticket));
	is($waiter->query("SELECT dlock_wait($ticket)"), 't', 'confirmed');
	not_told($waiter, $waiter, 'dlock_wait() brings none');
	$waiter->query('SELECT dlock_release_all()');

	# Acquired tickets, or tickets that end before the grant: no announcement.
	$waiter->query("SELECT dlock_acquire('lock')");
	not_told($waiter, $waiter, 'not enqueued, not announced');
	$ticket = enqueue($holder, 'lock');
	$holder->query("SELECT dlock_release_ticket($ticket)");
	$waiter->query("SELECT dlock_release('lock')");
	not_told($holder, $holder, 'a ticket that was released');

	# UNLISTEN is obeyed until the next call.
	$waiter->query('UNLISTEN *');
	$ticket = enqueue($waiter, 'lock');
	told($waiter, 'after UNLISTEN: dlock_enqueue() listens',
		announcement('granted', 'lock', $ticket));
	$waiter->query('SELECT dlock_release_all()');
	$holder->query("SELECT dlock_acquire('lock')");
	$ticket = enqueue($waiter, 'lock');
	$waiter->query('UNLISTEN *');
	is($waiter->query("SELECT dlock_wait($ticket, '0')"), 'f', 'asked');
	$holder->query("SELECT dlock_release('lock')");
	told($waiter, 'after UNLISTEN: dlock_wait() listens',
		announcement('granted', 'lock', $ticket));
	$waiter->query('SELECT dlock_release_all()');

	# DISCARD ALL unlistens, and another client may use the session.
	$waiter->query('DISCARD ALL');
	$ticket = enqueue($waiter, 'lock');
	told($waiter, 'after DISCARD ALL',
		announcement('granted', 'lock', $ticket));
	$waiter->query('SELECT dlock_release_all()');

	# Each session is told of its own tickets.
	$holder->query("SELECT dlock_acquire('lock')");
	my @sessions = map { session($node) } 0 .. 3;
	my @tickets = map { enqueue($_, 'lock', ', shared => true') } @sessions;
	$holder->query("SELECT dlock_release('lock')");
	told($sessions[$_], 'a session is told of its own ticket',
		announcement('granted', 'lock', $tickets[$_]))
	  foreach 0 .. 3;
	not_told($_, $_, 'a session is told of no other ticket') foreach @sessions;
	$_->quit foreach @sessions, $holder, $waiter;
	worker_gone('no ticket is left');
}

#
# Announcements on a channel that another session listens on
#
{
	my $listener = session($node);
	my $waiter = session($node);
	my @tickets;

	foreach my $channel ('shared', 'Two words', q(q"u'o\te), 'x' x 63,
		encode('UTF-8', "gr\x{f6}\x{df}e"))
	{
		my $quoted = $channel =~ s/"/""/gr;
		my $literal = $channel =~ s/'/''/gr;

		$listener->query(qq(LISTEN "$quoted"));
		push @tickets, enqueue($waiter, 'lock', ", '$literal'");
		told($listener, "channel $channel",
			announcement('granted', 'lock', $tickets[-1]));
	}
	is(join(' ', keys %{ { map { $_ => 1 } @tickets } }),
		$tickets[0], 'one ticket all the time');
	is($waiter->query('SELECT count(*) FROM pg_listening_channels()'),
		'0', 'the enqueuing session does not listen on it');
	$listener->query('UNLISTEN *; LISTEN shared');

	# more than one batch
	@tickets = split /\n/,
	  $waiter->query(q{SELECT dlock_enqueue('lock ' || n, 'shared')
						 FROM generate_series(1, 250) AS n});
	is( join("\n", sort $listener->announcements(250)),
		join(
			"\n",
			sort map { announcement('granted', "lock $_", $tickets[ $_ - 1 ]) }
			  1 .. 250),
		'many at once');
	$waiter->quit;
	backends_gone($waiter->{pid});
	not_told($listener, $admin, 'once each', 'shared');

	#
	# Nothing is announced before the commit, or after a rollback before a call
	#
	$waiter = session($node);
	foreach my $state ('free', 'held')
	{
		my $holder = session($node);
		my $ticket;
		# if it was held, release it now
		my $is_granted = sub {
			$holder->query('SELECT dlock_release_all()');
			is( $admin->query(
					q{SELECT bool_and(granted) FROM dlock_locks
					   WHERE name = 'lock'}),
				't',
				"$state: granted");
		};

		# COMMIT
		$holder->query("SELECT dlock_acquire('lock')") if $state eq 'held';
		$waiter->query('BEGIN');
		$ticket = enqueue($waiter, 'lock', ", 'shared'");
		$is_granted->();
		not_told($listener, $admin, "$state: not before the commit", 'shared');
		is($waiter->query("SELECT dlock_wait($ticket, '0')"),
			't', "$state: dlock_wait() knows it already");
		not_told($listener, $admin, "$state: a question does not announce it", 'shared');
		$waiter->query('COMMIT');
		told($listener, "$state: after the commit",
			announcement('granted', 'lock', $ticket));
		$waiter->query('SELECT dlock_release_all()');

		# ROLLBACK
		$holder->query("SELECT dlock_acquire('lock')") if $state eq 'held';
		$waiter->query('BEGIN');
		$ticket = enqueue($waiter, 'lock', ", 'shared'");
		$waiter->query('ROLLBACK');
		$is_granted->();
		not_told($listener, $admin, "$state: not after a rollback", 'shared');
		like(
			$waiter->query(
				"BEGIN; SELECT dlock_wait($ticket, '0'); SELECT 1/0; COMMIT"),
			qr/22012/,
			"$state: failed");
		not_told($listener, $admin, "$state: not after another rollback", 'shared');
		is($waiter->query("SELECT dlock_wait($ticket, '0')"),
			't', "$state: the ticket still exists");
		told($listener, "$state: after the next call",
			announcement('granted', 'lock', $ticket));
		$waiter->query('SELECT dlock_release_all()');

		# ROLLBACK TO SAVEPOINT
		my %savepoint;
		$holder->query("SELECT dlock_acquire_all('{lock, a, b, c, d}')")
		  if $state eq 'held';
		$waiter->query('BEGIN; SAVEPOINT zero');
		$savepoint{a} = enqueue($waiter, 'a', ", 'shared'");
		$waiter->query('RELEASE zero; SAVEPOINT zero; ROLLBACK TO zero');
		$savepoint{b} = enqueue($waiter, 'b', ", 'shared'");
		$waiter->query('RELEASE zero; SAVEPOINT one');
		$ticket = enqueue($waiter, 'lock', ", 'shared'");
		$waiter->query('SAVEPOINT two');
		$savepoint{c} = enqueue($waiter, 'c', ", 'shared'");
		$waiter->query('RELEASE two; ROLLBACK TO one; SAVEPOINT two');
		$savepoint{d} = enqueue($waiter, 'd', ", 'shared'");
		$waiter->query('RELEASE two; COMMIT');
		$is_granted->();
		is( join("\n", sort $listener->announcements(3)),
			join("\n",
				map { announcement('granted', $_, $savepoint{$_}) }
				  qw(a b d)),
			"$state: what was not rolled back");
		not_told($listener, $admin,
			"$state: not after a rollback to a savepoint", 'shared');
		$waiter->query("SELECT dlock_wait($ticket)");
		told($listener, "$state: until the next call",
			announcement('granted', 'lock', $ticket));
		is(enqueue($waiter, 'c', ", 'shared'"),
			$savepoint{c}, "$state: the same ticket");
		told($listener, "$state: after dlock_enqueue()",
			announcement('granted', 'c', $savepoint{c}));
		$waiter->query('SELECT dlock_release_all()');

		# in a function that catches its error
		$holder->query("SELECT dlock_acquire('lock')") if $state eq 'held';
		$waiter->query(
			q{DO $$
			BEGIN
				PERFORM dlock_enqueue('lock', 'shared');
				RAISE 'out';
			EXCEPTION WHEN raise_exception THEN
				NULL;
			END $$});
		$is_granted->();
		not_told($listener, $admin, "$state: error caught", 'shared');
		$waiter->query('SELECT dlock_release_all()');
		$holder->quit;
	}

	# The same on the session's own channel, on which a session hears nothing
	# during its transaction: an earlier message would be lost.
	foreach my $own (session($node), $waiter)
	{
		my $ticket;

		$own->query('BEGIN');
		$ticket = enqueue($own, 'lock');
		not_told($listener, $admin, 'the worker has nothing left', 'shared');
		$own->query('COMMIT');
		told($own, 'own channel: after the commit',
			announcement('granted', 'lock', $ticket));
		$own->query('BEGIN');
		is(enqueue($own, 'lock'), $ticket, 'own channel: again');
		$own->query('ROLLBACK');
		not_told($own, $own, 'own channel: not after a rollback');
		$own->quit;
	}

	# A session's first announcement comes in the transaction that listens.
	my $missed = 0;
	foreach my $round (1 .. 20)
	{
		my $own = session($node);
		my $ticket = enqueue($own, "round $round");

		$missed++
		  unless join("\n", $own->announcements(1)) eq
		  announcement('granted', "round $round", $ticket);
		$own->quit;
	}
	is($missed, 0, 'the first announcement of 20 sessions');

	$listener->quit;
	worker_gone('channels');
}

#
# The name is any text.  The payload is JSON in ASCII in every encoding.
#
{
	my %names = (
		'quote' => q(a"b'c),
		'backslash' => q(a\\b\\"c\\u0041\\n/),
		'control' => join('', map { chr } 1 .. 31, 127),
		'JSON' => q({"event":"released"}),
		'latin' => "\x{e9}\x{ff}\x{df}\x{80}\x{9f}",
		'255 bytes' => '\\' x 255,
		'255 bytes of control' => "\x01" x 255);
	my %more = (
		'two bytes' => "\x{3b1}\x{7ff}",
		'three bytes' => "\x{20ac}\x{ffff}\x{800}\x{d7ff}\x{e000}",
		'emoji' => "\x{1f512}\x{10000}\x{10ffff}",
		'255 bytes of emoji' => 'abc' . "\x{1f512}" x 63);
	my %perl = (
		UTF8 => 'utf8',
		LATIN1 => 'ISO-8859-1',
		LATIN9 => 'ISO-8859-15',
		# If the encoding is unknown, bytes are shown unchanged.
		SQL_ASCII => 'ISO-8859-1');
	my %exact = (
		'quote' => q("a\\"b'c"),
		'latin' => q("\\u00e9\\u00ff\\u00df\\u0080\\u009f"),
		'emoji' => q("\\ud83d\\udd12\\ud800\\udc00\\udbff\\udfff"));

	foreach my $encoding (sort keys %perl)
	{
		my $database = lc $encoding;
		my $session;
		my %try = %names;

		%try = (%names, %more) if $encoding eq 'UTF8';
		$try{'its own'} = "\x{20ac}\x{160}" if $encoding eq 'LATIN9';

		$node->safe_psql('postgres',
			    "CREATE DATABASE $database ENCODING '$encoding' "
			  . "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0");
		$node->safe_psql($database, 'CREATE EXTENSION dlock');
		$session = session($node, $database,
			"options='-c client_encoding=$encoding'");
		foreach my $what (sort keys %try)
		{
			my $name = $try{$what};
			my $bytes = encode($perl{$encoding}, $name);
			my $ticket = $session->query(
				"SELECT dlock_enqueue(convert_from('\\x"
				  . unpack('H*', $bytes)
				  . "', '$encoding'))");
			my ($payload) = $session->announcements(1);

			like($payload, qr/^[\x20-\x7f]+$/, "$encoding, $what: ASCII");
			is_deeply(
				decode_json($payload),
				{ event => 'granted', lock => $name, ticket => $ticket },
				"$encoding, $what: JSON");
			like(
				$payload,
				qr/^\{"event":"granted","lock":".*","ticket":$ticket\}$/,
				"$encoding, $what: its form");
			is( $payload,
				qq({"event":"granted","lock":$exact{$what},"ticket":$ticket}),
				"$encoding, $what: exactly")
			  if $exact{$what};
			is( $session->query(
					"SELECT count(*) FROM dlock_locks WHERE ticket = $ticket "
					  . "AND name = (\$\$$payload\$\$::json)->>'lock'"),
				'1',
				"$encoding, $what: what PostgreSQL makes of it")
			  if $encoding eq 'UTF8';
		}
		$session->quit;
	}

	# Each of these databases had a worker, but can be dropped.
	$node->safe_psql('postgres', 'DROP DATABASE ' . lc) foreach keys %perl;
}

#
# A forced release
#
{
	my $holder = session($node);
	my $waiter = session($node);
	my ($held, $ticket);

	$held = enqueue($holder, 'lock');
	told($holder, 'granted', announcement('granted', 'lock', $held));
	$ticket = enqueue($waiter, 'lock');
	$admin->query("SELECT dlock_force_release($held)");
	told($holder, 'a holder is told of its forced release',
		announcement('wanted', 'lock', $held),
		announcement('released', 'lock', $held));
	told($waiter, 'the next ticket\'s session is told of its grant',
		announcement('granted', 'lock', $ticket));
	like($holder->query("SELECT dlock_wait($held, '0')"),
		qr/55L01/, 'dlock_wait() confirms the forced release');
	like($holder->query("SELECT dlock_release_ticket($held)"),
		qr/55L01.*^f$/ms, 'dlock_release_ticket() confirms it, too');

	$held = enqueue($holder, 'lock');
	$admin->query("SELECT dlock_force_release($held)");
	told($holder, 'a waiter is told of its forced release',
		announcement('released', 'lock', $held));
	$holder->query("SELECT dlock_release_ticket($held)");
	$admin->query("SELECT dlock_release('lock')");

	# Both events in one transaction
	$holder->query('BEGIN');
	$held = enqueue($holder, 'another');
	$admin->query("SELECT dlock_force_release($held)");
	$holder->query('COMMIT');
	told($holder, 'granted and released before the commit',
		announcement('granted', 'another', $held),
		announcement('released', 'another', $held));
	$_->quit foreach $holder, $waiter;
	worker_gone('forced release');
}

#
# NOTIFY's lock
#
# A transaction that notifies and writes holds NOTIFY's lock during its commit,
# which here waits for a standby that does not exist.  Until the commit ends,
# nothing is announced, but all else continues.
#
sub hold_up_notify
{
	my ($application) = @_;
	my $held_up = "SELECT count(*) FROM pg_stat_activity "
	  . "WHERE pid = $application->{pid} AND wait_event = 'SyncRep'";

	# These two statements write no WAL, so they do not wait for the standby.
	$admin->query("ALTER SYSTEM SET synchronous_standby_names = 'missing'");
	$admin->query('SELECT pg_reload_conf()');

	# The setting takes effect some time later.
	poll(
		'a commit waits for the standby',
		sub {
			$application->start('BEGIN; INSERT INTO t VALUES (1); '
				  . 'NOTIFY application; COMMIT');
			poll('waits, or has committed',
				sub {
					$application->answered || $admin->query($held_up) eq '1';
				});
			return 1 unless $application->answered;
			$application->answer;
			return 0;
		});
	return;
}

# The commit stops waiting, with a warning, and is complete.
sub let_go_of_notify
{
	my ($application) = @_;

	$admin->query("SELECT pg_cancel_backend($application->{pid})");
	return $application->answer;
}

sub reset_standby
{
	$admin->query('ALTER SYSTEM RESET synchronous_standby_names');
	$admin->query('SELECT pg_reload_conf()');
	return;
}

{
	my $application = session($node);
	my $holder = session($node);
	my $waiter = session($node);
	my $ticket;
	my $pid;

	$ticket = enqueue($waiter, 'before');
	told($waiter, 'before', announcement('granted', 'before', $ticket));
	$pid = $admin->query("SELECT pid $worker");
	hold_up_notify($application);

	# more than one batch, so that it takes more than one transaction
	$holder->query("SELECT dlock_acquire('lock')");
	$ticket = enqueue($waiter, 'lock');
	my @tickets = split /\n/,
	  $waiter->query(q{SELECT dlock_enqueue('lock ' || n)
						 FROM generate_series(1, 150) AS n});
	$holder->query("SELECT dlock_release('lock')");
	is($waiter->query("SELECT dlock_wait($ticket)"),
		't', 'NOTIFY is held up: the lock is granted');
	$admin->wait_for($sender_waits);
	$waiter->query("SELECT dlock_release('lock')");
	is( $holder->query("SELECT dlock_try_acquire('lock') IS NOT NULL"),
		't',
		'NOTIFY is held up: released and acquired');
	# Enqueue tickets while the sender waits for the lock.
	foreach my $round (1 .. 3)
	{
		push @tickets, enqueue($waiter, "round $round");
		is( $waiter->query("SELECT dlock_wait($tickets[-1])"),
			't', "NOTIFY is held up: enqueued, round $round");
	}
	$holder->query('SELECT dlock_release_all()');
	is(scalar($waiter->announcements(0)), 0, 'nothing is announced before');
	is($admin->query("SELECT pid $worker"), $pid, 'the worker lives on');
	ok(!$application->answered, 'the application still holds the lock');

	let_go_of_notify($application);
	reset_standby();
	is( join("\n", sort $waiter->announcements(153)),
		join(
			"\n",
			sort((map { announcement('granted', "lock $_", $tickets[ $_ - 1 ]) }
					1 .. 150),
				(map { announcement('granted', "round $_", $tickets[ 149 + $_ ]) }
					1 .. 3))),
		'then all tickets are announced that are not released');
	not_told($waiter, $waiter, 'once each');
	$_->quit foreach $application, $holder, $waiter;
	worker_gone('the lock of NOTIFY');
}

# A ticket is enqueued again for another channel while the sender is about to
# announce it on the first.  The second announcement must not be lost.
{
	my $application = session($node);
	my $waiter = session($node);
	my $ticket = enqueue($waiter, 'before');

	told($waiter, 'before', announcement('granted', 'before', $ticket));
	hold_up_notify($application);
	$ticket = enqueue($waiter, 'lock', ", 'nobody'");
	$admin->wait_for($sender_waits);
	is(enqueue($waiter, 'lock'), $ticket, 'enqueued again while it is sent');
	let_go_of_notify($application);
	told($waiter, 'announced again', announcement('granted', 'lock', $ticket));
	reset_standby();
	$_->quit foreach $application, $waiter;
	worker_gone('enqueued again while it is sent');
}

#
# Announcements need no standby, because they are about memory.
#
{
	my $application = session($node);
	my $waiter = session($node);
	my $ticket = enqueue($waiter, 'lock');

	told($waiter, 'before', announcement('granted', 'lock', $ticket));
	hold_up_notify($application);
	like(let_go_of_notify($application),
		qr/WARNING/, 'the application does not wait any more');

	# The standby is still missing.
	$waiter->query("SELECT dlock_release('lock')");
	$ticket = enqueue($waiter, 'lock');
	told($waiter, 'announced while a standby is missing',
		announcement('granted', 'lock', $ticket));
	reset_standby();
	$_->quit foreach $application, $waiter;
	worker_gone('missing standby');
}

#
# The worker or the sender is killed, with something to announce.
#
foreach my $type ('sender', 'worker')
{
	my $application = session($node);
	my $waiter = session($node);
	my $ticket = enqueue($waiter, 'before');

	told($waiter, 'before', announcement('granted', 'before', $ticket));
	hold_up_notify($application);
	$ticket = enqueue($waiter, 'lock');
	$admin->wait_for($sender_waits);
	my $pid = $admin->query(
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'dlock $type'");
	$admin->query("SELECT pg_terminate_backend($pid)");
	backends_gone($pid);
	$admin->wait_for($sender_waits);
	isnt(
		$admin->query(
			"SELECT pid FROM pg_stat_activity WHERE backend_type = 'dlock $type'"),
		$pid,
		"$type terminated: another one comes by itself");
	let_go_of_notify($application);
	reset_standby();
	told($waiter, "$type terminated: announced",
		announcement('granted', 'lock', $ticket));
	not_told($waiter, $waiter, "$type terminated: once");
	$_->quit foreach $application, $waiter;
	worker_gone("$type terminated");
}

#
# Both are killed at once.
#
{
	my $application = session($node);
	my $waiter = session($node);
	my $ticket = enqueue($waiter, 'before');
	my $pid;

	told($waiter, 'before', announcement('granted', 'before', $ticket));
	hold_up_notify($application);
	$ticket = enqueue($waiter, 'lock');
	$admin->wait_for($sender_waits);
	$pid = $admin->query("SELECT pid $worker");
	my $sender_pid = $admin->query("SELECT pid $sender");
	stop_process($sender_pid);
	$admin->query(
		"SELECT pg_terminate_backend($pid), pg_terminate_backend($sender_pid)");
	backends_gone($pid);
	continue_process($sender_pid);
	backends_gone($sender_pid);
	let_go_of_notify($application);
	reset_standby();

	# Any call starts a worker, even an unrelated call.
	$admin->query("SELECT dlock_is_held('something else')");
	told($waiter, 'worker terminated: announced by the next worker',
		announcement('granted', 'lock', $ticket));
	cmp_ok($admin->query("SELECT pid $worker"),
		'!=', $pid, 'worker terminated: the worker has changed');

	# Without anything to announce, nothing is lost.
	$pid = $admin->query("SELECT pid $worker");
	$admin->query("SELECT pg_terminate_backend($pid)");
	backends_gone($pid);
	$ticket = enqueue($waiter, 'again');
	told($waiter, 'worker terminated: a new worker starts when needed',
		announcement('granted', 'again', $ticket));

	# A crash ends all locks and announcements.
	$admin->wait_for("SELECT count(*) = 1 $worker");
	$pid = $admin->query("SELECT pid $worker");
	kill('KILL', $pid) == 1 or die "no process $pid";
	backends_gone($waiter->{pid}, $admin->{pid});
	$_->quit foreach $application, $waiter, $admin;
	poll('server is back', sub { answers($node) });
	$admin = session($node);
	$waiter = session($node);
	is($admin->query("SELECT count(*) $worker"), '0',
		'worker killed: there is none');
	$ticket = enqueue($waiter, 'lock');
	told($waiter, 'worker killed: another worker announces',
		announcement('granted', 'lock', $ticket));
	not_told($waiter, $waiter, 'worker killed: nothing old comes');
	$waiter->quit;
	worker_gone('worker killed');
}

#
# The worker exits when no ticket is left that it could announce.
#
{
	my @sessions = map { session($node) } 0, 1;
	my @tickets = map { enqueue($_, 'lock') } @sessions;

	told($sessions[0], 'first',
		announcement('granted', 'lock', $tickets[0]),
		announcement('wanted', 'lock', $tickets[0]));
	$sessions[0]->query("SELECT dlock_release_ticket($tickets[0])");
	told($sessions[1], 'second', announcement('granted', 'lock', $tickets[1]));
	$sessions[1]->query("SELECT dlock_release_ticket($tickets[1])");
	worker_gone('sessions are there, but no tickets');

	# a ticket that does not exist
	$admin->query("SELECT dlock_acquire('slots', slots => 1)");
	$tickets[0] = enqueue($sessions[0], 'lock');
	told($sessions[0], 'again', announcement('granted', 'lock', $tickets[0]));
	like($sessions[0]->query("SELECT dlock_enqueue('slots', slots => 2)"),
		qr/55000/, 'dlock_enqueue() fails');
	$sessions[0]->query("SELECT dlock_release_ticket($tickets[0])");
	worker_gone('failed calls');
	$admin->query("SELECT dlock_release('slots')");

	# a ticket that ends as another is enqueued
	foreach my $round (1 .. 5)
	{
		my $ticket = enqueue($sessions[0], "round $round");

		told($sessions[0], "round $round",
			announcement('granted', "round $round", $ticket));
		$sessions[0]->query("SELECT dlock_release_ticket($ticket)");
	}
	$_->quit foreach @sessions;
	worker_gone('sessions that ended');
}

#
# Two databases have two workers, and neither announces the other's tickets.
#
{
	my @databases = ('one', 'two');
	my (@sessions, @tickets);

	$node->safe_psql('postgres', "CREATE DATABASE $_") foreach @databases;
	$node->safe_psql($_, 'CREATE EXTENSION dlock') foreach @databases;
	@sessions = map { session($node, $_) } @databases;
	$_->query('LISTEN shared') foreach @sessions;
	push @tickets, enqueue($_, 'lock', ", 'shared'") foreach @sessions;
	told($sessions[$_], "database $databases[$_]",
		announcement('granted', 'lock', $tickets[$_]))
	  foreach 0, 1;
	is( $admin->query("SELECT string_agg(datname, ' ' ORDER BY datname) $worker"),
		'one two',
		'two databases, two workers');
	not_told($_, $_, 'each worker announces only its own tickets', 'shared') foreach @sessions;

	# A connected session would block DROP DATABASE, but the worker does not.
	$sessions[0]->quit;
	$node->safe_psql('postgres', 'DROP DATABASE one');
	$tickets[1] = enqueue($sessions[1], 'another', ", 'shared'");
	told($sessions[1], 'the other worker goes on',
		announcement('granted', 'another', $tickets[1]));

	# After DROP EXTENSION, tickets of the old installation are still
	# announced, by a worker of their own.
	my $old = session($node, 'two');
	$old->query('LISTEN shared');
	my $ticket = enqueue($old, 'another', ", 'shared'");
	my $new = session($node, 'two');
	$new->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
	my $other = enqueue($new, 'another');
	told($new, 'a new installation', announcement('granted', 'another', $other));
	$sessions[1]->quit;
	told($old, 'an old installation',
		announcement('wanted', 'another', $tickets[1]),
		announcement('granted', 'another', $ticket));
	$_->quit foreach $old, $new;
	$node->safe_psql('postgres', 'DROP DATABASE two');
	worker_gone('two databases');
}

#
# No free slot for a worker
#
$admin->quit;
$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
$node->restart;
$admin = session($node);
{
	my $holder = session($node);
	my $waiter = session($node);
	my $ticket;

	$holder->query("SELECT dlock_acquire('lock')");
	$ticket = enqueue($waiter, 'lock');
	is($waiter->query("SELECT dlock_wait($ticket, '1ms')"),
		'f', 'no worker: dlock_wait() waits');
	$waiter->start("SELECT dlock_wait($ticket)");
	$admin->until_waits($waiter);
	is($holder->query("SELECT dlock_release('lock')"),
		't', 'no worker: dlock_release() works');
	is($waiter->answer, 't', 'no worker: dlock_wait() is woken');
	like(
		$waiter->query(
			q{SELECT count(dlock_enqueue('lock ' || n))
				FROM generate_series(1, 1000) AS n}),
		qr/^1000$/,
		'no worker: dlock_enqueue() works');
	is($waiter->query('SELECT dlock_release_all()'),
		'1001', 'no worker: dlock_release_all() works');
	is(scalar($waiter->announcements(0)), 0, 'no worker: nothing is announced');
	is($admin->query("SELECT count(*) $worker"), '0', 'no worker: none');
	$_->quit foreach $holder, $waiter;
	ok($admin->wait_for('SELECT count(*) = 0 FROM dlock_locks'),
		'no worker: nothing is left');
}

$admin->quit;
done_testing();
