"""The functions of dlock, over any connection or function that executes SQL"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import isawaitable
from itertools import count
from typing import Any

import psycopg

from .callers import Asyncio, Blocking, Caller, Statement, both, execute, settle
from .drivers import Psycopg2, check_transaction
from .errors import BadArgument, LockLost, translated
from .lines import call, delta


def _value(row: Any) -> Any:
    values = tuple(row.values() if isinstance(row, Mapping) else row or [None])
    return values[0] if len(values) == 1 else values


def _numbered(sql: str, mark: str) -> str:
    parts = sql.split('%s')
    numbers = count(1)
    return ''.join(f'{part}{mark}{next(numbers)}'
                   for part in parts[:-1]) + parts[-1]


class Executor:
    """Executes statements with the program's own library.  `_send` returns the
    value or the row, or an awaitable."""

    def __init__(self, db: Any) -> None:
        self.db = db
        modules = {kind.__module__.split('.')[0] for kind in type(db).__mro__}
        self._send: Callable[[str, tuple[Any, ...]], Any]
        if isinstance(db, (psycopg.Cursor, psycopg.AsyncCursor)):
            self.db, self._send = db.connection, self._own
        elif isinstance(db, (psycopg.Connection, psycopg.AsyncConnection,
                             Psycopg2)):
            self._send = self._own
        elif callable(getattr(db, 'fetchrow', None)):
            self._send = self._asyncpg
        elif 'sqlalchemy' in modules and hasattr(db, 'execute'):
            self._send = self._sqlalchemy
        elif callable(getattr(db, 'cursor', None)):
            self._send = self._dbapi
        elif hasattr(db, 'execute') and hasattr(db, 'fetchone'):
            self._send = self._cursor
        elif callable(db):
            self._send = self._function
        else:
            raise BadArgument(
                f'a {type(db).__name__} does not execute SQL', '22023')

    async def ask(self, statement: Statement) -> Any:
        with translated():
            return await settle(self._send(*statement))

    async def ask_to_last(self, statement: Statement) -> Any:
        """For what lasts until the end of the transaction"""
        answer = await self.ask(statement)
        check_transaction(self.db)
        return answer

    def _own(self, sql: str, values: tuple[Any, ...]) -> Any:
        return execute(self.db, (sql, values))

    async def _asyncpg(self, sql: str, values: tuple[Any, ...]) -> Any:
        return _value(await self.db.fetchrow(_numbered(sql, '$'), *values))

    async def _sqlalchemy(self, sql: str, values: tuple[Any, ...]) -> Any:
        text = import_module('sqlalchemy').text
        result = await settle(self.db.execute(
            text(_numbered(sql, ':v')),
            {f'v{n}': value for n, value in enumerate(values, 1)}))
        return _value(result.fetchone())

    def _dbapi(self, sql: str, values: tuple[Any, ...]) -> Any:
        cursor = self.db.cursor()
        try:
            cursor.execute(sql, values)
            return _value(cursor.fetchone())
        finally:
            cursor.close()

    def _cursor(self, sql: str, values: tuple[Any, ...]) -> Any:
        self.db.execute(sql, values)
        return _value(self.db.fetchone())

    async def _function(self, sql: str, values: tuple[Any, ...]) -> Any:
        """Calls a function of the program with the statement, which has a %s
        for each value, and the values.  It returns the value or the row."""
        row = self.db(sql, values)
        if isawaitable(row):
            row = await row
        plain = isinstance(row, (str, int, float, type(None)))
        return row if plain else _value(row)


class BaseCalls(Caller):
    """Each method calls the function of its name, prefixed with dlock_, in the
    program's transaction.  Timeouts are in seconds; None waits without limit,
    and 0 tries once."""

    def __init__(self, db: Any) -> None:
        """A connection, cursor or session of psycopg, psycopg2, asyncpg,
        SQLAlchemy or Django, or a function of a statement and its values"""
        self._executor = Executor(db)

    async def _ask(self, function: str, *values: Any, **named: Any) -> Any:
        return await self._executor.ask(call(function, *values, **named))

    async def _ask_to_last(
            self, function: str, *values: Any, **named: Any) -> Any:
        return await self._executor.ask_to_last(
            call(function, *values, **named))

    @both
    async def xact_acquire(
            self, name: str, *, timeout: float | None = None,
            shared: bool | None = None, slots: int | None = None,
            permits: int | None = None, info: str | None = None) -> int:
        """Holds until the transaction ends; returns the fence."""
        return int(await self._ask_to_last(
            'dlock_xact_acquire', name, timeout=delta(timeout), shared=shared,
            slots=slots, permits=permits, info=info))

    @both
    async def xact_acquire_all(
            self, names: Sequence[str], *, timeout: float | None = None,
            shared: bool | None = None, info: str | None = None) -> list[int]:
        """Acquires all or none, in an order that prevents deadlocks"""
        return list(await self._ask_to_last(
            'dlock_xact_acquire_all', list(names), timeout=delta(timeout),
            shared=shared, info=info))

    @both
    async def acquire_all(
            self, names: Sequence[str], *, timeout: float | None = None,
            shared: bool | None = None, info: str | None = None) -> list[int]:
        """Acquires in session scope, on a connection that the program keeps."""
        return list(await self._ask(
            'dlock_acquire_all', list(names), timeout=delta(timeout),
            shared=shared, info=info))

    @both
    async def release_ticket(self, ticket: int) -> None:
        if not await self._ask('dlock_release_ticket', ticket):
            raise LockLost(f'ticket {ticket} was lost', '55L01')

    @both
    async def release_at_commit(self, ticket: int) -> None:
        await self._ask('dlock_release_at_commit', ticket)

    @both
    async def guard(self, lock: Any, fence: int | None = None) -> None:
        """The transaction can commit only while this lock, or the lock of this
        name and fence, is held."""
        name = lock if isinstance(lock, str) else lock.name
        await self._ask_to_last(
            'dlock_guard', name, fence if isinstance(lock, str) else lock.fence)

    @both
    async def is_held(self, name: str, lease: int | None = None) -> bool:
        return bool(await self._ask('dlock_is_held', name, lease=lease))

    @both
    async def renew(self, id: int, ttl: float | None = None) -> int | None:
        """Returns the number of the lease's tickets; None if it has ended"""
        kept: int | None = await self._ask('dlock_renew', id, ttl=delta(ttl))
        return kept

    @both
    async def downgrade(self, ticket: int) -> bool:
        return bool(await self._ask('dlock_downgrade', ticket))

    @both
    async def set_info(self, id: int, info: str | None) -> bool:
        return bool(await self._ask('dlock_set_info', id, info))

    @both
    async def resize(self, name: str, slots: int | None) -> None:
        """dlock_set_slots: the number of permits, which replaces the number in
        requests; None restores that number"""
        await self._ask('dlock_set_slots', name, slots)


class Calls(BaseCalls, Blocking):
    pass


class AsyncCalls(BaseCalls, Asyncio):
    pass
