"""Locks, leases, and elections."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from . import wires
from .errors import (
    BadArgument, Cancelled, ConnectionLost, Error, LockLost, NotPrimary,
    QuorumLate, WrongState)
from .heart import AsyncLost, Heart, Lost
from .wires import Asyncio, Blocking, Statement, Wire, call, now, run

T = TypeVar('T')

PAUSE = 0.1     # before asking again where there was no server


class Line:
    """A connection that is made when it is needed, and made again."""

    def __init__(self, wire: Wire, dsn: str, patience: float,
                 given: bool = False) -> None:
        self.wire, self.dsn, self.patience = wire, dsn, patience
        self.given = given          # is it one of the program's?
        self.connection: Any = None
        self.sent = 0.0             # before the last statement was sent
        self.doubt = False          # was an earlier one perhaps done, too?
        self.cancelled = self.stopped = False
        self.idle = threading.Event()
        self.idle.set()

    async def ask(self, statement: Statement | Callable[[], Statement],
                  until: float | None = None,
                  heart: Heart | None = None) -> Any:
        """Over a new connection where one breaks, until then, or for as long
        as there is patience with a server that is away; cut when the heart
        ends.  A connection of the program's is never another one."""
        self.doubt = False
        away: float | None = None
        self.idle.clear()
        try:
            while True:
                try:
                    if self.cancelled or self.stopped:
                        raise Cancelled('cancelled by the program', '57014')
                    if self.connection is None:
                        self.connection = await self.wire.connect(
                            self.dsn, 'dlock')
                    away = None
                    what = statement() if callable(statement) else statement
                    self.sent = now()
                    if heart is None:
                        return await self.wire.ask(self.connection, what)
                    with heart.cuttable(self.connection):
                        return await self.wire.ask(self.connection, what)
                except (ConnectionLost, NotPrimary):
                    if self.given:
                        raise
                    self.doubt = self.doubt or self.connection is not None
                    await self.close()
                    away = away or now()
                    if now() >= (until or away + self.patience):
                        raise
                await self.wire.sleep(PAUSE)
        finally:
            self.idle.set()

    async def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with suppress(Exception):
                await self.wire.close(connection)

    def cancel(self) -> None:
        """For another thread; returns when ask() has come to its end."""
        self.cancelled = True
        while not self.idle.wait(PAUSE):
            with suppress(Exception):
                self.connection.cancel()


class BaseLocks:
    wire: Wire

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
        return max(zip(self.keys, self.dsns), key=lambda server: hashlib.sha256(
            f'{server[0]}\0{name}'.encode()).digest())[1]

    def line(self, name: str) -> Line:
        return Line(self.wire, self.server(name), self.patience)


def rhythm(ttl: float | None, interval: float | None,
           margin: float | None) -> tuple[float, float]:
    """Seconds between renewals, and of a lease's time that are not used"""
    ttl = ttl or 0
    interval = ttl / 3 if interval is None else interval
    margin = ttl / 100 if margin is None else margin
    if ttl and not (interval > 0 and margin >= 0 and interval + margin < ttl):
        raise BadArgument(
            'interval and margin have to be less than the ttl', '22023')
    return interval, margin


class Kept:
    """What a heart keeps"""
    wire: Wire
    lost_class: type[Lost] = Lost
    heart: Heart | None = None
    lost: Lost

    def check(self) -> None:
        """Raises LockLost; before anything is sent to anybody."""
        self.lost.check()

    @property
    def deadline(self) -> float:
        """By CLOCK_BOOTTIME, or the monotonic clock where there is none"""
        return self.heart.deadline if self.heart else float('inf')

    def _expired(self) -> None:
        if self.heart:
            self.heart.look()


