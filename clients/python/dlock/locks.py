"""Locks, leases, and elections."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from .callers import (
    UNDO, Asyncio, Blocking, Caller, Statement, both, execute, run, settle)
from .errors import (
    BadArgument, Cancelled, ConnectionLost, Error, LockLost, NotPrimary,
    QuorumLate, WrongState)
from .heart import AsyncLost, Heart, Lost, rhythm
from .lines import PAUSE, Line, call, delta, now

T = TypeVar('T')

# The state of a lock or a lease: or asked for, held, being released
NONE = 'not held'

FUNCTIONS = {'session': 'dlock_acquire', 'transaction': 'dlock_xact_acquire',
             'lease': 'dlock_lease_acquire'}
# What a request of this owner may have left, where nobody knows
TAKE_BACK = ('SELECT count(dlock_release_ticket(ticket)) FROM dlock_locks(%s)'
             " WHERE owner = %s AND scope = 'lease' AND role = current_user")


class BaseLocks:
    def __init__(self, dsn: str | Sequence[str], *,
                 keys: Sequence[str] | None = None,
                 patience: float = 30) -> None:
        """One DSN, which may name several hosts; or those of several servers,
        each with a key by which names are spread over them.  A server that is
        away is waited for as long as there is patience."""
        self.dsns = [dsn] if isinstance(dsn, str) else list(dsn)
        self.keys = self.dsns if keys is None else list(keys)
        if not self.dsns or len(set(self.keys)) != len(self.dsns):
            raise BadArgument('each server needs a key of its own', '22023')
        self.patience = patience

    def server(self, name: str) -> str:
        """The DSN of the server that has this name"""
        def weight(server: tuple[str, str]) -> bytes:
            return hashlib.sha256(f'{server[0]}\0{name}'.encode()).digest()
        return max(zip(self.keys, self.dsns), key=weight)[1]

    def check(self, name: str, near: str) -> None:
        if self.server(name) != self.server(near):
            raise BadArgument(f'"{name}" is on another server', '22023')

    def line(self, caller: Caller, name: str) -> Line:
        return Line(caller, self.server(name), self.patience)


class Kept(Caller):
    """What is held, and may be lost; by one thread or task at a time"""
    lost: Lost
    _heart: Heart | None = None
    _line: Line

    def __init__(self) -> None:
        self.lost = self._new_lost()
        self._state = NONE
        self._mutex = threading.Lock()

    def _new_lost(self) -> Lost:
        kind = AsyncLost if isinstance(self, Asyncio) else Lost
        return kind(self, self._look)

    def _turn(self, before: str, after: str) -> None:
        with self._mutex:
            if self._state != before:
                raise WrongState(f'{self} is {self._state}', '55000')
            self._state = after

    def check(self) -> None:
        """Raises LockLost, or WrongState if it is not held; before anything is
        sent to anybody."""
        self.lost.check()
        if self._state != 'held':
            raise WrongState(f'{self} is {self._state}', '55000')

    @property
    def deadline(self) -> float:
        """By CLOCK_BOOTTIME, or the monotonic clock where there is none"""
        return self._heart.deadline if self._heart else float('inf')

    def _look(self) -> None:
        if self._heart:
            self._heart.look()

    async def _give_back(self, statement: Statement, last: bool) -> None:
        """For as long as it is ours; raises LockLost where it was not."""
        heart, line, held = self._heart, self._line, not self.lost
        if heart:
            heart.remove(self.lost, last)
        try:
            if held:
                answer = await line.ask(
                    statement, heart.deadline if heart else None)
                if (answer is None or answer is False) and not line.doubt:
                    self.lost.set('the server has ended it')
        except (ConnectionLost, NotPrimary) as error:
            if heart and now() < heart.deadline:
                raise
            self.lost.set(f'there is no connection: {error}')
        finally:
            self._state = NONE
            await line.close()
        self.lost.check()


class BaseLease(Kept):
    def __init__(self, locks: BaseLocks, ttl: float, *, near: str = '',
                 delay: float | None = None, info: str | None = None,
                 interval: float | None = None) -> None:
        """One heartbeat for any number of locks, all of them on one server:
        the one that has the name `near`.  Seconds, each."""
        super().__init__()
        self.locks, self.ttl, self.near = locks, ttl, near
        self.id: int | None = None
        self._options = {'delay': delta(delay), 'info': info}
        self._interval = rhythm(ttl, interval)
        self._line = locks.line(self, near)

    def __str__(self) -> str:
        return f'lease {self.id}'

    @both
    async def open(self) -> int:
        self._turn(NONE, 'asked for')
        try:
            # one whose answer is lost has no locks, and runs out
            id: int = await self._line.ask(
                call('dlock_lease_open', delta(self.ttl), **self._options))
            self.id, self.lost = id, self._new_lost()
            self._heart = Heart(self._line.dsn, id, self._line.sent, self.ttl,
                                self._interval, self.lost)
        except BaseException:
            self._state = NONE
            await self._line.close()
            raise
        self._state = 'held'
        return id

    @both
    async def close(self) -> None:
        """All locks on it are lost.  Where it is closed already, this does
        nothing."""
        if self._state != NONE:
            self._turn('held', 'being released')
            await self._give_back(call('dlock_lease_close', self.id), True)

    _enter, _end = open.function, close.function


class BaseLock(Kept):
    """A lock, for a block of the program"""

    def __init__(self, source: Any, name: str, *, scope: str | None = None,
                 timeout: float | None = None, shared: bool | None = None,
                 slots: int | None = None, permits: int | None = None,
                 info: str | None = None, ttl: float | None = None,
                 owner: str | None = None,
                 interval: float | None = None) -> None:
        """Of Locks; of a connection of the program's, in autocommit mode for
        session scope; or of a Lease.  Times are in seconds.  A timeout of None
        is to wait for ever, and 0 to try.  The owner makes a request in lease
        scope the same as an earlier one: a job's number."""
        super().__init__()
        self.name, self.timeout, self.ttl = name, timeout, ttl
        self.fence: int | None = None
        self._lease = source if isinstance(source, BaseLease) else None
        if self._lease:
            scopes = ['lease']
            self._lease.locks.check(name, self._lease.near)
            self._line = self._lease.locks.line(self, name)
        elif isinstance(source, BaseLocks):
            scopes = ['session' if ttl is None else 'lease']
            self._line = source.line(self, name)
        else:
            scopes = ['session', 'transaction']
            self._line = Line(self, '', given=source)
        self.scope = scope or scopes[0]
        own = self.scope == 'lease' and not self._lease
        if self.scope not in scopes or own != (ttl is not None):
            raise BadArgument(f'no lock in {scope} scope of this', '22023')
        self._interval = rhythm(ttl, interval) if ttl is not None else 0
        self._owned = owner is not None
        if self.scope == 'lease' and owner is None:
            owner = str(uuid.uuid4())
        self._options = dict(shared=shared, slots=slots, permits=permits,
                             owner=owner, info=info)
        self._cancelled = False
        self._idle = threading.Event()
        self._idle.set()

    def __str__(self) -> str:
        return f'lock "{self.name}"'

    def _look(self) -> None:
        super()._look()
        if (self._state == 'held' and self.scope != 'lease'
                and self._line.connection.closed):
            self.lost.set('its connection is closed')

    @both
    async def acquire(self) -> int:
        """The fence.  A task that is cancelled takes back what it wanted."""
        self._turn(NONE, 'asked for')
        self.lost, self._heart, self.fence = self._new_lost(), None, None
        try:
            fence = await self._take()
        except BaseException as error:
            try:
                await self._undo(error)
            finally:
                self._state = NONE
            raise
        self._state = 'held'
        return fence

    async def _take(self) -> int:
        """Asked again, it has the time that is left."""
        line, lease, values = self._line, self._lease, list[Any]()
        function = FUNCTIONS[self.scope]
        if lease:
            lease.check()
            values = [lease.id]
        elif self.ttl is not None:
            function, values = 'dlock_ttl_acquire', [delta(self.ttl)]
        until = now() + float('inf' if self.timeout is None else self.timeout)
        line.fixed = line.given is not None
        self._idle.clear()
        try:
            self.fence = fence = int(await line.ask(
                lambda: call(function, self.name, *values, **self._options,
                             timeout=delta(max(0, until - now()))),
                stopped=lambda: self._cancelled))
            if lease and lease._heart:
                self._heart = lease._heart
                self._heart.add(self.lost, self.name, fence)
                lease.check()
            elif self.ttl is not None:
                await self._keep(fence, self.ttl)
        finally:
            self._idle.set()
        line.fixed = self.scope != 'lease'
        return fence

    async def _keep(self, fence: int, ttl: float) -> None:
        """It may have waited for long: renewed, we know until when it is ours.
        The ttl of the same request is the one that came first."""
        line = self._line
        renewed = await line.ask(
            ('SELECT dlock_renew(lease), ttl FROM dlock_leases'
             ' WHERE lease = %s', (fence,)) if self._owned else
            ('SELECT dlock_renew(%s), %s', (fence, delta(ttl))), now() + ttl)
        if renewed is None or renewed[0] is None:
            self.lost.set('the server has ended its lease')
            self.lost.check()
        life = min(ttl, renewed[1].total_seconds())
        self._heart = Heart(line.dsn, fence, line.sent, life,
                            self._interval * life / ttl, self.lost)

    async def _undo(self, error: BaseException) -> None:
        """What was broken off may have been done, and is taken back."""
        line = self._line
        if self._heart:
            self._heart.remove(self.lost, not self._lease)
        unsure = (self.fence or not isinstance(error, Error)
                  or isinstance(error, QuorumLate)
                  or line.doubt and isinstance(error, Cancelled))
        await line.close()
        with suppress(Exception):           # it runs out, then
            if self.scope == 'lease' and unsure:
                await line.ask((TAKE_BACK, (
                    self.name, self._options['owner'])), now() + UNDO)
                await line.close()
            elif (self.scope == 'session' and line.given
                    and not isinstance(error, Exception)):
                await settle(line.given.close())

    @both
    async def release(self) -> None:
        self._turn('held', 'being released')
        if self.scope == 'transaction':     # whose end it waits for
            self._state = NONE
        else:
            await self._give_back(call('dlock_release_ticket', self.fence),
                                  not self._lease)

    @both
    async def guard(self, connection: Any) -> None:
        """The transaction of this connection commits only while we hold."""
        await self.ask(connection, call('dlock_guard', self.name, self.fence))

    _enter, _end = acquire.function, release.function


