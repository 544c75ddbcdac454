"""Keeps leases, and reports their loss.

Each lease has a Heart.  One thread per server, a Pulse, renews all leases there
over one connection.  Another thread watches the deadlines of all leases and
waits only for the clock.  So it reports a loss in time, even if the other
threads or the servers hang.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from .callers import Asyncio, Blocking, Statement, cut, run
from .errors import BadArgument, LockLost
from .lines import Line, now, pauses
from .sources import Dsn, Source

log = logging.getLogger('dlock')

LIFE = 0.99     # of a ttl; the rest is a margin
LEAST = 0.1     # the server's least ttl
# Check the clock at least each second, because the clock by which threads wait
# may stop while the machine sleeps.
GLANCE = 1.0
SOON = 0.1      # until the next attempt to drop a connection

RENEW = ('SELECT array(SELECT dlock_renew(id) FROM unnest(%s::bigint[])'
         ' AS leases (id)), array(SELECT fence'
         ' FROM unnest(%s::text[], %s::bigint[]) AS held (name, fence)'
         ' WHERE NOT dlock_check(name, fence))')
# Finds the tickets that a request may have left, given the owner, and the lease
# unless it is the ticket's own
FIND = ('SELECT array(SELECT ticket FROM dlock_locks(%s)'
        ' WHERE owner IS NOT DISTINCT FROM %s'
        ' AND lease = coalesce(%s, ticket)'
        " AND scope = 'lease' AND role = current_user)")
TAKE_BACK = ('SELECT bool_and(dlock_release_ticket(ticket))'
             ' FROM unnest(%s::bigint[]) AS found (ticket)')
DEBTS = 10_000      # the newest ones are kept

Request = tuple[str, str | None, int | None]


async def take_back(ask: Callable[[Statement], Any], request: Request) -> bool:
    """Undoes a request.  False if its session still waits, because it has not
    noticed yet that its client is gone.  An abandoned statement may be executed
    late, so the one that releases names the tickets: it cannot release what the
    owner acquires later."""
    tickets = await ask((FIND, request))
    return not tickets or await ask((TAKE_BACK, (tickets,))) is not False


class Lost:
    """True if the lock or the lease was lost"""

    def __init__(self, holder: Any, look: Callable[[], Any]) -> None:
        self.reason: str | None = None
        self._holder, self._look = holder, look
        self._told = threading.Event()
        self._callbacks: list[Callable[[Any], Any]] = []
        self._mutex = threading.Lock()

    def is_set(self) -> bool:
        """Checks the clock, too, because a stopped process may ask before its
        watcher has run."""
        if self.reason is None:
            self._look()
        return self.reason is not None

    __bool__ = is_set

    def check(self) -> None:
        if self.is_set():
            raise LockLost(f'{self._holder} was lost: {self.reason}', '55L01')

    def wait(self, timeout: float | None = None) -> bool:
        self._told.wait(timeout)
        return self.is_set()

    def disown(self, reason: str) -> None:
        """In a child process: it is lost, and callbacks are the parent's."""
        self._mutex, self._told = threading.Lock(), threading.Event()
        self._told.set()
        self.reason = self.reason or reason

    def add_callback(self, callback: Callable[[Any], Any]) -> None:
        """Calls back once, with the lock or the lease, in a thread that may
        block; if it is lost already, at once in this thread."""
        with self._mutex:
            if not self._told.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def set(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self.tell()

    def tell(self) -> None:
        try:
            threading.Thread(target=self._tell, name='dlock lost',
                             daemon=True).start()
        except RuntimeError:    # no more threads; the watcher tries again
            _untold.append(self)

    def _tell(self) -> None:
        with self._mutex:
            if self._told.is_set():     # two threads have found the loss
                return
            self._told.set()
        for callback in self._callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Any], Any]) -> None:
        try:
            callback(self._holder)
        except BaseException:
            log.exception('callback of %s', self._holder)


class AsyncLost(Lost):
    """For a task: callbacks run in its loop."""

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


# Protects everything below
_changed = threading.Condition()
_pulses: dict[Any, Pulse] = {}      # by the key of the source
_untold: list[Lost] = []
_watching = False
# The debts: a ticket for each call, and the sources, because a key may be a
# source's id
_owed: dict[tuple[Any, str, str], tuple[list[int], Source]] = {}


def _forked() -> None:
    """A child has no threads."""
    global _changed, _watching
    _changed, _watching = threading.Condition(), False
    _pulses.clear()
    _untold.clear()


