"""Errors, told apart by their SQLSTATE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


class Error(Exception):
    """What the server refused, with its code, detail and hint."""

    def __init__(self, message: str, sqlstate: str | None = None,
                 detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.detail = detail
        self.hint = hint


class LockTimeout(Error):
    """The timeout has passed, or a try found the lock busy."""


class Deadlock(Error):
    """Give back what is held, and begin anew."""


class LockLost(Error):
    """The lock, ticket or lease is gone, and others may have held the lock."""


class NotAllowed(Error):
    """The name is another role's, or the function an administrator's."""


class NotPrimary(Error):
    """The server is a standby."""


class StaleVersion(Error):
    """Somebody else was faster: read again, and begin anew."""


class BadArgument(Error):
    """A value that never will do."""


class WrongState(Error):
    """Another number of slots, a refused upgrade."""


class NoRoom(Error):
    """No memory for more locks, or no slot for the worker."""


class Cancelled(Error):
    """The statement was cancelled; its request is gone."""


class QuorumLate(Error):
    """Standbys do not answer; a renewal says nothing then."""


class ConnectionLost(Error):
    """No server, or no more; what was asked last may have been done."""


CLASSES: dict[str, type[Error]] = {
    '55P03': LockTimeout,
    '40P01': Deadlock,
    '55L01': LockLost,
    '42501': NotAllowed,
    '25006': NotPrimary,
    '40001': StaleVersion,
    '22023': BadArgument,
    '22004': BadArgument,
    '55000': WrongState,
    '53200': NoRoom,
    '53400': NoRoom,
    '57014': Cancelled,
    '58030': QuorumLate,
    '57P01': ConnectionLost,
    '57P02': ConnectionLost,
    '57P03': ConnectionLost,
}


def translate(error: psycopg.Error) -> Error:
    code = error.sqlstate
    kind = CLASSES.get(code or '', Error)
    if (code or '08').startswith('08') and isinstance(
            error, (psycopg.OperationalError, psycopg.InterfaceError)):
        kind = ConnectionLost
    return kind(error.diag.message_primary or str(error), code,
                error.diag.message_detail, error.diag.message_hint)


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error
