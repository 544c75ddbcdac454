--
-- The views.  They count a whole database, so this test has its own.
--
SELECT current_database() AS before \gset
CREATE DATABASE regress_dlock_views;
\c regress_dlock_views
CREATE EXTENSION dlock;
\set stats 'SELECT acquired, waited, released, busy, timeouts, canceled, deadlocks, wait_time, held FROM dlock_stats;'

SELECT c.relname AS view, a.attnum AS number, a.attname AS "column",
	format_type(a.atttypid, a.atttypmod) AS type
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE c.relname IN ('dlock_locks', 'dlock_stats', 'dlock_blockers', 'dlock_contention',
	'dlock_wait_histogram') AND a.attnum > 0
 ORDER BY 1, 2;

SELECT * FROM dlock_locks;
SELECT * FROM dlock_blockers;
SELECT * FROM dlock_contention;
SELECT * FROM dlock_wait_histogram;
:stats
SELECT waiting, oldest_wait, leases, worker_pid, journal_lag,
	memory_used BETWEEN 0 AND memory_limit AS memory,
	stats_reset BETWEEN (SELECT backend_start FROM pg_stat_activity
						  WHERE pid = pg_backend_pid()) AND clock_timestamp() AS reset
  FROM dlock_stats;

--
-- dlock_locks
--
-- one holder of each kind
SELECT dlock_acquire('e', info => 'who I am') > 0, dlock_acquire('e') > 0,
	dlock_acquire('r', shared => true, info => '') > 0,
	dlock_acquire('s', slots => 4) > 0,
	dlock_acquire('s', slots => 4, permits => 3, info => 'two') > 0;
BEGIN;
SELECT dlock_xact_acquire('x') > 0, dlock_xact_acquire('e') > 0;
SELECT name, mode, slots, permits, granted, position, scope, info, depth
  FROM dlock_locks ORDER BY ticket;

-- columns without a value for holders
SELECT name, lease, owner, channel, remaining, pinned, blocked_by
  FROM dlock_locks ORDER BY ticket;

-- columns that differ from run to run
SELECT name, ticket = dlock_fence(name) AS is_fence, pid = pg_backend_pid() AS pid,
	role = current_user AS role,
	enqueued_at <= granted_at AND granted_at <= clock_timestamp() AS times,
	granted_at > (SELECT backend_start FROM pg_stat_activity
				   WHERE pid = pg_backend_pid()) AS recent
  FROM dlock_locks ORDER BY ticket;

-- The role is the requesting role.
CREATE ROLE regress_dlock_user;
SET ROLE regress_dlock_user;
SELECT dlock_xact_acquire('u') > 0;
RESET ROLE;
SELECT name, role FROM dlock_locks WHERE name = 'u';
COMMIT;
DROP ROLE regress_dlock_user;

-- The first acquire sets info.  Later acquires do not change it.
SELECT dlock_acquire('e', info => 'somebody else') > 0;
SELECT name, info, depth FROM dlock_locks WHERE name = 'e';

-- A ticket held in both scopes is shown in session scope, because it lives as
-- long as the session.
BEGIN;
SELECT dlock_xact_acquire('both') > 0;
SELECT scope, depth FROM dlock_locks WHERE name = 'both';
SELECT dlock_acquire('both') > 0;
SELECT scope, depth FROM dlock_locks WHERE name = 'both';
SELECT dlock_release('both');
SELECT scope, depth FROM dlock_locks WHERE name = 'both';
COMMIT;
SELECT scope, depth FROM dlock_locks WHERE name = 'both';
SELECT dlock_release_all();
SELECT * FROM dlock_locks;

--
-- dlock_locks(name): the rows that the view shows for one lock
--
CREATE FUNCTION pg_temp.as_in_view(lock text) RETURNS boolean
LANGUAGE sql AS $$
	SELECT array_agg(l ORDER BY ticket)::text IS NOT DISTINCT FROM
		(SELECT array_agg(v ORDER BY ticket)::text FROM dlock_locks AS v
		  WHERE name = lock)
	  FROM dlock_locks(lock) AS l;
$$;
SELECT dlock_acquire('e', info => 'who I am') > 0,
	dlock_acquire('r', shared => true) > 0,
	dlock_enqueue('q', channel => 'c') > 0;
SELECT name, mode, granted, position, scope, pid = pg_backend_pid() AS pid,
	role = current_user AS role, info, channel, depth, blocked_by
  FROM dlock_locks('e');
