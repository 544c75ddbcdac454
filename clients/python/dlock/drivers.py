"""Connections of psycopg2, with the methods of psycopg 3"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from .errors import WrongState


class Psycopg2:
    """A blocking connection.  An exception of a signal handler is raised only
    after the answer."""

    prepare_threshold = None

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._cursor = import_module('psycopg2.extensions').cursor
        self._handlers: list[Callable[[Any], None]] = []
        self.fileno, self.close, self.cancel, self.rollback = (
            raw.fileno, raw.close, raw.cancel, raw.rollback)

    @staticmethod
    def of(connection: Any) -> Any:
        """Wraps a connection of psycopg2; returns others as they are."""
        if any(f'{kind.__module__}.{kind.__name__}'
               == 'psycopg2.extensions.connection'
               for kind in type(connection).__mro__):
            return Psycopg2(connection)
        return connection

    @property
    def closed(self) -> bool:
        return bool(self.raw.closed)

    @property
    def autocommit(self) -> bool:
        return bool(self.raw.autocommit)

    @autocommit.setter
    def autocommit(self, on: bool) -> None:
        self.raw.autocommit = on

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Any:
        # a plain cursor, even if the program has set another kind
        cursor = self.raw.cursor(cursor_factory=self._cursor)
        cursor.execute(sql, values)
        if self._handlers:
            while self.raw.notifies:
                said = self.raw.notifies.pop(0)
                for handler in self._handlers:
                    handler(SimpleNamespace(
                        channel=said.channel, payload=said.payload))
        return cursor

    def add_notify_handler(self, handler: Callable[[Any], None]) -> None:
        self._handlers.append(handler)

    def remove_notify_handler(self, handler: Callable[[Any], None]) -> None:
        self._handlers.remove(handler)


def check_transaction(db: Any) -> None:
    """Raises WrongState if this is known to be outside of any transaction."""
    if _lacks_transaction(db):
        raise WrongState('there is no open transaction', '55000')


def _lacks_transaction(db: Any) -> bool:
    """Is this known to be outside of any transaction?"""
    if isinstance(db, Psycopg2) or hasattr(db, 'pgconn'):
        return is_idle(db)
    if hasattr(db, 'is_in_transaction'):    # asyncpg
        return not db.is_in_transaction()
    if hasattr(db, 'fetchrow') and hasattr(db, 'acquire'):  # its pool
        return True
    status = getattr(db, 'get_transaction_status', None)    # psycopg2
    return status is not None and status() == 0


def is_idle(connection: Any) -> bool:
    """Is it outside of any transaction?"""
    if connection.closed:
        return False
    if isinstance(connection, Psycopg2):
        return bool(connection.raw.get_transaction_status() == 0)
    return bool(connection.pgconn.transaction_status == 0)
