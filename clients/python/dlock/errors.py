"""Errors, told apart by their SQLSTATE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Error(Exception):
    """An error of the server, with its code, detail and hint."""

    kinds: dict[str, type[Error]] = {}
    doubt = False   # may an earlier attempt have been executed?

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
    """A deadlock: release all locks, and retry."""


class LockLost(Error, codes='55L01'):
    """The lock, ticket or lease is lost; others may have held the lock."""


class NotAllowed(Error, codes='42501'):
    """The name is another role's, or the function is for administrators."""


class NotPrimary(Error, codes='25006'):
    """The server is a standby."""


class StaleVersion(Error, codes='40001'):
    """Another transaction was faster: read again, and retry."""


class BadArgument(Error, codes='22023 22004'):
    """A value that is never valid."""


class WrongState(Error, codes='55000'):
    """A wrong state for this: not held, other slots, a refused upgrade."""


class NoRoom(Error, codes='53200 53400'):
    """No memory for more locks, or no slot for the worker."""


class Cancelled(Error, codes='57014'):
    """The statement was cancelled; its request has left the queue."""


class QuorumLate(Error, codes='58030'):
    """Standbys do not answer; a lease is not lost by this."""


class ConnectionLost(Error, codes='57P01 57P02 57P03'):
    """No server; the last request may have been executed."""


DRIVERS = {'psycopg', 'psycopg_pool', 'psycopg2', 'asyncpg', 'sqlalchemy'}
# Drivers' errors without a code if a connection fails or cannot be made
GONE = {'OperationalError', 'InterfaceError', 'TimeoutError'}


def translate(error: BaseException) -> Error | None:
    """The error of this package for a driver's, which SQLAlchemy or Django may
    have wrapped; None for other errors."""
    one: BaseException | None = error
    innermost = None
    while one is not None and not isinstance(one, Error):
        if isinstance(code := _code(one), str):
            return _translated(one, code, Error.kinds.get(code) or (
                ConnectionLost if code.startswith('08') else Error))
        if type(one).__module__.split('.')[0] in DRIVERS:
            innermost = one
        one = getattr(one, 'orig', None) or one.__cause__
    if one is None and innermost is not None:
        names = {kind.__name__ for kind in type(innermost).__mro__}
        gone = names & GONE or type(innermost).__name__ == 'DatabaseError'
        return _translated(innermost, None, ConnectionLost if gone else Error)
    return one


def _code(error: BaseException) -> Any:
    return getattr(error, 'sqlstate', None) or getattr(error, 'pgcode', None)


def _translated(error: BaseException, code: str | None,
                kind: type[Error]) -> Error:
    # asyncpg's errors have no `diag`, but the same fields
    diag = getattr(error, 'diag', None)
    return kind(getattr(diag, 'message_primary', None) or str(error), code,
                getattr(diag or error, 'message_detail', None)
                or getattr(error, 'detail', None),
                getattr(diag or error, 'message_hint', None)
                or getattr(error, 'hint', None))


@contextmanager
def translated() -> Iterator[None]:
    """For the program's own statements: raises errors of this package."""
    try:
        yield
    except Exception as error:
        known = translate(error)
        if known is None or known is error:
            raise
        raise known from error
