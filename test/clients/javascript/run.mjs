// Locks with what JavaScript programs use. Each of the files beside this has, in the words of one library, what its
// programs do with dlock; here it is tested, the same for all. Their pools have one connection, so that who comes next
// has the same. test/t/client_javascript.pl starts this, with a server in the environment.

import assert from 'node:assert/strict';
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';
import { translate } from 'dlock-client';

const TIMEOUT = Number(process.env.PG_TEST_TIMEOUT_DEFAULT) * 1000;

// Somebody else
const other = new pg.Client({ user: 'admin' });
await other.connect();

async function ask(sql, ...values) {
  return Object.values((await other.query(sql, values)).rows[0])[0];
}

async function until(sql, ...values) {
  for (const end = performance.now() + TIMEOUT; !await ask(sql, ...values); await sleep(10))
    assert(performance.now() < end, `waited for ${sql}`);
}

const isFree = (name) => ask('SELECT dlock_try_xact_acquire($1) IS NOT NULL', name);
const balance = () => ask('SELECT balance FROM account');
const waits = (name) => until('SELECT count(*) = 1 FROM dlock_locks WHERE name = $1 AND NOT granted', name);

async function held(name, work) {
  await ask('SELECT dlock_acquire($1)', name);
  try {
    return await work();
  } finally {
    await ask('SELECT dlock_release_all()');
  }
}

async function fails(stack, code, work) {
  const error = await work().then(() => assert.fail('no error'), (error) => error);
  assert.equal(stack.sqlstate(error), code, error.stack);
  assert.equal(error.constructor.name, stack.errorClass);
  // the client's errors know where to look
  assert.equal(translate(error).code, code);
}

// A place in the queue, over a connection of node-postgres that is kept
async function turn(client, name) {
  let hear;
  const heard = () => new Promise((resolve) => { hear = resolve; });
  let news = heard();
  const tell = () => hear();
  client.on('notification', tell);      // first: it may come with the reply to the enqueue
  const { ticket } = (await client.query('SELECT dlock_enqueue($1) AS ticket', [name])).rows[0];
  while (!(await client.query("SELECT dlock_wait($1, '0') AS granted", [ticket])).rows[0].granted) {
    await news;
    news = heard();
  }
  client.off('notification', tell);
  return async () => { await client.query('SELECT dlock_release_ticket($1)', [ticket]); };
}

const checks = {
  async 'transaction scope: commit, and rollback'(stack) {
    const before = await balance();
    await stack.pay('account/7', '1 h');
    assert.equal(await balance(), before - 10);
    assert(await isFree('account/7'));
    await assert.rejects(stack.withConnection(async (client) => {
      await client.query('BEGIN');
      await client.query("SELECT dlock_xact_acquire('account/7')");
      assert(!await isFree('account/7'));
      throw new TypeError('the program has failed');
    }), TypeError);
    assert(await isFree('account/7'));
  },

  async 'timeout, and try'(stack) {
    const before = await balance();
    await held('account/7', async () => {
      await fails(stack, '55P03', () => stack.pay('account/7', '50 ms'));
      assert.equal(await stack.tryPay('account/7'), 'busy');
      assert.equal(await ask('SELECT count(*) FROM dlock_locks'), '1');
    });
    assert.equal(await balance(), before);
    assert.equal(await stack.tryPay('account/7'), undefined);
    assert.equal(await balance(), before - 10);
  },

  async 'session scope: released by whatever ends the block'(stack) {
    await assert.rejects(stack.withConnection(async (client) => {
      await client.query("SELECT dlock_acquire('report')");
      assert(!await isFree('report'));
      await client.query('SELECT 1 / 0');
    }), (error) => error.code === '22012');
    assert(await isFree('report'));
  },

  async 'the trap: a pool leaves the lock on the connection'(stack) {
    await stack.acquire('forgotten');
    assert(!await isFree('forgotten'));
    await stack.withConnection(async (client) => {
      const { rows } = await client.query("SELECT dlock_is_held('forgotten') AS held");
      assert.equal(rows[0].held, true, 'who comes next holds it');
    });
    // given back as it should be
    assert(await isFree('forgotten'));
  },

  async 'lease: renewed, guarded with, and refused once it is lost'(stack) {
    const before = await balance();
    const fence = await stack.lease.acquire('job', 3600000, 'job/17');
    assert.equal(await ask("SELECT ttl = '1 h' FROM dlock_leases"), true);
    assert(await stack.lease.renew(fence));
    await stack.lease.pay('job', fence);
    assert.equal(await balance(), before - 10);
    assert(await stack.lease.release(fence));
    assert.equal(await stack.lease.renew(fence), false);
    await fails(stack, '55L01', () => stack.lease.pay('job', fence));
    assert.equal(await balance(), before - 10);
  },

  async 'fences are strings'(stack) {
    const fence = await stack.lease.acquire('job', 3600000, 'job/17');
    assert.equal(typeof fence, 'string');
    assert(Number.isSafeInteger(Number(fence)));
    assert(await stack.lease.release(fence));
  },

  async 'ticket: enqueued, and awaited'(stack) {
    let waiting;
    const taken = async (release) => {
      assert(!await isFree('queue'));
      await release();
      assert(await isFree('queue'));
    };
    await held('queue', async () => {
      waiting = stack.turn ? stack.turn('queue').then(taken)
        : stack.withConnection(async (client) => taken(await turn(client, 'queue')));
      await waits('queue');
    });
    await waiting;
    // and where it is free: the grant comes at once
    if (stack.turn) await taken(await stack.turn('queue'));
    else await stack.withConnection(async (client) => taken(await turn(client, 'queue')));
  },

  async 'errors: each by its class and SQLSTATE'(stack) {
    for (const code of ['55P03', '40P01', '55L01', '42501', '25006', '40001'])
      await fails(stack, code, () => stack.raise(code));
  },

  async 'the trap: a bare number is seconds'(stack) {
    assert.equal(await stack.seconds(1000), 1000);
    assert.equal(await stack.seconds('1000 ms'), 1);
    await assert.rejects(() => stack.seconds(new Date()));
  },
};

// Where the library can give up
const givingUp = {
  async 'what is given up leaves the queue'(stack) {
    await held('busy', async () => {
      assert.match(await stack.giveUp('busy', () => waits('busy')), /^(57014|KnexTimeoutError)$/);
      await until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'");
    });
    assert(await isFree('busy'));
  },
};

const abandoning = {
  async 'the trap: given up by the client alone, it is granted later'(stack) {
    await held('busy', async () => {
      assert.match(await stack.abandon('busy'), /^(Query read timeout|KnexTimeoutError)$/);
      await waits('busy');
    });
    await until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy' AND granted");
    assert(await ask('SELECT dlock_force_release(ticket) FROM dlock_locks'));
  },
};

async function check(title, work) {
  try {
    await work();
    console.log(`ok ${title}`);
  } catch (error) {
    console.log(`${error.stack ?? error}\nnot ok ${title}`);
    process.exitCode = 1;
    await ask('SELECT count(dlock_force_release(ticket)) FROM dlock_locks');
  }
}

for (const name of ['node_postgres', 'postgres_js', 'knex', 'sequelize', 'typeorm', 'drizzle']) {
  const stack = await import(`./${name}.mjs`);
  const all = { ...checks, ...stack.giveUp && givingUp, ...stack.abandon && abandoning };
  for (const [title, work] of Object.entries(all)) await check(`${name}, ${title}`, () => work(stack));
  await stack.close();
  await check(`${name}, nothing is left`, () => until('SELECT count(*) = 0 FROM dlock_locks'));
}

await other.end();
