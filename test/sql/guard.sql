--
-- Fenced commits: dlock_guard and the fence triggers
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

CREATE TEMPORARY VIEW held AS
SELECT name, scope, depth, pinned FROM dlock_locks
 WHERE granted AND pid = pg_backend_pid() ORDER BY name, ticket;

-- The error of a COMMIT cannot be caught, and its message contains a fence.
\set message 'SELECT replace(:''LAST_ERROR_MESSAGE'', :''fence'', ''F'') AS message;'
\set VERBOSITY sqlstate

CREATE TABLE journal (entry text);

-- Only the outcome of the commit is tested here, not the cancel at the loss.
SELECT dlock_version() IS NOT NULL AS loaded;
SET dlock.cancel_lost_guards = off;

--
-- Session scope
--
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT * FROM held;
INSERT INTO journal VALUES ('guarded');
COMMIT;
SELECT * FROM held;
SELECT * FROM journal;

-- A statement by itself is a transaction.
SELECT dlock_guard('a', :fence);
INSERT INTO journal SELECT 'guarded by itself' FROM dlock_guard('a', :fence);

-- A rollback needs no lock.
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_release('a');
ROLLBACK;
SELECT * FROM held;

-- Released in the transaction, before the guard ...
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_release('a');
SELECT dlock_guard('a', :fence);
ROLLBACK;

-- ... and after it, in each way
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
INSERT INTO journal VALUES ('lost');
SELECT dlock_release('a');
COMMIT;
:message
SELECT * FROM journal;

SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_release_ticket(:fence);
COMMIT;

SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_release_all();
COMMIT;

SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_force_release(:fence);
COMMIT;
:message
SELECT dlock_release('a');
SELECT * FROM held;

-- A lock that is released and acquired again is another hold.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_release('a');
SELECT dlock_acquire('a') AS newer \gset
COMMIT;
:message
SELECT dlock_check('a', :newer), dlock_release('a');

-- A guard needs only one of several acquires of the lock, in either scope.
SELECT dlock_acquire('a') AS fence, dlock_acquire('a') \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_release('a');
COMMIT;
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_xact_acquire('a') = :fence AS same;
SELECT dlock_release('a');
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

-- A release at commit happens after the check.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_release_at_commit(:fence);
SELECT dlock_guard('a', :fence);
COMMIT;
SELECT * FROM held;
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SELECT dlock_release_at_commit(:fence);
COMMIT;
SELECT * FROM held;

--
-- Transaction scope
--
BEGIN;
SELECT dlock_xact_acquire('a') AS fence \gset
SELECT dlock_guard('a', :fence);
SELECT * FROM held;
COMMIT;
SELECT * FROM held;
BEGIN;
SELECT dlock_guard('a', :fence);
ROLLBACK;
BEGIN;
SELECT dlock_xact_acquire('a') AS fence \gset
SELECT dlock_guard('a', :fence);
SELECT dlock_force_release(:fence);
COMMIT;
:message
SELECT * FROM held;

--
-- Several guards
--
SELECT dlock_acquire('a') AS fence, dlock_acquire('b') AS fence_b,
	dlock_acquire('c') AS fence_c \gset
BEGIN;
SELECT dlock_guard('a', :fence), dlock_guard('b', :fence_b);
SELECT dlock_guard('a', :fence), dlock_guard('a', :fence),
	dlock_guard('c', :fence_c), dlock_guard('b', :fence_b);
COMMIT;
SELECT * FROM held;

-- One lost lock fails the commit, at any position.  No lock stays pinned.
BEGIN;
SELECT dlock_guard('a', :fence), dlock_guard('b', :fence_b), dlock_guard('c', :fence_c);
SELECT dlock_release('b');
COMMIT;
SELECT replace(:'LAST_ERROR_MESSAGE', :'fence_b', 'F') AS message;
SELECT * FROM held;
SELECT dlock_force_release(:fence), dlock_force_release(:fence_c);
SELECT dlock_try_acquire('a') > :fence AS free, dlock_try_acquire('b') > :fence_b AS free,
	dlock_try_acquire('c') > :fence_c AS free;
SELECT * FROM held;
SELECT dlock_release_all();

