// What keeps a lease, and tells of its loss

import { setTimeout as sleep } from 'node:timers/promises';
import { LockLost, WrongState } from './errors.js';
import { ask, call, close, connect, cut, now } from './wire.js';

// A look at the clock at least each second: timers stand still while the machine sleeps.
const GLANCE = 1000;

/** The key of what begins anew, not lost: nothing for a program to call */
export const anew = Symbol('anew');
export const NONE = 'not held';

/** What can be lost: a lock, a lease */
export class Kept {
  heart;
  state = NONE; // or asked for, held, being released
  #loss;

  [anew]() {
    this.heart = undefined;
    this.#loss = new AbortController();
    // It looks at the clock itself, as a process that was stopped, or busy, may ask before a timer has run.
    const { signal } = this.#loss;
    const seen = Object.getOwnPropertyDescriptor(AbortSignal.prototype, 'aborted').get.bind(signal);
    Object.defineProperty(signal, 'aborted', { get: () => seen() || (this.heart?.look(), seen()) });
  }

  /** An AbortSignal, whose reason is a LockLost; once aborted, it stays so. */
  get lost() {
    return this.#loss.signal;
  }

  /** Until when we may work without hearing from the server, by now() */
  get deadline() {
    return this.heart?.deadline ?? Infinity;
  }

  /** Throws LockLost, or WrongState if it is not held; before anything is sent to anybody. */
  check() {
    this.checkLost();
    if (this.state !== 'held') throw new WrongState(`${this} is ${this.state}`, '55000');
  }

  checkLost() {
    if (this.lost.aborted) throw this.lost.reason;
  }

  /** By one task at a time: from one state into the next */
  turn(before, after) {
    if (this.state !== before) throw new WrongState(`${this} is ${this.state}`, '55000');
    this.state = after;
  }

  /** Calls it once, with this; at once, where it is lost already. */
  onLost(callback) {
    const tell = async () => {
      try {
        await callback(this);
      } catch (error) {
        process.emitWarning(error);
      }
    };
    if (this.lost.aborted) tell();
    else this.lost.addEventListener('abort', tell, { once: true });
  }

  lose(why) {
    this.#loss.abort(new LockLost(`${this} was lost: ${why}`, '55L01'));
  }
}

/** Renews over a connection of its own; and beside that, a timer watches the deadline, and waits for nothing else. */
export class Heart {
  #members = new Map(); // who is to be told: the lease, null, and locks, by name and fence
  #end = new AbortController();
  #ending = false;
  #watching;

  constructor(config, id, sent, ttl, { interval, margin }) {
    Object.assign(this, { config, id, interval, life: ttl - margin, deadline: sent + ttl - margin });
    this.#watch();
    this.#beat();
  }

  get over() {
    return this.#end.signal.aborted;
  }

  add(member, lock = null) {
    this.#members.set(member, lock);
    if (this.over) member.lose('its lease is over');
  }

  remove(member) {
    this.#members.delete(member);
  }

  /** From now on, that the lock is gone is no loss; nor is it, for the last one, of the lease. The deadline is. */
  leave(member, last) {
    if (this.#members.has(member)) this.#members.set(member, null);
    this.#ending ||= last;
  }

  /** Nothing is told any more. */
  end() {
    clearTimeout(this.#watching);
    this.#end.abort();
  }

  /** The program ends the lease, and with it all locks that are still on it. */
  close(lease) {
    for (const member of [...this.#members.keys()])
      if (member !== lease) member.lose('its lease is closed');
  }

  look() {
    if (!this.over && now() >= this.deadline) this.#lose('its deadline has passed');
    else if (this.over) for (const member of this.#members.keys()) member.lose('its lease is over');
  }

  #lose(why) {
    this.end();
    for (const member of [...this.#members.keys()]) member.lose(why);
  }

  #watch() {
    this.look();
    if (!this.over) this.#watching = setTimeout(() => this.#watch(), Math.min(this.deadline - now() + 1, GLANCE));
  }

  async #beat() {
    const { signal } = this.#end;
    for (let next = now() + this.interval; await this.#until(next); next = now() + Math.min(this.interval, 500)) {
      let client;
      try {
        client = await connect(this.config, 'dlock heartbeat', { patience: this.interval, signal });
        do {
          next = now() + this.interval;
          await this.#renew(client);
        } while (await this.#until(next));
      } catch {
        // says nothing: ask again
      } finally {
        if (client) await close(client);
      }
    }
  }

  // False where it is over
  async #until(time) {
    while (!this.over && now() < time)
      await sleep(Math.min(time - now() + 1, GLANCE), undefined, { signal: this.#end.signal }).catch(() => {});
    return !this.over;
  }

  async #renew(client) {
    const locks = [...this.#members].filter(([, lock]) => lock);
    const sent = now();
    const stop = () => cut(client);
    const patience = setTimeout(stop, this.interval);
    let kept, gone;
    this.#end.signal.addEventListener('abort', stop);
    try {
      kept = await ask(client, call('dlock_renew', [this.id]));
      if (locks.length && kept !== null)
        gone = await ask(client, [
          'SELECT array_agg(fence) FROM unnest($1::text[], $2::bigint[]) AS held (name, fence)'
          + ' WHERE NOT dlock_check(name, fence)',
          [locks.map(([, lock]) => lock.name), locks.map(([, lock]) => lock.fence)]]);
    } finally {
      clearTimeout(patience);
      this.#end.signal.removeEventListener('abort', stop);
    }
    if (this.over) return;
    if (kept !== null) this.deadline = Math.max(this.deadline, sent + this.life);
    else if (!this.#ending) this.#lose('the server has ended its lease');
    const ended = (gone ?? '{}').match(/\d+/g) ?? [];
    for (const [member, lock] of locks)
      if (ended.includes(`${lock.fence}`) && this.#members.get(member) === lock)
        member.lose('the server has ended its ticket');
  }
}
