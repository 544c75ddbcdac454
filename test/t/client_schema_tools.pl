# Tools that compare a database with an application's models, or dump its
# schema, leave dlock's objects alone if they are set up as
# docs/applications.md advises: with the extension in a schema of its own, or
# in "public" with a filter.  They still change the application's tables while
# locks are held.
#
# What would break it: a tool that mistakes a relation of the extension for the
# application's.  The test also shows the changes that a tool wants without the
# advice.  If these changes disappear, the advice is no longer needed.
#
# The programs are in test/clients/schema_tools.  Tools that are not installed
# are left out.

use strict;
use warnings FATAL => 'all';

use File::Copy qw(copy);
use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Program;
use Dlock::Test;
use PostgreSQL::Test::Utils;
use Test::More;

my $tools = "$FindBin::RealBin/../clients/schema_tools";
my $dir = PostgreSQL::Test::Utils::tempdir;
my $node = new_server('main');

# The tools find the server by these variables.
$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGUSER} = $node->safe_psql('postgres', 'SELECT current_user');

# run_tool(@command): returns the command's exit status and output
sub run_tool
{
	my ($out, $err);
	my $run = eval { IPC::Run::run([@_], '<', \undef, '>', \$out, '2>', \$err); 1 };

	return ($run ? $? : -1, ($out // '') . ($err // ''));
}

#
# A database for each of the two layouts, with an application's table, a lease and
# a lock of a session
#
my %schema = ('in_public' => 'public', 'on_its_own' => 'dlock');
my (%holder, %lease, %objects);
my $objects = q{SELECT string_agg(pg_describe_object(classid, objid, 0), E'\n'
		ORDER BY classid, objid)
	FROM pg_depend WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
		AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')};

foreach my $dbname (sort keys %schema)
{
	my $schema = $schema{$dbname};

	$node->safe_psql('postgres', "CREATE DATABASE $dbname");
	$node->safe_psql($dbname,
		"CREATE SCHEMA IF NOT EXISTS $schema; CREATE EXTENSION dlock SCHEMA $schema; "
		  . 'CREATE TABLE account (id integer PRIMARY KEY)');
	$holder{$dbname} = session($node, $dbname);
	$lease{$dbname} =
	  $holder{$dbname}->query("SELECT $schema.dlock_lease_open('1h')");
	$holder{$dbname}->query(
		"SELECT $schema.dlock_lease_acquire('of the lease', $lease{$dbname})");
	$holder{$dbname}->query("SELECT $schema.dlock_acquire('of the session')");
	$objects{$dbname} = $node->safe_psql($dbname, $objects);
}

# dlock's objects are unchanged, and all locks are held.
sub left_alone
{
	my ($dbname, $test) = @_;
	my $schema = $schema{$dbname};
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is($node->safe_psql($dbname, $objects), $objects{$dbname},
		"$test: dlock has what it had");
	is( $holder{$dbname}->query(
			"SELECT $schema.dlock_renew($lease{$dbname}), "
			  . "$schema.dlock_is_held('of the session')"),
		'1|t',
		"$test: all locks are held");
	return;
}

#
# Alembic: the changes that it proposes
#
SKIP:
{
	# The first Python in the path may not have the packages.
	my ($python) = grep { works($_, '-c', 'import alembic, psycopg2') }
	  'python3', '/usr/bin/python3';

	not_installed('Alembic') unless $python;

	my $all = 'remove_table dlock_queue|remove_table dlock_versions';
	my $own = "add_table note\n";

	foreach my $case (
		[ 'in_public', qr/$all/ ],
		[ 'in_public', qr/^$own$/, 'advised' ],
		[ 'on_its_own', qr/^$own$/ ],
		[ 'on_its_own', qr/$all/, 'schemas' ],
		[ 'on_its_own', qr/^$own$/, 'schemas', 'advised' ])
	{
		my ($dbname, $pattern, @how) = @$case;
		my ($status, $out) =
		  run_tool($python, "$tools/alembic_tool.py", $dbname, @how);
		my $test = join ' ', 'Alembic,', $dbname, @how;

		is($status, 0, "$test: works") or diag($out);
		like($out, $pattern,
			"$test: " . ($pattern =~ /dlock/ ? 'the trap' : 'dlock is not seen'));
	}
}

#
# Rails: dump and load
#
SKIP:
{
	not_installed('ActiveRecord')
	  unless works('ruby', '-e', 'require "active_record"; require "pg"');

	foreach my $case (
		[ 'in_public', 'dump' ],
		[ 'in_public', 'dump', 'advised' ],
		[ 'on_its_own', 'dump' ],
		[ 'on_its_own', 'structure_dump' ])
	{
		my ($dbname, $dump, @how) = @$case;
		my $test = join ' ', 'Rails,', $dbname, $dump, @how;
		my $file = join '_', $dbname, $dump, @how;
		my $path = "$dir/$file" . ($dump eq 'dump' ? '.rb' : '.sql');
		my ($status, $out) = run_tool('ruby', "$tools/rails_tool.rb", $dbname,
			$dump, $path, @how);

		is($status, 0, "$test: works") or diag($out);
		$node->safe_psql('postgres', "CREATE DATABASE $file");
		($status, $out) = run_tool('ruby', "$tools/rails_tool.rb", $file,
			$dump =~ s/dump/load/r, $path, @how);
		if ("$dbname $dump @how" eq 'in_public dump ')
		{
			like($out, qr/extension dlock requires it/,
				"$test: the trap, it cannot be loaded");
			next;
		}
		is($status, 0, "$test: the dump can be loaded") or diag($out);
		unlike(slurp_file($path), qr/dlock_queue/, "$test: dlock's tables are not in it");
		# before Rails 8, a dump in Ruby lacks the extension's schema
		my $schema = $node->safe_psql($file,
			q{SELECT extnamespace::regnamespace FROM pg_extension WHERE extname = 'dlock'});

		is($schema, $schema{$dbname}, "$test: dlock is where it was")
		  if $dump eq 'structure_dump';
		is( $node->safe_psql($file,
				"SELECT count(*) FROM account WHERE $schema.dlock_acquire('lock') IS NULL"),
			'0',
			"$test: the table is there, and dlock works");
	}
}

#
# drizzle-kit: the changes that it pushes.  DLOCK_DRIZZLE is the directory in
# which npm has installed it.
#
SKIP:
{
	my $installed = $ENV{DLOCK_DRIZZLE};

	not_installed('drizzle-kit')
	  unless $installed && -e "$installed/node_modules/.bin/drizzle-kit";

	my $work = "$dir/drizzle";

	mkdir $work or die "$work: $!";
	symlink "$installed/node_modules", "$work/node_modules" or die $!;
	# Node.js searches for imports in the importing file's directory.
	foreach my $file ('drizzle.config.ts', 'schema.ts')
	{
		copy("$tools/$file", $work) or die "$file: $!";
	}

	foreach my $case (
		[ 'in_public', '{}', '' ],
		# The tool's filter covers tables only, not sequences.
		[ 'in_public', '{"tablesFilter":["!dlock_*"]}', '' ],
		[ 'on_its_own', '{"schemaFilter":["public","dlock"]}', '' ],
		[ 'on_its_own', '{"schemaFilter":["public"]}', 'yes' ])
	{
		my ($dbname, $filters, $note) = @$case;
		my $test = "drizzle-kit, $dbname $filters";

		local @ENV{ 'PGDATABASE', 'FILTERS', 'NOTE' } =
		  ($dbname, $filters, $note);
		my ($status, $out) = run_tool('sh', '-c',
			"cd '$work' && node_modules/.bin/drizzle-kit push --force --verbose");

		if ($note)
		{
			is($status, 0, "$test: works") or diag($out);
			unlike($out, qr/"dlock/, "$test: dlock is not seen");
			is($node->safe_psql($dbname, "SELECT 'public.note'::regclass"),
				'note', "$test: the application's own change is made");
		}
		else
		{
			like($out, qr/DROP SEQUENCE "\w+"\."dlock_ticket_seq"/,
				"$test: the trap");
		}
	}
}

left_alone($_, $_) foreach sort keys %schema;
$_->quit foreach values %holder;
$node->stop;
done_testing();
