--
-- Names reserved for a role
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\set VERBOSITY terse
CREATE ROLE regress_dlock_shop;
CREATE ROLE regress_dlock_orders;
CREATE ROLE regress_dlock_clerk IN ROLE regress_dlock_orders;
CREATE ROLE regress_dlock_other;

SELECT dlock_reserve('shop/', 'regress_dlock_shop');
SELECT dlock_reserve('shop/orders/', 'regress_dlock_orders');
SELECT prefix, owner FROM dlock_reservations ORDER BY prefix;

-- Arguments
\set VERBOSITY sqlstate
SELECT dlock_reserve(NULL, 'regress_dlock_shop');
SELECT dlock_reserve('x', NULL);
SELECT dlock_reserve('', 'regress_dlock_shop');
SELECT dlock_reserve(repeat('x', 256), 'regress_dlock_shop');
SELECT dlock_reserve('x', 4294967295::oid::regrole);
SELECT dlock_unreserve(NULL);
SELECT dlock_unreserve('');
\set VERBOSITY terse
SELECT dlock_unreserve('shop');

-- The longest matching prefix counts, byte by byte.  Every role may use all
-- other names.
SET ROLE regress_dlock_clerk;
SELECT dlock_acquire('shop/orders/1') > 0, dlock_acquire('shop') > 0, dlock_acquire('Shop/1') > 0;
SELECT dlock_acquire('shop/1');
SET ROLE regress_dlock_shop;
SELECT dlock_acquire('shop/1') > 0;
SELECT dlock_acquire('shop/orders/1');
SET ROLE regress_dlock_other;
SELECT dlock_acquire('shop/') IS NULL;

-- Refused: all calls that acquire the lock, guard with it, or use its version
\set VERBOSITY sqlstate
SELECT dlock_try_acquire('shop/1');
SELECT dlock_xact_acquire('shop/1');
SELECT dlock_acquire_all('{free,shop/1}');
CALL dlock_acquire_nosnapshot('shop/1');
SELECT dlock_enqueue('shop/1');
SELECT dlock_ttl_acquire('shop/1', '1h');
SELECT dlock_ttl_enqueue('shop/1', '1h', 'channel');
SELECT dlock_lease_open('1h') AS lease \gset
SELECT dlock_lease_acquire('shop/1', :lease);
SELECT dlock_lease_enqueue('shop/1', :lease, 'channel');
SELECT dlock_lease_acquire_all('{free,shop/1}', :lease);
SELECT dlock_lease_close(:lease);
SELECT dlock_guard('shop/1', 1);
SELECT dlock_version_of('shop/1');
SELECT dlock_version_bump('shop/1', 0);
SELECT dlock_try_version_bump('shop/1', 0);
-- Not refused: queries, and watches
SELECT dlock_fence('shop/1') > 0, dlock_check('shop/1', 1), dlock_is_held('shop/2');
SELECT dlock_watch('shop/1', 'channel'), dlock_unwatch('shop/1');
\set VERBOSITY terse

-- Roles that may reserve
SELECT dlock_reserve('mine/', 'regress_dlock_other');
SELECT dlock_unreserve('shop/');
RESET ROLE;
GRANT EXECUTE ON FUNCTION dlock_reserve(text, regrole), dlock_unreserve(text)
	TO regress_dlock_other, regress_dlock_orders;
SET ROLE regress_dlock_other;
SELECT dlock_reserve('mine/', 'regress_dlock_other');
SELECT dlock_reserve('theirs/', 'regress_dlock_shop');
SELECT dlock_reserve('shop/part/', 'regress_dlock_other');
SELECT dlock_unreserve('shop/');
SELECT dlock_unreserve('mine/');
SET ROLE regress_dlock_clerk;
SELECT dlock_reserve('shop/orders/new/', 'regress_dlock_clerk');
SELECT dlock_unreserve('shop/orders/new/');
RESET ROLE;

