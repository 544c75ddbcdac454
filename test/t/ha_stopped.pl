# A stopped primary resumes after its standby was promoted.  The test measures
# how long each server honours a lease, by the level at which the lease was
# opened.  The table in docs/replication.md gives the same times.
#
# What would break it: the old primary honours a lease that counts on standbys
# too long; the new primary grants the lease's lock too early.
#
# The test controls the clock, and advances it by an eighth of the ttl.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Clock;
use Dlock::Lease;
use Dlock::Standby;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

plan skip_all => 'needs Linux and a C compiler' unless clock_is_ours();

my $ttl = 8 * 3600;
my $most = 2;    # number of ttls that the test observes
my @levels = ('off', 'local', 'remote_write', 'on', 'remote_apply');
my %counts = map { $_ => 1 } @levels[ 2 .. 4 ];    # levels at which standbys count
my $page = slurp_file("$FindBin::RealBin/../../docs/replication.md");

# For each level, a database with a lease that holds a lock
sub new_pair
{
	my ($way) = @_;
	my $primary = new_server_of_clock("old_$way", 'max_worker_processes = 32');
	my %fences;

	foreach my $level (@levels)
	{
		$primary->safe_psql('postgres', qq{CREATE DATABASE "$level"});
		$primary->safe_psql($level, 'CREATE EXTENSION dlock');
	}
	my $standby = new_standby($primary, "new_$way",
		start => sub { my ($node) = @_; under_our_clock(sub { $node->start }) });
	count_on($primary, "new_$way");
	foreach my $level (@levels)
	{
		$fences{$level} = $primary->safe_psql($level,
			"SET synchronous_commit = $level; "
			  . "SELECT dlock_ttl_acquire('lock', '$ttl s')");
		like($fences{$level}, qr/^\d+$/, "$way: a lease at $level");
	}
	# Write and send all changes that were answered at "off".
	$primary->safe_psql('postgres', 'CHECKPOINT');
	$primary->wait_for_catchup($standby, 'replay');
	return ($primary, $standby, \%fences);
}

# Does the server honour the lease?  No answer counts as no.
sub honours
{
	my ($session, $fence) = @_;

	return $session->query("SELECT dlock_check('lock', $fence)") eq 't';
}

# Can the lease be renewed?  A renewal that waits for standbys is canceled.
sub renews
{
	my ($session, $admin, $fence) = @_;
	my $pid = $session->{pid};

	$session->start("SELECT dlock_renew($fence)");
	poll(
		'the renewal is answered, or waits',
		sub {
			$session->answered || $admin->query(
				"SELECT wait_event = 'SyncRep' FROM pg_stat_activity "
				  . "WHERE pid = $pid") eq 't';
		});
	$admin->query("SELECT pg_cancel_backend($pid)") unless $session->answered;
	return $session->answer eq '1';
}

# Record when a server first did not honour the lease, in ttls.
sub ends
{
	my ($times, $level, $holds, $time) = @_;

	$times->{$level} //= $time unless $holds;
	return;
}

sub stop_server
{
	my ($node) = @_;
	my $postmaster = $node->{_pid};

	stop_process($postmaster);
	my @children = Dlock::Test::processes(sub { $_[1] == $postmaster });
	stop_process($_) foreach @children;
	return ($postmaster, @children);
}

my %old;        # way => level => until when the old primary honours the lease
my %renewed;    # ... and renews it
my %new;        # the same for the new primary, without renewals
my @beside;     # levels at which both did, although they must not
foreach my $way ('stopped', 'stopped_for_long', 'restarted')
{
	my ($primary, $standby, $fences) = new_pair($way);
	my (@stopped, %clients, $admin);

	$old{$way} = {};
	if ($way =~ /stopped/)
	{
		$admin = session($primary);
		$clients{$_} = session($primary, $_) foreach @levels;
		@stopped = stop_server($primary);
	}
	else
	{
		$primary->stop;
	}
	take_over($standby);
	my %promoted = map { $_ => session($standby, $_) } @levels;
	foreach my $level (@levels)
	{
		ok(honours($promoted{$level}, $fences->{$level}),
			"$way: the new primary honours the lease at $level");
	}
	if (@stopped)
	{
		time_passes(1.25 * $ttl) if $way eq 'stopped_for_long';
		continue_process($_) foreach reverse @stopped;
	}
	else
	{
		under_our_clock(sub { $primary->start });
		$admin = session($primary);
		$clients{$_} = session($primary, $_) foreach @levels;
		# These renewals get no answer.
		foreach my $level (grep { $counts{$_} } @levels)
		{
			ends($old{$way}, $level, 0, 0);
			$clients{$level}->start("SELECT dlock_check('lock', $fences->{$level})");
		}
	}
	if ($way eq 'stopped_for_long')
	{
		# immediately, whichever process reads the clock first
		is( join(' ', grep { honours($clients{$_}, $fences->{$_}) } @levels),
			'', 'stopped for long: no lease is honoured afterwards');
		is( join(
				' ', grep { renews($clients{$_}, $admin, $fences->{$_}) } @levels),
			'', '... or renewed');
	}
	for (my $time = 0; $way ne 'stopped_for_long' && $time <= $most; $time += 1 / 8)
	{
		time_passes($ttl / 8) if $time;
		foreach my $level (@levels)
		{
			my $fence = $fences->{$level};
			my $beside = honours($promoted{$level}, $fence) ? 0 : 1;

			ends($new{$way} //= {}, $level, !$beside, $time);
			next if $way eq 'restarted' && $counts{$level};
			ends($renewed{$way} //= {},
				$level, renews($clients{$level}, $admin, $fence), $time);
			my $held = honours($clients{$level}, $fence);
			ends($old{$way}, $level, $held, $time);
			push @beside, "$way, $level, at $time ttl"
			  if $beside && $held && $counts{$level};
		}
	}
	if ($way eq 'restarted')
	{
		foreach my $client (map { $clients{$_} } grep { $counts{$_} } @levels)
		{
			ok(!$client->answered, 'restarted: no answer without standbys');
			$admin->query("SELECT pg_cancel_backend($client->{pid})");
			like($client->answer, qr/57014/, '... until the call is canceled');
		}
	}
	$_->quit foreach $admin, values %clients, values %promoted;
	$standby->stop;
	$primary->stop('immediate');
}
is("@beside", '', 'if standbys count, the servers never both honour a lease');

# The measured times match the page.
sub until_when
{
	my ($time) = @_;

	return defined $time ? $time == 0 ? 'not at all' : "$time ttl" :
	  'as long as it is renewed';
}

foreach my $level (@levels)
{
	my $renewals = $renewed{stopped}{$level};
	my $line = sprintf '| `%s` | %s | %s | %s |', $level,
	  until_when($old{stopped}{$level})
	  . (defined $renewals ? ", renewals until $renewals ttl" : ''),
	  until_when($old{restarted}{$level}), until_when($new{stopped}{$level});

	is($new{restarted}{$level}, $new{stopped}{$level},
		"$level: the new primary does not know which way it was");
	ok(index($page, "\n$line\n") >= 0, "the page says: $line");
}

done_testing();
