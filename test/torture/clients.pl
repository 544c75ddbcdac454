# The clients of all languages use one lock at once, in session scope, with a
# ttl, and of a lease, while clients and backends are killed, the server
# restarts, and a proxy cuts connections or delays their data.
#
# A holder (holders/) reports each time when it acted while its client said
# that it holds the lock.  It writes its fence into a table, which accepts only
# greater fences.  What must be true:
#
# - All times of a hold with a lease are before the first time of a later hold.
#   In session scope, the server may have ended a lock before the client can
#   notice: then the table refuses a late write.
# - No write with a guard is late.  Only a lease can guard a transaction of
#   another session.  No two holds have the same fence.
# - Each client goes on after each fault, and ends by itself.  Then the queue is
#   empty.
#
# The seed determines the faults, but not their times.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Go;
use Dlock::Java;
use Dlock::JavaScript;
use Dlock::Program;
use Dlock::Python;
use Dlock::Test;
use File::Copy qw(copy);
use IO::Select;
use IO::Socket::INET;
use List::Util qw(max);
use POSIX qw(_exit);
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

my $seed = $ENV{DLOCK_TEST_SEED} || int(time) % 1_000_000;
my $seconds = 60 * ($ENV{DLOCK_TORTURE_MINUTES} || 2);
my $patience = $PostgreSQL::Test::Utils::timeout_default;
my $holders = "$FindBin::RealBin/holders";
my $clients = "$FindBin::RealBin/../../clients";
my $dir = PostgreSQL::Test::Utils::tempdir;
my (%command, %client, %count, %failed, %hold, @problems);
my ($begun, $node, $proxy, $held_up);

srand($seed);

#
# The holders
#

sub find_commands
{
	my $python = find_python('import setuptools, wheel, pip, psycopg');
	my @java = find_java('postgresql');
	my ($go, $pgx) = find_go($dir);

	if ($python)
	{
		install_packages($python, "$clients/python");
		$command{python} = [ $python, "$holders/holder.py" ];
	}
	if ($ENV{DLOCK_JAVASCRIPT})
	{
		install_javascript($dir);
		copy("$holders/holder.mjs", $dir) or die $!;
		$command{node} = [ 'node', "$dir/holder.mjs" ];
	}
	if (@java)
	{
		add_jar(\@java, "$clients/java", 'dlock-client');
		add_classes(\@java, "$holders/Holder.java");
		$command{java} = [ @java, 'Holder' ];
	}
	if ($go)
	{
		install_go_client($dir, $pgx);
		install_go($dir, $pgx, 'holder/main.go',
			slurp_file("$holders/holder.go"));
		system_or_bail($go, 'build', '-o', "$dir/holder",
			'dlock.org/dlock/holder');
		$command{go} = ["$dir/holder"];
	}
	if (works('ruby', '-e', 'require "pg"'))
	{
		$command{ruby} = [ 'ruby', "-I$clients/ruby/lib", "$holders/holder.rb" ];
	}
	return;
}

sub start_client
{
	my ($name) = @_;
	my $pid = open(my $out, '-|', @{ $command{$name} }, $proxy->{address},
		'127.0.0.1:' . $node->port, int($begun + $seconds))
	  or die "cannot start $name: $!";

	$client{$name} = { pid => $pid, out => $out, rest => '', heard => time };
	return;
}

sub hear
{
	my ($name, $line) = @_;

	if ($line =~ /^held (\w+) (\d+) (\d+)$/)
	{
		my $hold = $hold{$2} //=
		  { client => $name, scope => $1, first => $3, pid => $client{$name}{pid} };

		push @problems, "$name and $hold->{client} have fence $2"
		  if $hold->{pid} != $client{$name}{pid};
		$hold->{last} = $3;
	}
	elsif ($line =~ /^wrote (\w+) (\d+) (\d+)$/)
	{
		$count{ $3 ? 'writes' : 'late writes' }++;
		push @problems, "$name wrote with fence $2 after a later one"
		  if !$3 && $1 ne 'session';
	}
	elsif ($line eq 'done')
	{
		$count{"holds of $name"}++;
	}
	elsif ($line =~ /^failed (.*)/)
	{
		$failed{"$name: $1"}++;
	}
	else
	{
		push @problems, "$name: $line";
	}
	return;
}

