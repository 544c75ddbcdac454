--
-- Transaction scope, and releases at commit
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

CREATE TEMPORARY VIEW held AS
SELECT name, scope, depth FROM dlock_locks
 WHERE granted AND pid = pg_backend_pid() ORDER BY name, ticket;

-- A statement by itself is a transaction.
SELECT dlock_xact_acquire('a') > 0, dlock_is_held('a');
SELECT dlock_is_held('a');

-- Commit and rollback
BEGIN;
SELECT dlock_xact_acquire('a') AS fence \gset
SELECT dlock_xact_acquire('a') = :fence AS same,
	dlock_try_xact_acquire('a') = :fence AS same,
	dlock_try_xact_acquire('b', shared => true) > :fence AS greater;
SELECT * FROM held;
SELECT dlock_is_held('a'), dlock_fence('a') = :fence AS is_fence,
	dlock_check('a', :fence);
COMMIT;
SELECT * FROM held;
SELECT dlock_is_held('a'), dlock_check('a', :fence);

BEGIN;
SELECT dlock_xact_acquire('a') > :fence AS greater;
ROLLBACK;
SELECT * FROM held;

BEGIN;
SELECT dlock_xact_acquire('a') > 0;
COMMIT AND CHAIN;
SELECT dlock_is_held('a');
COMMIT;

-- An error
BEGIN;
SELECT dlock_xact_acquire('a') > 0;
SELECT 1 / 0;
ROLLBACK;
SELECT * FROM held;
SELECT 1 / (dlock_xact_acquire('a') * 0);
SELECT * FROM held;

-- The session cannot release a transaction-scoped lock.
BEGIN;
SELECT dlock_xact_acquire('a') AS fence \gset
SELECT dlock_release('a');
\set VERBOSITY sqlstate
SELECT dlock_release_ticket(:fence);
\set VERBOSITY default
SELECT dlock_release_all();
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

--
-- Savepoints
--
BEGIN;
SELECT dlock_xact_acquire('top') > 0;
SAVEPOINT one;
SELECT dlock_xact_acquire('one') > 0;
SAVEPOINT two;
SELECT dlock_xact_acquire('two') > 0;
SAVEPOINT three;
SELECT dlock_xact_acquire('three') > 0;
SELECT * FROM held;
ROLLBACK TO three;
SELECT * FROM held;
ROLLBACK TO three;
SELECT * FROM held;
SELECT dlock_xact_acquire('three') > 0;
ROLLBACK TO one;
SELECT * FROM held;
SELECT dlock_xact_acquire('one') > 0;
COMMIT;
SELECT * FROM held;

-- Locks acquired in a released savepoint belong to the enclosing level.
BEGIN;
SAVEPOINT one;
SELECT dlock_xact_acquire('one') > 0;
SAVEPOINT two;
SELECT dlock_xact_acquire('two') > 0;
SAVEPOINT three;
SELECT dlock_xact_acquire('three') > 0;
RELEASE three;
SELECT * FROM held;
RELEASE two;
SELECT * FROM held;
SAVEPOINT two;
SELECT dlock_xact_acquire('two again') > 0;
ROLLBACK TO two;
SELECT * FROM held;
ROLLBACK TO one;
SELECT * FROM held;
SAVEPOINT four;
SELECT dlock_xact_acquire('four') > 0;
RELEASE one;
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

-- Each level undoes its own acquires.
BEGIN;
SELECT dlock_xact_acquire('a') AS fence, dlock_xact_acquire('a') \gset
SAVEPOINT one;
SELECT dlock_xact_acquire('a') = :fence AS same;
SAVEPOINT two;
SELECT dlock_xact_acquire('a') = :fence AS same;
RELEASE two;
SELECT * FROM held;
ROLLBACK TO one;
SELECT * FROM held;
SELECT dlock_check('a', :fence);
COMMIT;
SELECT * FROM held;

