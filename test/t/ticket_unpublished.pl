# A session is granted a lease's ticket, and fails before the ticket can be found
# by its number, for example for lack of memory.  Another client makes the same
# request at that moment, and keeps the ticket, which is found by its number.
# The same is true if the lease had the ticket already while the session waited;
# then the ticket is found before it is granted, too.
#
# A session waits with a ticket with a ttl, which another client has, too.  The
# ticket is ended, and the session repeats the request.  The session is granted
# the lock just after the worker has removed the ended ticket.  The new lease
# is like any other.
#
# A session closes a lease, and the worker ends the lease's tickets before the
# session does.  The session's answer counts them.
#
# A query about one of many holders, by the number of its ticket or lease,
# reads no other holder.  A release does not, either.  If a delay ends many
# tickets, the lease lock is released in between.  Locks of other databases are
# not visited.
#
# What would break it: a ticket that only the failed session would have inserted
# into the table of numbers, and that cannot be released; a lease that
# begins again before its end is finished, and that ends then, or cannot be
# found; a close that counts only the tickets that it ends itself; a row that
# is removed because its lease cannot be found yet; a search of all holders, or
# of all locks while no session can use them; a loop over all tickets of a
# lease in one step; one count of waiters for all databases.
#
# These moments are between two steps of one process, so a debugger stops the
# process there.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Utils;
use Test::More;

# Autovacuum's invalidations would be among the steps.
my $node = new_server('main', conf => "autovacuum = off\n");
my $admin = session($node);

plan skip_all => 'no debugger that can be attached'
  unless debugger_works($admin);

my ($holder, $waiter, $other) = map { session($node) } 1 .. 3;
my $lease = $admin->query("SELECT dlock_lease_open('1h')");

$holder->query("SELECT dlock_acquire('lock')");
# The debugger must know the library.
$waiter->query('SELECT dlock_version()');
my $stopped = fail_in($waiter, 'dlock_id_insert', 'dlock_queue_withdraw');
$waiter->start("SELECT dlock_lease_acquire('lock', $lease)");
$admin->until_waits($waiter);
$holder->query("SELECT dlock_release('lock')");
$stopped->();

# The other client gets that ticket, or waits until the ticket's fate is known.
$other->start("SELECT dlock_lease_enqueue('lock', $lease)");
poll(
	'the other client has its answer or waits',
	sub {
		$other->answered ||
		  $admin->query('SELECT wait_event_type FROM pg_stat_activity '
			  . "WHERE pid = $other->{pid}") eq 'LWLock';
	});
$stopped->();

like($waiter->answer, qr/57014/, 'the session has failed');
my $ticket = $other->answer;
like($ticket, qr/^\d+$/, 'the other client has got a ticket');
is($admin->query("SELECT dlock_wait($ticket)"), 't', 'which holds the lock');
is($admin->query('SELECT ticket, scope FROM dlock_locks'),
	"$ticket|lease", 'no other ticket exists');
is($admin->query("SELECT dlock_release_ticket($ticket)"),
	't', 'the ticket is found by its number');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');

#
# The session waits until the row of the last holder is removed.
#
my $heir = q{dlock_ttl_acquire('lock', '1h', owner => 'one')};

$ticket = $holder->query(q{SELECT dlock_ttl_acquire('lock', '1h')});
$holder->query('BEGIN; LOCK TABLE dlock_queue IN SHARE MODE');
$admin->query("SELECT dlock_release_ticket($ticket)");
$stopped = fail_in($waiter, 'dlock_durable_wait', 'dlock_queue_withdraw');
foreach my $client ($waiter, $other)
{
	$client->start("SELECT $heir");
	$admin->wait_for(q{SELECT wait_event_type = 'Lock' }
		  . "FROM pg_stat_activity WHERE pid = $client->{pid}");
}
is( $admin->query(q{SELECT dlock_renew(ticket), dlock_renew(lease) }
		  . q{FROM dlock_locks WHERE name = 'lock' AND NOT granted}),
	'1|1', 'its number is found while it waits, because views show it');
$holder->query('ROLLBACK');
$stopped->();
$ticket = $other->answer;
is( $other->query("SELECT dlock_check('lock', $ticket), dlock_renew($ticket) > 0"),
	't|t', 'the other client can use the ticket while the session fails');
$stopped->();
like($waiter->answer, qr/57014/, 'the session has failed');
is($admin->query("SELECT dlock_release_ticket($ticket)"),
	't', 'the ticket is found by its number');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');

