-- hold a lock, and stay connected
SELECT dlock_acquire('session ' || :client_id);
\sleep 1800 s
