# The server's log has each expired lease with its locks, each forced release,
# the table lock that blocks the worker, and long waits with the role and owner
# of the blocking leases.  The log does not grow without bound.
#
# What would break it: an expiry that is not logged; a normal end that is
# logged; a line for each of many thousands of leases; a list or a text that is
# not truncated; an error of the worker that does not name the table.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server(
	'main',
	allows_streaming => 1,
	conf => q{
synchronous_commit = local
autovacuum = off
deadlock_timeout = 1h
log_lock_waits = on
});
my $admin = session($node);
my $client;
my $offset = 0;

# Lines of the log since the last call of new_part()
sub log_text
{
	return slurp_file($node->logfile, $offset) =~ s/\n\t/ /gr;
}

sub new_part
{
	$offset = -s $node->logfile;
	return;
}

# Waits until the log has this text, in which # stands for a number, and <time>
# for a time.
sub logged
{
	my ($words, $test) = @_;
	my $pattern =
	  quotemeta($words) =~ s/\\<time\\>/\\d+\\.\\d{3} s/gr =~ s/\\#/\\d+/gr;
	my $text;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	eval {
		poll($test, sub { ($text = log_text()) =~ /$pattern/ });
	};
	return like($text, qr/$pattern/, $test);
}

# Opens a lease with tickets for these names, and ends its session.  $open and
# $acquire are additional arguments.
sub leave_lease
{
	my ($open, $acquire, @names) = @_;
	my $keeper = session($node, 'postgres', 'user=alice');
	my $lease = $keeper->query("SELECT dlock_lease_open('100ms', true$open)");
	my @tickets =
	  map { $keeper->query("SELECT dlock_lease_acquire($_, $lease$acquire)") }
	  @names;

	die "no lease and tickets: $lease @tickets"
	  if grep { !/^\d+$/ } $lease, @tickets;
	$keeper->quit;
	return ($lease, $keeper->{pid}, @tickets);
}

$admin->query('CREATE ROLE alice LOGIN; CREATE ROLE bob; GRANT bob TO alice; '
	  . 'CREATE ROLE ops LOGIN SUPERUSER');
$client = session($node, 'postgres', 'user=alice');

