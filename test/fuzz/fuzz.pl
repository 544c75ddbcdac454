
# Send random calls of dlock's functions. test/fuzz/run starts the server and
# calls this.
#
# There is a database for each kind of encoding.  Each has some sessions.
# Sessions take random roles, begin, nest and abort transactions of all kinds,
# and cancel and terminate each other.  The functions are read from the
# catalog, so new functions are called, too.  Arguments include the extreme
# values of their types.
#
# What must not happen:
#	a crash, or a session that the server closes without a request
#	an internal error (XX000), or an SQLSTATE that is not in %allowed
#	a missing answer, because each statement has a timeout
#	locks, leases or rows that are left when all is released
#	memory that is lost: afterwards no more may be used than before, except
#	by the sketches, and three quarters as many locks must fit

use strict;
use warnings FATAL => 'all';

use IO::Select;
use IPC::Open3;
use POSIX ();
use Time::HiRes qw(time usleep);

my ($psql, $dir, $seed, $seconds, $sessions) = @ARGV;
my @databases = qw(UTF8 LATIN1 SQL_ASCII EUC_JP);
my @failures;

# An answer that takes longer than this counts as missing.
my $patience = 60;

# Errors that bad input, states, rights, limits and other sessions may cause
my %allowed = map { $_ => 1 } qw(
  0A000 21000 22003 22004 22007 22008 22015 22021 22023 2202E 22P02 22P05
  25000 25001 25006 25P01 25P02 26000 2BP01 34000 39P01 3B001 40001 40P01
  42501 42602 42704 42710 42P03 42P05 53200 53400 54000 55000 55006 55L01
  55P03 57014 57P01);

# One-shot queries, as the superuser
sub ask
{
	my ($database, @sql) = @_;
	my @command = (
		$psql, '-XAtq', '-h', $dir, '-U', 'admin', '-d', $database, '-v',
		'ON_ERROR_STOP=1', map { ('-c', $_) } @sql);

	open(my $out, '-|', @command) or die "could not run psql: $!";
	my $answer = join '', <$out>;
	close($out) or die "psql failed: $sql[-1]";
	chomp $answer;
	return $answer;
}

sub poll
{
	my ($sub) = @_;

	for (1 .. 10 * $patience)
	{
		return 1 if $sub->();
		usleep(100_000);
	}
	return 0;
}

# ---- Values

sub one { return $_[ rand @_ ]; }
sub chance { return rand() < $_[0]; }

# Bytes are written as escapes, because psql cannot read them raw.
sub text
{
	return one(
		'NULL', "''",
		"repeat('x', 255)", "repeat('x', 256)", "repeat('x', 1025)",
		"repeat('x', 63)", "repeat('x', 64)", "repeat('x', 1000000)",
		"repeat(E'\\xc3\\xa9', 127)", "repeat(E'\\xc3\\xa9', 128)",
		"E'\\xe3\\x81\\x82'", "E'\\xf0\\x9f\\x94\\x92'", "E'\\xa4\\xa2'",
		"E'\\x8f\\xa2\\xb7'", "E'\\x8e\\xb1'", "E'\\xff\\xfe'", "E'\\xc3'",
		"E'\\xed\\xa0\\x80'", "E'\\xa9\\xa1'", "E'\\xfd\\xfe'", "E'a\\xe9b'",
		"E'\\x01\\x7f\\n\\r\\t\\b'", "E'\"\\\\\\'%s%n\$1'", "' a '",
		"U&'\\0001F512'", "U&'\\00e9'", "'{}'", "chr(" . int(rand 300) . ")",
		"convert_from('\\xe38182', 'UTF8')", "convert_from('\\x00', 'UTF8')",
		"encode(decode(repeat('ff', 40), 'hex'), 'escape')");
}

# Few names, so that sessions compete
sub name
{
	return chance(0.2) ? text() : "'" . one('a' .. 'f') . "'";
}

