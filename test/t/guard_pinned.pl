# A session releases a lock while its own guarded commit has pinned the lock.
# A callback of another extension can do that.  The lock is handed over when
# the commit is visible, not before, and the session keeps no part of it.
#
# What would break it: a pinned ticket that leaves its lock, so that the
# successor is granted before the write is visible, and the unpin does not find
# the ticket in the lock; a ticket that stays ENDING for ever, because no
# process removes it, even if its session has exited.
#
# No SQL runs at that moment.  So a debugger makes the backend call the
# function while its commit waits for a missing standby.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Debugger;
use Dlock::Lease;
use Dlock::Test;
use Test::More;

my $node = new_server('main',
	conf => "synchronous_commit = local\n"
	  . "wal_level = replica\nmax_wal_senders = 1\n"
	  . 'deadlock_timeout = 10min');
my $admin = session($node);

plan skip_all => 'no debugger that can be attached'
  unless debugger_works($admin);

$node->safe_psql('postgres', 'CREATE TABLE journal (entry text)');
foreach my $acquire ("SELECT dlock_acquire('lock')",
	"SELECT dlock_enqueue('lock', 'c')")
{
	my ($holder, $next) = map { session($node) } 1, 2;
	my $fence = $holder->query($acquire);

	$next->start("SELECT dlock_acquire('lock') > $fence; "
		  . 'SELECT entry FROM journal');
	$admin->until_waits($next);
	commits_hang($node, 1);
	$holder->query('BEGIN; SET LOCAL synchronous_commit = on; '
		  . "SELECT dlock_guard('lock', $fence); "
		  . "INSERT INTO journal VALUES ('guarded')");
	$holder->start('COMMIT');
	poll('the commit hangs', sub { hangs($node, $holder) });

	ok(call_in($holder->{pid}, 'dlock_session_release_all'),
		"$acquire: given back");
	is( $admin->query(
			"SELECT pid = $holder->{pid}, pinned FROM dlock_locks "
			  . 'ORDER BY ticket'),
		"t|t\nf|f",
		'the lock is still pinned');
	ok(!$next->answered, 'the next one waits');

	commits_hang($node, 0);
	is($holder->answer, '', 'the commit is over');
	is($next->answer, "t\nguarded", 'the next one has the lock, and sees the write');
	is($holder->query("SELECT dlock_is_held('lock'), dlock_release_all()"),
		'f|0', 'the session has nothing left');
	is($next->query("SELECT dlock_release('lock')"), 't', 'released');
	is($holder->query("SELECT dlock_try_acquire('lock') > $fence"),
		't', 'the lock is free');
	$_->quit foreach $holder, $next;
	$node->safe_psql('postgres', 'TRUNCATE journal');
}

#
# An unpin can fail because a memory segment cannot be mapped.  Then the
# waiters remove the ticket when its session has exited.  Here an additional
# pin, which nothing removes, stands for the failed unpin.
#
{
	my $holder = session($node);
	my $next =
	  session($node, 'postgres', q{options='-c deadlock_timeout=10ms'});
	my $fence = $holder->query("SELECT dlock_acquire('lock')");
	my $pre_commit = 5;		# XACT_EVENT_PRE_COMMIT

	$holder->query("BEGIN; SELECT dlock_guard('lock', $fence)");
	ok(call_in($holder->{pid}, 'at_xact_end', $pre_commit, 0), 'pinned')
	  foreach 1, 2;
	$next->start("SELECT dlock_acquire('lock') > $fence");
	$admin->until_waits($next);
	$holder->quit;
	is($next->answer, 't', 'a pin that is left over ends with its session');
	$next->quit;
}

$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$admin->quit;
done_testing();
