--
-- Changes of existing tickets and leases
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

--
-- dlock_set_info(): a session's ticket, in either scope
--
SELECT dlock_acquire('a', info => 'before') AS a, dlock_acquire('b') AS b \gset
SELECT dlock_set_info(:a, 'after'), dlock_set_info(id => :b, info => '');
SELECT name, info, depth FROM dlock_locks ORDER BY ticket;
SELECT dlock_set_info(:a, NULL), dlock_set_info(:b, repeat('é', 512));
SELECT name, info IS NULL AS none, length(info), depth FROM dlock_locks ORDER BY ticket;
BEGIN;
SELECT dlock_xact_acquire('c', info => 'before') AS c \gset
SELECT dlock_set_info(:c, 'of the transaction'), dlock_set_info(:a, 'in a transaction');
-- locking is not transactional
SAVEPOINT one;
SELECT dlock_set_info(:c, 'of a subtransaction');
ROLLBACK TO one;
SELECT name, left(info, 20) AS info FROM dlock_locks ORDER BY ticket;
ROLLBACK;
SELECT name, left(info, 20) AS info FROM dlock_locks ORDER BY ticket;

-- a lease, a ticket of this lease, and a ticket with its own lease
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT dlock_lease_acquire('d', :l, info => 'before') AS d, dlock_ttl_acquire('e', '1h') AS e,
	dlock_lease_enqueue('a', :l, channel => 'nobody', owner => 'queued') AS q \gset
SELECT dlock_set_info(:l, 'another lease'), dlock_set_info(:d, 'after'), dlock_set_info(:e, 'its own'),
	dlock_set_info(:q, 'waits');
SELECT name, position, info FROM dlock_locks WHERE scope = 'lease' ORDER BY ticket;
SELECT lease = :l AS same, info FROM dlock_leases ORDER BY lease;
-- the rows of the tables
SELECT name, granted, info, owner FROM dlock_queue ORDER BY ticket;
SELECT info FROM dlock_queue_lease;
SELECT dlock_set_info(:l, NULL), dlock_set_info(:d, NULL), dlock_set_info(:e, ''),
	dlock_set_info(:q, repeat('x', 1024));
SELECT name, info IS NULL AS none, length(info) FROM dlock_queue ORDER BY ticket;
SELECT info IS NULL AS none FROM dlock_queue_lease;

-- a role without the privilege
CREATE ROLE regress_dlock_other;
SET ROLE regress_dlock_other;
SELECT explain_error(format('SELECT dlock_set_info(%s, $$x$$)', id), :l, :d, :e)
  FROM unnest(ARRAY[:l, :d, :e]) AS id;
RESET ROLE;
-- Invalid arguments raise an error.  For a number of no ticket or lease, the
-- call warns and returns false.
SELECT dlock_set_info(NULL, 'x');
SELECT dlock_set_info(:a, repeat('x', 1025));
SELECT dlock_set_info(0, 'x'), dlock_set_info(-1, 'x'), dlock_set_info(9223372036854775807, 'x');
SELECT dlock_release_ticket(:e), dlock_lease_close(:l), dlock_release_all();
SELECT count(*) FROM dlock_locks;

