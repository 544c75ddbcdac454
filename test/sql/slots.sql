--
-- dlock_set_slots(): the number of slots is set for a lock, not by requests
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql
CREATE FUNCTION try(name text, slots integer, permits integer = 1) RETURNS boolean LANGUAGE sql AS $$
	SELECT dlock_try_acquire($1, slots => $2, permits => $3) IS NOT NULL
$$;

--
-- More slots, and fewer
--
SELECT try('a', 1), try('a', 1);
SELECT dlock_set_slots('a', 2);
SELECT * FROM dlock_slots;
-- the number in the request does not matter
SELECT try('a', 1), try('a', 7), try('a', 1);
SELECT mode, slots, permits, granted FROM dlock_locks('a');
-- fewer: no permit is revoked, and new grants wait until the holders fit
SELECT dlock_set_slots(name => 'a', slots => 1);
SELECT slots, granted FROM dlock_locks('a');
SELECT try('a', 9), dlock_release('a'), try('a', 9), dlock_release('a'), try('a', 9), try('a', 9);
SELECT dlock_set_slots('a', 3);
SELECT try('a', 9, 3), try('a', 9, 2), try('a', 1), dlock_release_all();

-- a lock without holders
SELECT dlock_set_slots('b', 2);
SELECT count(*) FROM dlock_locks;
SELECT try('b', 1), try('b', 1), try('b', 1), dlock_release_all();
SELECT try('b', 10, 3), try('b', 10, 2), try('b', 10), dlock_release_all();
-- the greatest number
SELECT dlock_set_slots('b', 2147483647);
SELECT try('b', 2147483647, 2147483647), try('b', 1), dlock_release_all();

-- exclusive and shared requests are unaffected
SELECT dlock_try_acquire('b') > 0 AS exclusive, error_of('dlock_acquire(''b'', slots => 2)'), dlock_release('b');
SELECT dlock_try_acquire('b', shared => true) > 0 AS shared, try('c', 1), dlock_set_slots('b', 2);
SELECT error_of('dlock_acquire(''b'', slots => 2)'), mode, slots FROM dlock_locks('b');
SELECT dlock_release('b'), try('b', 1), error_of('dlock_acquire(''b'')'), dlock_release_all();
SELECT * FROM explain_error('SELECT dlock_acquire(''b''), dlock_acquire(''b'', slots => 1)');
SELECT dlock_release_all();

-- a holder requests more permits
SELECT dlock_set_slots('b', 3);
SELECT try('b', 2), try('b', 2), try('b', 2), dlock_set_slots('b', 4);
SELECT dlock_acquire('b', slots => 2) > 0 AS more;
SELECT error_of('dlock_acquire(''b'', slots => 2)');
SET lock_timeout = '10ms';
-- more permits than slots: the request waits until more slots are set
SELECT error_of('dlock_acquire(''b'', slots => 9, permits => 5)');
RESET lock_timeout;
SELECT try('b', 9, 5), dlock_release_all();
-- a deadlock with the session's own permit, because fewer slots are set
SELECT dlock_set_slots('b', 1);
SET deadlock_timeout = '1ms';
SELECT try('b', 2), error_of('dlock_acquire(''b'', slots => 2)'), dlock_release_all();
RESET deadlock_timeout;
SELECT error_of('dlock_acquire(''b'', slots => 9, permits => 5, timeout => ''1ms'')'), count(*) FROM dlock_locks;

-- in transaction scope, with a lease, and enqueued
SELECT dlock_set_slots('d', 2), dlock_lease_open('1h') AS l \gset
BEGIN;
SELECT dlock_try_xact_acquire('d', slots => 1) > 0 AS first, dlock_try_lease_acquire('d', :l, slots => 1) > 0 AS second,
	dlock_try_ttl_acquire('d', '1h', slots => 1) AS third, dlock_try_xact_acquire('d', slots => 3) AS fourth;
COMMIT;
SELECT dlock_enqueue('d', 'nobody', slots => 1) AS s, dlock_lease_enqueue('d', :l, 'nobody', slots => 1, owner => 'o') AS o,
	dlock_ttl_enqueue('d', '1h', 'nobody', slots => 5, permits => 3) AS t \gset
SELECT dlock_wait(:s, '0') AS s, dlock_wait(:o, '0') AS o, dlock_wait(:t, '0') AS t;
SELECT scope, slots, permits, position, cardinality(blocked_by) FROM dlock_locks('d');
SELECT dlock_set_slots('d', 3);
SELECT dlock_wait(:o) AS o, dlock_wait(:t, '0') AS t;
-- the rows keep the requested number
SELECT slots, granted FROM dlock_queue ORDER BY ticket;
SELECT dlock_lease_close(:l), dlock_release_all();
-- a request for all three permits
SELECT dlock_wait(:t), dlock_set_slots('d', NULL);
SELECT slots, permits, granted FROM dlock_locks('d');
SELECT dlock_release_ticket(:t);

