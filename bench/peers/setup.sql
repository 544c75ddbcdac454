-- Tables that PostgreSQL's peers lock, and the rows that clients of all peers
-- change

CREATE EXTENSION dlock;

-- the numbers of locks in driver.c, from the common lock on
CREATE TABLE row_lock (id bigint PRIMARY KEY);
INSERT INTO row_lock SELECT generate_series(999999999999, 1000000001999);

CREATE TABLE lock_table (id bigint PRIMARY KEY);

-- with room for new versions of the rows
CREATE TABLE guarded (id integer PRIMARY KEY, value bigint)
WITH (fillfactor = 10);
INSERT INTO guarded SELECT generate_series(0, 99), 0;

VACUUM ANALYZE row_lock, lock_table, guarded;
