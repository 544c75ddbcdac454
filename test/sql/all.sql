--
-- Many locks at once: all or nothing
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

CREATE TEMPORARY VIEW held AS
SELECT name, mode, scope, depth FROM dlock_locks
 WHERE granted AND pid = pg_backend_pid() ORDER BY name COLLATE "C", ticket;

-- The call returns the fences in the order of the given names ...
SELECT dlock_acquire_all(ARRAY['b', 'c', 'a']) AS fences \gset
SELECT ARRAY[dlock_fence('b'), dlock_fence('c'), dlock_fence('a')] = :'fences' AS same;
SELECT * FROM held;
-- ... and acquires the locks in the byte order of the names.
SELECT name FROM dlock_locks ORDER BY ticket;

-- Reentrant, like single locks
SELECT dlock_acquire_all('{b,c,a}') = :'fences' AS same,
	dlock_try_acquire_all('{b,c,a}') = :'fences' AS same,
	dlock_try_acquire_all('{a,d}', '1s') > '{0,0}' AS new_one;
SELECT * FROM held;
SELECT dlock_release_all();

SELECT dlock_acquire_all('{é,z,Z,a,aa,a ,"",B}');
SELECT dlock_acquire_all('{é,z,Z,a,aa,a ," a",B,0}') > '{0}';
SELECT '<' || name || '>' AS name FROM dlock_locks ORDER BY ticket;
SELECT dlock_release_all();

-- A name given twice counts once.
SELECT dlock_acquire_all('{b,a,b,b}') AS fences \gset
SELECT fences[1] = fences[3] AND fences[1] = fences[4] AND
	fences[2] < fences[1] AS as_given, array_length(fences, 1)
  FROM (SELECT :'fences'::bigint[] AS fences) AS f;
SELECT * FROM held;
SELECT dlock_release('a'), dlock_release('b');
SELECT * FROM held;

-- No name, one name, and an array with another lower bound
SELECT dlock_acquire_all('{}'), dlock_try_acquire_all('{}'),
	dlock_xact_acquire_all('{}'), dlock_try_xact_acquire_all('{}');
SELECT dlock_acquire_all('{a}') = ARRAY[dlock_fence('a')] AS same;
SELECT dlock_acquire_all('[5:6]={b,a}') = ARRAY[dlock_fence('b'), dlock_fence('a')] AS same;
SELECT * FROM held;
SELECT dlock_release_all();

-- The other arguments
SELECT dlock_acquire_all('{a,b}', '1s', true, 'reader') > '{0}';
SELECT name, mode, info FROM dlock_locks ORDER BY ticket;
SELECT dlock_release_all();

-- A thousand names
SELECT dlock_acquire_all(array_agg('lock ' || n ORDER BY n DESC)) AS fences
  FROM generate_series(1, 1000) AS n \gset
SELECT cardinality(fences), (SELECT count(DISTINCT f) FROM unnest(fences) AS f),
	(SELECT bool_and(f = dlock_fence('lock ' || 1001 - n))
	   FROM unnest(fences) WITH ORDINALITY AS u (f, n)) AS same
  FROM (SELECT :'fences'::bigint[] AS fences) AS f;
SELECT count(*), sum(depth) FROM held;
SELECT bool_and(ordered) AS ordered FROM (
	SELECT name COLLATE "C" > lag(name) OVER (ORDER BY ticket) AS ordered
	  FROM dlock_locks) AS l;
SELECT dlock_release_all();
SELECT * FROM held;

-- Transaction scope
BEGIN;
SELECT dlock_xact_acquire_all('{b,a,b}') AS fences \gset
SELECT dlock_try_xact_acquire_all('{a,c}') > '{0}';
SELECT * FROM held;
SAVEPOINT one;
SELECT dlock_xact_acquire_all('{b,a,b}') = :'fences' AS same;
SELECT dlock_xact_acquire_all('{c,d}') > '{0}';
SELECT * FROM held;
ROLLBACK TO one;
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

--
-- A failing call releases the locks that it acquired, and keeps earlier holds.
--
SELECT dlock_acquire('a') AS a, dlock_acquire('c', slots => 2) AS c \gset
SELECT dlock_acquire_all('{a,b,c,d}');
\echo :SQLSTATE
SELECT * FROM held;
SELECT dlock_try_acquire_all('{d,c,b,a}');
\echo :SQLSTATE
SELECT dlock_xact_acquire_all('{a,b,c}');
SELECT * FROM held;
SELECT dlock_check('a', :a), dlock_check('c', :c);

