# The memory area is full although the counts allow more, because free pieces
# have other sizes.  A request can then fail at any step, and leaves nothing.
# No holder loses a lock.  When memory is freed, all calls work as before.  If
# the load of the tables of leases fails after a start, loaded rows stay, and
# the next call continues the load.
#
# What would break it: an LWLock that is not released after an error; a
# ticket that has joined its lock, and stays when its number cannot be entered;
# a session that can neither begin nor end; memory that a failed attempt keeps
# or counts, or that stays when its extension is dropped.
#
# The area takes memory for each size class in blocks of 64 kB, and gets a
# block back only if all of the block is free.  So one allocation in each block
# keeps all blocks.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main', conf => "synchronous_commit = off\n"
	  . "log_statement = none\ndynamic_shared_memory_type = mmap\n"
	  . "dlock.max_memory = '6MB'\n");
my $directory = $node->data_dir . '/pg_dynshmem';
my $no_file = qr/ERROR:  42501: could not open shared memory segment/;
# PostgreSQL uses the second size for its own table.
my $no_memory = qr/ERROR:  53200: out of memory.*DETAIL:  (?:No piece of (\d+) bytes is free|Failed on DSA request of size (\d+))\..*HINT:  Release locks/s;

$node->safe_psql('postgres', 'CREATE ROLE fresh LOGIN');
foreach my $dbname ('other', 'third')
{
	$node->safe_psql('postgres', "CREATE DATABASE $dbname");
	$node->safe_psql($dbname, 'CREATE EXTENSION dlock');
}

# The sizes of pieces that requests allocate, and the largest size, which no
# request allocates
my @sizes = (40, 64, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024);
my $largest = 1025;
my $in_one = 51;				# pieces of 1280 bytes in a block of 64 kB

sub close_directory
{
	chmod(0500, $directory) or die "chmod: $!";
	return;
}

sub open_directory
{
	chmod(0700, $directory) or die "chmod: $!";
	return;
}

END
{
	open_directory() if defined $directory;
}

$node->safe_psql(
	'other', q{
	-- Locks, with infos of a size, until there is no memory
	CREATE FUNCTION take(prefix text, size integer, max integer = 1000000)
	RETURNS integer LANGUAGE plpgsql AS $$
	BEGIN
		FOR n IN 1 .. max LOOP
			BEGIN
				PERFORM dlock_acquire(prefix || n,
					info => repeat('x', nullif(size, 0) - 1));
			EXCEPTION WHEN out_of_memory THEN
				RETURN n - 1;
			END;
		END LOOP;
		RETURN max;
	END $$;

	-- Pieces of a size, until there is none: infos of locks that have none yet
	CREATE FUNCTION take_pieces(size integer) RETURNS void
	LANGUAGE plpgsql AS $$
	DECLARE
		number bigint;
	BEGIN
		FOR number IN SELECT ticket FROM dlock_locks
			WHERE info IS NULL AND name LIKE 'plain%' ORDER BY ticket
		LOOP
			BEGIN
				PERFORM dlock_set_info(number, repeat('x', size - 1));
			EXCEPTION WHEN out_of_memory THEN
				RETURN;
			END;
		END LOOP;
		RAISE 'not enough locks for pieces of % bytes', size;
	END $$;

	-- So many of them are free again
	CREATE FUNCTION give_pieces(size integer, pieces integer) RETURNS bigint
	LANGUAGE sql AS $$
		SELECT count(*) FROM (
			SELECT dlock_set_info(ticket, NULL) FROM dlock_locks
			 WHERE length(info) = size - 1 LIMIT pieces) AS t $$});
my $filler = session($node, 'other');
my $round = 0;

