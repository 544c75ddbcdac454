SELECT flood(:is_dlock);
\sleep 3600 s