-- Acquiring, checking, or guarding in an earlier transaction is no guard.
SELECT dlock_acquire('a') AS fence \gset
SELECT dlock_guard('a', :fence);
BEGIN;
SELECT dlock_check('a', :fence), dlock_is_held('a');
SELECT dlock_release('a');
COMMIT;

-- After COMMIT AND CHAIN, the next transaction has no guard.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
COMMIT AND CHAIN;
SELECT dlock_release('a');
COMMIT;
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
ROLLBACK AND CHAIN;
SELECT dlock_release('a');
COMMIT;

--
-- The lock is lost during the transaction.  Only statements that end the
-- transaction, or roll it back to before the guard, still work.
--
-- The statement that loses the lock here must not notice the loss itself.
\set cancel 'SET LOCAL dlock.cancel_lost_guards = on;'
\set guard_and_lose 'SELECT dlock_guard(:''lock'', dlock_acquire(:''lock'')); SET LOCAL dlock.cancel_lost_guards = off; SELECT dlock_force_release(dlock_fence(:''lock'')); SET LOCAL dlock.cancel_lost_guards = on;'
\set lock a
\set VERBOSITY terse
PREPARE counting AS SELECT count(*) FROM journal;
BEGIN;
:cancel
DECLARE journals CURSOR FOR SELECT * FROM journal ORDER BY entry;
:guard_and_lose
SAVEPOINT one;
SELECT 1;
\echo :SQLSTATE
SELECT 1;
ROLLBACK TO one;
INSERT INTO journal VALUES ('late');
ROLLBACK TO one;
EXECUTE counting;
ROLLBACK TO one;
FETCH journals;
ROLLBACK TO one;
SET LOCAL work_mem = '1MB';
ROLLBACK TO one;
DO $$BEGIN END$$;
ROLLBACK TO one;
SELECT dlock_release_all();
ROLLBACK TO one;
SAVEPOINT two;
RELEASE two;
\set VERBOSITY sqlstate
COMMIT;
\set VERBOSITY terse
SELECT * FROM journal WHERE entry = 'late';

-- A rolled-back guard no longer counts, and a guard of another transaction
-- never counts.
BEGIN;
:cancel
SAVEPOINT one;
:guard_and_lose
SELECT 1;
ROLLBACK TO one;
SELECT 'goes on' AS after;
\set lock b
:guard_and_lose
SELECT 1;
ROLLBACK;
SELECT 'goes on' AS after;
BEGIN;
:cancel
SAVEPOINT one;
:guard_and_lose
RELEASE one;
SELECT 1;
ROLLBACK AND CHAIN;
:cancel
SELECT 'goes on' AS after;
COMMIT;

-- The transaction has more guards than fit the first array, and loses one.
BEGIN;
:cancel
SELECT count(dlock_guard('b/' || n, dlock_acquire('b/' || n))) FROM generate_series(1, 50) AS n;
:guard_and_lose
SELECT dlock_guard('b/1', dlock_fence('b/1'));
ROLLBACK;
SELECT dlock_release_all();

-- The message, detail and hint, for a statement in a function
CREATE FUNCTION explain_loss(name text) RETURNS text LANGUAGE plpgsql
SET dlock.cancel_lost_guards = on AS $$
DECLARE
	fence	bigint := dlock_acquire(name);
	detail	text;
	hint	text;
BEGIN
	PERFORM dlock_guard(name, fence);
	PERFORM dlock_force_release(fence);
	INSERT INTO journal VALUES ('late');
	RETURN 'not canceled';
EXCEPTION WHEN query_canceled THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN format(E'%s\n%s\n%s', SQLERRM, replace(detail, fence::text, 'F'), hint);
END $$;
SELECT explain_loss('a');
SELECT explain_loss('Lager "Süd" 50%s');
DROP FUNCTION explain_loss;

-- WHEN OTHERS does not catch the error.  WHEN query_canceled catches it, but
-- the next statement raises it again.
CREATE PROCEDURE guard_and_lose(name text) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM dlock_guard(name, dlock_acquire(name));
	PERFORM dlock_force_release(dlock_fence(name));
END $$;
DO $$
BEGIN
	CALL guard_and_lose('a');
	PERFORM set_config('dlock.cancel_lost_guards', 'on', true);
	PERFORM 1;
EXCEPTION WHEN OTHERS THEN
	RAISE NOTICE 'caught';
