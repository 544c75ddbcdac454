// Keeps leases, and reports their loss
//
// Each lease has a Heart, whose timer waits only for the deadline. One Pulse per server renews all leases there, over
// one connection.

import { setTimeout as sleep } from 'node:timers/promises';
import { inspect } from 'node:util';
import { BadArgument, ConnectionLost, LockLost, NotAllowed, WrongState } from './errors.js';
import { lend } from './source.js';
import { FOREVER, ask, call, checkTtl, cut, interval, now, pauses } from './wire.js';

// Check the clock at least each second, because timers stop while the machine sleeps.
const GLANCE = 1000;

/** The key of the method that clears the loss; not for programs */
export const anew = Symbol('anew');
export const NONE = 'not held';

/** Reports what a callback has thrown. emitWarning() refuses what is neither an error nor a string. */
export function warn(failure) {
  try {
    process.emitWarning(failure);
  } catch {
    let what = 'a value that cannot be shown';
    try {
      what = inspect(failure);
    } catch {
      // a hostile value
    }
    process.emitWarning(`a callback threw ${what}`);
  }
}

/** A lock or a lease, which can be lost */
export class Kept {
  heart;
  state = NONE; // or 'asked for', 'held', 'being released'
  #loss;
  #renewing = Promise.resolve(); // until the last call of renew has ended

  [anew]() {
    this.heart = undefined;
    this.#loss = new AbortController();
    // `aborted` checks the clock, too, because a process that was stopped or busy may ask before a timer has run.
    const { signal } = this.#loss;
    const seen = Object.getOwnPropertyDescriptor(AbortSignal.prototype, 'aborted').get.bind(signal);
    Object.defineProperty(signal, 'aborted', { get: () => seen() || (this.heart?.look(), seen()) });
  }

  /** An AbortSignal, whose reason is a LockLost. Once aborted, it stays aborted. */
  get lost() {
    return this.#loss.signal;
  }

  /** The time, by now(), until which work may continue without an answer from the server */
  get deadline() {
    return this.heart?.deadline ?? Infinity;
  }

  /** Throws LockLost after a loss, and WrongState if it is not held. Call it before each request to another system. */
  check() {
    this.checkLost();
    if (this.state !== 'held') throw new WrongState(`${this} is ${this.state}`, '55000');
  }

  checkLost() {
    if (this.lost.aborted) throw this.lost.reason;
  }

  /** Changes the state; for one task at a time. */
  turn(before, after) {
    if (this.state !== before) throw new WrongState(`${this} is ${this.state}`, '55000');
    this.state = after;
  }

  /** Calls the function once after a loss, with this object; at once if it is lost already. */
  onLost(callback) {
    const tell = async () => {
      try {
        await callback(this);
      } catch (failure) {
        warn(failure);
      }
    };
    if (this.lost.aborted) tell();
    else this.lost.addEventListener('abort', tell, { once: true });
  }

  /** Renews now, in addition to the heartbeat. A ttl replaces the lease's ttl. */
  async renew(ttl) {
    const turn = this.#renewing.then(() => this.#renew(ttl));
    this.#renewing = turn.catch(() => {});
    return turn;
  }

  // One call at a time, because a refusal restores the earlier limits
  async #renew(ttl) {
    this.check();
    const { heart } = this;
    if (!heart || this.ttl == null) throw new WrongState(`${this} has no lease of its own`, '55000');
    checkTtl(ttl);
    const { life, interval: every, deadline, most } = heart;
    const part = (ttl ?? this.ttl) / this.ttl;
    const rhythm = { interval: this.rhythm.interval * part, margin: this.rhythm.margin * part };
    if (ttl !== undefined) heart.change(ttl, rhythm);
    const debt = ttl === undefined ? undefined : this.owe?.(heart.id);
    const statement = call('dlock_renew', [heart.id], { ttl: interval(ttl) });
    const loss = this.#loss; // of this hold: the answer may come after the next acquire
    let sent, kept, doubt;
    try {
      [kept, sent, doubt] = await this.send(statement);
    } catch (error) {
      const refused = error instanceof BadArgument || error instanceof NotAllowed;
      doubt = error.doubt ?? !refused;
      if (!doubt && (refused || error instanceof ConnectionLost)) heart.changed(deadline - life, life, every, most);
      throw error;
    } finally {
      // it was answered, or not sent
      if (!doubt) {
        heart.most = most;
        if (debt) paid(debt);
      }
    }
    if (kept === null) this.#gone(loss);
    if (ttl === undefined) {
      heart.changed(sent, life, every);
      return;
    }
    if (this.heart === heart) Object.assign(this, { ttl, rhythm });
    heart.changed(sent, ttl - rhythm.margin, rhythm.interval);
  }

  /** Changes the info, which others can read. */
  async setInfo(info) {
    this.check();
    await this.sendHeld(call('dlock_set_info', [this.id ?? this.fence, info ?? null]));
  }

  // Executes a call that returns false if the lock is lost, or was released meanwhile
  async sendHeld(statement) {
    const loss = this.#loss;
    const [held] = await this.send(statement);
    if (!held) this.#gone(loss);
  }

  // After an answer that the server has ended the hold
  #gone(loss) {
    if (this.state !== 'held' || this.#loss !== loss) throw new WrongState(`${this} was released`, '55000');
    this.lose('the server has ended it');
    this.checkLost();
  }

  lose(why) {
    this.#loss.abort(new LockLost(`${this} was lost: ${why}`, '55L01'));
  }
}

