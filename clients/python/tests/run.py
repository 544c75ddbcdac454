"""The scenarios of clients/scenarios.md, for the Python client.

Each row has one function with its name, for blocking and asynchronous calls.
test/t/client_python.pl starts this program.
"""

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from unittest import mock

import psycopg
from psycopg.pq import TransactionStatus

import dlock
from dlock.lines import now

TIMEOUT = int(os.environ['PG_TEST_TIMEOUT_DEFAULT'])
LONG = 3600
SHORT = 2 * max(1, TIMEOUT // 180)
KEPT = {'ttl': LONG, 'interval': 0.5}


def dsn(server, user='app', options=''):
    host, port = os.environ[f'DLOCK_{server}'].split(':')
    return f'host={host} port={port} dbname=postgres user={user} {options}'


MAIN, OTHER = dsn('MAIN'), dsn('OTHER')
locks = dlock.Locks(MAIN, patience=TIMEOUT)
async_locks = dlock.AsyncLocks(MAIN, patience=TIMEOUT)


#
# Support for the rows
#

start = ThreadPoolExecutor(20).submit
rows = {}


def row(test):
    rows[test.__name__.removesuffix('_row')] = test
    return test


def order(line):
    """Asks the test that started this program for an action."""
    print(f'! {line}', flush=True)
    if sys.stdin.readline() != 'done\n':
        os._exit(2)     # the test has ended


class Admin:
    """Another session"""

    def __init__(self, server='MAIN'):
        self.dsn = dsn(server, 'admin')
        self.connection = None

    def __call__(self, sql, *values):
        end = time.monotonic() + TIMEOUT
        while True:
            try:
                if self.connection is None or self.connection.closed:
                    self.connection = psycopg.connect(
                        self.dsn, autocommit=True, application_name='admin')
                row = self.connection.execute(sql, values).fetchone()
                return row and (row[0] if len(row) == 1 else row)
            except psycopg.OperationalError:
                if (self.connection and not self.connection.closed
                        or time.monotonic() > end):
                    raise
                self.connection = None
                time.sleep(0.01)

    def until(self, sql, *values):
        wait_until(lambda: self(sql, *values), f'{sql} {values}')

    def is_free(self, name):
        return self('SELECT dlock_try_xact_acquire(%s) IS NOT NULL', name)

    def left(self, name):
        return self('SELECT count(*) FROM dlock_locks WHERE name = %s', name)

    def until_waits(self, name, count=1):
        self.until('SELECT count(*) = %s FROM dlock_locks '
                   'WHERE name = %s AND NOT granted', count, name)

    def force(self, ticket):
        assert self('SELECT dlock_force_release(%s)', ticket)

    def renewed_at(self, lease):
        return self('SELECT renewed_at FROM dlock_leases WHERE lease = %s',
                    lease)

    def until_renewed(self, lease, count=1):
        for _ in range(count):
            self.until('SELECT renewed_at > %s FROM dlock_leases '
                       'WHERE lease = %s', self.renewed_at(lease), lease)

    def heartbeat(self):
        """The process of the heartbeat's connection, as soon as there is one"""
        self.until("SELECT count(*) = 1 FROM pg_stat_activity "
                   "WHERE application_name = 'dlock heartbeat'")
        return self("SELECT min(pid) FROM pg_stat_activity "
                    "WHERE application_name = 'dlock heartbeat'")

    @contextmanager
    def holds(self, *names):
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for name in names:
                ticket = connection.execute(
                    'SELECT dlock_acquire(%s)', [name]).fetchone()[0]
            yield ticket
            connection.execute('SELECT dlock_release_all()')


admin = Admin()


def wait_until(condition, what='something'):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, f'waited for {what}'
        time.sleep(0.01)


def start_twice(call):
    """In two threads at the same time: one is refused; returns the other"""
    calls = [start(call) for _ in range(2)]
    wait(calls, TIMEOUT, FIRST_EXCEPTION)
    refused, = [one for one in calls if one.done() and one.exception()]
    with raises(dlock.WrongState, '55000'):
        refused.result()
    calls.remove(refused)
    return calls[0]


def late(kind=dlock.Locks, **options):
    # no check of the connection ends an abandoned call
    return kind(dsn('MAIN', options="options='-c search_path=late,public "
                    "-c client_connection_check_interval=1h'"), **options)


@contextmanager
def renewals_wait():
    with psycopg.connect(admin.dsn, autocommit=True) as other:
        other.execute('SELECT pg_advisory_lock(17)')
        yield


def until_call_waits():
    admin.until('SELECT count(*) = 1 FROM pg_stat_activity '
                "WHERE usename = 'app' AND wait_event = 'advisory'")


@contextmanager
def abandoned(function):
    """Calls of this function in the late schema wait.  Yields a function that
    lets later calls return at once.  At the end, the calls that have waited are
    executed, and their sessions have ended."""
    with psycopg.connect(admin.dsn, autocommit=True) as other:
        other.execute('SELECT pg_advisory_lock(18)')
        other.execute('INSERT INTO late.waits VALUES (%s)', [function])
        yield lambda: other.execute('DELETE FROM late.waits')
        pids = other.execute('SELECT array_agg(pid) FROM pg_stat_activity '
                             "WHERE usename = 'app' AND wait_event = 'advisory'"
                             ).fetchone()[0]
        assert pids, 'no call has waited'
    admin.until('SELECT count(*) = 0 FROM pg_stat_activity '
                'WHERE pid = ANY (%s)', pids)


@contextmanager
def raises(kind, code=None):
    try:
        yield
    except kind as error:
        assert code is None or error.sqlstate == code, error.sqlstate
    else:
        raise AssertionError(f'no {kind}')


def connection():
    return psycopg.connect(MAIN, autocommit=True)


async def async_connection():
    return await psycopg.AsyncConnection.connect(MAIN, autocommit=True)


def told(lost):
    assert lost.wait(TIMEOUT), 'not told of the loss'


async def beside(function, *arguments):
    """Waits in another thread while the loop continues."""
    return await asyncio.get_running_loop().run_in_executor(
        None, function, *arguments)


#
# Plain use
#

@row
def session_acquire_release():
    with locks.lock('plain', info='me') as lock:
        assert not admin.is_free('plain')
        assert admin('SELECT ticket, info, scope FROM dlock_locks '
                     "WHERE name = 'plain'") == (lock.fence, 'me', 'session')
        fence = lock.fence
        lock.check()
    assert admin.left('plain') == 0

    async def same():
        async with async_locks.lock('plain') as lock:
            assert lock.fence > fence
            assert not admin.is_free('plain')
        assert admin.left('plain') == 0
    asyncio.run(same())


@row
def session_exception():
    with raises(KeyError):
        with locks.lock('plain'):
            raise KeyError
    assert admin.left('plain') == 0

    async def same():
        with raises(KeyError):
            async with async_locks.lock('plain'):
                raise KeyError
        assert admin.left('plain') == 0
    asyncio.run(same())


@row
def session_on_connection():
    with connection() as db:
        with dlock.Lock(db, 'plain') as outer:
            with dlock.Lock(db, 'plain') as inner:
                assert inner.fence == outer.fence
                db.execute('SELECT 1')
            assert not admin.is_free('plain')
        assert admin.is_free('plain')
        db.execute('SELECT 1')

    async def same():
        async with await async_connection() as db:
            async with dlock.AsyncLock(db, 'plain') as outer:
                async with dlock.AsyncLock(db, 'plain') as inner:
                    assert inner.fence == outer.fence
                    await db.execute('SELECT 1')
                assert not admin.is_free('plain')
            assert admin.is_free('plain')
            await db.execute('SELECT 1')
    asyncio.run(same())


@row
def lock_used_twice():
    for options in {}, {'ttl': LONG}:
        lock = locks.lock('twice', **options)
        with admin.holds('twice'):
            waiting = start_twice(lock.acquire)
        fence = waiting.result(TIMEOUT)
        with raises(dlock.WrongState, '55000'):
            lock.acquire()
        lock.check()
        assert lock.fence == fence
        lock.release()
        assert admin.left('twice') == 0
        with lock:
            assert lock.fence > fence

    async def same():
        for options in {}, {'ttl': LONG}:
            lock = async_locks.lock('twice', **options)
            with admin.holds('twice'):
                waiting = [asyncio.ensure_future(lock.acquire())
                           for _ in range(2)]
                await beside(admin.until_waits, 'twice')
                with raises(dlock.WrongState, '55000'):
                    await waiting[1]
            fence = await waiting[0]
            with raises(dlock.WrongState, '55000'):
                await lock.acquire()
            lock.check()
            await lock.release()
            assert admin.left('twice') == 0
            async with lock:
                assert lock.fence > fence
    asyncio.run(same())


@row
def check_unheld():
    def refused(kept):
        with raises(dlock.WrongState, '55000'):
            kept.check()

    with connection() as db, db.transaction():
        for kept in (locks.lock('plain'), locks.lock('plain', ttl=LONG),
                     dlock.Lock(db, 'plain', scope='transaction'),
                     locks.lease(LONG)):
            refused(kept)
            with kept:
                kept.check()
            refused(kept)
    with connection() as db, raises(dlock.BadArgument, '22023'):
        dlock.Lock(db.cursor(), 'plain')

    # a child process does not hold its parent's locks
    with locks.lock('session') as session, locks.lease(LONG) as lease, \
            lease.lock('leased') as leased:
        child = os.fork()
        if not child:
            unheld = 0
            for kept in session, leased, lease:
                for call in (kept.check,
                             getattr(kept, 'release', None) or kept.close):
                    try:
                        call()
                    except dlock.Error:
                        unheld += 1
            os._exit(unheld)
        # closing a lease that is not open does nothing
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        for kept in session, leased, lease:
            kept.check()

    async def same():
        for kept in async_locks.lock('plain'), async_locks.lease(LONG):
            refused(kept)
            async with kept:
                kept.check()
            refused(kept)
    asyncio.run(same())


def busy(timeout):
    """Each scope requests a lock that another session holds."""
    with admin.holds('busy'), connection() as db:
        for lock in (locks.lock('busy', timeout=timeout),
                     dlock.Lock(db, 'busy', timeout=timeout),
                     locks.lock('busy', timeout=timeout, ttl=LONG)):
            with raises(dlock.LockTimeout, '55P03'):
                lock.acquire()
            assert admin.left('busy') == 1
        with db.transaction(), raises(dlock.LockTimeout, '55P03'):
            dlock.Lock(db, 'busy', scope='transaction',
                       timeout=timeout).acquire()
        assert admin.left('busy') == 1

        async def same():
            async with await async_connection() as db:
                for lock in (
                        async_locks.lock('busy', timeout=timeout),
                        dlock.AsyncLock(db, 'busy', timeout=timeout),
                        async_locks.lock('busy', timeout=timeout, ttl=LONG)):
                    with raises(dlock.LockTimeout, '55P03'):
                        await lock.acquire()
                    assert admin.left('busy') == 1
        asyncio.run(same())


@row
def try_busy():
    busy(0)


@row
def timeout():
    busy(0.05)


@row
def shared():
    with locks.lock('shared', shared=True) as first:
        with locks.lock('shared', shared=True) as second:
            assert first.fence != second.fence
            with raises(dlock.LockTimeout):
                locks.lock('shared', timeout=0).acquire()
            assert admin("SELECT count(*) FROM dlock_locks "
                         "WHERE name = 'shared' AND granted") == 2
    with locks.lock('shared', timeout=0):
        pass


@row
def slots():
    big = locks.lock('slots', slots=3, permits=2)
    big.acquire()
    with locks.lock('slots', slots=3):
        with raises(dlock.LockTimeout):
            locks.lock('slots', slots=3, timeout=0).acquire()
        with raises(dlock.WrongState, '55000'):
            locks.lock('slots', slots=4).acquire()
        big.release()
        with locks.lock('slots', slots=3, timeout=0):
            pass


@row
def resize():
    def slots():
        return admin("SELECT slots FROM dlock_slots WHERE name = 'resized'")

    with raises(dlock.NotAllowed, '42501'):
        locks.resize('resized', 1)
    root = dlock.Locks(admin.dsn)
    root.resize('resized', 1)
    assert slots() == 1
    root.resize('resized', None)
    assert slots() is None

    async def same():
        with raises(dlock.NotAllowed, '42501'):
            await async_locks.resize('resized', 1)
        root = dlock.AsyncLocks(admin.dsn)
        await root.resize('resized', 1)
        assert slots() == 1
        await root.resize('resized', None)
        assert slots() is None
    asyncio.run(same())


@row
def transaction_commit():
    with connection() as db:
        with db.transaction():
            with dlock.Lock(db, 'plain', scope='transaction') as lock:
                assert lock.fence == admin(
                    "SELECT ticket FROM dlock_locks WHERE name = 'plain'")
            assert not admin.is_free('plain')
        assert admin.is_free('plain')

    async def same():
        async with await async_connection() as db:
            async with db.transaction():
                async with dlock.AsyncLock(db, 'plain', scope='transaction'):
                    pass
                assert not admin.is_free('plain')
            assert admin.is_free('plain')
    asyncio.run(same())


@row
def transaction_rollback():
    with connection() as db:
        with raises(KeyError):
            with db.transaction():
                with dlock.Lock(db, 'plain', scope='transaction'):
                    raise KeyError
        assert admin.is_free('plain')


@row
def transaction_none():
    with locks.lock('lease', ttl=LONG) as lease:
        with connection() as db:
            with raises(dlock.WrongState, '55000'):
                dlock.Lock(db, 'plain', scope='transaction').acquire()
            with raises(dlock.WrongState, '55000'):
                lease.guard(db)
            assert admin.left('plain') == 0
            db.execute('SELECT 1')

        async def same():
            async with await async_connection() as db:
                with raises(dlock.WrongState, '55000'):
                    await dlock.AsyncLock(
                        db, 'plain', scope='transaction').acquire()
                with raises(dlock.WrongState, '55000'):
                    await dlock.AsyncCalls(db).guard(lease)
        asyncio.run(same())


@row
def lease_acquire_release():
    def look(lock):
        assert admin('SELECT ticket, scope, pid, owner, info FROM dlock_locks '
                     "WHERE name = 'lease'") == (
            lock.fence, 'lease', None, 'job/1', 'me')
        assert not lock.lost
        assert lock.deadline > now()
        lock.check()

    options = {'ttl': LONG, 'owner': 'job/1', 'info': 'me'}
    with locks.lock('lease', **options) as lock:
        look(lock)
    assert not lock.lost and admin.left('lease') == 0

    async def same():
        async with async_locks.lock('lease', **options) as lock:
            look(lock)
        assert not lock.lost and admin.left('lease') == 0
    asyncio.run(same())


@row
def lease_renews():
    with locks.lock('lease', **KEPT) as lock:
        deadline = lock.deadline
        admin.until_renewed(lock.fence, 2)
        assert not admin.is_free('lease') and not lock.lost
        wait_until(lambda: lock.deadline > deadline)


@row
def lease_deadline():
    lock = late().lock('lease', ttl=LONG)
    with renewals_wait():
        with admin.holds('lease'):
            waiting = start(lock.acquire)
            admin.until_waits('lease')
        until_call_waits()
        assert not waiting.done()
        latest = now() + LONG * 0.99
    waiting.result(TIMEOUT)
    assert latest - LONG < lock.deadline <= latest
    lock.release()


def leases():
    return admin('SELECT count(*) FROM dlock_leases')


@row
def lease_many():
    def held(count):
        return admin('SELECT count(*) = 1 AND min(held) = %s FROM dlock_leases '
                     'WHERE lease = %s', count, lease.id)

    with locks.lease(LONG, info='many') as lease:
        many = [lease.lock(name) for name in ('a', 'b', 'c')]
        for lock in many:
            lock.acquire()
        assert held(3)
        many[0].release()
        assert held(2) and admin.is_free('a') and not admin.is_free('b')
        with raises(dlock.LockTimeout):
            lease.lock('b', timeout=0).acquire()
    assert leases() == 0
    assert admin.is_free('b') and admin.is_free('c')

    async def same():
        nonlocal lease
        async with async_locks.lease(LONG) as lease:
            async with lease.lock('a'), lease.lock('b'):
                assert held(2)
            assert held(0)
        assert leases() == 0
    asyncio.run(same())


@row
def acquire_all():
    def is_undone(lease):
        wait_until(lambda: not lease._heart.owed)
        return admin.left('a') == 0 and admin.left('b') == 1

    with locks.lease(LONG) as lease:
        with admin.holds('b'):
            with raises(dlock.LockTimeout, '55P03'):
                lease.acquire_all(['a', 'b'], timeout=0)
            assert is_undone(lease)
            # as if the answer to an earlier request had been lost
            with connection() as db:
                db.execute("SELECT dlock_lease_acquire('a', %s)", [lease.id])
            breaks_off(lambda: lease.acquire_all(['a', 'b']))
            assert is_undone(lease)
        for lock in lease.acquire_all(['a', 'b']):
            lock.check()
        assert not admin.is_free('a') and not admin.is_free('b')
    assert admin.is_free('a') and admin.is_free('b')

    async def same():
        async with async_locks.lease(LONG) as lease:
            with admin.holds('b'):
                with raises(dlock.LockTimeout, '55P03'):
                    await lease.acquire_all(['a', 'b'], timeout=0)
                assert is_undone(lease)
                waiting = asyncio.ensure_future(lease.acquire_all(['a', 'b']))
                await beside(admin.until_waits, 'b')
                waiting.cancel()
                with raises(asyncio.CancelledError):
                    await waiting
                assert is_undone(lease)
            for lock in await lease.acquire_all(['a', 'b']):
                lock.check()
            assert not admin.is_free('a') and not admin.is_free('b')
        assert admin.is_free('a') and admin.is_free('b')
    asyncio.run(same())


@row
def renew_ttl():
    def shows(ttl, since):
        return admin(
            'SELECT ttl = make_interval(secs => %s) FROM dlock_leases '
            'WHERE lease = %s', ttl, lease) and (
            since + ttl * 0.99 <= kept.deadline <= now() + ttl * 0.99)

    with locks.lock('renewed', ttl=LONG) as lock, locks.lease(LONG) as many:
        for kept, lease in (lock, lock.fence), (many, many.id):
            for ttl in 2 * LONG, LONG / 2:
                since = now()
                kept.renew(ttl)
                assert shows(ttl, since)
            with raises(dlock.BadArgument, '22023'):
                kept.renew(1e12)
            assert shows(ttl, since)
    with locks.lock('renewed') as session:
        with raises(dlock.WrongState, '55000'):
            session.renew()


@row
def change_held():
    with locks.lease(LONG) as lease:
        for lock in (locks.lock('held'), locks.lock('held', ttl=LONG),
                     lease.lock('held')):
            fence = lock.acquire()
            assert lock.is_held()
            lock.set_info('me')
            lock.downgrade()
            assert lock.is_held() and lock.fence == fence
            assert admin('SELECT ticket, info, mode FROM dlock_locks '
                         "WHERE name = 'held'") == (fence, 'me', 'shared')
            admin.force(fence)
            assert not lock.is_held()
            for call in lock.downgrade, lock.release:
                with raises(dlock.LockLost, '55L01'):
                    call()


@row
def lease_closed_under_lock():
    lease = locks.lease(LONG)
    lease.open()
    lock = lease.lock('closed')
    lock.acquire()
    lease.close()
    assert admin.left('closed') == 0
    told(lock.lost)
    for call in lock.check, lock.release:
        with raises(dlock.LockLost, '55L01'):
            call()
    lease.close()
    assert not lease.lost

    async def same():
        with raises(dlock.LockLost, '55L01'):
            async with async_locks.lease(LONG) as lease:
                async with lease.lock('closed') as lock:
                    await lease.close()
                    await asyncio.wait_for(lock.lost.wait(), TIMEOUT)
        assert admin.left('closed') == 0
    asyncio.run(same())


@row
def lease_opened_twice():
    lease = locks.lease(LONG)
    start_twice(lease.open).result(TIMEOUT)
    with raises(dlock.WrongState, '55000'):
        lease.open()
    assert leases() == 1
    lease.close()
    assert leases() == 0

    async def same():
        lease = async_locks.lease(LONG)
        opening = asyncio.ensure_future(lease.open())
        await asyncio.sleep(0)
        with raises(dlock.WrongState, '55000'):
            await lease.open()
        await opening
        with raises(dlock.WrongState, '55000'):
            await lease.open()
        assert leases() == 1
        await lease.close()
        assert leases() == 0
    asyncio.run(same())


@row
def lease_closed_while_opening():
    lease = locks.lease(LONG)
    order('freeze')
    opening = start_twice(lease.open)
    closing = start(lease.close)
    wait_until(lambda: closing.running() or closing.done())
    order('thaw')
    closing.result(TIMEOUT)
    opening.result(TIMEOUT)
    assert leases() == 0
    with lease:
        lease.check()

    async def same():
        lease = async_locks.lease(LONG)
        order('freeze')
        opening = asyncio.ensure_future(lease.open())
        closing = asyncio.ensure_future(lease.close())
        await asyncio.sleep(0)
        with raises(dlock.WrongState, '55000'):
            await lease.open()
        order('thaw')
        await closing
        assert opening.done() and await opening
        assert leases() == 0
        async with lease:
            lease.check()
    asyncio.run(same())


def connections():
    return admin('SELECT count(*) FROM pg_stat_activity '
                 "WHERE usename = 'app'")


@row
def connections_row():
    with locks.lease(LONG) as lease:
        many = [lease.lock(f'many/{n}') for n in range(1000)]
        many += [locks.lock(f'own/{n}', ttl=LONG) for n in range(10)]
        for lock in many:
            lock.acquire()
        assert connections() <= 4
        for lock in many:
            lock.release()
        assert connections() <= 4

    async def same():
        async with async_locks.lease(LONG) as lease:
            many = [lease.lock(f'many/{n}') for n in range(1000)]
            await asyncio.gather(*(lock.acquire() for lock in many))
            assert connections() <= 4
            await asyncio.gather(*(lock.release() for lock in many))
            assert connections() <= 4
    asyncio.run(same())


@row
def connections_waiting():
    names = [f'busy/{n}' for n in range(20)]

    def locks_of(locks, lease):
        return [*(lease.lock(name) for name in names[:10]),
                *(locks.lock(name, ttl=LONG) for name in names[10:])]

    def until_at_most(count):
        wait_until(lambda: connections() <= count, f'{count} connections')

    all_wait = 'SELECT count(*) = 20 FROM dlock_locks WHERE NOT granted'
    with locks.lease(LONG) as lease:
        many = locks_of(locks, lease)
        with admin.holds(*names):
            waiting = [start(lock.acquire) for lock in many]
            admin.until(all_wait)
            until_at_most(22)
        for one in waiting:
            one.result(TIMEOUT)
        until_at_most(4)
        for lock in many:
            lock.release()

    async def same():
        async with async_locks.lease(LONG) as lease:
            many = locks_of(async_locks, lease)
            with admin.holds(*names):
                waiting = asyncio.gather(*(lock.acquire() for lock in many))
                await beside(admin.until, all_wait)
                until_at_most(22)
            await waiting
            until_at_most(4)
            await asyncio.gather(*(lock.release() for lock in many))
    asyncio.run(same())


@row
def lease_same_owner():
    with connection() as db:
        fence = db.execute("SELECT dlock_ttl_acquire('lease', '1 h', "
                           "owner => 'job/1')").fetchone()[0]
    with locks.lock('lease', ttl=2 * LONG, owner='job/1', timeout=0) as lock:
        assert lock.fence == fence
        assert lock.deadline < now() + LONG
        with raises(dlock.LockTimeout):
            locks.lock('lease', ttl=LONG, owner='job/2', timeout=0).acquire()
    assert admin.left('lease') == 0


@row
def guard_commits():
    with locks.lock('lease', ttl=LONG) as lock, connection() as db:
        with db.transaction():
            lock.guard(db)
            db.execute('INSERT INTO data VALUES (1)')
    assert admin('SELECT count(*) FROM data WHERE n = 1') == 1

    async def same():
        async with async_locks.lock('lease', ttl=LONG) as lock, \
                await async_connection() as db:
            async with db.transaction():
                await lock.guard(db)
                await db.execute('INSERT INTO data VALUES (1)')
    asyncio.run(same())
    assert admin('SELECT count(*) FROM data WHERE n = 1') == 2


@row
def guard_refuses():
    with raises(dlock.LockLost):
        with locks.lock('lease', ttl=LONG) as lock, connection() as db:
            admin.force(lock.fence)
            with raises(dlock.LockLost, '55L01'):
                with db.transaction():
                    lock.guard(db)
                    db.execute('INSERT INTO data VALUES (2)')
    assert admin('SELECT count(*) FROM data WHERE n = 2') == 0


@row
def enqueue_free():
    with dlock.Tickets(locks) as tickets:
        ticket = tickets.enqueue('queue')
        assert tickets.next(TIMEOUT)[:3] == ('granted', 'queue', ticket)
        next_one = tickets.enqueue('next')
        assert tickets.next(TIMEOUT)[:3] == ('granted', 'next', next_one)
        assert tickets.next(0) is None
        tickets.release(ticket)
        assert admin.is_free('queue') and not admin.is_free('next')

    async def same():
        async with dlock.AsyncTickets(async_locks) as tickets:
            coming = asyncio.ensure_future(tickets.next(TIMEOUT))
            await asyncio.sleep(0)
            ticket = await tickets.enqueue('queue')
            assert (await coming)[:3] == ('granted', 'queue', ticket)
            assert await tickets.next(0) is None
            await tickets.release(ticket)
    asyncio.run(same())


@row
def enqueue_waits():
    with dlock.Tickets(locks) as tickets:
        with admin.holds('queue'):
            ticket = tickets.enqueue('queue')
            assert tickets.next(0) is None
        assert tickets.next(TIMEOUT)[:3] == ('granted', 'queue', ticket)

    async def same():
        async with dlock.AsyncTickets(async_locks) as tickets:
            with admin.holds('queue'):
                ticket = await tickets.enqueue('queue')
                assert await tickets.next(0) is None
            assert (await tickets.next(TIMEOUT))[2] == ticket
    asyncio.run(same())


@row
def enqueue_thousands():
    count = 2000
    with psycopg.connect(admin.dsn, autocommit=True) as holder:
        holder.execute("SELECT count(dlock_acquire('job/' || n)) "
                       'FROM generate_series(1, %s) AS n', [count])
        with dlock.Tickets(locks) as tickets:
            waiting = {tickets.enqueue(f'job/{n}') for n in range(1, count + 1)}
            assert len(waiting) == count
            assert admin('SELECT count(*) FROM pg_stat_activity '
                         "WHERE application_name = 'dlock'") == 1
            holder.execute('SELECT dlock_release_all()')
            for _ in range(count):
                event = tickets.next(TIMEOUT)
                assert event.event == 'granted'
                waiting.remove(event.ticket)
            assert tickets.next(0) is None


@row
def enqueue_connection_killed():
    with locks.lease(LONG) as lease, \
            dlock.Tickets(locks) as ours, \
            dlock.Tickets(locks) as unread, \
            dlock.Tickets(locks) as released, \
            dlock.Tickets(locks, lease=lease) as kept:
        with admin.holds('busy'):
            ours.enqueue('free')
            assert ours.next(TIMEOUT).event == 'granted'
            unread.enqueue('unread')
            lost = released.enqueue('released')
            held, waits = kept.enqueue('kept'), kept.enqueue('busy')
            assert kept.next(TIMEOUT)[:3] == ('granted', 'kept', held)
            kill_sessions()
            with raises(dlock.LockLost):
                ours.next(TIMEOUT)
            again = ours.enqueue('free')
            assert ours.next(TIMEOUT)[:3] == ('granted', 'free', again)
            with raises(dlock.LockLost):
                unread.enqueue('next')
            next_one = unread.enqueue('next')
            assert unread.next(TIMEOUT)[:3] == ('granted', 'next', next_one)
            with raises(dlock.LockLost):
                released.release(lost)
            new = released.enqueue('released')
            assert released.next(TIMEOUT)[:3] == ('granted', 'released', new)
            assert kept.next(0) is None
            assert admin('SELECT array_agg(ticket ORDER BY ticket) '
                         'FROM dlock_locks WHERE lease = %s',
                         lease.id) == [held, waits]
        assert kept.next(TIMEOUT)[:3] == ('granted', 'busy', waits)
        kept.release(waits)
        kept.release(held)


@row
def enqueue_released():
    with dlock.Tickets(locks) as tickets:
        ticket = tickets.enqueue('queue')
        assert tickets.next(TIMEOUT).event == 'granted'
        admin.force(ticket)
        assert tickets.next(TIMEOUT)[:3] == ('released', 'queue', ticket)
        with raises(dlock.LockLost):
            tickets.release(ticket)


@row
def election_hand_over():
    leaving = [threading.Event() for _ in range(2)]
    led = []

    def work(n):
        def lead(lock):
            led.append((n, lock.fence))
            assert leaving[n].wait(TIMEOUT)
            return n
        return lead

    first = start(locks.election('leader', ttl=LONG, info='node-1').run, work(0))
    wait_until(lambda: led)
    second = start(locks.election('leader', ttl=LONG, info='node-2').run, work(1))
    admin.until_waits('leader')
    assert admin("SELECT info FROM dlock_locks "
                 "WHERE name = 'leader' AND granted") == 'node-1'
    assert len(led) == 1
    leaving[0].set()
    assert first.result(TIMEOUT) == 0
    wait_until(lambda: len(led) == 2)
    leaving[1].set()
    assert second.result(TIMEOUT) == 1
    assert led[0][1] < led[1][1]

    with admin.holds('leader'):
        election = locks.election('leader', ttl=LONG)
        running = start(election.run, work(0))
        admin.until_waits('leader')
        election.stop()
        assert running.result(TIMEOUT) is None
        assert admin.left('leader') == 1


@row
def election_lost():
    led = []

    def work(lock):
        led.append(lock.fence)
        if len(led) == 1:
            admin.force(lock.fence)
            told(lock.lost)
        return len(led)

    assert locks.election('leader', **KEPT).run(work) == 2
    assert led[0] < led[1]

    async def same():
        async def work(lock):
            led.append(lock.fence)
            if len(led) == 3:
                admin.force(lock.fence)
                await asyncio.sleep(TIMEOUT)
                led.append('not cancelled')
            return len(led)
        assert await async_locks.election('leader', **KEPT).run(work) == 4
    asyncio.run(same())
    assert led[2] < led[3]


@row
def election_restart():
    with locks.lease(**KEPT) as lease:
        lease.lock('leader').acquire()
        hasty = dlock.Locks(MAIN, patience=0)
        running = start(hasty.election('leader', ttl=LONG).run,
                        lambda lock: 'led')
        admin.until_waits('leader')
        order('restart')
        admin.until_renewed(lease.id)
        assert not running.done()
    assert running.result(TIMEOUT) == 'led'

    async def same():
        async with async_locks.lease(**KEPT) as lease:
            await lease.lock('leader').acquire()
            hasty = dlock.AsyncLocks(MAIN, patience=0)

            async def work(lock):
                return 'led'
            running = asyncio.ensure_future(
                hasty.election('leader', ttl=LONG).run(work))
            await beside(admin.until_waits, 'leader')
            await beside(order, 'restart')
            await beside(admin.until_renewed, lease.id)
            assert not running.done()
        assert await running == 'led'
    asyncio.run(same())


@row
def election_outage():
    led, returned = [], threading.Event()

    def work(lock):
        led.append(lock.fence)
        if len(led) == 1:
            told(lock.lost)
        returned.set()
        return lock.fence

    hasty = dlock.Locks(MAIN, patience=0)
    running = start(hasty.election('leader', ttl=SHORT).run, work)
    wait_until(lambda: led)
    order('freeze')
    assert returned.wait(TIMEOUT)
    order('thaw')
    assert running.result(TIMEOUT) > led[0]

    async def same():
        led, returned = [], asyncio.Event()

        async def work(lock):
            led.append(lock.fence)
            try:
                if len(led) == 1:
                    order('freeze')
                    await asyncio.wait_for(lock.lost.wait(), TIMEOUT)
            finally:
                returned.set()
            return lock.fence

        hasty = dlock.AsyncLocks(MAIN, patience=0)
        running = asyncio.ensure_future(
            hasty.election('leader', ttl=SHORT).run(work))
        await asyncio.wait_for(returned.wait(), TIMEOUT)
        order('thaw')
        assert await running > led[0]
    asyncio.run(same())


@row
def watch():
    def change():
        with psycopg.connect(admin.dsn, autocommit=True) as db:
            ticket = db.execute("SELECT dlock_acquire('leader', "
                                "info => 'node-1')").fetchone()[0]
            yield ticket
            db.execute('SELECT dlock_release_all()')
        yield

    events = dlock.watch(locks, 'leader')
    assert next(events)[:2] == ('free', 'leader')
    changes = change()
    ticket = next(changes)
    held = next(events)
    assert held[:3] == ('held', 'leader', ticket)
    assert held.details['info'] == 'node-1'
    kill_sessions()
    # over a new connection, the first event is the current holder
    assert next(events)[:3] == ('held', 'leader', ticket)
    next(changes)
    assert next(events)[:2] == ('free', 'leader')
    events.close()

    async def same():
        events = dlock.async_watch(async_locks, 'leader')
        assert (await anext(events))[:2] == ('free', 'leader')
        changes = change()
        ticket = next(changes)
        assert (await anext(events))[:3] == ('held', 'leader', ticket)
        next(changes)
        assert (await anext(events))[:2] == ('free', 'leader')
        await events.aclose()
    asyncio.run(same())


@row
def observer():
    seen = []

    def broken(one):
        seen.append((one.what, one.name, one.scope))
        raise KeyError

    def all_seen():
        expected = [('waited', 'a', 'session'), ('held', 'a', 'session'),
                    ('failed', 'busy', 'lease'),
                    ('waited', 'b', 'lease'), ('lost', 'b', 'lease')]
        wait_until(lambda: len(seen) >= len(expected))
        return seen == expected

    observed = dlock.Locks(MAIN, observer=broken)
    with observed.lock('a') as lock:
        lock.check()
    with admin.holds('busy'), raises(dlock.LockTimeout, '55P03'):
        observed.lock('busy', timeout=0, ttl=LONG).acquire()
    with raises(dlock.LockLost, '55L01'), observed.lock('b', **KEPT) as lock:
        admin.force(lock.fence)
        told(lock.lost)
    assert all_seen()

    async def same():
        seen.clear()
        observed = dlock.AsyncLocks(MAIN, observer=broken)
        async with observed.lock('a') as lock:
            lock.check()
        with admin.holds('busy'), raises(dlock.LockTimeout, '55P03'):
            await observed.lock('busy', timeout=0, ttl=LONG).acquire()
        with raises(dlock.LockLost, '55L01'):
            async with observed.lock('b', **KEPT) as lock:
                admin.force(lock.fence)
                await asyncio.wait_for(lock.lost.wait(), TIMEOUT)
        assert all_seen()
    asyncio.run(same())


@row
def errors():
    def fails(kind, code, *statement, hint=None):
        with connection() as db:
            with raises(kind, code), dlock.translated():
                db.execute(*statement)
            try:
                with dlock.translated():
                    db.execute('ROLLBACK')
                    db.execute(*statement)
            except dlock.Error as error:
                assert hint is None or error.hint == hint
                assert type(error) is kind

    with admin.holds('busy'):
        with raises(dlock.LockTimeout, '55P03'):
            locks.lock('busy', timeout=0).acquire()
        waiter = locks.lock('busy')
        waiting = start(waiter.acquire)
        admin.until_waits('busy')
        assert admin('SELECT pg_cancel_backend(pid) FROM dlock_locks '
                     'WHERE NOT granted')
        with raises(dlock.Cancelled, '57014'):
            waiting.result(TIMEOUT)

    with connection() as one, connection() as two:
        with dlock.Lock(one, 'a'), dlock.Lock(two, 'b'):
            waiting = [start(dlock.Lock(one, 'b').acquire),
                       start(dlock.Lock(two, 'a').acquire)]
            wait_until(lambda: any(w.done() for w in waiting))
            victim, = [w for w in waiting if w.done()]
            with raises(dlock.Deadlock, '40P01'):
                victim.result()
            # the other acquire still waits, and uses its connection
            admin('SELECT pg_cancel_backend(pid) FROM dlock_locks '
                  'WHERE NOT granted')
            wait_until(lambda: all(w.done() for w in waiting))

    fails(dlock.LockLost, '55L01', "SELECT dlock_guard('gone', 1)")
    with raises(dlock.NotAllowed, '42501'):
        locks.lock('reserved/1').acquire()
    with raises(dlock.NotPrimary, '25006'):
        dlock.Locks(dsn('STANDBY'), patience=0).lock('standby').acquire()
    fails(dlock.StaleVersion, '40001', "SELECT dlock_version_bump('doc', 7)")
    with raises(dlock.BadArgument, '22023'):
        locks.lock('slots', slots=0).acquire()
    with raises(dlock.BadArgument, '22004'):
        locks.lock(None).acquire()
    with locks.lock('slots', slots=2):
        with raises(dlock.WrongState, '55000'):
            locks.lock('slots', slots=3).acquire()
    for kind, code in ((dlock.NoRoom, '53200'), (dlock.NoRoom, '53400'),
                       (dlock.QuorumLate, '58030'), (dlock.Error, '22012')):
        fails(kind, code, 'SELECT raise(%s, %s)', [code, 'do this'],
              hint='do this')
    with raises(dlock.ConnectionLost):
        dlock.Locks('host=127.0.0.1 port=1', patience=0).lock('x').acquire()


@row
def sharding():
    names = [f'shard/{n}' for n in range(20)]
    both = dlock.Locks([MAIN, OTHER], keys=['main', 'other'])
    turned = dlock.Locks([OTHER, MAIN], keys=['other', 'main'])
    third = dlock.Locks([MAIN, OTHER, 'host=nowhere'],
                        keys=['main', 'other', 'third'])
    other = Admin('OTHER')
    held = [both.lock(name) for name in names]
    for lock in held:
        lock.acquire()
    here, there = ({name for name in names if who.left(name)}
                   for who in (admin, other))
    assert here and there and here | there == set(names) and not here & there
    for name in names:
        with raises(dlock.LockTimeout):
            turned.lock(name, timeout=0).acquire()
        assert third.server(name) in ('host=nowhere', both.server(name))
    assert any(third.server(name) == 'host=nowhere' for name in names)
    for lock in held:
        lock.release()


#
# Faults
#

def kill_sessions():
    admin('SELECT count(pg_terminate_backend(pid, 60000)) '
          "FROM pg_stat_activity WHERE usename = 'app'")


@row
def session_connection_killed():
    with raises(dlock.LockLost):
        with locks.lock('killed') as lock:
            kill_sessions()
            with admin.holds('killed') as fence:
                assert fence > lock.fence


@row
def session_restart():
    with raises(dlock.LockLost):
        with locks.lock('restart') as lock:
            order('restart')
    with locks.lock('restart') as again:
        assert again.fence > lock.fence


@row
def lease_connection_killed():
    with locks.lock('lease', **KEPT) as lock:
        for _ in range(2):
            admin.heartbeat()
            kill_sessions()
            admin.until_renewed(lock.fence)
        assert not lock.lost and admin(
            "SELECT dlock_check('lease', %s)", lock.fence)

    async def same():
        async with async_locks.lock('lease', **KEPT) as lock:
            kill_sessions()
            admin.until_renewed(lock.fence)
            assert not lock.lost
    asyncio.run(same())


@row
def lease_acquire_killed():
    for acquire in locks.lock('lease', ttl=LONG, owner='job/1'), :
        with admin.holds('lease'):
            waiting = start(acquire.acquire)
            admin.until_waits('lease')
            pid = admin('SELECT pid FROM dlock_locks WHERE NOT granted')
            assert admin('SELECT pg_terminate_backend(%s, 60000)', pid)
            admin.until_waits('lease')
        fence = waiting.result(TIMEOUT)
        assert admin('SELECT array_agg(ticket), min(owner) FROM dlock_locks '
                     "WHERE name = 'lease'") == ([fence], 'job/1')
        acquire.release()


@row
def lease_backend_stopped():
    with locks.lock('lease', **KEPT) as lock:
        pid = admin.heartbeat()
        order(f'stop {pid}')
        admin.until_renewed(lock.fence, 2)
        assert not lock.lost
        order(f'continue {pid}')
        assert not admin.is_free('lease')
    assert admin.left('lease') == 0


@row
def lease_server_stopped():
    async def both():
        with raises(dlock.LockLost, '55L01'):
            async with async_locks.lock('other', ttl=SHORT) as other:
                with locks.lock('lease', ttl=SHORT) as lock:
                    await beside(admin.heartbeat)
                    order('freeze')
                    await asyncio.wait_for(other.lost.wait(), TIMEOUT)
                    await beside(told, lock.lost)
                    for lost in other, lock:
                        with raises(dlock.LockLost):
                            lost.check()
                    order('thaw')
                    assert admin('SELECT true')
                    assert lock.lost and other.lost

    asyncio.run(both())
    for name in 'lease', 'other':
        admin.until('SELECT dlock_try_xact_acquire(%s) IS NOT NULL', name)


@row
def lease_client_stopped():
    with raises(dlock.LockLost):
        with locks.lock('lease', ttl=SHORT) as lock:
            called = threading.Event()
            lock.lost.add_callback(lambda lock: called.set())
            order(f'suspend {os.getpid()} '
                  "SELECT dlock_try_xact_acquire('lease') IS NOT NULL")
            assert lock.lost
            assert called.wait(TIMEOUT)
            assert admin('SELECT true') and lock.lost
            with admin.holds('lease') as fence:
                assert fence > lock.fence


@row
def lease_restart():
    with locks.lock('lease', **KEPT) as lock:
        order('restart')
        admin.until_renewed(lock.fence, 2)
        assert not lock.lost
        assert admin("SELECT dlock_check('lease', %s)", lock.fence)
    assert admin.left('lease') == 0


@row
def lease_worker_killed():
    with locks.lock('lease', **KEPT) as lock:
        fence = lock.fence
        successor = locks.lock('lease', ttl=LONG)
        waiting = start(successor.acquire)
        admin.until_waits('lease')
        assert admin('SELECT pg_terminate_backend(pid, 60000) '
                     'FROM pg_stat_activity '
                     "WHERE backend_type = 'dlock worker'")
        admin.until_renewed(lock.fence, 2)
        assert not lock.lost
    assert waiting.result(TIMEOUT) > fence
    successor.release()


@row
def lease_forced_release():
    with raises(dlock.LockLost):
        with locks.lock('lease', **KEPT) as lock:
            admin.force(lock.fence)
            told(lock.lost)
            assert lock.lost and lock.lost

    async def same():
        with raises(dlock.LockLost):
            async with async_locks.lock('lease', **KEPT) as lock:
                admin.force(lock.fence)
                await asyncio.wait_for(lock.lost.wait(), TIMEOUT)
    asyncio.run(same())


@row
def lease_forced_one_of_many():
    with locks.lease(**KEPT) as lease:
        with lease.lock('kept') as kept, raises(dlock.LockLost):
            with lease.lock('forced') as forced:
                admin.force(forced.fence)
                told(forced.lost)
                assert not kept.lost and not lease.lost
    assert admin.left('kept') == 0


@row
def lease_quorum_late():
    with late().lock('lease', **KEPT) as lock:
        admin.heartbeat()
        admin.until_renewed(lock.fence)
        admin('UPDATE late.quorum SET late = true RETURNING true')
        called = admin('SELECT last_value FROM late.calls')
        # the first call may have been sent before the update
        admin.until('SELECT last_value > %s + 1 FROM late.calls', called)
        deadline = lock.deadline
        admin.until('SELECT last_value > %s + 3 FROM late.calls', called)
        assert lock.deadline == deadline and not lock.lost
        admin('UPDATE late.quorum SET late = false RETURNING true')
        wait_until(lambda: lock.deadline > deadline)
        assert not lock.lost


@row
def lease_opened_late():
    with raises(dlock.LockLost, '55L01'), late().lease(1) as lease:
        lease.check()

    async def same():
        async with late(dlock.AsyncLocks).lease(1) as lease:
            lease.check()

    with raises(dlock.LockLost, '55L01'):
        asyncio.run(same())
    admin.until('SELECT count(*) = 0 FROM dlock_leases')
    admin.until('SELECT count(*) = 0 FROM pg_stat_activity '
                "WHERE usename = 'app'")


@row
def lease_callback():
    called = []

    def bad(lock):
        called.append(('bad', lock))
        sys.exit(1)

    with raises(dlock.LockLost):
        with locks.lock('lease', **KEPT) as lock:
            lock.lost.add_callback(bad)
            lock.lost.add_callback(lambda lock: called.append(('good', lock)))
            admin.force(lock.fence)
            told(lock.lost)
            wait_until(lambda: len(called) == 2)
            lock.lost.add_callback(lambda lock: called.append(('late', lock)))
    assert called == [('bad', lock), ('good', lock), ('late', lock)]


@row
def lease_callback_hangs():
    called, may_return = threading.Event(), threading.Event()

    def hang(lock):
        called.set()
        may_return.wait(2 * TIMEOUT)

    with raises(dlock.LockLost):
        with locks.lease(SHORT, interval=0.2) as lease:
            lock = lease.lock('lease')
            lock.acquire()
            lock.lost.add_callback(hang)
            admin.force(lock.fence)
            assert called.wait(TIMEOUT)
            order('freeze')
            wait_until(lease.lost.is_set, 'the loss of the lease')
            may_return.set()
            order('thaw')


@row
def acquire_client_timeout():
    async def ends():
        for options in {}, {'ttl': LONG}:
            with admin.holds('busy'):
                with raises(asyncio.TimeoutError):
                    await asyncio.wait_for(
                        async_locks.lock('busy', **options).acquire(), 0.1)
                assert admin.left('busy') == 1
            admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL")
    asyncio.run(ends())

    for options in {}, {'ttl': LONG}:
        with admin.holds('busy'):
            lock = locks.lock('busy', **options)
            timer = threading.Timer(0.1, lock.cancel)
            timer.start()
            with raises(dlock.Cancelled):
                lock.acquire()
            timer.join()
            assert admin.left('busy') == 1
        admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL")


@row
def acquire_cancelled():
    for options in {}, {'ttl': LONG}:
        with admin.holds('busy'):
            lock = locks.lock('busy', **options)
            waiting = start(lock.acquire)
            admin.until_waits('busy')
            lock.cancel()
            with raises(dlock.Cancelled):
                waiting.result(TIMEOUT)
            assert admin.left('busy') == 1
        admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL")

    with renewals_wait():
        lock = late().lock('busy', ttl=LONG)
        waiting = start(lock.acquire)
        until_call_waits()
        lock.cancel()
        with raises(dlock.Cancelled):
            waiting.result(TIMEOUT)
        assert admin.left('busy') == 0

    async def same():
        for options in {}, {'ttl': LONG}:
            with admin.holds('busy'):
                task = asyncio.ensure_future(
                    async_locks.lock('busy', **options).acquire())
                await beside(admin.until_waits, 'busy')
                task.cancel()
                with raises(asyncio.CancelledError):
                    await task
                assert admin.left('busy') == 1
            admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL")

        # cancelled after the grant, during the renewal
        with renewals_wait():
            task = asyncio.ensure_future(
                late(dlock.AsyncLocks).lock('busy', ttl=LONG).acquire())
            await beside(until_call_waits)
            task.cancel()
            with raises(asyncio.CancelledError):
                await task
            assert admin.left('busy') == 0
    asyncio.run(same())


class Alarm(Exception):
    pass


@contextmanager
def alarms(interval):
    """A signal handler raises in the block; with an interval, twice."""
    left = [None] * (2 if interval else 1)

    def handler(*_):
        if left:
            left.pop()
            raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def breaks_off(call, twice=False):
    try:
        with alarms(0.002 if twice else 0):
            call()
    except Alarm:
        return
    raise AssertionError('not broken off')


@row
def acquire_broken_off():
    with locks.lease(LONG) as lease, connection() as db:
        kept = lease.lock('kept')
        kept.acquire()
        for twice in False, True:
            for lock in (locks.lock('busy'), locks.lock('busy', ttl=LONG),
                         lease.lock('busy'), dlock.Lock(db, 'busy')):
                with admin.holds('busy'):
                    breaks_off(lock.acquire, twice)
                    admin.until('SELECT count(*) = 1 FROM dlock_locks '
                                "WHERE name = 'busy'")
                admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL")
                if not twice:
                    db.execute('SELECT 1')
        kept.check()

    async def same():
        trouble = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: trouble.append(context))
        async with async_locks.lease(LONG) as lease:
            for steps in 0, 1, 3, 8:
                for lock in (async_locks.lock('busy'), lease.lock('busy'),
                             async_locks.lock('busy', ttl=LONG)):
                    with admin.holds('busy'):
                        task = asyncio.ensure_future(lock.acquire())
                        await beside(admin.until_waits, 'busy')
                        task.cancel()
                        for _ in range(steps):
                            await asyncio.sleep(0)
                        task.cancel()
                        with raises(asyncio.CancelledError):
                            await task
                        for _ in range(2):
                            await (await async_connection()).close()
                        await beside(admin.until,
                                     'SELECT count(*) = 1 FROM dlock_locks '
                                     "WHERE name = 'busy'")
            # cancelled at each step of the connect
            with admin.holds('busy'):
                for steps in range(1, 12):
                    task = asyncio.ensure_future(
                        async_locks.lock('busy').acquire())
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    with raises(asyncio.CancelledError):
                        await asyncio.wait_for(task, TIMEOUT)
        del task
        gc.collect()
        assert not trouble, trouble
    asyncio.run(same())


