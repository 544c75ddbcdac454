// The scenarios of clients/scenarios.md, for the JavaScript client
//
// Each row has one function with its name. test/t/client_node.pl starts this program.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { readSync, writeSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';
import * as dlock from 'dlock-client';

const { now, Lock, Locks, LockLost, LockTimeout, Cancelled } = dlock;
const TIMEOUT = Number(process.env.PG_TEST_TIMEOUT_DEFAULT) * 1000;
const LONG = 3600000;
const SHORT = 2000 * Math.max(1, Math.floor(TIMEOUT / 180000));
const KEPT = { ttl: LONG, interval: 500 };

const url = (server, user = 'app', rest = '') => `postgres://${user}@${process.env[`DLOCK_${server}`]}/postgres${rest}`;
const MAIN = url('MAIN');
const locks = new Locks(MAIN, { patience: TIMEOUT });
const late = (options) =>
  new Locks(url('MAIN', 'app', `?options=${encodeURIComponent('-c search_path=late,public')}`), options);

//
// Support for the rows
//

const rows = {};

// No warning is allowed, for example about deprecated functions of node-postgres.
const warnings = [];
process.removeAllListeners('warning');
process.on('warning', (warning) => warnings.push(warning));

/** Asks the test that started this program for an action, and waits for it. */
function order(line) {
  writeSync(1, `! ${line}\n`);
  const answer = Buffer.alloc(5);
  for (let n = 0; n < 5;) {
    const more = readSync(0, answer, n, 5 - n);
    if (!more) process.exit(2); // the test has ended
    n += more;
  }
  assert.equal(`${answer}`, 'done\n');
}

async function until(condition, what = condition) {
  for (const end = now() + TIMEOUT; !(await condition()); await sleep(10)) assert(now() < end, `waited for ${what}`);
}

/** Another session */
class Admin {
  constructor(server = 'MAIN') {
    this.url = url(server, 'admin');
  }

  async ask(sql, ...values) {
    for (const end = now() + TIMEOUT;; await sleep(10))
      try {
        if (!this.client) {
          this.client = new pg.Client({ connectionString: this.url, application_name: 'admin' });
          this.client.on('error', () => { this.client = undefined; });
          this.client.on('end', () => { this.client = undefined; });
          await this.client.connect();
        }
        const row = Object.values((await this.client.query(sql, values)).rows[0] ?? {});
        return row.length > 1 ? row : row[0];
      } catch (error) {
        if (error.severity === 'ERROR' || now() > end) throw error;
        this.client = undefined;
      }
  }

  async until(sql, ...values) {
    await until(() => this.ask(sql, ...values), `${sql} ${values}`);
  }

  isFree(name) {
    return this.ask('SELECT dlock_try_xact_acquire($1) IS NOT NULL', name);
  }

  async left(name) {
    return Number(await this.ask('SELECT count(*) FROM dlock_locks WHERE name = $1', name));
  }

  async untilWaits(name, count = 1) {
    await this.until('SELECT count(*) = $1 FROM dlock_locks WHERE name = $2 AND NOT granted', count, name);
  }

  async force(ticket) {
    assert(await this.ask('SELECT dlock_force_release($1)', ticket));
  }

  async untilRenewed(lease, count = 1) {
    while (count--)
      await this.until('SELECT renewed_at > $1::timestamptz FROM dlock_leases WHERE lease = $2',
        await this.ask('SELECT renewed_at::text FROM dlock_leases WHERE lease = $1', lease), lease);
  }

  /** The process of the heartbeat's connection, as soon as there is one */
  async heartbeat() {
    const from = "FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'";
    await this.until(`SELECT count(*) = 1 ${from}`);
    return this.ask(`SELECT min(pid) ${from}`);
  }

  async holds(name, work) {
    await connected(async (client) => {
      const ticket = Number((await client.query('SELECT dlock_acquire($1) AS ticket', [name])).rows[0].ticket);
      await work(ticket);
      await client.query('SELECT dlock_release_all()');
    }, this.url);
  }
}

const admin = new Admin();

async function connected(work, where = MAIN) {
  const client = new pg.Client(where);
  client.on('error', () => {});
  await client.connect();
  try {
    return await work(client);
  } finally {
    await client.end();
  }
}

async function transaction(client, work) {
  await client.query('BEGIN');
  try {
    await work();
    await client.query('COMMIT');
  } catch (error) {
    await client.query('ROLLBACK');
    throw error;
  }
}

/** Does what TypeScript compiles `await using` to. */
async function using(lock, work) {
  const held = await (lock.acquire ? lock.acquire() : lock.open());
  try {
    return await work(held);
  } finally {
    await held[Symbol.asyncDispose]();
  }
}

async function raises(kind, code, work) {
  const error = await Promise.resolve().then(work).then(() => assert.fail(`no ${kind.name}`), (error) => error);
  if (error.constructor !== kind) throw error;
  assert.equal(error.code, code ?? error.code);
  return error;
}

/** Waits for the event. */
async function told(kept) {
  await new Promise((resolve) => kept.onLost(resolve));
  assert(kept.lost.aborted && kept.lost.reason instanceof LockLost);
}

const killSessions = () => admin.ask(
  "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE usename = 'app'");

const untilCallWaits = () => admin.until(
  "SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'");

/**
 * Calls of this function in the late schema wait during the work, which gets a function that lets later calls return at
 * once. Then the calls that have waited are executed, and their sessions have ended.
 */
async function abandoned(name, work) {
  let pids;
  await connected(async (other) => {
    await other.query('SELECT pg_advisory_lock(18)');
    await other.query('INSERT INTO late.waits VALUES ($1)', [name]);
    await work(() => other.query('DELETE FROM late.waits'));
    pids = await admin.ask(
      "SELECT array_agg(pid) FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'");
    assert(pids, 'no call has waited');
  }, admin.url);
  await admin.until('SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ANY ($1)', pids);
}

const isEvent = (event, expected) => assert.deepEqual({ ...event, ...expected }, event);

class Boom extends Error {}
const boom = () => { throw new Boom('boom'); };

//
// Plain use
//

rows.session_acquire_release = async () => {
  let fence;
  await locks.lock('plain', { info: 'me' }).run(async (lock) => {
    assert(!await admin.isFree('plain'));
    assert.deepEqual(await admin.ask("SELECT ticket::float8, info, scope FROM dlock_locks WHERE name = 'plain'"),
      [lock.fence, 'me', 'session']);
    lock.check();
    fence = lock.fence;
  });
  assert.equal(await admin.left('plain'), 0);
  await using(locks.lock('plain'), async (lock) => {
    assert(lock.fence > fence);
    assert(!await admin.isFree('plain'));
  });
  assert.equal(await admin.left('plain'), 0);
};

rows.session_exception = async () => {
  await raises(Boom, undefined, () => locks.lock('plain').run(boom));
  await raises(Boom, undefined, () => using(locks.lock('plain'), boom));
  assert.equal(await admin.left('plain'), 0);
};