END $$;
DO $$
BEGIN
	CALL guard_and_lose('a');
	BEGIN
		PERFORM set_config('dlock.cancel_lost_guards', 'on', true);
		PERFORM 1;
	EXCEPTION WHEN query_canceled THEN
		RAISE NOTICE 'caught';
	END;
	PERFORM set_config('dlock.cancel_lost_guards', 'on', true);
	PERFORM 2;
END $$;

-- A procedure can roll back and continue.
\set VERBOSITY sqlstate
DO $$
BEGIN
	CALL guard_and_lose('a');
	ROLLBACK;
	SET LOCAL dlock.cancel_lost_guards = on;
	INSERT INTO journal VALUES ('by a procedure');
	COMMIT;
	CALL guard_and_lose('b');
	COMMIT;
END $$;
SELECT count(*) FROM journal WHERE entry = 'by a procedure';

-- With cancel_lost_guards = off, the transaction continues until its commit.
BEGIN;
CALL guard_and_lose('a');
SELECT 'goes on' AS after;
COMMIT;
DEALLOCATE counting;
DROP PROCEDURE guard_and_lose;
DELETE FROM journal WHERE entry = 'by a procedure';

--
-- Savepoints: a guard belongs to its subtransaction.
--
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SAVEPOINT one;
SELECT dlock_guard('a', :fence);
ROLLBACK TO one;
SELECT dlock_release('a');
COMMIT;
SELECT * FROM held;

SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SAVEPOINT one;
SELECT dlock_guard('a', :fence);
RELEASE one;
SELECT dlock_release('a');
COMMIT;
:message

-- Two savepoints are released, and the outermost savepoint is rolled back.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SAVEPOINT one;
SAVEPOINT two;
SAVEPOINT three;
SELECT dlock_guard('a', :fence);
RELEASE three;
RELEASE two;
ROLLBACK TO one;
SELECT dlock_release('a');
COMMIT;

-- A guard before the savepoint stays.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SAVEPOINT one;
SELECT dlock_guard('a', :fence);
ROLLBACK TO one;
SELECT dlock_release('a');
COMMIT;
:message

-- No rollback restores a lock that the session has released.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
SAVEPOINT one;
SELECT dlock_release('a');
ROLLBACK TO one;
COMMIT;
:message

-- A lock and its guard end together.
BEGIN;
SAVEPOINT one;
SELECT dlock_xact_acquire('a') AS fence \gset
SELECT dlock_guard('a', :fence);
ROLLBACK TO one;
SELECT * FROM held;
COMMIT;
BEGIN;
SAVEPOINT one;
SELECT dlock_xact_acquire('a') AS fence \gset
SELECT dlock_guard('a', :fence);
RELEASE one;
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

-- If a guard fails in a savepoint, the transaction can continue.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SAVEPOINT one;
SELECT dlock_guard('a', :fence + 1);
ROLLBACK TO one;
SELECT dlock_guard('a', :fence);
COMMIT;

--
-- PL/pgSQL: a block with an exception handler is a subtransaction.
--
DO $$
BEGIN
	PERFORM dlock_guard('a', dlock_fence('a'));
	RAISE division_by_zero;
EXCEPTION WHEN division_by_zero THEN
	PERFORM dlock_release('a');
END $$;
SELECT dlock_acquire('a') AS fence \gset
DO $$
BEGIN
	BEGIN
		PERFORM dlock_guard('a', dlock_fence('a'));
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	PERFORM dlock_release('a');
END $$;
:message

-- In a loop that rolls back every second guard
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
DO $$
BEGIN
	FOR i IN 1 .. 1000 LOOP
		BEGIN
			PERFORM dlock_guard('a', dlock_fence('a')), dlock_xact_acquire('b');
			IF i % 2 = 0 THEN
				RAISE division_by_zero;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
			NULL;
		END;
	END LOOP;
END $$;
SELECT * FROM held;
COMMIT;
SELECT * FROM held;

--
-- Procedures: a guard counts until the next COMMIT.
--
DO $$
DECLARE
	fence bigint := dlock_fence('a');
BEGIN
	PERFORM dlock_guard('a', fence);
	INSERT INTO journal VALUES ('before the first COMMIT');
	COMMIT;
	PERFORM dlock_release('a');
	INSERT INTO journal VALUES ('unguarded');
	COMMIT;
	PERFORM dlock_acquire('a');
	PERFORM dlock_guard('a', dlock_fence('a'));
	ROLLBACK;
	PERFORM dlock_release('a');
	INSERT INTO journal VALUES ('unguarded, too');
