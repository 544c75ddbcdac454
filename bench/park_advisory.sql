-- wait, release for the next waiter, and stay connected
SELECT pg_advisory_lock(1), pg_advisory_unlock(1);
\sleep 1800 s
