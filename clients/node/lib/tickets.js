// Places in many queues, and watched locks, over one connection

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { BadArgument, ConnectionLost, DlockError, LockLost, WrongState, cancelled, isUnsure } from './errors.js';
import { inTime } from './source.js';
import { GRACE, ask as askOver, call, now, pauses } from './wire.js';

// Milliseconds between queries that make up for lost notifications
const ROUND = 60000;

// Events of watched locks; all others are of tickets
const WATCHES = ['held', 'free'];

const ask = (client, statement) => askOver(client, statement, { until: now() + GRACE });

// Lets the heartbeat give a place back, if it is a lease's.
const giveBack = ({ name, owner, heart }) => heart?.owe(heart.request(name, owner));

/**
 * Tickets belong to the session, and end with the connection, or to a lease, which keeps their places. All of them are
 * on one server: the server of the lease, or of the name `near`.
 */
export class Tickets {
  #locks;
  #lease;
  #line;
  #client;
  #heard = [];
  #events = [];
  #requests = new Map();
  #granted = new Set();
  #watched = new Set();
  #round = now() + ROUND;
  #tail = Promise.resolve();
  #waking = new Set();
  #closed = false;
  #doubt = false; // may an earlier attempt of the latest call have been executed?
  #gone; // a loss that nobody has heard

  constructor(locks, { lease, near = '' } = {}) {
    this.#locks = locks;
    this.#lease = lease;
    this.#line = lease ? lease.line() : locks.line(near);
    this.#line.session = true;
  }

  /** Returns the ticket, the fence once it is granted. The options are shared, slots, permits, owner and info. */
  async enqueue(name, { owner, ...options } = {}) {
    this.#here(name);
    this.#lease?.check();
    const place = { name, owner: owner ?? randomUUID(), heart: this.#lease?.heart };
    place.statement = this.#lease
      ? call('dlock_lease_enqueue', [name, this.#lease.id], { ...options, owner: place.owner })
      : call('dlock_enqueue', [name], options);
    return this.#alone(async () => {
      if (place.heart?.owes(place.heart.request(name, place.owner)))
        throw new WrongState(`"${name}" is being taken back from this owner`, '55000');
      let ticket;
      try {
        ticket = await this.#kept(place.statement);
      } catch (error) {
        const ours = [...this.#requests.values()].some((known) => known.name === name && known.owner === place.owner);
        if (!ours && isUnsure(error, error.doubt)) giveBack(place);
        throw error;
      }
      this.#requests.set(ticket, place);
      await this.#confirm(ticket).catch(() => { // next() looks again
        this.#round = now();
        this.#wake();
      });
      return ticket;
    });
  }

  async release(ticket) {
    await this.#alone(async () => {
      const place = this.#requests.get(ticket);
      if (!place) throw new LockLost(`ticket ${ticket} is not ours`, '55L01');
      if (place.heart) this.#requests.delete(ticket); // a new connection must not request it again
      let released;
      try {
        released = await this.#kept(call('dlock_release_ticket', [ticket]));
        this.#requests.delete(ticket);
      } catch (error) {
        if (place.heart) giveBack(place);
        throw error;
      } finally {
        if (!this.#requests.has(ticket)) this.#granted.delete(ticket);
      }
      if (!released && !this.#doubt) throw new LockLost(`ticket ${ticket} was lost`, '55L01');
    });
  }

