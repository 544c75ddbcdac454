/* sql/dlock--1.0--1.1.sql */

-- complain if script is sourced in psql, rather than via ALTER EXTENSION
\echo Use "ALTER EXTENSION dlock UPDATE TO '1.1'" to load this file. \quit

--
-- Statistics
--
-- Operators with their schema, and operands of exactly their types: what
-- matches only after a conversion loses to an operator that matches exactly,
-- whoever has made that in a schema of the search_path.
--
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

CREATE OR REPLACE VIEW dlock_stats AS
SELECT c.acquired, c.waited, c.released, c.busy, c.timeouts, c.canceled,
       c.deadlocks,
       pg_catalog.make_interval(secs =>
           c.wait_us::pg_catalog.float8 OPERATOR(pg_catalog./) 1e6::pg_catalog.float8) AS wait_time,
       g.waiting, g.oldest_wait, g.held, g.leases, g.memory_used,
       g.memory_limit, g.worker_pid, g.journal_lag, g.stats_reset
  FROM dlock_counters() AS c LEFT JOIN dlock_gauges() AS g ON true;
COMMENT ON VIEW dlock_stats IS
'what the locks of this database have seen, and what there is now';
COMMENT ON COLUMN dlock_stats.waiting IS 'tickets in queues';
COMMENT ON COLUMN dlock_stats.oldest_wait IS 'how long the first of them has waited; 0 if none';
COMMENT ON COLUMN dlock_stats.held IS 'tickets that hold a lock';
COMMENT ON COLUMN dlock_stats.leases IS 'leases, those of single tickets included';
COMMENT ON COLUMN dlock_stats.memory_used IS 'bytes that the locks of all databases take, about';
COMMENT ON COLUMN dlock_stats.memory_limit IS 'bytes that they may take';
COMMENT ON COLUMN dlock_stats.worker_pid IS 'process id of the background worker of this database; NULL if there is none';
COMMENT ON COLUMN dlock_stats.journal_lag IS 'how long the oldest change of a lease has waited to be written; 0 if none does';
COMMENT ON COLUMN dlock_stats.stats_reset IS 'since when is counted';

CREATE FUNCTION dlock_stats_reset()
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_stats_reset'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
-- who looks after the server counts on what is counted
REVOKE EXECUTE ON FUNCTION dlock_stats_reset() FROM PUBLIC;
COMMENT ON FUNCTION dlock_stats_reset() IS
'count anew, in dlock_stats, dlock_wait_histogram and dlock_contention';

CREATE FUNCTION dlock_wait_counts(OUT le interval, OUT waits bigint)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'dlock_wait_counts'
LANGUAGE C VOLATILE PARALLEL UNSAFE
ROWS 23;
COMMENT ON FUNCTION dlock_wait_counts() IS
'function behind the view dlock_wait_histogram';

CREATE VIEW dlock_wait_histogram AS
SELECT h.le, h.waits FROM dlock_wait_counts() AS h;
GRANT SELECT ON dlock_wait_histogram TO PUBLIC;
COMMENT ON VIEW dlock_wait_histogram IS
'how long sessions have waited for locks of this database';
COMMENT ON COLUMN dlock_wait_histogram.le IS 'no longer than this; NULL for all waits';
COMMENT ON COLUMN dlock_wait_histogram.waits IS 'so many waits, those of shorter bounds included';

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
GRANT SELECT ON dlock_contention TO PUBLIC;
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
-- Reservations
--
-- A reservation is for a role of a name, since that is what a dump can keep,
-- and for the role that had this name when the row was written here: for
-- nobody else who gets the name later.  The OID is computed as a row is
-- stored, whether by dlock_reserve, by COPY or by a restore without triggers;
-- it is 0 where there is no such role.  So it is never dumped.
--
-- Immutable, as a stored column needs it: its value stays what it was then.
CREATE FUNCTION dlock_role_oid(role name)
RETURNS oid
AS 'MODULE_PATHNAME', 'dlock_role_oid'
LANGUAGE C IMMUTABLE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_role_oid(name) IS
'OID of the role that has this name now, 0 if there is none; for dlock_reservations';

ALTER TABLE dlock_reservations
    ALTER COLUMN owner TYPE name
        USING pg_catalog.pg_get_userbyid(owner::pg_catalog.oid);
ALTER TABLE dlock_reservations
    ADD COLUMN role oid GENERATED ALWAYS AS (dlock_role_oid(owner)) STORED;
