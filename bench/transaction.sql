-- a name for each client
\set key 1000000000000 + :client_id
\if :turn = 0
BEGIN;
SELECT dlock_xact_acquire(:key), turn(3, 20) AS turn \gset
COMMIT;
\elif :turn = 1
BEGIN;
SELECT pg_advisory_xact_lock(:key), turn(3, 20) AS turn \gset
COMMIT;
\else
BEGIN;
SELECT noop_acquire(:key), turn(3, 20) AS turn \gset
COMMIT;
\endif
