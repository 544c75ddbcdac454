# A standby grants nothing.  After its promotion it grants locks, with fences
# greater than all fences of its primary, even if the primary's last
# reservations never reached it.
#
# What would break it: state that is made or used during recovery; a session
# that still refuses after the promotion; fences that depend on the sequence
# alone, or on a time coarser than a failover is fast.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Standby;
use Dlock::Test;
use Test::More;

my $primary = new_server('primary', allows_streaming => 1);
my @fences = fence($primary);

my $standby = new_standby($primary, 'standby');

# Every function, with a value for each required argument, except for trigger
# functions and those behind the views
my $calls = q{
	SELECT format('%s %I(%s)',
				  CASE prokind WHEN 'p' THEN 'CALL' ELSE 'SELECT' END, proname,
				  (SELECT string_agg(quote_literal(
							CASE type
							WHEN 'text[]'::regtype THEN '{1}'
							WHEN 'interval'::regtype THEN '1 min'
							WHEN 'regrole'::regtype THEN user::text
							ELSE '1' END), ', ' ORDER BY n)
					 FROM unnest(proargtypes) WITH ORDINALITY AS a (type, n)
					WHERE n <= pronargs - pronargdefaults))
	  FROM pg_proc
	  JOIN pg_depend ON classid = 'pg_proc'::regclass AND objid = pg_proc.oid
	  JOIN pg_extension ON refobjid = pg_extension.oid
	 WHERE deptype = 'e' AND extname = 'dlock'
	   AND NOT proretset AND prorettype <> 'trigger'::regtype
	 ORDER BY 1};

$primary->wait_for_catchup($standby);
my $session = session($standby);
my @calls = split /\n/, $session->query($calls);

# functions about sessions of this server, none of which can wait
my $question = q{SELECT dlock_blocking_pids('1')};
# functions that are not about locks
my %others = map { $_ => 1 } 'SELECT dlock_version()', q{SELECT dlock_role_oid('1')};

cmp_ok(scalar(@calls), '>', 10, 'there are functions');
foreach my $call (grep { $_ ne $question && !$others{$_} } @calls)
{
	like($session->query($call), qr/25006: .*HINT: /s,
		"standby refuses $call");
}
is($session->query($question), '{}', 'nobody waits');
like($session->query('SELECT dlock_version()'), qr/^\d+\.\d+/, 'the library has a version');
is( $session->query('SELECT count(*) FROM dlock_locks'),
	'0', 'dlock_locks is empty');
is( $session->query('SELECT count(*) FROM dlock_leases'),
	'0', 'dlock_leases is empty');
is( $session->query(
		'SELECT acquired, waited, released, wait_time FROM dlock_stats'),
	'0|0|0|00:00:00',
	'dlock_stats is zero');
is($session->query('DISCARD ALL'), '', 'DISCARD ALL passes');

# The standby's numbers must exceed those that the primary gives until the
# promotion.  Each restart makes the primary reserve numbers.
foreach (1 .. 3)
{
	$primary->restart;
	push @fences, fence($primary);
}
grows('fences of the primary grow', @fences);
$primary->wait_for_catchup($standby);

# The standby is cut off from here on, and never gets these reservations.
$standby->append_conf('postgresql.conf', "primary_conninfo = ''");
$standby->restart;
$session->quit;
$session = session($standby);
like($session->query("SELECT dlock_acquire('lock')"),
	qr/25006/, 'standby refuses');
foreach (1 .. 3)
{
	$primary->restart;
	push @fences, fence($primary);
}
$primary->stop('immediate');
$standby->promote;

push @fences, $session->query("SELECT dlock_acquire('lock')");
grows('a session from before the promotion gets a greater fence', @fences);
is($standby->safe_psql('postgres', 'SELECT ticket FROM dlock_locks'),
	$fences[-1], 'the session holds the lock');
$session->quit;
push @fences, fence($standby);
grows('a new session gets a greater fence', @fences);
$standby->restart;
push @fences, fence($standby);
grows('a session after a restart gets a greater fence', @fences);

# Again, with a standby that has received all WAL from a primary whose numbers
# are ahead of the time.
my $next = new_standby($standby, 'next');
$standby->safe_psql('postgres', 'SELECT dlock_advance_ticket((2^51)::bigint)');
push @fences, fence($standby);
cmp_ok($fences[-1], '>=', 1 << 51, 'numbers are ahead of the time');
$standby->wait_for_catchup($next);
$standby->stop('immediate');
$next->promote;
push @fences, fence($next);
grows('fences continue to grow', @fences);

done_testing();
