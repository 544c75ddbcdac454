# Whoever watches a lock is told who holds it, at once and at each change, or at
# the latest of several; and whoever holds it does not notice.
#
# What would break it: a watcher whose latest news is not the truth, because the
# LISTEN came later, the sender died, or the queue of NOTIFY was full; one who is
# told of a grant that could be undone; a watch that outlives its session, or that
# keeps anything but itself.
#
# That nothing is told is told by one more notification, behind which nothing
# earlier can come.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use JSON::PP qw(decode_json);
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server(
	'main',
	allows_streaming => 1,
	conf => q{
synchronous_commit = local
restart_after_crash = on
});
my $admin = session($node);

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

# What a watcher has been told last, once that is as expected
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

# Nothing has come, nor is anything on its way
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
# From the start, in each mode and scope
#
{
	my $watcher = session($node);
	my $holder = session($node);
	my $other = session($node);
	my $ticket;

	is($watcher->query("SELECT dlock_watch('lock')"), '', 'dlock_watch()');
	told($watcher, 'at the start: free', free('lock'));
	is($watcher->query('SELECT count(*) FROM dlock_locks'),
		'0', 'no lock is there for it');

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
	told_last($watcher, 'and its end', free('lock'));

	$ticket = $holder->query("SELECT dlock_ttl_acquire('lock', '1 h')");
	told_last($watcher, 'lease scope',
		held('lock', $ticket, scope => 'lease'));
	$holder->query("SELECT dlock_release_ticket($ticket)");
	told_last($watcher, 'and its end', free('lock'));

	# the newest of several
	my $first =
	  $holder->query("SELECT dlock_acquire('lock', shared => true)");
	told_last($watcher, 'shared', held('lock', $first, mode => 'shared'));
	my $second =
	  $other->query("SELECT dlock_acquire('lock', shared => true)");
	told_last($watcher, 'the newest', held('lock', $second, mode => 'shared'));
	$other->query("SELECT dlock_release('lock')");
	told_last($watcher, 'the newest that is left',
		held('lock', $first, mode => 'shared'));
	$holder->query("SELECT dlock_release('lock')");
	$ticket = $holder->query("SELECT dlock_acquire('lock', slots => 2)");
	told_last($watcher, 'slots', held('lock', $ticket, mode => 'slots'));
	$holder->quit;
	told_last($watcher, 'the session of the holder ends', free('lock'));

	# by force, and in place of each other
	$holder = session($node);
	$ticket = $holder->query("SELECT dlock_acquire('lock')");
	$other->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($other);
	told_last($watcher, 'held', held('lock', $ticket));
	$admin->query("SELECT dlock_force_release($ticket)");
	$ticket = $other->answer;
	told_last($watcher, 'released by force, and held by the next',
		held('lock', $ticket));
	not_told($watcher, 'and that is all');

	# A wait, or a failed try, is no change.
	$holder->query("SELECT dlock_try_acquire('lock')");
	like(
		$holder->query("SELECT dlock_acquire('lock', '1 ms')"),
		qr/55P03/, 'a wait that ends');
	not_told($watcher, 'who waits changes nothing');

	# again: told again; and no more
	$watcher->query("SELECT dlock_watch('lock')");
	told($watcher, 'asked again', held('lock', $ticket));
	is($watcher->query("SELECT dlock_unwatch('lock')"), 't', 'unwatch');
	like($watcher->query("SELECT dlock_unwatch('lock')"),
		qr/WARNING.*\nf$/s, 'which is done once');
	$other->query("SELECT dlock_release('lock')");
	not_told($watcher, 'not after dlock_unwatch()');

	# What ends a watch
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
# Channels; not before the commit, nor after a rollback
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
	told($listener, 'and on another', held('lock', $ticket));
	$holder->query("SELECT dlock_release('lock')");
	told($listener, 'on both', (free('lock')) x 2);
	is($watcher->query("SELECT dlock_unwatch('lock')"), 't', 'neither');
	$ticket = $holder->query("SELECT dlock_acquire('lock')");
	not_told($listener, 'not any more', 'a');

	$watcher->query("BEGIN; SELECT dlock_watch('lock', 'a')");
	not_told($listener, 'not before the commit', 'a');
	$watcher->query('COMMIT');
	told($listener, 'but then', held('lock', $ticket));
	$watcher->query("SELECT dlock_unwatch('lock')");

	$watcher->query("BEGIN; SELECT dlock_watch('lock', 'a'); ROLLBACK");
	$holder->query("SELECT dlock_release('lock')");
	not_told($listener, 'not after a rollback', 'a');
	is($watcher->query("SELECT dlock_watch('lock', 'a')"),
		'', 'until the next call');
	told($listener, 'which tells', free('lock'));
	$watcher->query("SELECT dlock_unwatch('lock')");

	$watcher->query(
		q{BEGIN; SAVEPOINT s;
		SELECT dlock_watch('w1', 'a'); ROLLBACK TO s; RELEASE s; SAVEPOINT s;
		SELECT dlock_watch('w2', 'a'); RELEASE s; SAVEPOINT s;
		SELECT dlock_watch('w2', 'a'); SELECT dlock_watch('w3', 'a');
		SAVEPOINT t; SELECT dlock_watch('w4', 'a'); RELEASE t;
		ROLLBACK TO s; COMMIT});
	told($listener, 'to a savepoint', free('w2'));
	is( $watcher->query(
			"SELECT bool_and(dlock_unwatch('w' || n)) FROM generate_series(1, 4) AS n"
		),
		't',
		'though all are watches');
	$watcher->query("BEGIN; SELECT dlock_watch('w1', 'a')");
	is($watcher->query("SELECT dlock_unwatch('w1')"), 't', 'ended before');
	$watcher->query('COMMIT');
	not_told($listener, 'what was ended before the commit', 'a');

	# A session's first watch comes in the transaction that listens.
	my $missed = 0;
	foreach my $round (1 .. 20)
	{
		my $own = session($node);

		$own->query("SELECT dlock_watch('lock')");
		$missed++ unless join("\n", $own->announcements(1)) eq free('lock');
		$own->quit;
	}
	is($missed, 0, 'the first watch of 20 sessions');

	# A session that ends takes its watches along, however it ends.
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

	# The payload is JSON in ASCII, at its longest as well.
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

done_testing();
