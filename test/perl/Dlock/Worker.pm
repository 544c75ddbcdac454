
=pod

=head1 NAME

Dlock::Worker - the worker of dlock, found and stopped by TAP tests

=head1 DESCRIPTION

What depends on the worker is tested by stopping it: SIGSTOP is a point in its
work, between two others, that lasts for as long as the test wants.

=over

=item worker($session)

The process id of the worker of the session's database, as soon as it has one.

=item no_worker($session)

Waits until there is none.

=item freeze($session)

Stops the worker while it sleeps, and returns its process id.  In its own wait,
it holds nothing that others need.

=item thaw($pid)

Lets it go on.  Whatever is still stopped at the end of the test goes on then.

=item others_go_on($session, $what)

Tests session and transaction scope, on a name of their own.

=item is_free($session, $name)

Is the name free, so that session scope gets it at once?

=back

=cut

package Dlock::Worker;

use strict;
use warnings FATAL => 'all';

use Dlock::Lease qw(stop_while continue_process);
use Dlock::Test;
use Exporter 'import';
use Test::More;

our @EXPORT = qw(worker no_worker freeze thaw others_go_on is_free);

my $workers = q{FROM pg_stat_activity WHERE backend_type = 'dlock worker'
	 AND datname = current_database()};

sub worker
{
	my ($session) = @_;
	my $pid;

	poll('a worker',
		sub { ($pid = $session->query("SELECT pid $workers")) =~ /^\d+$/ });
	return $pid;
}

sub no_worker
{
	my ($session) = @_;

	return $session->wait_for("SELECT count(*) = 0 $workers");
}

sub freeze
{
	my ($session) = @_;
	my $pid = worker($session);

	stop_while($session, $pid,
		"SELECT count(*) = 1 $workers AND pid = $pid "
		  . q{AND state = 'idle' AND wait_event_type = 'Extension'});
	return $pid;
}

sub thaw
{
	my ($pid) = @_;

	return continue_process($pid);
}

sub others_go_on
{
	my ($session, $what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is(
		$session->query(
			"SELECT dlock_acquire('other') > 0, dlock_release('other'), "
			  . "dlock_xact_acquire('other') > 0"),
		't|t|t',
		"$what: session and transaction scope go on");
}

sub is_free
{
	my ($session, $name) = @_;

	return $session->query("SELECT dlock_try_acquire('$name') IS NOT NULL "
		  . "AND dlock_release('$name')") eq 't';
}

1;
