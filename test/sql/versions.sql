--
-- Optimistic locking: versions of names, and version columns
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

\set VERBOSITY terse

-- A name that was never bumped has version 0 and no row.
SELECT dlock_version_of('doc');
SELECT dlock_version_bump('doc', 0);
SELECT dlock_version_of('doc');
SELECT dlock_version_bump('doc', 1), dlock_version_of('doc'),
	dlock_try_version_bump('doc', 2), dlock_version_of('doc');
SELECT name, version, bumped_by = current_user AS by_me,
	bumped_at BETWEEN now() - interval '1 minute' AND clock_timestamp() AS just_now
  FROM dlock_versions;

-- The version is newer or older than the expected version.
SELECT explain_error('SELECT dlock_version_bump(''doc'', 2)');
SELECT explain_error('SELECT dlock_version_bump(''doc'', 4)');
SELECT explain_error('SELECT dlock_version_bump(''doc'', 0)');
SELECT explain_error('SELECT dlock_version_bump(''never seen'', 1)');
SELECT dlock_try_version_bump('doc', 2), dlock_try_version_bump('doc', 4),
	dlock_try_version_bump('doc', 0), dlock_try_version_bump('never seen', 1);
SELECT dlock_version_of('doc'), dlock_version_of('never seen');
SELECT count(*) FROM dlock_versions;

-- Several bumps in one transaction
DO $$
BEGIN
	FOR i IN 3 .. 1002 LOOP
		ASSERT dlock_version_bump('doc', i) = i + 1;
	END LOOP;
END $$;
SELECT dlock_version_of('doc');

-- A rollback restores the version.
BEGIN;
SELECT dlock_version_bump('doc', 1003), dlock_version_bump('draft', 0);
ROLLBACK;
SELECT dlock_version_of('doc'), dlock_version_of('draft');
BEGIN;
SELECT dlock_version_bump('doc', 1003);
SAVEPOINT one;
SELECT dlock_version_bump('doc', 1004), dlock_version_bump('draft', 0);
ROLLBACK TO one;
SELECT dlock_version_of('doc'), dlock_version_of('draft');
SAVEPOINT two;
SELECT dlock_version_bump('doc', 1003);
ROLLBACK TO two;
SELECT dlock_version_bump('doc', 1004);
COMMIT;
SELECT dlock_version_of('doc'), dlock_version_of('draft');
DO $$
BEGIN
	PERFORM dlock_version_bump('doc', 1005);
	PERFORM dlock_version_bump('doc', 1005);
EXCEPTION WHEN serialization_failure THEN
	ASSERT dlock_version_of('doc') = 1005;
	ASSERT dlock_version_bump('doc', 1005) = 1006;
END $$;
SELECT dlock_version_of('doc');

-- A statement sees its own bumps.
SELECT n, dlock_version_bump('list', n) FROM generate_series(0, 2) AS n;
SELECT dlock_version_of('list');

