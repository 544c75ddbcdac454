
=pod

=head1 NAME

Dlock::Network - three servers, each in its own network, and links between them

=head1 DESCRIPTION

test/torture/run creates three network namespaces, PREFIX-0 to PREFIX-2, with a
link between each pair, and removes them at the end.  Each server runs in one
of them, its I<place>, and reaches the other servers only over these links.
Clients use Unix sockets, which do not depend on networks, so they reach every
server at any time.

To cut a link in one direction, the other end gets a wrong hardware address:
packets are lost without an error, as with a broken switch.  Connections
continue once the link is healed, because TCP retransmits.

=head1 METHODS

=over

=item Dlock::Network->new($prefix, $node)

Takes a node that is not started yet.  It becomes the primary, at place 0.

=item $network->start($place)

Starts the server at this place, without this process's privileges over
networks.  Returns false if the start fails.

=item $network->place($node), node($place)

=item $network->add_standby($place, $node, $primary)

Creates a standby of the node $primary, and starts it.

=item $network->set_quorum($primary, $count, @places)

Lets the primary wait for this number of the standbys at these places.  Returns
when all of these standbys have caught up.

=item $network->fail_over($old, $sub)

Acts like an HA tool if the primary is unreachable: both standbys stop
receiving, the more advanced standby is promoted, and the other standby follows
it.  Calls the sub before the promotion.  Returns the new primary's place.

=item $network->cut($from, $to), is_cut($from, $to), heal($from, $to)

Drops packets in this direction, tells if they are dropped, or stops dropping
them.

=back

=cut

package Dlock::Network;

use strict;
use warnings FATAL => 'all';

use File::Path;
use PostgreSQL::Test::Utils;

my $conf = q{
listen_addresses = '*'
wal_retrieve_retry_interval = 100ms
wal_sender_timeout = 3s
wal_receiver_timeout = 3s
};

sub new
{
	my ($class, $prefix, $node) = @_;
	my $self = bless { prefix => $prefix, nodes => [$node], cut => {} }, $class;

	$node->append_conf('postgresql.conf', $conf);
	$node->append_conf('pg_hba.conf',
		'host replication all 10.0.0.0/16 trust');
	$self->start(0) or die 'could not start a server in its network';
	return $self;
}

sub node
{
	my ($self, $place) = @_;

	return $self->{nodes}[$place];
}

sub place
{
	my ($self, $node) = @_;

	return (grep { ($self->node($_) // 0) == $node } 0 .. 2)[0];
}

# Returns a place's address on its link to another place.
sub _address
{
	my ($place, $other) = @_;

	return '10.0.' . ($place + $other) . '.' . ($place + 1);
}

sub _run_at
{
	my ($self, $place, @command) = @_;

	return system_log('nsenter', "--net=/run/netns/$self->{prefix}-$place",
		@command) == 0;
}

sub start
{
	my ($self, $place) = @_;
	my $node = $self->node($place);
	my $started = $self->_run_at($place, 'setpriv', '--inh-caps', '-all',
		'--ambient-caps', '-all',
		$node->installed_command('pg_ctl'), '-w', '-D', $node->data_dir,
		'-l', $node->logfile, '-o', '--cluster-name=' . $node->name, 'start');

	$node->_update_pid($started ? 1 : -1);
	return $started;
}

# Returns the place of the server that a standby follows, or undef.
sub _follow
{
	my ($self, $place, $upstream) = @_;
	my $node = $self->node($place);
	my $conninfo = !defined $upstream ? '' :
	  join(' ', 'host=' . _address($upstream, $place),
		'port=' . $self->node($upstream)->port,
		'application_name=' . $node->name, 'connect_timeout=2');

	$node->append_conf('postgresql.conf', "primary_conninfo = '$conninfo'");
	return;
}

sub add_standby
{
	my ($self, $place, $node, $primary) = @_;

	$primary->backup($node->name);
	$node->init_from_backup($primary, $node->name);
	$node->set_standby_mode;
	rmtree($primary->backup_dir . '/' . $node->name);
	$self->{nodes}[$place] = $node;
	$self->_follow($place, $self->place($primary));
	$self->start($place) or die 'could not start a standby in its network';
	return;
}

sub _name_standbys
{
	my ($self, $primary, $count, @places) = @_;
	my $names = join(', ', map { $self->node($_)->name } @places);

	$primary->append_conf('postgresql.conf',
		"synchronous_standby_names = 'ANY $count ($names)'");
	$primary->reload;
	return;
}

sub set_quorum
{
	my ($self, $primary, $count, @places) = @_;
	my $standbys = @places;

	$self->_name_standbys($primary, $count, @places);
	$primary->poll_query_until('postgres',
		"SELECT count(*) = $standbys FROM pg_stat_replication "
		  . "WHERE sync_state = 'quorum' "
		  . 'AND replay_lsn >= pg_current_wal_insert_lsn()')
	  or die 'standbys are not synchronous';
	return;
}

sub fail_over
{
	my ($self, $old, $sub) = @_;
	my @standbys = grep { $_ != $old } 0 .. 2;
	my %received;

	foreach my $place (@standbys)
	{
		$self->_follow($place);
		$self->node($place)->reload;
	}
	foreach my $place (@standbys)
	{
		my $node = $self->node($place);

		$node->poll_query_until('postgres',
			'SELECT count(*) = 0 FROM pg_stat_activity '
			  . "WHERE backend_type = 'walreceiver'")
		  or die 'a standby goes on receiving';
		$received{$place} = $node->safe_psql('postgres',
			'SELECT greatest(pg_last_wal_receive_lsn(), '
			  . "pg_last_wal_replay_lsn()) - '0/0'");
	}
	$sub->();
	my ($new, $other) =
	  sort { $received{$b} <=> $received{$a} } @standbys;

	$self->_name_standbys($self->node($new), 1, $other);
	$self->_follow($other, $new);
	$self->node($other)->reload;
	$self->node($new)->promote;
	$self->set_quorum($self->node($new), 1, $other);
	return $new;
}

sub cut
{
	my ($self, $from, $to) = @_;

	$self->{cut}{"$from $to"} = 1;
	$self->_run_at($from, 'ip', 'neigh', 'replace', _address($to, $from),
		'lladdr', '02:00:00:00:00:00', 'dev', "to$to", 'nud', 'permanent')
	  or die "could not cut the link from $from to $to";
	return;
}

sub is_cut
{
	my ($self, $from, $to) = @_;

	return $self->{cut}{"$from $to"};
}

sub heal
{
	my ($self, $from, $to) = @_;

	return unless delete $self->{cut}{"$from $to"};
	$self->_run_at($from, 'ip', 'neigh', 'del', _address($to, $from),
		'dev', "to$to")
	  or die "could not heal the link from $from to $to";
	return;
}

1;