END $$;
SELECT dlock_acquire('a') AS fence \gset
DO $$
BEGIN
	INSERT INTO journal VALUES ('never committed');
	PERFORM dlock_guard('a', dlock_fence('a'));
	PERFORM dlock_release('a');
	COMMIT;
	INSERT INTO journal VALUES ('never reached');
END $$;
:message
SELECT * FROM held;
TABLE journal;
TRUNCATE journal;

--
-- Deferred triggers run at the commit, before the check.
--
CREATE TABLE deferred (what text);
CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE NEW.what;
	RAISE NOTICE 'done';
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON deferred
	DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION at_commit();

SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
INSERT INTO deferred VALUES ('SELECT dlock_release(''a'')');
SELECT * FROM held;
COMMIT;
:message
SELECT * FROM held;
SELECT count(*) FROM deferred;

-- A trigger can guard, too.  The guard then covers the whole transaction.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
INSERT INTO deferred VALUES ('SELECT dlock_guard(''a'', dlock_fence(''a''))');
COMMIT;
BEGIN;
INSERT INTO deferred VALUES ('SELECT dlock_guard(''a'', dlock_fence(''a''))'),
	('SELECT dlock_release(''a'')');
COMMIT;
:message
SELECT count(*) FROM deferred;

-- A WITH HOLD cursor runs its query at the commit.
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
DECLARE late CURSOR WITH HOLD FOR SELECT dlock_release('a');
COMMIT;
:message
SELECT * FROM held;

--
-- Modes
--
SELECT dlock_acquire('a', shared => true) AS fence,
	dlock_acquire('s', slots => 3, permits => 2) AS one \gset
SELECT dlock_acquire('s', slots => 3) AS two \gset
BEGIN;
SELECT dlock_guard('a', :fence), dlock_guard('s', :one), dlock_guard('s', :two);
COMMIT;
BEGIN;
SELECT dlock_guard('s', :one);
SELECT dlock_release_ticket(:two);
COMMIT;
BEGIN;
SELECT dlock_guard('s', :one);
SELECT dlock_acquire('s', slots => 3) AS two \gset
SELECT dlock_release_ticket(:one);
COMMIT;
SELECT replace(:'LAST_ERROR_MESSAGE', :'one', 'F') AS message;
SELECT * FROM held;
SELECT dlock_release_all();

--
-- Errors
--
\set VERBOSITY terse
SELECT dlock_guard(NULL, 1);
\echo :SQLSTATE
SELECT dlock_guard('a', NULL);
\echo :SQLSTATE
SELECT dlock_guard('', 1);
\echo :SQLSTATE
SELECT dlock_guard(repeat('a', 256), 1);
\echo :SQLSTATE
SELECT dlock_guard('a', 1);
\echo :SQLSTATE
SELECT dlock_guard('a', 0), dlock_guard('a', -1);
\echo :SQLSTATE

-- The message contains the lock, the fence, and the newer fence if there is
-- one.
SELECT dlock_acquire('orders/42') AS old, dlock_release('orders/42') \gset
SELECT explain_error(format('SELECT dlock_guard(''orders/42'', %s)', :old), :old);
SELECT dlock_acquire('orders/42') AS new \gset
SELECT explain_error(format('SELECT dlock_guard(''orders/42'', %s)', :old), :old, :new);
-- A greater fence than the lock has had
SELECT explain_error(format('SELECT dlock_guard(''orders/42'', %s)', :new + 1), :old, :new + 1);
-- The fence of another lock
SELECT dlock_acquire('other') AS other \gset
SELECT explain_error(format('SELECT dlock_guard(''other'', %s)', :new), :new, :other);
SELECT explain_error(format('SELECT dlock_guard(''ORDERS/42'', %s)', :new), :new);
SELECT dlock_release_all();

-- An enqueued ticket can guard as soon as it is granted.
SELECT dlock_enqueue('s', 'channel', slots => 1) AS one \gset
SELECT dlock_enqueue('s', 'channel', slots => 1) AS two \gset
SELECT dlock_guard('s', :one);
SELECT explain_error(format('SELECT dlock_guard(''s'', %s)', :two), :one, :two);
SELECT dlock_release_ticket(:one);
SELECT dlock_guard('s', :two);
SELECT dlock_release_all();

