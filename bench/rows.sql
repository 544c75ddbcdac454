-- a lease and a name for each client
\if :lease = 0
SELECT dlock_lease_open('1 s', attach => true) AS lease \gset
\endif
\set key 1000000000000 + :client_id
SELECT dlock_release_ticket(dlock_lease_acquire(:key, :lease));
