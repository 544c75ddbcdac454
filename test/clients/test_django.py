"""Locks of dlock in an application that uses Django, over psycopg2, or psycopg
3, which Django from 4.2 on prefers

The requests go through the whole of Django's WSGI handler, as connections are
opened, kept and closed by its signals.
"""

import io
import os
import unittest
from contextlib import contextmanager
from datetime import timedelta

import django
from django.conf import settings
from django.core.signals import request_finished
from django.core.wsgi import get_wsgi_application
from django.db import (
    Error, InternalError, OperationalError, ProgrammingError, connection,
    transaction)
from django.http import HttpResponse
from django.urls import path
from python_stack import (
    ERRORS, TIMEOUT, Holder, StackTest, is_free, main, until_free)

settings.configure(
    ALLOWED_HOSTS=['*'], ROOT_URLCONF=__name__, LOGGING_CONFIG=None,
    DATABASES={'default': {
        'ENGINE': 'django.db.backends.postgresql', 'ATOMIC_REQUESTS': True,
        'CONN_MAX_AGE': None, 'NAME': os.environ['PGDATABASE'],
        'HOST': os.environ['PGHOST'], 'PORT': os.environ['PGPORT'],
        'USER': os.environ['PGUSER']}})
django.setup()
errors = connection.Database.errors


def ask(sql, *values):
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchone()[0] if cursor.description else None


@contextmanager
def lock(name):
    fence = ask('SELECT dlock_acquire(%s)', name)
    try:
        yield fence
    finally:
        released = ask('SELECT dlock_release_ticket(%s)', fence)
    if not released:
        raise RuntimeError(f'lock {name} was lost')


def release_all(**_):
    """What a persistent connection is not to carry into the next request"""
    if connection.connection is not None:
        ask('SELECT dlock_release_all()')


#
# The application
#

def view(request, function):
    fence = ask(f'SELECT {function}(%s)', 'account/7')
    if 'fail' in request.GET:
        raise ValueError('no paper')
    return HttpResponse(str(fence))


urlpatterns = [path('<function>', view)]
application = get_wsgi_application()


def get(url):
    """The status of the response"""
    location, _, query = url.partition('?')
    status = []
    response = application(
        {'REQUEST_METHOD': 'GET', 'PATH_INFO': f'/{location}',
         'QUERY_STRING': query, 'SERVER_NAME': 'x', 'SERVER_PORT': '80',
         'wsgi.input': io.BytesIO(), 'wsgi.url_scheme': 'http'},
        lambda line, _: status.append(line))
    response.close()
    return int(status[0].split()[0])


