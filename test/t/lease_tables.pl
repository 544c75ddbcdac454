# What an administrator does to the tables of leases either does no harm, or is
# named in a clear error that goes when it is undone.
#
# What would break it: reading by other rights than writing, so that a restart
# brings out what nobody had noticed before; a column that is taken for what
# stood in its place once; or one that has been added, and gets no value; a table
# that a crash empties.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');
my $lease;
my $fence;

sub ask
{
	my ($sql) = @_;

	return $node->safe_psql('postgres', $sql);
}

sub refused
{
	my ($sql, $pattern, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return fails_with($node, 'postgres', $sql, qr/55000: .*$pattern.*HINT:  Undo/s,
		$test);
}

# Written, found, and there after a crash
sub works
{
	my ($test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	my $ticket = ask("SELECT dlock_ttl_acquire('$test', '1h', info => 'x')");
	is(ask("SELECT dlock_check('lock', $fence)"), 't', "$test: a lease holds");
	$node->stop('immediate');
	$node->start;
	is( ask("SELECT dlock_acquire('any') > 0, dlock_check('lock', $fence), "
			  . "dlock_check('$test', $ticket)"),
		't|t|t',
		"$test: read again");
	is(ask("SELECT dlock_release_ticket($ticket)"), 't', "$test: released");
	# also what is written over a row that was there
	ask("SELECT dlock_lease_close(dlock_lease_open('1h'))");
	my $waiting =
	  ask("SELECT dlock_lease_enqueue('lock', $lease, 'channel', owner => '$test')");
	is(ask("SELECT dlock_release_ticket($waiting)"),
		't', "$test: a waiter that goes");
	return;
}

$lease = ask("SELECT dlock_lease_open('1h')");
$fence = ask("SELECT dlock_lease_acquire('lock', $lease)");
ask('CREATE ROLE somebody; CREATE ROLE somebody_else');

# Owners and rights
ask('ALTER TABLE dlock_queue_lease OWNER TO somebody');
works('the owner of one table');
ask('REVOKE ALL ON dlock_queue, dlock_queue_lease FROM somebody, CURRENT_USER');
works('rights');
ask('ALTER TABLE dlock_queue OWNER TO somebody_else;'
	  . 'REVOKE ALL ON dlock_queue FROM somebody_else');
works('the owner of the other table');
ask('ALTER TABLE dlock_queue ENABLE ROW LEVEL SECURITY;'
	  . 'ALTER TABLE dlock_queue FORCE ROW LEVEL SECURITY');
works('row security');
ask('ALTER TABLE dlock_queue NO FORCE ROW LEVEL SECURITY;'
	  . 'ALTER TABLE dlock_queue DISABLE ROW LEVEL SECURITY');

# What the owner of a table has it run is run as nobody else.
ask(q{
	CREATE TABLE ran (who text);
	GRANT INSERT ON ran TO PUBLIC;
	CREATE FUNCTION run() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN INSERT INTO public.ran VALUES (current_user); RETURN coalesce(NEW, OLD); END$$;
	CREATE TRIGGER after AFTER INSERT ON dlock_queue
		FOR EACH ROW EXECUTE FUNCTION run();
	CREATE TRIGGER before BEFORE INSERT OR DELETE ON dlock_queue_lease
		FOR EACH ROW EXECUTE FUNCTION run();
	CREATE FUNCTION me() RETURNS text LANGUAGE sql AS 'SELECT current_user::text';
	ALTER TABLE dlock_queue ADD writer text DEFAULT me();
	ALTER TABLE dlock_queue_lease ADD writer text DEFAULT me()});
works('triggers and defaults');
is( ask('SELECT string_agg(DISTINCT who, NULL ORDER BY who) FROM ran'),
	'somebodysomebody_else',
	'triggers are run as the owner of their table');
ask("SELECT dlock_lease_acquire('written', dlock_lease_open('2h'))");
is( ask("SELECT writer FROM dlock_queue WHERE name = 'written'") . '|'
	  . ask("SELECT writer FROM dlock_queue_lease WHERE ttl = '2h'"),
	'somebody_else|somebody',
	'a default is computed as the owner of its table');
ask('DROP TRIGGER after ON dlock_queue;'
	  . 'DROP TRIGGER before ON dlock_queue_lease;'
	  . 'ALTER TABLE dlock_queue DROP writer;'
	  . 'ALTER TABLE dlock_queue_lease DROP writer');

# Columns that are added
ask("ALTER TABLE dlock_queue ADD seen timestamptz NOT NULL DEFAULT '2001-02-03';"
	  . 'ALTER TABLE dlock_queue_lease ADD note text, '
	  . 'ADD twice interval GENERATED ALWAYS AS (ttl * 2) STORED');
ask("UPDATE dlock_queue SET seen = '2004-05-06' WHERE name = 'lock'");
works('columns with a default, a null, and a generated value');
is(ask("SELECT dlock_set_info($fence, 'written anew')"), 't', 'a row is written anew');
ask("SELECT dlock_ttl_acquire('new', '1h')");
is( ask("SELECT seen::date FROM dlock_queue WHERE name IN ('lock', 'new') ORDER BY name"),
	"2004-05-06\n2001-02-03",
	'a default is filled in, and what is there is kept');
is( ask("SELECT twice FROM dlock_queue_lease WHERE lease = $lease"),
	'02:00:00', 'generated values are, too');
ask('ALTER TABLE dlock_queue ALTER seen DROP DEFAULT');
refused(
	"SELECT dlock_ttl_acquire('x', '1h')",
	'table "dlock_queue".*Column "seen" must not be null, and has no default',
	'a column that cannot be filled');
is(ask("SELECT dlock_check('lock', $fence)"), 't', 'what is held is held');
ask('ALTER TABLE dlock_queue ALTER seen DROP NOT NULL');
works('the column can be null');
ask('ALTER TABLE dlock_queue DROP seen');
works('the column is dropped');

# Columns that are changed
my %changes = (
	'type' => [
		'ALTER TABLE dlock_queue ALTER permits TYPE text USING permits::text',
		'ALTER TABLE dlock_queue ALTER permits TYPE integer USING permits::integer',
		'table "dlock_queue".*Column "permits" is of type text instead of integer'
	],
	'wider type' => [
		'ALTER TABLE dlock_queue ALTER permits TYPE bigint',
		'ALTER TABLE dlock_queue ALTER permits TYPE integer',
		'table "dlock_queue".*Column "permits" is of type bigint instead of integer'
	],
	'name' => [
		'ALTER TABLE dlock_queue RENAME mode TO manner',
		'ALTER TABLE dlock_queue RENAME manner TO mode',
		'table "dlock_queue".*has no column "mode" of type text'
	],
	'dropped' => [
		'ALTER TABLE dlock_queue_lease DROP info',
		'ALTER TABLE dlock_queue_lease ADD info text',
		'table "dlock_queue_lease".*has no column "info" of type text'
	]);
foreach my $change (sort keys %changes)
{
	my ($do, $undo, $pattern) = @{ $changes{$change} };

	ask("SELECT dlock_ttl_acquire('before $change', '1h')");
	ask($do);
	refused("SELECT dlock_ttl_acquire('x', '1h')", $pattern, "$change: writing");
	is(ask("SELECT dlock_check('lock', $fence)"),
		't', "$change: what is held is held");
	$node->stop('immediate');
	$node->start;
	refused("SELECT dlock_ttl_acquire('x', '1h')", $pattern, "$change: reading");
	ask($undo);
	works("$change, undone");
}

# Another primary key, and none
ask('ALTER TABLE dlock_queue DROP CONSTRAINT dlock_queue_pkey;'
	  . 'ALTER TABLE dlock_queue ADD PRIMARY KEY (name, ticket)');
works('another key');
ask('ALTER TABLE dlock_queue DROP CONSTRAINT dlock_queue_pkey');
works('no key');
# then the rows come in any order: one that was written anew, as one of the last
my $order = "SELECT string_agg(ticket::text, ' ' ORDER BY position) FROM dlock_locks('order')";
ask("SELECT dlock_ttl_acquire('order', '1h')");
my $second = ask("SELECT dlock_ttl_enqueue('order', '1h', 'channel', owner => 'second')");
ask("SELECT dlock_ttl_enqueue('order', '1h', 'channel', owner => 'third')");
ask("SELECT dlock_set_info($second, 'written anew')");
my $queue = ask($order);
$node->stop('immediate');
$node->start;
is(ask($order), $queue, 'no key: the queue is in its order');

# What a crash would empty is not relied on, until it is logged again.
my %uses = (
	'dlock_queue' => "SELECT dlock_ttl_acquire('x', '1h')",
	'dlock_queue_lease' => "SELECT dlock_lease_open('1h')",
	'dlock_slots' => "SELECT dlock_set_slots('x', 2)",
	'dlock_versions' => "SELECT dlock_version_of('x')",
	'dlock_reservations' => "SELECT dlock_try_acquire('x')",
	'dlock_ticket_seq' => 'SELECT dlock_advance_ticket(1)');
foreach my $name (sort keys %uses)
{
	my $kind = $name eq 'dlock_ticket_seq' ? 'SEQUENCE' : 'TABLE';
	my $test = "$name is unlogged";
	my $error =
	  qr/55000: .*relation "$name" of extension "dlock" is unlogged.*HINT:  Use ALTER $kind $name SET LOGGED/s;

	ask("ALTER $kind $name SET UNLOGGED");
	fails_with($node, 'postgres', $uses{$name}, $error, $test);
	is(ask("SELECT dlock_renew($lease) > 0"), 't', "$test: what is held is held");
	$node->restart;
	fails_with($node, 'postgres', $uses{$name}, $error, "$test: reading");
	ask("ALTER $kind $name SET LOGGED");
	works("$test, undone");
}
# after a crash nothing is there, which is not taken for what there was
ask('ALTER TABLE dlock_queue SET UNLOGGED');
$node->stop('immediate');
$node->start;
fails_with($node, 'postgres', "SELECT dlock_try_acquire('lock')",
	qr/55000: .*is unlogged/, 'nor is it emptied without a word');
ask('ALTER TABLE dlock_queue SET LOGGED');

unlike(slurp_file($node->logfile), qr/terminated by signal/, 'no crash');

done_testing();