--
-- A transaction with a guard cannot be prepared.
--
SELECT dlock_acquire('a') AS fence \gset
BEGIN;
SELECT dlock_guard('a', :fence);
PREPARE TRANSACTION 'one';
\echo :SQLSTATE
BEGIN;
SAVEPOINT one;
SELECT dlock_guard('a', :fence);
RELEASE one;
PREPARE TRANSACTION 'one';
\echo :SQLSTATE
BEGIN;
INSERT INTO deferred VALUES ('SELECT dlock_guard(''a'', dlock_fence(''a''))');
PREPARE TRANSACTION 'one';
\echo :SQLSTATE
SELECT * FROM held;
-- A transaction whose guard was rolled back can be prepared.
BEGIN;
SAVEPOINT one;
SELECT dlock_guard('a', :fence);
ROLLBACK TO one;
PREPARE TRANSACTION 'one';
ROLLBACK PREPARED 'one';
SELECT * FROM held;

-- A read-only transaction, and other isolation levels
BEGIN READ ONLY;
SELECT dlock_guard('a', :fence);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT dlock_guard('a', :fence);
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT dlock_guard('a', :fence);
SELECT dlock_release('a');
\set VERBOSITY sqlstate
COMMIT;
\set VERBOSITY terse
DROP TABLE deferred;
DROP FUNCTION at_commit();

--
-- dlock_require_guard: no change without a guard
--
CREATE TABLE stock (item text PRIMARY KEY, amount integer);
INSERT INTO stock VALUES ('nail', 1), ('screw', 1);
CREATE TRIGGER guarded BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON stock
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('stock');

SELECT explain_error('INSERT INTO stock VALUES (''bolt'', 1)');
SELECT explain_error('UPDATE stock SET amount = 2');
SELECT explain_error('UPDATE stock SET amount = 2 WHERE false');
SELECT explain_error('DELETE FROM stock');
SELECT explain_error('TRUNCATE stock');
COPY stock FROM stdin;
bolt	1
\.
MERGE INTO stock USING (VALUES ('nail')) AS new ON item = new.column1
	WHEN MATCHED THEN UPDATE SET amount = 2;
MERGE INTO stock USING (VALUES ('bolt')) AS new ON item = new.column1
	WHEN NOT MATCHED THEN INSERT VALUES (new.column1, 1);
MERGE INTO stock USING (VALUES ('nail')) AS new ON item = new.column1
	WHEN MATCHED THEN DELETE;
INSERT INTO stock VALUES ('nail', 1) ON CONFLICT DO NOTHING;
WITH deleted AS (DELETE FROM stock RETURNING item) SELECT * FROM deleted;

-- A transaction that only reads needs no guard.
SELECT * FROM stock ORDER BY item FOR UPDATE;
COPY (SELECT count(*) FROM stock) TO stdout;

-- Holding the lock is not enough, and neither is a guard of another lock.
SELECT dlock_acquire('stock') AS fence, dlock_acquire('other') AS other \gset
BEGIN;
SELECT dlock_guard('other', :other);
UPDATE stock SET amount = 2;
ROLLBACK;
BEGIN;
SELECT dlock_xact_acquire('stock') = :fence AS same;
SELECT dlock_release_at_commit(:fence);
UPDATE stock SET amount = 2;
ROLLBACK;

BEGIN;
SELECT dlock_guard('stock', :fence);
INSERT INTO stock VALUES ('bolt', 1);
INSERT INTO stock VALUES ('bolt', 1) ON CONFLICT (item) DO UPDATE SET amount = 2;
UPDATE stock SET amount = amount + 1;
DELETE FROM stock WHERE item = 'nail';
MERGE INTO stock USING (VALUES ('nut')) AS new ON item = new.column1
	WHEN NOT MATCHED THEN INSERT VALUES (new.column1, 1);
COPY stock FROM stdin;
hook	1
\.
SELECT * FROM stock ORDER BY item;
TRUNCATE stock;
INSERT INTO stock VALUES ('nail', 1);
COMMIT;
SELECT * FROM stock;