os.register_at_fork(after_in_child=_forked)


def _watch() -> None:
    global _watching
    with _changed:
        while _pulses or _untold:
            times = [now() + GLANCE]
            for pulse in list(_pulses.values()):
                for heart in list(pulse.hearts):
                    heart.look()
                    times.append(heart.deadline)
                if pulse.asked is not None:
                    # while it connects, it has not sent the statement
                    times.append(max(pulse.asked, pulse.line.sent)
                                 + pulse.shortest())
                    if now() >= times[-1]:
                        if cut(pulse.line.connection):
                            pulse.asked = None
                        times[-1] = now() + SOON
            for lost in [_untold.pop() for _ in range(len(_untold))]:
                lost.tell()
            _changed.wait(max(0, min(times) - now()))
        _watching = False


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=f'dlock {work.__name__.strip("_")}',
                     daemon=True).start()


class Debt:
    """A release, an undo or a renewal without an answer.  The server may
    execute it at any later time, and then ends what the owner has.  So the
    owner's next request must not get the same ticket: it first releases that
    ticket.  Each call owes for itself, because an answer to one call does not
    settle another call.  Only a lock with a ttl of its own, whose owner the
    program gives, has debts."""

    def __init__(self, source: Source, name: str, owner: str) -> None:
        self.source, self.key = source, (source.key, name, owner)

    @property
    def ticket(self) -> int | None:
        """0 if it may be any ticket of the owner; None if nothing is owed"""
        with _changed:
            return _owed[self.key][0][0] if self.key in _owed else None

    def owe(self, ticket: int) -> None:
        with _changed:
            _owed.setdefault(self.key, ([], self.source))[0].append(ticket)
            while len(_owed) > DEBTS:
                del _owed[next(iter(_owed))]

    def paid(self, ticket: int) -> None:
        """Settles one call."""
        with _changed:
            owed = _owed[self.key][0] if self.key in _owed else []
            if ticket in owed:
                owed.remove(ticket)
                if not owed:
                    del _owed[self.key]


class Heart:
    """The heart of a lease.  Each method acquires or needs _changed."""

    def __init__(self, id: int, sent: float, ttl: float, interval: float,
                 lost: Lost) -> None:
        self.id, self.life, self.interval = id, ttl * LIFE, interval
        self.most = float('inf')    # the longest life
        self.deadline = sent + self.life
        self.due = now() + interval
        self.over = False
        # objects to notify: the lease (None) and locks, by name and fence
        self.members: dict[Lost, tuple[str, int] | None] = {lost: None}
        self.owed: set[Request] = set()     # to be undone
        self.together: set[str] = set()     # names of acquire_all
        self.pulse: Pulse | None = None

    def start(self, source: Source, waits: bool) -> None:
        """`waits`: must the source be awaited?"""
        global _watching
        with _changed:
            if self.over:
                return
            self.pulse = _pulses.get(source.key) or Pulse(source, waits)
            self.pulse.hearts.append(self)
            if source.key not in _pulses:
                _start(self.pulse.beat)
                _pulses[source.key] = self.pulse
            if not _watching:
                _start(_watch)
                _watching = True
            _changed.notify_all()

    def add(self, lost: Lost, name: str, fence: int) -> None:
        with _changed:
            self.members[lost] = name, fence
            if self.over:
                lost.set('its lease is over')

    def remove(self, lost: Lost, last: bool) -> None:
        """Stops notifying an object.  `last` ends the lease, and with it all
        of its remaining locks."""
        with _changed:
            self.members.pop(lost, None)
            if last and not self.over:
                self.lose('its lease is closed')

    def request(self, name: str, owner: str | None) -> Request:
        return name, owner, self.id

    def owe(self, request: Request) -> None:
        """Lets the heartbeat undo a request when the server answers again."""
        with _changed:
            self.owed.add(request)
            _changed.notify_all()

    def change(self, ttl: float, interval: float) -> None:
        """Prepares for a request of another ttl.  Until the server has
        answered, the shorter ttl counts.  It may execute an abandoned request
        at any later time, so no later change gives the lease a longer life."""
        with _changed:
            self.most = min(self.most, ttl * LIFE)
            self.life = min(self.life, ttl * LIFE)
            self.interval = min(self.interval, interval)
            self.deadline = min(self.deadline, now() + self.life)
            self.due = min(self.due, now() + self.interval)
            _changed.notify_all()

    def changed(self, sent: float, life: float, interval: float,
                most: float) -> None:
        with _changed:
            self.most = most
            self.life = min(life, self.most)
            self.interval = interval * self.life / life
            self.deadline = max(self.deadline, sent + self.life)
            self.due = min(self.due, now() + self.interval)
            _changed.notify_all()

    def look(self) -> None:
        with _changed:
            if not self.over and now() >= self.deadline:
                self.lose('its deadline has passed')

    def lose(self, reason: str) -> None:
        """Caller holds _changed, and repeats this if it is interrupted."""
        if self.pulse and self in self.pulse.hearts:
            self.pulse.hearts.remove(self)
        for lost in self.members:
            lost.set(reason)
        self.over = True
        _changed.notify_all()

    def renewed(self, sent: float, kept: int | None, gone: set[int],
                held: dict[Lost, tuple[str, int]]) -> None:
        """Caller holds _changed."""
        if self.over:
            return
        if kept is None:
            self.lose('the server has ended its lease')
            return
        self.deadline = max(self.deadline, sent + self.life)
        for lost, (_, fence) in held.items():
            if fence in gone and lost in self.members:
                lost.set('the server has ended its ticket')