-- Names are compared byte by byte.
SELECT dlock_version_bump('Doc', 0), dlock_version_bump('doc ', 0),
	dlock_version_bump(' doc', 0), dlock_version_bump('dóc', 0),
	dlock_version_bump(U&'do\0301c', 0), dlock_version_bump(repeat('d', 255), 0),
	dlock_version_bump('it''s "50%s" \', 0);
SELECT dlock_version_of('Doc'), dlock_version_of('DOC'), dlock_version_of('doc'),
	dlock_version_of('doc  ');
SELECT count(*) FROM dlock_versions WHERE version = 1;

-- Names, and invalid arguments
SELECT dlock_version_of(NULL);
\echo :SQLSTATE
SELECT dlock_version_bump(NULL, 0);
\echo :SQLSTATE
SELECT dlock_version_bump('doc', NULL);
\echo :SQLSTATE
SELECT dlock_try_version_bump(NULL, 0);
\echo :SQLSTATE
SELECT dlock_try_version_bump('doc', NULL);
\echo :SQLSTATE
SELECT dlock_version_of('');
\echo :SQLSTATE
SELECT dlock_version_bump('', 0);
\echo :SQLSTATE
SELECT dlock_version_of(repeat('d', 256));
\echo :SQLSTATE
SELECT dlock_try_version_bump(repeat('d', 256), 0);
\echo :SQLSTATE
SELECT dlock_version_bump('doc', -1);
\echo :SQLSTATE
SELECT dlock_try_version_bump('doc', -1);
\echo :SQLSTATE
SELECT dlock_version_bump('doc', -9223372036854775808);
\echo :SQLSTATE
SELECT dlock_try_version_bump('doc', 9223372036854775807);

-- The greatest version cannot be bumped.
UPDATE dlock_versions SET version = 9223372036854775806 WHERE name = 'Doc';
SELECT dlock_version_bump('Doc', 9223372036854775806);
SELECT dlock_version_bump('Doc', 9223372036854775807);
\echo :SQLSTATE
SELECT dlock_version_of('Doc');

-- A read-only transaction can read versions.
BEGIN READ ONLY;
SELECT dlock_version_of('doc');
SELECT dlock_version_bump('doc', 1006);
\echo :SQLSTATE
ROLLBACK;

-- A prepared transaction keeps the version like any row.
BEGIN;
SELECT dlock_version_bump('doc', 1006);
PREPARE TRANSACTION 'one';
SELECT dlock_version_of('doc');
COMMIT PREPARED 'one';
SELECT dlock_version_of('doc');

--
-- Privileges: every role can read and bump versions, and none can access the
-- table.
--
CREATE ROLE regress_dlock_author;
SET ROLE regress_dlock_author;
SELECT dlock_version_of('doc');
SELECT dlock_version_bump('doc', 1007), dlock_try_version_bump('doc', 1008);
SELECT dlock_version_bump('doc', 1007);
SELECT dlock_version_bump('hers', 0);
SELECT current_user, session_user = current_user AS is_session_user;
SELECT * FROM dlock_versions;
\echo :SQLSTATE
INSERT INTO dlock_versions VALUES ('mine', 1);
UPDATE dlock_versions SET version = 1;
DELETE FROM dlock_versions;
TRUNCATE dlock_versions;
BEGIN;
LOCK dlock_versions;
ROLLBACK;
COPY dlock_versions TO stdout;
CREATE TRIGGER mine BEFORE INSERT ON dlock_versions
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard();
RESET ROLE;

-- The last role to bump, and the number of names of each role
SELECT name, version, bumped_by FROM dlock_versions
 WHERE name IN ('doc', 'hers') ORDER BY name COLLATE "C";
SET ROLE regress_dlock_author;
SELECT role, versions, bytes > 0 AS bytes, oldest <= latest AS in_order
  FROM dlock_version_usage WHERE role = current_user;
-- dlock_version_forget() needs a grant
SELECT dlock_version_forget('hers');
\echo :SQLSTATE
RESET ROLE;
GRANT EXECUTE ON FUNCTION dlock_version_forget(text) TO regress_dlock_author;
SET ROLE regress_dlock_author;
SELECT dlock_version_bump('to be forgotten', 0), dlock_version_bump('to be forgotten', 1);
SELECT dlock_version_forget('to be forgotten'), dlock_version_forget('to be forgotten'),
	dlock_version_of('to be forgotten');
SELECT dlock_version_bump('to be forgotten', 2);
\echo :SQLSTATE
SELECT dlock_version_bump('to be forgotten', 0);
BEGIN;
SELECT dlock_version_forget('to be forgotten');
ROLLBACK;
SELECT dlock_version_of('to be forgotten'), dlock_version_forget('to be forgotten');
SELECT dlock_version_forget(NULL);
\echo :SQLSTATE
SELECT dlock_version_forget('');
\echo :SQLSTATE
RESET ROLE;
REVOKE EXECUTE ON FUNCTION dlock_version_forget(text) FROM regress_dlock_author;

-- An error restores the caller's role, too.
SET ROLE regress_dlock_author;
BEGIN;
SAVEPOINT one;
SELECT dlock_version_bump('doc', 1);
ROLLBACK TO one;
SELECT current_user;
SELECT * FROM dlock_versions;
ROLLBACK;
SELECT current_user;
RESET ROLE;

-- The role's own schema comes first in search_path: its objects are not used.
CREATE SCHEMA hostile AUTHORIZATION regress_dlock_author;
SET ROLE regress_dlock_author;
CREATE TABLE hostile.dlock_versions (name text, version bigint);
INSERT INTO hostile.dlock_versions VALUES ('doc', 5);
CREATE FUNCTION hostile.trap(text, text) RETURNS boolean LANGUAGE plpgsql AS
	$$ BEGIN RAISE 'trapped as %', current_user; END $$;
CREATE FUNCTION hostile.trap(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS
	$$ BEGIN RAISE 'trapped as %', current_user; END $$;
CREATE FUNCTION hostile.add(bigint, integer) RETURNS bigint LANGUAGE plpgsql AS
	$$ BEGIN RAISE 'trapped as %', current_user; END $$;
CREATE OPERATOR hostile.= (leftarg = text, rightarg = text, procedure = hostile.trap);
CREATE OPERATOR hostile.= (leftarg = bigint, rightarg = bigint, procedure = hostile.trap);
CREATE OPERATOR hostile.+ (leftarg = bigint, rightarg = integer, procedure = hostile.add);
SET search_path = hostile, pg_catalog, public;
SELECT 'a'::text = 'a'::text;
SELECT public.dlock_version_of('doc'), public.dlock_version_of('new');
SELECT public.dlock_version_bump('doc', 1009), public.dlock_try_version_bump('new', 0),
	public.dlock_try_version_bump('doc', 1), public.dlock_try_version_bump('new', 0);
SELECT public.dlock_version_bump('doc', 5);
SELECT * FROM dlock_versions;
CREATE TEMPORARY TABLE dlock_versions (name text, version bigint);
SELECT public.dlock_version_of('doc'), public.dlock_version_bump('new', 1);
SET search_path = '';
SELECT public.dlock_version_of('doc'), public.dlock_version_bump('new', 2);
RESET search_path;
RESET ROLE;
DROP TABLE pg_temp.dlock_versions;
SET client_min_messages = warning;
DROP SCHEMA hostile CASCADE;
RESET client_min_messages;

DROP ROLE regress_dlock_author;

-- The extension can be in any schema.
CREATE SCHEMA "it's ""50%s""";
ALTER EXTENSION dlock SET SCHEMA "it's ""50%s""";
SET search_path = "it's ""50%s""";
SELECT dlock_version_of('doc'), dlock_version_bump('doc', 1010);
ALTER EXTENSION dlock SET SCHEMA public;
RESET search_path;
DROP SCHEMA "it's ""50%s""";
SELECT dlock_version_of('doc');

--
-- dlock_version_guard: checks a version column on every update
--
CREATE TABLE item (id integer PRIMARY KEY, name text, version integer NOT NULL);
CREATE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard();
INSERT INTO item VALUES (1, 'nail', 0), (2, 'screw', 7);

-- The column is not set, or set to its current value: next version
UPDATE item SET name = 'Nail' WHERE id = 1 RETURNING *;
UPDATE item SET name = 'nail', version = 1 WHERE id = 1 RETURNING *;
UPDATE item SET version = version WHERE id = 1 RETURNING *;
-- The column is set to the next version: kept
UPDATE item SET name = 'Nail', version = 4 WHERE id = 1 RETURNING *;
UPDATE item SET version = version + 1 WHERE id = 1 RETURNING *;
-- Any other value: refused, because the writer has read another version
SELECT explain_error('UPDATE item SET name = ''stale'', version = 4 WHERE id = 1');
SELECT explain_error('UPDATE item SET name = ''stale'', version = 7 WHERE id = 1');
SELECT explain_error('UPDATE item SET name = ''stale'', version = -5 WHERE id = 1');
UPDATE item SET version = 0;
\echo :SQLSTATE
-- All rows at once
UPDATE item SET name = upper(name);
SELECT * FROM item ORDER BY id;
-- Twice in a transaction
BEGIN;
UPDATE item SET name = 'bolt' WHERE id = 1 RETURNING *;
UPDATE item SET name = 'nut' WHERE id = 1 RETURNING *;
ROLLBACK;
SELECT * FROM item ORDER BY id;
-- Other statements that update rows
INSERT INTO item VALUES (1, 'stale', 5), (3, 'new', 0)
	ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, version = EXCLUDED.version;
INSERT INTO item VALUES (1, 'current', 6), (3, 'new', 0)
	ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, version = EXCLUDED.version;
INSERT INTO item VALUES (3, 'newer', 0)
	ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name;
MERGE INTO item USING (VALUES (1, 'stale', 6), (2, 'screw', 8)) AS new (id, name, version)
	ON item.id = new.id
	WHEN MATCHED THEN UPDATE SET name = new.name, version = new.version;
MERGE INTO item USING (VALUES (1, 'merged', 7), (2, 'screw', 8)) AS new (id, name, version)
	ON item.id = new.id
	WHEN MATCHED THEN UPDATE SET name = new.name, version = new.version;
SELECT * FROM item ORDER BY id;
-- A stale writer that happens to set the current version is not detected,
-- unless its statement has a condition.
UPDATE item SET name = 'blind', version = 8 WHERE id = 1 RETURNING *;
DROP TABLE item;

--
-- Statements of object-relational mappers.  If the version does not match, no
-- row is updated, and the mapper raises an error.
--
CREATE TABLE item (id bigint PRIMARY KEY, name text, version integer, "Version" bigint,
	lock_version integer);
INSERT INTO item VALUES (1, 'nail', 0, 0, NULL);

-- Hibernate
CREATE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('version');
PREPARE hibernate AS update item set name=$1,version=$2 where id=$3 and version=$4;
EXECUTE hibernate('one', 1, 1, 0);
\echo :ROW_COUNT
EXECUTE hibernate('stale', 1, 1, 0);
\echo :ROW_COUNT
EXECUTE hibernate('two', 2, 1, 1);
\echo :ROW_COUNT
SELECT name, version FROM item;

-- SQLAlchemy, version_id_col
PREPARE sqlalchemy AS UPDATE item SET version=$1, name=$2 WHERE item.id = $3 AND item.version = $4;
EXECUTE sqlalchemy(3, 'three', 1, 2);
\echo :ROW_COUNT
EXECUTE sqlalchemy(3, 'stale', 1, 2);
\echo :ROW_COUNT
SELECT name, version FROM item;

-- Sequelize, version: true
PREPARE sequelize AS UPDATE "item" SET "name"=$1,"version"=$2 WHERE "id" = $3 AND "version" = $4;
EXECUTE sequelize('four', 4, 1, 3);
\echo :ROW_COUNT
EXECUTE sequelize('stale', 4, 1, 3);
\echo :ROW_COUNT
SELECT name, version FROM item;

-- The mappers detect an update by a writer that does not set the version.
UPDATE item SET name = 'by hand' WHERE id = 1;
EXECUTE hibernate('stale', 5, 1, 4);
\echo :ROW_COUNT
SELECT name, version FROM item;

-- EF Core: the database changes the concurrency token ...
CREATE OR REPLACE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('Version');
PREPARE efcore AS UPDATE "item" SET "name" = $1 WHERE "id" = $2 AND "Version" = $3 RETURNING "Version";
EXECUTE efcore('one', 1, 0);
EXECUTE efcore('stale', 1, 0);
EXECUTE efcore('two', 1, 1);
-- ... or the program does.
PREPARE efcore_set AS UPDATE "item" SET "Version" = $1, "name" = $2 WHERE "id" = $3 AND "Version" = $4;
EXECUTE efcore_set(3, 'three', 1, 2);
\echo :ROW_COUNT
EXECUTE efcore_set(3, 'stale', 1, 2);
\echo :ROW_COUNT
SELECT name, "Version" FROM item;

-- Rails: a version can begin as NULL, which counts as 0
CREATE OR REPLACE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('lock_version');
PREPARE rails_null AS UPDATE "item" SET "name" = $1, "lock_version" = $2 WHERE "item"."id" = $3 AND "item"."lock_version" IS NULL;
PREPARE rails AS UPDATE "item" SET "name" = $1, "lock_version" = $2 WHERE "item"."id" = $3 AND "item"."lock_version" = $4;
EXECUTE rails_null('one', 1, 1);
\echo :ROW_COUNT
EXECUTE rails_null('stale', 1, 1);
\echo :ROW_COUNT
EXECUTE rails('two', 2, 1, 1);
\echo :ROW_COUNT
EXECUTE rails('stale', 2, 1, 1);
\echo :ROW_COUNT
SELECT name, lock_version FROM item;
-- touch, update_counters and update_all
UPDATE "item" SET "name" = 'touched', "lock_version" = COALESCE("lock_version", 0) + 1 WHERE "item"."id" = 1;
UPDATE "item" SET "name" = 'all' ;
SELECT name, lock_version FROM item;
DEALLOCATE ALL;
DROP TABLE item;

-- NULL
CREATE TABLE item (id integer, version integer);
CREATE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard();
INSERT INTO item VALUES (1, NULL), (2, NULL), (3, NULL), (4, NULL), (5, 0), (6, 1), (7, NULL);
UPDATE item SET id = id WHERE id = 1 RETURNING *;
UPDATE item SET version = NULL WHERE id = 2 RETURNING *;
UPDATE item SET version = 1 WHERE id = 3 RETURNING *;
UPDATE item SET version = 2 WHERE id = 4;
\echo :SQLSTATE
UPDATE item SET version = NULL WHERE id = 5;
\echo :SQLSTATE
UPDATE item SET version = NULL WHERE id = 6;
\echo :SQLSTATE
UPDATE item SET version = 0 WHERE id = 7;
\echo :SQLSTATE
SELECT * FROM item ORDER BY id;
DROP TABLE item;

-- Types, and their greatest values
CREATE TABLE item (small smallint, medium integer, big bigint);
INSERT INTO item VALUES (32766, 2147483646, 9223372036854775806);
CREATE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('small');
UPDATE item SET medium = medium RETURNING *;
UPDATE item SET medium = medium;
\echo :SQLSTATE
UPDATE item SET small = -32768;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('medium');
UPDATE item SET medium = 2147483647 RETURNING *;
UPDATE item SET medium = 2147483647;
\echo :SQLSTATE
UPDATE item SET medium = -2147483648;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('big');
UPDATE item SET medium = medium RETURNING *;
UPDATE item SET medium = medium;
\echo :SQLSTATE
UPDATE item SET big = 1;
\echo :SQLSTATE
SELECT * FROM item;
DROP TABLE item;

-- A partitioned table, a row that moves, and columns in another order
CREATE TABLE item (id integer, place text, version bigint) PARTITION BY LIST (place);
CREATE TABLE item_a PARTITION OF item FOR VALUES IN ('a');
CREATE TABLE item_b (version bigint, gone integer, place text, id integer);
ALTER TABLE item_b DROP COLUMN gone;
ALTER TABLE item ATTACH PARTITION item_b FOR VALUES IN ('b');
CREATE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard();
INSERT INTO item VALUES (1, 'a', 1), (2, 'b', 5);
UPDATE item SET place = 'b' WHERE id = 1;
UPDATE item SET place = 'a', version = 6 WHERE id = 2;
UPDATE item SET place = 'b', version = 5 WHERE id = 2;
SELECT tableoid::regclass, * FROM item ORDER BY id;
DROP TABLE item;

-- Wide and null columns stay unchanged.  Generated columns follow the version.
CREATE TABLE item (wide text, nothing text, version bigint,
	twice bigint GENERATED ALWAYS AS (version * 2) STORED);
CREATE TRIGGER version BEFORE UPDATE ON item
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard();
ALTER TABLE item ALTER wide SET STORAGE EXTERNAL;
INSERT INTO item VALUES (repeat('x', 100000), NULL, 1);
ALTER TABLE item ADD later text DEFAULT 'default';
UPDATE item SET nothing = NULL;
SELECT length(wide), nothing, version, twice, later FROM item;
DROP TABLE item;

-- Wrong definitions
CREATE TABLE wrong (n integer, version text);
INSERT INTO wrong VALUES (1, 'a');
CREATE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard();
UPDATE wrong SET n = 1;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('revision');
UPDATE wrong SET n = 1;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('xmin');
UPDATE wrong SET n = 1;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('n', 'version');
UPDATE wrong SET n = 1;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong AFTER UPDATE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('n');
UPDATE wrong SET n = 1;
\echo :SQLSTATE
CREATE OR REPLACE TRIGGER wrong BEFORE UPDATE ON wrong
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_version_guard('n');
UPDATE wrong SET n = 1;
CREATE OR REPLACE TRIGGER wrong BEFORE INSERT OR DELETE ON wrong
	FOR EACH ROW EXECUTE FUNCTION dlock_version_guard('n');
INSERT INTO wrong VALUES (2);
DELETE FROM wrong;
SELECT dlock_version_guard();
\echo :SQLSTATE
SELECT * FROM wrong;
DROP TABLE wrong;

-- If a column's type was changed, the error names the column.
ALTER TABLE dlock_versions ALTER version TYPE numeric;
SELECT explain_error('SELECT dlock_version_of(''doc'')');
SELECT explain_error('SELECT dlock_version_bump(''doc'', 1011)');
SELECT explain_error('SELECT dlock_try_version_bump(''first'', 0)');
ALTER TABLE dlock_versions ALTER version TYPE bigint;
ALTER TABLE dlock_versions ALTER version DROP NOT NULL;
BEGIN;
UPDATE dlock_versions SET version = NULL;
SELECT explain_error('SELECT dlock_version_of(''doc'')');
ROLLBACK;
ALTER TABLE dlock_versions ALTER version SET NOT NULL;
SELECT dlock_version_of('doc'), dlock_version_of('first');

-- Empty the extension's table.
DELETE FROM dlock_versions;
SELECT dlock_version_of('doc');
