# One role cannot take all of the memory.  Whatever it allocates, in any scope
# and any number of databases, locks of other roles work, also afterwards and
# after a restart.  Memory freed by any process is available to its role again.
#
# What would break it: memory that is charged to no role or to a wrong role;
# memory that is freed by another role, and credited to no role or to that
# other role; a limit that is not the role's own.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main',
	conf => "dlock.max_memory = '8MB'\ndlock.max_ttl = '30d'\n"
	  . "fsync = off\nmax_worker_processes = 32\n");
my $admin = session($node);
my @databases = qw(postgres d1 d2);

$admin->query("CREATE ROLE $_ LOGIN") foreach qw(flood flood2 other member);
$admin->query('GRANT flood TO member');
foreach my $database (@databases, 'd3')
{
	if ($database ne 'postgres')
	{
		$admin->query("CREATE DATABASE $database");
		$node->safe_psql($database, 'CREATE EXTENSION dlock');
	}

	# Repeat a call until memory is used up or, with "for_ever", without end.
	$node->safe_psql(
		$database, q{
		CREATE FUNCTION flood(call text, for_ever boolean = false)
		RETURNS text LANGUAGE plpgsql AS $$
		DECLARE
			n integer := 0;
			detail text;
			hint text;
		BEGIN
			LOOP
				BEGIN
					n := n + 1;
					EXECUTE 'SELECT ' || replace(call, '#', n::text);
				EXCEPTION WHEN out_of_memory THEN
					GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL,
						hint = PG_EXCEPTION_HINT;
					IF NOT for_ever THEN
						RETURN n - 1 || ' ' || detail || ' ' || hint;
					END IF;
				END;
			END LOOP;
		END $$});
}

