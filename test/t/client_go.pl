# The Go client passes clients/scenarios.md with Go's race detector on, over
# pgx 5, or over pgx 4 without pgx 5.  The sample of docs/go.md works.
#
# What would break it: the faults in that page's table; a data race; an error
# of a lock over database/sql that the client does not recognize.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Go;
use Dlock::Program;
use Dlock::Scenarios;
use JSON::PP;
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;

my ($go, $version) = find_go($dir);

plan skip_all => 'Go, or pgx, is not installed' unless $version;
diag("over pgx $version");

# Patches time.Now() to add the offset in the file $DLOCK_WALL_CLOCK.  A
# goroutine reads the file, because timers call Now() when they must not block.
sub with_our_clock
{
	my ($root) = run_command([ $go, 'env', 'GOROOT' ]);
	my $time = slurp_file("$root/src/time/time.go");

	$time =~ s/^func Now\(\) Time \{\n.*?:= (?:now|runtimeNow)\(\)\n/$&\tsec += atomic.LoadInt64(&ahead)\n/ms
	  or die 'no time.Now() in Go';
	$time .= <<'END_OF_SOURCE';

var ahead int64

func init() {
	name, _ := syscall.Getenv("DLOCK_WALL_CLOCK")
	go func() {
		for ; ; Sleep(10 * Millisecond) {
			if file, err := open(name); err == nil {
				text := make([]byte, 30)
				count, _ := read(file, text)
				closefd(file)
				sign, seconds := int64(1), int64(0)
				for _, digit := range text[:count] {
					if digit == '-' {
						sign = -1
					} else {
						seconds = 10*seconds + int64(digit-'0')
					}
				}
				atomic.StoreInt64(&ahead, sign*seconds)
			}
		}
	}()
}
END_OF_SOURCE
	# more imports may follow the first
	$time =~ s/^import /import (\n\t"sync\/atomic"\n\t"syscall"\n)\n\nimport /m
	  or die 'time.go imports nothing';
	return ('-overlay', "$dir/overlay.json") if -e "$dir/time.go";
	append_to_file("$dir/time.go", $time);
	append_to_file("$dir/overlay.json",
		encode_json(
			{ Replace => { "$root/src/time/time.go" => "$dir/time.go" } }));
	return ('-overlay', "$dir/overlay.json");
}

# The sample of the page prints what its comments say.
sub run_sample
{
	my ($node, @command) = @_;
	my $sample = slurp_file("$dir/src/dlock.org/dlock/sample/main.go");
	my @expected = $sample =~ m{Println\(.*\) // (.*)}g;

	$node->safe_psql(
		'postgres', q{
		CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL);
		INSERT INTO account VALUES (7, 100);
		GRANT SELECT, UPDATE ON account TO app});

	local @ENV{qw(PGHOST PGPORT PGUSER PGDATABASE)} =
	  ('127.0.0.1', $node->port, 'app', 'postgres');
	my ($out, $err) = run_command(\@command);

	delete local $ENV{PGUSER};
	is($out, join("\n", @expected), 'the sample prints what it says')
	  or diag($err);
	is($node->safe_psql('postgres', 'SELECT balance FROM account'),
		'80', 'the sample has paid twice');
	return;
}

my ($sample) = slurp_file("$FindBin::RealBin/../../docs/go.md") =~
  /client_go\.pl runs it[^>]*-->\n```go\n(.*?)^```$/ms
  or die 'docs/go.md has no sample';

install_go_client($dir, $version, 'tests');
install_go($dir, $version, 'sample/main.go', $sample);
# with the options of the build, so that packages are compiled once
system_or_bail($go, 'vet', '-race', with_our_clock(), 'dlock.org/dlock/...');
foreach my $program ('tests', 'sample')
{
	system_or_bail($go, 'build', '-race', with_our_clock(), '-o',
		"$dir/$program", "dlock.org/dlock/$program");
}
run_sample(start_servers(), "$dir/sample");
run_program('Go', "$dir/tests", 'own');
run_scenarios('go', "$dir/tests");
done_testing();
