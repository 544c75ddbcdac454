--
-- Tickets: a place in the queue without waiting
--
-- No session listens on "nobody", because psql shows an announcement whenever
-- it arrives.  TAP tests notify_* test announcements.
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

-- what this session holds and waits for
CREATE TEMPORARY VIEW tickets AS
SELECT name, mode, slots, permits, position, scope, channel, depth, info
  FROM dlock_locks WHERE pid = pg_backend_pid() ORDER BY ticket;

--
-- A free lock is granted at once.  The ticket is its fence.
--
SELECT dlock_enqueue('a', 'nobody') AS a \gset
SELECT * FROM tickets;
SELECT :a = dlock_fence('a') AS is_fence, dlock_check('a', :a), dlock_is_held('a');

-- a wait for a held ticket returns at once
SELECT dlock_wait(:a), dlock_wait(:a, '0'), dlock_wait(:a, timeout => '1h'),
	dlock_wait(ticket => :a, timeout => NULL);
SELECT * FROM tickets;

-- Enqueueing a held lock again returns the same ticket.  Each enqueue needs a
-- release.  The first call sets the info, and the last call sets the channel.
SELECT dlock_enqueue('a', 'somebody', info => 'unused') = :a AS same;
SELECT * FROM tickets;
SELECT dlock_acquire('a') = :a AS same;
BEGIN;
SELECT dlock_xact_acquire('a') = :a AS same;
SELECT * FROM tickets;
COMMIT;
SELECT dlock_release_ticket(:a), dlock_release('a');
SELECT * FROM tickets;
SELECT dlock_release_ticket(:a);
SELECT * FROM tickets;

-- a ticket that was acquired can be enqueued
SELECT dlock_acquire('a') AS a \gset
SELECT channel FROM tickets;
SELECT dlock_enqueue('a', 'nobody') = :a AS same;
SELECT * FROM tickets;
SELECT dlock_wait(:a, '0');
SELECT dlock_release_all();
BEGIN;
SELECT dlock_xact_acquire('a') AS a \gset
SELECT dlock_enqueue('a', 'nobody') = :a AS same;
SELECT * FROM tickets;
COMMIT;
SELECT * FROM tickets;
SELECT dlock_release_ticket(:a);

-- a ticket that was not enqueued can be waited for
SELECT dlock_acquire('a') AS a \gset
SELECT dlock_wait(:a);
SELECT dlock_release('a');

-- The other arguments, by position
SELECT dlock_enqueue('a', 'nobody', true, NULL, 1, 'me') > 0,
	dlock_enqueue('s', 'nobody', false, 3, 2, 'me, too') > 0;
SELECT * FROM tickets;
SELECT dlock_release_all();

--
-- Modes
--
-- shared, with an exclusive request behind it
SELECT dlock_enqueue('a', 'nobody', shared => true) AS a \gset
SELECT dlock_enqueue('a', 'nobody', shared => true) = :a AS same;
SELECT mode, position, depth FROM tickets;
SELECT dlock_enqueue('a', 'nobody');
SELECT explain_error($$SELECT dlock_enqueue('a', 'nobody')$$);
SELECT dlock_release_all();

-- a shared request counts as exclusive while the session holds exclusive
SELECT dlock_enqueue('a', 'nobody') AS a \gset
SELECT dlock_enqueue('a', 'nobody', shared => true) = :a AS same;
SELECT mode, position, depth FROM tickets;
SELECT dlock_release_all();

-- Slots are not reentrant: each request takes new permits.  A session's
-- tickets may queue behind its own tickets, but it cannot wait for them.
SELECT dlock_enqueue('s', 'nobody', slots => 3) AS s1 \gset
SELECT dlock_enqueue('s', 'nobody', slots => 3, permits => 2) AS s2 \gset
SELECT dlock_enqueue('s', 'nobody', slots => 3, permits => 3) AS s3 \gset
SELECT dlock_enqueue('s', 'nobody', slots => 3) AS s4 \gset
SELECT :s1 < :s2 AND :s2 < :s3 AND :s3 < :s4 AS grows;
SELECT name, mode, slots, permits, position, depth FROM tickets;
SELECT dlock_wait(:s1, '0'), dlock_wait(:s2, '0'), dlock_wait(:s3, '0'),
	dlock_wait(:s4, '0');