--
-- Back to the requested number
--
SELECT try('e', 2), dlock_set_slots('e', 1);
SELECT try('e', 2), dlock_set_slots('e', NULL);
SELECT try('e', 2), try('e', 2), error_of('dlock_acquire(''e'', slots => 3)'), dlock_release_all();
SELECT dlock_set_slots('e', 3);
SELECT try('e', 2), try('e', 5), dlock_set_slots('e', NULL);
-- while the lock is held, the number that the longest holder requested counts
SELECT slots FROM dlock_locks('e');
SELECT try('e', 2), error_of('dlock_acquire(''e'', slots => 5)');
SELECT dlock_release_ticket(min(ticket)) FROM dlock_locks('e');
SELECT slots FROM dlock_locks('e');
SELECT try('e', 2), try('e', 2), dlock_release_all();
-- without a holder, the number that the first waiter requested counts
SELECT dlock_set_slots('e', 1);
SELECT dlock_enqueue('e', 'nobody', slots => 4, permits => 2) AS q \gset
SELECT slots, permits, position FROM dlock_locks('e');
SELECT dlock_set_slots('e', NULL), dlock_set_slots('never', NULL);
SELECT slots, permits, position FROM dlock_locks('e');
SELECT dlock_release_all();
-- a waiter that requested another number is granted when no holder is left
SELECT dlock_set_slots('e', 1);
SELECT try('e', 2), dlock_enqueue('e', 'nobody', slots => 3) AS q,
	dlock_enqueue('e', 'nobody', slots => 2) AS r \gset
SELECT dlock_set_slots('e', NULL);
SELECT slots, position FROM dlock_locks('e');
SELECT dlock_release_ticket(min(ticket)) FROM dlock_locks('e');
SELECT slots, position FROM dlock_locks('e');
SELECT dlock_release_ticket(:q);
SELECT slots, position FROM dlock_locks('e');
SELECT dlock_release_all();
-- a lease that acquires its lock again gets the same ticket, no matter which
-- number was set meanwhile
SELECT dlock_set_slots('e', 5);
SELECT dlock_lease_open('1h') AS other, dlock_lease_open('1h') AS lease \gset
SELECT dlock_lease_acquire('e', :other, slots => 2) > 0 AS granted;
SELECT dlock_lease_acquire('e', :lease, slots => 3) AS ticket \gset
SELECT dlock_set_slots('e', NULL);
SELECT dlock_lease_acquire('e', :lease, slots => 3) = :ticket AS same,
	dlock_lease_enqueue('e', :lease, 'nobody', slots => 3) = :ticket AS same_again;
SELECT error_of('dlock_lease_acquire(''e'', ' || :lease || ', slots => 4)');
SELECT dlock_lease_close(:lease), dlock_lease_close(:other);

--
-- Set in a transaction
--
TRUNCATE dlock_slots;
SELECT try('f', 1), dlock_set_slots('f', 2);
BEGIN;
SELECT dlock_set_slots('f', 3), dlock_set_slots('g', 1);
SELECT * FROM dlock_slots ORDER BY name;
-- the change takes effect at the commit, in the same session, too
SELECT try('f', 1), try('f', 1), try('g', 2), try('g', 2);
ROLLBACK;
SELECT try('f', 1), try('g', 2), dlock_release_all();
-- savepoints, and several changes of one name
BEGIN;
SELECT dlock_set_slots('f', 5);
SAVEPOINT one;
SELECT dlock_set_slots('f', 6), dlock_set_slots('g', 6);
SAVEPOINT two;
SELECT dlock_set_slots('f', NULL), dlock_set_slots('g', NULL);
ROLLBACK TO two;
RELEASE one;
SAVEPOINT three;
SELECT dlock_set_slots('f', 9);
ROLLBACK TO three;
SELECT dlock_set_slots('f', 1);
COMMIT;
SELECT * FROM dlock_slots ORDER BY name;
SELECT try('f', 2), try('f', 2), try('g', 1), try('g', 6, 5), try('g', 1), dlock_release_all();
BEGIN;
SAVEPOINT one;
SELECT dlock_set_slots('f', 2);
ROLLBACK TO one;
COMMIT;
SELECT try('f', 2), try('f', 2), dlock_release_all();
DO $$ BEGIN
	PERFORM dlock_set_slots('f', 7);
	RAISE division_by_zero;