@row
def waiter_killed():
    with admin.holds('busy'):
        waiter = subprocess.Popen([
            sys.executable, '-c', 'import sys, dlock; dlock.Locks(sys.argv[1])'
            f".lock('busy', ttl={LONG}).acquire()", MAIN],
            cwd=os.path.dirname(os.path.dirname(dlock.__file__)))
        admin.until_waits('busy')
        waiter.kill()
        waiter.wait()
        admin.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'")


@row
def server_silent():
    hasty = dlock.Locks(MAIN, patience=1)
    session = locks.lock('mine')
    session.acquire()
    waiter = locks.lock('busy', ttl=LONG)

    async def cancelled():
        with raises(asyncio.TimeoutError):
            await asyncio.wait_for(
                dlock.AsyncLocks(MAIN).lock('y', ttl=LONG).acquire(), 0.1)

    with admin.holds('busy'):
        waiting = start(waiter.acquire)
        admin.until_waits('busy')
        order('freeze')
        asked = [start(hasty.lock('x', timeout=0.05, **options).acquire)
                 for options in ({}, {'ttl': LONG})]
        asked.append(start(hasty.lease(LONG).open))
        released = start(session.release)
        beside = start(asyncio.run, cancelled())
        waiter.cancel()
        for ended, kind in [*((one, dlock.ConnectionLost) for one in asked),
                            (released, dlock.LockLost),
                            (waiting, dlock.Cancelled)]:
            with raises(kind):
                ended.result(TIMEOUT)
        beside.result(TIMEOUT)
        order('thaw')
    admin.until('SELECT count(*) = 0 FROM dlock_locks')


