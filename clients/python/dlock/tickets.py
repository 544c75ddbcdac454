"""Places in many queues, and who holds what, over one connection."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

from .errors import BadArgument, ConnectionLost, LockLost, translated
from .locks import AsyncLocks, BaseLease, BaseLocks, Locks
from .wires import Asyncio, Blocking, Statement, Wire, call, now, run

# What was not told, for whatever reason, is asked after so many seconds.
ROUND = 60.0


class Event(NamedTuple):
    """What has become of a ticket: granted, wanted (somebody waits for it),
    released (by force), expired, lost; of a lock that is watched: held, free"""
    event: str
    lock: str
    ticket: int | None
    details: dict[str, Any]


class BaseTickets:
    wire: Wire
    mutex: Any

    def __init__(self, locks: BaseLocks, *, lease: BaseLease | None = None,
                 near: str = '') -> None:
        """Tickets are the session's, and gone with the connection; or a
        lease's, which keeps their places.  All of them are on one server: that
        of the lease, or the one that has the name `near`."""
        self._locks, self._lease = locks, lease
        self._line = lease.line() if lease else locks.line(near)
        self._connection: Any = None
        self._heard: deque[str] = deque()
        self._events: deque[Event] = deque()
        self._requests: dict[int, tuple[str, Statement]] = {}
        self._granted: set[int] = set()
        self._watched: set[str] = set()
        self._round = now() + ROUND

    async def _session(self) -> Any:
        """The connection.  Where it broke, another one, to which a lease's
        tickets come along; the session's are gone."""
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if self._lease is None and self._requests:
            self._requests.clear()
            self._granted.clear()
            raise LockLost('the tickets are gone with their connection', '55L01')
        await self._line.close()
        await self._line.ask(('SELECT 1', ()))
        self._connection = self._line.connection
        # first of all: a notification may come with the reply to the enqueue
        self._connection.add_notify_handler(
            lambda notify: self._heard.append(notify.payload))
        for name in self._watched:
            await self._ask(call('dlock_watch', name))
        for ticket, (name, statement) in list(self._requests.items()):
            new = await self._ask(statement)
            if new != ticket:
                await self._ask(call('dlock_release_ticket', new))
                self._forget(ticket, 'lost')
            await self._confirm(new)
        return self._connection

    async def _ask(self, statement: Statement) -> Any:
        return await self.wire.ask(await self._session(), statement)

    async def _kept(self, statement: Statement) -> Any:
        """Again over another connection, where that is the way to it"""
        while True:
            try:
                return await self._ask(statement)
            except ConnectionLost:
                if self._line.connection is None:   # out of patience
                    raise

    async def _enqueue(self, name: str, owner: str | None,
                       options: dict[str, Any]) -> int:
        self._here(name)
        if self._lease:
            statement = call('dlock_lease_enqueue', name, self._lease.id,
                             owner=owner or str(uuid.uuid4()), **options)
        else:
            statement = call('dlock_enqueue', name, **options)
        async with self.mutex:
            ticket: int = await self._kept(statement)
            self._requests[ticket] = name, statement
            await self._confirm(ticket)
            return ticket

    async def _release(self, ticket: int) -> None:
        async with self.mutex:
            if self._requests.pop(ticket, None) is None:
                raise LockLost(f'ticket {ticket} is not ours', '55L01')
            self._granted.discard(ticket)
            if not await self._kept(call('dlock_release_ticket', ticket)):
                raise LockLost(f'ticket {ticket} was lost', '55L01')

    async def _watch(self, name: str) -> None:
        self._here(name)
        async with self.mutex:
            await self._kept(call('dlock_watch', name))
            self._watched.add(name)

    async def _unwatch(self, name: str) -> None:
        async with self.mutex:
            self._watched.discard(name)
            await self._kept(call('dlock_unwatch', name))

    async def _next(self, timeout: float | None) -> Event | None:
        until = None if timeout is None else now() + timeout
        while True:
            async with self.mutex:
                await self._listen()
                if self._events:
                    return self._events.popleft()
            left = self._round - now()
            if until is not None:
                left = min(left, until - now())
                if until <= now():
                    return None
            await self.wire.readable(self._connection, left)

    async def _listen(self) -> None:
        connection = await self._session()
        try:
            with translated():
                connection.pgconn.consume_input()
                while notify := connection.pgconn.notifies():
                    self._heard.append(notify.extra.decode())
        except ConnectionLost:
            await self._kept(('SELECT 1', ()))
        if now() >= self._round:
            self._round = now() + ROUND
            for ticket in list(self._requests):
                await self._confirm(ticket)
        while self._heard:
            said = json.loads(self._heard.popleft())
            event, lock, ticket = said['event'], said['lock'], said.get('ticket')
            if event == 'granted':
                await self._confirm(ticket)
            elif event in ('released', 'expired'):
                self._forget(ticket, event)
            elif (event == 'wanted' and ticket in self._requests
                    or event in ('held', 'free') and lock in self._watched):
                self._events.append(Event(event, lock, ticket, said))

    async def _confirm(self, ticket: int) -> None:
        """A notification is a hint.  Each grant is told once."""
        if ticket not in self._requests or ticket in self._granted:
            return
        try:
            if await self._ask(call('dlock_wait', ticket, timedelta())):
                self._granted.add(ticket)
                self._events.append(
                    Event('granted', self._requests[ticket][0], ticket, {}))
        except LockLost:
            self._forget(ticket, 'lost')

    def _forget(self, ticket: int, event: str) -> None:
        self._granted.discard(ticket)
        request = self._requests.pop(ticket, None)
        if request:
            self._events.append(Event(event, request[0], ticket, {}))

    def _here(self, name: str) -> None:
        if self._locks.server(name) != self._line.dsn:
            raise BadArgument(f'"{name}" is on another server', '22023')


