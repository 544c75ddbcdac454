-- a lease and a name for each client, in this arrangement's turn
\if :lease = 0
SELECT dlock_lease_open('10 s', attach => true) AS lease \gset
\endif
\set key :client_id + :first
SELECT dlock_release_ticket(dlock_lease_acquire(:key, :lease)), until_turn(:kind, :kinds, 200) AS pause \gset
\if :pause > 0
\sleep :pause us
\endif
