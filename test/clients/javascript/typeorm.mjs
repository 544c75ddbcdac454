// TypeORM

import { DataSource } from 'typeorm';

const { PGDATABASE, PGUSER, PGHOST, PGPORT } = process.env;
const source = await new DataSource({
  type: 'postgres', host: PGHOST, port: Number(PGPORT), username: PGUSER, database: PGDATABASE,
  poolSize: 1, installExtensions: false,
}).initialize();

export const errorClass = 'QueryFailedError';
export const sqlstate = (error) => error.driverError.code;

const withdraw = (manager) => manager.query('UPDATE account SET balance = balance - 10 WHERE id = 7');

export const pay = (name, timeout) => source.transaction(async (manager) => {
  await manager.query('SELECT dlock_xact_acquire($1, timeout => $2)', [name, timeout]);
  await withdraw(manager);
});

export const tryPay = (name) => source.transaction(async (manager) => {
  const [{ fence }] = await manager.query('SELECT dlock_try_xact_acquire($1) AS fence', [name]);
  if (fence === null) return 'busy';
  await withdraw(manager);
});

// A connection that is kept; what is forgotten on it is not left to the next one.
export async function withConnection(work) {
  const runner = source.createQueryRunner();
  const client = await runner.connect();
  try {
    return await work(client);
  } finally {
    await client.query('ROLLBACK; SELECT dlock_release_all()');
    await runner.release();
  }
}

export const acquire = (name) => source.query('SELECT dlock_acquire($1)', [name]);

export const lease = {
  acquire: async (name, ms, owner) => (await source.query(
    'SELECT dlock_ttl_acquire($1, $2, owner => $3) AS fence', [name, `${ms} ms`, owner]))[0].fence,
  renew: async (fence) => (await source.query('SELECT dlock_renew($1) AS kept', [fence]))[0].kept !== null,
  pay: (name, fence) => source.transaction(async (manager) => {
    await manager.query('SELECT dlock_guard($1, $2)', [name, fence]);
    await withdraw(manager);
  }),
  release: async (fence) => (await source.query('SELECT dlock_release_ticket($1) AS was_held', [fence]))[0].was_held,
};

export const raise = (code) => source.query('SELECT raise($1)', [code]);
export const seconds = async (value) =>
  (await source.query('SELECT extract(epoch FROM $1::interval)::integer AS seconds', [value]))[0].seconds;
export const close = () => source.destroy();
