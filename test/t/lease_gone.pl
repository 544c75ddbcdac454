# A ticket that was reported gone is gone in every answer.  This holds before
# the worker has ended the ticket, and while a guarded commit has pinned it, so
# that its lock stays closed.
#
# What would break it: one check for two questions, "does the ticket hold?" and
# "can the next ticket be granted?", so that an expired lease holds for
# dlock_check() but not for dlock_renew(); an acquire that returns a ticket
# whose lease expired while its row was made durable.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Lease;
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main',
	conf => "synchronous_commit = local\n"
	  . "wal_level = replica\nmax_wal_senders = 1\n"
	  . 'deadlock_timeout = 10min');
my $admin = session($node);

$node->safe_psql('postgres', 'CREATE TABLE journal (entry text)');

# All answers about a ticket, which may also be a lease
sub answers_of
{
	my ($name, $ticket, $lease) = @_;

	return $admin->query("SELECT dlock_renew($lease) IS NOT NULL, "
		  . "(SELECT count(*) FROM dlock_leases WHERE lease = $lease), "
		  . "dlock_check('$name', $ticket), "
		  . "dlock_fence('$name') IS NOT DISTINCT FROM $ticket, "
		  . '(SELECT granted FROM dlock_locks '
		  . "WHERE ticket = $ticket AND NOT pinned), "
		  . '(SELECT granted FROM dlock_locks '
		  . "WHERE ticket = $ticket AND pinned)");
}

#
# The lease runs out while a guarded commit has its ticket pinned.
#
foreach my $kind ('lease', 'ttl')
{
	my ($keeper, $holder, $other, $next) = map { session($node) } 1 .. 4;
	my $ttl = ample(3);
	my ($lease, $ticket);

	if ($kind eq 'lease')
	{
		$lease = $keeper->query(
			"SELECT dlock_lease_open('100ms', attach => true)");
		$ticket = $keeper->query("SELECT dlock_lease_acquire('lock', $lease)");
	}
	else
	{
		$lease = $ticket =
		  $keeper->query("SELECT dlock_ttl_acquire('lock', '$ttl s')");
	}
	is(answers_of('lock', $ticket, $lease), 't|1|t|t|t|',
		"$kind: it holds");
	$next->start("SELECT dlock_acquire('lock') > $ticket; "
		  . 'SELECT entry FROM journal');
	$admin->until_waits($next);
	commits_hang($node, 1);
	$holder->query('BEGIN; SET LOCAL synchronous_commit = on; '
		  . "SELECT dlock_guard('lock', $ticket); "
		  . "INSERT INTO journal VALUES ('guarded')");
	$holder->start('COMMIT');
	poll("$kind: the commit hangs", sub { hangs($node, $holder) });
	$keeper->quit;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_leases');
	is(answers_of('lock', $ticket, $lease), 'f|0|f|f||f',
		"$kind: run out, it does not hold");
	like(
		$other->query("BEGIN; SELECT dlock_guard('lock', $ticket); COMMIT"),
		qr/55L01/,
		"$kind: no session can guard with it");
	like($other->query("SELECT dlock_wait($ticket, '0')"),
		qr/55L01/, "$kind: no session can wait for it");
	is($other->query("SELECT dlock_try_acquire('lock', '10ms') IS NULL"),
		't', "$kind: no other session gets the lock");
	ok(!$next->answered, "$kind: the next one waits");
	commits_hang($node, 0);
	is($holder->answer, '', "$kind: the commit is over");
	is($next->answer, "t\nguarded", "$kind: the next one sees the write");
	$_->quit foreach $holder, $other, $next;
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	$node->safe_psql('postgres', 'TRUNCATE journal');
}

#
# The lease runs out while the acquire waits for its row to be durable, and the
# worker does not end it.
#
foreach my $call ("dlock_ttl_acquire('late', '%s')",
	"dlock_ttl_enqueue('late', '%s', 'c')")
{
	my $client = session($node);

	$admin->query("SELECT dlock_lease_open('1h')");
	worker($admin);
	commits_hang($node, 1);
	$client->start('SET synchronous_commit = on; '
		  . 'SELECT ' . sprintf($call, ample(3) . 's'));
	poll('the acquire waits for a standby', sub { hangs($node, $client) });
	my $stopped = freeze($admin);
	$admin->wait_for('SELECT count(*) = 1 FROM dlock_leases');
	commits_hang($node, 0);
	like($client->answer, qr/55L01/, "$call: lost before it is returned");
	thaw($stopped);
	$admin->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
	$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
	$client->quit;
}

$admin->quit;
done_testing();
