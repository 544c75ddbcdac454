// Locks of dlock, the lock service inside PostgreSQL

export {
  BadArgument, Cancelled, ConnectionLost, Deadlock, DlockError, LockLost, LockTimeout, NoRoom, NotAllowed, NotPrimary,
  QuorumLate, StaleVersion, WrongState, translate,
} from './errors.js';
export { Calls } from './calls.js';
export { Election, Lease, Lock, Locks, reset } from './locks.js';
export { Tickets, watch } from './tickets.js';
export { now } from './wire.js';
