"""Locks and leases"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from .callers import (
    OBEY, UNDO, Asyncio, Blocking, Caller, Statement, both, cancel, cut,
    execute, forking, is_cut, run, settle)
from .calls import Executor
from .drivers import Psycopg2, check_transaction
from .errors import (
    BadArgument, Cancelled, ConnectionLost, Error, LockLost, LockTimeout,
    NotAllowed, NotPrimary, QuorumLate, WrongState)
from .heart import (
    LEAST, LIFE, AsyncLost, Debt, Heart, Lost, Request, rhythm, take_back)
from .lines import GRACE, Line, call, delta, now, pauses
from .observe import Observation, tell
from .servers import Servers

LockT = TypeVar('LockT', bound='BaseLock')

# A state; the others are 'asked for', 'held' and 'being released'
NONE = 'not held'

FUNCTIONS = {'session': 'dlock_acquire', 'transaction': 'dlock_xact_acquire',
             'lease': 'dlock_lease_acquire'}


class Turn(str):
    """A state that a call can tell from an equal state of another call"""


class Kept(Caller):
    """A lock or a lease, which may be lost; for one thread or task at a time"""
    lost: Lost
    ttl: float | None
    _heart: Heart | None = None
    _debt: Debt | None = None
    _interval: float
    _line: Line

    def __init__(self) -> None:
        self.lost = self._new_lost()
        self._state = NONE
        self._mutex = threading.Lock()
        self._renewals: list[object] = []   # calls of renew(); the first works
        forking.add(self)

    def _new_lost(self) -> Lost:
        kind = AsyncLost if isinstance(self, Asyncio) else Lost
        return kind(self, self._look)

    def _start_heart(self, line: Line, sent: float, id: int, ttl: float,
                     interval: float) -> None:
        assert line.source
        # first the attribute: an interrupted start must be undone
        self._heart = Heart(id, sent, ttl, interval, self.lost)
        self._heart.start(line.source, isinstance(self, Asyncio))

    def _turn(self, before: str, after: str) -> None:
        with self._mutex:
            if self._state != before:
                raise WrongState(f'{self} is {self._state}', '55000')
            self._thread, self._state = threading.get_ident(), after

    async def _in_turn(self, before: str, after: str,
                       work: Callable[[], Any]) -> Any:
        """Works in another state, and restores the state, unless the work has
        written one as its last act."""
        turn = Turn(after)
        try:
            self._turn(before, turn)
            return await work()
        finally:
            if self._state is turn:
                self._state = before

    def check(self) -> None:
        """Raises LockLost after a loss, and WrongState if it is not held.
        Call it before each request to another system."""
        self.lost.check()
        if self._state != 'held':
            raise WrongState(f'{self} is {self._state}', '55000')

    @property
    def deadline(self) -> float:
        """By CLOCK_BOOTTIME, or by the monotonic clock if there is none"""
        return self._heart.deadline if self._heart else float('inf')

    def _look(self) -> None:
        if self._heart:
            self._heart.look()

    def _forked(self) -> None:
        """A child process holds nothing."""
        if self._state != NONE:
            self.lost.disown('the parent process has it')
        self._mutex, self._renewals = threading.Lock(), []
        self._state = NONE

    async def _ask(self, statement: Statement) -> tuple[Any, float, bool]:
        """Executes a call for a held lock, or for an open lease.  Returns the
        answer, the time before the call was sent, and whether an abandoned
        attempt may be executed later."""
        raise NotImplementedError

    def _id(self) -> int | None:
        """The number of the lease, or of the lock's ticket"""
        raise NotImplementedError

    @both
    async def renew(self, ttl: float | None = None) -> None:
        """Renews now, in addition to the heartbeat.  A ttl replaces the
        lease's ttl; until the server has answered, the shorter one counts.
        A refusal restores the deadline, so another renewal waits."""
        turn, until, waiting = object(), now() + GRACE, pauses(0.1)
        try:
            self._renewals.append(turn)
            while self._renewals[0] is not turn:
                self.check()
                if now() >= until:
                    raise ConnectionLost('another call waits for an answer')
                await settle(self.sleep(next(waiting)))
            await self._renew(ttl)
        finally:
            if turn in self._renewals:
                self._renewals.remove(turn)

    async def _renew(self, ttl: float | None) -> None:
        self.check()
        heart = self._heart
        if heart is None or self.ttl is None:
            raise WrongState(f'{self} has no lease of its own', '55000')
        if ttl is not None and ttl < LEAST:
            raise BadArgument('the ttl has to be at least 100 ms', '22023')
        lost, life, interval = self.lost, heart.life, heart.interval
        before, most = heart.deadline - life, heart.most
        if ttl is not None:
            heart.change(ttl, rhythm(ttl, ttl * self._interval / self.ttl))
            if self._debt:
                self._debt.owe(heart.id)
        doubt = True
        try:
            kept, sent, doubt = await self._ask(call(
                'dlock_renew', heart.id, ttl=delta(ttl)))
        except Error as error:
            doubt = error.doubt
            if not doubt and isinstance(
                    error, (BadArgument, NotAllowed, ConnectionLost)):
                heart.changed(before, life, interval, most)
            raise
        finally:
            if not doubt:       # it was answered, or not sent
                heart.most = most
                if self._debt and ttl is not None:
                    self._debt.paid(heart.id)
        if self._heart is not heart:
            raise WrongState(f'{self} was released', '55000')
        if kept is None:
            lost.set('the server has ended its lease')
            lost.check()
        if ttl is not None:
            self._interval *= ttl / self.ttl
            self.ttl = ttl
            life, interval = ttl * LIFE, self._interval
        heart.changed(sent, life, interval, heart.most)

    @both
    async def set_info(self, info: str | None) -> None:
        """Changes the info, which others can read."""
        self.check()
        await self._held(call('dlock_set_info', self._id(), info))

    async def _held(self, statement: Statement) -> None:
        """Executes a call that returns false if the lock is lost, or was
        released meanwhile."""
        lost = self.lost
        if (await self._ask(statement))[0]:
            return
        if self._state != 'held' or self.lost is not lost:
            raise WrongState(f'{self} was released', '55000')
        lost.set('the server has ended it')
        lost.check()

    async def _give_back(self, statement: Statement, last: bool,
                         line: Line) -> None:
        """Releases a hold; raises LockLost if it was lost."""
        heart, held = self._heart, not self.lost
        debt, fence = self._debt, self._id() or 0
        if heart:
            heart.remove(self.lost, last)
        try:
            if held:
                if debt:
                    debt.owe(fence)
                answer = await line.ask(
                    statement, heart.deadline if heart else float('inf'))
                if (answer is None or answer is False) and not line.doubt:
                    self.lost.set('the server has ended it')
                if debt:
                    debt.paid(fence)
        except BaseException as error:
            if debt and held and isinstance(error, Error) and not error.doubt:
                debt.paid(fence)        # it was answered, or not sent
            if (not isinstance(error, (ConnectionLost, NotPrimary))
                    or heart and now() < heart.deadline):
                raise
            self.lost.set(f'there is no connection: {error}')
        self.lost.check()


