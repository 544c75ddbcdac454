--
-- CREATE, ALTER and DROP EXTENSION, and what is in it; in a database of its
-- own, as an advanced ticket number does not outlive a DROP
--
SELECT current_database() AS before \gset
CREATE DATABASE regress_dlock_extension;
\c regress_dlock_extension
CREATE EXTENSION dlock;

-- all that belongs to it, but for types
CREATE TEMPORARY VIEW member AS
SELECT d.classid, d.objid, pg_describe_object(d.classid, d.objid, 0) AS object
  FROM pg_depend d
 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
   AND d.classid <> 'pg_type'::regclass;

-- Everything has a comment: no row expected.
SELECT object FROM member
 WHERE obj_description(objid, classid::regclass::name) IS NULL;
SELECT m.object, a.attname
  FROM member m
  JOIN pg_class c ON m.classid = 'pg_class'::regclass AND m.objid = c.oid
  JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE c.relkind IN ('r', 'v') AND a.attnum > 0 AND NOT a.attisdropped
   AND col_description(c.oid, a.attnum) IS NULL;

-- All functions are volatile, parallel unsafe and not strict, run as their
-- caller, and come from this library; but for one that a generated column
-- needs, which reads a catalog and claims to be immutable.
SELECT m.object, p.provolatile, p.proparallel, p.proisstrict, p.prosecdef,
	p.probin, l.lanname
  FROM member m
  JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid
  JOIN pg_language l ON p.prolang = l.oid
 WHERE p.provolatile <> 'v' OR p.proparallel <> 'u' OR p.proisstrict
	OR p.prosecdef OR p.probin <> '$libdir/dlock' OR l.lanname <> 'c';

-- Nothing else but functions and relations, and all are called dlock_...
SELECT object FROM member
 WHERE classid NOT IN ('pg_proc'::regclass, 'pg_class'::regclass,
					   'pg_rewrite'::regclass)
	OR object !~ '^(function|procedure|view|sequence|table) dlock_';

-- The arguments' names are part of the interface.
SELECT p.proname, pg_get_function_arguments(p.oid) AS arguments,
	pg_get_function_result(p.oid) AS result
  FROM member m
  JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid
 WHERE p.proname NOT IN ('dlock_lock_status', 'dlock_counters')
 ORDER BY p.proname COLLATE "C";

-- What goes into dumps: the numbers that have been used, and the versions.
SELECT unnest(extconfig)::regclass, unnest(extcondition) FROM pg_extension
 WHERE extname = 'dlock';

--
-- A DROP that is rolled back has never been.
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

-- Nor has a new one in its place.
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

-- But numbers that were seen there are not drawn again, nor are lower ones.
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

-- A lease needs the worker, which does not see what is not committed.
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
-- Dropped and re-created, it starts empty, holders or not.  But fences go on:
-- what an outside resource has seen stays behind them.
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

-- A transaction's lock, and one to be released by its commit, over the end of
-- the extension that they belong to
SELECT dlock_acquire('b') AS b \gset
BEGIN;
SELECT dlock_xact_acquire('x') > 0;
SELECT dlock_release_at_commit(:b);
DROP EXTENSION dlock;
COMMIT;
CREATE EXTENSION dlock;
SELECT dlock_xact_acquire('x') > 0, dlock_acquire('b') > 0, dlock_release('b');
SELECT count(*) FROM dlock_locks;

-- A first lock in a transaction that must not write
DROP EXTENSION dlock;
CREATE EXTENSION dlock;
BEGIN READ ONLY;
SELECT dlock_acquire('a') > 0, dlock_xact_acquire('x') > 0;
COMMIT;
SELECT dlock_release('a');

--
-- Another schema.  What is held is kept, and there are more numbers.
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
-- with no search path to lead there
SET search_path = '';
SELECT regress_dlock.dlock_acquire('c', slots => 2) > 0, regress_dlock.dlock_release('c');
SELECT acquired > 0 AS counts FROM regress_dlock.dlock_stats;
RESET search_path;

-- A new session has no other way to find it.
\c -
SELECT regress_dlock.dlock_advance_ticket(1) > :a AS advanced;
SELECT regress_dlock.dlock_acquire('a', '1min') > :a AS greater,
	regress_dlock.dlock_release('a');
DROP SCHEMA regress_dlock CASCADE;
CREATE EXTENSION dlock;
SELECT count(*) FROM dlock_locks;

-- What it needs is not where it was, or is something else.
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

-- A reservation that a rollback would undo, while its numbers are drawn
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

-- The version of the library, by default that of the extension, too
SELECT dlock_version() = extversion AS same FROM pg_extension
 WHERE extname = 'dlock';

-- A function of the library without the extension
DROP EXTENSION dlock;
CREATE FUNCTION is_held(name text) RETURNS boolean
LANGUAGE c AS '$libdir/dlock', 'dlock_is_held';
SELECT is_held('a');
CREATE EXTENSION dlock;
SELECT is_held('a');

\c :before
DROP DATABASE regress_dlock_extension;