rows.session_on_connection = () => connected(async (client) => {
  await new Lock(client, 'plain').run(async (outer) => {
    await new Lock(client, 'plain').run(async (inner) => {
      assert.equal(inner.fence, outer.fence);
      await client.query('SELECT 1');
    });
    assert(!await admin.isFree('plain'));
  });
  assert(await admin.isFree('plain'));
  await client.query('SELECT 1');
  await raises(dlock.BadArgument, '22023', () => new Lock(client, 'plain', { ttl: LONG }));
  await raises(dlock.BadArgument, '22023', () => new Lock(new pg.Pool(), 'plain'));
});

rows.lock_used_twice = async () => {
  for (const options of [{}, { ttl: LONG }]) {
    const lock = locks.lock('twice', options);
    let waiting;
    await admin.holds('twice', async () => {
      waiting = [lock.acquire(), lock.acquire()];
      await raises(dlock.WrongState, '55000', () => waiting[1]);
      await admin.untilWaits('twice');
    });
    const { fence } = await waiting[0];
    await raises(dlock.WrongState, '55000', () => lock.acquire());
    lock.check();
    await lock.release();
    await raises(dlock.WrongState, '55000', () => lock.release());
    assert.equal(await admin.left('twice'), 0);
    await lock.run(() => assert(lock.fence > fence));
  }
};

rows.check_unheld = () => connected((client) => transaction(client, async () => {
  const refused = (kept) => raises(dlock.WrongState, '55000', () => kept.check());
  for (const kept of [locks.lock('plain'), locks.lock('plain', { ttl: LONG }), locks.lease({ ttl: LONG }),
    new Lock(client, 'plain', { scope: 'transaction' })]) {
    await refused(kept);
    await kept.run(() => kept.check());
    await refused(kept);
  }
}));

// Each scope requests a lock that another session holds.
const busy = (timeout) => admin.holds('busy', () => connected(async (client) => {
  for (const lock of [locks.lock('busy', { timeout }), locks.lock('busy', { timeout, ttl: LONG }),
    new Lock(client, 'busy', { timeout })]) {
    await raises(LockTimeout, '55P03', () => lock.acquire());
    assert.equal(await admin.left('busy'), 1);
  }
  await raises(LockTimeout, '55P03',
    () => transaction(client, () => new Lock(client, 'busy', { scope: 'transaction', timeout }).acquire()));
  assert.equal(await admin.left('busy'), 1);
}));

rows.try_busy = () => busy(0);
rows.timeout = () => busy(50);

rows.shared = async () => {
  await locks.lock('shared', { shared: true }).run((first) =>
    locks.lock('shared', { shared: true }).run(async (second) => {
      assert.notEqual(first.fence, second.fence);
      await raises(LockTimeout, '55P03', () => locks.lock('shared', { timeout: 0 }).acquire());
      assert.equal(await admin.ask("SELECT count(*) FROM dlock_locks WHERE name = 'shared' AND granted"), '2');
    }));
  await locks.lock('shared', { timeout: 0 }).run(() => {});
};

rows.slots = async () => {
  const big = await locks.lock('slots', { slots: 3, permits: 2 }).acquire();
  await locks.lock('slots', { slots: 3 }).run(async () => {
    await raises(LockTimeout, '55P03', () => locks.lock('slots', { slots: 3, timeout: 0 }).acquire());
    await raises(dlock.WrongState, '55000', () => locks.lock('slots', { slots: 4 }).acquire());
    await big.release();
    await locks.lock('slots', { slots: 3, timeout: 0 }).run(() => {});
  });
};

rows.resize = async () => {
  const root = new Locks(admin.url);
  const shown = () => admin.ask("SELECT slots FROM dlock_slots WHERE name = 'slots'");
  await raises(dlock.NotAllowed, '42501', () => locks.resize('slots', 1));
  await root.resize('slots', 1);
  assert.equal(await shown(), 1);
  await root.resize('slots', null);
  assert.equal(await shown(), undefined);
};

rows.transaction_commit = () => connected(async (client) => {
  await transaction(client, async () => {
    await using(new Lock(client, 'plain', { scope: 'transaction' }), async (lock) => {
      assert.equal(lock.fence, Number(await admin.ask("SELECT ticket FROM dlock_locks WHERE name = 'plain'")));
    });
    assert(!await admin.isFree('plain'));
  });
  assert(await admin.isFree('plain'));
});

rows.transaction_rollback = () => connected(async (client) => {
  await raises(Boom, undefined, () => transaction(client,
    () => new Lock(client, 'plain', { scope: 'transaction' }).run(boom)));
  assert(await admin.isFree('plain'));
});

rows.transaction_none = () => connected(async (client) => {
  await using(locks.lock('lease', { ttl: LONG }), async (lease) => {
    const lock = new Lock(client, 'plain', { scope: 'transaction' });
    for (const request of [() => lock.acquire(), () => lease.guard(client)])
      await raises(dlock.WrongState, '55000', request);
  });
  assert.equal(await admin.left('plain'), 0);
  await client.query('SELECT 1');
});

rows.lease_acquire_release = async () => {
  const lock = locks.lock('lease', { ttl: LONG, owner: 'job/1', info: 'me' });
  await using(lock, async () => {
    assert.deepEqual(
      await admin.ask("SELECT ticket::float8, scope, pid, owner, info FROM dlock_locks WHERE name = 'lease'"),
      [lock.fence, 'lease', null, 'job/1', 'me']);
    assert(!lock.lost.aborted);
    assert(lock.deadline > now());
    lock.check();
  });
  assert(!lock.lost.aborted);
  assert.equal(await admin.left('lease'), 0);
};

rows.lease_renews = () => locks.lock('lease', KEPT).run(async (lock) => {
  const { deadline } = lock;
  await admin.untilRenewed(lock.fence, 2);
  assert(!await admin.isFree('lease') && !lock.lost.aborted);
  await until(() => lock.deadline > deadline);
});

rows.lease_deadline = async () => {
  const lock = late().lock('lease', { ttl: LONG });
  let waiting, latest, done = false;
  await connected(async (other) => {
    await other.query('SELECT pg_advisory_lock(17)');
    await admin.holds('lease', async () => {
      waiting = lock.acquire().then(() => { done = true; });
      await admin.untilWaits('lease');
    });
    await untilCallWaits();
    assert(!done);
    latest = now() + LONG * 0.99;
  }, admin.url);
  await waiting;
  assert(latest - LONG < lock.deadline && lock.deadline <= latest);
  await lock.release();
};

