# The server cannot get more shared memory, whatever dlock.max_memory says.  A
# request can then fail at any step, in the middle of a change of a table that
# all share; and that is all: nothing of it stays, nothing held is lost, and when
# there is memory again all is as before.  The same where the tables of leases
# are read after a start: what was put back stays, and the next call goes on from
# there.
#
# What would break it: a lock of a table that is not let go after such an error; a
# ticket that has joined its lock, and is not taken back when its number cannot
# be entered; a session that cannot begin, and cannot end either; memory that a
# failed attempt keeps, or counts, or that stays when its extension has gone.
#
# Segments of shared memory are files here, in a directory where no more can be
# made while it is closed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main', conf => "synchronous_commit = off\n"
	  . "log_statement = none\ndynamic_shared_memory_type = mmap\n");
my $directory = $node->data_dir . '/pg_dynshmem';
my $no_memory = qr/ERROR:  42501: could not open shared memory segment/;

sub close_memory
{
	chmod(0500, $directory) or die "chmod: $!";
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
	"dlock_watch('new', repeat('c', 63))",
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

#
# What the tickets of an extension still have to tell when it goes
#
$client = session($node, 'third');
is( $client->query(
		q{SELECT count(dlock_ttl_enqueue(repeat('x', 200) || n, '1h', 'nobody',
				owner => 'me')) FROM generate_series(1, 300) AS n}),
	'300',
	'enqueued for, and announced');
$client->query('DROP EXTENSION dlock');
no_worker($client);
$client->quit;
backends_gone($client->{pid});
# the next name space clears up
$node->safe_psql('third',
	"CREATE EXTENSION dlock; SELECT dlock_fence('lock')");

my $now = room();
cmp_ok(abs($now - $room), '<=', 24, "there is room for $now locks again");

$filler->quit;
$node->stop;
done_testing();
