# The watcher of a lock is told its holder, at once and at each change, or at
# the latest of several changes.  The holder does not notice.
#
# What would break it: a watcher whose latest message is not true, because the
# LISTEN came later, the sender died, or NOTIFY's queue was full; a watcher
# that is told of a grant that could be undone; a watch that outlives its
# session, or that keeps a lock entry or a worker.
#
# To show that nothing is told, the test waits for a later notification.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use JSON::PP qw(decode_json);
use Test::More;

my $node = new_server(
	'main',
	allows_streaming => 1,
	conf => q{
synchronous_commit = local
restart_after_crash = on
});
my $admin = session($node);
my $sender = "FROM pg_stat_activity WHERE backend_type = 'dlock sender'";
my $sender_waits = "SELECT count(*) = 1 $sender AND wait_event_type = 'Lock'";

$node->safe_psql('postgres', 'CREATE TABLE t (n integer)');

# A transaction that notifies and writes holds NOTIFY's lock while its commit
# waits for a standby that does not exist.
sub hold_up_notify
{
	my $application = session($node);

	commits_hang($node, 1);
	$application->start('SET synchronous_commit = on; '
		  . 'BEGIN; INSERT INTO t VALUES (1); NOTIFY application; COMMIT');
	poll('the application commits', sub { hangs($node, $application) });
	return $application;
}

sub let_go_of_notify
{
	my ($application) = @_;

	commits_hang($node, 0);
	$application->answer;
	$application->quit;
	return;
}

sub held
{
	my ($name, $ticket, %more) = @_;

	return sprintf
	  '{"event":"held","lock":"%s","ticket":%s,"mode":"%s","scope":"%s","info":%s}',
	  $name, $ticket, $more{mode} // 'exclusive', $more{scope} // 'session',
	  $more{info} ? qq("$more{info}") : 'null';
}

sub free
{
	my ($name) = @_;

	return qq({"event":"free","lock":"$name"});
}

