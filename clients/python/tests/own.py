"""The Python client over an application's own connections, and in its
transactions: pools, engines, functions, drivers and frameworks.

test/t/client_python_own.pl starts this, with a server in the environment.
"""

import asyncio
import inspect
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import unittest
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import psycopg
from psycopg.rows import dict_row
from python_stack import (
    TIMEOUT, Holder, StackTest, admin, has_waiter, is_free, main, until,
    until_free)

import dlock
from dlock.callers import Asyncio, is_cut, run
from dlock.heart import Debt
from dlock.lines import now
from dlock.sources import Dsn, hosts_of

try:
    import psycopg_pool
except ImportError:
    psycopg_pool = None
try:
    import psycopg2
    import psycopg2.extras
except ImportError:
    psycopg2 = None
try:
    import sqlalchemy
    import sqlalchemy.orm
    engine_driver = ('psycopg2' if psycopg2 else 'psycopg')
except ImportError:
    sqlalchemy = None
try:
    import asyncpg
except ImportError:
    asyncpg = None
try:
    import django
except ImportError:
    django = None

KEPT = {'ttl': 3600, 'interval': 0.2}
PATIENT = {'patience': TIMEOUT}


def renewed_at(lease):
    return admin(f'SELECT renewed_at FROM dlock_leases WHERE lease = {lease}')


def until_renewed(lease):
    before = renewed_at(lease)
    until(lambda: renewed_at(lease) > before)


def terminate():
    admin('SELECT count(pg_terminate_backend(pid, 10000)) '
          "FROM pg_stat_activity WHERE usename = 'app'")


def count_connections():
    return int(admin('SELECT count(*) FROM pg_stat_activity '
                     "WHERE usename = 'app'"))


def state(db):
    """State that a returned connection must not keep"""
    return (db.autocommit, db.prepare_threshold, db.execute(
        "SELECT current_setting('client_connection_check_interval'),"
        ' (SELECT count(*) FROM pg_listening_channels()),'
        ' (SELECT count(*) FROM dlock_locks WHERE pid = pg_backend_pid())'
        ).fetchone())


@contextmanager
def meanwhile(work):
    """Another thread does the work"""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def interrupted_when(condition, *arguments):
    """Once the condition is true, a signal handler raises an exception"""
    def interrupt():
        until(condition, *arguments)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def handler(*_):
        raise InterruptedError('by the test')

    signal.signal(signal.SIGUSR1, handler)
    try:
        with meanwhile(interrupt):
            yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def interrupted(holder, name):
    """A signal handler raises at the end of a method."""
    work = getattr(holder, name)

    def interrupt(*values):
        work(*values)
        raise InterruptedError('by the test')

    async def wait(*values):
        await work(*values)
        raise InterruptedError('by the test')

    return mock.patch.object(
        holder, name, wait if inspect.iscoroutinefunction(work) else interrupt)


def cancelled(lock):
    """Another thread cancels the acquire when it waits"""
    def cancel():
        until(has_waiter, lock.name)
        lock.cancel()

    return meanwhile(cancel)


def is_idle(pid):
    return admin('SELECT state FROM pg_stat_activity '
                 f'WHERE pid = {pid}') == 'idle'


@contextmanager
def late_cancels(module, holder, pid):
    """Requests to cancel arrive after the grant; yields them"""
    cancel, requests = dlock.callers.cancel, []

    def late(connection):
        def send():
            holder.release()
            until(is_idle, pid)
            cancel(connection).join()
        requests.append(threading.Thread(target=send))
        requests[-1].start()
        return requests[-1]

    with mock.patch.multiple(module, cancel=late, OBEY=TIMEOUT):
        yield requests


def cut_late(condition=lambda: True):
    """Once, the client has read an answer when it cuts the connection."""
    cuts = []

    class Late(threading.Timer):
        def start(self):
            pass

        def cancel(self):
            if not cuts and condition():
                cuts.append(self.function(*self.args))

        join = start

    return mock.patch.object(dlock.lines, 'Timer', Late)


def any_alive(requests):
    return any(request.is_alive() for request in requests)


@contextmanager
def failing_cancels(holder, request):
    """Requests to cancel do not return, but the lock is granted"""
    def hang(_):
        dlock.locks.OBEY = 0.01
        holder.release()
        return request

    with mock.patch.multiple('dlock.locks', cancel=hang, OBEY=TIMEOUT):
        yield


def failing_release(holder, error):
    """The release of a ticket raises."""
    ask = holder.ask

    async def asks(connection, statement, *values):
        if 'dlock_release_ticket' in statement[0]:
            raise error
        return await ask(connection, statement, *values)

    return mock.patch.object(holder, 'ask', asks)


def unbegun(kept):
    """A signal handler raises before anything is released."""
    return mock.patch.object(
        kept, '_give_back', side_effect=InterruptedError('by the test'))