SELECT dlock_release_ticket(:s1);
SELECT name, permits, position FROM tickets;
SELECT dlock_release_ticket(:s2);
SELECT name, permits, position FROM tickets;
SELECT dlock_wait(:s3), dlock_wait(:s4, '0');
SELECT dlock_release_ticket(:s3);
SELECT dlock_wait(:s4);

-- when a queued ticket leaves, the tickets behind it move up
SELECT dlock_enqueue('s', 'nobody', slots => 3, permits => 3) AS s5 \gset
SELECT dlock_enqueue('s', 'nobody', slots => 3, permits => 2) AS s6 \gset
SELECT dlock_wait(:s6, '0');
SELECT dlock_release_ticket(:s5);
SELECT dlock_wait(:s6, '0');
SELECT dlock_release('s'), dlock_release('s');

-- A queued ticket is not a held ticket.
SELECT dlock_acquire('s', slots => 1) AS s1 \gset
SELECT dlock_enqueue('s', 'nobody', slots => 1) AS s2 \gset
SELECT dlock_check('s', :s2), dlock_fence('s') = :s1 AS fence;
SELECT dlock_release('s'), dlock_wait(:s2, '0');
SELECT dlock_release('s');
SELECT * FROM tickets;

-- Another number of slots
SELECT dlock_enqueue('s', 'nobody', slots => 1) > 0;
SELECT dlock_enqueue('s', 'nobody', slots => 2);
SELECT dlock_enqueue('s', 'nobody');
SELECT dlock_release_all();

--
-- Waiting behind the session's own ticket is a deadlock, detected at once.
--
SELECT dlock_acquire('s', slots => 1) AS s1 \gset
SELECT dlock_enqueue('s', 'nobody', slots => 1) AS s2 \gset
SELECT explain_error(format('SELECT dlock_wait(%s)', :s2));
SELECT error_of(format('dlock_wait(%s, %L)', :s2, '1h'));
SELECT error_of($$dlock_acquire('s', slots => 1)$$);
-- the ticket can be queried, and stays in the queue
SELECT dlock_wait(:s2, '0');
SELECT name, position FROM tickets;
-- with another ticket behind it
SELECT dlock_enqueue('s', 'nobody', slots => 1) AS s3 \gset
SELECT dlock_release_ticket(:s1);
SELECT dlock_wait(:s2, '0'), error_of(format('dlock_wait(%s)', :s3));
SELECT dlock_release_ticket(:s2);
SELECT dlock_wait(:s3);
SELECT dlock_release_all();

--
-- Locking is not transactional: a rollback keeps the ticket.
--
BEGIN;
SELECT dlock_enqueue('a', 'nobody') AS a \gset
SAVEPOINT one;
SELECT dlock_enqueue('b', 'nobody') AS b \gset
ROLLBACK TO one;
SELECT name, position FROM tickets;
ROLLBACK;
SELECT name, position, channel FROM tickets;
SELECT dlock_wait(:a), dlock_wait(:b);
-- a rollback does not restore a released ticket
BEGIN;
SELECT dlock_release_ticket(:b), dlock_enqueue('c', 'nobody') AS c \gset
SELECT dlock_release_ticket(:c);
ROLLBACK;
SELECT name, position FROM tickets;

-- dlock_release_at_commit() undoes one enqueue, too.
BEGIN;
SELECT dlock_release_at_commit(:a);
ROLLBACK;
SELECT name, depth FROM tickets;
BEGIN;
SELECT dlock_release_at_commit(:a);
SELECT dlock_wait(:a);
COMMIT;
SELECT count(*) FROM tickets;
BEGIN;
SELECT dlock_enqueue('a', 'nobody') AS a \gset
SELECT dlock_release_at_commit(:a);
COMMIT;
SELECT count(*) FROM tickets;

-- also of a waiting ticket
SELECT dlock_acquire('s', slots => 1) > 0;
SELECT dlock_enqueue('s', 'nobody', slots => 1) AS s2 \gset
BEGIN;
SELECT dlock_release_at_commit(:s2);
COMMIT;
SELECT name, position FROM tickets;
SELECT dlock_release_all();

--
-- Calls that release all tickets also end waiting ones.
--
SELECT dlock_acquire('s', slots => 2, permits => 2) > 0,
	dlock_enqueue('s', 'nobody', slots => 2) > 0,
	dlock_enqueue('s', 'nobody', slots => 2) > 0;
