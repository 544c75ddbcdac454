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
CREATE OR REPLACE VIEW dlock_stats AS
SELECT c.acquired, c.waited, c.released, c.busy, c.timeouts, c.canceled,
       c.deadlocks,
       pg_catalog.make_interval(secs =>
           c.wait_us::pg_catalog.float8 OPERATOR(pg_catalog./) 1e6::pg_catalog.float8) AS wait_time
  FROM dlock_counters() AS c;

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
'trigger of the tables of dlock: what becomes of rows that come by logical replication';

CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_queue
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('live');
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_queue_lease
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('live');
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_versions
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('versions');
CREATE TRIGGER dlock_replicated BEFORE INSERT OR UPDATE OR DELETE ON dlock_reservations
    FOR EACH ROW EXECUTE FUNCTION dlock_replicated('reservations');
ALTER TABLE dlock_queue ENABLE REPLICA TRIGGER dlock_replicated;
ALTER TABLE dlock_queue_lease ENABLE REPLICA TRIGGER dlock_replicated;
ALTER TABLE dlock_versions ENABLE REPLICA TRIGGER dlock_replicated;
ALTER TABLE dlock_reservations ENABLE REPLICA TRIGGER dlock_replicated;
COMMENT ON TRIGGER dlock_replicated ON dlock_queue IS
'drops what comes by logical replication';
COMMENT ON TRIGGER dlock_replicated ON dlock_queue_lease IS
'drops what comes by logical replication';
COMMENT ON TRIGGER dlock_replicated ON dlock_versions IS
'takes from logical replication what is greater';
COMMENT ON TRIGGER dlock_replicated ON dlock_reservations IS
'takes from logical replication what is not reserved here';

--
-- For administrators: superusers, and whom they grant it to
--
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
