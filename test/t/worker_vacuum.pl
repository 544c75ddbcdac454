# The lease tables stay small, however many tickets are acquired and released.
# The worker vacuums them, because autovacuum runs too rarely.
#
# What would break it: tables that are not vacuumed, with a dead row for every
# ticket; or vacuums that stop because rows cannot be removed yet.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Dlock::Worker;
use Test::More;

my $node = new_server('main', conf => 'autovacuum = off');
my $client = session($node);

sub vacuums
{
	my ($more_than) = @_;
	return $node->poll_query_until('postgres',
		"SELECT vacuum_count > $more_than FROM pg_stat_user_tables "
		  . "WHERE relname = 'dlock_queue'");
}

come_and_go($client);
ok(vacuums(0), 'the table was vacuumed');
my $size =
  $node->safe_psql('postgres', "SELECT pg_relation_size('dlock_queue')");
foreach my $round (1 .. 3)
{
	come_and_go($client);
	ok(vacuums($round), 'and again');
}
cmp_ok($node->safe_psql('postgres', "SELECT pg_relation_size('dlock_queue')"),
	'<', 2 * $size, 'the table has not grown by released tickets');

# If an old snapshot keeps dead rows, the worker continues.
my $old = session($node);
$old->query('BEGIN ISOLATION LEVEL REPEATABLE READ');
$old->query('SELECT count(*) FROM dlock_queue');
come_and_go($client) foreach 1 .. 2;
$old->query('COMMIT');
$old->quit;
come_and_go($client);

$client->quit;
$node->stop;
done_testing();