class Django(StackTest, unittest.TestCase):
    def tearDown(self):
        connection.close()
        super().tearDown()

    @contextmanager
    def assertFails(self, wrapped, error, code):
        """The error is one of Django's, and its cause one of the driver's."""
        with self.assertRaises(Error) as failure:
            yield
        self.assertIs(type(failure.exception), wrapped)
        self.assertIs(type(failure.exception.__cause__), error)
        cause = failure.exception.__cause__
        self.assertEqual(
            cause.sqlstate if errors.__name__ == 'psycopg.errors'
            else cause.pgcode, code)

    def test_timeout(self):
        """timeout and try"""
        with Holder('busy'):
            with self.assertFails(OperationalError, errors.LockNotAvailable,
                                  '55P03'):
                ask('SELECT dlock_acquire(%s, timeout => %s)', 'busy',
                    timedelta(milliseconds=10))
            self.assertIsNone(ask('SELECT dlock_try_acquire(%s)', 'busy'))

    def test_savepoint(self):
        """a failed acquire in atomic() leaves the transaction usable"""
        with Holder('busy'), transaction.atomic():
            with self.assertRaises(OperationalError), transaction.atomic():
                ask("SELECT dlock_xact_acquire('busy', timeout => '10ms')")
            ask("SELECT dlock_xact_acquire('free')")
            self.assertFalse(is_free('free'))

    def test_exception(self):
        """an exception releases"""
        with self.assertRaises(KeyError), lock('report'):
            self.assertFalse(is_free('report'))
            raise KeyError
        self.assertTrue(is_free('report'))

    def test_transaction(self):
        """transaction scope: commit and rollback"""
        for error in None, KeyError:
            try:
                with transaction.atomic():
                    ask('SELECT dlock_xact_acquire(%s)', 'account/7')
                    self.assertFalse(is_free('account/7'))
                    if error:
                        raise error
            except KeyError:
                pass
            self.assertTrue(is_free('account/7'))

    def test_lease(self):
        """lease scope: over any connection, with a guard"""
        fence = ask('SELECT dlock_ttl_acquire(%s, %s, owner => %s)', 'job',
                    timedelta(hours=1), 'job/17')
        connection.close()
        self.assertEqual(ask('SELECT dlock_renew(%s)', fence), 1)
        with transaction.atomic():
            ask('SELECT dlock_guard(%s, %s)', 'job', fence)
        self.assertIs(ask('SELECT dlock_release_ticket(%s)', fence), True)

    def test_ticket(self):
        """an enqueued ticket is awaited"""
        with Holder('queue') as holder:
            ticket = ask('SELECT dlock_enqueue(%s)', 'queue')
            wait = 'SELECT dlock_wait(%s, %s)'
            self.assertFalse(ask(wait, ticket, timedelta()))
            holder.release()
            self.assertTrue(ask(wait, ticket, timedelta(seconds=TIMEOUT)))

    def test_errors(self):
        """the class of each error, and its code"""
        classes = {
            '55P03': (OperationalError, errors.LockNotAvailable),
            '40P01': (OperationalError, errors.DeadlockDetected),
            '55L01': (OperationalError, errors.OperationalError),
            '42501': (ProgrammingError, errors.InsufficientPrivilege),
            '25006': (InternalError, errors.ReadOnlySqlTransaction),
            '40001': (OperationalError, errors.SerializationFailure)}
        with Holder('busy'):
            for code, (*before, statement) in ERRORS.items():
                for sql in before:
                    ask(sql)
                with self.assertFails(*classes[code], code):
                    ask(statement)
                self.assertEqual(ask('SELECT 1'), 1)
                connection.close()

    def test_interval(self):
        """what is an interval, and what is not"""
        release = 'SELECT dlock_release_ticket(dlock_ttl_acquire(%%s, %s))'
        for value in timedelta(seconds=30), '30s':
            ask(release % '%s', 'a', value)
        for value in 30, 30.0:
            with self.assertRaises(ProgrammingError):
                ask(release % '%s', 'a', value)
            ask(release % 'make_interval(secs => %s)', 'a', value)

    def test_atomic_requests(self):
        """a request is a transaction: its end frees what is of transactions"""
        for url, status in (('dlock_xact_acquire', 200),
                            ('dlock_xact_acquire?fail', 500)):
            self.assertEqual(get(url), status)
            self.assertTrue(is_free('account/7'))

    def test_persistent(self):
        """a persistent connection keeps a session's lock after a request"""
        for url, status in ('dlock_acquire', 200), ('dlock_acquire?fail', 500):
            self.assertEqual(get(url), status)
            self.assertFalse(is_free('account/7'))
            connection.close()
            until_free('account/7')
            request_finished.connect(release_all)
            try:
                self.assertEqual(get(url), status)
                self.assertIsNotNone(connection.connection)
                self.assertTrue(is_free('account/7'))
            finally:
                request_finished.disconnect(release_all)

    def test_not_persistent(self):
        """without CONN_MAX_AGE, the connection goes, and its locks with it"""
        connection.close()
        connection.settings_dict['CONN_MAX_AGE'] = 0
        try:
            self.assertEqual(get('dlock_acquire'), 200)
            self.assertIsNone(connection.connection)
            until_free('account/7')
        finally:
            connection.settings_dict['CONN_MAX_AGE'] = None


if __name__ == '__main__':
    main()
