--
-- Many tickets of one session on one name: when a wait is a deadlock, which
-- tickets are held, and which ticket a release ends
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

CREATE TEMPORARY VIEW tickets AS
SELECT name, mode, slots, permits, granted, position, scope, depth FROM dlock_locks
 WHERE pid = pg_backend_pid() ORDER BY ticket;
-- A call that waits by mistake fails after 10 seconds.
SET lock_timeout = '10s';

--
-- Permits, acquired and released in several orders
--
SELECT dlock_acquire('s', slots => 5, permits => 2) AS s1,
	dlock_acquire('s', slots => 5) AS s2,
	dlock_acquire('s', slots => 5, permits => 2) AS s3 \gset
SELECT error_of($$dlock_acquire('s', slots => 5)$$),
	dlock_try_acquire('s', '0', slots => 5) IS NULL AS busy;
-- the second ticket is released
SELECT dlock_release_ticket(:s2);
SELECT error_of($$dlock_acquire('s', slots => 5, permits => 2)$$),
	dlock_acquire('s', slots => 5) > 0 AS fits, error_of($$dlock_acquire('s', slots => 5)$$);
-- the first ticket is released
SELECT dlock_release_ticket(:s1);
SELECT error_of($$dlock_acquire('s', slots => 5, permits => 3)$$),
	dlock_acquire('s', slots => 5, permits => 2) > 0 AS fits;
-- the third ticket is revoked by force
SELECT dlock_force_release(:s3);
SELECT error_of($$dlock_acquire('s', slots => 5, permits => 3)$$),
	dlock_acquire('s', slots => 5, permits => 2) > 0 AS fits,
	error_of($$dlock_acquire('s', slots => 5)$$);
SELECT * FROM tickets;
-- A release ends the latest held ticket first, and the lost ticket last.
SELECT dlock_release('s'), dlock_release('s'), dlock_release('s');
\set VERBOSITY sqlstate
SELECT dlock_release('s');
SELECT dlock_release('s');
\set VERBOSITY default
SELECT * FROM tickets;

-- in transaction scope, with a rollback to a savepoint
BEGIN;
SELECT dlock_xact_acquire('s', slots => 3) > 0;
SAVEPOINT one;
SELECT dlock_xact_acquire('s', slots => 3, permits => 2) AS s2 \gset
SELECT dlock_try_xact_acquire('s', '0', slots => 3) IS NULL AS busy;
ROLLBACK TO one;
SELECT dlock_xact_acquire('s', slots => 3, permits => 2) AS s2 \gset
SELECT dlock_try_acquire('s', '0', slots => 3) IS NULL AS busy;
-- A guard remembers a ticket that was revoked by force.
SET LOCAL dlock.cancel_lost_guards = off;
SELECT dlock_guard('s', :s2);
SELECT dlock_force_release(:s2);
SELECT dlock_acquire('s', slots => 3, permits => 2) > 0 AS fits,
	error_of($$dlock_acquire('s', slots => 3)$$);
SELECT * FROM tickets;
ROLLBACK;
SELECT dlock_acquire('s', slots => 3) > 0 AS fits, error_of($$dlock_acquire('s', slots => 3)$$);
SELECT dlock_release_all();
SELECT count(*) FROM tickets;

--
-- Queued requests count like granted requests.
--
SELECT dlock_ttl_acquire('s', '1h', slots => 3, permits => 3) AS lease \gset
SELECT dlock_enqueue('s', 'nobody', slots => 3) AS s1,
	dlock_enqueue('s', 'nobody', slots => 3, permits => 2) AS s2,
	dlock_enqueue('s', 'nobody', slots => 3) AS s3,
	dlock_enqueue('s', 'nobody', slots => 3) AS s4 \gset
SELECT error_of($$dlock_acquire('s', slots => 3)$$);
-- Whether a wait is a deadlock depends only on the tickets ahead in the queue.
SELECT error_of(format('dlock_wait(%s, %L)', :s3, '1h')), error_of(format('dlock_wait(%s)', :s4));
SELECT dlock_wait(:s1, '1ms'), dlock_wait(:s2, '1ms');
SELECT dlock_force_release(:s2);
SELECT dlock_wait(:s3, '1ms'), dlock_wait(:s4, '1ms');
SELECT dlock_is_held('s');
-- A waiting ticket cannot be released by name.
\set VERBOSITY sqlstate
SELECT dlock_release('s');
SELECT dlock_release('s');
\set VERBOSITY default
SELECT * FROM tickets;
SELECT dlock_release_ticket(:lease);
SELECT dlock_wait(:s1), dlock_wait(:s3), dlock_wait(:s4), dlock_is_held('s');
SELECT error_of($$dlock_acquire('s', slots => 3)$$);
SELECT dlock_release_ticket(:s3);
SELECT dlock_acquire('s', slots => 3) > 0 AS fits;
SELECT dlock_release_all();

--
-- Exclusive and shared requests are queued, and granted without a call of the
-- session.  A release by name ends the latest granted ticket.
--
SELECT dlock_ttl_acquire('a', '1h') AS lease \gset
SELECT dlock_enqueue('a', 'nobody') AS a1, dlock_enqueue('a', 'nobody') AS a2,
	dlock_enqueue('a', 'nobody') AS a3 \gset
