--
-- What ends a session's locks, and what does not
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;

-- Locking is not transactional: errors and rollbacks keep what was acquired.
SELECT 1 / (dlock_acquire('a') * 0);
SELECT dlock_is_held('a');
BEGIN;
SELECT dlock_acquire('b') > 0;
SAVEPOINT one;
SELECT dlock_acquire('c') > 0;
ROLLBACK TO one;
SELECT dlock_is_held('b'), dlock_is_held('c');
ROLLBACK;
SELECT name, scope, depth FROM dlock_locks ORDER BY name;

-- A rollback does not restore a released lock, either.
BEGIN;
SELECT dlock_release('a');
ROLLBACK;
SELECT dlock_is_held('a');
DO $$
BEGIN
	PERFORM dlock_acquire('d'), dlock_release('b');
	RAISE 'out';
EXCEPTION WHEN raise_exception THEN
	NULL;
END $$;
SELECT name, scope, depth FROM dlock_locks ORDER BY name;

-- DISCARD ALL, as connection pools send it
SELECT dlock_acquire('a', shared => true) > 0, dlock_acquire('a', shared => true) > 0,
	dlock_acquire('s', slots => 2) > 0, dlock_acquire('s', slots => 2) > 0;
DISCARD PLANS;
DISCARD SEQUENCES;
DISCARD TEMP;
SELECT name, mode, depth FROM dlock_locks ORDER BY ticket;
DISCARD ALL;
SELECT count(*) FROM dlock_locks;
SELECT dlock_release('a');
SELECT dlock_release_all();

-- and again, when nothing is held
DISCARD ALL;
SELECT dlock_acquire('a') > 0;

-- After DISCARD ALL, the session has a new channel, which the previous client
-- does not know.
SELECT dlock_channel() AS channel \gset
SELECT dlock_channel() = :'channel';
DISCARD ALL;
SELECT dlock_channel() = :'channel';
SELECT dlock_acquire('a') > 0;

-- In a transaction, DISCARD ALL is refused and releases no lock.
BEGIN;
SELECT dlock_xact_acquire('x') > 0;
DISCARD ALL;
ROLLBACK;
SELECT name, scope FROM dlock_locks ORDER BY name;

-- DISCARD ALL releases locks even if the extension was dropped.  Before the
-- DROP, the previous test's session must have ended, because its view depends
-- on the extension.
DO $$
BEGIN
	WHILE (SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND backend_type = 'client backend') > 1 LOOP
		PERFORM pg_stat_clear_snapshot();
	END LOOP;
END $$;
DROP EXTENSION dlock;
DISCARD ALL;
CREATE EXTENSION dlock;
SELECT dlock_release_all();

-- A session that has not called dlock
\c -
DISCARD ALL;
SELECT dlock_acquire('a') > 0;

-- When a session ends, its locks are granted to other sessions.
\c -
SELECT dlock_acquire('a', timeout => '1min') > 0;
SELECT count(*) FROM dlock_locks;
SELECT dlock_release('a');
