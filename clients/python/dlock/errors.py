"""Errors, told apart by their SQLSTATE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


class Error(Exception):
    """What the server refused, with its code, detail and hint."""

    kinds: dict[str, type[Error]] = {}

    def __init_subclass__(cls, codes: str = '') -> None:
        cls.kinds.update(dict.fromkeys(codes.split(), cls))

    def __init__(self, message: str, sqlstate: str | None = None,
                 detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.detail = detail
        self.hint = hint


class LockTimeout(Error, codes='55P03'):
    """The timeout has passed, or a try found the lock busy."""


class Deadlock(Error, codes='40P01'):
    """Give back what is held, and begin anew."""


class LockLost(Error, codes='55L01'):
    """The lock, ticket or lease is gone, and others may have held the lock."""


class NotAllowed(Error, codes='42501'):
    """The name is another role's, or the function an administrator's."""


class NotPrimary(Error, codes='25006'):
    """The server is a standby."""


class StaleVersion(Error, codes='40001'):
    """Somebody else was faster: read again, and begin anew."""


class BadArgument(Error, codes='22023 22004'):
    """A value that never will do."""


class WrongState(Error, codes='55000'):
    """Another number of slots, a refused upgrade."""


class NoRoom(Error, codes='53200 53400'):
    """No memory for more locks, or no slot for the worker."""


class Cancelled(Error, codes='57014'):
    """The statement was cancelled; its request is gone."""


class QuorumLate(Error, codes='58030'):
    """Standbys do not answer; a renewal says nothing then."""


class ConnectionLost(Error, codes='57P01 57P02 57P03'):
    """No server, or no more; what was asked last may have been done."""


def translate(error: psycopg.Error) -> Error:
    code = error.sqlstate
    kind = Error.kinds.get(code or '', Error)
    if (code or '08').startswith('08') and isinstance(
            error, (psycopg.OperationalError, psycopg.InterfaceError)):
        kind = ConnectionLost
    return kind(error.diag.message_primary or str(error), code,
                error.diag.message_detail, error.diag.message_hint)


@contextmanager
def translated() -> Iterator[None]:
    """For the program's own statements: psycopg's errors become these."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error
