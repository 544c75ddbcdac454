--
-- Privileges
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;

CREATE ROLE regress_dlock_user;

-- Only a superuser can create the extension.
BEGIN;
DROP EXTENSION dlock;
DO $$
BEGIN
	EXECUTE format('GRANT CREATE ON DATABASE %I TO regress_dlock_user',
				   current_database());
END $$;
GRANT CREATE ON SCHEMA public TO regress_dlock_user;
SET ROLE regress_dlock_user;
CREATE EXTENSION dlock;
\echo :SQLSTATE
ROLLBACK;

--
-- Every role can use locks, as with advisory locks.
--
SET ROLE regress_dlock_user;
SELECT dlock_acquire('a') AS a \gset
SELECT dlock_try_acquire('b', shared => true) > 0,
	dlock_acquire_all('{c,d}') > '{0}', dlock_try_acquire_all('{e}') > '{0}';
BEGIN;
SELECT dlock_xact_acquire('x') > 0, dlock_try_xact_acquire('y') > 0,
	dlock_xact_acquire_all('{z}') > '{0}', dlock_try_xact_acquire_all('{z}') > '{0}';
SELECT dlock_release_at_commit(:a);
COMMIT;
SELECT dlock_is_held('a'), dlock_is_held('b'), dlock_check('b', 1),
	dlock_fence('b') > 0 AS fence, dlock_blocking_pids(pg_backend_pid());
SELECT dlock_release('b'), dlock_release_ticket(dlock_fence('c'));

-- every role can read the views
SELECT name, role FROM dlock_locks ORDER BY name;
SELECT acquired > 0 AS counts FROM dlock_stats;

-- A read-only transaction can acquire locks.
BEGIN READ ONLY;
SELECT dlock_acquire('a') > 0, dlock_xact_acquire('x') > 0;
COMMIT;
SELECT dlock_release_all();

--
-- A role without EXECUTE cannot affect other sessions' locks.
--
SELECT dlock_force_release(1);
\echo :SQLSTATE
SELECT dlock_advance_ticket(1);
\echo :SQLSTATE
SELECT last_value FROM dlock_ticket_seq;
\echo :SQLSTATE
SELECT nextval('dlock_ticket_seq');
\echo :SQLSTATE
SELECT setval('dlock_ticket_seq', 1);
\echo :SQLSTATE
SELECT currval('dlock_ticket_seq');
\echo :SQLSTATE

-- It cannot read or lock the tables, either.  A table lock could block every
-- session, because each session reads the reservations in its first call.
SELECT count(*) FROM dlock_reservations;
SELECT count(*) FROM dlock_slots;
BEGIN;
LOCK TABLE dlock_reservations IN ACCESS SHARE MODE;
ROLLBACK;
BEGIN;
LOCK TABLE dlock_slots IN ACCESS SHARE MODE;
ROLLBACK;

-- With EXECUTE, the role can revoke tickets and advance the ticket number.
RESET ROLE;
GRANT EXECUTE ON FUNCTION dlock_force_release(bigint), dlock_advance_ticket(bigint)
	TO regress_dlock_user;
SELECT dlock_acquire('a') AS a \gset
SET ROLE regress_dlock_user;
SELECT dlock_force_release(:a);
SELECT dlock_force_release(:a);
SELECT dlock_advance_ticket(:a) > :a AS advanced;
RESET ROLE;
-- the details contain the ticket number
\set VERBOSITY terse
SELECT dlock_release('a');
\set VERBOSITY default

-- PUBLIC can read the views, and has no privileges on tables and sequences.
SELECT c.oid::regclass, acl.privilege_type
  FROM pg_depend d
  JOIN pg_class c ON d.classid = 'pg_class'::regclass AND d.objid = c.oid,
	LATERAL aclexplode(c.relacl) AS acl
 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
   AND acl.grantee <> c.relowner
 ORDER BY 1, 2;

-- The functions that need a grant
SELECT p.oid::regprocedure
  FROM pg_depend d
  JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
   AND NOT has_function_privilege('pg_monitor', p.oid, 'EXECUTE')
 ORDER BY 1;

-- and the functions that every role may call: for users, for triggers on their
-- tables, and for the views
SELECT p.oid::regproc::text, p.prorettype = 'trigger'::regtype AS trigger
  FROM pg_depend d
  JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
   AND has_function_privilege('pg_monitor', p.oid, 'EXECUTE')
 ORDER BY 1;

-- The trigger functions of dlock's own tables work on no other table, no
-- matter which role created the trigger.
CREATE TABLE regress_dlock_table (name text, slots numeric, version bigint);
DO $$
DECLARE
	function text;
	details text;
	hint text;
BEGIN
	FOREACH function IN ARRAY '{dlock_drop_replicated, dlock_refuse_truncate,
			dlock_reservations_changed, dlock_slots_changed}'::text[]
	LOOP
		FOREACH details IN ARRAY '{BEFORE INSERT ... ROW, AFTER INSERT ... ROW,
				BEFORE TRUNCATE ... STATEMENT, AFTER TRUNCATE ... STATEMENT}'::text[]
		LOOP
			EXECUTE format('CREATE TRIGGER t %s EXECUTE FUNCTION %I()',
				replace(details, '...', 'ON regress_dlock_table FOR EACH'), function);
			BEGIN
				INSERT INTO regress_dlock_table VALUES ('a', 1, 1);
				TRUNCATE regress_dlock_table;
				RAISE 'nothing was refused';
			EXCEPTION WHEN OTHERS THEN
				GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
				RAISE NOTICE '% %: %', SQLSTATE, details, concat_ws(' | ', SQLERRM, nullif(hint, ''));
			END;
			DROP TRIGGER t ON regress_dlock_table;
		END LOOP;
	END LOOP;