const RENEW = 'SELECT array(SELECT dlock_renew(id) FROM unnest($1::bigint[]) AS leases (id))::text,'
  + ' array(SELECT fence FROM unnest($2::text[], $3::bigint[]) AS held (name, fence)'
  + ' WHERE NOT dlock_check(name, fence))::text';
// Finds the tickets that a request may have left, given the owner, and the lease unless it is the ticket's own
const FIND = 'SELECT array(SELECT ticket FROM dlock_locks($1) WHERE owner IS NOT DISTINCT FROM $2'
  + " AND lease = coalesce($3, ticket) AND scope = 'lease' AND role = current_user)::text";
const TAKE_BACK = 'SELECT bool_and(dlock_release_ticket(ticket)) FROM unnest($1::bigint[]) AS found (ticket)';

/**
 * Undoes a request, given its name, owner and lease. Returns null if nothing is found, and false if the request's
 * session still waits, because it has not noticed yet that the client is gone. An abandoned statement may be executed
 * late, so the one that releases names the tickets: it cannot release what the owner acquires later.
 */
export async function takeBack(request, send) {
  const tickets = await send([FIND, request]);
  return tickets === '{}' ? null : send([TAKE_BACK, [tickets]]);
}

const DEBTS = 10000; // owners with debts; the newest ones are kept

/**
 * A debt is a release, an undo or a renewal without an answer. The server may execute it at any later time, and then
 * ends what the owner has. So the owner's next request must not get the same ticket: it first releases that ticket. Only
 * a lock with a ttl of its own, whose owner the program gives, has debts.
 */
const accounts = new Map(); // sets of debts
const account = ({ name, owner }) => JSON.stringify([name, owner]);

/** Notes a debt, before the release or undo is sent. The ticket is undefined if it is not known. */
export function owe(server, name, owner, ticket) {
  const debt = { server, name, owner, ticket };
  const key = account(debt);
  accounts.set(key, (accounts.get(key) ?? new Set()).add(debt));
  if (accounts.size > DEBTS) accounts.delete(accounts.keys().next().value);
  return debt;
}

export const owed = (server, name, owner) =>
  [...accounts.get(account({ name, owner })) ?? []].find((debt) => debt.server === server);

export const isOwed = (debt) => accounts.get(account(debt))?.has(debt) ?? false;

export function paid(debt) {
  const debts = accounts.get(account(debt));
  if (debts?.delete(debt) && !debts.size) accounts.delete(account(debt));
}

const pulses = new Map(); // by server

/** The heart of a lease */
export class Heart {
  over = false;
  members = new Map(); // the objects to notify: the lease (null) and locks, by name and fence
  owed = new Set(); // for each call, its requests to be undone, as JSON
  together = new Set(); // names of acquireAll
  most = { life: Infinity, interval: Infinity };
  #watching;

  constructor(config, id, sent, ttl, { interval, margin }) {
    Object.assign(this, { id, interval, life: ttl - margin, deadline: sent + ttl - margin, due: now() + interval });
    if (!pulses.has(config)) pulses.set(config, new Pulse(config));
    this.pulse = pulses.get(config);
    this.pulse.add(this);
    this.#watch(); // needs the pulse, because a heart whose answer came too late leaves the pulse at once
  }

  add(member, lock = null) {
    this.members.set(member, lock);
    if (this.over) member.lose('its lease is over');
  }

  /** Stops notifying an object. `last` ends the lease, and with it all of its remaining locks. */
  remove(member, last) {
    this.members.delete(member);
    if (last && !this.over) this.lose('its lease is closed');
  }

  request(name, owner) {
    return [name, owner ?? null, this.id];
  }

  /** Lets the heartbeat undo a call's requests as soon as the server answers again. */
  owe(...requests) {
    this.owed.add(JSON.stringify(requests));
    this.pulse.wake();
  }

  owes(request) {
    return [...this.owed].some((requests) => requests.includes(JSON.stringify(request)));
  }

  /**
   * Prepares for a request of another ttl. Until the server has answered, the shorter ttl counts. The server may
   * execute an abandoned request at any later time, so no later change gives the lease more.
   */
  change(ttl, rhythm) {
    const { life, interval } = this.most;
    this.most = { life: Math.min(life, ttl - rhythm.margin), interval: Math.min(interval, rhythm.interval) };
    this.life = Math.min(this.life, ttl - rhythm.margin);
    this.interval = Math.min(this.interval, rhythm.interval);
    this.deadline = Math.min(this.deadline, now() + this.life);
    this.#turn();
  }

  changed(sent, life, every, most = this.most) {
    this.most = most;
    if (this.over) return;
    this.life = Math.min(life, most.life);
    this.interval = Math.min(every, most.interval);
    this.deadline = Math.max(this.deadline, sent + this.life);
    this.#turn();
  }

