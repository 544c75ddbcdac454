"""The loss of a lock, or of a lease: told once, and for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from threading import Thread
from typing import Any

from .errors import LockLost


class Lost:
    """True once the lock or the lease is lost, and from then on."""

    def __init__(self, holder: Any, look: Callable[[], Any]) -> None:
        self.reason: str | None = None
        self._holder, self._look = holder, look
        self._told: futures.Future[None] = futures.Future()

    def is_set(self) -> bool:
        """Looks at the clock, too: a process that was stopped may ask before
        its watcher has run."""
        if self.reason is None:
            self._look()
        return self.reason is not None

    __bool__ = is_set

    def check(self) -> None:
        if self.is_set():
            raise LockLost(f'{self._holder} was lost: {self.reason}', '55L01')

    def wait(self, timeout: float | None = None) -> bool:
        futures.wait([self._told], timeout)
        return self.is_set()

    def add_callback(self, callback: Callable[[Any], Any]) -> None:
        """To be called once, with the lock or the lease, in a thread that may
        be held up; at once, where it is lost already."""
        self._told.add_done_callback(lambda _: callback(self._holder))

    def set(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            Thread(target=self._tell, name='dlock lost', daemon=True).start()

    def _tell(self) -> None:
        with suppress(futures.InvalidStateError):       # told already
            self._told.set_result(None)


class AsyncLost(Lost):
    """The same for a task: callbacks run in its loop."""

    def __init__(self, holder: Any, look: Callable[[], Any]) -> None:
        super().__init__(holder, look)
        self._loop = asyncio.get_running_loop()

    def add_callback(self, callback: Callable[[Any], Any]) -> None:
        def call(holder: Any) -> None:
            with suppress(RuntimeError):                # the loop is over
                self._loop.call_soon_threadsafe(callback, holder)
        super().add_callback(call)

    async def wait(self) -> None:  # type: ignore[override]
        event = asyncio.Event()
        self.add_callback(lambda _: event.set())
        await event.wait()
