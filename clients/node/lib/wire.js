// Connections to servers

import net from 'node:net';
import os from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { BadArgument, ConnectionLost, DlockError, NotPrimary, QuorumLate, cancelled, translate } from './errors.js';
import { lend } from './source.js';

// How late an answer may be. Then the client drops the connection, and requests a lock in lease scope over another one.
export const GRACE = 5000;
// Milliseconds to send a cancel, and as many for the statement to end; then milliseconds to undo the request
const OBEY = 1000;
export const UNDO = 2000;
const LEAST = 100; // the least ttl of the server
export const FOREVER = 2 ** 31 - 1; // the most that a timer can wait: 24.8 days

const linux = process.platform === 'linux';
const monotonic = () => Number(process.hrtime.bigint()) / 1e6;
// os.uptime() runs while the machine sleeps, but in steps of 10 ms.
const ahead = () => os.uptime() * 1000 - monotonic();
const atStart = linux ? ahead() : 0;
let asleep = 0;

/** Milliseconds of a clock that is never stepped, and that runs while the machine sleeps, if the system has one */
export function now() {
  if (linux) asleep = Math.max(asleep, ahead() - atStart - 20);
  return monotonic() + asleep;
}

export const interval = (ms) => (ms == null || ms === Infinity ? undefined : `${ms.toFixed(3)} ms`);

/** Throws BadArgument for a new ttl that the server would refuse, or that interval() would omit. */
export function checkTtl(ttl) {
  if (ttl !== undefined && !(Number.isFinite(ttl) && ttl >= LEAST))
    throw new BadArgument(`a ttl is at least ${LEAST} ms, and finite`, '22023');
}

/** Pauses before retries without a server: they grow, and are random so that clients do not retry together. */
export function* pauses(most = 2000) {
  for (let pause = 100;; pause = Math.min(2 * pause, most)) yield Math.min(pause, most) * (0.5 + Math.random());
}

/** SELECT name(...); options that are undefined or null are omitted */
export function call(name, values = [], named = {}) {
  const given = Object.entries(named).filter(([, value]) => value != null);
  const places = [
    ...values.map((_, n) => `$${n + 1}`), ...given.map(([key], n) => `${key} => $${values.length + n + 1}`)];
  return [`SELECT ${name}(${places})`, [...values, ...given.map(([, value]) => value)]];
}

/** A configuration for each host. A URL, or `host` and `port`, may name several hosts, as in libpq. */
export function hostsOf(config) {
  const url = typeof config === 'string' ? config : config.connectionString;
  const rest = typeof config === 'string' ? {} : config;
  if (url) {
    const [, head, list, tail] = /^(\w+:\/\/(?:[^@/?]*@)?)([^/?]*)(.*)$/s.exec(url) ?? [];
    return list?.includes(',') ? list.split(',').map((host) => ({ ...rest, connectionString: head + host + tail }))
      : [{ ...rest, connectionString: url }];
  }
  const hosts = `${rest.host ?? process.env.PGHOST ?? ''}`.split(',');
  const ports = `${rest.port ?? process.env.PGPORT ?? ''}`.split(',');
  return hosts.map((host, n) => (
    { ...rest, host: host || undefined, port: ports[Math.min(n, ports.length - 1)] || undefined }));
}

export function cut(client) {
  client.ended = true; // no pool must keep it
  client.connection.stream.destroy();
}

export async function close(client) {
  const timer = setTimeout(cut, 1000, client);
  await client.end().catch(() => {});
  clearTimeout(timer);
}

// A cancel is a separate connection, which the server closes after it has read the cancel. Returns whether it has.
function cancel({ host, port, processID, secretKey }) {
  const packet = Buffer.alloc(16);
  [16, 80877102, processID, secretKey].forEach((word, n) => packet.writeInt32BE(word, 4 * n));
  return new Promise((heard) => {
    const socket = net.connect(host.startsWith('/') ? { path: `${host}/.s.PGSQL.${port}` } : { host, port });
    socket.setTimeout(OBEY, () => socket.destroy());
    socket.on('error', () => {}).on('close', () => heard(socket.readableEnded)).resume().write(packet);
  });
}

// Parsers that do not depend on the program's settings
const parsers = { 16: (text) => text === 't', 20: Number, 23: Number, 701: Number };
const types = { getTypeParser: (oid) => parsers[oid] ?? String };

/**
 * Returns the value, or row, of a statement. If the signal or the connection's `query_timeout` ends it, the server
 * cancels it, too, and the server's answer counts. If there is no answer by `until`, closes the connection.
 */
