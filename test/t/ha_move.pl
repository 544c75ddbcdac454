# A move to another server by logical replication, step by step as in
# docs/replication.md.  Clients hold locks, and change over as soon as the new
# server accepts them.  No two clients ever surely hold one lock, on either
# server.  Fences and versions keep growing.  Committed changes exist exactly
# once.  A client that uses a number from the old server gets an error, and
# overwrites nothing.  Without the step that raises the numbers, a comparison
# of fences still refuses the smaller fence.
#
# What would break it: a step that is missing from the page, or comes too
# early; versions, reservations or slots that are not copied; triggers that
# block replicated rows, or do not fire after the move.
#
# DLOCK_OLD_INSTALL is a directory with the old server's bin and lib: with it,
# test/upgrade --logical moves to another major.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::History qw(now);
use Dlock::Load;
use Dlock::Move;
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $from = $ENV{DLOCK_OLD_INSTALL};
my %nodes = (
	old => PostgreSQL::Test::Cluster->new(
		'old', $from ? (install_path => $from) : ()),
	new => PostgreSQL::Test::Cluster->new('new'));

foreach my $node (values %nodes)
{
	$node->init(allows_streaming => 'logical');
	$node->append_conf(
		'postgresql.conf', q{
max_connections = 50
wal_retrieve_retry_interval = 100ms
});
	$node->start;
}
note(sprintf 'from %s to %s',
	map { $_->config_data('--version') } @nodes{ 'old', 'new' });

my ($old, $new) = @nodes{ 'old', 'new' };

# ---- The page: its blocks, by the number of the step

my $page = slurp_file("$FindBin::RealBin/../../docs/replication.md");
my ($section) =
  $page =~ /^## To the next major by logical replication\n(.*?)(?:^## |\z)/ms;
my %steps;
my %stored;

foreach my $step ($section =~ /^(\*\*\d\..*?)(?=^\*\*)/msg)
{
	my ($number) = $step =~ /(\d)/;

	push @{ $steps{$number} }, [ $1, $2 ]
	  while $step =~ /run: needs two servers.*?^```(sh|sql)\n(.*?)^```/msg;
}
is_deeply([ sort keys %steps ], [ 1 .. 7 ], 'the page has seven steps');

# Replaces the page's host names and psql variables by this test's values.
sub placed
{
	my ($text) = @_;

	$text =~ s/-h (old|new)\b/sprintf '-h %s -p %d', $nodes{$1}->host, $nodes{$1}->port/ge;
	$text =~ s/host=(old|new)\b/sprintf 'host=%s port=%d', $nodes{$1}->host, $nodes{$1}->port/ge;
	$text =~ s/:'(\w+)'/'$stored{$1}'/g;
	$text =~ s/(?<![:\w]):([a-z]\w*)/$stored{$1}/g;
	return $text;
}

