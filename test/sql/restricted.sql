--
-- Security-restricted operations: code of a table's owner that runs in another
-- role's session during ANALYZE, REINDEX, or REFRESH MATERIALIZED VIEW
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\set SHOW_CONTEXT never

CREATE ROLE regress_dlock_owner;
CREATE SCHEMA owned AUTHORIZATION regress_dlock_owner;
CREATE ROLE regress_dlock_tester SUPERUSER;
SET SESSION AUTHORIZATION regress_dlock_tester;
SELECT current_schema() AS dlock_schema \gset

-- What this session holds, and must keep
CREATE TABLE mine AS SELECT dlock_acquire('a') AS a, dlock_acquire('s', slots => 2) AS s,
	dlock_enqueue('a', 'nobody') AS again, dlock_lease_open('1h') AS lease;
SELECT dlock_lease_acquire('l', lease) > 0 FROM mine;
CREATE VIEW had AS
SELECT name, mode, scope, depth, granted, channel FROM dlock_locks
 ORDER BY name COLLATE "C", ticket;
SELECT * FROM had;

--
-- The usual attack: a function that was harmless when the index was created
--
SET ROLE regress_dlock_owner;
CREATE FUNCTION owned.f(n integer) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	RETURN 0;
END $$;
CREATE TABLE owned.t AS SELECT n FROM generate_series(1, 10) AS n;
CREATE INDEX i ON owned.t (owned.f(n));
CREATE MATERIALIZED VIEW owned.mv AS SELECT owned.f(n) FROM owned.t;
CREATE OR REPLACE FUNCTION owned.f(n integer) RETURNS bigint LANGUAGE plpgsql
IMMUTABLE SET search_path = :dlock_schema AS $$
BEGIN
	RETURN dlock_release_all();
END $$;
-- refused in the owner's own session, too
ANALYZE owned.t;
\echo :SQLSTATE
RESET ROLE;
ANALYZE owned.t;
\echo :SQLSTATE
REINDEX INDEX owned.i;
\echo :SQLSTATE
REFRESH MATERIALIZED VIEW owned.mv;
\echo :SQLSTATE
SELECT * FROM had;
-- outside a restricted operation, the function works and releases all locks
BEGIN;
SELECT dlock_xact_acquire('x') > 0;
SAVEPOINT one;
SELECT sum(owned.f(1)) > 0;
SELECT count(*) FROM had WHERE scope = 'session';
ROLLBACK;
SELECT dlock_acquire('a') > 0, dlock_acquire('s', slots => 2) > 0;

