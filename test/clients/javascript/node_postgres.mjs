// node-postgres, by itself

import pg from 'pg';

const pool = new pg.Pool({ max: 1 });

export const errorClass = 'DatabaseError';
export const sqlstate = (error) => error.code;

async function inTransaction(work) {
  const client = await pool.connect();
  try {
    await client.query('BEGIN');
    const result = await work(client);
    await client.query('COMMIT');
    return result;
  } catch (error) {
    await client.query('ROLLBACK').catch(() => {});
    throw error;
  } finally {
    client.release();
  }
}

export const pay = (name, timeout) => inTransaction(async (client) => {
  await client.query('SELECT dlock_xact_acquire($1, timeout => $2)', [name, timeout]);
  await client.query('UPDATE account SET balance = balance - 10 WHERE id = 7');
});

export const tryPay = (name) => inTransaction(async (client) => {
  const { rows } = await client.query('SELECT dlock_try_xact_acquire($1) AS fence', [name]);
  if (rows[0].fence === null) return 'busy';
  await client.query('UPDATE account SET balance = balance - 10 WHERE id = 7');
});

// A connection that is kept; what is forgotten on it is not left to the next one.
export async function withConnection(work) {
  const client = await pool.connect();
  try {
    return await work(client);
  } finally {
    const broken = await client.query('ROLLBACK; SELECT dlock_release_all()').then(() => undefined, (error) => error);
    client.release(broken);
  }
}

export const acquire = (name) => pool.query('SELECT dlock_acquire($1)', [name]);

export const lease = {
  acquire: async (name, ms, owner) => (await pool.query(
    'SELECT dlock_ttl_acquire($1, $2, owner => $3) AS fence', [name, `${ms} ms`, owner])).rows[0].fence,
  renew: async (fence) => (await pool.query('SELECT dlock_renew($1) AS kept', [fence])).rows[0].kept !== null,
  pay: (name, fence) => inTransaction(async (client) => {
    await client.query('SELECT dlock_guard($1, $2)', [name, fence]);
    await client.query('UPDATE account SET balance = balance - 10 WHERE id = 7');
  }),
  release: async (fence) => (await pool.query('SELECT dlock_release_ticket($1) AS was_held', [fence])).rows[0].was_held,
};

// The program goes on, and the waiter stays in the queue. What is right is a timeout of dlock's, as in pay().
const impatient = new pg.Client({ query_timeout: 100 });

export async function abandon(name) {
  await impatient.connect();
  return impatient.query('SELECT dlock_acquire($1)', [name]).catch((error) => error.message);
}

export const raise = (code) => pool.query('SELECT raise($1)', [code]);
export const seconds = async (value) =>
  (await pool.query('SELECT extract(epoch FROM $1::interval)::integer AS seconds', [value])).rows[0].seconds;

export async function close() {
  await impatient.end();
  await pool.end();
}
