"""Talking to servers, in one way for blocking and for asynchronous callers.

What the package does is written once, as coroutines over a Wire.  Those of
Blocking never suspend, so that run() gets their result at once.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .errors import translated

# Goes on while the machine sleeps, where there is such a clock
CLOCK = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)

# For whoever is not told of the end of a connection; a DSN may say otherwise.
DEFAULTS = {'keepalives_idle': 30, 'keepalives_interval': 10,
            'keepalives_count': 3, 'tcp_user_timeout': 60000}

Statement = tuple[str, tuple[Any, ...]]


def now() -> float:
    return time.clock_gettime(CLOCK)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not suspend"""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError('a blocking call has suspended')


def call(function: str, *values: Any, **named: Any) -> Statement:
    """SELECT function(...); what is None is left to the server"""
    named = {key: value for key, value in named.items() if value is not None}
    places = ['%s'] * len(values) + [f'{key} => %s' for key in named]
    return (f"SELECT {function}({', '.join(places)})",
            (*values, *named.values()))


def interval(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def hosts_of(dsn: str, patience: float = 10) -> list[str]:
    """One DSN for each host, so that each gets its own time to answer"""
    options = {**DEFAULTS, 'connect_timeout': max(2, min(10, int(patience))),
               **conninfo_to_dict(dsn)}
    lists = {key: str(options[key]).split(',')
             for key in ('host', 'hostaddr', 'port') if options.get(key)}
    count = max((len(values) for values in lists.values()), default=1)
    if count > 1:
        options.setdefault('target_session_attrs', 'read-write')
    return [make_conninfo(**{**options, **{
        key: values[min(n, len(values) - 1)] for key, values in lists.items()}})
        for n in range(count)]


class Blocking:
    """Waits in the caller's thread"""

    async def connect(self, dsn: str, name: str) -> psycopg.Connection[Any]:
        return connect(dsn, name)

    async def ask(self, connection: Any, statement: Statement) -> Any:
        return ask(connection, statement)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self, connection: Any) -> None:
        connection.close()

    async def readable(self, connection: Any, seconds: float) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.poll(max(0, seconds) * 1000)


class Asyncio:
    """Suspends the caller's task"""

    async def connect(self, dsn: str, name: str) -> Any:
        hosts = hosts_of(dsn)
        for host in hosts:
            try:
                with translated():
                    return await psycopg.AsyncConnection.connect(
                        host, autocommit=True, prepare_threshold=None,
                        fallback_application_name=name)
            except Exception:
                if host is hosts[-1]:
                    raise

    async def ask(self, connection: Any, statement: Statement) -> Any:
        """Cancelled, it waits until the server has heard of that."""
        task = asyncio.ensure_future(self._execute(connection, statement))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                await asyncio.to_thread(connection.pgconn.get_cancel().cancel)
                await asyncio.wait({task}, timeout=5)
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()
            raise

    async def _execute(self, connection: Any, statement: Statement) -> Any:
        with translated():
            cursor = await connection.execute(*statement)
            row = await cursor.fetchone() if cursor.description else None
            return row and (row[0] if len(row) == 1 else row)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self, connection: Any) -> None:
        await connection.close()

    async def readable(self, connection: Any, seconds: float) -> None:
        # of its own, as the loop has one reader for each
        file = os.dup(connection.fileno())
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(file, ready.set)
        try:
            await asyncio.wait_for(ready.wait(), max(0, seconds))
        except asyncio.TimeoutError:
            pass
        finally:
            loop.remove_reader(file)
            os.close(file)


Wire = Blocking | Asyncio


def connect(dsn: str, name: str,
            patience: float = 10) -> psycopg.Connection[Any]:
    hosts = hosts_of(dsn, patience)
    for host in hosts:
        try:
            with translated():
                return psycopg.connect(host, autocommit=True,
                                       prepare_threshold=None,
                                       fallback_application_name=name)
        except Exception:
            if host is hosts[-1]:
                raise
    raise AssertionError


def ask(connection: Any, statement: Statement) -> Any:
    """The value, or row, that a statement returns"""
    with translated():
        cursor = connection.execute(*statement)
        row = cursor.fetchone() if cursor.description else None
        return row and (row[0] if len(row) == 1 else row)