  /** Watches the lock: an event reports its holder now, and at each change. */
  async watch(name) {
    this.#here(name);
    await this.#alone(async () => {
      await this.#kept(call('dlock_watch', [name]));
      this.#watched.add(name);
    });
  }

  async unwatch(name) {
    await this.#alone(async () => {
      this.#watched.delete(name);
      await this.#kept(call('dlock_unwatch', [name]));
    });
  }

  /**
   * The next event. Of a ticket: granted, wanted (a request waits for the lock), released (by force), expired, lost. Of
   * a watched lock: held, free. Undefined if no event has come within the timeout.
   */
  async next({ timeout = Infinity, signal } = {}) {
    const until = now() + timeout;
    for (;;) {
      if (signal?.aborted) throw cancelled(signal);
      const heard = this.#alone(async () => {
        const gone = this.#gone;
        this.#gone = undefined;
        if (gone) throw gone;
        await this.#listen();
      });
      try {
        await inTime(heard, () => {}, { until: until + GRACE, signal });
      } catch (error) {
        // a loss that comes after this wait is for the next call
        heard.catch((late) => { if (late !== error && late instanceof LockLost) this.#gone = late; });
        throw error;
      }
      const event = this.#events.shift();
      if (event || now() >= until) return event;
      await this.#news(Math.min(this.#round, until) - now(), signal);
    }
  }

  async close() {
    this.#closed = true;
    await this.#alone(async () => {
      const good = !this.#client?.ended;
      this.#client = undefined;
      this.#wake();
      await this.#line.close(good);
    });
  }

  async [Symbol.asyncDispose]() {
    await this.close();
  }

  // One statement at a time on the connection
  #alone(work) {
    const result = this.#tail.then(work);
    this.#tail = result.catch(() => {});
    return result;
  }

  #tell(event) {
    this.#events.push(event);
    this.#wake();
  }

  #wake() {
    for (const resolve of this.#waking) resolve();
    this.#waking.clear();
  }

  #news(ms, signal) {
    if (this.#heard.length || this.#events.length || this.#client?.ended !== false || signal?.aborted) return undefined;
    return new Promise((resolve) => {
      const timer = setTimeout(() => this.#wake(), ms + 1);
      const wake = () => this.#wake();
      signal?.addEventListener('abort', wake);
      this.#waking.add(() => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', wake);
        resolve();
      });
    });
  }

  // Returns the connection, or a new one if it broke. Tickets of a lease stay; tickets of the session are lost.
  async #session() {
    if (this.#closed) throw new WrongState('the tickets are closed', '55000');
    if (this.#client && !this.#client.ended) return this.#client;
    if (!this.#lease && this.#requests.size) {
      this.#events = this.#events.filter(({ event, ticket }) =>
        WATCHES.includes(event) || !this.#requests.has(ticket));
      this.#requests.clear();
      this.#granted.clear();
      throw new LockLost('the tickets are gone with their connection', '55L01');
    }
    await this.#line.close(false);
    await this.#line.ask(['SELECT 1']);
    const client = this.#line.client;
    this.#client = client;
    // before all else, because a notification may come with the reply to an enqueue
    const hear = ({ payload }) => {
      this.#heard.push(payload);
      this.#wake();
    };
    const end = () => this.#wake();
    client.on('notification', hear).once('end', end);
    this.#line.listens = [['notification', hear], ['end', end]];
    try {
      for (const name of this.#watched) await ask(client, call('dlock_watch', [name]));
      for (const [ticket, { statement }] of [...this.#requests]) {
        // undefined if the lease has ended, or another client holds the lock with other slots
        const again = await ask(client, statement).catch((error) => {
          if (!(error instanceof LockLost || error instanceof WrongState)) throw error;
        });
        if (again !== ticket) {
          if (again !== undefined) await ask(client, call('dlock_release_ticket', [again]));
          this.#forget(ticket, 'lost');
        }
        await this.#confirm(ticket);
      }
    } catch (error) {
      client.ended = true; // the next connection repeats all of it
      throw error;
    }
    return client;
  }

  // Executes a call, again over a new connection if one breaks, until the patience ends
  async #kept(statement) {
    const end = now() + this.#line.patience;
    this.#doubt = false;
    for (const pause of pauses()) {
      try {
        return await ask(await this.#session(), statement);
      } catch (error) {
        // without a client, no connection could be made in time
        const broken = error instanceof ConnectionLost && this.#line.client;
        if (broken) this.#doubt = this.#client.ended = true;
        if (!broken || now() >= end) {
          if (error instanceof DlockError) error.doubt = this.#doubt;
          throw error;
        }
      }
      await sleep(pause);
    }
    return undefined;
  }

  async #listen() {
    if (now() >= this.#round) {
      this.#round = now() + ROUND;
      await this.#kept(['SELECT 1']);
      for (const ticket of [...this.#requests.keys()]) await this.#confirm(ticket);
    } else if (!this.#client || this.#client.ended) {
      await this.#kept(['SELECT 1']);
    }
    for (let payload; (payload = this.#heard.shift()) !== undefined;) {
      const said = JSON.parse(payload);
      const { event, lock, ticket } = said;
      if (event === 'granted') await this.#confirm(ticket);
      else if (event === 'released' || event === 'expired') this.#forget(ticket, event);
      else if (event === 'wanted' ? this.#requests.has(ticket)
        : WATCHES.includes(event) && this.#watched.has(lock)) this.#tell(said);
    }
  }

  // A notification is only a hint, so ask. Reports each grant once.
  async #confirm(ticket) {
    if (!this.#requests.has(ticket) || this.#granted.has(ticket)) return;
    try {
      if (await ask(this.#client, call('dlock_wait', [ticket, '0']))) {
        this.#granted.add(ticket);
        this.#tell({ event: 'granted', lock: this.#requests.get(ticket).name, ticket });
      }
    } catch (error) {
      if (error instanceof LockLost) this.#forget(ticket, 'lost');
      else if (error instanceof ConnectionLost) this.#client.ended = true; // ask over the next connection
      else throw error;
    }
  }

  #forget(ticket, event) {
    this.#granted.delete(ticket);
    const request = this.#requests.get(ticket);
    if (this.#requests.delete(ticket)) this.#tell({ event, lock: request.name, ticket });
  }

  #here(name) {
    if (this.#locks.server(name) !== this.#line.config)
      throw new BadArgument(`"${name}" is on another server`, '22023');
  }
}

/** The holder of a lock: now, and at each change */
export async function* watch(locks, name, { signal } = {}) {
  const tickets = new Tickets(locks, { near: name });
  try {
    await tickets.watch(name);
    for (;;) yield await tickets.next({ signal });
  } finally {
    await tickets.close();
  }
}
