/* sql/dlock--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION dlock" to load this file. \quit

--
-- In this order: tables, functions as in docs/reference.md, views, rights.
--
-- All names are qualified, and operands have exactly the operator's types.
-- Otherwise objects of another schema could be found first, or match better.
--

--
-- Ticket numbers
--
-- The last value is the greatest number ever reserved.  It goes into dumps, so
-- that a restored database never gives a fence that the old one gave.
--
CREATE SEQUENCE dlock_ticket_seq MAXVALUE 9007199254740991 NO CYCLE;
SELECT pg_catalog.pg_extension_config_dump('dlock_ticket_seq', '');
COMMENT ON SEQUENCE dlock_ticket_seq IS
'greatest ticket number that dlock has reserved';

--
-- Leases, and their tickets
--
-- The worker alone writes these two tables.  They are not dumped: their rows
-- describe one running system, which "system" and "database" identify.  Rows of
-- another system came with a copy, and are discarded.
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
COMMENT ON TABLE dlock_queue_lease IS 'leases that were opened for any number of locks';
COMMENT ON COLUMN dlock_queue_lease.lease IS 'number of the lease';
COMMENT ON COLUMN dlock_queue_lease.ttl IS 'how long it lives without being renewed';
COMMENT ON COLUMN dlock_queue_lease.delay IS 'how long its locks stay closed after it has run out; NULL if not at all';
COMMENT ON COLUMN dlock_queue_lease.delayed IS 'true if it has run out, and keeps its locks closed';
COMMENT ON COLUMN dlock_queue_lease.info IS 'what the client says of itself';
COMMENT ON COLUMN dlock_queue_lease.role IS 'role that opened it';
COMMENT ON COLUMN dlock_queue_lease.role_name IS 'name of that role';
COMMENT ON COLUMN dlock_queue_lease.opened_at IS 'when it was opened';
COMMENT ON COLUMN dlock_queue_lease.durability IS 'highest synchronous_commit of the sessions that count on it: 0 off, 1 local, 2 remote_write, 3 on, 4 remote_apply';
COMMENT ON COLUMN dlock_queue_lease.system IS 'system identifier of the cluster that the row belongs to';
COMMENT ON COLUMN dlock_queue_lease.database IS 'database that the row belongs to';

CREATE TABLE dlock_queue (
    ticket bigint PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    lease bigint NOT NULL,
    granted boolean NOT NULL,
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
    durability integer NOT NULL,
    system bigint NOT NULL,
    database oid NOT NULL
);
COMMENT ON TABLE dlock_queue IS 'the durable queue: every ticket that a lease has, holding or waiting';
COMMENT ON COLUMN dlock_queue.ticket IS 'number of the ticket; the fence of an exclusive holder';
COMMENT ON COLUMN dlock_queue.name IS 'name of the lock';
COMMENT ON COLUMN dlock_queue.lease IS 'lease that keeps the ticket; the number of the ticket if the lease is its own';
COMMENT ON COLUMN dlock_queue.granted IS 'true for a holder, false for a waiter';
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
COMMENT ON COLUMN dlock_queue.ttl IS 'how long its own lease lives without being renewed; NULL if it has none';
COMMENT ON COLUMN dlock_queue.durability IS 'durability of its lease, as in dlock_queue_lease';
COMMENT ON COLUMN dlock_queue.system IS 'system identifier of the cluster that the row belongs to';
COMMENT ON COLUMN dlock_queue.database IS 'database that the row belongs to';

-- Sessions look for a name here until the rows are loaded.
CREATE INDEX dlock_queue_name ON dlock_queue (name);
COMMENT ON INDEX dlock_queue_name IS
'for sessions that ask for a lock before the tables of leases have been loaded';

-- A publication FOR ALL TABLES includes the tables of extensions.  Rows that a
-- subscription brings belong to another server, and are dropped.
CREATE FUNCTION dlock_drop_replicated()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_drop_replicated'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_drop_replicated() IS
'trigger of the tables of leases: drop changes that come by logical replication';

CREATE FUNCTION dlock_refuse_truncate()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_refuse_truncate'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_refuse_truncate() IS
'trigger of the tables of leases: refuse TRUNCATE';

CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_queue
    FOR EACH ROW EXECUTE FUNCTION dlock_drop_replicated();
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_queue_lease
    FOR EACH ROW EXECUTE FUNCTION dlock_drop_replicated();
CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_queue
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_refuse_truncate();
CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_queue_lease
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_refuse_truncate();
ALTER TABLE dlock_queue
    ENABLE REPLICA TRIGGER dlock_replicated,
    ENABLE ALWAYS TRIGGER dlock_truncated;
ALTER TABLE dlock_queue_lease
    ENABLE REPLICA TRIGGER dlock_replicated,
    ENABLE ALWAYS TRIGGER dlock_truncated;
COMMENT ON TRIGGER dlock_replicated ON dlock_queue IS
'drops changes that come by logical replication';
COMMENT ON TRIGGER dlock_replicated ON dlock_queue_lease IS
'drops changes that come by logical replication';
COMMENT ON TRIGGER dlock_truncated ON dlock_queue IS
'refuses TRUNCATE';
COMMENT ON TRIGGER dlock_truncated ON dlock_queue_lease IS
'refuses TRUNCATE';

--
-- Versions
--
-- The role is kept by name, because OIDs differ after a restore.
--
CREATE TABLE dlock_versions (
    name text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL CHECK (version OPERATOR(pg_catalog.>) 0::pg_catalog.int8),
    bumped_by name,
    bumped_at timestamptz
);
SELECT pg_catalog.pg_extension_config_dump('dlock_versions', '');
COMMENT ON TABLE dlock_versions IS
'the version of every name that was ever bumped';
COMMENT ON COLUMN dlock_versions.name IS 'name, compared byte by byte';
COMMENT ON COLUMN dlock_versions.version IS 'how often it was bumped';
COMMENT ON COLUMN dlock_versions.bumped_by IS 'role that bumped it last';
COMMENT ON COLUMN dlock_versions.bumped_at IS 'time of the last bump';

--
-- Reservations
--
-- A row names its role, because OIDs differ after a restore.  It counts for the
-- role that had this name when the row was stored here, and for no role that
-- gets the name later.  The OID, or 0 if there is no such role, is computed for
-- each row, also of COPY and of a restore without triggers, and never dumped.
--
-- Immutable, because a stored column requires that.
CREATE FUNCTION dlock_role_oid(role name)
RETURNS oid
AS 'MODULE_PATHNAME', 'dlock_role_oid'
LANGUAGE C IMMUTABLE PARALLEL SAFE;
COMMENT ON FUNCTION dlock_role_oid(name) IS
'OID of the role that has this name now, 0 if there is none; for dlock_reservations';

CREATE TABLE dlock_reservations (
    prefix text COLLATE "C" PRIMARY KEY,
    owner name NOT NULL,
    role oid GENERATED ALWAYS AS (dlock_role_oid(owner)) STORED
);
SELECT pg_catalog.pg_extension_config_dump('dlock_reservations', '');
COMMENT ON TABLE dlock_reservations IS
'names that are kept for a role';
COMMENT ON COLUMN dlock_reservations.prefix IS 'what these names begin with, compared byte by byte';
COMMENT ON COLUMN dlock_reservations.owner IS 'name of the role that, with those that have its privileges, may use them';
COMMENT ON COLUMN dlock_reservations.role IS 'OID of the role that had this name when the row was written; 0 if there was none';

CREATE FUNCTION dlock_reservations_changed()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_reservations_changed'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_reservations_changed() IS
'trigger of dlock_reservations: have all sessions read the table again';

CREATE TRIGGER dlock_changed AFTER INSERT OR UPDATE OR DELETE ON dlock_reservations
    FOR EACH ROW EXECUTE FUNCTION dlock_reservations_changed();
CREATE TRIGGER dlock_truncated AFTER TRUNCATE ON dlock_reservations
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_reservations_changed();
-- also for rows that a restore or logical replication writes
ALTER TABLE dlock_reservations
    ENABLE ALWAYS TRIGGER dlock_changed,
    ENABLE ALWAYS TRIGGER dlock_truncated;
COMMENT ON TRIGGER dlock_changed ON dlock_reservations IS
'has all sessions read the table again';
COMMENT ON TRIGGER dlock_truncated ON dlock_reservations IS
'has all sessions read the table again';

--
-- How many permits locks have, whatever requests say
--
-- A constraint, because pg_restore can disable triggers.  PostgreSQL checks it
-- before each row is written.
--
CREATE FUNCTION dlock_note_slots(name text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_note_slots'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_note_slots(text) IS
'constraint of dlock_slots: a row counts once it is committed; always true';

CREATE TABLE dlock_slots (
    name text COLLATE "C" PRIMARY KEY
        CHECK (pg_catalog.octet_length(name) OPERATOR(pg_catalog.>=) 1 AND
               pg_catalog.octet_length(name) OPERATOR(pg_catalog.<=) 255),
    slots integer NOT NULL CHECK (slots OPERATOR(pg_catalog.>=) 1),
    CONSTRAINT dlock_slots_noted CHECK (dlock_note_slots(name))
);
COMMENT ON CONSTRAINT dlock_slots_noted ON dlock_slots IS
'has its rows count once they are committed';
SELECT pg_catalog.pg_extension_config_dump('dlock_slots', '');
COMMENT ON TABLE dlock_slots IS
'how many permits locks have, whatever requests say';
COMMENT ON COLUMN dlock_slots.name IS 'name of the lock';
COMMENT ON COLUMN dlock_slots.slots IS 'how many permits there are';

CREATE FUNCTION dlock_slots_changed()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_slots_changed'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_slots_changed() IS
'trigger of dlock_slots: a row that is gone counts no more once that is committed';

CREATE TRIGGER dlock_changed AFTER UPDATE OR DELETE ON dlock_slots
    FOR EACH ROW EXECUTE FUNCTION dlock_slots_changed();
CREATE TRIGGER dlock_truncated BEFORE TRUNCATE ON dlock_slots
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_slots_changed();
-- also for rows that a restore or logical replication writes
ALTER TABLE dlock_slots
    ENABLE ALWAYS TRIGGER dlock_changed,
    ENABLE ALWAYS TRIGGER dlock_truncated;
COMMENT ON TRIGGER dlock_changed ON dlock_slots IS
'has a row that is gone count no more once that is committed';
COMMENT ON TRIGGER dlock_truncated ON dlock_slots IS
'has rows that are gone count no more once that is committed';

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

CREATE FUNCTION dlock_release_all()
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_release_all'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_release_all() IS
'end all holds, tickets and watches of this session in session scope';

CREATE FUNCTION dlock_enqueue(
    name text, channel text = NULL, shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_enqueue'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_enqueue(text, text, boolean, integer, integer, text) IS
'take a place in a lock''s queue and return its ticket at once; the grant is announced by NOTIFY';

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
-- Lease scope
--
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

CREATE FUNCTION dlock_renew(id bigint, ttl interval = NULL)
RETURNS integer
AS 'MODULE_PATHNAME', 'dlock_renew'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_renew(bigint, interval) IS
'give a lease, or a ticket''s own lease, its full ttl from now, or another ttl; return how many tickets it keeps, NULL if it is gone';

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
-- Tickets, of a session or a lease
--
CREATE FUNCTION dlock_wait(ticket bigint, timeout interval = NULL)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_wait'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_wait(bigint, interval) IS
'wait until an enqueued ticket is granted; false if the timeout passed first';

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

CREATE FUNCTION dlock_downgrade(ticket bigint)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_downgrade'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_downgrade(bigint) IS
'make an exclusive hold a shared one, in place; false if it is not held';

CREATE FUNCTION dlock_set_info(id bigint, info text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_set_info'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_set_info(bigint, text) IS
'change what a ticket or a lease says of itself; false if it is gone';

CREATE FUNCTION dlock_channel()
RETURNS text
AS 'MODULE_PATHNAME', 'dlock_channel'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_channel() IS
'listen on this session''s own channel from the commit on, and return its name';

--
-- How many permits
--
-- The function itself checks that a reservation of the name admits the role, or
-- that EXECUTE was granted to it.  EXECUTE granted to PUBLIC does not count.
--
CREATE FUNCTION dlock_set_slots(name text, slots integer)
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_set_slots'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_set_slots(text, integer) IS
'set how many permits a lock has, whatever requests say, from this transaction''s commit on; with NULL, as they say again';

--
-- Questions
--
CREATE FUNCTION dlock_is_held(name text, lease bigint = NULL)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_is_held'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_is_held(text, bigint) IS
'does this session hold the lock, in session or transaction scope; or with "lease", does that lease?';

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
'process ids of the sessions that keep a session waiting, for a lock of dlock or of PostgreSQL; 0 for a lease or a prepared transaction';

CREATE FUNCTION dlock_watch(name text, channel text = NULL)
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_watch'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_watch(text, text) IS
'be told by NOTIFY who holds a lock, now and at each change, until this session ends';

CREATE FUNCTION dlock_unwatch(name text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_unwatch'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_unwatch(text) IS
'watch a lock no more; false, with a warning, where this session does not watch it';

CREATE FUNCTION dlock_version()
RETURNS text
AS 'MODULE_PATHNAME', 'dlock_version'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_version() IS
'version of the library that this session has loaded';

--
-- Guards and versions
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
-- For administrators
--
CREATE FUNCTION dlock_force_release(ticket bigint)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_force_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_force_release(bigint) IS
'end a ticket of any session or lease, held or waiting, or the delay that it keeps';

CREATE FUNCTION dlock_force_close(lease bigint)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_force_close'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_force_close(bigint) IS
'end any lease, or the delay that keeps its locks closed, and return how many tickets that released; NULL if there is none';

CREATE FUNCTION dlock_advance_ticket(minimum bigint)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_advance_ticket'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_advance_ticket(bigint) IS
'see to it that no later ticket has a smaller number';

CREATE FUNCTION dlock_reset()
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_reset'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_reset() IS
'on a clone: end all leases of this database, and return how many';

CREATE FUNCTION dlock_version_forget(name text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_version_forget'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_version_forget(text) IS
'drop the version of a name, which is 0 again; false if it was never bumped';

CREATE FUNCTION dlock_stats_reset()
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_stats_reset'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_stats_reset() IS
'restart the counters of dlock_stats, dlock_wait_histogram and dlock_contention';

CREATE FUNCTION dlock_reserve(prefix text, owner regrole)
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_reserve'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_reserve(text, regrole) IS
'keep the names with a prefix for a role; of several prefixes that fit a name the longest counts';

CREATE FUNCTION dlock_unreserve(prefix text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_unreserve'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_unreserve(text) IS
'give the names with a prefix free again';

--
-- View dlock_locks
--
-- A view checks the caller's right to each function that it calls, so the
-- functions behind the views are open to PUBLIC.
--
CREATE FUNCTION dlock_lock_status(
    OUT name text, OUT ticket bigint, OUT mode text, OUT slots integer,
    OUT permits integer, OUT granted boolean, OUT "position" integer,
    OUT scope text, OUT pid integer, OUT lease bigint, OUT role name,
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
       l.scope, l.pid, l.lease, l.role, l.owner, l.info, l.channel,
       l.enqueued_at, l.granted_at, l.remaining, l.depth, l.pinned,
       l.blocked_by
  FROM dlock_lock_status() AS l;
COMMENT ON VIEW dlock_locks IS
'the holders and the queue of every lock in this database';
COMMENT ON COLUMN dlock_locks.name IS 'name of the lock';
COMMENT ON COLUMN dlock_locks.ticket IS 'number of the ticket; the fence of an exclusive holder';
COMMENT ON COLUMN dlock_locks.mode IS 'exclusive, shared or slots';
COMMENT ON COLUMN dlock_locks.slots IS 'permits that the lock has; NULL unless mode is slots';
COMMENT ON COLUMN dlock_locks.permits IS 'permits that this ticket takes';
COMMENT ON COLUMN dlock_locks.granted IS 'true for a holder; false for a waiter, and where only a delay or a guarded commit keeps the lock closed';
COMMENT ON COLUMN dlock_locks.position IS 'place in the queue, from 1; 0 for a holder, and for an ended ticket that keeps the lock closed';
COMMENT ON COLUMN dlock_locks.scope IS 'what the ticket lives and dies with: session, transaction or lease';
COMMENT ON COLUMN dlock_locks.pid IS 'process id of the session; NULL where a lease has the ticket';
COMMENT ON COLUMN dlock_locks.lease IS 'lease that keeps the ticket; NULL if none';
COMMENT ON COLUMN dlock_locks.role IS 'role that asked for the lock; with a lease, the one that opened it';
COMMENT ON COLUMN dlock_locks.owner IS 'owner given with a lease; NULL if none';
COMMENT ON COLUMN dlock_locks.info IS 'what the request says of itself';
COMMENT ON COLUMN dlock_locks.channel IS 'channel on which a grant is announced; NULL if none';
COMMENT ON COLUMN dlock_locks.enqueued_at IS 'when the ticket joined the queue; in session and transaction scope to within a few milliseconds';
COMMENT ON COLUMN dlock_locks.granted_at IS 'when the lock was granted, as exactly as enqueued_at where nobody waited; NULL for a waiter';
COMMENT ON COLUMN dlock_locks.remaining IS 'time until the lease runs out, or the delay that keeps the lock closed; NULL if none';
COMMENT ON COLUMN dlock_locks.depth IS 'acquires that a holder has still to undo';
COMMENT ON COLUMN dlock_locks.pinned IS 'true while a guarded commit keeps the lock from being handed over';
COMMENT ON COLUMN dlock_locks.blocked_by IS 'the holders in a waiter''s way, at most 16 of them, and the one request right before it';

CREATE FUNCTION dlock_locks(name text)
RETURNS SETOF dlock_locks
AS 'MODULE_PATHNAME', 'dlock_locks_of'
LANGUAGE C VOLATILE PARALLEL UNSAFE
ROWS 10;
COMMENT ON FUNCTION dlock_locks(text) IS
'the rows of the view dlock_locks for one lock, however many others there are';

--
-- View dlock_leases
--
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
COMMENT ON VIEW dlock_leases IS
'the leases of this database, those of single tickets included';
COMMENT ON COLUMN dlock_leases.lease IS 'number of the lease; where it is the own one of a ticket, that of the ticket';
COMMENT ON COLUMN dlock_leases.ttl IS 'how long it lives without being renewed';
COMMENT ON COLUMN dlock_leases.delay IS 'how long its locks stay closed after it has run out; NULL if not at all';
COMMENT ON COLUMN dlock_leases.remaining IS 'time until it runs out; NULL while a session keeps it, unless standbys count';
COMMENT ON COLUMN dlock_leases.attached_pid IS 'process id of the session that keeps it alive; NULL if none';
COMMENT ON COLUMN dlock_leases.role IS 'role that opened it';
COMMENT ON COLUMN dlock_leases.info IS 'what the client says of itself';
COMMENT ON COLUMN dlock_leases.opened_at IS 'when it was opened';
COMMENT ON COLUMN dlock_leases.renewed_at IS 'when it was last renewed';
COMMENT ON COLUMN dlock_leases.held IS 'tickets that hold a lock';
COMMENT ON COLUMN dlock_leases.waiting IS 'tickets that wait';

--
-- View dlock_stats
--
CREATE FUNCTION dlock_counters(
    OUT acquired bigint, OUT waited bigint, OUT released bigint,
    OUT busy bigint, OUT timeouts bigint, OUT canceled bigint,
    OUT deadlocks bigint, OUT wait_us bigint)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_counters'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_counters() IS
'function behind the view dlock_stats';

CREATE FUNCTION dlock_gauges(
    OUT waiting bigint, OUT oldest_wait interval, OUT held bigint,
    OUT leases bigint, OUT memory_used bigint, OUT memory_limit bigint,
    OUT worker_pid integer, OUT journal_lag interval,
    OUT stats_reset timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_gauges'
LANGUAGE C VOLATILE PARALLEL UNSAFE
ROWS 1;
COMMENT ON FUNCTION dlock_gauges() IS
'function behind the view dlock_stats, for what there is now';

CREATE VIEW dlock_stats AS
SELECT c.acquired, c.waited, c.released, c.busy, c.timeouts, c.canceled,
       c.deadlocks,
       pg_catalog.make_interval(secs =>
           c.wait_us::pg_catalog.float8 OPERATOR(pg_catalog./) 1e6::pg_catalog.float8) AS wait_time,
       g.waiting, g.oldest_wait, g.held, g.leases, g.memory_used,
       g.memory_limit, g.worker_pid, g.journal_lag, g.stats_reset
  FROM dlock_counters() AS c LEFT JOIN dlock_gauges() AS g ON true;
COMMENT ON VIEW dlock_stats IS
'what the locks of this database have seen, and what there is now';
COMMENT ON COLUMN dlock_stats.acquired IS 'locks granted';
COMMENT ON COLUMN dlock_stats.waited IS 'of these, granted after a wait';
COMMENT ON COLUMN dlock_stats.released IS 'locks given back';
COMMENT ON COLUMN dlock_stats.busy IS 'attempts that gave up at once';
COMMENT ON COLUMN dlock_stats.timeouts IS 'waits ended by their timeout';
COMMENT ON COLUMN dlock_stats.canceled IS 'waits ended by any other error';
COMMENT ON COLUMN dlock_stats.deadlocks IS 'waits ended to break a deadlock';
COMMENT ON COLUMN dlock_stats.wait_time IS 'time spent waiting';
COMMENT ON COLUMN dlock_stats.waiting IS 'tickets in queues';
COMMENT ON COLUMN dlock_stats.oldest_wait IS 'how long the first of them has waited; 0 if none';
COMMENT ON COLUMN dlock_stats.held IS 'tickets that hold a lock';
COMMENT ON COLUMN dlock_stats.leases IS 'leases, those of single tickets included';
COMMENT ON COLUMN dlock_stats.memory_used IS 'bytes that the locks of all databases take, about';
COMMENT ON COLUMN dlock_stats.memory_limit IS 'bytes that they may take';
COMMENT ON COLUMN dlock_stats.worker_pid IS 'process id of the background worker of this database; NULL if there is none';
COMMENT ON COLUMN dlock_stats.journal_lag IS 'how long the oldest change of a lease has waited to be written; 0 if none does';
COMMENT ON COLUMN dlock_stats.stats_reset IS 'time of the last reset';

--
-- View dlock_blockers
--
CREATE FUNCTION dlock_blocker_status(
    OUT pid integer, OUT lease bigint, OUT ticket bigint, OUT role oid,
    OUT info text, OUT kind text, OUT transaction xid, OUT holds text[],
    OUT since timestamptz, OUT blocked integer)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_blocker_status'
LANGUAGE C VOLATILE PARALLEL UNSAFE
ROWS 10;
COMMENT ON FUNCTION dlock_blocker_status() IS
'function behind the view dlock_blockers';

-- pg_stat_get_activity() shows only what the calling role may see.
CREATE VIEW dlock_blockers AS
SELECT b.pid, b.lease, b.ticket,
       pg_catalog.pg_get_userbyid(COALESCE(b.role, a.usesysid, p.ownerid)) AS role,
       COALESCE(b.info, p.gid) AS info,
       COALESCE(b.kind, a.state) AS state,
       b.holds, b.since, b.blocked, a.query
  FROM dlock_blocker_status() AS b
  LEFT JOIN pg_catalog.pg_stat_get_activity(NULL::integer) AS a
    ON a.pid OPERATOR(pg_catalog.=) b.pid
  LEFT JOIN pg_catalog.pg_prepared_xact() AS p
    ON p.transaction OPERATOR(pg_catalog.=) b.transaction
 ORDER BY b.blocked DESC, b.since, b.ticket;
COMMENT ON VIEW dlock_blockers IS
'who keeps sessions and tickets of this database waiting, and does not wait itself';
COMMENT ON COLUMN dlock_blockers.pid IS 'process id of the session; NULL for a lease and for a prepared transaction';
COMMENT ON COLUMN dlock_blockers.lease IS 'lease that has the ticket; NULL if none';
COMMENT ON COLUMN dlock_blockers.ticket IS 'of its tickets, the one that most wait for; NULL if none';
COMMENT ON COLUMN dlock_blockers.role IS 'role that asked for the lock; of a session without a ticket, the session''s';
COMMENT ON COLUMN dlock_blockers.info IS 'what is said of the ticket; of a prepared transaction, its name';
COMMENT ON COLUMN dlock_blockers.state IS 'of a session as in pg_stat_activity; otherwise lease, delay or prepared';
COMMENT ON COLUMN dlock_blockers.holds IS 'what it has that somebody waits for, of both kinds of locks; at most 16';
COMMENT ON COLUMN dlock_blockers.since IS 'since when somebody has waited for one of these';
COMMENT ON COLUMN dlock_blockers.blocked IS 'how many wait behind it, directly or not: sessions, and enqueued tickets';
COMMENT ON COLUMN dlock_blockers.query IS 'of a session, as in pg_stat_activity';

--
-- View dlock_contention
--
CREATE FUNCTION dlock_contention_status(
    OUT name text, OUT waits bigint, OUT wait_time interval,
    OUT max_wait interval, OUT timeouts bigint, OUT deadlocks bigint,
    OUT expirations bigint, OUT max_queue integer,
    OUT last_wait_at timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_contention_status'
LANGUAGE C VOLATILE PARALLEL UNSAFE
ROWS 100;
COMMENT ON FUNCTION dlock_contention_status() IS
'function behind the view dlock_contention';

CREATE VIEW dlock_contention AS
SELECT c.name, c.waits, c.wait_time, c.max_wait, c.timeouts, c.deadlocks,
       c.expirations, c.max_queue, c.last_wait_at
  FROM dlock_contention_status() AS c;
COMMENT ON VIEW dlock_contention IS
'the 1000 locks of this database that were waited for longest, all waits together';
COMMENT ON COLUMN dlock_contention.name IS 'name of the lock';
COMMENT ON COLUMN dlock_contention.waits IS 'waits for it, however they ended';
COMMENT ON COLUMN dlock_contention.wait_time IS 'how long these were together';
COMMENT ON COLUMN dlock_contention.max_wait IS 'how long the longest was';
COMMENT ON COLUMN dlock_contention.timeouts IS 'of the waits, ended by a timeout, or by lock_timeout';
COMMENT ON COLUMN dlock_contention.deadlocks IS 'of the waits, ended to break a deadlock';
COMMENT ON COLUMN dlock_contention.expirations IS 'leases that ran out while they held it';
COMMENT ON COLUMN dlock_contention.max_queue IS 'the longest queue that one of the waits has met, itself included';
COMMENT ON COLUMN dlock_contention.last_wait_at IS 'when the latest of the waits ended';

--
-- View dlock_wait_histogram
--
CREATE FUNCTION dlock_wait_counts(OUT le interval, OUT waits bigint)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_wait_counts'
LANGUAGE C VOLATILE PARALLEL UNSAFE
ROWS 23;
COMMENT ON FUNCTION dlock_wait_counts() IS
'function behind the view dlock_wait_histogram';

CREATE VIEW dlock_wait_histogram AS
SELECT h.le, h.waits FROM dlock_wait_counts() AS h;
COMMENT ON VIEW dlock_wait_histogram IS
'how long sessions have waited for locks of this database';
COMMENT ON COLUMN dlock_wait_histogram.le IS 'no longer than this; NULL for all waits';
COMMENT ON COLUMN dlock_wait_histogram.waits IS 'so many waits, those of shorter bounds included';

--
-- View dlock_version_usage
--
CREATE VIEW dlock_version_usage AS
SELECT v.bumped_by AS role,
       pg_catalog.count(*) AS versions,
       pg_catalog.sum(pg_catalog.pg_column_size(v.*)::pg_catalog.int8)::pg_catalog.int8 AS bytes,
       pg_catalog.min(v.bumped_at) AS oldest,
       pg_catalog.max(v.bumped_at) AS latest
  FROM dlock_versions AS v
 GROUP BY v.bumped_by;
COMMENT ON VIEW dlock_version_usage IS
'how many names'' versions there are, by the role that bumped them last';
COMMENT ON COLUMN dlock_version_usage.role IS 'role that bumped them last';
COMMENT ON COLUMN dlock_version_usage.versions IS 'how many names these are';
COMMENT ON COLUMN dlock_version_usage.bytes IS 'what their rows take, without the index';
COMMENT ON COLUMN dlock_version_usage.oldest IS 'time of the least recent bump';
COMMENT ON COLUMN dlock_version_usage.latest IS 'time of the last bump';

--
-- Rights
--
-- Users may call what they need, and read the views.  PUBLIC may not read the
-- tables, because a lock on one in an open transaction can block all sessions.
-- Administrators' functions are for superusers and roles to which they are
-- granted; trigger functions of dlock's tables are for no caller.
--
REVOKE ALL ON TABLE
    dlock_queue, dlock_queue_lease, dlock_versions, dlock_reservations,
    dlock_slots,
    dlock_locks, dlock_leases, dlock_stats, dlock_blockers, dlock_contention,
    dlock_wait_histogram, dlock_version_usage
FROM PUBLIC;
REVOKE ALL ON SEQUENCE dlock_ticket_seq FROM PUBLIC;
REVOKE ALL ON FUNCTION
    dlock_force_release(bigint), dlock_force_close(bigint),
    dlock_advance_ticket(bigint), dlock_reset(), dlock_version_forget(text),
    dlock_stats_reset(), dlock_reserve(text, regrole), dlock_unreserve(text),
    dlock_role_oid(name), dlock_note_slots(text), dlock_drop_replicated(),
    dlock_refuse_truncate(),
    dlock_reservations_changed(), dlock_slots_changed()
FROM PUBLIC;

-- This function checks the right itself; see above.
GRANT EXECUTE ON FUNCTION dlock_set_slots(text, integer) TO PUBLIC;

-- Revoke what default privileges, meant for a site's own objects, have granted
-- above.  pg_init_privs has each object that a REVOKE or GRANT here has named.
DO $$
DECLARE
    statement text;
BEGIN
    FOR statement IN
        SELECT pg_catalog.format('REVOKE ALL ON %s %s FROM %I',
                                 o.kind, o.name, pg_catalog.pg_get_userbyid(a.grantee))
          FROM (SELECT c.tableoid, c.oid, c.relowner, c.relacl,
                       CASE c.relkind WHEN 'S'::pg_catalog."char" THEN 'SEQUENCE' ELSE 'TABLE' END,
                       c.oid::pg_catalog.regclass::pg_catalog.text
                  FROM pg_catalog.pg_class AS c
                 UNION ALL
                SELECT p.tableoid, p.oid, p.proowner, p.proacl, 'ROUTINE',
                       p.oid::pg_catalog.regprocedure::pg_catalog.text
                  FROM pg_catalog.pg_proc AS p)
               AS o (class, id, owner, acl, kind, name)
          JOIN pg_catalog.pg_init_privs AS i
            ON i.classoid OPERATOR(pg_catalog.=) o.class
           AND i.objoid OPERATOR(pg_catalog.=) o.id
           AND i.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
          JOIN pg_catalog.pg_depend AS d
            ON d.classid OPERATOR(pg_catalog.=) o.class
           AND d.objid OPERATOR(pg_catalog.=) o.id
           AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
           AND d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char"
          JOIN pg_catalog.pg_extension AS e
            ON e.oid OPERATOR(pg_catalog.=) d.refobjid
           AND e.extname OPERATOR(pg_catalog.=) 'dlock'::pg_catalog.name
         CROSS JOIN LATERAL pg_catalog.aclexplode(o.acl) AS a
         WHERE a.grantee OPERATOR(pg_catalog.<>) o.owner
           AND a.grantee OPERATOR(pg_catalog.<>) 0::pg_catalog.oid
         GROUP BY o.kind, o.name, a.grantee
    LOOP
        EXECUTE statement;
    END LOOP;
END
$$;

GRANT SELECT ON TABLE
    dlock_locks, dlock_leases, dlock_stats, dlock_blockers, dlock_contention,
    dlock_wait_histogram, dlock_version_usage
TO PUBLIC;
-- The owner of a database may clean up in it.
GRANT EXECUTE ON FUNCTION dlock_force_release(bigint), dlock_force_close(bigint)
TO pg_database_owner;