END $$;
DROP TABLE regress_dlock_table;
SET ROLE regress_dlock_user;
CREATE TEMPORARY TABLE own ();
CREATE TRIGGER t BEFORE INSERT ON own EXECUTE FUNCTION dlock_slots_changed();
\echo :SQLSTATE
DROP TABLE own;
RESET ROLE;

-- Default privileges grant nothing on these objects.  If they revoke EXECUTE
-- on functions from PUBLIC, the public functions go to the roles that the
-- default privileges name.
BEGIN;
SET LOCAL client_min_messages = warning;
DROP EXTENSION dlock;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO regress_dlock_user;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO regress_dlock_user WITH GRANT OPTION;
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO pg_read_all_data;
ALTER DEFAULT PRIVILEGES IN SCHEMA public
	GRANT SELECT, INSERT ON TABLES TO regress_dlock_user, pg_write_all_data;
ALTER DEFAULT PRIVILEGES IN SCHEMA public
	GRANT EXECUTE ON FUNCTIONS TO regress_dlock_user WITH GRANT OPTION;
CREATE EXTENSION dlock;
SELECT c.oid::regclass, acl.grantee::regrole, acl.privilege_type
  FROM pg_class c, LATERAL aclexplode(c.relacl) AS acl
 WHERE c.relname LIKE 'dlock%' AND acl.grantee <> c.relowner
   AND acl.grantee <> 0;
SELECT oid::regprocedure FROM pg_proc
 WHERE proname LIKE 'dlock%'
   AND NOT has_function_privilege('regress_dlock_user', oid, 'EXECUTE')
   AND NOT has_function_privilege('pg_read_all_data', oid, 'EXECUTE')
 ORDER BY 1;
-- a default privilege does not count as a grant on dlock_set_slots()
SET LOCAL ROLE regress_dlock_user;
SELECT dlock_set_slots('a', 1);
\echo :SQLSTATE
ROLLBACK;

--
-- The administrator's functions
--
-- dlock_force_release() ends a held ticket, once
SELECT dlock_acquire('a') AS a, dlock_acquire('a'), dlock_acquire('b') AS b \gset
SELECT dlock_force_release(:a), dlock_force_release(:a);
SELECT dlock_fence('a'), dlock_check('a', :a), dlock_is_held('b');
-- the holder gets one warning of the loss for each acquire, at later releases
\set VERBOSITY terse
SELECT dlock_is_held('a');
SELECT dlock_release('a');
SELECT dlock_release('a');
SELECT dlock_release('a');
-- a ticket that was enqueued but never granted
SELECT dlock_acquire('c', slots => 1) AS c1, dlock_enqueue('c', 'nobody', slots => 1) AS c2 \gset
SELECT dlock_force_release(:c2);
SELECT dlock_release_ticket(:c2);
SELECT dlock_release('c');
SELECT dlock_force_release(:b);
\set VERBOSITY sqlstate
SELECT dlock_is_held('b');
SELECT dlock_release_ticket(:b);
SELECT dlock_release_ticket(:b);
\set VERBOSITY default
-- the lock can be acquired again
SELECT dlock_acquire('a') > :a AS greater;
SELECT dlock_force_release(0), dlock_force_release(-1), dlock_force_release(1);
SELECT dlock_release_all();

-- dlock_release_all() does not count lost locks
SELECT dlock_acquire('a') AS a, dlock_acquire('b') AS b \gset
SELECT dlock_force_release(:b);
SELECT dlock_release_all();

-- transaction scope and releases at commit
BEGIN;
SELECT dlock_xact_acquire('a') AS a, dlock_acquire('b') AS b \gset
SELECT dlock_release_at_commit(:b);
SELECT dlock_force_release(:a), dlock_force_release(:b);
SELECT dlock_is_held('a'), dlock_is_held('b');
SELECT dlock_xact_acquire('a') > :a AS greater;
SAVEPOINT one;
SELECT dlock_xact_acquire('a') > :a AS greater;
SELECT dlock_force_release(dlock_fence('a'));
SELECT dlock_xact_acquire('a') > :a AS greater;
ROLLBACK TO one;
SELECT dlock_is_held('a');
COMMIT;
SELECT count(*) FROM dlock_locks;

-- dlock_advance_ticket(): no later ticket number is lower
SELECT dlock_acquire('a') AS a \gset
SELECT dlock_advance_ticket(:a + 1000000) >= :a + 1000000 AS advanced;
SELECT dlock_acquire('b') >= :a + 1000000 AS advanced;
SELECT dlock_fence('b') AS b \gset
SELECT dlock_advance_ticket(1) > :b AS never_back;
SELECT dlock_acquire('c') > :b AS greater;
SELECT dlock_advance_ticket(dlock_fence('c')) > dlock_fence('c') AS advanced;
SELECT dlock_release_all();
SELECT dlock_advance_ticket(0);
\echo :SQLSTATE
SELECT dlock_advance_ticket(-1);
SELECT dlock_advance_ticket(9007199254740992);
\echo :SQLSTATE
SELECT dlock_advance_ticket(9007199254740991);
\echo :SQLSTATE
-- the refused calls changed nothing
SELECT dlock_acquire('a') < :a + 1000000000000 AS as_before;
SELECT dlock_release('a');

REVOKE EXECUTE ON FUNCTION dlock_force_release(bigint), dlock_advance_ticket(bigint)
	FROM regress_dlock_user;
DROP ROLE regress_dlock_user;