SELECT error_of($$dlock_acquire('a')$$), error_of($$dlock_acquire('a', shared => true)$$),
	error_of(format('dlock_wait(%s)', :a2));
SELECT dlock_wait(:a1, '1ms');
SELECT dlock_release_ticket(:lease);
SELECT dlock_wait(:a1), dlock_wait(:a2, '0'), dlock_fence('a') = :a1 AS first;
-- Acquiring again returns the held ticket.
SELECT dlock_acquire('a') = :a1 AS same, dlock_enqueue('a', 'nobody') = :a1 AS same;
SELECT dlock_release('a'), dlock_release('a'), dlock_fence('a') = :a1 AS first;
SELECT dlock_release('a'), dlock_fence('a') = :a2 AS second;
-- A waiting ticket is revoked.
SELECT dlock_force_release(:a3);
SELECT dlock_release('a'), dlock_is_held('a');
SELECT dlock_acquire('a') > :a3 AS another;
\set VERBOSITY sqlstate
SELECT dlock_release('a'), dlock_release('a'), dlock_release('a');
\set VERBOSITY default
SELECT * FROM tickets;

SELECT dlock_ttl_acquire('a', '1h') AS lease \gset
SELECT dlock_enqueue('a', 'nobody', shared => true) AS a1,
	dlock_enqueue('a', 'nobody', shared => true) AS a2,
	dlock_enqueue('a', 'nobody', shared => true) AS a3,
	dlock_enqueue('a', 'nobody') AS a4 \gset
SELECT error_of($$dlock_acquire('a', shared => true)$$), error_of(format('dlock_wait(%s)', :a4));
SELECT dlock_wait(:a3, '1ms');
SELECT dlock_release_ticket(:lease);
SELECT dlock_wait(:a1), dlock_wait(:a2), dlock_wait(:a3), dlock_wait(:a4, '0');
SELECT dlock_acquire('a', shared => true) = :a3 AS latest,
	error_of($$dlock_acquire('a')$$);
BEGIN;
SELECT dlock_xact_acquire('a', shared => true) = :a3 AS latest;
SELECT dlock_release_ticket(:a3), dlock_release_ticket(:a3);
-- still held, but only in transaction scope
SELECT dlock_acquire('a', shared => true) = :a3 AS latest;
SELECT dlock_release('a'), dlock_release('a');
SELECT * FROM tickets;
COMMIT;
SELECT * FROM tickets;
SELECT dlock_acquire('a', shared => true) = :a1 AS left;
SELECT dlock_force_release(:a1);
SELECT dlock_wait(:a4), dlock_is_held('a'), dlock_fence('a') = :a4 AS last;
SELECT dlock_release_all();
SELECT count(*) FROM tickets;

--
-- Releases at commit: at most as many as acquires
--
SELECT dlock_acquire('a') AS a, dlock_acquire('b') AS b, dlock_acquire('a') \gset
BEGIN;
SELECT dlock_release_at_commit(:a), dlock_release_at_commit(:b);
SAVEPOINT one;
SELECT dlock_release_at_commit(:a);
\set VERBOSITY sqlstate
SELECT dlock_release_at_commit(:a);
ROLLBACK TO one;
SELECT dlock_release_at_commit(:a);
SAVEPOINT two;
SELECT dlock_release_at_commit(:b);
ROLLBACK TO two;
RELEASE one;
SELECT dlock_release_at_commit(:a);
\set VERBOSITY default
ROLLBACK;
SELECT * FROM tickets;
BEGIN;
SELECT dlock_release_at_commit(:a), dlock_release_at_commit(:b), dlock_release_at_commit(:a);
COMMIT;
SELECT * FROM tickets;

--
-- Guards of the same lock and of others, added and removed
--
CREATE TEMPORARY TABLE t (n integer);
CREATE TRIGGER guard BEFORE INSERT ON t FOR EACH STATEMENT
	EXECUTE FUNCTION dlock_require_guard('a');
SELECT dlock_acquire('a') AS a, dlock_acquire('b') AS b, dlock_ttl_acquire('c', '1h') AS c \gset
BEGIN;
SELECT dlock_guard('b', :b), dlock_guard('c', :c);
SAVEPOINT one;
SELECT explain_error('INSERT INTO t VALUES (1)');
SELECT dlock_guard('a', :a), dlock_guard('b', :b), dlock_guard('a', :a), dlock_guard('a', :a);
INSERT INTO t VALUES (2);
ROLLBACK TO one;
SELECT explain_error('INSERT INTO t VALUES (3)') LIMIT 1;
SELECT dlock_guard('a', :a);
SAVEPOINT two;
SELECT dlock_guard('a', :a);
ROLLBACK TO two;
INSERT INTO t VALUES (4);
RELEASE one;
INSERT INTO t VALUES (5);
COMMIT;
SELECT explain_error('INSERT INTO t VALUES (6)') LIMIT 1;
SELECT * FROM t;
SELECT dlock_release_all(), dlock_release_ticket(:c);