#
# What is called
#

class Lock(BaseLock, Blocking):
    def cancel(self) -> None:
        """For another thread, and for good: an acquire raises Cancelled,
        unless it has got the lock meanwhile."""
        self._cancelled = True
        while not self._idle.wait(PAUSE):
            with suppress(Exception):
                self._line.connection.cancel()


class AsyncLock(BaseLock, Asyncio):
    lost: AsyncLost


class Lease(BaseLease, Blocking):
    def lock(self, name: str, **options: Any) -> Lock:
        return Lock(self, name, **options)


class AsyncLease(BaseLease, Asyncio):
    lost: AsyncLost

    def lock(self, name: str, **options: Any) -> AsyncLock:
        return AsyncLock(self, name, **options)


class Locks(BaseLocks):
    def lock(self, name: str, **options: Any) -> Lock:
        return Lock(self, name, **options)

    def lease(self, ttl: float, **options: Any) -> Lease:
        return Lease(self, ttl, **options)

    def election(self, name: str, **options: Any) -> Election:
        return Election(self, name, **options)


class AsyncLocks(BaseLocks):
    def lock(self, name: str, **options: Any) -> AsyncLock:
        return AsyncLock(self, name, **options)

    def lease(self, ttl: float, **options: Any) -> AsyncLease:
        return AsyncLease(self, ttl, **options)

    def election(self, name: str, **options: Any) -> AsyncElection:
        return AsyncElection(self, name, **options)


