# A file system for dynamic shared memory that is smaller than dlock.max_memory,
# as in a container: requests fail with 53200 and a way out, nothing held is lost,
# and what is left over is enough for others, such as parallel queries.
#
# What would break it: an error of PostgreSQL's that is passed on as it is,
# wherever memory is asked for, or that says what an earlier one was; a limit that is above what there is; a request
# that fails half done.
#
# The test runs in name spaces of its own, in which /dev/shm is small.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Test::More;

my $megabytes;

# Before the modules come, which would redirect the output.
BEGIN
{
	$megabytes = 16;
	if (!$ENV{DLOCK_SMALL_MEMORY})
	{
		# root there, so as to mount; then who we are, as no server runs as root
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
		hint text;
	BEGIN
		FOR n IN 1 .. how_many LOOP
			BEGIN
				PERFORM dlock_acquire(prefix || n);
			EXCEPTION WHEN out_of_memory THEN
				GET STACKED DIAGNOSTICS message = MESSAGE_TEXT,
					hint = PG_EXCEPTION_HINT;
				RETURN n - 1 || ' ' || message || ' ' || hint;
			END;
		END LOOP;
		RETURN 'all';
	END $$});

# How many megabytes are free
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
# The limit is what there is, less a part for others
#
$ordinary = session($node, 'postgres', 'user=ordinary');
my $log = slurp($node);
my $count = $ordinary->query("SELECT fill('lock ', 1000000)");
like(
	$count,
	qr{^\d{4,} out of memory for locks .*file system},
	"an ordinary role's locks are limited: $count");
$count =~ s/ .*//s;
like(
	slurp($node),
	qr{LOG:  dlock\.max_memory cannot be reached\n.*DETAIL:  The file system of "/dev/shm" has $megabytes MB, \d+ MB of them free.*HINT:}s,
	'the log has a warning');
unlike($ordinary->query('SELECT 1'), qr/WARNING/, 'the client has none');
cmp_ok(left(), '>', $megabytes / 3, 'there is room left for others');
parallel_query('a parallel query has its memory');
like($superuser->query("SELECT dlock_acquire('lock of a superuser')"),
	qr/^\d+$/, 'there is a reserve for superusers');
like($superuser->query("SELECT fill('super ', 1000000)"),
	qr{^\d{3,} out of memory for locks .*file system}, 'which is limited, too');
cmp_ok(left(), '>', $megabytes / 3, 'there is still room left');
is($superuser->query("SELECT dlock_release_all() > 100"), 't', 'released');
is( $ordinary->query(
		"SELECT count(*) FROM generate_series(1, $count) AS n "
		  . "WHERE dlock_release('lock ' || n)"),
	$count,
	'nothing was lost');
$ordinary->quit;
$superuser->quit;

#
# Others have filled it: in whatever call the area has to grow, or be made
#
my $filler = '/dev/shm/filler';

sub fill_up
{
	open(my $file, '>', $filler) or die "$filler: $!";
	1 while syswrite($file, "\0" x 65536);
	return;
}

my $full =
  qr{ERROR:  53200: could not resize shared memory segment.*HINT:  With dynamic_shared_memory_type = posix, locks are kept in the file system of "/dev/shm": give it more room}s;

$node->restart;
$superuser = session($node);
fill_up();
like($superuser->query("SELECT dlock_acquire('lock')"),
	$full, "the area cannot be made: $_")
  foreach 'once', 'again';
unlink $filler;
like($superuser->query("SELECT dlock_acquire('lock')"),
	qr/^\d+$/, 'and then it can');

$other = session($node);
my $lease = $other->query("SELECT dlock_lease_open('1h')");
fill_up();
foreach my $call (
	q{dlock_acquire('lock ' || n, info => repeat('x', 1000))},
	q{dlock_enqueue('lock ' || n, info => repeat('x', 1000))},
	q{dlock_acquire('lock ' || n)},
	qq{dlock_lease_enqueue('lock ' || n, $lease, info => repeat('x', 1000))},
	q{dlock_ttl_enqueue('lock ' || n, '1h', info => repeat('x', 1000))})
{
	my ($name) = $call =~ /(\w+)/;

	like(
		$superuser->query("SELECT $call FROM generate_series(1, 20000) AS n"),
		$full, "the area cannot grow: $name");
	$superuser->query(
		q{SELECT dlock_release('lock ' || n) FROM dlock_locks, substr(name, 6) AS n
		 WHERE name LIKE 'lock %' AND scope = 'session'});
	is($superuser->query("SELECT dlock_is_held('lock')"),
		't', 'and nothing is lost');
}
unlink $filler;
is( $superuser->query(
		q{SELECT count(dlock_acquire('more ' || n)) FROM generate_series(1, 3000) AS n}
	),
	'3000',
	'there is room again');
$other->query('SELECT dlock_lease_close(lease) FROM dlock_leases');
$_->quit foreach $superuser, $other;
$node->stop;

#
# With mmap, what a write() leaves out is no error of its own: whatever the last
# one was, it is told as memory that is used up.
#
my $directory = '/dev/shm/dynshmem';
my $mapped = new_server('mapped');
$mapped->stop;
mkdir($directory, 0700) or die "$directory: $!";
rmdir($mapped->data_dir . '/pg_dynshmem') or die "pg_dynshmem: $!";
symlink($directory, $mapped->data_dir . '/pg_dynshmem') or die "symlink: $!";
$mapped->append_conf('postgresql.conf', 'dynamic_shared_memory_type = mmap');
$mapped->start;
$superuser = session($mapped);
like($superuser->query("SELECT dlock_acquire('lock')"), qr/^\d+$/, 'with mmap');
my $room = left();
fill_up();
foreach my $pages (100 .. 107)
{
	my $session = session($mapped);

	truncate($filler, ($room - $pages * 4096 / 1024 / 1024) * 1024 * 1024)
	  or die "$filler: $!";
	like(
		$session->query(
			q{SELECT pg_stat_file('no such file' || n % 1, true),
				dlock_acquire('lock ' || n, info => repeat('x', 1000))
			  FROM generate_series(1, 20000) AS n}),
		qr{ERROR:  53200: .*HINT:  With dynamic_shared_memory_type = mmap, locks are kept in the file system of "pg_dynshmem"}s,
		"mmap: $pages pages are left");
	$session->quit;
	unlink $filler;
	fill_up();
}
unlink $filler;
$superuser->quit;
$mapped->stop;
done_testing();

sub slurp
{
	my ($server) = @_;

	return PostgreSQL::Test::Utils::slurp_file($server->logfile);
}
