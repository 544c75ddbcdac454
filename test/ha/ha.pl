# Tests dlock under Patroni.  Members are killed, stopped, cut off from each
# other and from etcd, switched over and restarted, while clients use all of
# dlock.  Each answer to a client must stay true: see Dlock::Checker,
# Dlock::Torture and Dlock::Split for the rules, and test/ha/run for how to run
# this.
#
# A round has a load on the primary, a fault, and a comparison of the server's
# state with the history.  If the old primary runs on beside the new primary,
# half of its clients move to the new primary.  The other clients stay while
# the old primary serves them.  During the whole run, clients.py uses a second
# database.  It connects by a connection string with all members, and by
# HAProxy if that is installed.  A third database begins with the SQL objects
# of version 1.0.  Its leases are never renewed, and are counted.
#
# The seed determines the random choices, but not their times.

use strict;
use warnings FATAL => 'all';

use FindBin;
BEGIN { $0 = $ENV{DLOCK_HA_SHORT} // $0; }    # logs are named after it
use lib "$FindBin::RealBin/../perl";
use Dlock::History qw(now);
use Dlock::Patroni;
use Dlock::PatroniClient;
use Dlock::PatroniReport;
use Dlock::Test;
use List::Util qw(shuffle sum);
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $seed = $ENV{DLOCK_TEST_SEED} || time % 1_000_000;
my $minutes = $ENV{DLOCK_HA_MINUTES} || 10;
my $clients = $ENV{DLOCK_HA_CLIENTS} || 8;
my $leases = $ENV{DLOCK_HA_LEASES} || 1000;
my $asynchronous = $ENV{DLOCK_HA_ASYNC} ? 1 : 0;
my $once = $ENV{DLOCK_HA_ONCE};
my $short = $ENV{DLOCK_HA_SHORT};    # the name of a test in test/t
my $dir = $ENV{DLOCK_HA_DIR} || PostgreSQL::Test::Utils::tempdir_short();
# The libraries of the two versions, the next one first
my @libraries = split / /, $ENV{DLOCK_HA_LIBRARIES} // '';
my @versions = ('99.9');

my $rounds_in_series = 6;
my $begun = now();
my ($over, $patroni, $history, $admin, $report);
my $primary;    # its index
my @left;       # faults to use before one is repeated
my $calls = 0;
my $unasked = 0;    # failovers that no fault asked for
my @problems;

srand($seed);

#
# Members
#

sub one_of
{
	return $_[ int(rand(scalar @_)) ];
}

sub seconds
{
	my ($least, $most) = @_;

	return $least + rand($most - $least);
}

# The duration of a load
sub load_seconds
{
	return $short ? seconds(1, 2) : seconds(3, 6);
}

# Report progress.
sub show
{
	return $short ? note(@_) : diag(@_);
}

sub others
{
	return grep { $_ != $primary } @Dlock::Patroni::places;
}

# The standby that may be promoted
sub synchronous_standby
{
	my ($member) = grep { $_->{role} eq 'sync_standby' } $patroni->members;

	return ($member // { name => 'member' . one_of(others()) })->{name} =~
	  /(\d)/ ? $1 : die;
}

# A session that waits for no standby, so it works even if none answers
sub administrator
{
	my $session = session($patroni->node($primary));

	$session->may_end;
	$session->query('SET synchronous_commit = local');
	return $session;
}

# On a replaced primary, a session that waits for standbys would wait forever.
sub cancel_stuck
{
	my ($session) = @_;

	$session->query('SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity '
		  . "WHERE wait_event = 'SyncRep' AND backend_type = 'client backend' "
		  . "AND application_name ~ '^client_'");
	return;
}

#
# Small faults, during the load
#

sub signal_one
{
	my ($type, $function) = @_;

	$admin->query("SELECT $function(pid) FROM pg_stat_activity "
		  . "WHERE backend_type = '$type' AND (backend_type <> 'client backend' "
		  . "OR application_name ~ '^client_') ORDER BY random() LIMIT 1");
	return;
}

my @small = (
	(sub { signal_one('client backend', 'pg_cancel_backend') }) x 6,
	(sub { signal_one('client backend', 'pg_terminate_backend') }) x 3,
	(sub { signal_one('dlock worker', 'pg_terminate_backend') }) x 2,
	(sub { signal_one('walsender', 'pg_terminate_backend') }),
	(sub { $admin->query('CHECKPOINT') }));

# Patroni may have stopped the primary on its own.
sub is_there
{
	return $admin->query('SELECT 1') eq '1';
}

# Until that time, or until the primary has changed
sub hurt
{
	my ($until) = @_;

	return 0 if now() >= $until || !is_there();
	one_of(@small)->();
	usleep(int(rand(150_000)));
	return 0 unless is_there();
	$history->look($admin);
	return 1;
}

#
# Faults.  "new" says if the old primary may stay primary ("any"), stays
# primary ("same"), is down when the new one comes ("other"), or runs on beside
# it ("beside").
#
# "then" runs when there is a new primary beside the old one.  "after" runs at
# the end, with the index of the old primary.
#

sub stop_member
{
	$patroni->kill('KILL', $primary, 'patroni', 'postgres');
	return;
}

sub switch_over
{
	# Patroni refuses while the standby lags or is not known yet.  It also
	# refuses if the candidate has become the primary.
	Dlock::Patroni::await('switchover', sub {
			my $candidate = $asynchronous ? one_of(others()) : synchronous_standby();
			my $answer;

			return 1 if ($patroni->leader // $primary) != $primary;
			$answer = $patroni->request($primary, 'POST', 'switchover',
				{ leader => "member$primary", candidate => "member$candidate" },
				60);
			return 1 if $answer->{status} == 200;
			usleep(500_000);
			return 0;
		});
	return;
}

sub restart_standbys
{
	foreach my $place (others())
	{
		$patroni->request($place, 'POST', 'restart', {}, 60);
	}
	return;
}

sub cut_all
{
	my ($from, $to) = @_;

	foreach my $place (others())
	{
		$patroni->cut($primary, $place) if $from;
		$patroni->cut($place, $primary) if $to;
	}
	return;
}

sub fill_disk
{
	my $file = "$dir/$primary/disk/filler";

	open my $filler, '>', $file or die "open: $!";
	foreach my $size (65536, 4096)
	{
		while (syswrite($filler, "\0" x $size)) { }
	}
	usleep(int(seconds(500_000, 2_500_000)));
	close $filler;
	unlink $file;
	# The signal may have killed the process.
	$patroni->kill('KILL', $primary, 'postgres');
	return;
}

# The standby has received WAL that it has not applied when it is promoted.
sub hold_up_replay
{
	my $place = synchronous_standby();
	my ($pid) = $patroni->processes_of($place, 'startup');

	kill('STOP', $pid) if $pid;
	usleep(int(seconds(1_000_000, 2_500_000)));
	return sub { kill('CONT', $pid) if $pid };
}

# Upgrade to the other version of dlock: one standby after the other, then a
# switchover, then the former primary.
sub upgrade
{
	foreach my $place (others())
	{
		$patroni->exchange($place, $libraries[0]);
		$patroni->request($place, 'POST', 'restart', {}, 60);
		$patroni->await_whole;
	}
	switch_over();
	return;
}

sub end_upgrade
{
	my ($old) = @_;
	my $node = $patroni->node($primary);

	$patroni->exchange($old, $libraries[0]);
	$patroni->request($old, 'POST', 'restart', {}, 60);
	$patroni->await_whole;
	foreach my $place (@Dlock::Patroni::places)
	{
		my $there = $patroni->asks($place, 'SELECT dlock_version()');

		$history->problem("member $place has version $there")
		  if $there ne $versions[0];
	}
	# The SQL objects may be older than the library, for any time.
	$node->safe_psql('many', 'ALTER EXTENSION dlock UPDATE');
	@libraries = reverse @libraries;
	@versions = reverse @versions;
	return;
}

my %faults = (
	'killed servers' => {
		new => 'any',
		do => sub { $patroni->kill('KILL', $primary, 'postgres') }
	},
	'killed members' => { new => 'other', do => \&stop_member },
	'killed machines' => {
		new => 'other',
		do => sub {
			stop_member();
			$patroni->kill('KILL', $primary, 'etcd');
		}
	},
	'standbys that lag' => {
		new => 'other',
		do => sub {
			my $go_on = hold_up_replay();

			stop_member();
			usleep(int(seconds(0, 2_000_000)));
			$go_on->();
		}
	},
	'unsent WAL' => {
		new => 'other',
		do => sub {
			cut_all(1, 0);
			usleep(int(seconds(1_000_000, 2_500_000)));
			stop_member();
		}
	},
	'switchovers' => { new => 'other', do => \&switch_over },
	'rolling restarts' => {
		new => 'other',
		do => sub { restart_standbys(); $patroni->await_whole; switch_over() }
	},
	'minor upgrades' => {
		new => 'other',
		do => \&upgrade,
		after => \&end_upgrade
	},
	'restarts' => {
		new => 'any',
		do => sub { $patroni->request($primary, 'POST', 'restart', {}, 60) }
	},
	'full disks' => { new => 'any', do => \&fill_disk },
	'killed Patronis' => {
		new => 'beside',
		do => sub { $patroni->kill('KILL', $primary, 'patroni') }
	},
	'zombies' => {
		new => 'beside',
		do => sub { $patroni->kill('STOP', $primary, 'patroni', 'postgres') },
		# Its Patroni may follow later.
		then => sub {
			$patroni->kill('CONT', $primary, 'postgres');
			usleep(int(seconds(0, 3_000_000)));
			$patroni->kill('CONT', $primary, 'patroni');
		}
	},
	'partitions' => { new => 'beside', do => sub { cut_all(1, 1) } },
	'partitions in one direction' => {
		new => 'beside',
		do => sub { cut_all(@{ one_of([ 1, 0 ], [ 0, 1 ]) }) }
	},
	'partitions from etcd' => {
		new => 'beside',
		do => sub {
			$patroni->kill('STOP', $primary, 'etcd');
			$patroni->cut_etcd($primary, $_) foreach others();
		}
	},
	'restarted standbys' => { new => 'same', do => \&restart_standbys },
	'killed standbys' => {
		new => 'same',
		do => sub { $patroni->kill('KILL', one_of(others()), 'postgres') }
	},
	'cut links to a standby' => {
		new => 'same',
		do => sub { $patroni->cut($primary, synchronous_standby()) }
	},
	'killed leaders of etcd' => {
		new => 'same',
		do => sub { $patroni->kill('KILL', $patroni->etcd_leader, 'etcd') }
	});
delete $faults{'full disks'} unless $ENV{DLOCK_HA_DISK};
delete $faults{'minor upgrades'} unless @libraries;
# If the clocks differ, fences are right only if the old primary is down before
# the new one starts.
delete @faults{ grep { $faults{$_}{new} eq 'beside' && $_ ne 'zombies' } keys %faults }
  if $ENV{DLOCK_HA_CLOCKS};
my @wanted = split /,/, $ENV{DLOCK_HA_FAULTS} // '';
foreach my $name (@wanted)
{
	die "no such fault: $name; there are " . join(', ', sort keys %faults) . "\n"
	  unless $faults{$name};
}
@wanted = sort keys %faults unless @wanted;

#
# Rounds
#

sub repair
{
	$patroni->heal_all;
	foreach my $place (@Dlock::Patroni::places)
	{
		$patroni->kill('CONT', $place, 'etcd', 'patroni', 'postgres');
		$patroni->start($place, $_) foreach 'etcd', 'patroni';
	}
	return;
}

# The clients end their sessions.  Otherwise the administrator terminates them.
sub end_sessions
{
	my ($session, $load, @numbers) = @_;

	@numbers = 1 .. $clients unless @numbers;
	my $names = join(', ', map { "'client_$_'" } @numbers);

	append_to_file("$load->{stop}.end.$_", '') foreach @numbers;
	$session->query('SELECT count(pg_terminate_backend(pid)) '
		  . "FROM pg_stat_activity WHERE application_name IN ($names)");
	return;
}

# As many leases as before are left, though no client renews them.
sub count_leases
{
	my ($place) = @_;
	my $node = $patroni->node($place);
	my $since = now();
	my $count = $node->safe_psql('many', 'SELECT count(*) FROM dlock_leases');

	$report->loaded($leases, $leases - $count, now() - $since);
	$history->problem("of $leases leases that nobody renews there are $count")
	  if $count != $leases && !$asynchronous;
	open_leases($place, $leases - $count) if $count < $leases;
	return;
}

# If the last lease is durable, so are those before it.
sub open_leases
{
	my ($place, $count) = @_;

	$patroni->node($place)->safe_psql('many',
		'SET synchronous_commit = off; '
		  . q{SELECT count(dlock_lease_open('1 hour')) }
		  . 'FROM generate_series(2, ' . $count . '); '
		  . 'SET synchronous_commit = remote_apply; '
		  . q{SELECT dlock_lease_open('1 hour')});
	return;
}

# The primary's index, and the start time of its server
sub life
{
	my $place = $patroni->await_leader;

	return $place . ' '
	  . $patroni->asks($place, 'SELECT pg_postmaster_start_time()');
}

# Call the sub, and repeat it if Patroni has stopped the primary meanwhile.  The
# rest of a fault, or a slow machine, sometimes makes Patroni do this.
sub steadily
{
	my ($do) = @_;

	for (1 .. 5)
	{
		my $life = life();
		my $known = @{ $history->{problems} };

		($primary) = $life =~ /^(\d)/;
		return if eval { $do->(); 1 };
		my $error = $@;

		die $error if life() eq $life;
		splice @{ $history->{problems} }, $known;
		$unasked++;
		note "repeated, because the primary was stopped: $error";
	}
	die 'no primary lasts';
}

# Compare the state of the primary with the history.  It may be another primary
# than the one that the clients used.
sub compare
{
	my ($since, $title, $old) = @_;

	steadily(
		sub {
			my $node = $patroni->node($primary);

			# Tickets that were not loaded keep their times.
			$since = $begun
			  if $node->safe_psql('postgres',
				'SELECT pg_postmaster_start_time()') eq $history->{life};
			$node->poll_query_until('postgres',
				'SELECT count(*) = 0 FROM pg_stat_activity '
				  . "WHERE application_name ~ '^client_'")
			  or die 'sessions have not ended';
			count_leases($primary);
			$history->check($node, $since, $title,
				$primary == $old ? 'here' : $asynchronous ? 'nowhere' : 'there');
		});
	$report->lost($history->{lost}) if $primary != $old;
	return;
}

sub note_promotion
{
	my $place = $_[0] // $primary;

	$report->event("member$place is promoted", $patroni->promoted($place));
	return;
}

# Start these clients on the primary.
sub start_load
{
	my ($numbers, @off) = @_;
	my $off = one_of(@off);
	my $old = $primary;
	my $load;

	steadily(
		sub {
			compare($begun, 'before a load', $old)
			  if $primary != $old && $history->{round};
			$old = $primary;
			$admin = administrator();
			$load = $history->start_clients($patroni->node($primary), $numbers,
				off => $off, is_there => \&is_there);
		});
	return $load;
}

# The clients' sessions end with the fault, or at once if the fault has no
# effect.
sub round_of_one
{
	my ($fault, $title, $load, $since) = @_;
	my $old = $primary;

	if ($fault->{new} eq 'same')
	{
		my $until = now() + load_seconds();

		$report->fault_begins;
		$fault->{do}->();
		$report->event($fault->{name});
		$load->run(sub { hurt($until) });
		$load->release(sub { end_sessions($admin, $load) });
	}
	else
	{
		$load->release(
			sub {
				$report->fault_begins;
				$fault->{do}->();
				$report->event($fault->{name});
			});
	}
	$history->read_calls($load);
	$calls += $load->{answers};
	$primary = $patroni->await_leader(
		$fault->{new} eq 'other' ? (not => $old) : ());
	$report->fault_ends($primary != $old);
	note_promotion() if $primary != $old;
	$history->check_round;
	compare($since, $title, $old);
	return;
}

# The old primary may serve half of its clients further on.
sub round_of_two
{
	my ($fault, $title, $load, $since) = @_;
	my $old = $primary;
	my $old_admin = $admin;

	$history->cut_off($load);
	$report->fault_begins;
	$fault->{do}->();
	$report->event($fault->{name});
	my $new = $patroni->await_leader(not => $old);
	$history->fail_over($load);
	$history->{split}{promoted} = $patroni->promoted($new);
	$report->fault_ends(1);
	note_promotion($new);
	$fault->{then}->() if $fault->{then};

	my @movers = (shuffle 1 .. $clients)[ 0 .. ($clients - 1) / 2 ];
	$load->release(sub { end_sessions($old_admin, $load, @movers) }, @movers);
	$history->read_calls($load);
	$history->check_round;
	$primary = $new;
	compare($since, "$title, beside", $old);

	my $second = start_load(\@movers, 0, 30);
	my $until = now() + load_seconds();
	$second->run(
		sub {
			cancel_stuck($old_admin);
			hurt($until);
		});
	$load->release(sub { end_sessions($old_admin, $load) });
	$history->read_calls($load);
	$second->release(sub { end_sessions($admin, $second) });
	$history->read_calls($second);
	$history->check_round;
	$history->check_old unless $asynchronous;
	delete $history->{split};
	$calls += $_->{answers} foreach $load, $second;
	$admin->vanish;
	$admin = $old_admin;
	compare($since, "$title, after", $primary);
	return;
}

# The primary may have changed on its own, because the end of a fault is a
# fault, too.
sub look_for_primary
{
	my ($title) = @_;
	my $old = $primary;

	$primary = $patroni->await_leader;
	return if $primary == $old;
	$unasked++;
	compare($begun, $title, $old) if $history->{round};
	return;
}

sub round
{
	my ($name) = @_;
	my $fault = { %{ $faults{$name} }, name => $name };
	my $old;
	my $title = "series of seed $history->{seed}, round "
	  . ($history->{round} + 1) . ", $name";

	look_for_primary("$title, before");
	my $since = now();
	my $load = start_load([ 1 .. $clients ], 0, 30, 60);
	my $until = now() + load_seconds();
	$load->run(sub { hurt($until) });
	$patroni->await_whole;
	$old = $primary;
	$report->round_begins($name, $fault->{new} eq 'beside');
	($fault->{new} eq 'beside' ? \&round_of_two : \&round_of_one)
	  ->($fault, $title, $load, $since);
	$admin->vanish;
	# The members are no longer needed.
	if (!$short || @left)
	{
		repair();
		$patroni->await_whole;
		$report->event('all members stream');
		# A new primary starts a WAL file of the same number as the last file
		# of the old one.  The disk is small, and WAL is kept by these numbers.
		$patroni->asks($primary, 'SELECT pg_switch_wal()');
	}
	$fault->{after}->($old) if $fault->{after};
	$report->round_ends;
	show sprintf('%4d s: %d calls, %d problems; %s: %s', now() - $begun, $calls,
		$history->{all_problems}, $name, $report->last_round);
	return;
}

sub series
{
	my ($series, $next) = @_;

	$history = Dlock::PatroniHistory->new($seed + $series - 1, $clients);
	$history->{apart} = 1;
	$history->{shorts} = [ 0.2, 2, 2 ];
	if (!$asynchronous)
	{
		$history->{quorum} = 1;
		$history->{levels} = [ 'on', 'on', 'remote_write', 'remote_apply', 'local' ];
	}
	look_for_primary('the beginning of a series');
	steadily(
		sub {
			$patroni->node($primary)->safe_psql('postgres',
				'DROP TABLE IF EXISTS guarded');
			Dlock::Torture::prepare($patroni->node($primary));
		});
	foreach (1 .. $rounds_in_series)
	{
		my $name = $next->() // last;

		round($name);
	}
	look_for_primary("series of seed $history->{seed}, its end");
	$history->check_past;
	steadily(
		sub {
			$history->check_guarded($patroni->node($primary));
			$history->close_all($patroni->node($primary));
		});
	$history->report('at the end of the series');
	push @problems, $history->{all_problems};
	return;
}

sub find_faketime
{
	my ($library) = (glob('/usr/lib/*/faketime/libfaketime.so.1'), undef);

	die "libfaketime is not installed\n" if $ENV{DLOCK_HA_CLOCKS} && !$library;
	return $library;
}

sub find_haproxy
{
	my ($program) = grep { -x } map { "$_/haproxy" } split(/:/, $ENV{PATH}),
	  '/usr/sbin';

	return $program;
}

$patroni = Dlock::Patroni->new($ENV{DLOCK_HA_PREFIX}, $dir,
	asynchronous => $asynchronous, lax => $ENV{DLOCK_HA_LAX},
	dcs => $ENV{DLOCK_HA_DCS}, bin => $ENV{DLOCK_HA_BIN},
	lib => $ENV{DLOCK_HA_LIB}, haproxy => $short ? undef : find_haproxy(),
	clocks => $ENV{DLOCK_HA_CLOCKS}, faketime => find_faketime());
$primary = $patroni->await_leader;
show sprintf '%4d s: all members are up', now() - $begun;
my $node = $patroni->node($primary);
$node->safe_psql('postgres', $_)
  foreach 'CREATE DATABASE service', 'CREATE DATABASE many';
$node->safe_psql($_, 'CREATE EXTENSION dlock') foreach 'postgres', 'service';
$node->safe_psql('many', "CREATE EXTENSION dlock VERSION '1.0'");
push @versions, $node->safe_psql('postgres', 'SELECT dlock_version()');
$node->safe_psql('service', 'CREATE TABLE plain (n integer)');
open_leases($primary, $leases);
$report = Dlock::PatroniReport->new($dir, $asynchronous,
	hosts => $patroni->service->connstr('service'),
	$patroni->proxy ? (haproxy => $patroni->proxy->connstr('service')) : ());

# All faults, in random order, before one is repeated
@left = shuffle @wanted;
my $next = sub {
	@left = shuffle @wanted unless @left || $once;
	return $once || now() <= $over ? pop @left : undef;
};
my $series = 0;

$over = now() + 60 * $minutes;
series(++$series, $next) while $once ? @left : now() <= $over;
push @problems, $report->finish($patroni);

my $lost = sum(@problems);
note sprintf('%d s, seed %d, %d clients, %d calls; %d failovers that no fault '
	  . 'has asked for; pg_rewind was run %d times',
	now() - $begun, $seed, $clients, $calls, $unasked, $patroni->rewound);
note $_ foreach $report->lines;
is($lost, 0, 'nothing was lost, and nothing was wrong');
$patroni->stop_all;
done_testing();