-- A guard counts until the commit, or until a rollback to a savepoint before
-- the guard.
UPDATE stock SET amount = 2;
BEGIN;
SAVEPOINT one;
SELECT dlock_guard('stock', :fence);
UPDATE stock SET amount = 2;
SAVEPOINT two;
UPDATE stock SET amount = 3;
ROLLBACK TO one;
UPDATE stock SET amount = 4;
ROLLBACK;
BEGIN;
SAVEPOINT one;
SELECT dlock_guard('stock', :fence);
RELEASE one;
UPDATE stock SET amount = 5;
COMMIT;
SELECT * FROM stock;

-- With cancel_lost_guards = off, only the commit checks the guarded lock.
BEGIN;
SELECT dlock_guard('stock', :fence);
SELECT dlock_release('stock');
UPDATE stock SET amount = 6;
\set VERBOSITY sqlstate
COMMIT;
\set VERBOSITY terse
SELECT * FROM stock;

-- Changes that a foreign key makes
CREATE TABLE item (item text PRIMARY KEY);
INSERT INTO item VALUES ('nail');
ALTER TABLE stock ADD FOREIGN KEY (item) REFERENCES item
	ON DELETE CASCADE ON UPDATE CASCADE;
DELETE FROM item;
UPDATE item SET item = 'bolt';
TRUNCATE item CASCADE;
BEGIN;
SELECT dlock_xact_acquire('stock') AS fence \gset
SELECT dlock_guard('stock', :fence);
UPDATE item SET item = 'bolt';
SELECT * FROM stock;
DELETE FROM item;
SELECT * FROM stock;
TRUNCATE item CASCADE;
ROLLBACK;
SELECT * FROM stock;
DROP TABLE stock, item;

-- A partitioned table.  A statement fires the statement triggers only of the
-- table that it names.
CREATE TABLE stock (item text, amount integer) PARTITION BY LIST (amount);
CREATE TABLE stock_1 PARTITION OF stock FOR VALUES IN (1);
CREATE TABLE stock_2 PARTITION OF stock FOR VALUES IN (2);
INSERT INTO stock VALUES ('nail', 1);
CREATE TRIGGER guarded BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON stock
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('stock');
INSERT INTO stock VALUES ('screw', 1);
UPDATE stock SET amount = 2;
DELETE FROM stock;
TRUNCATE stock;
INSERT INTO stock_2 VALUES ('unguarded', 2);
CREATE TRIGGER guarded BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON stock_2
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('stock');
INSERT INTO stock_2 VALUES ('guarded', 2);
BEGIN;
SELECT dlock_xact_acquire('stock') AS fence \gset
SELECT dlock_guard('stock', :fence);
UPDATE stock SET amount = 2;
INSERT INTO stock_2 VALUES ('guarded', 2);
SELECT tableoid::regclass, * FROM stock ORDER BY item;
COMMIT;
DROP TABLE stock;

-- Names with special characters; an AFTER trigger instead of a BEFORE trigger
CREATE TABLE stock (item text);
CREATE TRIGGER guarded AFTER INSERT ON stock
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('Lager "Süd" 50%s');
INSERT INTO stock VALUES ('nail');
BEGIN;
SELECT dlock_xact_acquire('Lager "Süd" 50%s') AS fence \gset
SELECT dlock_guard('Lager "Süd" 50%s', :fence);
INSERT INTO stock VALUES ('nail');
COMMIT;
SELECT * FROM stock;

-- The trigger applies to every role, including the owner.
CREATE ROLE regress_dlock_writer;
GRANT ALL ON stock TO regress_dlock_writer;
SET ROLE regress_dlock_writer;
INSERT INTO stock VALUES ('screw');
BEGIN;
SELECT dlock_xact_acquire('Lager "Süd" 50%s') AS fence \gset
SELECT dlock_guard('Lager "Süd" 50%s', :fence);
INSERT INTO stock VALUES ('screw');
COMMIT;
RESET ROLE;
DROP TABLE stock;
DROP ROLE regress_dlock_writer;

-- Wrong definitions
CREATE TABLE wrong (n integer);
CREATE TRIGGER wrong BEFORE INSERT ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_require_guard('a');
INSERT INTO wrong VALUES (1);
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE INSERT ON wrong
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard();
INSERT INTO wrong VALUES (1);
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE INSERT ON wrong
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('a', 'b');
INSERT INTO wrong VALUES (1);
CREATE OR REPLACE TRIGGER wrong BEFORE INSERT ON wrong
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('');
INSERT INTO wrong VALUES (1);
\echo :SQLSTATE
SELECT dlock_require_guard();
\echo :SQLSTATE
DROP TABLE wrong;