COMMENT ON COLUMN dlock_reservations.owner IS 'name of the role that, with those that have its privileges, may use them';
COMMENT ON COLUMN dlock_reservations.role IS 'OID of the role that had this name when the row was written; 0 if there was none';

-- Whoever has changed the table, all sessions read it again.
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
-- also for what a restore or logical replication writes
ALTER TABLE dlock_reservations
    ENABLE ALWAYS TRIGGER dlock_changed,
    ENABLE ALWAYS TRIGGER dlock_truncated;
COMMENT ON TRIGGER dlock_changed ON dlock_reservations IS
'has all sessions read the table again';
COMMENT ON TRIGGER dlock_truncated ON dlock_reservations IS
'has all sessions read the table again';

--
-- The tables of leases
--
-- A ticket's own lease has no delay.
ALTER TABLE dlock_queue
    DROP COLUMN delay,
    DROP COLUMN delayed;

-- After a restart, before they are read, a session asks whether a name is there.
CREATE INDEX dlock_queue_name ON dlock_queue (name);
COMMENT ON INDEX dlock_queue_name IS
'for sessions that ask for a lock before the tables of leases have been read';

--
-- The view dlock_locks
--
COMMENT ON COLUMN dlock_locks.blocked_by IS 'the holders in a waiter''s way, at most 16 of them, and the one request right before it';

COMMENT ON COLUMN dlock_locks.enqueued_at IS 'when the ticket joined the queue; in session and transaction scope to within a few milliseconds';
COMMENT ON COLUMN dlock_locks.granted_at IS 'when the lock was granted, as exactly as enqueued_at where nobody waited; NULL for a waiter';

CREATE FUNCTION dlock_locks(name text)
RETURNS SETOF dlock_locks
AS 'MODULE_PATHNAME', 'dlock_locks_of'
LANGUAGE C VOLATILE PARALLEL UNSAFE
ROWS 10;
COMMENT ON FUNCTION dlock_locks(text) IS
'the rows of the view dlock_locks for one lock, however many others there are';

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

-- pg_stat_get_activity() says of sessions what the role that asks may see.
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
GRANT SELECT ON dlock_blockers TO PUBLIC;
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

COMMENT ON FUNCTION dlock_blocking_pids(integer) IS
'process ids of the sessions that keep a session waiting, for a lock of dlock or of PostgreSQL; 0 for a lease';

--
-- Watching locks
--
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

