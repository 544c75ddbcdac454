--
-- Settings
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;

-- The settings do not exist until the first call has loaded the library.
\c -
SHOW dlock.session_locks;
SELECT dlock_is_held('a');
SHOW dlock.session_locks;

SELECT name, setting, unit, context, vartype, min_val, max_val, enumvals, boot_val
  FROM pg_settings WHERE name LIKE 'dlock.%' ORDER BY name;
SELECT name, short_desc, extra_desc
  FROM pg_settings WHERE name LIKE 'dlock.%' ORDER BY name;

SET dlock.nonsense = 1;
\echo :SQLSTATE

--
-- dlock.session_locks
--
SET dlock.session_locks = 'warn';
SELECT dlock_acquire('a') > 0;
SELECT dlock_acquire('a') > 0;
SELECT dlock_is_held('a'), dlock_release('a');
\set VERBOSITY sqlstate
SELECT dlock_try_acquire('b', '1s') > 0;
SELECT dlock_acquire_all('{c,d}') > '{0}';
SELECT dlock_try_acquire_all('{e}') > '{0}';
\set VERBOSITY default
-- no message for transaction scope
BEGIN;
SELECT dlock_xact_acquire('x') > 0, dlock_try_xact_acquire('y') > 0,
	dlock_xact_acquire_all('{z}') > '{0}', dlock_try_xact_acquire_all('{z}') > '{0}';
COMMIT;

SET dlock.session_locks = 'error';
SELECT dlock_acquire('f');
\echo :SQLSTATE
\set VERBOSITY sqlstate
SELECT dlock_try_acquire('f');
SELECT dlock_acquire_all('{f}');
SELECT dlock_try_acquire_all('{f}');
CALL dlock_acquire_nosnapshot('f');
SELECT dlock_acquire('a');
\set VERBOSITY default
BEGIN;
SELECT dlock_xact_acquire('x') > 0, dlock_try_xact_acquire('y') > 0,
	dlock_xact_acquire_all('{z}') > '{0}', dlock_try_xact_acquire_all('{z}') > '{0}';
COMMIT;
-- refused, too: other state that a pooler's next client would inherit
SELECT dlock_lease_open('1h', attach => true);
\echo :SQLSTATE
SELECT dlock_channel();
SELECT dlock_ttl_enqueue('f', '1h');
\set VERBOSITY sqlstate
SELECT dlock_enqueue('f');
SELECT dlock_enqueue('f', 'nobody');
SELECT dlock_lease_open('1h') AS l \gset
SELECT dlock_lease_enqueue('f', :l);
-- none of these calls had an effect
SELECT count(*) FROM pg_listening_channels();
SELECT name FROM dlock_locks WHERE name = 'f';
SELECT count(*) FROM dlock_leases;
SELECT dlock_lease_enqueue('f', :l, 'somebody') > 0, dlock_lease_close(:l);
\set VERBOSITY default
SET dlock.session_locks = 'warn';
SELECT dlock_lease_open('1h', attach => true) AS l \gset
SELECT dlock_lease_close(:l);
SELECT dlock_channel() LIKE 'dlock_%';
-- Another ticket is ahead, because psql would show a grant's announcement.
SELECT dlock_ttl_acquire('f', '1h') AS h \gset
SELECT dlock_ttl_enqueue('f', '1h') AS f \gset
SELECT dlock_release_ticket(:f), dlock_release_ticket(:h);
UNLISTEN *;
SET dlock.session_locks = 'error';
-- held locks can be released
SELECT dlock_is_held('a'), dlock_release('a'), dlock_release_ticket(dlock_fence('b')),
	dlock_release_all();

SET dlock.session_locks = 'allow';
SELECT dlock_acquire('a') > 0, dlock_release('a');
SET dlock.session_locks = 'maybe';
\echo :SQLSTATE
SET dlock.session_locks = '';
\echo :SQLSTATE
SHOW dlock.session_locks;
RESET dlock.session_locks;
SHOW dlock.session_locks;

