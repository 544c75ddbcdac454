# Who asks again for what it has gets that ticket, however many others wait for
# the same lock or hold it, before and after a crash, and until it has ended; and
# nobody else gets it.  A ticket is found by its request, not by looking through
# the others.
#
# What would break it: a request whose hash differs from that of its repetition, or
# is not made anew when the tables are read; a ticket that is found although it has
# ended, or not found as another one with the same request has; one that is
# forgotten when another one of the same hash is.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

my $depth = 600;
my $node = new_server('main');
my $admin = session($node);
my $lease = $admin->query("SELECT dlock_lease_open('1h')");
my %calls = (
	lease => "dlock_lease_enqueue('%s', $lease, 'c', owner => %s)",
	ttl => "dlock_ttl_enqueue('%s', '1h', 'c', owner => %s)");

# The tickets of all of them, asked for at once
sub tickets
{
	my ($kind, $name) = @_;

	return $admin->query('SELECT string_agg('
		  . sprintf($calls{$kind}, $name, "'owner ' || n")
		  . "::text, ' ' ORDER BY n) FROM generate_series(1, $depth) AS n");
}

$admin->query('SET synchronous_commit = off');
$admin->query('CREATE ROLE somebody');
my %tickets;
foreach my $kind (sort keys %calls)
{
	$tickets{$kind} = tickets($kind, $kind);
	is(scalar(keys %{ { map { $_ => 1 } split / /, $tickets{$kind} } }),
		$depth, "$kind: a ticket for each");
	is(tickets($kind, $kind), $tickets{$kind}, "$kind: the same again");
	is($admin->query("SELECT count(*) FROM dlock_locks WHERE name = '$kind'"),
		$depth, "$kind: and no more");
	isnt(tickets($kind, "$kind elsewhere"), $tickets{$kind},
		"$kind: others for another lock");
	$admin->query('SELECT count(dlock_release_ticket(ticket)) '
		  . "FROM dlock_locks WHERE name = '$kind elsewhere'");
}

# In a role's name, or without an owner
unlike(
	' ' . $admin->query("SET ROLE somebody; SELECT "
		  . sprintf($calls{ttl}, 'ttl', "'owner 300'") . '; RESET ROLE') . ' ',
	qr/\D($tickets{ttl})\D/, 'not for another role');
isnt(
	$admin->query('SELECT ' . sprintf($calls{ttl}, 'none', 'NULL')),
	$admin->query('SELECT ' . sprintf($calls{ttl}, 'none', 'NULL')),
	'not where nobody says for whom');

# One that ends, and its neighbours
foreach my $kind (sort keys %calls)
{
	my @all = split / /, $tickets{$kind};

	is($admin->query("SELECT dlock_release_ticket($all[299])"),
		't', "$kind: ended");
	my @again = split / /, tickets($kind, $kind);
	cmp_ok($again[299], '>', $all[-1], "$kind: asked for anew");
	$all[299] = $again[299];
	is("@again", "@all", "$kind: the others are the same");
	$tickets{$kind} = "@all";
}

# As an acquire: the first holds, and the last one waits.
foreach my $kind (sort keys %calls)
{
	my @all = split / /, $tickets{$kind};
	my $acquire = $calls{$kind} =~ s/enqueue/acquire/r =~ s/'c'/timeout => '10ms'/r;

	is($admin->query('SELECT ' . sprintf($acquire, $kind, "'owner 1'")),
		$all[0], "$kind: acquired");
	like($admin->query('SELECT ' . sprintf($acquire, $kind, "'owner 200'")),
		qr/55P03/, "$kind: not yet");
	is(tickets($kind, $kind), $tickets{$kind}, "$kind: nothing has changed");
}

# All is in the WAL with the next commit that is not asynchronous.
$admin->query("SET synchronous_commit = on; SELECT dlock_lease_open('1h')");
kill_server($node);
$admin->vanish;
$node->start;
$admin = session($node);
$admin->query('SET synchronous_commit = off');
is(tickets($_, $_), $tickets{$_}, "$_: the same after a crash")
  foreach sort keys %calls;

# Nothing is left.
$admin->query('SELECT count(dlock_lease_close(lease)) FROM dlock_leases');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_queue');
$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$lease = $admin->query("SELECT dlock_lease_open('1h')");
$calls{lease} =~ s/\d+(?=, 'c')/$lease/;
isnt(tickets($_, $_), $tickets{$_}, "$_: and all asked for anew")
  foreach sort keys %calls;

$admin->quit;
done_testing();
