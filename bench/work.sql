-- A lock and a row for each client, in one round trip.  Reading the turn takes
-- another round trip, so only every fourth transaction reads it.
\set key 1000000000000 + :client_id
\startpipeline
\if :turn = 0
SELECT dlock_xact_acquire(:key);
\elif :turn = 1
SELECT pg_advisory_xact_lock(:key);
\elif :turn = 2
SELECT id FROM row_lock WHERE id = :client_id FOR UPDATE;
\elif :turn = 3
SELECT noop_acquire(:key);
\endif
UPDATE guarded SET value = value + 1 WHERE id = :client_id;
\endpipeline
\set number :number + 1
\if :number % 4 = 0
SELECT turn(5, 100) AS turn \gset
\endif
