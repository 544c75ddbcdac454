"""Locks of dlock, the lock service inside PostgreSQL."""

from .errors import (
    BadArgument, Cancelled, ConnectionLost, Deadlock, Error, LockLost,
    LockTimeout, NoRoom, NotAllowed, NotPrimary, QuorumLate, StaleVersion,
    WrongState, translated)
from .heart import AsyncLost, Lost
from .locks import (
    AsyncElection, AsyncLease, AsyncLock, AsyncLocks, Election, Lease, Lock,
    Locks, async_reset, reset)
from .tickets import AsyncTickets, Event, Tickets, async_watch, watch

__all__ = [
    'AsyncElection', 'AsyncLease', 'AsyncLock', 'AsyncLocks', 'AsyncLost',
    'AsyncTickets', 'BadArgument', 'Cancelled', 'ConnectionLost', 'Deadlock',
    'Election', 'Error', 'Event', 'Lease', 'Lock', 'LockLost', 'LockTimeout',
    'Locks', 'Lost', 'NoRoom', 'NotAllowed', 'NotPrimary', 'QuorumLate',
    'StaleVersion', 'Tickets', 'WrongState', 'async_reset', 'async_watch',
    'reset', 'translated', 'watch']
