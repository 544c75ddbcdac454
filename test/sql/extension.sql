--
-- CREATE, ALTER and DROP EXTENSION, and the extension's objects.  The test
-- uses its own database, because DROP EXTENSION undoes an advance of the
-- ticket number.
--
SELECT current_database() AS before \gset
CREATE DATABASE regress_dlock_extension;
\c regress_dlock_extension
CREATE EXTENSION dlock;

-- all member objects except types
CREATE TEMPORARY VIEW member AS
SELECT d.classid, d.objid, pg_describe_object(d.classid, d.objid, 0) AS object
  FROM pg_depend d
 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
   AND d.classid <> 'pg_type'::regclass;

-- All objects and columns have comments: no row expected.
SELECT object FROM member
 WHERE obj_description(objid, classid::regclass::name) IS NULL;
SELECT m.object, a.attname
  FROM member m
  JOIN pg_class c ON m.classid = 'pg_class'::regclass AND m.objid = c.oid
  JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE c.relkind IN ('r', 'v') AND a.attnum > 0 AND NOT a.attisdropped
   AND col_description(c.oid, a.attnum) IS NULL;

-- All functions are volatile, parallel unsafe, not strict, run as the caller,
-- and are in this library.  The exception is a function for a generated
-- column: it claims to be immutable, and reads a catalog.
SELECT m.object, p.provolatile, p.proparallel, p.proisstrict, p.prosecdef,
	p.probin, l.lanname
  FROM member m
  JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid
  JOIN pg_language l ON p.prolang = l.oid
 WHERE p.provolatile <> 'v' OR p.proparallel <> 'u' OR p.proisstrict
	OR p.prosecdef OR p.probin <> '$libdir/dlock' OR l.lanname <> 'c';

-- There are only functions and relations, and all names begin with dlock_.
SELECT object FROM member
 WHERE classid NOT IN ('pg_proc'::regclass, 'pg_class'::regclass,
					   'pg_rewrite'::regclass)
	OR object !~ '^(function|procedure|view|sequence|table) dlock_';

-- The argument names are part of the interface.
SELECT p.proname, pg_get_function_arguments(p.oid) AS arguments,
	pg_get_function_result(p.oid) AS result
  FROM member m
  JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid
 WHERE p.proname NOT IN ('dlock_lock_status', 'dlock_counters')
 ORDER BY p.proname COLLATE "C";

-- The tables and the sequence that dumps contain
SELECT unnest(extconfig)::regclass, unnest(extcondition) FROM pg_extension
 WHERE extname = 'dlock';

--
-- A DROP that is rolled back has no effect.
--
SELECT dlock_acquire('a') AS a \gset
BEGIN;
DROP EXTENSION dlock;
\set VERBOSITY sqlstate
SELECT dlock_is_held('a');
\set VERBOSITY default
ROLLBACK;
SELECT dlock_is_held('a'), dlock_fence('a') = :a AS same, dlock_acquire('a') = :a AS same;
SELECT dlock_release('a');
BEGIN;
SELECT dlock_xact_acquire('x') > 0;
SAVEPOINT one;
DROP EXTENSION dlock;
ROLLBACK TO one;
SELECT dlock_is_held('a'), dlock_is_held('x');
COMMIT;
SELECT name, scope, depth, ticket = :a AS same FROM dlock_locks;

-- A CREATE after the DROP is rolled back with it.
BEGIN;
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
SELECT dlock_is_held('a'), dlock_acquire('a') > :a AS another, dlock_acquire('b') > 0;
SELECT dlock_xact_acquire('x') > 0;
SELECT name, scope FROM dlock_locks ORDER BY name;
ROLLBACK;
SELECT name, scope, depth, ticket = :a AS same FROM dlock_locks;
SELECT dlock_is_held('a'), dlock_is_held('b'), dlock_is_held('x');
SELECT dlock_release('b');

-- No number drawn before the rollback, and no lower number, is drawn again.
BEGIN;
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
SELECT dlock_acquire('a') AS there \gset
SELECT dlock_release('a');
ROLLBACK;
SELECT dlock_release('a'), dlock_acquire('a') > :there AS greater;
SELECT dlock_acquire('b') AS here \gset
BEGIN;
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
SELECT dlock_acquire('b') > :here AS greater;
ROLLBACK;
SELECT dlock_release('b');

-- A lease needs the worker, which cannot see an uncommitted extension.
BEGIN;
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
SELECT dlock_acquire('a') > 0, dlock_release('a');
SAVEPOINT one;
SELECT dlock_lease_open('1min');
ROLLBACK TO one;
SELECT dlock_ttl_acquire('a', '1min');
ROLLBACK TO one;
SELECT dlock_ttl_enqueue('a', '1min');
ROLLBACK;
BEGIN;
CREATE TABLE regress_dlock_other ();
SELECT dlock_lease_open('1min') AS lease \gset
ROLLBACK;
SELECT dlock_lease_close(:lease);

