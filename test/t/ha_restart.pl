# Fences never repeat or decrease, across any kind of restart.  If the sequence
# has gone back, the time keeps fences growing.  If the time has gone back, the
# sequence keeps them growing.
#
# What would break it: numbers used before their reservation is in the WAL on
# disk; a new block that starts at the sequence alone, at the time alone, or at
# a time as coarse as a restart is fast; a reservation that rolls back with the
# transaction, or needs a writable transaction or a worker process.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use List::Util qw(max);
use Test::More;

my $node = new_server('main');
my @fences = map { fence($node) } 1 .. 3;

# Take one fence after each way to end a server.
my %ends = (
	'a clean restart' => sub { $node->restart },
	'an immediate shutdown' => sub { $node->stop('immediate'); $node->start },
	'SIGKILL for the postmaster' => sub { $node->kill9; start_again($node) });

sub fences_grow
{
	my ($when) = @_;

	push @fences, fence($node), fence($node);
	grows("fences grow $when", @fences);
	# each decrease is one failure
	@fences = max(grep { /^\d+$/ } @fences);
}

fences_grow('in a server');
foreach my $end (sort keys %ends)
{
	$ends{$end}->();
	fences_grow("after $end");
}

# A fence is never given again, even if the server died at once and the
# transaction never ended.
foreach my $end (sort keys %ends)
{
	my $holder = session($node);

	$holder->query('BEGIN');
	push @fences, $holder->query("SELECT dlock_acquire('lock')");
	$ends{$end}->();
	$holder->quit;
	fences_grow("after $end with a transaction open");
}

# The sequence goes back, as with an old dump: the time keeps the numbers
# growing.
foreach my $end (sort keys %ends)
{
	$node->safe_psql('postgres', "SELECT setval('dlock_ticket_seq', 1)");
	$ends{$end}->();
	fences_grow("after setval() to 1 and $end");
}

# The sequence is far ahead of the time, as after the clock has gone back: the
# sequence keeps the numbers growing.
my $ahead = 1 << 51;
$node->safe_psql('postgres', "SELECT setval('dlock_ticket_seq', $ahead)");
$node->restart;
fences_grow('after setval() to a number years ahead');
cmp_ok($fences[-1], '>', $ahead, 'the sequence counts if it is ahead');
foreach my $end (sort keys %ends)
{
	$ends{$end}->();
	fences_grow("after setval() to a number years ahead and $end");
}

foreach my $end (sort keys %ends)
{
	$ahead += 1 << 45;
	is($node->safe_psql('postgres', "SELECT dlock_advance_ticket($ahead)"),
		$ahead, 'dlock_advance_ticket() returns the next number');
	fences_grow('after dlock_advance_ticket()');
	$ends{$end}->();
	fences_grow("after dlock_advance_ticket() and $end");
}
is($node->safe_psql('postgres', 'SELECT dlock_advance_ticket(1) > 1'),
	't', 'dlock_advance_ticket() does not go back');
fences_grow('after dlock_advance_ticket() to a smaller number');

# Restrictions by a transaction or a setting make no difference.
$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
$node->restart;
fences_grow('with max_worker_processes = 0');

$node->restart;
push @fences,
  $node->safe_psql('postgres',
	"BEGIN READ ONLY; SELECT dlock_acquire('lock'); COMMIT");
fences_grow('with the first in a READ ONLY transaction');

$node->append_conf('postgresql.conf', 'default_transaction_read_only = on');
$node->restart;
fences_grow('with default_transaction_read_only');
$node->append_conf('postgresql.conf', 'default_transaction_read_only = off');

$node->restart;
push @fences,
  $node->safe_psql('postgres',
	"BEGIN; SELECT dlock_acquire('lock'); ROLLBACK");
fences_grow('with the first in a transaction that rolls back');

# A reservation leaves nothing in the session.
$node->restart;
my $first = session($node);
my $other = session($node);
$first->query('BEGIN');
push @fences, $first->query("SELECT dlock_acquire('lock')");
is($first->query('SELECT pg_current_xact_id_if_assigned() IS NULL'),
	't', 'no transaction id is assigned');
is( $other->query(
		"SELECT count(*) FROM pg_locks WHERE pid = $first->{pid} "
		  . "AND relation = 'dlock_ticket_seq'::regclass"),
	'0',
	'no lock is kept on the sequence');
like(
	$first->query('SELECT lastval()'),
	qr/55000: lastval is not yet defined/,
	'lastval() stays undefined');
$first->quit;

# The sequence goes back below the numbers in memory while the server runs.
# Then the numbers in memory are used up.
$other->query("SELECT setval('dlock_ticket_seq', 1)");
is( $other->query(
		'SELECT count(dlock_release_ticket(dlock_acquire(n::text))) '
		  . 'FROM generate_series(1, 300000) AS n'),
	'300000',
	'numbers are found after setval() to 1 in a running server');
$other->quit;
fences_grow('after setval() to 1 in a running server');

done_testing();
