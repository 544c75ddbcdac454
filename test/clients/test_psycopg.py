"""Locks of dlock in an application that uses psycopg 3, without its package:
blocking, and with a pool where there is psycopg_pool"""

import unittest
from contextlib import contextmanager
from datetime import timedelta

import psycopg
from psycopg import errors
from python_stack import ERRORS, Holder, StackTest, is_free, main

try:
    import psycopg_pool
except ImportError:
    psycopg_pool = None


def connect():
    return psycopg.connect('', autocommit=True)


def ask(db, sql, *values):
    cursor = db.execute(sql, values)
    return cursor.fetchone()[0] if cursor.description else None


@contextmanager
def lock(db, name):
    fence = ask(db, 'SELECT dlock_acquire(%s)', name)
    try:
        yield fence
    finally:
        released = ask(db, 'SELECT dlock_release_ticket(%s)', fence)
    if not released:
        raise RuntimeError(f'lock {name} was lost')


class Psycopg(StackTest, unittest.TestCase):
    def test_timeout(self):
        """timeout and try"""
        with Holder('busy'), connect() as db:
            with self.assertRaises(errors.LockNotAvailable):
                ask(db, 'SELECT dlock_acquire(%s, timeout => %s)', 'busy',
                    timedelta(milliseconds=10))
            self.assertIsNone(ask(db, 'SELECT dlock_try_acquire(%s)', 'busy'))

    def test_exception(self):
        """an exception releases"""
        with connect() as db:
            with self.assertRaises(KeyError), lock(db, 'report'):
                self.assertFalse(is_free('report'))
                raise KeyError
            self.assertTrue(is_free('report'))

    def test_transaction(self):
        """transaction scope: commit and rollback"""
        with connect() as db:
            for error in None, KeyError:
                try:
                    with db.transaction():
                        ask(db, 'SELECT dlock_xact_acquire(%s)', 'account/7')
                        self.assertFalse(is_free('account/7'))
                        if error:
                            raise error
                except KeyError:
                    pass
                self.assertTrue(is_free('account/7'))

    def test_lease(self):
        """lease scope: over any connection, with a guard"""
        with connect() as one:
            fence = ask(one, 'SELECT dlock_ttl_acquire(%s, %s, owner => %s)',
                        'job', timedelta(hours=1), 'job/17')
        with connect() as two:
            self.assertEqual(ask(two, 'SELECT dlock_renew(%s)', fence), 1)
            with two.transaction():
                ask(two, 'SELECT dlock_guard(%s, %s)', 'job', fence)
            self.assertIs(
                ask(two, 'SELECT dlock_release_ticket(%s)', fence), True)

    def test_ticket(self):
        """an enqueued ticket is awaited"""
        heard = []
        with Holder('queue') as holder, connect() as db:
            # notifies() has nothing of what has come with an answer
            db.add_notify_handler(heard.append)
            ticket = ask(db, 'SELECT dlock_enqueue(%s)', 'queue')
            asked = "SELECT dlock_wait(%s, '0')"
            self.assertFalse(ask(db, asked, ticket))
            holder.release()
            while not ask(db, asked, ticket):
                if not heard:
                    next(db.notifies())
                heard.clear()
            self.assertEqual(ticket, ask(db, "SELECT dlock_fence('queue')"))

    def test_errors(self):
        """the class of each error, and its code"""
        classes = {
            '55P03': errors.LockNotAvailable,
            '40P01': errors.DeadlockDetected,
            '55L01': psycopg.OperationalError,
            '42501': errors.InsufficientPrivilege,
            '25006': errors.ReadOnlySqlTransaction,
            '40001': errors.SerializationFailure}
        with Holder('busy'):
            for code, (*before, statement) in ERRORS.items():
                with connect() as db:
                    for sql in before:
                        ask(db, sql)
                    with self.assertRaises(psycopg.Error) as failure:
                        ask(db, statement)
                    self.assertIs(type(failure.exception), classes[code])
                    self.assertEqual(failure.exception.sqlstate, code)
                    self.assertEqual(ask(db, 'SELECT 1'), 1)

    def test_interval(self):
        """what is an interval, and what is not"""
        with connect() as db:
            for value in timedelta(seconds=30), '30s', '30':
                self.assertEqual(
                    ask(db, 'SELECT %s::interval', value),
                    timedelta(seconds=30))
                ask(db, 'SELECT dlock_release_ticket(dlock_ttl_acquire('
                    "'a', %s))", value)
            for value in 30, 30.0:
                with self.assertRaises(errors.UndefinedFunction):
                    ask(db, "SELECT dlock_ttl_acquire('a', %s)", value)
                ask(db, 'SELECT dlock_release_ticket(dlock_ttl_acquire('
                    "'a', make_interval(secs => %s)))", value)


@unittest.skipUnless(psycopg_pool, 'psycopg_pool is not installed')
class Pool(StackTest, unittest.TestCase):
    def forget(self, **options):
        """Who gets the connection next, and is the lock free?"""
        with psycopg_pool.ConnectionPool(
                '', min_size=1, max_size=1, kwargs={'autocommit': True},
                **options) as pool:
            with pool.connection() as db:
                ask(db, "SELECT dlock_acquire('report')")
                pid = db.info.backend_pid
            # comes back in a worker of the pool's, and before it is lent again
            with pool.connection() as db:
                self.assertEqual(db.info.backend_pid, pid)
                return is_free('report')

    def test_pool(self):
        """a pool keeps a session's lock, and its `reset` releases it"""
        def reset(db):
            db.execute('SELECT dlock_release_all()')

        self.assertFalse(self.forget())
        self.assertTrue(self.forget(reset=reset))


if __name__ == '__main__':
    main()
