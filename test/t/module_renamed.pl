# The owner of dlock's schema can rename the schema, but cannot run code as the
# owner of dlock's tables: a call refuses a table that has got the name of
# dlock's table during the call.  Code of a table's owner can call dlock again,
# without effect on the outer call.
#
# What would break it: a statement that finds its table by name alone; a plan
# that is freed while it is executed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Test;
use Test::More;

my $node = new_server('main');

$node->safe_psql('postgres', 'CREATE ROLE app LOGIN; CREATE DATABASE shop OWNER app');
$node->safe_psql('shop', q{
	CREATE SCHEMA locks AUTHORIZATION app;
	GRANT USAGE ON SCHEMA locks TO PUBLIC;
	CREATE EXTENSION dlock SCHEMA locks});

my ($app, $caller, $admin) = (
	session($node, 'shop', 'user=app'),
	session($node, 'shop', 'user=app'),
	session($node, 'shop'));

plan skip_all => 'no debugger that can be attached' unless debugger_works($caller);

$app->query(q{
	CREATE SCHEMA evil;
	CREATE FUNCTION evil.act() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN RAISE EXCEPTION 'run as %', current_user; END $$;
	CREATE TABLE evil.dlock_versions (name text PRIMARY KEY, version bigint,
		bumped_by name, bumped_at timestamptz);
	INSERT INTO evil.dlock_versions VALUES ('v', 1);
	CREATE TRIGGER act BEFORE INSERT OR UPDATE ON evil.dlock_versions
		FOR EACH ROW EXECUTE FUNCTION evil.act()});

#
# Without a plan kept by the session, and with a kept plan
#
foreach my $call ("dlock_version_bump('v', 0)", "dlock_version_bump('v', 1)")
{
	# a session that has loaded no rows
	is($caller->query('SELECT locks.dlock_version_of(\'none\')'), '0', 'before');
	my $stopped = stop_behind($caller, 'dlock_check_permanent');

	$caller->start("SELECT locks.$call");
	$stopped->();
	$app->query('BEGIN; ALTER SCHEMA locks RENAME TO was; '
		  . 'ALTER SCHEMA evil RENAME TO locks; COMMIT');
	$stopped->();
	like(
		$caller->answer,
		qr/55000: table "dlock_versions" is not the one of extension "dlock"/,
		"$call: another table is refused");
	$app->query('BEGIN; ALTER SCHEMA locks RENAME TO evil; '
		  . 'ALTER SCHEMA was RENAME TO locks; COMMIT');
	like($caller->query("SELECT locks.dlock_try_version_bump('v', "
			  . "locks.dlock_version_of('v'))"),
		qr/^\d+$/, "$call: calls work again afterwards");
}

#
# A nested call, by a trigger of the table's owner
#
$admin->query(q{
	ALTER TABLE locks.dlock_versions OWNER TO app;
	ALTER SCHEMA locks OWNER TO app});
$app->query(q{
	CREATE FUNCTION evil.again() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		ALTER SCHEMA locks RENAME TO was;
		RAISE NOTICE 'version %', was.dlock_version_of('inner');
		ALTER SCHEMA was RENAME TO locks;
		RETURN NEW;
	END $$;
	CREATE TRIGGER again BEFORE INSERT OR UPDATE ON locks.dlock_versions
		FOR EACH ROW EXECUTE FUNCTION evil.again()});
my $version = $caller->query("SELECT locks.dlock_version_of('outer')");
foreach (1 .. 3)
{
	like(
		$caller->query("SELECT locks.dlock_version_bump('outer', $version)"),
		qr/^@{[ $version + 1 ]}$|NOTICE.*version 0.*^@{[ $version + 1 ]}$/ms,
		'a call within a call');
	$version++;
}
is($caller->query("SELECT locks.dlock_version_of('outer')"), '3', 'is counted');

$_->quit foreach $app, $caller, $admin;
$node->stop;
done_testing();
