// Sequelize

import { QueryTypes, Sequelize } from 'sequelize';

const { PGDATABASE, PGUSER, PGHOST, PGPORT } = process.env;
const sequelize = new Sequelize(PGDATABASE, PGUSER, '', {
  dialect: 'postgres', host: PGHOST, port: Number(PGPORT), logging: false, pool: { max: 1 },
});

export const errorClass = 'DatabaseError';
export const sqlstate = (error) => error.parent.code;

const ask = (text, bind, transaction) =>
  sequelize.query(text, { bind, transaction, plain: true, type: QueryTypes.SELECT });
const withdraw = (transaction) =>
  sequelize.query('UPDATE account SET balance = balance - 10 WHERE id = 7', { transaction });

// Pass the transaction everywhere.
export const pay = (name, timeout) => sequelize.transaction(async (transaction) => {
  await ask('SELECT dlock_xact_acquire($1, timeout => $2)', [name, timeout], transaction);
  await withdraw(transaction);
});

export const tryPay = (name) => sequelize.transaction(async (transaction) => {
  const { fence } = await ask('SELECT dlock_try_xact_acquire($1) AS fence', [name], transaction);
  if (fence === null) return 'busy';
  await withdraw(transaction);
});

// A connection that is kept; what is forgotten on it is not left to the next one.
export async function withConnection(work) {
  const client = await sequelize.connectionManager.getConnection();
  try {
    return await work(client);
  } finally {
    await client.query('ROLLBACK; SELECT dlock_release_all()');
    sequelize.connectionManager.releaseConnection(client);
  }
}

export const acquire = (name) => ask('SELECT dlock_acquire($1)', [name]);

export const lease = {
  acquire: async (name, ms, owner) =>
    (await ask('SELECT dlock_ttl_acquire($1, $2, owner => $3) AS fence', [name, `${ms} ms`, owner])).fence,
  renew: async (fence) => (await ask('SELECT dlock_renew($1) AS kept', [fence])).kept !== null,
  pay: (name, fence) => sequelize.transaction(async (transaction) => {
    await ask('SELECT dlock_guard($1, $2)', [name, fence], transaction);
    await withdraw(transaction);
  }),
  release: async (fence) => (await ask('SELECT dlock_release_ticket($1) AS was_held', [fence])).was_held,
};

export const raise = (code) => ask('SELECT raise($1)', [code]);
export const seconds = async (value) =>
  (await ask('SELECT extract(epoch FROM $1::interval)::integer AS seconds', [value])).seconds;
export const close = () => sequelize.close();
