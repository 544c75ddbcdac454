"""Locks of dlock in an application that uses psycopg2, and nothing else"""

import select
import unittest
from contextlib import closing, contextmanager
from datetime import timedelta

import psycopg2
from psycopg2 import errors
from python_stack import (
    ERRORS, TIMEOUT, Holder, StackTest, is_free, main)


def connect():
    db = psycopg2.connect('')
    db.autocommit = True
    return closing(db)


def ask(db, sql, *values):
    with db.cursor() as cursor:
        cursor.execute(sql, values)
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


class Psycopg2(StackTest, unittest.TestCase):
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
            db.autocommit = False
            for error in None, KeyError:
                try:
                    with db:
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
            two.autocommit = False
            with two:
                ask(two, 'SELECT dlock_guard(%s, %s)', 'job', fence)
            self.assertIs(
                ask(two, 'SELECT dlock_release_ticket(%s)', fence), True)
            two.rollback()

    def test_ticket(self):
        """an enqueued ticket is awaited"""
        with Holder('queue') as holder, connect() as db:
            ticket = ask(db, 'SELECT dlock_enqueue(%s)', 'queue')
            asked = "SELECT dlock_wait(%s, '0')"
            self.assertFalse(ask(db, asked, ticket))
            holder.release()
            # it may have come with an answer already
            while not db.notifies:
                self.assertTrue(select.select([db], [], [], TIMEOUT)[0])
                db.poll()
            self.assertIn('"granted"', db.notifies.pop().payload)
            self.assertTrue(ask(db, asked, ticket))
            self.assertEqual(ticket, ask(db, "SELECT dlock_fence('queue')"))

    def test_errors(self):
        """the class of each error, and its code"""
        classes = {
            '55P03': errors.LockNotAvailable,
            '40P01': errors.DeadlockDetected,
            '55L01': psycopg2.OperationalError,
            '42501': errors.InsufficientPrivilege,
            '25006': errors.ReadOnlySqlTransaction,
            '40001': errors.SerializationFailure}
        with Holder('busy'):
            for code, (*before, statement) in ERRORS.items():
                with connect() as db:
                    for sql in before:
                        ask(db, sql)
                    with self.assertRaises(psycopg2.Error) as failure:
                        ask(db, statement)
                    self.assertIs(type(failure.exception), classes[code])
                    self.assertEqual(failure.exception.pgcode, code)
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


if __name__ == '__main__':
    main()