#
# The session cannot insert its ticket's number before it waits, or
# dlock_reset() ends its lease.
#
$ticket = $holder->query(q{SELECT dlock_ttl_acquire('lock', '1h')});
$holder->query('BEGIN; LOCK TABLE dlock_queue IN SHARE MODE');
$admin->query("SELECT dlock_release_ticket($ticket)");
my $raised = raise_in($waiter, 'dlock_queue_join_for_lease', 'dlock_id_insert');
$waiter->start("SELECT $heir");
$raised->();
like($waiter->answer, qr/ERROR/, 'the session has failed');
is($admin->query('SELECT count(*) FROM dlock_locks WHERE lease IS NOT NULL '
	  . 'AND NOT granted'), '0', 'and does not wait');
$waiter->start("SELECT $heir");
$admin->wait_for('SELECT count(*) = 1 FROM dlock_locks WHERE NOT granted');
$admin->query('SELECT dlock_reset()');
like($waiter->answer, qr/55L01/, 'a reset ends the lease of a waiting session');
$holder->query('ROLLBACK');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$lease = $admin->query("SELECT dlock_lease_open('1h')");

#
# A request is repeated
#
my $enqueue = q{dlock_ttl_enqueue('lock', '1h', 'c', owner => 'one')};

$holder->query("SELECT dlock_acquire('lock')");
$waiter->start("SELECT dlock_ttl_acquire('lock', '1h', owner => 'one')");
$admin->until_waits($waiter);
$ticket = $other->query("SELECT $enqueue");
$admin->wait_for("SELECT count(*) = 1 FROM dlock_queue WHERE ticket = $ticket");
$stopped = stop_behind({ pid => worker($admin) }, 'dlock_id_delete');
is($admin->query("SELECT dlock_force_release($ticket)"), 't', 'ended');
$stopped->();
$admin->wait_for('SELECT count(*) = 1 FROM dlock_locks '
	  . "WHERE NOT granted AND ticket > $ticket");
$holder->query("SELECT dlock_release('lock')");
$admin->wait_for('SELECT count(*) = 1 FROM dlock_locks '
	  . "WHERE granted AND ticket > $ticket AND pid IS NULL");
$stopped->();
my $anew = $waiter->answer;
cmp_ok($anew, '>', $ticket, 'requested again');
is($other->query("SELECT $enqueue"), $anew, 'the other client gets it, too');
is( $admin->query("SELECT held FROM dlock_leases WHERE lease = $anew"),
	'1', 'the ticket\'s lease exists');
is($admin->query("SELECT dlock_release_ticket($anew)"), 't', 'and ends');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
is($admin->query('SELECT lease FROM dlock_leases'),
	$lease, 'no other lease is left');

#
# A lease is closed, and its ttl is over before all tickets have ended.
#
my $short = $other->query("SELECT dlock_lease_open('1h')");
my $count = $other->query(
	"SELECT cardinality(dlock_lease_acquire_all(ARRAY['a', 'b', 'c'], $short))");

$stopped = stop_at($other->{pid}, 'dlock_queue_end');
$other->start(
	"SELECT dlock_lease_close($short) FROM dlock_renew($short, '1s')");
$stopped->();
$admin->wait_for(q{SELECT count(*) = 0 FROM dlock_locks WHERE name <> 'lock'});
$stopped->();
is($other->answer, $count, 'the close counts what the worker has ended');

#
# Queries about one of many holders
#
my $slots = 5000;
my @all = split / /,
  $admin->query("SELECT string_agg(dlock_ttl_acquire('lock', '1h', "
	  . "slots => $slots)::text, ' ') FROM generate_series(2, $slots)");
my $many = $admin->query("SELECT dlock_lease_acquire('lock', $lease, "
	  . "slots => $slots)");

# Does a query return from a function after this many instructions?  A scan of
# the other holders would take several for each.  The clock is not stepped
# through: its loop begins again if the kernel has set the time since the last
# step.
my $steps = "$PostgreSQL::Test::Utils::tmp_check/steps.gdb";

append_to_file($steps, <<'END');
while $left > 0 && $pc != $back
  stepi 100
  if (long) $pc == (long) &dlock_monotonic_now
    finish
  end
  set $left = $left - 1
end
END

sub returns_within
{
	my ($instructions, $session, $question, $function) = @_;
	my $asked = commands_in(
		$session, $function,
		'up-silently 1',
		'set $back = $pc',
		'down-silently 1',
		'tbreak *$back',
		'break *dlock_monotonic_now',
		"set \$left = $instructions / 100",
		"source $steps",
		'print $pc == $back');

	is($session->query("SELECT $question"), 't', $question);
	return like($asked->(), qr/^\$\d+ = 1$/m, 'reads no other holder');
}

my @questions = (
	[ "dlock_check('lock', $all[100])" => 'dlock_check' ],
	[ "dlock_check('lock', $many)" => 'dlock_check' ],
	[ "dlock_is_held('lock', $all[100])" => 'dlock_is_held' ],
	[ "dlock_is_held('lock', $lease)" => 'dlock_is_held' ]);

