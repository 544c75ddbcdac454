# Programs with the drivers and libraries of Go and Ruby work as docs/go.md and
# docs/ruby.md advise.  They show each trap that these pages warn of.
#
# What would break it: see the programs, test/clients/go and
# test/clients/test_activerecord.rb.  This test gives them a server, and counts
# each of their tests.  It also runs the pages' samples.  Programs that are not
# installed are skipped.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Program;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = "$FindBin::RealBin/../clients";
my $dir = PostgreSQL::Test::Utils::tempdir;
my $timeout = $PostgreSQL::Test::Utils::timeout_default;
my $node = new_server('main',
	conf => "deadlock_timeout = '10ms'\nstatement_timeout = '${timeout}s'\n");

# the programs' role, and names reserved for another role
$node->safe_psql('postgres', 'CREATE ROLE app LOGIN');
$node->safe_psql('postgres',
	q{SELECT dlock_reserve('reserved/', current_user::regrole)});
name_server($node, $node->safe_psql('postgres', 'SELECT current_user'));

# sample($language, $before): writes $before and a sample into a file.  The
# sample is the one on the language's page that is marked to be run here.
sub sample
{
	my ($language, $before) = @_;
	my $page = slurp_file("$FindBin::RealBin/../../docs/$language.md");
	my $file = "$dir/sample." . ($language eq 'go' ? 'go' : 'rb');

	$page =~
	  /client_stacks\.pl runs it -->\n```$language\n(.*?)^```$/ms
	  or die "there is no sample for $language";
	append_to_file($file, $before . $1);
	return $file;
}

# The sample pays, and leaves no lock.
sub sample_works
{
	my ($output, @command) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($out, $err);

	$node->safe_psql('postgres', 'UPDATE account SET balance = 100 WHERE id = 7');
	($out, $err) = run_command(\@command);
	is($?, 0, 'the sample works') or diag($err);
	is($out, $output, 'the sample prints what it should');
	is($node->safe_psql('postgres', 'SELECT balance FROM account WHERE id = 7'),
		'90', 'the sample has paid');
	ok( $node->poll_query_until(
			'postgres', 'SELECT count(*) = 0 FROM dlock_locks'),
		'the sample leaves no lock');
	return;
}

$node->safe_psql('postgres',
	'CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL);'
	  . 'INSERT INTO account VALUES (1, 0), (7, 100); GRANT ALL ON account TO app');

SKIP:
{
	# use Debian's packages, without a network
	local $ENV{GO111MODULE} = 'off';
	local $ENV{GOPATH} = '/usr/share/gocode';
	local $ENV{GOCACHE} = "$dir/cache";
	local $ENV{GOFLAGS} = '';
	my ($go) = grep { works($_, 'version') } 'go', glob('/usr/lib/go-*/bin/go');

	not_installed('Go')
	  unless $go
	  && works($go, 'list', 'github.com/lib/pq', 'github.com/jackc/pgx/v4');
	system_or_bail('sh', '-c', "cd '$clients/go' && $go build -o '$dir/stacks' .");
	run_program('Go', "$dir/stacks");

	my $sample = sample('go', '');

	system_or_bail($go, 'build', '-o', "$dir/sample", $sample);
	sample_works('', "$dir/sample");
}

SKIP:
{
	not_installed('ActiveRecord')
	  unless works('ruby', '-e', 'require "active_record"; require "pg"');
	run_program('ActiveRecord', 'ruby', "$clients/test_activerecord.rb");
	sample_works(
		"working\n55L01",
		'ruby',
		sample(
			'ruby',
			q{require 'active_record'
				ActiveRecord::Base.establish_connection(adapter: 'postgresql')
				class Account < ActiveRecord::Base
					self.table_name = 'account'
				end
			}));
}

$node->stop;
done_testing();
