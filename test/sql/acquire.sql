--
-- Session scope: acquire, release, and queries about locks
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

-- what this session holds
CREATE TEMPORARY VIEW held AS
SELECT name, mode, scope, depth FROM dlock_locks
 WHERE granted AND pid = pg_backend_pid() ORDER BY ticket;

-- A lock need not be created before its first use.
SELECT dlock_is_held('a'), dlock_fence('a'), dlock_check('a', 1);
SELECT dlock_acquire('a') AS fence \gset
SELECT :fence > 0 AND :fence < 2::numeric ^ 53 AS fence_in_range;
SELECT dlock_is_held('a'), dlock_fence('a') = :fence AS fence_is_known,
	dlock_check('a', :fence) AS mine, dlock_check('a', :fence + 1) AS next,
	dlock_check('b', :fence) AS other_lock;
SELECT * FROM held;
SELECT dlock_release('a');

-- A lock without holders does not exist, and has no fence.
SELECT dlock_is_held('a'), dlock_fence('a'), dlock_check('a', :fence);
SELECT count(*) FROM dlock_locks WHERE name = 'a';

-- Each new hold has a greater fence than all before, of any lock.
SELECT dlock_acquire('a') > :fence AS greater;
SELECT dlock_acquire('b') > dlock_fence('a') AS greater;
SELECT dlock_release('a'), dlock_release('b');

-- Acquiring a held lock again returns the same fence at once.  Each acquire
-- needs a release.
SELECT dlock_acquire('a') AS fence \gset
SELECT dlock_acquire('a') = :fence AS same;
SELECT dlock_acquire('a', timeout => '0') = :fence AS same;
SELECT dlock_try_acquire('a') = :fence AS same;
SELECT dlock_try_acquire('a', '1s', info => 'unused') = :fence AS same;
SELECT * FROM held;
SELECT dlock_release('a');
SELECT * FROM held;
SELECT dlock_release('a'), dlock_release('a'), dlock_release('a');
SELECT dlock_is_held('a'), dlock_check('a', :fence);
SELECT dlock_release('a');
SELECT dlock_is_held('a'), dlock_check('a', :fence);

-- Releasing a lock that is not held returns false, with a warning.
SELECT dlock_release('a');
SELECT dlock_release('never seen');
SELECT dlock_release('%s %n "x" ''y''');
\set VERBOSITY sqlstate
SELECT dlock_release('a');
\set VERBOSITY default

-- The other arguments, by position and by name
SELECT dlock_acquire('a', NULL, false, NULL, 1, NULL) =
	dlock_acquire(name => 'a', info => NULL, permits => 1, slots => NULL,
				  shared => false, timeout => NULL) AS same;
SELECT * FROM held;
SELECT dlock_release_all();

-- dlock_try_acquire() acquires a free lock like dlock_acquire().
SELECT dlock_try_acquire('a') AS fence \gset
SELECT dlock_fence('a') = :fence AS same;
SELECT * FROM held;
SELECT dlock_release('a');

-- The procedure differs from dlock_acquire() only in its snapshot.
DO $$
DECLARE
	fence bigint;
BEGIN
	CALL dlock_acquire_nosnapshot('a', fence => fence);
	ASSERT fence = dlock_fence('a');
	CALL dlock_acquire_nosnapshot('a', '1s', false, NULL, 1, 'info', fence);
	ASSERT fence = dlock_fence('a');
END $$;
SELECT * FROM held;
CALL dlock_acquire_nosnapshot(NULL);
\echo :SQLSTATE
CALL dlock_acquire_nosnapshot('');
\echo :SQLSTATE
CALL dlock_acquire_nosnapshot('a', shared => NULL);
CALL dlock_acquire_nosnapshot('a', permits => NULL);
CALL dlock_acquire_nosnapshot('a', '-1s');
SELECT dlock_release_all();

--
-- Release by ticket
--
SELECT dlock_acquire('a') AS a, dlock_acquire('a') AS again \gset
SELECT dlock_acquire('b') AS b \gset
SELECT dlock_release_ticket(:a);
SELECT * FROM held;
SELECT dlock_release_ticket(:a);
SELECT * FROM held;
SELECT dlock_is_held('a');
\set VERBOSITY sqlstate
SELECT dlock_release_ticket(:a);
\set VERBOSITY default
SELECT dlock_release_ticket(0);
SELECT dlock_release_ticket(-1);
SELECT dlock_release_ticket(9223372036854775807);
SELECT dlock_release_ticket(:b);

