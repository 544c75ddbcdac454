# Clients use all of dlock at once and are hurt at random moments.  Servers die
# and are followed by their standbys, the disk fills up, and the clock jumps.
# Each answer to a client must stay true: see Dlock::Checker and Dlock::Torture
# for the rules, and test/torture/run for how to run this.
#
# A run consists of series.  Each series has its own history, and consists of
# rounds.  In a round, the test hurts clients for some seconds, kills the
# server, and compares its new state with the history.  At the end of a series,
# the test closes all leases, and no ticket may be left.  Some series have
# separate servers: on a small disk, on disks that lose unsynced data, or three
# servers with networks between them, which are cut.
#
# The seed determines the random choices, but not their times.  So the same
# seed gives the same faults in the same order.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::History qw(now);
use Dlock::Network;
use Dlock::Power;
use Dlock::Standby;
use Dlock::Test;
use Dlock::Torture;
use Dlock::WallClock;
use File::Path;
use IPC::Run;
use List::Util qw(max min shuffle sum);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $seed = $ENV{DLOCK_TEST_SEED} || time % 1_000_000;
my $minutes = $ENV{DLOCK_TORTURE_MINUTES} || 2;
my $clients = $ENV{DLOCK_TORTURE_CLIENTS} || 8;
my $disk = $ENV{DLOCK_TORTURE_DISK};
my $namespaces = $ENV{DLOCK_TORTURE_NETWORK};
my $only = $ENV{DLOCK_TORTURE_ONLY} // '';

my $rounds_in_series = 6;
my $forever = 9**9**9;
my $begun = now();
my $over = $begun + 60 * $minutes;
my %count;       # number of each kind of fault
my $nodes = 0;
my $calls = 0;
my ($primary, $standby, $history, $admin);
my $network;     # of the series, if it has one
my @power_ends;  # ends of rounds in which servers lose power
my $unsynced = 0;    # unsynced writes at power losses
my @cuts;        # cut links, and the time to heal each
my @problems;
my %results;
my @slowest;     # seconds, kind of call, the call

srand($seed);
my $clock = wall_clock_is_ours();
note 'clock: not hurt, as there is no compiler' unless $clock;
note 'disk: not hurt, as no file system can be mounted' unless $disk;
note 'networks: not cut, as there are no namespaces' unless $namespaces;
my $power = power_is_ours();
note 'power: not lost, as there is no compiler' unless $power;

my $conf = q{
max_connections = 100
restart_after_crash = on
autovacuum = off
log_statement = none
log_min_messages = warning
wal_writer_delay = 10s
deadlock_timeout = 200ms
fsync = off
# A standby that follows another primary may be far behind.
wal_keep_size = 256MB
# These timeouts use the clock that jumps.
wal_sender_timeout = 0
wal_receiver_timeout = 0
authentication_timeout = 10min
};

sub one_of
{
	return $_[ int(rand(scalar @_)) ];
}

sub seconds
{
	my ($least, $most) = @_;

	return $least + rand($most - $least);
}

#
# Servers
#

# Only CLOCK_REALTIME is moved, because real monotonic clocks do not jump.
sub start
{
	my ($node, @arguments) = @_;

	local %ENV = (%ENV, $clock ? wall_clock() : ());
	return $node->start(@arguments) unless $node->{has_power};
	return with_power($node, sub { $node->start(@arguments) });
}

