# The files of docs/monitoring for postgres_exporter and Grafana work: every
# query runs, and has the documented columns with numbers.  The dashboard uses
# only metrics that the exporter has.
#
# What would break it: a renamed column of a view; a query that is changed
# without its metrics, or a metric without the dashboard.
#
# The test reads both files as their programs do, and needs neither program.

use strict;
use warnings FATAL => 'all';

use CPAN::Meta::YAML;
use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use JSON::PP;
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = "$FindBin::RealBin/../../docs/monitoring";
my $exporter =
  CPAN::Meta::YAML->read_string(slurp_file("$dir/postgres_exporter.yaml"))
  ->[0];
my $dashboard = decode_json(slurp_file("$dir/grafana.json"));
my $node = new_server('main', conf => "deadlock_timeout = 10ms\n");
my %metrics;    # name => its labels

# The columns of a query, and its rows as hashes
sub ask
{
	my ($sql) = @_;
	my ($out, $err);

	$node->psql(
		'postgres',
		'',
		stdout => \$out,
		stderr => \$err,
		extra_params => [
			'-v', 'VERBOSITY=verbose', '-P', 'tuples_only=off',
			'-P', 'footer=off', '-P', 'fieldsep=|',
			'-c', $sql
		]);
	my ($head, @rows) = map { [ split /\|/, $_, -1 ] } split /\n/, $out;

	return (
		$err,
		$head // [],
		map { my %row; @row{@$head} = @$_; \%row } @rows);
}

#
# Something for each query: a session waits for a lock, the lock's holder waits
# for a row, another session has waited, and a lease with a lock expires.
my @sessions = map { session($node) } 0 .. 3;
{
	my ($admin, $root, $holder, $waiter) = @sessions;

	$admin->query('CREATE TABLE t (i integer); INSERT INTO t VALUES (1)');
	$holder->query("SELECT dlock_acquire('waited for')");
	$waiter->start("SELECT dlock_acquire('waited for')");
	$admin->until_waits($waiter);
	$holder->query("SELECT dlock_release('waited for')");
	$waiter->query("SELECT dlock_release('waited for')") if $waiter->answer;

	$root->query('BEGIN; UPDATE t SET i = 2');
	$holder->query("SELECT dlock_acquire('waited for')");
	$holder->start('UPDATE t SET i = 3');
	$admin->wait_for("SELECT wait_event_type = 'Lock' FROM pg_stat_activity "
		  . "WHERE pid = $holder->{pid}");
	$waiter->start("SELECT dlock_acquire('waited for')");
	$admin->until_waits($waiter);
	$admin->query("SELECT dlock_ttl_acquire('leased', '1h')");
}

#
# postgres_exporter
#
foreach my $namespace (sort keys %$exporter)
{
	my $entry = $exporter->{$namespace};
	my ($error, $columns, @rows) = ask($entry->{query});
	my %usage =
	  map { my ($name) = keys %$_; $name => $_->{$name}{usage} }
	  @{ $entry->{metrics} };
	my @labels = sort grep { $usage{$_} eq 'LABEL' } keys %usage;
	my @values = grep { $usage{$_} ne 'LABEL' } keys %usage;

	is($error, '', "$namespace: its query runs");
	is_deeply(
		[ sort @$columns ],
		[ sort keys %usage ],
		'the query has the columns of its metrics');
	is_deeply([ grep { !/^(?:LABEL|COUNTER|GAUGE)$/ } values %usage ],
		[], 'the metrics have known kinds');
	is_deeply(
		[
			grep { ($usage{$_} eq 'COUNTER') != /(?:_total|^bucket)$/ }
			  @values
		],
		[],
		'counters, and only counters, have names of counters');
	is_deeply(
		[
			grep { !$_->{ (keys %$_)[0] }{description} }
			  @{ $entry->{metrics} }
		],
		[],
		'the metrics have descriptions');
	cmp_ok(scalar @rows, '>', 0, 'the query returns rows');
	is_deeply(
		[ grep { !/^[0-9]+(?:\.[0-9]+)?$/ } map { @$_{@values} } @rows ],
		[], 'all values are numbers');
	my %series = map { join('|', @$_{@labels}) => 1 } @rows;
	is(scalar keys %series, scalar @rows, 'no series is returned twice');
	$metrics{"${namespace}_$_"} = { map { $_ => 1 } @labels } foreach @values;
}

