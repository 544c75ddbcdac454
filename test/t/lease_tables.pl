# The tables of leases are dlock's own.  If an administrator's change of a
# table can do harm, each call with leases raises an error that names the
# change, until the change is undone.  No code that was added to a table runs,
# holders hold, and no restart is needed.
#
# What would break it: a table definition that writing accepts and loading does
# not, so that a restart fails because of an old change; a column that is
# mistaken for another that had its position; code of a table's owner that the
# worker runs; a row that is read or written without the index that this needs;
# a table that a crash empties.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main', allows_streaming => 'logical');
my $session = session($node);
my $lease = $session->query("SELECT dlock_lease_open('1h', info => 'x')");
# The rows have no null in columns that a change makes NOT NULL.
my $acquire = "dlock_lease_acquire('%s', $lease, info => 'x')";
my $fence = ask(sprintf("SELECT $acquire", 'lock'));

sub ask
{
	my ($sql) = @_;

	return $session->query($sql) . '';
}

# The test would mistake an error of a change for an error of dlock.
sub change
{
	my ($sql) = @_;

	return $sql->() if ref $sql eq 'CODE';
	foreach my $statement (ref $sql ? @$sql : $sql)
	{
		my $answer = ask($statement);

		die "$statement: $answer" if $answer =~ /ERROR/;
	}
	return;
}

sub crash
{
	$session->quit;
	$node->stop('immediate');
	$node->start;
	$session = session($node);
	return;
}

# A lease and a ticket can be written and found, and survive a crash.
sub works
{
	my ($test, $crash) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	my $ticket = ask("SELECT dlock_ttl_acquire('$test', '1h', info => 'x')");
	is( ask("SELECT dlock_check('lock', $fence), dlock_renew($lease)"),
		't|1', "$test: a lease holds");
	crash() if $crash;
	is( ask("SELECT dlock_acquire('any') > 0, dlock_check('lock', $fence), "
			  . "dlock_check('$test', $ticket)"),
		't|t|t',
		"$test: read again");
	is(ask("SELECT dlock_release_ticket($ticket)"), 't', "$test: released");
	my $waiting =
	  ask("SELECT dlock_lease_enqueue('lock', $lease, 'channel', owner => '$test')");
	is(ask("SELECT dlock_release_ticket($waiting)"),
		't', "$test: a waiter leaves");
	# This also updates a row.  Its flush makes all earlier rows durable.
	is( ask("SELECT dlock_renew(lease, '2h'), dlock_lease_close(lease) "
			  . "FROM dlock_lease_open('1h', info => 'x') AS lease"),
		'0|0',
		"$test: opened, changed and closed");
	return;
}

#
# Changes without effect
#
change('CREATE ROLE somebody; CREATE ROLE somebody_else; '
	  . 'SET allow_in_place_tablespaces = on; '
	  . q{CREATE TABLESPACE place LOCATION ''});
