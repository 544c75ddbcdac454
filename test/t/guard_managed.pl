# Locks on one server, data on another one without the extension: a late holder
# cannot write there, if the data are set up as docs/managed.md says.  The SQL and
# the program are read from the page.
#
# What would break it: a mark that a late holder can lower or bypass; two
# transactions that both write although the fence of one is stale; a fence that
# still counts when its transaction has ended; a mark that is removed with the
# row that it protects; a role that can change the marks.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Python;
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $top = "$FindBin::RealBin/../..";
my $page = slurp_file("$top/docs/managed.md");
my $stale = qr/ERROR:  55L01: fence \d+ of lock "account\/\d+" is stale/;
my $unfenced =
  qr/ERROR:  55000: cannot change table "account" without a fence of lock/;

my $locks = new_server('locks');
my $managed = PostgreSQL::Test::Cluster->new('managed');

$managed->init;
$managed->append_conf('postgresql.conf', "deadlock_timeout = '10ms'");
$managed->start;
$managed->safe_psql('postgres', 'CREATE ROLE alice LOGIN; CREATE ROLE bob LOGIN');

# The page's blocks for the administrator.  The first one drops dlock from the
# page's own database.
my @blocks = $page =~ /^<!-- docs: run as admin -->\n```sql\n(.*?)^```$/msg;

is(shift @blocks, "DROP EXTENSION dlock;\n", 'the page begins without dlock');
is(scalar @blocks, 4, 'the page has the SQL for the managed database');
# without superuser, as in a managed database
$managed->safe_psql(
	'postgres', q{
	CREATE ROLE owner LOGIN CREATEROLE;
	GRANT alice, bob TO owner WITH ADMIN OPTION;
	ALTER DATABASE postgres OWNER TO owner});
$managed->safe_psql('postgres', "SET ROLE owner; $_") foreach @blocks;
is( $managed->safe_psql(
		'postgres', q{SELECT count(*) FROM pg_extension WHERE extname = 'dlock'}),
	'0', 'the managed database has no dlock');
# alice's timeouts would end the transactions that the test pauses
$managed->safe_psql('postgres',
	q{ALTER ROLE alice RESET ALL; BEGIN; SELECT fencing.show('account/9', 0);}
	  . 'INSERT INTO account VALUES (9, 100); COMMIT');

my $alice = session($managed, 'postgres', 'user=alice');
my $bob = session($managed, 'postgres', 'user=bob');
my $admin = session($managed);

# next_fence($name): let the lock go to another holder, without the previous
# holder's knowledge
my $holder;

sub next_fence
{
	my ($name) = @_;

	$holder->quit if $holder;
	$holder = session($locks);
	return $holder->query("SELECT dlock_acquire('$name')");
}

sub show
{
	my ($name, $fence) = @_;

	return "SELECT fencing.show('$name', $fence)";
}

sub balance
{
	my ($id) = @_;

	return $admin->query("SELECT balance FROM account WHERE id = $id");
}

# until_blocked($session): return when it waits for another transaction
sub until_blocked
{
	my ($session) = @_;

	$admin->wait_for(
		"SELECT cardinality(pg_blocking_pids($session->{pid})) = 1");
	return;
}

# Each fence must be real, and each name is used by one test.
my $id = 10;

sub new_account
{
	$id++;
	$admin->query("BEGIN; SELECT fencing.show('account/$id', 0);"
		  . "INSERT INTO account VALUES ($id, 100); COMMIT");
	return ($id, "account/$id", next_fence("account/$id"),
		next_fence("account/$id"));
}

# ----------------------------------------------------------------------------
# One after another
# ----------------------------------------------------------------------------

