// The JavaScript client over an application's own connections, and in its transactions: pools, functions, and libraries.
// test/t/client_node_own.pl starts this, with a server in the environment.

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { connect, createServer } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { inspect } from 'node:util';
import Knex from 'knex';
import pg from 'pg';
import postgres from 'postgres';
import { DataSource } from 'typeorm';
import { QueryTypes, Sequelize } from 'sequelize';
import {
  BadArgument, Calls, Cancelled, ConnectionLost, Lock, LockLost, LockTimeout, Locks, NotAllowed, WrongState, now,
} from 'dlock-client';

const TIMEOUT = Number(process.env.PG_TEST_TIMEOUT_DEFAULT) * 1000;
const KEPT = { ttl: 3_600_000, interval: 200 };
const patience = TIMEOUT;

const other = new pg.Client({ user: process.env.ADMIN });
await other.connect();

async function admin(sql, ...values) {
  return Object.values((await other.query(sql, values)).rows[0])[0];
}

async function until(condition, what = `${condition}`) {
  for (const end = performance.now() + TIMEOUT; !await condition(); await sleep(10))
    assert(performance.now() < end, `waited for ${what}`);
}

const isFree = (name) => admin('SELECT dlock_try_xact_acquire($1) IS NOT NULL', name);
const waits = (name) => until(() => admin(
  'SELECT count(*) = 1 FROM dlock_locks WHERE name = $1 AND NOT granted', name), `a waiter for ${name}`);
const modeOf = (name) => admin("SELECT mode || ' ' || coalesce(info, '-') FROM dlock_locks($1)", name);
const renewedAt = (lease) => admin('SELECT renewed_at::text FROM dlock_leases WHERE lease = $1', lease);

async function untilRenewed(lease) {
  const before = await renewedAt(lease);
  await until(async () => (await renewedAt(lease)) > before, 'a renewal');
}

const terminate = () => admin(
  "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity"
  + " WHERE usename = 'app' AND application_name <> 'program'");

async function busy(name, work) {
  const ticket = await admin('SELECT dlock_acquire($1)', name);
  try {
    return await work();
  } finally {
    await admin('SELECT dlock_release_ticket($1)', ticket);
  }
}

const newPool = (max, options) => {
  const pool = new pg.Pool({ max, ...options });
  pool.on('error', () => {});
  return pool;
};

// State that a returned connection must not keep
async function look(pool) {
  const client = await pool.connect();
  try {
    const { rows: [{ pid, ...left }] } = await client.query(
      "SELECT pg_backend_pid() AS pid, current_setting('client_connection_check_interval') AS checks,"
      + ' (SELECT count(*) FROM pg_listening_channels()) AS listens,'
      + ' (SELECT count(*) FROM dlock_locks WHERE pid = pg_backend_pid()) AS locks');
    left.listeners = ['error', 'end', 'notification'].map((event) => client.listenerCount(event));
    return { pid, left };
  } finally {
    client.release();
  }
}

// Locks over connections that call a function, with the statement, after each answer to a statement with this text, and
// one before they connect
const passing = (text, pass, connecting = () => {}) => new Locks(async () => {
  await connecting();
  const connection = new pg.Client();
  await connection.connect();
  const query = connection.query.bind(connection);
  connection.query = async (statement) => {
    const result = await query(statement);
    if (statement.text?.includes(text)) await pass(statement.text);
    return result;
  };
  return connection;
}, { patience });

const tests = {};

//
// Sources
//

async function withPool(work) {
  const pool = newPool(1);
  try {
    await look(pool);
    const before = await look(pool);
    await work(new Locks(pool, { patience }), pool, before);
    assert.deepEqual((await look(pool)).left, before.left);
  } finally {
    await pool.end();
  }
}

tests['a pool: a connection is out until the release'] = () => withPool(async (locks, pool, before) => {
  await locks.lock('report').run(async (lock) => {
    assert(!await isFree('report'));
    assert.equal(pool.idleCount, 0);
    assert(await lock.isHeld());
  });
  assert(await isFree('report'));
  assert.equal((await look(pool)).pid, before.pid);
  await assert.rejects(locks.lock('report').run(() => { throw new TypeError(); }), TypeError);
  assert.equal((await look(pool)).pid, before.pid);
});

tests['a pool: a wait that has ended leaves nothing'] = () => withPool(async (locks, pool, before) => {
  await busy('busy', async () => {
    for (const options of [{}, { ttl: 3_600_000 }]) {
      for (const timeout of [0, 10])
        await assert.rejects(locks.lock('busy', { timeout, ...options }).acquire(), LockTimeout);
      assert.equal((await look(pool)).pid, before.pid);
      const giving = new AbortController();
      const waiting = assert.rejects(locks.lock('busy', options).acquire({ signal: giving.signal }), { code: '57014' });
      await waits('busy');
      giving.abort();
      await waiting;
      assert.equal(await admin("SELECT count(*)::integer FROM dlock_locks('busy')"), 1);
    }
  });
  assert(await isFree('busy'));
});