--
-- dlock.max_locks_per_session
--
SET dlock.max_locks_per_session = 0;
\echo :SQLSTATE
SET dlock.max_locks_per_session = 2147483648;
\echo :SQLSTATE
SET dlock.max_locks_per_session = 2147483647;
SET dlock.max_locks_per_session = 1;
SELECT dlock_acquire('a') > 0;
SELECT dlock_acquire('b');
\echo :SQLSTATE
SELECT dlock_try_acquire('b');
\echo :SQLSTATE
SELECT dlock_xact_acquire('b');
\echo :SQLSTATE
-- no lock is lost, and a held lock can be acquired again
SELECT dlock_acquire('a') = dlock_fence('a') AS same, dlock_xact_acquire('a') = dlock_fence('a') AS same;
SELECT name, depth FROM dlock_locks;
SELECT dlock_release_all();
SELECT dlock_acquire('b') > 0;
SELECT dlock_release('b');
-- a limit below the number of locks held
RESET dlock.max_locks_per_session;
SELECT dlock_acquire_all('{a,b,c}') > '{0}';
SET dlock.max_locks_per_session = 2;
SELECT dlock_release('a');
SELECT dlock_acquire('a');
SELECT dlock_release('b');
SELECT dlock_acquire('a') > 0;
SELECT dlock_release_all();
RESET dlock.max_locks_per_session;

--
-- dlock.max_memory
--
SET dlock.max_memory = '1GB';
\echo :SQLSTATE
\set VERBOSITY sqlstate
ALTER SYSTEM SET dlock.max_memory = '4095kB';
\set VERBOSITY default
ALTER SYSTEM SET dlock.max_memory = '2TB';
\echo :SQLSTATE
ALTER SYSTEM SET dlock.max_memory = '4096kB';
ALTER SYSTEM SET dlock.max_memory = '1073741824kB';
ALTER SYSTEM RESET dlock.max_memory;

--
-- dlock.max_memory_per_role
--
SET dlock.max_memory_per_role = 0;
\echo :SQLSTATE
SET dlock.max_memory_per_role = 101;
\echo :SQLSTATE
SET dlock.max_memory_per_role = 1;
SHOW dlock.max_memory_per_role;
SET dlock.max_memory_per_role = 100;
RESET dlock.max_memory_per_role;

--
-- The roles that may set dlock's settings.  Until the library is loaded,
-- PostgreSQL accepts all values from all roles.  Loading the library discards
-- the values that the role may not set.
--
CREATE ROLE regress_dlock_user;
SET ROLE regress_dlock_user;
SET dlock.session_locks = 'warn';
\echo :SQLSTATE
SET dlock.max_locks_per_session = 10;
\echo :SQLSTATE
SET dlock.max_memory = '1GB';
\echo :SQLSTATE
SET dlock.max_memory_per_role = 100;
\echo :SQLSTATE
RESET ROLE;

ALTER ROLE regress_dlock_user LOGIN;
DO $$
BEGIN
	EXECUTE format('ALTER DATABASE %I SET dlock.session_locks = error',
				   current_database());
END $$;
SELECT current_user AS me \gset
\c - regress_dlock_user
SET dlock.session_locks = 'allow';
SELECT dlock_acquire('a');
SHOW dlock.session_locks;

\c - :me
SET dlock.session_locks = 'allow';
SELECT dlock_acquire('a') > 0, dlock_release('a');
DO $$
BEGIN
	EXECUTE format('ALTER DATABASE %I RESET dlock.session_locks',
				   current_database());
END $$;
\c -
SET dlock.session_locks = 'maybe';
SET dlock.max_locks_per_session = 0;
SET dlock.nonsense = 1;
SELECT dlock_acquire('a') > 0, dlock_release('a');
SHOW dlock.session_locks;
SHOW dlock.max_locks_per_session;
SHOW dlock.nonsense;

DROP ROLE regress_dlock_user;
