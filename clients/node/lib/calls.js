// The functions of dlock, over any connection or function that executes SQL

import { BadArgument, LockLost, WrongState, translate } from './errors.js';
import { checkTtl, interval } from './wire.js';

const TYPES = {
  timeout: 'interval', ttl: 'interval', shared: 'boolean', slots: 'integer', permits: 'integer', info: 'text',
  lease: 'bigint',
};
const NAME = 'text';
const NAMES = 'text[]';
const ID = 'bigint';

// Returns the value of the first row, whatever form the result has.
function valueOf(result) {
  let rows = result?.rows ?? result;
  if (Array.isArray(rows?.[0])) [rows] = rows;
  const row = Array.isArray(rows) ? rows[0] : rows;
  return row !== null && typeof row === 'object' ? Object.values(row)[0] : row;
}

function executor(db) {
  if (typeof db?.unsafe === 'function') return (text, values) => db.unsafe(text, values); // postgres.js
  if (typeof db?.$queryRawUnsafe === 'function') // Prisma
    return (text, values) => db.$queryRawUnsafe(text, ...values);
  if (typeof db?.raw === 'function') return (text, values) => db.raw(text.replace(/\$\d+/g, '?'), values); // Knex
  // not a pool, which executes each query over any connection
  if (typeof db?.query === 'function' && !('idleCount' in db)) return (text, values) => db.query(text, values);
  if (typeof db === 'function') return db;
  throw new BadArgument('this does not execute SQL, or not over one connection', '22023');
}

// Is this known to execute each statement in a transaction of its own?
function isRoot(db) {
  if (typeof db.unsafe === 'function') return typeof db.begin === 'function'; // postgres.js
  if (typeof db.$queryRawUnsafe === 'function') return typeof db.$connect === 'function'; // Prisma
  return typeof db.raw === 'function' && !db.isTransaction; // Knex
}

// Connections of node-postgres, and whether the server was in a transaction after the latest statement
const statuses = new WeakMap();

/** Requests what lasts until the end of the transaction. */
export async function inTransaction(db, request) {
  const refusal = () => new WrongState('there is no open transaction', '55000');
  if (isRoot(db)) throw refusal();
  const connection = typeof db.escapeIdentifier === 'function' ? db.connection : undefined;
  if (connection?.on && !statuses.has(connection)) {
    statuses.set(connection, undefined);
    connection.on('readyForQuery', ({ status }) => statuses.set(connection, status));
  }
  const answer = await request();
  if (statuses.get(connection) === 'I') throw refusal();
  return answer;
}

const arrayOf = (names) => `{${names.map((name) => `"${`${name}`.replace(/["\\]/g, '\\$&')}"`)}}`;
const numbers = (text) => text.slice(1, -1).split(',').filter(Boolean).map(Number);

/**
 * Each method calls the function of its name, prefixed with dlock_, in the program's transaction: over a connection of
 * node-postgres, Knex, Prisma, TypeORM or postgres.js, or by a function that gets a statement and its values.
 */
export class Calls {
  #db;
  #execute;

  constructor(db) {
    this.#db = db;
    this.#execute = executor(db);
  }

  // Values and results are text, because libraries differ in other types.
  async #ask(name, values, { timeout, ttl, ...rest } = {}) {
    const named = Object.entries({ timeout: interval(timeout), ttl: interval(ttl), ...rest })
      .filter(([, value]) => value != null);
    const places = [
      ...values.map(([, type], n) => `$${n + 1}::text::${type}`),
      ...named.map(([key], n) => `${key} => $${values.length + n + 1}::text::${TYPES[key]}`)];
    const given = [...values.map(([value]) => value), ...named.map(([, value]) => value)];
    return this.#run(`dlock_${name}(${places})`, given);
  }

  async #run(expression, values) {
    try {
      return valueOf(await this.#execute(
        `SELECT ${expression}::text AS value`, values.map((value) => (value == null ? null : `${value}`))));
    } catch (error) {
      throw translate(error);
    }
  }

  /** Executes a statement that returns a boolean. */
  async send([text, values]) {
    const typed = text.replace(/^SELECT /, '').replace(/\$(\d+)/g,
      (place, n) => `${place}::text::${typeof values[n - 1] === 'number' ? ID : NAME}`);
    return (await this.#run(typed, values)) === 'true';
  }

  /** Acquires a lock until the transaction ends; returns the fence. */
  async xactAcquire(name, { timeout, shared, slots, permits, info } = {}) {
    const options = { timeout, shared, slots, permits, info };
    return Number(await inTransaction(this.#db, () => this.#ask('xact_acquire', [[name, NAME]], options)));
  }

  /** Acquires all or none, in an order that prevents deadlocks. */
  async xactAcquireAll(names, { timeout, shared, info } = {}) {
    const options = { timeout, shared, info };
    return numbers(await inTransaction(this.#db,
      () => this.#ask('xact_acquire_all', [[arrayOf(names), NAMES]], options)));
  }

  /** Acquires in session scope, on a connection that the program keeps. */
  async acquireAll(names, { timeout, shared, info } = {}) {
    return numbers(await this.#ask('acquire_all', [[arrayOf(names), NAMES]], { timeout, shared, info }));
  }

  async releaseTicket(ticket) {
    if ((await this.#ask('release_ticket', [[ticket, ID]])) !== 'true')
      throw new LockLost(`ticket ${ticket} was lost`, '55L01');
  }

  async releaseAtCommit(ticket) {
    await this.#ask('release_at_commit', [[ticket, ID]]);
  }

  /** The transaction can commit only while this lock, or the lock of this name and fence, is held. */
  async guard(lock, fence) {
    const [name, number] = typeof lock === 'string' ? [lock, fence] : [lock.name, lock.fence];
    await inTransaction(this.#db, () => this.#ask('guard', [[name, NAME], [number, ID]]));
  }

  async isHeld(name, lease) {
    return (await this.#ask('is_held', [[name, NAME]], { lease })) === 'true';
  }

  /** Returns the number of the lease's tickets; undefined if the lease has ended */
  async renew(id, ttl) {
    checkTtl(ttl);
    const kept = await this.#ask('renew', [[id, ID]], { ttl });
    return kept === null ? undefined : Number(kept);
  }

  async downgrade(ticket) {
    return (await this.#ask('downgrade', [[ticket, ID]])) === 'true';
  }

  async setInfo(id, info) {
    return (await this.#ask('set_info', [[id, ID], [info, NAME]])) === 'true';
  }

  /** Sets the number of permits, which replaces the number in requests; null restores that number. */
  async resize(name, slots) {
    await this.#ask('set_slots', [[name, NAME], [slots, 'integer']]);
  }
}
