-- one of many leases, with a random ttl
\set ttl random(60000, 600000)
SELECT dlock_lease_open(make_interval(secs => :ttl / 1000.0));
