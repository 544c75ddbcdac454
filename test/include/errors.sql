\set ECHO none
--
-- Functions for test/sql/*.sql that show the error of a call or a statement,
-- with its SQLSTATE
--
-- Outputs must not contain numbers that differ from run to run.  The first of
-- the given numbers is shown as N1, the second as N2, and so on.  Other
-- tickets, fences and leases are shown as N, this session's process as PID, the
-- role that runs the tests as USER, and OIDs of roles as N.
--
-- The functions are not in pg_temp, because they must outlive a new connection
-- and DISCARD ALL.  ECHO is off, so that the outputs do not show this file.
--

-- One row each for the SQLSTATE with the message, the detail, and the hint
CREATE OR REPLACE FUNCTION explain_error(statement text, VARIADIC numbers bigint[] = '{}')
RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
	line text;
	detail text;
	hint text;
BEGIN
	EXECUTE statement;
	RETURN NEXT 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL,
		hint = PG_EXCEPTION_HINT;
	FOREACH line IN ARRAY ARRAY[sqlstate || ' ' || sqlerrm, detail, hint] LOOP
		FOR i IN 1 .. cardinality(numbers) LOOP
			line := regexp_replace(line, format('\m%s\M', numbers[i]), 'N' || i, 'g');
		END LOOP;
		line := regexp_replace(line, '\m\d{12,18}\M', 'N', 'g');
		line := regexp_replace(line, format('\mProcess %s\M', pg_backend_pid()), 'Process PID');
		line := replace(line, format('role "%s"', session_user), 'role "USER"');
		RETURN NEXT regexp_replace(line, '\mOID \d+', 'OID N');
	END LOOP;
END $$;

-- The first of these rows, for a call, to which this function adds SELECT
CREATE OR REPLACE FUNCTION error_of(call text, VARIADIC numbers bigint[] = '{}')
RETURNS text LANGUAGE sql AS $$
	SELECT * FROM explain_error('SELECT ' || call, VARIADIC numbers) LIMIT 1
$$;
\set ECHO all
