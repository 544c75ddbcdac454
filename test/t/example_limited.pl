# examples/limited.mjs: all instances together never have more calls open than
# the lock has slots, while the number changes and an instance dies.
#
# What would break it: a call without a permit; a number of slots that only one
# instance obeys, or that needs a restart; a call that continues after its
# permit is lost; permits that a killed instance keeps.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Example;
use Dlock::JavaScript;
use Dlock::Test;
use File::Copy qw(copy);
use IO::Select;
use IO::Socket::INET;
use PostgreSQL::Test::Utils;
use Test::More;

plan skip_all => 'npm, or a package that npm should install, is missing'
  unless $ENV{DLOCK_JAVASCRIPT};

# ----------------------------------------------------------------------------
# The API: it answers a call only when the test tells it to.
# ----------------------------------------------------------------------------

my $listener = IO::Socket::INET->new(
	LocalAddr => '127.0.0.1', Listen => 100, Proto => 'tcp')
  or die "listen: $@";
my $select = IO::Select->new($listener);
my %calls;        # path => socket, for open calls
my %finished;     # path => number of answers
my $most = 0;

sub look
{
	while (my @ready = $select->can_read(0))
	{
		foreach my $socket (@ready)
		{
			my $text;

			if ($socket == $listener)
			{
				$select->add($listener->accept);
			}
			elsif (sysread($socket, $text, 10_000)
				&& $text =~ m{^GET (/\S+) HTTP})
			{
				$calls{$1} = $socket;
			}
			else
			{
				# its client has disconnected
				$select->remove($socket);
				delete $calls{$_}
				  foreach grep { $calls{$_} == $socket } keys %calls;
				close $socket;
			}
		}
	}
	$most = keys %calls if keys %calls > $most;
	return scalar keys %calls;
}

sub finish
{
	my ($path) = @_;
	my $socket = delete $calls{$path};

	$finished{$path}++;
	print $socket "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n"
	  . "Connection: close\r\n\r\nfine";
	$select->remove($socket);
	close $socket;
	return;
}

# ----------------------------------------------------------------------------

my $node = example_server();
my $admin = session($node);
my $dir = PostgreSQL::Test::Utils::tempdir;
my $short = ample(10);
my $long = 600;

install_javascript($dir);
copy("$examples/limited.mjs", $dir) or die "limited.mjs: $!";

sub limited
{
	my ($title, $ttl, $count) = @_;

	return Dlock::Example->new($title, { TTL => $ttl }, 'node',
		"$dir/limited.mjs",
		'http://127.0.0.1:' . $listener->sockport . "/$title", $count);
}

# settled($open, $waiting): this many calls are open, and all others wait for a
# permit
sub settled
{
	my ($open, $waiting, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	poll($test,
		sub { $admin->query('SELECT count(*) FILTER (WHERE granted), '
				  . q{count(*) FILTER (WHERE NOT granted) FROM dlock_locks('api')}
			) eq "$open|$waiting" && look() >= $open });
	return is(look(), $open, $test);
}

# each instance has eight callers
my $one = limited('one', $short, 1000);
my $two = limited('two', $long, 30);

settled(5, 11, 'two instances have five calls open together');
is($most, 5, 'there were never more than five calls');

$admin->query(q{SELECT dlock_set_slots('api', 2)});
foreach my $open (4, 3, 2)
{
	finish((sort keys %calls)[0]);
	settled($open, 16 - $open, "with two slots, $open calls are still open");
}
finish((sort keys %calls)[0]);
settled(2, 14, 'the next call needs a free slot');
is($most, 5, 'there were never more than five');

$most = 0;
$admin->query(q{SELECT dlock_set_slots('api', 7)});
settled(7, 9, 'with seven slots, waiting calls begin at once');
is($most, 7, 'there were never more than seven calls');

# If a permit is revoked by force, another call gets it at once.  The permit's
# call is aborted when its instance learns of the loss, and is made again.
my ($ticket, $call) = split /\|/, $admin->query(
	q{SELECT ticket, substr(l.info, 6) FROM dlock_locks('api') AS l }
	  . q{JOIN dlock_leases USING (lease) WHERE granted AND ttl < '1 min' LIMIT 1});
my $path = "/one/$call";
my $socket = $calls{$path};

$admin->query("SELECT dlock_force_release($ticket)");
$one->says(qr/^$call lost its permit/);
poll('the call is aborted',
	sub { look(); !$calls{$path} || $calls{$path} != $socket });
settled(7, 9, 'a call without a permit is aborted, and queues again');
$most = 0;

# The calls of a killed instance end, and its permits become free later.
$one->vanish;
poll('the calls of the killed instance are gone',
	sub { look(); !grep { m{^/one/} } keys %calls });
settled(7, 1, 'when an instance is killed, the other one gets its permits');
is($most, 7, 'there were never more than seven');

# With NULL, the program's own number of slots counts again.
$admin->query(q{SELECT dlock_set_slots('api', NULL)});
$most = 0;
poll(
	'all calls are answered',
	sub {
		look();
		finish($_) foreach keys %calls;
		return 30 == grep { m{^/two/} } keys %finished;
	});
$two->ends(0, 'the other instance ends');
is(scalar(grep { $finished{$_} > 1 } keys %finished), 0, 'each call was made once');
is($admin->query(q{SELECT count(*) FROM dlock_locks('api')}),
	'0', 'no permit is left');
$admin->quit;
$node->stop;
done_testing();
