# examples/booking.py: if two users have seen a free seat, one of them books
# it, and the other sees the change.
#
# What would break it: a booking that overwrites another one, made by this
# program or by a program that does not use versions; a user who decides slowly
# and delays others.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Example;
use Dlock::Python;
use Dlock::Test;
use Test::More;

my $python = find_python('import psycopg2, sqlalchemy');

plan skip_all => 'python3 with sqlalchemy and psycopg2 is not installed'
  unless $python;

my $node = example_server();

sub booking
{
	my ($title, @arguments) = @_;

	return Dlock::Example->new($title, {}, $python,
		"$examples/booking.py", @arguments);
}

booking('setup', 'setup')->ends(0, 'setup');

my $admin = session($node);
my $seats = q{SELECT string_agg(number || ' ' || coalesce(passenger, 'free'), ', '
	ORDER BY number) FROM seat};

# Two users see the same seat.
my $alice = booking('alice', '7A', 'alice');
my $bob = booking('bob', '7A', 'bob');

$_->says(qr/7A is free/) foreach $alice, $bob;
is( $admin->query(
		"SELECT count(*) FROM pg_stat_activity WHERE usename = 'app' "
		  . "AND state <> 'idle'"),
	'0', 'no transaction is open while users think');
$bob->type('yes');
$bob->says(qr/^booked/);
$alice->type('yes');
$alice->says(qr/7A has changed/);
$alice->says(qr/7A is taken by bob/);
$bob->ends(0, 'the faster user has the seat');
$alice->ends(1, 'the slower user has none');
is($admin->query($seats), '7A bob, 7B free', 'the seat is booked once');

# A change that frees the seat is shown, too.
$alice = booking('alice', '7B', 'alice');
$alice->says(qr/7B is free/);
$admin->query(q{UPDATE seat SET passenger = 'by hand' WHERE number = '7B'});
$admin->query(q{UPDATE seat SET passenger = NULL WHERE number = '7B'});
$alice->type('yes');
$alice->says(qr/7B has changed/);
$alice->says(qr/7B is free/);
$admin->query(q{UPDATE seat SET passenger = 'by hand' WHERE number = '7B'});
$alice->type('yes');
$alice->says(qr/7B is taken by by hand/);
$alice->ends(1, 'a change by a program without versions is seen');
is($admin->query($seats), '7A bob, 7B by hand', 'it is not overwritten');

# A process that hangs or dies delays no other process.
$admin->query('UPDATE seat SET passenger = NULL');
$alice = booking('alice', '7A', 'alice');
$bob = booking('bob', '7A', 'bob');
$_->says(qr/7A is free/) foreach $alice, $bob;
$alice->signal('STOP');
$bob->vanish;

my $carol = booking('carol', '7A', 'carol');

$carol->says(qr/7A is free/);
$carol->type('yes');
$carol->ends(0, 'a third user books');
$alice->signal('CONT');
$alice->type('yes');
$alice->says(qr/7A is taken by carol/);
$alice->ends(1, 'the paused user is late');
is($admin->query($seats), '7A carol, 7B free', 'the third user has the seat');

$alice = booking('alice', '7B', 'alice');
$alice->says(qr/7B is free/);
$alice->type('no');
$alice->ends(1, 'a user may decline');
is($admin->query($seats), '7A carol, 7B free', 'nothing has changed');

$admin->quit;
$node->stop;
done_testing();
