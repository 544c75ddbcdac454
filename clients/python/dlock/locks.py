"""Locks, leases, and elections."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from .callers import (
    OBEY, UNDO, Asyncio, Blocking, Caller, Statement, both, cancel, cut,
    execute, run, settle)
from .errors import (
    BadArgument, Cancelled, ConnectionLost, Error, LockLost, LockTimeout,
    NotPrimary, QuorumLate, WrongState)
from .heart import TAKE_BACK, AsyncLost, Heart, Lost, rhythm
from .lines import GRACE, Line, call, delta, now, pauses

T = TypeVar('T')

# The state of a lock or a lease: or asked for, held, being released
NONE = 'not held'

FUNCTIONS = {'session': 'dlock_acquire', 'transaction': 'dlock_xact_acquire',
             'lease': 'dlock_lease_acquire'}
# A waiter that is killed leaves the queue, unless it is said otherwise.
CHECKED = ("SELECT set_config('client_connection_check_interval', '500ms', false)"
           " WHERE current_setting('client_connection_check_interval') = '0'",
           ())


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
        self._pid = os.getpid()     # a child process holds nothing
        self._mutex = threading.Lock()

    def _new_lost(self) -> Lost:
        kind = AsyncLost if isinstance(self, Asyncio) else Lost
        return kind(self, self._look)

    def _turn(self, before: str, after: str) -> None:
        self._look()
        with self._mutex:
            if self._state != before:
                raise WrongState(f'{self} is {self._state}', '55000')
            self._state, self._pid = after, os.getpid()

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
        if self._state == 'held' and self._pid != os.getpid():
            self._state = NONE
            self.lost.set('the parent process has it')

    async def _give_back(self, statement: Statement, last: bool,
                         line: Line) -> None:
        """For as long as it is ours; raises LockLost where it was not."""
        heart, held = self._heart, not self.lost
        if heart:
            heart.remove(self.lost, last)
        try:
            if held:
                answer = await line.ask(
                    statement, heart.deadline if heart else float('inf'))
                if (answer is None or answer is False) and not line.doubt:
                    self.lost.set('the server has ended it')
        except (ConnectionLost, NotPrimary) as error:
            if heart and now() < heart.deadline:
                raise
            self.lost.set(f'there is no connection: {error}')
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
        # for all that need not wait; one at a time
        self._line, self._free = locks.line(self, near), self.new_mutex()

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
            await self.through(self._close())

    async def _close(self) -> None:
        mine = await settle(self.hold(self._free, GRACE))
        line = self._line if mine else self.locks.line(self, self.near)
        try:
            await self._give_back(
                call('dlock_lease_close', self.id), True, line)
        finally:
            self._state = NONE
            await line.close()
            if mine:
                self._free.release()

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
        elif isinstance(source, self.connection_kind):
            scopes = ['session', 'transaction']
            self._line = Line(self, '', given=source)
        else:
            raise BadArgument(f'no lock of a {type(source).__name__}', '22023')
        self.scope = scope or scopes[0]
        own = self.scope == 'lease' and not self._lease
        if self.scope not in scopes or own != (ttl is not None):
            raise BadArgument(f'no lock in {scope} scope of this', '22023')
        self._interval = rhythm(ttl, interval) if ttl is not None else 0
        self._owner = self._asked = owner
        self._options = dict(
            shared=shared, slots=slots, permits=permits, info=info)
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
                await self.through(self._undo(error))
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
        if self.scope == 'lease':
            self._asked = self._owner or str(uuid.uuid4())
            self._options['owner'] = self._asked
            if (lease and lease._heart
                    and (self.name, self._asked) in lease._heart.owed):
                raise WrongState(
                    f'{self} is being taken back from this owner', '55000')
        until = now() + float('inf' if self.timeout is None else self.timeout)
        line.fixed = line.given is not None
        line.opened = self._check_client if until > now() else None
        self._idle.clear()
        try:
            fence = await self._try(function, values) if lease else None
            if fence is None:
                fence = int(await line.ask(
                    lambda: call(function, self.name, *values, **self._options,
                                 timeout=delta(max(0, until - now()))),
                    until + GRACE, None, lambda: self._cancelled))
            self.fence = fence
            if lease and lease._heart:
                self._heart = lease._heart
                self._heart.add(self.lost, self.name, fence)
                lease.check()
            elif self.ttl is not None:
                await self._keep(fence, self.ttl, until + GRACE)
            if self.scope == 'lease':       # a wait needs one, a lock does not
                await line.close()
        finally:
            self._idle.set()
        line.fixed = self.scope != 'lease'
        return fence

    async def _check_client(self) -> None:
        with suppress(Error):
            await self.ask(self._line.connection, CHECKED)

    async def _try(self, function: str, values: list[Any]) -> int | None:
        """Over the lease's connection, where there is no need to wait"""
        lease = self._lease
        assert lease
        if not await settle(self.hold(lease._free, GRACE)):
            return None
        try:
            fence: int = await lease._line.ask(
                call(function, self.name, *values, **self._options,
                     timeout=delta(0)), stopped=lambda: self._cancelled)
            return fence
        except LockTimeout:
            if self.timeout == 0:
                raise
            return None
        finally:
            lease._free.release()

    async def _keep(self, fence: int, ttl: float, until: float) -> None:
        """It may have waited for long: renewed, we know until when it is ours.
        The ttl of the same request is the one that came first."""
        line = self._line
        renewed = await line.ask(
            ('SELECT dlock_renew(lease), ttl FROM dlock_leases'
             ' WHERE lease = %s', (fence,)) if self._owner else
            ('SELECT dlock_renew(%s), %s', (fence, delta(ttl))),
            min(now() + ttl, until), self._interval, lambda: self._cancelled)
        if renewed is None or renewed[0] is None:
            self.lost.set('the server has ended its lease')
            self.lost.check()
        life = min(ttl, renewed[1].total_seconds())
        self._heart = Heart(line.dsn, fence, line.sent, life,
                            self._interval * life / ttl, self.lost)

    async def _undo(self, error: BaseException) -> None:
        """What was broken off may have been done, and is taken back; as soon
        as the server can be asked, if a lease goes on."""
        line, lease, until = self._line, self._lease, now() + UNDO
        heart = lease._heart if lease else None
        if self._heart:
            self._heart.remove(self.lost, not lease)
        if self.scope == 'session' and line.given and (
                fence := self.fence or line.late):
            with suppress(Error):
                await self.ask(
                    line.connection, call('dlock_release_ticket', fence))
        unsure = self.scope == 'lease' and (
            self.fence or not isinstance(error, Error)
            or isinstance(error, QuorumLate)
            or line.doubt or lease and lease._line.doubt)
        request = self.name, self._asked or ''
        try:
            await line.close()
            if not unsure:
                return
            line.opened, line.fixed, waiting = None, False, pauses()
            while await line.ask((TAKE_BACK, request), until) is False:
                if now() >= until:
                    raise ConnectionLost('its session goes on waiting')
                await settle(self.sleep(next(waiting)))
        except BaseException as failure:
            if heart:
                heart.owe(request)
            if not isinstance(failure, Error):  # else it runs out
                raise
        finally:
            await line.close()

    @both
    async def release(self) -> None:
        self._turn('held', 'being released')
        if self.scope == 'transaction':     # whose end it waits for
            self._state = NONE
        else:
            await self.through(self._release())

    async def _release(self) -> None:
        """Over the lease's connection, if there is one; and if nothing comes
        of it, a lease that goes on does it later."""
        lease, heart, mine = self._lease, self._heart, False
        try:
            if lease:
                mine = await settle(self.hold(lease._free, GRACE))
            await self._give_back(
                call('dlock_release_ticket', self.fence), not lease,
                lease._line if lease and mine else self._line)
        except LockLost:
            raise
        except BaseException:
            if lease and heart:
                heart.owe((self.name, self._asked or ''))
            raise
        finally:
            if lease and mine:
                lease._free.release()
            self._state = NONE
            await self._line.close()

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
        until, waiting = now() + OBEY, pauses()
        while not self._idle.wait(next(waiting) / 2):
            line = self._line
            with suppress(Exception):
                if now() < until:
                    cancel(line.connection)
                elif not line.given:
                    cut(line.connection)
            if now() > until + GRACE:
                return


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
        self._stopped = threading.Event()

    def run(self, work: Callable[[Lock], T]) -> T | None:
        """What work returns that was done to its end while we lead; it heeds
        lock.lost.  None where stop() came before.  A server that is away is
        waited for, however long."""
        waiting = pauses(15)
        while True:
            leads = done = False
            self._lock = lock = self._new_lock()
            if self._stopped.is_set():
                return None
            try:
                lock.acquire()
                leads, waiting = True, pauses(15)
                with ExitStack() as leaving:
                    leaving.push(lock)
                    result = work(lock)
                    done = True
                return result
            except LockLost:
                if not lock.lost:       # but another lock, of work's
                    raise
            except (ConnectionLost, NotPrimary):
                if done:                # while we led; the lock runs out
                    return result
                if leads:               # work's own
                    raise
                self._stopped.wait(next(waiting))
            except Cancelled:
                if not self._stopped.is_set():
                    raise

    def stop(self) -> None:
        """For another thread: campaign no more."""
        self._stopped.set()
        self._lock.cancel()


