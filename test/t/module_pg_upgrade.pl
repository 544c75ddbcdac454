# pg_upgrade while leases are open: versions, reservations and numbers are
# kept.  Rows of leases are copied, but the new server ignores and removes
# them.  They lock nothing, no old fence passes a guard, and no number is given
# twice.
#
# What would break it: rows that the new server mistakes for its own; a
# sequence or a table that pg_upgrade creates without its contents; a library
# that cannot be loaded before its database exists.
#
# DLOCK_OLD_INSTALL is a directory with the old server's bin and lib.
# test/upgrade has two majors and sets it.  Without it, the test is skipped to
# save time.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $from = $ENV{DLOCK_OLD_INSTALL};

plan skip_all => 'test/upgrade runs this test' unless $from;

# Options that must be equal in both servers: 18 has other defaults than 17.
my %cluster = (extra => ['--data-checksums']);
my $conf = "max_connections = 100\ndlock.worker_idle_timeout = 20d\n";
my $old = PostgreSQL::Test::Cluster->new('old', install_path => $from);
my $new = PostgreSQL::Test::Cluster->new('new');

foreach my $node ($old, $new)
{
	$node->init(%cluster);
	$node->append_conf('postgresql.conf', $conf);
}

#
# Before: two databases, one with its numbers ahead of the clock
#
my %databases = (
	'in public' => 'CREATE EXTENSION dlock',
	'in a "Schema"' => 'CREATE SCHEMA "D lock"; '
	  . 'GRANT USAGE ON SCHEMA "D lock" TO PUBLIC; '
	  . 'CREATE EXTENSION dlock SCHEMA "D lock"; '
	  . 'SELECT "D lock".dlock_advance_ticket((2^51)::bigint)');
my $path = 'SET search_path = public, "D lock"';
my %before;

# Run in each database, with the extension's functions in search_path.
sub ask
{
	my ($node, $dbname, $sql) = @_;

	return $node->safe_psql($dbname, "$path; $sql");
}

$old->start;
$old->safe_psql('postgres',
	'CREATE ROLE gone; CREATE ROLE "The Clerk"; CREATE ROLE other; DROP ROLE gone');
foreach my $dbname (sort keys %databases)
{
	my $quoted = $dbname =~ s/"/""/gr;
	my $ttl = ample(2);
	my $before = $before{$dbname} = {};

	$old->safe_psql('postgres', qq{CREATE DATABASE "$quoted"});
	ask($old, $dbname, $databases{$dbname});
	$before->{lease} = ask($old, $dbname, "SELECT dlock_lease_open('1h')");
	$before->{fence} = ask($old, $dbname,
		"SELECT dlock_lease_acquire('held', $before->{lease})");
	ask($old, $dbname, "SELECT dlock_ttl_enqueue('held', '1h', 'channel')");
	# an expired lease whose lock stays closed
	ask($old, $dbname,
		"SELECT dlock_lease_acquire('delayed', dlock_lease_open('$ttl s', delay => '1h'))");
	# This is the last number, and no lock ends later.
	$before->{last} =
	  ask($old, $dbname, "SELECT dlock_ttl_acquire('own', '1h')");
	ask($old, $dbname,
		"SELECT dlock_version_bump('v', 0); SELECT dlock_version_bump('v', 1)");
	ask($old, $dbname, q{SELECT dlock_reserve('clerk/', '"The Clerk"')});
}
foreach my $dbname (sort keys %databases)
{
	poll('a lease has expired, and its delay has begun', sub {
		ask($old, $dbname,
			'SELECT count(*) FROM dlock_queue_lease WHERE delayed') eq '1'; });
	is( ask($old, $dbname, 'SELECT count(*) FROM dlock_queue'),
		'4', "$dbname: tickets are in their table");
}
my $config = q{SELECT array_agg(rel::regclass::text || condition ORDER BY i)
	FROM pg_extension, unnest(extconfig, extcondition) WITH ORDINALITY
		AS t (rel, condition, i) WHERE extname = 'dlock'};