--
-- After DROP and CREATE, the extension starts without holders.  Fences
-- continue to grow, so outside resources still refuse older fences.
--
SELECT dlock_acquire('last') AS last \gset
DROP EXTENSION dlock;
\set VERBOSITY sqlstate
SELECT dlock_is_held('a');
\set VERBOSITY default
CREATE EXTENSION dlock;
SELECT count(*) FROM dlock_locks;
SELECT acquired, released FROM dlock_stats;
SELECT dlock_is_held('a'), dlock_fence('a'), dlock_check('a', :a);
SELECT dlock_release('a');
SELECT dlock_acquire('a') > :last AS greater;
SELECT name, scope, depth FROM dlock_locks;
SELECT dlock_release('a'), dlock_is_held('a');

-- A transaction-scoped lock, and one to release at commit, if the extension is
-- dropped before the commit
SELECT dlock_acquire('b') AS b \gset
BEGIN;
SELECT dlock_xact_acquire('x') > 0;
SELECT dlock_release_at_commit(:b);
DROP EXTENSION dlock;
COMMIT;
CREATE EXTENSION dlock;
SELECT dlock_xact_acquire('x') > 0, dlock_acquire('b') > 0, dlock_release('b');
SELECT count(*) FROM dlock_locks;

-- A session's first lock in a read-only transaction
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
BEGIN READ ONLY;
SELECT dlock_acquire('a') > 0, dlock_xact_acquire('x') > 0;
COMMIT;
SELECT dlock_release('a');

--
-- Another schema.  Holds are kept, and new ticket numbers can be drawn.
--
CREATE SCHEMA regress_dlock;
SELECT dlock_acquire('a') AS a \gset
ALTER EXTENSION dlock SET SCHEMA regress_dlock;
\set VERBOSITY sqlstate
SELECT dlock_is_held('a');
\set VERBOSITY default
SELECT regress_dlock.dlock_is_held('a'), regress_dlock.dlock_fence('a') = :a AS same;
SELECT regress_dlock.dlock_advance_ticket(:a) > :a AS advanced;
SELECT regress_dlock.dlock_acquire('b') > :a AS greater;
SELECT name, scope FROM regress_dlock.dlock_locks ORDER BY name;
-- without the schema in search_path
SET search_path = '';
SELECT regress_dlock.dlock_acquire('c', slots => 2) > 0, regress_dlock.dlock_release('c');
SELECT acquired > 0 AS counts FROM regress_dlock.dlock_stats;
RESET search_path;

-- A new session finds the extension in its schema, too.
\c -
SELECT regress_dlock.dlock_advance_ticket(1) > :a AS advanced;
SELECT regress_dlock.dlock_acquire('a', '1min') > :a AS greater,
	regress_dlock.dlock_release('a');
DROP SCHEMA regress_dlock CASCADE;
CREATE EXTENSION dlock;
SELECT count(*) FROM dlock_locks;

-- An object that dlock needs has another name, or is of another kind.
ALTER SEQUENCE dlock_ticket_seq RENAME TO elsewhere;
SELECT dlock_advance_ticket(1);
CREATE TABLE dlock_ticket_seq ();
SELECT dlock_advance_ticket(1);
ALTER EXTENSION dlock ADD TABLE dlock_ticket_seq;
SELECT dlock_advance_ticket(1);
ALTER EXTENSION dlock DROP TABLE dlock_ticket_seq;
DROP TABLE dlock_ticket_seq;
ALTER SEQUENCE elsewhere RENAME TO dlock_ticket_seq;
SELECT dlock_advance_ticket(1) > 0 AS advanced;

-- Ticket numbers cannot be reserved if a rollback could undo the reservation.
BEGIN;
ALTER SEQUENCE dlock_ticket_seq RESTART;
SELECT dlock_advance_ticket(1);
ROLLBACK;
BEGIN;
ALTER SEQUENCE dlock_ticket_seq RESTART;
SAVEPOINT one;
ALTER SEQUENCE dlock_ticket_seq RESTART;
ROLLBACK TO one;
SELECT dlock_advance_ticket(1);
ROLLBACK;
BEGIN;
SAVEPOINT one;
ALTER SEQUENCE dlock_ticket_seq INCREMENT 1;
ROLLBACK TO one;
SELECT dlock_advance_ticket(1) > 0 AS advanced;
COMMIT;

-- By default, the extension has the library's version.
SELECT dlock_version() = extversion AS same FROM pg_extension
 WHERE extname = 'dlock';

-- A library function is called without the extension.
DROP EXTENSION dlock;
CREATE FUNCTION is_held(name text, lease bigint = NULL) RETURNS boolean
LANGUAGE c AS '$libdir/dlock', 'dlock_is_held';
SELECT is_held('a');
CREATE EXTENSION dlock;
SELECT is_held('a');

\c :before
DROP DATABASE regress_dlock_extension;