@row
def release_silent():
    with locks.lease(**KEPT) as lease:
        held = [lease.lock('silent'), locks.lock('own', **KEPT)]
        for lock in held:
            lock.acquire()
        pids = admin('SELECT array_agg(pid) FROM pg_stat_activity '
                     "WHERE application_name = 'dlock'")
        for pid in pids:
            order(f'stop {pid}')
        for lock in held:
            lock.release()
            assert admin.left(lock.name) == 0
        assert not lease.lost
        for pid in pids:
            order(f'continue {pid}')


@row
def release_owed():
    with dlock.Locks(MAIN, patience=0.1).lease(**KEPT) as lease:
        lock = lease.lock('owed')
        lock.acquire()
        kill_sessions()
        order('freeze')
        with raises(dlock.ConnectionLost):
            lock.release()
        order('thaw')
        admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'")
        assert not lease.lost
        with lease.lock('owed', timeout=0):
            pass

    async def same():
        async with dlock.AsyncLocks(MAIN, patience=0.1).lease(**KEPT) as lease:
            lock = lease.lock('owed')
            await lock.acquire()
            await beside(order, 'freeze')
            with raises(asyncio.TimeoutError):
                await asyncio.wait_for(lock.release(), 0.1)
            await beside(order, 'thaw')
            await beside(admin.until, 'SELECT count(*) = 0 FROM dlock_locks '
                         "WHERE name = 'owed'")
    asyncio.run(same())