@unittest.skipUnless(psycopg_pool, 'psycopg_pool is not installed')
class Pool(StackTest, unittest.TestCase):
    def setUp(self):
        self.pool = psycopg_pool.ConnectionPool('', min_size=1, max_size=1)
        self.locks = dlock.Locks(self.pool, **PATIENT)
        self.pid, self.state = self.look()

    def tearDown(self):
        self.pool.close()
        super().tearDown()

    def look(self):
        with self.pool.connection(TIMEOUT) as db:
            return db.info.backend_pid, state(db)

    def is_out(self):
        try:
            self.pool.putconn(self.pool.getconn(0.001))
        except psycopg_pool.PoolTimeout:
            return True
        return False

    def assertClean(self):
        self.assertEqual(self.look(), (self.pid, self.state))

    def assertReplaced(self):
        pid, left = self.look()
        self.assertNotEqual(pid, self.pid)
        self.assertEqual(left, self.state)

    def test_session(self):
        """a pool: a lock keeps its session's connection until the release"""
        with self.locks.lock('report', timeout=TIMEOUT):
            self.assertFalse(is_free('report'))
            self.assertTrue(self.is_out())
        self.assertTrue(is_free('report'))
        self.assertClean()

    def test_exception(self):
        """a pool: an exception returns the connection"""
        with self.assertRaises(KeyError), self.locks.lock('report'):
            raise KeyError
        self.assertClean()

    def test_timeout(self):
        """a pool: a timeout leaves nothing on the connection"""
        with Holder('busy'):
            for timeout in 0, 0.01:
                with self.assertRaises(dlock.LockTimeout):
                    self.locks.lock('busy', timeout=timeout).acquire()
                with self.assertRaises(dlock.LockTimeout):
                    self.locks.lock('busy', timeout=timeout, ttl=60).acquire()
        self.assertClean()

    def test_interrupted(self):
        """a pool: an interrupted wait leaves nothing on the connection"""
        for options in {}, {'ttl': 3600}:
            with Holder('busy'), interrupted_when(has_waiter, 'busy'):
                with self.assertRaises(InterruptedError):
                    self.locks.lock('busy', **options).acquire()
            self.assertEqual(self.look()[1], self.state)
            self.assertTrue(is_free('busy'))

    def test_late_cancel(self):
        """a pool: a cancel that arrives late is waited for"""
        put, late = self.pool.putconn, []

        def putconn(lent):
            late.append(any_alive(requests))
            put(lent)

        with self.locks.lease(3600) as lease:
            lock = lease.lock('busy')
            with Holder('busy') as holder, cancelled(lock), late_cancels(
                    'dlock.locks', holder, self.pid) as requests, \
                    mock.patch.object(self.pool, 'putconn', putconn):
                lock.acquire()
            lock.release()
        self.assertTrue(requests)
        self.assertNotIn(True, late)
        self.assertClean()

    def test_failing_cancel(self):
        """a pool: if a cancel does not return, the connection is replaced"""
        lock = self.locks.lock('busy')
        with Holder('busy') as holder, cancelled(lock), failing_cancels(
                holder, mock.Mock()):
            with self.assertRaises(dlock.Cancelled):
                lock.acquire()
        self.assertReplaced()

    def test_lost(self):
        """a pool: a connection that broke is replaced"""
        lock = self.locks.lock('report')
        lock.acquire()
        terminate()
        with self.assertRaises(dlock.LockLost):
            lock.release()
        self.assertReplaced()

    def test_answer_late(self):
        """a pool: a connection that the client has cut is replaced"""
        with self.locks.lease(3600) as lease:
            with cut_late():
                lease.renew()
            self.assertReplaced()
            self.pid = self.look()[0]
            with Holder('busy'), cut_late():
                with self.assertRaises(dlock.LockTimeout):
                    lease.lock('busy', timeout=0).acquire()
            self.assertReplaced()

    def test_unsure(self):
        """a pool: a connection that cannot be cleaned is replaced"""
        with self.locks.lock('report') as lock:
            lock._line.connection.autocommit = False
            lock._line.connection.execute('SELECT 1')
        self.assertReplaced()

    def test_exhausted(self):
        """a pool: without a free connection, patience ends the wait"""
        hasty = dlock.Locks(self.pool, patience=0.01)
        with self.locks.lock('report'):
            with self.assertRaises(dlock.ConnectionLost):
                hasty.resize('other', 3)
        self.assertClean()

    def test_lease(self):
        """a pool: the heartbeat keeps one connection"""
        with psycopg_pool.ConnectionPool('', min_size=2, max_size=2) as pool:
            locks = dlock.Locks(pool, **PATIENT)
            with locks.lock('job', **KEPT) as lock:
                until_renewed(lock.fence)
                self.assertLessEqual(count_connections(), 3)
                # one is left for the program
                with pool.connection(TIMEOUT) as db:
                    db.execute('SELECT 1')
                terminate()
                until_renewed(lock.fence)
                lock.check()
            pool.check()    # it may not have noticed a broken connection
            with pool.connection(TIMEOUT) as one, \
                    pool.connection(TIMEOUT) as two:
                self.assertEqual(state(one), self.state)
                self.assertEqual(state(two), self.state)
        terminate()
        self.pool.check()

    def test_many(self):
        """a pool: a lease returns its connection between calls"""
        with psycopg_pool.ConnectionPool('', min_size=2, max_size=2) as pool:
            locks = dlock.Locks(pool, **PATIENT)
            with locks.lease(**KEPT) as lease, lease.lock('a'):
                until_renewed(lease.id)
                with pool.connection(TIMEOUT):
                    pass
                with lease.lock('b'):
                    self.assertEqual(admin(
                        'SELECT held FROM dlock_leases'), '2')
                    with pool.connection(TIMEOUT):
                        pass

    def test_tickets(self):
        """a pool: a returned connection has no tickets, and does not listen"""
        for _ in range(2):
            with dlock.Tickets(self.locks) as tickets:
                ticket = tickets.enqueue('queue')
                self.assertEqual(tickets.next(TIMEOUT).ticket, ticket)
                tickets.watch('other')
                self.assertEqual(tickets.next(TIMEOUT).event, 'free')
                self.assertTrue(self.is_out())
            self.assertClean()

    def test_wrong(self):
        """sources of the other kind are refused"""
        async def function():
            pass

        for source in function, 7, None, {}:
            with self.assertRaises(dlock.BadArgument):
                dlock.Locks(source)
        with self.assertRaises(dlock.BadArgument):
            dlock.AsyncLocks(self.pool)
        for sources in ([self.pool, self.pool], ['', self.pool]):
            with self.assertRaises(dlock.BadArgument):
                dlock.Locks(sources)
        with self.assertRaises(dlock.BadArgument):
            dlock.Locks(lambda: 7).lock('a').acquire()
        both = dlock.Locks([self.pool, ''], keys=['a', 'b'])
        self.assertEqual({both.server(f'{n}') for n in range(99)},
                         {self.pool, ''})


class Function(StackTest, unittest.TestCase):
    def test_dsn(self):
        """a function gives the DSN for each new connection"""
        tokens = itertools.count()
        locks = dlock.Locks(
            lambda: f'application_name=token-{next(tokens)}', **PATIENT)
        names = ("SELECT count(DISTINCT application_name) "
                 "FROM pg_stat_activity WHERE application_name LIKE 'token-%'")
        with locks.lock('job', **KEPT) as lock:
            until_renewed(lock.fence)
            used = next(tokens)
            terminate()
            until_renewed(lock.fence)
            self.assertGreater(next(tokens), used + 1)
            self.assertEqual(admin(names), '1')
            lock.check()

    def connect(self, module):
        self.made = []

        def connect():
            self.made.append(module.connect(''))
            return self.made[-1]
        return dlock.Locks(connect, **PATIENT)

    def check(self, locks):
        with locks.lock('report') as lock:
            self.assertFalse(is_free('report'))
            self.assertTrue(lock.is_held())
        with locks.lock('job', **KEPT) as lock:
            until_renewed(lock.fence)
        with Holder('busy'), self.assertRaises(dlock.LockTimeout):
            locks.lock('busy', timeout=0.01).acquire()
        with locks.lease(3600) as lease:
            for lock in lease.acquire_all(['a', 'b']):
                lock.release()
        with dlock.Tickets(locks) as tickets:
            ticket = tickets.enqueue('queue')
            self.assertEqual(tickets.next(TIMEOUT).ticket, ticket)
        with self.assertRaises(dlock.LockLost):
            with locks.lock('report'):
                terminate()

    def check_closed(self):
        until(lambda: all(db.closed for db in self.made))

    def test_psycopg(self):
        """a function that connects with psycopg"""
        self.check(self.connect(psycopg))
        self.check_closed()

    @unittest.skipUnless(psycopg2, 'psycopg2 is not installed')
    def test_psycopg2(self):
        """a function that connects with psycopg2"""
        self.check(self.connect(psycopg2))
        self.check_closed()

    def test_hosts(self):
        """the hosts of a DSN share the time that is left"""
        for host in hosts_of('host=a,b,c', 9):
            self.assertIn('connect_timeout=3', host)

    @unittest.skipUnless(psycopg2, 'psycopg2 is not installed')
    def test_cancel(self):
        """over psycopg2: cancel() ends a wait"""
        locks = self.connect(psycopg2)
        lock = locks.lock('busy')
        with Holder('busy'), cancelled(lock):
            with self.assertRaises(dlock.Cancelled):
                lock.acquire()

    @unittest.skipUnless(sqlalchemy, 'sqlalchemy is not installed')
    def test_engine(self):
        """SQLAlchemy's engine, whose pool gets its connections back"""
        engine = sqlalchemy.create_engine(
            f'postgresql+{engine_driver}://', pool_size=2, max_overflow=0,
            pool_timeout=1, pool_use_lifo=True)
        locks = dlock.Locks(engine, **PATIENT)
        self.check(locks)
        with locks.lock('report'):
            self.assertEqual(engine.pool.checkedout(), 1)
        until(lambda: engine.pool.checkedout() == 0)
        with locks.lock('report') as lock:
            pid = lock._line.connection.execute(
                'SELECT pg_backend_pid()').fetchone()[0]
        with engine.connect() as db:
            self.assertEqual(db.exec_driver_sql(
                'SELECT pg_backend_pid(), count(*)::integer FROM dlock_locks '
                'WHERE pid = pg_backend_pid()').fetchone(), (pid, 0))
            self.assertFalse(db.connection.driver_connection.autocommit)
        # the pool is exhausted
        with engine.connect(), engine.connect():
            with self.assertRaises(dlock.ConnectionLost):
                dlock.Locks(engine, patience=0).lock('a').acquire()
        engine.dispose()


