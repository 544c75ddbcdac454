-- Objects for bench/shards/run

CREATE EXTENSION dlock;

CREATE FUNCTION until_turn(kind integer, kinds integer, length integer)
RETURNS integer AS :'library', 'bench_until_turn' LANGUAGE C;
