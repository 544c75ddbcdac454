# The server cannot get more shared memory, whatever dlock.max_memory says.  A
# request can then fail at any step, in the middle of a change of a table that
# all share; and that is all: nothing of it stays, nothing held is lost, and when
# there is memory again all is as before.  The same where the tables of leases
# are read after a start: what was put back stays, and the next call goes on from
# there.
#
# What would break it: a lock of a table that is not let go after such an error; a
# ticket that has joined its lock, and is not taken back when its number cannot
# be entered; a session that cannot begin, and cannot end either; a hand-over that
# fails half done, and that nobody makes up for; memory that a failed attempt
# keeps, or counts.
#
# Segments of shared memory are files here, in a directory where no more can be
# made, or none can be opened, while it is closed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib $FindBin::RealBin;
use DlockLease;
use DlockTest;
use Test::More;

my $node = new_server('main', conf => "synchronous_commit = off\n"
	  . "log_statement = none\ndynamic_shared_memory_type = mmap\n");
my $directory = $node->data_dir . '/pg_dynshmem';
my $no_memory = qr/ERROR:  42501: could not open shared memory segment/;

# close_memory($mode): 0500 so that none can be made, 0 so that none can be opened
sub close_memory
{
	my ($mode) = @_;

	chmod($mode // 0500, $directory) or die "chmod: $!";
	return;
}

sub open_memory
{
	chmod(0700, $directory) or die "chmod: $!";
	return;
}

END
{
	open_memory() if defined $directory;
}

foreach my $dbname ('other', 'third')
{
	$node->safe_psql('postgres', "CREATE DATABASE $dbname");
	$node->safe_psql($dbname, 'CREATE EXTENSION dlock');
}
$node->safe_psql('other', q{
	CREATE FUNCTION fill(max integer, size integer = 600)
	RETURNS integer LANGUAGE plpgsql AS $$
	DECLARE
		n integer = (SELECT count(*) FROM dlock_locks);
	BEGIN
		WHILE n < max LOOP
			BEGIN
				PERFORM dlock_acquire(format('fill %s', n),
					info => nullif(repeat('x', size), ''));
				n = n + 1;
			EXCEPTION WHEN out_of_memory OR insufficient_privilege THEN
				RETURN n;
			END;
		END LOOP;
		RETURN n;
	END $$});
my $filler = session($node, 'other');

# The filler takes all memory that there is, for names first and then for locks
# alone; and gives back what it took last.  How many locks it has then.
sub fill
{
	$filler->query('SELECT fill(100000)');
	return $filler->query('SELECT fill(100000, 0)');
}

sub give_back
{
	my ($count) = @_;

	$filler->query(q{SELECT count(dlock_release_ticket(ticket)) FROM (
		SELECT ticket FROM dlock_locks ORDER BY ticket DESC}
		  . " LIMIT $count) AS t");
	return $filler->query('SELECT count(*) FROM dlock_locks');
}

# How many locks there can be, by count
sub room
{
	my $count;

	# loads the library, whose setting this is
	$filler->query('SELECT fill(0)');
	$filler->query("ALTER SYSTEM SET dlock.max_memory = '1MB'");
	$filler->query('SELECT pg_reload_conf()');
	$filler->wait_for("SELECT current_setting('dlock.max_memory') = '1MB'");
	$count = fill();
	$filler->query('SELECT dlock_release_all()');
	$filler->query('ALTER SYSTEM RESET dlock.max_memory');
	$filler->query('SELECT pg_reload_conf()');
	$filler->wait_for("SELECT current_setting('dlock.max_memory') = '128MB'");
	return $count;
}

#
# The first call in the cluster
#
close_memory();
my $client = session($node);
foreach my $round (1 .. 2)
{
	like($client->query("SELECT dlock_acquire('lock')"),
		$no_memory, 'a first call fails');
}
$client->quit;
backends_gone($client->{pid});
$client = session($node);
like($client->query("SELECT dlock_acquire('lock')"),
	$no_memory, 'and so does that of another session');
open_memory();
like($client->query("SELECT dlock_acquire('lock')"),
	qr/^\d+$/, 'which goes on when there is memory');
$client->query("SELECT dlock_release('lock')");
my $room = room();
cmp_ok($room, '>', 500, "there is room for $room locks");

#
# Each kind of request, with nothing left, and then a little more each time until
# it succeeds
#
my $admin = session($node);
my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $failures = 0;
my $state = q{SELECT string_agg(name, ' ' ORDER BY name) || '|' ||
	(SELECT count(*) FROM dlock_leases) FROM dlock_locks};
$client->query("SELECT dlock_lease_acquire('held', $lease, shared => true)");
is($admin->query($state), 'held|1', 'a lease holds');
# LISTEN takes memory of its own, in some versions
$client->query('SELECT dlock_channel()');
$filler->query('SELECT fill(1000)');
close_memory();
foreach my $call (
	"dlock_acquire('new')",
	"dlock_xact_acquire('new')",
	"dlock_try_acquire('held', shared => true, info => repeat('x', 1000))",
	"dlock_try_acquire('held') IS NULL",
	"dlock_acquire_all('{new 1, new 2, new 3}')",
	"dlock_enqueue('new')",
	"dlock_lease_open('1h', info => 'new')",
	"dlock_ttl_acquire('new', '1h')",
	"dlock_ttl_enqueue('new', '1h', 'nobody', owner => 'me')",
	"dlock_lease_acquire('new', $lease, owner => 'me')",
	"dlock_lease_acquire('held', $lease, shared => true, owner => 'me')",
	"dlock_lease_enqueue('held', $lease, shared => true, owner => 'me')",
	"dlock_lease_acquire_all('{new 1, new 2, new 3}', $lease)")
{
	my $tries = 0;
	my @wrong;
	my $answer;

	fill();
	while (($answer = $client->query("SELECT $call")) =~ /ERROR/)
	{
		my $left = $admin->query($state);

		$tries++;
		push @wrong, $answer if $answer !~ $no_memory;
		push @wrong, "left: $left" if $left ne 'held|1';
		last if @wrong || give_back(20) == 0;
	}
	is(join("\n", @wrong), '', "no memory: $call");
	$failures += $tries;
	$client->query('SELECT dlock_release_all()');
	$client->query(
		q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
		   WHERE lease IS NOT NULL AND (owner = 'me' OR name LIKE 'new%')});
	$client->query(
		q{SELECT dlock_lease_close(lease) FROM dlock_leases WHERE info = 'new'}
	);
	$admin->wait_for('SELECT count(*) = 1 FROM dlock_locks');
	$admin->wait_for('SELECT count(*) = 1 FROM dlock_queue');
}
cmp_ok($failures, '>', 12, "$failures requests have failed");

# A name space needs more memory than a lock, so there may be room for some.
fill();
{
	my $third = session($node, 'third');
	my $answer;

	foreach my $round (1 .. 50)
	{
		$answer = $third->query("SELECT dlock_is_held('lock')");
		last if $answer =~ /ERROR/;
		$third->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
	}
	like($answer, $no_memory, 'no memory: a first call in a name space');
	like($third->query("SELECT dlock_is_held('lock')"),
		$no_memory, 'and the next one');
	$third->quit;
	backends_gone($third->{pid});
}

#
# Many tickets of leases, of which each has a number to be entered
#
open_memory();
$client->query(q{
CREATE FUNCTION enqueue(lease bigint, n integer) RETURNS integer
LANGUAGE plpgsql AS $$
BEGIN
	WHILE n < 2000 LOOP
		BEGIN
			PERFORM dlock_lease_acquire('held', lease, shared => true,
				owner => n::text);
			n = n + 1;
		EXCEPTION WHEN out_of_memory OR insufficient_privilege THEN
			RETURN n;
		END;
	END LOOP;
	RETURN n;
END $$});
$filler->query('SELECT fill(1500)');
close_memory();
{
	my ($many, $round) = (0, 0);
	my @wrong;
	my $left;

	# more each time, as the filler takes what they have left
	do
	{
		fill();
		$left = give_back(50 * ++$round);
		$many = $client->query("SELECT enqueue($lease, $many)");
		push @wrong, "$many: $_"
		  foreach grep { $_ != $many + 1 }
		  $admin->query('SELECT count(*) FROM dlock_locks');
	} while (!@wrong && $left > 0 && $many < 2000);
	is(join("\n", @wrong), '', "$many tickets of leases");
}
open_memory();
$filler->query('SELECT dlock_release_all()');
$client->query(
	q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
	   WHERE owner <> '0'});
