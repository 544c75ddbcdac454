# The commands that show and end locks.  ls, blockers, stats and top show the
# contents of the views, as tables, JSON and CSV.  watch reports each change of
# holder, also across a restart of the server.  release and close end locks and
# leases, with only the role's privileges.
#
# What would break it: a call that omits dlock's schema; a missing column, or a
# name that breaks the format; a watch that hangs on a dead connection, or
# reports the same change twice; an exit code that hides a failure.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Command;
use Dlock::Test;
use JSON::PP;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('main');

# Names that the formats must quote
my $odd = qq(a "b",\x{2014}\\n);
$node->safe_psql('postgres', 'DROP EXTENSION dlock; CREATE SCHEMA "x y"; '
	  . 'CREATE EXTENSION dlock SCHEMA "x y"; GRANT USAGE ON SCHEMA "x y" TO PUBLIC; '
	  . 'CREATE ROLE alice LOGIN');

my $client = session($node);
my $waiter = session($node);

utf8::encode($odd);
$client->query('SET search_path = "x y"');
$waiter->query('SET search_path = "x y"');
my $held = $client->query(qq{SELECT dlock_acquire('$odd', info => 'first')});
$waiter->start(qq{SELECT dlock_acquire('$odd', info => 'second')});
$client->until_waits($waiter);
my $lease = $client->query(q{SELECT dlock_lease_open('1h')});
my $ticket = $client->query(qq{SELECT dlock_lease_acquire('b', $lease)});

sub shown
{
	my ($test, @arguments) = @_;
	my ($code, $out, $err) = dlock($node, @arguments);
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is("$code$err", '0', $test);
	return $out;
}

sub refused
{
	my ($message, $where, @arguments) = @_;
	my ($code, $out, $err) = dlock($where, @arguments);
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is("$code$out", '1', "dlock @arguments: fails");
	like($err, $message, 'says why');
	return;
}

my $table = shown('ls', 'ls');

like($table, qr/^ +name .*\n[-+]+\n \Q$odd\E +\| holds +\|.*\| first +\|.*\n \Q$odd\E +\| waits 1 .*\n b +\| holds /,
	'a table, in the order of the queue');
unlike(shown('ls NAME', 'ls', 'b'), qr/first/, 'ls NAME shows one lock');
my $rows = decode_json(shown('as JSON', 'ls', '--json'));

is(join(',', map { $_->{ticket} } @$rows),
	$client->query('SELECT string_agg(ticket::text, \',\' ORDER BY name, position, ticket) FROM dlock_locks'),
	'each ticket');
utf8::encode(my $name = $rows->[0]{name});
is($name, $odd, 'a name with quotes');
is(scalar keys %{ $rows->[0] }, 20, 'all columns of the view');
is_deeply(decode_json(shown('of no lock', 'ls', '--json', 'none')), [], 'an empty array');
like(shown('as CSV', 'ls', '--csv', $odd),
	qr/^name,ticket,.*\n"a ""b"".*",$held,exclusive,/, 'CSV');
like(shown('blockers', 'blockers'),
	qr/^ +1 \| +$client->{pid} \|.*\| first /m, 'the root');
is(decode_json(shown('as JSON', 'blockers', '--json'))->[0]{blocked}, 1, 'JSON');
like(shown('stats', 'stats'), qr/^waiting +\| 1$/m, 'a line for each counter');
is(decode_json(shown('as JSON', 'stats', '--json'))->[0]{held}, 2, 'JSON');

foreach my $what ('ls', 'stats --json', 'top --once', "watch '$odd'")
{
	my ($out, $err) = run_command([ 'sh', '-c', "timeout 60 dlock -d '" . $node->connstr('postgres')
		  . "' $what >/dev/full; echo code \$?" ]);

	is("$err; $out", 'dlock: error: could not write to standard output: '
		  . 'No space left on device; code 1', "$what: a failed write is reported");
}

my $top = shown('top', 'top', '--once');

like($top, qr/^dlock: 2 held, 1 waiting, .*blocked.*first.*\Q$odd\E/s, 'summary, blockers, locks');
unlike(shown('top of some', 'top', '--filter=second'), qr/^ b /m, 'the filter hides other locks');

#
# watch, over a restart
#
my $watch = Dlock::Command->new($node, 'watch', '--json', 'w', $odd);
my $lines = Dlock::Command->new($node, 'watch', 'w');