sub as
{
	my ($role, $database) = @_;

	return session($node, $database // 'postgres', "user=$role");
}

# Each call of another role, in every database
sub others_work
{
	my ($when) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	foreach my $database (@databases)
	{
		my $other = as('other', $database);

		is( $other->query(
				q{SELECT dlock_acquire('mine', info => repeat('i', 1000)) > 0,
				dlock_enqueue('mine', 'nobody') > 0, dlock_release_all()}),
			't|t|1',
			"$when, $database: session scope");
		is( $other->query(
				q{SELECT dlock_xact_acquire('mine') > 0,
				cardinality(dlock_xact_acquire_all('{a, b, c}'))}),
			't|3',
			"$when, $database: transaction scope");
		my $lease = $other->query("SELECT dlock_lease_open('1h')");
		is( $other->query(
				qq{SELECT dlock_lease_acquire('mine', $lease) > 0,
				dlock_lease_enqueue('too', $lease, 'nobody') > 0,
				dlock_renew($lease), dlock_lease_close($lease)}),
			't|t|2|2',
			"$when, $database: a lease");
		is( $other->query(
				q{SELECT dlock_release_ticket(dlock_ttl_acquire('own', '1h',
				timeout => '10min'))}),
			't',
			"$when, $database: a ticket's own lease");
		$other->quit;
	}
	return;
}

my $limit = qr/role "flood", in all databases, have reached dlock\.max_memory_per_role, which is 50 percent of 6144 kB\. Release locks that this role/;

#
# A flood in several databases and scopes
#
my $session = as('flood', 'd1');
my $xact = as('flood', 'd2');
my $leases = as('flood', 'd2');
my $info = 'info => repeat(chr(105), 1000)';

is($session->query("SELECT count(dlock_acquire('s' || n, $info)) FROM generate_series(1, 100) AS n"),
	'100', 'a flood in session scope');
$xact->query('BEGIN');
is($xact->query("SELECT count(dlock_xact_acquire('x' || n, $info)) FROM generate_series(1, 100) AS n"),
	'100', 'a flood in transaction scope');
my $lease = $leases->query("SELECT dlock_lease_open('30d', $info)");
my $tickets =
  "dlock_lease_acquire_all(ARRAY(SELECT '#/' || n FROM generate_series(1, 20) AS n), $lease, $info)";
like($leases->query("SELECT flood(\$\$$tickets\$\$)"),
	qr/^\d+ .*$limit/, 'a flood with a lease, up to the limit');
like($_->query("SELECT flood('dlock_acquire(\$\$f#\$\$)')"),
	qr/^\d+ .*$limit/, 'no memory is left for this role in any database')
  foreach $session, $leases;
like($session->query("SELECT $_"), qr/53200: out of memory for locks/, $_)
  foreach "dlock_lease_open('1h', $info)", "dlock_ttl_acquire('t', '1h', $info)",
  "dlock_enqueue('t', 'c', $info)", "dlock_ttl_enqueue('t', '1h', 'c', $info)";
is($session->query("SELECT count(*) FROM dlock_locks WHERE name ~ '^s'"),
	'100', 'nothing is lost');
is($session->query("SELECT dlock_acquire('s1') > 0, dlock_release('s1')"),
	't|t', 'the role can acquire its held locks again');
like($session->query("SELECT flood('dlock_enqueue(\$\$s#\$\$, \$\$c\$\$)')"),
	qr/^0 .*$limit/, 'the role cannot get announcements on a channel');

others_work('during it');
# The role continues to allocate meanwhile.
$session->start(q{SELECT flood('dlock_acquire($$f#$$)', true)});
$leases->start("SELECT flood(\$\$$tickets\$\$, true)");
others_work('during the flood');
$admin->query("SELECT pg_cancel_backend(pid) FROM pg_stat_activity "
	  . "WHERE usename = 'flood' AND state = 'active'");
like($_->answer, qr/57014/, 'the flood is canceled') foreach $session, $leases;

#
# The role whose limit counts
#
$admin->query('ALTER ROLE flood SET dlock.max_memory_per_role = 55');
$admin->query('ALTER ROLE member SET dlock.max_memory_per_role = 100');
my $member = as('member', 'd2');
like($member->query('SHOW dlock.max_memory_per_role'), qr/100|unrecognized/, 'a member');
like(
	$member->query("SET ROLE flood; SELECT flood('dlock_acquire(\$\$m#\$\$)')"),
	qr/role "flood".* 55 percent/,
	'after SET ROLE, the new role\'s limit counts');
like($member->query("RESET ROLE; SELECT flood(\$\$$tickets\$\$)"),
	qr/role "flood".* 55 percent/, 'tickets of the new role\'s lease count to it');
is($member->query("SELECT dlock_acquire('mine') > 0"),
	't', 'other tickets do not count to it');
$member->quit;

# The limit counts although its first reading was canceled.
my $blocker = session($node);

$member = as('member', 'd2');
$member->query('SELECT dlock_version(); SET ROLE flood');
$blocker->query('BEGIN; LOCK TABLE pg_db_role_setting IN ACCESS EXCLUSIVE MODE');
$member->start("SELECT dlock_acquire('first')");
$admin->wait_for("SELECT wait_event = 'relation' FROM pg_stat_activity "
	  . "WHERE pid = $member->{pid}");
$admin->query("SELECT pg_cancel_backend($member->{pid})");
like($member->answer, qr/57014/, 'the first reading of a limit is canceled');
$blocker->query('COMMIT');
$blocker->quit;
like($member->query("SELECT flood('dlock_acquire(\$\$m#\$\$)')"),
	qr/role "flood".* 55 percent/, 'the limit counts nevertheless');
$member->quit;
$admin->query("ALTER ROLE flood RESET ALL");
# more memory than an ordinary role may use
$admin->query('SET dlock.max_memory_per_role = 1');
like(
	$admin->query(
		"SELECT count(dlock_acquire('a' || n, $info)) FROM generate_series(1, 300) AS n"
	),
	qr/^300$/,
	'superusers are exempt');
$admin->query('RESET dlock.max_memory_per_role');
$admin->query('SELECT dlock_release_all()');

#
# Two flooding roles leave memory for roles that have little.
#
my $second = as('flood2', 'd1');
like($second->query("SELECT flood('dlock_acquire(\$\$g#\$\$, $info)')"),
	qr/three quarters of what they may/, 'a second one');
others_work('beside two');

# Many roles that have little cannot take the superusers' reserve.
my @little = map {
	$admin->query("CREATE ROLE little$_ LOGIN");
	as("little$_", 'd1');
} 1 .. 30;
like(
	join("\n",
		map { $_->query("SELECT flood('dlock_acquire(\$\$l' || pg_backend_pid() || '/#\$\$)')") }
		  @little),
	qr/ The locks and tickets of all sessions have reached their part of dlock\.max_memory/,
	'many roles that have little');
is($admin->query("SELECT dlock_acquire('of a superuser', $info) > 0, dlock_release('of a superuser')"),
	't|t', 'superusers have memory left');
$_->quit foreach @little, $second;
backends_gone($_->{pid}) foreach @little, $second;

#
# The entry of a lock counts for a role that has a ticket in the lock, and not
# for a role that has left.
#
$admin->query('CREATE ROLE maker LOGIN; '
	  . 'ALTER ROLE maker SET dlock.max_memory_per_role = 5');
my $maker = as('maker', 'd1');
my $taker = as('other', 'd1');
my $take_all =
  q{SELECT flood('dlock_acquire($$m#$$)'), dlock_release_all() > 0};
my $share = q{SELECT count(dlock_acquire(repeat('n', 200) || n, shared => true))
	FROM generate_series(100, 499) AS n};
my ($most) = $maker->query($take_all) =~ /^(\d+) /;

is($_->query($share), '400', 'shared locks') foreach $maker, $taker;
$maker->query('SELECT dlock_release_all()');
my ($most_again) = $maker->query($take_all) =~ /^(\d+) /;

cmp_ok($most_again, '>', 0.95 * $most, 'a role takes what it could take before')
  || diag("$most locks before, $most_again after");
$_->quit foreach $maker, $taker;

#
# One session user that sets many roles, one after another, cannot take the
# reserve for small roles, neither with locks of its session nor with leases.
#
$admin->query('CREATE ROLE many LOGIN');
foreach my $role (map { "many$_" } 1 .. 40)
{
	$admin->query("CREATE ROLE $role");
	$admin->query("GRANT $role TO many");
}
sub take_all
{
	my ($role, $call) = @_;

	return "SET ROLE $role; SELECT flood(\$\$$call\$\$); RESET ROLE";
}
my $many = as('many', 'd1');
my @refused;
foreach my $number (1 .. 40)
{
	my $role = "many$number";

	push @refused, $many->query(take_all($role, $_))
	  foreach "dlock_acquire('$role #', $info)", "dlock_ttl_acquire('$role t#', '30d', $info)";
}
is(scalar(grep { !/three quarters of what they may/ } @refused),
	0, 'one session sets many roles');
cmp_ok(scalar(grep { !/^0 / } @refused), '<', 10, 'most of the roles get no memory');
others_work('beside it');
# Each of the roles can have a little memory if its session user has little.
$admin->query('ALTER ROLE many40 LOGIN');
my $itself = as('many40', 'd2');
is($itself->query("SELECT dlock_acquire('its own') > 0"), 't', 'a role by itself');
$itself->quit;
# Freed memory no longer counts, even if another role frees it.
$many->query('SELECT dlock_release_all()');
$admin->query("SELECT dlock_force_close(lease) FROM dlock_leases WHERE role LIKE 'many%'");
my $closer = session($node, 'd1');
$closer->query("SELECT dlock_force_close(lease) FROM dlock_leases WHERE role LIKE 'many%'");
$closer->wait_for("SELECT count(*) = 0 FROM dlock_queue WHERE role_name LIKE 'many%'");
$closer->quit;
is($many->query("SET ROLE many2; SELECT dlock_acquire('again') > 0; RESET ROLE"),
	't', 'when all memory is freed, there is memory again');
$many->quit;
backends_gone($many->{pid});

#
# Memory is freed by different processes
#
sub fill
{
	my $filler = as('flood', 'd1');
	my $count = $filler->query("SELECT flood('dlock_acquire(\$\$f#\$\$)')") =~ s/ .*//sr;

	$filler->quit;
	backends_gone($filler->{pid});
	return $count;
}

$_->quit foreach $session, $xact;
backends_gone($_->{pid}) foreach $session, $xact;
# Another role closes a lease, and the worker frees its tickets one by one.
my $clerk = session($node, 'd2');
like($clerk->query("SELECT dlock_force_close($lease)"), qr/^\d{3,}$/, 'closed');
$clerk->wait_for('SELECT count(*) = 0 FROM dlock_queue');
$_->quit foreach $clerk, $leases;
# The worker's own memory counts, too, up to a step.
my $few = 60;
my $all = fill();
cmp_ok($all, '>', 5000, "$all locks, when all is free");
cmp_ok(abs(fill() - $all), '<=', $few, 'the role can allocate as much again');

# A spare entry and a spare ticket pass from role to role.  One role allocates
# and releases them, and another role uses and frees them.
my $changing = session($node, 'd1');
$changing->query(
	q{DO $$
	BEGIN
		FOR n IN 1 .. 500 LOOP
			PERFORM set_config('role', 'flood', false);
			PERFORM dlock_acquire(name, info => repeat('i', 100))
				FROM unnest(ARRAY['a', 'b']) AS name;
			PERFORM set_config('role', 'other', false);
			PERFORM dlock_release('a'), dlock_acquire('c', info => repeat('i', 100));
			PERFORM dlock_release('b'), dlock_acquire('d', info => repeat('i', 100));
			PERFORM dlock_release('c'), dlock_release('d');
		END LOOP;
	END $$;
	RESET ROLE});
is($changing->query('SELECT count(*) FROM dlock_locks'),
	'0', 'roles that take turns');
cmp_ok(abs(fill() - $all), '<=', $few, 'a session that changes its role');
$changing->quit;
backends_gone($changing->{pid});

# more roles than a session counts at a time
$changing = session($node, 'd1');
$admin->query("CREATE ROLE r$_") foreach 1 .. 20;
foreach my $round (1 .. 2)
{
	foreach my $role ((map { "r$_" } 1 .. 20), 'flood')
	{
		$changing->query(
			"SET ROLE $role; SELECT count(dlock_acquire('$role/' || n)) FROM generate_series(1, 20) AS n; RESET ROLE");
	}
	$changing->query('SELECT dlock_release_all()');
}
cmp_ok(abs(fill() - $all), '<=', $few, 'a session of many roles');
$changing->quit;
backends_gone($changing->{pid});

# Leases in a database that is then dropped
my $gone = as('flood', 'd3');
like($gone->query("SELECT flood('dlock_lease_open(\$\$30d\$\$, $info)')"),
	qr/role "flood"/, 'leases in a database');
cmp_ok(fill(), '<=', $few, 'no memory is left for the role\'s locks elsewhere');
$gone->quit;
$admin->query('DROP DATABASE d3');
my $watcher = as('flood', 'd1');
unlike($watcher->query("SELECT dlock_watch('watched')"),
	qr/53200/, 'the next call removes the dropped database, even dlock_watch()');
$watcher->quit;
backends_gone($watcher->{pid});
cmp_ok(abs(fill() - $all), '<=', $few, 'the memory of the dropped database is free');

# several dropped databases, among many databases without sessions
$admin->query('CREATE DATABASE model');
$node->safe_psql('model', 'CREATE EXTENSION dlock');
sub make_database
{
	my ($name, $call) = @_;

	$admin->query("CREATE DATABASE $name TEMPLATE model");
	my $user = as('flood', $name);
	$user->query("SELECT $call");
	$user->quit;
	backends_gone($user->{pid});
	return;
}
sub memory_used
{
	return $admin->query('SELECT memory_used FROM dlock_stats');
}

make_database("idle$_", "dlock_try_acquire('l')") foreach 1 .. 90;
my $some = memory_used();
make_database("gone$_",
	"count(dlock_lease_open('30d', $info)) FROM generate_series(1, 80)")
  foreach 1 .. 8;
$some = memory_used() - $some;
$session = as('flood', 'd1');
like($session->query("SELECT flood('dlock_acquire(\$\$f#\$\$)')"),
	qr/role "flood"/, "$some bytes of leases in eight databases");
my $used = memory_used();
$admin->query("DROP DATABASE gone$_") foreach 1 .. 8;
is($session->query("SELECT dlock_acquire('one more') > 0"),
	't', 'there is memory when these databases have gone');
cmp_ok($used - memory_used(), '>', $some * 15 / 16, 'all memory of these databases is free');

# The memory of an earlier installation is freed when its last user has gone.
$session->quit;
backends_gone($session->{pid});
make_database('again', "dlock_acquire('l')");
my ($first, $last) = map { as('other', 'again') } 1, 2;
$first->query("SELECT dlock_acquire('l')");
is($last->query("SELECT dlock_try_acquire('l', '1us') IS NULL"),
	't', 'a name that was waited for');
$first->quit;
backends_gone($first->{pid});
my $owner = session($node, 'again');
$owner->query('DROP EXTENSION dlock CASCADE');
$owner->query('CREATE EXTENSION dlock');
$owner->quit;
$session = as('flood', 'again');
my $too_many =
  "SELECT count(dlock_acquire('f' || n)) FROM generate_series(1, 30000) AS n";
like($session->query($too_many), qr/role "flood"/, 'beside an earlier installation');
$used = memory_used();
$last->quit;
backends_gone($last->{pid});
like($session->query($too_many), qr/role "flood"/, 'without the earlier installation');
cmp_ok($used - memory_used(), '>', 25000, 'the memory of the earlier installation is free');
$session->quit;
backends_gone($session->{pid});

#
# Statistics of awaited names, in databases without sessions
#
my $before = memory_used();
foreach my $database (@databases)
{
	my ($holder, $waiter) = map { as('other', $database) } 1, 2;
	my $names = "FROM generate_series(1, 1000) AS n";

	$holder->query("SELECT count(dlock_acquire('w' || n)) $names");
	is($waiter->query("SELECT count(dlock_try_acquire('w' || n, '1us')) $names"),
		'0', "$database: 1,000 names are waited for");
	$_->quit foreach $holder, $waiter;
	backends_gone($_->{pid}) foreach $holder, $waiter;
}
my $third = session($node, $databases[2]);
cmp_ok($third->query('SELECT count(*) FROM dlock_contention'),
	'>=', 50, 'the first databases have left some room for others');
$third->quit;
my $kept = memory_used() - $before;
cmp_ok($kept, '<', 6 * 1024 * 1024 / 8, "$kept bytes, in all databases together");
cmp_ok($admin->query('SELECT count(*) FROM dlock_contention'),
	'>', 100, 'some databases have room');
$admin->query('SELECT dlock_stats_reset()');
cmp_ok(memory_used() - $before, '<', $kept - 30000, 'the memory is freed');

#
# More roles are dropped than a process counts at a time; then, a restart
#
$changing = session($node, 'd2');
foreach my $role (map { "r$_" } 1 .. 20)
{
	$changing->query("SET ROLE $role; SELECT dlock_acquire('$role', $info); "
		  . "SELECT dlock_lease_acquire('of/$role', dlock_lease_open('30d', $info), $info); "
		  . 'RESET ROLE');
}
$admin->query("DROP ROLE r$_") foreach 1 .. 20;
is($changing->query('SELECT dlock_release_all()'),
	'20', 'tickets of dropped roles are released');
$changing->quit;
$leases = as('flood', 'd2');
$lease = $leases->query("SELECT dlock_lease_open('30d', $info)");
$tickets =~ s/, \d+, /, $lease, /;
like($leases->query("SELECT flood(\$\$$tickets\$\$)"),
	qr/role "flood"/, 'a flood of tickets with a lease');
$leases->quit;
$admin->quit;
$node->restart;
$admin = session($node, 'd2');
cmp_ok($admin->query('SELECT count(*) FROM dlock_locks'),
	'>', 200, 'the tickets exist after a restart');
$session = as('flood', 'd1');
like($session->query("SELECT flood('dlock_acquire(\$\$f#\$\$, $info)')"),
	qr/^\d{1,2} .*role "flood"/, 'the tickets are charged to their role');
others_work('after a restart');
$session->quit;
is( $admin->query(
		"SELECT sum(dlock_force_close(lease)) FROM dlock_leases WHERE lease <> $lease"
	),
	'20',
	'leases of dropped roles are closed');
is($admin->query("SELECT dlock_force_close($lease) > 200"), 't', 'closed');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_queue');
cmp_ok(abs(fill() - $all), '<=', $few, 'all memory is free again');

#
# A role sets slots, as the first action after each of several restarts
#
$admin->quit;
$admin = session($node, 'd1');
$admin->query("SELECT dlock_reserve('flood/', 'flood')");
foreach my $round (1 .. 3)
{
	$session = as('flood', 'd1');
	like(
		$session->query("SELECT flood('dlock_set_slots(\$\$flood/$round/#\$\$, 1)')"),
		$round == 1 ? $limit : qr/three quarters of what they may/,
		"round $round: slots, until there is no memory");
	$_->quit foreach $session, $admin;
	$node->restart;
	others_work("round $round of slots");
	$admin = session($node, 'd1');
	is($admin->query("SELECT dlock_acquire('mine') > 0"), 't', 'as do superusers');
	# restart, so that the next round's call is the server's first
	$admin->quit;
	$node->restart;
	$admin = session($node, 'd1');
}

$admin->quit;
$node->stop;
done_testing();