tests['a pool: a connection that broke is replaced'] = () => withPool(async (locks, pool, before) => {
  await assert.rejects(locks.lock('report').run(terminate), LockLost);
  const { pid } = await look(pool);
  assert.notEqual(pid, before.pid);
});

tests['a pool: a connection that cannot be cleaned is replaced'] = () => withPool(async (locks, pool, before) => {
  let lent;
  pool.once('acquire', (taken) => { lent = taken; });
  await assert.rejects(locks.lock('report').run(() => lent.query('SET search_path TO nowhere')), { code: '42883' });
  const { pid } = await look(pool);
  assert.notEqual(pid, before.pid);
});

tests['a pool: what it cannot give is waited for with patience'] = () => withPool(async (locks, pool) => {
  const hasty = new Locks(pool, { patience: 10 });
  await locks.lock('report').run(async () => {
    await assert.rejects(hasty.resize('other', 3), ConnectionLost);
    const giving = new AbortController();
    const waiting = assert.rejects(locks.lock('other').acquire({ signal: giving.signal }), { code: '57014' });
    giving.abort();
    await waiting;
  });
});

tests['a pool: the heartbeat keeps a connection, and a lease gives its own back'] = async () => {
  const pool = newPool(2, { connectionTimeoutMillis: TIMEOUT });
  const locks = new Locks(pool, { patience });
  await locks.lock('job', KEPT).run(async (lock) => {
    await untilRenewed(lock.fence);
    (await pool.connect()).release();
    await terminate();
    await untilRenewed(lock.fence);
    lock.check();
  });
  await locks.lease(KEPT).run(async (lease) => {
    await untilRenewed(lease.id);
    const client = await pool.connect();
    await client.query('SELECT 1');
    client.release();
    await lease.lock('a').run(async () => {
      assert.equal(await admin('SELECT held FROM dlock_leases'), 1);
      (await pool.connect()).release();
    });
  });
  await until(() => pool.idleCount === pool.totalCount, 'the connections to come back');
  const clients = [await pool.connect(), await pool.connect()];
  for (const client of clients) {
    assert.equal((await client.query('SHOW client_connection_check_interval')).rows[0]
      .client_connection_check_interval, '0');
    client.release();
  }
  await pool.end();
};

tests['a pool: nothing is queued or listened to on what comes back'] = () => withPool(async (locks, pool, before) => {
  for (let n = 0; n < 2; n++) {
    const tickets = locks.tickets();
    const ticket = await tickets.enqueue('queue');
    assert.equal((await tickets.next({ timeout: TIMEOUT })).ticket, ticket);
    await tickets.watch('other');
    assert.equal((await tickets.next({ timeout: TIMEOUT })).event, 'free');
    await tickets.close();
    const after = await look(pool);
    assert.equal(after.pid, before.pid);
    assert.deepEqual(after.left, before.left);
  }
});

tests['a function is asked for each new connection'] = async () => {
  let asked = 0;
  const locks = new Locks(() => ({ application_name: `token-${asked++}` }), { patience });
  await locks.lock('job', KEPT).run(async (lock) => {
    await untilRenewed(lock.fence);
    const before = asked;
    await terminate();
    await untilRenewed(lock.fence);
    assert(asked > before);
    assert.equal(await admin("SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'token-%'"),
      `token-${asked - 1}`);
  });
  const made = [];
  const connecting = new Locks(async () => {
    const client = new pg.Client();
    made.push(client);
    await client.connect();
    return client;
  }, { patience });
  await connecting.lock('report').run(async () => assert(!await isFree('report')));
  await connecting.lock('job', KEPT).run((lock) => untilRenewed(lock.fence));
  await until(() => made.every((client) => client.ended), 'them to be closed');
};

tests['sources that give nothing are refused'] = async () => {
  for (const source of [7, null, new pg.Client()]) assert.throws(() => new Locks(source), BadArgument);
  for (const made of [7, new pg.Client(), () => {}])
    await assert.rejects(new Locks(() => made).lock('a').acquire(), BadArgument);
  await assert.rejects(new Locks(() => { throw new TypeError('no token'); }).lock('a').acquire(), TypeError);
  assert.throws(() => new Locks([newPool(1), newPool(1)]), BadArgument);
  assert.throws(() => new Calls(newPool(1)), BadArgument);
  assert.throws(() => new Lock({}, 'a', { scope: 'transaction' }), BadArgument);
};

//
// The program's transactions
//

const knex = Knex({ client: 'pg', connection: {}, pool: { min: 0, max: 1 } });
const sql = postgres({ max: 1, onnotice: () => {}, host: process.env.PGHOST });
const client = new pg.Client({ application_name: 'program' });
const source = new DataSource({ type: 'postgres', applicationName: 'program', database: process.env.PGDATABASE, host: process.env.PGHOST,
  port: Number(process.env.PGPORT), username: process.env.PGUSER });
const sequelize = new Sequelize({
  dialect: 'postgres', logging: false, database: process.env.PGDATABASE, host: process.env.PGHOST,
  port: process.env.PGPORT, username: process.env.PGUSER });

await client.connect();
await source.initialize();

async function overClient(wrapped, work) {
  await client.query('BEGIN');
  try {
    const result = await work(wrapped);
    await client.query('COMMIT');
    return result;
  } catch (error) {
    await client.query('ROLLBACK');
    throw error;
  }
}

