-- a lease for each client; dlock's turns renew it
\if :lease = 0
SELECT dlock_lease_open('5 s') AS lease \gset
\endif
\if :turn = 0
SELECT dlock_renew(:lease), turn(2, 20) AS turn \gset
\else
SELECT noop_renew(:lease), turn(2, 20) AS turn \gset
\endif
