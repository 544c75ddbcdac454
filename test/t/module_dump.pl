# A dump contains what must outlive the database.  It includes the sequence, so
# a restored database never gives a fence that the original gave before the
# dump, even if the numbers are ahead of the clock.  It includes versions,
# reservations and set slots, independent of the roles on the target server and
# of how rows are written, and connected sessions see them.  The original's
# leases continue.  The restored database has none.
#
# What would break it: a table or a sequence that is not marked to be dumped
# with the extension; a sequence whose last value is not the greatest reserved
# number; a column that accepts only the OID of an existing role, so that one
# missing role blocks all rows; an OID that is taken from the dump; a cached
# copy of the table that misses the rows; a dump that waits for the worker, or
# the reverse; rows of leases in a dump.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');
my $dir = PostgreSQL::Test::Utils::tempdir;

# One database has numbers ahead of the clock.  The other has numbers by the
# clock, and the extension in another schema.
$node->safe_psql('postgres', 'CREATE DATABASE ahead');
$node->safe_psql('postgres', 'CREATE DATABASE "in Time"');
$node->safe_psql('ahead',
	'CREATE EXTENSION dlock; SELECT dlock_advance_ticket((2^51)::bigint)');
$node->safe_psql('in Time',
	'CREATE SCHEMA s; CREATE EXTENSION dlock SCHEMA s');

# New fences must exceed the fence of a holder during the dump.  There is also
# a lease with granted and waiting tickets.
my %holders;
my %leases;
my %fences;
foreach my $dbname ('ahead', 'in Time')
{
	$holders{$dbname} = session($node, $dbname);
	$holders{$dbname}->query('SET search_path = public, s');
	$leases{$dbname} = $holders{$dbname}->query("SELECT dlock_lease_open('1h')");
	$holders{$dbname}->query(
		"SELECT dlock_lease_acquire('of the lease', $leases{$dbname})");
	$fences{$dbname} =
	  $holders{$dbname}->query("SELECT dlock_acquire('lock')");
	$holders{$dbname}->query(
		"SELECT dlock_lease_enqueue('lock', $leases{$dbname})");
}
cmp_ok($fences{ahead}, '>=', 1 << 51, 'numbers are ahead of the time');

my $fresh = PostgreSQL::Test::Cluster->new('fresh');
$fresh->init;
$fresh->start;

sub restored
{
	my ($where, $dbname, $original, $how) = @_;

	# This is first: the lock is released some time after its session ends.
	is( $where->safe_psql(
			$dbname,
			'SET search_path = public, s; SELECT (SELECT count(*) FROM dlock_locks), '
			  . '(SELECT count(*) FROM dlock_leases), '
			  . '(SELECT count(*) FROM dlock_queue), '
			  . '(SELECT count(*) FROM dlock_queue_lease)'),
		'0|0|0|0',
		"$how: no lock and no lease is restored");
	grows(
		"$how: fences of \"$original\" grow",
		$fences{$original},
		$where->safe_psql(
			$dbname,
			"SET search_path = public, s; SELECT dlock_acquire('lock')"));
}

# pg_dump in each format, into this server and into a fresh one
foreach my $original ('ahead', 'in Time')
{
	foreach my $format ('plain', 'custom', 'directory')
	{
		my $dump = "$dir/$original.$format";

		$node->command_ok(
			[ 'pg_dump', '-F', $format, '-f', $dump, '-d', $original ],
			"pg_dump --format=$format");
		foreach my $where ($node, $fresh)
		{
			my $dbname = "restored $original $format";

			$where->safe_psql('postgres', qq{CREATE DATABASE "$dbname"});
			$where->command_ok(
				$format eq 'plain'
				? [ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $dump,
					'-d', $dbname ]
				: [ 'pg_restore', '-e', '-d', $dbname, $dump ],
				"restored with --format=$format");
			restored($where, $dbname, $original,
				$where->name . ", --format=$format");
		}
	}
}