@row
@mock.patch('dlock.callers.cancel', mock.Mock())
@mock.patch('dlock.locks.cancel', mock.Mock())
def acquire_owed():
    # neither a cancel nor a check of the connection ends the request
    unchecked = dsn(
        'MAIN', options="options='-c client_connection_check_interval=1h'")

    def until_undone(lease):
        admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'")
        admin.until_renewed(lease.id)
        return not lease.lost

    with dlock.Locks(unchecked, patience=0.1).lease(**KEPT) as lease:
        lock = lease.lock('owed')
        with admin.holds('owed'):
            waiting = start(lock.acquire)
            admin.until_waits('owed')
            order('freeze')
            lock.cancel()
            with raises(dlock.Cancelled):
                waiting.result(TIMEOUT)
            order('thaw')
        assert until_undone(lease)

    async def same():
        hasty = dlock.AsyncLocks(unchecked, patience=0.1)
        async with hasty.lease(**KEPT) as lease:
            with admin.holds('owed'):
                waiting = asyncio.ensure_future(lease.lock('owed').acquire())
                await beside(admin.until_waits, 'owed')
                order('freeze')
                waiting.cancel()
                with raises(asyncio.CancelledError):
                    await waiting
                order('thaw')
            assert await beside(until_undone, lease)
    asyncio.run(same())


