# The settings of a database and of a role do not affect dlock's processes:
# leases are opened, written, expire and are handed over, announcements are
# sent, the tables are vacuumed and loaded, and no error ends a process.
#
# What would break it: a setting that a process of dlock gets with its
# connection, as each gets the database's and the superuser's settings.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main', conf => 'autovacuum = off');
my $superuser =
  $node->safe_psql('postgres', 'SELECT rolname FROM pg_roles WHERE oid = 10');
my @places = ('DATABASE test', qq(ROLE "$superuser"),
	qq(ROLE "$superuser" IN DATABASE test), 'ROLE ALL');
my @settings = (
	'role = stranger',
	'session_authorization = stranger',
	'search_path = evil',
	'session_replication_role = replica',
	'row_security = on',
	'synchronous_commit = remote_apply',
	'commit_delay = 100000',
	'default_transaction_read_only = on',
	'default_transaction_isolation = serializable',
	'default_transaction_deferrable = on',
	'lock_timeout = 1',
	'statement_timeout = 1',
	'idle_in_transaction_session_timeout = 1',
	'idle_session_timeout = 1',
	'exit_on_error = on',
	'temp_file_limit = 0',
	'vacuum_cost_delay = 100',
	'vacuum_cost_limit = 1',
	'vacuum_freeze_min_age = 0',
	'vacuum_freeze_table_age = 0',
	'enable_indexscan = off',
	'client_min_messages = error');
push @settings, 'transaction_timeout = 1' if $node->pg_version >= 17;

# settings that a session of dlock must not get
my $free = '-c role=none -c search_path=public -c statement_timeout=0 '
  . '-c lock_timeout=0 -c synchronous_commit=local -c exit_on_error=off '
  . '-c default_transaction_read_only=off -c idle_session_timeout=0 '
  . '-c idle_in_transaction_session_timeout=0 '
  . "-c session_authorization=$superuser -c client_min_messages=notice";
$free .= ' -c transaction_timeout=0' if $node->pg_version >= 17;

my $admin = session($node);
$admin->query('CREATE ROLE stranger; CREATE DATABASE test');
$node->safe_psql('test', 'CREATE EXTENSION dlock; CREATE SCHEMA evil');

# All settings at once.  Each could break a step.
foreach my $place (@places)
{
	foreach my $setting (@settings)
	{
		my $answer = $admin->query(
			"SET client_min_messages = error; ALTER $place SET $setting");

		is($answer, '', "$place: $setting") if $answer ne '';
	}
	is( $admin->query(
			'SELECT max(cardinality(setconfig)) FROM pg_db_role_setting'),
		scalar(@settings),
		"$place: all are set");

	my $client = session($node, 'test', "options='$free'");
	my $other = session($node, 'test', "options='$free'");
	$_->query(q{SET default_transaction_isolation = 'read committed'})
	  foreach $client, $other;
	my $lease = $client->query("SELECT dlock_lease_open('1h')");
	my ($short, $next, $ticket);

	like($lease, qr/^\d+$/, "$place: a lease is opened");
	$short = $client->query("SELECT dlock_ttl_acquire('lock', '1s')");
	$ticket =
	  $client->query("SELECT dlock_lease_enqueue('lock', $lease)");
	grows("$place: granted, and queued", $short, $ticket);
	told($client, "$place: expires, is handed on, and announced",
		announcement('granted', 'lock', $ticket));
	is_now($other, "SELECT granted FROM dlock_queue WHERE ticket = $ticket",
		't', "$place: and written");

	# A table is locked, and a task fails.
	my $pid = worker($other);
	$other->query('BEGIN; LOCK TABLE dlock_queue');
	like($client->query("SELECT dlock_ttl_acquire('new', '1h')"),
		qr/55P03/, "$place: a table is locked: a call fails");
	$other->query('ROLLBACK');
	is(worker($other), $pid, "$place: and the worker goes on");

	# Make more dead rows than a vacuum needs.
	ok(come_and_go($client), "$place: many tickets have come and gone");
	ok( $other->wait_for(
			q{SELECT vacuum_count > 0 AND n_dead_tup < 6000
				FROM pg_stat_user_tables WHERE relname = 'dlock_queue'}),
		"$place: the table is vacuumed");
	$other->query("SELECT pg_stat_reset()");
	is($client->query("SELECT dlock_lease_close($lease)"),
		'1', "$place: a lease is closed");
	$_->quit foreach $client, $other;
	$admin->query("ALTER $place RESET ALL");
	$admin->wait_for(q{SELECT count(*) = 0 FROM pg_stat_activity
		WHERE backend_type LIKE 'dlock %'});
}

#
# All settings at all places, while another role owns the tables, but cannot
# even read them, and a synchronous commit would wait for a standby
#
my $client = session($node, 'test', "options='$free'");
$admin->query('CREATE ROLE owner');
$client->query('GRANT USAGE ON SCHEMA public TO owner');
$client->query("ALTER TABLE $_ OWNER TO owner; REVOKE ALL ON $_ FROM owner")
  foreach 'dlock_queue', 'dlock_queue_lease';
foreach my $place (@places)
{
	$admin->query("SET client_min_messages = error; ALTER $place SET $_")
	  foreach @settings;
}
$admin->query(q{ALTER SYSTEM SET synchronous_standby_names = 'nobody'});
$node->reload;
$admin->wait_for(q{SELECT setting = 'nobody' FROM pg_settings
	WHERE name = 'synchronous_standby_names'});

my $lease = $client->query("SELECT dlock_lease_open('1h')");
like($lease, qr/^\d+$/, 'all at once: a lease is opened');
grows(
	'all at once: granted, and queued',
	$client->query("SELECT dlock_lease_acquire('a', $lease)"),
	$client->query("SELECT dlock_ttl_acquire('b', '1s')"),
	$client->query("SELECT dlock_lease_enqueue('b', $lease)"));
ok( $client->wait_for(
		'SELECT count(*) = 2 FROM dlock_queue '
		  . "WHERE granted AND lease = $lease"),
	'all at once: expires, and is handed over');
is($client->query("SELECT dlock_lease_close($lease)"),
	'2', 'all at once: closed');
ok($client->wait_for('SELECT count(*) = 0 FROM dlock_queue'),
	'all at once: rows are removed');

# The tables are loaded after a start, in a read-only transaction.
$lease = $client->query("SELECT dlock_lease_open('1h')");
my $fence = $client->query("SELECT dlock_lease_acquire('a', $lease)");
$_->quit foreach $client, $admin;
$node->restart;
$client = session($node, 'test',
	"options='$free -c default_transaction_read_only=on'");
is($client->query("SELECT dlock_check('a', $fence)"),
	't', 'all at once: a session loads the tables');
is($client->query("SELECT dlock_lease_close($lease)"),
	'1', 'all at once: a session closes the lease');
$client->quit;
$node->stop;
done_testing();