// Each runs work in a transaction, with an object that executes SQL in it.
const transactions = {
  'node-postgres': (work) => overClient(client, work),
  // like Prisma's client of a transaction: its types of numbers, and no results of type void
  'the interface of Prisma': (work) => overClient({
    async $queryRawUnsafe(text, ...values) {
      const { rows } = await client.query(text, values);
      for (const value of Object.values(rows[0])) assert.equal(typeof value, 'string');
      return rows;
    },
    $transaction() {}, // for nested ones
  }, work),
  'a function': (work) => overClient(async (text, values) => (await client.query(text, values)).rows[0].value, work),
  knex: (work) => knex.transaction(work),
  'postgres.js': (work) => sql.begin(work),
  typeorm: (work) => source.transaction(work),
  sequelize: (work) => sequelize.transaction((transaction) => work((text, values) =>
    sequelize.query(text, { bind: values, transaction, type: QueryTypes.SELECT }))),
};

for (const [title, begin] of Object.entries(transactions)) {
  tests[`${title}: locks and guards in a transaction`] = async () => {
    await begin(async (db) => {
      const calls = new Calls(db);
      assert(await calls.xactAcquire('account/7', { timeout: TIMEOUT, info: 'me' }) > 0);
      assert(!await isFree('account/7'));
      assert.equal(await calls.isHeld('account/7'), true);
      assert.equal(await calls.isHeld('account/8'), false);
    });
    assert(await isFree('account/7'));
    await begin(async (db) => {
      const fences = await new Calls(db).xactAcquireAll(['b', 'a"\\,{}']);
      assert(fences.every((fence) => fence > 0) && fences.length === 2);
      assert(!await isFree('a"\\,{}'));
    });
    await assert.rejects(begin(async (db) => {
      const lock = await new Lock(db, 'account/7', { scope: 'transaction' }).acquire();
      assert(!await isFree('account/7'));
      assert(await lock.isHeld());
      await lock.setInfo('two');
      await lock.downgrade();
      assert.equal(await modeOf('account/7'), 'shared two');
      await lock.release();
      assert(!await isFree('account/7'));
      throw new TypeError('the program fails');
    }), TypeError);
    assert(await isFree('account/7'));
    await busy('busy', () => assert.rejects(
      begin((db) => new Calls(db).xactAcquire('busy', { timeout: 0 })), LockTimeout));
    await new Locks().lock('job', { ttl: 3_600_000 }).run(async (lock) => {
      await begin((db) => lock.guard(db));
      await begin((db) => new Calls(db).guard(lock));
      await begin((db) => new Calls(db).guard(lock.name, lock.fence));
    });
    await assert.rejects(begin((db) => new Calls(db).guard('job', 1)), LockLost);
  };
}

//
// Other calls of a program
//

const locks = new Locks({}, { patience });

tests['locked: each call has its own lock'] = async () => {
  const report = locks.locked('report', async (word, again) => {
    assert(!await isFree('report'));
    if (again) await assert.rejects(report(word, false), LockTimeout);
    return word + word;
  }, { timeout: 0 });
  assert.equal(await report('a', true), 'aa');
  const account = locks.locked((number) => `account/${number}`, async (number) => {
    assert(!await isFree(`account/${number}`));
    throw new TypeError();
  }, KEPT);
  await assert.rejects(account(7), TypeError);
};

tests['open: a failure ends a close, and a cancel after the answer closes the lease'] = async () => {
  const nowhere = new Locks('postgres://127.0.0.1:1', { patience: 0 }).lease(KEPT);
  await Promise.all([assert.rejects(nowhere.open(), ConnectionLost), nowhere.close()]);
  const giving = new AbortController();
  const cancelling = new Locks(async () => {
    const connection = new pg.Client();
    await connection.connect();
    const query = connection.query.bind(connection);
    connection.query = (...values) => query(...values).finally(() => giving.abort());
    return connection;
  }, { patience });
  await assert.rejects(cancelling.lease(KEPT).open({ signal: giving.signal }), { code: '57014' });
  assert.equal(await admin('SELECT count(*)::integer FROM dlock_leases'), 0);
};

tests['open: a call that an earlier opening has left uses another connection'] = async () => {
  let opening, leave;
  const left = new Promise((resolve) => { leave = resolve; });
  // the first opening; the call that it leaves; the second opening; the repeated call
  const answers = [() => {}, () => left.then(() => { throw new ConnectionLost('no answer'); }), async () => {
    opening = now();
    leave();
    await until(() => !answers.length, 'the repeated call');
  }, () => {}];
  const pass = (text) => (/lease_open|set_info/.test(text) ? answers.shift()() : undefined);
  const lease = passing('dlock_', pass).lease({ ttl: 3_600_000 });
  await lease.open();
  const info = assert.rejects(lease.setInfo('one'), WrongState);
  await lease.close();
  await lease.open();
  await info;
  assert(lease.deadline <= opening + 0.99 * 3_600_000);
  await lease.close();
};