# Leave only pieces that are too large, and the given numbers of some sizes.
sub fragment
{
	my (%many) = @_;
	my $large;

	$filler->query("SELECT take('$_ ', $_, " . ($many{$_} // 10) . ')')
	  foreach @sizes;
	$filler->query("SELECT take('plain ', 0, 5000)");
	$large = $filler->query("SELECT take('large ', $largest)");
	$filler->query("SELECT count(dlock_release('large ' || n)) "
		  . "FROM generate_series(1, $large) AS n WHERE n % $in_one <> 0");
	return;
}

sub fill
{
	$round++;
	$filler->query("SELECT take('plain $round/', 0)");
	$filler->query("SELECT take_pieces($_)") foreach @sizes;
	return;
}

# Free pieces of a size, or of the next size.  Return false if there is none.
sub give_pieces
{
	my ($bytes, $pieces) = @_;
	my ($size) = grep { $_ >= $bytes } @sizes;

	$pieces //= 1;
	return $size && $filler->query("SELECT give_pieces($size, $pieces)") > 0;
}

# Return how many pieces of each size were requested.
sub pieces
{
	my (%asked) = @_;

	return join ', ',
	  map { "$asked{$_} of $_ bytes" } sort { $a <=> $b } keys %asked;
}

# Return how many locks can be acquired.
sub room
{
	my ($holder, $waiter) = map { session($node) } 1 .. 2;
	my $count;

	# The first wait allocates the sketch of awaited names.
	$holder->query("SELECT dlock_acquire('lock')");
	is($waiter->query("SELECT dlock_try_acquire('lock', '1ms') IS NULL"),
		't', 'a lock is waited for');
	$_->quit foreach $holder, $waiter;
	backends_gone($_->{pid}) foreach $holder, $waiter;

	$count = $filler->query("SELECT take('room ', 0)");
	like($filler->query("SELECT dlock_acquire('one more')"),
		qr/ERROR:  53200: .* have reached their part of dlock\.max_memory\./s, 'no memory, by count');
	$filler->query('SELECT dlock_release_all()');
	return $count;
}

#
# The first call in the cluster
#
close_directory();
my $client = session($node);
foreach my $try (1 .. 2)
{
	like($client->query("SELECT dlock_acquire('lock')"),
		$no_file, 'a first call fails');
}
$client->quit;
backends_gone($client->{pid});
$client = session($node);
like($client->query("SELECT dlock_acquire('lock')"),
	$no_file, 'the first call of another session fails, too');
open_directory();
like($client->query("SELECT dlock_acquire('lock')"),
	qr/^\d+$/, 'the other session goes on when there is memory');

# The first wait has no statistics, because there is no piece for them.
{
	my $waiter = session($node);
	my $answer;
	my @wrong;

	fragment(128 => 200);
	fill();
	while (($answer = $waiter->query(
				"SELECT dlock_try_acquire('lock', '1ms') IS NULL")) =~ /ERROR/)
	{
		push @wrong, $answer
		  if $answer !~ $no_memory || !give_pieces($1 // $2);
		last if @wrong;
	}
	is(join("\n", @wrong), '', 'no piece for statistics');
	is($answer, 't', 'a wait works without statistics');
	$waiter->quit;
	backends_gone($waiter->{pid});
	$filler->query('SELECT dlock_release_all()');
}
$client->query("SELECT dlock_release('lock')");
my $room = room();
cmp_ok($room, '>', 5000, "there is room for $room locks");

#
# Make each kind of request with no memory left, and then with one piece more
# each time until it succeeds.
#
my $admin = session($node);
my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $state = q{SELECT string_agg(name, ' ' ORDER BY name) || '|' ||
	(SELECT count(*) FROM dlock_leases) FROM dlock_locks};
$client->query("SELECT dlock_lease_acquire('held', $lease, shared => true)");
is($admin->query($state), 'held|1', 'a lease holds');
# The names and texts are as long as the available pieces.
my $me = q{repeat('me', 200)};
my $info = q{repeat('new', 200)};
my %undo = (
	dlock_set_slots => "dlock_set_slots('new', NULL)",
	dlock_set_info => "dlock_set_info($lease, NULL)",
	dlock_renew => "dlock_renew($lease, '1h')");
fragment(128 => 200);
# each call, with the least number of pieces that it takes
foreach my $case (
	[ 2, "dlock_acquire('new')" ],
	# one piece more for the account of a new role
	[ 3, "dlock_acquire('new')", 'fresh' ],
	[ 2, "dlock_xact_acquire('new')" ],
	[ 3, "dlock_try_acquire('held', shared => true, info => repeat('x', 1000))" ],
	[ 1, "dlock_try_acquire('held') IS NULL" ],
	[ 1, "dlock_try_acquire('held', '10ms') IS NULL" ],
	[ 6, "dlock_acquire_all('{new 1, new 2, new 3}')" ],
	[ 3, "dlock_enqueue('new')" ],
	[ 2, "dlock_watch('new', repeat('c', 63))" ],
	[ 1, "dlock_set_slots('new', 2)" ],
	[ 2, "dlock_lease_open('1h', info => $info)" ],
	[ 2, "dlock_ttl_acquire('new', '1h')" ],
	[ 4, "dlock_ttl_acquire('new', '1h', owner => $me, info => $info)" ],
	[ 4, "dlock_ttl_enqueue('new', '1h', 'nobody', owner => $me)" ],
	[ 3, "dlock_lease_acquire('new', $lease, owner => $me)" ],
	[ 2, "dlock_lease_acquire('held', $lease, shared => true, owner => $me)" ],
	[ 3, "dlock_lease_enqueue('held', $lease, shared => true, owner => $me)" ],
	[ 6, "dlock_lease_acquire_all('{new 1, new 2, new 3}', $lease)" ],
	[ 1, "dlock_set_info($lease, $info)" ],
	[ 1, "dlock_renew($lease, '2h')" ])
{
	my ($pieces, $call, $role) = @$case;
	my @asked;
	my @wrong;
	my $answer;

	# a session without a spare ticket
	$client = session($node, 'postgres', $role ? "user=$role" : '');
	# LISTEN allocates memory itself in some versions
	$client->query('SELECT dlock_channel()');
	fill();
	while (($answer = $client->query("SELECT $call")) =~ /ERROR/)
	{
		my $left = $admin->query($state);

		push @wrong, "left: $left" if $left ne 'held|1';
		push @wrong, $answer if $answer !~ $no_memory;
		push @asked, $1 // $2 // 0;
		push @wrong, "no piece of $asked[-1] bytes to give" if !give_pieces($asked[-1]);
		last if @wrong || @asked > 50;
	}
	is(join("\n", @wrong), '', "no memory: $call");
	cmp_ok(scalar(@asked), '>=', $pieces, "fails at each piece: @asked");

	$client->query('SELECT dlock_release_all()');
	$client->quit;
	backends_gone($client->{pid});
	$admin->query(
		q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
		   WHERE lease IS NOT NULL AND (owner LIKE 'me%' OR name LIKE 'new%')});
	$admin->query(
		q{SELECT dlock_lease_close(lease) FROM dlock_leases WHERE info LIKE 'new%'
			AND lease <> } . $lease);
	if (my $undo = $undo{ $call =~ s/\(.*//sr })
	{
		# The release can allocate memory, too.
		1 while $admin->query("SELECT $undo") =~ $no_memory
		  && give_pieces($1 // $2);
	}
	$admin->wait_for('SELECT count(*) = 1 FROM dlock_locks');
	$admin->wait_for('SELECT count(*) = 1 FROM dlock_queue');
}

# Slots can be unset without memory, so that an administrator can act.
$client = session($node);
$admin->query("SELECT dlock_set_slots('set', 2)");
$client->query('SELECT dlock_channel()');
fill();
is($client->query("SELECT dlock_set_slots('set', NULL)"),
	'', 'no memory: slots are unset');
$client->quit;
backends_gone($client->{pid});

# A name space is larger than other pieces, so there may be room for other
# pieces.  A session keeps its former name space.
fill();
{
	my @users;
	my $answer;

	foreach my $try (1 .. 50)
	{
		my $third = session($node, 'third');

		push @users, $third;
		$answer = $third->query("SELECT dlock_is_held('lock')");
		last if $answer =~ /ERROR/;
		$third->query('DROP EXTENSION dlock; CREATE EXTENSION dlock');
	}
	like($answer, $no_memory, 'no memory: a first call in a name space');
	like($users[-1]->query("SELECT dlock_is_held('lock')"),
		$no_memory, 'the next call fails, too');
	$_->quit foreach @users;
	backends_gone($_->{pid}) foreach @users;
}
is($admin->query($state), 'held|1', 'the lease holds what it held');
$filler->query('SELECT dlock_release_all()');

#
# Many tickets of leases are entered, each with its number and its request.
#
$client = session($node);
$client->query(q{
-- How many there are, and the piece that another one needs
CREATE FUNCTION enqueue(lease bigint, n integer, max integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	detail text;
BEGIN
	WHILE n < max LOOP
		BEGIN
			PERFORM dlock_lease_acquire('held', lease, shared => true,
				owner => lpad(n::text, 100, '0'));
			n = n + 1;
		EXCEPTION WHEN out_of_memory THEN
			GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
			RETURN n || ' ' || detail;
		END;
	END LOOP;
	RETURN n;
END $$});
{
	my $before = 900;
	my $all = 1300;
	my $many = $client->query("SELECT enqueue($lease, 0, $before)");
	my %asked;
	my @wrong;

	is($many, $before, 'many tickets of leases, with memory');
	fragment(112 => 450, 128 => 200, 320 => 450);
	fill();
	while (1)
	{
		my $answer = $client->query("SELECT enqueue($lease, $many, $all)");
		my $bytes;

		($many, $bytes) =
		  $answer =~ /^(\d+)(?: No piece of (\d+) bytes is free\.)?$/
		  or die $answer;
		push @wrong, "$many: $_"
		  foreach grep { $_ != $many + 1 }
		  $admin->query('SELECT count(*) FROM dlock_locks');
		last if @wrong || !$bytes;
		$asked{$bytes}++;
		push @wrong, "no piece of $bytes bytes to give" if !give_pieces($bytes, 4);
	}
	is(join("\n", @wrong), '', "$many tickets of leases");
	is($many, $all, 'many tickets of leases exist in the end');
	# pieces for the ticket, its owner, and the tables of numbers and requests
	cmp_ok(scalar(grep { $asked{$_} > 20 } keys %asked), '>=', 3, pieces(%asked));
}
$filler->query('SELECT dlock_release_all()');
$client->query(
	q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
	   WHERE owner NOT LIKE '%00'});
$admin->wait_for('SELECT count(*) = 14 FROM dlock_queue');
is( $client->query(
		q{SELECT cardinality(dlock_lease_acquire_all(
				(SELECT array_agg('lock ' || n)
				   FROM generate_series(1, 500) AS n), }
		  . "$lease))"),
	'500',
	'the same for many locks');

#
# Tables are loaded after a start, by a call or by the worker, which retries
#
my $tickets =
  q{SELECT string_agg(ticket::text, ' ' ORDER BY ticket) FROM dlock_locks};
my $before = $admin->query($tickets);
foreach my $workers (0, 8)
{
	my $who = $workers ? 'by the worker' : 'by the caller';
	my ($more, $most) = $workers ? (150, 4) : (3, 900);
	my $fails = 0;
	my %asked;
	my $answer;

	$admin->query("ALTER SYSTEM SET max_worker_processes = $workers");
	$_->quit foreach $client, $admin, $filler;
	$node->restart;
	($client, $admin) = map { session($node) } 1 .. 2;
	$filler = session($node, 'other');
	fragment(128 => 200);
	fill();
	while (($answer = $client->query("SELECT dlock_fence('held')")) =~ $no_memory)
	{
		my $bytes = $1 // $2;

		$fails++;
		$asked{$bytes}++;
		if ($fails > $most || !give_pieces($bytes, $more))
		{
			$filler->query('SELECT dlock_release_all()');
		}
		last if $fails > 1000;
	}
	cmp_ok($fails, '>', 3, "read again $who, fails: " . pieces(%asked));
	ok($client->query($tickets) eq $before, "read again $who: each is put back once");
	is( $client->query(
			'SELECT held, waiting FROM dlock_leases WHERE lease = ' . $lease),
		'514|0', "read again $who: its lease has the ticket");
}
$filler->query('SELECT dlock_release_all()');
is($client->query("SELECT dlock_lease_close($lease)"), '514', 'they are closed');
$client->wait_for('SELECT count(*) = 0 FROM dlock_queue');
$_->quit foreach $client, $admin;
backends_gone($_->{pid}) foreach $client, $admin;

#
# Announcements of a dropped extension's tickets are removed.
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
# The next name space removes the rest.
$node->safe_psql('third',
	"CREATE EXTENSION dlock; SELECT dlock_fence('lock')");

my $now = room();
cmp_ok(abs($now - $room), '<=', 24, "there is room for $now locks again");

$filler->quit;
$node->stop;
done_testing();
