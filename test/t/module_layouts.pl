# Two libraries in one server lay out their shared memory differently, as after
# an update.  They never both grant locks at one time.  The new library is
# refused while a process uses the old library, and takes over afterwards, with
# all leases.  The same holds in reverse.
#
# What would break it: a process that is counted as attached but is not, or the
# reverse, however it ended and whatever failed before; an area that stays
# behind; a worker of one library with the memory of the other.

use strict;
use warnings FATAL => 'all';

use Cwd qw(abs_path);
use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Standby;
use Dlock::Test;
use Dlock::Worker;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $top = abs_path("$FindBin::RealBin/../..");
my $dir = PostgreSQL::Test::Utils::tempdir;

# Segments are files here, which the test can count and make inaccessible.
my $node = new_server('main',
	allows_streaming => 1,
	conf => "dynamic_shared_memory_type = mmap\n");
my $bindir = $node->config_data('--bindir');

# Run make in a directory.  Return false if make fails.
sub make
{
	my ($where, @arguments) = @_;

	# The make that runs this test has set these.
	delete local @ENV{qw(MAKEFLAGS MAKELEVEL MFLAGS)};
	return IPC::Run::run(
		[
			'make', '-s', '-C', $where, "PG_CONFIG=$bindir/pg_config",
			'with_llvm=no', @arguments
		],
		'>', "$dir/make.log", '2>&1');
}

#
# A library of another layout and version
#
mkdir "$dir/other" or die;
system("cp -R '$top/Makefile' '$top/dlock.control' '$top/src' '$dir/other/' && "
	  . "find '$dir/other/src' -name '*.o' -delete -o -name '*.bc' -delete") == 0
  or die 'cp failed';
plan skip_all => 'cannot compile a library here: '
  . slurp_file("$dir/make.log")
  unless make("$dir/other", '-j2', 'COPT=-DDLOCK_LAYOUT=1000',
	'EXTVERSION=99.9', 'dlock.so');

# The other library's functions come first in the search path of its sessions.
$node->safe_psql(
	'postgres', qq{
	CREATE SCHEMA other;
	DO \$\$
	DECLARE
		definition text;
	BEGIN
		FOR definition IN
			SELECT pg_get_functiondef(p.oid)
			  FROM pg_proc AS p JOIN pg_language AS l ON l.oid = prolang
			 WHERE lanname = 'c' AND probin LIKE '%dlock'
			   AND pronamespace = 'public'::regnamespace
			   AND prorettype <> 'trigger'::regtype
		LOOP
			EXECUTE replace(replace(definition, '\$libdir/dlock',
				'$dir/other/dlock'), ' public.', ' other.');
		END LOOP;
	END \$\$});