# Hears all clients for a moment.  A client that has ended is not in the list
# any more.
sub listen_for
{
	my ($time) = @_;
	my %name = map { $client{$_}{out} => $_ } keys %client;

	foreach my $out (IO::Select->new(map { $_->{out} } values %client)
		->can_read($time))
	{
		my $name = $name{$out};
		my $client = $client{$name};

		$count{'longest silence'} =
		  max($count{'longest silence'} // 0, time - $client->{heard});
		$client->{heard} = time;
		if (!sysread($out, $client->{rest}, 65536, length $client->{rest}))
		{
			close($out);
			push @problems, "$name ended with status $?"
			  unless $? == 0 || $client->{killed};
			delete $client{$name};
			next;
		}
		hear($name, $1) while $client->{rest} =~ s/^(.*)\n//;
	}
	foreach my $name (sort keys %client)
	{
		push @problems, "$name is stuck"
		  if time - $client{$name}{heard} > $patience
		  && !$client{$name}{stuck}++;
	}
	return;
}

#
# The proxy: USR1 cuts all connections, USR2 holds them up, or lets them go on.
#

sub relay
{
	my ($listener, $to) = @_;
	my $select = IO::Select->new($listener);
	my ($cut, $held, %peer) = (0, 0);

	local $SIG{TERM} = 'DEFAULT';
	local $SIG{PIPE} = 'IGNORE';
	local $SIG{USR1} = sub { $cut = 1 };
	local $SIG{USR2} = sub { $held = !$held };
	my $end = sub {
		my ($from) = @_;
		my $other = delete $peer{$from} or return;

		delete $peer{$other};
		foreach my $socket ($from, $other)
		{
			$select->remove($socket);
			close($socket);
		}
	};

	while (1)
	{
		if ($cut)
		{
			$end->($_) foreach grep { $_ != $listener } $select->handles;
			$cut = 0;
		}
		if ($held)
		{
			usleep(20_000);
			next;
		}
		foreach my $from ($select->can_read(0.1))
		{
			my $data;

			if ($from == $listener)
			{
				my $near = $listener->accept or next;
				my $far = IO::Socket::INET->new(PeerAddr => $to) or next;

				@peer{ $near, $far } = ($far, $near);
				$select->add($near, $far);
			}
			elsif ($peer{$from})
			{
				$end->($from)
				  unless sysread($from, $data, 65536)
				  && syswrite($peer{$from}, $data);
			}
		}
	}
	return;
}

sub start_proxy
{
	my $listener =
	  IO::Socket::INET->new(Listen => 100, LocalAddr => '127.0.0.1:0')
	  or die "cannot listen: $!";
	my $pid = fork // die "cannot fork: $!";

	if (!$pid)
	{
		eval { relay($listener, '127.0.0.1:' . $node->port) };
		_exit(1);
	}
	return { pid => $pid, address => '127.0.0.1:' . $listener->sockport };
}

#
# The faults
#

sub kill_client
{
	my @names = sort keys %client or return;
	my $name = $names[ rand @names ];

	$client{$name}{killed} = 1;
	kill 'KILL', $client{$name}{pid};
	listen_for(0.1) while $client{$name};
	start_client($name);
	return;
}

my %faults = (
	'killed clients' => \&kill_client,
	'killed backends' => sub {
		$node->safe_psql(
			'postgres', q{
			SELECT count(pg_terminate_backend(pid)) FROM (
				SELECT pid FROM pg_stat_activity WHERE usename = 'app'
				ORDER BY random() LIMIT 1) AS one});
	},
	'restarts' => sub {
		$node->stop(rand() < 0.5 ? 'fast' : 'immediate');
		$node->start;
	},
	'cuts' => sub {
		kill 'USR1', $proxy->{pid};
	},
	'connections held up' => sub {
		kill 'USR2', $proxy->{pid};
		$held_up = time + 0.5 + rand 6;
	});

sub hurt
{
	my @kinds = sort keys %faults;
	my $kind = $kinds[ rand @kinds ];

	$count{$kind}++;
	$faults{$kind}->();
	return;
}

sub go_on
{
	return unless $held_up;
	kill 'USR2', $proxy->{pid};
	undef $held_up;
	return;
}

# Clocks of clients have steps of a millisecond.
sub find_overlaps
{
	my $earlier;

	foreach my $fence (sort { $a <=> $b } keys %hold)
	{
		my $hold = $hold{$fence};

		push @problems,
		  "$earlier->{client} with a $earlier->{scope} held for "
		  . ($earlier->{last} - $hold->{first})
		  . " us while $hold->{client} did"
		  if $earlier && $earlier->{last} > $hold->{first} + 2000;
		$earlier = $hold
		  if $hold->{scope} ne 'session'
		  && (!$earlier || $hold->{last} > $earlier->{last});
	}
	return;
}

find_commands();
my @names = sort keys %command;

plan skip_all => 'fewer than two clients can be run' if @names < 2;
$node = new_server('main',
	conf => "listen_addresses = '127.0.0.1'\ndeadlock_timeout = '1s'");
$node->safe_psql(
	'postgres', q{
	CREATE ROLE app LOGIN;
	CREATE TABLE proof (fence bigint);
	INSERT INTO proof VALUES (0);
	GRANT SELECT, UPDATE ON proof TO app});
$proxy = start_proxy();
$begun = time;
start_client($_) foreach @names;

my $next = $begun + 5;
while (time < $begun + $seconds)
{
	listen_for(0.1);
	go_on() if $held_up && time > $held_up;
	next if $held_up || time < $next;
	hurt();
	$next = time + 1 + rand 4;
}
go_on();

my $over = time + 2 * $patience;
listen_for(0.1) while %client && time < $over;
push @problems, "$_ did not end" foreach sort keys %client;
kill 'KILL', map { $_->{pid} } values %client;
kill 'KILL', $proxy->{pid};
waitpid($proxy->{pid}, 0);
find_overlaps();

is(join("\n", @problems), '', 'each client is right, and goes on');
ok($count{"holds of $_"}, "$_ had the lock") foreach @names;
ok( $node->poll_query_until(
		'postgres', 'SELECT count(*) = 0 FROM dlock_locks'),
	'nothing is left in the queue');

diag("failures of clients: "
	  . join(', ', map { "$failed{$_} $_" } sort keys %failed));
diag(sprintf '%d minutes, seed %d: %s; %s; %d writes, '
	  . '%d late ones refused; longest silence of a client %d s; %d problems',
	$seconds / 60, $seed,
	join(', ', map { ($count{"holds of $_"} // 0) . " holds of $_" } @names),
	join(', ', map { ($count{$_} // 0) . " $_" } sort keys %faults),
	$count{writes} // 0, $count{'late writes'} // 0,
	$count{'longest silence'} // 0, scalar @problems);
done_testing();