--
-- dlock_renew() with another ttl: a lease, and a ticket's own lease
--
SELECT dlock_lease_open('1h', delay => '1s') AS l, dlock_ttl_acquire('f', '1h', info => 'f') AS f \gset
SELECT dlock_lease_acquire('g', :l) AS g, dlock_lease_enqueue('f', :l, 'nobody') > 0 AS queued \gset
SELECT dlock_renew(:l, '2h'), dlock_renew(id => :f, ttl => '3h');
SELECT lease = :l AS many, ttl, delay, remaining > ttl - interval '1h' AS full, info, held, waiting FROM dlock_leases ORDER BY 1;
SELECT ttl, delay FROM dlock_queue_lease;
SELECT name, ttl, info FROM dlock_queue ORDER BY ticket;
SELECT dlock_renew(:l, '10 min'), dlock_renew(:f, '20 min');
SELECT lease = :l AS many, ttl, remaining BETWEEN '1 min' AND ttl AS full FROM dlock_leases ORDER BY 1;
SELECT ttl FROM dlock_queue_lease;
SELECT name, ttl FROM dlock_queue ORDER BY ticket;
-- A renewal without a ttl keeps the changed one.
SELECT dlock_renew(:l), dlock_renew(:f, NULL), dlock_renew(id => :f);
SELECT lease = :l AS many, ttl, remaining BETWEEN '1 min' AND ttl AS full FROM dlock_leases ORDER BY 1;
-- the same ttl again
SELECT dlock_renew(:l, '10 min'), ttl FROM dlock_leases WHERE lease = :l;
-- a ticket of a shared lease, and an id that never existed
SELECT dlock_renew(:g, '1h'), dlock_renew(0, '1h');
SELECT ttl FROM dlock_leases WHERE lease = :l;
-- an attached lease
SELECT dlock_lease_open('1h', attach => true) AS a \gset
SELECT dlock_renew(:a, '2h');
SELECT ttl, remaining, attached_pid = pg_backend_pid() AS attached FROM dlock_leases WHERE lease = :a;
-- A ttl so short that the lease expires.  If the lease has a delay, the next
-- request is granted after the delay.
SELECT dlock_wait((SELECT ticket FROM dlock_locks WHERE name = 'f' AND lease = :l), '0');
-- dlock_renew() returns NULL if the lease expires before the row is durable.
SELECT coalesce(dlock_renew(:f, '100 ms'), 1);
SELECT dlock_wait((SELECT ticket FROM dlock_locks WHERE name = 'f' AND lease = :l));
SELECT dlock_renew(:f), dlock_renew(:f, '1h'), dlock_is_held('f', :f), dlock_is_held('f', :l);
SELECT coalesce(dlock_renew(:l, '100 ms'), 2);
SELECT dlock_acquire('g') > :g AS later, dlock_release('g');
SELECT dlock_renew(:l, '1h');
-- invalid ttls, and missing privileges
SELECT dlock_renew(:a, '99 ms');
SELECT dlock_renew(:a, '25 h');
SELECT dlock_renew(:a, '1 month');
SELECT dlock_renew(NULL, '1h');
SET ROLE regress_dlock_other;
SELECT explain_error(format('SELECT dlock_renew(%s, $$1h$$)', :a), :a);
RESET ROLE;
SELECT dlock_lease_close(:a);
SELECT count(*) FROM dlock_leases;

--
-- dlock_downgrade(): an exclusive hold becomes shared, no matter how often it
-- was acquired.
--
SELECT dlock_acquire('h') AS h, dlock_acquire('h') > 0 AS again \gset
BEGIN;
SELECT dlock_xact_acquire('h') = :h AS same, dlock_guard('h', :h);
SAVEPOINT one;
SELECT dlock_downgrade(:h);
-- Locking is not transactional.  A guard depends on the fence alone.
ROLLBACK TO one;
SELECT name, mode, granted, depth, ticket = :h AS same FROM dlock_locks;
SELECT dlock_downgrade(ticket => :h), dlock_fence('h') = :h AS fence, dlock_check('h', :h), dlock_is_held('h');
COMMIT;
SELECT mode, depth, scope FROM dlock_locks;
-- An upgrade is refused.  A shared request returns the same ticket.
SELECT dlock_acquire('h');
BEGIN;
SELECT dlock_xact_acquire('h');
ROLLBACK;
SELECT dlock_acquire('h', shared => true) = :h AS same, depth FROM dlock_locks;
SELECT dlock_release('h'), dlock_release('h'), dlock_release('h'), dlock_is_held('h');
SELECT dlock_acquire('h') > :h AS later, dlock_release('h');
-- a transaction-scoped hold, which ends with the transaction
BEGIN;
SELECT dlock_xact_acquire('h') AS h \gset
SELECT dlock_downgrade(:h), mode FROM dlock_locks;
COMMIT;
SELECT count(*) FROM dlock_locks;
-- an enqueue after the downgrade; a hold that is shared already
SELECT dlock_acquire('h') AS h, dlock_acquire('s', shared => true) AS s, dlock_acquire('p', slots => 2) AS p \gset
SELECT dlock_downgrade(:h), dlock_enqueue('h', 'nobody', shared => true) = :h AS same, dlock_downgrade(:s);
SELECT name, mode, depth FROM dlock_locks ORDER BY ticket;
SELECT dlock_release_all();

-- a lease's hold: the row changes, too
SELECT dlock_lease_open('1h') AS l, dlock_ttl_acquire('i', '1h', owner => 'me') AS i \gset
SELECT dlock_lease_acquire('h', :l) AS h, dlock_lease_enqueue('i', :l, 'nobody') AS w,
	dlock_lease_acquire('p', :l, slots => 2) AS p \gset
SELECT dlock_downgrade(:h), dlock_downgrade(:i), dlock_downgrade(:h);
SELECT name, mode, granted FROM dlock_locks ORDER BY ticket;
SELECT name, mode, granted FROM dlock_queue ORDER BY ticket;
SELECT dlock_check('h', :h), dlock_fence('i') = :i AS fence, dlock_is_held('h', :l),
	dlock_acquire('h', shared => true) > :h AS beside, dlock_fence('h') > :h AS greater, dlock_check('h', :h);
