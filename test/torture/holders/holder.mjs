// One of the holders of ../clients.pl: holder.mjs PROXY SERVER END

import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';
import { DlockError, Locks } from 'dlock-client';

const [proxy, server, end] = process.argv.slice(2);
const dsn = (address) => `postgres://app@${address}/postgres`;
const locks = new Locks(dsn(proxy), { patience: 5000 });

async function write(scope, fence) {
  const db = new pg.Client({ connectionString: dsn(server), connectionTimeoutMillis: 10000 });
  db.on('error', () => {});
  try {
    await db.connect();
    await db.query('BEGIN');
    if (scope !== 'session') await db.query("SELECT dlock_guard('mixed', $1)", [fence]);
    const { rowCount } = await db.query('UPDATE proof SET fence = $1 WHERE fence < $1', [fence]);
    await db.query('COMMIT');
    console.log('wrote', scope, fence, rowCount);
  } catch (error) {
    console.log('failed', error.name);
  } finally {
    await db.end().catch(() => {});
  }
}

async function work(scope, lock) {
  for (let turn = 0; turn < 3; turn++) {
    const now = Date.now();
    lock.check();
    console.log('held', scope, lock.fence, now * 1000);
    if (turn === 1) await write(scope, lock.fence);
    await sleep(10);
  }
}

const scopes = [
  () => locks.lock('mixed', { timeout: 10000 }).run((lock) => work('session', lock)),
  () => locks.lock('mixed', { ttl: 3000, timeout: 10000 }).run((lock) => work('ttl', lock)),
  () => locks.lease({ ttl: 3000 })
    .run((lease) => lease.lock('mixed', { timeout: 10000 }).run((lock) => work('lease', lock))),
];

for (let turn = 0; Date.now() / 1000 < Number(end); turn++)
  try {
    await scopes[turn % 3]();
    console.log('done');
  } catch (error) {
    if (!(error instanceof DlockError)) throw error;
    console.log('failed', error.name);
  }
