// Locks, leases, and elections

import { createHash, randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import {
  BadArgument, Cancelled, ConnectionLost, DlockError, LockLost, QuorumLate, WrongState, cancelled, translate,
} from './errors.js';
import { Heart, Kept, NONE, anew } from './heart.js';
import { Line, ask, call, close, connect, interval, now } from './wire.js';
import { Tickets, watch } from './tickets.js';

/** The service: one server, with all its hosts; or several, over which names are spread, each with a key of its own */
export class Locks {
  constructor(servers = {}, { keys, patience = 30000 } = {}) {
    this.servers = [servers].flat();
    this.keys = keys ?? this.servers;
    this.patience = patience;
    if (!this.servers.length || this.servers.length > 1 && (new Set(this.keys).size !== this.servers.length
        || this.keys.some((key) => typeof key !== 'string')))
      throw new BadArgument('each server needs a key of its own', '22023');
  }

  /** The server that has this name */
  server(name) {
    const weights = this.keys.map((key) => createHash('sha256').update(`${key}\0${name}`).digest());
    return this.servers[weights.reduce((best, weight, n) => (weight.compare(weights[best]) > 0 ? n : best), 0)];
  }

  line(name) {
    return new Line(this.server(name), this.patience);
  }

  lock(name, options) {
    return new Lock(this, name, options);
  }

  lease(options) {
    return new Lease(this, options);
  }

  election(name, options) {
    return new Election(this, name, options);
  }

  tickets(options) {
    return new Tickets(this, options);
  }

  watch(name, options) {
    return watch(this, name, options);
  }
}

// Milliseconds between renewals, and of a lease's time that are not used
function rhythm({ ttl = 0, interval = ttl / 3, margin = ttl / 100 }) {
  if (ttl && !(interval > 0 && margin >= 0 && interval + margin < ttl))
    throw new BadArgument('interval and margin have to be less than the ttl', '22023');
  return { interval, margin };
}

// Give back what a heart keeps, for as long as that is ours; throws LockLost if it was not.
async function giveBack(kept, line, statement, last) {
  const { heart } = kept;
  heart.leave(kept, last);
  if (last) heart.close(kept);
  try {
    kept.checkLost();
    const answer = line.ask(statement, { until: heart.deadline, signal: kept.lost });
    const loss = new Promise((_, reject) => kept.lost.addEventListener('abort', () => reject(kept.lost.reason)));
    const returned = await Promise.race([answer, loss]).catch((error) => {
      answer.catch(() => {});
      kept.checkLost();
      throw error;
    });
    if ((returned === null || returned === false) && !line.doubt) kept.lose('the server has ended it');
    kept.checkLost();
  } finally {
    kept.state = NONE;
    heart.remove(kept);
    if (last) heart.end();
    await line.close();
  }
}

// What has ended a block is not hidden by a loss.
async function runWith(kept, work, leave) {
  let result;
  try {
    result = await work(kept);
  } catch (error) {
    await leave().catch(() => {});
    throw error;
  }
  await leave();
  return result;
}

/** One heartbeat for any number of locks, all of them on one server: the one that has the name `near` */
export class Lease extends Kept {
  #line;
  #rhythm;

  constructor(locks, { ttl, near = '', delay, info, ...options }) {
    super();
    Object.assign(this, { locks, ttl, options: { delay: interval(delay), info } });
    this.server = locks.server(near);
    this.#line = this.line();
    this.#rhythm = rhythm({ ttl, ...options });
    this[anew]();
  }

  toString() {
    return `lease ${this.id}`;
  }

  line() {
    return new Line(this.server, this.locks.patience);
  }

  async open({ signal } = {}) {
    this.turn(NONE, 'asked for');
    this[anew]();
    try {
      // one whose answer is lost has no locks, and runs out
      this.id = await this.#line.ask(call('dlock_lease_open', [interval(this.ttl)], this.options), { signal });
      this.heart = new Heart(this.server, this.id, this.#line.sent, this.ttl, this.#rhythm);
      this.heart.add(this);
    } catch (error) {
      this.state = NONE;
      await this.#line.close();
      throw error;
    }
    this.state = 'held';
    return this;
  }

  /** All locks on it are lost. Where it is closed already, this does nothing. */
  async close() {
    if (this.state === NONE) return;
    this.turn('held', 'being released');
    await giveBack(this, this.#line, call('dlock_lease_close', [this.id]), true);
  }

  lock(name, options) {
    return new Lock(this, name, options);
  }

  /** Opens it, works, and closes it. */
  async run(work) {
    await this.open();
    return runWith(this, work, () => this.close());
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }
}

// Who is to be told of a connection's end
const ends = new WeakMap();

function watchEnd(client) {
  if (!ends.has(client)) {
    ends.set(client, new Set());
    client.once('end', () => ends.get(client).forEach((tell) => tell()));
  }
  return ends.get(client);
}

/** A lock, for a block of the program: of Locks, of a connection of the program's, or of a Lease */
export class Lock extends Kept {
  #line;
  #rhythm;
  #ended = () => this.lose('its connection is gone');

  constructor(source, name, { scope, ttl, timeout, shared, slots, permits, info, owner, ...options } = {}) {
    super();
    const own = source instanceof Locks;
    const leased = source instanceof Lease || ttl != null;
    scope ??= leased ? 'lease' : 'session';
    // a pool gives any connection to each query
    const given = typeof source?.query === 'function' && !('idleCount' in source);
    if (!(own || given || source instanceof Lease) || leased !== (scope === 'lease') || (ttl != null && !own)
        || (own && scope === 'transaction') || !['session', 'transaction', 'lease'].includes(scope))
      throw new BadArgument(`no lock in ${scope} scope of this`, '22023');
    this.#rhythm = rhythm({ ttl, ...options });
    this.#line = own ? source.line(name) : leased ? source.line() : new Line(undefined, 0, source);
    Object.assign(this, { source, name, scope, ttl, timeout, owner: owner ?? (leased ? randomUUID() : undefined) });
    this.options = { shared, slots, permits, owner: this.owner, info };
    this.owned = owner !== undefined;
    this[anew]();
  }

  toString() {
    return `lock "${this.name}"`;
  }

  get held() {
    return this.state === 'held';
  }

  /** Waits its turn, and returns this. */
  async acquire({ signal } = {}) {
    this.turn(NONE, 'asked for');
    this.fence = undefined;
    this[anew]();
    try {
      await (this.scope === 'lease' ? this.#acquireForLease(signal) : this.#acquireHere(signal));
      if (signal?.aborted) throw cancelled(signal);
    } catch (error) {
      await this.#undo(error);
      this.state = NONE;
      throw error;
    }
    this.state = 'held';
    return this;
  }

  // With the time that is left, should it be asked again
  #request(name, ...values) {
    const until = now() + (this.timeout ?? Infinity);
    return () => call(name, [this.name, ...values],
      { ...this.options, timeout: interval(Math.max(0, until - now())) });
  }

  async #acquireHere(signal) {
    const request = this.#request(this.scope === 'session' ? 'dlock_acquire' : 'dlock_xact_acquire');
    this.fence = await this.#line.ask(request, { signal });
    watchEnd(this.#line.client).add(this.#ended);
  }

  async #acquireForLease(signal) {
    const line = this.#line;
    if (this.source instanceof Lease) {
      const { source } = this;
      if (source.locks.server(this.name) !== source.server)
        throw new BadArgument(`${this} is not on the server of ${source}`, '22023');
      source.check();
      this.fence = await line.ask(this.#request('dlock_lease_acquire', source.id), { signal });
      this.heart = source.heart;
      this.heart.add(this, { name: this.name, fence: this.fence });
      source.check();
      await line.close(); // a lease may have many
      return;
    }
    this.fence = await line.ask(this.#request('dlock_ttl_acquire', interval(this.ttl)), { signal });
    // It may have waited for long; renewed, we know until when it is ours.
    const until = now() + this.ttl;
    let kept;
    while (kept === undefined)
      try {
        kept = await line.ask(call('dlock_renew', [this.fence]), { until, signal });
      } catch (error) {
        if (!(error instanceof QuorumLate) || now() >= until) throw error;
        await sleep(100);
      }
    const { sent } = line;
    let ttl = kept === null ? undefined : this.ttl;
    if (ttl && this.owned) {
      // the ttl of the same request is the one that came first
      const first = await line.ask(
        ['SELECT extract(epoch FROM ttl)::float8 FROM dlock_leases WHERE lease = $1', [this.fence]], { until, signal });
      ttl = first && Math.min(ttl, first * 1000);
    }
    if (!ttl) {
      this.lose('the server has ended its lease at once');
      this.checkLost();
    }
    const part = ttl / this.ttl;
    this.heart = new Heart(line.config, this.fence, sent, ttl,
      { interval: this.#rhythm.interval * part, margin: this.#rhythm.margin * part });
    this.heart.add(this);
  }

  // What was broken off may have been done, and is taken back.
  async #undo(error) {
    const line = this.#line;
    this.heart?.remove(this);
    if (this.scope === 'lease') {
      if (!(this.source instanceof Lease)) this.heart?.end();
      await line.close();
      if (!(error instanceof DlockError)
          || [LockLost, QuorumLate, Cancelled, ConnectionLost].some((kind) => error instanceof kind))
        await this.#releaseByOwner().catch(() => {}); // it runs out, then
    } else {
      if (line.client) watchEnd(line.client).delete(this.#ended);
      if (line.given && this.scope === 'session' && this.fence)
        await ask(line.client, call('dlock_release_ticket', [this.fence])).catch(() => {});
      await line.close();
    }
  }

  async #releaseByOwner() {
    const client = await connect(this.#line.config, 'dlock');
    try {
      await ask(client, [
        'SELECT count(dlock_release_ticket(ticket)) FROM dlock_locks($1)'
        + " WHERE owner = $2 AND scope = 'lease' AND role = current_user", [this.name, this.owner]], { limit: 10000 });
    } finally {
      await close(client);
    }
  }

  async release() {
    this.turn('held', 'being released');
    const line = this.#line;
    const release = call('dlock_release_ticket', [this.fence]);
    if (this.scope === 'lease') return giveBack(this, line, release, !(this.source instanceof Lease));
    watchEnd(line.client).delete(this.#ended);
    try {
      if (this.scope === 'transaction') return; // whose end it waits for
      if (!this.lost.aborted && !(await ask(line.client, release))) this.lose('the server has ended its ticket');
    } catch (error) {
      if (!(error instanceof ConnectionLost)) throw error;
      this.#ended();
    } finally {
      this.state = NONE;
      await line.close();
    }
    this.checkLost();
  }

  /** The transaction of this connection commits only while we hold. */
  async guard(client) {
    await ask(client, call('dlock_guard', [this.name, this.fence]));
  }

  /** Acquires it, works, and releases it. */
  async run(work, options) {
    await this.acquire(options);
    return runWith(this, work, () => this.release());
  }

  async [Symbol.asyncDispose]() {
    if (this.held) await this.release();
  }
}

/** Runs work while this process leads, and campaigns again after a loss. */
export class Election {
  #lock;

  constructor(locks, name, { ttl = 15000, ...options } = {}) {
    this.#lock = locks.lock(name, { ttl, ...options });
  }

  /** What work returns that was done to its end while we lead; it heeds `lock.lost`, an AbortSignal. */
  async run(work, { signal } = {}) {
    const lock = this.#lock;
    for (;;)
      try {
        return await lock.run(work, { signal });
      } catch (error) {
        // how the work has ended where it was told, or that it was lost behind its end
        const told = error instanceof LockLost || error?.name === 'AbortError';
        if (!lock.lost.aborted || !told) throw error;
      }
  }
}

/** What a pool calls when a connection comes back */
export async function reset(client) {
  try {
    await client.query('ROLLBACK');
    await client.query('SELECT dlock_release_all()');
  } catch (error) {
    throw translate(error);
  }
}
