# examples/store.py: a store that compares ETags, and does not know about
# locks, refuses the writes of a late holder.
#
# What would break it: a holder that writes before it has claimed the object; a
# late write between the next holder's claim and its first write; a late holder
# that reads the object again and continues.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Dlock::Example;
use Dlock::Python;
use Dlock::Test;
use HTTP::Tiny;
use Test::More;

my $python = find_python('import psycopg; import sys; '
	  . 'assert sys.version_info >= (3, 11)');

plan skip_all => 'python3 from 3.11 on with psycopg 3 is not installed'
  unless $python;

my $node = example_server();
my $admin = session($node);
# The ttls of the holder to be killed, and of the holder to be paused, whose
# lease must not expire before the pause
my $killed = ample(4);
my $paused = ample(10);
my $long = 600;
my $http = HTTP::Tiny->new;

sub store
{
	my ($title, $ttl, @arguments) = @_;

	return Dlock::Example->new($title, { TTL => $ttl }, $python,
		"$examples/store.py", @arguments);
}

my $server = store('the store', $long, 'serve', 0);
my $url = 'http://127.0.0.1:' . ($server->says(qr/^serving/) =~ s/\D//gr) . '/log';

sub lines
{
	my ($list) = $http->get($url)->{content} =~ /"lines": \[(.*?)\]/;

	return $list =~ s/"//gr;
}

# put($content, %condition): returns the status
sub put
{
	my ($content, %condition) = @_;

	return $http->put($url, { content => $content, headers => \%condition })
	  ->{status};
}

my $first = store('the first', $paused, 'append', $url);

$first->says(qr/^claimed/);
$first->type('one');
$first->says(qr/^stored one/);

# The first holder's next write passes the holder's own check, and is paused
# before it is sent.
my $etag = $http->get($url)->{headers}{etag};
my $late = $http->get($url)->{content} =~ s/"one"/"one", "late"/r;

$first->signal('STOP');

my $second = store('the second', $killed, 'append', $url);

$second->says(qr/^claimed/);
is(put($late, 'If-Match' => $etag),
	412, 'a late write is refused as soon as the next holder has claimed');
is(lines(), 'one', 'it has written nothing');
$second->type('two');
$second->says(qr/^stored two/);
$first->signal('CONT');
$first->type('late');
$first->ends(1, 'the paused holder has lost');
like($first->err, qr/^lost: /, 'it says so');
is(lines(), 'one, two', 'it writes nothing when it resumes');

# A holder that dies leaves an intact object, and its lock expires.
$second->vanish;

my $third = store('the third', $long, 'append', $url);

$third->says(qr/^claimed/);
$third->type('three');
$third->says(qr/^stored three/);

# An unexpected write by another program
my $content = $http->get($url)->{content};

is(put($content, 'If-Match' => $http->get($url)->{headers}{etag}),
	200, 'the same object has the same ETag');
is(put($content =~ s/"three"/"3"/r, 'If-Match' => '"other"'),
	412, 'another ETag is refused');
is(put($content, 'If-None-Match' => '*'), 412, 'a new object is refused');
is(put($content), 428, 'a write without a condition is refused');
$third->type('four');
$third->says(qr/^stored four/);
is(put($content, 'If-Match' => $http->get($url)->{headers}{etag}),
	200, 'as if a later holder had written');
$third->type('five');
$third->ends(1, 'a holder whose object has changed has lost');
is(lines(), 'one, two, three', 'it writes nothing');

# A late holder that reads the object again finds a greater fence than its own.
$content =~ s/"fence": \d+/"fence": 9007199254740991/;
put($content, 'If-Match' => $http->get($url)->{headers}{etag});

my $fourth = store('the fourth', $long, 'append', $url);

$fourth->ends(1, 'a holder with a smaller fence is refused');
like($fourth->err, qr/has fence 9007199254740991/, 'it says so');
is(lines(), 'one, two, three', 'the holder with the smaller fence writes nothing');
is($admin->query('SELECT count(*) FROM dlock_locks'), '0', 'no lock is left');

$server->vanish;
$admin->quit;
$node->stop;
done_testing();
