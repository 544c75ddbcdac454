# Under Patroni with etcd, a member is killed, a switchover is requested, and a
# primary is cut off from the others, while clients use all of dlock.  This is
# test/ha/run with three of its faults, each once, with short loads.
#
# What would break it: leases that are missing on the new primary, or are there
# without their locks; two holders, one on each side; fences that decrease; a
# library that cannot follow another primary.
#
# The members are in network namespaces inside a user namespace, so the test
# does not need root.  A process namespace ends all processes with the test.

use strict;
use warnings FATAL => 'all';

use FindBin;
use Test::More;

foreach my $program ('patroni', 'etcd', 'ip', 'nsenter', 'setpriv', 'unshare')
{
	plan skip_all => "$program is not installed"
	  unless grep { -x "$_/$program" } split /:/, $ENV{PATH};
}
foreach my $module ('psycopg', 'psycopg2', 'etcd')
{
	plan skip_all => "Python's $module is not installed"
	  if system("/usr/bin/python3 -c 'import $module' 2>/dev/null") != 0;
}

my @apart = (
	'unshare', '--user', '--map-current-user', '--keep-caps', '--net',
	'--mount', '--pid', '--fork', '--kill-child', '--mount-proc', 'bash', '-c');
my $networks = qq{
	set -euo pipefail
	as_root() { "\$@"; }
	. '$FindBin::RealBin/../ha/networks.sh'
	mount -t tmpfs tmpfs /run
	make_networks short
};

# Runs a command without output, and returns false if it fails.
sub succeeds
{
	my $pid = fork() // die "fork: $!";

	if ($pid == 0)
	{
		open STDOUT, '>', '/dev/null' or die "open: $!";
		open STDERR, '>&', \*STDOUT or die "open: $!";
		exec(@_) or exit 127;
	}
	waitpid($pid, 0);
	return $? == 0;
}

plan skip_all => 'network namespaces are not available'
  unless succeeds(@apart, "$networks nsenter --net=/run/netns/short-0 ip neigh show");

%ENV = (
	%ENV,
	DLOCK_HA_PREFIX => 'short',
	DLOCK_HA_FAULTS => 'killed members,switchovers,partitions',
	DLOCK_HA_ONCE => 1,
	DLOCK_HA_SHORT => 'ha_patroni',
	DLOCK_HA_PAUSE => 0.1,
	DLOCK_HA_CLIENTS => 4,
	DLOCK_HA_LEASES => 100);
# The shell stays, and becomes the parent of orphaned processes.
exec(@apart, "$networks nsenter --net=/run/netns/short-0 \"\$@\" || exit; exit",
	'bash', $^X, map({ "-I$_" } @INC), "$FindBin::RealBin/../ha/ha.pl")
  or die "exec: $!";
