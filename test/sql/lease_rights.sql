--
-- Leases: privileges
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS dlock;
RESET client_min_messages;
\i test/include/errors.sql

CREATE ROLE regress_dlock_owner;
CREATE ROLE regress_dlock_member IN ROLE regress_dlock_owner;
CREATE ROLE regress_dlock_noinherit NOINHERIT IN ROLE regress_dlock_owner;
CREATE ROLE regress_dlock_other;

-- All calls that need the owner's privileges, for a lease with a held ticket
-- and for a ticket with its own lease.  Each call must fail, so none changes
-- anything.
CREATE FUNCTION refused(lease bigint, held bigint, own bigint)
RETURNS TABLE (call text, result text)
LANGUAGE plpgsql AS $$
BEGIN
	FOR call IN VALUES ('dlock_renew($l)'), ('dlock_renew($o)'),
		('dlock_lease_close($l)'), ('dlock_lease_close($o)'),
		('dlock_lease_acquire(''new'', $l)'), ('dlock_try_lease_acquire(''new'', $l)'),
		('dlock_lease_acquire(''held'', $l)'),
		('dlock_lease_acquire_all(''{new}'', $l)'),
		('dlock_try_lease_acquire_all(''{new}'', $l)'),
		('dlock_lease_enqueue(''new'', $l, ''nobody'')'),
		('dlock_wait($h)'), ('dlock_wait($o, ''0'')'),
		('dlock_release_ticket($h)'), ('dlock_release_ticket($o)'),
		('dlock_release_at_commit($h)'), ('dlock_release_at_commit($o)'),
		('dlock_guard(''held'', $h)'), ('dlock_guard(''own'', $o)')
	LOOP
		result := error_of(replace(replace(replace(call, '$l', lease::text),
										   '$h', held::text), '$o', own::text));
		RETURN NEXT;
	END LOOP;
END $$;

--
-- Every role can use leases.
--
SET ROLE regress_dlock_owner;
SELECT dlock_lease_open('1h', info => 'info') AS l \gset
SELECT dlock_lease_acquire('held', :l, owner => 'owner', info => 'who I am') AS h,
	dlock_ttl_acquire('own', '1h') AS o \gset
SELECT dlock_lease_enqueue('held', :l, 'nobody') AS q,
	dlock_ttl_enqueue('own', '1h', 'nobody') AS oq \gset
SELECT dlock_renew(:l), dlock_renew(:o), dlock_wait(:q, '0'),
	dlock_lease_acquire_all('{x,y}', :l) > '{0}';
SELECT dlock_release_ticket(dlock_fence('x')), dlock_release_ticket(dlock_fence('y'));
BEGIN;
SELECT dlock_guard('held', :h), dlock_guard('own', :o);
COMMIT;
SELECT name, position, role, owner, info, channel FROM dlock_locks ORDER BY ticket;
SELECT ttl, role, info, held, waiting FROM dlock_leases ORDER BY lease;

--
-- A role cannot use another role's lease.
--
SET ROLE regress_dlock_other;
SELECT * FROM refused(:l, :h, :o);
\set VERBOSITY sqlstate
SELECT dlock_renew(:l);
SELECT dlock_release_ticket(:q);
\set VERBOSITY default
SELECT explain_error(format('SELECT dlock_renew(%s)', :l), :l);
-- queries that every role may make
SELECT dlock_check('held', :h), dlock_fence('held') = :h AS fence,
	dlock_fence('own') = :o AS fence;
-- The same owner string of two roles means two owners.
SELECT dlock_try_ttl_acquire('own', '1h'), dlock_try_ttl_acquire('own', '1h', owner => 'owner');
-- Every role sees all columns except the channel, which is shown only to roles
-- with the owner's privileges.
SELECT name, position, role, owner, info, channel FROM dlock_locks ORDER BY ticket;
SELECT lease IN (:l, :o, :oq) AS lease, ttl, role, info, held, waiting
  FROM dlock_leases ORDER BY lease;
-- No role can access the tables.
SELECT count(*) FROM dlock_queue;
\echo :SQLSTATE
SELECT count(*) FROM dlock_queue_lease;
\echo :SQLSTATE
DELETE FROM dlock_queue;
\echo :SQLSTATE
INSERT INTO dlock_queue_lease SELECT;
\echo :SQLSTATE
UPDATE dlock_queue SET granted = true;
\echo :SQLSTATE
TRUNCATE dlock_queue_lease;
\echo :SQLSTATE
SELECT dlock_force_release(:h);
\echo :SQLSTATE
RESET ROLE;

-- For an unknown lease, the error does not depend on privileges.
SET ROLE regress_dlock_other;
SELECT error_of('dlock_lease_acquire(''new'', 1)'), error_of('dlock_wait(1)'),
	error_of('dlock_guard(''held'', 1)') \gx