class BaseLease(Kept, Generic[LockT]):
    ttl: float
    _lock_kind: Callable[..., LockT]

    def __init__(self, locks: Servers, ttl: float, *, near: str = '',
                 delay: float | None = None, info: str | None = None,
                 interval: float | None = None) -> None:
        """One heartbeat for any number of locks, all of them on the server of
        the name `near`.  Times are in seconds."""
        super().__init__()
        self.locks, self.ttl, self.near = locks, ttl, near
        self.id: int | None = None
        self._options = {'delay': delta(delay), 'info': info}
        self._interval = rhythm(ttl, interval)
        # for all calls that need not wait, one at a time
        self._line, self._free = locks.line(self, near), self.new_mutex()

    def __str__(self) -> str:
        return f'lease {self.id}'

    def _id(self) -> int | None:
        return self.id

    def _forked(self) -> None:
        super()._forked()
        self._free = self.new_mutex()

    def lock(self, name: str, *, timeout: float | None = None,
             shared: bool | None = None, slots: int | None = None,
             permits: int | None = None, info: str | None = None,
             owner: str | None = None) -> LockT:
        return self._lock_kind(
            self, name, timeout=timeout, shared=shared, slots=slots,
            permits=permits, info=info, owner=owner)

    async def _ask(self, statement: Statement) -> tuple[Any, float, bool]:
        if not await settle(self.hold(self._free, GRACE)):
            raise ConnectionLost('another call waits for an answer')
        try:
            answer = await self._line.ask(statement, self.deadline)
            return answer, self._line.sent, self._line.doubt
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        """Frees the connection for other calls; returns it to its pool."""
        try:
            if self._line.pooled:
                await self._line.close()
        finally:
            self._free.release()

    @both
    async def acquire_all(
            self, names: Sequence[str], *, timeout: float | None = None,
            shared: bool | None = None,
            info: str | None = None) -> list[LockT]:
        """Acquires all or none, in an order that prevents deadlocks.  Release
        each of them, or close the lease."""
        self.check()
        heart, names = self._heart, list(dict.fromkeys(names))
        assert heart
        for name in names:
            self.locks.check(name, self.near)
        with self._mutex:
            for name in names:
                if (name in heart.together
                        or heart.request(name, None) in heart.owed):
                    raise WrongState(f'{self} has "{name}" already', '55000')
            heart.together.update(names)
        try:
            return await self._take_all(heart, names, timeout, shared=shared,
                                        info=info)
        except BaseException:
            heart.together.difference_update(names)
            raise

    async def _take_all(self, heart: Heart, names: list[str],
                        timeout: float | None, **options: Any) -> list[LockT]:
        line = self.locks.line(self, self.near)
        line.opened = line.check_client if timeout != 0 else None
        until = now() + (float('inf') if timeout is None else timeout)
        locks = [self.lock(name) for name in names]
        try:
            fences = await line.ask(
                lambda: call('dlock_lease_acquire_all', names, heart.id,
                             timeout=delta(max(0, until - now())), **options),
                until + GRACE, None)
            for lock, fence in zip(locks, fences):
                lock._hold(fence, heart)
            self.check()
            await line.close()
        except BaseException as error:
            if line.unsure(error):
                for name in names:
                    heart.owe(heart.request(name, None))
            raise
        finally:
            await line.close()
        return locks

    @both
    async def open(self) -> int:
        id: int = await self._in_turn(NONE, 'asked for', self._open)
        return id

    async def _open(self) -> int:
        # a call of an earlier open may still have the connection
        if not await settle(self.hold(self._free, GRACE)):
            raise ConnectionLost('another call waits for an answer')
        try:
            try:
                # if the answer is lost, the lease has no locks, and expires
                id: int = await self._line.ask(
                    call('dlock_lease_open', delta(self.ttl), **self._options))
                sent = self._line.sent      # the next call changes it
            finally:
                await self._let_go()
            self.id, self.lost = id, self._new_lost()
            self._start_heart(self._line, sent, id, self.ttl, self._interval)
            self._state = 'held'
        except BaseException:
            try:
                if self._heart:
                    self._heart.remove(self.lost, True)
            finally:
                await self._line.close()
            raise
        return id

    @both
    async def close(self) -> None:
        """Closes the lease, which ends all of its locks.  Does nothing if it
        is closed already.  If an open is in progress, waits for its end; but
        in a signal handler that interrupts the open, raises WrongState."""
        waiting = pauses()
        while (self._state == 'asked for'
               and (isinstance(self, Asyncio)
                    or self._thread != threading.get_ident())):
            await settle(self.sleep(next(waiting)))
        if self._state != NONE:
            await self._in_turn('held', 'being released',
                                lambda: self.through(self._close()))

    async def _close(self) -> None:
        line, mine = self.locks.line(self, self.near), False
        try:
            mine = await settle(self.hold(self._free, GRACE))
            if mine:
                line = self._line
            await self._give_back(
                call('dlock_lease_close', self.id), True, line)
        finally:
            try:
                if self._heart:
                    self._heart.remove(self.lost, True)
                await line.close()
            finally:
                self._state = NONE
                if mine:
                    self._free.release()

    _enter, _end = open.function, close.function


