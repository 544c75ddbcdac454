-- Objects for bench/run

CREATE EXTENSION dlock;

-- the arguments and results are those of dlock_acquire and dlock_release
CREATE FUNCTION noop_acquire(
    name text, timeout interval = NULL, shared boolean = false,
    slots integer = NULL, permits integer = 1, info text = NULL)
RETURNS bigint AS :'library', 'bench_noop' LANGUAGE C;

CREATE FUNCTION noop_release(name text)
RETURNS boolean AS :'library', 'bench_noop' LANGUAGE C;

-- the same for dlock_renew and dlock_guard
CREATE FUNCTION noop_renew(id bigint)
RETURNS integer AS :'library', 'bench_noop' LANGUAGE C;

CREATE FUNCTION noop_guard(name text, fence bigint)
RETURNS void AS :'library', 'bench_noop' LANGUAGE C;

CREATE FUNCTION turn(kinds integer, length integer)
RETURNS integer AS :'library', 'bench_turn' LANGUAGE C;

-- Nanoseconds per pair, without a client.  PL/pgSQL adds little, because it
-- evaluates these assignments directly.
CREATE FUNCTION in_process(kind integer, pairs integer) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp();
    ignored boolean;
BEGIN
    IF kind = 0 THEN
        FOR i IN 1 .. pairs LOOP
            ignored := dlock_acquire('1000000000000') IS NULL;
            ignored := dlock_release('1000000000000');
        END LOOP;
    ELSIF kind = 1 THEN
        FOR i IN 1 .. pairs LOOP
            ignored := pg_advisory_lock(1000000000000) IS NULL;
            ignored := pg_advisory_unlock(1000000000000);
        END LOOP;
    ELSE
        FOR i IN 1 .. pairs LOOP
            ignored := noop_acquire('1000000000000') IS NULL;
            ignored := noop_release('1000000000000');
        END LOOP;
    END IF;
    RETURN extract(epoch FROM clock_timestamp() - began) * 1e9 / pairs;
END $$;

CREATE TABLE row_lock (id integer PRIMARY KEY);
INSERT INTO row_lock SELECT generate_series(0, 99);
VACUUM ANALYZE row_lock;

CREATE TABLE commits (id bigint PRIMARY KEY, name text);

CREATE TABLE notified (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY);

-- with room for new versions of the rows
CREATE TABLE guarded (id integer PRIMARY KEY, value bigint)
WITH (fillfactor = 10);
INSERT INTO guarded SELECT generate_series(0, 99), 0;
VACUUM ANALYZE guarded;

CREATE TABLE versioned (id integer PRIMARY KEY, version bigint)
WITH (fillfactor = 10);
INSERT INTO versioned SELECT generate_series(0, 99), 0;
VACUUM ANALYZE versioned;

-- The role that floods, and the role whose speed is measured
CREATE ROLE tenant LOGIN;
CREATE ROLE neighbour LOGIN;
CREATE FUNCTION flood(is_dlock boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. 100000000 LOOP
		IF is_dlock THEN
			PERFORM dlock_acquire('flood ' || i);
		ELSE
			PERFORM pg_advisory_lock(i);
		END IF;
	END LOOP;
EXCEPTION WHEN out_of_memory THEN
	-- keep the acquired locks
END $$;
ALTER ROLE tenant SET dlock.max_locks_per_session = 100000000;
