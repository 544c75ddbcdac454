
=pod

=head1 NAME

Dlock::Standby - standbys of a test's server

=head1 DESCRIPTION

=over

=item new_standby($primary, $name, %params)

Creates a standby that has caught up with the primary.  Parameters: conf, the
standby's settings; start, a function that starts the standby instead of the
method start.

=item count_on($primary, $name)

From now on, the primary's commits wait for the standby of this name.

=item take_over($standby)

Promotes the standby.  Afterwards its commits wait for no standbys.

=back

=cut

package Dlock::Standby;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Cluster;

our @EXPORT = qw(new_standby count_on take_over);

sub new_standby
{
	my ($primary, $name, %params) = @_;
	my $standby = PostgreSQL::Test::Cluster->new($name);

	$primary->backup($name);
	$standby->init_from_backup($primary, $name, has_streaming => 1);
	$standby->append_conf('postgresql.conf', $params{conf}) if $params{conf};
	$params{start} ? $params{start}->($standby) : $standby->start;
	# its primary may itself be a standby
	$primary->wait_for_catchup(
		$standby, 'replay',
		$primary->safe_psql('postgres',
			q{SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
				ELSE pg_current_wal_lsn() END}));
	return $standby;
}

sub count_on
{
	my ($primary, $name) = @_;

	$primary->safe_psql('postgres',
		"ALTER SYSTEM SET synchronous_standby_names = '$name'");
	$primary->reload;
	$primary->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_stat_replication
			WHERE sync_state = 'sync'})
	  or die "$name is not synchronous";
	# commits use the setting only after the checkpointer has read it
	$primary->safe_psql('postgres', 'CHECKPOINT');
	return;
}

sub take_over
{
	my ($standby) = @_;

	$standby->append_conf('postgresql.auto.conf',
		"synchronous_standby_names = ''");
	$standby->promote;
	$standby->reload;
	$standby->poll_query_until('postgres',
		q{SELECT current_setting('synchronous_standby_names') = ''})
	  or die 'the standby still waits for others';
	return;
}

1;