-- In a transaction that continues
BEGIN;
SELECT dlock_xact_acquire_all('{a,b}') > '{0}';
DO $$
BEGIN
	PERFORM dlock_xact_acquire_all('{a,b,bb,c}');
EXCEPTION WHEN object_not_in_prerequisite_state THEN
	RAISE NOTICE 'refused';
END $$;
SELECT * FROM held;
COMMIT;
SELECT * FROM held;
SELECT dlock_release_all();

-- An upgrade
SELECT dlock_acquire('b', shared => true) > 0;
SELECT dlock_acquire_all('{a,b}');
\echo :SQLSTATE
SELECT dlock_acquire_all('{a,b}', shared => true) > '{0}';
SELECT * FROM held;
SELECT dlock_release_all();

-- More locks than the limit
SET dlock.max_locks_per_session = 3;
SELECT dlock_acquire('c') > 0;
SELECT dlock_acquire_all('{a,b,d}');
\echo :SQLSTATE
SELECT * FROM held;
SELECT dlock_acquire_all('{a,b,c}') > '{0}';
SELECT * FROM held;
SELECT dlock_release_all();

-- An array with more names than the limit is refused before the names are
-- read, even if it repeats one name.  The limit applies to leases, too.
SELECT dlock_acquire_all('{a,b,c,d}');
\echo :SQLSTATE
SELECT dlock_lease_open('1h') AS lease \gset
SELECT call, error_of(format(call, :lease))
  FROM unnest(ARRAY[
	$$dlock_acquire_all('{a,a,a,a}')$$,
	$$dlock_acquire_all('{a,b,NULL,""}')$$,
	$$dlock_try_acquire_all('{a,b,c,d}')$$,
	$$dlock_xact_acquire_all('{a,b,c,d}')$$,
	$$dlock_try_xact_acquire_all('{a,b,c,d}')$$,
	$$dlock_lease_acquire_all('{a,b,c,d}', %s)$$,
	$$dlock_try_lease_acquire_all('{a,b,c,d}', %s)$$,
	$$dlock_try_lease_acquire_all('{a,b,c}', %s)$$]) AS call;
SELECT dlock_lease_close(:lease);
SELECT dlock_acquire_all('{a,a,a}') > '{0}';
SELECT dlock_release_all();
RESET dlock.max_locks_per_session;
SELECT dlock_acquire_all(array_agg('a'::text)) FROM generate_series(1, 100001);
\echo :SQLSTATE
SELECT cardinality(dlock_acquire_all(array_agg('a'::text))) FROM generate_series(1, 100000);
SELECT dlock_release_all();

--
-- Invalid arguments: the call checks all names before it acquires a lock.
--
SELECT dlock_acquire_all(NULL);
\echo :SQLSTATE
SELECT dlock_acquire_all('{a,NULL}');
\echo :SQLSTATE
SELECT dlock_acquire_all('{a}', shared => NULL);
\echo :SQLSTATE
SELECT dlock_acquire_all('{a,""}');
\echo :SQLSTATE
SELECT dlock_acquire_all(ARRAY['a', repeat('x', 256)]);
\echo :SQLSTATE
SELECT dlock_acquire_all('{{a,b},{c,d}}');
\echo :SQLSTATE
SELECT dlock_acquire_all('{a}', '-1s');
\echo :SQLSTATE
SELECT dlock_acquire_all('{a}', info => repeat('x', 1025));
\echo :SQLSTATE

SELECT call, error_of(call)
  FROM unnest(ARRAY[
	$$dlock_try_acquire_all(NULL)$$,
	$$dlock_try_acquire_all('{NULL}')$$,
	$$dlock_try_acquire_all('{a}', shared => NULL)$$,
	$$dlock_xact_acquire_all(NULL)$$,
	$$dlock_xact_acquire_all('{a,NULL}')$$,
	$$dlock_xact_acquire_all('{a}', shared => NULL)$$,
	$$dlock_try_xact_acquire_all(NULL)$$,
	$$dlock_try_xact_acquire_all('{NULL,a}')$$,
	$$dlock_try_xact_acquire_all('{a}', shared => NULL)$$,
	$$dlock_try_xact_acquire_all('{a}', '-1s')$$,
	$$dlock_try_acquire_all('{{a}}')$$]) AS call;

