-- a name and a row for each client
\set key 1000000000000 + :client_id
\if :fence = 0
SELECT dlock_acquire(:key) AS fence \gset
\endif
\if :turn = 0
BEGIN;
SELECT dlock_guard(:key, :fence);
UPDATE guarded SET value = value + 1 WHERE id = :client_id RETURNING turn(3, 20) AS turn \gset
COMMIT;
\elif :turn = 1
BEGIN;
SELECT noop_guard(:key, :fence);
UPDATE guarded SET value = value + 1 WHERE id = :client_id RETURNING turn(3, 20) AS turn \gset
COMMIT;
\else
BEGIN;
UPDATE guarded SET value = value + 1 WHERE id = :client_id RETURNING turn(3, 20) AS turn \gset
COMMIT;
\endif
