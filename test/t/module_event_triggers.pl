# Event triggers that raise errors stop DDL, but not dlock: its processes fire
# no event trigger, however often they write, vacuum, announce and restart.  If
# a trigger stops CREATE, ALTER or DROP EXTENSION, the command has no effect,
# and locks and leases go on.
#
# What would break it: a statement of the worker or of a call that fires an
# event trigger; a DROP that ends leases, or a CREATE that begins a space,
# before its commit.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server(
	'main',
	conf => 'autovacuum = off',
	install_path => next_version_install());
my $admin = session($node);
my $client = session($node);
my @events = qw(ddl_command_start ddl_command_end sql_drop table_rewrite);

sub forbid
{
	my ($session, @forbidden) = @_;

	$session->query(q{
		CREATE OR REPLACE FUNCTION forbid() RETURNS event_trigger
		AS $$ BEGIN RAISE '% is forbidden', tg_event; END $$
		LANGUAGE plpgsql});
	foreach my $event (@forbidden)
	{
		$session->query("CREATE EVENT TRIGGER forbid_$event ON $event "
			  . 'EXECUTE FUNCTION forbid()');
		$session->query("ALTER EVENT TRIGGER forbid_$event ENABLE ALWAYS");
	}
	return;
}

sub allow
{
	my ($session, @allowed) = @_;

	$session->query("DROP EVENT TRIGGER forbid_$_") foreach @allowed;
	return;
}

# From 17 on, each login runs an event trigger, too.
my $logs_in = $node->pg_version >= 17;

#
# Actions of dlock's own processes
#
my $lease = $client->query("SELECT dlock_lease_open('1h')");
my $fence = $client->query("SELECT dlock_lease_acquire('lock', $lease)");
my $of_session = $client->query("SELECT dlock_acquire('of the session')");
$client->query('CREATE TABLE t (a integer)');

sub goes_on
{
	my ($when) = @_;

	is( $client->query(
			"SELECT dlock_renew($lease), dlock_check('lock', $fence), "
			  . "dlock_fence('of the session') = $of_session, "
			  . 'count(*) FROM dlock_locks'),
		'1|t|t|2',
		"$when: no lock is lost");
	return;
}

forbid($admin, @events);
$admin->query('CREATE EVENT TRIGGER forbid_login ON login '
	  . 'EXECUTE FUNCTION forbid()')
  if $logs_in;
like($admin->query('CREATE TABLE u ()'),
	qr/ddl_command_start is forbidden/, 'DDL is forbidden');

foreach my $round (1 .. 2)
{
	my $name = "round $round";

	$client->query("LISTEN c$round");
	my $first = $client->query("SELECT dlock_ttl_acquire('$name', '1h')");
	my $next = $client->query(
		"SELECT dlock_ttl_enqueue('$name', '1h', 'c$round', owner => 'next')");
	grows("$name: acquired, and enqueued", $fence, $first, $next);
	$client->query("SELECT dlock_release_ticket($first)");
	is( join("\n", $client->announcements(1)),
		qq({"event":"granted","lock":"$name","ticket":$next}),
		"$name: granted, and announced");
	is($client->query("SELECT dlock_release_ticket($next)"),
		't', "$name: released");
	my $short = $client->query("SELECT dlock_ttl_enqueue('$name', '1s')");
	is( join("\n", $client->announcements(2)),
		join("\n",
			map { qq({"event":"$_","lock":"$name","ticket":$short}) }
			  'granted', 'expired'),
		"$name: a lease that expires");
	$client->wait_for('SELECT count(*) = 1 FROM dlock_queue');
	come_and_go($client);
	$client->wait_for(
		"SELECT vacuum_count >= $round FROM pg_stat_user_tables "
		  . q{WHERE relname = 'dlock_queue'});
	goes_on("$name: expired, and vacuumed");

	# the next worker begins
	$admin->query(
		'SELECT pg_terminate_backend(' . worker($admin) . ', 60000)');
}
is( $client->query(q{SELECT dlock_reserve('kept ', user::regrole)}),
	'', 'names can be reserved');