# All locks are held as before, and the worker can write.
foreach my $original ('ahead', 'in Time')
{
	is( $holders{$original}->query(
			"SELECT dlock_renew($leases{$original}), "
			  . "dlock_check('lock', $fences{$original})"),
		'2|t',
		"the leases of \"$original\" go on");
}

# pg_dumpall
my $fresh_too = PostgreSQL::Test::Cluster->new('fresh_too');
$fresh_too->init;
$fresh_too->start;
$node->command_ok([ 'pg_dumpall', '-f', "$dir/all" ], 'pg_dumpall');
# initdb creates this role
$fresh_too->command_ok([ 'psql', '-X', '-q', '-f', "$dir/all", 'postgres' ],
	'restored from pg_dumpall');
restored($fresh_too, $_, $_, 'pg_dumpall') foreach 'ahead', 'in Time';

# pg_restore --clean over the original, whose numbers have grown since
foreach my $original ('ahead', 'in Time')
{
	my $restored = session($node, $original);

	$restored->query('SET search_path = public, s; CREATE TABLE t ()');
	$fences{$original} =
	  $restored->query("SELECT dlock_acquire('another')");
	$restored->quit;
}

# The holder has then lost its lock.  The holder and the waiter get errors.
my $waiter = session($node, 'in Time');
$waiter->start("SELECT s.dlock_acquire('of the lease')");
$holders{'in Time'}->until_waits($waiter);
$node->command_ok(
	[
		'pg_restore', '-e', '--clean', '--if-exists', '-d', 'in Time',
		"$dir/in Time.custom"
	],
	'pg_restore --clean --if-exists');
like($waiter->answer, qr/ERROR:  55L01/, 'the waiter gets an error');
is($holders{'in Time'}->query("SELECT dlock_renew($leases{'in Time'}) IS NULL"),
	't', 'the old lease is gone');
$waiter->quit;
$holders{'in Time'}->quit;
restored($node, 'in Time', 'in Time', 'pg_restore --clean --if-exists');

$holders{ahead}->quit;

# Restore into a database of another owner.  Only the extension belongs to the
# superuser.
$node->safe_psql('postgres',
	'CREATE ROLE other_owner LOGIN; CREATE DATABASE of_other OWNER other_owner; '
	  . 'CREATE DATABASE of_other_too OWNER other_owner');
$node->safe_psql('in Time', 'GRANT USAGE ON SCHEMA s TO PUBLIC');
$node->safe_psql('in Time', "SELECT s.dlock_version_bump('v', 0)");
my $kept = $node->safe_psql('in Time',
	"SELECT s.dlock_lease_acquire('kept', s.dlock_lease_open('1h'))");
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dir/other", '-d', 'in Time' ],
	'pg_dump, with leases');
$node->command_ok(
	[ 'pg_restore', '-e', '--no-owner', '-d', 'of_other', "$dir/other" ],
	'restored into a database with another owner');
my $owner = session($node, 'of_other', 'user=other_owner');
is($owner->query("SELECT s.dlock_version_of('v')"), '1', 'versions are there');
grows('the owner of the database has all locks',
	$kept, $owner->query("SELECT s.dlock_ttl_acquire('kept', '1h')"));
$owner->quit;
$node->command_checks_all(
	[ 'pg_restore', '-e', '--role=other_owner', '--no-owner', '-d',
		'of_other_too', "$dir/other" ],
	1,
	[qr/^$/],
	[qr/permission denied to create extension "dlock"/],
	'that owner cannot restore the dump');

# Dump only the schema: its rows and numbers, without the extension.
$node->command_ok(
	[ 'pg_dump', '-n', 's', '-f', "$dir/schema", '-d', 'in Time' ],
	'pg_dump -n');
$node->safe_psql('of_other_too', 'CREATE EXTENSION dlock SCHEMA s');
$node->command_ok(
	[ 'psql', '-X', '-q', '-f', "$dir/schema", '-d', 'of_other_too' ],
	'restored into a database with the extension');
is($node->safe_psql('of_other_too', "SELECT s.dlock_version_of('v')"),
	'1', 'its versions are there');