--
-- Changing tickets and leases
--
CREATE FUNCTION dlock_set_info(id bigint, info text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_set_info'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_set_info(bigint, text) IS
'change what a ticket or a lease says of itself; false if it is gone';

CREATE FUNCTION dlock_downgrade(ticket bigint)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_downgrade'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_downgrade(bigint) IS
'make an exclusive hold a shared one, in place; false if it is not held';

-- An argument more, for a function that views and the like may use: it has to
-- stay the same function, and CREATE OR REPLACE cannot do that.  So its
-- signature is changed the hard way, to that of a model.  Calls that are stored
-- get the default of the new argument, as all that give fewer.
CREATE FUNCTION dlock_model(id bigint, ttl interval = NULL)
RETURNS integer
AS 'MODULE_PATHNAME', 'dlock_renew'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
UPDATE pg_catalog.pg_proc AS p
   SET pronargs = m.pronargs, pronargdefaults = m.pronargdefaults,
       proargtypes = m.proargtypes, proargnames = m.proargnames,
       proargdefaults = m.proargdefaults
  FROM pg_catalog.pg_proc AS m
 WHERE p.oid OPERATOR(pg_catalog.=) 'dlock_renew(pg_catalog.int8)'::pg_catalog.regprocedure::pg_catalog.oid
   AND m.oid OPERATOR(pg_catalog.=) 'dlock_model(pg_catalog.int8, pg_catalog.interval)'::pg_catalog.regprocedure::pg_catalog.oid;
DROP FUNCTION dlock_model(bigint, interval);
COMMENT ON FUNCTION dlock_renew(bigint, interval) IS
'give a lease, or a ticket''s own lease, its full ttl from now, or another ttl; return how many tickets it keeps, NULL if it is gone';

--
-- Questions
--
-- An argument more, as above
CREATE FUNCTION dlock_model(name text, lease bigint = NULL)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_is_held'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
UPDATE pg_catalog.pg_proc AS p
   SET pronargs = m.pronargs, pronargdefaults = m.pronargdefaults,
       proargtypes = m.proargtypes, proargnames = m.proargnames,
       proargdefaults = m.proargdefaults
  FROM pg_catalog.pg_proc AS m
 WHERE p.oid OPERATOR(pg_catalog.=) 'dlock_is_held(pg_catalog.text)'::pg_catalog.regprocedure::pg_catalog.oid
   AND m.oid OPERATOR(pg_catalog.=) 'dlock_model(pg_catalog.text, pg_catalog.int8)'::pg_catalog.regprocedure::pg_catalog.oid;
DROP FUNCTION dlock_model(text, bigint);
COMMENT ON FUNCTION dlock_is_held(text, bigint) IS
'does this session hold the lock, in session or transaction scope; or with "lease", does that lease?';

--
-- How many permits locks have, whatever requests say
--
CREATE TABLE dlock_slots (
    name text COLLATE "C" PRIMARY KEY
        CHECK (pg_catalog.octet_length(name) OPERATOR(pg_catalog.>=) 1 AND
               pg_catalog.octet_length(name) OPERATOR(pg_catalog.<=) 255),
    slots integer NOT NULL CHECK (slots OPERATOR(pg_catalog.>=) 1)
);
SELECT pg_catalog.pg_extension_config_dump('dlock_slots', '');
-- written by the function below alone
REVOKE ALL ON TABLE dlock_slots FROM PUBLIC;
GRANT SELECT ON TABLE dlock_slots TO PUBLIC;
COMMENT ON TABLE dlock_slots IS
'how many permits locks have, whatever requests say';
COMMENT ON COLUMN dlock_slots.name IS 'name of the lock';
COMMENT ON COLUMN dlock_slots.slots IS 'how many permits there are';

-- Whoever has changed the table, it counts once that is committed.
CREATE FUNCTION dlock_slots_changed()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_slots_changed'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_slots_changed() IS
'trigger of dlock_slots: what it says counts once that is committed';

CREATE TRIGGER dlock_changed AFTER INSERT OR UPDATE OR DELETE ON dlock_slots
    FOR EACH ROW EXECUTE FUNCTION dlock_slots_changed();
CREATE TRIGGER dlock_truncated AFTER TRUNCATE ON dlock_slots
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_slots_changed();
-- also for what a restore or logical replication writes
ALTER TABLE dlock_slots
    ENABLE ALWAYS TRIGGER dlock_changed,
    ENABLE ALWAYS TRIGGER dlock_truncated;
COMMENT ON TRIGGER dlock_changed ON dlock_slots IS
'what it says counts once that is committed';
COMMENT ON TRIGGER dlock_truncated ON dlock_slots IS
'what it says counts once that is committed';

-- For roles that a reservation of the name lets in, and for those to which it is
-- granted by name: the function looks, and what PUBLIC has is not enough.
CREATE FUNCTION dlock_set_slots(name text, slots integer)
RETURNS void
AS 'MODULE_PATHNAME', 'dlock_set_slots'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
GRANT EXECUTE ON FUNCTION dlock_set_slots(text, integer) TO PUBLIC;
COMMENT ON FUNCTION dlock_set_slots(text, integer) IS
'set how many permits a lock has, whatever requests say, from this transaction''s commit on; with NULL, as they say again';

--
-- Logical replication
--
-- Publications FOR ALL TABLES take in these tables.  The triggers are fired for
-- what comes from another server, and see to it that it does no harm here.
--
CREATE FUNCTION dlock_replicated()
RETURNS trigger
AS 'MODULE_PATHNAME', 'dlock_replicated'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_replicated() IS
'trigger of the tables of dlock: what becomes of what comes by logical replication';

CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_queue
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('live');
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_queue_lease
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('live');
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_versions
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('versions');
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_reservations
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('reservations');
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_slots
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('slots');
-- No trigger can keep a TRUNCATE from happening: the rows are kept, and put back.
CREATE TRIGGER dlock_replicated_truncate BEFORE TRUNCATE ON dlock_queue
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncated AFTER TRUNCATE ON dlock_queue
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncate BEFORE TRUNCATE ON dlock_queue_lease
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncated AFTER TRUNCATE ON dlock_queue_lease
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncate BEFORE TRUNCATE ON dlock_versions
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncated AFTER TRUNCATE ON dlock_versions
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncate BEFORE TRUNCATE ON dlock_reservations
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncated AFTER TRUNCATE ON dlock_reservations
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncate BEFORE TRUNCATE ON dlock_slots
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
CREATE TRIGGER dlock_replicated_truncated AFTER TRUNCATE ON dlock_slots
    FOR EACH STATEMENT EXECUTE FUNCTION dlock_replicated();
ALTER TABLE dlock_queue
    ENABLE REPLICA TRIGGER dlock_replicated,
    ENABLE REPLICA TRIGGER dlock_replicated_truncate,
    ENABLE REPLICA TRIGGER dlock_replicated_truncated;
ALTER TABLE dlock_queue_lease
    ENABLE REPLICA TRIGGER dlock_replicated,
    ENABLE REPLICA TRIGGER dlock_replicated_truncate,
    ENABLE REPLICA TRIGGER dlock_replicated_truncated;
ALTER TABLE dlock_versions
    ENABLE REPLICA TRIGGER dlock_replicated,
    ENABLE REPLICA TRIGGER dlock_replicated_truncate,
    ENABLE REPLICA TRIGGER dlock_replicated_truncated;
ALTER TABLE dlock_reservations
    ENABLE REPLICA TRIGGER dlock_replicated,
    ENABLE REPLICA TRIGGER dlock_replicated_truncate,
    ENABLE REPLICA TRIGGER dlock_replicated_truncated;
ALTER TABLE dlock_slots
    ENABLE REPLICA TRIGGER dlock_replicated,
    ENABLE REPLICA TRIGGER dlock_replicated_truncate,
    ENABLE REPLICA TRIGGER dlock_replicated_truncated;
COMMENT ON TRIGGER dlock_replicated ON dlock_queue IS
'drops what comes by logical replication';
COMMENT ON TRIGGER dlock_replicated ON dlock_queue_lease IS
'drops what comes by logical replication';
COMMENT ON TRIGGER dlock_replicated ON dlock_versions IS
'takes from logical replication what is greater';
COMMENT ON TRIGGER dlock_replicated ON dlock_reservations IS
'takes from logical replication what is not reserved here, and what changes';
COMMENT ON TRIGGER dlock_replicated ON dlock_slots IS
'takes from logical replication what is not set here, and what changes';
COMMENT ON TRIGGER dlock_replicated_truncate ON dlock_queue IS
'keeps the rows, where a TRUNCATE comes by logical replication';
COMMENT ON TRIGGER dlock_replicated_truncated ON dlock_queue IS
'puts them back';
COMMENT ON TRIGGER dlock_replicated_truncate ON dlock_queue_lease IS
'keeps the rows, where a TRUNCATE comes by logical replication';
COMMENT ON TRIGGER dlock_replicated_truncated ON dlock_queue_lease IS
'puts them back';
COMMENT ON TRIGGER dlock_replicated_truncate ON dlock_versions IS
'keeps the rows, where a TRUNCATE comes by logical replication';
COMMENT ON TRIGGER dlock_replicated_truncated ON dlock_versions IS
'puts them back';
COMMENT ON TRIGGER dlock_replicated_truncate ON dlock_reservations IS
'keeps the rows, where a TRUNCATE comes by logical replication';
COMMENT ON TRIGGER dlock_replicated_truncated ON dlock_reservations IS
'puts them back';
COMMENT ON TRIGGER dlock_replicated_truncate ON dlock_slots IS
'keeps the rows, where a TRUNCATE comes by logical replication';
COMMENT ON TRIGGER dlock_replicated_truncated ON dlock_slots IS
'puts them back';

--
-- Who bumped a version last, and when
--
-- By name, as a dump can keep it.  NULL in rows of version 1.0.
ALTER TABLE dlock_versions
    ADD COLUMN bumped_by name,
    ADD COLUMN bumped_at timestamptz;
COMMENT ON COLUMN dlock_versions.bumped_by IS 'role that bumped it last; NULL if that was before version 1.1';
COMMENT ON COLUMN dlock_versions.bumped_at IS 'when it was bumped last; NULL if that was before version 1.1';

CREATE VIEW dlock_version_usage AS
SELECT v.bumped_by AS role,
       pg_catalog.count(*) AS versions,
       pg_catalog.sum(pg_catalog.pg_column_size(v.*)::pg_catalog.int8)::pg_catalog.int8 AS bytes,
       pg_catalog.min(v.bumped_at) AS oldest,
       pg_catalog.max(v.bumped_at) AS latest
  FROM dlock_versions AS v
 GROUP BY v.bumped_by;
GRANT SELECT ON dlock_version_usage TO PUBLIC;
COMMENT ON VIEW dlock_version_usage IS
'how many names'' versions there are, by the role that bumped them last';
COMMENT ON COLUMN dlock_version_usage.role IS 'role that bumped them last; NULL if that was before version 1.1';
COMMENT ON COLUMN dlock_version_usage.versions IS 'how many names these are';
COMMENT ON COLUMN dlock_version_usage.bytes IS 'what their rows take, without the index';
COMMENT ON COLUMN dlock_version_usage.oldest IS 'when the one was bumped that was not for longest';
COMMENT ON COLUMN dlock_version_usage.latest IS 'when the last of them was bumped';

--
-- For administrators: superusers, and whom they grant it to
--
-- Who owns a database clears up in it; pg_database_owner is that role, whichever
-- it is, in each database.
--
COMMENT ON FUNCTION dlock_force_release(bigint) IS
'end a ticket of any session or lease, held or waiting';

CREATE FUNCTION dlock_force_close(lease bigint)
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_force_close'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
REVOKE EXECUTE ON FUNCTION dlock_force_close(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION dlock_force_close(bigint) TO pg_database_owner;
COMMENT ON FUNCTION dlock_force_close(bigint) IS
'end any lease, or the delay that keeps its locks closed, and return how many tickets that released; NULL if there is none';

CREATE FUNCTION dlock_version_forget(name text)
RETURNS boolean
AS 'MODULE_PATHNAME', 'dlock_version_forget'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
REVOKE EXECUTE ON FUNCTION dlock_version_forget(text) FROM PUBLIC;
COMMENT ON FUNCTION dlock_version_forget(text) IS
'drop the version of a name, which is 0 again; false if it was never bumped';

CREATE FUNCTION dlock_reset()
RETURNS bigint
AS 'MODULE_PATHNAME', 'dlock_reset'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
REVOKE EXECUTE ON FUNCTION dlock_reset() FROM PUBLIC;
COMMENT ON FUNCTION dlock_reset() IS
'on a clone: end all leases of this database, and return how many';

--
-- The version of the library
--
CREATE FUNCTION dlock_version()
RETURNS text
AS 'MODULE_PATHNAME', 'dlock_version'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION dlock_version() IS
'version of the library that this session has loaded';

--
-- Rights
--
-- No REVOKE and no GRANT here on what version 1.0 has made: they would make
-- initial privileges of all that was granted on it since, and no dump has those.
--
-- Default privileges are meant for what a site makes itself.  What they have
-- given is taken back wherever the scripts say who has what: tables, views, the
-- sequence, and functions that are not for everybody.  It is in the initial
-- privileges of these; what was granted later is not.  The owner can be another
-- one by now than the one who has given it there.
--
-- As with REVOKE ... CASCADE, what was passed on goes, too: a privilege is kept
-- if the owner has given it, or somebody who has it with the right to grant it.
WITH RECURSIVE given AS (
    SELECT i.classoid, i.objoid, p.item, a.grantee, a.privilege_type
      FROM pg_catalog.pg_extension AS e
      JOIN pg_catalog.pg_depend AS d
        ON d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
       AND d.refobjid OPERATOR(pg_catalog.=) e.oid
       AND d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char"
      JOIN pg_catalog.pg_init_privs AS i
        ON i.classoid OPERATOR(pg_catalog.=) d.classid
       AND i.objoid OPERATOR(pg_catalog.=) d.objid
     CROSS JOIN LATERAL pg_catalog.unnest(i.initprivs) AS p (item)
     CROSS JOIN LATERAL pg_catalog.aclexplode(ARRAY[p.item]) AS a
     WHERE e.extname OPERATOR(pg_catalog.=) 'dlock'::pg_catalog.name
       AND i.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
       AND a.grantee OPERATOR(pg_catalog.<>) a.grantor
       AND a.grantee OPERATOR(pg_catalog.<>) 0::pg_catalog.oid
       AND a.grantee OPERATOR(pg_catalog.<>) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid
), objects (classoid, objoid, objsubid, owner, acl) AS (
    SELECT o.*
      FROM (SELECT c.tableoid, c.oid, 0::pg_catalog.int4, c.relowner, c.relacl
              FROM pg_catalog.pg_class AS c
             UNION ALL
            SELECT c.tableoid, c.oid, t.attnum::pg_catalog.int4, c.relowner, t.attacl
              FROM pg_catalog.pg_class AS c
              JOIN pg_catalog.pg_attribute AS t
                ON t.attrelid OPERATOR(pg_catalog.=) c.oid
             UNION ALL
            SELECT f.tableoid, f.oid, 0::pg_catalog.int4, f.proowner, f.proacl
              FROM pg_catalog.pg_proc AS f) AS o (classoid, objoid, objsubid, owner, acl)
     WHERE (o.classoid, o.objoid) OPERATOR(pg_catalog.=) ANY
           (SELECT g.classoid, g.objoid FROM given AS g)
       AND o.acl IS NOT NULL
), others AS (
    SELECT o.classoid, o.objoid, o.objsubid, o.owner, a.grantor, a.grantee,
           a.privilege_type, a.is_grantable, a.place
      FROM objects AS o
     CROSS JOIN LATERAL pg_catalog.aclexplode(o.acl) WITH ORDINALITY
        AS a (grantor, grantee, privilege_type, is_grantable, place)
     WHERE NOT EXISTS (SELECT
                         FROM given AS g
                        WHERE g.classoid OPERATOR(pg_catalog.=) o.classoid
                          AND g.objoid OPERATOR(pg_catalog.=) o.objoid
                          AND g.grantee OPERATOR(pg_catalog.=) a.grantee
                          AND g.privilege_type OPERATOR(pg_catalog.=) a.privilege_type
                          AND o.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
                          AND o.owner OPERATOR(pg_catalog.=) a.grantor
                          AND o.owner OPERATOR(pg_catalog.<>) a.grantee)
), kept AS (
    SELECT h.*
      FROM others AS h
     WHERE h.grantor OPERATOR(pg_catalog.=) h.owner
     UNION
    SELECT h.*
      FROM kept AS k
      JOIN others AS h
        ON h.classoid OPERATOR(pg_catalog.=) k.classoid
       AND h.objoid OPERATOR(pg_catalog.=) k.objoid
       AND h.grantor OPERATOR(pg_catalog.=) k.grantee
       AND h.privilege_type OPERATOR(pg_catalog.=) k.privilege_type
       -- the right to grant it for a table is one for each column
       AND (k.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
            OR k.objsubid OPERATOR(pg_catalog.=) h.objsubid)
     WHERE k.is_grantable
), items AS (
    SELECT k.classoid, k.objoid, k.objsubid,
           pg_catalog.min(k.place) AS place,
           -- as text: before PostgreSQL 16, makeaclitem() takes one privilege
           pg_catalog.concat(
               CASE WHEN k.grantee OPERATOR(pg_catalog.<>) 0::pg_catalog.oid
                    THEN pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(k.grantee)::pg_catalog.text)
               END,
               '=',
               pg_catalog.string_agg(pg_catalog.split_part(pg_catalog.split_part(
                   pg_catalog.makeaclitem(0::pg_catalog.oid, k.grantor, k.privilege_type, k.is_grantable)::pg_catalog.text,
                   '/', 1), '=', 2), ''),
               '/',
               pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(k.grantor)::pg_catalog.text)
           )::pg_catalog.aclitem AS item
      FROM kept AS k
     GROUP BY k.classoid, k.objoid, k.objsubid, k.grantor, k.grantee
), nothing AS (
    -- an array without any item is no list of privileges
    SELECT o.classoid, o.objoid, o.objsubid,
           CASE WHEN o.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
                THEN ARRAY[pg_catalog.concat(r.name, '=/', r.name)::pg_catalog.aclitem]
           END AS acl
      FROM objects AS o
     CROSS JOIN LATERAL pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(o.owner)::pg_catalog.text) AS r (name)
), changed AS (
    SELECT o.classoid, o.objoid, o.objsubid, o.acl AS nothing,
           COALESCE((SELECT pg_catalog.array_agg(t.item ORDER BY t.place)
                       FROM items AS t
                      WHERE t.classoid OPERATOR(pg_catalog.=) o.classoid
                        AND t.objoid OPERATOR(pg_catalog.=) o.objoid
                        AND t.objsubid OPERATOR(pg_catalog.=) o.objsubid),
                    o.acl) AS acl
      FROM nothing AS o
), relations AS (
    UPDATE pg_catalog.pg_class AS c
       SET relacl = n.acl
      FROM changed AS n
     WHERE n.classoid OPERATOR(pg_catalog.=) c.tableoid
       AND n.objoid OPERATOR(pg_catalog.=) c.oid
       AND n.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
), columns AS (
    UPDATE pg_catalog.pg_attribute AS t
       SET attacl = n.acl
      FROM changed AS n
     WHERE n.classoid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid
       AND n.objoid OPERATOR(pg_catalog.=) t.attrelid
       AND n.objsubid OPERATOR(pg_catalog.=) t.attnum::pg_catalog.int4
), functions AS (
    UPDATE pg_catalog.pg_proc AS f
       SET proacl = n.acl
      FROM changed AS n
     WHERE n.classoid OPERATOR(pg_catalog.=) f.tableoid
       AND n.objoid OPERATOR(pg_catalog.=) f.oid
), initial AS (
    UPDATE pg_catalog.pg_init_privs AS i
       SET initprivs = COALESCE((SELECT pg_catalog.array_agg(p.item)
                                   FROM pg_catalog.unnest(i.initprivs) AS p (item)
                                  WHERE NOT p.item OPERATOR(pg_catalog.=) ANY
                                        (SELECT g.item
                                           FROM given AS g
                                          WHERE g.classoid OPERATOR(pg_catalog.=) i.classoid
                                            AND g.objoid OPERATOR(pg_catalog.=) i.objoid)),
                                n.nothing)
      FROM changed AS n
     WHERE n.classoid OPERATOR(pg_catalog.=) i.classoid
       AND n.objoid OPERATOR(pg_catalog.=) i.objoid
       AND n.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
       AND i.objsubid OPERATOR(pg_catalog.=) 0::pg_catalog.int4
)
-- what keeps such a role from being dropped, unless it has something left
DELETE FROM pg_catalog.pg_shdepend AS s
 USING changed AS n, pg_catalog.pg_database AS b
 WHERE b.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
   AND s.dbid OPERATOR(pg_catalog.=) b.oid
   AND s.classid OPERATOR(pg_catalog.=) n.classoid
   AND s.objid OPERATOR(pg_catalog.=) n.objoid
   AND s.objsubid OPERATOR(pg_catalog.=) n.objsubid
   AND s.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_authid'::pg_catalog.regclass::pg_catalog.oid
   AND (s.deptype OPERATOR(pg_catalog.=) 'a'::pg_catalog."char"
        AND NOT EXISTS (SELECT
                          FROM pg_catalog.aclexplode(n.acl) AS a
                         WHERE s.refobjid OPERATOR(pg_catalog.=) a.grantee
                            OR s.refobjid OPERATOR(pg_catalog.=) a.grantor)
        OR s.deptype OPERATOR(pg_catalog.=) 'i'::pg_catalog."char"
           AND EXISTS (SELECT
                         FROM given AS g
                        WHERE g.classoid OPERATOR(pg_catalog.=) n.classoid
                          AND g.objoid OPERATOR(pg_catalog.=) n.objoid
                          AND g.grantee OPERATOR(pg_catalog.=) s.refobjid));

