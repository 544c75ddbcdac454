-- a name and a row for each client
\set key 1000000000000 + :client_id
\if :version < 0
SELECT dlock_version_of(:key) AS version, version AS peer FROM versioned WHERE id = :client_id \gset
\endif
\if :turn = 0
SELECT dlock_version_bump(:key, :version) AS version, turn(2, 20) AS turn \gset
\else
UPDATE versioned SET version = version + 1 WHERE id = :client_id AND version = :peer RETURNING version AS peer, turn(2, 20) AS turn \gset
\endif