is( $node->safe_psql('of_other_too', 'SELECT count(*) FROM s.dlock_queue'),
	'0', 'no lease is restored');
is($node->safe_psql('in Time', "SELECT s.dlock_check('kept', $kept)"),
	't', 'the original goes on');

#
# Versions, reservations and slots
#
$node->safe_psql(
	'postgres', q{
	CREATE ROLE shop;
	CREATE ROLE "The Clerk";
	CREATE ROLE gone;
	SELECT dlock_reserve('shop/', 'shop'), dlock_reserve('clerk/', '"The Clerk"'),
		dlock_reserve('gone/', 'gone');
	DROP ROLE gone;
	SELECT dlock_version_bump('v', 0);
	SELECT dlock_version_bump('v', 1);
	SELECT dlock_set_slots('slots', 2)});
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dir/rows", '-d', 'postgres' ],
	'pg_dump');

# On the target, one of these roles has another OID, and the rest do not exist.
$fresh->safe_psql('postgres',
	'CREATE ROLE one; CREATE ROLE "The Clerk"; CREATE ROLE other');

my %ways = (
	'all of it' => [],
	'the rows alone' => ['--data-only'],
	'without triggers' => [ '--data-only', '--disable-triggers' ],
	'as a replica' => ['--data-only']);

foreach my $way (sort keys %ways)
{
	my $session;

	local $ENV{PGOPTIONS} =
	  $way eq 'as a replica' ? '-c session_replication_role=replica' : '';
	$fresh->safe_psql('postgres', qq{CREATE DATABASE "$way"});
	if (@{ $ways{$way} })
	{
		$fresh->safe_psql($way, 'CREATE EXTENSION dlock');
		$session = session($fresh, $way);
		$session->query('SET ROLE other');
		like($session->query("SELECT dlock_acquire('shop/0')"),
			qr/^\d+$/, "$way: nothing is reserved before");
	}
	$fresh->command_ok(
		[ 'pg_restore', '-e', @{ $ways{$way} }, '-d', $way, "$dir/rows" ],
		"$way: restored");
	$session //= session($fresh, $way);
	$session->query('SET ROLE other');

	foreach my $prefix ('shop', 'clerk', 'gone')
	{
		like(
			$session->query("SELECT dlock_acquire('$prefix/1')"),
			qr/42501.*"$prefix\/"/s,
			"$way: $prefix/ is closed to others");
	}
	like(
		$session->query("SELECT dlock_acquire('shop/1')"),
		qr/reserved for role "shop", which does not exist/,
		"$way: the missing role is named");
	$session->query('SET ROLE "The Clerk"');
	like($session->query("SELECT dlock_acquire('clerk/1')"),
		qr/^\d+$/, "$way: the role of that name can use its names");
	$session->query('RESET ROLE');
	is( $session->query(
			"SELECT count(dlock_try_acquire('slots', slots => 9)) "
			  . "FROM generate_series(1, 5)"),
		'2',
		"$way: slots are set");
	like($session->query("SELECT dlock_acquire('gone/1')"),
		qr/^\d+$/, "$way: a superuser can");
	is($session->query("SELECT dlock_version_of('v')"),
		'2', "$way: versions are there");
	is( $session->query(
			"SELECT bumped_by = current_user AND bumped_at < now() "
			  . "FROM dlock_versions WHERE name = 'v'"),
		't',
		"$way: the last bump's role and time are there");

	# A role created later may be another role.
	$session->query('CREATE ROLE shop');
	$session->query('SET ROLE shop');
	like(
		$session->query("SELECT dlock_acquire('shop/1')"),
		qr/reserved for an earlier role "shop"/,
		"$way: a role made later does not inherit names");
	$session->query("RESET ROLE; SELECT dlock_reserve('shop/', 'shop')");
	$session->query('SET ROLE shop');
	like($session->query("SELECT dlock_acquire('shop/1')"),
		qr/^\d+$/, "$way: unless somebody says so");
	$session->query('RESET ROLE; DROP ROLE shop');
	$session->quit;
}

$_->stop foreach $node, $fresh, $fresh_too;
done_testing();
