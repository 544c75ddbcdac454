// Drizzle, over node-postgres

import { eq, sql } from 'drizzle-orm';
import { drizzle } from 'drizzle-orm/node-postgres';
import { integer, pgTable } from 'drizzle-orm/pg-core';
import pg from 'pg';

const pool = new pg.Pool({ max: 1 });
const db = drizzle(pool);
const account = pgTable('account', { id: integer().primaryKey(), balance: integer().notNull() });

export const errorClass = 'DrizzleQueryError';
export const sqlstate = (error) => error.cause.code;

const withdraw = (tx) => tx.update(account).set({ balance: sql`${account.balance} - 10` }).where(eq(account.id, 7));

export const pay = (name, timeout) => db.transaction(async (tx) => {
  await tx.execute(sql`SELECT dlock_xact_acquire(${name}, timeout => ${timeout})`);
  await withdraw(tx);
});

export const tryPay = (name) => db.transaction(async (tx) => {
  const { rows } = await tx.execute(sql`SELECT dlock_try_xact_acquire(${name}) AS fence`);
  if (rows[0].fence === null) return 'busy';
  await withdraw(tx);
});

// A connection that is kept, drizzle(client) for the ORM; what is forgotten on it is not left to the next one.
export async function withConnection(work) {
  const client = await pool.connect();
  try {
    return await work(client);
  } finally {
    const broken = await client.query('ROLLBACK; SELECT dlock_release_all()').then(() => undefined, (error) => error);
    client.release(broken);
  }
}

export const acquire = (name) => db.execute(sql`SELECT dlock_acquire(${name})`);

export const lease = {
  acquire: async (name, ms, owner) =>
    (await db.execute(sql`SELECT dlock_ttl_acquire(${name}, ${`${ms} ms`}, owner => ${owner}) AS fence`)).rows[0].fence,
  renew: async (fence) => (await db.execute(sql`SELECT dlock_renew(${fence}) AS kept`)).rows[0].kept !== null,
  pay: (name, fence) => db.transaction(async (tx) => {
    await tx.execute(sql`SELECT dlock_guard(${name}, ${fence})`);
    await withdraw(tx);
  }),
  release: async (fence) => (await db.execute(sql`SELECT dlock_release_ticket(${fence}) AS was_held`)).rows[0].was_held,
};

export const raise = (code) => db.execute(sql`SELECT raise(${code})`);
export const seconds = async (value) =>
  (await db.execute(sql`SELECT extract(epoch FROM ${value}::interval)::integer AS seconds`)).rows[0].seconds;
export const close = () => pool.end();