sub watched
{
	my ($pattern, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	eval { poll($test, sub { $watch->out =~ $pattern }) };
	return like($watch->out, $pattern, $test);
}

watched(qr/"free","lock":"w"/, 'free at first');
watched(qr/"held".*"ticket":$held,/, 'held at first');
poll('the second watch has begun, too', sub { $lines->out =~ /free/ });
my $one = $client->query(q{SELECT dlock_lease_acquire('w', } . "$lease, info => 'me')");

watched(qr/"held","lock":"w","ticket":$one,.*"me"/, 'held after an acquire');
poll('lines', sub { $lines->out =~ /held/ });
like($lines->out, qr/^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  w  free\n\S+ \S+  w  held $one exclusive lease me\n$/,
	'a line for each change');

# The connection is lost.  The holder of "w", the first name, does not change.
$client->query('SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
	  . "WHERE backend_type = 'client backend' AND pid NOT IN ($client->{pid}, $waiter->{pid})");
$client->query(qq{SELECT dlock_release('$odd')});
watched(qr/"held","lock":"a .*"second"/, 'the connection is lost: the next holder is told');
my @told = $watch->out =~ /"ticket":$one,/g;

is(scalar @told, 1, 'an unchanged holder is not reported again');
$_->quit foreach $client, $waiter;
$node->restart;
$client = session($node);
$client->query('SET search_path = "x y"');
watched(qr/"free","lock":"a /, 'the server is restarted: what a session held is free');
$client->query("SELECT dlock_lease_close($lease)");
watched(qr/"lock":"w".*"free","lock":"w"/s, 'watch goes on after the restart');
foreach my $it ($watch, $lines)
{
	$it->signal('TERM');
	is($it->exit_code, 143, 'a signal ends watch');
}

# Names and info do not break lines or the screen.  Then the extension is dropped.
{
	my $evil = "x\n\e[31m";

	$node->safe_psql('template1', 'CREATE EXTENSION dlock');
	$node->safe_psql('postgres', 'CREATE DATABASE watched');

	my $holder = session($node, 'watched');

	$holder->query("SELECT dlock_acquire('$evil', info => E'a\tb\\u009bc')");
	$watch = Dlock::Command->new($node->connstr('watched'), 'watch', $evil);
	poll('watch reports the holder', sub { $watch->out =~ /\n/ });
	like($watch->out, qr/^\S+ \S+  x\?\?\[31m  held \d+ exclusive session a\?b\?\?c\n$/,
		'control characters are not printed');
	$holder->quit;
	$node->safe_psql('watched', 'DROP EXTENSION dlock; CREATE EXTENSION dlock');
	$holder = session($node, 'watched');
	$held = $holder->query("SELECT dlock_acquire('$evil')");
	poll('watch reports the new holder', sub { $watch->out =~ /held $held/ });
	pass('watch goes on when the extension is created again');
	$holder->quit;
	$node->safe_psql($_, 'DROP EXTENSION dlock') foreach 'template1', 'watched';
	is($watch->exit_code, 1, 'watch ends when the extension is dropped');
	like($watch->err, qr/(warning: extension "dlock" was dropped\n.*){2}error: .*is not installed/s,
		'watch says why it ends');
}

# A name that this server cannot decode
{
	$node->safe_psql('postgres', 'CREATE DATABASE ascii TEMPLATE template0 '
		  . q{ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'});
	$node->safe_psql('ascii', 'CREATE EXTENSION dlock');
	$watch = Dlock::Command->new($node->connstr('ascii'), 'watch', "\xc3\xa4", 'a');
	poll('watch reports other names', sub { $watch->out =~ /  a  free/ });
	like($watch->err, qr/warning: a change cannot be shown: /, 'watch says what it cannot show');
	$watch->signal('TERM');
	is($watch->exit_code, 143, 'a signal ends it');
}

# A request that the server refuses for lack of memory is retried.
{
	# so many names that their memory is charged to the role
	my @many = map { sprintf '%0200d', $_ } 1 .. 40;

	$client->query('ALTER ROLE alice SET dlock.max_memory_per_role = 1');

	my $full = session($node, 'postgres', 'user=alice');

	$full->query('SET search_path = "x y"');
	foreach my $length (1000, 0)
	{
		$full->query(
			qq{DO \$\$
			BEGIN
				FOR n IN 1 .. 100000 LOOP
					BEGIN
						PERFORM dlock_acquire('fill $length ' || n, info => repeat('x', $length));
					EXCEPTION WHEN out_of_memory THEN
						EXIT;
					END;
				END LOOP;
			END \$\$});
	}
	$watch = Dlock::Command->new($node->connstr('postgres') . ' user=alice', 'watch', @many);
	poll('watch reports that memory is exhausted', sub { $watch->err =~ /out of memory/ });
	$full->query('SELECT dlock_release_all()');
	poll('watch succeeds when memory is free', sub { $watch->out =~ /$many[-1]  free/ });
	pass('a refused watch is retried');
	$watch->signal('TERM');
	is($watch->exit_code, 143, 'a signal ends it');
	$full->quit;
}

#
# release and close
#
$held = $client->query(q{SELECT dlock_acquire('mine')});
my @leases = map { $client->query(q{SELECT dlock_lease_open('1h')}) } 1 .. 2;
$client->query("SELECT dlock_lease_acquire('l$_', $leases[0])") foreach 1 .. 2;
my $single = $client->query(q{SELECT dlock_ttl_acquire('single', '1h')});
my $alice = $node->connstr('postgres') . ' user=alice';

refused(qr/there is no ticket $held/, $node, 'release', $held);
refused(qr/permission denied|must have|privileges/, $alice, 'release', $single);
refused(qr/permission denied/, $alice, 'release', '--force', $single);
is(shown('release', 'release', $single), '', 'release prints nothing');
refused(qr/there is no ticket $single/, $node, 'release', $single);
is(shown('by force', 'release', '--force', $held), '', 'release --force ends a session\'s ticket');
is(shown('close', 'close', $leases[0]), "2\n", 'close prints the number of tickets');
refused(qr/there is no lease $leases[0]/, $node, 'close', $leases[0]);
is(shown('by force', 'close', '-f', $leases[1]), "0\n", 'a lease without tickets is closed');
refused(qr/there is no lease $leases[1]/, $node, 'close', '-f', $leases[1]);
refused(qr/too few arguments: LEASE/, $node, 'close');
refused(qr/invalid input syntax for type bigint: "x"/, $node, 'release', 'x');
refused(qr/too many arguments/, $node, $_, 'a', 'b') foreach 'ls', 'stats', 'top';
refused(qr/too few arguments: NAME/, $node, 'watch');
refused(qr/unknown subcommand "lock"/, $node, 'lock');
refused(qr/"dlock" is not installed in database "template1"/, $node->connstr('template1'), $_)
  foreach 'ls', 'blockers', 'stats', 'top';
foreach my $what ('top', 'ls', 'blockers', 'stats', 'watch', 'release', 'close')
{
	my ($out, $err) = run_command([ 'dlock', $what, '--help' ]);

	like("$err$out", qr/^dlock $what: .*Usage:\n  dlock $what /s, "dlock $what --help");
}

#
# Operators of other roles are never run, even if search_path has them first.
#
$client->query(q{
	DO $$
	DECLARE
		type text;
		name text;
	BEGIN
		FOREACH type IN ARRAY '{bool,int4,int8,text,name,oid,interval}'::text[] LOOP
			EXECUTE format('CREATE FUNCTION public.planted(%s, %1$s) RETURNS bool LANGUAGE plpgsql '
				'AS ''BEGIN RAISE ''''planted code was run''''; END''', type);
			FOREACH name IN ARRAY '{=,<>,<,>,<=,>=}'::text[] LOOP
				EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %2$s, FUNCTION = public.planted)',
					name, type);
			END LOOP;
		END LOOP;
	END $$;
	ALTER DATABASE postgres SET search_path = public, pg_catalog});
like(session($node)->query('SELECT 1 = 1'), qr/planted code was run/, 'an operator is planted');
$held = $client->query(q{SELECT dlock_acquire('x')});
$lease = $client->query(q{SELECT dlock_lease_open('1h')});
$watch = Dlock::Command->new($node, 'watch', 'x');
poll('watch', sub { $watch->out =~ /held/ });
$watch->signal('TERM');
is($watch->exit_code . $watch->err, '143', 'watch runs no planted operator');
shown("$_->[0] runs no planted operator", @$_)
  foreach [ 'ls' ], [ 'ls', 'x' ], [ 'ls', '--json' ], [ 'blockers' ], [ 'stats' ], [ 'top', '--once', '--filter=x' ],
  [ 'release', '--force', $held ], [ 'close', $lease ],
  [ 'run', 'x', 'true' ],
  # long enough to ask once whether the lock is held
  [ 'run', '--session', 'x', 'sleep', '4' ];

done_testing();