SELECT name, info, channel FROM dlock_locks('q');
SELECT * FROM dlock_locks('no such lock');
SELECT lock, pg_temp.as_in_view(lock) FROM unnest('{e,r,q,no such lock}'::text[]) AS lock;
-- with a queue
SELECT dlock_ttl_enqueue('e', '1h', 'c', owner => 'first') AS first \gset
SELECT dlock_ttl_enqueue('e', '1h', 'c', owner => 'second') AS second \gset
SELECT position, granted, scope, owner, blocked_by = ARRAY[dlock_fence('e')] AS holder,
	blocked_by = ARRAY[dlock_fence('e'), :first] AS first
  FROM dlock_locks('e') ORDER BY ticket;
SELECT dlock_release_ticket(:first), dlock_release_ticket(:second);
-- with many holders
SELECT count(dlock_acquire('s', slots => 1000)) FROM generate_series(1, 600);
SELECT count(*), count(DISTINCT ticket), pg_temp.as_in_view('s') FROM dlock_locks('s');
-- invalid names
SELECT * FROM dlock_locks('');
SELECT * FROM dlock_locks(repeat('x', 256));
SELECT * FROM dlock_locks(NULL);
SELECT dlock_release_all();

-- a process that does not wait, and numbers of no process
SELECT dlock_blocking_pids(pg_backend_pid()), dlock_blocking_pids(0),
	dlock_blocking_pids(-1);

--
-- dlock_stats: a new extension starts at zero
--
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
:stats
SELECT dlock_acquire('a') > 0, dlock_xact_acquire('x') > 0;
:stats
-- an acquire of a held lock, and its release, are not counted
SELECT dlock_acquire('a') > 0, dlock_release('a');
:stats
SELECT dlock_release('a');
:stats
SELECT dlock_acquire_all('{a,b,c}') > '{0}';
SELECT dlock_release_all();
:stats
-- busy locks
SELECT dlock_acquire('s', slots => 1) > 0;
SELECT dlock_try_acquire('s', slots => 1);
SELECT dlock_acquire('s', slots => 1, timeout => '0');
SELECT acquired, busy FROM dlock_stats;
-- failed calls are not counted
SELECT dlock_acquire('s');
SELECT dlock_acquire('');
SELECT dlock_release('no such lock');
:stats

-- the counters restart, and locks stay held
SELECT dlock_acquire('held') > 0, dlock_acquire('r', shared => true) > 0;
SELECT dlock_stats_reset();
:stats
SELECT dlock_release('held');
:stats
SELECT dlock_try_acquire('s', slots => 1);
-- a wait
SELECT dlock_ttl_acquire('leased', '1h') AS ticket \gset
SELECT dlock_try_acquire('leased', '1ms');
SELECT waited, timeouts, wait_time > '0' AS wait_time, waiting, leases FROM dlock_stats;
SELECT max(waits) FILTER (WHERE le IS NULL) AS all, min(waits) FROM dlock_wait_histogram;
SELECT name, waits, wait_time = max_wait AS wait_time, timeouts, deadlocks, expirations,
	max_queue, last_wait_at BETWEEN now() - interval '1h' AND clock_timestamp() AS last
  FROM dlock_contention;
SELECT dlock_release_ticket(:ticket);
SELECT dlock_acquire('a') > 0;

-- The counts of an ended session stay, and its locks are released.
SELECT pg_backend_pid() AS pid \gset
\c -
CREATE FUNCTION pg_temp.await_end(ended integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	WHILE EXISTS (SELECT FROM pg_stat_activity WHERE pid = ended) LOOP
		PERFORM pg_stat_clear_snapshot();
	END LOOP;
END $$;
SELECT pg_temp.await_end(:pid);
SELECT acquired, busy, timeouts, held FROM dlock_stats;
SELECT * FROM dlock_locks;

--
-- The view has been replaced, with more columns.
--
\i test/include/errors.sql
SELECT rtrim(pg_get_viewdef('dlock_locks'), ';') AS query \gset
CREATE OR REPLACE VIEW dlock_locks AS
	SELECT v.*, 'one' AS more, 2 AS many FROM (:query) v;
SELECT dlock_acquire('a') > 0;
SELECT explain_error('SELECT * FROM dlock_locks(''a'')');
SELECT name, many FROM dlock_locks;
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
SELECT * FROM dlock_locks('a');

\c :before
DROP DATABASE regress_dlock_views;
