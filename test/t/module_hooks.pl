# A statement can free itself or end its transaction without harm to a session
# that has loaded the library.  A call that is alone in its transaction warns.
#
# What would break it: a hook that reads the statement after it has run,
# because a procedure's ROLLBACK frees its own CALL, if that came by the
# extended protocol with a parameter; a warning for a call that is not alone.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main', conf => 'restart_after_crash = off');
my $script = "$PostgreSQL::Test::Utils::tmp_check/hooks.sql";

# statements after the ROLLBACK reuse the memory
$node->safe_psql(
	'postgres', q{
CREATE ROLE ordinary LOGIN;
-- The server's would be an hour.
ALTER ROLE ordinary SET deadlock_timeout = '10ms';
CREATE TABLE numbers (i integer);
GRANT ALL ON numbers TO ordinary;
CREATE PROCEDURE roll_back(n integer) LANGUAGE plpgsql AS $$
DECLARE
	c	bigint;
BEGIN
	ROLLBACK;
	SELECT count(*) INTO c FROM numbers WHERE i = n;
END $$;
});

append_to_file($script,
	"\\set n 30\nSELECT dlock_version();\nCALL roll_back(:n);\n");
foreach my $mode (qw(simple extended prepared))
{
	$node->command_ok(
		[
			'pgbench', '-n', '-M', $mode, '-t', '20', '-f', $script, 'postgres'
		],
		"$mode protocol: a procedure rolls back");
}
is($node->safe_psql('postgres', 'SELECT 1'), '1', 'the server is there');

# A call warns if it is alone in its transaction.  In a pipeline, other
# statements can precede and follow the call.
my $call = "SELECT dlock_xact_acquire('lock');\n";
my $warns =
  qr/WARNING:  dlock_xact_acquire\(\) has no effect outside a transaction block/;

foreach my $case (
	[ 'alone', $warns, $call ],
	[ 'before a query', qr/^(?!.*WARNING)/s, $call, "SELECT 1;\n" ],
	[ 'after a query', qr/^(?!.*WARNING)/s, "SELECT 1;\n", $call ],
	[ 'before a utility', qr/^(?!.*WARNING)/s, $call, "SHOW port;\n" ],
	[ 'after a utility', qr/^(?!.*WARNING)/s, "SHOW port;\n", $call ],
	[ 'after a call', qr/^(?!.*WARNING)/s, $call, $call ])
{
	my ($name, $errors, @statements) = @$case;

	unlink($script);
	append_to_file($script,
		join('', "\\startpipeline\n", @statements, "\\endpipeline\n"));
	$node->command_checks_all(
		[ 'pgbench', '-n', '-M', 'extended', '-t', '1', '-f', $script, 'postgres' ],
		0, [qr/processed: 1/], [$errors], "in a pipeline, $name");
}

# The first call loads the library, and waits for the catalog with the role's
# right to a setting.  After an error there, the next call loads it.
my $admin = session($node);
my $blocker = session($node);

foreach my $state ('57014', '40P01')
{
	my $loader = session($node, 'postgres', 'user=ordinary');

	$blocker->query('BEGIN; LOCK TABLE pg_parameter_acl IN ACCESS EXCLUSIVE MODE');
	$loader->query('SET dlock.max_locks_per_session = 10');
	$loader->query('BEGIN; LOCK TABLE numbers IN SHARE MODE');
	if ($state eq '40P01')
	{
		$blocker->start('LOCK TABLE numbers IN ACCESS EXCLUSIVE MODE');
		$admin->wait_for("SELECT wait_event = 'relation' FROM pg_stat_activity "
			  . "WHERE pid = $blocker->{pid}");
	}
	$loader->start('SELECT dlock_version()');
	if ($state eq '57014')
	{
		$admin->wait_for("SELECT wait_event = 'relation' FROM pg_stat_activity "
			  . "WHERE pid = $loader->{pid}");
		$admin->query("SELECT pg_cancel_backend($loader->{pid})");
	}
	like($loader->answer, qr/$state/, "the first call fails with $state");
	$blocker->answer if $state eq '40P01';
	$blocker->query('COMMIT');
	$loader->query('ROLLBACK');
	is($loader->query("SELECT dlock_acquire('lock') > 0, dlock_release('lock')"),
		't|t', 'the next call succeeds');
	$loader->quit;
}
$_->quit foreach $admin, $blocker;
$node->stop;
done_testing();