tests['a lock of a lease that is closed and opened meanwhile is lost'] = async () => {
  let lease;
  const answers = [() => { throw new LockTimeout('too late', '55P03'); }, async () => {
    await lease.close();
    await lease.open();
  }];
  lease = passing('dlock_lease_acquire', () => answers.shift()()).lease(KEPT);
  await lease.run(() => assert.rejects(lease.lock('a').acquire(), LockLost));
};

tests['a cancel that the server may read later closes the connection'] = async () => {
  const silent = createServer().listen(0, '127.0.0.1');
  await once(silent, 'listening');
  const given = new pg.Client();
  given.on('error', () => {});
  await given.connect();
  const giving = new AbortController();
  let waiting;
  await busy('a', async () => {
    waiting = assert.rejects(new Lock(given, 'a').acquire({ signal: giving.signal }), Cancelled);
    await waits('a');
    Object.assign(given, { host: '127.0.0.1', port: silent.address().port });
    giving.abort();
    await once(silent, 'connection');
  });
  await waiting;
  await until(() => isFree('a'));
  await assert.rejects(given.query('SELECT 1'));
  silent.close();
};

tests['a lock of a lease: a later request does not hide a doubt'] = async () => {
  let lease;
  const refuse = () => { throw new LockTimeout('too late', '55P03'); };
  // over the lease's connection: a lost answer, and the repetition; then over the lock's own
  const answers = [() => { throw new ConnectionLost('no answer'); }, refuse, async () => {
    await lease.lock('b').acquire();
    refuse();
  }];
  lease = passing('dlock_lease_acquire', () => answers.shift()?.()).lease(KEPT);
  await lease.run(async () => {
    await assert.rejects(lease.lock('a').acquire(), LockTimeout);
    assert.equal(answers.length, 0);
    await until(() => isFree('a'));
    assert(!await isFree('b'));
  });
};

tests['a lease whose connection is busy: other calls do not wait longer than they may'] = async () => {
  let leave, first;
  const left = new Promise((resolve) => { leave = resolve; });
  const lease = passing('dlock_set_info', () => left).lease({ ttl: 3_600_000 });
  const acquire = (name, options, waiting) => lease.lock(name, options).acquire(waiting).then((lock) => {
    first ??= name;
    return lock;
  });
  await lease.run(async () => {
    const busy = lease.setInfo('one');
    await until(async () => await admin('SELECT info FROM dlock_leases') === 'one');
    const giving = new AbortController();
    const all = [acquire('patient'), acquire('hasty', { timeout: 0 })];
    const cancelled = acquire('a', {}, { signal: giving.signal });
    giving.abort();
    await assert.rejects(cancelled, Cancelled);
    assert.equal(first, undefined);
    await all[1];
    assert.equal(first, 'hasty');
    first = undefined;
    // a call that has used another connection shows nothing about the lease's
    all.push(acquire('later'));
    await all[0];
    assert.equal(first, 'patient');
    leave();
    await Promise.all([...all, busy]);
  });
};

tests['an undone request: another lease keeps the lock of the same owner'] = () => locks.lease(KEPT).run((one) =>
  locks.lease(KEPT).run(async (two) => {
    const mine = { owner: 'me' };
    const lock = await one.lock('a', mine).acquire();
    for (const other of [two.lock('a', mine), locks.lock('a', { ...mine, ...KEPT })]) {
      const giving = new AbortController();
      const waiting = assert.rejects(other.acquire({ signal: giving.signal }), { code: '57014' });
      await waits('a');
      giving.abort();
      await waiting;
    }
    await lock.release();
    const failing = passing('dlock_ttl_acquire', () => { throw new TypeError(); });
    await assert.rejects(failing.lock('a', { ...mine, ...KEPT }).acquire(), TypeError);
    assert(await isFree('a'));
  }));

tests['a release without an answer: the owner gets no lock until it is repeated'] = async () => {
  const fail = () => { throw new TypeError('no answer'); };
  const answers = [fail, fail];
  const lock = passing('dlock_release_ticket', () => answers.shift()?.()).lock('a', { ...KEPT, owner: 'me' });
  const { fence } = await lock.acquire();
  await assert.rejects(lock.release(), TypeError);
  await assert.rejects(lock.acquire(), TypeError);
  assert(await isFree('a'));
  await lock.run(() => assert(lock.fence > fence));
};

tests['an undo that is late: the next lock of the same owner stays'] = async () => {
  let next;
  const answers = [() => { throw new TypeError('no answer'); }];
  const connects = [() => {}, () => next.acquire()];
  const own = passing('dlock_ttl_acquire', () => answers.shift()?.(), () => connects.shift()?.());
  next = own.lock('a', { ...KEPT, owner: 'me' });
  await assert.rejects(own.lock('a', { ...KEPT, owner: 'me' }).acquire(), TypeError);
  assert(await next.isHeld());
  await next.release();
};

tests['a lock with a ttl: each call has a connection, and closes it'] = async () => {
  const made = [];
  const own = new Locks(async () => {
    const connection = new pg.Client();
    made.push(connection);
    await connection.connect();
    return connection;
  }, { patience });
  await own.lock('a', { ttl: 3_600_000 }).run(async (lock) => {
    assert.deepEqual(await Promise.all([lock.isHeld(), lock.isHeld(), lock.isHeld()]), [true, true, true]);
    await until(() => made.every((connection) => connection.ended), 'them to be closed');
  });
};