class Tickets(BaseTickets):
    """Of one thread at a time"""
    wire = Blocking()
    mutex = nullcontext()

    def enqueue(self, name: str, *, owner: str | None = None,
                **options: Any) -> int:
        """The ticket, which is the fence once it is granted.  The options are
        shared, slots, permits and info."""
        return run(self._enqueue(name, owner, options))

    def next(self, timeout: float | None = None) -> Event | None:
        """None where nothing has come within the timeout"""
        return run(self._next(timeout))

    def release(self, ticket: int) -> None:
        run(self._release(ticket))

    def watch(self, name: str) -> None:
        """Be told who holds it: now, and at each change."""
        run(self._watch(name))

    def unwatch(self, name: str) -> None:
        run(self._unwatch(name))

    def close(self) -> None:
        run(self._line.close())

    def __enter__(self) -> Tickets:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class AsyncTickets(BaseTickets):
    """One task may wait in next() while others enqueue and release."""
    wire = Asyncio()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.mutex = asyncio.Lock()

    async def enqueue(self, name: str, *, owner: str | None = None,
                      **options: Any) -> int:
        return await self._enqueue(name, owner, options)

    async def next(self, timeout: float | None = None) -> Event | None:
        return await self._next(timeout)

    async def release(self, ticket: int) -> None:
        await self._release(ticket)

    async def watch(self, name: str) -> None:
        await self._watch(name)

    async def unwatch(self, name: str) -> None:
        await self._unwatch(name)

    async def close(self) -> None:
        await self._line.close()

    async def __aenter__(self) -> AsyncTickets:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()


def watch(locks: Locks, name: str) -> Iterator[Event]:
    """Who holds a lock: now, and at each change"""
    with Tickets(locks, near=name) as tickets:
        tickets.watch(name)
        while event := tickets.next():
            yield event


async def async_watch(locks: AsyncLocks, name: str) -> AsyncIterator[Event]:
    async with AsyncTickets(locks, near=name) as tickets:
        await tickets.watch(name)
        while event := await tickets.next():
            yield event