class Async(StackTest, unittest.IsolatedAsyncioTestCase):
    async def check(self, locks):
        async with locks.lock('report'):
            self.assertFalse(is_free('report'))
        async with locks.lock('job', **KEPT) as lock:
            # this blocks the loop, but not the heartbeat
            until_renewed(lock.fence)
            terminate()
            until_renewed(lock.fence)
            lock.check()
        with Holder('busy'):
            for options in {}, {'ttl': 3600}:
                task = asyncio.ensure_future(
                    locks.lock('busy', **options).acquire())
                await asyncio.to_thread(until, has_waiter, 'busy')
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
            self.assertFalse(has_waiter('busy'))
        async with locks.lease(3600) as lease:
            for lock in await lease.acquire_all(['a', 'b']):
                await lock.release()

    async def test_function(self):
        """a coroutine function that connects"""
        made = []

        async def connect():
            made.append(await psycopg.AsyncConnection.connect(''))
            return made[-1]

        await self.check(dlock.AsyncLocks(connect, **PATIENT))
        until(lambda: all(db.closed for db in made))

    async def test_same_time(self):
        """calls for one lock at the same time have connections of their own"""
        made = []

        async def connect():
            made.append(await psycopg.AsyncConnection.connect(''))
            return made[-1]

        lock = dlock.AsyncLocks(connect, **PATIENT).lock('a', **KEPT)
        async with lock:
            await asyncio.gather(lock.set_info('one'), lock.is_held(),
                                 lock.renew(), lock.set_info('two'))
        until(lambda: all(db.closed for db in made))

    async def test_dsn(self):
        """a function that returns a DSN, for tasks"""
        await self.check(dlock.AsyncLocks(lambda: '', **PATIENT))

    @unittest.skipUnless(psycopg_pool, 'psycopg_pool is not installed')
    async def test_pool(self):
        """a pool of asyncio's connections"""
        async with psycopg_pool.AsyncConnectionPool(
                '', min_size=2, max_size=2) as pool:
            await self.check(dlock.AsyncLocks(pool, **PATIENT))
            async with pool.connection(TIMEOUT) as one, \
                    pool.connection(TIMEOUT) as two:
                for db in one, two:
                    cursor = await db.execute(
                        'SELECT count(*) FROM dlock_locks '
                        'WHERE pid = pg_backend_pid()')
                    self.assertEqual(await cursor.fetchone(), (0,))
                    self.assertFalse(db.autocommit)


    async def test_late(self):
        """a connection that arrives after a cancel is returned or closed"""
        class Stubborn:
            made, back = [], []

            async def getconn(self, timeout=None):
                self.made.append(await psycopg.AsyncConnection.connect(''))
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    pass
                return self.made[-1]

            async def putconn(self, conn):
                self.back.append(conn)

        pool = Stubborn()
        for source, back in (pool, lambda: pool.back), (
                pool.getconn, lambda: [db for db in pool.made if db.closed]):
            pool.made.clear()
            task = asyncio.ensure_future(
                dlock.AsyncLocks(source).lock('a').acquire())
            async with asyncio.timeout(TIMEOUT):
                while not pool.made:
                    await asyncio.sleep(0.01)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                while back() != pool.made:
                    await asyncio.sleep(0.01)
            await pool.made[0].close()

    async def test_return_cancelled(self):
        """a pool: a cancel while open() returns the connection"""
        class Slow:
            returns = asyncio.Event()

            async def getconn(self, timeout=None):
                return await psycopg.AsyncConnection.connect('')

            async def putconn(self, conn):
                await conn.close()
                if not self.returns.is_set():
                    self.returns.set()
                    await asyncio.get_running_loop().create_future()

        pool = Slow()
        lease = dlock.AsyncLocks(pool).lease(3600)
        task = asyncio.ensure_future(lease.open())
        async with asyncio.timeout(TIMEOUT):
            await pool.returns.wait()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await lease.close()
            self.assertIsNone(lease._heart)
            async with lease:
                lease.check()
        with psycopg.connect('', autocommit=True) as db:
            db.execute('SELECT dlock_lease_close(lease) FROM dlock_leases')

    async def test_renew_twice(self):
        """renew: one task at a time, as a refusal restores the deadline"""
        async with dlock.AsyncLocks('', **PATIENT).lease(3600) as lease:
            ask, waits = lease._ask, asyncio.Event()

            async def refused(_):
                lease._ask = ask
                await waits.wait()
                raise dlock.BadArgument('by the test')

            async def sleep(_):
                waits.set()
                await asyncio.sleep(0)

            lease._ask, lease.sleep = refused, sleep
            first = asyncio.ensure_future(lease.renew(7200))
            await asyncio.sleep(0)
            await lease.renew(1800)
            waits.set()
            with self.assertRaises(dlock.BadArgument):
                await first
            self.assertLessEqual(lease.deadline, now() + 1800)

    async def test_renew_in_order(self):
        """renew: the call that has waited longest is next"""
        async with dlock.AsyncLocks('', **PATIENT).lease(3600) as lease:
            earlier, waits, order = object(), asyncio.Event(), []

            async def sleep(_):
                if asyncio.current_task() is tasks[0]:
                    await waits.wait()
                await asyncio.sleep(0)

            async def renew(ttl):
                order.append(ttl)

            lease.sleep, lease._renew = sleep, renew
            lease._renewals.append(earlier)
            tasks = [asyncio.ensure_future(lease.renew(ttl))
                     for ttl in (1800, 900)]
            await asyncio.sleep(0)
            lease._renewals.remove(earlier)
            for _ in range(9):
                await asyncio.sleep(0)
            waits.set()
            await asyncio.gather(*tasks)
            self.assertEqual(order, [1800, 900])

    async def test_close_cancelled(self):
        """close, cancelled while another call uses the lease's connection"""
        lease = dlock.AsyncLocks('', **PATIENT).lease(3600)
        await lease.open()
        async with lease._free:
            task = asyncio.ensure_future(lease.close())
            while lease._state == 'held':
                await asyncio.sleep(0)
            task.cancel()
            with mock.patch('dlock.callers.UNDO', 0.01):
                with self.assertRaises(asyncio.CancelledError):
                    await task
        self.assertTrue(lease._heart.over)
        admin(f'SELECT dlock_force_close({lease.id})')
        async with lease:
            lease.check()

    async def test_election_cancelled(self):
        """an election, cancelled twice: the lead ends after the work"""
        begun, ends, held = asyncio.Semaphore(0), asyncio.Event(), []

        async def work(lock):
            try:
                begun.release()
                await asyncio.get_running_loop().create_future()
            finally:
                begun.release()
                await ends.wait()
                lock.check()
                held.append(not is_free('leader'))

        task = asyncio.ensure_future(dlock.AsyncLocks('', **PATIENT).election(
            'leader', ttl=3600).run(work))
        async with asyncio.timeout(TIMEOUT):
            for _ in range(2):
                await begun.acquire()
                task.cancel()
            await asyncio.sleep(0)      # the second cancel arrives
            ends.set()
            with self.assertRaises(asyncio.CancelledError):
                await task
        self.assertEqual(held, [True])

    async def test_late_cancel(self):
        """a cancel that arrives late is waited for"""
        async with await psycopg.AsyncConnection.connect(
                '', autocommit=True) as db:
            lock = dlock.AsyncLock(db, 'report')
            with Holder('report') as holder, late_cancels(
                    'dlock.callers', holder, db.info.backend_pid) as requests:
                task = asyncio.create_task(lock.acquire())
                await asyncio.to_thread(until, has_waiter, 'report')
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                self.assertFalse(requests[0].is_alive())

    async def test_failing_cancel(self):
        """a connection is closed if a cancel does not return"""
        def hang(_):
            holder.release()
            until(is_idle, db.info.backend_pid)
            return mock.Mock()

        async with await psycopg.AsyncConnection.connect(
                '', autocommit=True) as db:
            with Holder('report') as holder, mock.patch.multiple(
                    'dlock.callers', cancel=hang, OBEY=0.01):
                task = asyncio.create_task(Asyncio.ask(
                    db, ("SELECT dlock_acquire('report')", ())))
                await asyncio.to_thread(until, has_waiter, 'report')
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
            self.assertTrue(db.closed)

    async def test_answer_late(self):
        """an answer that is read after the cut is lost"""
        with cut_late(lambda: not is_free('a')):
            async with dlock.AsyncLocks('', **PATIENT).lock(
                    'a', timeout=TIMEOUT) as lock:
                self.assertTrue(await lock.is_held())

    async def test_tickets_closed(self):
        """tickets: a call during the close keeps no connection"""
        made, closing = [], False

        async def connect():
            made.append(await psycopg.AsyncConnection.connect(''))
            if closing:
                await tickets.close()
            return made[-1]

        async def readable(*_):
            await tickets.close()

        locks = dlock.AsyncLocks(connect, **PATIENT)
        tickets = dlock.AsyncTickets(locks)
        await tickets.watch('a')
        self.assertEqual((await tickets.next(TIMEOUT)).event, 'free')
        tickets.readable = readable
        with self.assertRaises(dlock.WrongState) as raised:
            await tickets.next(TIMEOUT)
        self.assertEqual(raised.exception.sqlstate, '55000')
        self.assertEqual(len(made), 1)
        tickets, closing = dlock.AsyncTickets(locks), True
        with self.assertRaises(dlock.WrongState):
            await tickets.watch('a')
        self.assertTrue(all(db.closed for db in made))


