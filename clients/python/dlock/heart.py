"""What keeps a lease, and tells of its loss.

A Heart has two threads.  One renews, over a connection of its own.  The other
one watches the deadline, and waits for nothing but the clock: whatever becomes
of the first, and of the server, it tells of the loss in time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from . import wires
from .errors import Error, LockLost
from .wires import call, now

log = logging.getLogger('dlock')

# A look at the clock at least each second: the one by which threads wait may
# stand still while the machine sleeps.
GLANCE = 1.0


class Lost:
    """Set once, and for good, when a lock in lease scope or a lease is lost."""

    def __init__(self, holder: Any, expired: Callable[[], Any]) -> None:
        self.reason: str | None = None
        self._holder = holder
        self._expired = expired
        self._event = threading.Event()
        self._mutex = threading.Lock()
        self._callbacks: list[Callable[[Any], Any]] | None = []

    def is_set(self) -> bool:
        """Looks at the clock, too: a process that was stopped may ask before
        its watcher has run."""
        if not self._event.is_set():
            self._expired()
        return self._event.is_set()

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        self._event.wait(timeout)
        return self.is_set()

    def add_callback(self, callback: Callable[[Any], Any]) -> None:
        """To be called once, with the lock or the lease, in a thread of this
        package's; at once, where it is lost already."""
        with self._mutex:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def check(self) -> None:
        if self.is_set():
            raise LockLost(f'{self._holder} was lost: {self.reason}', '55L01')

    def set(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        self._event.set()

    def tell(self) -> None:
        with self._mutex:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            self._call(callback)

    def _call(self, callback: Callable[[Any], Any]) -> None:
        try:
            callback(self._holder)
        except Exception:
            log.exception('callback of %s', self._holder)


class AsyncLost(Lost):
    """The same for a task: callbacks run in its loop."""

    def __init__(self, holder: Any, expired: Callable[[], Any]) -> None:
        super().__init__(holder, expired)
        self._loop = asyncio.get_running_loop()

    async def wait(self) -> None:  # type: ignore[override]
        event = asyncio.Event()
        self.add_callback(lambda _: event.set())
        await event.wait()

    def _call(self, callback: Callable[[Any], Any]) -> None:
        with suppress(RuntimeError):        # the loop is over
            self._loop.call_soon_threadsafe(super()._call, callback)


class Heart:
    def __init__(self, dsn: str, id: int, sent: float, ttl: float,
                 interval: float, margin: float) -> None:
        self.id = id
        self._dsn = dsn
        self._interval = interval
        self._life = ttl - margin
        # all below is protected by this
        self._changed = threading.Condition()
        self.deadline = sent + self._life
        self._over = self._ending = False
        self._asked: float | None = None    # since when no answer has come
        self._line: socket.socket | None = None
        self._lines: set[socket.socket] = set()
        # who is to be told: the lease, None, and locks, by name and fence
        self._members: dict[Lost, tuple[str, int] | None] = {}

    def start(self) -> None:
        for target in self._watch, self._beat:
            threading.Thread(target=target, daemon=True,
                             name=f'dlock {target.__name__[1:]}').start()

    def add(self, lost: Lost, lock: tuple[str, int] | None = None) -> None:
        with self._changed:
            self._members[lost] = lock
            if self._over:
                lost.set('its lease is over')
                lost.tell()

    def remove(self, lost: Lost) -> None:
        with self._changed:
            self._members.pop(lost, None)

    def leave(self, lost: Lost, last: bool) -> None:
        """From now on, that the lock is gone is no loss; nor is it, for the
        last one, of the lease.  The deadline is."""
        with self._changed:
            if lost in self._members:
                self._members[lost] = None
            self._ending = self._ending or last

    def end(self) -> None:
        """Nothing is told any more."""
        with self._changed:
            self._finish()

    def look(self) -> None:
        with self._changed:
            if not self._over and now() >= self.deadline:
                self._lose('its deadline has passed')

    @contextmanager
    def cuttable(self, connection: Any) -> Iterator[socket.socket]:
        """A connection that is cut at the end, should somebody wait for it"""
        line = socket.socket(fileno=os.dup(connection.fileno()))
        with self._changed:
            self._lines.add(line)
            if self._over:
                cut(line)
        try:
            yield line
        finally:
            with self._changed:
                self._lines.discard(line)
                line.close()

    def _lose(self, reason: str) -> None:
        """Caller holds _changed."""
        for lost in self._members:
            lost.set(reason)
        self._finish()

    def _finish(self) -> None:
        """Caller holds _changed."""
        self._over = True
        for line in self._lines:
            cut(line)
        self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                left = self.deadline - now()
                if left <= 0 and not self._over:
                    self._lose('its deadline has passed')
                if self._asked is not None and self._line is not None:
                    patience = self._asked + self._interval - now()
                    if patience <= 0:
                        cut(self._line)
                        self._line = None
                    else:
                        left = min(left, patience)
                lost = [lost for lost in self._members if lost._event.is_set()]
                for member in lost:
                    del self._members[member]
                over = self._over
                if not over and not lost:
                    self._changed.wait(min(left, GLANCE))
            for member in lost:
                member.tell()
            if over:
                return

    def _beat(self) -> None:
        pause = self._interval
        while not self._pause(pause):
            try:
                with closing(wires.connect(
                        self._dsn, 'dlock heartbeat', self._interval)) \
                        as connection, self.cuttable(connection) as line:
                    while True:
                        began = now()
                        self._renew(connection, line)
                        pause = self._interval
                        if self._pause(began + pause - now()):
                            return
            except Error as error:      # says nothing: ask again
                log.info('renewal of %s: %s', self.id, error)
            except Exception:
                log.exception('renewal of %s', self.id)
            finally:
                with self._changed:
                    self._asked = self._line = None
            pause = min(self._interval, 0.5)

    def _pause(self, seconds: float) -> bool:
        """True where it is over"""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, max(0, seconds))

    def _renew(self, connection: Any, line: socket.socket) -> None:
        with self._changed:
            locks = {lock: lost for lost, lock in self._members.items() if lock}
            sent = now()
            self._asked, self._line = sent, line
            self._changed.notify_all()
        kept = wires.ask(connection, call('dlock_renew', self.id))
        gone = wires.ask(connection, (
            'SELECT array_agg(fence) FROM unnest(%s::text[], %s::bigint[])'
            ' AS held (name, fence) WHERE NOT dlock_check(name, fence)',
            ([name for name, _ in locks], [fence for _, fence in locks]),
        )) if locks and kept is not None else None
        with self._changed:
            self._asked = None
            if self._over:
                return
            if kept is not None:
                self.deadline = max(self.deadline, sent + self._life)
            elif not self._ending:
                self._lose('the server has ended its lease')
            for lock, lost in locks.items():
                if gone and lock[1] in gone and self._members.get(lost) == lock:
                    lost.set('the server has ended its ticket')
            self._changed.notify_all()


def cut(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
