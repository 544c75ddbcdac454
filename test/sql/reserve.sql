--
-- Names that are kept for a role
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
SELECT * FROM dlock_reservations ORDER BY prefix;

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

-- The longest prefix counts, byte by byte; the others are free for all.
SET ROLE regress_dlock_clerk;
SELECT dlock_acquire('shop/orders/1') > 0, dlock_acquire('shop') > 0, dlock_acquire('Shop/1') > 0;
SELECT dlock_acquire('shop/1');
SET ROLE regress_dlock_shop;
SELECT dlock_acquire('shop/1') > 0;
SELECT dlock_acquire('shop/orders/1');
SET ROLE regress_dlock_other;
SELECT dlock_acquire('shop/') IS NULL;

-- In all calls that take a lock, guard with it, or ask for its version
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
-- but not in questions
SELECT dlock_fence('shop/1') > 0, dlock_check('shop/1', 1), dlock_is_held('shop/2');
\set VERBOSITY terse

-- Who may reserve
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

-- With the transaction, and for a subtransaction, too
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

-- Many of them
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

SELECT dlock_release_all();
SELECT dlock_unreserve('shop/'), dlock_unreserve('shop/orders/'), dlock_unreserve('shop/');
SELECT * FROM dlock_reservations;
REVOKE EXECUTE ON FUNCTION dlock_reserve(text, regrole), dlock_unreserve(text)
	FROM regress_dlock_other, regress_dlock_orders;
DROP ROLE regress_dlock_shop, regress_dlock_orders, regress_dlock_clerk, regress_dlock_other;