class BaseLock(Kept):
    """A lock for a block of the program"""

    def __init__(self, source: Any, name: str, *, scope: str | None = None,
                 timeout: float | None = None, shared: bool | None = None,
                 slots: int | None = None, permits: int | None = None,
                 info: str | None = None, ttl: float | None = None,
                 owner: str | None = None,
                 interval: float | None = None) -> None:
        """The source is Locks, a Lease, or a connection of the program, for
        session scope in autocommit mode.  Times are in seconds.  A timeout of
        None waits without limit, and 0 tries once.  In lease scope, a repeated
        request of one owner, such as a job's number, gets the same lock."""
        super().__init__()
        self.name, self.timeout, self.ttl = name, timeout, ttl
        self.fence: int | None = None
        self._lease: BaseLease[Any] | None = (
            source if isinstance(source, BaseLease) else None)
        self._under: Heart | None = None    # of the Lease, as requested
        self._executor: Executor | None = None
        self._locks = self._lease.locks if self._lease else source
        self._observer = (
            self._locks.observer if isinstance(self._locks, Servers) else None)
        if self._lease:
            scopes = ['lease']
            self._lease.locks.check(name, self._lease.near)
            self._line = self._lease.locks.line(self, name)
        elif isinstance(source, Servers):
            scopes = ['session' if ttl is None else 'lease']
            self._line = source.line(self, name)
        elif isinstance(
                given := Psycopg2.of(source), self.connection_kind):
            scopes = ['session', 'transaction']
            self._line = Line(self, None, given=given)
        elif scope == 'transaction':
            scopes = ['transaction']
            self._executor = Executor(source)
            self._line = Line(self, None, given=source)
        else:
            raise BadArgument(f'no lock of a {type(source).__name__}', '22023')
        self.scope = scope or scopes[0]
        own = self.scope == 'lease' and not self._lease
        if self.scope not in scopes or own != (ttl is not None):
            raise BadArgument(f'no lock in {scope} scope of this', '22023')
        self._line.session = self.scope == 'session'
        self._interval = rhythm(ttl, interval) if ttl is not None else 0
        self._owner = owner
        self._asked: str | None = ''    # the request's owner
        if own and owner and self._line.source:
            self._debt = Debt(self._line.source, name, owner)
        self._options = dict(
            shared=shared, slots=slots, permits=permits, info=info)
        self._cancelled = False
        self._idle = threading.Event()
        self._idle.set()
        # requests of cancel() to the server; None if it must not send any
        self._cancels: list[threading.Thread] | None = None
        # protects _cancels; a signal handler may call cancel(), too
        self._sending = threading.RLock()

    def _forked(self) -> None:
        super()._forked()
        self._cancels, self._sending = None, threading.RLock()

    def __str__(self) -> str:
        return f'lock "{self.name}"'

    def _look(self) -> None:
        super()._look()
        connection = self._line.connection
        if (self._state == 'held' and self.scope != 'lease'
                and not self._executor
                and (connection.closed or is_cut(connection))):
            self.lost.set('its connection is closed')

    def _id(self) -> int | None:
        return self.fence

    def _hold(self, fence: int, heart: Heart) -> None:
        """Holds a lock that acquire_all() has acquired."""
        self._turn(NONE, 'held')
        self.lost, self._heart, self.fence = self._new_lost(), heart, fence
        self._asked, self._under = None, heart
        heart.add(self.lost, self.name, fence)
        self._observe_hold(now())

    async def _ask(self, statement: Statement) -> tuple[Any, float, bool]:
        if self._executor:
            return await self._executor.ask(statement), 0.0, False
        if self._lease:
            return await self._lease._ask(statement)
        if self.scope != 'lease':
            return await self._line.ask(statement), 0.0, False
        line = self._locks.line(self, self.name)    # not another call's
        try:
            answer = await line.ask(statement, self.deadline)
            return answer, line.sent, line.doubt
        finally:
            await line.close()

    @both
    async def is_held(self) -> bool:
        """Asks the server.  The answer can be outdated; to be sure, guard."""
        if self._state != 'held' or self.lost:
            return False
        lease = None
        if self.scope == 'lease':
            lease = self._lease.id if self._lease else self.fence
        answer, *_ = await self._ask(
            call('dlock_is_held', self.name, lease=lease))
        return bool(answer)

    @both
    async def downgrade(self) -> None:
        """Makes an exclusive hold shared, without releasing it."""
        self.check()
        await self._held(call('dlock_downgrade', self.fence))

    @both
    async def acquire(self) -> int:
        """Returns the fence.  A cancelled task withdraws its request."""
        fence: int = await self._in_turn(NONE, 'asked for', self._acquire)
        return fence

    async def _acquire(self) -> int:
        self.lost, self._heart, self.fence = self._new_lost(), None, None
        self._asked, self._under = '', None
        self._doubt = False     # of the attempt over the lease's connection
        self._line.late = None
        turn, began = self._state, now()
        try:
            fence = await self._take()
            self._observe_hold(began)
            self._state = 'held'
        except BaseException as error:
            try:
                with suppress(Error):
                    await self.through(self._undo(error))
            finally:
                self._observe('failed', began, error)
            raise
        finally:
            if self._state is turn:     # the undo failed, or was interrupted
                if self._debt and self._asked:
                    self._debt.owe(self.fence or 0)
                await self.through(self._give_up())
        return fence

    def _observe(self, what: str, since: float,
                 error: BaseException | None = None) -> None:
        if self._observer:
            tell(self._observer, Observation(
                what, self.name, self.scope, now() - since, error))

    def _observe_hold(self, began: float) -> None:
        self._since = since = now()
        if self._observer:
            self._observe('waited', began)
            # not in a task's loop: in the thread that reports the loss
            Lost.add_callback(
                self.lost, lambda _: self._observe('lost', since))

    async def _take(self) -> int:
        """Requests the lock.  A repeated request gets the remaining time."""
        line, lease, values = self._line, self._lease, list[Any]()
        function = FUNCTIONS[self.scope]
        until = now() + float('inf' if self.timeout is None else self.timeout)
        if lease:
            lease.check()
            heart = lease._heart
            assert heart
            self._under, values = heart, [heart.id]
        elif self.ttl is not None:
            function, values = 'dlock_ttl_acquire', [delta(self.ttl)]
        if self._executor:
            self.fence = int(await self._executor.ask_to_last(call(
                function, self.name, timeout=delta(self.timeout),
                **self._options)))
            return self.fence
        line.fixed = line.given is not None
        line.opened = line.check_client if until > now() else None
        self._cancels = []
        self._idle.clear()
        try:
            if self._debt:
                await self._pay(self._debt, until + GRACE)
            if self.scope == 'lease':
                self._asked = self._owner or str(uuid.uuid4())
                self._options['owner'] = self._asked
                if self._under and self._request() in self._under.owed:
                    raise WrongState(
                        f'{self} is being taken back from this owner', '55000')
            fence = (await self._try(function, values, until + GRACE)
                     if lease else None)
            if fence is None:
                fence = int(await line.ask(
                    lambda: call(function, self.name, *values, **self._options,
                                 timeout=delta(max(0, until - now()))),
                    until + GRACE, None, lambda: self._cancelled))
            if self.scope == 'transaction':
                check_transaction(line.connection)
            self.fence = fence
            if self._under:
                self._heart = self._under
                self._heart.add(self.lost, self.name, fence)
                self.lost.check()
            elif self.ttl is not None:
                await self._keep(fence, self.ttl, until + GRACE)
        finally:
            quiet = await self._end_cancels()
        if not quiet:
            raise Cancelled('cancelled by the program', '57014')
        if self.scope == 'lease':       # a held lock needs no connection
            await line.close()
        line.fixed = self.scope != 'lease'
        return fence

    async def _end_cancels(self) -> bool:
        """Waits for the requests of cancel(), because a request that arrives
        later would cancel the next statement.  If one does not return, or
        cancel() has cut the connection, closes the connection, also the
        program's own, and returns False."""
        quiet, until, connection = False, now() + OBEY, self._line.connection
        try:
            with self._sending:
                requests, self._cancels = self._cancels or [], None
            if connection is None:      # they cannot cancel a new one
                requests = []
            for request in requests:
                request.join(max(0, until - now()))
            quiet = not is_cut(connection) and not any(
                request.is_alive() for request in requests)
        finally:
            self._cancels = None
            try:
                if not quiet and connection is not None:
                    await settle(connection.close())
            finally:
                self._idle.set()
        return quiet

    def _request(self) -> Request:
        if self._under:
            return self._under.request(self.name, self._asked)
        return self.name, self._asked, None

    async def _pay(self, debt: Debt, until: float) -> None:
        """Releases what the owner must not hold again."""
        def ask(statement: Statement) -> Any:
            return self._line.ask(
                statement, until, stopped=lambda: self._cancelled)

        while (ticket := debt.ticket) is not None:
            if ticket:
                await ask(call('dlock_release_ticket', ticket))
            else:
                await self._take_back(
                    ask, (self.name, self._owner, None), until)
            debt.paid(ticket)

    async def _take_back(self, ask: Callable[[Statement], Any],
                         request: Request, until: float) -> None:
        waiting = pauses()
        while not await take_back(ask, request):
            if now() >= until:
                raise ConnectionLost('its session goes on waiting')
            await settle(self.sleep(next(waiting)))

    async def _try(self, function: str, values: list[Any],
                   until: float) -> int | None:
        """Tries over the lease's connection; None if the lock must wait."""
        lease = self._lease
        assert lease
        if not await settle(self.hold(lease._free, GRACE)):
            return None
        try:
            fence: int = await lease._line.ask(
                call(function, self.name, *values, **self._options,
                     timeout=delta(0)), until,
                stopped=lambda: self._cancelled)
            return fence
        except LockTimeout:
            if self.timeout == 0:
                raise
            return None
        finally:
            self._doubt = lease._line.doubt
            await lease._let_go()

    async def _keep(self, fence: int, ttl: float, until: float) -> None:
        """Renews: after a long wait, only this makes the deadline known.  If
        the request repeats an earlier one, the shorter ttl counts."""
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
        self._start_heart(line, line.sent, fence, life,
                          self._interval * life / ttl)

    async def _undo(self, error: BaseException) -> None:
        """Undoes an interrupted request, which the server may have executed.
        Ends the call's turn as its last act."""
        line, until = self._line, now() + UNDO
        if self._heart:
            self._heart.remove(self.lost, not self._lease)
        if self.scope == 'session' and line.given and (
                fence := self.fence or line.late):
            await self.ask(
                line.connection, call('dlock_release_ticket', fence))
        unsure = self.scope == 'lease' and self._asked and (
            self.fence or not isinstance(error, Error)
            or isinstance(error, QuorumLate)
            or line.doubt or self._doubt)
        await line.close()
        if unsure:
            line.opened, line.fixed, ticket = None, False, self.fence or 0
            if self._debt:
                self._debt.owe(ticket)
            await self._take_back(
                lambda statement: line.ask(statement, until),
                self._request(), until)
            if self._debt:
                self._debt.paid(ticket)
            await line.close()
        self._state = NONE

    async def _give_up(self) -> None:
        """Leaves an unfinished undo or release to the heartbeat of the Lease;
        other leases expire, or the owner's next request releases them.  Closes
        the program's own connection, which may have the lock."""
        line = self._line
        try:
            if self._under:
                self._under.owe(self._request())
            elif self.scope == 'session' and line.given and (
                    self.fence or line.late):
                await settle(line.connection.close())
        finally:
            try:
                if self._heart:
                    self._heart.remove(self.lost, not self._lease)
            finally:
                await line.close()

    @both
    async def release(self) -> None:
        if self.scope == 'transaction':     # its end releases the lock
            self._turn('held', NONE)
        else:
            await self._in_turn('held', 'being released',
                                lambda: self.through(self._release()))
        self._observe('held', self._since)

    async def _release(self) -> None:
        """Releases, over the connection of a Lease if there is one.  If that
        fails, the heartbeat of the Lease repeats the release.  If a
        release over the program's own connection is refused, the lock stays
        held; if it is interrupted, closes the connection."""
        lease, mine, after = self._lease, False, NONE
        try:
            if lease:
                mine = await settle(self.hold(lease._free, GRACE))
            await self._give_back(
                call('dlock_release_ticket', self.fence), not lease,
                lease._line if lease and mine else self._line)
        except LockLost:
            raise
        except BaseException as error:
            if self._line.given and isinstance(error, Error):
                after = 'held'
            else:
                await self._give_up()
            raise
        finally:
            try:
                if self._under and self._asked is None:
                    self._under.together.discard(self.name)
                if lease and mine:
                    await lease._let_go()
                await self._line.close()
            finally:
                self._state = after

    @both
    async def guard(self, connection: Any) -> None:
        """The transaction can commit only while the lock is held."""
        await Executor(connection).ask_to_last(
            call('dlock_guard', self.name, self.fence))

    _enter, _end = acquire.function, release.function


#
# Public classes
#

class Lock(BaseLock, Blocking):
    def cancel(self) -> None:
        """Called by another thread.  The acquire raises Cancelled, unless it
        has just succeeded, and each later acquire does, too."""
        self._cancelled = True
        until, waiting, line = now() + OBEY, pauses(), self._line
        while not self._idle.wait(next(waiting) / 2):
            with suppress(Exception), self._sending:
                if self._cancels is not None:
                    if now() < until:
                        self._cancels.append(cancel(line.connection))
                    elif not line.given:
                        cut(line.connection)
            if now() > until + GRACE:
                return


class AsyncLock(BaseLock, Asyncio):
    lost: AsyncLost


class Lease(BaseLease[Lock], Blocking):
    _lock_kind = Lock


class AsyncLease(BaseLease[AsyncLock], Asyncio):
    lost: AsyncLost
    _lock_kind = AsyncLock


async def async_reset(connection: Any) -> None:
    """A pool calls this when a connection is returned."""
    connection = Psycopg2.of(connection)
    if not connection.closed:
        await settle(connection.rollback())
        await execute(connection, call('dlock_release_all'))
        await settle(connection.rollback())


def reset(connection: Any) -> None:
    run(async_reset(connection))
