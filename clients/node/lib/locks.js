// Locks, leases, and elections

import { createHash, randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import {
  BadArgument, ConnectionLost, LockLost, LockTimeout, NotPrimary, WrongState, cancelled, isUnsure, translate,
} from './errors.js';
import { Calls, inTransaction } from './calls.js';
import { Heart, Kept, NONE, anew, isOwed, owe, owed, paid, takeBack, warn } from './heart.js';
import { isSource } from './source.js';
import { GRACE, Line, UNDO, ask, call, cut, interval, now, pauses } from './wire.js';
import { Tickets, watch } from './tickets.js';

/**
 * The service: one server with all its hosts, or a pool or a function that returns connections to the server; or
 * several servers, each with its key, over which names are spread. The observer is called for each wait, hold and loss.
 */
export class Locks {
  constructor(servers = {}, { keys, patience = 30000, observer } = {}) {
    this.servers = [servers].flat();
    if (!this.servers.every(isSource)) throw new BadArgument('a server is a URL, a pool or a function', '22023');
    this.keys = keys ?? this.servers;
    Object.assign(this, { patience, observer });
    if (!this.servers.length || this.servers.length > 1 && (new Set(this.keys).size !== this.servers.length
        || this.keys.some((key) => typeof key !== 'string')))
      throw new BadArgument('each server needs a key of its own', '22023');
  }

  /** The server that this name belongs to */
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

  /** Returns a function that does its work while it holds a lock. The name may depend on its arguments. */
  locked(name, work, options) {
    return (...values) => this.lock(typeof name === 'function' ? name(...values) : name, options)
      .run(() => work(...values));
  }

  /** Sets the number of permits of a lock, which replaces the number in requests; null restores that number. */
  async resize(name, slots) {
    const line = this.line(name);
    try {
      await line.ask(call('dlock_set_slots', [name, slots]));
    } finally {
      await line.close();
    }
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

// Milliseconds between renewals, and the part of a lease's ttl that is not used
function rhythm({ ttl = 0, interval = ttl / 3, margin = ttl / 100 }) {
  if (!Number.isFinite(ttl ?? 0)) throw new BadArgument('a ttl is a finite number', '22023');
  if (ttl && !(interval > 0 && margin >= 0 && interval + margin < ttl))
    throw new BadArgument('interval and margin have to be less than the ttl', '22023');
  return { interval, margin };
}

// Releases a hold of a heart; throws LockLost if it was lost.
async function giveBack(kept, line, statement, last, debt) {
  const { heart } = kept;
  const held = !kept.lost.aborted;
  heart.remove(kept, last);
  try {
    if (held) {
      const returned = await line.ask(statement, { until: heart.deadline });
      const repeated = line.doubt || debt && !isOwed(debt); // or the owner's next request has released it
      if (debt) paid(debt);
      if ((returned === null || returned === false) && !repeated) kept.lose('the server has ended it');
    }
  } catch (error) {
    if (debt && error.doubt === false) paid(debt); // it was answered, or not sent
    if (!isAway(error) || now() < heart.deadline) throw error;
    kept.lose(`there is no connection: ${error.message}`);
  }
  kept.checkLost();
}

const isAway = (error) => error instanceof ConnectionLost || error instanceof NotPrimary;

// An error that has ended a block takes precedence over a loss.
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
  #line; // for all calls of this opening that need not wait, one at a time
  #tail = Promise.resolve();
  #moved = 0; // when a call last finished with the connection
  #opening; // the promise of the last open

  constructor(locks, { ttl, near = '', delay, info, ...options }) {
    super();
    Object.assign(this, { locks, ttl, options: { delay: interval(delay), info } });
    this.server = locks.server(near);
    this.rhythm = rhythm({ ttl, ...options });
    this[anew]();
  }

  toString() {
    return `lease ${this.id}`;
  }

  line() {
    return new Line(this.server, this.locks.patience);
  }

  async open(options) {
    this.turn(NONE, 'asked for');
    return (this.#opening = this.#open(options));
  }

  async #open({ signal } = {}) {
    this[anew]();
    // calls of an earlier opening may still use its connection
    this.#line = this.line();
    this.#tail = Promise.resolve();
    try {
      await this.hold(async (line) => {
        // if the answer is lost, the lease has no locks, and expires
        this.id = await line.ask(call('dlock_lease_open', [interval(this.ttl)], this.options), { signal });
        if (signal?.aborted) {
          const close = call('dlock_lease_close', [this.id]);
          await line.ask(close, { until: now() + UNDO }).catch(() => {}); // without the close, the lease expires
          throw cancelled(signal);
        }
        this.heart = new Heart(this.server, this.id, line.sent, this.ttl, this.rhythm);
        this.heart.add(this);
        this.state = 'held';
      });
    } catch (error) {
      this.state = NONE;
      throw error;
    }
    return this;
  }

  /** Closes the lease, which ends all of its locks. Waits for an open in progress. Does nothing if closed already. */
  async close() {
    while (this.state === 'asked for') await this.#opening.catch(() => {});
    if (this.state === NONE) return;
    this.turn('held', 'being released');
    try {
      await this.hold((line) => giveBack(this, line, call('dlock_lease_close', [this.id]), true));
    } finally {
      this.state = NONE;
    }
  }

  /** Returns the answer to a call, the time before the call was sent, and whether it may be executed once more. */
  send(statement) {
    return this.hold(async (line) => [await line.ask(statement, { until: this.deadline }), line.sent, line.doubt]);
  }

  /** Acquires all or none, in an order that prevents deadlocks. Release each of them, or close the lease. */
  async acquireAll(names, { timeout = Infinity, shared, info, signal } = {}) {
    const { heart, id } = this;
    const all = [...new Set(names)];
    const back = (name) => heart.request(name);
    this.check();
    for (const name of all) {
      if (this.locks.server(name) !== this.server)
        throw new BadArgument(`"${name}" is not on the server of ${this}`, '22023');
      if (heart.together.has(name) || heart.owes(back(name)))
        throw new WrongState(`${this} has "${name}" already`, '55000');
    }
    all.forEach((name) => heart.together.add(name));
    const until = now() + timeout;
    const line = this.line();
    line.waits = timeout !== 0;
    try {
      const fences = await line.ask(() => {
        const [text, values] = call('dlock_lease_acquire_all', [all, id],
          { timeout: interval(Math.max(0, until - now())), shared, info });
        return [`${text}::text`, values];
      }, { until: until + GRACE, limit: Infinity, signal });
      if (signal?.aborted) throw cancelled(signal);
      const locks = all.map((name) => this.lock(name));
      fences.slice(1, -1).split(',').filter(Boolean).forEach((fence, n) => locks[n].hold(Number(fence), heart));
      locks.forEach((lock) => lock.checkLost());
      return locks;
    } catch (error) {
      all.forEach((name) => heart.together.delete(name));
      if (isUnsure(error, line.doubt) || error instanceof LockLost)
        heart.owe(...all.map(back));
      throw error;
    } finally {
      await line.close();
    }
  }

  /**
   * Runs work with exclusive use of the lease's connection; if it is not free soon, at the latest by the time `until`,
   * over another one. The connection stays open while the lease is held.
   */
  async hold(work, { until = this.deadline, signal } = {}) {
    if (signal?.aborted) throw cancelled(signal); // no event will follow
    const own = this.#line;
    const before = this.#tail;
    const waiting = new AbortController();
    const stop = () => waiting.abort();
    let done, free;
    signal?.addEventListener('abort', stop);
    this.#tail = before.then(() => new Promise((resolve) => { done = resolve; }));
    do {
      const left = Math.max(0, Math.min(GRACE, until - now()));
      free = await Promise.race([
        before.then(() => true), sleep(left, false, { signal: waiting.signal }).catch(() => {})]);
      // wait on while earlier calls still finish, because the connection is not stuck
    } while (!free && !waiting.signal.aborted && now() < until && now() - this.#moved < GRACE);
    signal?.removeEventListener('abort', stop);
    stop();
    const line = free ? own : this.line();
    try {
      return await work(line);
    } finally {
      if (line !== this.#line || line.pooled || this.state !== 'held') await line.close();
      if (free) this.#moved = now();
      before.then(() => done());
    }
  }

  lock(name, options) {
    return new Lock(this, name, options);
  }

  /** Opens the lease, works, and closes it. */
  async run(work) {
    await this.open();
    return runWith(this, work, () => this.close());
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }
}

// For each connection, the objects to notify when it ends
const ends = new WeakMap();

function watchEnd(client) {
  if (!ends.has(client)) {
    ends.set(client, new Set());
    const told = () => ends.get(client).forEach((tell) => tell());
    ends.get(client).told = told;
    client.once('end', told);
  }
  return ends.get(client);
}

function unwatchEnd(client, tell) {
  const tells = ends.get(client);
  if (!tells?.delete(tell) || tells.size) return;
  client.off('end', tells.told);
  ends.delete(client);
}

/** A lock for a block of the program: of Locks, of the program's own connection, or of a Lease */
export class Lock extends Kept {
  #line;
  #until;
  #calls; // in transaction scope: executes SQL in the program's transaction
  #ofAll; // was it acquired by acquireAll?
  #since;
  #doubt; // for a lock of a Lease: may the Lease's connection have left a request?
  #debt; // the owner's, while it is being paid
  #ended = () => this.lose('its connection is gone');

  constructor(source, name, { scope, ttl, timeout, shared, slots, permits, info, owner, ...options } = {}) {
    super();
    const own = source instanceof Locks;
    const leased = source instanceof Lease || ttl != null;
    scope ??= leased ? 'lease' : 'session';
    // not a pool, which executes each query over any connection
    const given = typeof source?.query === 'function' && typeof source.escapeIdentifier === 'function'
      && !('idleCount' in source);
    if (scope === 'transaction' && !own && !leased && !given) this.#calls = new Calls(source);
    if (!(own || given || this.#calls || source instanceof Lease) || leased !== (scope === 'lease')
        || (ttl != null && !own) || (own && scope === 'transaction')
        || !['session', 'transaction', 'lease'].includes(scope))
      throw new BadArgument(`no lock in ${scope} scope of this`, '22023');
    this.rhythm = rhythm({ ttl, ...options });
    this.#line = own ? source.line(name) : leased ? source.line() : new Line(undefined, 0, source);
    this.#line.session = scope === 'session';
    this.observer = (own ? source : source.locks)?.observer;
    Object.assign(this, { source, name, scope, ttl, timeout, owner });
    this.options = { shared, slots, permits, owner, info };
    this[anew]();
  }

  toString() {
    return `lock "${this.name}"`;
  }

  get held() {
    return this.state === 'held' && !this.lost.aborted;
  }

  /** Holds a lock that acquireAll has acquired. */
  hold(fence, heart) {
    this.turn(NONE, 'held');
    this[anew]();
    this.fence = fence;
    this.heart = heart;
    this.#ofAll = true;
    heart.add(this, { name: this.name, fence });
    this.#observeHold(now());
  }

  async send(statement) {
    const { scope, source } = this;
    const { client, given } = this.#line;
    if (source instanceof Lease) return source.send(statement);
    if (this.#calls) return [await this.#calls.send(statement)];
    if (scope !== 'lease') return [await ask(client, statement, { until: given ? Infinity : now() + GRACE })];
    return this.#over(async (line) => [await line.ask(statement, { until: this.deadline }), line.sent, line.doubt]);
  }

  // Calls of a lock with a ttl of its own may come at the same time, so each has a connection.
  async #over(work) {
    const line = this.source.line(this.name);
    try {
      return await work(line);
    } finally {
      await line.close();
    }
  }

  /** Asks the server. The answer can be outdated on arrival; to be sure, guard. */
  async isHeld() {
    if (!this.held) return false;
    const lease = this.scope === 'lease' ? this.source.id ?? this.fence : undefined;
    const [held] = await this.send(call('dlock_is_held', [this.name], { lease }));
    return held;
  }

  /** Makes an exclusive hold shared, without releasing it. */
  async downgrade() {
    this.check();
    await this.sendHeld(call('dlock_downgrade', [this.fence]));
  }

  #observe(what, since, error) {
    const { observer, name, scope } = this;
    try {
      const told = observer?.({ what, name, scope, ms: now() - since, error });
      Promise.resolve(told).catch(warn);
    } catch (failure) {
      warn(failure);
    }
  }

  #observeHold(began) {
    const since = now();
    this.#since = since;
    this.#observe('waited', began);
    if (this.observer) this.onLost(() => this.#observe('lost', since));
  }

  /** Waits until the lock is granted, and returns this. */
  async acquire({ signal } = {}) {
    this.turn(NONE, 'asked for');
    this.fence = undefined;
    this[anew]();
    if (this.scope === 'lease') this.options.owner = this.owner ?? randomUUID();
    const began = now();
    this.#until = began + (this.timeout ?? Infinity);
    this.#ofAll = false;
    this.#doubt = false;
    this.#line.waits = this.timeout !== 0;
    try {
      await (this.scope === 'lease' ? this.#acquireForLease(signal) : this.#acquireHere(signal));
      if (signal?.aborted) throw cancelled(signal);
    } catch (error) {
      await this.#undo(error);
      this.state = NONE;
      this.#observe('failed', began, error);
      throw error;
    }
    this.state = 'held';
    this.#observeHold(began);
    return this;
  }

  // A repeated request gets the remaining time.
  #request(name, signal, ...values) {
    const statement = () => call(name, [this.name, ...values],
      { ...this.options, timeout: interval(Math.max(0, this.#until - now())) });
    return this.#line.ask(statement, { until: this.#until + GRACE, limit: Infinity, signal });
  }

  async #acquireHere(signal) {
    if (this.#calls) {
      this.fence = await this.#calls.xactAcquire(this.name, { ...this.options, timeout: this.timeout });
      return;
    }
    if (this.scope === 'transaction') {
      this.fence = await inTransaction(this.source, () => this.#request('dlock_xact_acquire', signal));
      return;
    }
    this.fence = await this.#request('dlock_acquire', signal);
    watchEnd(this.#line.client).add(this.#ended);
  }

  async #acquireForLease(signal) {
    await (this.source instanceof Lease ? this.#acquireOfLease(signal) : this.#acquireWithTtl(signal));
    await this.#line.close(); // a held lock needs no connection
  }

  async #acquireOfLease(signal) {
    const { source, name } = this;
    if (source.locks.server(name) !== source.server)
      throw new BadArgument(`${this} is not on the server of ${source}`, '22023');
    source.check();
    const { heart } = source;
    if (heart.owes(heart.request(name, this.options.owner)))
      throw new WrongState(`${this} is being taken back from this owner`, '55000');
    this.heart = heart;
    // over the lease's connection, if the lock need not wait
    const attempt = call('dlock_lease_acquire', [name, heart.id], { ...this.options, timeout: interval(0) });
    const until = this.#until + GRACE;
    const request = (line) => line.ask(attempt, { until, signal }).finally(() => { this.#doubt = line.doubt; });
    // a wait for that connection leaves time for another one
    this.fence = await source.hold(request, { until: until - GRACE / 2, signal }).catch((error) => {
      if (!(error instanceof LockTimeout) || this.timeout === 0) throw error;
    });
    this.fence ??= await this.#request('dlock_lease_acquire', signal, heart.id);
    heart.add(this, { name, fence: this.fence });
    this.checkLost();
  }

  async #acquireWithTtl(signal) {
    const line = this.#line;
    await this.#pay(signal);
    this.fence = await this.#request('dlock_ttl_acquire', signal, interval(this.ttl));
    // After a long wait, only a renewal makes the deadline known. If the request repeats an earlier one, the shorter
    // ttl counts.
    const until = Math.min(now() + this.ttl, this.#until + GRACE);
    const renewed = await line.ask(this.owner === undefined
      ? ['SELECT dlock_renew($1), $2::float8', [this.fence, this.ttl / 1000]]
      : ['SELECT dlock_renew(lease), extract(epoch FROM ttl)::float8 FROM dlock_leases WHERE lease = $1', [this.fence]],
    { until, limit: this.rhythm.interval, signal });
    if ((renewed?.[0] ?? null) === null) {
      this.lose('the server has ended its lease at once');
      this.checkLost();
    }
    const ttl = Math.min(this.ttl, renewed[1] * 1000);
    const part = ttl / this.ttl;
    this.heart = new Heart(line.config, this.fence, line.sent, ttl,
      { interval: this.rhythm.interval * part, margin: this.rhythm.margin * part });
    this.heart.add(this);
  }

  // Releases what the owner must not hold again.
  async #pay(signal) {
    const line = this.#line;
    const limits = { until: this.#until + GRACE, signal };
    while ((this.#debt = owed(line.config, this.name, this.owner))) {
      const { ticket } = this.#debt;
      if (ticket === undefined) await this.#takeBack(limits, this.#debt);
      else await line.ask(call('dlock_release_ticket', [ticket]), limits);
      paid(this.#debt);
    }
  }

  owe(ticket) {
    const own = this.ttl != null && this.owner != null;
    return own ? owe(this.#line.config, this.name, this.owner, ticket) : undefined;
  }

  get #asked() {
    const { name, heart, options: { owner } } = this;
    return this.source instanceof Lease ? heart.request(name, owner) : [name, owner, null];
  }

  // Repeats an undo while the request's session waits. Stops if another call has paid the debt: then what is found may
  // be a later request's.
  async #takeBack(limits, debt) {
    const send = async (statement) => (!debt || isOwed(debt) ? this.#line.ask(statement, limits) : null);
    for (const pause of pauses()) {
      if ((await takeBack(this.#asked, send)) !== false) return;
      if (now() >= limits.until) throw new ConnectionLost('its session goes on waiting');
      await sleep(pause, undefined, { signal: limits.signal }).catch(() => {});
    }
  }

  // Undoes an interrupted request, which the server may have executed. If that fails, a Lease's heartbeat undoes it;
  // other leases expire, or the owner's next request releases them.
  async #undo(error) {
    const line = this.#line;
    const until = now() + UNDO;
    const lease = this.source instanceof Lease;
    this.heart?.remove(this, !lease);
    if (this.scope !== 'lease') {
      if (line.client && !this.#calls) unwatchEnd(line.client, this.#ended);
      if (line.given && this.scope === 'session' && this.fence)
        await ask(line.client, call('dlock_release_ticket', [this.fence]), { until }).catch(() => cut(line.client));
      await line.close();
      return;
    }
    await line.close();
    if (lease ? !this.heart : this.#debt) return; // nothing was requested
    if (this.fence === undefined && !isUnsure(error, line.doubt || this.#doubt)) return;
    const debt = this.owe(this.fence);
    line.waits = false;
    try {
      await this.#takeBack({ until }, debt);
      if (debt) paid(debt);
    } catch {
      if (lease) this.heart.owe(this.#asked);
    } finally {
      await line.close();
    }
  }

  async release() {
    this.turn('held', 'being released');
    try {
      await (this.scope === 'lease' ? this.#releaseForLease() : this.#releaseHere());
    } finally {
      if (this.state === 'being released') this.state = NONE;
      if (this.#ofAll) this.heart.together.delete(this.name);
      await this.#line.close();
    }
    this.#observe('held', this.#since);
  }

  // Over the connection of a Lease, if there is one. If that fails, the Lease's heartbeat repeats the release.
  async #releaseForLease() {
    const release = call('dlock_release_ticket', [this.fence]);
    if (!(this.source instanceof Lease)) {
      const debt = this.lost.aborted ? undefined : this.owe(this.fence);
      return this.#over((line) => giveBack(this, line, release, true, debt));
    }
    try {
      return await this.source.hold((line) => giveBack(this, line, release, false));
    } catch (error) {
      if (!(error instanceof LockLost)) this.heart.owe(this.#asked);
      throw error;
    }
  }

  async #releaseHere() {
    const line = this.#line;
    if (this.#calls) return;
    try {
      if (this.scope === 'transaction') return; // its end releases the lock
      const until = line.given ? Infinity : now() + GRACE;
      if (!this.lost.aborted && !(await ask(line.client, call('dlock_release_ticket', [this.fence]), { until })))
        this.lose('the server has ended its ticket');
    } catch (error) {
      if (!(error instanceof ConnectionLost)) {
        if (line.given) this.state = 'held'; // by the program's session
        throw error;
      }
      this.#ended();
    } finally {
      if (this.state !== 'held') unwatchEnd(line.client, this.#ended);
    }
    this.checkLost();
  }

  /** The transaction of this connection can commit only while the lock is held. */
  async guard(db) {
    await new Calls(db).guard(this);
  }

  /** Acquires the lock, works, and releases it. */
  async run(work, options) {
    await this.acquire(options);
    return runWith(this, work, () => this.release());
  }

  async [Symbol.asyncDispose]() {
    if (this.state === 'held') await this.release();
  }
}

/** Runs work while this process leads, and campaigns again after a loss. */
export class Election {
  #lock;

  constructor(locks, name, { ttl = 15000, ...options } = {}) {
    this.#lock = locks.lock(name, { ttl, ...options });
  }

  /**
   * Returns the result of work that was completed while this process led. Work must check `lock.lost`, an AbortSignal.
   * Waits for an unreachable server without limit.
   */
  async run(work, { signal } = {}) {
    const lock = this.#lock;
    for (let waiting = pauses(15000);;) {
      let leads, done, result;
      try {
        await lock.acquire({ signal });
        leads = true;
        waiting = pauses(15000);
        await runWith(lock, async () => {
          result = await work(lock);
          done = true;
        }, () => lock.release());
        return result;
      } catch (error) {
        if (isAway(error) && done) return result; // completed while leading; the lock expires
        if (isAway(error) && !leads) {
          await sleep(waiting.next().value, undefined, { signal }).catch(() => {});
          continue;
        }
        if (error instanceof LockLost && !leads) continue;
        // an error of the work, or a loss after its end
        const told = error instanceof LockLost || error?.name === 'AbortError';
        if (!lock.lost.aborted || !told) throw error;
      }
    }
  }
}

/** A pool calls this when a connection is returned. */
export async function reset(client) {
  try {
    await client.query('ROLLBACK');
    await client.query('SELECT dlock_release_all()');
  } catch (error) {
    throw translate(error);
  }
}
