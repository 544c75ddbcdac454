\set ECHO none
--
-- What a call or a statement raises, with its SQLSTATE, for test/sql/*.sql
--
-- Their outputs must not depend on what is another number each time.  So a
-- lease, ticket or fence is shown as N1, N2 and so on if it is the first, the
-- second and so on of the numbers given, and as N otherwise; this session's
-- process as PID; the role that runs the tests as USER; and the OID of a role as N.
--
-- Not in pg_temp, so that they outlive a new connection and DISCARD ALL.  Nothing
-- of this file is to be seen in the outputs.
--

-- A row each for the SQLSTATE with the message, for the detail, and for the hint
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

-- The first of them, of a call that needs a SELECT before it
CREATE OR REPLACE FUNCTION error_of(call text, VARIADIC numbers bigint[] = '{}')
RETURNS text LANGUAGE sql AS $$
	SELECT * FROM explain_error('SELECT ' || call, VARIADIC numbers) LIMIT 1
$$;
\set ECHO all
