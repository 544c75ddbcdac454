# A primary that is cut off from its synchronous standbys cannot keep alive
# leases that need standbys, however often they are renewed.  When a standby is
# promoted, it gives these leases their full ttl and a quarter again, so no
# lock has two holders at any moment.  A successful renewal gives the full ttl
# on either server.  A renewal that cannot be sure raises an error.
#
# What would break it: a deadline that only renewals move; heartbeats that are
# not sent, or stay in the buffers of the WAL; a server that honours the leases
# in its tables before the standbys have answered; an interrupted wait for
# standbys that leaves the ticket; a ttl that runs while no renewal is
# possible; leases that end because standbys are named; a renewal that
# succeeds, or reports that the lease is gone, without an answer from the
# standbys; a lease that loses the standbys because another session requested
# it at a lower level.
#
# The test takes times before it sends a request and after it gets the answer,
# so a slow machine can only make a promise easier to keep.  But a heartbeat
# must be answered within three quarters of the ttl, so the ttl is long.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Standby;
use Dlock::Test;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(clock_gettime usleep CLOCK_MONOTONIC);

my $ttl = ample(7);
my $primary = new_server('primary', allows_streaming => 1);

my $standby = new_standby($primary, 'standby');
my $conninfo =
  $standby->safe_psql('postgres', 'SHOW primary_conninfo') =~ s/'/''/gr;

sub now
{
	return clock_gettime(CLOCK_MONOTONIC);
}

sub cut_off
{
	$standby->append_conf('postgresql.conf', q{primary_conninfo = ''});
	$standby->reload;
	$standby->poll_query_until('postgres',
		'SELECT count(*) = 0 FROM pg_stat_wal_receiver')
	  or die 'still connected';
	return;
}

sub connected
{
	$primary->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_stat_replication
		   WHERE state = 'streaming' AND sync_state IN ('async', 'quorum')})
	  or die 'not connected';
	return;
}

# Open a lease at a level, with a lock of the same name
my %leases;
my %fences;
my %renewed;	# no later than at its latest renewal

sub open_lease
{
	my ($session, $name, $level, $options) = @_;

	$options //= '';
	$session->query("SET synchronous_commit = $level");
	$leases{$name} =
	  $session->query("SELECT dlock_lease_open('$ttl s' $options)");
	$fences{$name} =
	  $session->query("SELECT dlock_lease_acquire('$name', $leases{$name})");
	like($fences{$name}, qr/^\d+$/, "lease at $level: $name");
	return;
}

#
# Standbys are named while there are leases
#
connected();
my $client = session($primary);
my $admin = session($primary);
open_lease($client, $_, $_)
  foreach 'on', 'local', 'off', 'remote_write', 'remote_apply';

# One repeated request raises the lease's level; the next does not lower it.
open_lease($client, 'raised', 'off');
foreach my $level ('on', 'off')
{
	$client->query("SET synchronous_commit = $level");
	is( $client->query("SELECT dlock_lease_acquire('raised', $leases{raised})"),
		$fences{raised},
		"requested again at $level");
}

# A holder holds, even if standbys named later have not received its grant.
foreach my $names ('nobody', '')
{
	$primary->safe_psql('postgres',
		"ALTER SYSTEM SET synchronous_standby_names = '$names'");
	$primary->reload;
	$admin->wait_for(qq{SELECT setting = '$names' FROM pg_settings
		WHERE name = 'synchronous_standby_names'});
	is($admin->query("SELECT dlock_check('on', $fences{on})"),
		't', "standbys are named '$names': a holder holds");
}

# Loaded leases may be missing on standbys that are named later.
$_->quit foreach $client, $admin;
$primary->restart;
$client = session($primary);
$admin = session($primary);
is($admin->query("SELECT dlock_check('on', $fences{on})"),
	't', 'a lease is loaded');
$primary->safe_psql('postgres',
	q{ALTER SYSTEM SET synchronous_standby_names = 'nobody'});
$primary->reload;
$client->wait_for(q{SELECT setting = 'nobody' FROM pg_settings
	WHERE name = 'synchronous_standby_names'});
$client->start("SELECT dlock_lease_acquire('on', $leases{on})");
poll(
	'the request waits or is answered',
	sub {
		$client->answered
		  || $admin->query(q{SELECT wait_event = 'SyncRep' }
			  . "FROM pg_stat_activity WHERE pid = $client->{pid}") eq 't';
	});