$admin->wait_for('SELECT count(*) = 2 FROM dlock_queue');
is( $client->query(
		q{SELECT cardinality(dlock_lease_acquire_all(
				(SELECT array_agg('lock ' || n)
				   FROM generate_series(1, 500) AS n), }
		  . "$lease))"),
	'500',
	'and of many locks');

#
# Read after a start
#
my $tickets =
  q{SELECT string_agg(ticket::text, ' ' ORDER BY ticket) FROM dlock_locks};
my $before = $admin->query($tickets);
$_->quit foreach $client, $admin, $filler;
$node->restart;
$filler = session($node, 'other');
$client = session($node);
$failures = 0;
$filler->query('SELECT fill(600)');
close_memory();
for (my $round = 1, my $left = 1; $left > 0; $round++)
{
	fill();

	# with nothing left but what was put back, and with a little more
	foreach my $count (0, 30 * $round)
	{
		$left = give_back($count);
		$failures++
		  if $client->query("SELECT dlock_fence('held')") =~ $no_memory;
	}
}
cmp_ok($failures, '>', 2, "read again: $failures calls have failed");
open_memory();
ok($client->query($tickets) eq $before, 'all are put back, each once');
is($client->query("SELECT dlock_lease_close($lease) > 500"),
	't', 'they are closed');
$client->wait_for('SELECT count(*) = 0 FROM dlock_queue');
$client->quit;
backends_gone($client->{pid});
my $now = room();
cmp_ok(abs($now - $room), '<=', 24, "there is room for $now locks again");

$filler->quit;
$node->stop;

#
# A session that cannot map a segment that others have made can neither hand on to
# a ticket that is there, nor end its own where the table of locks has grown into
# one.  Who waits makes up for it.
#
$node = new_server('segments', conf => "dynamic_shared_memory_type = mmap\n");
$directory = $node->data_dir . '/pg_dynshmem';
$admin = session($node);
# Stop a waiter while it sleeps, where it has no lock that others need.
sub stop_sleeper
{
	my ($waiter) = @_;

	poll('the waiter sleeps',
		sub {
			stop_process($waiter->{pid});
			return 1
			  if $admin->query("SELECT wait_event = 'userlock' "
				  . "FROM pg_stat_activity WHERE pid = $waiter->{pid}") eq 't';
			continue_process($waiter->{pid});
			return 0;
		});
	return;
}

foreach my $how ('release', 'end')
{
	my ($holder, $other) = map { session($node) } 1 .. 2;
	my $waiter =
	  session($node, 'postgres', q{options='-c deadlock_timeout=10ms'});

	$holder->query("SELECT dlock_acquire('lock')");
	# many tickets of one lock, or many locks
	$other->query(
		$how eq 'release'
		? q{SELECT count(dlock_acquire('other', slots => 10000,
				info => repeat('x', 1000))) FROM generate_series(1, 2000)}
		: q{SELECT count(dlock_acquire('other ' || n))
			  FROM generate_series(1, 6000) AS n});
	$waiter->start("SELECT dlock_acquire('lock') > 0");
	$admin->until_waits($waiter);
	# its looks for deadlocks would fail, too
	stop_sleeper($waiter);
	close_memory(0);
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
	is( $admin->query(
			q{SELECT string_agg(pid::text, ' ') FROM dlock_locks
			   WHERE name = 'lock'}),
		$waiter->{pid},
		"$how: and nobody else");
	$_->quit foreach $holder, $waiter, $other;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
}

# A look for deadlocks that cannot see all who wait ends the wait, and hangs
# nobody.
{
	my ($holder, $other, $third) = map { session($node) } 1 .. 3;
	my $waiter =
	  session($node, 'postgres', q{options='-c deadlock_timeout=10ms'});

	$holder->query("SELECT dlock_acquire('lock')");
	$waiter->query("SELECT dlock_acquire('mine')");
	$waiter->start("SELECT dlock_acquire('lock')");
	$admin->until_waits($waiter);
	stop_sleeper($waiter);
	$other->query(
		q{SELECT count(dlock_enqueue('lock', 'nobody', info => repeat('x', 1000)))
		    FROM generate_series(1, 2000)});
	# only who keeps others waiting looks
	$third->start("SELECT dlock_acquire('mine') > 0");
	$admin->until_waits($third);
	close_memory(0);
	continue_process($waiter->{pid});
	like($waiter->answer, $no_memory, 'look: fails');
	open_memory();
	# in some versions it cannot map again what it has failed to map once
	$waiter->quit;
	is($third->answer, 't', 'look: others go on');
	$holder->query("SELECT dlock_release('lock')");
	is($other->query('SELECT dlock_release_all()'),
		'2000', 'look: the lock is handed on');
	$_->quit foreach $holder, $other, $third;
}

$admin->quit;
$node->stop;
done_testing();