sub ours
{
	return session($_[0] // $node);
}

sub other
{
	return session($_[0] // $node,
		'postgres', q{options='-c search_path=other,public'});
}

sub segments
{
	return glob($node->data_dir . '/pg_dynshmem/mmap.*');
}

my $version = $node->safe_psql('postgres', 'SELECT dlock_version()');
my $theirs = '99.9';

sub refused
{
	my ($session, $mine, $in_use, @pids) = @_;
	my $pids = join '.*', @pids;
	my $answer = $session->query("SELECT dlock_acquire('lock')");
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return like(
		$answer,
		qr/ERROR:  55000: cannot use dlock \Q$mine\E while dlock \Q$in_use\E is in use.*DETAIL:  .*\b$pids\b.*HINT:  \S/s,
		"$mine is refused, and told who uses $in_use");
}

my ($first, $second, $third);

#
# A session and the worker use the old library
#
my %others = map { $_ => 1 } segments();
$first = ours();
my $lease = $first->query("SELECT dlock_lease_open('1h')");
my $held = $first->query("SELECT dlock_lease_acquire('leased', $lease)");
my $fence = $first->query("SELECT dlock_acquire('lock')");

$second = other();
is($second->query('SELECT dlock_version()'),
	$theirs, 'the other library tells its own version');
refused($second, $theirs, $version, $first->{pid}) foreach 'once', 'again';

#
# Only the worker uses the old library, and exits for the new one
#
my @before = grep { !$others{$_} } segments();
my $log = -s $node->logfile;

$first->quit;
backends_gone($first->{pid});
my $later = $second->query("SELECT dlock_acquire('lock')");
grows('the lock is free, and fences continue to grow', $fence, $later);
$node->wait_for_log('dlock worker gives way to another version', $log);
is($second->query("SELECT dlock_try_acquire('leased') IS NULL"),
	't', 'the lease holds its lock');
is($second->query("SELECT dlock_fence('leased')"), $held, 'with its fence');
ok(@before > 0 && !(grep { -e } @before), 'the old memory is freed');

#
# The old library is refused now, in sessions and in workers.  The other
# library starts the old library's workers, because it finds only that library.
#
$third = ours();
refused($third, $version, $theirs, $second->{pid});
$log = -s $node->logfile;
like($second->query("SELECT dlock_lease_open('1h')"),
	qr/ERROR:  53400: could not start the worker/, 'no worker could attach');
$node->wait_for_log(
	qr/ERROR:  (55000: )?cannot use dlock \Q$version\E while dlock \Q$theirs\E/,
	$log);
my $workers = () = slurp_file($node->logfile, $log) =~
  /ERROR:  (?:55000: )?cannot use dlock/g;
cmp_ok($workers, '<=', 60, "$workers workers have tried, and no more");
is($second->query("SELECT dlock_release('lock')"), 't', 'nothing is lost');

#
# A process counts as a user of its library until it ends, however it ends.
#
sub use_and_end
{
	my ($end) = @_;

	$second->query("SELECT dlock_acquire('lock')");
	$end->($second);
	backends_gone($second->{pid});
}

use_and_end(sub { $_[0]->quit });
like($third->query("SELECT dlock_renew($lease)"),
	qr/^1$/, 'taken over, and the lease is there');
is($third->query("SELECT dlock_lease_close($lease)"), '1', 'closed');
$third->query("SELECT dlock_acquire('lock')");
my ($user, $ours) = ($third, 1);
foreach my $way ('end', 'terminate', 'vanish', 'idle in a transaction')
{
	my $next = $ours ? other() : ours();

	refused($next, $ours ? ($theirs, $version) : ($version, $theirs),
		$user->{pid});
	$user->query('BEGIN; SELECT pg_current_xact_id()') if $way =~ /idle/;
	$way eq 'end' ? $user->quit
	  : $way eq 'vanish' ? $user->vanish
	  : $node->safe_psql('postgres',
		"SELECT pg_terminate_backend($user->{pid})");
	backends_gone($user->{pid});
	like($next->query("SELECT dlock_acquire('lock')"),
		qr/^\d+$/, "$way: the next one takes over");
	$user->quit;
	($user, $ours) = ($next, !$ours);
}

# A process that fails while it attaches does not count.
($second, $third) = ($user, ours());
chmod(0, segments()) > 0 or die "chmod: $!";
like($third->query("SELECT dlock_acquire('other')"),
	qr/ERROR:  42501: could not open/, 'cannot attach');
chmod(0600, segments());
$second->quit;
backends_gone($second->{pid});
$second = other();
like($second->query("SELECT dlock_acquire('lock')"),
	qr/^\d+$/, 'a process that failed to attach blocks no other library');
$third->quit;

# The other library is refused until the last of several processes has ended.
$third = other();
$third->query("SELECT dlock_acquire('other')");
my $another = ours();
$second->quit;
backends_gone($second->{pid});
refused($another, $version, $theirs, $third->{pid});

# A crash creates new shared memory.
$node->safe_psql('postgres', 'ALTER SYSTEM SET restart_after_crash = on');
$node->reload;
kill('KILL', $third->{pid});
$_->quit foreach $third, $another;
poll('the server is there again', sub { answers($node) });
$another = ours();
like($another->query("SELECT dlock_acquire('lock')"),
	qr/^\d+$/, 'after a crash, the first process decides');
$another->quit;

#
# On a standby, one function attaches, although its answer is empty
#
my $standby = new_standby($node, 'standby');
foreach my $how (\&other, \&ours, \&other)
{
	my $session = $how->($standby);

	is($session->query('SELECT dlock_blocking_pids(0)'),
		'{}', 'a standby takes over, too, and writes nothing');
	$session->quit;
	backends_gone($session->{pid});
}
$standby->stop;

$node->stop;
done_testing();
