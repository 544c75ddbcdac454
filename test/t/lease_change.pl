# A change of a lease or its ticket is durable when the call returns: of the
# info, of the ttl, or from exclusive to shared.  The change survives a crash
# and a failover to the synchronous standby.  If the call fails, the info is
# unchanged, the shorter ttl counts, and the hold is shared nevertheless.  No
# ticket is granted beside a holder that a crash would make exclusive again.
# Slots that are set for a lock survive in the same way, with their holders.
#
# What would break it: an answer before the row is durable, at the level at
# which standbys count for the lease; a longer ttl that counts before that, or
# a shorter ttl that does not; an undo of a change after another session's
# change; a reader that is admitted before the row says shared; slots that are
# loaded after a lease's ticket, used before they are loaded, or loaded from an
# outdated row; a worker that checks a lease only when its old ttl is over; a
# text that is freed while a view reads it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Standby;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main', allows_streaming => 1,
	conf => "deadlock_timeout = '1h'\nsynchronous_commit = local\n");
my ($admin, $client, $other, $reader) = map { session($node) } 1 .. 4;

$client->query('SET synchronous_commit = on');
my $lease = $client->query("SELECT dlock_lease_open('1h', info => 'old')");
my $ticket = $client->query("SELECT dlock_lease_acquire('lock', $lease)");

sub cancel
{
	$admin->query("SELECT pg_cancel_backend($client->{pid})");
	like($client->answer, qr/57014/, $_[0]);
	return;
}

sub until_hangs
{
	poll('the call waits for a standby', sub { hangs($node, $client) });
	return;
}

sub of_lease
{
	return $admin->query(
		"SELECT ttl, remaining <= ttl, info FROM dlock_leases "
		  . "WHERE lease = $lease");
}