--
-- dlock_release_all() returns the number of tickets, not of acquires.
--
SELECT dlock_release_all();
SELECT count(dlock_acquire('a')) + count(dlock_acquire('b')) AS acquires
  FROM generate_series(1, 3);
SELECT dlock_acquire('c', shared => true) > 0,
	dlock_acquire('d', slots => 3) < dlock_acquire('d', slots => 3);
SELECT * FROM held;
SELECT dlock_release_all();
SELECT * FROM held;
SELECT dlock_release_all();

--
-- Errors.  NULL for a required argument raises an error, instead of returning
-- NULL.
--
SELECT call, error_of(call)
  FROM unnest(ARRAY[
	$$dlock_acquire(NULL)$$,
	$$dlock_acquire('a', shared => NULL)$$,
	$$dlock_acquire('a', permits => NULL)$$,
	$$dlock_acquire('a', slots => 1, permits => NULL)$$,
	$$dlock_try_acquire(NULL)$$,
	$$dlock_try_acquire('a', shared => NULL)$$,
	$$dlock_try_acquire('a', permits => NULL)$$,
	$$dlock_xact_acquire(NULL)$$,
	$$dlock_xact_acquire('a', shared => NULL)$$,
	$$dlock_xact_acquire('a', permits => NULL)$$,
	$$dlock_try_xact_acquire(NULL)$$,
	$$dlock_try_xact_acquire('a', shared => NULL)$$,
	$$dlock_try_xact_acquire('a', permits => NULL)$$,
	$$dlock_release(NULL)$$,
	$$dlock_release_ticket(NULL)$$,
	$$dlock_release_at_commit(NULL)$$,
	$$dlock_is_held(NULL)$$,
	$$dlock_fence(NULL)$$,
	$$dlock_check(NULL, 1)$$,
	$$dlock_check('a', NULL)$$,
	$$dlock_blocking_pids(NULL)$$,
	$$dlock_force_release(NULL)$$,
	$$dlock_advance_ticket(NULL)$$]) AS call;

-- Names
SELECT dlock_acquire('');
SELECT dlock_acquire(repeat('x', 256));
SELECT call, error_of(call)
  FROM unnest(ARRAY[
	$$dlock_acquire('')$$,
	$$dlock_acquire(repeat('x', 256))$$,
	$$dlock_try_acquire('')$$,
	$$dlock_try_acquire(repeat('x', 256))$$,
	$$dlock_xact_acquire('')$$,
	$$dlock_xact_acquire(repeat('x', 256))$$,
	$$dlock_release('')$$,
	$$dlock_release(repeat('x', 1000000))$$,
	$$dlock_is_held('')$$,
	$$dlock_is_held(repeat('x', 256))$$,
	$$dlock_fence('')$$,
	$$dlock_fence(repeat('x', 256))$$,
	$$dlock_check('', 1)$$,
	$$dlock_check(repeat('x', 256), 1)$$]) AS call;

-- Timeouts: months have 30 days, and days 24 hours.
SELECT dlock_acquire('a', timeout => '-1us');
SELECT call, error_of(call)
  FROM unnest(ARRAY[
	$$dlock_acquire('a', '-1us')$$,
	$$dlock_acquire('a', '1 month -31 days')$$,
	$$dlock_acquire('a', '1 day -25 hours')$$,
	$$dlock_acquire('a', '170000000 years')$$,
	$$dlock_acquire('a', '-170000000 years')$$,
	$$dlock_try_acquire('a', '-1us')$$,
	$$dlock_xact_acquire('a', '-1us')$$,
	$$dlock_try_xact_acquire('a', '-1us')$$]) AS call;
SELECT dlock_acquire('a', '1 month -30 days') =
	dlock_acquire('a', '-1 day 25 hours') AS same,
	dlock_acquire('a', '290000 years') = dlock_try_acquire('a', NULL) AS same;
SELECT dlock_release_all();

-- A bare number means seconds, but lib/pq sends 30 seconds in nanoseconds.
-- Every function that takes a timeout warns.  It raises no error, because some
-- programs write "for ever" like this.
SELECT dlock_acquire('a', '30000000000') > 0;
\set VERBOSITY sqlstate
SELECT dlock_acquire('a', '30000000000') > 0;
\set VERBOSITY terse
SELECT dlock_try_acquire('a', '1 year 7 days') > 0,
	dlock_xact_acquire('a', '5000 days') > 0,
	dlock_try_xact_acquire('a', '-1 day 10000 hours') > 0;
