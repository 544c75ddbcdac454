--
-- Objects that other roles have created in the extension's schema or in
-- pg_temp are never run: not by CREATE EXTENSION, an update, a call, or a
-- query on a view.  This test uses its own database, because it plants all
-- such objects.
--
SELECT current_database() AS before \gset
CREATE DATABASE regress_dlock_planted;
\c regress_dlock_planted
-- Hide the warnings of calls whose lock, ticket or lease does not exist.
SET client_min_messages = error;
CREATE ROLE regress_dlock_planter;
CREATE SCHEMA target;
CREATE SCHEMA test;
GRANT CREATE, USAGE ON SCHEMA target TO regress_dlock_planter;
GRANT USAGE ON SCHEMA test TO PUBLIC;

-- Types of operands, and names of operators
CREATE TABLE test.type AS
SELECT row_number() OVER () AS number, type
  FROM unnest('{int2,int4,int8,float4,float8,numeric,text,name,varchar,oid,regrole,regclass,bool,interval,timestamptz,int8[],text[]}'::text[]) AS type;
CREATE TABLE test.operator AS
SELECT DISTINCT oprname::text AS name,
	o.oprname IN ('=', '<>', '<', '>', '<=', '>=') AS compares
  FROM pg_operator o
 WHERE oprname IN ('=', '<>', '<', '>', '<=', '>=', '+', '-', '*', '/', '%', '||', '~', '~~', '&&', '@>');
CREATE TABLE test.call (name text, statement text);
GRANT SELECT ON ALL TABLES IN SCHEMA test TO PUBLIC;

-- For each pair of types: functions, and operators of all names.  For each
-- type: an implicit cast to the planter's own type and, except for arrays, a
-- domain of the same name that calls a function for each value.
CREATE PROCEDURE test.plant(schema text) LANGUAGE plpgsql AS $$
DECLARE
	body text := 'LANGUAGE plpgsql AS $f$ BEGIN RAISE SQLSTATE ''PLANT'' USING MESSAGE = ''planted code was run''; END $f$';
	a record;
	b record;
	o record;
	f text;
BEGIN
	FOR a IN SELECT * FROM test.type LOOP
		FOREACH f IN ARRAY '{make_interval,pg_get_userbyid,pg_extension_config_dump}'::text[] LOOP
			EXECUTE format('CREATE FUNCTION %I.%I(secs %s) RETURNS interval %s', schema, f, a.type, body);
		END LOOP;
		FOR b IN SELECT * FROM test.type LOOP
			EXECUTE format('CREATE FUNCTION %I.planted(a %s, b %s) RETURNS %3$s %4$s', schema, a.type, b.type, body);
			EXECUTE format('CREATE FUNCTION %I.compared(a %s, b %s) RETURNS boolean %s', schema, a.type, b.type, body);
			FOR o IN SELECT * FROM test.operator LOOP
				EXECUTE format('CREATE OPERATOR %I.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = %1$I.%5$s)',
					schema, o.name, a.type, b.type,
					CASE WHEN o.compares THEN 'compared' ELSE 'planted' END);
			END LOOP;
		END LOOP;
	END LOOP;
	-- functions that the views call; a default would make calls ambiguous
	FOREACH f IN ARRAY '{dlock_lock_status,dlock_lease_status,dlock_counters,dlock_role_oid}'::text[] LOOP
		EXECUTE format('CREATE FUNCTION %I.%I(VARIADIC x text[]) RETURNS bigint %s', schema, f, body);
	END LOOP;
	EXECUTE format('CREATE FUNCTION %I.look(a anyelement) RETURNS boolean %s', schema, body);
	FOR a IN SELECT * FROM test.type WHERE type !~ '\[\]' LOOP
		EXECUTE format('CREATE DOMAIN %I.%I AS pg_catalog.%2$I CHECK (%1$I.look(VALUE))', schema, a.type);
	END LOOP;
	EXECUTE format('CREATE TYPE %I.planter AS (x pg_catalog.int4)', schema);
	FOR a IN SELECT * FROM test.type LOOP
		EXECUTE format('CREATE FUNCTION %I.to_planter(a pg_catalog.%s) RETURNS %1$I.planter %3$s', schema, a.type, body);
		EXECUTE format('CREATE CAST (pg_catalog.%s AS %I.planter) WITH FUNCTION %2$I.to_planter(pg_catalog.%1$s) AS IMPLICIT', a.type, schema);
	END LOOP;
END $$;

SET ROLE regress_dlock_planter;
CALL test.plant('target');
RESET ROLE;

