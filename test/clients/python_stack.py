"""What the tests of Python's drivers and frameworks have in common.

Each is a program test_NAME.py beside this, which does what an application
would, in that driver's own way; this looks at the server for it, by psql, and
prints a line for each test.  libpq's environment variables say where the
server is; test/t/client_python_stacks.pl sets them, and reads what is printed.
"""

import os
import subprocess
import sys
import time
import unittest
from contextlib import contextmanager
from datetime import timedelta

TIMEOUT = int(os.environ.get('PG_TEST_TIMEOUT_DEFAULT', '180'))

# What each driver is to tell apart, and what brings it about, for a session
# that holds nothing.  The lock 'busy' is somebody else's.
ERRORS = {
    '55P03': ["SELECT dlock_acquire('busy', timeout => '10ms')"],
    # behind one's own place in the queue
    '40P01': ["SELECT dlock_enqueue('busy')", "SELECT dlock_acquire('busy')"],
    '55L01': ["SELECT dlock_guard('gone', 1)"],
    '42501': ["SELECT dlock_acquire('reserved/1')"],
    '25006': ['SET default_transaction_read_only = on',
              "SELECT dlock_version_bump('doc', 0)"],
    '40001': ["SELECT dlock_version_bump('doc', 7)"],
}


def admin(sql):
    """The result of somebody else's statements, as psql prints it"""
    return subprocess.run(
        ['psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-U', os.environ['ADMIN'],
         '-c', sql], check=True, capture_output=True, text=True).stdout.strip()


def is_free(name):
    """Can anybody else have it, at once?"""
    return admin(f"SELECT dlock_try_xact_acquire('{name}') IS NOT NULL") == 't'


def until(condition, *arguments):
    end = time.monotonic() + TIMEOUT
    while not condition(*arguments):
        if time.monotonic() > end:
            raise TimeoutError(f'waited for {condition.__name__} {arguments}')
        time.sleep(0.02)


def until_free(name):
    until(is_free, name)


def has_waiter(name):
    return admin("SELECT count(*) > 0 FROM dlock_locks"
                 f"('{name}') WHERE NOT granted") == 't'


class Holder:
    """Somebody else, who holds a lock on a lease"""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.fence = admin(f"SELECT dlock_ttl_acquire('{self.name}', '1h')")
        return self

    def release(self):
        admin(f'SELECT dlock_release_ticket({self.fence})')

    def __exit__(self, *_):
        admin(f'SELECT dlock_force_release({self.fence})')


def is_nothing_left():
    return admin('SELECT count(*) FROM dlock_locks') == '0'


class StackTest:
    """That nothing is left behind; beside unittest's classes"""

    def tearDown(self):
        try:
            # of sessions that are ending
            until(is_nothing_left)
        finally:
            # not in the way of the next test
            admin('SELECT count(dlock_force_release(ticket)) FROM dlock_locks')


class PsycopgTest(StackTest):
    """What psycopg2 and psycopg 3 do alike: with a driver, the attribute of its
    errors that has the code, connect(), ask() and transaction()"""

    @contextmanager
    def lock(self, db, name):
        fence = self.ask(db, 'SELECT dlock_acquire(%s)', name)
        try:
            yield fence
        finally:
            released = self.ask(db, 'SELECT dlock_release_ticket(%s)', fence)
        if not released:
            raise RuntimeError(f'lock {name} was lost')

    def test_timeout(self):
        """timeout and try"""
        with Holder('busy'), self.connect() as db:
            with self.assertRaises(self.driver.errors.LockNotAvailable):
                self.ask(db, 'SELECT dlock_acquire(%s, timeout => %s)', 'busy',
                         timedelta(milliseconds=10))
            self.assertIsNone(
                self.ask(db, 'SELECT dlock_try_acquire(%s)', 'busy'))

    def test_exception(self):
        """an exception releases"""
        with self.connect() as db:
            with self.assertRaises(KeyError), self.lock(db, 'report'):
                self.assertFalse(is_free('report'))
                raise KeyError
            self.assertTrue(is_free('report'))

    def test_transaction(self):
        """transaction scope: commit and rollback"""
        with self.connect() as db:
            for error in None, KeyError:
                try:
                    with self.transaction(db):
                        self.ask(db, 'SELECT dlock_xact_acquire(%s)',
                                 'account/7')
                        self.assertFalse(is_free('account/7'))
                        if error:
                            raise error
                except KeyError:
                    pass
                self.assertTrue(is_free('account/7'))

    def test_lease(self):
        """lease scope: over any connection, with a guard"""
        with self.connect() as one:
            fence = self.ask(
                one, 'SELECT dlock_ttl_acquire(%s, %s, owner => %s)', 'job',
                timedelta(hours=1), 'job/17')
        with self.connect() as two:
            self.assertEqual(self.ask(two, 'SELECT dlock_renew(%s)', fence), 1)
            with self.transaction(two):
                self.ask(two, 'SELECT dlock_guard(%s, %s)', 'job', fence)
            self.assertIs(
                self.ask(two, 'SELECT dlock_release_ticket(%s)', fence), True)

    def test_errors(self):
        """the class of each error, and its code"""
        errors = self.driver.errors
        classes = {
            '55P03': errors.LockNotAvailable,
            '40P01': errors.DeadlockDetected,
            '55L01': self.driver.OperationalError,
            '42501': errors.InsufficientPrivilege,
            '25006': errors.ReadOnlySqlTransaction,
            '40001': errors.SerializationFailure}
        with Holder('busy'):
            for code, (*before, statement) in ERRORS.items():
                with self.connect() as db:
                    for sql in before:
                        self.ask(db, sql)
                    with self.assertRaises(self.driver.Error) as failure:
                        self.ask(db, statement)
                    self.assertIs(type(failure.exception), classes[code])
                    self.assertEqual(
                        getattr(failure.exception, self.code), code)
                    self.assertEqual(self.ask(db, 'SELECT 1'), 1)

    def test_interval(self):
        """what is an interval, and what is not"""
        with self.connect() as db:
            for value in timedelta(seconds=30), '30s', '30':
                self.assertEqual(
                    self.ask(db, 'SELECT %s::interval', value),
                    timedelta(seconds=30))
                self.ask(db, 'SELECT dlock_release_ticket(dlock_ttl_acquire('
                         "'a', %s))", value)
            for value in 30, 30.0:
                with self.assertRaises(self.driver.errors.UndefinedFunction):
                    self.ask(db, "SELECT dlock_ttl_acquire('a', %s)", value)
                self.ask(db, 'SELECT dlock_release_ticket(dlock_ttl_acquire('
                         "'a', make_interval(secs => %s)))", value)


class Result(unittest.TestResult):
    """Prints a line for each test, and why it failed"""

    def addError(self, test, error):
        super().addError(test, error)
        print(f'not ok {test.shortDescription() or test}')
        print(self._exc_info_to_string(error, test))

    addFailure = addError

    def addSuccess(self, test):
        super().addSuccess(test)
        print(f'ok {test.shortDescription()}')


def main():
    result = Result()
    unittest.defaultTestLoader.loadTestsFromModule(
        sys.modules['__main__']).run(result)
    sys.exit(not (result.testsRun and result.wasSuccessful()))
