"""`Locks`, with which a program begins, and elections"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

from .callers import Asyncio, Blocking, Caller, run
from .errors import Cancelled, ConnectionLost, LockLost, NotPrimary
from .lines import call, pauses
from .locks import AsyncLease, AsyncLock, Lease, Lock
from .servers import Servers

P = ParamSpec('P')
T = TypeVar('T')
LockT = TypeVar('LockT', Lock, AsyncLock)
LeaseT = TypeVar('LeaseT', Lease, AsyncLease)
ElectionT = TypeVar('ElectionT', 'Election', 'AsyncElection')


class BaseLocks(Servers, Generic[LockT, LeaseT, ElectionT]):
    _lock_kind: Callable[..., LockT]
    _lease_kind: Callable[..., LeaseT]
    _election_kind: Callable[..., ElectionT]

    def lock(self, name: str, *, timeout: float | None = None,
             shared: bool | None = None, slots: int | None = None,
             permits: int | None = None, info: str | None = None,
             ttl: float | None = None, owner: str | None = None,
             interval: float | None = None) -> LockT:
        """A lock in session scope; with a ttl, in lease scope"""
        return self._lock_kind(
            self, name, timeout=timeout, shared=shared, slots=slots,
            permits=permits, info=info, ttl=ttl, owner=owner,
            interval=interval)

    def lease(self, ttl: float, *, near: str = '', delay: float | None = None,
              info: str | None = None,
              interval: float | None = None) -> LeaseT:
        return self._lease_kind(
            self, ttl, near=near, delay=delay, info=info, interval=interval)

    def election(self, name: str, *, ttl: float = 15,
                 timeout: float | None = None, shared: bool | None = None,
                 slots: int | None = None, permits: int | None = None,
                 info: str | None = None, owner: str | None = None,
                 interval: float | None = None) -> ElectionT:
        return self._election_kind(lambda: self.lock(
            name, ttl=ttl, timeout=timeout, shared=shared, slots=slots,
            permits=permits, info=info, owner=owner, interval=interval))

    async def _resize(self, caller: Caller, name: str,
                      slots: int | None) -> None:
        line = self.line(caller, name)
        try:
            await line.ask(call('dlock_set_slots', name, slots))
        finally:
            await line.close()


class Locks(BaseLocks[Lock, Lease, 'Election']):
    _kind = Blocking
    _lock_kind, _lease_kind = Lock, Lease

    @staticmethod
    def _election_kind(new_lock: Callable[[], Lock]) -> Election:
        return Election(new_lock)

    def resize(self, name: str, slots: int | None) -> None:
        """Sets the number of permits of a lock, which replaces the number in
        requests; None restores that number."""
        run(self._resize(Blocking(), name, slots))

    def locked(self, name: str | Callable[..., str], *,
               timeout: float | None = None, shared: bool | None = None,
               slots: int | None = None, permits: int | None = None,
               info: str | None = None, ttl: float | None = None,
               interval: float | None = None
               ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Returns a function that holds a lock while it runs.  The name may
        depend on its arguments."""
        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            @wraps(function)
            def locked(*values: P.args, **named: P.kwargs) -> T:
                with self.lock(
                        name if isinstance(name, str)
                        else name(*values, **named), timeout=timeout,
                        shared=shared, slots=slots, permits=permits, info=info,
                        ttl=ttl, interval=interval):
                    return function(*values, **named)
            return locked
        return decorate


class AsyncLocks(BaseLocks[AsyncLock, AsyncLease, 'AsyncElection']):
    _kind = Asyncio
    _lock_kind, _lease_kind = AsyncLock, AsyncLease

    @staticmethod
    def _election_kind(new_lock: Callable[[], AsyncLock]) -> AsyncElection:
        return AsyncElection(new_lock)

    async def resize(self, name: str, slots: int | None) -> None:
        """Sets the number of permits of a lock, which replaces the number in
        requests; None restores that number."""
        await self._resize(Asyncio(), name, slots)

    def locked(self, name: str | Callable[..., str], *,
               timeout: float | None = None, shared: bool | None = None,
               slots: int | None = None, permits: int | None = None,
               info: str | None = None, ttl: float | None = None,
               interval: float | None = None
               ) -> Callable[[Callable[P, Awaitable[T]]],
                             Callable[P, Coroutine[Any, Any, T]]]:
        """Returns a function that holds a lock while it runs.  The name may
        depend on its arguments."""
        def decorate(function: Callable[P, Awaitable[T]]
                     ) -> Callable[P, Coroutine[Any, Any, T]]:
            @wraps(function)
            async def locked(*values: P.args, **named: P.kwargs) -> T:
                async with self.lock(
                        name if isinstance(name, str)
                        else name(*values, **named), timeout=timeout,
                        shared=shared, slots=slots, permits=permits, info=info,
                        ttl=ttl, interval=interval):
                    return await function(*values, **named)
            return locked
        return decorate


class Election:
    """Runs work while this process leads, and campaigns again after a loss."""

    def __init__(self, new_lock: Callable[[], Lock]) -> None:
        self._new_lock = new_lock
        self._lock = self._new_lock()
        self._stopped = threading.Event()

    def run(self, work: Callable[[Lock], T]) -> T | None:
        """Returns the result of work that was completed while this process
        led; None if stop() was called before.  Work must check lock.lost.
        Waits for an unreachable server without limit."""
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
                if leads and not lock.lost:     # the work has lost another
                    raise
            except (ConnectionLost, NotPrimary):
                if done:                # while leading; the lock expires
                    return result
                if leads:               # an error of the work
                    raise
                self._stopped.wait(next(waiting))
            except Cancelled:
                if not self._stopped.is_set():
                    raise

    def stop(self) -> None:
        """Called by another thread: ends the campaign, not the work."""
        self._stopped.set()
        self._lock.cancel()


class AsyncElection:
    """For tasks: cancels the work when this process no longer leads."""

    def __init__(self, new_lock: Callable[[], AsyncLock]) -> None:
        self._lock = new_lock()

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
                if leads and not lock.lost:     # the work has lost another
                    raise
            except (ConnectionLost, NotPrimary):
                if done:                # while leading; the lock expires
                    return result
                if leads:               # an error of the work
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
            # a second cancel must not end the lead before the work
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
            raise
        lock.check()
        return task.result()