sub statement
{
	my ($node, $sql, $remark) = @_;

	if ($remark =~ /until this is true/)
	{
		poll($sql, sub { $node->safe_psql('shop', placed($sql)) eq 't' });
	}
	elsif ($remark =~ /has to be true/)
	{
		is($node->safe_psql('shop', placed($sql)), 't', "the page's $sql");
	}
	elsif ($sql =~ s/\s*\\gset$//)
	{
		my ($column) = $sql =~ / AS (\w+)$/m;

		$stored{$column} = $node->safe_psql('shop', placed($sql));
	}
	else
	{
		$node->safe_psql('shop', placed($sql));
	}
	return;
}

# A step of the page
sub take_step
{
	my ($number) = @_;

	foreach my $block (@{ $steps{$number} })
	{
		my ($language, $text) = @$block;

		if ($language eq 'sh')
		{
			$text =~ s/^(\w+)/$new->installed_command($1)/gme;
			$text =~ s/\| psql/'| ' . $new->installed_command('psql') . ' -Xq'/ge;
			is(system('bash', '-ec', placed($text) . '1>&2'), 0,
				"the page's commands of step $number");
			next;
		}
		my ($which) = $text =~ s/^-- on the (old|new) server\n// ? $1 : die $text;

		# a comment can precede the end of a statement
		while ($text =~ /\G\s*(\S.*?)(?:;([^\n;]*)\n|( \\gset)\n)/msgc)
		{
			my ($sql, $remark, $gset) = ($1, $2 // '', $3 // '');

			$remark .= $1 if $sql =~ s/    (-- .*)$//m;
			statement($nodes{$which}, "$sql$gset", $remark);
		}
		$text =~ /\G\s*\z/ or die "what is this: $text";
	}
	return;
}

sub ask
{
	my ($node, $sql) = @_;

	return $node->safe_psql('shop', $sql);
}

# As the application
sub client
{
	my ($node) = @_;

	return session($node, 'shop', 'user=app');
}

# ---- Before

$old->safe_psql('postgres',
	'CREATE ROLE app LOGIN; CREATE ROLE other; CREATE DATABASE shop');
ask($old,
	q{ALTER DATABASE shop SET search_path = "$user", public, dlock;
	  CREATE SCHEMA dlock;
	  GRANT USAGE ON SCHEMA dlock TO PUBLIC;
	  CREATE EXTENSION dlock SCHEMA dlock});
ask($old,
	q{CREATE TABLE resource (name text PRIMARY KEY, fence bigint NOT NULL);
	  INSERT INTO resource SELECT name, 0 FROM
		  unnest('{session,transaction,lease,ticket,zombie}'::text[]) AS name;
	  CREATE TRIGGER guard BEFORE UPDATE ON resource
		  FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence');
	  CREATE TABLE done (id serial PRIMARY KEY, name text, fence bigint);
	  CREATE TABLE document (id integer PRIMARY KEY, version integer NOT NULL);
	  CREATE TRIGGER guard BEFORE UPDATE ON document
		  FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('version');
	  INSERT INTO document VALUES (1, 1);
	  GRANT ALL ON ALL TABLES IN SCHEMA public TO app;
	  GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO app;
	  SELECT dlock_reserve('app/', 'app'), dlock_set_slots('semaphore', 2)});
take_step(1);

# A client tries a lock on the new server, so that the new server reserves
# numbers.  The old server reserves greater numbers later.
ask($new, "SELECT dlock_acquire('tried')");
$old->restart;

my $move = Dlock::Move->new($old);
my $load = Dlock::Load->new($move, $old, [ 0 .. 9 ]);

$load->await_each(2);
take_step(2);
$load->await_each(2);

# A client in a known state: it has a lock, a place in a queue and, until its
# deadline, a lease.  It will lose all of them.
my $zombie = client($old);
my $ttl = 4;
my %had = (
	zombie => $zombie->query("SELECT dlock_acquire('zombie')"),
	ticket => $zombie->query("SELECT dlock_enqueue('queued', 'nobody')"));

$zombie->query("UPDATE resource SET fence = $had{zombie} WHERE name = 'zombie'");
$zombie->query('UPDATE document SET version = 2');
$zombie->may_end;
my $deadline = now() + $ttl;

$had{lease} = $zombie->query("SELECT dlock_ttl_acquire('leased', '$ttl s')");

# ---- The switch

take_step(3);
# from now on, any client may already use the new server
$move->go_to($new);
is(ask($old, "SELECT count(*) FROM dlock_locks WHERE scope <> 'lease'"),
	'0', 'no session or transaction holds a lock on the old server');
take_step(4);
take_step(5);
is( ask($new, 'SELECT name, fence FROM resource ORDER BY name'),
	ask($old, 'SELECT name, fence FROM resource ORDER BY name'),
	'the resources are copied');
is( ask($new, 'SELECT array_agg(done ORDER BY id) FROM done'),
	ask($old, 'SELECT array_agg(done ORDER BY id) FROM done'),
	'the finished work is copied');
cmp_ok(
	ask($new, "SELECT dlock_acquire('tried')"),
	'<',
	ask($old, "SELECT dlock_acquire('tried')"),
	'without the next step, numbers would decrease');
take_step(6);
is(ask($new, 'SELECT count(*) FROM dlock_locks'),
	'0', 'before this step, no client had a lock on the new server');
take_step(7);

# ---- Afterwards

my $next = client($new);

$next->query("SELECT dlock_acquire('leased')");
cmp_ok(now(), '>=', $deadline, 'no client got the lock before the old lease had expired');
$load->await_each(3);
ok(!$zombie->answered || $zombie->query('SELECT 1') eq '',
	'the session on the old server has ended');
is($old->psql('shop', 'SELECT 1', extra_params => [ '-U', 'app' ]),
	2, 'the old server refuses connections');
$zombie = client($new);
$zombie->query('SET client_min_messages = error');
is( $zombie->query(
		"SELECT dlock_renew($had{lease}) IS NULL, "
		  . "dlock_release_ticket($had{lease}), "
		  . "dlock_check('zombie', $had{zombie})"),
	't|f|f',
	'a lease, a ticket and a fence of the old server are gone');
like($zombie->query("SELECT dlock_wait($had{ticket}, '0')"),
	qr/ERROR:  55L01/, 'an enqueued ticket of the old server is gone');
like($zombie->query("SELECT dlock_guard('zombie', $had{zombie})"),
	qr/ERROR:  55L01/, 'a fence of the old server guards nothing');
my $fence = $next->query("SELECT dlock_acquire('zombie')");

cmp_ok($fence, '>', $_, 'a new fence is greater') foreach values %had;
is( $next->query(
		"UPDATE resource SET fence = $fence WHERE name = 'zombie'"),
	'', 'the new fence can write the row');
like(
	$zombie->query(
		"UPDATE resource SET fence = $had{zombie} WHERE name = 'zombie'"),
	qr/ERROR:  55L01/,
	'an old fence cannot write the row');
like($zombie->query('UPDATE document SET version = 1'),
	qr/ERROR:  40001/, 'an old version cannot write a row');
is( ask($new,
		q{SELECT count(dlock_try_acquire('semaphore', slots => 5))
			FROM generate_series(1, 5)}),
	'2', 'slots are copied');
fails_with(
	$new, 'shop', "SET ROLE other; SELECT dlock_acquire('app/1')",
	qr/42501.*"app\/"/s,
	'reserved names are closed to others');
$next->quit;

$load->release(
	sub {
		ask($new, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
			  . "WHERE usename = 'app'");
	});
is(join("\n", $move->check), '', 'no lock had two holders, and no number decreased');
foreach my $kind ('session', 'transaction', 'lease', 'ticket')
{
	my @fences = map { $_->[2] } grep { $_->[1] eq $kind } $move->lines('done');
	my $list = join ',', @fences;

	ok( (grep { $_ < $stored{number} } @fences) &&
		  (grep { $_ >= $stored{number} } @fences),
		"$kind: written on both servers");
	is( ask($new, "SELECT count(*) FROM unnest('{$list}'::bigint[]) AS f "
			  . "WHERE f NOT IN (SELECT fence FROM done WHERE name = '$kind')"),
		'0',
		"$kind: all committed work is there");
}
ok($new->poll_query_until('shop', 'SELECT count(*) = 0 FROM dlock_locks'),
	'all locks are free again');

# ---- Step 6 is forgotten: the new server's numbers are at first behind the
# old server's, and then equal.

$new->safe_psql('postgres', 'CREATE DATABASE forgotten');
$new->safe_psql('forgotten',
	q{CREATE EXTENSION dlock;
	  CREATE TABLE resource (fence bigint, what text);
	  CREATE TRIGGER guard BEFORE UPDATE ON resource
		  FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence')});
my $session = session($new, 'forgotten');
my $given = $session->query('SELECT dlock_advance_ticket(1)') + (1 << 40);

$session->query("INSERT INTO resource VALUES ($given + 2, 'of the old server')");
$fence = $session->query("SELECT dlock_acquire('lock')");
cmp_ok($fence, '<', $given, 'the fence is smaller');
like($session->query("UPDATE resource SET fence = $fence"),
	qr/ERROR:  55L01/, 'the row refuses the smaller fence');
is( $session->query(
		"BEGIN; SELECT dlock_guard('lock', $fence); "
		  . "UPDATE resource SET what = 'of nobody'; COMMIT"),
	'', 'a guard accepts the smaller fence');
is( $session->query("SELECT dlock_release('lock'), dlock_advance_ticket($given)"),
	"t|$given", 'numbers begin with a number that the old server has given');
is($session->query("SELECT dlock_ttl_acquire('lock', '1 h')"),
	$given, 'the same number is given again');
is( session($new, 'forgotten')->query(
		"SELECT dlock_guard('lock', $given), dlock_renew($given)"),
	'|1',
	'a client of the old server can use the number');
$session->query("SELECT dlock_release_ticket($given), "
	  . "dlock_advance_ticket($given + 3)");
$fence = $session->query("SELECT dlock_acquire('lock')");
is($session->query("UPDATE resource SET fence = $fence"),
	'', 'after the step, new fences can write the row');
$session->quit;
done_testing();