-- A reservation is transactional, in a subtransaction, too.
BEGIN;
SELECT dlock_unreserve('shop/');
SAVEPOINT s;
SELECT dlock_reserve('free', 'regress_dlock_shop');
SET LOCAL ROLE regress_dlock_other;
SELECT dlock_xact_acquire('shop/2') > 0;
SAVEPOINT t;
SELECT dlock_xact_acquire('free');
ROLLBACK TO s;
SET LOCAL ROLE regress_dlock_other;
SELECT dlock_xact_acquire('free') > 0;
ROLLBACK;
SET ROLE regress_dlock_other;
SELECT dlock_acquire('shop/2');
RESET ROLE;

-- Another owner, and a superuser
SELECT dlock_reserve('shop/', 'regress_dlock_other');
SET ROLE regress_dlock_other;
SELECT dlock_acquire('shop/2') > 0;
RESET ROLE;
SELECT dlock_acquire('shop/orders/2') > 0;

-- Many reservations
SELECT count(dlock_reserve('many' || n || '/', 'regress_dlock_orders'))
  FROM generate_series(1, 100) AS n;
SET ROLE regress_dlock_other;
SELECT dlock_acquire('many1/x');
SELECT dlock_acquire('many100/x');
SELECT dlock_acquire('many101/x') > 0;
SET ROLE regress_dlock_clerk;
SELECT dlock_acquire('many1/x') > 0, dlock_acquire('many100/x') > 0;
RESET ROLE;
SELECT count(*) FROM generate_series(1, 100) AS n
 WHERE dlock_unreserve('many' || n || '/');

-- Nested and adjacent prefixes, in all combinations.  The expected result
-- comes from SQL, and both results must be frequent.
CREATE FUNCTION lets_in(name text) RETURNS boolean LANGUAGE plpgsql
	SET role = regress_dlock_other AS $$
BEGIN
	RETURN dlock_version_of(name) = 0;
EXCEPTION WHEN insufficient_privilege THEN
	RETURN false;
END $$;
CREATE VIEW judged AS
	WITH RECURSIVE names AS (
		SELECT '' AS name
		UNION ALL
		SELECT name || letter
		  FROM names, unnest(ARRAY['a', 'b', chr(233)]) AS letter
		 WHERE length(name) < 5)
	SELECT name, lets_in(name) AS is_in,
		(SELECT owner = 'regress_dlock_other' FROM dlock_reservations
		  WHERE starts_with(name, prefix)
		  ORDER BY octet_length(prefix) DESC LIMIT 1) AS expected
	  FROM (SELECT name FROM names WHERE name <> ''
			 UNION
			SELECT repeat('x', n) || letter
			  FROM generate_series(0, 254) AS n, unnest(ARRAY['w', 'x', 'y']) AS letter)
		AS names;
INSERT INTO dlock_reservations (prefix, owner)
	SELECT name, CASE ascii(md5(name)) % 3 WHEN 0 THEN 'regress_dlock_other'
		ELSE 'regress_dlock_shop' END
	  FROM (SELECT DISTINCT name FROM judged) AS names
	 WHERE length(name) NOT IN (1, 5) AND ascii(md5(name)) % 3 < 2;
SELECT * FROM judged WHERE is_in <> coalesce(expected, true);
SELECT expected, count(*) FROM judged GROUP BY 1 ORDER BY 1;
DELETE FROM dlock_reservations WHERE prefix !~ '/';
SELECT count(*) FROM judged WHERE NOT is_in;
DROP VIEW judged;
DROP FUNCTION lets_in;

-- Rows written directly, for instance by a dump, count at once.  PostgreSQL
-- generates the role's OID.
INSERT INTO dlock_reservations VALUES ('by hand/', 'regress_dlock_shop');
SET ROLE regress_dlock_other;
SELECT dlock_acquire('by hand/1');
RESET ROLE;
UPDATE dlock_reservations SET owner = 'regress_dlock_other' WHERE prefix = 'by hand/';
SET ROLE regress_dlock_other;
SELECT dlock_acquire('by hand/1') > 0;
RESET ROLE;
COPY dlock_reservations (prefix, owner) FROM stdin;
by copy/	regress_dlock_shop
of nobody/	regress_dlock_missing
\.
SELECT prefix, owner, role = (SELECT oid FROM pg_roles WHERE rolname = owner) AS same, role = 0 AS none
  FROM dlock_reservations ORDER BY prefix;
