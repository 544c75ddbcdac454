--
-- Modes: exclusive, shared, slots
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

CREATE TEMPORARY VIEW held AS
SELECT name, mode, slots, permits, depth FROM dlock_locks
 WHERE granted AND pid = pg_backend_pid() ORDER BY ticket;

--
-- Shared is reentrant.
--
SELECT dlock_acquire('a', shared => true) AS fence \gset
SELECT dlock_acquire('a', shared => true) = :fence AS same,
	dlock_fence('a') = :fence AS is_fence, dlock_check('a', :fence);
SELECT * FROM held;

-- Exclusive while holding shared is refused, because it would overtake
-- waiters.
SELECT dlock_acquire('a');
\echo :SQLSTATE
SELECT dlock_acquire('a', timeout => '0');
SELECT dlock_try_acquire('a');
\echo :SQLSTATE
SELECT dlock_xact_acquire('a');
SELECT * FROM held;
SELECT dlock_release('a'), dlock_release('a');
SELECT dlock_is_held('a');

-- After the release, the lock is free.
SELECT dlock_acquire('a') > :fence AS greater;

-- Shared while holding exclusive counts as exclusive.
SELECT dlock_acquire('a', shared => true) = dlock_fence('a') AS same,
	dlock_try_acquire('a', shared => true) = dlock_fence('a') AS same;
SELECT * FROM held;
SELECT dlock_release_all();

--
-- Slots are a semaphore, and never reentrant.
--
SELECT dlock_acquire('s', slots => 3) AS one \gset
SELECT dlock_acquire('s', slots => 3) AS two \gset
SELECT dlock_try_acquire('s', slots => 3) AS three \gset
SELECT :one < :two AND :two < :three AS ascending;
SELECT * FROM held;
SELECT dlock_fence('s') = :three AS greatest,
	dlock_check('s', :one), dlock_check('s', :two), dlock_check('s', :three),
	dlock_check('s', :three + 1);

-- This session holds all permits, so a wait would be a deadlock.
SELECT dlock_try_acquire('s', slots => 3);
SELECT dlock_acquire('s', slots => 3, timeout => '0');
\echo :SQLSTATE
SELECT explain_error($$SELECT dlock_acquire('s', slots => 3)$$);
SELECT explain_error($$SELECT dlock_try_acquire('s', '1h', slots => 3)$$);
SELECT explain_error($$SELECT dlock_xact_acquire('s', slots => 3)$$);

-- A release can name the ticket.  Otherwise it releases the latest one.
SELECT dlock_release_ticket(:one);
SELECT dlock_check('s', :one), dlock_check('s', :two), dlock_check('s', :three);
SELECT dlock_release('s');
SELECT dlock_check('s', :one), dlock_check('s', :two), dlock_check('s', :three);
SELECT dlock_fence('s') = :two AS greatest;

-- Two of three permits are free.
SELECT explain_error($$SELECT dlock_acquire('s', slots => 3, permits => 3)$$);
SELECT dlock_try_acquire('s', slots => 3, permits => 3);
SELECT dlock_acquire('s', slots => 3, permits => 2) > :three AS greater;
SELECT dlock_try_acquire('s', slots => 3);
SELECT * FROM held;
SELECT dlock_release('s');
SELECT dlock_try_acquire('s', slots => 3) > 0;
SELECT dlock_release_all();

-- Slots in both scopes: each acquire takes permits of its own.
BEGIN;
SELECT dlock_xact_acquire('s', slots => 2) < dlock_acquire('s', slots => 2) AS ascending;
SELECT dlock_try_xact_acquire('s', slots => 2);
SELECT name, scope, permits FROM dlock_locks ORDER BY ticket;
COMMIT;
SELECT name, scope, permits FROM dlock_locks ORDER BY ticket;
SELECT dlock_try_acquire('s', slots => 2) > 0, dlock_try_acquire('s', slots => 2);
SELECT dlock_release_all();

-- The greatest number of permits
SELECT dlock_acquire('s', slots => 2147483647, permits => 2147483647) > 0;
SELECT dlock_try_acquire('s', slots => 2147483647);
SELECT dlock_release('s');
SELECT dlock_acquire('s', slots => 2147483647) > 0,
	dlock_try_acquire('s', slots => 2147483647, permits => 2147483647),
	dlock_try_acquire('s', slots => 2147483647, permits => 2147483646) > 0,
	dlock_try_acquire('s', slots => 2147483647);
SELECT * FROM held;
SELECT explain_error($$SELECT dlock_acquire('s', slots => 2147483647, permits => 2147483647)$$);
SELECT dlock_release_all();

--
-- All holders and waiters must request the same number of slots.
--
SELECT dlock_acquire('s', slots => 2) > 0;
SELECT dlock_acquire('s', slots => 3);
\echo :SQLSTATE
SELECT dlock_try_acquire('s', slots => 1);
\echo :SQLSTATE
SELECT dlock_acquire('s');
SELECT dlock_try_acquire('s', shared => true);
\echo :SQLSTATE
SELECT dlock_release('s');
SELECT dlock_acquire('s', slots => 3) > 0;
SELECT dlock_release('s');

SELECT dlock_acquire('s') > 0;
SELECT dlock_acquire('s', slots => 2);
\echo :SQLSTATE
SELECT dlock_release('s');
SELECT dlock_acquire('s', shared => true) > 0;
SELECT dlock_try_acquire('s', slots => 1);
\echo :SQLSTATE
SELECT dlock_release('s');

-- One slot is not the same as an exclusive lock.
SELECT dlock_acquire('s', slots => 1) > 0;
SELECT dlock_try_acquire('s');
\echo :SQLSTATE
SELECT dlock_release('s');

--
-- Invalid arguments
--
SELECT dlock_acquire('s', shared => true, slots => 2);
\echo :SQLSTATE
SELECT dlock_acquire('s', slots => 0);
\echo :SQLSTATE
SELECT dlock_acquire('s', slots => 2, permits => 3);
\echo :SQLSTATE
SELECT dlock_acquire('s', permits => 2);
\echo :SQLSTATE
SELECT call, error_of(call) AS error
  FROM unnest(ARRAY[
	$$dlock_acquire('s', slots => -1)$$,
	$$dlock_acquire('s', slots => 2, permits => 0)$$,
	$$dlock_acquire('s', slots => 2, permits => -1)$$,
	$$dlock_acquire('s', permits => 0)$$,
	$$dlock_acquire('s', shared => true, permits => 2)$$,
	$$dlock_try_acquire('s', shared => true, slots => 0)$$,
	$$dlock_xact_acquire('s', slots => 2, permits => 3)$$,
	$$dlock_try_xact_acquire('s', shared => true, slots => 2)$$]) AS call;
SELECT count(*) FROM dlock_locks;