sub names
{
	return one(
		'NULL', "'{}'", "'{NULL}'", "'{{a,b},{c,d}}'", "'[5:6]={a,b}'",
		"'{a,b'", "'{a,NULL,b}'", "'{\"\"}'", "'{{}}'", "'[0:0][0:0]={{x}}'",
		"'[2147483647:2147483647]={a}'",
		"array_fill('a'::text, ARRAY[10000])",
		"array_fill('a'::text, ARRAY[3, 3])",
		"array_fill('a'::text, ARRAY[2], ARRAY[-5])",
		"(SELECT array_agg('n' || i) FROM generate_series(1, 2000) i)")
	  if chance(0.3);
	return 'ARRAY[' . join(', ', map { name() } 0 .. rand 5) . ']::text[]';
}

sub interval
{
	return one(
		'NULL', "'-1 s'", "'infinity'", "'-infinity'", "'178000000 years'",
		"'-178000000 years'", "'2147483647 months'", "'2147483647 days'",
		"'-2147483648 days'", "'9223372036854775807 us'", "'1 mon'",
		"'1 mon -30 days'", "'99.999 ms'", "'nonsense'", "'1 us'",
		"'-9223372036854775808 us'", "'178956970 years 7 mons 2147483647 days'",
		"'5.000001 s'", "'24:00:00'", "'-1 day 24:00:01'")
	  if chance(0.2);
	return one("'0'", "'1 ms'", "'20 ms'", "'100 ms'", "'200 ms'", "'1 s'");
}

# Mostly an existing number, of any owner
sub id
{
	my $n = int rand 10;

	return one(
		'NULL', 0, -1, 1, '9007199254740991', '9007199254740992',
		'9223372036854775807', '(-9223372036854775808)')
	  if chance(0.1);
	return one(
		"(SELECT ticket FROM dlock_locks OFFSET $n LIMIT 1)",
		"(SELECT max(ticket) FROM dlock_locks)",
		"(SELECT ticket FROM dlock_locks WHERE pid = pg_backend_pid() LIMIT 1)",
		"(SELECT lease FROM dlock_leases OFFSET $n LIMIT 1)",
		"(SELECT max(lease) FROM dlock_leases)");
}

my %values = (
	'text' => \&text,
	'text[]' => \&names,
	'interval' => \&interval,
	'bigint' => \&id,
	'integer' => sub {
		return one(1, 1, 2, 2, 3, 5, 'NULL', 0, -1, 2147483647,
			'(-2147483648)');
	},
	'boolean' => sub { return one('true', 'false', 'false', 'NULL'); },
	'regrole' => sub {
		return one("'role_a'", "'role_b'", 'NULL', 0, 4294967295,
			"'nobody is called so'");
	},
	'name' => sub {
		return chance(0.5) ? text() : one("'role_a'", "'nobody is called so'");
	},);

# Arguments whose type alone says too little
my %named = (
	'name' => \&name,
	'slots' => sub {
		return chance(0.7) ? 'NULL' : $values{integer}->();
	},
	'permits' => sub { return chance(0.7) ? 1 : $values{integer}->(); },
	# Most names stay free for most roles.
	'prefix' => sub { return chance(0.7) ? "'e'" : text(); },
	'pid' => \&pid,
	'expected' => sub {
		my $name = name();
		return chance(0.2) ? id() : "dlock_version_of($name)";
	},
	# A big number would leave none to the others.
	'minimum' => sub {
		return one('NULL', 0, -1, 1, '9223372036854775807',
			'9007199254740992', '(-9223372036854775808)');
	},
	'ttl' => sub {
		return chance(0.4) ? interval() : one("'200 ms'", "'2 s'", "'5 s'");
	},
	'delay' => sub {
		return chance(0.4) ? interval() : one("'100 ms'", "'1 s'", 'NULL');
	},);

sub pid
{
	my $n = int rand 3 * @databases;

	return one('pg_backend_pid()', 0, -1, 'NULL', 2147483647)
	  if chance(0.2);
	return "(SELECT pid FROM pg_stat_activity WHERE usename = 'admin' "
	  . "AND backend_type = 'client backend' ORDER BY pid OFFSET $n LIMIT 1)";
}

