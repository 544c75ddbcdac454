// An API that allows five calls at a time from all machines together
//
// Shows: a semaphore with slots, whose number an administrator changes while
// the program runs.
//
//     node limited.mjs URL COUNT       # calls URL/1 to URL/COUNT
//
// Start as many instances as you like.  Together, they never have more than
// five calls open.  To change the number for all instances, without a restart:
//
//     psql -c "SELECT dlock_set_slots('api', 2)"
//
// Each call holds a permit on its own lease.  If an instance dies, its permits
// become free after TTL seconds.  If a lease is lost, its call is aborted and
// repeated.
//
// PGHOST and so on name the server.  Needs the packages dlock-client and pg.

import { LockLost, Locks } from 'dlock-client';

const [url, count] = process.argv.slice(2);
const ttl = 1000 * Number(process.env.TTL ?? 30);
const callers = 8;      // in this instance; each has a connection while it waits
const locks = new Locks();
let next = 1;

async function call(n) {
  return locks.lock('api', { slots: 5, ttl, info: `call ${n}` }).run(async (permit) => {
    const response = await fetch(`${url}/${n}`, { signal: permit.lost });

    return response.text();
  });
}

async function caller() {
  while (next <= count) {
    const n = next++;
    let answer;

    while (answer === undefined) {
      try {
        answer = await call(n);
      } catch (error) {
        if (!(error instanceof LockLost)) throw error;
        console.log(n, 'lost its permit');
      }
    }
    console.log(n, answer);
  }
}

if (!(count > 0)) {
  console.error('usage: node limited.mjs URL COUNT');
  process.exit(2);
}
await Promise.all(Array.from({ length: callers }, caller));
console.log('done');