SELECT dlock_lease_acquire('h', :l, shared => true) = :h AS same,
	dlock_ttl_acquire('i', '1h', shared => true, owner => 'me') = :i AS same;
SELECT dlock_lease_acquire('h', :l);
SELECT dlock_ttl_acquire('i', '1h', owner => 'me');
BEGIN;
SELECT dlock_guard('h', :h);
COMMIT;

-- refused: a ticket that waits, has ended, is unknown, has permits, or belongs
-- to another role
\set VERBOSITY terse
SELECT dlock_downgrade(0), dlock_downgrade(-1), dlock_downgrade(NULL);
SELECT dlock_downgrade(9223372036854775807);
\set VERBOSITY default
SET client_min_messages = error;
SELECT dlock_downgrade(:w) AS waits, dlock_downgrade(:l) AS lease;
RESET client_min_messages;
SELECT explain_error(format('SELECT dlock_downgrade(%s)', :p), :p);
SELECT dlock_acquire('q', slots => 2) AS q \gset
SELECT explain_error(format('SELECT dlock_downgrade(%s)', :q), :q);
SET ROLE regress_dlock_other;
SELECT explain_error(format('SELECT dlock_downgrade(%s)', :h), :l);
RESET ROLE;
SELECT dlock_lease_close(:l), dlock_release_ticket(:i), dlock_release_all();
SET client_min_messages = error;
SELECT dlock_downgrade(:h), dlock_downgrade(:i), dlock_downgrade(:q);
RESET client_min_messages;
DROP ROLE regress_dlock_other;

--
-- Durability: a lease has the highest synchronous_commit of all calls that
-- rely on it.  The view "durable" shows the values in the rows after a call
-- has returned.
--
SET synchronous_commit = off;
SELECT dlock_acquire('busy') AS busy, dlock_lease_open('1h') AS l \gset
SELECT dlock_ttl_enqueue('busy', '1h', 'nobody', owner => 'me') AS w,
	dlock_ttl_acquire('own', '1h', owner => 'me') AS o \gset
CREATE TEMPORARY VIEW durable AS
	SELECT name, durability FROM dlock_queue
	UNION ALL SELECT 'lease', durability FROM dlock_queue_lease ORDER BY name;
SELECT * FROM durable;

-- a ticket's own lease: enqueued and acquired again, at each level
SET synchronous_commit = local;
SELECT dlock_ttl_enqueue('busy', '1h', 'another', owner => 'me') = :w AS same,
	dlock_ttl_acquire('own', '1h', owner => 'me') = :o AS same;
SELECT * FROM durable;
SET synchronous_commit = off;
SELECT dlock_ttl_enqueue('busy', '1h', 'nobody', owner => 'me') = :w AS same,
	dlock_ttl_enqueue('own', '1h', 'nobody', owner => 'me') = :o AS same,
	dlock_renew(:o, '2h'), dlock_set_info(:o, 'own');
SELECT * FROM durable;
-- A new ttl raises the durability.  A new info does not, and neither does a
-- wait for a ticket that is already held.
SET synchronous_commit = remote_write;
SELECT dlock_set_info(:w, 'waits'), dlock_wait(:o);
SELECT * FROM durable;
SET synchronous_commit = on;
SELECT dlock_renew(:w, '2h'), dlock_renew(:o, '1h');
SELECT * FROM durable;
SET synchronous_commit = off;
SELECT dlock_release('busy'), dlock_wait(:w);
SELECT * FROM durable;
SELECT dlock_release_ticket(:w), dlock_release_ticket(:o);

-- a lease of several tickets: each acquire or enqueue with the lease can raise
-- the durability
SELECT dlock_lease_acquire('a', :l) AS a \gset
SET synchronous_commit = local;
SELECT dlock_lease_acquire('a', :l) = :a AS same;
SELECT name, durability FROM durable WHERE name = 'lease';
SET synchronous_commit = remote_write;
SELECT dlock_lease_enqueue('b', :l, 'nobody') > :a AS more;
SELECT name, durability FROM durable WHERE name = 'lease';
SET synchronous_commit = on;
SELECT array_length(dlock_lease_acquire_all('{a, c}', :l), 1);
SELECT name, durability FROM durable WHERE name = 'lease';
SET synchronous_commit = remote_apply;
SELECT dlock_set_info(:l, 'lease');
SELECT name, durability FROM durable WHERE name = 'lease';
SET synchronous_commit = off;
SELECT dlock_lease_acquire('d', :l) > :a AS more, dlock_renew(:l, '2h');
SELECT name, durability FROM durable WHERE name IN ('d', 'lease');
SELECT dlock_lease_close(:l);
RESET synchronous_commit;
DROP VIEW durable;
