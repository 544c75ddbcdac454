
=pod

=head1 NAME

Dlock::Patroni - a Patroni cluster of three members, each in its own network
with its own member of etcd

=head1 DESCRIPTION

test/ha/run creates four network namespaces, and removes them at the end:
PREFIX-1 to PREFIX-3, one for each member, and PREFIX-0 with a bridge between
them.  The test and its clients run in PREFIX-0, and reach all members at any
time.

A link between two members can be cut in one direction, as in Dlock::Network.

=head1 METHODS

=over

=item Dlock::Patroni->new($prefix, $dir, %options)

Starts all members.  Member N has its data in "$dir/N".  With asynchronous =>
1, commits wait for no standby.  With lax => 1, commits do not wait while
Patroni has named no standby (synchronous_mode_strict is off).  With dcs =>
'etcd', Patroni uses version 2 of etcd's interface.  With dcs => 'etcd3', it
uses version 3, which is the default if it works.  With haproxy => its program,
HAProxy runs in front of the members.  With bin and lib => directories of
programs and libraries below "$dir/1/server", each member has its own server
there.

With clocks => seconds, the members' clocks differ by up to this time.  This
needs faketime => the path of that library.

=item $patroni->node($place)

Returns a member as a PostgreSQL::Test::Cluster, although Patroni starts and
stops it.

=item $patroni->service

Returns all members as one node: its connection string has three hosts, and
leads to the primary.

=item $patroni->proxy

Returns the same through HAProxy, or undef if HAProxy is not installed.

=item $patroni->leader

Returns the place of the primary with the leader key, or undef.

=item $patroni->await_leader(%options)

Waits until a member accepts writes.  With not => $place, the member must be at
another place.  With meanwhile => $sub, calls the sub repeatedly.

=item $patroni->await_whole

Waits until all three members stream, and Patroni has named a synchronous
standby if that is required.

=item $patroni->request($place, $method, $path, $content, $timeout)

Calls the REST API at this place.  Returns the answer in the format of
HTTP::Tiny.

=item $patroni->processes($place, $what)

Returns the process ids of "postgres", "patroni" or "etcd" at this place.

=item $patroni->processes_of($place, $title)

Returns the ids of the server's processes with this title at this place.

=item $patroni->kill($signal, $place, @what)

=item $patroni->start($place, $what)

Starts "patroni" or "etcd" at this place, if it is not running.

=item $patroni->cut($from, $to), cut_etcd($from, $to), heal_all

Drops packets from one member to the other, or only to the other's etcd.

=item $patroni->exchange($place, $library)

Installs this file as dlock's library at this place.  The server uses the file
from its next start on.

=item $patroni->rewound

Returns the number of runs of pg_rewind.

=item Dlock::Patroni::await($what, $sub)

Waits until the sub returns true.  Dies if that takes too long.

=item $patroni->promoted($place)

Returns the time, as in Dlock::History, when this server stopped receiving
before its last promotion.

=back

=cut

package Dlock::Patroni;

use strict;
use warnings FATAL => 'all';

use Cwd qw(abs_path);
use Dlock::History qw(now);
use Dlock::Test;
use File::Basename qw(basename dirname);
use File::Path;
use HTTP::Tiny;
use JSON::PP;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Time::HiRes qw(time usleep);
use Time::Local;

our @places = (1 .. 3);

my $ha = abs_path(dirname(__FILE__) . '/../../ha');

sub new
{
	my ($class, $prefix, $dir, %options) = @_;
	my $self = bless {
		prefix => $prefix,
		dir => $dir,
		pids => {},    # "place what" => process that was started here
		cut => {},     # "from address" => 1
		http => HTTP::Tiny->new(timeout => 2),
		%options
	}, $class;

	$self->{dcs} ||= default_dcs();
	foreach my $place (@places)
	{
		$self->{nodes}[$place] = Dlock::Patroni::Member->new($dir, $place);
		$self->_write_config($place);
		$self->_set_clock($place) if $self->{clocks};
	}
	$self->{service} = Dlock::Patroni::Service->new($self->node(1));
	$self->_start_proxy if $self->{haproxy};
	$self->start($_, 'etcd') foreach @places;
	await('etcd has a leader', sub { defined $self->etcd_leader });
	# The first member must create the cluster.
	$self->start(1, 'patroni');
	$self->await_leader;
	$self->start($_, 'patroni') foreach 2, 3;
	$self->await_whole;
	return $self;
}

# Like poll(), but with a limit by the clock, because a request to a silent
# member takes seconds.
sub await
{
	my ($what, $sub) = @_;
	my $until = now() + 5 * $PostgreSQL::Test::Utils::timeout_default;

	return poll($what, sub {
			die "timed out waiting: $what" if now() > $until;
			return $sub->();
		});
}

