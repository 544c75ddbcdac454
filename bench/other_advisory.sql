\set key 1000000000000 + :client_id
SELECT pg_advisory_lock(:key);
SELECT pg_advisory_unlock(:key);
