// postgres.js

import postgres from 'postgres';

const sql = postgres({ max: 1, onnotice: () => {} });

export const errorClass = 'PostgresError';
export const sqlstate = (error) => error.code;

export const pay = (name, timeout) => sql.begin(async (tx) => {
  await tx`SELECT dlock_xact_acquire(${name}, timeout => ${timeout})`;
  await tx`UPDATE account SET balance = balance - 10 WHERE id = 7`;
});

export const tryPay = (name) => sql.begin(async (tx) => {
  const [{ fence }] = await tx`SELECT dlock_try_xact_acquire(${name}) AS fence`;
  if (fence === null) return 'busy';
  await tx`UPDATE account SET balance = balance - 10 WHERE id = 7`;
});

// A connection that is kept; what is forgotten on it is not left to the next one.
export async function withConnection(work) {
  const reserved = await sql.reserve();
  try {
    return await work({ query: async (text, values) => ({ rows: await reserved.unsafe(text, values) }) });
  } finally {
    await reserved.unsafe('ROLLBACK; SELECT dlock_release_all()');
    reserved.release();
  }
}

export const acquire = (name) => sql`SELECT dlock_acquire(${name})`;

export const lease = {
  acquire: async (name, ms, owner) =>
    (await sql`SELECT dlock_ttl_acquire(${name}, ${`${ms} ms`}, owner => ${owner}) AS fence`)[0].fence,
  renew: async (fence) => (await sql`SELECT dlock_renew(${fence}) AS kept`)[0].kept !== null,
  pay: (name, fence) => sql.begin(async (tx) => {
    await tx`SELECT dlock_guard(${name}, ${fence})`;
    await tx`UPDATE account SET balance = balance - 10 WHERE id = 7`;
  }),
  release: async (fence) => (await sql`SELECT dlock_release_ticket(${fence}) AS was_held`)[0].was_held,
};

// It listens over a connection of its own, so the ticket is a lease's, with a channel.
export async function turn(name) {
  let hear;
  const heard = () => new Promise((resolve) => { hear = resolve; });
  let news = heard();
  const { unlisten } = await sql.listen('turns', () => hear());
  const [{ ticket }] = await sql`SELECT dlock_ttl_enqueue(${name}, '1 h', channel => 'turns') AS ticket`;
  for (;;) {
    const [{ granted }] = await sql`SELECT dlock_wait(${ticket}, '0') AS granted`;
    if (granted) break;
    await news;
    news = heard();
  }
  await unlisten();
  return async () => { await sql`SELECT dlock_release_ticket(${ticket})`; };
}

// What is cancelled here is cancelled in the server, too.
export async function giveUp(name, isWaiting) {
  const query = sql`SELECT dlock_acquire(${name})`.execute();
  await isWaiting();
  query.cancel();
  return query.catch(sqlstate);
}

export const raise = (code) => sql`SELECT raise(${code})`;
export const seconds = async (value) =>
  (await sql`SELECT extract(epoch FROM ${value}::interval)::integer AS seconds`)[0].seconds;
export const close = () => sql.end();