tests['an observer that fails, whatever it throws: a warning'] = async () => {
  for (const [failure, expected] of [[new RangeError('expected'), 'expected'], ['expected', 'expected'],
    [undefined, 'a callback threw undefined'], [Symbol('x'), 'a callback threw Symbol(x)'],
    [{ [inspect.custom]() { throw new Error(); } }, 'a callback threw a value that cannot be shown']])
    for (const observer of [() => Promise.reject(failure), () => { throw failure; }]) {
      let warnings = 0;
      const warn = ({ message }) => { warnings += message === expected; };
      process.on('warning', warn);
      await new Locks({}, { patience, observer }).lock('a').run(() => {});
      await until(() => warnings === 2, 'the warnings');
      process.off('warning', warn);
    }
};

tests['renew: the shorter ttl counts until the answer'] = async () => {
  for (const kept of [locks.lock('a', { ttl: 60_000 }), locks.lease({ ttl: 60_000 })]) {
    await kept.run(async () => {
      kept.heart.change(3_600_000, { interval: 1000, margin: 0 });
      assert(kept.deadline <= now() + 60_000);
      assert(kept.heart.life <= 60_000);
      kept.heart.change(10_000, { interval: 1000, margin: 0 });
      assert(kept.deadline <= now() + 10_000);
      kept.check();
    });
    await assert.rejects(kept.renew(), WrongState);
  }
  await assert.rejects(locks.lock('a', { ttl: 60_000 }).run(async (lock) => {
    await admin('SELECT dlock_force_release($1)', lock.fence);
    await lock.renew();
  }), LockLost);
};

tests['renew: a refused ttl, even if it is shorter, changes nothing'] = () =>
  locks.lease({ ttl: 3_600_000 }).run(async (lease) => {
    const { deadline } = lease;
    const { life } = lease.heart;
    lease.send = async () => { throw new BadArgument('refused', '22023'); };
    await assert.rejects(lease.renew(1_800_000), BadArgument);
    lease.send = () => assert.fail('the client refuses it');
    for (const ttl of [99, NaN, Infinity, '1800000']) await assert.rejects(lease.renew(ttl), BadArgument);
    delete lease.send;
    assert(Math.abs(lease.deadline - deadline) < 1);
    assert.equal(lease.heart.life, life);
  });

tests['renew: a refusal restores nothing after a lost answer'] = () => {
  const errors = [new ConnectionLost('no answer'), new BadArgument('refused', '22023')];
  const losing = passing('dlock_renew($1', () => { throw errors.shift(); });
  return losing.lease({ ttl: 3_600_000 }).run(async (lease) => {
    await assert.rejects(lease.renew(1_800_000), BadArgument);
    assert.equal(errors.length, 0);
    assert(lease.deadline <= now() + 1_800_000);
  });
};

tests['renew: nor does a refused reconnection'] = () => {
  let connections = 0;
  const losing = passing('dlock_renew($1', () => { throw new ConnectionLost('no answer'); }, () => {
    connections++;
    if (connections === 2) throw new NotAllowed('refused', '42501');
  });
  return losing.lease({ ttl: 3_600_000 }).run(async (lease) => {
    await assert.rejects(lease.renew(1_800_000), NotAllowed);
    assert.equal(connections, 2);
    assert(lease.deadline <= now() + 1_800_000);
  });
};

tests['renew: an attempt without an answer limits all later ones'] = () => {
  const errors = [new ConnectionLost('no answer')];
  const losing = passing('dlock_renew($1', () => { for (const error of errors.splice(0)) throw error; });
  return losing.lease({ ttl: 3_600_000 }).run(async (lease) => {
    await lease.renew(1_800_000);
    assert.equal(errors.length, 0);
    await lease.renew(7_200_000);
    assert(lease.deadline <= now() + 1_800_000);
    await lease.renew(900_000);
    assert(lease.heart.interval <= 300_000);
  });
};

tests['renew: an answer for an earlier hold does not concern the next one'] = async () => {
  const lock = locks.lock('a', { ttl: 3_600_000 });
  for (const kept of [null, 0]) {
    await lock.acquire();
    let answer;
    lock.send = () => new Promise((answered) => { answer = answered; });
    const renewed = lock.renew(1_800_000);
    await sleep(0);
    await lock.release();
    await lock.acquire();
    answer([kept, now()]);
    await (kept === null ? assert.rejects(renewed, WrongState) : renewed);
    lock.check();
    assert.equal(lock.ttl, 3_600_000);
    await lock.release();
  }
};

tests['renew: an answer during the release is no loss'] = async () => {
  let answer, renewed;
  const lock = passing('dlock_release_ticket', () => {
    answer([null, now()]);
    return renewed;
  }).lock('a', { ttl: 3_600_000 });
  await lock.acquire();
  lock.send = () => new Promise((answered) => { answer = answered; });
  renewed = assert.rejects(lock.renew(), WrongState);
  await sleep(0);
  await lock.release();
  assert(!lock.lost.aborted);
};