-- A cancel that is pending at the call is served before the names are read.
SELECT dlock_acquire_all(CASE WHEN pg_cancel_backend(pg_backend_pid())
						 THEN ARRAY['a', ''] END);
\echo :SQLSTATE
SELECT count(*) FROM dlock_locks;

--
-- A canceled statement releases the locks that its calls have acquired.  Any
-- other error keeps these locks, because locks are not transactional.
--
CREATE FUNCTION cancel() RETURNS boolean LANGUAGE sql VOLATILE
	AS 'SELECT pg_cancel_backend(pg_backend_pid())';
SELECT dlock_acquire_all('{a,b}'), cancel();
\echo :SQLSTATE
SELECT dlock_acquire_all('{a,b}'), dlock_xact_acquire('c'), cancel();
SELECT * FROM held;
SELECT dlock_acquire_all('{a,b}'), 1 / (0 * random())::integer;
\echo :SQLSTATE
SELECT * FROM held;
SELECT dlock_release_all();
SELECT dlock_lease_open('1h') AS lease \gset
SELECT dlock_lease_acquire_all('{a,b}', :lease), cancel();
SELECT count(*) FROM dlock_locks WHERE granted AND lease = :lease;
SELECT dlock_ttl_acquire('c', '1h'), cancel();
\echo :SQLSTATE
SELECT dlock_lease_enqueue('d', :lease, 'nobody'), cancel();
\echo :SQLSTATE
SELECT dlock_ttl_enqueue('e', '1h', 'nobody'), cancel();
SELECT count(*) FROM dlock_locks WHERE granted;
SELECT dlock_lease_acquire_all('{a,b}', :lease), 1 / (0 * random())::integer;
SELECT count(*) FROM dlock_locks WHERE granted AND lease = :lease;
-- The lease keeps the locks that it held before the statement.
SELECT dlock_lease_acquire_all('{b,c}', :lease), cancel();
SELECT name FROM dlock_locks WHERE granted AND lease = :lease ORDER BY name;
SELECT dlock_lease_close(:lease);

-- The session keeps the locks that it held before the statement, even if the
-- statement released locks or caught an error.
SELECT dlock_acquire('a') > 0;
SELECT dlock_acquire_all('{a,b}'), cancel();
SELECT * FROM held;
SELECT dlock_acquire_all('{a,b}'), dlock_release('a'), cancel();
SELECT * FROM held;
SELECT dlock_acquire_all('{a,b}'), dlock_acquire('a'), cancel();
SELECT * FROM held;
SELECT dlock_release('a');
CREATE FUNCTION catch() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM 1 / 0;
EXCEPTION WHEN division_by_zero THEN
	NULL;
END $$;
SELECT catch(), dlock_acquire_all('{a,b}'), catch(), cancel();
SELECT * FROM held;
SELECT dlock_acquire_all('{a,b}') > '{0}', dlock_release('a'), dlock_release('b');
SELECT * FROM held;
SELECT dlock_release('a');

-- An error after a complete statement keeps the statement's locks, because
-- locks are not transactional.
BEGIN;
SELECT dlock_acquire_all('{a,b}') > '{0}', dlock_xact_acquire('c') > 0,
	dlock_acquire_all('{b,d}') > '{0}';
ROLLBACK;
SELECT * FROM held;
SELECT dlock_release_all();
CREATE FUNCTION acquire_and_fail(how text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	fences	bigint[];
BEGIN
	BEGIN
		IF how = 'statement' THEN
			PERFORM dlock_acquire_all('{a,b}');
		ELSE
			fences := dlock_acquire_all('{a,b}');
		END IF;
		PERFORM 1 / 0;
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	PERFORM 1 / 0;
END $$;
SELECT acquire_and_fail('statement');
SELECT * FROM held;
SELECT dlock_release_all();
SELECT acquire_and_fail('expression'), dlock_acquire_all('{c}');
SELECT * FROM held;
SELECT dlock_release_all();

-- A call outside of a statement keeps its locks, even if a statement failed
-- before the session's first lock.
\c -
SET client_min_messages = warning;
SELECT dlock_version() <> '';
SELECT 1 / 0;
DO $$
DECLARE
	fences	bigint[];
BEGIN
	FOR i IN 1..100 LOOP
		fences := dlock_acquire_all(ARRAY['a' || i, 'b' || i]);
		EXECUTE 'SELECT 1';
	END LOOP;
END $$;
SELECT count(*) FROM dlock_locks WHERE pid = pg_backend_pid();
SELECT dlock_release_all();
