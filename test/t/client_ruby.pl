# The Ruby gem, built and installed, passes clients/scenarios.md, and has
# with_advisory_lock for ActiveRecord.  The sample of docs/ruby.md works.
#
# What would break it: the faults in that page's table; an answer from the
# query cache; a lock that stays in a failed transaction or in the pool; a gem
# that lacks a file.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Program;
use Dlock::Scenarios;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

plan skip_all => 'ruby-pg is not installed'
  unless works('ruby', '-e', 'require "pg"');

my $client = "$FindBin::RealBin/../../clients/ruby";
my $dir = PostgreSQL::Test::Utils::tempdir;

# installs only the packed files, without a network
$ENV{HOME} = $dir;
system_or_bail('sh', '-c',
	"cd '$client' && gem build -q -o '$dir/dlock.gem' dlock.gemspec");
system_or_bail('gem', 'install', '-q', '--local', '--ignore-dependencies',
	'--no-document', '-i', "$dir/gems", "$dir/dlock.gem");

my ($lib) = glob("$dir/gems/gems/dlock-*/lib");
my $node = start_servers();

$node->safe_psql(
	'postgres', q{
	CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL);
	INSERT INTO account VALUES (7, 100);
	GRANT ALL ON account TO app});
SKIP: {
	skip 'ActiveRecord is not installed', 1
	  unless works('ruby', '-e', 'require "active_record"');
	run_own();
}
run_scenarios('ruby', 'ruby', '-W1', "-I$lib", "$client/tests/scenarios.rb");
done_testing();

# The client's own tests, and the sample of docs/ruby.md, which prints what its
# comments say
sub run_own
{
	my ($sample) = slurp_file("$FindBin::RealBin/../../docs/ruby.md") =~
	  /client_ruby\.pl runs it[^>]*-->\n```ruby\n(.*?)^```$/ms
	  or die 'docs/ruby.md has no sample';
	my @expected = $sample =~ /puts .*\s{2,}# (.*)/g;

	local @ENV{qw(PGHOST PGPORT PGDATABASE PGUSER)} =
	  @ENV{qw(PGHOST PGPORT PGDATABASE PGUSER)};
	name_server($node, $node->safe_psql('postgres', 'SELECT current_user'));
	run_program('gem', 'ruby', '-W1', "-I$lib", "$client/tests/run.rb");
	append_to_file("$dir/sample.rb", $sample);
	my ($out, $err) = run_command([ 'ruby', "-I$lib", "$dir/sample.rb" ]);

	is($out, join("\n", @expected), 'the sample prints what it says')
	  or diag($err);
	is($node->safe_psql('postgres', 'SELECT balance FROM account'),
		'90', 'the sample has paid');
	return;
}