{
	my ($id, $name, $old, $new) = new_account();
	my $pay = "UPDATE account SET balance = balance - 10 WHERE id = $id";

	grows('the lock server counts', $old, $new);
	$alice->query('BEGIN');
	$alice->query(show($name, $old));
	is($alice->query($pay), '', 'the holder writes');
	$alice->query('COMMIT');
	is(balance($id), '90', 'the holder has written');
	like($alice->query($pay), $unfenced,
		'the fence of an earlier transaction does not count');

	$bob->query('BEGIN; ' . show($name, $new) . "; $pay; COMMIT");
	like($alice->query(show($name, $old)), $stale, 'a late holder is refused');
	$alice->query('BEGIN');
	like($alice->query(show($name, $old)), $stale,
		'a late holder is refused in a transaction');
	like($alice->query($pay), qr/25P02/, 'its transaction is over');
	$alice->query('COMMIT');
	is(balance($id), '80', 'a late holder writes nothing');

	# the mark does not depend on the row
	$bob->query('BEGIN; ' . show($name, $new)
		  . "; DELETE FROM account WHERE id = $id; COMMIT");
	like($alice->query(show($name, $old)), $stale,
		'a late holder is refused when the row is gone');
	$bob->query('BEGIN; ' . show($name, $new)
		  . "; INSERT INTO account VALUES ($id, 5); COMMIT");
	like($alice->query(show($name, $old)), $stale,
		'a late holder is refused when the row is there again');

	# statements that name no fence
	foreach my $sql (
		$pay,
		"DELETE FROM account WHERE id = $id",
		'INSERT INTO account VALUES (1000, 1)',
		"INSERT INTO account VALUES ($id, 1) ON CONFLICT (id) DO UPDATE SET balance = 0",
		'COPY account FROM PROGRAM \'echo 1001,1\' CSV')
	{
		my $session = $sql =~ /^COPY/ ? $admin : $bob;

		like($session->query($sql), $unfenced, "refused without a fence: $sql");
	}
	like($admin->query('TRUNCATE account'), $unfenced,
		'TRUNCATE is refused without a fence');
	$bob->query('BEGIN');
	$bob->query(show($name, $new));
	like($bob->query('UPDATE account SET balance = 0 WHERE id = 9'),
		$unfenced, 'the fence of another lock does not count');
	$bob->query('ROLLBACK');
	$bob->query('BEGIN');
	$bob->query(show($name, $new));
	like($bob->query("UPDATE account SET id = 500 WHERE id = $id"),
		$unfenced, 'a row that moves to another lock needs its fence, too');
	$bob->query('ROLLBACK');

	# a rollback also takes back the fence
	my $newest = next_fence($name);

	$alice->query('BEGIN; SAVEPOINT before');
	$alice->query(show($name, $newest));
	$alice->query('ROLLBACK TO before');
	like($alice->query($pay), $unfenced,
		'a fence that was rolled back to a savepoint does not count');
	$alice->query('ROLLBACK');
	is($bob->query(show($name, $new)), '',
		'a fence that was rolled back refuses no smaller fence');

	# as after a restore from a dump, when transaction ids repeat
	$admin->query('BEGIN; UPDATE fencing.mark SET xact = pg_current_xact_id(), '
		  . "started = '2025-01-01' WHERE name = '$name'");
	like($admin->query($pay), $unfenced,
		'a mark of another transaction with the same number does not count');
	$admin->query('ROLLBACK');
	like($bob->query("SELECT fencing.show('$name', NULL)"),
		qr/ERROR:  23502/, 'a fence that is missing is refused');
}

# ----------------------------------------------------------------------------
# Two at once
# ----------------------------------------------------------------------------

# With a mark that exists, and without
foreach my $first (0, 1)
{
	my $title = $first ? 'for the first time' : 'again';

	# the later holder is first
	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		my ($id, $name, $old, $new) = new_account();

		$admin->query("DELETE FROM fencing.mark WHERE name = '$name'")
		  if $first;
		$bob->query('BEGIN');
		$bob->query(show($name, $new));
		$alice->query('BEGIN');
		$alice->start(show($name, $old));
		until_blocked($alice);
		$bob->query("UPDATE account SET balance = 1 WHERE id = $id");
		$bob->query($end);
		if ($end eq 'COMMIT')
		{
			like($alice->answer, $stale,
				"$title: the earlier holder waits, and is refused");
		}
		else
		{
			is($alice->answer, '',
				"$title: after a rollback, the earlier holder writes");
			is( $alice->query(
					"UPDATE account SET balance = 2 WHERE id = $id"),
				'', "$title: its fence counts");
		}
		$alice->query('COMMIT');
		is(balance($id), $end eq 'COMMIT' ? '1' : '2', "$title: the balance");
	}

	# the earlier holder is first
	foreach my $isolation ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
	{
		my ($id, $name, $old, $new) = new_account();

		$admin->query("DELETE FROM fencing.mark WHERE name = '$name'")
		  if $first;
		$alice->query('BEGIN');
		$alice->query(show($name, $old));
		$alice->query("UPDATE account SET balance = 7 WHERE id = $id");
		$bob->query("BEGIN ISOLATION LEVEL $isolation");
		$bob->start(show($name, $new));
		until_blocked($bob);
		$alice->query('COMMIT');
		if ($isolation eq 'READ COMMITTED')
		{
			is($bob->answer, '', "$title: the later holder has waited");
			is($bob->query("SELECT balance FROM account WHERE id = $id"),
				'7', "$title: the later holder sees what the earlier holder has written");
		}
		else
		{
			like($bob->answer, qr/ERROR:  40001/,
				"$title: $isolation: the transaction must be retried");
		}
		$bob->query('ROLLBACK');
	}
}

# Two locks in opposite orders are a deadlock, and nothing worse.
{
	my ($one, $name_one, undef, $fence_one) = new_account();
	my ($two, $name_two, undef, $fence_two) = new_account();

	$alice->query('BEGIN');
	$alice->query(show($name_one, $fence_one));
	$bob->query('BEGIN');
	$bob->query(show($name_two, $fence_two));
	$alice->start(show($name_two, $fence_two));
	until_blocked($alice);
	$bob->start(show($name_one, $fence_one));
	my @answers = ($alice->answer, $bob->answer);

	is(scalar(grep { /ERROR:  40P01/ } @answers),
		1, 'locks in two orders: one transaction is aborted');
	$_->query('ROLLBACK') foreach $alice, $bob;
}

