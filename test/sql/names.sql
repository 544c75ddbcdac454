--
-- Names: 1 to 255 bytes, compared byte by byte
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;

-- Do the two names denote different locks?
CREATE FUNCTION pg_temp.different(a text, b text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
	fence_a bigint := dlock_acquire(a);
	b_was_free boolean := NOT dlock_is_held(b);
	fence_b bigint := dlock_acquire(b);
	result boolean := b_was_free AND fence_a <> fence_b AND
		dlock_fence(a) = fence_a AND dlock_fence(b) = fence_b AND
		NOT dlock_check(a, fence_b) AND NOT dlock_check(b, fence_a);
BEGIN
	PERFORM dlock_release(a);
	result := result AND NOT dlock_is_held(a) AND dlock_is_held(b);
	PERFORM dlock_release_all();
	RETURN result;
END $$;

-- The function itself works.
SELECT pg_temp.different('a', 'b'), pg_temp.different('a', 'a');

SELECT what, pg_temp.different(a, b)
  FROM (VALUES
	(1, 'case', 'a', 'A'),
	(2, 'space behind', 'a', 'a '),
	(3, 'space before', 'a', ' a'),
	(4, 'spaces only', ' ', '  '),
	(5, 'prefix', 'a', 'aa'),
	(6, 'order', 'ab', 'ba'),
	(7, 'last of 255 bytes', repeat('x', 255), repeat('x', 254) || 'y'),
	(8, 'first of 255 bytes', repeat('x', 255), 'y' || repeat('x', 254)),
	(9, '254 and 255 bytes', repeat('x', 254), repeat('x', 255)),
	(10, 'composed', U&'\00E9', U&'e\0301'),
	(11, 'half and full width', 'a', U&'\FF41'),
	(12, 'sharp s', U&'stra\00DFe', 'strasse'),
	(13, 'dotless i', 'i', U&'\0131'),
	(14, 'soft hyphen', 'ab', U&'a\00ADb'),
	(15, 'line end', 'a', E'a\n'),
	(16, 'quotes', '''', '"'),
	(17, 'above the first plane', U&'\+01F512', U&'\+01F513')
  ) AS pairs (number, what, a, b)
 ORDER BY number;

-- A thousand names that differ little are a thousand locks.
SELECT count(DISTINCT dlock_acquire(n::text)) FROM generate_series(1, 1000) AS n;
SELECT count(*), count(DISTINCT name) FROM dlock_locks;
SELECT count(*) FROM generate_series(1, 1000) AS n WHERE NOT dlock_is_held(n::text);
SELECT dlock_release_all();

-- The limit is in bytes, not characters.
SELECT dlock_acquire(repeat('x', 255)) > 0,
	dlock_acquire(repeat(U&'\00E9', 127) || 'x') > 0,
	dlock_acquire(repeat(U&'\+01F512', 63)) > 0;
SELECT dlock_acquire(repeat(U&'\00E9', 128));
\echo :SQLSTATE
SELECT dlock_acquire(repeat(U&'\+01F512', 64));
\echo :SQLSTATE

-- The view returns the names unchanged.
SELECT length(name), octet_length(name),
	name IN (repeat('x', 255), repeat(U&'\00E9', 127) || 'x',
			 repeat(U&'\+01F512', 63)) AS same
  FROM dlock_locks ORDER BY ticket;
SELECT dlock_release(repeat('x', 255)),
	dlock_release(repeat(U&'\00E9', 127) || 'x'),
	dlock_release(repeat(U&'\+01F512', 63));

-- Special characters have no meaning in names.
SELECT dlock_acquire(name) > 0
  FROM unnest(ARRAY['%', '%s%n', '\', '*', 'a.b', '"A"', '''', 'NULL', E'\t', '{}']) AS name;
SELECT name FROM dlock_locks ORDER BY ticket;
SELECT dlock_acquire('%s%n', slots => 1);
SELECT dlock_release_all();

-- Other string types work, too.  A literal is a text.
SELECT dlock_acquire('a'::varchar(10)) = dlock_acquire('a'::name) AS same;
SELECT dlock_is_held('a');
SELECT dlock_release_all();
SELECT count(*) FROM dlock_locks;