-- All functions of the extension, with arguments that are not NULL, and all
-- its relations.  Each call in each round uses a lock of its own.  Calls may
-- fail, but must not run a planted object.
CREATE PROCEDURE test.find_calls(round text) LANGUAGE plpgsql AS $$
BEGIN
	DELETE FROM test.call;
	INSERT INTO test.call
	SELECT p.proname::text AS name,
		format('%s target.%I(%s)', CASE p.prokind WHEN 'p' THEN 'CALL' ELSE 'SELECT * FROM' END,
			p.proname,
			(SELECT string_agg(CASE t.typname
					WHEN 'text' THEN quote_literal(round || '/' || p.proname) || '::pg_catalog.text'
					WHEN '_text' THEN quote_literal('{' || round || '/all}') || '::pg_catalog.text[]'
					WHEN 'regrole' THEN '10::pg_catalog.oid::pg_catalog.regrole'
					WHEN 'name' THEN '''x''::pg_catalog.name'
					WHEN 'interval' THEN '''1h''::pg_catalog.interval'
					ELSE '1::pg_catalog.' || t.typname END, ', ' ORDER BY a.n)
			   FROM unnest(p.proargtypes) WITH ORDINALITY AS a (type, n)
			   JOIN pg_type t ON t.oid = a.type
			  WHERE a.n <= p.pronargs - p.pronargdefaults)) AS statement
	  FROM pg_depend d
	  JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
	 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
	   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock')
	   AND p.prorettype <> 'trigger'::regtype
	UNION ALL
	SELECT c.relname::text, 'SELECT count(*) FROM target.' || c.relname
	  FROM pg_depend d
	  JOIN pg_class c ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
	 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
	   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'dlock');
	EXECUTE format('CREATE TABLE test.%I AS TABLE test.call', round);
	EXECUTE format('GRANT SELECT ON test.%I TO PUBLIC', round);
END $$;

-- No operator and no cast here, because the caller's search_path applies.
CREATE FUNCTION test.is_caught(statement pg_catalog.text) RETURNS pg_catalog.bool LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN false;
EXCEPTION
	WHEN SQLSTATE 'PLANT' THEN RETURN true;
	WHEN OTHERS THEN RETURN false;
END $$;

-- The function detects planted code.
SET search_path = target, pg_catalog;
SELECT test.is_caught('SELECT 1::pg_catalog.int8 / 1::pg_catalog.float8'),
	test.is_caught('SELECT ''a''::text');
RESET search_path;

--
-- CREATE EXTENSION in the schema with the planted objects
--
CREATE EXTENSION dlock SCHEMA target;
CALL test.find_calls('one');
SELECT count(*) > 45 AS many FROM test.one;

-- A superuser queries all views and calls all functions.  The first
-- search_path is the most dangerous one.
SET search_path = target, pg_catalog;
BEGIN;
SELECT name FROM test.one WHERE test.is_caught(statement) ORDER BY name;
ROLLBACK;
SELECT target.dlock_version_bump('v'::pg_catalog.text, 0::pg_catalog.int8),
	target.dlock_version_bump('v'::pg_catalog.text, 1::pg_catalog.int8),
	target.dlock_version_of('v'::pg_catalog.text);
SELECT target.dlock_reserve('r/'::pg_catalog.text, 10::pg_catalog.oid::pg_catalog.regrole);
SELECT target.dlock_unreserve('r/'::pg_catalog.text);
SELECT wait_time IS NOT NULL FROM target.dlock_stats;
RESET search_path;
CALL test.find_calls('two');
SET search_path = target;
BEGIN;
SELECT name FROM test.two WHERE test.is_caught(statement) ORDER BY name;
ROLLBACK;
RESET search_path;
CALL test.find_calls('three');
BEGIN;
SELECT name FROM test.three WHERE test.is_caught(statement) ORDER BY name;
ROLLBACK;
SELECT target.dlock_release_all() > 0;

--
-- A role that can create only temporary objects.  Its calls access the tables
-- as the tables' owner.
--
CALL test.find_calls('five');
CALL test.find_calls('six');
GRANT USAGE ON SCHEMA target TO PUBLIC;
CREATE ROLE regress_dlock_visitor;
GRANT TEMPORARY ON DATABASE regress_dlock_planted TO regress_dlock_visitor;
SET SESSION AUTHORIZATION regress_dlock_visitor;
CREATE TEMPORARY TABLE dlock_versions (name text PRIMARY KEY, version bigint NOT NULL);
CREATE TEMPORARY TABLE dlock_reservations (prefix text PRIMARY KEY, owner name, role oid);
CREATE TEMPORARY TABLE dlock_queue (ticket bigint PRIMARY KEY);
CREATE TEMPORARY TABLE dlock_queue_lease (lease bigint PRIMARY KEY);
SELECT nspname AS temp FROM pg_namespace WHERE oid = pg_my_temp_schema() \gset
CALL test.plant(:'temp');
SET search_path = target, pg_temp, pg_catalog;
BEGIN;
SELECT name FROM test.five WHERE test.is_caught(statement) ORDER BY name;
ROLLBACK;
SELECT target.dlock_version_bump('w'::pg_catalog.text, 0::pg_catalog.int8),
	target.dlock_version_of('w'::pg_catalog.text);
SET search_path = pg_temp;
BEGIN;
SELECT name FROM test.six WHERE test.is_caught(statement) ORDER BY name;
ROLLBACK;
SELECT target.dlock_version_bump('w'::pg_catalog.text, 1::pg_catalog.int8),
	target.dlock_version_of('w'::pg_catalog.text);
SELECT pg_catalog.count(*) FROM pg_temp.dlock_versions;
RESET SESSION AUTHORIZATION;
RESET search_path;

DROP EXTENSION dlock;
-- At session end, the drops could take longer than DROP DATABASE waits.
DISCARD TEMP;
\c :before
DROP DATABASE regress_dlock_planted WITH (FORCE);
DROP ROLE regress_dlock_planter, regress_dlock_visitor;
