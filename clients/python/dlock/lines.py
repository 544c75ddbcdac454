"""Statements, and the connections that they are sent over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .callers import Caller, Statement, cut, settle
from .errors import (
    Cancelled, ConnectionLost, Error, NotPrimary, QuorumLate, translated)

# Goes on while the machine sleeps, where there is such a clock
CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)
# How much later than it should an answer may come; then the connection is given
# up, and a lock in lease scope asked for over another one
GRACE = 5.0

# For whoever is not told of the end of a connection; a DSN may say otherwise.
DEFAULTS = {'keepalives_idle': 30, 'keepalives_interval': 10,
            'keepalives_count': 3, 'tcp_user_timeout': 60000}


def now() -> float:
    return time.clock_gettime(CLOCK)


def delta(seconds: float | None) -> timedelta | None:
    """None for none, and for ever"""
    if seconds is None or seconds == float('inf'):
        return None
    return timedelta(seconds=seconds)


def call(function: str, *values: Any, **named: Any) -> Statement:
    """SELECT function(...); what is None is left to the server"""
    named = {key: value for key, value in named.items() if value is not None}
    places = ['%s'] * len(values) + [f'{key} => %s' for key in named]
    return (f"SELECT {function}({', '.join(places)})",
            (*values, *named.values()))


def pauses(most: float = 2) -> Iterator[float]:
    """Before asking again where there was no server: longer and longer, and of
    many clients not at one time"""
    pause = 0.1
    while True:
        yield min(pause, most) * random.uniform(0.5, 1.5)
        pause = min(2 * pause, most)


def hosts_of(dsn: str, left: float) -> list[str]:
    """One DSN for each host, so that each gets its own time to answer"""
    options: dict[str, Any] = {
        **DEFAULTS, 'connect_timeout': 10, **conninfo_to_dict(dsn)}
    options['connect_timeout'] = max(
        1, int(min(int(options['connect_timeout']) or 10, left)))
    lists = {key: str(options[key]).split(',')
             for key in ('host', 'hostaddr', 'port') if options.get(key)}
    count = max((len(values) for values in lists.values()), default=1)
    if count > 1:
        options.setdefault('target_session_attrs', 'read-write')
    return [make_conninfo(**{**options, **{
        key: values[n % len(values)] for key, values in lists.items()}})
        for n in range(count)]


@contextmanager
def cut_at(connection: Any, until: float) -> Iterator[None]:
    """Whoever still waits for an answer then finds the connection broken."""
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


class Line:
    """A connection that is made when it is needed, and made again; or one of
    the program's, which is neither made nor closed here, nor cut."""

    def __init__(self, caller: Caller, dsn: str, patience: float = 10, *,
                 name: str = 'dlock', given: Any = None) -> None:
        self.caller, self.dsn, self.patience = caller, dsn, patience
        self.name, self.given, self.connection = name, given, given
        self.fixed = given is not None      # will no other one do?
        self.opened: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.sent = 0.0     # before the last statement was sent
        self.doubt = False  # was an earlier one perhaps done, too?
        self.late: Any = None   # what has come of one that was broken off

    async def ask(self, statement: Statement | Callable[[], Statement],
                  until: float = float('inf'), limit: float | None = GRACE,
                  stopped: Callable[[], bool] = lambda: False) -> Any:
        """Over a new connection where one breaks, or does not answer within
        the limit: until then, or for as long as there is patience with a server
        that is away.  Without a limit, it was there until it broke."""
        self.doubt, self.late = False, None
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
                    return await self.caller.ask(
                        self.connection, what, self._keep)
            except QuorumLate:
                if self.fixed or until == float('inf') or now() >= until:
                    raise
                self.doubt = True
            except (ConnectionLost, NotPrimary):
                if self.fixed:
                    raise
                if self.connection is not None:
                    self.doubt = True
                    if limit is None:
                        end = min(until, now() + self.patience)
                await self.close()
                if now() >= end:
                    raise
            await settle(self.caller.sleep(next(waiting)))

    def _keep(self, value: Any) -> None:
        self.late = value

    async def _connect(self, left: float) -> None:
        for host in (hosts := hosts_of(self.dsn, left)):
            try:
                with translated():
                    self.connection = await settle(self.caller.connecting(
                        host, autocommit=True, prepare_threshold=None,
                        fallback_application_name=self.name))
                break
            except Error:
                if host is hosts[-1]:
                    raise
        if self.opened:
            with cut_at(self.connection, now() + GRACE):
                await self.opened()

    async def close(self) -> None:
        if self.connection is not self.given:
            connection, self.connection = self.connection, None
            with suppress(Exception):
                await settle(connection.close())