tests['setInfo: an answer for an earlier hold does not concern the next one'] = async () => {
  const lock = locks.lock('a', { ttl: 3_600_000 });
  await lock.acquire();
  for (const change of [() => lock.setInfo('one'), () => lock.downgrade()]) {
    lock.send = async () => {
      delete lock.send;
      await lock.release();
      await lock.acquire();
      return [false];
    };
    await assert.rejects(change(), WrongState);
    lock.check();
  }
  lock.send = async () => [false];
  await assert.rejects(lock.setInfo('one'), LockLost);
  delete lock.send;
  await assert.rejects(lock.release(), LockLost);
  await admin("SELECT dlock_force_release(ticket) FROM dlock_locks('a')");
};

tests['a ttl that is not finite is refused'] = () => {
  for (const ttl of [NaN, Infinity, '60000'])
    for (const request of [() => locks.lock('a', { ttl, interval: 10, margin: 1 }),
      () => locks.lease({ ttl, interval: 10, margin: 1 })])
      assert.throws(request, BadArgument);
};

tests['renew: a call waits for an earlier one'] = () => locks.lease({ ttl: 3_600_000 }).run(async (lease) => {
  const answers = [];
  lease.send = () => new Promise((...answer) => { answers.push(answer); });
  const refused = assert.rejects(lease.renew(7_200_000), BadArgument);
  const renewed = lease.renew(1_800_000);
  await sleep(0);
  assert.equal(answers.length, 1);
  answers[0][1](new BadArgument('refused', '22023'));
  await refused;
  await until(() => answers.length === 2, 'the second call');
  answers[1][0]([0, now()]);
  await renewed;
  assert(lease.deadline <= now() + 1_800_000);
});

tests['downgrade, setInfo and isHeld'] = () => locks.lease({ ttl: 3_600_000 }).run(async (lease) => {
  for (const lock of [lease.lock('a'), new Lock(client, 'a')]) {
    assert.equal(await lock.isHeld(), false);
    await lock.run(async () => {
      assert.equal(await lock.isHeld(), true);
      await lock.setInfo('one');
      assert.equal(await modeOf('a'), 'exclusive one');
      await lock.setInfo(null);
      await lock.downgrade();
      assert.equal(await modeOf('a'), 'shared -');
      lock.check();
    });
  }
  await lease.setInfo('two');
  assert.equal(await admin('SELECT info FROM dlock_leases'), 'two');
});

tests['release: a lock that the server did not release stays held'] = async () => {
  const lock = new Lock(client, 'a');
  await client.query('BEGIN');
  await assert.rejects(lock.run(() => client.query('SELECT 1/0')), { code: '22012' });
  await assert.rejects(lock.release(), { code: '25P02' });
  await client.query('ROLLBACK');
  lock.check();
  assert(await lock.isHeld());
  await lock.release();
  assert(await isFree('a'));
};

tests['tickets: an abort and a close end a wait at once'] = async () => {
  let tickets = locks.tickets();
  const giving = new AbortController();
  const began = now();
  const aborted = assert.rejects(tickets.next({ signal: giving.signal, timeout: TIMEOUT }), { code: '57014' });
  giving.abort();
  await aborted;
  for (const pause of [0, 100]) {
    const waiting = assert.rejects(tickets.next({ timeout: TIMEOUT }), WrongState);
    await sleep(pause);
    await tickets.close();
    await waiting;
    tickets = locks.tickets();
  }
  assert(now() < began + TIMEOUT / 2);
};

tests['tickets of a lease: the heartbeat gives back what was broken off'] = async () => {
  let down = false;
  const failing = passing('dlock_lease_enqueue', () => {
    if (down) throw new ConnectionLost('no answer');
  }, () => {
    if (down) throw new NotAllowed('refused', '42501');
  });
  await failing.lease(KEPT).run(async (lease) => {
    const tickets = failing.tickets({ lease });
    await tickets.watch('other');
    down = true;
    await assert.rejects(tickets.enqueue('a'), NotAllowed);
    down = false;
    await until(() => isFree('a'));
    const ticket = await tickets.enqueue('a');
    assert(!await isFree('a'));
    down = true;
    await terminate();
    await assert.rejects(tickets.release(ticket), NotAllowed);
    down = false;
    await until(() => isFree('a'));
    await tickets.close();
  });
};

tests['tickets of a lease: an enqueue without an answer is repeated only until the patience ends'] = async () => {
  let refusals = 1;
  const failing = passing('dlock_lease_enqueue', () => { if (refusals-- > 0) throw new ConnectionLost('no answer'); });
  failing.patience = 0;
  await failing.lease(KEPT).run(async (lease) => {
    const tickets = failing.tickets({ lease });
    await assert.rejects(tickets.enqueue('a'), ConnectionLost);
    await until(() => isFree('a'));
    await tickets.close();
  });
};

