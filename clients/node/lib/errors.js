// Errors, told apart by their SQLSTATE

/** An error of the server, with its code, detail and hint */
export class DlockError extends Error {
  constructor(message, code, { detail, hint, cause } = {}) {
    super(message, cause && { cause });
    Object.assign(this, { name: new.target.name, code, detail, hint });
  }
}

export class LockTimeout extends DlockError {}
export class Deadlock extends DlockError {}
export class LockLost extends DlockError {}
export class NotAllowed extends DlockError {}
export class NotPrimary extends DlockError {}
export class StaleVersion extends DlockError {}
export class BadArgument extends DlockError {}
export class WrongState extends DlockError {}
export class NoRoom extends DlockError {}
export class Cancelled extends DlockError {}
export class QuorumLate extends DlockError {}
export class ConnectionLost extends DlockError {}

const classes = {
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
};

// Errors of node-postgres without a code if a connection fails or cannot be made
const gone =
  /^(timeout (expired|exceeded when)|Connection terminated|Client (was closed|has encountered)|Cannot use a pool)/;

/**
 * Returns the error of this package for a driver's, which an ORM may have wrapped. Returns errors as they are if they
 * come neither from the server nor from the connection.
 */
export function translate(error) {
  for (let one = error; one; one = one.cause ?? one.parent ?? one.driverError ?? one.originalError) {
    if (one instanceof DlockError) return one;
    // a SQLSTATE, unless it is EPIPE
    if (one.severity && /^[0-9A-Z]{5}$/.test(one.code)) {
      const kind = classes[one.code] ?? (one.code.startsWith('08') ? ConnectionLost : DlockError);
      return new kind(one.message, one.code, { detail: one.detail, hint: one.hint, cause: error });
    }
    if (/^E[A-Z]/.test(one.code) && one.syscall || one instanceof AggregateError || gone.test(one.message))
      return new ConnectionLost(one.message || one.code, undefined, { cause: error });
  }
  return error;
}

export function cancelled(signal) {
  return new Cancelled('cancelled by the program', '57014', { cause: signal.reason });
}

/** May the server have executed the call that failed? `doubt`: was it ever sent without an answer? */
export const isUnsure = (error, doubt) => !(error instanceof DlockError) || doubt
  || [Cancelled, QuorumLate].some((kind) => error instanceof kind);