my @harmless = (
	[ 'owners', [
			'ALTER TABLE dlock_queue_lease OWNER TO somebody',
			'ALTER TABLE dlock_queue OWNER TO somebody_else' ] ],
	[ 'rights', [
			'REVOKE ALL ON dlock_queue, dlock_queue_lease FROM somebody, '
			  . 'somebody_else, CURRENT_USER' ] ],
	[ 'a column is added and dropped', [
			"ALTER TABLE dlock_queue ADD more text NOT NULL DEFAULT 'more'",
			'ALTER TABLE dlock_queue DROP more',
			'ALTER TABLE dlock_queue_lease ADD more timestamptz DEFAULT clock_timestamp(), '
			  . 'ADD twice interval GENERATED ALWAYS AS (ttl * 2) STORED',
			'ALTER TABLE dlock_queue_lease DROP more, DROP twice' ] ],
	[ 'more indexes', [
			'CREATE INDEX more ON dlock_queue (lease, ticket DESC) INCLUDE (name)',
			'CREATE INDEX CONCURRENTLY ON dlock_queue_lease (role_name)' ] ],
	[ 'without an index', ['DROP INDEX dlock_queue_name'] ],
	[ 'the index again', ['CREATE INDEX dlock_queue_name ON dlock_queue (name)'] ],
	[ 'REINDEX', [ map { "REINDEX TABLE $_" } 'dlock_queue', 'dlock_queue_lease' ] ],
	[ 'REINDEX CONCURRENTLY', [
			map { "REINDEX TABLE CONCURRENTLY $_" } 'dlock_queue', 'dlock_queue_lease' ] ],
	[ 'CLUSTER', [
			'CLUSTER dlock_queue USING dlock_queue_pkey',
			'CLUSTER dlock_queue_lease USING dlock_queue_lease_pkey' ] ],
	[ 'VACUUM FULL', ['VACUUM FULL dlock_queue, dlock_queue_lease'] ],
	[ 'another key of the same kind', [
			'ALTER TABLE dlock_queue DROP CONSTRAINT dlock_queue_pkey, '
			  . 'ADD CONSTRAINT another PRIMARY KEY (ticket) INCLUDE (name)' ] ],
	[ 'a publication', ['CREATE PUBLICATION everything FOR ALL TABLES'] ],
	[ 'REPLICA IDENTITY NOTHING', [
			map { "ALTER TABLE $_ REPLICA IDENTITY NOTHING" }
			  'dlock_queue', 'dlock_queue_lease' ] ],
	[ 'REPLICA IDENTITY FULL', [
			map { "ALTER TABLE $_ REPLICA IDENTITY FULL" }
			  'dlock_queue', 'dlock_queue_lease' ] ],
	[ 'another tablespace', [
			map { "ALTER TABLE $_ SET TABLESPACE place" }
			  'dlock_queue', 'dlock_queue_lease' ] ],
	[ 'parameters of storage', [
			'ALTER TABLE dlock_queue SET (fillfactor = 50, autovacuum_enabled = off)',
			'ALTER TABLE dlock_queue_lease ALTER info SET STORAGE EXTERNAL, '
			  . 'ALTER info SET STATISTICS 1000' ] ],
	[ 'extended statistics', ['CREATE STATISTICS s ON lease, granted FROM dlock_queue'] ],
	[ 'another collation', ['ALTER TABLE dlock_queue ALTER name TYPE text COLLATE "POSIX"'] ],
	[ 'a view', ['CREATE VIEW v AS SELECT q, l FROM dlock_queue AS q JOIN dlock_queue_lease AS l USING (lease)'] ]);
foreach my $change (@harmless)
{
	my ($test, $do) = @$change;

	change($do);
	works($test, 1);
}
change('DROP VIEW v; ALTER TABLE dlock_queue ALTER name TYPE text COLLATE "C"');

# Calls during REINDEX CONCURRENTLY, and after it was interrupted
{
	my ($writer, $admin) = map { session($node) } 1 .. 2;
	my $left = q{FROM pg_index WHERE NOT indisvalid};

	$writer->query('BEGIN; LOCK TABLE dlock_queue IN ROW EXCLUSIVE MODE');
	$admin->may_end;
	$admin->start('REINDEX TABLE CONCURRENTLY dlock_queue');
	$session->wait_for("SELECT count(*) > 1 $left");
	works('amid REINDEX CONCURRENTLY');
	crash();
	$_->quit foreach $writer, $admin;
	cmp_ok(ask("SELECT count(*) $left"), '>', 1, 'indexes that are not valid are left');
	works('after REINDEX CONCURRENTLY was interrupted');
	my @left = split /\n/, ask("SELECT indexrelid::regclass $left");
	change('REINDEX TABLE dlock_queue');
	is(ask("SELECT count(*) $left AND indrelid = 'dlock_queue'::regclass"), '0', 'REINDEX makes them valid');
	works('after that');
	change([ map { "DROP INDEX $_" } @left ]);
}

