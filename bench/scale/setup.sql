-- Functions for bench/scale/run

CREATE EXTENSION dlock;

CREATE FUNCTION process_cpu(pid integer) RETURNS bigint
AS :'library', 'bench_process_cpu' LANGUAGE C;

-- processor time of this session and of dlock's processes for this database, in
-- nanoseconds
CREATE FUNCTION cpu() RETURNS numeric LANGUAGE sql AS $$
    SELECT pg_stat_clear_snapshot();
    SELECT sum(process_cpu(pid)) FROM pg_stat_activity
    WHERE pid = pg_backend_pid() OR
        backend_type LIKE 'dlock%' AND datname = current_database()
$$;

-- The time of a statement with $1 = items, less the time with $1 = 0, in
-- microseconds.  The first line is by the clock, the second by cpu().  The
-- second is empty if a process has ended.  After statement_timeout, no line.
CREATE FUNCTION timed(statement text, items integer = 0)
RETURNS SETOF float8 LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz;
    ended timestamptz;
    cpu_began numeric;
    nothing interval := CASE WHEN items = 0 THEN '0' END;
    cpu_nothing numeric := CASE WHEN items = 0 THEN 0 END;
    cpu_taken numeric;
BEGIN
    FOR i IN 0 .. CASE WHEN items = 0 THEN 0 ELSE 5 END LOOP
        cpu_began := cpu();
        began := clock_timestamp();
        EXECUTE statement USING CASE WHEN i < 5 THEN 0 ELSE items END;
        ended := clock_timestamp();
        IF items = 0 OR i = 5 THEN
            RETURN NEXT extract(epoch FROM ended - began - nothing) * 1e6;
            cpu_taken := cpu() - cpu_began - cpu_nothing;
            RETURN NEXT CASE WHEN cpu_taken >= 0 THEN cpu_taken / 1000 END;
        ELSE
            nothing := least(nothing, ended - began);
            cpu_nothing := least(cpu_nothing, cpu() - cpu_began);
        END IF;
    END LOOP;
EXCEPTION WHEN query_canceled THEN
    RETURN;
END $$;

-- The same times for one call: medians of 20 rounds, because other load varies
CREATE FUNCTION timed_rounds(call text, calls integer)
RETURNS SETOF float8 LANGUAGE sql AS $$
    SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY value)
    FROM (SELECT t.value, t.line FROM generate_series(1, 20) AS round,
            timed('SELECT count(' || call || ') FROM generate_series(1, $1)',
                calls + 0 * round) WITH ORDINALITY AS t (value, line)) AS t
    GROUP BY line ORDER BY line
$$;

CREATE FUNCTION pair() RETURNS boolean LANGUAGE sql AS
$$ SELECT dlock_acquire('beside') > 0 AND dlock_release('beside') $$;

-- on the lease with the shortest ttl
CREATE FUNCTION lease_pair() RETURNS boolean LANGUAGE sql AS
$$ SELECT dlock_release_ticket(dlock_ttl_acquire('beside', '10 s')) $$;