#
# A refused command has no effect
#
allow($admin, @events);
$admin->query('DROP EVENT TRIGGER forbid_login') if $logs_in;
foreach my $event ('ddl_command_start', 'sql_drop', 'ddl_command_end')
{
	forbid($admin, $event);
	like($admin->query('DROP EXTENSION dlock'),
		qr/$event is forbidden/, "$event: DROP EXTENSION is forbidden");
	goes_on($event);
	my $ticket = $client->query("SELECT dlock_ttl_acquire('$event', '1h')");
	grows("$event: the worker works", $fence, $ticket);
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', "$event: released");
	$client->wait_for('SELECT count(*) = 1 FROM dlock_queue');
	allow($admin, $event);
}

#
# In another database, the extension is created, updated and dropped
#
$node->safe_psql('postgres', 'CREATE DATABASE other');
my $other = session($node, 'other');
my $fence_of_other = 0;

sub works
{
	my ($when) = @_;
	my $ticket = $other->query("SELECT dlock_ttl_acquire('lock', '1h')");

	grows("$when: locks work, and fences grow", $fence_of_other, $ticket);
	$fence_of_other = $ticket;
	is($other->query("SELECT dlock_release_ticket($ticket)"),
		't', "$when: released");
	return;
}

foreach my $event ('ddl_command_start', 'ddl_command_end')
{
	forbid($other, $event);
	like($other->query('CREATE EXTENSION dlock'),
		qr/$event is forbidden/, "$event: CREATE EXTENSION is forbidden");
	is($other->query(q{SELECT count(*) FROM pg_class WHERE relname ~ '^dlock'}),
		'0', "$event: no object is left");
	allow($other, $event);
}
$other->query('CREATE EXTENSION dlock');
works('made');
$other->query('DROP EXTENSION dlock');
$other->query('CREATE EXTENSION dlock');
works('created again');
my $update = qq{ALTER EXTENSION dlock UPDATE TO "$Dlock::Test::next_version"};
my $version = $other->query('SELECT dlock_version()');
$lease = $other->query("SELECT dlock_lease_open('1h')");
$fence = $other->query("SELECT dlock_lease_acquire('kept', $lease)");
foreach my $event ('ddl_command_start', 'table_rewrite', 'ddl_command_end')
{
	forbid($other, $event);
	like(
		$other->query($update),
		qr/$event is forbidden/,
		"$event: the update is forbidden");
	is( $other->query(
			q{SELECT extversion FROM pg_extension WHERE extname = 'dlock'}),
		$version, "$event: the version is still the old version");
	is($other->query("SELECT dlock_check('kept', $fence)"),
		't', "$event: no lock is lost");
	allow($other, $event);
	works($event);
}
is($other->query($update), '', 'the update');
works('updated');
is($other->query("SELECT dlock_check('kept', $fence), dlock_renew($lease)"),
	't|1', 'no lock is lost');

#
# An event trigger acquires a lock: DDL commands wait for the lock, one after
# another.
#
$other->query(q{
	CREATE FUNCTION one_by_one() RETURNS event_trigger
	AS $$ BEGIN PERFORM dlock_xact_acquire('ddl'); END $$
	LANGUAGE plpgsql});
$other->query('CREATE EVENT TRIGGER one_by_one ON ddl_command_start '
	  . 'EXECUTE FUNCTION one_by_one()');
my $second = session($node, 'other');
$other->query('BEGIN; CREATE TABLE a ()');
$second->start('CREATE TABLE b ()');
$other->until_waits($second);
$other->query('COMMIT');
is($second->answer, '', 'DDL that waits for other DDL');
$other->query('BEGIN; DROP EXTENSION dlock');
is($other->query('ROLLBACK'), '', 'a DROP that takes the lock');
is($second->query("SELECT dlock_check('kept', $fence)"),
	't', '... and is rolled back');
is($other->query('DROP EXTENSION dlock'), '', 'a DROP that commits');
$other->query('DROP EVENT TRIGGER one_by_one');
$other->query('CREATE EXTENSION dlock');
$fence_of_other = $fence;
works('made again');

$_->quit foreach $admin, $client, $other, $second;
$node->stop;
done_testing();
