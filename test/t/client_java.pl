# The Java client, built with the JDK alone, passes clients/scenarios.md.
# Programs with JDBC and a HikariCP pool work as docs/java.md advises.
#
# What would break it: see the table in clients/scenarios.md. test/clients/java
# shows each trap that docs/java.md warns of.  The page's sample is run, too.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Java;
use Dlock::Program;
use Dlock::Scenarios;
use PostgreSQL::Test::Utils;
use Test::More;

my @java = find_java('postgresql');
my @pool = find_java('postgresql', 'HikariCP', 'slf4j-api', 'slf4j-nop');

plan skip_all => 'no JDK from 17 on with the JDBC driver is installed'
  unless @java;

my $top = "$FindBin::RealBin/../..";
my $client = "$top/clients/java";
my $dir = PostgreSQL::Test::Utils::tempdir;

# Maven would build the same version.
my ($version) = slurp_file("$top/dlock.control") =~ /^default_version = '(.*)'/m;
my %module = (
	client => '',
	'client-shedlock' => '/shedlock',
	'client-spring' => '/spring');

foreach my $name (sort keys %module)
{
	my $pom = slurp_file("$client$module{$name}/pom.xml");
	my @open;

	while ($pom =~ m{<(/?)([\w.]+)[^<>]*?(/?)>}g)
	{
		push @open, ($1 ? "/$2" : $2) unless $3;
		splice @open, -2 if @open > 1 && $open[-1] eq "/$open[-2]";
	}
	is("@open", '', "pom.xml of $name: each element is closed");
	like(
		$pom,
		qr{<artifactId>dlock-$name</artifactId>\s*<version>\Q$version\E\.0<},
		"pom.xml of $name: of this version");
}

# A page's sample, written into a file
sub sample
{
	my ($name, $page) = @_;

	slurp_file("$top/docs/$page") =~
	  /client_java\.pl runs it[^>]*-->\n```java\n(.*?)^```$/ms
	  or die "$page has no sample";
	append_to_file("$dir/$name.java", $1);
	return "$dir/$name.java";
}

# The program prints what the sample's comments promise.
sub run_sample
{
	my ($name, @command) = @_;
	my @expected = map { split /, / }
	  slurp_file("$dir/$name.java") =~ m{println\(.*\);\s+// (.*)}g;
	my ($out, $err) = run_command(
		[ @command, $name, "jdbc:postgresql://$ENV{DLOCK_MAIN}/postgres?user=app" ]);

	is($out, join("\n", @expected), "sample $name: prints what it says")
	  or diag($err);
	return;
}

my %jar = (client => add_jar(\@java, $client, 'dlock-client'));
is(slurp_file("$client/LICENSE"), slurp_file("$top/LICENSE"), 'its license');
add_classes(\@java, "$client/tests/Run.java");
push @pool, pop(@pool) . ':' . $java[-1] if @pool;

# Debian has neither ShedLock nor Spring Integration: stubs replace the classes
# that are used.
my @modules = @java;
foreach my $name (grep { $module{$_} } sort keys %module)
{
	$jar{$name} = add_jar(\@modules, "$client$module{$name}", "dlock-$name",
		"$client/tests/stubs");
}
foreach my $name (sort keys %jar)
{
	my ($described) =
	  run_command([ 'jar', '--describe-module', '--file', $jar{$name} ]);
	my ($files) = run_command([ 'jar', 'tf', $jar{$name} ]);
	my $module_name = "org.dlock$module{$name}" =~ s{/}{.}r;

	like($described, qr/^\Q$module_name\E automatic$/m, "$name: module name");
	like($files, qr{^META-INF/LICENSE$}m, "$name: license");
	unlike($files, qr{javacrumbs|springframework}, "$name: nothing of others");
}

my $node = start_servers();
my @stacks = map { "$top/test/clients/java/$_.java" } 'Stack', 'Jdbc',
  'More';

if (@pool)
{
	push @stacks, map { "$top/test/clients/java/$_.java" } 'Hikari', 'Sources';
}
else
{
	diag('skipped: HikariCP is not installed');
	@pool = @java;
}
add_classes(\@pool, @stacks, sample('Transfer', 'java.md'));
run_program('JDBC', @pool, 'Jdbc');
$node->safe_psql(
	'postgres', q{
	CREATE SCHEMA slow;
	CREATE FUNCTION slow.dlock_renew(id bigint, ttl interval) RETURNS integer
	LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock_shared(18);
		RETURN public.dlock_renew(id, ttl);
	END $$;
	CREATE FUNCTION slow.dlock_set_info(id bigint, info text) RETURNS boolean
	LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock_shared(18);
		RETURN public.dlock_set_info(id, info);
	END $$;
	CREATE FUNCTION slow.dlock_watch(name text) RETURNS void
	LANGUAGE plpgsql AS $$
	BEGIN
		RAISE 'not now' USING ERRCODE = '55000';
	END $$;
	CREATE FUNCTION slow.dlock_lease_enqueue(
		name text, lease bigint, owner text) RETURNS bigint
	LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM public.dlock_lease_enqueue(name, lease, owner => owner);
		PERFORM pg_terminate_backend(pg_backend_pid());
		RETURN NULL;
	END $$;
	CREATE SEQUENCE slow.granted;
	CREATE FUNCTION slow.dlock_lease_acquire_all(
		names text[], lease bigint, timeout interval) RETURNS bigint[]
	LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM nextval('slow.granted')
		FROM unnest(public.dlock_lease_acquire_all(names, lease, timeout));
		RAISE 'no quorum' USING ERRCODE = '58030';
	END $$;
	GRANT USAGE ON SEQUENCE slow.granted TO app;
	GRANT USAGE ON SCHEMA slow TO app});
run_program('client', @pool, 'More');
add_classes(\@modules,
	map { "$top/test/clients/java/$_.java" } 'Stack', 'Modules');
run_program('modules', @modules, 'Modules');
if (@stacks > 3)
{
	run_program('HikariCP', @pool, 'Hikari');
	run_program('DataSource', @pool, 'Sources');
}
$node->safe_psql(
	'postgres', q{
	CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL);
	INSERT INTO account VALUES (7, 100);
	GRANT SELECT, UPDATE ON account TO app});
run_sample('Transfer', @pool);
is($node->safe_psql('postgres', 'SELECT balance FROM account'),
	'80', 'the sample has paid twice');

# Scenarios that need many connections, or break them, also run over a pool.
if (@stacks > 3)
{
	local $ENV{DLOCK_SCENARIOS} = $ENV{DLOCK_SCENARIOS} // join ' ', qw(
	  session_acquire_release try_busy lease_many enqueue_connection_killed
	  session_connection_killed lease_connection_killed lease_backend_stopped
	  lease_server_stopped lease_restart acquire_cancelled acquire_broken_off
	  release_silent release_owed acquire_owed);
	run_scenarios('java', shift(@pool), '-Dpools=Sources', @pool, 'Run');
}
run_scenarios('java', @java, 'Run');
done_testing();
