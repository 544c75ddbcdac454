# Leases behind a pooler.  In transaction mode, each transaction of a client
# may run in another server session, and a session serves many clients: a lease
# belongs to the client that knows its number.  In session mode, the locks of a
# session belong to its client, and end with that client.  In statement mode,
# only a lease protects anything.
#
# What would break it: a lease, or a lease's ticket, that is bound to the
# session that made it, so that only that session can renew, wait, guard or
# release; a session that keeps state of its previous client, or ends a lease's
# tickets when the pooler closes it; a session that the pooler has reset and
# that still holds, waits or listens for its last client.  The test also shows
# the warnings about modes in docs/applications.md.
#
# Each step of a client runs in another session: a transaction of another
# client occupies the session that the step would get.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Command;
use Dlock::Lease;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my ($pgbouncer) =
  grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';

plan skip_all => 'pgbouncer is not installed' unless $pgbouncer;

my $node = new_server('main', conf => "deadlock_timeout = '1h'");
my $dir = PostgreSQL::Test::Utils::tempdir_short();
my $port = $node->port;
my $user = $node->safe_psql('postgres', 'SELECT user');

append_to_file(
	"$dir/pgbouncer.ini", qq{
[databases]
postgres = host=${\$node->host} port=$port dbname=postgres user=$user
session = host=${\$node->host} port=$port dbname=postgres user=$user pool_mode=session pool_size=1
statement = host=${\$node->host} port=$port dbname=postgres user=$user pool_mode=statement pool_size=1

[pgbouncer]
pool_mode = transaction
default_pool_size = 10
listen_addr =
unix_socket_dir = $dir
unix_socket_mode = 0700
listen_port = $port
auth_type = any
logfile = $dir/log
pidfile = $dir/pid
});
system_or_bail($pgbouncer, '-q', '-d', "$dir/pgbouncer.ini");
my $pid;

poll('the pooler has begun',
	sub { -s "$dir/pid" && -S "$dir/.s.PGSQL.$port" });
($pid) = slurp_file("$dir/pid") =~ /(\d+)/;

END
{
	kill('TERM', $pid) if $pid;
}