sub address
{
	my ($place) = @_;

	return "10.0.0.$place";
}

# etcd has its own address, so that it can be cut off separately.
sub etcd_address
{
	my ($place) = @_;

	return "10.0.0.1$place";
}

# With etcd3, Patroni before 3.0.3 takes the leader key from a new primary when
# the old primary is back in the network.
sub default_dcs
{
	my ($major, $minor, $patch) = `patroni --version` =~ /(\d+)\.(\d+)\.(\d+)/
	  or die 'patroni has no version';

	return $major < 3 || $major == 3 && $minor == 0 && $patch < 3 ? 'etcd' : 'etcd3';
}

# test/run shows the files whose names begin with that of a failed test.
sub log_file
{
	my ($place, $what) = @_;

	return "$PostgreSQL::Test::Utils::log_path/" . basename($0, '.pl')
	  . "_member${place}_$what";
}

sub node { return $_[0]{nodes}[ $_[1] ]; }
sub service { return $_[0]{service}; }
sub proxy { return $_[0]{proxy}; }

sub _write_config
{
	my ($self, $place) = @_;
	my $text = slurp_file("$ha/patroni.yml");
	my $dir = "$self->{dir}/$place";
	my %values = (
		NAME => "member$place",
		ADDRESS => address($place),
		BINDIR => $self->{bin} ? "$dir/server/$self->{bin}" :
		  $self->node($place)->config_data('--bindir'),
		DATA => $self->node($place)->data_dir,
		DIR => $dir,
		USER => scalar getpwuid($<),
		DCS => $self->{dcs},
		# a member that lags by one second of the load must still be electable
		LAG => $self->{asynchronous} ? 64 * 1024**2 : 1024**2,
		SYNCHRONOUS => $self->{asynchronous} ? 'false' : 'true',
		STRICT => $self->{lax} || $self->{asynchronous} ? 'false' : 'true');

	$text =~ s/\@([A-Z]+)\@/$values{$1}/g;
	mkpath("$dir/disk");
	append_to_file("$dir/patroni.yml", $text);
	return;
}

#
# Processes
#

my %commands = (
	etcd => sub {
		my ($self, $place) = @_;
		my $address = etcd_address($place);

		return ('etcd', '--name', "member$place",
			'--data-dir', "$self->{dir}/$place/etcd",
			'--listen-peer-urls', "http://$address:2380",
			'--initial-advertise-peer-urls', "http://$address:2380",
			'--listen-client-urls', "http://$address:2379",
			'--advertise-client-urls', "http://$address:2379",
			'--initial-cluster', join(',',
				map { "member$_=http://" . etcd_address($_) . ':2380' } @places),
			'--heartbeat-interval', '200', '--election-timeout', '1500',
			# the default from 3.5 on: a returning member does not cause an
			# election
			'--pre-vote', '--enable-v2',
			# a slow disk causes none, either
			'--unsafe-no-fsync');
	},
	patroni => sub {
		my ($self, $place) = @_;

		return ('patroni', "$self->{dir}/$place/patroni.yml");
	});

# Returns a member's clock error: 0, -1.5 or 1.5 if clocks may differ by 3 s.
sub _offset
{
	my ($self, $place) = @_;

	return ($self->{clocks} || 0) * (0, 0, -0.5, 0.5)[$place];
}

# Gives another clock to a member's server, but not to its Patroni.  Only
# CLOCK_REALTIME differs.  The monotonic clock stays monotonic.
sub _set_clock
{
	my ($self, $place) = @_;
	my $server = "$self->{dir}/$place/server/$self->{bin}/postgres";
	my $offset = sprintf('%+f', $self->_offset($place));

	rename($server, "$server.real") or die "rename: $!";
	append_to_file($server, <<"END");
#!/bin/bash
export LD_PRELOAD=$self->{faketime} FAKETIME=$offset
export FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_DISABLE_SHM=1
exec -a '$server' '$server.real' "\$@"
END
	chmod(0755, $server) or die "chmod: $!";
	return;
}

sub start
{
	my ($self, $place, $what) = @_;
	my @old = $self->processes($place, $what);

	return if @old;
	my @command = $commands{$what}->($self, $place);
	my $pid = fork() // die "fork: $!";

	if ($pid == 0)
	{
		my $log = log_file($place, $what);

		POSIX::setsid();
		open STDIN, '<', '/dev/null' or die "open: $!";
		open STDOUT, '>>', $log or die "open: $!";
		open STDERR, '>&', \*STDOUT or die "open: $!";
		delete @ENV{ grep { /^PG/ } keys %ENV };
		exec('nsenter', "--net=/run/netns/$self->{prefix}-$place",
			'setpriv', '--inh-caps', '-all', '--ambient-caps', '-all',
			@command) or POSIX::_exit(127);
	}
	$self->{pids}{"$place $what"} = $pid;
	return;
}

