# The file system for dynamic shared memory is smaller than dlock.max_memory,
# as in a container.  When dlock creates its memory, it takes half of the free
# space, and logs that once.  Other processes, such as parallel queries, can
# use the rest. dlock can use its memory even if other processes fill the file
# system later.  If the file system is already full, calls fail with 53200 and
# a hint until there is room.
#
# What would break it: an error of PostgreSQL that is passed on unchanged, or
# that shows an older errno; a limit above the memory that exists; reserved
# memory that is missing when dlock writes to it; a segment that a failed call
# leaves behind.
#
# The test runs in Linux namespaces of its own, in which /dev/shm is small.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Test::More;

my $megabytes;

# This runs before modules are loaded that would redirect the output.
BEGIN
{
	$megabytes = 16;
	if (!$ENV{DLOCK_SMALL_MEMORY})
	{
		# Be root in the namespace to mount, and then the caller again, because
		# no server runs as root.
		my $mount =
		  "mount -t tmpfs -o size=${megabytes}m,mode=1777 none /dev/shm";
		my @inside = (
			'unshare', '-rm', 'sh', '-c', "$mount && exec \"\$@\"", 'sh',
			'unshare', '-U', "--map-user=$<", '--map-group=' . int $();

		plan skip_all => 'cannot mount a file system of its own'
		  if system('sh', '-c', 'exec "$@" >/dev/null 2>&1',
			'sh', @inside, 'true') != 0;
		$ENV{DLOCK_SMALL_MEMORY} = 1;
		exec @inside, $^X, (map { ('-I', $_) } grep { !ref } @INC), $0
		  or die "exec: $!";
	}
}

use Dlock::Test;

my $node = new_server('main',
	conf => "dynamic_shared_memory_type = posix\nmax_parallel_workers = 4\n");
my ($superuser, $ordinary, $other);

$node->safe_psql('postgres',
	'CREATE ROLE ordinary LOGIN; ALTER ROLE ordinary SET dlock.max_memory_per_role = 100');
$superuser = session($node);
$superuser->query(
	q{CREATE FUNCTION fill(prefix text, how_many integer) RETURNS text
	LANGUAGE plpgsql AS $$
	DECLARE
		message text;
		detail text;
		hint text;
	BEGIN
		FOR n IN 1 .. how_many LOOP
			BEGIN
				PERFORM dlock_acquire(prefix || n);
			EXCEPTION WHEN out_of_memory THEN
				GET STACKED DIAGNOSTICS message = MESSAGE_TEXT,
					detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
				RETURN concat_ws(' ', n - 1, message, detail, hint);
			END;
		END LOOP;
		RETURN 'all';
	END $$});

# The free space in megabytes
sub left
{
	my ($line) = grep { m{/dev/shm$} } `df -Pk /dev/shm`;

	return (split ' ', $line)[3] / 1024;
}

sub parallel_query
{
	my ($test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return is(
		$superuser->query(
			q{SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0;
			SET min_parallel_table_scan_size = 0; SET work_mem = '2MB';
			EXPLAIN (ANALYZE, COSTS off, TIMING off, SUMMARY off)
			SELECT count(*) FROM pg_class AS a JOIN pg_class AS b USING (oid)}
		) =~ /Workers Launched: [1-9]/,
		1,
		$test);
}

#
# The limit is the free space, less a part for other processes.
#
my $small = qr{LOG:  dlock\.max_memory cannot be reached\n.*DETAIL:  dlock uses (\d+) MB, which is half of the free space in the file system of "/dev/shm"\. dlock\.max_memory is 64 MB\.\n.*HINT:  Give the file system more room, and restart the server; or decrease dlock\.max_memory\.\n};

# The sizes in the log
sub told_sizes
{
	my $sizes = join ' ', slurp($node) =~ /$small/g;

	return $sizes;
}

$ordinary = session($node, 'postgres', 'user=ordinary');
my $count = $ordinary->query("SELECT fill('lock ', 1000000)");
like(
	$count,
	qr{^\d{4,} out of memory for locks .* three quarters .*file system},
	"an ordinary role's locks are limited: $count");
$count =~ s/ .*//s;
like(told_sizes(), qr/^[67]$/, 'the log has the sizes');
my $limit = $superuser->query('SELECT memory_limit FROM dlock_stats') / 1024 / 1024;
cmp_ok(abs($limit - $megabytes / 2 * 3 / 4), '<', 0.5, "the limit is $limit MB");
unlike($ordinary->query('SELECT 1'), qr/WARNING/, 'the client has no warning');
cmp_ok(left(), '>', $megabytes / 3, 'there is room left for others');
parallel_query('a parallel query has its memory');
like($superuser->query("SELECT dlock_acquire('lock of a superuser')"),
	qr/^\d+$/, 'there is a reserve for superusers');
like(
	$superuser->query("SELECT fill('super ', 1000000)"),
	qr{^\d{3,} out of memory for locks .*their part of the file system of "/dev/shm".*give the file system more room},
	'the reserve is limited, too');
cmp_ok(left(), '>', $megabytes / 3, 'there is still room left');
is($superuser->query("SELECT dlock_release_all() > 100"), 't', 'released');
is( $ordinary->query(
		"SELECT count(*) FROM generate_series(1, $count) AS n "
		  . "WHERE dlock_release('lock ' || n)"),
	$count,
	'nothing was lost');
like(told_sizes(), qr/^[67]$/, 'the log has the sizes once');

#
# Other files fill the file system.  dlock can still use its memory.
#
my $filler = '/dev/shm/filler';

# Leaves this many bytes free
sub fill_up
{
	my ($bytes) = @_;

	open(my $file, '>', $filler) or die "$filler: $!";
	1 while syswrite($file, "\0" x 4096);
	truncate($file, (-s $file) - ($bytes // 0)) or die "$filler: $!";
	close($file) or die "$filler: $!";
	return;
}

fill_up();
cmp_ok(left(), '<', 0.1, 'the file system is full');
# memory is counted in steps of 4 kB
cmp_ok(
	abs($ordinary->query("SELECT fill('lock ', 1000000)") =~ s/ .*//sr - $count),
	'<=', 24, 'an ordinary role has what it had');
like($superuser->query("SELECT fill('super ', 1000000)"),
	qr{^\d{3,} out of memory for locks .*file system}, 'a superuser, too');
$ordinary->query('SELECT dlock_release_all()');
$superuser->query('SELECT dlock_release_all()');
my $lease = $superuser->query("SELECT dlock_lease_open('1h')");
foreach my $call (
	q{dlock_acquire('lock ' || n, info => repeat('x', 1000))},
	q{dlock_enqueue('lock ' || n, info => repeat('x', 1000))},
	q{dlock_acquire('lock ' || n)},
	qq{dlock_lease_enqueue('lock ' || n, $lease, info => repeat('x', 1000))},
	q{dlock_ttl_enqueue('lock ' || n, '1h', info => repeat('x', 1000))})
{
	is( $superuser->query(
			"SELECT count($call) FROM generate_series(1, 1000) AS n"),
		'1000',
		"the file system is full: $call");
	$superuser->query('SELECT dlock_release_all()');
	$superuser->query(
		q{SELECT dlock_release_ticket(ticket) FROM dlock_locks
		 WHERE scope = 'lease'});
}
$superuser->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
unlink $filler;
$_->quit foreach $ordinary, $superuser;

#
# The file system is full at the first call.
#
my $full =
  qr{ERROR:  53200: could not resize shared memory segment.*HINT:  With dynamic_shared_memory_type = posix, locks are kept in the file system of "/dev/shm": give it more room}s;

sub restart_with
{
	my ($size) = @_;

	$node->append_conf('postgresql.conf', "dlock.max_memory = '$size'");
	$node->restart;
	$superuser = session($node);
	return;
}

restart_with('64MB');
fill_up();
like($superuser->query("SELECT dlock_acquire('lock')"),
	$full, "the memory cannot be made: $_")
  foreach 'once', 'again';
$other = session($node);
like($other->query('SELECT count(*) FROM dlock_locks'),
	$full, 'another session cannot create the memory, either');
like(told_sizes(), qr/^[67]$/, 'the log has no new size');

# All but 10 MB is full.  Then there is room, which counts from the next start.
fill_up(10 * 1024 * 1024);
like($superuser->query("SELECT dlock_acquire('lock')"),
	qr/^\d+$/, 'the memory is created when there is room');
like(told_sizes(), qr/^[67] [45]$/, 'the log has the available size');
unlink $filler;
is($other->query('SELECT memory_limit < 4000000 FROM dlock_stats'),
	't', 'more room does not count at once');
$_->quit foreach $superuser, $other;
restart_with('64MB');
is($superuser->query('SELECT memory_limit > 5000000 FROM dlock_stats'),
	't', 'more room counts after a restart');
like(told_sizes(), qr/^[67] [45] [67]$/, 'the log has the new size');
$superuser->quit;

# With a setting that fits, nothing is limited or logged.
restart_with('4MB');
is($superuser->query('SELECT memory_limit FROM dlock_stats'),
	3 * 1024 * 1024, 'less is enough');
like(told_sizes(), qr/^[67] [45] [67]$/, 'the log has no size that fits');
like($superuser->query("SELECT fill('lock ', 1000000)"),
	qr/^\d{4,} out of memory for locks .*have reached their part of dlock\.max_memory\./,
	'the log does not say that the file system is too small');
$superuser->quit;
$node->stop;

#
# With mmap, a short write() does not set errno.  The error must say that
# memory is used up, for every value of errno.
#
my $directory = '/dev/shm/dynshmem';
my $mapped = new_server('mapped');
$mapped->stop;
mkdir($directory, 0700) or die "$directory: $!";
rmdir($mapped->data_dir . '/pg_dynshmem') or die "pg_dynshmem: $!";
symlink($directory, $mapped->data_dir . '/pg_dynshmem') or die "symlink: $!";
$mapped->append_conf('postgresql.conf', 'dynamic_shared_memory_type = mmap');
$mapped->start;
foreach my $pages (100 .. 107)
{
	my $session = session($mapped);
	my @segments = glob("$directory/*");

	fill_up($pages * 4096);
	like(
		$session->query(
			q{SELECT pg_stat_file('no such file', true), dlock_acquire('lock')}),
		qr{ERROR:  53200: .*HINT:  With dynamic_shared_memory_type = mmap, locks are kept in the file system of "pg_dynshmem"}s,
		"mmap: $pages pages are left");
	is(join(' ', glob("$directory/*")), "@segments", 'mmap: nothing stays behind');
	$session->quit;
}
unlink $filler;
$superuser = session($mapped);
like($superuser->query("SELECT dlock_acquire('lock')"), qr/^\d+$/, 'with mmap');
$superuser->quit;
$mapped->stop;
done_testing();

sub slurp
{
	my ($server) = @_;

	return PostgreSQL::Test::Utils::slurp_file($server->logfile);
}