SET ROLE regress_dlock_other;
SELECT dlock_acquire('by copy/1');
-- a role that does not exist
\set VERBOSITY default
SELECT dlock_acquire('of nobody/1');
\set VERBOSITY terse
RESET ROLE;
DELETE FROM dlock_reservations WHERE prefix = 'by copy/';
SET ROLE regress_dlock_other;
SELECT dlock_acquire('by copy/1') > 0;
RESET ROLE;
SELECT dlock_acquire('of nobody/1') > 0;
BEGIN;
TRUNCATE dlock_reservations;
SET LOCAL ROLE regress_dlock_other;
SELECT dlock_xact_acquire('of nobody/2') > 0;
ROLLBACK;
-- Without triggers, ALTER TABLE invalidates the cached reservations.
SELECT dlock_unreserve('by hand/');
ALTER TABLE dlock_reservations DISABLE TRIGGER ALL;
INSERT INTO dlock_reservations VALUES ('by hand/', 'regress_dlock_shop');
ALTER TABLE dlock_reservations ENABLE TRIGGER ALL;
ALTER TABLE dlock_reservations ENABLE ALWAYS TRIGGER dlock_changed, ENABLE ALWAYS TRIGGER dlock_truncated;
SET ROLE regress_dlock_other;
SELECT dlock_acquire('by hand/2');
RESET ROLE;

-- If a role is dropped, created again, or renamed, no role inherits its names.
CREATE ROLE regress_dlock_gone;
SELECT dlock_reserve('gone/', 'regress_dlock_gone');
GRANT EXECUTE ON FUNCTION dlock_unreserve(text) TO regress_dlock_other;
DROP ROLE regress_dlock_gone;
SET ROLE regress_dlock_other;
\set VERBOSITY default
SELECT dlock_acquire('gone/1');
SELECT dlock_unreserve('gone/');
RESET ROLE;
CREATE ROLE regress_dlock_gone;
SET ROLE regress_dlock_gone;
SELECT dlock_acquire('gone/1');
\set VERBOSITY terse
RESET ROLE;
SELECT dlock_acquire('gone/1') > 0, dlock_release('gone/1');
SELECT dlock_reserve('gone/', 'regress_dlock_gone');
SET ROLE regress_dlock_gone;
SELECT dlock_acquire('gone/1') > 0, dlock_release('gone/1');
RESET ROLE;
ALTER ROLE regress_dlock_gone RENAME TO regress_dlock_renamed;
SET ROLE regress_dlock_renamed;
SELECT dlock_acquire('gone/1');
RESET ROLE;
ALTER ROLE regress_dlock_renamed RENAME TO regress_dlock_gone;
SET ROLE regress_dlock_gone;
SELECT dlock_acquire('gone/1') > 0, dlock_release('gone/1');
RESET ROLE;
SELECT dlock_unreserve('gone/'), dlock_unreserve('of nobody/'), dlock_unreserve('by hand/');
DROP ROLE regress_dlock_gone;

-- An administrator has changed the table.
ALTER TABLE dlock_reservations RENAME owner TO holder;
\set VERBOSITY default
SELECT dlock_acquire('x');
\set VERBOSITY terse
ALTER TABLE dlock_reservations RENAME holder TO owner;
SELECT dlock_acquire('x') > 0;

SELECT dlock_release_all();
SELECT dlock_unreserve('shop/'), dlock_unreserve('shop/orders/'), dlock_unreserve('shop/');
SELECT prefix, owner FROM dlock_reservations;
REVOKE EXECUTE ON FUNCTION dlock_reserve(text, regrole), dlock_unreserve(text)
	FROM regress_dlock_other, regress_dlock_orders;
DROP ROLE regress_dlock_shop, regress_dlock_orders, regress_dlock_clerk, regress_dlock_other;