#
# The program's transactions
#

class Transactions(StackTest, unittest.TestCase):
    """`begin()` begins a transaction, and yields an object to execute SQL."""

    def check(self, begin):
        with begin() as db:
            fence = dlock.Calls(db).xact_acquire('account/7', timeout=TIMEOUT)
            self.assertGreater(fence, 0)
            self.assertFalse(is_free('account/7'))
            self.assertTrue(dlock.Calls(db).is_held('account/7'))
        self.assertTrue(is_free('account/7'))
        with begin() as db:
            fences = dlock.Calls(db).xact_acquire_all(['b', 'a'], info='me')
            self.assertEqual(len(fences), 2)
            self.assertFalse(is_free('a'))
        with self.assertRaises(KeyError), begin() as db:
            with dlock.Lock(db, 'account/7', scope='transaction') as lock:
                self.assertFalse(is_free('account/7'))
                lock.check()
                raise KeyError
        self.assertTrue(is_free('account/7'))
        with Holder('busy'), self.assertRaises(dlock.LockTimeout), begin() as db:
            dlock.Calls(db).xact_acquire('busy', timeout=0)
        with dlock.Locks('').lock('job', ttl=3600) as lock:
            with begin() as db:
                lock.guard(db)
            with begin() as db:
                dlock.Calls(db).guard(lock)
                dlock.Calls(db).guard(lock.name, lock.fence)
        with self.assertRaises(dlock.LockLost), begin() as db:
            dlock.Calls(db).guard('job', 1)

    def test_psycopg(self):
        """psycopg 3: connections and cursors, with any kind of row"""
        for options in {}, {'row_factory': dict_row}:
            with psycopg.connect('', autocommit=True, **options) as db:
                @contextmanager
                def begin():
                    with db.transaction():
                        yield db

                @contextmanager
                def cursors():
                    with db.transaction(), db.cursor() as cursor:
                        yield cursor

                self.check(begin)
                self.check(cursors)

    @unittest.skipUnless(psycopg2, 'psycopg2 is not installed')
    def test_psycopg2(self):
        """psycopg2: connections and cursors, with any kind of row"""
        for options in {}, {'cursor_factory': psycopg2.extras.RealDictCursor}:
            db = psycopg2.connect('', **options)

            @contextmanager
            def begin():
                with db:
                    yield db

            @contextmanager
            def cursors():
                with db, db.cursor() as cursor:
                    yield cursor

            self.check(begin)
            self.check(cursors)
            db.autocommit = True
            with dlock.Lock(db, 'session'):
                self.assertFalse(is_free('session'))
            self.assertTrue(is_free('session'))
            dlock.Lock(db, 'session').acquire()
            dlock.reset(db)
            self.assertTrue(is_free('session'))
            db.close()

    @unittest.skipUnless(sqlalchemy, 'sqlalchemy is not installed')
    def test_sqlalchemy(self):
        """SQLAlchemy: a session, a scoped session, and a connection"""
        engine = sqlalchemy.create_engine(f'postgresql+{engine_driver}://')
        sessions = sqlalchemy.orm.sessionmaker(engine)
        scoped = sqlalchemy.orm.scoped_session(sessions)

        @contextmanager
        def scope():
            with scoped.begin():
                yield scoped
            scoped.remove()

        self.check(sessions.begin)
        self.check(engine.begin)
        self.check(scope)
        engine.dispose()

    def test_function(self):
        """a function of the program that executes SQL"""
        with psycopg.connect('', autocommit=True) as db:
            for row in (lambda row: row, lambda row: row[0]):
                def execute(sql, values):
                    return row(db.execute(sql, values).fetchone())

                @contextmanager
                def begin():
                    with db.transaction():
                        yield execute

                self.check(begin)
        with self.assertRaises(dlock.BadArgument):
            dlock.Calls(7)

    @unittest.skipUnless(django and psycopg2, 'django is not installed')
    def test_django(self):
        """Django: atomic(), guards, and connections as Django makes them"""
        import dlock.django
        from django.db import connection, connections, transaction

        @contextmanager
        def begin():
            with transaction.atomic():
                yield connection

        self.check(begin)
        with dlock.django.atomic('account/7', timeout=0) as fence:
            self.assertFalse(is_free('account/7'))
            self.assertGreater(fence, 0)
        self.assertTrue(is_free('account/7'))
        with self.assertRaises(dlock.WrongState):
            dlock.django.calls()
        with mock.patch.object(type(connections['default']),
                               'get_new_connection') as connects:
            dlock.django._connecting('default')()
        self.assertEqual(connects.call_args[0][0]['connect_timeout'], 10)
        locks = dlock.django.locks(patience=TIMEOUT)
        with locks.lock('job', **KEPT) as lock:
            until_renewed(lock.fence)
            with transaction.atomic():
                dlock.django.guard(lock)
        with Holder('busy'), self.assertRaises(dlock.LockTimeout):
            with dlock.django.atomic('busy', timeout=0):
                pass
        # locks that a request has left
        dlock.django.release_after_requests()
        with connection.cursor() as cursor:
            cursor.execute("SELECT dlock_acquire('left')")
        self.assertFalse(is_free('left'))
        # a database without dlock
        connections['other'].ensure_connection()
        from django.core import signals
        signals.request_finished.disconnect(
            sys.modules['django.db'].close_old_connections)
        signals.request_finished.send(None)
        self.assertTrue(is_free('left'))
        connections.close_all()