SELECT dlock_acquire_all('{a}', '401 days') > '{0}',
	dlock_try_acquire_all('{a}', '402 days') > '{0}',
	dlock_xact_acquire_all('{a}', '403 days') > '{0}',
	dlock_try_xact_acquire_all('{a}', '404 days') > '{0}';
CALL dlock_acquire_nosnapshot('a', '405 days') \gset
SELECT dlock_lease_open('1h') AS l \gset
SELECT dlock_lease_acquire('b', :l, '406 days') AS b \gset
SELECT dlock_try_lease_acquire('b', :l, '407 days') = :b AS same,
	dlock_lease_acquire_all('{b}', :l, '408 days') = ARRAY[:b] AS same,
	dlock_try_lease_acquire_all('{b}', :l, '409 days') = ARRAY[:b] AS same;
SELECT dlock_ttl_acquire('c', '1h', '410 days') AS c \gset
SELECT dlock_try_ttl_acquire('d', '1h', '411 days') AS d \gset
SELECT dlock_wait(:b, '412 days');
SELECT dlock_lease_close(:l), dlock_release_ticket(:c), dlock_release_ticket(:d);
\set VERBOSITY default
-- no WARNING for a plausible timeout
SELECT dlock_acquire('a', '1 year') > 0, dlock_acquire('a', '366 days') > 0;
-- no WARNING for a timeout that is refused
SELECT dlock_acquire('a', '-400 days');
SELECT dlock_release_all();

-- From PostgreSQL 17 on, intervals can be infinite.
DO $$
DECLARE
	answers text[] := ARRAY[
		error_of($q$dlock_acquire('a', 'infinity')$q$),
		error_of($q$dlock_acquire('a', '-infinity')$q$)];
BEGIN
	IF current_setting('server_version_num')::integer < 170000 THEN
		ASSERT answers[1] LIKE '22007 %' AND answers[2] LIKE '22007 %';
	ELSE
		ASSERT answers[1] LIKE '22023 timeout must not be % infinite'
			AND answers[2] LIKE '22023 timeout must not be % infinite';
	END IF;
END $$;

-- info has at most 1,024 bytes.
SELECT dlock_acquire('a', info => repeat('x', 1025));
SELECT dlock_acquire('a', info => repeat('é', 513));
\echo :SQLSTATE
SELECT dlock_is_held('a');
SELECT dlock_acquire('a', info => repeat('é', 512)) > 0,
	dlock_acquire('b', info => '') > 0;
SELECT name, info = repeat('é', 512) AS all_of_it, info = '' AS empty
  FROM dlock_locks WHERE pid = pg_backend_pid() ORDER BY name;
SELECT dlock_release_all();

-- The lock is busy, and the call may not wait.  A lock that the session itself
-- holds can be busy only if the lock has slots.
SELECT dlock_acquire('s', slots => 1) > 0;
SELECT dlock_acquire('s', slots => 1, timeout => '0');
\echo :SQLSTATE
SELECT dlock_try_acquire('s', slots => 1);
SELECT dlock_try_acquire('s', slots => 1, timeout => '0');

-- A failed call adds no hold.
SELECT * FROM held;
SELECT dlock_release_all();
SELECT count(*) FROM dlock_locks;

-- A parallel worker cannot acquire a lock, even if its function claims to be
-- parallel safe.
CREATE FUNCTION acquire_in_parallel() RETURNS bigint
LANGUAGE plpgsql PARALLEL SAFE AS $$
BEGIN
	RETURN dlock_acquire('a');
END $$;
\set VERBOSITY terse
BEGIN;
SELECT count(set_config(name, 'on', true)) FROM pg_settings
 WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
SELECT acquire_in_parallel();
ROLLBACK;
-- It is no session of dlock, so it cannot read the views, either.
CREATE FUNCTION count_in_parallel() RETURNS bigint
LANGUAGE plpgsql PARALLEL SAFE AS $$
BEGIN
	RETURN (SELECT count(*) FROM dlock_locks);
END $$;
BEGIN;
SELECT count(set_config(name, 'on', true)) FROM pg_settings
 WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
SELECT count_in_parallel();
ROLLBACK;
DROP FUNCTION count_in_parallel();
-- The leader of a parallel operation cannot acquire a lock, either.
ALTER FUNCTION acquire_in_parallel() PARALLEL RESTRICTED;
BEGIN;
SELECT count(set_config(name, 'on', true)) FROM pg_settings
 WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
SELECT acquire_in_parallel();
ROLLBACK;
\set VERBOSITY default
DROP FUNCTION acquire_in_parallel();
SELECT count(*) FROM dlock_locks;
