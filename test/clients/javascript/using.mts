// The client from TypeScript: its types, and `await using`

import assert from 'node:assert/strict';
import pg from 'pg';
import { Lock, LockTimeout, Locks, type WatchEvent } from 'dlock-client';

const locks = new Locks();
const client = new pg.Client();
let lock: Lock;

await client.connect();
{
  await using session = await locks.lock('session', { timeout: 1000, info: 'me' }).acquire();
  await using given = await new Lock(client, 'given').acquire({ signal: AbortSignal.timeout(600_000) });
  await using lease = await locks.lease({ ttl: 600_000 }).open();
  await using leased = await lease.lock('leased').acquire();
  await using tickets = locks.tickets({ lease });
  const ticket: number = await tickets.enqueue('queue');

  assert(session.held && given.held && leased.fence > lease.id);
  leased.onLost((lost) => console.log(lost.name));
  leased.check();
  const event = await tickets.next({ timeout: 600_000 });
  assert(event?.event === 'granted' && event.ticket === ticket);
  await given.release();
  await assert.rejects(locks.lock('session', { timeout: 0 }).acquire(),
    (error: unknown) => error instanceof LockTimeout && error.code === '55P03');
  lock = session;
}
assert(!lock.held);

const seen: WatchEvent[] = [];
for await (const event of locks.watch('session')) {
  seen.push(event);
  break;
}
const led: number = await locks.election('leader').run(async (leader) => leader.fence);
const { rows } = await client.query('SELECT count(*)::integer AS left FROM dlock_locks');
console.log(seen[0].event, led > 0, rows[0].left);
await client.end();