@unittest.skipUnless(asyncpg, 'asyncpg is not installed')
class Asyncpg(StackTest, unittest.IsolatedAsyncioTestCase):
    async def test_transaction(self):
        """asyncpg: in its transactions"""
        db = await asyncpg.connect()
        calls = dlock.AsyncCalls(db)
        async with db.transaction():
            await calls.xact_acquire('account/7', timeout=TIMEOUT, info='me')
            self.assertFalse(is_free('account/7'))
            self.assertTrue(await calls.is_held('account/7'))
        self.assertTrue(is_free('account/7'))
        async with db.transaction():
            await calls.xact_acquire_all(['b', 'a'])
            self.assertFalse(is_free('b'))
        with Holder('busy'), self.assertRaises(dlock.LockTimeout):
            async with db.transaction():
                await calls.xact_acquire('busy', timeout=0)
        async with dlock.AsyncLocks('').lock('job', ttl=3600) as lock:
            async with db.transaction():
                await lock.guard(db)
            async with db.transaction():
                async with dlock.AsyncLock(db, 'account/7',
                                           scope='transaction'):
                    await calls.guard(lock)
        with self.assertRaises(dlock.LockLost):
            async with db.transaction():
                await calls.guard('job', 1)
        await db.close()
        with self.assertRaises(dlock.ConnectionLost):
            await calls.is_held('a')


#
# Other calls of a program
#

def mode(name):
    return admin(f"SELECT mode, info FROM dlock_locks('{name}')")