  #turn() {
    this.due = Math.min(this.due, now() + this.interval);
    clearTimeout(this.#watching);
    this.#watch();
    this.pulse.wake();
  }

  look() {
    if (!this.over && now() >= this.deadline) this.lose('its deadline has passed');
  }

  lose(why) {
    this.over = true;
    clearTimeout(this.#watching);
    this.pulse?.remove(this);
    for (const member of [...this.members.keys()]) member.lose(why);
  }

  renewed(sent, kept, gone, held) {
    if (this.over) return;
    if (!kept) {
      this.lose('the server has ended its lease');
      return;
    }
    this.deadline = Math.max(this.deadline, sent + this.life);
    for (const [member, lock] of held)
      if (gone.has(lock.fence) && this.members.get(member) === lock) member.lose('the server has ended its ticket');
  }

  #watch() {
    this.look();
    if (!this.over) this.#watching = setTimeout(() => this.#watch(), Math.min(this.deadline - now() + 1, GLANCE));
  }
}

const numbers = (array) => array.slice(1, -1).split(',').map(Number); // NULL is NaN

/** Renews all leases on one server. */
class Pulse {
  hearts = new Set();
  #loan;
  #client;
  #end = new AbortController();
  #resting; // ends the rest
  #asked; // the time of a statement without an answer
  #patience; // drops a connection that does not answer for the shortest interval

  constructor(config) {
    this.config = config;
  }

  add(heart) {
    this.hearts.add(heart);
    if (this.hearts.size === 1) this.#beat();
    this.wake();
  }

  remove(heart) {
    this.hearts.delete(heart);
    if (!this.hearts.size && pulses.get(this.config) === this) {
      pulses.delete(this.config);
      this.#end.abort();
    }
    this.wake();
  }

  wake() {
    this.#resting?.abort();
    clearTimeout(this.#patience);
    if (this.#asked === undefined) return;
    const left = this.#asked + this.#shortest - now();
    this.#patience = setTimeout(cut, Math.min(Math.max(0, left), FOREVER), this.#client);
  }

  get #shortest() {
    return this.hearts.size ? Math.min(...[...this.hearts].map(({ interval }) => interval)) : 0;
  }

  async #beat() {
    let waiting = pauses();
    let pause = 0;
    for (let due; (due = await this.#rest(pause));)
      try {
        pause = 0;
        this.#loan ??= await lend(
          this.config, 'dlock heartbeat', { until: now() + Math.max(this.#shortest, 1000), signal: this.#end.signal });
        this.#client = this.#loan.client;
        await this.#renew(due);
        if (await this.#takeBack(due)) waiting = pauses();
        else pause = waiting.next().value;
      } catch {
        // this does not prove a loss: retry
        pause = waiting.next().value;
        await this.#close(false);
      }
    await this.#close(true);
  }

  async #close(good) {
    const loan = this.#loan;
    this.#loan = this.#client = undefined;
    await loan?.end(good && !loan.client.ended);
  }

  // The hearts that are due now or soon; undefined if no heart is left
  async #rest(pause) {
    const earliest = now() + Math.min(pause, this.#shortest / 2);
    while (this.hearts.size) {
      const due = Math.min(...[...this.hearts].map((heart) => (heart.owed.size ? 0 : heart.due)));
      const left = Math.max(due, earliest) - now();
      if (left <= 0)
        return [...this.hearts].filter((heart) => heart.owed.size || heart.due <= now() + heart.interval / 4);
      this.#resting = new AbortController();
      await sleep(Math.min(left + 1, GLANCE), undefined, { signal: this.#resting.signal }).catch(() => {});
      this.#resting = undefined;
    }
    return undefined;
  }

  async #ask(statement) {
    this.#asked = now();
    this.wake();
    try {
      return await ask(this.#client, statement);
    } finally {
      this.#asked = undefined;
      clearTimeout(this.#patience);
    }
  }

  async #renew(due) {
    const held = due.map((heart) => [...heart.members].filter(([, lock]) => lock));
    const locks = held.flat().map(([, lock]) => lock);
    const sent = now();
    const [kept, gone] = await this.#ask(
      [RENEW, [due.map(({ id }) => id), locks.map(({ name }) => name), locks.map(({ fence }) => fence)]]);
    const ended = new Set(numbers(gone));
    numbers(kept).forEach((tickets, n) => {
      due[n].due = sent + due[n].interval;
      due[n].renewed(sent, tickets >= 0, ended, held[n]);
    });
  }

  // Has every owed request been undone? Repeats a call's requests until nothing is found, because a session that waits
  // for one name of acquireAll may request the next name later.
  async #takeBack(due) {
    for (const { owed } of due)
      for (const requests of [...owed]) {
        const found = [];
        for (const request of JSON.parse(requests))
          found.push(await takeBack(request, (statement) => this.#ask(statement)));
        if (found.every((released) => released === null)) owed.delete(requests);
      }
    return due.every(({ owed }) => !owed.size);
  }
}