SELECT dlock_release_all();
SELECT count(*) FROM tickets;
SELECT dlock_acquire('s', slots => 2, permits => 2) > 0;
SELECT dlock_enqueue('s', 'nobody', slots => 2) AS s2 \gset
DISCARD ALL;
SELECT count(*) FROM dlock_locks;
\set VERBOSITY sqlstate
SELECT dlock_wait(:s2);
SELECT dlock_release_ticket(:s2);
\set VERBOSITY default

-- DISCARD ALL has dropped the view.
CREATE TEMPORARY VIEW tickets AS
SELECT name, mode, slots, permits, position, scope, channel, depth, info
  FROM dlock_locks WHERE pid = pg_backend_pid() ORDER BY ticket;

--
-- A ticket that has ended
--
SELECT dlock_wait(1);
\echo :SQLSTATE
SELECT dlock_wait(0, '0');
SELECT dlock_wait(-1);
SELECT dlock_wait(9223372036854775807, '1h');
-- released
SELECT dlock_enqueue('a', 'nobody') AS a \gset
SELECT dlock_release_ticket(:a);
SELECT error_of(format('dlock_wait(%s)', :a), :a);
-- revoked by force: queries still answer, and the ticket must be released
SELECT dlock_enqueue('a', 'nobody') AS a \gset
SELECT dlock_force_release(:a);
SELECT error_of(format('dlock_wait(%s)', :a), :a);
SELECT error_of(format('dlock_wait(%s, %L)', :a, '0'), :a);
SELECT dlock_is_held('a'), dlock_check('a', :a);
\set VERBOSITY sqlstate
SELECT dlock_release_ticket(:a);
SELECT dlock_release_ticket(:a);
\set VERBOSITY default
-- a waiting ticket revoked by force
SELECT dlock_acquire('s', slots => 1) > 0;
SELECT dlock_enqueue('s', 'nobody', slots => 1) AS s2 \gset
SELECT dlock_force_release(:s2);
SELECT error_of(format('dlock_wait(%s)', :s2), :s2);
SELECT name, position FROM tickets;
SELECT dlock_release_all();

--
-- The session's own channel
--
SELECT dlock_channel() AS own \gset
SELECT :'own' ~ '^dlock_[0-9a-f]{32}$' AS name, dlock_channel() = :'own' AS same;
SELECT pg_listening_channels() = :'own' AS listens;
SELECT count(*) FROM pg_listening_channels();
-- dlock_enqueue() uses the channel by default, and listens on it.  The ticket
-- waits, so no grant is announced.
UNLISTEN *;
SELECT dlock_acquire('s', slots => 1) > 0;
SELECT dlock_enqueue('s', slots => 1) AS s2 \gset
SELECT name, position, channel = :'own' AS own FROM tickets;
SELECT pg_listening_channels() = :'own' AS listens;
-- dlock_wait() listens, too, if the ticket uses the channel
UNLISTEN *;
SELECT dlock_wait(:s2, '0');
SELECT pg_listening_channels() = :'own' AS listens;
UNLISTEN *;
SELECT dlock_enqueue('b', 'nobody') AS b \gset
SELECT dlock_wait(:b, '0');
SELECT count(*) FROM pg_listening_channels();
-- listening begins at the commit, as with LISTEN
BEGIN;
SELECT dlock_channel() = :'own' AS same;
SELECT count(*) FROM pg_listening_channels();
COMMIT;
SELECT count(*) FROM pg_listening_channels();
UNLISTEN *;
BEGIN;
SELECT dlock_channel() = :'own' AS same;
ROLLBACK;
SELECT count(*) FROM pg_listening_channels();
BEGIN;
SAVEPOINT one;
SELECT dlock_channel() = :'own' AS same;
ROLLBACK TO one;
SELECT dlock_channel() = :'own' AS same;
COMMIT;
SELECT pg_listening_channels() = :'own' AS listens;
UNLISTEN *;
BEGIN;
SAVEPOINT one;
SELECT dlock_channel() = :'own' AS same;
ROLLBACK TO one;
COMMIT;
SELECT count(*) FROM pg_listening_channels();
SELECT dlock_release_all();
-- Each session has its own channel.
\c -
SELECT dlock_channel() <> :'own' AS differs;
UNLISTEN *;
CREATE TEMPORARY VIEW tickets AS
SELECT name, mode, slots, permits, position, scope, channel, depth, info
  FROM dlock_locks WHERE pid = pg_backend_pid() ORDER BY ticket;