ok(!$client->answered, 'a repeated request waits for standbys');
$admin->query("SELECT pg_cancel_backend($client->{pid})");
like($client->answer, qr/57014/, '... until it is canceled');
$primary->safe_psql('postgres',
	'ALTER SYSTEM RESET synchronous_standby_names');
$primary->reload;
is($client->query("SELECT dlock_lease_acquire('on', $leases{on})"),
	$fences{on}, 'the lease still has its ticket');
connected();
$client->query('SET synchronous_commit = local');

sub renew
{
	my ($name) = @_;
	my $before = now();
	my $answer = $client->query("SELECT dlock_renew($leases{$name})");

	$renewed{$name} = $before if $answer =~ /^\d+$/;
	return $answer;
}

# Renew until the time has passed or a lease is lost.  Return the leases left.
sub renew_for
{
	my ($seconds) = @_;
	my $end = now() + $seconds;
	my @left;

	do
	{
		@left = grep { renew($_) eq '1' } sort keys %leases;
		usleep(50_000);
	} while (now() < $end && @left == keys %leases);
	return join ' ', @left;
}

$primary->safe_psql('postgres',
	q{ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (standby)'});
$primary->reload;
is(renew_for(1.2 * $ttl),
	'local off on raised remote_apply remote_write',
	'naming standbys ends no lease, and none is lost while they answer');
is( $client->query(
		q{SELECT setting FROM pg_settings
		   WHERE name = 'synchronous_standby_names'}),
	'ANY 1 (standby)',
	'the standbys are named');

#
# Without its standbys, a restarted primary does not honour its tables' leases.
#
my $delayed =
  $client->query("SELECT dlock_lease_open('100 ms', delay => '$ttl s')");
my $closed = $client->query("SELECT dlock_lease_acquire('closed', $delayed)");
$admin->wait_for("SELECT delayed FROM dlock_queue_lease WHERE lease = $delayed");
$admin->query('CHECKPOINT');
$primary->stop('immediate');
$_->quit foreach $client, $admin;
cut_off();
$primary->start;
$client = session($primary);
$admin = session($primary);
$client->query("SET statement_timeout = '${ttl}s'");
is($admin->query("SELECT dlock_try_acquire('on') IS NULL"),
	't', 'no other session gets a lock that the tables have');
$admin->start("SELECT dlock_fence('on') = $fences{on}");
like($client->query("SELECT dlock_check('on', $fences{on})"),
	qr/57014/, 'no answer without the standbys, for longer than the ttl');
ok(!$admin->answered, 'a query about the lock gets no answer, either');
$standby->append_conf('postgresql.conf', "primary_conninfo = '$conninfo'");
my $sent = now();
$standby->reload;
is($admin->answer, 't', 'when they answer, the locks are held');
$client->query('RESET statement_timeout');
foreach my $name ('on', 'local')
{
	my ($check, $left) = split /\|/,
	  $client->query(
		"SELECT dlock_check('$name', $fences{$name}), "
		  . "extract(epoch FROM remaining) FROM dlock_leases "
		  . "WHERE lease = $leases{$name}");
	is($check, 't', "$name: the lease is open");
	cmp_ok($left, '>=', $ttl - (now() - $sent),
		'... with its full ttl from then');
}
cmp_ok(
	$client->query(
		"SELECT coalesce(sum(extract(epoch FROM remaining)), 0) "
		  . "FROM dlock_locks('closed')"),
	'>=',
	$ttl - (now() - $sent),
	'a delay begins then, too');
$client->query("SELECT dlock_force_release($closed)");
connected();
is(renew_for(0),
	'local off on raised remote_apply remote_write',
	'all leases are renewed');
$client->query('SET synchronous_commit = local');

#
# The primary is cut off, and the standby promoted
#
# Attached leases, and tickets with a ttl of their own, are no different.
my $attached = session($primary);
open_lease($attached, 'attached', 'on', ', attach => true');
$client->query('SET synchronous_commit = on');
$fences{ttl} = $leases{ttl} =
  $client->query("SELECT dlock_ttl_acquire('ttl', '$ttl s')");

# Nor is a lease that another client requests at a lower level, before or after
# the lease's own client.  That other client waits in an acquire, and gives up.
$fences{again} = $leases{again} =
  $client->query("SELECT dlock_ttl_acquire('again', '$ttl s', owner => 'me')");
my $waiter = session($primary);
$waiter->query('SET synchronous_commit = off');
is( $waiter->query(
		"SELECT dlock_ttl_enqueue('again', '$ttl s', 'nobody', owner => 'me')"),
	$fences{again},
	'requested again at a lower level');
$admin->query("SELECT dlock_acquire('adopted')");
$waiter->start("SELECT dlock_ttl_acquire('adopted', '$ttl s', owner => 'me')");
$admin->until_waits($waiter);
$fences{adopted} = $leases{adopted} =
  $client->query(
	"SELECT dlock_ttl_enqueue('adopted', '$ttl s', 'nobody', owner => 'me')");
$admin->query("SELECT pg_cancel_backend($waiter->{pid})");
like($waiter->answer, qr/57014/, 'the client that waits at a lower level gives up');
$admin->query("SELECT dlock_release('adopted')");
is($client->query("SELECT dlock_wait($fences{adopted})"),
	't', '... and the other client is granted the lock');
$waiter->quit;

# The successors, whose lease does not expire before the end of the test
my %next;
my $long = $client->query("SELECT dlock_lease_open('10min')");
$next{$_} = $client->query("SELECT dlock_lease_enqueue('$_', $long)")
  foreach sort keys %leases;
$client->query('SET synchronous_commit = local');
renew_for(0);
my @all = sort keys %leases;
my @quorum = grep { !/^(local|off)$/ } @all;

# A starting server adds a quarter of the ttl to leases that need standbys.
sub factor
{
	my ($name) = @_;
	return scalar(grep { $_ eq $name } @quorum) ? 1.25 : 1;
}

cut_off();
my $cut = now();
$standby->promote;
my $promoted = session($standby);
$sent = now();
my $answer = $promoted->query(
	q{SELECT string_agg(format('%s %s', lease, extract(epoch FROM remaining)),
						',') FROM dlock_leases}
	  . " WHERE lease <> $long");
my $asked = now();
my %left = map { split / / } split /,/, $answer;
foreach my $name (@all)
{
	my $left = $left{ $leases{$name} } // 'no lease';

	my $full = $ttl * factor($name);
	ok( $left =~ /^[\d.]+$/
		  && $left >= $full - ($asked - $sent)
		  && $left <= $full,
		"promoted: $name has its full ttl"
		  . (factor($name) > 1 ? ' and a quarter' : ''))
	  || diag($left);
}

# A client does not know of the failover, and renews each lease on the old
# primary only.  %last has the last time when the old primary confirmed a
# lease, %first the time when the new primary granted its lock again.  The
# client has many leases to renew, and does not wait long for a standby.
my (%last, %first, %late, @wrong);
$client->query(q{SET statement_timeout = '100ms'});
my (%waits, %unsaid);
my $patience = now() + $PostgreSQL::Test::Utils::timeout_default;
while (keys %first < @all && now() < $patience)
{
	foreach my $name (@all)
	{
		my $before = now();
		my $renewed = renew($name);
		my $held = $client->query("SELECT dlock_check('$name', $fences{$name})");

		# on a slow machine, the lease may have expired by then
		$waits{$name} = 1 if $before >= $cut + $ttl / 4 && $renewed ne '';
		$unsaid{$name} = 1 if $renewed =~ /57014/;
		if ($renewed =~ /^\d+$/ || $held eq 't')
		{
			$last{$name} = now();
			push @wrong, "$name: renewed beyond a quarter of its ttl"
			  if $renewed =~ /^\d+$/
			  && $before >= $cut + $ttl / 4
			  && grep { $_ eq $name } @quorum;
			push @wrong, "$name: honoured beyond its ttl"
			  if $before >= $cut + 1.25 * $ttl && grep { $_ eq $name } @quorum;
		}
		elsif ($renewed eq '')
		{
			push @wrong, "$name: lost" if now() < $renewed{$name} + $ttl;
			$late{$name} = 1;
		}
		next if $first{$name};
		$before = now();
		next
		  if $promoted->query("SELECT dlock_wait($next{$name}, '0')") ne 't';
		$first{$name} = now();
		push @wrong, "$name: granted before the ttl has passed"
		  if $first{$name} < $sent + $ttl * factor($name);
		push @wrong, "$name: two holders"
		  if grep({ $_ eq $name } @quorum)
		  && $client->query("SELECT dlock_check('$name', $fences{$name})") eq
		  't';
	}
	last if @wrong > 100;
	usleep(20_000);
}
$client->query('RESET statement_timeout');
is(join('; ', @wrong), '', 'no lock had two holders, and each renewal counted');
is( join(' ', grep { $waits{$_} && $unsaid{$_} } @quorum),
	join(' ', grep { $waits{$_} } @quorum),
	'if standbys count for a lease, its renewals waited for them');
is(scalar(keys %first), scalar(@all), 'each lock has gone to its successor');
foreach my $name (@quorum)
{
	cmp_ok($last{$name} // 0, '<', $first{$name} // 0,
		"$name: the old holder lost the lock before the next was granted");
	is( $client->query(
			"SELECT dlock_renew($leases{$name}) IS NULL, "
			  . "dlock_check('$name', $fences{$name})"),
		't|f',
		'... and knows that its lease is gone');
	like($client->query("SELECT dlock_guard('$name', $fences{$name})"),
		qr/55L01/, '... and cannot guard');
}
foreach my $name (grep { !$late{$_} } 'local', 'off')
{
	is( $client->query(
			"SELECT dlock_renew($leases{$name}), "
			  . "dlock_check('$name', $fences{$name})"),
		'1|t',
		"$name: needs no standby");
	is( $client->query(
			"BEGIN; SELECT dlock_guard('$name', $fences{$name}); COMMIT"),
		'',
		'... and can guard');
}
grows('fences grow across the promotion',
	$fences{ttl},
	$promoted->query("SELECT dlock_ttl_acquire('new', '10min')"));
my $log = '';
poll(
	'the log reports the attached lease',
	sub {
		$log = slurp_file($primary->logfile);
		return $log =~ /It was attached to process $attached->{pid}\b/;
	});
like(
	$log,
	qr/It was attached to process $attached->{pid}; its last renewal/,
	'its session has not ended');
$attached->quit;
$promoted->quit;

#
# An interrupted wait for standbys undoes the request
#
$client->query('SET synchronous_commit = local');
my $lease = $client->query("SELECT dlock_lease_open('10min')");
my %calls = (
	"dlock_lease_open('10min', info => 'cut')" => 'open',
	"dlock_lease_acquire('cut', $lease)" => 'acquire',
	"dlock_lease_enqueue('cut', $lease)" => 'acquire',
	"dlock_ttl_acquire('cut', '10min')" => 'acquire',
	"dlock_ttl_enqueue('cut', '10min')" => 'acquire',
	"dlock_lease_acquire_all('{cut, cut 2}', $lease)" => 'acquire');
foreach my $call (sort keys %calls)
{
	foreach my $function ('pg_cancel_backend', 'pg_terminate_backend')
	{
		my $session = session($primary);

		$session->start("SELECT $call");
		$admin->wait_for(q{SELECT wait_event = 'SyncRep' }
			  . "FROM pg_stat_activity WHERE pid = $session->{pid}");
		$admin->query("SELECT $function($session->{pid})");
		like(
			$session->answer,
			$function eq 'pg_cancel_backend'
			? qr/57014: canceled while waiting for synchronous replication/
			: qr/57P01|closed the connection/,
			"$function: $call");
		$session->quit;
		backends_gone($session->{pid});
		is( $admin->query(
				q{SELECT (SELECT count(*) FROM dlock_locks
						   WHERE name LIKE 'cut%'),
						 (SELECT count(*) FROM dlock_leases WHERE info = 'cut')}
			),
			'0|0',
			'... leaves nothing');
		$admin->wait_for(
			q{SELECT dlock_try_acquire_all('{cut, cut 2}') IS NOT NULL});
		$admin->query('SELECT dlock_release_all()');
		$admin->wait_for(
			q{SELECT count(*) = 0 FROM dlock_queue WHERE name LIKE 'cut%'});
	}
}
like($client->query("SELECT dlock_lease_acquire('cut', $lease)"),
	qr/^\d+$/, 'a client that does not wait for standbys goes on');

$_->quit foreach $client, $admin;
$standby->stop;
$primary->stop;
done_testing();