class BaseLease(Kept):
    def __init__(self, locks: BaseLocks, ttl: float, *, near: str = '',
                 delay: float | None = None, info: str | None = None,
                 interval: float | None = None,
                 margin: float | None = None) -> None:
        """One heartbeat for any number of locks, all of them on one server:
        the one that has the name `near`.  Seconds, each."""
        self.locks, self.ttl = locks, ttl
        self.id: int | None = None
        self._line = locks.line(near)
        self._options = {'delay': wires.interval(delay), 'info': info}
        self._rhythm = rhythm(ttl, interval, margin)

    def __str__(self) -> str:
        return f'lease {self.id}'

    def line(self) -> Line:
        return Line(self.wire, self._line.dsn, self.locks.patience)

    async def _open(self) -> int:
        # one whose answer is lost has no locks, and runs out
        self.id = await self._line.ask(call(
            'dlock_lease_open', wires.interval(self.ttl), **self._options))
        self.lost = self.lost_class(self, self._expired)
        self.heart = Heart(self._line.dsn, self.id, self._line.sent, self.ttl,
                           *self._rhythm)
        self.heart.add(self.lost)
        self.heart.start()
        return self.id

    async def _close(self) -> None:
        await end(self.heart, self.lost, self._line,
                  call('dlock_lease_close', self.id))


async def end(heart: Heart | None, lost: Lost, line: Line,
              statement: Statement, last: bool = True) -> None:
    """Give back what a heart keeps, for as long as that is ours; raises
    LockLost where it was not."""
    assert heart is not None
    heart.leave(lost, last)
    try:
        lost.check()
        try:
            returned = await line.ask(statement, heart.deadline, heart)
        except ConnectionLost:
            lost.check()
            raise
        if (returned is None or returned is False) and not line.doubt:
            lost.set('the server has ended it')
        lost.check()
    finally:
        heart.remove(lost)
        if last:
            heart.end()
        await line.close()