sub row_becomes
{
	my ($expected, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is_now($admin,
		"SELECT ttl, info FROM dlock_queue_lease WHERE lease = $lease",
		$expected, $test);
}

#
# While a standby does not answer
#
commits_hang($node, 1);
$client->start("SELECT dlock_set_info($lease, 'new')");
until_hangs();
$other->start("SELECT dlock_set_info($lease, 'third')");
$admin->wait_for("SELECT wait_event_type = 'Lock' FROM pg_stat_activity "
	  . "WHERE pid = $other->{pid}");
cancel('a change of the info is canceled');
is($other->answer, 't', 'a later change of the info is made');
is(of_lease(), '01:00:00|t|third', 'the later info stays');
$client->start("SELECT dlock_set_info($lease, 'new')");
until_hangs();
cancel('another change of the info is canceled');
is(of_lease(), '01:00:00|t|third', 'the info is unchanged');
row_becomes('01:00:00|third', 'the row has the same values');

$client->start("SELECT dlock_renew($lease, '2h')");
until_hangs();
is(of_lease(), '01:00:00|f|third',
	'a longer ttl does not count yet, but the lease does not expire before it');
row_becomes('02:00:00|third', 'the row has the longer ttl');
cancel('the renewal is canceled');
is(of_lease(), '01:00:00|t|third', 'the shorter ttl stays');
row_becomes('01:00:00|third', 'the row has the same values');

$client->start("SELECT dlock_renew($lease, '30 min')");
until_hangs();
is(of_lease(), '00:30:00|t|third', 'a shorter ttl counts at once');
cancel('the renewal is canceled');
is(of_lease(), '00:30:00|t|third', 'the shorter ttl stays');
row_becomes('00:30:00|third', 'the row has the same values');

# standbys count for the lease at any level of the caller
$client->query('SET synchronous_commit = local');
$client->start("SELECT dlock_renew($lease, '2h')");
until_hangs();
is(of_lease(), '00:30:00|f|third', 'standbys count for the lease');
cancel('the renewal is canceled again');
is($client->query('SHOW synchronous_commit'), 'local', 'the setting is back');
$client->query('SET synchronous_commit = on');

# A reader is admitted when the row is in the WAL, before standbys have it.
$reader->start("SELECT dlock_acquire('lock', shared => true) > $ticket");
$admin->until_waits($reader);
$client->start("SELECT dlock_downgrade($ticket)");
is($reader->answer, 't', 'a reader is admitted');
until_hangs();
cancel('a downgrade is canceled');
is($admin->query("SELECT mode FROM dlock_locks WHERE ticket = $ticket"),
	'shared', 'the hold is shared');
commits_hang($node, 0);
is($client->query("SELECT dlock_downgrade($ticket)"), 't', 'the downgrade is repeated');
is($reader->query("SELECT dlock_release('lock')"), 't', 'the reader releases');
is($client->query("SELECT dlock_release_ticket($ticket)"),
	't', 'the holder releases');

#
# While the worker does not write
#
$ticket = $client->query("SELECT dlock_lease_acquire('lock', $lease)");
my $short = $client->query("SELECT dlock_ttl_acquire('short', '1h')");
{
	my $worker = freeze($admin);

	$reader->start("SELECT dlock_acquire('lock', shared => true)");
	$admin->until_waits($reader);
	$client->start("SELECT dlock_downgrade($ticket)");
	$admin->wait_for("SELECT wait_event_type = 'Extension' "
		  . "FROM pg_stat_activity WHERE pid = $client->{pid}");
	is( $admin->query(
			"SELECT mode, dlock_try_acquire('lock', shared => true) IS NULL "
			  . "FROM dlock_locks WHERE ticket = $ticket"),
		'exclusive|t',
		'no reader is admitted before the row is written');
	is($reader->answered, '', 'a waiting reader is not admitted, either');
	$other->start("SELECT dlock_renew($short, '100 ms')");
	$admin->wait_for(
		"SELECT count(*) = 0 FROM dlock_leases WHERE lease = $short");
	is($other->answered, '', 'a renewal waits though its ttl is over');
	kill_server($node);
	$_->vanish foreach $admin, $client, $other, $reader;
}
$node->start;
($admin, $client, $other, $reader) = map { session($node) } 1 .. 4;
$client->query('SET synchronous_commit = on');
is( $admin->query(
		"SELECT mode, dlock_try_acquire('lock', shared => true) IS NULL "
		  . "FROM dlock_locks WHERE ticket = $ticket"),
	'exclusive|t',
	'the holder is exclusive after a crash');

# Again, but the worker continues.
{
	my $worker = freeze($admin);

	$reader->start("SELECT dlock_acquire('short')");
	$admin->until_waits($reader);
	$other->start("SELECT dlock_renew($short, '100 ms')");
	$admin->wait_for(
		"SELECT count(*) = 0 FROM dlock_leases WHERE lease = $short");
	thaw($worker);
	is($other->answer, '', 'a renewal whose ttl is over says that the lease is gone');
	like($reader->answer, qr/^\d+$/, 'the next session gets the lock');
}

#
# Slots that are set count after a crash and a promotion, too, with as many
# holders as before.  Uncommitted slots do not.
#
sub slots_are
{
	my ($session, $expected, $what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is( $session->query(
			"SELECT dlock_try_acquire('jobs', slots => 9) IS NULL, "
			  . "string_agg(format('%s %s', slots, granted), ', ' "
			  . "ORDER BY ticket) FROM dlock_locks('jobs')"),
		"t|$expected",
		"$what: of leases");
	is( $session->query(
			"SELECT count(dlock_try_acquire('session', slots => 9)), "
			  . "count(dlock_try_acquire('free', slots => 9)) "
			  . "FROM generate_series(1, 4)"),
		'2|4',
		"$what: of sessions");
	return $session->query('SELECT dlock_release_all()');
}

# A session's commit is visible, but has not changed shared memory yet.
SKIP:
{
	skip 'no debugger that can be attached', 1 unless debugger_works($admin);
	my ($first, $second) = map { session($node) } 1 .. 2;
	my $visible = stop_behind($first, 'ProcArrayEndTransaction');

	$first->start("SELECT dlock_set_slots('overtaken', 5)");
	$visible->();
	$second->start("SELECT dlock_set_slots('overtaken', 2)");
	poll('the second waits',
		sub {
			$second->answered
			  || $admin->query("SELECT wait_event_type = 'Lock' "
				  . "FROM pg_stat_activity WHERE pid = $second->{pid}") eq 't';
		});
	$visible->();
	$_->answer foreach $first, $second;
	is( $admin->query("SELECT count(dlock_try_acquire('overtaken', slots => 9)) "
			  . 'FROM generate_series(1, 9)'),
		'2',
		'the slots that were set last count');
	$admin->query('SELECT dlock_release_all()');
	$_->quit foreach $first, $second;
}

$client->query("SELECT dlock_set_slots('jobs', 3), "
	  . "dlock_set_slots('session', 2), dlock_set_slots('free', 1)");
is( $client->query(
		"SELECT count(dlock_try_ttl_acquire('jobs', '1h', slots => 1, "
		  . "owner => i::text)) FROM generate_series(1, 4) AS i"),
	'3',
	'as many tickets as slots are granted');
$client->query("SELECT dlock_ttl_enqueue('jobs', '1h', 'nobody', slots => 7)");
is( $client->query(
		"SELECT dlock_set_slots('jobs', 2), dlock_set_slots('free', NULL)"),
	'|', 'fewer slots than holders are set');
$other->query("BEGIN; SELECT dlock_set_slots('jobs', 9)");

#
# Answered changes survive a crash, and are on the promoted standby
#
sub is_there
{
	my ($session, $what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is( $session->query(
			"SELECT ttl, remaining > '2 h', info FROM dlock_leases "
			  . "WHERE lease = $lease"),
		'03:00:00|t|newest',
		"$what: info, and a full ttl");
	return is(
		$session->query(
			"SELECT mode, info, dlock_is_held('lock', $lease) "
			  . "FROM dlock_locks WHERE ticket = $ticket"),
		'shared|of the ticket|t',
		"$what: the ticket's, and its mode");
}

is( $client->query(
		"SELECT dlock_set_info($lease, 'newest'), dlock_renew($lease, '3h'), "
		  . "dlock_set_info($ticket, 'of the ticket'), "
		  . "dlock_downgrade($ticket)"),
	't|1|t|t',
	'changed');
slots_are($client, '2 t, 2 t, 2 t, 2 f', 'slots');
kill_server($node);
$_->vanish foreach $admin, $client, $other, $reader;
$node->start;
$admin = session($node);
slots_are($admin, '2 t, 2 t, 2 t, 2 f', 'slots after a crash');
is_there($admin, 'a crash');

# Slots are set while another session loads the slots set before a crash.  That
# session has read the old row already, but the old value does not count.
SKIP:
{
	skip 'no debugger that can be attached', 1 unless debugger_works($admin);
	kill_server($node);
	$_->vanish foreach $admin;
	$node->start;
	$admin = session($node);
	my $reader = session($node);

	# other tables have been read by then
	$reader->query("SELECT dlock_version_of('x')");
	my $has_row = stop_behind($reader, 'heap_getnextslot');

	$reader->start("SELECT dlock_try_acquire('session', slots => 9) > 0");
	$has_row->();
	$admin->query('UPDATE dlock_slots SET slots = slots + 5');
	$has_row->();
	is($reader->answer, 't', 'slots that are set while old slots are loaded');
	$reader->quit;
	backends_gone($reader->{pid});
	is( $admin->query("SELECT count(dlock_try_acquire('session', slots => 9)) "
			  . 'FROM generate_series(1, 9)'),
		'7',
		'... count');
	$admin->query('SELECT dlock_release_all(); UPDATE dlock_slots SET slots = slots - 5');
}

$ticket = $admin->query("SELECT dlock_ttl_acquire('its own', '1h')");
my $standby = new_standby($node, 'standby');
count_on($node, 'standby');
$client = session($node);
$client->query('SET synchronous_commit = on');
is( $client->query(
		"SELECT dlock_renew($ticket, '5h'), dlock_set_info($ticket, 'last'), "
		  . "dlock_downgrade($ticket)"),
	'1|t|t',
	'changed, with a standby');
is($client->query("SELECT dlock_set_slots('jobs', 4)"),
	'', 'more slots are set');
is($client->query("SELECT dlock_wait(max(ticket)) FROM dlock_locks('jobs')"),
	't', 'a waiter is granted a new slot');
kill_server($node);
$_->vanish foreach $admin, $client;
take_over($standby);
$admin = session($standby);
# The first session that loads the slots must not have emptied the table.  Its
# other uncommitted changes do not count.
$admin->query('BEGIN; TRUNCATE dlock_slots');
like($admin->query("SELECT dlock_try_acquire('session', slots => 9)"),
	qr/55000.*changed or locked/, 'slots are not loaded from an uncommitted TRUNCATE');
$admin->query('ROLLBACK');
$admin->query("BEGIN; UPDATE dlock_slots SET slots = 1 WHERE name = 'session'; "
	  . "UPDATE dlock_slots SET slots = 5 WHERE name = 'jobs'");
slots_are($admin, '4 t, 4 t, 4 t, 4 t', 'slots on that standby, promoted');
$admin->query('ROLLBACK');
slots_are($admin, '4 t, 4 t, 4 t, 4 t', 'slots after a rollback');
is( $admin->query(
		"SELECT l.ttl, l.remaining > '4 h', q.mode, q.info "
		  . "FROM dlock_leases AS l JOIN dlock_locks AS q USING (lease) "
		  . "WHERE lease = $ticket"),
	'05:00:00|t|shared|last',
	'changes on that standby, promoted');

#
# A view reads a text that another session changes
#
{
	my @writers = map { session($standby) } 1 .. 2;
	my $torn = 0;
	my $looks = 0;

	foreach my $writer (@writers)
	{
		my $number = $writer->query("SELECT dlock_acquire('texts', "
			  . "shared => true)");
		$writer->start(
			"SELECT count(dlock_set_info($number, CASE WHEN i % 50 > 0 "
			  . "THEN repeat(chr(97 + i % 26), i % 1024) END)) "
			  . 'FROM generate_series(1, 30000) AS i');
	}
	while (grep { !$_->answered } @writers)
	{
		$torn += $admin->query(
			q{SELECT count(*) FROM dlock_locks
			   WHERE name = 'texts' AND info !~ '^(.)\1*$' AND info <> ''});
		$looks++;
	}
	is($_->answer, '30000', 'texts were changed') foreach @writers;
	is($torn, 0, 'each text that was read is complete');
	note "$looks looks";
	$_->quit foreach @writers;
}

$admin->quit;
$standby->stop;
done_testing();