def is_held(name, fence):
    return admin('SELECT dlock_check(%s, %s)', name, fence)


# a cancel would end the abandoned call
@row
@mock.patch('dlock.callers.cancel', mock.Mock())
def release_late():
    job = {'ttl': LONG, 'owner': 'job/1'}
    impatient = late(patience=0.1)
    first = impatient.lock('late', **job)
    first.acquire()
    with abandoned('dlock_release_ticket') as wait_no_more:
        with raises(dlock.ConnectionLost):
            first.release()
        wait_no_more()
        second = impatient.lock('late', **job)
        assert second.acquire() > first.fence
    assert is_held('late', second.fence)
    second.release()

    async def same():
        impatient = late(dlock.AsyncLocks, patience=0.1)
        first = impatient.lock('late', **job)
        await first.acquire()
        with abandoned('dlock_release_ticket') as wait_no_more:
            with raises(asyncio.TimeoutError):
                await asyncio.wait_for(first.release(), 0.1)
            wait_no_more()
            second = impatient.lock('late', **job)
            assert await second.acquire() > first.fence
        assert is_held('late', second.fence)
        await second.release()
    asyncio.run(same())


@row
def release_repeated():
    patient = late()
    with patient.lease(LONG) as lease, \
            dlock.Tickets(patient, lease=lease) as tickets:
        ticket = tickets.enqueue('queue')
        with abandoned('dlock_release_ticket') as wait_no_more:
            releasing = start(tickets.release, ticket)
            until_call_waits()
            admin('SELECT dlock_release_ticket(%s)', ticket)
            wait_no_more()
            releasing.result(TIMEOUT)


