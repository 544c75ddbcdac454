// Knex

import Knex from 'knex';

const knex = Knex({ client: 'pg', connection: {}, pool: { min: 0, max: 1 } });

export const errorClass = 'DatabaseError';
export const sqlstate = (error) => error.code;

export const pay = (name, timeout) => knex.transaction(async (trx) => {
  await trx.raw('SELECT dlock_xact_acquire(?, timeout => ?)', [name, timeout]);
  await trx('account').where('id', 7).decrement('balance', 10);
});

export const tryPay = (name) => knex.transaction(async (trx) => {
  const { fence } = await trx.first(trx.raw('dlock_try_xact_acquire(?) AS fence', [name]));
  if (fence === null) return 'busy';
  await trx('account').where('id', 7).decrement('balance', 10);
});

// A connection that is kept; what is forgotten on it is not left to the next one.
export async function withConnection(work) {
  const client = await knex.client.acquireConnection();
  try {
    return await work(client);
  } finally {
    await client.query('ROLLBACK; SELECT dlock_release_all()');
    await knex.client.releaseConnection(client);
  }
}

export const acquire = (name) => knex.raw('SELECT dlock_acquire(?)', [name]);

export const lease = {
  acquire: async (name, ms, owner) => (await knex.first(
    knex.raw('dlock_ttl_acquire(?, ?, owner => ?) AS fence', [name, `${ms} ms`, owner]))).fence,
  renew: async (fence) => (await knex.first(knex.raw('dlock_renew(?) AS kept', [fence]))).kept !== null,
  pay: (name, fence) => knex.transaction(async (trx) => {
    await trx.raw('SELECT dlock_guard(?, ?)', [name, fence]);
    await trx('account').where('id', 7).decrement('balance', 10);
  }),
  release: async (fence) => (await knex.first(knex.raw('dlock_release_ticket(?) AS was_held', [fence]))).was_held,
};

// Without `cancel`, the waiter stays in the queue.
export const abandon = (name) =>
  knex.raw('SELECT dlock_acquire(?)', [name]).timeout(100).catch((error) => error.name);
export const giveUp = (name) =>
  knex.raw('SELECT dlock_acquire(?)', [name]).timeout(100, { cancel: true }).catch((error) => error.name);

export const raise = (code) => knex.raw('SELECT raise(?)', [code]);
export const seconds = async (value) =>
  (await knex.first(knex.raw('extract(epoch FROM ?::interval)::integer AS seconds', [value]))).seconds;
export const close = () => knex.destroy();
