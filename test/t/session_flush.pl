# An acquire that fails after the grant keeps nothing.  Before a session is
# told of a grant, it flushes the removal of the earlier holder's row, and the
# flush can fail.
#
# What would break it: a ticket that counts as acquired before the flush.
#
# The flush rarely fails.  Here a debugger replaces the noted position of a
# removal, when the session reads it, by a position beyond the WAL's end.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Test;
use Test::More;

plan skip_all => 'no debugger'
  if !grep { -x "$_/gdb" } split /:/, $ENV{PATH};

my $node = new_server('main');
my $admin = session($node);
my $client = session($node);
my $script = $node->data_dir . '/gdb';
my $out = '';

# The debugger replaces the noted position whenever the session reads it, until
# the error.
open(my $file, '>', $script) or die "open: $!";
print $file <<'END';
set pagination off
handle all nostop noprint pass
define note
  set $i = 0
  while $i < 1024
    set var $space->removed[$i].value = $arg0
    set $i = $i + 1
  end
end
break dlock_journal_flush_removal
commands
  silent
  set $space = space
  note 0x7fffffff00000000
  enable 2
  continue
end
break errstart
commands
  silent
  note 1
  disable 2
  echo raised\n
  continue
end
break dlock_journal_find_removal
commands
  silent
  set $space = space
  note 0x7fffffff00000000
  enable 2
  continue
end
disable 2
continue
END
close($file);

# If no row was ever removed, the session reads no position.
$admin->query("SELECT dlock_release_ticket(dlock_ttl_acquire('lease', '1h'))");
$admin->wait_for('SELECT count(*) = 0 FROM dlock_locks');
$client->query("SELECT dlock_acquire('held')");
my $ticket = $client->query("SELECT dlock_fence('held')");
my $gdb = IPC::Run::start(
	[ 'gdb', '-q', '-nx', '-batch', '-p', $client->{pid}, '-x', $script ],
	'<', \undef, '>', \$out, '2>&1',
	IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
poll('the debugger is there',
	sub { $gdb->pump_nb; $out =~ /^Breakpoint 3 at/m || !$gdb->pumpable });
# This call fails if the debugger can replace the position.
my $first = '' . $client->query("SELECT dlock_fence('held')");
poll('the debugger has replaced the position',
	sub { $gdb->pump_nb; $out =~ /^raised/m || !$gdb->pumpable });
if ($out !~ /^raised/m)
{
	diag($out);
	$gdb->kill_kill;
	plan skip_all => 'the debugger cannot replace a position';
}

my $unflushed = qr/ERROR:  XX000: xlog flush request .* is not satisfied/;
my $state = q{SELECT string_agg(name || ' ' || depth, ', ' ORDER BY ticket)
	FROM dlock_locks};

foreach my $call (
	"dlock_acquire('lock')",
	"dlock_try_acquire('lock', shared => true)",
	"dlock_xact_acquire('lock')",
	"dlock_acquire('lock', slots => 2)",
	"dlock_acquire_all('{a, b, held, lock}')",
	"dlock_enqueue('lock', 'nobody')",
	"dlock_acquire('held')",
	"dlock_xact_acquire('held')",
	"dlock_enqueue('held', 'nobody')",
	"dlock_wait($ticket)")
{
	$client->query('BEGIN');
	like($client->query("SELECT $call"), $unflushed, "$call fails");
	is($admin->query($state), 'held 1', "$call: the failed call keeps nothing");
	$client->query('ROLLBACK');
	is($admin->query($state), 'held 1', "$call: nothing else is held afterwards");
}

$client->quit;
eval { $gdb->finish };
$admin->quit;
$node->stop;
done_testing();