# Wait until the latest message to a watcher is as expected.
sub told_last
{
	my ($listener, $test, $expected) = @_;
	my $last = '';
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	eval {
		poll($test,
			sub {
				$listener->query('SELECT 1');
				$last = $_
				  foreach @{ $listener->{announcements} // [] };
				return $last eq $expected;
			});
	};
	delete $listener->{announcements};
	return is($last, $expected, $test);
}

my $count = 0;

# No message has arrived, and none is on its way.
sub not_told
{
	my ($listener, $test, $channel) = @_;
	my $name = 'nobody ' . ++$count;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	if ($channel)
	{
		$admin->query("SELECT dlock_watch('$name', '$channel')");
		told($listener, $test, free($name));
		$admin->query("SELECT dlock_unwatch('$name')");
	}
	else
	{
		$listener->query("SELECT dlock_watch('$name')");
		told($listener, $test, free($name));
		$listener->query("SELECT dlock_unwatch('$name')");
	}
	return;
}

#
# A watcher is told from the start, in each mode and scope
#
{
	my $watcher = session($node);
	my $holder = session($node);
	my $other = session($node);
	my $ticket;

	is($watcher->query("SELECT dlock_watch('lock')"), '', 'dlock_watch()');
	told($watcher, 'at the start: free', free('lock'));
	is($watcher->query('SELECT count(*) FROM dlock_locks'),
		'0', 'a watch creates no lock');

	$ticket =
	  $holder->query("SELECT dlock_acquire('lock', info => 'host 1')");
	told_last($watcher, 'held', held('lock', $ticket, info => 'host 1'));
	is($holder->query("SELECT dlock_release('lock')"), 't', 'released');
	told_last($watcher, 'free again', free('lock'));

	$holder->query('BEGIN');
	$ticket = $holder->query("SELECT dlock_xact_acquire('lock')");
	told_last($watcher, 'transaction scope',
		held('lock', $ticket, scope => 'transaction'));
	$holder->query('ROLLBACK');
	told_last($watcher, 'the end of the hold', free('lock'));

	$ticket = $holder->query("SELECT dlock_ttl_acquire('lock', '1 h')");
	told_last($watcher, 'lease scope',
		held('lock', $ticket, scope => 'lease'));
	$holder->query("SELECT dlock_release_ticket($ticket)");
	told_last($watcher, 'the end of the hold', free('lock'));

	# Of several holders, the latest is told.
	my $first =
	  $holder->query("SELECT dlock_acquire('lock', shared => true)");
	told_last($watcher, 'shared', held('lock', $first, mode => 'shared'));
	my $second =
	  $other->query("SELECT dlock_acquire('lock', shared => true)");
	told_last($watcher, 'the newest', held('lock', $second, mode => 'shared'));
	$other->query("SELECT dlock_release('lock')");
	told_last($watcher, 'the newest holder that is left',
		held('lock', $first, mode => 'shared'));
	$holder->query("SELECT dlock_release('lock')");
	$ticket = $holder->query("SELECT dlock_acquire('lock', slots => 2)");
	told_last($watcher, 'slots', held('lock', $ticket, mode => 'slots'));
	$holder->quit;
	told_last($watcher, 'the session of the holder ends', free('lock'));

	# A forced release, and a hand-over
	$holder = session($node);
	$ticket = $holder->query("SELECT dlock_acquire('lock')");
	$other->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($other);
	told_last($watcher, 'held', held('lock', $ticket));
	$admin->query("SELECT dlock_force_release($ticket)");
	$ticket = $other->answer;
	told_last($watcher, 'released by force, and held by the next',
		held('lock', $ticket));
	not_told($watcher, 'nothing else is told');

	# A wait, or a failed try, is no change.
	$holder->query("SELECT dlock_try_acquire('lock')");
	like(
		$holder->query("SELECT dlock_acquire('lock', '1 ms')"),
		qr/55P03/, 'a wait that ends');
	not_told($watcher, 'a waiter changes nothing');

	# A repeated watch is told again.  After dlock_unwatch(), nothing is told.
	$watcher->query("SELECT dlock_watch('lock')");
	told($watcher, 'asked again', held('lock', $ticket));
	is($watcher->query("SELECT dlock_unwatch('lock')"), 't', 'unwatch');
	like($watcher->query("SELECT dlock_unwatch('lock')"),
		qr/WARNING.*\nf$/s, 'a second dlock_unwatch() warns');
	$other->query("SELECT dlock_release('lock')");
	not_told($watcher, 'not after dlock_unwatch()');

	# These calls end a watch.
	foreach my $end ('SELECT dlock_release_all()', 'DISCARD ALL')
	{
		$watcher->query('LISTEN c');
		$watcher->query("SELECT dlock_watch('lock', 'c')");
		told($watcher, "$end: before", free('lock'));
		is($watcher->query($end), $end =~ /^D/ ? '' : 0, $end);
		$watcher->query('LISTEN c');
		$other->query("SELECT dlock_acquire('lock')");
		not_told($watcher, "not after $end", 'c');
		$other->query("SELECT dlock_release('lock')");
	}
	$watcher->query('UNLISTEN *');
	$_->quit foreach $watcher, $holder, $other;
}

#
# Channels: nothing is told before the commit, or after a rollback
#
{
	my $listener = session($node);
	my $watcher = session($node);
	my $holder = session($node);
	my $ticket = $holder->query("SELECT dlock_acquire('lock')");

	$listener->query('LISTEN a; LISTEN b');
	$watcher->query("SELECT dlock_watch('lock', 'a')");
	told($listener, 'on a channel', held('lock', $ticket));
	$watcher->query("SELECT dlock_watch('lock', 'b')");
	told($listener, 'on another channel', held('lock', $ticket));
	$holder->query("SELECT dlock_release('lock')");
	told($listener, 'on both', (free('lock')) x 2);
	is($watcher->query("SELECT dlock_unwatch('lock')"), 't', 'neither');
	$ticket = $holder->query("SELECT dlock_acquire('lock')");
	not_told($listener, 'not on a channel after its unwatch', 'a');

	$watcher->query("BEGIN; SELECT dlock_watch('lock', 'a')");
	not_told($listener, 'not before the commit', 'a');
	$watcher->query('COMMIT');
	told($listener, 'but then', held('lock', $ticket));
	$watcher->query("SELECT dlock_unwatch('lock')");

	$watcher->query("BEGIN; SELECT dlock_watch('lock', 'a'); ROLLBACK");
	$holder->query("SELECT dlock_release('lock')");
	not_told($listener, 'not after a rollback', 'a');
	is($watcher->query("SELECT dlock_watch('lock', 'a')"),
		'', 'the next call listens');
	told($listener, 'which tells', free('lock'));
	$watcher->query("SELECT dlock_unwatch('lock')");

	$watcher->query(
		q{BEGIN; SAVEPOINT s;
		SELECT dlock_watch('w1', 'a'); ROLLBACK TO s; RELEASE s; SAVEPOINT s;
		SELECT dlock_watch('w2', 'a'); RELEASE s; SAVEPOINT s;
		SELECT dlock_watch('w2', 'a'); SELECT dlock_watch('w3', 'a');
		SAVEPOINT t; SELECT dlock_watch('w4', 'a'); RELEASE t;
		ROLLBACK TO s; COMMIT});
	told($listener, 'after a rollback to a savepoint', free('w2'));
	is( $watcher->query(
			"SELECT bool_and(dlock_unwatch('w' || n)) FROM generate_series(1, 4) AS n"
		),
		't',
		'each name is watched');
	$watcher->query("BEGIN; SELECT dlock_watch('w1', 'a')");
	is($watcher->query("SELECT dlock_unwatch('w1')"), 't', 'ended before');
	$watcher->query('COMMIT');
	not_told($listener, 'a watch that ended before the commit', 'a');

	# A session's first message comes in the transaction that listens.
	my $missed = 0;
	foreach my $round (1 .. 20)
	{
		my $own = session($node);

		$own->query("SELECT dlock_watch('lock')");
		$missed++ unless join("\n", $own->announcements(1)) eq free('lock');
		$own->quit;
	}
	is($missed, 0, 'the first watch of 20 sessions');

	# A session's end ends its watches, however it ends.
	foreach my $end (
		sub { $_[0]->quit },
		sub {
			$admin->query("SELECT pg_terminate_backend($_[0]{pid})");
			$_[0]->may_end;
			$_[0]->vanish;
		})
	{
		my $gone = session($node);

		$gone->query("SELECT dlock_watch('lock', 'a')");
		told($listener, 'watched', free('lock'));
		$end->($gone);
		backends_gone($gone->{pid});
		$holder->query("SELECT dlock_acquire('lock')");
		not_told($listener, 'not after the session', 'a');
		$holder->query("SELECT dlock_release('lock')");
	}

	# The payload is JSON in ASCII, even at its greatest length.
	$watcher->query("SET client_encoding = 'UTF8'");
	my $name = '\\' x 255;
	$watcher->query("SELECT dlock_watch('$name', 'a')");
	is(decode_json(join '', $listener->announcements(1))->{lock},
		$name, 'a long name');
	$ticket = $holder->query(
		"SELECT dlock_acquire('$name', info => repeat(E'\\x01', 1024))");
	my $told = decode_json(join '', $listener->announcements(1));
	is($told->{info}, "\x01" x 1024, 'with a long info');
	is($told->{ticket}, $ticket, 'as JSON');
	$_->quit foreach $listener, $watcher, $holder;
}

#
# States that count as held or free
#
{
	my $watcher = session($node);
	my $client = session($node);
	my $late = session($node);
	my $acquire = "SELECT dlock_ttl_acquire('lock', '1 h', info => 'x')";
	my $ticket;
	my $is_granted =
	  "SELECT count(*) = 1 AND bool_and(granted) FROM dlock_locks";

	# A grant is told when it is durable, as to its own client.
	$watcher->query("SELECT dlock_watch('lock')");
	told($watcher, 'free', free('lock'));
	commits_hang($node, 1);
	foreach my $end ('taken back', 'durable')
	{
		$client->start("SET synchronous_commit = on; $acquire");
		$admin->wait_for($is_granted);
		not_told($watcher, "$end: not before");
		$late->query("SELECT dlock_watch('lock')");
		not_told($late, "$end: a new watcher is not told, either");
		if ($end eq 'durable')
		{
			commits_hang($node, 0);
			$ticket = $client->answer;
			told_last($_, "$end: held",
				held('lock', $ticket, scope => 'lease', info => 'x'))
			  foreach $watcher, $late;
			$client->query("SELECT dlock_release_ticket($ticket)");
		}
		else
		{
			$admin->query("SELECT pg_cancel_backend($client->{pid})");
			like($client->answer, qr/ERROR/, "$end: the call fails");
		}
		told_last($_, "$end: free", free('lock')) foreach $watcher, $late;
		$late->query("SELECT dlock_unwatch('lock')");
	}

	$client->query('RESET synchronous_commit');

	# The lock is not free while a delay keeps it closed.
	my $lease =
	  $client->query("SELECT dlock_lease_open('100 ms', delay => '1 h')");
	$ticket = $client->query("SELECT dlock_lease_acquire('lock', $lease)");
	$admin->wait_for(
		'SELECT count(*) = 1 AND NOT bool_or(granted) FROM dlock_locks');
	not_told($late, 'the sender is not busy');
	$watcher->announcements(0);
	$late->query("SELECT dlock_watch('lock')");
	not_told($_, 'neither held nor free') foreach $watcher, $late;
	$admin->query("SELECT dlock_force_release($ticket)");
	told($_, 'free when the delay is over', free('lock'))
	  foreach $watcher, $late;

	# The lock is not free while a guarded commit has pinned it.
	$ticket = $client->query("SELECT dlock_acquire('lock')");
	told($_, 'held', held('lock', $ticket)) foreach $watcher, $late;
	commits_hang($node, 1);
	$client->start('SET synchronous_commit = on; '
		  . "BEGIN; SELECT dlock_guard('lock', $ticket); "
		  . 'INSERT INTO t VALUES (1); COMMIT');
	poll('the guarded commit waits', sub { hangs($node, $client) });
	$admin->query("SELECT dlock_force_release($ticket)");
	not_told($watcher, 'not free while it is pinned');
	commits_hang($node, 0);
	$client->answer;
	told($_, 'free when the commit is visible', free('lock'))
	  foreach $watcher, $late;

	# A lease expires without any call.
	$ticket = $client->query("SELECT dlock_ttl_acquire('lock', '100 ms')");
	told_last($watcher, 'run out', free('lock'));
	$_->quit foreach $watcher, $client, $late;
}

#
# If the sender is blocked, the latest state is sent afterwards, once.
#
{
	my $watcher = session($node);
	my $client = session($node);
	my $ticket;
	my $churn = q{DO $$ BEGIN FOR n IN 1 .. 100 LOOP
		PERFORM dlock_acquire('lock'), dlock_release('lock');
		PERFORM dlock_acquire('other'), dlock_release('other');
		END LOOP; END $$};

	$watcher->query("LISTEN c; SELECT dlock_watch('lock', 'c')");
	told($watcher, 'free', free('lock'));
	foreach my $how ('waits', 'is terminated')
	{
		my $application = hold_up_notify();

		$client->query($churn);
		$admin->wait_for($sender_waits);
		if ($how ne 'waits')
		{
			my $pid = $admin->query("SELECT pid $sender");

			$admin->query("SELECT pg_terminate_backend($pid)");
			backends_gone($pid);
			$admin->wait_for($sender_waits);
		}
		$client->query($churn);
		$ticket = $client->query("SELECT dlock_acquire('lock')");
		is(scalar($watcher->announcements(0)), 0, "$how: not told before");
		let_go_of_notify($application);
		told($watcher, "$how: told of the latest", held('lock', $ticket));
		not_told($watcher, "$how: once", 'c');
		$client->query("SELECT dlock_release('lock')");
		told($watcher, "$how: the next change is told", free('lock'));
	}

	# The sender gets an error while it sends.
  SKIP:
	{
		skip 'no debugger that can be attached', 1
		  unless debugger_works($admin);
		my $application = hold_up_notify();

		$ticket = $client->query("SELECT dlock_acquire('lock')");
		$admin->wait_for($sender_waits);
		my $stopped = fail_in({ pid => $admin->query("SELECT pid $sender") },
			'Async_Notify', 'dlock_watch_take');
		let_go_of_notify($application);
		$stopped->();
		$stopped->();
		told($watcher, 'an error: the message is still sent', held('lock', $ticket));
		$client->query("SELECT dlock_release('lock')");
		told($watcher, 'the next change is told', free('lock'));

		# The lock changes while the previous change is sent.
		$application = hold_up_notify();
		$ticket = $client->query("SELECT dlock_acquire('lock')");
		$admin->wait_for($sender_waits);
		$stopped = stop_behind({ pid => $admin->query("SELECT pid $sender") },
			'Async_Notify');
		let_go_of_notify($application);
		$stopped->();
		$client->query("SELECT dlock_release('lock')");
		$stopped->();
		told($watcher, 'a change while a message is sent: both are told',
			held('lock', $ticket), free('lock'));
	}

	# A watch ends before it is told.
	my $application = hold_up_notify();
	$client->query($churn);
	$watcher->query("SELECT dlock_watch('other', 'c')");
	$client->query($churn);
	$watcher->query("SELECT dlock_unwatch('other'), dlock_unwatch('lock')");
	$admin->wait_for($sender_waits);
	$watcher->query("SELECT dlock_watch('lock', 'c')");
	let_go_of_notify($application);
	told($watcher, 'another watch on the same lock', free('lock'));
	not_told($watcher, 'the ended watch is not told', 'c');
	$watcher->query('SELECT dlock_release_all()');

	# The sender dies again and again, and no session waits for it.
	my @names = map { "churn $_" } 1 .. 5;
	my @churners = map { session($node) } 1 .. 3;
	my @watchers = map { session($node) } 1 .. 3;
	my %last;

	foreach my $session (@watchers)
	{
		$session->query("SELECT dlock_watch('$_')") foreach @names;
	}
	foreach my $round (1 .. 4)
	{
		$_->start(
			q{DO $$ BEGIN FOR n IN 1 .. 300 LOOP
				PERFORM dlock_try_acquire('churn ' || 1 + n % 5);
				IF random() < 0.9 THEN PERFORM dlock_release_all(); END IF;
				END LOOP; END $$}) foreach @churners;
		$admin->query("SELECT pg_terminate_backend(pid) $sender");
		$_->answer foreach @churners;
	}
	my $truth = $admin->query(
		q{SELECT string_agg(n || ' ' || coalesce((SELECT ticket
				FROM dlock_locks(n) ORDER BY ticket DESC LIMIT 1)::text, 'free'),
			', ' ORDER BY n)
			FROM (SELECT 'churn ' || m FROM generate_series(1, 5) AS m) AS names (n)}
	);
	foreach my $session (@watchers)
	{
		my %state;
		my $known = '';

		eval {
			poll('the latest state is known',
				sub {
					foreach my $told (map { decode_json($_) }
						$session->announcements(0))
					{
						$state{ $told->{lock} } = $told->{ticket} // 'free';
					}
					$known = join ', ', map { "$_ $state{$_}" }
					  grep { defined $state{$_} } @names;
					return $known eq $truth;
				});
		};
		is($known, $truth, 'each latest state is known, with dying senders');
	}
	$_->quit foreach $watcher, $client, @churners, @watchers;
}

#
# Many watchers get one notification for each channel and name
#
{
	my $listener = session($node);
	my $holder = session($node);
	my @watchers = map { session($node) } 1 .. 3;
	my $ticket;

	# Each session has a watch on the common channel, and more own watches than
	# one transaction tells.
	foreach my $n (1 .. 3)
	{
		$watchers[ $n - 1 ]->query(
			qq{SELECT dlock_watch('many', 'all');
			SELECT count(dlock_watch('many', 'c' || $n || ' ' || m))
			  FROM generate_series(1, 3500) AS m});
	}
	$listener->query(
		q{SELECT dlock_watch('many'); LISTEN "all"; LISTEN "c1 1"; LISTEN "c1 3500";
		LISTEN "c2 1750"; LISTEN "c3 1"; LISTEN "c3 3500"});
	$listener->query("SELECT dlock_unwatch('many')");
	# The initial messages have been sent to all watches.
	$admin->query("SELECT dlock_watch('many', 'last')");
	$listener->query('LISTEN "last"');
	foreach my $n (1 .. 3)
	{
		$admin->query("SELECT dlock_watch('many', 'last')");
		$listener->announcements(1);
	}
	$admin->query("SELECT dlock_unwatch('many')");
	$listener->query('UNLISTEN "last"');
	my $application = hold_up_notify();
	$ticket = $holder->query("SELECT dlock_acquire('many')");
	let_go_of_notify($application);
	told($listener, 'one message for each channel', (held('many', $ticket)) x 6);
	not_told($listener, 'no more messages', 'all');
	$holder->query("SELECT dlock_release('many')");
	told($listener, 'one message for each channel again', (free('many')) x 6);
	$_->query('SELECT dlock_release_all()') foreach @watchers;
	$holder->query("SELECT dlock_acquire('many')");
	not_told($listener, 'all gone', 'all');

	# Many names are watched.
	$watchers[0]->query(
		q{SELECT count(dlock_watch('many ' || n, 'all')) FROM generate_series(1, 3000) AS n});
	is( join("\n", sort $listener->announcements(3000)),
		join("\n", sort map { free("many $_") } 1 .. 3000),
		'a message for each of many names');
	my %tickets = map { split /\|/ } split /\n/,
	  $holder->query(
		q{SELECT n, dlock_acquire('many ' || n) FROM generate_series(1, 3000) AS n});
	my %known;
	poll('the latest state of each name',
		sub {
			foreach my $told (map { decode_json($_) } $listener->announcements(0))
			{
				$known{ $told->{lock} } = $told->{ticket} // 'free';
			}
			return !grep { ($known{"many $_"} // '') ne $tickets{$_} }
			  keys %tickets;
		});
	is(scalar(keys %known), 3000, 'the holder of each name is told');
	$holder->quit;
	poll('free again',
		sub {
			foreach my $told (map { decode_json($_) } $listener->announcements(0))
			{
				$known{ $told->{lock} } = $told->{ticket} // 'free';
			}
			return !grep { $_ ne 'free' } values %known;
		});
	pass('each name is free when the holder\'s session has ended');
	$_->quit foreach $listener, @watchers;
}

#
# Two databases, and two installations
#
{
	$node->safe_psql('postgres', 'CREATE DATABASE two');
	$node->safe_psql('two', 'CREATE EXTENSION dlock');
	my $here = session($node);
	my $there = session($node, 'two');
	my $ticket;

	$_->query("SELECT dlock_watch('lock')") foreach $here, $there;
	told($_, 'free', free('lock')) foreach $here, $there;
	$ticket = $there->query("SELECT dlock_acquire('lock')");
	told($there, 'another database', held('lock', $ticket));
	not_told($here, 'another database\'s lock is not told');

	# A watched installation is dropped.
	my $other = session($node, 'two');
	$other->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
	$ticket = $other->query("SELECT dlock_acquire('lock')");
	is($there->query("SELECT dlock_watch('lock')"), '', 'watched again');
	told_last($there, 'told in the new installation', held('lock', $ticket));
	$_->quit foreach $here, $there, $other;
	backends_gone($there->{pid}, $other->{pid});
	$node->safe_psql('postgres', 'DROP DATABASE two');
}

#
# After a restart or a crash, new watchers are told the state.
#
foreach my $how ('restart', 'crash')
{
	my $watcher = session($node);
	my $client = session($node);
	my $ticket = $client->query("SELECT dlock_ttl_acquire('kept', '1 h')");

	$client->query("SELECT dlock_acquire('lost')");
	$watcher->query("SELECT dlock_watch('kept'), dlock_watch('lost')");
	is(scalar($watcher->announcements(2)), 2, "$how: before");
	if ($how eq 'restart')
	{
		$_->quit foreach $admin, $watcher, $client;
		$node->restart;
	}
	else
	{
		kill('KILL', $client->{pid}) == 1 or die "no process $client->{pid}";
		backends_gone($watcher->{pid}, $admin->{pid});
		$_->quit foreach $admin, $watcher, $client;
		poll('server is back', sub { answers($node) });
	}
	$watcher = session($node);
	$watcher->query("SELECT dlock_watch('kept')");
	told($watcher, "$how: what a lease has is held",
		held('kept', $ticket, scope => 'lease'));
	$watcher->query("SELECT dlock_watch('lost')");
	told($watcher, "$how: what a session had is free", free('lost'));
	$admin = session($node);
	$admin->query("SELECT dlock_release_ticket($ticket)");
	told($watcher, "$how: the watch goes on", free('kept'));
	$watcher->quit;
}

#
# Without a sending process, nothing fails, and the message is sent later.
#
$admin->quit;
$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
$node->restart;
$admin = session($node);
{
	my $watcher = session($node);

	$watcher->query("SELECT dlock_watch('lock')");
	$admin->query("SELECT dlock_acquire('lock'), dlock_release('lock')");
	is(scalar($watcher->announcements(0)), 0, 'no worker: not told');
	is($watcher->query("SELECT dlock_unwatch('lock')"), 't', 'no worker: gone');
	$watcher->query("SELECT dlock_watch('lock')");
	$watcher->quit;
}

# A text that is not in the database's encoding would be read past its end.  A
# client can send one with the settings of its connection.
{
	local $ENV{PGOPTIONS} = "-c a.text=AAA\xf0";
	my $client = session($node);
	my $text = "current_setting('a.text')";

	foreach my $call (
		"dlock_acquire($text)",
		"dlock_acquire('lock', info => $text)",
		"dlock_acquire_all(ARRAY['lock', $text])",
		"dlock_ttl_acquire('lock', '1h', owner => $text)",
		"dlock_watch('lock', $text)",
		"dlock_version_bump($text, 0)")
	{
		like($client->query("SELECT $call"), qr/22021: invalid byte sequence/,
			"$call fails");
	}
	$client->quit;
}
$admin->quit;
done_testing();
