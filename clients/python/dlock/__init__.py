"""Locks of dlock, the lock service inside PostgreSQL."""

import logging

from .calls import AsyncCalls, Calls
from .errors import (
    BadArgument, Cancelled, ConnectionLost, Deadlock, Error, LockLost,
    LockTimeout, NoRoom, NotAllowed, NotPrimary, QuorumLate, StaleVersion,
    WrongState, translate, translated)
from .heart import AsyncLost, Lost
from .locks import AsyncLease, AsyncLock, Lease, Lock, async_reset, reset
from .observe import Observation, logged
from .service import AsyncElection, AsyncLocks, Election, Locks
from .tickets import AsyncTickets, Event, Tickets, async_watch, watch

__all__ = [
    'AsyncCalls', 'AsyncElection', 'AsyncLease', 'AsyncLock', 'AsyncLocks',
    'AsyncLost', 'AsyncTickets', 'BadArgument', 'Calls', 'Cancelled',
    'ConnectionLost', 'Deadlock', 'Election', 'Error', 'Event', 'Lease',
    'Lock', 'LockLost', 'LockTimeout', 'Locks', 'Lost', 'NoRoom', 'NotAllowed',
    'NotPrimary', 'Observation', 'QuorumLate', 'StaleVersion', 'Tickets',
    'WrongState', 'async_reset', 'async_watch', 'logged', 'reset', 'translate',
    'translated', 'watch']

logging.getLogger('dlock').addHandler(logging.NullHandler())
