/* sql/dlock--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION dlock" to load this file. \quit

--
-- Ticket numbers
--
-- Its last value is the greatest number ever reserved, so it goes into dumps:
-- a restored database never gives a fence that the old one gave.
--
CREATE SEQUENCE dlock_ticket_seq MAXVALUE 9007199254740991 NO CYCLE;
SELECT pg_catalog.pg_extension_config_dump('dlock_ticket_seq', '');
REVOKE ALL ON SEQUENCE dlock_ticket_seq FROM PUBLIC;
COMMENT ON SEQUENCE dlock_ticket_seq IS
'greatest ticket number that dlock has reserved';

--
-- Session scope
--
CREATE FUNCTION dlock_acquire(
    name text, timeout interval = NULL, shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_acquire(text, interval, boolean, integer, integer, text) IS
'wait for a lock, hold it until released or until the session ends, and return its fence';

CREATE FUNCTION dlock_try_acquire(
    name text, timeout interval = '0', shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_try_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_acquire(text, interval, boolean, integer, integer, text) IS
'as dlock_acquire, but return NULL if the lock cannot be had in time';

CREATE PROCEDURE dlock_acquire_nosnapshot(
    name text, timeout interval = NULL, shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL,
    INOUT fence bigint = NULL)
AS 'MODULE_PATHNAME', 'dlock_acquire_nosnapshot'
LANGUAGE C;
COMMENT ON PROCEDURE dlock_acquire_nosnapshot(text, interval, boolean, integer, integer, text, bigint) IS
'as dlock_acquire, but hold no snapshot while waiting';

CREATE FUNCTION dlock_acquire_all(
    names text[], timeout interval = NULL, shared boolean = false,
    info text = NULL)
RETURNS bigint[]
AS 'MODULE_PATHNAME', 'dlock_acquire_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_acquire_all(text[], interval, boolean, text) IS
'acquire all of several locks or none, without deadlocks among callers that hold nothing else';

CREATE FUNCTION dlock_try_acquire_all(
    names text[], timeout interval = '0', shared boolean = false,
    info text = NULL)
RETURNS bigint[]
AS 'MODULE_PATHNAME', 'dlock_try_acquire_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_acquire_all(text[], interval, boolean, text) IS
'as dlock_acquire_all, but return NULL if the locks cannot be had in time';

CREATE FUNCTION dlock_release(name text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_release(text) IS
'undo one session-scoped acquire of a lock';

CREATE FUNCTION dlock_release_ticket(ticket bigint)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_release_ticket'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_release_ticket(bigint) IS
'end a ticket of a lease, or undo one session-scoped acquire of a ticket';

CREATE FUNCTION dlock_release_at_commit(ticket bigint)
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_release_at_commit'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_release_at_commit(bigint) IS
'as dlock_release_ticket, as soon as this transaction''s writes are visible, and only if it commits';

CREATE FUNCTION dlock_release_all()
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_release_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_release_all() IS
'release every session-scoped lock of this session';

--
-- Tickets: a place in the queue without waiting
--
CREATE FUNCTION dlock_enqueue(
    name text, channel text = NULL, shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_enqueue'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_enqueue(text, text, boolean, integer, integer, text) IS
'take a place in a lock''s queue and return its ticket at once; the grant is announced by NOTIFY';

CREATE FUNCTION dlock_wait(ticket bigint, timeout interval = NULL)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_wait'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_wait(bigint, interval) IS
'wait until an enqueued ticket is granted; false if the timeout passed first';

CREATE FUNCTION dlock_channel()
RETURNS text
AS 'MODULE_PATHNAME', 'dlock_channel'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_channel() IS
'listen on this session''s own channel from the commit on, and return its name';

--
-- Transaction scope
--
CREATE FUNCTION dlock_xact_acquire(
    name text, timeout interval = NULL, shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_xact_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_xact_acquire(text, interval, boolean, integer, integer, text) IS
'wait for a lock, hold it until the transaction has ended, and return its fence';

CREATE FUNCTION dlock_try_xact_acquire(
    name text, timeout interval = '0', shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_try_xact_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_xact_acquire(text, interval, boolean, integer, integer, text) IS
'as dlock_xact_acquire, but return NULL if the lock cannot be had in time';

CREATE FUNCTION dlock_xact_acquire_all(
    names text[], timeout interval = NULL, shared boolean = false,
    info text = NULL)
RETURNS bigint[]
AS 'MODULE_PATHNAME', 'dlock_xact_acquire_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_xact_acquire_all(text[], interval, boolean, text) IS
'as dlock_acquire_all, until the transaction has ended';

CREATE FUNCTION dlock_try_xact_acquire_all(
    names text[], timeout interval = '0', shared boolean = false,
    info text = NULL)
RETURNS bigint[]
AS 'MODULE_PATHNAME', 'dlock_try_xact_acquire_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_xact_acquire_all(text[], interval, boolean, text) IS
'as dlock_xact_acquire_all, but return NULL if the locks cannot be had in time';

--
-- Leases
--
-- The tables are written by the worker alone.  They are not dumped: what they
-- say is true of one running system.  "system" and "database" tell which; rows
-- of another one came with a copy, and are discarded.
--
CREATE TABLE dlock_queue_lease (
    lease bigint PRIMARY KEY,
    ttl interval NOT NULL,
    delay interval,
    delayed boolean NOT NULL,
    info text,
    role oid NOT NULL,
    role_name name NOT NULL,
    opened_at timestamptz NOT NULL,
    durability integer NOT NULL,
    system bigint NOT NULL,
    database oid NOT NULL
);
-- the view dlock_leases shows what is for all to see
REVOKE ALL ON TABLE dlock_queue_lease FROM PUBLIC;
COMMENT ON TABLE dlock_queue_lease IS 'leases that were opened for any number of locks';
COMMENT ON COLUMN dlock_queue_lease.lease IS 'number of the lease';
COMMENT ON COLUMN dlock_queue_lease.ttl IS 'how long it lives without being renewed';
COMMENT ON COLUMN dlock_queue_lease.delay IS 'how long its locks stay closed after it has run out; NULL if not at all';
COMMENT ON COLUMN dlock_queue_lease.delayed IS 'true where it has run out, and keeps its locks closed';
COMMENT ON COLUMN dlock_queue_lease.info IS 'what the client says of itself';
COMMENT ON COLUMN dlock_queue_lease.role IS 'role that opened it';
COMMENT ON COLUMN dlock_queue_lease.role_name IS 'name of that role';
COMMENT ON COLUMN dlock_queue_lease.opened_at IS 'when it was opened';
COMMENT ON COLUMN dlock_queue_lease.durability IS 'synchronous_commit of the session that opened it: 0 off, 1 local, 2 remote_write, 3 on, 4 remote_apply';
COMMENT ON COLUMN dlock_queue_lease.system IS 'system identifier of the cluster that the row belongs to';
COMMENT ON COLUMN dlock_queue_lease.database IS 'database that the row belongs to';

CREATE TABLE dlock_queue (
    ticket bigint PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    lease bigint NOT NULL,
    granted boolean NOT NULL,
    delayed boolean NOT NULL,
    mode text NOT NULL,
    slots integer,
    permits integer NOT NULL,
    owner text,
    info text,
    channel text,
    role oid NOT NULL,
    role_name name NOT NULL,
    enqueued_at timestamptz NOT NULL,
    granted_at timestamptz,
    ttl interval,
    delay interval,
    durability integer NOT NULL,
    system bigint NOT NULL,
    database oid NOT NULL
);
-- a channel is for those who know its name; dlock_locks shows the rest
REVOKE ALL ON TABLE dlock_queue FROM PUBLIC;
COMMENT ON TABLE dlock_queue IS 'the durable queue: every ticket that a lease has, holding or waiting';
COMMENT ON COLUMN dlock_queue.ticket IS 'number of the ticket; the fence of an exclusive holder';
COMMENT ON COLUMN dlock_queue.name IS 'name of the lock';
COMMENT ON COLUMN dlock_queue.lease IS 'lease that keeps the ticket; the number of the ticket where that is its own';
COMMENT ON COLUMN dlock_queue.granted IS 'true for a holder, false for a waiter';
COMMENT ON COLUMN dlock_queue.delayed IS 'true where its own lease has run out, and keeps the lock closed';
COMMENT ON COLUMN dlock_queue.mode IS 'exclusive, shared or slots';
COMMENT ON COLUMN dlock_queue.slots IS 'permits that the lock has; NULL unless mode is slots';
COMMENT ON COLUMN dlock_queue.permits IS 'permits that this ticket takes';
COMMENT ON COLUMN dlock_queue.owner IS 'for whom the lease has asked; NULL if not said';
COMMENT ON COLUMN dlock_queue.info IS 'what the client says of itself';
COMMENT ON COLUMN dlock_queue.channel IS 'channel on which a grant is announced; NULL if none';
COMMENT ON COLUMN dlock_queue.role IS 'role that owns the ticket';
COMMENT ON COLUMN dlock_queue.role_name IS 'name of that role';
COMMENT ON COLUMN dlock_queue.enqueued_at IS 'when the ticket joined the queue';
COMMENT ON COLUMN dlock_queue.granted_at IS 'when the lock was granted; NULL for a waiter';
COMMENT ON COLUMN dlock_queue.ttl IS 'how long its own lease lives without being renewed; NULL where it has none';
COMMENT ON COLUMN dlock_queue.delay IS 'delay of its own lease; NULL if none';
COMMENT ON COLUMN dlock_queue.durability IS 'synchronous_commit of the session that asked, as in dlock_queue_lease';
COMMENT ON COLUMN dlock_queue.system IS 'system identifier of the cluster that the row belongs to';
COMMENT ON COLUMN dlock_queue.database IS 'database that the row belongs to';

CREATE FUNCTION dlock_lease_open(
    ttl interval, attach boolean = false, delay interval = NULL,
    info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_lease_open'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_lease_open(interval, boolean, interval, text) IS
'open a lease for any number of locks, to be renewed within its ttl, and return its number';

CREATE FUNCTION dlock_lease_close(lease bigint)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_lease_close'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_lease_close(bigint) IS
'end a lease, and return how many tickets that released';

CREATE FUNCTION dlock_renew(id bigint)
RETURNS integer
AS 'MODULE_PATHNAME', 'dlock_renew'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_renew(bigint) IS
'give a lease, or a ticket''s own lease, its full ttl from now; return how many tickets it keeps, NULL if it is gone';

CREATE FUNCTION dlock_lease_acquire(
    name text, lease bigint, timeout interval = NULL,
    shared boolean = false, slots integer = NULL, permits integer = 1,
    owner text = NULL, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_lease_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_lease_acquire(text, bigint, interval, boolean, integer, integer, text, text) IS
'wait for a lock, keep it with a lease until released or until the lease ends, and return its fence';

CREATE FUNCTION dlock_try_lease_acquire(
    name text, lease bigint, timeout interval = '0',
    shared boolean = false, slots integer = NULL, permits integer = 1,
    owner text = NULL, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_try_lease_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_lease_acquire(text, bigint, interval, boolean, integer, integer, text, text) IS
'as dlock_lease_acquire, but return NULL if the lock cannot be had in time';

CREATE FUNCTION dlock_ttl_acquire(
    name text, ttl interval, timeout interval = NULL,
    shared boolean = false, slots integer = NULL, permits integer = 1,
    owner text = NULL, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_ttl_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_ttl_acquire(text, interval, interval, boolean, integer, integer, text, text) IS
'as dlock_lease_acquire, with a lease of its own, whose number is the ticket';

CREATE FUNCTION dlock_try_ttl_acquire(
    name text, ttl interval, timeout interval = '0',
    shared boolean = false, slots integer = NULL, permits integer = 1,
    owner text = NULL, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_try_ttl_acquire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_ttl_acquire(text, interval, interval, boolean, integer, integer, text, text) IS
'as dlock_ttl_acquire, but return NULL if the lock cannot be had in time';

CREATE FUNCTION dlock_lease_acquire_all(
    names text[], lease bigint, timeout interval = NULL,
    shared boolean = false, info text = NULL)
RETURNS bigint[]
AS 'MODULE_PATHNAME', 'dlock_lease_acquire_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_lease_acquire_all(text[], bigint, interval, boolean, text) IS
'as dlock_acquire_all, with a lease';

CREATE FUNCTION dlock_try_lease_acquire_all(
    names text[], lease bigint, timeout interval = '0',
    shared boolean = false, info text = NULL)
RETURNS bigint[]
AS 'MODULE_PATHNAME', 'dlock_try_lease_acquire_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_lease_acquire_all(text[], bigint, interval, boolean, text) IS
'as dlock_lease_acquire_all, but return NULL if the locks cannot be had in time';

CREATE FUNCTION dlock_lease_enqueue(
    name text, lease bigint, channel text = NULL,
    shared boolean = false, slots integer = NULL, permits integer = 1,
    owner text = NULL, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_lease_enqueue'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_lease_enqueue(text, bigint, text, boolean, integer, integer, text, text) IS
'take a durable place in the queue of a lock for a lease and return its ticket at once; the grant is announced by NOTIFY';

CREATE FUNCTION dlock_ttl_enqueue(
    name text, ttl interval, channel text = NULL,
    shared boolean = false, slots integer = NULL, permits integer = 1,
    owner text = NULL, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_ttl_enqueue'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_ttl_enqueue(text, interval, text, boolean, integer, integer, text, text) IS
'as dlock_lease_enqueue, with a lease of its own, whose number is the ticket';

--
-- Questions
--
CREATE FUNCTION dlock_is_held(name text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_is_held'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_is_held(text) IS
'does this session hold the lock, in session or transaction scope?';

CREATE FUNCTION dlock_fence(name text)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_fence'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_fence(text) IS
'greatest fence among the holders of a lock, NULL if there is none';

CREATE FUNCTION dlock_check(name text, fence bigint)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_check'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_check(text, bigint) IS
'was this fence a holder''s at the moment of the call?';

CREATE FUNCTION dlock_blocking_pids(pid integer)
RETURNS integer[]
AS 'MODULE_PATHNAME', 'dlock_blocking_pids'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_blocking_pids(integer) IS
'process ids of the sessions that keep a session waiting for a lock of dlock';

--
-- Fenced commits
--
CREATE FUNCTION dlock_guard(name text, fence bigint)
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_guard'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_guard(text, bigint) IS
'let this transaction commit only while the lock is still held with this fence';

CREATE FUNCTION dlock_require_guard()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_require_guard'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_require_guard() IS
'statement trigger: refuse a change by a transaction that has not guarded the lock that the argument names';

CREATE FUNCTION dlock_fence_guard()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_fence_guard'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_fence_guard() IS
'row trigger: never overwrite a row with a smaller fence in the column that the argument names';

--
-- Optimistic locking
--
CREATE TABLE dlock_versions (
    name text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL CHECK (version > 0)
);
SELECT pg_catalog.pg_extension_config_dump('dlock_versions', '');
-- written by the functions alone
REVOKE ALL ON TABLE dlock_versions FROM PUBLIC;
COMMENT ON TABLE dlock_versions IS
'the version of every name that was ever bumped';
COMMENT ON COLUMN dlock_versions.name IS 'name, compared byte by byte';
COMMENT ON COLUMN dlock_versions.version IS 'how often it was bumped';

CREATE FUNCTION dlock_version_of(name text)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_version_of'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_version_of(text) IS
'version of a name; 0 if it was never bumped';

CREATE FUNCTION dlock_version_bump(name text, expected bigint)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_version_bump'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_version_bump(text, bigint) IS
'move a version on from the expected one and return it; serialization failure if it is another one by now';

CREATE FUNCTION dlock_try_version_bump(name text, expected bigint)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_try_version_bump'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_try_version_bump(text, bigint) IS
'as dlock_version_bump, but return NULL if it is another one by now';

CREATE FUNCTION dlock_version_guard()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_version_guard'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_version_guard() IS
'row trigger: keep a version column, by default "version", and refuse updates of a stale version';

--
-- For administrators: superusers, and whom they grant it to
--
CREATE FUNCTION dlock_force_release(ticket bigint)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_force_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
REVOKE EXECUTE ON FUNCTION dlock_force_release(bigint) FROM PUBLIC;
COMMENT ON FUNCTION dlock_force_release(bigint) IS
'end a ticket of any session, held or waiting';

CREATE FUNCTION dlock_advance_ticket(minimum bigint)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_advance_ticket'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
REVOKE EXECUTE ON FUNCTION dlock_advance_ticket(bigint) FROM PUBLIC;
COMMENT ON FUNCTION dlock_advance_ticket(bigint) IS
'see to it that no later ticket has a smaller number';

CREATE TABLE dlock_reservations (
    prefix text COLLATE "C" PRIMARY KEY,
    owner regrole NOT NULL
);
SELECT pg_catalog.pg_extension_config_dump('dlock_reservations', '');
-- written by the functions below alone
REVOKE ALL ON TABLE dlock_reservations FROM PUBLIC;
GRANT SELECT ON TABLE dlock_reservations TO PUBLIC;
COMMENT ON TABLE dlock_reservations IS
'names that are kept for a role';
COMMENT ON COLUMN dlock_reservations.prefix IS 'what these names begin with, compared byte by byte';
COMMENT ON COLUMN dlock_reservations.owner IS 'role that, with those that have its privileges, may use them';

CREATE FUNCTION dlock_reserve(prefix text, owner regrole)
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_reserve'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
REVOKE EXECUTE ON FUNCTION dlock_reserve(text, regrole) FROM PUBLIC;
COMMENT ON FUNCTION dlock_reserve(text, regrole) IS
'keep the names with a prefix for a role; of several prefixes that fit a name the longest counts';

CREATE FUNCTION dlock_unreserve(prefix text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_unreserve'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
REVOKE EXECUTE ON FUNCTION dlock_unreserve(text) FROM PUBLIC;
COMMENT ON FUNCTION dlock_unreserve(text) IS
'give the names with a prefix free again';

--
-- Views
--
CREATE FUNCTION dlock_lock_status(
    OUT name text, OUT ticket bigint, OUT mode text, OUT slots integer,
    OUT permits integer, OUT granted boolean, OUT "position" integer,
    OUT scope text, OUT pid integer, OUT lease bigint, OUT role oid,
    OUT owner text, OUT info text, OUT channel text,
    OUT enqueued_at timestamptz, OUT granted_at timestamptz,
    OUT remaining interval, OUT depth integer, OUT pinned boolean,
    OUT blocked_by bigint[])
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_lock_status'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_lock_status() IS
'function behind the view dlock_locks';

CREATE VIEW dlock_locks AS
SELECT l.name, l.ticket, l.mode, l.slots, l.permits, l.granted, l."position",
       l.scope, l.pid, l.lease,
       pg_catalog.pg_get_userbyid(l.role) AS role,
       l.owner, l.info, l.channel, l.enqueued_at, l.granted_at, l.remaining,
       l.depth, l.pinned, l.blocked_by
  FROM dlock_lock_status() AS l;
GRANT SELECT ON dlock_locks TO PUBLIC;
COMMENT ON VIEW dlock_locks IS
'the holders and the queue of every lock in this database';
COMMENT ON COLUMN dlock_locks.name IS 'name of the lock';
COMMENT ON COLUMN dlock_locks.ticket IS 'number of the ticket; the fence of an exclusive holder';
COMMENT ON COLUMN dlock_locks.mode IS 'exclusive, shared or slots';
COMMENT ON COLUMN dlock_locks.slots IS 'permits that the lock has; NULL unless mode is slots';
COMMENT ON COLUMN dlock_locks.permits IS 'permits that this ticket takes';
COMMENT ON COLUMN dlock_locks.granted IS 'true for a holder; false for a waiter, and where only a delay keeps the lock closed';
COMMENT ON COLUMN dlock_locks.position IS 'place in the queue, from 1; 0 for a holder and for a delay';
COMMENT ON COLUMN dlock_locks.scope IS 'what the ticket lives and dies with: session, transaction or lease';
COMMENT ON COLUMN dlock_locks.pid IS 'process id of the session; NULL where a lease has the ticket';
COMMENT ON COLUMN dlock_locks.lease IS 'lease that keeps the ticket; NULL if none';
COMMENT ON COLUMN dlock_locks.role IS 'role that asked for the lock; with a lease, the one that opened it';
COMMENT ON COLUMN dlock_locks.owner IS 'owner given with a lease; NULL if none';
COMMENT ON COLUMN dlock_locks.info IS 'what the session says of itself';
COMMENT ON COLUMN dlock_locks.channel IS 'channel on which a grant is announced; NULL if none';
COMMENT ON COLUMN dlock_locks.enqueued_at IS 'when the ticket joined the queue';
COMMENT ON COLUMN dlock_locks.granted_at IS 'when the lock was granted; NULL for a waiter';
COMMENT ON COLUMN dlock_locks.remaining IS 'time until the lease runs out, or the delay that keeps the lock closed; NULL if none';
COMMENT ON COLUMN dlock_locks.depth IS 'acquires that a holder has still to undo';
COMMENT ON COLUMN dlock_locks.pinned IS 'true while a guarded commit keeps the lock from being handed over';
COMMENT ON COLUMN dlock_locks.blocked_by IS 'tickets that stand before a waiter';

CREATE FUNCTION dlock_lease_status(
    OUT lease bigint, OUT ttl interval, OUT delay interval,
    OUT remaining interval, OUT attached_pid integer, OUT role oid,
    OUT info text, OUT opened_at timestamptz, OUT renewed_at timestamptz,
    OUT held integer, OUT waiting integer)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_lease_status'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_lease_status() IS
'function behind the view dlock_leases';

CREATE VIEW dlock_leases AS
SELECT l.lease, l.ttl, l.delay, l.remaining, l.attached_pid,
       pg_catalog.pg_get_userbyid(l.role) AS role,
       l.info, l.opened_at, l.renewed_at, l.held, l.waiting
  FROM dlock_lease_status() AS l;
GRANT SELECT ON dlock_leases TO PUBLIC;
COMMENT ON VIEW dlock_leases IS
'the leases of this database, those of single tickets included';
COMMENT ON COLUMN dlock_leases.lease IS 'number of the lease; where it is the own one of a ticket, that of the ticket';
COMMENT ON COLUMN dlock_leases.ttl IS 'how long it lives without being renewed';
COMMENT ON COLUMN dlock_leases.delay IS 'how long its locks stay closed after it has run out; NULL if not at all';
COMMENT ON COLUMN dlock_leases.remaining IS 'time until it runs out; NULL while a session keeps it';
COMMENT ON COLUMN dlock_leases.attached_pid IS 'process id of the session that keeps it alive; NULL if none';
COMMENT ON COLUMN dlock_leases.role IS 'role that opened it';
COMMENT ON COLUMN dlock_leases.info IS 'what the client says of itself';
COMMENT ON COLUMN dlock_leases.opened_at IS 'when it was opened';
COMMENT ON COLUMN dlock_leases.renewed_at IS 'when it was last renewed';
COMMENT ON COLUMN dlock_leases.held IS 'tickets that hold a lock';
COMMENT ON COLUMN dlock_leases.waiting IS 'tickets that wait';

CREATE FUNCTION dlock_counters(
    OUT acquired bigint, OUT waited bigint, OUT released bigint,
    OUT busy bigint, OUT timeouts bigint, OUT canceled bigint,
    OUT deadlocks bigint, OUT wait_us bigint)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_counters'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_counters() IS
'function behind the view dlock_stats';

CREATE VIEW dlock_stats AS
SELECT c.acquired, c.waited, c.released, c.busy, c.timeouts, c.canceled,
       c.deadlocks,
       pg_catalog.make_interval(secs => c.wait_us / 1e6::double precision) AS wait_time
  FROM dlock_counters() AS c;
GRANT SELECT ON dlock_stats TO PUBLIC;
COMMENT ON VIEW dlock_stats IS
'what the locks of this database have seen since the server started';
COMMENT ON COLUMN dlock_stats.acquired IS 'locks granted';
COMMENT ON COLUMN dlock_stats.waited IS 'of these, granted after a wait';
COMMENT ON COLUMN dlock_stats.released IS 'locks given back';
COMMENT ON COLUMN dlock_stats.busy IS 'attempts that gave up at once';
COMMENT ON COLUMN dlock_stats.timeouts IS 'waits ended by their timeout';
COMMENT ON COLUMN dlock_stats.canceled IS 'waits ended by any other error';
COMMENT ON COLUMN dlock_stats.deadlocks IS 'waits ended to break a deadlock';
COMMENT ON COLUMN dlock_stats.wait_time IS 'time spent waiting';
