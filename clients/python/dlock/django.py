"""dlock in Django: over its databases, and in its transactions"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from django.core.signals import request_finished  # type: ignore
from django.db import connections, transaction  # type: ignore

from .calls import Calls
from .errors import WrongState
from .locks import BaseLock
from .service import Locks
from .sources import DEFAULTS


@cache
def _connecting(using: str) -> Callable[[], Any]:
    def connect() -> Any:
        database = connections.create_connection(using)
        return database.get_new_connection(
            {**DEFAULTS, **database.get_connection_params()})
    return connect


def locks(using: str = 'default', *, patience: float = 30) -> Locks:
    """Locks over connections of their own, made with Django's parameters"""
    return Locks(_connecting(using), patience=patience)


def calls(using: str = 'default') -> Calls:
    """Calls over Django's connection, and in its transaction"""
    connection = connections[using]
    if not connection.in_atomic_block:
        raise WrongState('this is no transaction: use atomic()', '55000')
    return Calls(connection)


@contextmanager
def atomic(name: str, *, using: str = 'default', timeout: float | None = None,
           shared: bool | None = None, slots: int | None = None,
           permits: int | None = None,
           info: str | None = None) -> Iterator[int]:
    """transaction.atomic() with a lock, which the end of the outermost
    transaction releases; yields the fence."""
    with transaction.atomic(using=using):
        yield calls(using).xact_acquire(
            name, timeout=timeout, shared=shared, slots=slots,
            permits=permits, info=info)


def guard(lock: BaseLock, using: str = 'default') -> None:
    """The transaction can commit only while the lock is held."""
    calls(using).guard(lock)


@cache
def _releasing(using: str) -> Callable[..., None]:
    def release_all(**_: Any) -> None:
        connection = connections[using]
        if connection.connection is not None and connection.is_usable():
            with connection.cursor() as cursor:
                cursor.execute('SELECT dlock_release_all()')
    return release_all


def release_after_requests(using: str = 'default') -> None:
    """Releases the locks of the thread's session after each request.  For a
    database with CONN_MAX_AGE; call it in AppConfig.ready()."""
    request_finished.connect(_releasing(using))
