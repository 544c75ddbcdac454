-- A lock and a row of its own for every client, in one round trip; the turn takes
-- another one, so it is asked for after every fourth only.
\set key 1000000000000 + :client_id
\if :turn = 0
\startpipeline
SELECT dlock_xact_acquire(:key);
UPDATE guarded SET value = value + 1 WHERE id = :client_id;
\endpipeline
\elif :turn = 1
\startpipeline
SELECT pg_advisory_xact_lock(:key);
UPDATE guarded SET value = value + 1 WHERE id = :client_id;
\endpipeline
\elif :turn = 2
\startpipeline
SELECT id FROM row_lock WHERE id = :client_id FOR UPDATE;
UPDATE guarded SET value = value + 1 WHERE id = :client_id;
\endpipeline
\elif :turn = 3
\startpipeline
SELECT noop_acquire(:key);
UPDATE guarded SET value = value + 1 WHERE id = :client_id;
\endpipeline
\else
\startpipeline
UPDATE guarded SET value = value + 1 WHERE id = :client_id;
\endpipeline
\endif
\set number :number + 1
\if :number % 4 = 0
SELECT turn(5, 100) AS turn \gset
\endif