EXCEPTION WHEN division_by_zero THEN
	PERFORM dlock_set_slots('f', 2);
END $$;
SELECT try('f', 9, 2), try('f', 9), dlock_release_all();

-- writes to the table have the same effect
INSERT INTO dlock_slots VALUES ('h', 1), ('i', 2);
COPY dlock_slots FROM stdin;
j	1
\.
SELECT try('h', 2), try('h', 2), try('i', 1), try('i', 1), try('i', 1), try('j', 2), try('j', 2), dlock_release_all();
UPDATE dlock_slots SET name = 'k' WHERE name = 'h';
UPDATE dlock_slots SET slots = 1 WHERE name = 'i';
DELETE FROM dlock_slots WHERE name = 'j';
SELECT try('h', 2), try('h', 2), try('k', 2), try('k', 2), try('i', 2), try('i', 2), try('j', 2), try('j', 2),
	dlock_release_all();
SET session_replication_role = replica;
UPDATE dlock_slots SET slots = 2 WHERE name = 'i';
RESET session_replication_role;
SELECT try('i', 1), try('i', 1), try('i', 1), dlock_release_all();
-- TRUNCATE removes all rows, except rows that the transaction writes later
SELECT try('k', 2), try('k', 2), dlock_enqueue('f', 'nobody', slots => 9, permits => 3) > 0 AS queued;
BEGIN;
INSERT INTO dlock_slots VALUES ('l', 1);
TRUNCATE dlock_slots;
INSERT INTO dlock_slots VALUES ('k', 1);
COMMIT;
SELECT name, slots, permits, granted FROM dlock_locks ORDER BY name;
SELECT try('k', 2), try('i', 1), try('i', 1), try('l', 2), try('l', 2), dlock_release_all();
BEGIN;
TRUNCATE dlock_slots;
ROLLBACK;
BEGIN;
SAVEPOINT one;
TRUNCATE dlock_slots;
ROLLBACK TO one;
COMMIT;
SELECT try('k', 2), try('k', 2), dlock_release_all();
-- the same, if changes before and after the TRUNCATE are rolled back
SELECT dlock_set_slots('m', 3), dlock_set_slots('n', 3);
BEGIN;
SAVEPOINT one;
SELECT dlock_set_slots('m', 5);
ROLLBACK TO one;
TRUNCATE dlock_slots;
SAVEPOINT one;
SELECT dlock_set_slots('n', 5);
ROLLBACK TO one;
SELECT dlock_set_slots('k', 1);
COMMIT;
SELECT * FROM dlock_slots;
SELECT try('m', 1), try('m', 1), try('n', 1), try('n', 1), try('k', 2), try('k', 2), dlock_release_all();
INSERT INTO dlock_slots VALUES ('', 1);
INSERT INTO dlock_slots VALUES (repeat('x', 256), 1);
INSERT INTO dlock_slots VALUES ('z', 0);

-- refused in a transaction that is prepared, and in a read-only transaction
BEGIN;
SELECT dlock_set_slots('k', 2);
PREPARE TRANSACTION 'slots';
SELECT slots FROM dlock_slots;
BEGIN READ ONLY;
SELECT error_of('dlock_set_slots(''k'', 2)');
ROLLBACK;