class Election:
    """Runs work while this process leads, and campaigns again after a loss."""

    def __init__(self, locks: Locks, name: str, *, ttl: float = 15,
                 **options: Any) -> None:
        self._new_lock = partial(locks.lock, name, ttl=ttl, **options)
        self._lock = self._new_lock()
        self._stopped = False

    def run(self, work: Callable[[Lock], T]) -> T | None:
        """What work returns that was done to its end while we lead; it heeds
        lock.lost.  None where stop() came before."""
        while True:
            self._lock = self._new_lock()
            if self._stopped:
                return None
            try:
                with self._lock as lock:
                    result = work(lock)
                return result
            except LockLost:
                if not self._lock.lost:     # but another lock, of work's
                    raise
            except Cancelled:
                if not self._stopped:
                    raise

    def stop(self) -> None:
        """For another thread: campaign no more."""
        self._stopped = True
        self._lock.cancel()


class AsyncElection:
    """The same for tasks: work is cancelled where it leads no more."""

    def __init__(self, locks: AsyncLocks, name: str, *, ttl: float = 15,
                 **options: Any) -> None:
        self._lock = locks.lock(name, ttl=ttl, **options)

    async def run(self, work: Callable[[AsyncLock], Awaitable[T]]) -> T:
        while True:
            try:
                async with self._lock as lock:
                    task = asyncio.ensure_future(work(lock))
                    lock.lost.add_callback(lambda _: task.cancel())
                    try:
                        await asyncio.wait({task})
                    except asyncio.CancelledError:
                        task.cancel()
                        await asyncio.wait({task})
                        raise
                    lock.check()
                    result = task.result()
                return result
            except LockLost:
                if not self._lock.lost:     # but another lock, of work's
                    raise


async def async_reset(connection: Any) -> None:
    """What a pool calls when a connection comes back"""
    if not connection.closed:
        await settle(connection.rollback())
        await execute(connection, call('dlock_release_all'))
        await settle(connection.rollback())


def reset(connection: Any) -> None:
    run(async_reset(connection))