# Query once before, because the first query may have to flush the WAL.
$other->query("SELECT $_->[0]") foreach @questions;
returns_within(20000, $other, @$_) foreach @questions;
is( $other->query("SELECT dlock_check('other', $many), "
		  . "dlock_check('lock', $lease), "
		  . "dlock_is_held('other', $lease), "
		  . "dlock_is_held('lock', $many)"),
	'f|f|f|f', 'only the given tickets are released');
returns_within(20000, $other, @$_)
  foreach [ "dlock_force_release($all[100])" => 'dlock_queue_force' ],
  [ "dlock_force_release($many)" => 'dlock_queue_force' ];

#
# A session's ticket, or a ticket that does not exist, needs a search.
#
$ticket = $holder->query("SELECT dlock_acquire('own')");
foreach my $number (1, $ticket)
{
	is( $other->query("SELECT dlock_force_release($number)"),
		$number == 1 ? 'f' : 't', 'a search');
}

#
# A lease has many tickets.  A process that ends its delay lets other processes
# use leases in between.
#
my $tickets = 1000;

# Is a function called less often than there are tickets, between two places?
sub in_steps
{
	my ($session, $from, $function, @to) = @_;
	my $asked = commands_in(
		$session, $from, "break $function",
		'ignore 2 1000000', @to, 'info breakpoints');

	return sub {
		my ($calls) = $asked->() =~ /already hit (\d+) times/;

		cmp_ok($calls // $tickets, '<', $tickets / 2, 'in steps');
	};
}

$lease = $waiter->query(
	"SELECT dlock_lease_open('100ms', attach => true, delay => '1h')");
$waiter->query("SELECT count(dlock_lease_acquire('many ' || n, $lease)) "
	  . "FROM generate_series(1, $tickets) AS n");

$waiter->quit;
$admin->wait_for("SELECT count(*) = $tickets FROM dlock_locks "
	  . "WHERE lease = $lease AND NOT granted");
my $lets_go = in_steps($other, 'dlock_lease_ticket_unlist',
	'dlock_lease_ticket_unlist', 'tbreak LWLockRelease', 'continue');
is($other->query("SELECT dlock_force_close($lease)"),
	$tickets, 'a delay ends');
$lets_go->();
$admin->wait_for(
	"SELECT count(*) = 0 FROM dlock_queue WHERE lease = $lease");

#
# The noted end of a removal in the WAL only grows, because a session that
# flushed less would trust a grant that a crash undoes.
#
$lease = $admin->query("SELECT dlock_lease_open('1h')");
$ticket = $admin->query("SELECT dlock_lease_acquire('removed', $lease)");
my $noted = commands_in(
	{ pid => worker($admin) }, 'dlock_journal_note_removal',
	'set $space = space',
	'set $key = key',
	'set $lsn = lsn',
	'call (void) dlock_journal_note_removal($space, $key, $lsn + 16)',
	'call (void) dlock_journal_note_removal($space, $key, $lsn - 1000)',
	'print dlock_journal_find_removal($space, $key) == $lsn + 16');
$admin->query("SELECT dlock_release_ticket($ticket)");
like($noted->(), qr/^\$\d+ = 1$/m, 'an earlier removal does not lower the noted end');
$admin->query("SELECT dlock_lease_close($lease)");

#
# The row of a lease is written before the lease can be found.  At that moment,
# the worker removes foreign rows, which a user has locked until now.
#
my $foreign = 'system <> (SELECT system_identifier FROM pg_control_system())';

$admin->query("SELECT dlock_lease_open('1h')");
$admin->query('INSERT INTO dlock_queue_lease SELECT lease + n, ttl, delay, delayed, '
	  . 'info, role, role_name, opened_at, durability, system + 1, database '
	  . 'FROM (SELECT * FROM dlock_queue_lease LIMIT 1) l, generate_series(1, 2) n');
$_->quit foreach $holder, $other, $admin;
$node->restart;
($admin, $holder, $other, $waiter) = map { session($node) } 1 .. 4;
$holder->query("BEGIN; SELECT FROM dlock_queue_lease WHERE $foreign LIMIT 1 FOR UPDATE");
$waiter->query('SELECT dlock_renew(1)');
$stopped = stop_behind($waiter, 'dlock_lease_enter');
$waiter->start("SELECT dlock_lease_open('1h')");
$stopped->();
$other->query("SELECT dlock_lease_open('1h')");
$holder->query('COMMIT');
$admin->wait_for("SELECT count(*) = 0 FROM dlock_queue_lease WHERE $foreign");
$stopped->();
$lease = $waiter->answer;
is($admin->query("SELECT count(*) FROM dlock_queue_lease WHERE lease = $lease"),
	'1', 'the row of a lease that could not be found yet stays');

$_->quit foreach $holder, $waiter, $other, $admin;
$node->stop;
done_testing();