sub new_primary
{
	my (%params) = @_;
	my $node = PostgreSQL::Test::Cluster->new('server_' . ++$nodes);

	$node->init(allows_streaming => 1, %params);
	$node->{has_power} = $params{has_power};
	$node->append_conf('postgresql.conf', $conf . ($params{conf} // ''));
	if ($params{network})
	{
		$network = Dlock::Network->new($params{network}, $node);
	}
	else
	{
		start($node);
	}
	$node->safe_psql('postgres', 'CREATE EXTENSION dlock');
	Dlock::Torture::prepare($node);
	return $node;
}

sub new_synchronous
{
	my $name = 'server_' . ++$nodes;
	my $node = new_standby(
		$primary, $name,
		start => sub {
			my ($standby) = @_;

			$standby->{has_power} = $primary->{has_power};
			start($standby);
		});

	count_on($primary, $name);
	rmtree($primary->backup_dir . "/$name");
	return $node;
}

sub forget
{
	my ($node) = @_;

	$node->teardown_node if -e $node->data_dir . '/postmaster.pid';
	rmtree($node->data_dir);
	forget_power($node);
	return;
}

# All processes die at once, and unsynced writes are undone.
sub power_loss
{
	my ($node, $all) = @_;

	kill_server($node);
	$unsynced += lose_power($node, $all // one_of(0, 1));
	return;
}

#
# Faults, each during the load
#

sub backends
{
	my ($type) = @_;

	return grep { /^\d+$/ } split /\n/, $admin->query(
		"SELECT pid FROM pg_stat_activity WHERE backend_type = '$type' "
		  . 'AND pid <> pg_backend_pid() ORDER BY backend_start');
}

sub signal_one
{
	my ($type, $function) = @_;
	my $pid = one_of(backends($type)) or return 0;

	$admin->query("SELECT $function($pid)");
	return 1;
}

# A stopped process may hold any lock, so it is continued soon.  A child
# process does this, because this process may itself wait for the stopped one.
sub stop_one
{
	my ($type, $least, $most) = @_;
	my $pid = one_of(backends($type)) or return 0;
	my $time = seconds($least, $most);

	kill('STOP', $pid) == 1 or return 0;
	system("(sleep $time; kill -CONT $pid) >/dev/null 2>&1 &");
	return 1;
}

# Many connections at once, which do little.  Some are killed meanwhile.
sub storm
{
	my @psqls = map
	{
		my $name = one_of('x1', 'x2', 'b1', 'n1');
		my $slots = $name =~ /^n/ ? ', slots => 3' : '';

		IPC::Run::start(
			[
				$primary->installed_command('psql'), '-XAtq',
				'-d', $primary->connstr('postgres'),
				'-c', "SELECT dlock_try_acquire('$name', '50 ms'$slots)",
				'-c', "SELECT dlock_enqueue('$name'$slots)",
				'-c', "SELECT dlock_xact_acquire('b2', '50 ms')",
				'-c', 'SELECT dlock_release_all()'
			],
			'<', \undef, '>', \my $out, '2>&1')
	} 1 .. 15;

	usleep(int(rand(300_000)));
	foreach my $psql (@psqls)
	{
		$psql->kill_kill(coup_d_grace => 'KILL') if rand() < 0.5;
	}
	eval { $_->finish } foreach @psqls;
	return 1;
}

# PostgreSQL's own processes do not survive a jump of more than 24 days: a
# checkpointer with such a sleep time fails an assertion.
sub move_clock
{
	return 0 if !$clock || $network;
	set_wall_clock(one_of(0, 3600, -3600, 86400, -86400, 864000, -7));
	return 1;
}

# Cut one link or two, in one direction or in both, for a short time.
sub cut_links
{
	return 0 unless $network;
	my @links = grep {
		my ($from, $to) = @$_;

		$from != $to && !$network->is_cut($from, $to)
	} map { my $from = $_; map { [ $from, $_ ] } 0 .. 2 } 0 .. 2;
	my $time = now() + seconds(0.1, 1.5);
	my @some = (shuffle @links)[ 0 .. one_of(0, 1, 2, 3) ];

	foreach my $link (grep { defined } @some)
	{
		$network->cut(@$link);
		push @cuts, [ $time, @$link ];
	}
	return 1;
}

sub heal_links
{
	my ($time) = @_;

	$network->heal($_->[1], $_->[2]) foreach grep { $_->[0] <= $time } @cuts;
	@cuts = grep { $_->[0] > $time } @cuts;
	return;
}

# The standby restarts at once and follows again.
sub standby_loses_power
{
	return 0 unless $standby && $standby->{has_power} && rand() < 0.3;
	power_loss($standby);
	poll('standby is back', sub { start($standby, fail_ok => 1) });
	return 1;
}

my @faults = (
	[ 10, 'cancelled calls',
		sub { signal_one('client backend', 'pg_cancel_backend') } ],
	[ 4, 'terminated sessions',
		sub { signal_one('client backend', 'pg_terminate_backend') } ],
	[ 4, 'stopped sessions', sub { stop_one('client backend', 0.05, 0.8) } ],
	[ 3, 'stopped workers', sub { stop_one('dlock worker', 0.05, 1.5) } ],
	[ 3, 'terminated workers',
		sub { signal_one('dlock worker', 'pg_terminate_backend') } ],
	[ 1, 'connection storms', \&storm ],
	[ 2, 'clock steps', \&move_clock ],
	[ 1, 'checkpoints', sub { $admin->query('CHECKPOINT'); 1 } ],
	[ 1, 'vacuums', sub { $admin->query('VACUUM dlock_queue'); 1 } ],
	[ 1, 'reloads', sub { $admin->query('SELECT pg_reload_conf()'); 1 } ],
	[ 1, 'terminated walsenders',
		sub { signal_one('walsender', 'pg_terminate_backend') } ],
	[ 2, 'power losses of standbys', \&standby_loses_power ],
	[ 6, 'cut links', \&cut_links ]);
my @drawn = map { ($_) x $_->[0] } @faults;

sub hurt
{
	my ($until, $answers) = @_;

	my $now = now();

	heal_links($now < $until ? $now : $forever);
	return 0 if $now >= $until;
	if (!$admin->{psql}->pumpable)
	{
		my @log = split /^/, slurp_file($primary->logfile);
		my ($died) = grep { $log[$_] =~ /PANIC|terminated by signal/ }
		  reverse 0 .. $#log;

		# what the process wrote before, and its statement
		$died //= $#log;
		$history->problem(join "\n", 'the server has died of itself',
			@log[ max(0, $died - 20) .. min($#log, $died + 2) ]);
		$admin->vanish;
		poll('server is back', sub { $admin = eval { session($primary) } });
	}
	my (undef, $what, $do) = @{ one_of(@drawn) };

	$count{$what}++ if $do->();
	usleep(int(rand(120_000)));
	$history->look($admin);
	return 1;
}

#
# The ends of rounds
#

sub fill_disk
{
	my $file = "$disk/filler";

	open my $filler, '>', $file or die "open: $!";
	# Fill up the last block, too.
	foreach my $size (65536, 4096)
	{
		while (syswrite($filler, "\0" x $size)) { }
	}
	usleep(int(seconds(500_000, 2_500_000)));
	close $filler;
	unlink $file;
	return;
}

sub kill_a_backend
{
	my @pids = (backends('client backend'), backends('dlock worker'));

	kill('KILL', one_of(@pids)) == 1 or die "no process of @pids";
	backends_gone($admin->{pid});
	return;
}

my %ends = (
	'killed backends' => \&kill_a_backend,
	'killed postmasters' => sub { kill_server($primary, 1) },
	'killed servers' => sub { kill_server($primary) },
	'immediate shutdowns' => sub { $primary->stop('immediate') },
	'fast shutdowns' => sub { $primary->stop('fast') },
	'failovers' => sub {
		my ($sender) = backends('walsender');

		# A change that no standby has received is not acknowledged.
		if ($sender && rand() < 0.75)
		{
			kill('STOP', $sender);
			usleep(int(seconds(200_000, 1_000_000)));
		}
		kill_server($primary);
	},
	'power losses' => sub { power_loss($primary) },
	'power losses of both' => sub {
		power_loss($_) foreach shuffle($primary, $standby);
		poll('standby is back', sub { start($standby, fail_ok => 1) });
	},
	# The standby has lost power before, and has restarted.
	'power losses and failovers' => sub { kill_server($primary) },
	'full disks' => sub {
		fill_disk();
		# The signal may have killed the process.
		if (kill(0, $primary->{_pid}))
		{
			kill_server($primary);
		}
		else
		{
			unlink $primary->data_dir . '/postmaster.pid';
			undef $primary->{_pid};
		}
	});

sub progress
{
	my ($how) = @_;

	# Print directly, because prove may buffer the output for long.
	diag sprintf('%4d s: %d calls, %d faults, %d problems; %s',
		now() - $begun, $calls,
		sum(values %count),
		$history->{all_problems}, $how);
	return;
}

sub round
{
	my ($how) = @_;
	my $off = one_of(0, 30, 60);
	my $until = now() + seconds(4, 9);
	my $since;

	my $fails_over = $how =~ /failovers|both/;

	$standby = new_synchronous() if $fails_over;
	$history->{quorum} = $fails_over ? 1 : 0;
	$admin = session($primary);
	$calls += $history->torture(
		$primary,
		sub { hurt($until, @_) },
		sub {
			# A stopped process dies with the killed ones, but does not notice
			# that its postmaster has gone.
			stop_one('client backend', 30, 30)
			  if $how =~ /servers|failovers|power/ && rand() < 0.5;
			$since = now();
			$ends{$how}->();
		},
		off => $off);
	$admin->vanish;
	$count{$how}++;
	if ($fails_over)
	{
		take_over($standby);
		forget($primary);
		$primary = $standby;
		undef $standby;
	}
	elsif ($how ne 'killed backends')
	{
		poll('server is back', sub { start($primary, fail_ok => 1) });
	}
	$primary->poll_query_until('postgres', 'SELECT true')
	  or die 'server is not back';
	$history->check_round;
	$history->check($primary, $since, "series of seed $history->{seed}, "
		  . "round $history->{round}, $how",
		$fails_over ? 'there' : 'here');
	progress($how);
	return;
}

# Cut the primary off, and replace it.  Returns the time, and the index of the
# new primary.
sub replace_primary
{
	my ($load, $old, @others) = @_;
	my $since;

	$history->cut_off($load);
	foreach my $place (@others)
	{
		$network->cut($old, $place);
		$network->cut($place, $old);
	}
	my $until = now() + seconds(0.3, 1.5);
	while (now() < $until)
	{
		cancel_stuck($admin);
		usleep(20_000);
	}
	my $new = $network->fail_over(
		$old,
		sub {
			$since = now();
			$history->fail_over($load);
		});
	return ($since, $new);
}

# The primary is cut off from its standbys and replaced, while it serves half
# of its clients further on.  The state of the new primary is compared with the
# history.  The other clients continue on the old primary until both are
# killed.
sub partition
{
	my $old = $network->place($primary);
	my @others = grep { $_ != $old } 0 .. 2;
	my @off = (off => one_of(0, 30, 60));
	my $until = now() + seconds(4, 7);
	my $title = "series of seed $history->{seed}, round "
	  . ($history->{round} + 1) . ', partitions';

	$network->set_quorum($primary, one_of(1, 1, 2), @others);
	$admin = administrator($primary);
	my $load = $history->start_clients($primary, [ 1 .. $clients ], @off);
	$load->run(sub { hurt($until, @_) });
	my ($since, $new) = replace_primary($load, $old, @others);

	my @movers = (shuffle 1 .. $clients)[ 0 .. ($clients - 1) / 2 ];
	my $names = join(', ', map { "'client_$_'" } @movers);
	$load->release(
		sub {
			$admin->query('SELECT pg_terminate_backend(pid) '
				  . "FROM pg_stat_activity WHERE application_name IN ($names)");
		},
		@movers);
	$history->read_calls($load);
	$history->check_round;
	my $old_admin = $admin;
	$primary = $network->node($new);
	$history->check($primary, $since, "$title, cut off", 'there');

	$admin = administrator($primary);
	$until = now() + seconds(4, 7);
	my $second = $history->start_clients($primary, \@movers, @off);
	$second->run(
		sub {
			cancel_stuck($old_admin);
			hurt($until, @_);
		});
	$_->vanish foreach $admin, $old_admin;
	$load->release(sub { kill_server($network->node($old)) });
	$history->read_calls($load);
	$second->release(
		sub {
			$since = now();
			kill_server($primary);
		});
	$history->read_calls($second);
	$history->check_round;
	$history->check_old;
	poll('server is back', sub { $network->start($new) });
	$history->check($primary, $since, "$title, then killed", 'here');
	$calls += $_->{answers} foreach $load, $second;
	$count{'partitions'}++;
	progress('partitions');

	forget($network->node($old));
	foreach my $place (@others)
	{
		$network->heal($old, $place);
		$network->heal($place, $old);
	}
	add_standby($old);
	return;
}

# A session that waits for standbys on the old primary would wait forever.
sub cancel_stuck
{
	my ($session) = @_;

	$count{'cancelled calls'} += $session->query(
		'SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity '
		  . "WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'");
	return;
}

# A session that waits for no standby, so it works even if none answers
sub administrator
{
	my ($node) = @_;
	my $session = session($node);

	$session->query('SET synchronous_commit = local');
	return $session;
}

sub add_standby
{
	my ($place) = @_;

	$network->add_standby($place,
		PostgreSQL::Test::Cluster->new('server_' . ++$nodes), $primary);
	return;
}

#
# The run
#

sub end_series
{
	$history->check_past;
	$history->check_guarded($primary);
	$history->close_all($primary);
	$history->report('at the end of the series');
	$results{$_} += $history->{results}{$_} foreach keys %{ $history->{results} };
	my $call = $history->{slowest};

	if ($call && $call->{answer} &&
		$call->{answer} - $call->{begin} > ($slowest[0] // 0))
	{
		@slowest = ($call->{answer} - $call->{begin}, $call->{op},
			"$call->{id} of seed $history->{seed}");
	}
	push @problems, $history->{all_problems};
	return;
}

sub series
{
	my ($series, $rounds, @ends) = @_;
	my @left;

	$history = Dlock::Torture->new($seed + $series - 1, $clients);
	if ($network)
	{
		$history->{quorum} = $history->{apart} = 1;
		$history->{levels} = [ 'on', 'on', 'remote_write', 'remote_apply', 'local' ];
		$history->{shorts} = [ 0.2, 2, 2 ];
	}
	foreach (1 .. $rounds)
	{
		@left = sort { rand() <=> 0.5 } @ends unless @left;
		my $how = pop @left;
		$how eq 'partitions' ? partition() : round($how);
		last if now() > $over && $_ >= 2;
	}
	end_series();
	return;
}

sub series_on_full_disk
{
	my ($series) = @_;

	$primary = new_primary(
		extra => [ '--waldir', "$disk/wal", '--wal-segsize', '1' ],
		conf => "max_wal_size = 4MB\nmin_wal_size = 2MB\nwal_keep_size = 0\n");
	mkdir "$disk/tables" or die "mkdir: $!";
	$primary->safe_psql('postgres', $_) foreach
	  "CREATE TABLESPACE small LOCATION '$disk/tables'",
	  'ALTER TABLE dlock_queue SET TABLESPACE small',
	  'ALTER INDEX dlock_queue_pkey SET TABLESPACE small';
	series($series, 3, 'full disks');
	$primary->stop;
	forget($primary);
	rmtree("$disk/$_") foreach 'wal', 'tables';
	return;
}

# With fsync = off, the last answer is lost and nothing else is.  So Power.pm
# loses unsynced writes and keeps synced ones.
sub loses_what_is_not_synced
{
	my @fences;

	foreach my $fsync ('on', 'off')
	{
		$primary->append_conf('postgresql.conf', "fsync = $fsync");
		$primary->reload;
		my $session = session($primary);
		$session->wait_for("SELECT current_setting('fsync') = '$fsync'");
		push @fences, $session->query("SELECT dlock_ttl_acquire('$fsync', '1h')");
		$session->quit;
	}
	power_loss($primary, 1);
	$primary->append_conf('postgresql.conf', 'fsync = on');
	poll('server is back', sub { start($primary, fail_ok => 1) });
	my $session = session($primary);
	is($session->query('SELECT ticket FROM dlock_locks'),
		$fences[0], 'a power loss takes what was not synced, and no more');
	$session->query("SELECT dlock_lease_close($fences[0])");
	$session->quit;
	return;
}

sub series_of_power_losses
{
	my ($series) = @_;

	$primary = new_primary(has_power => 1, conf => "fsync = on\n");
	loses_what_is_not_synced();
	series($series, 3, @power_ends);
	$primary->stop;
	forget($primary);
	return;
}

# The clocks are right in this series, because fences depend on them if a
# replaced primary runs on.
sub series_of_partitions
{
	my ($series) = @_;

	$primary = new_primary(network => $namespaces);
	add_standby($_) foreach 1, 2;
	series($series, 2, 'partitions');
	forget($network->node($_)) foreach 0 .. 2;
	undef $network;
	return;
}

my $server = new_primary();
my @kinds =
  grep { !/full disks|partitions|power/ && /(?:$only)/ } sort keys %ends;
@power_ends = grep { $power && /power/ && /(?:$only)/ } sort keys %ends;
my @plan = (
	@kinds ? sub {
		$primary = $server;
		series($_[0], $rounds_in_series, @kinds);
		$server = $primary;
	} : (),
	$disk && 'full disks' =~ /(?:$only)/ ? \&series_on_full_disk : (),
	@power_ends ? \&series_of_power_losses : (),
	$namespaces && 'partitions' =~ /(?:$only)/ ? \&series_of_partitions : ());
my $series = 0;

die "no round ends in this way: $only" unless @plan;
do
{
	my $next = $plan[ $series % @plan ];

	$next->(++$series);
} while (now() < $over);

my $lost = sum(@problems);
note sprintf(
	'%d s, seed %d, %d clients, %d calls, the slowest took %.1f s: %s %s',
	now() - $begun, $seed, $clients, $calls, @slowest);
note "faults: $count{$_} $_" foreach sort keys %count;
note 'answers: ' . join(', ', map { "$results{$_} $_" } sort keys %results);
note "writes that were not synced: $unsynced" if $unsynced;
note "lost, or wrong: $lost";
is($lost, 0, 'nothing was lost');

# A client that acquires nothing can lose nothing.  But some kinds are rare,
# and the rounds of one kind may be too few for them.
is( join(
		' ',
		grep { !$results{$_} } 'acquire', 'acquire_all', 'check', 'close',
		'downgrade', 'end_block', 'enqueue', 'force', 'guard',
		'lease_acquire_all', 'open', 'protect', 'reenter', 'release',
		'release_all', 'release_at_commit', 'release_ticket', 'renew',
		'retime', 'set_info', 'wait', 'write'),
	'', 'calls of all kinds have succeeded')
  if $only eq '';
cmp_ok($results{'error 57014'} // 0, '<=', $count{'cancelled calls'} // 0,
	'no call was cancelled that nobody has cancelled');

$server->stop;
done_testing();