# The properties of a histogram
{
	my (undef, undef, @rows) = ask($exporter->{dlock_wait_seconds}{query});
	my @bounds = map { $_->{le} } @rows;
	my @sorted = sort { $a <=> $b } grep { $_ ne '+Inf' } @bounds;
	my %bucket = map { $_->{le} => $_->{bucket} } @rows;
	my @counts = @bucket{ @sorted, '+Inf' };

	is(scalar(grep { $_ eq '+Inf' } @bounds),
		1, 'a histogram has the bound +Inf');
	is_deeply([ grep { $counts[$_] < $counts[ $_ - 1 ] } 1 .. $#counts ],
		[], 'each bucket includes the smaller buckets');
	cmp_ok($counts[-1], '>', 0, 'the histogram is not empty');
}
{
	my (undef, undef, @rows) = ask($exporter->{dlock_root}{query});

	is_deeply(
		[ map { "$_->{state}|$_->{count}|$_->{blocked}" } @rows ],
		['idle in transaction|1|2'],
		'one session is the root, and two wait');
}

#
# Grafana
#
my (%ids, %asked);
foreach my $panel (@{ $dashboard->{panels} })
{
	my $title = $panel->{title};
	my @used =
	  map { $_->{matcher}{options} } @{ $panel->{fieldConfig}{overrides} };
	my @wrong;

	ok(!$ids{ $panel->{id} }++ && $panel->{description}, "panel $title");
	foreach my $target (@{ $panel->{targets} })
	{
		if (defined $target->{rawSql})
		{
			my ($error, $columns, @rows) = ask($target->{rawSql});
			my %has = map { $_ => 1 } @$columns;

			is($error, '', "$title: its query runs");
			is_deeply([ grep { !$has{$_} } @used ],
				[], 'the query has the columns that the panel uses');
			cmp_ok(scalar @rows, '>', 0, 'the query returns rows');
			next;
		}
		my $expr = $target->{expr};
		my @labels = (
			$expr =~ /(\w+)=~?"/g,
			(map { split /, */ } $expr =~ /\bby \((.*?)\)/g),
			$target->{legendFormat} =~ /\{\{(\w+)\}\}/g);
		my @names = $expr =~ /\b(dlock_\w+)/g;

		push @wrong, "no metric: $expr" unless @names;
		foreach my $name (@names)
		{
			$asked{$name} = 1;
			push @wrong, "$name: not of the exporter" unless $metrics{$name};
			push @wrong, "$name: has no $_"
			  foreach grep { !$metrics{$name}{$_} } @labels;
		}
	}
	is_deeply(\@wrong, [], "$title: asks for what there is")
	  if $panel->{type} ne 'table';
}
cmp_ok(scalar keys %asked, '>', 10, 'the dashboard uses metrics');
foreach my $variable (grep { $_->{type} eq 'query' }
	@{ $dashboard->{templating}{list} })
{
	my ($metric, $label) =
	  $variable->{query} =~ /^label_values\((\w+), (\w+)\)$/;

	ok( $metrics{ $metric // '' }{ $label // '' },
		"variable $variable->{name}: $variable->{query}");
}

$sessions[1]->query('ROLLBACK');
$sessions[2]->answer;
$sessions[2]->query("SELECT dlock_release('waited for')");
$sessions[3]->answer;
$_->quit foreach @sessions;
$node->stop;
done_testing();
