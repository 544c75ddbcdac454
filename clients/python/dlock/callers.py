"""Blocking and asynchronous callers, in one way.

What the package does is written once, as coroutines.  psycopg has two kinds of
connections with the same methods, which return a value, or what is to be
awaited: settle() takes either.  So a coroutine over a blocking connection
never suspends, and run() has its result at once.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from functools import partial
from typing import (
    Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload)

import psycopg

from .errors import Error, translated

P = ParamSpec('P')
T = TypeVar('T')
Statement = tuple[str, tuple[Any, ...]]

UNDO = 5.0      # for taking back what nobody waits for any more


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not suspend"""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError('a blocking call has suspended')


async def settle(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def execute(connection: Any, statement: Statement) -> Any:
    """The value, or row, that a statement returns"""
    with translated():
        cursor = await settle(connection.execute(*statement))
        row = await settle(cursor.fetchone()) if cursor.description else None
        return row and (row[0] if len(row) == 1 else row)


class Caller:
    """What blocks of the program are for: `with`, or `async with`"""
    connecting: Any
    mutex: Any
    sleep: Any
    ask: Any
    readable: Any
    _enter: Any     # coroutines
    _end: Any

    async def _leave(self, error: BaseException | None) -> None:
        """What has ended the block is not hidden by a loss."""
        try:
            await self._end()
        except Error as failure:
            if error is None:
                raise
            error.add_note(f'{self}: {failure}')


class Blocking(Caller):
    """Waits in the caller's thread"""
    connecting = psycopg.Connection.connect
    mutex = nullcontext
    sleep = staticmethod(time.sleep)
    ask = staticmethod(execute)

    @staticmethod
    def readable(connection: Any, seconds: float) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.poll(max(0, seconds) * 1000)

    def __enter__(self) -> Self:
        run(self._enter())
        return self

    def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
        run(self._leave(error))


class Asyncio(Caller):
    """Suspends the caller's task"""
    connecting = psycopg.AsyncConnection.connect
    mutex = asyncio.Lock
    sleep = staticmethod(asyncio.sleep)

    @staticmethod
    async def ask(connection: Any, statement: Statement) -> Any:
        """Cancelled, it waits until the server has heard of that."""
        task = asyncio.ensure_future(execute(connection, statement))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                await asyncio.to_thread(connection.pgconn.get_cancel().cancel)
                await asyncio.wait({task}, timeout=UNDO)
            if not task.cancel() and not task.cancelled():
                task.exception()
            raise

    @staticmethod
    async def readable(connection: Any, seconds: float) -> None:
        # of its own, as the loop has one reader for each
        file = os.dup(connection.fileno())
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(file, ready.set)
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ready.wait(), max(0, seconds))
        finally:
            loop.remove_reader(file)
            os.close(file)

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, _: Any, error: BaseException | None,
                        *__: Any) -> None:
        await self._leave(error)


class both(Generic[P, T]):
    """A method that is written as a coroutine: a task awaits it, and for a
    blocking caller it is run to its end."""

    def __init__(self, function: Callable[
            Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, caller: Blocking, _: Any) -> Callable[P, T]: ...

    @overload
    def __get__(self, caller: Asyncio,
                _: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, caller: Any, _: Any = None) -> Any:
        if caller is None:
            return self
        method = partial(self.function, caller)
        if isinstance(caller, Blocking):
            return lambda *values, **named: run(method(*values, **named))
        return method