-- dlock_force_release() is for the database's owner, too, as above.
UPDATE pg_catalog.pg_proc AS f
   SET proacl = pg_catalog.array_append(f.proacl, pg_catalog.makeaclitem(
           'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid, f.proowner,
           'EXECUTE', false))
 WHERE f.oid OPERATOR(pg_catalog.=) 'dlock_force_release(pg_catalog.int8)'::pg_catalog.regprocedure::pg_catalog.oid
   AND NOT EXISTS (SELECT
                     FROM pg_catalog.aclexplode(f.proacl) AS a
                    WHERE a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid);
UPDATE pg_catalog.pg_init_privs AS i
   SET initprivs = pg_catalog.array_append(i.initprivs, pg_catalog.makeaclitem(
           'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid, f.proowner,
           'EXECUTE', false))
  FROM pg_catalog.pg_proc AS f
 WHERE f.oid OPERATOR(pg_catalog.=) 'dlock_force_release(pg_catalog.int8)'::pg_catalog.regprocedure::pg_catalog.oid
   AND i.objoid OPERATOR(pg_catalog.=) f.oid
   AND i.classoid OPERATOR(pg_catalog.=) f.tableoid
   AND NOT EXISTS (SELECT
                     FROM pg_catalog.aclexplode(i.initprivs) AS a
                    WHERE a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid);