rows.lease_many = async () => {
  const lease = locks.lease({ ttl: LONG, info: 'many' });
  const held = (count) => admin.ask(
    'SELECT count(*) = 1 AND min(held) = $1 FROM dlock_leases WHERE lease = $2', count, lease.id);
  await using(lease, async () => {
    const many = ['a', 'b', 'c'].map((name) => lease.lock(name));
    for (const lock of many) await lock.acquire();
    assert(await held(3));
    await many[0].release();
    assert(await held(2) && await admin.isFree('a') && !await admin.isFree('b'));
    await raises(LockTimeout, '55P03', () => lease.lock('b', { timeout: 0 }).acquire());
  });
  assert.equal(await admin.ask('SELECT count(*) FROM dlock_leases'), '0');
  assert(await admin.isFree('b') && await admin.isFree('c'));
  await lease.run((again) => again.lock('a').run(async () => assert(await held(1))));
};

rows.acquire_all = async () => {
  const free = () => Promise.all(['a', 'b'].map((name) => admin.isFree(name)));
  await locks.lease({ ttl: LONG }).run(async (lease) => {
    const neither = async () => {
      await until(() => !lease.heart.owed.size, 'the heartbeat to take it back');
      assert.deepEqual([await admin.left('a'), await admin.left('b')], [0, 1]);
    };
    await admin.holds('b', async () => {
      await raises(LockTimeout, '55P03', () => lease.acquireAll(['a', 'b'], { timeout: 0 }));
      await neither();
      const stop = new AbortController();
      const waiting = raises(Cancelled, '57014', () => lease.acquireAll(['a', 'b'], { signal: stop.signal }));
      await admin.untilWaits('b');
      stop.abort();
      await waiting;
      await neither();
    });
    await lease.acquireAll(['a', 'b']);
    assert.deepEqual(await free(), [false, false]);
  });
  assert.deepEqual(await free(), [true, true]);
};

rows.renew_ttl = async () => {
  for (const kept of [locks.lock('lease', { ttl: LONG }), locks.lease({ ttl: LONG })])
    await kept.run(async () => {
      const renew = async (ttl, expected = ttl) => {
        const sent = now();
        await kept.renew(ttl);
        assert.equal(Number(await admin.ask('SELECT 1000 * extract(epoch FROM ttl) FROM dlock_leases')), expected);
        assert(sent + 0.99 * expected <= kept.deadline && kept.deadline <= now() + 0.99 * expected);
      };
      await renew(2 * LONG);
      await renew(LONG / 2);
      const { deadline } = kept;
      await raises(dlock.BadArgument, '22023', () => kept.renew(1e15));
      assert.equal(kept.deadline, deadline);
      await renew(undefined, LONG / 2);
    });
  await locks.lock('plain').run((lock) => raises(dlock.WrongState, '55000', () => lock.renew(LONG)));
};

rows.change_held = async () => {
  for (const options of [{}, { ttl: LONG }])
    await raises(LockLost, '55L01', () => locks.lock('held', options).run(async (lock) => {
      const { fence } = lock;
      assert.equal(await lock.isHeld(), true);
      await lock.setInfo('changed');
      await lock.downgrade();
      assert.deepEqual(await admin.ask("SELECT ticket::float8, info, mode FROM dlock_locks WHERE name = 'held'"),
        [fence, 'changed', 'shared']);
      assert.equal(lock.fence, fence);
      await admin.force(fence);
      assert.equal(await lock.isHeld(), false);
      await raises(LockLost, '55L01', () => lock.downgrade());
    }));
};

rows.lease_closed_under_lock = async () => {
  const lease = await locks.lease({ ttl: LONG }).open();
  const lock = await lease.lock('closed').acquire();
  await lease.close();
  assert.equal(await admin.left('closed'), 0);
  await told(lock);
  await raises(LockLost, '55L01', () => lock.check());
  await raises(LockLost, '55L01', () => lock.release());
  await lease.close();
  assert(!lease.lost.aborted);
};

const seesLeases = async (count) => assert.equal(await admin.ask('SELECT count(*)::int FROM dlock_leases'), count);

rows.lease_opened_twice = async () => {
  const lease = locks.lease({ ttl: LONG });
  const opening = lease.open();
  await raises(dlock.WrongState, '55000', () => lease.open());
  await opening;
  await raises(dlock.WrongState, '55000', () => lease.open());
  await seesLeases(1);
  await lease.close();
  await seesLeases(0);
};

rows.lease_closed_while_opening = async () => {
  const lease = locks.lease({ ttl: LONG });
  order('freeze');
  const opening = lease.open();
  await raises(dlock.WrongState, '55000', () => lease.open());
  const closing = lease.close();
  order('thaw');
  await Promise.all([opening, closing]);
  await seesLeases(0);
  await lease.run(() => seesLeases(1));
};

const atMost = (count) => admin.ask("SELECT count(*) <= $1 FROM pg_stat_activity WHERE usename = 'app'", count);

rows.connections = async () => {
  const few = async () => assert(await atMost(4));
  await locks.lease({ ttl: LONG }).run(async (lease) => {
    const many = Array.from({ length: 1000 }, (_, n) => lease.lock(`many/${n}`));
    await Promise.all(many.map((lock) => lock.acquire()));
    await few();
    for (let n = 0; n < 10; n++) many.push(await locks.lock(`own/${n}`, { ttl: LONG }).acquire());
    await few();
    for (const lock of many) await lock.release();
    await few();
  });
};

rows.connections_waiting = () => locks.lease({ ttl: LONG }).run((lease) => connected(async (holder) => {
  await holder.query("SELECT count(dlock_acquire('busy/' || n)) FROM generate_series(1, 20) AS n");
  const waiting = Array.from({ length: 20 }, (_, n) => (
    n < 10 ? lease.lock(`busy/${n + 1}`) : locks.lock(`busy/${n + 1}`, { ttl: LONG })).acquire());
  await admin.until('SELECT count(*) = 20 FROM dlock_locks WHERE NOT granted');
  assert(await atMost(22));
  await holder.query('SELECT dlock_release_all()');
  const held = await Promise.all(waiting);
  await until(() => atMost(4), 'the connections to be closed');
  await Promise.all(held.map((lock) => lock.release()));
}, admin.url));

rows.lease_same_owner = async () => {
  const fence = await connected(async (client) => Number(
    (await client.query("SELECT dlock_ttl_acquire('lease', '1 h', owner => 'job/1') AS fence")).rows[0].fence));
  await locks.lock('lease', { ttl: 2 * LONG, owner: 'job/1', timeout: 0 }).run(async (lock) => {
    assert.equal(lock.fence, fence);
    assert(lock.deadline < now() + LONG);
    await raises(LockTimeout, '55P03', () => locks.lock('lease', { ttl: LONG, owner: 'job/2', timeout: 0 }).acquire());
  });
  assert.equal(await admin.left('lease'), 0);
};

rows.guard_commits = async () => {
  await locks.lock('lease', { ttl: LONG }).run((lock) => connected((client) => transaction(client, async () => {
    await lock.guard(client);
    await client.query('INSERT INTO data VALUES (1)');
  })));
  assert.equal(await admin.ask('SELECT count(*) FROM data WHERE n = 1'), '1');
};