class Pulse:
    """Renews all leases on one server."""

    def __init__(self, source: Source, waits: bool) -> None:
        self.key = source.key
        self.hearts: list[Heart] = []
        # awaits in a loop of its own
        self.waits = waits and not isinstance(source, Dsn)
        self.line = Line(Asyncio() if self.waits else Blocking(),
                         source.for_heartbeat(), 0, name='dlock heartbeat')
        self.asked: float | None = None     # time of an unanswered statement

    def shortest(self) -> float:
        """Seconds after which the watcher drops a silent connection"""
        return min((heart.interval for heart in self.hearts), default=0)

    def beat(self) -> None:
        if self.waits:
            with asyncio.Runner() as runner:
                self._beat(runner.run)
        else:
            self._beat(run)

    def _beat(self, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._run = run
        waiting = pauses()
        pause = 0.0
        while due := self._wait(pause):
            pause = 0.0
            try:
                self._renew(due)
                if self._take_back(due):
                    waiting = pauses()
                else:
                    pause = next(waiting)
            except Exception as error:      # does not prove a loss: retry
                log.warning('heartbeat of %s: %r', [h.id for h in due], error)
                pause = next(waiting)
        run(self.line.close())

    def _wait(self, pause: float) -> list[Heart]:
        """The hearts that are due now or soon; none if no heart is left"""
        with _changed:
            earliest = now() + min(pause, self.shortest() / 2)
            while self.hearts:
                due = min(now() if heart.owed else heart.due
                          for heart in self.hearts)
                left = max(due, earliest) - now()
                if left <= 0:
                    return [heart for heart in self.hearts if heart.owed
                            or heart.due <= now() + heart.interval / 4]
                _changed.wait(min(left, GLANCE))
            if _pulses.get(self.key) is self:
                del _pulses[self.key]
            _changed.notify_all()
        return []

    async def _ask(self, statement: Statement) -> Any:
        with _changed:
            self.asked = now()
            _changed.notify_all()
        try:
            return await self.line.ask(
                statement, limit=None, stopped=lambda: not self.hearts)
        finally:
            with _changed:
                self.asked = None

    def _renew(self, due: list[Heart]) -> None:
        began = now()
        with _changed:
            held = {heart: {lost: lock for lost, lock in heart.members.items()
                            if lock} for heart in due}
        locks = [lock for lost in held.values() for lock in lost.values()]
        kept, gone = self._run(self._ask((
            RENEW, ([heart.id for heart in due], [name for name, _ in locks],
                    [fence for _, fence in locks]))))
        with _changed:
            for heart, tickets in zip(due, kept):
                heart.due = began + heart.interval
                heart.renewed(self.line.sent, tickets, set(gone), held[heart])

    def _take_back(self, due: list[Heart]) -> bool:
        """Has every owed request been undone?"""
        for heart in due:
            for request in list(heart.owed):
                if self._run(take_back(self._ask, request)):
                    heart.owed.remove(request)
        return not any(heart.owed for heart in due)


def rhythm(ttl: float, interval: float | None) -> float:
    """Seconds between renewals"""
    interval = ttl / 3 if interval is None else interval
    if not 0 < interval < ttl * LIFE:
        raise BadArgument('the interval has to be less than the ttl', '22023')
    return interval