--
-- Arguments and privileges
--
SELECT * FROM explain_error('SELECT dlock_set_slots(NULL, 1)');
SELECT * FROM explain_error('SELECT dlock_set_slots(''k'', 0)');
SELECT error_of('dlock_set_slots(''k'', -2147483648)');
SELECT error_of('dlock_set_slots('''', 1)'), error_of('dlock_set_slots(repeat(''x'', 256), 1)');
CREATE ROLE regress_dlock_slots;
CREATE ROLE regress_dlock_team;
CREATE ROLE regress_dlock_member IN ROLE regress_dlock_team;
SELECT dlock_reserve('team/', 'regress_dlock_team');
SET ROLE regress_dlock_member;
SELECT dlock_set_slots('team/jobs', 1);
SELECT * FROM explain_error('SELECT dlock_set_slots(''other'', 1)');
INSERT INTO dlock_slots VALUES ('other', 1);
RESET ROLE;
SELECT * FROM dlock_slots ORDER BY name;
SET ROLE regress_dlock_slots;
SELECT error_of('dlock_set_slots(''team/jobs'', 2)'), error_of('dlock_set_slots(''other'', 2)');
RESET ROLE;
GRANT EXECUTE ON FUNCTION dlock_set_slots(text, integer) TO regress_dlock_slots;
SET ROLE regress_dlock_slots;
SELECT error_of('dlock_set_slots(''team/jobs'', 2)'), dlock_set_slots('other', 2), dlock_set_slots('other', NULL);
SET ROLE regress_dlock_member;
SELECT try('team/jobs', 2), try('team/jobs', 2), dlock_set_slots('team/jobs', NULL);
RESET ROLE;
REVOKE EXECUTE ON FUNCTION dlock_set_slots(text, integer) FROM regress_dlock_slots;
SELECT dlock_unreserve('team/'), dlock_release_all();
-- the trigger function works only on dlock_slots, in AFTER triggers
CREATE TABLE mine (name text, slots integer);
CREATE TRIGGER mine AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION dlock_slots_changed();
INSERT INTO mine VALUES ('other', 1);
CREATE TRIGGER early BEFORE DELETE ON dlock_slots FOR EACH ROW EXECUTE FUNCTION dlock_slots_changed();
DELETE FROM dlock_slots;
DROP TRIGGER early ON dlock_slots;
DROP TABLE mine;
-- a row that the table's constraints would refuse
ALTER TABLE dlock_slots DROP CONSTRAINT dlock_slots_slots_check;
INSERT INTO dlock_slots VALUES ('other', 0);
ALTER TABLE dlock_slots ADD CONSTRAINT dlock_slots_slots_check CHECK (slots OPERATOR(pg_catalog.>=) 1);
DROP ROLE regress_dlock_slots, regress_dlock_member, regress_dlock_team;

--
-- One transaction creates the extension and sets slots.
--
DROP EXTENSION dlock;
BEGIN;
CREATE EXTENSION dlock;
SELECT dlock_set_slots('m', 1);
SELECT try('m', 2), try('m', 2);
COMMIT;
SELECT try('m', 2), dlock_release_all(), try('m', 2), try('m', 2), dlock_release_all();
BEGIN;
SELECT dlock_set_slots('m', 5);
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
COMMIT;
SELECT try('m', 2), try('m', 2), try('m', 2), dlock_release_all();

--
-- The row at the commit counts.
--
-- A site's own trigger changes the row, before or after dlock's trigger.
CREATE FUNCTION cap() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF NEW.slots > 2 THEN
		UPDATE public.dlock_slots SET slots = 2 WHERE name = NEW.name;
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER a_cap AFTER INSERT OR UPDATE ON dlock_slots FOR EACH ROW EXECUTE FUNCTION cap();
SELECT dlock_set_slots('capped', 5);
SELECT slots FROM dlock_slots WHERE name = 'capped';
SELECT try('capped', 9), try('capped', 9), try('capped', 9), dlock_release_all();
DROP TRIGGER a_cap ON dlock_slots;
CREATE TRIGGER z_cap AFTER INSERT OR UPDATE ON dlock_slots FOR EACH ROW EXECUTE FUNCTION cap();
SELECT dlock_set_slots('capped', 7);
SELECT try('capped', 9), try('capped', 9), try('capped', 9), dlock_release_all();
DROP TRIGGER z_cap ON dlock_slots;
DROP FUNCTION cap();
-- rows written without triggers; then an INSERT that writes nothing, because
-- the row exists
BEGIN;
ALTER TABLE dlock_slots DISABLE TRIGGER ALL;
INSERT INTO dlock_slots VALUES ('unseen', 1), ('undone', 1);
SAVEPOINT a;
UPDATE dlock_slots SET slots = 4 WHERE name = 'undone';
ROLLBACK TO a;
ALTER TABLE dlock_slots ENABLE TRIGGER ALL, ENABLE ALWAYS TRIGGER dlock_changed, ENABLE ALWAYS TRIGGER dlock_truncated;
COMMIT;
SELECT try('unseen', 9), try('unseen', 9), try('undone', 9), try('undone', 9), dlock_release_all();
INSERT INTO dlock_slots VALUES ('unseen', 5) ON CONFLICT DO NOTHING;
SELECT try('unseen', 9), try('unseen', 9), dlock_release_all();
DELETE FROM dlock_slots WHERE name IN ('unseen', 'undone');
-- set twice, with the second change rolled back to a savepoint
BEGIN;
SELECT dlock_set_slots('capped', 1);
SAVEPOINT a;
SELECT dlock_set_slots('capped', 9);
ROLLBACK TO a;
COMMIT;
SELECT try('capped', 9), try('capped', 9), dlock_release_all();
-- truncated; then the extension is created again, truncated, and rolled back
BEGIN;
TRUNCATE dlock_slots;
SAVEPOINT a;
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
SELECT dlock_version_of('x');
TRUNCATE dlock_slots;
ROLLBACK TO a;
COMMIT;
SELECT try('capped', 2), try('capped', 2), try('capped', 2), dlock_release_all();
DROP FUNCTION try(text, integer, integer);