@row
def release_refused():
    with connection() as db:
        lock = dlock.Lock(db, 'plain')
        fence = lock.acquire()
        db.execute('BEGIN')
        with raises(psycopg.errors.DivisionByZero):
            db.execute('SELECT 1 / 0')
        with raises(dlock.Error, '25P02'):
            lock.release()
        lock.check()
        assert lock.fence == fence and is_held('plain', fence)
        db.execute('ROLLBACK')
        lock.release()
        assert admin.is_free('plain')

    async def same():
        async with await async_connection() as db:
            lock = dlock.AsyncLock(db, 'plain')
            fence = await lock.acquire()
            await db.execute('BEGIN')
            with raises(psycopg.errors.DivisionByZero):
                await db.execute('SELECT 1 / 0')
            with raises(dlock.Error, '25P02'):
                await lock.release()
            lock.check()
            assert lock.fence == fence and is_held('plain', fence)
            await db.execute('ROLLBACK')
            await lock.release()
            assert admin.is_free('plain')
    asyncio.run(same())


@row
@mock.patch('dlock.callers.cancel', mock.Mock())
@mock.patch('dlock.locks.cancel', mock.Mock())
def undo_late():
    job = {'ttl': LONG, 'owner': 'job/1'}
    impatient = late(patience=0.1)
    with abandoned('dlock_locks') as wait_no_more:
        with admin.holds('late'):
            first = impatient.lock('late', **job)
            waiting = start(first.acquire)
            admin.until_waits('late')
            first.cancel()
            with raises(dlock.Cancelled):
                waiting.result(TIMEOUT)
            wait_no_more()
        second = impatient.lock('late', **job)
        second.acquire()
    assert is_held('late', second.fence)
    second.release()

    async def same():
        impatient = late(dlock.AsyncLocks, patience=0.1)
        with abandoned('dlock_locks') as wait_no_more:
            with admin.holds('late'):
                waiting = asyncio.ensure_future(
                    impatient.lock('late', **job).acquire())
                await beside(admin.until_waits, 'late')
                waiting.cancel()
                with raises(asyncio.CancelledError):
                    await waiting
                wait_no_more()
            second = impatient.lock('late', **job)
            await second.acquire()
        assert is_held('late', second.fence)
        await second.release()
    asyncio.run(same())


