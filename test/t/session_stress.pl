# Mutual exclusion under stress: clients read a counter, and write it back
# incremented in a later transaction.  While they hold one lock in between,
# they lose no update, even if many of them are canceled and terminated.
# Without the lock they lose updates.
#
# What would break it: two holders at a time; a lock that is handed over before
# the last holder's transaction has ended; a ticket that stays behind; a lost
# wakeup, because the clients, undisturbed after a while, then never finish.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $clients = 16;
my $updates = 300;    # number of updates by each client
my $nuisances = 300;  # number of cancels and terminates
my $seed = $ENV{DLOCK_TEST_SEED} // 20250101;

note "seed $seed";
srand($seed);

my $node = new_server('main', conf => 'log_statement = none');
my $test = $$;
my $dir = PostgreSQL::Test::Utils::tempdir;
my $connstr = $node->connstr('postgres');
$node->safe_psql(
	'postgres', q{
	CREATE TABLE counter AS SELECT 0 AS value;
	CREATE TABLE log (value integer, fence bigint, client integer)});

# A client's work in one session.  Any error ends the session, and so its hold.
sub write_script
{
	my ($acquire, $release) = @_;

	append_to_file(
		"$dir/script", qq{
$acquire AS fence \\gset
SELECT value + 1 AS next FROM counter \\gset
BEGIN;
UPDATE counter SET value = :next;
INSERT INTO log VALUES (:next, :fence, :client);
COMMIT;
\\echo :client :fence :next
$release AS released \\gset
}) foreach 1 .. 25;
	return;
}

sub count_lines
{
	my ($file) = @_;

	return -e $file ? scalar(split /\n/, slurp_file($file)) : 0;
}

# Runs sessions, in a separate process, until enough updates are acknowledged.
# The sessions write a line for each update to one file.
sub run_client
{
	my ($client) = @_;
	my $acknowledged = "$dir/acknowledged.$client";

	while (count_lines($acknowledged) < $updates && getppid() == $test)
	{
		system("psql -XAtq -v ON_ERROR_STOP=1 -v client=$client "
			  . "-d \"$connstr application_name=client\" -f $dir/script "
			  . ">>$acknowledged 2>>$dir/errors");
	}
	return;
}

# Runs all clients, and sends them up to the given number of signals.  Returns
# how many were sent until the clients finished.
sub run_clients
{
	my ($nuisances) = @_;
	my %running;
	my $signals = 0;
	my $session = session($node);

	# The server warns about a process that has just exited.
	$session->query('SET client_min_messages = error');
	my $written = 0;
	my $deadline;

	foreach my $client (1 .. $clients)
	{
		my $pid = fork() // die "fork: $!";

		if ($pid == 0)
		{
			run_client($client);
			POSIX::_exit(0);
		}
		$running{$pid} = 1;
	}
	while (%running)
	{
		foreach my $pid (keys %running)
		{
			delete $running{$pid} if waitpid($pid, POSIX::WNOHANG) == $pid;
		}
		# Clients may be slow, if they make progress.
		my $size = 0;
		$size += -s $_ foreach glob("$dir/acknowledged.*");
		if (!$deadline || $size > $written)
		{
			$written = $size;
			$deadline = time() + $PostgreSQL::Test::Utils::timeout_default;
		}
		if (time() > $deadline)
		{
			kill('KILL', keys %running);
			die 'timed out waiting for clients to get on';
		}
		if ($signals < $nuisances)
		{
			my $what = rand() < 0.5 ? 'cancel' : 'terminate';
			my $which = rand();

			$signals += $session->query(
				"SELECT count(pg_${what}_backend(pid)) FROM ("
				  . 'SELECT pid, row_number() OVER (ORDER BY pid) AS n, '
				  . 'count(*) OVER () FROM pg_stat_activity '
				  . "WHERE application_name = 'client') AS client "
				  . "WHERE n = 1 + floor($which * count)");
		}
		usleep(10_000);
	}
	$session->quit;
	return $signals;
}

sub acknowledged
{
	return map { split /\n/ } map { slurp_file($_) } glob("$dir/acknowledged.*");
}

# Clients with the lock lose no update.
write_script("SELECT dlock_acquire('counter')",
	"SELECT dlock_release('counter')");
my $signals = run_clients($nuisances);
cmp_ok($signals, '>', 50, "there was a nuisance ($signals signals)");

my @acknowledged = acknowledged();
cmp_ok(scalar(@acknowledged),
	'>=', $clients * $updates, 'updates were acknowledged');
is($node->safe_psql('postgres', 'SELECT value FROM counter'),
	$node->safe_psql('postgres', 'SELECT count(*) FROM log'),
	'no update is lost');
is( $node->safe_psql(
		'postgres', 'SELECT count(DISTINCT value), max(value) FROM log'),
	$node->safe_psql('postgres', 'SELECT value, value FROM counter'),
	'no update is done twice');

my %log =
  map { $_ => 1 } split /\n/,
  $node->safe_psql('postgres',
	q{SELECT client || ' ' || fence || ' ' || value FROM log});
is(scalar(grep { !$log{$_} } @acknowledged),
	0, 'each acknowledged update is there');
is( $node->safe_psql(
		'postgres', q{
	SELECT count(*) FROM
		(SELECT fence > lag(fence) OVER (ORDER BY value) AS grows FROM log) AS f
	 WHERE NOT grows}),
	'0',
	'fences grow in the order of holding');
unlike(
	slurp_file("$dir/errors"),
	qr/(ERROR|FATAL|PANIC|WARNING): (?! canceling statement due to user request| terminating connection due to admin)/,
	'no errors except by the signals');
ok( $node->poll_query_until(
		'postgres', 'SELECT count(*) = 0 FROM dlock_locks'),
	'nothing is left');
note $node->safe_psql('postgres', 'SELECT * FROM dlock_stats');

# Clients without the lock lose updates.
unlink "$dir/script", glob("$dir/acknowledged.*");
$node->safe_psql('postgres', 'TRUNCATE log; UPDATE counter SET value = 0');
write_script('SELECT 0', 'SELECT 0');
run_clients(0);
my $lost = $node->safe_psql('postgres',
	'SELECT count(*) - (SELECT value FROM counter) FROM log');
cmp_ok($lost, '>', 0, "without the lock updates are lost ($lost)");

done_testing();
