-- one name for all clients
\set key 1000000000000
\if :turn = 0
SELECT dlock_acquire(:key);
SELECT dlock_release(:key), turn(2, 100) AS turn \gset
\else
SELECT pg_advisory_lock(:key);
SELECT pg_advisory_unlock(:key), turn(2, 100) AS turn \gset
\endif