-- Many levels, many locks
DO $$
BEGIN
	FOR i IN 1..200 LOOP
		BEGIN
			PERFORM dlock_xact_acquire('level ' || i);
			BEGIN
				PERFORM dlock_xact_acquire('within ' || i);
				PERFORM dlock_xact_acquire('level ' || i);
				RAISE 'out';
			EXCEPTION WHEN raise_exception THEN
				ASSERT NOT dlock_is_held('within ' || i);
				ASSERT dlock_is_held('level ' || i);
			END;
			IF i % 2 = 0 THEN
				RAISE 'out';
			END IF;
		EXCEPTION WHEN raise_exception THEN
			ASSERT NOT dlock_is_held('level ' || i);
		END;
	END LOOP;
	ASSERT (SELECT count(*) = 100 AND sum(depth) = 100 FROM held);
END $$;
SELECT * FROM held;

--
-- PL/pgSQL: a block with an exception handler is a subtransaction.
--
BEGIN;
DO $$
BEGIN
	PERFORM dlock_xact_acquire('before');
	BEGIN
		PERFORM dlock_xact_acquire('failed');
		PERFORM 1 / 0;
	EXCEPTION WHEN division_by_zero THEN
		PERFORM dlock_xact_acquire('handler');
	END;
	BEGIN
		PERFORM dlock_xact_acquire('passed');
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
END $$;
SELECT * FROM held;
COMMIT;

-- A subtransaction's rollback keeps the locks that an open cursor acquired.
DO $$
DECLARE
	number integer;
BEGIN
	FOR number IN SELECT n FROM generate_series(1, 3) AS n
				   WHERE dlock_xact_acquire('row ' || n) > 0 LOOP
		BEGIN
			PERFORM 1 / (number - 2);
		EXCEPTION WHEN division_by_zero THEN
			NULL;
		END;
	END LOOP;
	ASSERT (SELECT count(*) = 3 FROM held);
END $$;
SELECT * FROM held;

-- COMMIT and ROLLBACK in a procedural block end the transaction.
DO $$
BEGIN
	FOR i IN 1..3 LOOP
		PERFORM dlock_xact_acquire('a'), dlock_acquire('b');
		ASSERT dlock_is_held('a');
		IF i = 2 THEN
			ROLLBACK;
		ELSE
			COMMIT;
		END IF;
		ASSERT NOT dlock_is_held('a');
	END LOOP;
END $$;
SELECT * FROM held;
SELECT dlock_release_all();

-- In a deferred trigger, at the end of the transaction
CREATE TEMPORARY TABLE queue (name text);
CREATE FUNCTION pg_temp.acquire() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM dlock_xact_acquire(NEW.name);
	RAISE NOTICE 'holds %: %', NEW.name, dlock_is_held(NEW.name);
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER acquire AFTER INSERT ON queue
	DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION pg_temp.acquire();
BEGIN;
INSERT INTO queue VALUES ('a');
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

--
-- One ticket counts both scopes separately.
--
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_xact_acquire('a') = :fence AS same;
SELECT * FROM held;
COMMIT;
SELECT * FROM held;
BEGIN;
SELECT dlock_xact_acquire('a') = :fence AS same;
SELECT dlock_acquire('a') = :fence AS same;
ROLLBACK;
SELECT * FROM held;
SELECT dlock_release('a'), dlock_release('a');
SELECT * FROM held;

-- The session has released its acquires, and the transaction still holds.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_xact_acquire('a') = :fence AS same;
SELECT dlock_release('a');
SELECT * FROM held;
SELECT dlock_release('a');
SELECT dlock_check('a', :fence);
COMMIT;
SELECT * FROM held;

-- The transaction has ended, and the session still holds.
BEGIN;
SELECT dlock_xact_acquire('a') AS fence \gset
SAVEPOINT one;
SELECT dlock_acquire('a') = :fence AS same;
ROLLBACK TO one;
SELECT * FROM held;
ROLLBACK;
SELECT * FROM held;
SELECT dlock_check('a', :fence), dlock_release('a');

-- dlock_release_all() keeps the transaction's acquires.
BEGIN;
SELECT dlock_xact_acquire('a') = dlock_acquire('a') AS same;
SELECT dlock_release_all();
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

-- Shared
BEGIN;
SELECT dlock_xact_acquire('a', shared => true) = dlock_acquire('a', shared => true) AS same;
SELECT dlock_xact_acquire('a');
ROLLBACK;
SELECT name, mode, scope, depth FROM dlock_locks;
SELECT dlock_release('a');