class Rest(StackTest, unittest.TestCase):
    locks = dlock.Locks('', **PATIENT)

    def test_decorator(self):
        """@locks.locked: each call has its own lock"""
        @self.locks.locked('report', timeout=0)
        def report(word, *, again=True):
            self.assertFalse(is_free('report'))
            if again:
                with self.assertRaises(dlock.LockTimeout):
                    report(word)
            return word * 2

        @self.locks.locked(lambda number: f'account/{number}', **KEPT)
        def account(number):
            self.assertFalse(is_free(f'account/{number}'))
            raise KeyError

        self.assertEqual(report('a'), 'aa')
        self.assertEqual(report('a', again=False), 'aa')
        self.assertEqual(report.__name__, 'report')
        with self.assertRaises(KeyError):
            account(7)

        @dlock.AsyncLocks('').locked('task')
        async def task(n):
            self.assertFalse(is_free('task'))
            return n + 1

        async def tasks():
            return await asyncio.gather(*map(task, range(3)))
        self.assertEqual(asyncio.run(tasks()), [1, 2, 3])

    def test_renew(self):
        """renew: with the same ttl, and after a release or a loss"""
        for kept in self.locks.lock('a', ttl=60), self.locks.lease(60):
            with kept:
                before = now()
                kept.renew()
                self.assertGreaterEqual(kept.deadline, before + 0.99 * 60)
                self.assertLessEqual(kept.deadline, now() + 0.99 * 60)
            with self.assertRaises(dlock.WrongState):
                kept.renew()
        with self.assertRaises(dlock.LockLost):
            with self.locks.lock('a', ttl=60) as lock:
                admin(f'SELECT dlock_force_release({lock.fence})')
                lock.renew()

    def test_renew_refused(self):
        """renew: a refused ttl, even if it is shorter, changes nothing"""
        root = dlock.Locks(f'user={os.environ["ADMIN"]}', **PATIENT)
        with root.lease(3600) as lease:
            before, due = lease.deadline, lease._heart.due
            lease._line.connection.execute("SET dlock.max_ttl = '1 min'")
            with self.assertRaises(dlock.BadArgument):
                lease.renew(1800)
            self.assertAlmostEqual(lease.deadline, before)
            self.assertEqual(lease._heart.life, 0.99 * 3600)
            self.assertLessEqual(lease._heart.due, due)
            # too short for any server
            sent = lease._line.sent
            with self.assertRaises(dlock.BadArgument):
                lease.renew(0.09)
            self.assertEqual(lease._line.sent, sent)

    def test_renew_twice(self):
        """renew: one thread at a time, as a refusal restores the deadline"""
        with self.locks.lease(3600) as lease:
            ask, sent, waits = lease._ask, threading.Event(), threading.Event()

            async def refused(_):
                lease._ask = ask
                sent.set()
                waits.wait(TIMEOUT)
                raise dlock.BadArgument('by the test')

            def first():
                with suppress(dlock.BadArgument):
                    lease.renew(7200)

            def sleep(_):
                waits.set()
                thread.join()

            lease._ask, lease.sleep = refused, sleep
            thread = threading.Thread(target=first)
            thread.start()
            sent.wait(TIMEOUT)
            lease.renew(1800)
            waits.set()
            thread.join()
            self.assertLessEqual(lease.deadline, now() + 1800)

    def test_renew_unsure(self):
        """renew: refused, after an attempt whose answer was lost"""
        with self.locks.lease(3600) as lease:
            ask, refusal = lease.ask, dlock.BadArgument('by the test')

            async def refused(*_):
                lease._line.doubt = False       # by another call
                raise refusal

            async def no_answer(*values):
                lease.ask = refused
                await ask(*values)
                raise dlock.ConnectionLost('by the test')

            lease.ask = no_answer
            with self.assertRaises(dlock.BadArgument):
                lease.renew(1800)
            lease.ask = ask
            self.assertLessEqual(lease.deadline, now() + 1800)
            lease.renew()
            self.assertLessEqual(lease.deadline, now() + 1800)

    def test_turn(self):
        """a signal handler raises when a call has just got its turn"""
        class Interrupted(list):
            def append(self, turn):
                super().append(turn)
                raise InterruptedError('by the test')

        for kept in self.locks.lock('a', ttl=60), self.locks.lease(60):
            turns = Interrupted()
            for call, patch in (
                    (kept.__enter__, interrupted(kept, '_turn')),
                    (kept.renew, mock.patch.object(kept, '_renewals', turns)),
                    (lambda: kept.__exit__(None, None, None),
                     interrupted(kept, '_turn'))):
                with patch, self.assertRaises(InterruptedError):
                    call()
                call()
            self.assertEqual(turns, [])

    def test_acquire_interrupted(self):
        """a signal handler raises when the server has granted the lock"""
        with psycopg.connect('', autocommit=True) as db, \
                self.locks.lease(60) as lease:
            for lock in (self.locks.lock('a'), self.locks.lock('a', ttl=60),
                         lease.lock('a'), dlock.Lock(db, 'a')):
                with interrupted(lock, '_observe_hold'):
                    with self.assertRaises(InterruptedError):
                        lock.acquire()
                until_free('a')
                with lock:
                    lock.check()

    def test_undo_interrupted(self):
        """a second signal comes before or in the undo of a request"""
        with self.locks.lease(60) as lease:
            for make in (lambda: self.locks.lock('a'),
                         lambda: self.locks.lock('a', ttl=60),
                         lambda: lease.lock('a'), self.own):
                for name in '_undo', 'ask':
                    lock = make()
                    error = InterruptedError('by the test')
                    second = (
                        failing_release(lock, error) if name == 'ask' else
                        mock.patch.object(
                            lock, name, mock.Mock(side_effect=error)))
                    with interrupted(lock, '_observe_hold'), second:
                        with self.assertRaises(InterruptedError):
                            lock.acquire()
                    self.assertEqual(lock._state, 'not held')
                    if lock.ttl:
                        self.assertTrue(lock._heart.over)
                        admin(f'SELECT dlock_force_close({lock.fence})')
                    until_free('a')

    def test_undo_refused(self):
        """a connection whose release is refused in an undo is closed"""
        lock = self.own()
        with interrupted(lock, '_observe_hold'), \
                failing_release(lock, dlock.Error('by the test')):
            with self.assertRaises(InterruptedError):
                lock.acquire()
        self.assertTrue(lock._line.connection.closed)
        self.assertEqual(lock._state, 'not held')
        until_free('a')

    def test_late_cancel(self):
        """cancel(): a request that arrives late is waited for"""
        for driver in filter(None, (psycopg, psycopg2)):
            db = driver.connect('')
            db.autocommit = True
            lock = dlock.Lock(db, 'a')
            with Holder('a') as holder, cancelled(lock), late_cancels(
                    'dlock.locks', holder, db.info.backend_pid) as requests:
                lock.acquire()
                self.assertFalse(any_alive(requests))
            self.assertTrue(requests)
            lock.release()
            db.close()

    def test_failing_cancel(self):
        """cancel(): no answer to a request, or no time to wait for it"""
        interrupts = mock.Mock()
        interrupts.join.side_effect = InterruptedError('by the test')
        for request, error in ((mock.Mock(), dlock.Cancelled),
                               (interrupts, InterruptedError)):
            for lock in (self.own(), self.locks.lock('a'),
                         self.locks.lock('a', ttl=60)):
                with Holder('a') as holder, cancelled(lock), failing_cancels(
                        holder, request):
                    with self.assertRaises(error):
                        lock.acquire()
                if lock._line.given:
                    self.assertTrue(lock._line.given.closed)
                until_free('a')

    def test_cut_late(self):
        """cancel() cuts the connection of a lock that was just granted"""
        lock = self.locks.lock('a')
        ask, thread = lock._line.ask, threading.Thread(target=lock.cancel)

        async def asks(*values):
            fence = await ask(*values)
            thread.start()
            until(is_cut, lock._line.connection)
            return fence

        with mock.patch('dlock.locks.OBEY', 0), \
                mock.patch.object(lock._line, 'ask', asks):
            with self.assertRaises(dlock.Cancelled):
                lock.acquire()
        thread.join()
        until_free('a')

    def test_answer_late(self):
        """an answer that is read after the cut is lost, with its session"""
        lock = self.locks.lock('a', timeout=TIMEOUT)
        with cut_late(lambda: not is_free('a')):
            lock.acquire()
        self.assertTrue(lock.is_held())
        with cut_late(), self.assertRaises(dlock.ConnectionLost):
            lock.set_info('me')
        for call_of_lost in lock.check, lock.release:
            with self.assertRaises(dlock.LockLost):
                call_of_lost()
        with dlock.Tickets(self.locks) as tickets:
            tickets.enqueue('b')
            with cut_late(), self.assertRaises(dlock.LockLost):
                tickets.enqueue('c')
            tickets.enqueue('c')

    @staticmethod
    def own():
        return dlock.Lock(psycopg.connect('', autocommit=True), 'a')

    def test_release_interrupted(self):
        """signal handlers raise in a release, of a lock of a lease"""
        with self.locks.lease(60) as lease:
            lock, heart = lease.lock('a'), lease._heart
            for patches in (
                    [interrupted(lease, '_let_go')],
                    [unbegun(lock), interrupted(heart, 'owe')],
                    [unbegun(lock), interrupted(lock._line, 'close')],
                    [unbegun(lock), interrupted(heart, 'remove')]):
                lock.acquire()
                with ExitStack() as patched:
                    for patch in patches:
                        patched.enter_context(patch)
                    with self.assertRaises(InterruptedError):
                        lock.release()
                self.assertNotIn(lock.lost, heart.members)
                self.assertFalse(lease._free.locked())
                until(lambda: not heart.owed)
                self.assertTrue(is_free('a'))
            with lock:
                lock.check()

    def test_unbegun(self):
        """a signal handler raises before the release is sent"""
        db = psycopg.connect('', autocommit=True)
        for kept in (self.locks.lock('a', ttl=60), self.locks.lease(60),
                     self.locks.lock('a'), dlock.Lock(db, 'a')):
            kept.__enter__()
            with unbegun(kept), self.assertRaises(InterruptedError):
                kept.__exit__(None, None, None)
            self.assertEqual(kept._state, 'not held')
            if kept.ttl:
                admin(f'SELECT dlock_force_close({kept._id()})')
                self.assertTrue(kept._heart.over)
            else:
                self.assertTrue(kept._line.connection is None or db.closed)
            until_free('a')

    def test_start_interrupted(self):
        """a signal handler raises when a heartbeat starts"""
        for kept in self.locks.lock('a', ttl=60), self.locks.lease(60):
            for name in 'start', '__init__':
                with interrupted(dlock.heart.Heart, name):
                    with self.assertRaises(InterruptedError):
                        kept.__enter__()
                self.assertFalse(any(
                    pulse.hearts for pulse in dlock.heart._pulses.values()))
            until_free('a')

    def test_lose_interrupted(self):
        """a signal handler raises when a heartbeat ends"""
        class Interrupted(list):
            def remove(self, heart):
                if not interrupts:
                    interrupts.append(heart)
                    raise InterruptedError('by the test')
                super().remove(heart)

        interrupts, lease = [], self.locks.lease(60)
        lease.open()
        pulse = lease._heart.pulse
        pulse.hearts = Interrupted(pulse.hearts)
        with self.assertRaises(InterruptedError):
            lease.close()
        admin(f'SELECT dlock_force_close({lease.id})')
        self.assertTrue(lease._heart.over)
        self.assertEqual(pulse.hearts, [])

    def test_answer_interrupted(self):
        """a signal handler raises when the answer has just been read"""
        with psycopg.connect('', autocommit=True) as db:
            lock = dlock.Lock(db, 'a')

            @contextmanager
            def cut_at(*_):
                yield
                raise InterruptedError('by the test')

            with mock.patch.object(dlock.lines, 'cut_at', cut_at):
                with self.assertRaises(InterruptedError):
                    lock.acquire()
            self.assertTrue(is_free('a'))
            self.assertFalse(db.closed)

    def test_all_interrupted(self):
        """a signal handler raises when acquire_all returns its connection"""
        with self.locks.lease(60) as lease:
            with interrupted(dlock.lines.Line, 'close'):
                with self.assertRaises(InterruptedError):
                    lease.acquire_all(['a', 'b'])
            until_free('a')
            until_free('b')

    def test_same_owner(self):
        """the undo of a request of one lease, whose owner another lease has"""
        with self.locks.lease(60) as one, self.locks.lease(60) as two:
            with one.lock('a', owner='w', shared=True) as held:
                lock = two.lock('a', owner='w', shared=True)
                with interrupted(lock, '_observe_hold'):
                    with self.assertRaises(InterruptedError):
                        lock.acquire()
                self.assertEqual(
                    admin("SELECT array_agg(ticket) FROM dlock_locks('a')"),
                    f'{{{held.fence}}}')

    def test_undone_at_once(self):
        """the undo of a request with a ttl does not wait for its end"""
        lock = self.locks.lock('a', ttl=24 * 3600)
        with interrupted(lock, '_observe_hold'):
            with self.assertRaises(InterruptedError):
                lock.acquire()
        self.assertTrue(is_free('a'))

    def test_reopened(self):
        """a lock that an earlier lease was granted is lost"""
        with self.locks.lease(60) as lease:
            lock, ask = lease.lock('a'), lease._line.ask

            async def reopens(*values, **more):
                fence = await ask(*values, **more)
                lease._line.ask = ask
                admin(f'SELECT dlock_lease_close({lease.id})')
                with dlock.heart._changed:
                    lease._heart.lose('closed by the test')
                lease._heart, lease._state = None, 'not held'
                lease._free.release()
                lease.open()
                lease._free.acquire()
                return fence

            lease._line.ask = reopens
            with self.assertRaises(dlock.LockLost):
                lock.acquire()
            lease.check()
            self.assertEqual(len(lease._heart.members), 1)

    def test_try(self):
        """the timeout limits the attempt over the lease's connection, too"""
        with self.locks.lease(60) as lease:
            ask, limits = lease._line.ask, []

            async def asks(statement, until=None, *values, **more):
                limits.append(until)
                return await ask(statement, until, *values, **more)

            with mock.patch.object(lease._line, 'ask', asks):
                lock = lease.lock('a', timeout=1)
                lock.acquire()
                self.assertLessEqual(limits[0], now() + 1 + dlock.lines.GRACE)
                lock.release()

    def test_enqueue_interrupted(self):
        """Tickets: what was interrupted is undone, or can be repeated"""
        with self.locks.lease(60) as lease, \
                dlock.Tickets(self.locks, lease=lease) as tickets:
            with interrupted(tickets._line, 'ask'):
                with self.assertRaises(InterruptedError):
                    tickets.enqueue('a')
            until_free('a')
            ticket = tickets.enqueue('a', owner='me')
            with interrupted(tickets._line, 'ask'):
                with self.assertRaises(InterruptedError):
                    tickets.enqueue('a', owner='me')
            self.assertFalse(lease._heart.owed)
            with interrupted(tickets._line, 'ask'):
                with self.assertRaises(InterruptedError):
                    tickets.enqueue('a', owner='me', info='other')
            self.assertFalse(lease._heart.owed)
            with mock.patch.object(lease._heart, 'owed', {
                    lease._heart.request('a', 'me')}):
                with self.assertRaises(dlock.WrongState):
                    tickets.enqueue('a', owner='me')
            with mock.patch.object(
                    tickets._line, 'ask', side_effect=dlock.ConnectionLost('')):
                with self.assertRaises(dlock.ConnectionLost):
                    tickets.release(ticket)
            with self.assertRaises(dlock.LockLost):
                tickets.release(ticket)
            until_free('a')

    def test_enqueue_withdrawn(self):
        """Tickets of a session: an interrupted enqueue leaves no place"""
        with dlock.Tickets(self.locks) as tickets:
            line = tickets._line
            tickets.enqueue('b')
            for name in 'a', 'b':
                with interrupted(line, 'ask'):
                    with self.assertRaises(InterruptedError):
                        tickets.enqueue(name)
            self.assertTrue(is_free('a'))
            self.assertFalse(is_free('b'))
            with interrupted(line, 'ask'), \
                    failing_release(tickets, dlock.Error('by the test')):
                with self.assertRaises(InterruptedError):
                    tickets.enqueue('a')
            until_free('a')
            with self.assertRaises(dlock.LockLost):
                tickets.next(0)

    def test_enqueue_unconfirmed(self):
        """Tickets: an enqueue returns before it is known to be granted"""
        with self.locks.lease(60) as lease:
            for options in {}, {'lease': lease}:
                with dlock.Tickets(self.locks, **options) as tickets:
                    with Holder('a'):
                        with interrupted(tickets, '_confirm'):
                            waits = tickets.enqueue('a')
                            held = tickets.enqueue('b')
                        self.assertEqual(
                            tickets.next(0)[:3], ('granted', 'b', held))
                        self.assertIsNone(tickets.next(0))
                    self.assertEqual(
                        tickets.next(TIMEOUT)[:3], ('granted', 'a', waits))
                    self.assertIsNone(tickets.next(0))
                    tickets.release(waits)
                    tickets.release(held)

    def test_restored(self):
        """Tickets of a lease, after a reconnect: each request has its own
        time, and one that is refused ends only its ticket"""
        cut_at, limits, asked = dlock.lines.cut_at, [], []

        def limit(*values):
            limits.append(values)
            return cut_at(*values)

        async def ask(connection, statement, *values):
            asked.append(statement)
            return await dlock.Tickets.ask(connection, statement, *values)

        with self.locks.lease(3600) as lease, \
                dlock.Tickets(self.locks, lease=lease) as tickets:
            one, two = tickets.enqueue('a', slots=2), tickets.enqueue('b')
            self.assertEqual(
                {tickets.next(TIMEOUT).ticket for _ in range(2)}, {one, two})
            terminate()
            admin(f'SELECT dlock_force_release({one})')
            with psycopg.connect('', autocommit=True) as db, \
                    dlock.Lock(db, 'a', slots=3), \
                    mock.patch.object(dlock.lines, 'cut_at', limit), \
                    mock.patch.object(tickets, 'ask', ask):
                self.assertEqual(tickets.next(0)[:3], ('lost', 'a', one))
            self.assertEqual(len(limits), len(asked))
            # over the new connection
            admin(f'SELECT dlock_force_release({two})')
            self.assertEqual(tickets.next(TIMEOUT)[:3], ('released', 'b', two))

    def test_ticket_kept(self):
        """Tickets of a session: an interrupted release can be repeated"""
        with dlock.Tickets(self.locks) as tickets:
            ticket = tickets.enqueue('a')
            with failing_release(tickets, InterruptedError('by the test')):
                with self.assertRaises(InterruptedError):
                    tickets.release(ticket)
            tickets.release(ticket)
            self.assertTrue(is_free('a'))

    def test_debts(self):
        """the debt of one call stays when another call is settled"""
        debt = Debt(Dsn('of this test'), 'a', 'me')
        debt.owe(7)
        debt.owe(7)
        debt.paid(7)
        self.assertEqual(debt.ticket, 7)
        debt.paid(7)
        self.assertIsNone(debt.ticket)

    def test_events_lost(self):
        """Tickets of a session: no event of a lost ticket follows the loss"""
        with dlock.Tickets(self.locks) as tickets:
            tickets.enqueue('a')
            tickets.watch('b')
            until(lambda: run(tickets._listen()) or len(tickets._events) == 2)
            terminate()
            with self.assertRaises(dlock.LockLost):
                tickets.next(0)
            self.assertEqual(
                {event.event for event in iter(lambda: tickets.next(0), None)},
                {'free'})

    def test_closing(self):
        """until its connection is closed, the object cannot be used"""
        for kept in self.locks.lock('a', timeout=0), self.locks.lease(60):
            close, states = kept._line.close, []

            async def closing(*values):
                states.append(kept._state)
                await close(*values)

            kept._line.close = closing
            with kept:
                pass
            self.assertEqual(states, ['being released'])
            states.clear()
            with mock.patch.object(
                    kept._line, 'ask', side_effect=dlock.LockTimeout('')):
                with self.assertRaises(dlock.LockTimeout):
                    kept.__enter__()
            self.assertEqual(set(states), {'asked for'})

    def test_fork(self):
        """a child process uses its own connections, and nobody's turn"""
        with self.locks.lock('a', timeout=0) as lock, \
                self.locks.lease(3600) as lease:
            connection = lease._line.connection
            # of other threads, which the child does not have
            lease._free.acquire()
            lease._renewals.append(object())
            tickets = dlock.Tickets(self.locks)
            ticket = tickets.enqueue('c')
            kept = dlock.Tickets(self.locks, lease=lease)
            leased = kept.enqueue('d')
            child = os.fork()
            if not child:
                try:
                    # before any call, which two threads may make
                    self.assertEqual(lock._state, 'not held')
                    told = []
                    lock.lost.add_callback(told.append)
                    self.assertEqual(told, [lock])
                    self.assertIsNone(lease._line.connection)
                    with self.assertRaises(dlock.LockLost):
                        tickets.next(0)
                    tickets.close()
                    with self.assertRaises(dlock.LockLost):
                        kept.release(leased)
                    with self.assertRaises(dlock.LockTimeout):
                        lock.acquire()
                    with lease, lease.lock('b'):
                        lease.renew()
                        self.assertIsNot(lease._line.connection, connection)
                    os._exit(0)
                finally:
                    os._exit(1)
            status = os.waitpid(child, 0)[1]
            lease._free.release()
            lease._renewals.clear()
            self.assertEqual(os.waitstatus_to_exitcode(status), 0)
            self.assertTrue(lock.is_held())
            lease.renew()
            tickets.release(ticket)
            tickets.close()
            kept.release(leased)
            kept.close()

    def test_next_call(self):
        """over a lease's connection: the next call of another thread"""
        with self.locks.lease(3600) as lease:
            line, let_go, ask = lease._line, lease._let_go, lease._line.ask

            async def next_call():
                await let_go()
                line.sent, line.doubt = now() + 60, False

            async def no_answer(*values, **named):
                await ask(*values, **named)
                line.doubt = True
                raise dlock.ConnectionLost('by the test')

            lease._let_go = next_call
            lease.renew()
            self.assertLessEqual(lease.deadline, now() + 0.99 * 3600)
            line.ask = no_answer
            with self.assertRaises(dlock.ConnectionLost):
                lease.lock('a').acquire()
            line.ask = ask
            self.assertTrue(is_free('a'))

    def test_close_in_open(self):
        """close in the thread whose open it interrupts"""
        def connect():
            with self.assertRaises(dlock.WrongState):
                lease.close()
            return ''

        lease = dlock.Locks(connect, **PATIENT).lease(3600)
        with lease:
            lease.check()

    def test_heart(self):
        """renew: without an answer, the shorter ttl counts"""
        with self.locks.lease(3600) as lease:
            lease._line.patience = 0
            lease._heart.change(30, 10)
            self.assertLessEqual(lease.deadline, now() + 30)
            lease._heart.change(3600, 1200)
            self.assertLessEqual(lease._heart.life, 30)
            self.assertEqual(lease._heart.interval, 10)

    def test_connecting(self):
        """the watcher limits a heartbeat that was connecting, too"""
        until(lambda: not dlock.heart._watching)
        one, two = socket.socketpair()
        pulse = mock.Mock(hearts=[], asked=0.0)
        pulse.line.connection, pulse.line.sent = None, 0.0
        pulse.shortest.return_value = 0
        pulses, asked = {None: pulse}, []

        def wait(seconds):
            asked.append(pulse.asked)
            self.assertGreater(seconds, 0)
            pulse.line.connection = one
            if pulse.asked is None:
                pulses.clear()

        with one, two, mock.patch.object(dlock.heart, '_pulses', pulses), \
                mock.patch.object(dlock.heart._changed, 'wait', wait):
            dlock.heart._watch()
            self.assertEqual(asked, [0.0, None])
            self.assertEqual(two.recv(1), b'')

    def test_told(self):
        """a loss is told once, also if no lease is left"""
        until(lambda: not dlock.heart._watching)
        lost, told = dlock.Lost(self, lambda: None), []
        lost.add_callback(told.append)
        with mock.patch.object(dlock.heart, '_untold', [lost, lost]), \
                mock.patch.object(dlock.heart._changed, 'wait'):
            dlock.heart._watch()
        until(lambda: all(thread.name != 'dlock lost'
                          for thread in threading.enumerate()))
        self.assertEqual(told, [self])

    def test_change(self):
        """downgrade, set_info and is_held in transaction scope"""
        with psycopg.connect('') as db:
            lock = dlock.Lock(db, 'a', scope='transaction')
            self.assertFalse(lock.is_held())
            with lock:
                self.assertTrue(lock.is_held())
                lock.set_info('one')
                self.assertEqual(mode('a'), 'exclusive|one')
                lock.set_info(None)
                lock.downgrade()
                self.assertEqual(mode('a'), 'shared|')
                lock.check()
            db.rollback()
        with self.locks.lease(3600) as lease:
            lease.set_info('two')
            self.assertEqual(admin('SELECT info FROM dlock_leases'), 'two')

    def test_change_reopened(self):
        """set_info and renew: an answer for an earlier lease does not concern
        the next one"""
        with self.locks.lease(3600) as lease:
            ask = lease._ask

            async def answer(_):
                lease._ask = ask
                lease.close()
                lease.open()
                return None, now(), False

            for change in (lambda: lease.set_info('one'), lease.renew,
                           lambda: lease.renew(7200)):
                lease._ask = answer
                with self.assertRaises(dlock.WrongState) as raised:
                    change()
                self.assertEqual(raised.exception.sqlstate, '55000')
                lease.check()
                self.assertEqual(lease.ttl, 3600)

    def test_all(self):
        """acquire_all: each is released by itself"""
        with self.locks.lease(3600) as lease:
            one, two = lease.acquire_all(['b', 'a'], info='me')
            self.assertEqual((one.name, two.name), ('b', 'a'))
            self.assertEqual(mode('b'), 'exclusive|me')
            with self.assertRaises(dlock.WrongState):
                lease.acquire_all(['c', 'a'])
            one.release()
            self.assertTrue(is_free('b'))
            self.assertFalse(is_free('a'))
            admin(f'SELECT dlock_force_release({two.fence})')
            with self.assertRaises(dlock.LockLost):
                two.release()
            lease.acquire_all(['a', 'b', 'a'])
            [old] = lease.acquire_all(['c'])
            lease.close()
            lease.open()
            lease.acquire_all(['c'])
            with self.assertRaises(dlock.LockLost):
                old.release()
            with self.assertRaises(dlock.WrongState):
                lease.acquire_all(['c'])
        with psycopg.connect('', autocommit=True) as db:
            calls = dlock.Calls(db)
            for fence in calls.acquire_all(['b', 'a']):
                self.assertTrue(calls.downgrade(fence))
                self.assertTrue(calls.set_info(fence, 'x'))
                calls.release_ticket(fence)
                with self.assertRaises(dlock.LockLost):
                    calls.release_ticket(fence)
            fence = dlock.Calls(db).acquire_all(['c'])[0]
            with db.transaction():
                calls.release_at_commit(fence)
                self.assertFalse(is_free('c'))
            self.assertTrue(is_free('c'))

    def test_observer(self):
        """an observer: seconds, errors and logs"""
        seen = []
        locks = dlock.Locks('', observer=seen.append, **PATIENT)
        with locks.lock('a'):
            pass
        with Holder('a'), self.assertRaises(dlock.LockTimeout):
            locks.lock('a', timeout=0).acquire()
        self.assertTrue(all(one.seconds >= 0 for one in seen))
        self.assertIsInstance(seen[-1].error, dlock.LockTimeout)

        def broken(_):
            raise KeyError

        with self.assertLogs('dlock', logging.ERROR):
            with dlock.Locks('', observer=broken).lock('a'):
                pass
        with self.assertLogs('dlock', logging.INFO) as logs:
            with dlock.Locks('', observer=dlock.logged).lock('a'):
                pass
        self.assertRegex(logs.output[0], 'waited a in session scope')


if __name__ == '__main__':
    if django:
        from django.conf import settings
        settings.configure(USE_TZ=True, DATABASES={'default': {
            'ENGINE': 'django.db.backends.postgresql',
            'NAME': os.environ['PGDATABASE'], 'USER': os.environ['PGUSER'],
            'HOST': os.environ['PGHOST'], 'PORT': os.environ['PGPORT'],
            'CONN_MAX_AGE': None}, 'other': {
            'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}})
        django.setup()
    main()