#
# Expired leases
#
{
	my $ttl = ample(1);
	my ($lease, $pid, $ticket, @rest);

	$ticket = $client->query(
		qq{SELECT dlock_ttl_acquire('single', '$ttl s',
		owner => 'worker 1', info => 'node-1')});
	logged(qq{LOG:  lease $ticket of role "alice" has run out},
		'an expired lease is logged');
	logged(
		qq{DETAIL:  Its last renewal was <time> ago, its ttl is $ttl.000 s.}
		  . qq{ It held lock "single" (ticket $ticket, owner "worker 1").}
		  . qq{ Its info is "node-1".\n},
		'the log has the lock and info of the lease');

	# the acquires may take long
	($lease, $pid, $ticket, @rest) =
	  leave_lease(", info => 'two', delay => '100ms'", '', "'a'", "'b\nc'");
	logged(qq{LOG:  lease $lease of role "alice" has run out},
		'an expired lease of an ended session is logged');
	logged(
		"DETAIL:  It was attached to process $pid, which has ended;"
		  . ' its last renewal was <time> ago, its ttl is 0.100 s.'
		  . qq{ It held lock "a" (ticket $ticket) and lock "b c" (ticket $rest[0]).}
		  . qq{ Its info is "two".\n},
		'the log has both locks of a lease');

	leave_lease('', '');
	logged(qq{ its ttl is 0.100 s. It held nothing.\n}, 'the log has a lease without locks');

	# All lists and texts are too long.  No character is cut in two.
	my $euro = "\xe2\x82\xac";
	($lease, $pid, $ticket, @rest) = leave_lease(
		", info => repeat('$euro', 34)",
		", owner => repeat('$euro', 34)",
		map { "'many $_'" } 1 .. 12);
	my $cut = $euro x 33 . '...';
	logged(
		join(', ',
			map { qq{lock "many $_" (ticket #, owner "} . $cut . '")' }
			  1 .. 10)
		  . ' and 2 more. Its info is "'
		  . $cut
		  . qq{".\n},
		'long lists and texts are truncated');
	is(scalar(() = log_text() =~ /has run out/g),
		4, 'each lease has one line');
}

# Very many leases at once: some are logged, and the others are counted.
{
	my $count = 5000;
	my $keeper = session($node, 'postgres', 'user=alice');
	my ($lines, $others, $all);

	new_part();
	$keeper->query(
		"SET synchronous_commit = off; SELECT count(dlock_lease_open('100ms', "
		  . "true)) FROM generate_series(1, $count)");
	$keeper->quit;
	poll(
		'all leases are logged',
		sub {
			my $text = log_text();

			$lines = () =
			  $text =~ /^.*LOG:  lease \d+ of role "alice" has run out/mg;
			$others = 0;
			$others += $_
			  foreach $text =~
			  /LOG:  further leases that have run out: (\d+)/g;
			return $lines + $others >= $count;
		});
	is($lines + $others, $count, 'each of very many leases is logged or counted once');
	cmp_ok($others, '>', $count / 2, 'most of the leases are counted only');
}

# A closed lease has not expired.  If the setting is off, nothing is logged.
{
	my ($lease) = leave_lease('', '');
	my ($closed, $silent, $last);

	new_part();
	$closed = $client->query("SELECT dlock_ttl_acquire('closed', '1h')");
	$client->query("SELECT dlock_release_ticket($closed)");
	$admin->query(
		q{LOAD 'dlock'; ALTER SYSTEM SET dlock.log_expirations = off});
	$node->reload;
	# the worker has read the setting when it has written something later
	is_now($admin, 'SELECT count(*) FROM dlock_leases', '0', 'none is left');
	$admin->query(
		'SELECT pg_terminate_backend(' . worker($admin) . ', 180000)');
	($silent) = leave_lease('', '');
	is_now($admin, 'SELECT count(*) FROM dlock_leases', '0',
		'the lease has expired');
	$admin->query('ALTER SYSTEM RESET dlock.log_expirations');
	$node->reload;
	$admin->query(
		'SELECT pg_terminate_backend(' . worker($admin) . ', 180000)');
	($last) = leave_lease('', '');
	logged("lease $last of role", 'a later lease is logged');
	unlike(
		log_text(),
		qr/lease (?:$closed|$silent) of role/,
		'the earlier leases are not logged');
}

#
# Forced releases
#
{
	my $ops = session($node, 'postgres', 'user=ops');
	my $holder = session($node, 'postgres', 'user=alice');
	my $ticket = $holder->query("SELECT dlock_acquire('forced')");
	my $waiter = session($node, 'postgres', 'user=alice');
	my ($lease, $by_lease, $place, $delayed);

	new_part();
	$waiter->start("SELECT dlock_acquire('forced')");
	$admin->until_waits($waiter);
	$place = $admin->query(
		"SELECT ticket FROM dlock_locks WHERE pid = $waiter->{pid}");
	$ops->query("SELECT dlock_force_release($_)") foreach $place, $ticket;
	like($waiter->answer, qr/55L01/, 'a waiter gets an error');
	logged(qq{LOG:  ticket $place of lock "forced" was released by force\n},
		'the forced end of a place in a queue is logged');
	logged(
		qq{DETAIL:  By process $ops->{pid} of role "ops". It was a place in the}
		  . qq{ queue, of process $waiter->{pid} of role "alice".\n},
		'the log has its owner, and who has ended it');
	logged(qq{LOG:  ticket $ticket of lock "forced" was released by force\n},
		'a hold');
	logged(
		qq{DETAIL:  By process $ops->{pid} of role "ops". It was held by process}
		  . qq{ $holder->{pid} of role "alice".\n},
		'the same');

	# with another role's privileges
	$admin->query('GRANT EXECUTE ON FUNCTION dlock_force_release TO bob');
	$lease = $client->query("SELECT dlock_lease_open('1h')");
	$by_lease = $client->query(
		"SELECT dlock_lease_acquire('led', $lease, owner => 'worker 1')");
	$client->query(
		"SET ROLE bob; SELECT dlock_force_release($by_lease); RESET ROLE");
	logged(
		qq{DETAIL:  By process $client->{pid} of role "alice", acting as "bob".}
		  . qq{ It was held by lease $lease (role "alice", owner "worker 1").\n},
		'a lease\'s lock is released under SET ROLE');

	# a lock without a holder
	($lease, undef, $delayed) =
	  leave_lease(", delay => '1h'", '', "'delayed'");
	logged("lease $lease of role", 'a delay begins');
	$ops->query("SELECT dlock_force_release($delayed)");
	logged(
		qq{It had ended before, and kept the lock closed, of lease $lease (role "alice").\n},
		'the forced end of a delay is logged');

	# a ticket that does not exist
	is($ops->query("SELECT dlock_force_release($delayed)"),
		'f', 'the ticket does not exist any more');
	is(scalar(() = log_text() =~ /released by force/g),
		4, 'each forced release has a line');

	# another role's leases, and the session's own
	my $own = $client->query("SELECT dlock_ttl_acquire('own', '1h')");
	my $other = $client->query("SELECT dlock_lease_open('1h')");
	$client->query("SELECT dlock_lease_acquire_all(ARRAY['x', 'y'], $other)");
	$client->query("SELECT dlock_lease_close($own)");
	$ops->query("SELECT dlock_lease_close($other)");
	logged(qq{LOG:  lease $other of role "alice" was closed by force\n},
		'the close of another role\'s lease is logged');
	logged(
		qq{DETAIL:  By process $ops->{pid} of role "ops". It had 2 tickets.\n},
		'by whom');
	unlike(
		log_text(),
		qr/lease $own of role/,
		'the close of an own lease is not logged');
	$ops->query('SELECT dlock_reset()');
	logged(qq{dlock_reset() has ended # leases\n},
		'dlock_reset() logs the number of leases');
	logged(qq{DETAIL:  By process $ops->{pid} of role "ops".\n},
		'dlock_reset() logs the role');
	$_->quit foreach $ops, $holder, $waiter;
}

#
# Table locks that block the worker
#
{
	my $locker = session($node);
	my $worker;

	# This lease keeps the worker running.
	$client->query("SELECT dlock_ttl_acquire('kept', '1h')");
	$worker = worker($admin);
	foreach my $case ([ 'dlock_queue', 'SHARE', 'ShareLock' ],
		[ 'dlock_queue_lease', 'ACCESS EXCLUSIVE', 'AccessExclusiveLock' ])
	{
		my ($table, $mode, $lock) = @$case;

		new_part();
		$locker->query("BEGIN; LOCK TABLE $table IN $mode MODE");
		like(
			$client->query("SELECT dlock_ttl_acquire('other', '1h')"),
			qr/could not write to the tables of leases/,
			"$table is locked: a request gets an error");
		logged(
			qq{LOG:  cannot write table "$table" of database "postgres", as it is locked\n},
			'the locked table is logged');
		logged(
			qq{DETAIL:  Process $worker has waited for RowExclusiveLock on it.}
			  . qq{ It is locked by: process $locker->{pid} ($lock).\n},
			'the log has the holder and mode of the lock');
		unlike(
			log_text(),
			qr/ERROR:  canceling statement/,
			'the log has no plain error');
		$locker->query('ROLLBACK');
		# the worker logs it again only if it has written since
		like($client->query("SELECT dlock_ttl_acquire('$table', '1h')"),
			qr/^\d+$/, 'then the worker goes on');
	}

	# A request that waits for a table lock blocks later requests, too.
	my $reader = session($node);
	new_part();
	$reader->query('BEGIN; SELECT count(*) FROM dlock_queue');
	$locker->start('BEGIN; LOCK TABLE dlock_queue');
	$admin->wait_for("SELECT count(*) = 1 FROM pg_locks "
		  . "WHERE pid = $locker->{pid} AND NOT granted");
	like(
		$client->query("SELECT dlock_ttl_acquire('other', '1h')"),
		qr/could not write/,
		'the worker waits behind a session that waits for a lock');
	logged(
		qq{It is locked by: process $locker->{pid} (AccessExclusiveLock).\n},
		'the log has that session');
	$reader->query('ROLLBACK');
	$locker->answer;
	$locker->query('ROLLBACK');
	$reader->quit;
	like($client->query("SELECT dlock_ttl_acquire('kept, too', '1h')"),
		qr/^\d+$/, 'then the worker goes on');

	# A row lock blocks the worker, too.
	new_part();
	$locker->query(
		"BEGIN; SELECT FROM dlock_queue WHERE name = 'kept' FOR UPDATE");
	$client->query('SELECT dlock_release_ticket(ticket) FROM dlock_locks '
		  . "WHERE name = 'kept'");
	logged("ERROR:  canceling statement due to lock timeout\n",
		'a row is locked');
	logged(qq{in relation "dlock_queue"}, 'PostgreSQL says which');
	logged(qq{ writing table "dlock_queue" }, 'dlock logs what it was doing');
	logged(qq{writing the tables of leases, in database "postgres"\n},
		'dlock logs the database');
	$locker->query('ROLLBACK');
	is_now($admin, q{SELECT count(*) FROM dlock_queue WHERE name = 'kept'},
		'0', 'then the worker goes on');
	$locker->quit;
}

#
# An error that lasts is logged less and less often.
#
{
	my $errors = 0;
	my $logged;

	new_part();
	$admin->query('CREATE INDEX made_up ON dlock_queue (lower(name))');
	for (1 .. 4)
	{
		$errors++
		  if $client->query("SELECT dlock_ttl_acquire('refused', '1h')") =~
		  /not what extension "dlock" has made/;
	}
	$admin->query('DROP INDEX made_up');
	like($client->query("SELECT dlock_ttl_acquire('accepted', '1h')"),
		qr/^\d+$/, 'then the worker goes on');
	$logged = () = log_text() =~ /writing the tables of leases, in database/g;
	is($errors, 4, 'the worker fails again and again');
	cmp_ok($logged, '>', 0, 'the log says so');
	cmp_ok($logged, '<', 4, 'but not each time');
}

#
# Long waits are logged with the holders
#
{
	my $lease = $client->query("SELECT dlock_lease_open('1h')");
	my @tickets = map {
		$client->query("SELECT dlock_lease_acquire('waited for', $lease, "
			  . "owner => 'worker $_', slots => 12)")
	} 1 .. 11;
	my $slot =
	  $client->query("SELECT dlock_acquire('waited for', slots => 12)");
	my $single = $client->query(
		"SELECT dlock_ttl_enqueue('waited for', '1h', 'c', slots => 12)");
	my $waiter = session($node);

	new_part();
	$waiter->query("SET deadlock_timeout = '10ms'");
	$waiter->start("SELECT dlock_acquire('waited for', slots => 12)");
	logged(
		qq{LOG:  process $waiter->{pid} still waiting for 1 permit of lock}
		  . q{ "waited for" after },
		'a long wait');
	logged(
		'DETAIL:  Processes holding the lock: '
		  . join(', ',
			map { qq{lease $lease (role "alice", owner "worker $_")} }
			  1 .. 10)
		  . qq{, .... Wait queue: lease $single (role "alice"), $waiter->{pid}.\n},
		'leases are logged with roles and owners, and ten at most'
	);
	$client->query("SELECT dlock_lease_close($lease)");
	$waiter->answer;
	logged(qq{LOG:  process $waiter->{pid} acquired 1 permit of lock},
		'its end');
	$waiter->quit;
}

#
# A commit that waits for a standby holds NOTIFY's lock.  No slot is left for a
# sender, so the worker sends.  A lease keeps the worker running.
#
$client->query("SELECT dlock_ttl_acquire('stays', '1h')");
$_->quit foreach $client, $admin;
$node->append_conf('postgresql.conf',
	"max_logical_replication_workers = 0\nmax_worker_processes = 1");
$node->restart;
{
	my $locker = session($node);

	$client = session($node);
	$client->query("SELECT dlock_ttl_acquire('awake', '1h')");
	new_part();
	commits_hang($node, 1);
	$locker->start('SET synchronous_commit = on; '
		  . 'BEGIN; CREATE TEMP TABLE t (); NOTIFY c; COMMIT');
	poll('the lock is held', sub { hangs($node, $locker) });
	$client->query("SELECT dlock_enqueue('announced', 'c')");
	logged(
		'waiting for the lock that each NOTIFY takes, object 0 of class # '
		  . 'sending notifications, in database "postgres"',
		'the log says that the worker waits for NOTIFY\'s lock');
	commits_hang($node, 0);
	$locker->answer;
	$_->quit foreach $client, $locker;
}
$node->stop;

#
# The time line is drawn from the log and from the clients' histories
#
sub drawn
{
	my ($test, @arguments) = @_;
	my ($out, $err) = run_command(
		[ $^X, "$FindBin::RealBin/../../docs/pictures/timeline", @arguments ]
	);

	is($err, '', $test);
	return $out;
}

{
	my $picture = drawn('a time line', $node->logfile);

	like($picture, qr/lease \d+ \(alice, worker 1\): holds/, 'the time line has the holder');
	like($picture, qr/process \d+: waits/, "the time line has the waiter");
	like($picture, qr/>\Q$_\E</, "the time line has the end: $_")
	  foreach 'ran out', 'by force';

	my $history = PostgreSQL::Test::Utils::tempdir() . '/1.1';
	my @lines = (
		[
			'asks', 10, '1.1.1', '',
			client => 1,
			op => 'acquire',
			name => 'x1',
			scope => 'session'
		],
		[
			'asks', 11, '1.2.1', '',
			client => 2,
			op => 'acquire',
			name => 'x1',
			scope => 'lease',
			lease => 7
		],
		[ 'told', 12, '1.1.1', 4711 ],
		[
			'asks', 14, '1.1.2', '',
			client => 1,
			op => 'release',
			name => 'x1',
			scope => 'session'
		],
		[ 'told', 15, '1.1.2', 't' ],
		[ 'told', 15, '1.2.1', 4712 ],
		[ 'asks', 17, '1.2.2', '', client => 2, op => 'renew', lease => 7 ],
		[ 'told', 18, '1.2.2', 'null' ]);
	append_to_file($history, join('', map { join("\t", @$_) . "\n" } @lines));
	$picture = drawn('a time line of a history', $history);
	is_deeply(
		[ $picture =~ m{<title>(client .*?)</title>}g ],
		[
			'client 1: waits, 2.000 s',
			'client 1: holds, 2.000 s',
			'client 2, lease 7: waits, 4.000 s',
			'client 2, lease 7: holds, 3.000 s'
		],
		'the time line has the requests and holds');
	unlike(drawn('a time line of the last second', '--last', 1, $history),
		qr/client 1/, 'the time line has only the last second');
}
done_testing();