RESET ROLE;

--
-- A member has the owner's privileges if it inherits them.
--
SET ROLE regress_dlock_noinherit;
SELECT DISTINCT result FROM refused(:l, :h, :o);
SELECT count(*) FROM dlock_locks WHERE channel IS NOT NULL;
SET ROLE regress_dlock_member;
SELECT dlock_renew(:l), dlock_renew(:o), dlock_wait(:h), dlock_wait(:q, '0'),
	dlock_lease_acquire('held', :l, owner => 'owner') = :h AS same,
	dlock_lease_enqueue('held', :l, 'nobody') = :q AS same;
BEGIN;
SELECT dlock_guard('held', :h), dlock_guard('own', :o);
COMMIT;
SELECT name, channel FROM dlock_locks WHERE position > 0 ORDER BY ticket;
-- a ticket acquired with the lease belongs to the lease's role
SELECT dlock_lease_acquire('new', :l) AS n \gset
SELECT role FROM dlock_locks WHERE ticket = :n;
-- a ticket acquired without the lease belongs to the member
SELECT dlock_ttl_acquire('mine', '1h', owner => 'owner') AS m \gset
SET ROLE regress_dlock_owner;
SELECT error_of(format('dlock_renew(%s)', :m)), dlock_release_ticket(:n);
SELECT dlock_try_ttl_acquire('mine', '1h', owner => 'owner');
SET ROLE regress_dlock_member;
SELECT dlock_ttl_acquire('mine', '1h', owner => 'owner') = :m AS same;
BEGIN;
SELECT dlock_release_at_commit(:m);
COMMIT;
-- a former member has no privileges
RESET ROLE;
REVOKE regress_dlock_owner FROM regress_dlock_member;
SET ROLE regress_dlock_member;
SELECT DISTINCT result FROM refused(:l, :h, :o);
RESET ROLE;
GRANT regress_dlock_owner TO regress_dlock_member;
SET ROLE regress_dlock_member;
SELECT dlock_renew(:l);
RESET ROLE;

--
-- A SECURITY DEFINER function of the owner has the owner's privileges.
--
CREATE FUNCTION renew(id bigint) RETURNS integer
LANGUAGE sql SECURITY DEFINER AS 'SELECT dlock_renew($1)';
ALTER FUNCTION renew OWNER TO regress_dlock_owner;
SET ROLE regress_dlock_other;
SELECT renew(:l);
CREATE FUNCTION pg_temp.open_lease() RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS 'SELECT dlock_lease_open(''1h'')';
SET ROLE regress_dlock_owner;
SELECT pg_temp.open_lease() AS l2 \gset
SELECT role FROM dlock_leases WHERE lease = :l2;
RESET ROLE;
DROP FUNCTION renew(bigint), pg_temp.open_lease();
SELECT dlock_lease_close(:l2);

--
-- A superuser may make all these calls, and may revoke each ticket once.
--
SELECT dlock_renew(:l), dlock_wait(:q, '0');
SELECT dlock_force_release(:q), dlock_force_release(:q);
SELECT error_of(format('dlock_wait(%s)', :q));
SELECT dlock_force_release(:h), dlock_force_release(:h);
SELECT dlock_check('held', :h), dlock_fence('held');
SELECT dlock_force_release(:oq), dlock_force_release(:o), dlock_force_release(:l),
	dlock_force_release(1);
SELECT dlock_renew(:o) IS NULL AS gone, dlock_renew(:l);
SELECT name FROM dlock_locks;
-- and so may a role with EXECUTE on the function
GRANT EXECUTE ON FUNCTION dlock_force_release(bigint) TO regress_dlock_other;
SET ROLE regress_dlock_owner;
SELECT dlock_lease_acquire('held', :l, owner => 'owner') AS h,
	dlock_ttl_acquire('own', '1h') AS o \gset
SET ROLE regress_dlock_other;
SELECT dlock_force_release(:h), error_of(format('dlock_release_ticket(%s)', :o));
RESET ROLE;
REVOKE EXECUTE ON FUNCTION dlock_force_release(bigint) FROM regress_dlock_other;
SELECT name FROM dlock_locks;