rows.guard_refuses = async () => {
  await raises(LockLost, '55L01', () => locks.lock('lease', { ttl: LONG }).run((lock) => connected(async (client) => {
    await admin.force(lock.fence);
    await raises(LockLost, '55L01', () => transaction(client, async () => {
      await lock.guard(client);
      await client.query('INSERT INTO data VALUES (2)');
    }));
  })));
  assert.equal(await admin.ask('SELECT count(*) FROM data WHERE n = 2'), '0');
};

rows.enqueue_free = () => using({ open: async () => locks.tickets() }, async (tickets) => {
  const coming = tickets.next({ timeout: TIMEOUT });
  const ticket = await tickets.enqueue('queue');
  assert.deepEqual(await coming, { event: 'granted', lock: 'queue', ticket });
  const another = await tickets.enqueue('next');
  assert.deepEqual(await tickets.next({ timeout: TIMEOUT }), { event: 'granted', lock: 'next', ticket: another });
  assert.equal(await tickets.next({ timeout: 0 }), undefined);
  await tickets.release(ticket);
  assert(await admin.isFree('queue') && !await admin.isFree('next'));
  await raises(Cancelled, '57014', () => tickets.next({ signal: AbortSignal.timeout(10) }));
});

rows.enqueue_waits = () => using({ open: async () => locks.tickets() }, async (tickets) => {
  let ticket;
  await admin.holds('queue', async () => {
    ticket = await tickets.enqueue('queue');
    assert.equal(await tickets.next({ timeout: 0 }), undefined);
  });
  assert.deepEqual(await tickets.next({ timeout: TIMEOUT }), { event: 'granted', lock: 'queue', ticket });
});

