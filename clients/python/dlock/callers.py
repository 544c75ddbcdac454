"""One implementation for blocking and asynchronous callers.

All work is written once, as coroutines.  psycopg's blocking and asynchronous
connections have the same methods, which return a value or an awaitable;
settle() accepts both.  So a coroutine over a blocking connection never
suspends, and run() returns its result.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from functools import partial
from typing import (
    Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload)
from weakref import WeakSet

import psycopg
from psycopg.pq import ExecStatus
from psycopg.rows import tuple_row

from .errors import Error, translated
from .drivers import Psycopg2

P = ParamSpec('P')
T = TypeVar('T')
Statement = tuple[str, tuple[Any, ...]]

# Seconds for a canceled statement to end, and for its request to be undone
OBEY = 1.0
UNDO = 2.0

# Objects with a method _forked(), which forgets the parent's work.  A child
# calls it before it has other threads.
forking = WeakSet[Any]()


def _forked() -> None:
    for one in list(forking):
        one._forked()


os.register_at_fork(after_in_child=_forked)


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
        cursor = await settle(tuples(connection).execute(*statement))
        row = await settle(cursor.fetchone()) if cursor.description else None
        return row and (row[0] if len(row) == 1 else row)


def tuples(connection: Any) -> Any:
    """A cursor whose rows are tuples, whatever the program has set"""
    if isinstance(connection, Psycopg2):
        return connection
    return connection.cursor(row_factory=tuple_row)


# Connections that cut() has ended.  A driver may still read an answer, and may
# not call them closed.
_cut = WeakSet[Any]()


def cut(connection: Any) -> bool:
    """Ends the connection, and each wait for its answer, at once.  False if
    that fails."""
    with suppress(Exception):
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            _cut.add(connection)
            line.shutdown(socket.SHUT_RDWR)
        return True
    return False


def is_cut(connection: Any) -> bool:
    return connection in _cut


def cancel(connection: Any) -> threading.Thread:
    """Cancels in a thread, because libpq has no time limit for this."""
    request = (connection if isinstance(connection, Psycopg2)
               else connection.pgconn.get_cancel())

    def send() -> None:
        with suppress(Exception):
            request.cancel()

    thread = threading.Thread(target=send, name='dlock cancel', daemon=True)
    thread.start()
    return thread


class Caller:
    """The base of objects for `with` or `async with`"""
    connecting: Any
    made: Any
    mutex: Any
    sleep: Any
    ask: Any
    readable: Any
    hold: Any
    new_mutex: Any
    connection_kind: Any
    through: Any
    _enter: Any     # coroutines
    _end: Any

    async def _leave(self, error: BaseException | None) -> None:
        """An exception of the block takes precedence over a loss."""
        try:
            await self._end()
        except Error as failure:
            if error is None:
                raise
            error.add_note(f'{self}: {failure}')


class Blocking(Caller):
    """Waits in the caller's thread"""
    connecting = psycopg.Connection.connect
    connection_kind = psycopg.Connection, Psycopg2
    mutex = nullcontext
    new_mutex = threading.Lock
    sleep = staticmethod(time.sleep)

    @staticmethod
    async def made(make: Callable[[], Any], _: Any) -> Any:
        return make()

    @staticmethod
    async def ask(connection: Any, statement: Statement,
                  late: Callable[[Any], None] = lambda _: None) -> Any:
        """An exception, for example of a signal handler, cancels the statement
        on the server.  If the statement returns a number, late() gets it."""
        try:
            return await execute(connection, statement)
        except Error:
            raise
        except BaseException:
            try:
                Blocking._stop(connection, late)
            except BaseException:
                # repeat it: a thread whose start is interrupted may not run
                with suppress(Exception):
                    cancel(connection)
                connection.close()
                raise
            raise

    @staticmethod
    def _stop(connection: Any, late: Callable[[Any], None]) -> None:
        if isinstance(connection, Psycopg2):    # has read the answer
            connection.close()
            return
        pgconn, until = connection.pgconn, time.monotonic() + OBEY
        told = False
        cancel(connection).join(OBEY)
        while (left := until - time.monotonic()) > 0:
            pgconn.consume_input()
            while not pgconn.is_busy():
                if (result := pgconn.get_result()) is None:
                    if not told:        # psycopg has read the result
                        connection.close()
                    return
                told = True
                if (result.status == ExecStatus.TUPLES_OK
                        and (value := result.get_value(0, 0)).isdigit()):
                    late(int(value))
            Blocking.readable(connection, left)
        connection.close()

    @staticmethod
    def hold(mutex: Any, seconds: float) -> bool:
        held: bool = mutex.acquire(timeout=max(0, seconds))
        return held

    @staticmethod
    async def through(coroutine: Coroutine[Any, Any, T]) -> T:
        return await coroutine

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
    connection_kind = psycopg.AsyncConnection,
    mutex = asyncio.Lock
    new_mutex = asyncio.Lock
    sleep = staticmethod(asyncio.sleep)

    @staticmethod
    async def connecting(*values: Any, **named: Any) -> Any:
        """psycopg may ignore a cancel and connect, so close the connection."""
        return await Asyncio.made(
            lambda: psycopg.AsyncConnection.connect(*values, **named),
            lambda connection: connection.pgconn.finish())

    @staticmethod
    async def made(make: Callable[[], Any],
                   discard: Callable[[Any], Any]) -> Any:
        """After a cancel, discard() gets a result that is made nevertheless."""
        def late(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and not task.exception():
                discard(task.result())

        task = asyncio.ensure_future(settle(make()))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.add_done_callback(late)
            task.cancel()
            raise
        return task.result()

    @staticmethod
    async def ask(connection: Any, statement: Statement,
                  late: Callable[[Any], None] = lambda _: None) -> Any:
        """A cancel stops the statement in the server, too.  If the statement
        has returned nevertheless, late() gets the result."""
        task = asyncio.ensure_future(execute(connection, statement))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            try:
                await Asyncio.through(Asyncio._stop(connection, task))
            finally:
                if (task.done() and not task.cancelled()
                        and not task.exception()):
                    late(task.result())
            raise

    @staticmethod
    async def _stop(connection: Any, task: asyncio.Task[Any]) -> None:
        if task.done():
            return
        request, until = cancel(connection), time.monotonic() + OBEY
        await asyncio.wait({task}, timeout=OBEY)
        # a request that arrives later would cancel the next statement
        while request.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if request.is_alive() or not task.done():
            cut(connection)
            await asyncio.wait({task}, timeout=OBEY)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            connection.pgconn.finish()  # also the program's own

    @staticmethod
    async def hold(mutex: asyncio.Lock, seconds: float) -> bool:
        # wait_for() may ignore a cancel
        task = asyncio.ensure_future(mutex.acquire())
        try:
            await asyncio.wait({task}, timeout=max(0, seconds))
        except asyncio.CancelledError:
            if not task.cancel():
                mutex.release()
            raise
        return task.done() or not task.cancel()

    @staticmethod
    async def through(coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs to the end, for at most UNDO seconds after a cancel."""
        task = asyncio.ensure_future(coroutine)
        broken: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task}, timeout=UNDO if broken else None)
                if broken and not task.done():
                    task.cancel()
            except asyncio.CancelledError as error:
                broken = error
        if broken is None:
            return task.result()
        if not task.cancelled():
            task.exception()
        raise broken

    @staticmethod
    async def readable(connection: Any, seconds: float) -> None:
        # a duplicate, because the loop has one reader for each file
        file = os.dup(connection.fileno())
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(file, ready.set)
        task = asyncio.ensure_future(ready.wait())
        try:
            await asyncio.wait({task}, timeout=max(0, seconds))
        finally:
            task.cancel()
            loop.remove_reader(file)
            os.close(file)

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, _: Any, error: BaseException | None,
                        *__: Any) -> None:
        await self._leave(error)


class both(Generic[P, T]):
    """A method written as a coroutine.  Tasks await the coroutine; for
    blocking callers, the method returns its result."""

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
        # mypy would ask for the arguments that the caller passes later
        function: Any = self.function
        method = partial(function, caller)
        if isinstance(caller, Blocking):
            return lambda *values, **named: run(method(*values, **named))
        return method
