# Programs in JavaScript with node-postgres, postgres.js, Knex, Sequelize,
# TypeORM or Drizzle. test/clients/javascript describes them, and the faults
# that would break them.  This test gives them a server, and counts each of
# their tests.  A program in TypeScript checks the types of clients/node.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::JavaScript;
use Dlock::Program;
use Dlock::Test;
use File::Copy qw(copy);
use PostgreSQL::Test::Utils;
use Test::More;

my $installed = $ENV{DLOCK_JAVASCRIPT};

plan skip_all => 'npm, or a package that npm should install, is missing'
  unless $installed;

my $node = new_server('main', conf => "deadlock_timeout = '10ms'");
my $top = "$FindBin::RealBin/../..";
my $dir = PostgreSQL::Test::Utils::tempdir;

$node->safe_psql(
	'postgres', q{
	CREATE ROLE admin SUPERUSER LOGIN;
	CREATE ROLE app LOGIN;
	CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL);
	INSERT INTO account VALUES (7, 1000);
	GRANT SELECT, UPDATE ON account TO app;
	CREATE FUNCTION raise(code text) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		RAISE 'raised' USING ERRCODE = code;
	END $$});
name_server($node, 'app');
$ENV{PG_TEST_TIMEOUT_DEFAULT} = $PostgreSQL::Test::Utils::timeout_default;

install_javascript($dir);
foreach my $file (glob("$top/test/clients/javascript/{*.mjs,*.mts,tsconfig.json}"))
{
	copy($file, $dir) or die "$file: $!";
}

run_program('JavaScript', 'node', "$dir/run.mjs");

my ($out, $err) = run_command(
	[ 'node', "$installed/node_modules/typescript/bin/tsc", '-p', $dir ]);
is($out, '', 'the types are correct');
($out, $err) = run_command([ 'node', "$dir/using.mjs" ]);
is($out, 'free true 0', 'await using: the block releases all that it has') or diag($err);
$node->stop;
done_testing();