#
# Changes that are refused.  Code that is added to a table leaves a trace.
#
change(
	[
		'CREATE TABLE ran (what text)',
		'GRANT ALL ON ran TO PUBLIC',
		q{CREATE FUNCTION run() RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
			$$BEGIN PERFORM public.trace(); RETURN true; END$$},
		q{CREATE FUNCTION trace() RETURNS text LANGUAGE sql VOLATILE AS
			$$INSERT INTO public.ran VALUES (current_user) RETURNING what$$},
		q{CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS
			$$BEGIN INSERT INTO public.ran VALUES (TG_NAME); RETURN coalesce(NEW, OLD); END$$},
		q{CREATE FUNCTION compare(bigint, bigint) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS
			$$BEGIN PERFORM public.trace(); RETURN btint8cmp($1, $2); END$$},
		'CREATE OPERATOR CLASS mine FOR TYPE bigint USING btree AS OPERATOR 1 <, '
		  . 'OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, '
		  . 'FUNCTION 1 compare(bigint, bigint)',
		'CREATE ACCESS METHOD mine TYPE TABLE HANDLER heap_tableam_handler',
		'CREATE TABLE parent (ticket bigint)',
		'CREATE TABLE referenced (lease bigint PRIMARY KEY)',
		'CREATE TABLE parted (LIKE dlock_queue) PARTITION BY LIST (ticket)'
	]);