--
-- A transaction that must release a lock at its end cannot be prepared.
--
BEGIN;
SELECT dlock_xact_acquire('a') > 0;
PREPARE TRANSACTION 'one';
\echo :SQLSTATE
SELECT * FROM held;
BEGIN;
SAVEPOINT one;
SELECT dlock_xact_acquire('a') > 0;
RELEASE one;
PREPARE TRANSACTION 'one';
\echo :SQLSTATE
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_release_at_commit(:fence);
PREPARE TRANSACTION 'one';
\echo :SQLSTATE
SELECT * FROM held;

-- If nothing is left to release, the transaction can be prepared.
BEGIN;
SELECT dlock_acquire('a') = :fence AS same;
SAVEPOINT one;
SELECT dlock_xact_acquire('b') > 0;
SELECT dlock_release_at_commit(:fence);
ROLLBACK TO one;
PREPARE TRANSACTION 'one';
SELECT * FROM held;
ROLLBACK PREPARED 'one';
SELECT * FROM held;
SELECT dlock_release_all();

--
-- Release at commit
--
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_release_at_commit(:fence);
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

-- A rollback keeps the lock.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_release_at_commit(:fence);
ROLLBACK;
SELECT * FROM held;
BEGIN;
SELECT dlock_release_at_commit(:fence);
SELECT 1 / 0;
COMMIT;
SELECT * FROM held;

-- A rollback to a savepoint keeps it, too.
BEGIN;
SAVEPOINT one;
SELECT dlock_release_at_commit(:fence);
ROLLBACK TO one;
COMMIT;
SELECT * FROM held;

-- A released savepoint does not keep it.
BEGIN;
SAVEPOINT one;
SAVEPOINT two;
SELECT dlock_release_at_commit(:fence);
RELEASE two;
RELEASE one;
SELECT * FROM held;
COMMIT;
SELECT * FROM held;
SELECT dlock_check('a', :fence);

-- Outside a transaction block, the release happens at once.
SELECT dlock_acquire('a') AS fence \gset
SELECT dlock_release_at_commit(:fence);
SELECT * FROM held;

-- Each call undoes one acquire.
SELECT dlock_acquire('a') AS fence, dlock_acquire('a'), dlock_acquire('a') \gset
BEGIN;
SELECT dlock_release_at_commit(:fence);
SAVEPOINT one;
SELECT dlock_release_at_commit(:fence);
COMMIT;
SELECT * FROM held;

-- More calls than acquires: an error
BEGIN;
SELECT dlock_release_at_commit(:fence);
SELECT explain_error(format('SELECT dlock_release_at_commit(%s)', :fence), :fence);
ROLLBACK;
SELECT * FROM held;
SELECT explain_error(format('SELECT dlock_release_at_commit(%s)', :fence + 1), :fence + 1);
SELECT explain_error('SELECT dlock_release_at_commit(0)');
SELECT dlock_release('a');
SELECT explain_error(format('SELECT dlock_release_at_commit(%s)', :fence), :fence);

-- A release at commit of a transaction-scoped acquire is refused.
BEGIN;
SELECT dlock_xact_acquire('a') AS fence \gset
SELECT explain_error(format('SELECT dlock_release_at_commit(%s)', :fence), :fence);
SELECT dlock_acquire('a') = :fence AS same;
SELECT dlock_release_at_commit(:fence);
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

-- The session releases the lock before the commit does.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_release_at_commit(:fence);
SELECT dlock_release('a');
SELECT * FROM held;
SELECT dlock_acquire('a') > :fence AS greater;
COMMIT;
SELECT * FROM held;
SELECT dlock_release('a');

-- One of several slots
SELECT dlock_acquire('s', slots => 2) AS one \gset
SELECT dlock_acquire('s', slots => 2) AS two \gset
BEGIN;
SELECT dlock_release_at_commit(:one);
COMMIT;
SELECT dlock_check('s', :one), dlock_check('s', :two);
SELECT dlock_release_all();
SELECT count(*) FROM dlock_locks;