# ----------------------------------------------------------------------------
# Without the trigger
# ----------------------------------------------------------------------------

{
	my ($old, $new) = (next_fence('page/1'), next_fence('page/1'));
	my $write = sub {
		my ($fence, $body) = @_;

		return "UPDATE page SET body = '$body', fence = $fence "
		  . "WHERE id = 1 AND fence <= $fence RETURNING body";
	};

	# the first statement that the page advises
	my ($claim) = $page =~ /^bob=> (UPDATE page SET fence = .*);$/m;
	$claim =~ s/\b43\b/$old/g;
	is($alice->query($claim), 'empty', 'WHERE: a holder reads and writes its fence');

	$bob->query('BEGIN');
	is($bob->query($write->($new, 'bob')), 'bob', 'WHERE: a later holder writes');
	$alice->start($write->($old, 'alice'));
	until_blocked($alice);
	$bob->query('COMMIT');
	is($alice->answer, '', 'WHERE: an earlier holder waits, and writes nothing');
	is($alice->query($write->($old, 'alice')), '', 'WHERE: it still writes nothing');
	is($admin->query('SELECT body FROM page'), 'bob', 'WHERE: the later holder\'s body');

	my $newest = next_fence('page/1');

	$bob->query('BEGIN');
	is($bob->query($write->($new, 'late bob')),
		'late bob', 'WHERE: an earlier holder is first');
	$claim =~ s/\b$old\b/$newest/g;
	$alice->start($claim);
	until_blocked($alice);
	$bob->query('COMMIT');
	is($alice->answer, 'late bob', 'WHERE: a later holder waits, and reads the write');
	is($bob->query($write->($new, 'bob')), '', 'WHERE: then the earlier holder is refused');
	$claim =~ s/\b$newest\b/$new/g;
	is($bob->query($claim), '', 'WHERE: the earlier holder cannot begin again, either');
}

# ----------------------------------------------------------------------------
# Privileges
# ----------------------------------------------------------------------------

foreach my $sql (
	"UPDATE fencing.mark SET fence = 0",
	'DELETE FROM fencing.mark',
	'SELECT * FROM fencing.mark',
	'TRUNCATE account',
	'ALTER TABLE account DISABLE TRIGGER fenced',
	q{CREATE OR REPLACE FUNCTION fencing.show(lock_name text, lock_fence bigint)
		RETURNS void LANGUAGE sql AS ''})
{
	like($bob->query($sql), qr/ERROR:  42501/, "not allowed: $sql");
}
# a table or an operator that the caller has created
$bob->query('CREATE TEMP TABLE mark (name text PRIMARY KEY, fence bigint, '
	  . 'xact xid8, started timestamptz)');
$bob->query('SET search_path = pg_temp, public');
like($bob->query('UPDATE account SET balance = 0 WHERE id = 9'),
	$unfenced, 'a temporary table does not stand for the marks');
$bob->query('RESET search_path');

$managed->safe_psql('postgres',
	'CREATE ROLE eve LOGIN; GRANT USAGE ON SCHEMA fencing TO eve');
my $other = session($managed, 'postgres', 'user=eve');

like($other->query(show('account/9', 1)), qr/ERROR:  42501/,
	'another role cannot show fences');
$_->quit foreach $other, $alice, $bob;

# ----------------------------------------------------------------------------
# The page's program
# ----------------------------------------------------------------------------

SKIP:
{
	my $python = find_python('import psycopg; import sys; '
		  . 'assert sys.version_info >= (3, 11)');

	skip('python3 from 3.11 on with psycopg 3 is not installed', 3)
	  unless $python;
	my ($program) = $page =~ /guard_managed\.pl runs it.*?```python\n(.*?)^```$/ms;
	my $file = PostgreSQL::Test::Utils::tempdir() . '/program.py';

	append_to_file($file, $program);
	local $ENV{PYTHONPATH} = "$top/clients/python";
	local $ENV{PYTHONDONTWRITEBYTECODE} = 1;
	local $ENV{LOCK_SERVER} = $locks->connstr('postgres');
	local $ENV{MANAGED_DATABASE} = $managed->connstr('postgres') . ' user=alice';

	my ($out, $err) = run_command([ $python, $file ]);
	is($out, 'paid 10 of 100', 'the program works') or diag($err);

	# as if a later holder had been there
	$admin->query("UPDATE fencing.mark SET fence = fence * 2 "
		  . "WHERE name = 'account/7'");
	($out, $err) = run_command([ $python, $file ]);
	like($err, qr/LockLost/, 'the program is told that it is late');
	is(balance(7), '90', 'the late program writes nothing');
}

$_->quit foreach $admin, $holder;
$managed->stop;
$locks->stop;
done_testing();