my %config = map { $_ => ask($old, $_, $config) } keys %databases;

cmp_ok($before{'in a "Schema"'}{last},
	'>=', 1 << 51, 'numbers are ahead of the time');
$old->stop;

#
# pg_upgrade writes into the directory where it runs.
#
chdir $PostgreSQL::Test::Utils::tmp_check or die "tmp_check: $!";
$new->command_ok(
	[
		'pg_upgrade', '--no-sync', '-d', $old->data_dir, '-D', $new->data_dir,
		'-b', $old->config_data('--bindir'),
		'-B', $new->config_data('--bindir'), '-s', $new->host,
		'-p', $old->port, '-P', $new->port
	],
	'pg_upgrade')
  or diag(map { "$_:\n" . slurp_file($_) }
	  glob $new->data_dir . '/pg_upgrade_output.d/*/log/*.log');
note(sprintf 'from %s to %s', map { $_->config_data('--version') } $old, $new);

#
# Afterwards
#
$new->start;
foreach my $dbname (sort keys %databases)
{
	my $before = $before{$dbname};

	# This is first: the lock is released some time after its session ends.
	is( ask($new, $dbname,
			'SELECT (SELECT count(*) FROM dlock_locks), '
			  . '(SELECT count(*) FROM dlock_leases)'),
		'0|0',
		"$dbname: no lease is there");
	is(ask($new, $dbname, "SELECT dlock_renew($before->{lease}) IS NULL"),
		't', "$dbname: an old lease cannot be renewed");
	is(ask($new, $dbname, "SELECT dlock_check('held', $before->{fence})"),
		'f', "$dbname: an old fence is not valid");
	fails_with(
		$new, $dbname, "$path; SELECT dlock_guard('held', $before->{fence})",
		qr/ERROR:  55L01:/, "$dbname: an old fence guards nothing");

	grows(
		"$dbname: fences of all of these locks grow",
		$before->{fence},
		$before->{last},
		split /\n/,
		ask($new, $dbname,
			q[SELECT dlock_try_acquire(n) FROM unnest('{held,own,delayed}'::text[]) AS n]
		));
	is(ask($new, $dbname, "SELECT dlock_version_bump('v', 2)"),
		'3', "$dbname: versions continue to grow");
	fails_with(
		$new, $dbname, "$path; SET ROLE other; SELECT dlock_acquire('clerk/1')",
		qr/42501.*"clerk\/"/s,
		"$dbname: reserved names are closed to others");
	is(ask($new, $dbname, $config),
		$config{$dbname}, "$dbname: what is dumped is marked as before");

	# New leases can be opened.  The first one starts the worker, which removes
	# the old rows.
	like(
		ask($new, $dbname,
			"SELECT dlock_lease_acquire('held', dlock_lease_open('1h'))"),
		qr/^\d+$/,
		"$dbname: a new lease");
	poll("$dbname: the old rows are removed", sub {
		ask($new, $dbname, 'SELECT (SELECT count(*) FROM dlock_queue), '
			  . '(SELECT count(*) FROM dlock_queue_lease)') eq '1|1'; });
}
$new->restart;
foreach my $dbname (sort keys %databases)
{
	is( ask($new, $dbname, 'SELECT name, granted FROM dlock_locks'),
		'held|t', "$dbname: after a restart, only the new lease is there");
}

my $log = slurp_file($new->logfile);

foreach my $left ([ 4, 'dlock_queue' ], [ 2, 'dlock_queue_lease' ])
{
	my ($rows, $table) = @$left;
	my @lines = $log =~
	  /LOG:  left out $rows rows of table "$table", which belong to another server/g;

	is(@lines, scalar keys %databases, "the log tells of the rows of $table");
}
$new->stop;
done_testing();
