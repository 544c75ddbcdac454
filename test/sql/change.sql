--
-- Changing tickets and leases that are there
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

--
-- Info: of a session's ticket, held or waiting, in either scope
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

-- of a lease, of a ticket that one has, and of one with a lease of its own
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT dlock_lease_acquire('d', :l, info => 'before') AS d, dlock_ttl_acquire('e', '1h') AS e,
	dlock_lease_enqueue('a', :l, channel => 'nobody', owner => 'queued') AS q \gset
SELECT dlock_set_info(:l, 'another lease'), dlock_set_info(:d, 'after'), dlock_set_info(:e, 'its own'),
	dlock_set_info(:q, 'waits');
SELECT name, position, info FROM dlock_locks WHERE scope = 'lease' ORDER BY ticket;
SELECT lease = :l AS same, info FROM dlock_leases ORDER BY lease;
-- what is durable
SELECT name, granted, info, owner FROM dlock_queue ORDER BY ticket;
SELECT info FROM dlock_queue_lease;
SELECT dlock_set_info(:l, NULL), dlock_set_info(:d, NULL), dlock_set_info(:e, ''),
	dlock_set_info(:q, repeat('x', 1024));
SELECT name, info IS NULL AS none, length(info) FROM dlock_queue ORDER BY ticket;
SELECT info IS NULL AS none FROM dlock_queue_lease;

-- not by a role that has no right to it
CREATE ROLE regress_dlock_other;
SET ROLE regress_dlock_other;
SELECT explain_error(format('SELECT dlock_set_info(%s, $$x$$)', id), :l, :d, :e)
  FROM unnest(ARRAY[:l, :d, :e]) AS id;
RESET ROLE;
-- another session's, see isolation_change; bad arguments; what is gone
SELECT dlock_set_info(NULL, 'x');
SELECT dlock_set_info(:a, repeat('x', 1025));
SELECT dlock_set_info(0, 'x'), dlock_set_info(-1, 'x'), dlock_set_info(9223372036854775807, 'x');
SELECT dlock_release_ticket(:e), dlock_lease_close(:l), dlock_release_all();
SELECT count(*) FROM dlock_locks;
DROP ROLE regress_dlock_other;
