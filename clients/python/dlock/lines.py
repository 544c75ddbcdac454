"""Statements, and the connections that they are sent over."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .callers import Caller, Statement, settle
from .errors import (
    Cancelled, ConnectionLost, Error, NotPrimary, QuorumLate, translated)

# Goes on while the machine sleeps, where there is such a clock
CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)
PAUSE = 0.1     # before asking again where there was no server

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


def hosts_of(dsn: str, patience: float) -> list[str]:
    """One DSN for each host, so that each gets its own time to answer"""
    options: dict[str, Any] = {
        **DEFAULTS, 'connect_timeout': max(2, min(10, int(patience or 10))),
        **conninfo_to_dict(dsn)}
    lists = {key: str(options[key]).split(',')
             for key in ('host', 'hostaddr', 'port') if options.get(key)}
    count = max((len(values) for values in lists.values()), default=1)
    if count > 1:
        options.setdefault('target_session_attrs', 'read-write')
    return [make_conninfo(**{**options, **{
        key: values[n % len(values)] for key, values in lists.items()}})
        for n in range(count)]


@contextmanager
def cut_at(connection: Any, until: float | None) -> Iterator[None]:
    """Whoever still waits for an answer then finds the connection broken."""
    if until is None:
        yield
        return
    with translated():
        line = socket.socket(fileno=os.dup(connection.fileno()))

    def cut() -> None:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    timer = Timer(max(0, until - now()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        line.close()


class Line:
    """A connection that is made when it is needed, and made again; or one of
    the program's, which is neither made nor closed here."""

    def __init__(self, caller: Caller, dsn: str, patience: float = 10, *,
                 name: str = 'dlock', given: Any = None) -> None:
        self.caller, self.dsn, self.patience = caller, dsn, patience
        self.name, self.given, self.connection = name, given, given
        self.fixed = given is not None      # will no other one do?
        self.opened: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.sent = 0.0     # before the last statement was sent
        self.doubt = False  # was an earlier one perhaps done, too?

    async def ask(self, statement: Statement | Callable[[], Statement],
                  until: float | None = None,
                  stopped: Callable[[], bool] = lambda: False) -> Any:
        """Over a new connection where one breaks, until then; or for as long
        as there is patience with a server that is away."""
        self.doubt = False
        away: float | None = None
        pause = PAUSE
        while True:
            if stopped():
                raise Cancelled('cancelled by the program', '57014')
            try:
                if self.connection is None:
                    await self._connect()
                away = None
                what = statement() if callable(statement) else statement
                self.sent = now()
                with cut_at(self.connection, until):
                    return await self.caller.ask(self.connection, what)
            except (ConnectionLost, NotPrimary, QuorumLate) as error:
                late = isinstance(error, QuorumLate)
                if self.fixed or late and until is None:
                    raise
                self.doubt = self.doubt or self.connection is not None
                if not late:
                    await self.close()
                away = away or now()
                if now() >= (until or away + self.patience):
                    raise
            await settle(self.caller.sleep(pause))
            pause = min(2 * pause, 1)

    async def _connect(self) -> None:
        for host in (hosts := hosts_of(self.dsn, self.patience)):
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
            await self.opened()

    async def close(self) -> None:
        if self.connection is not self.given:
            connection, self.connection = self.connection, None
            with suppress(Exception):
                await settle(connection.close())