--
-- Every function of the extension
--
CREATE TABLE calls (call text, changes boolean);
INSERT INTO calls VALUES
	('dlock_acquire(''b'')', true),
	('dlock_try_acquire(''b'')', true),
	('dlock_acquire_nosnapshot(''b'', NULL, false, NULL, 1, NULL, NULL)', true),
	('dlock_acquire_all(''{b,c}'')', true),
	('dlock_try_acquire_all(''{b,c}'')', true),
	('dlock_release(''a'')', true),
	('dlock_release_ticket(dlock_fence(''a''))', true),
	('dlock_downgrade(dlock_fence(''a''))', true),
	('dlock_set_info(dlock_fence(''a''), ''x'')', true),
	('dlock_release_at_commit(dlock_fence(''a''))', true),
	('dlock_release_all()', true),
	('dlock_set_slots(''b'', 2)', true),
	('dlock_enqueue(''a'', ''nobody'')', true),
	('dlock_wait(dlock_fence(''a''))', true),
	('dlock_channel()', true),
	('dlock_watch(''a'', ''nobody'')', true),
	('dlock_unwatch(''a'')', true),
	('dlock_xact_acquire(''b'')', true),
	('dlock_try_xact_acquire(''b'')', true),
	('dlock_xact_acquire_all(''{b,c}'')', true),
	('dlock_try_xact_acquire_all(''{b,c}'')', true),
	('dlock_lease_open(''1h'')', true),
	('dlock_lease_close((SELECT lease FROM mine))', true),
	('dlock_renew((SELECT lease FROM mine))', true),
	('dlock_lease_acquire(''b'', (SELECT lease FROM mine))', true),
	('dlock_try_lease_acquire(''b'', (SELECT lease FROM mine))', true),
	('dlock_ttl_acquire(''b'', ''1h'')', true),
	('dlock_try_ttl_acquire(''b'', ''1h'')', true),
	('dlock_lease_acquire_all(''{b,c}'', (SELECT lease FROM mine))', true),
	('dlock_try_lease_acquire_all(''{b,c}'', (SELECT lease FROM mine))', true),
	('dlock_lease_enqueue(''b'', (SELECT lease FROM mine), ''nobody'')', true),
	('dlock_ttl_enqueue(''b'', ''1h'', ''nobody'')', true),
	('dlock_is_held(''a'')', false),
	('dlock_fence(''a'') > 0', false),
	('dlock_check(''a'', dlock_fence(''a''))', false),
	('dlock_blocking_pids(0)', false),
	('dlock_guard(''a'', dlock_fence(''a''))', true),
	('dlock_version_of(''a'')', false),
	('dlock_version_bump(''a'', 0)', true),
	('dlock_try_version_bump(''a'', 0)', true),
	('dlock_force_release(dlock_fence(''a''))', true),
	('dlock_force_close((SELECT lease FROM mine))', true),
	('dlock_version_forget(''a'')', true),
	('dlock_advance_ticket(1)', true),
	('dlock_reserve(''b'', ''regress_dlock_tester'')', true),
	('dlock_unreserve(''b'')', true),
	('count(*) > 0 FROM dlock_lock_status()', false),
	('count(*) > 0 FROM dlock_locks(''a'')', false),
	('count(*) > 0 FROM dlock_lease_status()', false),
	('acquired > 0 FROM dlock_counters()', false),
	('held > 0 FROM dlock_gauges()', false),
	('count(*) > 0 FROM dlock_wait_counts()', false),
	('count(*) >= 0 FROM dlock_contention_status()', false),
	('count(*) > 0 FROM dlock_blocker_status()', false),
	('dlock_stats_reset()', true),
	('dlock_role_oid(''x'') >= 0', false),
	('dlock_note_slots(''x'')', false),
	('dlock_version() <> ''''', false),
	('dlock_reset()', true);

-- Functions missing above, except trigger functions: add them to the list.
SELECT p.oid::regprocedure
  FROM pg_proc AS p
  JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
  JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
 WHERE e.extname = 'dlock' AND p.prorettype <> 'trigger'::regtype AND
	NOT EXISTS (SELECT FROM calls WHERE call ~ ('\m' || p.proname || '\('))
 ORDER BY 1;

CREATE FUNCTION outcome(call text, how text = 'SELECT') RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
	result text;
BEGIN
	IF call LIKE 'dlock_acquire_nosnapshot%' THEN
		how := 'CALL';
	END IF;
	EXECUTE how || ' ' || call INTO result;
	RETURN result;
EXCEPTION WHEN others THEN
	RETURN sqlstate || ' ' || sqlerrm;
END $$;
CREATE MATERIALIZED VIEW outcomes AS
SELECT call, changes, outcome(call) FROM calls WITH NO DATA;
REFRESH MATERIALIZED VIEW outcomes;
SELECT outcome, count(*) FROM outcomes WHERE changes GROUP BY outcome;
SELECT call, outcome FROM outcomes WHERE NOT changes ORDER BY call COLLATE "C";
SELECT * FROM had;
SELECT count(*) FROM dlock_leases;
SELECT count(*) FROM dlock_reservations;
SELECT count(*) FROM dlock_versions WHERE name = 'a';
SELECT count(*) FROM pg_listening_channels();

--
-- The extension's triggers only change the row, or refuse it.
--
CREATE TABLE t (id integer, version bigint, fence bigint);
INSERT INTO t VALUES (1, 1, 1);
CREATE TRIGGER version BEFORE UPDATE ON t FOR EACH ROW
	EXECUTE FUNCTION dlock_version_guard();
CREATE TRIGGER fence BEFORE UPDATE ON t FOR EACH ROW
	EXECUTE FUNCTION dlock_fence_guard('fence');
CREATE MATERIALIZED VIEW updates AS
SELECT outcome('UPDATE t SET fence = 2 RETURNING version, fence', '') AS good,
	outcome('UPDATE t SET fence = 0', '') AS stale;
SELECT * FROM updates;
CREATE TRIGGER guard BEFORE UPDATE ON t FOR EACH STATEMENT
	EXECUTE FUNCTION dlock_require_guard('a');
REFRESH MATERIALIZED VIEW updates;
SELECT * FROM updates;
BEGIN;
SELECT dlock_guard('a', dlock_fence('a'));
REFRESH MATERIALIZED VIEW updates;
COMMIT;
SELECT * FROM updates;
SELECT * FROM t;

--
-- A SECURITY DEFINER function and a foreign key's trigger are no restricted
-- operations.
--
CREATE FUNCTION as_owner() RETURNS bigint LANGUAGE sql SECURITY DEFINER
	SET search_path FROM CURRENT AS $$ SELECT dlock_acquire('b') $$;
SELECT as_owner() > 0, dlock_version_bump('b', 0);
CREATE FUNCTION on_delete() RETURNS trigger LANGUAGE plpgsql
	SET search_path FROM CURRENT AS $$
BEGIN
	PERFORM dlock_acquire('c'), dlock_version_bump('c', 0);
	RETURN OLD;
END $$;
CREATE TABLE parent (id integer PRIMARY KEY);
CREATE TABLE child (id integer REFERENCES parent ON DELETE CASCADE);
CREATE TRIGGER on_delete BEFORE DELETE ON child FOR EACH ROW
	EXECUTE FUNCTION on_delete();
INSERT INTO parent VALUES (1);
INSERT INTO child VALUES (1);
DELETE FROM parent;
SELECT * FROM had;

--
-- Triggers that the owner of dlock's tables has created run as the owner, in a
-- restricted operation.  After REASSIGN OWNED, any role can be the owner.
--
BEGIN;
ALTER TABLE dlock_versions OWNER TO regress_dlock_owner;
ALTER TABLE dlock_slots OWNER TO regress_dlock_owner;
ALTER TABLE dlock_reservations OWNER TO regress_dlock_owner;
GRANT EXECUTE ON FUNCTION dlock_role_oid, dlock_note_slots TO regress_dlock_owner;
CREATE FUNCTION owned.act() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE '% on % as %: %, search_path = %', tg_op, tg_table_name, current_user,
		public.outcome('dlock_release_all()'), current_setting('search_path');
	SET search_path = owned;
	SET application_name = planted;
	RETURN NULL;
END $$;
CREATE FUNCTION owned.late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'deferred trigger on %, as %', tg_table_name, current_user;
	RETURN NULL;
END $$;
CREATE TRIGGER act AFTER INSERT OR UPDATE OR DELETE ON dlock_versions
	EXECUTE FUNCTION owned.act();
CREATE TRIGGER act AFTER INSERT OR UPDATE OR DELETE ON dlock_slots
	EXECUTE FUNCTION owned.act();
CREATE TRIGGER act AFTER INSERT OR UPDATE OR DELETE ON dlock_reservations
	EXECUTE FUNCTION owned.act();
SELECT dlock_version_bump('v', 0), dlock_try_version_bump('v', 1), dlock_version_forget('v');
SELECT dlock_set_slots('v', 2), dlock_set_slots('v', NULL);
SELECT dlock_reserve('v', 'regress_dlock_tester'), dlock_unreserve('v');
SHOW application_name;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON dlock_versions
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION owned.late();
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON dlock_slots
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION owned.late();
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON dlock_reservations
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION owned.late();
SELECT outcome('dlock_version_bump(''v'', 0)');
SELECT outcome('dlock_set_slots(''v'', 2)');
SELECT outcome('dlock_reserve(''v'', ''regress_dlock_tester'')');
SET CONSTRAINTS ALL IMMEDIATE;
SELECT * FROM had;
ROLLBACK;

SELECT dlock_release_all(), dlock_lease_close(lease) FROM mine;
DELETE FROM dlock_versions WHERE name IN ('b', 'c');
RESET SESSION AUTHORIZATION;
SET client_min_messages = warning;
DROP OWNED BY regress_dlock_tester, regress_dlock_owner CASCADE;
DROP ROLE regress_dlock_tester, regress_dlock_owner;
