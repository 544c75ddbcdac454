--
-- Leases: locks that outlive their session
--
-- No session listens on "nobody", see tickets.sql.  The worker grants a
-- lease's lock some time after its release.  Therefore the test waits for the
-- grant after a release, or uses another name.
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

-- what leases hold and wait for, identified by owner and info
CREATE VIEW lease_tickets AS
SELECT q.name, q.mode, q.slots, q.permits, q.granted, q.position, q.scope,
	q.pid IS NULL AS no_pid, q.lease = q.ticket AS own_lease, l.info AS lease,
	q.owner, q.info, q.channel, q.depth, q.pinned
  FROM dlock_locks q LEFT JOIN dlock_leases l USING (lease)
 WHERE q.scope = 'lease' ORDER BY q.ticket;

-- Wait until each row of the tables is in the views.
CREATE FUNCTION await_tables() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	WHILE EXISTS (SELECT FROM dlock_queue AS q WHERE NOT EXISTS
					(SELECT FROM dlock_locks AS l WHERE l.ticket = q.ticket)) OR
		EXISTS (SELECT FROM dlock_queue_lease AS q WHERE NOT EXISTS
					(SELECT FROM dlock_leases AS l WHERE l.lease = q.lease)) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
END $$;

-- Wait until a lease, or a ticket's own lease, has expired.
CREATE FUNCTION await_expiry(id bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	WHILE EXISTS (SELECT FROM dlock_leases WHERE lease = id) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
END $$;

--
-- A lease: open, renew, close
--
SELECT dlock_lease_open('1h') AS l \gset
SELECT lease = :l AS same, ttl, delay, remaining BETWEEN '1s' AND '1h' AS remaining,
	attached_pid, role = current_user AS role, info,
	opened_at <= renewed_at AND renewed_at <= clock_timestamp() AS times, held, waiting
  FROM dlock_leases;
SELECT renewed_at AS before FROM dlock_leases \gset
SELECT dlock_renew(:l);
SELECT renewed_at > :'before' AS renewed, remaining BETWEEN '1s' AND '1h' AS remaining
  FROM dlock_leases;
-- the rows of the table
SELECT lease = :l AS same, ttl, delay, delayed, info,
	role = quote_ident(current_user)::regrole AS role, role_name = current_user AS name,
	durability
  FROM dlock_queue_lease;
SELECT dlock_lease_close(:l);
SELECT count(*) FROM dlock_leases;

--
-- dlock_is_held() with a lease: false if the ticket waits, or has ended
--
SELECT dlock_lease_open('1h') AS l, dlock_lease_open('1h') AS m \gset
SELECT dlock_lease_acquire('is held', :l) > 0, dlock_lease_acquire('is shared', :l, shared => true) > 0,
	dlock_lease_acquire('is shared', :m, shared => true) > 0,
	dlock_lease_acquire('has permits', :m, slots => 3, permits => 2) > 0,
	dlock_lease_enqueue('is held', :m, channel => 'nobody') > 0;
SELECT dlock_ttl_acquire('is its own', '1h') AS t \gset
SELECT dlock_is_held('is held', :l), dlock_is_held('is held', lease => :m) AS waits,
	dlock_is_held('is shared', :l), dlock_is_held('is shared', :m),
	dlock_is_held('has permits', :l) AS another, dlock_is_held('has permits', :m),
	dlock_is_held('is its own', :t);
SELECT dlock_is_held('is held') AS session, dlock_is_held('is held', NULL) AS session,
	dlock_is_held('is held', 0) AS zero, dlock_is_held('is held', -1) AS minus,
	dlock_is_held('nobody has this', :l);
SELECT dlock_acquire('of the session') > 0;
SELECT dlock_is_held('of the session', :l), dlock_is_held('of the session', 0),
	dlock_is_held('of the session', NULL);
SELECT dlock_release_all();
SELECT dlock_lease_close(:l), dlock_release_ticket(:t);
SELECT dlock_is_held('is held', :l), dlock_is_held('is shared', :l), dlock_is_held('is its own', :t);
SELECT dlock_wait(ticket), dlock_is_held('is held', :m) FROM dlock_locks WHERE name = 'is held' AND lease = :m;
SELECT dlock_lease_close(:m);
SELECT dlock_renew(:l) IS NULL AS gone;
\set VERBOSITY sqlstate
SELECT dlock_lease_close(:l) IS NULL AS gone;
\set VERBOSITY default
SELECT dlock_lease_close(1);
SELECT dlock_renew(1), dlock_renew(0), dlock_renew(-1);

-- all arguments, by position and by name
SELECT dlock_lease_open('90 s', true, '1 min', 'me') AS l \gset
SELECT dlock_lease_open(ttl => '1 day', attach => false, delay => '100 ms', info => '') AS l2 \gset
SELECT dlock_lease_open(ttl => '100 ms', attach => true) AS l3 \gset
SELECT :l < :l2 AND :l2 < :l3 AS grows;
SELECT ttl, delay, remaining IS NULL AS forever, attached_pid = pg_backend_pid() AS attached,
	info FROM dlock_leases ORDER BY lease;
-- an attached lease can be renewed and closed
SELECT dlock_renew(:l), dlock_renew(:l3), dlock_lease_close(:l3);
SELECT dlock_renew(:l3), dlock_lease_close(:l), dlock_lease_close(:l2);

-- The longest and the shortest ttl
SELECT dlock_lease_open('24 hours', delay => '24 hours') AS l \gset
SELECT dlock_lease_close(:l);
SELECT dlock_lease_open('1 day -1 hour') AS l \gset
SELECT ttl, dlock_lease_close(lease) FROM dlock_leases;
-- The ttl of an attached lease begins at the end of its session.  Until then,
-- the lease does not expire, even with the shortest ttl.
SELECT dlock_lease_open('100 ms', true) AS l \gset
SELECT dlock_lease_acquire('a', :l) AS a, dlock_lease_enqueue('a', :l, 'nobody', owner => 'me') AS a2 \gset
\c -
SELECT await_expiry(:l);
SELECT dlock_renew(:l), dlock_check('a', :a), dlock_fence('a');
SELECT error_of(format('dlock_lease_acquire(%L, %s)', 'a', :l)),
	error_of(format('dlock_wait(%s)', :a)), error_of(format('dlock_wait(%s)', :a2)),
	error_of(format('dlock_guard(%L, %s)', 'a', :a)) \gx
SELECT dlock_try_acquire('a') > :a2 AS greater, dlock_release('a');

--
-- A lock with a lease
--
SELECT dlock_lease_open('1h', info => 'lease') AS l,
	dlock_lease_open('1h', info => 'other') AS l2 \gset
SELECT dlock_lease_acquire('a', :l) AS a \gset
SELECT * FROM lease_tickets;
SELECT held, waiting, dlock_renew(lease) FROM dlock_leases ORDER BY lease;
SELECT dlock_fence('a') = :a AS fence, dlock_check('a', :a), dlock_check('a', :a + 1),
	dlock_is_held('a');
SELECT ticket = :a AS ticket, lease = :l AS lease, role = current_user AS role,
	enqueued_at <= granted_at AND granted_at <= clock_timestamp() AS times,
	remaining BETWEEN '1s' AND '1h' AS remaining, blocked_by
  FROM dlock_locks;
-- the rows of the table
SELECT ticket = :a AS ticket, name, lease = :l AS lease, granted, mode, slots,
	permits, owner, info, channel, role_name = current_user AS name,
	granted_at >= enqueued_at AS times, ttl, durability
  FROM dlock_queue;

-- The lock belongs neither to this session nor to another lease.
\set VERBOSITY sqlstate
SELECT dlock_release('a');
\set VERBOSITY default
SELECT dlock_release_all();
SELECT dlock_try_acquire('a'), dlock_try_lease_acquire('a', :l2),
	dlock_try_ttl_acquire('a', '1h');
\set VERBOSITY sqlstate
SELECT dlock_acquire('a', '0');
SELECT dlock_acquire('a', '10ms');
\set VERBOSITY default
-- A wait for another lease is no deadlock, because the other lease can be
-- closed at any time.
SELECT dlock_lease_acquire('a', :l2, '10ms');
\echo :SQLSTATE
SELECT dlock_lease_acquire('a', :l2, timeout => '0');
\echo :SQLSTATE
SELECT dlock_ttl_acquire('a', '1h', '1.5ms');
\echo :SQLSTATE
SELECT dlock_lease_acquire_all('{b,a}', :l2, '1ms');
\echo :SQLSTATE
SELECT dlock_try_lease_acquire('a', :l2, '1ms'), dlock_try_ttl_acquire('a', '1h', '1ms'),
	dlock_try_lease_acquire_all('{b,a}', :l2), dlock_try_lease_acquire_all('{b,a}', :l2, '1ms');
BEGIN;
SELECT dlock_try_lease_acquire_all('{0,a}', :l2), dlock_is_held('0', :l2);
SELECT dlock_is_held('0', :l2);
COMMIT;
SELECT * FROM lease_tickets;

-- Acquiring again returns the same ticket, and does not count.
SELECT dlock_lease_acquire('a', :l) = :a AS same, dlock_lease_acquire('a', :l, '0') = :a AS same,
	dlock_try_lease_acquire('a', :l) = :a AS same,
	dlock_lease_acquire('a', :l, shared => true) = :a AS same,
	dlock_lease_enqueue('a', :l, 'nobody') = :a AS same,
	dlock_wait(:a), dlock_wait(:a, '0');
SELECT name, mode, granted, channel, depth FROM lease_tickets;
-- another owner gets no share of the hold; NULL is an owner, too
SELECT dlock_try_lease_acquire('a', :l, owner => 'me');
SELECT dlock_lease_acquire('b', :l, owner => 'me') AS b \gset
SELECT dlock_lease_acquire('b', :l, owner => 'me') = :b AS same,
	dlock_try_lease_acquire('b', :l, owner => 'you'),
	dlock_try_lease_acquire('b', :l), dlock_try_lease_acquire('b', :l, owner => ''),
	dlock_try_lease_acquire('b', :l2, owner => 'me');
SELECT dlock_release_ticket(:a), dlock_release_ticket(:b);
\set VERBOSITY sqlstate
SELECT dlock_release_ticket(:a);
\set VERBOSITY default
SELECT dlock_check('a', :a), dlock_fence('a');
SELECT * FROM lease_tickets;
SELECT await_tables();
SELECT count(*) FROM dlock_queue;
SELECT dlock_release_ticket(1);

-- any session or lease can acquire a released lock, even without waiting
SELECT dlock_lease_acquire('a', :l) AS a \gset
SELECT dlock_release_ticket(:a), dlock_try_acquire('a') > :a AS greater;
SELECT dlock_release('a');
SELECT dlock_try_lease_acquire('a', :l2) > :a AS greater;
SELECT dlock_try_lease_acquire('a', :l);
SELECT dlock_lease_close(:l2);
SELECT dlock_try_lease_acquire('a', :l) > :a AS greater;
SELECT dlock_lease_close(:l);

--
-- A ttl for one ticket
--
SELECT dlock_ttl_acquire('a', '1h') AS a \gset
SELECT dlock_try_ttl_acquire('b', ttl => '2h', timeout => '1s', shared => true, slots => NULL,
	permits => 1, owner => 'me', info => 'my info') AS b \gset
SELECT * FROM lease_tickets;
SELECT lease IN (:a, :b) AS own, ttl, delay, attached_pid, info, held, waiting
  FROM dlock_leases ORDER BY lease;
SELECT ticket = lease AS own, ttl, granted, owner, info FROM dlock_queue ORDER BY ticket;
SELECT count(*) FROM dlock_queue_lease;
SELECT dlock_renew(:a), dlock_renew(:b);
-- acquiring again returns the same ticket only if both calls give the same
-- owner
SELECT dlock_try_ttl_acquire('a', '1h');
SELECT dlock_try_ttl_acquire('b', '1h', owner => 'me');
\echo :SQLSTATE
SELECT dlock_ttl_acquire('b', '1h', shared => true, owner => 'me') = :b AS same,
	dlock_ttl_enqueue('b', '1h', 'nobody', shared => true, owner => 'me') = :b AS same;
SELECT dlock_ttl_acquire('b', '1h', shared => true) > :b AS another,
	dlock_ttl_acquire('b', '1h', shared => true) > :b AS another,
	dlock_ttl_acquire('b', '1h', shared => true, owner => 'you') > :b AS another;
SELECT name, mode, owner, channel FROM lease_tickets;
-- the ttl is unchanged
SELECT ttl FROM dlock_leases WHERE lease = :b;
-- A ticket's own lease can be closed like any lease.
SELECT dlock_lease_close(lease) FROM dlock_leases WHERE lease > :b;
SELECT dlock_lease_close(:b), dlock_release_ticket(:a);
SELECT dlock_renew(:a), dlock_renew(:b);
SELECT * FROM lease_tickets;

-- the ttl expires
SELECT dlock_ttl_acquire('a', '2s') AS a \gset
SELECT await_expiry(:a);
SELECT dlock_check('a', :a), dlock_fence('a'), dlock_renew(:a);
\set VERBOSITY sqlstate
SELECT dlock_release_ticket(:a);
SELECT dlock_wait(:a);
\set VERBOSITY default
SELECT dlock_try_acquire('a') > :a AS greater;
SELECT dlock_release('a');

--
-- Several locks at once
--
SELECT dlock_lease_open('1h', info => 'lease') AS l,
	dlock_lease_open('1h', info => 'other') AS l2 \gset
SELECT dlock_lease_acquire('b', :l) AS b \gset
SELECT dlock_lease_acquire_all('{c,b,a,c}', :l, info => 'all') AS all \gset
SELECT dlock_fence('c') = all_[1] AND dlock_fence('b') = all_[2] AND
	dlock_fence('a') = all_[3] AND all_[4] = all_[1] AS fences, all_[2] = :b AS same
  FROM (SELECT :'all'::bigint[] AS all_) AS x;
SELECT name, position, info FROM lease_tickets ORDER BY name;
-- if one lock is busy, the call acquires none, and earlier tickets stay
SELECT dlock_release_ticket(dlock_fence('a'));
SELECT dlock_lease_acquire('d', :l2) > 0, dlock_lease_acquire('a', :l2) > 0;
SELECT dlock_try_lease_acquire_all('{b,d,e}', :l), dlock_try_lease_acquire_all('{0,d}', :l);
SELECT name, lease, position FROM lease_tickets ORDER BY name;
SELECT dlock_lease_close(:l2);
SELECT dlock_lease_acquire_all('{b,d,e}', :l, '1min') > '{0}', dlock_renew(:l);
SELECT dlock_lease_acquire_all('{}', :l), dlock_try_lease_acquire_all('{}', :l);
SELECT dlock_lease_close(:l);
-- shared
SELECT dlock_lease_open('1h', info => 'lease') AS l,
	dlock_lease_open('1h', info => 'other') AS l2 \gset
SELECT dlock_lease_acquire_all('{g,f}', :l, shared => true) > '{0}',
	dlock_try_lease_acquire_all('{f,g}', :l2, shared => true) > '{0}',
	dlock_try_lease_acquire_all('{f,g}', :l2, NULL, true, 'info') > '{0}';
SELECT name, mode, lease, info FROM lease_tickets;
SELECT dlock_lease_close(:l), dlock_lease_close(:l2);

--
-- Modes
--
SELECT dlock_lease_open('1h', info => 'lease') AS l,
	dlock_lease_open('1h', info => 'other') AS l2 \gset
SELECT dlock_lease_acquire('r', :l, NULL, true, NULL, 1, 'owner', 'info') AS r,
	dlock_lease_acquire('r', :l2, shared => true) AS r2 \gset
SELECT :r < :r2 AS grows, dlock_fence('r') = :r2 AS fence, dlock_check('r', :r),
	dlock_acquire('r', shared => true) > :r2 AS beside, dlock_release('r'),
	dlock_try_acquire('r');
SELECT * FROM lease_tickets;
-- an upgrade is refused
SELECT dlock_lease_acquire('r', :l2);
\echo :SQLSTATE
SELECT error_of(format('dlock_lease_acquire(%L, %s, owner => %L)', 'r', :l, 'owner')),
	error_of(format('dlock_try_lease_acquire(%L, %s)', 'r', :l2)),
	error_of(format('dlock_lease_acquire_all(%L, %s)', '{r}', :l2)),
	error_of(format('dlock_lease_enqueue(%L, %s, %L)', 'r', :l2, 'nobody')) \gx
-- a request of another owner waits
SELECT dlock_lease_acquire('r', :l, '1ms', owner => 'x');
SELECT dlock_release_ticket(:r), dlock_release_ticket(:r2);
-- slots
SELECT dlock_lease_acquire('s', :l, slots => 4, permits => 2) AS s1,
	dlock_lease_acquire('s', :l, slots => 4, owner => 'me') AS s2,
	dlock_ttl_acquire('s', '1h', slots => 4) AS s3 \gset
SELECT dlock_try_lease_acquire('s', :l2, slots => 4), dlock_try_acquire('s', slots => 4);
SELECT name, mode, slots, permits, position, lease, owner FROM lease_tickets;
SELECT dlock_release_ticket(:s1);
SELECT dlock_lease_acquire('s', :l2, '1min', slots => 4, permits => 2) > :s3 AS granted;
-- another number of slots is refused, for every owner
SELECT dlock_lease_acquire('s', :l2, slots => 3, owner => 'x');
\echo :SQLSTATE
SELECT error_of(format('dlock_try_lease_acquire(%L, %s)', 's', :l)),
	error_of(format('dlock_ttl_acquire(%L, %L, slots => 5)', 's', '1h')),
	error_of(format('dlock_lease_enqueue(%L, %s, %L, true)', 's', :l, 'nobody')),
	error_of(format('dlock_lease_acquire_all(%L, %s)', '{s}', :l)),
	error_of(format('dlock_acquire(%L)', 's')) \gx
-- also for the lease that holds permits
SELECT error_of(format('dlock_lease_acquire(%L, %s, slots => 3)', 's', :l2)),
	error_of(format('dlock_lease_acquire(%L, %s)', 's', :l2)) \gx
SELECT dlock_lease_close(:l), dlock_lease_close(:l2), dlock_lease_close(:s3);

--
-- A place in the queue that survives a restart
--
SELECT dlock_lease_open('1h', info => 'lease') AS l,
	dlock_lease_open('1h', info => 'other') AS l2 \gset
SELECT dlock_lease_enqueue('q', :l, 'nobody') AS q1 \gset
SELECT dlock_lease_enqueue('q', :l, 'nobody', false, NULL, 1, 'me', 'my info') AS q2,
	dlock_lease_enqueue('q', :l2, 'nobody', shared => true) AS q3,
	dlock_ttl_enqueue('q', '1h', 'somebody', true, NULL, 1, 'you', 'your info') AS q4 \gset
SELECT :q1 < :q2 AND :q2 < :q3 AND :q3 < :q4 AS grows;
SELECT * FROM lease_tickets;
SELECT held, waiting, dlock_renew(lease) FROM dlock_leases ORDER BY lease;
SELECT position, array_length(blocked_by, 1) AS blockers, granted_at IS NULL AS waits,
	remaining BETWEEN '1s' AND '1h' AS remaining FROM dlock_locks ORDER BY ticket;
SELECT granted, lease = ticket AS own, owner, info, channel, granted_at IS NULL AS waits, ttl
  FROM dlock_queue ORDER BY ticket;
SELECT dlock_wait(:q1), dlock_wait(:q2, '0'), dlock_wait(:q3, '1ms'), dlock_wait(:q4, '0');
SELECT dlock_check('q', :q1), dlock_check('q', :q2), dlock_fence('q') = :q1 AS fence;
-- acquiring again, while the ticket waits
SELECT dlock_lease_enqueue('q', :l, 'somebody', owner => 'me') = :q2 AS same,
	dlock_try_lease_acquire('q', :l, owner => 'me'),
	dlock_try_lease_acquire('q', :l2, '1ms', shared => true);
SELECT name, position, channel FROM lease_tickets;
-- when a queued ticket leaves, the tickets behind it move up
SELECT dlock_release_ticket(:q2);
SELECT name, position, owner FROM lease_tickets;
SELECT dlock_release_ticket(:q1), dlock_wait(:q3), dlock_wait(:q4, '1min');
SELECT name, granted, position, owner FROM lease_tickets;
-- acquiring a held lock again does not count as a wait
SELECT waited FROM dlock_stats \gset
SELECT dlock_lease_acquire('q', :l2, shared => true) = :q3 AS same;
SELECT waited = :waited AS no_wait FROM dlock_stats;
SELECT granted, owner, granted_at > enqueued_at AS times
  FROM dlock_queue WHERE ticket IN (:q3, :q4) ORDER BY ticket;
-- a waiting ticket ends with its lease
SELECT dlock_lease_enqueue('q', :l, 'nobody') AS q5 \gset
SELECT dlock_lease_close(:l);
SELECT explain_error(format('SELECT dlock_wait(%s)', :q5), :q5);
SELECT dlock_lease_close(:l2), dlock_release_ticket(:q4);
-- or with its ttl
SELECT dlock_acquire('q') > 0;
SELECT dlock_ttl_enqueue('q', '2s', 'nobody') AS q \gset
SELECT await_expiry(:q);
SELECT error_of(format('dlock_wait(%s, %L)', :q, '0'));
SELECT dlock_release('q');

-- Waiting behind this session's own ticket is a deadlock, detected at once.
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT dlock_acquire('q') > 0;
\set VERBOSITY terse
SELECT dlock_lease_acquire('q', :l, '1h');
\set VERBOSITY default
\echo :SQLSTATE
SELECT error_of(format('dlock_lease_acquire(%L, %s)', 'q', :l)),
	error_of(format('dlock_ttl_acquire(%L, %L)', 'q', '1h')),
	error_of(format('dlock_lease_acquire_all(%L, %s)', '{o,q}', :l)),
	error_of(format('dlock_try_lease_acquire(%L, %s, %L)', 'q', :l, '1s')) \gx
SELECT explain_error(format('SELECT dlock_lease_acquire(%L, %s)', 'q', :l));
SELECT dlock_try_lease_acquire('q', :l);
SELECT * FROM lease_tickets;
-- with a ticket in the queue
SELECT dlock_lease_enqueue('q', :l, 'nobody') AS q \gset
SELECT error_of(format('dlock_wait(%s)', :q)),
	error_of(format('dlock_lease_acquire(%L, %s)', 'q', :l)) \gx
SELECT dlock_wait(:q, '0'), dlock_try_lease_acquire('q', :l);
SELECT dlock_release('q');
SELECT dlock_lease_acquire('q', :l) = :q AS same, dlock_wait(:q);
SELECT dlock_lease_close(:l);

-- The session's own channel, with LISTEN
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT dlock_acquire('q') > 0;
SELECT dlock_channel() AS own \gset
UNLISTEN *;
SELECT dlock_lease_enqueue('q', :l) AS q \gset
SELECT position, channel = :'own' AS own FROM lease_tickets;
SELECT pg_listening_channels() = :'own' AS listens;
UNLISTEN *;
SELECT dlock_wait(:q, '0');
SELECT pg_listening_channels() = :'own' AS listens;
UNLISTEN *;
SELECT dlock_lease_close(:l), dlock_release('q');

--
-- Locking is not transactional
--
BEGIN;
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT dlock_lease_acquire('a', :l) AS a \gset
SAVEPOINT one;
SELECT dlock_lease_enqueue('b', :l, 'nobody') AS b \gset
ROLLBACK TO one;
SELECT dlock_ttl_acquire('c', '1h') AS c \gset
ROLLBACK;
SELECT name, position, lease, channel FROM lease_tickets;
SELECT dlock_renew(:l), dlock_check('a', :a), dlock_wait(:b, '0');
BEGIN;
SELECT dlock_release_ticket(:a), dlock_lease_close(:c);
ROLLBACK;
SELECT name, position FROM lease_tickets;
BEGIN READ ONLY;
SELECT dlock_lease_open('1h', info => 'another') AS l2 \gset
SELECT dlock_lease_acquire('d', :l2) > 0, dlock_renew(:l2), dlock_lease_close(:l2);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT dlock_ttl_acquire('d', '1h', '1min') AS d \gset
COMMIT;
SELECT dlock_release_ticket(:d);

-- dlock_release_at_commit() ends a lease's ticket, one acquire at a time
BEGIN;
SELECT dlock_release_at_commit(:b);
ROLLBACK;
SELECT name, position FROM lease_tickets;
BEGIN;
SELECT dlock_release_at_commit(:b), dlock_release_at_commit(:b);
SELECT dlock_check('b', :b);
SAVEPOINT one;
SELECT dlock_ttl_acquire('e', '1h') AS e \gset
SELECT dlock_release_at_commit(:e);
ROLLBACK TO one;
COMMIT;
SELECT name, position FROM lease_tickets;
-- a waiting ticket, and a ticket that ends before the commit
SELECT dlock_ttl_enqueue('e', '1h', 'nobody') AS e2 \gset
BEGIN;
SELECT dlock_release_at_commit(:e), dlock_release_at_commit(:e2);
SELECT dlock_release_ticket(:e);
COMMIT;
SELECT name, position FROM lease_tickets;
SELECT error_of(format('dlock_release_at_commit(%s)', :e));
SELECT dlock_release_at_commit(1);
\echo :SQLSTATE

-- DISCARD ALL detaches leases, so the ttl begins to run.
SELECT dlock_lease_open('1h', attach => true, info => 'attached') AS l2,
	dlock_lease_acquire('a', :l) AS a, dlock_acquire('x') AS x \gset
SELECT dlock_lease_acquire('f', :l2) > 0, dlock_lease_enqueue('a', :l2, 'nobody') > 0;
SELECT dlock_release_all();
DISCARD ALL;
SELECT name, position, lease FROM lease_tickets;
SELECT info, attached_pid = pg_backend_pid() AS attached FROM dlock_leases ORDER BY lease;

-- A ticket's own lease cannot hold another lock.
SELECT dlock_ttl_acquire('own', '1h') AS own \gset
DO $$
BEGIN
	PERFORM dlock_lease_acquire('other', (SELECT lease FROM dlock_locks WHERE name = 'own'));
EXCEPTION WHEN object_not_in_prerequisite_state THEN
	RAISE NOTICE '%', regexp_replace(SQLERRM, '\d+', 'N');
END $$;
SELECT dlock_renew(:own), dlock_lease_close(:own);

-- PREPARE TRANSACTION is refused if dlock must act at the transaction's end.
\set VERBOSITY sqlstate
BEGIN;
SELECT dlock_release_at_commit(dlock_fence('a'));
PREPARE TRANSACTION 'regress_dlock';
BEGIN;
SELECT dlock_ttl_enqueue('p', '1h', 'nobody') AS p \gset
PREPARE TRANSACTION 'regress_dlock';
BEGIN;
SELECT dlock_guard('a', dlock_fence('a'));
PREPARE TRANSACTION 'regress_dlock';
\set VERBOSITY default
SELECT dlock_release_ticket(:p), dlock_check('a', dlock_fence('a'));
-- not refused, because dlock has nothing left to do
BEGIN;
SELECT dlock_lease_acquire('p', :l) > 0;
PREPARE TRANSACTION 'regress_dlock';
ROLLBACK PREPARED 'regress_dlock';
SELECT name FROM lease_tickets WHERE name = 'p';

-- Another session can use the lease and its locks.  An attached lease gets its
-- full ttl from the end of its session.
\c -
DO $$
BEGIN
	WHILE EXISTS (SELECT FROM dlock_leases WHERE attached_pid IS NOT NULL) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
END $$;
SELECT info, remaining BETWEEN '1s' AND '1h' AS remaining, attached_pid, held, waiting
  FROM dlock_leases ORDER BY lease;
SELECT dlock_lease_acquire('f', :l2) = dlock_fence('f') AS same, dlock_renew(:l2);
SELECT dlock_lease_close(:l), dlock_lease_close(:l2);
SELECT * FROM lease_tickets;

--
-- Guards
--
CREATE TABLE guarded (n integer);
CREATE TRIGGER require BEFORE INSERT ON guarded
	FOR EACH STATEMENT EXECUTE FUNCTION dlock_require_guard('g');
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT dlock_lease_acquire('g', :l) AS g \gset
INSERT INTO guarded VALUES (0);
BEGIN;
SELECT dlock_guard('g', :g);
INSERT INTO guarded VALUES (1);
COMMIT;
-- not with another name, and not with another fence
SELECT error_of(format('dlock_guard(%L, %s)', 'h', :g)),
	error_of(format('dlock_guard(%L, %s)', 'g', :g - 1)),
	error_of(format('dlock_guard(%L, %s)', 'g', :l)) \gx
SELECT explain_error(format('SELECT dlock_guard(%L, %s)', 'g', :g - 1), :g - 1, :g);
-- not with a waiting ticket
SELECT dlock_ttl_enqueue('g', '1h', 'nobody') AS g2 \gset
SELECT error_of(format('dlock_guard(%L, %s)', 'g', :g2));
SELECT dlock_release_ticket(:g2);
-- released in the same transaction
\set VERBOSITY sqlstate
BEGIN;
SELECT dlock_guard('g', :g);
INSERT INTO guarded VALUES (2);
SELECT dlock_release_ticket(:g);
COMMIT;
\set VERBOSITY default
-- a release at commit is allowed
SELECT dlock_lease_acquire('g', :l) AS g \gset
BEGIN;
SELECT dlock_guard('g', :g), dlock_release_at_commit(:g);
INSERT INTO guarded VALUES (3);
COMMIT;
SELECT dlock_fence('g');
-- the lease is closed
SELECT dlock_lease_acquire('g', :l) AS g \gset
\set VERBOSITY sqlstate
BEGIN;
SELECT dlock_guard('g', :g);
INSERT INTO guarded VALUES (4);
SELECT dlock_lease_close(:l);
COMMIT;
-- revoked by force
SELECT dlock_ttl_acquire('g', '1h') AS g \gset
BEGIN;
SELECT dlock_guard('g', :g);
INSERT INTO guarded VALUES (5);
SELECT dlock_force_release(:g);
COMMIT;
\set VERBOSITY default
SELECT * FROM guarded;
DROP TABLE guarded;

--
-- Settings
--
SET dlock.max_ttl = '1min';
SELECT dlock_lease_open('60001ms');
\echo :SQLSTATE
SELECT error_of($$dlock_lease_open('1s', delay => '60.1s')$$),
	error_of($$dlock_ttl_acquire('a', '61s')$$),
	error_of($$dlock_ttl_enqueue('a', '61s', 'nobody')$$) \gx
SELECT dlock_lease_open('1min', delay => '1min') AS l \gset
SELECT dlock_lease_close(:l);
SET dlock.max_ttl = '2147483647s';
SELECT dlock_lease_open('24855 days', delay => '24855 days 03:14:07') AS l \gset
SELECT ttl, delay FROM dlock_leases;
RESET dlock.max_ttl;
-- open leases stay
SELECT dlock_renew(:l), dlock_lease_close(:l);
-- the units in the message depend on the PostgreSQL version
\set VERBOSITY sqlstate
SET dlock.max_ttl = 0;
\set VERBOSITY default
SHOW dlock.max_ttl;

-- dlock.session_locks does not forbid leases.
SET dlock.session_locks = 'error';
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT dlock_lease_acquire('a', :l) > 0, dlock_ttl_acquire('b', '1h') > 0,
	dlock_lease_acquire_all('{c}', :l) > '{0}', dlock_lease_enqueue('d', :l, 'nobody') > 0;
RESET dlock.session_locks;
-- Lease tickets do not count as the session's locks.  A wait for a lease
-- ticket counts, and so does each name in one call.
SET dlock.max_locks_per_session = 1;
SELECT dlock_lease_acquire_all('{e,f,g}', :l, '1min');
SELECT count(dlock_lease_acquire_all(ARRAY[name], :l, '1min'))
  FROM unnest(ARRAY['e', 'f', 'g']) AS name;
SELECT dlock_acquire('z') > 0;
SELECT dlock_lease_acquire('h', :l);
\echo :SQLSTATE
SELECT dlock_lease_enqueue('h', :l, 'nobody') > 0;
RESET dlock.max_locks_per_session;
SELECT dlock_release('z');
SELECT dlock_lease_close(lease) FROM dlock_leases ORDER BY lease;

--
-- Errors
--
SELECT dlock_lease_open(NULL);
\echo :SQLSTATE
SELECT dlock_lease_open('1 month');
\echo :SQLSTATE
SELECT dlock_lease_open('99999 us');
\echo :SQLSTATE
SELECT dlock_lease_acquire('a', 1);
\echo :SQLSTATE
SELECT dlock_lease_acquire('a', 1, owner => repeat('x', 1025));
\echo :SQLSTATE
SELECT dlock_lease_open('1h', info => 'lease') AS l \gset
SELECT call, error_of(replace(call, '$1', :'l'))
  FROM unnest(ARRAY[
	$$dlock_lease_open('1h', attach => NULL)$$,
	$$dlock_lease_close(NULL)$$,
	$$dlock_renew(NULL)$$,
	$$dlock_lease_acquire(NULL, $1)$$,
	$$dlock_lease_acquire('a', NULL)$$,
	$$dlock_lease_acquire('a', $1, shared => NULL)$$,
	$$dlock_lease_acquire('a', $1, permits => NULL)$$,
	$$dlock_try_lease_acquire(NULL, $1)$$,
	$$dlock_try_lease_acquire('a', NULL)$$,
	$$dlock_ttl_acquire(NULL, '1h')$$,
	$$dlock_ttl_acquire('a', NULL)$$,
	$$dlock_ttl_acquire('a', '1h', shared => NULL)$$,
	$$dlock_try_ttl_acquire(NULL, '1h')$$,
	$$dlock_try_ttl_acquire('a', NULL)$$,
	$$dlock_try_ttl_acquire('a', '1h', permits => NULL)$$,
	$$dlock_lease_acquire_all(NULL, $1)$$,
	$$dlock_lease_acquire_all('{a}', NULL)$$,
	$$dlock_lease_acquire_all('{a,NULL}', $1)$$,
	$$dlock_lease_acquire_all('{a}', $1, shared => NULL)$$,
	$$dlock_try_lease_acquire_all(NULL, $1)$$,
	$$dlock_try_lease_acquire_all('{a}', NULL)$$,
	$$dlock_try_lease_acquire_all('{NULL}', $1)$$,
	$$dlock_try_lease_acquire_all('{a}', $1, shared => NULL)$$,
	$$dlock_lease_enqueue(NULL, $1, 'nobody')$$,
	$$dlock_lease_enqueue('a', NULL, 'nobody')$$,
	$$dlock_lease_enqueue('a', $1, 'nobody', shared => NULL)$$,
	$$dlock_lease_enqueue('a', $1, 'nobody', permits => NULL)$$,
	$$dlock_ttl_enqueue(NULL, '1h', 'nobody')$$,
	$$dlock_ttl_enqueue('a', NULL, 'nobody')$$,
	$$dlock_ttl_enqueue('a', '1h', 'nobody', shared => NULL)$$,
	$$dlock_release_ticket(NULL)$$,
	$$dlock_release_at_commit(NULL)$$,
	$$dlock_force_release(NULL)$$]) AS call;
SELECT call, error_of(replace(call, '$1', :'l'))
  FROM unnest(ARRAY[
	$$dlock_lease_open('0')$$,
	$$dlock_lease_open('-1h')$$,
	$$dlock_lease_open('99.999 ms')$$,
	$$dlock_lease_open('24:00:00.000001')$$,
	$$dlock_lease_open('1 day 1 us')$$,
	$$dlock_lease_open('1 year')$$,
	$$dlock_lease_open('1 month -29 days -24 hours')$$,
	$$dlock_lease_open('2000000000 days')$$,
	$$dlock_lease_open('106751992 days')$$,
	$$dlock_lease_open('1h', delay => '0')$$,
	$$dlock_lease_open('1h', delay => '99 ms')$$,
	$$dlock_lease_open('1h', delay => '-1 s')$$,
	$$dlock_lease_open('1h', delay => '25 hours')$$,
	$$dlock_lease_open('1h', delay => '1 month')$$,
	$$dlock_lease_open('1h', info => repeat('x', 1025))$$,
	$$dlock_ttl_acquire('a', '0')$$,
	$$dlock_ttl_acquire('a', '1 month')$$,
	$$dlock_try_ttl_acquire('a', '-1 s')$$,
	$$dlock_try_ttl_acquire('a', '25 hours')$$,
	$$dlock_ttl_enqueue('a', '99 ms', 'nobody')$$,
	$$dlock_ttl_enqueue('a', '1 month', 'nobody')$$,
	$$dlock_lease_acquire('', $1)$$,
	$$dlock_lease_acquire(repeat('x', 256), $1)$$,
	$$dlock_lease_acquire('a', $1, '-1 us')$$,
	$$dlock_lease_acquire('a', $1, shared => true, slots => 1)$$,
	$$dlock_lease_acquire('a', $1, slots => 0)$$,
	$$dlock_lease_acquire('a', $1, permits => 0)$$,
	$$dlock_lease_acquire('a', $1, permits => 2)$$,
	$$dlock_lease_acquire('a', $1, slots => 2, permits => 3)$$,
	$$dlock_lease_acquire('a', $1, owner => repeat('x', 1025))$$,
	$$dlock_lease_acquire('a', $1, owner => repeat('é', 513))$$,
	$$dlock_lease_acquire('a', $1, info => repeat('x', 1025))$$,
	$$dlock_try_lease_acquire('', $1)$$,
	$$dlock_try_lease_acquire('a', $1, '-1 us')$$,
	$$dlock_try_lease_acquire('a', $1, owner => repeat('x', 1025))$$,
	$$dlock_ttl_acquire('', '1h')$$,
	$$dlock_ttl_acquire('a', '1h', '-1 us')$$,
	$$dlock_ttl_acquire('a', '1h', slots => -1)$$,
	$$dlock_ttl_acquire('a', '1h', owner => repeat('x', 1025))$$,
	$$dlock_ttl_acquire('a', '1h', info => repeat('x', 1025))$$,
	$$dlock_try_ttl_acquire('a', '1h', permits => 2)$$,
	$$dlock_try_ttl_acquire('a', '1h', owner => repeat('x', 1025))$$,
	$$dlock_lease_acquire_all('{a,""}', $1)$$,
	$$dlock_lease_acquire_all(ARRAY['a', repeat('x', 256)], $1)$$,
	$$dlock_lease_acquire_all('{a}', $1, '-1 us')$$,
	$$dlock_lease_acquire_all('{a}', $1, info => repeat('x', 1025))$$,
	$$dlock_try_lease_acquire_all('{""}', $1)$$,
	$$dlock_try_lease_acquire_all('{a}', $1, '-1 us')$$,
	$$dlock_lease_enqueue('', $1, 'nobody')$$,
	$$dlock_lease_enqueue('a', $1, '')$$,
	$$dlock_lease_enqueue('a', $1, repeat('x', 64))$$,
	$$dlock_lease_enqueue('a', $1, 'nobody', shared => true, slots => 1)$$,
	$$dlock_lease_enqueue('a', $1, 'nobody', slots => 0)$$,
	$$dlock_lease_enqueue('a', $1, 'nobody', permits => 2)$$,
	$$dlock_lease_enqueue('a', $1, 'nobody', owner => repeat('x', 1025))$$,
	$$dlock_lease_enqueue('a', $1, 'nobody', info => repeat('x', 1025))$$,
	$$dlock_ttl_enqueue('', '1h', 'nobody')$$,
	$$dlock_ttl_enqueue('a', '1h', repeat('x', 64))$$,
	$$dlock_ttl_enqueue('a', '1h', 'nobody', owner => repeat('x', 1025))$$,
	$$dlock_ttl_enqueue('a', '1h', 'nobody', info => repeat('x', 1025))$$]) AS call;
-- an infinite ttl: PostgreSQL 17 and later accept the interval, earlier
-- versions do not
SELECT error_of($$dlock_lease_open('infinity')$$) ~ '^(22023 ttl must be a fixed length|22007)' AS refused,
	error_of($$dlock_lease_open('1h', delay => '-infinity')$$) ~ '^(22023 delay must be a fixed length|22007)' AS refused,
	error_of($$dlock_ttl_acquire('a', 'infinity')$$) ~ '^(22023 ttl must be a fixed length|22007)' AS refused,
	error_of(format('dlock_lease_acquire(%L, %s, %L)', 'a', :l, 'infinity')) ~ '^(22023 timeout must not|22007)' AS refused;
-- an unknown lease
SELECT explain_error($$SELECT dlock_lease_acquire('a', 1)$$);
SELECT call, error_of(call)
  FROM unnest(ARRAY[
	$$dlock_try_lease_acquire('a', 1)$$,
	$$dlock_lease_acquire('a', 0)$$,
	$$dlock_lease_acquire('a', -1, '1h')$$,
	$$dlock_lease_acquire('a', 9223372036854775807)$$,
	$$dlock_lease_acquire_all('{a,b}', 1)$$,
	$$dlock_lease_acquire_all('{}', 1)$$,
	$$dlock_try_lease_acquire_all('{a}', 1)$$,
	$$dlock_lease_enqueue('a', 1, 'nobody')$$]) AS call;
-- a ticket is not a lease, and a lease is not a ticket
SELECT dlock_lease_acquire('a', :l) AS a \gset
SELECT dlock_renew(:a), error_of(format('dlock_lease_acquire(%L, %s)', 'b', :a)),
	error_of(format('dlock_wait(%s)', :l)), dlock_check('a', :l);
\set VERBOSITY sqlstate
SELECT dlock_lease_close(:a);
SELECT dlock_release_ticket(:l);
\set VERBOSITY default
SELECT name, lease FROM lease_tickets;

-- the longest values
SELECT dlock_lease_acquire(repeat('x', 255), :l, owner => repeat('y', 1024),
	info => repeat('z', 1024)) AS x,
	dlock_lease_enqueue('é', :l, repeat('é', 31), owner => 'é', info => 'è') AS y \gset
SELECT octet_length(name) AS name, octet_length(owner) AS owner, octet_length(info) AS info,
	octet_length(channel) AS channel FROM dlock_locks WHERE ticket IN (:x, :y) ORDER BY ticket;
SELECT octet_length(name) AS name, octet_length(owner) AS owner, octet_length(info) AS info,
	octet_length(channel) AS channel FROM dlock_queue WHERE ticket IN (:x, :y) ORDER BY ticket;
SELECT dlock_lease_open('1h', info => repeat('i', 1024)) AS l2 \gset
SELECT octet_length(info) FROM dlock_leases WHERE lease = :l2;

-- A ticket with a release at commit that ends before the commit
BEGIN;
SELECT dlock_release_at_commit(:x);
SELECT dlock_release_ticket(:x);
DO $$
BEGIN
	WHILE EXISTS (SELECT FROM dlock_queue WHERE name = repeat('x', 255)) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
END $$;
COMMIT;
SELECT dlock_fence(repeat('x', 255)), dlock_renew(:l);

-- A closed lease leaves no row.
SELECT dlock_lease_close(:l), dlock_lease_close(:l2);
SELECT await_tables();
SELECT count(*) FROM dlock_leases;
SELECT count(*) FROM dlock_queue_lease;
SELECT count(*) FROM dlock_queue;
SELECT count(*) FROM dlock_locks;

DROP VIEW lease_tickets;
DROP FUNCTION await_tables(), await_expiry(bigint);
