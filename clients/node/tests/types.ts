// The types of the client, as a program sees them. This is compiled with each way to find a module, but not run.

import pg from 'pg';
import { Calls, Lock, Locks, type Executes, type Observation } from 'dlock-client';

const pool = new pg.Pool();
const client = new pg.Client();

export async function sources(prisma: { $queryRawUnsafe<T>(query: string, ...values: any[]): Promise<T> }) {
  const all: Locks[] = [
    new Locks(), new Locks('postgres://db1,db2/app'), new Locks(pool), new Locks({ host: 'db1', port: '1,2' }),
    new Locks(async () => client), new Locks(() => ({ password: 'token' })), new Locks([pool, ''], { keys: ['a', 'b'] }),
    new Locks('', { patience: 1, observer: ({ what, ms }: Observation) => console.log(what, ms) })];
  const executes: Executes[] = [client, prisma, (text, values) => client.query(text, values)];
  const fence: number = await new Calls(executes[0]!).xactAcquire('a', { timeout: 10, slots: 3, permits: 1 });
  const fences: number[] = await new Calls(prisma).xactAcquireAll(['a', 'b'], { shared: true });
  return [all, fence, fences];
}

export async function uses(locks: Locks) {
  const lock: Lock = await locks.lock('a', { ttl: 1000, owner: 'b', interval: 10, margin: 1 }).acquire();
  const held: boolean = await lock.isHeld();
  await lock.renew(2000);
  await lock.setInfo(null);
  await lock.downgrade();
  await lock.guard(client);
  await new Lock(client, 'a', { scope: 'transaction', timeout: 0 }).acquire({ signal: AbortSignal.timeout(5) });
  const all: Lock[] = await locks.lease({ ttl: 1000 }).run((lease) => lease.acquireAll(['a', 'b'], { timeout: 0 }));
  const report: (word: string) => Promise<number> = locks.locked((word: string) => word, (word) => word.length);
  await locks.resize('a', null);
  return [held, all, report];
}

export function mistakes(locks: Locks, lock: Lock) {
  // @ts-expect-error
  locks.lock('a', { time_out: 1 });
  // @ts-expect-error
  locks.lock('a', { timeout: '1s' });
  // @ts-expect-error
  locks.lease({});
  // @ts-expect-error
  locks.election('a', { tll: 1 });
  // @ts-expect-error
  new Locks('', { patients: 1 });
  // @ts-expect-error
  new Locks(7);
  // @ts-expect-error
  new Calls(client).xactAcquire('a', { owner: 'b' });
  // @ts-expect-error
  new Calls(client).guard('a');
  // @ts-expect-error
  lock.guard(7);
  // @ts-expect-error
  lock.acquire({ timeout: 1 });
  // @ts-expect-error
  lock.fence = 7;
  // @ts-expect-error
  new Lock({ raw: async () => [] }, 'a', { scope: 'session' });
}
