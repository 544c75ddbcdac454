-- wait, release for the next waiter, and stay connected
SELECT dlock_acquire('parking'), dlock_release('parking');
\sleep 1800 s
