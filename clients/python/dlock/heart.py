"""What keeps a lease, and tells of its loss.

A Heart has two threads.  One renews, over a connection of its own.  The other
one watches the deadline, and waits for nothing but the clock: whatever becomes
of the first, and of the server, it tells of the loss in time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any

from .callers import Blocking, run
from .errors import BadArgument, LockLost
from .lines import PAUSE, Line, now

log = logging.getLogger('dlock')

LIFE = 0.99     # of a ttl; the rest is a margin
# A look at the clock at least each second: the one by which threads wait may
# stand still while the machine sleeps.
GLANCE = 1.0

RENEW = ('SELECT dlock_renew(%s), array(SELECT fence'
         ' FROM unnest(%s::text[], %s::bigint[]) AS held (name, fence)'
         ' WHERE NOT dlock_check(name, fence))')


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
            threading.Thread(target=self._tell, name='dlock lost',
                             daemon=True).start()

    def _tell(self) -> None:
        with suppress(futures.InvalidStateError):       # told already
            self._told.set_result(None)


class AsyncLost(Lost):
    """The same for a task: callbacks run in its loop."""

    def add_callback(self, callback: Callable[[Any], Any]) -> None:
        loop = asyncio.get_running_loop()

        def call(holder: Any) -> None:
            with suppress(RuntimeError):                # the loop is over
                loop.call_soon_threadsafe(callback, holder)
        super().add_callback(call)

    async def wait(self) -> None:  # type: ignore[override]
        event = asyncio.Event()
        self.add_callback(lambda _: event.set())
        await event.wait()


def rhythm(ttl: float, interval: float | None) -> float:
    """Seconds between renewals"""
    interval = ttl / 3 if interval is None else interval
    if not 0 < interval < ttl * LIFE:
        raise BadArgument('the interval has to be less than the ttl', '22023')
    return interval


class Heart:
    def __init__(self, dsn: str, id: int, sent: float, ttl: float,
                 interval: float, lost: Lost) -> None:
        self._id, self._life, self._interval = id, ttl * LIFE, interval
        self._line = Line(Blocking(), dsn, interval, name='dlock heartbeat')
        # all below is protected by this
        self._changed = threading.Condition()
        self.deadline = sent + self._life
        self._over = False
        # who is to be told: the lease, None, and locks, by name and fence
        self._members: dict[Lost, tuple[str, int] | None] = {lost: None}
        for target in self._watch, self._beat:
            threading.Thread(target=target, daemon=True,
                             name=f'dlock {target.__name__[1:]}').start()

    def add(self, lost: Lost, name: str, fence: int) -> None:
        with self._changed:
            self._members[lost] = name, fence
            if self._over:
                lost.set('its lease is over')

    def remove(self, lost: Lost, last: bool) -> None:
        """It is told nothing more.  The last one ends the lease, and with it
        all locks that are still on it."""
        with self._changed:
            self._members.pop(lost, None)
            if last and not self._over:
                self._lose('its lease is closed')

    def look(self) -> None:
        with self._changed:
            if not self._over and now() >= self.deadline:
                self._lose('its deadline has passed')

    def _lose(self, reason: str) -> None:
        """Caller holds _changed."""
        for lost in self._members:
            lost.set(reason)
        self._over = True
        self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while not self._over:
                self._changed.wait(min(max(0, self.deadline - now()), GLANCE))
                self.look()

    def _beat(self) -> None:
        pause = self._interval
        while not self._over_after(pause):
            due = now() + self._interval
            try:
                self._renew(due)
                pause = due - now()
            except Exception as error:      # says nothing: ask again
                pause = min(self._interval, 5 * PAUSE)
                if not self._over:
                    log.warning('renewal of %s: %r', self._id, error)
        run(self._line.close())

    def _over_after(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._over, max(0, seconds))

    def _renew(self, until: float) -> None:
        with self._changed:
            held = [(lost, *lock)
                    for lost, lock in self._members.items() if lock]
        kept, gone = run(self._line.ask(
            (RENEW, (self._id, [name for _, name, _ in held],
                     [fence for *_, fence in held])),
            until, lambda: self._over))
        with self._changed:
            if kept is None and not self._over:
                self._lose('the server has ended its lease')
            if self._over:
                return
            self.deadline = max(self.deadline, self._line.sent + self._life)
            for lost, _, fence in held:
                if fence in gone and lost in self._members:
                    lost.set('the server has ended its ticket')
