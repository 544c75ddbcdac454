"""Where connections come from: a DSN, or the program's own source of them"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .callers import Asyncio, Caller, settle
from .drivers import Psycopg2, is_idle
from .errors import BadArgument, Error, translated

# Detect dead connections; a DSN may set other values.
DEFAULTS: dict[str, Any] = {
    'connect_timeout': 10, 'keepalives_idle': 30, 'keepalives_interval': 10,
    'keepalives_count': 3, 'tcp_user_timeout': 60000}


class ConnectionPool(Protocol):
    """A pool of psycopg_pool, of either kind"""
    def getconn(self, timeout: float | None = None) -> Any: ...
    def putconn(self, conn: Any) -> Any: ...


class Engine(Protocol):
    """An engine of SQLAlchemy, over psycopg2 or psycopg"""
    def raw_connection(self) -> Any: ...


# A function returns a connection, or a DSN.
Given = str | Callable[[], Any] | ConnectionPool | Engine


def hosts_of(dsn: str, left: float) -> list[str]:
    """One DSN for each host, so that the hosts share the time"""
    options = {**DEFAULTS, **conninfo_to_dict(dsn)}
    lists = {key: str(options[key]).split(',')
             for key in ('host', 'hostaddr', 'port') if options.get(key)}
    count = max((len(values) for values in lists.values()), default=1)
    options['connect_timeout'] = max(
        1, int(min(int(options['connect_timeout']) or 10, left / count)))
    if count > 1:
        options.setdefault('target_session_attrs', 'read-write')
    return [make_conninfo(**{**options, **{
        key: values[n % len(values)] for key, values in lists.items()}})
        for n in range(count)]


class Loan:
    """A connection, and the function that returns or closes it"""

    def __init__(self, connection: Any, back: Callable[[bool], Any], *,
                 pooled: bool = False) -> None:
        self.connection, self._back, self.pooled = connection, back, pooled

    async def end(self, good: bool) -> None:
        await settle(self._back(good))


class Source:
    given: Any
    # Locks with the same key renew their leases together.
    key: Any

    async def lend(self, caller: Caller, name: str, left: float) -> Loan:
        raise NotImplementedError

    def for_heartbeat(self) -> Source:
        """The source for the heartbeat, a thread without the program's loop"""
        return self


class Dsn(Source):
    def __init__(self, dsn: str) -> None:
        self.key = self.given = dsn

    async def lend(self, caller: Caller, name: str, left: float) -> Loan:
        for host in (hosts := hosts_of(self.key, left)):
            try:
                with translated():
                    connection = await settle(caller.connecting(
                        host, autocommit=True, prepare_threshold=None,
                        fallback_application_name=name))
                break
            except Error:
                if host is hosts[-1]:
                    raise
        return Loan(connection, lambda _: connection.close())


class Function(Source):
    """Called for each new connection; returns it, or its DSN"""

    def __init__(self, given: Callable[[], Any]) -> None:
        self.key, self.given = id(given), given

    async def lend(self, caller: Caller, name: str, left: float) -> Loan:
        with translated():
            made = await caller.made(self.given, _finish)
        if isinstance(made, str):
            return await Dsn(made).lend(caller, name, left)
        connection = Psycopg2.of(made)
        await _prepare(
            caller, connection, getattr(made, 'close', lambda: None))
        return Loan(connection, lambda _: connection.close())


class Pooled(Source):
    """A connection stays out of the pool while it is needed."""

    def __init__(self, given: Any) -> None:
        self.key, self.given = id(given), given

    async def lend(self, caller: Caller, name: str, left: float) -> Loan:
        with translated():
            lent = await caller.made(
                lambda: self._take(min(left, 1e6)),
                lambda lent: asyncio.ensure_future(
                    settle(self._put(lent, True))))
        connection = Psycopg2.of(self._raw(lent))
        restore = await _prepare(
            caller, connection, lambda: self._put(lent, False))

        async def back(good: bool) -> None:
            try:
                if good:
                    await restore()
            except BaseException:
                good = False
                raise
            finally:
                await settle(self._put(lent, good and is_idle(connection)))
        return Loan(connection, back, pooled=True)

    def _take(self, left: float) -> Any:
        return self.given.getconn(timeout=left)

    def _raw(self, lent: Any) -> Any:
        return lent

    def _put(self, lent: Any, good: bool) -> Any:
        if not good:
            # the pool replaces it
            with suppress(Exception):
                lent.pgconn.finish()
        return self.given.putconn(lent)

    def for_heartbeat(self) -> Source:
        pool = self.given
        if not inspect.iscoroutinefunction(pool.getconn):
            return self

        async def connect() -> Any:
            """Connects as the pool does, whose connections need its loop."""
            dsn, options = [
                await settle(value()) if callable(value) else value
                for value in (pool.conninfo, pool.kwargs)]
            connection = await pool.connection_class.connect(
                make_conninfo(**{**DEFAULTS, **conninfo_to_dict(dsn)}),
                **(options or {}))
            if configure := getattr(pool, '_configure', None):
                await configure(connection)
            return connection
        source = Function(connect)
        source.key = self.key
        return source


class Engined(Pooled):
    def _take(self, left: float) -> Any:
        return self.given.raw_connection()

    def _raw(self, lent: Any) -> Any:
        return lent.driver_connection

    def _put(self, lent: Any, good: bool) -> Any:
        if not good:
            lent.invalidate()
        lent.close()

    def for_heartbeat(self) -> Source:
        return self


def _finish(made: Any) -> None:
    if isinstance(made, psycopg.AsyncConnection):
        made.pgconn.finish()


async def _prepare(caller: Caller, connection: Any,
                   back: Callable[[], Any]) -> Callable[[], Awaitable[None]]:
    """Sets autocommit mode, without prepared statements.  Returns a function that
    restores the mode."""
    if not isinstance(connection, caller.connection_kind):
        await settle(back())
        raise BadArgument(
            f'no use for a {type(connection).__name__} here', '22023')
    autocommit, threshold = connection.autocommit, connection.prepare_threshold

    async def autocommits(on: bool, threshold: int | None) -> None:
        if not is_idle(connection):
            await settle(connection.rollback())
        if isinstance(connection, psycopg.AsyncConnection):
            await connection.set_autocommit(on)
        else:
            connection.autocommit = on
        if not isinstance(connection, Psycopg2):
            connection.prepare_threshold = threshold

    try:
        with translated():
            await autocommits(True, None)
    except BaseException:
        await settle(back())
        raise
    return lambda: autocommits(autocommit, threshold)


def source_of(given: Any, caller: type[Caller]) -> Source:
    if isinstance(given, Source):
        return given
    if isinstance(given, str):
        return Dsn(given)
    waits = issubclass(caller, Asyncio)
    if callable(getattr(given, 'getconn', None)) and not hasattr(
            given, 'minconn') and (
            inspect.iscoroutinefunction(given.getconn) == waits):
        return Pooled(given)
    if callable(getattr(given, 'raw_connection', None)) and not waits:
        return Engined(given)
    if callable(given) and (
            waits or not inspect.iscoroutinefunction(given)):
        return Function(given)
    raise BadArgument(
        f'no connections from a {type(given).__name__} here', '22023')