tests['tickets of a session: a refused release can be repeated'] = async () => {
  let refusals = 1;
  const failing = passing('dlock_release_ticket', () => {
    if (refusals-- > 0) throw new Cancelled('refused', '57014');
  });
  const tickets = failing.tickets();
  const ticket = await tickets.enqueue('a');
  await assert.rejects(tickets.release(ticket), Cancelled);
  await assert.rejects(tickets.release(ticket), /was lost/); // because the server has executed the first one
  await tickets.close();
};

tests['tickets: a reconnection that was refused is repeated'] = async () => {
  let refusals = 0;
  const failing = passing('dlock_watch', () => { if (refusals-- > 0) throw new Cancelled('refused', '57014'); });
  const tickets = failing.tickets();
  const both = async () => {
    for (const heard = new Set(); heard.size < 2;) heard.add((await tickets.next({ timeout: TIMEOUT })).lock);
  };
  await tickets.watch('a');
  await tickets.watch('b');
  await both();
  refusals = 1;
  await terminate();
  await assert.rejects(tickets.next({ timeout: TIMEOUT }), Cancelled);
  await both();
  await tickets.close();
};

tests['tickets of a lease: all are lost with it'] = async () => {
  const lease = await locks.lease({ ttl: 3_600_000 }).open();
  const tickets = locks.tickets({ lease });
  for (const name of ['a', 'b']) {
    await tickets.enqueue(name);
    assert.equal((await tickets.next({ timeout: TIMEOUT })).event, 'granted');
  }
  await admin('SELECT dlock_force_close($1)', lease.id);
  await terminate();
  await sleep(100);
  for (let n = 0; n < 2; n++)
    assert(['lost', 'released'].includes((await tickets.next({ timeout: TIMEOUT })).event));
  await tickets.close();
  await lease.close();
};

tests['an acquire ends 5 seconds after its timeout'] = async () => {
  const silent = createServer((socket) => socket.resume().on('error', () => {})).listen(0, '127.0.0.1');
  await once(silent, 'listening');
  const hosts = Array(3).fill(`127.0.0.1:${silent.address().port}`);
  // connects late, and sets nothing in time
  const slow = async () => {
    await sleep(3000);
    const connection = new pg.Client();
    await connection.connect();
    const query = connection.query.bind(connection);
    connection.query = (statement) => query(/set_config/.test(statement.text) ? 'SELECT pg_sleep(8)' : statement);
    return connection;
  };
  const refusing = Array(20).fill('postgres://127.0.0.1:1');
  await Promise.all([`postgres://${hosts}`, slow, ...refusing].map(async (server) => {
    const began = now();
    await assert.rejects(new Locks(server, { patience }).lock('a', { timeout: 10 }).acquire(), ConnectionLost);
    assert(now() < began + 6500, `${now() - began} ms`);
  }).concat((async () => {
    const began = now();
    const tickets = new Locks(`postgres://${hosts}`, { patience: 10000 }).tickets();
    await assert.rejects(tickets.next({ timeout: 10 }), ConnectionLost);
    assert(now() < began + 6500, `${now() - began} ms`);
  })()));
  silent.close();
};

tests['tickets: a wait ends although no connection is made'] = async () => {
  let down = false;
  const hanging = passing('-', () => {}, () => down && new Promise(() => {}));
  hanging.patience = 0;
  const tickets = hanging.tickets();
  await tickets.watch('a');
  assert.equal((await tickets.next({ timeout: TIMEOUT })).event, 'free');
  down = true;
  await terminate();
  const giving = new AbortController();
  const aborted = assert.rejects(tickets.next({ signal: giving.signal }), Cancelled);
  await sleep(0);
  giving.abort();
  await aborted;
};

tests['tickets: a loss that nobody has waited for is told to the next call'] = async () => {
  let stuck, breaks;
  const tickets = passing('dlock_wait', () => stuck && new Promise((_, reject) => { breaks = reject; })).tickets();
  await tickets.enqueue('a');
  assert.equal((await tickets.next({ timeout: TIMEOUT })).event, 'granted');
  await busy('b', () => tickets.enqueue('b'));
  stuck = true;
  const giving = new AbortController();
  const aborted = [1, 2].map(() => assert.rejects(tickets.next({ signal: giving.signal }), Cancelled));
  await until(() => breaks);
  giving.abort();
  await Promise.all(aborted);
  await terminate();
  await sleep(10); // until the client has seen the end
  breaks(new Error('Connection terminated'));
  await assert.rejects(tickets.next({ timeout: TIMEOUT }), LockLost);
};

tests['tickets: an enqueue returns its ticket although the first look at it fails'] = async () => {
  let refusals = 1;
  const failing = passing('dlock_wait', () => { if (refusals-- > 0) throw new Cancelled('refused', '57014'); });
  const tickets = failing.tickets();
  const ticket = await tickets.enqueue('a');
  assert.deepEqual(await tickets.next({ timeout: TIMEOUT }), { event: 'granted', lock: 'a', ticket });
  await tickets.close();
};

