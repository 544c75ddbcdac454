\set key 1000000000000 + :client_id
SELECT dlock_acquire(:key);
SELECT dlock_release(:key);
