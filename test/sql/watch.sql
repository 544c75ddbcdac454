--
-- Watching locks.  TAP test notify_watch tests the announcements.
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
-- Arguments
\set VERBOSITY terse
SELECT dlock_watch(NULL);
SELECT dlock_watch('');
SELECT dlock_watch(repeat('x', 256));
SELECT dlock_watch('a', '');
SELECT dlock_watch('a', repeat('x', 64));
SELECT dlock_unwatch(NULL);
SELECT dlock_unwatch('');
\set VERBOSITY sqlstate
SELECT dlock_watch(NULL, 'c');
SELECT dlock_watch('', 'c');
SELECT dlock_watch('a', '');
\set VERBOSITY terse

-- One watch for each name and channel; dlock_unwatch() ends all watches of a
-- name
SELECT dlock_watch('a', 'c'), dlock_watch('a', 'c'), dlock_watch('a', 'd'), dlock_watch('b', 'c');
SELECT dlock_unwatch('a');
SELECT dlock_unwatch('a');
SELECT dlock_unwatch('b'), dlock_unwatch('b');

-- The session's own channel: the session listens from the commit on, and hears
-- nothing about a watch that has ended by then
BEGIN;
SELECT dlock_watch('a');
SELECT dlock_unwatch('a');
COMMIT;
SELECT pg_listening_channels() = dlock_channel();

-- A watch neither holds nor waits, and the watched lock need not exist.
SELECT dlock_watch('a', 'c');
SELECT count(*) FROM dlock_locks;
SELECT dlock_fence('a') IS NULL, dlock_is_held('a');
SELECT dlock_acquire('a', slots => 3) > 0;
SELECT dlock_release('a');
SELECT dlock_acquire('a') > 0;
SELECT count(*) FROM dlock_locks('a');

-- dlock_release_all() ends watches.  It returns the number of tickets.
SELECT dlock_release_all();
SELECT dlock_unwatch('a');
SELECT dlock_watch('a', 'c');
SELECT dlock_release_all();
SELECT dlock_unwatch('a');

-- DISCARD ALL ends watches, too.
SELECT dlock_watch('a', 'c'), dlock_watch('b', 'c');
DISCARD ALL;
SELECT dlock_unwatch('a'), dlock_unwatch('b');

-- A rollback ends no watch.
BEGIN;
SELECT dlock_watch('a', 'c');
ROLLBACK;
SELECT dlock_unwatch('a');
BEGIN;
SELECT dlock_watch('a', 'c');
SAVEPOINT s;
SELECT dlock_watch('a', 'c'), dlock_watch('b', 'c');
ROLLBACK TO s;
SELECT dlock_unwatch('a'), dlock_unwatch('b');
COMMIT;

-- Watches count like locks.
SET dlock.max_locks_per_session = 3;
SELECT dlock_watch('a', 'c'), dlock_watch('a', 'd'), dlock_acquire('b') > 0;
SELECT dlock_watch('b', 'c');
SELECT dlock_acquire('c');
SELECT dlock_watch('a', 'c');
SELECT dlock_unwatch('a');
SELECT dlock_watch('c', 'c'), dlock_acquire('c') > 0;
SELECT dlock_release_all();
RESET dlock.max_locks_per_session;

-- A transaction with a new watch cannot be prepared, because a watch needs a
-- session.
BEGIN;
SELECT dlock_watch('a', 'c');
PREPARE TRANSACTION 'watch';
SELECT dlock_unwatch('a');
BEGIN;
SELECT dlock_watch('a', 'c');
SELECT dlock_unwatch('a');
ROLLBACK;

-- dlock.session_locks
SET dlock.session_locks = warn;
SELECT dlock_watch('a', 'c');
SET dlock.session_locks = error;
SELECT dlock_watch('b', 'c');
SELECT dlock_unwatch('a');
RESET dlock.session_locks;

-- Every role can watch.
CREATE ROLE regress_dlock_watcher;
SELECT dlock_acquire('a', info => 'here') > 0;
SET ROLE regress_dlock_watcher;
SELECT dlock_watch('a', 'c');
SELECT dlock_unwatch('a');
RESET ROLE;
SELECT dlock_release('a');
DROP ROLE regress_dlock_watcher;

-- Many watches, all ended
SELECT count(dlock_watch('w' || n, 'c')) FROM generate_series(1, 5000) AS n;
SELECT count(dlock_watch('w', 'c' || n)) FROM generate_series(1, 5000) AS n;
SELECT bool_and(dlock_unwatch('w' || n)) FROM generate_series(1, 5000) AS n;
SELECT dlock_release_all();
SELECT dlock_unwatch('w');

-- Watches end with their extension.  A new extension has none.
SELECT dlock_watch('a', 'c');
SET client_min_messages = warning;
DROP EXTENSION dlock CASCADE;
CREATE EXTENSION dlock;
RESET client_min_messages;
SELECT dlock_unwatch('a');
SELECT dlock_watch('a', 'c');
SELECT dlock_release_all();

-- Watching and unwatching repeatedly in a transaction uses no more memory.
BEGIN;
DO $$ BEGIN PERFORM dlock_watch('a', 'c'); PERFORM dlock_unwatch('a'); END $$;
SELECT total_bytes AS before FROM pg_backend_memory_contexts
WHERE name = 'TopMemoryContext' \gset
DO $$
BEGIN
	FOR i IN 1 .. 30000 LOOP
		PERFORM dlock_watch('a', 'c');
		PERFORM dlock_unwatch('a');
	END LOOP;
END $$;
SELECT total_bytes < :before + 100000 AS ok FROM pg_backend_memory_contexts
WHERE name = 'TopMemoryContext';
COMMIT;