rows.enqueue_thousands = () => connected(async (holder) => {
  const count = 2000;
  const tickets = locks.tickets();
  await holder.query("SELECT count(dlock_acquire('job/' || n)) FROM generate_series(1, $1) AS n", [count]);
  const waiting = new Set();
  for (let n = 1; n <= count; n++) waiting.add(await tickets.enqueue(`job/${n}`));
  assert.equal(waiting.size, count);
  assert.equal(await admin.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock'"), '1');
  await holder.query('SELECT dlock_release_all()');
  for (let n = 0; n < count; n++) {
    const { event, ticket } = await tickets.next({ timeout: TIMEOUT });
    assert(event === 'granted' && waiting.delete(ticket));
  }
  assert.equal(await tickets.next({ timeout: 0 }), undefined);
  await tickets.close();
}, admin.url);

rows.enqueue_connection_killed = () => locks.lease({ ttl: LONG }).run(async (lease) => {
  const ours = locks.tickets();
  const unread = locks.tickets();
  const released = locks.tickets();
  const kept = locks.tickets({ lease });
  let held, waits;
  await admin.holds('busy', async () => {
    await unread.enqueue('unread');
    const gone = await released.enqueue('released');
    await ours.enqueue('free');
    assert.equal((await ours.next({ timeout: TIMEOUT })).event, 'granted');
    held = await kept.enqueue('kept');
    waits = await kept.enqueue('busy');
    assert.deepEqual(await kept.next({ timeout: TIMEOUT }), { event: 'granted', lock: 'kept', ticket: held });
    await killSessions();
    await raises(LockLost, '55L01', () => ours.next({ timeout: TIMEOUT }));
    await raises(LockLost, '55L01', () => unread.enqueue('other'));
    await raises(LockLost, '55L01', () => released.release(gone));
    for (const [tickets, lock] of [[ours, 'free'], [unread, 'other'], [released, 'released']]) {
      const ticket = await tickets.enqueue(lock);
      assert.deepEqual(await tickets.next({ timeout: TIMEOUT }), { event: 'granted', lock, ticket });
    }
    assert.equal(await kept.next({ timeout: 0 }), undefined);
    assert.deepEqual(await admin.ask(
      'SELECT array_agg(ticket::float8 ORDER BY ticket) FROM dlock_locks WHERE lease = $1', lease.id), [held, waits]);
  });
  assert.deepEqual(await kept.next({ timeout: TIMEOUT }), { event: 'granted', lock: 'busy', ticket: waits });
  assert.equal(await kept.next({ timeout: 0 }), undefined);
  await kept.release(waits);
  await kept.release(held);
  for (const tickets of [kept, ours, unread, released]) await tickets.close();
});

rows.enqueue_released = async () => {
  const tickets = locks.tickets();
  const ticket = await tickets.enqueue('queue');
  assert.equal((await tickets.next({ timeout: TIMEOUT })).event, 'granted');
  await admin.force(ticket);
  assert.deepEqual(await tickets.next({ timeout: TIMEOUT }), { event: 'released', lock: 'queue', ticket });
  await raises(LockLost, '55L01', () => tickets.release(ticket));
  const waiting = raises(dlock.WrongState, '55000', () => tickets.next());
  await tickets.close();
  await waiting;
};

rows.election_hand_over = async () => {
  const led = [], leave = [], returned = [];
  const campaign = (n) => locks.election('leader', { ttl: LONG, info: `node-${n}` }).run(async (lock) => {
    led.push(lock.fence);
    await new Promise((resolve) => { leave[n] = resolve; });
    return n;
  }).then((result) => returned.push(result));
  const first = campaign(0);
  await until(() => leave[0]);
  const second = campaign(1);
  await admin.untilWaits('leader');
  assert.equal(await admin.ask("SELECT info FROM dlock_locks WHERE name = 'leader' AND granted"), 'node-0');
  assert.equal(led.length, 1);
  leave[0]();
  await first;
  await until(() => leave[1]);
  leave[1]();
  await second;
  assert.deepEqual(returned, [0, 1]);
  assert(led[0] < led[1]);

  await admin.holds('leader', async () => {
    const stop = new AbortController();
    const running = locks.election('leader', { ttl: LONG }).run(() => {}, { signal: stop.signal });
    await admin.untilWaits('leader');
    stop.abort();
    await raises(Cancelled, '57014', () => running);
    assert.equal(await admin.left('leader'), 1);
  });
};

rows.election_lost = async () => {
  const fences = [];
  const work = (told) => async (lock) => {
    fences.push(lock.fence);
    if (fences.length % 2) {
      await admin.force(lock.fence);
      await told(lock);
    }
    return fences.length;
  };
  // the work returns after the loss
  assert.equal(await locks.election('leader', KEPT).run(work(told)), 2);
  assert.equal(await locks.election('leader', KEPT)
    .run(work((lock) => sleep(TIMEOUT, undefined, { signal: lock.lost }))), 4);
  assert.deepEqual(fences, fences.toSorted?.() ?? fences);
  await raises(Boom, undefined, () => locks.election('leader', KEPT).run(boom));
};

rows.election_restart = async () => {
  const running = await locks.lease(KEPT).run(async (lease) => {
    await lease.lock('leader').acquire();
    const hasty = new Locks(MAIN, { patience: 0 });
    let led = false;
    const running = hasty.election('leader', { ttl: LONG }).run(() => { led = true; return 'led'; });
    await admin.untilWaits('leader');
    order('restart');
    await admin.untilRenewed(lease.id);
    assert(!led);
    return [running];
  });
  assert.equal(await running[0], 'led');
};

rows.election_outage = async () => {
  const hasty = new Locks(MAIN, { patience: 0 });
  const fences = [];
  let returned = false;
  const running = hasty.election('leader', { ttl: SHORT }).run(async (lock) => {
    fences.push(lock.fence);
    if (fences.length > 1) return;
    await told(lock);
    returned = true;
  });
  await until(() => fences.length);
  await admin.heartbeat();
  order('freeze');
  await until(() => returned);
  order('thaw');
  await running;
  assert(fences[0] < fences[1]);
};

rows.watch = async () => {
  const events = locks.watch('leader');
  const next = async () => (await events.next()).value;
  isEvent(await next(), { event: 'free', lock: 'leader' });
  await connected(async (client) => {
    const ticket = Number((await client.query("SELECT dlock_acquire('leader', info => 'node-1') AS t")).rows[0].t);
    isEvent(await next(), { event: 'held', lock: 'leader', ticket, info: 'node-1' });
    await killSessions();
    // over a new connection, the first event is the current holder
    isEvent(await next(), { event: 'held', ticket });
    await client.query('SELECT dlock_release_all()');
  }, admin.url);
  isEvent(await next(), { event: 'free', lock: 'leader' });
  await events.return();
};

rows.observer = async () => {
  const seen = [];
  const observer = ({ what, name, scope, ms, error }) => {
    seen.push([what, name, scope, error?.code].join(' ').trim());
    assert(ms >= 0);
    boom();
  };
  const observed = new Locks(MAIN, { observer });
  await observed.lock('plain').run(() => {});
  await admin.holds('busy', () => raises(
    LockTimeout, '55P03', () => observed.lock('busy', { ttl: LONG, timeout: 0 }).acquire()));
  await observed.lease(KEPT).run((lease) => raises(LockLost, '55L01', () => lease.lock('lost').run(async (lock) => {
    await admin.force(lock.fence);
    await told(lock);
  })));
  assert.deepEqual(seen, ['waited plain session', 'held plain session', 'failed busy lease 55P03',
    'waited lost lease', 'lost lost lease']);
  await until(() => warnings.length === seen.length);
  assert(warnings.splice(0).every((warning) => warning instanceof Boom));
};

rows.errors = async () => {
  const fails = (kind, code, sql, ...values) => raises(kind, code,
    () => connected((client) => client.query(sql, values).catch((error) => { throw dlock.translate(error); })));

  await admin.holds('busy', async () => {
    await raises(LockTimeout, '55P03', () => locks.lock('busy', { timeout: 0 }).acquire());
    const waiting = raises(Cancelled, '57014', () => locks.lock('busy').acquire());
    await admin.untilWaits('busy');
    assert(await admin.ask('SELECT pg_cancel_backend(pid) FROM dlock_locks WHERE NOT granted'));
    await waiting;
  });
  await connected((one) => connected(async (two) => {
    const [a, b] = [new Lock(one, 'a'), new Lock(two, 'b')];
    await a.acquire();
    await b.acquire();
    const crosswise = [new Lock(one, 'b'), new Lock(two, 'a')].map((lock, n) => lock.acquire().then(
      () => lock.release(), async (error) => {
        await [a, b][n].release();
        return error;
      }));
    const errors = (await Promise.all(crosswise)).filter(Boolean);
    assert.equal(errors.length, 1);
    assert(errors[0] instanceof dlock.Deadlock && errors[0].code === '40P01' && errors[0].detail);
  }));
  await fails(LockLost, '55L01', "SELECT dlock_guard('gone', 1)");
  await raises(dlock.NotAllowed, '42501', () => locks.lock('reserved/1').acquire());
  await raises(dlock.NotPrimary, '25006', () => new Locks(url('STANDBY'), { patience: 0 }).lock('standby').acquire());
  await fails(dlock.StaleVersion, '40001', "SELECT dlock_version_bump('doc', 7)");
  await raises(dlock.BadArgument, '22023', () => locks.lock('slots', { slots: 0 }).acquire());
  await raises(dlock.BadArgument, '22004', () => locks.lock(null).acquire());
  await locks.lock('slots', { slots: 2 }).run(
    () => raises(dlock.WrongState, '55000', () => locks.lock('slots', { slots: 3 }).acquire()));
  for (const [kind, code] of [[dlock.NoRoom, '53200'], [dlock.NoRoom, '53400'], [dlock.QuorumLate, '58030'],
    [dlock.DlockError, '22012']])
    assert.equal((await fails(kind, code, 'SELECT raise($1, $2)', code, 'do this')).hint, 'do this');
  await raises(dlock.ConnectionLost, undefined,
    () => new Locks('postgres://127.0.0.1:1', { patience: 0 }).lock('x').acquire());
  const own = new TypeError('the program\'s');
  assert.equal(dlock.translate(own), own);
};

rows.sharding = async () => {
  const names = Array.from({ length: 20 }, (_, n) => `shard/${n}`);
  const OTHER = url('OTHER');
  const both = new Locks([MAIN, OTHER], { keys: ['main', 'other'] });
  const turned = new Locks([OTHER, MAIN], { keys: ['other', 'main'] });
  const third = new Locks([MAIN, OTHER, 'postgres://nowhere'], { keys: ['main', 'other', 'third'] });
  const other = new Admin('OTHER');
  const held = [];
  for (const name of names) held.push(await both.lock(name).acquire());
  const here = [], there = [];
  for (const name of names) {
    if (await admin.left(name)) here.push(name);
    if (await other.left(name)) there.push(name);
  }
  assert(here.length && there.length && here.length + there.length === 20);
  assert.deepEqual([...here, ...there].sort(), [...names].sort());
  for (const name of names) {
    await raises(LockTimeout, '55P03', () => turned.lock(name, { timeout: 0 }).acquire());
    assert(['postgres://nowhere', both.server(name)].includes(third.server(name)));
  }
  assert(names.some((name) => third.server(name) === 'postgres://nowhere'));
  for (const lock of held) await lock.release();
  await other.client.end();
};

//
// Faults
//

rows.session_connection_killed = () => raises(LockLost, '55L01', () => locks.lock('killed').run(async (lock) => {
  await killSessions();
  await admin.holds('killed', (fence) => assert(fence > lock.fence));
}));

rows.session_restart = async () => {
  const lock = locks.lock('restart');
  await raises(LockLost, '55L01', () => lock.run(() => order('restart')));
  await locks.lock('restart').run((again) => assert(again.fence > lock.fence));
};

rows.lease_connection_killed = () => locks.lock('lease', KEPT).run(async (lock) => {
  for (let n = 0; n < 2; n++) {
    await admin.heartbeat();
    await killSessions();
    await admin.untilRenewed(lock.fence);
  }
  assert(!lock.lost.aborted && await admin.ask("SELECT dlock_check('lease', $1)", lock.fence));
});

rows.lease_acquire_killed = async () => {
  const lock = locks.lock('lease', { ttl: LONG, owner: 'job/1' });
  let waiting;
  await admin.holds('lease', async () => {
    waiting = lock.acquire();
    await admin.untilWaits('lease');
    const pid = await admin.ask('SELECT pid FROM dlock_locks WHERE NOT granted');
    assert(await admin.ask('SELECT pg_terminate_backend($1, 60000)', pid));
    await admin.untilWaits('lease');
  });
  await waiting;
  assert.deepEqual(
    await admin.ask("SELECT array_agg(ticket::float8), min(owner) FROM dlock_locks WHERE name = 'lease'"),
    [[lock.fence], 'job/1']);
  await lock.release();
};

rows.lease_backend_stopped = async () => {
  await locks.lock('lease', KEPT).run(async (lock) => {
    const pid = await admin.heartbeat();
    order(`stop ${pid}`);
    await admin.untilRenewed(lock.fence, 2);
    assert(!lock.lost.aborted);
    order(`continue ${pid}`);
    assert(!await admin.isFree('lease'));
  });
  assert.equal(await admin.left('lease'), 0);
};

rows.lease_server_stopped = async () => {
  await raises(LockLost, '55L01', () => locks.lock('lease', { ttl: SHORT }).run(async (lock) => {
    await admin.heartbeat();
    order('freeze');
    await told(lock);
    await raises(LockLost, '55L01', () => lock.check());
    order('thaw');
    assert(await admin.ask('SELECT true'));
    assert(lock.lost.aborted);
  }));
  await admin.until("SELECT dlock_try_xact_acquire('lease') IS NOT NULL");
};

const raisesLoss = (work) => raises(LockLost, '55L01', work);

rows.lease_client_stopped = () => raisesLoss(() => locks.lock('lease', { ttl: SHORT }).run(async (lock) => {
  let called = false;
  const { lost } = lock;
  lock.onLost(() => { called = true; });
  order(`suspend ${process.pid} SELECT dlock_try_xact_acquire('lease') IS NOT NULL`);
  assert(lost.aborted);
  assert(called);
  assert(await admin.ask('SELECT true') && lock.lost.aborted);
  await admin.holds('lease', (fence) => assert(fence > lock.fence));
}));

rows.lease_restart = async () => {
  await locks.lock('lease', KEPT).run(async (lock) => {
    order('restart');
    await admin.untilRenewed(lock.fence, 2);
    assert(!lock.lost.aborted);
    assert(await admin.ask("SELECT dlock_check('lease', $1)", lock.fence));
  });
  assert.equal(await admin.left('lease'), 0);
};

rows.lease_worker_killed = async () => {
  const successor = locks.lock('lease', { ttl: LONG });
  let waiting;
  await locks.lock('lease', KEPT).run(async (lock) => {
    waiting = successor.acquire();
    await admin.untilWaits('lease');
    assert(await admin.ask(
      "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE backend_type = 'dlock worker'"));
    await admin.untilRenewed(lock.fence, 2);
    assert(!lock.lost.aborted);
  });
  await waiting;
  await successor.release();
};

rows.lease_forced_release = () => raises(LockLost, '55L01', () => locks.lock('lease', KEPT).run(async (lock) => {
  await admin.force(lock.fence);
  await told(lock);
  assert(lock.lost.aborted && !lock.held);
}));

rows.lease_forced_one_of_many = async () => {
  await locks.lease(KEPT).run((lease) => lease.lock('kept').run((kept) =>
    raises(LockLost, '55L01', () => lease.lock('forced').run(async (forced) => {
      await admin.force(forced.fence);
      await told(forced);
      assert(!kept.lost.aborted && !lease.lost.aborted);
    }))));
  assert.equal(await admin.left('kept'), 0);
};

rows.lease_quorum_late = () => late().lock('lease', KEPT).run(async (lock) => {
  await admin.heartbeat();
  await admin.untilRenewed(lock.fence);
  await admin.ask('UPDATE late.quorum SET late = true RETURNING true');
  const called = await admin.ask('SELECT last_value FROM late.calls');
  // the first call may have been sent before the update
  await admin.until('SELECT last_value > $1::bigint + 1 FROM late.calls', called);
  const { deadline } = lock;
  await admin.until('SELECT last_value > $1::bigint + 3 FROM late.calls', called);
  assert(lock.deadline === deadline && !lock.lost.aborted);
  await admin.ask('UPDATE late.quorum SET late = false RETURNING true');
  await until(() => lock.deadline > deadline);
  assert(!lock.lost.aborted);
});

rows.lease_opened_late = async () => {
  await raises(LockLost, '55L01', () => late().lease({ ttl: 1000 }).run((lease) => lease.check()));
  await admin.until('SELECT count(*) = 0 FROM dlock_leases');
  await admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'app'");
};

rows.lease_callback = async () => {
  const called = [];
  const callback = (name) => (lock) => { called.push([name, lock]); };
  const lock = locks.lock('lease', KEPT);
  await raises(LockLost, '55L01', () => lock.run(async () => {
    lock.onLost((lost) => {
      callback('bad')(lost);
      boom();
    });
    lock.onLost(callback('good'));
    await admin.force(lock.fence);
    await told(lock);
    lock.onLost(callback('late'));
  }));
  assert.deepEqual(called, [['bad', lock], ['good', lock], ['late', lock]]);
  await until(() => warnings.length);
  assert(warnings.shift() instanceof Boom);
};

rows.lease_callback_hangs = () => raisesLoss(() => locks.lease({ ttl: SHORT, interval: 200 }).run(async (lease) => {
  const lock = await lease.lock('lease').acquire();
  const clock = new Int32Array(new SharedArrayBuffer(4));
  lock.onLost(() => {
    // this blocks the event loop until it returns
    order('freeze');
    for (const end = now() + TIMEOUT; !lease.lost.aborted && now() < end;) Atomics.wait(clock, 0, 0, 10);
    called = lease.lost.aborted;
    order('thaw');
  });
  let called;
  await admin.force(lock.fence);
  await until(() => called !== undefined);
  assert(called);
}));

rows.acquire_client_timeout = async () => {
  const gone = () => admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL");
  // the timer of pg cancels the request, as a signal does; by itself it would leave the waiter in the queue
  const impatient = new Locks({ connectionString: MAIN, query_timeout: 100 });
  for (const options of [{}, { ttl: LONG }]) {
    await admin.holds('busy', async () => {
      await raises(Cancelled, '57014', () => locks.lock('busy', options).acquire({ signal: AbortSignal.timeout(100) }));
      assert.equal(await admin.left('busy'), 1);
      await raises(Cancelled, '57014', () => impatient.lock('busy', options).acquire());
      assert.equal(await admin.left('busy'), 1);
    });
    await gone();
  }
  await admin.holds('busy', () => connected(async (client) => {
    await raises(Cancelled, '57014', () => new Lock(client, 'busy').acquire());
    assert.equal(await admin.left('busy'), 1);
    assert.deepEqual((await client.query('SELECT 1 AS one')).rows, [{ one: 1 }]);
  }, { connectionString: MAIN, query_timeout: 100 }));
  await gone();
};

rows.acquire_cancelled = async () => {
  for (const options of [{}, { ttl: LONG }]) {
    await admin.holds('busy', async () => {
      const stop = new AbortController();
      const waiting = raises(Cancelled, '57014', () => locks.lock('busy', options).acquire({ signal: stop.signal }));
      await admin.untilWaits('busy');
      stop.abort('enough');
      assert.equal((await waiting).cause, 'enough');
      assert.equal(await admin.left('busy'), 1);
    });
    await admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL");

    // canceled after the grant, before its answer has arrived
    const stop = new AbortController();
    const waiting = locks.lock('busy', options).acquire({ signal: stop.signal }).catch((error) => error);
    await until(() => admin.left('busy'));
    stop.abort();
    const result = await waiting;
    if (result instanceof Lock) await result.release();
    else assert(result instanceof Cancelled);
    await admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'busy'");
  }
};

rows.acquire_broken_off = () => locks.lease({ ttl: LONG }).run((lease) => connected(async (client) => {
  const kept = await lease.lock('kept').acquire();
  for (const lock of [locks.lock('busy'), locks.lock('busy', { ttl: LONG }), lease.lock('busy'),
    new Lock(client, 'busy')]) {
    await admin.holds('busy', async () => {
      const ending = new AbortController();
      const waiting = raises(Cancelled, '57014', () => lock.acquire({ signal: ending.signal }));
      await admin.untilWaits('busy');
      ending.abort();
      ending.abort();
      await waiting;
      assert.equal(await admin.left('busy'), 1);
      await client.query('SELECT 1');
    });
    await admin.until("SELECT dlock_try_xact_acquire('busy') IS NOT NULL");
  }
  // canceled at each moment of the connect
  await admin.holds('busy', async () => {
    for (let ms = 0; ms < 10; ms++)
      await raises(Cancelled, '57014', () => locks.lock('busy').acquire({ signal: AbortSignal.timeout(ms) }));
    await admin.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'");
  });
  kept.check();
}));

rows.waiter_killed = () => admin.holds('busy', async () => {
  const program = 'import { Locks } from "dlock-client";'
    + `await new Locks(process.argv[1]).lock("busy", { ttl: ${LONG} }).acquire()`;
  const waiter = spawn(process.execPath, ['--input-type=module', '-e', program, MAIN],
    { cwd: import.meta.dirname ?? new URL('.', import.meta.url).pathname, stdio: 'inherit' });
  await admin.untilWaits('busy');
  waiter.kill('SIGKILL');
  await admin.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'");
});

rows.server_silent = async () => {
  const hasty = new Locks(MAIN, { patience: 1000 });
  const session = await locks.lock('mine').acquire();
  await admin.holds('busy', async () => {
    const ending = new AbortController();
    const waiting = raises(Cancelled, '57014', () => locks.lock('busy', { ttl: LONG }).acquire({ signal: ending.signal }));
    await admin.untilWaits('busy');
    order('freeze');
    ending.abort();
    await Promise.all([
      waiting,
      raises(LockLost, '55L01', () => session.release()),
      raises(dlock.ConnectionLost, undefined, () => hasty.lease({ ttl: LONG }).open()),
      ...[{}, { ttl: LONG }].map((options) => raises(
        dlock.ConnectionLost, undefined, () => hasty.lock('x', { timeout: 50, ...options }).acquire())),
    ]);
    order('thaw');
  });
  await admin.until('SELECT count(*) = 0 FROM dlock_locks');
};

rows.release_silent = () => locks.lease(KEPT).run(async (lease) => {
  const held = [await lease.lock('silent').acquire(), await locks.lock('own', KEPT).acquire()];
  const pids = await admin.ask("SELECT array_agg(pid) FROM pg_stat_activity WHERE application_name = 'dlock'");
  for (const pid of pids) order(`stop ${pid}`);
  for (const lock of held) {
    await lock.release();
    assert.equal(await admin.left(lock.name), 0);
  }
  assert(!lease.lost.aborted);
  for (const pid of pids) order(`continue ${pid}`);
});

rows.release_owed = () => new Locks(MAIN, { patience: 100 }).lease(KEPT).run(async (lease) => {
  const lock = await lease.lock('owed').acquire();
  await killSessions();
  order('freeze');
  await raises(dlock.ConnectionLost, undefined, () => lock.release());
  order('thaw');
  await admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'");
  assert(!lease.lost.aborted);
  await lease.lock('owed', { timeout: 0 }).run(() => {});
});

// Neither a cancel nor a check ends a request over such a connection.
async function stubborn() {
  const client = new pg.Client(url('MAIN', 'app', '?options=-c%20client_connection_check_interval=1h'));
  await client.connect();
  return Object.assign(client, { port: 1 }); // only cancels use it now
}

rows.acquire_owed = () => new Locks(stubborn, { patience: 100 }).lease(KEPT).run(async (lease) => {
  await admin.holds('owed', async () => {
    const stop = new AbortController();
    const waiting = raises(Cancelled, '57014', () => lease.lock('owed').acquire({ signal: stop.signal }));
    await admin.untilWaits('owed');
    order('freeze');
    stop.abort();
    await waiting;
    order('thaw');
  });
  await admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'");
  await admin.untilRenewed(lease.id);
  assert(!lease.lost.aborted);
});

const JOB = { ttl: LONG, owner: 'job/1' };
const isHeld = (lock) => admin.ask('SELECT dlock_check($1, $2)', lock.name, lock.fence);

rows.release_late = async () => {
  const impatient = late({ patience: 100 });
  const [first, second] = [1, 2].map(() => impatient.lock('late', JOB));
  const unanswered = (releasing) => raises(dlock.ConnectionLost, undefined, () => releasing);
  const leave = untilCallWaits; // the release goes on
  for (const wait of [unanswered, leave]) {
    const { fence } = await first.acquire();
    let releasing;
    await abandoned('dlock_release_ticket', async (waitNoMore) => {
      releasing = first.release();
      await wait(releasing);
      await waitNoMore();
      await second.acquire();
      assert(second.fence > fence);
    });
    if (wait === leave) await releasing;
    assert(await isHeld(second));
    await second.release();
  }
};

rows.release_repeated = async () => {
  const patient = late();
  await patient.lease({ ttl: LONG }).run(async (lease) => {
    const tickets = patient.tickets({ lease });
    const ticket = await tickets.enqueue('queue');
    await abandoned('dlock_release_ticket', async (waitNoMore) => {
      const releasing = tickets.release(ticket);
      await untilCallWaits();
      await admin.ask('SELECT dlock_release_ticket($1)', ticket);
      await waitNoMore();
      await releasing;
    });
    await tickets.close();
  });
};

rows.release_refused = () => connected(async (client) => {
  const lock = new Lock(client, 'plain');
  const { fence } = await lock.acquire();
  await client.query('BEGIN');
  await assert.rejects(client.query('SELECT 1 / 0'));
  await assert.rejects(lock.release(), { code: '25P02' });
  lock.check();
  await client.query('ROLLBACK');
  assert.equal(lock.fence, fence);
  assert(!await admin.isFree('plain'));
  await lock.release();
  assert(await admin.isFree('plain'));
});

rows.undo_late = async () => {
  const impatient = late({ patience: 100 });
  const [first, second] = [1, 2].map(() => impatient.lock('late', JOB));
  const cancelled = async (untilWaits) => {
    const stop = new AbortController();
    const waiting = raises(Cancelled, '57014', () => first.acquire({ signal: stop.signal }));
    await untilWaits();
    stop.abort();
    await waiting;
  };
  const held = async () => {
    assert(await isHeld(second));
    await second.release();
  };
  await abandoned('dlock_locks', async (waitNoMore) => {
    await admin.holds('late', async () => {
      await cancelled(() => admin.untilWaits('late'));
      await waitNoMore();
    });
    await second.acquire();
  });
  await held();

  // granted already, when it is canceled
  await abandoned('dlock_release_ticket', async (waitNoMore) => {
    await connected(async (other) => {
      await other.query('SELECT pg_advisory_lock(17)');
      await cancelled(untilCallWaits);
      await waitNoMore();
    }, admin.url);
    await second.acquire();
  });
  await held();
};

rows.renew_late = () => late({ patience: 100 }).lock('late', { ttl: LONG }).run(async (lock) => {
  await abandoned('dlock_renew', async (waitNoMore) => {
    await raises(dlock.ConnectionLost, undefined, () => lock.renew(LONG / 2));
    await waitNoMore();
    await lock.renew(LONG);
    assert(lock.deadline <= now() + LONG / 2);
  });
  lock.check();
});

rows.renew_lost = async () => {
  for (const after of [true, false]) {
    const impatient = late({ patience: 100 });
    const [first, second] = [1, 2].map(() => impatient.lock('late', JOB));
    const { fence } = await first.acquire();
    await abandoned('dlock_renew', async (waitNoMore) => {
      await raises(dlock.ConnectionLost, undefined, () => first.renew(SHORT));
      order('freeze');
      if (after) await told(first);
      const error = await first.release().then(() => assert.fail('released'), (error) => error);
      assert(error instanceof LockLost || error instanceof dlock.ConnectionLost, error);
      order('thaw');
      await waitNoMore();
      await second.acquire();
      assert(second.fence > fence);
    });
    assert(await isHeld(second));
    await second.release();
  }
};

rows.pool_returned = async () => {
  const pool = new pg.Pool({ connectionString: MAIN, max: 1 });
  const withClient = async (work) => {
    const client = await pool.connect();
    try {
      return await work(client);
    } finally {
      await dlock.reset(client).then(() => client.release(), (error) => client.release(error));
    }
  };
  const pid = await withClient(async (client) => {
    await new Lock(client, 'pool').acquire();
    await client.query('BEGIN');
    await client.query('SELECT 1 / 0').catch(() => {});
    return client.processID;
  });
  assert(await admin.isFree('pool'));
  await withClient(async (client) => {
    assert.equal(client.processID, pid);
    assert.deepEqual((await client.query("SELECT dlock_is_held('pool') AS held")).rows, [{ held: false }]);
  });
  await pool.end();
};

rows.clock_stepped = async () => {
  const day = 86400;
  await locks.lock('lease', KEPT).run(async (lock) => {
    const before = Date.now() / 1000;
    const { deadline } = lock;
    for (const seconds of [day, -day]) {
      order(`clock ${seconds}`);
      assert(Math.abs(Date.now() / 1000 - before - seconds) < day / 2);
      assert(!lock.lost.aborted && lock.deadline < deadline + LONG);
      await admin.untilRenewed(lock.fence);
    }
    await until(() => lock.deadline > deadline);
    assert(lock.deadline < now() + LONG);
  });
  await raises(LockLost, '55L01', () => locks.lock('lease', { ttl: SHORT }).run(async (lock) => {
    await admin.heartbeat();
    order('freeze');
    await told(lock);
    order('thaw');
  }));
  order('clock 0');
};

rows.lease_promotion = async () => {
  // the standby is tried first, and skipped
  const pair = new Locks(`postgres://app@${process.env.DLOCK_STANDBY},${process.env.DLOCK_OTHER}/postgres`);
  const promoted = new Admin('STANDBY');
  const lock = pair.lock('lease', KEPT);
  await lock.run(async () => {
    order('promote');
    await promoted.until('SELECT count(*) = 1 FROM dlock_leases WHERE lease = $1', lock.fence);
    await promoted.untilRenewed(lock.fence, 2);
    assert(!lock.lost.aborted);
    assert(await promoted.ask("SELECT dlock_check('lease', $1)", lock.fence));
  });
  assert.equal(await promoted.left('lease'), 0);
  await pair.lock('lease', { ttl: LONG }).run((next) => assert(next.fence > lock.fence));
};

let failed = 0;
const names = process.argv.slice(2);
for (const name of names.length ? names : Object.keys(rows)) {
  const began = now();
  const say = (line) => writeSync(1, `${line}\n`);
  let timer;
  try {
    const late = new Promise((_, reject) => { timer = setTimeout(reject, 1.5 * TIMEOUT, new Error('it hangs')); });
    await Promise.race([rows[name](), late]);
    await admin.until('SELECT count(*) = 0 FROM dlock_locks');
    assert.deepEqual(warnings.splice(0), []);
    // no connection is left
    await admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'app'");
    say(`ok ${name}`);
  } catch (error) {
    failed = 1;
    for (const line of `${error.stack ?? error}`.split('\n')) say(`# ${line}`);
    say(`not ok ${name}`);
    order('thaw');
    order('clock 0');
    await admin.ask('SELECT count(dlock_force_release(ticket)) FROM dlock_locks');
  }
  clearTimeout(timer);
  say(`# ${name}: ${((now() - began) / 1000).toFixed(1)} s`);
}
process.exit(failed);