class BaseLock(Kept):
    """A lock, for a block of the program"""

    def __init__(self, source: Any, name: str, *, scope: str | None = None,
                 timeout: float | None = None, shared: bool | None = None,
                 slots: int | None = None, permits: int | None = None,
                 info: str | None = None, ttl: float | None = None,
                 owner: str | None = None, interval: float | None = None,
                 margin: float | None = None) -> None:
        """Of Locks; of a connection of the program's, in autocommit mode for
        session scope; or of a Lease.  Times are in seconds.  A timeout of None
        is to wait for ever, and 0 to try.  The owner makes a request in lease
        scope the same as an earlier one: a job's number."""
        own = isinstance(source, BaseLocks)
        if scope is None:
            scope = 'lease' if ttl or isinstance(source, BaseLease) else 'session'
        if (scope not in ('session', 'transaction', 'lease')
                or (scope == 'lease') != bool(ttl or isinstance(source, BaseLease))
                or (scope == 'transaction' and own)
                or (scope == 'lease' and not isinstance(
                    source, (BaseLocks, BaseLease)))):
            raise BadArgument(f'no lock in {scope} scope of this', '22023')
        self.name, self.scope, self.timeout = name, scope, timeout
        self.source, self.ttl = source, ttl
        self.fence: int | None = None
        self._held = False
        self._owned = owner is not None
        self._options: dict[str, Any] = dict(
            shared=shared, slots=slots, permits=permits, info=info)
        if scope == 'lease':
            self._options['owner'] = owner or str(uuid.uuid4())
        self._rhythm = rhythm(ttl, interval, margin)
        self._line: Line
        if own:
            self._line = source.line(name)
        elif isinstance(source, BaseLease):
            self._line = source.locks.line(name)
        else:
            self._line = Line(self.wire, '', 0, given=True)

    def __str__(self) -> str:
        return f'lock "{self.name}"'

    def _expired(self) -> None:
        super()._expired()
        connection = self._line.connection
        if self._held and self.scope != 'lease' and connection.closed:
            self.lost.set('its connection is closed')

    async def _acquire(self) -> int:
        if self._held:
            raise WrongState(f'{self} is held already', '55000')
        line = self._line
        line.cancelled = False
        self.lost = self.lost_class(self, self._expired)
        self.heart = None
        try:
            if self.scope == 'lease':
                self.fence = await self._acquire_for_lease()
            else:
                self.fence = await self._acquire_here()
        except BaseException as error:
            await self._undo(error)
            raise
        self._held = True
        return self.fence

    def _request(self, function: str, *values: Any) -> Callable[[], Statement]:
        """With the time that is left, should it be asked again"""
        until = None if self.timeout is None else now() + self.timeout
        return lambda: call(
            function, self.name, *values, **self._options,
            timeout=wires.interval(None if until is None
                                   else max(0, until - now())))

    async def _acquire_here(self) -> int:
        function = ('dlock_xact_acquire' if self.scope == 'transaction'
                    else 'dlock_acquire')
        if not isinstance(self.source, BaseLocks):
            self._line.connection = self.source
        return await self._line.ask(self._request(function))

    async def _acquire_for_lease(self) -> int:
        line = self._line
        if isinstance(self.source, BaseLease):
            lease = self.source
            if line.dsn != lease._line.dsn:
                raise BadArgument(f'{self} is not on the server of {lease}',
                                  '22023')
            lease.check()
            fence = await line.ask(self._request('dlock_lease_acquire',
                                                 lease.id))
            self.heart = lease.heart
            assert self.heart is not None
            self.heart.add(self.lost, (self.name, fence))
            lease.check()
            return fence
        assert self.ttl is not None
        fence = await line.ask(self._request('dlock_ttl_acquire',
                                             wires.interval(self.ttl)))
        # It may have waited for long; renewed, we know until when it is ours.
        until = now() + self.ttl
        while True:
            try:
                kept = await line.ask(call('dlock_renew', fence), until)
                break
            except QuorumLate:
                if now() >= until:
                    raise
            await self.wire.sleep(PAUSE)
        if kept is None:
            self.lost.set('the server has ended its lease at once')
            self.lost.check()
        sent, ttl = line.sent, self.ttl
        if self._owned:
            # the ttl of the same request is the one that came first
            ttl = min(ttl, await line.ask((
                'SELECT extract(epoch FROM ttl)::float8 FROM dlock_leases '
                'WHERE lease = %s', (fence,)), until) or 0)
        if not ttl:
            self.lost.set('the server has ended its lease at once')
            self.lost.check()
        self.heart = Heart(line.dsn, fence, sent, ttl,
                           *(part * ttl / self.ttl for part in self._rhythm))
        self.heart.add(self.lost)
        self.heart.start()
        return fence

    async def _undo(self, error: BaseException) -> None:
        """What was broken off may have been done, and is taken back."""
        line = self._line
        mine = line.connection is not self.source
        if self.heart:
            self.heart.remove(self.lost)
        if mine or (self.scope == 'session'
                    and not isinstance(error, Exception)):
            await line.close()
        # else a lock of the session's, or the transaction's, is gone
        if self.scope == 'lease' and (
                not isinstance(error, Error)
                or isinstance(error, (LockLost, QuorumLate))):
            with suppress(Exception):       # it runs out, then
                line.connection = await self.wire.connect(line.dsn, 'dlock')
                await self.wire.ask(line.connection, (
                    'SELECT count(dlock_release_ticket(ticket)) '
                    'FROM dlock_locks(%s) WHERE owner = %s '
                    "AND scope = 'lease' AND role = current_user",
                    (self.name, self._options['owner'])))
            await line.close()

    async def _release(self) -> None:
        held, self._held = self._held, False
        if not held:
            raise WrongState(f'{self} is not held', '55000')
        if self.scope == 'transaction':     # whose end it waits for
            return
        release = call('dlock_release_ticket', self.fence)
        if self.scope == 'lease':
            await end(self.heart, self.lost, self._line, release,
                      not isinstance(self.source, BaseLease))
            return
        try:
            if not await self.wire.ask(self._line.connection, release):
                self.lost.set('the server has ended its ticket')
        except ConnectionLost as error:
            self.lost.set(f'its connection is gone: {error}')
        finally:
            if self._line.connection is not self.source:
                await self._line.close()
        self.lost.check()

    async def _guard(self, connection: Any) -> None:
        await self.wire.ask(connection,
                            call('dlock_guard', self.name, self.fence))

    async def _leave(self, error: BaseException | None) -> None:
        """Release; what has ended the block is not hidden by a loss."""
        try:
            await self._release()
        except Error as failure:
            if error is None:
                raise
            error.add_note(f'{self}: {failure}')


#
# What is called, blocking
#

