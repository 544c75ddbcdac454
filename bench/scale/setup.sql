-- What bench/scale/run calls to measure.

CREATE EXTENSION dlock;

-- microseconds that a statement takes with $1 = items, beyond what it takes with
-- 0; NULL where it passes statement_timeout
CREATE FUNCTION timed(statement text, items integer = 0) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz;
    nothing interval := CASE WHEN items = 0 THEN '0' END;
BEGIN
    FOR i IN 1 .. CASE WHEN items = 0 THEN 0 ELSE 5 END LOOP
        began := clock_timestamp();
        EXECUTE statement USING 0;
        nothing := least(nothing, clock_timestamp() - began);
    END LOOP;
    began := clock_timestamp();
    EXECUTE statement USING items;
    RETURN extract(epoch FROM clock_timestamp() - began - nothing) * 1e6;
EXCEPTION WHEN query_canceled THEN
    RETURN NULL;
END $$;

-- microseconds of each such call, the median of 20 rounds of so many: the
-- machine may do other things at times
CREATE FUNCTION timed_rounds(call text, calls integer) RETURNS float8
LANGUAGE sql AS $$
    SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY timed(
        'SELECT count(' || call || ') FROM generate_series(1, $1)', calls)) / calls
    FROM generate_series(1, 20)
$$;

CREATE FUNCTION pair() RETURNS boolean LANGUAGE sql AS
$$ SELECT dlock_acquire('beside') > 0 AND dlock_release('beside') $$;

-- on the lease with the least ttl of all
CREATE FUNCTION lease_pair() RETURNS boolean LANGUAGE sql AS
$$ SELECT dlock_release_ticket(dlock_ttl_acquire('beside', '10 s')) $$;
