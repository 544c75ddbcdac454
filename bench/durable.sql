-- a lease for each client; a name for each client, or for each grant
\if :lease = 0
SELECT dlock_lease_open('1 s', attach => true) AS lease \gset
\endif
\set number :number + 1
\set key 1000000000000 + :client_id
\if :new_names
\set key :client_id * 1000000000 + :number
\endif
\if :turn = 0
SELECT dlock_release_ticket(dlock_lease_acquire(:key, :lease)), turn(2, 200) AS turn \gset
\else
\set id :client_id * 1000000000 + :number
INSERT INTO commits VALUES (:id, :key) RETURNING turn(2, 200) AS turn \gset
\endif