-- If LISTEN is not allowed, dlock_channel() is refused.
CREATE MATERIALIZED VIEW mv AS SELECT dlock_channel();
\echo :SQLSTATE
CREATE MATERIALIZED VIEW mv AS SELECT dlock_enqueue('a');
\echo :SQLSTATE
SELECT count(*) FROM tickets;

-- A read-only transaction can enqueue.
BEGIN READ ONLY;
SELECT dlock_enqueue('a', 'nobody') > 0;
COMMIT;
SELECT dlock_release_all();

--
-- Errors
--
SELECT dlock_enqueue(NULL);
\echo :SQLSTATE
SELECT dlock_wait(NULL);
\echo :SQLSTATE
SELECT dlock_enqueue('a', '');
\echo :SQLSTATE
SELECT dlock_wait(1, '-1s');
\echo :SQLSTATE
SELECT call, error_of(call)
  FROM unnest(ARRAY[
	$$dlock_enqueue(NULL, 'nobody')$$,
	$$dlock_enqueue('a', 'nobody', shared => NULL)$$,
	$$dlock_enqueue('a', 'nobody', permits => NULL)$$,
	$$dlock_enqueue('a', 'nobody', slots => 1, permits => NULL)$$,
	$$dlock_wait(NULL, '0')$$,
	$$dlock_release_ticket(NULL)$$,
	$$dlock_enqueue('', 'nobody')$$,
	$$dlock_enqueue(repeat('x', 256), 'nobody')$$,
	$$dlock_enqueue('a', '')$$,
	$$dlock_enqueue('a', repeat('x', 64))$$,
	$$dlock_enqueue('a', repeat('x', 100000))$$,
	$$dlock_enqueue('a', repeat('é', 32))$$,
	$$dlock_enqueue('a', 'nobody', shared => true, slots => 1)$$,
	$$dlock_enqueue('a', 'nobody', slots => 0)$$,
	$$dlock_enqueue('a', 'nobody', slots => -1)$$,
	$$dlock_enqueue('a', 'nobody', permits => 0)$$,
	$$dlock_enqueue('a', 'nobody', permits => 2)$$,
	$$dlock_enqueue('a', 'nobody', slots => 2, permits => 3)$$,
	$$dlock_enqueue('a', 'nobody', info => repeat('x', 1025))$$,
	$$dlock_wait(1, '-1us')$$,
	$$dlock_wait(1, '170000000 years')$$]) AS call;
SELECT count(*) FROM tickets;

-- the longest values
SELECT dlock_enqueue(repeat('x', 255), repeat('y', 63), info => repeat('z', 1024)) > 0,
	dlock_enqueue('é', repeat('é', 31)) > 0;
SELECT octet_length(name) AS name, octet_length(channel) AS channel,
	octet_length(info) AS info, depth FROM tickets;
SELECT dlock_release_all();

--
-- Settings
--
SET dlock.session_locks = 'warn';
SELECT dlock_enqueue('a', 'nobody') AS a \gset
SET dlock.session_locks = 'error';
SELECT dlock_enqueue('b', 'nobody');
\echo :SQLSTATE
SELECT dlock_enqueue('a', 'nobody');
-- existing tickets can be waited for and released
SELECT dlock_wait(:a), dlock_release_ticket(:a);
RESET dlock.session_locks;

SET dlock.max_locks_per_session = 2;
SELECT dlock_acquire('s', slots => 1) AS s1,
	dlock_enqueue('s', 'nobody', slots => 1) AS s2 \gset
SELECT dlock_enqueue('a', 'nobody');
\echo :SQLSTATE
SELECT name, position FROM tickets;
SELECT dlock_release_ticket(:s1);
SELECT dlock_enqueue('a', 'nobody') > 0, dlock_enqueue('a', 'nobody') > 0;
SELECT name, position, depth FROM tickets;
RESET dlock.max_locks_per_session;

-- PREPARE TRANSACTION is refused, because the announcement needs the session.
BEGIN;
SELECT dlock_enqueue('b', 'nobody') > 0;
\set VERBOSITY sqlstate
PREPARE TRANSACTION 'regress_dlock';
\set VERBOSITY default
SELECT dlock_release_all();
SELECT count(*) FROM dlock_locks;