@row
def renew_late():
    impatient = late(patience=0.1)
    with impatient.lock('late', ttl=LONG) as lock:
        with abandoned('dlock_renew') as wait_no_more:
            with raises(dlock.ConnectionLost):
                lock.renew(LONG / 2)
            wait_no_more()
            lock.renew(LONG)
            assert lock.deadline <= now() + LONG / 2
        lock.check()


@row
def renew_lost():
    job = {'ttl': LONG, 'owner': 'job/1'}
    impatient = late(patience=0.1)
    first, second = (impatient.lock('late', **job) for _ in range(2))
    for after in True, False:
        first.acquire()
        with abandoned('dlock_renew') as wait_no_more:
            with raises(dlock.ConnectionLost):
                first.renew(SHORT)
            order('freeze')
            if after:
                told(first.lost)
            with raises((dlock.LockLost, dlock.ConnectionLost)):
                first.release()
            order('thaw')
            wait_no_more()
            assert second.acquire() > first.fence
        assert is_held('late', second.fence)
        second.release()
        first = impatient.lock('late', **job)


@row
def pool_returned():
    class Pool:
        def __init__(self):
            self.idle = [connection()]

        @contextmanager
        def connection(self):
            db = self.idle.pop()
            try:
                yield db
            finally:
                dlock.reset(db)
                self.idle.append(db)

    pool = Pool()
    with pool.connection() as db:
        pid = db.info.backend_pid
        forgotten = dlock.Lock(db, 'pool')
        forgotten.acquire()
        with raises(psycopg.errors.DivisionByZero):
            with db.transaction():
                db.execute('SELECT 1 / 0')
        db.autocommit = False
        with raises(psycopg.errors.DivisionByZero):
            db.execute('SELECT 1 / 0')
    assert admin.is_free('pool')
    with pool.connection() as db:
        assert db.info.backend_pid == pid
        assert not db.execute("SELECT dlock_is_held('pool')").fetchone()[0]
    db.close()

    async def same():
        async with await async_connection() as db:
            await dlock.AsyncLock(db, 'pool').acquire()
            await db.set_autocommit(False)
            with raises(psycopg.errors.DivisionByZero):
                await db.execute('SELECT 1 / 0')
            await dlock.async_reset(db)
            assert admin.is_free('pool')
            assert db.info.transaction_status == TransactionStatus.IDLE
    asyncio.run(same())


