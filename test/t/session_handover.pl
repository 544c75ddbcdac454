# The next holder of a lock is not blocked by other locks of the previous
# holder's transaction, and sees its writes.
#
# What would break it: a hand-over while that transaction still holds locks, or
# before its writes are visible.  The transaction has many locks to release, so
# that this takes long enough to observe.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $node = new_server('main', conf => "max_locks_per_transaction = 1000\n");
my $admin = session($node);
my $holder = session($node);
my $next = session($node);

$node->safe_psql('postgres', 'CREATE TABLE t AS SELECT 0 AS n');

my %ways = (
	'dlock_xact_acquire, COMMIT' =>
	  [ "SELECT dlock_xact_acquire('lock')", 'COMMIT', 1 ],
	'dlock_xact_acquire, ROLLBACK' =>
	  [ "SELECT dlock_xact_acquire('lock')", 'ROLLBACK', 0 ],
	'dlock_xact_acquire, ROLLBACK TO' => [
		"SAVEPOINT s; SELECT dlock_xact_acquire('lock')", 'ROLLBACK TO s', 0
	],
	'dlock_release_at_commit' => [
		"SELECT dlock_release_at_commit(dlock_acquire('lock'))",
		'COMMIT', 1
	]);

foreach my $way (sort keys %ways)
{
	my ($begin, $end, $writes) = @{ $ways{$way} };
	my @failed;
	my $n = 0;

	$node->safe_psql('postgres', 'UPDATE t SET n = 0');
	foreach my $round (1 .. 20)
	{
		$holder->query("BEGIN; $begin; UPDATE t SET n = n + 1; "
			  . 'SELECT count(pg_advisory_xact_lock(i)) '
			  . 'FROM generate_series(1, 20000) AS i; '
			  . 'LOCK TABLE t');
		$next->start(
			q{DO $$
			BEGIN
				PERFORM dlock_acquire('lock');
				LOCK TABLE t NOWAIT;
				PERFORM pg_advisory_xact_lock(i)
				   FROM generate_series(1, 20000) AS i
				  WHERE NOT pg_try_advisory_xact_lock(i);
			END $$; SELECT n FROM t; SELECT dlock_release_all()});
		$admin->until_waits($next);
		$holder->query($end);
		$n += $writes;
		my $answer = $next->answer;
		push @failed, $answer if $answer ne "$n\n1";
		$holder->query('ROLLBACK') if $end eq 'ROLLBACK TO s';
	}
	is(scalar(@failed), 0, $way) or diag($failed[0]);
}

ok($admin->wait_for('SELECT count(*) = 0 FROM dlock_locks'),
	'nothing is left');
$_->quit foreach $admin, $holder, $next;
done_testing();