my $queue = 'ALTER TABLE dlock_queue';
my $leases = 'ALTER TABLE dlock_queue_lease';
my $no_key = 'Its primary key is not its first column';
my $inherits = 'It inherits, or is inherited from';
my $key = "$queue ADD CONSTRAINT dlock_queue_pkey PRIMARY KEY (ticket)";
my $drop_key = "$queue DROP CONSTRAINT another";
my $rule = 'It has a rule';
my $permits = 'Its column 7 is not "permits" of type integer, NOT NULL, without a default';
my $triggers = 'Trigger "%s" was added, or is enabled in another way';
my @refused = (
	[ 'row security',
		"$queue ENABLE ROW LEVEL SECURITY", "$queue DISABLE ROW LEVEL SECURITY",
		'It has row security' ],
	[ 'row security, forced',
		"$leases FORCE ROW LEVEL SECURITY", "$leases NO FORCE ROW LEVEL SECURITY",
		'It has row security' ],
	[ 'a trigger of rows',
		'CREATE TRIGGER mine BEFORE INSERT OR UPDATE OR DELETE ON dlock_queue '
		  . 'FOR EACH ROW EXECUTE FUNCTION act()',
		'DROP TRIGGER mine ON dlock_queue', sprintf($triggers, 'mine') ],
	[ 'a trigger of statements',
		'CREATE TRIGGER mine AFTER INSERT OR UPDATE OR DELETE ON dlock_queue_lease '
		  . 'EXECUTE FUNCTION act()',
		'DROP TRIGGER mine ON dlock_queue_lease', sprintf($triggers, 'mine') ],
	[ 'a trigger that is disabled',
		[
			'CREATE TRIGGER mine BEFORE INSERT ON dlock_queue '
			  . 'FOR EACH ROW EXECUTE FUNCTION act()',
			"$queue DISABLE TRIGGER mine"
		],
		'DROP TRIGGER mine ON dlock_queue', sprintf($triggers, 'mine') ],
	[ 'a foreign key',
		"$queue ADD CONSTRAINT mine FOREIGN KEY (lease) REFERENCES referenced NOT VALID",
		"$queue DROP CONSTRAINT mine", sprintf($triggers, 'RI_ConstraintTrigger.*') ],
	[ 'a key that another table refers to',
		'CREATE TABLE refers (lease bigint REFERENCES dlock_queue_lease)',
		'DROP TABLE refers', sprintf($triggers, 'RI_ConstraintTrigger.*') ],
	[ 'an own trigger, disabled',
		"$queue DISABLE TRIGGER dlock_truncated",
		"$queue ENABLE ALWAYS TRIGGER dlock_truncated",
		sprintf($triggers, 'dlock_truncated') ],
	[ 'an own trigger, enabled',
		"$leases ENABLE TRIGGER dlock_replicated",
		"$leases ENABLE REPLICA TRIGGER dlock_replicated",
		sprintf($triggers, 'dlock_replicated') ],
	[ 'an own trigger, dropped',
		'DROP TRIGGER dlock_truncated ON dlock_queue_lease',
		[
			'CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_queue_lease '
			  . 'EXECUTE FUNCTION dlock_refuse_truncate()',
			"$leases ENABLE ALWAYS TRIGGER dlock_truncated"
		],
		'One of its triggers was dropped' ],
	[ 'an own trigger of another function',
		[
			'DROP TRIGGER dlock_truncated ON dlock_queue',
			'CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_queue EXECUTE FUNCTION act()',
			"$queue ENABLE ALWAYS TRIGGER dlock_truncated"
		],
		[
			'DROP TRIGGER dlock_truncated ON dlock_queue',
			'CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_queue '
			  . 'EXECUTE FUNCTION dlock_refuse_truncate()',
			"$queue ENABLE ALWAYS TRIGGER dlock_truncated"
		],
		sprintf($triggers, 'dlock_truncated') ],
	[ 'an own trigger of other events',
		[
			'DROP TRIGGER dlock_replicated ON dlock_queue_lease',
			'CREATE TRIGGER dlock_replicated BEFORE INSERT ON dlock_queue_lease '
			  . 'FOR EACH ROW EXECUTE FUNCTION dlock_drop_replicated()',
			"$leases ENABLE REPLICA TRIGGER dlock_replicated"
		],
		[
			'DROP TRIGGER dlock_replicated ON dlock_queue_lease',
			'CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE '
			  . 'ON dlock_queue_lease FOR EACH ROW EXECUTE FUNCTION dlock_drop_replicated()',
			"$leases ENABLE REPLICA TRIGGER dlock_replicated"
		],
		sprintf($triggers, 'dlock_replicated') ],
	[ 'an own trigger with a condition',
		[
			'DROP TRIGGER dlock_truncated ON dlock_queue',
			'CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_queue '
			  . 'WHEN (run()) EXECUTE FUNCTION dlock_refuse_truncate()',
			"$queue ENABLE ALWAYS TRIGGER dlock_truncated"
		],
		[
			'DROP TRIGGER dlock_truncated ON dlock_queue',
			'CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_queue '
			  . 'EXECUTE FUNCTION dlock_refuse_truncate()',
			"$queue ENABLE ALWAYS TRIGGER dlock_truncated"
		],
		sprintf($triggers, 'dlock_truncated') ],
	[ 'another access method',
		"$queue SET ACCESS METHOD mine", "$queue SET ACCESS METHOD heap",
		'It has another access method than "heap"' ],
	[ 'a rule',
		'CREATE RULE mine AS ON INSERT TO dlock_queue DO ALSO INSERT INTO ran SELECT trace()',
		'DROP RULE mine ON dlock_queue', $rule ],
	[ 'a default',
		"$queue ALTER owner SET DEFAULT trace()", "$queue ALTER owner DROP DEFAULT",
		'Its column 8 is not "owner" of type text, nullable, without a default' ],
	[ 'an identity column',
		"$leases ALTER lease ADD GENERATED ALWAYS AS IDENTITY",
		"$leases ALTER lease DROP IDENTITY", 'Its column 1 is not "lease" of type bigint, NOT NULL, without a default' ],
	[ 'a column more',
		"$queue ADD more text", "$queue DROP more",
		'It has a column "more" that was added' ],
	[ 'a column more, with a default',
		"$leases ADD more text NOT NULL DEFAULT trace()", "$leases DROP more",
		'It has a column "more" that was added' ],
	[ 'a column more, generated',
		"$leases ADD more boolean GENERATED ALWAYS AS (run()) STORED",
		"$leases DROP more", 'It has a column "more" that was added' ],
	[ 'a CHECK constraint',
		"$queue ADD CONSTRAINT mine CHECK (run()) NOT VALID",
		"$queue DROP CONSTRAINT mine", 'It has a CHECK constraint' ],
	[ 'another type',
		"$queue ALTER permits TYPE text USING permits::text",
		"$queue ALTER permits TYPE integer USING permits::integer",
		$permits ],
	[ 'a wider type',
		"$queue ALTER permits TYPE bigint", "$queue ALTER permits TYPE integer",
		$permits ],
	[ 'another name',
		"$queue RENAME mode TO manner", "$queue RENAME manner TO mode",
		'Its column 5 is not "mode" of type text, NOT NULL, without a default' ],
	[ 'two names, exchanged',
		[
			"$leases RENAME system TO s", "$leases RENAME lease TO system",
			"$leases RENAME s TO lease"
		],
		[
			"$leases RENAME system TO s", "$leases RENAME lease TO system",
			"$leases RENAME s TO lease"
		],
		'Its column 1 is not "lease" of type bigint, NOT NULL, without a default' ],
	[ 'NOT NULL, dropped',
		"$queue ALTER durability DROP NOT NULL", "$queue ALTER durability SET NOT NULL",
		'Its column 16 is not "durability" of type integer, NOT NULL, without a default' ],
	[ 'NOT NULL, added',
		"$leases ALTER info SET NOT NULL", "$leases ALTER info DROP NOT NULL",
		'Its column 5 is not "info" of type text, nullable, without a default' ],
	[ 'a parent',
		"$queue INHERIT parent", "$queue NO INHERIT parent", $inherits ],
	[ 'a child',
		'CREATE TABLE child () INHERITS (dlock_queue_lease)',
		'DROP TABLE child', $inherits ],
	[ 'a partition',
		'ALTER TABLE parted ATTACH PARTITION dlock_queue DEFAULT',
		'ALTER TABLE parted DETACH PARTITION dlock_queue', $inherits ],
	# An earlier change has renamed the key to "another".
	[ 'no primary key', $drop_key, $key, $no_key ],
	[ 'another primary key',
		[
			"$queue DROP CONSTRAINT dlock_queue_pkey",
			"$queue ADD CONSTRAINT another PRIMARY KEY (name, ticket)"
		],
		[ $drop_key, $key ], 'Index "another" was added|' . $no_key ],
	[ 'a primary key that can be deferred',
		[
			"$queue DROP CONSTRAINT dlock_queue_pkey",
			"$queue ADD CONSTRAINT another PRIMARY KEY (ticket) DEFERRABLE"
		],
		[ $drop_key, $key ], 'Trigger "PK_ConstraintTrigger.*" was added.*|Index "another" was added' ],
	[ 'a unique index',
		'CREATE UNIQUE INDEX mine ON dlock_queue (lease, ticket)',
		'DROP INDEX mine', 'Index "mine" was added' ],
	[ 'a unique index that was broken off', \&break_off_index,
		'DROP INDEX mine', 'Index "mine" was added', 'dlock_queue' ],
	[ 'an index of an expression',
		'CREATE INDEX mine ON dlock_queue (run())',
		'DROP INDEX mine', 'Index "mine" was added' ],
	[ 'a partial index',
		'CREATE INDEX mine ON dlock_queue_lease (ttl) WHERE run()',
		'DROP INDEX mine', 'Index "mine" was added' ],
	[ 'an index with an operator class',
		'CREATE INDEX mine ON dlock_queue (lease mine)',
		'DROP INDEX mine', 'Index "mine" was added' ],
	[ 'an index of another kind',
		'CREATE INDEX mine ON dlock_queue USING hash (name)',
		'DROP INDEX mine', 'Index "mine" was added' ]);