export async function ask(client, [text, values],
  { signal, until = Infinity, limit = client.connectionParameters?.query_timeout } = {}) {
  if (signal?.aborted) throw cancelled(signal); // no event will follow
  let stopping, last, done = false;
  const stop = () => {
    stopping ??= cancel(client).then((heard) => {
      if (!heard) cut(client); // the cancel could hit a later statement
      else if (!done) last = setTimeout(cut, OBEY, client);
    });
  };
  const timer = limit && setTimeout(stop, limit);
  const left = until - now();
  const given = left <= FOREVER && setTimeout(cut, Math.max(0, left), client);
  signal?.addEventListener('abort', stop);
  try {
    const { rows: [row] } = await client.query({ text, values, types, rowMode: 'array', query_timeout: FOREVER });
    return row?.length === 1 ? row[0] : row;
  } catch (error) {
    throw translate(error);
  } finally {
    done = true;
    clearTimeout(timer);
    clearTimeout(given);
    signal?.removeEventListener('abort', stop);
    await stopping; // otherwise the cancel could hit the next statement
    clearTimeout(last);
  }
}

// A killed client's waiter leaves the queue. A setting other than 0 stays.
const CHECK = ["SELECT set_config('client_connection_check_interval', '500ms', false)"
  + " WHERE current_setting('client_connection_check_interval') = '0'"];
const UNCHECK = ["SELECT set_config('client_connection_check_interval', '0', false)"];

/** A connection that is made, or taken from the program's pool, when it is needed, and again after a failure */
export class Line {
  client;
  session = false; // does it have a session's locks, tickets or watches?
  waits = false; // may a call wait for a lock?
  listens; // an event and its listener
  #loan;
  #checked = false;
  sent; // the time before the last statement was sent
  doubt = false; // may an earlier attempt have been executed, too?

  constructor(config, patience, given) {
    Object.assign(this, { config, patience, given, client: given });
  }

  /**
   * Executes a call. If the connection breaks or does not answer within the limit, retries over a new one, until that
   * time, or until the patience with an unreachable server ends. Without a limit, uses a connection until it breaks.
   * Never replaces or closes the program's own connection.
   */
  async ask(statement, { until = Infinity, limit = GRACE, signal } = {}) {
    let end = Math.min(until, now() + this.patience);
    let tried = false;
    this.doubt = false;
    for (const pause of pauses()) {
      const doubt = tried; // unlike the line's, no other call resets it
      if (signal?.aborted) throw cancelled(signal);
      try {
        if (!this.client) {
          const lent = { until: Math.min(until, Math.max(now() + GRACE, end)), signal };
          this.#loan = await lend(this.config, 'dlock', lent);
          this.client = this.#loan.client;
          if (this.waits) await this.#checkClient(until);
        }
        const what = typeof statement === 'function' ? statement() : statement;
        this.sent = now();
        tried = true;
        return await ask(this.client, what,
          { signal, until: this.given ? Infinity : Math.min(until, this.sent + limit) });
      } catch (error) {
        if (signal?.aborted) throw cancelled(signal);
        const late = error instanceof QuorumLate;
        const away = error instanceof ConnectionLost || error instanceof NotPrimary;
        if (this.given || !(away || late && until < Infinity)) {
          if (error instanceof DlockError) error.doubt = doubt;
          throw error;
        }
        this.doubt ||= this.client !== undefined;
        if (away) {
          if (this.client && limit === Infinity) end = Math.min(until, now() + this.patience);
          await this.close(false);
        }
        const left = (late ? until : end) - now();
        if (left <= 0) {
          error.doubt = tried;
          throw error;
        }
        await sleep(Math.min(pause, left), undefined, { signal }).catch(() => {});
      }
    }
    return undefined;
  }

  get pooled() {
    return this.#loan?.pooled ?? false;
  }

  async #checkClient(until) {
    await ask(this.client, CHECK, { until: Math.min(until, now() + GRACE) })
      .then((set) => { this.#checked = set !== undefined; }, () => {});
  }

  /** Returns a clean connection to the pool; if it may not be clean, closes it. */
  async close(good = true) {
    const loan = this.#loan;
    if (!loan) return;
    this.#loan = this.client = undefined;
    const clean = good && loan.pooled && (await this.#clean(loan.client).then(() => true, () => false));
    await loan.end(clean && !loan.client.ended);
  }

  async #clean(client) {
    const limits = { until: now() + GRACE };
    if (client.getTransactionStatus && client.getTransactionStatus() !== 'I')
      await ask(client, ['ROLLBACK'], limits);
    if (this.session) await ask(client, ['SELECT dlock_release_all()'], limits);
    if (this.#checked) await ask(client, UNCHECK, limits);
    if (this.listens) {
      await ask(client, [`UNLISTEN "${await ask(client, ['SELECT dlock_channel()'], limits)}"`], limits);
      for (const [event, listener] of this.listens) client.off(event, listener);
    }
    this.#checked = false;
    this.listens = undefined;
  }
}