class AsyncElection:
    """The same for tasks: work is cancelled where it leads no more."""

    def __init__(self, locks: AsyncLocks, name: str, *, ttl: float = 15,
                 **options: Any) -> None:
        self._lock = locks.lock(name, ttl=ttl, **options)

    async def run(self, work: Callable[[AsyncLock], Awaitable[T]]) -> T:
        lock, waiting = self._lock, pauses(15)
        while True:
            leads = done = False
            try:
                await lock.acquire()
                leads, waiting = True, pauses(15)
                async with AsyncExitStack() as leaving:
                    leaving.push_async_exit(lock)
                    result = await self._lead(work, lock)
                    done = True
                return result
            except LockLost:
                if not lock.lost:       # but another lock, of work's
                    raise
            except (ConnectionLost, NotPrimary):
                if done:                # while we led; the lock runs out
                    return result
                if leads:               # work's own
                    raise
                await asyncio.sleep(next(waiting))

    async def _lead(self, work: Callable[[AsyncLock], Awaitable[T]],
                    lock: AsyncLock) -> T:
        task = asyncio.ensure_future(work(lock))
        lock.lost.add_callback(lambda _: task.cancel())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        lock.check()
        return task.result()


async def async_reset(connection: Any) -> None:
    """What a pool calls when a connection comes back"""
    if not connection.closed:
        await settle(connection.rollback())
        await execute(connection, call('dlock_release_all'))
        await settle(connection.rollback())


def reset(connection: Any) -> None:
    run(async_reset(connection))