my @calls = (
	"dlock_lease_open('1h', info => 'new')",
	"dlock_ttl_acquire('new', '1h', info => 'x')",
	sprintf($acquire, 'new'));

sub all_refused
{
	my ($error, $test, @tried) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	foreach my $call (@tried)
	{
		like(ask("SELECT $call"), $error, "$test: $call");
	}
	return;
}

# Rows of released tickets are removed.
sub is_free_again
{
	my ($ticket, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	ask("SELECT dlock_release_ticket($ticket)");
	return ok(
		$session->wait_for(
			"SELECT count(*) = 0 FROM dlock_queue WHERE ticket = $ticket"),
		"$test, undone: the released row is removed");
}

# An invalid index still refuses duplicate names.
sub break_off_index
{
	my ($reader, $admin) = map { session($node) } 1 .. 2;

	$reader->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
	$admin->start('CREATE UNIQUE INDEX CONCURRENTLY mine ON dlock_queue (name)');
	$session->wait_for(
		'SELECT count(*) = 1 FROM pg_index WHERE indisready AND NOT indisvalid');
	$session->query("SELECT pg_cancel_backend($admin->{pid})");
	die 'not canceled' unless $admin->answer =~ /57014/;
	$_->quit foreach $reader, $admin;
	return;
}

foreach my $change (@refused)
{
	my ($test, $do, $undo, $detail, $table) = @$change;
	my @statements = map { ref $_ eq 'ARRAY' ? @$_ : $_ } $undo, $do;
	($table) = "@statements" =~ /(dlock_queue_lease|dlock_queue)\b/ unless $table;
	my $error =
	  qr/55000: table "$table" is not what extension "dlock" has made.*DETAIL:  (?:$detail)\..*HINT:  Undo/s;
	my $before = ask(sprintf("SELECT $acquire", 'before'));

	change($do);
	ask('TRUNCATE ran');
	# Use another kind of call for each change: one kind takes a second.
	push @calls, shift @calls;
	all_refused($error, $test, $calls[0]);
	is( ask("SELECT dlock_check('lock', $fence), dlock_is_held('lock', $lease), "
			  . "dlock_renew($lease)"),
		't|t|2',
		"$test: no lock is lost");
	is( ask(q{SELECT (SELECT count(*) FROM dlock_locks WHERE name = 'new'),
			(SELECT count(*) FROM dlock_leases WHERE info = 'new')}),
		'0|0',
		"$test: refused calls leave nothing");
	is( ask("SELECT dlock_try_acquire('new') > 0, dlock_release('new'), "
			  . "dlock_xact_acquire('new') > 0, dlock_release_ticket($before), "
			  . "dlock_try_acquire('before') IS NULL"),
		't|t|t|t|t',
		"$test: sessions go on, but have nothing that a row says is held");
	crash();
	all_refused($error, "$test, reading", @calls, "dlock_try_acquire('lock')");
	is(ask('SELECT count(*) FROM ran'), '0', "$test: no added code was run");
	change($undo);
	# the rows that the crash has restored
	is_free_again($before, $test);
	works("$test, undone");
}

#
# A crash empties an unlogged table, so it is refused until it is logged.
#
my %uses = (
	'dlock_queue' => "SELECT dlock_ttl_acquire('x', '1h')",
	'dlock_queue_lease' => "SELECT dlock_lease_open('1h')",
	'dlock_slots' => "SELECT dlock_set_slots('x', 2)",
	'dlock_versions' => "SELECT dlock_version_of('x')",
	'dlock_reservations' => "SELECT dlock_try_acquire('x')",
	'dlock_ticket_seq' => 'SELECT dlock_advance_ticket(1)');
change('DROP PUBLICATION everything');
foreach my $name (sort keys %uses)
{
	my $kind = $name eq 'dlock_ticket_seq' ? 'SEQUENCE' : 'TABLE';
	my $test = "$name is unlogged";
	my $error =
	  qr/55000: .*relation "$name" of extension "dlock" is unlogged.*HINT:  Use ALTER $kind $name SET LOGGED/s;

	change("ALTER $kind $name SET UNLOGGED");
	like(ask($uses{$name}), $error, $test);
	is(ask("SELECT dlock_renew($lease) > 0"), 't', "$test: no lock is lost");
	$session->quit;
	$node->restart;
	$session = session($node);
	like(ask($uses{$name}), $error, "$test: reading");
	change("ALTER $kind $name SET LOGGED");
	works("$test, undone", 1);
}
# The table is empty after a crash, but its leases must not end for that.
change("$queue SET UNLOGGED");
crash();
like(ask("SELECT dlock_try_acquire('lock')"),
	qr/55000: .*is unlogged/, 'a call reports the emptied table');
change("$queue SET LOGGED");

#
# A dropped column has lost its values and its position.
#
change("$leases DROP info, ADD info text");
my $dropped =
  qr/55000: table "dlock_queue_lease" is .*DETAIL:  Its column 5 is not "info" of type text/s;
all_refused($dropped, 'a column is dropped, and added again', @calls);
crash();
all_refused($dropped, 'the same, reading', @calls);
change('DROP EXTENSION dlock; CREATE EXTENSION dlock');
$lease = ask("SELECT dlock_lease_open('1h', info => 'x')");
$fence = ask("SELECT dlock_lease_acquire('lock', $lease, info => 'x')");
works('the extension was created again', 1);

unlike(slurp_file($node->logfile), qr/terminated by signal/, 'no crash');

$session->quit;
$node->stop;
done_testing();
