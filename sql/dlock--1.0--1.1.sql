/* sql/dlock--1.0--1.1.sql */

-- complain if script is sourced in psql, rather than via ALTER EXTENSION
\echo Use "ALTER EXTENSION dlock UPDATE TO '1.1'" to load this file. \quit

COMMENT ON COLUMN dlock_locks.blocked_by IS 'the holders in a waiter''s way, at most 16 of them, and the one request right before it';