@row
def clock_stepped():
    day = 86400
    with locks.lock('lease', **KEPT) as lock:
        before = time.time()
        deadline = lock.deadline
        for seconds in day, -day:
            order(f'clock {seconds}')
            assert abs(time.time() - before - seconds) < day / 2
            assert not lock.lost and lock.deadline < deadline + LONG
            admin.until_renewed(lock.fence)
        wait_until(lambda: lock.deadline > deadline)
        assert lock.deadline < now() + LONG
    with raises(dlock.LockLost):
        with locks.lock('lease', ttl=SHORT) as lock:
            admin.heartbeat()
            order('freeze')
            told(lock.lost)
            order('thaw')
    order('clock 0')


@row
def lease_promotion():
    hosts, ports = zip(*(os.environ[f'DLOCK_{server}'].split(':')
                         for server in ('OTHER', 'STANDBY')))
    pair = dlock.Locks(f"host={','.join(hosts)} port={','.join(ports)} "
                       'dbname=postgres user=app')
    promoted = Admin('STANDBY')
    with pair.lock('lease', **KEPT) as lock:
        order('promote')
        promoted.until('SELECT count(*) = 1 FROM dlock_leases WHERE lease = %s',
                       lock.fence)
        promoted.until_renewed(lock.fence, 2)
        assert not lock.lost
        fence = lock.fence
        assert promoted("SELECT dlock_check('lease', %s)", fence)
    assert promoted.left('lease') == 0
    with pair.lock('lease', ttl=LONG) as lock:
        assert lock.fence > fence


def main(names):
    failed = 0
    for name in names or rows:
        began = time.monotonic()
        try:
            rows[name]()
            admin.until('SELECT count(*) = 0 FROM dlock_locks')
            # the next row looks for its own heartbeat
            admin.until("SELECT count(*) = 0 FROM pg_stat_activity "
                        "WHERE application_name = 'dlock heartbeat'")
            print(f'ok {name}')
        except BaseException:
            failed = 1
            for line in traceback.format_exc().splitlines():
                print(f'# {line}')
            print(f'not ok {name}')
            order('thaw')
            order('clock 0')
            admin('SELECT count(dlock_force_release(ticket)) FROM dlock_locks')
        print(f'# {name}: {time.monotonic() - began:.1f} s', flush=True)
    return failed


# tests cause errors in callbacks, which the package logs
logging.disable()
# do not wait for threads that a failed row has left
status = main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