# A client of the pooler.  A database named after a mode selects that mode.
sub client
{
	my ($database) = @_;

	return session($node, $database // 'postgres', "host=$dir port=$port");
}

# Run a command on the pooler's own console.
sub pooler
{
	# the user that needs no password if the same user runs the pooler
	system_or_bail($node->installed_command('psql'), '-XAtq', '-d',
		"host=$dir port=$port dbname=pgbouncer user=pgbouncer", '-c', $_[0]);
	return;
}

my $admin = session($node);
my $client = client();
my %used;

# Let a client run a statement in a server session that this sub has not used
# yet.  Meanwhile, transactions of other clients occupy the used sessions.
sub elsewhere
{
	my ($sql) = @_;
	my (@busy, $backend, $result);

	while (1)
	{
		$client->query('BEGIN');
		$backend = $client->query('SELECT pg_backend_pid()');
		last unless $used{$backend}++;
		$client->query('COMMIT');
		push @busy, client();
		$busy[-1]->query('BEGIN; SELECT 1');
	}
	$result = $client->query($sql);
	$client->query('COMMIT');
	foreach my $other (@busy)
	{
		$other->query('COMMIT');
		$other->quit;
	}
	return $result;
}

# Have the pooler close its sessions.
sub end_sessions
{
	pooler('RECONNECT');
	backends_gone($_) foreach keys %used;
	%used = ();
	return;
}

sub nothing_is_left
{
	my ($test) = @_;

	end_sessions();
	return is_now($admin, 'SELECT count(*) FROM dlock_locks', '0',
		"$test: nothing is left");
}

# Is this ticket the only holder?
sub is_holder
{
	my ($ticket, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is(
		$admin->query(
			q{SELECT string_agg(ticket || ' ' || (pid IS NULL), ', ')
				FROM dlock_locks WHERE granted}),
		"$ticket true",
		$test);
}

#
# A lock with a ttl
#
{
	my $ticket = elsewhere("SELECT dlock_ttl_acquire('lock', '1h', owner => 'me')");

	like($ticket, qr/^\d+$/, 'ttl: acquired');
	is_holder($ticket, 'ttl: held by no session');
	is(elsewhere("SELECT dlock_renew($ticket)"), '1', 'ttl: renewed');
	is(elsewhere("SELECT dlock_ttl_acquire('lock', '1h', owner => 'me')"),
		$ticket, 'ttl: a repeated request gets the same ticket');
	is(elsewhere("SELECT dlock_check('lock', $ticket)"), 't', 'ttl: checked');
	is( elsewhere(
			"SELECT dlock_try_ttl_acquire('lock', '1h', owner => 'you') IS NULL"
		),
		't',
		'ttl: another owner does not get the lock');
	cmp_ok(scalar(keys %used), '==', 5, 'ttl: the calls ran in five sessions');
	end_sessions();
	is_holder($ticket, 'ttl: held after these sessions have ended');
	is(elsewhere("SELECT dlock_renew($ticket)"), '1', 'ttl: renewed in another session');
	is(elsewhere("SELECT dlock_release_ticket($ticket)"),
		't', 'ttl: released');
	like(elsewhere("SELECT dlock_release_ticket($ticket)"),
		qr/WARNING.*^f$/ms, 'ttl: a second release warns');
	is(elsewhere("SELECT dlock_renew($ticket) IS NULL"),
		't', 'ttl: not renewed after the release');
	nothing_is_left('ttl');
}

#
# The command: its settings must not reach the next client.
#
{
	my $set = q{SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) }
	  . q{FROM pg_settings WHERE source = 'session'};
	my $before = $client->query($set);
	my ($code, $out, $err) = dlock("host=$dir port=$port dbname=postgres user=$user",
		'run', 'lock', 'echo', 'done');

	is("$code$out$err", "0done\n", 'dlock run: works');
	is($client->query($set), $before, 'dlock run: leaves no setting');
	nothing_is_left('dlock run');
}

#
# A lease with several locks
#
{
	my $lease = elsewhere("SELECT dlock_lease_open('1h')");
	my @tickets = map { elsewhere("SELECT dlock_lease_acquire('$_', $lease)") }
	  'a', 'b';

	is(elsewhere("SELECT dlock_lease_acquire('a', $lease)"),
		$tickets[0], 'lease: a repeated request gets the same ticket');
	is(elsewhere("SELECT dlock_renew($lease)"), '2', 'lease: renewed');
	cmp_ok(scalar(keys %used), '==', 5, 'lease: the calls ran in five sessions');
	is(elsewhere("SELECT dlock_release_ticket($tickets[0])"),
		't', 'lease: one lock released');
	is_holder($tickets[1], 'lease: the other lock is held');
	end_sessions();
	is_holder($tickets[1], 'lease: held without any session');
	is(elsewhere("SELECT dlock_lease_close($lease)"), '1', 'lease: closed');
	is(elsewhere("SELECT dlock_renew($lease) IS NULL"),
		't', 'lease: gone in each session');
	nothing_is_left('lease');
}

#
# A ticket is enqueued through the pooler.  A direct session gets the ticket's
# announcement, and any session can wait for its grant.
#
{
	my $listener = session($node);
	my $waiter = client();
	my $held = elsewhere("SELECT dlock_ttl_acquire('lock', '1h')");
	my (@tickets, $backend);

	$listener->query('LISTEN mine');
	push @tickets, elsewhere("SELECT dlock_ttl_enqueue('lock', '1h', 'mine')")
	  foreach 1 .. 2;
	is(elsewhere("SELECT dlock_wait($tickets[0], '0')"),
		'f', 'enqueue: still waiting');
	is(scalar($listener->announcements(0)), 0, 'enqueue: not announced');
	end_sessions();
	is(elsewhere("SELECT dlock_release_ticket($held)"),
		't', 'enqueue: the holder releases');
	told($listener, 'enqueue: announced',
		announcement('granted', 'lock', $tickets[0]),
		announcement('wanted', 'lock', $tickets[0]));
	is(elsewhere("SELECT dlock_wait($tickets[0], '0')"),
		't', 'enqueue: confirmed');

	$waiter->query('BEGIN');
	$backend = $waiter->query('SELECT pg_backend_pid()');
	$waiter->start("SELECT dlock_wait($tickets[1])");
	$admin->wait_for('SELECT count(*) = 1 FROM pg_stat_activity '
		  . "WHERE pid = $backend AND wait_event_type = 'Lock'");
	is(elsewhere("SELECT dlock_release_ticket($tickets[0])"),
		't', 'enqueue: released');
	is($waiter->answer, 't', 'enqueue: the second ticket is granted');
	told($listener, 'enqueue: the second grant is announced, too',
		announcement('granted', 'lock', $tickets[1]));
	$waiter->query('COMMIT');
	$waiter->quit;
	is_holder($tickets[1], 'enqueue: held after the waiting client has left');
	is(elsewhere("SELECT dlock_release_ticket($tickets[1])"),
		't', 'enqueue: released');
	$listener->quit;
	nothing_is_left('enqueue');
}

#
# A transaction through the pooler can be guarded, and hold locks of its own.
#
{
	my $ticket = elsewhere("SELECT dlock_ttl_acquire('lock', '1h')");

	$admin->query('CREATE TABLE data (n integer)');
	is( elsewhere(
			"SELECT dlock_guard('lock', $ticket); INSERT INTO data VALUES (1)"),
		'',
		'guard: a transaction is guarded by the fence');
	is($admin->query('SELECT count(*) FROM data'), '1', 'guard: committed');
	elsewhere("SELECT dlock_release_ticket($ticket)");
	like(
		elsewhere(
			"SELECT dlock_guard('lock', $ticket); INSERT INTO data VALUES (2)"),
		qr/55L01/,
		'guard: refused after the release');
	is($admin->query('SELECT count(*) FROM data'), '1', 'guard: not committed');

	is( elsewhere(
			q{SELECT dlock_xact_acquire('lock') > 0; SELECT dlock_is_held('lock')}
		),
		"t\nt",
		'transaction scope: held');
	is($admin->query('SELECT count(*) FROM dlock_locks'),
		'0', 'transaction scope: free after the transaction');
	nothing_is_left('transactions');
}

#
# Session mode: one server session serves one client after another.  The pooler
# resets the session in between.  It closes the session if a notification comes
# just before the client leaves, so the clients wait for theirs.
#
sub next_client
{
	my ($last, $test) = @_;
	my $pid = $last->{pid};
	my $next;

	$last->quit;
	$next = client('session');
	is($next->{pid}, $pid, "$test: the next client has the same session")
	  or diag("the pooler's log:\n" . slurp_file("$dir/log"));
	return $next;
}

{
	my $first = client('session');
	my $lease = $first->query("SELECT dlock_lease_open('1h', attach => true)");
	my $channel = $first->query('SELECT dlock_channel()');

	$first->query("SELECT dlock_acquire('lock')");
	$first->query("SELECT dlock_enqueue('lock')");
	$first->query("SELECT dlock_watch('lock')");
	$first->announcements(2);
	is($admin->query("SELECT attached_pid FROM dlock_leases WHERE lease = $lease"),
		$first->{pid}, 'session mode: a lease is attached');

	my $next = next_client($first, 'DISCARD ALL');

	is($next->query('SELECT count(*) FROM dlock_locks'),
		'0', 'DISCARD ALL: no lock is held or waited for');
	is($next->query('SELECT count(*) FROM pg_listening_channels()'),
		'0', 'DISCARD ALL: the session listens to no channel');
	isnt($next->query('SELECT dlock_channel()'),
		$channel, 'DISCARD ALL: the next client has another channel');
	is( $next->query(
			"SELECT attached_pid IS NULL FROM dlock_leases WHERE lease = $lease"),
		't',
		'DISCARD ALL: the lease is detached');
	is($next->query("SELECT dlock_lease_close($lease)"),
		'0', 'DISCARD ALL: the lease is still open');

	# the trap: a pooler that resets nothing
	pooler(q{SET server_reset_query = ''});
	my $fence = $next->query("SELECT dlock_acquire('lock')");
	$next = next_client($next, 'no reset');
	is($next->query("SELECT dlock_try_acquire('lock')"),
		$fence, 'no reset: the next client holds the lock');

	# the advice for poolers that must not use DISCARD ALL
	pooler(q{SET server_reset_query = 'SELECT dlock_release_all()'});
	$lease = $next->query("SELECT dlock_lease_open('1h', attach => true)");
	my $other = $next->query("SELECT dlock_enqueue('other')");

	told($next, 'dlock_release_all: a grant is announced',
		announcement('granted', 'other', $other));
	$next = next_client($next, 'dlock_release_all');
	is($next->query('SELECT count(*) FROM dlock_locks'),
		'0', 'dlock_release_all: no lock is held or waited for');
	is( $next->query(
			'SELECT attached_pid = pg_backend_pid(), '
			  . '(SELECT count(*) FROM pg_listening_channels()) '
			  . "FROM dlock_leases WHERE lease = $lease"),
		't|1',
		'dlock_release_all: a lease stays attached, and LISTEN is kept');
	$next->query("SELECT dlock_lease_close($lease)");
	$next->quit;
}

#
# Statement mode: each statement is a transaction of its own.
#
{
	my $client = client('statement');
	my $ticket;

	like($client->query("SELECT dlock_xact_acquire('lock')"),
		qr/WARNING:  25P01: dlock_xact_acquire\(\) .*^\d+$/ms,
		'statement mode: acquired for a transaction, with a warning');
	is($client->query('SELECT count(*) FROM dlock_locks'),
		'0', 'statement mode: free after the statement');
	$client->query("SELECT dlock_acquire('lock')");
	$client->quit;
	$client = client('statement');
	is($client->query("SELECT dlock_is_held('lock')"),
		't', 'statement mode: the next client holds the session\'s lock');
	$client->query('SELECT dlock_release_all()');

	$ticket = $client->query("SELECT dlock_ttl_acquire('lock', '1h')");
	is($client->query("SELECT dlock_renew($ticket)"),
		'1', 'statement mode: a lease can be renewed');
	is( $client->query(
			"WITH guard AS MATERIALIZED (SELECT dlock_guard('lock', $ticket)) "
			  . 'INSERT INTO data SELECT 3 FROM guard RETURNING n'),
		'3',
		'statement mode: a guard works in the statement that writes');
	is($client->query("SELECT dlock_release_ticket($ticket)"),
		't', 'statement mode: released');
	like(
		$client->query(
			"WITH guard AS MATERIALIZED (SELECT dlock_guard('lock', $ticket)) "
			  . 'INSERT INTO data SELECT 4 FROM guard'),
		qr/55L01/,
		'statement mode: the guard refuses a late write');
	like($client->query('BEGIN'), qr/not allowed/,
		'statement mode: BEGIN is refused');
	$client->may_end;
}

$_->quit foreach $client, $admin;
done_testing();