--
-- dlock_fence_guard: a row's fence never becomes smaller
--
CREATE TABLE job (id integer PRIMARY KEY, fence bigint, result text);
CREATE TRIGGER fenced BEFORE UPDATE ON job
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence');
INSERT INTO job VALUES (1, 10, 'ten'), (2, NULL, 'none');

UPDATE job SET fence = 10, result = 'ten again' WHERE id = 1;
UPDATE job SET fence = 11, result = 'eleven' WHERE id = 1;
SELECT explain_error('UPDATE job SET fence = 10, result = ''ten'' WHERE id = 1');
SELECT explain_error('UPDATE job SET fence = -9223372036854775808 WHERE id = 1');
SELECT * FROM job ORDER BY id;

-- NULL is less than any fence.
SELECT explain_error('UPDATE job SET fence = NULL WHERE id = 1');
UPDATE job SET fence = NULL, result = 'still none' WHERE id = 2;
UPDATE job SET fence = 0, result = 'zero' WHERE id = 2;
UPDATE job SET fence = -1 WHERE id = 2;
UPDATE job SET fence = NULL WHERE id = 2;
UPDATE job SET fence = 9223372036854775807 WHERE id = 2;
UPDATE job SET fence = 0 WHERE id = 2;
SELECT * FROM job ORDER BY id;

-- An update that does not set the fence leaves it unchanged.
UPDATE job SET result = 'unfenced' WHERE id = 1;
SELECT * FROM job WHERE id = 1;

-- If one row is refused, the statement fails.
UPDATE job SET fence = 12, result = 'both';
SELECT * FROM job ORDER BY id;

-- Other statements that update
INSERT INTO job VALUES (1, 10, 'stale')
	ON CONFLICT (id) DO UPDATE SET fence = EXCLUDED.fence, result = EXCLUDED.result;
INSERT INTO job VALUES (1, 12, 'twelve')
	ON CONFLICT (id) DO UPDATE SET fence = EXCLUDED.fence, result = EXCLUDED.result;
INSERT INTO job VALUES (3, 1, 'new')
	ON CONFLICT (id) DO UPDATE SET fence = EXCLUDED.fence, result = EXCLUDED.result;
MERGE INTO job USING (VALUES (1, 11, 'stale')) AS new (id, fence, result) ON job.id = new.id
	WHEN MATCHED THEN UPDATE SET fence = new.fence, result = new.result;
MERGE INTO job USING (VALUES (1, 13, 'thirteen'), (4, 1, 'new')) AS new (id, fence, result)
	ON job.id = new.id
	WHEN MATCHED THEN UPDATE SET fence = new.fence, result = new.result
	WHEN NOT MATCHED THEN INSERT VALUES (new.id, new.fence, new.result);
UPDATE job SET fence = new.fence FROM (VALUES (1, 12)) AS new (id, fence) WHERE job.id = new.id;
SELECT * FROM job ORDER BY id;

-- A fence from dlock
SELECT dlock_acquire('a') AS old, dlock_release('a') \gset
SELECT dlock_acquire('a') AS new \gset
UPDATE job SET fence = :new, result = 'new' WHERE id = 1;
SELECT explain_error(format('UPDATE job SET fence = %s, result = ''old'' WHERE id = 1', :old), :old, :new);
SELECT result, fence = :new AS has_new FROM job WHERE id = 1;
SELECT dlock_release('a');
DROP TABLE job;

-- A partitioned table, and a row that moves to another partition
CREATE TABLE job (id integer, fence bigint, result text) PARTITION BY LIST (result);
CREATE TABLE job_a PARTITION OF job FOR VALUES IN ('a');
CREATE TABLE job_b (result text, gone integer, id integer, fence bigint);
ALTER TABLE job_b DROP COLUMN gone;
ALTER TABLE job ATTACH PARTITION job_b FOR VALUES IN ('b');
CREATE TRIGGER fenced BEFORE UPDATE ON job
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence');
INSERT INTO job VALUES (1, 10, 'a'), (2, 10, 'b');
UPDATE job SET fence = 9;
UPDATE job_b SET fence = 9;
UPDATE job SET fence = 9, result = 'b' WHERE id = 1;
UPDATE job SET fence = 9, result = 'a' WHERE id = 2;
UPDATE job SET fence = 10, result = 'b' WHERE id = 1;
UPDATE job SET fence = 11, result = 'a' WHERE id = 2;
SELECT tableoid::regclass, * FROM job ORDER BY id;
DROP TABLE job;

