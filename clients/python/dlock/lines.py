"""Statements, and the connections for them"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer
from typing import Any

from .callers import (
    Caller, Statement, cut, execute, forking, is_cut, settle)
from .drivers import is_idle
from .errors import (
    Cancelled, ConnectionLost, Error, LockLost, NotPrimary, QuorumLate)
from .sources import Loan, Source

# A clock that runs while the machine sleeps, if there is one
CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)
# Seconds that an answer may be late.  Then the client drops the connection,
# and requests a lock in lease scope over another one.
GRACE = 5.0
# A killed client's waiter leaves the queue.  A setting other than 0 stays.
CHECKED = ("SELECT set_config('client_connection_check_interval', '500ms', false)"
           " WHERE current_setting('client_connection_check_interval') = '0'",
           ())
UNCHECKED = ("SELECT set_config('client_connection_check_interval', '0', false)",
             ())


def now() -> float:
    return time.clock_gettime(CLOCK)


def delta(seconds: float | None) -> timedelta | None:
    """The interval; None if there is no limit"""
    if seconds is None or seconds == float('inf'):
        return None
    return timedelta(seconds=seconds)


def call(function: str, *values: Any, **named: Any) -> Statement:
    """SELECT function(...); arguments that are None are omitted"""
    named = {key: value for key, value in named.items() if value is not None}
    places = ['%s'] * len(values) + [f'{key} => %s' for key in named]
    return (f"SELECT {function}({', '.join(places)})",
            (*values, *named.values()))


def pauses(most: float = 2) -> Iterator[float]:
    """Pauses before retries without a server: they grow, and are random so
    that clients do not retry together."""
    pause = 0.1
    while True:
        yield min(pause, most) * random.uniform(0.5, 1.5)
        pause = min(2 * pause, most)


@contextmanager
def cut_at(connection: Any, until: float) -> Iterator[None]:
    """Cuts the connection at this time, which ends a wait for an answer.  An
    answer that is read nevertheless does not count, because the server ends
    the session."""
    if until == float('inf'):
        yield
        return
    timer = Timer(max(0, until - now()), cut, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if is_cut(connection):
        raise ConnectionLost('no answer in time')


# A child process must not close its parent's connections
_inherited: list[Loan] = []


class Line:
    """A connection that is made, or taken from the program's pool, when it is
    needed, and again after a failure.  The program's own connection is never
    made or replaced, and closed only by an interrupted statement."""

    def __init__(self, caller: Caller, source: Source | None,
                 patience: float = 10, *,
                 name: str = 'dlock', given: Any = None) -> None:
        self.caller, self.source, self.patience = caller, source, patience
        self.name, self.given, self.connection = name, given, given
        self.loan: Loan | None = None
        # what to clean before a connection returns to a pool: a session's
        # locks, a setting, a handler
        self.session = self.checked = False
        self.listens: Callable[[Any], None] | None = None
        self.fixed = given is not None      # can it not be replaced?
        self.opened: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.sent = 0.0     # the time before the last statement was sent
        self.doubt = False  # may an earlier attempt have been executed?
        self.late: Any = None   # the last result, also if interrupted
        forking.add(self)

    async def ask(self, statement: Statement | Callable[[], Statement],
                  until: float = float('inf'), limit: float | None = GRACE,
                  stopped: Callable[[], bool] = lambda: False) -> Any:
        """Executes a statement.  If the connection breaks or does not answer
        within the limit, retries over a new one, until that time, or until the
        patience with an unreachable server ends.  Without a limit, it uses a
        connection until that breaks."""
        # a variable, because another call over this line resets the attribute
        doubt = self.doubt = False
        self.late = None
        longest = float('inf') if limit is None else limit
        end = min(until, now() + self.patience)
        waiting = pauses()
        while True:
            if stopped():
                raise Cancelled('cancelled by the program', '57014')
            try:
                if self.connection is None:
                    await self._connect(min(
                        until - now(), max(GRACE, end - now())))
                what = statement() if callable(statement) else statement
                self.sent = now()
                with cut_at(self.connection, float('inf') if self.given
                            else min(until, self.sent + longest)):
                    self.late = await self.caller.ask(
                        self.connection, what, self._keep)
                return self.late
            except QuorumLate as error:
                error.doubt = doubt
                if self.fixed or until == float('inf') or now() >= until:
                    raise
                doubt = self.doubt = True
            except (ConnectionLost, NotPrimary) as error:
                self.late = None        # its session has ended
                if self.connection is not None:
                    doubt = self.doubt = True
                    if limit is None:
                        end = min(until, now() + self.patience)
                error.doubt = doubt
                if self.fixed:
                    raise
                await self.close(False)
                if now() >= end:
                    raise
            except Error as error:
                error.doubt = doubt
                raise
            await settle(self.caller.sleep(next(waiting)))

    def unsure(self, error: BaseException) -> bool:
        """May the statement that raised this have been executed?"""
        return self.doubt or not isinstance(error, Error) or isinstance(
            error, (ConnectionLost, LockLost, QuorumLate))

    def _keep(self, value: Any) -> None:
        self.late = value

    async def _connect(self, left: float) -> None:
        assert self.source
        self.loan = await self.source.lend(self.caller, self.name, left)
        self.connection = self.loan.connection
        try:
            if self.opened:
                await self.opened()
        except BaseException:
            await self.close(False)     # the next one repeats all of it
            raise

    async def once(self, statement: Statement) -> Any:
        """Executes a statement over this connection, within GRACE."""
        with cut_at(self.connection, now() + GRACE):
            return await self.caller.ask(self.connection, statement)

    def _forked(self) -> None:
        """Lets a child process connect anew."""
        if self.loan:
            _inherited.append(self.loan)
        self.loan, self.connection = None, self.given

    @property
    def pooled(self) -> bool:
        return self.loan is not None and self.loan.pooled

    async def close(self, good: bool = True) -> None:
        """Returns a clean connection to the pool; if it may not be clean,
        closes it."""
        if self.loan is None:
            return
        loan, self.loan, self.connection = self.loan, None, None
        cleaned = False
        try:
            if loan.pooled and good and is_idle(loan.connection):
                with cut_at(loan.connection, now() + GRACE):
                    await self._clean(loan.connection)
                cleaned = True
        except Exception:
            pass
        finally:
            with suppress(Exception):
                await loan.end(cleaned)

    async def _clean(self, connection: Any) -> None:
        if self.session:
            await execute(connection, call('dlock_release_all'))
        if self.checked:
            await execute(connection, UNCHECKED)
        if self.listens:
            channel = await execute(connection, call('dlock_channel'))
            await execute(connection, (f'UNLISTEN "{channel}"', ()))
            connection.remove_notify_handler(self.listens)
        self.checked, self.listens = False, None

    async def check_client(self) -> None:
        with suppress(Error):
            self.checked = await self.once(CHECKED) is not None