# ---- Statements

# call($function): the first arguments by position, the others by name
sub call
{
	my ($function) = @_;
	my @types = @{ $function->{types} };
	my @names = @{ $function->{names} };
	my $needed = @types - $function->{defaults};
	my $given = $needed + int rand(@types - $needed + 1);
	my $position = chance(0.5) ? $given : $needed;
	my @arguments;

	foreach my $i (0 .. $#types)
	{
		next if $i >= $position && !($i < $given || chance(0.2));
		my $maker = $named{ $names[$i] } // $values{ $types[$i] }
		  or die "$function->{name}: no values for the type $types[$i]";
		my $value = $maker->();

		# The types select the function.
		$value = "CAST($value AS $types[$i])";
		$value = "$names[$i] => $value" if $i >= $position;
		push @arguments, $value;
	}
	return "$function->{name}(" . join(', ', @arguments) . ')';
}

# statement($functions): the text to send at once
sub statement
{
	my ($functions) = @_;
	my $function = one(@$functions);
	my $dice = rand;
	my $savepoint = one('s', 't');

	if ($dice < 0.6)
	{
		return 'CALL ' . call($function) if $function->{kind} eq 'p';
		return 'SELECT ' . call($function);
	}
	if ($dice < 0.66)
	{
		return one(
			'BEGIN',
			'BEGIN READ ONLY',
			'BEGIN ISOLATION LEVEL REPEATABLE READ',
			'BEGIN ISOLATION LEVEL SERIALIZABLE',
			'BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE');
	}
	return one('COMMIT', 'COMMIT', 'ROLLBACK', 'COMMIT AND CHAIN')
	  if $dice < 0.74;
	return one("SAVEPOINT $savepoint", "ROLLBACK TO $savepoint",
		"RELEASE $savepoint", 'SELECT 1 / 0')
	  if $dice < 0.79;
	return one('SET ROLE role_a', 'SET ROLE role_b', 'SET ROLE role_admin',
		'RESET ROLE', 'SET LOCAL ROLE role_a')
	  if $dice < 0.83;
	if ($dice < 0.88 && $function->{kind} ne 'p')
	{
		my $call = call($function);
		return one(
			"DO \$\$ BEGIN PERFORM $call; RAISE division_by_zero; "
			  . 'EXCEPTION WHEN division_by_zero THEN NULL; END $$',
			"SELECT $call FROM generate_series(1, 20)",
			"DECLARE c CURSOR WITH HOLD FOR SELECT $call; CLOSE c",
			"PREPARE p AS SELECT $call; EXECUTE p",
			"SELECT $call, x FROM (VALUES (1), (2)) AS v (x) ORDER BY x LIMIT 1");
	}
	return one(
		"UPDATE guarded SET x = x + 1",
		"UPDATE fenced SET fence = " . id(),
		"UPDATE versioned SET version = version + "
		  . one(0, 1, 2, -1, 'NULL', '9223372036854775807'),
		"INSERT INTO fenced VALUES (" . id() . ')',
		"TRUNCATE guarded", "DELETE FROM versioned",
		"INSERT INTO versioned VALUES (" . id() . ')')
	  if $dice < 0.91;
	return one(
		'SELECT * FROM dlock_locks', 'SELECT * FROM dlock_leases',
		'SELECT * FROM dlock_stats', 'SELECT * FROM dlock_queue',
		'SELECT * FROM dlock_blockers', 'SELECT * FROM dlock_contention',
		'SELECT * FROM dlock_wait_histogram',
		'SELECT * FROM dlock_reservations', 'SELECT * FROM dlock_versions',
		'SELECT * FROM dlock_slots',
		'SELECT * FROM dlock_version_usage')
	  if $dice < 0.94;
	return 'SELECT pg_cancel_backend(' . pid() . ')' if $dice < 0.97;
	return 'SELECT pg_terminate_backend(' . pid() . ')' if $dice < 0.973;
	return one(
		'DISCARD ALL', 'CLOSE ALL', 'LISTEN a', 'UNLISTEN *',
		"PREPARE TRANSACTION 'p" . int(rand 5) . "'",
		"ROLLBACK PREPARED 'p" . int(rand 5) . "'",
		'SET dlock.session_locks = ' . one('allow', 'warn', 'error'),
		'SET dlock.max_locks_per_session = ' . one(1, 3, 100000),
		'SET dlock.max_memory_per_role = ' . one(1, 50, 100),
		'SET dlock.cancel_lost_guards = ' . one('on', 'off'),
		'SET synchronous_commit = ' . one('off', 'local', 'on'),
		'SET lock_timeout = ' . one(0, 1, 20))
	  if $dice < 0.998;

	# Other sessions must not see this.
	return one('BEGIN; DROP EXTENSION dlock CASCADE; ROLLBACK',
		'SET client_encoding = ' . one(@databases));
}

# ---- Sessions

# Report each part of a session's output that must not be there.
sub judge
{
	my ($database, $sql, $answer, $report) = @_;

	while ($answer =~ /(WARNING|ERROR|FATAL|PANIC):  (\w{5}): (.*)/g)
	{
		my ($level, $state, $message) = ($1, $2, $3);

		next if $allowed{$state} || ($sql =~ m{1 / 0} && $state eq '22012');
		next if $level eq 'WARNING' && $state eq '01000';
		print $report "$database: $level $state: $message\n  $sql\n";
	}
}

# Run psql until it is told to end, or its session is terminated.  Returns the
# number of statements sent.
sub converse
{
	my ($database, $functions, $until, $report) = @_;
	my ($in, $out);
	my $buffer = '';
	my $count = 0;
	my $pid = open3($in, $out, undef, $psql, '-X', '-q', '-h', $dir, '-U',
		'admin', '-d', $database, '-o', '/dev/null', '-v', 'VERBOSITY=verbose',
		'-f', '-');
	my $select = IO::Select->new($out);
	my $backend = 0;
	local $SIG{PIPE} = 'IGNORE';

	print $in "SELECT pg_backend_pid() AS pid \\gset\n\\echo pid :pid\n";

	while (time < $until)
	{
		my $sql = statement($functions);

		$count++;
		print $in "$sql;\n\\echo end of answer\n";
		$in->flush;
		while ($buffer !~ /^end of answer\n/m)
		{
			if (!$select->can_read($patience))
			{
				print $report "$database: no answer\n  $sql\n";
				kill 'KILL', $pid;
			}
			last unless sysread($out, $buffer, 65536, length $buffer);
		}
		judge($database, $sql, $buffer, $report);
		$backend = $1 if $buffer =~ /^pid (\d+)$/m;
		if ($buffer !~ /^end of answer\n/m)
		{
			print $report "$database: connection lost ($backend)\n  $sql\n"
			  unless $buffer =~ /57P01/;
			last;
		}
		$buffer = '';
	}
	close $in;
	1 while sysread($out, $buffer, 65536);
	waitpid $pid, 0;
	return $count;
}

# ---- The run

# Memory in use; the sketches of all databases may take a sixteenth.
my $memory_used = 'SELECT memory_used FROM dlock_stats';
my $most_for_sketches = 'SELECT memory_limit / 16 FROM dlock_stats';

# The number of locks that fit into the memory.  DSA keeps a block of 64 kB for
# each size of piece that there ever was.  The arrays of hash tables, which
# stay, can keep more such blocks from pieces of other sizes.  In 4 MB, these
# take the place of locks.
sub capacity
{
	my ($database) = @_;

	return ask(
		$database, q{
DO $$
DECLARE
	n integer := 0;
BEGIN
	BEGIN
		LOOP
			PERFORM dlock_acquire('lock ' || n);
			n := n + 1;
		END LOOP;
	EXCEPTION WHEN out_of_memory THEN NULL;
	END;
	PERFORM set_config('fuzz.count', n::text, false);
END $$},
		q{SELECT current_setting('fuzz.count')});
}

ask(
	'postgres',
	"LOAD 'dlock'",
	'CREATE ROLE role_a',
	'CREATE ROLE role_b',
	'CREATE ROLE role_admin',
	'GRANT role_a TO role_b',
	"ALTER SYSTEM SET dlock.max_memory = '8MB'",
	'SELECT pg_reload_conf()');
foreach my $database (@databases)
{
	ask('postgres',
		"CREATE DATABASE \"$database\" ENCODING '$database' "
		  . "TEMPLATE template0 LOCALE 'C'");
	ask(
		$database,
		'CREATE EXTENSION dlock',
		'GRANT EXECUTE ON FUNCTION dlock_force_release, dlock_reserve, '
		  . 'dlock_unreserve, dlock_advance_ticket, dlock_set_slots TO role_admin',
		'CREATE TABLE guarded (x bigint)',
		'CREATE TABLE fenced (fence bigint)',
		'CREATE TABLE versioned (version bigint)',
		'INSERT INTO fenced VALUES (1)',
		'INSERT INTO versioned VALUES (1)',
		'CREATE TRIGGER t BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE '
		  . "ON guarded EXECUTE FUNCTION dlock_require_guard('a')",
		'CREATE TRIGGER t BEFORE INSERT OR UPDATE ON fenced FOR EACH ROW '
		  . "EXECUTE FUNCTION dlock_fence_guard('fence')",
		'CREATE TRIGGER t BEFORE UPDATE ON versioned FOR EACH ROW '
		  . 'EXECUTE FUNCTION dlock_version_guard()',
		'GRANT ALL ON guarded, fenced, versioned TO PUBLIC');
}

my @functions = map {
	my ($name, $kind, $defaults, $types, $names) = split /\|/, $_, -1;
	{
		name => $name,
		kind => $kind,
		defaults => $defaults,
		types => [ split /;/, $types ],
		names => [ split /;/, $names ]
	}
} split /\n/, ask(
	$databases[0], q{
SELECT p.proname, p.prokind, p.pronargdefaults,
       array_to_string(ARRAY(SELECT format_type(t, NULL)
         FROM unnest(p.proargtypes) WITH ORDINALITY AS u(t, n)
         ORDER BY n), ';'),
       array_to_string(p.proargnames[1:p.pronargs], ';')
  FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass
                                 AND d.objid = p.oid AND d.deptype = 'e'
  JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'dlock'
 ORDER BY p.oid::regprocedure::text});
die 'no functions' if @functions < 10;

# The first calls make what stays: tables of locks, and in each database the
# sketch of the locks waited for.
ask(
	$_,
	"SELECT dlock_ttl_acquire('w', '2 s')",
	"SELECT dlock_try_acquire('w', '1 ms')",
	'SELECT dlock_lease_close(lease) FROM dlock_leases') foreach @databases;
capacity($databases[0]);
my $before = capacity($databases[0]);
my $used = ask($databases[0], $memory_used);

# One database keeps its counts, so that they tell what came of the calls.
ask($databases[0], 'SELECT dlock_stats_reset()');
my @without_reset = grep { $_->{name} ne 'dlock_stats_reset' } @functions;

my $until = time + $seconds;
my %children;
foreach my $i (0 .. $sessions * @databases - 1)
{
	my $database = $databases[ $i % @databases ];
	my $callable = $i % @databases ? \@functions : \@without_reset;
	my $file = "$dir/report.$i";
	my $pid = fork // die "could not fork: $!";

	if ($pid == 0)
	{
		my $count = 0;

		srand($seed + $i);
		open(my $report, '>', $file) or die "$file: $!";
		$report->autoflush;

		# Set here and not in the database, because DISCARD ALL would reset it.
		$ENV{PGOPTIONS} = '-c statement_timeout=400';
		$count += converse($database, $callable, $until, $report)
		  while time < $until;
		print $report "sent $count\n";
		POSIX::_exit(0);
	}
	$children{$pid} = $file;
}

my $statements = 0;
foreach my $pid (keys %children)
{
	waitpid $pid, 0;
	push @failures, "a session's process ended with status $?" if $? != 0;
	open(my $report, '<', $children{$pid}) or die "$children{$pid}: $!";
	while (my $line = <$report>)
	{
		if ($line =~ /^sent (\d+)$/) { $statements += $1; }
		elsif ($line =~ /^ /)
		{
			chomp $line;
			$failures[-1] .= "\n$line";
		}
		else { chomp $line; push @failures, $line; }
	}
}

my ($granted, $waited, $after) = (0, 0, 0);

# End the tickets and leases that only their owner or time would end.
# Afterwards nothing may be left.
eval {
	($granted, $waited) = split /\|/,
	  ask($databases[0], 'SELECT acquired, waited FROM dlock_stats');

	foreach my $database (@databases)
	{
		my $left = 'nothing was asked';

		foreach my $gid (split /\n/,
			ask($database, 'SELECT gid FROM pg_prepared_xacts '
				  . 'WHERE database = current_database()'))
		{
			ask($database, "ROLLBACK PREPARED '$gid'");
		}
		ask($database,
			'SELECT dlock_lease_close(lease) FROM dlock_leases');
		poll(
			sub {
				$left = ask($database,
					    "SELECT (SELECT count(*) FROM dlock_locks) || ' locks, ' "
					  . "|| (SELECT count(*) FROM dlock_leases) || ' leases, ' "
					  . "|| (SELECT count(*) FROM dlock_queue) || ' rows of tickets, ' "
					  . "|| (SELECT count(*) FROM dlock_queue_lease) || ' rows of leases'"
				);
				return $left !~ /[1-9]/;
			})
		  or push @failures, "$database: left are $left";
	}

	ask($databases[0], 'DELETE FROM dlock_reservations');
	ask($_, 'DELETE FROM dlock_slots') foreach @databases;
	$used += ask($databases[0], $most_for_sketches);
	my $left = 0;
	poll(sub { ($left = ask($databases[0], $memory_used)) <= $used })
	  or push @failures,
	  "memory is lost: $left bytes are used, and $used may be";
	poll(
		sub {
			$after = capacity($databases[0]);
			return ($after || 0) >= 0.75 * $before;
		})
	  or push @failures,
	  "memory is lost: $after locks fit where $before did before";
	1;
} or push @failures, "the server could not be asked at the end: $@";

# Only the log has a worker's errors.
open(my $log, '<', "$dir/log") or die "$dir/log: $!";
my %terminated;
while (my $line = <$log>)
{
	$terminated{$1} = 1 if $line =~ /^(\d+) \S+ 57P01 FATAL/;
	push @failures, 'server log: ' . substr($line, 0, 1000)
	  if $line =~ /PANIC|TRAP:|terminated\ by\ signal|AddressSanitizer
		|runtime\ error|\ XX\d{3}\ (?:WARNING|ERROR|FATAL)
		|exited\ with\ exit\ code\ [2-9]|Failed\ process\ was\ running/x;
}
close $log;

# A terminated session's last message does not always reach psql.  A session
# that was terminated at once has not told its PID, so any PID counts.
$terminated{0} = 1 if %terminated;
@failures = grep { !/ lost \((\d+)\)/ || !$terminated{$1} } @failures;

push @failures, 'nothing came of it' if $granted == 0 || $waited == 0;

print "$_\n" foreach @failures > 30 ? @failures[ 0 .. 29 ] : @failures;
printf "%d statements with %d functions in %d sessions, %d locks granted in one "
  . "database, %d after a wait, %d locks fit before and %d afterwards; "
  . "%d failures, seed %d\n", $statements, scalar @functions,
  $sessions * @databases, $granted, $waited, $before, $after,
  scalar @failures, $seed;
exit(@failures ? 1 : 0);
