SELECT flood(:is_dlock);
\sleep 1800 s