class Lock(BaseLock):
    wire = Blocking()

    def acquire(self) -> int:
        """The fence"""
        return run(self._acquire())

    def release(self) -> None:
        run(self._release())

    def cancel(self) -> None:
        """For another thread: an acquire that waits raises Cancelled, where it
        has not got the lock meanwhile."""
        self._line.cancel()

    def guard(self, connection: Any) -> None:
        """The transaction of this connection commits only while we hold."""
        run(self._guard(connection))

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        run(self._leave(error))


class Lease(BaseLease):
    wire = Blocking()

    def open(self) -> int:
        return run(self._open())

    def close(self) -> None:
        run(self._close())

    def lock(self, name: str, **options: Any) -> Lock:
        return Lock(self, name, **options)

    def __enter__(self) -> Lease:
        self.open()
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        try:
            self.close()
        except Error as failure:
            if error is None:
                raise
            error.add_note(f'{self}: {failure}')


class Locks(BaseLocks):
    wire = Blocking()

    def lock(self, name: str, **options: Any) -> Lock:
        return Lock(self, name, **options)

    def lease(self, ttl: float, **options: Any) -> Lease:
        return Lease(self, ttl, **options)

    def election(self, name: str, **options: Any) -> Election:
        return Election(self, name, **options)


class Election:
    """Runs work while this process leads, and campaigns again after a loss."""

    def __init__(self, locks: Locks, name: str, *, ttl: float = 15,
                 info: str | None = None, **options: Any) -> None:
        self._lock = locks.lock(name, ttl=ttl, info=info, **options)
        self._stopped = threading.Event()

    def run(self, work: Callable[[Lock], T]) -> T | None:
        """What work returns that was done to its end while we lead; it heeds
        lock.lost.  None where stop() came before."""
        while not self._stopped.is_set():
            try:
                with self._lock as lock:
                    result = work(lock)
                return result
            except LockLost:
                if not self._lock.lost:     # but another lock, of work's
                    raise
            except Cancelled:
                if not self._stopped.is_set():
                    raise
        return None

    def stop(self) -> None:
        """For another thread: campaign no more."""
        self._stopped.set()
        self._lock._line.stopped = True
        self._lock.cancel()


def reset(connection: Any) -> None:
    """What a pool calls when a connection comes back"""
    if not connection.closed:
        connection.rollback()
        wires.ask(connection, call('dlock_release_all'))
        connection.rollback()


#
# And asynchronous
#

class AsyncLock(BaseLock):
    wire = Asyncio()
    lost_class = AsyncLost
    lost: AsyncLost

    async def acquire(self) -> int:
        """The fence; to cancel the task takes back what was asked for."""
        return await self._acquire()

    async def release(self) -> None:
        await self._release()

    async def guard(self, connection: Any) -> None:
        await self._guard(connection)

    async def __aenter__(self) -> AsyncLock:
        await self._acquire()
        return self

    async def __aexit__(self, _: Any, error: BaseException | None,
                        *__: Any) -> None:
        await self._leave(error)


class AsyncLease(BaseLease):
    wire = Asyncio()
    lost_class = AsyncLost
    lost: AsyncLost

    async def open(self) -> int:
        return await self._open()

    async def close(self) -> None:
        await self._close()

    def lock(self, name: str, **options: Any) -> AsyncLock:
        return AsyncLock(self, name, **options)

    async def __aenter__(self) -> AsyncLease:
        await self._open()
        return self

    async def __aexit__(self, _: Any, error: BaseException | None,
                        *__: Any) -> None:
        try:
            await self._close()
        except Error as failure:
            if error is None:
                raise
            error.add_note(f'{self}: {failure}')


class AsyncLocks(BaseLocks):
    wire = Asyncio()

    def lock(self, name: str, **options: Any) -> AsyncLock:
        return AsyncLock(self, name, **options)

    def lease(self, ttl: float, **options: Any) -> AsyncLease:
        return AsyncLease(self, ttl, **options)

    def election(self, name: str, **options: Any) -> AsyncElection:
        return AsyncElection(self, name, **options)


class AsyncElection:
    """The same for tasks: work is cancelled where it leads no more."""

    def __init__(self, locks: AsyncLocks, name: str, *, ttl: float = 15,
                 info: str | None = None, **options: Any) -> None:
        self._lock = locks.lock(name, ttl=ttl, info=info, **options)

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