--
-- Closing a lease by force
--
SET ROLE regress_dlock_owner;
SELECT dlock_lease_open('1h') AS f \gset
SELECT dlock_lease_acquire_all('{f1,f2}', :f) > '{0}', dlock_lease_enqueue('own', :f, 'nobody') > 0;
SET ROLE regress_dlock_other;
SELECT dlock_force_close(:f);
\echo :SQLSTATE
RESET ROLE;
GRANT EXECUTE ON FUNCTION dlock_force_close(bigint) TO regress_dlock_other;
SET ROLE regress_dlock_other;
SELECT error_of(format('dlock_lease_close(%s)', :f));
SELECT dlock_force_close(:f), dlock_force_close(:f);
SELECT dlock_force_close(0), dlock_force_close(-1);
SELECT dlock_force_close(NULL);
\echo :SQLSTATE
RESET ROLE;
REVOKE EXECUTE ON FUNCTION dlock_force_close(bigint) FROM regress_dlock_other;

--
-- The owner of the database, and roles with the owner's privileges
--
SET ROLE regress_dlock_owner;
SELECT dlock_lease_open('1h') AS f, dlock_ttl_acquire('s', '1h') AS s \gset
RESET ROLE;
SELECT pg_get_userbyid(datdba) AS was FROM pg_database
 WHERE datname = current_database() \gset
SELECT format('ALTER DATABASE %I OWNER TO regress_dlock_landlord', current_database()) AS give,
	format('ALTER DATABASE %I OWNER TO %I', current_database(), :'was') AS take \gset
CREATE ROLE regress_dlock_landlord;
CREATE ROLE regress_dlock_caretaker IN ROLE regress_dlock_landlord;
SET ROLE regress_dlock_caretaker;
SELECT dlock_force_close(:f);
\echo :SQLSTATE
RESET ROLE;
:give;
SET ROLE regress_dlock_caretaker;
SELECT dlock_force_close(:f), dlock_force_release(:s);
SELECT dlock_advance_ticket(1);
\echo :SQLSTATE
SELECT dlock_reset();
\echo :SQLSTATE
RESET ROLE;
:take;
SET ROLE regress_dlock_caretaker;
SELECT dlock_force_release(1);
\echo :SQLSTATE
RESET ROLE;
DROP ROLE regress_dlock_landlord, regress_dlock_caretaker;

--
-- A role has changed: it was renamed, ...
--
SET ROLE regress_dlock_owner;
SELECT dlock_lease_acquire('held', :l, owner => 'owner') AS h,
	dlock_ttl_acquire('mine', '1h', owner => 'me') AS m \gset
RESET ROLE;
ALTER ROLE regress_dlock_owner RENAME TO regress_dlock_renamed;
SET ROLE regress_dlock_renamed;
SELECT * FROM refused(:l, :h, :o);
SELECT explain_error(format('SELECT dlock_renew(%s)', :l), :l);
-- The renamed role does not get its former ticket by naming the same owner.
SELECT dlock_try_ttl_acquire('mine', '1h', owner => 'me');
SELECT name, role FROM dlock_locks ORDER BY ticket;
SET ROLE regress_dlock_member;
SELECT error_of(format('dlock_renew(%s)', :l));
RESET ROLE;
SELECT dlock_renew(:l), dlock_lease_acquire('held', :l, owner => 'owner') = :h AS same;
-- ... another role has taken the name, ...
CREATE ROLE regress_dlock_owner;
SET ROLE regress_dlock_owner;
SELECT DISTINCT result FROM refused(:l, :h, :o);
RESET ROLE;
DROP ROLE regress_dlock_owner;
-- ... the first role has its name again, ...
ALTER ROLE regress_dlock_renamed RENAME TO regress_dlock_owner;
SET ROLE regress_dlock_owner;
SELECT dlock_renew(:l), dlock_wait(:h), dlock_try_ttl_acquire('mine', '1h', owner => 'me') = :m AS same;
RESET ROLE;
-- ... it was dropped, which no lease prevents, ...
DROP ROLE regress_dlock_owner;
SET ROLE regress_dlock_member;
SELECT DISTINCT result FROM refused(:l, :h, :o);
RESET ROLE;
SELECT name, regexp_replace(role, '\d+', 'N') AS role FROM dlock_locks ORDER BY ticket;
SELECT DISTINCT regexp_replace(role, '\d+', 'N') AS role FROM dlock_leases;
-- ... or a new role has its name.
CREATE ROLE regress_dlock_owner;
SET ROLE regress_dlock_owner;
SELECT DISTINCT result FROM refused(:l, :h, :o);
SELECT dlock_try_ttl_acquire('mine', '1h', owner => 'me');
RESET ROLE;
SELECT dlock_renew(:l), dlock_release_ticket(:o), dlock_lease_close(:m);
SELECT dlock_lease_close(:l);
SELECT count(*) FROM dlock_locks;
SELECT count(*) FROM dlock_leases;

DROP FUNCTION refused(bigint, bigint, bigint);
DROP ROLE regress_dlock_owner, regress_dlock_member, regress_dlock_noinherit,
	regress_dlock_other;
