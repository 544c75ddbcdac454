-- a name for each client
\set key 1000000000000 + :client_id
\if :turn = 0
SELECT dlock_acquire(:key);
SELECT dlock_release(:key), turn(3, 20) AS turn \gset
\elif :turn = 1
SELECT pg_advisory_lock(:key);
SELECT pg_advisory_unlock(:key), turn(3, 20) AS turn \gset
\else
SELECT noop_acquire(:key);
SELECT noop_release(:key), turn(3, 20) AS turn \gset
\endif
