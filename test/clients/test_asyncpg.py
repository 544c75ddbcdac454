"""Locks of dlock in an application that uses asyncpg, and its pool"""

import asyncio
import unittest
from contextlib import asynccontextmanager
from datetime import timedelta

import asyncpg
from asyncpg import exceptions
from python_stack import (
    ERRORS, TIMEOUT, Holder, StackTest, admin, has_waiter, is_free, main,
    until, until_free)


@asynccontextmanager
async def connect():
    db = await asyncpg.connect()
    try:
        yield db
    finally:
        await db.close()


@asynccontextmanager
async def lock(db, name):
    fence = await db.fetchval('SELECT dlock_acquire($1)', name)
    try:
        yield fence
    finally:
        released = await db.fetchval('SELECT dlock_release_ticket($1)', fence)
    if not released:
        raise RuntimeError(f'lock {name} was lost')


class Connection(asyncpg.Connection):
    """What a pool does when a connection comes back frees advisory locks, and
    stops listening; here, it releases dlock's as well."""

    async def reset(self, *, timeout=None):
        await super().reset(timeout=timeout)
        await self.execute('SELECT dlock_release_all()', timeout=timeout)


class Asyncpg(StackTest, unittest.IsolatedAsyncioTestCase):
    async def test_timeout(self):
        """timeout and try"""
        with Holder('busy'):
            async with connect() as db:
                with self.assertRaises(exceptions.LockNotAvailableError):
                    await db.fetchval(
                        'SELECT dlock_acquire($1, timeout => $2)', 'busy',
                        timedelta(milliseconds=10))
                self.assertIsNone(await db.fetchval(
                    'SELECT dlock_try_acquire($1)', 'busy'))

    async def test_cancel(self):
        """a call that times out, or is cancelled, leaves the queue"""
        count = "SELECT count(*) FROM dlock_locks('busy')"
        with Holder('busy'):
            async with connect() as db:
                acquire = await db.prepare('SELECT dlock_acquire($1)')
                with self.assertRaises(asyncio.TimeoutError):
                    await acquire.fetchval('busy', timeout=0.01)
                self.assertEqual(await db.fetchval(count), 1)
                waiting = asyncio.ensure_future(acquire.fetchval('busy'))
                await asyncio.to_thread(until, has_waiter, 'busy')
                waiting.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waiting
                self.assertEqual(await db.fetchval(count), 1)

    async def test_exception(self):
        """an exception releases"""
        async with connect() as db:
            with self.assertRaises(KeyError):
                async with lock(db, 'report'):
                    self.assertFalse(is_free('report'))
                    raise KeyError
            self.assertTrue(is_free('report'))

    async def test_transaction(self):
        """transaction scope: commit and rollback"""
        async with connect() as db:
            for error in None, KeyError:
                try:
                    async with db.transaction():
                        await db.execute(
                            'SELECT dlock_xact_acquire($1)', 'account/7')
                        self.assertFalse(is_free('account/7'))
                        if error:
                            raise error
                except KeyError:
                    pass
                self.assertTrue(is_free('account/7'))

    async def test_lease(self):
        """lease scope: over any connection, with a guard"""
        async with connect() as one:
            fence = await one.fetchval(
                'SELECT dlock_ttl_acquire($1, $2, owner => $3)', 'job',
                timedelta(hours=1), 'job/17')
        async with connect() as two:
            self.assertEqual(
                await two.fetchval('SELECT dlock_renew($1)', fence), 1)
            async with two.transaction():
                await two.execute('SELECT dlock_guard($1, $2)', 'job', fence)
            self.assertIs(await two.fetchval(
                'SELECT dlock_release_ticket($1)', fence), True)

    async def test_ticket(self):
        """an enqueued ticket is awaited"""
        with Holder('queue') as holder:
            async with connect() as db:
                told = asyncio.Event()
                # first of all: it may come with the answer to the enqueue
                await db.add_listener(
                    await db.fetchval('SELECT dlock_channel()'),
                    lambda *_: told.set())
                ticket = await db.fetchval('SELECT dlock_enqueue($1)', 'queue')
                asked = "SELECT dlock_wait($1, '0')"
                self.assertFalse(await db.fetchval(asked, ticket))
                holder.release()
                while not await db.fetchval(asked, ticket):
                    await asyncio.wait_for(told.wait(), TIMEOUT)
                    told.clear()
                self.assertEqual(
                    ticket, await db.fetchval("SELECT dlock_fence('queue')"))

    async def test_errors(self):
        """the class of each error, and its code"""
        classes = {
            '55P03': exceptions.LockNotAvailableError,
            '40P01': exceptions.DeadlockDetectedError,
            # which is a FatalPostgresError, though nothing is fatal here
            '55L01': exceptions.UnknownPostgresError,
            '42501': exceptions.InsufficientPrivilegeError,
            '25006': exceptions.ReadOnlySQLTransactionError,
            '40001': exceptions.SerializationError}
        with Holder('busy'):
            for code, (*before, statement) in ERRORS.items():
                async with connect() as db:
                    for sql in before:
                        await db.execute(sql)
                    with self.assertRaises(
                            asyncpg.PostgresError) as failure:
                        await db.execute(statement)
                    self.assertIs(
                        type(failure.exception), classes[code])
                    self.assertEqual(failure.exception.sqlstate, code)
                    self.assertFalse(db.is_closed())
                    self.assertEqual(await db.fetchval('SELECT 1'), 1)

    async def test_interval(self):
        """what is an interval, and what is not"""
        async with connect() as db:
            acquire = "SELECT dlock_ttl_acquire('a', {})"
            for value in 30, 30.0, '30s', '30':
                with self.assertRaises(exceptions.DataError):
                    await db.execute(acquire.format('$1'), value)
            for place, value in (('$1', timedelta(seconds=30)),
                                 ('$1::text::interval', '30s'),
                                 ('make_interval(secs => $1)', 30),
                                 ('make_interval(secs => $1)', 30.0)):
                fence = await db.fetchval(acquire.format(place), value)
                self.assertEqual(await db.fetchval(
                    'SELECT ttl FROM dlock_leases'), timedelta(seconds=30))
                await db.execute('SELECT dlock_release_ticket($1)', fence)

    async def forget(self, **options):
        """Who gets the connection next, and are the locks free?"""
        async with asyncpg.create_pool(
                min_size=1, max_size=1, **options) as pool:
            async with pool.acquire() as db:
                await db.execute('SELECT pg_advisory_lock(7)')
                await db.execute("SELECT dlock_acquire('report')")
                pid = db.get_server_pid()
            free = is_free('report')
            self.assertEqual('t', admin('SELECT pg_try_advisory_xact_lock(7)'))
            async with pool.acquire() as db:
                self.assertEqual(db.get_server_pid(), pid)
                return free, is_free('report')

    async def test_pool(self):
        """a pool frees advisory locks and keeps dlock's, until it is told"""
        def release_all(db):
            return db.execute('SELECT dlock_release_all()')

        # free when the connection has come back; when it is lent again
        self.assertEqual(await self.forget(), (False, False))
        until_free('report')
        self.assertEqual(await self.forget(setup=release_all), (False, True))
        self.assertEqual(
            await self.forget(connection_class=Connection), (True, True))


if __name__ == '__main__':
    main()
