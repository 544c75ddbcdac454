-- a name for each client, in this arrangement's turn
\set key :client_id + :first
SELECT dlock_acquire(:key);
SELECT dlock_release(:key), until_turn(:kind, :kinds, 200) AS pause \gset
\if :pause > 0
\sleep :pause us
\endif
