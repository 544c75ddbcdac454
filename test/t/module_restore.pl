# A dump carries versions and reservations, whatever roles there are where it is
# restored, and however its rows are written; and sessions that are there see
# them.
#
# What would break it: a column that can only hold the OID of a role that is
# there, so that one missing role stops all rows; an OID that is taken from the
# dump; a copy of the table, kept by a session, that nobody tells of the rows; or
# a trigger that takes a restore for replication.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');
my $fresh = PostgreSQL::Test::Cluster->new('fresh');
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';

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
$node->command_ok([ 'pg_dump', '-Fc', '-f', $dump, '-d', 'postgres' ], 'pg_dump');

# There, one of these roles is another one, and the others are missing.
$fresh->init;
$fresh->start;
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
		[ 'pg_restore', '-e', @{ $ways{$way} }, '-d', $way, $dump ],
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

done_testing();