sub processes
{
	my ($self, $place, $what) = @_;

	if ($what ne 'postgres')
	{
		my $pid = $self->{pids}{"$place $what"} or return;

		return $pid if waitpid($pid, POSIX::WNOHANG) == 0;
		delete $self->{pids}{"$place $what"};
		return;
	}
	my ($postmaster) = eval {
		slurp_file($self->node($place)->data_dir . '/postmaster.pid') =~ /^(\d+)/;
	} or return;
	my $dir = $self->node($place)->data_dir;

	# The file may be old, and its pid may belong to another process.
	return
	  unless (eval { slurp_file("/proc/$postmaster/cmdline") } // '') =~ /\Q$dir\E/;
	return ($postmaster,
		Dlock::Test::processes(sub { $_[1] == $postmaster && $_[2] ne 'Z' }));
}

sub processes_of
{
	my ($self, $place, $title) = @_;

	return grep {
		(eval { slurp_file("/proc/$_/cmdline") } // '') =~ /: \Q$title\E/
	} $self->processes($place, 'postgres');
}

sub kill
{
	my ($self, $signal, $place, @what) = @_;

	foreach my $what (@what)
	{
		my @pids = $self->processes($place, $what);

		# the postmaster comes first, so that it starts no more children
		CORE::kill('STOP', $pids[0]) if @pids && $signal eq 'KILL';
		CORE::kill($signal, reverse $self->processes($place, $what));
	}
	return;
}

# Starts HAProxy in the clients' network, not in a member's.
sub _start_proxy
{
	my ($self) = @_;
	my $pid = fork() // die "fork: $!";

	if ($pid == 0)
	{
		open STDOUT, '>>', "$self->{dir}/haproxy.log" or die "open: $!";
		open STDERR, '>&', \*STDOUT or die "open: $!";
		exec('setpriv', '--inh-caps', '-all', '--ambient-caps', '-all',
			$self->{haproxy}, '-db', '-f', "$ha/haproxy.cfg")
		  or POSIX::_exit(127);
	}
	$self->{proxy_pid} = $pid;
	$self->{proxy} = Dlock::Patroni::Proxy->new($self->node(1));
	return;
}

sub exchange
{
	my ($self, $place, $library) = @_;
	my $old = "$self->{dir}/$place/server/$self->{lib}/dlock.so";

	# Replace the file by a rename, as packages do: a process that has opened
	# the old file keeps it.
	system('cp', $library, "$old.new") == 0 or die 'cp failed';
	rename("$old.new", $old) or die "rename: $!";
	return;
}

sub stop_all
{
	my ($self) = @_;

	CORE::kill('KILL', $self->{proxy_pid}) if $self->{proxy_pid};
	foreach my $place (@places)
	{
		$self->kill('KILL', $place, 'patroni', 'postgres', 'etcd');
	}
	return;
}

#
# Answers of members
#

sub request
{
	my ($self, $place, $method, $path, $content, $timeout) = @_;
	my $http =
	  $timeout ? HTTP::Tiny->new(timeout => $timeout) : $self->{http};

	return $http->request($method,
		'http://' . address($place) . ":8008/$path",
		defined $content ?
		  { content => encode_json($content),
			headers => { 'content-type' => 'application/json' } } : {});
}

sub leader
{
	my ($self) = @_;

	foreach my $place (@places)
	{
		my ($pid) = $self->processes($place, 'patroni') or next;

		return $place
		  if $self->request($place, 'GET', 'primary')->{status} == 200;
	}
	return undef;
}

sub await_leader
{
	my ($self, %options) = @_;
	my $leader;

	await('there is a leader', sub {
			$options{meanwhile}->() if $options{meanwhile};
			$leader = $self->leader // return 0;
			return 0 if $leader == ($options{not} // 0);
			return $self->asks($leader, 'SELECT NOT pg_is_in_recovery()') eq 't';
		});
	return $leader;
}

# Returns the answer to a request, or an error.
sub asks
{
	my ($self, $place, $sql) = @_;
	my ($out, $err) = ('', '');

	# A stopped server gives no answer.
	eval {
		$self->node($place)->psql('postgres', $sql, stdout => \$out,
			stderr => \$err, timeout => 5);
	};
	return $out // '';
}

sub members
{
	my ($self) = @_;

	foreach my $place (@places)
	{
		my $answer = $self->request($place, 'GET', 'cluster');

		return @{ decode_json($answer->{content})->{members} }
		  if $answer->{success};
	}
	return;
}

sub await_whole
{
	my ($self) = @_;

	await('all members stream', sub {
			my @members = $self->members;
			my $leader = $self->leader;

			usleep(200_000);
			return 0 if @members != @places || !defined $leader;
			return 0 if grep { $_->{state} !~ /^(running|streaming)$/ } @members;
			# Patroni promotes no standby that it has not named in etcd, which
			# it does two seconds after it has named it to the server.
			return 0 unless $self->{asynchronous} ||
			  grep { $_->{role} eq 'sync_standby' } @members;
			return $self->asks($leader,
				"SELECT count(*) FILTER (WHERE state = 'streaming') = 2 "
				  . 'FROM pg_stat_replication '
				  . "WHERE application_name ~ '^member'") eq 't';
		});
	return;
}

sub etcd_leader
{
	my ($self) = @_;

	foreach my $place (@places)
	{
		my $answer = $self->{http}->post(
			'http://' . etcd_address($place) . ':2379/v3/maintenance/status',
			{ content => '{}' });

		next unless $answer->{success};
		my $status = decode_json($answer->{content});

		return $place
		  if ($status->{leader} // '') eq $status->{header}{member_id};
	}
	return undef;
}

sub rewound
{
	my ($self) = @_;
	my @all = map { slurp_file(log_file($_, 'patroni')) } @places;

	return scalar(() = "@all" =~ /pg_rewind: Done!/g);
}

sub promoted
{
	my ($self, $place) = @_;
	my ($line) = reverse grep { /LOG:  redo (?:done|is not required)/ }
	  split /\n/, slurp_file(log_file($place, 'patroni'));
	my ($date, $time, $fraction) =
	  ($line // '') =~ /^(\d+-\d+-\d+) (\d+:\d+:\d+)(\.\d+) /
	  or die "member $place was not promoted";
	my ($year, $month, $day) = split /-/, $date;
	my ($hour, $minute, $second) = split /:/, $time;

	return now() - time() + $fraction - $self->_offset($place) +
	  timegm($second, $minute, $hour, $day, $month - 1, $year);
}

#
# Links
#

sub _run_at
{
	my ($self, $place, @command) = @_;

	return system('nsenter', "--net=/run/netns/$self->{prefix}-$place",
		@command) == 0;
}

sub _cut_address
{
	my ($self, $from, $address) = @_;

	$self->{cut}{"$from $address"} = 1;
	$self->_run_at($from, 'ip', 'neigh', 'replace', $address, 'lladdr',
		'02:00:00:00:00:00', 'dev', 'eth0', 'nud', 'permanent')
	  or die "could not cut the link from $from to $address";
	return;
}

sub cut_etcd
{
	my ($self, $from, $to) = @_;

	return $self->_cut_address($from, etcd_address($to));
}

sub cut
{
	my ($self, $from, $to) = @_;

	$self->_cut_address($from, $_) foreach address($to), etcd_address($to);
	return;
}

sub heal_all
{
	my ($self) = @_;

	foreach my $link (keys %{ $self->{cut} })
	{
		my ($from, $address) = split / /, $link;

		$self->_run_at($from, 'ip', 'neigh', 'del', $address, 'dev', 'eth0')
		  or die "could not heal the link from $from to $address";
	}
	$self->{cut} = {};
	return;
}

package Dlock::Patroni::Member;

our @ISA = ('PostgreSQL::Test::Cluster');

sub new
{
	my ($class, $dir, $place) = @_;
	my $self = PostgreSQL::Test::Cluster->new("member$place");

	$self->{_host} = Dlock::Patroni::address($place);
	$self->{_port} = 5432;
	$self->{_dlock_dir} = "$dir/$place";
	$self->{_dlock_place} = $place;
	return bless $self, $class;
}

# the data may be on a small disk
sub data_dir { return "$_[0]{_dlock_dir}/disk/data"; }
sub logfile { return Dlock::Patroni::log_file($_[0]{_dlock_place}, 'patroni'); }

# no client reads from standbys, unless requested
sub connstr
{
	my ($self, $dbname) = @_;

	return "host=$self->{_host} port=5432 connect_timeout=2 dbname="
	  . ($dbname // 'postgres');
}

package Dlock::Patroni::Service;

our @ISA = ('Dlock::Patroni::Member');

sub new
{
	my ($class, $node) = @_;

	return bless {%$node}, $class;
}

sub connstr
{
	my ($self, $dbname) = @_;

	return 'host=' . join(',', map { Dlock::Patroni::address($_) }
		  @Dlock::Patroni::places)
	  . ' port=5432 target_session_attrs=read-write connect_timeout=2 '
	  . 'tcp_user_timeout=2000 dbname=' . ($dbname // 'postgres');
}

package Dlock::Patroni::Proxy;

our @ISA = ('Dlock::Patroni::Service');

sub connstr
{
	my ($self, $dbname) = @_;

	return 'host=10.0.0.100 port=5000 connect_timeout=2 dbname='
	  . ($dbname // 'postgres');
}

1;
