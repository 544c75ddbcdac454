-- a heartbeat for one of many leases
\set i random(1, 100000)
SELECT dlock_renew(lease) FROM leases WHERE i = :i;
