"""Places in many queues, and watched locks, over one connection."""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from .callers import (
    UNDO, Asyncio, Blocking, Caller, Statement, both, forking, settle)
from .errors import ConnectionLost, Error, LockLost, WrongState
from .heart import Request
from .lines import call, cut_at, now
from .locks import BaseLease
from .servers import Servers
from .service import AsyncLocks, Locks

# Seconds between queries that make up for lost notifications
ROUND = 60.0

# Events of watched locks; all others are of tickets
WATCHES = ('held', 'free')


class Event(NamedTuple):
    """A ticket is granted, wanted (a request waits for the lock), released (by
    force), expired or lost.  A watched lock is held or free."""
    event: str
    lock: str
    ticket: int | None
    details: dict[str, Any]


class BaseTickets(Caller):
    """For one thread; but one task may wait in next() while others enqueue and
    release."""

    def __init__(self, locks: Servers, *, lease: BaseLease[Any] | None = None,
                 near: str = '') -> None:
        """Tickets belong to the session, and end with the connection, or to a
        lease, which keeps their places.  All are on one server: the server of
        the lease, or of the name `near`."""
        self._locks, self._lease, self._mutex = locks, lease, self.mutex()
        self._near = lease.near if lease else near
        self._line = locks.line(self, self._near)
        self._line.opened, self._line.session = self._restore, True
        self._heard: deque[dict[str, Any]] = deque()
        self._events: deque[Event] = deque()
        # by ticket: the name, the request, and what undoes it
        self._requests: dict[
            int, tuple[str, Statement, Request | None]] = {}
        self._granted: set[int] = set()
        self._watched: set[str] = set()
        self._round = now() + ROUND
        self._closed = False
        forking.add(self)

    def _forked(self) -> None:
        """A child must not request or release the tickets of a lease."""
        if self._lease:
            self._requests.clear()
            self._events.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise WrongState('the tickets are closed', '55000')

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._mutex:
            self._check_open()
            yield

    @both
    async def enqueue(
            self, name: str, *, owner: str | None = None,
            shared: bool | None = None, slots: int | None = None,
            permits: int | None = None, info: str | None = None) -> int:
        """Returns the ticket, which is the fence once it is granted."""
        options = dict(shared=shared, slots=slots, permits=permits, info=info)
        self._locks.check(name, self._near)
        heart, undo = None, None
        if self._lease:
            self._lease.check()
            heart, owner = self._lease._heart, owner or str(uuid.uuid4())
            assert heart
            undo = heart.request(name, owner)
            request = call('dlock_lease_enqueue', name, heart.id, owner=owner,
                           **options)
        else:
            request = call('dlock_enqueue', name, **options)
        async with self._turn():
            if heart and undo in heart.owed:
                raise WrongState(
                    f'"{name}" is being taken back from this owner', '55000')
            self._line.late = None
            try:
                ticket: int = await self._line.ask(request)
                # next() asks without waiting for the server's notification
                self._heard.append(
                    {'event': 'granted', 'lock': name, 'ticket': ticket})
                self._requests[ticket] = name, request, undo
            except BaseException as error:
                if heart and undo and self._line.unsure(error) and all(
                        undo != known for *_, known in self._requests.values()):
                    heart.owe(undo)
                # a repeated enqueue gets the same ticket
                late = self._line.late
                if late and not heart and late not in self._requests:
                    await self.through(self._withdraw(late))
                raise
            return ticket

    async def _withdraw(self, ticket: int) -> None:
        """Releases the ticket of an interrupted call; if that fails, closes
        the connection."""
        connection, released = self._line.connection, False
        try:
            with suppress(Error), cut_at(connection, now() + UNDO):
                await self.ask(
                    connection, call('dlock_release_ticket', ticket))
                released = True
        finally:
            if not released:
                await self._line.close(False)

    @both
    async def release(self, ticket: int) -> None:
        async with self._turn():
            request = self._requests.pop(ticket, None)
            if request is None:
                raise LockLost(f'ticket {ticket} is not ours', '55L01')
            try:
                released = await self._line.ask(
                    call('dlock_release_ticket', ticket))
            except BaseException as error:
                heart, undo = self._lease and self._lease._heart, request[2]
                if heart and undo:      # the heartbeat repeats it
                    heart.owe(undo)
                elif not isinstance(error, (ConnectionLost, LockLost)):
                    self._requests[ticket] = request    # may still be held
                raise
            finally:
                if ticket not in self._requests:
                    self._granted.discard(ticket)
            # a session's ticket has ended with an earlier connection
            if not released and not (self._line.doubt and self._lease):
                raise LockLost(f'ticket {ticket} was lost', '55L01')

    @both
    async def watch(self, name: str) -> None:
        """Watches the lock: events report its holder, and each change."""
        self._locks.check(name, self._near)
        async with self._turn():
            await self._line.ask(call('dlock_watch', name))
            self._watched.add(name)

    @both
    async def unwatch(self, name: str) -> None:
        async with self._turn():
            self._watched.discard(name)
            await self._line.ask(call('dlock_unwatch', name))

    @both
    async def next(self, timeout: float | None = None) -> Event | None:
        """The next event; None if none has come within the timeout"""
        until = now() + (float('inf') if timeout is None else timeout)
        while True:
            async with self._turn():
                await self._listen()
                if self._events:
                    return self._events.popleft()
            left = min(until, self._round) - now()
            if now() >= until:
                return None
            await settle(self.readable(self._line.connection, left))

    @both
    async def close(self) -> None:
        self._closed = True
        await self._line.close()

    async def _enter(self) -> None:
        pass

    _end = close.function

    async def _restore(self) -> None:
        """Prepares a new connection.  Tickets of a lease stay; tickets of the
        session are lost."""
        self._check_open()      # it may have been closed meanwhile
        connection = self._line.connection
        # before all else: a notification may come with an enqueue's reply
        self._line.listens = lambda notify: self._heard.append(
            json.loads(notify.payload))
        connection.add_notify_handler(self._line.listens)
        for name in self._watched:
            await self._line.once(call('dlock_watch', name))
        if not self._requests:
            return
        if self._lease is None:
            self._events = deque(
                event for event in self._events
                if event.event in WATCHES
                or event.ticket not in self._requests)
            self._requests.clear()
            self._granted.clear()
            raise LockLost('the connection is gone, with its tickets', '55L01')
        self._round = now()
        for ticket, (_, request, _) in list(self._requests.items()):
            new = None
            # the lease has ended, or others hold the lock with other slots
            with suppress(LockLost, WrongState):
                new = await self._line.once(request)
            if new != ticket:
                if new is not None:
                    await self._line.once(call('dlock_release_ticket', new))
                self._forget(ticket, 'lost')

    async def _listen(self) -> None:
        # any statement reads notifications, or finds the connection broken
        await self._line.ask(('SELECT 1', ()))
        if now() >= self._round:
            self._round = now() + ROUND
            for ticket in list(self._requests):
                await self._confirm(ticket)
        while self._heard:
            said = self._heard[0]       # stays until it is processed
            event, lock = said['event'], said['lock']
            ticket = said.get('ticket', 0)
            if event == 'granted':
                await self._confirm(ticket)
            elif event in ('released', 'expired'):
                self._forget(ticket, event)
            elif (event == 'wanted' and ticket in self._requests
                    or event in WATCHES and lock in self._watched):
                self._events.append(Event(event, lock, ticket, said))
            self._heard.popleft()

    async def _confirm(self, ticket: int) -> None:
        """A notification is only a hint, so ask.  Reports each grant once."""
        if ticket not in self._requests or ticket in self._granted:
            return
        try:
            granted = await self._line.ask(
                call('dlock_wait', ticket, timedelta()))
        except LockLost:
            # lost with its connection
            if not self._lease and ticket not in self._requests:
                raise
            self._forget(ticket, 'lost')
        else:
            if granted:
                self._granted.add(ticket)
                self._events.append(
                    Event('granted', self._requests[ticket][0], ticket, {}))

    def _forget(self, ticket: int, event: str) -> None:
        self._granted.discard(ticket)
        request = self._requests.pop(ticket, None)
        if request:
            self._events.append(Event(event, request[0], ticket, {}))


class Tickets(BaseTickets, Blocking):
    pass


class AsyncTickets(BaseTickets, Asyncio):
    pass


def watch(locks: Locks, name: str) -> Iterator[Event]:
    """The holder of a lock: now, and at each change"""
    with Tickets(locks, near=name) as tickets:
        tickets.watch(name)
        while event := tickets.next():
            yield event


async def async_watch(locks: AsyncLocks, name: str) -> AsyncIterator[Event]:
    async with AsyncTickets(locks, near=name) as tickets:
        await tickets.watch(name)
        while event := await tickets.next():
            yield event
