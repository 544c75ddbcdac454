# A dump carries what must outlive the database: the sequence, so that a restored
# one never gives a fence that the dumped one gave before, even where the numbers
# are ahead of the time; and versions and reservations, whatever roles there are
# where it is restored, and however its rows are written, so that sessions that
# are there see them.
#
# What would break it: a table or a sequence that is not marked to be dumped with
# the extension, or a sequence whose last value is not the greatest number
# reserved; a column that can only hold the OID of a role that is there, so that
# one missing role stops all rows; an OID that is taken from the dump; a copy of
# the table, kept by a session, that nobody tells of the rows; or a trigger that
# takes a restore for replication.

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

# One database with the numbers ahead of the time, and one with the numbers
# that the time gives and the extension in a schema of its own
$node->safe_psql('postgres', 'CREATE DATABASE ahead');
$node->safe_psql('postgres', 'CREATE DATABASE "in Time"');
$node->safe_psql('ahead',
	'CREATE EXTENSION dlock; SELECT dlock_advance_ticket((2^51)::bigint)');
$node->safe_psql('in Time',
	'CREATE SCHEMA s; CREATE EXTENSION dlock SCHEMA s');

# The fence to exceed is that of one who holds its lock during the dump.
my %holders;
my %fences;
foreach my $dbname ('ahead', 'in Time')
{
	$holders{$dbname} = session($node, $dbname);
	$holders{$dbname}->query('SET search_path = public, s');
	$fences{$dbname} =
	  $holders{$dbname}->query("SELECT dlock_acquire('lock')");
}
cmp_ok($fences{ahead}, '>=', 1 << 51, 'numbers are ahead of the time');

my $fresh = PostgreSQL::Test::Cluster->new('fresh');
$fresh->init;
$fresh->start;

sub restored
{
	my ($where, $dbname, $original, $how) = @_;

	# first, as the lock that is taken then goes some time after its session
	is( $where->safe_psql(
			$dbname,
			'SET search_path = public, s; SELECT count(*) FROM dlock_locks'),
		'0',
		"$how: no lock is restored");
	grows(
		"$how: fences of \"$original\" grow",
		$fences{$original},
		$where->safe_psql(
			$dbname,
			"SET search_path = public, s; SELECT dlock_acquire('lock')"));
}

# pg_dump, in each format, into this server and into a fresh one
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

# pg_restore --clean in the place of the original, whose numbers have gone on
foreach my $original ('ahead', 'in Time')
{
	my $restored = session($node, $original);

	$restored->query('SET search_path = public, s; CREATE TABLE t ()');
	$fences{$original} =
	  $restored->query("SELECT dlock_acquire('another')");
	$restored->quit;
}
$holders{'in Time'}->quit;
$node->command_ok(
	[ 'pg_restore', '-e', '--clean', '-d', 'in Time', "$dir/in Time.custom" ],
	'pg_restore --clean');
restored($node, 'in Time', 'in Time', 'pg_restore --clean');

# pg_dumpall
my $fresh_too = PostgreSQL::Test::Cluster->new('fresh_too');
$fresh_too->init;
$fresh_too->start;
$node->command_ok([ 'pg_dumpall', '-f', "$dir/all" ], 'pg_dumpall');
# the role that initdb makes is there already
$fresh_too->command_ok([ 'psql', '-X', '-q', '-f', "$dir/all", 'postgres' ],
	'restored from pg_dumpall');
restored($fresh_too, $_, $_, 'pg_dumpall') foreach 'ahead', 'in Time';

$holders{ahead}->quit;

#
# Versions and reservations
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
	SELECT dlock_version_bump('v', 1)});
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dir/rows", '-d', 'postgres' ],
	'pg_dump');

# There, one of these roles is another one, and the others are missing.
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
	like($session->query("SELECT dlock_acquire('gone/1')"),
		qr/^\d+$/, "$way: a superuser can");
	is($session->query("SELECT dlock_version_of('v')"),
		'2', "$way: versions are there");
	is( $session->query(
			"SELECT bumped_by = current_user AND bumped_at < now() "
			  . "FROM dlock_versions WHERE name = 'v'"),
		't',
		"$way: and who bumped them, and when");

	# A role that comes later may be anybody.
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