-- Wrong definitions
CREATE TABLE wrong (fence bigint, "Fence" bigint, small integer, big numeric);
INSERT INTO wrong VALUES (2, 2, 2, 2);
CREATE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard();
UPDATE wrong SET fence = 3;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence', 'small');
UPDATE wrong SET fence = 3;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('FENCE');
UPDATE wrong SET fence = 3;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('xmin');
UPDATE wrong SET fence = 3;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('small');
UPDATE wrong SET fence = 3;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('big');
UPDATE wrong SET fence = 3;
CREATE OR REPLACE TRIGGER wrong AFTER UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence');
UPDATE wrong SET fence = 3;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_fence_guard('fence');
UPDATE wrong SET fence = 3;
CREATE OR REPLACE TRIGGER wrong BEFORE INSERT OR UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence');
INSERT INTO wrong VALUES (3);
CREATE OR REPLACE TRIGGER wrong BEFORE DELETE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('fence');
DELETE FROM wrong;
SELECT dlock_fence_guard();
\echo :SQLSTATE
-- A column is found by its exact name.
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_fence_guard('Fence');
UPDATE wrong SET fence = 1;
UPDATE wrong SET "Fence" = 1;
SELECT * FROM wrong;
DROP TABLE wrong;

--
-- A warning: outside a transaction block, a guard or a transaction-scoped
-- acquire has no effect if its statement does nothing else.
--
\set VERBOSITY default
SELECT dlock_acquire('a') AS fence \gset
SELECT dlock_guard('a', :fence);
SELECT dlock_xact_acquire('b') > 0 AS acquired;
\set VERBOSITY terse
SELECT name FROM dlock_guard('a', :fence) AS name;
SELECT fences > '{0}' AS acquired FROM dlock_xact_acquire_all('{b,c}') AS fences;
\set VERBOSITY sqlstate
SELECT dlock_guard('a', :fence);

-- No warning: the statement does more ...
INSERT INTO journal SELECT 'guarded' FROM dlock_guard('a', :fence);
WITH g AS MATERIALIZED (SELECT dlock_guard('a', :fence))
INSERT INTO journal SELECT 'guarded' FROM g;
WITH j AS (INSERT INTO journal VALUES ('guarded') RETURNING 1)
SELECT dlock_guard('a', :fence);
SELECT count(dlock_xact_acquire('b')) FROM journal;
SELECT dlock_xact_acquire('b') > 0 AS acquired, (SELECT count(*) FROM journal);
SELECT count(*) FROM journal, dlock_guard('a', :fence);
SELECT dlock_xact_acquire('b') > 0 AS acquired, dlock_is_held('b');
SELECT dlock_is_held('b') FROM dlock_xact_acquire('b');
SELECT dlock_guard('a', :fence) WHERE dlock_xact_acquire('b') > 0;
-- ... or the transaction does more.
SELECT dlock_guard('a', :fence) \; SELECT 1;
SELECT 1 \; SELECT dlock_guard('a', :fence);
BEGIN;
SELECT dlock_guard('a', :fence);
COMMIT;
DO $$
BEGIN
	PERFORM dlock_xact_acquire('b');
	ASSERT dlock_is_held('b');
END $$;
DO $$
DECLARE
	locking	CURSOR FOR SELECT dlock_xact_acquire('b');
BEGIN
	OPEN locking;
	MOVE locking;
	ASSERT dlock_is_held('b');
END $$;
CREATE FUNCTION lock_b() RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	RETURN dlock_xact_acquire('b');
END $$;
SELECT lock_b() > 0 AS acquired;
DROP FUNCTION lock_b;
-- No warning: a try answers whether the lock is free, and a failed guard has
-- raised an error.
SELECT dlock_try_xact_acquire('b') > 0 AS free;
SELECT dlock_guard('b', 1);
SELECT 1;

DROP TABLE journal;
SELECT dlock_release_all();
SELECT count(*) FROM dlock_locks;