tests['a timeout and an interval that are longer than a timer can wait'] = async () => {
  const day = 86_400_000;
  const warnings = [];
  const note = ({ message }) => warnings.push(message);
  process.on('warning', note);
  await other.query("ALTER ROLE app SET dlock.max_ttl TO '100d'");
  await locks.lock('a', { timeout: 30 * day, ttl: 90 * day }).run(async (lock) => {
    lock.heart.owe(lock.heart.request('b'));
    await until(() => !lock.heart.owed.size, 'the heartbeat');
  });
  await other.query('ALTER ROLE app RESET dlock.max_ttl');
  process.off('warning', note);
  assert.deepEqual(warnings, []);
};

tests['acquireAll: a request that goes on after its end leaves nothing'] = async () => {
  // The server does not notice the end of a connection through this proxy, and no cancel arrives there.
  const kept = [];
  const proxy = createServer((socket) => {
    const server = connect(`${other.host}/.s.PGSQL.${other.port}`);
    kept.push(server);
    socket.on('error', () => {}).pipe(server, { end: false });
    server.on('error', () => {}).pipe(socket);
  }).listen(0, '127.0.0.1');
  await once(proxy, 'listening');
  const stubborn = new Locks(async () => {
    const connection = new pg.Client({ host: '127.0.0.1', port: proxy.address().port });
    await connection.connect();
    return Object.assign(connection, { port: 1 });
  }, { patience });
  await stubborn.lease(KEPT).run(async (lease) => {
    await busy('b', async () => {
      await busy('a', async () => {
        const giving = new AbortController();
        const waiting = assert.rejects(lease.acquireAll(['a', 'b'], { signal: giving.signal }), Cancelled);
        await waits('a');
        giving.abort();
        await waiting;
        await assert.rejects(lease.acquireAll(['b']), WrongState);
        await untilRenewed(lease.id);
        await untilRenewed(lease.id);
      });
      await until(async () => !lease.heart.owed.size
        || await admin("SELECT count(*) = 2 FROM dlock_locks WHERE name = 'b'"), 'the session to go on');
    });
    await until(async () => !lease.heart.owed.size && await isFree('b'));
  });
  for (const server of kept) server.destroy();
  proxy.close();
};

tests['an election campaigns again if its lock is lost before the acquire ends'] = async () => {
  let losses = 1;
  const losing = passing('dlock_ttl_acquire', () => { if (losses-- > 0) throw new LockLost('lost', '55L01'); });
  assert.equal(await losing.election('a').run(() => 'led'), 'led');
};

tests['acquireAll: a cancel after the answer, or without a connection, leaves nothing in the heart'] = async () => {
  const giving = new AbortController();
  let down = false;
  const failing = passing('dlock_lease_acquire_all', () => giving.abort(), () => {
    if (down) throw new ConnectionLost('refused');
  });
  await failing.lease(KEPT).run(async (lease) => {
    await assert.rejects(lease.acquireAll(['a', 'b'], { signal: giving.signal }), Cancelled);
    assert.equal(lease.heart.members.size, 1);
    await until(() => !lease.heart.owed.size);
    failing.patience = 0;
    down = true;
    await assert.rejects(lease.acquireAll(['a', 'b']), ConnectionLost);
    assert.equal(lease.heart.owed.size, 0);
    down = false;
  });
};

tests['acquireAll: each is released by itself'] = async () => {
  await locks.lease({ ttl: 3_600_000 }).run(async (lease) => {
    const [one, two] = await lease.acquireAll(['b', 'a'], { info: 'me' });
    assert.deepEqual([one.name, two.name], ['b', 'a']);
    assert.equal(await modeOf('b'), 'exclusive me');
    await assert.rejects(lease.acquireAll(['c', 'a']), WrongState);
    await one.release();
    assert(await isFree('b'));
    assert(!await isFree('a'));
    await admin('SELECT dlock_force_release($1)', two.fence);
    await assert.rejects(two.release(), LockLost);
    await lease.acquireAll(['a', 'b', 'a']);
  });
  const reopened = locks.lease(KEPT);
  let before;
  await reopened.run(async () => { [before] = await reopened.acquireAll(['a']); });
  await reopened.run(async () => {
    await reopened.acquireAll(['a']);
    await assert.rejects(before.release(), LockLost);
    await assert.rejects(reopened.acquireAll(['a']), WrongState);
  });
  const calls = new Calls(client);
  for (const fence of await calls.acquireAll(['b', 'a'])) {
    assert.equal(await calls.downgrade(fence), true);
    assert.equal(await calls.setInfo(fence, 'x'), true);
    await calls.releaseTicket(fence);
    await assert.rejects(calls.releaseTicket(fence), LockLost);
  }
  assert.equal(await calls.renew(1), undefined);
  for (const ttl of [99, NaN, Infinity, '1800000']) await assert.rejects(calls.renew(1, ttl), BadArgument);
};

for (const [title, test] of Object.entries(tests)) {
  try {
    await test();
    await until(() => admin('SELECT count(*) = 0 FROM dlock_locks'), 'nothing to be left');
    console.log(`ok ${title}`);
  } catch (error) {
    console.log(`${error.stack ?? error}\nnot ok ${title}`);
    process.exitCode = 1;
    await admin('SELECT count(dlock_force_release(ticket)) FROM dlock_locks');
  }
}

await Promise.all([client.end(), knex.destroy(), sql.end(), source.destroy(), sequelize.close(), other.end()]);
